#include "shardweave/modules/checkpoint/state_dict.h"

#include <algorithm>
#include <utility>

#include "ATen/ops/empty.h"
#include "ATen/ops/zeros_like.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_join.h"
#include "c10/core/GradMode.h"
#include "nlohmann/json.hpp"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/engine/members.h"
#include "shardweave/dtensor/random.h"
#include "shardweave/modules/checkpoint/default_generator.h"
#include "shardweave/modules/checkpoint/manifest.h"
#include "shardweave/modules/non_persistent_buffers.h"
#include "shardweave/modules/optimizer_state.h"
#include "torch/nn/module.h"
#include "torch/optim/optimizer.h"

namespace shardweave {

using namespace checkpoint_internal;
using namespace modules_internal;

namespace {

constexpr char kStateDict[] = "StateDict";
constexpr double kMostFusedSteps = 0x1p24;  // FusedOptimizer counts in float

[[noreturn]] void refuse(absl::StatusCode code, const std::string& why) {
  throw Error(kStateDict, absl::Status(code, why));
}

void check_name(const std::string& name) {
  try {
    if (!name.empty() && nlohmann::json(name).dump().size() > 2) return;
  } catch (const nlohmann::json::exception&) {
    // No UTF-8.
  }
  refuse(absl::StatusCode::kInvalidArgument, "a name is empty, or no UTF-8");
}

}  // namespace

std::set<std::string> checkpoint_internal::non_persistent_fqns(const torch::nn::Module& module) {
  std::set<std::string> fqns;
  const auto add = [&](const torch::nn::Module& of, const std::string& prefix) {
    const auto* its = dynamic_cast<const NonPersistentBuffers*>(&of);
    if (its == nullptr) return;
    for (const std::string& name : its->non_persistent_buffers()) fqns.insert(prefix + name);
  };
  add(module, "");
  for (const auto& part : module.named_modules("", /*include_self=*/false)) {
    add(*part.value(), part.key() + ".");
  }
  return fqns;
}

void StateDict::add_tensor(std::string name, at::Tensor tensor, std::vector<std::string> aliases) {
  check_name(name);
  if (!tensor.defined()) {
    refuse(absl::StatusCode::kInvalidArgument, str_cat("'", name, "' is an undefined tensor"));
  }
  for (const std::string& alias : aliases) check_name(alias);
  if (!taken_.insert(name).second) {
    refuse(absl::StatusCode::kAlreadyExists, str_cat("there is a '", name, "' already"));
  }
  for (const std::string& alias : aliases) {
    if (taken_.insert(alias).second) continue;
    refuse(absl::StatusCode::kAlreadyExists, str_cat("there is a '", alias, "' already"));
  }
  tensors_.push_back({std::move(name), std::move(tensor), std::move(aliases)});
}

void StateDict::set_value(const std::string& name, std::string_view json) {
  check_name(name);
  const absl::StatusOr<std::string> normal = normalized_json(json);
  if (!normal.ok()) {
    refuse(absl::StatusCode::kInvalidArgument,
           str_cat("the value '", name, "': ", std::string(normal.status().message())));
  }
  if (values_.contains(name) && !own_values_.contains(name)) {
    refuse(absl::StatusCode::kAlreadyExists,
           str_cat("the value '", name, "' is what something else has added"));
  }
  own_values_.insert(name);
  auto text = std::make_shared<std::string>(*normal);
  values_[name] = {.get = [text] { return *text; },
                   .check = nullptr,
                   .set = [text](const std::string& loaded) { *text = loaded; },
                   .is_own = true};
}

std::string StateDict::value(const std::string& name) const {
  const auto it = values_.find(name);
  if (it == values_.end()) {
    refuse(absl::StatusCode::kNotFound, str_cat("there is no value '", name, "'"));
  }
  return it->second.get();
}

std::vector<std::string> StateDict::tensor_names() const {
  std::vector<std::string> names;
  for (const NamedTensor& tensor : tensors_) names.push_back(tensor.name);
  return names;
}

std::vector<std::string> StateDict::value_names() const {
  std::vector<std::string> names;
  for (const auto& [name, value] : values_) names.push_back(name);
  return names;
}

void StateDict::add_late(LateTensors late) {
  add_late([late = std::move(late)] { return std::vector<LateTensors>{late}; });
}

void StateDict::add_late(std::function<std::vector<LateTensors>()> source) {
  late_.push_back(std::move(source));
  try {
    late();
  } catch (...) {
    late_.pop_back();
    throw;
  }
}

std::vector<LateTensors> StateDict::late() const {
  std::vector<LateTensors> all;
  std::set<std::string_view> prefixes;  // one is one optimizer's parameter
  for (const auto& source : late_) {
    for (LateTensors& late : source()) all.push_back(std::move(late));
  }
  for (const LateTensors& late : all) {
    check_name(late.prefix);
    if (prefixes.insert(late.prefix).second) continue;
    refuse(absl::StatusCode::kAlreadyExists, str_cat("there are '", late.prefix, "*' already"));
  }
  return all;
}

void StateDict::add_value(const std::string& name, NamedValue value) {
  check_name(name);
  if (values_.contains(name)) {
    refuse(absl::StatusCode::kAlreadyExists, str_cat("there is a value '", name, "' already"));
  }
  values_[name] = std::move(value);
}

void add_module(StateDict& state, const torch::nn::Module& module, const std::string& prefix) {
  const std::set<std::string> left_out = checkpoint_internal::non_persistent_fqns(module);
  for (const dtensor_internal::Member& member : dtensor_internal::members_of(module)) {
    if (!member.tensor.defined()) continue;
    std::vector<std::string> names;
    for (const std::string& fqn : member.fqns) {
      if (!left_out.contains(fqn)) names.push_back(prefix + fqn);
    }
    if (names.empty()) continue;
    state.add_tensor(names[0], member.tensor, {names.begin() + 1, names.end()});
  }
}

namespace checkpoint_internal {
namespace {

// A module's tensors, each with its first name.
class NamesOfTensors {
 public:
  explicit NamesOfTensors(const torch::nn::Module& module)
      : members_(dtensor_internal::members_of(module)) {
    for (const dtensor_internal::Member& member : members_) {
      fqns_.emplace(member.tensor.unsafeGetTensorImpl(), member.fqns[0]);
    }
  }
  // Of an optimizer's parameter, the one with this index.
  const std::string& of(const at::Tensor& parameter, size_t index) const {
    const auto it = fqns_.find(parameter.unsafeGetTensorImpl());
    if (it == fqns_.end()) {
      refuse(absl::StatusCode::kInvalidArgument,
             str_cat("parameter ", index, " of the optimizer, of shape [",
                     absl::StrJoin(parameter.sizes(), ", "), "], is none of the module's"));
    }
    return it->second;
  }

