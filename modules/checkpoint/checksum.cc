#include "shardweave/modules/checkpoint/checksum.h"

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
