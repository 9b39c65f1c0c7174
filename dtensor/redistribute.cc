#include "shardweave/dtensor/redistribute.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "ATen/ops/cat.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/full_like.h"
#include "ATen/ops/view_as_complex.h"
#include "ATen/ops/view_as_real.h"
#include "ATen/ops/zeros_like.h"
#include "absl/strings/str_cat.h"
#include "shardweave/dtensor/observer.h"
#include "shardweave/dtensor/provenance.h"
#include "shardweave/dtensor/tensor_impl.h"

namespace shardweave::dtensor_internal {
namespace {

at::Tensor empty(const Dims& sizes, const at::Tensor& like) {
  return at::empty(array(sizes), like.options());
}

int64_t count(const Dims& sizes) {
  int64_t n = 1;
  for (int64_t size : sizes) n *= size;
  return n;
}

Placement on_dim_0(const Placement& p) {
  switch (p.kind()) {
    case PlacementKind::kStridedShard:
      return StridedShard(0, p.split_factor());
    case PlacementKind::kRaggedShard:
      return RaggedShard(0, p.sizes());
    default:
      return Shard(0);
  }
}

bool is_collective(const RedistributeStep& step) {
  return step.kind != StepKind::kSlice && step.kind != StepKind::kToPartial;
}

int64_t length(const Intervals& intervals) {
  int64_t n = 0;
  for (const Interval& interval : intervals) n += interval.size();
  return n;
}

// Writes `piece` to the places that `intervals` name along `dim`.
void place(const at::Tensor& target, int dim, const Intervals& intervals, const at::Tensor& piece) {
  int64_t at = 0;
  for (const Interval& i : intervals) {
    target.narrow(dim, i.begin, i.size()).copy_(piece.narrow(dim, at, i.size()));
    at += i.size();
  }
}

at::Tensor block(const at::Tensor& tensor, const ExchangeBlock& b) {
  at::Tensor view = tensor;
  for (size_t d = 0; d < b.shape.size(); ++d) view = view.narrow(d, b.offset[d], b.shape[d]);
  return view;
}

// One step as this rank sees it: local ones are run, the others become parcels.
class Packer {
 public:
  // `complex`: of pairs of real numbers.
  Packer(MeshContext& context, const RedistributeStep& step, absl::Span<const int64_t> sizes,
         bool complex)
      : context_(context),
        step_(step),
        sizes_(sizes),
        complex_(complex),
        mesh_dim_(step.mesh_dims[0]),
        num_ranks_(context.mesh().size(mesh_dim_)),
        index_(context.coordinate()[mesh_dim_]) {}

  // A step that is_local().
  at::Tensor run_here(const at::Tensor& local) const {
    if (step_.kind == StepKind::kSlice) return slice(local);
    if (step_.kind == StepKind::kToPartial) return to_partial(local);
    // A collective in which nobody sends anything: everybody has what it gives, or nothing at all.
    const Dims after = local_sizes(step_.after);
    return local.sizes() == array(after) ? local.contiguous() : empty(after, local);
  }

  Parcel pack(const at::Tensor& local) const {
    switch (step_.kind) {
      case StepKind::kAllGather:
        return all_gather(local.contiguous());
      case StepKind::kAllReduce:
        return all_reduce(local.contiguous());
      case StepKind::kReduceScatter:
        return reduce_scatter(local);
      case StepKind::kAllToAll:
        return all_to_all(local);
      case StepKind::kExchange:
        return exchange(local);
      case StepKind::kSlice:
      case StepKind::kToPartial:
        break;
    }
    throw Error(absl::InternalError(
        absl::StrCat("the redistribution step ", step_.to_string(), " sends nothing")));
  }

 private:
  Parcel parcel(OpKind op) const {
    Parcel p;
    p.op = op;
    p.mesh_dims = step_.mesh_dims;
    return p;
  }

  Dims local_sizes(const Layout& layout) const {
    return local_shape(layout, context_.mesh().shape(), context_.coordinate(), sizes_);
  }

  at::Tensor slice(const at::Tensor& local) const {
    const Placement& p = step_.after[mesh_dim_];
    return select(local, p.dim(), cut(p, local.size(p.dim()), num_ranks_, index_));
  }

