#include "shardweave/dtensor/compat/sharded_tensor.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "c10/core/GradMode.h"
#include "shardweave/dtensor/engine/members.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "torch/nn/module.h"

namespace shardweave {
namespace {

using namespace dtensor_internal;

std::string to_string(const ShardMetadata& shard) {
  std::vector<std::string> ranges;
  for (size_t d = 0; d < std::min(shard.offsets.size(), shard.sizes.size()); ++d) {
    ranges.push_back(absl::StrCat(shard.offsets[d], ":", shard.offsets[d] + shard.sizes[d]));
  }
  return absl::StrCat("[", absl::StrJoin(ranges, ", "), "] on rank ", shard.rank);
}

[[noreturn]] void refuse(const ShardingSpec& spec, at::IntArrayRef sizes, const DeviceMesh& mesh,
                         const std::string& why) {
  throw Error(absl::InvalidArgumentError(
      absl::StrCat(shardweave::to_string(spec), " does not fit a tensor of shape [",
                   absl::StrJoin(sizes, ", "), "] on ", mesh.to_string(), ": ", why)));
}

std::string rank_out_of_range(int64_t rank, const DeviceMesh& mesh) {
  return absl::StrCat("there is no rank ", rank, " (wanted: 0 .. ", mesh.size() - 1, ")");
}

Placement placement(const ChunkSpec& spec, at::IntArrayRef sizes, const DeviceMesh& mesh) {
  const int ndim = static_cast<int>(sizes.size());
  if (spec.dim < -ndim || spec.dim >= ndim) {
    refuse(spec, sizes, mesh,
           absl::StrCat("the tensor has ", ndim, ndim == 1 ? " dimension" : " dimensions"));
  }
  const int dim = spec.dim < 0 ? spec.dim + ndim : spec.dim;
  for (size_t i = 0; i < spec.ranks.size(); ++i) {
    if (spec.ranks[i] < 0 || spec.ranks[i] >= mesh.size()) {
      refuse(spec, sizes, mesh, rank_out_of_range(spec.ranks[i], mesh));
    }
    if (i == 0 || spec.ranks[i] > spec.ranks[i - 1]) continue;
    refuse(spec, sizes, mesh,
           spec.ranks[i] == spec.ranks[i - 1]
               ? absl::StrCat("rank ", spec.ranks[i], " is there twice")
               : absl::StrCat("rank ", spec.ranks[i], " comes after rank ", spec.ranks[i - 1],
                              " (wanted: ascending; for another order make a mesh of the ranks in "
                              "that order, with DeviceMesh::from_ranks)"));
  }
  const auto chunks = static_cast<int64_t>(spec.ranks.size());
  if (chunks == 0 || chunks == mesh.size()) return Shard(dim);
  std::vector<int64_t> rows(mesh.size(), 0);
  for (int64_t i = 0; i < chunks; ++i) rows[spec.ranks[i]] = chunk(sizes[dim], chunks, i).size();
  return RaggedShard(dim, std::move(rows));
}

// The dimension along which the shards are slices.
int sliced_dim(const EnumerableSpec& spec, at::IntArrayRef sizes, const DeviceMesh& mesh) {
  std::optional<int> dim;
  for (const ShardMetadata& shard : spec.shards) {
    for (int d = 0; d < static_cast<int>(sizes.size()); ++d) {
      if (shard.offsets[d] == 0 && shard.sizes[d] == sizes[d]) continue;
      if (dim.value_or(d) != d) {
        refuse(spec, sizes, mesh,
               absl::StrCat("the shards are slices of the dimensions ", std::min(*dim, d), " and ",
                            std::max(*dim, d), " (wanted: of one)"));
      }
      dim = d;
    }
  }
  return dim.value_or(0);
}

Placement placement(const EnumerableSpec& spec, at::IntArrayRef sizes, const DeviceMesh& mesh) {
  if (sizes.empty()) refuse(spec, sizes, mesh, "it has no dimension to cut");
  std::vector<const ShardMetadata*> owner(mesh.size(), nullptr);
  for (const ShardMetadata& shard : spec.shards) {
    if (shard.offsets.size() != sizes.size() || shard.sizes.size() != sizes.size()) {
      refuse(spec, sizes, mesh,
             absl::StrCat("a shard has ", shard.offsets.size(), " offsets and ", shard.sizes.size(),
                          " sizes (wanted: ", sizes.size(), " of each)"));
    }
    for (size_t d = 0; d < sizes.size(); ++d) {
      if (shard.offsets[d] >= 0 && shard.sizes[d] >= 0 && shard.offsets[d] <= sizes[d] &&
          shard.sizes[d] <= sizes[d] - shard.offsets[d]) {
        continue;
      }
      refuse(spec, sizes, mesh,
             absl::StrCat("the shard ", to_string(shard), " reaches beyond the tensor"));
    }
    if (shard.rank < 0 || shard.rank >= mesh.size()) {
      refuse(spec, sizes, mesh, rank_out_of_range(shard.rank, mesh));
    }
    if (owner[shard.rank] != nullptr) {
      refuse(spec, sizes, mesh, absl::StrCat("rank ", shard.rank, " has two shards"));
    }
    owner[shard.rank] = &shard;
  }
  const int dim = sliced_dim(spec, sizes, mesh);

  std::vector<const ShardMetadata*> slices;
  std::vector<int64_t> rows(mesh.size(), 0);
  for (const ShardMetadata& shard : spec.shards) {
    rows[shard.rank] = shard.sizes[dim];
    if (shard.sizes[dim] > 0) slices.push_back(&shard);
  }
  std::stable_sort(slices.begin(), slices.end(),
                   [&](const ShardMetadata* a, const ShardMetadata* b) {
                     return a->offsets[dim] < b->offsets[dim];
                   });
  int64_t end = 0;  // of what is covered
  for (size_t i = 0; i < slices.size(); ++i) {
    const int64_t begin = slices[i]->offsets[dim];
    if (begin > end) {
      refuse(spec, sizes, mesh,
             absl::StrCat("no shard has the indices ", end, ":", begin, " of dimension ", dim));
    }
    if (begin < end) {
      refuse(spec, sizes, mesh,
             absl::StrCat("the shards ", to_string(*slices[i - 1]), " and ", to_string(*slices[i]),
                          " overlap"));
    }
    if (i > 0 && slices[i]->rank < slices[i - 1]->rank) {
      refuse(spec, sizes, mesh,
             absl::StrCat("rank ", slices[i]->rank, " has a later shard than rank ",
                          slices[i - 1]->rank,
                          " (wanted: ascending; for another order make a mesh of the ranks in that "
                          "order, with DeviceMesh::from_ranks)"));
    }
    end = begin + slices[i]->sizes[dim];
  }
  if (end < sizes[dim]) {
    refuse(spec, sizes, mesh,
           absl::StrCat("no shard has the indices ", end, ":", sizes[dim], " of dimension ", dim));
  }
  return RaggedShard(dim, std::move(rows));
}

Placements placements_of(const ShardingSpec& spec, at::IntArrayRef sizes, const MeshPtr& mesh) {
  if (mesh == nullptr) throw Error(absl::InvalidArgumentError("the mesh is null"));
  return {placement_of(spec, sizes, mesh->mesh())};
}

// --- parameters ----------------------------------------------------------------------------------

// How many letters have to be put in, left out or exchanged to make one of the other.
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i + 1);
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, diagonal + 1});
    }
  }
  return row[b.size()];
}

