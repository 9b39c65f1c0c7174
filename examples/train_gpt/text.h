// The text to train on, byte by byte, and the batches that are drawn from it.
//
//   absl::StatusOr<Text> text = Text::read("book.txt");       // "": Debian's licence texts
//   Batch batch = text->batch({.step = 7, .batch = 32, .seq = 64, .seed = 1});
//   batch.tokens;                                             // [32, 64], int64
//   batch.targets;                                            // the same, one byte further on
//
// Immutable: share it between threads. A batch is a function of the text and the arguments alone,
// so that all ranks draw the same without asking each other.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"

namespace train_gpt {

struct Batch {
  at::Tensor tokens;
  at::Tensor targets;
};

// The bytes as numbers, [1, size], int64.
at::Tensor to_tokens(std::string_view bytes);

class Text {
 public:
  explicit Text(std::string bytes) : bytes_(std::move(bytes)) {}
  // Errors: NotFound for a file that cannot be read, InvalidArgument for an empty one; both name
  // it.
  static absl::StatusOr<Text> read(const std::string& file);

  std::string_view bytes() const { return bytes_; }

  struct Draw {
    int64_t step;
    int64_t batch;
    int64_t seq;
    uint64_t seed;
  };
  // The text has more than draw.seq bytes.
  Batch batch(const Draw& draw) const;

 private:
  std::string bytes_;
};

}  // namespace train_gpt
