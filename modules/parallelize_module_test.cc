// A model that was written for one device, under plans that speak of inputs and outputs: values and
// gradients are one device's, activations lie where the plan says, and the collectives are those of
// the theory.
#include "shardweave/modules/parallelize_module.h"

#include <algorithm>
#include <functional>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/activation_checkpoint.h"
#include "shardweave/dtensor/observe/comm_trace.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/modules/hooked.h"
#include "shardweave/modules/parallel_style.h"
#include "shardweave/modules/sharding_plan_json.h"
#include "torch/csrc/autograd/autograd.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/activation.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/modules/normalization.h"
#include "torch/nn/pimpl.h"
#include "torch/optim/sgd.h"

namespace shardweave {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::on_mesh;
namespace nn = torch::nn;

constexpr int64_t kVocabulary = 11, kDim = 12, kHeads = 6;

// Layouts that the model has seen, by name.
using Seen = std::map<std::string, std::string>;
void see(Seen* seen, const char* name, const at::Tensor& tensor) {
  if (seen != nullptr && is_dtensor(tensor)) (*seen)[name] = layout_of(tensor).to_string();
}

struct BlockImpl : nn::Module {
  BlockImpl() {
    register_module("norm1", norm1);
    register_module("norm2", norm2);
    for (auto& [name, layer] : {std::pair{"q", &q}, {"k", &k}, {"v", &v}, {"o", &o}}) {
      register_module(name, *layer);
    }
    register_module("up", up);
    register_module("down", down);
  }
  at::Tensor forward(const at::Tensor& x) {
    const int64_t batch = x.size(0), length = x.size(1);
    const auto heads = [&](const at::Tensor& t) {
      return t.view({batch, length, kHeads, kDim / kHeads}).transpose(1, 2);
    };
    const at::Tensor n = norm1(x);
    see(seen, "norm1", n);
    const at::Tensor scores = at::matmul(heads(q(n)), heads(k(n)).transpose(2, 3)).softmax(-1);
    const at::Tensor mixed = at::matmul(scores, heads(v(n))).transpose(1, 2);
    const at::Tensor attended = o(mixed.reshape({batch, length, kDim}));
    see(seen, "o", attended);
    const at::Tensor y = x + attended;
    see(seen, "residual", y);
    return y + down(at::gelu(up(norm2(y))));
  }
  nn::LayerNorm norm1{nn::LayerNormOptions({kDim})}, norm2{nn::LayerNormOptions({kDim})};
  nn::Linear q{nn::LinearOptions(kDim, kDim).bias(false)},
      k{nn::LinearOptions(kDim, kDim).bias(false)}, v{kDim, kDim}, o{kDim, kDim},
      up{kDim, 4 * kDim}, down{4 * kDim, kDim};
  Seen* seen = nullptr;
};
using Block = nn::ModuleHolder<Hooked<BlockImpl>>;

struct GptImpl : nn::Module {
  explicit GptImpl(Seen* seen_in = nullptr) {
    static std::mutex one_at_a_time;  // ranks are threads, which share LibTorch's generator
    const std::lock_guard lock(one_at_a_time);
    torch::manual_seed(1);
    embedding = register_module("embedding", nn::Embedding(kVocabulary, kDim));
    for (int i = 0; i < 2; ++i) {
      blocks.push_back(register_module("h" + std::to_string(i), Block()));
      blocks.back()->seen = seen_in;
    }
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({kDim})));
    head = register_module("head", nn::Linear(nn::LinearOptions(kDim, kVocabulary).bias(false)));
  }
  at::Tensor forward(const at::Tensor& tokens) {
    at::Tensor x = embedding(tokens);
    for (Block& block : blocks) {
      x = checkpointed ? checkpoint([&](const at::Tensor& t) { return block->forward(t); }, x)
                       : block->forward(x);
    }
    return head(norm(x));
  }
  nn::Embedding embedding{nullptr};
  std::vector<Block> blocks;
  nn::LayerNorm norm{nullptr};
  nn::Linear head{nullptr};
  bool checkpointed = false;
};
TORCH_MODULE(Gpt);

at::Tensor tokens_of(int64_t batch, int64_t length) {
  return (at::arange(batch * length, at::kLong) * 7 % kVocabulary).view({batch, length});
}

at::Tensor loss_of(Gpt& model, const at::Tensor& tokens) {
  return at::cross_entropy_loss(model->forward(tokens).flatten(0, 1), tokens.flatten());
}

// Parameters after some steps, and the losses, of one device.
struct Reference {
  std::vector<double> losses;
  std::vector<at::Tensor> parameters;
};
Reference reference(const at::Tensor& tokens, int steps) {
  Gpt model;
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
  Reference result;
  for (int i = 0; i < steps; ++i) {
    optimizer.zero_grad();
    const at::Tensor loss = loss_of(model, tokens);
    loss.backward();
    optimizer.step();
    result.losses.push_back(loss.item<double>());
  }
  for (const at::Tensor& p : model->parameters()) result.parameters.push_back(p.detach());
  return result;
}

const ShardingPlan kMegatron = {.parameter = {{"*.{q,k,v,up}.*", {{"tp", Shard(0)}}},
                                              {"*.{o,down}.weight", {{"tp", Shard(1)}}}},
                                .forward = {{"*.{o,down}.output", {{"tp", Replicate()}}}}};

// Activations outside of attention and MLP lie along the sequence.
const ShardingPlan kSequence = {.parameter = kMegatron.parameter,
                                .forward = {{"embedding.output", {{"tp", Shard(1)}}},
                                            {"*.norm?.output", {{"tp", Replicate()}}},
                                            {"*.{o,down}.output", {{"tp", Shard(1)}}},
                                            {"head.input", {{"tp", Replicate()}}}}};

