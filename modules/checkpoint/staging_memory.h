// Memory for many bytes that soon go: a copy that is saved, what is read and not yet applied. Internal to modules/checkpoint/.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "ATen/core/TensorBody.h"
#include "shardweave/modules/checkpoint/file_system.h"

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

  // Whether children of this process have it: not while the disk writes to it, which on older systems is lost
  // where fork() has both write to a copy (open(2), O_DIRECT).
  void share_with_children(bool share) const;

  // What a part of so many bytes takes of it, at most.
  static int64_t padded(int64_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment + (bytes < kFilePage ? 0 : kFilePage);
  }
  // The next `bytes`, of which there are enough. `place`: where in its page that begins, if it is as long as
  // a page, instead of at a multiple of kAlignment.
  void* take(int64_t bytes, std::optional<int64_t> place = std::nullopt);

 private:
  const int64_t size_;
  char* data_ = nullptr;
  int64_t taken_ = 0;
};

// The next of it as a tensor, which keeps all of it alive.
at::Tensor take_tensor(const std::shared_ptr<StagingMemory>& memory, at::IntArrayRef sizes,
                       at::ScalarType dtype, std::optional<int64_t> place = std::nullopt);

// Has the system bring these pages before they are written to, which takes it half the time of bringing each as
// it is met. Nothing where the system cannot. They may be written to meanwhile.
void populate_pages(void* data, int64_t bytes);

// to.copy_(from); what is large past the cache, which training wants for itself.
void copy_staged(const at::Tensor& to, const at::Tensor& from, bool use_threads = true);

}  // namespace shardweave::checkpoint_internal
