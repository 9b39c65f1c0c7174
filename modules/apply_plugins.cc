#include "shardweave/modules/apply_plugins.h"

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <string_view>
#include <utility>

#include "ATen/core/dispatch/Dispatcher.h"
#include "absl/strings/str_join.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/modules/layer_style.h"
#include "torch/nn/modules/container/sequential.h"

namespace shardweave::modules_internal {
namespace {

using dtensor_internal::MeshContext;
using torch::nn::AnyModule;

[[noreturn]] void refuse_plugin(absl::StatusCode code, const std::string& why) {
  throw Error("parallelize_module", absl::Status(code, why));
}

// "'blocks.0.mlp' (MlpImpl)".
std::string described(std::string_view fqn, const torch::nn::Module& module) {
  return fqn.empty() ? str_cat("the model itself (", module.name(), ")")
                     : str_cat("'", fqn, "' (", module.name(), ")");
}

bool is_exactly(const PluginType& type, const torch::nn::Module& module) {
  if (std::type_index(typeid(module)) == type.type) return true;
  const auto* hook = dynamic_cast<const ForwardHook*>(&module);
  return hook != nullptr && std::type_index(hook->made_of()) == type.type;
}

// Null: none.
template <typename Plugin>
const Plugin* plugin_for(const std::vector<Plugin>& plugins, const torch::nn::Module& module,
                         std::string_view fqn) {
  const Plugin* found = nullptr;
  const Plugin* other = nullptr;
  for (const Plugin& plugin : plugins) {
    if (!plugin.type.is(module)) continue;
    if (is_exactly(plugin.type, module)) return &plugin;
    (found == nullptr ? found : other) = &plugin;
  }
  if (other != nullptr) {
    refuse_plugin(
        absl::StatusCode::kInvalidArgument,
        str_cat(described(fqn, module), " is of two types with a plug-in, ", found->type.name,
                " and ", other->type.name, "; wanted one for its own type"));
  }
  return found;
}

struct PatchedModule {
  torch::nn::Module* module;
  std::string fqn;
  std::vector<std::pair<torch::nn::Module*, std::string>> places;  // parent, and its name there
};

// Every module once, those in it before it.
class Modules {
 public:
  explicit Modules(torch::nn::Module& root) { visit(root, ""); }
  std::vector<PatchedModule> inner_first() && {
    std::vector<PatchedModule> all;
    for (torch::nn::Module* module : order_) all.push_back(std::move(modules_.at(module)));
    return all;
  }

