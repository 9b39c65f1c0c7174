// Ranks with different numbers of batches: what one device computes on all of them.
#include "shardweave/modules/join.h"

#include <algorithm>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/observe/comm_trace.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/modules/data_parallel.h"
#include "shardweave/modules/fully_shard.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/batchnorm.h"
#include "torch/nn/modules/conv.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/modules/normalization.h"
#include "torch/nn/pimpl.h"
#include "torch/optim/sgd.h"

namespace shardweave {
namespace {

using ::testing::HasSubstr;
using testing::on_mesh;
namespace nn = torch::nn;

constexpr int64_t kWords = 11, kDim = 6, kLength = 4;

// Attention with a causal mask, layer norms, an MLP; tied head.
struct GptImpl : nn::Module {
  GptImpl() {
    embed = register_module("embed", nn::Embedding(kWords, kDim));
    norm1 = register_module("norm1", nn::LayerNorm(nn::LayerNormOptions({kDim})));
    norm2 = register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({kDim})));
    qkv = register_module("qkv", nn::Linear(kDim, 3 * kDim));
    o = register_module("o", nn::Linear(kDim, kDim));
    up = register_module("up", nn::Linear(kDim, 9));
    down = register_module("down", nn::Linear(9, kDim));
    const c10::AutoGradMode no_grad(false);
    double k = 0;
    for (at::Tensor p : parameters()) {
      p.copy_(at::sin(at::arange(p.numel(), at::kFloat) * 0.7 + ++k).view(p.sizes()) * 0.5);
    }
  }
  at::Tensor loss(const at::Tensor& tokens, const at::Tensor& targets) {
    at::Tensor x = embed(tokens);
    const auto heads = [&](const at::Tensor& t) {
      return t.view({t.size(0), t.size(1), 2, kDim / 2}).transpose(1, 2);
    };
    const std::vector<at::Tensor> parts = qkv(norm1(x)).chunk(3, -1);
    const at::Tensor attended = at::scaled_dot_product_attention(
        heads(parts[0]), heads(parts[1]), heads(parts[2]), {}, 0.0, /*is_causal=*/true);
    x = x + o(attended.transpose(1, 2).reshape({x.size(0), x.size(1), kDim}));
    x = x + down(at::gelu(up(norm2(x))));
    const at::Tensor logits = nn::functional::linear(x, embed->weight);
    return at::cross_entropy_loss(logits.view({-1, kWords}), targets.view({-1}));
  }
  nn::Embedding embed{nullptr};
  nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  nn::Linear qkv{nullptr}, o{nullptr}, up{nullptr}, down{nullptr};
};
TORCH_MODULE(Gpt);

struct ConvImpl : nn::Module {
  ConvImpl() {
    conv = register_module("conv", nn::Conv2d(nn::Conv2dOptions(2, 5, 3).padding(1)));
    norm = register_module("norm", nn::BatchNorm2d(5));
    out = register_module("out", nn::Linear(5, 3));
    const c10::AutoGradMode no_grad(false);
    double k = 0;
    for (at::Tensor p : parameters()) {
      p.copy_(at::sin(at::arange(p.numel(), at::kFloat) * 0.7 + ++k).view(p.sizes()) * 0.5);
    }
  }
  at::Tensor loss(const at::Tensor& images, const at::Tensor& targets) {
    const at::Tensor x = at::relu(norm(conv(images)));
    return at::cross_entropy_loss(out(x.mean(std::vector<int64_t>{2, 3})), targets);
  }
  nn::Conv2d conv{nullptr};
  nn::BatchNorm2d norm{nullptr};
  nn::Linear out{nullptr};
};
TORCH_MODULE(Conv);

constexpr int kBatches[] = {5, 3, 4};  // of each rank

// Of a rank; none from its last one on.
std::vector<at::Tensor> rows_of(bool images, int64_t rank, int step) {
  if (step >= kBatches[rank]) return {};
  const int64_t rows = 2 + (rank + step) % 2;
  if (images) {
    return {
        at::sin(at::arange(rows * 2 * 16, at::kFloat) * (rank + 2) + step).view({rows, 2, 4, 4}),
        (at::arange(rows) + rank + step).remainder(3)};
  }
  const at::Tensor all =
      (at::arange(rows * (kLength + 1)).view({rows, kLength + 1}) * (3 + step) + rank * 5)
          .remainder(kWords);
  return {all.slice(1, 0, kLength).contiguous(), all.slice(1, 1).contiguous()};
}

