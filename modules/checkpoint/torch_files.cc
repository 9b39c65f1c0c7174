#include "shardweave/modules/checkpoint/torch_files.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "caffe2/serialize/inline_container.h"
#include "caffe2/serialize/read_adapter_interface.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/modules/checkpoint/pickle.h"
#include "shardweave/modules/checkpoint/strict_json.h"

namespace shardweave {
namespace {

using namespace checkpoint_internal;
using Kind = PickleValue::Kind;

constexpr int64_t kMostPickleBytes = int64_t{1} << 30;
constexpr int64_t kMostBytesOfOneTensor = int64_t{1} << 16;  // its pickle has one line
constexpr int kMostLevels = 16;                              // of dicts in dicts
constexpr size_t kMostDims = 64;
// Names that are made, with kOneName for each: a pickle can have one dict in many places, and a text in many names.
constexpr int64_t kMostNameBytes = int64_t{1} << 26, kMostChunkNameBytes = int64_t{1} << 30;
constexpr int64_t kOneName = 256;

absl::Status wrong(const std::string& path, std::string_view what) {
  return absl::InvalidArgumentError(str_cat("'", path, "': ", what));
}

// A stretch of a file, as LibTorch's reader of archives wants it.
class Stretch final : public caffe2::serialize::ReadAdapterInterface {
 public:
  Stretch(std::shared_ptr<ReadableFile> file, int64_t begin, int64_t size)
      : file_(std::move(file)), begin_(begin), size_(size) {}
  size_t size() const override { return static_cast<size_t>(size_); }
  size_t read(uint64_t place, void* out, size_t count, const char*) const override {
    if (place >= size()) return 0;
    count = std::min(count, size() - static_cast<size_t>(place));
    const absl::Status status = file_->read_at(begin_ + static_cast<int64_t>(place), out, count);
    return status.ok() ? count : 0;
  }

 private:
  const std::shared_ptr<ReadableFile> file_;
  const int64_t begin_, size_;
};

std::optional<DType> dtype_of_storage(std::string_view name) {
  static const auto* const kStorages = new std::map<std::string_view, DType>{
      {"torch.DoubleStorage", DType::kF64}, {"torch.FloatStorage", DType::kF32},
      {"torch.HalfStorage", DType::kF16},   {"torch.BFloat16Storage", DType::kBF16},
      {"torch.LongStorage", DType::kI64},   {"torch.IntStorage", DType::kI32},
      {"torch.ShortStorage", DType::kI16},  {"torch.CharStorage", DType::kI8},
      {"torch.ByteStorage", DType::kU8},    {"torch.BoolStorage", DType::kBool}};
  const auto found = kStorages->find(name);
  if (found == kStorages->end()) return std::nullopt;
  return found->second;
}

// A tuple of whole numbers that are 0 or more; torch.Size, too.
std::optional<Dims> sizes_of(const PickleValue& value) {
  const PickleValue* list = &value;
  if (value.is_call_of("torch.Size") && value.items.size() == 1) list = value.items[0];
  if (list->kind != Kind::kList || list->items.size() > kMostDims) return std::nullopt;
  Dims sizes;
  for (const PickleValue* item : list->items) {
    if (item->kind != Kind::kInt || item->number < 0) return std::nullopt;
    sizes.push_back(item->number);
  }
  return sizes;
}

bool is_contiguous(const Dims& shape, const Dims& strides) {
  if (shape.size() != strides.size()) return false;
  int64_t wanted = 1;
  for (size_t d = shape.size(); d-- > 0;) {
    if (shape[d] != 1 && strides[d] != wanted) return false;
    wanted *= shape[d];
  }
  return true;
}

// What torch.save writes: a zip archive with data.pkl, and a record for each storage.
class TorchArchive {
 public:
  static absl::StatusOr<std::unique_ptr<TorchArchive>> open(const std::string& path,
                                                            std::shared_ptr<ReadableFile> file,
                                                            int64_t begin, int64_t size,
                                                            int64_t most_pickle_bytes) {
    auto archive = std::make_unique<TorchArchive>();
    archive->path_ = path;
    archive->file_ = file;
    archive->begin_ = begin;
    archive->size_ = size;
    char magic[4] = {};
    if (size < 4 || !file->read_at(begin, magic, 4).ok() || std::memcmp(magic, "PK\3\4", 4) != 0) {
      return absl::UnimplementedError(str_cat(
          "'", path, "' is no zip archive; wanted a file by torch.save of PyTorch 1.6 or later"));
    }
    try {
      archive->reader_ = std::make_unique<caffe2::serialize::PyTorchStreamReader>(
          std::make_shared<Stretch>(std::move(file), begin, size));
      const auto pickled = static_cast<int64_t>(archive->reader_->getRecordSize("data.pkl"));
      if (pickled < 0 || pickled > std::min(most_pickle_bytes, size)) {
        return wrong(path, "its data.pkl is too large");
      }
      if (archive->reader_->hasRecord("byteorder")) {
        if (archive->reader_->getRecordSize("byteorder") > 8) {
          return wrong(path, "its byteorder is none");
        }
        const auto [order, length] = archive->reader_->getRecord("byteorder");
        if (std::string_view(static_cast<const char*>(order.get()), length) != "little") {
          return absl::UnimplementedError(
              str_cat("'", path, "' has big-endian numbers; wanted little-endian ones"));
        }
      }
      const auto [data, bytes] = archive->reader_->getRecord("data.pkl");
      absl::StatusOr<Pickle> pickle = Pickle::parse({static_cast<const char*>(data.get()), bytes});
      if (!pickle.ok()) {
        return wrong(path, str_cat("data.pkl: ", std::string(pickle.status().message())));
      }
      archive->pickle_ = *std::move(pickle);
    } catch (const std::exception& error) {
      return archive->damaged(error);
    }
    return archive;
  }

