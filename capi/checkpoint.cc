// States, checkpoints and safetensors files.
#include "shardweave/capi/checkpoint.h"

#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "nlohmann/json.hpp"
#include "shardweave/capi/host_module.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/modules/checkpoint/checkpointer.h"
#include "shardweave/modules/checkpoint/loader_position.h"
#include "shardweave/modules/checkpoint/safetensors_index.h"
#include "shardweave/modules/checkpoint/safetensors_tensor.h"

namespace shardweave::capi {

// With what its entries need.
struct HostState {
  StateDict dict;
  std::vector<std::shared_ptr<const void>> owners;
};

struct HostSafetensors {
  std::unique_ptr<SafetensorsIndex> index;
  std::vector<std::string> names;
};

}  // namespace shardweave::capi

struct swv_state : shardweave::capi::Handle<shardweave::capi::Kind::kState> {
  std::shared_ptr<shardweave::capi::HostState> state;
};
struct swv_checkpointer : shardweave::capi::Handle<shardweave::capi::Kind::kCheckpointer> {
  shardweave::MeshPtr mesh;
  std::unique_ptr<shardweave::Checkpointer> checkpointer;
};
struct swv_safetensors : shardweave::capi::Handle<shardweave::capi::Kind::kSafetensors> {
  std::shared_ptr<shardweave::capi::HostSafetensors> file;
};

