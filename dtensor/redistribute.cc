#include "shardweave/dtensor/redistribute.h"

#include <vector>

#include "ATen/ops/cat.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/full_like.h"
#include "ATen/ops/zeros_like.h"
#include "absl/strings/str_cat.h"

namespace shardweave {
namespace {

// LibTorch's view of our dimensions.
c10::IntArrayRef array(const Dims& dims) {
  return c10::IntArrayRef(dims.data(), dims.size());
}

at::Tensor empty(const Dims& sizes, const at::Tensor& like) {
  return at::empty(array(sizes), like.options());
}

int64_t count(const Dims& sizes) {
  int64_t n = 1;
  for (int64_t size : sizes) n *= size;
  return n;
}

// One step as this rank sees it.
class Executor {
 public:
  Executor(MeshContext& context, const RedistributeStep& step, absl::Span<const int64_t> sizes,
           std::string_view tag)
      : context_(context),
        step_(step),
        sizes_(sizes),
        options_{.timeout = absl::ZeroDuration(), .tag = tag},
        mesh_dim_(step.mesh_dims[0]),
        num_ranks_(context.mesh().size(mesh_dim_)),
        index_(context.coordinate()[mesh_dim_]) {}

  at::Tensor run(const at::Tensor& local) {
    switch (step_.kind) {
      case StepKind::kAllGather:
        return all_gather(local.contiguous());
      case StepKind::kSlice:
        return slice(local);
      case StepKind::kAllReduce:
        return all_reduce(local.contiguous());
      case StepKind::kReduceScatter:
        return reduce_scatter(local);
      case StepKind::kAllToAll:
        return all_to_all(local);
      case StepKind::kToPartial:
        return to_partial(local);
      case StepKind::kExchange:
        return exchange(local);
    }
    throw Error(absl::InternalError("unknown redistribution step"));
  }

 private:
  Communicator& communicator() { return context_.communicator(step_.mesh_dims); }

  Dims local_sizes(const Layout& layout) const {
    return local_shape(layout, context_.mesh().shape(), context_.coordinate(), sizes_);
  }

  // What rank `index` of the step's mesh dimension holds of a dimension with `size` elements.
  Intervals cut(const Placement& p, int64_t size, int64_t index) const {
    Placement first_dim = p.kind() == PlacementKind::kStridedShard
                              ? StridedShard(0, p.split_factor())
                          : p.kind() == PlacementKind::kRaggedShard ? RaggedShard(0, p.sizes())
                                                                    : Shard(0);
    return local_intervals(Layout({std::move(first_dim)}), {num_ranks_}, {index}, {size}, 0);
  }

  static int64_t length(const Intervals& intervals) {
    int64_t n = 0;
    for (const Interval& interval : intervals) n += interval.size();
    return n;
  }

  // The elements of `tensor` that `intervals` name along `dim`; contiguous.
  static at::Tensor select(const at::Tensor& tensor, int dim, const Intervals& intervals) {
    if (intervals.empty()) return tensor.narrow(dim, 0, 0).contiguous();
    if (intervals.size() == 1) {
      return tensor.narrow(dim, intervals[0].begin, intervals[0].size()).contiguous();
    }
    std::vector<at::Tensor> pieces;
    for (const Interval& i : intervals) pieces.push_back(tensor.narrow(dim, i.begin, i.size()));
    return at::cat(pieces, dim);
  }

  // Writes `piece` to the places that `intervals` name along `dim`.
  static void place(const at::Tensor& target, int dim, const Intervals& intervals,
                    const at::Tensor& piece) {
    int64_t at = 0;
    for (const Interval& i : intervals) {
      target.narrow(dim, i.begin, i.size()).copy_(piece.narrow(dim, at, i.size()));
      at += i.size();
    }
  }

  at::Tensor all_gather(const at::Tensor& local) {
    const Placement& p = step_.before[mesh_dim_];
    const int dim = p.dim();
    const Dims sizes = local_sizes(step_.after);
    const int64_t inner = sizes[dim] == 0 ? 0 : count(sizes) / sizes[dim];
    std::vector<Intervals> pieces;
    std::vector<int64_t> counts;
    for (int64_t r = 0; r < num_ranks_; ++r) {
      pieces.push_back(cut(p, sizes[dim], r));
      counts.push_back(length(pieces.back()) * inner);
    }
    at::Tensor result = empty(sizes, local);
    int64_t outer = 1;
    for (int d = 0; d < dim; ++d) outer *= sizes[d];
    const bool in_place = outer == 1 && p.kind() != PlacementKind::kStridedShard;
    at::Tensor flat = in_place ? result : at::empty({result.numel()}, local.options());
    throw_if_error(communicator()
                       .all_gather_v(comm_buffer(local), comm_buffer(flat), counts, options_)
                       .wait());
    if (in_place) return result;
    int64_t offset = 0;
    for (int64_t r = 0; r < num_ranks_; ++r) {
      Dims piece_sizes = sizes;
      piece_sizes[dim] = length(pieces[r]);
      place(result, dim, pieces[r], flat.narrow(0, offset, counts[r]).view(array(piece_sizes)));
      offset += counts[r];
    }
    return result;
  }

  at::Tensor slice(const at::Tensor& local) {
    const Placement& p = step_.after[mesh_dim_];
    return select(local, p.dim(), cut(p, local.size(p.dim()), index_));
  }

