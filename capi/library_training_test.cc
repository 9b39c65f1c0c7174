// What trains modules of the library's through C: plans of the zoo and by styles, construction without
// memory, gradients that leave during backward, and what tells what a model is and does.
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "capi/testing/host_model.h"
#include "capi/testing/on_mesh.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave.h"
#include "shardweave/capi/handles.h"
#include "shardweave/capi/host_module.h"
#include "shardweave/dtensor/dtensor.h"

namespace {

using namespace c_test;  // NOLINT: this file is a test in it

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kLlama[] =
    R"({"model_type": "llama", "vocab_size": 13, "hidden_size": 16, "intermediate_size": 7,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2})";
constexpr char kMlp[] =
    R"({"layers": [{"kind": "Linear", "in_features": 5, "out_features": 9}, {"kind": "ReLU"},
                   {"kind": "Linear", "in_features": 9, "out_features": 3}]})";

void fill(swv_module* module) {
  const at::NoGradGuard no_grad;
  double phase = 0;
  for (auto& [name, tensor] : parameters_of(module)) {
    tensor.copy_(
        ((at::sin(at::arange(tensor.numel(), at::kDouble) * 12.9898 + phase) * 43758.5453).frac() *
             0.3 +
         (name.find("norm") == std::string::npos ? 0.0 : 1.0))
            .view(tensor.sizes()));
    phase += 1;
  }
}

void tokens(Tensor& to) {
  const int64_t ids[] = {1, 5, 2, 7, 11, 0, 3, 12, 4, 9, 8, 6};
  const int64_t sizes[] = {2, 6};
  swv_tensor_options options = SWV_TENSOR_OPTIONS_INIT;
  options.dtype = SWV_DTYPE_I64;
  ok(swv_tensor_from_data(ids, sizeof(ids), sizes, 2, &options, to.out()));
}
void numbers(Tensor& to) {
  float data[4 * 5];
  for (int i = 0; i < 20; ++i) data[i] = static_cast<float>(i % 7) - 2.5f;
  const int64_t sizes[] = {4, 5};
  ok(swv_tensor_from_data(data, sizeof(data), sizes, 2, nullptr, to.out()));
}
at::Tensor forward(swv_module* module, swv_tensor* x) {
  const swv_value argument = swv_value_tensor(x);
  swv_value y = SWV_NONE;
  ok(swv_module_call(module, "forward", SWV_MODE_GRAD, &argument, 1, &y, 1, nullptr));
  const at::Tensor result = y.as.tensor->tensor;
  swv_value_clear(&y);
  return result;
}
at::Tensor loss_of(const at::Tensor& y) {
  return (y * at::cos(at::arange(y.numel(), at::kFloat)).view(y.sizes())).sum();
}

// --- plans ---------------------------------------------------------------------------------------

void expect_trained_alike(const char* mesh_text, const char* kind, const char* options,
                          void (*input)(Tensor&),
                          const std::function<void(swv_module*, swv_mesh*, Plan&)>& make_plan) {
  Module alone;
  Tensor x;
  ok(swv_module_create_by_kind(kind, options, alone.out()));
  fill(alone);
  input(x);
  const at::Tensor wanted = forward(alone, x);
  loss_of(wanted).backward();
  on_mesh(mesh_text, [&](swv_mesh* mesh) {
    Module module;
    Plan plan;
    Tensor mine;
    ok(swv_module_create_by_kind(kind, options, module.out()));
    fill(module);
    make_plan(module, mesh, plan);
    ok(swv_module_distribute(module, mesh, plan, nullptr));
    input(mine);
    const at::Tensor y = forward(module, mine);
    EXPECT_TRUE(at::allclose(whole(y), wanted, 1e-4, 1e-5)) << mesh_text;
    loss_of(y).backward();
    ok(swv_module_finish_grad_sync(module));
    const auto theirs = parameters_of(alone), ours = parameters_of(module);
    bool is_cut = false;
    for (size_t i = 0; i < ours.size(); ++i) {
      is_cut |= shardweave::to_local(ours[i].second.detach()).numel() < ours[i].second.numel();
      EXPECT_TRUE(at::allclose(whole(ours[i].second.grad()), theirs[i].second.grad(), 1e-4, 1e-5))
          << mesh_text << ": " << ours[i].first;
    }
    EXPECT_EQ(is_cut, std::string(mesh_text).find("tp=2") != std::string::npos);
  });
}

TEST(LibraryTrainingTest, PlansOfTheZoo) {
  for (const char* mesh : {"tp=1", "tp=2", "dp=2,tp=2"}) {
    for (const char* options : {(const char*)nullptr, "{}",
                                R"({"sequence_parallel": true, "shard_vocabulary": false})"}) {
      expect_trained_alike(mesh, "llama", kLlama, tokens,
                           [&](swv_module*, swv_mesh* on, Plan& plan) {
                             ok(swv_plan_from_zoo(options == nullptr ? nullptr : "llama", kLlama,
                                                  on, options, plan.out()));
                           });
    }
  }
}

// Of a model that the zoo does not have, by its parts.
TEST(LibraryTrainingTest, PlansOfPartsOfTheZoo) {
  for (const char* mesh : {"tp=1", "tp=2", "dp=2,tp=2"}) {
    expect_trained_alike(mesh, "llama", kLlama, tokens, [&](swv_module*, swv_mesh* on, Plan& plan) {
      Plan mlp;
      ok(swv_plan_from_zoo("attention", kLlama, on, R"({"fqn": "model.layers.*.self_attn"})",
                           plan.out()));
      ok(swv_plan_from_zoo("mlp", "{}", on, R"({"fqn": "model.layers.*.mlp", "mesh_dim": "tp"})",
                           mlp.out()));
      ok(swv_plan_append(plan, mlp));
    });
  }
}

