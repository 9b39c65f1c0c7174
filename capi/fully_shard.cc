// Modules whose parameters are whole only while they are used.
#include "shardweave/modules/fully_shard.h"

#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "shardweave/capi/host_module.h"
#include "shardweave/capi/scopes.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/load_cuda.h"

namespace shardweave::capi {
namespace {

std::vector<std::string> texts(const char* const* given, size_t count, const char* argument) {
  std::vector<std::string> result;
  for_each(span(given, count, argument), argument,
           [&](const char* each) { result.emplace_back(text(each, argument)); });
  return result;
}

FullyShardOptions fully_shard_options(const swv_fully_shard_options* given) {
  const swv_fully_shard_options o =
      options<swv_fully_shard_options>(given, SWV_FULLY_SHARD_OPTIONS_INIT, "options");
  if (o.min_numel < 0) {
    fail_argument("options.min_numel", str_cat("is ", o.min_numel, "; wanted 0 or more"));
  }
  swv_distribute_options distribute = SWV_DISTRIBUTE_OPTIONS_INIT;
  distribute.source = o.source;
  FullyShardOptions result;
  if (o.mesh_dim != nullptr) result.mesh_dim = text(o.mesh_dim, "options.mesh_dim");
  if (o.mesh_dim != nullptr && result.mesh_dim.empty()) {
    fail_argument("options.mesh_dim", "is \"\"; wanted the name of a dimension, or NULL");
  }
  result.units = texts(o.units, o.num_units, "options.units");
  result.unit_types = texts(o.unit_types, o.num_unit_types, "options.unit_types");
  result.min_numel = o.min_numel;
  result.reshard_after_forward = flag(o.reshard_after_forward, "options.reshard_after_forward");
  result.param_dtype = optional_scalar_type(o.param_dtype, "options.param_dtype");
  result.reduce_dtype = optional_scalar_type(o.reduce_dtype, "options.reduce_dtype");
  result.output_dtype = optional_scalar_type(o.output_dtype, "options.output_dtype");
  result.equal_segments = flag(o.equal_segments, "options.equal_segments");
  result.reshard_after_forward_ranks = o.reshard_after_forward_ranks;
  const c10::Device computes = device(o.compute_device, "options.compute_device");
  if (!computes.is_cpu()) {
    load_cuda().IgnoreError();  // that it is not there is an error of all ranks
    result.compute_device = computes;
  }
  result.distribute = distribute_options(&distribute);
  return result;
}

void shard(const swv_module* module, const swv_mesh* mesh, const swv_fully_shard_options* given,
           swv_string** out_text, swv_string** out_json) {
  const MeshPtr& on = in(mesh, "mesh").mesh;
  const CallMode mode(SWV_MODE_GRAD, "mode");
  const auto [of, how] = read_together(on, "fully_shard", [&] {
    return std::pair(&any_module(module), fully_shard_options(given));
  });
  const std::vector<FullyShardUnit> units = shardweave::fully_shard(*of, on, how, kHost);
  name_mesh(in(module, "module"), on);
  Owned<swv_string> table(out_text == nullptr ? nullptr : new_string(to_string(units)));
  Owned<swv_string> json(out_json == nullptr ? nullptr : new_string(to_json(units)));
  if (out_text != nullptr) *out_text = table.release();
  if (out_json != nullptr) *out_json = json.release();
}

void write_counters(const swv_mesh* mesh, swv_fully_shard_counters* out_counters) {
  const FullyShardCounters c = shardweave::fully_shard_counters(in(mesh, "mesh").mesh);
  swv_fully_shard_counters result = SWV_FULLY_SHARD_COUNTERS_INIT;
  result.gathers = c.gathers;
  result.prefetches = c.prefetches;
  result.wrong_prefetches = c.wrong_prefetches;
  result.reduce_scatters = c.reduce_scatters;
  result.gathered_bytes = c.gathered_bytes;
  result.peak_gathered_bytes = c.peak_gathered_bytes;
  write_struct(result, out_counters, "out_counters");
}

swv_scope* full_params(const swv_module* module, swv_bool writeback, int32_t rank) {
  const CallMode mode(SWV_MODE_NO_GRAD, "mode");
  const torch::nn::Module& of = any_module(module);
  const auto how = read_together(first_mesh_of(of), "FullParams", [&] {
    FullParamsOptions result = {.writeback = flag(writeback, "writeback")};
    if (rank < -1) {
      fail_argument("rank", str_cat("is ", rank, "; wanted -1, or a place along the dimension"));
    }
    if (rank >= 0) result.rank = rank;
    return result;
  });
  return new_scope<FullParamsScope>(of, how).release();
}

template <typename Scope>
auto& params_of(Scope* scope) {
  auto* const params = std::get_if<FullParamsScope>(&in(scope, "scope").scope);
  if (params == nullptr) {
    fail_argument("scope", "is of another kind; wanted one of swv_module_full_params");
  }
  return *params->params;
}

void get_full_param(const swv_scope* scope, const char* fqn, swv_tensor** out_tensor) {
  swv_tensor*& result = out(out_tensor, "out_tensor");
  const at::Tensor tensor = params_of(scope).parameter(text(fqn, "fqn"));
  result = tensor.defined() ? make<swv_tensor>(tensor) : nullptr;
}

}  // namespace
}  // namespace shardweave::capi

using namespace shardweave::capi;  // NOLINT: this file is the C interface of it

swv_status* swv_module_fully_shard(swv_module* module, const swv_mesh* mesh,
                                   const swv_fully_shard_options* options, swv_string** out_text,
                                   swv_string** out_json) {
  return guarded(__func__, [&] { shard(module, mesh, options, out_text, out_json); });
}

swv_status* swv_mesh_reshard(swv_mesh* mesh) {
  return guarded(__func__, [&] {
    const CallMode mode(SWV_MODE_NO_GRAD, "mode");
    shardweave::reshard(in(mesh, "mesh").mesh);
  });
}

swv_status* swv_mesh_fully_shard_no_sync(const swv_mesh* mesh, swv_scope** out_scope) {
  return guarded(__func__, out_scope, "out_scope", [&] {
    return new_scope<shardweave::FullyShardNoSync>(in(mesh, "mesh").mesh).release();
  });
}

swv_status* swv_mesh_fully_shard_counters(const swv_mesh* mesh,
                                          swv_fully_shard_counters* out_counters) {
  return guarded(__func__, [&] { write_counters(mesh, out_counters); });
}

swv_status* swv_module_full_params(const swv_module* module, swv_bool writeback, int32_t rank,
                                   swv_scope** out_scope) {
  return guarded(__func__, out_scope, "out_scope",
                 [&] { return full_params(module, writeback, rank); });
}

swv_status* swv_full_params_get(const swv_scope* scope, const char* fqn, swv_tensor** out_tensor) {
  return guarded(__func__, [&] { get_full_param(scope, fqn, out_tensor); });
}

swv_status* swv_full_params_end(swv_scope* scope) {
  return guarded(__func__, [&] {
    const CallMode mode(SWV_MODE_NO_GRAD, "mode");
    params_of(scope).end();
  });
}
