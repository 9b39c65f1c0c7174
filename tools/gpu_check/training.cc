// Training on GPUs against the CPU: losses, checkpoints, memory.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "c10/core/CachingDeviceAllocator.h"
#include "c10/core/GradMode.h"
#include "check.h"
#include "shardweave/dtensor/captured_step.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/dtensor/grad_sync.h"
#include "shardweave/dtensor/random.h"
#include "shardweave/modules/checkpoint/checkpointer.h"
#include "shardweave/modules/checkpoint/state_dict.h"
#include "shardweave/modules/data_parallel.h"
#include "shardweave/modules/fully_shard.h"
#include "shardweave/modules/optim/fused_optimizer.h"
#include "shardweave/modules/parallelize_module.h"
#include "transformer.h"

namespace shardweave_tool {
namespace {

using namespace shardweave;

constexpr int kSteps = 5;
constexpr int kBeforeCapture = 2;

// Steps of a model; `loss` is that of the last one.
struct Training {
  Training(Transformer model_in, Words words_in)
      : model(std::move(model_in)),
        words(std::move(words_in)),
        optimizer(model->parameters(), AdamWOptions{.lr = 5e-3}) {}

  void step() {
    optimizer.zero_grad();
    loss = loss_of(model, words);
    loss.backward();
    finish_grad_sync(*model);
    optimizer.step();
  }
  CapturedStep capture(const MeshPtr& mesh) {
    return CapturedStep::capture(mesh, model->parameters(), [this] { step(); });
  }

  Transformer model;
  const Words words;
  FusedOptimizer optimizer;
  at::Tensor loss;
};

std::vector<double> train(const Transformer& model, const Words& words, int steps) {
  Training training(model, words);
  std::vector<at::Tensor> losses;
  for (int i = 0; i < steps; ++i) {
    training.step();
    losses.push_back(training.loss.detach());
  }
  std::vector<double> result;
  for (const at::Tensor& loss : losses) result.push_back(on_host(loss).item<double>());
  return result;
}

// The first ones are called, the others replayed.
std::vector<double> train_captured(const Transformer& model, const Words& words, int steps,
                                   const MeshPtr& mesh) {
  Training training(model, words);
  std::vector<double> result;
  for (int i = 0; i < kBeforeCapture; ++i) {
    training.step();
    result.push_back(on_host(training.loss.detach()).item<double>());
  }
  CapturedStep captured = training.capture(mesh);
  for (int i = kBeforeCapture; i < steps; ++i) {
    captured.replay();
    result.push_back(on_host(training.loss.detach()).item<double>());
  }
  return result;
}

Transformer make_model(const TransformerSizes& sizes = {}) {
  Transformer model(sizes);
  fill(*model);
  return model;
}

Words on_mesh(const Words& words, c10::Device device, const MeshPtr& mesh,
              const Placements& placements) {
  const auto place = [&](const at::Tensor& t) {
    return distribute_tensor(t.to(device), mesh, placements, {.source = std::nullopt});
  };
  return {place(words.given), place(words.next)};
}

struct Parallelism {
  const char* name;
  std::vector<MeshDim> (*dims)(int64_t ranks);  // empty: not of so many
  Placements batch;
  // What it returns lives until the end.
  std::shared_ptr<void> (*prepare)(Transformer& model, const MeshPtr& mesh);
  double within = 2e-3;  // of the loss, relative
  bool rests_on_cpu = false;
};

std::vector<MeshDim> data_parallel(int64_t ranks) {
  return {{"dp", ranks}};
}

const std::vector<Parallelism>& kinds() {
  static const auto& table = *new std::vector<Parallelism>{
      {"ddp",
       data_parallel,
       {Shard(0)},
       [](Transformer& model, const MeshPtr& mesh) -> std::shared_ptr<void> {
         return std::shared_ptr<GradSync>(new GradSync(distributed_data_parallel(*model, mesh)));
       }},
      {"fsdp",
       data_parallel,
       {Shard(0)},
       [](Transformer& model, const MeshPtr& mesh) -> std::shared_ptr<void> {
         fully_shard(*model, mesh, {.units = {"blocks.*"}});
         return nullptr;
       }},
      {"fsdp in bfloat16",
       data_parallel,
       {Shard(0)},
       [](Transformer& model, const MeshPtr& mesh) -> std::shared_ptr<void> {
         fully_shard(*model, mesh, {.units = {"blocks.*"}, .param_dtype = at::kBFloat16});
         return nullptr;
       },
       5e-2},
      {"fsdp with CPU offload",
       data_parallel,
       {Shard(0)},
       [](Transformer& model, const MeshPtr& mesh) -> std::shared_ptr<void> {
         fully_shard(*model, mesh, {.units = {"blocks.*"}, .compute_device = at::kCUDA});
         return nullptr;
       },
       2e-3,
       /*rests_on_cpu=*/true},
      {"tp",
       [](int64_t ranks) -> std::vector<MeshDim> { return {{"tp", ranks}}; },
       {Replicate()},
       [](Transformer& model, const MeshPtr& mesh) -> std::shared_ptr<void> {
         parallelize_module(*model, mesh, tensor_parallel_plan());
         return nullptr;
       }},
      {"tp in fsdp",
       [](int64_t ranks) -> std::vector<MeshDim> {
         if (ranks < 4 || ranks % 2 != 0) return {};
         return {{"dp", ranks / 2}, {"tp", 2}};
       },
       {Shard(0), Replicate()},
       [](Transformer& model, const MeshPtr& mesh) -> std::shared_ptr<void> {
         parallelize_module(*model, mesh, tensor_parallel_plan());
         fully_shard(*model, mesh, {.mesh_dim = "dp", .units = {"blocks.*"}});
         return nullptr;
       }},
  };
  return table;
}

// The largest difference between losses, relative.
double apart(const std::vector<double>& got, const std::vector<double>& want) {
  double most = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double off = std::abs(got[i] - want[i]) / std::abs(want[i]);
    if (!(off <= most)) most = off;
  }
  return most;
}

}  // namespace

