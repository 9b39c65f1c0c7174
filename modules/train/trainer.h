// Trainer: the loop around a training step. A program says what its model, its optimizer and the loss of a
// batch are; the rest happens alike on all ranks: gradients are accumulated, synchronised and clipped, the
// learning rate is scheduled, checkpoints come and go, a run resumes, tells how it goes, and ends in order.
//
//   FusedOptimizer optimizer(unique_parameters(*model), AdamWOptions{.lr = 3e-4});
//   TokenLoader loader(files, {.seq = 1024, .batch = 8}, mesh, {{"dp", Shard(0)}});
//   Trainer trainer(*model, optimizer, mesh,
//                   {.steps = 10000,
//                    .accumulate = 4,                                         // 32 samples a step
//                    .clip_norm = 1.0,
//                    .schedule = Schedule::cosine(10000).warmup(500),
//                    .checkpoints = "run",
//                    .save_every = 500,
//                    .resume = Resume::kIfThere});
//   const TrainerResult result = trainer.run(loader, [&](const TokenBatch& batch) {
//     return model->loss(batch.tokens, batch.targets);
//   });
//
// Batches of one's own come by their number, counted over all runs, so that a run that goes on needs no
// more to find its place:
//
//   trainer.run([&](int64_t batch) -> std::optional<at::Tensor> {
//     if (batch == num_batches) return std::nullopt;     // on all ranks
//     const auto [x, y] = batch_of(batch);               // DTensors
//     return model->loss(x, y);
//   });
//
// A step is what one would write by hand:
//
//   for each of `accumulate` batches: (loss(batch) / accumulate).backward()
//   finish_grad_sync(module), clip_grad_norm(parameters, clip_norm), optimizer.step(), zero_grad()
//   evaluate() if it is time, step_done(), agreement whether to stop, metrics, checkpoint if it is time
//
// The module is distributed before: with distributed_data_parallel() its GradSync is `sync` (without it
// each batch's gradients travel alone), with ZeRO the ZeroRedundancyOptimizer is the optimizer, and for
// fully_shard() and parallelize_module() there is nothing to say. A checkpoint has the module, the optimizer, the mesh's random numbers, the loader's position, and what
// was added to state(); it resumes on any mesh, plan and kind of parallelism that load_checkpoint() takes;
// on another mesh than that which saved it every byte of it is compared with its checksum first.
//
// How a run ends: after `steps` steps; where there are no batches any more; after request_stop(), or a
// signal (graceful_stop.h), on all ranks at the same step; where a file of metrics cannot be written.
// Whichever it is, there is a checkpoint of the last step then, which is tried twice. A save beside training that
// fails is a warning as long as a later one is there; but FailedPrecondition, PermissionDenied and AlreadyExists,
// which time does not mend, end the run at the next save. A directory that another run saves into, or that nothing
// can be written to, is an error before the first step. After an exception nothing is saved, and the trainer is of no
// more use: the checkpoints before it are whole.
//
// Collective over the mesh, all of it, and all ranks are given the same: numbers, texts, which callbacks
// there are, and the schedule's factors at three steps are compared. Callbacks are called on all ranks.
// What is written (progress, writers, log, events) counts on the mesh's first rank alone. Threads: as
// the model's, but for request_stop().
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <ostream>
#include <source_location>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/time/time.h"
#include "shardweave/dtensor/grad_sync.h"
#include "shardweave/modules/checkpoint/checkpointer.h"
#include "shardweave/modules/data/token_loader.h"
#include "shardweave/modules/optim/fused_optimizer.h"
#include "shardweave/modules/optim/grad_scaler.h"
#include "shardweave/modules/optim/schedule.h"
#include "shardweave/modules/train/graceful_stop.h"
#include "shardweave/modules/train/metrics_writer.h"
#include "shardweave/modules/train/throughput.h"
#include "shardweave/modules/zero.h"