  at::Tensor to_partial(const at::Tensor& local) const {
    switch (step_.after[mesh_dim_].reduce_op()) {
      case ReduceOp::kSum:
        return index_ == 0 ? local : at::zeros_like(local);
      case ReduceOp::kProduct:
        return index_ == 0 ? local : at::full_like(local, 1);
      case ReduceOp::kAvg:
      case ReduceOp::kMin:
      case ReduceOp::kMax:
        return local;
    }
    throw Error(absl::InternalError("unknown reduction"));
  }

  Parcel all_gather(const at::Tensor& local) const {
    const Placement& p = step_.before[mesh_dim_];
    const int dim = p.dim();
    const Dims sizes = local_sizes(step_.after);
    const int64_t inner = sizes[dim] == 0 ? 0 : count(sizes) / sizes[dim];
    Parcel parcel = this->parcel(OpKind::kAllGatherV);
    std::vector<Intervals> pieces;
    for (int64_t r = 0; r < num_ranks_; ++r) {
      pieces.push_back(cut(p, sizes[dim], num_ranks_, r));
      parcel.out_counts.push_back(length(pieces.back()) * inner);
    }
    int64_t outer = 1;
    for (int d = 0; d < dim; ++d) outer *= sizes[d];
    parcel.input = local;
    if (outer == 1 && p.kind() != PlacementKind::kStridedShard) {
      parcel.output = empty(sizes, local);
      return parcel;
    }
    parcel.output = at::empty({count(sizes)}, local.options());
    parcel.unpack = [sizes, dim, pieces = std::move(pieces),
                     counts = parcel.out_counts](const at::Tensor& flat) {
      at::Tensor result = empty(sizes, flat);
      Dims piece_sizes = sizes;
      int64_t offset = 0;
      for (size_t r = 0; r < pieces.size(); ++r) {
        piece_sizes[dim] = length(pieces[r]);
        place(result, dim, pieces[r], flat.narrow(0, offset, counts[r]).view(array(piece_sizes)));
        offset += counts[r];
      }
      return result;
    };
    return parcel;
  }

  int64_t group_size() const {
    int64_t n = 1;
    for (int m : step_.mesh_dims) n *= context_.mesh().size(m);
    return n;
  }

  // A reduction of pairs that no backend knows: everybody gets all inputs of what it wants, and
  // multiplies.
  Parcel multiply_here(Parcel parcel, const Dims& sizes) const {
    const int64_t n = group_size();
    parcel.out_counts.assign(n, count(sizes));
    parcel.output = at::empty({n * count(sizes)}, parcel.input.options());
    parcel.unpack = [sizes, n](const at::Tensor& flat) {
      Dims all = sizes;
      all.insert(all.begin(), n);
      return at::view_as_real(at::view_as_complex(flat.view(array(all))).prod(0));
    };
    return parcel;
  }
  // Sums and averages are those of the parts; complex numbers have no order.
  bool multiplies() const {
    return complex_ && step_.before[mesh_dim_].reduce_op() == ReduceOp::kProduct;
  }

  Parcel all_reduce(const at::Tensor& local) const {
    if (multiplies()) {
      Parcel parcel = this->parcel(OpKind::kAllGatherV);
      parcel.input = local;
      return multiply_here(std::move(parcel), Dims(local.sizes().begin(), local.sizes().end()));
    }
    Parcel parcel = this->parcel(OpKind::kAllReduce);
    parcel.reduce_op = step_.before[mesh_dim_].reduce_op();
    parcel.input = local;
    parcel.output = at::empty(local.sizes(), local.options());
    return parcel;
  }

  // What the cuts of the step's mesh dimensions leave of dimension `dim` of `local` to the rank
  // that has `coordinate` on them.
  Intervals kept(int dim, int64_t size, const Dims& coordinate) const {
    Placements placements;
    std::vector<int> order;
    Dims shape;
    for (int m : step_.mesh_dims) {
      const Placement& p = step_.after[m];
      placements.push_back(p.is_shard(dim) ? on_dim_0(p) : Replicate());
      shape.push_back(context_.mesh().size(m));
    }
    for (int m : step_.after.order()) {
      const auto found = std::find(step_.mesh_dims.begin(), step_.mesh_dims.end(), m);
      if (found != step_.mesh_dims.end()) {
        order.push_back(static_cast<int>(found - step_.mesh_dims.begin()));
      }
    }
    return local_intervals(value_or_throw(Layout::create(std::move(placements), std::move(order))),
                           shape, coordinate, {size}, 0);
  }