using Values = std::map<std::string, at::Tensor>;
Values values_of(const nn::Module& module) {
  const c10::AutoGradMode no_grad(false);
  Values values;
  const auto add = [&](const std::string& name, const at::Tensor& t) {
    values[name] = (is_dtensor(t) ? full_tensor(t) : t).detach().to(at::kDouble).clone();
  };
  for (const auto& item : module.named_parameters()) add(item.key(), item.value());
  for (const auto& item : module.named_buffers()) add(item.key(), item.value());
  return values;
}

template <typename Model>
struct Trained {
  std::vector<double> losses;
  std::vector<at::Tensor> first_gradients;
  Values values;
};

// `next`: tokens and targets of a step; none: it was the last.
template <typename Model, typename Next>
Trained<Model> trained(Model& model, Next next) {
  Trained<Model> result;
  // No Adam: a bias in front of a batch norm has a gradient of rounding errors alone.
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  while (true) {
    const std::optional<std::vector<at::Tensor>> batch = next();
    if (!batch.has_value()) break;
    const at::Tensor loss = model->loss((*batch)[0], (*batch)[1]);
    loss.backward();
    finish_grad_sync(*model);
    for (const at::Tensor& p : model->parameters()) {
      const at::Tensor grad = is_dtensor(p.grad()) ? full_tensor(p.grad()) : p.grad();
      result.first_gradients.push_back(grad.clone());
    }
    optimizer.step();
    optimizer.zero_grad();
    result.losses.push_back(loss.template item<double>());
  }
  result.values = values_of(*model);
  return result;
}

template <typename Model>
void expect_one_devices(bool images, bool is_sharded) {
  Model alone;
  int step = 0;
  const Trained<Model> wanted = trained(alone, [&]() -> std::optional<std::vector<at::Tensor>> {
    std::vector<at::Tensor> first, second;
    for (int64_t r = 0; r < 3; ++r) {
      const std::vector<at::Tensor> rows = rows_of(images, r, step);
      if (rows.empty()) continue;
      first.push_back(rows[0]);
      second.push_back(rows[1]);
    }
    ++step;
    if (first.empty()) return std::nullopt;
    return std::vector<at::Tensor>{at::cat(first), at::cat(second)};
  });
  ASSERT_EQ(wanted.losses.size(), 5);
  on_mesh({{"dp", 3}}, [&](const MeshPtr& mesh) {
    Model model;
    std::optional<GradSync> ddp;
    if (is_sharded) {
      fully_shard(*model, mesh);
    } else {
      pre_dp_module_transform(*model, mesh);
      ddp.emplace(*model);
    }
    Join join(mesh);
    EXPECT_EQ(join.num_ranks(), 3);
    int mine = 0;
    const Trained<Model> got =
        trained(model, [&] { return join.next(rows_of(images, mesh->rank().value, mine++)); });
    EXPECT_EQ(mine, 6);
    EXPECT_EQ(join.ranks_with_input(), 0);
    ASSERT_EQ(got.losses.size(), wanted.losses.size());
    for (size_t i = 0; i < got.losses.size(); ++i) {
      EXPECT_NEAR(got.losses[i], wanted.losses[i], 1e-4) << i;
    }
    ASSERT_EQ(got.first_gradients.size(), wanted.first_gradients.size());
    for (size_t i = 0; i < got.first_gradients.size(); ++i) {
      EXPECT_TRUE(at::allclose(got.first_gradients[i], wanted.first_gradients[i], 1e-3, 1e-4))
          << i << got.first_gradients[i] << wanted.first_gradients[i];
    }
    for (const auto& [name, value] : wanted.values) {
      EXPECT_TRUE(at::allclose(got.values.at(name), value, 1e-3, 2e-4)) << name;
    }
  });
}

TEST(JoinTest, LossesAndGradientsAreOneDevicesOnAllRows) {
  expect_one_devices<Gpt>(/*images=*/false, /*is_sharded=*/false);
  expect_one_devices<Conv>(/*images=*/true, /*is_sharded=*/false);
  expect_one_devices<Gpt>(/*images=*/false, /*is_sharded=*/true);
}

