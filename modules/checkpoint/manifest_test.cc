#include "shardweave/modules/checkpoint/manifest.h"

#include <algorithm>
#include <array>
#include <random>
#include <set>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/modules/checkpoint/checksum.h"
#include "shardweave/modules/checkpoint/save_plan.h"

namespace shardweave {
namespace {

using checkpoint_internal::element_sum;
using ::testing::HasSubstr;

Layout layout(const char* text) {
  auto parsed = Layout::parse(text);
  EXPECT_TRUE(parsed.ok()) << parsed.status();
  return *parsed;
}

TEST(BoxTest, LocalBoxesAreWhatRanksHold) {
  const Dims mesh = {2, 3};
  const Dims shape = {7, 5};
  for (const char* text :
       {"[R, R]", "[S(0), R]", "[S(0), S(0)]", "[S(0)@1, S(0)@0]", "[S(1), S(0)]",
        "[R, S(0, sf=2)]", "[S(0, sf=3), S(1)]", "[R, S(0, sizes=[3,0,4])]",
        "[S(1, sizes=[5,0]), S(0, sizes=[1,2,4])]"}) {
    const Layout its = layout(text);
    for (int64_t i = 0; i < 2; ++i) {
      for (int64_t j = 0; j < 3; ++j) {
        const Dims at = {i, j};
        const Dims local = local_shape(its, mesh, at, shape);
        int64_t numel = 0;
        std::set<std::pair<int64_t, int64_t>> places;
        for (const LocalBox& box : local_boxes(its, mesh, at, shape)) {
          numel += box.box.numel();
          for (int64_t r = 0; r < box.box.shape[0]; ++r) {
            for (int64_t c = 0; c < box.box.shape[1]; ++c) {
              const int64_t row = box.local_offset[0] + r;
              const int64_t column = box.local_offset[1] + c;
              EXPECT_TRUE(places.emplace(row, column).second);
              EXPECT_LT(row, local[0]);
              EXPECT_LT(column, local[1]);
            }
          }
        }
        EXPECT_EQ(numel, local[0] * local[1]) << text;
      }
    }
  }
}

// As docs/checkpoints.md has the formula: checkpoints that are on disks have these.
TEST(ChecksumTest, SumsOfElementsStayAsTheyAre) {
  const auto sum = [](DType dtype, const auto& values) {
    const Dims shape = {static_cast<int64_t>(values.size())};
    return element_sum(values.data(), dtype, whole_box(shape), whole_box(shape), shape);
  };
  EXPECT_EQ(sum(DType::kU8, std::array<uint8_t, 4>{1, 2, 3, 250}), 0xa7e01074222d7b24);
  EXPECT_EQ(sum(DType::kBF16, std::array<uint16_t, 2>{0x0102, 0xfffe}), 0x340eccc4f92135d4);
  EXPECT_EQ(sum(DType::kF32, std::array<float, 3>{1, -2, 0.5}), 0x9744d0fc74800000);
  EXPECT_EQ(sum(DType::kF64, std::array<double, 2>{1, -2}), 0x3bbbf63545500000);
}

TEST(ChecksumTest, SumsOfElementsAddUpHoweverTheyAreCut) {
  std::mt19937 random(7);
  const Dims shape = {5, 4, 3};
  const Box whole = whole_box(shape);
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kU8}) {
    std::vector<unsigned char> bytes(static_cast<size_t>(whole.numel() * element_size(dtype)));
    for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random());
    const auto sum = [&] { return element_sum(bytes.data(), dtype, whole, whole, shape); };
    const uint64_t all = sum();
    for (int64_t row = 0; row <= 5; ++row) {
      for (int64_t column = 0; column <= 3; ++column) {
        uint64_t parts = 0;
        for (const Box& part :
             {Box{{0, 0, 0}, {row, 4, column}}, Box{{row, 0, 0}, {5 - row, 4, column}},
              Box{{0, 0, column}, {row, 4, 3 - column}},
              Box{{row, 0, column}, {5 - row, 4, 3 - column}}}) {
          if (part.numel() > 0) parts += element_sum(bytes.data(), dtype, part, whole, shape);
        }
        EXPECT_EQ(parts, all) << row << " " << column;
      }
    }
    for (size_t i = 0; i < bytes.size(); ++i) {
      for (int bit = 0; bit < 8; ++bit) {
        bytes[i] ^= static_cast<unsigned char>(1 << bit);
        EXPECT_NE(sum(), all) << i << " " << bit;
        bytes[i] ^= static_cast<unsigned char>(1 << bit);
      }
    }
    // Signs of two: the highest bits of wide elements have their places, too.
    for (size_t i : {size_t{0}, size_t{7}})
      bytes[(i + 1) * static_cast<size_t>(element_size(dtype)) - 1] ^= 0x80;
    EXPECT_NE(sum(), all);
    std::reverse(bytes.begin(), bytes.end());
    EXPECT_NE(sum(), all);
  }
}

