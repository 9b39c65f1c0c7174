// Meshes and their random numbers, scopes and counters.
#include <algorithm>

#include "shardweave/capi/scopes.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/cost_model.h"

namespace shardweave::capi {
namespace {

const MeshPtr& mesh_ptr(const swv_mesh* mesh) {
  return in(mesh, "mesh").mesh;
}
const DeviceMesh& grid(const swv_mesh* mesh) {
  return mesh_ptr(mesh)->mesh();
}

std::vector<MeshDim> mesh_dims(const swv_mesh_dim* dims, size_t num_dims) {
  std::vector<MeshDim> result;
  for_each(span(dims, num_dims, "dims", kMaxDims), "dims[]", [&](const swv_mesh_dim& dim) {
    result.push_back({std::string(text(dim.name, "dims[].name")), dim.size});
  });
  return result;
}

std::vector<std::string> names_of(const char* const* names, size_t num_names) {
  std::vector<std::string> result;
  for_each(span(names, num_names, "names", kMaxDims), "names[]",
           [&](const char* name) { result.emplace_back(text(name, "names[]")); });
  return result;
}

// The world's ranks may be more than the mesh's only where the mesh says which.
swv_mesh* new_world_mesh(const swv_world* world, std::vector<MeshDim> dims) {
  return make<swv_mesh>(check(init_device_mesh(*in(world, "world").world, std::move(dims))));
}

swv_mesh* new_mesh_like(const MeshPtr& mesh, absl::StatusOr<DeviceMesh> grid) {
  return make<swv_mesh>(check(mesh->another(check(std::move(grid)))));
}

int mesh_dim(const swv_mesh* mesh, int32_t dim) {
  const int ndim = grid(mesh).ndim();
  if (dim < 0 || dim >= ndim) {
    fail(absl::StatusCode::kOutOfRange,
         str_cat("argument 'dim' is ", dim, "; ", grid(mesh).to_string(), " has ", ndim,
                 ndim == 1 ? " dimension" : " dimensions"));
  }
  return dim;
}

PhiloxState random_state(const swv_random_state* state) {
  const swv_random_state s =
      required_options<swv_random_state>(state, SWV_RANDOM_STATE_INIT, "state");
  return {s.seed, s.offset};
}

// What is wrong with an argument, for functions that all ranks have to hear of it from.
template <typename Body>
absl::StatusOr<CostModel> or_status(const Body& body) {
  try {
    return body();
  } catch (const Failure& failure) {
    return failure.status();
  }
}

absl::StatusOr<CostModel> cost_model(const swv_link_cost* links, size_t num_links,
                                     const swv_device_cost* given) {
  return or_status([&]() -> absl::StatusOr<CostModel> {
    const swv_device_cost device = options<swv_device_cost>(given, SWV_DEVICE_COST_INIT, "device");
    CostModel model;
    for (const swv_link_cost& link : span(links, num_links, "links", kMaxDims)) {
      model.links.push_back({link.latency, link.bandwidth});
    }
    model.device = {device.flops, device.bandwidth};
    return model;
  });
}

absl::StatusOr<CostModel> cost_model_from_json(const char* json, const DeviceMesh& mesh) {
  return or_status([&] { return shardweave::cost_model_from_json(text(json, "text"), mesh); });
}

}  // namespace
}  // namespace shardweave::capi

using namespace shardweave::capi;  // NOLINT: this file is the C interface of it

swv_status* swv_mesh_create(const swv_world* world, const swv_mesh_dim* dims, size_t num_dims,
                            swv_mesh** out_mesh) {
  return guarded(__func__, out_mesh, "out_mesh",
                 [&] { return new_world_mesh(world, mesh_dims(dims, num_dims)); });
}

swv_status* swv_mesh_parse(const swv_world* world, const char* text, swv_mesh** out_mesh) {
  return guarded(__func__, out_mesh, "out_mesh", [&] {
    const auto grid = check(shardweave::DeviceMesh::parse(shardweave::capi::text(text, "text")));
    return new_world_mesh(world, grid.dims());
  });
}

swv_status* swv_mesh_create_from_ranks(const swv_world* world, const swv_mesh_dim* dims,
                                       size_t num_dims, const int32_t* ranks, size_t num_ranks,
                                       swv_mesh** out_mesh) {
  return guarded(__func__, out_mesh, "out_mesh", [&] {
    shardweave::World& all_ranks = *in(world, "world").world;
    const auto all = span(ranks, num_ranks, "ranks");
    return make<swv_mesh>(check(shardweave::connect_mesh(
        all_ranks, check(shardweave::DeviceMesh::from_ranks(mesh_dims(dims, num_dims),
                                                            {all.begin(), all.end()})))));
  });
}

