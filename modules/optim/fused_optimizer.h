// Optimizers that work on this rank's parts of sharded parameters, a kernel for all of them at
// once.
//
//   FusedOptimizer optimizer(model->parameters(), AdamWOptions{.lr = 3e-4});
//   loss.backward();
//   finish_grad_sync(*model);           // gradients in their parameters' layouts
//   optimizer.step();
//   optimizer.zero_grad();
//
// The numbers are those of PyTorch's optimizers of the same names; options.h has all of them, their
// options and their sources. torch::optim works on DTensors too, a handful of operators per parameter;
// this calls LibTorch's fused kernels (at::_fused_adamw_) on the local tensors, past the dispatcher.
// Autograd and views of a parameter know of a step all the same: a backward that needs the old value
// is an error, as with torch::optim. Plain parameters may be among them. A parameter that is given
// twice (tied weights: LibTorch's parameters() has them once per name) is one: stepped once, with one
// state, which both of its indices mean.
//
// SGD, Adam, AdamW and Lion communicate nothing. A step with Adafactor or Muon is collective over
// the meshes of its parameters that are cut. Adafactor sums rows, columns and norms of all parameters
// in two all-reduces along each mesh dimension that cuts one. Muon brings the parts of each matrix to
// one of the ranks among which it is cut, chosen so that all have about as much to do, and those of
// the result back: two all-to-alls for all matrices that are cut over the same mesh dimensions. (For
// each device, where parameters rest on several.) Before either the ranks compare, in one more, of
// which parameters they have gradients, and with which options and after how many steps. Ranks that have the same part of a matrix (replicas) make it
// orthogonal each by itself: they stay the same to the last bit where their matrix products round
// alike, that is with one BLAS library, kind of processor and number of threads on all of them.
//
// All ranks of a parameter's mesh step it alike: with other options on one, or more often, what they have
// is apart, and the next collective about it is an error (FailedPrecondition); loading a checkpoint on all
// of them brings them together again.
//
// Groups of parameters have options of their own, of another optimizer too:
//
//   FusedOptimizer optimizer(muon_groups(hidden, MuonOptions{.lr = 0.02}, AdamWOptions{}));
//   optimizer.set_lr(0, 0.01);          // of the matrices
//
// In a step that is captured (captured_step.h) it works with SGD, Adam and AdamW: each replay counts
// as a step, and has the learning rate of then (rounded to f32). A first step of SGD with dampening
// is another one than those after it, and is not captured.
//
// To resume, set what was saved:
//
//   for (size_t i = 0; i < optimizer.parameters().size(); ++i) {
//     for (std::string_view name : optimizer.state_names(i)) optimizer.set_state(i, name, ...);
//   }
//
// Throws Error: InvalidArgument for options out of range, parameters that are no leaves and states
// that do not fit, FailedPrecondition for a gradient or a state that does not lie as its parameter
// does.
#pragma once

#include <memory>
#include <source_location>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "shardweave/dtensor/spec.h"
#include "shardweave/modules/optim/options.h"

namespace shardweave {

class FusedOptimizer;
namespace optim_internal {
// set_state() where the ranks have agreed on it.
void put_state(FusedOptimizer& optimizer, size_t parameter, std::string_view name,
               const at::Tensor& value);
}  // namespace optim_internal

class FusedOptimizer {
 public:
  using Options = OptimizerOptions;

  // Parameters may be distributed until the first step, state() or set_state(). Those of Muon have
  // two dimensions.
  FusedOptimizer(std::vector<at::Tensor> parameters, const Options& options);
  // A parameter is in one group.
  explicit FusedOptimizer(const std::vector<ParameterGroup>& groups);
  // What these throw, without making anything.
  static void check(const std::vector<ParameterGroup>& groups);

  // Another one, behind those there are; its number.
  size_t add_group(const ParameterGroup& group);

  // Parameters without a gradient stay as they are. Throws on all ranks, before anything is changed,
  // if it communicates; InvalidArgument if the ranks differ in what they are about to do.
  void step(std::source_location where = std::source_location::current());
  void zero_grad() const;

  // The first group's; of all groups.
  double lr() const { return lr(0); }
  void set_lr(double lr);

  size_t num_groups() const { return groups_.size(); }
  // Throw Error (OutOfRange) for a group that is not there.
  double lr(size_t group) const { return lr_of(options(group)); }
  void set_lr(size_t group, double lr);
  const Options& options(size_t group) const;

