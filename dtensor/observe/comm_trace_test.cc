// What CommTrace records, under which names, and that it misses nothing.

#include "shardweave/dtensor/observe/comm_trace.h"

#include <set>
#include <source_location>
#include <string>
#include <string_view>

#include "ATen/ATen.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/testing/expect_comms.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/linear.h"

namespace shardweave {
namespace {

using testing::all_gather;
using testing::all_reduce;
using ::testing::Contains;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using testing::on_mesh;
using testing::scattered;

constexpr DistributeOptions kNothingSent = {.source = std::nullopt};

std::vector<MeshDim> dims_of(const std::vector<int64_t>& sizes) {
  constexpr const char* kNames[] = {"dp", "tp", "ep"};
  std::vector<MeshDim> dims;
  for (size_t i = 0; i < sizes.size(); ++i) {
    dims.push_back({sizes.size() == 1 ? "tp" : kNames[i], sizes[i]});
  }
  return dims;
}

const std::vector<std::vector<int64_t>> kMeshes = {{2}, {3}, {4}, {2, 2}, {2, 2, 2}};

at::Tensor numbers(at::IntArrayRef sizes) {
  int64_t n = 1;
  for (int64_t s : sizes) n *= s;
  return at::arange(n, at::kDouble).view(sizes).div(static_cast<double>(n)).sub(0.4);
}

// The usual MLP of tensor parallelism: cut by outputs, then by inputs.
struct MlpImpl : torch::nn::Module {
  torch::nn::Linear up = register_module("up", torch::nn::Linear(6, 13));
  torch::nn::Linear down = register_module("down", torch::nn::Linear(13, 6));
  at::Tensor forward(const at::Tensor& x) {
    const ModuleScope scope(x, "block.mlp");
    return down(at::relu(up(x)));
  }
};
TORCH_MODULE(Mlp);

Mlp make_mlp(const MeshPtr& mesh) {
  Mlp mlp;
  mlp->to(at::kDouble);
  {
    const c10::AutoGradMode no_grad(false);
    for (at::Tensor p : mlp->parameters()) p.copy_(numbers(p.sizes()));
  }
  distribute_module(*mlp, mesh, {{"up.*", {{"tp", Shard(0)}}}, {"down.weight", {{"tp", Shard(1)}}}},
                    kNothingSent);
  return mlp;
}

at::Tensor block(Mlp& mlp, const at::Tensor& input) {
  const ModuleScope scope(input, "block");
  const at::Tensor x = input.relu();
  return (x + mlp(x)).relu();
}

// --- what is recorded ----------------------------------------------------------------------------

TEST(CommTraceTest, ColumnThenRowParallelMlpNeedsOneAllReduceEachWay) {
  for (const auto& sizes : kMeshes) {
    on_mesh(dims_of(sizes), [&](const MeshPtr& mesh) {
      Mlp mlp = make_mlp(mesh);
      at::Tensor x = distribute_tensor(numbers({5, 6}), mesh, NamedPlacements{}, kNothingSent);
      x.requires_grad_();
      const int64_t k = mesh->mesh().size(*mesh->mesh().dim("tp"));
      const int64_t bytes =
          2 * (30 - 30 / k) * 8;  // of [5, 6] doubles, to the other ranks and back
      CommTrace trace(mesh);
      const at::Tensor y = block(mlp, x);
      EXPECT_COMMS(
          trace,
          {all_reduce("tp", bytes).by("aten::relu").of("self").in("block").forward().implicitly()});
      trace.clear();
      y.sum().backward();
      EXPECT_COMMS(trace, {all_reduce("tp", bytes)
                               .by("aten::threshold_backward")
                               .in("block")
                               .backward()
                               .implicitly()});
      EXPECT_EQ(trace.bytes(), bytes);
      trace.clear();
      finish_grad_sync(*mlp);
      EXPECT_COMMS(trace, {});
    });
  }
}

TEST(CommTraceTest, AnEventSaysAllThatThereIsToKnow) {
  on_mesh({{"dp", 2}, {"tp", 3}}, [](const MeshPtr& mesh) {
    const at::Tensor x = scattered(numbers({7, 5}), mesh, {Shard(0), Partial()});
    const CommTrace trace(mesh);
    const at::Tensor y = x.relu();
    ASSERT_EQ(trace.events().size(), 1u);
    CommEvent want;
    want.collective = "all_reduce";
    want.mesh_dims = {"tp"};
    want.group_size = 3;
    want.bytes = 2 * (20 - 20 / 3) * 8;  // rows 0 to 3: the larger part
    want.op = "aten::relu";
    want.argument = "self";
    want.implicit = true;
    want.dtype = at::kDouble;
    want.shape = {7, 5};
    want.before = Layout({Shard(0), Partial()});
    want.after = Layout({Shard(0), Replicate()});
    EXPECT_EQ(trace.events()[0], want);
    EXPECT_EQ(want.to_string(),
              "all_reduce tp (3), 224 bytes: Double[7, 5] [S(0), P(sum)] -> [S(0), R] for "
              "aten::relu 'self', forward");
  });
}

TEST(CommTraceTest, ExplicitCallsAndTheirBackward) {
  on_mesh({{"dp", 2}, {"tp", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor whole = numbers({7, 5});
    CommTrace trace(mesh);
    at::Tensor x = distribute_tensor(whole, mesh, {{"dp", Shard(0)}});
    std::vector<std::string> calls;
    for (const CommEvent& event : trace.events()) {
      EXPECT_EQ(event.op, "distribute_tensor");
      EXPECT_FALSE(event.implicit);
      calls.push_back(event.collective);
    }
    // The first of the ranks along tp cut it along dp.
    std::vector<std::string> want = {"barrier", "scatter", "broadcast"};
    if (mesh->coordinate()[1] != 0) want.erase(want.begin() + 1);
    EXPECT_EQ(calls, want);
    trace.clear();
    x.requires_grad_();

    const int line = std::source_location::current().line() + 1;
    const at::Tensor y = redistribute(x, {{"dp", Shard(1)}});
    const std::string source = "comm_trace_test.cc:" + std::to_string(line);
    ASSERT_EQ(trace.events().size(), 1u);
    EXPECT_EQ(trace.events()[0].collective, "all_to_all");
    EXPECT_EQ(trace.events()[0].op, "redistribute");
    EXPECT_THAT(trace.events()[0].source, EndsWith(source));
    trace.clear();

    // Of a host's code: the innermost scope that began after the trace; what C++ knows counts more.
    {
      const SourceScope outer(mesh, "train.rs:1");
      CommTrace inside(mesh);
      {
        const SourceScope inner(mesh, "model.rs:53");
        redistribute(x.detach(), {{"dp", Replicate()}});
        x.detach().sum().relu();  // of an operator, too
        redistribute(x.detach(), {{"dp", Replicate()}}, {});
      }
      x.detach().sum().relu();
      ASSERT_EQ(trace.events().size(), inside.events().size());
      std::vector<std::string> sources, inside_sources;
      for (const CommEvent& event : trace.events()) sources.push_back(event.source);
      for (const CommEvent& event : inside.events()) inside_sources.push_back(event.source);
      ASSERT_GE(sources.size(), 4u);
      EXPECT_THAT(sources.front(), EndsWith("comm_trace_test.cc:" + std::to_string(line + 14)));
      EXPECT_EQ(sources[1], "model.rs:53");
      EXPECT_EQ(sources.back(), "train.rs:1");
      EXPECT_EQ(inside_sources[1], "model.rs:53");
      EXPECT_EQ(inside_sources.back(), "");
    }
    trace.clear();

    y.relu().sum().backward();
    EXPECT_COMMS(trace, {testing::all_to_all("dp").by("redistribute backward").backward()});
    EXPECT_THAT(trace.events().back().source, EndsWith(source));  // of the call in forward
    trace.clear();

    const int full_line = std::source_location::current().line() + 1;
    full_tensor(x.detach());
    EXPECT_COMMS(trace, {all_gather("dp", 20 * 8).by("full_tensor").explicitly()});
    EXPECT_THAT(trace.events()[0].source,
                EndsWith("comm_trace_test.cc:" + std::to_string(full_line)));
    trace.clear();

    from_local(at::ones({2, 3}), mesh, {Shard(0), Shard(1)});
    EXPECT_COMMS(trace, {all_gather({"dp", "tp"}).by("from_local").explicitly()});
    trace.clear();

    from_local(at::ones({2, 3}), mesh, {Shard(0), Shard(1)}, std::vector<int64_t>{4, 6});
    redistribute(y.detach(), {Replicate(), Replicate()}).sum();
    redistribute(x.detach(), {Shard(0), Shard(1)});  // a slice: nothing is sent
    EXPECT_COMMS(trace, {{"all_gather", 1}});
  });
}

TEST(CommTraceTest, GradientsThatTravelTogetherAreOneEvent) {
  on_mesh({{"dp", 2}, {"tp", 2}}, [](const MeshPtr& mesh) {
    Mlp mlp = make_mlp(mesh);
    const at::Tensor x = distribute_tensor(numbers({4, 6}), mesh, {{"dp", Shard(0)}}, kNothingSent);
    block(mlp, x).sum().backward();
    const CommTrace trace(mesh);
    finish_grad_sync(*mlp);
    ASSERT_EQ(trace.events().size(), 1u);
    const CommEvent& event = trace.events()[0];
    EXPECT_EQ(event.argument, "4 tensors");
    // Rank 0 of tp holds 7 of the 13 features, the other 6.
    const int64_t features = mesh->coordinate()[1] == 0 ? 7 : 6;
    const int64_t elements = features * 6 + features + 6 * features + 6;
    EXPECT_EQ(event.shape, std::vector<int64_t>{elements});
    // Of each tensor the figure of the rank that sends most.
    EXPECT_EQ(event.bytes, (42 + 8 + 42 + 6) * 8);
    EXPECT_COMMS(trace,
                 {all_reduce("dp").by("finish_grad_sync").in("").gradient_sync().explicitly()});
    // Those of which it has the gradients.
    std::vector<std::string> names;
    for (const auto& item : mlp->named_parameters()) names.push_back(item.key());
    EXPECT_THAT(event.parameters, ::testing::UnorderedElementsAreArray(names));
    EXPECT_THAT(event.to_string(), HasSubstr(" and 3 more for finish_grad_sync '4 tensors', "
                                             "gradient sync"));
  });
}

// Parameters by their names: sent for the first time, brought where an operator needs them, and their
// gradients.
TEST(CommTraceTest, NamesTheParameters) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    torch::nn::Sequential model(torch::nn::Linear(6, 4), torch::nn::Linear(4, 3));
    CommTrace trace(mesh);
    const auto names_by = [&](std::string_view op) {
      std::set<std::string> names;
      for (const CommEvent& event : trace.events()) {
        if (event.op == op) names.insert(event.parameters.begin(), event.parameters.end());
      }
      return names;
    };
    const std::set<std::string> all = {"0.weight", "0.bias", "1.weight", "1.bias"};
    distribute_module(*model, mesh, {{"*", {{"dp", Shard(0)}}}});
    EXPECT_EQ(names_by("distribute_module"), all) << trace.to_string();
    trace.clear();
    const at::Tensor x =
        distribute_tensor(at::ones({4, 6}), mesh, {{"dp", Shard(0)}}, kNothingSent);
    const at::Tensor y = model->forward(x);
    EXPECT_EQ(names_by("aten::addmm"), all) << trace.to_string();
    EXPECT_THAT(trace.to_string(), HasSubstr("  1.weight   aten::addmm 'mat2'"));
    y.square().sum().backward();
    trace.clear();
    finish_grad_sync(*model);
    EXPECT_EQ(names_by("finish_grad_sync"), all) << trace.to_string();
    trace.clear();
    full_tensor(model->parameters()[0]);
    EXPECT_EQ(names_by("full_tensor"), std::set<std::string>{"0.weight"});
    trace.clear();
    full_tensor(x);
    EXPECT_THAT(trace.events()[0].parameters, IsEmpty());
    const auto json = nlohmann::json::parse(trace.to_json());
    EXPECT_EQ(json["events"][0]["parameters"], nlohmann::json::array());
  });
}

