// Modules, plans and optimizers.
#include "fuzzer.h"

namespace shardweave::capi {

void Fuzzer::modules() {
  swv_module* module = nullptr;
  swv_plan* plan = nullptr;
  swv_optimizer* optimizer = nullptr;
  swv_tensor* t = nullptr;
  swv_string* string = nullptr;
  swv_tensor* parameters[2] = {pick(tensors_), pick(tensors_)};
  const swv_named_placement named[] = {{text(), text()}};
  swv_sgd_options sgd = SWV_SGD_OPTIONS_INIT;
  swv_adamw_options adamw = SWV_ADAMW_OPTIONS_INIT;
  swv_clip_options clip = SWV_CLIP_OPTIONS_INIT;
  swv_distribute_options distribute = SWV_DISTRIBUTE_OPTIONS_INIT;
  double norm = 0;
  size_t n = 0;
  clip.norm_type = real(), clip.error_if_nonfinite = static_cast<swv_bool>(below(2));
  sgd.lr = real(), sgd.momentum = real(), sgd.nesterov = static_cast<swv_bool>(below(2));
  adamw.beta1 = one_in(2) ? real() : 0.9, adamw.amsgrad = static_cast<swv_bool>(below(2));
  swv_forward* forward = nullptr;
  swv_scope* scope = nullptr;
  swv_layout* const layout = pick(layouts_);
  swv_tensor* outputs[2] = {};
  swv_bool yes = 0;
  switch (below(18)) {
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
      if (one_in(2)) {
        if (done(swv_optimizer_create_sgd(parameters, length(2), sized(sgd), &optimizer)))
          keep(optimizers_, optimizer, swv_optimizer_free, 5);
      } else {
        if (done(swv_optimizer_create_adamw(parameters, length(2), sized(adamw), &optimizer)))
          keep(optimizers_, optimizer, swv_optimizer_free, 5);
      }
      break;
    case 11:
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
    case 14:
      done(swv_plan_add_layout(pick(plans_), text(), layout));
      done(one_in(2) ? swv_plan_add_forward(pick(plans_), text(), named, length(1))
                     : swv_plan_add_forward_layout(pick(plans_), text(), layout));
      if (done(swv_plan_from_hugging_face(pick(modules_), text(), text(), &plan)))
        keep(plans_, plan, swv_plan_free, 5);
      break;
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
    default:
      if (done(swv_optimizer_state(pick(optimizers_), below(3), text(), &t))) keep(t);
      done(swv_optimizer_set_state(pick(optimizers_), below(3), text(), pick(tensors_)));
      if (done(swv_module_load(text(), &module))) swv_module_free(module);
  }
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
