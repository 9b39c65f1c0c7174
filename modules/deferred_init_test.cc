// Models that are constructed without memory: what each rank makes of its parts is, bit by bit, the
// part of what one rank makes; nothing else is made; and what needs values before says so.
#include "shardweave/modules/deferred_init.h"

#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "shardweave/dtensor/observe/comm_trace.h"
#include "shardweave/dtensor/random.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/modules/parallelize_module.h"
#include "torch/nn/init.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/activation.h"
#include "torch/nn/modules/batchnorm.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/conv.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/modules/normalization.h"
#include "torch/nn/modules/rnn.h"
#include "torch/nn/modules/transformerlayer.h"
#include "torch/nn/pimpl.h"
#include "torch/types.h"

namespace shardweave {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::on_mesh;
using testing::try_on_mesh;
namespace nn = torch::nn;

using Make = std::function<std::shared_ptr<nn::Module>()>;
using Values = std::map<std::string, at::Tensor>;

template <typename Holder, typename... Args>
Make of(const Args&... args) {
  return [=] { return std::static_pointer_cast<nn::Module>(Holder(args...).ptr()); };
}

Values values_of(const nn::Module& module) {
  Values values;
  const auto add = [&](const auto& named) {
    for (const auto& item : named) {
      const at::Tensor& t = item.value();
      if (t.defined()) values[item.key()] = (is_dtensor(t) ? full_tensor(t) : t).detach().clone();
    }
  };
  add(module.named_parameters());
  add(module.named_buffers());
  return values;
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() && a.equal(b);
}

// On one rank, by the same call.
Values one_rank(const Make& make, uint64_t seed = 42) {
  Values values;
  on_mesh({{"one", 1}}, [&](const MeshPtr& mesh) {
    manual_seed(mesh, seed);
    const auto model = deferred_init(make);
    distribute_module(*model, mesh, {});
    materialize(*model);
    values = values_of(*model);
  });
  return values;
}

const std::vector<std::vector<MeshDim>> kMeshes = {
    {{"a", 1}}, {{"a", 2}}, {{"a", 3}}, {{"a", 2}, {"b", 2}}, {{"a", 2}, {"b", 1}, {"c", 2}}};

// Every parameter cut along its first dimension by one mesh dimension and along its last by others,
// as far as it has them; both ways.
ParameterPlan cut(const nn::Module& model, const MeshPtr& mesh, bool backwards) {
  ParameterPlan plan;
  const auto add = [&](const auto& named) {
    for (const auto& item : named) {
      if (!item.value().defined()) continue;
      const auto dims = static_cast<int>(item.value().dim());
      Placements placements(mesh->mesh().ndim());
      for (int m = 0; m < mesh->mesh().ndim() && dims > 0; ++m) {
        placements[m] = Shard((backwards ? dims - 1 + m : m) % dims);
      }
      plan.push_back({item.key(), placements});
    }
  };
  add(model.named_parameters());
  add(model.named_buffers());
  return plan;
}

// On all meshes: the parts of what one rank makes.
void expect_parts_of_one_rank(const Make& make) {
  const Values whole = one_rank(make);
  ASSERT_FALSE(whole.empty());
  // On no mesh every tensor is made whole, by LibTorch's operators as they were recorded.
  const auto plain = deferred_init(make);
  materialize(*plain, {.seed = 42});
  for (const auto& [fqn, value] : values_of(*plain)) {
    EXPECT_TRUE(same_bits(value, whole.at(fqn))) << fqn << "\n" << value << whole.at(fqn);
  }
  for (const auto& dims : kMeshes) {
    for (const bool backwards : {false, true}) {
      on_mesh(dims, [&](const MeshPtr& mesh) {
        manual_seed(mesh, 42);
        const auto model = deferred_init(make);
        distribute_module(*model, mesh, cut(*model, mesh, backwards));
        materialize(*model);
        for (const auto& [fqn, value] : values_of(*model)) {
          EXPECT_TRUE(same_bits(value, whole.at(fqn)))
              << fqn << " on " << mesh->mesh().to_string() << "\n"
              << value << "\nwanted\n"
              << whole.at(fqn);
        }
      });
    }
  }
}

TEST(DeferredInitTest, LayersOfEveryKindAreThePartsOfOneRanks) {
  expect_parts_of_one_rank(of<nn::Linear>(7, 5));
  expect_parts_of_one_rank(of<nn::Linear>(nn::LinearOptions(1, 2).bias(false)));  // empty parts
  expect_parts_of_one_rank(of<nn::Bilinear>(3, 5, 2));
  expect_parts_of_one_rank(of<nn::Conv1d>(nn::Conv1dOptions(3, 5, 3)));
  expect_parts_of_one_rank(of<nn::Conv2d>(nn::Conv2dOptions(4, 7, 3).groups(1)));
  expect_parts_of_one_rank(of<nn::ConvTranspose2d>(nn::ConvTranspose2dOptions(3, 5, 2)));
  expect_parts_of_one_rank(of<nn::Embedding>(nn::EmbeddingOptions(7, 5).padding_idx(3)));
  expect_parts_of_one_rank(of<nn::EmbeddingBag>(7, 3));
  expect_parts_of_one_rank(of<nn::LayerNorm>(nn::LayerNormOptions({5})));
  expect_parts_of_one_rank(of<nn::GroupNorm>(nn::GroupNormOptions(2, 6)));
  expect_parts_of_one_rank(of<nn::BatchNorm2d>(5));
  expect_parts_of_one_rank(of<nn::PReLU>(nn::PReLUOptions().num_parameters(3)));
  expect_parts_of_one_rank(of<nn::LSTM>(nn::LSTMOptions(3, 5).num_layers(2).bidirectional(true)));
  expect_parts_of_one_rank(of<nn::GRUCell>(3, 5));
}

TEST(DeferredInitTest, AttentionAndTransformerLayersToo) {
  expect_parts_of_one_rank(of<nn::MultiheadAttention>(6, 3));
  expect_parts_of_one_rank(
      of<nn::MultiheadAttention>(nn::MultiheadAttentionOptions(6, 2).kdim(5).vdim(4)));
  expect_parts_of_one_rank(
      of<nn::TransformerEncoderLayer>(nn::TransformerEncoderLayerOptions(6, 2).dim_feedforward(7)));
  expect_parts_of_one_rank(
      of<nn::TransformerDecoderLayer>(nn::TransformerDecoderLayerOptions(6, 2).dim_feedforward(7)));
}

// A module of whatever a function registers.
std::shared_ptr<nn::Module> made_by(const std::function<void(nn::Module&)>& make) {
  auto module = std::make_shared<nn::Module>("Made");
  make(*module);
  return module;
}

TEST(DeferredInitTest, InitialisersOfEveryKind) {
  expect_parts_of_one_rank([] {
    return made_by([](nn::Module& m) {
      const c10::NoGradGuard no_grad;
      const auto parameter = [&](const char* name) {
        return m.register_parameter(name, torch::empty({6, 5}));
      };
      nn::init::xavier_normal_(parameter("xavier_normal"));
      nn::init::xavier_uniform_(parameter("xavier_uniform"));
      nn::init::kaiming_normal_(parameter("kaiming_normal"));
      nn::init::orthogonal_(parameter("orthogonal"), 1.4);
      nn::init::eye_(parameter("eye"));
      nn::init::constant_(parameter("constant"), 2.5);
      nn::init::ones_(parameter("ones"));
      nn::init::zeros_(parameter("zeros"));
      parameter("bernoulli").bernoulli_(0.3);
      parameter("exponential").exponential_(1.5);
      // As timm's trunc_normal_.
      parameter("truncated").uniform_(-0.9, 0.9).erfinv_().mul_(0.02 * std::sqrt(2.)).clamp_(-2, 2);
    });
  });
}

TEST(DeferredInitTest, WhatIsComputedFromOtherTensors) {
  expect_parts_of_one_rank([] {
    return made_by([](nn::Module& m) {
      const c10::NoGradGuard no_grad;
      m.register_parameter("scaled", torch::randn({7, 5}) * 0.02);
      m.register_parameter("transposed", torch::rand({5, 7}).t());
      m.register_parameter("integers", torch::randint(0, 100, {7, 3}).to(torch::kFloat));
      m.register_parameter("sum", torch::randn({7, 5}).add_(torch::ones({7, 5}).div_(3)));
      m.register_parameter("alpha", torch::randn({7, 5}).add_(torch::rand({7, 5}), 0.3));
      m.register_buffer("inv_freq",
                        1.0 / torch::pow(10000.0, torch::arange(0, 14, 2).to(torch::kFloat) / 14));
      m.register_buffer("mask", torch::ones({5, 5}, torch::kBool).tril());
      m.register_buffer("range", torch::arange(9).view({3, 3}));
      m.register_buffer("constants", torch::tensor({0.485, 0.456, 0.406}));
      m.register_buffer("from_constants", torch::tensor({1.5, 2.5}) * torch::full({2}, 0.1));
      // Parts of one tensor, each with numbers of its own.
      const at::Tensor qkv = m.register_parameter("qkv", torch::empty({9, 5}));
      for (const at::Tensor& third : qkv.chunk(3, 0)) nn::init::xavier_uniform_(third);
      const at::Tensor bias = m.register_parameter("bias", torch::empty({12}).uniform_());
      bias.slice(0, 3, 6).fill_(1);
      bias.slice(0, 6, 12, 2).zero_();
      const at::Tensor box = m.register_parameter("box", torch::randn({3, 6, 5}));
      box.select(1, 4).mul_(2);
      box.narrow(0, 1, 2).narrow(2, 1, 3).copy_(torch::randn({2, 6, 3}));
      // Pieces of one random tensor.
      const auto pieces = torch::randn({6, 4}).split(2, 0);
      m.register_parameter("piece0", pieces[0].clone());
      m.register_parameter("piece2", pieces[2].clone());
      m.register_parameter("complex", torch::randn({3, 2}, torch::kComplexFloat));
    });
  });
}

TEST(DeferredInitTest, ViewsOfAnotherTypeAreOfTheSameBits) {
  expect_parts_of_one_rank([] {
    return made_by([](nn::Module& m) {
      const c10::NoGradGuard no_grad;
      m.register_buffer("filled", torch::full({6, 5}, 1.5).view(torch::kInt));
      m.register_buffer("drawn", torch::randn({6, 5}).view(torch::kInt));
      m.register_buffer("computed", torch::randn({6, 5}).mul_(2).view(torch::kInt) + 1);
      const at::Tensor written = m.register_parameter("written", torch::empty({6, 5}));
      written.view(torch::kInt).fill_(0x40490fdb);
      const at::Tensor cleared = m.register_parameter("cleared", torch::randn({6, 5}));
      cleared.narrow(0, 1, 2).view(torch::kInt).zero_();
      m.register_buffer("halves", torch::ones({6, 5}, torch::kBFloat16).view(torch::kHalf).neg());
    });
  });
}

TEST(DeferredInitTest, WhatWasReadBeforeItWasOverwrittenIsMade) {
  const Make make = [] {
    return made_by([](nn::Module& m) {
      const c10::NoGradGuard no_grad;
      const at::Tensor w = m.register_parameter("w", torch::empty({7, 5}));
      w.uniform_(2, 3);
      const at::Tensor low = w.lt(2.5).to(torch::kFloat), copy = w.clone();
      w.normal_();
      m.register_parameter("low", low.clone());
      w.mul_(low);
      m.register_parameter("copy", w + copy);
    });
  };
  expect_parts_of_one_rank(make);
  const Values values = one_rank(make);
  const at::Tensor uniform = values.at("copy") - values.at("w");
  EXPECT_TRUE(uniform.gt(1.99).logical_and(uniform.lt(3.01)).all().item<bool>()) << uniform;
  EXPECT_TRUE(values.at("low").equal(uniform.lt(2.5).to(at::kFloat)));
}

TEST(DeferredInitTest, AllTensorsOfAModelInOneCallInAnyOrderOfItsSubmodules) {
  const Make make = [] {
    nn::Sequential model(nn::Embedding(7, 6), nn::Linear(6, 5), nn::Linear(5, 3));
    nn::init::normal_(model->ptr<nn::LinearImpl>(1)->weight, 0, 0.02);  // a second time
    return std::static_pointer_cast<nn::Module>(model.ptr());
  };
  const Values whole = one_rank(make);
  on_mesh({{"tp", 2}}, [&](const MeshPtr& mesh) {
    manual_seed(mesh, 42);
    const auto model = deferred_init(make);
    distribute_module(*model, mesh, {{"*.weight", {{"tp", Shard(0)}}}});
    for (const size_t i : {2, 0, 1}) {
      for (const at::Tensor& t : model->children()[i]->parameters()) EXPECT_TRUE(is_deferred(t));
      materialize(*model->children()[i]);
      for (const at::Tensor& t : model->children()[i]->parameters()) EXPECT_FALSE(is_deferred(t));
    }
    materialize(*model);  // nothing is left
    for (const auto& [fqn, value] : values_of(*model)) {
      EXPECT_TRUE(same_bits(value, whole.at(fqn))) << fqn;
    }
    // What comes after draws other numbers, as after any random operator.
    const auto another = deferred_init(make);
    distribute_module(*another, mesh, {});
    materialize(*another);
    EXPECT_FALSE(same_bits(values_of(*another).at("1.weight"), whole.at("1.weight")));
  });
}

TEST(DeferredInitTest, ASeedGivesTheSameOnEveryMeshAndOnNone) {
  const Make make = of<nn::Linear>(7, 5);
  const auto plain = deferred_init(make);
  EXPECT_TRUE(is_deferred(plain->parameters()[0]));
  materialize(*plain, {.seed = 9});
  const Values whole = values_of(*plain);
  EXPECT_LE(whole.at("weight").abs().max().item<float>(), 1 / std::sqrt(7.f));
  EXPECT_GT(whole.at("weight").std().item<float>(), 0.1);
  EXPECT_TRUE(plain->parameters()[0].is_cpu());
  EXPECT_TRUE(plain->parameters()[0].requires_grad());
  on_mesh({{"tp", 2}}, [&](const MeshPtr& mesh) {
    const PhiloxState before = random_state(mesh);
    const auto model = deferred_init(make);
    distribute_module(*model, mesh, {{"weight", {Shard(1)}}});
    materialize(*model, {.seed = 9});
    for (const auto& [fqn, value] : values_of(*model)) {
      EXPECT_TRUE(same_bits(value, whole.at(fqn))) << fqn;
    }
    EXPECT_EQ(random_state(mesh), before);
  });
  // Without one it is drawn by LibTorch's generator.
  std::vector<at::Tensor> weights;
  for (int i = 0; i < 3; ++i) {
    if (i != 1) torch::manual_seed(3);
    const auto again = deferred_init(make);
    materialize(*again);
    weights.push_back(again->parameters()[0].detach());
  }
  EXPECT_FALSE(weights[0].equal(weights[1]));
  EXPECT_TRUE(weights[0].equal(weights[2]));
}

TEST(DeferredInitTest, AShardedModelTrainsAsOneDeviceDoes) {
  const Make make = [] {
    return std::static_pointer_cast<nn::Module>(
        nn::Sequential(nn::Linear(6, 8), nn::GELU(), nn::Linear(8, 4)).ptr());
  };
  const auto loss_of = [](nn::Module& model, const at::Tensor& x) {
    return model.as<nn::SequentialImpl>()->forward(x).square().mean();
  };
  const at::Tensor x = at::arange(18, at::kFloat).view({3, 6}) / 18;
  const auto plain = deferred_init(make);
  materialize(*plain, {.seed = 1});
  const at::Tensor loss = loss_of(*plain, x);
  loss.backward();
  on_mesh({{"tp", 2}}, [&](const MeshPtr& mesh) {
    const auto model = deferred_init(make);
    parallelize_module(
        *model, mesh,
        {.parameter = {{"0.*", {{"tp", Shard(0)}}}, {"2.weight", {{"tp", Shard(1)}}}},
         .forward = {{"2.output", {{"tp", Replicate()}}}}});
    materialize(*model, {.seed = 1});
    const at::Tensor sharded = full_tensor(loss_of(*model, distribute_tensor(x, mesh, {})));
    EXPECT_TRUE(at::allclose(sharded, loss)) << sharded << loss;
    sharded.backward();
    finish_grad_sync(*model);
    for (size_t i = 0; i < plain->parameters().size(); ++i) {
      EXPECT_TRUE(
          at::allclose(full_tensor(model->parameters()[i].grad()), plain->parameters()[i].grad()))
          << i;
    }
  });
}

// --- what is kept ---

TEST(DeferredInitTest, CastsWithinTheCallAndAfterIt) {
  const Make linear = [] {
    nn::Linear model(7, 5);
    model->to(torch::kBFloat16);
    return std::static_pointer_cast<nn::Module>(model.ptr());
  };
  expect_parts_of_one_rank(linear);
  const Values half = one_rank(linear);
  EXPECT_EQ(half.at("weight").scalar_type(), at::kBFloat16);
  const Values whole = one_rank(of<nn::Linear>(7, 5));
  EXPECT_TRUE(same_bits(half.at("weight"), whole.at("weight").to(at::kBFloat16)));
  on_mesh({{"tp", 2}}, [&](const MeshPtr& mesh) {
    manual_seed(mesh, 42);
    const auto model = deferred_init(of<nn::Linear>(7, 5));
    model->to(torch::kDouble);
    {
      const c10::NoGradGuard no_grad;
      model->parameters()[1].fill_(3);
    }
    distribute_module(*model, mesh, {{"*", {Shard(0)}}});
    materialize(*model);
    EXPECT_TRUE(same_bits(values_of(*model).at("weight"), whole.at("weight").to(at::kDouble)));
    EXPECT_TRUE(values_of(*model).at("bias").eq(3).all().item<bool>());
  });
}

struct TiedImpl : nn::Module {
  explicit TiedImpl(bool with_view) {
    embedding = register_module("embedding", nn::Embedding(7, 5));
    head = register_parameter("head", embedding->weight);
    if (with_view) half = register_buffer("half", embedding->weight.detach().narrow(0, 0, 3));
  }
  nn::Embedding embedding{nullptr};
  at::Tensor head, half;
};
TORCH_MODULE(Tied);

TEST(DeferredInitTest, TiedWeightsStayTiedAndViewsStayViews) {
  Tied plain = deferred_init([] { return Tied(true); });
  materialize(*plain, {.seed = 1});
  EXPECT_TRUE(plain->head.is_same(plain->embedding->weight));
  EXPECT_TRUE(plain->half.is_alias_of(plain->head));
  EXPECT_TRUE(plain->half.equal(plain->head.narrow(0, 0, 3)));
  // Sharded, the view would come apart: refused, as of tensors that are made.
  const absl::Status refused = try_on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    Tied model = deferred_init([] { return Tied(true); });
    distribute_module(*model, mesh, {});
  });
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("over the same memory"));
  on_mesh({{"tp", 2}}, [&](const MeshPtr& mesh) {
    Tied model = deferred_init([] { return Tied(false); });
    distribute_module(*model, mesh, {{"*", {Shard(0)}}});
    materialize(*model, {.seed = 1});
    EXPECT_TRUE(model->head.is_same(model->embedding->weight));
    EXPECT_TRUE(full_tensor(model->head).equal(plain->head));
  });
}

