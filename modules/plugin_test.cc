// Plug-ins: what operators, modules and patches say of themselves gives values and gradients of one
// device, and what is wrong is said before anything changes.
#include "shardweave/modules/plugin.h"

#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/modules/sharding_plan_json.h"
#include "torch/csrc/autograd/custom_function.h"
#include "torch/library.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/batchnorm.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/pimpl.h"

namespace shardweave {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::on_mesh;
namespace nn = torch::nn;

// --- an operator of somebody's: plugin_test::scale(x, weight) = x * weight, with its own backward ---

at::Tensor scale_kernel(const at::Tensor& x, const at::Tensor& weight) {
  return x.mul(weight);
}
std::tuple<at::Tensor, at::Tensor> scale_backward_kernel(const at::Tensor& grad,
                                                         const at::Tensor& x,
                                                         const at::Tensor& weight) {
  return {grad.mul(weight), grad.mul(x).flatten(0, -2).sum(0)};
}

at::Tensor scale(const at::Tensor& x, const at::Tensor& weight) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("plugin_test::scale", "")
                             .typed<at::Tensor(const at::Tensor&, const at::Tensor&)>();
  return op.call(x, weight);
}

struct Scale : torch::autograd::Function<Scale> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& weight) {
    context->save_for_backward({x, weight});
    const at::AutoDispatchBelowADInplaceOrView guard;
    return scale(x, weight);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("plugin_test::scale_backward", "")
                               .typed<std::tuple<at::Tensor, at::Tensor>(
                                   const at::Tensor&, const at::Tensor&, const at::Tensor&)>();
    const auto saved = context->get_saved_variables();
    auto [x, weight] = op.call(grads[0], saved[0], saved[1]);
    return {x, weight};
  }
};
at::Tensor scale_autograd(const at::Tensor& x, const at::Tensor& weight) {
  return Scale::apply(x, weight);
}

Rule scale_rule() {
  return pointwise().shapes_like({"x"});
}
Rule scale_backward_rule() {
  return sharded([](const OpCall& call, Strategies& out) {
           const int last = call.input("x").ndim() - 1;
           for (int d = 0; d < last; ++d) {
             out.add({{"grad", Shard(d)}, {"x", Shard(d)}}, {Shard(d), Partial()});
           }
           out.add({{"grad", Shard(last)}, {"x", Shard(last)}, {"weight", Shard(0)}},
                   {Shard(last), Shard(0)});
           out.add_linear({{"grad"}});
         })
      .shapes_like({"x", "weight"});
}

// --- modules ---

struct PairImpl : nn::Module {
  PairImpl(int64_t dim, int64_t hidden)
      : up(register_module("up", nn::Linear(dim, hidden))),
        down(register_module("down", nn::Linear(hidden, dim))) {}
  at::Tensor forward(const at::Tensor& x) { return x + down(at::relu(up(x)) * 2); }
  nn::Linear up, down;
};
TORCH_MODULE(Pair);

// The same numbers, with all weights its own and the operator above.
struct FusedPairImpl : nn::Module {
  explicit FusedPairImpl(const PairImpl& pair)
      : up(register_parameter("up", pair.up->weight)),
        up_bias(register_parameter("up_bias", pair.up->bias)),
        down(register_parameter("down", pair.down->weight)),
        down_bias(register_parameter("down_bias", pair.down->bias)),
        twos(register_buffer("twos", at::full({pair.up->weight.size(0)}, 2.))) {}
  at::Tensor forward(const at::Tensor& x) {
    return x + at::linear(scale(at::relu(at::linear(x, up, up_bias)), twos), down, down_bias);
  }
  at::Tensor up, up_bias, down, down_bias, twos;
};
using FusedPair = nn::ModuleHolder<Hooked<FusedPairImpl>>;

// Meets its weight in nobody's operator but the one above.
struct ScalingImpl : nn::Module {
  explicit ScalingImpl(int64_t dim)
      : weight(register_parameter("weight", at::arange(1., dim + 1, at::kFloat) / dim)) {}
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = scale(x, weight);
    if (seen != nullptr && is_dtensor(y)) *seen = layout_of(y).to_string();
    return y;
  }
  at::Tensor weight;
  std::string* seen = nullptr;
};
TORCH_MODULE(Scaling);

struct HalfImpl : nn::Module {
  at::Tensor forward(const at::Tensor& x, double by) const { return x * by; }
};
using Half = nn::ModuleHolder<Hooked<HalfImpl>>;

constexpr int64_t kDim = 6;

struct ModelImpl : nn::Module {
  explicit ModelImpl(int64_t hidden = 7) {
    body = register_module("body", nn::Sequential(nn::Linear(kDim, kDim), Pair(kDim, hidden),
                                                  Scaling(kDim), Pair(kDim, hidden)));
    half = register_module("half", Half());
    int64_t i = 0;  // without a generator, which rank threads would share
    for (at::Tensor& p : parameters()) {
      const at::NoGradGuard guard;
      p.copy_(
          (at::arange(p.numel(), at::kDouble) * 0.7 + static_cast<double>(++i)).sin().view_as(p) *
          0.5);
    }
  }
  at::Tensor forward(const at::Tensor& x) { return half(body->forward(x), 0.5); }
  nn::Sequential body{nullptr};
  Half half{nullptr};
};
TORCH_MODULE(Model);

