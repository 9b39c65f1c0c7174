#include "linear_gelu.h"

#include <tuple>

#include "ATen/ops/gelu.h"
#include "ATen/ops/gelu_backward.h"
#include "ATen/ops/linear.h"
#include "ATen/ops/matmul.h"
#include "ATen/ops/mm.h"
#include "ATen/ops/sum.h"
#include "torch/csrc/autograd/custom_function.h"
#include "torch/library.h"

namespace plugin_example {
namespace {

using at::Tensor;
using Gradients = std::tuple<Tensor, Tensor, Tensor>;

// --- the kernels, for one device; on meta tensors they say what the results look like ---

Tensor linear_gelu_kernel(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  Tensor hidden = at::linear(x, weight, bias);
  return at::gelu_(hidden);
}

// [..., features] as [rows, features], also where there are none: a rank may have an empty part.
Tensor rows_of(const Tensor& t) {
  return t.dim() > 1 ? t.flatten(0, -2) : t.unsqueeze(0);
}

Gradients linear_gelu_backward_kernel(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                      const Tensor& bias) {
  const Tensor grad_hidden = at::gelu_backward(grad, at::linear(x, weight, bias));
  const Tensor rows = rows_of(grad_hidden);
  return {at::matmul(grad_hidden, weight), at::mm(rows.t(), rows_of(x)), rows.sum(0)};
}

// --- the derivative: the forward and the backward operator, through the dispatcher ---

Tensor call_linear_gelu(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("example::linear_gelu", "")
                             .typed<Tensor(const Tensor&, const Tensor&, const Tensor&)>();
  return op.call(x, weight, bias);
}

Gradients call_linear_gelu_backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                    const Tensor& bias) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("example::linear_gelu_backward", "")
          .typed<Gradients(const Tensor&, const Tensor&, const Tensor&, const Tensor&)>();
  return op.call(grad, x, weight, bias);
}

struct LinearGelu : torch::autograd::Function<LinearGelu> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x,
                        const Tensor& weight, const Tensor& bias) {
    context->save_for_backward({x, weight, bias});
    const at::AutoDispatchBelowADInplaceOrView guard;
    return call_linear_gelu(x, weight, bias);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const torch::autograd::variable_list saved = context->get_saved_variables();
    auto [x, weight, bias] = call_linear_gelu_backward(grads[0], saved[0], saved[1], saved[2]);
    return {x, weight, bias};
  }
};

Tensor linear_gelu_autograd(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  return LinearGelu::apply(x, weight, bias);
}

}  // namespace

TORCH_LIBRARY(example, m) {
  m.def("linear_gelu(Tensor x, Tensor weight, Tensor bias) -> Tensor");
  m.def(
      "linear_gelu_backward(Tensor grad, Tensor x, Tensor weight, Tensor bias) "
      "-> (Tensor, Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(example, CPU, m) {
  m.impl("linear_gelu", linear_gelu_kernel);
  m.impl("linear_gelu_backward", linear_gelu_backward_kernel);
}
TORCH_LIBRARY_IMPL(example, Meta, m) {
  m.impl("linear_gelu", linear_gelu_kernel);
  m.impl("linear_gelu_backward", linear_gelu_backward_kernel);
}
TORCH_LIBRARY_IMPL(example, Autograd, m) {
  m.impl("linear_gelu", linear_gelu_autograd);
}

Tensor linear_gelu(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  return call_linear_gelu(x, weight, bias);
}

// Rows of x give rows of the result, rows of the weight its columns. A part of the features of x
// gives a part of a sum, of which gelu means nothing: they stay whole.
shardweave::Rule linear_gelu_rule() {
  using namespace shardweave;
  return sharded([](const OpCall& call, Strategies& out) {
           const int features = call.input("x").ndim() - 1;
           for (int d = 0; d < features; ++d) out.add({{"x", Shard(d)}}, {Shard(d)});
           out.add({{"weight", Shard(0)}, {"bias", Shard(0)}}, {Shard(features)});
         })
      .flops([](const OpCall& call) {
        return 2.0 * static_cast<double>(call.input("x").numel()) *
               static_cast<double>(call.input("weight").sizes[0]);
      });
}

// Who has some of the rows has summands of the weight's gradient, who has some of the columns
// summands of x's.
shardweave::Rule linear_gelu_backward_rule() {
  using namespace shardweave;
  return sharded([](const OpCall& call, Strategies& out) {
           const int features = call.input("x").ndim() - 1;
           for (int d = 0; d < features; ++d) {
             out.add({{"grad", Shard(d)}, {"x", Shard(d)}}, {Shard(d), Partial(), Partial()});
           }
           out.add({{"grad", Shard(features)}, {"weight", Shard(0)}, {"bias", Shard(0)}},
                   {Partial(), Shard(0), Shard(0)});
           out.add_linear({{"grad"}});
         })
      .flops([](const OpCall& call) {
        return 6.0 * static_cast<double>(call.input("x").numel()) *
               static_cast<double>(call.input("weight").sizes[0]);
      });
}

}  // namespace plugin_example