namespace shardweave {

enum class Resume : uint8_t {
  kNo,       // from the beginning: FailedPrecondition if the directory has checkpoints
  kIfThere,  // the newest checkpoint, or from the beginning: what a job does that is started again
  kNewest,   // Error (NotFound) without one
};

// What was done in a step.
struct TrainerStep {
  int64_t step = 0;  // that are done
  double loss = 0;   // the mean over the step's batches
  double grad_norm = 0;
  bool is_skipped = false;  // by the scaler
  std::vector<Metric>
      metrics;  // all that is told of it: those above, "lr", RunSpeed's, evaluate()'s
};

struct TrainerOptions {
  int64_t steps = 1;       // of all runs together
  int64_t accumulate = 1;  // batches of a step
  // The gradient's largest norm (clip_grad_norm.h). It is measured in any case.
  double clip_norm = std::numeric_limits<double>::infinity();
  // A gradient that is not finite: an Error (OutOfRange) on all ranks, before the optimizer sees it; or, if
  // true, taken as it is. With a scaler there is no error: such steps are skipped.
  bool allow_nonfinite = false;
  // By what the optimizer's learning rates are multiplied in a step; counted from 0. Its length is its
  // own: Schedule::cosine(n) is 0 from step n on.
  std::function<double(int64_t step)> schedule = Schedule::constant();
  // For gradients of 16 bits; its scale is in the checkpoint, which loads with a scaler again. It outlives
  // the trainer, as all that is pointed to here does.
  GradScaler* scaler = nullptr;
  // What its scale was multiplied by after a step: for PowerSgd::rescale(). (What a PowerSgd has learned is in
  // no checkpoint, for each rank has its own: a run that resumes learns it anew.)
  std::function<void(double factor)> scale_changed = {};
  // That of distributed_data_parallel(): it waits for the last batch of a step.
  GradSync* sync = nullptr;
  // Gradients of fully_shard()'s units wait for the last batch of a step, too (FullyShardNoSync): whole
  // ones meanwhile, which take memory as in a model that is not sharded.
  bool fully_shard_no_sync = false;

  // A directory ("": nothing is saved), which gets a checkpoint at the end of a run and, beside training,
  // every so many steps if that is above 0.
  std::string checkpoints = {};
  int64_t save_every = 0;
  int64_t keep_last = 2;              // checkpoints that stay; 0: all
  bool copy_beside_training = false;  // CheckpointOptions; `loss` writes to no parameter then
  absl::Duration save_timeout = absl::Hours(1);  // how long ranks wait for the slowest to write
  Resume resume = Resume::kNo;

  // Called every so many steps (0: at the end alone), and after the last of a run that is not stopped. On
  // all ranks, without gradients, in the module's evaluation mode, with the random numbers of before
  // afterwards. Its metrics are the step's; those of the first rank are written. InvalidArgument for one
  // that is called as another of the step ("loss", "tokens_per_second", ...), "step" or "time".
  std::function<std::vector<Metric>()> evaluate = {};
  int64_t evaluate_every = 0;

  // What the mesh's first rank writes: JSON lines, a folder for TensorBoard, writers of the program's own,
  // and a bar.
  std::string log = {};
  std::string events = {};
  std::vector<MetricsWriter*> writers = {};
  std::ostream* progress = nullptr;  // null: none
  bool is_terminal = false;          // what `progress` writes to
  // Units of the bar's speed are tokens if tokens_per_step is above 1, else steps.
  ThroughputOptions throughput = {};

