// ZeRO through C: optimizers that are divided among ranks train as one that is not.
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

void make_sgd(swv_tensor* const* parameters, size_t count, Optimizer& optimizer) {
  swv_sgd_options options = SWV_SGD_OPTIONS_INIT;
  options.lr = 0.05;
  options.momentum = 0.9;
  options.nesterov = 1;
  ok(swv_optimizer_create_sgd(parameters, count, &options, optimizer.out()));
}
void make_adam(swv_tensor* const* parameters, size_t count, Optimizer& optimizer) {
  swv_adam_options options = SWV_ADAM_OPTIONS_INIT;
  options.lr = 0.01;
  options.weight_decay = 0.1;
  options.amsgrad = 1;
  ok(swv_optimizer_create_adam(parameters, count, &options, optimizer.out()));
}
void make_lion(swv_tensor* const* parameters, size_t count, Optimizer& optimizer) {
  swv_lion_options options = SWV_LION_OPTIONS_INIT;
  options.lr = 0.01;
  options.beta2 = 0.9;
  options.weight_decay = 0.1;
  ok(swv_optimizer_create_lion(parameters, count, &options, optimizer.out()));
}

struct Kind {
  const char* name;
  const char* state;  // one of its
  void (*make)(swv_tensor* const* parameters, size_t count, Optimizer& optimizer);
};
constexpr Kind kKinds[] = {{"sgd", "momentum_buffer", make_sgd},
                           {"adam", "max_exp_avg_sq", make_adam},
                           {"adamw", "exp_avg_sq", make_adamw},
                           {"lion", "exp_avg", make_lion}};

swv_zero_options zero_options(int32_t stage) {
  swv_zero_options options = SWV_ZERO_OPTIONS_INIT;
  options.mesh_dim = "dp";
  options.stage = stage;
  options.bucket_bytes = 300;  // a few parameters
  return options;
}

void make_distributed(swv_mesh* mesh, const std::string& where, Module& module) {
  Plan plan;
  make_model(module);
  if (where.find("tp") != std::string::npos) {
    ok(swv_plan_from_json(R"json({"parameter": {"blocks.*.up.*": {"tp": "S(0)"},
                                                "blocks.*.down.weight": {"tp": "S(1)"}}})json",
                          plan.out()));
  }
  ok(swv_module_distribute(module, mesh, plan, nullptr));
}

// Of this rank.
int64_t elements_of(swv_optimizer* optimizer, const char* name, size_t count) {
  int64_t elements = 0;
  for (size_t i = 0; i < count; ++i) {
    Tensor state;
    ok(swv_optimizer_state(optimizer, i, name, state.out()));
    elements += shardweave::to_local(state->tensor).numel();
  }
  return elements;
}

TEST(ZeroTest, TrainsAsOneRank) {
  for (const Kind& kind : kKinds) {
    Module alone;
    make_model(alone);
    const Steps wanted = train(alone, nullptr, kind.make);
    for (const char* text : {"dp=1", "dp=2", "dp=3", "dp=2,tp=2", "tp=2,dp=2"}) {
      for (const int32_t stage : {1, 2}) {
        const std::string where =
            std::string(kind.name) + ", " + text + ", stage " + std::to_string(stage);
        on_mesh(text, [&](swv_mesh* mesh) {
          Module module;
          make_distributed(mesh, text, module);
          int64_t whole_elements = 0, elements = 0;
          const auto divided = [&](swv_tensor* const* parameters, size_t count, Optimizer& to) {
            const swv_zero_options options = zero_options(stage);
            for (size_t i = 0; i < count; ++i) {
              whole_elements += shardweave::to_local(parameters[i]->tensor).numel();
            }
            kind.make(parameters, count, to);
            ok(swv_optimizer_use_zero(to, &options));
            elements = elements_of(to, kind.state, count);
          };
          const Steps got = train(module, mesh, divided);
          for (int step = 0; step < kSteps; ++step) {
            const std::string place = where + ", step " + std::to_string(step);
            expect_close(got[step].second, wanted[step].second, place + ", gradients");
            expect_close(got[step].first, wanted[step].first, place);
          }
          EXPECT_EQ(elements < whole_elements, std::string(text) != "dp=1") << where;
        });
      }
    }
  }
}

// One step; gradients stay.
void step(swv_module* module, swv_mesh* mesh, swv_optimizer* optimizer, int number) {
  Tensor x, target, y, loss;
  feed(number, false, mesh, x);
  feed(number, true, mesh, target);
  forward(module, x, y);
  call("aten::mse_loss", {swv_value_tensor(y), swv_value_tensor(target)}, loss);
  ok(swv_optimizer_zero_grad(optimizer));
  ok(swv_tensor_backward(loss, nullptr, nullptr));
  ok(swv_module_finish_grad_sync(module));
  ok(swv_optimizer_step(optimizer));
}

