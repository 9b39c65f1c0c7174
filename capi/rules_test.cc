// Operators of a library of one's own, sharded by the rules that a host gives them: values, gradients
// and layouts are those of one rank, and nothing is sent where a way fits.
#include <cstdlib>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave.h"
#include "shardweave/capi/handles.h"
#include "shardweave/dtensor/dtensor.h"
#include "torch/csrc/autograd/custom_function.h"
#include "torch/library.h"

namespace {

using at::Tensor;
using ::testing::AllOf;
using ::testing::HasSubstr;

using Pair = std::tuple<Tensor, Tensor>;

Tensor linear_gelu(const Tensor& x, const Tensor& weight) {
  return at::gelu(at::linear(x, weight));
}
Pair linear_gelu_backward(const Tensor& grad, const Tensor& x, const Tensor& weight) {
  const Tensor hidden = at::gelu_backward(grad, at::linear(x, weight));
  return {at::mm(hidden, weight), at::mm(hidden.t(), x)};
}
Tensor damped(const Tensor& x, const Tensor& scale) {
  return x / (scale + x * x);
}
std::vector<Tensor> each_plus(at::TensorList xs, const std::optional<Tensor>& bias) {
  std::vector<Tensor> sums;
  for (const Tensor& x : xs) sums.push_back(bias.has_value() ? x + *bias : x + 1);
  return sums;
}

template <typename Function, typename... Args>
auto dispatched(const char* name, const Args&... args) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Function>().call(args...);
}

struct LinearGelu : torch::autograd::Function<LinearGelu> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x,
                        const Tensor& weight) {
    context->save_for_backward({x, weight});
    const at::AutoDispatchBelowADInplaceOrView guard;
    return dispatched<Tensor(const Tensor&, const Tensor&)>("rulestest::linear_gelu", x, weight);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const torch::autograd::variable_list saved = context->get_saved_variables();
    auto [x, weight] = dispatched<Pair(const Tensor&, const Tensor&, const Tensor&)>(
        "rulestest::linear_gelu_backward", grads[0], saved[0], saved[1]);
    return {x, weight};
  }
};

Tensor linear_gelu_autograd(const Tensor& x, const Tensor& weight) {
  return LinearGelu::apply(x, weight);
}

TORCH_LIBRARY(rulestest, m) {
  m.def("linear_gelu(Tensor x, Tensor weight) -> Tensor");
  m.def("linear_gelu_backward(Tensor grad, Tensor x, Tensor weight) -> (Tensor, Tensor)");
  m.def("damped(Tensor x, Tensor scale) -> Tensor");
  m.def("each_plus(Tensor[] xs, Tensor? bias) -> Tensor[]");
}
template <typename Library>
void add_kernels(Library& m) {
  m.impl("linear_gelu", linear_gelu);
  m.impl("linear_gelu_backward", linear_gelu_backward);
  m.impl("damped", damped);
  m.impl("each_plus", each_plus);
}
TORCH_LIBRARY_IMPL(rulestest, CPU, m) {
  add_kernels(m);
}
TORCH_LIBRARY_IMPL(rulestest, Meta, m) {
  add_kernels(m);
}
TORCH_LIBRARY_IMPL(rulestest, Autograd, m) {
  m.impl("linear_gelu", linear_gelu_autograd);
}

void ok(swv_status* status) {
  if (status == nullptr) return;
  const std::string message = swv_status_message(status);
  swv_status_free(status);
  throw std::runtime_error(message);
}
std::string message_of(swv_status* status, swv_code code = SWV_CODE_INVALID_ARGUMENT) {
  EXPECT_EQ(swv_status_code(status), code) << swv_status_message(status);
  std::string message = swv_status_message(status);
  swv_status_free(status);
  return message;
}

