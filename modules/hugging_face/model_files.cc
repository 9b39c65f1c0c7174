#include "shardweave/modules/hugging_face/model_files.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <map>
#include <set>
#include <utility>

#include "ATen/ops/empty.h"
#include "c10/core/GradMode.h"
#include "nlohmann/json.hpp"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/modules/checkpoint/agree.h"
#include "shardweave/modules/checkpoint/checkpoint_directory.h"
#include "shardweave/modules/checkpoint/safetensors_tensor.h"
#include "shardweave/modules/hugging_face/model_config.h"
#include "shardweave/modules/hugging_face/names.h"

namespace shardweave {
namespace {

using namespace hugging_face_internal;

constexpr char kIndexName[] = "model.safetensors.index.json";
constexpr char kConfigName[] = "config.json";

// A tensor of a file, and where its bytes come from.
struct Planned {
  StoredTensor stored;
  TensorSource source;
};

std::vector<Planned> planned(std::string_view kind, const std::vector<TensorSource>& sources,
                             const ModelFilesOptions& options) {
  std::vector<Planned> result;
  for (const TensorSource& source : sources) {
    if (is_made_by_configuration(kind, source.name)) continue;
    DType dtype = source.dtype;
    if (options.dtype.has_value() && at::isFloatingType(scalar_type_of(dtype))) {
      dtype = safetensors_dtype_of(*options.dtype);
    }
    for (FilePart& part : file_parts(kind, source.name, source.shape)) {
      result.push_back({{.name = part.name, .dtype = dtype, .shape = part.shape},
                        part_of(source, part.box, part.name, part.shape)});
    }
  }
  // As they are written.
  std::stable_sort(result.begin(), result.end(), [](const Planned& a, const Planned& b) {
    return element_size(a.stored.dtype) > element_size(b.stored.dtype);
  });
  return result;
}

absl::Status append(SafetensorsWriter& writer, const Planned& planned) {
  const TensorSource& source = planned.source;
  at::Tensor tensor = at::empty(at::IntArrayRef(source.shape.data(), source.shape.size()),
                                at::TensorOptions(scalar_type_of(source.dtype)));
  const Box whole = whole_box(source.shape);
  if (whole.numel() == 0) return absl::OkStatus();
  absl::Status status = source.read(whole, whole, tensor.data_ptr());
  if (!status.ok()) return status;
  tensor = tensor.to(scalar_type_of(planned.stored.dtype));
  return writer.append(tensor.const_data_ptr(), static_cast<int64_t>(tensor.nbytes()));
}

absl::Status write_files(const std::string& directory, const std::vector<Planned>& tensors,
                         const DividedFiles& files, const ModelFilesOptions& options,
                         const std::shared_ptr<FileSystem>& fs) {
  size_t i = 0;
  for (size_t f = 0; f < files.names.size(); ++f) {
    std::vector<StoredTensor> infos;
    for (size_t k = i; k < tensors.size() && files.file_of[k] == f; ++k) {
      infos.push_back(tensors[k].stored);
    }
    const size_t count = infos.size();
    auto writer = SafetensorsWriter::create(join_path(directory, files.names[f]), std::move(infos),
                                            {{"format", "pt"}}, fs);
    if (!writer.ok()) return writer.status();
    for (const size_t end = i + count; i < end; ++i) {
      absl::Status status = append(**writer, tensors[i]);
      if (!status.ok()) return status;
      if (options.tensor_done != nullptr) options.tensor_done(tensors[i].source.bytes());
    }
    absl::Status status = (*writer)->finish();
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

// The directory around it, and its name there.
std::pair<std::string, std::string> split_path(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  const size_t slash = path.find_last_of('/');
  if (slash == std::string::npos) return {".", path};
  return {slash == 0 ? "/" : path.substr(0, slash), path.substr(slash + 1)};
}

}  // namespace

namespace hugging_face_internal {

int64_t bytes_of(const StoredTensor& tensor) {
  return whole_box(tensor.shape).numel() * element_size(tensor.dtype);
}

absl::Status check_options(const ModelFilesOptions& options) {
  if (options.max_file_bytes <= 0) {
    return absl::InvalidArgumentError(
        str_cat("max_file_bytes is ", options.max_file_bytes, "; wanted 1 or more"));
  }
  if (options.dtype.has_value() && !at::isFloatingType(*options.dtype)) {
    return absl::InvalidArgumentError(str_cat("dtype is ", c10::toString(*options.dtype),
                                              "; wanted one of floating-point numbers"));
  }
  if (!options.dtype.has_value()) return absl::OkStatus();
  return checkpoint_internal::status_of([&] {
    (void)safetensors_dtype_of(*options.dtype);  // there are more of 8 bits and less
    return absl::OkStatus();
  });
}

absl::Status check_names(const std::vector<StoredTensor>& tensors) {
  std::set<std::string_view> names;
  for (const StoredTensor& tensor : tensors) {
    if (names.insert(tensor.name).second) continue;
    return absl::InvalidArgumentError(
        str_cat("two tensors would be called \"", tensor.name, "\" in the files"));
  }
  return absl::OkStatus();
}

std::string torch_name(const std::vector<StoredTensor>& tensors) {
  std::map<DType, int64_t> numel;
  for (const StoredTensor& tensor : tensors) {
    if (at::isFloatingType(scalar_type_of(tensor.dtype))) {
      numel[tensor.dtype] += whole_box(tensor.shape).numel();
    }
  }
  DType most = DType::kF32;
  int64_t largest = -1;
  for (const auto& [dtype, count] : numel) {
    if (count <= largest) continue;
    largest = count;
    most = dtype;
  }
  switch (most) {
    case DType::kF64:
      return "float64";
    case DType::kF16:
      return "float16";
    case DType::kBF16:
      return "bfloat16";
    default:
      return "float32";
  }
}

DividedFiles divide(const std::vector<StoredTensor>& tensors, int64_t max_file_bytes) {
  DividedFiles files;
  int64_t bytes = 0;
  size_t file = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int64_t more = bytes_of(tensors[i]);
    if (bytes > 0 && more > max_file_bytes - bytes) {
      ++file;
      bytes = 0;
    }
    bytes += more;
    files.file_of.push_back(file);
  }
  const size_t count = file + 1;
  for (size_t f = 0; f < count; ++f) {
    std::array<char, 64> name = {};
    std::snprintf(name.data(), name.size(), "model-%05zu-of-%05zu.safetensors", f + 1, count);
    files.names.emplace_back(count == 1 ? "model.safetensors" : name.data());
  }
  return files;
}

std::string index_json(const std::vector<StoredTensor>& tensors, const DividedFiles& files) {
  nlohmann::ordered_json map = nlohmann::ordered_json::object();
  std::map<std::string, std::string> sorted;
  int64_t bytes = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    sorted[tensors[i].name] = files.names[files.file_of[i]];
    bytes += bytes_of(tensors[i]);
  }
  for (const auto& [name, file] : sorted) map[name] = file;
  const nlohmann::ordered_json index = {{"metadata", {{"total_size", bytes}}},
                                        {"weight_map", std::move(map)}};
  return index.dump(2) + "\n";
}

absl::StatusOr<std::string> begin_directory(FileSystem& fs, const std::string& path) {
  const auto [parent, name] = split_path(path);
  if (name.empty() || name == "." || name == "..") {
    return absl::InvalidArgumentError(str_cat("'", path, "' is no new directory"));
  }
  absl::Status status = create_directories(fs, parent);
  if (!status.ok()) return status;
  const absl::StatusOr<std::vector<DirectoryEntry>> entries = fs.list(parent);
  if (!entries.ok()) return entries.status();
  for (const DirectoryEntry& entry : *entries) {
    if (entry.name != name) continue;
    return absl::AlreadyExistsError(
        str_cat("'", path, "' is there already; wanted a new directory"));
  }
  std::string temporary =
      join_path(parent, str_cat(name, ".tmp-", checkpoint_internal::new_nonce()));
  status = fs.create_directory(temporary);
  if (!status.ok()) return status;
  return temporary;
}

absl::Status publish_directory(FileSystem& fs, const std::string& temporary,
                               const std::string& path, const std::string& config_json,
                               const std::vector<StoredTensor>& tensors,
                               const DividedFiles& files) {
  const auto [parent, name] = split_path(path);
  const auto write = [&](const char* file, const std::string& text) {
    return checkpoint_internal::write_file(fs, join_path(temporary, file), text);
  };
  absl::Status status = checkpoint_internal::status_of([&] {
    absl::Status written;
    if (!config_json.empty()) written = write(kConfigName, config_json);
    if (written.ok() && files.names.size() > 1) {
      written = write(kIndexName, index_json(tensors, files));
    }
    return written;
  });
  if (status.ok()) status = fs.sync_directory(temporary);
  if (status.ok()) {
    status = fs.rename(temporary, join_path(parent, name));
    // Over another run's that has been faster.
    if (absl::IsFailedPrecondition(status)) {
      status = absl::AlreadyExistsError(std::string(status.message()));
    }
  }
  if (status.ok()) return fs.sync_directory(parent);
  (void)remove_all(fs, temporary);
  return status;
}

}  // namespace hugging_face_internal

absl::Status write_model_files(const std::string& directory, std::string_view config_json,
                               const std::vector<TensorSource>& sources,
                               const ModelFilesOptions& options) {
  const c10::AutoGradMode no_grad(false);
  absl::Status status = check_options(options);
  if (!status.ok()) return status;
  const std::shared_ptr<FileSystem> fs =
      options.file_system != nullptr ? options.file_system : posix_file_system();
  std::string kind;
  if (!config_json.empty()) {
    const absl::StatusOr<std::string> found = model_kind(config_json);
    if (!found.ok()) return found.status();
    kind = *found;
  }
  const std::vector<Planned> tensors = planned(kind, sources, options);
  std::vector<StoredTensor> stored;
  for (const Planned& each : tensors) stored.push_back(each.stored);
  status = check_names(stored);
  if (!status.ok()) return status;
  const DividedFiles files = divide(stored, options.max_file_bytes);
  std::string config;
  if (!config_json.empty()) {
    absl::StatusOr<std::string> with = config_with_dtype(config_json, torch_name(stored));
    if (!with.ok()) return with.status();
    config = *std::move(with);
  }
  const absl::StatusOr<std::string> temporary = begin_directory(*fs, directory);
  if (!temporary.ok()) return temporary.status();
  status = checkpoint_internal::status_of(
      [&] { return write_files(*temporary, tensors, files, options, fs); });
  if (!status.ok()) {
    (void)remove_all(*fs, *temporary);
    return status;
  }
  return publish_directory(*fs, *temporary, directory, config, stored, files);
}

}  // namespace shardweave
