// Modules from TorchScript files: what is saved in C++ is loaded, sharded and called through C.
#include <complex>
#include <cstdlib>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "gtest/gtest.h"
#include "shardweave.h"
#include "shardweave/capi/handles.h"
#include "torch/csrc/jit/api/module.h"

namespace {

void must(swv_status* status) {
  ASSERT_EQ(status, nullptr) << swv_status_message(status);
}
std::string message_of(swv_status* status) {
  std::string message = swv_status_message(status);
  swv_status_free(status);
  return message;
}

// y = (x w') * scale + offset, with a sub-module.
std::string saved_module() {
  torch::jit::Module root("Root"), inner("Inner");
  inner.register_parameter(
      "weight", (at::arange(12, at::kFloat).reshape({4, 3}) / 7).requires_grad_(), false);
  inner.register_parameter("frozen", at::ones({2}), false);
  inner.register_parameter("codes", at::arange(3), false);  // integers never train
  inner.register_buffer("offset", at::ones({4}));
  for (auto* module : {&root, &inner}) {
    module->register_attribute("training", c10::BoolType::get(), true);
  }
  inner.define("def forward(self, x):\n  return torch.linear(x, self.weight) + self.offset\n");
  root.register_module("inner", inner);
  root.define(
      "def forward(self, x, scale: float = 2.0):\n  return self.inner.forward(x) * scale\n"
      "def both(self, x):\n  return (x, self.inner.forward(x))\n"
      "def mode(self, x):\n  return self.inner.training\n"
      "def turned(self, z: complex, by: Optional[complex] = None):\n"
      "  if by is None:\n    return z\n  return z * by\n");
  const std::string path = std::string(std::getenv("TEST_TMPDIR")) + "/model.pt";
  root.save(path);
  return path;
}

class ScriptModuleTest : public testing::Test {
 protected:
  void SetUp() override {
    before_ = swv_live_handles();
    must(swv_module_load(saved_module().c_str(), &module_));
    const float data[] = {1, 2, 3, -1, 0, 5};
    const int64_t sizes[] = {2, 3};
    must(swv_tensor_from_data(data, sizeof(data), sizes, 2, nullptr, &x_));
  }
  void TearDown() override {
    swv_tensor_free(x_);
    swv_module_free(module_);
    EXPECT_EQ(swv_live_handles(), before_) << "leaked";
  }
  at::Tensor wanted(double scale) const {
    return (at::linear(x_->tensor, at::arange(12, at::kFloat).reshape({4, 3}) / 7) + 1) * scale;
  }

