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
  result.sizes.resize(call.input(0).ndim() + 1);
  const std::pair<int, int> dims = {result.wrap_dim(call.int_arg("dim1")),
                                    result.wrap_dim(call.int_arg("dim2"))};
  return std::minmax(dims.first, dims.second);
}

void diag_embed(const OpCall& call, Strategies& out) {
  const auto [first, second] = new_dims(call);
  for (int d = 0; d < call.input(0).ndim() - 1; ++d) {
    int to = d;
    to += to >= first;
    to += to >= second;
    out.add({Shard(d)}, {Shard(to)});
  }
  pass_partials(call, out, kAllReduceOps);  // of zeros all are 0
}

void diag_embed_shape(OpCall& call) {
  const TensorInfo& self = call.input(0);
  const auto [first, second] = new_dims(call);
  const int64_t size = self.sizes.back() + std::abs(call.int_arg("offset"));
  Dims sizes(self.sizes.begin(), self.sizes.end() - 1);
  sizes.insert(sizes.begin() + first, size);
  sizes.insert(sizes.begin() + second, size);
  call.outputs.push_back(contiguous_info(std::move(sizes), self.dtype));
}

// LibTorch says what is wrong with the dimensions.
bool has_no_diagonal(const c10::OperatorHandle& /*op*/, absl::Span<const c10::IValue> args) {
  const int64_t ndim = args[0].toTensor().dim() + 1;
  const int64_t dim1 = args[2].toInt(), dim2 = args[3].toInt();
  const auto is_outside = [&](int64_t dim) { return dim < -ndim || dim >= ndim; };
  return ndim < 2 || is_outside(dim1) || is_outside(dim2) || (dim1 - dim2) % ndim == 0;
}

// self with src, whose last dimension it is, as the diagonal of dim1 and dim2.
void diagonal_scatter(const OpCall& call, Strategies& out) {
  const TensorInfo& self = call.input(0);
  const int dim1 = self.wrap_dim(call.int_arg("dim1"));
  const int dim2 = self.wrap_dim(call.int_arg("dim2"));
  for (int d = 0; d < self.ndim(); ++d) {
    if (d == dim1 || d == dim2) continue;
    out.add({Shard(d), Shard(d - (d > dim1) - (d > dim2))}, {Shard(d)});
  }
  pass_partials(call, out, kAllReduceOps);
}

// Every matrix has rows and columns of its own in the result.
void block_diag(const OpCall& call, Strategies& out) {
  pass_partials(call, out, kAllReduceOps);
}

}  // namespace

void add_diagonal_rules(RuleTable& table) {
  table.add("aten::diag_embed", Rule(diag_embed).shapes(diag_embed_shape).refuses(has_no_diagonal));
  table.add("aten::diagonal_scatter", Rule(diagonal_scatter));
  table.add("aten::block_diag", Rule(block_diag));
}

}  // namespace shardweave::dtensor_internal
