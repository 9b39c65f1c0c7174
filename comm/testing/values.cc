#include "shardweave/comm/testing/values.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace shardweave {
namespace {

// The 16-bit floats by arithmetic, not by bits: sign, `mantissa` bits after the point, exponents
// from `least`.
struct Format {
  int mantissa;
  int least;
  int bias;
};
constexpr Format kHalf{10, -14, 15};
constexpr Format kBrain{7, -126, 127};

double decode_float(const Format& format, uint16_t bits) {
  const int exponent = (bits & 0x7fff) >> format.mantissa;
  const int fraction = bits & ((1 << format.mantissa) - 1);
  const double sign = bits & 0x8000 ? -1 : 1;
  if (exponent == 0x7fff >> format.mantissa) return fraction ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(fraction, format.least - format.mantissa);
  return sign *
         std::ldexp(fraction + (1 << format.mantissa), exponent - format.bias - format.mantissa);
}

uint16_t encode_float(const Format& format, double value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const uint16_t infinity = (0x7fff >> format.mantissa) << format.mantissa;
  if (std::isnan(value)) return sign | infinity | 1 << (format.mantissa - 1);
  value = std::fabs(value);
  if (std::isinf(value)) return sign | infinity;
  const int exponent = std::max(value == 0 ? format.least : std::ilogb(value), format.least);
  // In units of the last bit; nearbyint rounds to even. A carry out of the fraction goes up by
  // itself.
  const double units = std::nearbyint(std::ldexp(value, format.mantissa - exponent));
  const double bits = units + std::ldexp(exponent - format.least, format.mantissa);
  return sign | static_cast<uint16_t>(std::min<double>(bits, infinity));
}

template <typename T>
double load(const std::byte* element) {
  T value;
  std::memcpy(&value, element, sizeof(value));
  return static_cast<double>(value);
}

template <typename T>
void store(double value, std::byte* element) {
  const T typed = static_cast<T>(value);
  std::memcpy(element, &typed, sizeof(typed));
}

bool is_signed(DType dtype) {
  return dtype == DType::kF64 || dtype == DType::kF32 || dtype == DType::kF16 ||
         dtype == DType::kBF16 || dtype == DType::kI64 || dtype == DType::kI32 ||
         dtype == DType::kI16 || dtype == DType::kI8;
}

bool is_floating(DType dtype) {
  return dtype == DType::kF64 || dtype == DType::kF32 || dtype == DType::kF16 ||
         dtype == DType::kBF16;
}

}  // namespace

absl::Span<const DType> all_dtypes() {
  static constexpr DType kAll[] = {DType::kF64,    DType::kF32,    DType::kF16, DType::kBF16,
                                   DType::kF8E4M3, DType::kF8E5M2, DType::kI64, DType::kI32,
                                   DType::kI16,    DType::kI8,     DType::kU64, DType::kU32,
                                   DType::kU16,    DType::kU8,     DType::kBool};
  static_assert(std::size(kAll) == kNumDTypes);
  return kAll;
}

absl::Span<const ReduceOp> all_reduce_ops() {
  static constexpr ReduceOp kAll[] = {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin,
                                      ReduceOp::kMax, ReduceOp::kProduct};
  return kAll;
}

double decode(DType dtype, const std::byte* element) {
  switch (dtype) {
    case DType::kF64:
      return load<double>(element);
    case DType::kF32:
      return load<float>(element);
    case DType::kF16:
      return decode_float(kHalf, static_cast<uint16_t>(load<uint16_t>(element)));
    case DType::kBF16:
      return decode_float(kBrain, static_cast<uint16_t>(load<uint16_t>(element)));
    case DType::kI64:
      return load<int64_t>(element);
    case DType::kI32:
      return load<int32_t>(element);
    case DType::kI16:
      return load<int16_t>(element);
    case DType::kI8:
      return load<int8_t>(element);
    case DType::kU64:
      return load<uint64_t>(element);
    case DType::kU32:
      return load<uint32_t>(element);
    case DType::kU16:
      return load<uint16_t>(element);
    case DType::kU8:
    case DType::kF8E4M3:
    case DType::kF8E5M2:
    case DType::kBool:
      return load<uint8_t>(element);
  }
  return NAN;
}

