// What LibTorch holds in memory, by the thread that asked for it: by rank, where ranks are threads.
//
//   CountingAllocator::install();               // once, before the first tensor
//   const int64_t before = CountingAllocator::mine().live;
//   at::Tensor x = at::empty({1024});           // mine().live is before + 4096
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "c10/core/Allocator.h"

namespace shardweave::testing {

class CountingAllocator final : public c10::Allocator {
 public:
  // Of one thread, in bytes as they were asked for. Others may give back what it made.
  struct Bytes {
    std::atomic<int64_t> live = 0;
    std::atomic<int64_t> peak = 0;  // of live, since somebody has set it
  };

  // From now on LibTorch's CPU tensors are made by it.
  static void install();
  static Bytes& mine();

  c10::DataPtr allocate(size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, size_t bytes) const override;
};

}  // namespace shardweave::testing
