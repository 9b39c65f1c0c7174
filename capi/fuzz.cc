// Calls everything at random, with good, bad and absurd arguments, on one rank: nothing may crash, hang or leak.
//
//   ./bazelw run --config=asan //capi:fuzz -- --seconds=600 --seed=7
//
// What it prints last before a crash is the seed and the number of the step that repeat it: --seed=7 --from=12345 runs the
// same steps. Handles come from a pool of live ones, freed ones (in checked mode), ones of other kinds, and NULL.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "shardweave.h"

namespace {

class Fuzzer {
 public:
  explicit Fuzzer(uint64_t seed) : random_(seed) {
    swv_world* world = nullptr;
    must(swv_world_create_local(1, nullptr, &world));
    worlds_.push_back(world);
  }
  ~Fuzzer() {
    for (auto* h : scopes_) swv_strict_scope_free(h);
    for (auto* h : works_) swv_work_free(h);
    for (auto* h : optimizers_) swv_optimizer_free(h);
    for (auto* h : modules_) swv_module_free(h);
    for (auto* h : plans_) swv_plan_free(h);
    for (auto* h : ops_) swv_op_free(h);
    for (auto* h : tensors_) swv_tensor_free(h);
    for (auto* h : layouts_) swv_layout_free(h);
    for (auto* h : meshes_) swv_mesh_free(h);
    for (auto* h : comms_) swv_comm_free(h);
    for (auto* h : worlds_) swv_world_free(h);
  }
  Fuzzer(const Fuzzer&) = delete;
  Fuzzer& operator=(const Fuzzer&) = delete;

  void step();
  int64_t succeeded() const { return succeeded_; }
  int64_t failed() const { return failed_; }

 private:
  // --- chance -----------------------------------------------------------------------------------------
  uint64_t below(uint64_t n) { return n == 0 ? 0 : random_() % n; }
  bool one_in(uint64_t n) { return below(n) == 0; }
  int64_t number() {
    static constexpr int64_t kOdd[] = {0, 1, -1, 2, 3, 5, 7, 64, 255, 1 << 20, INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN};
    return one_in(3) ? kOdd[below(std::size(kOdd))] : static_cast<int64_t>(below(8));
  }
  int32_t small() { return static_cast<int32_t>(one_in(8) ? number() : static_cast<int64_t>(below(4))); }
  double real() {
    static const double kOdd[] = {0, -0.0, 1, -1, 0.5, 1e-300, 1e300, INFINITY, -INFINITY, NAN};
    return kOdd[below(std::size(kOdd))];
  }
  // A length for an array of `have`: mostly right; a lie would be the caller's memory error, but absurd ones are refused.
  size_t length(size_t have) { return one_in(20) ? SIZE_MAX - below(16) : below(have + 1); }
  const char* text() {
    static const char* const kTexts[] = {
        nullptr, "", "x", "dp", "tp", "weight", "a.b.c", "..", "a.", "\xff\xfe", "\xe2\x82", "[R]", "[S(0)]", "[S(1)]", "[P(sum)]",
        "[S(0), R]", "[S(99)]", "[S(0, sf=3)]", "[S(0, sizes=[2])]", "S(0)", "R", "P(avg)", "x=1", "x=1,y=1", "x=2",
        "{}", "{\"parameter\": {\"*\": {\"x\": \"S(0)\"}}}", "{\"parameter\": {\"*\": {\"x\": \"R\"}}}", "{\"parameter\": 3}", "[[[[", "step", "exp_avg",
        "momentum_buffer", "forward", "/nowhere"};
    return kTexts[below(std::size(kTexts))];
  }
  const char* op_name() {
    static const char* const kNames[] = {
        "aten::add.Tensor", "aten::add", "aten::mul", "aten::mm", "aten::matmul", "aten::sum", "aten::sum.dim_IntList", "aten::mean",
        "aten::cat", "aten::stack", "aten::split.Tensor", "aten::t", "aten::view", "aten::reshape", "aten::relu", "aten::gelu",
        "aten::softmax.int", "aten::layer_norm", "aten::embedding", "aten::index.Tensor", "aten::max.dim", "aten::clamp",
        "aten::linear", "aten::mse_loss", "aten::zeros_like", "aten::detach", "aten::clone", "aten::to.dtype", "aten::mul_",
        "aten::copy_", "aten::dropout", "aten::transpose.int", "aten::expand", "aten::squeeze", "aten::select.int",
        "aten::slice.Tensor", "aten::pow", "aten::where", "aten::topk", "aten::sort", "aten::_local_scalar_dense", "aten::size.int",
        "aten::nope", "aten::ad", "prim::print", "", "::", "aten::add.", "aten::add.default"};
    return one_in(30) ? text() : kNames[below(std::size(kNames))];
  }
  const int64_t* sizes(size_t* ndim) {
    static int64_t buffer[6];
    *ndim = below(4);
    for (int64_t& size : buffer) size = one_in(40) ? number() : static_cast<int64_t>(below(5));
    if (one_in(30)) *ndim = length(6);
    return one_in(30) ? nullptr : buffer;
  }

