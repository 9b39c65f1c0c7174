#include "shardweave/modules/parallelize_module.h"

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "absl/strings/str_join.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/engine/checksum.h"
#include "shardweave/dtensor/engine/distribute.h"
#include "shardweave/dtensor/engine/forward_plan.h"
#include "shardweave/dtensor/engine/members.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "shardweave/dtensor/observe/comm_trace.h"
#include "shardweave/dtensor/observe/text_table.h"
#include "shardweave/modules/apply_plugins.h"
#include "shardweave/modules/hooked.h"
#include "shardweave/modules/layer_style.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"

namespace shardweave {

bool modules_internal::is_embedding(const torch::nn::Module* module, std::string_view name) {
  if (dynamic_cast<const torch::nn::LinearImpl*>(module) != nullptr) return false;
  if (dynamic_cast<const torch::nn::EmbeddingImpl*>(module) != nullptr ||
      dynamic_cast<const torch::nn::EmbeddingBagImpl*>(module) != nullptr) {
    return true;
  }
  return name.find("emb") != std::string_view::npos || name == "wte" || name == "wpe" ||
         (module != nullptr && module->name().find("Embedding") != std::string::npos);
}

namespace {

using namespace dtensor_internal;
using modules_internal::ForwardHook;
using modules_internal::is_embedding;
using modules_internal::kFunctionOfPlans;

[[noreturn]] void refuse(absl::StatusCode code, const std::string& why) {
  throw Error(kFunctionOfPlans, absl::Status(code, why));
}

// A module that a forward plan can name, and where its forward can be met.
struct Place {
  std::string fqn;  // "" of the whole model
  std::string type;
  ForwardHook* hook = nullptr;  // null: none, or its forward does not come there
  std::string_view advice;
  std::vector<std::string> parameters;  // of its own, without those of its children; by FQN
  std::vector<at::Tensor> members;      // those, and its buffers
  const Member* weight = nullptr;       // null: none, several
  std::optional<bool> looks_up;         // rows of that; nothing: nobody knows
  bool has_modules = false;             // with parameters or buffers of theirs
  bool is_parameter = false;            // no module: one of several parameters of one
  std::optional<std::string> also;  // another name of the module, or another module's of the weight
};

std::pair<std::string_view, std::string_view> split_fqn(std::string_view fqn) {
  const size_t dot = fqn.rfind('.');
  if (dot == std::string_view::npos) return {"", fqn};
  return {fqn.substr(0, dot), fqn.substr(dot + 1)};
}

// Modules by FQN. Those of hosts in other languages are known by their parameters' names alone.
std::map<std::string, Place, std::less<>> places_of(torch::nn::Module& module,
                                                    const std::vector<Member>& members) {
  std::map<std::string, Place, std::less<>> places;
  const auto at = [&](std::string_view fqn) -> Place& {
    const auto [it, is_new] = places.try_emplace(std::string(fqn));
    if (is_new) it->second.fqn = fqn;
    return it->second;
  };
  std::map<const ForwardHook*, std::string> hooks;
  std::map<std::string, const torch::nn::Module*, std::less<>> modules;
  const auto add = [&](std::string_view fqn, torch::nn::Module& m) {
    Place& place = at(fqn);
    modules.emplace(fqn, &m);
    place.type = m.name();
    place.hook = dynamic_cast<ForwardHook*>(&m);
    if (place.hook == nullptr) return;
    if (!place.hook->is_met) {
      place.advice = place.hook->advice();
      place.type.clear();  // of a host's language
      place.hook = nullptr;
      return;
    }
    const auto [first, is_new] = hooks.emplace(place.hook, fqn);
    if (is_new) return;
    place.also = first->second;
    at(first->second).also = fqn;
  };
  add("", module);
  for (const auto& item : module.named_modules("", /*include_self=*/false)) {
    add(item.key(), *item.value());
  }
  for (const Member& member : members) {
    for (const std::string& fqn : member.fqns) {
      const auto [owner, name] = split_fqn(fqn);
      for (std::string_view inner = owner; !inner.empty();) {
        inner = split_fqn(inner).first;
        at(inner).has_modules = true;
      }
      Place& place = at(owner);
      place.members.push_back(member.tensor);
      if (member.is_buffer) continue;
      place.parameters.push_back(fqn);
      if (name == "weight" || place.parameters.size() == 1) place.weight = &member;
    }
  }
  for (auto& [fqn, place] : places) {
    if (place.weight == nullptr) continue;
    const auto module_of_it = modules.find(fqn);
    const torch::nn::Module* its = module_of_it == modules.end() ? nullptr : module_of_it->second;
    if (place.weight->tensor.dim() == 2 && place.parameters.size() == 1 &&
        is_embedding(its, split_fqn(fqn).second)) {
      place.looks_up = true;
    } else if (dynamic_cast<const torch::nn::LinearImpl*>(its) != nullptr) {
      place.looks_up = false;
    }
    bool has_weight = false;
    for (const std::string& name : place.weight->fqns) {
      const auto [owner, last] = split_fqn(name);
      if (owner == fqn) has_weight |= last == "weight";
      if (owner != fqn && place.hook == nullptr) place.also = owner;  // a hook knows its module
    }
    if (!has_weight && place.parameters.size() > 1) place.weight = nullptr;
  }
  return places;
}

// Whether a forward plan can speak of it.
bool can_be_met(const Place& place) {
  if (place.also.has_value()) return false;
  return place.hook != nullptr || (place.weight != nullptr && !place.has_modules);
}

// An entry of the plan, understood.
struct Entry {
  std::string name;  // "the plan's forward entry 2, '*.norm.input'"
  std::string text;  // of the pattern
  FqnPattern module;
  Direction direction;
  ForwardLayouts::Slot slot;
  std::string value;  // "input.1"
  ForwardTarget target;
  bool decides = false;
  std::string beaten_at;
  size_t beaten_by = 0;
};

ForwardTarget target_on(const DeviceMesh& mesh, const PlanPlacements& given,
                        const std::string& entry) {
  ForwardTarget target;
  target.placements.resize(mesh.ndim());
  if (const Layout* layout = given.by_position()) {
    if (layout->mesh_ndim() != mesh.ndim()) {
      refuse(
          absl::StatusCode::kInvalidArgument,
          str_cat(entry, ": ", layout->to_string(), " has ", layout->mesh_ndim(), " placements; ",
                  mesh.to_string(), " wants ", mesh.ndim(), ", one per dimension"));
    }
    target.placements.assign(layout->placements().begin(), layout->placements().end());
    target.order = layout->order();
    return target;
  }
  const absl::StatusOr<Placements> all = try_resolve(mesh, *given.named());
  if (!all.ok()) {
    refuse(all.status().code(), str_cat(entry, ": ", std::string(all.status().message())));
  }
  for (const auto& [name, placement] : *given.named()) {
    target.placements[*mesh.dim(name)] = placement;
  }
  return target;
}

Entry understood(const ForwardPlan& plan, size_t i, const DeviceMesh& mesh) {
  const std::string& pattern = plan[i].pattern;
  Entry entry;
  entry.name = str_cat("the plan's forward entry ", i + 1, ", '", pattern, "'");
  // The last component that is "input" or "output", and at most one behind it.
  std::optional<std::string_view> which;
  auto [modules, last] = split_fqn(pattern);
  if (last != "input" && last != "output") {
    which = last;
    std::tie(modules, last) = split_fqn(modules);
  }
  if (last != "input" && last != "output") {
    refuse(absl::StatusCode::kInvalidArgument,
           str_cat(entry.name,
                   " does not say which value; wanted a module's name or pattern, then \".input\" "
                   "or \".output\", then nothing, an index (\".input.1\") or an argument's name"));
  }
  // As one writes a dot in a regular expression: "re:h\\.[0-9]+\\.input".
  if (modules.starts_with("re:") && modules.ends_with('\\')) modules.remove_suffix(1);
  entry.direction = last == "input" ? Direction::kInput : Direction::kOutput;
  entry.slot = 0;
  if (which.has_value()) {
    const bool number =
        !which->empty() && which->size() < 6 &&
        std::all_of(which->begin(), which->end(), [](char c) { return c >= '0' && c <= '9'; });
    if (number) {
      entry.slot = std::stoi(std::string(*which));
    } else if (which->empty() || entry.direction == Direction::kOutput) {
      refuse(absl::StatusCode::kInvalidArgument,
             str_cat(entry.name, ": '", *which, "' is no ",
                     entry.direction == Direction::kOutput ? "index, and results have no names"
                                                           : "index and no argument's name"));
    } else {
      entry.slot = std::string(*which);
    }
  }
  const int* index = std::get_if<int>(&entry.slot);
  entry.value = index != nullptr ? str_cat(last, ".", *index)
                                 : str_cat(last, ".", std::get<std::string>(entry.slot));
  absl::StatusOr<FqnPattern> parsed = FqnPattern::parse(modules);
  if (!parsed.ok()) {
    refuse(absl::StatusCode::kInvalidArgument,
           str_cat(entry.name, " ", std::string(parsed.status().message())));
  }
  entry.text = modules;
  entry.module = *std::move(parsed);
  entry.target = target_on(mesh, plan[i].placements, entry.name);
  return entry;
}

// Of the entries for one value of one module, the most specific.
const Entry* chosen(std::vector<Entry>& entries, const std::vector<size_t>& matching,
                    const std::string& fqn) {
  const size_t best = *std::max_element(matching.begin(), matching.end(), [&](size_t a, size_t b) {
    return entries[a].module.specificity() < entries[b].module.specificity();
  });
  for (const size_t i : matching) {
    if (entries[i].module.specificity() != entries[best].module.specificity()) {
      if (entries[i].beaten_at.empty()) {
        entries[i].beaten_at = fqn;
        entries[i].beaten_by = best;
      }
      continue;
    }
    entries[i].decides = true;
    if (entries[i].target != entries[best].target) {
      refuse(absl::StatusCode::kInvalidArgument,
             str_cat("'", fqn, fqn.empty() ? "" : ".", entries[i].value,
                     "' is given two placements by ", entries[best].name, ", and ", entries[i].name,
                     ", which are equally specific; an exact name counts most, then the pattern "
                     "with more characters that are no wildcards"));
    }
  }
  return &entries[best];
}

[[noreturn]] void no_match(const Entry& entry,
                           const std::map<std::string, Place, std::less<>>& places) {
  std::vector<std::string> names;
  for (const auto& [fqn, place] : places) names.push_back(fqn);
  refuse(absl::StatusCode::kNotFound,
         str_cat(entry.name, " matches no module", entry.module.suggestion(names)));
}

[[noreturn]] void cannot_be_met(const Entry& entry, const Place& place) {
  std::string module = place.fqn.empty() ? "the model itself" : str_cat("'", place.fqn, "'");
  if (!place.type.empty()) str_append(&module, " (", place.type, ")");
  const std::string why =
      place.also.has_value() && place.hook != nullptr
          ? str_cat("it is registered as '", *place.also, "', too")
      : place.also.has_value()   ? str_cat("it shares its weight with '", *place.also, "'")
      : place.parameters.empty() ? std::string("it has no parameter of its own")
      : place.weight == nullptr
          ? str_cat("it has several parameters of its own (", absl::StrJoin(place.parameters, ", "),
                    ") and none is called 'weight'")
          : std::string("it consists of modules");
  refuse(absl::StatusCode::kFailedPrecondition,
         str_cat(entry.name, ": the forward of ", module, " cannot be met: ", why, "; ",
                 place.advice.empty() ? ForwardHook().advice() : place.advice,
                 ", or speak of the modules in it"));
}

// Of an input by name, that an operator might have it.
void check_name(const Entry& entry) {
  const std::string* const name = std::get_if<std::string>(&entry.slot);
  if (name == nullptr) return;
  const std::set<std::string> known = layer_arguments();
  if (known.contains(*name)) return;
  const absl::StatusOr<FqnPattern> pattern = FqnPattern::parse(*name);
  refuse(absl::StatusCode::kInvalidArgument,
         str_cat(entry.name, ": no operator of a layer has an argument '", *name, "'",
                 pattern.ok()
                     ? pattern->suggestion(std::vector<std::string>(known.begin(), known.end()))
                     : "",
                 "; wanted an index, or the name that the operator's schema has"));
}

// What the plan says of one module, for a weight or a hook.
struct Observed {
  const Place* place;
  std::shared_ptr<ForwardLayouts> layouts;
  std::vector<size_t> entries;  // of the plan, for each of the inputs, then the outputs
};

// Parameters that entries name one by one: of a module with several, each is met by itself.
void add_parameters(const std::vector<Entry>& entries, const std::vector<Member>& members,
                    std::map<std::string, Place, std::less<>>& places) {
  for (const Entry& entry : entries) {
    if (places.contains(entry.text)) continue;
    for (const Member& member : members) {
      const auto named = std::find(member.fqns.begin(), member.fqns.end(), entry.text);
      if (named == member.fqns.end() || member.is_buffer) continue;
      const Place& owner = places.at(std::string(split_fqn(entry.text).first));
      Place place{.fqn = entry.text, .type = "a parameter", .members = owner.members};
      place.is_parameter = true;
      place.parameters = {entry.text};
      place.weight = &member;
      if (member.fqns.size() > 1) place.also = member.fqns[named == member.fqns.begin() ? 1 : 0];
      places.emplace(entry.text, std::move(place));
      break;
    }
  }
}

// Where the first input of a layer goes; null: where it is.
const ForwardTarget* first_input(const Observed& observed) {
  for (const ForwardLayouts::Value& value : observed.layouts->inputs) {
    if (value.slot == ForwardLayouts::Slot(0)) return &value.target;
  }
  return nullptr;
}

// Layers of one module that want their inputs in the same place: they may share one.
void count_siblings(std::vector<Observed>& observed) {
  for (Observed& o : observed) {
    const ForwardTarget* target = first_input(o);
    if (target == nullptr || o.place->hook != nullptr) continue;
    o.layouts->siblings = std::count_if(observed.begin(), observed.end(), [&](const Observed& s) {
      const ForwardTarget* other = first_input(s);
      return other != nullptr && *other == *target && s.place->hook == nullptr &&
             split_fqn(s.place->fqn).first == split_fqn(o.place->fqn).first;
    });
  }
}

std::vector<Observed> resolve_forward(const ForwardPlan& plan, const DeviceMesh& mesh,
                                      const std::vector<Member>& members,
                                      std::map<std::string, Place, std::less<>>& places) {
  std::vector<Entry> entries;
  for (size_t i = 0; i < plan.size(); ++i) entries.push_back(understood(plan, i, mesh));
  add_parameters(entries, members, places);
  const auto shared_last = std::make_shared<std::weak_ptr<SharedInput>>();
  std::vector<Observed> observed;
  for (const auto& [fqn, place] : places) {
    std::map<std::pair<Direction, ForwardLayouts::Slot>, std::vector<size_t>> matching;
    for (size_t i = 0; i < entries.size(); ++i) {
      // A parameter is spoken of by its own name, not by patterns of modules.
      if (place.is_parameter ? entries[i].text == fqn : entries[i].module.matches(fqn)) {
        matching[{entries[i].direction, entries[i].slot}].push_back(i);
      }
    }
    if (matching.empty()) continue;
    auto layouts = std::make_shared<ForwardLayouts>();
    layouts->shared_last = shared_last;
    layouts->looks_up = place.looks_up;
    std::vector<size_t> deciding;
    for (const auto& [value, candidates] : matching) {
      const Entry* entry = chosen(entries, candidates, fqn);
      if (!can_be_met(place)) cannot_be_met(*entry, place);
      if (place.hook != nullptr && std::holds_alternative<std::string>(value.second)) {
        refuse(absl::StatusCode::kInvalidArgument,
               str_cat(entry->name,
                       ": of a Hooked module's forward the names of arguments are not "
                       "known; wanted an index"));
      }
      if (place.hook == nullptr) check_name(*entry);
      auto& values = value.first == Direction::kInput ? layouts->inputs : layouts->outputs;
      values.push_back({value.second, entry->target,
                        str_cat(fqn, fqn.empty() ? "" : ".", entry->value),
                        plan[static_cast<size_t>(entry - entries.data())].pattern});
      deciding.push_back(static_cast<size_t>(entry - entries.data()));
    }
    for (const Observed& other : observed) {
      if (place.hook != nullptr || other.place->weight != place.weight) continue;
      if (other.place->hook != nullptr) continue;
      refuse(absl::StatusCode::kInvalidArgument,
             str_cat("the plan's forward entries speak of '", other.place->fqn, "' and of '", fqn,
                     "', which are met at one parameter; say all of it of one of them"));
    }
    observed.push_back({&place, std::move(layouts), std::move(deciding)});
  }
  count_siblings(observed);
  for (const Entry& entry : entries) {
    if (entry.decides) continue;
    if (entry.beaten_at.empty()) no_match(entry, places);
    refuse(absl::StatusCode::kInvalidArgument,
           str_cat(entry.name, ", decides nothing: more specific entries match all that it does, '",
                   entry.beaten_at, "' by ", entries[entry.beaten_by].name));
  }
  return observed;
}

class PlannedForward final : public modules_internal::ForwardRedistribution {
 public:
  PlannedForward(std::string fqn, std::shared_ptr<const ForwardLayouts> layouts,
                 std::shared_ptr<MeshContext> context)
      : fqn_(std::move(fqn)), layouts_(std::move(layouts)), context_(std::move(context)) {}
  at::Tensor input(int index, const at::Tensor& tensor) const override {
    return moved(Direction::kInput, index, tensor);
  }
  at::Tensor output(int index, const at::Tensor& tensor) const override {
    return moved(Direction::kOutput, index, tensor);
  }
  const ForwardLayouts* layouts() const override { return layouts_.get(); }
  void check_met(int inputs, int outputs) const override {
    for (const auto& [values, count] :
         {std::pair(&layouts_->inputs, inputs), {&layouts_->outputs, outputs}}) {
      for (const ForwardLayouts::Value& value : *values) {
        if (std::get<int>(value.slot) < count) continue;
        throw Error(absl::InvalidArgumentError(str_cat(
            "the plan's '", value.name, "': there are only ", count,
            " tensors that a plan can speak of, also within optionals, tuples and vectors")));
      }
    }
  }