  // As they were given, group by group.
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  // The group of each of them.
  size_t group_of(size_t parameter) const { return state_of(parameter).group; }

  // What a parameter has of state with its options: "step" and, of SGD with a momentum and of Muon,
  // "momentum_buffer"; of Adam and AdamW "exp_avg", "exp_avg_sq" and, with amsgrad, "max_exp_avg_sq";
  // of Lion "exp_avg"; of Adafactor "row_var" and "col_var" for two dimensions or more, else
  // "variance".
  std::vector<std::string_view> state_names(size_t parameter) const;
  // Of all parameters together: each name once.
  std::vector<std::string_view> state_names() const;
  // It is there before the first step, as the first step finds it: zeros. Laid out as the parameter
  // is, cut order included; "step" is a plain number. "row_var" and "col_var" have a last and a last
  // but one dimension of 1, and are whole along the mesh dimensions that cut the parameter there.
  // Writing to it writes the state. Undefined for what these options do not use. Throws Error
  // (NotFound) for other names, (OutOfRange).
  at::Tensor state(size_t parameter, std::string_view name) const;
  // Copies `value`, of the state's shape and of any floating-point type: for a DTensor a DTensor
  // of the same mesh, in any layout, for a plain parameter a plain tensor. "step": one number.
  // Collective for a DTensor: what one rank refuses, and what differs, is an error on all. SGD's first step takes the gradient
  // for its momentum, all of it whatever the dampening: it is the first as long as "step" is 0. A
  // momentum_buffer that is set where "step" never was makes "step" 1.
  void set_state(size_t parameter, std::string_view name, const at::Tensor& value);

 private:
  friend void optim_internal::put_state(FusedOptimizer& optimizer, size_t parameter,
                                        std::string_view name, const at::Tensor& value);
  // Of one parameter; local tensors.
  struct State {
    size_t parameter;  // where it was given first
    size_t group;
    SpecRef spec = {};                // that it had when the tensors were made; null: it was plain,
    std::vector<int64_t> sizes = {};  // and these sizes,
    at::ScalarType dtype = at::kFloat;  // and of what was made
    at::Tensor step = {};               // a number; undefined: nothing is made yet
    at::Tensor first = {};              // as slots() names them
    at::Tensor second = {};
    at::Tensor largest = {};
    bool step_set = false;

    double steps() const;
  };
  // A tensor of the state that an optimizer knows by a name.
  struct Slot {
    std::string_view name;
    at::Tensor State::*tensor;
    bool used;          // with these options
    int mean_over = 0;  // one of the parameter's dimensions, counted from the end; 0: it has all
  };
  // What one kernel call works on.
  struct Batch;
  struct Step;
  struct Captured;

  static double lr_of(const Options& options);
  static std::vector<Slot> slots(const Options& options, int64_t ndim);
  std::vector<Slot> slots(const State& state) const;
  bool has_slots(const State& state) const;  // that are used
  // Of what is made for a parameter of this dtype.
  at::ScalarType state_dtype(const State& state, at::ScalarType parameter) const;

  // Checks that it lies as the parameter does now.
  State& made(State& state) const;
  // The slot of a name; its tensor is null for "step". Throws Error (NotFound) for a name that none of
  // the groups' optimizers has. One that is of another group's is not used.
  Slot find(const State& state, std::string_view name) const;
  at::Tensor lying(const State& state, const Slot& slot) const;
  // Throws Error for what set_state() refuses.
  void check_state(size_t parameter, std::string_view name, const at::Tensor& value) const;
  void put_state(size_t parameter, std::string_view name, const at::Tensor& value);
  State& state_of(size_t parameter) const;
  static void run(const SgdOptions& options, Batch& batch);
  static void run(const AdamOptions& options, Batch& batch);
  static void run(const AdamWOptions& options, Batch& batch);
  static void run(const LionOptions& options, Batch& batch);

  std::vector<at::Tensor> parameters_;
  std::vector<Options> groups_;
  std::vector<std::shared_ptr<double>> captured_lrs_;  // of the groups, for replays; null: none
  mutable std::vector<State> states_;                  // made on first use
  std::vector<size_t> state_indices_;                  // by parameter
};

}  // namespace shardweave
