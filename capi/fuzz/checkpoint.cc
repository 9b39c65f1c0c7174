// States, checkpoints and safetensors files, with files that somebody has damaged; files of metrics.
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <system_error>

#include "fuzzer.h"

namespace shardweave::capi {

void Fuzzer::checkpoints() {
  swv_state *state = nullptr, *second = nullptr;
  swv_checkpointer* checkpointer = nullptr;
  swv_module* module = nullptr;
  swv_optimizer* optimizer = nullptr;
  swv_tensor* parameters[2] = {};
  swv_string* string = nullptr;
  swv_bool saved = 0;
  int64_t step = 0;
  swv_checkpointer_options options = SWV_CHECKPOINTER_OPTIONS_INIT;
  swv_load_options how = SWV_LOAD_OPTIONS_INIT;
  swv_mesh* const mesh = one_in(9) ? pick(meshes_) : meshes_.empty() ? nullptr : meshes_[0];
  const std::string directory = folder_ + (one_in(9) ? "/none/of/these" : "/checkpoints");
  options.keep_last = one_in(9) ? number() : 2;
  // Ranks that give up at different times are lost to each other.
  options.timeout_ms = !one_in(9) ? 0 : alone_ ? number() : -1;
  options.skip_if_busy = one_in(9) ? small() : static_cast<swv_bool>(below(2));
  how.allow_missing = one_in(9) ? small() : 1;
  how.allow_unexpected = static_cast<swv_bool>(below(2));
  how.cast = static_cast<swv_bool>(below(2));
  how.verify = static_cast<swv_bool>(below(2));
  if (!done(swv_state_create(&state))) return;
  if (one_in(4) && done(swv_state_share(state, &second))) swv_state_free(second);
  done(swv_state_add_tensor(state, one_in(3) ? text() : "x", pick(tensors_)));
  if (done(swv_module_create_by_kind("Linear", "{\"in_features\": 2, \"out_features\": 2}",
                                     &module))) {
    if (!one_in(5)) done(swv_module_distribute(module, mesh, nullptr, nullptr));
    done(swv_state_add_module(state, one_in(5) ? text() : nullptr, module));
    if (done(swv_module_get(module, "weight", &parameters[0])) &&
        done(swv_module_get(module, "bias", &parameters[1])) &&
        make_optimizer(parameters, &optimizer)) {
      done(swv_state_add_optimizer(state, one_in(5) ? text() : nullptr, optimizer, module));
    }
  }
  done(swv_state_add_random(state, one_in(5) ? text() : nullptr, mesh));
  if (one_in(2)) done(swv_state_add_loader(state, one_in(5) ? text() : nullptr, pick(loaders_)));
  done(swv_state_set_value(state, one_in(5) ? text() : "v", one_in(3) ? text() : "[1, null]"));
  if (done(swv_state_value(state, one_in(5) ? text() : "v", &string))) swv_string_free(string);
  if (done(swv_checkpointer_create(mesh, directory.c_str(), one_in(3) ? nullptr : sized(options),
                                   &checkpointer))) {
    const int64_t number_of = one_in(5) ? number() : static_cast<int64_t>(below(1000));
    if (one_in(2)) done(swv_checkpointer_open(checkpointer, one_in(2) ? -1 : 1));
    done(swv_checkpointer_save(checkpointer, number_of, state));
    done(swv_checkpointer_save_async(checkpointer, one_in(3) ? number() : number_of / 2, state,
                                     one_in(2) ? nullptr : &saved));
    if (one_in(2)) done(swv_checkpointer_wait_for_copy(checkpointer));
    if (one_in(2)) done(swv_checkpointer_wait(checkpointer));
    string = nullptr;
    if (done(swv_checkpointer_load(checkpointer, state, one_in(3) ? nullptr : sized(how), &step,
                                   one_in(2) ? nullptr : &string))) {
      if (string != nullptr) done(swv_state_set_value(state, "v", swv_string_data(string)));
      swv_string_free(string);
    }
  }
  string = nullptr;
  if (done(swv_state_load(state, one_in(9) ? text() : directory.c_str(), mesh,
                          one_in(2) ? nullptr : sized(how), one_in(2) ? nullptr : &step,
                          &string))) {
    swv_string_free(string);
  }
  int64_t steps[3] = {};
  size_t num_steps = 0;
  done(swv_list_checkpoints(one_in(9) ? text() : directory.c_str(), one_in(9) ? nullptr : steps,
                            length(3), one_in(9) ? nullptr : &num_steps));
  string = nullptr;
  if (done(swv_find_checkpoint(one_in(9) ? text() : directory.c_str(), &string))) {
    done(swv_verify_checkpoint(swv_string_data(string)));
    swv_string_free(string);
  }
  swv_checkpointer_free(checkpointer);
  swv_optimizer_free(optimizer);
  for (swv_tensor* t : parameters) swv_tensor_free(t);
  swv_module_free(module);
  swv_state_free(state);
}

void Fuzzer::safetensors() {
  swv_safetensors *file = nullptr, *second = nullptr;
  swv_string* name = nullptr;
  swv_tensor* tensor = nullptr;
  swv_dtype dtype = 0;
  size_t count = 0, ndim = 0;
  const std::string path = folder_ + "/file-" + std::to_string(reinterpret_cast<uintptr_t>(this)) +
                           (one_in(9) ? "" : ".safetensors");
  std::error_code ignored;
  std::filesystem::remove(path, ignored);
  const char* names[] = {"a", one_in(5) ? text() : "b"};
  const char* metadata[] = {"format", one_in(5) ? text() : "pt"};
  const swv_tensor* tensors[] = {pick(tensors_), pick(tensors_)};
  done(swv_safetensors_write(one_in(20) ? nullptr : path.c_str(), names, tensors, length(2),
                             metadata, length(1)));
  if (one_in(2)) {  // a bit, or the end
    std::fstream damaged(path, std::ios::in | std::ios::out | std::ios::binary);
    damaged.seekp(static_cast<std::streamoff>(below(200)));
    damaged.put(static_cast<char>(below(256)));
  }
  if (one_in(4)) std::filesystem::resize_file(path, below(200), ignored);
  if (!done(swv_safetensors_open(one_in(20) ? text() : path.c_str(), &file))) return;
  if (one_in(2) && done(swv_safetensors_share(file, &second))) swv_safetensors_free(second);
  done(swv_safetensors_num_tensors(file, &count));
  int64_t shape[4] = {};
  if (done(swv_safetensors_tensor(file, below(count + 1), &name, &dtype, shape, below(5), &ndim))) {
    size_t box_ndim = 0;
    const int64_t* const box = sizes(&box_ndim);
    static const int64_t zeros[6] = {};
    if (one_in(2)) {
      if (done(swv_safetensors_read(file, swv_string_data(name), nullptr, nullptr, 0, &tensor)))
        keep(tensor);
    } else if (done(swv_safetensors_read(file, swv_string_data(name), zeros, box, box_ndim,
                                         &tensor))) {
      keep(tensor);
    }
    swv_string_free(name);
  }
  swv_safetensors_free(file);
}

void Fuzzer::metrics() {
  swv_metrics_writer* writer = nullptr;
  const std::string path = folder_ + "/metrics-" + std::to_string(below(3));
  const bool is_json = one_in(2);
  const char* const where = one_in(20) ? text() : path.c_str();
  if (!done(is_json ? swv_metrics_writer_open_json_lines(where, &writer)
                    : swv_metrics_writer_create_events(
                          (path + "-events").c_str(),
                          static_cast<int64_t>(below(3)) - (one_in(9) ? 1 : 0), &writer))) {
    return;
  }
  const char* names[] = {one_in(9) ? text() : "loss", one_in(9) ? text() : "lr"};
  const double values[] = {1.5, one_in(3) ? std::numeric_limits<double>::quiet_NaN() : 1e300};
  for (int i = 0; i < 3; ++i) {
    done(
        swv_metrics_writer_write(writer, static_cast<int64_t>(below(9)), names, values, length(2)));
  }
  done(swv_metrics_writer_flush(writer));
  swv_metrics_writer_free(writer);
  std::error_code ignored;
  if (one_in(4)) std::filesystem::resize_file(path, below(60), ignored);
  if (one_in(9)) std::filesystem::remove_all(path + "-events", ignored);
}

}  // namespace shardweave::capi
