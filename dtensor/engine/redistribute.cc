#include "shardweave/dtensor/engine/redistribute.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "ATen/ops/cat.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/ones_like.h"
#include "ATen/ops/view_as_complex.h"
#include "ATen/ops/view_as_real.h"
#include "ATen/ops/zeros_like.h"
#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "shardweave/dtensor/engine/pack_schedule.h"
#include "shardweave/dtensor/engine/provenance.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "shardweave/dtensor/observe/observer.h"

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

bool is_collective(const RedistributeStep& step) {
  return step.kind != StepKind::kSlice && step.kind != StepKind::kToPartial;
}

// A schedule that takes more is worth less than the memory: uneven parts of some thousand ranks. One
// of even parts takes as little for any number of ranks.
constexpr int64_t kMaxKeptBytes = 1 << 19;

// Every rank gets an equal part, which lies in each in the same way.
bool is_even(const Placement& p, int64_t size, int64_t num_ranks) {
  // (Not by their product, which may be larger than any number.)
  return p.kind() != PlacementKind::kRaggedShard && size % num_ranks == 0 &&
         size / num_ranks % p.split_factor() == 0;
}

}  // namespace

// How one step that communicates packs and unpacks on this rank.
struct StepSchedule {
  Dims sizes;   // global, that it is for
  Dims before;  // of the local tensor
  Dims after;
  OpKind op = OpKind::kAllReduce;
  ReduceOp reduce_op = ReduceOp::kSum;
  std::vector<int64_t> in_counts;      // as CollectiveTransfer has them
  std::vector<int64_t> out_counts;     // likewise
  std::optional<PackSchedule> pack;    // none: it is sent as it lies
  std::optional<PackSchedule> unpack;  // none: what arrives is the result
  // A product of complex numbers, which no backend knows: everybody gets all inputs of what it wants,
  // so many, and multiplies. 0: it is none.
  int64_t factors = 0;

  int64_t bytes() const {
    const size_t counts = in_counts.capacity() + out_counts.capacity();
    return static_cast<int64_t>(counts * sizeof(int64_t)) + (pack ? pack->bytes() : 0) +
           (unpack ? unpack->bytes() : 0);
  }
};

namespace {

// One step as this rank sees it.
class Step {
 public:
  // `complex`: of pairs of real numbers.
  Step(const MeshContext& context, const RedistributeStep& step, absl::Span<const int64_t> sizes,
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

  // Any other.
  StepSchedule schedule() const {
    StepSchedule s;
    s.sizes.assign(sizes_.begin(), sizes_.end());
    s.before = local_sizes(step_.before);
    s.after = local_sizes(step_.after);
    switch (step_.kind) {
      case StepKind::kAllGather:
        all_gather(s);
        break;
      case StepKind::kAllReduce:
        all_reduce(s);
        break;
      case StepKind::kReduceScatter:
        reduce_scatter(s);
        break;
      case StepKind::kAllToAll:
        all_to_all(s);
        break;
      case StepKind::kExchange:
        exchange(s);
        break;
      case StepKind::kSlice:
      case StepKind::kToPartial:
        throw Error(absl::InternalError(
            absl::StrCat("the redistribution step ", step_.to_string(), " sends nothing")));
    }
    for (std::optional<PackSchedule>* packing : {&s.pack, &s.unpack}) {
      if (!packing->has_value()) continue;
      (*packing)->finish();
      if ((*packing)->is_in_order()) packing->reset();
    }
    return s;
  }

  int64_t group_size() const {
    int64_t n = 1;
    for (int m : step_.mesh_dims) n *= context_.mesh().size(m);
    return n;
  }

 private:
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
        if (index_ == 0) return local;
        if (!complex_) return at::ones_like(local);
        return at::view_as_real(at::ones_like(at::view_as_complex(local)));
      case ReduceOp::kAvg:
      case ReduceOp::kMin:
      case ReduceOp::kMax:
        return local;
    }
    throw Error(absl::InternalError("unknown reduction"));
  }

