#include "shardweave/modules/checkpoint/safetensors.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <optional>
#include <set>
#include <utility>

#include "shardweave/comm/str_cat.h"
#include "shardweave/modules/checkpoint/checksum.h"
#include "shardweave/modules/checkpoint/strict_json.h"

namespace shardweave {
namespace {

using namespace checkpoint_internal;

static_assert(std::endian::native == std::endian::little, "files are read and written as they are");

constexpr std::array<std::string_view, kNumDTypes> kNames = {
    "F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64", "I32",
    "I16", "I8",  "U64", "U32",  "U16",     "U8",      "BOOL"};

// Short runs that lie close are read together, with what is between: a call costs more. Not through a
// mapping: where the disk fails or the file shrinks, who touches that dies.
constexpr int64_t kShortRun = 64, kMostTogether = 1 << 20;

constexpr int64_t kPiece = 1 << 20;  // of what is read or written, and summed up

absl::Status in_file(const std::string& path, const absl::Status& status) {
  return absl::Status(status.code(), str_cat("'", path, "': ", std::string(status.message())));
}

absl::StatusOr<StoredTensor> parse_tensor(const std::string& name, const Json& json) {
  absl::Status status = check_keys({name}, json, {"dtype", "shape", "data_offsets"});
  if (!status.ok()) return status;
  StoredTensor info = {.name = name};
  const Json& dtype = json["dtype"];
  const std::optional<DType> known =
      dtype.is_string() ? safetensors_dtype(dtype.get<std::string>()) : std::nullopt;
  if (!known.has_value()) {
    return unexpected({name, "dtype"},
                      "one of F64, F32, F16, BF16, F8_E4M3, F8_E5M2, I64, ..., BOOL", dtype);
  }
  info.dtype = *known;
  const std::optional<Dims> shape = as_sizes(json["shape"]);
  if (!shape.has_value()) {
    return unexpected({name, "shape"}, "a list of whole numbers", json["shape"]);
  }
  info.shape = *shape;
  const std::optional<Dims> offsets = as_sizes(json["data_offsets"]);
  if (!offsets.has_value() || offsets->size() != 2 || (*offsets)[0] > (*offsets)[1]) {
    return unexpected({name, "data_offsets"}, "where it begins and ends", json["data_offsets"]);
  }
  info.begin = (*offsets)[0];
  info.end = (*offsets)[1];
  const std::optional<int64_t> bytes = bytes_of(info.shape, element_size(info.dtype));
  if (!bytes.has_value() || *bytes != info.end - info.begin) {
    return unexpected({name, "data_offsets"},
                      str_cat(bytes.has_value() ? std::to_string(*bytes) : "more than 2^63",
                              " bytes, for its dtype and shape"),
                      json["data_offsets"]);
  }
  return info;
}

}  // namespace

std::string_view safetensors_name(DType dtype) {
  return kNames[static_cast<size_t>(dtype)];
}

std::optional<DType> safetensors_dtype(std::string_view name) {
  const auto it = std::find(kNames.begin(), kNames.end(), name);
  if (it == kNames.end()) return std::nullopt;
  return static_cast<DType>(it - kNames.begin());
}

absl::StatusOr<SafetensorsHeader> parse_safetensors_header(std::string_view json,
                                                           int64_t data_bytes) {
  if (!json.starts_with('{')) {
    return absl::InvalidArgumentError("the header does not begin with '{'");
  }
  absl::StatusOr<Json> parsed = parse_strict(json);
  if (!parsed.ok()) return parsed.status();
  SafetensorsHeader header;
  for (const auto& [name, value] : parsed->items()) {
    if (name == "__metadata__") {
      if (!value.is_object()) return unexpected({name}, "an object of texts", value);
      for (const auto& [key, text] : value.items()) {
        if (!text.is_string()) return unexpected({name, key}, "a text", text);
        header.metadata[key] = text.get<std::string>();
      }
      continue;
    }
    absl::StatusOr<StoredTensor> info = parse_tensor(name, value);
    if (!info.ok()) return info.status();
    header.tensors.push_back(*std::move(info));
  }
  // Empty ones stand where something else begins; by end they come before it.
  std::stable_sort(header.tensors.begin(), header.tensors.end(),
                   [](const StoredTensor& a, const StoredTensor& b) {
                     return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
                   });
  int64_t end = 0;
  const StoredTensor* before = nullptr;
  for (const StoredTensor& info : header.tensors) {
    if (info.begin != end) {
      const std::string what = info.begin < end
                                   ? str_cat("overlaps \"", before->name, "\", which ends at ", end)
                                   : str_cat("leaves a hole: what is before it ends at ", end);
      return absl::InvalidArgumentError(
          str_cat("\"", info.name, "\" begins at ", info.begin, " and ", what));
    }
    end = info.end;
    before = &info;
  }
  if (end != data_bytes) {
    return absl::InvalidArgumentError(str_cat("its tensors have ", end, " bytes; the file has ",
                                              data_bytes, " behind the header"));
  }
  return header;
}

// --- reading -------------------------------------------------------------------------------------

absl::StatusOr<std::shared_ptr<SafetensorsFile>> SafetensorsFile::open(
    const std::string& path, std::shared_ptr<FileSystem> fs, Symlinks symlinks, bool stays_open) {
  std::shared_ptr<SafetensorsFile> result(new SafetensorsFile);
  result->path_ = path;
  result->fs_ = fs != nullptr ? std::move(fs) : posix_file_system();
  absl::StatusOr<std::unique_ptr<ReadableFile>> file =
      stays_open ? result->fs_->open(path, symlinks)
                 : open_for_each_read(result->fs_, path, symlinks);
  if (!file.ok()) return file.status();
  result->file_ = *std::move(file);
  const int64_t size = result->file_->size();
  uint64_t header_bytes = 0;
  if (size < 8) {
    return absl::InvalidArgumentError(
        str_cat("'", path, "' has ", size, " bytes; a safetensors file has 8 or more"));
  }
  absl::Status status = result->file_->read_at(0, &header_bytes, 8);
  if (!status.ok()) return status;
  if (header_bytes > static_cast<uint64_t>(kMostSafetensorsHeaderBytes)) {
    return absl::InvalidArgumentError(str_cat("'", path, "' is no safetensors file: a header of ",
                                              header_bytes, " bytes; wanted at most ",
                                              kMostSafetensorsHeaderBytes));
  }
  if (static_cast<int64_t>(header_bytes) > size - 8) {
    return absl::InvalidArgumentError(str_cat("'", path, "' is cut short: a header of ",
                                              header_bytes, " bytes, and a file of ", size));
  }
  std::string header(header_bytes, '\0');
  status = result->file_->read_at(8, header.data(), header.size());
  if (!status.ok()) return status;
  result->data_begin_ = 8 + static_cast<int64_t>(header_bytes);
  absl::StatusOr<SafetensorsHeader> parsed =
      parse_safetensors_header(header, size - result->data_begin_);
  if (!parsed.ok()) return in_file(path, parsed.status());
  result->header_ = *std::move(parsed);
  for (size_t i = 0; i < result->header_.tensors.size(); ++i) {
    result->places_.emplace(result->header_.tensors[i].name, i);
  }
  return result;
}

const StoredTensor* SafetensorsFile::find(std::string_view name) const {
  const auto it = places_.find(name);
  return it == places_.end() ? nullptr : &header_.tensors[it->second];
}

absl::Status SafetensorsFile::read(const StoredTensor& info, void* out) const {
  const Box whole = whole_box(info.shape);
  return read(info, whole, whole, whole, out);
}

absl::Status SafetensorsFile::read(const StoredTensor& info, const Box& box, void* out) const {
  bool fits = box.offset.size() == info.shape.size() && box.shape.size() == info.shape.size();
  for (size_t d = 0; fits && d < info.shape.size(); ++d) {
    fits = box.offset[d] >= 0 && box.shape[d] >= 0 && box.offset[d] <= info.shape[d] &&
           box.shape[d] <= info.shape[d] - box.offset[d];
  }
  if (!fits) {
    return absl::InvalidArgumentError(str_cat("'", path_, "': ", box.to_string(), " is not in \"",
                                              info.name, "\", which is ",
                                              whole_box(info.shape).to_string()));
  }
  return read(info, whole_box(info.shape), box, box, out);
}

absl::Status SafetensorsFile::read(const StoredTensor& info, const Box& box, const Box& common,
                                   const Box& to, void* out) const {
  const int64_t element = element_size(info.dtype);
  const int64_t begin = offset(info);
  struct Run {
    int64_t from;
    char* place;
    int64_t bytes;
  };
  std::vector<Run> together;  // in the order of the file
  std::vector<char> buffer;
  absl::Status status;
  const auto read_together = [&] {
    if (together.empty() || !status.ok()) return;
    const int64_t from = together.front().from;
    const auto bytes = static_cast<size_t>(together.back().from + together.back().bytes - from);
    if (together.size() == 1) {
      status = file_->read_at(from, together.front().place, bytes);
    } else {
      buffer.resize(std::max(buffer.size(), bytes));
      status = file_->read_at(from, buffer.data(), bytes);
      for (const Run& run : together) {
        if (!status.ok()) break;
        std::memcpy(run.place, buffer.data() + (run.from - from), static_cast<size_t>(run.bytes));
      }
    }
    together.clear();
  };
  for_each_run(common, box, to, [&](int64_t from_place, int64_t to_place, int64_t count) {
    const Run run = {begin + from_place * element, static_cast<char*>(out) + to_place * element,
                     count * element};
    if (!together.empty()) {
      const int64_t end = together.back().from + together.back().bytes;
      const bool is_near = run.bytes < kShortRun && run.from >= end &&
                           run.from - end <= 4 * run.bytes &&
                           run.from + run.bytes - together.front().from <= kMostTogether;
      if (!is_near) read_together();
    }
    together.push_back(run);
  });
  read_together();
  return status;
}

absl::Status SafetensorsFile::read(const StoredTensor& info, void* out,
                                   uint64_t* out_checksum) const {
  // A piece at a time, so that the checksum finds it in the cache.
  Checksum sum;
  const int64_t bytes = info.end - info.begin;
  for (int64_t at = 0; at < bytes; at += kPiece) {
    char* const place = static_cast<char*>(out) + at;
    const auto some = static_cast<size_t>(std::min(kPiece, bytes - at));
    absl::Status status = file_->read_at(offset(info) + at, place, some);
    if (!status.ok()) return status;
    sum.add(place, some);
  }
  *out_checksum = sum.value();
  return absl::OkStatus();
}

absl::Status SafetensorsFile::read(const StoredTensor& info, int64_t begin, int64_t size,
                                   void* out) const {
  return file_->read_at(offset(info) + begin, out, static_cast<size_t>(size));
}

absl::Status SafetensorsFile::read_past_cache(const StoredTensor& info, int64_t begin, int64_t size,
                                              void* out, absl::Span<char> through) const {
  return file_->read_past_cache_at(offset(info) + begin, out, static_cast<size_t>(size), through);
}

const std::byte* SafetensorsFile::mapped(const StoredTensor& info) const {
  const std::byte* file = file_->mapped();
  return file == nullptr ? nullptr : file + offset(info);
}

// --- writing -------------------------------------------------------------------------------------

struct SafetensorsWriter::Sum {
  Checksum checksum;
};

SafetensorsWriter::SafetensorsWriter() : sum_(std::make_unique<Sum>()) {}
SafetensorsWriter::~SafetensorsWriter() {
  if (file_ == nullptr) return;
  file_ = nullptr;
  (void)fs_->remove_file(path_);
}

absl::StatusOr<std::unique_ptr<SafetensorsWriter>> SafetensorsWriter::create(
    const std::string& path, std::vector<StoredTensor> tensors,
    const std::map<std::string, std::string>& metadata, std::shared_ptr<FileSystem> fs) {
  if (fs == nullptr) fs = posix_file_system();
  std::set<std::string_view> names;
  std::string text;
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](const StoredTensor& a, const StoredTensor& b) {
                     return element_size(a.dtype) > element_size(b.dtype);
                   });
  int64_t end = 0;
  // Put together here: an ordered_json looks through all of its keys for each.
  const auto add = [&](const std::string& key, const nlohmann::ordered_json& value) {
    str_append(&text, text.empty() ? "{" : ",", nlohmann::ordered_json(key).dump(), ":",
               value.dump());
  };
  try {
    if (!metadata.empty()) add("__metadata__", metadata);
    for (StoredTensor& info : tensors) {
      if (info.name == "__metadata__" || !names.insert(info.name).second) {
        return absl::InvalidArgumentError(
            str_cat("'", path, "': a tensor cannot be \"", info.name, "\"",
                    info.name == "__metadata__" ? "" : ": there is another of that name"));
      }
      const std::optional<int64_t> bytes = bytes_of(info.shape, element_size(info.dtype));
      if (!bytes.has_value() || __builtin_add_overflow(end, *bytes, &info.end)) {
        return absl::InvalidArgumentError(
            str_cat("'", path, "': \"", info.name, "\" is too large"));
      }
      info.begin = std::exchange(end, info.end);
      add(info.name, {{"dtype", std::string(safetensors_name(info.dtype))},
                      {"shape", std::vector<int64_t>(info.shape.begin(), info.shape.end())},
                      {"data_offsets", {info.begin, info.end}}});
    }
  } catch (const nlohmann::json::exception& error) {
    return absl::InvalidArgumentError(
        str_cat("'", path, "': a name that is no UTF-8: ", std::string_view(error.what())));
  }
  text += text.empty() ? "{}" : "}";
  text.resize((text.size() + 7) / 8 * 8, ' ');
  if (static_cast<int64_t>(text.size()) > kMostSafetensorsHeaderBytes) {
    return absl::InvalidArgumentError(str_cat("'", path, "': a header of ", text.size(),
                                              " bytes; wanted at most ",
                                              kMostSafetensorsHeaderBytes));
  }
  absl::StatusOr<std::unique_ptr<WritableFile>> file = fs->create(path);
  if (!file.ok()) return file.status();
  std::unique_ptr<SafetensorsWriter> writer(new SafetensorsWriter);
  writer->fs_ = std::move(fs);
  writer->path_ = path;
  writer->file_ = *std::move(file);
  writer->tensors_ = std::move(tensors);
  writer->wanted_ = 8 + static_cast<int64_t>(text.size()) + end;
  const uint64_t header_bytes = text.size();
  text.insert(0, reinterpret_cast<const char*>(&header_bytes), 8);
  absl::Status status = writer->append(text.data(), static_cast<int64_t>(text.size()));
  if (!status.ok()) return status;
  return writer;
}