TEST(DeferredInitTest, OneCallWithinAnotherIsPartOfIt) {
  const Make nested = [] {
    return deferred_init([] {
      nn::Linear first(3, 4);
      nn::Linear second = deferred_init([] { return nn::Linear(4, 2); });
      return std::static_pointer_cast<nn::Module>(nn::Sequential(first, second).ptr());
    });
  };
  const Make flat = [] {
    nn::Linear first(3, 4), second(4, 2);  // in this order, which arguments of a call are not in
    return std::static_pointer_cast<nn::Module>(nn::Sequential(first, second).ptr());
  };
  const Values a = one_rank(nested), b = one_rank(flat);
  for (const auto& [fqn, value] : a) EXPECT_TRUE(same_bits(value, b.at(fqn))) << fqn;
}

TEST(DeferredInitTest, AnExceptionEndsItAndOtherThreadsAreNotInIt) {
  EXPECT_THROW(deferred_init([]() -> nn::Linear {
                 deferred_init([] { return nn::Linear(3, 4); });
                 throw std::runtime_error("no");
               }),
               std::runtime_error);
  EXPECT_FALSE(is_deferred(at::empty({3})));
  deferred_init([] {
    EXPECT_TRUE(is_deferred(at::empty({3})));
    std::thread([] { EXPECT_FALSE(is_deferred(at::empty({3}))); }).join();
  });
}