void trains_as_one_device(const std::vector<MeshDim>& dims, const ShardingPlan& plan, int64_t batch,
                          int64_t length, bool checkpointed = false) {
  constexpr int kSteps = 3;
  const at::Tensor tokens = tokens_of(batch, length);
  const Reference expected = reference(tokens, kSteps);
  on_mesh(dims, [&](const MeshPtr& mesh) {
    Gpt model;
    model->checkpointed = checkpointed;
    parallelize_module(*model, mesh, plan, {.source = std::nullopt});
    torch::optim::SGD optimizer(unique_parameters(*model), torch::optim::SGDOptions(0.1));
    NamedPlacements rows;
    if (mesh->mesh().dim("dp").ok()) rows.emplace_back("dp", Shard(0));
    const at::Tensor mine = distribute_tensor(tokens, mesh, rows);
    for (const double loss : expected.losses) {
      optimizer.zero_grad();
      const at::Tensor now = loss_of(model, mine);
      now.backward();
      finish_grad_sync(*model);
      optimizer.step();
      EXPECT_NEAR(now.item<double>(), loss, 1e-5 * loss);
    }
    const auto parameters = model->parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      EXPECT_TRUE(
          at::allclose(full_tensor(parameters[i].detach()), expected.parameters[i], 1e-4, 1e-5))
          << model->named_parameters().keys()[i];
    }
  });
}

TEST(ParallelizeModuleTest, TrainsAsOneDevice) {
  for (const ShardingPlan* plan : {&kMegatron, &kSequence}) {
    trains_as_one_device({{"tp", 1}}, *plan, 2, 4);
    trains_as_one_device({{"tp", 2}}, *plan, 2, 6);
    trains_as_one_device({{"tp", 2}}, *plan, 3, 7);
    trains_as_one_device({{"tp", 3}}, *plan, 2, 5);
    trains_as_one_device({{"tp", 4}}, *plan, 1, 3);  // an empty part
    trains_as_one_device({{"dp", 2}, {"tp", 2}}, *plan, 4, 6);
    trains_as_one_device({{"dp", 2}, {"tp", 2}}, *plan, 3, 5);
    trains_as_one_device({{"dp", 2}, {"x", 1}, {"tp", 2}}, *plan, 2, 4);
  }
}

TEST(ParallelizeModuleTest, ARecomputedForwardFollowsThePlan) {
  trains_as_one_device({{"tp", 2}}, kSequence, 2, 6, /*checkpointed=*/true);
}

// What a step sends, by kind.
std::map<std::string, int> collectives(const ShardingPlan& plan, Seen* seen) {
  std::map<std::string, int> counts;
  on_mesh({{"tp", 2}}, [&](const MeshPtr& mesh) {
    Gpt model(mesh->coordinate()[0] == 0 ? seen : nullptr);
    parallelize_module(*model, mesh, plan, {.source = std::nullopt});
    const at::Tensor tokens =
        distribute_tensor(tokens_of(2, 6), mesh, NamedPlacements{}, {.source = std::nullopt});
    const CommTrace trace(mesh);
    loss_of(model, tokens).backward();
    finish_grad_sync(*model);
    if (mesh->coordinate()[0] != 0) return;
    for (const CommEvent& event : trace.events()) ++counts[event.collective];
  });
  return counts;
}

TEST(ParallelizeModuleTest, CollectivesAreThoseOfTheTheory) {
  Seen seen;
  // Two a layer forward, two backward.
  EXPECT_EQ(collectives(kMegatron, &seen), (std::map<std::string, int>{{"all_reduce", 8}}));
  EXPECT_EQ(seen["o"], "[R]");
  // In place of each all-reduce a gather and a scatter; a gather more before the head, and one of the
  // embedding's gradient, which comes back as the result lay: replicated. The gradients of what is the
  // same along tp, norms and biases, are summed in one bucket.
  EXPECT_EQ(collectives(kSequence, &seen),
            (std::map<std::string, int>{
                {"all_gather", 4 + 1 + 4 + 1}, {"reduce_scatter", 4 + 4}, {"all_reduce", 1}}));
  EXPECT_EQ(seen["norm1"], "[R]");
  EXPECT_EQ(seen["o"], "[S(1)]");
  EXPECT_EQ(seen["residual"], "[S(1)]");
}

TEST(ParallelizeModuleTest, AHookedModuleIsMetAsAWhole) {
  Seen seen;
  on_mesh({{"tp", 2}}, [&](const MeshPtr& mesh) {
    Gpt model, plain;
    const ShardingPlan plan = {.parameter = {},
                               .forward = {{"h1.input", {{"tp", Shard(1)}}},
                                           {"h1.output.0", {{"tp", Shard(2)}}},
                                           {"head.input.0", {{"tp", Shard(-1)}}}}};
    parallelize_module(*model, mesh, plan, {.source = std::nullopt});
    at::Tensor in, out;
    const at::Tensor x =
        distribute_tensor(at::ones({2, 4, kDim}), mesh, NamedPlacements{}, {.source = std::nullopt})
            .requires_grad_();
    out = model->blocks[1]->forward(x);
    EXPECT_EQ(layout_of(out).to_string(), "[S(2)]");
    EXPECT_EQ(layout_of(model->blocks[0]->forward(x)).to_string(), "[R]");
    out.sum().backward();
    const at::Tensor y = at::ones({2, 4, kDim}).requires_grad_();
    const at::Tensor whole = plain->blocks[1]->forward(y);
    whole.sum().backward();
    EXPECT_TRUE(at::allclose(full_tensor(out.detach()), whole.detach(), 1e-5, 1e-6));
    EXPECT_TRUE(at::allclose(full_tensor(x.grad()), y.grad(), 1e-5, 1e-6));
    // In evaluation, too; a plain input counts as replicated.
    const at::NoGradGuard no_grad;
    EXPECT_EQ(layout_of(model->blocks[1]->forward(y.detach())).to_string(), "[S(2)]");
    EXPECT_EQ(layout_of(model->head(x)).to_string(), "[P(sum)]");
  });
}

