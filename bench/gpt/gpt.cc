#include "gpt.h"

#include <optional>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "ATen/ATen.h"
#include "absl/strings/match.h"
#include "shardweave/bench/recorded_step/recorded_step.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/grad_sync.h"
#include "shardweave/modules/deferred_init.h"
#include "shardweave/modules/fully_shard.h"
#include "shardweave/modules/optim/fused_optimizer.h"
#include "shardweave/modules/parallelize_module.h"
#include "shardweave/modules/zero.h"
#include "torch/nn/modules/container/modulelist.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/modules/normalization.h"

namespace bench_gpt {
namespace {

using shardweave::Replicate;
using shardweave::Shard;
using shardweave::ShardingPlan;
namespace nn = torch::nn;

constexpr int64_t kVocabulary = 256, kHeads = 8;

struct BlockImpl : nn::Module {
  explicit BlockImpl(int64_t dim)
      : n1(register_module("n1", nn::LayerNorm(nn::LayerNormOptions({dim})))),
        n2(register_module("n2", nn::LayerNorm(nn::LayerNormOptions({dim})))),
        q(register_module("q", nn::Linear(dim, dim))),
        k(register_module("k", nn::Linear(dim, dim))),
        v(register_module("v", nn::Linear(dim, dim))),
        o(register_module("o", nn::Linear(dim, dim))),
        w1(register_module("w1", nn::Linear(dim, 4 * dim))),
        w2(register_module("w2", nn::Linear(4 * dim, dim))) {}
  at::Tensor forward(const at::Tensor& x) {
    const int64_t batch = x.size(0), length = x.size(1), dim = x.size(2);
    const auto heads = [&](const at::Tensor& t) {
      return t.view({batch, length, kHeads, dim / kHeads}).transpose(1, 2);
    };
    const at::Tensor n = n1(x);
    const at::Tensor mixed =
        at::scaled_dot_product_attention(heads(q(n)), heads(k(n)), heads(v(n)), {}, 0, true);
    const at::Tensor y = x + o(mixed.transpose(1, 2).reshape({batch, length, dim}));
    return y + w2(at::gelu(w1(n2(y))));
  }
  nn::LayerNorm n1, n2;
  nn::Linear q, k, v, o, w1, w2;
};
TORCH_MODULE(Block);

struct GptImpl : nn::Module {
  explicit GptImpl(const Sizes& sizes)
      : e(register_module("e", nn::Embedding(kVocabulary, sizes.dim))),
        p(register_module("p", nn::Embedding(sizes.length, sizes.dim))),
        b(register_module("b", nn::ModuleList())),
        n(register_module("n", nn::LayerNorm(nn::LayerNormOptions({sizes.dim})))),
        h(register_module("h", nn::Linear(nn::LinearOptions(sizes.dim, kVocabulary).bias(false)))) {
    for (int64_t i = 0; i < sizes.layers; ++i) b->push_back(Block(sizes.dim));
  }
  at::Tensor forward(const at::Tensor& tokens) {
    at::Tensor x = e(tokens) + p->weight;
    for (const auto& block : *b) x = block->as<Block>()->forward(x);
    return h(n(x));
  }
  nn::Embedding e, p;
  nn::ModuleList b;
  nn::LayerNorm n;
  nn::Linear h;
};
TORCH_MODULE(Gpt);

ShardingPlan plan_of(const std::string& mode) {
  ShardingPlan plan = {.parameter = {{"b.*.{q,k,v,w1}.*", {{"tp", Shard(0)}}},
                                     {"b.*.{o,w2}.weight", {{"tp", Shard(1)}}}},
                       .forward = {}};
  if (mode == "tp") {
    plan.forward = {{"b.*.{o,w2}.output", {{"tp", Replicate()}}}};
  } else {
    plan.forward = {{"e.output", {{"tp", Shard(1)}}},
                    {"b.*.{n1,n2}.output", {{"tp", Replicate()}}},
                    {"b.*.{o,w2}.output", {{"tp", Shard(1)}}},
                    {"h.input", {{"tp", Replicate()}}}};
  }
  return plan;
}

// [batch, length + 1] without a pattern, others for every step.
at::Tensor tokens_of(const Sizes& sizes, int64_t step) {
  const int64_t count = sizes.batch * (sizes.length + 1);
  const at::Tensor index = at::arange(step * count, (step + 1) * count, at::kLong);
  return ((index * 7919 + index.square() * 104729) % 1000003 % kVocabulary)
      .view({sizes.batch, sizes.length + 1});
}

std::pair<at::Tensor, at::Tensor> batch_of(const Sizes& sizes, int64_t step) {
  const at::Tensor tokens = tokens_of(sizes, step);
  return {tokens.narrow(1, 0, sizes.length).contiguous(),
          tokens.narrow(1, 1, sizes.length).contiguous()};
}

at::Tensor loss_of(Gpt& model, const at::Tensor& in, const at::Tensor& targets) {
  return at::cross_entropy_loss(model(in).view({-1, kVocabulary}), targets.view({-1}));
}

struct How {
  shardweave::MeshPtr mesh;  // null: one device
  std::string mode;
  shardweave::NamedPlacements rows;
  shardweave::GradSync* sync = nullptr;  // of "ddp"
};

using Batch = std::pair<at::Tensor, at::Tensor>;

Batch on_mesh(Batch batch, const How& how) {
  if (how.mesh == nullptr) return batch;
  for (at::Tensor* tensor : {&batch.first, &batch.second}) {
    *tensor = shardweave::distribute_tensor(*tensor, how.mesh, how.rows, {.source = std::nullopt});
  }
  return batch;
}

template <typename Optimizer>
void take_steps(Gpt model, Optimizer& optimizer, const Sizes& sizes, int64_t steps, const How& how,
                const std::function<void(double loss)>& step_done) {
  const int64_t num = sizes.micro_batches;
  for (int64_t step = 0; step < steps; ++step) {
    at::Tensor sum;
    for (int64_t micro = 0; micro < num; ++micro) {
      const auto [in, targets] = on_mesh(batch_of(sizes, step * num + micro), how);
      std::optional<shardweave::FullyShardNoSync> units_stay;
      std::optional<shardweave::GradSync::NoSync> buckets_stay;
      if (micro + 1 < num && how.mode == "fsdp") units_stay.emplace(how.mesh);
      if (micro + 1 < num && how.sync != nullptr) buckets_stay.emplace(*how.sync);
      at::Tensor loss = loss_of(model, in, targets);
      if (num > 1) loss = loss / num;
      loss.backward();
      sum = sum.defined() ? sum + loss.detach() : loss.detach();
    }
    shardweave::finish_grad_sync(*model);
    optimizer.step();
    optimizer.zero_grad();
    step_done(sum.item<double>());
  }
}

// Where it lies with this rank.
at::Tensor local_of(const at::Tensor& tensor) {
  return shardweave::is_dtensor(tensor) ? shardweave::to_local(tensor) : tensor;
}

template <typename Optimizer>
void take_recorded_steps(Gpt model, Optimizer& optimizer, const Sizes& sizes, int64_t steps,
                         const How& how, const std::function<void(double loss)>& step_done) {
  constexpr int64_t kBefore = 2;  // what is made at first use is there
  const auto [in, targets] = on_mesh(batch_of(sizes, 0), how);
  std::vector<at::Tensor> results;
  const auto compute = [&, &in = in, &targets = targets] {
    at::Tensor loss = loss_of(model, in, targets);
    loss.backward();
    shardweave::finish_grad_sync(*model);
    results = {local_of(loss.detach())};
    for (const at::Tensor& p : model->parameters()) results.push_back(local_of(p.grad()));
    return results;
  };
  std::optional<bench_recorded_step::RecordedStep> recorded;
  for (int64_t step = 0; step < steps; ++step) {
    const auto batch = on_mesh(batch_of(sizes, step), how);
    local_of(in).copy_(local_of(batch.first));
    local_of(targets).copy_(local_of(batch.second));
    if (recorded.has_value()) {
      recorded->replay();
    } else {
      optimizer.zero_grad();
      if (step < kBefore) {
        compute();
      } else {
        recorded.emplace(bench_recorded_step::RecordedStep::record(compute));
      }
    }
    optimizer.step();
    step_done(results[0].item<double>());
  }
}

bool is_tensor_parallel(std::string_view mode) {
  return mode == "tp" || mode == "sp";
}

}  // namespace

std::string mesh_dim_of(std::string_view mode) {
  return is_tensor_parallel(mode) ? "tp" : "dp";
}

std::vector<int64_t> elements_of_units(const Sizes& sizes) {
  std::vector<int64_t> elements(static_cast<size_t>(sizes.layers) + 1, 0);
  const Gpt model = shardweave::deferred_init([&] { return Gpt(sizes); });
  for (const auto& parameter : model->named_parameters()) {
    int64_t block = sizes.layers;  // the rest
    if (absl::StartsWith(parameter.key(), "b.")) block = std::stoll(parameter.key().substr(2));
    elements[static_cast<size_t>(block)] += parameter.value().numel();
  }
  return elements;
}

std::function<at::Tensor()> forward_on_one_device(const Sizes& sizes) {
  const auto [in, targets] = batch_of(sizes, 0);
  return [model = Gpt(sizes), in = in, targets = targets]() mutable {
    return loss_of(model, in, targets);
  };
}

void train(const Sizes& sizes, const std::string& mode, int64_t steps,
           const shardweave::MeshPtr& mesh, const std::function<void(double loss)>& step_done) {
  Gpt model = shardweave::deferred_init([&] { return Gpt(sizes); });
  How how = {.mesh = mesh, .mode = mesh == nullptr ? "" : mode, .rows = {}};
  std::optional<shardweave::GradSync> sync;
  if (mesh != nullptr) {
    if (is_tensor_parallel(mode)) {
      shardweave::parallelize_module(*model, mesh, plan_of(mode));
    } else {
      how.rows = {{"dp", Shard(0)}};
      shardweave::distribute_module(*model, mesh, {}, {.source = std::nullopt});
      if (mode == "fsdp") shardweave::fully_shard(*model, mesh, {.unit_types = {"Block"}});
    }
  }
  shardweave::materialize(*model, {.seed = 1});
  const shardweave::AdamWOptions adamw = {.lr = 3e-4};
  if (mesh != nullptr && absl::StartsWith(mode, "zero")) {
    shardweave::ZeroRedundancyOptimizer<shardweave::FusedOptimizer> optimizer(
        model->parameters(), adamw, {.mesh_dim = "dp", .stage = mode == "zero2" ? 2 : 1});
    take_steps(model, optimizer, sizes, steps, how, step_done);
    return;
  }
  if (mesh != nullptr && mode == "ddp") how.sync = &sync.emplace(*model);
  shardweave::FusedOptimizer optimizer(model->parameters(), adamw);
  take_steps(model, optimizer, sizes, steps, how, step_done);
}

void train_recorded(const Sizes& sizes, const std::string& mode, int64_t steps,
                    const shardweave::MeshPtr& mesh,
                    const std::function<void(double loss)>& step_done) {
  if (sizes.micro_batches != 1 || (mesh != nullptr && !is_tensor_parallel(mode))) {
    throw std::invalid_argument("train_recorded: wanted mode tp and one micro-batch");
  }
  Gpt model = shardweave::deferred_init([&] { return Gpt(sizes); });
  if (mesh != nullptr) shardweave::parallelize_module(*model, mesh, plan_of(mode));
  shardweave::materialize(*model, {.seed = 1});
  shardweave::FusedOptimizer optimizer(model->parameters(), shardweave::AdamWOptions{.lr = 3e-4});
  take_recorded_steps(model, optimizer, sizes, steps, {.mesh = mesh, .mode = mode}, step_done);
}

}  // namespace bench_gpt