void check_training(Session& session, Check& check) {
  const TransformerSizes sizes;
  const Words words = make_words(/*batch=*/8, /*length=*/16, sizes.words);
  Transformer here = make_model();
  const std::vector<double> want = train(here, words, kSteps);
  check.expect(want.back() < want.front(), "the CPU's loss does not fall");
  const auto compare = [&](const std::string& name, const std::vector<double>& got, double within) {
    const double off = apart(got, want);
    check.figure({.name = absl::StrCat(name, ": losses are off by"), .value = off});
    check.expect(off <= within, absl::StrCat(name, ": losses are off by ", off,
                                             " of the CPU's, wanted ", within, " at most"));
  };
  check.attempt("plain", [&] {
    Transformer model = make_model();
    model->to(session.device);
    const Words there = {words.given.to(session.device), words.next.to(session.device)};
    compare("plain", train(model, there, kSteps), 2e-3);
  });
  std::string left_out;
  for (const Parallelism& kind : kinds()) {
    const std::vector<MeshDim> dims = kind.dims(session.ranks());
    if (dims.empty()) {
      absl::StrAppend(&left_out, "; ", kind.name, " wants an even number of ranks, 4 or more");
      continue;
    }
    check.attempt(kind.name, [&] {
      const MeshPtr mesh = session.mesh(dims);
      Transformer model = make_model();
      if (!kind.rests_on_cpu) model->to(session.device);
      const std::shared_ptr<void> kept = kind.prepare(model, mesh);
      compare(kind.name, train(model, on_mesh(words, session.device, mesh, kind.batch), kSteps),
              kind.within);
    });
  }
  check.looked_at(absl::StrCat(kSteps, " steps of AdamW", left_out));
}

