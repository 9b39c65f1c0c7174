// Decompositions, solvers and Fourier transforms: a rank works on whole matrices or lines, of which
// it has some.
#include <algorithm>
#include <vector>

#include "c10/core/Contiguity.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "shardweave/dtensor/rules/common.h"
#include "shardweave/dtensor/rules/families.h"

namespace shardweave::dtensor_internal {
namespace {

// --- solvers -------------------------------------------------------------------------------------

// B is a batch of matrices, of as many batches as the factors (the other inputs); its columns (rows,
// where the unknown is on the left) are independent.
void solve_with_factors(const OpCall& call, Strategies& out) {
  const TensorInfo& factors = call.input(0);  // LU or LD
  const TensorInfo& b = call.input("B");
  if (b.ndim() != factors.ndim()) return;  // vectors: a batch of another kind
  for (int d = 0; d < b.ndim() - 2; ++d) {
    if (factors.sizes[d] != b.sizes[d]) continue;
    out.add(std::vector<Placement>(call.num_inputs(), Shard(d)), {Shard(d)}, zeros_if_empty);
  }
  const bool left = !call.has_arg("left") || call.bool_arg("left");
  const int free = left ? b.ndim() - 1 : b.ndim() - 2;
  out.add({{"B", Shard(free)}}, {Shard(free)}, zeros_if_empty);
  out.add_linear({{"B"}});
}

// --- factors that depend on how A lies -----------------------------------------------------------
// LibTorch factors A, or A^T where that lies in rows, and its backward asks A again which of the two that
// was: a DTensor. So the part lies as that does.

void lie_as_the_whole_does(const c10::OperatorHandle& op, c10::Stack& stack,
                           const LocalCall& call) {
  BoxedCall boxed(op, stack);
  const at::Tensor part = boxed.tensor("A");
  const Spec& whole = boxed.spec(call, "A");
  const bool in_rows =
      c10::_compute_contiguous<int64_t>(array(whole.sizes), array(whole.strides), whole.numel());
  if (part.is_contiguous() == in_rows) return;
  boxed["A"] = in_rows ? part.contiguous() : part.mT().contiguous().mT();
}

void factor(const c10::OperatorHandle& op, c10::Stack& stack, const LocalCall& call) {
  lie_as_the_whole_does(op, stack, call);
  op.callBoxed(stack);
}

void factor_some(const c10::OperatorHandle& op, c10::Stack& stack, const LocalCall& call) {
  lie_as_the_whole_does(op, stack, call);
  zeros_if_empty(op, stack, call);
}

ShardedRule factors(Batches batches) {
  return sharded(
             [of_batches = over_batches(std::move(batches))](const OpCall& call, Strategies& out) {
               of_batches(call, out);
               for (Strategy& strategy : out.list()) strategy.kernel = factor_some;
             })
      .runs(factor);
}

// --- lines ---------------------------------------------------------------------------------------

// Fourier transforms along "dim": every other dimension may be cut, and they are linear.
void fourier(const OpCall& call, Strategies& out) {
  const std::vector<int> dims = call.dims_arg("dim", call.input("self").ndim());
  for (int d = 0; d < call.input("self").ndim(); ++d) {
    if (std::find(dims.begin(), dims.end(), d) != dims.end()) continue;
    out.add({Shard(d)}, {Shard(d)}, zeros_if_empty);
  }
  pass_partials(call, out, kLinearOps);
}

// MKL leaves a result whose batches are outermost, in the order of the input's strides, and the
// transformed dimensions innermost in the order of "dim".
TensorInfo transformed_info(const OpCall& call, Dims sizes, at::ScalarType dtype) {
  const TensorInfo& self = call.input("self");
  std::vector<int> order;
  std::vector<bool> transformed(self.ndim(), false);
  const std::vector<int64_t> given = call.arg("dim").toIntVector();
  for (int64_t d : given) transformed[self.wrap_dim(d)] = true;
  for (int d = 0; d < self.ndim(); ++d) {
    if (!transformed[d]) order.push_back(d);
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return self.strides[a] > self.strides[b]; });
  for (int64_t d : given) order.push_back(self.wrap_dim(d));
  TensorInfo info = contiguous_info(std::move(sizes), dtype);
  int64_t next = 1;
  for (size_t i = order.size(); i-- > 0;) {
    info.strides[order[i]] = next;
    next *= std::max<int64_t>(info.sizes[order[i]], 1);
  }
  return info;
}

void c2c_shape(OpCall& call) {
  call.outputs.push_back(
      transformed_info(call, call.input("self").sizes, call.input("self").dtype));
}

void r2c_shape(OpCall& call) {
  Dims sizes = call.input("self").sizes;
  const int last = call.input("self").wrap_dim(call.arg("dim").toIntVector().back());
  if (call.bool_arg("onesided")) sizes[last] = sizes[last] / 2 + 1;
  call.outputs.push_back(
      transformed_info(call, std::move(sizes), c10::toComplexType(call.input("self").dtype)));
}

void c2r_shape(OpCall& call) {
  Dims sizes = call.input("self").sizes;
  sizes[call.input("self").wrap_dim(call.arg("dim").toIntVector().back())] =
      call.int_arg("last_dim_size");
  call.outputs.push_back(
      transformed_info(call, std::move(sizes), c10::toRealValueType(call.input("self").dtype)));
}

// Vectors of three along "dim", bilinear.
void cross(const OpCall& call, Strategies& out) {
  const int along = call.output().wrap_dim(call.int_arg("dim"));
  for (int d = 0; d < call.output().ndim(); ++d) {
    if (d != along) out.add(broadcast_cuts(call, call.output().sizes, d), {Shard(d)});
  }
  out.add_linear({{"self"}, {"other"}});
}

}  // namespace

