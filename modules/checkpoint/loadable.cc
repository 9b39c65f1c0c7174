#include "shardweave/modules/checkpoint/loadable.h"

#include <string_view>

#include "ATen/MemoryOverlap.h"
#include "shardweave/comm/str_cat.h"

namespace shardweave::checkpoint_internal {

absl::Status check_loadable(const std::string& name, const at::Tensor& part) {
  const auto refuse = [&](std::string_view what) {
    return absl::FailedPreconditionError(str_cat("'", name, "' ", what));
  };
  if (part.is_meta()) return refuse("has no memory: it is on the meta device");
  if (part.layout() != at::kStrided) return refuse("is not dense");
  if (part._is_zerotensor()) return refuse("has no memory: it is a zero that gradients begin with");
  if (part.is_inference()) return refuse("was made in inference mode, and cannot be written");
  if (at::has_internal_overlap(part) == at::MemOverlap::Yes) {
    return refuse("has elements that share memory (an expanded one)");
  }
  return absl::OkStatus();
}

}  // namespace shardweave::checkpoint_internal