swv_status* add_rule(swv_mesh* mesh, const char* name, std::vector<const char*> ways) {
  return swv_mesh_add_rule(mesh, name, ways.data(), ways.size());
}
void add_linear_gelu(swv_mesh* mesh) {
  ok(add_rule(mesh, "rulestest::linear_gelu", {"S(0), R -> S(0)", "R, S(0) -> S(1)"}));
  ok(add_rule(mesh, "rulestest::linear_gelu_backward",
              {"S(0), S(0), R -> S(0), P", "S(1), R, S(0) -> P, S(0)", "P, R, R -> P"}));
}

// On every rank of a mesh; a test fails that throws.
void on_mesh(const char* text, const std::function<void(swv_mesh*)>& body) {
  struct Job {
    const char* mesh;
    const std::function<void(swv_mesh*)>* body;
  } given{text, &body};
  int32_t ranks = 1;
  for (const char* at = text; (at = std::strchr(at, '=')) != nullptr;) ranks *= std::atoi(++at);
  swv_status* const status = swv_run_ranks(
      ranks,
      [](void* user_data, swv_world* world) -> swv_status* {
        const Job& job = *static_cast<Job*>(user_data);
        swv_mesh* mesh = nullptr;
        try {
          ok(swv_mesh_parse(world, job.mesh, &mesh));
          (*job.body)(mesh);
        } catch (const std::exception& error) {
          swv_mesh_free(mesh);
          return swv_status_new(SWV_CODE_UNKNOWN, error.what());
        }
        swv_mesh_free(mesh);
        return nullptr;
      },
      &given, nullptr);
  EXPECT_EQ(status, nullptr) << text << ": " << swv_status_message(status);
  swv_status_free(status);
}

// The same numbers on every rank.
Tensor numbers(at::IntArrayRef sizes) {
  const Tensor at = at::arange(c10::multiply_integers(sizes), at::kFloat);
  return at::sin(at * 0.7).reshape(sizes);
}
swv_tensor* distributed(swv_mesh* mesh, const Tensor& plain, const char* layout) {
  swv_tensor* const given = shardweave::capi::make<swv_tensor>(plain);
  swv_layout* parsed = nullptr;
  swv_tensor* result = nullptr;
  ok(swv_layout_parse(layout, &parsed));
  swv_distribute_options options = SWV_DISTRIBUTE_OPTIONS_INIT;
  ok(swv_tensor_distribute(given, mesh, parsed, &options, &result));
  swv_layout_free(parsed);
  swv_tensor_free(given);
  return result;
}
std::string layout_of(const Tensor& t) {
  return shardweave::layout_of(t).to_string();
}

swv_status* call(const char* name, std::vector<swv_value> arguments, swv_value* result) {
  swv_op* op = nullptr;
  ok(swv_op_find(name, &op));
  swv_status* const status =
      swv_op_call(op, SWV_MODE_GRAD, arguments.data(), arguments.size(), result, 1, nullptr);
  swv_op_free(op);
  return status;
}

struct Case {
  const char* mesh;
  const char* x;
  const char* weight;
  const char* result;
  int64_t rows;
};

