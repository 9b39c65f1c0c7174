#include "shardweave/comm/testing/allocation_counter.h"

#include <atomic>
#include <cstdlib>
#include <new>

namespace {

std::atomic<int64_t> allocations{0};
std::atomic<int64_t> deleted{0};
thread_local int64_t bytes = 0;

}  // namespace

void* operator new(size_t size, const std::nothrow_t&) noexcept {
  allocations.fetch_add(1, std::memory_order_relaxed);
  bytes += static_cast<int64_t>(size);
  return std::malloc(size == 0 ? 1 : size);
}
void* operator new(size_t size) {
  void* memory = operator new(size, std::nothrow);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept {
  if (memory == nullptr) return;
  deleted.fetch_add(1, std::memory_order_relaxed);
  std::free(memory);
}
void operator delete(void* memory, size_t) noexcept {
  operator delete(memory);
}

namespace shardweave {

int64_t allocations_so_far() {
  return allocations.load(std::memory_order_relaxed);
}

int64_t live_allocations() {
  return allocations.load(std::memory_order_relaxed) - deleted.load(std::memory_order_relaxed);
}

int64_t allocated_bytes_of_thread() {
  return bytes;
}

}  // namespace shardweave
