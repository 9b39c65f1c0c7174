#include "shardweave/dtensor/testing/counting_allocator.h"

#include <algorithm>
#include <cstdlib>
#include <list>
#include <mutex>

#include "c10/core/CPUAllocator.h"

namespace shardweave::testing {
namespace {

// Before the bytes.
struct alignas(64) Header {
  int64_t bytes;
  CountingAllocator::Bytes* of;
};

void release(void* data) {
  if (data == nullptr) return;
  Header* header = static_cast<Header*>(data) - 1;
  header->of->live -= header->bytes;
  std::free(header);
}

}  // namespace

void CountingAllocator::install() {
  static CountingAllocator allocator;
  constexpr uint8_t kBeforeOthers = 200;
  c10::SetCPUAllocator(&allocator, kBeforeOthers);
}

CountingAllocator::Bytes& CountingAllocator::mine() {
  // Outlive what they count, and are reachable: a thread's own would be a leak when it ends.
  static std::mutex mutex;
  static auto& all = *new std::list<Bytes>;
  static thread_local Bytes& its = []() -> Bytes& {
    const std::lock_guard<std::mutex> lock(mutex);
    return all.emplace_back();
  }();
  return its;
}

c10::DataPtr CountingAllocator::allocate(size_t bytes) {
  const size_t rounded = (bytes / sizeof(Header) + 2) * sizeof(Header);
  auto* header = static_cast<Header*>(std::aligned_alloc(sizeof(Header), rounded));
  if (header == nullptr) throw std::bad_alloc();
  *header = {static_cast<int64_t>(bytes), &mine()};
  const int64_t live = header->of->live += header->bytes;
  header->of->peak = std::max<int64_t>(header->of->peak, live);
  void* data = header + 1;
  return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
}

c10::DeleterFnPtr CountingAllocator::raw_deleter() const {
  return &release;
}

void CountingAllocator::copy_data(void* to, const void* from, size_t bytes) const {
  default_copy_data(to, from, bytes);
}

}  // namespace shardweave::testing
