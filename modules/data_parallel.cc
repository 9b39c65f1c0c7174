#include "shardweave/modules/data_parallel.h"

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "ATen/ops/cat.h"
#include "absl/container/btree_map.h"
#include "c10/core/GradMode.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/engine/adopt.h"
#include "shardweave/dtensor/engine/checksum.h"
#include "shardweave/dtensor/engine/distribute.h"
#include "shardweave/dtensor/engine/flat_row.h"
#include "shardweave/dtensor/engine/fsdp_unit.h"
#include "shardweave/dtensor/engine/grad_buckets.h"
#include "shardweave/dtensor/engine/gradient_owner.h"
#include "shardweave/dtensor/engine/members.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/provenance.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "shardweave/dtensor/engine/tensor_work.h"
#include "torch/nn/module.h"

namespace shardweave {
namespace {

using namespace dtensor_internal;

int mesh_dim_of(const DeviceMesh& mesh, const std::string& name, const char* function) {
  if (name.empty()) return 0;
  const absl::StatusOr<int> found = mesh.dim(name);
  if (!found.ok()) throw Error(function, found.status());
  return *found;
}

// A parameter or buffer that is a DTensor already.
void check_uncut(const Member& member, const MeshContext& context, int mesh_dim,
                 const char* function) {
  const auto refuse_member = [&](absl::StatusCode code, const std::string& why) {
    throw Error(function, absl::Status(code, str_cat("'", member.fqns[0], "' ", why)));
  };
  const at::Tensor& tensor = member.tensor;
  if (in_unit(tensor) != nullptr) {
    refuse_member(
        absl::StatusCode::kFailedPrecondition,
        "is fully sharded already: its unit brings its gradients. Tensor parallelism "
        "(parallelize_module) comes first, then either fully_shard() or data parallelism");
  }
  if (meta_of(tensor).context.get() != &context) {
    refuse_member(absl::StatusCode::kInvalidArgument,
                  str_cat("is on another mesh, ", describe(tensor),
                          "; wanted the whole mesh, of which plans and styles name a dimension: "
                          "parallelize_module(module, mesh, plan)"));
  }
  if (!member.is_buffer && !layout_of(tensor)[mesh_dim].is_replicate()) {
    refuse_member(absl::StatusCode::kInvalidArgument,
                  str_cat("lies ", layout_of(tensor).to_string(), ": wanted whole along '",
                          std::string(context.mesh().name(mesh_dim)), "'"));
  }
}

// `sync`: what gradients are given to afterwards; null: nothing.
void make_data_parallel(torch::nn::Module& module, const MeshPtr& mesh,
                        const DataParallelOptions& options, const GradSyncOptions* sync,
                        const char* function, std::source_location where) {
  const std::shared_ptr<MeshContext> context = MeshContext::of(mesh);
  const Cause cause = {.name = function, .where = where};
  Agreement agreement(*context, cause);
  const int mesh_dim = mesh_dim_of(mesh->mesh(), options.mesh_dim, function);
  check_source(mesh->mesh(), options.distribute, function);
  const std::vector<Member> members = members_of(module);
  std::vector<Member> plain;
  std::vector<ResolvedTensor> replicated;
  std::vector<at::Tensor> parameters;
  uint64_t options_sum = mix(static_cast<uint64_t>(mesh_dim) + 1,
                             static_cast<uint64_t>(options.distribute.source.value_or(-1)));
  if (sync != nullptr) options_sum = mix(options_sum, options_checksum(*sync));
  std::vector<uint64_t> sums = {options_sum};
  for (const Member& member : members) {
    const at::Tensor& tensor = member.tensor;
    if (!member.is_buffer) parameters.push_back(tensor);
    uint64_t sum = checksum(member.is_buffer, member.fqns[0]);
    if (is_dtensor(tensor)) {
      check_uncut(member, *context, mesh_dim, function);
      sum = checksum(sum, meta_of(tensor).spec->to_string());
    } else {
      if (const std::string why = not_dense(tensor); !why.empty()) {
        throw Error(function, absl::InvalidArgumentError(
                                  str_cat("'", member.fqns[0], "' cannot be a DTensor: ", why)));
      }
      plain.push_back(member);
      replicated.push_back({.fqns = member.fqns,
                            .sizes = tensor.sizes().vec(),
                            .is_buffer = member.is_buffer,
                            .layout = Layout(Placements(mesh->mesh().ndim()))});
      sum = checksum(sum, str_cat(c10::toString(tensor.scalar_type()), c10::str(tensor.sizes())));
    }
    sums.push_back(mix(sum, tensor.requires_grad() ? 1 : 2));
  }
  if (parameters.empty()) {
    throw Error(function, absl::FailedPreconditionError("the module has no parameter"));
  }
  for (const at::Tensor& parameter : parameters) {
    if (!is_dtensor(parameter) || owner_of_gradient(parameter) == nullptr) continue;
    throw Error(function, absl::FailedPreconditionError(str_cat(
                              "the parameter '", std::string(parameter_of(meta_of(parameter))),
                              "' is in a ZeroPartition, which brings gradients to their owners")));
  }
  if (!buckets_of(parameters).empty()) {
    throw Error(function, absl::FailedPreconditionError(
                              "a parameter is in a GradSync, which is still there: a model is made "
                              "data parallel once"));
  }
  if (sync != nullptr) check_grad_sync(parameters, *sync);
  if (sync != nullptr && sync->hook != nullptr) {
    std::vector<std::string> names;  // as they will be
    for (const Member& member : members) {
      const at::Tensor& tensor = member.tensor;
      if (member.is_buffer || !tensor.requires_grad() || !tensor.is_leaf()) continue;
      names.push_back(is_dtensor(tensor) ? std::string(parameter_of(meta_of(tensor)))
                                         : member.fqns[0]);
    }
    check_hook_names(names);
  }
  check_distributable(plain, function);
  if (const std::optional<Difference> differs = agreement.reach(sums)) {
    const size_t which = differs->index;
    // A hook has no more of a name than the user's options: with it they are one.
    const std::string hook =
        sync == nullptr || sync->hook == nullptr
            ? ""
            : str_cat(" (or the hook's name; here it is '", sync->hook->name(), "')");
    const std::string what = which == 0 ? str_cat("what the options say", hook)
                             : which <= members.size()
                                 ? str_cat("'", members[which - 1].fqns[0],
                                           "' (name, shape, dtype, layout or requires_grad)")
                                 : std::string("the number of parameters and buffers");
    throw Error(function,
                absl::InvalidArgumentError(str_cat(what, " is not the same on ranks ",
                                                   differs->ranks[0], " and ", differs->ranks[1])));
  }
  if (!plain.empty()) distribute_members(plain, replicated, mesh, options.distribute, cause);
}

}  // namespace

GradSync distributed_data_parallel(torch::nn::Module& module, const MeshPtr& mesh,
                                   const DataParallelOptions& options, std::source_location where) {
  make_data_parallel(module, mesh, options, &options.sync, "distributed_data_parallel", where);
  return GradSync(module, options.sync);
}

void pre_dp_module_transform(torch::nn::Module& module, const MeshPtr& mesh,
                             const DataParallelOptions& options, std::source_location where) {
  make_data_parallel(module, mesh, options, nullptr, "pre_dp_module_transform", where);
}

void broadcast_buffers(torch::nn::Module& module, const MeshPtr& mesh, const std::string& mesh_dim,
                       std::source_location where) {
  constexpr char kFunction[] = "broadcast_buffers";
  const c10::AutoGradMode no_grad(false);
  const std::shared_ptr<MeshContext> context = MeshContext::of(mesh);
  const Cause cause = {.name = kFunction, .where = where};
  Agreement agreement(*context, cause);
  const int along = mesh_dim_of(mesh->mesh(), mesh_dim, kFunction);
  struct Some {
    std::vector<at::Tensor> buffers, parts;
  };
  absl::btree_map<std::pair<at::ScalarType, std::string>, Some> by_kind;  // dtype and device
  uint64_t sum = static_cast<uint64_t>(along) + 1;
  for (const Member& member : members_of(module)) {
    const at::Tensor& tensor = member.tensor;
    if (!member.is_buffer) continue;
    sum = checksum(sum, member.fqns[0]);
    if (is_dtensor(tensor)) {
      if (meta_of(tensor).context != context) {
        throw Error(kFunction,
                    absl::InvalidArgumentError(
                        str_cat("'", member.fqns[0], "' is on another mesh, ", describe(tensor))));
      }
      sum = checksum(sum, meta_of(tensor).spec->to_string());
      if (!layout_of(tensor)[along].is_replicate()) continue;
    } else {
      sum = checksum(sum, str_cat(c10::toString(tensor.scalar_type()), c10::str(tensor.sizes())));
    }
    Some& some = by_kind[{tensor.scalar_type(), tensor.device().str()}];
    some.buffers.push_back(tensor);
    some.parts.push_back(part_to_write(tensor, kFunction));
  }
  if (const std::optional<Difference> differs = agreement.reach({sum})) {
    throw Error(kFunction, absl::InvalidArgumentError(str_cat(
                               "buffers (their names, shapes or dtypes) or the dimension are "
                               "not the same on ranks ",
                               differs->ranks[0], " and ", differs->ranks[1])));
  }
  if (mesh->mesh().size(along) == 1) return;
  Communicator& comm = context->communicator(along);
  for (auto& [kind, some] : by_kind) {
    std::vector<at::Tensor> flat_parts;
    for (const at::Tensor& part : some.parts) flat_parts.push_back(part.reshape({-1}));
    const at::Tensor flat = at::cat(flat_parts);
    const std::vector<int> dims = {along};
    const int64_t numel = flat.numel();
    if (numel > 0) {
      const CollectiveSpan span(*context, cause, [&]() -> Sending {
        return {"broadcast",
                dims,
                numel * static_cast<int64_t>(flat.element_size()),
                kind.first,
                absl::MakeConstSpan(&numel, 1),
                Layout(),
                Layout()};
      });
      const CallOptions options = {.tag = kFunction, .stream = current_stream(flat.device())};
      throw_if_error(
          TensorWork(*context, comm.broadcast(comm_buffer(flat), 0, options), flat.device())
              .wait());
    }
    int64_t at = 0;
    for (size_t i = 0; i < some.parts.size(); ++i) {
      const at::Tensor& part = some.parts[i];
      part.copy_(flat.narrow(0, at, part.numel()).view(part.sizes()));
      part_written(some.buffers[i], kFunction);
      at += part.numel();
    }
  }
}

void enable_2d_with_fsdp(const torch::nn::Module& module, const MeshPtr& mesh,
                         const std::string& mesh_dim, std::source_location where) {
  constexpr char kFunction[] = "enable_2d_with_fsdp";
  const std::shared_ptr<MeshContext> context = MeshContext::of(mesh);
  Agreement agreement(*context, {.name = kFunction, .where = where});
  const int along = mesh_dim_of(mesh->mesh(), mesh_dim, kFunction);
  const auto refuse_order = [&](const std::string& why) {
    throw Error(kFunction, absl::FailedPreconditionError(why));
  };
  if (mesh->mesh().ndim() < 2) {
    refuse_order(str_cat("the mesh has one dimension, ", mesh->mesh().to_string(),
                         "; wanted one for tensor parallelism beside '",
                         std::string(mesh->mesh().name(along)), "'"));
  }
  bool is_cut = false;
  uint64_t sum = static_cast<uint64_t>(along) + 1;
  for (const Member& member : members_of(module)) {
    sum = checksum(sum, member.fqns[0]);
    if (!is_dtensor(member.tensor)) continue;
    check_uncut(member, *context, along, kFunction);
    sum = checksum(sum, meta_of(member.tensor).spec->to_string());
    for (int m = 0; m < mesh->mesh().ndim() && !member.is_buffer; ++m) {
      is_cut |= m != along && layout_of(member.tensor)[m].is_shard();
    }
  }
  if (!is_cut) {
    refuse_order(str_cat("no parameter is cut along another dimension than '",
                         std::string(mesh->mesh().name(along)),
                         "': parallelize_module() comes first, then fully_shard()"));
  }
  if (const std::optional<Difference> differs = agreement.reach({sum})) {
    throw Error(kFunction, absl::InvalidArgumentError(
                               str_cat("parameters or the dimension are not the same on ranks ",
                                       differs->ranks[0], " and ", differs->ranks[1])));
  }
}

}  // namespace shardweave