// What compares plain tensors does not look like what moves a tensor.
TEST(CommTraceTest, TheComparisonOfPlainTensorsSaysSo) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor x = zeros({4, 6}, mesh, {Shard(0)});
    CommTrace trace(mesh);
    x.mul(at::ones({6}));
    ASSERT_EQ(trace.events().size(), 1u);
    EXPECT_TRUE(trace.events()[0].is_check);
    EXPECT_EQ(trace.events()[0].to_string(),
              "all_reduce dp (2), 16 bytes: check that plain values are alike on all ranks for "
              "aten::mul 'other', forward");
    EXPECT_TRUE(nlohmann::json::parse(trace.to_json())["events"][0]["is_check"].get<bool>());
    trace.clear();
    full_tensor(x);
    EXPECT_FALSE(trace.events()[0].is_check);
  });
}

TEST(CommTraceTest, AResultThatIsWrittenElsewhereIsTheResult) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    at::Tensor a = scattered(numbers({4, 6}), mesh, {Replicate()});
    const at::Tensor b = scattered(numbers({4, 6}), mesh, {Shard(0)});
    const CommTrace trace(mesh);
    at::exp_out(a, b);
    EXPECT_COMMS(trace, {all_gather("x", 12 * 8).by("aten::exp").of("result").implicitly()});
  });
}

