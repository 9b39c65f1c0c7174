#include "shardweave/placement/placement.h"

#include <ostream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace shardweave {

const std::vector<int64_t>& Placement::sizes() const {
  static const std::vector<int64_t> kNone;
  return ragged_ == nullptr ? kNone : ragged_->sizes;
}

Placement Placement::with_dim(int dim) const {
  Placement p = *this;
  if (p.is_shard()) p.dim_ = dim;
  return p;
}

std::string Placement::to_string() const {
  switch (kind_) {
    case PlacementKind::kReplicate:
      return "R";
    case PlacementKind::kShard:
      return absl::StrCat("S(", dim_, ")");
    case PlacementKind::kStridedShard:
      return absl::StrCat("S(", dim_, ", sf=", split_factor_, ")");
    case PlacementKind::kRaggedShard:
      return absl::StrCat("S(", dim_, ", sizes=[", absl::StrJoin(sizes(), ","), "])");
    case PlacementKind::kPartial:
      return absl::StrCat("P(", std::string(shardweave::to_string(reduce_op_)), ")");
  }
  return "?";  // not reached: the switch is complete
}

std::ostream& operator<<(std::ostream& out, const Placement& placement) {
  return out << placement.to_string();
}

Placement Replicate() {
  return Placement();
}

Placement Shard(int dim) {
  Placement p;
  p.kind_ = PlacementKind::kShard;
  p.dim_ = dim;
  return p;
}

Placement Partial(ReduceOp op) {
  Placement p;
  p.kind_ = PlacementKind::kPartial;
  p.reduce_op_ = op;
  return p;
}

Placement StridedShard(int dim, int64_t split_factor) {
  Placement p = Shard(dim);
  if (split_factor == 1) return p;
  p.kind_ = PlacementKind::kStridedShard;
  p.split_factor_ = split_factor;
  return p;
}

Placement RaggedShard(int dim, std::vector<int64_t> sizes) {
  Placement p = Shard(dim);
  p.kind_ = PlacementKind::kRaggedShard;
  auto ragged = std::make_shared<Placement::Ragged>();
  ragged->begins.reserve(sizes.size());
  uint64_t begin = 0;  // of any sizes: whether they fit a tensor is asked later
  for (const int64_t size : sizes) {
    ragged->begins.push_back(static_cast<int64_t>(begin));
    begin += static_cast<uint64_t>(size);
  }
  ragged->sizes = std::move(sizes);
  p.ragged_ = std::move(ragged);
  return p;
}

std::string to_string(const Placements& placements) {
  return absl::StrCat(
      "[",
      absl::StrJoin(placements, ", ",
                    [](std::string* out, const Placement& p) { out->append(p.to_string()); }),
      "]");
}

}  // namespace shardweave
