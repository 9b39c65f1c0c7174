// Gradients, and functions of the host that fail now and then.
#include "fuzzer.h"

namespace shardweave::capi {
namespace {

swv_status* forward(void* user_data, const swv_function_call* call) {
  const uint64_t how = *static_cast<uint64_t*>(user_data);
  for (size_t i = 0; i < call->num_outputs && call->num_inputs > 0; ++i) {
    if (how % 5 == 1) continue;
    if (how % 5 == 2) call->outputs[i] = const_cast<swv_tensor*>(call->inputs[0]);
    if (how % 5 != 2) {
      swv_status_free(swv_tensor_detach(call->inputs[i % call->num_inputs], &call->outputs[i]));
    }
  }
  if (how % 5 == 3) {
    return swv_status_new_of_rank(SWV_CODE_CANCELLED, "the host does not want to",
                                  static_cast<int32_t>(how % 3) - 1);
  }
  return how % 3 == 0 ? swv_function_context_save(call->context, call->inputs, call->num_inputs)
                      : nullptr;
}
swv_status* backward(void* user_data, const swv_function_call* call) {
  const uint64_t how = *static_cast<uint64_t*>(user_data);
  swv_tensor* saved = nullptr;
  swv_status_free(swv_function_context_saved(call->context, how % 2, &saved));
  swv_tensor_free(saved);
  if (how % 7 == 1) return swv_status_new(SWV_CODE_CANCELLED, "the host does not want to");
  for (size_t i = 0; i < call->num_outputs; ++i) {
    if (call->inputs[0] != nullptr && how % 4 != 0)
      swv_status_free(swv_tensor_share(call->inputs[0], &call->outputs[i]));
  }
  return nullptr;
}
swv_status* segment(void* user_data, const swv_function_call* call) {
  if (*static_cast<uint64_t*>(user_data) % 11 == 1 && call->mode == SWV_MODE_GRAD)
    return swv_status_new(SWV_CODE_CANCELLED, "the host does not want to again");
  return forward(user_data, call);
}
void drop_user_data(void* user_data) {
  delete static_cast<uint64_t*>(user_data);
}

}  // namespace

void Fuzzer::autograd() {
  swv_tensor* t = nullptr;
  swv_tensor* several[3] = {};
  const swv_tensor* inputs[3] = {pick(tensors_), pick(tensors_), pick(tensors_)};
  const swv_tensor* outputs[1] = {pick(tensors_)};
  swv_backward_options o = SWV_BACKWARD_OPTIONS_INIT;
  o.retain_graph = one_in(30) ? small() : static_cast<swv_bool>(below(2));
  o.create_graph = one_in(5);
  o.allow_unused = one_in(2);
  swv_bool yes;
  switch (below(8)) {
    case 0:
      o.create_graph = 0;  // a gradient with a graph and its parameter keep each other
      done(swv_tensor_backward(pick(tensors_), one_in(2) ? nullptr : pick(tensors_),
                               one_in(3) ? nullptr : sized(o)));
      break;
    case 1: {
      const size_t n = 1 + below(3);
      if (done(swv_gradients(outputs, 1, inputs, n, nullptr, sized(o), several))) {
        for (size_t i = 0; i < n; ++i) keep(several[i]);
      }
      break;
    }
    case 2:
      done(swv_tensor_set_requires_grad(pick(tensors_),
                                        one_in(9) ? small() : static_cast<swv_bool>(below(2))));
      if (one_in(4)) done(swv_tensor_clear_requires_grad(pick(tensors_)));
      break;
    case 3:
      // Not itself: written with a graph that leads back to its tensor, the two would keep each other.
      if (done(swv_tensor_grad(pick(tensors_), &t)) && t != nullptr) {
        swv_tensor* alone = nullptr;
        if (done(swv_tensor_detach(t, &alone))) keep(alone);
        swv_tensor_free(t);
      }
      break;
    case 4:
      // Its own gradient, a tensor would keep itself.
      if (one_in(5) || !done(swv_tensor_detach(pick(tensors_), &t))) t = nullptr;
      done(swv_tensor_set_grad(pick(tensors_), t));
      swv_tensor_free(t);
      break;
    case 5:
      if (done(swv_tensor_detach(pick(tensors_), &t))) keep(t);
      done(swv_tensor_is_leaf(pick(tensors_), &yes));
      break;
    case 6: {
      swv_segment s = SWV_SEGMENT_INIT;
      s.name = one_in(10) ? text() : "s";
      s.user_data = new uint64_t(chance_.word());
      s.forward = one_in(20) ? nullptr : segment;
      s.drop = drop_user_data;
      const size_t n = 1 + below(2);
      swv_segment* const given = sized(s);
      if (!has_size(*given, s)) drop_user_data(s.user_data);
      if (done(swv_checkpoint(given, small(), inputs, below(4), several, n))) {
        for (size_t i = 0; i < n; ++i) keep(several[i]);
      }
      break;
    }
    default: {
      swv_function f = SWV_FUNCTION_INIT;
      f.name = one_in(10) ? text() : "f";
      f.user_data = new uint64_t(chance_.word());
      f.forward = one_in(20) ? nullptr : forward;
      f.backward = one_in(10) ? nullptr : backward;
      f.drop = drop_user_data;
      const size_t n = 1 + below(2);
      swv_function* const given = sized(f);
      // What is no struct has no drop.
      if (!has_size(*given, f)) drop_user_data(f.user_data);
      if (done(swv_function_apply(given, small(), inputs, below(4), several, n))) {
        for (size_t i = 0; i < n; ++i) keep(several[i]);
      }
    }
  }
}

// What is saved in forward is there in backward.
void Fuzzer::guided_autograd() {
  swv_tensor *x = nullptr, *y = nullptr;
  swv_tensor_options with_grad = SWV_TENSOR_OPTIONS_INIT;
  with_grad.requires_grad = 1;
  swv_function f = SWV_FUNCTION_INIT;
  f.name = "f";
  f.user_data = new uint64_t(30 * (1 + chance_.below(3)));  // saves, writes, and looks at the first
  f.forward = forward;
  f.backward = backward;
  f.drop = drop_user_data;
  must(swv_tensor_ones(nullptr, 0, &with_grad, &x));
  const swv_tensor* const inputs[] = {x};
  if (done(swv_function_apply(&f, SWV_MODE_GRAD, inputs, 1, &y, 1))) {
    done(swv_tensor_backward(y, nullptr, nullptr));
    swv_tensor_free(y);
  }
  swv_tensor_free(x);
}

}  // namespace shardweave::capi
