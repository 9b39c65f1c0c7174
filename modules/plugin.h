// Plug-ins: what a library of modules and operators says of itself, so that plans need not.
//
//   const Plugins plugins =
//       Plugins()
//           .rule("mylib::linear_gelu", linear_gelu_rule())       // how a fused operator shards
//           .shards<FusedMlpImpl>([](const FusedMlpImpl&, const ShardingRequest&) {
//             return ModuleSharding{.parameter = {{"up", Shard(0)}, {"down", Shard(1)}},
//                                   .forward = {{"output", Replicate()}}};
//           })
//           .patch<MlpImpl>([](MlpImpl& mlp, const PatchRequest&) {
//             return FusedMlp(mlp.up, mlp.down);                   // in its place, on its weights
//           });
//   parallelize_module(*model, mesh, {.module = {{"blocks.*.mlp", {{"tp"}}}}}, plugins);
//
// First the patches are applied, then every module that ShardingPlan::module names is asked how it
// shards, then the rules go to the mesh. A type means the modules that are of it, also as Hooked<Impl>,
// and those that are derived from it and have no plug-in of their own.
//
// A value. Ranks that are threads may share one, and then call its functions at once.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <source_location>
#include <string>
#include <string_view>
#include <type_traits>
#include <typeindex>
#include <utility>
#include <vector>

#include "c10/util/Type.h"
#include "shardweave/dtensor/rule.h"
#include "shardweave/modules/hooked.h"
#include "shardweave/modules/parallelize_module.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/container/any.h"
#include "torch/nn/pimpl.h"

namespace shardweave {

// One module, asked how it lies along one mesh dimension.
struct ShardingRequest {
  std::string fqn;  // "": the model itself
  const DeviceMesh& mesh;
  int mesh_dim = 0;          // of `mesh`
  std::string style;         // what the plan says behind the mesh dimension; "": nothing
  const ShardingPlan& plan;  // that the module stands in, as it was given
};

// The answer, of which a mesh dimension's part of a ShardingPlan is made.
struct ModuleSharding {
  // Parameters and buffers of the module, by name or pattern within it ("up", "experts.*.weight");
  // what is not named is replicated.
  std::vector<std::pair<std::string, Placement>> parameter;
  // "input", "output.1", "experts.input": as ForwardEntry's, within the module.
  std::vector<std::pair<std::string, Placement>> forward;
};

// One module that a patch is for.
struct PatchRequest {
  std::string fqn;  // the first, of a module with several names
  const DeviceMesh& mesh;
  const ShardingPlan& plan;
};

namespace modules_internal {

template <typename T>
std::shared_ptr<T> pointer_of(std::shared_ptr<T> module) {
  return module;
}
template <typename T>
std::shared_ptr<T> pointer_of(const torch::nn::ModuleHolder<T>& holder) {
  return holder.is_empty() ? nullptr : holder.ptr();
}

// What a module's forward is, if it is one function: its result and its arguments, without references.
template <typename Forward>
struct ForwardTypes;
template <typename Module, typename Result, typename... Args>
struct ForwardTypes<Result (Module::*)(Args...)> {
  using Plain = std::decay_t<Result>(std::decay_t<Args>...);
  using Function = std::function<Result(Args...)>;
  template <typename T>
  using Hook = HookedForward<T, Result (T::*)(Args...)>;
  template <typename T>
  using Patch = std::function<Result(T&, const Function&, Args...)>;
};
template <typename Module, typename Result, typename... Args>
struct ForwardTypes<Result (Module::*)(Args...) const> : ForwardTypes<Result (Module::*)(Args...)> {
};
template <typename T>
using ForwardOf = ForwardTypes<decltype(&T::forward)>;

// Whether `With` can be called where `T` was; of templates and overloads nobody knows.
template <typename T, typename With>
constexpr bool same_forward() {
  if constexpr (requires {
                  typename ForwardOf<T>::Plain;
                  typename ForwardOf<With>::Plain;
                }) {
    return std::is_same_v<typename ForwardOf<T>::Plain, typename ForwardOf<With>::Plain>;
  } else {
    return true;
  }
}

// Modules of one type.
struct PluginType {
  std::type_index type;
  std::string name;  // "torch::nn::LinearImpl"
  bool (*is)(const torch::nn::Module& module);

  template <typename T>
  static PluginType of() {
    static_assert(std::is_base_of_v<torch::nn::Module, T>,
                  "plug-ins are for modules: the Impl, not its holder");
    return {typeid(T), c10::demangle(typeid(T).name()), [](const torch::nn::Module& module) {
              return dynamic_cast<const T*>(&module) != nullptr;
            }};
  }
};

struct ShardsPlugin {
  PluginType type;
  std::function<ModuleSharding(const torch::nn::Module&, const ShardingRequest&)> ask;
};

struct PatchPlugin {
  PluginType type;
  // One of both. Null from `make`: the module stays.
  std::function<std::optional<torch::nn::AnyModule>(torch::nn::Module&, const PatchRequest&)> make;
  // Returns what takes it back; null: its forward does not come where it can be wrapped.
  std::function<std::function<void()>(torch::nn::Module&)> wrap;
};

struct RulePlugin {
  std::string name;
  std::shared_ptr<const Rule> rule;
};

struct PluginList {
  std::vector<RulePlugin> rules;
  std::vector<ShardsPlugin> shards;
  std::vector<PatchPlugin> patches;
};

}  // namespace modules_internal

template <typename T>
concept ModuleWithForward = requires { typename modules_internal::ForwardOf<T>::Plain; };

class Plugins {
 public:
  Plugins() = default;

