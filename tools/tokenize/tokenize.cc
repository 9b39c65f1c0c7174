// Texts as a token file.
//
//   ./bazelw run //tools:tokenize -- --input=a.txt,b.txt --output=tokens.bin          # bytes
//   ./bazelw run //tools:tokenize -- --input=a.txt --output=tokens.bin --end='<|endoftext|>'
//       --tokenizer=tokenizer.json                                                  # Hugging Face's
//
// Without --tokenizer a token is a byte. With it a text is encoded as that library does: a whole file
// at once, or with --lines each line by itself, without its end.

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/str_cat.h"
#include "encoder.h"
#include "nlohmann/json.hpp"
#include "shardweave/modules/data/token_file.h"
#include "shardweave/tools/progress/progress_bar.h"
#include "shardweave/tools/working_directory/working_directory.h"

ABSL_FLAG(std::vector<std::string>, input, {}, "files of text, with commas between them");
ABSL_FLAG(std::string, output, "", "the token file");
ABSL_FLAG(std::string, tokenizer, "", "a tokenizer.json of Hugging Face; empty: a token is a byte");
ABSL_FLAG(bool, lines, false, "each line is a text (with --tokenizer); not: each file is one");
ABSL_FLAG(std::string, end, "", "the token of the tokenizer that comes after each text");
ABSL_FLAG(bool, special_tokens, false, "with the special tokens that the tokenizer adds to a text");
ABSL_FLAG(bool, json, false, "print JSON");
ABSL_FLAG(std::string, encoder, "", "the program that runs the tokenizer; tokenize.sh knows it");

namespace tokenize {
namespace {

using shardweave::ProgressBar;
using shardweave::TokenFileWriter;
using shardweave::TokenFileWriterOptions;
using shardweave::TokenType;

constexpr size_t kChunk = 1 << 20;

absl::Status unreadable(const std::string& path) {
  return absl::NotFoundError(absl::StrCat("--input: ", path, " cannot be read"));
}

// A step of the bar is a MiB of input.
class Progress {
 public:
  explicit Progress(int64_t bytes)
      : bar_({.title = "tokenizing",
              .steps = std::max<int64_t>(1, bytes / kStep),
              .unit = "MiB",
              .out = absl::GetFlag(FLAGS_json) ? nullptr : &std::cerr,
              .terminal = ::isatty(STDERR_FILENO) == 1}),
        steps_(std::max<int64_t>(1, bytes / kStep)) {}
  void read(size_t bytes, int64_t tokens) {
    bytes_ += static_cast<int64_t>(bytes);
    while (bar_.done() < std::min(steps_, bytes_ / kStep)) step(tokens);
  }
  void finish(int64_t tokens) {
    while (bar_.done() < steps_) step(tokens);
  }
  int64_t bytes() const { return bytes_; }

 private:
  static constexpr int64_t kStep = 1 << 20;
  void step(int64_t tokens) { bar_.step_done(absl::StrCat(tokens, " tokens")); }
  ProgressBar bar_;
  const int64_t steps_;
  int64_t bytes_ = 0;
};

struct Totals {
  int64_t tokens = 0, bytes = 0, texts = 0, vocab_size = 0;
  TokenType type = TokenType::kU8;
};

absl::Status write_bytes(const std::vector<std::string>& inputs, TokenFileWriter& writer,
                         Progress& progress, Totals& totals) {
  std::string chunk(kChunk, '\0');
  for (const std::string& path : inputs) {
    std::ifstream file(path, std::ios::binary);
    if (!file) return unreadable(path);
    while (file.read(chunk.data(), static_cast<std::streamsize>(chunk.size())) ||
           file.gcount() > 0) {
      const auto size = static_cast<size_t>(file.gcount());
      const auto* bytes = reinterpret_cast<const unsigned char*>(chunk.data());
      const std::vector<uint32_t> tokens(bytes, bytes + size);
      if (const absl::Status status = writer.write(tokens); !status.ok()) return status;
      progress.read(size, writer.size());
    }
    if (file.bad()) return unreadable(path);
    ++totals.texts;
  }
  return absl::OkStatus();
}

// Texts go to the encoder some at a time.
class Batches {
 public:
  Batches(Encoder& encoder, bool has_end, TokenFileWriter& writer, Progress& progress)
      : encoder_(encoder), has_end_(has_end), writer_(writer), progress_(progress) {}