swv_status* swv_mesh_share(const swv_mesh* mesh, swv_mesh** out_mesh) {
  return guarded(__func__, out_mesh, "out_mesh", [&] { return make<swv_mesh>(mesh_ptr(mesh)); });
}

void swv_mesh_free(swv_mesh* mesh) {
  release(mesh, __func__);
}

swv_status* swv_mesh_slice(const swv_mesh* mesh, const char* const* names, size_t num_names,
                           swv_mesh** out_mesh) {
  return guarded(__func__, out_mesh, "out_mesh", [&] {
    return make<swv_mesh>(check(mesh_ptr(mesh)->slice(names_of(names, num_names))));
  });
}

swv_status* swv_mesh_flatten(const swv_mesh* mesh, const char* const* names, size_t num_names,
                             const char* new_name, swv_mesh** out_mesh) {
  return guarded(__func__, out_mesh, "out_mesh", [&] {
    return new_mesh_like(mesh_ptr(mesh), grid(mesh).flatten(names_of(names, num_names),
                                                            text_or(new_name, "", "new_name")));
  });
}

swv_status* swv_mesh_unflatten(const swv_mesh* mesh, const char* name, const swv_mesh_dim* dims,
                               size_t num_dims, swv_mesh** out_mesh) {
  return guarded(__func__, out_mesh, "out_mesh", [&] {
    return new_mesh_like(mesh_ptr(mesh),
                         grid(mesh).unflatten(text(name, "name"), mesh_dims(dims, num_dims)));
  });
}

swv_status* swv_mesh_ndim(const swv_mesh* mesh, int32_t* out_ndim) {
  return guarded(__func__, out_ndim, "out_ndim", [&] { return grid(mesh).ndim(); });
}

swv_status* swv_mesh_size(const swv_mesh* mesh, int32_t* out_size) {
  return guarded(__func__, out_size, "out_size", [&] { return grid(mesh).size(); });
}

swv_status* swv_mesh_shape(const swv_mesh* mesh, int64_t* sizes, size_t capacity,
                           size_t* out_count) {
  return guarded(__func__,
                 [&] { copy_out(grid(mesh).shape(), sizes, capacity, out_count, "sizes"); });
}

swv_status* swv_mesh_dim_name(const swv_mesh* mesh, int32_t dim, swv_string** out_name) {
  return guarded(__func__, out_name, "out_name",
                 [&] { return new_string(std::string(grid(mesh).name(mesh_dim(mesh, dim)))); });
}

swv_status* swv_mesh_find_dim(const swv_mesh* mesh, const char* name, int32_t* out_dim) {
  return guarded(__func__, out_dim, "out_dim",
                 [&] { return check(grid(mesh).dim(text(name, "name"))); });
}

swv_status* swv_mesh_coordinate(const swv_mesh* mesh, int64_t* coordinate, size_t capacity,
                                size_t* out_count) {
  return guarded(__func__, [&] {
    copy_out(mesh_ptr(mesh)->coordinate(), coordinate, capacity, out_count, "coordinate");
  });
}

swv_status* swv_mesh_ranks(const swv_mesh* mesh, int32_t* ranks, size_t capacity,
                           size_t* out_count) {
  return guarded(__func__,
                 [&] { copy_out(grid(mesh).ranks(), ranks, capacity, out_count, "ranks"); });
}

swv_status* swv_mesh_comm(const swv_mesh* mesh, int32_t dim, swv_comm** out_comm) {
  return guarded(__func__, out_comm, "out_comm", [&] {
    return make<swv_comm>(check(mesh_ptr(mesh)->communicator(mesh_dim(mesh, dim))));
  });
}

swv_status* swv_mesh_connect(const swv_mesh* mesh) {
  return guarded(__func__, [&] { check(mesh_ptr(mesh)->connect()); });
}

swv_status* swv_mesh_to_string(const swv_mesh* mesh, swv_string** out_text) {
  return guarded(__func__, out_text, "out_text",
                 [&] { return new_string(grid(mesh).to_string()); });
}

swv_status* swv_mesh_equal(const swv_mesh* a, const swv_mesh* b, swv_bool* out_equal) {
  return guarded(__func__, out_equal, "out_equal",
                 [&] { return in(a, "a").mesh->mesh() == in(b, "b").mesh->mesh(); });
}

swv_status* swv_mesh_set_cost_model(swv_mesh* mesh, const swv_link_cost* links, size_t num_links,
                                    const swv_device_cost* device) {
  return guarded(__func__, [&] {
    const shardweave::MeshPtr& m = mesh_ptr(mesh);
    shardweave::set_cost_model(m, cost_model(links, num_links, device), kHost);
  });
}

