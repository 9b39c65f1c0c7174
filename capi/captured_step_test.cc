// Steps that are captured and replayed through C, on GPUs (of the fake): the numbers of steps that
// are called.
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "capi/testing/on_mesh.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave.h"
#include "shardweave/capi/handles.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/testing/fake_cuda.h"

namespace {

using namespace c_test;  // NOLINT: this file is a test in it

using shardweave::MeshPtr;
using shardweave::Replicate;
using shardweave::Shard;
using shardweave::testing::host;
using shardweave::testing::host_waits;
using shardweave::testing::on_gpus;
using ::testing::HasSubstr;
using Step = Held<swv_captured_step, swv_captured_step_free>;

constexpr int kEager = 2, kReplayed = 3;
constexpr int64_t kRows = 4, kColumns = 3;

at::Tensor data_of(int step) {
  return at::sin(at::arange(kRows * kColumns, at::kFloat) * 0.7 + step).view({kRows, kColumns});
}

void wrap(at::Tensor tensor, Tensor& to) {
  *to.out() = shardweave::capi::new_tensor(std::move(tensor), "a tensor of the test");
}

void call(const char* name, const std::vector<swv_value>& arguments, Tensor& to) {
  Op op;
  swv_value result = SWV_NONE;
  ok(swv_op_find(name, op.out()));
  ok(swv_op_call(op, SWV_MODE_GRAD, arguments.data(), arguments.size(), &result, 1, nullptr));
  *to.out() = result.as.tensor;
}

// A model of one weight: rows of x are cut, the weight is the same on all ranks.
struct Model {
  explicit Model(const MeshPtr& on) : its_mesh(on) {
    *mesh.out() = shardweave::capi::make<swv_mesh>(on);
    wrap(shardweave::distribute_tensor(data_of(100)[0].to(at::kCUDA), on, {Replicate()}), weight);
    ok(swv_tensor_set_requires_grad(weight, 1));
    wrap(batch(0), x);
    swv_adamw_options options = SWV_ADAMW_OPTIONS_INIT;
    swv_tensor* parameters[] = {weight};
    ok(swv_optimizer_create_adamw(parameters, 1, &options, optimizer.out()));
  }

  at::Tensor batch(int step) const {
    return shardweave::distribute_tensor(data_of(step).to(at::kCUDA), its_mesh, {Shard(0)});
  }
  void feed(int step) {
    Tensor next, same;
    wrap(batch(step), next);
    call("aten::copy_", {swv_value_tensor(x), swv_value_tensor(next)}, same);
    ok(swv_optimizer_set_lr(optimizer, 0.1 / (1 + step)));
  }
  void train() {
    Tensor y, square;
    ok(swv_optimizer_zero_grad(optimizer));
    call("aten::mv", {swv_value_tensor(x), swv_value_tensor(weight)}, y);
    call("aten::mul.Tensor", {swv_value_tensor(y), swv_value_tensor(y)}, square);
    call("aten::sum", {swv_value_tensor(square)}, loss);
    ok(swv_tensor_backward(loss, nullptr, nullptr));
    swv_tensor* parameters[] = {weight};
    ok(swv_finish_grad_sync(parameters, 1));
    ok(swv_optimizer_step(optimizer));
  }
  std::vector<float> seen() const {
    const at::Tensor w = host(weight->tensor);
    std::vector<float> all(w.const_data_ptr<float>(), w.const_data_ptr<float>() + w.numel());
    all.push_back(host(loss->tensor).item<float>());
    return all;
  }

  const MeshPtr its_mesh;
  Mesh mesh;
  Tensor weight, x, loss;
  Optimizer optimizer;
  int called = 0;
  swv_status* fails = nullptr;
};

swv_status* train(void* user_data) {
  Model& model = *static_cast<Model*>(user_data);
  ++model.called;
  try {
    model.train();
  } catch (const std::exception& error) {
    return swv_status_new(SWV_CODE_UNKNOWN, error.what());
  }
  return std::exchange(model.fails, nullptr);
}

class CapturedStepTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, CapturedStepTest, ::testing::Values(1, 2));

