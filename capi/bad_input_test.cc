// What is wrong is an error that names function and argument, never a crash: every function with
// NULL and zeros, then one kind of mistake after the other. Runs in checked mode.
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "ATen/dlpack.h"
#include "gtest/gtest.h"
#include "shardweave.h"
#include "testing/buffer.h"

namespace {

// --- helpers -------------------------------------------------------------------------------------

struct Result {
  swv_code code = SWV_CODE_OK;
  std::string message;
};
Result result_of(swv_status* status) {
  Result result{swv_status_code(status), swv_status_message(status)};
  swv_status_free(status);
  return result;
}
void expect_fails(swv_status* status, swv_code code, const std::string& part) {
  const Result result = result_of(status);
  EXPECT_EQ(result.code, code) << result.message;
  EXPECT_NE(result.message.find(part), std::string::npos)
      << "want '" << part << "' in: " << result.message;
}
void expect_ok(swv_status* status) {
  const Result result = result_of(status);
  EXPECT_EQ(result.code, SWV_CODE_OK) << result.message;
}

template <typename T>
T* made(const std::function<swv_status*(T**)>& make) {
  T* handle = nullptr;
  expect_ok(make(&handle));
  return handle;
}

// A world, a mesh and a tensor of one rank.
class BadInputTest : public testing::Test {
 protected:
  void SetUp() override {
    before_ = swv_live_handles();
    expect_ok(swv_world_create_local(1, nullptr, &world_));
    const swv_mesh_dim dim = {"x", 1};
    expect_ok(swv_mesh_create(world_, &dim, 1, &mesh_));
    const int64_t sizes[] = {2, 3};
    expect_ok(swv_tensor_ones(sizes, 2, nullptr, &tensor_));
    expect_ok(swv_op_find("aten::add.Tensor", &add_));
  }
  void TearDown() override {
    swv_op_free(add_);
    swv_tensor_free(tensor_);
    swv_mesh_free(mesh_);
    swv_world_free(world_);
    EXPECT_EQ(swv_live_handles(), before_) << "leaked";
  }

