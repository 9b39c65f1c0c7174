// The safetensors files of one model, as Hugging Face keeps it: one file, or several with an index.
//
//   auto model = SafetensorsIndex::open("llama/");       // StatusOr; or a file of either kind
//   for (const std::string& name : (*model)->names()) ...
//   auto place = (*model)->find("lm_head.weight");       // StatusOr: its file and its StoredTensor
//
// Of a folder: model.safetensors.index.json, or else its one *.safetensors file, or of several model.safetensors. Files are opened when
// a tensor of theirs is looked for. Threads: any, and the files it gives, too.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "shardweave/modules/checkpoint/safetensors.h"

namespace shardweave {

class SafetensorsIndex {
 public:
  // InvalidArgument for an index that is none, or names files outside of its folder; NotFound.
  static absl::StatusOr<std::unique_ptr<SafetensorsIndex>> open(
      const std::string& path, std::shared_ptr<FileSystem> fs = nullptr);

  std::vector<std::string> names() const;  // sorted
  bool contains(std::string_view name) const { return files_of_.find(name) != files_of_.end(); }
  struct Place {
    std::shared_ptr<SafetensorsFile> file;
    const StoredTensor* info;  // of the file
  };
  // NotFound for a name that is not there; InvalidArgument for one that its file does not have.
  absl::StatusOr<Place> find(std::string_view name);

 private:
  std::shared_ptr<FileSystem> fs_;
  std::string path_;  // as it was given
  std::string folder_;
  std::map<std::string, std::string, std::less<>> files_of_;  // by tensor
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<SafetensorsFile>, std::less<>> open_;  // guarded by mutex_
};

// {"w": "model-00001-of-00002.safetensors", ...} of such an index.
absl::StatusOr<std::map<std::string, std::string, std::less<>>> parse_safetensors_index(
    std::string_view text);

}  // namespace shardweave