  int64_t before_ = 0;
  swv_module* module_ = nullptr;
  swv_tensor* x_ = nullptr;
};

TEST_F(ScriptModuleTest, ItsParametersHaveTheirNames) {
  size_t parameters = 0, buffers = 0;
  must(swv_module_num_parameters(module_, &parameters));
  must(swv_module_num_buffers(module_, &buffers));
  EXPECT_EQ(parameters, 3u);
  EXPECT_EQ(buffers, 1u);
  swv_tensor* weight = nullptr;
  must(swv_module_get(module_, "inner.weight", &weight));
  EXPECT_EQ(weight->tensor.sizes(), (at::IntArrayRef{4, 3}));
  swv_tensor_free(weight);
  const std::string message = message_of(swv_module_get(module_, "inner.weigh", &weight));
  EXPECT_NE(message.find("did you mean 'inner.weight'"), std::string::npos) << message;
}

TEST_F(ScriptModuleTest, CallsItsMethods) {
  const swv_value arguments[] = {swv_value_tensor(x_), swv_value_float(3)};
  swv_value results[2];
  size_t count = 0;
  must(swv_module_call(module_, "forward", SWV_MODE_GRAD, arguments, 1, results, 1, &count));
  ASSERT_EQ(count, 1u);
  EXPECT_TRUE(at::equal(results[0].as.tensor->tensor, wanted(2)));
  swv_value_clear(&results[0]);
  must(swv_module_call(module_, "forward", SWV_MODE_NO_GRAD, arguments, 2, results, 1, nullptr));
  EXPECT_TRUE(at::equal(results[0].as.tensor->tensor, wanted(3)));
  swv_value_clear(&results[0]);
  must(swv_module_call(module_, "both", SWV_MODE_GRAD, arguments, 1, results, 2, &count));
  ASSERT_EQ(count, 2u);
  EXPECT_TRUE(at::equal(results[0].as.tensor->tensor, x_->tensor));
  EXPECT_TRUE(at::equal(results[1].as.tensor->tensor, wanted(1)));
  for (swv_value& result : results) swv_value_clear(&result);
}

TEST_F(ScriptModuleTest, TakesArgumentsByName) {
  const swv_value arguments[] = {swv_value_float(3), swv_value_tensor(x_)};
  const char* const names[] = {"scale", "x"};
  swv_value result = SWV_NONE;
  must(swv_module_call_named(module_, "forward", SWV_MODE_GRAD, arguments, 2, names, 2, &result, 1,
                             nullptr));
  EXPECT_TRUE(at::equal(result.as.tensor->tensor, wanted(3)));
  swv_value_clear(&result);
  must(swv_module_call_named(module_, "forward", SWV_MODE_GRAD, arguments + 1, 1, nullptr, 0,
                             &result, 1, nullptr));
  EXPECT_TRUE(at::equal(result.as.tensor->tensor, wanted(2)));
  swv_value_clear(&result);
  const char* const wrong[] = {"sclae", "x"};
  const std::string message = message_of(swv_module_call_named(
      module_, "forward", SWV_MODE_GRAD, arguments, 2, wrong, 2, &result, 1, nullptr));
  EXPECT_NE(message.find("swv_module_call_named: forward: "), std::string::npos) << message;
  EXPECT_NE(message.find("sclae"), std::string::npos) << message;
}

// The mode reaches the file's own code, also where the module is a part of a host's.
TEST_F(ScriptModuleTest, TrainsAndEvaluates) {
  swv_module* whole = nullptr;
  must(swv_module_create(&whole));
  must(swv_module_add_child(whole, "part", module_));
  for (const swv_bool on : {0, 1}) {
    must(swv_module_train(whole, on));
    swv_bool is_training = -1;
    must(swv_module_is_training(module_, &is_training));
    EXPECT_EQ(is_training, on);
    const swv_value argument = swv_value_tensor(x_);
    swv_value result = SWV_NONE;
    must(swv_module_call(module_, "mode", SWV_MODE_GRAD, &argument, 1, &result, 1, nullptr));
    EXPECT_EQ(result.as.integer, on);
  }
  swv_module_free(whole);
}

// A part of a file is a module of the file: what it is asked, told and called reaches its own code.
TEST(ScriptModuleParts, AreModulesOfTheFile) {
  torch::jit::Module root("Whole"), norm("Norm"), dropout("Drop"), outer("Outer");
  for (auto* module : {&root, &norm, &dropout, &outer}) {
    module->register_attribute("training", c10::BoolType::get(), false);
  }
  norm.register_buffer("mean", at::zeros({3}));
  norm.define(
      "def forward(self, x):\n  if self.training:\n    self.mean.add_(x.mean(0))\n"
      "  return x - self.mean\n");
  dropout.define("def forward(self, x):\n  return torch.dropout(x, 0.5, self.training)\n");
  outer.register_module("drop", dropout);  // no tensors below
  outer.define("def forward(self, x):\n  return self.drop.forward(x)\n");
  root.register_module("bn1", norm);
  root.register_module("outer", outer);
  root.define("def forward(self, x):\n  return self.outer.forward(self.bn1.forward(x))\n");
  const std::string path = std::string(std::getenv("TEST_TMPDIR")) + "/parts.pt";
  root.save(path);

  swv_module *whole = nullptr, *bn = nullptr, *drop = nullptr;
  swv_tensor *x = nullptr, *mean = nullptr;
  must(swv_module_load(path.c_str(), &whole));
  must(swv_module_child(whole, "bn1", &bn));
  must(swv_module_child(whole, "outer.drop", &drop));
  const float data[] = {1, 2, 3, -1, 0, 5};
  const int64_t sizes[] = {2, 3};
  must(swv_tensor_from_data(data, sizeof(data), sizes, 2, nullptr, &x));
  must(swv_module_get(bn, "mean", &mean));
  const auto is_training = [](swv_module* module) {
    swv_bool is = -1;
    must(swv_module_is_training(module, &is));
    return is;
  };
  const swv_value argument = swv_value_tensor(x);
  const auto called = [&](swv_module* module) {
    swv_value result = SWV_NONE;
    must(swv_module_call(module, "forward", SWV_MODE_NO_GRAD, &argument, 1, &result, 1, nullptr));
    if (result.kind != SWV_VALUE_TENSOR) return at::Tensor();
    const at::Tensor tensor = result.as.tensor->tensor;
    swv_value_clear(&result);
    return tensor;
  };
  for (swv_module* module : {whole, bn, drop}) EXPECT_EQ(is_training(module), 0);  // as saved

  must(swv_module_train(whole, 1));
  for (swv_module* module : {whole, bn, drop}) EXPECT_EQ(is_training(module), 1);
  must(swv_module_train(bn, 0));
  EXPECT_EQ(is_training(whole), 1);
  EXPECT_EQ(is_training(bn), 0);
  called(whole);
  EXPECT_TRUE(at::equal(mean->tensor, at::zeros({3}))) << "a frozen norm has learnt";
  must(swv_module_train(bn, 1));
  called(bn);
  EXPECT_TRUE(at::equal(mean->tensor, x->tensor.mean(0)));
  must(swv_module_train(drop, 0));
  const at::Tensor dropped = called(drop);
  EXPECT_TRUE(dropped.defined() && at::equal(dropped, x->tensor));

  for (swv_tensor* t : {x, mean}) swv_tensor_free(t);
  for (swv_module* module : {bn, drop, whole}) swv_module_free(module);
}

// What a file calls "training" may be anything: then the mode is the module's alone.
TEST(ScriptModuleParts, KeepWhatIsNoMode) {
  torch::jit::Module root("Odd"), inner("OddInner");
  root.register_attribute("training", c10::IntType::get(), int64_t{7});
  inner.register_attribute("training", c10::OptionalType::ofTensor(), c10::IValue());
  root.register_module("inner", inner);
  root.define("def steps(self) -> int:\n  return self.training\n");
  const std::string path = std::string(std::getenv("TEST_TMPDIR")) + "/odd.pt";
  root.save(path);
  swv_module *module = nullptr, *part = nullptr;
  must(swv_module_load(path.c_str(), &module));
  must(swv_module_child(module, "inner", &part));
  swv_bool is_training = -1;
  must(swv_module_is_training(module, &is_training));
  EXPECT_EQ(is_training, 1);
  for (const swv_bool on : {0, 1}) {
    must(swv_module_train(module, on));
    for (swv_module* each : {module, part}) {
      must(swv_module_is_training(each, &is_training));
      EXPECT_EQ(is_training, on);
    }
    swv_value steps = SWV_NONE;
    must(swv_module_call(module, "steps", SWV_MODE_GRAD, nullptr, 0, &steps, 1, nullptr));
    EXPECT_EQ(steps.kind, SWV_VALUE_INT);
    EXPECT_EQ(steps.as.integer, 7);
  }
  for (swv_module* each : {part, module}) swv_module_free(each);
}

// Where it wants a complex number, a real one does, too, as where an operator does.
TEST_F(ScriptModuleTest, TakesComplexNumbers) {
  const auto turned = [&](std::vector<swv_value> arguments) {
    swv_value result = SWV_NONE;
    must(swv_module_call(module_, "turned", SWV_MODE_GRAD, arguments.data(), arguments.size(),
                         &result, 1, nullptr));
    EXPECT_EQ(result.kind, SWV_VALUE_COMPLEX);
    return std::complex<double>(result.as.complex_number.real, result.as.complex_number.imaginary);
  };
  using Complex = std::complex<double>;
  EXPECT_EQ(turned({swv_value_complex(1, 2)}), Complex(1, 2));
  EXPECT_EQ(turned({swv_value_complex(1, 2), swv_value_complex(0, 1)}), Complex(-2, 1));
  EXPECT_EQ(turned({swv_value_float(0.5), swv_value_complex(0, 1)}), Complex(0, 0.5));
  EXPECT_EQ(turned({swv_value_complex(1, 2), swv_value_int(3)}), Complex(3, 6));
  EXPECT_EQ(turned({swv_value_complex(1, 2), swv_value_none()}), Complex(1, 2));
  swv_value result = SWV_NONE;
  const swv_value flag = swv_value_bool(1);
  const std::string message =
      message_of(swv_module_call(module_, "turned", SWV_MODE_GRAD, &flag, 1, &result, 1, nullptr));
  EXPECT_NE(message.find("complex z"), std::string::npos) << message;
}

TEST_F(ScriptModuleTest, WorksShardedAndDifferentiates) {
  swv_world* world = nullptr;
  swv_mesh* mesh = nullptr;
  swv_plan* plan = nullptr;
  swv_layout* rows = nullptr;
  swv_tensor *x = nullptr, *weight = nullptr, *gradient = nullptr;
  const swv_mesh_dim dim = {"tp", 1};
  must(swv_world_create_local(1, nullptr, &world));
  must(swv_mesh_create(world, &dim, 1, &mesh));
  must(swv_plan_from_json("{\"parameter\": {\"inner.*\": {\"tp\": \"S(0)\"}}}", &plan));
  must(swv_module_distribute(module_, mesh, plan, nullptr));
  must(swv_layout_parse("[R]", &rows));
  must(swv_tensor_distribute(x_, mesh, rows, nullptr, &x));
  const swv_value argument = swv_value_tensor(x);
  swv_value y, sum;
  must(swv_module_call(module_, "forward", SWV_MODE_GRAD, &argument, 1, &y, 1, nullptr));
  EXPECT_EQ(shardweave::layout_of(y.as.tensor->tensor).to_string(), "[S(1)]");
  EXPECT_TRUE(at::equal(shardweave::full_tensor(y.as.tensor->tensor), wanted(2)));
  swv_op* op = nullptr;
  must(swv_op_find("aten::sum", &op));
  must(swv_op_call(op, SWV_MODE_GRAD, &y, 1, &sum, 1, nullptr));
  must(swv_tensor_backward(sum.as.tensor, nullptr, nullptr));
  must(swv_module_get(module_, "inner.weight", &weight));
  must(swv_tensor_grad(weight, &gradient));
  ASSERT_NE(gradient, nullptr);
  EXPECT_TRUE(
      at::equal(shardweave::full_tensor(gradient->tensor), (x_->tensor.sum(0) * 2).expand({4, 3})));
  swv_op_free(op);
  swv_value_clear(&sum);
  swv_value_clear(&y);
  for (swv_tensor* t : {x, weight, gradient}) swv_tensor_free(t);
  swv_layout_free(rows);
  swv_plan_free(plan);
  swv_mesh_free(mesh);
  swv_world_free(world);
}

// What a file has frozen stays so; what it runs is met without being announced.
TEST_F(ScriptModuleTest, IsAsItWasSaved) {
  for (const auto& [name, trained] :
       {std::pair("inner.weight", 1), {"inner.frozen", 0}, {"inner.codes", 0}}) {
    swv_tensor* tensor = nullptr;
    swv_bool requires_grad = 2;
    must(swv_module_get(module_, name, &tensor));
    must(swv_tensor_requires_grad(tensor, &requires_grad));
    EXPECT_EQ(requires_grad, trained) << name;
    swv_tensor_free(tensor);
  }
  swv_forward* forward = nullptr;
  EXPECT_THAT(message_of(swv_module_forward(module_, "inner", &forward)),
              testing::HasSubstr("'module' is of a file"));
  EXPECT_EQ(forward, nullptr);
}

// The forward of TorchScript is met where its weight is.
TEST_F(ScriptModuleTest, FollowsAForwardPlan) {
  swv_world* world = nullptr;
  swv_mesh* mesh = nullptr;
  swv_plan* plan = nullptr;
  swv_layout* all = nullptr;
  swv_tensor* x = nullptr;
  const swv_mesh_dim dim = {"tp", 1};
  must(swv_world_create_local(1, nullptr, &world));
  must(swv_mesh_create(world, &dim, 1, &mesh));
  must(swv_plan_from_json(R"json({"parameter": {"inner.weight": {"tp": "S(0)"}},
                                  "forward": {"inner.output": {"tp": "S(0)"}}})json",
                          &plan));
  must(swv_module_distribute(module_, mesh, plan, nullptr));
  must(swv_layout_parse("[R]", &all));
  must(swv_tensor_distribute(x_, mesh, all, nullptr, &x));
  const swv_value argument = swv_value_tensor(x);
  for (const swv_grad_mode mode : {SWV_MODE_GRAD, SWV_MODE_NO_GRAD}) {
    for (int run = 0; run < 3; ++run) {  // the interpreter profiles first, then compiles
      swv_value y;
      must(swv_module_call(module_, "forward", mode, &argument, 1, &y, 1, nullptr));
      EXPECT_EQ(shardweave::layout_of(y.as.tensor->tensor).to_string(), "[S(0)]");  // else [S(1)]
      EXPECT_TRUE(at::equal(shardweave::full_tensor(y.as.tensor->tensor), wanted(2)));
      swv_value_clear(&y);
    }
  }
  swv_tensor_free(x);
  swv_layout_free(all);
  swv_plan_free(plan);
  swv_mesh_free(mesh);
  swv_world_free(world);
}