swv_status* swv_mesh_set_cost_model_from_json(swv_mesh* mesh, const char* text) {
  return guarded(__func__, [&] {
    const shardweave::MeshPtr& m = mesh_ptr(mesh);
    shardweave::set_cost_model(m, cost_model_from_json(text, m->mesh()), kHost);
  });
}

swv_status* swv_mesh_measure_cost_model(const swv_mesh* mesh, swv_string** out_json) {
  return guarded(__func__, out_json, "out_json", [&] {
    const shardweave::MeshPtr& m = mesh_ptr(mesh);
    return new_string(cost_model_to_json(shardweave::measure_cost_model(m), m->mesh()));
  });
}

swv_status* swv_mesh_cost_model(const swv_mesh* mesh, swv_link_cost* links, size_t capacity,
                                size_t* out_count, swv_device_cost* out_device) {
  return guarded(__func__, [&] {
    const shardweave::CostModel model = shardweave::cost_model(mesh_ptr(mesh));
    size_t& count = out(out_count, "out_count");
    check_room(links, capacity, sizeof(*links), "links");
    if (out_device != nullptr) {
      swv_device_cost device = SWV_DEVICE_COST_INIT;
      device.flops = model.device.flops;
      device.bandwidth = model.device.bandwidth;
      write_struct(device, out_device, "out_device");
    }
    count = model.links.size();
    for (size_t i = 0; i < std::min(count, capacity); ++i) {
      links[i] = {model.links[i].latency, model.links[i].bandwidth};
    }
  });
}

swv_status* swv_mesh_forbid_communication(swv_mesh* mesh, swv_scope** out_scope) {
  return guarded(__func__, out_scope, "out_scope",
                 [&] { return new_scope<shardweave::StrictScope>(mesh_ptr(mesh)).release(); });
}

swv_status* swv_mesh_enter_module(swv_mesh* mesh, const char* name, swv_scope** out_scope) {
  return guarded(__func__, out_scope, "out_scope", [&] {
    const shardweave::MeshPtr& m = mesh_ptr(mesh);
    const RecordedInOrder in_order;  // names go by autograd's numbers
    return new_scope<shardweave::ModuleScope>(m, std::string(text(name, "name"))).release();
  });
}

swv_status* swv_mesh_enter_source(swv_mesh* mesh, const char* source, swv_scope** out_scope) {
  return guarded(__func__, out_scope, "out_scope", [&] {
    const shardweave::MeshPtr& m = mesh_ptr(mesh);
    return new_scope<shardweave::SourceScope>(m, text(source, "source")).release();
  });
}

swv_status* swv_mesh_use_random_state(swv_mesh* mesh, const swv_random_state* state,
                                      swv_scope** out_scope) {
  return guarded(__func__, out_scope, "out_scope", [&] {
    const shardweave::MeshPtr& m = mesh_ptr(mesh);
    return new_scope<shardweave::RandomStateScope>(m, random_state(state)).release();
  });
}

void swv_scope_free(swv_scope* scope) {
  const RecordedInOrder in_order;  // it may be a module's
  release(scope, __func__);
}

swv_status* swv_mesh_seed(swv_mesh* mesh, uint64_t seed) {
  return guarded(__func__, [&] { shardweave::manual_seed(mesh_ptr(mesh), seed); });
}

swv_status* swv_mesh_random_state(const swv_mesh* mesh, swv_random_state* out_state) {
  return guarded(__func__, [&] {
    const shardweave::PhiloxState state = shardweave::random_state(mesh_ptr(mesh));
    swv_random_state result = SWV_RANDOM_STATE_INIT;
    result.seed = state.seed;
    result.offset = state.offset;
    write_struct(result, out_state, "out_state");
  });
}

swv_status* swv_mesh_set_random_state(swv_mesh* mesh, const swv_random_state* state) {
  return guarded(__func__, [&] {
    const shardweave::MeshPtr& m = mesh_ptr(mesh);
    shardweave::set_random_state(m, random_state(state));
  });
}

swv_status* swv_mesh_dispatch_counters(const swv_mesh* mesh, swv_dispatch_counters* out_counters) {
  return guarded(__func__, [&] {
    const shardweave::DispatchCounters c = shardweave::dispatch_counters(mesh_ptr(mesh));
    swv_dispatch_counters result = SWV_DISPATCH_COUNTERS_INIT;
    result.operators = c.operators;
    result.cache_misses = c.cache_misses;
    result.implicit_redistributions = c.implicit_redistributions;
    result.gathered_operators = c.gathered_operators;
    result.remembered_uses = c.remembered_uses;
    result.remembered_bytes = c.remembered_bytes;
    result.unsharded_weights = c.unsharded_weights;
    write_struct(result, out_counters, "out_counters");
  });
}
