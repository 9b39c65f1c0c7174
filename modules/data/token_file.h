// A TokenFile is a file of token ids, read where it lies: opening one of a terabyte costs nothing, and
// all processes of a machine share what the kernel keeps of it in memory.
//
//   absl::StatusOr<TokenFile> file = TokenFile::open("tokens.bin");
//   file->size();                                                     // tokens
//   std::vector<int64_t> window(1025);
//   absl::Status status = file->read(/*begin=*/1024, absl::MakeSpan(window));
//
// The format, numbers little-endian:
//
//   byte 0    8 bytes   "SWVTOKEN"
//   byte 8    u32       version of the format: 1
//   byte 12   u32       bytes of a token: 1, 2 or 4
//   byte 16   u64       number of tokens
//   byte 24   u64       size of the vocabulary, every id is smaller; 0: not known
//   byte 32   32 bytes  0
//   byte 64   the tokens, one after the other; nothing follows
//
// A file without such a header is plain, nothing but tokens, and who opens it says of which type:
// kU16 for a .bin of nanoGPT, kU8 for a text, whose tokens are its bytes.
//
// It is read by pread(), not through a mapping. Both take what the kernel has in memory, and 1025 tokens
// take 2 us, or 1.5 from a mapping; but where a mapped file has become shorter, or its disk fails, the
// process gets SIGBUS, and here read() an error.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace shardweave {

// The numbers are the bytes of a token.
enum class TokenType : uint8_t { kU8 = 1, kU16 = 2, kU32 = 4 };

struct TokenFileOptions {
  // Of a file without a header; one with a header has to agree.
  std::optional<TokenType> plain_type = std::nullopt;
};

// Immutable; copies are one file. Any thread, several at once.
class TokenFile {
 public:
  // NotFound, PermissionDenied; InvalidArgument for what is no such file: without a header if
  // plain_type is not given, a header that is damaged or of a later version, a size that is not what
  // the header says or no multiple of a token's, no tokens at all. Messages begin with the path.
  static absl::StatusOr<TokenFile> open(const std::string& path,
                                        const TokenFileOptions& options = {});
  // Without a file: the bytes of a text. InvalidArgument if there are none.
  static absl::StatusOr<TokenFile> of_text(std::string text);

  const std::string& path() const;  // "": a text
  int64_t size() const;             // tokens
  TokenType type() const;
  int64_t vocab_size() const;  // 0: not known. Of kU8 256 at most

  // Tokens begin to begin + tokens.size(). OutOfRange if the file does not have them; DataLoss if it
  // has become shorter since it was opened, or has an id outside of its vocabulary; the system's error
  // if it cannot be read. After an error `tokens` has anything.
  absl::Status read(int64_t begin, absl::Span<int64_t> tokens) const;

 private:
  struct State;
  explicit TokenFile(std::shared_ptr<const State> state) : state_(std::move(state)) {}

  std::shared_ptr<const State> state_;
};

struct TokenFileWriterOptions {
  TokenType type = TokenType::kU16;
  int64_t vocab_size = 0;  // 0: not known
};

// Writes a TokenFile: into a file beside it, which takes its name in close(). So a file of that name is
// always whole, an older one until then. Used by one thread at a time.
//
//   absl::StatusOr<TokenFileWriter> writer = TokenFileWriter::create("tokens.bin");
//   absl::Status status = writer->write({464, 2068, 7586});
//   if (status.ok()) status = writer->close();
class TokenFileWriter {
 public:
  // InvalidArgument for a vocabulary that the type does not hold; the system's error.
  static absl::StatusOr<TokenFileWriter> create(const std::string& path,
                                                const TokenFileWriterOptions& options = {});
  // Without close(): there was no file.
  ~TokenFileWriter();
  TokenFileWriter(TokenFileWriter&&) noexcept;
  TokenFileWriter& operator=(TokenFileWriter&&) noexcept;

  // Appends. InvalidArgument for an id that does not fit the type or the vocabulary (nothing is
  // appended then); the system's error.
  absl::Status write(absl::Span<const uint32_t> tokens);
  int64_t size() const;  // so far

  // Ends it, on disk. FailedPrecondition if there are no tokens or it is closed; the system's error.
  absl::Status close();

 private:
  class State;
  explicit TokenFileWriter(std::unique_ptr<State> state);

  std::unique_ptr<State> state_;
};

}  // namespace shardweave