// --- given values ---

TEST(DeferredInitTest, AValueThatIsGivenReplacesTheDraw) {
  const at::Tensor given = at::arange(35, at::kDouble).view({5, 7});
  const Values drawn = one_rank(of<nn::Linear>(7, 5));
  on_mesh({{"dp", 2}, {"tp", 2}}, [&](const MeshPtr& mesh) {
    for (const bool as_dtensor : {false, true}) {
      manual_seed(mesh, 42);
      const auto model = deferred_init(of<nn::Linear>(7, 5));
      distribute_module(*model, mesh, {{"*", {{"tp", Shard(0)}}}});
      const at::Tensor value =
          as_dtensor ? distribute_tensor(given, mesh, {{"dp", Shard(1)}, {"tp", Shard(1)}}) : given;
      materialize(*model, {.values = {{"weight", value}}});
      const Values values = values_of(*model);
      EXPECT_TRUE(same_bits(values.at("weight"), given.to(at::kFloat)));
      EXPECT_TRUE(same_bits(values.at("bias"), drawn.at("bias")));  // as if nothing was given
    }
  });
  const auto plain = deferred_init(of<nn::Linear>(7, 5));
  materialize(*plain, {.seed = 1, .values = {{"weight", given}}});
  EXPECT_TRUE(same_bits(plain->parameters()[0].detach(), given.to(at::kFloat)));
}