  const StopSignals* signals = nullptr;  // of the process
  GracefulStopOptions stop = {};
  // On all ranks, after each step. A group that it adds to the optimizer is scheduled and saved; who resumes
  // from a checkpoint behind that step adds it before run() (list_checkpoints() says where it will begin).
  std::function<void(const TrainerStep&)> step_done = {};
};

struct TrainerResult {
  int64_t first_step = 0;     // that were done before this run
  int64_t last_step = 0;      // and after it
  bool is_stopped = false;    // by a signal or request_stop(), before `steps`
  bool is_exhausted = false;  // there were no batches any more, before `steps`
  int signal = 0;             // which; 0: none
};

namespace trainer_internal {
// What a trainer asks of an optimizer, whichever it is.
struct AnyOptimizer {
  std::function<void(std::source_location)> step;
  std::function<void()> zero_grad;
  std::function<double()> lr;
  // While that lives, backward sends nothing. Null: it never does.
  std::function<std::shared_ptr<void>()> no_sync;
  std::function<void(StateDict&, const torch::nn::Module&)> add_to;
  std::function<std::unique_ptr<Scheduler>(std::function<double(int64_t)>)> schedule;
};
AnyOptimizer any_optimizer(FusedOptimizer& optimizer);
AnyOptimizer any_optimizer(torch::optim::Optimizer& optimizer);
template <typename Optimizer>
AnyOptimizer any_optimizer(ZeroRedundancyOptimizer<Optimizer>& optimizer) {
  AnyOptimizer any = any_optimizer(optimizer.optimizer());
  any.step = [&optimizer](std::source_location where) { optimizer.step(where); };
  any.zero_grad = [&optimizer] { optimizer.zero_grad(); };
  any.no_sync = [&optimizer]() -> std::shared_ptr<void> {
    return std::make_shared<ZeroPartition::NoSync>(optimizer.partition());
  };
  any.add_to = [&optimizer](StateDict& state, const torch::nn::Module& module) {
    add_optimizer(state, optimizer, module);
  };
  return any;
}
}  // namespace trainer_internal

class Trainer {
 public:
  // `optimizer`: a FusedOptimizer, one of torch::optim's, or a ZeroRedundancyOptimizer of either, with
  // parameters of `module`; its learning rates, as they are now, are what the schedule multiplies (after
  // another Trainer or Scheduler they are what that has left: set them first). Module and optimizer outlive
  // it. Collective; touches no file. Throws Error (InvalidArgument), on all ranks, for options out of range
  // or that differ between ranks, for a module of which no parameter is a DTensor where there are several
  // ranks, and what add_module() and add_optimizer() throw.
  template <typename Optimizer>
  Trainer(torch::nn::Module& module, Optimizer& optimizer, const MeshPtr& mesh,
          const TrainerOptions& options)
      : Trainer(module, trainer_internal::any_optimizer(optimizer), mesh, options) {}
  ~Trainer();
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  // What checkpoints have. The program's own values and tensors are added before run().
  StateDict& state();

  // Loads the checkpoint first, if it is to; one of `steps` or more leaves nothing to do. `loss` is the
  // forward of a batch: one number, of which backward is called; nullopt, on all ranks (join.h is for ranks
  // with different numbers of batches), if there is none. Batches left over at the end, fewer than
  // `accumulate`, are left out, and come first in the next run; what they did to buffers of fewer than 2^22
  // elements is undone. Run again, it goes on where it stopped; batches
  // are counted over all runs, and the checkpoint knows how many there were, whatever `accumulate` is then.
  //
  // Throws Error: what is said above, what Checkpointer throws, and, on all ranks at the end of the run,
  // the error of a file of metrics; and what `loss`, evaluate() and step_done() throw, on the rank where
  // they do (run_ranks() tells the others).
  TrainerResult run(const std::function<std::optional<at::Tensor>(int64_t batch)>& loss,
                    std::source_location where = std::source_location::current());
  // Of a loader's batches, which outlives the trainer; its position is in the checkpoint, as "loader".
  TrainerResult run(TokenLoader& loader, const std::function<at::Tensor(const TokenBatch&)>& loss,
                    std::source_location where = std::source_location::current());

  // Ends the run after the step that is under way. Of any rank, any thread.
  void request_stop();

 private:
  class Run;
  struct Parts;
  Trainer(torch::nn::Module& module, trainer_internal::AnyOptimizer optimizer, const MeshPtr& mesh,
          const TrainerOptions& options);

  std::unique_ptr<Parts> parts_;
};

}  // namespace shardweave
