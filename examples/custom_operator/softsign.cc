#include "softsign.h"

#include <tuple>

#include "ATen/ops/abs.h"
#include "ATen/ops/add.h"
#include "ATen/ops/div.h"
#include "ATen/ops/mul.h"
#include "ATen/ops/neg.h"
#include "ATen/ops/sum.h"
#include "torch/csrc/autograd/custom_function.h"
#include "torch/library.h"

namespace custom_operator {
namespace {

using at::Tensor;

// --- the kernels, for one device ---

Tensor softsign_kernel(const Tensor& x, const Tensor& scale) {
  return x.div(x.abs().add(scale));
}

std::tuple<Tensor, Tensor> softsign_backward_kernel(const Tensor& grad, const Tensor& x,
                                                    const Tensor& scale) {
  const Tensor denominator = x.abs().add(scale);
  const Tensor square = denominator.mul(denominator);
  const Tensor per_element = grad.mul(x).div(square).neg();
  const Tensor grad_scale = x.dim() == 1 ? per_element : per_element.flatten(0, -2).sum(0);
  return {grad.mul(scale).div(square), grad_scale};
}

// --- the derivative: the forward and the backward operator, through the dispatcher ---

Tensor call_softsign(const Tensor& x, const Tensor& scale) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("mylib::softsign", "")
                             .typed<Tensor(const Tensor&, const Tensor&)>();
  return op.call(x, scale);
}

std::tuple<Tensor, Tensor> call_softsign_backward(const Tensor& grad, const Tensor& x,
                                                  const Tensor& scale) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("mylib::softsign_backward", "")
          .typed<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&)>();
  return op.call(grad, x, scale);
}

struct Softsign : torch::autograd::Function<Softsign> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x,
                        const Tensor& scale) {
    context->save_for_backward({x, scale});
    const at::AutoDispatchBelowADInplaceOrView guard;
    return call_softsign(x, scale);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const torch::autograd::variable_list saved = context->get_saved_variables();
    auto [grad_x, grad_scale] = call_softsign_backward(grads[0], saved[0], saved[1]);
    return {grad_x, grad_scale};
  }
};

Tensor softsign_autograd(const Tensor& x, const Tensor& scale) {
  return Softsign::apply(x, scale);
}

}  // namespace

TORCH_LIBRARY(mylib, m) {
  m.def("softsign(Tensor x, Tensor scale) -> Tensor");
  m.def("softsign_backward(Tensor grad, Tensor x, Tensor scale) -> (Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(mylib, CPU, m) {
  m.impl("softsign", softsign_kernel);
  m.impl("softsign_backward", softsign_backward_kernel);
}
TORCH_LIBRARY_IMPL(mylib, Autograd, m) {
  m.impl("softsign", softsign_autograd);
}

Tensor softsign(const Tensor& x, const Tensor& scale) {
  return call_softsign(x, scale);
}

// Elementwise, with `scale` broadcast. The result looks like x.
shardweave::Rule softsign_rule() {
  return shardweave::pointwise().shapes_like({"x"});
}

// The gradient of `scale` is a sum over everything but the features: where that is cut, each rank
// has a summand.
shardweave::Rule softsign_backward_rule() {
  using namespace shardweave;
  return sharded([](const OpCall& call, Strategies& out) {
           const int features = call.input("x").ndim() - 1;
           for (int d = 0; d < features; ++d) {
             out.add({{"grad", Shard(d)}, {"x", Shard(d)}}, {Shard(d), Partial()});
           }
           out.add({{"grad", Shard(features)}, {"x", Shard(features)}, {"scale", Shard(0)}},
                   {Shard(features), Shard(0)});
           out.add_linear({{"grad"}});
         })
      .shapes_like({"x", "scale"});
}

}  // namespace custom_operator
