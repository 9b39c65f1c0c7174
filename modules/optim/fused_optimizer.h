// Optimizers that work on this rank's parts of sharded parameters, a kernel for all of them at
// once.
//
//   FusedOptimizer optimizer(model->parameters(), AdamWOptions{.lr = 3e-4});
//   loss.backward();
//   finish_grad_sync(*model);           // gradients in their parameters' layouts
//   optimizer.step();
//   optimizer.zero_grad();
//
// The numbers are those of torch::optim's optimizers of the same names, and Lion's those of its paper
// (Chen et al., Symbolic Discovery of Optimization Algorithms, 2023). torch::optim works on
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

struct AdamOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;  // added to the gradient
  bool amsgrad = false;
};

struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 1e-2;  // taken off the parameter
  bool amsgrad = false;
};

struct LionOptions {
  double lr = 1e-4;
  double beta1 = 0.9;
  double beta2 = 0.99;
  double weight_decay = 0;  // taken off the parameter
};

class FusedOptimizer {
 public:
  using Options = std::variant<SgdOptions, AdamOptions, AdamWOptions, LionOptions>;

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
  // "momentum_buffer"; of Adam and AdamW "exp_avg", "exp_avg_sq" and, with amsgrad, "max_exp_avg_sq";
  // of Lion "exp_avg".
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
    size_t parameter;  // where it was given first
    SpecRef spec;      // that it had when the tensors were made; null: it was plain
    at::Tensor step;   // a number; undefined: nothing is made yet
    at::Tensor first;  // as slots() names them
    at::Tensor second;
    at::Tensor largest;
    bool step_set = false;
    bool buffer_set = false;

    double steps() const;
    bool is_first_step() const;
  };
  // A tensor of the state that an optimizer knows by a name.
  struct Slot {
    std::string_view name;
    at::Tensor State::*tensor;
    bool used;  // with these options
  };
  // What one kernel call works on.
  struct Batch;

  static std::vector<Slot> slots(const Options& options);

  // Checks that it lies as the parameter does now.
  State& made(State& state) const;
  // Null: not with these options. Throws Error (NotFound) for a name that no optimizer has.
  const at::Tensor* find(const State& state, std::string_view name) const;
  State& state_of(size_t parameter) const;
  static void run(const SgdOptions& options, Batch& batch);
  static void run(const AdamOptions& options, Batch& batch);
  static void run(const AdamWOptions& options, Batch& batch);
  static void run(const LionOptions& options, Batch& batch);

  const std::vector<at::Tensor> parameters_;
  Options options_;
  mutable std::vector<State> states_;  // made on first use
  std::vector<size_t> state_indices_;  // by parameter
};

}  // namespace shardweave