absl::Status SafetensorsWriter::append(const void* data, int64_t size, uint64_t* out_checksum) {
  if (size > wanted_ - bytes_) {
    return absl::OutOfRangeError(
        str_cat("'", path_, "': ", size, " bytes more; its tensors lack ", wanted_ - bytes_));
  }
  // A piece at a time, so that the checksums find it in the cache.
  Checksum sum;
  const auto* from = static_cast<const char*>(data);
  while (size > 0) {
    const int64_t piece = std::min(size, kPiece);
    sum_->checksum.add(from, static_cast<size_t>(piece));
    if (out_checksum != nullptr) sum.add(from, static_cast<size_t>(piece));
    absl::Status status = write_all(*file_, from, static_cast<size_t>(piece));
    if (!status.ok()) return status;
    bytes_ += piece;
    from += piece;
    size -= piece;
  }
  if (out_checksum != nullptr) *out_checksum = sum.value();
  return absl::OkStatus();
}

absl::Status SafetensorsWriter::finish() {
  if (bytes_ != wanted_) {
    return absl::FailedPreconditionError(
        str_cat("'", path_, "': ", wanted_ - bytes_, " bytes of its tensors are missing"));
  }
  absl::Status status = file_->sync();
  if (status.ok()) status = file_->close();
  if (status.ok()) file_ = nullptr;
  return status;
}

uint64_t SafetensorsWriter::checksum() const {
  return sum_->checksum.value();
}

}  // namespace shardweave