TEST(CommTraceTest, WhatARuleRedistributesIsImplicit) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor scores = scattered(numbers({6, 3}), mesh, {Shard(0)});
    const at::Tensor labels = distribute_tensor(at::arange(6, at::kLong).remainder(3), mesh,
                                                {{"dp", Shard(0)}}, kNothingSent);
    const CommTrace trace(mesh);
    at::nll_loss(scores, labels);  // a mean: by the sums of the losses and of the weights
    EXPECT_COMMS(trace, {all_reduce("dp").by("aten::nll_loss_forward").implicitly()});
    EXPECT_EQ(trace.events()[0].source, "");
  });
}

// The flight recorder of comm/ counts independently of all this.
TEST(CommTraceTest, NothingIsMissed) {
  for (const auto& sizes : kMeshes) {
    on_mesh(dims_of(sizes), [&](const MeshPtr& mesh) {
      Mlp mlp = make_mlp(mesh);
      const auto step = [&] {
        Placements cut(mesh->mesh().ndim());
        cut[0] = Shard(0);
        at::Tensor x = distribute_tensor(numbers({5, 6}), mesh, cut);
        x.requires_grad_();
        const at::Tensor y = block(mlp, x);
        const at::Tensor z = redistribute(y, Placements(mesh->mesh().ndim()));
        at::cross_entropy_loss(z, z.argmax(1)).backward();
        finish_grad_sync(*mlp);
        from_local(to_local(y).detach(), mesh, layout_of(y).placements());
        return full_tensor(std::get<0>(at::linalg_qr(y.detach())));  // has no rule
      };
      step();  // makes the communicators
      const auto calls = [&] {
        return (*mesh->communicator(0))->flight_recorder().counters().total().calls;
      };
      const int64_t before = calls();
      const CommTrace trace(mesh);
      step();
      EXPECT_EQ(static_cast<int64_t>(trace.events().size()), calls() - before);
      EXPECT_GT(calls(), before);
      // Implicit ones are what the dispatcher counts, but that a redistribution may take several.
      const int64_t implicit = std::count_if(trace.events().begin(), trace.events().end(),
                                             [](const CommEvent& e) { return e.implicit; });
      EXPECT_GE(2 * implicit, dispatch_counters(mesh).implicit_redistributions);
    });
  }
}

