#include "shardweave/capi/threads.h"

#include <atomic>

#include "ATen/Parallel.h"
#include "ATen/SequenceNumber.h"
#include "shardweave/capi/arguments.h"

namespace shardweave::capi {
namespace {

// 0: LibTorch's own choice.
std::atomic<int> wanted{0};
// What was set last on this thread: a cache, nothing depends on it.
thread_local int used = 0;

// Above all numbers that were recorded with.
std::atomic<uint64_t> recorded{0};

}  // namespace

void set_num_threads(int num_threads) {
  wanted.store(num_threads, std::memory_order_relaxed);
}

void default_num_threads(const World& world) {
  if (world.num_threads() == 0) return;
  int none = 0;
  wanted.compare_exchange_strong(none, at::get_num_threads());
  used = 0;  // LibTorch may have been told something else on this thread
}

[[gnu::hot]] void use_num_threads() {
  const int want = wanted.load(std::memory_order_relaxed);
  if (want == used) [[likely]]
    return;
  at::set_num_threads(want);
  used = want;
}

RecordedInOrder::RecordedInOrder() : begun_(at::sequence_number::peek()) {
  const uint64_t others = recorded.load(std::memory_order_relaxed);
  for (; begun_ < others; ++begun_) at::sequence_number::get_and_increment();
}

RecordedInOrder::~RecordedInOrder() {
  const uint64_t end = at::sequence_number::peek();
  if (end == begun_) return;
  uint64_t others = recorded.load(std::memory_order_relaxed);
  while (others < end && !recorded.compare_exchange_weak(others, end, std::memory_order_relaxed)) {
  }
}

}  // namespace shardweave::capi

swv_status* swv_set_num_threads(int32_t num_threads) {
  using namespace shardweave::capi;
  return guarded(__func__, [&] {
    if (num_threads < 1 || num_threads > 4096) {
      fail_argument("num_threads", str_cat("is ", num_threads, "; wanted 1 to 4096"));
    }
    set_num_threads(num_threads);
  });
}
