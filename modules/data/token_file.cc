#include "shardweave/modules/data/token_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <limits>
#include <string_view>
#include <utility>

#include "shardweave/comm/str_cat.h"

namespace shardweave {
namespace {

static_assert(std::endian::native == std::endian::little, "numbers in files are little-endian");

constexpr std::string_view kMagic = "SWVTOKEN";
constexpr uint32_t kVersion = 1;

struct Header {
  char magic[8];
  uint32_t version;
  uint32_t token_bytes;
  uint64_t num_tokens;
  uint64_t vocab_size;
  char reserved[32];
};
static_assert(sizeof(Header) == 64);

constexpr int64_t kMostTokens = std::numeric_limits<int64_t>::max() / 8;

int64_t bytes_of(TokenType type) {
  return static_cast<int64_t>(type);
}
uint64_t most_ids(TokenType type) {
  return uint64_t{1} << (8 * bytes_of(type));
}
std::string name_of(TokenType type) {
  return str_cat("u", 8 * bytes_of(type));
}

absl::Status system_error(const std::string& path, std::string_view what) {
  const int error = errno;
  const absl::Status status = absl::ErrnoToStatus(error, "");
  return absl::Status(status.code(), str_cat(path, ": ", what, ": ", std::strerror(error)));
}
absl::Status refuse(const std::string& path, std::string_view why) {
  return absl::InvalidArgumentError(str_cat(path, ": ", why));
}

// As many bytes as there are, up to `size`; or -1, with errno.
int64_t read_at(int fd, int64_t begin, char* to, int64_t size) {
  int64_t done = 0;
  while (done < size) {
    const ssize_t n = ::pread(fd, to + done, static_cast<size_t>(size - done), begin + done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return -1;
    if (n == 0) break;
    done += n;
  }
  return done;
}

bool write_all(int fd, const char* from, size_t size) {
  while (size > 0) {
    const ssize_t n = ::write(fd, from, size);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return false;
    from += n;
    size -= static_cast<size_t>(n);
  }
  return true;
}

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&&) = delete;
  ~FileDescriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  int get() const { return fd_; }
  // Errors of the last writes may come here.
  bool close() { return ::close(std::exchange(fd_, -1)) == 0; }

 private:
  int fd_;
};

// The greatest is returned, so that one comparison tells whether all are in the vocabulary.
template <typename T>
int64_t widen(const char* from, absl::Span<int64_t> to) {
  int64_t greatest = -1;
  for (size_t i = 0; i < to.size(); ++i) {
    T token;
    std::memcpy(&token, from + i * sizeof(T), sizeof(T));
    to[i] = static_cast<int64_t>(token);
    greatest = std::max(greatest, to[i]);
  }
  return greatest;
}
int64_t widen(TokenType type, const char* from, absl::Span<int64_t> to) {
  switch (type) {
    case TokenType::kU8:
      return widen<uint8_t>(from, to);
    case TokenType::kU16:
      return widen<uint16_t>(from, to);
    case TokenType::kU32:
      return widen<uint32_t>(from, to);
  }
  return -1;
}

bool is_type(uint32_t bytes) {
  return bytes == 1 || bytes == 2 || bytes == 4;
}

}  // namespace

struct TokenFile::State {
  FileDescriptor file{-1};
  std::string path, text;
  TokenType type = TokenType::kU8;
  int64_t begin = 0;  // of the tokens, in bytes
  int64_t size = 0;   // tokens
  int64_t vocab_size = 0;
};