  const PickleValue& value() const { return pickle_->value(); }

  // Of what the pickle makes by torch._utils._rebuild_tensor_v2.
  absl::StatusOr<TensorSource> tensor(const std::string& name, const PickleValue& value) {
    if (value.is_call_of("torch._utils._rebuild_parameter") && !value.items.empty() &&
        value.items[0]->is_call_of("torch._utils._rebuild_tensor_v2")) {
      return tensor(name, *value.items[0]);
    }
    const auto refuse = [&](std::string_view what) {
      return absl::UnimplementedError(str_cat("'", path_, "': \"", name, "\" ", what));
    };
    if (!value.is_call_of("torch._utils._rebuild_tensor_v2")) {
      return refuse("is no dense tensor, but what Python makes by another function");
    }
    const PickleValue* persistent = value.items.size() < 4 ? nullptr : value.items[0];
    const PickleValue* id = persistent == nullptr || persistent->kind != Kind::kPersistent
                                ? nullptr
                                : persistent->items[0];
    if (id == nullptr || id->kind != Kind::kList || id->items.size() < 5 ||
        id->items[1]->kind != Kind::kGlobal || id->items[2]->kind != Kind::kText ||
        value.items[1]->kind != Kind::kInt || value.items[1]->number < 0) {
      return wrong(path_, str_cat("\"", name, "\" is no tensor as PyTorch saves it"));
    }
    const std::optional<DType> dtype = dtype_of_storage(id->items[1]->text);
    if (!dtype.has_value()) return refuse(str_cat("has a ", id->items[1]->text));
    const std::optional<Dims> shape = sizes_of(*value.items[2]),
                              strides = sizes_of(*value.items[3]);
    if (!shape.has_value() || !strides.has_value()) {
      return wrong(path_, str_cat("\"", name, "\" has no shape"));
    }
    const int64_t element = element_size(*dtype);
    const std::optional<int64_t> bytes = bytes_of(*shape, element);
    if (!bytes.has_value()) return wrong(path_, str_cat("\"", name, "\" is too large"));
    if (*bytes > 0 && !is_contiguous(*shape, *strides)) return refuse("is not contiguous");
    const absl::StatusOr<std::pair<int64_t, int64_t>> record = storage(id->items[2]->text);
    if (!record.ok()) return record.status();
    const auto [begin, size] = *record;
    const int64_t first = value.items[1]->number;
    if (*bytes > size || first > (size - *bytes) / element || id->items[4]->kind != Kind::kInt ||
        id->items[4]->number < 0 || id->items[4]->number > size / element) {
      return wrong(path_, str_cat("\"", name, "\" reaches out of its storage"));
    }
    return TensorSource{
        .name = name,
        .dtype = *dtype,
        .shape = *shape,
        .read = [file = file_, place = begin + first * element, element, whole = whole_box(*shape)](
                    const Box& part, const Box& to, void* out) {
          absl::Status status;
          for_each_run(part, whole, to, [&](int64_t from, int64_t at, int64_t count) {
            if (!status.ok()) return;
            status = file->read_at(place + from * element, static_cast<char*>(out) + at * element,
                                   static_cast<size_t>(count * element));
          });
          return status;
        }};
  }

