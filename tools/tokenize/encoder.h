// Texts to token ids by a Hugging Face tokenizer.json, whose library runs in a process of its own
// (encode.py).
//
//   auto encoder = Encoder::start({.program = "encode.py", .tokenizer = "tokenizer.json"});
//   absl::StatusOr<std::vector<std::vector<uint32_t>>> ids = encoder->encode({"Hello.", "World."});
//
// Used by one thread at a time.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tokenize {

struct EncoderOptions {
  std::string program, tokenizer;
  bool special_tokens = false;  // those that the file adds to each text
  std::string end;              // a token to look up; "": none
};

class Encoder {
 public:
  // InvalidArgument for a file that is no tokenizer.json or lacks the token; Unavailable if there is no
  // Python or library for it.
  static absl::StatusOr<Encoder> start(const EncoderOptions& options);
  ~Encoder();
  Encoder(Encoder&& other) noexcept;
  Encoder& operator=(Encoder&&) = delete;

  int64_t num_ids() const { return num_ids_; }
  uint32_t end_id() const { return end_id_; }

  // InvalidArgument for a text that is no UTF-8, counted from the first of all.
  absl::StatusOr<std::vector<std::vector<uint32_t>>> encode(const std::vector<std::string>& texts);

 private:
  Encoder(pid_t pid, int in, int out) : pid_(pid), in_(in), out_(out) {}
  absl::Status send(const void* data, size_t size);
  absl::Status receive(void* data, size_t size);
  absl::StatusOr<uint32_t> number();
  absl::Status begin_reply();

  pid_t pid_;
  int in_, out_;  // of the process
  int64_t num_ids_ = 0;
  uint32_t end_id_ = 0;
};

}  // namespace tokenize