// --- scopes --------------------------------------------------------------------------------------

TEST(CommTraceTest, ScopesNestAndAreOfOneMesh) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const MeshPtr other =
        value_or_throw(mesh->another(value_or_throw(mesh->mesh().flatten({}, "other"))));
    const at::Tensor x = scattered(numbers({4, 6}), mesh, {Shard(0)});
    const CommTrace outer(mesh), elsewhere(other);
    full_tensor(x);
    {
      const CommTrace inner(mesh);
      full_tensor(x);
      EXPECT_EQ(inner.events().size(), 1u);
    }
    full_tensor(x);
    EXPECT_EQ(outer.events().size(), 3u);
    EXPECT_THAT(elsewhere.events(), IsEmpty());
  });
}

TEST(CommTraceTest, IsBounded) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor x = scattered(numbers({4, 6}), mesh, {Shard(0)});
    CommTrace trace(mesh, /*max_events=*/2);
    for (int i = 0; i < 5; ++i) full_tensor(x);
    EXPECT_EQ(trace.events().size(), 2u);
    EXPECT_EQ(trace.dropped(), 3);
    EXPECT_THAT(trace.to_string(), HasSubstr("3 more were not kept"));
    trace.clear();
    full_tensor(x);
    EXPECT_EQ(trace.events().size(), 1u);
    EXPECT_EQ(trace.dropped(), 0);
  });
}

