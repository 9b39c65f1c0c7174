// Adafactor, Muon, groups, schedules and the gradient scaler through C: they train as one rank, and
// say what is wrong.
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "capi/testing/host_model.h"
#include "capi/testing/on_mesh.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave.h"
#include "shardweave/capi/handles.h"
#include "shardweave/dtensor/dtensor.h"

namespace {

using namespace c_test;  // NOLINT: this file is a test in it

using ::testing::HasSubstr;

using Scaler = Held<swv_grad_scaler, swv_grad_scaler_free>;

void make_adafactor(swv_tensor* const* parameters, size_t count, Optimizer& optimizer) {
  swv_adafactor_options options = SWV_ADAFACTOR_OPTIONS_INIT;
  options.lr = 0.05;
  options.weight_decay = 0.1;
  ok(swv_optimizer_create_adafactor(parameters, count, &options, optimizer.out()));
}
// Muon for what has two dimensions, in double precision; AdamW for the rest.
void make_groups(swv_tensor* const* parameters, size_t count, Optimizer& optimizer) {
  std::vector<swv_tensor*> matrices, others;
  for (size_t i = 0; i < count; ++i) {
    (parameters[i]->tensor.dim() == 2 ? matrices : others).push_back(parameters[i]);
  }
  swv_muon_options options = SWV_MUON_OPTIONS_INIT;
  options.lr = 0.02;
  options.ns_steps = 2;  // what rounding differs in is not made much of
  options.ns_dtype = SWV_DTYPE_F64;
  Optimizer muon, adamw;
  ok(swv_optimizer_create_muon(matrices.data(), matrices.size(), &options, muon.out()));
  ok(swv_optimizer_create_adamw(others.data(), others.size(), nullptr, adamw.out()));
  const swv_optimizer* const both[] = {muon, adamw};
  ok(swv_optimizer_create_groups(both, 2, optimizer.out()));
}

TEST(OptimTest, TrainsAsOneRank) {
  for (const auto& make : {make_adafactor, make_groups}) {
    Module alone;
    make_model(alone);
    const Steps wanted = train(alone, nullptr, make);
    for (const char* text : {"dp=2", "dp=3", "dp=2,tp=2"}) {
      on_mesh(text, [&](swv_mesh* mesh) {
        for (const bool zero : {false, true}) {
          Module module;
          Plan plan;
          make_model(module);
          if (std::string(text).find("tp") != std::string::npos) {
            ok(swv_plan_from_json(R"json({"parameter": {"blocks.*.up.*": {"tp": "S(0)"},
                                                        "blocks.*.down.weight": {"tp": "S(1)"}}})json",
                                  plan.out()));
          }
          ok(swv_module_distribute(module, mesh, plan, nullptr));
          const Steps got =
              train(module, mesh, [&](swv_tensor* const* parameters, size_t count, Optimizer& to) {
                make(parameters, count, to);
                if (zero) ok(swv_optimizer_use_zero(to, nullptr));
              });
          for (int step = 0; step < kSteps; ++step) {
            expect_close(got[step].first, wanted[step].first,
                         std::string(text) + ", step " + std::to_string(step));
          }
        }
      });
    }
  }
}

class OfOne : public ::testing::Test {
 protected:
  OfOne() {
    swv_tensor_options options = SWV_TENSOR_OPTIONS_INIT;
    options.requires_grad = 1;
    const int64_t sizes[] = {2, 3};
    ok(swv_tensor_ones(sizes, 2, &options, matrix_.out()));
    ok(swv_tensor_ones(sizes, 1, &options, vector_.out()));
  }
  std::string message(swv_status* status, int32_t code) { return message_of(status, code); }
  Tensor matrix_, vector_;
};

