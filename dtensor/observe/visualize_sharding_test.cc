// Pictures of layouts, as text and as SVG.

#include "shardweave/dtensor/observe/visualize_sharding.h"

#include <cstdlib>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace shardweave {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

DeviceMesh mesh_of(std::vector<MeshDim> dims) {
  return DeviceMesh::create(std::move(dims)).value();
}

std::string text_of(Placements placements, const DeviceMesh& mesh,
                    const std::vector<int64_t>& shape, const VisualizeOptions& options = {}) {
  return visualize_sharding_text(Layout(std::move(placements)), mesh, shape, options).value();
}

int occurrences(const std::string& text, const std::string& part) {
  int n = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

const DeviceMesh kSquare = mesh_of({{"dp", 2}, {"tp", 2}});

TEST(VisualizeShardingTest, TwoCutsMakeAGrid) {
  EXPECT_EQ(text_of({Shard(0), Shard(1)}, kSquare, {7, 5}),
            R"([7, 5] as [S(0), S(1)] on DeviceMesh(dp=2, tp=2)
                    0:3                          3:5
    ┌──────────────────────────────────┬──────────────────────┐
    │                                  │                      │
    │                                  │                      │
0:4 │                0                 │          1           │
    │                                  │                      │
    │                                  │                      │
    ├──────────────────────────────────┼──────────────────────┤
    │                                  │                      │
4:7 │                2                 │          3           │
    │                                  │                      │
    └──────────────────────────────────┴──────────────────────┘
dp=2  S(0): cuts the rows
tp=2  S(1): cuts the columns
)");
}

TEST(VisualizeShardingTest, DimensionsCountFromTheEnd) {
  EXPECT_EQ(text_of({Shard(-2), Shard(-1)}, kSquare, {7, 5}),
            text_of({Shard(0), Shard(1)}, kSquare, {7, 5}));
}

TEST(VisualizeShardingTest, CopiesAndSummandsAreMarked) {
  const std::string copies = text_of({Shard(0), Replicate()}, kSquare, {7, 5});
  EXPECT_THAT(copies, HasSubstr(" 0, 1 "));
  EXPECT_THAT(copies, HasSubstr(" 2, 3 "));
  EXPECT_THAT(copies, HasSubstr("tp=2  R: copies, written \"a, b\"\n"));

  const std::string summands = text_of({Replicate(), Partial()}, kSquare, {7, 5});
  EXPECT_THAT(summands, HasSubstr(" 0 + 1, 2 + 3 "));
  EXPECT_THAT(summands, HasSubstr("tp=2  P(sum): each rank holds a part of the reduction"));

  EXPECT_THAT(text_of({Partial(ReduceOp::kMax), Replicate()}, kSquare, {7, 5}),
              HasSubstr(" 0 + 2, 1 + 3 "));
}

TEST(VisualizeShardingTest, OneDimensionAndNone) {
  EXPECT_EQ(text_of({Shard(0)}, mesh_of({{"x", 3}}), {7}), R"([7] as [S(0)] on DeviceMesh(x=3)
           0:3                      3:6              6:7
┌────────────────────────┬────────────────────────┬────────┐
│           0            │           1            │   2    │
└────────────────────────┴────────────────────────┴────────┘
x=3  S(0): cuts it
)");
  const std::string scalar = text_of({Partial()}, mesh_of({{"x", 3}}), {});
  EXPECT_THAT(scalar, HasSubstr(" 0 + 1 + 2 "));
}

TEST(VisualizeShardingTest, StridedAndRaggedCuts) {
  const DeviceMesh mesh = mesh_of({{"x", 2}});
  const std::string strided = text_of({StridedShard(0, 2)}, mesh, {8});
  EXPECT_THAT(strided, HasSubstr("0:2"));
  EXPECT_EQ(occurrences(strided, " 0 "), 2);  // each rank has a piece of both chunks
  EXPECT_EQ(occurrences(strided, " 1 "), 2);
  const std::string ragged = text_of({RaggedShard(0, {5, 1})}, mesh, {6});
  EXPECT_THAT(ragged, HasSubstr("0:5"));
  EXPECT_THAT(ragged, HasSubstr("5:6"));
}

TEST(VisualizeShardingTest, RanksWithNothingAreNamed) {
  const std::string text = text_of({Shard(0)}, mesh_of({{"x", 4}}), {2, 3});
  EXPECT_THAT(text, EndsWith("nothing on ranks 2, 3\n"));
  EXPECT_THAT(text_of({Shard(0)}, mesh_of({{"x", 3}}), {2}), EndsWith("nothing on rank 2\n"));
  EXPECT_THAT(text_of({Shard(0)}, mesh_of({{"x", 2}}), {0, 3}),
              EndsWith("nothing on ranks 0, 1\n"));
}

TEST(VisualizeShardingTest, TwoOfMoreDimensionsAreDrawn) {
  const DeviceMesh mesh = mesh_of({{"a", 2}, {"b", 2}, {"c", 2}});
  const std::vector<int64_t> shape = {4, 6, 8};
  const std::string cut = text_of({Shard(2), Replicate(), Shard(1)}, mesh, shape);
  EXPECT_THAT(cut, HasSubstr("rows: dimension 1, columns: dimension 2\n"));
  EXPECT_THAT(cut, HasSubstr(" 0, 2 "));

  VisualizeOptions options;
  options.dims = {0, 1};
  const std::string other = text_of({Shard(2), Replicate(), Shard(1)}, mesh, shape, options);
  EXPECT_THAT(other, HasSubstr("rows: dimension 0, columns: dimension 1\n"));
  EXPECT_THAT(other, HasSubstr(" 0, 2 | 4, 6 "));
  EXPECT_THAT(other, HasSubstr("a=2  S(2): cuts dimension 2, not drawn, written \"a | b\"\n"));
}

TEST(VisualizeShardingTest, SeveralCutsOfOneDimension) {
  const std::string text = text_of({Shard(0), Shard(0)}, kSquare, {8});
  const size_t line = text.find(" 0 ");
  for (const char* next : {" 1 ", " 2 ", " 3 "}) EXPECT_GT(text.find(next), line);
  // Cut in the other order, rank 2 (dp=1, tp=0) comes second.
  const Layout layout = Layout::create({Shard(0), Shard(0)}, {1, 0}).value();
  const std::string other = visualize_sharding_text(layout, kSquare, {8}).value();
  EXPECT_LT(other.find(" 2 "), other.find(" 1 "));
}

TEST(VisualizeShardingTest, RanksAreThoseOfTheWorld) {
  const DeviceMesh mesh = DeviceMesh::from_ranks({{"x", 2}}, {17, 4}).value();
  const std::string text = text_of({Shard(0)}, mesh, {4});
  EXPECT_LT(text.find(" 17 "), text.find(" 4 "));
}

TEST(VisualizeShardingTest, LargeMeshesAreSummarised) {
  const DeviceMesh mesh = mesh_of({{"dp", 4096}, {"tp", 16}});
  const std::string text = text_of({Shard(0), Replicate()}, mesh, {1 << 20, 4096});
  EXPECT_LT(occurrences(text, "\n"), 40);
  EXPECT_THAT(text, HasSubstr("0 … 15 (16 ranks)"));
  EXPECT_THAT(text, HasSubstr("65520 … 65535 (16 ranks)"));
  EXPECT_THAT(text, HasSubstr("⋮"));
  const std::string columns = text_of({Shard(1), Shard(0)}, mesh, {64, 1 << 20});
  EXPECT_THAT(columns, HasSubstr("⋯"));
  EXPECT_THAT(text_of({Replicate(), Replicate()}, mesh, {4}), HasSubstr("0 … 65535 (65536 ranks)"));
  // More ranks than elements: the last pieces are empty, and that is shown as left out.
  EXPECT_THAT(text_of({Shard(0), Shard(0)}, mesh, {100}), HasSubstr("⋯"));
}

TEST(VisualizeShardingTest, EveryLineIsEquallyWide) {
  const auto width = [](std::string_view line) {
    return std::count_if(line.begin(), line.end(), [](char c) { return (c & 0xC0) != 0x80; });
  };
  const DeviceMesh mesh = mesh_of({{"a", 5}, {"b", 3}});
  for (const Placements& placements : std::vector<Placements>{{Shard(0), Shard(1)},
                                                              {Shard(1), Shard(1)},
                                                              {Replicate(), Shard(0)},
                                                              {StridedShard(0, 3), Shard(1)},
                                                              {Partial(), Shard(1)}}) {
    for (const std::vector<int64_t>& shape : {std::vector<int64_t>{17, 4}, {1, 100000}, {31, 7}}) {
      const std::string text = text_of(placements, mesh, shape);
      int64_t border = 0;
      for (size_t begin = 0; begin < text.size();) {
        const size_t end = text.find('\n', begin);
        const std::string_view line = std::string_view(text).substr(begin, end - begin);
        begin = end + 1;
        if (line.find("┌") != line.npos) border = width(line);
        if (line.find("│") != line.npos || line.find("└") != line.npos) {
          EXPECT_EQ(width(line), border) << text;
        }
      }
      EXPECT_GT(border, 0);
    }
  }
}

TEST(VisualizeShardingTest, ColoursOnlyWhereAsked) {
  EXPECT_THAT(text_of({Shard(0), Shard(1)}, kSquare, {7, 5}), Not(HasSubstr("\x1b")));
  VisualizeOptions options;
  options.colors = true;
  const std::string text = text_of({StridedShard(0, 2), Replicate()}, kSquare, {8}, options);
  // Two owners, two pieces each: two colours.
  EXPECT_EQ(occurrences(text, "\x1b[38;5;16;48;5;153m"), 2);
  EXPECT_EQ(occurrences(text, "\x1b[38;5;16;48;5;223m"), 2);
  EXPECT_EQ(occurrences(text, "\x1b[0m"), 4);
}

TEST(VisualizeShardingTest, PrintsWithoutColoursToAFile) {
  std::FILE* file = std::tmpfile();
  ASSERT_NE(file, nullptr);
  EXPECT_FALSE(terminal_colors(file));
  EXPECT_TRUE(visualize_sharding(Layout({Shard(0)}), mesh_of({{"x", 2}}), {4}, {}, file).ok());
  std::rewind(file);
  std::string text(4096, '\0');
  text.resize(std::fread(text.data(), 1, text.size(), file));
  std::fclose(file);
  EXPECT_EQ(text, text_of({Shard(0)}, mesh_of({{"x", 2}}), {4}));
}

TEST(VisualizeShardingTest, SvgIsADocumentWithATitle) {
  const std::string svg =
      visualize_sharding_svg(Layout({Shard(0), Shard(1)}), kSquare, {7, 5}).value();
  EXPECT_THAT(svg, StartsWith("<svg xmlns=\"http://www.w3.org/2000/svg\""));
  EXPECT_THAT(svg, EndsWith("</svg>\n"));
  EXPECT_THAT(svg, HasSubstr("role=\"img\""));
  EXPECT_THAT(svg, HasSubstr("<title>[7, 5] as [S(0), S(1)] on DeviceMesh(dp=2, tp=2)</title>"));
  EXPECT_THAT(svg, HasSubstr("<title>rows 4:7, columns 3:5: rank 3</title>"));
  EXPECT_THAT(svg, HasSubstr("prefers-color-scheme:dark"));
  EXPECT_EQ(occurrences(svg, "<rect"), 4);
  for (const char* tag : {"svg", "text", "g", "title", "desc", "style"}) {
    EXPECT_EQ(occurrences(svg, std::string("<") + tag + " ") +
                  occurrences(svg, std::string("<") + tag + ">"),
              occurrences(svg, std::string("</") + tag + ">"))
        << tag;
  }
  const std::string large =
      visualize_sharding_svg(Layout({Shard(0), Replicate()}), mesh_of({{"dp", 4096}, {"tp", 16}}),
                             {1 << 20, 4096})
          .value();
  EXPECT_LT(large.size(), 20000u);
}

TEST(VisualizeShardingTest, BadInputIsAnError) {
  const auto message = [](const Layout& layout, const std::vector<int64_t>& shape,
                          const VisualizeOptions& options = {}) {
    const absl::Status text = visualize_sharding_text(layout, kSquare, shape, options).status();
    EXPECT_EQ(visualize_sharding_svg(layout, kSquare, shape, options).status(), text);
    EXPECT_EQ(text.code(), absl::StatusCode::kInvalidArgument);
    return std::string(text.message());
  };
  EXPECT_NE(message(Layout({Shard(0)}), {4}), "");
  EXPECT_NE(message(Layout({Shard(1), Replicate()}), {4}), "");
  VisualizeOptions options;
  options.dims = {0, 2};
  EXPECT_THAT(message(Layout({Shard(0), Replicate()}), {4, 4}, options),
              HasSubstr("dims 0 and 2: wanted two different ones of the tensor's 2"));
  options.dims = {1, 1};
  message(Layout({Shard(0), Replicate()}), {4, 4}, options);
  options.dims.reset();
  options.max_pieces = 1;
  EXPECT_THAT(message(Layout({Shard(0), Replicate()}), {4, 4}, options), HasSubstr("max_pieces 1"));
}

}  // namespace
}  // namespace shardweave