TEST(LibraryTrainingTest, PlansByStyles) {
  for (const char* mesh : {"tp=1", "tp=2", "dp=2,tp=2"}) {
    for (const char* styles : {R"({"style": "pairwise"})", R"({"0": "colwise", "2": "rowwise"})"}) {
      expect_trained_alike(mesh, "Sequential", kMlp, numbers,
                           [&](swv_module* module, swv_mesh* on, Plan& plan) {
                             ok(swv_plan_from_styles(module, on, styles, nullptr, plan.out()));
                           });
    }
  }
}

TEST(LibraryTrainingTest, PlansThatCannotBe) {
  on_mesh("tp=1", [](swv_mesh* mesh) {
    Plan plan;
    Module module;
    ok(swv_module_create_by_kind("Sequential", kMlp, module.out()));
    const auto zoo = [&](const char* kind, const char* config, const char* options) {
      return message_of(swv_plan_from_zoo(kind, config, mesh, options, plan.out()));
    };
    EXPECT_THAT(zoo("llama", kLlama, R"({"expert_parallel": true})"),
                HasSubstr("line 1, \"expert_parallel\": is no option of llama's plan; there are: "
                          "mesh_dim, sequence_parallel, shard_vocabulary"));
    EXPECT_THAT(zoo("vit", "{}", R"({"shard_vocabulary": true})"),
                HasSubstr("is no option of vit's plan"));
    EXPECT_THAT(zoo("llama", kLlama, R"({"sequence_paralel": true})"),
                HasSubstr("did you mean 'sequence_parallel'?"));
    EXPECT_THAT(zoo("llama", kLlama, R"({"sequence_parallel": 1})"),
                HasSubstr("wanted true or false, not 1"));
    EXPECT_THAT(zoo("llama", kLlama, "[]"), HasSubstr("wanted an object"));
    EXPECT_THAT(zoo("lama", kLlama, nullptr),
                AllOf(HasSubstr("did you mean 'llama'?"),
                      HasSubstr("plans of parts: attention, mlp, moe")));
    EXPECT_THAT(zoo("attention", "{}", nullptr), HasSubstr("\"num_attention_heads\""));
    EXPECT_THAT(
        zoo("attention", R"({"num_attention_heads": 4, "num_key_value_heads": 3})", nullptr),
        HasSubstr("does not divide"));
    EXPECT_THAT(zoo("mlp", "{}", R"({"fqn": 3})"), HasSubstr("wanted a pattern of modules, not 3"));
    EXPECT_THAT(
        zoo("mlp", "{}", R"({"expert_parallel": true})"),
        HasSubstr("is no option of mlp's plan; there are: mesh_dim, sequence_parallel, fqn"));
    EXPECT_THAT(zoo("llama", kLlama, R"({"fqn": "a"})"), HasSubstr("is no option of llama's plan"));
    EXPECT_THAT(zoo(nullptr, "{}", nullptr), HasSubstr("no \"model_type\""));
    EXPECT_THAT(zoo("gpt2", kLlama, nullptr), HasSubstr("wanted \"gpt2\", not \"llama\""));
    EXPECT_THAT(
        message_of(swv_plan_from_zoo("llama", kLlama, mesh, R"({"mesh_dim": "ep"})", plan.out()),
                   SWV_CODE_NOT_FOUND),
        HasSubstr("ep"));
    const auto styles = [&](const char* text, swv_code code = SWV_CODE_INVALID_ARGUMENT) {
      return message_of(swv_plan_from_styles(module, mesh, text, nullptr, plan.out()), code);
    };
    EXPECT_THAT(styles(R"({"0": "cowlise"})"), AllOf(HasSubstr("cowlise"), HasSubstr("colwise")));
    EXPECT_THAT(styles(R"({"00": "colwise"})", SWV_CODE_NOT_FOUND), HasSubstr("matches no module"));
    EXPECT_THAT(
        message_of(swv_plan_from_styles(module, mesh, "{}", "ep", plan.out()), SWV_CODE_NOT_FOUND),
        HasSubstr("ep"));
    EXPECT_EQ(static_cast<swv_plan*>(plan), nullptr);
  });
  on_mesh("tp=3", [](swv_mesh* mesh) {
    Plan plan;
    EXPECT_THAT(message_of(swv_plan_from_zoo("llama", kLlama, mesh, nullptr, plan.out())),
                HasSubstr("heads"));
    EXPECT_THAT(message_of(swv_plan_from_zoo("attention", kLlama, mesh, nullptr, plan.out())),
                HasSubstr("heads"));
  });
}

// A model that is searched for a plan: of the library's, or (kind NULL) of two weights and the host's
// own forward.
struct Searched {
  const char* kind;
  const char* options;
  void (*input)(Tensor&);
  bool fails = false;

