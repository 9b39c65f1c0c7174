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
// (at::_fused_adamw_) on the local tensors, past the dispatcher. Autograd and views of a parameter
// know of a step all the same: a backward that needs the old value is an error, as with torch::optim.
// Nothing communicates. Plain parameters may be among them. A parameter that is given twice (tied
// weights: LibTorch's parameters() has them once per name) is one: stepped once, with one state,
// which both of its indices mean.
//
// To resume, set what was saved:
//
//   for (size_t i = 0; i < optimizer.parameters().size(); ++i) {
//     for (std::string_view name : optimizer.state_names()) optimizer.set_state(i, name, ...);
//   }
//
// Throws Error: InvalidArgument for options out of range, parameters that are no leaves and states
// that do not fit, FailedPrecondition for a gradient or a state that does not lie as its parameter
// does.
#pragma once

#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "ATen/core/Tensor.h"
#include "shardweave/dtensor/spec.h"

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

  // Parameters may be distributed until the first step, state() or set_state().
  FusedOptimizer(std::vector<at::Tensor> parameters, const Options& options);

  // Parameters without a gradient stay as they are.
  void step();
  void zero_grad() const;

  double lr() const;
  void set_lr(double lr);

  // As they were given.
  const std::vector<at::Tensor>& parameters() const { return parameters_; }

  // What a parameter has of state with these options: "step" and, of SGD with a momentum,
  // "momentum_buffer"; of AdamW "exp_avg", "exp_avg_sq" and, with amsgrad, "max_exp_avg_sq".
  std::vector<std::string_view> state_names() const;
  // It is there before the first step, as the first step finds it: zeros. Laid out as the parameter
  // is, cut order included; "step" is a plain number. Writing to it writes the state. Undefined for
  // what these options do not use. Throws Error (NotFound) for other names, (OutOfRange).
  at::Tensor state(size_t parameter, std::string_view name) const;
  // Copies `value`, of the parameter's shape and of any floating-point type: for a DTensor a DTensor
  // of the same mesh, in any layout (collective, if it is not the parameter's), for a plain parameter
  // a plain tensor. "step": one number, the same on every rank. SGD's first step takes the gradient
  // for its momentum: it is the first as long as "step" is 0, unless a momentum_buffer was set and
  // "step" never.
  void set_state(size_t parameter, std::string_view name, const at::Tensor& value);

 private:
  // Of one parameter; local tensors.
  struct State {
    size_t parameter;    // where it was given first
    SpecRef spec;        // that it had when the tensors were made; null: it was plain
    at::Tensor step;     // a number; undefined: nothing is made yet
    at::Tensor first;    // momentum_buffer, exp_avg
    at::Tensor second;   // exp_avg_sq
    at::Tensor largest;  // max_exp_avg_sq
    bool step_set = false;
    bool buffer_set = false;

    double steps() const;
    bool is_first_step() const;
  };
  // What one kernel call works on.
  struct Batch;

  // Checks that it lies as the parameter does now.
  State& made(State& state) const;
  // Null: not with these options. Throws Error (NotFound) for a name that no optimizer has.
  const at::Tensor* find(const State& state, std::string_view name) const;
  State& state_of(size_t parameter) const;
  void run(const SgdOptions& options, Batch& batch) const;
  void run(const AdamWOptions& options, Batch& batch) const;

  const std::vector<at::Tensor> parameters_;
  Options options_;
  mutable std::vector<State> states_;  // made on first use
  std::vector<size_t> state_indices_;  // by parameter
};

}  // namespace shardweave
