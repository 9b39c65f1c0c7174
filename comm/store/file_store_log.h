// The format of the file store's log: a header, then records.
//
//   std::string bytes = file_log::kHeader + file_log::encode_set("key", "value");
//   std::string_view rest = bytes;
//   while (std::optional<file_log::Record> record = file_log::next_record(rest)) ...
//
// A record is: key size and value size (32 bits each, little-endian; kRemoved as the value size
// takes the key out), the key, the value, and a 64-bit checksum of all that.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace shardweave::file_log {

inline constexpr std::string_view kHeader = "shardweave store 1\n";
inline constexpr uint32_t kRemoved = 0xffffffff;

struct Record {
  std::string_view key;
  std::optional<std::string_view> value;  // none: the key was removed
  size_t size = 0;                        // of the record, in bytes
};

// key and value: less than 2 GiB.
std::string encode_set(std::string_view key, std::string_view value);
std::string encode_remove(std::string_view key);

// The record at the start of `log` (without the header), or nothing if it is not complete and
// intact.
std::optional<Record> next_record(std::string_view log);

}  // namespace shardweave::file_log
