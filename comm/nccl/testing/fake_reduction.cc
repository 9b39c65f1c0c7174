#include "shardweave/comm/nccl/testing/fake_reduction.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <type_traits>

#include "shardweave/comm/nccl/abi.h"

namespace shardweave::fake_gpu_internal {
namespace {

using namespace nccl_internal;  // NOLINT: their numbers

// A bf16 is the upper half of a float.
struct Brain {
  uint16_t bits;
};
float load(Brain x) {
  return std::bit_cast<float>(uint32_t{x.bits} << 16);
}
void store(float value, Brain* x) {
  const auto bits = std::bit_cast<uint32_t>(value);
  x->bits = static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);  // to even
}
float load(_Float16 x) {
  return static_cast<float>(x);
}
void store(float value, _Float16* x) {
  *x = static_cast<_Float16>(value);
}
template <typename T>
T load(T x) {
  return x;
}
template <typename T>
void store(T value, T* x) {
  *x = value;
}

template <typename T>
T combine(int op, T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    using U = std::make_unsigned_t<T>;  // they wrap around
    if (op == kNcclSum || op == kNcclAvg)
      return static_cast<T>(static_cast<U>(a) + static_cast<U>(b));
    if (op == kNcclProd) return static_cast<T>(uint64_t{static_cast<U>(a)} * static_cast<U>(b));
  } else {
    if (op == kNcclSum || op == kNcclAvg) return a + b;
    if (op == kNcclProd) return a * b;
  }
  return op == kNcclMax ? std::max(a, b) : std::min(a, b);
}

template <typename T>
void reduce_all(int op, const std::vector<const void*>& ins, void* out, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    auto value = load(static_cast<const T*>(ins[0])[i]);
    for (size_t rank = 1; rank < ins.size(); ++rank) {
      value = combine(op, value, load(static_cast<const T*>(ins[rank])[i]));
    }
    if (op == kNcclAvg) value = value / static_cast<decltype(value)>(ins.size());
    store(value, static_cast<T*>(out) + i);
  }
}

}  // namespace

size_t size_of(int nccl_dtype) {
  constexpr size_t kSizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return kSizes[nccl_dtype];
}

void reduce(int nccl_dtype, int nccl_op, const std::vector<const void*>& ins, void* out,
            size_t count) {
  switch (nccl_dtype) {
    case kNcclInt8:
      return reduce_all<int8_t>(nccl_op, ins, out, count);
    case kNcclUint8:
      return reduce_all<uint8_t>(nccl_op, ins, out, count);
    case kNcclInt32:
      return reduce_all<int32_t>(nccl_op, ins, out, count);
    case kNcclUint32:
      return reduce_all<uint32_t>(nccl_op, ins, out, count);
    case kNcclInt64:
      return reduce_all<int64_t>(nccl_op, ins, out, count);
    case kNcclUint64:
      return reduce_all<uint64_t>(nccl_op, ins, out, count);
    case kNcclFloat16:
      return reduce_all<_Float16>(nccl_op, ins, out, count);
    case kNcclFloat32:
      return reduce_all<float>(nccl_op, ins, out, count);
    case kNcclFloat64:
      return reduce_all<double>(nccl_op, ins, out, count);
    case kNcclBfloat16:
      return reduce_all<Brain>(nccl_op, ins, out, count);
  }
}

}  // namespace shardweave::fake_gpu_internal
