#include "shardweave/comm/flight_recorder.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <utility>

#include "nlohmann/json.hpp"

namespace shardweave {
namespace {

using nlohmann::json;

enum class State : uint8_t { kIssued, kDone, kFailed };

// The small facts of an entry in one word, with the low bits of its line: so that one
// compare-and-swap finishes this operation, and never one that has taken its place.
struct What {
  uint64_t op : 4;
  uint64_t dtype : 4;
  uint64_t state : 2;
  uint64_t peer_plus_one : 22;  // 0: none
  uint64_t line : 32;
};
static_assert(sizeof(What) == sizeof(uint64_t) && kNumOpKinds <= 16 && kNumDTypes <= 16);

constexpr auto kRelaxed = std::memory_order_relaxed;

int64_t nanoseconds(Deadline time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

// Only one thread writes; no need for a locked instruction.
void add(std::atomic<int64_t>& counter, int64_t value) {
  counter.store(counter.load(kRelaxed) + value, kRelaxed);
}

bool has_peer(OpKind op) {
  return is_point_to_point(op) || op == OpKind::kBroadcast || op == OpKind::kReduce ||
         op == OpKind::kGather || op == OpKind::kScatter;
}

}  // namespace

OpCounter CommCounters::total() const {
  OpCounter total;
  for (const OpCounter& counter : by_op) {
    total.calls += counter.calls;
    total.bytes += counter.bytes;
  }
  return total;
}

CommCounters& CommCounters::operator+=(const CommCounters& other) {
  for (int i = 0; i < kNumOpKinds; ++i) {
    by_op[i].calls += other.by_op[i].calls;
    by_op[i].bytes += other.by_op[i].bytes;
  }
  return *this;
}

CommCounters CommCounters::operator-(const CommCounters& before) const {
  CommCounters difference = *this;
  for (int i = 0; i < kNumOpKinds; ++i) {
    difference.by_op[i].calls -= before.by_op[i].calls;
    difference.by_op[i].bytes -= before.by_op[i].bytes;
  }
  return difference;
}

FlightLog::FlightLog(std::shared_ptr<FlightRecorder> recorder, const GroupInfo& group, int capacity)
    : recorder_(std::move(recorder)), group_(group), entries_(std::max(capacity, 1)) {
  recorder_->add(this);
}

FlightLog::~FlightLog() {
  recorder_->remove(this);
}

uint64_t FlightLog::start(const Call& call, Deadline now) {
  const uint64_t line = next_line_++;
  const int64_t bytes = std::max(call.in.bytes(), call.out.bytes());
  Entry& entry = entries_[line % entries_.size()];
  What what{};
  what.op = static_cast<uint64_t>(call.op);
  what.dtype = static_cast<uint64_t>(call.in.dtype);
  what.state = static_cast<uint64_t>(State::kIssued);
  what.peer_plus_one = has_peer(call.op) ? call.peer + 1 : 0;
  what.line = line;
  std::array<uint64_t, 4> tag{};
  call.tag.copy(reinterpret_cast<char*>(tag.data()), sizeof(tag) - 1);

  // Readers take an entry only if they find the same line before and after: see read().
  entry.line.store(0, std::memory_order_release);
  entry.sequence.store(call.sequence, std::memory_order_release);
  entry.bytes.store(bytes, std::memory_order_release);
  entry.what.store(std::bit_cast<uint64_t>(what), std::memory_order_release);
  entry.start_ns.store(nanoseconds(now), std::memory_order_release);
  entry.end_ns.store(0, std::memory_order_release);
  for (size_t i = 0; i < tag.size(); ++i) entry.tag[i].store(tag[i], std::memory_order_release);
  entry.line.store(line, std::memory_order_release);

  AtomicCounter& counter = counters_[static_cast<int>(call.op)];
  add(counter.calls, 1);
  add(counter.bytes, bytes);
  return line;
}

void FlightLog::finish(uint64_t line, bool ok) {
  Entry& entry = entries_[line % entries_.size()];
  uint64_t old = entry.what.load(std::memory_order_acquire);
  What what = std::bit_cast<What>(old);
  if (what.line != (line & 0xffffffff) || what.state != static_cast<uint64_t>(State::kIssued))
    return;
  what.state = static_cast<uint64_t>(ok ? State::kDone : State::kFailed);
  entry.end_ns.store(nanoseconds(std::chrono::steady_clock::now()), kRelaxed);
  entry.what.compare_exchange_strong(old, std::bit_cast<uint64_t>(what), std::memory_order_release,
                                     kRelaxed);
}

CommCounters FlightLog::counters() const {
  CommCounters counters;
  for (int i = 0; i < kNumOpKinds; ++i) {
    counters.by_op[i] = {counters_[i].calls.load(kRelaxed), counters_[i].bytes.load(kRelaxed)};
  }
  return counters;
}

std::string FlightRecorder::to_json() const {
  // Entries carry monotonic times; this is what to add for the time of day.
  const int64_t to_unix = std::chrono::duration_cast<std::chrono::nanoseconds>(
                              std::chrono::system_clock::now().time_since_epoch())
                              .count() -
                          nanoseconds(std::chrono::steady_clock::now());
  constexpr std::string_view kStates[] = {"issued", "done", "failed"};
  std::lock_guard lock(mutex_);
  json groups = json::array();
  for (const FlightLog* log : logs_) {
    std::vector<std::pair<uint64_t, json>> operations;  // by line
    for (const FlightLog::Entry& entry : log->entries_) {
      const uint64_t line = entry.line.load(std::memory_order_acquire);
      if (line == 0) continue;
      const uint64_t sequence = entry.sequence.load(std::memory_order_acquire);
      const int64_t bytes = entry.bytes.load(std::memory_order_acquire);
      const What what = std::bit_cast<What>(entry.what.load(std::memory_order_acquire));
      const int64_t start_ns = entry.start_ns.load(std::memory_order_acquire);
      const int64_t end_ns = entry.end_ns.load(std::memory_order_acquire);
      char tag[32];
      for (size_t i = 0; i < entry.tag.size(); ++i) {
        const uint64_t word = entry.tag[i].load(std::memory_order_acquire);
        std::memcpy(tag + 8 * i, &word, sizeof(word));
      }
      if (entry.line.load(std::memory_order_acquire) != line) continue;  // overwritten meanwhile
      json operation = {{"sequence", sequence},
                        {"operation", to_string(static_cast<OpKind>(what.op))},
                        {"dtype", to_string(static_cast<DType>(what.dtype))},
                        {"bytes", bytes},
                        {"state", kStates[what.state]},
                        {"tag", tag},
                        {"time", static_cast<double>(start_ns + to_unix) * 1e-9}};
      if (what.peer_plus_one != 0) operation["peer"] = what.peer_plus_one - 1;
      if (what.state != static_cast<uint64_t>(State::kIssued)) {
        operation["microseconds"] = static_cast<double>(end_ns - start_ns) * 1e-3;
      }
      operations.emplace_back(line, std::move(operation));
    }
    std::sort(operations.begin(), operations.end(),
              [](const auto& a, const auto& b) { return a.first < b.first; });
    json list = json::array();
    for (auto& [line, operation] : operations) list.push_back(std::move(operation));
    groups.push_back({{"name", log->group_.name},
                      {"rank", log->group_.rank},
                      {"world_ranks", log->group_.world_ranks},
                      {"operations", std::move(list)}});
  }
  // A tag may be cut in the middle of a character.
  return json{{"groups", std::move(groups)}}.dump(-1, ' ', false, json::error_handler_t::replace);
}

CommCounters FlightRecorder::counters() const {
  std::lock_guard lock(mutex_);
  CommCounters sum = gone_;
  for (const FlightLog* log : logs_) sum += log->counters();
  return sum;
}

void FlightRecorder::add(FlightLog* log) {
  std::lock_guard lock(mutex_);
  logs_.push_back(log);
}

void FlightRecorder::remove(FlightLog* log) {
  std::lock_guard lock(mutex_);
  gone_ += log->counters();
  std::erase(logs_, log);
}

}  // namespace shardweave