  // --- handles ----------------------------------------------------------------------------------------
  template <typename T>
  T* pick(const std::vector<T*>& from) {
    if (one_in(25)) return nullptr;
    if (one_in(40)) return reinterpret_cast<T*>(any());
    return from.empty() ? nullptr : from[below(from.size())];
  }
  void* any() {
    switch (below(6)) {
      case 0: return tensors_.empty() ? nullptr : static_cast<void*>(tensors_[0]);
      case 1: return meshes_.empty() ? nullptr : static_cast<void*>(meshes_[0]);
      case 2: return layouts_.empty() ? nullptr : static_cast<void*>(layouts_[0]);
      case 3: return static_cast<void*>(worlds_[0]);
      case 4: return swv_live_handles() >= 0 ? freed_ : nullptr;  // only checked mode may see it
      default: return ops_.empty() ? nullptr : static_cast<void*>(ops_[0]);
    }
  }
  // Keeps what was made; now and then frees an old one.
  template <typename T>
  void keep(std::vector<T*>& in, T* handle, void (*free)(T*), size_t most = 24) {
    if (handle == nullptr) return;
    in.push_back(handle);
    if (in.size() <= most) return;
    const size_t i = 1 + below(in.size() - 1);
    freed_ = in[i];
    free(in[i]);
    in.erase(in.begin() + static_cast<std::ptrdiff_t>(i));
  }
  void keep(swv_tensor* t) {
    int64_t numel = 0;
    if (t == nullptr) return;
    done(swv_tensor_numel(t, &numel));
    if (numel > 1 << 16) return swv_tensor_free(t);  // what grows is not followed
    keep(tensors_, t, swv_tensor_free, 40);
  }

  static void must(swv_status* status) {
    if (status == nullptr) return;
    std::fprintf(stderr, "fuzz: %s\n", swv_status_message(status));
    std::abort();
  }
  bool done(swv_status* status) {
    if (status == nullptr) return ++succeeded_, true;
    ++failed_;
    // Every error has a code, and names a function.
    if (swv_status_code(status) <= SWV_OK || swv_status_code(status) > SWV_UNAUTHENTICATED ||
        std::strncmp(swv_status_message(status), "swv_", 4) != 0) {
      std::fprintf(stderr, "fuzz: an error without a name: %s\n", swv_status_message(status));
      std::abort();
    }
    swv_status_free(status);
    return false;
  }
  void drop(swv_status* status, swv_string** text) {
    if (done(status)) swv_string_free(*text);
  }

  swv_value value();
  swv_tensor_options tensor_options();
  void worlds();
  void layouts();
  void tensors();
  void operators();
  void autograd();
  void modules();
  void communication();

