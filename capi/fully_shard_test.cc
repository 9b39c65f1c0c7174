// FSDP through C: a forward that the host has written, in operators alone, trains as on one rank.
#include <string>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "capi/testing/host_model.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "shardweave.h"
#include "shardweave/capi/handles.h"
#include "shardweave/dtensor/dtensor.h"

namespace {

using namespace c_test;  // NOLINT: this file is a test in it

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

const char* const kUnits[] = {"blocks.*"};
swv_fully_shard_options by_blocks() {
  swv_fully_shard_options options = SWV_FULLY_SHARD_OPTIONS_INIT;
  options.mesh_dim = "dp";
  options.units = kUnits;
  options.num_units = 1;
  return options;
}
swv_fully_shard_counters counters_of(swv_mesh* mesh) {
  swv_fully_shard_counters counters = SWV_FULLY_SHARD_COUNTERS_INIT;
  ok(swv_mesh_fully_shard_counters(mesh, &counters));
  return counters;
}

void expect_trained_alike(const std::string& where, bool keep, swv_mesh* mesh,
                          const Steps& wanted) {
  const bool alone = where.find("dp=1") != std::string::npos;
  Module module;
  make_model(module);
  if (where.find("tp") != std::string::npos) {
    Plan plan;
    ok(swv_plan_from_json(R"json({"parameter": {"blocks.*.up.*": {"tp": "S(0)"},
                                                "blocks.*.down.weight": {"tp": "S(1)"}}})json",
                          plan.out()));
    ok(swv_module_distribute(module, mesh, plan, nullptr));
  }
  swv_fully_shard_options options = by_blocks();
  options.reshard_after_forward = keep ? 0 : 1;
  swv_string *table = nullptr, *json = nullptr;
  ok(swv_module_fully_shard(module, mesh, &options, &table, &json));
  const std::string text = text_of(json);
  EXPECT_THAT(text_of(table), AllOf(HasSubstr("blocks.2"), HasSubstr("(rest)")));
  EXPECT_THAT(text, HasSubstr(R"("module":"blocks.0","parameters":["blocks.0.)"));
  EXPECT_THAT(text, HasSubstr(R"("module":"","parameters":["head.weight"],"numel":15,)"));
  int64_t elements = 0, kept = 0;
  for (const auto& [name, tensor] : parameters_of(module)) {
    elements += tensor.numel();
    kept += shardweave::to_local(tensor).numel();
  }
  EXPECT_EQ(kept < elements, !alone) << where;
  const Steps got = train(module, mesh);
  for (int step = 0; step < kSteps; ++step) {
    const std::string place = where + ", step " + std::to_string(step);
    expect_close(got[step].second, wanted[step].second, place + ", gradients");
    expect_close(got[step].first, wanted[step].first, place);
  }
  const swv_fully_shard_counters counters = counters_of(mesh);
  EXPECT_EQ(counters.wrong_prefetches, 0) << where;
  EXPECT_EQ(counters.gathered_bytes, 0) << where;
  if (alone) return;  // nothing to gather
  // Backward begins while the last unit is whole, and needs each other one again; but for the one
  // before it, perhaps, which a prefetch leaves where it is.
  const int64_t units = kBlocks + 1, again = keep ? 0 : kBlocks;
  EXPECT_LE(counters.gathers, kSteps * (units + again)) << where;
  EXPECT_GE(counters.gathers, kSteps * (units + again - (keep ? 0 : 1))) << where;
  EXPECT_EQ(counters.reduce_scatters, kSteps * units) << where;
  EXPECT_GT(counters.prefetches, 0) << where;
  EXPECT_GT(counters.peak_gathered_bytes, 0) << where;
}

TEST(FullyShardTest, TrainsAsOneRank) {
  Module alone;
  make_model(alone);
  const Steps wanted = train(alone, nullptr);
  for (const char* text : {"dp=1", "dp=2", "dp=3", "dp=2,tp=2", "tp=2,dp=2"}) {
    for (const bool keep : {false, true}) {
      on_mesh(text, [&](swv_mesh* mesh) {
        expect_trained_alike(std::string(text) + (keep ? ", kept" : ""), keep, mesh, wanted);
      });
    }
  }
}