  // The parts of a tensor with local `sizes` that `p` gives to the ranks.
  PackSchedule parts(const Placement& p, const Dims& sizes) const {
    PackSchedule result(sizes);
    const int dim = p.dim();
    if (!is_even(p, sizes[dim], num_ranks_)) {
      for (int64_t r = 0; r < num_ranks_; ++r) {
        result.add_part(dim, cut(p, sizes[dim], num_ranks_, r));
      }
      return result;
    }
    // Of each of the pieces that are cut, as many as the split factor says, the rank's part.
    const int64_t pieces = p.split_factor(), part = sizes[dim] / pieces / num_ranks_;
    Dims split = sizes, shape = sizes;
    split[dim] /= pieces;
    split.insert(split.begin() + dim, pieces);
    shape[dim] = part;
    shape.insert(shape.begin() + dim, pieces);
    const PackSchedule::Repeat ranks{num_ranks_, static_cast<size_t>(dim) + 1, part};
    result.add_even_parts(split, shape, absl::MakeConstSpan(&ranks, 1));
    return result;
  }

  // How many elements each rank has of them.
  std::vector<int64_t> counts(const Placement& p, const Dims& sizes) const {
    Dims others = sizes;
    others[p.dim()] = 1;
    const int64_t each = count(others);
    std::vector<int64_t> result;
    for (int64_t r = 0; r < num_ranks_; ++r) {
      result.push_back(each * cut_size(p, sizes[p.dim()], num_ranks_, r));
    }
    return result;
  }

  void all_gather(StepSchedule& s) const {
    const Placement& p = step_.before[mesh_dim_];
    s.unpack = parts(p, s.after);
    s.op = OpKind::kAllGather;
    if (is_even(p, s.after[p.dim()], num_ranks_)) return;
    s.op = OpKind::kAllGatherV;
    s.out_counts = counts(p, s.after);
  }

  // Sums and averages are those of the parts; complex numbers have no order.
  bool multiplies() const {
    return complex_ && step_.before[mesh_dim_].reduce_op() == ReduceOp::kProduct;
  }

  void all_reduce(StepSchedule& s) const {
    s.reduce_op = step_.before[mesh_dim_].reduce_op();
    if (!multiplies()) return;
    s.op = OpKind::kAllGather;
    gather_factors(s);
  }

  void gather_factors(StepSchedule& s) const {
    s.reduce_op = ReduceOp::kSum;
    s.factors = group_size();
  }

  // The mesh dimensions of the step by which `layout` cuts one tensor dimension, outermost first.
  struct Cuts {
    int dim;
    absl::InlinedVector<size_t, 3> by;  // of step_.mesh_dims
  };
  std::vector<Cuts> cuts_of(const Layout& layout) const {
    std::vector<Cuts> cuts;
    for (int m : layout.order()) {
      const auto found = std::find(step_.mesh_dims.begin(), step_.mesh_dims.end(), m);
      if (found == step_.mesh_dims.end()) continue;
      const int dim = layout[m].dim();
      auto of_dim =
          std::find_if(cuts.begin(), cuts.end(), [&](const Cuts& c) { return c.dim == dim; });
      if (of_dim == cuts.end()) of_dim = cuts.insert(cuts.end(), Cuts{dim, {}});
      of_dim->by.push_back(found - step_.mesh_dims.begin());
    }
    return cuts;
  }

  // The parts of a tensor of `sizes` that the cuts give to the ranks of the step's group, if they are
  // plain and give all of them as much.
  std::optional<PackSchedule> even_parts(const std::vector<Cuts>& cuts, const Layout& layout,
                                         const Dims& sizes) const {
    Dims part = sizes;
    std::vector<PackSchedule::Repeat> ranks(step_.mesh_dims.size());
    for (const Cuts& c : cuts) {
      for (size_t i : c.by) {
        const int m = step_.mesh_dims[i];
        const int64_t n = context_.mesh().size(m);
        if (!layout[m].is_plain_shard() || !is_even(layout[m], part[c.dim], n)) return std::nullopt;
        part[c.dim] /= n;
        ranks[i] = {n, static_cast<size_t>(c.dim), part[c.dim]};
      }
    }
    PackSchedule result(sizes);
    result.add_even_parts(sizes, part, ranks);
    return result;
  }

