// A TensorSource is a tensor that lies in files and can be read in parts, whatever files they are: a
// checkpoint's, safetensors files, or pieces of several tensors put together.
//
//   auto sources = safetensors_sources("llama/");                  // StatusOr; headers alone are read
//   const TensorSource& w = sources->front();
//   std::vector<char> rows(2 * 8 * 4);
//   const Box part = {{0, 0}, {2, 8}};
//   absl::Status status = w.read(part, part, rows.data());         // two rows: no byte more is read
//
// Values; without LibTorch and without communication. Threads: any, several at once.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "shardweave/comm/buffer.h"
#include "shardweave/modules/checkpoint/box.h"
#include "shardweave/modules/checkpoint/file_system.h"
#include "shardweave/modules/checkpoint/manifest.h"

namespace shardweave {

struct TensorSource {
  std::string name;
  DType dtype = DType::kF32;
  Dims shape;
  // The elements of `part`, a box of the tensor, to where they lie in a row-major array at `out` that holds
  // the box `to`, which contains it. Reads these bytes and no others.
  std::function<absl::Status(const Box& part, const Box& to, void* out)> read;

  int64_t bytes() const { return whole_box(shape).numel() * element_size(dtype); }
};

// Of a checkpoint (read_manifest()). Opens its files, of which errors are those of
// open_checkpoint_file(), and DataLoss for a file without a piece that the manifest says it has.
// Checksums are not compared: verify_checkpoint().
absl::StatusOr<std::vector<TensorSource>> checkpoint_sources(
    const std::string& checkpoint, const Manifest& manifest,
    const std::shared_ptr<FileSystem>& fs = nullptr);

// Of a safetensors file, or a folder of those with an index (safetensors_index.h), sorted by name.
absl::StatusOr<std::vector<TensorSource>> safetensors_sources(
    const std::string& path, const std::shared_ptr<FileSystem>& fs = nullptr);

// A tensor that is the box `box` of a larger one. It may have fewer dimensions: those that lead, of size 1
// in the box, are left out then.
struct SourcePart {
  TensorSource source;
  Box box;
};
// The larger one: the parts cover it, each element once, and have one dtype.
TensorSource put_together(std::string name, Dims shape, std::vector<SourcePart> parts);
// And back: the box of `whole` as a tensor of `shape`.
TensorSource part_of(const TensorSource& whole, const Box& box, std::string name, Dims shape);

}  // namespace shardweave
