// The records of a zip archive, and where their bytes lie in a file. Internal to modules/checkpoint/; without LibTorch.
//
//   auto records = ZipDirectory::read(file, 0, file->size());     // StatusOr; the end of it alone is read
//   auto place = records->find("data/0");                         // StatusOr: begin and size, in the file
//
// As PyTorch writes them: all in one folder, which names leave out, and not compressed; also of more than 4 GB. Strict:
// no name stands twice, no two records have a byte in common, and what stands in front of a record agrees with the
// directory. Checksums are not compared: PyTorch can leave them out.
//
// LibTorch's own (caffe2::serialize::PyTorchStreamReader) unpacks "version" into whatever memory it says it needs,
// takes any of two records of one name, and needs 10 ms for an error, which is an exception.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "shardweave/modules/checkpoint/file_system.h"

namespace shardweave::checkpoint_internal {

class ZipDirectory {
 public:
  // Of the archive in `size` bytes of the file from `begin` on. InvalidArgument, without a path: there is none, or it is
  // damaged; and errors of the file.
  static absl::StatusOr<ZipDirectory> read(std::shared_ptr<ReadableFile> file, int64_t begin,
                                           int64_t size);

  struct Place {
    int64_t begin = 0, size = 0;
  };
  bool contains(const std::string& name) const { return records_.contains(folder_ + name); }
  // NotFound; Unimplemented for one that is compressed or encrypted. Reads what stands in front of it.
  absl::StatusOr<Place> find(const std::string& name) const;

 private:
  struct Record {
    int64_t header = 0;  // where it begins, from the archive's beginning on
    int64_t end = 0;     // what is behind it begins there
    int64_t size = 0, packed_size = 0;
    uint64_t flags = 0, method = 0;
  };
  ZipDirectory() = default;
  // `end`: of the directory, or the first of what is behind it.
  absl::Status read_records(uint64_t count, uint64_t offset, uint64_t size, uint64_t end);

  std::shared_ptr<ReadableFile> file_;
  int64_t begin_ = 0;
  std::string folder_;  // "archive/"
  std::unordered_map<std::string, Record> records_;
};

}  // namespace shardweave::checkpoint_internal
