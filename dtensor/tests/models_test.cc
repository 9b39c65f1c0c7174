// Whole models, unchanged torch::nn, trained for some steps under many meshes and plans: every loss
// and, at the end, every parameter as on one device.

#include <functional>
#include <memory>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/conv.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/modules/normalization.h"
#include "torch/nn/pimpl.h"
#include "torch/optim/adamw.h"
#include "torch/optim/optimizer.h"
#include "torch/optim/sgd.h"

namespace shardweave {
namespace {

namespace nn = torch::nn;
using testing::on_mesh;

// The same values on every rank, whatever other threads draw.
void fill(nn::Module& module) {
  const c10::AutoGradMode no_grad(false);
  double phase = 0;
  for (at::Tensor& p : module.parameters()) {
    p.copy_(at::sin(at::arange(p.numel(), at::kDouble) * 1.7 + phase).view(p.sizes()) * 0.2 +
            (p.dim() == 1 ? 0.3 : 0.0));
    phase += 1;
  }
}

at::Tensor pattern(at::IntArrayRef sizes, int64_t modulus, int64_t step) {
  int64_t n = 1;
  for (int64_t s : sizes) n *= s;
  return (at::arange(n, at::kLong) * 7 + step * 13).remainder(modulus).view(sizes);
}

// --- a GPT block ---------------------------------------------------------------------------------

struct GptImpl : nn::Module {
  static constexpr int64_t kVocabulary = 11, kDim = 12, kHeads = 4, kSeq = 6;
  nn::Embedding tokens{nullptr}, positions{nullptr};
  nn::LayerNorm norm1{nullptr}, norm2{nullptr}, norm3{nullptr};
  nn::Linear q{nullptr}, k{nullptr}, v{nullptr}, o{nullptr}, up{nullptr}, down{nullptr},
      head{nullptr};
  at::Tensor index;

  GptImpl() {
    tokens = register_module("tokens", nn::Embedding(kVocabulary, kDim));
    positions = register_module("positions", nn::Embedding(kSeq, kDim));
    for (auto [name, norm] : {std::pair{"norm1", &norm1}, {"norm2", &norm2}, {"norm3", &norm3}}) {
      *norm = register_module(name, nn::LayerNorm(nn::LayerNormOptions({kDim})));
    }
    for (auto [name, linear] : {std::pair{"q", &q}, {"k", &k}, {"v", &v}, {"o", &o}}) {
      *linear = register_module(name, nn::Linear(kDim, kDim));
    }
    up = register_module("up", nn::Linear(kDim, 4 * kDim));
    down = register_module("down", nn::Linear(4 * kDim, kDim));
    head = register_module("head", nn::Linear(nn::LinearOptions(kDim, kVocabulary).bias(false)));
    index = register_buffer("index", at::arange(kSeq, at::kLong));
  }

  at::Tensor heads(const at::Tensor& x) {
    return x.view({x.size(0), x.size(1), kHeads, kDim / kHeads}).transpose(1, 2);
  }
  at::Tensor loss(const at::Tensor& input, const at::Tensor& target) {
    at::Tensor x = tokens(input) + positions(index);
    const at::Tensor y = norm1(x);
    const at::Tensor a =
        at::scaled_dot_product_attention(heads(q(y)), heads(k(y)), heads(v(y)), {}, 0.0, true);
    x = x + o(a.transpose(1, 2).reshape(x.sizes()));
    x = x + down(at::gelu(up(norm2(x))));
    return at::cross_entropy_loss(head(norm3(x)).view({-1, kVocabulary}), target.reshape({-1}));
  }
};
TORCH_MODULE(Gpt);

// --- a vision transformer ------------------------------------------------------------------------

struct VitImpl : nn::Module {
  static constexpr int64_t kDim = 8, kHeads = 2, kClasses = 5;
  nn::Conv2d patches{nullptr};
  nn::LayerNorm norm{nullptr};
  nn::Linear qkv{nullptr}, o{nullptr}, up{nullptr}, down{nullptr}, head{nullptr};
  at::Tensor cls, position;

