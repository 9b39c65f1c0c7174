// Worlds, meshes and layouts.
#include "fuzzer.h"

namespace shardweave::capi {

void Fuzzer::worlds() {
  swv_world* world = nullptr;
  swv_mesh* mesh = nullptr;
  swv_string* string = nullptr;
  const swv_mesh_dim dims[] = {{text(), one_in(4) ? number() : size_}, {text(), 1}};
  const char* names[] = {text(), text()};
  int64_t out[8];
  size_t count = 0;
  int32_t i = 0;
  switch (below(10)) {
    case 0:
      if (done(swv_world_share(pick(worlds_), &world))) keep(worlds_, world, swv_world_free, 4);
      break;
    case 1:
      if (done(swv_world_create_counting(small(), small(), &world))) swv_world_free(world);
      break;
    case 2:
    case 3:
      if (done(swv_mesh_create(pick(worlds_), dims, length(2), &mesh)))
        keep(meshes_, mesh, swv_mesh_free, 6);
      break;
    case 4:
      if (done(swv_mesh_parse(pick(worlds_), text(), &mesh))) keep(meshes_, mesh, swv_mesh_free, 6);
      break;
    case 5:
      if (done(swv_mesh_slice(pick(meshes_), names, length(2), &mesh)))
        keep(meshes_, mesh, swv_mesh_free, 6);
      break;
    case 6:
      if (done(swv_mesh_flatten(pick(meshes_), names, length(2), text(), &mesh)))
        keep(meshes_, mesh, swv_mesh_free, 6);
      break;
    case 7:
      done(swv_mesh_shape(pick(meshes_), one_in(9) ? nullptr : out, below(9), &count));
      done(swv_mesh_coordinate(pick(meshes_), out, below(9), one_in(9) ? nullptr : &count));
      done(swv_mesh_find_dim(pick(meshes_), text(), &i));
      break;
    case 8: {
      const swv_random_state state = {static_cast<uint64_t>(number()),
                                      static_cast<uint64_t>(number())};
      done(swv_mesh_seed(pick(meshes_), static_cast<uint64_t>(number())));
      done(swv_mesh_set_random_state(pick(meshes_), one_in(5) ? nullptr : &state));
      break;
    }
    default:
      drop(swv_mesh_to_string(pick(meshes_), &string), &string);
      drop(swv_mesh_dim_name(pick(meshes_), small(), &string), &string);
      drop(swv_world_flight_record(pick(worlds_), &string), &string);
  }
}

void Fuzzer::layouts() {
  swv_layout* layout = nullptr;
  swv_string* string = nullptr;
  swv_placement placements[3] = {};
  swv_placement got;
  const int32_t order[] = {small(), small()};
  const int64_t mesh_shape[] = {static_cast<int64_t>(1 + below(4)), number()},
                coordinate[] = {number(), 0};
  const swv_named_placement named[] = {{text(), text()}, {text(), text()}};
  int64_t shape[6], offset[6], bytes;
  size_t ndim = 0;
  for (swv_placement& p : placements) {
    p = {small(),  small(), small(), one_in(30) ? 1 : 0, number(), one_in(3) ? mesh_shape : nullptr,
         length(2)};
  }
  switch (below(6)) {
    case 0:
    case 1:
      if (done(swv_layout_parse(text(), &layout))) keep(layouts_, layout, swv_layout_free, 12);
      break;
    case 2:
      if (done(swv_layout_create(placements, length(3), order, length(2), &layout)))
        keep(layouts_, layout, swv_layout_free, 12);
      break;
    case 3:
      if (done(swv_layout_create_named(pick(meshes_), named, length(2), &layout)))
        keep(layouts_, layout, swv_layout_free, 12);
      break;
    case 4: {
      const int64_t* s = sizes(&ndim);
      done(swv_layout_local_extent(pick(layouts_), mesh_shape, coordinate, 1 + below(2), s, ndim,
                                   shape, offset));
      drop(swv_layout_plan(pick(layouts_), pick(layouts_), mesh_shape, 1, s, ndim, small(), &bytes,
                           &string),
           &string);
      string = nullptr;
      break;
    }
    default:
      drop(swv_layout_to_string(pick(layouts_), &string), &string);
      done(swv_layout_placement(pick(layouts_), small(), &got));
  }
}

}  // namespace shardweave::capi