TEST(Rules, FusedOperatorsRunInPartsForwardAndBackward) {
  const Case cases[] = {
      {"x=2", "[S(0)]", "[R]", "[S(0)]", 7},
      {"x=2", "[R]", "[S(0)]", "[S(1)]", 7},
      {"x=2", "[S(0)]", "[R]", "[S(0)]", 1},  // the second rank has nothing
      {"dp=2,tp=2", "[S(0), R]", "[R, S(0)]", "[S(0), S(1)]", 7},
      {"dp=2,tp=2", "[S(0), S(0)]", "[R, R]", "[S(0), S(0)]", 3},
  };
  for (const Case& c : cases) {
    on_mesh(c.mesh, [&](swv_mesh* mesh) {
      add_linear_gelu(mesh);
      const Tensor x = numbers({c.rows, 3}).requires_grad_();
      const Tensor weight = numbers({5, 3}).requires_grad_();
      const Tensor expected = linear_gelu(x, weight);
      const Tensor grad = numbers({c.rows, 5});
      expected.backward(grad);

      swv_tensor* const sharded_x = distributed(mesh, x.detach(), c.x);
      swv_tensor* const sharded_weight = distributed(mesh, weight.detach(), c.weight);
      swv_tensor* const sharded_grad = distributed(mesh, grad, c.result);
      ok(swv_tensor_set_requires_grad(sharded_x, 1));
      ok(swv_tensor_set_requires_grad(sharded_weight, 1));
      swv_value result = SWV_NONE;
      {
        swv_scope* nothing_is_sent = nullptr;
        ok(swv_mesh_forbid_communication(mesh, &nothing_is_sent));
        ok(call("rulestest::linear_gelu",
                {swv_value_tensor(sharded_x), swv_value_tensor(sharded_weight)}, &result));
        ok(swv_tensor_backward(result.as.tensor, sharded_grad, nullptr));
        swv_scope_free(nothing_is_sent);
      }
      EXPECT_EQ(layout_of(result.as.tensor->tensor), c.result) << c.mesh;
      EXPECT_TRUE(at::allclose(shardweave::full_tensor(result.as.tensor->tensor.detach()),
                               expected.detach(), 1e-5, 1e-6))
          << c.mesh << c.x;
      EXPECT_TRUE(
          at::allclose(shardweave::full_tensor(sharded_x->tensor.grad()), x.grad(), 1e-5, 1e-6))
          << c.mesh << c.x;
      EXPECT_TRUE(at::allclose(shardweave::full_tensor(sharded_weight->tensor.grad()),
                               weight.grad(), 1e-5, 1e-6))
          << c.mesh << c.x;
      swv_value_clear(&result);
      swv_tensor_free(sharded_grad);
      swv_tensor_free(sharded_weight);
      swv_tensor_free(sharded_x);
    });
  }
}

TEST(Rules, PointwiseOperatorsBroadcast) {
  on_mesh("dp=2,tp=2", [](swv_mesh* mesh) {
    ok(add_rule(mesh, "rulestest::damped", {"pointwise"}));
    swv_tensor* const x = distributed(mesh, numbers({5, 3}), "[S(0), S(1)]");
    swv_tensor* const scale = distributed(mesh, numbers({3}) + 2, "[R, S(0)]");
    swv_value result = SWV_NONE;
    swv_scope* nothing_is_sent = nullptr;
    ok(swv_mesh_forbid_communication(mesh, &nothing_is_sent));
    ok(call("rulestest::damped", {swv_value_tensor(x), swv_value_tensor(scale)}, &result));
    swv_scope_free(nothing_is_sent);
    EXPECT_EQ(layout_of(result.as.tensor->tensor), "[S(0), S(1)]");
    EXPECT_TRUE(at::allclose(shardweave::full_tensor(result.as.tensor->tensor),
                             damped(numbers({5, 3}), numbers({3}) + 2)));
    swv_value_clear(&result);
    swv_tensor_free(scale);
    swv_tensor_free(x);
  });
}

TEST(Rules, AWayCountsAListOnceAndWhatIsNotGiven) {
  on_mesh("x=2", [](swv_mesh* mesh) {
    ok(add_rule(mesh, "rulestest::each_plus", {"S(0), R -> S(0)"}));
    swv_tensor* all[] = {distributed(mesh, numbers({5, 3}), "[S(0)]"),
                         distributed(mesh, numbers({2, 3}), "[S(0)]")};
    swv_tensor* const bias = distributed(mesh, numbers({3}), "[R]");
    for (const bool with_bias : {true, false}) {
      swv_value result = SWV_NONE;
      swv_scope* nothing_is_sent = nullptr;
      ok(swv_mesh_forbid_communication(mesh, &nothing_is_sent));
      ok(call("rulestest::each_plus",
              {swv_value_tensors(all, 2), with_bias ? swv_value_tensor(bias) : swv_value_none()},
              &result));
      swv_scope_free(nothing_is_sent);
      ASSERT_EQ(result.as.tensors.size, 2);
      for (int i = 0; i < 2; ++i) {
        const Tensor& sum = result.as.tensors.data[i]->tensor;
        const Tensor x = numbers({i == 0 ? 5 : 2, 3});
        EXPECT_EQ(layout_of(sum), "[S(0)]");
        EXPECT_TRUE(
            at::allclose(shardweave::full_tensor(sum), with_bias ? x + numbers({3}) : x + 1));
      }
      swv_value_clear(&result);
    }
    swv_tensor_free(bias);
    for (swv_tensor* each : all) swv_tensor_free(each);
  });
}