 private:
  void visit(torch::nn::Module& module, const std::string& fqn) {
    if (!modules_.emplace(&module, PatchedModule{&module, fqn, {}}).second) return;
    for (const auto& child : module.named_children()) {
      visit(*child.value(), joined_fqn(fqn, child.key()));
      modules_.at(child.value().get()).places.emplace_back(&module, child.key());
    }
    order_.push_back(&module);
  }
  std::map<const torch::nn::Module*, PatchedModule> modules_;
  std::vector<torch::nn::Module*> order_;
};

// Where a Sequential calls its child of that name, for it may have one child twice; null: it is no
// Sequential, or calls something else. It calls its children in their order.
AnyModule* called_by(torch::nn::Module& parent, const std::string& name,
                     const torch::nn::Module& child) {
  auto* const sequential = dynamic_cast<torch::nn::SequentialImpl*>(&parent);
  if (sequential == nullptr) return nullptr;
  auto any = sequential->begin();
  for (const auto& item : parent.named_children()) {
    if (any == sequential->end()) return nullptr;
    if (item.key() == name) return any->ptr().get() == &child ? &*any : nullptr;
    ++any;
  }
  return nullptr;
}

constexpr char kAdvice[] =
    "; hold it in a Sequential, or make it as Hooked<Impl> (hooked.h) and patch its forward "
    "(Plugins::patch_forward)";

// A module entry, understood.
struct AskedModules {
  std::string name;  // "the plan's module entry 2, '*.mlp'"
  FqnPattern pattern;
  std::vector<std::pair<int, std::string>> along;  // mesh dimension, style
  bool decides = false;
  std::string beaten_by;
};

AskedModules asked_modules(const ModulePlan& plan, size_t i, const DeviceMesh& mesh) {
  AskedModules entry{.name =
                         str_cat("the plan's module entry ", i + 1, ", '", plan[i].pattern, "'")};
  absl::StatusOr<FqnPattern> pattern = FqnPattern::parse(plan[i].pattern);
  if (!pattern.ok()) {
    refuse_plugin(absl::StatusCode::kInvalidArgument,
                  str_cat(entry.name, " ", std::string(pattern.status().message())));
  }
  entry.pattern = *std::move(pattern);
  if (plan[i].along.empty()) {
    refuse_plugin(absl::StatusCode::kInvalidArgument,
                  str_cat(entry.name, " names no mesh dimension; wanted at least one"));
  }
  for (const ModuleEntry::Along& along : plan[i].along) {
    const auto dim = mesh.dim(along.mesh_dim);
    if (!dim.ok()) {
      refuse_plugin(absl::StatusCode::kNotFound,
                    str_cat(entry.name, ": ", std::string(dim.status().message())));
    }
    for (const auto& [other, style] : entry.along) {
      if (other != static_cast<int>(*dim)) continue;
      refuse_plugin(absl::StatusCode::kInvalidArgument,
                    str_cat(entry.name, " names '", along.mesh_dim, "' twice"));
    }
    entry.along.emplace_back(static_cast<int>(*dim), along.style);
  }
  return entry;
}

// The most specific entry for a module; null: none speaks of it.
const AskedModules* most_specific(std::vector<AskedModules>& entries, const std::string& fqn) {
  AskedModules* best = nullptr;
  for (AskedModules& entry : entries) {
    if (!entry.pattern.matches(fqn)) continue;
    if (best == nullptr || entry.pattern.specificity() > best->pattern.specificity()) best = &entry;
  }
  for (AskedModules& entry : entries) {
    if (best == nullptr || !entry.pattern.matches(fqn)) continue;
    if (entry.pattern.specificity() != best->pattern.specificity()) {
      entry.beaten_by = best->name;
      continue;
    }
    entry.decides = true;
    if (entry.along != best->along) {
      refuse_plugin(absl::StatusCode::kInvalidArgument,
                    str_cat("'", fqn, "' is spoken of by ", best->name, ", and ", entry.name,
                            ", which are equally specific and differ"));
    }
  }
  return best;
}

// Of one module, along all the mesh dimensions that the plan names for it.
class Answers {
 public:
  Answers(const torch::nn::Module& module, std::string fqn, const ShardsPlugin& plugin)
      : module_(module), fqn_(std::move(fqn)), plugin_(plugin) {
    for (const auto& item : module.named_parameters()) tensors_.push_back(item.key());
    for (const auto& item : module.named_buffers()) tensors_.push_back(item.key());
  }

  void ask(const DeviceMesh& mesh, int mesh_dim, const std::string& style,
           const ShardingPlan& plan) {
    const ModuleSharding answer = plugin_.ask(module_, {fqn_, mesh, mesh_dim, style, plan});
    const std::string dim_name = mesh.dims()[static_cast<size_t>(mesh_dim)].name;
    for (const auto& [tensor, placement] : by_tensor(answer.parameter)) {
      add(parameter_, tensor, dim_name, placement);
    }
    for (const auto& [name, placement] : answer.forward) {
      for (const std::string& value : values_of(name)) add(forward_, value, dim_name, placement);
    }
  }

  void append_to(ShardingPlan& plan) && {
    for (auto& [name, placements] : parameter_) {
      plan.parameter.push_back({joined_fqn(fqn_, name), std::move(placements)});
    }
    for (auto& [name, placements] : forward_) {
      plan.forward.push_back({joined_fqn(fqn_, name), std::move(placements)});
    }
  }

 private:
  using Named = std::vector<std::pair<std::string, NamedPlacements>>;

  std::string self() const {
    return str_cat("the plug-in that shards ", plugin_.type.name, ", asked for ",
                   described(fqn_, module_), ",");
  }