TEST(DeferredInitTest, ValuesThatDoNotFitAreErrorsBeforeAnythingIsMade) {
  const auto error_of = [](std::vector<std::pair<std::string, at::Tensor>> values) {
    return try_on_mesh({{"tp", 2}}, [&](const MeshPtr& mesh) {
      const auto model = deferred_init(of<nn::Linear>(7, 5));
      distribute_module(*model, mesh, {});
      try {
        materialize(*model, {.values = values});
      } catch (...) {
        EXPECT_TRUE(is_deferred(model->parameters()[0]));
        throw;
      }
    });
  };
  const absl::Status unknown = error_of({{"wieght", at::zeros({5, 7})}});
  EXPECT_EQ(unknown.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(unknown.message()),
              AllOf(HasSubstr("'wieght'"), HasSubstr("did you mean 'weight'?")));
  const absl::Status shape = error_of({{"weight", at::zeros({7, 5})}});
  EXPECT_EQ(shape.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(shape.message()),
              AllOf(HasSubstr("'weight' has shape [7, 5]"), HasSubstr("wanted [5, 7]")));
  EXPECT_THAT(std::string(error_of({{"weight", at::Tensor()}}).message()), HasSubstr("undefined"));
  EXPECT_THAT(std::string(error_of({{"weight", at::zeros({5, 7}, at::kComplexFloat)}}).message()),
              HasSubstr("cannot become Float"));
  EXPECT_THAT(std::string(error_of({{"bias", at::zeros({5})}, {"bias", at::ones({5})}}).message()),
              HasSubstr("two values"));
}