TEST_F(OfOne, GroupsHaveTheirOwnLearningRatesAndStates) {
  swv_tensor *matrix = matrix_, *vector = vector_;
  Optimizer muon, sgd, both;
  swv_sgd_options options = SWV_SGD_OPTIONS_INIT;
  options.lr = 0.5;
  ok(swv_optimizer_create_muon(&matrix, 1, nullptr, muon.out()));
  ok(swv_optimizer_create_sgd(&vector, 1, &options, sgd.out()));
  ok(swv_optimizer_set_lr(sgd, 0.25));
  const swv_optimizer* optimizers[] = {muon, sgd};
  ok(swv_optimizer_create_groups(optimizers, 2, both.out()));
  size_t count = 0;
  double lr = 0;
  ok(swv_optimizer_num_groups(both, &count));
  EXPECT_EQ(count, 2u);
  ok(swv_optimizer_group_lr(both, 1, &lr));
  EXPECT_EQ(lr, 0.25);
  ok(swv_optimizer_lr(both, &lr));
  EXPECT_EQ(lr, 1e-3);

  swv_schedule schedule = SWV_SCHEDULE_INIT;
  schedule.shape = SWV_SCHEDULE_LINEAR;
  schedule.steps = 6;
  schedule.warmup = 2;
  const double wanted[] = {0, 0.5, 1, 0.75, 0.5, 0.25, 0};
  for (int64_t step = 0; step < 7; ++step) {
    double factor = -1;
    ok(swv_schedule_factor(&schedule, step, &factor));
    EXPECT_EQ(factor, wanted[step]);
    ok(swv_optimizer_apply_schedule(both, &schedule, step));
    ok(swv_optimizer_group_lr(both, 1, &lr));
    EXPECT_EQ(lr, 0.25 * wanted[step]);
    ok(swv_optimizer_group_lr(both, 0, &lr));
    EXPECT_EQ(lr, 1e-3 * wanted[step]);
  }
  ok(swv_optimizer_set_group_lr(both, 1, 2));  // what schedules multiply from now on
  ok(swv_optimizer_apply_schedule(both, &schedule, 3));
  ok(swv_optimizer_group_lr(both, 1, &lr));
  EXPECT_EQ(lr, 1.5);

  Tensor state;
  ok(swv_optimizer_state(both, 0, "momentum_buffer", state.out()));
  EXPECT_EQ(state->tensor.sizes(), at::IntArrayRef({2, 3}));
  ok(swv_optimizer_state(both, 1, "momentum_buffer", state.out()));
  EXPECT_TRUE(state == nullptr);
}

TEST_F(OfOne, AdafactorsStateIsOfRowsAndColumns) {
  swv_tensor* matrix = matrix_;
  Optimizer adafactor;
  ok(swv_optimizer_create_adafactor(&matrix, 1, nullptr, adafactor.out()));
  Tensor row, column, none;
  ok(swv_optimizer_state(adafactor, 0, "row_var", row.out()));
  ok(swv_optimizer_state(adafactor, 0, "col_var", column.out()));
  ok(swv_optimizer_state(adafactor, 0, "variance", none.out()));
  EXPECT_EQ(row->tensor.sizes(), at::IntArrayRef({2, 1}));
  EXPECT_EQ(column->tensor.sizes(), at::IntArrayRef({1, 3}));
  EXPECT_TRUE(none == nullptr);
}