[[noreturn]] void no_such_parameter(const torch::nn::Module& module, std::string_view name) {
  constexpr size_t kMaxShown = 5;
  std::vector<std::pair<size_t, std::string>> names;
  for (const auto& item : module.named_parameters()) {
    names.emplace_back(edit_distance(name, item.key()), item.key());
  }
  std::stable_sort(names.begin(), names.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  const size_t count = names.size();
  names.resize(std::min(count, kMaxShown));
  throw Error(absl::NotFoundError(absl::StrCat(
      "shard_parameter: the module has no parameter '", std::string(name), "'; ",
      count == 0 ? "it has none at all"
                 : absl::StrCat("the most similar of its ", count, ": ",
                                absl::StrJoin(names, ", ", [](std::string* out, const auto& n) {
                                  absl::StrAppend(out, "'", n.second, "'");
                                })))));
}

}  // namespace

std::string to_string(const ShardingSpec& spec) {
  if (const auto* chunks = std::get_if<ChunkSpec>(&spec)) {
    return absl::StrCat("ChunkSpec(dim ", chunks->dim, ", ",
                        chunks->ranks.empty()
                            ? std::string("all ranks")
                            : absl::StrCat("ranks [", absl::StrJoin(chunks->ranks, ", "), "]"),
                        ")");
  }
  return absl::StrCat(
      "EnumerableSpec(",
      absl::StrJoin(std::get<EnumerableSpec>(spec).shards, ", ",
                    [](std::string* out, const ShardMetadata& s) { out->append(to_string(s)); }),
      ")");
}