TEST(DeferredInitTest, OneRanksMistakeReachesTheOthers) {
  for (const int kind : {0, 1, 2}) {
    std::vector<std::string> messages(2);
    on_mesh({{"tp", 2}}, [&](const MeshPtr& mesh) {
      const int64_t rank = mesh->coordinate()[0];
      manual_seed(mesh, kind == 0 && rank == 1 ? 7 : 42);
      auto model = deferred_init([&] {
        nn::Linear linear(7, 5);
        if (kind == 1 && rank == 1) nn::init::normal_(linear->weight);
        return linear;
      });
      distribute_module(*model, mesh, {{"*", {Shard(0)}}});
      MaterializeOptions options;
      if (kind == 2 && rank == 1) options.values = {{"wrong", at::zeros({1})}};
      try {
        materialize(*model, options);
        ADD_FAILURE() << "no error";
      } catch (const Error& error) {
        messages[rank] = error.what();
      }
    });
    EXPECT_THAT(messages[0], HasSubstr("would not be the same on ranks 0 and 1"));
    EXPECT_THAT(messages[1], HasSubstr(kind == 2 ? "'wrong'" : "would not be the same"));
  }
}

// --- errors ---

// Where `mesh` stands and what has no values yet.
struct Before {
  PhiloxState state;
  std::vector<bool> deferred;
  friend bool operator==(const Before&, const Before&) = default;
};
Before standing(const nn::Module& model, const std::vector<MeshPtr>& meshes) {
  Before result;
  for (const MeshPtr& mesh : meshes) {
    result.state.seed ^= random_state(mesh).seed * 31;
    result.state.offset = result.state.offset * 1000 + random_state(mesh).offset;
  }
  for (const at::Tensor& t : model.parameters()) result.deferred.push_back(is_deferred(t));
  return result;
}

