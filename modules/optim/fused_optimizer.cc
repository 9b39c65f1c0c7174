#include "shardweave/modules/optim/fused_optimizer.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "ATen/ops/_foreach_add.h"
#include "ATen/ops/_foreach_mul.h"
#include "ATen/ops/_foreach_sign.h"
#include "ATen/ops/_fused_adam.h"
#include "ATen/ops/_fused_adamw.h"
#include "ATen/ops/_fused_sgd.h"
#include "ATen/ops/zeros.h"
#include "ATen/ops/zeros_like.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_join.h"
#include "c10/core/GradMode.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/engine/detour.h"
#include "shardweave/dtensor/engine/local_part.h"
#include "shardweave/dtensor/engine/tensor_impl.h"

namespace shardweave {
namespace {

using namespace dtensor_internal;

constexpr char kFusedOptimizer[] = "FusedOptimizer";
// capi/ says there what its function is called.
constexpr std::string_view kNotSynchronized =
    "; the gradients are to be synchronized before the step";

[[noreturn]] void invalid(std::string_view name, double value, std::string_view wanted) {
  throw Error(kFusedOptimizer,
              absl::InvalidArgumentError(str_cat(name, " is ", value, "; wanted ", wanted)));
}
void check_not_negative(std::string_view name, double value) {
  if (!(value >= 0)) invalid(name, value, "0 or more");
}
void check_beta(std::string_view name, double value) {
  if (!(value >= 0 && value < 1)) invalid(name, value, "at least 0, less than 1");
}

void check_options(const SgdOptions& o) {
  check_not_negative("lr", o.lr);
  check_not_negative("momentum", o.momentum);
  check_not_negative("weight_decay", o.weight_decay);
  if (o.nesterov && (o.momentum <= 0 || o.dampening != 0)) {
    invalid("nesterov", 1, "a momentum and no dampening with it");
  }
}
template <typename Options>  // Adam's, AdamW's, Lion's
void check_options(const Options& o) {
  check_not_negative("lr", o.lr);
  check_beta("beta1", o.beta1);
  check_beta("beta2", o.beta2);
  if constexpr (requires { o.eps; }) check_not_negative("eps", o.eps);
  check_not_negative("weight_decay", o.weight_decay);
}

SpecRef spec_of(const at::Tensor& tensor) {
  return is_dtensor(tensor) ? meta_of(tensor).spec : SpecRef();
}
// "[S(0), R]", "plain"
std::string lies(const SpecRef& spec) {
  return spec == nullptr ? "plain" : spec->layout.to_string();
}
// Whether local parts belong together.
bool lie_alike(const SpecRef& a, const SpecRef& b) {
  if (a == b) return true;
  return a != nullptr && b != nullptr && a->context == b->context && a->sizes == b->sizes &&
         a->layout == b->layout;
}

void check_gradient(size_t i, const at::Tensor& parameter, const at::Tensor& grad) {
  const SpecRef of_parameter = spec_of(parameter);
  const SpecRef of_grad = spec_of(grad);
  if (lie_alike(of_parameter, of_grad) && parameter.sizes() == grad.sizes() &&
      grad.layout() == at::kStrided) {
    return;
  }
  std::string wrong =
      str_cat(" lies ", lies(of_parameter), ", its gradient ", lies(of_grad), kNotSynchronized);
  if (grad.layout() != at::kStrided) {
    wrong = " has a sparse gradient; wanted a dense one";
  } else if (parameter.sizes() != grad.sizes()) {
    wrong = str_cat(" has shape [", absl::StrJoin(parameter.sizes(), ", "), "], its gradient [",
                    absl::StrJoin(grad.sizes(), ", "), "]");
  } else if (of_parameter != nullptr && of_grad != nullptr &&
             of_parameter->context != of_grad->context) {
    wrong = " and its gradient lie on two meshes";
  }
  Error error(kFusedOptimizer, absl::FailedPreconditionError(str_cat("parameter ", i, wrong)));
  if (wrong.ends_with(kNotSynchronized)) error.add_context("finish_grad_sync() does that");
  throw error;
}

}  // namespace

struct FusedOptimizer::Batch {
  at::ScalarType dtype;
  c10::Device device;
  bool first_step;
  std::vector<at::Tensor> parameters, grads, firsts, seconds, largest, steps;
  // Where a kernel's result has to be copied: parameters that are not contiguous.
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
};

FusedOptimizer::FusedOptimizer(std::vector<at::Tensor> parameters, const Options& options)
    : parameters_(std::move(parameters)), options_(options) {
  std::visit([](const auto& o) { check_options(o); }, options_);
  absl::flat_hash_map<const c10::TensorImpl*, size_t> known;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& p = parameters_[i];
    if (!p.defined() || !p.is_leaf() || !p.is_floating_point()) {
      throw Error(kFusedOptimizer,
                  absl::InvalidArgumentError(
                      str_cat("parameter ", i, " is ",
                              !p.defined()   ? "undefined"
                              : !p.is_leaf() ? "no leaf: it is the result of an operator"
                                             : str_cat("of type ", c10::toString(p.scalar_type())),
                              "; wanted a floating-point leaf")));
    }
    const auto [it, is_new] = known.emplace(p.unsafeGetTensorImpl(), states_.size());
    if (is_new) states_.push_back({.parameter = i});
    state_indices_.push_back(it->second);
  }
}

