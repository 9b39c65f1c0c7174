#include "shardweave/modules/train/event_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <bit>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_format.h"
#include "crcutil/generic_crc.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/modules/train/output_file.h"

namespace shardweave {
namespace {

static_assert(std::endian::native == std::endian::little, "numbers in files are little-endian");

class Crc32c : crcutil::GenericCrc<uint64_t, uint64_t, uint64_t, 4> {
 public:
  Crc32c() : GenericCrc(/*polynomial=*/0x82f63b78, /*degree=*/32, /*canonical=*/true) {}
  uint32_t of(std::string_view bytes) const {
    return static_cast<uint32_t>(CrcByteWord(bytes.data(), bytes.size(), 0));
  }
};

uint32_t masked_crc(std::string_view bytes) {
  static const Crc32c crc32c;  // tables
  const uint32_t crc = crc32c.of(bytes);
  return ((crc >> 15) | (crc << 17)) + 0xa282ead8;
}

template <typename T>
void append_number(std::string& to, T value) {
  to.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

// Fields of protocol buffers: their number with what follows (0 a varint, 1 eight bytes, 2 a length and as many
// bytes, 5 four bytes).
void append_varint(std::string& to, uint64_t value) {
  for (; value >= 0x80; value >>= 7) to.push_back(static_cast<char>(value | 0x80));
  to.push_back(static_cast<char>(value));
}
void append_varint(std::string& to, int field, int64_t value) {
  append_varint(to, static_cast<uint64_t>(field << 3 | 0));
  append_varint(to, static_cast<uint64_t>(value));
}
void append_double(std::string& to, int field, double value) {
  append_varint(to, static_cast<uint64_t>(field << 3 | 1));
  append_number(to, value);
}
void append_float(std::string& to, int field, float value) {
  append_varint(to, static_cast<uint64_t>(field << 3 | 5));
  append_number(to, value);
}
void append_bytes(std::string& to, int field, std::string_view bytes) {
  append_varint(to, static_cast<uint64_t>(field << 3 | 2));
  append_varint(to, bytes.size());
  to.append(bytes);
}

double seconds_of(absl::Time time) {
  return static_cast<double>(absl::ToUnixMicros(time)) / 1e6;
}

// A reader forgets what it has of this step and later ones.
std::string start_event(absl::Time time, int64_t step) {
  std::string session;
  append_varint(session, 1, 1);  // START
  std::string event;
  append_double(event, 1, seconds_of(time));
  append_varint(event, 2, step);
  append_bytes(event, 7, session);
  return event;
}

}  // namespace

std::string train_internal::framed_record(std::string_view bytes) {
  std::string record;
  append_number(record, static_cast<uint64_t>(bytes.size()));
  append_number(record, masked_crc(record));
  record.append(bytes);
  append_number(record, masked_crc(bytes));
  return record;
}

class EventFile::State {
 public:
  explicit State(train_internal::OutputFile opened) : file(std::move(opened)) {}
  ~State() { (void)flush(); }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  absl::Status add(std::string_view event) {
    if (const absl::Status before = file.append({}); !before.ok()) return before;
    buffer.append(train_internal::framed_record(event));
    // TensorBoard looks every few seconds; a crash costs what is not written.
    const bool is_time = absl::Now() - flushed > absl::Seconds(5);
    return is_time || buffer.size() > (1 << 16) ? flush() : absl::OkStatus();
  }
  absl::Status flush() {
    const absl::Status status = file.append(buffer);
    buffer.clear();
    flushed = absl::Now();
    return status;
  }

  train_internal::OutputFile file;
  std::string buffer;
  absl::Time flushed = absl::Now();
};

absl::StatusOr<EventFile> EventFile::create(const std::string& folder, int64_t first_step) {
  if (first_step < 0) {
    return absl::InvalidArgumentError(str_cat("first_step is ", first_step, "; wanted 0 or more"));
  }
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) {
    return absl::Status(absl::ErrnoToStatus(error.value(), "").code(),
                        str_cat(folder, ": cannot be made: ", error.message()));
  }
  char host[256] = "localhost";
  ::gethostname(host, sizeof(host) - 1);
  const absl::Time now = absl::Now();
  const std::string stem =
      absl::StrFormat("%s/events.out.tfevents.%010d.%s.%d", folder, absl::ToUnixSeconds(now), host,
                      static_cast<int>(::getpid()));
  // Of a process there may be several.
  for (int i = 0;; ++i) {
    absl::StatusOr<train_internal::OutputFile> file =
        train_internal::OutputFile::open(str_cat(stem, ".", i), O_CREAT | O_EXCL | O_APPEND);
    if (!file.ok()) {
      if (absl::IsAlreadyExists(file.status()) && i < 1000) continue;
      return file.status();
    }
    auto state = std::make_unique<State>(*std::move(file));
    std::string event;
    append_double(event, 1, seconds_of(now));
    append_bytes(event, 3, "brain.Event:2");
    absl::Status status = state->add(event);
    if (status.ok() && first_step > 0) status = state->add(start_event(now, first_step));
    if (status.ok()) status = state->flush();
    if (!status.ok()) return status;
    return EventFile(std::move(state));
  }
}

EventFile::EventFile(std::unique_ptr<State> state) : state_(std::move(state)) {}
EventFile::~EventFile() = default;
EventFile::EventFile(EventFile&&) noexcept = default;
EventFile& EventFile::operator=(EventFile&&) noexcept = default;

const std::string& EventFile::path() const {
  return state_->file.path();
}

absl::Status EventFile::write(int64_t step, absl::Span<const Metric> metrics, absl::Time time) {
  std::string summary;
  for (const Metric& metric : metrics) {
    std::string value;
    append_bytes(value, 1, metric.name);
    append_float(value, 2, static_cast<float>(metric.value));
    append_bytes(summary, 1, value);
  }
  std::string event;
  append_double(event, 1, seconds_of(time));
  append_varint(event, 2, step);
  append_bytes(event, 5, summary);
  return state_->add(event);
}

absl::Status EventFile::flush() {
  return state_->flush();
}

}  // namespace shardweave
