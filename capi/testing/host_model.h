// A model whose forward is the host's, in operators alone, and its training.
#ifndef SHARDWEAVE_CAPI_TESTING_HOST_MODEL_H_
#define SHARDWEAVE_CAPI_TESTING_HOST_MODEL_H_

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "capi/testing/on_mesh.h"
#include "gtest/gtest.h"
#include "shardweave.h"
#include "shardweave/capi/handles.h"
#include "shardweave/dtensor/dtensor.h"

namespace c_test {

constexpr int64_t kDim = 5, kHidden = 7, kRows = 7, kOut = 3;
constexpr int kBlocks = 3, kSteps = 3;

inline void numbers(const std::vector<int64_t>& sizes, double phase, Tensor& to) {
  const at::Tensor values =
      at::sin(at::arange(c10::multiply_integers(sizes), at::kFloat) * 0.7 + phase) * 0.5;
  ok(swv_tensor_from_data(values.data_ptr(), values.nbytes(), sizes.data(), sizes.size(), nullptr,
                          to.out()));
}

// Linear layers by their names.
inline const std::vector<std::pair<std::string, std::vector<int64_t>>>& shapes() {
  static const auto* const all = [] {
    auto* made = new std::vector<std::pair<std::string, std::vector<int64_t>>>();
    for (int i = 0; i < kBlocks; ++i) {
      const std::string block = "blocks." + std::to_string(i);
      made->push_back({block + ".up.weight", {kHidden, kDim}});
      made->push_back({block + ".up.bias", {kHidden}});
      made->push_back({block + ".down.weight", {kDim, kHidden}});
      made->push_back({block + ".down.bias", {kDim}});
    }
    made->push_back({"head.weight", {kOut, kDim}});
    made->push_back({"scale", {}});  // a number
    return made;
  }();
  return *all;
}

inline void make_model(Module& module) {
  ok(swv_module_create(module.out()));
  double phase = 0;
  for (const auto& [name, sizes] : shapes()) {
    Tensor parameter;
    numbers(sizes, ++phase, parameter);
    ok(swv_module_add_parameter(module, name.c_str(), parameter));
  }
}

inline void call(const char* name, const std::vector<swv_value>& arguments, Tensor& to,
                 swv_grad_mode mode = SWV_MODE_GRAD) {
  Op op;
  swv_value result = SWV_NONE;
  ok(swv_op_find(name, op.out()));
  ok(swv_op_call(op, mode, arguments.data(), arguments.size(), &result, 1, nullptr));
  *to.out() = result.as.tensor;
}

// The forward: x + down(gelu(up(x))), block by block, then the head.
inline void linear(swv_module* module, const std::string& layer, swv_tensor* x, Tensor& to,
                   swv_grad_mode mode) {
  Tensor weight, bias;
  ok(swv_module_get(module, (layer + ".weight").c_str(), weight.out()));
  std::vector<swv_value> arguments = {swv_value_tensor(x), swv_value_tensor(weight)};
  if (layer != "head") {
    ok(swv_module_get(module, (layer + ".bias").c_str(), bias.out()));
    arguments.push_back(swv_value_tensor(bias));
  }
  call("aten::linear", arguments, to, mode);
}
inline void forward(swv_module* module, swv_tensor* input, Tensor& to,
                    swv_grad_mode mode = SWV_MODE_GRAD) {
  Tensor x, scale;
  ok(swv_tensor_share(input, x.out()));
  for (int i = 0; i < kBlocks; ++i) {
    const std::string block = "blocks." + std::to_string(i);
    Tensor h, g, y, sum;
    linear(module, block + ".up", x, h, mode);
    call("aten::gelu", {swv_value_tensor(h)}, g, mode);
    linear(module, block + ".down", g, y, mode);
    call("aten::add.Tensor", {swv_value_tensor(x), swv_value_tensor(y)}, sum, mode);
    ok(swv_tensor_share(sum, x.out()));
  }
  Tensor y;
  linear(module, "head", x, y, mode);
  ok(swv_module_get(module, "scale", scale.out()));
  call("aten::mul.Tensor", {swv_value_tensor(y), swv_value_tensor(scale)}, to, mode);
}

using Values = std::vector<std::pair<std::string, at::Tensor>>;
inline at::Tensor whole(const at::Tensor& t) {
  const at::NoGradGuard no_grad;
  return (shardweave::is_dtensor(t) ? shardweave::full_tensor(t) : t).detach().clone();
}
inline Values parameters_of(swv_module* module) {
  size_t count = 0;
  ok(swv_module_num_parameters(module, &count));
  Values all;
  for (size_t i = 0; i < count; ++i) {
    swv_string* fqn = nullptr;
    Tensor tensor;
    ok(swv_module_parameter(module, i, &fqn, tensor.out()));
    all.emplace_back(text_of(fqn), tensor->tensor);
  }
  return all;
}
// The values, and the gradients.
inline std::pair<Values, Values> seen(swv_module* module) {
  std::pair<Values, Values> result;
  for (const auto& [name, tensor] : parameters_of(module)) {
    result.first.emplace_back(name, whole(tensor));
    result.second.emplace_back(name, whole(tensor.grad()));
  }
  return result;
}
inline void expect_close(const Values& got, const Values& wanted, const std::string& where) {
  ASSERT_EQ(got.size(), wanted.size()) << where;
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].first, wanted[i].first) << where;
    EXPECT_TRUE(at::allclose(got[i].second, wanted[i].second, 1e-5, 1e-5))
        << where << ": " << got[i].first << "\n"
        << got[i].second << "\nwanted\n"
        << wanted[i].second;
  }
}