 private:
  std::vector<dtensor_internal::Member> members_;  // or others would take their addresses
  absl::flat_hash_map<const c10::TensorImpl*, std::string> fqns_;
};

// What `late_of` gives for the shard of each parameter and its prefix; a parameter that is given twice is one.
void add_growing(StateDict& state, const std::string& prefix, std::function<Optimized()> now,
                 const torch::nn::Module& module,
                 std::function<LateTensors(const at::Tensor&)> late_of) {
  state.add_late(
      [prefix, now = std::move(now), late_of = std::move(late_of), names = NamesOfTensors(module)] {
        const Optimized its = now();
        absl::flat_hash_set<const c10::TensorImpl*> done;
        std::vector<LateTensors> all;
        for (size_t i = 0; i < its.parameters.size(); ++i) {
          if (!done.insert(its.parameters[i].unsafeGetTensorImpl()).second) continue;
          all.push_back(late_of(its.shards[i]));
          all.back().is_optimizers = true;
          all.back().prefix = str_cat(prefix, names.of(its.parameters[i], i), ".");
        }
        return all;
      });
}

}  // namespace

void add_states(StateDict& state, FusedOptimizer& optimizer, const std::string& prefix,
                std::function<Optimized()> now, const torch::nn::Module& module) {
  add_growing(state, prefix, std::move(now), module, [&optimizer](const at::Tensor& shard) {
    LateTensors late;
    // By the tensor, for the optimizer counts as it was given them.
    const auto index = [&optimizer, shard] {
      const std::vector<at::Tensor>& all = optimizer.parameters();
      const auto it = std::find_if(all.begin(), all.end(),
                                   [&](const at::Tensor& one) { return one.is_same(shard); });
      return static_cast<size_t>(it - all.begin());
    };
    late.items = [&optimizer, index] {
      std::vector<LateTensors::Item> items;
      const std::vector<std::string_view> names = optimizer.state_names(index());
      // Second moments are read by how many steps they are of; a momentum alone (SGD, Lion) is what it is, and
      // torch::optim::SGD counts no steps.
      const bool needs_step = std::any_of(names.begin(), names.end(), [](std::string_view its) {
        return its != "step" && its != "momentum_buffer" && its != "exp_avg";
      });
      for (const std::string_view its : names) {
        const bool is_number = its == "step";
        const at::Tensor kept = optimizer.state(index(), its);
        items.push_back({.name = std::string(its),
                         .like = is_number ? at::Tensor() : kept,
                         .is_optional = is_number && !needs_step,
                         .dtype = kept.scalar_type(),
                         .most = kMostFusedSteps});
      }
      return items;
    };
    late.now = [&optimizer, index] {
      OptimizerState states;
      for (const std::string_view its : optimizer.state_names(index())) {
        states[std::string(its)] = optimizer.state(index(), its);
      }
      return states;
    };
    late.set = [&optimizer, index](OptimizerState loaded) {
      const bool is_empty = loaded.empty();
      for (const std::string_view its : optimizer.state_names(index())) {
        const auto it = loaded.find(std::string(its));
        if (it != loaded.end()) {
          optim_internal::put_state(optimizer, index(), its, it->second);
        } else if (is_empty) {
          optim_internal::put_state(optimizer, index(), its,
                                    at::zeros_like(optimizer.state(index(), its)));
        }
      }
    };
    return late;
  });
}

void add_states(StateDict& state, torch::optim::Optimizer& optimizer, const std::string& prefix,
                std::function<Optimized()> now, const torch::nn::Module& module) {
  optimizer_state_names(optimizer, at::Tensor());  // throws for one that has none
  add_growing(state, prefix, std::move(now), module, [&optimizer](const at::Tensor& shard) {
    LateTensors late;
    late.items = [&optimizer, shard] {
      std::vector<LateTensors::Item> items;
      for (const OptimizerStateName& its : optimizer_state_names(optimizer, shard)) {
        items.push_back({.name = its.name,
                         .like = its.is_number ? at::Tensor() : shard,
                         .is_optional = its.is_optional,
                         .dtype = its.is_number ? at::kLong : shard.scalar_type()});
      }
      return items;
    };
    late.now = [&optimizer, shard] { return zero_internal::state_of(optimizer, 0, shard); };
    late.set = [&optimizer, shard](OptimizerState loaded) {
      assign_optimizer_state(optimizer, shard, std::move(loaded));
    };
    return late;
  });
}

}  // namespace checkpoint_internal

void add_optimizer(StateDict& state, FusedOptimizer& optimizer, const torch::nn::Module& module,
                   const std::string& prefix) {
  const auto now = [&optimizer] {
    return Optimized{optimizer.parameters(), optimizer.parameters()};
  };
  add_states(state, optimizer, prefix, now, module);
}

void add_optimizer(StateDict& state, torch::optim::Optimizer& optimizer,
                   const torch::nn::Module& module, const std::string& prefix) {
  const auto now = [&optimizer] {
    Optimized its;
    for (const torch::optim::OptimizerParamGroup& group : optimizer.param_groups()) {
      its.parameters.insert(its.parameters.end(), group.params().begin(), group.params().end());
    }
    its.shards = its.parameters;
    return its;
  };
  add_states(state, optimizer, prefix, now, module);
}

namespace {

constexpr char kDefaultGenerator[] = "cpu_generator";

// Undefined: there is none, or it is no text of one.
at::Tensor default_generator_in(const nlohmann::json& json) {
  std::string bytes;
  if (!json.contains(kDefaultGenerator) || !json[kDefaultGenerator].is_string() ||
      !absl::Base64Unescape(json[kDefaultGenerator].get<std::string>(), &bytes)) {
    return {};
  }
  at::Tensor state = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  std::copy(bytes.begin(), bytes.end(), static_cast<char*>(state.mutable_data_ptr()));
  return is_default_generator_state(state) ? state : at::Tensor();
}

}  // namespace

void add_random_state(StateDict& state, const MeshPtr& mesh, const std::string& name) {
  using Json = nlohmann::json;
  const auto number = [](const Json& json, const char* key) {
    return json.is_object() && json.contains(key) && json[key].is_number_unsigned();
  };
  state.add_value(
      name, {[mesh] {
               const PhiloxState now = random_state(mesh);
               Json json = {{"seed", now.seed}, {"offset", now.offset}};
               if (const at::Tensor own = default_generator_state(mesh); own.defined()) {
                 json[kDefaultGenerator] = absl::Base64Escape(
                     std::string(static_cast<const char*>(own.const_data_ptr()), own.nbytes()));
               }
               return json.dump();
             },
             [number, name](const std::string& text) {
               const Json json = Json::parse(text);
               if (number(json, "seed") && number(json, "offset") &&
                   (!json.contains(kDefaultGenerator) || default_generator_in(json).defined())) {
                 return absl::OkStatus();
               }
               return absl::InvalidArgumentError(
                   str_cat("the value '", name, "' is no random state: ", text.substr(0, 60)));
             },
             [mesh](const std::string& text) {
               const Json json = Json::parse(text);
               set_random_state(mesh,
                                {json["seed"].get<uint64_t>(), json["offset"].get<uint64_t>()});
               if (mesh->mesh().size() == 1) {
                 set_default_generator_state(default_generator_in(json));
               }
             }});
}

}  // namespace shardweave