TEST(ZeroTest, GoesOnFromWhatWasSaved) {
  on_mesh("dp=3", [](swv_mesh* mesh) {
    const std::string names[] = {"step", "exp_avg", "exp_avg_sq"};
    Module module, resumed;
    Optimizer optimizer, other;
    make_distributed(mesh, "", module);
    make_distributed(mesh, "", resumed);
    optimizer_of(module, make_adamw, optimizer);
    optimizer_of(resumed, make_adamw, other);
    const swv_zero_options first = zero_options(1), second = zero_options(2);
    ok(swv_optimizer_set_lr(optimizer, 0.02));
    ok(swv_optimizer_use_zero(optimizer, &first));
    double lr = 0;
    ok(swv_optimizer_lr(optimizer, &lr));
    EXPECT_EQ(lr, 0.02);
    ok(swv_optimizer_use_zero(other, &second));
    ok(swv_optimizer_set_lr(other, 0.02));
    step(module, mesh, optimizer, 0);

    const Values from = parameters_of(module), to = parameters_of(resumed);
    for (size_t i = 0; i < from.size(); ++i) {
      const at::NoGradGuard no_grad;
      to[i].second.copy_(from[i].second);
      for (const std::string& name : names) {
        Tensor state, full;
        ok(swv_optimizer_state(optimizer, i, name.c_str(), state.out()));
        if (name == "step") {
          ok(swv_tensor_share(state, full.out()));
        } else {
          EXPECT_EQ(state->tensor.sizes(), from[i].second.sizes());
          Layout whole_layout;
          ok(swv_layout_parse("[R]", whole_layout.out()));
          ok(swv_tensor_redistribute(state, whole_layout, SWV_MODE_NO_GRAD, full.out()));
        }
        ok(swv_optimizer_set_state(other, i, name.c_str(), full));
      }
    }
    step(module, mesh, optimizer, 1);
    step(resumed, mesh, other, 1);
    expect_close(seen(resumed).first, seen(module).first, "resumed");
  });
}

// Of two batches that are summed up first, stage 2 sends one gradient.
TEST(ZeroTest, NothingLeavesWhileItWaits) {
  on_mesh("dp=2", [](swv_mesh* mesh) {
    Module module;
    Optimizer optimizer;
    make_distributed(mesh, "", module);
    optimizer_of(module, make_adamw, optimizer);
    const swv_zero_options options = zero_options(2);
    ok(swv_optimizer_use_zero(optimizer, &options));
    const auto backward = [&](int number) {
      Tensor x, target, y, loss;
      feed(number, false, mesh, x);
      feed(number, true, mesh, target);
      forward(module, x, y);
      call("aten::mse_loss", {swv_value_tensor(y), swv_value_tensor(target)}, loss);
      swv_trace* trace = nullptr;
      size_t sent = 0;
      ok(swv_trace_create(mesh, &trace));
      ok(swv_tensor_backward(loss, nullptr, nullptr));
      ok(swv_trace_num_events(trace, &sent));
      swv_trace_free(trace);
      return sent;
    };
    // The first iteration shows in which order they come.
    backward(0);
    ok(swv_module_finish_grad_sync(module));
    ok(swv_optimizer_step(optimizer));
    ok(swv_optimizer_zero_grad(optimizer));
    {
      Scope outer, inner;
      ok(swv_optimizer_no_sync(optimizer, outer.out()));
      ok(swv_optimizer_no_sync(optimizer, inner.out()));
      swv_scope_free(*outer.out());  // in any order
      EXPECT_EQ(backward(1), 0);
    }
    EXPECT_GT(backward(2), 1);
    ok(swv_module_finish_grad_sync(module));
    const Values got = seen(module).second;

    Module alone;
    make_model(alone);
    const Values values = parameters_of(module), plain = parameters_of(alone);
    for (size_t i = 0; i < values.size(); ++i) {
      const at::NoGradGuard no_grad;
      plain[i].second.copy_(whole(values[i].second));
    }
    for (const int number : {1, 2}) {
      Tensor x, target, y, loss;
      feed(number, false, nullptr, x);
      feed(number, true, nullptr, target);
      forward(alone, x, y);
      call("aten::mse_loss", {swv_value_tensor(y), swv_value_tensor(target)}, loss);
      ok(swv_tensor_backward(loss, nullptr, nullptr));
    }
    expect_close(got, seen(alone).second, "two batches");
  });
}