  Parcel reduce_scatter(const at::Tensor& local) const {
    Parcel parcel = this->parcel(OpKind::kReduceScatterV);
    parcel.reduce_op = step_.before[mesh_dim_].reduce_op();
    Dims group_shape;
    std::vector<int> dims;  // of the tensor, that are cut
    for (int m : step_.mesh_dims) {
      group_shape.push_back(context_.mesh().size(m));
      const int dim = step_.after[m].dim();
      if (std::find(dims.begin(), dims.end(), dim) == dims.end()) dims.push_back(dim);
    }
    std::vector<at::Tensor> pieces;
    bool in_order = dims.size() == 1 && dims[0] == 0;  // as they lie in `local`
    int64_t next_row = 0;
    Dims peer(group_shape.size(), 0);
    const int64_t num_peers = count(group_shape);
    for (int64_t r = 0; r < num_peers; ++r) {
      int64_t rest = r;
      for (size_t i = peer.size(); i-- > 0; rest /= group_shape[i]) peer[i] = rest % group_shape[i];
      at::Tensor piece = local;
      for (int dim : dims) {
        const Intervals rows = kept(dim, local.size(dim), peer);
        if (!rows.empty()) {
          in_order &= rows[0].begin == next_row;
          next_row = rows[0].end;
        }
        // Plain and ragged cuts leave one interval at most.
        piece = rows.empty() ? piece.narrow(dim, 0, 0)
                             : piece.narrow(dim, rows[0].begin, rows[0].size());
      }
      parcel.in_counts.push_back(piece.numel());
      pieces.push_back(std::move(piece));
    }
    if (in_order) {
      parcel.input = local.contiguous();
    } else {
      for (at::Tensor& piece : pieces) piece = piece.reshape({-1});
      parcel.input = at::cat(pieces);
    }
    const Dims after = local_sizes(step_.after);
    if (multiplies()) {
      parcel.op = OpKind::kAllToAllV;
      parcel.reduce_op = ReduceOp::kSum;
      return multiply_here(std::move(parcel), after);
    }
    parcel.output = empty(after, local);
    return parcel;
  }

  Parcel all_to_all(const at::Tensor& local) const {
    const Placement& from = step_.before[mesh_dim_];
    const Placement& to = step_.after[mesh_dim_];
    const Dims after = local_sizes(step_.after);
    Parcel parcel = this->parcel(OpKind::kAllToAllV);
    std::vector<at::Tensor> pieces;
    std::vector<Intervals> arriving;
    Dims piece_sizes = after;
    for (int64_t r = 0; r < num_ranks_; ++r) {
      pieces.push_back(
          select(local, to.dim(), cut(to, local.size(to.dim()), num_ranks_, r)).reshape({-1}));
      parcel.in_counts.push_back(pieces.back().numel());
      arriving.push_back(cut(from, after[from.dim()], num_ranks_, r));
      piece_sizes[from.dim()] = length(arriving.back());
      parcel.out_counts.push_back(count(piece_sizes));
    }
    parcel.input = at::cat(pieces);
    parcel.output = at::empty({count(after)}, local.options());
    parcel.unpack = [after, dim = from.dim(), arriving = std::move(arriving),
                     counts = parcel.out_counts](const at::Tensor& flat) {
      at::Tensor result = empty(after, flat);
      Dims sizes = after;
      int64_t offset = 0;
      for (size_t r = 0; r < arriving.size(); ++r) {
        sizes[dim] = length(arriving[r]);
        place(result, dim, arriving[r], flat.narrow(0, offset, counts[r]).view(array(sizes)));
        offset += counts[r];
      }
      return result;
    };
    return parcel;
  }