  // Operator `name`, "mylib::linear_gelu", registered with TORCH_LIBRARY, shards by `rule` (rule.h) on
  // every mesh that these plug-ins are used on. It counts as a layer's operator, too: the inputs and
  // outputs of a module whose weight it takes are met there.
  //
  // Throws Error: AlreadyExists for a second rule of that name, InvalidArgument for what is no name.
  Plugins& rule(std::string name, Rule rule);

  // How modules of type T lie where a plan's "module" part names them. `ask` is called with the
  // module, its name and one mesh dimension, on every rank, and has to answer the same on each; what it
  // throws comes out of parallelize_module().
  //
  // Throws Error (AlreadyExists) for a second one of T.
  template <typename T, typename Ask>
  Plugins& shards(Ask ask) {
    static_assert(
        std::is_invocable_r_v<ModuleSharding, const Ask&, const T&, const ShardingRequest&>,
        "wanted ModuleSharding ask(const T& module, const ShardingRequest& request)");
    return add(modules_internal::ShardsPlugin{
        modules_internal::PluginType::of<T>(),
        [ask = std::move(ask)](const torch::nn::Module& module, const ShardingRequest& request)
            -> ModuleSharding { return ask(dynamic_cast<const T&>(module), request); }});
  }

  // Modules of type T are replaced by what `make` returns, a module (holder or shared_ptr) whose forward
  // takes and gives what T's does; null: this one stays. It may have T's parameters as its own, and
  // must not change the module that it is given. In its place means in a Sequential, where modules are
  // called without their type; elsewhere it is an error before anything changes.
  //
  // Throws Error (AlreadyExists) for a second patch of T.
  template <typename T, typename Make>
  Plugins& patch(Make make) {
    using Made = std::invoke_result_t<const Make&, T&, const PatchRequest&>;
    using With =
        typename decltype(modules_internal::pointer_of(std::declval<Made>()))::element_type;
    static_assert(modules_internal::same_forward<T, With>(),
                  "the forward of the replacement has other arguments or another result than T's");
    return add(modules_internal::PatchPlugin{
        modules_internal::PluginType::of<T>(),
        [make = std::move(make)](torch::nn::Module& module, const PatchRequest& request)
            -> std::optional<torch::nn::AnyModule> {
          auto with = modules_internal::pointer_of(make(dynamic_cast<T&>(module), request));
          if (with == nullptr) return std::nullopt;
          return torch::nn::AnyModule(std::move(with));
        },
        {}});
  }

  // What runs in place of the forward of modules that are Hooked<T> (hooked.h), wherever they stand:
  // `run(module, forward, arguments...)`, where `forward` is T's own. Between the plan's inputs and
  // outputs.
  //
  // Throws Error (AlreadyExists) for a second patch of T.
  template <ModuleWithForward T>
  Plugins& patch_forward(typename modules_internal::ForwardOf<T>::template Patch<T> run) {
    using Hook = typename modules_internal::ForwardOf<T>::template Hook<T>;
    return add(modules_internal::PatchPlugin{
        modules_internal::PluginType::of<T>(),
        {},
        [run = std::move(run)](torch::nn::Module& module) -> std::function<void()> {
          auto* const hook = dynamic_cast<Hook*>(&module);
          if (hook == nullptr) return nullptr;
          auto before = std::exchange(hook->patched_forward, run);
          return [hook, before = std::move(before)] { hook->patched_forward = before; };
        }});
  }

  const modules_internal::PluginList& list() const { return list_; }

 private:
  Plugins& add(modules_internal::ShardsPlugin plugin);
  Plugins& add(modules_internal::PatchPlugin plugin);

  modules_internal::PluginList list_;
};

// As without plug-ins (parallelize_module.h). Throws Error before anything is changed, besides what
// that throws: NotFound for a rule of an operator that LibTorch does not know, and for a patch that
// finds no module; AlreadyExists for an operator that has another rule on the mesh; FailedPrecondition
// for a patch of a module that cannot be replaced where it stands; InvalidArgument for a plug-in's
// answer that does not fit its module.
void parallelize_module(torch::nn::Module& module, const MeshPtr& mesh, const ShardingPlan& plan,
                        const Plugins& plugins, const DistributeOptions& options = {},
                        std::source_location where = std::source_location::current());

// What that would do. Patches are applied, and taken back.
ResolvedPlan resolve_sharding_plan(torch::nn::Module& module, const DeviceMesh& mesh,
                                   const ShardingPlan& plan, const Plugins& plugins);

// One run of a forward that patch_forwards() is in place of.
struct PatchedCall {
  torch::nn::Module& module;
  const std::string& fqn;  // as patch_forwards() found it
  const std::vector<at::Tensor>& inputs;
  size_t num_results;
  // What would have run, on inputs of the same number.
  const std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>& forward;
};
using PatchedRun = std::function<std::vector<at::Tensor>(const PatchedCall&)>;

// Patches by names in place of types, at once and not with a plan, which may come before or after:
// `run` runs in place of the forward of every module in `module` that `pattern` (FqnPattern) names,
// between a plan's inputs and outputs. Of one that is patched already, by this or (whichever comes
// first) by a plug-in, it is given the patched forward.
// Ranks that are to compute the same patch the same.
//
//   patch_forwards(*llama, "model.layers.*.mlp", [](const PatchedCall& call) {
//     return std::vector{call.forward(call.inputs)[0] * 0.5};
//   });
//
// Throws Error before anything changes: InvalidArgument for what is no pattern, NotFound where it names
// no module, FailedPrecondition for one that is not Hooked (hooked.h) or whose forward has other
// arguments or results than tensors. A run with other than `num_results` defined results is an error
// of the forward.
void patch_forwards(torch::nn::Module& module, std::string_view pattern, PatchedRun run);

}  // namespace shardweave