  int64_t before_ = 0;
  swv_world* world_ = nullptr;
  swv_mesh* mesh_ = nullptr;
  swv_tensor* tensor_ = nullptr;
  swv_op* add_ = nullptr;
};

// --- NULL everywhere -----------------------------------------------------------------------------

struct Function {
  const char* name;
  std::function<swv_status*()> call_with_zeros;
};
template <typename... Arguments>
Function function(const char* name, swv_status* (*f)(Arguments...)) {
  return {name, [f] { return f(Arguments{}...); }};
}
#define F(name) function(#name, &name)

// clang-format off
const std::vector<Function> kFunctions = {
  F(swv_run_ranks), F(swv_world_create_local), F(swv_world_from_environment), F(swv_world_join),
    F(swv_world_create_counting), F(swv_world_share), F(swv_world_rank), F(swv_world_size),
    F(swv_world_local_rank), F(swv_world_comm), F(swv_world_abort), F(swv_comm_share),
    F(swv_comm_rank), F(swv_comm_size), F(swv_comm_name), F(swv_comm_backend),
    F(swv_comm_world_ranks), F(swv_comm_start), F(swv_comm_all_reduce), F(swv_comm_all_gather),
    F(swv_comm_all_gather_v), F(swv_comm_reduce_scatter), F(swv_comm_reduce_scatter_v),
    F(swv_comm_all_to_all), F(swv_comm_all_to_all_v), F(swv_comm_broadcast), F(swv_comm_reduce),
    F(swv_comm_gather), F(swv_comm_scatter), F(swv_comm_send), F(swv_comm_recv),
    F(swv_comm_barrier), F(swv_work_is_done), F(swv_work_wait), F(swv_work_wait_on),
    F(swv_comm_coalesce),
    F(swv_coalescing_finish), F(swv_comm_split), F(swv_comm_subgroup), F(swv_comm_abort),
    F(swv_comm_health), F(swv_world_create_with_backend), F(swv_mesh_create), F(swv_mesh_parse),
    F(swv_mesh_create_from_ranks), F(swv_mesh_share), F(swv_mesh_slice), F(swv_mesh_flatten),
    F(swv_mesh_unflatten), F(swv_mesh_ndim), F(swv_mesh_size), F(swv_mesh_shape),
    F(swv_mesh_dim_name), F(swv_mesh_find_dim), F(swv_mesh_coordinate), F(swv_mesh_ranks),
    F(swv_mesh_comm), F(swv_mesh_connect), F(swv_mesh_to_string), F(swv_mesh_equal),
    F(swv_mesh_forbid_communication), F(swv_mesh_set_cost_model), F(swv_mesh_set_cost_model_from_json),
    F(swv_mesh_measure_cost_model), F(swv_mesh_cost_model), F(swv_mesh_add_rule),
    F(swv_layout_create), F(swv_layout_parse),
    F(swv_layout_create_named), F(swv_layout_to_string), F(swv_layout_mesh_ndim),
    F(swv_layout_placement), F(swv_layout_equal), F(swv_layout_local_extent), F(swv_layout_plan),
    F(swv_tensor_empty), F(swv_tensor_zeros), F(swv_tensor_ones), F(swv_tensor_full),
    F(swv_tensor_rand), F(swv_tensor_randn), F(swv_tensor_from_data), F(swv_tensor_from_dlpack),
    F(swv_tensor_to_dlpack), F(swv_tensor_share), F(swv_tensor_is_same), F(swv_tensor_ndim),
    F(swv_tensor_numel), F(swv_tensor_sizes), F(swv_tensor_strides), F(swv_tensor_dtype),
    F(swv_tensor_device), F(swv_tensor_is_sharded), F(swv_tensor_to_string), F(swv_tensor_values_to_string),
    F(swv_tensor_copy_to_host), F(swv_tensor_copy_from_host), F(swv_tensor_buffer),
    F(swv_tensor_distribute), F(swv_tensor_from_local), F(swv_tensor_to_local),
    F(swv_tensor_redistribute), F(swv_tensor_full_tensor), F(swv_tensor_layout),
    F(swv_tensor_mesh), F(swv_op_find), F(swv_op_schema), F(swv_op_call), F(swv_op_call_named),
    F(swv_tensor_item), F(swv_tensor_requires_grad), F(swv_tensor_set_requires_grad),
    F(swv_tensor_clear_requires_grad),
    F(swv_tensor_is_leaf), F(swv_tensor_detach), F(swv_tensor_grad), F(swv_tensor_set_grad),
    F(swv_tensor_backward), F(swv_gradients), F(swv_function_apply), F(swv_checkpoint),
    F(swv_function_context_save), F(swv_function_context_saved), F(swv_mesh_seed),
    F(swv_mesh_random_state), F(swv_mesh_set_random_state), F(swv_mesh_use_random_state), F(swv_set_num_threads),
    F(swv_module_create), F(swv_module_create_by_kind), F(swv_module_load), F(swv_module_add_parameter),
    F(swv_module_add_buffer), F(swv_module_num_parameters), F(swv_module_parameter),
    F(swv_module_num_buffers), F(swv_module_buffer), F(swv_module_buffer_is_persistent), F(swv_module_get), F(swv_module_call),
    F(swv_module_call_named), F(swv_module_patch), F(swv_function_context_original), F(swv_module_add_child), F(swv_module_child), F(swv_module_train), F(swv_deferred_init), F(swv_module_materialize),
    F(swv_tensor_is_deferred), F(swv_module_fully_shard), F(swv_mesh_reshard), F(swv_mesh_fully_shard_no_sync), F(swv_mesh_fully_shard_counters), F(swv_module_full_params), F(swv_full_params_get), F(swv_full_params_end), F(swv_grad_sync_create), F(swv_grad_sync_no_sync), F(swv_grad_sync_discard), F(swv_grad_sync_counts),
    F(swv_grad_sync_num_states), F(swv_grad_sync_state), F(swv_grad_sync_set_states),
    F(swv_module_distributed_data_parallel), F(swv_module_pre_dp_transform),
    F(swv_module_broadcast_buffers), F(swv_module_enable_2d_with_fsdp), F(swv_mesh_join_batch),
    F(swv_token_file_open), F(swv_token_file_share), F(swv_token_file_num_tokens), F(swv_token_file_dtype),
    F(swv_token_file_vocab_size), F(swv_token_file_read), F(swv_loader_create), F(swv_loader_share),
    F(swv_loader_num_samples), F(swv_loader_next), F(swv_loader_position), F(swv_loader_set_position),
    F(swv_module_dump), F(swv_module_memory), F(swv_module_list_communication), F(swv_module_verify),
    F(swv_module_is_training), F(swv_module_forward), F(swv_forward_share), F(swv_forward_begin),
    F(swv_forward_end), F(swv_plan_from_hugging_face), F(swv_plan_from_zoo), F(swv_plan_from_styles), F(swv_plan_auto), F(swv_plan_add_layout), F(swv_plan_add_forward),
    F(swv_plan_add_forward_layout), F(swv_plan_add_module), F(swv_plan_append), F(swv_module_set_sharding), F(swv_plan_resolve), F(swv_mesh_enter_source),
    F(swv_plan_create), F(swv_plan_from_json), F(swv_plan_to_json), F(swv_plan_add),
    F(swv_module_distribute), F(swv_module_finish_grad_sync),
    F(swv_module_zero_grad), F(swv_optimizer_create_sgd), F(swv_optimizer_create_adamw),
    F(swv_optimizer_create_adam), F(swv_optimizer_create_lion), F(swv_optimizer_use_zero),
    F(swv_optimizer_create_adafactor), F(swv_optimizer_create_muon), F(swv_optimizer_create_groups),
    F(swv_optimizer_num_groups), F(swv_optimizer_group_lr), F(swv_optimizer_set_group_lr),
    F(swv_optimizer_apply_schedule), F(swv_schedule_factor), F(swv_grad_scaler_create),
    F(swv_grad_scaler_scale), F(swv_grad_scaler_unscale), F(swv_grad_scaler_update),
    F(swv_grad_scaler_state), F(swv_grad_scaler_set_state),
    F(swv_captured_step_create), F(swv_captured_step_replay), F(swv_captured_step_replays),
    F(swv_optimizer_no_sync), F(swv_optimizer_discard),
    F(swv_optimizer_step), F(swv_optimizer_zero_grad), F(swv_optimizer_lr),
    F(swv_optimizer_set_lr), F(swv_optimizer_state), F(swv_optimizer_set_state), F(swv_comm_counters), F(swv_world_counters),
    F(swv_world_flight_record), F(swv_mesh_dispatch_counters),
    F(swv_trace_create), F(swv_trace_clear), F(swv_trace_num_events), F(swv_trace_bytes),
    F(swv_trace_to_string), F(swv_trace_to_json), F(swv_mesh_enter_module),
    F(swv_work_share), F(swv_layout_share), F(swv_op_share), F(swv_module_share), F(swv_plan_share),
    F(swv_optimizer_share), F(swv_trace_share),
    F(swv_tensor_picture), F(swv_layout_picture), F(swv_op_explain),
    F(swv_state_create), F(swv_state_share), F(swv_state_add_tensor), F(swv_state_add_module),
    F(swv_state_add_optimizer), F(swv_state_add_random), F(swv_state_set_value), F(swv_state_value),
    F(swv_state_add_loader), F(swv_list_checkpoints), F(swv_find_checkpoint),
    F(swv_checkpointer_create), F(swv_checkpointer_open), F(swv_checkpointer_save), F(swv_checkpointer_save_async),
    F(swv_checkpointer_wait_for_copy), F(swv_checkpointer_wait), F(swv_checkpointer_load), F(swv_state_load),
    F(swv_read_pretrained_config), F(swv_module_load_pretrained), F(swv_module_save_pretrained),
    F(swv_verify_checkpoint), F(swv_safetensors_open), F(swv_safetensors_share),
    F(swv_safetensors_num_tensors), F(swv_safetensors_tensor), F(swv_safetensors_read),
    F(swv_safetensors_write),
    F(swv_metrics_writer_open_json_lines), F(swv_metrics_writer_create_events),
    F(swv_metrics_writer_write), F(swv_metrics_writer_flush),
};
// clang-format on

TEST_F(BadInputTest, EveryFunctionRefusesNullAndNamesItself) {
  for (const Function& f : kFunctions) {
    const std::string name = f.name;
    const Result result = result_of(f.call_with_zeros());
    EXPECT_NE(result.code, SWV_CODE_OK) << name;
    EXPECT_EQ(result.message.rfind(name + ": ", 0), 0u) << result.message;
    EXPECT_NE(result.message.find("argument '"), std::string::npos) << result.message;
  }
}

TEST_F(BadInputTest, FreesAndAccessorsTakeNull) {
  swv_status_free(nullptr);
  swv_string_free(nullptr);
  swv_world_free(nullptr);
  swv_comm_free(nullptr);
  swv_work_free(nullptr);
  swv_coalescing_free(nullptr);
  swv_mesh_free(nullptr);
  swv_scope_free(nullptr);
  swv_layout_free(nullptr);
  swv_tensor_free(nullptr);
  swv_op_free(nullptr);
  swv_module_free(nullptr);
  swv_plan_free(nullptr);
  swv_forward_free(nullptr);
  swv_optimizer_free(nullptr);
  swv_trace_free(nullptr);
  swv_state_free(nullptr);
  swv_checkpointer_free(nullptr);
  swv_safetensors_free(nullptr);
  swv_metrics_writer_free(nullptr);
  swv_captured_step_free(nullptr);
  swv_value_clear(nullptr);
  EXPECT_EQ(swv_status_code(nullptr), SWV_CODE_OK);
  EXPECT_STREQ(swv_status_message(nullptr), "");
  EXPECT_STREQ(swv_string_data(nullptr), "");
  EXPECT_EQ(swv_string_size(nullptr), 0u);
  EXPECT_STREQ(swv_code_name(99), "UNKNOWN_CODE");
  EXPECT_STREQ(swv_dtype_name(-1), "unknown");
  EXPECT_EQ(swv_dtype_size(99), 0u);
  swv_status* status = swv_status_new(77, nullptr);
  EXPECT_EQ(swv_status_code(status), SWV_CODE_UNKNOWN);
  swv_status_free(status);
}

// --- handles -------------------------------------------------------------------------------------

TEST_F(BadInputTest, RoomThatNoArrayHas) {
  int64_t sizes[1] = {};
  int32_t ranks[1] = {};
  swv_link_cost links[1];
  size_t count = 7;
  const size_t minus_one = SIZE_MAX;
  expect_fails(swv_mesh_shape(mesh_, sizes, minus_one, &count), SWV_CODE_INVALID_ARGUMENT,
               "argument 'sizes' has room for 18446744073709551615 elements");
  expect_fails(swv_mesh_ranks(mesh_, ranks, minus_one - 3, &count), SWV_CODE_INVALID_ARGUMENT,
               "argument 'ranks' has room for");
  expect_fails(swv_mesh_cost_model(mesh_, links, minus_one, &count, nullptr),
               SWV_CODE_INVALID_ARGUMENT, "argument 'links' has room for");
  EXPECT_EQ(count, 7);
}

TEST_F(BadInputTest, HandlesOfTheWrongKind) {
  int32_t number = 0;
  expect_fails(swv_mesh_ndim(reinterpret_cast<swv_mesh*>(tensor_), &number),
               SWV_CODE_INVALID_ARGUMENT,
               "swv_mesh_ndim: argument 'mesh' is a swv_tensor; wanted a swv_mesh");
  swv_value value = swv_value_tensor(reinterpret_cast<swv_tensor*>(mesh_));
  const swv_value both[] = {value, value};
  expect_fails(swv_op_call(add_, SWV_MODE_GRAD, both, 2, &value, 1, nullptr),
               SWV_CODE_INVALID_ARGUMENT, "is a swv_mesh; wanted a swv_tensor");
}

TEST_F(BadInputTest, HandlesThatWereFreedOrNeverWere) {
  swv_tensor* second = nullptr;
  expect_ok(swv_tensor_share(tensor_, &second));
  swv_tensor_free(second);
  int32_t ndim = 0;
  expect_fails(swv_tensor_ndim(second, &ndim), SWV_CODE_INVALID_ARGUMENT,
               "swv_tensor_ndim: argument 'tensor' is a swv_tensor that was freed");
  testing::internal::CaptureStderr();
  swv_tensor_free(second);
  swv_mesh_free(reinterpret_cast<swv_mesh*>(tensor_));
  swv_tensor_free(reinterpret_cast<swv_tensor*>(&ndim));
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("swv_tensor_free: the argument is a swv_tensor that was freed"),
            std::string::npos)
      << said;
  EXPECT_NE(said.find("swv_mesh_free: the argument is a swv_tensor; wanted a swv_mesh"),
            std::string::npos)
      << said;
  EXPECT_NE(said.find("swv_tensor_free: the argument is no handle"), std::string::npos) << said;
  expect_ok(swv_tensor_ndim(tensor_, &ndim));
}

// --- structs, numbers, text ----------------------------------------------------------------------

TEST_F(BadInputTest, StructSizes) {
  const int64_t sizes[] = {2};
  swv_tensor* out = nullptr;
  swv_tensor_options options = SWV_TENSOR_OPTIONS_INIT;
  for (size_t wrong : {size_t{0}, size_t{7}, options.struct_size - 1, size_t{1} << 40}) {
    options.struct_size = wrong;
    expect_fails(swv_tensor_ones(sizes, 1, &options, &out), SWV_CODE_INVALID_ARGUMENT,
                 "argument 'options' has struct_size " + std::to_string(wrong));
  }
  // A later version's struct: welcome as long as it says nothing that this one does not know.
  struct {
    swv_tensor_options options;
    int64_t more;
  } grown = {SWV_TENSOR_OPTIONS_INIT, 0};
  grown.options.struct_size += 8;
  expect_ok(swv_tensor_ones(sizes, 1, &grown.options, &out));
  swv_tensor_free(out);
  grown.more = 1;
  expect_fails(swv_tensor_ones(sizes, 1, &grown.options, &out), SWV_CODE_UNIMPLEMENTED,
               "does not know");
}

// --- memory of others, and what is no memory -----------------------------------------------------

