// at::Tensor and safetensors files.
//
//   auto file = *SafetensorsFile::open("model.safetensors");
//   at::Tensor q = read_tensor(*file, "h.0.attn.q.weight");
//   at::Tensor rows = read_tensor(*file, "h.0.attn.q.weight", Box{{0, 0}, {2, 8}});
//   write_safetensors("two.safetensors", {{"q", q}, {"rows", rows}}, {{"format", "pt"}});
//
// Throws Error. Tensors are plain; a DTensor's rank reads the box that it keeps, or one calls
// checkpointer.h.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "shardweave/modules/checkpoint/safetensors.h"

namespace shardweave {

// The dtype of the format; InvalidArgument for those that it does not have here (complex, quantized).
DType safetensors_dtype_of(at::ScalarType dtype);
at::ScalarType scalar_type_of(DType dtype);

// On the CPU, with memory of its own. NotFound, InvalidArgument for a box that is not in it.
at::Tensor read_tensor(const SafetensorsFile& file, std::string_view name,
                       const std::optional<Box>& box = std::nullopt);

// A file that is not there yet, in the end on the disk; one that could not be finished is removed. On any
// device; one after the other is copied to the CPU.
void write_safetensors(const std::string& path,
                       const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace shardweave