  at::Tensor all_reduce(const at::Tensor& local) {
    at::Tensor result = at::empty(local.sizes(), local.options());
    throw_if_error(communicator()
                       .all_reduce(comm_buffer(local), comm_buffer(result),
                                   step_.before[mesh_dim_].reduce_op(), options_)
                       .wait());
    return result;
  }

  at::Tensor reduce_scatter(const at::Tensor& local) {
    const Placement& p = step_.after[mesh_dim_];
    const int dim = p.dim();
    const Dims sizes = local_sizes(step_.before);
    const int64_t inner = sizes[dim] == 0 ? 0 : count(sizes) / sizes[dim];
    std::vector<at::Tensor> pieces;
    std::vector<int64_t> counts;
    for (int64_t r = 0; r < num_ranks_; ++r) {
      const Intervals intervals = cut(p, sizes[dim], r);
      counts.push_back(length(intervals) * inner);
      if (dim != 0) pieces.push_back(select(local, dim, intervals).reshape({-1}));
    }
    const at::Tensor input = dim == 0 ? local.contiguous() : at::cat(pieces);
    at::Tensor result = empty(local_sizes(step_.after), local);
    throw_if_error(communicator()
                       .reduce_scatter_v(comm_buffer(input), comm_buffer(result), counts,
                                         step_.before[mesh_dim_].reduce_op(), options_)
                       .wait());
    return result;
  }

  at::Tensor all_to_all(const at::Tensor& local) {
    const Placement& from = step_.before[mesh_dim_];
    const Placement& to = step_.after[mesh_dim_];
    const Dims after = local_sizes(step_.after);
    std::vector<at::Tensor> pieces;
    std::vector<int64_t> send_counts, recv_counts;
    std::vector<Intervals> arriving;
    Dims piece_sizes = after;
    for (int64_t r = 0; r < num_ranks_; ++r) {
      pieces.push_back(select(local, to.dim(), cut(to, local.size(to.dim()), r)).reshape({-1}));
      send_counts.push_back(pieces.back().numel());
      arriving.push_back(cut(from, after[from.dim()], r));
      piece_sizes[from.dim()] = length(arriving.back());
      recv_counts.push_back(count(piece_sizes));
    }
    const at::Tensor input = at::cat(pieces);
    const at::Tensor flat = at::empty({count(after)}, local.options());
    throw_if_error(
        communicator()
            .all_to_all_v(comm_buffer(input), send_counts, comm_buffer(flat), recv_counts, options_)
            .wait());
    at::Tensor result = empty(after, local);
    int64_t offset = 0;
    for (int64_t r = 0; r < num_ranks_; ++r) {
      piece_sizes[from.dim()] = length(arriving[r]);
      place(result, from.dim(), arriving[r],
            flat.narrow(0, offset, recv_counts[r]).view(array(piece_sizes)));
      offset += recv_counts[r];
    }
    return result;
  }

  at::Tensor to_partial(const at::Tensor& local) {
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

  static at::Tensor block(const at::Tensor& tensor, const ExchangeBlock& b) {
    at::Tensor view = tensor;
    for (size_t d = 0; d < b.shape.size(); ++d) view = view.narrow(d, b.offset[d], b.shape[d]);
    return view;
  }

  at::Tensor exchange(const at::Tensor& local) {
    const ExchangePart part = exchange_part(step_.before, step_.after, step_.mesh_dims,
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
    std::vector<at::Tensor> pieces;
    for (const auto& blocks : part.send) {
      for (const ExchangeBlock& b : blocks) pieces.push_back(block(local, b).reshape({-1}));
    }
    const at::Tensor input = pieces.empty() ? at::empty({0}, local.options()) : at::cat(pieces);
    at::Tensor result = empty(local_sizes(step_.after), local);
    const at::Tensor flat = at::empty({result.numel()}, local.options());
    throw_if_error(communicator()
                       .all_to_all_v(comm_buffer(input), counts(part.send), comm_buffer(flat),
                                     counts(part.recv), options_)
                       .wait());
    int64_t offset = 0;
    for (const auto& blocks : part.recv) {
      for (const ExchangeBlock& b : blocks) {
        block(result, b).copy_(flat.narrow(0, offset, count(b.shape)).view(array(b.shape)));
        offset += count(b.shape);
      }
    }
    return result;
  }

  MeshContext& context_;
  const RedistributeStep& step_;
  absl::Span<const int64_t> sizes_;
  const CallOptions options_;
  const int mesh_dim_;       // of steps on a single mesh dimension
  const int64_t num_ranks_;  // along it
  const int64_t index_;      // this rank's coordinate on it
};

}  // namespace

RedistributePlan plan_for(const MeshContext& context, const Spec& from, const Layout& to) {
  return value_or_throw(plan_redistribute(from.layout, to, context.mesh().shape(), from.sizes,
                                          c10::elementSize(from.dtype), context.cost_model));
}

at::Tensor run_plan(MeshContext& context, const RedistributePlan& plan, at::Tensor local,
                    absl::Span<const int64_t> sizes, std::string_view tag) {
  for (const RedistributeStep& step : plan.steps) {
    local = Executor(context, step, sizes, tag).run(local);
  }
  return local;
}

DType comm_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return DType::kF64;
    case at::kFloat:
      return DType::kF32;
    case at::kHalf:
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
  buffer.count = contiguous.numel();
  buffer.dtype = comm_dtype(contiguous.scalar_type());
  buffer.device = {contiguous.is_cuda() ? DeviceType::kCuda : DeviceType::kCpu,
                   contiguous.is_cuda() ? contiguous.device().index() : 0};
  return buffer;
}

}  // namespace shardweave
