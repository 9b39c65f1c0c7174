// Tensors and operators.
#include "ATen/dlpack.h"
#include "fuzzer.h"

namespace shardweave::capi {

void Fuzzer::tensors() {
  swv_tensor* t = nullptr;
  swv_string* string = nullptr;
  swv_layout* layout = nullptr;
  swv_mesh* mesh = nullptr;
  size_t ndim = 0, count = 0;
  const int64_t* s = sizes(&ndim);
  const swv_tensor_options* options = one_in(4) ? nullptr : sized(tensor_options());
  swv_distribute_options d = SWV_DISTRIBUTE_OPTIONS_INIT;
  d.source = one_in(4) ? small() : 0;
  d.reserved = one_in(50);
  char bytes[512] = {};
  int64_t out[8];
  const swv_buffer buffer = SWV_BUFFER_INIT;
  swv_bool yes;
  swv_value item = SWV_NONE;
  switch (below(14)) {
    case 0:
      if (done(swv_tensor_zeros(s, ndim, options, &t))) keep(t);
      break;
    case 1:
      if (one_in(3)) {
        if (done(swv_tensor_ones(s, ndim, options, &t))) keep(t);
      } else if (one_in(2)) {
        if (done(swv_tensor_rand(s, ndim, options, &t))) keep(t);
      } else if (done(swv_tensor_empty(s, ndim, options, &t))) {
        swv_tensor_free(t);  // what is in it differs from rank to rank
      }
      break;
    case 2:
      if (done(swv_tensor_full(s, ndim, real(), options, &t))) keep(t);
      break;
    case 3:
      if (done(swv_tensor_randn(s, ndim, options, &t))) keep(t);
      break;
    case 4:
      if (done(swv_tensor_from_data(bytes, below(513), s, ndim, options, &t))) keep(t);
      break;
    case 5:
      if (done(swv_tensor_distribute(pick(tensors_), pick(meshes_), pick(layouts_), sized(d), &t)))
        keep(t);
      break;
    case 6:
      if (done(swv_tensor_from_local(pick(tensors_), pick(meshes_), pick(layouts_), s, ndim,
                                     small(), &t)))
        keep(t);
      break;
    case 7:
      if (done(swv_tensor_to_local(pick(tensors_), one_in(2) ? nullptr : pick(layouts_), small(),
                                   &t)))
        keep(t);
      break;
    case 8:
      if (done(swv_tensor_redistribute(pick(tensors_), pick(layouts_), small(), &t))) keep(t);
      break;
    case 9:
      if (done(swv_tensor_full_tensor(pick(tensors_), small(), &t))) keep(t);
      break;
    case 10:
      done(swv_tensor_copy_to_host(pick(tensors_), bytes, below(513)));
      done(swv_tensor_copy_from_host(pick(tensors_), bytes, below(513)));
      done(swv_tensor_buffer(pick(tensors_), one_in(9) ? nullptr : sized(buffer)));
      break;
    case 11:
      done(swv_tensor_sizes(pick(tensors_), out, below(9), &count));
      done(swv_tensor_strides(pick(tensors_), out, below(9), &count));
      done(swv_tensor_is_same(pick(tensors_), pick(tensors_), &yes));
      drop(swv_tensor_to_string(pick(tensors_), &string), &string);
      drop(swv_tensor_values_to_string(pick(tensors_), &string), &string);
      break;
    case 12:
      if (done(swv_tensor_layout(pick(tensors_), &layout)))
        keep(layouts_, layout, swv_layout_free, 12);
      if (done(swv_tensor_mesh(pick(tensors_), &mesh))) keep(meshes_, mesh, swv_mesh_free, 6);
      break;
    default:
      if (done(swv_tensor_item(pick(tensors_), &item))) swv_value_clear(&item);
  }
}

// Whether it writes an argument. With a graph that leads back to it, a tensor that is written would keep
// itself, in LibTorch as here: x.copy_(x.pow(2)).
bool Fuzzer::writes(const swv_op* op) {
  swv_string* schema = nullptr;
  if (!done(swv_op_schema(op, &schema))) return false;
  const bool result = std::strstr(swv_string_data(schema), "!)") != nullptr;
  swv_string_free(schema);
  return result;
}

void Fuzzer::operators() {
  swv_op* op = nullptr;
  if (ops_.size() < 20 || one_in(20)) {
    if (done(swv_op_find(op_name(), &op))) keep(ops_, op, swv_op_free, 30);
  }
  const swv_op* const called = pick(ops_);
  swv_value args[6], results[4];
  for (swv_value& v : args) v = value();
  std::vector<swv_tensor*> alone;
  if (writes(called)) {
    for (swv_value& v : args) {
      swv_tensor* t = nullptr;
      if (&v == args || v.kind != SWV_VALUE_TENSOR || !done(swv_tensor_detach(v.as.tensor, &t)))
        continue;
      v = swv_value_tensor(t);
      alone.push_back(t);
    }
  }
  const char* names[] = {"self", "dim", "other"};
  size_t num_results = 0;
  const size_t capacity = below(5), num = one_in(50) ? length(6) : 1 + below(5);
  if (one_in(20)) {
    swv_string *text = nullptr, *json = nullptr;
    if (done(swv_op_explain(pick(ops_), args, num, one_in(3) ? nullptr : &text,
                            one_in(3) ? nullptr : &json))) {
      swv_string_free(text);
      swv_string_free(json);
    }
  }
  swv_status* status =
      one_in(5) ? swv_op_call_named(called, small(), args, num, names, length(3), results, capacity,
                                    &num_results)
                : swv_op_call(called, small(), args, num, results, capacity, &num_results);
  for (swv_tensor* t : alone) swv_tensor_free(t);
  if (!done(status) || capacity == 0) return;
  for (size_t i = 0; i < num_results; ++i) {
    if (results[i].kind == SWV_VALUE_TENSOR) {
      keep(results[i].as.tensor);
      results[i] = swv_value_none();
    }
    swv_value_clear(&results[i]);
  }
}

void Fuzzer::dlpack() {
  DLManagedTensorVersioned* managed = nullptr;
  swv_tensor *t = nullptr, *alone = nullptr;
  // Not itself: as its gradient, what is made from its memory would keep it.
  if (!done(swv_tensor_detach(pick(tensors_), &alone))) return;
  const bool exported = done(swv_tensor_to_dlpack(alone, one_in(30) ? sizes_ : nullptr, &managed));
  swv_tensor_free(alone);
  if (!exported) return;
  if (one_in(8)) managed->version.major = static_cast<uint32_t>(number());
  if (one_in(8)) managed->flags = static_cast<uint64_t>(number());
  if (one_in(8)) managed->dl_tensor.device.device_type = static_cast<DLDeviceType>(below(20));
  if (one_in(8)) managed->dl_tensor.dtype.code = static_cast<uint8_t>(below(20));
  if (one_in(8)) managed->dl_tensor.dtype.lanes = static_cast<uint16_t>(below(3));
  if (one_in(20)) managed->dl_tensor.ndim = one_in(2) ? -1 : 1 << 20;
  if (done(swv_tensor_from_dlpack(managed, one_in(30) ? sizes_ : nullptr,
                                  one_in(20) ? nullptr : &t)))
    keep(t);
}

}  // namespace shardweave::capi