  swv_status* make(swv_module** out) const {
    if (fails) return swv_status_new(SWV_CODE_DATA_LOSS, "the cat ate it");
    if (kind != nullptr) return swv_module_create_by_kind(kind, options, out);
    const int64_t up[] = {9, 5}, down[] = {3, 9};
    ok(swv_module_create(out));
    for (const auto& [name, sizes] : {std::pair{"up.weight", up}, {"down.weight", down}}) {
      Tensor weight;
      swv_tensor_options with_grad = SWV_TENSOR_OPTIONS_INIT;
      with_grad.requires_grad = 1;
      ok(swv_tensor_ones(sizes, 2, &with_grad, weight.out()));
      ok(swv_module_add_parameter(*out, name, weight));
    }
    return nullptr;
  }
  at::Tensor run(swv_module* module, const at::Tensor& x) const {
    if (kind != nullptr) {
      Tensor handle;
      *handle.out() = shardweave::capi::new_tensor(x, "x");
      return forward(module, handle);
    }
    Tensor up, down;
    ok(swv_module_get(module, "up.weight", up.out()));
    ok(swv_module_get(module, "down.weight", down.out()));
    return at::linear(at::linear(x, up->tensor).relu(), down->tensor);
  }
  at::Tensor on(swv_mesh* mesh) const {
    Tensor plain, here;
    Layout rows;
    int32_t ndim = 0;
    swv_distribute_options options_here = SWV_DISTRIBUTE_OPTIONS_INIT;
    options_here.source = -1;
    input(plain);
    ok(swv_mesh_ndim(mesh, &ndim));
    ok(swv_layout_parse(ndim == 1 ? "[R]" : "[S(0), R]", rows.out()));
    ok(swv_tensor_distribute(plain, mesh, rows, &options_here, here.out()));
    return here->tensor;
  }
};
swv_status* make_searched(void* searched, swv_module** out_module) {
  return static_cast<Searched*>(searched)->make(out_module);
}
swv_status* loss_of_searched(void* searched, swv_module* module, swv_mesh* mesh,
                             swv_tensor** out_loss) {
  const Searched& model = *static_cast<Searched*>(searched);
  *out_loss = shardweave::capi::new_tensor(loss_of(model.run(module, model.on(mesh))), "loss");
  return nullptr;
}

TEST(LibraryTrainingTest, PlansThatAreSearchedFor) {
  for (const Searched& model :
       {Searched{"llama", kLlama, tokens}, Searched{"Sequential", kMlp, numbers},
        Searched{nullptr, nullptr, numbers}}) {
    SCOPED_TRACE(model.kind == nullptr ? "the host's" : model.kind);
    Module alone;
    Tensor x;
    ok(model.make(alone.out()));
    fill(alone);
    model.input(x);
    const at::Tensor wanted = model.run(alone, x->tensor);
    loss_of(wanted).backward();
    for (const char* mesh_text : {"tp=2", "tp=3", "dp=2,tp=2"}) {
      std::mutex mutex;
      std::vector<std::string> found;
      on_mesh(mesh_text, [&](swv_mesh* mesh) {
        // Computing takes long, so that cutting pays.
        const swv_link_cost links[] = {{1e-8, 1e8}, {1e-8, 1e8}};
        swv_device_cost device = SWV_DEVICE_COST_INIT;
        device.flops = device.bandwidth = 1e7;
        int32_t ndim = 0;
        ok(swv_mesh_ndim(mesh, &ndim));
        ok(swv_mesh_set_cost_model(mesh, links, static_cast<size_t>(ndim), &device));
        Searched mine = model;
        swv_plan_auto_options few = SWV_PLAN_AUTO_OPTIONS_INIT;
        few.max_evaluations = 12;
        Plan plan;
        swv_string *text = nullptr, *json = nullptr, *as_json = nullptr;
        ok(swv_plan_auto(mesh, make_searched, loss_of_searched, &mine, &few, plan.out(), &text,
                         &json));
        EXPECT_THAT(text_of(text), AllOf(HasSubstr("plans measured"), HasSubstr("seconds")));
        EXPECT_THAT(text_of(json), AllOf(HasSubstr("\"evaluations\""), HasSubstr("\"groups\"")));
        ok(swv_plan_to_json(plan, &as_json));
        {
          const std::lock_guard lock(mutex);
          found.push_back(text_of(as_json));
        }
        Module module;
        ok(model.make(module.out()));
        fill(module);
        ok(swv_module_distribute(module, mesh, plan, nullptr));
        const at::Tensor y = model.run(module, model.on(mesh));
        EXPECT_TRUE(at::allclose(whole(y), wanted, 1e-4, 1e-5)) << mesh_text;
        loss_of(y).backward();
        ok(swv_module_finish_grad_sync(module));
        const auto theirs = parameters_of(alone), ours = parameters_of(module);
        bool is_cut = false;
        for (size_t i = 0; i < ours.size(); ++i) {
          is_cut |= shardweave::to_local(ours[i].second.detach()).numel() < ours[i].second.numel();
          EXPECT_TRUE(
              at::allclose(whole(ours[i].second.grad()), theirs[i].second.grad(), 1e-4, 1e-5))
              << mesh_text << ": " << ours[i].first;
        }
        EXPECT_TRUE(is_cut) << mesh_text << found[0];
      });
      for (const std::string& each : found) EXPECT_EQ(each, found[0]);
    }
  }
}

TEST(LibraryTrainingTest, PlansThatCannotBeSearchedFor) {
  on_mesh("a=1,b=1", [](swv_mesh* mesh) {
    Searched model = {"Sequential", kMlp, numbers};
    Plan plan;
    swv_string* text = nullptr;
    swv_plan_auto_options options = SWV_PLAN_AUTO_OPTIONS_INIT;
    const auto error = [&](swv_code code = SWV_CODE_INVALID_ARGUMENT) {
      return message_of(swv_plan_auto(mesh, make_searched, loss_of_searched, &model, &options,
                                      plan.out(), &text, nullptr),
                        code);
    };
    EXPECT_THAT(error(SWV_CODE_NOT_FOUND), HasSubstr("tp"));
    options.tp_mesh_dim = "c";
    EXPECT_THAT(error(SWV_CODE_NOT_FOUND), HasSubstr("no dimension \"c\""));
    options.tp_mesh_dim = "b";
    options.memory_limit = -1;
    EXPECT_THAT(error(), HasSubstr("'options.memory_limit' is -1; wanted 0 or more"));
    options.memory_limit = 100;
    EXPECT_THAT(error(SWV_CODE_RESOURCE_EXHAUSTED), HasSubstr("100"));
    options.memory_limit = 0;
    options.max_evaluations = 0;
    EXPECT_THAT(error(), HasSubstr("max_evaluations is 0; wanted 1 or more"));
    options.max_evaluations = 1;
    model.fails = true;
    EXPECT_THAT(error(SWV_CODE_DATA_LOSS), HasSubstr("make: the cat ate it"));
    EXPECT_THAT(message_of(swv_plan_auto(
                    mesh, [](void*, swv_module**) -> swv_status* { return nullptr; },
                    loss_of_searched, &model, &options, plan.out(), nullptr, nullptr)),
                HasSubstr("argument 'make' gave no module"));
    model.fails = false;
    EXPECT_THAT(
        message_of(swv_plan_auto(
            mesh, make_searched,
            [](void*, swv_module*, swv_mesh*, swv_tensor**) -> swv_status* { return nullptr; },
            &model, &options, plan.out(), nullptr, nullptr)),
        HasSubstr("argument 'loss' gave no tensor"));
    EXPECT_THAT(message_of(swv_plan_auto(mesh, nullptr, loss_of_searched, &model, &options,
                                         plan.out(), nullptr, nullptr)),
                HasSubstr("argument 'make' is NULL"));
    EXPECT_EQ(static_cast<swv_plan*>(plan), nullptr);
    EXPECT_EQ(text, nullptr);
  });
}