TEST(FullyShardTest, AccumulatesWithoutSending) {
  const auto backward = [](const Module& module, swv_mesh* mesh, int step) {
    Tensor x, target, y, loss;
    feed(step, false, mesh, x);
    feed(step, true, mesh, target);
    forward(module, x, y);
    call("aten::mse_loss", {swv_value_tensor(y), swv_value_tensor(target)}, loss);
    ok(swv_tensor_backward(loss, nullptr, nullptr));
  };
  const auto gradient = [](const Module& module) {
    Tensor weight, grad;
    ok(swv_module_get(module, "blocks.0.up.weight", weight.out()));
    ok(swv_tensor_grad(weight, grad.out()));
    return whole(grad->tensor);
  };
  Module alone;
  make_model(alone);
  for (int step = 0; step < 4; ++step) backward(alone, nullptr, step);
  const at::Tensor wanted = gradient(alone);
  on_mesh("dp=2", [&](swv_mesh* mesh) {
    Module module;
    make_model(module);
    swv_scope *outer = nullptr, *inner = nullptr;
    EXPECT_THAT(
        message_of(swv_mesh_fully_shard_no_sync(mesh, &outer), SWV_CODE_FAILED_PRECONDITION),
        HasSubstr("no module on this mesh is fully sharded"));
    EXPECT_EQ(outer, nullptr);
    const swv_fully_shard_options options = by_blocks();
    ok(swv_module_fully_shard(module, mesh, &options, nullptr, nullptr));
    ok(swv_mesh_fully_shard_no_sync(mesh, &outer));
    ok(swv_mesh_fully_shard_no_sync(mesh, &inner));
    backward(module, mesh, 0);
    swv_scope_free(outer);  // in any order
    backward(module, mesh, 1);
    swv_scope_free(inner);
    EXPECT_EQ(counters_of(mesh).reduce_scatters, 0);
    backward(module, mesh, 2);
    EXPECT_EQ(counters_of(mesh).reduce_scatters, kBlocks + 1);
    ok(swv_mesh_fully_shard_no_sync(mesh, &outer));
    swv_scope_free(outer);
    backward(module, mesh, 3);
    EXPECT_TRUE(at::allclose(gradient(module), wanted, 1e-5, 1e-6));
  });
}

// What collectives of units send, and their types, of one step.
std::string sent_in_a_step(swv_mesh* mesh, swv_module* module) {
  swv_trace* trace = nullptr;
  swv_string* json = nullptr;
  ok(swv_trace_create(mesh, &trace));
  Tensor x, target, y, loss;
  feed(0, false, mesh, x);
  feed(0, true, mesh, target);
  forward(module, x, y);
  EXPECT_EQ(y->tensor.scalar_type(), at::kFloat);
  call("aten::mse_loss", {swv_value_tensor(y), swv_value_tensor(target)}, loss);
  ok(swv_tensor_backward(loss, nullptr, nullptr));
  ok(swv_module_finish_grad_sync(module));
  ok(swv_trace_to_json(trace, &json));
  swv_trace_free(trace);
  std::string result;
  const nlohmann::json sent = nlohmann::json::parse(text_of(json));
  for (const auto& event : sent["events"]) {
    if (event["is_check"].get<bool>()) continue;
    result +=
        event["collective"].get<std::string>() + " " + event["dtype"].get<std::string>() + "\n";
  }
  return result;
}