at::Tensor input() {
  return (at::arange(5 * kDim, at::kDouble) * 1.3).cos().to(at::kFloat).view({5, kDim});
}

ModuleSharding shard_pair(const FusedPairImpl& /*pair*/, const ShardingRequest& /*request*/) {
  return {.parameter = {{"up*", Shard(0)}, {"down", Shard(1)}, {"twos", Shard(0)}},
          .forward = {{"output", Replicate()}}};
}
FusedPair fuse(const PairImpl& pair, const PatchRequest& /*request*/) {
  return FusedPair(pair);
}

Plugins all_plugins() {
  return Plugins()
      .rule("plugin_test::scale", scale_rule())
      .rule("plugin_test::scale_backward", scale_backward_rule())
      .shards<FusedPairImpl>(shard_pair)
      .patch<PairImpl>(fuse);
}

const ShardingPlan kPlan = {.module = {{"body.{1,3}", {{"tp"}}}}};

TEST(PluginsTest, ValuesAndGradientsAreThoseOfOneDevice) {
  Model alone;
  const at::Tensor expected = alone->forward(input());
  expected.square().sum().backward();
  // By the names that the fused modules have.
  const auto grad_of = [&](const std::string& name) {
    const auto parameters = alone->named_parameters();
    for (const auto& [old_name, new_name] : {std::pair<std::string, std::string>{"up.weight", "up"},
                                             {"up.bias", "up_bias"},
                                             {"down.weight", "down"},
                                             {"down.bias", "down_bias"}}) {
      for (const std::string fqn : {"body.1.", "body.3."}) {
        if (name == fqn + new_name) return parameters[fqn + old_name].grad();
      }
    }
    return parameters[name].grad();
  };
  for (const std::vector<MeshDim>& dims :
       {std::vector<MeshDim>{{"tp", 2}}, {{"tp", 3}}, {{"dp", 2}, {"tp", 2}}, {{"tp", 4}}}) {
    const Plugins plugins = all_plugins();
    on_mesh(dims, [&](const MeshPtr& mesh) {
      Model model;
      parallelize_module(*model, mesh, kPlan, plugins, {.source = std::nullopt});
      EXPECT_EQ(model->body[1]->name(), FusedPair(PairImpl(2, 2))->name());
      EXPECT_EQ(layout_of(model->named_parameters()["body.1.up"]).to_string(),
                dims.size() == 1 ? "[S(0)]" : "[R, S(0)]");
      NamedPlacements rows;
      if (dims.size() == 2) rows.emplace_back("dp", Shard(0));
      const at::Tensor x = distribute_tensor(input(), mesh, rows, {.source = std::nullopt});
      const at::Tensor y = model->forward(x);
      y.square().sum().backward();
      finish_grad_sync(*model);
      EXPECT_TRUE(at::allclose(full_tensor(y.detach()), expected, 1e-5, 1e-6));
      size_t count = 0;
      for (const auto& p : model->named_parameters()) {
        EXPECT_TRUE(at::allclose(full_tensor(p.value().grad()), grad_of(p.key()), 1e-4, 1e-5))
            << p.key();
        ++count;
      }
      EXPECT_EQ(count, alone->named_parameters().size());
      EXPECT_EQ(dispatch_counters(mesh).gathered_operators, 0);
    });
  }
}

TEST(PluginsTest, AModuleIsAskedOncePerMeshDimensionThatThePlanNames) {
  on_mesh({{"dp", 2}, {"tp", 2}}, [&](const MeshPtr& mesh) {
    std::vector<std::string> asked;
    const Plugins plugins = Plugins().shards<nn::LinearImpl>(
        [&](const nn::LinearImpl& linear, const ShardingRequest& request) {
          asked.push_back(request.fqn + " " + request.mesh.dims()[request.mesh_dim].name + " " +
                          request.style + " " + std::to_string(linear.weight.size(0)));
          const bool rows = request.style == "rows";
          return ModuleSharding{.parameter = {{"weight", Shard(rows ? 1 : 0)}}, .forward = {}};
        });
    const auto plan =
        parse_sharding_plan(R"json({"module": {"0": {"tp": "rows", "dp": ""}, "1": "tp"}})json");
    nn::Sequential model(nn::Linear(4, 6), nn::Linear(6, 8));
    const ResolvedPlan resolved = resolve_sharding_plan(*model, mesh->mesh(), *plan, plugins);
    EXPECT_THAT(asked, ::testing::ElementsAre("0 tp rows 6", "0 dp  6", "1 tp  8"));
    EXPECT_EQ(resolved.tensors[0].layout.to_string(), "[S(0), S(1)]");
    EXPECT_EQ(resolved.tensors[0].pattern, "0.weight");
    EXPECT_EQ(resolved.tensors[1].layout.to_string(), "[R, R]");
    EXPECT_EQ(resolved.tensors[2].layout.to_string(), "[R, S(0)]");
  });
}