// --- deferred ------------------------------------------------------------------------------------

TEST(DeferredTest, MakesTheSameNumbersOnEveryMesh) {
  const auto made = [](swv_mesh* mesh, bool with_value) {
    Module module;
    {
      Scope scope;
      ok(swv_deferred_init(scope.out()));
      ok(swv_module_create_by_kind("llama", kLlama, module.out()));
    }
    for (const auto& [name, tensor] : parameters_of(module)) {
      EXPECT_EQ(tensor.device(), at::kMeta) << name;
    }
    if (mesh != nullptr) {
      Plan plan;
      ok(swv_plan_from_zoo("llama", kLlama, mesh, nullptr, plan.out()));
      ok(swv_module_distribute(module, mesh, plan, nullptr));
    }
    swv_materialize_options options = SWV_MATERIALIZE_OPTIONS_INIT;
    options.seed = 7, options.has_seed = 1;
    Tensor norm;
    const std::vector<float> halves(16, 0.5f);
    const int64_t size = 16;
    ok(swv_tensor_from_data(halves.data(), halves.size() * sizeof(float), &size, 1, nullptr,
                            norm.out()));
    const char* const fqns[] = {"model.norm.weight"};
    const swv_tensor* const values[] = {norm};
    if (with_value) options.fqns = fqns, options.values = values, options.num_values = 1;
    ok(swv_module_materialize(module, &options));
    std::vector<at::Tensor> all;
    for (const auto& [name, tensor] : parameters_of(module)) all.push_back(whole(tensor));
    Tensor one;
    swv_bool deferred = 1;
    ok(swv_module_get(module, "model.norm.weight", one.out()));
    ok(swv_tensor_is_deferred(one, &deferred));
    EXPECT_EQ(deferred, 0);
    EXPECT_EQ(whole(one->tensor)[3].item<float>(), with_value ? 0.5f : 1.0f);
    return all;
  };
  const std::vector<at::Tensor> wanted = made(nullptr, false);
  for (const char* text : {"tp=1", "tp=2", "dp=2,tp=2"}) {
    on_mesh(text, [&](swv_mesh* mesh) {
      const std::vector<at::Tensor> got = made(mesh, false);
      for (size_t i = 0; i < wanted.size(); ++i) EXPECT_TRUE(at::equal(got[i], wanted[i])) << text;
      made(mesh, true);
    });
  }
}

TEST(DeferredTest, WhatWantsValuesIsAnError) {
  Scope scope;
  Module module;
  Tensor weight, real, zeros;
  ok(swv_deferred_init(scope.out()));
  ok(swv_module_create_by_kind("Linear", R"({"in_features": 3, "out_features": 2})", module.out()));
  const int64_t sizes[] = {2, 3};
  ok(swv_tensor_zeros(sizes, 2, nullptr, zeros.out()));
  float data[6] = {1, 2, 3, 4, 5, 6};
  ok(swv_tensor_from_data(data, sizeof(data), sizes, 2, nullptr, real.out()));
  const auto is_deferred = [](swv_tensor* t) {
    swv_bool yes = 0;
    ok(swv_tensor_is_deferred(t, &yes));
    return yes == 1;
  };
  ok(swv_module_get(module, "weight", weight.out()));
  EXPECT_TRUE(is_deferred(weight));
  EXPECT_TRUE(is_deferred(zeros));
  EXPECT_FALSE(is_deferred(real));
  float back[6] = {};
  ok(swv_tensor_copy_to_host(real, back, sizeof(back)));
  EXPECT_EQ(back[5], 6);
  const auto refused = [](swv_status* status) {
    EXPECT_THAT(message_of(status, SWV_CODE_FAILED_PRECONDITION),
                AllOf(HasSubstr("argument 'tensor' is deferred (deferred Float[2, 3]): it has no "
                                "values until swv_module_materialize"),
                      Not(HasSubstr("()"))));
  };
  for (bool within : {true, false}) {
    refused(swv_tensor_copy_from_host(weight, data, sizeof(data)));
    refused(swv_tensor_copy_to_host(weight, back, sizeof(back)));
    swv_buffer buffer = SWV_BUFFER_INIT;
    refused(swv_tensor_buffer(weight, &buffer));
    struct DLManagedTensorVersioned* managed = nullptr;
    refused(swv_tensor_to_dlpack(zeros, nullptr, &managed));
    swv_value item = SWV_NONE;
    EXPECT_THAT(message_of(swv_tensor_item(zeros, &item)), HasSubstr("swv_tensor_item: "));
    swv_string* text = nullptr;
    ok(swv_tensor_to_string(weight, &text));
    EXPECT_EQ(text_of(text), "deferred Float[2, 3]");
    if (within) swv_scope_free(*scope.out());
  }
  const swv_value arguments[] = {swv_value_tensor(real)};
  swv_value y = SWV_NONE;
  const std::string message =
      message_of(swv_module_call(module, "forward", SWV_MODE_GRAD, arguments, 1, &y, 1, nullptr),
                 SWV_CODE_FAILED_PRECONDITION);
  EXPECT_THAT(message, AllOf(HasSubstr("' has no values yet"), Not(HasSubstr("()"))));
  const char* const fqns[] = {"weihgt"};
  const swv_tensor* const values[] = {real};
  swv_materialize_options options = SWV_MATERIALIZE_OPTIONS_INIT;
  options.fqns = fqns, options.values = values, options.num_values = 1;
  EXPECT_THAT(message_of(swv_module_materialize(module, &options), SWV_CODE_NOT_FOUND),
              HasSubstr("did you mean 'weight'?"));
  options.fqns = nullptr;
  EXPECT_THAT(message_of(swv_module_materialize(module, &options)),
              HasSubstr("'options.fqns' is NULL, but has 1 elements"));
  ok(swv_module_materialize(module, nullptr));
  EXPECT_FALSE(is_deferred(weight));
  ok(swv_tensor_copy_from_host(weight, data, sizeof(data)));
}

