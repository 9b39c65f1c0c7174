#include "shardweave/dtensor/engine/checksum.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "shardweave/dtensor/observe/observer.h"

namespace shardweave::dtensor_internal {
namespace {

uint64_t add(uint64_t sum, uint64_t word) {
  return (std::rotl(sum, 5) ^ word) * 0x517cc1b727220a95;
}

uint64_t add(uint64_t sum, const void* memory, size_t bytes) {
  const auto* at = static_cast<const unsigned char*>(memory);
  for (; bytes >= sizeof(uint64_t); at += sizeof(uint64_t), bytes -= sizeof(uint64_t)) {
    uint64_t word;
    std::memcpy(&word, at, sizeof(word));
    sum = add(sum, word);
  }
  uint64_t rest = 0;
  if (bytes > 0) std::memcpy(&rest, at, bytes);
  return add(sum, rest);
}

}  // namespace

uint64_t checksum(const at::Tensor& plain) {
  uint64_t sum = add(0xcbf29ce484222325, static_cast<uint64_t>(plain.scalar_type()));
  for (const int64_t size : plain.sizes()) sum = add(sum, static_cast<uint64_t>(size));
  if (plain.is_meta()) return sum;  // it has no elements to differ
  const at::Tensor in_memory = plain._is_zerotensor() ? plain.clone() : plain;
  const at::Tensor in_order = in_memory.detach().resolve_conj().resolve_neg().contiguous().cpu();
  return add(sum, in_order.const_data_ptr(), in_order.nbytes());
}

uint64_t checksum(uint64_t sum, std::string_view text) {
  return add(add(sum, text.size()), text.data(), text.size());
}

std::optional<Difference> first_difference(MeshContext& context, const std::vector<uint64_t>& sums,
                                           const Cause& cause, std::optional<int> mesh_dim) {
  if (sums.empty() || context.mesh().size() <= 1) return std::nullopt;
  std::vector<int> dims;
  for (int m = 0; m < context.mesh().ndim(); ++m) {
    if (!mesh_dim.has_value() || m == *mesh_dim) dims.push_back(m);
  }
  Communicator& comm = context.communicator(dims);
  const CallOptions options = {.timeout = absl::ZeroDuration(), .tag = cause.tag()};
  // The smallest and, as the complement of the smallest complement, the largest of each: however
  // many ranks there are, that is as much as two ranks' sums.
  const size_t n = sums.size();
  std::vector<int64_t> ends(2 * n);
  for (size_t i = 0; i < n; ++i) {
    ends[i] = static_cast<int64_t>(sums[i]);
    ends[n + i] = ~ends[i];
  }
  const auto count = static_cast<int64_t>(ends.size());
  {
    const CollectiveSpan span(context, cause, [&]() -> Sending {
      const int64_t sent = 2 * (count - count / comm.size());
      return {"all_reduce",
              dims,
              sent * static_cast<int64_t>(sizeof(int64_t)),
              at::kLong,
              absl::MakeConstSpan(&count, 1),
              Layout(),
              Layout(),
              /*parameters=*/{},
              /*is_check=*/true};
    });
    const Buffer buffer = Buffer::of(ends.data(), count);
    throw_if_error(comm.all_reduce(buffer, buffer, ReduceOp::kMin, options).wait());
  }
  size_t first = 0;
  while (first < n && ends[first] == ~ends[n + first]) ++first;
  if (first == n) return std::nullopt;
  // Who it is matters only now.
  auto mine = static_cast<int64_t>(sums[first]);
  std::vector<int64_t> all(comm.size());
  throw_if_error(
      comm.all_gather(Buffer::of(&mine, 1), Buffer::of(all.data(), comm.size()), options).wait());
  // A number of the group as one of the mesh.
  const auto in_mesh = [&](int r) {
    if (!mesh_dim.has_value()) return r;
    int rank = 0;
    for (int m = 0; m < context.mesh().ndim(); ++m) {
      const auto at = m == *mesh_dim ? static_cast<int64_t>(r) : context.coordinate()[m];
      rank = static_cast<int>(rank * context.mesh().size(m) + at);
    }
    return rank;
  };
  for (int r = 1; r < comm.size(); ++r) {
    if (all[r] != all[0]) return Difference{first, {in_mesh(0), in_mesh(r)}};
  }
  return std::nullopt;  // not reached: there are two ends
}

std::optional<Difference> Agreement::reach(const std::vector<uint64_t>& sums) {
  told_ = true;
  uint64_t all = 1;
  for (const uint64_t sum : sums) all = add(all, sum);
  const std::optional<Difference> difference =
      first_difference(context_, {/*refused*/ 0, sums.size(), all}, cause_);
  if (!difference.has_value()) return std::nullopt;
  const auto& [index, ranks] = *difference;
  if (index == 0) {
    throw Error(cause_.name,
                absl::InvalidArgumentError(absl::StrCat(
                    "it was refused on other ranks, which say why (of ranks ", ranks[0], " and ",
                    ranks[1], " one has refused); nothing has changed on any rank")));
  }
  if (index == 1) return Difference{sums.size(), {ranks[0], ranks[1]}};
  return first_difference(context_, sums, cause_);
}

Agreement::~Agreement() {
  if (told_) return;
  try {
    (void)first_difference(context_, {/*refused*/ 1, 0, 0}, cause_);
  } catch (...) {  // NOLINT(bugprone-empty-catch): what this rank throws already says more
  }
}

}  // namespace shardweave::dtensor_internal