  // `bytes`: what it was in its file.
  absl::Status add(std::string text, size_t bytes) {
    size_ += text.size();
    bytes_ += bytes;
    texts_.push_back(std::move(text));
    ++total_;
    return size_ >= kChunk || texts_.size() >= kMostTexts ? flush() : absl::OkStatus();
  }
  absl::Status flush() {
    if (texts_.empty()) return absl::OkStatus();
    absl::StatusOr<std::vector<std::vector<uint32_t>>> all = encoder_.encode(texts_);
    if (!all.ok()) return all.status();
    for (std::vector<uint32_t>& ids : *all) {
      if (has_end_) ids.push_back(encoder_.end_id());
      if (const absl::Status status = writer_.write(ids); !status.ok()) return status;
    }
    texts_.clear();
    size_ = 0;
    progress_.read(std::exchange(bytes_, 0), writer_.size());
    return absl::OkStatus();
  }
  int64_t total() const { return total_; }

 private:
  static constexpr size_t kMostTexts = 1 << 14;

  Encoder& encoder_;
  const bool has_end_;
  TokenFileWriter& writer_;
  Progress& progress_;
  std::vector<std::string> texts_;
  size_t size_ = 0, bytes_ = 0;
  int64_t total_ = 0;
};

absl::Status write_encoded(const std::vector<std::string>& inputs, Encoder& encoder,
                           TokenFileWriter& writer, Progress& progress, Totals& totals) {
  Batches batches(encoder, !absl::GetFlag(FLAGS_end).empty(), writer, progress);
  for (const std::string& path : inputs) {
    std::ifstream file(path, std::ios::binary);
    if (!file) return unreadable(path);
    if (absl::GetFlag(FLAGS_lines)) {
      for (std::string line; std::getline(file, line);) {
        const size_t bytes = line.size() + (file.eof() ? 0 : 1);  // the last may end without '\n'
        if (!line.empty() && line.back() == '\r') line.pop_back();
        if (const absl::Status status = batches.add(std::move(line), bytes); !status.ok())
          return status;
      }
    } else {
      // (Iterators would throw where a read fails.)
      std::string text, chunk(kChunk, '\0');
      while (file.read(chunk.data(), static_cast<std::streamsize>(chunk.size())) ||
             file.gcount() > 0) {
        text.append(chunk, 0, static_cast<size_t>(file.gcount()));
      }
      if (file.bad()) return unreadable(path);
      const size_t bytes = text.size();
      if (const absl::Status status = batches.add(std::move(text), bytes); !status.ok())
        return status;
    }
    if (file.bad()) return unreadable(path);
  }
  const absl::Status status = batches.flush();
  totals.texts = batches.total();
  return status;
}

absl::StatusOr<Totals> run() {
  const std::vector<std::string> inputs = absl::GetFlag(FLAGS_input);
  const std::string output = absl::GetFlag(FLAGS_output);
  const std::string tokenizer = absl::GetFlag(FLAGS_tokenizer);
  if (inputs.empty()) return absl::InvalidArgumentError("--input is empty: wanted files of text");
  if (output.empty())
    return absl::InvalidArgumentError("--output is empty: wanted a file to write");
  if (tokenizer.empty()) {
    for (const auto& [name, is_set] :
         {std::pair("--end", !absl::GetFlag(FLAGS_end).empty()),
          std::pair("--lines", absl::GetFlag(FLAGS_lines)),
          std::pair("--special_tokens", absl::GetFlag(FLAGS_special_tokens))}) {
      if (is_set) return absl::InvalidArgumentError(absl::StrCat(name, " wants --tokenizer"));
    }
  }
  int64_t bytes = 0;
  for (const std::string& path : inputs) {
    std::error_code error;
    const auto size = std::filesystem::file_size(path, error);
    if (error) return absl::NotFoundError(absl::StrCat("--input: ", path, ": ", error.message()));
    bytes += static_cast<int64_t>(size);
  }
  std::vector<std::string> kept = inputs;
  if (!tokenizer.empty()) kept.push_back(tokenizer);
  for (const std::string& path : kept) {
    std::error_code error;  // an output that is new is none of them
    if (std::filesystem::equivalent(path, output, error)) {
      return absl::InvalidArgumentError(
          absl::StrCat("--output=", output, " is '", path, "', which is read"));
    }
  }
  if (bytes == 0) return absl::InvalidArgumentError("--input: there is no text in the files");

  Totals totals{.vocab_size = 256};
  std::optional<Encoder> encoder;
  if (!tokenizer.empty()) {
    absl::StatusOr<Encoder> started =
        Encoder::start({.program = absl::GetFlag(FLAGS_encoder),
                        .tokenizer = tokenizer,
                        .special_tokens = absl::GetFlag(FLAGS_special_tokens),
                        .end = absl::GetFlag(FLAGS_end)});
    if (!started.ok()) return started.status();
    encoder.emplace(*std::move(started));
    totals.vocab_size = encoder->num_ids();
    totals.type = totals.vocab_size > 1 << 16 ? TokenType::kU32 : TokenType::kU16;
  }
  absl::StatusOr<TokenFileWriter> writer =
      TokenFileWriter::create(output, {.type = totals.type, .vocab_size = totals.vocab_size});
  if (!writer.ok()) return writer.status();
  Progress progress(bytes);
  absl::Status status = encoder.has_value()
                            ? write_encoded(inputs, *encoder, *writer, progress, totals)
                            : write_bytes(inputs, *writer, progress, totals);
  if (status.ok()) status = writer->close();
  if (!status.ok()) return status;
  totals.tokens = writer->size();
  totals.bytes = progress.bytes();
  progress.finish(totals.tokens);
  return totals;
}

int main_of(int argc, char** argv) {
  absl::SetProgramUsageMessage("Writes texts as a token file, for modules/data.");
  const std::vector<char*> rest = absl::ParseCommandLine(argc, argv);
  shardweave::enter_working_directory();
  std::signal(SIGPIPE, SIG_IGN);  // an encoder that has ended is an error
  const auto begun = std::chrono::steady_clock::now();
  const absl::StatusOr<Totals> totals =
      rest.size() == 1 ? run()
                       : absl::InvalidArgumentError(
                             absl::StrCat("'", rest[1], "': wanted flags only, as --input=FILE"));
  if (!totals.ok()) {
    std::cerr << "tokenize: " << std::string(totals.status().message()) << "\n";
    return absl::IsInvalidArgument(totals.status()) ? 2 : 1;
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begun;
  const std::string type = absl::StrCat("u", 8 * static_cast<int>(totals->type));
  if (absl::GetFlag(FLAGS_json)) {
    std::cout << nlohmann::ordered_json{{"output", absl::GetFlag(FLAGS_output)},
                                        {"tokens", totals->tokens},
                                        {"texts", totals->texts},
                                        {"bytes", totals->bytes},
                                        {"vocab_size", totals->vocab_size},
                                        {"type", type},
                                        {"seconds", seconds.count()}}
                     .dump()
              << "\n";
  } else {
    std::cout << absl::GetFlag(FLAGS_output) << ": " << totals->tokens << " tokens (" << type
              << ") of " << totals->texts << " texts, " << totals->bytes << " bytes\n";
  }
  return 0;
}

}  // namespace
}  // namespace tokenize

int main(int argc, char** argv) {
  return tokenize::main_of(argc, argv);
}