bool makes_deferred() {
  const int64_t size = 2;
  Tensor t;
  swv_bool yes = 0;
  ok(swv_tensor_ones(&size, 1, nullptr, t.out()));
  ok(swv_tensor_is_deferred(t, &yes));
  return yes == 1;
}

// Scopes end in any order and on any thread; what they are is their thread's.
TEST(DeferredTest, ScopesEndAnyhow) {
  EXPECT_FALSE(makes_deferred());
  swv_scope *a = nullptr, *b = nullptr;
  ok(swv_deferred_init(&a));
  ok(swv_deferred_init(&b));
  EXPECT_TRUE(makes_deferred());
  std::thread([] { EXPECT_FALSE(makes_deferred()); }).join();
  swv_scope_free(a);
  EXPECT_TRUE(makes_deferred());
  std::thread([&] {
    swv_scope_free(b);
    EXPECT_FALSE(makes_deferred());
  }).join();
  EXPECT_FALSE(makes_deferred());
  // A thread that ends before its scope.
  std::thread([&] {
    ok(swv_deferred_init(&a));
    EXPECT_TRUE(makes_deferred());
  }).join();
  swv_scope_free(a);
  EXPECT_FALSE(makes_deferred());
}

// --- gradients -----------------------------------------------------------------------------------

TEST(GradSyncTest, LeavesDuringBackwardAndPauses) {
  on_mesh("dp=2", [](swv_mesh* mesh) {
    Module module;
    Sync sync;
    Tensor whole_x, x;
    ok(swv_module_create_by_kind("Sequential", kMlp, module.out()));
    fill(module);
    ok(swv_module_distribute(module, mesh, nullptr, nullptr));
    numbers(whole_x);
    Layout rows;
    ok(swv_layout_parse("[S(0)]", rows.out()));
    ok(swv_tensor_distribute(whole_x, mesh, rows, nullptr, x.out()));
    swv_grad_sync_options options = SWV_GRAD_SYNC_OPTIONS_INIT;
    options.bucket_bytes = 200;
    const auto parameters = parameters_of(module);
    const auto gradients = [&](swv_scope* /*alive*/) {
      std::vector<at::Tensor> all;
      for (const auto& [name, tensor] : parameters) all.push_back(whole(tensor.grad()));
      ok(swv_module_zero_grad(module));
      return all;
    };
    loss_of(forward(module, x)).backward();
    ok(swv_module_finish_grad_sync(module));
    const std::vector<at::Tensor> wanted = gradients(nullptr);

    ok(swv_grad_sync_create(module, &options, sync.out()));
    EXPECT_THAT(message_of(swv_grad_sync_create(module, nullptr, Sync().out()),
                           SWV_CODE_FAILED_PRECONDITION),
                HasSubstr("another GradSync"));
    int64_t buckets = -1, left = -1;
    ok(swv_grad_sync_counts(sync, &buckets, &left));
    EXPECT_EQ(buckets, 0);
    for (int i = 0; i < 3; ++i) {
      loss_of(forward(module, x)).backward();
      ok(swv_module_finish_grad_sync(module));
      const auto got = gradients(nullptr);
      for (size_t p = 0; p < got.size(); ++p) EXPECT_TRUE(at::allclose(got[p], wanted[p]));
    }
    ok(swv_grad_sync_counts(sync, &buckets, nullptr));
    ok(swv_grad_sync_counts(sync, nullptr, &left));
    EXPECT_GT(buckets, 1);
    EXPECT_EQ(left, 2 * buckets);  // all, in every iteration but the first
    {
      Scope pause, inner;
      ok(swv_grad_sync_no_sync(sync, pause.out()));
      ok(swv_grad_sync_no_sync(sync, inner.out()));
      swv_scope_free(*pause.out());  // out of order
      loss_of(forward(module, x)).backward();
      int64_t now = 0;
      ok(swv_grad_sync_counts(sync, nullptr, &now));
      EXPECT_EQ(now, left);
    }
    loss_of(forward(module, x)).backward();
    ok(swv_module_finish_grad_sync(module));
    const auto twice = gradients(nullptr);
    for (size_t p = 0; p < twice.size(); ++p) EXPECT_TRUE(at::allclose(twice[p], wanted[p] * 2));

    // Its handle goes while a pause is there: the pause means nothing any more, and a new one may
    // be made.
    Scope pause;
    ok(swv_grad_sync_no_sync(sync, pause.out()));
    swv_grad_sync_free(*sync.out());
    ok(swv_grad_sync_create(module, nullptr, sync.out()));
    // The module goes first.
    swv_module_free(*module.out());
    EXPECT_THAT(message_of(swv_grad_sync_counts(nullptr, nullptr, nullptr)),
                HasSubstr("argument 'sync' is NULL"));
  });
  Module plain;
  ok(swv_module_create_by_kind("Sequential", kMlp, plain.out()));
  swv_grad_sync_options options = SWV_GRAD_SYNC_OPTIONS_INIT;
  options.bucket_bytes = 0;
  EXPECT_THAT(message_of(swv_grad_sync_create(plain, &options, Sync().out())),
              HasSubstr("'options.bucket_bytes' is 0; wanted 1 or more"));
}

