#include "shardweave/modules/checkpoint/staging_memory.h"

#include <sys/mman.h>

#include "c10/util/Exception.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/error.h"

namespace shardweave::checkpoint_internal {

StagingMemory::StagingMemory(int64_t bytes) : size_(bytes) {
  if (bytes == 0) return;
  void* const data = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    throw Error(absl::ResourceExhaustedError(
        str_cat("no memory for a copy of ", bytes, " bytes, which are saved beside training")));
  }
  data_ = static_cast<char*>(data);
}

StagingMemory::~StagingMemory() {
  if (data_ != nullptr) munmap(data_, static_cast<size_t>(size_));
}

std::shared_ptr<StagingMemory> StagingMemory::of(int64_t bytes,
                                                 std::shared_ptr<StagingMemory> memory) {
  if (memory != nullptr && memory.use_count() == 1 && memory->size_ >= bytes) {
    memory->taken_ = 0;
    return memory;
  }
  memory.reset();  // before there is more of it
  return std::make_shared<StagingMemory>(bytes);
}

void* StagingMemory::take(int64_t bytes) {
  TORCH_INTERNAL_ASSERT(padded(bytes) <= size_ - taken_);
  void* const data = data_ + taken_;
  taken_ += padded(bytes);
  return data;
}

}  // namespace shardweave::checkpoint_internal