namespace shardweave::capi {
namespace {

constexpr char kLoad[] = "load_checkpoint";

HostState& state_of(const swv_state* state) {
  return *in(state, "state").state;
}

std::string prefix_or(const char* prefix, const char* otherwise) {
  return std::string(text_or(prefix, otherwise, "prefix"));
}

// All of it or nothing: what is added to is a copy, of handles. `owner`, if any, lives as long as the
// state.
template <typename Add>
void add_whole(HostState& to, const std::shared_ptr<const void>& owner, const Add& add) {
  StateDict dict = to.dict;
  add(dict);
  if (owner != nullptr) to.owners.push_back(owner);
  to.dict = std::move(dict);
}

void add_module_to(const swv_state* state, const char* prefix, const swv_module* module) {
  HostState& to = state_of(state);
  const torch::nn::Module& its = any_module(module);
  const std::string name = prefix_or(prefix, "model.");
  // Its tensors are handles. The module may go: a binding's may be there for this call alone, and
  // its children then become parts of another one.
  add_whole(to, nullptr, [&](StateDict& dict) { add_module(dict, its, name); });
}

void add_optimizer_to(const swv_state* state, const char* prefix, const swv_optimizer* optimizer,
                      const swv_module* module) {
  HostState& to = state_of(state);
  const torch::nn::Module& of = any_module(module);
  const std::string name = prefix_or(prefix, "optimizer.");
  const CallMode mode(SWV_MODE_NO_GRAD, "mode");
  add_whole(to, optimizer_owner(optimizer),
            [&](StateDict& dict) { add_optimizer_state(dict, optimizer, of, name); });
}

void add_loader_to(const swv_state* state, const char* name, const swv_loader* loader) {
  HostState& to = state_of(state);
  const std::shared_ptr<TokenLoader> its = token_loader(loader);
  const std::string value(text_or(name, "loader", "name"));
  add_whole(to, its, [&](StateDict& dict) { add_loader_position(dict, *its, value); });
}

CheckpointOptions checkpoint_options(const swv_checkpointer_options* given) {
  const swv_checkpointer_options o =
      options<swv_checkpointer_options>(given, SWV_CHECKPOINTER_OPTIONS_INIT, "options");
  if (o.keep_last < 0) {
    fail_argument("options.keep_last", str_cat("is ", o.keep_last, "; wanted 0 or more"));
  }
  CheckpointOptions result;
  result.keep_last = o.keep_last;
  result.timeout = timeout(o.timeout_ms, "options.timeout_ms", result.timeout);
  if (flag(o.skip_if_busy, "options.skip_if_busy")) result.when_busy = WhenBusy::kSkip;
  result.copy_beside_training = flag(o.copy_beside_training, "options.copy_beside_training");
  return result;
}

LoadOptions load_options(const swv_load_options* given) {
  const swv_load_options o = options<swv_load_options>(given, SWV_LOAD_OPTIONS_INIT, "options");
  return {.allow_missing = flag(o.allow_missing, "options.allow_missing"),
          .allow_unexpected = flag(o.allow_unexpected, "options.allow_unexpected"),
          .cast = flag(o.cast, "options.cast"),
          .verify = flag(o.verify, "options.verify")};
}

std::string to_json(const LoadedCheckpoint& loaded) {
  nlohmann::json values = nlohmann::json::object();
  for (const auto& [name, value] : loaded.values) values[name] = nlohmann::json::parse(value);
  const nlohmann::json json = {{"path", loaded.path},
                               {"step", loaded.step},
                               {"missing", loaded.missing},
                               {"unexpected", loaded.unexpected},
                               {"values", std::move(values)},
                               {"bytes_read", loaded.bytes_read},
                               {"bytes_kept", loaded.bytes_kept}};
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

// The text is made first: what was loaded is there whether there is memory for it or not.
template <typename Load>
void load(const MeshPtr& mesh, const swv_state* state, const swv_load_options* options,
          const Load& from, int64_t* out_step, swv_string** out_json) {
  const CallMode mode(SWV_MODE_NO_GRAD, "mode");
  const auto [to, how] = read_together(
      mesh, kLoad, [&] { return std::pair(&state_of(state), load_options(options)); });
  const LoadedCheckpoint loaded = from(to->dict, how);
  Owned<swv_string> json(out_json == nullptr ? nullptr : new_string(to_json(loaded)));
  if (out_json != nullptr) *out_json = json.release();
  if (out_step != nullptr) *out_step = loaded.step;
}

SafetensorsIndex::Place place_of(const swv_safetensors* file, const char* name) {
  return check(in(file, "file").file->index->find(text(name, "name")));
}

std::optional<Box> box_of(const int64_t* offset, const int64_t* sizes, size_t ndim) {
  if (offset == nullptr && sizes == nullptr && ndim == 0) return std::nullopt;
  const auto from = span(offset, ndim, "offset", kMaxDims);
  const auto many = span(sizes, ndim, "sizes", kMaxDims);
  return Box{Dims(from.begin(), from.end()), Dims(many.begin(), many.end())};
}

void describe_tensor(const swv_safetensors* file, size_t index, swv_string** out_name,
                     swv_dtype* out_dtype, int64_t* sizes, size_t capacity, size_t* out_ndim) {
  HostSafetensors& its = *in(file, "file").file;
  if (index >= its.names.size()) {
    fail(absl::StatusCode::kOutOfRange,
         str_cat("argument 'index' is ", index, " of ", its.names.size(), " tensors"));
  }
  const StoredTensor info = *check(its.index->find(its.names[index])).info;
  Owned<swv_string> name(out_name == nullptr ? nullptr : new_string(info.name));
  size_t ndim = 0;
  copy_out(info.shape, sizes, capacity, &ndim, "sizes");
  if (out_name != nullptr) *out_name = name.release();
  if (out_dtype != nullptr) *out_dtype = dtype_of(info.dtype);
  if (out_ndim != nullptr) *out_ndim = ndim;
}

void write_file(const char* path, const char* const* names, const swv_tensor* const* given,
                size_t num_tensors, const char* const* metadata, size_t num_metadata) {
  const std::string where = given_text(path, "path");
  std::vector<std::string> texts;
  for_each(span(names, num_tensors, "names"), "names",
           [&](const char* name) { texts.emplace_back(text(name, "names")); });
  const std::vector<at::Tensor> all = tensors(given, num_tensors, "tensors");
  std::vector<std::pair<std::string, at::Tensor>> named;
  for (size_t i = 0; i < num_tensors; ++i) named.emplace_back(texts[i], all[i]);
  if (num_metadata > kMaxList / 2) {
    fail_argument("num_metadata", str_cat("is ", num_metadata));
  }
  const auto pairs = span(metadata, 2 * num_metadata, "metadata");
  std::vector<std::string> words;
  for_each(pairs, "metadata",
           [&](const char* word) { words.emplace_back(text(word, "metadata")); });
  std::map<std::string, std::string> about;
  for (size_t i = 0; i + 1 < words.size(); i += 2) about[words[i]] = words[i + 1];
  const CallMode mode(SWV_MODE_NO_GRAD, "mode");
  write_safetensors(where, named, about);
}

}  // namespace
}  // namespace shardweave::capi

using namespace shardweave::capi;  // NOLINT: this file is the C interface of it

swv_status* swv_state_create(swv_state** out_state) {
  return guarded(__func__, out_state, "out_state",
                 [&] { return make<swv_state>(std::make_shared<HostState>()); });
}

swv_status* swv_state_share(const swv_state* state, swv_state** out_state) {
  return guarded(__func__, out_state, "out_state",
                 [&] { return make<swv_state>(in(state, "state").state); });
}

void swv_state_free(swv_state* state) {
  release(state, __func__);
}

swv_status* swv_state_add_tensor(swv_state* state, const char* name, swv_tensor* tensor) {
  return guarded(__func__, [&] {
    state_of(state).dict.add_tensor(given_text(name, "name"), in(tensor, "tensor").tensor);
  });
}

swv_status* swv_state_add_module(swv_state* state, const char* prefix, swv_module* module) {
  return guarded(__func__, [&] { add_module_to(state, prefix, module); });
}

swv_status* swv_state_add_optimizer(swv_state* state, const char* prefix, swv_optimizer* optimizer,
                                    const swv_module* module) {
  return guarded(__func__, [&] { add_optimizer_to(state, prefix, optimizer, module); });
}

swv_status* swv_state_add_random(swv_state* state, const char* name, swv_mesh* mesh) {
  return guarded(__func__, [&] {
    shardweave::add_random_state(state_of(state).dict, in(mesh, "mesh").mesh,
                                 std::string(text_or(name, "random", "name")));
  });
}

swv_status* swv_state_add_loader(swv_state* state, const char* name, swv_loader* loader) {
  return guarded(__func__, [&] { add_loader_to(state, name, loader); });
}

swv_status* swv_state_set_value(swv_state* state, const char* name, const char* json) {
  return guarded(__func__, [&] {
    state_of(state).dict.set_value(given_text(name, "name"), text(json, "json"));
  });
}

swv_status* swv_state_value(const swv_state* state, const char* name, swv_string** out_json) {
  return guarded(__func__, out_json, "out_json",
                 [&] { return new_string(state_of(state).dict.value(given_text(name, "name"))); });
}

swv_status* swv_checkpointer_create(const swv_mesh* mesh, const char* directory,
                                    const swv_checkpointer_options* options,
                                    swv_checkpointer** out_checkpointer) {
  return guarded(__func__, out_checkpointer, "out_checkpointer", [&] {
    const shardweave::MeshPtr& on = in(mesh, "mesh").mesh;
    return make<swv_checkpointer>(
        on, std::make_unique<shardweave::Checkpointer>(given_text(directory, "directory"), on,
                                                       checkpoint_options(options)));
  });
}

void swv_checkpointer_free(swv_checkpointer* checkpointer) {
  release(checkpointer, __func__);
}

swv_status* swv_checkpointer_open(swv_checkpointer* checkpointer, int64_t done) {
  return guarded(__func__, [&] {
    const CallMode mode(SWV_MODE_NO_GRAD, "mode");
    shardweave::Checkpointer& its = *in(checkpointer, "checkpointer").checkpointer;
    its.open(done < 0 ? std::nullopt : std::optional(done));
  });
}

swv_status* swv_checkpointer_save(swv_checkpointer* checkpointer, int64_t step,
                                  const swv_state* state) {
  return guarded(__func__, [&] {
    const CallMode mode(SWV_MODE_NO_GRAD, "mode");
    const swv_checkpointer& into = in(checkpointer, "checkpointer");
    const shardweave::StateDict& what =
        *read_before(into.mesh, "save_checkpoint", [&] { return &state_of(state).dict; });
    into.checkpointer->save(step, what, kHost);
  });
}

swv_status* swv_checkpointer_save_async(swv_checkpointer* checkpointer, int64_t step,
                                        const swv_state* state, swv_bool* out_saved) {
  return guarded(__func__, [&] {
    const CallMode mode(SWV_MODE_NO_GRAD, "mode");
    const swv_checkpointer& into = in(checkpointer, "checkpointer");
    const shardweave::StateDict& what =
        *read_before(into.mesh, "save_async", [&] { return &state_of(state).dict; });
    const bool saved = into.checkpointer->save_async(step, what, kHost);
    if (out_saved != nullptr) *out_saved = saved ? 1 : 0;
  });
}

swv_status* swv_checkpointer_wait_for_copy(swv_checkpointer* checkpointer) {
  return guarded(__func__, [&] {
    const CallMode mode(SWV_MODE_NO_GRAD, "mode");
    in(checkpointer, "checkpointer").checkpointer->wait_for_copy();
  });
}

swv_status* swv_checkpointer_wait(swv_checkpointer* checkpointer) {
  return guarded(__func__, [&] {
    const CallMode mode(SWV_MODE_NO_GRAD, "mode");
    in(checkpointer, "checkpointer").checkpointer->wait();
  });
}

swv_status* swv_checkpointer_load(swv_checkpointer* checkpointer, swv_state* state,
                                  const swv_load_options* options, int64_t* out_step,
                                  swv_string** out_json) {
  return guarded(__func__, [&] {
    const swv_checkpointer& its = in(checkpointer, "checkpointer");
    load(
        its.mesh, state, options,
        [&](auto& to, const auto& how) {
          agree_to_call(its.mesh, kLoad);  // for it waits first, for what is saved
          return its.checkpointer->load(to, how, kHost);
        },
        out_step, out_json);
  });
}

swv_status* swv_state_load(swv_state* state, const char* path, const swv_mesh* mesh,
                           const swv_load_options* options, int64_t* out_step,
                           swv_string** out_json) {
  return guarded(__func__, [&] {
    const shardweave::MeshPtr& on = in(mesh, "mesh").mesh;
    const std::string from = read_together(on, kLoad, [&] { return given_text(path, "path"); });
    load(
        on, state, options,
        [&](auto& to, const auto& how) {
          return shardweave::load_checkpoint(from, to, on, how, kHost);
        },
        out_step, out_json);
  });
}

swv_status* swv_list_checkpoints(const char* directory, int64_t* steps, size_t capacity,
                                 size_t* out_count) {
  return guarded(__func__, [&] {
    copy_out(check(shardweave::list_checkpoints(given_text(directory, "directory"))), steps,
             capacity, out_count, "steps");
  });
}

swv_status* swv_find_checkpoint(const char* path, swv_string** out_path) {
  return guarded(__func__, out_path, "out_path", [&] {
    return new_string(check(shardweave::find_checkpoint(given_text(path, "path"))));
  });
}

swv_status* swv_verify_checkpoint(const char* path) {
  return guarded(__func__, [&] { check(shardweave::verify_checkpoint(given_text(path, "path"))); });
}

swv_status* swv_safetensors_open(const char* path, swv_safetensors** out_file) {
  return guarded(__func__, out_file, "out_file", [&] {
    auto file = std::make_shared<HostSafetensors>();
    file->index = check(shardweave::SafetensorsIndex::open(given_text(path, "path")));
    file->names = file->index->names();
    return make<swv_safetensors>(std::move(file));
  });
}

swv_status* swv_safetensors_share(const swv_safetensors* file, swv_safetensors** out_file) {
  return guarded(__func__, out_file, "out_file",
                 [&] { return make<swv_safetensors>(in(file, "file").file); });
}

void swv_safetensors_free(swv_safetensors* file) {
  release(file, __func__);
}

swv_status* swv_safetensors_num_tensors(const swv_safetensors* file, size_t* out_num) {
  return guarded(__func__, out_num, "out_num", [&] { return in(file, "file").file->names.size(); });
}

swv_status* swv_safetensors_tensor(const swv_safetensors* file, size_t index, swv_string** out_name,
                                   swv_dtype* out_dtype, int64_t* sizes, size_t capacity,
                                   size_t* out_ndim) {
  return guarded(__func__, [&] {
    describe_tensor(file, index, out_name, out_dtype, sizes, capacity, out_ndim);
  });
}

swv_status* swv_safetensors_read(const swv_safetensors* file, const char* name,
                                 const int64_t* offset, const int64_t* sizes, size_t ndim,
                                 swv_tensor** out_tensor) {
  return guarded(__func__, out_tensor, "out_tensor", [&] {
    const shardweave::SafetensorsIndex::Place place = place_of(file, name);
    const CallMode mode(SWV_MODE_NO_GRAD, "mode");
    return new_tensor(
        shardweave::read_tensor(*place.file, place.info->name, box_of(offset, sizes, ndim)),
        "the tensor that was read");
  });
}

swv_status* swv_safetensors_write(const char* path, const char* const* names,
                                  const swv_tensor* const* tensors, size_t num_tensors,
                                  const char* const* metadata, size_t num_metadata) {
  return guarded(__func__,
                 [&] { write_file(path, names, tensors, num_tensors, metadata, num_metadata); });
}