absl::StatusOr<TokenFile> TokenFile::open(const std::string& path,
                                          const TokenFileOptions& options) {
  const std::optional<TokenType> plain = options.plain_type;
  if (plain.has_value() && !is_type(static_cast<uint32_t>(*plain))) {
    return refuse(path, str_cat("plain_type has ", bytes_of(*plain), " bytes; wanted 1, 2 or 4"));
  }
  // Not blocking: a pipe's end would wait for the other one.
  State state{.file = FileDescriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)),
              .path = path};
  if (state.file.get() < 0) return system_error(path, "cannot be opened");
  struct stat about {};
  if (::fstat(state.file.get(), &about) != 0) return system_error(path, "cannot be opened");
  if (!S_ISREG(about.st_mode)) {
    return refuse(path, S_ISDIR(about.st_mode) ? "is a directory; wanted a file of tokens"
                                               : "is no regular file; wanted a file of tokens");
  }
  const int64_t file_size = about.st_size;
  Header header{};
  const int64_t have =
      read_at(state.file.get(), 0, reinterpret_cast<char*>(&header), sizeof(header));
  if (have < 0) return system_error(path, "cannot be read");
  const bool has_header = have >= static_cast<int64_t>(kMagic.size()) &&
                          std::memcmp(header.magic, kMagic.data(), kMagic.size()) == 0;
  if (!has_header) {
    if (file_size == 0) return refuse(path, "is empty; wanted a file of tokens");
    if (!plain.has_value()) {
      return refuse(path, str_cat("has no header of a token file; wanted one that begins with '",
                                  kMagic, "', or plain_type for a file of nothing but tokens"));
    }
    if (file_size % bytes_of(*plain) != 0) {
      return refuse(path, str_cat("has ", file_size, " bytes; wanted a multiple of ",
                                  bytes_of(*plain), ", for tokens of ", name_of(*plain)));
    }
    state.type = *plain;
    state.size = file_size / bytes_of(*plain);
    if (*plain == TokenType::kU8) state.vocab_size = 256;
    return TokenFile(std::make_shared<const State>(std::move(state)));
  }

  if (have < static_cast<int64_t>(sizeof(header))) {
    return refuse(path, str_cat("ends within its header, after ", have, " bytes"));
  }
  if (header.version != kVersion) {
    return refuse(
        path, str_cat("is of version ", header.version, " of the format; this reads ", kVersion));
  }
  if (!is_type(header.token_bytes)) {
    return refuse(
        path, str_cat("says that a token has ", header.token_bytes, " bytes; wanted 1, 2 or 4"));
  }
  state.type = static_cast<TokenType>(header.token_bytes);
  if (plain.has_value() && *plain != state.type) {
    return refuse(path, str_cat("has a header, which says ", name_of(state.type),
                                "; plain_type is ", name_of(*plain)));
  }
  for (const char byte : header.reserved) {
    if (byte != 0) return refuse(path, "has a damaged header: bytes 32 to 63 are not 0");
  }
  if (header.num_tokens == 0) return refuse(path, "has no tokens");
  const uint64_t token_bytes = header.token_bytes;
  if (header.num_tokens > static_cast<uint64_t>(kMostTokens) ||
      header.num_tokens * token_bytes + sizeof(header) != static_cast<uint64_t>(file_size)) {
    return refuse(path, str_cat("has ", file_size, " bytes; its header says ", header.num_tokens,
                                " tokens of ", token_bytes, " bytes: it is ",
                                header.num_tokens > static_cast<uint64_t>(kMostTokens) ||
                                        header.num_tokens * token_bytes + sizeof(header) >
                                            static_cast<uint64_t>(file_size)
                                    ? "truncated, or still being written"
                                    : "longer than that"));
  }
  if (header.vocab_size > most_ids(state.type)) {
    return refuse(path, str_cat("says that there are ", header.vocab_size,
                                " different tokens, more than ", name_of(state.type), " has"));
  }
  state.begin = sizeof(header);
  state.size = static_cast<int64_t>(header.num_tokens);
  state.vocab_size = static_cast<int64_t>(header.vocab_size);
  return TokenFile(std::make_shared<const State>(std::move(state)));
}

absl::StatusOr<TokenFile> TokenFile::of_text(std::string text) {
  if (text.empty()) return absl::InvalidArgumentError("the text is empty; wanted a byte or more");
  const auto size = static_cast<int64_t>(text.size());
  State state{.text = std::move(text), .size = size, .vocab_size = 256};
  return TokenFile(std::make_shared<const State>(std::move(state)));
}