// Nobody has written a ModuleScope. Cutting sends nothing, what undoes it in backward does.
TEST(ParallelizeModuleTest, WhatAPlanMovesAtAHookedModuleIsOfThatModule) {
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    Gpt model;
    parallelize_module(
        *model, mesh,
        {.parameter = {},
         .forward = {{"h0.input", {{"tp", Shard(1)}}}, {"h1.output", {{"tp", Replicate()}}}}},
        {.source = std::nullopt});
    const at::Tensor tokens =
        distribute_tensor(tokens_of(2, 6), mesh, NamedPlacements{}, {.source = std::nullopt});
    const CommTrace trace(mesh);
    loss_of(model, tokens).backward();
    int forward = 0, backward = 0;
    for (const CommEvent& event : trace.events()) {
      if (event.op != "redistribute" && event.op != "redistribute backward") continue;
      const bool is_backward = event.phase == Phase::kBackward;
      EXPECT_EQ(event.module, is_backward ? "h0" : "h1") << event.to_string();
      ++(is_backward ? backward : forward);
    }
    EXPECT_EQ(forward, 1) << trace.to_string();
    EXPECT_EQ(backward, 1) << trace.to_string();
  });
}

TEST(ParallelizeModuleTest, WhatIsNoForwardRunsAsItIs) {
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    nn::Linear layer(4, 6);
    parallelize_module(
        *layer, mesh,
        {.parameter = {{"weight", {{"tp", Shard(0)}}}},
         .forward = {{"output", {{"tp", Replicate()}}}, {"input", {{"tp", Shard(0)}}}}});
    const at::Tensor w = layer->weight;
    EXPECT_EQ(layout_of(w.pow(2)).to_string(), "[S(0)]");
    EXPECT_EQ(layout_of(w.detach()).to_string(), "[S(0)]");
    const at::Tensor x = zeros({3, 4}, mesh, {Replicate()});
    const at::Tensor y = layer(x);
    EXPECT_EQ(layout_of(y).to_string(), "[R]");
    (y.sum() + 0.1 * w.pow(2).sum()).backward();
    EXPECT_EQ(layout_of(w.grad()).to_string(), "[S(0)]");
    // An optimizer that reads weights by operators.
    torch::optim::SGD sgd({w}, torch::optim::SGDOptions(0.1).weight_decay(0.1).momentum(0.9));
    sgd.step();
    sgd.step();
    EXPECT_EQ(layout_of(w).to_string(), "[S(0)]");
    // Second derivatives.
    const at::Tensor z = layer(ones({3, 4}, mesh, {Replicate()}).requires_grad_()).pow(2).sum();
    const at::Tensor g = torch::autograd::grad({z}, {w}, {}, true, /*create_graph=*/true)[0];
    EXPECT_EQ(layout_of(g).to_string(), "[S(0)]");
    g.pow(2).sum().backward();
  });
}

// Its placements are for another number of dimensions, or for other ranks.
TEST(ParallelizeModuleTest, AnInputOnAnotherMeshIsAnErrorBeforeItMoves) {
  const absl::Status status = run_ranks(4, [](World& world) -> absl::Status {
    const auto both = init_device_mesh(world, {{"dp", 2}, {"tp", 2}});
    const auto one = init_device_mesh(world, {{"all", 4}});
    const auto same = init_device_mesh(world, {{"a", 2}, {"b", 2}});
    for (const auto& mesh : {both, one, same}) EXPECT_TRUE(mesh.ok());
    nn::Linear layer(4, 6);
    parallelize_module(*layer, *both,
                       {.parameter = {{"weight", {{"tp", Shard(0)}}}},
                        .forward = {{"input", {{"dp", Shard(0)}, {"tp", Replicate()}}}}});
    nn::Linear flat(4, 6);
    parallelize_module(*flat, *one, {.forward = {{"input", {{"all", Shard(0)}}}}});
    const auto refused = [](const nn::Linear& to, const at::Tensor& x) {
      try {
        nn::Linear(to)->forward(x);
        ADD_FAILURE() << "no error";
      } catch (const Error& error) {
        EXPECT_THAT(std::string(error.status().message()),
                    AllOf(HasSubstr("the plan's 'input"), HasSubstr("lies on another mesh"),
                          HasSubstr("; the plan's is DeviceMesh(")));
      }
    };
    refused(layer, zeros({8, 4}, *one, {Shard(0)}));
    refused(layer, zeros({8, 4}, *same, {Shard(0), Replicate()}));
    refused(flat, zeros({8, 4}, *both, {Shard(0), Replicate()}));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Everything that is no plain call of a layer, and still one.
TEST(ParallelizeModuleTest, AWeightIsMetThroughCastsListsAndNewData) {
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    const ShardingPlan plan = {.parameter = {{"weight", {{"tp", Shard(0)}}}},
                               .forward = {{"output", {{"tp", Shard(0)}}}}};
    const at::Tensor x = ones({4, 6}, mesh, {Replicate()});
    nn::Linear layer(6, 4);
    parallelize_module(*layer, mesh, plan);
    const at::Tensor w = layer->weight;
    EXPECT_EQ(layout_of(at::linear(x.to(at::kDouble), w.to(at::kDouble))).to_string(), "[S(0)]");
    EXPECT_EQ(layout_of(at::einsum("bi,oi->bo", {x, w})).to_string(), "[S(0)]");
    // What is computed of weights alone is no forward.
    EXPECT_EQ(layout_of(w * 2).to_string(), "[S(0)]");
    EXPECT_EQ(layout_of(w.t() * w.t()).to_string(), "[S(1)]");
    layer->to(at::kDouble);
    EXPECT_EQ(layer->weight.scalar_type(), at::kDouble);
    const at::Tensor y = layer(x.to(at::kDouble));
    EXPECT_EQ(layout_of(y).to_string(), "[S(0)]");
    y.sum().backward();
  });
}

// Another module's parameter, as learned queries are, is an input as any other.
TEST(ParallelizeModuleTest, AParameterOfAnotherModuleIsAnInput) {
  struct QueriesImpl : nn::Module {
    at::Tensor queries = register_parameter("queries", at::ones({4, 6}));
    nn::Linear q = register_module("q", nn::Linear(nn::LinearOptions(6, 6)));
    at::Tensor forward() { return q(queries.unsqueeze(0).expand({2, 4, 6})); }
  };
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    auto model = std::make_shared<QueriesImpl>();
    parallelize_module(*model, mesh,
                       {.parameter = {}, .forward = {{"q.input", {{"tp", Shard(1)}}}}});
    EXPECT_EQ(layout_of(model->forward()).to_string(), "[S(1)]");
  });
}

