#include "shardweave/dtensor/checksum.h"

#include <bit>
#include <cstring>

#include "shardweave/dtensor/observer.h"

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
  const at::Tensor in_order = plain.detach().resolve_conj().resolve_neg().contiguous().cpu();
  return add(sum, in_order.const_data_ptr(), in_order.nbytes());
}

uint64_t checksum(uint64_t sum, std::string_view text) {
  return add(add(sum, text.size()), text.data(), text.size());
}

std::optional<Difference> first_difference(MeshContext& context, const std::vector<uint64_t>& sums,
                                           const Cause& cause) {
  if (sums.empty() || context.mesh().size() <= 1) return std::nullopt;
  std::vector<int> all_dims;
  for (int m = 0; m < context.mesh().ndim(); ++m) all_dims.push_back(m);
  Communicator& comm = context.communicator(all_dims);
  const auto count = static_cast<int64_t>(sums.size());
  std::vector<uint64_t> all(sums.size() * comm.size());
  const CollectiveSpan span(context, cause, [&]() -> Sending {
    return {"all_gather",
            all_dims,
            (comm.size() - 1) * count * static_cast<int64_t>(sizeof(uint64_t)),
            at::kLong,
            absl::MakeConstSpan(&count, 1),
            Layout(),
            Layout()};
  });
  std::vector<uint64_t> mine = sums;
  throw_if_error(comm.all_gather(Buffer::of(mine.data(), count),
                                 Buffer::of(all.data(), static_cast<int64_t>(all.size())),
                                 {.timeout = absl::ZeroDuration(), .tag = cause.name})
                     .wait());
  for (size_t i = 0; i < sums.size(); ++i) {
    for (int r = 1; r < comm.size(); ++r) {
      if (all[r * sums.size() + i] != all[i]) return Difference{i, {0, r}};
    }
  }
  return std::nullopt;
}

}  // namespace shardweave::dtensor_internal