// On rank 1 backward fails when one of two layers' gradients have left.
TEST(GradSyncTest, WhatFailedIsDiscarded) {
  on_mesh("dp=2", [](swv_mesh* mesh) {
    Module module;
    Sync sync;
    Tensor whole_x, x;
    ok(swv_module_create_by_kind("Sequential", kMlp, module.out()));
    fill(module);
    ok(swv_module_distribute(module, mesh, nullptr, nullptr));
    numbers(whole_x);
    Layout rows;
    ok(swv_layout_parse("[S(0)]", rows.out()));
    ok(swv_tensor_distribute(whole_x, mesh, rows, nullptr, x.out()));
    const auto parameters = parameters_of(module);
    const auto gradients = [&] {
      std::vector<at::Tensor> all;
      for (const auto& [name, tensor] : parameters) all.push_back(whole(tensor.grad()));
      ok(swv_module_zero_grad(module));
      return all;
    };
    loss_of(forward(module, x)).backward();
    ok(swv_module_finish_grad_sync(module));
    const std::vector<at::Tensor> wanted = gradients();

    swv_grad_sync_options options = SWV_GRAD_SYNC_OPTIONS_INIT;
    options.bucket_bytes = 1;
    ok(swv_grad_sync_create(module, &options, sync.out()));
    bool fails = false;
    parameters.at(0).second.register_hook([&](const at::Tensor& grad) {
      if (fails) throw std::runtime_error("this rank's");
      return grad;
    });
    int64_t coordinate = 0;
    size_t ndim = 0;
    ok(swv_mesh_coordinate(mesh, &coordinate, 1, &ndim));
    for (int i = 0; i < 4; ++i) {
      fails = i == 2 && coordinate == 1;
      const at::Tensor loss = loss_of(forward(module, x));
      if (fails) {
        EXPECT_THROW(loss.backward(), std::runtime_error);
      } else {
        loss.backward();
      }
      if (i == 2) {
        int64_t left = 0;
        ok(swv_grad_sync_counts(sync, nullptr, &left));
        EXPECT_GT(left, 4);
        ok(swv_grad_sync_discard(sync));
        ok(swv_module_zero_grad(module));
        continue;
      }
      ok(swv_module_finish_grad_sync(module));
      const std::vector<at::Tensor> got = gradients();
      for (size_t p = 0; p < got.size(); ++p) EXPECT_TRUE(at::allclose(got[p], wanted[p])) << i;
    }
  });
  EXPECT_THAT(message_of(swv_grad_sync_discard(nullptr)), HasSubstr("argument 'sync' is NULL"));
}

TEST(GradSyncTest, GradientsTravelInFewerBits) {
  on_mesh("dp=2", [](swv_mesh* mesh) {
    Module module;
    ok(swv_module_create_by_kind("Sequential", kMlp, module.out()));
    fill(module);
    ok(swv_module_distribute(module, mesh, nullptr, nullptr));
    swv_grad_sync_options options = SWV_GRAD_SYNC_OPTIONS_INIT;
    options.reduce_dtype = SWV_DTYPE_I32;
    Sync sync;
    EXPECT_THAT(message_of(swv_grad_sync_create(module, &options, sync.out())),
                HasSubstr("reduce_dtype is Int; wanted Half"));
    options.reduce_dtype = SWV_DTYPE_BF16;
    ok(swv_grad_sync_create(module, &options, sync.out()));
    Tensor plain, x;
    numbers(plain);
    Layout rows;
    ok(swv_layout_parse("[S(0)]", rows.out()));
    ok(swv_tensor_distribute(plain, mesh, rows, nullptr, x.out()));
    for (int step = 0; step < 2; ++step) {
      swv_trace* trace = nullptr;
      int64_t bytes = 0;
      ok(swv_trace_create(mesh, &trace));
      loss_of(forward(module, x)).backward();
      ok(swv_module_finish_grad_sync(module));
      ok(swv_trace_bytes(trace, &bytes));
      int64_t elements = 0;
      for (const auto& [name, tensor] : parameters_of(module)) {
        elements += tensor.numel();
        EXPECT_EQ(tensor.grad().scalar_type(), at::kFloat) << name;
      }
      EXPECT_GE(bytes, 2 * elements);
      EXPECT_LT(bytes, 3 * elements);  // what is compared, too
      swv_trace_free(trace);
      ok(swv_module_zero_grad(module));
    }
  });
}

// --- what it is and does -------------------------------------------------------------------------

