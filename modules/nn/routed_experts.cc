#include "shardweave/modules/nn/routed_experts.h"

#include <cstdint>
#include <memory>
#include <tuple>
#include <vector>

#include "ATen/core/dispatch/Dispatcher.h"
#include "ATen/ops/bmm.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/gelu_backward.h"
#include "ATen/ops/masked_select.h"
#include "ATen/ops/mm.h"
#include "ATen/ops/nonzero.h"
#include "ATen/ops/sigmoid.h"
#include "ATen/ops/silu_backward.h"
#include "ATen/ops/stack.h"
#include "ATen/ops/threshold_backward.h"
#include "ATen/ops/zeros.h"
#include "c10/core/GradMode.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "shardweave/dtensor/rule.h"
#include "torch/csrc/autograd/custom_function.h"
#include "torch/library.h"

namespace shardweave::nn {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;

constexpr char kForward[] = "shardweave::routed_experts";
constexpr char kBackward[] = "shardweave::routed_experts_backward";

// As the operators take it: gate_up is [experts, 2, intermediate, hidden].
void check_shapes(const Tensor& x, const Tensor& weights, const Tensor& gate_up,
                  const Tensor& down) {
  TORCH_CHECK(x.dim() == 2 && weights.dim() == 2 && gate_up.dim() == 4 && down.dim() == 3,
              "routed_experts: wanted x [tokens, hidden], weights [tokens, experts], gate_up "
              "[experts, 2, intermediate, hidden] and down [experts, hidden, intermediate], not ",
              x.sizes(), ", ", weights.sizes(), ", ", gate_up.sizes(), " and ", down.sizes());
  TORCH_CHECK(weights.size(0) == x.size(0), "routed_experts: weights of ", weights.size(0),
              " tokens for ", x.size(0));
  TORCH_CHECK(gate_up.size(0) == weights.size(1) && down.size(0) == weights.size(1),
              "routed_experts: weights choose among ", weights.size(1), " experts, but there are ",
              gate_up.size(0), " in gate_up and ", down.size(0), " in down");
  TORCH_CHECK(gate_up.size(1) == 2 && gate_up.size(2) == down.size(2) &&
                  gate_up.size(3) == x.size(1) && down.size(1) == x.size(1),
              "routed_experts: gate_up ", gate_up.sizes(), " and down ", down.sizes(),
              " do not go together with x ", x.sizes());
  TORCH_CHECK(weights.scalar_type() == x.scalar_type() &&
                  gate_up.scalar_type() == x.scalar_type() && down.scalar_type() == x.scalar_type(),
              "routed_experts: wanted one dtype, not ", x.scalar_type(), ", ",
              weights.scalar_type(), ", ", gate_up.scalar_type(), " and ", down.scalar_type());
}

Tensor activate_backward(Activation activation, const Tensor& grad, const Tensor& x) {
  switch (activation) {
    case Activation::kSilu:
      return at::silu_backward(grad, x);
    case Activation::kGelu:
      return at::gelu_backward(grad, x);
    case Activation::kGeluTanh:
      return at::gelu_backward(grad, x, "tanh");
    case Activation::kRelu:
      break;
  }
  return at::threshold_backward(grad, x, 0);
}

// By operators that have derivatives, which aten::silu_backward has not.
Tensor differentiable_activate_backward(Activation activation, const Tensor& grad,
                                        const Tensor& x) {
  if (activation != Activation::kSilu) return activate_backward(activation, grad, x);
  const Tensor sigmoid = at::sigmoid(x);
  return grad * sigmoid * (x * (1 - sigmoid) + 1);
}

// --- the kernels, for one device ---

// Which rows go to which expert: those of the first one first.
struct Routing {
  explicit Routing(const Tensor& weights) {
    const Tensor by_expert = weights.t();
    const Tensor chosen = by_expert.ne(0);
    rows = chosen.nonzero().select(1, 1).contiguous();
    row_weights = at::masked_select(by_expert, chosen).unsqueeze(1);
    const Tensor per_expert = chosen.sum(1).cpu();
    counts.assign(per_expert.const_data_ptr<int64_t>(),
                  per_expert.const_data_ptr<int64_t>() + per_expert.numel());
  }

