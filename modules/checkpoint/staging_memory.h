// Memory for many bytes that soon go: a copy that is saved, what is read and not yet applied. Internal to modules/checkpoint/.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "ATen/core/TensorBody.h"

namespace shardweave::checkpoint_internal {

// Apart from malloc's memory, which would keep holes of it. It is made to be used again: a copy into pages
// that are there takes a fifth of the time.
class StagingMemory {
 public:
  static constexpr int64_t kAlignment = 64;  // of what take() returns

  // Throws Error (ResourceExhausted).
  explicit StagingMemory(int64_t bytes);
  ~StagingMemory();
  StagingMemory(const StagingMemory&) = delete;
  StagingMemory& operator=(const StagingMemory&) = delete;

  // `memory`, all of it free again, if it has so many bytes and no part of it is in use; or else new memory.
  // `owners`: who keep it without using it.
  static std::shared_ptr<StagingMemory> of(int64_t bytes, std::shared_ptr<StagingMemory> memory,
                                           int64_t owners = 1);

  // Has the system bring the pages of all of it, a few at a time, until it is told to stop: on a thread of its
  // own, before they are written to, which then takes half the time. Nothing where the system cannot.
  void populate(const std::atomic<bool>& stop) const;

  // What a part of so many bytes takes of it.
  static int64_t padded(int64_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  // The next `bytes`, of which there are enough.
  void* take(int64_t bytes);

 private:
  const int64_t size_;
  char* data_ = nullptr;
  int64_t taken_ = 0;
};

// The next of it as a tensor, which keeps all of it alive.
at::Tensor take_tensor(const std::shared_ptr<StagingMemory>& memory, at::IntArrayRef sizes,
                       at::ScalarType dtype);

// to.copy_(from); what is large past the cache, which training wants for itself.
void copy_staged(const at::Tensor& to, const at::Tensor& from, bool use_threads = true);

}  // namespace shardweave::checkpoint_internal