TEST(JoinTest, OneSmallCollectiveForABatchWhoeverHasIt) {
  on_mesh({{"dp", 3}, {"tp", 2}}, [](const MeshPtr& mesh) {
    Join join(mesh, {.mesh_dims = {"dp"}});
    const int64_t me = mesh->coordinate()[0];
    const int64_t kRows[][3] = {{2, 2, 2}, {0, 4, 1}, {-1, 3, -1}, {1, -1, 0}, {-1, -1, -1}};
    for (const auto& rows : kRows) {
      std::vector<at::Tensor> mine;
      if (rows[me] >= 0) {
        mine = {at::full({rows[me], 2}, me, at::kFloat), at::full({rows[me]}, me, at::kLong)};
      }
      const CommTrace trace(mesh);
      const auto batch = join.next(mine);
      EXPECT_EQ(trace.events().size(), 1);
      int64_t with_input = 0, total = 0;
      for (const int64_t n : rows) {
        with_input += n >= 0;
        total += std::max<int64_t>(n, 0);
      }
      EXPECT_EQ(join.ranks_with_input(), with_input);
      ASSERT_EQ(batch.has_value(), with_input > 0);
      if (!batch.has_value()) continue;
      ASSERT_EQ(batch->size(), 2);
      EXPECT_EQ((*batch)[0].sizes(), (at::IntArrayRef{total, 2}));
      EXPECT_EQ((*batch)[1].scalar_type(), at::kLong);
      const at::Tensor whole = full_tensor((*batch)[1]);
      int64_t at = 0;
      for (int64_t r = 0; r < 3; ++r) {
        for (int64_t i = 0; i < rows[r]; ++i) EXPECT_EQ(whole[at++].item<int64_t>(), r);
      }
      if (!mine.empty() && rows[me] > 0) {
        EXPECT_TRUE(to_local((*batch)[0]).is_alias_of(mine[0]));
      }
    }
  });
}

TEST(JoinTest, BadInputIsAnErrorOnAllRanks) {
  const auto refused = [](const std::vector<MeshDim>& dims, const std::string& text,
                          const std::function<std::vector<at::Tensor>(int64_t rank)>& mine) {
    on_mesh(dims, [&](const MeshPtr& mesh) {
      Join join(mesh, {.mesh_dims = {"dp"}});
      try {
        join.next(mine(mesh->rank().value));
        ADD_FAILURE() << "no error: " << text;
      } catch (const Error& error) {
        EXPECT_EQ(error.status().code(), absl::StatusCode::kInvalidArgument) << error.what();
        if (std::string(error.what()).find("has refused its input") == std::string::npos) {
          EXPECT_THAT(error.what(), HasSubstr(text));
        }
      }
      // The communicators are as before.
      EXPECT_TRUE(join.next({at::ones({1, 2})}).has_value());
    });
  };
  const std::vector<MeshDim> three = {{"dp", 3}};
  refused(three, "tensor 0 is Float[2, 3] (cpu) on rank 1 and Float[2, 2] (cpu) on rank 0",
          [](int64_t r) -> std::vector<at::Tensor> { return {at::ones({2, r == 1 ? 3 : 2})}; });
  refused(three, "tensor 1 is Double[1]", [](int64_t r) -> std::vector<at::Tensor> {
    return {at::ones({1, 2}), at::ones({1}, r == 2 ? at::kDouble : at::kFloat)};
  });
  refused(three, "rank 2 has 1 tensors, rank 1 has 2", [](int64_t r) -> std::vector<at::Tensor> {
    if (r == 0) return {};
    if (r == 1) return {at::ones({1}), at::ones({1})};
    return {at::ones({1})};
  });
  refused(three, "tensor 0 is undefined", [](int64_t r) -> std::vector<at::Tensor> {
    return {r == 1 ? at::Tensor() : at::ones({1, 2})};
  });
  refused(three, "tensor 0 has 0 dimensions", [](int64_t r) -> std::vector<at::Tensor> {
    return {r == 1 ? at::ones({}) : at::ones({1, 2})};
  });
  refused(three, "requires grad", [](int64_t r) -> std::vector<at::Tensor> {
    return {at::ones({1, 2}).requires_grad_(r == 0)};
  });
  const at::Tensor not_dense[] = {
      at::ones({1, 2}).to_sparse(), at::quantize_per_tensor(at::ones({1, 2}), 0.1, 0, at::kQInt8),
      at::_nested_tensor_from_tensor_list({at::ones({1, 2}), at::ones({2, 2})})};
  for (const at::Tensor& one : not_dense) {
    refused(
        three, "tensor 0 cannot be a DTensor: it is not dense",
        [&](int64_t r) -> std::vector<at::Tensor> { return {r == 1 ? one : at::ones({1, 2})}; });
  }
  refused(three, "there are 9 tensors; at most 8",
          [](int64_t) { return std::vector<at::Tensor>(9, at::ones({1, 2})); });
  refused({{"dp", 2}, {"tp", 2}}, "ranks 2 and 3 of the mesh differ",
          [](int64_t r) -> std::vector<at::Tensor> {
            if (r == 3) return {};
            return {at::ones({1, 2})};
          });
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    EXPECT_THROW(Join(mesh, {.mesh_dims = {"pp"}}), Error);
    EXPECT_THROW(Join(mesh, {.mesh_dims = {"dp", "dp"}}), Error);
  });
}

}  // namespace
}  // namespace shardweave
