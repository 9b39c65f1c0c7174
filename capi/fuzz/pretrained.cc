// Models of Hugging Face, with directories that somebody has damaged.
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>

#include "fuzzer.h"

namespace shardweave::capi {

void Fuzzer::pretrained() {
  static const char* const kConfigs[] = {
      R"({"model_type": "gpt2", "vocab_size": 3, "n_positions": 2, "n_embd": 2, "n_layer": 1,
          "n_head": 1})",
      R"({"model_type": "gpt2", "vocab_size": 4, "n_positions": 2, "n_embd": 2, "n_layer": 1,
          "n_head": 1, "unknown": 3})"};
  const char* const config = kConfigs[below(2)];
  swv_module* module = nullptr;
  swv_string *json = nullptr, *loaded = nullptr;
  swv_load_pretrained_options load = SWV_LOAD_PRETRAINED_OPTIONS_INIT;
  swv_save_pretrained_options save = SWV_SAVE_PRETRAINED_OPTIONS_INIT;
  load.allow_missing = static_cast<swv_bool>(below(2));
  load.allow_unexpected = one_in(9) ? small() : static_cast<swv_bool>(below(2));
  load.allow_unknown = static_cast<swv_bool>(below(2));
  save.max_file_bytes = one_in(3) ? number() : 40;
  save.dtype = one_in(3) ? small() : SWV_DTYPE_DEFAULT;
  swv_mesh* const mesh = one_in(9) ? pick(meshes_) : meshes_.empty() ? nullptr : meshes_[0];
  const std::string directory = folder_ + "/model-" + std::to_string(below(1000));
  if (done(swv_module_create_by_kind("gpt2", config, &module))) {
    if (one_in(2)) done(swv_module_distribute(module, mesh, nullptr, nullptr));
    done(swv_module_save_pretrained(module, one_in(20) ? text() : directory.c_str(),
                                    one_in(9) ? text() : config, mesh,
                                    one_in(2) ? nullptr : sized(save)));
    if (alone_ && one_in(2)) {  // a bit of a file; others may be reading it where there are others
      std::error_code ignored;
      for (const auto& file : std::filesystem::directory_iterator(directory, ignored)) {
        if (one_in(2)) continue;
        std::fstream damaged(file.path(), std::ios::in | std::ios::out | std::ios::binary);
        damaged.seekp(static_cast<std::streamoff>(below(400)));
        damaged.put(static_cast<char>(below(256)));
      }
    }
    if (done(swv_module_load_pretrained(module, one_in(20) ? text() : directory.c_str(), mesh,
                                        one_in(2) ? nullptr : sized(load),
                                        one_in(2) ? nullptr : &loaded))) {
      swv_string_free(loaded);
    }
  }
  if (done(swv_read_pretrained_config(one_in(9) ? text() : directory.c_str(), load.allow_unknown,
                                      &json))) {
    swv_string_free(json);
  }
  swv_module_free(module);
}

}  // namespace shardweave::capi
