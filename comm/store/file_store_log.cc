#include "shardweave/comm/store/file_store_log.h"

namespace shardweave::file_log {
namespace {

constexpr size_t kSizes = 8;
constexpr size_t kChecksum = 8;

void append_number(std::string& out, uint64_t number, int bytes) {
  for (int i = 0; i < bytes; ++i) out.push_back(static_cast<char>(number >> (8 * i)));
}

uint64_t read_number(std::string_view bytes, size_t at, int count) {
  uint64_t number = 0;
  for (int i = count; i-- > 0;) number = number << 8 | static_cast<uint8_t>(bytes[at + i]);
  return number;
}

// FNV-1a. Begins off zero, so that a hole in the file is no record.
uint64_t checksum(std::string_view bytes) {
  uint64_t hash = 0xcbf29ce484222325;
  for (char c : bytes) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3;
  return hash;
}

std::string encode(std::string_view key, std::string_view value, uint32_t value_size) {
  std::string record;
  record.reserve(kSizes + key.size() + value.size() + kChecksum);
  append_number(record, key.size(), 4);
  append_number(record, value_size, 4);
  record.append(key);
  record.append(value);
  append_number(record, checksum(record), kChecksum);
  return record;
}

}  // namespace

std::string encode_set(std::string_view key, std::string_view value) {
  return encode(key, value, static_cast<uint32_t>(value.size()));
}

std::string encode_remove(std::string_view key) {
  return encode(key, "", kRemoved);
}

std::optional<Record> next_record(std::string_view log) {
  if (log.size() < kSizes + kChecksum) return std::nullopt;
  const uint64_t key_size = read_number(log, 0, 4);
  const uint64_t value_size = read_number(log, 4, 4);
  const bool removed = value_size == kRemoved;
  const uint64_t body = kSizes + key_size + (removed ? 0 : value_size);
  if (log.size() < body + kChecksum) return std::nullopt;
  if (read_number(log, body, kChecksum) != checksum(log.substr(0, body))) return std::nullopt;
  Record record;
  record.key = log.substr(kSizes, key_size);
  if (!removed) record.value = log.substr(kSizes + key_size, value_size);
  record.size = body + kChecksum;
  return record;
}

}  // namespace shardweave::file_log