TEST_F(BadInputTest, StridesOfDlpackThatLibTorchDoesNotHave) {
  constexpr int64_t kFar = std::numeric_limits<int64_t>::max() / 2;
  const struct {
    int64_t shape[2], strides[2];
    const char* wanted;  // null: it is right
  } cases[] = {
      {{2, 3}, {3, -1}, "has stride -1 in dimension 1; wanted 0 or more"},
      {{2, 3}, {std::numeric_limits<int64_t>::min(), 1}, "in dimension 0; wanted 0 or more"},
      {{2, 3}, {kFar, 1}, "in dimension 0 of 2 elements, which reaches beyond all memory"},
      {{3, 2}, {kFar, 1}, "in dimension 0 of 3 elements, which reaches beyond all memory"},
      {{2, 3}, {1, 2}, nullptr},
      {{2, 3}, {0, 0}, nullptr},
      {{0, 3}, {-3, 1}, nullptr},
      {{1, 6}, {-6, 1}, nullptr},
  };
  for (auto c : cases) {
    SCOPED_TRACE(c.wanted == nullptr ? "right" : c.wanted);
    float data[7] = {0, 1, 2, 3, 4, 5, 6};
    bool is_deleted = false;
    DLManagedTensorVersioned managed = {};
    managed.version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
    managed.manager_ctx = &is_deleted;
    managed.deleter = [](DLManagedTensorVersioned* self) {
      *static_cast<bool*>(self->manager_ctx) = true;
    };
    managed.dl_tensor = {data, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, c.shape, c.strides, 4};
    swv_tensor* tensor = nullptr;
    swv_status* const status = swv_tensor_from_dlpack(&managed, nullptr, &tensor);
    if (c.wanted == nullptr) {
      expect_ok(status);
      float got[6] = {};
      expect_ok(swv_tensor_copy_to_host(tensor, got, 4 * c.shape[0] * c.shape[1]));
      if (c.shape[0] != 0) {
        EXPECT_EQ(got[0], 1);  // behind the offset
        EXPECT_EQ(got[5], 1 + (c.shape[0] - 1) * c.strides[0] + (c.shape[1] - 1) * c.strides[1]);
      }
      swv_tensor_free(tensor);
      EXPECT_EQ(managed.dl_tensor.data, data);
      EXPECT_EQ(managed.dl_tensor.byte_offset, 4);
    } else {
      expect_fails(status, SWV_CODE_INVALID_ARGUMENT, c.wanted);
    }
    EXPECT_TRUE(is_deleted);
  }
}

// LibTorch reads and writes memory that such tensors do not have.
TEST_F(BadInputTest, TensorsWithoutMemory) {
  const int64_t sizes[] = {3};
  const swv_value shape = swv_value_ints(sizes, 1);
  const struct {
    const char* op;
    swv_value argument;
    const char* why;
  } cases[] = {
      {"aten::to_mkldnn", swv_value_tensor(tensor_), "it is not dense, but Mkldnn"},
      {"aten::to_sparse", swv_value_tensor(tensor_), "it is not dense, but Sparse"},
      {"aten::_to_sparse_csr", swv_value_tensor(tensor_), "it is not dense, but SparseCsr"},
      {"aten::_efficientzerotensor", shape, nullptr},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.op);
    swv_op* op = nullptr;
    expect_ok(swv_op_find(c.op, &op));
    swv_value made = SWV_NONE;
    expect_ok(swv_op_call(op, SWV_MODE_NO_GRAD, &c.argument, 1, &made, 1, nullptr));
    swv_op_free(op);
    swv_tensor* const tensor = made.as.tensor;
    float data[6] = {};
    swv_buffer buffer = SWV_BUFFER_INIT;
    DLManagedTensorVersioned* managed = nullptr;
    const char* const why = c.why == nullptr ? "has no memory: it is a zero" : c.why;
    expect_fails(swv_tensor_buffer(tensor, &buffer), SWV_CODE_INVALID_ARGUMENT, why);
    expect_fails(swv_tensor_to_dlpack(tensor, nullptr, &managed), SWV_CODE_INVALID_ARGUMENT, why);
    if (c.why != nullptr) {
      expect_fails(swv_tensor_copy_to_host(tensor, data, 24), SWV_CODE_INVALID_ARGUMENT, why);
      expect_fails(swv_tensor_copy_from_host(tensor, data, 24), SWV_CODE_INVALID_ARGUMENT, why);
    } else {
      data[0] = 7;
      expect_ok(swv_tensor_copy_to_host(tensor, data, 12));
      EXPECT_EQ(data[0], 0);
    }
    swv_value_clear(&made);
  }
}

TEST_F(BadInputTest, MessagesOfHostsAreUtf8) {
  swv_status* const status = swv_status_new_of_rank(SWV_CODE_INTERNAL, "caf\xe9 \xff\xc3\xa9", 3);
  EXPECT_EQ(swv_status_rank(status), 3);
  EXPECT_STREQ(swv_status_message(status), "caf\\xe9 \\xff\xc3\xa9");
  swv_status_free(status);
}

TEST_F(BadInputTest, AGradientOfAnotherShapeIsTheFunctions) {
  swv_function function = SWV_FUNCTION_INIT;
  function.name = "my_swiglu";
  function.forward = [](void*, const swv_function_call* call) {
    return swv_tensor_share(call->inputs[0], &call->outputs[0]);
  };
  function.backward = [](void*, const swv_function_call* call) {
    const int64_t seven[] = {7};
    return swv_tensor_ones(seven, 1, nullptr, &call->outputs[0]);
  };
  swv_tensor *x = nullptr, *y = nullptr;
  expect_ok(swv_tensor_detach(tensor_, &x));
  expect_ok(swv_tensor_set_requires_grad(x, 1));
  expect_ok(swv_function_apply(&function, SWV_MODE_GRAD, &x, 1, &y, 1));
  expect_fails(swv_tensor_backward(y, tensor_, nullptr), SWV_CODE_INVALID_ARGUMENT,
               "my_swiglu.backward: outputs[0] has shape [7]; wanted that of the input, [2, 3]");
  swv_tensor_free(y);
  // Of an input that wants none it is nobody's.
  function.backward = [](void*, const swv_function_call* call) {
    const int64_t seven[] = {7};
    swv_status* const status = swv_tensor_share(call->inputs[0], &call->outputs[0]);
    return status != nullptr ? status : swv_tensor_ones(seven, 1, nullptr, &call->outputs[1]);
  };
  const swv_tensor* const both[] = {x, tensor_};
  expect_ok(swv_function_apply(&function, SWV_MODE_GRAD, both, 2, &y, 1));
  expect_ok(swv_tensor_backward(y, tensor_, nullptr));
  swv_tensor_free(x);
  swv_tensor_free(y);
}

// A number that the dtype does not have.
TEST_F(BadInputTest, ValuesThatTheDtypeDoesNotHave) {
  swv_tensor* out = nullptr;
  swv_tensor_options options = SWV_TENSOR_OPTIONS_INIT;
  const std::pair<swv_dtype, double> wrong[] = {
      {SWV_DTYPE_U8, 300},  {SWV_DTYPE_U8, NAN},  {SWV_DTYPE_I8, -129},  {SWV_DTYPE_I64, 1e30},
      {SWV_DTYPE_U32, 5e9}, {SWV_DTYPE_F16, 1e6}, {SWV_DTYPE_F32, 1e300}};
  for (swv_mesh* mesh : {static_cast<swv_mesh*>(nullptr), mesh_}) {
    options.mesh = mesh;
    for (const auto& [dtype, value] : wrong) {
      options.dtype = dtype;
      expect_fails(swv_tensor_full(nullptr, 0, value, &options, &out), SWV_CODE_INVALID_ARGUMENT,
                   "argument 'value' is ");
    }
    for (const auto& [dtype, value] : {std::pair<swv_dtype, double>{SWV_DTYPE_F32, INFINITY},
                                       {SWV_DTYPE_BF16, NAN},
                                       {SWV_DTYPE_BOOL, 7},
                                       {SWV_DTYPE_U8, 255},
                                       {SWV_DTYPE_C64, 1e30}}) {
      options.dtype = dtype;
      expect_ok(swv_tensor_full(nullptr, 0, value, &options, &out));
      swv_tensor_free(out);
    }
  }
}

TEST_F(BadInputTest, Schedules) {
  swv_schedule schedule = SWV_SCHEDULE_INIT;
  double factor = 0;
  expect_ok(swv_schedule_factor(&schedule, 3, &factor));
  for (const swv_schedule_shape shape :
       {SWV_SCHEDULE_LINEAR, SWV_SCHEDULE_COSINE, SWV_SCHEDULE_WSD}) {
    schedule.shape = shape;
    schedule.steps = 0;  // the initializer's: every learning rate would be 0
    expect_fails(swv_schedule_factor(&schedule, 0, &factor), SWV_CODE_INVALID_ARGUMENT,
                 "'schedule.steps' is 0; wanted the number of steps to the end, 1 or more");
    schedule.steps = 1;
    expect_ok(swv_schedule_factor(&schedule, 0, &factor));
  }
  schedule.shape = 8;
  expect_fails(swv_schedule_factor(&schedule, 0, &factor), SWV_CODE_INVALID_ARGUMENT,
               "'schedule.shape' is 8; wanted a swv_schedule_shape, 0 to 4");
}

TEST_F(BadInputTest, SplitFactors) {
  swv_placement placement = SWV_PLACEMENT_INIT;
  placement.kind = SWV_PLACEMENT_STRIDED_SHARD;
  swv_layout* layout = nullptr;
  for (const int64_t factor : {-3, 0}) {
    placement.split_factor = factor;
    expect_fails(swv_layout_create(&placement, 1, nullptr, 0, &layout), SWV_CODE_INVALID_ARGUMENT,
                 "'placements[0].split_factor' is ");
  }
}

