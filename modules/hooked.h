// Modules that a plan's inputs and outputs can speak of though they have no weight of their own.
//
//   struct BlockImpl : torch::nn::Module {
//     at::Tensor forward(const at::Tensor& x, const at::Tensor& mask);
//   };
//   using Block = torch::nn::ModuleHolder<Hooked<BlockImpl>>;  // in place of TORCH_MODULE(Block)
//
//   parallelize_module(*model, mesh, {.forward = {{"blocks.*.output", {{"tp", Shard(1)}}}}});
//
// FQNs stay what they were, and in a Sequential it is a module as any other. What a plan speaks of are
// arguments and results of type at::Tensor, also within a std::optional, std::tuple or std::vector, counted in their
// order; other arguments are handed on as they come. What calls forward() through a pointer to BlockImpl
// itself passes by the plan, for forward() is not virtual. Without a plan a call costs two comparisons.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"

namespace torch::nn {
class Module;
}

namespace shardweave {
namespace dtensor_internal {
struct ForwardLayouts;
}
namespace modules_internal {

// What a plan says of one module's forward.
class ForwardRedistribution {
 public:
  virtual ~ForwardRedistribution() = default;
  virtual at::Tensor input(int index, const at::Tensor& tensor) const = 0;
  virtual at::Tensor output(int index, const at::Tensor& tensor) const = 0;
  // Throws Error if the plan speaks of an input or an output beyond so many.
  virtual void check_met(int inputs, int outputs) const = 0;
  // What it does, for who shows it; null: nothing.
  virtual const dtensor_internal::ForwardLayouts* layouts() const { return nullptr; }
};

// A forward that takes and gives tensors, and what runs in its place: patch(module, forward, inputs,
// number of results).
using TensorForward = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;
using TensorPatch = std::function<std::vector<at::Tensor>(torch::nn::Module&, const TensorForward&,
                                                          const std::vector<at::Tensor>&, size_t)>;

// What parallelize_module() looks for in a module.
struct ForwardHook {
  virtual ~ForwardHook() = default;
  std::shared_ptr<const ForwardRedistribution> redistribution;  // null: no plan speaks of it
  // Whether the forward comes here. Where not, a module is met at its weight, as without a hook.
  bool is_met = true;
  // What it was made of: Impl.
  virtual const std::type_info& made_of() const { return typeid(*this); }
  // What somebody does for it to be met, for errors.
  virtual std::string_view advice() const { return "make it as Hooked<Impl> (hooked.h)"; }
  // For who does not know the type: `patch` runs in place of the forward as it is now, patched or not;
  // empty: nothing changes. False: the forward has other arguments or results than tensors.
  virtual bool patch_tensors(const TensorPatch& /*patch*/) { return false; }
};

// Every tensor in a value, in their order.
template <typename Change>
void change_tensors(at::Tensor& tensor, const Change& change) {
  tensor = change(tensor);
}
template <typename Change, typename... T>
void change_tensors(std::tuple<T...>& tuple, const Change& change) {
  std::apply([&](T&... element) { (change_tensors(element, change), ...); }, tuple);
}
template <typename Change>
void change_tensors(std::vector<at::Tensor>& tensors, const Change& change) {
  for (at::Tensor& tensor : tensors) tensor = change(tensor);
}
template <typename Change>
void change_tensors(std::optional<at::Tensor>& tensor, const Change& change) {
  // One that is empty counts: what is behind it keeps its index.
  const at::Tensor changed = change(tensor.value_or(at::Tensor()));
  if (tensor.has_value()) *tensor = changed;
}
template <typename T, typename Change>
void change_tensors(T& /*no tensor*/, const Change& /*change*/) {}

template <typename T>
std::vector<at::Tensor> tensors_in(T& value) {
  std::vector<at::Tensor> tensors;
  change_tensors(value, [&](const at::Tensor& t) { return tensors.emplace_back(t); });
  return tensors;
}

// All of them tensors: at::Tensor, or a std::tuple of such.
template <typename T>
constexpr size_t kNumTensors = 0;
template <>
inline constexpr size_t kNumTensors<at::Tensor> = 1;
template <typename... T>
inline constexpr size_t kNumTensors<std::tuple<T...>> =
    (std::is_same_v<T, at::Tensor> && ...) ? sizeof...(T) : 0;

// Throw Error: what a patch calls its forward with, and what it gives.
void check_inputs_of_patch(const std::vector<at::Tensor>& given, size_t wanted);
void check_results_of_patch(const std::vector<at::Tensor>& given, size_t wanted);

template <typename T>
constexpr bool kHoldsTensors = false;
template <>
inline constexpr bool kHoldsTensors<at::Tensor> = true;
template <>
inline constexpr bool kHoldsTensors<std::optional<at::Tensor>> = true;
template <>
inline constexpr bool kHoldsTensors<std::vector<at::Tensor>> = true;
template <typename... T>
inline constexpr bool kHoldsTensors<std::tuple<T...>> = true;

// How an argument waits for the call: what a plan may change and the caller does not see is copied,
// anything else is handed on as it came.
template <typename Arg>
using Held = std::conditional_t<kHoldsTensors<std::decay_t<Arg>> &&
                                    (!std::is_lvalue_reference_v<Arg> ||
                                     std::is_const_v<std::remove_reference_t<Arg>>),
                                std::decay_t<Arg>, Arg&&>;

template <typename Impl, typename Forward>
class HookedForward;

template <typename Impl, typename Result, typename... Args>
class HookedForward<Impl, Result (Impl::*)(Args...)> : public Impl, public ForwardHook {
 public:
  using Impl::Impl;

