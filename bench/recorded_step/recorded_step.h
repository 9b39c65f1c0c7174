// An experiment: a step of training on the CPU that is recorded once, as the list of its kernels and
// collectives, and replayed without dispatch and without autograd. What it gains is measured by
// `./bazelw run -c opt //bench:tp`; the library has no such thing (docs/gpu.md says why).
//
//   run_recordable_ranks(2, [](World& world) { ...
//
//   at::Tensor loss;
//   RecordedStep step = RecordedStep::record([&] {
//     loss = loss_of(model, words);
//     loss.backward();
//     return std::vector<at::Tensor>{to_local(loss.detach()), ...the gradients' local parts};
//   });
//   optimizer.step();                 // record() has run the step
//   words.copy_(next); step.replay();  // the results hold the numbers of `next`
//   optimizer.step();
//
// How: every operator that LibTorch's dispatcher calls is seen (at::RecordFunction). One whose
// arguments are plain tensors, and that has a kernel of its own, is recorded, with its arguments as
// constants or as numbers of slots that earlier kernels fill; what it calls inside is not. One of
// DTensors, or that is composed of others, is not recorded: those that it calls are. Gradients are
// operators like others by then. Collectives are recorded by a backend around the real one, which
// knows the slots by their memory. Shapes, and what the host decides, stay those of the recording.
//
// Not recorded is what goes past the dispatcher: parts that are packed by hand for a collective
// (sequence parallel, FSDP), optimizers that are fused. So memory that comes from empty() and that
// no kernel or collective has written is an error where it is read, as is a collective's memory that
// no operator has made. (By whole storages: what is written by both is not seen.) Errors are also
// numbers that the host reads (.item()), random numbers of DTensors, autocast, and tensors that are
// not dense ones of the CPU. Before the recording the step has run as ever once or twice, so that
// what is made at first use is there; backward stays in this thread (no checkpoints in each other),
// and nothing in the step polls a Work: done() is false while it is recorded.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "shardweave/comm/world.h"

namespace bench_recorded_step {

class RecordedStep {
 public:
  // Runs `step`, in this thread. It returns plain tensors that it has made; their memory holds the
  // results of the last replay from then on. Throws std::runtime_error for what cannot be recorded.
  static RecordedStep record(const std::function<std::vector<at::Tensor>()>& step);
  ~RecordedStep();
  RecordedStep(RecordedStep&&) noexcept;

  // On all ranks alike.
  void replay();

 private:
  struct State;
  explicit RecordedStep(std::unique_ptr<State> state);

  std::unique_ptr<State> state_;
};

// run_ranks() for steps that are recorded: over a backend whose collectives can be.
absl::Status run_recordable_ranks(int num_ranks,
                                  const std::function<absl::Status(shardweave::World&)>& body);

}  // namespace bench_recorded_step