TEST(FullyShardTest, MixedPrecision) {
  Module alone;
  make_model(alone);
  const Steps wanted = train(alone, nullptr);
  on_mesh("dp=2", [&](swv_mesh* mesh) {
    Module module, sent;
    swv_fully_shard_options options = by_blocks();
    options.param_dtype = SWV_DTYPE_BF16;
    options.reduce_dtype = options.output_dtype = SWV_DTYPE_F32;
    make_model(module);
    ok(swv_module_fully_shard(module, mesh, &options, nullptr, nullptr));
    const Steps got = train(module, mesh);
    for (size_t i = 0; i < wanted[0].second.size(); ++i) {
      const at::Tensor &grad = got[0].second[i].second, &exact = wanted[0].second[i].second;
      EXPECT_EQ(grad.scalar_type(), at::kFloat);
      // Eight bits of each operand, eight operators deep.
      EXPECT_LE((grad - exact).norm().item<double>(), 0.03 * exact.norm().item<double>())
          << wanted[0].second[i].first;
      EXPECT_FALSE(grad.equal(exact)) << "nothing was cast";
    }
    make_model(sent);
    ok(swv_module_fully_shard(sent, mesh, &options, nullptr, nullptr));
    EXPECT_THAT(sent_in_a_step(mesh, sent),
                AllOf(HasSubstr("all_gather BFloat16"), HasSubstr("reduce_scatter Float"),
                      Not(HasSubstr("all_gather Float")), Not(HasSubstr("scatter BFloat16"))));
    Module refused;
    make_model(refused);
    options.param_dtype = SWV_DTYPE_I64;
    EXPECT_THAT(message_of(swv_module_fully_shard(refused, mesh, &options, nullptr, nullptr)),
                HasSubstr("param_dtype is Long; wanted Half, BFloat16, Float or Double"));
    options.param_dtype = static_cast<swv_dtype>(99);
    EXPECT_THAT(message_of(swv_module_fully_shard(refused, mesh, &options, nullptr, nullptr)),
                HasSubstr("argument 'options.param_dtype' is 99"));
  });
}

TEST(FullyShardTest, WhatEvaluationLeavesIsEmptied) {
  Module alone;
  Tensor input, wanted;
  make_model(alone);
  feed(0, false, nullptr, input);
  forward(alone, input, wanted, SWV_MODE_INFERENCE);
  on_mesh("dp=2", [&](swv_mesh* mesh) {
    Module module;
    Tensor x, y;
    make_model(module);
    const swv_fully_shard_options options = by_blocks();
    ok(swv_module_fully_shard(module, mesh, &options, nullptr, nullptr));
    feed(0, false, mesh, x);
    forward(module, x, y, SWV_MODE_INFERENCE);
    EXPECT_TRUE(at::allclose(whole(y->tensor), wanted->tensor, 1e-5, 1e-5));
    EXPECT_GT(counters_of(mesh).gathered_bytes, 0);
    ok(swv_mesh_reshard(mesh));
    EXPECT_EQ(counters_of(mesh).gathered_bytes, 0);
    // The module goes; what its forward has recorded does not.
    Tensor sum, weight;
    ok(swv_module_get(module, "head.weight", weight.out()));
    forward(module, x, y);
    call("aten::sum", {swv_value_tensor(y)}, sum);
    swv_module_free(*module.out());
    ok(swv_tensor_backward(sum, nullptr, nullptr));
    EXPECT_TRUE(weight->tensor.grad().defined());
  });
}

