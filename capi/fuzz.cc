// Calls every function at random, with good, bad and absurd arguments, on one rank and now and then
// on several that do the same: nothing may crash, hang or leak, and every error names a function.
//
//   ./bazelw run --config=asan //capi:fuzz -- --seconds=600 --seed=7
//
// What it prints last before a crash is the seed that repeats it. Handles come from a pool of live
// ones, freed ones (in checked mode), ones of other kinds, and NULL. What would be a lie of the
// caller about its own memory is left out.
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <sys/resource.h>
#include <unistd.h>

#include "ATen/dlpack.h"
#include "ATen/ops/ones.h"
#include "shardweave.h"
#include "torch/csrc/jit/api/module.h"

namespace {

class Fuzzer {
 public:
  // Of a rank of `world`; NULL: alone. `folder` is for files.
  Fuzzer(uint64_t seed, const swv_world* world, std::string folder)
      : random_(seed), alone_(world == nullptr), folder_(std::move(folder)) {
    swv_world* own = nullptr;
    must(alone_ ? swv_world_create_local(1, nullptr, &own) : swv_world_share(world, &own));
    worlds_.push_back(own);
    must(swv_world_size(own, &size_));
  }
  ~Fuzzer() {
    for (auto* h : coalescings_) swv_coalescing_free(h);
    for (auto* h : scopes_) swv_strict_scope_free(h);
    // The innermost first.
    while (!names_.empty()) swv_module_scope_free(names_.back()), names_.pop_back();
    while (!traces_.empty()) swv_trace_free(traces_.back()), traces_.pop_back();
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
  // --- chance ------------------------------------------------------------------------------------
  uint64_t below(uint64_t n) { return n == 0 ? 0 : random_() % n; }
  bool one_in(uint64_t n) { return below(n) == 0; }
  int64_t number() {
    static constexpr int64_t kOdd[] = {
        0, 1, -1, 2, 3, 5, 7, 64, 255, 1 << 20, INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN};
    return one_in(3) ? kOdd[below(std::size(kOdd))] : static_cast<int64_t>(below(8));
  }
  int32_t small() {
    return static_cast<int32_t>(one_in(8) ? number() : static_cast<int64_t>(below(4)));
  }
  double real() {
    static const double kOdd[] = {0, -0.0, 1, -1, 0.5, 1e-300, 1e300, INFINITY, -INFINITY, NAN};
    return kOdd[below(std::size(kOdd))];
  }
  // A length for an array of `have`: mostly right; a lie would be the caller's memory error, but
  // absurd ones are refused.
  size_t length(size_t have) { return one_in(20) ? SIZE_MAX - below(16) : below(have + 1); }
  const char* text() {
    static const char* const kTexts[] = {nullptr,
                                         "",
                                         "x",
                                         "dp",
                                         "tp",
                                         "weight",
                                         "a.b.c",
                                         "..",
                                         "a.",
                                         "\xff\xfe",
                                         "\xe2\x82",
                                         "[R]",
                                         "[S(0)]",
                                         "[S(1)]",
                                         "[P(sum)]",
                                         "[S(0), R]",
                                         "[S(99)]",
                                         "[S(0, sf=3)]",
                                         "[S(0, sizes=[2])]",
                                         "S(0)",
                                         "R",
                                         "P(avg)",
                                         "x=1",
                                         "x=1,y=1",
                                         "x=2",
                                         "{}",
                                         "{\"parameter\": {\"*\": {\"x\": \"S(0)\"}}}",
                                         "{\"parameter\": {\"*\": {\"x\": \"R\"}}}",
                                         "{\"parameter\": 3}",
                                         "[[[[",
                                         "step",
                                         "exp_avg",
                                         "momentum_buffer",
                                         "forward",
                                         "/proc/nowhere/x",
                                         "gloo"};
    return kTexts[below(std::size(kTexts))];
  }
  const char* op_name() {
    static const char* const kNames[] = {"aten::add.Tensor",
                                         "aten::add",
                                         "aten::mul",
                                         "aten::mm",
                                         "aten::matmul",
                                         "aten::sum",
                                         "aten::sum.dim_IntList",
                                         "aten::mean",
                                         "aten::cat",
                                         "aten::stack",
                                         "aten::split.Tensor",
                                         "aten::t",
                                         "aten::view",
                                         "aten::reshape",
                                         "aten::relu",
                                         "aten::gelu",
                                         "aten::softmax.int",
                                         "aten::layer_norm",
                                         "aten::embedding",
                                         "aten::index.Tensor",
                                         "aten::max.dim",
                                         "aten::clamp",
                                         "aten::linear",
                                         "aten::mse_loss",
                                         "aten::zeros_like",
                                         "aten::detach",
                                         "aten::clone",
                                         "aten::to.dtype",
                                         "aten::mul_",
                                         "aten::copy_",
                                         "aten::dropout",
                                         "aten::transpose.int",
                                         "aten::expand",
                                         "aten::squeeze",
                                         "aten::select.int",
                                         "aten::slice.Tensor",
                                         "aten::pow",
                                         "aten::where",
                                         "aten::topk",
                                         "aten::sort",
                                         "aten::_local_scalar_dense",
                                         "aten::size.int",
                                         "aten::nope",
                                         "aten::ad",
                                         "prim::print",
                                         "",
                                         "::",
                                         "aten::add.",
                                         "aten::add.default"};
    return one_in(30) ? text() : kNames[below(std::size(kNames))];
  }
  const int64_t* sizes(size_t* ndim) {
    static int64_t buffer[6];
    *ndim = below(4);
    for (int64_t& size : buffer) size = one_in(40) ? number() : static_cast<int64_t>(below(5));
    if (one_in(30)) *ndim = length(6);
    return one_in(30) ? nullptr : buffer;
  }

  // --- handles -----------------------------------------------------------------------------------
  template <typename T>
  T* pick(const std::vector<T*>& from) {
    if (one_in(25)) return nullptr;
    if (one_in(40)) return reinterpret_cast<T*>(any());
    return from.empty() ? nullptr : from[below(from.size())];
  }
  void* any() {
    switch (below(6)) {
      case 0:
        return tensors_.empty() ? nullptr : static_cast<void*>(tensors_[0]);
      case 1:
        return meshes_.empty() ? nullptr : static_cast<void*>(meshes_[0]);
      case 2:
        return layouts_.empty() ? nullptr : static_cast<void*>(layouts_[0]);
      case 3:
        return static_cast<void*>(worlds_[0]);
      case 4:
        return swv_live_handles() >= 0 ? freed_ : nullptr;  // only checked mode may see it
      default:
        return ops_.empty() ? nullptr : static_cast<void*>(ops_[0]);
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
  void point_to_point();
  void queries();
  void backends();
  void dlpack();
  void scripts();
  void observe();
  void ranks();

  std::mt19937_64 random_;
  const bool alone_;
  const std::string folder_;
  int32_t size_ = 1;
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
  std::vector<swv_coalescing*> coalescings_;
  std::vector<swv_module_scope*> names_;
  std::vector<swv_trace*> traces_;
  float kept_[16] = {};  // of operations that go on
};

swv_value Fuzzer::value() {
  swv_value v = SWV_NONE;
  switch (below(12)) {
    case 0:
      v = swv_value_none();
      break;
    case 1:
      v = swv_value_default();
      break;
    case 2:
    case 3:
    case 4:
    case 5:
      v = swv_value_tensor(pick(tensors_));
      break;
    case 6:
      v = swv_value_int(one_in(6) ? number() : static_cast<int64_t>(below(3)));
      break;
    case 7:
      v = swv_value_float(real());
      break;
    case 8:
      v = swv_value_bool(one_in(20) ? small() : static_cast<swv_bool>(below(2)));
      break;
    case 9:
      for (int64_t& i : ints_) i = one_in(10) ? number() : static_cast<int64_t>(below(3));
      v = swv_value_ints(one_in(40) ? nullptr : ints_, length(4));
      break;
    case 10:
      for (swv_tensor*& t : list_) t = pick(tensors_);
      v = swv_value_tensors(one_in(40) ? nullptr : list_, length(4));
      break;
    default:
      v = swv_value_dtype(small());
      break;
  }
  if (one_in(60)) v.kind = small();
  // A kind that reads other memory than was given is the caller's lie, not bad input.
  if (v.kind == SWV_VALUE_STRING) v = swv_value_string("contiguous_format", length(17));
  if (v.kind == SWV_VALUE_TENSOR && v.as.tensor != nullptr && v.as.integer < 4096)
    v.as.tensor = nullptr;
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
      if (done(swv_tensor_distribute(pick(tensors_), pick(meshes_), pick(layouts_), &d, &t)))
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
      done(swv_tensor_buffer(pick(tensors_), &buffer));
      break;
    case 11:
      done(swv_tensor_sizes(pick(tensors_), out, below(9), &count));
      done(swv_tensor_strides(pick(tensors_), out, below(9), &count));
      done(swv_tensor_is_same(pick(tensors_), pick(tensors_), &yes));
      drop(swv_tensor_to_string(pick(tensors_), &string), &string);
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
  if (one_in(20)) {
    swv_string *text = nullptr, *json = nullptr;
    if (done(swv_op_explain(pick(ops_), args, num, one_in(3) ? nullptr : &text,
                            one_in(3) ? nullptr : &json))) {
      swv_string_free(text);
      swv_string_free(json);
    }
  }
  swv_status* status =
      one_in(5) ? swv_op_call_named(pick(ops_), small(), args, num, names, length(3), results,
                                    capacity, &num_results)
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

swv_status* forward(void* user_data, swv_function_context* context, swv_grad_mode,
                    const swv_tensor* const* inputs, size_t num_inputs, swv_tensor** outputs,
                    size_t num_outputs) {
  const uint64_t how = *static_cast<uint64_t*>(user_data);
  for (size_t i = 0; i < num_outputs && num_inputs > 0; ++i) {
    if (how % 5 == 1) continue;
    if (how % 5 == 2) outputs[i] = const_cast<swv_tensor*>(inputs[0]);
    if (how % 5 != 2) swv_status_free(swv_tensor_detach(inputs[i % num_inputs], &outputs[i]));
  }
  if (how % 5 == 3) return swv_status_new(SWV_CANCELLED, "the host does not want to");
  return how % 3 == 0 ? swv_function_context_save(context, inputs, num_inputs) : nullptr;
}
swv_status* backward(void* user_data, swv_function_context* context, swv_grad_mode,
                     const swv_tensor* const* grad_outputs, size_t, swv_tensor** grad_inputs,
                     size_t num_inputs) {
  const uint64_t how = *static_cast<uint64_t*>(user_data);
  swv_tensor* saved = nullptr;
  swv_status_free(swv_function_context_saved(context, how % 2, &saved));
  swv_tensor_free(saved);
  if (how % 7 == 1) return swv_status_new(SWV_CANCELLED, "the host does not want to");
  for (size_t i = 0; i < num_inputs; ++i) {
    if (grad_outputs[0] != nullptr && how % 4 != 0)
      swv_status_free(swv_tensor_share(grad_outputs[0], &grad_inputs[i]));
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
    case 0:
      o.create_graph = 0;  // a gradient with a graph and its parameter keep each other
      done(swv_tensor_backward(pick(tensors_), one_in(2) ? nullptr : pick(tensors_),
                               one_in(3) ? nullptr : &o));
      break;
    case 1: {
      const size_t n = 1 + below(3);
      if (done(swv_gradients(outputs, 1, inputs, n, nullptr, &o, several))) {
        for (size_t i = 0; i < n; ++i) keep(several[i]);
      }
      break;
    }
    case 2:
      done(swv_tensor_set_requires_grad(pick(tensors_),
                                        one_in(9) ? small() : static_cast<swv_bool>(below(2))));
      break;
    case 3:
      if (done(swv_tensor_grad(pick(tensors_), &t))) keep(t);
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
  swv_clip_options clip = SWV_CLIP_OPTIONS_INIT;
  double norm = 0;
  size_t n = 0;
  clip.norm_type = real(), clip.error_if_nonfinite = static_cast<swv_bool>(below(2));
  sgd.lr = real(), sgd.momentum = real(), sgd.nesterov = static_cast<swv_bool>(below(2));
  adamw.beta1 = one_in(2) ? real() : 0.9, adamw.amsgrad = static_cast<swv_bool>(below(2));
  switch (below(13)) {
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
                                 nullptr));
      break;
    case 9:
      done(swv_module_finish_grad_sync(pick(modules_)));
      done(swv_finish_grad_sync(parameters, length(2)));
      done(swv_clip_grad_norm(parameters, length(2), real(), one_in(2) ? nullptr : &clip,
                              one_in(2) ? nullptr : &norm));
      break;
    case 10:
      if (one_in(2)) {
        if (done(swv_optimizer_create_sgd(parameters, length(2), &sgd, &optimizer)))
          keep(optimizers_, optimizer, swv_optimizer_free, 5);
      } else {
        if (done(swv_optimizer_create_adamw(parameters, length(2), &adamw, &optimizer)))
          keep(optimizers_, optimizer, swv_optimizer_free, 5);
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
    return swv_buffer{one_in(30) ? nullptr : data,
                      count > 8 ? -1 : count,
                      one_in(10) ? small() : SWV_F32,
                      {one_in(30) ? small() : 0, 0},
                      one_in(50) ? 1 : 0};
  };
  swv_buffer a = buffer(in), b = buffer(out);
  // Eight elements of at most four bytes are there.
  for (swv_buffer* x : {&a, &b}) {
    if (swv_dtype_size(x->dtype) > 4) x->dtype = SWV_F32;
  }
  swv_world* world = nullptr;
  if (comms_.size() < 2 || one_in(10)) {  // an error may break a group: new worlds come
    must(swv_world_create_local(1, nullptr, &world));
    if (done(swv_world_comm(world, &comm))) keep(comms_, comm, swv_comm_free, 4);
    swv_world_free(world);
    comm = nullptr;
  }
  switch (below(9)) {
    case 0:
      done(swv_comm_all_reduce(pick(comms_), &a, &b, small(), &o, nullptr));
      break;
    case 1:
      done(swv_comm_all_gather(pick(comms_), &a, one_in(20) ? nullptr : &b, &o, nullptr));
      break;
    case 2:
      done(swv_comm_all_gather_v(pick(comms_), &a, &b, counts, length(2), &o, nullptr));
      break;
    case 3:
      done(swv_comm_reduce_scatter(pick(comms_), &a, &b, small(), &o, nullptr));
      break;
    case 4:
      done(swv_comm_all_to_all_v(pick(comms_), &a, counts, &b, counts, length(2), &o, nullptr));
      break;
    case 5:
      done(swv_comm_broadcast(pick(comms_), &a, small(), &o, nullptr));
      break;
    case 6:
      done(swv_comm_gather(pick(comms_), &a, one_in(2) ? nullptr : &b, small(), &o, nullptr));
      break;
    case 7:
      if (done(swv_comm_split(pick(comms_), small(), small(), text(), &comm)))
        keep(comms_, comm, swv_comm_free, 4);
      break;
    default:
      if (done(swv_comm_barrier(pick(comms_), &o, &work))) {
        done(swv_work_wait(work));
        swv_work_free(work);
      }
  }
}

// What only looks, or does little.
void Fuzzer::queries() {
  swv_string* string = nullptr;
  swv_mesh* mesh = nullptr;
  swv_comm* comm = nullptr;
  swv_tensor* t = nullptr;
  swv_strict_scope* scope = nullptr;
  swv_bool yes;
  int32_t i;
  int64_t n, out[16];
  size_t count;
  double lr;
  swv_dtype dtype;
  swv_device device;
  swv_random_state state;
  swv_dispatch_counters dispatch = SWV_DISPATCH_COUNTERS_INIT;
  swv_comm_counter counters[20];
  const swv_mesh_dim dims[] = {{text(), one_in(4) ? number() : 1}, {text(), 1}};
  const int64_t members[] = {one_in(4) ? number() : 0, 0};
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
      done(swv_mesh_random_state(pick(meshes_), &state));
      if (one_in(30)) dispatch.struct_size = length(64);
      if (dispatch.struct_size > sizeof(dispatch) && dispatch.struct_size <= 4096)
        dispatch.struct_size = 0;
      done(swv_mesh_dispatch_counters(pick(meshes_), one_in(30) ? nullptr : &dispatch));
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
      if (scopes_.size() < 2 && one_in(4)) {
        if (done(swv_mesh_forbid_communication(pick(meshes_), &scope))) scopes_.push_back(scope);
      } else if (!scopes_.empty()) {
        swv_strict_scope_free(scopes_.back());
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
      done(swv_module_zero_grad(pick(modules_)));
      done(swv_optimizer_lr(pick(optimizers_), &lr));
      break;
    default:
      done(swv_seed(static_cast<uint64_t>(number())));
      swv_value_clear(nullptr);
      swv_status_free(swv_status_new(small(), text()));
      if (swv_status_code(nullptr) != SWV_OK || *swv_status_message(nullptr) != 0) std::abort();
  }
}

void Fuzzer::point_to_point() {
  swv_comm* comm = nullptr;
  swv_coalescing* coalescing = nullptr;
  swv_work* work = nullptr;
  swv_world* world = nullptr;
  swv_bool yes;
  int64_t counts[2] = {static_cast<int64_t>(below(4)), 1};
  const int64_t members[] = {one_in(4) ? number() : 0, number()};
  swv_call_options o = SWV_CALL_OPTIONS_INIT;
  o.timeout_ms = one_in(20) ? number() : 5;
  if (o.timeout_ms > 100 || o.timeout_ms == 0) o.timeout_ms = 5;
  const auto buffer = [&](size_t from) {
    return swv_buffer{kept_ + from, static_cast<int64_t>(below(5)), SWV_F32, {0, 0}, 0};
  };
  const swv_buffer a = buffer(0), b = buffer(8);
  switch (below(10)) {
    case 0:
      done(swv_comm_all_to_all(pick(comms_), &a, one_in(20) ? nullptr : &b, &o, nullptr));
      break;
    case 1:
      done(swv_comm_reduce(pick(comms_), &a, one_in(2) ? nullptr : &b, small(), small(), &o,
                           nullptr));
      break;
    case 2:
      done(swv_comm_scatter(pick(comms_), one_in(2) ? nullptr : &a, &b, small(), &o, nullptr));
      break;
    case 3:
      done(
          swv_comm_reduce_scatter_v(pick(comms_), &a, &b, counts, length(2), small(), &o, nullptr));
      break;
    case 4:
      if (done(swv_comm_send(pick(comms_), &a, small(), small(), &o, &work)))
        keep(works_, work, swv_work_free, 4);
      break;
    case 5:
      if (done(swv_comm_recv(pick(comms_), &b, small(), small(), &o, &work)))
        keep(works_, work, swv_work_free, 4);
      break;
    case 6:
      done(swv_work_is_done(pick(works_), &yes));
      done(swv_work_wait(pick(works_)));
      break;
    case 7:
      if (coalescings_.empty()) {
        if (done(swv_comm_coalesce(pick(comms_), &coalescing))) coalescings_.push_back(coalescing);
      } else {
        if (one_in(2) &&
            done(swv_coalescing_finish(coalescings_.back(), one_in(2) ? nullptr : &work)) &&
            work != nullptr) {
          keep(works_, work, swv_work_free, 4);
        }
        if (one_in(2)) swv_coalescing_free(coalescings_.back()), coalescings_.pop_back();
      }
      break;
    case 8:
      if (one_in(2)) {
        if (done(swv_comm_share(pick(comms_), &comm))) keep(comms_, comm, swv_comm_free, 4);
      } else if (done(swv_comm_subgroup(pick(comms_), members, length(2), text(), &comm))) {
        keep(comms_, comm, swv_comm_free, 4);
      }
      break;
    default:
      if (one_in(4)) done(swv_comm_abort(pick(comms_), text()));
      if (!one_in(4)) break;
      must(swv_world_create_local(1, nullptr, &world));
      done(swv_world_abort(world, text()));
      if (done(swv_world_comm(world, &comm))) {
        swv_status_free(swv_comm_barrier(comm, &o, nullptr));
        swv_comm_free(comm);
      }
      swv_world_free(world);
  }
}

// A backend of one rank that sometimes fails, and sometimes does what it should not.
struct Wire {
  uint64_t how;
  int* live;
};
swv_status* wire_start(void* self, const swv_backend_call* call, uint64_t* out_ticket) {
  const uint64_t how = static_cast<Wire*>(self)->how;
  if (how % 5 == 1) return swv_status_new(SWV_UNAVAILABLE, "the wire is cut");
  if (call->in.count == call->out.count && call->in.data != nullptr && call->out.data != nullptr) {
    std::memmove(call->out.data, call->in.data,
                 static_cast<size_t>(call->in.count) * swv_dtype_size(call->in.dtype));
  }
  *out_ticket = how % 5 == 2 ? 7 : SWV_TICKET_DONE;
  return nullptr;
}
swv_bool wire_done(void* self, uint64_t) {
  return static_cast<Wire*>(self)->how % 3 == 0;
}
swv_status* wire_wait(void* self, uint64_t, int64_t) {
  return static_cast<Wire*>(self)->how % 7 == 1 ? swv_status_new(SWV_DATA_LOSS, nullptr) : nullptr;
}
swv_status* wire_subgroup(void* self, const swv_group*, const int32_t*, size_t, const char*,
                          int64_t, void** out_self) {
  const Wire* const wire = static_cast<Wire*>(self);
  if (wire->how % 4 == 1) return swv_status_new(SWV_RESOURCE_EXHAUSTED, "no more wires");
  *out_self = new Wire(*wire);
  ++*wire->live;
  return nullptr;
}
void wire_abort(void*, swv_code, const char*) {}
void wire_drop(void* self) {
  --*static_cast<Wire*>(self)->live;
  delete static_cast<Wire*>(self);
}

void Fuzzer::backends() {
  int live = 1;
  swv_backend backend = SWV_BACKEND_INIT;
  backend.name = one_in(20) ? text() : "wire";
  backend.implements = one_in(4) ? static_cast<uint64_t>(number()) : 0x3fff;
  backend.self = new Wire{random_(), &live};
  backend.start = one_in(30) ? nullptr : wire_start;
  backend.done = one_in(30) ? nullptr : wire_done;
  backend.wait = one_in(30) ? nullptr : wire_wait;
  backend.subgroup = one_in(5) ? nullptr : wire_subgroup;
  backend.abort = one_in(30) ? nullptr : wire_abort;
  backend.drop = wire_drop;
  swv_group group = SWV_GROUP_INIT;
  const int64_t ranks[] = {one_in(10) ? number() : 0};
  group.name = one_in(10) ? text() : "group";
  group.rank = one_in(20) ? small() : 0;
  group.world_ranks = one_in(10) ? nullptr : ranks;
  swv_world_options options = SWV_WORLD_OPTIONS_INIT;
  options.timeout_ms = 50;
  swv_world* world = nullptr;
  swv_comm *comm = nullptr, *part = nullptr;
  if (done(swv_world_create_with_backend(&backend, &group, &options, &world)) &&
      done(swv_world_comm(world, &comm))) {
    const swv_buffer a = {kept_, 4, SWV_F32, {0, 0}, 0}, b = {kept_ + 8, 4, SWV_F32, {0, 0}, 0};
    swv_call_options o = SWV_CALL_OPTIONS_INIT;
    done(swv_comm_all_reduce(comm, &a, &b, SWV_SUM, &o, nullptr));
    done(swv_comm_broadcast(comm, &a, 0, &o, nullptr));
    done(swv_comm_all_gather(comm, &a, &b, &o, nullptr));
    if (done(swv_comm_split(comm, 0, 0, "part", &part))) {
      done(swv_comm_all_reduce(part, &a, &b, SWV_SUM, &o, nullptr));
      swv_comm_free(part);
    }
    done(swv_comm_barrier(comm, nullptr, nullptr));
    swv_comm_free(comm);
  }
  swv_world_free(world);
  if (live != 0) {
    std::fprintf(stderr, "fuzz: %d backends were not dropped, or twice\n", live);
    std::abort();
  }
  // Rendezvous, which is slow.
  if (!alone_ || !one_in(20)) return;
  world = nullptr;
  if (done(swv_world_from_environment(&options, &world))) swv_world_free(world);
  const std::string file = folder_ + "/store" + std::to_string(random_());
  swv_rendezvous rendezvous = SWV_RENDEZVOUS_INIT;
  rendezvous.rank = one_in(4) ? small() : 0;
  rendezvous.world_size = one_in(4) ? small() : 1;
  rendezvous.file = one_in(5) ? text() : file.c_str();
  rendezvous.port = one_in(5) ? small() : 0;
  rendezvous.run = one_in(2) ? nullptr : text();
  options.backend = one_in(5) ? text() : nullptr;
  world = nullptr;
  if (done(swv_world_join(&rendezvous, &options, &world))) swv_world_free(world);
}

void Fuzzer::dlpack() {
  DLManagedTensorVersioned* managed = nullptr;
  swv_tensor* t = nullptr;
  if (!done(swv_tensor_to_dlpack(pick(tensors_), &managed))) return;
  if (one_in(8)) managed->version.major = static_cast<uint32_t>(number());
  if (one_in(8)) managed->flags = static_cast<uint64_t>(number());
  if (one_in(8)) managed->dl_tensor.device.device_type = static_cast<DLDeviceType>(below(20));
  if (one_in(8)) managed->dl_tensor.dtype.code = static_cast<uint8_t>(below(20));
  if (one_in(8)) managed->dl_tensor.dtype.lanes = static_cast<uint16_t>(below(3));
  if (one_in(20)) managed->dl_tensor.ndim = one_in(2) ? -1 : 1 << 20;
  if (done(swv_tensor_from_dlpack(managed, one_in(20) ? nullptr : &t))) keep(t);
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
    if (done(swv_module_call(module, method, small(), args, below(4), results, capacity, &count)) &&
        capacity != 0) {
      for (size_t r = 0; r < count; ++r) swv_value_clear(&results[r]);
    }
  }
  swv_module_free(module);
}

void Fuzzer::observe() {
  swv_trace* trace = nullptr;
  swv_module_scope* name = nullptr;
  swv_string* string = nullptr;
  size_t ndim = 0, count = 0;
  int64_t bytes = 0;
  const int64_t* s = sizes(&ndim);
  switch (below(5)) {
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
      if (names_.size() < 3 && one_in(2)) {
        if (done(swv_module_scope_create(pick(meshes_), text(), &name))) names_.push_back(name);
      } else if (!names_.empty()) {
        const size_t i = below(names_.size());
        swv_module_scope_free(names_[i]);
        names_.erase(names_.begin() + static_cast<std::ptrdiff_t>(i));
      }
      break;
    case 3:
      drop(swv_tensor_picture(pick(tensors_), &string), &string);
      break;
    default:
      drop(swv_layout_picture(pick(layouts_), pick(meshes_), s, ndim, &string), &string);
  }
}

// Several ranks that all do the same.
struct Shared {
  uint64_t seed;
  std::string folder;
};
swv_status* run_rank(void* user_data, swv_world* world) {
  const Shared& shared = *static_cast<const Shared*>(user_data);
  Fuzzer fuzzer(shared.seed, world, shared.folder);
  for (int i = 0; i < 150; ++i) fuzzer.step();
  return shared.seed % 4 == 0 ? swv_status_new(SWV_CANCELLED, "enough") : nullptr;
}
void Fuzzer::ranks() {
  if (!alone_ || !one_in(40)) return;
  Shared shared = {random_(), folder_};
  swv_world_options options = SWV_WORLD_OPTIONS_INIT;
  options.timeout_ms = 500;
  done(swv_run_ranks(one_in(10) ? 0 : 2 + static_cast<int32_t>(below(2)),
                     one_in(20) ? nullptr : run_rank, &shared, &options));
}

void Fuzzer::step() {
  switch (below(20)) {
    case 0:
      return worlds();
    case 1:
      return layouts();
    case 2:
    case 3:
      return tensors();
    case 4:
    case 5:
      return autograd();
    case 6:
    case 7:
      return modules();
    case 8:
      return communication();
    case 9:
      return point_to_point();
    case 10:
      return queries();
    case 11:
      return observe();
    case 12:
      switch (below(4)) {
        case 0:
          return backends();
        case 1:
          return dlpack();
        case 2:
          return scripts();
        default:
          return ranks();
      }
    default:
      return operators();
  }
}

// Tensors that are too large for the machine have to fail here, not the machine.
void limit_memory() {
#ifndef __SANITIZE_ADDRESS__
  const rlimit limit = {rlim_t{6} << 30, rlim_t{6} << 30};
  if (setrlimit(RLIMIT_AS, &limit) != 0) std::abort();
#endif
}

// What scripts() loads.
void save_module(const std::string& path) {
  torch::jit::Module module("Model");
  module.register_parameter("weight", at::ones({3}), false);
  module.register_buffer("offset", at::ones({1}));
  module.define(
      "def forward(self, x, scale: float = 2.0):\n  return x * self.weight * scale + self.offset\n"
      "def both(self, x, n: int = 2, flag: bool = False):\n  return (x, [n, n], flag)\n");
  module.save(path);
}

}  // namespace

// The same for AddressSanitizer, which takes a large part of the address space.
extern "C" const char* __asan_default_options() {
  return "allocator_may_return_null=1:max_allocation_size_mb=2048";
}

int main(int argc, char** argv) {
  double seconds = 10;
  unsigned long long seed = 1;
  for (int i = 1; i < argc; ++i) {
    if (std::sscanf(argv[i], "--seconds=%lf", &seconds) == 1 ||
        std::sscanf(argv[i], "--seed=%llu", &seed) == 1)
      continue;
    std::fprintf(stderr, "usage: fuzz [--seconds=N] [--seed=N]\n");
    return 2;
  }
  swv_status_free(swv_set_num_threads(1));
  limit_memory();
  // Everything that is written goes there.
  const char* const temporary = std::getenv("TEST_TMPDIR");
  std::string folder = std::string(temporary == nullptr ? "/tmp" : temporary) + "/fuzz_XXXXXX";
  if (mkdtemp(folder.data()) == nullptr || chdir(folder.c_str()) != 0) return 1;
  clearenv();  // nobody has started this process with others
  save_module(folder + "/model.pt");
  const int64_t before = swv_live_handles();
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  int64_t steps = 0, succeeded = 0, failed = 0;
  // A new world of things every few thousand steps, so that a seed that fails fails soon.
  for (; std::chrono::steady_clock::now() < end; ++seed) {
    std::fprintf(stderr, "fuzz: --seed=%llu\n", seed);
    Fuzzer fuzzer(seed, nullptr, folder);
    for (int i = 0; i < 4000 && std::chrono::steady_clock::now() < end; ++i, ++steps) {
      if (i % 100 == 0) alarm(120);  // what hangs ends with SIGALRM
      fuzzer.step();
    }
    succeeded += fuzzer.succeeded();
    failed += fuzzer.failed();
  }
  std::filesystem::remove_all(folder);
  if (swv_live_handles() != before) {
    std::fprintf(stderr, "fuzz: %lld handles leaked\n",
                 static_cast<long long>(swv_live_handles() - before));
    return 1;
  }
  std::printf("%lld steps: %lld calls succeeded, %lld failed as they should\n",
              static_cast<long long>(steps), static_cast<long long>(succeeded),
              static_cast<long long>(failed));
  return succeeded > 0 && failed > 0 ? 0 : 1;
}
