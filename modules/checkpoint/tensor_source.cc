#include "shardweave/modules/checkpoint/tensor_source.h"

#include <map>
#include <optional>
#include <utility>

#include "shardweave/comm/str_cat.h"
#include "shardweave/modules/checkpoint/checkpoint_directory.h"
#include "shardweave/modules/checkpoint/safetensors_index.h"

namespace shardweave {
namespace {

// Where a piece of a checkpoint is.
struct OpenPiece {
  std::shared_ptr<SafetensorsFile> file;
  const StoredTensor* info;
  Box box;
};

// The last dimensions of `box` from `first` on, as `origin` sees them.
Box last_dims(const Box& box, size_t first, const Dims& origin) {
  Box result;
  for (size_t d = first; d < box.shape.size(); ++d) {
    result.offset.push_back(box.offset[d] - origin[d]);
    result.shape.push_back(box.shape[d]);
  }
  return result;
}

}  // namespace

absl::StatusOr<std::vector<TensorSource>> checkpoint_sources(
    const std::string& checkpoint, const Manifest& manifest,
    const std::shared_ptr<FileSystem>& fs) {
  std::map<std::string, std::shared_ptr<SafetensorsFile>> open;
  std::vector<TensorSource> sources;
  for (const auto& [name, saved] : manifest.tensors) {
    std::vector<OpenPiece> pieces;
    for (const SavedPiece& piece : saved.pieces) {
      std::shared_ptr<SafetensorsFile>& file = open[piece.file];
      if (file == nullptr) {
        auto opened = open_checkpoint_file(checkpoint, manifest, piece.file, fs);
        if (!opened.ok()) return opened.status();
        file = *std::move(opened);
      }
      const std::string key = piece_name(name, saved.shape, piece.box);
      const StoredTensor* info = file->find(key);
      if (info == nullptr || info->dtype != saved.dtype || info->shape != piece.box.shape) {
        return absl::DataLossError(
            str_cat("'", file->path(), "' has no \"", key, "\" as the manifest says"));
      }
      pieces.push_back({file, info, piece.box});
    }
    sources.push_back({.name = name,
                       .dtype = saved.dtype,
                       .shape = saved.shape,
                       .read = [pieces](const Box& part, const Box& to, void* out) {
                         for (const OpenPiece& piece : pieces) {
                           const std::optional<Box> common = intersect(piece.box, part);
                           if (!common.has_value()) continue;
                           absl::Status status =
                               piece.file->read(*piece.info, piece.box, *common, to, out);
                           if (!status.ok()) return status;
                         }
                         return absl::OkStatus();
                       }});
  }
  return sources;
}

absl::StatusOr<std::vector<TensorSource>> safetensors_sources(
    const std::string& path, const std::shared_ptr<FileSystem>& fs) {
  absl::StatusOr<std::unique_ptr<SafetensorsIndex>> index = SafetensorsIndex::open(path, fs);
  if (!index.ok()) return index.status();
  std::vector<TensorSource> sources;
  for (const std::string& name : (*index)->names()) {
    const absl::StatusOr<SafetensorsIndex::Place> place = (*index)->find(name);
    if (!place.ok()) return place.status();
    sources.push_back({.name = name,
                       .dtype = place->info->dtype,
                       .shape = place->info->shape,
                       .read = [file = place->file, info = place->info](const Box& part,
                                                                        const Box& to, void* out) {
                         return file->read(*info, whole_box(info->shape), part, to, out);
                       }});
  }
  return sources;
}

TensorSource put_together(std::string name, Dims shape, std::vector<SourcePart> parts) {
  const DType dtype = parts.empty() ? DType::kF32 : parts.front().source.dtype;
  auto read = [parts = std::move(parts), dtype](const Box& part, const Box& to, void* out) {
    for (const SourcePart& each : parts) {
      const std::optional<Box> common = intersect(each.box, part);
      if (!common.has_value()) continue;
      const size_t leading = each.box.shape.size() - each.source.shape.size();
      int64_t place = 0;  // in `to`, of its elements behind the dimensions that the part has not
      for (size_t d = 0; d < to.shape.size(); ++d) {
        place *= to.shape[d];
        if (d < leading) place += each.box.offset[d] - to.offset[d];
      }
      absl::Status status = each.source.read(last_dims(*common, leading, each.box.offset),
                                             last_dims(to, leading, each.box.offset),
                                             static_cast<char*>(out) + place * element_size(dtype));
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  };
  return {
      .name = std::move(name), .dtype = dtype, .shape = std::move(shape), .read = std::move(read)};
}

TensorSource part_of(const TensorSource& whole, const Box& box, std::string name, Dims shape) {
  auto read = [whole = whole.read, box](const Box& part, const Box& to, void* out) {
    const size_t leading = box.shape.size() - part.shape.size();
    const auto in_whole = [&](const Box& of_part) {
      Box result = {box.offset, box.shape};
      for (size_t d = leading; d < box.shape.size(); ++d) {
        result.offset[d] += of_part.offset[d - leading];
        result.shape[d] = of_part.shape[d - leading];
      }
      return result;
    };
    return whole(in_whole(part), in_whole(to), out);
  };
  return {.name = std::move(name),
          .dtype = whole.dtype,
          .shape = std::move(shape),
          .read = std::move(read)};
}

}  // namespace shardweave
