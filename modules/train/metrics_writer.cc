#include "shardweave/modules/train/metrics_writer.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <string_view>
#include <utility>

#include "nlohmann/json.hpp"
#include "shardweave/comm/str_cat.h"
#include "shardweave/modules/train/output_file.h"

namespace shardweave {
namespace {

using train_internal::OutputFile;
using train_internal::system_error;

constexpr std::string_view kLineBegin = "{\"step\":";

nlohmann::ordered_json json_of(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  return value;
}

// Where the last whole line of a file ends; -1, with errno.
int64_t end_of_lines(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return -1;
  int64_t end = ::lseek(fd, 0, SEEK_END);
  char bytes[4096];
  while (end > 0) {
    const int64_t begin = std::max<int64_t>(0, end - static_cast<int64_t>(sizeof(bytes)));
    const ssize_t n = ::pread(fd, bytes, static_cast<size_t>(end - begin), begin);
    if (n != end - begin) {
      end = -1;
      break;
    }
    int64_t i = n;
    while (i > 0 && bytes[i - 1] != '\n') --i;
    end = begin + i;
    if (i > 0) break;
  }
  const int error = errno;
  ::close(fd);
  errno = error;
  return end;
}

// Whether what is there from `begin` on is a line of write(), or a part of one.
absl::StatusOr<bool> begins_as_line(const std::string& path, int64_t begin) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return system_error(path, "cannot be read");
  char bytes[kLineBegin.size()];
  const ssize_t n = ::pread(fd, bytes, sizeof(bytes), begin);
  const int error = errno;
  ::close(fd);
  errno = error;
  if (n < 0) return system_error(path, "cannot be read");
  return kLineBegin.starts_with(std::string_view(bytes, static_cast<size_t>(n)));
}

}  // namespace

class JsonLines::State {
 public:
  explicit State(OutputFile opened) : file(std::move(opened)) {}
  OutputFile file;
};

absl::StatusOr<JsonLines> JsonLines::open(const std::string& path) {
  absl::StatusOr<OutputFile> file = OutputFile::open(path, O_CREAT | O_APPEND);
  if (!file.ok()) return file.status();
  struct stat about {};
  if (::fstat(file->descriptor(), &about) != 0) return system_error(path, "cannot be opened");
  if (S_ISREG(about.st_mode)) {  // not a terminal or a pipe
    const int64_t end = end_of_lines(path);
    if (end < 0) return system_error(path, "cannot be read");
    if (end < about.st_size) {
      const absl::StatusOr<bool> is_ours = begins_as_line(path, end);
      if (!is_ours.ok()) return is_ours.status();
      if (!*is_ours) {
        return absl::FailedPreconditionError(
            str_cat(path,
                    ": it ends in the middle of a line, which is none of metrics; wanted a "
                    "file of JSON lines, or a new one"));
      }
      if (::ftruncate(file->descriptor(), end) != 0) {
        return system_error(path, "cannot be written");
      }
    }
  }
  return JsonLines(std::make_unique<State>(*std::move(file)));
}

JsonLines::JsonLines(std::unique_ptr<State> state) : state_(std::move(state)) {}
JsonLines::~JsonLines() = default;
JsonLines::JsonLines(JsonLines&&) noexcept = default;
JsonLines& JsonLines::operator=(JsonLines&&) noexcept = default;

absl::Status JsonLines::write(int64_t step, absl::Span<const Metric> metrics, absl::Time time) {
  nlohmann::ordered_json line;
  line["step"] = step;
  line["time"] = static_cast<double>(absl::ToUnixMicros(time)) / 1e6;
  for (const Metric& metric : metrics) {
    if (line.contains(metric.name)) {
      return absl::InvalidArgumentError(
          str_cat(state_->file.path(), ": there are two of the name '", metric.name, "'"));
    }
    line[metric.name] = json_of(metric.value);
  }
  // Names may be anything; what is no UTF-8 becomes U+FFFD.
  return state_->file.append(
      line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n");
}

}  // namespace shardweave
