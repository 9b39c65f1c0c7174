#include "shardweave/modules/checkpoint/staging_memory.h"

#include <sys/mman.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <algorithm>
#include <cstring>

#include "ATen/Parallel.h"
#include "ATen/core/Tensor.h"
#include "ATen/ops/from_blob.h"
#include "c10/util/Exception.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/modules/checkpoint/file_system.h"

namespace shardweave::checkpoint_internal {

StagingMemory::StagingMemory(int64_t bytes, Pages pages) : size_(bytes) {
  constexpr size_t kHugePage = size_t{2} << 20;
  if (bytes == 0) return;
  const auto size = static_cast<size_t>(bytes);
  mapped_ = size + (pages == Pages::kHuge ? kHugePage : 0);
  map_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (map_ == MAP_FAILED) {
    throw Error(
        absl::ResourceExhaustedError(str_cat("no memory for ", bytes, " bytes of a checkpoint")));
  }
  data_ = static_cast<char*>(map_);
  if (pages != Pages::kHuge) return;
  data_ += (kHugePage - reinterpret_cast<uintptr_t>(map_) % kHugePage) % kHugePage;
  (void)madvise(data_, size, MADV_HUGEPAGE);
}

StagingMemory::~StagingMemory() {
  if (data_ != nullptr) munmap(map_, mapped_);
}

std::shared_ptr<StagingMemory> StagingMemory::of(int64_t bytes, Pages pages,
                                                 std::shared_ptr<StagingMemory> memory,
                                                 int64_t owners) {
  if (memory != nullptr && memory.use_count() == owners && memory->size_ >= bytes) {
    memory->taken_ = 0;
    return memory;
  }
  memory.reset();  // before there is more of it
  return std::make_shared<StagingMemory>(bytes, pages);
}

char* StagingMemory::take(int64_t bytes) {
  TORCH_INTERNAL_ASSERT(padded(bytes) <= size_ - taken_);
  char* const data = data_ + taken_;
  taken_ += padded(bytes);
  return data;
}

void StagingMemory::keep_from_children() const {
  if (data_ != nullptr) (void)madvise(data_, static_cast<size_t>(size_), MADV_DONTFORK);
}

void populate_pages(void* data, int64_t bytes) {
#ifdef MADV_POPULATE_WRITE
  const auto begin = reinterpret_cast<uintptr_t>(data) / kFilePage * kFilePage;
  const auto end = reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(bytes);
  (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_POPULATE_WRITE);
#else
  (void)data;
  (void)bytes;
#endif
}

at::Tensor take_tensor(const std::shared_ptr<StagingMemory>& memory, at::IntArrayRef sizes,
                       at::ScalarType dtype) {
  const int64_t bytes =
      c10::multiply_integers(sizes) * static_cast<int64_t>(c10::elementSize(dtype));
  return at::from_blob(memory->take(bytes), sizes, [memory](void*) {}, at::TensorOptions(dtype));
}

namespace {

// `to` is aligned to 16 bytes.
void copy_past_cache(void* to, const void* from, int64_t bytes, bool use_threads) {
#ifdef __SSE2__
  constexpr int64_t kLine = 64, kGrain = int64_t{64} << 10;  // 4 MiB of lines a thread
  auto* const out = static_cast<__m128i*>(to);
  const auto* const in = static_cast<const __m128i*>(from);  // loaded unaligned
  const auto copy_lines = [&](int64_t begin, int64_t end) {
    for (int64_t i = 4 * begin; i < 4 * end; i += 4) {
      const __m128i a = _mm_loadu_si128(in + i), b = _mm_loadu_si128(in + i + 1),
                    c = _mm_loadu_si128(in + i + 2), d = _mm_loadu_si128(in + i + 3);
      _mm_stream_si128(out + i, a);
      _mm_stream_si128(out + i + 1, b);
      _mm_stream_si128(out + i + 2, c);
      _mm_stream_si128(out + i + 3, d);
    }
    _mm_sfence();
  };
  if (use_threads) {
    at::parallel_for(0, bytes / kLine, kGrain, copy_lines);
  } else {
    copy_lines(0, bytes / kLine);
  }
  const int64_t done = bytes / kLine * kLine;
  std::memcpy(static_cast<char*>(to) + done, static_cast<const char*>(from) + done,
              static_cast<size_t>(bytes - done));
#else
  (void)use_threads;
  std::memcpy(to, from, static_cast<size_t>(bytes));
#endif
}

bool is_plain_memory(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

}  // namespace

void copy_staged(const at::Tensor& to, const at::Tensor& from, bool use_threads) {
  constexpr size_t kLarge = 1 << 20;
  if (from.nbytes() < kLarge || to.scalar_type() != from.scalar_type() ||
      to.sizes() != from.sizes() || !is_plain_memory(to) || !is_plain_memory(from) ||
      reinterpret_cast<uintptr_t>(to.const_data_ptr()) % 16 != 0) {
    to.copy_(from);
    return;
  }
  copy_past_cache(to.mutable_data_ptr(), from.const_data_ptr(), static_cast<int64_t>(from.nbytes()),
                  use_threads);
}

}  // namespace shardweave::checkpoint_internal