void check_captured(Session& session, Check& check) {
  if (session.ranks() > 1 && session.world->comm()->backend_name() != "nccl") {
    return check.skip("steps of several ranks are captured over NCCL");
  }
  const TransformerSizes sizes;
  const Words words = make_words(/*batch=*/8, /*length=*/16, sizes.words);
  const std::vector<double> want = train(make_model(), words, kSteps);
  for (const Parallelism& kind : kinds()) {
    const std::vector<MeshDim> dims = kind.dims(session.ranks());
    if (dims.empty() || kind.rests_on_cpu) continue;
    check.attempt(kind.name, [&] {
      const MeshPtr mesh = session.mesh(dims);
      Transformer model = make_model();
      model->to(session.device);
      const std::shared_ptr<void> kept = kind.prepare(model, mesh);
      const Words there = on_mesh(words, session.device, mesh, kind.batch);
      const double off = apart(train_captured(model, there, kSteps, mesh), want);
      check.figure({.name = absl::StrCat(kind.name, ": losses are off by"), .value = off});
      check.expect(off <= kind.within,
                   absl::StrCat(kind.name, ": losses are off by ", off, " of the CPU's, wanted ",
                                kind.within, " at most"));
    });
  }
  const MeshPtr alone = session.this_rank();
  check.attempt("random numbers", [&] {
    const at::Tensor x =
        distribute_tensor(at::ones({1000}).to(session.device), alone, {Replicate()});
    const auto draw = [&] { return at::dropout(x, 0.5, true); };
    manual_seed(alone, 3);
    std::vector<at::Tensor> called;
    for (int i = 0; i < 4; ++i) called.push_back(on_host(draw()));
    manual_seed(alone, 3);
    check.expect(at::equal(on_host(draw()), called[0]), "the same seed draws other numbers");
    at::Tensor drawn;
    std::optional<CapturedStep> captured;
    try {
      captured.emplace(CapturedStep::capture(alone, {}, [&] { drawn = draw(); }));
    } catch (const Error& error) {
      if (!absl::IsFailedPrecondition(error.status())) throw;
      check.fact("random numbers", "drawn by the host, without --config=cuda: not captured");
      return;
    }
    for (int i = 1; i < 3; ++i) {
      captured->replay();
      check.expect(at::equal(on_host(drawn), called[i]),
                   "a replay draws other numbers than a call");
    }
    check.expect(at::equal(on_host(draw()), called[3]), "a call after it draws other numbers");
    check.fact("random numbers", "those of calls, to the bit");
  });

  check.attempt("a step that cannot be captured", [&] {
    const at::Tensor x = distribute_tensor(at::ones({8}).to(session.device), alone, {Replicate()});
    at::Tensor sum;
    try {
      CapturedStep::capture(alone, {}, [&] { (x * 2).sum().item<float>(); });
      check.fail("a number of a step that is captured has reached the host");
    } catch (const Error& error) {
      if (!absl::IsFailedPrecondition(error.status())) throw;
    }
    CapturedStep captured = CapturedStep::capture(alone, {}, [&] { sum = (x * 2).sum(); });
    captured.replay();
    check.expect(on_host(sum).item<double>() == 16, "a capture after it has other numbers");
  });

  // What the host costs a small model.
  const int dim = session.options.sizes.captured_dim;
  const TransformerSizes small = {.words = 256, .dim = dim, .heads = 4, .layers = 4};
  const Words few = make_words(/*batch=*/4, /*length=*/64, small.words);
  const auto trained = [&](bool distributed) {
    Transformer model = make_model(small);
    model->to(session.device);
    if (!distributed) {
      return Training(model, {few.given.to(session.device), few.next.to(session.device)});
    }
    distribute_module(*model, alone, ParameterPlan());
    return Training(model, on_mesh(few, session.device, alone, {Replicate()}));
  };
  Training plain = trained(false), called = trained(true), replayed = trained(true);
  for (int i = 0; i < 3; ++i) replayed.step();
  CapturedStep captured = replayed.capture(alone);
  const std::vector<std::pair<const char*, std::function<void()>>> ways = {
      {"a step of plain tensors", [&] { plain.step(); }},
      {"of DTensors", [&] { called.step(); }},
      {"of DTensors, replayed", [&] { captured.replay(); }}};
  std::vector<std::vector<double>> seconds(ways.size());
  for (int round = 0; round < session.options.sizes.captured_rounds + 2; ++round) {
    for (size_t i = 0; i < ways.size(); ++i) {
      synchronize(session.device);
      const auto begin = std::chrono::steady_clock::now();
      for (int k = 0; k < 10; ++k) ways[i].second();
      synchronize(session.device);
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
      if (round >= 2) seconds[i].push_back(took.count() / 10);
    }
  }
  for (size_t i = 0; i < ways.size(); ++i) {
    check.figure({.name = ways[i].first, .value = median(seconds[i]) * 1e3, .unit = "ms"});
  }
  check.figure({.name = "called / replayed", .value = median(seconds[1]) / median(seconds[2])});
  check.looked_at(absl::StrCat(kBeforeCapture, " steps of AdamW, and ", kSteps - kBeforeCapture,
                               " replays; speed with dim ", small.dim, ", ", small.layers,
                               " layers, 4 x 64 words"));
}

