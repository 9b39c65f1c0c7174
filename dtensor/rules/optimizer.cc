// Operators over lists of tensors, as optimizers use them: the same elementwise step for each
// element.
#include <algorithm>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ops/_amp_foreach_non_finite_check_and_unscale.h"
#include "ATen/ops/isfinite.h"
#include "ATen/ops/maximum.h"
#include "ATen/ops/zeros.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/engine/detour.h"
#include "shardweave/dtensor/engine/local_part.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/dtensor/rules/common.h"
#include "shardweave/dtensor/rules/families.h"

namespace shardweave::dtensor_internal {
namespace {

// Every dimension of what one element's tensors broadcast to may be sharded; linear in none of
// them.
void elementwise(const OpCall& call, Strategies& out) {
  std::vector<Dims> shapes;
  for (const TensorInfo& input : call.inputs) shapes.push_back(input.sizes);
  const Dims whole = broadcast_sizes(shapes);
  for (int d = 0; d < static_cast<int>(whole.size()); ++d) {
    out.add(broadcast_cuts(call, whole, d), {Shard(d)});
  }
}

// Fused optimizers have no kernel for meta tensors, and trust the lists they are given: checked
// here. Steps are scalars, and lists that are not used (max_exp_avg_sqs) are empty.
void check_lists(OpCall& call) {
  const auto& arguments = call.op->schema().arguments();
  std::vector<const TensorInfo*> first;
  std::vector<size_t> lengths(arguments.size(), 0);
  for (int i = 0; i < call.num_inputs(); ++i) {
    const int arg = call.input_arg[i];
    if (arg == 0) first.push_back(&call.inputs[i]);
    if (call.input_element[i] >= 0) ++lengths[arg];
  }
  for (size_t arg = 0; arg < arguments.size(); ++arg) {
    if (lengths[arg] == 0 || lengths[arg] == first.size()) continue;
    throw Error(absl::InvalidArgumentError(absl::StrCat(
        c10::toString(call.op->operator_name()), ": the list '", arguments[arg].name(), "' has ",
        lengths[arg], " tensors, '", arguments[0].name(), "' has ", first.size())));
  }
  for (int i = 0; i < call.num_inputs(); ++i) {
    const int element = call.input_element[i];
    if (element < 0 || call.inputs[i].is_scalar()) continue;
    const Dims& want = first[element]->sizes;
    if (call.inputs[i].sizes == want) continue;
    throw Error(absl::InvalidArgumentError(absl::StrCat(
        c10::toString(call.op->operator_name()), ": '", arguments[call.input_arg[i]].name(), "'[",
        element, "] has shape [", absl::StrJoin(call.inputs[i].sizes, ", "), "], '",
        arguments[0].name(), "'[", element, "] has [", absl::StrJoin(want, ", "), "]")));
  }
}

// Of gradients that are none: summands, of whose finite numbers the sum may not be finite.
void unscale_partial(at::Tensor grad, at::Tensor found_inf, const at::Tensor& inv_scale) {
  at::Tensor found = at::isfinite(grad).all().logical_not().to(found_inf.scalar_type());
  if (!is_dtensor(found_inf)) found = full_tensor(found);
  found_inf.copy_(at::maximum(found_inf, found.expand_as(found_inf)));
  grad.mul_(inv_scale);
}

// self *= inv_scale, and found_inf = 1 if any of self was not finite on any rank: the parts in one
// call, the ranks in one collective.
void unscale(const c10::OperatorHandle& op, c10::Stack& stack) {
  BoxedCall call(op, stack);
  at::Tensor found_inf = call.tensor("found_inf");
  const at::Tensor inv_scale = call.tensor("inv_scale");
  const std::string& name = op.operator_name().name;
  std::vector<at::Tensor> grads, parts;
  at::Tensor like;
  Placements found_as;
  for (const at::Tensor& grad : call["self"].toTensorVector()) {
    if (is_dtensor(grad)) {
      const Placements& placements = layout_of(grad).placements();
      const auto is_partial = [](const Placement& p) { return p.is_partial(); };
      if (std::any_of(placements.begin(), placements.end(), is_partial)) {
        unscale_partial(grad, found_inf, inv_scale);
        continue;
      }
      like = grad;
      found_as.resize(placements.size());
      for (size_t m = 0; m < placements.size(); ++m) {
        if (placements[m].is_shard()) found_as[m] = Partial(ReduceOp::kMax);
      }
    }
    grads.push_back(grad);
  }
  if (!grads.empty()) {
    check_written_together(grads, name);
    for (const at::Tensor& grad : grads) parts.push_back(part_to_write(grad, name));
    at::Tensor found = at::zeros({1}, parts[0].options().dtype(at::kFloat));
    if (like.defined() && !is_dtensor(inv_scale)) {
      meta_of(like).context->plain_tensors.put_off(
          {op, static_cast<size_t>(call.index("inv_scale"))}, inv_scale);
    }
    at::_amp_foreach_non_finite_check_and_unscale_(
        parts, found, is_dtensor(inv_scale) ? full_tensor(inv_scale) : inv_scale);
    for (const at::Tensor& grad : grads) part_written(grad, name);
    if (like.defined()) found = reduce_over_ranks(op, like, std::move(found), found_as, {1});
    if (is_dtensor(found) && !is_dtensor(found_inf)) found = full_tensor(found);
    found_inf.copy_(at::maximum(found_inf, found.view(found_inf.sizes())));
  }
  call.finish({});
}

}  // namespace

void add_optimizer_rules(RuleTable& table) {
  const ShardedRule each = sharded(elementwise).per_element();
  // Those that read a tensor of scalars, one per element, decompose, and so do the reductions
  // (_foreach_norm, _foreach_max) and abs, which LibTorch cannot try on the meta device.
  for (const char* name : {"addcdiv", "addcmul"}) {
    for (const char* overload : {"Scalar", "ScalarList"}) {
      table.add(absl::StrCat("aten::_foreach_", name, ".", overload), each);
    }
  }
  for (const char* name :
       {"acos",       "add",   "asin",    "atan",    "ceil",   "clamp_max", "clamp_min",
        "copy",       "cos",   "cosh",    "div",     "erf",    "erfc",      "exp",
        "expm1",      "floor", "frac",    "lerp",    "lgamma", "log",       "log10",
        "log1p",      "log2",  "maximum", "minimum", "mul",    "neg",       "pow",
        "reciprocal", "round", "rsqrt",   "sigmoid", "sign",   "sin",       "sinh",
        "sqrt",       "sub",   "tan",     "tanh",    "trunc",  "zero"}) {
    table.add(absl::StrCat("aten::_foreach_", name), each);
  }
  const ShardedRule fused = sharded(elementwise).per_element().shapes(check_lists);
  for (const char* name : {"adagrad_", "adam_", "adamw_", "sgd_"}) {
    table.add(absl::StrCat("aten::_fused_", name), fused);
  }
  table.add("aten::_amp_foreach_non_finite_check_and_unscale_", composed(unscale));
}

}  // namespace shardweave::dtensor_internal