TEST(CommTraceTest, ACollectiveThatFailsIsRecorded) {
  const absl::Status status = testing::try_on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor x = scattered(numbers({4, 6}), mesh, {Shard(0)});
    const CommTrace trace(mesh);
    if (mesh->coordinate()[0] == 1) throw Error(absl::DataLossError("gone"));
    EXPECT_THROW(full_tensor(x), Error);
    EXPECT_COMMS(trace, {all_gather("x")});
    throw Error(absl::DataLossError("gone as well"));
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
}

// --- modules -------------------------------------------------------------------------------------

at::Tensor reduced(const MeshPtr& mesh, const std::string& module, const at::Tensor& x) {
  const ModuleScope scope(mesh, module);
  return redistribute(x, {Replicate()});
}

TEST(ModuleScopeTest, TheInnermostCountsAndBackwardRemembers) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    CommTrace trace(mesh);
    at::Tensor x = scattered(numbers({4, 6}), mesh, {Shard(0)}).detach().requires_grad_();
    at::Tensor y;
    {
      const ModuleScope outer(mesh, "outer");
      y = redistribute(x, {Shard(1)});
      y = reduced(mesh, "inner", y);
      y = redistribute(y.relu(), {Shard(0)});  // a slice; its backward gathers
    }
    const at::Tensor z = reduced(mesh, "other", y);
    EXPECT_COMMS(trace, {testing::all_to_all("x").in("outer"), all_gather("x").in("inner"),
                         all_gather("x").in("other")});
    trace.clear();
    {
      const ModuleScope around(mesh, "training");  // around backward: not what runs in it
      z.relu().sum().backward();
    }
    ASSERT_FALSE(trace.events().empty());
    std::vector<std::string> modules;
    for (const CommEvent& event : trace.events()) {
      EXPECT_EQ(event.phase, Phase::kBackward);
      modules.push_back(event.module);
    }
    EXPECT_EQ(modules, (std::vector<std::string>{"outer", "outer"})) << trace.to_string();
  });
}

TEST(ModuleScopeTest, FindsTheModuleOfEachOfManySteps) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor x = scattered(numbers({4, 6}), mesh, {Replicate()}).detach().requires_grad_();
    const auto forward = [&](const std::string& name) {
      const ModuleScope scope(mesh, name);
      return redistribute(x * 2, {Shard(0)}).exp().sum();  // backward: all_gather
    };
    const at::Tensor before = forward("before");  // while nobody looks: unknown
    CommTrace trace(mesh);
    const at::Tensor a = forward("a"), b = forward("b"), c = forward("c");
    const std::vector<std::pair<at::Tensor, std::string>> losses = {
        {b, "b"}, {a, "a"}, {before, ""}, {c, "c"}};
    for (const auto& [loss, name] : losses) {
      trace.clear();
      loss.backward();
      EXPECT_COMMS(trace, {all_gather("x").in(name).backward()});
    }
  });
}

TEST(ModuleScopeTest, KnowsTheModuleThatRanWhenTheTraceBegan) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor x = scattered(numbers({4, 6}), mesh, {Replicate()}).detach().requires_grad_();
    const ModuleScope scope(mesh, "m");
    CommTrace trace(mesh);
    const at::Tensor y = redistribute(x * 2, {Shard(0)}).exp().sum();
    y.backward();
    EXPECT_COMMS(trace, {all_gather("x").in("m").backward()});
  });
}

TEST(ModuleScopeTest, PlainTensorsHaveNone) {
  const ModuleScope of_a_plain_tensor(at::ones({2}), "m");
  const ModuleScope of_nothing(at::Tensor(), "m");
  EXPECT_THROW(ModuleScope(MeshPtr(), "m"), Error);
}