// A dimension counted from the end; `linear` adds its bias in place.
TEST(ParallelizeModuleTest, AnOutputThatIsThereAlreadyIsLeftAlone) {
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    nn::Linear layer(6, 4);
    parallelize_module(
        *layer, mesh,
        {.parameter = {{"*", {{"tp", Shard(0)}}}}, .forward = {{"output", {{"tp", Shard(-1)}}}}});
    const at::Tensor y = layer(ones({2, 3, 6}, mesh, {Replicate()}));
    EXPECT_EQ(layout_of(y).to_string(), "[S(2)]");
    y.sum().backward();
    EXPECT_TRUE(at::equal(full_tensor(layer->bias.grad()), at::full({4}, 6.f)));
  });
}

// What is no tensor reaches the module as the caller's.
TEST(ParallelizeModuleTest, AHookedModuleGetsTheCallersOwnArguments) {
  struct StatefulImpl : nn::Module {
    std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x, std::vector<int>& calls,
                                               std::unique_ptr<int> number,
                                               const std::optional<at::Tensor>& mask) {
      calls.push_back(*number);
      return {x + 1, mask.has_value() ? *mask : x};
    }
  };
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    nn::ModuleHolder<Hooked<StatefulImpl>> model;
    const auto with = [&](const char* pattern) {
      nn::ModuleHolder<Hooked<StatefulImpl>> made;
      parallelize_module(*made, mesh,
                         {.parameter = {}, .forward = {{pattern, {{"tp", Shard(0)}}}}});
      return made;
    };
    const at::Tensor x = ones({4}, mesh, {Replicate()});
    std::vector<int> calls;
    const auto [a, b] = with("output.1")->forward(x, calls, std::make_unique<int>(5), x);
    EXPECT_EQ(calls, std::vector<int>{5});
    EXPECT_EQ(layout_of(a).to_string(), "[R]");
    EXPECT_EQ(layout_of(b).to_string(), "[S(0)]");
    const auto mask = std::get<1>(with("input.1")->forward(x, calls, std::make_unique<int>(6), x));
    EXPECT_EQ(layout_of(mask).to_string(), "[S(0)]");
    EXPECT_EQ(layout_of(x).to_string(), "[R]");
    try {
      with("output.2")->forward(x, calls, std::make_unique<int>(7), x);
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_THAT(std::string(error.status().message()),
                  HasSubstr("the plan's 'output.2': there are only 2 tensors"));
    }
  });
}

std::string error_of(const ShardingPlan& plan, absl::StatusCode code) {
  std::string text;
  on_mesh({{"dp", 2}, {"tp", 2}}, [&](const MeshPtr& mesh) {
    Gpt model;
    std::string mine = "no error";
    try {
      parallelize_module(*model, mesh, plan);
    } catch (const Error& error) {
      EXPECT_EQ(error.status().code(), code) << error.status();
      mine = error.what_without_backtrace();
    }
    for (const at::Tensor& p : model->parameters()) EXPECT_FALSE(is_dtensor(p));
    if (mesh->coordinate()[0] == 0 && mesh->coordinate()[1] == 0) text = mine;
  });
  return text;
}

TEST(ParallelizeModuleTest, ErrorsComeBeforeAnythingChanges) {
  const auto forward = [](const char* pattern, PlanPlacements placements, absl::StatusCode code) {
    return error_of({.parameter = {}, .forward = {{pattern, std::move(placements)}}}, code);
  };
  const PlanPlacements rows = {{"tp", Shard(0)}};
  const auto invalid = absl::StatusCode::kInvalidArgument;
  EXPECT_THAT(forward("h0", rows, invalid), HasSubstr("'h0' does not say which value; wanted"));
  EXPECT_THAT(forward("h0.input.", rows, invalid), HasSubstr("no index and no argument's name"));
  EXPECT_THAT(forward("h0.output.x", rows, invalid), HasSubstr("results have no names"));
  EXPECT_THAT(forward("h{0.input", rows, invalid), HasSubstr("has a '{' without"));
  EXPECT_THAT(forward("h0.input", {Shard(0)}, invalid),
              HasSubstr("[S(0)] has 1 placements; DeviceMesh(dp=2, tp=2) wants 2"));
  EXPECT_THAT(forward("h0.input", {{"pp", Shard(0)}}, absl::StatusCode::kNotFound),
              HasSubstr("has no dimension \"pp\""));
  EXPECT_THAT(forward("h0.upp.input", rows, absl::StatusCode::kNotFound),
              AllOf(HasSubstr("the plan's forward entry 1, 'h0.upp.input' matches no module"),
                    HasSubstr("did you mean 'h0.up'")));
  EXPECT_THAT(forward("input", rows, absl::StatusCode::kFailedPrecondition),
              AllOf(HasSubstr("the forward of the model itself"),
                    HasSubstr("has no parameter of its own; make it as Hooked<Impl>")));
  const PlanPlacements dp_rows = {{"dp", Shard(0)}};
  EXPECT_THAT(
      error_of(
          {.parameter = {},
           .forward = {{"*.up.input", dp_rows}, {"h0.up.input", rows}, {"h1.up.input.0", rows}}},
          invalid),
      HasSubstr("the plan's forward entry 1, '*.up.input', decides nothing"));
  EXPECT_THAT(
      error_of({.parameter = {}, .forward = {{"h0.*.input", rows}, {"*.up.input", dp_rows}}},
               invalid),
      AllOf(HasSubstr("'h0.up.input.0' is given two placements"), HasSubstr("equally specific")));
  EXPECT_THAT(
      error_of({.parameter = {{"nothing", {}}}, .forward = {}}, absl::StatusCode::kNotFound),
      HasSubstr("matches no parameter"));
}

