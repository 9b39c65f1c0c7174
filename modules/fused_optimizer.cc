#include "shardweave/modules/fused_optimizer.h"

#include <map>
#include <tuple>
#include <utility>

#include "ATen/ops/_fused_adamw.h"
#include "ATen/ops/_fused_sgd.h"
#include "ATen/ops/zeros.h"
#include "ATen/ops/zeros_like.h"
#include "c10/core/GradMode.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/dtensor.h"

namespace shardweave {
namespace {

[[noreturn]] void invalid(std::string_view name, double value, std::string_view wanted) {
  throw Error(absl::InvalidArgumentError(
      str_cat("FusedOptimizer: ", name, " is ", value, "; wanted ", wanted)));
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
void check_options(const AdamWOptions& o) {
  check_not_negative("lr", o.lr);
  check_beta("beta1", o.beta1);
  check_beta("beta2", o.beta2);
  check_not_negative("eps", o.eps);
  check_not_negative("weight_decay", o.weight_decay);
}

at::Tensor local_of(const at::Tensor& tensor) {
  return is_dtensor(tensor) ? to_local(tensor) : tensor;
}

void check_gradient(size_t i, const at::Tensor& parameter, const at::Tensor& grad) {
  const bool sharded = is_dtensor(parameter);
  if (sharded == is_dtensor(grad) && (!sharded || layout_of(parameter) == layout_of(grad))) {
    return;
  }
  const auto text = [](const at::Tensor& t) {
    return is_dtensor(t) ? layout_of(t).to_string() : std::string("plain");
  };
  throw Error(absl::FailedPreconditionError(str_cat("FusedOptimizer: parameter ", i, " lies ",
                                                    text(parameter), ", its gradient ", text(grad),
                                                    "; call finish_grad_sync() before step()")));
}

}  // namespace

struct FusedOptimizer::Batch {
  bool first_step;
  std::vector<at::Tensor> parameters, grads, firsts, seconds, largest, steps;
  // Where a kernel's result has to be copied: parameters that are not contiguous.
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
};

FusedOptimizer::FusedOptimizer(std::vector<at::Tensor> parameters, const Options& options)
    : parameters_(std::move(parameters)), options_(options), states_(parameters_.size()) {
  std::visit([](const auto& o) { check_options(o); }, options_);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& p = parameters_[i];
    if (!p.defined() || !p.is_leaf() || !p.is_floating_point()) {
      throw Error(absl::InvalidArgumentError(
          str_cat("FusedOptimizer: parameter ", i, " is ",
                  !p.defined()   ? "undefined"
                  : !p.is_leaf() ? "no leaf: it is the result of an operator"
                                 : str_cat("of type ", c10::toString(p.scalar_type())),
                  "; wanted a floating-point leaf")));
    }
    for (size_t j = 0; j < i; ++j) {
      if (!p.is_same(parameters_[j])) continue;
      throw Error(absl::InvalidArgumentError(
          str_cat("FusedOptimizer: parameters ", j, " and ", i, " are the same")));
    }
  }
}

void FusedOptimizer::run(const SgdOptions& o, Batch& b) const {
  at::_fused_sgd_(b.parameters, b.grads, o.momentum != 0 ? b.firsts : std::vector<at::Tensor>(),
                  o.weight_decay, o.momentum, o.lr, o.dampening, o.nesterov, /*maximize=*/false,
                  b.first_step);
}

void FusedOptimizer::run(const AdamWOptions& o, Batch& b) const {
  at::_fused_adamw_(b.parameters, b.grads, b.firsts, b.seconds, b.largest, b.steps, o.lr, o.beta1,
                    o.beta2, o.weight_decay, o.eps, o.amsgrad, /*maximize=*/false);
}

void FusedOptimizer::step() {
  const c10::AutoGradMode no_grad(false);
  for (size_t i = 0; i < parameters_.size(); ++i) {  // all, before anything is changed
    if (parameters_[i].grad().defined()) check_gradient(i, parameters_[i], parameters_[i].grad());
  }
  const auto* adamw = std::get_if<AdamWOptions>(&options_);
  // Kernels take one dtype and device, and either first steps or others.
  std::map<std::tuple<at::ScalarType, c10::DeviceType, c10::DeviceIndex, bool>, Batch> batches;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!parameters_[i].grad().defined()) continue;
    const at::Tensor local = local_of(parameters_[i]);
    const at::Tensor grad = local_of(parameters_[i].grad());
    // The kernels walk over the memory: it has to be in order.
    at::Tensor work = local.contiguous();
    State& state = states_[i];
    const bool first_step = !state.step.defined();
    if (first_step) {
      state.step = at::zeros({}, work.options().dtype(at::kFloat).device(at::kCPU));
      state.first = at::zeros_like(work);
      if (adamw != nullptr) state.second = at::zeros_like(work);
      if (adamw != nullptr && adamw->amsgrad) state.largest = at::zeros_like(work);
    }
    state.step.add_(1);
    if (work.numel() == 0) continue;
    Batch& batch =
        batches[{work.scalar_type(), work.device().type(), work.device().index(), first_step}];
    batch.first_step = first_step;
    if (!work.is_same(local)) batch.copies.emplace_back(local, work);
    batch.parameters.push_back(std::move(work));
    batch.grads.push_back(grad.to(local.scalar_type()).contiguous());
    batch.firsts.push_back(state.first);
    if (state.second.defined()) batch.seconds.push_back(state.second);
    if (state.largest.defined()) batch.largest.push_back(state.largest);
    batch.steps.push_back(state.step);
  }
  for (auto& [key, batch] : batches) {
    std::visit([&, &b = batch](const auto& o) { run(o, b); }, options_);
    for (auto& [to, from] : batch.copies) to.copy_(from);
  }
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

at::Tensor FusedOptimizer::state(size_t parameter, std::string_view name) const {
  if (parameter >= states_.size()) {
    throw Error(absl::OutOfRangeError(
        str_cat("FusedOptimizer: parameter ", parameter, " of ", states_.size())));
  }
  const State& state = states_[parameter];
  const bool adamw = std::holds_alternative<AdamWOptions>(options_);
  if (name == "step") return state.step;
  const at::Tensor* found = nullptr;
  if (name == (adamw ? "exp_avg" : "momentum_buffer")) found = &state.first;
  if (adamw && name == "exp_avg_sq") found = &state.second;
  if (adamw && name == "max_exp_avg_sq") found = &state.largest;
  if (found == nullptr) {
    throw Error(absl::NotFoundError(
        str_cat("FusedOptimizer: there is no state '", name, "'; there are step, ",
                adamw ? "exp_avg, exp_avg_sq, max_exp_avg_sq" : "momentum_buffer")));
  }
  const at::Tensor& like = parameters_[parameter];
  if (!found->defined() || !is_dtensor(like)) return *found;
  const c10::AutoGradMode no_grad(false);
  return from_local(*found, mesh_of(like), layout_of(like).placements(), like.sizes().vec());
}

}  // namespace shardweave
