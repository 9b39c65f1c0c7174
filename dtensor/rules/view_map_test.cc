// Against lists of elements: in the new shape every rank must hold the elements that it held, in
// their order.
#include "shardweave/dtensor/rules/view_map.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace shardweave::dtensor_internal {
namespace {

using ::testing::ElementsAre;
using ::testing::Optional;
using Shape = std::vector<int64_t>;

// The elements of one rank, as row-major indices.
std::vector<int64_t> elements(const Shape& shape, const Placements& placements, const Shape& mesh,
                              const Shape& coordinate) {
  std::vector<int64_t> result = {0};
  for (size_t d = 0; d < shape.size(); ++d) {
    const Intervals held =
        local_intervals(Layout(placements), mesh, coordinate, shape, static_cast<int>(d));
    std::vector<int64_t> next;
    for (int64_t before : result) {
      for (const Interval& interval : held) {
        for (int64_t i = interval.begin; i < interval.end; ++i)
          next.push_back(before * shape[d] + i);
      }
    }
    result = std::move(next);
  }
  return result;
}

// Every kind of cut of a tensor of this shape, which may be the first.
std::vector<MeshCut> cuts_of(const Shape& shape, int64_t ranks, bool ragged) {
  std::vector<MeshCut> cuts;
  for (int d = 0; d < static_cast<int>(shape.size()); ++d) {
    cuts.push_back({Shard(d), ranks});
    cuts.push_back({StridedShard(d, 2), ranks});
    cuts.push_back({StridedShard(d, 3), ranks});
    if (!ragged) continue;
    Shape sizes(ranks, 0);
    sizes[0] = shape[d] / 2;
    sizes[ranks - 1] += shape[d] - sizes[0];
    cuts.push_back({RaggedShard(d, sizes), ranks});
    // What merging whole rows leaves.
    if (shape[d] % 6 == 0) {
      sizes.assign(ranks, 0);
      sizes[0] = shape[d] / 6 * 4;
      sizes[1] = shape[d] - sizes[0];
      cuts.push_back({RaggedShard(d, sizes), ranks});
    }
  }
  return cuts;
}

// How many of `cuts` are mapped. Checks those that are.
int check(const Shape& from, const Shape& to, const std::vector<MeshCut>& cuts) {
  const auto mapped = map_cuts(from, to, cuts);
  EXPECT_EQ(mapped.size(), cuts.size());
  Placements before, after;
  Shape mesh;
  int count = 0;
  std::string label =
      absl::StrCat("[", absl::StrJoin(from, ", "), "] -> [", absl::StrJoin(to, ", "), "]");
  for (size_t i = 0; i < cuts.size(); ++i) {
    absl::StrAppend(&label, " ", cuts[i].placement.to_string(), "/", cuts[i].num_ranks);
    // Without a place in the new shape there is no such cut.
    before.push_back(mapped[i].has_value() ? cuts[i].placement : Replicate());
    after.push_back(mapped[i].value_or(Replicate()));
    mesh.push_back(cuts[i].num_ranks);
    count += mapped[i].has_value();
  }
  SCOPED_TRACE(label + " as " + to_string(after));
  const absl::Status valid = validate(Layout(after), mesh, to);
  EXPECT_TRUE(valid.ok()) << valid;
  if (!valid.ok()) return 0;
  Shape coordinate(mesh.size(), 0);
  while (true) {
    EXPECT_EQ(elements(from, before, mesh, coordinate), elements(to, after, mesh, coordinate))
        << "at " << absl::StrJoin(coordinate, ", ");
    size_t i = 0;
    while (i < mesh.size() && ++coordinate[i] == mesh[i]) coordinate[i++] = 0;
    if (i == mesh.size()) return count;
  }
}

const std::vector<std::vector<Shape>>& families_of_shapes() {
  static const auto* const families = new std::vector<std::vector<Shape>>{
      {{24},
       {4, 6},
       {6, 4},
       {2, 3, 4},
       {4, 3, 2},
       {2, 2, 6},
       {1, 24},
       {24, 1},
       {4, 1, 6},
       {3, 8},
       {8, 3}},
      {{30}, {5, 6}, {6, 5}, {2, 3, 5}, {5, 3, 2}, {1, 5, 6, 1}, {3, 10}},
      {{7, 5}, {35}, {5, 7}, {7, 5, 1}, {1, 7, 1, 5}},
      {{6}, {1, 6}, {6, 1}, {2, 3}, {1, 1, 6}},
      {{1}, {}, {1, 1}},
      {{0}, {0, 5}, {3, 0}, {0, 1}},
  };
  return *families;
}

TEST(ViewMapTest, OneCutOfAnyKind) {
  int mapped = 0;
  for (const std::vector<Shape>& shapes : families_of_shapes()) {
    for (const Shape& from : shapes) {
      for (const Shape& to : shapes) {
        for (int64_t ranks : {1, 2, 3, 4}) {
          for (const MeshCut& c : cuts_of(from, ranks, ranks > 1)) mapped += check(from, to, {c});
        }
      }
    }
  }
  EXPECT_GT(mapped, 1000);
}

TEST(ViewMapTest, TwoCuts) {
  int mapped = 0;
  for (const std::vector<Shape>& shapes : families_of_shapes()) {
    for (const Shape& from : shapes) {
      for (const Shape& to : shapes) {
        for (int64_t first_ranks : {2, 3}) {
          for (const MeshCut& first : cuts_of(from, first_ranks, true)) {
            for (const MeshCut& second : cuts_of(from, 2, false))
              mapped += check(from, to, {first, second});
          }
        }
      }
    }
  }
  EXPECT_GT(mapped, 10000);
}

TEST(ViewMapTest, ThreeCuts) {
  const Shape from = {4, 4, 3}, to = {48};
  for (const MeshCut& a : cuts_of(from, 2, true)) {
    for (const MeshCut& b : cuts_of(from, 2, false)) {
      for (const MeshCut& c : cuts_of(from, 2, false)) {
        check(from, to, {a, b, c});
        check(from, {16, 3}, {a, b, c});
        check(from, {2, 2, 12}, {a, b, c});
      }
    }
  }
}

// The only cut.
std::optional<Placement> mapped(const Shape& from, const Shape& to, const Placement& p,
                                int64_t ranks) {
  return map_cuts(from, to, {{p, ranks}})[0];
}

TEST(ViewMapTest, WhatModelsDo) {
  // [batch, sequence, features] as rows and back.
  EXPECT_THAT(mapped({4, 6, 8}, {24, 8}, Shard(0), 2), Optional(Shard(0)));
  EXPECT_THAT(mapped({4, 6, 8}, {24, 8}, Shard(0), 3), Optional(RaggedShard(0, {12, 12, 0})));
  EXPECT_THAT(mapped({24, 8}, {4, 6, 8}, RaggedShard(0, {12, 12, 0}), 3), Optional(Shard(0)));
  EXPECT_THAT(mapped({4, 6, 8}, {24, 8}, Shard(1), 4), Optional(StridedShard(0, 4)));
  EXPECT_THAT(mapped({24, 8}, {4, 6, 8}, StridedShard(0, 4), 4), Optional(Shard(1)));
  EXPECT_THAT(mapped({4, 6, 8}, {24, 8}, Shard(2), 3), Optional(Shard(1)));
  // Heads and back: whole ones, or none.
  EXPECT_THAT(mapped({4, 6, 12}, {4, 6, 4, 3}, Shard(2), 2), Optional(Shard(2)));
  EXPECT_EQ(mapped({4, 6, 12}, {4, 6, 4, 3}, Shard(2), 3), std::nullopt);
  EXPECT_EQ(mapped({4, 6, 12}, {4, 6, 3, 4}, Shard(2), 2), std::nullopt);
  EXPECT_THAT(mapped({4, 6, 4, 3}, {4, 6, 12}, Shard(2), 4), Optional(Shard(2)));
  // A fused query, key and value.
  EXPECT_THAT(mapped({5, 24}, {5, 3, 8}, StridedShard(1, 3), 4), Optional(Shard(2)));
  EXPECT_THAT(mapped({5, 24}, {5, 3, 2, 4}, StridedShard(1, 3), 2), Optional(Shard(2)));
}

TEST(ViewMapTest, DataAndTensorParallelTogether) {
  // Rows by the first mesh dimension; by the second, heads.
  EXPECT_THAT(map_cuts({4, 6, 4, 3}, {24, 12}, {{Shard(0), 2}, {Shard(2), 2}}),
              ElementsAre(Optional(Shard(0)), Optional(Shard(1))));
  // Sequence parallel below data parallel: what is left of the batch on a rank is the split factor.
  EXPECT_THAT(map_cuts({4, 6}, {24}, {{Shard(0), 2}, {Shard(1), 3}}),
              ElementsAre(Optional(Shard(0)), Optional(StridedShard(0, 2))));
  // Ranks without elements do not matter for it, ranks with fewer do.
  EXPECT_THAT(map_cuts({2, 6}, {12}, {{Shard(0), 4}, {Shard(1), 3}}),
              ElementsAre(Optional(RaggedShard(0, {6, 6, 0, 0})), Optional(Shard(0))));
  EXPECT_THAT(map_cuts({3, 6}, {18}, {{Shard(0), 2}, {Shard(1), 3}}),
              ElementsAre(Optional(RaggedShard(0, {12, 6})), std::nullopt));
}

TEST(ViewMapTest, ReplicateAndPartialStay) {
  EXPECT_THAT(map_cuts({6}, {2, 3}, {{Replicate(), 2}, {Partial(), 3}, {Shard(0), 2}}),
              ElementsAre(Optional(Replicate()), Optional(Partial()), Optional(Shard(0))));
}

}  // namespace
}  // namespace shardweave::dtensor_internal
