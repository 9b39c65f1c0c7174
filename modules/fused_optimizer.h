// Optimizers that work on this rank's parts of sharded parameters, a kernel for all of them at
// once.
//
//   FusedOptimizer optimizer(model->parameters(), AdamWOptions{.lr = 3e-4});
//   loss.backward();
//   finish_grad_sync(*model);           // gradients in their parameters' layouts
//   optimizer.step();
//   optimizer.zero_grad();
//
// The numbers are those of torch::optim's optimizers of the same names. torch::optim works on
// DTensors too, a handful of operators per parameter; this calls LibTorch's fused kernels
// (at::_fused_adamw_) on the local tensors, past the dispatcher. Nothing communicates. Plain
// parameters may be among them.
//
// Throws Error: InvalidArgument for options out of range and parameters that are no leaves,
// FailedPrecondition for a gradient that does not lie as its parameter does.
#pragma once

#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "ATen/core/Tensor.h"

namespace shardweave {

struct SgdOptions {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;
};

struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 1e-2;
  bool amsgrad = false;
};

class FusedOptimizer {
 public:
  using Options = std::variant<SgdOptions, AdamWOptions>;

  // Parameters may be distributed until the first step.
  FusedOptimizer(std::vector<at::Tensor> parameters, const Options& options);

  // Parameters without a gradient stay as they are.
  void step();
  void zero_grad() const;

  double lr() const;
  void set_lr(double lr);

  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  // The state of a parameter, laid out as it is and sharing memory: "step", "exp_avg",
  // "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer". Undefined before the parameter's first step.
  at::Tensor state(size_t parameter, std::string_view name) const;

 private:
  // Of one parameter; local tensors.
  struct State {
    at::Tensor step;     // a number
    at::Tensor first;    // momentum_buffer, exp_avg
    at::Tensor second;   // exp_avg_sq
    at::Tensor largest;  // max_exp_avg_sq
  };
  // What one kernel call works on.
  struct Batch;

  void run(const SgdOptions& options, Batch& batch) const;
  void run(const AdamWOptions& options, Batch& batch) const;

  const std::vector<at::Tensor> parameters_;
  Options options_;
  std::vector<State> states_;
};

}  // namespace shardweave
