// TokenWindows: token files as samples of one length, for language models.
//
//   absl::StatusOr<TokenWindows> windows = TokenWindows::create({file}, /*seq=*/1024);
//   windows->num_samples();                              // (tokens - 1) / seq of each file
//   std::vector<int64_t> sample(1025);
//   absl::Status status = windows->read(/*sample=*/7, /*begin=*/0, absl::MakeSpan(sample));
//
// Sample i of a file has the tokens i * seq to (i + 1) * seq, the last of which is the first of the next
// sample: the first seq of them are what a model gets, the last seq what it is to say. Every token but
// the first of a file and those of its last, incomplete sample is to be said once. Samples do not go
// across the end of a file.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "shardweave/modules/data/token_file.h"

namespace shardweave {

// Immutable, cheap to copy a few files of. Any thread, several at once.
class TokenWindows {
 public:
  // InvalidArgument for no file, seq < 1, and files that are all too short for one sample.
  static absl::StatusOr<TokenWindows> create(std::vector<TokenFile> files, int64_t seq);

  int64_t num_samples() const { return ends_.back(); }
  int64_t seq() const { return seq_; }
  const std::vector<TokenFile>& files() const { return files_; }

  // The tokens begin to begin + tokens.size() of a sample's seq + 1. OutOfRange for others;
  // TokenFile::read()'s errors.
  absl::Status read(int64_t sample, int64_t begin, absl::Span<int64_t> tokens) const;

 private:
  TokenWindows(std::vector<TokenFile> files, int64_t seq, std::vector<int64_t> ends)
      : files_(std::move(files)), seq_(seq), ends_(std::move(ends)) {}

  std::vector<TokenFile> files_;
  int64_t seq_;
  std::vector<int64_t> ends_;  // of each file's samples
};

}  // namespace shardweave
