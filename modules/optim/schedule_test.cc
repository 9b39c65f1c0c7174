// Schedules, groups of parameters, and models that are trained with both: what one device computes,
// under FSDP and ZeRO too.
#include "shardweave/modules/optim/schedule.h"

#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/clip_grad_norm.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/modules/fully_shard.h"
#include "shardweave/modules/zero.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/pimpl.h"
#include "torch/optim/sgd.h"

namespace shardweave {
namespace {

using ::testing::HasSubstr;
using testing::on_mesh;
namespace nn = torch::nn;

// --- schedules -----------------------------------------------------------------------------------

void expect_factors(const Schedule& schedule, const std::vector<double>& wanted) {
  for (size_t step = 0; step < wanted.size(); ++step) {
    EXPECT_NEAR(schedule.factor(static_cast<int64_t>(step)), wanted[step], 1e-12)
        << "step " << step;
  }
}

// Of transformers' get_cosine_schedule_with_warmup(.., 4, 12), get_linear_schedule_with_warmup(.., 2,
// 6), torch.optim.lr_scheduler.StepLR(.., 3, 0.5): the numbers that the tests in Rust and Go have.
TEST(ScheduleTest, TheFactorsOfOtherLibraries) {
  const std::vector<double> cosine = {0.0,
                                      0.25,
                                      0.5,
                                      0.75,
                                      1.0,
                                      0.9619397662556434,
                                      0.8535533905932737,
                                      0.6913417161825449,
                                      0.5,
                                      0.3086582838174551,
                                      0.1464466094067262,
                                      0.0380602337443566,
                                      0.0,
                                      0.0};
  expect_factors(Schedule::cosine(12).warmup(4), cosine);
  std::vector<double> floored = cosine;
  for (size_t i = 4; i < floored.size(); ++i) floored[i] = 0.1 + 0.9 * floored[i];
  expect_factors(Schedule::cosine(12).warmup(4).floor(0.1), floored);
  expect_factors(Schedule::linear(6).warmup(2), {0, 0.5, 1, 0.75, 0.5, 0.25, 0, 0});
  expect_factors(Schedule::step(3, 0.5), {1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25});
  expect_factors(Schedule::step(1, 0.5).floor(0.3), {1, 0.5, 0.3, 0.3});
  expect_factors(Schedule::constant().warmup(2), {0, 0.5, 1, 1});
  // transformers' get_wsd_schedule(.., 2 of warm-up, 4 of decay, 8 in all), linear.
  expect_factors(Schedule::wsd(8, 4).warmup(2), {0, 0.5, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0});
  expect_factors(Schedule::wsd(8, 4).warmup(2).floor(0.2), {0, 0.5, 1, 1, 1, 0.8, 0.6, 0.4, 0.2});
  expect_factors(Schedule::wsd(6, 9).warmup(2), {0, 0.5, 1, 0.75, 0.5, 0.25, 0});
  expect_factors(Schedule::wsd(3, 0), {1, 1, 1, 0});
  // Nothing divides by 0.
  expect_factors(Schedule::cosine(0), {0, 0});
  expect_factors(Schedule::linear(3).warmup(3), {0, 1.0 / 3, 2.0 / 3, 0});
  expect_factors(Schedule::step(0, 0.5), {1, 1});
  EXPECT_EQ(Schedule::step(1, 0.5).factor(INT64_MAX), 0);
  EXPECT_EQ(Schedule::linear(4).factor(-3), 1);
  EXPECT_EQ(Schedule::linear(INT64_MAX).factor(INT64_MAX - 1), 0);
}

template <typename F>
void expect_error(F f, absl::StatusCode code, const std::string& part) {
  try {
    f();
    ADD_FAILURE() << "took it: " << part;
  } catch (const Error& error) {
    EXPECT_EQ(error.status().code(), code);
    EXPECT_THAT(error.what_without_backtrace(), HasSubstr(part));
  }
}
constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

TEST(ScheduleTest, RefusesWhatIsNoSchedule) {
  expect_error([] { (void)Schedule::linear(-1).factor(0); }, kInvalid, "steps is -1");
  expect_error([] { (void)Schedule::wsd(3, -2).factor(0); }, kInvalid, "decay is -2");
  expect_error([] { (void)Schedule::linear(3).warmup(-1).factor(0); }, kInvalid, "warmup is -1");
  expect_error([] { (void)Schedule::linear(3).floor(1.5).factor(0); }, kInvalid, "floor is 1.5");
  expect_error([] { (void)Schedule::step(3, -1).factor(0); }, kInvalid, "gamma is -1");
}

at::Tensor parameter(at::IntArrayRef sizes) {
  return at::sin(at::arange(c10::multiply_integers(sizes), at::kFloat))
      .view(sizes)
      .requires_grad_();
}

TEST(ScheduleTest, SetsTheLearningRatesOfAllGroupsByTheirFactor) {
  FusedOptimizer optimizer(
      {{{parameter({3})}, SgdOptions{.lr = 0.5}}, {{parameter({2, 2})}, MuonOptions{.lr = 0.02}}});
  Scheduler scheduler(optimizer, Schedule::linear(4).warmup(2));
  EXPECT_EQ(optimizer.lr(0), 0);
  EXPECT_EQ(optimizer.lr(1), 0);
  scheduler.step();
  EXPECT_EQ(optimizer.lr(0), 0.25);
  EXPECT_EQ(optimizer.lr(1), 0.01);
  scheduler.set_step(3);
  EXPECT_EQ(scheduler.current_step(), 3);
  EXPECT_EQ(optimizer.lr(0), 0.25);
  EXPECT_EQ(optimizer.lr(1), 0.01);
  expect_error([&] { scheduler.set_step(-1); }, kInvalid, "step is -1");

  // A group that comes later begins with what it has.
  optimizer.add_group({{parameter({4})}, SgdOptions{.lr = 8}});
  EXPECT_EQ(optimizer.lr(2), 8);
  scheduler.take_up_groups();
  EXPECT_EQ(optimizer.lr(2), 4);
  EXPECT_EQ(optimizer.lr(0), 0.25);
  scheduler.take_up_groups();
  EXPECT_EQ(optimizer.lr(2), 4);
  scheduler.set_step(3);
  EXPECT_EQ(optimizer.lr(0), 0.25);
  EXPECT_EQ(optimizer.lr(2), 4);
  scheduler.set_step(2);
  EXPECT_EQ(optimizer.lr(2), 8);

  torch::optim::SGD sgd({parameter({3})}, torch::optim::SGDOptions(0.5));
  Scheduler other(sgd, [](int64_t step) { return step < 2 ? 1.0 / (1 + step) : -1.0; });
  other.step();
  EXPECT_EQ(sgd.param_groups()[0].options().get_lr(), 0.25);
  sgd.add_param_group(
      {{parameter({2})}, std::make_unique<torch::optim::SGDOptions>(torch::optim::SGDOptions(6))});
  other.set_step(1);
  EXPECT_EQ(sgd.param_groups()[1].options().get_lr(), 3);
  expect_error([&] { other.step(); }, absl::StatusCode::kOutOfRange, "says -1 for step 2");
  EXPECT_EQ(other.current_step(), 1);
  EXPECT_EQ(sgd.param_groups()[0].options().get_lr(), 0.25);
}

// --- groups --------------------------------------------------------------------------------------

TEST(GroupsTest, EachHasItsOptionsItsStateAndItsLearningRate) {
  const at::Tensor a = parameter({3}), b = parameter({2, 3}), c = parameter({4});
  FusedOptimizer optimizer({{{a, b}, AdamWOptions{.lr = 0.5}}, {{c, c}, SgdOptions{.lr = 0.25}}});
  EXPECT_EQ(optimizer.num_groups(), 2u);
  EXPECT_EQ(optimizer.parameters().size(), 4u);
  EXPECT_EQ(optimizer.group_of(1), 0u);
  EXPECT_EQ(optimizer.group_of(3), 1u);
  EXPECT_EQ(optimizer.lr(), 0.5);
  EXPECT_EQ(optimizer.lr(1), 0.25);
  const at::Tensor d = parameter({5});
  EXPECT_EQ(optimizer.add_group({{d}, SgdOptions{.lr = 1, .momentum = 0.5}}), 2u);
  using Names = std::vector<std::string_view>;
  EXPECT_EQ(optimizer.state_names(2), Names{"step"});
  EXPECT_EQ(optimizer.state_names(4), (Names{"step", "momentum_buffer"}));
  EXPECT_EQ(optimizer.state_names(), (Names{"step", "exp_avg", "exp_avg_sq", "momentum_buffer"}));
  // A name of another group's is not used; one of none is not found.
  EXPECT_FALSE(optimizer.state(0, "momentum_buffer").defined());
  expect_error([&] { (void)optimizer.state(0, "row_var"); }, absl::StatusCode::kNotFound,
               "there are step, exp_avg, exp_avg_sq, max_exp_avg_sq, momentum_buffer");
  const at::Tensor before = d.detach().clone();
  for (const at::Tensor& p : {a, b, c, d}) p.mutable_grad() = at::ones_like(p);
  const at::Tensor c_before = c.detach().clone();
  optimizer.step();
  EXPECT_TRUE(at::allclose(d.detach(), before - 1));
  EXPECT_TRUE(at::allclose(c.detach(), c_before - 0.25));  // once
  optimizer.set_lr(2, 0);
  optimizer.step();
  EXPECT_TRUE(at::allclose(d.detach(), before - 1));
  optimizer.set_lr(0.125);
  for (size_t group = 0; group < 3; ++group) EXPECT_EQ(optimizer.lr(group), 0.125);
}

TEST(GroupsTest, RefusesWhatFitsNowhere) {
  const at::Tensor a = parameter({3});
  expect_error([&] { FusedOptimizer({{{a}, AdamWOptions{}}, {{a}, SgdOptions{}}}); }, kInvalid,
               "parameter 1 of group 1 is in group 0, too");
  expect_error([] { FusedOptimizer(std::vector<ParameterGroup>()); }, kInvalid,
               "there is no group");
  FusedOptimizer optimizer({a}, SgdOptions{.lr = 0.5});
  expect_error([&] { optimizer.add_group({{a}, SgdOptions{}}); }, kInvalid, "in group 0, too");
  expect_error([&] { optimizer.add_group({{parameter({2})}, AdamOptions{.beta1 = 2}}); }, kInvalid,
               "beta1 is 2");
  EXPECT_EQ(optimizer.num_groups(), 1u);
  EXPECT_EQ(optimizer.parameters().size(), 1u);
  expect_error([&] { (void)optimizer.lr(1); }, absl::StatusCode::kOutOfRange, "group 1 of 1");
  expect_error([&] { optimizer.set_lr(1, 0.5); }, absl::StatusCode::kOutOfRange, "group 1 of 1");
  expect_error([&] { optimizer.set_lr(0, -1); }, kInvalid, "lr is -1");
  EXPECT_EQ(optimizer.lr(), 0.5);
}

// --- training ------------------------------------------------------------------------------------

// Sizes that do not divide, a bias in each layer, a number. In double precision, for Muon makes much of
// the smallest direction of a gradient.
struct NetImpl : nn::Module {
  NetImpl() {
    up = register_module("up", nn::Linear(5, 7));
    mid = register_module("mid", nn::Linear(7, 7));
    down = register_module("down", nn::Linear(7, 5));
    scale = register_parameter("scale", at::ones({}));
    to(at::kDouble);
    const c10::AutoGradMode no_grad(false);
    double k = 0;
    for (at::Tensor p : parameters()) {
      p.copy_(at::sin(at::arange(p.numel(), at::kDouble) * 0.7 + ++k).view(p.sizes()) * 0.5);
    }
  }
  at::Tensor loss(const at::Tensor& x) {
    const at::Tensor y = down(at::tanh(mid(at::tanh(up(x))))) * scale;
    return (y - x * 0.5).square().sum() / 7;
  }
  nn::Linear up{nullptr}, mid{nullptr}, down{nullptr};
  at::Tensor scale;
};
TORCH_MODULE(Net);

at::Tensor batch(int step) {
  return at::cos(at::arange(7 * 5, at::kDouble) * (1 + 0.3 * step)).view({7, 5});
}

// Muon, Adafactor, and AdamW for the rest.
std::vector<ParameterGroup> groups_of(Net model) {
  return {
      {{model->up->weight, model->mid->weight}, MuonOptions{.lr = 0.02, .ns_dtype = at::kDouble}},
      {{model->down->weight, model->down->bias}, AdafactorOptions{.lr = 0.05}},
      {{model->up->bias, model->mid->bias, model->scale}, AdamWOptions{.lr = 0.01}}};
}

using Values = std::map<std::string, at::Tensor>;
Values values_of(const nn::Module& module) {
  Values values;
  for (const auto& item : module.named_parameters()) {
    const at::Tensor p = item.value().detach();
    values[item.key()] = (is_dtensor(p) ? full_tensor(p) : p).clone();
  }
  return values;
}

constexpr int kSteps = 20;
struct Outcome {
  Values values;
  std::vector<double> norms;
};

template <typename Optimizer>
Outcome trained(Net model, Optimizer& optimizer, FusedOptimizer& fused, const MeshPtr& mesh,
                const NamedPlacements& placements) {
  Scheduler scheduler(fused, Schedule::cosine(kSteps).warmup(3).floor(0.1));
  Outcome run;
  for (int s = 0; s < kSteps; ++s) {
    at::Tensor x = batch(s);
    if (mesh != nullptr) x = distribute_tensor(x, mesh, placements, {.source = std::nullopt});
    model->loss(x).backward();
    if (mesh != nullptr) finish_grad_sync(*model);
    run.norms.push_back(clip_grad_norm(model->parameters(), 0.5));
    optimizer.step();
    optimizer.zero_grad();
    scheduler.step();
  }
  run.values = values_of(*model);
  return run;
}

void expect_same(const Outcome& got, const Outcome& wanted, const std::string& what) {
  for (size_t s = 0; s < wanted.norms.size(); ++s) {
    EXPECT_NEAR(got.norms[s], wanted.norms[s], 1e-8) << what << ", step " << s;
  }
  for (const auto& [name, value] : wanted.values) {
    EXPECT_TRUE(at::allclose(got.values.at(name), value, 1e-7, 1e-8)) << what << ": " << name;
  }
}

TEST(TrainingTest, OneDevicesNumbersHoweverItIsDivided) {
  Net plain;
  FusedOptimizer alone(groups_of(plain));
  const Values before = values_of(*plain);
  const Outcome wanted = trained(plain, alone, alone, nullptr, {});
  EXPECT_GT(wanted.norms[0], 0.5);  // clips
  for (const auto& [name, value] : before) {
    EXPECT_FALSE(at::allclose(wanted.values.at(name), value, 1e-3, 1e-3)) << name;
  }

  const ParameterPlan tensor_parallel = {{"up.*", {{"tp", Shard(0)}}},
                                         {"mid.weight", {{"tp", Shard(1)}}},
                                         {"down.weight", {{"tp", Shard(0)}}}};
  for (const std::vector<MeshDim>& dims : {std::vector<MeshDim>{{"dp", 2}},
                                           {{"dp", 3}},
                                           {{"dp", 2}, {"tp", 2}},
                                           {{"replicas", 2}, {"dp", 2}}}) {
    const bool tp = dims.back().name == "tp";
    NamedPlacements placements = {{"dp", Shard(0)}};
    if (dims[0].name == "replicas") placements.emplace_back("replicas", Shard(0));
    on_mesh(dims, [&](const MeshPtr& mesh) {
      const auto distributed = [&] {
        Net model;
        distribute_module(*model, mesh, tp ? tensor_parallel : ParameterPlan());
        return model;
      };
      {
        Net model = distributed();
        FusedOptimizer optimizer(groups_of(model));
        expect_same(trained(model, optimizer, optimizer, mesh, placements), wanted, "replicated");
      }
      {
        Net model = distributed();
        fully_shard(*model, mesh, {.mesh_dim = "dp", .units = {"up", "mid"}});
        FusedOptimizer optimizer(groups_of(model));
        expect_same(trained(model, optimizer, optimizer, mesh, placements), wanted, "fsdp");
      }
      for (const int stage : {1, 2}) {
        Net model = distributed();
        ZeroRedundancyOptimizer<FusedOptimizer> optimizer(
            groups_of(model), {.mesh_dim = "dp", .stage = stage, .bucket_bytes = 300});
        expect_same(trained(model, optimizer, optimizer.optimizer(), mesh, placements), wanted,
                    "zero");
      }
    });
  }
}

// What ZeRO keeps of rows and columns is consolidated and set as any state.
TEST(TrainingTest, ZeroConsolidatesAndSetsEveryState) {
  on_mesh({{"dp", 3}}, [](const MeshPtr& mesh) {
    const auto step = [&](Net model, ZeroRedundancyOptimizer<FusedOptimizer>& zero, int s) {
      model->loss(distribute_tensor(batch(s), mesh, {{"dp", Shard(0)}})).backward();
      finish_grad_sync(*model);
      zero.step();
      zero.zero_grad();
    };
    Net model, other;
    distribute_module(*model, mesh, {});
    distribute_module(*other, mesh, {});
    ZeroRedundancyOptimizer<FusedOptimizer> zero(groups_of(model)), resumed(groups_of(other));
    for (int s = 0; s < 3; ++s) step(model, zero, s);
    {
      const c10::AutoGradMode no_grad(false);
      const auto from = model->named_parameters();
      for (const auto& item : other->named_parameters()) item.value().copy_(from[item.key()]);
    }
    for (size_t i = 0; i < zero.parameters().size(); ++i) {
      const OptimizerState whole = zero.consolidated_state(i);
      for (const auto& [name, value] : whole) EXPECT_FALSE(is_dtensor(value)) << name;
      resumed.set_state(i, whole);
    }
    const OptimizerState rows = zero.consolidated_state(2);  // of down.weight
    EXPECT_EQ(rows.at("row_var").sizes(), at::IntArrayRef({5, 1}));
    EXPECT_EQ(rows.at("col_var").sizes(), at::IntArrayRef({1, 7}));
    expect_error([&] { resumed.set_state(2, {{"row_var", at::zeros({5, 7})}}); }, kInvalid,
                 "has shape [5, 1]; got [5, 7]");
    expect_error([&] { resumed.set_state(2, {{"variance", at::zeros({5, 7})}}); },
                 absl::StatusCode::kNotFound, "there are step, row_var, col_var");
    for (int s = 3; s < 6; ++s) {
      step(model, zero, s);
      step(other, resumed, s);
    }
    const Values wanted = values_of(*model);
    for (const auto& [name, value] : values_of(*other)) {
      EXPECT_TRUE(at::equal(value, wanted.at(name))) << name;
    }
  });
}

}  // namespace
}  // namespace shardweave