  std::mt19937_64 random_;
  int64_t succeeded_ = 0;
  int64_t failed_ = 0;
  void* freed_ = nullptr;
  int64_t ints_[4] = {};
  double floats_[4] = {};
  swv_bool bools_[4] = {};
  swv_tensor* list_[4] = {};
  std::vector<swv_world*> worlds_;
  std::vector<swv_comm*> comms_;
  std::vector<swv_work*> works_;
  std::vector<swv_mesh*> meshes_;
  std::vector<swv_layout*> layouts_;
  std::vector<swv_tensor*> tensors_;
  std::vector<swv_op*> ops_;
  std::vector<swv_module*> modules_;
  std::vector<swv_plan*> plans_;
  std::vector<swv_optimizer*> optimizers_;
  std::vector<swv_strict_scope*> scopes_;
};

swv_value Fuzzer::value() {
  swv_value v = SWV_NONE;
  switch (below(12)) {
    case 0: v = swv_value_none(); break;
    case 1: v = swv_value_default(); break;
    case 2: case 3: case 4: case 5: v = swv_value_tensor(pick(tensors_)); break;
    case 6: v = swv_value_int(one_in(6) ? number() : static_cast<int64_t>(below(3))); break;
    case 7: v = swv_value_float(real()); break;
    case 8: v = swv_value_bool(one_in(20) ? small() : static_cast<swv_bool>(below(2))); break;
    case 9:
      for (int64_t& i : ints_) i = one_in(10) ? number() : static_cast<int64_t>(below(3));
      v = swv_value_ints(one_in(40) ? nullptr : ints_, length(4));
      break;
    case 10:
      for (swv_tensor*& t : list_) t = pick(tensors_);
      v = swv_value_tensors(one_in(40) ? nullptr : list_, length(4));
      break;
    default: v = swv_value_dtype(small()); break;
  }
  if (one_in(60)) v.kind = small();
  // A kind that reads other memory than was given is the caller's lie, not bad input.
  if (v.kind == SWV_VALUE_STRING) v = swv_value_string("contiguous_format", length(17));
  if (v.kind == SWV_VALUE_TENSOR && v.as.tensor != nullptr && v.as.integer < 4096) v.as.tensor = nullptr;
  if (one_in(100)) v.reserved = 1;
  return v;
}

swv_tensor_options Fuzzer::tensor_options() {
  swv_tensor_options o = SWV_TENSOR_OPTIONS_INIT;
  o.dtype = one_in(3) ? small() : 0;
  o.requires_grad = one_in(30) ? small() : static_cast<swv_bool>(below(2));
  if (one_in(2)) o.mesh = pick(meshes_);
  if (one_in(3)) o.layout = pick(layouts_);
  if (one_in(40)) o.struct_size = length(64);
  if (o.struct_size > sizeof(o) && o.struct_size <= 4096) o.struct_size = 0;
  return o;
}

void Fuzzer::worlds() {
  swv_world* world = nullptr;
  swv_mesh* mesh = nullptr;
  swv_string* string = nullptr;
  const swv_mesh_dim dims[] = {{text(), one_in(4) ? number() : 1}, {text(), 1}};
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
    case 2: case 3:
      if (done(swv_mesh_create(pick(worlds_), dims, length(2), &mesh))) keep(meshes_, mesh, swv_mesh_free, 6);
      break;
    case 4:
      if (done(swv_mesh_parse(pick(worlds_), text(), &mesh))) keep(meshes_, mesh, swv_mesh_free, 6);
      break;
    case 5:
      if (done(swv_mesh_slice(pick(meshes_), names, length(2), &mesh))) keep(meshes_, mesh, swv_mesh_free, 6);
      break;
    case 6:
      if (done(swv_mesh_flatten(pick(meshes_), names, length(2), text(), &mesh))) keep(meshes_, mesh, swv_mesh_free, 6);
      break;
    case 7:
      done(swv_mesh_shape(pick(meshes_), one_in(9) ? nullptr : out, below(9), &count));
      done(swv_mesh_coordinate(pick(meshes_), out, below(9), one_in(9) ? nullptr : &count));
      done(swv_mesh_find_dim(pick(meshes_), text(), &i));
      break;
    case 8: {
      const swv_random_state state = {static_cast<uint64_t>(number()), static_cast<uint64_t>(number())};
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
  const int64_t mesh_shape[] = {static_cast<int64_t>(1 + below(4)), number()}, coordinate[] = {number(), 0};
  const swv_named_placement named[] = {{text(), text()}, {text(), text()}};
  int64_t shape[6], offset[6], bytes;
  size_t ndim = 0;
  for (swv_placement& p : placements) {
    p = {small(), small(), small(), one_in(30) ? 1 : 0, number(), one_in(3) ? mesh_shape : nullptr, length(2)};
  }
  switch (below(6)) {
    case 0: case 1:
      if (done(swv_layout_parse(text(), &layout))) keep(layouts_, layout, swv_layout_free, 12);
      break;
    case 2:
      if (done(swv_layout_create(placements, length(3), order, length(2), &layout))) keep(layouts_, layout, swv_layout_free, 12);
      break;
    case 3:
      if (done(swv_layout_create_named(pick(meshes_), named, length(2), &layout))) keep(layouts_, layout, swv_layout_free, 12);
      break;
    case 4: {
      const int64_t* s = sizes(&ndim);
      done(swv_layout_local_extent(pick(layouts_), mesh_shape, coordinate, 1 + below(2), s, ndim, shape, offset));
      drop(swv_layout_plan(pick(layouts_), pick(layouts_), mesh_shape, 1, s, ndim, small(), &bytes, &string), &string);
      string = nullptr;
      break;
    }
    default:
      drop(swv_layout_to_string(pick(layouts_), &string), &string);
      done(swv_layout_placement(pick(layouts_), small(), &got));
  }
}

void Fuzzer::tensors() {
  swv_tensor* t = nullptr;
  swv_string* string = nullptr;
  swv_layout* layout = nullptr;
  swv_mesh* mesh = nullptr;
  size_t ndim = 0, count = 0;
  const int64_t* s = sizes(&ndim);
  swv_tensor_options o = tensor_options();
  const swv_tensor_options* options = one_in(4) ? nullptr : &o;
  swv_distribute_options d = SWV_DISTRIBUTE_OPTIONS_INIT;
  d.source = one_in(4) ? number() : 0;
  char bytes[512] = {};
  int64_t out[8];
  swv_buffer buffer;
  swv_bool yes;
  swv_value item = SWV_NONE;
  switch (below(14)) {
    case 0: if (done(swv_tensor_zeros(s, ndim, options, &t))) keep(t); break;
    case 1: if (done(swv_tensor_ones(s, ndim, options, &t))) keep(t); break;
    case 2: if (done(swv_tensor_full(s, ndim, real(), options, &t))) keep(t); break;
    case 3: if (done(swv_tensor_randn(s, ndim, options, &t))) keep(t); break;
    case 4: if (done(swv_tensor_from_data(bytes, below(513), s, ndim, options, &t))) keep(t); break;
    case 5: if (done(swv_tensor_distribute(pick(tensors_), pick(meshes_), pick(layouts_), &d, &t))) keep(t); break;
    case 6: if (done(swv_tensor_from_local(pick(tensors_), pick(meshes_), pick(layouts_), s, ndim, small(), &t))) keep(t); break;
    case 7: if (done(swv_tensor_to_local(pick(tensors_), one_in(2) ? nullptr : pick(layouts_), small(), &t))) keep(t); break;
    case 8: if (done(swv_tensor_redistribute(pick(tensors_), pick(layouts_), small(), &t))) keep(t); break;
    case 9: if (done(swv_tensor_full_tensor(pick(tensors_), small(), &t))) keep(t); break;
    case 10:
      done(swv_tensor_copy_to_host(pick(tensors_), bytes, below(513)));
      done(swv_tensor_copy_from_host(pick(tensors_), bytes, below(513)));
      done(swv_tensor_buffer(pick(tensors_), &buffer));
      break;
    case 11:
      done(swv_tensor_sizes(pick(tensors_), out, below(9), &count));
      done(swv_tensor_strides(pick(tensors_), out, below(9), &count));
      done(swv_tensor_is_same(pick(tensors_), pick(tensors_), &yes));
      drop(swv_tensor_to_string(pick(tensors_), &string), &string);
      break;
    case 12:
      if (done(swv_tensor_layout(pick(tensors_), &layout))) keep(layouts_, layout, swv_layout_free, 12);
      if (done(swv_tensor_mesh(pick(tensors_), &mesh))) keep(meshes_, mesh, swv_mesh_free, 6);
      break;
    default:
      if (done(swv_tensor_item(pick(tensors_), &item))) swv_value_clear(&item);
  }
}

void Fuzzer::operators() {
  swv_op* op = nullptr;
  if (ops_.size() < 20 || one_in(20)) {
    if (done(swv_op_find(op_name(), &op))) keep(ops_, op, swv_op_free, 30);
  }
  swv_value args[6], results[4];
  for (swv_value& v : args) v = value();
  const char* names[] = {"self", "dim", "other"};
  size_t num_results = 0;
  const size_t capacity = below(5), num = one_in(50) ? length(6) : 1 + below(5);
  swv_status* status =
      one_in(5) ? swv_op_call_named(pick(ops_), small(), args, num, names, length(3), results, capacity, &num_results)
                : swv_op_call(pick(ops_), small(), args, num, results, capacity, &num_results);
  if (!done(status) || capacity == 0) return;
  for (size_t i = 0; i < num_results; ++i) {
    if (results[i].kind == SWV_VALUE_TENSOR) {
      keep(results[i].as.tensor);
      results[i] = swv_value_none();
    }
    swv_value_clear(&results[i]);
  }
}

swv_status* forward(void* user_data, swv_function_context* context, swv_grad_mode, const swv_tensor* const* inputs,
                    size_t num_inputs, swv_tensor** outputs, size_t num_outputs) {
  const uint64_t how = *static_cast<uint64_t*>(user_data);
  for (size_t i = 0; i < num_outputs && num_inputs > 0; ++i) {
    if (how % 5 == 1) continue;
    if (how % 5 == 2) outputs[i] = const_cast<swv_tensor*>(inputs[0]);
    if (how % 5 != 2) swv_status_free(swv_tensor_detach(inputs[i % num_inputs], &outputs[i]));
  }
  if (how % 5 == 3) return swv_status_new(SWV_CANCELLED, "the host does not want to");
  return how % 3 == 0 ? swv_function_context_save(context, inputs, num_inputs) : nullptr;
}
swv_status* backward(void* user_data, swv_function_context* context, swv_grad_mode, const swv_tensor* const* grad_outputs,
                     size_t, swv_tensor** grad_inputs, size_t num_inputs) {
  const uint64_t how = *static_cast<uint64_t*>(user_data);
  swv_tensor* saved = nullptr;
  swv_status_free(swv_function_context_saved(context, how % 2, &saved));
  swv_tensor_free(saved);
  if (how % 7 == 1) return swv_status_new(SWV_CANCELLED, "the host does not want to");
  for (size_t i = 0; i < num_inputs; ++i) {
    if (grad_outputs[0] != nullptr && how % 4 != 0) swv_status_free(swv_tensor_share(grad_outputs[0], &grad_inputs[i]));
  }
  return nullptr;
}
void drop_user_data(void* user_data) {
  delete static_cast<uint64_t*>(user_data);
}

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
  switch (below(7)) {
    case 0: done(swv_tensor_backward(pick(tensors_), one_in(2) ? nullptr : pick(tensors_), one_in(3) ? nullptr : &o)); break;
    case 1: {
      const size_t n = 1 + below(3);
      if (done(swv_gradients(outputs, 1, inputs, n, nullptr, &o, several))) {
        for (size_t i = 0; i < n; ++i) keep(several[i]);
      }
      break;
    }
    case 2: done(swv_tensor_set_requires_grad(pick(tensors_), one_in(9) ? small() : static_cast<swv_bool>(below(2)))); break;
    case 3: if (done(swv_tensor_grad(pick(tensors_), &t))) keep(t); break;
    case 4: done(swv_tensor_set_grad(pick(tensors_), pick(tensors_))); break;
    case 5: if (done(swv_tensor_detach(pick(tensors_), &t))) keep(t); done(swv_tensor_is_leaf(pick(tensors_), &yes)); break;
    default: {
      swv_function f = SWV_FUNCTION_INIT;
      f.name = one_in(10) ? text() : "f";
      f.user_data = new uint64_t(random_());
      f.forward = one_in(20) ? nullptr : forward;
      f.backward = one_in(10) ? nullptr : backward;
      f.drop = drop_user_data;
      const size_t n = 1 + below(2);
      if (done(swv_function_apply(&f, small(), inputs, below(4), several, n))) {
        for (size_t i = 0; i < n; ++i) keep(several[i]);
      }
    }
  }
}

void Fuzzer::modules() {
  swv_module* module = nullptr;
  swv_plan* plan = nullptr;
  swv_optimizer* optimizer = nullptr;
  swv_tensor* t = nullptr;
  swv_string* string = nullptr;
  const swv_tensor* parameters[2] = {pick(tensors_), pick(tensors_)};
  const swv_named_placement named[] = {{text(), text()}};
  swv_sgd_options sgd = SWV_SGD_OPTIONS_INIT;
  swv_adamw_options adamw = SWV_ADAMW_OPTIONS_INIT;
  size_t n = 0;
  sgd.lr = real(), sgd.momentum = real(), sgd.nesterov = static_cast<swv_bool>(below(2));
  adamw.beta1 = one_in(2) ? real() : 0.9, adamw.amsgrad = static_cast<swv_bool>(below(2));
  switch (below(13)) {
    case 0: if (done(swv_module_create(&module))) keep(modules_, module, swv_module_free, 5); break;
    case 1: done(swv_module_add_parameter(pick(modules_), text(), pick(tensors_))); break;
    case 2: done(swv_module_add_buffer(pick(modules_), text(), pick(tensors_))); break;
    case 3: if (done(swv_module_parameter(pick(modules_), below(3), &string, &t))) { swv_string_free(string); keep(t); } break;
    case 4: if (done(swv_module_get(pick(modules_), text(), &t))) keep(t); done(swv_module_num_buffers(pick(modules_), &n)); break;
    case 5: if (done(swv_plan_from_json(text(), &plan))) keep(plans_, plan, swv_plan_free, 5); break;
    case 6: if (done(swv_plan_create(&plan))) keep(plans_, plan, swv_plan_free, 5); break;
    case 7: done(swv_plan_add(pick(plans_), text(), named, length(1))); drop(swv_plan_to_json(pick(plans_), &string), &string); break;
    case 8: done(swv_module_distribute(pick(modules_), pick(meshes_), one_in(2) ? nullptr : pick(plans_), nullptr)); break;
    case 9: done(swv_module_finish_grad_sync(pick(modules_))); done(swv_finish_grad_sync(parameters, length(2))); break;
    case 10:
      if (one_in(2)) {
        if (done(swv_optimizer_create_sgd(parameters, length(2), &sgd, &optimizer))) keep(optimizers_, optimizer, swv_optimizer_free, 5);
      } else {
        if (done(swv_optimizer_create_adamw(parameters, length(2), &adamw, &optimizer))) keep(optimizers_, optimizer, swv_optimizer_free, 5);
      }
      break;
    case 11:
      done(swv_optimizer_step(pick(optimizers_)));
      done(swv_optimizer_zero_grad(pick(optimizers_)));
      done(swv_optimizer_set_lr(pick(optimizers_), real()));
      break;
    default:
      if (done(swv_optimizer_state(pick(optimizers_), below(3), text(), &t))) keep(t);
      if (done(swv_module_load(text(), &module))) swv_module_free(module);
  }
}

void Fuzzer::communication() {
  swv_comm* comm = nullptr;
  swv_work* work = nullptr;
  float in[8] = {}, out[8] = {};
  int64_t counts[2] = {static_cast<int64_t>(below(4)), 1};
  swv_call_options o = SWV_CALL_OPTIONS_INIT;
  o.timeout_ms = 1000;
  o.tag = one_in(10) ? text() : "fuzz";
  const auto buffer = [&](float* data) {
    const int64_t count = one_in(20) ? -number() : static_cast<int64_t>(below(9));
    return swv_buffer{one_in(30) ? nullptr : data, count > 8 ? -1 : count, one_in(10) ? small() : SWV_F32,
                      {one_in(30) ? small() : 0, 0}, one_in(50) ? 1 : 0};
  };
  swv_buffer a = buffer(in), b = buffer(out);
  // Eight elements of at most four bytes are there.
  for (swv_buffer* x : {&a, &b}) {
    if (swv_dtype_size(x->dtype) > 4) x->dtype = SWV_F32;
  }
  swv_world* world = nullptr;
  if (comms_.size() < 2 || one_in(50)) {  // an error may break a group: new worlds come
    must(swv_world_create_local(1, nullptr, &world));
    if (done(swv_world_comm(world, &comm))) keep(comms_, comm, swv_comm_free, 4);
    swv_world_free(world);
    comm = nullptr;
  }
  switch (below(9)) {
    case 0: done(swv_comm_all_reduce(pick(comms_), &a, &b, small(), &o, nullptr)); break;
    case 1: done(swv_comm_all_gather(pick(comms_), &a, one_in(20) ? nullptr : &b, &o, nullptr)); break;
    case 2: done(swv_comm_all_gather_v(pick(comms_), &a, &b, counts, length(2), &o, nullptr)); break;
    case 3: done(swv_comm_reduce_scatter(pick(comms_), &a, &b, small(), &o, nullptr)); break;
    case 4: done(swv_comm_all_to_all_v(pick(comms_), &a, counts, &b, counts, length(2), &o, nullptr)); break;
    case 5: done(swv_comm_broadcast(pick(comms_), &a, small(), &o, nullptr)); break;
    case 6: done(swv_comm_gather(pick(comms_), &a, one_in(2) ? nullptr : &b, small(), &o, nullptr)); break;
    case 7:
      if (done(swv_comm_split(pick(comms_), small(), small(), text(), &comm))) keep(comms_, comm, swv_comm_free, 4);
      break;
    default:
      if (done(swv_comm_barrier(pick(comms_), &o, &work))) {
        done(swv_work_wait(work));
        swv_work_free(work);
      }
  }
}

void Fuzzer::step() {
  switch (below(12)) {
    case 0: return worlds();
    case 1: return layouts();
    case 2: case 3: return tensors();
    case 4: return autograd();
    case 5: return modules();
    case 6: return communication();
    default: return operators();
  }
}

}  // namespace