  FqnPattern parsed(std::string_view text, std::string_view what) const {
    absl::StatusOr<FqnPattern> pattern = FqnPattern::parse(text);
    if (pattern.ok()) return *std::move(pattern);
    refuse_plugin(absl::StatusCode::kInvalidArgument,
                  str_cat(self(), " names ", what, " '", text, "', which ",
                          std::string(pattern.status().message())));
  }

  // What one answer says of each parameter and buffer: the most specific of its patterns.
  std::map<std::string, Placement> by_tensor(
      const std::vector<std::pair<std::string, Placement>>& named) const {
    std::map<std::string, Placement> result;
    std::map<std::string, std::pair<FqnPattern::Specificity, std::string>> by;
    for (const auto& [name, placement] : named) {
      const FqnPattern pattern = parsed(name, "a parameter");
      bool matches = false;
      for (const std::string& tensor : tensors_) {
        if (!pattern.matches(tensor)) continue;
        matches = true;
        const auto found = by.find(tensor);
        if (found != by.end() && found->second.first > pattern.specificity()) continue;
        if (found != by.end() && found->second.first == pattern.specificity() &&
            result.at(tensor) != placement) {
          refuse_plugin(
              absl::StatusCode::kInvalidArgument,
              str_cat(self(), " gives '", tensor, "' two placements, ",
                      result.at(tensor).to_string(), " by '", found->second.second, "' and ",
                      placement.to_string(), " by '", name, "', which are equally specific"));
        }
        by.insert_or_assign(tensor, std::pair(pattern.specificity(), name));
        result.insert_or_assign(tensor, placement);
      }
      if (matches) continue;
      refuse_plugin(
          absl::StatusCode::kInvalidArgument,
          str_cat(self(), " names a parameter '", name, "', which it does not have; it has ",
                  tensors_.empty() ? "none" : absl::StrJoin(tensors_, ", ")));
    }
    return result;
  }

  // The inputs or outputs that it names, of modules in this one by a pattern: "experts.*.input".
  std::vector<std::string> values_of(const std::string& name) const {
    size_t end = name.rfind(".input");
    if (const size_t output = name.rfind(".output");
        output != std::string::npos && (end == std::string::npos || output > end)) {
      end = output;
    }
    const std::string_view module = std::string_view(name).substr(0, end);
    if (end == std::string::npos ||
        (!module.starts_with("re:") && module.find_first_of("*?{") == std::string_view::npos)) {
      return {name};
    }
    const FqnPattern pattern = parsed(module, "modules");
    std::vector<std::string> values;
    for (const auto& item : module_.named_modules("", /*include_self=*/false)) {
      if (pattern.matches(item.key())) values.push_back(str_cat(item.key(), name.substr(end)));
    }
    if (!values.empty()) return values;
    refuse_plugin(absl::StatusCode::kInvalidArgument,
                  str_cat(self(), " names '", name, "', and has no module '", module, "'"));
  }

  void add(Named& to, const std::string& name, const std::string& mesh_dim,
           const Placement& placement) {
    auto entry = std::find_if(to.begin(), to.end(), [&](const auto& e) { return e.first == name; });
    if (entry == to.end()) entry = to.insert(to.end(), {name, {}});
    for (const auto& [dim, other] : entry->second) {
      if (dim != mesh_dim || other == placement) continue;
      refuse_plugin(absl::StatusCode::kInvalidArgument,
                    str_cat(self(), " gives '", name, "' two placements along '", mesh_dim, "', ",
                            other.to_string(), " and ", placement.to_string()));
    }
    const bool is_new = std::none_of(entry->second.begin(), entry->second.end(),
                                     [&](const auto& p) { return p.first == mesh_dim; });
    if (is_new) entry->second.emplace_back(mesh_dim, placement);
  }

  const torch::nn::Module& module_;
  const std::string fqn_;
  const ShardsPlugin& plugin_;
  std::vector<std::string> tensors_;
  Named parameter_, forward_;
};

}  // namespace

AppliedPatches::Undo::~Undo() {
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) (*step)();
}