const std::string& TokenFile::path() const {
  return state_->path;
}
int64_t TokenFile::size() const {
  return state_->size;
}
TokenType TokenFile::type() const {
  return state_->type;
}
int64_t TokenFile::vocab_size() const {
  return state_->vocab_size;
}

absl::Status TokenFile::read(int64_t begin, absl::Span<int64_t> tokens) const {
  const State& s = *state_;
  const std::string& name = s.path.empty() ? "a text" : s.path;
  if (begin < 0 || begin > s.size || tokens.size() > static_cast<uint64_t>(s.size - begin)) {
    return absl::OutOfRangeError(
        str_cat(name, ": has ", s.size, " tokens; wanted ", tokens.size(), " from ", begin));
  }
  const int64_t token_bytes = bytes_of(s.type);
  std::array<char, 16384> buffer;
  while (!tokens.empty()) {
    const size_t count = std::min(tokens.size(), buffer.size() / static_cast<size_t>(token_bytes));
    const char* from = buffer.data();
    if (s.file.get() < 0) {
      from = s.text.data() + begin;
    } else {
      const int64_t at = s.begin + begin * token_bytes;
      const int64_t wanted = static_cast<int64_t>(count) * token_bytes;
      const int64_t have = read_at(s.file.get(), at, buffer.data(), wanted);
      if (have < 0) return system_error(name, "cannot be read");
      if (have < wanted) {
        return absl::DataLossError(
            str_cat(name, ": has become shorter since it was opened: ends at ", at + have,
                    " bytes, had ", s.begin + s.size * token_bytes));
      }
    }
    const int64_t greatest = widen(s.type, from, tokens.first(count));
    if (s.vocab_size != 0 && greatest >= s.vocab_size) {
      return absl::DataLossError(str_cat(name, ": token ", greatest, " among ", begin, " to ",
                                         begin + static_cast<int64_t>(count),
                                         "; the vocabulary has ", s.vocab_size));
    }
    tokens.remove_prefix(count);
    begin += static_cast<int64_t>(count);
  }
  return absl::OkStatus();
}

// --- writing -------------------------------------------------------------------------------------

