#include "training.h"

#include <algorithm>
#include <memory>
#include <optional>

#include "ATen/ops/softmax.h"
#include "c10/core/GradMode.h"
#include "counter_random.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/modules/checkpoint/checkpointer.h"
#include "shardweave/modules/data_parallel.h"
#include "shardweave/modules/fully_shard.h"
#include "shardweave/modules/optim/fused_optimizer.h"
#include "shardweave/modules/zero.h"

namespace train_gpt {
namespace {

using shardweave::MeshPtr;
using shardweave::Shard;

// Tensor parallelism as in Megatron-LM (Shoeybi et al., 2019): q, k, v and up are cut by their
// outputs, o and down by their inputs, so that a block needs one reduction after attention and one
// after the MLP. Everything else is replicated.
shardweave::ParameterPlan plan() {
  return {
      {"*.{q,k,v,up}.*", {{"tp", Shard(0)}}},
      {"*.{o,down}.weight", {{"tp", Shard(1)}}},
  };
}

// Every rank makes the same weights and batches, so that none has to be sent.
constexpr shardweave::DistributeOptions kNothingSent = {.source = std::nullopt};

at::Tensor on_device(const at::Tensor& tensor, const Settings& settings) {
  return tensor.to(at::Device(settings.device));  // "cuda": this thread's current GPU
}

template <typename Optimizer>
int64_t take_steps(Gpt model, Optimizer& optimizer, const Settings& settings, const Text& text,
                   const MeshPtr& mesh, const std::function<void(double loss)>& step_done) {
  shardweave::StateDict state;
  std::optional<shardweave::Checkpointer> checkpointer;
  int64_t first = 0;
  if (mesh != nullptr) {  // what a run needs to go on; the text's batches follow from the step
    shardweave::add_module(state, *model);
    shardweave::add_optimizer(state, optimizer, *model);
    shardweave::add_random_state(state, mesh);
    if (!settings.resume.empty()) {
      first = shardweave::load_checkpoint(settings.resume, state, mesh).step;
    }
    if (!settings.save.empty()) {
      checkpointer.emplace(settings.save, mesh);
      checkpointer->open(first);  // or hours later there is nowhere to save
    }
  }
  const int64_t end = first + settings.steps;
  for (int64_t step = first; step < end; ++step) {
    Batch batch = text.batch({step, settings.batch, settings.seq, settings.seed});
    for (at::Tensor* tensor : {&batch.tokens, &batch.targets})
      *tensor = on_device(*tensor, settings);
    if (mesh != nullptr) {  // each row of the mesh gets its share of the sequences
      shardweave::NamedPlacements rows = {{"dp", Shard(0)}};
      if (mesh->mesh().dim("replicas").ok()) rows.emplace_back("replicas", Shard(0));
      for (at::Tensor* tensor : {&batch.tokens, &batch.targets}) {
        *tensor = shardweave::distribute_tensor(*tensor, mesh, rows, kNothingSent);
      }
    }
    const at::Tensor loss = model->loss(batch.tokens, batch.targets);
    loss.backward();
    shardweave::finish_grad_sync(*model);  // waits; nothing to do for plain tensors
    optimizer.step();
    optimizer.zero_grad();
    step_done(loss.item<double>());
    const int64_t done = step + 1;
    if (checkpointer.has_value() && done == end) {
      checkpointer->save(done, state);
    } else if (checkpointer.has_value() && settings.save_every > 0 &&
               done % settings.save_every == 0) {
      checkpointer->save_async(done, state);
    }
  }
  return first;
}

}  // namespace

Gpt make_model(const Settings& settings, const MeshPtr& mesh) {
  Gpt model(GptOptions{settings.layers, settings.dim, settings.heads, settings.seq});
  init_weights(*model, settings.seed);
  const at::Device device(settings.device);
  const bool rests_on_cpu = settings.cpu_offload && mesh != nullptr;
  if (!rests_on_cpu) model->to(device);
  if (mesh == nullptr) return model;
  shardweave::distribute_module(*model, mesh, plan(), kNothingSent);
  // A unit for each block, and one for the rest: whole while it is used, forward and backward.
  if (settings.fully_sharded()) {
    shardweave::fully_shard(*model, mesh,
                            {.mesh_dim = "dp", .unit_types = {"Block"}, .compute_device = device});
  }
  return model;
}

int64_t train(Gpt model, const Settings& settings, const Text& text, const MeshPtr& mesh,
              const std::function<void(double loss)>& step_done) {
  // Gradients leave in buckets while backward goes on, as long as this lives.
  std::unique_ptr<shardweave::GradSync> ddp;
  if (mesh != nullptr && settings.parallel == "ddp") {
    ddp.reset(new shardweave::GradSync(shardweave::distributed_data_parallel(
        *model, mesh, {.mesh_dim = "dp", .distribute = kNothingSent})));
  }
  const shardweave::AdamWOptions adamw = {.lr = settings.learning_rate};
  if (mesh != nullptr && settings.zero_stage() > 0) {
    shardweave::ZeroRedundancyOptimizer<shardweave::FusedOptimizer> optimizer(
        model->parameters(), adamw, {.mesh_dim = "dp", .stage = settings.zero_stage()});
    return take_steps(model, optimizer, settings, text, mesh, step_done);
  } else {
    shardweave::FusedOptimizer optimizer(model->parameters(), adamw);
    return take_steps(model, optimizer, settings, text, mesh, step_done);
  }
}

Sample sample(Gpt model, const Settings& settings, const Text& text, const MeshPtr& mesh) {
  const c10::AutoGradMode no_grad(false);
  constexpr double kTemperature = 0.7;
  const uint64_t seed = settings.seed + 1;  // not the numbers that the batches come from
  const auto seq = static_cast<size_t>(settings.seq);
  const size_t start = random_at(seed, settings.sample) % (text.bytes().size() - seq);
  Sample result{.prompt = std::string(text.bytes().substr(start, seq)), .generated = {}};
  std::string all = result.prompt;
  for (int64_t i = 0; i < settings.sample; ++i) {
    at::Tensor tokens =
        on_device(to_tokens(std::string_view(all).substr(all.size() - seq)), settings);
    if (mesh != nullptr)
      tokens = shardweave::distribute_tensor(tokens, mesh, shardweave::NamedPlacements{});
    at::Tensor scores = model->forward(tokens).select(1, -1);
    if (mesh != nullptr) scores = shardweave::full_tensor(scores);
    const at::Tensor sums = scores.div(kTemperature).softmax(-1).cumsum(-1);
    const auto next = sums.lt(uniform_at(seed, i)).sum().item<int64_t>();
    all.push_back(static_cast<char>(std::min<int64_t>(next, GptImpl::kVocabulary - 1)));
  }
  result.generated = all.substr(seq);
  return result;
}

}  // namespace train_gpt