// What is recorded from outside is copied up to 1 MiB; what is larger must stay as it is.
constexpr int64_t kLarge = 300007;

// However one rank fails, also when it has made some already: nothing has changed on any rank, and
// the next call draws what one rank would.
TEST(DeferredInitTest, AFailureLeavesEverythingAsItWasOnEveryRank) {
  const auto one_linear = [](const at::Tensor& outside) -> Make {
    return [outside] {
      nn::Linear linear(1, kLarge);
      const c10::AutoGradMode no_grad(false);
      if (outside.defined()) linear->bias.copy_(outside);
      return std::static_pointer_cast<nn::Module>(linear.ptr());
    };
  };
  const at::Tensor given = at::arange(kLarge, at::kFloat);
  for (const char* const kind : {"seed", "given", "late"}) {
    const bool late = std::string(kind) == "late";  // its bias, after its weight
    const Values wanted = one_rank(one_linear(late ? given : at::Tensor()));
    on_mesh({{"tp", 3}}, [&](const MeshPtr& mesh) {
      const bool fails = mesh->coordinate()[0] == 1;
      manual_seed(mesh, 42);
      const at::Tensor outside = given.clone();
      const auto model = deferred_init(one_linear(late ? outside : at::Tensor()));
      distribute_module(*model, mesh, {{"*", {Shard(0)}}});
      if (late && fails) outside.add_(1);
      MaterializeOptions options;
      if (std::string(kind) == "given" && fails) options.values = {{"bias", at::zeros({7})}};
      if (std::string(kind) == "seed" && fails) manual_seed(mesh, 7);
      for (int twice = 0; twice < 2; ++twice) {
        const Before before = standing(*model, {mesh});
        EXPECT_THROW(materialize(*model, options), Error) << kind;
        EXPECT_EQ(standing(*model, {mesh}), before) << kind;
        EXPECT_EQ(before.deferred, (std::vector<bool>{true, true}));
      }
      if (std::string(kind) == "seed" && fails) manual_seed(mesh, 42);
      MaterializeOptions repaired;
      if (late) repaired.values = {{"bias", given}};
      materialize(*model, repaired);
      for (const auto& [fqn, value] : values_of(*model)) {
        EXPECT_TRUE(same_bits(value, wanted.at(fqn))) << kind << ", " << fqn;
      }
    });
  }
}