std::vector<FusedOptimizer::Slot> FusedOptimizer::slots(const Options& options) {
  if (const auto* sgd = std::get_if<SgdOptions>(&options)) {
    return {{"momentum_buffer", &State::first, sgd->momentum != 0}};
  }
  if (std::holds_alternative<LionOptions>(options)) return {{"exp_avg", &State::first, true}};
  const auto* adam = std::get_if<AdamOptions>(&options);
  const bool amsgrad = adam != nullptr ? adam->amsgrad : std::get<AdamWOptions>(options).amsgrad;
  return {{"exp_avg", &State::first, true},
          {"exp_avg_sq", &State::second, true},
          {"max_exp_avg_sq", &State::largest, amsgrad}};
}

double FusedOptimizer::State::steps() const {
  return *step.const_data_ptr<float>();
}

bool FusedOptimizer::State::is_first_step() const {
  return steps() == 0 && (step_set || !buffer_set);
}

FusedOptimizer::State& FusedOptimizer::made(State& state) const {
  const at::Tensor& parameter = parameters_[state.parameter];
  SpecRef spec = spec_of(parameter);
  if (state.step.defined()) {
    if (lie_alike(spec, state.spec)) return state;
    throw Error(
        kFusedOptimizer,
        absl::FailedPreconditionError(str_cat(
            "parameter ", state.parameter, " lies ", lies(spec), ", its state ", lies(state.spec),
            "; parameters are distributed before the first step, and before "
            "their state is read or set")));
  }
  const at::Tensor part = part_to_read(parameter, kFusedOptimizer);
  for (const Slot& slot : slots(options_)) {
    if (!slot.used) continue;
    state.*slot.tensor = at::zeros(part.sizes(), part.options().requires_grad(std::nullopt));
  }
  state.step = at::zeros({}, at::kFloat);
  state.spec = std::move(spec);
  return state;
}

void FusedOptimizer::run(const SgdOptions& o, Batch& b) {
  at::_fused_sgd_(b.parameters, b.grads, b.firsts, o.weight_decay, o.momentum, o.lr, o.dampening,
                  o.nesterov, /*maximize=*/false, b.first_step);
}

void FusedOptimizer::run(const AdamOptions& o, Batch& b) {
  at::_fused_adam_(b.parameters, b.grads, b.firsts, b.seconds, b.largest, b.steps, o.lr, o.beta1,
                   o.beta2, o.weight_decay, o.eps, o.amsgrad, /*maximize=*/false);
}

void FusedOptimizer::run(const AdamWOptions& o, Batch& b) {
  at::_fused_adamw_(b.parameters, b.grads, b.firsts, b.seconds, b.largest, b.steps, o.lr, o.beta1,
                    o.beta2, o.weight_decay, o.eps, o.amsgrad, /*maximize=*/false);
}

void FusedOptimizer::run(const LionOptions& o, Batch& b) {
  std::vector<at::Tensor> directions = at::_foreach_mul(b.firsts, o.beta1);
  at::_foreach_add_(directions, b.grads, 1 - o.beta1);
  at::_foreach_sign_(directions);
  at::_foreach_mul_(b.parameters, 1 - o.lr * o.weight_decay);
  at::_foreach_add_(b.parameters, directions, -o.lr);
  at::_foreach_mul_(b.firsts, o.beta2);
  at::_foreach_add_(b.firsts, b.grads, 1 - o.beta2);
}

void FusedOptimizer::step() {
  const c10::AutoGradMode no_grad(false);
  struct Update {
    State* state;
    at::Tensor part;
    at::Tensor grad;
  };
  std::vector<Update> updates;
  updates.reserve(states_.size());
  for (State& state : states_) {  // all, before anything is changed
    const at::Tensor& parameter = parameters_[state.parameter];
    const at::Tensor& grad = parameter.grad();
    if (!grad.defined()) continue;
    check_gradient(state.parameter, parameter, grad);
    updates.push_back({&made(state), part_to_write(parameter, kFusedOptimizer),
                       part_to_read(grad, kFusedOptimizer)});
  }
  std::vector<Batch>
      batches;  // kernels take one dtype and device, and either first steps or others
  for (auto& [state, part, grad] : updates) {
    const bool first_step = state->is_first_step();
    *state->step.mutable_data_ptr<float>() += 1;
    if (part.numel() == 0) continue;
    auto batch = std::find_if(batches.begin(), batches.end(), [&, &p = part](const Batch& b) {
      return b.dtype == p.scalar_type() && b.device == p.device() && b.first_step == first_step;
    });
    if (batch == batches.end()) {
      batches.push_back(
          {part.scalar_type(), part.device(), first_step, {}, {}, {}, {}, {}, {}, {}});
      batch = batches.end() - 1;
    }
    // The kernels walk over the memory: it has to be in order.
    at::Tensor work = part.contiguous();
    if (!work.is_same(part)) batch->copies.emplace_back(part, work);
    batch->parameters.push_back(std::move(work));
    batch->grads.push_back(grad.to(part.scalar_type()).contiguous());
    if (state->first.defined()) batch->firsts.push_back(state->first);
    if (state->second.defined()) batch->seconds.push_back(state->second);
    if (state->largest.defined()) batch->largest.push_back(state->largest);
    batch->steps.push_back(state->step);
  }
  std::vector<at::Tensor> written;
  for (const Update& update : updates) written.push_back(parameters_[update.state->parameter]);
  check_written_together(written, kFusedOptimizer);
  for (Batch& batch : batches) {
    std::visit([&](const auto& o) { run(o, batch); }, options_);
    for (auto& [to, from] : batch.copies) to.copy_(from);
  }
  for (const at::Tensor& parameter : written) part_written(parameter, kFusedOptimizer);
}