inline void feed(int step, bool targets, swv_mesh* mesh, Tensor& to) {
  Tensor plain;
  numbers({kRows, targets ? kOut : kDim}, 3 * step + (targets ? 1.5 : 0.25), plain);
  if (mesh == nullptr) {
    ok(swv_tensor_share(plain, to.out()));
    return;
  }
  Layout rows;
  const swv_named_placement placement = {"dp", "S(0)"};
  ok(swv_layout_create_named(mesh, &placement, 1, rows.out()));
  ok(swv_tensor_distribute(plain, mesh, rows, nullptr, to.out()));
}

// An optimizer of all parameters.
using MakeOptimizer = std::function<void(swv_tensor* const* parameters, size_t count, Optimizer&)>;
inline void make_adamw(swv_tensor* const* parameters, size_t count, Optimizer& optimizer) {
  swv_adamw_options options = SWV_ADAMW_OPTIONS_INIT;
  options.lr = 0.01;
  ok(swv_optimizer_create_adamw(parameters, count, &options, optimizer.out()));
}
inline void optimizer_of(swv_module* module, const MakeOptimizer& make, Optimizer& optimizer) {
  size_t count = 0;
  ok(swv_module_num_parameters(module, &count));
  std::vector<Tensor> parameters(count);
  std::vector<swv_tensor*> handles;
  for (size_t i = 0; i < count; ++i) {
    ok(swv_module_parameter(module, i, nullptr, parameters[i].out()));
    handles.push_back(parameters[i]);
  }
  make(handles.data(), count, optimizer);
}

// The values behind each step, and its gradients.
using Steps = std::vector<std::pair<Values, Values>>;
inline Steps train(swv_module* module, swv_mesh* mesh, const MakeOptimizer& make = make_adamw) {
  Optimizer optimizer;
  optimizer_of(module, make, optimizer);
  Steps steps;
  for (int step = 0; step < kSteps; ++step) {
    Tensor x, target, y, loss;
    feed(step, false, mesh, x);
    feed(step, true, mesh, target);
    forward(module, x, y);
    call("aten::mse_loss", {swv_value_tensor(y), swv_value_tensor(target)}, loss);
    ok(swv_tensor_backward(loss, nullptr, nullptr));
    ok(swv_module_finish_grad_sync(module));
    ok(swv_optimizer_step(optimizer));
    steps.push_back(seen(module));
    ok(swv_optimizer_zero_grad(optimizer));
  }
  return steps;
}

}  // namespace c_test

#endif  // SHARDWEAVE_CAPI_TESTING_HOST_MODEL_H_
