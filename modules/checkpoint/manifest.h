// What a checkpoint consists of: manifest.json, which is written last. docs/checkpoints.md has the
// schema, and what a reader may rely on.
//
//   auto manifest = Manifest::parse(text);                       // StatusOr
//   const SavedTensor& w = manifest->tensors.at("model.w");
//   w.pieces[0].file;                                            // "rank-00000.safetensors"
//
// A value. What parse() gives is consistent: the pieces of a tensor cover it, each element once, and
// lie in files that are listed.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "shardweave/comm/buffer.h"
#include "shardweave/modules/checkpoint/box.h"

namespace shardweave {

// A box of a tensor, as a tensor of a safetensors file.
struct SavedPiece {
  std::string file;
  Box box;
  uint64_t xxh3 = 0;  // of its bytes
  // Of its elements, each with its place in the tensor: what is read of it in parts adds up to it.
  // Nothing in manifests that were written before there was one.
  std::optional<uint64_t> sum;
  friend bool operator==(const SavedPiece&, const SavedPiece&) = default;
};

struct SavedTensor {
  DType dtype = DType::kF32;
  Dims shape;
  std::vector<SavedPiece> pieces;  // none if it has no elements
  friend bool operator==(const SavedTensor&, const SavedTensor&) = default;
};

struct SavedFile {
  int64_t bytes = 0;
  uint64_t xxh3 = 0;  // of all of it
  friend bool operator==(const SavedFile&, const SavedFile&) = default;
};

struct Manifest {
  static constexpr int64_t kVersion = 1;
  int64_t step = 0;
  int64_t world_size = 0;  // that saved it; for people
  std::string mesh;        // likewise: "dp=2,tp=2"
  std::map<std::string, SavedTensor, std::less<>> tensors;
  std::map<std::string, std::string, std::less<>>
      aliases;  // other names (tied weights) -> a tensor's
  // Prefixes of tensors that did not exist yet: an optimizer's states of a parameter before its first
  // step ("optimizer.w."). Without it, that there are none would be no different from a loss.
  std::set<std::string, std::less<>> without_state;
  std::map<std::string, SavedFile, std::less<>> files;
  std::map<std::string, std::string, std::less<>> values;  // texts of JSON
  // Names of those without which a run does not go on as it was (random numbers, a loader's position): a
  // state that has no place for one of these is another state. In a manifest that does not say it: none.
  std::set<std::string, std::less<>> resumes;

  // Its last line is the checksum of what stands before that.
  std::string to_json() const;
  // InvalidArgument names the place: '"tensors", "w", "pieces", "0", "shape": wanted ...';
  // Unimplemented for a later version of the format.
  // The checksum is not looked at.
  static absl::StatusOr<Manifest> parse(std::string_view text);
  friend bool operator==(const Manifest&, const Manifest&) = default;
};

// Whether the last line of a manifest is the checksum of the rest.
bool has_its_checksum(std::string_view text);
// What a piece is called in its file: the tensor's name, and unless it is all of it the box:
// "w[0:4, 0:8]".
std::string piece_name(std::string_view tensor, absl::Span<const int64_t> shape, const Box& box);
// An error, or JSON as to_json() writes it.
absl::StatusOr<std::string> normalized_json(std::string_view text);

}  // namespace shardweave
