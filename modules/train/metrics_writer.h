// MetricsWriter: the numbers of a run, step by step, for people and programs: JSON lines, or TensorBoard's
// files (event_file.h).
//
//   absl::StatusOr<JsonLines> log = JsonLines::open("run.jsonl");
//   absl::Status status = log->write(/*step=*/10, {{"loss", 2.5}, {"lr", 3e-4}});
//   // {"step":10,"time":1732461123.25,"loss":2.5,"lr":0.0003}
//
// One rank writes, usually the first.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

namespace shardweave {

struct Metric {
  std::string name;
  double value = 0;
};

// Used by one thread at a time.
class MetricsWriter {
 public:
  virtual ~MetricsWriter() = default;

  // The system's error, then and ever after.
  virtual absl::Status write(int64_t step, absl::Span<const Metric> metrics, absl::Time time) = 0;
  absl::Status write(int64_t step, absl::Span<const Metric> metrics) {
    return write(step, metrics, absl::Now());
  }
  absl::Status write(int64_t step, std::initializer_list<Metric> metrics) {
    return write(step, absl::Span<const Metric>(metrics.begin(), metrics.size()));
  }
  // What was written is in the file. write() does it from time to time, and the destructor.
  virtual absl::Status flush() = 0;

 protected:
  MetricsWriter() = default;
  MetricsWriter(const MetricsWriter&) = default;
  MetricsWriter& operator=(const MetricsWriter&) = default;
};

// A line of JSON for each write(): "step", "time" (seconds since 1970), and the metrics in their order.
// JSON has no numbers for these: "NaN", "Infinity" and "-Infinity" are texts. A line is in the file when
// write() returns.
class JsonLines final : public MetricsWriter {
 public:
  // Appends; of a file that a run has left in the middle of a line, this line goes. FailedPrecondition for a file
  // that ends in the middle of another line: it is somebody else's. A run that goes on at
  // an earlier step writes steps again: of these the last counts. The system's error.
  static absl::StatusOr<JsonLines> open(const std::string& path);
  ~JsonLines() override;
  JsonLines(JsonLines&&) noexcept;
  JsonLines& operator=(JsonLines&&) noexcept;

  using MetricsWriter::write;
  // InvalidArgument for a metric that is called "step" or "time", or as another one.
  absl::Status write(int64_t step, absl::Span<const Metric> metrics, absl::Time time) override;
  absl::Status flush() override { return absl::OkStatus(); }

 private:
  class State;
  explicit JsonLines(std::unique_ptr<State> state);

  std::unique_ptr<State> state_;
};

}  // namespace shardweave
