// Safetensors files (https://github.com/huggingface/safetensors): the length of a header in 8 bytes, the
// header in JSON, then the tensors' bytes, row-major and little-endian. Without LibTorch;
// safetensors_tensor.h has at::Tensor.
//
//   auto file = SafetensorsFile::open("model.safetensors");          // StatusOr; the header alone
//   const StoredTensor* info = (*file)->find("h.0.attn.q.weight");     // null: not there
//   (*file)->read(*info, Box{{0, 0}, {2, 8}}, out);                  // two rows: no byte more is read
//
// The reader is strict. A file that another tool wrote well is read; InvalidArgument, with the path and the
// key, for a header that is larger than 100 MB or than the file, no JSON, with something that
// stands twice, of an unknown dtype; for tensors that overlap, leave holes, reach out of the file, or whose bytes
// are not what dtype and shape say; and for bytes behind the last tensor.
//
// Threads: a SafetensorsFile is read by any number at once.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "shardweave/comm/buffer.h"
#include "shardweave/modules/checkpoint/box.h"
#include "shardweave/modules/checkpoint/file_system.h"

namespace shardweave {

// "F32", "BF16", ...; and back, nothing for others. (The format's F4, C64 and others of less than a
// byte have no DType.)
std::string_view safetensors_name(DType dtype);
std::optional<DType> safetensors_dtype(std::string_view name);

struct StoredTensor {
  std::string name;
  DType dtype = DType::kF32;
  Dims shape;
  int64_t begin = 0;  // of its bytes, behind the header
  int64_t end = 0;
  friend bool operator==(const StoredTensor&, const StoredTensor&) = default;
};

// What is in front of the tensors.
struct SafetensorsHeader {
  std::vector<StoredTensor> tensors;  // as their bytes follow each other
  std::map<std::string, std::string> metadata;
  friend bool operator==(const SafetensorsHeader&, const SafetensorsHeader&) = default;
};
constexpr int64_t kMostSafetensorsHeaderBytes = 100'000'000;
// `json`: the header's text; `data_bytes`: how many bytes follow it.
absl::StatusOr<SafetensorsHeader> parse_safetensors_header(std::string_view json,
                                                           int64_t data_bytes);

class SafetensorsFile {
 public:
  // `stays_open`: else it is opened anew by each read.
  static absl::StatusOr<std::shared_ptr<SafetensorsFile>> open(
      const std::string& path, std::shared_ptr<FileSystem> fs = nullptr,
      Symlinks symlinks = Symlinks::kFollow, bool stays_open = true);

  const std::string& path() const { return path_; }
  int64_t bytes() const { return file_->size(); }
  const std::vector<StoredTensor>& tensors() const { return header_.tensors; }
  const std::map<std::string, std::string>& metadata() const { return header_.metadata; }
  const StoredTensor* find(std::string_view name) const;

  // A tensor of this file, whole, or a box of it; `out` has room for it, and gets it row-major. Reads
  // these bytes and no others, but for what is between rows of less than 64 bytes. InvalidArgument for a
  // box that is not in the tensor.
  absl::Status read(const StoredTensor& info, void* out) const;
  absl::Status read(const StoredTensor& info, const Box& box, void* out) const;
  // The part `common` of a tensor that holds `box` of a larger one, to where it lies in the array
  // `to` at `out`.
  absl::Status read(const StoredTensor& info, const Box& box, const Box& common, const Box& to,
                    void* out) const;
  // Whole, with the XXH3 of its bytes.
  absl::Status read(const StoredTensor& info, void* out, uint64_t* out_checksum) const;
  // `size` of its bytes, from `begin` on; and by ReadableFile::read_past_cache_at().
  absl::Status read(const StoredTensor& info, int64_t begin, int64_t size, void* out) const;
  absl::Status read_past_cache(const StoredTensor& info, int64_t begin, int64_t size, void* out,
                               absl::Span<char> through) const;
  int64_t offset(const StoredTensor& info) const {
    return data_begin_ + info.begin;
  }  // in the file
  // Where it lies in the mapped file, as long as this lives; null if the file cannot be mapped. Not
  // aligned to its elements in files that do not care.
  const std::byte* mapped(const StoredTensor& info) const;

 private:
  SafetensorsFile() = default;
  std::string path_;
  std::shared_ptr<FileSystem> fs_;
  std::unique_ptr<ReadableFile> file_;
  int64_t data_begin_ = 0;
  SafetensorsHeader header_;
  std::unordered_map<std::string_view, size_t> places_;
};

// Writes one tensor after the other, whatever their number, with the memory of none.
//
//   auto writer = SafetensorsWriter::create(path, {{"a", DType::kF32, {2, 3}}, ...});
//   for (const StoredTensor& info : (*writer)->tensors()) (*writer)->append(bytes, info.end - info.begin);
//   (*writer)->finish();                                             // all there, and on the disk
class SafetensorsWriter {
 public:
  // begin and end of `tensors` are worked out. They are written those with the largest elements first,
  // so that each lies aligned; else in the order that is given. The file must not be there.
  static absl::StatusOr<std::unique_ptr<SafetensorsWriter>> create(
      const std::string& path, std::vector<StoredTensor> tensors,
      const std::map<std::string, std::string>& metadata = {},
      std::shared_ptr<FileSystem> fs = nullptr);

  const std::vector<StoredTensor>& tensors() const { return tensors_; }  // as they are to come
  // The next bytes, of as many tensors as one likes. `out_checksum`, if it is not null: their XXH3.
  absl::Status append(const void* data, int64_t size, uint64_t* out_checksum = nullptr);
  // FailedPrecondition if bytes are missing. Synced and closed. A file that was not finished goes with the
  // writer.
  absl::Status finish();
  int64_t bytes() const { return bytes_; }  // of the file so far
  uint64_t checksum() const;                // XXH3 of those

 private:
  struct Sum;
  SafetensorsWriter();

 public:
  ~SafetensorsWriter();

 private:
  std::shared_ptr<FileSystem> fs_;
  std::string path_;
  std::vector<StoredTensor> tensors_;
  std::unique_ptr<WritableFile> file_;  // null: finished
  std::unique_ptr<Sum> sum_;
  int64_t bytes_ = 0;
  int64_t wanted_ = 0;  // of the whole file
};

}  // namespace shardweave