// What is given too much is not written, where nobody has asked for an overload with an output.
TEST_F(BadInputTest, AnArgumentTooManyIsNoOutput) {
  swv_op *relu = nullptr, *relu_out = nullptr;
  expect_ok(swv_op_find("aten::relu", &relu));
  expect_ok(swv_op_find("aten::relu.out", &relu_out));
  const int64_t sizes[] = {2, 3};
  swv_tensor* other = nullptr;
  expect_ok(swv_tensor_full(sizes, 2, 5, nullptr, &other));
  const swv_value args[] = {swv_value_tensor(tensor_), swv_value_tensor(other)};
  const auto first = [&] {
    swv_buffer buffer = SWV_BUFFER_INIT;
    expect_ok(swv_tensor_buffer(other, &buffer));
    return *static_cast<const float*>(buffer.data);
  };
  expect_fails(swv_op_call(relu, SWV_MODE_NO_GRAD, args, 2, nullptr, 0, nullptr),
               SWV_CODE_INVALID_ARGUMENT, "aten::relu: the arguments (a tensor, a tensor)");
  EXPECT_EQ(first(), 5);
  const char* const name[] = {"out"};
  expect_ok(swv_op_call_named(relu, SWV_MODE_NO_GRAD, args, 2, name, 1, nullptr, 0, nullptr));
  EXPECT_EQ(first(), 1);
  expect_ok(swv_op_call(relu_out, SWV_MODE_NO_GRAD, args, 2, nullptr, 0, nullptr));
  swv_tensor_free(other);
  swv_op_free(relu);
  swv_op_free(relu_out);
}

TEST_F(BadInputTest, CostModels) {
  size_t dims = 0;
  expect_ok(swv_mesh_cost_model(mesh_, nullptr, 0, &dims, nullptr));
  std::vector<swv_link_cost> links(dims, {1e-5, 1e9});
  swv_device_cost device = SWV_DEVICE_COST_INIT;
  const auto set = [&](size_t count) {
    return swv_mesh_set_cost_model(mesh_, links.data(), count, &device);
  };
  expect_fails(set(dims - 1), SWV_CODE_INVALID_ARGUMENT, "links; DeviceMesh(");
  expect_fails(swv_mesh_set_cost_model(mesh_, nullptr, dims, &device), SWV_CODE_INVALID_ARGUMENT,
               "argument 'links' is NULL");
  expect_fails(swv_mesh_cost_model(mesh_, nullptr, 1, &dims, nullptr), SWV_CODE_INVALID_ARGUMENT,
               "argument 'links' is NULL");
  device.flops = -1;
  expect_fails(set(dims), SWV_CODE_INVALID_ARGUMENT, "device: flops is -1; wanted a finite number");
  device.struct_size = 1;
  expect_fails(set(dims), SWV_CODE_INVALID_ARGUMENT, "argument 'device' has struct_size 1");
  expect_fails(swv_mesh_cost_model(mesh_, links.data(), dims, &dims, &device),
               SWV_CODE_INVALID_ARGUMENT, "argument 'out_device' has struct_size 1");
  expect_fails(swv_mesh_measure_cost_model(mesh_, nullptr), SWV_CODE_INVALID_ARGUMENT,
               "argument 'out_json' is NULL");
  swv_string* text = nullptr;
  expect_fails(swv_mesh_measure_cost_model(nullptr, &text), SWV_CODE_INVALID_ARGUMENT,
               "argument 'mesh' is NULL");
  EXPECT_EQ(text, nullptr);
  expect_fails(swv_mesh_set_cost_model_from_json(mesh_, "{"), SWV_CODE_INVALID_ARGUMENT,
               "is no object with");
  expect_fails(swv_mesh_set_cost_model_from_json(mesh_, "\xff"), SWV_CODE_INVALID_ARGUMENT,
               "argument 'text'");
}

TEST_F(BadInputTest, NumbersOutOfRange) {
  swv_tensor* out = nullptr;
  swv_world* world = nullptr;
  const int64_t negative[] = {-1};
  const int64_t huge[] = {int64_t{1} << 40, int64_t{1} << 40};
  const int64_t too_much[] = {int64_t{1} << 45};
  expect_fails(swv_tensor_zeros(negative, 1, nullptr, &out), SWV_CODE_INVALID_ARGUMENT,
               "'sizes' has a negative size, -1");
  expect_fails(swv_tensor_zeros(huge, 2, nullptr, &out), SWV_CODE_INVALID_ARGUMENT,
               "more than a tensor can hold");
  expect_fails(swv_tensor_empty(too_much, 1, nullptr, &out), SWV_CODE_RESOURCE_EXHAUSTED,
               "swv_tensor_empty: ");
  expect_fails(swv_tensor_zeros(huge, SIZE_MAX, nullptr, &out), SWV_CODE_INVALID_ARGUMENT,
               "at most 64");
  expect_fails(swv_tensor_zeros(nullptr, 1, nullptr, &out), SWV_CODE_INVALID_ARGUMENT,
               "'sizes' is NULL, but has 1");
  swv_tensor_options options = SWV_TENSOR_OPTIONS_INIT;
  options.dtype = 99;
  expect_fails(swv_tensor_zeros(nullptr, 0, &options, &out), SWV_CODE_INVALID_ARGUMENT,
               "'options.dtype' is 99");
  options.dtype = SWV_DTYPE_F32;
  options.requires_grad = 2;
  expect_fails(swv_tensor_zeros(nullptr, 0, &options, &out), SWV_CODE_INVALID_ARGUMENT,
               "'options.requires_grad' is 2");
  for (int32_t ranks : {0, -1, std::numeric_limits<int32_t>::max()}) {
    expect_fails(swv_world_create_local(ranks, nullptr, &world), SWV_CODE_INVALID_ARGUMENT,
                 "argument 'num_ranks'");
  }
  swv_value result = SWV_NONE;
  const swv_value args[] = {swv_value_tensor(tensor_), swv_value_tensor(tensor_)};
  expect_fails(swv_op_call(add_, 3, args, 2, &result, 1, nullptr), SWV_CODE_INVALID_ARGUMENT,
               "'mode' is 3");
  expect_fails(swv_op_call(add_, SWV_MODE_GRAD, args, SIZE_MAX, &result, 1, nullptr),
               SWV_CODE_INVALID_ARGUMENT, "'arguments' has");
  swv_value odd[] = {args[0], args[1]};
  odd[1].kind = 77;
  expect_fails(swv_op_call(add_, SWV_MODE_GRAD, odd, 2, &result, 1, nullptr),
               SWV_CODE_INVALID_ARGUMENT, "is 77");
  odd[1] = args[1];
  odd[1].reserved = 5;
  expect_fails(swv_op_call(add_, SWV_MODE_GRAD, odd, 2, &result, 1, nullptr),
               SWV_CODE_INVALID_ARGUMENT, "reserved");
}

TEST_F(BadInputTest, TextThatIsNotUtf8) {
  swv_op* op = nullptr;
  swv_layout* layout = nullptr;
  swv_module* module = nullptr;
  swv_plan* plan = nullptr;
  for (const char* bad :
       {"\xff", "aten::\xc3(", "\xed\xa0\x80", "\xc0\xaf", "\xf5\x80\x80\x80", "\xe2\x82"}) {
    expect_fails(swv_op_find(bad, &op), SWV_CODE_INVALID_ARGUMENT, "'name' is not UTF-8 at byte");
    expect_fails(swv_layout_parse(bad, &layout), SWV_CODE_INVALID_ARGUMENT, "'text' is not UTF-8");
    expect_fails(swv_plan_from_json(bad, &plan), SWV_CODE_INVALID_ARGUMENT, "'text' is not UTF-8");
    expect_fails(swv_module_load(bad, &module), SWV_CODE_INVALID_ARGUMENT, "'path' is not UTF-8");
    const swv_mesh_dim dim = {bad, 1};
    swv_mesh* mesh = nullptr;
    expect_fails(swv_mesh_create(world_, &dim, 1, &mesh), SWV_CODE_INVALID_ARGUMENT,
                 "'dims[0].name' is not UTF-8");
  }
  expect_fails(swv_op_find("aten::gr\xc3\xbc\xc3\x9f", &op), SWV_CODE_NOT_FOUND,
               "there is no operator");
}

TEST_F(BadInputTest, Plans) {
  swv_plan* plan = nullptr;
  for (const char* bad :
       {"", "{", "[]", "7", "{\"parameter\": 7}", "{\"parameters\": {}}",
        "{\"parameter\": {\"*\": \"S(0)\"}}", "{\"parameter\": {\"*\": {\"tp\": 0}}}",
        "{\"parameter\": {\"*\": {\"tp\": \"S(\"}}}", "nul"}) {
    expect_fails(swv_plan_from_json(bad, &plan), SWV_CODE_INVALID_ARGUMENT, "swv_plan_from_json: ");
  }
  const std::string deep(100000, '[');
  expect_fails(swv_plan_from_json(deep.c_str(), &plan), SWV_CODE_INVALID_ARGUMENT,
               "swv_plan_from_json: the text: is nested deeper than 100 times");
  expect_ok(swv_plan_from_json("{\"parameter\": {\"nothing.*\": {\"x\": \"S(0)\"}}}", &plan));
  swv_module* module = nullptr;
  expect_ok(swv_module_create(&module));
  expect_ok(swv_module_add_buffer(module, "here", tensor_));
  expect_fails(swv_module_distribute(module, mesh_, plan, nullptr), SWV_CODE_NOT_FOUND,
               "'nothing.*' matches no");
  swv_plan_free(plan);
  swv_module_free(module);
  expect_fails(swv_module_load("/proc/nowhere/model.pt", &module), SWV_CODE_INVALID_ARGUMENT,
               "swv_module_load: ");
}

