// Memory for many bytes that soon go: a copy that is saved, what is read and not yet applied. Internal to modules/checkpoint/.
#pragma once

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

  // What is written again and again is faster of huge pages. What a run waits for once is not: where the system's
  // cache has filled the memory, making room for one takes longer than bringing 512 small ones.
  enum class Pages : uint8_t { kUsual, kHuge };

  // Throws Error (ResourceExhausted).
  StagingMemory(int64_t bytes, Pages pages);
  ~StagingMemory();
  StagingMemory(const StagingMemory&) = delete;
  StagingMemory& operator=(const StagingMemory&) = delete;

  // `memory`, all of it free again, if it has so many bytes and no part of it is in use; or else new memory.
  // `owners`: who keep it without using it.
  static std::shared_ptr<StagingMemory> of(int64_t bytes, Pages pages,
                                           std::shared_ptr<StagingMemory> memory,
                                           int64_t owners = 1);

  // Children of this process do not have it. For what the disk writes to: on older systems that is lost where
  // fork() has parent and child write to a copy (open(2), O_DIRECT).
  void keep_from_children() const;

  // What a part of so many bytes takes of it.
  static int64_t padded(int64_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  // The next `bytes`, of which there are enough.
  char* take(int64_t bytes);

 private:
  const int64_t size_;
  void* map_ = nullptr;
  size_t mapped_ = 0;
  char* data_ = nullptr;  // in it; huge pages begin where memory does
  int64_t taken_ = 0;
};

// The next of it as a tensor, which keeps all of it alive.
at::Tensor take_tensor(const std::shared_ptr<StagingMemory>& memory, at::IntArrayRef sizes,
                       at::ScalarType dtype);

// Has the system bring these pages before they are written to, which takes it half the time of bringing each as
// it is met. Nothing where the system cannot. They may be written to meanwhile.
void populate_pages(void* data, int64_t bytes);

// to.copy_(from); what is large past the cache, which training wants for itself.
void copy_staged(const at::Tensor& to, const at::Tensor& from, bool use_threads = true);

}  // namespace shardweave::checkpoint_internal