TEST_F(OfOne, SaysWhatIsWrong) {
  swv_tensor *matrix = matrix_, *vector = vector_;
  Optimizer made, muon;
  EXPECT_THAT(message(swv_optimizer_create_muon(&vector, 1, nullptr, made.out()),
                      SWV_CODE_INVALID_ARGUMENT),
              HasSubstr("Muon wants two dimensions"));
  swv_muon_options options = SWV_MUON_OPTIONS_INIT;
  options.lr_scale = 7;
  EXPECT_THAT(message(swv_optimizer_create_muon(&matrix, 1, &options, made.out()),
                      SWV_CODE_INVALID_ARGUMENT),
              HasSubstr("'options.lr_scale' is 7"));
  options = SWV_MUON_OPTIONS_INIT;
  options.ns_dtype = SWV_DTYPE_I32;
  EXPECT_THAT(message(swv_optimizer_create_muon(&matrix, 1, &options, made.out()),
                      SWV_CODE_INVALID_ARGUMENT),
              HasSubstr("ns_dtype is Int"));
  swv_adafactor_options adafactor = SWV_ADAFACTOR_OPTIONS_INIT;
  adafactor.beta2_decay = 1;
  EXPECT_THAT(message(swv_optimizer_create_adafactor(&matrix, 1, &adafactor, made.out()),
                      SWV_CODE_INVALID_ARGUMENT),
              HasSubstr("beta2_decay is 1"));

  ok(swv_optimizer_create_muon(&matrix, 1, nullptr, muon.out()));
  const swv_optimizer* optimizers[] = {muon, muon, nullptr};
  EXPECT_THAT(
      message(swv_optimizer_create_groups(optimizers, 2, made.out()), SWV_CODE_INVALID_ARGUMENT),
      HasSubstr("parameter 1 of group 1 is in group 0, too"));
  EXPECT_THAT(
      message(swv_optimizer_create_groups(optimizers, 0, made.out()), SWV_CODE_INVALID_ARGUMENT),
      HasSubstr("'num_optimizers' is 0"));
  EXPECT_THAT(message(swv_optimizer_create_groups(optimizers + 2, 1, made.out()),
                      SWV_CODE_INVALID_ARGUMENT),
              HasSubstr("NULL"));
  EXPECT_THAT(message(swv_optimizer_set_group_lr(muon, 1, 0.5), SWV_CODE_OUT_OF_RANGE),
              HasSubstr("group 1 of 1"));
  ok(swv_optimizer_step(muon));
  EXPECT_THAT(
      message(swv_optimizer_create_groups(optimizers, 1, made.out()), SWV_CODE_FAILED_PRECONDITION),
      HasSubstr("has made steps"));

  swv_schedule schedule = SWV_SCHEDULE_INIT;
  double factor = 0;
  schedule.shape = 9;
  EXPECT_THAT(message(swv_schedule_factor(&schedule, 0, &factor), SWV_CODE_INVALID_ARGUMENT),
              HasSubstr("'schedule.shape' is 9"));
  schedule = SWV_SCHEDULE_INIT;
  schedule.floor = 2;
  EXPECT_THAT(message(swv_schedule_factor(&schedule, 0, &factor), SWV_CODE_INVALID_ARGUMENT),
              HasSubstr("floor is 2"));
  schedule = SWV_SCHEDULE_INIT;
  schedule.shape = SWV_SCHEDULE_STEP;
  schedule.steps = 1;
  schedule.gamma = 1e300;
  double lr = 0;
  EXPECT_THAT(message(swv_optimizer_apply_schedule(muon, &schedule, 2), SWV_CODE_OUT_OF_RANGE),
              HasSubstr("the schedule says inf for step 2; wanted a factor of 0 or more"));
  ok(swv_optimizer_lr(muon, &lr));
  EXPECT_EQ(lr, 1e-3);
  schedule = SWV_SCHEDULE_INIT;
  EXPECT_THAT(message(swv_schedule_factor(&schedule, -1, &factor), SWV_CODE_INVALID_ARGUMENT),
              HasSubstr("'step' is -1"));
  EXPECT_THAT(message(swv_optimizer_apply_schedule(muon, nullptr, 0), SWV_CODE_INVALID_ARGUMENT),
              HasSubstr("'schedule' is NULL"));
}