TEST(Rules, WhatDoesNotFitIsAnErrorOnEveryRankAtOnce) {
  on_mesh("x=2", [](swv_mesh* mesh) {
    const char* const op = "rulestest::linear_gelu";
    EXPECT_THAT(
        message_of(add_rule(mesh, "rulestest::linear_gel", {"pointwise"}), SWV_CODE_NOT_FOUND),
        AllOf(HasSubstr("no operator 'rulestest::linear_gel'"), HasSubstr(op)));
    EXPECT_THAT(
        message_of(add_rule(mesh, op, {"S(0), R -> S(0)", "S(0) -> S(0)"})),
        AllOf(HasSubstr(op), HasSubstr("ways[1]"),
              HasSubstr("with 1 placements of inputs; wanted 2"), HasSubstr("Tensor weight")));
    EXPECT_THAT(message_of(add_rule(mesh, op, {"S(0), R -> S(0), R, R"})),
                AllOf(HasSubstr(op), HasSubstr("with 3 placements of outputs; wanted 1")));
    EXPECT_THAT(message_of(add_rule(mesh, op, {"S(0), R"})),
                AllOf(HasSubstr(op), HasSubstr("wanted one such as")));
    EXPECT_THAT(message_of(add_rule(mesh, op, {"S(0), Q -> R"})), HasSubstr(op));
    EXPECT_THAT(message_of(add_rule(mesh, op, {"S(-1), R -> R"})),
                AllOf(HasSubstr("S(-1)"), HasSubstr("d from 0")));
    EXPECT_THAT(message_of(add_rule(mesh, op, {"S(0, sf=2), R -> S(0)"})), HasSubstr("sf=2"));
    EXPECT_THAT(message_of(add_rule(mesh, op, {nullptr})), HasSubstr("ways[0]"));
    EXPECT_THAT(message_of(swv_mesh_add_rule(mesh, op, nullptr, 1)), HasSubstr("'ways' is NULL"));

    // None of these is left: this is the first.
    ok(add_rule(mesh, op, {"S(0), S(2) -> S(0)"}));
    EXPECT_THAT(message_of(add_rule(mesh, op, {"pointwise"}), SWV_CODE_ALREADY_EXISTS),
                HasSubstr("'rulestest::linear_gelu' has another rule on this mesh already"));
    swv_tensor* const x = distributed(mesh, numbers({4, 3}), "[S(0)]");
    swv_tensor* const weight = distributed(mesh, numbers({5, 3}), "[R]");
    swv_value result = SWV_NONE;
    EXPECT_THAT(message_of(call(op, {swv_value_tensor(x), swv_value_tensor(weight)}, &result)),
                AllOf(HasSubstr("rulestest::linear_gelu: its rule has 'S(0), S(2) -> S(0)'"),
                      HasSubstr("input 1 has 2 dimensions")));
    // The mesh goes on.
    ok(call("aten::mul", {swv_value_tensor(x), swv_value_tensor(x)}, &result));
    swv_value_clear(&result);
    swv_tensor_free(weight);
    swv_tensor_free(x);
  });
}

}  // namespace
