#include "shardweave/mesh/device_mesh.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "absl/hash/hash.h"
#include "absl/hash/hash_testing.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/comm/testing/allocation_counter.h"

namespace shardweave {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

DeviceMesh make(std::vector<MeshDim> dims) {
  return DeviceMesh::create(std::move(dims)).value();
}

template <typename T>
void expect_error(const absl::StatusOr<T>& result, absl::StatusCode code,
                  std::vector<std::string> parts) {
  ASSERT_EQ(result.status().code(), code) << result.status();
  for (const std::string& part : parts) {
    EXPECT_THAT(std::string(result.status().message()), HasSubstr(part));
  }
}

constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;
constexpr absl::StatusCode kNotFound = absl::StatusCode::kNotFound;

// The slow oracle: a table of every rank, and each operation by its definition.
struct Brute {
  std::vector<MeshDim> dims;
  std::vector<int64_t> ranks;

  int dim(const std::string& name) const {
    for (size_t i = 0; i < dims.size(); ++i) {
      if (dims[i].name == name) return static_cast<int>(i);
    }
    ADD_FAILURE() << name;
    return -1;
  }
  int64_t index(const std::vector<int64_t>& coordinate) const {
    int64_t index = 0;
    for (size_t i = 0; i < dims.size(); ++i) index = index * dims[i].size + coordinate[i];
    return index;
  }
  std::vector<int64_t> coordinate(int64_t index) const {
    std::vector<int64_t> result(dims.size());
    for (size_t i = dims.size(); i-- > 0; index /= dims[i].size) result[i] = index % dims[i].size;
    return result;
  }
  Brute slice(const std::vector<std::string>& names, int64_t member_index) const {
    Brute result;
    int64_t size = 1;
    for (const std::string& name : names) {
      result.dims.push_back(dims[dim(name)]);
      size *= result.dims.back().size;
    }
    for (int64_t i = 0; i < size; ++i) {
      std::vector<int64_t> where = coordinate(member_index);
      const std::vector<int64_t> inner = result.coordinate(i);
      for (size_t d = 0; d < names.size(); ++d) where[dim(names[d])] = inner[d];
      result.ranks.push_back(ranks[index(where)]);
    }
    return result;
  }
};

void expect_matches(const DeviceMesh& mesh, const Brute& brute) {
  SCOPED_TRACE(mesh.to_string());
  ASSERT_EQ(mesh.dims(), brute.dims);
  ASSERT_EQ(mesh.size(), static_cast<int64_t>(brute.ranks.size()));
  EXPECT_EQ(mesh.ranks(), brute.ranks);
  EXPECT_EQ(mesh.max_rank().value, *std::max_element(brute.ranks.begin(), brute.ranks.end()));
  for (int64_t i = 0; i < mesh.size(); ++i) {
    const std::vector<int64_t> at = brute.coordinate(i);
    const Rank rank(brute.ranks[i]);
    EXPECT_EQ(mesh.rank_at(at).value(), rank);
    EXPECT_THAT(mesh.coordinate(rank).value(), testing::ElementsAreArray(at));
    EXPECT_TRUE(mesh.contains(rank));
    for (int d = 0; d < mesh.ndim(); ++d) {
      EXPECT_EQ(mesh.group(d, rank).value(), brute.slice({brute.dims[d].name}, i).ranks);
    }
  }
  for (int64_t rank = -1; rank < 130; ++rank) {
    const bool there = std::count(brute.ranks.begin(), brute.ranks.end(), rank) > 0;
    EXPECT_EQ(mesh.contains(Rank(rank)), there) << rank;
    if (!there) expect_error(mesh.coordinate(Rank(rank)), kNotFound, {absl::StrCat("rank ", rank)});
  }
  // However it came about, it equals the mesh of the explicit table, in value and in hash.
  const DeviceMesh explicit_mesh = DeviceMesh::from_ranks(brute.dims, brute.ranks).value();
  EXPECT_EQ(mesh, explicit_mesh);
  EXPECT_EQ(absl::HashOf(mesh), absl::HashOf(explicit_mesh));
}

TEST(DeviceMeshTest, ExampleOfTheHeader) {
  absl::StatusOr<DeviceMesh> mesh = DeviceMesh::create({{"dp", 2}, {"tp", 4}});
  ASSERT_TRUE(mesh.ok());
  EXPECT_EQ(mesh->size(), 8);
  EXPECT_THAT(mesh->coordinate(Rank(5)).value(), ElementsAre(1, 1));
  EXPECT_THAT(mesh->slice({"tp"}, Rank(5))->ranks(), ElementsAre(4, 5, 6, 7));
  EXPECT_EQ(mesh->flatten()->name(0), "dp_tp");
}

TEST(DeviceMeshTest, DescribesItself) {
  const DeviceMesh mesh = make({{"dp", 3}, {"tp", 5}});
  EXPECT_EQ(mesh.ndim(), 2);
  EXPECT_EQ(mesh.size(), 15);
  EXPECT_EQ(mesh.size(0), 3);
  EXPECT_EQ(mesh.size(1), 5);
  EXPECT_THAT(mesh.shape(), ElementsAre(3, 5));
  EXPECT_EQ(mesh.name(1), "tp");
  EXPECT_EQ(mesh.dim("tp").value(), 1);
  EXPECT_EQ(mesh.to_string(), "DeviceMesh(dp=3, tp=5)");
}

TEST(DeviceMeshTest, MatchesTheTableForEveryShape) {
  for (int64_t a : {1, 2, 3, 5}) {
    for (int64_t b : {1, 2, 4}) {
      for (int64_t c : {1, 3, 6}) {
        Brute brute{{{"a", a}, {"b", b}, {"c", c}}, std::vector<int64_t>(a * b * c)};
        std::iota(brute.ranks.begin(), brute.ranks.end(), 0);
        expect_matches(make(brute.dims), brute);
      }
    }
  }
}

// Random chains of operations on random meshes, with and without a table.
TEST(DeviceMeshTest, ChainsOfOperationsMatchTheTable) {
  std::mt19937 random(7);
  auto below = [&](int64_t n) { return static_cast<int64_t>(random() % n); };
  for (int round = 0; round < 400; ++round) {
    Brute brute;
    int64_t size = 1;
    for (int d = 0; d < 1 + below(4); ++d) {
      const int64_t n = 1 + below(4);
      if (size * n > 96) break;
      size *= n;
      brute.dims.push_back({absl::StrCat("d", d), n});
    }
    brute.ranks.resize(size);
    std::iota(brute.ranks.begin(), brute.ranks.end(), below(3) * 10);
    if (below(3) == 0) std::shuffle(brute.ranks.begin(), brute.ranks.end(), random);
    DeviceMesh mesh = DeviceMesh::from_ranks(brute.dims, brute.ranks).value();
    int fresh = 0;
    for (int step = 0; step < 4; ++step) {
      expect_matches(mesh, brute);
      const int ndim = mesh.ndim();
      switch (below(3)) {
        case 0: {  // slice, in any order of the dimensions
          std::vector<std::string> names;
          for (const MeshDim& dim : brute.dims) names.push_back(dim.name);
          std::shuffle(names.begin(), names.end(), random);
          names.resize(1 + below(ndim));
          const int64_t member = below(mesh.size());
          mesh = mesh.slice(names, Rank(brute.ranks[member])).value();
          brute = brute.slice(names, member);
          break;
        }
        case 1: {  // flatten some neighbours
          const int first = static_cast<int>(below(ndim));
          const int count = static_cast<int>(1 + below(ndim - first));
          std::vector<std::string> names;
          MeshDim merged{absl::StrCat("f", step, "_", fresh++), 1};
          for (int d = first; d < first + count; ++d) {
            names.push_back(brute.dims[d].name);
            merged.size *= brute.dims[d].size;
          }
          mesh = mesh.flatten(names, merged.name).value();
          brute.dims.erase(brute.dims.begin() + first, brute.dims.begin() + first + count);
          brute.dims.insert(brute.dims.begin() + first, merged);
          break;
        }
        default: {  // unflatten into three
          const int d = static_cast<int>(below(ndim));
          const MeshDim old = brute.dims[d];
          std::vector<int64_t> divisors;
          for (int64_t n = 1; n <= old.size; ++n) {
            if (old.size % n == 0) divisors.push_back(n);
          }
          const int64_t outer = divisors[below(divisors.size())];
          const int64_t rest = old.size / outer;
          int64_t middle = 1 + below(rest);
          while (rest % middle != 0) middle = 1 + below(rest);
          std::vector<MeshDim> parts;
          for (int64_t n : {outer, middle, rest / middle}) {
            parts.push_back({absl::StrCat("u", step, "_", fresh++), n});
          }
          mesh = mesh.unflatten(old.name, parts).value();
          brute.dims.erase(brute.dims.begin() + d);
          brute.dims.insert(brute.dims.begin() + d, parts.begin(), parts.end());
        }
      }
    }
    expect_matches(mesh, brute);
  }
}

TEST(DeviceMeshTest, ConcatenateUndoesSlice) {
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    auto up_to = [&](int64_t n) { return 1 + static_cast<int64_t>(random() % n); };
    const std::vector<MeshDim> dims = {
        {"a", up_to(3)}, {"b", up_to(4)}, {"c", up_to(3)}, {"d", up_to(2)}};
    std::vector<int64_t> ranks(make(dims).size());
    std::iota(ranks.begin(), ranks.end(), 5);
    if (round % 2 == 1) std::shuffle(ranks.begin(), ranks.end(), random);
    const DeviceMesh mesh = DeviceMesh::from_ranks(dims, ranks).value();
    std::vector<std::string> names = {"a", "b", "c", "d"};
    std::shuffle(names.begin(), names.end(), random);
    const size_t cut = 1 + random() % 3;
    const std::vector<std::string> left(names.begin(), names.begin() + cut);
    const std::vector<std::string> right(names.begin() + cut, names.end());
    const Rank member(ranks[random() % ranks.size()]);
    const std::vector<DeviceMesh> slices = {mesh.slice(left, member).value(),
                                            mesh.slice(right, member).value()};
    EXPECT_EQ(DeviceMesh::concatenate(slices).value(), mesh.slice(names, member).value());
  }
}

