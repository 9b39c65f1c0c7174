#include "shardweave/placement/layout.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <ostream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "shardweave/placement/parser.h"

namespace shardweave {
namespace {

using namespace placement_internal;

std::vector<int> own_order(int n) {
  std::vector<int> order(n);
  std::iota(order.begin(), order.end(), 0);
  return order;
}

bool is_permutation(absl::Span<const int> order, int n) {
  std::vector<int> sorted(order.begin(), order.end());
  std::sort(sorted.begin(), sorted.end());
  return sorted == own_order(n);
}

// Whether earlier cuts leave pieces of one size to every rank, and which.
struct Piece {
  int64_t size;
  bool uniform = true;
};

// What the pieces become when `p` cuts them. Once they differ they never agree again, so that the
// size (the largest) does not matter any more.
Piece cut_piece(const Piece& piece, const Placement& p, int64_t num_ranks) {
  const bool same = p.kind() == PlacementKind::kRaggedShard
                        ? std::adjacent_find(p.sizes().begin(), p.sizes().end(),
                                             std::not_equal_to<>()) == p.sizes().end()
                        : cut_size(p, piece.size, num_ranks, 0) ==
                              cut_size(p, piece.size, num_ranks, num_ranks - 1);
  return {cut_size(p, piece.size, num_ranks, 0), piece.uniform && same};
}

absl::Status does_not_fit(const Layout& layout, absl::Span<const int64_t> shape, int mesh_dim,
                          const std::string& why) {
  return absl::InvalidArgumentError(
      absl::StrCat("the layout ", layout.to_string(), " does not fit a tensor of shape [",
                   absl::StrJoin(shape, ", "), "]: ", layout[mesh_dim].to_string(),
                   " on mesh dimension ", mesh_dim, " ", why));
}

absl::Status no_such_dim(const Layout& layout, int mesh_dim, int ndim) {
  return absl::InvalidArgumentError(
      absl::StrCat("the layout ", layout.to_string(), " does not fit a tensor of ", ndim,
                   ndim == 1 ? " dimension: " : " dimensions: ", layout[mesh_dim].to_string(),
                   " on mesh dimension ", mesh_dim, " cuts tensor dimension ",
                   layout[mesh_dim].dim(), ", but there are ", ndim,
                   ndim == 0 ? "" : absl::StrCat(" (wanted: ", -ndim, " to ", ndim - 1, ")")));
}

absl::Status validate_ragged(const Layout& layout, absl::Span<const int64_t> mesh_shape,
                             absl::Span<const int64_t> shape, int mesh_dim, const Piece& piece) {
  const std::vector<int64_t>& sizes = layout[mesh_dim].sizes();
  if (static_cast<int64_t>(sizes.size()) != mesh_shape[mesh_dim]) {
    return does_not_fit(
        layout, shape, mesh_dim,
        absl::StrCat("has ", sizes.size(), " sizes for ", mesh_shape[mesh_dim], " ranks"));
  }
  if (!piece.uniform) {
    return does_not_fit(layout, shape, mesh_dim,
                        "cuts pieces of different sizes, which one list of sizes cannot describe");
  }
  int64_t left = piece.size;
  for (int64_t size : sizes) {
    if (size < 0) return does_not_fit(layout, shape, mesh_dim, "has a negative size");
    if (size > left) {
      return does_not_fit(
          layout, shape, mesh_dim,
          absl::StrCat("has sizes that sum up to more than the ", piece.size, " elements to cut"));
    }
    left -= size;
  }
  if (left != 0) {
    return does_not_fit(layout, shape, mesh_dim,
                        absl::StrCat("has sizes that sum up to ", piece.size - left,
                                     ", not to the ", piece.size, " elements to cut"));
  }
  return absl::OkStatus();
}

}  // namespace

Layout::Layout(Placements placements) : placements_(std::move(placements)) {
  order_ = own_order(mesh_ndim());
}

// Canonical: the mesh dimensions of a tensor dimension take the places that they would have in
// their own order, in the order that they cut; all others stay where they are.
Layout::Layout(Placements placements, absl::Span<const int> order) : Layout(std::move(placements)) {
  std::vector<bool> placed(mesh_ndim());
  for (int d = 0; d < mesh_ndim(); ++d) {
    if (!placements_[d].is_shard()) continue;
    order_[d] = *std::find_if(order.begin(), order.end(), [&](int other) {
      return !placed[other] && placements_[other].is_shard(placements_[d].dim());
    });
    placed[order_[d]] = true;
  }
}

namespace {

// A dimension counted from the end may be any of those counted from the front, or none: an order
// that is not the mesh dimensions' own says too little about the two.
absl::Status check_order(const Placements& placements, absl::Span<const int> order) {
  for (size_t i = 0; i < order.size(); ++i) {
    for (size_t j = i + 1; j < order.size(); ++j) {
      const Placement& a = placements[order[i]];
      const Placement& b = placements[order[j]];
      if (order[i] < order[j] || !a.is_shard() || !b.is_shard()) continue;
      if ((a.dim() < 0) == (b.dim() < 0)) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          "the layout ", to_string(placements), " has an order of cuts, [",
          absl::StrJoin(order, ", "), "], of tensor dimensions that are counted from both ends",
          "; count all of them from the front"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

// NOLINTNEXTLINE(performance-unnecessary-value-param): callers write {1, 0}
absl::StatusOr<Layout> Layout::create(Placements placements, std::vector<int> order) {
  if (order.empty()) return Layout(std::move(placements));
  if (!is_permutation(order, static_cast<int>(placements.size()))) {
    return absl::InvalidArgumentError(
        absl::StrCat("the order [", absl::StrJoin(order, ", "), "] of the layout ",
                     shardweave::to_string(placements), " is not a permutation of its ",
                     placements.size(), " mesh dimensions"));
  }
  if (absl::Status status = check_order(placements, order); !status.ok()) return status;
  return Layout(std::move(placements), order);
}

bool Layout::default_order() const {
  return std::is_sorted(order_.begin(), order_.end());
}

absl::InlinedVector<int, 4> Layout::shards_of(int tensor_dim) const {
  absl::InlinedVector<int, 4> result;
  for (int mesh_dim : order_) {
    if (placements_[mesh_dim].is_shard(tensor_dim)) result.push_back(mesh_dim);
  }
  return result;
}

bool Layout::is_replicated() const {
  return std::all_of(placements_.begin(), placements_.end(),
                     [](const Placement& p) { return p.is_replicate(); });
}

bool Layout::has_partial() const {
  return std::any_of(placements_.begin(), placements_.end(),
                     [](const Placement& p) { return p.is_partial(); });
}

std::string Layout::to_string() const {
  std::string text = "[";
  for (int d = 0; d < mesh_ndim(); ++d) {
    absl::StrAppend(&text, d == 0 ? "" : ", ", placements_[d].to_string());
    if (!placements_[d].is_shard()) continue;
    const auto cuts = shards_of(placements_[d].dim());
    if (std::is_sorted(cuts.begin(), cuts.end())) continue;
    absl::StrAppend(&text, "@", std::find(cuts.begin(), cuts.end(), d) - cuts.begin());
  }
  return text + "]";
}

std::ostream& operator<<(std::ostream& out, const Layout& layout) {
  return out << layout.to_string();
}

absl::StatusOr<Layout> Layout::parse(std::string_view text) {
  Parser parser("layout", text);
  Placements placements;
  std::vector<std::optional<int>> turns;  // what stands behind the "@"
  if (!parser.expect("[")) return parser.status();
  if (!parser.accept("]")) {
    do {
      if (!parser.read_placement(&placements.emplace_back())) return parser.status();
      turns.emplace_back();
      if (placements.back().is_shard() && parser.accept("@")) {
        int64_t turn;
        if (!parser.read_integer(0, 1'000'000, "the turn of the cut", &turn)) {
          return parser.status();
        }
        turns.back() = static_cast<int>(turn);
      }
    } while (parser.accept(","));
    if (!parser.expect("]")) return parser.status();
  }
  if (!parser.expect_end()) return parser.status();

  std::map<int, std::vector<int>> cuts;  // by tensor dimension
  for (int d = 0; d < static_cast<int>(placements.size()); ++d) {
    if (placements[d].is_shard()) cuts[placements[d].dim()].push_back(d);
  }
  std::vector<int> order;
  for (int d = 0; d < static_cast<int>(placements.size()); ++d) {
    if (!placements[d].is_shard()) order.push_back(d);
  }
  for (const auto& [tensor_dim, mesh_dims] : cuts) {
    const int n = static_cast<int>(mesh_dims.size());
    std::vector<int> by_turn(n, -1);
    for (int i = 0; i < n; ++i) {
      // Without any "@" the mesh dimensions take their own order.
      const bool explicit_turns = turns[mesh_dims[0]].has_value();
      const std::optional<int> turn = explicit_turns ? turns[mesh_dims[i]] : std::optional<int>(i);
      if (turns[mesh_dims[i]].has_value() != explicit_turns || *turn >= n || by_turn[*turn] != -1) {
        return absl::InvalidArgumentError(
            absl::StrCat("cannot read the layout \"", std::string(text), "\": the ", n,
                         " cuts of tensor dimension ", tensor_dim,
                         " must have either no \"@\" or the turns 0 to ", n - 1, ", each once"));
      }
      by_turn[*turn] = mesh_dims[i];
    }
    order.insert(order.end(), by_turn.begin(), by_turn.end());
  }
  Layout layout(std::move(placements), order);
  absl::Status status = check_order(layout.placements_, layout.order_);
  if (!status.ok()) return status;
  return layout;
}

absl::StatusOr<Layout> with_dims_of(const Layout& layout, int ndim) {
  Placements placements = layout.placements();
  for (int m = 0; m < layout.mesh_ndim(); ++m) {
    Placement& p = placements[m];
    if (!p.is_shard()) continue;
    if (p.dim() < -ndim || p.dim() >= ndim) return no_such_dim(layout, m, ndim);
    if (p.dim() < 0) p = p.with_dim(p.dim() + ndim);
  }
  return Layout::create(std::move(placements), layout.order());
}

absl::Status validate(const Layout& layout, absl::Span<const int64_t> mesh_shape,
                      absl::Span<const int64_t> shape) {
  if (layout.mesh_ndim() != static_cast<int>(mesh_shape.size())) {
    return absl::InvalidArgumentError(
        absl::StrCat("the layout ", layout.to_string(), " has ", layout.mesh_ndim(),
                     " placements, but the mesh [", absl::StrJoin(mesh_shape, ", "), "] has ",
                     mesh_shape.size(), mesh_shape.size() == 1 ? " dimension" : " dimensions"));
  }
  for (int64_t size : mesh_shape) {
    if (size < 1) {
      return absl::InvalidArgumentError(absl::StrCat("the mesh [", absl::StrJoin(mesh_shape, ", "),
                                                     "] has a dimension without ranks"));
    }
  }
  for (int64_t size : shape) {
    if (size < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("the tensor shape [", absl::StrJoin(shape, ", "), "] has a negative size"));
    }
  }
  const int ndim = static_cast<int>(shape.size());
  absl::InlinedVector<Piece, 6> pieces;
  for (int64_t size : shape) pieces.push_back({size});
  for (int mesh_dim : layout.order()) {
    const Placement& p = layout[mesh_dim];
    if (!p.is_shard()) continue;
    if (p.dim() < 0 || p.dim() >= ndim) {
      return does_not_fit(
          layout, shape, mesh_dim,
          absl::StrCat("cuts tensor dimension ", p.dim(), ", but there are ", ndim));
    }
    Piece& piece = pieces[p.dim()];
    if (p.kind() == PlacementKind::kRaggedShard) {
      absl::Status status = validate_ragged(layout, mesh_shape, shape, mesh_dim, piece);
      if (!status.ok()) return status;
    }
    if (p.split_factor() < 1) {
      return does_not_fit(layout, shape, mesh_dim, "has a split factor below 1");
    }
    piece = cut_piece(piece, p, mesh_shape[mesh_dim]);
  }
  return absl::OkStatus();
}

}  // namespace shardweave
