// Modules, plans and optimizers.
#include "fuzzer.h"

namespace shardweave::capi {

bool Fuzzer::make_optimizer(swv_tensor** parameters, swv_optimizer** out_optimizer) {
  swv_sgd_options sgd = SWV_SGD_OPTIONS_INIT;
  swv_adam_options adam = SWV_ADAM_OPTIONS_INIT;
  swv_adamw_options adamw = SWV_ADAMW_OPTIONS_INIT;
  swv_lion_options lion = SWV_LION_OPTIONS_INIT;
  sgd.lr = real(), sgd.momentum = real(), sgd.nesterov = static_cast<swv_bool>(below(2));
  adam.beta2 = one_in(2) ? real() : 0.9, adam.amsgrad = static_cast<swv_bool>(below(2));
  adamw.beta1 = one_in(2) ? real() : 0.9, adamw.amsgrad = static_cast<swv_bool>(below(2));
  lion.beta1 = one_in(2) ? real() : 0.9, lion.weight_decay = real();
  swv_adafactor_options adafactor = SWV_ADAFACTOR_OPTIONS_INIT;
  swv_muon_options muon = SWV_MUON_OPTIONS_INIT;
  adafactor.eps1 = one_in(2) ? real() : 0, adafactor.clip_threshold = one_in(3) ? real() : 1;
  muon.ns_steps = one_in(3) ? small() : 5, muon.momentum = one_in(3) ? real() : 0.9;
  muon.ns_dtype = one_in(3) ? small() : SWV_DTYPE_F32, muon.lr_scale = below(3);
  size_t count = length(2);
  switch (below(6)) {
    case 4:
      return done(
          swv_optimizer_create_adafactor(parameters, count, sized(adafactor), out_optimizer));
    case 5:
      if (one_in(2)) count = 0;
      return done(swv_optimizer_create_muon(parameters, count, sized(muon), out_optimizer));
    case 0:
      return done(swv_optimizer_create_sgd(parameters, count, sized(sgd), out_optimizer));
    case 1:
      return done(swv_optimizer_create_adam(parameters, count, sized(adam), out_optimizer));
    case 2:
      return done(swv_optimizer_create_lion(parameters, count, sized(lion), out_optimizer));
    default:
      return done(swv_optimizer_create_adamw(parameters, count, sized(adamw), out_optimizer));
  }
}

void Fuzzer::modules() {
  swv_module* module = nullptr;
  swv_plan* plan = nullptr;
  swv_optimizer* optimizer = nullptr;
  swv_tensor* t = nullptr;
  swv_string* string = nullptr;
  swv_tensor* parameters[2] = {pick(tensors_), pick(tensors_)};
  const swv_named_placement named[] = {{text(), text()}};
  swv_zero_options zero = SWV_ZERO_OPTIONS_INIT;
  swv_clip_options clip = SWV_CLIP_OPTIONS_INIT;
  swv_distribute_options distribute = SWV_DISTRIBUTE_OPTIONS_INIT;
  double norm = 0;
  size_t n = 0;
  clip.norm_type = real(), clip.error_if_nonfinite = static_cast<swv_bool>(below(2));
  zero.mesh_dim = one_in(2) ? nullptr : text(), zero.stage = one_in(9) ? small() : 1 + below(2);
  if (one_in(3)) zero.bucket_bytes = small();
  swv_forward* forward = nullptr;
  swv_scope* scope = nullptr;
  swv_layout* const layout = pick(layouts_);
  swv_tensor* outputs[2] = {};
  swv_bool yes = 0;
  switch (below(21)) {
    case 0:
      if (done(swv_module_create(&module))) keep(modules_, module, swv_module_free, 5);
      break;
    case 1:
      done(swv_module_add_parameter(pick(modules_), text(), pick(tensors_)));
      break;
    case 2:
      done(swv_module_add_buffer(pick(modules_), text(), pick(tensors_)));
      break;
    case 3:
      if (done(swv_module_parameter(pick(modules_), below(3), &string, &t))) {
        swv_string_free(string);
        keep(t);
      }
      break;
    case 4:
      if (done(swv_module_get(pick(modules_), text(), &t))) keep(t);
      done(swv_module_num_buffers(pick(modules_), &n));
      break;
    case 5:
      if (done(swv_plan_from_json(text(), &plan))) keep(plans_, plan, swv_plan_free, 5);
      break;
    case 6:
      if (done(swv_plan_create(&plan))) keep(plans_, plan, swv_plan_free, 5);
      break;
    case 7:
      done(swv_plan_add(pick(plans_), text(), named, length(1)));
      drop(swv_plan_to_json(pick(plans_), &string), &string);
      break;
    case 8:
      done(swv_module_distribute(pick(modules_), pick(meshes_), one_in(2) ? nullptr : pick(plans_),
                                 one_in(2) ? nullptr : sized(distribute)));
      break;
    case 9:
      done(swv_module_finish_grad_sync(pick(modules_)));
      done(swv_finish_grad_sync(parameters, length(2)));
      done(swv_clip_grad_norm(parameters, length(2), real(), one_in(2) ? nullptr : sized(clip),
                              one_in(2) ? nullptr : &norm));
      break;
    case 10:
      if (make_optimizer(parameters, &optimizer)) {
        keep(optimizers_, optimizer, swv_optimizer_free, 5);
      }
      optimizing(parameters);
      break;
    case 11:
      done(swv_optimizer_use_zero(pick(optimizers_), one_in(3) ? nullptr : sized(zero)));
      if (done(swv_optimizer_no_sync(pick(optimizers_), &scope))) swv_scope_free(scope);
      done(swv_optimizer_step(pick(optimizers_)));
      done(swv_optimizer_zero_grad(pick(optimizers_)));
      done(swv_optimizer_set_lr(pick(optimizers_), real()));
      break;
    case 12:
      done(swv_module_add_child(pick(modules_), text(), pick(modules_)));
      if (done(swv_module_child(pick(modules_), text(), &module)))
        keep(modules_, module, swv_module_free, 5);
      break;
    case 13:
      done(swv_module_train(pick(modules_), small()));
      done(swv_module_is_training(pick(modules_), one_in(9) ? nullptr : &yes));
      break;
    case 14: {
      done(swv_plan_add_layout(pick(plans_), text(), layout));
      done(one_in(2) ? swv_plan_add_forward(pick(plans_), text(), named, length(1))
                     : swv_plan_add_forward_layout(pick(plans_), text(), layout));
      const char* const dim = one_in(2) ? "tp" : text();
      done(swv_plan_add_module(pick(plans_), text(), one_in(9) ? nullptr : &dim,
                               one_in(2) ? nullptr : &dim, length(1)));
      const char* const cut = R"json({"parameter": {"*": "S(0)"}})json";
      done(swv_module_set_sharding(pick(modules_), one_in(2) ? cut : text()));
      // Into one that goes: plans that take each other, or themselves, grow without end.
      if (done(swv_plan_create(&plan))) {
        for (int i = 0; i < 2; ++i) done(swv_plan_append(one_in(9) ? nullptr : plan, pick(plans_)));
        done(swv_plan_append(plan, plan));
        swv_plan_free(plan);
      }
      if (done(swv_plan_from_hugging_face(pick(modules_), text(), text(), &plan)))
        keep(plans_, plan, swv_plan_free, 5);
      break;
    }
    case 15:
      if (done(swv_plan_resolve(pick(plans_), pick(modules_), pick(meshes_),
                                one_in(3) ? nullptr : &string, nullptr)))
        swv_string_free(string);
      break;
    case 16:
      if (done(swv_module_forward(pick(modules_), one_in(2) ? "" : text(), &forward)))
        keep(forwards_, forward, swv_forward_free, 5);
      if (one_in(4) && done(swv_forward_share(pick(forwards_), &forward)))
        keep(forwards_, forward, swv_forward_free, 5);
      if (done(swv_forward_begin(pick(forwards_), one_in(4) ? small() : SWV_MODE_GRAD, parameters,
                                 length(2), one_in(20) ? nullptr : outputs, &scope))) {
        for (swv_tensor* output : outputs) keep(output);
        outputs[0] = outputs[1] = nullptr;
        for (int i = 0; i < 2; ++i) {
          // What is kept may take the place of what was picked.
          for (swv_tensor*& parameter : parameters) parameter = pick(tensors_);
          if (!done(swv_forward_end(one_in(20) ? pick(scopes_) : scope, parameters, length(2),
                                    one_in(20) ? nullptr : outputs)))
            continue;
          for (swv_tensor* output : outputs) keep(output);
          outputs[0] = outputs[1] = nullptr;
        }
        if (scopes_.size() < 4) {
          scopes_.push_back(scope);
        } else {
          swv_scope_free(scope);
        }
      }
      break;
    case 17:
      if (done(swv_module_create_by_kind(layer_kind(), layer_options(), &module)))
        keep(modules_, module, swv_module_free, 5);
      break;
    case 18:
      if (one_in(4))
        one_in(4)   ? fully_sharded()
        : one_in(3) ? divided()
        : one_in(2) ? data_parallel()
                    : library();  // they take long
      break;
    case 19:
      patches();
      break;
    default:
      if (done(swv_optimizer_state(pick(optimizers_), below(3), text(), &t))) keep(t);
      done(swv_optimizer_set_state(pick(optimizers_), below(3), text(), pick(tensors_)));
      if (done(swv_module_load(text(), &module))) swv_module_free(module);
  }
}

// Small ones, and what is none.
const char* Fuzzer::layer_kind() {
  static const char* const kKinds[] = {"Linear",     "LayerNorm", "Dropout", "ReLU",
                                       "Sequential", "Conv1d",    "LSTM",    "Linaer"};
  return one_in(9) ? text() : kKinds[below(std::size(kKinds))];
}
const char* Fuzzer::layer_options() {
  static const char* const kOptions[] = {
      nullptr,
      "{\"in_features\": 3, \"out_features\": 2}",
      "{\"in_features\": 3, \"out_features\": 18446744073709551615}",
      "{\"normalized_shape\": [2, 3]}",
      "{\"p\": 0.5}",
      "{\"layers\": [{\"kind\": \"Linear\", \"in_features\": 2, \"out_features\": 2}]}",
      "{\"in_channels\": 2, \"out_channels\": 2, \"kernel_size\": 3}",
      "{\"input_size\": 2, \"hidden_size\": 3}",
      "{\"in_features\": null}"};
  return one_in(9) ? text() : kOptions[below(std::size(kOptions))];
}

namespace {

struct Run {
  swv_module* module;
  swv_module* reference;
  swv_tensor* x;
  uint64_t chance;
};
swv_status* run_one(swv_module* module, const Run& run, swv_tensor** out_result) {
  if (run.chance % 10 == 0) return swv_status_new(SWV_CODE_ABORTED, "not now");
  if (run.chance % 10 == 1) return nullptr;  // and no result
  const swv_value x = swv_value_tensor(run.x);
  swv_value y = SWV_NONE;
  swv_status* const status =
      swv_module_call(module, "forward", SWV_MODE_GRAD, &x, 1, &y, 1, nullptr);
  if (status == nullptr) *out_result = y.as.tensor;
  return status;
}
swv_status* run_module(void* user_data, swv_tensor** out_result) {
  return run_one(static_cast<Run*>(user_data)->module, *static_cast<Run*>(user_data), out_result);
}
swv_status* run_reference(void* user_data, swv_tensor** out_result) {
  return run_one(static_cast<Run*>(user_data)->reference, *static_cast<Run*>(user_data),
                 out_result);
}

swv_status* make_model(void* run, swv_module** out_module) {
  if (static_cast<Run*>(run)->chance % 10 == 2) return nullptr;  // and no module
  return swv_module_create_by_kind("Linear", "{\"in_features\": 3, \"out_features\": 2}",
                                   out_module);
}
swv_status* loss_of_model(void* run, swv_module* module, swv_mesh* mesh, swv_tensor** out_loss) {
  const int64_t sizes[] = {2, 3};
  swv_tensor_options options = SWV_TENSOR_OPTIONS_INIT;
  Run with = *static_cast<Run*>(run);
  swv_tensor* y = nullptr;
  swv_op* sum = nullptr;
  options.mesh = mesh;
  swv_status* status = swv_tensor_ones(sizes, 2, &options, &with.x);
  if (status == nullptr) status = run_one(module, with, &y);
  if (status == nullptr) status = swv_op_find("aten::sum", &sum);
  if (status == nullptr && y != nullptr) {
    const swv_value argument = swv_value_tensor(y);
    swv_value result = SWV_NONE;
    status = swv_op_call(sum, SWV_MODE_GRAD, &argument, 1, &result, 1, nullptr);
    if (status == nullptr) *out_loss = result.as.tensor;
  }
  swv_op_free(sum);
  swv_tensor_free(y);
  swv_tensor_free(with.x);
  return status;
}

// A patch that runs what it is in place of, sometimes wrongly.
swv_status* patched(void* user_data, const swv_function_call* call) {
  const uint64_t how = *static_cast<uint64_t*>(user_data);
  swv_tensor* saved = nullptr;
  if (how % 5 == 1) return nullptr;  // and no result
  if (how % 5 == 2) return swv_status_new(SWV_CODE_CANCELLED, "the host does not want to");
  if (how % 5 == 3) swv_status_free(swv_function_context_saved(call->context, 0, &saved));
  swv_tensor_free(saved);
  return swv_function_context_original(call->context, call->mode, call->inputs,
                                       how % 7 == 1 ? 0 : call->num_inputs, call->outputs,
                                       how % 7 == 2 ? 2 : call->num_outputs);
}
void drop_number(void* user_data) {
  delete static_cast<uint64_t*>(user_data);
}

}  // namespace

// Of modules that have been met, and of one that runs behind it.
void Fuzzer::patches() {
  swv_patch patch = SWV_PATCH_INIT;
  patch.name = one_in(10) ? text() : "p";
  patch.forward = one_in(20) ? nullptr : patched;
  patch.drop = drop_number;
  patch.user_data = new uint64_t(chance_.word());
  swv_patch* const given = sized(patch);
  if (!has_size(*given, patch)) drop_number(patch.user_data);
  done(swv_module_patch(pick(modules_), one_in(2) ? "*" : text(), given));
  swv_module* module = nullptr;
  swv_tensor* x = nullptr;
  const int64_t sizes[] = {2, 3};
  must(swv_tensor_ones(sizes, 2, nullptr, &x));
  if (done(swv_module_create_by_kind("GELU", nullptr, &module))) {
    patch.forward = patched;
    patch.name = "p";
    for (size_t i = 1 + below(2); i > 0; --i) {
      patch.user_data = new uint64_t(chance_.word());
      must(swv_module_patch(module, "", &patch));
    }
    const swv_value argument = swv_value_tensor(x);
    swv_value result = SWV_NONE;
    if (done(swv_module_call(module, "forward", SWV_MODE_GRAD, &argument, 1, &result, 1, nullptr)))
      keep(result.as.tensor);
    swv_module_free(module);
  }
  swv_tensor_free(x);
}

// A small model from its construction to what is asked of it, deferred or not.
void Fuzzer::library() {
  constexpr char kLinear[] = "{\"in_features\": 3, \"out_features\": 2}";
  swv_scope *scope = nullptr, *inner = nullptr, *pause = nullptr;
  Run run = {nullptr, nullptr, nullptr, chance_.word()};
  swv_plan* plan = nullptr;
  swv_tensor *weight = nullptr, *y = nullptr;
  swv_grad_sync* sync = nullptr;
  swv_string *table = nullptr, *json = nullptr;
  swv_materialize_options materialize = SWV_MATERIALIZE_OPTIONS_INIT;
  swv_grad_sync_options buckets = SWV_GRAD_SYNC_OPTIONS_INIT;
  swv_plan_auto_options plan_auto = SWV_PLAN_AUTO_OPTIONS_INIT;
  swv_verify_options verify = SWV_VERIFY_OPTIONS_INIT;
  swv_bool yes = 0;
  int64_t counts[2];
  float numbers[6] = {};
  const int64_t sizes[] = {2, 3};
  const bool deferred = one_in(2);
  if (deferred) {
    if (one_in(9)) done(swv_deferred_init(nullptr));
    done(swv_deferred_init(&scope));
    if (one_in(3)) done(swv_deferred_init(&inner));
  }
  const bool made = done(swv_module_create_by_kind("Linear", kLinear, &run.module));
  if (one_in(2)) std::swap(scope, inner);
  swv_scope_free(scope);
  swv_scope_free(inner);
  must(swv_tensor_ones(sizes, 2, nullptr, &run.x));
  swv_mesh* const mesh = one_in(9) ? pick(meshes_) : meshes_[0];
  if (made && done(swv_module_create_by_kind("Linear", kLinear, &run.reference))) {
    if (done(swv_module_get(run.module, "weight", &weight))) {
      done(swv_tensor_is_deferred(weight, one_in(9) ? nullptr : &yes));
      done(swv_tensor_copy_from_host(weight, numbers, sizeof(numbers)));
      drop(swv_tensor_to_string(weight, &table), &table);
      table = nullptr;
    }
    if (done(swv_plan_from_styles(run.module, mesh, one_in(3) ? text() : "{\"style\": \"colwise\"}",
                                  one_in(2) ? nullptr : text(), &plan))) {
      swv_plan_free(plan);
    }
    plan = nullptr;
    if (done(swv_plan_from_zoo(one_in(3) ? text() : "mixtral", one_in(5) ? text() : "{}", mesh,
                               one_in(3) ? text() : "{\"mesh_dim\": \"x\"}", &plan))) {
      swv_plan_free(plan);
    }
    plan = nullptr;
    plan_auto.tp_mesh_dim = one_in(3) ? text() : nullptr;
    plan_auto.max_evaluations = one_in(9) ? number() : 3;
    plan_auto.memory_limit = one_in(9) ? number() : 0;
    plan_auto.heads = one_in(9) ? number() : 0;
    plan_auto.sequence_dim = one_in(9) ? small() : 1;
    if (one_in(4) && done(swv_plan_auto(mesh, one_in(9) ? nullptr : make_model,
                                        one_in(9) ? nullptr : loss_of_model, &run, sized(plan_auto),
                                        &plan, one_in(3) ? nullptr : &table, nullptr))) {
      swv_plan_free(plan);
      swv_string_free(table);
    }
    table = nullptr;
    if (one_in(2)) done(swv_module_distribute(run.module, mesh, nullptr, nullptr));
    const char* const fqns[] = {one_in(2) ? "weight" : text()};
    const swv_tensor* const values[] = {one_in(2) ? run.x : pick(tensors_)};
    materialize.fqns = fqns, materialize.values = values;
    materialize.num_values = one_in(3) ? length(1) : 0;
    materialize.seed = chance_.word(), materialize.has_seed = static_cast<swv_bool>(below(2));
    done(swv_module_materialize(run.module, one_in(3) ? nullptr : sized(materialize)));
    buckets.bucket_bytes = one_in(3) ? number() : 64;
    buckets.reduce_dtype = one_in(9) ? small() : one_in(2) ? SWV_DTYPE_BF16 : SWV_DTYPE_DEFAULT;
    if (done(swv_grad_sync_create(run.module, one_in(3) ? nullptr : sized(buckets), &sync))) {
      done(swv_grad_sync_no_sync(sync, one_in(9) ? nullptr : &pause));
      done(swv_grad_sync_counts(sync, &counts[0], one_in(2) ? nullptr : &counts[1]));
      done(swv_grad_sync_discard(sync));
    }
    if (run.chance % 10 > 1 && done(run_module(&run, &y))) swv_tensor_free(y);
    drop(swv_module_dump(run.module, one_in(3) ? nullptr : &table, nullptr), &table);
    table = nullptr;
    if (done(swv_module_memory(run.module, one_in(3) ? nullptr : run_module, &run, &table, &json)))
      swv_string_free(table), swv_string_free(json);
    table = json = nullptr;
    drop(swv_module_list_communication(run.module, one_in(9) ? nullptr : run_module, &run, &table,
                                       nullptr),
         &table);
    table = nullptr;
    verify.copy_values = static_cast<swv_bool>(below(2));
    verify.forward_only = one_in(9) ? small() : static_cast<swv_bool>(below(2));
    verify.tolerance = one_in(3) ? real() : 0.0;
    drop(swv_module_verify(run.module, run_module, run.reference, run_reference, &run,
                           one_in(3) ? nullptr : sized(verify), &yes, nullptr, &json),
         &json);
    if (one_in(2)) std::swap(run.module, run.reference);
    if (one_in(2)) swv_scope_free(pause), pause = nullptr;
    if (one_in(2)) swv_module_free(run.reference), run.reference = nullptr;
    swv_grad_sync_free(sync);
    swv_scope_free(pause);
  }
  swv_tensor_free(weight);
  swv_tensor_free(run.x);
  swv_module_free(run.reference);
  swv_module_free(run.module);
}

// A small model whose parameters are whole while they are used.
void Fuzzer::fully_sharded() {
  swv_module* module = nullptr;
  swv_tensor *x = nullptr, *weight = nullptr;
  swv_string *table = nullptr, *json = nullptr;
  swv_value y = SWV_NONE;
  swv_fully_shard_options options = SWV_FULLY_SHARD_OPTIONS_INIT;
  swv_fully_shard_counters counters = SWV_FULLY_SHARD_COUNTERS_INIT;
  const char* const units[] = {one_in(2) ? "0" : text()};
  const char* const types[] = {one_in(2) ? "Linear" : text()};
  const int64_t sizes[] = {2, 2};
  swv_mesh* const mesh = one_in(9) ? pick(meshes_) : meshes_[0];
  options.mesh_dim = one_in(3) ? text() : nullptr;
  options.units = units, options.num_units = one_in(3) ? length(1) : 0;
  options.unit_types = types, options.num_unit_types = one_in(3) ? length(1) : 0;
  options.min_numel = one_in(3) ? number() : 0;
  options.source = one_in(3) ? small() : 0;
  options.equal_segments = one_in(9) ? small() : static_cast<swv_bool>(below(2));
  if (one_in(9)) options.compute_device = {one_in(2) ? SWV_DEVICE_CUDA : small(), small()};
  options.reshard_after_forward_ranks = one_in(5) ? number() : static_cast<int64_t>(below(2));
  options.reshard_after_forward = one_in(9) ? small() : static_cast<swv_bool>(below(2));
  for (swv_dtype* dtype : {&options.param_dtype, &options.reduce_dtype, &options.output_dtype}) {
    *dtype = one_in(9) ? small() : one_in(2) ? SWV_DTYPE_BF16 : SWV_DTYPE_DEFAULT;
  }
  if (!done(swv_module_create_by_kind("Sequential",
                                      "{\"layers\": [{\"kind\": \"Linear\", \"in_features\": 2, "
                                      "\"out_features\": 2}]}",
                                      &module)))
    return;
  must(swv_tensor_ones(sizes, 2, nullptr, &x));
  if (done(swv_module_fully_shard(module, mesh, one_in(3) ? nullptr : sized(options), &table,
                                  one_in(2) ? nullptr : &json))) {
    swv_string_free(table);
    swv_string_free(json);
  }
  const swv_value argument = swv_value_tensor(x);
  swv_scope* held = nullptr;
  if (one_in(2)) done(swv_mesh_fully_shard_no_sync(mesh, one_in(9) ? nullptr : &held));
  if (done(swv_module_call(module, "forward", one_in(3) ? small() : SWV_MODE_GRAD, &argument, 1, &y,
                           1, nullptr))) {
    if (one_in(3)) done(swv_mesh_reshard(mesh));
    if (y.kind == SWV_VALUE_TENSOR) done(swv_tensor_backward(y.as.tensor, x, nullptr));
    swv_value_clear(&y);
  }
  if (one_in(2)) swv_scope_free(std::exchange(held, nullptr));
  if (done(swv_module_get(module, "0.weight", &weight))) keep(weight);
  if (one_in(2)) done(swv_module_fully_shard(module, mesh, nullptr, nullptr, nullptr));
  swv_scope* whole = nullptr;
  if (done(swv_module_full_params(one_in(9) ? nullptr : module,
                                  one_in(9) ? small() : static_cast<swv_bool>(below(2)),
                                  one_in(3) ? small() - 1 : -1, &whole))) {
    swv_tensor* plain = nullptr;
    if (done(swv_full_params_get(whole, one_in(5) ? text() : "0.weight", &plain))) {
      swv_tensor_free(plain);
    }
    if (one_in(2)) done(swv_full_params_end(whole));
    swv_scope_free(whole);
  }
  done(swv_module_finish_grad_sync(module));
  swv_scope_free(held);
  done(swv_mesh_reshard(mesh));
  done(swv_mesh_fully_shard_counters(mesh, one_in(9) ? nullptr : sized(counters)));
  swv_tensor_free(x);
  swv_module_free(module);
}

// An optimizer that is divided among ranks, and steps.
void Fuzzer::divided() {
  swv_module* module = nullptr;
  swv_tensor *x = nullptr, *parameters[2] = {}, *state = nullptr;
  swv_optimizer* optimizer = nullptr;
  swv_scope* pause = nullptr;
  swv_value y = SWV_NONE;
  swv_zero_options options = SWV_ZERO_OPTIONS_INIT;
  swv_tensor_options whole = SWV_TENSOR_OPTIONS_INIT;
  const int64_t sizes[] = {2, 2};
  swv_mesh* const mesh = one_in(9) ? pick(meshes_) : meshes_[0];
  options.mesh_dim = one_in(5) ? text() : nullptr;
  options.stage = one_in(9) ? small() : static_cast<int32_t>(1 + below(2));
  options.bucket_bytes = one_in(5) ? number() : 8;
  if (!done(swv_module_create_by_kind("Linear", "{\"in_features\": 2, \"out_features\": 2}",
                                      &module)))
    return;
  whole.mesh = one_in(9) ? nullptr : mesh;
  if (!one_in(9)) done(swv_module_distribute(module, mesh, nullptr, nullptr));
  if (done(swv_tensor_ones(sizes, 2, &whole, &x)) &&
      done(swv_module_get(module, "weight", &parameters[0])) &&
      done(swv_module_get(module, "bias", &parameters[1])) &&
      (one_in(3) ? make_optimizer(parameters, &optimizer)
                 : done(swv_optimizer_create_adamw(parameters, 2, nullptr, &optimizer)))) {
    if (one_in(9)) done(swv_optimizer_step(optimizer));
    done(swv_optimizer_use_zero(optimizer, one_in(3) ? nullptr : sized(options)));
    if (one_in(3)) done(swv_optimizer_no_sync(optimizer, &pause));
    const swv_value argument = swv_value_tensor(x);
    if (done(swv_module_call(module, "forward", SWV_MODE_GRAD, &argument, 1, &y, 1, nullptr))) {
      if (y.kind == SWV_VALUE_TENSOR) done(swv_tensor_backward(y.as.tensor, x, nullptr));
      swv_value_clear(&y);
    }
    if (one_in(2)) swv_scope_free(pause), pause = nullptr;
    if (!one_in(5)) done(swv_module_finish_grad_sync(module));
    done(swv_optimizer_step(optimizer));
    done(swv_optimizer_use_zero(optimizer, nullptr));
    const char* const name = one_in(3) ? text() : one_in(2) ? "exp_avg" : "step";
    if (done(swv_optimizer_state(optimizer, below(3), name, &state)) && state != nullptr) {
      done(swv_optimizer_set_state(optimizer, below(3), name, one_in(3) ? x : state));
      keep(state);
    }
    done(swv_optimizer_discard(optimizer));
    done(swv_optimizer_zero_grad(optimizer));
    if (one_in(2)) {
      swv_module_free(module);
      module = nullptr;
    }
    if (one_in(3)) {
      keep(optimizers_, optimizer, swv_optimizer_free, 5);
      optimizer = nullptr;
    }
  }
  swv_scope_free(pause);
  swv_optimizer_free(optimizer);
  for (swv_tensor* t : {x, parameters[0], parameters[1]}) swv_tensor_free(t);
  swv_module_free(module);
}

// A module from a file.
void Fuzzer::scripts() {
  swv_module* module = nullptr;
  const std::string path = folder_ + "/model.pt";
  if (!done(swv_module_load(path.c_str(), &module))) return;
  if (one_in(2)) done(swv_module_distribute(module, pick(meshes_), nullptr, nullptr));
  for (int i = 0; i < 3; ++i) {
    swv_value args[3], results[2];
    for (swv_value& v : args) v = value();
    size_t count = 0;
    const size_t capacity = below(3);
    const char* const method = one_in(5) ? text() : one_in(2) ? "forward" : "both";
    const char* const names[] = {text(), one_in(2) ? "scale" : text()};
    const size_t given = below(4);
    swv_status* const status =
        one_in(2) ? swv_module_call(module, method, small(), args, given, results, capacity, &count)
                  : swv_module_call_named(module, method, small(), args, given, names, length(2),
                                          results, capacity, &count);
    if (done(status) && capacity != 0) {
      for (size_t r = 0; r < count; ++r) swv_value_clear(&results[r]);
    }
  }
  swv_module_free(module);
}

}  // namespace shardweave::capi
