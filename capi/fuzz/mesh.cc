// Worlds, meshes and layouts.
#include <atomic>

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
      swv_random_state state = SWV_RANDOM_STATE_INIT;
      state.seed = static_cast<uint64_t>(number());
      state.offset = static_cast<uint64_t>(number());
      done(swv_mesh_seed(pick(meshes_), static_cast<uint64_t>(number())));
      done(swv_mesh_set_random_state(pick(meshes_), one_in(5) ? nullptr : sized(state)));
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
  swv_placement placements[] = {SWV_PLACEMENT_INIT, SWV_PLACEMENT_INIT, SWV_PLACEMENT_INIT};
  const swv_placement got = SWV_PLACEMENT_INIT;
  const int32_t order[] = {small(), small()};
  const int64_t mesh_shape[] = {static_cast<int64_t>(1 + below(4)), number()},
                coordinate[] = {number(), 0};
  const swv_named_placement named[] = {{text(), text()}, {text(), text()}};
  int64_t shape[6], offset[6], bytes;
  size_t ndim = 0;
  for (swv_placement& p : placements) {
    p.kind = small(), p.dim = small(), p.reduce_op = small(), p.reserved = one_in(30) ? 1 : 0;
    p.split_factor = number(), p.sizes = one_in(3) ? mesh_shape : nullptr, p.num_sizes = length(2);
  }
  switch (below(6)) {
    case 0:
    case 1:
      if (done(swv_layout_parse(text(), &layout))) keep(layouts_, layout, swv_layout_free, 12);
      break;
    case 2:
      if (done(swv_layout_create(sized_array(placements), length(3), order, length(2), &layout)))
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
      done(swv_layout_placement(pick(layouts_), small(), one_in(9) ? nullptr : sized(got)));
  }
}

// Second handles, of which nobody sees that they are.
void Fuzzer::shares() {
  swv_work* work = nullptr;
  swv_layout* layout = nullptr;
  swv_op* op = nullptr;
  swv_module* module = nullptr;
  swv_plan* plan = nullptr;
  swv_optimizer* optimizer = nullptr;
  swv_trace* trace = nullptr;
  if (done(swv_work_share(pick(works_), &work))) keep(works_, work, swv_work_free, 4);
  if (done(swv_layout_share(pick(layouts_), &layout))) keep(layouts_, layout, swv_layout_free, 12);
  if (done(swv_op_share(pick(ops_), &op))) keep(ops_, op, swv_op_free, 30);
  if (done(swv_module_share(pick(modules_), &module))) keep(modules_, module, swv_module_free, 5);
  if (done(swv_plan_share(pick(plans_), one_in(9) ? nullptr : &plan)))
    keep(plans_, plan, swv_plan_free, 5);
  if (done(swv_optimizer_share(pick(optimizers_), &optimizer)))
    keep(optimizers_, optimizer, swv_optimizer_free, 5);
  if (traces_.size() < 3 && done(swv_trace_share(pick(traces_), &trace))) traces_.push_back(trace);
}

// What is set for the process. Checks only come and go where they were not there from the beginning:
// handles are freed twice otherwise.
void Fuzzer::switches() {
  static std::atomic<int64_t> lines{0};
  const auto count = [](void*, const char* message) { lines += *message != 0; };
  auto* const drops = new int64_t(0);
  if (!one_in(4)) {
    done(swv_set_log(nullptr, drops, [](void* data) { delete static_cast<int64_t*>(data); }));
  } else {
    done(swv_set_log(count, drops, [](void* data) { delete static_cast<int64_t*>(data); }));
  }
  const bool checked = swv_live_handles() >= 0;
  done(swv_set_handle_checks(one_in(4) ? 3 : checked ? 1 : 0));
}