// Of what has left in a backward that came to nothing, nothing meets the next one's.
TEST(ZeroTest, DiscardsAnIteration) {
  Module alone;
  make_model(alone);
  const Steps wanted = train(alone, nullptr);
  on_mesh("dp=2", [&](swv_mesh* mesh) {
    Module module;
    Optimizer optimizer, other;
    make_distributed(mesh, "", module);
    const auto divided = [&](swv_tensor* const* parameters, size_t count, Optimizer& to) {
      const swv_zero_options options = zero_options(2);
      make_adamw(parameters, count, to);
      ok(swv_optimizer_use_zero(to, &options));
      const auto lost = [&](int number) {
        Tensor x, target, y, loss;
        feed(number, false, mesh, x);
        feed(number, true, mesh, target);
        forward(module, x, y);
        call("aten::mse_loss", {swv_value_tensor(y), swv_value_tensor(target)}, loss);
        ok(swv_tensor_backward(loss, nullptr, nullptr));
      };
      lost(5);  // shows in which order gradients come
      ok(swv_module_finish_grad_sync(module));
      ok(swv_optimizer_zero_grad(to));
      lost(6);
      ok(swv_optimizer_discard(to));
      ok(swv_optimizer_zero_grad(to));
    };
    const Steps got = train(module, mesh, divided);
    for (int i = 0; i < kSteps; ++i)
      expect_close(got[i].first, wanted[i].first, "behind a discard");
    optimizer_of(alone, make_adamw, other);
    EXPECT_THAT(message_of(swv_optimizer_discard(other), SWV_CODE_FAILED_PRECONDITION),
                HasSubstr("does not use ZeRO"));
  });
}

TEST(ZeroTest, AParameterThatIsGivenTwiceHasOneState) {
  on_mesh("dp=2", [](swv_mesh* mesh) {
    Module module;
    Tensor weight, bias;
    make_distributed(mesh, "", module);
    ok(swv_module_get(module, "head.weight", weight.out()));
    ok(swv_module_get(module, "blocks.0.up.bias", bias.out()));
    swv_tensor* const given[] = {weight, weight, bias};
    Optimizer optimizer;
    make_adamw(given, 3, optimizer);
    ok(swv_optimizer_use_zero(optimizer, nullptr));
    for (size_t i = 0; i < 3; ++i) {
      Tensor state;
      ok(swv_optimizer_state(optimizer, i, "exp_avg", state.out()));
      EXPECT_EQ(state->tensor.sizes(), given[i]->tensor.sizes()) << i;
    }
    Tensor state;
    EXPECT_THAT(message_of(swv_optimizer_state(optimizer, 3, "exp_avg", state.out()),
                           SWV_CODE_OUT_OF_RANGE),
                HasSubstr("3"));
  });
}

TEST(ZeroTest, BadInput) {
  on_mesh("dp=2", [](swv_mesh* mesh) {
    Module module;
    Optimizer optimizer, other, stepped, plain;
    make_distributed(mesh, "", module);
    optimizer_of(module, make_adamw, optimizer);
    swv_zero_options options = zero_options(1);
    const auto refused = [&](const swv_zero_options& with, const char* why,
                             swv_code code = SWV_CODE_INVALID_ARGUMENT) {
      EXPECT_THAT(message_of(swv_optimizer_use_zero(optimizer, &with), code), HasSubstr(why));
    };
    options.stage = 3;
    refused(options, "3");
    options.stage = 1, options.bucket_bytes = 0;
    refused(options, "bucket_bytes");
    options.bucket_bytes = 1, options.mesh_dim = "tp";
    refused(options, "no dimension \"tp\"", SWV_CODE_NOT_FOUND);
    int64_t coordinate = 0;
    size_t count = 0;
    ok(swv_mesh_coordinate(mesh, &coordinate, 1, &count));
    options.mesh_dim = "dp", options.stage = static_cast<int32_t>(1 + coordinate);
    refused(options, "not the same on ranks 0 and 1");
    options.stage = 1;
    Scope scope;
    EXPECT_THAT(
        message_of(swv_optimizer_no_sync(optimizer, scope.out()), SWV_CODE_FAILED_PRECONDITION),
        HasSubstr("does not use ZeRO"));

    // It is as it was.
    step(module, mesh, optimizer, 0);
    refused(options, "has made steps", SWV_CODE_FAILED_PRECONDITION);

    optimizer_of(module, make_adamw, other);
    ok(swv_optimizer_use_zero(other, &options));
    EXPECT_THAT(message_of(swv_optimizer_use_zero(other, &options), SWV_CODE_FAILED_PRECONDITION),
                HasSubstr("uses ZeRO already"));
    optimizer_of(module, make_adamw, stepped);
    EXPECT_THAT(message_of(swv_optimizer_use_zero(stepped, &options), SWV_CODE_FAILED_PRECONDITION),
                HasSubstr("is in a ZeRO partition already"));

    Module undistributed;
    make_model(undistributed);
    optimizer_of(undistributed, make_adamw, plain);
    EXPECT_THAT(message_of(swv_optimizer_use_zero(plain, &options)), HasSubstr("DTensor"));
    EXPECT_THAT(message_of(swv_optimizer_use_zero(nullptr, &options)),
                HasSubstr("argument 'optimizer' is NULL"));
  });
}

}  // namespace