// A scope in which parameters are whole: read, written, of one rank, left without an end.
TEST(FullyShardTest, FullParams) {
  Module alone;
  make_model(alone);
  Tensor weight;
  ok(swv_module_get(alone, "head.weight", weight.out()));
  const at::Tensor before = weight->tensor.detach().clone();
  on_mesh("dp=2", [&](swv_mesh* mesh) {
    int64_t coordinate[2];
    size_t ndim = 0;
    ok(swv_mesh_coordinate(mesh, coordinate, 2, &ndim));
    Module module;
    make_model(module);
    EXPECT_THAT(message_of(swv_module_full_params(module, 0, -1, nullptr)),
                HasSubstr("argument 'out_scope' is NULL"));
    {
      Scope none;
      EXPECT_THAT(message_of(swv_module_full_params(module, 0, -1, none.out()),
                             SWV_CODE_FAILED_PRECONDITION),
                  HasSubstr("no parameter of the module is on a mesh"));
    }
    const swv_fully_shard_options options = by_blocks();
    ok(swv_module_fully_shard(module, mesh, &options, nullptr, nullptr));
    Tensor its;
    ok(swv_module_get(module, "head.weight", its.out()));
    at::Tensor wanted = before;
    for (const bool ends : {false, true}) {
      for (const int32_t rank : {-1, 0, 1}) {
        Scope scope;
        ok(swv_module_full_params(module, 1, rank, scope.out()));
        swv_tensor* plain = nullptr;
        ok(swv_full_params_get(scope, "head.weight", &plain));
        EXPECT_EQ(plain != nullptr, rank < 0 || rank == coordinate[0]);
        if (plain != nullptr) {
          EXPECT_TRUE(at::equal(plain->tensor, wanted));
          plain->tensor.add_(1);
        }
        swv_tensor_free(plain);
        if (ends) ok(swv_full_params_end(scope));
        if (ends) ok(swv_full_params_end(scope));
        if (ends) wanted = wanted + 1;
      }
      EXPECT_TRUE(at::equal(whole(its->tensor.detach()), wanted)) << ends;
    }
    Scope reads;
    swv_tensor* none = nullptr;
    ok(swv_module_full_params(module, 0, -1, reads.out()));
    EXPECT_THAT(message_of(swv_full_params_get(reads, "nothing", &none), SWV_CODE_NOT_FOUND),
                HasSubstr("is called 'nothing'"));
    EXPECT_THAT(message_of(swv_full_params_get(reads, nullptr, &none)), HasSubstr("'fqn' is NULL"));
    Op op;
    swv_value result = SWV_NONE;
    const swv_value arguments[] = {swv_value_tensor(its), swv_value_float(2)};
    ok(swv_op_find("aten::mul_.Scalar", op.out()));
    EXPECT_THAT(message_of(swv_op_call(op, SWV_MODE_NO_GRAD, arguments, 2, &result, 1, nullptr),
                           SWV_CODE_FAILED_PRECONDITION),
                HasSubstr("summoned to be read"));
    ok(swv_full_params_end(reads));
    Scope strict;
    EXPECT_THAT(message_of(swv_module_full_params(module, 0, 2, strict.out())),
                HasSubstr("wanted 0 to 1 along 'dp'"));
    EXPECT_THAT(message_of(swv_module_full_params(module, 0, -2, strict.out())),
                HasSubstr("argument 'rank' is -2"));
    ok(swv_mesh_forbid_communication(mesh, strict.out()));
    EXPECT_THAT(message_of(swv_full_params_end(strict)), HasSubstr("is of another kind"));
  });
}

TEST(FullyShardTest, SegmentsAndNeighbours) {
  Module alone;
  make_model(alone);
  const Steps wanted = train(alone, nullptr);
  on_mesh("dp=2", [&](swv_mesh* mesh) {
    Module module;
    make_model(module);
    swv_fully_shard_options options = by_blocks();
    options.equal_segments = 1;
    options.reshard_after_forward_ranks = 3;
    EXPECT_THAT(message_of(swv_module_fully_shard(module, mesh, &options, nullptr, nullptr)),
                HasSubstr("wanted a divisor of the 2 ranks"));
    options.reshard_after_forward_ranks = 1;
    options.compute_device = {SWV_DEVICE_CUDA, -1};
    EXPECT_THAT(message_of(swv_module_fully_shard(module, mesh, &options, nullptr, nullptr)),
                HasSubstr("'options.compute_device' is device type 1, index -1"));
    options.compute_device = {SWV_DEVICE_CUDA, 0};
    EXPECT_THAT(message_of(swv_module_fully_shard(module, mesh, &options, nullptr, nullptr)),
                HasSubstr("compute_device is cuda:0, and LibTorch has none here"));
    options.compute_device = {SWV_DEVICE_CPU, 0};
    swv_string* json = nullptr;
    ok(swv_module_fully_shard(module, mesh, &options, nullptr, &json));
    EXPECT_THAT(text_of(json), HasSubstr("\"padding\":"));
    const Steps got = train(module, mesh);
    for (int step = 0; step < kSteps; ++step) {
      expect_close(got[step].second, wanted[step].second, "gradients");
    }
  });
}