// The operator has a rule of a plug-in's, and with it is a layer's: inputs and outputs of the module
// whose weight it takes are met there.
TEST(PluginsTest, AnOperatorWithARuleIsALayers) {
  const Plugins plugins =
      Plugins()
          .rule("plugin_test::scale", scale_rule())
          .rule("plugin_test::scale_backward", scale_backward_rule())
          .shards<ScalingImpl>([](const ScalingImpl&, const ShardingRequest&) {
            return ModuleSharding{.parameter = {{"weight", Shard(0)}},
                                  .forward = {{"input", Shard(1)}, {"output", Shard(0)}}};
          });
  on_mesh({{"tp", 2}}, [&](const MeshPtr& mesh) {
    Scaling model(kDim);
    std::string seen;
    model->seen = &seen;
    parallelize_module(*model, mesh, {.module = {{"", {{"tp"}}}}}, plugins,
                       {.source = std::nullopt});
    const at::Tensor x = distribute_tensor(input(), mesh, {Replicate()}, {.source = std::nullopt});
    const at::Tensor y = model->forward(x);
    EXPECT_EQ(seen, "[S(0)]");
    EXPECT_TRUE(at::allclose(full_tensor(y.detach()), Scaling(kDim)->forward(input())));
    y.sum().backward();
    EXPECT_TRUE(at::allclose(full_tensor(model->weight.grad()), input().sum(0)));
  });
}

TEST(PluginsTest, AForwardIsWrapped) {
  int calls = 0;  // of one rank
  const Plugins plugins = Plugins().patch_forward<HalfImpl>(
      [&](HalfImpl& /*half*/, const auto& forward, const at::Tensor& x, double by) {
        if (layout_of(x).placements() == Placements{Shard(0)}) ++calls;  // behind the plan's input
        return forward(x, by * 4);
      });
  on_mesh({{"tp", 1}}, [&](const MeshPtr& mesh) {
    Model model;
    parallelize_module(*model, mesh, {.forward = {{"half.input", {{"tp", Shard(0)}}}}}, plugins);
    const at::Tensor x = distribute_tensor(input(), mesh, {Replicate()});
    EXPECT_TRUE(at::allclose(full_tensor(model->forward(x).detach()), Model()->forward(input()) * 4,
                             1e-5, 1e-6));
    EXPECT_EQ(calls, 1);
  });
}

// Patterns within the answer of a plug-in are its own: the most specific counts, and what the plan says
// of the same tensors by patterns, however many characters they have, does not.
TEST(PluginsTest, PatternsOfAnswersStandForNames) {
  const DeviceMesh mesh = *DeviceMesh::create({{"tp", 2}});
  struct Layers : nn::Module {
    Layers() {
      for (const char* name : {"w0", "w1", "other"}) {
        register_module(name, nn::Linear(nn::LinearOptions(4, 6).bias(false)));
      }
    }
    at::Tensor forward(const at::Tensor& x) { return x; }
  };
  nn::Module root;
  root.register_module("experts", std::make_shared<Layers>());
  root.register_module("expert", nn::Linear(nn::LinearOptions(4, 6).bias(false)));
  const auto answering = [](ModuleSharding sharding) {
    return Plugins().shards<Layers>(
        [sharding](const Layers&, const ShardingRequest&) { return sharding; });
  };
  const ShardingPlan plan = {
      .parameter = {{"{expert,experts.w0,experts.w1}.weight", {{"tp", Shard(1)}}}},
      .module = {{"experts", {{"tp"}}}}};
  const ResolvedPlan resolved = resolve_sharding_plan(
      root, mesh, plan,
      answering({.parameter = {{"*", Replicate()},
                               {"re:w[0-9].weight", Shard(0)},
                               {"w1.weight", Shard(1)}},
                 .forward = {{"w?.output", Replicate()}, {"re:w[0-9].input", Shard(1)}}}));
  std::string said;
  for (const ResolvedTensor& t : resolved.tensors) said += t.layout.to_string() + " ";
  EXPECT_EQ(said, "[R] [S(1)] [R] [S(1)] ");  // a glob is more specific than an expression
  said.clear();
  for (const ResolvedForward& f : resolved.forward) said += f.module + "." + f.value + " ";
  EXPECT_EQ(said, "experts.w0.input.0 experts.w0.output.0 experts.w1.input.0 experts.w1.output.0 ");
  const auto refused = [&](ModuleSharding sharding, const char* why) {
    try {
      resolve_sharding_plan(root, mesh, plan, answering(std::move(sharding)));
      ADD_FAILURE() << why;
    } catch (const Error& error) {
      EXPECT_THAT(std::string(error.status().message()), HasSubstr(why));
    }
  };
  refused({.parameter = {{"w?.weight", Shard(0)}, {"?0.weight", Shard(1)}}, .forward = {}},
          "gives 'w0.weight' two placements");
  refused({.parameter = {}, .forward = {{"v*.output", Shard(0)}}}, "and has no module 'v*'");
}

