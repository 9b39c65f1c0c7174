// Distances between the rows of two matrices: the rows of either may be cut.
#include <algorithm>

#include "shardweave/dtensor/rules/common.h"
#include "shardweave/dtensor/rules/families.h"

namespace shardweave::dtensor_internal {
namespace {

// x1 [..., P, M], x2 [..., R, M] -> [..., P, R]
void cdist(const OpCall& call, Strategies& out) {
  const TensorInfo& x1 = call.input("x1");
  const TensorInfo& x2 = call.input("x2");
  if (x1.ndim() != x2.ndim()) return;
  const int n = x1.ndim();
  for (int d = 0; d < n - 2; ++d) {
    if (x1.sizes[d] != x2.sizes[d]) continue;
    out.add({{"x1", Shard(d)}, {"x2", Shard(d)}}, {Shard(d)}, zeros_if_empty);
  }
  out.add({{"x1", Shard(n - 2)}}, {Shard(n - 2)}, zeros_if_empty);
  out.add({{"x2", Shard(n - 2)}}, {Shard(n - 1)}, zeros_if_empty);
}

void cdist_shape(OpCall& call) {
  const TensorInfo& x1 = call.input("x1");
  const TensorInfo& x2 = call.input("x2");
  const auto batch = [](const TensorInfo& x) { return Dims(x.sizes.begin(), x.sizes.end() - 2); };
  Dims sizes = broadcast_sizes({batch(x1), batch(x2)});
  sizes.push_back(x1.sizes[x1.ndim() - 2]);
  sizes.push_back(x2.sizes[x2.ndim() - 2]);
  call.outputs.push_back(contiguous_info(std::move(sizes), x1.dtype));
}

// grad [..., P, R], x1, x2, distances [..., P, R] -> the gradient of x1, a sum over the rows of x2.
// Given the distances every column of x1 and x2 is for itself.
void cdist_backward(const OpCall& call, Strategies& out) {
  const TensorInfo& x1 = call.input("x1");
  const TensorInfo& x2 = call.input("x2");
  const int n = x1.ndim();
  if (x2.ndim() != n || call.input("grad").ndim() != n) return;
  for (int d = 0; d < n - 2; ++d) {
    if (x1.sizes[d] != x2.sizes[d]) continue;
    out.add(std::vector<Placement>(call.num_inputs(), Shard(d)), {Shard(d)}, zeros_if_empty);
  }
  const Placement rows = Shard(n - 2), columns = Shard(n - 1);
  out.add({{"grad", rows}, {"x1", rows}, {"cdist", rows}}, {rows}, zeros_if_empty);
  out.add({{"grad", columns}, {"x2", rows}, {"cdist", columns}}, {Partial()}, zeros_if_empty);
  out.add({{"x1", columns}, {"x2", columns}}, {columns}, zeros_if_empty);
  out.add_linear({{"grad"}});
}

void cdist_backward_shape(OpCall& call) {
  const Dims& grad = call.input("grad").sizes;
  const TensorInfo& x1 = call.input("x1");
  // Without any distance LibTorch gives zeros as x1 is, before batches are broadcast.
  const bool is_empty =
      x1.sizes.back() == 0 || std::find(grad.begin(), grad.end(), 0) != grad.end();
  if (is_empty) {
    call.outputs.push_back(contiguous_info(x1.sizes, x1.dtype));
    return;
  }
  Dims sizes(grad.begin(), grad.end() - 2);
  sizes.insert(sizes.end(), x1.sizes.end() - 2, x1.sizes.end());
  call.outputs.push_back(contiguous_info(std::move(sizes), x1.dtype));
}

// pdist: every row of one matrix with every later one; no rank can do without the others' rows.
void pdist_shape(OpCall& call) {
  const TensorInfo& self = call.input("self");
  const int64_t rows = self.sizes[0];
  call.outputs.push_back(contiguous_info({rows * (rows - 1) / 2}, self.dtype));
}

// grad [pairs], self [N, M], distances [pairs] -> the gradient of self
void pdist_backward(const OpCall& /*call*/, Strategies& out) {
  out.add({{"self", Shard(1)}}, {Shard(1)}, zeros_if_empty);
  out.add_linear({{"grad"}});
}

void pdist_backward_shape(OpCall& call) {
  call.outputs.push_back(like_info(call.input("self")));
}

bool are_no_matrices(const Arguments& args) {
  return args.tensor("x1").dim() < 2 || args.tensor("x2").dim() < 2;
}

bool is_no_table(const Arguments& args) {
  return args.tensor("self").dim() != 2;
}

}  // namespace

void add_distance_rules(RuleTable& table) {
  table.add({"aten::_cdist_forward", "aten::_euclidean_dist"},
            sharded(cdist).shapes(cdist_shape).refuses(are_no_matrices));
  table.add("aten::_cdist_backward", sharded(cdist_backward).shapes(cdist_backward_shape));
  table.add("aten::_pdist_forward", replicated().shapes(pdist_shape).refuses(is_no_table));
  table.add("aten::_pdist_backward", sharded(pdist_backward).shapes(pdist_backward_shape));
}

}  // namespace shardweave::dtensor_internal
