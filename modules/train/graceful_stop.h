// How a training ends when it is told to: at the end of a step, on all ranks, with time for a checkpoint.
//
//   auto signals = StopSignals::create().value();       // in main(): SIGTERM, SIGUSR1
//   GracefulStop stop(world.comm(), signals.get());     // on each rank
//   for (;;) {
//     train(step++);
//     if (*stop.step_done()) break;                     // on all ranks at the same step
//   }
//   save(step);                                         // so many are done
//
// Slurm sends SIGTERM before it takes a job's nodes away (preemption, scancel), and what --signal=USR1@120
// asks for two minutes before its time is over; batch systems and Kubernetes do alike. The signal comes to
// some ranks and not to others, and to each in another step. So ranks agree at the ends of steps: one
// all-reduce of four bytes, every `every` steps.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "shardweave/comm/communicator.h"

namespace shardweave {

// While it lives, these signals end nothing: they are remembered. Signals are the process's, so there is
// one at a time, for all ranks that are threads. What a handler did before is done no more until it is
// gone; then again.
class StopSignals {
 public:
  // SIGTERM and SIGUSR1. FailedPrecondition while there is another one, InvalidArgument for a number that
  // is no signal or one that cannot be caught.
  static absl::StatusOr<std::unique_ptr<StopSignals>> create();
  static absl::StatusOr<std::unique_ptr<StopSignals>> create(const std::vector<int>& signals);
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  // The first one that has come; 0: none. Any thread. However many come, the process goes on: a launcher
  // and a batch system often send the same one twice.
  int signal() const;

 private:
  class Handlers;
  explicit StopSignals(std::unique_ptr<Handlers> handlers);

  std::unique_ptr<Handlers> handlers_;
};

struct GracefulStopOptions {
  int64_t every = 1;  // steps between two agreements; a signal waits as long. 1 or more
};

// One rank's. Used by one thread at a time, but for request().
class GracefulStop {
 public:
  // `signals` outlives it; null: request() alone.
  GracefulStop(std::shared_ptr<Communicator> comm, const StopSignals* signals,
               const GracefulStopOptions& options = {});

  // At the end of a step: whether to stop here. The same on all ranks of `comm`, COLLECTIVE every `every`
  // steps. Once it is true it stays so. InvalidArgument for options out of range, else the communicator's
  // error.
  absl::StatusOr<bool> step_done();

  // This rank wants to stop, for a reason of its own (its time is over). Any thread.
  void request() { is_requested_ = true; }
  // That has led to the end, on whatever rank; 0: none, or a request().
  int signal() const { return signal_; }

 private:
  const std::shared_ptr<Communicator> comm_;
  const StopSignals* const signals_;
  const GracefulStopOptions options_;
  std::atomic<bool> is_requested_ = false;
  int64_t steps_ = 0;
  bool has_stopped_ = false;
  int signal_ = 0;
};

}  // namespace shardweave