// A replacement on parts of the old module leaves their modes, also where it is taken back.
struct NormedImpl : nn::Module {
  explicit NormedImpl(nn::BatchNorm1d given) : norm(register_module("norm", std::move(given))) {}
  at::Tensor forward(const at::Tensor& x) { return norm(x); }
  nn::BatchNorm1d norm;
};
struct FusedNormedImpl : NormedImpl {
  using NormedImpl::NormedImpl;
  at::Tensor forward(const at::Tensor& x) { return norm(x); }
};

TEST(PluginsTest, APatchKeepsTheModesOfWhatItTakesOver) {
  const Plugins plugins = Plugins().patch<NormedImpl>([](NormedImpl& old, const PatchRequest&) {
    return std::make_shared<FusedNormedImpl>(old.norm);
  });
  nn::BatchNorm1d norm(4);
  nn::Sequential model(std::make_shared<NormedImpl>(norm));
  norm->eval();
  resolve_sharding_plan(*model, *DeviceMesh::create({{"tp", 1}}), {}, plugins);
  EXPECT_FALSE(norm->is_training());
  on_mesh({{"tp", 1}}, [&](const MeshPtr& mesh) {
    parallelize_module(*model, mesh, {}, plugins);
    EXPECT_FALSE(norm->is_training());
    EXPECT_TRUE(model[0]->is_training());
  });
}

// Ranks whose plug-ins differ would decide operators otherwise.
TEST(PluginsTest, RanksHaveTheSame) {
  for (const bool rules : {true, false}) {
    on_mesh({{"tp", 2}}, [&](const MeshPtr& mesh) {
      const bool first = mesh->coordinate()[0] == 0;
      Plugins plugins;
      if (rules && first) plugins.rule("plugin_test::scale", scale_rule());
      if (!rules) {
        plugins.patch<PairImpl>([&](PairImpl& pair, const PatchRequest&) -> Pair {
          return first ? Pair(std::make_shared<PairImpl>(pair)) : Pair(nullptr);
        });
      }
      Model model;
      try {
        parallelize_module(*model, mesh, {}, plugins, {.source = std::nullopt});
        ADD_FAILURE() << "no error";
      } catch (const Error& error) {
        EXPECT_THAT(std::string(error.status().message()), HasSubstr("plug-ins"));
      }
      for (const at::Tensor& p : model->parameters()) EXPECT_FALSE(is_dtensor(p));
    });
  }
}

// A module of two results.
struct SplitImpl : nn::Module {
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x, at::Tensor y) {
    return {x + 1, y + 2};
  }
};

TEST(PatchForwardsTest, RunsInPlaceOfWhatIsThere) {
  nn::Module root;
  const auto split = std::make_shared<Hooked<SplitImpl>>();
  root.register_module("a", split);
  root.register_module("b", split);
  std::string seen;
  const auto noting = [&](std::string word) {
    return [&seen, word](const PatchedCall& call) {
      seen += word + call.fqn + " ";
      EXPECT_EQ(call.num_results, 2u);
      EXPECT_NE(dynamic_cast<SplitImpl*>(&call.module), nullptr);
      std::vector<at::Tensor> results = call.forward({call.inputs[1], call.inputs[0]});
      return std::vector{results[1], results[0] * 10};
    };
  };
  const at::Tensor x = at::ones({2}), y = at::zeros({2});
  const auto run = [&](Hooked<SplitImpl>& m) {
    const auto [first, second] = m.forward(x, y);
    return std::pair(first[0].item<float>(), second[0].item<float>());
  };
  EXPECT_EQ(run(*split), std::pair(2.f, 2.f));
  patch_forwards(root, "?", noting("in "));
  EXPECT_EQ(run(*split), std::pair(3.f, 10.f));  // y + 1 and x + 2, changed over
  patch_forwards(root, "b", noting("out "));
  seen.clear();
  EXPECT_EQ(run(*split), std::pair(20.f, 20.f));
  EXPECT_EQ(seen, "out b in a ");  // once, by its first name
  // A copy has the patches, and is what they are called with.
  const auto copy = std::make_shared<Hooked<SplitImpl>>(*split);
  EXPECT_EQ(run(*copy), std::pair(20.f, 20.f));
}

// A patch by names and one by a type, in either order: both run, that by names around the other.
TEST(PatchForwardsTest, BeforeAndAfterAPlugIn) {
  const Plugins plugins = Plugins().patch_forward<SplitImpl>(
      [](SplitImpl& /*split*/, const auto& forward, const at::Tensor& x, const at::Tensor& y) {
        return forward(x * 10, y);
      });
  on_mesh({{"tp", 1}}, [&](const MeshPtr& mesh) {
    for (const bool plugin_first : {true, false}) {
      nn::Module root;
      const auto split = std::make_shared<Hooked<SplitImpl>>();
      root.register_module("a", split);
      const auto by_name = [&] {
        patch_forwards(root, "a", [](const PatchedCall& call) {
          std::vector<at::Tensor> results = call.forward({call.inputs[0] + 1, call.inputs[1]});
          return std::vector{results[0] * 3, results[1]};
        });
      };
      if (!plugin_first) by_name();
      parallelize_module(root, mesh, {}, plugins);
      if (plugin_first) by_name();
      const auto [first, second] = split->forward(at::ones({2}), at::zeros({2}));
      EXPECT_EQ(first[0].item<float>(), 63);  // ((1 + 1) * 10 + 1) * 3
      EXPECT_EQ(second[0].item<float>(), 2);
    }
  });
}