 private:
  absl::Status damaged(const std::exception& error) const {
    const std::string what = error.what();
    return wrong(
        path_, str_cat("no archive of torch.save, or damaged: ", what.substr(0, what.find('\n'))));
  }

  // Where its bytes are in the file, and how many.
  absl::StatusOr<std::pair<int64_t, int64_t>> storage(const std::string& key) {
    const std::string record = str_cat("data/", key);
    if (const auto known = storages_.find(key); known != storages_.end()) return known->second;
    try {
      if (!reader_->hasRecord(record)) {
        return wrong(path_, str_cat("has no record \"", record, "\""));
      }
      const auto begin = static_cast<int64_t>(reader_->getRecordOffset(record));
      const auto size = static_cast<int64_t>(reader_->getRecordSize(record));
      // LibTorch gives the place of what is compressed, too, but not that it is.
      const auto header = static_cast<int64_t>(reader_->getRecordHeaderOffset(record));
      uint8_t local[30] = {};
      if (header < 0 || header > begin - 30 || header > size_ - 30 ||
          !file_->read_at(begin_ + header, local, sizeof(local)).ok() ||
          std::memcmp(local, "PK\3\4", 4) != 0) {
        return wrong(path_, str_cat("its record \"", record, "\" has no header"));
      }
      if (local[8] != 0 || local[9] != 0) {
        return absl::UnimplementedError(str_cat("'", path_, "': its record \"", record,
                                                "\" is compressed; wanted it as torch.save does"));
      }
      if (begin < 0 || size < 0 || begin > size_ || size > size_ - begin) {
        return wrong(path_, str_cat("its record \"", record, "\" reaches out of it"));
      }
      return storages_.try_emplace(key, begin_ + begin, size).first->second;
    } catch (const std::exception& error) {
      return damaged(error);
    }
  }