class TokenFileWriter::State {
 public:
  State(std::string path, std::string partial, FileDescriptor file,
        const TokenFileWriterOptions& options)
      : path_(std::move(path)),
        partial_(std::move(partial)),
        file_(std::move(file)),
        options_(options) {
    buffer_.resize(sizeof(Header));  // the real one comes last
  }
  ~State() {
    if (!is_closed_) ::unlink(partial_.c_str());
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  absl::Status write(absl::Span<const uint32_t> tokens);
  absl::Status close();
  int64_t size() const { return size_; }

 private:
  absl::Status failed(std::string_view what) const { return system_error(partial_, what); }
  bool flush() {
    const bool done = write_all(file_.get(), buffer_.data(), buffer_.size());
    buffer_.clear();
    return done;
  }
  static constexpr size_t kBuffer = 1 << 20;

  const std::string path_, partial_;
  FileDescriptor file_;
  const TokenFileWriterOptions options_;
  std::string buffer_;
  int64_t size_ = 0;
  bool is_closed_ = false;
  absl::Status error_;  // the first: what follows would leave a hole
};

absl::Status TokenFileWriter::State::write(absl::Span<const uint32_t> tokens) {
  if (is_closed_) return absl::FailedPreconditionError(str_cat(path_, ": is closed"));
  if (!error_.ok()) return error_;
  const uint64_t ids = options_.vocab_size != 0 ? static_cast<uint64_t>(options_.vocab_size)
                                                : most_ids(options_.type);
  for (const uint32_t token : tokens) {
    if (token >= ids) {
      return absl::InvalidArgumentError(
          str_cat(path_, ": token ", token, "; wanted less than ", ids, ", ",
                  options_.vocab_size != 0 ? "the size of the vocabulary"
                                           : str_cat("what ", name_of(options_.type), " holds")));
    }
  }
  const auto token_bytes = static_cast<size_t>(bytes_of(options_.type));
  for (const uint32_t token : tokens) {
    buffer_.append(reinterpret_cast<const char*>(&token), token_bytes);
    if (buffer_.size() >= kBuffer && !flush()) return error_ = failed("cannot be written");
  }
  size_ += static_cast<int64_t>(tokens.size());
  return absl::OkStatus();
}

absl::Status TokenFileWriter::State::close() {
  if (is_closed_) return absl::FailedPreconditionError(str_cat(path_, ": is closed"));
  if (!error_.ok()) return error_;
  if (size_ == 0) return absl::FailedPreconditionError(str_cat(path_, ": no tokens were written"));
  Header header{.version = kVersion,
                .token_bytes = static_cast<uint32_t>(bytes_of(options_.type)),
                .num_tokens = static_cast<uint64_t>(size_),
                .vocab_size = static_cast<uint64_t>(options_.vocab_size)};
  std::memcpy(header.magic, kMagic.data(), kMagic.size());
  if (!flush() || ::lseek(file_.get(), 0, SEEK_SET) != 0 ||
      !write_all(file_.get(), reinterpret_cast<const char*>(&header), sizeof(header)) ||
      ::fsync(file_.get()) != 0 || !file_.close()) {
    return error_ = failed("cannot be written");
  }
  if (::rename(partial_.c_str(), path_.c_str()) != 0) {
    return error_ = failed(str_cat("cannot be renamed to ", path_));
  }
  is_closed_ = true;
  // The name, too, is to be there after the power has failed.
  const size_t slash = path_.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : path_.substr(0, slash + 1);
  FileDescriptor directory(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  // EINVAL: a file system without that.
  if (directory.get() < 0 || (::fsync(directory.get()) != 0 && errno != EINVAL)) {
    return system_error(folder, "cannot be written");
  }
  return absl::OkStatus();
}

absl::StatusOr<TokenFileWriter> TokenFileWriter::create(const std::string& path,
                                                        const TokenFileWriterOptions& options) {
  if (!is_type(static_cast<uint32_t>(options.type))) {
    return refuse(path, str_cat("type has ", bytes_of(options.type), " bytes; wanted 1, 2 or 4"));
  }
  if (options.vocab_size < 0 ||
      static_cast<uint64_t>(options.vocab_size) > most_ids(options.type)) {
    return refuse(path, str_cat("vocab_size is ", options.vocab_size, "; wanted 0 to ",
                                most_ids(options.type), ", for tokens of ", name_of(options.type)));
  }
  std::string partial;
  int fd = -1;
  // Another writer may be at it, or one that was killed has left its own.
  for (int i = 0; fd < 0 && i < 1000; ++i) {
    partial = str_cat(path, ".partial", i);
    fd = ::open(partial.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0 && errno != EEXIST) break;
  }
  FileDescriptor file(fd);
  if (file.get() < 0) return system_error(partial, "cannot be created");
  return TokenFileWriter(
      std::make_unique<State>(path, std::move(partial), std::move(file), options));
}

TokenFileWriter::TokenFileWriter(std::unique_ptr<State> state) : state_(std::move(state)) {}
TokenFileWriter::~TokenFileWriter() = default;
TokenFileWriter::TokenFileWriter(TokenFileWriter&&) noexcept = default;
TokenFileWriter& TokenFileWriter::operator=(TokenFileWriter&&) noexcept = default;

absl::Status TokenFileWriter::write(absl::Span<const uint32_t> tokens) {
  return state_->write(tokens);
}
int64_t TokenFileWriter::size() const {
  return state_->size();
}
absl::Status TokenFileWriter::close() {
  return state_->close();
}

}  // namespace shardweave