  void reduce_scatter(StepSchedule& s) const {
    s.reduce_op = step_.before[mesh_dim_].reduce_op();
    const bool even = step_.mesh_dims.size() == 1 ? scatter_on_one(s) : scatter_jointly(s);
    s.op = even ? OpKind::kReduceScatter : OpKind::kReduceScatterV;
    if (!multiplies()) return;
    s.op = even ? OpKind::kAllToAll : OpKind::kAllToAllV;
    if (!even) s.out_counts.assign(group_size(), count(s.after));
    gather_factors(s);
  }

  // What goes to whom, on one mesh dimension and on several; whether all get as much.
  bool scatter_on_one(StepSchedule& s) const {
    const Placement& leaving = step_.after[mesh_dim_];
    s.pack = parts(leaving, s.before);
    if (is_even(leaving, s.before[leaving.dim()], num_ranks_)) return true;
    s.in_counts = counts(leaving, s.before);
    return false;
  }

  bool scatter_jointly(StepSchedule& s) const {
    const std::vector<Cuts> cuts = cuts_of(step_.after);
    Dims group_shape;
    for (int m : step_.mesh_dims) group_shape.push_back(context_.mesh().size(m));
    s.pack = even_parts(cuts, step_.after, s.before);
    if (s.pack.has_value()) return true;
    PackSchedule& pack = s.pack.emplace(s.before);
    Dims peer(group_shape.size(), 0), offset(s.before.size(), 0), shape = s.before;
    const int64_t num_peers = group_size();
    for (int64_t r = 0; r < num_peers; ++r) {
      int64_t rest = r;
      for (size_t i = peer.size(); i-- > 0; rest /= group_shape[i]) peer[i] = rest % group_shape[i];
      for (const Cuts& c : cuts) {
        offset[c.dim] = 0;
        shape[c.dim] = s.before[c.dim];
        for (size_t i : c.by) {
          // One interval at most: of plain and ragged cuts.
          const Intervals kept =
              cut(step_.after[step_.mesh_dims[i]], shape[c.dim], group_shape[i], peer[i]);
          if (kept.size() > 1) {
            throw Error(absl::InternalError(absl::StrCat("no joint step: ", step_.to_string())));
          }
          offset[c.dim] += kept.empty() ? 0 : kept[0].begin;
          shape[c.dim] = kept.empty() ? 0 : kept[0].size();
        }
      }
      pack.add_part(offset, shape);
      s.in_counts.push_back(count(shape));
    }
    return false;
  }

  void all_to_all(StepSchedule& s) const {
    const Placement& leaving = step_.after[mesh_dim_];
    const Placement& arriving = step_.before[mesh_dim_];
    s.pack = parts(leaving, s.before);
    s.unpack = parts(arriving, s.after);
    s.op = OpKind::kAllToAll;
    // Of the cuts, which are the same on all ranks; a rank that has nothing has equal parts of it.
    if (is_even(leaving, s.before[leaving.dim()], num_ranks_) &&
        is_even(arriving, s.after[arriving.dim()], num_ranks_)) {
      return;
    }
    s.op = OpKind::kAllToAllV;
    s.in_counts = counts(leaving, s.before);
    s.out_counts = counts(arriving, s.after);
  }

  static void add_blocks(const std::vector<std::vector<ExchangeBlock>>& peers,
                         PackSchedule& packing, std::vector<int64_t>& counts) {
    for (const std::vector<ExchangeBlock>& blocks : peers) {
      const int64_t before = packing.numel();
      for (const ExchangeBlock& b : blocks) packing.add_part(b.offset, b.shape);
      counts.push_back(packing.numel() - before);
    }
  }

  // Of an exchange after which all have what each of them had: none asks who gets what.
  bool gathers_all(const Layout& before, const Layout& after) const {
    const auto moves = [&](int m) {
      return std::find(step_.mesh_dims.begin(), step_.mesh_dims.end(), m) != step_.mesh_dims.end();
    };
    for (int m = 0; m < before.mesh_ndim(); ++m) {
      if (!moves(m)) continue;
      if (!before[m].is_shard() || !after[m].is_replicate()) return false;
      // What else cuts the dimension cuts it first, and stays.
      const auto cutting = before.shards_of(before[m].dim());
      if (!std::is_partitioned(cutting.begin(), cutting.end(), std::not_fn(moves))) return false;
    }
    return true;
  }