  const std::type_info& made_of() const override { return typeid(Impl); }

  Result forward(Args... args) {
    if (redistribution == nullptr) return run_forward(std::forward<Args>(args)...);
    const std::shared_ptr<const ForwardRedistribution> plan = redistribution;
    std::tuple<Held<Args>...> values(std::forward<Args>(args)...);
    int inputs = 0, outputs = 0;
    change_tensors(values, [&](const at::Tensor& t) { return plan->input(inputs++, t); });
    Result result = run(values, std::index_sequence_for<Args...>());
    change_tensors(result, [&](const at::Tensor& t) { return plan->output(outputs++, t); });
    plan->check_met(inputs, outputs);
    return result;
  }

  // Runs in place of another forward, which it is given. Empty: there is none.
  using OwnForward = std::function<Result(Args...)>;
  using Patch = std::function<Result(Impl&, const OwnForward&, Args...)>;
  // Of a plug-in (plugin.h), in place of Impl's.
  Patch patched_forward;

  bool patch_tensors(const TensorPatch& patch) override {
    constexpr size_t kResults = kNumTensors<std::decay_t<Result>>;
    if constexpr (kResults > 0 && (std::is_same_v<std::decay_t<Args>, at::Tensor> && ...)) {
      if (patch == nullptr) return true;
      patched_by_name_ = [patch, before = std::move(patched_by_name_)](
                             Impl& impl, const OwnForward& own, Args... args) -> Result {
        const TensorForward forward = [&](const std::vector<at::Tensor>& inputs) {
          check_inputs_of_patch(inputs, sizeof...(Args));
          return [&]<size_t... I>(std::index_sequence<I...> /*all*/) {
            std::vector<at::Tensor> given = inputs;  // an argument may be anybody's
            Result result = before ? before(impl, own, std::forward<Args>(given[I])...)
                                   : own(std::forward<Args>(given[I])...);
            return tensors_in(result);
          }(std::index_sequence_for<Args...>());
        };
        std::vector<at::Tensor> results = patch(impl, forward, {args...}, kResults);
        check_results_of_patch(results, kResults);
        Result result;
        size_t next = 0;
        change_tensors(result, [&](const at::Tensor&) { return results[next++]; });
        return result;
      };
      return true;
    } else {
      return false;
    }
  }

 private:
  Result run_forward(Args... args) {
    if (!patched_by_name_) return run_typed(std::forward<Args>(args)...);
    const OwnForward typed = [this](Args... given) -> Result {
      return run_typed(std::forward<Args>(given)...);
    };
    return patched_by_name_(*this, typed, std::forward<Args>(args)...);
  }
  Result run_typed(Args... args) {
    if (!patched_forward) return Impl::forward(std::forward<Args>(args)...);
    const OwnForward own = [this](Args... given) -> Result {
      return Impl::forward(std::forward<Args>(given)...);
    };
    return patched_forward(*this, own, std::forward<Args>(args)...);
  }
  template <size_t... I>
  Result run(std::tuple<Held<Args>...>& values, std::index_sequence<I...> /*all*/) {
    return run_forward(std::forward<Args>(std::get<I>(values))...);
  }

  // Of patch_forwards() (plugin.h), in place of all that.
  Patch patched_by_name_;
};
template <typename Impl, typename Result, typename... Args>
class HookedForward<Impl, Result (Impl::*)(Args...) const>
    : public HookedForward<Impl, Result (Impl::*)(Args...)> {
 public:
  using HookedForward<Impl, Result (Impl::*)(Args...)>::HookedForward;
};

}  // namespace modules_internal

// Impl: a module whose forward() is neither a template nor overloaded.
template <typename Impl>
class Hooked : public modules_internal::HookedForward<Impl, decltype(&Impl::forward)> {
 public:
  using modules_internal::HookedForward<Impl, decltype(&Impl::forward)>::HookedForward;
};

}  // namespace shardweave