 private:
  at::Tensor moved(Direction direction, int index, const at::Tensor& tensor) const {
    // For traces, which find the name again in backward.
    std::optional<ModuleScope> named;
    if (!context_->observation.observers.empty() && !fqn_.empty()) {
      named.emplace(MeshPtr(context_, &context_->connected_mesh()), fqn_);
    }
    return laid_out(*layouts_, direction, index, "", tensor, context_);
  }

  const std::string fqn_;
  std::shared_ptr<const ForwardLayouts> layouts_;
  std::shared_ptr<MeshContext> context_;
};

// Errors number entries; plug-ins have added some to those that the user knows.
template <typename F>
void telling_answers(const ShardingPlan& given, const ShardingPlan& plan, F f) {
  try {
    f();
  } catch (const Error& error) {
    const std::string which = modules_internal::which_are_answers(given, plan);
    if (which.empty()) throw;
    throw Error(
        kFunctionOfPlans,
        absl::Status(error.status().code(), str_cat(std::string(error.status().message()), which)));
  }
}

ResolvedPlan resolved_plan(torch::nn::Module& module, const DeviceMesh& mesh,
                           const ShardingPlan& plan) {
  const std::vector<Member> members = members_of(module);
  auto places = places_of(module, members);
  ResolvedPlan resolved;
  // The same order of errors.
  const std::vector<Observed> observed = resolve_forward(plan.forward, mesh, members, places);
  check_distributable(members, kFunctionOfPlans);
  resolved.tensors = resolve_plan(module, mesh, plan.parameter);
  for (const Observed& o : observed) {
    for (size_t i = 0; i < o.entries.size(); ++i) {
      const ForwardEntry& entry = plan.forward[o.entries[i]];
      const size_t inputs = o.layouts->inputs.size();
      const bool is_input = i < inputs;
      const ForwardLayouts::Value& value =
          is_input ? o.layouts->inputs[i] : o.layouts->outputs[i - inputs];
      const int* const index = std::get_if<int>(&value.slot);
      resolved.forward.push_back(
          {o.place->fqn,
           str_cat(is_input ? "input." : "output.",
                   index != nullptr ? str_cat(*index) : std::get<std::string>(value.slot)),
           entry.placements, o.entries[i], entry.pattern});
    }
  }
  return resolved;
}

// What ranks compare of a forward plan.
std::string text_of(const std::vector<Observed>& observed) {
  std::string text;
  for (const Observed& o : observed) {
    for (const auto* values : {&o.layouts->inputs, &o.layouts->outputs}) {
      for (const ForwardLayouts::Value& value : *values) {
        str_append(&text, value.name, values == &o.layouts->inputs ? " <" : " >");
        for (const std::optional<Placement>& p : value.target.placements) {
          str_append(&text, " ", p.has_value() ? p->to_string() : "-");
        }
        for (const int m : value.target.order) str_append(&text, " ", m);
        text.push_back(';');
      }
    }
  }
  return text;
}

void parallelize(torch::nn::Module& module, const MeshPtr& mesh, const ShardingPlan& plan,
                 const DistributeOptions& options, std::source_location where, Agreement& agreement,
                 const std::string& plugins) {
  const std::vector<Member> members = members_of(module);
  auto places = places_of(module, members);
  const std::vector<Observed> observed =
      resolve_forward(plan.forward, mesh->mesh(), members, places);
  distribute_agreed(module, mesh, plan.parameter, options, where, agreement,
                    str_cat(text_of(observed), plugins));
  const std::shared_ptr<MeshContext> context = MeshContext::of(mesh);
  for (const Observed& o : observed) {
    o.layouts->where = where;
    if (o.place->hook != nullptr) {
      o.place->hook->redistribution =
          std::make_shared<PlannedForward>(o.place->fqn, o.layouts, context);
      continue;
    }
    for (const at::Tensor& member : o.place->members) observe_forward(member, nullptr);
  }
  for (const Observed& o : observed) {
    if (o.place->hook == nullptr) observe_forward(o.place->weight->tensor, o.layouts);
  }
}

}  // namespace

ResolvedPlan resolve_sharding_plan(torch::nn::Module& module, const DeviceMesh& mesh,
                                   const ShardingPlan& plan, const Plugins& plugins) {
  const modules_internal::AppliedPatches patches(module, mesh, plan, plugins);
  const ShardingPlan answered = modules_internal::with_answers(module, mesh, plan, plugins);
  ResolvedPlan resolved;
  telling_answers(plan, answered, [&] { resolved = resolved_plan(module, mesh, answered); });
  return resolved;
}

ResolvedPlan resolve_sharding_plan(torch::nn::Module& module, const DeviceMesh& mesh,
                                   const ShardingPlan& plan) {
  return resolve_sharding_plan(module, mesh, plan, Plugins());
}

std::string to_string(const ResolvedPlan& resolved) {
  std::string text = to_string(resolved.tensors);
  if (resolved.forward.empty()) return text;
  TextTable table({"module", "value", "goes to", "by"});
  for (const ResolvedForward& f : resolved.forward) {
    std::string to;
    if (const Layout* layout = f.placements.by_position()) {
      to = layout->to_string();
    } else {
      for (const auto& [dim, placement] : *f.placements.named()) {
        str_append(&to, to.empty() ? "" : ", ", dim, ": ", placement.to_string());
      }
    }
    table.add({f.module.empty() ? "(the model)" : f.module, f.value, std::move(to),
               str_cat("'", f.pattern, "'")});
  }
  return str_cat(text, text.empty() ? "" : "\n", table.to_string());
}

void parallelize_module(torch::nn::Module& module, const MeshPtr& mesh, const ShardingPlan& plan,
                        const Plugins& plugins, const DistributeOptions& options,
                        std::source_location where) {
  Agreement agreement(*MeshContext::of(mesh), {.name = kFunctionOfPlans, .where = where});
  modules_internal::check_rules(mesh, plugins);
  modules_internal::AppliedPatches patches(module, mesh->mesh(), plan, plugins);
  const ShardingPlan answered = modules_internal::with_answers(module, mesh->mesh(), plan, plugins);
  telling_answers(plan, answered, [&] {
    parallelize(module, mesh, answered, options, where, agreement,
                str_cat(patches.text(), "|", modules_internal::text_of_rules(plugins)));
  });
  modules_internal::add_rules(mesh, plugins);
  patches.keep();
}

void parallelize_module(torch::nn::Module& module, const MeshPtr& mesh, const ShardingPlan& plan,
                        const DistributeOptions& options, std::source_location where) {
  parallelize_module(module, mesh, plan, Plugins(), options, where);
}

}  // namespace shardweave