  // f(expert, its first row among all, their number), for those that have any.
  template <typename F>
  void each(F f) const {
    int64_t first = 0;
    for (size_t e = 0; e < counts.size(); ++e) {
      if (counts[e] > 0) f(static_cast<int64_t>(e), first, counts[e]);
      first += counts[e];
    }
  }

  Tensor rows;                  // [routed], of x
  Tensor row_weights;           // [routed, 1]
  std::vector<int64_t> counts;  // per expert
};

// What an expert makes of its rows before the last product, without their weights.
struct Hidden {
  Hidden(const Tensor& rows, const Tensor& gate_up, Activation activation) {
    const Tensor both = at::mm(rows, gate_up.flatten(0, 1).t());
    gate = both.narrow(1, 0, gate_up.size(1));
    up = both.narrow(1, gate_up.size(1), gate_up.size(1));
    activated = activate(activation, gate);
  }
  Tensor gate, up, activated;  // [rows, intermediate]
};

Tensor forward_kernel(const Tensor& x, const Tensor& weights, const Tensor& gate_up,
                      const Tensor& down, int64_t activation) {
  check_shapes(x, weights, gate_up, down);
  const Routing routing(weights);
  const Tensor routed = x.index_select(0, routing.rows);
  const Tensor results = at::empty_like(routed);
  routing.each([&](int64_t e, int64_t first, int64_t count) {
    const Hidden hidden(routed.narrow(0, first, count), gate_up[e],
                        static_cast<Activation>(activation));
    Tensor result = results.narrow(0, first, count);
    at::mm_out(result, hidden.activated * hidden.up * routing.row_weights.narrow(0, first, count),
               down[e].t());
  });
  return at::zeros(x.sizes(), x.options()).index_add_(0, routing.rows, results);
}

Gradients backward_kernel(const Tensor& grad, const Tensor& x, const Tensor& weights,
                          const Tensor& gate_up, const Tensor& down, int64_t activation) {
  check_shapes(x, weights, gate_up, down);
  const auto act = static_cast<Activation>(activation);
  const Routing routing(weights);
  const Tensor routed = x.index_select(0, routing.rows);
  const Tensor grads = grad.index_select(0, routing.rows);
  const Tensor grad_routed = at::empty_like(routed);
  const Tensor grad_row_weights = at::empty_like(routing.row_weights);
  const Tensor grad_gate_up = at::zeros(gate_up.sizes(), gate_up.options());
  const Tensor grad_down = at::zeros(down.sizes(), down.options());
  routing.each([&](int64_t e, int64_t first, int64_t count) {
    const Tensor rows = routed.narrow(0, first, count), g = grads.narrow(0, first, count);
    const Tensor row_weights = routing.row_weights.narrow(0, first, count);
    const Hidden hidden(rows, gate_up[e], act);
    const Tensor product = hidden.activated * hidden.up;
    const Tensor grad_weighed = at::mm(g, down[e]);
    Tensor of_down = grad_down[e];
    at::mm_out(of_down, g.t(), product * row_weights);
    grad_row_weights.narrow(0, first, count).copy_((grad_weighed * product).sum(1, true));
    const Tensor grad_product = grad_weighed * row_weights;
    const Tensor grad_both = at::cat({activate_backward(act, grad_product * hidden.up, hidden.gate),
                                      grad_product * hidden.activated},
                                     1);
    Tensor of_gate_up = grad_gate_up[e].flatten(0, 1);
    at::mm_out(of_gate_up, grad_both.t(), rows);
    Tensor of_rows = grad_routed.narrow(0, first, count);
    at::mm_out(of_rows, grad_both, gate_up[e].flatten(0, 1));
  });
  Tensor grad_weights = at::zeros({weights.size(1), weights.size(0)}, weights.options());
  grad_weights.masked_scatter_(weights.t().ne(0), grad_row_weights);
  return {at::zeros(x.sizes(), x.options()).index_add_(0, routing.rows, grad_routed),
          grad_weights.t().contiguous(), grad_gate_up, grad_down};
}

// --- what the results look like ---

Tensor like(const Tensor& tensor) {
  return at::empty(tensor.sizes(), tensor.options());
}

Tensor forward_meta(const Tensor& x, const Tensor& weights, const Tensor& gate_up,
                    const Tensor& down, int64_t /*activation*/) {
  check_shapes(x, weights, gate_up, down);
  return like(x);
}

Gradients backward_meta(const Tensor& /*grad*/, const Tensor& x, const Tensor& weights,
                        const Tensor& gate_up, const Tensor& down, int64_t /*activation*/) {
  check_shapes(x, weights, gate_up, down);
  return {like(x), like(weights), like(gate_up), like(down)};
}

// --- the derivative ---

Tensor call_forward(const Tensor& x, const Tensor& weights, const Tensor& gate_up,
                    const Tensor& down, int64_t activation) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow(kForward, "")
                             .typed<decltype(forward_kernel)>();
  return op.call(x, weights, gate_up, down, activation);
}