TEST(DeviceMeshTest, ConcatenateAcceptsFlattenedSlices) {
  const DeviceMesh mesh = make({{"dp", 2}, {"pp", 3}, {"tp", 4}});
  const DeviceMesh outer = mesh.slice({"dp", "tp"}, Rank(17)).value().flatten({}, "dp_tp").value();
  const DeviceMesh pp = mesh.slice({"pp"}, Rank(17)).value();
  const DeviceMesh both = DeviceMesh::concatenate({pp, outer}).value();
  EXPECT_EQ(both.dims(), (std::vector<MeshDim>{{"pp", 3}, {"dp_tp", 8}}));
  EXPECT_THAT(both.coordinate(Rank(17)).value(), ElementsAre(1, 5));
}

TEST(DeviceMeshTest, FlattenedDimensionsNeedNoEvenSpacing) {
  const DeviceMesh mesh = make({{"dp", 2}, {"pp", 3}, {"tp", 2}});
  const DeviceMesh flat = mesh.slice({"dp", "tp"}, Rank(2)).value().flatten().value();
  EXPECT_THAT(flat.ranks(), ElementsAre(2, 3, 8, 9));
  EXPECT_EQ(flat.to_string(), "DeviceMesh(dp_tp=4, ranks [2, 3, 8, 9])");
  EXPECT_THAT(mesh.slice({"tp", "dp"}, Rank(2)).value().flatten().value().ranks(),
              ElementsAre(2, 8, 3, 9));
}