int main(int argc, char** argv) {
  double seconds = 10;
  unsigned long long seed = 1;
  for (int i = 1; i < argc; ++i) {
    if (std::sscanf(argv[i], "--seconds=%lf", &seconds) == 1 || std::sscanf(argv[i], "--seed=%llu", &seed) == 1) continue;
    std::fprintf(stderr, "usage: fuzz [--seconds=N] [--seed=N]\n");
    return 2;
  }
  swv_status_free(swv_set_num_threads(1));
  const int64_t before = swv_live_handles();
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  int64_t steps = 0, succeeded = 0, failed = 0;
  // A new world of things every few thousand steps, so that a seed that fails fails soon.
  for (; std::chrono::steady_clock::now() < end; ++seed) {
    std::fprintf(stderr, "fuzz: --seed=%llu\n", seed);
    Fuzzer fuzzer(seed);
    for (int i = 0; i < 4000 && std::chrono::steady_clock::now() < end; ++i, ++steps) fuzzer.step();
    succeeded += fuzzer.succeeded();
    failed += fuzzer.failed();
  }
  if (swv_live_handles() != before) {
    std::fprintf(stderr, "fuzz: %lld handles leaked\n", static_cast<long long>(swv_live_handles() - before));
    return 1;
  }
  std::printf("%lld steps: %lld calls succeeded, %lld failed as they should\n", static_cast<long long>(steps),
              static_cast<long long>(succeeded), static_cast<long long>(failed));
  return succeeded > 0 && failed > 0 ? 0 : 1;
}