AppliedPatches::AppliedPatches(torch::nn::Module& module, const DeviceMesh& mesh,
                               const ShardingPlan& plan, const Plugins& plugins) {
  const std::vector<PatchPlugin>& patches = plugins.list().patches;
  if (patches.empty()) return;
  std::set<const PatchPlugin*> used;
  for (const PatchedModule& found : Modules(module).inner_first()) {
    const PatchPlugin* const patch = plugin_for(patches, *found.module, found.fqn);
    if (patch == nullptr) continue;
    used.insert(patch);
    if (patch->wrap != nullptr) {
      std::function<void()> undo = patch->wrap(*found.module);
      if (undo == nullptr) {
        refuse_plugin(
            absl::StatusCode::kFailedPrecondition,
            str_cat("the patch of the forward of ", patch->type.name, ": ",
                    described(found.fqn, *found.module),
                    " is not Hooked: its forward is called where nobody can be in between; make "
                    "it as Hooked<Impl> (hooked.h)"));
      }
      undo_.steps.push_back(std::move(undo));
      str_append(&text_, found.fqn, " wrapped;");
      continue;
    }
    const std::optional<AnyModule> with = patch->make(*found.module, {found.fqn, mesh, plan});
    if (!with.has_value()) continue;
    if (found.places.empty()) {
      refuse_plugin(absl::StatusCode::kFailedPrecondition,
                    str_cat("the patch of ", patch->type.name, ": ", described("", *found.module),
                            " cannot be replaced, for the caller holds it", kAdvice));
    }
    std::vector<AnyModule*> calls;
    for (const auto& [parent, name] : found.places) {
      calls.push_back(called_by(*parent, name, *found.module));
      if (calls.back() != nullptr) continue;
      refuse_plugin(absl::StatusCode::kFailedPrecondition,
                    str_cat("the patch of ", patch->type.name, ": ",
                            described(found.fqn, *found.module), " cannot be replaced, for ",
                            parent->name(), " calls it as the type that it is", kAdvice));
    }
    str_append(&text_, found.fqn, " ", with->ptr()->name(), ";");
    // What it has of the old one's parts keeps the mode that it has.
    std::vector<std::pair<torch::nn::Module*, bool>> modes;
    for (const auto& part : found.module->modules()) {
      modes.emplace_back(part.get(), part->is_training());
    }
    with->ptr()->train(found.module->is_training());
    // (Not of what is inside: outer ones come first.)
    for (const auto& [part, on] : modes) part->train(on);
    for (size_t i = 0; i < calls.size(); ++i) {
      const auto& [parent, name] = found.places[i];
      undo_.steps.push_back([call = calls[i], parent = parent, name = name, old = *calls[i]] {
        *call = old;
        parent->replace_module(name, old.ptr());
      });
      *calls[i] = *with;
      parent->replace_module(name, with->ptr());
    }
  }
  for (const PatchPlugin& patch : patches) {
    if (used.contains(&patch)) continue;
    refuse_plugin(absl::StatusCode::kNotFound,
                  str_cat("the patch of ", patch.type.name, ": the model has no such module"));
  }
}