TEST(BoxTest, ContainsNothingThatEndsNowhere) {
  const Box whole = whole_box(Dims{4, 3});
  EXPECT_TRUE(contains(whole, {{1, 0}, {3, 3}}));
  EXPECT_TRUE(contains(whole, {{4, 0}, {0, 3}}));
  EXPECT_FALSE(contains(whole, {{5, 0}, {0, 3}}));
  EXPECT_FALSE(contains(whole, {{1, 0}, {4, 3}}));
  EXPECT_FALSE(contains(whole, {{INT64_MAX, 0}, {2, 3}}));
  EXPECT_FALSE(contains(whole, {{INT64_MAX, 0}, {INT64_MAX, 3}}));
  EXPECT_FALSE(contains(whole, {{1, 0}, {INT64_MAX, 3}}));
  const int64_t huge = int64_t{1} << 62;
  EXPECT_EQ((Box{{0, 0, 0}, {huge, huge, 0}}.numel()), 0);
}

TEST(BoxTest, ComparesNoMoreThanIsLeft) {
  // Stairs: along either dimension all are beside each other, or nearly.
  std::vector<Box> stairs;
  for (int64_t i = 0; i < 100; ++i) stairs.push_back({{i, i}, {100, 1}});
  int64_t left = kMostBoxComparisons;
  auto two = find_overlap(stairs, left);
  ASSERT_TRUE(two.ok()) << two.status();
  EXPECT_FALSE(two->has_value());
  EXPECT_EQ(left, kMostBoxComparisons - 100 * 99 / 2);
  left = 1000;
  two = find_overlap(stairs, left);
  EXPECT_EQ(two.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(two.status().message()), HasSubstr("100 parts lie so that"));
  // Of a grid it takes few.
  std::vector<Box> grid;
  for (int64_t i = 0; i < 10'000; ++i) grid.push_back({{i / 100, i % 100}, {1, 1}});
  left = 2 * 10'000 * 100;
  EXPECT_TRUE(find_overlap(grid, left).ok());
  grid.push_back({{3, 4}, {2, 1}});
  left = kMostBoxComparisons;
  EXPECT_TRUE(find_overlap(grid, left)->has_value());
}

TEST(SavePlanTest, EveryElementIsWrittenOnceByOneThatHasIt) {
  std::mt19937 random(7);
  const std::vector<Dims> meshes = {{1}, {3}, {2, 2}, {2, 3}, {2, 2, 2}};
  for (const Dims& mesh : meshes) {
    for (int round = 0; round < 40; ++round) {
      std::vector<LaidOutTensor> tensors;
      for (int t = 0; t < 4; ++t) {
        Dims shape;
        for (int d = static_cast<int>(random() % 4); d > 0; --d) shape.push_back(random() % 6);
        Placements placements;
        for (const int64_t size : mesh) {
          const auto dim = shape.empty() ? 0 : static_cast<int>(random() % shape.size());
          const auto kind = shape.empty() ? 0 : random() % 4;
          Placement placement = Replicate();
          if (kind == 1) placement = Shard(dim);
          if (kind == 2) placement = StridedShard(dim, 2);
          const bool is_cut = std::any_of(placements.begin(), placements.end(),
                                          [&](const Placement& p) { return p.is_shard(dim); });
          if (kind == 3 && !is_cut) {
            std::vector<int64_t> sizes(static_cast<size_t>(size), 0);
            for (int64_t i = 0; i < shape[static_cast<size_t>(dim)]; ++i) {
              ++sizes[random() % sizes.size()];
            }
            placement = RaggedShard(dim, sizes);
          }
          placements.push_back(placement);
        }
        const Layout its(placements);
        if (!validate(its, mesh, shape).ok()) continue;
        tensors.push_back(
            {"t" + std::to_string(t), t % 2 == 0 ? DType::kF32 : DType::kU8, shape, its});
      }
      const auto plan = plan_save(tensors, mesh, /*split_bytes=*/32);
      ASSERT_TRUE(plan.ok()) << plan.status();
      std::vector<std::vector<int>> times;
      for (const LaidOutTensor& tensor : tensors) {
        times.emplace_back(static_cast<size_t>(whole_box(tensor.shape).numel()), 0);
      }
      for (const PlannedPiece& piece : *plan) {
        const LaidOutTensor& tensor = tensors[piece.tensor];
        Dims at(mesh.size(), 0);
        int64_t rank = piece.rank;
        for (size_t d = mesh.size(); d > 0; --d) {
          at[d - 1] = rank % mesh[d - 1];
          rank /= mesh[d - 1];
        }
        const auto held = local_boxes(tensor.layout, mesh, at, tensor.shape);
        EXPECT_TRUE(std::any_of(held.begin(), held.end(),
                                [&](const LocalBox& box) { return contains(box.box, piece.box); }));
        for_each_run(piece.box, whole_box(tensor.shape), piece.box,
                     [&](int64_t from, int64_t, int64_t count) {
                       for (int64_t i = 0; i < count; ++i) {
                         ++times[piece.tensor][static_cast<size_t>(from + i)];
                       }
                     });
      }
      for (const std::vector<int>& its : times) {
        for (const int count : its) ASSERT_EQ(count, 1);
      }
    }
  }
}

TEST(SavePlanTest, SharesOutWhatRanksHoldAlike) {
  const auto loads = [](const std::vector<LaidOutTensor>& tensors, const Dims& mesh) {
    std::vector<int64_t> bytes(4, 0);
    const auto plan = plan_save(tensors, mesh);
    for (const PlannedPiece& piece : *plan) {
      bytes[static_cast<size_t>(piece.rank)] +=
          piece.box.numel() * element_size(tensors[piece.tensor].dtype);
    }
    return bytes;
  };
  // One large tensor on all: each writes a slab.
  EXPECT_EQ(loads({{"w", DType::kF32, {40 << 20}, layout("[R]")}}, {4}),
            (std::vector<int64_t>{40 << 20, 40 << 20, 40 << 20, 40 << 20}));
  // Many small ones: as even as their sizes allow.
  std::vector<LaidOutTensor> many;
  for (int i = 0; i < 40; ++i) {
    many.push_back({"t" + std::to_string(i), DType::kF32, {100 + i}, layout("[R, R]")});
  }
  const std::vector<int64_t> even = loads(many, {2, 2});
  EXPECT_LE(
      *std::max_element(even.begin(), even.end()) - *std::min_element(even.begin(), even.end()),
      139 * 4);
  // What one alone has it writes; the others make up for it.
  const std::vector<int64_t> rest =
      loads({{"mine", DType::kU8, {1000}, layout("[S(0, sizes=[1000,0,0,0])]")},
             {"a", DType::kU8, {400}, layout("[R]")},
             {"b", DType::kU8, {400}, layout("[R]")},
             {"c", DType::kU8, {400}, layout("[R]")}},
            {4});
  EXPECT_EQ(rest, (std::vector<int64_t>{1000, 400, 400, 400}));
  const auto partial = plan_save({{"g", DType::kF32, {4}, layout("[P(sum)]")}}, Dims{4});
  EXPECT_EQ(partial.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(partial.status().message()), HasSubstr("\"g\": lies [P(sum)]"));
}

Manifest sample() {
  Manifest manifest;
  manifest.step = 100;
  manifest.world_size = 2;
  manifest.mesh = "dp=2";
  manifest.files = {{"rank-00000.safetensors", {1000, 7}}, {"rank-00001.safetensors", {900, 8}}};
  manifest.tensors["w"] = {DType::kBF16,
                           {5, 3},
                           {{"rank-00000.safetensors", {{0, 0}, {3, 3}}, 0xabc},
                            {"rank-00001.safetensors", {{3, 0}, {2, 3}}, ~uint64_t{0}}}};
  manifest.tensors["number"] = {DType::kI64, {}, {{"rank-00001.safetensors", {{}, {}}, 5}}};
  manifest.tensors["empty"] = {DType::kF32, {0, 4}, {}};
  manifest.aliases["v"] = "w";
  manifest.without_state = {"optimizer.w."};
  manifest.values = {{"epoch", "3"}, {"list", "[1,\"a\",null]"}, {"random", "{}"}};
  manifest.resumes = {"random"};
  return manifest;
}

TEST(ManifestTest, ComesBackFromItsText) {
  const std::string text = sample().to_json();
  const auto parsed = Manifest::parse(text);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(*parsed, sample());
  EXPECT_THAT(text,
              HasSubstr(R"("number": {"dtype":"I64","pieces":[{"file":"rank-00001.safetensors",)"));
  // Older ones do not say what resumes a run.
  std::string older = text;
  const std::string_view line = " \"resumes\": [\"random\"],\n";
  ASSERT_NE(older.find(line), std::string::npos);
  older.erase(older.find(line), line.size());
  Manifest without = sample();
  without.resumes.clear();
  EXPECT_EQ(*Manifest::parse(older), without);
  EXPECT_THAT(without.to_json(), ::testing::Not(HasSubstr("resumes")));
  EXPECT_EQ(piece_name("w", Dims{5, 3}, {{0, 0}, {3, 3}}), "w[0:3, 0:3]");
  EXPECT_EQ(piece_name("w", Dims{5, 3}, {{0, 0}, {5, 3}}), "w");
  EXPECT_EQ(piece_name("number", Dims{}, {}), "number");
}

TEST(ManifestTest, RefusesWhatIsNotWhole) {
  struct Case {
    const char* from;
    const char* to;
    const char* words;
  };
  const std::vector<Case> cases = {
      {"shardweave-checkpoint", "else", "\"format\""},
      {"\"step\": 100", "\"step\": -1", "\"step\": wanted a whole number"},
      {"\"step\": 100", "\"step\": 1e2", "\"step\": wanted a whole number"},
      {"\"step\": 100", "\"step\": 100, \"steps\": 1", "an object with format, version"},
      {"[3,0]", "[2,0]", "does not overlap piece 0"},
      {"[3,0]", "[4,0]", "\"shape\": wanted a part of the tensor, [0:5, 0:3]"},
      {"[3,0]", "[3]", "\"offset\": wanted a list of 2 whole numbers"},
      {"\"shape\":[2,3]", "\"shape\":[1,3]", "all 15 elements; these are 12"},
      {"\"shape\":[2,3]", "\"shape\":[0,3]", "\"shape\": wanted a part"},
      {"\"shape\":[5,3]", "\"shape\":[5,9223372036854775807]", "below 2^63"},
      {"\"BF16\"", "\"bf16\"", "\"dtype\": wanted a dtype"},
      {"ffffffffffffffff", "fffffffffffffff", "16 digits"},
      {"\"v\": \"w\"", "\"v\": \"x\"", "another name"},
      {"\"v\": \"w\"", "\"number\": \"w\"", "another name"},
      {"\"rank-00001.safetensors\": {\"bytes\"", "\"../x\": {\"bytes\"", "beside the manifest"},
      {"\"rank-00001.safetensors\": {\"bytes\"", "\"other\": {\"bytes\"", "one of \"files\""},
      {"\"rank-00001.safetensors\": {\"bytes\":900",
       "\"rank-00001.safetensors\": {\"bytes\":9223372036854775000", "below 2^63 in all files"},
      {"\"epoch\": 3", "\"epoch\": 3, \"epoch\": 4", "stands twice"},
      {"[\"random\"]", "[\"step\"]", "\"resumes\": wanted a list of names of \"values\""},
      {"[\"random\"]", "\"random\"", "\"resumes\": wanted a list"},
      {"}\n", "", "no JSON"},
      {"\"values\": {", "\"values\": [{", "no JSON"},
  };
  for (const Case& c : cases) {
    std::string text = sample().to_json();
    const size_t at = std::string_view(c.from) == "}\n" ? text.rfind(c.from) : text.find(c.from);
    ASSERT_NE(at, std::string::npos) << c.from;
    text.replace(at, std::string_view(c.from).size(), c.to);
    const auto parsed = Manifest::parse(text);
    ASSERT_FALSE(parsed.ok()) << c.from << " -> " << c.to;
    EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(parsed.status().message()), HasSubstr(c.words)) << c.from;
  }
  std::string later = sample().to_json();
  later.replace(later.find("\"version\": 1"), 12, "\"version\": 2");
  EXPECT_EQ(Manifest::parse(later).status().code(), absl::StatusCode::kUnimplemented);
}

TEST(ManifestTest, FindsOverlapsAmongManyPieces) {
  Manifest manifest = sample();
  SavedTensor& grid = manifest.tensors["grid"];
  grid.shape = {40, 40};
  for (int64_t i = 0; i < 40; i += 2) {
    for (int64_t j = 0; j < 40; j += 2) {
      grid.pieces.push_back({"rank-00000.safetensors", {{i, j}, {2, 2}}, 0});
    }
  }
  EXPECT_TRUE(Manifest::parse(manifest.to_json()).ok());
  grid.pieces[77].box.offset = {7, 7};
  EXPECT_FALSE(Manifest::parse(manifest.to_json()).ok());
}

}  // namespace
}  // namespace shardweave