  Parcel exchange(const at::Tensor& local) const {
    ExchangePart part = exchange_part(step_.before, step_.after, step_.mesh_dims,
                                      context_.mesh().shape(), context_.coordinate(), sizes_);
    auto counts = [](const std::vector<std::vector<ExchangeBlock>>& peers) {
      std::vector<int64_t> result;
      for (const auto& blocks : peers) {
        int64_t n = 0;
        for (const ExchangeBlock& b : blocks) n += count(b.shape);
        result.push_back(n);
      }
      return result;
    };
    Parcel parcel = this->parcel(OpKind::kAllToAllV);
    std::vector<at::Tensor> pieces;
    for (const auto& blocks : part.send) {
      for (const ExchangeBlock& b : blocks) pieces.push_back(block(local, b).reshape({-1}));
    }
    parcel.input = pieces.empty() ? at::empty({0}, local.options()) : at::cat(pieces);
    parcel.in_counts = counts(part.send);
    parcel.out_counts = counts(part.recv);
    const Dims after = local_sizes(step_.after);
    parcel.output = at::empty({count(after)}, local.options());
    parcel.unpack = [after, recv = std::move(part.recv)](const at::Tensor& flat) {
      at::Tensor result = empty(after, flat);
      int64_t offset = 0;
      for (const auto& blocks : recv) {
        for (const ExchangeBlock& b : blocks) {
          block(result, b).copy_(flat.narrow(0, offset, count(b.shape)).view(array(b.shape)));
          offset += count(b.shape);
        }
      }
      return result;
    };
    return parcel;
  }