// With a source, too, where values may differ: no rank waits for another, and none goes its own way.
TEST(ParallelizeModuleTest, RanksOfDifferentPlansHearOfIt) {
  const auto expect = [](const std::function<ShardingPlan(int)>& plan_of, const char* mistaken,
                         const char* others) {
    on_mesh({{"dp", 1}, {"tp", 3}}, [&](const MeshPtr& mesh) {
      const int rank = mesh->coordinate()[1];
      Gpt model;
      try {
        parallelize_module(*model, mesh, plan_of(rank));
        ADD_FAILURE() << "no error";
      } catch (const Error& error) {
        EXPECT_THAT(error.what_without_backtrace(), HasSubstr(rank == 1 ? mistaken : others));
      }
      for (const at::Tensor& p : model->parameters()) EXPECT_FALSE(is_dtensor(p));
    });
  };
  const char* kOthers = "it was refused on other ranks";
  expect(
      [](int rank) -> ShardingPlan { return {{{"h0.up.weight", {{"tp", Shard(rank == 1)}}}}, {}}; },
      "'h0.up.weight': is not the same on ranks 0 and 1 (name, shape, dtype or placements)",
      "'h0.up.weight': is not the same on ranks 0 and 1");
  expect(
      [](int rank) -> ShardingPlan {
        return {{}, {{"h0.up.input", {{"tp", rank == 1 ? Shard(0) : Replicate()}}}}};
      },
      "ranks 0 and 1 have different numbers of parameters and buffers, forward entries",
      "ranks 0 and 1 have different");
  expect(
      [](int rank) -> ShardingPlan {
        return {{{rank == 1 ? "nothing" : "h0.up.weight", {{"tp", Shard(0)}}}}, {}};
      },
      "matches no parameter", kOthers);
  expect(
      [](int rank) -> ShardingPlan {
        return {{}, {{rank == 1 ? "nothing.input" : "h0.up.input", {{"tp", Shard(0)}}}}};
      },
      "matches no module", kOthers);
}

// What would be done, with nothing done; and the same errors.
TEST(ParallelizeModuleTest, APlanIsResolvedWithoutDoingAnything) {
  on_mesh({{"dp", 2}, {"tp", 2}}, [](const MeshPtr& mesh) {
    Gpt model;
    const ShardingPlan plan = {
        .parameter = {{"*.{q,k,v}.weight", {{"tp", Shard(0)}}}},
        .forward = {{"h*.norm1.input", {{"tp", Shard(1)}}},
                    {"h1.norm1.input", {Replicate(), Shard(-2)}},
                    {"h?.input", {{"dp", Shard(0)}}},
                    {"head.output.0", Layout::parse("[S(0), R]").value()},
                    {"head.input.weight", {{"tp", Replicate()}, {"dp", Shard(0)}}}},
    };
    const ResolvedPlan resolved = resolve_sharding_plan(*model, mesh->mesh(), plan);
    EXPECT_FALSE(is_dtensor(model->head->weight));
    EXPECT_EQ(resolved.tensors.size(), model->parameters().size());
    std::vector<std::string> forward;
    for (const ResolvedForward& f : resolved.forward) {
      forward.push_back(f.module + "." + f.value + " by " + std::to_string(f.entry) + " " +
                        f.pattern);
      EXPECT_EQ(f.placements, plan.forward[f.entry].placements);
    }
    EXPECT_EQ(forward,
              (std::vector<std::string>{
                  "h0.input.0 by 2 h?.input", "h0.norm1.input.0 by 0 h*.norm1.input",
                  "h1.input.0 by 2 h?.input", "h1.norm1.input.0 by 1 h1.norm1.input",
                  "head.input.weight by 4 head.input.weight", "head.output.0 by 3 head.output.0"}));
    const std::string table = to_string(resolved);
    EXPECT_THAT(table, HasSubstr("h0.q.weight"));
    EXPECT_THAT(table, HasSubstr("h1.norm1  input.0       [R, S(-2)]       'h1.norm1.input'"));
    EXPECT_THAT(table, HasSubstr("tp: R, dp: S(0)"));
    const std::string json = resolved_to_json(resolved);
    EXPECT_THAT(json,
                HasSubstr(R"json({"names":["h0.q.weight"],"shape":[12,12],"is_buffer":false,)json"
                          R"json("layout":"[R, S(0)]","local_shape":[6,12],)json"
                          R"json("pattern":"*.{q,k,v}.weight"})json"));
    EXPECT_THAT(json, HasSubstr(R"json("local_shape":[11,12],"pattern":null})json"));
    EXPECT_THAT(json,
                HasSubstr(R"json({"module":"h0","value":"input.0","placements":{"dp":"S(0)"},)json"
                          R"json("pattern":"h?.input"})json"));
    for (const ShardingPlan& wrong : {ShardingPlan{.forward = {{"h0.nrom1.input", {}}}},
                                      ShardingPlan{.parameter = {{"h0.q.wieght", {}}}}}) {
      try {
        resolve_sharding_plan(*model, mesh->mesh(), wrong);
        ADD_FAILURE() << "nothing is wrong";
      } catch (const Error& error) {
        EXPECT_EQ(error.status().code(), absl::StatusCode::kNotFound) << error.what();
      }
    }
  });
}