void add_linear_algebra_rules(RuleTable& table) {
  // --- of each matrix ---
  table.add({"aten::linalg_inv_ex", "aten::linalg_cholesky_ex"}, over_batches({{2}, {2, 0}}));
  table.add("aten::linalg_lu_factor_ex", over_batches({{2}, {2, 1, 0}}));
  table.add({"aten::linalg_lu", "aten::lu_unpack"}, over_batches({{2, 1}, {2}}));
  table.add("aten::linalg_ldl_factor_ex", over_batches({{2}, {2, 1, 0}}));
  table.add("aten::linalg_qr", over_batches({{2}, {2}}));
  table.add("aten::_linalg_eigh", over_batches({{2}, {1, 2}}));
  table.add("aten::_linalg_svd", over_batches({{2}, {2, 1, 2}}));
  table.add("aten::_linalg_det", factors({{2}, {0, 2, 1}}));
  table.add("aten::_linalg_slogdet", factors({{2}, {0, 0, 2, 1}}));
  table.add("aten::linalg_matrix_exp", over_batches({{2}, {2}}).shapes(contiguous_like_input));
  // Whether a decomposition has failed: on any rank, so that all say the same.
  table.add("aten::_linalg_check_errors", replicated().shapes(no_outputs));

  // --- solvers: batches and right-hand sides ---
  table.add("aten::_linalg_solve_ex", factors({{2}, {2, 2, 1, 0}}));
  table.add({"aten::linalg_lu_solve", "aten::linalg_ldl_solve"}, sharded(solve_with_factors));

  // --- lines ---
  table.add("aten::_fft_c2c", sharded(fourier).shapes(c2c_shape));
  table.add("aten::_fft_r2c", sharded(fourier).shapes(r2c_shape));
  table.add("aten::_fft_c2r", sharded(fourier).shapes(c2r_shape));
  table.add("aten::linalg_cross", sharded(cross));
  table.add("aten::renorm", sharded([](const OpCall& call, Strategies& out) {
                              const int along = call.input("self").wrap_dim(call.int_arg("dim"));
                              out.add({Shard(along)}, {Shard(along)}, zeros_if_empty);
                            }).shapes(like_input));
}

}  // namespace shardweave::dtensor_internal