TEST(DeviceMeshTest, EqualityIsNamesSizesAndRanks) {
  const DeviceMesh mesh = make({{"dp", 2}, {"tp", 2}});
  const std::vector<DeviceMesh> others = {
      mesh,
      make({{"dp", 2}, {"tp", 2}}),
      DeviceMesh::from_ranks({{"dp", 2}, {"tp", 2}}, {0, 1, 2, 3}).value(),
      DeviceMesh::from_ranks({{"dp", 2}, {"tp", 2}}, {0, 2, 1, 3}).value(),
      DeviceMesh::from_ranks({{"dp", 2}, {"tp", 2}}, {0, 1, 3, 2}).value(),
      DeviceMesh::from_ranks({{"dp", 2}, {"tp", 2}}, {0, 1, 3, 2}).value(),
      DeviceMesh::from_ranks({{"dp", 2}, {"tp", 2}}, {1, 0, 3, 2}).value(),
      make({{"dp", 2}, {"pp", 2}}),
      make({{"tp", 2}, {"dp", 2}}),
      make({{"dp", 4}}),
      make({{"dp", 4}, {"tp", 1}}),
      make({{"dp", 8}, {"tp", 4}}).slice({"dp"}, Rank(2)).value(),
      mesh.flatten({}, "dp").value(),
  };
  EXPECT_TRUE(absl::VerifyTypeImplementsAbslHashCorrectly(others));
  EXPECT_EQ(others[0], others[2]);
  EXPECT_EQ(others[4], others[5]);
  EXPECT_FALSE(others[0] == others[3]);
  EXPECT_FALSE(others[4] == others[6]);
  EXPECT_EQ(others[9], others[12]);
}

