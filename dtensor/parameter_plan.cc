#include "shardweave/dtensor/parameter_plan.h"

#include <algorithm>
#include <string_view>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "shardweave/dtensor/engine/distribute.h"
#include "shardweave/dtensor/engine/members.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "shardweave/dtensor/observe/text_table.h"
#include "torch/nn/module.h"

namespace shardweave {
namespace dtensor_internal {
namespace {

std::string entry_name(size_t i, std::string_view pattern) {
  return absl::StrCat("the plan's entry ", i + 1, ", '", std::string(pattern), "'");
}

// An entry of the plan, understood.
struct Entry {
  FqnPattern pattern;
  Layout layout;
  std::string name;
  // Whether it decides for any tensor. If not: the first name that it matches, and who beats it there.
  bool decides = false;
  std::string_view beaten_at;
  size_t beaten_by = 0;
};

absl::StatusOr<Layout> layout_on(const DeviceMesh& mesh, const PlanPlacements& given) {
  if (const NamedPlacements* named = given.named()) {
    absl::StatusOr<Placements> placements = try_resolve(mesh, *named);
    if (!placements.ok()) return placements.status();
    return Layout(*std::move(placements));
  }
  const Layout& layout = *given.by_position();
  if (layout.mesh_ndim() != mesh.ndim()) {
    return absl::InvalidArgumentError(absl::StrCat(layout.to_string(), " has ", layout.mesh_ndim(),
                                                   " placements; ", mesh.to_string(), " wants ",
                                                   mesh.ndim(), ", one per dimension"));
  }
  return layout;
}

// The first name that it matches: " ('a.weight')". Empty: none.
std::string first_match(const FqnPattern& pattern, const std::vector<Member>& members) {
  for (const Member& member : members) {
    for (const std::string& fqn : member.fqns) {
      if (pattern.matches(fqn)) return absl::StrCat(" ('", fqn, "')");
    }
  }
  return "";
}

std::vector<Entry> entries_of(const ParameterPlan& plan, const DeviceMesh& mesh,
                              const std::vector<Member>& members, const char* function) {
  std::vector<Entry> entries;
  for (size_t i = 0; i < plan.size(); ++i) {
    const std::string name = entry_name(i, plan[i].pattern);
    absl::StatusOr<FqnPattern> pattern = FqnPattern::parse(plan[i].pattern);
    if (!pattern.ok()) {
      throw Error(function, absl::InvalidArgumentError(
                                absl::StrCat(name, " ", std::string(pattern.status().message()))));
    }
    const auto refuse = [&](absl::StatusCode code, std::string_view why) {
      throw Error(function, absl::Status(code, absl::StrCat(name, first_match(*pattern, members),
                                                            ": ", std::string(why))));
    };
    absl::StatusOr<Layout> layout = layout_on(mesh, plan[i].placements);
    if (!layout.ok()) refuse(layout.status().code(), std::string(layout.status().message()));
    if (layout->has_partial()) {
      refuse(absl::StatusCode::kInvalidArgument,
             absl::StrCat(layout->to_string(),
                          " has a Partial; wanted Shard or Replicate (a Partial is made of every "
                          "rank's local part)"));
    }
    entries.push_back({*std::move(pattern), *std::move(layout), name});
  }
  return entries;
}

[[noreturn]] void no_match(const Entry& entry, const std::vector<Member>& members,
                           const char* function) {
  constexpr size_t kShown = 12;
  std::vector<std::string> all;
  for (const Member& member : members)
    all.insert(all.end(), member.fqns.begin(), member.fqns.end());
  std::string hint = entry.pattern.suggestion(all);
  if (all.empty()) {
    hint = "; the module has none";
  } else if (hint.empty()) {
    const size_t shown = std::min(all.size(), kShown);
    const auto quoted = [](std::string* out, const std::string& fqn) {
      absl::StrAppend(out, "'", fqn, "'");
    };
    hint =
        absl::StrCat("; there are: ", absl::StrJoin(all.begin(), all.begin() + shown, ", ", quoted),
                     shown < all.size() ? absl::StrCat(" and ", all.size() - shown, " more") : "");
  }
  throw Error(function, absl::NotFoundError(
                            absl::StrCat(entry.name, " matches no parameter or buffer", hint)));
}

// What to do about an entry that does not fit one of the tensors that it matches.
std::string advice_for(size_t dims, std::string_view fqn) {
  const size_t dot = fqn.rfind('.');
  return absl::StrCat(dims == 0 ? ": a number has no dimension to cut" : "", "; add an entry for ",
                      dot == std::string_view::npos
                          ? absl::StrCat("'", std::string(fqn), "'")
                          : absl::StrCat("'*", std::string(fqn.substr(dot)), "'"),
                      " without placements, which replicates it");
}

// Of one tensor: an entry, and the name that it matches.
struct Match {
  size_t entry;
  std::string_view fqn;
};

// For each name, the most specific of the entries that match; what is left has to agree.
void choose(const Member& member, std::vector<Entry>& entries, ResolvedTensor* resolved,
            const char* function) {
  const auto refuse = [&](absl::Status status) { throw Error(function, std::move(status)); };
  std::vector<Match> left;
  std::vector<bool> beaten(entries.size());
  for (const std::string& fqn : member.fqns) {
    std::vector<size_t> matching;
    for (size_t i = 0; i < entries.size(); ++i) {
      if (entries[i].pattern.matches(fqn)) matching.push_back(i);
    }
    if (matching.empty()) continue;
    const size_t best =
        *std::max_element(matching.begin(), matching.end(), [&](size_t a, size_t b) {
          return entries[a].pattern.specificity() < entries[b].pattern.specificity();
        });
    for (const size_t i : matching) {
      if (entries[i].pattern.specificity() == entries[best].pattern.specificity()) {
        left.push_back({i, fqn});
        entries[i].decides = true;
        continue;
      }
      beaten[i] = true;
      if (entries[i].beaten_at.empty()) {
        entries[i].beaten_at = fqn;
        entries[i].beaten_by = best;
      }
    }
  }
  // Who has lost at one name of a tensor says nothing of its other names.
  left.erase(
      std::remove_if(left.begin(), left.end(), [&](const Match& m) { return beaten[m.entry]; }),
      left.end());

  const Match* decided = nullptr;
  for (const Match& match : left) {
    const Entry& entry = entries[match.entry];
    absl::StatusOr<Layout> given =
        with_dims_of(entry.layout, static_cast<int>(resolved->sizes.size()));
    if (!given.ok()) {
      refuse(absl::Status(
          given.status().code(),
          absl::StrCat("'", std::string(match.fqn), "': ", std::string(given.status().message()),
                       ", by ", entry.name, advice_for(resolved->sizes.size(), match.fqn))));
    }
    if (decided == nullptr) {
      decided = &match;
      resolved->layout = *std::move(given);
      continue;
    }
    if (resolved->layout == *given) {
      if (match.entry < decided->entry) decided = &match;
      continue;
    }
    const std::string both =
        absl::StrCat(resolved->layout.to_string(), " by ", entries[decided->entry].name, ", ",
                     given->to_string(), " by ", entry.name);
    if (match.fqn == decided->fqn) {
      refuse(absl::InvalidArgumentError(
          absl::StrCat("'", std::string(match.fqn), "' is given two placements: ", both,
                       ", which are equally specific; an exact name counts most, then the pattern "
                       "with more characters that are no wildcards")));
    }
    refuse(absl::InvalidArgumentError(
        absl::StrCat("'", std::string(decided->fqn), "' and '", std::string(match.fqn),
                     "' are one tensor, and the plan gives it two placements: ", both,
                     "; write one entry in place of both, '{", std::string(decided->fqn), ",",
                     std::string(match.fqn), "}'")));
  }
  if (decided != nullptr) resolved->entry = decided->entry;
}

}  // namespace

std::vector<Member> members_of(const torch::nn::Module& module) {
  std::vector<Member> members;
  absl::flat_hash_map<const c10::TensorImpl*, size_t> places;
  const auto add = [&](const std::string& fqn, const at::Tensor& tensor, bool is_buffer) {
    const auto [it, is_new] = places.emplace(tensor.unsafeGetTensorImpl(), members.size());
    if (is_new) members.push_back({.tensor = tensor, .is_buffer = is_buffer});
    members[it->second].fqns.push_back(fqn);
  };
  for (const auto& item : module.named_parameters()) add(item.key(), item.value(), false);
  for (const auto& item : module.named_buffers()) add(item.key(), item.value(), true);
  return members;
}

void name_members(const std::vector<Member>& members) {
  for (const Member& member : members) {
    if (!is_dtensor(member.tensor)) continue;
    DTensorMeta& meta = meta_of(member.tensor);
    if (meta.family == nullptr) meta.family = std::make_shared<ViewFamily>();
    if (meta.family->fqn.empty()) meta.family->fqn = member.fqns[0];
    if (meta.family->parameter == nullptr) meta.family->parameter = meta.spec;
  }
}

std::string deciding_entry(const ResolvedTensor& tensor) {
  return tensor.entry.has_value() ? entry_name(*tensor.entry, tensor.pattern)
                                  : "no entry of the plan";
}

std::vector<ResolvedTensor> resolve_members(const std::vector<Member>& members,
                                            const DeviceMesh& mesh, const ParameterPlan& plan,
                                            const char* function) {
  std::vector<Entry> entries = entries_of(plan, mesh, members, function);
  std::vector<ResolvedTensor> resolved;
  for (const Member& member : members) {
    resolved.push_back({.fqns = member.fqns,
                        .sizes = member.tensor.sizes().vec(),
                        .is_buffer = member.is_buffer,
                        .layout = Layout(Placements(mesh.ndim()))});
    ResolvedTensor& tensor = resolved.back();
    choose(member, entries, &tensor, function);
    if (tensor.entry.has_value()) tensor.pattern = plan[*tensor.entry].pattern;
  }
  for (const Entry& entry : entries) {
    if (entry.decides) continue;
    if (entry.beaten_at.empty()) no_match(entry, members, function);
    throw Error(
        function,
        absl::InvalidArgumentError(absl::StrCat(
            entry.name, ", decides nothing: more specific entries match all that it does, '",
            std::string(entry.beaten_at), "' by ", entries[entry.beaten_by].name)));
  }
  for (ResolvedTensor& tensor : resolved) {
    const absl::Status fits = validate(tensor.layout, mesh.shape(), tensor.sizes);
    if (!fits.ok()) {
      throw Error(function,
                  absl::Status(fits.code(),
                               absl::StrCat("'", tensor.fqns[0], "': ", std::string(fits.message()),
                                            ", by ", deciding_entry(tensor))));
    }
    const std::vector<int64_t> first(mesh.ndim());
    const Dims local = local_shape(tensor.layout, mesh.shape(), first, tensor.sizes);
    tensor.local_sizes.assign(local.begin(), local.end());
  }
  return resolved;
}

}  // namespace dtensor_internal

std::string to_string(const std::vector<ResolvedTensor>& resolved) {
  dtensor_internal::TextTable table({"tensor", "shape", "a rank's part", "placements", "by"});
  const auto shape = [](const std::vector<int64_t>& sizes) {
    return absl::StrCat("[", absl::StrJoin(sizes, ", "), "]");
  };
  for (const ResolvedTensor& tensor : resolved) {
    table.add({absl::StrJoin(tensor.fqns, " = "), shape(tensor.sizes), shape(tensor.local_sizes),
               tensor.layout.to_string(),
               tensor.entry.has_value() ? absl::StrCat("'", tensor.pattern, "'") : "no entry"});
  }
  return table.to_string();
}

std::vector<ResolvedTensor> resolve_plan(const torch::nn::Module& module, const DeviceMesh& mesh,
                                         const ParameterPlan& plan) {
  return dtensor_internal::resolve_members(dtensor_internal::members_of(module), mesh, plan,
                                           "resolve_plan");
}

}  // namespace shardweave