  MeshContext& context_;
  const RedistributeStep& step_;
  const absl::Span<const int64_t> sizes_;
  const bool complex_;
  const int mesh_dim_;       // of steps on a single mesh dimension
  const int64_t num_ranks_;  // along it
  const int64_t index_;      // this rank's coordinate on it
};

}  // namespace

at::Tensor select(const at::Tensor& tensor, int dim, const Intervals& intervals) {
  if (intervals.empty()) return tensor.narrow(dim, 0, 0);
  if (intervals.size() == 1) {
    return tensor.narrow(dim, intervals[0].begin, intervals[0].size());
  }
  std::vector<at::Tensor> pieces;
  for (const Interval& i : intervals) pieces.push_back(tensor.narrow(dim, i.begin, i.size()));
  return at::cat(pieces, dim);
}

Layout layout_for(const MeshContext& context, const Layout& layout, int64_t ndim,
                  const char* function) {
  const DeviceMesh& mesh = context.mesh();
  if (layout.mesh_ndim() != mesh.ndim()) {
    throw Error(function, absl::InvalidArgumentError(absl::StrCat(
                              layout.to_string(), " has ", layout.mesh_ndim(), " placements, ",
                              mesh.to_string(), " has ", mesh.ndim(), " dimensions")));
  }
  absl::StatusOr<Layout> counted = with_dims_of(layout, static_cast<int>(ndim));
  if (counted.ok()) return *std::move(counted);
  throw Error(function, counted.status());
}

RedistributePlan plan_for(const MeshContext& context, const Spec& from, const Layout& to) {
  return value_or_throw(plan_redistribute(from.layout, to, context.mesh().shape(), from.sizes,
                                          c10::elementSize(from.dtype), context.cost_model));
}

Work send(MeshContext& context, const Parcel& parcel, std::string_view tag) {
  Communicator& comm = context.communicator(parcel.mesh_dims);
  const Buffer in = comm_buffer(parcel.input);
  const Buffer out = comm_buffer(parcel.output);
  const CallOptions options{
      .timeout = absl::ZeroDuration(), .tag = tag, .fingerprint = fingerprint(context)};
  switch (parcel.op) {
    case OpKind::kAllReduce:
      return comm.all_reduce(in, out, parcel.reduce_op, options);
    case OpKind::kAllGatherV:
      return comm.all_gather_v(in, out, parcel.out_counts, options);
    case OpKind::kReduceScatterV:
      return comm.reduce_scatter_v(in, out, parcel.in_counts, parcel.reduce_op, options);
    case OpKind::kAllToAllV:
      return comm.all_to_all_v(in, parcel.in_counts, out, parcel.out_counts, options);
    default:
      break;
  }
  throw Error(absl::InternalError(
      absl::StrCat("redistribution does not use ", std::string(to_string(parcel.op)))));
}

PlanRun::PlanRun(MeshContext& context, const RedistributePlan& plan, at::Tensor local,
                 absl::Span<const int64_t> sizes)
    : context_(&context), plan_(&plan), sizes_(sizes.begin(), sizes.end()), given_(local) {
  if (!plan.steps.empty()) {
    if (local.is_conj()) local = local.resolve_conj();
    if (local.is_neg()) local = local.resolve_neg();
    if (local.is_complex()) {
      local = at::view_as_real(local);
      sizes_.push_back(2);
    }
  }
  start_ = local;
  local_ = std::move(local);
}

at::Tensor PlanRun::local() const {
  if (local_.is_same(start_)) return given_;
  const at::Tensor local = local_.contiguous();  // slices are views until here
  return given_.is_complex() ? at::view_as_complex(local) : local;
}

bool PlanRun::next(Parcel* parcel) {
  for (; step_ < plan_->steps.size(); ++step_) {
    const RedistributeStep& step = plan_->steps[step_];
    const Packer packer(*context_, step, sizes_, given_.is_complex());
    if (is_collective(step) && !step.is_local()) {
      *parcel = packer.pack(local_);
      return true;
    }
    local_ = packer.run_here(local_);
  }
  return false;
}

Sending PlanRun::sending() const {
  const RedistributeStep& step = plan_->steps[step_];
  return {to_string(step.kind),
          step.mesh_dims,
          step.bytes,
          given_.scalar_type(),
          absl::MakeConstSpan(sizes_).first(given_.dim()),
          step.before,
          step.after};
}

void PlanRun::arrived(const Parcel& parcel) {
  local_ = parcel.unpack ? parcel.unpack(parcel.output) : parcel.output;
  ++step_;
}

at::Tensor run_plan(MeshContext& context, const RedistributePlan& plan, at::Tensor local,
                    absl::Span<const int64_t> sizes, const Cause& cause) {
  PlanRun run(context, plan, std::move(local), sizes);
  for (Parcel parcel; run.next(&parcel);) {
    const CollectiveSpan span(context, cause, [&] { return run.sending(); });
    throw_if_error(send(context, parcel, cause.name).wait());
    run.arrived(parcel);
  }
  return run.local();
}

at::Tensor owned(at::Tensor local, const at::Tensor& given) {
  const size_t bytes = local.numel() * local.itemsize();
  if (!local.is_alias_of(given) && local.storage().nbytes() == bytes) return local;
  return local.clone();
}

at::Tensor redistributed(const at::Tensor& tensor, const Layout& layout, const Cause& cause) {
  const DTensorMeta& meta = meta_of(tensor);
  if (meta.spec->layout == layout) return tensor;
  SpecRef target = meta.context->with_layout(*meta.spec, layout);
  const RedistributePlan plan = plan_for(*meta.context, *meta.spec, layout);
  const About about(*meta.context, provenance_of(meta));
  at::Tensor local =
      owned(run_plan(*meta.context, plan, meta.local, meta.spec->sizes, cause), meta.local);
  at::Tensor result = wrap(std::move(local), std::move(target), meta.context);
  meta_of(result).came_from(provenance_of(meta));
  return result;
}

Layout gradient_layout(const Layout& layout) {
  Placements placements = layout.placements();
  for (Placement& p : placements) {
    if (p.is_partial()) p = Replicate();
  }
  return value_or_throw(Layout::create(std::move(placements), layout.order()));
}

DType comm_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
    case at::kComplexDouble:
      return DType::kF64;
    case at::kFloat:
    case at::kComplexFloat:
      return DType::kF32;
    case at::kHalf:
    case at::kComplexHalf:
      return DType::kF16;
    case at::kBFloat16:
      return DType::kBF16;
    case at::kFloat8_e4m3fn:
      return DType::kF8E4M3;
    case at::kFloat8_e5m2:
      return DType::kF8E5M2;
    case at::kLong:
      return DType::kI64;
    case at::kInt:
      return DType::kI32;
    case at::kShort:
      return DType::kI16;
    case at::kChar:
      return DType::kI8;
    case at::kByte:
      return DType::kU8;
    case at::kUInt64:
      return DType::kU64;
    case at::kUInt32:
      return DType::kU32;
    case at::kUInt16:
      return DType::kU16;
    case at::kBool:
      return DType::kBool;
    default:
      throw Error(absl::UnimplementedError(
          absl::StrCat("tensors of type ", c10::toString(dtype), " cannot be sent between ranks")));
  }
}

Buffer comm_buffer(const at::Tensor& contiguous) {
  Buffer buffer;
  buffer.data = contiguous.data_ptr();
  buffer.count = contiguous.numel() * (contiguous.is_complex() ? 2 : 1);
  buffer.dtype = comm_dtype(contiguous.scalar_type());
  buffer.device = {contiguous.is_cuda() ? DeviceType::kCuda : DeviceType::kCpu,
                   contiguous.is_cuda() ? contiguous.device().index() : 0};
  return buffer;
}

}  // namespace shardweave::dtensor_internal