TEST(DeviceMeshTest, PrintsRanksThatAreNotTheFirstOnes) {
  const DeviceMesh mesh = make({{"dp", 2}, {"tp", 4}});
  EXPECT_EQ(mesh.slice({"tp"}, Rank(5))->to_string(), "DeviceMesh(tp=4, ranks [4, 5, 6, 7])");
  EXPECT_EQ(mesh.slice({"tp"}, Rank(1))->to_string(), "DeviceMesh(tp=4)");
  EXPECT_EQ(make({{"a", 4}, {"b", 20}}).slice({"b"}, Rank(20))->to_string(),
            "DeviceMesh(b=20, ranks [20, 21, 22, 23, 24, 25, 26, 27, ... 12 more])");
  EXPECT_EQ(DeviceMesh::from_ranks({{"x", 3}}, {2, 0, 1})->to_string(),
            "DeviceMesh(x=3, ranks [2, 0, 1])");
}

TEST(DeviceMeshTest, Parses) {
  EXPECT_EQ(DeviceMesh::parse("dp=2,tp=4").value(), make({{"dp", 2}, {"tp", 4}}));
  EXPECT_EQ(DeviceMesh::parse(" dp = 2 ,\ttp= 4\n").value(), make({{"dp", 2}, {"tp", 4}}));
  EXPECT_EQ(DeviceMesh::parse("a.b-c_1=7").value(), make({{"a.b-c_1", 7}}));
}

TEST(DeviceMeshTest, ParseErrorsQuoteWhatIsWrong) {
  expect_error(DeviceMesh::parse(""), kInvalid, {"mesh \"\"", "\"\" is not NAME=SIZE"});
  expect_error(DeviceMesh::parse("dp"), kInvalid, {"\"dp\" is not NAME=SIZE", "\"dp=2,tp=4\""});
  expect_error(DeviceMesh::parse("dp=2,"), kInvalid, {"mesh \"dp=2,\"", "\"\" is not NAME=SIZE"});
  expect_error(DeviceMesh::parse("dp=2=3"), kInvalid, {"\"dp=2=3\" is not NAME=SIZE"});
  expect_error(DeviceMesh::parse("dp=two"), kInvalid, {"size \"two\" of \"dp\" is not a number"});
  expect_error(DeviceMesh::parse("dp="), kInvalid, {"size \"\" of \"dp\""});
  expect_error(DeviceMesh::parse("dp=2.5"), kInvalid, {"\"2.5\""});
  expect_error(DeviceMesh::parse("dp=99999999999999999999"), kInvalid, {"is not a number"});
  expect_error(DeviceMesh::parse("=2"), kInvalid, {"\"\" is no name"});
  expect_error(DeviceMesh::parse("d p=2"), kInvalid, {"\"d p\" is no name"});
  expect_error(DeviceMesh::parse("dp=0"), kInvalid, {"\"dp\" has size 0"});
  expect_error(DeviceMesh::parse("dp=2,dp=2"), kInvalid, {"two dimensions are named \"dp\""});
}

TEST(DeviceMeshTest, ParseSurvivesRandomText) {
  std::mt19937 random(11);
  const std::string alphabet =
      "dp=2,0-9 \t\xff\0"
      "=,";
  for (int i = 0; i < 20000; ++i) {
    std::string text;
    for (size_t n = random() % 12; n > 0; --n) text += alphabet[random() % alphabet.size()];
    absl::StatusOr<DeviceMesh> mesh = DeviceMesh::parse(text);
    EXPECT_TRUE(!mesh.ok() || mesh->size() >= 1);
  }
}

TEST(DeviceMeshTest, RefusesBadDimensions) {
  expect_error(DeviceMesh::create({}), kInvalid, {"at least one dimension"});
  expect_error(DeviceMesh::create({{"dp", 0}}), kInvalid, {"\"dp\" has size 0", "at least 1"});
  expect_error(DeviceMesh::create({{"dp", 2}, {"tp", -3}}), kInvalid,
               {"(dp=2, tp=-3)", "\"tp\" has size -3"});
  expect_error(DeviceMesh::create({{"dp", 2}, {"tp", 2}, {"dp", 2}}), kInvalid,
               {"two dimensions are named \"dp\""});
  expect_error(DeviceMesh::create({{"", 2}}), kInvalid, {"\"\" is no name"});
  expect_error(DeviceMesh::create({{"d=p", 2}}), kInvalid, {"\"d=p\" is no name"});
  const int64_t big = int64_t{1} << 32;
  expect_error(DeviceMesh::create({{"a", big}, {"b", big}}), kInvalid, {"does not fit 64 bits"});
  EXPECT_EQ(DeviceMesh::create({{"a", big}, {"b", big / 4}})->size(), int64_t{1} << 62);
}