TEST(DeferredInitTest, AFailureOnAMeshsSliceReachesTheWholeMesh) {
  for (const bool of_seeds : {false, true}) {
    on_mesh({{"dp", 2}, {"tp", 2}}, [&](const MeshPtr& mesh) {
      const MeshPtr tp = value_or_throw(mesh->slice({"tp"}));
      const at::Tensor outside = at::ones({kLarge});
      nn::Sequential model = deferred_init([&] {
        nn::Sequential made(nn::Linear(7, 1), nn::Linear(1, kLarge));
        const c10::AutoGradMode no_grad(false);
        made[1]->as<nn::Linear>()->bias.copy_(outside);
        return made;
      });
      distribute_module(*model[0], mesh, {});
      distribute_module(*model[1], tp, {});
      const PhiloxState state = random_state(tp);
      const int64_t rank = mesh->rank().value;
      if (rank == 3 && of_seeds) set_random_state(tp, {7, 0});
      if (rank == 3 && !of_seeds) outside.add_(1);
      const Before before = standing(*model, {mesh, tp});
      std::string message;
      try {
        materialize(*model);
        ADD_FAILURE() << "no error";
      } catch (const Error& error) {
        message = error.what();
      }
      // Of seeds the ranks 2 and 3 (0 and 1 of their slice) hear there, and the others from them.
      const char* const wanted =
          of_seeds    ? rank < 2 ? "it has failed on other ranks of"
                                 : "'1.weight' would not be the same on ranks 0 and 1"
          : rank == 3 ? "was written since"
                      : "'0.weight' would not be the same on ranks 0 and 3";
      EXPECT_THAT(message, HasSubstr(wanted));
      EXPECT_EQ(standing(*model, {mesh, tp}), before);
      EXPECT_EQ(before.deferred, std::vector<bool>(4, true));
      set_random_state(tp, state);
      materialize(*model, {.values = {{"1.bias", at::ones({kLarge})}}});
    });
  }
}

TEST(DeferredInitTest, WhatNeedsValuesNamesTheOperatorAndTheParameter) {
  const auto message = [](const std::function<void()>& run) -> std::string {
    try {
      run();
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    }
    return "no error";
  };
  EXPECT_THAT(message([] { deferred_init([] { torch::linspace(0, 1, 5)[2].item<float>(); }); }),
              AllOf(HasSubstr("aten::item"), HasSubstr("deferred_init")));
  EXPECT_THAT(message([] { deferred_init([] { return torch::nonzero(torch::ones({5})); }); }),
              HasSubstr("aten::nonzero"));
  EXPECT_THAT(message([] { deferred_init([] { return torch::randperm(5); }); }),
              AllOf(HasSubstr("aten::randperm"), HasSubstr("cannot be deferred")));
  EXPECT_THAT(message([] { deferred_init([] { *torch::ones({5}).data_ptr<float>() = 2; }); }),
              HasSubstr("materialize"));
  at::Tensor outside = at::zeros({5});
  EXPECT_THAT(message([&] { deferred_init([&] { outside.add_(torch::ones({5})); }); }),
              HasSubstr("made outside of deferred_init"));
  // A mistake of the caller's stays LibTorch's to tell.
  EXPECT_THAT(message([] { deferred_init([] { return torch::ones({5}) + torch::ones({4}); }); }),
              HasSubstr("must match the size"));
  nn::Sequential model = deferred_init([] { return nn::Sequential(nn::Linear(3, 2)); });
  const std::string plain = message([&] { model->forward(at::ones({4, 3})); });
  EXPECT_THAT(plain,
              AllOf(HasSubstr("'0.bias' has no values yet"), HasSubstr("materialize that first")));
  on_mesh({{"tp", 2}}, [&](const MeshPtr& mesh) {
    nn::Sequential sharded = deferred_init([] { return nn::Sequential(nn::Linear(3, 2)); });
    distribute_module(*sharded, mesh, {});
    EXPECT_THAT(
        message([&] { sharded->forward(distribute_tensor(at::ones({4, 3}), mesh, {})); }),
        AllOf(HasSubstr("'0.weight' has no values yet"), HasSubstr("materialize that first")));
    materialize(*sharded);
    sharded->forward(distribute_tensor(at::ones({4, 3}), mesh, {}));
  });
}

// --- what it costs ---

// As Llama's, with the names that it has there.
struct LlamaLayerImpl : nn::Module {
  LlamaLayerImpl(int64_t dim, int64_t kv, int64_t ffn) {
    const auto add = [&](const char* name, int64_t in, int64_t out) {
      register_module(name, nn::Linear(nn::LinearOptions(in, out).bias(false)));
    };
    add("q_proj", dim, dim);
    add("k_proj", dim, kv);
    add("v_proj", dim, kv);
    add("o_proj", dim, dim);
    add("gate_proj", dim, ffn);
    add("up_proj", dim, ffn);
    add("down_proj", ffn, dim);
    register_parameter("input_layernorm", torch::ones({dim}));
    register_parameter("post_attention_layernorm", torch::ones({dim}));
  }
  at::Tensor forward(const at::Tensor& x) { return x; }
};
TORCH_MODULE(LlamaLayer);