TEST_F(BadInputTest, WhatModulesSayOfTheirSharding) {
  swv_module *module = nullptr, *library = nullptr;
  expect_ok(swv_module_create(&module));
  expect_ok(swv_module_add_parameter(module, "mlp.up", tensor_));
  for (const auto& [bad, why] :
       {std::pair("{", "no JSON on line 1"), std::pair("7", "wanted an object, not 7"),
        std::pair("{\"parameters\": {}}", "wanted \"parameter\""),
        std::pair("{\"parameter\": {\"up\":\n0}}", "\"up\""),
        std::pair("{\"forward\": {\"output\": \"S(\"}}", "\"S(\""),
        std::pair("{\"styles\": {\"a\": {\"styles\": {}}}}",
                  "wanted \"parameter\" or \"forward\"")}) {
    expect_fails(swv_module_set_sharding(module, bad), SWV_CODE_INVALID_ARGUMENT, why);
  }
  const auto refused = [&](const char* fqn, const char* sharding, const char* style, swv_code code,
                           const char* why) {
    swv_module* child = nullptr;
    expect_ok(swv_module_child(module, "mlp", &child));
    expect_ok(swv_module_set_sharding(child, sharding));
    swv_module_free(child);
    swv_plan* plan = nullptr;
    expect_ok(swv_plan_create(&plan));
    const char* const x = "x";
    expect_ok(swv_plan_add_module(plan, fqn, &x, &style, 1));
    expect_fails(swv_module_distribute(module, mesh_, plan, nullptr), code, why);
    swv_string* text = nullptr;
    expect_fails(swv_plan_resolve(plan, module, mesh_, &text, nullptr), code, why);
    swv_plan_free(plan);
  };
  refused("mpl", "{\"parameter\": {\"up\": \"S(0)\"}}", nullptr, SWV_CODE_NOT_FOUND,
          "did you mean 'mlp'");
  refused("mlp", "{}", nullptr, SWV_CODE_NOT_FOUND,
          "asks how 'mlp' shards, which it does not say; it says nothing of that");
  refused("mlp", "{\"styles\": {\"rows\": {}}}", "columns", SWV_CODE_NOT_FOUND,
          "in the style 'columns', which it does not say; it has the styles 'rows'");
  refused("mlp", "{\"parameter\": {\"down\": \"S(0)\"}}", "", SWV_CODE_INVALID_ARGUMENT,
          "names a parameter 'down', which it does not have; it has up");
  swv_module_free(module);
  expect_ok(swv_module_create_by_kind("ReLU", nullptr, &library));
  expect_fails(swv_module_set_sharding(library, "{}"), SWV_CODE_INVALID_ARGUMENT, "'module'");
  swv_module_free(library);
}

TEST_F(BadInputTest, LinesOfPlans) {
  swv_plan* plan = nullptr;
  swv_module* module = nullptr;
  swv_layout* layout = nullptr;
  swv_string* text = nullptr;
  expect_ok(swv_plan_create(&plan));
  expect_ok(swv_module_create(&module));
  expect_ok(swv_module_add_parameter(module, "here.weight", tensor_));
  expect_ok(swv_layout_parse("[S(0), R]", &layout));
  const swv_named_placement bad[] = {{"x", "S("}};
  for (auto* add : {swv_plan_add, swv_plan_add_forward}) {
    expect_fails(add(plan, "*.input", bad, 1), SWV_CODE_INVALID_ARGUMENT,
                 "cannot read the placement \"S(\"");
    expect_fails(add(plan, "*.input", nullptr, 1), SWV_CODE_INVALID_ARGUMENT,
                 "'placements' is NULL, but has 1");
    expect_fails(add(plan, "\xff", nullptr, 0), SWV_CODE_INVALID_ARGUMENT,
                 "'pattern' is not UTF-8");
  }
  for (auto* add : {swv_plan_add_layout, swv_plan_add_forward_layout}) {
    expect_fails(add(plan, "*.input", nullptr), SWV_CODE_INVALID_ARGUMENT, "'layout' is NULL");
    expect_fails(add(plan, "*.input", reinterpret_cast<swv_layout*>(plan)),
                 SWV_CODE_INVALID_ARGUMENT, "is a swv_plan; wanted a swv_layout");
  }
  const char* const x = "x";
  const char* const no_text = "\xff";
  expect_fails(swv_plan_add_module(plan, "*", nullptr, nullptr, 1), SWV_CODE_INVALID_ARGUMENT,
               "'mesh_dims' is NULL, but has 1");
  expect_fails(swv_plan_add_module(plan, "*", &no_text, nullptr, 1), SWV_CODE_INVALID_ARGUMENT,
               "'mesh_dims[0]' is not UTF-8");
  expect_fails(swv_plan_add_module(plan, "*", &x, &no_text, 1), SWV_CODE_INVALID_ARGUMENT,
               "'styles[0]' is not UTF-8");
  expect_ok(swv_plan_to_json(plan, &text));  // nothing of that was added
  EXPECT_STREQ(swv_string_data(text), "{\"parameter\":{}}");
  swv_string_free(text);
  text = nullptr;
  expect_ok(swv_plan_add_layout(plan, "*.weight", layout));
  for (int i = 0; i < 2; ++i) {  // what one says, the other does
    expect_fails(i == 0 ? swv_plan_resolve(plan, module, mesh_, &text, nullptr)
                        : swv_module_distribute(module, mesh_, plan, nullptr),
                 SWV_CODE_INVALID_ARGUMENT, "[S(0), R] has 2 placements; DeviceMesh(x=1) wants 1");
  }
  EXPECT_EQ(text, nullptr);
  swv_plan_free(plan);
  for (const char* wrong : {"{", "7", "{\"here\": \"cowlise\"}", "{\"nowhere\": \"colwise\"}"}) {
    expect_fails(swv_plan_from_hugging_face(module, wrong, nullptr, &plan),
                 SWV_CODE_INVALID_ARGUMENT, "swv_plan_from_hugging_face: ");
  }
  expect_fails(swv_plan_from_hugging_face(module, "{}", "\xff", &plan), SWV_CODE_INVALID_ARGUMENT,
               "'tp_mesh_dim' is not UTF-8");
  expect_ok(swv_plan_from_hugging_face(module, "{\"here\": \"colwise\"}", "x", &plan));
  expect_ok(swv_plan_resolve(plan, module, mesh_, nullptr, &text));
  EXPECT_NE(std::strstr(swv_string_data(text), "\"layout\":\"[S(0)]\""), nullptr)
      << swv_string_data(text);
  swv_string_free(text);
  swv_plan_free(plan);
  swv_layout_free(layout);
  swv_module_free(module);
}

TEST_F(BadInputTest, PartsOfModulesAndForwards) {
  swv_module *module = nullptr, *child = nullptr, *other = nullptr;
  swv_forward* forward = nullptr;
  swv_scope *scope = nullptr, *run = nullptr;
  swv_tensor* out = nullptr;
  const swv_tensor* const in = tensor_;
  swv_bool is_training = 0;
  expect_ok(swv_module_create(&module));
  expect_ok(swv_module_create(&child));
  expect_ok(swv_module_add_buffer(module, "a.b", tensor_));
  for (const char* wrong : {"", ".", "a.", "a..b"}) {
    expect_fails(swv_module_add_child(module, wrong, child), SWV_CODE_INVALID_ARGUMENT,
                 "a part of the name is empty");
  }
  for (const char* taken : {"a", "a.b", "a.b.c"}) {
    expect_fails(swv_module_add_child(module, taken, child), SWV_CODE_ALREADY_EXISTS,
                 "the module has 'a.b'");
  }
  expect_fails(swv_module_add_child(module, "c", module), SWV_CODE_INVALID_ARGUMENT,
               "'child' is the module itself");
  expect_ok(swv_module_add_child(module, "c", child));
  expect_fails(swv_module_add_buffer(module, "c", tensor_), SWV_CODE_ALREADY_EXISTS,
               "the module has a module of that name");
  expect_fails(swv_module_child(module, "a.b", &other), SWV_CODE_NOT_FOUND, "no module 'a.b'");
  expect_fails(swv_module_child(module, "a.", &other), SWV_CODE_NOT_FOUND, "no module 'a.'");
  expect_fails(swv_module_train(module, 2), SWV_CODE_INVALID_ARGUMENT, "'on' is 2");
  expect_ok(swv_module_is_training(module, &is_training));
  EXPECT_EQ(is_training, 1);
  expect_fails(swv_module_forward(module, "d", &forward), SWV_CODE_NOT_FOUND, "no module 'd'");
  // Whatever ends first.
  expect_ok(swv_module_forward(module, "c", &forward));
  expect_fails(swv_module_forward(reinterpret_cast<swv_module*>(forward), "c", &forward),
               SWV_CODE_INVALID_ARGUMENT, "is a swv_forward; wanted a swv_module");
  swv_module_free(module);
  swv_module_free(child);
  expect_fails(swv_forward_begin(forward, 7, &in, 1, &out, &run), SWV_CODE_INVALID_ARGUMENT,
               "'mode' is 7");
  expect_fails(swv_forward_begin(forward, SWV_MODE_GRAD, nullptr, 1, &out, &run),
               SWV_CODE_INVALID_ARGUMENT, "'inputs' is NULL, but has 1");
  expect_fails(swv_forward_begin(forward, SWV_MODE_GRAD, &in, 1, nullptr, &run),
               SWV_CODE_INVALID_ARGUMENT, "'out_inputs' is NULL");
  expect_fails(swv_forward_begin(forward, SWV_MODE_GRAD, &in, 1, &out, nullptr),
               SWV_CODE_INVALID_ARGUMENT, "'out_scope' is NULL");
  EXPECT_EQ(out, nullptr);
  expect_ok(swv_forward_begin(forward, SWV_MODE_GRAD, &in, 1, &out, &run));
  swv_forward_free(forward);
  swv_tensor_free(out);
  expect_ok(swv_mesh_enter_module(mesh_, "m", &scope));
  expect_fails(swv_forward_end(scope, nullptr, 0, nullptr), SWV_CODE_INVALID_ARGUMENT,
               "'scope' is of another kind; wanted one of swv_forward_begin");
  swv_scope_free(scope);
  expect_fails(swv_forward_end(run, &in, 1, nullptr), SWV_CODE_INVALID_ARGUMENT,
               "'out_outputs' is NULL");
  expect_ok(swv_forward_end(run, &in, 1, &out));
  swv_tensor_free(out);
  swv_scope_free(run);
  expect_fails(swv_forward_end(run, &in, 1, &out), SWV_CODE_INVALID_ARGUMENT,
               "is a swv_scope that was freed");
  expect_fails(swv_forward_share(forward, &forward), SWV_CODE_INVALID_ARGUMENT,
               "is a swv_forward that was freed");
  expect_fails(swv_mesh_enter_source(mesh_, "\xff", &scope), SWV_CODE_INVALID_ARGUMENT,
               "'source' is not UTF-8");
}