  std::string path_;
  std::shared_ptr<ReadableFile> file_;
  int64_t begin_ = 0, size_ = 0;
  std::unique_ptr<caffe2::serialize::PyTorchStreamReader> reader_;
  std::optional<Pickle> pickle_;
  std::map<std::string, std::pair<int64_t, int64_t>> storages_;  // that have been asked for
};

// All tensors of a dict, and of dicts in it. `left`: of kMostNameBytes.
absl::Status collect(TorchArchive& archive, const std::string& path, const std::string& prefix,
                     const PickleValue& value, int levels, int64_t& left,
                     std::vector<TensorSource>& out) {
  if (value.kind == Kind::kDict || value.is_call_of("collections.OrderedDict")) {
    if (levels == 0) return wrong(path, "dicts in dicts, more than 16 of them");
    for (const auto& [key, each] : value.entries) {
      left -= kOneName + static_cast<int64_t>(prefix.size() + key->text.size());
      if (left < 0) return wrong(path, "its names are too long, or too many");
      if (key->kind != Kind::kText) continue;
      const std::string name = prefix.empty() ? key->text : str_cat(prefix, ".", key->text);
      absl::Status status = collect(archive, path, name, *each, levels - 1, left, out);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }
  if (value.kind != Kind::kObject || value.called->kind != Kind::kGlobal ||
      !value.called->text.starts_with("torch._utils._rebuild")) {
    return absl::OkStatus();
  }
  absl::StatusOr<TensorSource> tensor = archive.tensor(prefix, value);
  if (!tensor.ok()) return tensor.status();
  out.push_back(*std::move(tensor));
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<ReadableFile>> open_file(FileSystem& fs, const std::string& path) {
  absl::StatusOr<std::unique_ptr<ReadableFile>> file = fs.open(path, Symlinks::kFollow);
  if (!file.ok()) return file.status();
  return std::shared_ptr<ReadableFile>(*std::move(file));
}

bool ends_in(const std::string& name, std::string_view end) {
  return name.ends_with(end);
}

// --- torch.distributed.checkpoint ---

std::string called_name(const PickleValue& value) {
  if (value.kind != Kind::kObject || value.called->kind != Kind::kGlobal) return "";
  return value.called->text.substr(value.called->text.find_last_of('.') + 1);
}

// A part of a tensor, in a file.
struct StoredChunk {
  std::string file;
  int64_t begin = 0, size = 0;
};
// By FQN and offsets.
using StoredChunks = std::map<std::pair<std::string, std::vector<int64_t>>, StoredChunk>;

absl::StatusOr<StoredChunks> stored_chunks(const std::string& path, const PickleValue& metadata) {
  const PickleValue* storage = metadata.entry("storage_data");
  if (storage == nullptr || storage->kind != Kind::kDict) return wrong(path, "no storage_data");
  StoredChunks chunks;
  std::map<std::string, std::vector<std::pair<int64_t, int64_t>>> stretches;  // by file
  int64_t left = kMostChunkNameBytes;
  for (const auto& [index, info] : storage->entries) {
    const PickleValue* fqn = index->entry("fqn");
    const PickleValue* offset = index->entry("offset");
    const PickleValue* file = info->entry("relative_path");
    const PickleValue* begin = info->entry("offset");
    const PickleValue* size = info->entry("length");
    if (fqn == nullptr || file == nullptr || begin == nullptr || size == nullptr ||
        fqn->kind != Kind::kText || file->kind != Kind::kText || begin->kind != Kind::kInt ||
        size->kind != Kind::kInt || begin->number < 0 || size->number < 0) {
      return wrong(path, "an entry of storage_data is none");
    }
    if (file->text.empty() || file->text.front() == '.' ||
        file->text.find_first_of(std::string_view("/\0", 2)) != std::string::npos) {
      return wrong(path, str_cat("\"", fqn->text, "\" is in '", file->text,
                                 "', which is no name of a file in this directory"));
    }
    const PickleValue* transforms = info->entry("transform_descriptors");
    if (transforms != nullptr && transforms->kind != Kind::kNone && !transforms->items.empty()) {
      return absl::UnimplementedError(
          str_cat("'", path, "': \"", fqn->text, "\" is compressed, or changed otherwise"));
    }
    left -= kOneName + static_cast<int64_t>(fqn->text.size() + file->text.size());
    if (left < 0) return wrong(path, "its names are too long, or too many");
    std::vector<int64_t> offsets;
    if (offset != nullptr && offset->kind != Kind::kNone) {
      const std::optional<Dims> given = sizes_of(*offset);
      if (!given.has_value()) return wrong(path, "an offset of storage_data is none");
      offsets.assign(given->begin(), given->end());
    }
    if (!chunks
             .try_emplace({fqn->text, offsets},
                          StoredChunk{file->text, begin->number, size->number})
             .second) {
      return wrong(path, str_cat("a chunk of \"", fqn->text, "\" is there twice"));
    }
    stretches[file->text].emplace_back(begin->number, size->number);
  }
  // Each byte is of one chunk: what is read is no more than there is.
  for (auto& [file, each] : stretches) {
    std::sort(each.begin(), each.end());
    for (size_t i = 1; i < each.size(); ++i) {
      if (each[i].first - each[i - 1].first < each[i - 1].second) {
        return wrong(path,
                     str_cat("two chunks have bytes of '", file, "' from ", each[i].first, " on"));
      }
    }
  }
  return chunks;
}

}  // namespace

absl::StatusOr<std::vector<TensorSource>> torch_save_sources(
    const std::string& path, const std::shared_ptr<FileSystem>& given) {
  const std::shared_ptr<FileSystem> fs = given != nullptr ? given : posix_file_system();
  const absl::StatusOr<std::shared_ptr<ReadableFile>> file = open_file(*fs, path);
  if (!file.ok()) return file.status();
  const auto archive = TorchArchive::open(path, *file, 0, (*file)->size(), kMostPickleBytes);
  if (!archive.ok()) return archive.status();
  std::vector<TensorSource> sources;
  int64_t left = kMostNameBytes;
  const absl::Status status =
      collect(**archive, path, "", (*archive)->value(), kMostLevels, left, sources);
  if (!status.ok()) return status;
  if (sources.empty()) return wrong(path, "no dict of tensors");
  std::set<std::string> names;
  for (const TensorSource& source : sources) {
    if (!names.insert(source.name).second) {
      return wrong(path, str_cat("\"", source.name, "\" is there twice"));
    }
  }
  return sources;
}

absl::StatusOr<std::vector<TensorSource>> dcp_sources(const std::string& directory,
                                                      const std::shared_ptr<FileSystem>& given) {
  const std::shared_ptr<FileSystem> fs = given != nullptr ? given : posix_file_system();
  const std::string path = join_path(directory, ".metadata");
  const absl::StatusOr<std::string> text =
      read_file(*fs, path, kMostPickleBytes, Symlinks::kFollow);
  if (!text.ok()) return text.status();
  const absl::StatusOr<Pickle> pickle = Pickle::parse(*text);
  if (!pickle.ok()) return wrong(path, std::string(pickle.status().message()));
  const PickleValue& metadata = pickle->value();
  const PickleValue* tensors = metadata.entry("state_dict_metadata");
  if (called_name(metadata) != "Metadata" || tensors == nullptr || tensors->kind != Kind::kDict) {
    return wrong(path, "no metadata of torch.distributed.checkpoint");
  }
  const absl::StatusOr<StoredChunks> stored = stored_chunks(path, metadata);
  if (!stored.ok()) return stored.status();
  std::map<std::string, std::shared_ptr<ReadableFile>> open;
  std::vector<TensorSource> sources;
  std::set<std::string_view> names;
  for (const auto& [fqn, info] : tensors->entries) {
    if (fqn->kind != Kind::kText || called_name(*info) != "TensorStorageMetadata") continue;
    const std::string& name = fqn->text;
    if (!names.insert(name).second) return wrong(path, str_cat("\"", name, "\" is there twice"));
    const PickleValue* size = info->entry("size");
    const PickleValue* chunks = info->entry("chunks");
    const std::optional<Dims> shape = size == nullptr ? std::nullopt : sizes_of(*size);
    if (!shape.has_value() || chunks == nullptr || chunks->kind != Kind::kList) {
      return wrong(path, str_cat("\"", name, "\" has no size or chunks"));
    }
    if (!bytes_of(*shape, 8).has_value()) {
      return wrong(path, str_cat("\"", name, "\" is too large"));
    }
    std::vector<SourcePart> parts;
    std::vector<Box> boxes;
    int64_t covered = 0;
    for (const PickleValue* chunk : chunks->items) {
      const PickleValue* offsets = chunk->entry("offsets");
      const PickleValue* sizes = chunk->entry("sizes");
      const std::optional<Dims> offset = offsets == nullptr ? std::nullopt : sizes_of(*offsets);
      const std::optional<Dims> its = sizes == nullptr ? std::nullopt : sizes_of(*sizes);
      if (!offset.has_value() || !its.has_value() || offset->size() != shape->size() ||
          its->size() != shape->size()) {
        return wrong(path, str_cat("a chunk of \"", name, "\" is none"));
      }
      const Box box = {*offset, *its};
      if (box.numel() == 0) continue;
      if (!contains(whole_box(*shape), box)) {
        return wrong(path, str_cat("a chunk of \"", name, "\" reaches out of it"));
      }
      auto found = stored->find({name, std::vector<int64_t>(offset->begin(), offset->end())});
      if (found == stored->end() && chunks->items.size() == 1) found = stored->find({name, {}});
      if (found == stored->end()) {
        return wrong(path,
                     str_cat("the chunk ", box.to_string(), " of \"", name, "\" is in no file"));
      }
      const StoredChunk& place = found->second;
      std::shared_ptr<ReadableFile>& file = open[place.file];
      if (file == nullptr) {
        absl::StatusOr<std::shared_ptr<ReadableFile>> opened =
            open_file(*fs, join_path(directory, place.file));
        if (!opened.ok()) return opened.status();
        file = *std::move(opened);
      }
      const std::string file_path = join_path(directory, place.file);
      if (place.begin > file->size() || place.size > file->size() - place.begin) {
        return absl::DataLossError(str_cat("'", file_path, "' is cut short"));
      }
      const auto archive =
          TorchArchive::open(file_path, file, place.begin, place.size, kMostBytesOfOneTensor);
      if (!archive.ok()) return archive.status();
      absl::StatusOr<TensorSource> source = (*archive)->tensor(name, (*archive)->value());
      if (!source.ok()) return source.status();
      if (source->shape != *its || (!parts.empty() && parts[0].source.dtype != source->dtype)) {
        return wrong(file_path, str_cat("the chunk ", box.to_string(), " of \"", name,
                                        "\" has another shape or dtype"));
      }
      covered += box.numel();
      boxes.push_back(box);
      parts.push_back({*std::move(source), box});
    }
    if (const auto two = find_overlap(boxes)) {
      return wrong(path, str_cat("the chunks ", boxes[two->first].to_string(), " and ",
                                 boxes[two->second].to_string(), " of \"", name, "\" overlap"));
    }
    if (covered != whole_box(*shape).numel()) {
      return wrong(path, str_cat("chunks of \"", name, "\" do not cover it"));
    }
    sources.push_back(put_together(name, *shape, std::move(parts)));
  }
  if (sources.empty()) return wrong(path, "no tensors");
  return sources;
}

absl::StatusOr<std::vector<TensorSource>> weight_sources(const std::string& path,
                                                         const std::shared_ptr<FileSystem>& given) {
  const std::shared_ptr<FileSystem> fs = given != nullptr ? given : posix_file_system();
  if (ends_in(path, ".pt") || ends_in(path, ".pth") || ends_in(path, ".bin")) {
    return torch_save_sources(path, fs);
  }
  if (!ends_in(path, ".safetensors") && !ends_in(path, ".json")) {
    const absl::StatusOr<std::vector<DirectoryEntry>> entries = fs->list(path);
    if (!entries.ok()) return entries.status();
    bool has_safetensors = false, has_bin = false;
    for (const DirectoryEntry& entry : *entries) {
      if (entry.name == ".metadata") return dcp_sources(path, fs);
      has_safetensors = has_safetensors || ends_in(entry.name, ".safetensors");
      has_bin = has_bin || entry.name == "pytorch_model.bin";
    }
    if (has_bin && !has_safetensors) {
      return torch_save_sources(join_path(path, "pytorch_model.bin"), fs);
    }
  }
  return safetensors_sources(path, fs);
}

}  // namespace shardweave
