// EventFile writes scalars as TensorBoard reads them: a curve of each name over the steps.
//
//   absl::StatusOr<EventFile> file = EventFile::create("runs/first");  // runs/first/events.out.tfevents...
//   absl::Status status = file->write(/*step=*/10, {{"loss", 2.5}, {"lr", 3e-4}});
//
// The format is TensorFlow's. A file is records, one after the other, in little-endian numbers
// (tensorflow/core/lib/io/record_writer.h):
//
//   u64   number of bytes
//   u32   of these eight bytes the CRC-32C, masked: rotated right by 15, plus 0xa282ead8
//   ...   the bytes
//   u32   of these the same
//
// Of a record the bytes are an Event, as protocol buffers write it (tensorflow/core/util/event.proto and
// framework/summary.proto):
//
//   Event            1: double wall_time   2: int64 step   3: string file_version   5: Summary summary
//                    7: SessionLog session_log
//   Summary          1: repeated Summary.Value value
//   Summary.Value    1: string tag         2: float simple_value
//   SessionLog       1: status, 1 for START
//
// The first event has the file_version "brain.Event:2", the others a summary. A run that goes on after a
// crash begins a new file in the same folder, with a session_log: what other files have from that step on is
// shown no more.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "shardweave/modules/train/metrics_writer.h"

namespace shardweave {

// Used by one thread at a time. Values travel as float.
class EventFile final : public MetricsWriter {
 public:
  // In `folder`, which is made if it is not there. A name that nobody else has: time, host, process.
  // `first_step`: where a run goes on, of which earlier files may have steps that did not last; 0: from the
  // beginning. InvalidArgument for one below 0; the system's error.
  static absl::StatusOr<EventFile> create(const std::string& folder, int64_t first_step = 0);
  ~EventFile() override;
  EventFile(EventFile&&) noexcept;
  EventFile& operator=(EventFile&&) noexcept;

  const std::string& path() const;
  using MetricsWriter::write;
  absl::Status write(int64_t step, absl::Span<const Metric> metrics, absl::Time time) override;
  absl::Status flush() override;

 private:
  class State;
  explicit EventFile(std::unique_ptr<State> state);

  std::unique_ptr<State> state_;
};

namespace train_internal {
// With both checksums.
std::string framed_record(std::string_view bytes);
}  // namespace train_internal

}  // namespace shardweave