// --- operators -----------------------------------------------------------------------------------

TEST_F(BadInputTest, OperatorsAndArguments) {
  swv_op* op = nullptr;
  swv_value result = SWV_NONE;
  expect_fails(swv_op_find("aten::lineaar", &op), SWV_CODE_NOT_FOUND,
               "did you mean 'aten::linear'");
  expect_fails(swv_op_find("", &op), SWV_CODE_NOT_FOUND, "there is no operator");
  expect_fails(swv_op_find("::::...", &op), SWV_CODE_NOT_FOUND, "there is no operator");
  const swv_value args[] = {swv_value_tensor(tensor_), swv_value_string("a", 1)};
  expect_fails(swv_op_call(add_, SWV_MODE_GRAD, args, 2, &result, 1, nullptr),
               SWV_CODE_INVALID_ARGUMENT,
               "argument 'other' is a string; wanted Tensor; its schema is aten::add.Tensor(");
  expect_fails(swv_op_call(add_, SWV_MODE_GRAD, args, 1, &result, 1, nullptr),
               SWV_CODE_INVALID_ARGUMENT, "'other' is missing");
  const char* names[] = {"beta"};
  expect_fails(swv_op_call_named(add_, SWV_MODE_GRAD, args, 2, names, 1, &result, 1, nullptr),
               SWV_CODE_INVALID_ARGUMENT, "has no argument 'beta'");
  const swv_value three[] = {args[0], args[0], swv_value_int(1)};
  expect_fails(swv_op_call_named(add_, SWV_MODE_GRAD, three, 3, names, 1, &result, 1, nullptr),
               SWV_CODE_INVALID_ARGUMENT, "has no argument 'beta'");
  // Where there are overloads too.
  expect_ok(swv_op_find("aten::sum", &op));
  const swv_value flag[] = {args[0], swv_value_bool(1)};
  names[0] = "keepdims";
  expect_fails(swv_op_call_named(op, SWV_MODE_GRAD, flag, 2, names, 1, &result, 1, nullptr),
               SWV_CODE_INVALID_ARGUMENT,
               "aten::sum: has no argument 'keepdims'; did you mean 'keepdim'?");
  swv_op_free(op);
  names[0] = "self";
  expect_fails(swv_op_call_named(add_, SWV_MODE_GRAD, three, 2, names, 1, &result, 1, nullptr),
               SWV_CODE_INVALID_ARGUMENT, "given twice");
  expect_fails(swv_op_call_named(add_, SWV_MODE_GRAD, three, 1, names, 5, &result, 1, nullptr),
               SWV_CODE_INVALID_ARGUMENT, "'num_names' is 5 of 1");
  const swv_value none[] = {args[0], swv_value_none()};
  expect_fails(swv_op_call(add_, SWV_MODE_GRAD, none, 2, &result, 1, nullptr),
               SWV_CODE_INVALID_ARGUMENT, "'other' is none");
  const swv_value null_tensor[] = {args[0], swv_value_tensor(nullptr)};
  expect_fails(swv_op_call(add_, SWV_MODE_GRAD, null_tensor, 2, &result, 1, nullptr),
               SWV_CODE_INVALID_ARGUMENT, "is NULL");
  expect_fails(swv_op_call(add_, SWV_MODE_GRAD, three, 2, nullptr, 1, nullptr),
               SWV_CODE_INVALID_ARGUMENT, "'out_results' is NULL");
  // Shapes that do not fit: LibTorch's words, with the operator's name.
  expect_ok(swv_op_find("aten::bmm", &op));
  expect_fails(swv_op_call(op, SWV_MODE_GRAD, three, 2, &result, 1, nullptr),
               SWV_CODE_INVALID_ARGUMENT, "swv_op_call: aten::bmm: ");
  swv_op_free(op);
}

TEST_F(BadInputTest, NothingIsNoParameters) {
  double norm = -1;
  expect_ok(swv_finish_grad_sync(nullptr, 0));
  expect_ok(swv_clip_grad_norm(nullptr, 0, 1.0, nullptr, &norm));
  EXPECT_EQ(norm, 0);
  expect_fails(swv_clip_grad_norm(nullptr, 2, 1.0, nullptr, &norm), SWV_CODE_INVALID_ARGUMENT,
               "'parameters' is NULL");
}

TEST_F(BadInputTest, AnElementOfAnArrayIsNamedByItsIndex) {
  swv_tensor* const parameters[] = {tensor_, nullptr};
  expect_fails(swv_clip_grad_norm(parameters, 2, 1.0, nullptr, nullptr), SWV_CODE_INVALID_ARGUMENT,
               "swv_clip_grad_norm: argument 'parameters[1]' is NULL");
  swv_value result;
  swv_value both[] = {swv_value_tensor(tensor_), swv_value_tensor(nullptr)};
  expect_fails(swv_op_call(add_, SWV_MODE_GRAD, both, 2, &result, 1, nullptr),
               SWV_CODE_INVALID_ARGUMENT, "swv_op_call: argument 'arguments[1].as.tensor' is NULL");
  const swv_mesh_dim dims[] = {{"dp", 1}, {nullptr, 1}};
  swv_mesh* mesh = nullptr;
  expect_fails(swv_mesh_create(world_, dims, 2, &mesh), SWV_CODE_INVALID_ARGUMENT,
               "argument 'dims[1].name' is NULL");
  const char* const names[] = {"dp", nullptr};
  expect_fails(swv_mesh_slice(mesh_, names, 2, &mesh), SWV_CODE_INVALID_ARGUMENT,
               "argument 'names[1]' is NULL");
  swv_placement placements[] = {SWV_PLACEMENT_INIT, SWV_PLACEMENT_INIT};
  placements[1].kind = 77;
  swv_layout* layout = nullptr;
  expect_fails(swv_layout_create(placements, 2, nullptr, 0, &layout), SWV_CODE_INVALID_ARGUMENT,
               "argument 'placements[1].kind' is 77");
  placements[1].struct_size += 8;
  expect_fails(swv_layout_create(placements, 2, nullptr, 0, &layout), SWV_CODE_INVALID_ARGUMENT,
               "argument 'placements[1]' has struct_size 56; that of the first is 48");
  both[1].kind = 99;
  expect_fails(swv_op_call(add_, SWV_MODE_GRAD, both, 2, &result, 1, nullptr),
               SWV_CODE_INVALID_ARGUMENT, "argument 'arguments[1].kind' is 99");
}

TEST_F(BadInputTest, PlainWhereShardedIsWantedAndTheOtherWayRound) {
  swv_tensor_options options = SWV_TENSOR_OPTIONS_INIT;
  options.mesh = mesh_;
  const int64_t sizes[] = {2, 3};
  swv_tensor* sharded = nullptr;
  expect_ok(swv_tensor_ones(sizes, 2, &options, &sharded));
  const swv_value args[] = {swv_value_tensor(tensor_), swv_value_tensor(sharded)};
  swv_value result = SWV_NONE;
  expect_ok(swv_tensor_set_requires_grad(tensor_, 1));
  expect_fails(swv_op_call(add_, SWV_MODE_GRAD, args, 2, &result, 1, nullptr),
               SWV_CODE_INVALID_ARGUMENT, "argument 'self' is a plain tensor");
  swv_buffer buffer = SWV_BUFFER_INIT;
  expect_fails(swv_tensor_buffer(sharded, &buffer), SWV_CODE_INVALID_ARGUMENT, "is sharded");
  swv_layout* layout = nullptr;
  expect_fails(swv_tensor_layout(tensor_, &layout), SWV_CODE_INVALID_ARGUMENT,
               "swv_tensor_layout: ");
  swv_tensor_free(sharded);
}

