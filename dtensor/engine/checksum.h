// Whether plain tensors are the same on every rank: 16 bytes for each travel, not the tensors.
//
//   std::vector<uint64_t> sums = {checksum(a), checksum(b)};
//   if (auto difference = first_difference(context, sums, cause)) ...  // on every rank
//
// Internal to dtensor/.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "ATen/core/Tensor.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/redistribute.h"

namespace shardweave::dtensor_internal {

// Of dtype, shape and elements, bit by bit; the same in every process. At some GB/s.
uint64_t checksum(const at::Tensor& plain);
// Of a checksum and a text.
uint64_t checksum(uint64_t sum, std::string_view text);

struct Difference {
  size_t index;  // the first that differs
  int ranks[2];  // of the mesh, row-major: two that differ
};
// Collective over the mesh, or along one of its dimensions: one all-reduce, however many ranks there
// are, and one all-gather more if there is a difference. The same result on every rank of it.
std::optional<Difference> first_difference(MeshContext& context, const std::vector<uint64_t>& sums,
                                           const Cause& cause,
                                           std::optional<int> mesh_dim = std::nullopt);

// What all ranks do or none does, where each may find a reason of its own to refuse.
//
//   Agreement agreement(context, cause);
//   ...                                            // checks, which throw
//   if (auto difference = agreement.reach(sums))   // if no rank has thrown
//
// A rank that throws tells the others. Collective over the mesh, as first_difference().
class Agreement {
 public:
  Agreement(MeshContext& context, const Cause& cause) : context_(context), cause_(cause) {}
  ~Agreement();
  Agreement(const Agreement&) = delete;
  Agreement& operator=(const Agreement&) = delete;

  // As first_difference(), of as many sums as a rank has: where the number differs `index` may be
  // their size. Throws Error (InvalidArgument) if another rank has refused.
  std::optional<Difference> reach(const std::vector<uint64_t>& sums);

 private:
  MeshContext& context_;
  const Cause cause_;
  bool told_ = false;
};

}  // namespace shardweave::dtensor_internal
