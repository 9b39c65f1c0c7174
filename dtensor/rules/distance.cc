// Distances between the rows of two matrices: the rows of either may be cut.
#include "shardweave/dtensor/rules/common.h"
#include "shardweave/dtensor/rules/families.h"

namespace shardweave::dtensor_internal {
namespace {

// x1 [..., P, M], x2 [..., R, M] -> [..., P, R]
void cdist(const OpCall& call, Strategies& out) {
  const TensorInfo& x1 = call.input(0);
  const TensorInfo& x2 = call.input(1);
  if (x1.ndim() != x2.ndim()) return;
  const int n = x1.ndim();
  for (int d = 0; d < n - 2; ++d) {
    if (x1.sizes[d] == x2.sizes[d]) out.add({Shard(d), Shard(d)}, {Shard(d)}, zeros_if_empty);
  }
  out.add({Shard(n - 2), Replicate()}, {Shard(n - 2)}, zeros_if_empty);
  out.add({Replicate(), Shard(n - 2)}, {Shard(n - 1)}, zeros_if_empty);
}

void cdist_shape(OpCall& call) {
  const TensorInfo& x1 = call.input(0);
  const TensorInfo& x2 = call.input(1);
  const auto batch = [](const TensorInfo& x) { return Dims(x.sizes.begin(), x.sizes.end() - 2); };
  Dims sizes = broadcast_sizes({batch(x1), batch(x2)});
  sizes.push_back(x1.sizes[x1.ndim() - 2]);
  sizes.push_back(x2.sizes[x2.ndim() - 2]);
  call.outputs.push_back(contiguous_info(std::move(sizes), x1.dtype));
}

// grad [..., P, R], x1, x2, distances [..., P, R] -> the gradient of x1, a sum over the rows of x2.
// Given the distances every column of x1 and x2 is for itself.
void cdist_backward(const OpCall& call, Strategies& out) {
  const TensorInfo& x1 = call.input(1);
  const TensorInfo& x2 = call.input(2);
  const int n = x1.ndim();
  if (x2.ndim() != n || call.input(0).ndim() != n) return;
  for (int d = 0; d < n - 2; ++d) {
    if (x1.sizes[d] != x2.sizes[d]) continue;
    out.add({Shard(d), Shard(d), Shard(d), Shard(d)}, {Shard(d)}, zeros_if_empty);
  }
  const Placement rows = Shard(n - 2), columns = Shard(n - 1), whole = Replicate();
  out.add({rows, rows, whole, rows}, {rows}, zeros_if_empty);
  out.add({columns, whole, rows, columns}, {Partial()}, zeros_if_empty);
  out.add({whole, columns, columns, whole}, {columns}, zeros_if_empty);
  for (ReduceOp op : kLinearOps) out.add({Partial(op), whole, whole, whole}, {Partial(op)});
}

void cdist_backward_shape(OpCall& call) {
  const TensorInfo& grad = call.input(0);
  Dims sizes(grad.sizes.begin(), grad.sizes.end() - 2);
  sizes.insert(sizes.end(), call.input(1).sizes.end() - 2, call.input(1).sizes.end());
  call.outputs.push_back(contiguous_info(std::move(sizes), call.input(1).dtype));
}

// pdist: every row of one matrix with every later one; no rank can do without the others' rows.
void pdist(const OpCall& /*call*/, Strategies& /*out*/) {}

void pdist_shape(OpCall& call) {
  const int64_t rows = call.input(0).sizes[0];
  call.outputs.push_back(contiguous_info({rows * (rows - 1) / 2}, call.input(0).dtype));
}

// grad [pairs], self [N, M], distances [pairs] -> the gradient of self
void pdist_backward(const OpCall& /*call*/, Strategies& out) {
  out.add({Replicate(), Shard(1), Replicate()}, {Shard(1)}, zeros_if_empty);
  for (ReduceOp op : kLinearOps) out.add({Partial(op), Replicate(), Replicate()}, {Partial(op)});
}

void pdist_backward_shape(OpCall& call) {
  call.outputs.push_back(like_info(call.input(1)));
}

bool are_no_matrices(const c10::OperatorHandle& /*op*/, absl::Span<const c10::IValue> args) {
  return args[0].toTensor().dim() < 2 || args[1].toTensor().dim() < 2;
}

bool is_no_matrix(const c10::OperatorHandle& /*op*/, absl::Span<const c10::IValue> args) {
  return args[0].toTensor().dim() != 2;
}

}  // namespace

void add_distance_rules(RuleTable& table) {
  table.add({"aten::_cdist_forward", "aten::_euclidean_dist"},
            Rule(cdist).shapes(cdist_shape).refuses(are_no_matrices));
  table.add("aten::_cdist_backward", Rule(cdist_backward).shapes(cdist_backward_shape));
  table.add("aten::_pdist_forward", Rule(pdist).shapes(pdist_shape).refuses(is_no_matrix));
  table.add("aten::_pdist_backward", Rule(pdist_backward).shapes(pdist_backward_shape));
}

}  // namespace shardweave::dtensor_internal
