// A step of training on a GPU that is captured once and replayed: the GPU runs its kernels and
// collectives again, and the host does nothing for each of them (a CUDA graph).
//
//   at::Tensor loss;
//   const auto train = [&] {
//     optimizer.zero_grad();  // gradients are made anew in the step
//     loss = loss_of(words);
//     loss.backward();
//     finish_grad_sync(*model);
//     optimizer.step();
//   };
//   for (int i = 0; i < 3; ++i) train();  // as ever: what is made at first use is there
//   CapturedStep captured = CapturedStep::capture(mesh, model->parameters(), train);
//   while (next_batch(words)) {  // words.copy_(...): inputs are where they were
//     captured.replay();
//     optimizer.set_lr(schedule(++n));  // between replays, never in the step
//     if (n % 100 == 0) std::cout << loss.item<float>() << "\n";  // as are results
//   }
//
// capture() calls the step once. Nothing of it runs then: the first replay is the first time,
// and before it results hold no numbers. Host code in the step runs at capture only: the
// schedule's step, counters and the next batch stand between replays. All shapes are those of
// that call, and so is what the host decides in it. Read anew in each replay: FusedOptimizer's
// steps and learning rates (SGD, Adam, AdamW), and random numbers of DTensors, which go on as if
// the step had been called (where the program has kernels for them: --config=cuda). torch::optim
// keeps its numbers on the host, and would repeat those of the capture: its step() comes after
// the replay. Hooks, observers and counters see the step once. No number of it may be wanted by
// the host (.item(), a copy from or to the CPU, clip_grad_norm(), GradScaler): that is an error.
// To clip, let the step end before the optimizer: replay(), clip_grad_norm(), optimizer.step().
//
// What the step allocates stays the graph's as long as the CapturedStep is there: its results
// hold the numbers of the last replay, as do the gradients of `parameters`, which each replay
// makes their .grad again. Several backwards in a step add up, as ever. Tensors that it only
// reads (inputs, weights) must stay where they are, and live; the optimizer may go, and its
// learning rate stays then. Between replays anything may be called, evaluation, a checkpoint,
// the step itself: it finds the weights as the last replay has left them. (A step that is called
// assigns `loss` anew; keep the captured one's in a variable of its own.)
//
// What is used for the first time in the step is refused where a replay would make it anew:
// units of fully_shard(), an optimizer's state, plain tensors that the ranks have not compared.
// Take a step before. Everything in it is on the one mesh (not on slices of it), and no
// GradientHook works in it.
//
// All ranks of the mesh capture the same step, and replay it equally often: each replay is
// followed by a small collective of every group that it communicates in, by which they compare
// that, and by which a rank that is gone becomes an error and no hang. On one rank, or over
// NCCL.
//
// Throws Error. FailedPrecondition: LibTorch has no CUDA here (load_cuda()), the backend of
// several ranks is not NCCL, something is being captured already, the step wants a number on the
// host, random numbers without kernels, or what is refused above. InvalidArgument: a parameter
// is not on the current GPU; a rank has captured another step. Unimplemented: a step of Lion,
// Adafactor or Muon. What the step throws comes out as it is. After an error all goes on, with
// the gradients of before. Threads: as the mesh; a replay may come from another thread than the
// capture.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <source_location>
#include <vector>

#include "ATen/core/Tensor.h"
#include "shardweave/dtensor/dtensor.h"

namespace shardweave {

class CapturedStep {
 public:
  // On the thread's current GPU. `parameters`: those that the step has gradients for; without
  // backward, none.
  static CapturedStep capture(const MeshPtr& mesh, const std::vector<at::Tensor>& parameters,
                              const std::function<void()>& step,
                              std::source_location where = std::source_location::current());
  ~CapturedStep();
  CapturedStep(CapturedStep&&) noexcept;
  CapturedStep& operator=(CapturedStep&&) noexcept;

  // On the current stream, behind what is on it. The host does not wait.
  void replay();
  // So far.
  int64_t replays() const;

 private:
  class Gradients;
  struct State;
  explicit CapturedStep(std::unique_ptr<State> state);

  std::unique_ptr<State> state_;
};

}  // namespace shardweave
