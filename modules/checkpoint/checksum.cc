#include "shardweave/modules/checkpoint/checksum.h"

#include <cstring>

#define XXH_INLINE_ALL
#include "xxhash.h"

namespace shardweave::checkpoint_internal {

struct Checksum::State {
  XXH3_state_t xxh3;
};

Checksum::Checksum() : state_(std::make_unique<State>()) {
  XXH3_64bits_reset(&state_->xxh3);
}
Checksum::~Checksum() = default;
Checksum::Checksum(Checksum&& other) noexcept = default;
Checksum& Checksum::operator=(Checksum&&) noexcept = default;

void Checksum::add(const void* data, size_t size) {
  if (size > 0) XXH3_64bits_update(&state_->xxh3, data, size);
}

uint64_t Checksum::value() const {
  return XXH3_64bits_digest(&state_->xxh3);
}

uint64_t checksum_of(const void* data, size_t size) {
  return size == 0 ? XXH3_64bits("", 0) : XXH3_64bits(data, size);
}

namespace {

// The elements' words, of at most 32 bits, for a change of the highest bits of wider ones could be lost: a product
// with 2^63 has nothing of the place. docs/checkpoints.md has the formula.
template <typename Word>
uint64_t word_sum(const char* data, uint64_t first, uint64_t count) {
  constexpr uint64_t kBase = 0x9E3779B97F4A7C15,
                     kStep = 0xD1342543DE82EF96;  // odd, even: odd at all places
  uint64_t sum = 0, sum_of_sums = 0;  // the latter has the last word once, the one before it twice
  for (uint64_t i = 0; i < count; ++i) {
    Word word;
    std::memcpy(&word, data + i * sizeof(Word), sizeof(Word));
    sum += word;
    sum_of_sums += sum;
  }
  return kBase * sum + kStep * ((first + count) * sum - sum_of_sums);
}

}  // namespace

uint64_t element_sum(const void* data, DType dtype, const Box& common, const Box& held,
                     const Dims& shape) {
  const auto bytes = static_cast<uint64_t>(element_size(dtype));
  uint64_t result = 0;
  for_each_run(common, held, whole_box(shape), [&](int64_t from, int64_t to, int64_t count) {
    const char* const run = static_cast<const char*>(data) + static_cast<uint64_t>(from) * bytes;
    const auto first = static_cast<uint64_t>(to), many = static_cast<uint64_t>(count);
    switch (bytes) {
      case 1:
        result += word_sum<uint8_t>(run, first, many);
        break;
      case 2:
        result += word_sum<uint16_t>(run, first, many);
        break;
      default:
        result += word_sum<uint32_t>(run, first * (bytes / 4), many * (bytes / 4));
    }
  });
  return result;
}

std::string to_hex(uint64_t value) {
  std::string text(16, '0');
  for (size_t i = 16; i > 0; --i, value >>= 4) text[i - 1] = "0123456789abcdef"[value & 15];
  return text;
}

std::optional<uint64_t> from_hex(std::string_view text) {
  if (text.size() != 16) return std::nullopt;
  uint64_t value = 0;
  for (const char c : text) {
    const size_t digit = std::string_view("0123456789abcdef").find(c);
    if (digit == std::string_view::npos) return std::nullopt;
    value = value << 4 | digit;
  }
  return value;
}

}  // namespace shardweave::checkpoint_internal