// A result that there is no memory for does not stay behind with sizes of what it does not have.
TEST_F(BadInputTest, AResultThatCannotGrowIsEmpty) {
  const int64_t one[] = {1}, huge[] = {int64_t{1} << 40};
  swv_tensor *small = nullptr, *out = nullptr;
  swv_value result = SWV_NONE;
  size_t ndim = 0;
  int64_t size = -1;
  expect_ok(swv_tensor_ones(one, 1, nullptr, &small));
  expect_ok(swv_tensor_ones(one, 1, nullptr, &out));
  swv_op* expand = made<swv_op>([](auto** op) { return swv_op_find("aten::expand", op); });
  swv_op* add_out = made<swv_op>([](auto** op) { return swv_op_find("aten::add.out", op); });
  const swv_value to_expand[] = {swv_value_tensor(small), swv_value_ints(huge, 1)};
  expect_ok(swv_op_call(expand, SWV_MODE_NO_GRAD, to_expand, 2, &result, 1, nullptr));
  const swv_value args[] = {result, result, swv_value_int(1), swv_value_tensor(out)};
  expect_fails(swv_op_call(add_out, SWV_MODE_NO_GRAD, args, 4, nullptr, 0, nullptr),
               SWV_CODE_RESOURCE_EXHAUSTED, "aten::add.out");
  expect_ok(swv_tensor_sizes(out, &size, 1, &ndim));
  EXPECT_EQ(size, 0);
  swv_value_clear(&result);
  swv_op_free(add_out);
  swv_op_free(expand);
  swv_tensor_free(out);
  swv_tensor_free(small);
}

// --- memory --------------------------------------------------------------------------------------

TEST_F(BadInputTest, Lengths) {
  float data[6] = {};
  const int64_t sizes[] = {2, 3};
  swv_tensor* out = nullptr;
  expect_fails(swv_tensor_from_data(data, 20, sizes, 2, nullptr, &out), SWV_CODE_INVALID_ARGUMENT,
               "'num_bytes' is 20; [2, 3] needs 24");
  expect_fails(swv_tensor_from_data(nullptr, 24, sizes, 2, nullptr, &out),
               SWV_CODE_INVALID_ARGUMENT, "'data' is NULL");
  expect_fails(swv_tensor_copy_to_host(tensor_, data, 23), SWV_CODE_INVALID_ARGUMENT,
               "'num_bytes' is 23");
  expect_fails(swv_tensor_copy_from_host(tensor_, nullptr, 24), SWV_CODE_INVALID_ARGUMENT,
               "'data' is NULL");
  size_t count = 0;
  expect_fails(swv_tensor_sizes(tensor_, nullptr, 2, &count), SWV_CODE_INVALID_ARGUMENT,
               "'sizes' is NULL");
  swv_comm* comm = nullptr;
  expect_ok(swv_world_comm(world_, &comm));
  swv_buffer buffer = cpu_buffer(data, -1, SWV_DTYPE_F32);
  expect_fails(swv_comm_all_reduce(comm, &buffer, &buffer, SWV_REDUCE_SUM, nullptr, nullptr),
               SWV_CODE_INVALID_ARGUMENT, "count -1");
  buffer.count = std::numeric_limits<int64_t>::max();
  expect_fails(swv_comm_all_reduce(comm, &buffer, &buffer, SWV_REDUCE_SUM, nullptr, nullptr),
               SWV_CODE_INVALID_ARGUMENT, "has count");
  buffer.count = 6;
  expect_fails(swv_comm_all_reduce(comm, &buffer, &buffer, 9, nullptr, nullptr),
               SWV_CODE_INVALID_ARGUMENT, "'op' is 9");
  buffer.dtype = SWV_DTYPE_C64;
  expect_fails(swv_comm_all_reduce(comm, &buffer, &buffer, SWV_REDUCE_SUM, nullptr, nullptr),
               SWV_CODE_INVALID_ARGUMENT, "do not move");
  buffer.dtype = SWV_DTYPE_F32;
  buffer.reserved = 1;
  expect_fails(swv_comm_all_reduce(comm, &buffer, &buffer, SWV_REDUCE_SUM, nullptr, nullptr),
               SWV_CODE_INVALID_ARGUMENT, "reserved");
  buffer.reserved = 0;
  buffer.device.type = 5;
  expect_fails(swv_comm_broadcast(comm, &buffer, 0, nullptr, nullptr), SWV_CODE_INVALID_ARGUMENT,
               "device type 5");
  buffer.device.type = SWV_DEVICE_CPU;
  expect_fails(swv_comm_broadcast(comm, &buffer, 1, nullptr, nullptr), SWV_CODE_INVALID_ARGUMENT,
               "root");
  buffer.stream = data;
  expect_fails(swv_comm_broadcast(comm, &buffer, 0, nullptr, nullptr), SWV_CODE_INVALID_ARGUMENT,
               "'data.stream' is given; a CPU has no streams");
  swv_comm_free(comm);
}

// What an operation has no use for is no silent nothing.
TEST_F(BadInputTest, Collectives) {
  float data[2] = {};
  const int64_t counts[] = {2};
  const swv_buffer buffer = cpu_buffer(data, 2, SWV_DTYPE_F32);
  swv_comm* comm = nullptr;
  expect_ok(swv_world_comm(world_, &comm));
  const auto fails = [&](swv_collective_kind kind, auto set, const char* text) {
    swv_collective collective = SWV_COLLECTIVE_INIT;
    collective.kind = kind;
    set(collective);
    expect_fails(swv_comm_start(comm, &collective, nullptr), SWV_CODE_INVALID_ARGUMENT, text);
  };
  fails(
      14, [](auto&) {},
      "swv_comm_start: argument 'collective.kind' is 14; wanted a "
      "swv_collective_kind, 0 to 13");
  fails(-1, [](auto&) {}, "'collective.kind' is -1");
  fails(
      SWV_COLLECTIVE_BARRIER, [&](auto& c) { c.in = &buffer; },
      "swv_comm_barrier: argument 'collective.in' is not NULL; the operation has none");
  fails(SWV_COLLECTIVE_BROADCAST, [&](auto& c) { c.in = c.out = &buffer; }, "'collective.in'");
  fails(SWV_COLLECTIVE_SEND, [&](auto& c) { c.in = c.out = &buffer; }, "'collective.out'");
  fails(
      SWV_COLLECTIVE_ALL_GATHER,
      [&](auto& c) {
        c.in = c.out = &buffer;
        c.out_counts = counts;
      },
      "swv_comm_all_gather: argument 'collective.out_counts' is not NULL");
  fails(
      SWV_COLLECTIVE_ALL_GATHER_V,
      [&](auto& c) {
        c.in = c.out = &buffer;
        c.in_counts = counts;
      },
      "'collective.in_counts'");
  fails(SWV_COLLECTIVE_ALL_REDUCE, [&](auto& c) { c.in = &buffer; }, "argument 'out' is NULL");
  fails(SWV_COLLECTIVE_BARRIER, [&](auto& c) { c.timeout_ms = -1; }, "timeout_ms' is -1");
  swv_comm_free(comm);
}

TEST_F(BadInputTest, DevicesThatAreNotThere) {
  swv_tensor_options options = SWV_TENSOR_OPTIONS_INIT;
  swv_tensor* out = nullptr;
  options.device = {SWV_DEVICE_CUDA, 99};
  expect_fails(swv_tensor_ones(nullptr, 0, &options, &out), SWV_CODE_UNIMPLEMENTED,
               "argument 'options.device' is cuda:99, which is not there: no CUDA in LibTorch");
  // Of an operator, too, before LibTorch has a word for it.
  swv_op* to = nullptr;
  expect_ok(swv_op_find("aten::to.device", &to));
  swv_value result = SWV_NONE;
  const swv_value moved[] = {swv_value_tensor(tensor_), swv_value_device({SWV_DEVICE_CUDA, 0}),
                             swv_value_dtype(SWV_DTYPE_F32)};
  expect_fails(swv_op_call(to, SWV_MODE_NO_GRAD, moved, 3, &result, 1, nullptr),
               SWV_CODE_UNIMPLEMENTED, "is cuda:0, which is not there: no CUDA in LibTorch");
  swv_op_free(to);
  options.device = {7, 0};
  expect_fails(swv_tensor_ones(nullptr, 0, &options, &out), SWV_CODE_INVALID_ARGUMENT,
               "'options.device' is device type 7");
}