TEST(GradScalerTest, AllRanksSkipAStepOrNone) {
  on_mesh("dp=2", [](swv_mesh* mesh) {
    const shardweave::MeshPtr its = mesh->mesh;
    Module module;
    make_model(module);
    ok(swv_module_distribute(module, mesh, nullptr, nullptr));
    std::vector<Tensor> handles(shapes().size());
    std::vector<swv_tensor*> parameters;
    for (size_t i = 0; i < handles.size(); ++i) {
      ok(swv_module_get(module, shapes()[i].first.c_str(), handles[i].out()));
      parameters.push_back(handles[i]);
    }
    swv_grad_scaler_options options = SWV_GRAD_SCALER_OPTIONS_INIT;
    options.init_scale = 4;
    options.growth_interval = 1;
    Scaler scaler;
    ok(swv_grad_scaler_create(&options, scaler.out()));
    const double wanted[] = {8, 4, 8};
    for (int step = 0; step < 3; ++step) {
      Tensor x, y, loss, scaled;
      feed(step, false, mesh, x);
      forward(module, x, y);
      call("aten::sum", {swv_value_tensor(y)}, loss);
      ok(swv_grad_scaler_scale(scaler, loss, SWV_MODE_GRAD, scaled.out()));
      ok(swv_tensor_backward(scaled, nullptr, nullptr));
      swv_bool is_finite = 2;
      EXPECT_THAT(message_of(swv_grad_scaler_unscale(scaler, parameters.data(), parameters.size(),
                                                     &is_finite),
                             SWV_CODE_FAILED_PRECONDITION),
                  HasSubstr("(swv_module_finish_grad_sync and swv_finish_grad_sync do that)"));
      EXPECT_EQ(is_finite, 2);
      ok(swv_module_finish_grad_sync(module));
      const bool is_one = its->coordinate()[0] == 1;
      std::vector<swv_tensor*> with_null = {parameters[0], parameters[1]};
      if (is_one) with_null[1] = nullptr;
      EXPECT_THAT(message_of(swv_grad_scaler_unscale(scaler, with_null.data(), 2, &is_finite),
                             is_one ? SWV_CODE_INVALID_ARGUMENT : SWV_CODE_FAILED_PRECONDITION),
                  HasSubstr(is_one ? "parameter 1 is undefined" : "refused on another rank"));
      at::Tensor part = shardweave::to_local(parameters[0]->tensor.grad());
      if (step == 1 && its->coordinate()[0] == 1) part.view(-1)[0].fill_(INFINITY);
      ok(swv_grad_scaler_unscale(scaler, parameters.data(), parameters.size(), &is_finite));
      EXPECT_EQ(is_finite, step != 1);
      EXPECT_THAT(message_of(swv_grad_scaler_unscale(scaler, parameters.data(), 1, &is_finite),
                             SWV_CODE_FAILED_PRECONDITION),
                  HasSubstr("has been unscaled already"));
      ok(swv_grad_scaler_update(scaler));
      double scale = 0;
      int64_t tracker = -1;
      ok(swv_grad_scaler_state(scaler, &scale, nullptr));
      EXPECT_EQ(scale, wanted[step]);
      ok(swv_grad_scaler_state(scaler, nullptr, &tracker));
      EXPECT_EQ(tracker, 0);
      ok(swv_module_zero_grad(module));
    }
  });
}

TEST(GradScalerTest, SaysWhatIsWrong) {
  Scaler scaler;
  swv_grad_scaler_options options = SWV_GRAD_SCALER_OPTIONS_INIT;
  options.growth_factor = 0.5;
  EXPECT_THAT(message_of(swv_grad_scaler_create(&options, scaler.out()), SWV_CODE_INVALID_ARGUMENT),
              HasSubstr("growth_factor is 0.5"));
  ok(swv_grad_scaler_create(nullptr, scaler.out()));
  EXPECT_THAT(message_of(swv_grad_scaler_update(scaler), SWV_CODE_FAILED_PRECONDITION),
              HasSubstr("nothing was unscaled"));
  EXPECT_THAT(message_of(swv_grad_scaler_set_state(scaler, -1, 0), SWV_CODE_INVALID_ARGUMENT),
              HasSubstr("scale is -1"));
  EXPECT_THAT(message_of(swv_grad_scaler_scale(scaler, nullptr, SWV_MODE_GRAD, Tensor().out()),
                         SWV_CODE_INVALID_ARGUMENT),
              HasSubstr("'loss' is NULL"));
  ok(swv_grad_scaler_set_state(scaler, 16, 3));
  double scale = 0;
  int64_t tracker = 0;
  ok(swv_grad_scaler_state(scaler, &scale, &tracker));
  EXPECT_EQ(scale, 16);
  EXPECT_EQ(tracker, 3);
}

}  // namespace
