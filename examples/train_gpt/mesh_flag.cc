#include "mesh_flag.h"

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace train_gpt {

using shardweave::DeviceMesh;
using shardweave::MeshDim;

absl::StatusOr<std::vector<MeshDim>> parse_mesh(const std::string& text, bool with_replicas) {
  const absl::StatusOr<DeviceMesh> parsed = DeviceMesh::parse(text);
  if (!parsed.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--mesh=", text, ": ", std::string(parsed.status().message())));
  }
  constexpr int64_t kMaxRanks = 4096;
  std::vector<MeshDim> dims = parsed->dims();
  for (const MeshDim& dim : dims) {
    if (dim.name == "dp" || dim.name == "tp" || (dim.name == "replicas" && with_replicas)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("--mesh=", text, ": wanted ", with_replicas ? "replicas, " : "",
                     "dp (data parallel) and tp (tensor parallel), not '", dim.name, "'"));
  }
  if (parsed->size() > kMaxRanks) {
    return absl::InvalidArgumentError(
        absl::StrCat("--mesh=", text, ": wanted ", kMaxRanks, " ranks at most"));
  }
  const auto has = [&](std::string_view name) {
    return std::any_of(dims.begin(), dims.end(),
                       [&](const MeshDim& dim) { return dim.name == name; });
  };
  if (with_replicas && !has("replicas")) dims.insert(dims.begin(), {"replicas", 1});
  if (!has("dp")) dims.insert(dims.begin(), {"dp", 1});
  if (!has("tp")) dims.push_back({"tp", 1});
  return dims;
}

std::string to_string(const std::vector<MeshDim>& mesh) {
  const auto name_and_size = [](std::string* out, const MeshDim& d) {
    absl::StrAppend(out, d.name, "=", d.size);
  };
  return absl::StrJoin(mesh, ",", name_and_size);
}

int num_ranks(const std::vector<MeshDim>& mesh) {
  int64_t ranks = 1;
  for (const MeshDim& d : mesh) ranks *= d.size;
  return static_cast<int>(ranks);
}

}  // namespace train_gpt