TEST(DeviceMeshTest, RefusesBadRanks) {
  expect_error(DeviceMesh::from_ranks({{"a", 2}, {"b", 2}}, {0, 1, 2}), kInvalid,
               {"a=2, b=2", "wanted 4 ranks, given 3"});
  expect_error(DeviceMesh::from_ranks({{"a", 3}}, {4, 7, 4}), kInvalid, {"rank 4 is there twice"});
  expect_error(DeviceMesh::from_ranks({{"a", 2}}, {3, 3}), kInvalid, {"rank 3 is there twice"});
  expect_error(DeviceMesh::from_ranks({{"a", 2}}, {0, -1}), kInvalid, {"rank -1 is negative"});
  expect_error(DeviceMesh::from_ranks({{"a", 0}}, {}), kInvalid, {"has size 0"});
  // Huge ranks do not overflow the search for a layout.
  const int64_t max = std::numeric_limits<int64_t>::max();
  EXPECT_THAT(DeviceMesh::from_ranks({{"a", 2}, {"b", 2}}, {0, max, max - 1, 1})->ranks(),
              ElementsAre(0, max, max - 1, 1));
}

TEST(DeviceMeshTest, UnknownNamesListTheKnownOnes) {
  const DeviceMesh mesh = make({{"dp", 2}, {"tp", 4}});
  expect_error(mesh.dim("pp"), kNotFound,
               {"DeviceMesh(dp=2, tp=4)", "no dimension \"pp\"", "\"dp\", \"tp\""});
  expect_error(mesh.slice({"tp", "pp"}, Rank(0)), kNotFound, {"no dimension \"pp\""});
  expect_error(mesh.flatten({"pp"}), kNotFound, {"no dimension \"pp\""});
  expect_error(mesh.unflatten("pp", {{"a", 2}}), kNotFound, {"no dimension \"pp\""});
}

TEST(DeviceMeshTest, RefusesBadCoordinates) {
  const DeviceMesh mesh = make({{"dp", 2}, {"tp", 4}});
  expect_error(mesh.rank_at({1}), kInvalid, {"(1)", "wanted 2 numbers, given 1"});
  expect_error(mesh.rank_at({1, 4}), kInvalid, {"(1, 4)", "4 is outside dimension tp of size 4"});
  expect_error(mesh.rank_at({-1, 0}), kInvalid, {"-1 is outside dimension dp"});
  expect_error(mesh.coordinate(Rank(8)), kNotFound, {"rank 8 is not in DeviceMesh(dp=2, tp=4)"});
  expect_error(mesh.group(2, Rank(0)), kInvalid, {"no dimension 2", "0 to 1"});
  expect_error(mesh.group(-1, Rank(0)), kInvalid, {"no dimension -1"});
  expect_error(mesh.group(0, Rank(9)), kNotFound, {"rank 9"});
}

TEST(DeviceMeshTest, RefusesBadSlices) {
  const DeviceMesh mesh = make({{"dp", 2}, {"tp", 4}});
  expect_error(mesh.slice({}, Rank(0)), kInvalid, {"a slice of", "at least one dimension"});
  expect_error(mesh.slice({"tp", "tp"}, Rank(0)), kInvalid, {"two dimensions are named \"tp\""});
  expect_error(mesh.slice({"tp"}, Rank(8)), kNotFound, {"rank 8 is not in"});
}

TEST(DeviceMeshTest, RefusesBadFlattens) {
  const DeviceMesh mesh = make({{"a", 2}, {"b", 2}, {"c", 2}});
  expect_error(mesh.flatten({"a", "c"}), kInvalid, {"flatten (a, c)", "neighbouring dimensions"});
  expect_error(mesh.flatten({"b", "a"}), kInvalid, {"flatten (b, a)", "mesh's order"});
  expect_error(mesh.flatten({"a", "a"}), kInvalid, {"neighbouring dimensions"});
  expect_error(mesh.flatten({"a", "b"}, "c"), kInvalid, {"two dimensions are named \"c\""});
  expect_error(mesh.flatten({"a", "b"}, "a b"), kInvalid, {"\"a b\" is no name"});
}

