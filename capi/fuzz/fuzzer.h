// Calls every function at random, with good, bad and absurd arguments, on one rank and now and then
// on several that do the same: nothing may crash, hang or leak, and every error names a function.
//
//   ./bazelw run //capi/fuzz -- --seconds=600 --seed=7
//
// What it prints last before a crash is the seed that repeats it; without --seed it begins with one
// that nobody has tried. Worlds favour the steps that call what has not succeeded yet (--favour). Handles come from a pool of live ones, freed ones (in checked mode), ones
// of other kinds, and NULL; structs are of every version's size. What would be a lie of the caller
// about its own memory is left out. Each function has to be called, and to succeed, once at least.
//
// With libFuzzer the choices come from its inputs instead, and what they reach in capi/ leads it:
// BUILD says how.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "calls.h"

namespace shardweave::capi {

// Where the choices come from: a seed, or an input, which ends.
class Chance {
 public:
  explicit Chance(uint64_t seed) : random_(seed) {}
  Chance(const uint8_t* data, size_t size) : data_(data), left_(size), of_input_(true) {}

  uint64_t below(uint64_t n) {
    if (n <= 1) return 0;
    if (!of_input_) return random_() % n;
    uint64_t number = 0;
    for (uint64_t most = n - 1; most != 0; most >>= 8) number = number << 8 | byte();
    return number % n;
  }
  uint64_t word() { return of_input_ ? below(UINT64_MAX) : random_(); }
  bool ended() const { return of_input_ && left_ == 0; }

 private:
  uint8_t byte() {
    if (left_ == 0) return 0;
    --left_;
    return *data_++;
  }

