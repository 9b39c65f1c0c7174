#include "shardweave/modules/parallelize_module.h"

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "absl/strings/str_join.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/engine/distribute.h"
#include "shardweave/dtensor/engine/forward_plan.h"
#include "shardweave/dtensor/engine/members.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "shardweave/modules/hooked.h"
#include "torch/nn/module.h"

namespace shardweave {
namespace {

using namespace dtensor_internal;
using modules_internal::ForwardHook;

constexpr char kName[] = "parallelize_module";

[[noreturn]] void refuse(absl::StatusCode code, const std::string& why) {
  throw Error(kName, absl::Status(code, why));
}

// A module that a forward plan can name, and where its forward can be met.
struct Place {
  std::string fqn;  // "" of the whole model
  std::string type;
  ForwardHook* hook = nullptr;
  std::vector<std::string> parameters;  // of its own, without those of its children; by FQN
  at::Tensor weight;                    // undefined: none, several, or another module's as well
  std::string shares_with;              // that module
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
  const auto add = [&](std::string_view fqn, torch::nn::Module& m) {
    Place& place = at(fqn);
    place.type = m.name();
    place.hook = dynamic_cast<ForwardHook*>(&m);
  };
  add("", module);
  for (const auto& item : module.named_modules("", /*include_self=*/false)) {
    add(item.key(), *item.value());
  }
  for (const Member& member : members) {
    for (const std::string& fqn : member.fqns) {
      const auto [owner, name] = split_fqn(fqn);
      for (std::string_view parent = owner; !parent.empty(); parent = split_fqn(parent).first) {
        at(parent);
      }
      if (member.is_buffer) continue;
      Place& place = at(owner);
      place.parameters.push_back(fqn);
      if (name != "weight" && place.parameters.size() > 1) continue;
      place.weight = member.tensor;
      for (const std::string& other : member.fqns) {
        if (split_fqn(other).first != owner) place.shares_with = split_fqn(other).first;
      }
    }
  }
  for (auto& [fqn, place] : places) {
    const bool has_weight =
        std::any_of(place.parameters.begin(), place.parameters.end(),
                    [](const std::string& p) { return split_fqn(p).second == "weight"; });
    if (!has_weight && place.parameters.size() > 1) place.weight = at::Tensor();
    if (place.weight.defined() && !place.shares_with.empty()) place.weight = at::Tensor();
  }
  return places;
}

// An entry of the plan, understood.
struct Entry {
  std::string name;  // "the plan's forward entry 2, '*.norm.input'"
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
  entry.module = *std::move(parsed);
  entry.target = target_on(mesh, plan[i].placements, entry.name);
  return entry;
}

bool same_target(const ForwardTarget& a, const ForwardTarget& b) {
  return a.placements == b.placements && a.order == b.order;
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
    if (!same_target(entries[i].target, entries[best].target)) {
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
  constexpr size_t kShown = 3;
  const int far = std::max(2, entry.module.specificity().characters / 4);
  std::vector<std::pair<int, std::string>> near;
  for (const auto& [fqn, place] : places) {
    const int distance = entry.module.distance(fqn, far);
    if (distance <= far && !fqn.empty()) near.emplace_back(distance, str_cat("'", fqn, "'"));
  }
  std::stable_sort(near.begin(), near.end());
  near.resize(std::min(near.size(), kShown));
  refuse(
      absl::StatusCode::kNotFound,
      str_cat(entry.name, " matches no module", near.empty() ? "" : "; did you mean ",
              absl::StrJoin(near, ", ", [](std::string* out, const auto& n) { *out += n.second; }),
              near.empty() ? "" : "?"));
}

[[noreturn]] void cannot_be_met(const Entry& entry, const Place& place) {
  std::string module = place.fqn.empty() ? "the model itself" : str_cat("'", place.fqn, "'");
  if (!place.type.empty()) str_append(&module, " (", place.type, ")");
  const std::string why =
      place.parameters.empty() ? std::string("it has no parameter of its own")
      : !place.shares_with.empty()
          ? str_cat("it shares its weight with '", place.shares_with, "'")
          : str_cat("it has several parameters of its own (", absl::StrJoin(place.parameters, ", "),
                    ") and none is called 'weight'");
  refuse(absl::StatusCode::kFailedPrecondition,
         str_cat(entry.name, ": the forward of ", module, " cannot be met: ", why,
                 "; make it as Hooked<Impl> (hooked.h), or speak of the modules in it"));
}

// What the plan says of one module, for a weight or a hook.
struct Observed {
  const Place* place;
  std::shared_ptr<ForwardLayouts> layouts;
};

std::vector<Observed> resolve_forward(const ForwardPlan& plan, const DeviceMesh& mesh,
                                      const std::map<std::string, Place, std::less<>>& places) {
  std::vector<Entry> entries;
  for (size_t i = 0; i < plan.size(); ++i) entries.push_back(understood(plan, i, mesh));
  std::vector<Observed> observed;
  for (const auto& [fqn, place] : places) {
    std::map<std::pair<Direction, ForwardLayouts::Slot>, std::vector<size_t>> matching;
    for (size_t i = 0; i < entries.size(); ++i) {
      if (entries[i].module.matches(fqn)) {
        matching[{entries[i].direction, entries[i].slot}].push_back(i);
      }
    }
    if (matching.empty()) continue;
    auto layouts = std::make_shared<ForwardLayouts>();
    for (const auto& [value, candidates] : matching) {
      const Entry* entry = chosen(entries, candidates, fqn);
      if (place.hook == nullptr && !place.weight.defined()) cannot_be_met(*entry, place);
      auto& values = value.first == Direction::kInput ? layouts->inputs : layouts->outputs;
      values.push_back(
          {value.second, entry->target, str_cat(fqn, fqn.empty() ? "" : ".", entry->value)});
    }
    observed.push_back({&place, std::move(layouts)});
  }
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
  PlannedForward(std::shared_ptr<const ForwardLayouts> layouts,
                 std::shared_ptr<MeshContext> context)
      : layouts_(std::move(layouts)), context_(std::move(context)) {}
  at::Tensor input(int index, const at::Tensor& tensor) const override {
    return laid_out(*layouts_, Direction::kInput, index, "", tensor, context_);
  }
  at::Tensor output(int index, const at::Tensor& tensor) const override {
    return laid_out(*layouts_, Direction::kOutput, index, "", tensor, context_);
  }

 private:
  std::shared_ptr<const ForwardLayouts> layouts_;
  std::shared_ptr<MeshContext> context_;
};

}  // namespace

void parallelize_module(torch::nn::Module& module, const MeshPtr& mesh, const ShardingPlan& plan,
                        const DistributeOptions& options, std::source_location where) {
  const auto places = places_of(module, members_of(module));
  const std::vector<Observed> observed = resolve_forward(plan.forward, mesh->mesh(), places);
  distribute_module(module, mesh, plan.parameter, options, where);
  const std::shared_ptr<MeshContext> context = MeshContext::of(mesh);
  for (const Observed& o : observed) {
    if (o.place->hook != nullptr) {
      o.place->hook->redistribution = std::make_shared<PlannedForward>(o.layouts, context);
    } else {
      observe_forward(o.place->weight, o.layouts);
    }
  }
}

}  // namespace shardweave