void encode(DType dtype, double value, std::byte* element) {
  switch (dtype) {
    case DType::kF64:
      return store<double>(value, element);
    case DType::kF32:
      return store<float>(value, element);
    case DType::kF16:
      return store<uint16_t>(encode_float(kHalf, static_cast<float>(value)), element);
    case DType::kBF16:
      return store<uint16_t>(encode_float(kBrain, static_cast<float>(value)), element);
    case DType::kI64:
      return store<int64_t>(value, element);
    case DType::kI32:
      return store<int32_t>(value, element);
    case DType::kI16:
      return store<int16_t>(value, element);
    case DType::kI8:
      return store<int8_t>(value, element);
    case DType::kU64:
      return store<uint64_t>(value, element);
    case DType::kU32:
      return store<uint32_t>(value, element);
    case DType::kU16:
      return store<uint16_t>(value, element);
    case DType::kU8:
    case DType::kF8E4M3:
    case DType::kF8E5M2:
    case DType::kBool:
      return store<uint8_t>(value, element);
  }
}

double rounded(DType dtype, double value) {
  std::byte element[8];
  encode(dtype, value, element);
  return decode(dtype, element);
}

Values::Values(DType dtype, int64_t count, const std::function<double(int64_t)>& value)
    : dtype_(dtype), count_(count), memory_(count * element_size(dtype) / 8 + 1) {
  auto* element = reinterpret_cast<std::byte*>(memory_.data());
  for (int64_t i = 0; i < count; ++i, element += element_size(dtype))
    encode(dtype, value(i), element);
}

Values::Values(DType dtype, int64_t count) : Values(dtype, count, [](int64_t) { return 99; }) {}

Buffer Values::part(int64_t begin, int64_t count) {
  auto* data = reinterpret_cast<std::byte*>(memory_.data());
  return {count == 0 ? nullptr : data + begin * element_size(dtype_), count, dtype_, {}};
}

bool operator==(const Values& a, const Values& b) {
  if (a.dtype_ != b.dtype_ || a.count_ != b.count_) return false;
  for (int64_t i = 0; i < a.count_; ++i) {
    if (a[i] != b[i] && !(std::isnan(a[i]) && std::isnan(b[i]))) return false;
  }
  return true;
}

void PrintTo(const Values& values, std::ostream* os) {
  *os << to_string(values.dtype_) << " of " << values.count_ << ": [";
  for (int64_t i = 0; i < std::min<int64_t>(values.count_, 20); ++i) *os << values[i] << " ";
  *os << (values.count_ > 20 ? "...]" : "]");
}

double sample(DType dtype, ReduceOp op, int rank, int64_t index) {
  const int number = static_cast<int>((int64_t{7} * rank + index * 3 + index / 5) % 5);  // 0 to 4
  if (dtype == DType::kBool) return number > 2;
  if (op == ReduceOp::kProduct) {
    const double factor = 1 + number % 2;
    return is_signed(dtype) && number == 4 ? -factor : factor;
  }
  return is_signed(dtype) ? number - 2 : number;
}

double reduced_sample(DType dtype, ReduceOp op, int num_ranks, int64_t index) {
  double result = sample(dtype, op, 0, index);
  for (int rank = 1; rank < num_ranks; ++rank) {
    const double next = sample(dtype, op, rank, index);
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kAvg:
        result += next;
        break;
      case ReduceOp::kMin:
        result = std::min(result, next);
        break;
      case ReduceOp::kMax:
        result = std::max(result, next);
        break;
      case ReduceOp::kProduct:
        result *= next;
        break;
    }
  }
  if (dtype == DType::kBool && op == ReduceOp::kSum) return result > 0;
  if (op != ReduceOp::kAvg) return result;
  result /= num_ranks;
  return is_floating(dtype) ? rounded(dtype, result) : std::trunc(result);
}

}  // namespace shardweave