ShardingPlan with_answers(torch::nn::Module& module, const DeviceMesh& mesh,
                          const ShardingPlan& plan, const Plugins& plugins) {
  if (plan.module.empty()) return plan;
  std::vector<AskedModules> entries;
  for (size_t i = 0; i < plan.module.size(); ++i) {
    entries.push_back(asked_modules(plan.module, i, mesh));
  }
  ShardingPlan answered{.parameter = plan.parameter, .forward = plan.forward};
  std::vector<std::string> fqns;
  const auto answer = [&](const std::string& fqn, const torch::nn::Module& m) {
    fqns.push_back(fqn);
    const AskedModules* const entry = most_specific(entries, fqn);
    if (entry == nullptr) return;
    const ShardsPlugin* const plugin = plugin_for(plugins.list().shards, m, fqn);
    if (plugin == nullptr) {
      std::vector<std::string> known;
      for (const ShardsPlugin& p : plugins.list().shards) known.push_back(p.type.name);
      refuse_plugin(
          absl::StatusCode::kNotFound,
          str_cat(entry->name, ": no plug-in says how ", described(fqn, m), " shards; there ",
                  known.empty() ? std::string("are none (Plugins::shards in plugin.h)")
                                : str_cat("are those of ", absl::StrJoin(known, ", "))));
    }
    Answers answers(m, fqn, *plugin);
    for (const auto& [mesh_dim, style] : entry->along) answers.ask(mesh, mesh_dim, style, plan);
    std::move(answers).append_to(answered);
  };
  answer("", module);
  for (const auto& item : module.named_modules("", /*include_self=*/false)) {
    answer(item.key(), *item.value());
  }
  for (const AskedModules& entry : entries) {
    if (entry.decides) continue;
    if (!entry.beaten_by.empty()) {
      refuse_plugin(absl::StatusCode::kInvalidArgument,
                    str_cat(entry.name, ", decides nothing: ", entry.beaten_by,
                            " is more specific and matches all that it does"));
    }
    refuse_plugin(absl::StatusCode::kNotFound,
                  str_cat(entry.name, " matches no module", entry.pattern.suggestion(fqns)));
  }
  return answered;
}

std::string which_are_answers(const ShardingPlan& plan, const ShardingPlan& answered) {
  std::vector<std::string> which;
  if (answered.parameter.size() > plan.parameter.size()) {
    which.push_back(str_cat("entry ", plan.parameter.size() + 1, " and those behind it"));
  }
  if (answered.forward.size() > plan.forward.size()) {
    which.push_back(str_cat("forward entry ", plan.forward.size() + 1, " and those behind it"));
  }
  if (which.empty()) return "";
  return str_cat(" (", absl::StrJoin(which, ", "), ": what plug-ins say of the plan's modules)");
}

void check_rules(const MeshPtr& mesh, const Plugins& plugins) {
  const std::vector<RulePlugin>& rules = plugins.list().rules;
  if (rules.empty()) return;
  const std::shared_ptr<MeshContext> context = MeshContext::of(mesh);
  if (context->operator_under_way()) {
    refuse_plugin(
        absl::StatusCode::kFailedPrecondition,
        "an operator on DTensors of the mesh is running, and plug-ins would add rules to it");
  }
  std::set<std::string> known;
  for (const c10::OperatorName& op : c10::Dispatcher::singleton().getAllOpNames()) {
    known.insert(op.name);
    if (!op.overload_name.empty()) known.insert(str_cat(op.name, ".", op.overload_name));
  }
  for (const RulePlugin& rule : rules) {
    if (!known.contains(rule.name)) {
      const std::string space = rule.name.substr(0, rule.name.find("::") + 2);
      std::vector<std::string> beside;
      for (const std::string& name : known) {
        if (name.starts_with(space) && beside.size() < 5) beside.push_back(name);
      }
      refuse_plugin(absl::StatusCode::kNotFound,
                    str_cat("the plug-ins' rule of '", rule.name,
                            "': LibTorch knows no such operator; wanted one that TORCH_LIBRARY has "
                            "registered",
                            beside.empty() ? "" : ", as ", absl::StrJoin(beside, ", ")));
    }
    const absl::Status status = context->decisions.can_plug_in(rule.name, rule.rule);
    if (!status.ok()) {
      refuse_plugin(status.code(), str_cat("the plug-ins' rule: ", std::string(status.message())));
    }
  }
}

std::string text_of_rules(const Plugins& plugins) {
  std::set<std::string> names;
  for (const RulePlugin& rule : plugins.list().rules) names.insert(rule.name);
  return absl::StrJoin(names, ";");
}

void add_rules(const MeshPtr& mesh, const Plugins& plugins) {
  for (const RulePlugin& rule : plugins.list().rules) {
    MeshContext::of(mesh)->decisions.plug_in(rule.name, rule.rule);
  }
}

}  // namespace shardweave::modules_internal
