// The examples at the top of the headers of modules/data and modules/train, as docs_test finds them
// there: compiled, not run.
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "shardweave/comm/world.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/modules/data/sample_order.h"
#include "shardweave/modules/data/token_file.h"
#include "shardweave/modules/data/token_loader.h"
#include "shardweave/modules/data/token_windows.h"
#include "shardweave/modules/train/event_file.h"
#include "shardweave/modules/train/graceful_stop.h"
#include "shardweave/modules/train/metrics_writer.h"
#include "shardweave/modules/train/throughput.h"
#include "shardweave/modules/train/trainer.h"
#include "shardweave/placement/layout.h"
#include "torch/nn/module.h"

// Examples show what a call gives, and leave it at that.
#pragma GCC diagnostic ignored "-Wunused-result"
#pragma GCC diagnostic ignored "-Wunused-value"
#pragma GCC diagnostic ignored "-Wunused-variable"
#pragma GCC diagnostic ignored "-Wunused-but-set-variable"
#pragma GCC diagnostic ignored "-Wshadow"

namespace shardweave::header_examples {

void token_file() {
  absl::StatusOr<TokenFile> file = TokenFile::open("tokens.bin");
  file->size();
  std::vector<int64_t> window(1025);
  absl::Status status = file->read(/*begin=*/1024, absl::MakeSpan(window));
}

void token_file_writer() {
  absl::StatusOr<TokenFileWriter> writer = TokenFileWriter::create("tokens.bin");
  absl::Status status = writer->write({464, 2068, 7586});
  if (status.ok()) status = writer->close();
}

void token_windows(const TokenFile& file) {
  absl::StatusOr<TokenWindows> windows = TokenWindows::create({file}, /*seq=*/1024);
  windows->num_samples();
  std::vector<int64_t> sample(1025);
  absl::Status status = windows->read(/*sample=*/7, /*begin=*/0, absl::MakeSpan(sample));
}

void sample_order() {
  absl::StatusOr<SampleOrder> order = SampleOrder::create({.num_samples = 1000, .seed = 7});
  SamplePosition p;
  order->sample(p);
  p = order->after(p, 32);
  order->to_json(p);
}

struct Model {
  at::Tensor loss(const at::Tensor& tokens, const at::Tensor& targets);
};

void other_data(Model* model, const at::Tensor& images, const MeshPtr& mesh) {
  const SampleOrder order = SampleOrder::create({.num_samples = images.size(0), .seed = 7}).value();
  SamplePosition position;  // order.to_json(position) is for a checkpoint
  for (int step = 0; step < 100; ++step) {
    const int64_t batch = order.left(position, 32);
    const Interval mine = chunk(batch, mesh->mesh().size(), mesh->coordinate()[0]);
    std::vector<int64_t> rows;
    for (int64_t i = mine.begin; i < mine.end; ++i) {
      rows.push_back(order.sample(order.after(position, i)));
    }
    const at::Tensor local = images.index_select(0, at::tensor(rows, at::kLong));
    const at::Tensor x = from_local(local, mesh, {Shard(0)}, {{batch, 3, 32, 32}});
    model->loss(x, x).backward();
    position = order.after(position, batch);
  }
}

void token_loader(Model* model, const MeshPtr& mesh) {
  auto file = TokenFile::open("tokens.bin").value();
  TokenLoader loader({file}, {.seq = 1024, .batch = 32, .seed = 7}, mesh, {{"dp", Shard(0)}});
  while (std::optional<TokenBatch> batch = loader.next()) {
    model->loss(batch->tokens, batch->targets).backward();
  }
  const std::string position = loader.position();
  loader.set_position(position);
}

void event_file() {
  absl::StatusOr<EventFile> file = EventFile::create("runs/first");
  absl::Status status = file->write(/*step=*/10, {{"loss", 2.5}, {"lr", 3e-4}});
}

void metrics_writer() {
  absl::StatusOr<JsonLines> log = JsonLines::open("run.jsonl");
  absl::Status status = log->write(/*step=*/10, {{"loss", 2.5}, {"lr", 3e-4}});
}

void throughput() {
  Throughput throughput(
      {.tokens_per_step = 32 * 1024, .flops_per_token = 6e9, .peak_flops = 8 * 312e12});
  throughput.step_done();
  const RunSpeed speed = throughput.since_last();
  speed.to_string();
}

void train(int64_t step);
void save(int64_t step);

void graceful_stop(World& world) {
  int64_t step = 0;
  auto signals = StopSignals::create().value();
  GracefulStop stop(world.comm(), signals.get());
  for (;;) {
    train(step++);
    if (*stop.step_done()) break;
  }
  save(step);  // so many are done
}

struct ModuleWithLoss : torch::nn::Module {
  at::Tensor loss(const at::Tensor& tokens, const at::Tensor& targets);
};

void trainer(ModuleWithLoss* model, const MeshPtr& mesh, const std::vector<TokenFile>& files) {
  FusedOptimizer optimizer(unique_parameters(*model), AdamWOptions{.lr = 3e-4});
  TokenLoader loader(files, {.seq = 1024, .batch = 8}, mesh, {{"dp", Shard(0)}});
  Trainer trainer(*model, optimizer, mesh,
                  {.steps = 10000,
                   .accumulate = 4,
                   .clip_norm = 1.0,
                   .schedule = Schedule::cosine(10000).warmup(500),
                   .checkpoints = "run",
                   .save_every = 500,
                   .resume = Resume::kIfThere});
  const TrainerResult result = trainer.run(
      loader, [&](const TokenBatch& batch) { return model->loss(batch.tokens, batch.targets); });
}

std::pair<at::Tensor, at::Tensor> batch_of(int64_t batch);

void own_batches(Trainer& trainer, ModuleWithLoss* model, int64_t num_batches) {
  trainer.run([&](int64_t batch) -> std::optional<at::Tensor> {
    if (batch == num_batches) return std::nullopt;
    const auto [x, y] = batch_of(batch);
    return model->loss(x, y);
  });
}

}  // namespace shardweave::header_examples