void check_checkpoint(Session& session, Check& check) {
  if (session.options.directory.empty() && session.world->local_size() != session.world->size()) {
    return check.skip(
        "ranks are on several machines: name a directory that they share, --directory");
  }
  const std::string mine =
      (session.options.directory.empty() ? std::filesystem::temp_directory_path()
                                         : std::filesystem::path(session.options.directory)) /
      absl::StrCat("shardweave_gpu_check_", ::getpid());
  const std::string directory = value_or_throw(texts_of_ranks(session, mine))[0];
  const MeshPtr mesh = session.all_ranks();
  std::vector<at::Tensor> want;
  for (const at::Tensor& p : make_model()->parameters()) want.push_back(p.detach() * 2);
  const auto compare = [&](const Transformer& model, const char* where) {
    const std::vector<at::Tensor> parameters = model->parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      check.expect(at::equal(on_host(parameters[i]), want[i]),
                   absl::StrCat("parameter ", i, " comes back to ", where, " with other numbers"));
    }
  };
  const auto sharded = [&] {
    Transformer model = make_model();
    model->to(session.device);
    fully_shard(*model, mesh, {.units = {"blocks.*"}});
    return model;
  };
  check.attempt("save", [&] {
    Transformer model = sharded();
    {
      const c10::AutoGradMode no_grad(false);
      for (at::Tensor p : model->parameters()) p.mul_(2);
    }
    StateDict state;
    add_module(state, *model);
    save_checkpoint(directory, 7, state, mesh);
  });
  check.attempt("load on GPUs", [&] {
    Transformer model = sharded();
    StateDict state;
    add_module(state, *model);
    check.expect(load_checkpoint(directory, state, mesh).step == 7, "another step");
    compare(model, "GPUs");
    for (const at::Tensor& p : model->parameters()) {
      check.expect(to_local(p).device() == session.device, "a parameter has left its GPU");
    }
  });
  check.attempt("load on the CPU", [&] {
    Transformer model = make_model();
    distribute_module(*model, mesh, {{"*", {Shard(0)}}});
    StateDict state;
    add_module(state, *model);
    load_checkpoint(directory, state, mesh);
    compare(model, "the CPU");
  });
  // Nobody reads there any more.
  value_or_throw(texts_of_ranks(session, ""));
  if (session.world->rank() == 0) {
    std::error_code ignored;
    std::filesystem::remove_all(directory, ignored);
  }
  check.looked_at(absl::StrCat(want.size(), " parameters"));
}

void check_memory(Session& session, Check& check) {
  auto* const allocator =
      dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(session.device.type()));
  if (allocator == nullptr) {
    return check.skip("LibTorch's allocator of this device keeps no statistics");
  }
  const c10::DeviceIndex index = session.device.index();
  const auto bytes = [&] {
    return allocator->getDeviceStats(index)
        .allocated_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
  };
  const TransformerSizes sizes = {.words = 256,
                                  .dim = session.options.sizes.memory_dim,
                                  .heads = 8,
                                  .layers = session.options.sizes.memory_layers};
  const Words words = make_words(/*batch=*/session.ranks(), /*length=*/64, sizes.words);
  const Words part = {words.given.slice(0, 0, 1).to(session.device),
                      words.next.slice(0, 0, 1).to(session.device)};
  int64_t activations = 0;
  {
    Transformer model = make_model(sizes);
    model->to(session.device);
    loss_of(model, part).backward();  // what libraries allocate once
    model->zero_grad();
    synchronize(session.device);
    const int64_t before = bytes().current;
    allocator->resetPeakStats(index);
    const at::Tensor loss = loss_of(model, part);
    activations = bytes().peak - before;
  }
  const MeshPtr mesh = session.all_ranks();
  const Words there = on_mesh(words, session.device, mesh, {Shard(0)});
  synchronize(session.device);
  const int64_t before = bytes().current;
  Transformer model = make_model(sizes);
  model->to(session.device);
  const std::vector<FullyShardUnit> units = fully_shard(*model, mesh, {.units = {"blocks.*"}});
  int64_t kept = 0;
  std::vector<int64_t> wholes;
  for (const FullyShardUnit& unit : units) {
    kept += unit.kept;
    wholes.push_back(unit.numel);
  }
  std::sort(wholes.begin(), wholes.end(), std::greater<>());
  FusedOptimizer optimizer(model->parameters(), AdamWOptions{.lr = 1e-4});
  for (int i = 0; i < 4; ++i) {
    if (i == 2) allocator->resetPeakStats(index);
    optimizer.zero_grad();
    loss_of(model, there).backward();
    finish_grad_sync(*model);
    optimizer.step();
  }
  synchronize(session.device);
  const int64_t peak = bytes().peak - before;
  constexpr int64_t kBytes = sizeof(float);
  // Parameters, gradients and two moments; two units that are whole; what forward keeps.
  const int64_t whole = session.ranks() == 1 ? 0 : (wholes[0] + wholes[1]) * kBytes;
  const int64_t formula = 4 * kept * kBytes + whole + activations;
  const double ratio = static_cast<double>(peak) / static_cast<double>(formula);
  check.figure({.name = "peak", .value = static_cast<double>(peak) / 1e6, .unit = "MB"});
  check.figure({.name = "formula", .value = static_cast<double>(formula) / 1e6, .unit = "MB"});
  check.figure({.name = "peak / formula", .value = ratio, .at_most = 1.05});
  check.expect(ratio <= 1.5, absl::StrCat("a rank holds ", ratio, " times what it should"));
  check.looked_at("4 x what a rank keeps, two whole units, and what forward keeps");
}

}  // namespace shardweave_tool
