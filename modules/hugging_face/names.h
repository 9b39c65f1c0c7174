// How the tensors of modules/nn's models are called and cut in the files that transformers writes and reads.
//
//   file_parts("vit", "vit.layers.0.mlp.fc1.weight", {72, 18});
//   // {{"vit.encoder.layer.0.intermediate.dense.weight", [0:72, 0:18], {72, 18}}}
//   file_parts("mixtral", "model.layers.0.mlp.experts.down_proj", {8, 64, 224});    // one for each expert
//
// Most have one name in memory and in files. Those that have not are a table in names.cc, by kind of
// model ("llama", "gpt2", "mixtral", "vit"; for others names are what they are). Values; pure functions
// but compare_copies(); without LibTorch.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "shardweave/modules/checkpoint/box.h"
#include "shardweave/modules/checkpoint/tensor_source.h"

namespace shardweave {

// A tensor of a file, and which box of one of ours it is.
struct FilePart {
  std::string name;
  Box box;
  Dims
      shape;  // in the file: without the dimensions that lead, of size 1 in the box, or all of them
  friend bool operator==(const FilePart&, const FilePart&) = default;
};

// As it is written, in the order of files.
std::vector<FilePart> file_parts(std::string_view kind, std::string_view name, const Dims& shape);

// Whether a tensor of ours is in no file: what the configuration gives (rotary frequencies).
bool is_made_by_configuration(std::string_view kind, std::string_view name);
// Whether a tensor of a file is of no use here: the same, the masks of old GPT-2 files, the pooler of ViT.
bool is_passed_over(std::string_view kind, std::string_view file_name);

// What one of ours wants to find.
struct WantedTensor {
  std::string name;
  std::vector<std::string> aliases;  // other names of it (tied weights): any of them is it
  Dims shape;
  std::optional<DType> dtype;  // floating-point ones become each other; none: any will do
};
struct FileMatch {
  // For each that was wanted, put together where it is in several; none if it is missing.
  std::vector<std::optional<TensorSource>> found;
  std::vector<std::string> missing;     // in files' names
  std::vector<std::string> unexpected;  // likewise; not what is passed over
  std::vector<std::string> differing;   // "lm_head.weight ([29, 18] there, [30, 18] here)"
  // Of tied weights that are there by several names the further ones, beside the one that was found: of one
  // shape and dtype. Whether they have its values compare_copies() says.
  struct Copy {
    std::string name;  // in files' names
    TensorSource tensor, found;
  };
  std::vector<Copy> copies;

  bool ok() const { return missing.empty() && unexpected.empty() && differing.empty(); }
  // "missing: a, b; differing: c (...)", with the first twenty of each.
  std::string to_string() const;
};
// Names as they are written, and besides those in memory (transformers 5 can write them), and either without
// the name of the part around the layers ("h.0..." for "transformer.h.0...", as older files of GPT-2).
FileMatch match_files(std::string_view kind, const std::vector<WantedTensor>& wanted,
                      const std::vector<TensorSource>& there);

// Reads the copies, this rank's share of the rows of each, a few MB at a time: one of which a byte differs
// goes into `differing`, for a model whose weights are tied would lose it. Errors of reading.
absl::Status compare_copies(FileMatch& match, int64_t rank = 0, int64_t num_ranks = 1);

}  // namespace shardweave
