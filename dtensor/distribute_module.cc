#include "shardweave/dtensor/distribute_module.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "shardweave/dtensor/engine/adopt.h"
#include "shardweave/dtensor/engine/checksum.h"
#include "shardweave/dtensor/engine/deferred.h"
#include "shardweave/dtensor/engine/distribute.h"
#include "shardweave/dtensor/engine/forward_plan.h"
#include "shardweave/dtensor/engine/fsdp_unit.h"
#include "shardweave/dtensor/engine/fused.h"
#include "shardweave/dtensor/engine/grad_buckets.h"
#include "shardweave/dtensor/engine/gradient_owner.h"
#include "shardweave/dtensor/engine/members.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/provenance.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "torch/nn/module.h"

namespace shardweave {
namespace {

using namespace dtensor_internal;

constexpr char kDistributeModule[] = "distribute_module";

[[noreturn]] void refuse(absl::StatusCode code, std::string_view fqn, std::string_view why,
                         std::string_view function = kDistributeModule) {
  throw Error(function,
              absl::Status(code, absl::StrCat("'", std::string(fqn), "': ", std::string(why))));
}

// From the first byte to the one behind the last; empty: it has none.
struct Extent {
  const void* storage = nullptr;  // of one that is not made yet, whose bytes count from 0
  uintptr_t begin = 0, end = 0;
  friend auto operator<=>(const Extent&, const Extent&) = default;
};

Extent extent(const at::Tensor& tensor) {
  if (!tensor.has_storage() || tensor.numel() == 0) return {};
  if (is_deferred(tensor)) {
    const DeferredExtent its = deferred_extent(tensor);
    return {its.storage, static_cast<uintptr_t>(its.begin), static_cast<uintptr_t>(its.end)};
  }
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  if (begin == 0) return {};  // a meta tensor
  return {nullptr, begin, begin + static_cast<uintptr_t>(last + 1) * tensor.element_size()};
}

// Different tensors over the same memory would each get their own.
void check_memory(const std::vector<Member>& members, std::string_view function) {
  std::vector<std::pair<Extent, const Member*>> extents;
  for (const Member& member : members) extents.emplace_back(extent(member.tensor), &member);
  std::sort(extents.begin(), extents.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  const Extent* furthest = nullptr;
  const Member* its = nullptr;
  for (const auto& [bytes, member] : extents) {
    if (bytes.begin == bytes.end) continue;
    if (furthest != nullptr && bytes.storage == furthest->storage && bytes.begin < furthest->end) {
      throw Error(function,
                  absl::InvalidArgumentError(absl::StrCat(
                      "'", its->fqns[0], "' and '", member->fqns[0],
                      "' are different tensors over the same memory, which as DTensors they "
                      "would no longer "
                      "share; register one tensor under both names, or copy one of them")));
    }
    furthest = &bytes;
    its = member;
  }
}

// What all ranks need to have alike, of each tensor; with a source not its values, which that gives.
uint64_t sum_of(const Member& member, const ResolvedTensor& resolved, bool with_values) {
  const at::Tensor& tensor = member.tensor;
  // What is not made yet materialize() compares.
  const uint64_t values = with_values && !is_deferred(tensor) ? checksum(tensor) : 0;
  std::string text = absl::StrCat(member.fqns[0], resolved.layout.to_string(), ";",
                                  static_cast<int>(tensor.scalar_type()));
  for (const int64_t size : tensor.sizes()) absl::StrAppend(&text, ",", size);
  return checksum(values, text);
}

[[noreturn]] void refuse_difference(const Difference& difference,
                                    const std::vector<Member>& members, bool with_values,
                                    std::string_view function) {
  const std::string ranks =
      absl::StrCat("ranks ", difference.ranks[0], " and ", difference.ranks[1]);
  if (difference.index >= members.size()) {
    throw Error(function, absl::InvalidArgumentError(absl::StrCat(
                              ranks,
                              " have different numbers of parameters and buffers, forward "
                              "entries of the plan, plug-ins or sources; wanted the same "
                              "everywhere")));
  }
  refuse(absl::StatusCode::kInvalidArgument, members[difference.index].fqns[0],
         with_values
             ? absl::StrCat("is not the same on ", ranks,
                            " (values, shape, dtype or placements); initialise every rank alike, "
                            "or name a source, whose values all ranks get")
             : absl::StrCat("is not the same on ", ranks,
                            " (name, shape, dtype or placements); make the same model with the "
                            "same plan everywhere"),
         function);
}

void check_same_on_all_ranks(MeshContext& context, const std::vector<Member>& members,
                             const std::vector<ResolvedTensor>& resolved, const Cause& cause) {
  if (context.mesh().size() == 1) return;
  std::vector<uint64_t> sums;
  for (size_t i = 0; i < members.size(); ++i) {
    sums.push_back(sum_of(members[i], resolved[i], /*with_values=*/true));
  }
  if (const std::optional<Difference> difference = first_difference(context, sums, cause)) {
    refuse_difference(*difference, members, /*with_values=*/true, cause.name);
  }
}

void name_family(const Member& member, PlanOrigin origin) {
  auto family = std::make_shared<ViewFamily>();
  family->fqn = member.fqns[0];
  family->parameter = meta_of(member.tensor).spec;
  family->origin = std::make_shared<PlanOrigin>(std::move(origin));
  meta_of(member.tensor).family = std::move(family);
}

// Each where it stands.
void make_dtensors(const std::vector<Member>& members, const std::vector<ResolvedTensor>& resolved,
                   const MeshPtr& mesh, const DistributeOptions& options, const Cause& cause) {
  const std::source_location& where = cause.where;
  const std::string place =
      *where.file_name() == '\0' ? "" : absl::StrCat(where.file_name(), ":", where.line());
  const c10::AutoGradMode no_grad(false);
  for (size_t i = 0; i < members.size(); ++i) {
    const Member& member = members[i];
    Cause of_it = cause;
    of_it.parameter = member.fqns[0];
    if (is_deferred(member.tensor)) {
      const at::Tensor& tensor = member.tensor;
      const absl::Span<const int64_t> sizes(tensor.sizes().data(), tensor.sizes().size());
      const std::shared_ptr<MeshContext> context = MeshContext::of(mesh);
      SpecRef weight =
          context->intern(resolved[i].layout, sizes, contiguous_strides(sizes),
                          tensor.scalar_type(), deferred_device(tensor), {.weight = ~uint64_t{0}});
      name_deferred(tensor, member.fqns[0]);
      shard_deferred(tensor, std::move(weight), context);
      name_family(member, {resolved[i].pattern, place});
      continue;
    }
    const at::Tensor sharded =
        distributed(member.tensor.detach(), mesh, resolved[i].layout, options, of_it);
    const DTensorMeta& meta = meta_of(sharded);
    const Spec& spec = *meta.spec;
    SpecRef weight = meta.context->intern(spec.layout, spec.sizes, spec.strides, spec.dtype,
                                          spec.device, {.weight = ~uint64_t{0}});
    convert_in_place(member.tensor, meta.local(), std::move(weight), meta.context);
    name_family(member, {resolved[i].pattern, place});
    meta_of(member.tensor).came_from(meta.provenance);
  }
}

}  // namespace

void distribute_module(torch::nn::Module& module, const MeshPtr& mesh, const ParameterPlan& plan,
                       const DistributeOptions& options, std::source_location where) {
  Agreement agreement(*MeshContext::of(mesh), {.name = kDistributeModule, .where = where});
  distribute_agreed(module, mesh, plan, options, where, agreement, "");
}

void dtensor_internal::check_distributable(const std::vector<Member>& members,
                                           std::string_view function) {
  for (const Member& member : members) {
    if (in_unit(member.tensor) != nullptr) {
      refuse(absl::StatusCode::kFailedPrecondition, member.fqns[0],
             "is fully sharded already, and rests in a unit; plans come first", function);
    }
    if (is_dtensor(member.tensor)) {
      refuse(absl::StatusCode::kFailedPrecondition, member.fqns[0],
             absl::StrCat("is a DTensor already, ", describe(member.tensor),
                          "; a module is distributed once: for another plan make it anew, and "
                          "register DTensors of your own after this call"),
             function);
    }
    if (const std::string why = not_dense(member.tensor); !why.empty()) {
      refuse(absl::StatusCode::kInvalidArgument, member.fqns[0],
             absl::StrCat("cannot be a DTensor: ", why), function);
    }
  }
  check_memory(members, function);
}

void dtensor_internal::distribute_agreed(torch::nn::Module& module, const MeshPtr& mesh,
                                         const ParameterPlan& plan,
                                         const DistributeOptions& options,
                                         std::source_location where, Agreement& agreement,
                                         std::string_view also) {
  const std::vector<Member> members = members_of(module);
  check_distributable(members, kDistributeModule);
  check_source(mesh->mesh(), options, kDistributeModule);
  const std::vector<ResolvedTensor> resolved =
      resolve_members(members, mesh->mesh(), plan, kDistributeModule);
  const bool with_values = !options.source.has_value();
  std::vector<uint64_t> sums;
  for (size_t i = 0; i < members.size(); ++i) {
    sums.push_back(sum_of(members[i], resolved[i], with_values));
  }
  sums.push_back(checksum(static_cast<uint64_t>(options.source.value_or(-1)), also));
  if (const std::optional<Difference> difference = agreement.reach(sums)) {
    refuse_difference(*difference, members, with_values, kDistributeModule);
  }
  make_dtensors(members, resolved, mesh, options, {.name = kDistributeModule, .where = where});
}

void dtensor_internal::distribute_members(const std::vector<Member>& members,
                                          const std::vector<ResolvedTensor>& resolved,
                                          const MeshPtr& mesh, const DistributeOptions& options,
                                          const Cause& cause) {
  check_memory(members, cause.name);
  if (!options.source.has_value()) {
    check_same_on_all_ranks(*MeshContext::of(mesh), members, resolved, cause);
  }
  make_dtensors(members, resolved, mesh, options, cause);
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
  const Cause cause = {.name = "finish_grad_sync", .where = where, .syncs_gradients = true};
  const std::vector<at::Tensor> unique = unique_parameters(parameters);
  GradBuckets::check_in_place(unique);
  const std::vector<std::shared_ptr<GradBuckets>> buckets = buckets_of(unique);
  for (const std::shared_ptr<GradBuckets>& b : buckets) b->land(cause);
  std::vector<at::Tensor> moving;  // parameters
  std::vector<InFlight> in_flight;
  struct Hooked {
    std::shared_ptr<GradBuckets> buckets;
    std::vector<at::Tensor> parameters;
  };
  std::vector<Hooked> hooked;
  for (const std::shared_ptr<GradBuckets>& b : buckets) {
    if (b->has_hook()) hooked.push_back({b, {}});
  }
  const auto only_buckets_of = [](const at::Tensor& parameter) {
    const std::vector<std::shared_ptr<GradBuckets>> its = buckets_of({parameter});
    return its.empty() ? nullptr : its[0];
  };
  std::vector<std::shared_ptr<GradientOwner>> owners;
  for (const at::Tensor& parameter : unique) {
    if (in_unit(parameter) != nullptr) meta_of(parameter).context->gradients.fsdp->send_held();
  }
  for (const at::Tensor& parameter : unique) {
    if (!is_dtensor(parameter) || !parameter.grad().defined()) continue;
    warn_of_unmet_plan(parameter);
    if (!is_dtensor(parameter.grad())) {  // a formula's own zeros, say
      const MeshPtr mesh = mesh_of(parameter);
      meta_of(parameter).context->plain_tensors.put_off({}, parameter.grad());
      parameter.mutable_grad() = distribute_tensor(
          parameter.grad(), mesh, Placements(mesh->mesh().ndim()), {.source = std::nullopt});
    }
    if (std::shared_ptr<GradientOwner> owner = owner_of_gradient(parameter)) {
      if (std::find(owners.begin(), owners.end(), owner) == owners.end()) {
        owners.push_back(std::move(owner));
      }
      continue;
    }
    // While a parameter is summoned its gradient stays where it is to rest.
    if (in_unit(parameter) != nullptr && resting_of(parameter) == nullptr) continue;
    if (!gradient_moves(parameter)) continue;
    if (parameter.grad().requires_grad()) {  // create_graph: it stays part of that graph
      const c10::AutoGradMode record(true);
      parameter.mutable_grad() = redistribute(parameter.grad(), layout_of(parameter), where);
      continue;
    }
    InFlight gradient = moving_gradient(parameter);
    const auto with_hook = std::find_if(hooked.begin(), hooked.end(), [&](const Hooked& h) {
      return h.buckets->has_hook_for(gradient) && h.buckets == only_buckets_of(parameter);
    });
    if (with_hook != hooked.end()) {
      with_hook->parameters.push_back(parameter);
      continue;
    }
    moving.push_back(parameter);
    in_flight.push_back(std::move(gradient));
  }
  for (const Hooked& h : hooked) {
    if (!h.parameters.empty()) h.buckets->bring_through_hook(h.parameters, cause);
  }
  run_plans(in_flight, cause);
  for (size_t i = 0; i < moving.size(); ++i) set_gradient(moving[i], std::move(in_flight[i]));
  for (const std::shared_ptr<GradientOwner>& owner : owners) owner->bring_gradients(cause);
  for (const std::shared_ptr<GradBuckets>& b : buckets) b->plan(cause);
}

}  // namespace shardweave
