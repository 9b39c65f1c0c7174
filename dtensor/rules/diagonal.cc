// Diagonals, triangles, and matrices along a diagonal. What lies beside them may be cut, and rows or
// columns where each rank's part has its part of the diagonal.
#include <algorithm>
#include <cstdlib>
#include <utility>
#include <vector>

#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/rules/common.h"
#include "shardweave/dtensor/rules/families.h"

namespace shardweave::dtensor_internal {
namespace {

// Whether parts of `dim` are of neighbours: then the diagonal of a part is one, too, only higher or lower.
bool is_of_neighbours(const OpCall& call, const TensorInfo& info, int dim) {
  const auto strided = [&](const Placement& p) {
    return p.kind() == PlacementKind::kStridedShard && p.is_shard(dim);
  };
  if (info.spec == nullptr) return true;
  const Layout& layout = info.spec->layout;
  return std::none_of(layout.placements().begin(), layout.placements().end(), strided) &&
         (info.remembered == nullptr || !strided(info.remembered->layout[call.mesh_dim]));
}

int64_t begin_of_part(const Spec& spec, int dim) {
  const MeshContext& context = *spec.context;
  const Intervals held =
      local_intervals(spec.layout, context.mesh().shape(), context.coordinate(), spec.sizes, dim);
  return held.empty() ? 0 : held.front().begin;
}
// By how much a diagonal is higher in this rank's part of a tensor than in the whole.
int64_t rise(const Spec& spec, int rows, int columns) {
  return begin_of_part(spec, rows) - begin_of_part(spec, columns);
}

// The dimensions of the matrices of `info`.
std::pair<int, int> matrix_dims(const OpCall& call, const TensorInfo& info) {
  return {info.wrap_dim(call.int_arg("dim1")), info.wrap_dim(call.int_arg("dim2"))};
}

// Each row of a square has one element of its main diagonal, and each column.
bool is_main_of_square(const OpCall& call, const TensorInfo& info) {
  const auto [rows, columns] = matrix_dims(call, info);
  return info.sizes[rows] == info.sizes[columns] && call.int_arg("offset") == 0;
}

// diagonal: the other dimensions close up, the diagonal is last.
void diagonal(const OpCall& call, Strategies& out) {
  const TensorInfo& self = call.input("self");
  const auto [rows, columns] = matrix_dims(call, self);
  for (int d = 0; d < self.ndim(); ++d) {
    if (d != rows && d != columns) out.add({Shard(d)}, {Shard(d - (d > rows) - (d > columns))});
  }
  if (is_main_of_square(call, self)) {
    for (const auto& [cut, other] : {std::pair(rows, columns), std::pair(columns, rows)}) {
      if (call.cuts(self, other) == 1 && is_of_neighbours(call, self, cut)) {
        out.add({Shard(cut)}, {Shard(self.ndim() - 2)});
      }
    }
  }
  pass_partials(call, out, kAllReduceOps);
}

// The operator on a part of the matrices `whole`.
void run_on_part(BoxedCall& boxed, const Spec& whole) {
  const auto dim = [&](const char* name) {
    return static_cast<int>(c10::maybe_wrap_dim(boxed[name].toInt(), whole.ndim()));
  };
  boxed["offset"] = boxed["offset"].toInt() + rise(whole, dim("dim1"), dim("dim2"));
  boxed.run();
}

void diagonal_of_part(const c10::OperatorHandle& op, c10::Stack& stack, const LocalCall& call) {
  BoxedCall boxed(op, stack);
  run_on_part(boxed, boxed.spec(call, "self"));
}

void diagonal_backward(const OpCall& call, Strategies& out) {
  const TensorInfo& result = call.output();
  const auto [rows, columns] = matrix_dims(call, result);
  for (int d = 0; d < result.ndim(); ++d) {
    if (d != rows && d != columns) out.add({Shard(d - (d > rows) - (d > columns))}, {Shard(d)});
  }
  // Not columns as well: several mesh dimensions would choose for themselves.
  if (is_main_of_square(call, result) &&
      is_of_neighbours(call, call.input("grad_output"), result.ndim() - 2)) {
    out.add({Shard(result.ndim() - 2)}, {Shard(rows)});
  }
  pass_partials(call, out, kLinearOps);
}

void diagonal_backward_of_part(const c10::OperatorHandle& op, c10::Stack& stack,
                               const LocalCall& call) {
  BoxedCall boxed(op, stack);
  run_on_part(boxed, *call.outputs[0]);
}

// tril, triu: of every matrix.
void triangle(const OpCall& call, Strategies& out) {
  const TensorInfo& self = call.input("self");
  for (int d = 0; d < self.ndim(); ++d) {
    if (d < self.ndim() - 2 || is_of_neighbours(call, self, d)) out.add({Shard(d)}, {Shard(d)});
  }
  pass_partials(call, out, kAllReduceOps);  // of zeros all are 0
}

void triangle_of_part(const c10::OperatorHandle& op, c10::Stack& stack, const LocalCall& call) {
  BoxedCall boxed(op, stack);
  const Spec& self = boxed.spec(call, "self");
  boxed["diagonal"] = boxed["diagonal"].toInt() + rise(self, self.ndim() - 2, self.ndim() - 1);
  boxed.run();
}

void trace_of_part(const c10::OperatorHandle& op, c10::Stack& stack, const LocalCall& call) {
  BoxedCall boxed(op, stack);
  boxed.finish({boxed.tensor("self").diagonal(rise(boxed.spec(call, "self"), 0, 1)).sum()});
}

// The sum of the diagonal, of which each part has its own.
void trace(const OpCall& call, Strategies& out) {
  for (int d : {0, 1}) {
    if (is_of_neighbours(call, call.input("self"), d)) {
      out.add({Shard(d)}, {Partial(ReduceOp::kSum)}, trace_of_part);
    }
  }
  pass_partials(call, out, kLinearOps);
}

bool has_no_trace(const Arguments& args) {
  return args.tensor("self").dim() != 2;
}

void trace_shape(OpCall& call) {
  at::ScalarType dtype = call.input("self").dtype;
  if (c10::isIntegralType(dtype, /*includeBool=*/true)) dtype = at::kLong;
  call.outputs.push_back(contiguous_info({}, dtype));
}

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
  const auto [dim1, dim2] = matrix_dims(call, self);
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
  table.add({"aten::diagonal", "aten::diagonal_copy"}, sharded(diagonal).runs(diagonal_of_part));
  table.add("aten::diagonal_backward",
            sharded(diagonal_backward).size_arg("input_sizes").runs(diagonal_backward_of_part));
  table.add({"aten::tril", "aten::triu"}, sharded(triangle).runs(triangle_of_part));
  table.add("aten::trace", sharded(trace).shapes(trace_shape).refuses(has_no_trace));
  table.add("aten::diag_embed",
            sharded(diag_embed).shapes(diag_embed_shape).refuses(has_no_diagonal));
  table.add("aten::diagonal_scatter", sharded(diagonal_scatter));
  table.add("aten::block_diag", sharded(block_diag));
}

}  // namespace shardweave::dtensor_internal