  VitImpl() {
    patches = register_module("patches", nn::Conv2d(nn::Conv2dOptions(3, kDim, 4).stride(4)));
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({kDim})));
    qkv = register_module("qkv", nn::Linear(kDim, 3 * kDim));
    o = register_module("o", nn::Linear(kDim, kDim));
    up = register_module("up", nn::Linear(kDim, 2 * kDim));
    down = register_module("down", nn::Linear(2 * kDim, kDim));
    head = register_module("head", nn::Linear(kDim, kClasses));
    cls = register_parameter("cls", at::zeros({1, 1, kDim}));
    position = register_parameter("position", at::zeros({1, 5, kDim}));
  }

  at::Tensor loss(const at::Tensor& images, const at::Tensor& target) {
    at::Tensor x = patches(images).flatten(2).transpose(1, 2);  // [N, 4, D]
    x = at::cat({cls.expand({x.size(0), 1, kDim}), x}, 1) + position;
    const at::Tensor y = norm(x);
    const std::vector<at::Tensor> parts = qkv(y).chunk(3, -1);
    auto heads = [&](const at::Tensor& t) {
      return t.reshape({t.size(0), t.size(1), kHeads, kDim / kHeads}).transpose(1, 2);
    };
    const at::Tensor a =
        at::scaled_dot_product_attention(heads(parts[0]), heads(parts[1]), heads(parts[2]));
    x = x + o(a.transpose(1, 2).flatten(2));
    x = x + down(at::gelu(up(norm(x))));
    return at::cross_entropy_loss(head(x.select(1, 0)), target);
  }
};
TORCH_MODULE(Vit);

// --- training ------------------------------------------------------------------------------------

using Batch = std::pair<at::Tensor, at::Tensor>;
using MakeOptimizer =
    std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;

constexpr int kSteps = 4;

