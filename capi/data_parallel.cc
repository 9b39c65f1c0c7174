// Models that every rank has a copy of.
#include "shardweave/modules/data_parallel.h"

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "shardweave/capi/grad_sync_options.h"
#include "shardweave/capi/host_module.h"
#include "shardweave/modules/join.h"

namespace shardweave::capi {
namespace {

// NULL is the mesh's first.
std::string dim_or_first(const char* given, const char* argument) {
  if (given == nullptr) return "";
  const std::string_view name = text(given, argument);
  if (name.empty()) fail_argument(argument, "is \"\"; wanted the name of a dimension, or NULL");
  return std::string(name);
}

DistributeOptions from_source(int32_t source) {
  swv_distribute_options distribute = SWV_DISTRIBUTE_OPTIONS_INIT;
  distribute.source = source;
  return distribute_options(&distribute);
}

void make_data_parallel(const swv_module* module, const swv_mesh* mesh,
                        const swv_data_parallel_options* given, swv_grad_sync** out_sync) {
  // First what has a drop.
  const swv_data_parallel_options o = given == nullptr
                                          ? swv_data_parallel_options SWV_DATA_PARALLEL_OPTIONS_INIT
                                          : known_options<swv_data_parallel_options>(
                                                *given, SWV_DATA_PARALLEL_OPTIONS_INIT, "options");
  const CallMode mode(SWV_MODE_GRAD, "mode");
  torch::nn::Module* of = nullptr;
  DataParallelOptions options;
  const std::shared_ptr<PowerSgd> power_sgd = read_together(mesh, "distributed_data_parallel", [&] {
    GivenGradSync how = grad_sync_options(o.sync, "options.sync");
    out(out_sync, "out_sync");
    if (given != nullptr) check_options(*given, o, "options");
    check_reserved(o.reserved, "options.reserved");
    of = &any_module(module);
    options = {.mesh_dim = dim_or_first(o.mesh_dim, "options.mesh_dim"),
               .distribute = from_source(o.source),
               .sync = std::move(how.options)};
    return std::move(how.power_sgd);
  });
  const MeshPtr& on = in(mesh, "mesh").mesh;
  auto state = std::make_shared<GradSyncState>(
      [&] { return distributed_data_parallel(*of, on, options, kHost); }, power_sgd);
  name_mesh(in(module, "module"), on);
  *out_sync = make<swv_grad_sync>(std::move(state));
}

void transform(const swv_module* module, const swv_mesh* mesh, const char* mesh_dim,
               int32_t source) {
  const MeshPtr& on = in(mesh, "mesh").mesh;
  const CallMode mode(SWV_MODE_GRAD, "mode");
  const auto [of, options] = read_together(on, "pre_dp_module_transform", [&] {
    return std::pair(&any_module(module),
                     DataParallelOptions{.mesh_dim = dim_or_first(mesh_dim, "mesh_dim"),
                                         .distribute = from_source(source)});
  });
  pre_dp_module_transform(*of, on, options, kHost);
  name_mesh(in(module, "module"), on);
}

// Of functions that take a module, a mesh and the name of a dimension.
template <typename Call>
void with_dim(const swv_module* module, const swv_mesh* mesh, const char* mesh_dim,
              const char* name, const Call& call) {
  const MeshPtr& on = in(mesh, "mesh").mesh;
  const CallMode mode(SWV_MODE_GRAD, "mode");
  const auto [of, along] = read_together(
      on, name, [&] { return std::pair(&any_module(module), dim_or_first(mesh_dim, "mesh_dim")); });
  call(*of, on, along);
}

void join_batch(const swv_mesh* mesh, const char* const* mesh_dims, size_t num_mesh_dims,
                const swv_tensor* const* handles, size_t num_tensors, swv_tensor** out_tensors,
                size_t* out_num_tensors, int64_t* out_ranks_with_input) {
  out(out_tensors, "out_tensors");
  out(out_num_tensors, "out_num_tensors");
  const MeshPtr& on = in(mesh, "mesh").mesh;
  JoinOptions options;
  for_each(span(mesh_dims, num_mesh_dims, "mesh_dims", kMaxDims), "mesh_dims",
           [&](const char* name) { options.mesh_dims.emplace_back(text(name, "mesh_dims")); });
  // NULL is refused there, on all ranks.
  const std::vector<at::Tensor> mine = tensors_or_undefined(handles, num_tensors, "tensors");
  const CallMode mode(SWV_MODE_GRAD, "mode");
  Join join(on, options);
  std::optional<std::vector<at::Tensor>> batch = join.next(mine, kHost);
  const size_t count = batch.has_value() ? batch->size() : 0;
  if (batch.has_value()) write_tensors(*std::move(batch), out_tensors);
  *out_num_tensors = count;
  if (out_ranks_with_input != nullptr) *out_ranks_with_input = join.ranks_with_input();
}

}  // namespace
}  // namespace shardweave::capi

using namespace shardweave::capi;  // NOLINT: this file is the C interface of it

swv_status* swv_module_distributed_data_parallel(swv_module* module, const swv_mesh* mesh,
                                                 const swv_data_parallel_options* options,
                                                 swv_grad_sync** out_sync) {
  return guarded(__func__, [&] { make_data_parallel(module, mesh, options, out_sync); });
}

swv_status* swv_module_pre_dp_transform(swv_module* module, const swv_mesh* mesh,
                                        const char* mesh_dim, int32_t source) {
  return guarded(__func__, [&] { transform(module, mesh, mesh_dim, source); });
}

swv_status* swv_module_broadcast_buffers(swv_module* module, const swv_mesh* mesh,
                                         const char* mesh_dim) {
  return guarded(__func__, [&] {
    with_dim(module, mesh, mesh_dim, "broadcast_buffers",
             [](auto& of, const shardweave::MeshPtr& on, const std::string& along) {
               shardweave::broadcast_buffers(of, on, along, kHost);
             });
  });
}

swv_status* swv_module_enable_2d_with_fsdp(swv_module* module, const swv_mesh* mesh,
                                           const char* mesh_dim) {
  return guarded(__func__, [&] {
    with_dim(module, mesh, mesh_dim, "enable_2d_with_fsdp",
             [](auto& of, const shardweave::MeshPtr& on, const std::string& along) {
               shardweave::enable_2d_with_fsdp(of, on, along, kHost);
             });
  });
}

swv_status* swv_mesh_join_batch(swv_mesh* mesh, const char* const* mesh_dims, size_t num_mesh_dims,
                                const swv_tensor* const* tensors, size_t num_tensors,
                                swv_tensor** out_tensors, size_t* out_num_tensors,
                                int64_t* out_ranks_with_input) {
  return guarded(__func__, [&] {
    join_batch(mesh, mesh_dims, num_mesh_dims, tensors, num_tensors, out_tensors, out_num_tensors,
               out_ranks_with_input);
  });
}
