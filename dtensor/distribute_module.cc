#include "shardweave/dtensor/distribute_module.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "c10/core/GradMode.h"
#include "shardweave/dtensor/engine/adopt.h"
#include "shardweave/dtensor/engine/checksum.h"
#include "shardweave/dtensor/engine/distribute.h"
#include "shardweave/dtensor/engine/fused.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/provenance.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "torch/nn/module.h"

namespace shardweave {
namespace {

using namespace dtensor_internal;

// A tensor of the module.
struct Member {
  at::Tensor tensor;
  std::vector<std::string> fqns;  // more than one: it is tied
  std::optional<Layout> layout;   // by the plan, dimensions counted from the front
  // Which decided: an entry of the plan, and the name that it matches.
  const PlanEntry* entry = nullptr;
  std::string_view matched;
};

constexpr char kName[] = "distribute_module";

// Each once, in the order of their first names.
std::vector<Member> members_of(const torch::nn::Module& module) {
  std::vector<Member> members;
  absl::flat_hash_map<const c10::TensorImpl*, size_t> places;
  auto add = [&](const std::string& fqn, const at::Tensor& tensor) {
    const auto [it, is_new] = places.emplace(tensor.unsafeGetTensorImpl(), members.size());
    if (is_new) members.push_back({.tensor = tensor});
    members[it->second].fqns.push_back(fqn);
  };
  for (const auto& item : module.named_parameters()) add(item.key(), item.value());
  for (const auto& item : module.named_buffers()) add(item.key(), item.value());
  return members;
}

[[noreturn]] void refuse(absl::StatusCode code, std::string_view fqn, std::string_view why) {
  throw Error(kName,
              absl::Status(code, absl::StrCat("'", std::string(fqn), "': ", std::string(why))));
}

// "the plan's entry 2, 'a.*'"
std::string entry_name(const ParameterPlan& plan, size_t i) {
  return absl::StrCat("the plan's entry ", i + 1, ", '", plan[i].pattern, "'");
}

// What is wrong with a pattern; empty: nothing.
std::string wrong_braces(std::string_view pattern) {
  bool open = false;
  for (const char c : pattern) {
    if (c == '{' && open) return "has a '{' inside of '{...}', where only names and commas are";
    if (c == '}' && !open) return "has a '}' without a '{' before it";
    if (c == '{' || c == '}') open = c == '{';
  }
  return open ? "has a '{' without a '}' behind it" : "";
}

// Of the first tensor that it matches: " ('a.weight')". Empty: of none.
std::string first_match(const PlanEntry& entry, const std::vector<Member>& members) {
  for (const Member& member : members) {
    for (const std::string& fqn : member.fqns) {
      if (matches_fqn(entry.pattern, fqn)) return absl::StrCat(" ('", fqn, "')");
    }
  }
  return "";
}

std::vector<Placements> placements_of(const ParameterPlan& plan, const DeviceMesh& mesh,
                                      const std::vector<Member>& members) {
  std::vector<Placements> all;
  for (size_t i = 0; i < plan.size(); ++i) {
    const auto refuse_entry = [&](absl::StatusCode code, std::string_view why) {
      throw Error(
          kName, absl::Status(code, absl::StrCat(entry_name(plan, i), first_match(plan[i], members),
                                                 std::string(why))));
    };
    if (const std::string why = wrong_braces(plan[i].pattern); !why.empty()) {
      refuse_entry(absl::StatusCode::kInvalidArgument, " " + why);
    }
    absl::StatusOr<Placements> placements = try_resolve(mesh, plan[i].placements);
    if (!placements.ok()) {
      refuse_entry(placements.status().code(), ": " + std::string(placements.status().message()));
    }
    if (std::any_of(placements->begin(), placements->end(),
                    [](const Placement& p) { return p.is_partial(); })) {
      refuse_entry(absl::StatusCode::kInvalidArgument,
                   absl::StrCat(": ", to_string(*placements),
                                " has a Partial; wanted Shard or Replicate (a Partial is made of "
                                "every rank's local part)"));
    }
    all.push_back(*std::move(placements));
  }
  return all;
}

// What has become of an entry of the plan.
struct Use {
  bool decides = false;
  // Of the first name that it matches but does not decide, which an entry before it does.
  std::string_view fqn;
  size_t by = 0;
};

// Matches whatever there is.
bool is_rest(const PlanEntry& entry) {
  return !entry.pattern.empty() && entry.pattern.find_first_not_of('*') == std::string::npos;
}

// What to do about an entry that does not fit one of the tensors that it matches.
std::string advice_for(const Member& member, std::string_view fqn) {
  const size_t dot = fqn.rfind('.');
  return absl::StrCat(
      member.tensor.dim() == 0 ? ": a number has no dimension to cut" : "", "; put an entry for ",
      dot == std::string_view::npos ? absl::StrCat("'", std::string(fqn), "'")
                                    : absl::StrCat("'*", std::string(fqn.substr(dot)), "'"),
      " without placements, which replicates it, in front of that one");
}

// The first entry that matches decides, for each name; the names have to agree, but for those that
// "*" decides.
void choose(Member& member, const ParameterPlan& plan, const std::vector<Placements>& placements,
            std::vector<Use>* uses) {
  if (is_dtensor(member.tensor)) {
    refuse(
        absl::StatusCode::kFailedPrecondition, member.fqns[0],
        absl::StrCat("is a DTensor already, ", describe(member.tensor),
                     "; a module is distributed once: for another plan make it anew, and register "
                     "DTensors of your own after this call"));
  }
  if (const std::string why = not_dense(member.tensor); !why.empty()) {
    refuse(absl::StatusCode::kInvalidArgument, member.fqns[0],
           absl::StrCat("cannot be a DTensor: ", why));
  }
  std::vector<std::optional<size_t>> deciding(member.fqns.size());  // of each name
  bool is_named = false;                                            // by more than "*"
  for (size_t n = 0; n < member.fqns.size(); ++n) {
    for (size_t i = 0; i < plan.size(); ++i) {
      if (!matches_fqn(plan[i].pattern, member.fqns[n])) continue;
      if (!deciding[n].has_value()) {
        deciding[n] = i;
        (*uses)[i].decides = true;
        is_named |= !is_rest(plan[i]);
      } else if (Use& use = (*uses)[i]; use.fqn.empty()) {
        use.fqn = member.fqns[n];
        use.by = *deciding[n];
      }
    }
  }
  for (size_t n = 0; n < member.fqns.size(); ++n) {
    if (!deciding[n].has_value()) continue;
    const PlanEntry& entry = plan[*deciding[n]];
    // "*" is for what no other entry is for: another name of it is in one.
    if (is_named && is_rest(entry)) continue;
    const std::string& fqn = member.fqns[n];
    absl::StatusOr<Layout> given =
        with_dims_of(Layout(placements[*deciding[n]]), static_cast<int>(member.tensor.dim()));
    if (!given.ok()) {
      refuse(given.status().code(), fqn,
             absl::StrCat(std::string(given.status().message()), ", by ",
                          entry_name(plan, *deciding[n]), advice_for(member, fqn)));
    }
    if (!member.layout.has_value()) {
      member.layout = *std::move(given);
      member.entry = &entry;
      member.matched = fqn;
    } else if (*member.layout != *given) {
      throw Error(kName, absl::InvalidArgumentError(absl::StrCat(
                             "'", std::string(member.matched), "' and '", fqn,
                             "' are one tensor, and the plan gives it two placements: ",
                             member.layout->to_string(), " by the entry '", member.entry->pattern,
                             "', ", given->to_string(), " by the entry '", entry.pattern,
                             "'; put one entry for both, '{", std::string(member.matched), ",", fqn,
                             "}', in front of them")));
    }
  }
}

[[noreturn]] void no_match(const PlanEntry& entry, const std::vector<Member>& members) {
  std::vector<std::string_view> fqns;
  for (const Member& member : members)
    fqns.insert(fqns.end(), member.fqns.begin(), member.fqns.end());
  throw Error(
      kName, absl::NotFoundError(absl::StrCat(
                 "the pattern '", entry.pattern, "' matches no parameter or buffer; there are: ",
                 absl::StrJoin(fqns, ", ",
                               [](std::string* out, std::string_view fqn) { out->append(fqn); }))));
}

// From the first byte to the one behind the last; empty: it has none.
std::pair<uintptr_t, uintptr_t> extent(const at::Tensor& tensor) {
  if (!tensor.has_storage() || tensor.numel() == 0) return {0, 0};
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  if (begin == 0) return {0, 0};  // a meta tensor
  return {begin, begin + static_cast<uintptr_t>(last + 1) * tensor.element_size()};
}

// Different tensors over the same memory would each get their own.
void check_memory(const std::vector<Member>& members) {
  std::vector<std::pair<std::pair<uintptr_t, uintptr_t>, const Member*>> extents;
  for (const Member& member : members) extents.emplace_back(extent(member.tensor), &member);
  std::sort(extents.begin(), extents.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  const std::pair<uintptr_t, uintptr_t>* furthest = nullptr;
  const Member* its = nullptr;
  for (const auto& [bytes, member] : extents) {
    if (bytes.first == bytes.second) continue;
    if (furthest != nullptr && bytes.first < furthest->second) {
      throw Error(kName, absl::InvalidArgumentError(absl::StrCat(
                             "'", its->fqns[0], "' and '", member->fqns[0],
                             "' are different tensors over the same memory, which as DTensors they "
                             "would no longer "
                             "share; register one tensor under both names, or copy one of them")));
    }
    furthest = &bytes;
    its = member;
  }
}

void check_same_on_all_ranks(MeshContext& context, const std::vector<Member>& members,
                             const Cause& cause) {
  if (context.mesh().size() == 1) return;
  std::vector<uint64_t> sums;
  for (const Member& member : members) {
    sums.push_back(checksum(checksum(member.tensor), member.layout->to_string()));
  }
  const std::optional<Difference> difference = first_difference(context, sums, cause);
  if (!difference.has_value()) return;
  refuse(
      absl::StatusCode::kInvalidArgument, members[difference->index].fqns[0],
      absl::StrCat("is not the same on ranks ", difference->ranks[0], " and ", difference->ranks[1],
                   " (values, shape, dtype or placements); initialise every rank alike, or name "
                   "a source, whose values all ranks get"));
}

}  // namespace

bool matches_fqn(std::string_view pattern, std::string_view fqn) {
  if (pattern.empty()) return fqn.empty();
  if (pattern[0] == '*') {
    for (size_t skip = 0; skip <= fqn.size(); ++skip) {
      if (matches_fqn(pattern.substr(1), fqn.substr(skip))) return true;
    }
    return false;
  }
  if (pattern[0] == '{') {
    const size_t close = pattern.find('}');
    if (close == std::string_view::npos) return false;
    std::string_view choices = pattern.substr(1, close - 1);
    while (true) {
      const size_t comma = choices.find(',');
      const std::string_view choice = choices.substr(0, comma);
      if (fqn.starts_with(choice) &&
          matches_fqn(pattern.substr(close + 1), fqn.substr(choice.size())))
        return true;
      if (comma == std::string_view::npos) return false;
      choices.remove_prefix(comma + 1);
    }
  }
  return !fqn.empty() && (pattern[0] == '?' || pattern[0] == fqn[0]) &&
         matches_fqn(pattern.substr(1), fqn.substr(1));
}

void distribute_module(torch::nn::Module& module, const MeshPtr& mesh, const ParameterPlan& plan,
                       const DistributeOptions& options, std::source_location where) {
  std::vector<Member> members = members_of(module);
  const std::vector<Placements> placements = placements_of(plan, mesh->mesh(), members);
  check_source(mesh->mesh(), options, kName);
  std::vector<Use> uses(plan.size());
  for (Member& member : members) choose(member, plan, placements, &uses);
  for (size_t i = 0; i < plan.size(); ++i) {
    if (uses[i].decides) continue;
    if (uses[i].fqn.empty()) no_match(plan[i], members);
    throw Error(kName, absl::InvalidArgumentError(absl::StrCat(
                           entry_name(plan, i),
                           ", decides nothing: entries before it match all that it does, '",
                           std::string(uses[i].fqn), "' by ", entry_name(plan, uses[i].by),
                           "; the first that matches counts, so put it in front of them")));
  }
  for (Member& member : members) {
    if (!member.layout.has_value()) member.layout = Layout(Placements(mesh->mesh().ndim()));
    const auto sizes = member.tensor.sizes();
    absl::Status fits =
        validate(*member.layout, mesh->mesh().shape(), {sizes.data(), sizes.size()});
    if (!fits.ok()) {
      refuse(fits.code(), member.fqns[0],
             absl::StrCat(std::string(fits.message()), ", by ",
                          member.entry == nullptr ? "no entry of the plan"
                                                  : entry_name(plan, member.entry - plan.data())));
    }
  }
  check_memory(members);
  const Cause cause = {.name = kName, .where = where};
  if (!options.source.has_value()) check_same_on_all_ranks(*MeshContext::of(mesh), members, cause);

  const c10::AutoGradMode no_grad(false);
  for (const Member& member : members) {
    Cause of_it = cause;
    of_it.parameter = member.fqns[0];
    const at::Tensor sharded =
        distributed(member.tensor.detach(), mesh, member.layout->placements(), options, of_it);
    const DTensorMeta& meta = meta_of(sharded);
    const Spec& spec = *meta.spec;
    SpecRef weight = meta.context->intern(spec.layout, spec.sizes, spec.strides, spec.dtype,
                                          spec.device, {.weight = ~uint64_t{0}});
    convert_in_place(member.tensor, meta.local(), std::move(weight), meta.context);
    auto family = std::make_shared<ViewFamily>();
    family->fqn = member.fqns[0];
    family->parameter = meta_of(member.tensor).spec;
    meta_of(member.tensor).family = std::move(family);
    meta_of(member.tensor).came_from(meta.provenance);
  }
}

std::vector<at::Tensor> unique_parameters(const torch::nn::Module& module) {
  return unique_parameters(module.parameters());
}

std::vector<at::Tensor> unique_parameters(const std::vector<at::Tensor>& parameters) {
  absl::flat_hash_set<const c10::TensorImpl*> seen;
  std::vector<at::Tensor> unique;
  for (const at::Tensor& parameter : parameters) {
    if (seen.insert(parameter.unsafeGetTensorImpl()).second) unique.push_back(parameter);
  }
  return unique;
}

void finish_grad_sync(torch::nn::Module& module, std::source_location where) {
  finish_grad_sync(module.parameters(), where);
}

void finish_grad_sync(const std::vector<at::Tensor>& parameters, std::source_location where) {
  const c10::AutoGradMode no_grad(false);
  std::vector<at::Tensor> moving;  // parameters
  std::vector<InFlight> in_flight;
  for (const at::Tensor& parameter : unique_parameters(parameters)) {
    if (!is_dtensor(parameter) || !parameter.grad().defined()) continue;
    if (!is_dtensor(parameter.grad())) {  // a formula's own zeros, say
      const MeshPtr mesh = mesh_of(parameter);
      meta_of(parameter).context->plain_tensors.put_off({}, parameter.grad());
      parameter.mutable_grad() = distribute_tensor(
          parameter.grad(), mesh, Placements(mesh->mesh().ndim()), {.source = std::nullopt});
    }
    const Layout& want = meta_of(parameter).spec->layout;
    const DTensorMeta& have = checked_meta(parameter.grad(), "finish_grad_sync");
    if (have.spec->layout == want) continue;
    moving.push_back(parameter);
    in_flight.push_back(moving_to(have, want));
    in_flight.back().parameter = parameter_of(meta_of(parameter));
  }
  run_plans(in_flight, {.name = "finish_grad_sync", .where = where, .syncs_gradients = true});
  for (size_t i = 0; i < moving.size(); ++i) {
    // Not where it stands: what else has the memory of the gradient, or is a view of it, would no
    // longer be what it is.
    const DTensorMeta& have = meta_of(moving[i].grad());
    at::Tensor local = std::move(in_flight[i].local);
    if (local.is_alias_of(have.local())) local = local.clone();
    moving[i].mutable_grad() = wrap(std::move(local), std::move(in_flight[i].target), have.context);
    meta_of(moving[i].grad()).came_from(in_flight[i].provenance);
  }
}

}  // namespace shardweave
