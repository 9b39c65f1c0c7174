#include "shardweave/modules/fully_shard.h"

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "ATen/Context.h"
#include "absl/strings/str_join.h"
#include "c10/core/impl/DeviceGuardImplInterface.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "nlohmann/json.hpp"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/engine/adopt.h"
#include "shardweave/dtensor/engine/checksum.h"
#include "shardweave/dtensor/engine/deferred.h"
#include "shardweave/dtensor/engine/distribute.h"
#include "shardweave/dtensor/engine/fsdp_unit.h"
#include "shardweave/dtensor/engine/grad_buckets.h"
#include "shardweave/dtensor/engine/gradient_owner.h"
#include "shardweave/dtensor/engine/members.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "shardweave/dtensor/fqn_pattern.h"
#include "shardweave/dtensor/observe/text_table.h"
#include "torch/nn/module.h"

namespace shardweave {
namespace {

using namespace dtensor_internal;

[[noreturn]] void refuse_to_shard(absl::StatusCode code, const std::string& why) {
  throw Error(kFullyShard, absl::Status(code, why));
}

void check_dtype(std::string_view name, std::optional<at::ScalarType> dtype) {
  if (!dtype.has_value() || is_castable(*dtype)) return;
  refuse_to_shard(
      absl::StatusCode::kInvalidArgument,
      str_cat(name, " is ", c10::toString(*dtype), "; wanted Half, BFloat16, Float or Double"));
}

std::string_view name_of_unit(std::string_view module) {
  return module.empty() ? "(rest)" : module;
}

// Of dtypes that may not be given.
std::string text_of(std::optional<at::ScalarType> dtype) {
  return dtype.has_value() ? c10::toString(*dtype) : "";
}

// With an index. Throws Error if LibTorch has none here.
std::optional<at::Device> checked_device(std::optional<at::Device> device) {
  if (!device.has_value() || device->is_cpu()) return device;
  if (!device->is_cuda()) {
    refuse_to_shard(absl::StatusCode::kInvalidArgument,
                    str_cat("compute_device is ", device->str(), "; wanted cuda, or cpu"));
  }
  if (!at::hasCUDA()) {  // or it came too late
    refuse_to_shard(absl::StatusCode::kInvalidArgument,
                    str_cat("compute_device is ", device->str(),
                            ", and LibTorch has none here: load_cuda() says why"));
  }
  const int count = c10::impl::VirtualGuardImpl(device->type()).deviceCount();
  if (device->has_index() && device->index() >= count) {
    refuse_to_shard(
        absl::StatusCode::kInvalidArgument,
        str_cat("compute_device is ", device->str(), "; LibTorch has ", count, " of them here"));
  }
  return with_index(*device);
}

// Where it is, or will be.
at::Device device_when_made(const at::Tensor& tensor) {
  const bool is_to_be_made = !is_dtensor(tensor) && dtensor_internal::is_deferred(tensor);
  return with_index(is_to_be_made ? deferred_device(tensor) : tensor.device());
}

std::string_view enclosing(std::string_view fqn) {
  const size_t dot = fqn.rfind('.');
  return dot == std::string_view::npos ? std::string_view() : fqn.substr(0, dot);
}

// "BlockImpl", "nn::BlockImpl" and "Block" are of type "Block".
bool is_of_type(std::string_view name, std::string_view type) {
  for (const std::string_view ending : {"", "Impl"}) {
    if (!name.ends_with(ending)) continue;
    const std::string_view bare = name.substr(0, name.size() - ending.size());
    if (!bare.ends_with(type)) continue;
    const std::string_view before = bare.substr(0, bare.size() - type.size());
    if (before.empty() || before.ends_with("::")) return true;
  }
  return false;
}

// Submodules that have parameters, by FQN: those of hosts in other languages are known by their
// parameters' names alone. With the elements of parameters in each.
std::map<std::string, int64_t, std::less<>> submodules_of(
    const std::vector<const Member*>& members) {
  std::map<std::string, int64_t, std::less<>> submodules;
  for (const Member* member : members) {
    for (std::string_view m = enclosing(member->fqns[0]); !m.empty(); m = enclosing(m)) {
      submodules[std::string(m)] += member->tensor.numel();
    }
  }
  return submodules;
}

// The FQNs of those that are units.
std::set<std::string, std::less<>> unit_modules(torch::nn::Module& module,
                                                const std::vector<const Member*>& members,
                                                const FullyShardOptions& options) {
  const auto submodules = submodules_of(members);
  std::set<std::string, std::less<>> units;
  const auto take_outermost = [&](const std::string& what, const std::string& hint,
                                  const auto& matches) {
    std::set<std::string_view> taken;
    for (const auto& [fqn, numel] : submodules) {  // a module comes before those within it
      if (!matches(fqn)) continue;
      std::string_view around = enclosing(fqn);
      while (!around.empty() && !taken.contains(around)) around = enclosing(around);
      if (!around.empty()) continue;
      taken.insert(fqn);
      if (numel >= options.min_numel) units.insert(fqn);
    }
    if (!taken.empty()) return;
    refuse_to_shard(
        absl::StatusCode::kNotFound,
        str_cat(what, " matches no submodule that has parameters outside of units", hint));
  };
  std::vector<std::string> all;
  for (const auto& [fqn, numel] : submodules) all.push_back(fqn);
  for (const std::string& text : options.units) {
    absl::StatusOr<FqnPattern> pattern = FqnPattern::parse(text);
    if (!pattern.ok()) {
      refuse_to_shard(
          absl::StatusCode::kInvalidArgument,
          str_cat("the pattern '", text, "' ", std::string(pattern.status().message())));
    }
    take_outermost(str_cat("the pattern of units '", text, "'"), pattern->suggestion(all),
                   [&](const std::string& fqn) { return pattern->matches(fqn); });
  }
  if (!options.unit_types.empty()) {
    std::map<std::string, std::string, std::less<>> types;
    for (const auto& item : module.named_modules("", /*include_self=*/false)) {
      types.emplace(item.key(), item.value()->name());
    }
    std::set<std::string> there;
    for (const auto& [fqn, type] : types) there.insert(type);
    const std::string hint = str_cat("; there are ", absl::StrJoin(there, ", "));
    for (const std::string& type : options.unit_types) {
      take_outermost(str_cat("the type of units '", type, "'"), hint, [&](const std::string& fqn) {
        const auto it = types.find(fqn);
        return it != types.end() && is_of_type(it->second, type);
      });
    }
  }
  if (!options.units.empty() || !options.unit_types.empty() || options.min_numel == 0) return units;
  // By size alone, from the innermost: a module's own and what no unit in it has taken.
  std::map<std::string, int64_t, std::less<>> left = submodules;
  std::vector<std::string> innermost_first;
  for (const auto& [fqn, numel] : submodules) innermost_first.push_back(fqn);
  std::stable_sort(innermost_first.begin(), innermost_first.end(),
                   [](const std::string& a, const std::string& b) {
                     return std::count(a.begin(), a.end(), '.') >
                            std::count(b.begin(), b.end(), '.');
                   });
  for (const std::string& fqn : innermost_first) {
    const int64_t numel = left[fqn];
    if (numel < options.min_numel) continue;
    units.insert(fqn);
    for (std::string_view m = enclosing(fqn); !m.empty(); m = enclosing(m)) {
      left.find(m)->second -= numel;
    }
  }
  return units;
}

// A unit to be made.
struct Planned {
  std::string module;
  std::vector<const Member*> members;
  std::vector<SpecRef> used;  // how they lie where they are whole along the dimension
  std::vector<Layout> layouts;
  std::optional<EqualSegments> segments;
};

// Of what has to be the same on all ranks, but for what units say.
std::string text_of(const FullyShardOptions& o) {
  std::string text =
      str_cat("reshard_after_forward ", o.reshard_after_forward, ", reshard_after_forward_ranks ",
              o.reshard_after_forward_ranks, ", equal_segments ", o.equal_segments, ", source ",
              o.distribute.source.value_or(-1));
  const auto add = [&](std::string_view name, const std::string& value) {
    if (!value.empty()) str_append(&text, ", ", name, " ", value);
  };
  add("param_dtype", text_of(o.param_dtype));
  add("reduce_dtype", text_of(o.reduce_dtype));
  add("output_dtype", text_of(o.output_dtype));
  if (o.compute_device.has_value()) {
    add("compute_device", c10::DeviceTypeName(o.compute_device->type(), true));
  }
  return text;
}

// "a.weight [7, 5], a.bias [7] (no gradient)".
std::string text_of(const Planned& unit) {
  constexpr size_t kMost = 8;
  std::string text;
  for (size_t i = 0; i < std::min(unit.members.size(), kMost); ++i) {
    str_append(&text, i == 0 ? "" : ", ", unit.members[i]->fqns[0], " [",
               absl::StrJoin(unit.used[i]->sizes, ", "), "]",
               unit.members[i]->tensor.requires_grad() ? "" : " (no gradient)");
  }
  if (unit.members.size() > kMost) str_append(&text, " and ", unit.members.size() - kMost, " more");
  return text;
}

}  // namespace

std::vector<FullyShardUnit> fully_shard(torch::nn::Module& module, const MeshPtr& mesh,
                                        const FullyShardOptions& options,
                                        std::source_location where) {
  const std::shared_ptr<MeshContext> context = MeshContext::of(mesh);
  const Cause cause = {.name = kFullyShard, .where = where};
  Agreement agreement(*context, cause);
  int mesh_dim = 0;
  if (!options.mesh_dim.empty()) {
    const absl::StatusOr<int> found = mesh->mesh().dim(options.mesh_dim);
    if (!found.ok()) throw Error(kFullyShard, found.status());
    mesh_dim = *found;
  }
  const std::string along(mesh->mesh().name(mesh_dim));
  if (options.min_numel < 0) {
    refuse_to_shard(absl::StatusCode::kInvalidArgument,
                    str_cat("min_numel is ", options.min_numel, "; wanted 0 or more"));
  }
  const int64_t ranks = mesh->mesh().size(mesh_dim);
  const int64_t divided = options.reshard_after_forward_ranks;
  if (divided != 0 && (divided < 0 || ranks % divided != 0 || !options.reshard_after_forward)) {
    refuse_to_shard(
        absl::StatusCode::kInvalidArgument,
        str_cat("reshard_after_forward_ranks is ", divided,
                options.reshard_after_forward ? "" : " without reshard_after_forward",
                "; wanted a divisor of the ", ranks, " ranks along '", along, "', or 0"));
  }
  check_source(mesh->mesh(), options.distribute, kFullyShard);
  const std::optional<at::Device> compute_device = checked_device(options.compute_device);

  const std::vector<Member> members = members_of(module);
  std::vector<Member> plain;
  std::vector<ResolvedTensor> replicated;
  std::vector<const Member*> free;
  std::vector<at::Tensor> moving;  // to the compute_device: what is in no unit
  const Member* in_a_unit = nullptr;
  for (const Member& member : members) {
    const at::Tensor& tensor = member.tensor;
    const auto refuse_member = [&](const std::string& why) {
      refuse_to_shard(absl::StatusCode::kInvalidArgument, str_cat("'", member.fqns[0], "': ", why));
    };
    if (const Resting* resting = in_unit(tensor)) {
      if (meta_of(tensor).context != context || resting->unit->mesh_dim() != mesh_dim) {
        refuse_member(str_cat("is in a unit of another mesh or mesh dimension already, '",
                              resting->unit->name(), "'"));
      }
      in_a_unit = &member;
      continue;
    }
    if (!is_dtensor(tensor)) {
      if (const std::string why = not_dense(tensor); !why.empty()) {
        refuse_member(str_cat("cannot be a DTensor: ", why));
      }
      plain.push_back(member);
      replicated.push_back({.fqns = member.fqns,
                            .sizes = tensor.sizes().vec(),
                            .is_buffer = member.is_buffer,
                            .layout = Layout(Placements(mesh->mesh().ndim()))});
    } else if (!member.is_buffer) {
      if (meta_of(tensor).context != context) {
        refuse_member(str_cat("is a DTensor on another mesh, ", describe(tensor)));
      }
      if (!layout_of(tensor)[mesh_dim].is_replicate()) {
        refuse_member(str_cat("lies ", layout_of(tensor).to_string(), ": wanted whole along '",
                              along, "', which is to cut it"));
      }
      if (!tensor.is_leaf()) refuse_member("is no leaf: it is the result of an operator");
    }
    const at::Device device = device_when_made(tensor);
    if (compute_device.has_value() && device != *compute_device && !device.is_cpu()) {
      refuse_member(str_cat("is on ", device.str(),
                            ": wanted on the CPU, to be used on the "
                            "compute_device ",
                            compute_device->str(), ", or there"));
    }
    if (!member.is_buffer && tensor.dim() > 0 && tensor.numel() > 0) {
      free.push_back(&member);
    } else if (compute_device.has_value() && device != *compute_device) {
      moving.push_back(tensor);
    }
  }
  // Who brings gradients already.
  for (const Member* member : free) {
    if (owner_of_gradient(member->tensor) != nullptr) {
      refuse_to_shard(absl::StatusCode::kFailedPrecondition,
                      str_cat("'", member->fqns[0],
                              "' is in a ZeRO partition, which is still there: a parameter has one "
                              "owner"));
    }
    if (!buckets_of({member->tensor}).empty()) {
      refuse_to_shard(absl::StatusCode::kFailedPrecondition,
                      str_cat("'", member->fqns[0],
                              "' is in a GradSync (distributed_data_parallel()), which is still "
                              "there: units send gradients in backward by themselves"));
    }
  }
  if (free.empty()) {
    refuse_to_shard(
        absl::StatusCode::kFailedPrecondition,
        in_a_unit != nullptr
            ? str_cat("all parameters are in units already: '", in_a_unit->fqns[0],
                      "' is in the unit '", name_of_unit(in_unit(in_a_unit->tensor)->unit->name()),
                      "'; modules that are units within others come first")
            : std::string("the module has no parameter to cut"));
  }

  // What belongs together.
  const std::set<std::string, std::less<>> units = unit_modules(module, free, options);
  std::vector<Planned> planned;
  for (const Member* member : free) {
    std::string_view owner = enclosing(member->fqns[0]);
    while (!owner.empty() && !units.contains(owner)) owner = enclosing(owner);
    const at::Tensor& tensor = member->tensor;
    const absl::Span<const int64_t> sizes(tensor.sizes().data(), tensor.sizes().size());
    const bool is_plain = !is_dtensor(tensor);
    SpecRef used = !is_plain ? meta_of(tensor).spec
                             : context->intern(Layout(Placements(mesh->mesh().ndim())), sizes,
                                               contiguous_strides(sizes), tensor.scalar_type(),
                                               device_when_made(tensor), {.weight = ~uint64_t{0}});
    auto unit = std::find_if(planned.begin(), planned.end(), [&](const Planned& p) {
      return p.module == owner && p.used[0]->dtype == used->dtype &&
             p.used[0]->device == used->device;
    });
    if (unit == planned.end()) {
      unit = planned.insert(planned.end(), Planned{.module = std::string(owner)});
    }
    unit->members.push_back(member);
    unit->used.push_back(std::move(used));
  }
  const std::string text = text_of(options);
  std::vector<uint64_t> sums = {checksum(0, text)};
  for (Planned& unit : planned) {
    if (options.equal_segments) {
      unit.segments = equal_segments(unit.used, mesh->mesh(), mesh_dim);
      if (!unit.segments->refusal.empty()) {
        refuse_to_shard(
            absl::StatusCode::kInvalidArgument,
            str_cat("the unit '", name_of_unit(unit.module), "': '",
                    unit.members[unit.segments->refused]->fqns[0], "': ", unit.segments->refusal));
      }
      unit.layouts = unit.segments->layouts;
    } else {
      unit.layouts = flat_row_layouts(unit.used, mesh->mesh(), mesh_dim);
    }
    uint64_t sum = checksum(0, unit.module);
    for (size_t i = 0; i < unit.members.size(); ++i) {
      if (const std::string why = why_not_kept(*unit.used[i], unit.layouts[i], mesh->mesh());
          !why.empty()) {
        refuse_to_shard(absl::StatusCode::kInvalidArgument,
                        str_cat("'", unit.members[i]->fqns[0], "' ", why));
      }
      sum = checksum(sum, unit.members[i]->fqns[0]);
      sum = checksum(sum, unit.used[i]->to_string());
      sum = checksum(sum, unit.layouts[i].to_string());
      sum = checksum(sum, unit.members[i]->tensor.requires_grad() ? "grad" : "");
    }
    sums.push_back(sum);
  }
  check_distributable(plain, cause.name);
  if (const std::optional<Difference> differs = agreement.reach(sums)) {
    const std::string ranks_are =
        str_cat(" not the same on ranks ", differs->ranks[0], " and ", differs->ranks[1]);
    if (differs->index == 0) {
      refuse_to_shard(absl::StatusCode::kInvalidArgument,
                      str_cat("what the options say is", ranks_are, "; here it is ", text));
    }
    const Planned& unit = planned[std::min(differs->index, planned.size()) - 1];
    refuse_to_shard(absl::StatusCode::kInvalidArgument,
                    str_cat("the unit '", name_of_unit(unit.module), "' is", ranks_are,
                            " (its parameters' names, shapes, layouts, or which of them want "
                            "gradients); here it is ",
                            text_of(unit)));
  }
  // The ranks have the same ones by now.
  check_dtype("param_dtype", options.param_dtype);
  check_dtype("reduce_dtype", options.reduce_dtype);
  check_dtype("output_dtype", options.output_dtype);
  if (!plain.empty()) distribute_members(plain, replicated, mesh, options.distribute, cause);
  for (const at::Tensor& tensor : moving) move_in_place(tensor, *compute_device);

  std::vector<FullyShardUnit> result;
  for (const Planned& unit : planned) {
    std::vector<at::Tensor> parameters;
    FullyShardUnit& made = result.emplace_back();
    made.module = unit.module;
    for (size_t i = 0; i < unit.members.size(); ++i) {
      parameters.push_back(unit.members[i]->tensor);
      made.parameters.push_back(unit.members[i]->fqns[0]);
      made.numel += unit.used[i]->local_numel();
      made.kept += context->with_layout(*unit.used[i], unit.layouts[i])->local_numel();
    }
    if (unit.segments.has_value()) made.padding = unit.segments->padding;
    FsdpUnit::Options how = {.reshard_after_forward = options.reshard_after_forward && divided != 1,
                             .reshard_ranks = divided == ranks || divided == 1 ? 0 : divided,
                             .where = where};
    if (compute_device.has_value() && unit.used[0]->device != *compute_device) {
      how.compute_device = compute_device;
    }
    if (is_castable(unit.used[0]->dtype)) {
      how.param_dtype = options.param_dtype;
      how.reduce_dtype = options.reduce_dtype;
      how.output_dtype = options.output_dtype;
    }
    FsdpUnit::create(unit.module, parameters, unit.layouts, mesh_dim, how,
                     unit.segments.has_value() ? &*unit.segments : nullptr);
  }
  name_members(members);
  // Names as the outermost module has them.
  for (const Member& member : members) {
    if (in_unit(member.tensor) != nullptr) {
      meta_of(member.tensor).family->fqn = member.fqns[0];
    }
  }
  return result;
}

std::string to_string(const std::vector<FullyShardUnit>& units) {
  TextTable table({"unit", "parameters", "numel", "kept", "padding"},
                  /*right_aligned=*/{1, 2, 3, 4});
  for (const FullyShardUnit& unit : units) {
    table.add({std::string(name_of_unit(unit.module)), str_cat(unit.parameters.size()),
               str_cat(unit.numel), str_cat(unit.kept), str_cat(unit.padding)});
  }
  return table.to_string();
}

std::string to_json(const std::vector<FullyShardUnit>& units) {
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  for (const FullyShardUnit& unit : units) {
    all.push_back({{"module", unit.module},
                   {"parameters", unit.parameters},
                   {"numel", unit.numel},
                   {"kept", unit.kept},
                   {"padding", unit.padding}});
  }
  return all.dump();
}

FullyShardNoSync::FullyShardNoSync(const MeshPtr& mesh)
    : units_(MeshContext::of(mesh)->gradients.fsdp) {
  const std::shared_ptr<void> units = units_.lock();
  if (units == nullptr) {
    throw Error("FullyShardNoSync", absl::FailedPreconditionError(
                                        "no module on this mesh is fully sharded: the mesh is "
                                        "that of fully_shard()"));
  }
  ++std::static_pointer_cast<FsdpState>(units)->no_sync;
}

FullyShardNoSync::~FullyShardNoSync() {
  if (const std::shared_ptr<void> units = units_.lock()) {
    --std::static_pointer_cast<FsdpState>(units)->no_sync;
  }
}

void reshard(const MeshPtr& mesh) {
  const std::shared_ptr<MeshContext> context = MeshContext::of(mesh);
  if (context->gradients.fsdp != nullptr) context->gradients.fsdp->reshard();
}

FullyShardCounters fully_shard_counters(const MeshPtr& mesh) {
  const std::shared_ptr<MeshContext> context = MeshContext::of(mesh);
  if (context->gradients.fsdp == nullptr) return {};
  const FsdpCounters& c = context->gradients.fsdp->counters;
  return {.gathers = c.gathers,
          .prefetches = c.prefetches,
          .wrong_prefetches = c.wrong_prefetches,
          .reduce_scatters = c.reduce_scatters,
          .gathered_bytes = c.gathered_bytes,
          .peak_gathered_bytes = c.peak_gathered_bytes};
}

}  // namespace shardweave