// By the types of modules of the library's; a part first, then what is around it; without memory.
TEST(FullyShardTest, ModulesOfTheLibrarys) {
  static constexpr char kMlp[] =
      R"({"layers": [{"kind": "Linear", "in_features": 5, "out_features": 9}, {"kind": "ReLU"},
                     {"kind": "Linear", "in_features": 9, "out_features": 3}]})";
  on_mesh("dp=2", [&](swv_mesh* mesh) {
    const auto made = [](Module& module) {
      Scope deferred;
      ok(swv_deferred_init(deferred.out()));
      ok(swv_module_create_by_kind("Sequential", kMlp, module.out()));
    };
    const auto result_of = [&](swv_module* module) {
      Tensor x;
      swv_materialize_options options = SWV_MATERIALIZE_OPTIONS_INIT;
      options.seed = 7, options.has_seed = 1;
      ok(swv_module_materialize(module, &options));
      feed(0, false, mesh, x);
      const swv_value argument = swv_value_tensor(x);
      swv_value y = SWV_NONE;
      ok(swv_module_call(module, "forward", SWV_MODE_GRAD, &argument, 1, &y, 1, nullptr));
      const at::Tensor result = whole(y.as.tensor->tensor);
      swv_value_clear(&y);
      return result;
    };
    const auto units_of = [&](swv_module* module, const swv_fully_shard_options* options) {
      swv_string* json = nullptr;
      ok(swv_module_fully_shard(module, mesh, options, nullptr, &json));
      return text_of(json);
    };
    Module plain, typed, sized, parts, child;
    made(plain);
    ok(swv_module_distribute(plain, mesh, nullptr, nullptr));
    const at::Tensor wanted = result_of(plain);
    swv_fully_shard_options options = SWV_FULLY_SHARD_OPTIONS_INIT;
    const char* const types[] = {"Linear"};
    options.unit_types = types;
    options.num_unit_types = 1;
    made(typed);
    const std::string units = units_of(typed, &options);
    EXPECT_THAT(units, HasSubstr(R"("module":"0","parameters":["0.weight","0.bias"],"numel":54,)"));
    EXPECT_THAT(units, HasSubstr(R"("module":"2","parameters":["2.weight","2.bias"],"numel":30,)"));
    EXPECT_TRUE(at::allclose(result_of(typed), wanted));
    options = SWV_FULLY_SHARD_OPTIONS_INIT;
    options.min_numel = 40;
    made(sized);
    EXPECT_THAT(units_of(sized, &options), AllOf(HasSubstr(R"("module":"0")"),
                                                 HasSubstr(R"("module":"","parameters":["2.weigh)"),
                                                 Not(HasSubstr(R"("module":"2")"))));
    EXPECT_TRUE(at::allclose(result_of(sized), wanted));
    made(parts);
    ok(swv_module_child(parts, "2", child.out()));
    EXPECT_THAT(units_of(child, nullptr), HasSubstr(R"("parameters":["weight","bias"])"));
    EXPECT_THAT(units_of(parts, nullptr), HasSubstr(R"("parameters":["0.weight","0.bias"])"));
    EXPECT_TRUE(at::allclose(result_of(parts), wanted));
  });
}

// --- bad input -----------------------------------------------------------------------------------

TEST(FullyShardTest, BadInputChangesNothing) {
  on_mesh("dp=2,tp=1", [](swv_mesh* mesh) {
    Module module;
    make_model(module);
    const auto refused = [&](const swv_fully_shard_options& options, swv_code code) {
      swv_string* text = nullptr;
      const std::string message =
          message_of(swv_module_fully_shard(module, mesh, &options, &text, nullptr), code);
      EXPECT_EQ(text, nullptr);
      EXPECT_EQ(message.rfind("swv_module_fully_shard: ", 0), 0U) << message;
      EXPECT_THAT(message, Not(HasSubstr("()")));
      for (const auto& [name, tensor] : parameters_of(module)) {
        EXPECT_FALSE(shardweave::is_dtensor(tensor)) << name;
      }
      return message;
    };
    swv_fully_shard_options options = by_blocks();
    options.mesh_dim = "ep";
    EXPECT_THAT(refused(options, SWV_CODE_NOT_FOUND), HasSubstr("ep"));
    options.mesh_dim = "";
    EXPECT_THAT(refused(options, SWV_CODE_INVALID_ARGUMENT),
                HasSubstr("argument 'options.mesh_dim' is \"\""));
    const char* const wrong[] = {"blocks.*", "layers.*"};
    const char* const missing[] = {"blocks.*", nullptr};
    options = by_blocks();
    options.units = wrong;
    options.num_units = 2;
    EXPECT_THAT(refused(options, SWV_CODE_NOT_FOUND),
                HasSubstr("the pattern of units 'layers.*' matches no submodule"));
    options.units = missing;
    EXPECT_THAT(refused(options, SWV_CODE_INVALID_ARGUMENT),
                HasSubstr("argument 'options.units[1]' is NULL"));
    options.units = nullptr;
    EXPECT_THAT(refused(options, SWV_CODE_INVALID_ARGUMENT),
                HasSubstr("argument 'options.units' is NULL, but has 2 elements"));
    options = by_blocks();
    options.unit_types = wrong + 1;
    options.num_unit_types = 1;
    EXPECT_THAT(refused(options, SWV_CODE_NOT_FOUND), HasSubstr("the type of units 'layers.*'"));
    options = by_blocks();
    options.min_numel = -1;
    EXPECT_THAT(refused(options, SWV_CODE_INVALID_ARGUMENT),
                HasSubstr("argument 'options.min_numel' is -1; wanted 0 or more"));
    options = by_blocks();
    options.source = -2;
    EXPECT_THAT(refused(options, SWV_CODE_INVALID_ARGUMENT),
                HasSubstr("argument 'options.source' is -2"));
    options = by_blocks();
    options.reshard_after_forward = 2;
    EXPECT_THAT(refused(options, SWV_CODE_INVALID_ARGUMENT),
                HasSubstr("argument 'options.reshard_after_forward' is 2"));
    int64_t coordinate[2];
    size_t ndim = 0;
    ok(swv_mesh_coordinate(mesh, coordinate, 2, &ndim));
    options = by_blocks();
    options.reshard_after_forward = coordinate[0] == 0;
    EXPECT_THAT(refused(options, SWV_CODE_INVALID_ARGUMENT),
                HasSubstr("is not the same on ranks 0 and 1"));
    EXPECT_THAT(message_of(swv_module_fully_shard(module, nullptr, nullptr, nullptr, nullptr)),
                HasSubstr("argument 'mesh' is NULL"));
    EXPECT_THAT(message_of(swv_mesh_fully_shard_counters(mesh, nullptr)),
                HasSubstr("argument 'out_counters' is NULL"));
  });
}