Gradients call_backward(const Tensor& grad, const Tensor& x, const Tensor& weights,
                        const Tensor& gate_up, const Tensor& down, int64_t activation) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow(kBackward, "")
                             .typed<decltype(backward_kernel)>();
  return op.call(grad, x, weights, gate_up, down, activation);
}

// What backward_kernel() computes, of every expert for every token and by LibTorch's operators, which
// have derivatives. Those of the arguments that are functions of each other (the weights of x) meet
// in autograd's graph, where each counts once: nothing here goes back behind the arguments.
Gradients differentiable_backward(const Tensor& grad, const Tensor& x, const Tensor& weights,
                                  const Tensor& gate_up, const Tensor& down,
                                  Activation activation) {
  const int64_t experts = weights.size(1);
  const auto for_each = [&](const Tensor& t) {
    return t.unsqueeze(0).expand({experts, t.size(0), t.size(1)});
  };
  const Tensor all = for_each(x), grads = for_each(grad);
  const Tensor gates = gate_up.select(1, 0), ups = gate_up.select(1, 1);
  const Tensor gate = at::bmm(all, gates.transpose(1, 2)), up = at::bmm(all, ups.transpose(1, 2));
  const Tensor per_expert = weights.t().unsqueeze(-1);  // [experts, tokens, 1]
  const Tensor activated = activate(activation, gate);
  const Tensor product = activated * up;
  const Tensor grad_weighed = at::bmm(grads, down);
  const Tensor grad_weights =
      (grad_weighed * product).sum(-1).t() * weights.ne(0).to(weights.scalar_type());
  const Tensor grad_product = grad_weighed * per_expert;
  const Tensor grad_gate = differentiable_activate_backward(activation, grad_product * up, gate);
  const Tensor grad_up = grad_product * activated;
  return {(at::bmm(grad_gate, gates) + at::bmm(grad_up, ups)).sum(0), grad_weights,
          at::stack(
              {at::bmm(grad_gate.transpose(1, 2), all), at::bmm(grad_up.transpose(1, 2), all)}, 1),
          at::bmm(grads.transpose(1, 2), product * per_expert)};
}

struct RoutedExperts : torch::autograd::Function<RoutedExperts> {
  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& weights,
                        const Tensor& gate_up, const Tensor& down, int64_t activation) {
    context->save_for_backward({x, weights, gate_up, down});
    context->saved_data["activation"] = activation;
    const at::AutoDispatchBelowADInplaceOrView guard;
    return call_forward(x, weights, gate_up, down, activation);
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const variable_list saved = context->get_saved_variables();
    const int64_t activation = context->saved_data["activation"].toInt();
    auto [x, weights, gate_up, down] =
        c10::GradMode::is_enabled()
            ? differentiable_backward(grads[0], saved[0], saved[1], saved[2], saved[3],
                                      static_cast<Activation>(activation))
            : call_backward(grads[0], saved[0], saved[1], saved[2], saved[3], activation);
    return {x, weights, gate_up, down, Tensor()};
  }
};

Tensor forward_autograd(const Tensor& x, const Tensor& weights, const Tensor& gate_up,
                        const Tensor& down, int64_t activation) {
  return RoutedExperts::apply(x, weights, gate_up, down, activation);
}

