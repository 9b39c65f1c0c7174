// Models of Hugging Face's transformers, into models of modules/nn on any mesh under any plan, and back.
//
//   const std::string config = value_or_throw(read_pretrained_config("llama/"));
//   auto model = deferred_init([&] { return value_or_throw(nn::make_model("", config)); });
//   parallelize_module(*model.module, mesh, model.plan(mesh->mesh(), {}));      // or fully_shard(), ...
//   materialize(*model.module);
//   load_pretrained("llama/", *model.module, mesh);           // each rank reads what it keeps
//   ...
//   save_pretrained("llama-tuned/", *model.module, config, mesh, {.dtype = at::kBFloat16});
//
// A directory has config.json (model_config.h) and safetensors files, with an index where there are several (or
// what older versions and PyTorch save: torch_files.h), under the names that transformers writes, which are not
// always those in memory (names.h). Tied weights are in files once. The directory is shared by all ranks.
//
// Collective over the mesh, but read_pretrained_config(). Throws Error, the same on all ranks, with the rank in
// front that has met it. Threads: as tensors.
#pragma once

#include <cstdint>
#include <memory>
#include <source_location>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/modules/hugging_face/model_config.h"
#include "shardweave/modules/hugging_face/model_files.h"
#include "shardweave/modules/hugging_face/names.h"

namespace torch::nn {
class Module;
}

namespace shardweave {

// DIRECTORY/config.json, as it stands there. NotFound; InvalidArgument: check_model_config().
absl::StatusOr<std::string> read_pretrained_config(const std::string& directory,
                                                   const ModelConfigRules& rules = {});

struct LoadPretrainedOptions {
  bool allow_missing = false;     // stays as it is (a classifier that is new)
  bool allow_unexpected = false;  // is passed over
  ModelConfigRules config = {};
  std::vector<std::string> ignored =
      {};  // FQNs of tensors that are in no file, and stay as they are
  std::shared_ptr<FileSystem> file_system = {};  // null: POSIX
};

struct LoadedPretrained {
  std::string kind;                     // "llama", ...; "" without a config.json
  std::vector<std::string> missing;     // in files' names, where that is allowed
  std::vector<std::string> unexpected;  // likewise
  // Of tensors, by this rank; files may have another dtype than the model.
  int64_t bytes_read = 0;
  int64_t bytes_kept = 0;
};

// Values of parameters and buffers, in place; of another floating-point dtype they are converted. `path`: a
// directory, or a file of weights (or an index of several), whose names are then those of the module, as in a
// directory without config.json.
//
// Throws before anything is changed: NotFound; InvalidArgument for files that are no such, and with all that is
// missing, unexpected, or of another shape or dtype in one message, a tied weight that files have by several names
// with several values (transformers does not tie these: "tie_word_embeddings": false), an ignored tensor that is
// not there, or one that lies Partial; FailedPrecondition for a module that has no values yet (materialize()), for
// an expanded tensor, and for files that are not the same on all ranks. Needs memory for this rank's part, a second
// time. (What fails while values are copied to a device is an error on all ranks, too, which says that the module
// has new ones in part.)
LoadedPretrained load_pretrained(const std::string& path, torch::nn::Module& module,
                                 const MeshPtr& mesh, const LoadPretrainedOptions& options = {},
                                 std::source_location where = std::source_location::current());

// `module`: one of modules/nn's, or with the same names and shapes; `config_json`: of it. Tensors are gathered one
// at a time, and files shared out among ranks.
//
// Throws: AlreadyExists for a directory that is there; InvalidArgument for a configuration of another model (with all
// names that differ), options out of range, and arguments that differ between ranks; the disk's errors. The
// directory is there whole, or not at all; beside it a process that is killed leaves DIRECTORY.tmp-*.
void save_pretrained(const std::string& directory, const torch::nn::Module& module,
                     std::string_view config_json, const MeshPtr& mesh,
                     const ModelFilesOptions& options = {},
                     std::source_location where = std::source_location::current());

namespace hugging_face_internal {

struct ModelTensor {
  std::string name;
  at::Tensor tensor;
  std::vector<std::string> aliases;
};
// Parameters and buffers that are in files, each once. Throws Error (InvalidArgument) as `what` for an ignored one that
// the module does not have.
std::vector<ModelTensor> tensors_of(const torch::nn::Module& module, std::string_view kind,
                                    const std::vector<std::string>& ignored = {},
                                    const char* what = "");
std::vector<WantedTensor> wanted_of(const std::vector<ModelTensor>& tensors);

}  // namespace hugging_face_internal

// Names, shapes and ties of the model that a configuration describes, without memory for it: what files of it
// have to have (match_files()). InvalidArgument: no such configuration.
absl::StatusOr<std::vector<WantedTensor>> tensors_of_config(std::string_view config_json);

}  // namespace shardweave