TEST(FullyShardTest, WhatDoesNotGoTogether) {
  on_mesh("dp=2", [](swv_mesh* mesh) {
    Module module, cut, tiny;
    make_model(module);
    swv_fully_shard_options options = by_blocks();
    ok(swv_module_fully_shard(module, mesh, &options, nullptr, nullptr));
    EXPECT_THAT(message_of(swv_module_fully_shard(module, mesh, &options, nullptr, nullptr),
                           SWV_CODE_FAILED_PRECONDITION),
                HasSubstr("all parameters are in units already"));
    EXPECT_THAT(message_of(swv_module_distribute(module, mesh, nullptr, nullptr),
                           SWV_CODE_FAILED_PRECONDITION),
                AllOf(HasSubstr("already"), Not(HasSubstr("()"))));

    // A write to a view of what is gathered for each use.
    Tensor weight, view;
    ok(swv_module_get(module, "head.weight", weight.out()));
    call("aten::t", {swv_value_tensor(weight)}, view, SWV_MODE_NO_GRAD);
    Op op;
    swv_value result = SWV_NONE;
    const swv_value arguments[] = {swv_value_tensor(view), swv_value_float(2)};
    ok(swv_op_find("aten::mul_.Scalar", op.out()));
    EXPECT_THAT(message_of(swv_op_call(op, SWV_MODE_NO_GRAD, arguments, 2, &result, 1, nullptr),
                           SWV_CODE_FAILED_PRECONDITION),
                AllOf(HasSubstr("write to the parameter itself"), Not(HasSubstr("()"))));

    make_model(cut);
    Plan plan;
    ok(swv_plan_from_json(R"json({"parameter": {"head.weight": {"dp": "S(0)"}}})json", plan.out()));
    ok(swv_module_distribute(cut, mesh, plan, nullptr));
    EXPECT_THAT(message_of(swv_module_fully_shard(cut, mesh, nullptr, nullptr, nullptr)),
                HasSubstr("'head.weight': lies [S(0)]: wanted whole along 'dp'"));

    Tensor one;
    numbers({1}, 0, one);
    ok(swv_module_create(tiny.out()));
    EXPECT_THAT(message_of(swv_module_fully_shard(tiny, mesh, nullptr, nullptr, nullptr),
                           SWV_CODE_FAILED_PRECONDITION),
                HasSubstr("the module has no parameter to cut"));
    ok(swv_module_add_parameter(tiny, "one", one));
    ok(swv_module_fully_shard(tiny, mesh, nullptr, nullptr, nullptr));
  });
}

}  // namespace
