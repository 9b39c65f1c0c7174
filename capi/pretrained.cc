// Models of Hugging Face: directories that transformers writes and reads.
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "nlohmann/json.hpp"
#include "shardweave/capi/handles.h"
#include "shardweave/capi/host_module.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/modules/hugging_face/pretrained.h"

namespace shardweave::capi {
namespace {

std::vector<std::string> ignored_names(const char* const* names, size_t count) {
  std::vector<std::string> result;
  for_each(span(names, count, "options.ignored"), "options.ignored",
           [&](const char* name) { result.emplace_back(text(name, "options.ignored")); });
  return result;
}

LoadPretrainedOptions load_options(const swv_load_pretrained_options* given) {
  const auto o =
      options<swv_load_pretrained_options>(given, SWV_LOAD_PRETRAINED_OPTIONS_INIT, "options");
  LoadPretrainedOptions result;
  result.ignored = ignored_names(o.ignored, o.num_ignored);
  result.allow_missing = flag(o.allow_missing, "options.allow_missing");
  result.allow_unexpected = flag(o.allow_unexpected, "options.allow_unexpected");
  result.config.allow_unknown = flag(o.allow_unknown, "options.allow_unknown");
  return result;
}

ModelFilesOptions save_options(const swv_save_pretrained_options* given) {
  const auto o =
      options<swv_save_pretrained_options>(given, SWV_SAVE_PRETRAINED_OPTIONS_INIT, "options");
  if (o.max_file_bytes < 1) {
    fail_argument("options.max_file_bytes", str_cat("is ", o.max_file_bytes, "; wanted 1 or more"));
  }
  ModelFilesOptions result;
  result.ignored = ignored_names(o.ignored, o.num_ignored);
  result.max_file_bytes = o.max_file_bytes;
  if (o.dtype != SWV_DTYPE_DEFAULT) {
    const at::ScalarType type = scalar_type(o.dtype, "options.dtype");
    if (!at::isFloatingType(type)) {
      fail_argument("options.dtype", "is no floating-point type; it is of floating-point tensors");
    }
    result.dtype = type;
  }
  return result;
}

std::string to_json(const LoadedPretrained& loaded) {
  const nlohmann::json json = {{"kind", loaded.kind},
                               {"missing", loaded.missing},
                               {"unexpected", loaded.unexpected},
                               {"bytes_read", loaded.bytes_read},
                               {"bytes_kept", loaded.bytes_kept}};
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

void load(swv_module* module, const char* path, const swv_mesh* mesh,
          const swv_load_pretrained_options* options, swv_string** out_json) {
  const MeshPtr& on = in(mesh, "mesh").mesh;
  const CallMode mode(SWV_MODE_NO_GRAD, "mode");
  const auto [to, from, how] = read_before(on, "load_pretrained", [&] {
    return std::tuple(&any_module(module), given_text(path, "path"), load_options(options));
  });
  const LoadedPretrained loaded = load_pretrained(from, *to, on, how, kHost);
  if (out_json != nullptr) *out_json = new_string(to_json(loaded));
}

void save(const swv_module* module, const char* directory, const char* config_json,
          const swv_mesh* mesh, const swv_save_pretrained_options* options) {
  const MeshPtr& on = in(mesh, "mesh").mesh;
  const CallMode mode(SWV_MODE_NO_GRAD, "mode");
  const auto [its, to, config, how] = read_together(on, "save_pretrained", [&] {
    return std::tuple(&any_module(module), given_text(directory, "directory"),
                      text(config_json, "config_json"), save_options(options));
  });
  save_pretrained(to, *its, config, on, how, kHost);
}

}  // namespace
}  // namespace shardweave::capi

using namespace shardweave::capi;  // NOLINT: this file is the C interface of it

swv_status* swv_read_pretrained_config(const char* directory, swv_bool allow_unknown,
                                       swv_string** out_json) {
  return guarded(__func__, out_json, "out_json", [&] {
    const std::string from = given_text(directory, "directory");
    const bool unknown = flag(allow_unknown, "allow_unknown");
    return new_string(check(shardweave::read_pretrained_config(from, {.allow_unknown = unknown})));
  });
}

swv_status* swv_module_load_pretrained(swv_module* module, const char* path, const swv_mesh* mesh,
                                       const swv_load_pretrained_options* options,
                                       swv_string** out_json) {
  return guarded(__func__, [&] { load(module, path, mesh, options, out_json); });
}

swv_status* swv_module_save_pretrained(const swv_module* module, const char* directory,
                                       const char* config_json, const swv_mesh* mesh,
                                       const swv_save_pretrained_options* options) {
  return guarded(__func__, [&] { save(module, directory, config_json, mesh, options); });
}
