#include "shardweave/modules/checkpoint/torch_files.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/strings/numbers.h"
#include "absl/types/span.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/modules/checkpoint/pickle.h"
#include "shardweave/modules/checkpoint/safetensors_index.h"
#include "shardweave/modules/checkpoint/strict_json.h"
#include "shardweave/modules/checkpoint/zip_directory.h"

namespace shardweave {
namespace {

using namespace checkpoint_internal;
using Kind = PickleValue::Kind;

constexpr int64_t kMostPickleBytes = int64_t{1} << 30;
constexpr int64_t kMostBytesOfOneTensor = int64_t{1} << 16;  // its pickle has one line
constexpr int kMostLevels = 16;                              // of dicts in dicts
constexpr size_t kMostDims = 64;
constexpr char kBinIndexName[] = "pytorch_model.bin.index.json";
constexpr int64_t kMostIndexBytes = 100'000'000;
// Names that are made, with kOneName for each: a pickle can have one dict in many places, and a text in many names.
constexpr int64_t kMostNameBytes = int64_t{1} << 26, kMostChunkNameBytes = int64_t{1} << 30;
constexpr int64_t kOneName = 256;

absl::Status wrong(const std::string& path, std::string_view what) {
  return absl::InvalidArgumentError(str_cat("'", path, "': ", what));
}
absl::Status in_file(const std::string& path, const absl::Status& status) {
  return absl::Status(status.code(), str_cat("'", path, "': ", std::string(status.message())));
}

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

// Of what has no storage of its own in Python: by _rebuild_tensor_v3.
std::optional<DType> dtype_of_name(std::string_view name) {
  static const auto* const kNames =
      new std::map<std::string_view, DType>{{"torch.float8_e4m3fn", DType::kF8E4M3},
                                            {"torch.float8_e5m2", DType::kF8E5M2},
                                            {"torch.uint64", DType::kU64},
                                            {"torch.uint32", DType::kU32},
                                            {"torch.uint16", DType::kU16},
                                            {"torch.float64", DType::kF64},
                                            {"torch.float32", DType::kF32},
                                            {"torch.float16", DType::kF16},
                                            {"torch.bfloat16", DType::kBF16},
                                            {"torch.int64", DType::kI64},
                                            {"torch.int32", DType::kI32},
                                            {"torch.int16", DType::kI16},
                                            {"torch.int8", DType::kI8},
                                            {"torch.uint8", DType::kU8},
                                            {"torch.bool", DType::kBool}};
  const auto found = kNames->find(name);
  if (found == kNames->end()) return std::nullopt;
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

// The place of the last element behind the first, counted in elements; nothing if it is no number. None is empty.
std::optional<int64_t> last_place(const Dims& shape, const Dims& strides) {
  int64_t last = 0;
  for (size_t d = 0; d < shape.size(); ++d) {
    int64_t more = 0;
    if (__builtin_mul_overflow(shape[d] - 1, strides[d], &more) ||
        __builtin_add_overflow(last, more, &last)) {
      return std::nullopt;
    }
  }
  return last;
}

// --- Tensors that are not contiguous ---

// Elements that lie `from` apart in a file, and `to` in memory.
struct Loop {
  int64_t count = 1, from = 0, to = 0;
};

// Calls with each place that the loops go through, in the file and in memory.
void for_each_place(absl::Span<const Loop> loops, absl::FunctionRef<void(int64_t, int64_t)> call) {
  std::vector<int64_t> index(loops.size(), 0);
  int64_t from = 0, to = 0;
  while (true) {
    call(from, to);
    size_t i = loops.size();
    for (; i > 0; --i) {
      const Loop& loop = loops[i - 1];
      from += loop.from;
      to += loop.to;
      if (++index[i - 1] < loop.count) break;
      from -= loop.from * loop.count;
      to -= loop.to * loop.count;
      index[i - 1] = 0;
    }
    if (i == 0) return;
  }
}

// What lies near is read together, with what is between: the system reads whole pages.
constexpr int64_t kMostGapBytes = 4096, kMostSpanBytes = int64_t{1} << 20;

// The elements of the loops, to memory: from the first of them, which is at `place` in the file.
absl::Status read_loops(const ReadableFile& file, int64_t place, std::vector<Loop> loops,
                        int64_t element, char* out) {
  // In the order of the file, whatever order the dimensions have; what is there many times is read as many times.
  const auto width = [](const Loop& loop) {
    return loop.from == 0 ? std::numeric_limits<int64_t>::max() : loop.from;
  };
  std::stable_sort(loops.begin(), loops.end(),
                   [&](const Loop& a, const Loop& b) { return width(a) > width(b); });
  size_t outer = loops.size();  // the loops from here on are read together
  int64_t span = 1;
  for (; outer > 0; --outer) {
    const Loop loop = loops[outer - 1];
    if (loop.from == 0 || (loop.from - span) * element > kMostGapBytes) break;
    const int64_t some = (kMostSpanBytes / element - span) / loop.from + 1;
    if (some <= 1) break;
    if (loop.count <= some) {
      span += (loop.count - 1) * loop.from;
      continue;
    }
    // A part of it at a time.
    const int64_t whole = loop.count / some, rest = loop.count % some;
    std::vector<Loop> parts = loops;
    parts[outer - 1] = {some, loop.from, loop.to};
    parts.push_back({whole, loop.from * some, loop.to * some});
    absl::Status status = read_loops(file, place, std::move(parts), element, out);
    if (!status.ok() || rest == 0) return status;
    loops[outer - 1].count = rest;
    const int64_t done = whole * some;
    return read_loops(file, place + done * loop.from * element, std::move(loops), element,
                      out + done * loop.to * element);
  }
  std::vector<char> bytes(static_cast<size_t>(span * element));
  const auto inner = absl::MakeConstSpan(loops).subspan(outer);
  absl::Status status;
  for_each_place(absl::MakeConstSpan(loops).first(outer), [&](int64_t from, int64_t to) {
    if (!status.ok()) return;
    status = file.read_at(place + from * element, bytes.data(), bytes.size());
    if (!status.ok()) return;
    for_each_place(inner, [&](int64_t its_from, int64_t its_to) {
      std::memcpy(out + (to + its_to) * element, bytes.data() + its_from * element,
                  static_cast<size_t>(element));
    });
  });
  return status;
}

// `place`: of the tensor's first element.
absl::Status read_strided(const ReadableFile& file, int64_t place, const Dims& strides,
                          int64_t element, const Box& part, const Box& to, void* out) {
  std::vector<Loop> loops;
  int64_t in_memory = 0, to_stride = 1;
  for (size_t d = part.shape.size(); d-- > 0;) {
    if (part.shape[d] == 0) return absl::OkStatus();
    place += part.offset[d] * strides[d] * element;
    in_memory += (part.offset[d] - to.offset[d]) * to_stride;
    if (part.shape[d] > 1) loops.push_back({part.shape[d], strides[d], to_stride});
    to_stride *= to.shape[d];
  }
  return read_loops(file, place, std::move(loops), element,
                    static_cast<char*>(out) + in_memory * element);
}

// A pickle is as large in memory as what made it, times some.
size_t most_memory_for(size_t pickle_bytes) {
  constexpr size_t kMost = size_t{2} << 30, kAlways = size_t{1} << 20, kTimes = 256;
  return std::min(kMost, kAlways + kTimes * pickle_bytes);
}

// --- torch.save ---

// What it writes: a zip archive with data.pkl, and a record for each storage.
class TorchArchive {
 public:
  static absl::StatusOr<std::unique_ptr<TorchArchive>> open(const std::string& path,
                                                            std::shared_ptr<ReadableFile> file,
                                                            int64_t begin, int64_t size,
                                                            int64_t most_pickle_bytes) {
    char magic[4] = {};
    if (size < 4 || !file->read_at(begin, magic, 4).ok() || std::memcmp(magic, "PK\3\4", 4) != 0) {
      return absl::UnimplementedError(str_cat(
          "'", path, "' is no zip archive; wanted a file by torch.save of PyTorch 1.6 or later"));
    }
    auto archive = std::make_unique<TorchArchive>();
    archive->path_ = path;
    archive->file_ = file;
    absl::StatusOr<ZipDirectory> records = ZipDirectory::read(std::move(file), begin, size);
    if (!records.ok()) return in_file(path, records.status());
    archive->records_ = *std::move(records);
    absl::Status status = archive->check_format();
    if (!status.ok()) return in_file(path, status);
    const absl::StatusOr<std::string> text = archive->read("data.pkl", most_pickle_bytes);
    if (!text.ok()) return in_file(path, text.status());
    absl::StatusOr<Pickle> pickle = Pickle::parse(*text, most_memory_for(text->size()));
    if (!pickle.ok()) {
      return wrong(path, str_cat("data.pkl: ", std::string(pickle.status().message())));
    }
    archive->pickle_ = *std::move(pickle);
    return archive;
  }

  const PickleValue& value() const { return pickle_->value(); }

  // Of what the pickle makes by torch._utils._rebuild_tensor_v2, or v3, and of a parameter around it.
  absl::StatusOr<TensorSource> tensor(const std::string& name, const PickleValue& value) {
    const auto refuse = [&](std::string_view what) {
      return absl::UnimplementedError(str_cat("'", path_, "': \"", name, "\" ", what));
    };
    const std::optional<Call> call = dense_call(value);
    if (!call.has_value()) {
      return refuse("is no dense tensor, but what Python makes by another function");
    }
    const std::vector<const PickleValue*>& args = *call->args;
    const bool names_dtype = call->function == kRebuildV3;
    const PickleValue* persistent = args.size() < 4 ? nullptr : args[0];
    const PickleValue* id = persistent == nullptr || persistent->kind != Kind::kPersistent
                                ? nullptr
                                : persistent->items[0];
    if (id == nullptr || id->kind != Kind::kList || id->items.size() < 5 ||
        id->items[0]->kind != Kind::kText || id->items[0]->text != "storage" ||
        id->items[1]->kind != Kind::kGlobal || id->items[2]->kind != Kind::kText ||
        id->items[4]->kind != Kind::kInt || args[1]->kind != Kind::kInt || args[1]->number < 0 ||
        (names_dtype && (args.size() < 7 || args[6]->kind != Kind::kGlobal))) {
      return wrong(path_, str_cat("\"", name, "\" is no tensor as PyTorch saves it"));
    }
    const std::string& type = id->items[1]->text;
    const bool is_untyped =
        type == "torch.storage.UntypedStorage" || type == "torch.UntypedStorage";
    const std::optional<DType> dtype =
        names_dtype ? dtype_of_name(args[6]->text) : dtype_of_storage(type);
    if (!dtype.has_value()) return refuse(str_cat("has a ", names_dtype ? args[6]->text : type));
    if (names_dtype && !is_untyped) return refuse(str_cat("has a ", type, " of another dtype"));
    const std::optional<Dims> shape = sizes_of(*args[2]), strides = sizes_of(*args[3]);
    if (!shape.has_value() || !strides.has_value() || shape->size() != strides->size()) {
      return wrong(path_, str_cat("\"", name, "\" has no shape"));
    }
    const size_t metadata = names_dtype ? 7 : 6;
    if (args.size() > metadata && !says_nothing(*args[metadata])) {
      return refuse("is negated or conjugated by whoever reads it");
    }
    const int64_t element = element_size(*dtype);
    const std::optional<int64_t> bytes = bytes_of(*shape, element);
    if (!bytes.has_value()) return wrong(path_, str_cat("\"", name, "\" is too large"));
    const absl::StatusOr<ZipDirectory::Place> record = storage(id->items[2]->text);
    if (!record.ok()) return record.status();
    const int64_t first = args[1]->number, held = record->size / element;  // elements
    const int64_t numel = id->items[4]->number;
    bool fits = numel >= 0 && numel <= (is_untyped ? record->size : held) && first <= held;
    if (fits && *bytes > 0) {
      const std::optional<int64_t> last = last_place(*shape, *strides);
      fits = last.has_value() && *last < held - first;
    }
    if (!fits) return wrong(path_, str_cat("\"", name, "\" reaches out of its storage"));
    // What is read is no more than there is.
    if (*bytes > record->size) return refuse("has its elements many times (an expanded one)");
    TensorSource source = {.name = name, .dtype = *dtype, .shape = *shape};
    const int64_t place = record->begin + first * element;
    if (*bytes > 0 && !is_contiguous(*shape, *strides)) {
      source.read = [file = file_, place, element, strides = *strides](const Box& part,
                                                                       const Box& to, void* out) {
        return read_strided(*file, place, strides, element, part, to, out);
      };
      return source;
    }
    source.read = [file = file_, place, element, whole = whole_box(*shape)](
                      const Box& part, const Box& to, void* out) {
      absl::Status status;
      for_each_run(part, whole, to, [&](int64_t from, int64_t at, int64_t count) {
        if (!status.ok()) return;
        status = file->read_at(place + from * element, static_cast<char*>(out) + at * element,
                               static_cast<size_t>(count * element));
      });
      return status;
    };
    return source;
  }

 private:
  static constexpr std::string_view kRebuildV2 = "torch._utils._rebuild_tensor_v2",
                                    kRebuildV3 = "torch._utils._rebuild_tensor_v3";

  struct Call {
    std::string_view function;
    const std::vector<const PickleValue*>* args;
  };
  // That of a dense tensor, maybe inside that of a parameter, or of a tensor with attributes, which nobody wants here.
  static std::optional<Call> dense_call(const PickleValue& value) {
    const PickleValue* object = &value;
    for (int level = 0; level < 4; ++level) {
      if (object->kind != Kind::kObject || object->called->kind != Kind::kGlobal) break;
      const std::string& function = object->called->text;
      const std::vector<const PickleValue*>& args = object->items;
      if (function == kRebuildV2 || function == kRebuildV3) return Call{function, &args};
      if (function == "torch._tensor._rebuild_from_type_v2" && args.size() >= 3 &&
          args[0]->kind == Kind::kGlobal && args[1]->kind == Kind::kGlobal &&
          (args[1]->text == "torch.Tensor" || args[1]->text == "torch.nn.parameter.Parameter") &&
          args[2]->kind == Kind::kList &&
          (args[0]->text == kRebuildV2 || args[0]->text == kRebuildV3)) {
        return Call{args[0]->text, &args[2]->items};
      }
      if ((function != "torch._utils._rebuild_parameter" &&
           function != "torch._utils._rebuild_parameter_with_state") ||
          args.empty()) {
        break;
      }
      object = args[0];
    }
    return std::nullopt;
  }

  // {"conj": False, "neg": False}, and less.
  static bool says_nothing(const PickleValue& metadata) {
    if (metadata.kind == Kind::kNone) return true;
    return metadata.kind == Kind::kDict &&
           std::all_of(metadata.entries.begin(), metadata.entries.end(), [](const auto& entry) {
             return entry.second->kind == Kind::kBool && entry.second->number == 0;
           });
  }

  absl::StatusOr<ZipDirectory::Place> place_of(const std::string& record) const {
    absl::StatusOr<ZipDirectory::Place> place = records_->find(record);
    if (!absl::IsNotFound(place.status())) return place;
    // The archive is wrong, not that there is none.
    return absl::InvalidArgumentError(std::string(place.status().message()));
  }

  absl::StatusOr<std::string> read(const std::string& record, int64_t most_bytes) const {
    const absl::StatusOr<ZipDirectory::Place> place = place_of(record);
    if (!place.ok()) return place.status();
    if (place->size > most_bytes) {
      return absl::InvalidArgumentError(str_cat("its ", record, " is too large"));
    }
    std::string text(static_cast<size_t>(place->size), '\0');
    absl::Status status = file_->read_at(place->begin, text.data(), text.size());
    if (!status.ok()) return status;
    return text;
  }

  // Whether its numbers mean what they do here.
  absl::Status check_format() const {
    constexpr int64_t kNewest = 10;
    if (records_->contains("byteorder")) {
      const absl::StatusOr<std::string> order = read("byteorder", 8);
      if (!order.ok()) return order.status();
      if (*order != "little") {
        return absl::UnimplementedError("has big-endian numbers; wanted little-endian ones");
      }
    }
    if (!records_->contains("version")) return absl::OkStatus();
    const absl::StatusOr<std::string> text = read("version", 20);
    if (!text.ok()) return text.status();
    int64_t version = 0;
    if (!absl::SimpleAtoi(*text, &version) || version < 1) {
      return absl::InvalidArgumentError("its version is no number");
    }
    if (version <= kNewest) return absl::OkStatus();
    return absl::UnimplementedError(
        str_cat("is of version ", version, " of the format; this library reads up to ", kNewest));
  }

  // Where its bytes are in the file, and how many.
  absl::StatusOr<ZipDirectory::Place> storage(const std::string& key) {
    if (const auto known = storages_.find(key); known != storages_.end()) return known->second;
    const absl::StatusOr<ZipDirectory::Place> place = place_of(str_cat("data/", key));
    if (!place.ok()) return in_file(path_, place.status());
    return storages_.try_emplace(key, *place).first->second;
  }

  std::string path_;
  std::shared_ptr<ReadableFile> file_;
  std::optional<ZipDirectory> records_;
  std::optional<Pickle> pickle_;
  std::map<std::string, ZipDirectory::Place> storages_;  // that have been asked for
};

bool is_tensor(const PickleValue& value) {
  return value.kind == Kind::kObject && value.called->kind == Kind::kGlobal &&
         (value.called->text.starts_with("torch._utils._rebuild") ||
          value.called->text.starts_with("torch._tensor._rebuild"));
}

// All tensors of a dict or a list, and of those in it.
class Collector {
 public:
  Collector(TorchArchive& archive, const std::string& path) : archive_(archive), path_(path) {}

  absl::Status collect(const std::string& name, const PickleValue& value, int levels) {
    if (is_tensor(value)) {
      absl::StatusOr<TensorSource> tensor = archive_.tensor(name, value);
      if (!tensor.ok()) return tensor.status();
      found_.push_back(*std::move(tensor));
      return absl::OkStatus();
    }
    const bool is_dict = value.kind == Kind::kDict || value.is_call_of("collections.OrderedDict");
    const bool is_list = value.kind == Kind::kList;
    if ((is_dict || is_list) && levels == 0) {
      return wrong(path_, "dicts in dicts, or lists, more than 16 of them");
    }
    if (is_list) {
      for (size_t i = 0; i < value.items.size(); ++i) {
        const PickleValue& item = *value.items[i];
        // Texts and numbers, of which lists are long.
        const bool may_hold =
            item.kind == Kind::kDict || item.kind == Kind::kList || item.kind == Kind::kObject;
        left_ -= may_hold ? static_cast<int64_t>(name.size()) + kOneItem : 1;
        if (left_ < 0) return too_many();
        if (!may_hold) continue;
        absl::Status status = collect(below(name, std::to_string(i)), item, levels - 1);
        if (!status.ok()) return status;
      }
      return absl::OkStatus();
    }
    if (!is_dict && value.kind != Kind::kObject) return absl::OkStatus();
    if (!is_dict) return refuse_tensors_in(name, value, "in an object");
    if (!value.items.empty()) {
      return absl::UnimplementedError(
          str_cat("'", path_, "': \"", name,
                  "\" is an OrderedDict that is given its items as Python 2 did"));
    }
    for (const auto& [key, each] : value.entries) {
      left_ -= kOneName + static_cast<int64_t>(name.size() + key->text.size());
      if (left_ < 0) return too_many();
      absl::Status status;
      if (key->kind == Kind::kText) {
        status = collect(below(name, key->text), *each, levels - 1);
      } else if (key->kind == Kind::kInt) {
        status = collect(below(name, std::to_string(key->number)), *each, levels - 1);
      } else {
        status =
            refuse_tensors_in(name, *each, "under a key that is neither a text nor a whole number");
      }
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  std::vector<TensorSource>& found() { return found_; }

 private:
  static constexpr int64_t kOneItem = 16;

  static std::string below(const std::string& name, const std::string& key) {
    return name.empty() ? key : str_cat(name, ".", key);
  }
  absl::Status too_many() const { return wrong(path_, "its names are too long, or too many"); }

  // A tensor that would have no name is not passed over.
  absl::Status refuse_tensors_in(const std::string& name, const PickleValue& value,
                                 std::string_view what) {
    std::vector<const PickleValue*> open = {&value};
    while (!open.empty()) {
      const PickleValue& each = *open.back();
      open.pop_back();
      if (!without_.insert(&each).second) continue;
      if (is_tensor(each)) {
        return absl::UnimplementedError(
            str_cat("'", path_, "': ", name.empty() ? "the file" : str_cat("\"", name, "\""),
                    " has a tensor ", what,
                    "; wanted tensors in dicts and lists, of which they get "
                    "their names"));
      }
      open.insert(open.end(), each.items.begin(), each.items.end());
      for (const auto& [key, of] : each.entries) open.push_back(of);
      if (each.state != nullptr) open.push_back(each.state);
    }
    return absl::OkStatus();
  }

  TorchArchive& archive_;
  const std::string& path_;
  int64_t left_ = kMostNameBytes;
  std::vector<TensorSource> found_;
  std::set<const PickleValue*> without_;  // that are no tensors, and have none in them
};

absl::StatusOr<std::shared_ptr<ReadableFile>> open_file(FileSystem& fs, const std::string& path) {
  absl::StatusOr<std::unique_ptr<ReadableFile>> file = fs.open(path, Symlinks::kFollow);
  if (!file.ok()) return file.status();
  return std::shared_ptr<ReadableFile>(*std::move(file));
}

bool ends_in(const std::string& name, std::string_view end) {
  return name.ends_with(end);
}

// Of an index of several files by torch.save, as transformers wrote it.
absl::StatusOr<std::vector<TensorSource>> indexed_sources(const std::string& path,
                                                          const std::shared_ptr<FileSystem>& fs) {
  const absl::StatusOr<std::string> text = read_file(*fs, path, kMostIndexBytes, Symlinks::kFollow);
  if (!text.ok()) return text.status();
  const auto files = parse_safetensors_index(*text);
  if (!files.ok()) return in_file(path, files.status());
  const size_t slash = path.find_last_of('/');
  const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  std::map<std::string, std::map<std::string, TensorSource>> open;  // by file
  std::vector<TensorSource> sources;
  for (const auto& [name, file] : *files) {
    const std::string file_path = join_path(folder, file);
    const auto [there, is_new] = open.try_emplace(file);
    if (is_new) {
      absl::StatusOr<std::vector<TensorSource>> its = torch_save_sources(file_path, fs);
      if (!its.ok()) return its.status();
      for (TensorSource& source : *its) {
        std::string key = source.name;
        there->second.emplace(std::move(key), std::move(source));
      }
    }
    const auto found = there->second.find(name);
    if (found == there->second.end()) {
      return wrong(file_path, str_cat("no tensor \"", name, "\", which the index says is there"));
    }
    sources.push_back(found->second);
  }
  if (sources.empty()) return wrong(path, "no tensors");
  return sources;
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
  Collector collector(**archive, path);
  const absl::Status status = collector.collect("", (*archive)->value(), kMostLevels);
  if (!status.ok()) return status;
  std::vector<TensorSource> sources = std::move(collector.found());
  if (sources.empty()) return wrong(path, "no dict of tensors");
  std::set<std::string> names;
  for (const TensorSource& source : sources) {
    if (!names.insert(source.name).second) {
      return wrong(path, str_cat("\"", source.name, "\" is there twice"));
    }
  }
  return sources;
}

namespace {

// What DCP's metadata says of a tensor, beside the files that have it: its properties begin with the dtype.
std::optional<DType> dtype_said_of(const PickleValue& info) {
  const PickleValue* properties = info.entry("properties");
  if (properties == nullptr || properties->state == nullptr || properties->state->items.empty()) {
    return std::nullopt;
  }
  return dtype_of_name(properties->state->items[0]->text);
}

}  // namespace

absl::StatusOr<std::vector<TensorSource>> dcp_sources(const std::string& directory,
                                                      const std::shared_ptr<FileSystem>& given) {
  const std::shared_ptr<FileSystem> fs = given != nullptr ? given : posix_file_system();
  const std::string path = join_path(directory, ".metadata");
  const absl::StatusOr<std::string> text =
      read_file(*fs, path, kMostPickleBytes, Symlinks::kFollow);
  if (!text.ok()) return text.status();
  const absl::StatusOr<Pickle> pickle = Pickle::parse(*text, most_memory_for(text->size()));
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
  int64_t comparisons = kMostBoxComparisons;
  for (const auto& [fqn, info] : tensors->entries) {
    if (called_name(*info) != "TensorStorageMetadata") continue;
    if (fqn->kind != Kind::kText) return wrong(path, "a tensor has a name that is no text");
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
      if (!contains(whole_box(*shape), box)) {
        return wrong(path, str_cat("a chunk of \"", name, "\" reaches out of it"));
      }
      if (box.numel() == 0) continue;
      auto found = stored->find({name, std::vector<int64_t>(offset->begin(), offset->end())});
      if (found == stored->end() && chunks->items.size() == 1) found = stored->find({name, {}});
      if (found == stored->end()) {
        return wrong(path,
                     str_cat("the chunk ", box.to_string(), " of \"", name, "\" is in no file"));
      }
      const StoredChunk& place = found->second;
      std::shared_ptr<ReadableFile>& file = open[place.file];
      if (file == nullptr) {
        const std::string where = join_path(directory, place.file);
        auto opened = open.size() <= kMostOpenFiles
                          ? fs->open(where, Symlinks::kFollow)
                          : open_for_each_read(fs, where, Symlinks::kFollow);
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
    const auto two = find_overlap(boxes, comparisons);
    if (!two.ok()) return in_file(path, two.status());
    if (two->has_value()) {
      const auto [first, second] = **two;
      return wrong(path, str_cat("the chunks ", boxes[first].to_string(), " and ",
                                 boxes[second].to_string(), " of \"", name, "\" overlap"));
    }
    if (covered != whole_box(*shape).numel()) {
      return wrong(path, str_cat("chunks of \"", name, "\" do not cover it"));
    }
    const bool is_empty = parts.empty();
    sources.push_back(put_together(name, *shape, std::move(parts)));
    if (is_empty) sources.back().dtype = dtype_said_of(*info).value_or(DType::kF32);
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
  if (ends_in(path, ".bin.index.json")) return indexed_sources(path, fs);
  if (!ends_in(path, ".safetensors") && !ends_in(path, ".json")) {
    const absl::StatusOr<std::vector<DirectoryEntry>> entries = fs->list(path);
    if (!entries.ok()) return entries.status();
    bool has_safetensors = false, has_bin = false, has_bins = false;
    for (const DirectoryEntry& entry : *entries) {
      if (entry.name == ".metadata") return dcp_sources(path, fs);
      has_safetensors = has_safetensors || ends_in(entry.name, ".safetensors");
      has_bin = has_bin || entry.name == "pytorch_model.bin";
      has_bins = has_bins || entry.name == kBinIndexName;
    }
    if (has_bin && !has_safetensors) {
      return torch_save_sources(join_path(path, "pytorch_model.bin"), fs);
    }
    if (has_bins && !has_safetensors) return indexed_sources(join_path(path, kBinIndexName), fs);
  }
  return safetensors_sources(path, fs);
}

}  // namespace shardweave