void FusedOptimizer::zero_grad() const {
  for (const at::Tensor& parameter : parameters_) parameter.mutable_grad() = at::Tensor();
}

double FusedOptimizer::lr() const {
  return std::visit([](const auto& o) { return o.lr; }, options_);
}

void FusedOptimizer::set_lr(double lr) {
  check_not_negative("lr", lr);
  std::visit([&](auto& o) { o.lr = lr; }, options_);
}

std::vector<std::string_view> FusedOptimizer::state_names() const {
  std::vector<std::string_view> names = {"step"};
  for (const Slot& slot : slots(options_)) {
    if (slot.used) names.push_back(slot.name);
  }
  return names;
}

FusedOptimizer::State& FusedOptimizer::state_of(size_t parameter) const {
  if (parameter >= parameters_.size()) {
    throw Error(kFusedOptimizer, absl::OutOfRangeError(
                                     str_cat("parameter ", parameter, " of ", parameters_.size())));
  }
  return states_[state_indices_[parameter]];
}

const at::Tensor* FusedOptimizer::find(const State& state, std::string_view name) const {
  if (name == "step") return &state.step;
  std::string known = "step";
  for (const Slot& slot : slots(options_)) {
    if (slot.name == name) return &(state.*slot.tensor);
    str_append(&known, ", ", slot.name);
  }
  throw Error(kFusedOptimizer,
              absl::NotFoundError(str_cat("there is no state '", name, "'; there are ", known)));
}

at::Tensor FusedOptimizer::state(size_t parameter, std::string_view name) const {
  State& state = state_of(parameter);
  const at::Tensor& found = *find(state, name);
  const c10::AutoGradMode no_grad(false);
  made(state);
  if (!found.defined() || name == "step") return found;
  return lying_as(parameters_[parameter], found);
}

void FusedOptimizer::set_state(size_t parameter, std::string_view name, const at::Tensor& value) {
  State& state = state_of(parameter);
  const at::Tensor& found = *find(state, name);
  const c10::AutoGradMode no_grad(false);
  const auto refuse = [&](std::string_view what) {
    throw Error(kFusedOptimizer, absl::InvalidArgumentError(
                                     str_cat("'", name, "' of parameter ", parameter, " ", what)));
  };
  made(state);
  if (!found.defined()) refuse("is not used with these options");
  if (!value.defined()) refuse("is set to an undefined tensor");
  const at::Tensor& like = parameters_[parameter];
  if (name == "step") {
    if (value.numel() != 1 || value.is_complex()) {
      refuse(str_cat("is one number; got shape [", absl::StrJoin(value.sizes(), ", "), "], type ",
                     c10::toString(value.scalar_type())));
    }
    const auto steps = value.item<double>();
    if (!(steps >= 0) || steps != std::floor(steps) || steps > (1 << 24)) {
      refuse(str_cat("is ", steps, "; wanted a whole number from 0 to 2^24"));
    }
    state.step.fill_(steps);
    state.step_set = true;
    return;
  }
  if (value.sizes() != like.sizes()) {
    refuse(str_cat("has shape [", absl::StrJoin(like.sizes(), ", "), "]; got [",
                   absl::StrJoin(value.sizes(), ", "), "]"));
  }
  if (!value.is_floating_point() || value.layout() != at::kStrided) {
    refuse(str_cat("is dense and floating-point; got ", c10::toString(value.scalar_type()), ", ",
                   value.layout() == at::kStrided ? "dense" : "sparse"));
  }
  if (is_dtensor(value) != is_dtensor(like)) {
    refuse(is_dtensor(like)
               ? str_cat("lies ", lies(state.spec), "; got a plain tensor: distribute it")
               : "is plain; got a DTensor: take the full tensor");
  }
  if (!is_dtensor(like)) {
    found.copy_(value);
  } else {
    if (meta_of(value).context != meta_of(like).context) refuse("lies on another mesh");
    found.copy_(part_to_read(redistribute(value, state.spec->layout), kFusedOptimizer));
  }
  if (name == "momentum_buffer") state.buffer_set = true;
}

}  // namespace shardweave
