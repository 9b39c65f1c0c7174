#include "shardweave/placement/placement.h"

#include <ostream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace shardweave {

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
      return absl::StrCat("S(", dim_, ", sizes=[", absl::StrJoin(sizes_, ","), "])");
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
  p.sizes_ = std::move(sizes);
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