TEST_P(CapturedStepTest, TrainsAsStepsThatAreCalled) {
  on_gpus({{"dp", GetParam()}}, [](const MeshPtr& mesh) {
    std::vector<std::vector<float>> wanted;
    {
      Model model(mesh);
      for (int step = 0; step < kEager + kReplayed; ++step) {
        model.feed(step);
        model.train();
        wanted.push_back(model.seen());
      }
    }
    Model model(mesh);
    int at = 0;
    for (; at < kEager; ++at) {
      model.feed(at);
      model.train();
    }
    const at::Tensor before = host(model.weight->tensor);
    Step step;
    swv_tensor* parameters[] = {model.weight};
    ok(swv_captured_step_create(model.mesh, parameters, 1, train, &model, step.out()));
    EXPECT_EQ(model.called, 1);
    EXPECT_TRUE(at::equal(host(model.weight->tensor), before)) << "nothing has run";
    int64_t replays = -1;
    ok(swv_captured_step_replays(step, &replays));
    EXPECT_EQ(replays, 0);
    for (; at < kEager + kReplayed; ++at) {
      model.feed(at);
      const int64_t waits = host_waits();
      ok(swv_captured_step_replay(step));
      EXPECT_EQ(host_waits(), waits) << "the host waits in a replay";
      const std::vector<float> seen = model.seen();
      for (size_t i = 0; i < seen.size(); ++i) EXPECT_NEAR(seen[i], wanted[at][i], 1e-5) << at;
    }
    ok(swv_captured_step_replays(step, &replays));
    EXPECT_EQ(replays, kReplayed);
    EXPECT_EQ(model.called, 1);
    // What it was made from may end before it does.
    model.mesh.out();
    model.optimizer.out();
    ok(swv_captured_step_replay(step));
  });
}

// As goroutines and tasks do, to threads whose current GPU is the first one.
TEST_P(CapturedStepTest, ARankThatMovesBetweenThreads) {
  on_gpus({{"dp", GetParam()}}, [](const MeshPtr& mesh) {
    Model model(mesh), called(mesh);
    Step step;
    const auto elsewhere = [](const auto& body) { std::thread(body).join(); };
    for (int i = 0; i < 4; ++i) {
      called.feed(i);
      called.train();
    }
    model.feed(0);
    model.train();
    elsewhere([&] {
      swv_tensor* parameters[] = {model.weight};
      ok(swv_captured_step_create(model.mesh, parameters, 1, train, &model, step.out()));
    });
    for (int i = 1; i < 4; ++i) {
      model.feed(i);
      elsewhere([&] { ok(swv_captured_step_replay(step)); });
    }
    EXPECT_NEAR(model.seen().back(), called.seen().back(), 1e-5);
    elsewhere([&] { step.out(); });
  });
}

TEST_P(CapturedStepTest, AStatusOfTheStepIsTheCalls) {
  on_gpus({{"dp", GetParam()}}, [](const MeshPtr& mesh) {
    Model model(mesh);
    model.train();
    Step step;
    swv_tensor* parameters[] = {model.weight};
    model.fails = swv_status_new(SWV_CODE_DATA_LOSS, "no more data");
    EXPECT_EQ(
        message_of(swv_captured_step_create(model.mesh, parameters, 1, train, &model, step.out()),
                   SWV_CODE_DATA_LOSS),
        "swv_captured_step_create: step: no more data");
    EXPECT_EQ(static_cast<swv_captured_step*>(step), nullptr);
    // And all goes on.
    model.train();
    ok(swv_captured_step_create(model.mesh, parameters, 1, train, &model, step.out()));
    ok(swv_captured_step_replay(step));
  });
}

swv_status* ask(void* user_data) {
  swv_value number = SWV_NONE;
  return swv_tensor_item(static_cast<Model*>(user_data)->loss, &number);
}
swv_status* capture_within(void* user_data) {
  const Model& model = *static_cast<Model*>(user_data);
  Step step;
  return swv_captured_step_create(model.mesh, nullptr, 0, ask, user_data, step.out());
}

TEST_P(CapturedStepTest, SaysWhatIsWrong) {
  on_gpus({{"dp", GetParam()}}, [](const MeshPtr& mesh) {
    Model model(mesh);
    model.train();
    Step step;
    Tensor elsewhere;
    ok(swv_tensor_ones(nullptr, 0, nullptr, elsewhere.out()));
    swv_tensor* parameters[] = {model.weight, elsewhere};
    const auto fails = [&](size_t count, swv_step_fn run, swv_code code) {
      return message_of(
          swv_captured_step_create(model.mesh, parameters, count, run, &model, step.out()), code);
    };
    EXPECT_THAT(fails(2, train, SWV_CODE_INVALID_ARGUMENT), HasSubstr("parameter 1 is on cpu"));
    EXPECT_THAT(fails(1, ask, SWV_CODE_FAILED_PRECONDITION), HasSubstr("being captured"));
    EXPECT_THAT(fails(1, capture_within, SWV_CODE_FAILED_PRECONDITION),
                HasSubstr("being captured already"));
    EXPECT_EQ(model.called, 0);
  });
}

}  // namespace