  void exchange(StepSchedule& s) const {
    if (gathers_all(step_.before, step_.after)) {
      if (auto even = even_parts(cuts_of(step_.before), step_.before, s.after)) {
        s.op = OpKind::kAllGather;
        s.unpack = std::move(even);
        return;
      }
    }
    const ExchangePart part = exchange_part(step_.before, step_.after, step_.mesh_dims,
                                            context_.mesh().shape(), context_.coordinate(), sizes_);
    s.op = OpKind::kAllToAllV;
    add_blocks(part.send, s.pack.emplace(s.before), s.in_counts);
    add_blocks(part.recv, s.unpack.emplace(s.after), s.out_counts);
  }

  const MeshContext& context_;
  const RedistributeStep& step_;
  const absl::Span<const int64_t> sizes_;
  const bool complex_;
  const int mesh_dim_;       // of steps on a single mesh dimension
  const int64_t num_ranks_;  // along it
  const int64_t index_;      // this rank's coordinate on it
};

// What `schedule` makes of `local`. The tensors are this call's own, the schedule is shared.
CollectiveTransfer packed(const RedistributeStep& step,
                          std::shared_ptr<const StepSchedule> schedule, const at::Tensor& local) {
  CollectiveTransfer transfer;
  transfer.op = schedule->op;
  transfer.reduce_op = schedule->reduce_op;
  transfer.mesh_dims = step.mesh_dims;
  transfer.in_counts = schedule->in_counts;
  transfer.out_counts = schedule->out_counts;
  if (local.sizes() != array(schedule->before)) {
    throw Error(absl::InternalError(absl::StrCat("the redistribution step ", step.to_string(),
                                                 " is for local parts of shape [",
                                                 absl::StrJoin(schedule->before, ", "), "], not [",
                                                 absl::StrJoin(local.sizes(), ", "), "]")));
  }
  transfer.input = local.contiguous();
  if (schedule->pack.has_value()) {
    const at::Tensor buffer = at::empty({schedule->pack->numel()}, local.options());
    schedule->pack->pack(transfer.input, buffer);
    transfer.input = buffer;
  }
  if (const int64_t factors = schedule->factors; factors > 0) {
    transfer.output = at::empty({factors * count(schedule->after)}, local.options());
    transfer.unpack = [schedule = std::move(schedule), factors](const at::Tensor& flat) {
      Dims all = schedule->after;
      all.insert(all.begin(), factors);
      return at::view_as_real(at::view_as_complex(flat.view(array(all))).prod(0));
    };
  } else if (schedule->unpack.has_value()) {
    transfer.output = at::empty({schedule->unpack->numel()}, local.options());
    transfer.unpack = [schedule = std::move(schedule)](const at::Tensor& flat) {
      at::Tensor result = empty(schedule->after, flat);
      schedule->unpack->unpack(flat, result);
      return result;
    };
  } else {
    transfer.output = empty(schedule->after, local);
  }
  return transfer;
}

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

RedistributePlan searched_plan(const MeshContext& context, const Spec& from, const Layout& to) {
  return value_or_throw(plan_redistribute(from.layout, to, context.mesh().shape(), from.sizes,
                                          c10::elementSize(from.dtype),
                                          context.decisions.cost_model()));
}

PlanRef plan_for(MeshContext& context, const SpecRef& from, const SpecRef& to) {
  PlanRef plan = context.decisions.plans.find(from, to);
  if (plan != nullptr) return plan;
  plan = std::make_shared<const ReadyPlan>(searched_plan(context, *from, to->layout));
  context.decisions.plans.insert(from, to, plan);
  return plan;
}

