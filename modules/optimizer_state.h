// The states of torch::optim's optimizers, member by member. Internal to modules/.
//
//   with_state_type(optimizer, [&]<typename Its>() {
//     for_each_member(made, [&](const char* name, auto& member) { ... });   // "exp_avg", a tensor
//   });
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/modules/zero.h"
#include "torch/optim/adagrad.h"
#include "torch/optim/adam.h"
#include "torch/optim/adamw.h"
#include "torch/optim/rmsprop.h"
#include "torch/optim/sgd.h"

namespace shardweave::modules_internal {

// What torch::optim's states consist of: f(name, member), of a tensor or a number.
template <typename F>
void for_each_member(torch::optim::AdamWParamState& s, F f) {
  f("step", s.step());
  f("exp_avg", s.exp_avg());
  f("exp_avg_sq", s.exp_avg_sq());
  f("max_exp_avg_sq", s.max_exp_avg_sq());
}
template <typename F>
void for_each_member(torch::optim::AdamParamState& s, F f) {
  f("step", s.step());
  f("exp_avg", s.exp_avg());
  f("exp_avg_sq", s.exp_avg_sq());
  f("max_exp_avg_sq", s.max_exp_avg_sq());
}
template <typename F>
void for_each_member(torch::optim::SGDParamState& s, F f) {
  f("momentum_buffer", s.momentum_buffer());
}
template <typename F>
void for_each_member(torch::optim::RMSpropParamState& s, F f) {
  f("step", s.step());
  f("square_avg", s.square_avg());
  f("momentum_buffer", s.momentum_buffer());
  f("grad_avg", s.grad_avg());
}
template <typename F>
void for_each_member(torch::optim::AdagradParamState& s, F f) {
  f("step", s.step());
  f("sum", s.sum());
}

// f.operator()<State>() with the type of state that the optimizer keeps.
template <typename F>
void with_state_type(const torch::optim::Optimizer& optimizer, F f) {
  using namespace torch::optim;
  if (dynamic_cast<const AdamW*>(&optimizer) != nullptr) {
    f.template operator()<AdamWParamState>();
  } else if (dynamic_cast<const Adam*>(&optimizer) != nullptr) {
    f.template operator()<AdamParamState>();
  } else if (dynamic_cast<const SGD*>(&optimizer) != nullptr) {
    f.template operator()<SGDParamState>();
  } else if (dynamic_cast<const RMSprop*>(&optimizer) != nullptr) {
    f.template operator()<RMSpropParamState>();
  } else if (dynamic_cast<const Adagrad*>(&optimizer) != nullptr) {
    f.template operator()<AdagradParamState>();
  } else {
    throw Error(absl::UnimplementedError(
        "the states of this optimizer have no names here: of torch::optim AdamW, Adam, SGD, "
        "RMSprop and Adagrad have; optimizer().state() has it"));
  }
}

// A member, as a tensor; and back.
at::Tensor to_tensor(const at::Tensor& member);
at::Tensor to_tensor(int64_t member);
void assign(at::Tensor& member, const at::Tensor& value);
void assign(int64_t& member, const at::Tensor& value);

// What torch::optim's steps with these options do not look for.
bool is_optional(const torch::optim::Optimizer& optimizer, const at::Tensor& parameter,
                 std::string_view name);

struct OptimizerStateName {
  std::string name;
  bool is_number;
  bool is_optional;
};
// What the optimizer can keep of one of its parameters. Throws Error (Unimplemented) for one whose
// states have no names here.
std::vector<OptimizerStateName> optimizer_state_names(const torch::optim::Optimizer& optimizer,
                                                      const at::Tensor& parameter);
// It becomes the state, as it is: local, nothing is checked. Empty: as before the first step.
void assign_optimizer_state(torch::optim::Optimizer& optimizer, const at::Tensor& parameter,
                            const OptimizerState& state);

}  // namespace shardweave::modules_internal
