// A FlightRecorder holds the last operations of every communicator of one rank, to be read after a
// crash or while something hangs; and counts all of them.
//
//   CommCounters before = comm->flight_recorder().counters();
//   train_step();
//   (comm->flight_recorder().counters() - before).total().bytes;  // of the step, over all groups
//   std::cerr << comm->flight_recorder().to_json();               // of all groups
//
// Communicators made by split() and subgroup() share the recorder of the one they were made from.
// Threads: everything may be called by any thread at any time; reading never blocks the ranks.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "shardweave/comm/backend.h"

namespace shardweave {

// Operations issued, and their bytes: of the larger of the two buffers that this rank gave
// (all_gather: the output, reduce_scatter: the input).
struct OpCounter {
  int64_t calls = 0;
  int64_t bytes = 0;
  friend bool operator==(const OpCounter&, const OpCounter&) = default;
};

struct CommCounters {
  std::array<OpCounter, kNumOpKinds> by_op;  // index: OpKind

  const OpCounter& of(OpKind op) const { return by_op[static_cast<int>(op)]; }
  OpCounter total() const;
  CommCounters& operator+=(const CommCounters& other);
  CommCounters operator-(const CommCounters& before) const;
  friend bool operator==(const CommCounters&, const CommCounters&) = default;
};

class FlightRecorder;

// The record of one communicator: a ring of the last operations. start() by one thread at a time.
class FlightLog {
 public:
  FlightLog(std::shared_ptr<FlightRecorder> recorder, const GroupInfo& group, int capacity);
  ~FlightLog();
  FlightLog(const FlightLog&) = delete;
  FlightLog& operator=(const FlightLog&) = delete;

  // Records and counts the issue of `call`; returns its line, for finish().
  uint64_t start(const Call& call, Deadline now);
  // The first call for a line counts. Does nothing if the line has been overwritten.
  void finish(uint64_t line, bool ok);

  CommCounters counters() const;

 private:
  friend class FlightRecorder;

  // One operation. Readers may meet a writer: every word is atomic, and `line` is 0 during a
  // change.
  struct Entry {
    std::atomic<uint64_t> line{0};
    std::atomic<uint64_t> sequence{0};
    std::atomic<int64_t> bytes{0};
    std::atomic<uint64_t> what{0};  // op, dtype, state, root or peer
    std::atomic<int64_t> start_ns{0};
    std::atomic<int64_t> end_ns{0};
    std::array<std::atomic<uint64_t>, 4> tag{};  // cut off at 31 bytes
  };
  struct AtomicCounter {
    std::atomic<int64_t> calls{0};
    std::atomic<int64_t> bytes{0};
  };

  const std::shared_ptr<FlightRecorder> recorder_;
  const GroupInfo group_;
  uint64_t next_line_ = 1;
  std::vector<Entry> entries_;
  std::array<AtomicCounter, kNumOpKinds> counters_;
};

class FlightRecorder {
 public:
  // All groups of this rank that are alive:
  //   {"groups": [{"name": "dp", "rank": 0, "world_ranks": [0, 2], "operations": [
  //       {"sequence": 12, "operation": "all_reduce", "dtype": "f32", "bytes": 4096,
  //        "state": "issued", "tag": "loss", "time": 1700000000.25, "microseconds": 12.5}]}]}
  // Oldest operation first. state: "issued", "done", "failed". "peer" is there for rooted
  // operations, send and recv; time: of the issue, in seconds since 1970; microseconds: until it
  // was seen done.
  std::string to_json() const;

  // Over all groups, also those that are gone.
  CommCounters counters() const;

 private:
  friend class FlightLog;
  void add(FlightLog* log);
  void remove(FlightLog* log);

  mutable std::mutex mutex_;
  std::vector<FlightLog*> logs_;  // guarded by mutex_, as is
  CommCounters gone_;             // of logs that were destroyed
};

}  // namespace shardweave
