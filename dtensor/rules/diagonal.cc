// Diagonals, and matrices along one: what lies beside them may be cut.
#include <algorithm>
#include <cstdlib>
#include <utility>
#include <vector>

#include "shardweave/dtensor/rules/common.h"
#include "shardweave/dtensor/rules/families.h"

namespace shardweave::dtensor_internal {
namespace {

// diag_embed: the last dimension becomes the diagonal of two new ones, dim1 and dim2.
std::pair<int, int> new_dims(const OpCall& call) {
  TensorInfo result;
  result.sizes.resize(call.input("self").ndim() + 1);
  const std::pair<int, int> dims = {result.wrap_dim(call.int_arg("dim1")),
                                    result.wrap_dim(call.int_arg("dim2"))};
  return std::minmax(dims.first, dims.second);
}

void diag_embed(const OpCall& call, Strategies& out) {
  const auto [first, second] = new_dims(call);
  for (int d = 0; d < call.input("self").ndim() - 1; ++d) {
    int to = d;
    to += to >= first;
    to += to >= second;
    out.add({Shard(d)}, {Shard(to)});
  }
  pass_partials(call, out, kAllReduceOps);  // of zeros all are 0
}

void diag_embed_shape(OpCall& call) {
  const TensorInfo& self = call.input("self");
  const auto [first, second] = new_dims(call);
  const int64_t size = self.sizes.back() + std::abs(call.int_arg("offset"));
  Dims sizes(self.sizes.begin(), self.sizes.end() - 1);
  sizes.insert(sizes.begin() + first, size);
  sizes.insert(sizes.begin() + second, size);
  call.outputs.push_back(contiguous_info(std::move(sizes), self.dtype));
}

// LibTorch says what is wrong with the dimensions.
bool has_no_diagonal(const Arguments& args) {
  const int64_t ndim = args.tensor("self").dim() + 1;
  const int64_t dim1 = args["dim1"].toInt(), dim2 = args["dim2"].toInt();
  const auto is_outside = [&](int64_t dim) { return dim < -ndim || dim >= ndim; };
  return ndim < 2 || is_outside(dim1) || is_outside(dim2) || (dim1 - dim2) % ndim == 0;
}

// self with src, whose last dimension it is, as the diagonal of dim1 and dim2.
void diagonal_scatter(const OpCall& call, Strategies& out) {
  const TensorInfo& self = call.input("self");
  const int dim1 = self.wrap_dim(call.int_arg("dim1"));
  const int dim2 = self.wrap_dim(call.int_arg("dim2"));
  for (int d = 0; d < self.ndim(); ++d) {
    if (d == dim1 || d == dim2) continue;
    out.add({{"self", Shard(d)}, {"src", Shard(d - (d > dim1) - (d > dim2))}}, {Shard(d)});
  }
  pass_partials(call, out, kAllReduceOps);
}

// Every matrix has rows and columns of its own in the result.
void block_diag(const OpCall& call, Strategies& out) {
  pass_partials(call, out, kAllReduceOps);
}

}  // namespace

void add_diagonal_rules(RuleTable& table) {
  table.add("aten::diag_embed",
            sharded(diag_embed).shapes(diag_embed_shape).refuses(has_no_diagonal));
  table.add("aten::diagonal_scatter", sharded(diagonal_scatter));
  table.add("aten::block_diag", sharded(block_diag));
}

}  // namespace shardweave::dtensor_internal
