// The directory that transformers loads: config.json, and model.safetensors or, above a size, several files
// with an index. What save_pretrained() writes from all ranks (pretrained.h), one process writes here from
// tensors that lie in files.
//
//   auto sources = checkpoint_sources("run/step-000100", *manifest);
//   absl::Status status = write_model_files("llama-tuned", config, *std::move(sources), {.dtype = at::kBFloat16});
//
// The directory must not be there; it gets its name when all is in it and on the disk.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ATen/core/ScalarType.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "shardweave/modules/checkpoint/file_system.h"
#include "shardweave/modules/checkpoint/safetensors.h"
#include "shardweave/modules/checkpoint/tensor_source.h"

namespace shardweave {

struct ModelFilesOptions {
  // A file ends before a tensor with which it would have more; one that has more has a file of its own.
  int64_t max_file_bytes = 5'000'000'000;
  std::optional<at::ScalarType> dtype = {};  // of floating-point tensors; absent: as they are
  std::vector<std::string> ignored =
      {};  // of save_pretrained(): FQNs of tensors that are in no file
  // After each tensor of a file, with its bytes.
  std::function<void(int64_t bytes)> tensor_done = {};
  std::shared_ptr<FileSystem> file_system = {};  // null: POSIX
};

// `sources`: under the names of modules/nn's models, which become those of files by the kind that `config_json`
// says. "": no config.json, and names stay. One tensor in memory, and of another dtype twice. Errors:
// AlreadyExists for a directory that is there, InvalidArgument for options out of range, a configuration of no kind
// of model that is here, and two tensors that have one name in files; the disk's.
absl::Status write_model_files(const std::string& directory, std::string_view config_json,
                               const std::vector<TensorSource>& sources,
                               const ModelFilesOptions& options = {});

namespace hugging_face_internal {

// Which file each tensor is in: ascending.
struct DividedFiles {
  std::vector<std::string> names;  // "model-00001-of-00002.safetensors"
  std::vector<size_t> file_of;     // by tensor
};
DividedFiles divide(const std::vector<StoredTensor>& tensors, int64_t max_file_bytes);
std::string index_json(const std::vector<StoredTensor>& tensors, const DividedFiles& files);
int64_t bytes_of(const StoredTensor& tensor);
absl::Status check_options(const ModelFilesOptions& options);
// InvalidArgument for a name that several have: an index has it once.
absl::Status check_names(const std::vector<StoredTensor>& tensors);
// "float32", "bfloat16", ...; of whichever most elements are.
std::string torch_name(const std::vector<StoredTensor>& tensors);

// A directory that is filled beside `path`, which must not be there yet; its own path.
absl::StatusOr<std::string> begin_directory(FileSystem& fs, const std::string& path);
// config.json and the index, and the directory gets its name. What has failed is removed.
absl::Status publish_directory(FileSystem& fs, const std::string& temporary,
                               const std::string& path, const std::string& config_json,
                               const std::vector<StoredTensor>& tensors, const DividedFiles& files);

}  // namespace hugging_face_internal
}  // namespace shardweave