TEST(PatchForwardsTest, OneThatCallsItselfIsToldSo) {
  nn::Module root;
  const auto split = std::make_shared<Hooked<SplitImpl>>();
  root.register_module("a", split);
  bool again = true;
  patch_forwards(root, "a", [&](const PatchedCall& call) {
    if (!again) return call.forward(call.inputs);
    const auto [first, second] =
        dynamic_cast<Hooked<SplitImpl>&>(call.module).forward(call.inputs[0], call.inputs[1]);
    return std::vector{first, second};
  });
  const at::Tensor x = at::ones({2});
  for (int twice = 0; twice < 2; ++twice) {
    try {
      split->forward(x, x);
      ADD_FAILURE() << "it comes back";
    } catch (const Error& error) {
      EXPECT_EQ(error.status().code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_THAT(std::string(error.status().message()),
                  HasSubstr("the patch of the forward of 'a' calls that forward again"));
    }
  }
  again = false;
  EXPECT_EQ(std::get<0>(split->forward(x, x))[0].item<float>(), 2.f);
}

TEST(PatchForwardsTest, WhatCannotBeIsRefused) {
  Model model;
  const auto run = [](const PatchedCall& call) { return call.forward(call.inputs); };
  const auto refused = [&](const char* pattern, PatchedRun with, absl::StatusCode code,
                           const char* why) {
    try {
      patch_forwards(*model, pattern, std::move(with));
      ADD_FAILURE() << why;
    } catch (const Error& error) {
      EXPECT_EQ(error.status().code(), code) << error.what();
      EXPECT_THAT(std::string(error.status().message()), HasSubstr(why));
    }
  };
  refused("half", nullptr, absl::StatusCode::kInvalidArgument, "the patch is empty");
  refused("re:(", run, absl::StatusCode::kInvalidArgument, "pattern 're:('");
  refused("hafl", run, absl::StatusCode::kNotFound,
          "no module is called 'hafl'; did you mean 'half'");
  refused("1", run, absl::StatusCode::kNotFound, "did you mean 'body.1'");
  refused("half", run, absl::StatusCode::kFailedPrecondition, "something else than tensors");
  refused("half", run, absl::StatusCode::kFailedPrecondition, "; nothing here can be patched");
  refused("*", run, absl::StatusCode::kFailedPrecondition, "the forward of the model itself");
  refused("body.1", run, absl::StatusCode::kFailedPrecondition, "make it as Hooked<Impl>");
  for (const char* name : {"a", "b", "c", "d", "e", "f"}) {
    model->register_module(name, std::make_shared<Hooked<SplitImpl>>());
  }
  refused("body.1", run, absl::StatusCode::kFailedPrecondition,
          "; here 'a', 'b', 'c', 'd' and 2 more can be patched");

  const auto split = std::make_shared<Hooked<SplitImpl>>();
  const at::Tensor x = at::ones({2});
  const auto fails = [&](PatchedRun with, const char* why) {
    auto copy = std::make_shared<Hooked<SplitImpl>>(*split);
    patch_forwards(*copy, "", std::move(with));
    try {
      copy->forward(x, x);
      ADD_FAILURE() << why;
    } catch (const Error& error) {
      EXPECT_THAT(std::string(error.status().message()), HasSubstr(why));
    }
  };
  fails([&](const PatchedCall& call) { return call.forward({x}); }, "with 1 inputs; wanted 2");
  fails([&](const PatchedCall&) { return std::vector{x}; }, "gave 1 results; wanted 2");
  fails([&](const PatchedCall&) { return std::vector{x, at::Tensor()}; }, "an undefined result");
}

TEST(PluginsTest, ATypeIsTheNearest) {
  struct BaseImpl : nn::Module {
    at::Tensor forward(const at::Tensor& x) { return x; }
  };
  struct DerivedImpl : BaseImpl {};
  struct OtherImpl : DerivedImpl {};
  std::string said;
  const auto says = [&](const char* what) {
    return [&said, what](const nn::Module&, const ShardingRequest&) {
      said += what;
      return ModuleSharding();
    };
  };
  const Plugins plugins =
      Plugins().shards<BaseImpl>(says("base")).shards<DerivedImpl>(says(" derived"));
  const DeviceMesh mesh = *DeviceMesh::create({{"tp", 2}});
  const ShardingPlan plan = {.module = {{"*a", {{"tp"}}}}};
  nn::Module root;
  root.register_module("a", std::make_shared<BaseImpl>());
  root.register_module("ba", std::make_shared<Hooked<BaseImpl>>());
  root.register_module("ca", std::make_shared<DerivedImpl>());
  resolve_sharding_plan(root, mesh, plan, plugins);
  EXPECT_EQ(said, "basebase derived");
  root.register_module("da", std::make_shared<OtherImpl>());
  try {
    resolve_sharding_plan(root, mesh, plan, plugins);
    ADD_FAILURE() << "of two types";
  } catch (const Error& error) {
    EXPECT_THAT(std::string(error.status().message()),
                AllOf(HasSubstr("'da' ("), HasSubstr("is of two types with a plug-in")));
  }
}

TEST(PluginsTest, ResolvingLeavesTheModelAsItWas) {
  const DeviceMesh mesh = *DeviceMesh::create({{"tp", 2}});
  Model model;
  const auto before = model->body[1];
  const ResolvedPlan resolved = resolve_sharding_plan(*model, mesh, kPlan, all_plugins());
  EXPECT_THAT(to_string(resolved), HasSubstr("body.1.up_bias"));
  EXPECT_EQ(model->body[1], before);
  EXPECT_EQ(model->body->children()[1], before);
  EXPECT_TRUE(at::equal(model->forward(input()), Model()->forward(input())));
}

// One module under two names is replaced where each calls it, by one module, and taken back in both.
TEST(PluginsTest, AModuleThatStandsTwiceIsReplacedTwice) {
  const auto make = [] {
    Model model;
    const auto first = std::dynamic_pointer_cast<PairImpl>(model->body[1]);
    const auto between = std::dynamic_pointer_cast<ScalingImpl>(model->body[2]);
    nn::Sequential twice;
    twice->push_back("first", first);
    twice->push_back("between", between);
    twice->push_back("again", first);
    return twice;
  };
  nn::Sequential alone = make();
  const at::Tensor expected = alone->forward(input());
  expected.square().sum().backward();
  const auto plugins = [](int& made) {
    return Plugins()
        .rule("plugin_test::scale", scale_rule())
        .rule("plugin_test::scale_backward", scale_backward_rule())
        .patch<PairImpl>([&made](const PairImpl& pair, const PatchRequest&) {
          ++made;
          return FusedPair(pair);
        });
  };
  const ShardingPlan plan = {.parameter = {{"first.up*", {{"tp", Shard(0)}}},
                                           {"first.down", {{"tp", Shard(1)}}},
                                           {"first.twos", {{"tp", Shard(0)}}}}};
  {
    nn::Sequential model = make();
    const auto before = model[0];
    int made = 0;
    resolve_sharding_plan(*model, *DeviceMesh::create({{"tp", 2}}), plan, plugins(made));
    EXPECT_EQ(made, 1);
    for (const size_t i : {0, 2}) {
      EXPECT_EQ(model[i], before) << i;
      EXPECT_EQ(model->children()[i], before) << i;
    }
    EXPECT_TRUE(at::equal(model->forward(input()), expected));
  }
  for (const std::vector<MeshDim>& dims : {std::vector<MeshDim>{{"tp", 2}}, {{"tp", 3}}}) {
    on_mesh(dims, [&](const MeshPtr& mesh) {
      nn::Sequential model = make();
      const auto before = model[0];
      int made = 0;
      parallelize_module(*model, mesh, plan, plugins(made), {.source = std::nullopt});
      EXPECT_EQ(made, 1);
      EXPECT_NE(model[0], before);
      EXPECT_EQ(model[2], model[0]);  // what runs
      EXPECT_EQ(model->children()[0], model[0]);
      EXPECT_EQ(model->children()[2], model[0]);  // what has names
      const at::Tensor y =
          model->forward(distribute_tensor(input(), mesh, {Replicate()}, {.source = std::nullopt}));
      EXPECT_TRUE(at::allclose(full_tensor(y.detach()), expected.detach(), 1e-5, 1e-6));
      y.square().sum().backward();
      finish_grad_sync(*model);
      const auto parameters = model->named_parameters();
      EXPECT_TRUE(at::allclose(full_tensor(parameters["first.up"].grad()),
                               alone->named_parameters()["first.up.weight"].grad(), 1e-4, 1e-5));
      EXPECT_TRUE(at::allclose(full_tensor(parameters["first.down"].grad()),
                               alone->named_parameters()["first.down.weight"].grad(), 1e-4, 1e-5));
    });
  }
}

TEST(PluginsTest, OneValueForSeveralModelsOfAMesh) {
  const Plugins plugins = all_plugins();
  on_mesh({{"tp", 2}}, [&](const MeshPtr& mesh) {
    Model first, second, third;
    parallelize_module(*first, mesh, kPlan, plugins, {.source = std::nullopt});
    parallelize_module(*second, mesh, kPlan, plugins, {.source = std::nullopt});
    const auto before = third->body[1];
    try {
      parallelize_module(*third, mesh, kPlan, all_plugins(), {.source = std::nullopt});
      ADD_FAILURE() << "another rule";
    } catch (const Error& error) {
      EXPECT_EQ(error.status().code(), absl::StatusCode::kAlreadyExists);
      EXPECT_THAT(std::string(error.status().message()),
                  HasSubstr("'plugin_test::scale' has another rule on this mesh already"));
    }
    EXPECT_EQ(third->body[1], before);
    EXPECT_FALSE(is_dtensor(third->parameters()[0]));
  });
}

TEST(PluginsTest, APatchIsTakenBackWhenThePlanIsWrong) {
  on_mesh({{"tp", 2}}, [&](const MeshPtr& mesh) {
    Model model;
    const auto before = model->body[1];
    ShardingPlan plan = kPlan;
    plan.parameter = {{"nothing", {{"tp", Shard(0)}}}};
    int calls = 0;
    const Plugins plugins = all_plugins().patch_forward<HalfImpl>(
        [&](HalfImpl&, const auto& forward, const at::Tensor& x, double by) {
          ++calls;
          return forward(x, by);
        });
    EXPECT_THROW(parallelize_module(*model, mesh, plan, plugins, {.source = std::nullopt}), Error);
    EXPECT_EQ(model->body[1], before);
    EXPECT_TRUE(at::equal(model->forward(input()), Model()->forward(input())));
    EXPECT_EQ(calls, 0);
    // And the mesh has no rule of theirs.
    parallelize_module(*model, mesh, kPlan, plugins, {.source = std::nullopt});
    model->forward(distribute_tensor(input(), mesh, {Replicate()}, {.source = std::nullopt}));
    EXPECT_EQ(calls, 1);
  });
}

struct HolderImpl : nn::Module {
  HolderImpl() : pair(register_module("pair", Pair(kDim, 3))) {}
  at::Tensor forward(const at::Tensor& x) { return pair(x); }
  Pair pair;
};

TEST(PluginsTest, SaysWhatIsWrong) {
  using Code = absl::StatusCode;
  struct Case {
    ShardingPlan plan;
    Plugins plugins;
    Code code;
    std::string message;
  };
  const auto answering = [](ModuleSharding sharding) {
    return all_plugins().shards<ScalingImpl>(
        [sharding](const ScalingImpl&, const ShardingRequest&) { return sharding; });
  };
  const ShardingPlan scaling = {.module = {{"body.2", {{"tp"}}}}};
  ShardingPlan twice = scaling;
  twice.parameter = {{"body.2.weight", {{"tp", Replicate()}}}};
  const std::vector<Case> cases = {
      {kPlan, Plugins(), Code::kNotFound,
       "no plug-in says how 'body.1' (shardweave::(anonymous namespace)::PairImpl) shards; there "
       "are none"},
      {{.module = {{"body.0", {{"tp"}}}}},
       all_plugins(),
       Code::kNotFound,
       "the plan's module entry 1, 'body.0': no plug-in says how 'body.0' (torch::nn::LinearImpl) "
       "shards; there are those of shardweave::(anonymous namespace)::FusedPairImpl"},
      {{.module = {{"bodi.1", {{"tp"}}}}},
       all_plugins(),
       Code::kNotFound,
       "'bodi.1' matches no module; did you mean 'body.1'"},
      {{.module = {{"body.1", {{"pp"}}}}}, all_plugins(), Code::kNotFound, "no dimension \"pp\""},
      {{.module = {{"body.1", {{"tp"}, {"tp"}}}}},
       all_plugins(),
       Code::kInvalidArgument,
       "names 'tp' twice"},
      {{.module = {{"body.1", {}}}},
       all_plugins(),
       Code::kInvalidArgument,
       "names no mesh dimension"},
      {{.module = {{"{body", {{"tp"}}}}}, all_plugins(), Code::kInvalidArgument, "has a '{'"},
      {{.module = {{"body.1", {{"tp"}}}, {"body.1", {{"tp", "x"}}}}},
       all_plugins(),
       Code::kInvalidArgument,
       "which are equally specific and differ"},
      {{.module = {{"body.1", {{"tp"}}}, {"body.?", {{"tp"}}}, {"body.{1,1}", {{"tp"}}}}},
       all_plugins(),
       Code::kNotFound,
       "no plug-in says how 'body.0'"},
      {{.module = {{"body.1", {{"tp"}}}, {"?ody.1", {{"tp"}}}}},
       all_plugins(),
       Code::kInvalidArgument,
       "decides nothing"},
      {scaling, answering({.parameter = {{"wait", Shard(0)}}}), Code::kInvalidArgument,
       "asked for 'body.2' (shardweave::(anonymous namespace)::ScalingImpl), names a parameter "
       "'wait', which it does not have; it has weight"},
      {scaling, answering({.parameter = {{"{w", Shard(0)}}}), Code::kInvalidArgument, "'{w'"},
      {scaling, answering({.parameter = {{"weight", Shard(0)}, {"weight", Replicate()}}}),
       Code::kInvalidArgument, "gives 'weight' two placements, S(0) by 'weight' and R by 'weight'"},
      {scaling, answering({.parameter = {{"weight", Shard(3)}}}), Code::kInvalidArgument,
       "what plug-ins say of the plan's modules"},
      {scaling, answering({.forward = {{"puts", Shard(0)}}}), Code::kInvalidArgument,
       "does not say which value"},
      {twice, answering({.parameter = {{"weight", Shard(0)}}}), Code::kInvalidArgument,
       "equally specific"},
      {{},
       Plugins().rule("plugin_test::sale", scale_rule()),
       Code::kNotFound,
       "'plugin_test::sale': LibTorch knows no such operator; wanted one that TORCH_LIBRARY has "
       "registered, as plugin_test::scale, plugin_test::scale_backward"},
      {{},
       Plugins().patch<nn::BilinearImpl>(
           [](nn::BilinearImpl&, const PatchRequest&) { return nn::Bilinear(2, 2, 2); }),
       Code::kNotFound,
       "the patch of torch::nn::BilinearImpl: the model has no such module"},
      {{},
       Plugins().patch<HalfImpl>([](HalfImpl&, const PatchRequest&) { return Half(); }),
       Code::kFailedPrecondition,
       "'half' ("},
      {{},
       Plugins().patch<ModelImpl>([](ModelImpl&, const PatchRequest&) { return Model(); }),
       Code::kFailedPrecondition,
       "cannot be replaced, for the caller holds it"},
      {{},
       Plugins().patch_forward<PairImpl>(
           [](PairImpl&, const auto& forward, const at::Tensor& x) { return forward(x); }),
       Code::kFailedPrecondition,
       "is not Hooked"},
  };
  for (const Case& c : cases) {
    on_mesh({{"tp", 2}}, [&](const MeshPtr& mesh) {
      Model model;
      const std::vector<std::shared_ptr<nn::Module>> before = model->modules();
      try {
        parallelize_module(*model, mesh, c.plan, c.plugins, {.source = std::nullopt});
        ADD_FAILURE() << "no error; wanted " << c.message;
      } catch (const Error& error) {
        EXPECT_EQ(error.status().code(), c.code) << error.status();
        EXPECT_THAT(std::string(error.status().message()), HasSubstr(c.message));
      }
      EXPECT_EQ(model->modules(), before);
      for (const at::Tensor& p : model->parameters()) EXPECT_FALSE(is_dtensor(p));
    });
  }
  const DeviceMesh mesh = *DeviceMesh::create({{"tp", 2}});
  HolderImpl holder;
  try {
    resolve_sharding_plan(holder, mesh, {}, Plugins().patch<PairImpl>(fuse));
    ADD_FAILURE() << "a member of its own";
  } catch (const Error& error) {
    EXPECT_THAT(std::string(error.status().message()),
                AllOf(HasSubstr("'pair' (shardweave::(anonymous namespace)::PairImpl) cannot be "
                                "replaced, for shardweave::(anonymous namespace)::HolderImpl calls "
                                "it as the type that it is"),
                      HasSubstr("hold it in a Sequential")));
  }
}

TEST(PluginsTest, TwoForOneTypeAreAnError) {
  Plugins plugins = all_plugins();
  const auto throws = [&](const std::function<void()>& f, const char* message) {
    try {
      f();
      ADD_FAILURE() << "no error; wanted " << message;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr(message));
    }
  };
  throws([&] { plugins.shards<FusedPairImpl>(shard_pair); },
         "there is a plug-in that shards shardweave::(anonymous namespace)::FusedPairImpl already");
  throws([&] { plugins.patch<PairImpl>(fuse); }, "there is a patch of shardweave::");
  throws([&] { plugins.rule("plugin_test::scale", scale_rule()); },
         "there is a rule of plugin_test::scale already");
  throws([&] { plugins.rule("scale", scale_rule()); }, "'scale' is no operator's name");
}