  std::mt19937_64 random_;
  const uint8_t* data_ = nullptr;
  size_t left_ = 0;
  const bool of_input_ = false;
};

class Fuzzer {
 public:
  // Of a rank of `world`; NULL: alone. `folder` is for files. Half of the steps are from the set
  // `favoured`, a bit each, if there are any.
  Fuzzer(Chance chance, const swv_world* world, std::string folder, uint64_t favoured = 0)
      : chance_(std::move(chance)),
        favoured_(favoured),
        alone_(world == nullptr),
        folder_(std::move(folder)) {
    swv_world* own = nullptr;
    must(alone_ ? swv_world_create_local(1, nullptr, &own) : swv_world_share(world, &own));
    worlds_.push_back(own);
    must(swv_world_size(own, &size_));
    // The first mesh stays, and is one that plans and layouts of text() fit.
    const swv_mesh_dim all = {"x", size_};
    swv_mesh* mesh = nullptr;
    must(swv_mesh_create(own, &all, 1, &mesh));
    meshes_.push_back(mesh);
  }
  ~Fuzzer() {
    for (auto* h : coalescings_) swv_coalescing_free(h);
    // The innermost first.
    while (!scopes_.empty()) swv_scope_free(scopes_.back()), scopes_.pop_back();
    while (!traces_.empty()) swv_trace_free(traces_.back()), traces_.pop_back();
    for (auto* h : loaders_) swv_loader_free(h);
    for (auto* h : token_files_) swv_token_file_free(h);
    for (auto* h : works_) swv_work_free(h);
    for (auto* h : optimizers_) swv_optimizer_free(h);
    for (auto* h : forwards_) swv_forward_free(h);
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
  bool ended() const { return chance_.ended(); }

 private:
  // --- chance ------------------------------------------------------------------------------------
  uint64_t below(uint64_t n) { return chance_.below(n); }
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
  const char* text();
  const char* op_name();
  const char* layer_kind();
  const char* layer_options();
  const int64_t* sizes(size_t* ndim) {
    *ndim = below(4);
    for (int64_t& size : sizes_) size = one_in(40) ? number() : static_cast<int64_t>(below(5));
    // Small, or more than any machine has; what is in between only takes its time.
    double numel = 1;
    for (size_t i = 0; i < *ndim; ++i) numel *= static_cast<double>(sizes_[i]);
    if (std::abs(numel) > 1 << 22 && std::abs(numel) < 1e13) sizes_[0] = INT64_MAX;
    if (one_in(30)) *ndim = length(6);
    return one_in(30) ? nullptr : sizes_;
  }

  // The struct as another version's caller would give it, now and then; where it has members that
  // are not known here, with or without something in them. Lives until a few more were made.
  template <typename T>
  T* sized(const T& from) {
    auto& bytes = structs_[next_struct_++ % std::size(structs_)];
    static_assert(sizeof(T) + kMore <= sizeof(bytes));
    std::memset(bytes, one_in(4) ? 0xa5 : 0, sizeof(bytes));
    std::memcpy(bytes, &from, from.struct_size);
    T* const result = reinterpret_cast<T*>(bytes);
    if (one_in(12)) {
      result->struct_size = one_in(4)   ? length(sizeof(T))
                            : one_in(3) ? below(from.struct_size)
                                        : from.struct_size + below(kMore);
    }
    return result;
  }
  // The same of an array, whose elements have one size; now and then they do not.
  template <typename T, size_t N>
  T* sized_array(const T (&from)[N]) {
    static_assert(N * (sizeof(T) + kMore) <= sizeof(array_));
    const size_t size = one_in(12) ? from[0].struct_size + below(kMore) : from[0].struct_size;
    std::memset(array_, one_in(4) ? 0xa5 : 0, sizeof(array_));
    for (size_t i = 0; i < N; ++i) {
      char* const at = array_ + i * ((size + alignof(T) - 1) / alignof(T) * alignof(T));
      std::memcpy(at, &from[i], from[i].struct_size);
      const size_t given = one_in(50) ? length(sizeof(T)) : size;
      std::memcpy(at, &given, sizeof(given));
    }
    return reinterpret_cast<T*>(array_);
  }
  swv_buffer buffer_of(void* data, int64_t count, swv_dtype dtype = SWV_DTYPE_F32) {
    swv_buffer result = SWV_BUFFER_INIT;
    result.data = data;
    result.count = count;
    result.dtype = dtype;
    return result;
  }
  // Whether a library takes it over, drop and all.
  template <typename T>
  static bool has_size(const T& given, const T& whole) {
    return given.struct_size >= whole.struct_size && given.struct_size <= 4096;
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
        return meshes_[0];
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

  static void check_error(swv_status* status) {
    // Every error has a code, and names a function.
    if (swv_status_code(status) <= SWV_CODE_OK ||
        swv_status_code(status) > SWV_CODE_UNAUTHENTICATED ||
        std::strncmp(swv_status_message(status), "swv_", 4) != 0) {
      std::fprintf(stderr, "fuzz: an error without a name: %s\n", swv_status_message(status));
      std::abort();
    }
    swv_status_free(status);
  }
  static void must(swv_status* status) {
    if (status == nullptr) return;
    std::fprintf(stderr, "fuzz: %s\n", swv_status_message(status));
    std::abort();
  }
  bool done(swv_status* status) {
    if (status == nullptr) return ++succeeded_, true;
    ++failed_;
    check_error(status);
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
  bool writes(const swv_op* op);
  void operators();
  void autograd();
  bool make_optimizer(swv_tensor** parameters, swv_optimizer** out_optimizer);
  // `parameters`: two, which it may replace.
  void optimizing(swv_tensor** parameters);
  void modules();
  void communication();
  void collective();
  void shares();
  void switches();
  void point_to_point();
  void queries();
  void backends();
  void dlpack();
  void scripts();
  void library();
  void patches();
  void fully_sharded();
  void divided();
  void data_parallel();
  void checkpoints();
  void safetensors();
  void metrics();
  void pretrained();
  void observe();
  void data();
  void ranks();
  void contention();
  void guided();
  void guided_autograd();

  static constexpr size_t kMore = 64;

  struct Step;
  static const Step kSteps[];

  Chance chance_;
  const uint64_t favoured_;
  const bool alone_;
  const std::string folder_;
  int32_t size_ = 1;
  int64_t succeeded_ = 0;
  int64_t failed_ = 0;
  void* freed_ = nullptr;
  int64_t sizes_[6] = {};
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
  std::vector<swv_forward*> forwards_;
  std::vector<swv_plan*> plans_;
  std::vector<swv_optimizer*> optimizers_;
  std::vector<swv_scope*> scopes_;
  std::vector<swv_coalescing*> coalescings_;
  std::vector<swv_trace*> traces_;
  std::vector<swv_token_file*> token_files_;
  std::vector<swv_loader*> loaders_;
  alignas(16) unsigned char structs_[8][256];
  size_t next_struct_ = 0;
  alignas(16) char array_[1024];
  float kept_[16] = {};  // of operations that go on
};

}  // namespace shardweave::capi