// What chance alone seldom puts together.
void Fuzzer::guided() {
  swv_tensor *parameter = nullptr, *state = nullptr, *part = nullptr;
  swv_optimizer* optimizer = nullptr;
  swv_module* module = nullptr;
  swv_mesh *mesh = nullptr, *two = nullptr;
  swv_string* text_of_it = nullptr;
  swv_op* op = nullptr;
  swv_tensor_options with_grad = SWV_TENSOR_OPTIONS_INIT;
  with_grad.requires_grad = 1;
  const int64_t sizes[] = {3};
  const swv_mesh_dim dim = {"x", size_}, dims[] = {{"a", size_}, {"b", 1}};
  std::vector<int32_t> ranks;
  for (int32_t r = 0; r < size_; ++r) ranks.push_back(r);
  guided_autograd();
  const float three[] = {1, 2, 3};
  float back[3] = {};
  if (done(swv_tensor_from_data(three, sizeof(three), sizes, 1, nullptr, &part))) {
    done(swv_tensor_copy_to_host(part, back, sizeof(back)));
    done(swv_tensor_copy_from_host(part, back, sizeof(back)));
    if (done(swv_tensor_share(part, &state))) swv_tensor_free(state);
    keep(part);
  }
  if (alone_) {
    swv_world* world = nullptr;
    swv_comm* comm = nullptr;
    const int64_t count[] = {static_cast<int64_t>(below(4))};
    const swv_buffer from = buffer_of(kept_, count[0], SWV_DTYPE_F32);
    const swv_buffer to = buffer_of(kept_ + 8, count[0], SWV_DTYPE_F32);
    must(swv_world_create_local(1, nullptr, &world));
    must(swv_world_comm(world, &comm));
    done(swv_comm_all_gather_v(comm, &from, &to, count, 1, nullptr, nullptr));
    done(swv_comm_reduce_scatter_v(comm, &from, &to, count, 1, SWV_REDUCE_SUM, nullptr, nullptr));
    done(swv_comm_all_to_all_v(comm, &from, count, &to, count, 1, nullptr, nullptr));
    swv_work *work = nullptr, *same = nullptr;
    swv_collective barrier = SWV_COLLECTIVE_INIT;
    barrier.kind = SWV_COLLECTIVE_BARRIER;
    if (done(swv_comm_start(comm, &barrier, &work))) {
      done(swv_work_share(work, &same));
      done(swv_work_wait(same));
      swv_work_free(same);
      swv_work_free(work);
    }
    swv_comm_free(comm);
    swv_world_free(world);
  }
  part = state = nullptr;
  must(swv_tensor_ones(sizes, 1, &with_grad, &parameter));
  must(swv_module_create(&module));
  must(swv_module_add_parameter(module, "a.b", parameter));
  if (one_in(2)) done(swv_module_add_parameter(module, "c", parameter));
  must(swv_module_add_buffer(module, "a.c", parameter));
  if (done(swv_module_buffer(module, below(2), &text_of_it, &part))) {
    swv_string_free(text_of_it);
    keep(part);
  }
  if (done(swv_module_parameter(module, below(2), nullptr, &part))) keep(part);
  if (done(swv_module_get(module, one_in(2) ? "a.b" : "c", &part))) keep(part);
  swv_tensor* const all[] = {parameter};
  must(swv_optimizer_create_adamw(all, 1, nullptr, &optimizer));
  if (done(swv_optimizer_state(optimizer, 0, "exp_avg", &state))) {
    done(swv_optimizer_set_state(optimizer, 0, "exp_avg", one_in(4) ? parameter : state));
    swv_tensor_free(state);
  }
  swv_optimizer_free(optimizer);
  swv_module_free(module);
  swv_tensor_free(parameter);
  if (done(swv_mesh_create_from_ranks(worlds_[0], &dim, 1, ranks.data(), ranks.size(), &mesh))) {
    done(swv_mesh_set_cost_model_from_json(
        mesh,
        R"({"links": {"x": {"latency": 1e-6, "bandwidth": 7}}, "device": {"flops": 9, "bandwidth": 8}})"));
    const char* const ways[] = {"S(0) -> S(0)", one_in(4) ? text() : "S(1) -> S(1)"};
    done(swv_mesh_add_rule(mesh, one_in(4) ? text() : "aten::selu", ways, 1 + below(2)));
    if (done(swv_mesh_unflatten(mesh, "x", dims, 2, &two))) {
      swv_mesh* slice = nullptr;
      const char* const first[] = {one_in(4) ? text() : "a"};
      if (done(swv_mesh_slice(two, first, 1, &slice))) swv_mesh_free(slice);
      swv_mesh_free(two);
    }
    with_grad.mesh = mesh;
    swv_tensor* cut = nullptr;
    must(swv_op_find("aten::relu", &op));
    if (done(swv_tensor_ones(sizes, 1, &with_grad, &cut))) {
      const swv_value argument = swv_value_tensor(cut);
      drop(swv_op_explain(op, &argument, 1, &text_of_it, nullptr), &text_of_it);
      drop(swv_tensor_picture(cut, &text_of_it), &text_of_it);
      swv_tensor_free(cut);
    }
    swv_op_free(op);
    swv_mesh_free(mesh);
  }
}

}  // namespace shardweave::capi
