// Element types, devices, and the borrowed pieces of memory that communicators read and write.
//
//   float values[3] = {1, 2, 3};
//   Buffer b = Buffer::of(values, 3);        // {values, 3, DType::kF32, cpu}
//   b.bytes();                               // 12
//   ConstBuffer read_only = b;
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace shardweave {

enum class DType : uint8_t {
  kF64,
  kF32,
  kF16,
  kBF16,
  kF8E4M3,  // the two fp8 types move as bytes and cannot be reduced
  kF8E5M2,
  kI64,
  kI32,
  kI16,
  kI8,
  kU64,
  kU32,
  kU16,
  kU8,
  kBool,  // one byte; every value but 0 is true
};
inline constexpr int kNumDTypes = 15;

// Bytes of one element.
constexpr int64_t element_size(DType dtype) {
  constexpr uint8_t kSize[kNumDTypes] = {8, 4, 2, 2, 1, 1, 8, 4, 2, 1, 8, 4, 2, 1, 1};
  return kSize[static_cast<int>(dtype)];
}
// "f32", "bf16", "f8e4m3", "bool", ...
std::string_view to_string(DType dtype);

enum class DeviceType : uint8_t { kCpu, kCuda };

struct Device {
  DeviceType type = DeviceType::kCpu;
  int index = 0;
  friend bool operator==(const Device&, const Device&) = default;
};
// "cpu", "cuda:3".
std::string to_string(Device device);

// A queue of a device, in the order of which it works: what the device's runtime calls a stream
// (cudaStream_t). Borrowed. Null: the device's default stream.
struct DeviceStream {
  void* handle = nullptr;
  friend bool operator==(const DeviceStream&, const DeviceStream&) = default;
};

// The DType of a C++ type, for Buffer::of. C++20 has no type for the 16- and 8-bit floats: name
// those by hand, `Buffer{data, count, DType::kBF16}`.
template <typename T>
inline constexpr DType kDTypeOf = T::no_dtype_for_this_type;
template <>
inline constexpr DType kDTypeOf<double> = DType::kF64;
template <>
inline constexpr DType kDTypeOf<float> = DType::kF32;
template <>
inline constexpr DType kDTypeOf<int64_t> = DType::kI64;
template <>
inline constexpr DType kDTypeOf<int32_t> = DType::kI32;
template <>
inline constexpr DType kDTypeOf<int16_t> = DType::kI16;
template <>
inline constexpr DType kDTypeOf<int8_t> = DType::kI8;
template <>
inline constexpr DType kDTypeOf<uint64_t> = DType::kU64;
template <>
inline constexpr DType kDTypeOf<uint32_t> = DType::kU32;
template <>
inline constexpr DType kDTypeOf<uint16_t> = DType::kU16;
template <>
inline constexpr DType kDTypeOf<uint8_t> = DType::kU8;
template <>
inline constexpr DType kDTypeOf<bool> = DType::kBool;

// A borrowed, contiguous piece of memory: `count` elements of `dtype`, aligned to their size.
// `data` may be null if count is 0.
struct Buffer {
  void* data = nullptr;
  int64_t count = 0;
  DType dtype = DType::kU8;
  Device device;

  template <typename T>
  static Buffer of(T* data, int64_t count) {
    return {data, count, kDTypeOf<T>, {}};
  }
  int64_t bytes() const { return count * element_size(dtype); }
};

// The same, to read from only.
struct ConstBuffer {
  const void* data = nullptr;
  int64_t count = 0;
  DType dtype = DType::kU8;
  Device device;

  ConstBuffer() = default;
  ConstBuffer(const void* memory, int64_t size, DType type, Device on = {})
      : data(memory), count(size), dtype(type), device(on) {}
  ConstBuffer(const Buffer& b)  // NOLINT(google-explicit-constructor)
      : data(b.data), count(b.count), dtype(b.dtype), device(b.device) {}
  template <typename T>
  static ConstBuffer of(const T* data, int64_t count) {
    return {data, count, kDTypeOf<T>};
  }
  int64_t bytes() const { return count * element_size(dtype); }
};

}  // namespace shardweave