// --- the sharding ---

// Multiplications and additions, as if a token chose two of the experts: which ones nobody knows.
double flops(const OpCall& call, double products) {
  const TensorInfo& down = call.input("down");
  return products * 2 * 2 * static_cast<double>(call.input("x").numel()) *
         static_cast<double>(down.sizes[2]);
}

Rule forward_rule() {
  return sharded([](const OpCall& /*call*/, Strategies& out) {
           out.add({{"x", Shard(0)}, {"weights", Shard(0)}}, {Shard(0)});
           out.add({{"weights", Shard(1)}, {"gate_up", Shard(0)}, {"down", Shard(0)}}, {Partial()});
           out.add({{"gate_up", Shard(2)}, {"down", Shard(2)}}, {Partial()});
           out.add_linear({{"down"}});
         })
      .flops([](const OpCall& call) { return flops(call, 3); });
}

Rule backward_rule() {
  return sharded([](const OpCall& /*call*/, Strategies& out) {
           out.add({{"grad", Shard(0)}, {"x", Shard(0)}, {"weights", Shard(0)}},
                   {Shard(0), Shard(0), Partial(), Partial()});
           out.add({{"weights", Shard(1)}, {"gate_up", Shard(0)}, {"down", Shard(0)}},
                   {Partial(), Shard(1), Shard(0), Shard(0)});
           out.add({{"gate_up", Shard(2)}, {"down", Shard(2)}},
                   {Partial(), Partial(), Shard(2), Shard(2)});
           out.add_linear({{"grad"}});
         })
      .flops([](const OpCall& call) { return flops(call, 8); });
}

// The mesh of the first DTensor knows the rules from here on.
void add_rules_for(const Tensor& tensor) {
  if (!is_dtensor(tensor)) return;
  static const auto forward = std::make_shared<const Rule>(forward_rule());
  static const auto backward = std::make_shared<const Rule>(backward_rule());
  dtensor_internal::Decisions& decisions = dtensor_internal::meta_of(tensor).context->decisions;
  static const c10::OperatorName name(kForward, "");
  if (decisions.is_plugged_in(name)) return;
  decisions.plug_in(kForward, forward);
  decisions.plug_in(kBackward, backward);
}

}  // namespace

Tensor routed_experts(const Tensor& x, const Tensor& weights, const Tensor& gate_up_proj,
                      const Tensor& down_proj, Activation activation) {
  TORCH_CHECK(gate_up_proj.dim() == 3 && gate_up_proj.size(1) % 2 == 0,
              "routed_experts: wanted gate_up_proj [experts, 2 intermediate, hidden], not ",
              gate_up_proj.sizes());
  for (const Tensor* tensor : {&gate_up_proj, &down_proj, &x, &weights}) add_rules_for(*tensor);
  return call_forward(x, weights, gate_up_proj.unflatten(1, {2, gate_up_proj.size(1) / 2}),
                      down_proj, static_cast<int64_t>(activation));
}

TORCH_LIBRARY(shardweave, m) {
  m.def(
      "routed_experts(Tensor x, Tensor weights, Tensor gate_up, Tensor down, int activation) "
      "-> Tensor");
  m.def(
      "routed_experts_backward(Tensor grad, Tensor x, Tensor weights, Tensor gate_up, Tensor down, "
      "int activation) -> (Tensor, Tensor, Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(shardweave, CPU, m) {
  m.impl("routed_experts", forward_kernel);
  m.impl("routed_experts_backward", backward_kernel);
}
TORCH_LIBRARY_IMPL(shardweave, CUDA, m) {
  m.impl("routed_experts", forward_kernel);
  m.impl("routed_experts_backward", backward_kernel);
}
TORCH_LIBRARY_IMPL(shardweave, Meta, m) {
  m.impl("routed_experts", forward_meta);
  m.impl("routed_experts_backward", backward_meta);
}
TORCH_LIBRARY_IMPL(shardweave, Autograd, m) {
  m.impl("routed_experts", forward_autograd);
}

}  // namespace shardweave::nn
