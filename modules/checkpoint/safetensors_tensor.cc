#include "shardweave/modules/checkpoint/safetensors_tensor.h"

#include "ATen/ops/empty.h"
#include "c10/core/GradMode.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/dtensor.h"

namespace shardweave {

DType safetensors_dtype_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return DType::kF64;
    case at::kFloat:
      return DType::kF32;
    case at::kHalf:
      return DType::kF16;
    case at::kBFloat16:
      return DType::kBF16;
    case at::kFloat8_e4m3fn:
      return DType::kF8E4M3;
    case at::kFloat8_e5m2:
      return DType::kF8E5M2;
    case at::kLong:
      return DType::kI64;
    case at::kInt:
      return DType::kI32;
    case at::kShort:
      return DType::kI16;
    case at::kChar:
      return DType::kI8;
    case at::kUInt64:
      return DType::kU64;
    case at::kUInt32:
      return DType::kU32;
    case at::kUInt16:
      return DType::kU16;
    case at::kByte:
      return DType::kU8;
    case at::kBool:
      return DType::kBool;
    default:
      throw Error(absl::InvalidArgumentError(
          str_cat("safetensors files have no ", c10::toString(dtype), " here")));
  }
}

at::ScalarType scalar_type_of(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return at::kDouble;
    case DType::kF32:
      return at::kFloat;
    case DType::kF16:
      return at::kHalf;
    case DType::kBF16:
      return at::kBFloat16;
    case DType::kF8E4M3:
      return at::kFloat8_e4m3fn;
    case DType::kF8E5M2:
      return at::kFloat8_e5m2;
    case DType::kI64:
      return at::kLong;
    case DType::kI32:
      return at::kInt;
    case DType::kI16:
      return at::kShort;
    case DType::kI8:
      return at::kChar;
    case DType::kU64:
      return at::kUInt64;
    case DType::kU32:
      return at::kUInt32;
    case DType::kU16:
      return at::kUInt16;
    case DType::kU8:
      return at::kByte;
    case DType::kBool:
      return at::kBool;
  }
  return at::kByte;
}

at::Tensor read_tensor(const SafetensorsFile& file, std::string_view name,
                       const std::optional<Box>& box) {
  const StoredTensor* info = file.find(name);
  if (info == nullptr) {
    throw Error("read_tensor",
                absl::NotFoundError(str_cat("'", file.path(), "' has no tensor \"", name, "\"")));
  }
  const Box part = box.value_or(whole_box(info->shape));
  bool fits = part.shape.size() == info->shape.size() && part.offset.size() == info->shape.size();
  for (size_t d = 0; fits && d < part.shape.size(); ++d) {
    fits = part.shape[d] >= 0 && part.shape[d] <= info->shape[d];
  }
  if (!fits) {
    throw Error("read_tensor", absl::InvalidArgumentError(str_cat(
                                   "a box of ", part.shape.size(), " dimensions is not in \"", name,
                                   "\", ", whole_box(info->shape).to_string())));
  }
  at::Tensor result = at::empty(at::IntArrayRef(part.shape.data(), part.shape.size()),
                                at::TensorOptions(scalar_type_of(info->dtype)));
  const absl::Status status = file.read(*info, part, result.data_ptr());
  if (!status.ok()) throw Error("read_tensor", status);
  return result;
}

void write_safetensors(const std::string& path,
                       const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  const c10::AutoGradMode no_grad(false);
  std::vector<StoredTensor> infos;
  std::map<std::string_view, const at::Tensor*> by_name;
  for (const auto& [name, tensor] : tensors) {
    if (!tensor.defined() || is_dtensor(tensor) || tensor.layout() != at::kStrided) {
      throw Error("write_safetensors", absl::InvalidArgumentError(str_cat(
                                           "\"", name,
                                           "\" is no dense plain tensor; wanted one (of a DTensor "
                                           "full_tensor(), or save a checkpoint)")));
    }
    const at::IntArrayRef sizes = tensor.sizes();
    infos.push_back({.name = name,
                     .dtype = safetensors_dtype_of(tensor.scalar_type()),
                     .shape = Dims(sizes.begin(), sizes.end())});
    by_name.emplace(name, &tensor);
  }
  const auto fs = posix_file_system();
  auto writer = SafetensorsWriter::create(path, std::move(infos), metadata, fs);
  if (!writer.ok()) throw Error("write_safetensors", writer.status());
  const auto check = [&](const absl::Status& status) {
    if (!status.ok()) throw Error("write_safetensors", status);
  };
  for (const StoredTensor& info : (*writer)->tensors()) {
    // What LibTorch has put off to negate is negated now.
    const at::Tensor bytes = by_name.at(info.name)->to(at::kCPU).resolve_neg().contiguous();
    check((*writer)->append(bytes.const_data_ptr(), info.end - info.begin));
  }
  check((*writer)->finish());
  const size_t slash = path.find_last_of('/');
  check(fs->sync_directory(slash == std::string::npos ? "." : path.substr(0, slash + 1)));
}

}  // namespace shardweave