TEST(ParallelizeModuleTest, AWeightThatTwoModulesShareTellsNoneOfThem) {
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    nn::Module model;
    const at::Tensor weight = at::ones({4, 4});
    for (const char* name : {"embedding", "head"}) {
      auto layer = std::make_shared<nn::Module>();
      layer->register_parameter("weight", weight);
      model.register_module(name, layer);
    }
    try {
      parallelize_module(model, mesh,
                         {.parameter = {}, .forward = {{"head.output", {{"tp", Shard(0)}}}}});
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.status().code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_THAT(std::string(error.status().message()),
                  HasSubstr("it shares its weight with 'embedding'"));
    }
    EXPECT_FALSE(is_dtensor(weight));
  });
}

// A Hooked module knows itself where its forward begins, whoever has its weight.
TEST(ParallelizeModuleTest, AHookedModuleMayShareItsWeight) {
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    struct Tied : nn::Module {
      Tied() {
        embedding = register_module("embedding", nn::Embedding(6, 4));
        head = register_module("head", Head());
        head->weight = head->register_parameter("weight", embedding->weight);
      }
      struct HeadImpl : nn::Module {
        at::Tensor forward(const at::Tensor& x) { return x.matmul(weight.t()); }
        at::Tensor weight;
      };
      using Head = nn::ModuleHolder<Hooked<HeadImpl>>;
      nn::Embedding embedding = nullptr;
      Head head = nullptr;
    };
    Tied model;
    parallelize_module(model, mesh,
                       {.parameter = {{"embedding.weight", {{"tp", Shard(0)}}}},
                        .forward = {{"head.output", {{"tp", Replicate()}}}}});
    const at::Tensor whole = full_tensor(model.embedding->weight.detach());
    const at::Tensor y = model.head->forward(at::ones({2, 4}));
    EXPECT_EQ(layout_of(y).to_string(), "[R]");
    EXPECT_TRUE(at::allclose(full_tensor(y.detach()), at::ones({2, 4}).matmul(whole.t())));
  });
}

// The only parameter of a whole block tells where that is used, not where the block begins and ends.
TEST(ParallelizeModuleTest, ABlockIsNotMetAtAParameterOfItsOwn) {
  struct ScaledImpl : nn::Module {
    at::Tensor gamma = register_parameter("gamma", at::ones({4}));
    nn::Linear inner = register_module("inner", nn::Linear(4, 4));
  };
  struct TwiceImpl : nn::Module {
    TwiceImpl() {
      Block block;
      register_module("a", block);
      register_module("b", block);
    }
  };
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    const auto refused = [&](nn::Module& module, const char* pattern, const char* why) {
      try {
        parallelize_module(module, mesh,
                           {.parameter = {}, .forward = {{pattern, {{"tp", Shard(0)}}}}});
        ADD_FAILURE() << "no error";
      } catch (const Error& error) {
        EXPECT_THAT(std::string(error.status().message()), HasSubstr(why));
      }
    };
    ScaledImpl scaled;
    refused(scaled, "output", "cannot be met: it consists of modules");
    TwiceImpl twice;
    refused(twice, "b.output", "cannot be met: it is registered as 'a', too");
  });
}

// Of an attention's packed weight: what a module of several parameters is given.
TEST(ParallelizeModuleTest, AParameterIsMetByItsName) {
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    const auto entry = [](const char* pattern, const Placement& p) {
      return ForwardEntry{pattern, {{"tp", p}}};
    };
    nn::MultiheadAttention attention(nn::MultiheadAttentionOptions(4, 2));
    parallelize_module(*attention, mesh,
                       {.parameter = {{"in_proj_*", {{"tp", StridedShard(0, 3)}}}},
                        .forward = {entry("in_proj_weight.input", Replicate())}});
    const at::Tensor x = zeros({6, 2, 4}, mesh, {Shard(0)});
    const CommTrace trace(mesh);
    at::linear(x, attention->in_proj_weight, attention->in_proj_bias);
    ASSERT_EQ(trace.events().size(), 1u);
    EXPECT_EQ(trace.events()[0].collective, "all_gather");
    nn::MultiheadAttention other(nn::MultiheadAttentionOptions(4, 2));
    const auto refused = [&](ForwardPlan forward, const char* why) {
      try {
        parallelize_module(*other, mesh, {.parameter = {}, .forward = std::move(forward)});
        ADD_FAILURE() << "no error: " << why;
      } catch (const Error& error) {
        EXPECT_THAT(std::string(error.status().message()), HasSubstr(why));
      }
      EXPECT_FALSE(is_dtensor(other->in_proj_weight));
    };
    refused({entry("in_proj*.input", Replicate())}, "matches no module");
    refused({entry("out_proj.input", Replicate()), entry("out_proj.weight.input", Replicate())},
            "'out_proj' and of 'out_proj.weight', which are met at one parameter");
  });
}

