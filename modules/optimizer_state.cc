#include "shardweave/modules/optimizer_state.h"

#include <memory>
#include <type_traits>
#include <utility>

#include "ATen/ops/full_like.h"
#include "ATen/ops/scalar_tensor.h"
#include "c10/core/GradMode.h"

namespace shardweave::modules_internal {

at::Tensor to_tensor(const at::Tensor& member) {
  return member;
}
at::Tensor to_tensor(int64_t member) {
  return at::scalar_tensor(member, at::kLong);
}
void assign(at::Tensor& member, const at::Tensor& value) {
  member = value;
}
void assign(int64_t& member, const at::Tensor& value) {
  member = value.item<int64_t>();
}

// What torch::optim's steps with these options do not look for.
bool is_optional(const torch::optim::Optimizer& optimizer, const at::Tensor& parameter,
                 std::string_view name) {
  const torch::optim::OptimizerOptions* options = nullptr;
  for (const torch::optim::OptimizerParamGroup& group : optimizer.param_groups()) {
    for (const at::Tensor& one : group.params()) {
      if (one.is_same(parameter)) options = &group.options();
    }
  }
  if (name == "max_exp_avg_sq") {
    const auto* adamw = dynamic_cast<const torch::optim::AdamWOptions*>(options);
    const auto* adam = dynamic_cast<const torch::optim::AdamOptions*>(options);
    return !(adamw != nullptr && adamw->amsgrad()) && !(adam != nullptr && adam->amsgrad());
  }
  if (const auto* sgd = dynamic_cast<const torch::optim::SGDOptions*>(options)) {
    return name == "momentum_buffer" && sgd->momentum() == 0;
  }
  const auto* rmsprop = dynamic_cast<const torch::optim::RMSpropOptions*>(options);
  return rmsprop != nullptr && ((name == "grad_avg" && !rmsprop->centered()) ||
                                (name == "momentum_buffer" && !(rmsprop->momentum() > 0)));
}

std::vector<OptimizerStateName> optimizer_state_names(const torch::optim::Optimizer& optimizer,
                                                      const at::Tensor& parameter) {
  std::vector<OptimizerStateName> names;
  with_state_type(optimizer, [&]<typename Its>() {
    Its made;
    for_each_member(made, [&](const char* name, auto& member) {
      constexpr bool kIsNumber = std::is_same_v<std::decay_t<decltype(member)>, int64_t>;
      names.push_back({name, kIsNumber, is_optional(optimizer, parameter, name)});
    });
  });
  return names;
}

void assign_optimizer_state(torch::optim::Optimizer& optimizer, const at::Tensor& parameter,
                            const OptimizerState& state) {
  const c10::AutoGradMode no_grad(false);
  with_state_type(optimizer, [&]<typename Its>() {
    auto made = std::make_unique<Its>();
    if (state.empty()) {
      if constexpr (std::is_same_v<Its, torch::optim::AdagradParamState>) {
        // Its constructor makes the state, and its step() takes it to be there.
        const auto& options =
            dynamic_cast<const torch::optim::AdagradOptions&>(optimizer.defaults());
        made->step(0);
        made->sum(at::full_like(parameter.detach(), options.initial_accumulator_value()));
        optimizer.state()[parameter.unsafeGetTensorImpl()] = std::move(made);
      } else {
        optimizer.state().erase(parameter.unsafeGetTensorImpl());
      }
      return;
    }
    for_each_member(*made, [&](const char* name, auto& member) {
      const auto it = state.find(name);
      if (it != state.end()) assign(member, it->second);
    });
    optimizer.state()[parameter.unsafeGetTensorImpl()] = std::move(made);
  });
}

}  // namespace shardweave::modules_internal