TensorWork send(MeshContext& context, const CollectiveTransfer& transfer, std::string_view tag) {
  Communicator& comm = context.communicator(transfer.mesh_dims);
  const Buffer in = comm_buffer(transfer.input);
  const Buffer out = comm_buffer(transfer.output);
  const c10::Device device = transfer.output.device();
  const CallOptions options = collective_options(context, device, tag);
  switch (transfer.op) {
    case OpKind::kAllReduce:
      return {context, comm.all_reduce(in, out, transfer.reduce_op, options), device};
    case OpKind::kAllGather:
      return {context, comm.all_gather(in, out, options), device};
    case OpKind::kReduceScatter:
      return {context, comm.reduce_scatter(in, out, transfer.reduce_op, options), device};
    case OpKind::kAllToAll:
      return {context, comm.all_to_all(in, out, options), device};
    case OpKind::kAllGatherV:
      return {context, comm.all_gather_v(in, out, transfer.out_counts, options), device};
    case OpKind::kReduceScatterV:
      return {context,
              comm.reduce_scatter_v(in, out, transfer.in_counts, transfer.reduce_op, options),
              device};
    case OpKind::kAllToAllV:
      return {context, comm.all_to_all_v(in, transfer.in_counts, out, transfer.out_counts, options),
              device};
    default:
      break;
  }
  throw Error(absl::InternalError(
      absl::StrCat("redistribution does not use ", std::string(to_string(transfer.op)))));
}

PlanRun::PlanRun(MeshContext& context, const ReadyPlan& plan, at::Tensor local,
                 absl::Span<const int64_t> sizes)
    : context_(&context), plan_(&plan), sizes_(sizes.begin(), sizes.end()), given_(local) {
  if (!plan.plan.steps.empty()) {
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

bool PlanRun::next(CollectiveTransfer* transfer) {
  for (; step_ < plan_->plan.steps.size(); ++step_) {
    const RedistributeStep& step = plan_->plan.steps[step_];
    const Step here(*context_, step, sizes_, given_.is_complex());
    if (!is_collective(step) || step.is_local()) {
      local_ = here.run_here(local_);
      continue;
    }
    std::shared_ptr<const StepSchedule> schedule = plan_->schedules[step_];
    if (schedule == nullptr || schedule->sizes != sizes_) {
      schedule = std::make_shared<const StepSchedule>(here.schedule());
      if (schedule->bytes() <= kMaxKeptBytes) plan_->schedules[step_] = schedule;
    }
    if (local_.is_meta()) {
      local_ = empty(schedule->after, local_);
      continue;
    }
    *transfer = packed(step, std::move(schedule), local_);
    return true;
  }
  return false;
}

Sending PlanRun::sending() const {
  const RedistributeStep& step = plan_->plan.steps[step_];
  return {to_string(step.kind),
          step.mesh_dims,
          step.bytes,
          given_.scalar_type(),
          absl::MakeConstSpan(sizes_).first(given_.dim()),
          step.before,
          step.after};
}

void PlanRun::arrived(const CollectiveTransfer& transfer) {
  local_ = transfer.unpack ? transfer.unpack(transfer.output) : transfer.output;
  ++step_;
}

std::string advised_call(std::string_view argument, const Layout& layout) {
  return absl::StrCat("redistribute(", std::string(argument), ", ", layout.to_string(), ")");
}

at::Tensor run_plan(MeshContext& context, const ReadyPlan& plan, at::Tensor local,
                    absl::Span<const int64_t> sizes, const Cause& cause) {
  PlanRun run(context, plan, std::move(local), sizes);
  for (CollectiveTransfer transfer; run.next(&transfer);) {
    const CollectiveSpan span(context, cause, [&] { return run.sending(); });
    throw_if_error(send(context, transfer, cause.tag()).wait());
    run.arrived(transfer);
  }
  return run.local();
}

at::Tensor owned(at::Tensor local, const at::Tensor& given) {
  const size_t bytes = local.numel() * local.itemsize();
  const bool is_alias = given.defined() && local.is_alias_of(given);
  if (!is_alias && local.storage().nbytes() == bytes) return local;
  return local.clone();
}

at::Tensor redistributed(const at::Tensor& tensor, const Layout& layout, const Cause& cause) {
  const DTensorMeta& meta = meta_of(tensor);
  if (meta.spec->layout == layout) return tensor;
  SpecRef target = meta.context->with_layout(*meta.spec, layout);
  const PlanRef plan = plan_for(*meta.context, meta.spec, target);
  const About about(*meta.context, provenance_of(meta));
  Cause of_it = cause;
  of_it.parameter = parameter_of(meta);
  at::Tensor local =
      owned(run_plan(*meta.context, *plan, meta.local(), meta.spec->sizes, of_it), meta.local());
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