// Layers beside each other that want one tensor in one place get it by one gather, and what is
// another tensor, or has been written since, by one more.
TEST(ParallelizeModuleTest, SiblingsShareWhatWasGathered) {
  struct ThreeImpl : nn::Module {
    nn::Linear q = register_module("q", nn::Linear(4, 4));
    nn::Linear k = register_module("k", nn::Linear(4, 4));
    nn::Linear v = register_module("v", nn::Linear(4, 4));
  };
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    auto model = std::make_shared<ThreeImpl>();
    parallelize_module(*model, mesh,
                       {.parameter = {{"*.weight", {{"tp", Shard(0)}}}},
                        .forward = {{"?.input", {{"tp", Replicate()}}}}});
    const auto gathers = [&](bool requires_grad,
                             const std::function<void(const at::Tensor&)>& body) {
      const at::Tensor x = ones({6, 4}, mesh, {Shard(0)}).requires_grad_(requires_grad).mul(2);
      const CommTrace trace(mesh);
      body(x);
      const auto is_gather = [](const CommEvent& event) {
        return event.collective == "all_gather" && event.op == "redistribute";
      };
      return std::count_if(trace.events().begin(), trace.events().end(), is_gather);
    };
    for (const bool requires_grad : {false, true}) {
      EXPECT_EQ(1, gathers(requires_grad, [&](const at::Tensor& x) {
                  model->q(x);
                  model->k(x);
                  model->v(x);
                }));
      EXPECT_EQ(2, gathers(requires_grad, [&](const at::Tensor& x) {  // two passes
                  for (int i = 0; i < 2; ++i) {
                    model->q(x);
                    model->k(x);
                  }
                }));
      EXPECT_EQ(3, gathers(requires_grad, [&](const at::Tensor& x) {
                  model->q(x);
                  model->k(x);
                  model->v(x * 1);
                  model->v(x);
                }));
      EXPECT_EQ(
          2, gathers(requires_grad, [&](const at::Tensor& x) {
            model->q(x);
            x.detach().mul_(3);  // shares its memory and its version
            const at::Tensor y = model->k(x).detach();
            const nn::Linear& k = model->k;
            EXPECT_TRUE(at::allclose(
                full_tensor(y), at::linear(at::full({6, 4}, 6.0f), full_tensor(k->weight.detach()),
                                           full_tensor(k->bias.detach()))));
          }));
    }
    EXPECT_EQ(2, gathers(true, [&](const at::Tensor& x) {
                model->q(x);
                const at::NoGradGuard no_grad;
                model->k(x);
              }));
  });
}

// A write to a local part is seen on all ranks alike, also where one rank alone has written.
TEST(ParallelizeModuleTest, SiblingsShareNothingThatWasHandedOut) {
  struct TwoImpl : nn::Module {
    nn::Linear q = register_module("q", nn::Linear(4, 4));
    nn::Linear k = register_module("k", nn::Linear(4, 4));
  };
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    auto model = std::make_shared<TwoImpl>();
    parallelize_module(*model, mesh,
                       {.parameter = {{"*.weight", {{"tp", Shard(0)}}}},
                        .forward = {{"?.input", {{"tp", Replicate()}}}}});
    const nn::Linear& k = model->k;
    const at::Tensor weight = full_tensor(k->weight.detach());
    const at::Tensor bias = full_tensor(k->bias.detach());
    const int rank = mesh->rank().value;
    const auto expect_k = [&](const at::Tensor& x, const at::Tensor& whole) {
      const at::Tensor y = full_tensor(model->k(x).detach());
      EXPECT_TRUE(at::allclose(y, at::linear(whole, weight, bias))) << y;
    };
    const at::Tensor threes = at::full({6, 4}, 3.0f);
    at::Tensor first_threes = at::ones({6, 4});
    first_threes.narrow(0, 0, 3).fill_(3);
    using Handle = std::function<at::Tensor(const at::Tensor&)>;
    const std::vector<Handle> handles = {[](const at::Tensor& x) { return x; },
                                         [](const at::Tensor& x) { return x.detach(); },
                                         [](const at::Tensor& x) { return x.t(); }};
    for (const bool requires_grad : {false, true}) {
      const auto input = [&] {
        return ones({6, 4}, mesh, {Shard(0)}).requires_grad_(requires_grad).mul(1);
      };
      for (const Handle& handle : handles) {
        at::Tensor x = input();
        model->q(x);
        to_local(handle(x)).detach().mul_(3);
        expect_k(x, threes);
        x = input();  // handed out before
        const at::Tensor part = to_local(handle(x)).detach();
        model->q(x);
        part.mul_(3);
        expect_k(x, threes);
        x = input();
        model->q(x);
        const at::Tensor of_one = to_local(handle(x)).detach();
        if (rank == 0) of_one.mul_(3);
        expect_k(x, first_threes);
        x = input();  // by a handle with a version of its own
        model->q(x);
        handle(x).data().mul_(3);
        expect_k(x, threes);
      }
    }
    const at::Tensor fed = at::ones({3, 4});
    const at::Tensor x = from_local(fed, mesh, {Shard(0)});
    model->q(x);
    fed.mul_(3);
    expect_k(x, threes);
  });
}