// What a patch does not want to replace stays; one that holds what it replaces may call it.
struct AroundImpl : nn::Module {
  explicit AroundImpl(std::shared_ptr<PairImpl> inner_in)
      : inner(register_module("inner", std::move(inner_in))) {}
  at::Tensor forward(const at::Tensor& x) { return inner->forward(x) - 1; }
  std::shared_ptr<PairImpl> inner;
};

TEST(PluginsTest, APatchMayWrapOrLeave) {
  on_mesh({{"tp", 2}}, [&](const MeshPtr& mesh) {
    nn::Sequential model{Pair(kDim, 5), Pair(kDim, 5)};
    model->eval();
    const at::Tensor expected = model->forward(input());
    const Plugins plugins = Plugins().patch<PairImpl>(
        [&](PairImpl& pair, const PatchRequest& request) -> std::shared_ptr<AroundImpl> {
          if (request.fqn != "1") return nullptr;
          return std::make_shared<AroundImpl>(
              std::dynamic_pointer_cast<PairImpl>(pair.shared_from_this()));
        });
    parallelize_module(*model, mesh, {.parameter = {{"1.inner.up.*", {{"tp", Shard(0)}}}}},
                       plugins);
    EXPECT_FALSE(model[1]->is_training());
    const at::Tensor first =
        full_tensor(model->forward(distribute_tensor(input(), mesh, {Replicate()})).detach());
    if (mesh->coordinate()[0] == 0) {  // whose values were taken
      EXPECT_TRUE(at::allclose(first, expected.detach() - 1, 1e-5, 1e-6));
    }
  });
}

TORCH_LIBRARY(plugin_test, m) {
  m.def("scale(Tensor x, Tensor weight) -> Tensor");
  m.def("scale_backward(Tensor grad, Tensor x, Tensor weight) -> (Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(plugin_test, CPU, m) {
  m.impl("scale", scale_kernel);
  m.impl("scale_backward", scale_backward_kernel);
}
TORCH_LIBRARY_IMPL(plugin_test, Autograd, m) {
  m.impl("scale", scale_autograd);
}

}  // namespace
}  // namespace shardweave