struct Models {
  swv_module *module, *reference;
  swv_tensor* x;
  bool fails = false;
};
swv_status* run_one(swv_module* module, swv_tensor* x, swv_tensor** out_result) {
  const swv_value argument = swv_value_tensor(x);
  swv_value y = SWV_NONE;
  swv_status* const status =
      swv_module_call(module, "forward", SWV_MODE_GRAD, &argument, 1, &y, 1, nullptr);
  if (status == nullptr) *out_result = y.as.tensor;
  return status;
}
swv_status* run_module(void* user_data, swv_tensor** out_result) {
  const Models& run = *static_cast<Models*>(user_data);
  if (run.fails) return swv_status_new(SWV_CODE_DATA_LOSS, "no data");
  return run_one(run.module, run.x, out_result);
}
swv_status* run_reference(void* user_data, swv_tensor** out_result) {
  const Models& run = *static_cast<Models*>(user_data);
  return run_one(run.reference, run.x, out_result);
}

TEST(DebugTest, TellsWhatAModelIsAndDoes) {
  on_mesh("tp=2", [](swv_mesh* mesh) {
    Module module, reference;
    Plan plan;
    Tensor x;
    ok(swv_module_create_by_kind("Sequential", kMlp, module.out()));
    ok(swv_module_create_by_kind("Sequential", kMlp, reference.out()));
    fill(module);
    ok(swv_plan_from_styles(module, mesh, R"({"style": "pairwise"})", nullptr, plan.out()));
    ok(swv_module_distribute(module, mesh, plan, nullptr));
    numbers(x);
    Models run = {module, reference, x};
    swv_string *text = nullptr, *json = nullptr;
    ok(swv_module_dump(module, &text, &json));
    EXPECT_THAT(text_of(text), AllOf(HasSubstr("Linear"), HasSubstr("[S(0)]")));
    EXPECT_THAT(text_of(json), HasSubstr("\"fqns\":[\"0.weight\"]"));
    ok(swv_module_dump(module, nullptr, nullptr));
    ok(swv_module_memory(module, nullptr, nullptr, &text, nullptr));
    EXPECT_THAT(text_of(text), HasSubstr("activations"));
    ok(swv_module_memory(module, run_module, &run, nullptr, &json));
    EXPECT_THAT(text_of(json), AllOf(HasSubstr("\"module\":\"0\""), Not(HasSubstr("error"))));
    ok(swv_module_list_communication(module, run_module, &run, &text, &json));
    EXPECT_THAT(text_of(text), HasSubstr("all_reduce"));
    EXPECT_THAT(text_of(json), HasSubstr("\"module\":\"2\""));
    EXPECT_THAT(message_of(swv_module_list_communication(reference, run_module, &run, &text, &json),
                           SWV_CODE_FAILED_PRECONDITION),
                HasSubstr("swv_module_list_communication: "));
    run.fails = true;
    EXPECT_THAT(message_of(swv_module_list_communication(module, run_module, &run, &text, &json),
                           SWV_CODE_DATA_LOSS),
                HasSubstr("run: no data"));
    run.fails = false;

    swv_bool same = 0;
    swv_verify_options options = SWV_VERIFY_OPTIONS_INIT;
    options.copy_values = 1;
    ok(swv_module_verify(module, run_module, reference, run_reference, &run, &options, &same, &text,
                         &json));
    EXPECT_THAT(text_of(text), Not(HasSubstr("differs")));
    EXPECT_THAT(text_of(json), HasSubstr("\"ok\":true"));
    EXPECT_EQ(same, 1);
    {
      const at::NoGradGuard no_grad;
      Tensor weight;
      ok(swv_module_get(reference, "2.weight", weight.out()));
      weight->tensor[1][3] += 1;
    }
    ok(swv_module_verify(module, run_module, reference, run_reference, &run, nullptr, &same, &text,
                         nullptr));
    EXPECT_EQ(same, 0);
    EXPECT_THAT(text_of(text), HasSubstr("2.weight"));
    options.tolerance = -1;
    EXPECT_THAT(message_of(swv_module_verify(module, run_module, reference, run_reference, &run,
                                             &options, &same, nullptr, nullptr)),
                HasSubstr("'options.tolerance' is -1"));
    EXPECT_THAT(message_of(swv_module_verify(module, run_module, reference, nullptr, &run, nullptr,
                                             &same, nullptr, nullptr)),
                HasSubstr("'run_reference' is NULL"));
    run.fails = true;  // of the sharded one: a difference
    options = SWV_VERIFY_OPTIONS_INIT;
    options.copy_values = 1;
    ok(swv_module_verify(module, run_module, reference, run_reference, &run, &options, &same, &text,
                         nullptr));
    EXPECT_EQ(same, 0);
    EXPECT_THAT(text_of(text), HasSubstr("no data"));
  });
}

std::weak_ptr<torch::nn::Module> behind(const swv_module* module) {
  if (module->library != nullptr) return module->library->pointer();
  return module->host;
}

// A model that frees its own handle when it runs, which was the last.
struct Freed {
  swv_module* module = nullptr;
  std::weak_ptr<torch::nn::Module> still;
  Tensor x, weight;  // the weight of a host's; NULL: the module has its own forward

  void watch() { still = behind(module); }
  swv_status* run(swv_tensor** out_result) {
    swv_status* status = nullptr;
    if (weight == nullptr) status = run_one(module, x, out_result);
    swv_module_free(std::exchange(module, nullptr));
    EXPECT_FALSE(still.expired()) << "it still runs";
    if (weight == nullptr) return status;
    const swv_value arguments[] = {swv_value_tensor(x), swv_value_tensor(weight)};
    swv_value y = SWV_NONE;
    Op linear;
    status = swv_op_find("aten::linear", linear.out());
    if (status == nullptr) {
      status = swv_op_call(linear, SWV_MODE_GRAD, arguments, 2, &y, 1, nullptr);
    }
    if (status == nullptr) *out_result = y.as.tensor;
    return status;
  }
};