// What is shared leads to the weights: a model, and what it has gathered, go when they are let go,
// also where siblings are left that never read it.
TEST(ParallelizeModuleTest, WhatSiblingsShareEndsWithTheActivation) {
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  const auto weak = [](const at::Tensor& tensor) { return WeakTensor(tensor.getIntrusivePtr()); };
  struct LanguageModelImpl : nn::Module {
    nn::Embedding embedding = register_module("embedding", nn::Embedding(kVocabulary, 4));
    nn::Linear q = register_module("q", nn::Linear(4, 4));
    nn::Linear k = register_module("k", nn::Linear(4, 4));
    nn::Linear head = register_module("head", nn::Linear(4, 8));
  };
  on_mesh({{"tp", 2}}, [&](const MeshPtr& mesh) {
    const at::Tensor tokens = distribute_tensor(tokens_of(2, 4), mesh, NamedPlacements{});
    for (const bool backward : {false, true}) {
      for (const bool throws : {false, true}) {
        auto model = std::make_shared<LanguageModelImpl>();
        parallelize_module(*model, mesh,
                           StylePlan{{"embedding", RowwiseParallel{.output = Shard(1)}},
                                     {"q", ColwiseParallel()},
                                     {"k", ColwiseParallel()},
                                     {"head", ColwiseParallel()}});
        const WeakTensor parameter = weak(model->embedding->weight);
        std::vector<WeakTensor> activations;
        for (int step = 0; step < 2; ++step) {
          try {
            const at::Tensor x = model->embedding(tokens);
            activations.push_back(weak(x));
            const at::Tensor q = model->q(x);
            if (throws) throw std::runtime_error("between q and k");
            const at::Tensor h = x.relu();  // autograd saves a copy of it
            activations.push_back(weak(h));
            const at::Tensor loss = model->head(h).sum() + q.sum();
            if (backward) loss.backward();
          } catch (const std::runtime_error&) {
          }
          for (const WeakTensor& activation : activations) EXPECT_TRUE(activation.expired());
        }
        model.reset();
        EXPECT_TRUE(parameter.expired()) << backward << throws;
      }
    }
  });
}

TEST(ParallelizeModuleTest, APlacementThatATensorCannotHaveNamesTheModule) {
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    Gpt model;
    parallelize_module(*model, mesh,
                       {.parameter = {}, .forward = {{"norm.input", {{"tp", Shard(3)}}}}},
                       {.source = std::nullopt});
    const at::Tensor tokens =
        distribute_tensor(tokens_of(2, 4), mesh, NamedPlacements{}, {.source = std::nullopt});
    try {
      model->forward(tokens);
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_THAT(std::string(error.status().message()),
                  AllOf(HasSubstr("the plan's 'norm.input.0': "), HasSubstr("S(3)")));
    }
  });
}

// A cast of a weight of a plan is made anew in each step, and has the weight's name.
TEST(ParallelizeModuleTest, ACastWeightThatIsGatheredIsNamedOnce) {
  struct Warnings final : c10::WarningHandler {
    void process(const c10::Warning& warning) override { said.push_back(warning.msg()); }
    std::vector<std::string> said;
  };
  struct NetImpl : nn::Module {
    nn::Linear up = register_module("up", nn::Linear(nn::LinearOptions(6, 8).bias(false)));
    nn::Linear down = register_module("down", nn::Linear(nn::LinearOptions(8, 6).bias(false)));
    at::Tensor forward(const at::Tensor& x) {
      const at::Tensor y = at::matmul(x, up->weight.to(x.scalar_type()).t());
      return at::matmul(y, down->weight.to(x.scalar_type()).t());
    }
  };
  for (const bool converted : {false, true}) {
    on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
      Warnings warnings;
      const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
      NetImpl model;
      parallelize_module(model, mesh,
                         {.parameter = {{"*.weight", {{"dp", Shard(0)}}}},
                          .forward = {{"{up,down}.output", {{"dp", Shard(0)}}}}});
      const at::ScalarType dtype = converted ? at::kFloat : at::kDouble;
      if (converted) model.to(at::kDouble), model.to(at::kFloat);
      const at::Tensor x = distribute_tensor(at::ones({64, 6}, dtype), mesh, {{"dp", Shard(0)}});
      const at::Tensor wanted =
          at::linear(at::linear(at::ones({64, 6}, dtype), full_tensor(model.up->weight).to(dtype)),
                     full_tensor(model.down->weight).to(dtype));
      for (int step = 0; step < 4; ++step) {
        EXPECT_TRUE(at::allclose(full_tensor(model.forward(x)), wanted));
        const at::NoGradGuard no_grad;  // a step of an optimizer ends what is remembered of it
        for (at::Tensor& p : model.parameters()) p.mul_(1);
      }
      if (mesh->coordinate()[0] != 0) return;
      std::erase_if(warnings.said, [](const std::string& text) {
        return text.find("weight") == std::string::npos ||
               text.find("has not been applied") != std::string::npos;
      });
      ASSERT_EQ(warnings.said.size(), 2U) << ::testing::PrintToString(warnings.said);
      EXPECT_THAT(warnings.said[0], HasSubstr("the weight 'up.weight'"));
      EXPECT_THAT(warnings.said[1], AllOf(HasSubstr("as 'up.weight' is, 1 more weight is"),
                                          HasSubstr("down.weight")));
    });
  }
}

// What is brought into the shape or the type of a weight is no weight, and has no plan.
TEST(ParallelizeModuleTest, AnInputThatBecomesLikeAWeightIsAnInput) {
  struct NetImpl : nn::Module {
    nn::Linear q = register_module("q", nn::Linear(4, 4));
    nn::Linear k = register_module("k", nn::Linear(4, 4));
  };
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    NetImpl model;
    parallelize_module(
        model, mesh,
        {.parameter = {},
         .forward = {{"q.output", {{"tp", Shard(0)}}}, {"k.output", {{"tp", Shard(1)}}}}});
    at::Tensor x = distribute_tensor(at::ones({4, 4}), mesh, NamedPlacements{});
    for (const auto& like :
         {x.to(model.q->weight), x.view_as(model.q->weight), x.expand_as(model.q->weight)}) {
      EXPECT_EQ(layout_of(model.q(like)), Layout({Shard(0)}));
      EXPECT_EQ(layout_of(model.k(like)), Layout({Shard(1)}));
    }
  });
}

}  // namespace
}  // namespace shardweave
