// A step of training on a GPU that is captured once and replayed: the GPU runs its kernels and
// collectives again, and the host does nothing for each of them (a CUDA graph).
//
//   for (int i = 0; i < 3; ++i) train();  // as ever: what is made at first use is there
//   CapturedStep step = CapturedStep::capture(mesh, model->parameters(), train);
//   while (next_batch(words)) {  // words.copy_(...): inputs are where they were
//     step.replay();
//     if (++n % 100 == 0) std::cout << loss.item<float>() << "\n";  // and so are results
//   }
//
// capture() calls the step once. Nothing of it runs then: the first replay is the first time. All
// shapes are those of that call, and so is what the host decides in it (branches, numbers that it
// computes). What it would count is read anew in each replay: FusedOptimizer's steps and learning
// rates (SGD, Adam, AdamW; torch::optim's are the host's, and stay as they were), and random numbers
// go on as if the step had been called (where the program has kernels for them: --config=cuda).
// Hooks, observers and counters see the step once. No number of it may be wanted by the host
// (.item(), clip_grad_norm(), GradScaler): that is an error.
//
// What the step allocates stays the graph's as long as the CapturedStep is there: its results hold the
// numbers of the last replay, as do the gradients of `parameters`, which each replay makes their .grad
// again. So a step may end before the optimizer, whose step() comes after the replay. Gradients are
// made anew in it: zero_grad() comes before backward(), in the step. Tensors that it only reads (inputs,
// weights) must stay where they are, and live.
//
// What is used for the first time in the step is refused where a replay would make it anew: units of
// fully_shard(), an optimizer's state, plain tensors that the ranks have not compared. Take a step
// before. Everything in it is on the one mesh (not on slices of it), and no gradient hook works in it.
//
// All ranks of the mesh capture the same step, and replay it equally often: each replay is followed by
// a small collective of every group that it communicates in, by which they compare that, and by which
// a rank that is gone becomes an error and no hang. On one rank, or over NCCL.
//
// Throws Error. FailedPrecondition: LibTorch has no CUDA here (load_cuda()), the backend is not NCCL,
// something is being captured already, the step wants a number on the host, or random numbers without
// kernels. InvalidArgument: a parameter is not on the current GPU; a rank has captured another step.
// What the step throws comes out as it is. Threads: as the mesh.
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
  // On the thread's current GPU. `parameters`: those that the step has gradients for; without backward,
  // none.
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