Placement placement_of(const ShardingSpec& spec, at::IntArrayRef sizes, const DeviceMesh& mesh) {
  if (mesh.ndim() != 1) {
    refuse(spec, sizes, mesh, "the mesh has several dimensions (wanted: one; take a slice of it)");
  }
  return std::visit([&](const auto& s) { return placement(s, sizes, mesh); }, spec);
}

namespace sharded_tensor {

at::Tensor empty(const ShardingSpec& spec, at::IntArrayRef sizes, const MeshPtr& mesh,
                 at::TensorOptions options) {
  return shardweave::empty(sizes, mesh, placements_of(spec, sizes, mesh), options);
}

at::Tensor zeros(const ShardingSpec& spec, at::IntArrayRef sizes, const MeshPtr& mesh,
                 at::TensorOptions options) {
  return shardweave::zeros(sizes, mesh, placements_of(spec, sizes, mesh), options);
}

at::Tensor ones(const ShardingSpec& spec, at::IntArrayRef sizes, const MeshPtr& mesh,
                at::TensorOptions options) {
  return shardweave::ones(sizes, mesh, placements_of(spec, sizes, mesh), options);
}

at::Tensor full(const ShardingSpec& spec, at::IntArrayRef sizes, const at::Scalar& value,
                const MeshPtr& mesh, at::TensorOptions options) {
  return shardweave::full(sizes, value, mesh, placements_of(spec, sizes, mesh), options);
}

at::Tensor rand(const ShardingSpec& spec, at::IntArrayRef sizes, const MeshPtr& mesh,
                at::TensorOptions options) {
  return shardweave::rand(sizes, mesh, placements_of(spec, sizes, mesh), options);
}

at::Tensor randn(const ShardingSpec& spec, at::IntArrayRef sizes, const MeshPtr& mesh,
                 at::TensorOptions options) {
  return shardweave::randn(sizes, mesh, placements_of(spec, sizes, mesh), options);
}

}  // namespace sharded_tensor

at::Tensor shard_tensor(const at::Tensor& tensor, const ShardingSpec& spec, const MeshPtr& mesh,
                        const DistributeOptions& options) {
  if (!tensor.defined())
    throw Error(absl::InvalidArgumentError("shard_tensor: the tensor is undefined"));
  return distribute_tensor(tensor, mesh, placements_of(spec, tensor.sizes(), mesh), options);
}

void shard_parameter(torch::nn::Module& module, std::string_view name, const ShardingSpec& spec,
                     const MeshPtr& mesh, const DistributeOptions& options) {
  const auto parameters = module.named_parameters();
  const at::Tensor* found = parameters.find(std::string(name));
  if (found == nullptr) no_such_parameter(module, name);
  const at::Tensor parameter = *found;
  const Placements placements = placements_of(spec, parameter.sizes(), mesh);
  if (is_dtensor(parameter) &&
      (mesh_of(parameter) != mesh || !layout_of(parameter).is_replicated())) {
    throw Error(absl::FailedPreconditionError(absl::StrCat(
        "shard_parameter: '", std::string(name), "' is sharded already: ", describe(parameter))));
  }

  // Before anything changes: all that is plain becomes a DTensor, where it stands.
  std::vector<dtensor_internal::Member> plain = dtensor_internal::members_of(module);
  std::erase_if(plain, [](const dtensor_internal::Member& m) { return is_dtensor(m.tensor); });
  dtensor_internal::check_distributable(plain, "shard_parameter");

  const c10::AutoGradMode no_grad(false);
  auto become = [](const at::Tensor& tensor, const at::Tensor& sharded) {
    const DTensorMeta& meta = meta_of(sharded);
    convert_in_place(tensor, meta.local(), meta.spec, meta.context);
  };
  become(parameter, is_dtensor(parameter)
                        ? redistribute(parameter.detach(), placements)
                        : distribute_tensor(parameter.detach(), mesh, placements, options));
  auto replicate = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || is_dtensor(tensor)) return;
    become(tensor, distribute_tensor(tensor.detach(), mesh, Placements(1), options));
  };
  for (const auto& item : parameters) replicate(item.value());
  for (const auto& item : module.named_buffers()) replicate(item.value());
}

}  // namespace shardweave