TEST_F(ScriptModuleTest, SaysWhatIsWrong) {
  const swv_value wrong[] = {swv_value_int(1), swv_value_tensor(x_)};
  swv_value result = SWV_NONE;
  const auto call = [&](const char* method, const swv_value* arguments, size_t count,
                        size_t capacity) {
    return message_of(swv_module_call(module_, method, SWV_MODE_GRAD, arguments, count, &result,
                                      capacity, nullptr));
  };
  EXPECT_NE(call("froward", &wrong[1], 1, 1).find("did you mean 'forward'"), std::string::npos);
  EXPECT_NE(call("forward", wrong, 2, 1).find("Tensor x, float scale=2"), std::string::npos);
  EXPECT_NE(call("forward", nullptr, 0, 1).find("argument 'x' is missing"), std::string::npos);
  EXPECT_NE(call("both", &wrong[1], 1, 1).find("argument 'capacity' is 1"), std::string::npos);
  EXPECT_EQ(result.kind, SWV_VALUE_NONE);
  swv_module* own = nullptr;
  must(swv_module_create(&own));
  EXPECT_NE(
      message_of(swv_module_call(own, "forward", SWV_MODE_GRAD, &wrong[1], 1, &result, 1, nullptr))
          .find("its forward is the host's own code"),
      std::string::npos);
  swv_module_free(own);
}

}  // namespace