TEST(DeviceMeshTest, RefusesBadUnflattens) {
  const DeviceMesh mesh = make({{"a", 6}, {"b", 2}});
  expect_error(mesh.unflatten("a", {{"x", 2}, {"y", 2}}), kInvalid,
               {"multiply to 4", "the 6 of \"a\""});
  expect_error(mesh.unflatten("a", {{"x", 2}, {"b", 3}}), kInvalid,
               {"two dimensions are named \"b\""});
  expect_error(mesh.unflatten("a", {}), kInvalid, {"at least one dimension"});
  EXPECT_EQ(mesh.unflatten("a", {{"x", 2}, {"a", 3}}).value(),
            make({{"x", 2}, {"a", 3}, {"b", 2}}));
}

TEST(DeviceMeshTest, RefusesBadConcatenations) {
  const DeviceMesh mesh = make({{"a", 2}, {"b", 3}, {"c", 2}});
  const DeviceMesh a = mesh.slice({"a"}, Rank(0)).value();
  const DeviceMesh b = mesh.slice({"b"}, Rank(0)).value();
  expect_error(DeviceMesh::concatenate({}), kInvalid, {"at least one mesh"});
  expect_error(DeviceMesh::concatenate({a, a}), kInvalid, {"two dimensions are named \"a\""});
  expect_error(DeviceMesh::concatenate({a, mesh.slice({"b"}, Rank(1)).value()}), kInvalid,
               {"ranks [0, 6]", "no rank in common"});
  expect_error(DeviceMesh::concatenate({mesh, b.flatten({}, "other").value()}), kInvalid,
               {"one rank at two coordinates"});
  const DeviceMesh shuffled =
      DeviceMesh::from_ranks({{"x", 2}, {"y", 3}}, {3, 5, 0, 1, 4, 2}).value();
  expect_error(DeviceMesh::concatenate({shuffled.slice({"x"}, Rank(0)).value(), b}), kInvalid,
               {"not slices of one mesh"});
  // Layouts that meet in rank 5 but would reach below rank 0.
  expect_error(DeviceMesh::concatenate({DeviceMesh::from_ranks({{"x", 2}}, {1, 5}).value(),
                                        DeviceMesh::from_ranks({{"y", 2}}, {3, 5}).value(),
                                        DeviceMesh::from_ranks({{"z", 2}}, {4, 5}).value()}),
               kInvalid, {"not slices of one mesh"});
}

// 65,536 ranks cost what 4 cost: no table, and no work per rank.
TEST(DeviceMeshTest, CostDoesNotGrowWithTheRanks) {
  EXPECT_LE(sizeof(DeviceMesh), 16u);
  struct Cost {
    int64_t allocations, bytes;
    bool operator==(const Cost&) const = default;
  };
  auto measure = [](auto&& work) {
    const Cost before{allocations_so_far(), allocated_bytes_of_thread()};
    work();
    return Cost{allocations_so_far() - before.allocations,
                allocated_bytes_of_thread() - before.bytes};
  };
  auto work = [&](int64_t n) {
    std::vector<Cost> costs;
    const DeviceMesh mesh = make({{"pp", n}, {"dp", n}, {"tp", n}});
    const Rank last(n * n * n - 1);
    costs.push_back(measure([&] { make({{"pp", n}, {"dp", n}, {"tp", n}}); }));
    costs.push_back(measure([&] { EXPECT_TRUE(mesh.slice({"tp", "pp"}, last).ok()); }));
    const DeviceMesh uneven = mesh.slice({"pp", "tp"}, last).value();
    costs.push_back(measure([&] { EXPECT_TRUE(uneven.flatten().ok()); }));
    costs.push_back(measure([&] { EXPECT_TRUE(mesh.coordinate(last).ok()); }));
    costs.push_back(measure([&] { EXPECT_TRUE(mesh == DeviceMesh(mesh)); }));
    costs.push_back(measure([&] { EXPECT_FALSE(mesh == uneven); }));
    return costs;
  };
  const std::vector<Cost> small = work(2);
  EXPECT_TRUE(work(41) == small);       // 68,921 ranks
  EXPECT_TRUE(work(1 << 20) == small);  // 2^60 ranks
  EXPECT_LT(small[0].bytes, 2048);
  EXPECT_EQ(small[3].allocations, 0);  // coordinate
  EXPECT_EQ(small[4].allocations, 0);  // copy, compare
}

}  // namespace
}  // namespace shardweave
