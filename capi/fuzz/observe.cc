// What only looks, or does little; traces and pictures.
#include "fuzzer.h"

namespace shardweave::capi {

void Fuzzer::queries() {
  swv_string* string = nullptr;
  swv_mesh* mesh = nullptr;
  swv_comm* comm = nullptr;
  swv_tensor* t = nullptr;
  swv_scope* scope = nullptr;
  swv_bool yes;
  int32_t i;
  int32_t n, out[16];
  size_t count;
  double lr;
  swv_dtype dtype;
  swv_device device;
  const swv_random_state state = SWV_RANDOM_STATE_INIT;
  swv_dispatch_counters dispatch = SWV_DISPATCH_COUNTERS_INIT;
  swv_comm_counter counters[20];
  swv_link_cost costs[2] = {{1e-6, 1e9}, {1e-6, 1e10}};
  swv_device_cost device_cost = SWV_DEVICE_COST_INIT;
  const swv_mesh_dim dims[] = {{text(), one_in(4) ? number() : 1}, {text(), 1}};
  const int32_t members[] = {one_in(4) ? small() : 0, 0};
  switch (below(8)) {
    case 0:
      if (swv_version() != SWV_VERSION || *swv_build_info() == 0 || *swv_code_name(small()) == 0 ||
          *swv_dtype_name(small()) == 0) {
        std::abort();
      }
      if (swv_string_size(nullptr) != 0 || *swv_string_data(nullptr) != 0) std::abort();
      done(swv_world_rank(pick(worlds_), &i));
      done(swv_world_size(pick(worlds_), one_in(9) ? nullptr : &i));
      done(swv_world_local_rank(pick(worlds_), &i));
      done(swv_world_counters(pick(worlds_), one_in(9) ? nullptr : counters, below(21), &count));
      break;
    case 1:
      done(swv_comm_rank(pick(comms_), &i));
      done(swv_comm_size(pick(comms_), &i));
      drop(swv_comm_name(pick(comms_), &string), &string);
      drop(swv_comm_backend(pick(comms_), &string), &string);
      done(swv_comm_world_ranks(pick(comms_), out, below(17), &count));
      done(swv_comm_counters(pick(comms_), counters, below(21), &count));
      done(swv_comm_health(pick(comms_)));
      break;
    case 2:
      done(swv_mesh_ndim(pick(meshes_), &i));
      done(swv_mesh_size(pick(meshes_), &n));
      done(swv_mesh_ranks(pick(meshes_), one_in(9) ? nullptr : out, below(17), &count));
      done(swv_mesh_equal(pick(meshes_), pick(meshes_), &yes));
      done(swv_mesh_random_state(pick(meshes_), one_in(9) ? nullptr : sized(state)));
      done(swv_mesh_cost_model(pick(meshes_), one_in(9) ? nullptr : costs, below(3), &count,
                               one_in(2) ? nullptr : &device_cost));
      if (one_in(4)) {
        costs[below(2)].latency = one_in(3) ? -1.0 : 1e-6;
        if (one_in(2)) {
          done(swv_mesh_set_cost_model(pick(meshes_), costs, below(3), &device_cost));
        } else {
          done(swv_mesh_set_cost_model_from_json(pick(meshes_), text()));
        }
      }
      done(swv_mesh_dispatch_counters(pick(meshes_), one_in(30) ? nullptr : sized(dispatch)));
      break;
    case 3:
      if (one_in(3)) {
        if (done(swv_mesh_share(pick(meshes_), &mesh))) keep(meshes_, mesh, swv_mesh_free, 6);
      } else if (one_in(2)) {
        if (done(swv_mesh_unflatten(pick(meshes_), text(), dims, length(2), &mesh)))
          keep(meshes_, mesh, swv_mesh_free, 6);
      } else if (done(swv_mesh_create_from_ranks(pick(worlds_), dims, length(2), members, length(2),
                                                 &mesh))) {
        keep(meshes_, mesh, swv_mesh_free, 6);
      }
      if (done(swv_mesh_comm(pick(meshes_), small(), &comm))) swv_comm_free(comm);
      done(swv_mesh_connect(pick(meshes_)));
      break;
    case 4:
      if (scopes_.size() < 4 && one_in(4)) {
        if (done(swv_mesh_forbid_communication(pick(meshes_), &scope))) scopes_.push_back(scope);
      } else if (!scopes_.empty()) {
        swv_scope_free(scopes_.back());
        scopes_.pop_back();
      }
      done(swv_layout_mesh_ndim(pick(layouts_), &i));
      done(swv_layout_equal(pick(layouts_), pick(layouts_), &yes));
      break;
    case 5:
      done(swv_tensor_ndim(pick(tensors_), &i));
      done(swv_tensor_dtype(pick(tensors_), &dtype));
      done(swv_tensor_device(pick(tensors_), &device));
      done(swv_tensor_is_sharded(pick(tensors_), &yes));
      done(swv_tensor_requires_grad(pick(tensors_), &yes));
      drop(swv_op_schema(pick(ops_), &string), &string);
      break;
    case 6:
      done(swv_module_num_parameters(pick(modules_), &count));
      if (done(swv_module_buffer(pick(modules_), below(3), one_in(2) ? nullptr : &string, &t))) {
        swv_string_free(string);
        keep(t);
      }
      done(swv_module_buffer_is_persistent(pick(modules_), below(3), &yes));
      done(swv_module_zero_grad(pick(modules_)));
      done(swv_optimizer_lr(pick(optimizers_), &lr));
      break;
    default:
      done(swv_seed(static_cast<uint64_t>(number())));
      swv_value_clear(nullptr);
      swv_status_free(swv_status_new(small(), text()));
      if (swv_status_code(nullptr) != SWV_CODE_OK || *swv_status_message(nullptr) != 0 ||
          swv_status_rank(nullptr) != -1)
        std::abort();
  }
}

void Fuzzer::observe() {
  swv_trace* trace = nullptr;
  swv_scope* scope = nullptr;
  swv_random_state state = SWV_RANDOM_STATE_INIT;
  swv_string* string = nullptr;
  size_t ndim = 0, count = 0;
  int64_t bytes = 0;
  const int64_t* s = sizes(&ndim);
  switch (below(6)) {
    case 0:
      if (traces_.size() < 3 && one_in(2)) {
        if (done(swv_trace_create(pick(meshes_), &trace))) traces_.push_back(trace);
      } else if (!traces_.empty()) {  // in any order
        const size_t i = below(traces_.size());
        swv_trace_free(traces_[i]);
        traces_.erase(traces_.begin() + static_cast<std::ptrdiff_t>(i));
      }
      break;
    case 1:
      done(swv_trace_num_events(pick(traces_), &count));
      done(swv_trace_bytes(pick(traces_), &bytes));
      drop(swv_trace_to_string(pick(traces_), &string), &string);
      drop(swv_trace_to_json(pick(traces_), &string), &string);
      if (one_in(4)) done(swv_trace_clear(pick(traces_)));
      break;
    case 2:
      if (scopes_.size() < 4 && one_in(2)) {
        if (done(one_in(3) ? swv_mesh_enter_source(pick(meshes_), text(), &scope)
                           : swv_mesh_enter_module(pick(meshes_), text(), &scope)))
          scopes_.push_back(scope);
      } else if (!scopes_.empty()) {  // in any order
        const size_t i = below(scopes_.size());
        swv_scope_free(scopes_[i]);
        scopes_.erase(scopes_.begin() + static_cast<std::ptrdiff_t>(i));
      }
      break;
    case 3:
      state.seed = static_cast<uint64_t>(number());
      if (scopes_.size() < 4 && one_in(2)) {
        if (done(swv_mesh_use_random_state(pick(meshes_), one_in(9) ? nullptr : sized(state),
                                           &scope)))
          scopes_.push_back(scope);
      } else {
        shares();
        if (alone_) switches();
      }
      break;
    case 4:
      drop(swv_tensor_picture(pick(tensors_), &string), &string);
      break;
    default:
      drop(swv_layout_picture(pick(layouts_), pick(meshes_), s, ndim, &string), &string);
  }
}
}  // namespace shardweave::capi