TEST(DebugTest, AModuleMayBeFreedByWhatItRuns) {
  struct Both {
    Freed sharded, plain;
  };
  const swv_run_fn run = [](void* both, swv_tensor** out) {
    return static_cast<Both*>(both)->sharded.run(out);
  };
  const swv_run_fn run_reference = [](void* both, swv_tensor** out) {
    return static_cast<Both*>(both)->plain.run(out);
  };
  for (const bool is_hosts : {false, true}) {
    for (const char* const what : {"memory", "communication", "verify"}) {
      on_mesh("tp=2", [&](swv_mesh* mesh) {
        Both both;
        Plan plan;
        for (Freed* each : {&both.sharded, &both.plain}) {
          numbers(each->x);
          if (!is_hosts) {
            ok(swv_module_create_by_kind("Sequential", kMlp, &each->module));
          } else {
            ok(swv_module_create(&each->module));
            const float data[15] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
            const int64_t sizes[] = {3, 5};
            swv_tensor_options options = SWV_TENSOR_OPTIONS_INIT;
            options.requires_grad = 1;
            ok(swv_tensor_from_data(data, sizeof(data), sizes, 2, &options, each->weight.out()));
            ok(swv_module_add_parameter(each->module, "weight", each->weight));
          }
          fill(each->module);
          each->watch();
        }
        ok(swv_plan_from_json(is_hosts ? R"json({"parameter": {"weight": {"tp": "S(1)"}}})json"
                                       : R"json({"parameter": {"2.weight": {"tp": "S(1)"}}})json",
                              plan.out()));
        ok(swv_module_distribute(both.sharded.module, mesh, plan, nullptr));
        Layout whole;
        Tensor plain_x;
        numbers(plain_x);
        ok(swv_layout_parse("[R]", whole.out()));
        ok(swv_tensor_distribute(plain_x, mesh, whole, nullptr, both.sharded.x.out()));
        swv_string *text = nullptr, *json = nullptr;
        if (std::string(what) == "memory") {
          ok(swv_module_memory(both.sharded.module, run, &both, &text, &json));
          EXPECT_THAT(text_of(json), HasSubstr("\"activations\""));
        } else if (std::string(what) == "communication") {
          ok(swv_module_list_communication(both.sharded.module, run, &both, &text, &json));
          EXPECT_THAT(text_of(json), HasSubstr("\"events\""));
        } else {
          swv_bool same = 0;
          ok(swv_module_verify(both.sharded.module, run, both.plain.module, run_reference, &both,
                               nullptr, &same, &text, &json));
          EXPECT_EQ(same, 1);
          EXPECT_THAT(text_of(json), HasSubstr("\"ok\":true"));
          EXPECT_EQ(both.plain.module, nullptr);
          EXPECT_TRUE(both.plain.still.expired());
        }
        swv_string_free(text);
        EXPECT_EQ(both.sharded.module, nullptr);
        EXPECT_TRUE(both.sharded.still.expired());
        swv_module_free(both.plain.module);
      });
    }
  }
}

// So may the module of a forward, between its begin and its end.
TEST(DebugTest, AForwardOutlivesItsModule) {
  on_mesh("tp=2", [](swv_mesh* mesh) {
    swv_module* module = nullptr;
    swv_forward* forward = nullptr;
    Plan plan;
    Tensor x, weight, in, out;
    ok(swv_module_create(&module));
    numbers(weight);  // [4, 5]
    ok(swv_module_add_parameter(module, "block.up.weight", weight));
    ok(swv_module_forward(module, "block", &forward));
    ok(swv_plan_from_json(
        R"json({"parameter": {"block.up.weight": {"tp": "S(0)"}},
                "forward": {"block.output": {"tp": "R"}}})json",
        plan.out()));
    ok(swv_module_distribute(module, mesh, plan, nullptr));
    const std::weak_ptr<torch::nn::Module> still = behind(module);
    Layout whole;
    Tensor plain_x;
    numbers(plain_x);
    ok(swv_layout_parse("[R]", whole.out()));
    ok(swv_tensor_distribute(plain_x, mesh, whole, nullptr, x.out()));
    Scope scope;
    const swv_tensor* const inputs[] = {x};
    ok(swv_forward_begin(forward, SWV_MODE_GRAD, inputs, 1, in.out(), scope.out()));
    swv_forward_free(forward);
    swv_module_free(module);
    EXPECT_TRUE(still.expired());
    const swv_value arguments[] = {swv_value_tensor(in), swv_value_tensor(weight)};
    swv_value y = SWV_NONE;
    Op linear;
    ok(swv_op_find("aten::linear", linear.out()));
    ok(swv_op_call(linear, SWV_MODE_GRAD, arguments, 2, &y, 1, nullptr));
    EXPECT_EQ(shardweave::layout_of(y.as.tensor->tensor).to_string(), "[S(1)]");
    const swv_tensor* const outputs[] = {y.as.tensor};
    ok(swv_forward_end(scope, outputs, 1, out.out()));
    EXPECT_EQ(shardweave::layout_of(out->tensor).to_string(), "[R]");
    swv_value_clear(&y);
  });
}

TEST(DebugTest, WhatHasNoValuesCannotBeVerified) {
  Module module, reference;
  Tensor x;
  {
    Scope scope;
    ok(swv_deferred_init(scope.out()));
    ok(swv_module_create_by_kind("Sequential", kMlp, module.out()));
  }
  ok(swv_module_create_by_kind("Sequential", kMlp, reference.out()));
  numbers(x);
  Models run = {module, reference, x};
  swv_bool same = 0;
  EXPECT_THAT(message_of(swv_module_verify(module, run_module, reference, run_reference, &run,
                                           nullptr, &same, nullptr, nullptr),
                         SWV_CODE_FAILED_PRECONDITION),
              HasSubstr("'0.weight' has no values yet"));
}

}  // namespace