nn::Sequential llama(int layers, int64_t dim, int64_t kv, int64_t ffn, int64_t vocabulary) {
  nn::Sequential model;
  model->push_back("embed_tokens", nn::Embedding(vocabulary, dim));
  for (int i = 0; i < layers; ++i)
    model->push_back("layer" + std::to_string(i), LlamaLayer(dim, kv, ffn));
  model->push_back("lm_head", nn::Linear(nn::LinearOptions(dim, vocabulary).bias(false)));
  return model;
}

const ParameterPlan kLlamaPlan = {{"*.{q,k,v,gate,up}_proj.weight", {{"tp", Shard(0)}}},
                                  {"*.{o,down}_proj.weight", {{"tp", Shard(1)}}},
                                  {"embed_tokens.weight", {{"tp", Shard(0)}}},
                                  {"lm_head.weight", {{"tp", Shard(0)}}}};

int64_t resident_bytes() {
  std::FILE* file = std::fopen("/proc/self/statm", "r");
  long long total = 0, resident = 0;
  if (file == nullptr || std::fscanf(file, "%lld %lld", &total, &resident) != 2) resident = 0;
  if (file != nullptr) std::fclose(file);
  return resident * sysconf(_SC_PAGESIZE);
}

TEST(DeferredInitTest, SeventyBillionParametersTakeASecondAndAFewMegabytes) {
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    deferred_init([] { return llama(1, 8, 4, 8, 16); });  // what LibTorch sets up once
    const int64_t before = resident_bytes();
    const auto start = std::chrono::steady_clock::now();
    nn::Sequential model = deferred_init([] { return llama(80, 8192, 1024, 28672, 128256); });
    const std::chrono::duration<double> constructed = std::chrono::steady_clock::now() - start;
    parallelize_module(*model, mesh, {.parameter = kLlamaPlan});
    const std::chrono::duration<double> sharded = std::chrono::steady_clock::now() - start;
    const int64_t grown = resident_bytes() - before;
    int64_t numel = 0;
    for (const at::Tensor& t : model->parameters()) numel += t.numel();
    EXPECT_EQ(numel, 70553698304);
    EXPECT_LT(grown, 200'000'000);      // of both ranks
    EXPECT_LT(constructed.count(), 5);  // a second where nothing else runs
    if (mesh->coordinate()[0] != 0) return;
    std::printf("%.1f billion parameters: constructed in %.3f s, sharded after %.3f s, %.1f MB\n",
                static_cast<double>(numel) / 1e9, constructed.count(), sharded.count(),
                static_cast<double>(grown) / 1e6);
  });
}

// Counts what LibTorch's CPU tensors take, on this thread.
class CountingAllocator final : public c10::Allocator {
 public:
  CountingAllocator() : inner_(c10::GetAllocator(c10::kCPU)) {
    c10::SetAllocator(c10::kCPU, this, /*priority=*/100);
  }
  ~CountingAllocator() override { c10::SetAllocator(c10::kCPU, inner_, /*priority=*/100); }
  c10::DataPtr allocate(size_t bytes) override {
    total() += static_cast<int64_t>(bytes);
    return inner_->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return inner_->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    inner_->copy_data(to, from, bytes);
  }
  static int64_t& total() {
    thread_local int64_t bytes = 0;
    return bytes;
  }

 private:
  c10::Allocator* const inner_;
};

TEST(DeferredInitTest, ARankAllocatesItsPartsAndNothingElse) {
  for (const bool half : {false, true}) {
    CountingAllocator allocator;
    on_mesh({{"tp", 3}}, [&](const MeshPtr& mesh) {
      nn::Sequential model = deferred_init([&] {
        nn::Sequential m = llama(1, 64, 16, 96, 128);
        m->push_back("padded", nn::Embedding(nn::EmbeddingOptions(99, 32).padding_idx(5)));
        if (half) m->to(torch::kBFloat16);
        return m;
      });
      ParameterPlan plan = kLlamaPlan;
      plan.push_back({"padded.weight", {{"tp", Shard(0)}}});
      distribute_module(*model, mesh, plan);
      const int64_t before = CountingAllocator::total();
      materialize(*model);
      const int64_t allocated = CountingAllocator::total() - before;
      int64_t wanted = 0;
      for (const at::Tensor& t : model->parameters()) wanted += to_local(t).numel() * 4;
      if (half) wanted += wanted / 2;  // drawn as floats, then cast
      // Numbers as tensors, for fill_() and the like.
      EXPECT_GE(allocated, wanted);
      EXPECT_LE(allocated, wanted + 4096) << half;
    });
  }
}

TEST(DeferredInitTest, NothingTravelsButOneComparison) {
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    nn::Sequential model = deferred_init([] { return llama(2, 8, 4, 12, 16); });
    distribute_module(*model, mesh, kLlamaPlan);
    const CommTrace trace(mesh);
    materialize(*model);
    EXPECT_EQ(trace.events().size(), 1u);
  });
}

}  // namespace
}  // namespace shardweave
