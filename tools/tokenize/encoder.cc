#include "encoder.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

extern char** environ;

namespace tokenize {
namespace {

constexpr uint32_t kMostBytes = uint32_t{1} << 31;

absl::Status gone() {
  return absl::UnavailableError(
      "the process that runs the tokenizer has ended; what it said is above");
}

}  // namespace

absl::StatusOr<Encoder> Encoder::start(const EncoderOptions& options) {
  int in[2], out[2];
  if (::pipe2(in, O_CLOEXEC) != 0) return absl::ErrnoToStatus(errno, "a pipe");
  if (::pipe2(out, O_CLOEXEC) != 0) {
    const absl::Status status = absl::ErrnoToStatus(errno, "a pipe");
    ::close(in[0]), ::close(in[1]);
    return status;
  }
  std::vector<std::string> arguments = {"python3", options.program, options.tokenizer,
                                        options.special_tokens ? "1" : "0", options.end};
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, in[0], STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, out[1], STDOUT_FILENO);
  pid_t pid = -1;
  const int error = ::posix_spawnp(&pid, "python3", &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  ::close(in[0]), ::close(out[1]);
  Encoder encoder(error == 0 ? pid : -1, in[1], out[0]);
  if (error != 0) {
    return absl::UnavailableError(absl::StrCat(
        "python3, which runs the tokenizer, cannot be started: ", std::strerror(error)));
  }
  if (const absl::Status status = encoder.begin_reply(); !status.ok()) return status;
  const absl::StatusOr<uint32_t> num_ids = encoder.number();
  const absl::StatusOr<uint32_t> end_id = encoder.number();
  if (!num_ids.ok() || !end_id.ok()) return gone();
  encoder.num_ids_ = *num_ids;
  encoder.end_id_ = *end_id;
  return encoder;
}

Encoder::Encoder(Encoder&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)),
      in_(std::exchange(other.in_, -1)),
      out_(std::exchange(other.out_, -1)),
      num_ids_(other.num_ids_),
      end_id_(other.end_id_) {}

Encoder::~Encoder() {
  if (in_ >= 0) ::close(in_);  // which it takes for the end
  if (out_ >= 0) ::close(out_);
  if (pid_ > 0) ::waitpid(pid_, nullptr, 0);
}

absl::Status Encoder::send(const void* data, size_t size) {
  const char* from = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t n = ::write(in_, from, size);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return gone();
    from += n;
    size -= static_cast<size_t>(n);
  }
  return absl::OkStatus();
}

absl::Status Encoder::receive(void* data, size_t size) {
  char* to = static_cast<char*>(data);
  while (size > 0) {
    const ssize_t n = ::read(out_, to, size);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return gone();
    to += n;
    size -= static_cast<size_t>(n);
  }
  return absl::OkStatus();
}

absl::StatusOr<uint32_t> Encoder::number() {
  uint32_t value = 0;
  if (const absl::Status status = receive(&value, sizeof(value)); !status.ok()) return status;
  return value;
}

absl::Status Encoder::begin_reply() {
  const absl::StatusOr<uint32_t> refused = number();
  if (!refused.ok()) return refused.status();
  if (*refused == 0) return absl::OkStatus();
  const absl::StatusOr<uint32_t> size = number();
  if (!size.ok() || *size > 1 << 20) return gone();
  std::string message(*size, '\0');
  if (const absl::Status status = receive(message.data(), *size); !status.ok()) return status;
  return absl::InvalidArgumentError(message);
}

absl::StatusOr<std::vector<std::vector<uint32_t>>> Encoder::encode(
    const std::vector<std::string>& texts) {
  std::string batch;
  const auto add = [&](size_t number) {
    const auto value = static_cast<uint32_t>(number);
    batch.append(reinterpret_cast<const char*>(&value), sizeof(value));
  };
  add(texts.size());
  for (const std::string& text : texts) {
    if (text.size() > kMostBytes) {
      return absl::InvalidArgumentError(
          absl::StrCat("a text has ", text.size(), " bytes; wanted ", kMostBytes,
                       " at most, for it is encoded at once: --lines makes a text of each line"));
    }
    add(text.size());
    batch.append(text);
  }
  if (const absl::Status status = send(batch.data(), batch.size()); !status.ok()) return status;
  if (const absl::Status status = begin_reply(); !status.ok()) return status;
  std::vector<std::vector<uint32_t>> ids;
  for (size_t i = 0; i < texts.size(); ++i) {
    const absl::StatusOr<uint32_t> count = number();
    if (!count.ok()) return count.status();
    ids.emplace_back(*count);
    const absl::Status status = receive(ids.back().data(), *count * sizeof(uint32_t));
    if (!status.ok()) return status;
  }
  return ids;
}

}  // namespace tokenize