swv_status* empty_step(void*) {
  return nullptr;
}
TEST_F(BadInputTest, CapturedSteps) {
  swv_captured_step* step = nullptr;
  swv_tensor* parameters[] = {tensor_, nullptr};
  const auto create = [&](size_t count) {
    return swv_captured_step_create(mesh_, parameters, count, empty_step, nullptr, &step);
  };
  expect_fails(create(2), SWV_CODE_INVALID_ARGUMENT, "argument 'parameters[1]' is NULL");
  expect_fails(create(SIZE_MAX), SWV_CODE_INVALID_ARGUMENT, "argument 'parameters' has");
  expect_fails(swv_captured_step_create(mesh_, nullptr, 1, empty_step, nullptr, &step),
               SWV_CODE_INVALID_ARGUMENT, "argument 'parameters' is NULL, but has 1");
  expect_fails(swv_captured_step_create(mesh_, parameters, 1, nullptr, nullptr, &step),
               SWV_CODE_INVALID_ARGUMENT, "argument 'step' is NULL");
  expect_fails(swv_captured_step_create(mesh_, parameters, 1, empty_step, nullptr, nullptr),
               SWV_CODE_INVALID_ARGUMENT, "argument 'out_step' is NULL");
  expect_fails(create(1), SWV_CODE_FAILED_PRECONDITION, "no CUDA here");
  EXPECT_EQ(step, nullptr);
  expect_fails(swv_captured_step_replay(reinterpret_cast<swv_captured_step*>(tensor_)),
               SWV_CODE_INVALID_ARGUMENT,
               "argument 'step' is a swv_tensor; wanted a swv_captured_step");
}

// --- callbacks -----------------------------------------------------------------------------------

swv_status* failing(void*, const swv_function_call*) {
  return swv_status_new(SWV_CODE_DATA_LOSS, "no");
}
swv_status* lazy(void*, const swv_function_call*) {
  return nullptr;
}
swv_status* thief(void*, const swv_function_call* call) {
  call->outputs[0] = const_cast<swv_tensor*>(call->inputs[0]);
  return nullptr;
}
swv_status* failing_thief(void* drops, const swv_function_call* call) {
  swv_status_free(thief(drops, call));
  return swv_status_new(SWV_CODE_DATA_LOSS, "no");
}
void count(void* drops) {
  ++*static_cast<int*>(drops);
}

TEST_F(BadInputTest, CallbacksThatMisbehaveAreDroppedOnce) {
  swv_tensor* out = nullptr;
  const swv_tensor* inputs[] = {tensor_};
  int drops = 0, expected = 0;
  swv_function f = SWV_FUNCTION_INIT;
  f.user_data = &drops;
  f.drop = count;
  f.name = "f";
  expect_fails(swv_function_apply(&f, SWV_MODE_GRAD, inputs, 1, &out, 1), SWV_CODE_INVALID_ARGUMENT,
               "'function.forward' is NULL");
  EXPECT_EQ(drops, ++expected);
  f.forward = failing;
  expect_fails(swv_function_apply(&f, SWV_MODE_GRAD, inputs, 1, &out, 1), SWV_CODE_DATA_LOSS,
               "f.forward: no");
  EXPECT_EQ(drops, ++expected);
  f.forward = lazy;
  expect_fails(swv_function_apply(&f, SWV_MODE_GRAD, inputs, 1, &out, 1), SWV_CODE_INVALID_ARGUMENT,
               "output 0 was not written");
  EXPECT_EQ(drops, ++expected);
  f.forward = failing_thief;
  testing::internal::CaptureStderr();
  expect_fails(swv_function_apply(&f, SWV_MODE_GRAD, inputs, 1, &out, 1), SWV_CODE_DATA_LOSS,
               "f.forward: no");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "") << "what is borrowed is freed once";
  EXPECT_EQ(drops, ++expected);
  f.forward = thief;
  expect_fails(swv_function_apply(&f, SWV_MODE_GRAD, inputs, 1, &out, 1), SWV_CODE_INVALID_ARGUMENT,
               "is a borrowed tensor");
  EXPECT_EQ(drops, ++expected);
  expect_fails(swv_function_apply(&f, SWV_MODE_GRAD, inputs, 1, &out, 0), SWV_CODE_INVALID_ARGUMENT,
               "'num_outputs' is 0");
  EXPECT_EQ(drops, ++expected);

  swv_segment segment = SWV_SEGMENT_INIT;
  segment.user_data = &drops;
  segment.drop = count;
  segment.name = "s";
  expect_fails(swv_checkpoint(&segment, SWV_MODE_GRAD, inputs, 1, &out, 1),
               SWV_CODE_INVALID_ARGUMENT, "'segment.forward' is NULL");
  EXPECT_EQ(drops, ++expected);
  segment.forward = lazy;
  expect_fails(swv_checkpoint(&segment, SWV_MODE_GRAD, inputs, 1, &out, 1),
               SWV_CODE_INVALID_ARGUMENT, "s.forward: output 0 was not written");
  EXPECT_EQ(drops, ++expected);
  segment.forward = thief;
  expect_fails(swv_checkpoint(&segment, SWV_MODE_GRAD, inputs, 1, &out, 1),
               SWV_CODE_INVALID_ARGUMENT, "is a borrowed tensor");
  EXPECT_EQ(drops, ++expected);
  expect_fails(swv_checkpoint(&segment, SWV_MODE_GRAD, inputs, 0, &out, 1),
               SWV_CODE_INVALID_ARGUMENT, "at least one input");
  EXPECT_EQ(drops, ++expected);
  expect_fails(swv_checkpoint(&segment, SWV_MODE_GRAD, inputs, 1, &out, 0),
               SWV_CODE_INVALID_ARGUMENT, "'num_outputs' is 0");
  EXPECT_EQ(drops, ++expected);

  swv_backend backend = SWV_BACKEND_INIT;
  swv_group group = SWV_GROUP_INIT;
  swv_world* world = nullptr;
  backend.self = &drops;
  backend.drop = count;
  backend.name = "half";
  expect_fails(swv_world_create_with_backend(&backend, &group, nullptr, &world),
               SWV_CODE_INVALID_ARGUMENT, "'backend.start' is NULL");
  EXPECT_EQ(drops, ++expected);
  expect_fails(swv_world_create_with_backend(&backend, &group, nullptr, nullptr),
               SWV_CODE_INVALID_ARGUMENT, "'out_world' is NULL");
  EXPECT_EQ(drops, ++expected);
}

swv_status* freed_status(void*, swv_world*) {
  swv_status* status = swv_status_new(SWV_CODE_UNKNOWN, "x");
  swv_status_free(status);
  return status;
}
TEST_F(BadInputTest, ACallbackThatReturnsAFreedStatus) {
  expect_fails(swv_run_ranks(1, freed_status, nullptr, nullptr), SWV_CODE_INTERNAL,
               "a callback's argument 'status' is a swv_status that was freed");
}

swv_status* freed_world(void*, swv_world* world) {
  swv_world_free(world);
  return nullptr;
}
TEST_F(BadInputTest, ACallbackThatFreesWhatItBorrows) {
  testing::internal::CaptureStderr();
  expect_ok(swv_run_ranks(1, freed_world, nullptr, nullptr));
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "shardweave: a handle of the library's was freed: the argument is a swv_world that was "
            "freed\n");
}

// --- rendezvous ----------------------------------------------------------------------------------

TEST_F(BadInputTest, Rendezvous) {
  swv_world* world = nullptr;
  swv_rendezvous r = SWV_RENDEZVOUS_INIT;
  expect_fails(swv_world_join(&r, nullptr, &world), SWV_CODE_INVALID_ARGUMENT,
               "neither file nor host");
  r.host = "127.0.0.1";
  r.port = 70000;
  expect_fails(swv_world_join(&r, nullptr, &world), SWV_CODE_INVALID_ARGUMENT,
               "'rendezvous.port' is 70000");
  r.port = 1234;
  r.rank = 3;
  expect_fails(swv_world_join(&r, nullptr, &world), SWV_CODE_INVALID_ARGUMENT, "swv_world_join: ");
  r.rank = 0;
  r.world_size = std::numeric_limits<int32_t>::max();  // before memory is taken for each rank
  expect_fails(swv_world_join(&r, nullptr, &world), SWV_CODE_INVALID_ARGUMENT,
               "world size 2147483647: wanted 1 to 1048576");
  expect_fails(swv_world_create_counting(8, 8, &world), SWV_CODE_INVALID_ARGUMENT,
               "swv_world_create_counting: ");
  swv_world_options options = SWV_WORLD_OPTIONS_INIT;
  options.timeout_ms = -1;
  expect_fails(swv_world_create_local(1, &options, &world), SWV_CODE_INVALID_ARGUMENT,
               "'options.timeout_ms' is -1");

  // A GPU where there is no driver: over NCCL, and by way of the host.
  ::setenv("SHARDWEAVE_CUDA_DRIVER_LIBRARY", "/no/libcuda.so.1", 1);
  const std::string file = ::testing::TempDir() + "/one_rank";
  swv_rendezvous one = SWV_RENDEZVOUS_INIT;
  one.file = file.c_str();
  options = SWV_WORLD_OPTIONS_INIT;
  options.device.index = 1;
  expect_fails(swv_world_join(&one, &options, &world), SWV_CODE_INVALID_ARGUMENT, "options.device");
  options.device = {SWV_DEVICE_CUDA, 0};
  expect_fails(swv_world_join(&one, &options, &world), SWV_CODE_FAILED_PRECONDITION,
               "a GPU's memory by way of the host: no NVIDIA driver");
  options.backend = "nccl";
  const std::string another = file + "_more";  // a file is of one run
  one.file = another.c_str();
  expect_fails(swv_world_join(&one, &options, &world), SWV_CODE_FAILED_PRECONDITION,
               "backend nccl: no NVIDIA driver");
  ::unsetenv("SHARDWEAVE_CUDA_DRIVER_LIBRARY");
}

}  // namespace