template <typename Model, typename Prepare>
std::vector<double> train(Model& model, const MakeOptimizer& make_optimizer, const Prepare& batch) {
  auto optimizer = make_optimizer(model->parameters());
  std::vector<double> losses;
  for (int step = 0; step < kSteps; ++step) {
    auto [input, target] = batch(step);
    at::Tensor loss = model->loss(input, target);
    loss.backward();
    finish_grad_sync(*model);
    for (at::Tensor& p : model->parameters()) {
      EXPECT_TRUE(!is_dtensor(p) || layout_of(p.grad()) == layout_of(p));
    }
    optimizer->step();
    optimizer->zero_grad();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

struct Case {
  std::vector<MeshDim> mesh;
  ParameterPlan plan;
  NamedPlacements batch;
};

template <typename Model>
void check(const Case& c, const std::function<Batch(int64_t)>& batch,
           const MakeOptimizer& optimizer) {
  on_mesh(c.mesh, [&](const MeshPtr& mesh) {
    SCOPED_TRACE(mesh->mesh().to_string());
    Model plain, sharded;
    fill(*plain);
    fill(*sharded);
    const std::vector<double> want = train(plain, optimizer, batch);
    distribute_module(*sharded, mesh, c.plan);
    const std::vector<double> got = train(sharded, optimizer, [&](int64_t step) {
      auto [input, target] = batch(step);
      return Batch(distribute_tensor(input, mesh, c.batch),
                   distribute_tensor(target, mesh, c.batch));
    });
    for (int step = 0; step < kSteps; ++step)
      EXPECT_NEAR(got[step], want[step], 2e-5) << "step " << step;
    EXPECT_LT(got.back(), got.front());
    const auto names = plain->named_parameters();
    const auto sharded_parameters = sharded->parameters();
    for (size_t i = 0; i < sharded_parameters.size(); ++i) {
      // The gradient of the keys' bias is zero but for rounding (softmax does not see a shift), and
      // AdamW scales rounding up.
      if (names[i].key() == "k.bias" || names[i].key() == "qkv.bias") continue;
      const at::Tensor whole = full_tensor(sharded_parameters[i].detach());
      EXPECT_TRUE(at::allclose(whole, names[i].value(), 1e-4, 2e-5)) << names[i].key();
    }
    EXPECT_EQ(dispatch_counters(mesh).gathered_operators, 0) << "an operator has no rule";
  });
}

std::unique_ptr<torch::optim::Optimizer> adamw(std::vector<at::Tensor> parameters) {
  return std::make_unique<torch::optim::AdamW>(std::move(parameters),
                                               torch::optim::AdamWOptions(3e-3));
}
std::unique_ptr<torch::optim::Optimizer> sgd(std::vector<at::Tensor> parameters) {
  return std::make_unique<torch::optim::SGD>(
      std::move(parameters), torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.01));
}

Batch gpt_batch(int64_t step) {
  return {pattern({6, GptImpl::kSeq}, GptImpl::kVocabulary, step),
          pattern({6, GptImpl::kSeq}, GptImpl::kVocabulary, step + 1)};
}
Batch vit_batch(int64_t step) {
  return {at::sin(at::arange(6 * 3 * 8 * 8, at::kFloat) * (0.3 + 0.01 * static_cast<double>(step)))
              .view({6, 3, 8, 8}),
          pattern({6}, VitImpl::kClasses, 0)};
}

ParameterPlan tensor_parallel() {
  return {{"{q,k,v,up}.weight", {{"tp", Shard(0)}}},
          {"{q,k,v,up}.bias", {{"tp", Shard(0)}}},
          {"{o,down}.weight", {{"tp", Shard(1)}}}};
}

TEST(ModelsTest, GptTensorParallel) {
  check<Gpt>({{{"tp", 2}}, tensor_parallel(), {}}, gpt_batch, adamw);
  check<Gpt>({{{"tp", 4}}, tensor_parallel(), {}}, gpt_batch, sgd);
  check<Gpt>({{{"tp", 3}}, tensor_parallel(), {}}, gpt_batch, adamw);  // 4 heads over 3 ranks
}

TEST(ModelsTest, GptDataParallel) {
  check<Gpt>({{{"dp", 2}}, {}, {{"dp", Shard(0)}}}, gpt_batch, sgd);
  check<Gpt>({{{"dp", 4}}, {}, {{"dp", Shard(0)}}}, gpt_batch, adamw);  // 6 rows over 4 ranks
}

TEST(ModelsTest, GptTwoDimensions) {
  check<Gpt>({{{"dp", 2}, {"tp", 2}}, tensor_parallel(), {{"dp", Shard(0)}}}, gpt_batch, adamw);
  check<Gpt>({{{"tp", 2}, {"dp", 2}}, tensor_parallel(), {{"dp", Shard(0)}}}, gpt_batch, sgd);
}

TEST(ModelsTest, GptShardedVocabularyAndSequence) {
  ParameterPlan plan = tensor_parallel();
  plan.push_back({"tokens.weight", {{"tp", Shard(0)}}});
  plan.push_back({"head.weight", {{"tp", Shard(0)}}});
  check<Gpt>({{{"tp", 2}}, plan, {}}, gpt_batch, adamw);
  check<Gpt>({{{"tp", 2}}, tensor_parallel(), {{"tp", Shard(1)}}}, gpt_batch, adamw);
}

TEST(ModelsTest, GptEveryParameterShardedSomehow) {
  // As fully sharded data parallelism would lay them.
  check<Gpt>({{{"dp", 3}}, {{"*", {{"dp", Shard(0)}}}}, {{"dp", Shard(0)}}}, gpt_batch, adamw);
}

TEST(ModelsTest, Vit) {
  const ParameterPlan plan = {{"{qkv,up}.*", {{"tp", Shard(0)}}},
                              {"{o,down}.weight", {{"tp", Shard(1)}}}};
  check<Vit>({{{"dp", 2}, {"tp", 2}}, plan, {{"dp", Shard(0)}}}, vit_batch, adamw);
  check<Vit>({{{"dp", 4}, {"tp", 1}}, plan, {{"dp", Shard(0)}}}, vit_batch, sgd);
}

TEST(ModelsTest, PlansThatCannotBe) {
  auto message = [](const ParameterPlan& plan) {
    return std::string(testing::try_on_mesh({{"tp", 2}}, [&](const MeshPtr& mesh) {
                         Gpt model;
                         distribute_module(*model, mesh, plan);
                       }).message());
  };
  EXPECT_THAT(message({{"*.gate.weight", {{"tp", Shard(0)}}}}),
              ::testing::HasSubstr("'*.gate.weight' matches no parameter"));
  EXPECT_THAT(message({{"q.bias", {{"tp", Shard(1)}}}}), ::testing::HasSubstr("'q.bias'"));
  EXPECT_THAT(message({{"q.bias", {{"dp", Shard(0)}}}}), ::testing::HasSubstr("dp"));
}

}  // namespace
}  // namespace shardweave
