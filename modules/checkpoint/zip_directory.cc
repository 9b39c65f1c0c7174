#include "shardweave/modules/checkpoint/zip_directory.h"

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "shardweave/comm/str_cat.h"

namespace shardweave::checkpoint_internal {
namespace {

// Without what has any length.
constexpr size_t kLocalHeader = 30, kEntry = 46, kEnd = 22, kEnd64 = 56, kLocator64 = 20;
constexpr uint64_t kMostDirectoryBytes = uint64_t{1} << 28;
constexpr uint64_t kIn64 = 0xffffffff;  // the number stands elsewhere, with 64 bits
constexpr uint64_t kEncrypted = 1 | 1 << 6 | 1 << 13;

absl::Status damaged(std::string_view what) {
  return absl::InvalidArgumentError(str_cat("no archive of torch.save, or damaged: ", what));
}

// Little-endian, of bytes that are there.
uint64_t number(std::string_view bytes, size_t at, size_t size) {
  uint64_t value = 0;
  for (size_t i = 0; i < size; ++i) {
    value |= uint64_t{static_cast<uint8_t>(bytes[at + i])} << (8 * i);
  }
  return value;
}

absl::StatusOr<std::string> read_text(const ReadableFile& file, int64_t at, size_t size) {
  std::string text(size, '\0');
  absl::Status status = file.read_at(at, text.data(), text.size());
  if (!status.ok()) return status;
  return text;
}

// Those of an entry that stand in its extra fields: of the ones that are kIn64, in this order. False: they are not there.
bool read_64(std::string_view extra, uint64_t* size, uint64_t* packed_size, uint64_t* header) {
  std::string_view wide;
  while (extra.size() >= 4) {
    const uint64_t kind = number(extra, 0, 2), length = number(extra, 2, 2);
    if (length > extra.size() - 4) return false;
    if (kind == 1) wide = extra.substr(4, length);
    extra.remove_prefix(4 + length);
  }
  for (uint64_t* each : {size, packed_size, header}) {
    if (*each != kIn64) continue;
    if (wide.size() < 8) return false;
    *each = number(wide, 0, 8);
    wide.remove_prefix(8);
  }
  return true;
}

// Where in a text that ends with the archive the end record stands.
std::optional<size_t> find_end(std::string_view text) {
  if (text.size() < kEnd) return std::nullopt;
  for (size_t at = text.size() - kEnd + 1; at-- > 0;) {
    if (text.substr(at, 4) == "PK\5\6" && number(text, at + 20, 2) == text.size() - at - kEnd) {
      return at;
    }
  }
  return std::nullopt;
}

}  // namespace

absl::StatusOr<ZipDirectory> ZipDirectory::read(std::shared_ptr<ReadableFile> file, int64_t begin,
                                                int64_t size) {
  std::string text;
  std::optional<size_t> found;
  // PyTorch writes no comment behind it, which may have 64 KB.
  for (const size_t longest : {kLocator64 + kEnd, kLocator64 + kEnd + 0xffff}) {
    if (found.has_value()) break;
    const size_t bytes = std::min(static_cast<size_t>(size), longest);
    absl::StatusOr<std::string> tail =
        read_text(*file, begin + size - static_cast<int64_t>(bytes), bytes);
    if (!tail.ok()) return tail.status();
    text = *std::move(tail);
    found = find_end(text);
  }
  if (!found.has_value()) return damaged("it has no directory");
  const std::string_view record = std::string_view(text).substr(*found, kEnd);
  uint64_t count = number(record, 10, 2), bytes = number(record, 12, 4),
           offset = number(record, 16, 4);
  uint64_t end = static_cast<uint64_t>(size) - (text.size() - *found);
  if (*found >= kLocator64 && text.compare(*found - kLocator64, 4, "PK\6\7") == 0) {
    const uint64_t at = number(text, *found - kLocator64 + 8, 8);
    if (end < kLocator64 + kEnd64 || at > end - kLocator64 - kEnd64) {
      return damaged("its directory lies outside of it");
    }
    end = at;
    const absl::StatusOr<std::string> wide =
        read_text(*file, begin + static_cast<int64_t>(at), kEnd64);
    if (!wide.ok()) return wide.status();
    if (!wide->starts_with("PK\6\6")) return damaged("it has no directory of 64 bits");
    const uint64_t wide_count = number(*wide, 32, 8), wide_bytes = number(*wide, 40, 8),
                   wide_offset = number(*wide, 48, 8);
    // What is said twice is the same.
    if ((count != 0xffff && count != wide_count) || (bytes != kIn64 && bytes != wide_bytes) ||
        (offset != kIn64 && offset != wide_offset)) {
      return damaged("it has two directories");
    }
    count = wide_count;
    bytes = wide_bytes;
    offset = wide_offset;
  }
  ZipDirectory directory;
  directory.file_ = std::move(file);
  directory.begin_ = begin;
  absl::Status status = directory.read_records(count, offset, bytes, end);
  if (!status.ok()) return status;
  return directory;
}

absl::Status ZipDirectory::read_records(uint64_t count, uint64_t offset, uint64_t size,
                                        uint64_t end) {
  if (offset > end || size > end - offset) return damaged("its directory lies outside of it");
  if (size > kMostDirectoryBytes) return damaged("its directory is too large");
  if (count > size / kEntry) return damaged("its directory is cut short");
  const absl::StatusOr<std::string> text =
      read_text(*file_, begin_ + static_cast<int64_t>(offset), size);
  if (!text.ok()) return text.status();
  std::string_view rest = *text;
  // Where each begins, the least at which it ends, and which it is.
  struct Stretch {
    int64_t begin, end;
    Record* record;
  };
  std::vector<Stretch> stretches;
  for (uint64_t i = 0; i < count; ++i) {
    if (rest.size() < kEntry || !rest.starts_with("PK\1\2")) return damaged("an entry is none");
    const size_t name_bytes = number(rest, 28, 2), extra_bytes = number(rest, 30, 2);
    const size_t behind = name_bytes + extra_bytes + number(rest, 32, 2);
    if (behind > rest.size() - kEntry) return damaged("its directory is cut short");
    const std::string name(rest.substr(kEntry, name_bytes));
    uint64_t packed_size = number(rest, 20, 4), its_size = number(rest, 24, 4),
             header = number(rest, 42, 4);
    if (!read_64(rest.substr(kEntry + name_bytes, extra_bytes), &its_size, &packed_size, &header)) {
      return damaged(str_cat("\"", name, "\" has no size"));
    }
    if (i == 0) {
      const size_t slash = name.find('/');
      if (slash == std::string::npos) return damaged("its records are in no folder");
      folder_ = name.substr(0, slash + 1);
    }
    const uint64_t before = kLocalHeader + name_bytes;
    if (header > offset || before > offset - header || packed_size > offset - header - before ||
        its_size > uint64_t{INT64_MAX}) {
      return damaged(str_cat("its record \"", name, "\" reaches out of it"));
    }
    const auto [it, is_new] = records_.try_emplace(name);
    if (!is_new) return damaged(str_cat("its record \"", name, "\" is there twice"));
    it->second = {.header = static_cast<int64_t>(header),
                  .size = static_cast<int64_t>(its_size),
                  .packed_size = static_cast<int64_t>(packed_size),
                  .flags = number(rest, 8, 2),
                  .method = number(rest, 10, 2)};
    stretches.push_back({static_cast<int64_t>(header),
                         static_cast<int64_t>(header + before + packed_size), &it->second});
    rest.remove_prefix(kEntry + behind);
  }
  std::sort(stretches.begin(), stretches.end(),
            [](const Stretch& a, const Stretch& b) { return a.begin < b.begin; });
  for (size_t i = 0; i < stretches.size(); ++i) {
    const int64_t next =
        i + 1 < stretches.size() ? stretches[i + 1].begin : static_cast<int64_t>(offset);
    if (stretches[i].end > next) return damaged("two of its records overlap");
    stretches[i].record->end = next;
  }
  return absl::OkStatus();
}

absl::StatusOr<ZipDirectory::Place> ZipDirectory::find(const std::string& name) const {
  const auto found = records_.find(folder_ + name);
  if (found == records_.end()) {
    return absl::NotFoundError(str_cat("has no record \"", name, "\""));
  }
  const Record& record = found->second;
  const auto its = [&](std::string_view what) {
    return str_cat("its record \"", name, "\" ", what);
  };
  if ((record.flags & kEncrypted) != 0) return absl::UnimplementedError(its("is encrypted"));
  if (record.method != 0) {
    return absl::UnimplementedError(its("is compressed; wanted it as torch.save does"));
  }
  if (record.size != record.packed_size) {
    return absl::InvalidArgumentError(its("has two sizes, and is not compressed"));
  }
  const std::string& whole = found->first;
  const size_t before = kLocalHeader + whole.size();
  const absl::StatusOr<std::string> header = read_text(*file_, begin_ + record.header, before);
  if (!header.ok()) return header.status();
  if (!header->starts_with("PK\3\4") || number(*header, 8, 2) != record.method ||
      number(*header, 26, 2) != whole.size() || header->substr(kLocalHeader) != whole) {
    return absl::InvalidArgumentError(its("has no header, or that of another"));
  }
  const int64_t begin = record.header + static_cast<int64_t>(before + number(*header, 28, 2));
  if (begin > record.end || record.size > record.end - begin) {
    return absl::InvalidArgumentError(its("reaches into what is behind it"));
  }
  return Place{begin_ + begin, record.size};
}

}  // namespace shardweave::checkpoint_internal