TEST(ModuleScopeTest, EndsWhenACallThrows) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor x = scattered(numbers({4, 6}), mesh, {Shard(0)});
    const CommTrace trace(mesh);
    try {
      const ModuleScope scope(mesh, "m");
      at::mm(x, x);
      ADD_FAILURE() << "shapes do not fit";
    } catch (const c10::Error&) {
    }
    full_tensor(x);
    EXPECT_COMMS(trace, {all_gather("x").in("")});
  });
}

TEST(ModuleScopeTest, TheStrictScopeNamesTheModule) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const auto refusal = [](const std::function<void()>& call) -> std::string {
      try {
        call();
      } catch (const Error& error) {
        EXPECT_EQ(error.status().code(), absl::StatusCode::kFailedPrecondition);
        return std::string(error.status().message());
      }
      return "none";
    };
    const StrictScope strict(mesh);
    const at::Tensor x = scattered(numbers({4, 6}), mesh, {Shard(0)}).detach().requires_grad_();
    EXPECT_THAT(refusal([&] {
                  const ModuleScope scope(mesh, "layers.0.attn");
                  x.cumsum(0);
                }),
                HasSubstr("refuses in module 'layers.0.attn': argument 'self' DTensor[4, 6]"));
    EXPECT_THAT(refusal([&] { x.cumsum(0); }), HasSubstr("refuses: argument"));
    // Of the gradient of what ran in the module.
    at::Tensor p = scattered(numbers({4, 6}), mesh, {Shard(1)}).detach().requires_grad_();
    at::Tensor y;
    {
      const ModuleScope scope(mesh, "layers.1");
      y = p.exp();
    }
    const at::Tensor grad = scattered(numbers({4, 6}), mesh, {Shard(0)});
    const std::string message = refusal([&] { y.backward(grad); });
    EXPECT_THAT(message, HasSubstr("aten::mul"));
    EXPECT_THAT(message, HasSubstr("in module 'layers.1'"));
  });
}

// --- text and JSON -------------------------------------------------------------------------------

TEST(CommTraceTest, TheTableJoinsEqualEvents) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor x = scattered(numbers({4, 6}), mesh, {Shard(0)});
    CommTrace trace(mesh);
    EXPECT_EQ(trace.to_string(), "0 collectives, 0 bytes sent by a rank\n");
    for (int i = 0; i < 3; ++i) (x + i).cumsum(0);
    EXPECT_EQ(trace.to_string(),
              "calls  collective  along  bytes  tensor                         "
              "needed by            phase\n"
              "    3  all_to_all  x (2)     48  Double[4, 6] [S(0)] -> [S(1)]  "
              "aten::cumsum 'self'  forward\n"
              "3 collectives, 144 bytes sent by a rank\n");
  });
}

TEST(CommTraceTest, JsonHasEveryEvent) {
  on_mesh({{"dp", 2}, {"tp", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor x = scattered(numbers({7, 5}), mesh, {Shard(0), Partial()});
    const CommTrace trace(mesh);
    {
      const ModuleScope scope(mesh, "a \"quoted\" name");
      x.relu();
    }
    full_tensor(x);
    const auto json = nlohmann::json::parse(trace.to_json());
    EXPECT_EQ(json["mesh"], "DeviceMesh(dp=2, tp=2)");
    EXPECT_EQ(json["rank"], mesh->rank().value);
    EXPECT_EQ(json["dropped"], 0);
    ASSERT_EQ(json["events"].size(), trace.events().size());
    for (size_t i = 0; i < trace.events().size(); ++i) {
      const CommEvent& event = trace.events()[i];
      EXPECT_EQ(json["events"][i]["collective"], event.collective);
      EXPECT_EQ(json["events"][i]["bytes"], event.bytes);
      EXPECT_EQ(json["events"][i]["implicit"], event.implicit);
      EXPECT_EQ(json["events"][i]["shape"], event.shape);
      EXPECT_EQ(json["events"][i]["module"], event.module);
      EXPECT_EQ(json["events"][i]["source"], event.source);
      EXPECT_EQ(Layout::parse(json["events"][i]["before"].get<std::string>()).value(),
                event.before);
    }
  });
}

}  // namespace
}  // namespace shardweave
