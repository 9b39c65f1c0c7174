#include "shardweave/modules/data/token_loader.h"

#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "ATen/ops/cat.h"
#include "ATen/ops/equal.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/comm/world.h"
#include "shardweave/dtensor/testing/on_mesh.h"

namespace shardweave {
namespace {

using ::shardweave::testing::on_mesh;
using ::shardweave::testing::try_on_mesh;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::vector<TokenFile> files_of(int64_t tokens) {
  std::string text;
  for (int64_t i = 0; i < tokens; ++i) text.push_back(static_cast<char>(i * i % 251));
  const auto half = static_cast<size_t>(tokens / 3);
  return {TokenFile::of_text(text.substr(0, half)).value(),
          TokenFile::of_text(text.substr(half)).value()};
}
std::string path_of(const std::string& name) {
  return std::string(std::getenv("TEST_TMPDIR")) + "/" + name;
}
TokenFile on_disk(const std::string& name, int64_t tokens) {
  auto writer = TokenFileWriter::create(path_of(name));
  for (int64_t i = 0; i < tokens; ++i) {
    EXPECT_TRUE(writer->write({static_cast<uint32_t>(i % 65536)}).ok());
  }
  EXPECT_TRUE(writer->close().ok());
  return TokenFile::open(path_of(name)).value();
}
// Whole batches, as one rank reads them: the oracle.
std::vector<TokenBatch> all_of(TokenLoader& loader, size_t most = 1000) {
  std::vector<TokenBatch> batches;
  while (batches.size() < most) {
    std::optional<TokenBatch> batch = loader.next();
    if (!batch.has_value()) break;
    batches.push_back(*std::move(batch));
  }
  return batches;
}

TEST(TokenLoaderTest, TargetsAreOneTokenFurtherOn) {
  TokenLoader loader({on_disk("steps", 100)}, {.seq = 7, .batch = 3, .shuffle = false});
  const TokenBatch batch = loader.next().value();
  EXPECT_EQ(batch.samples, 3);
  EXPECT_EQ(batch.tokens.sizes(), (std::vector<int64_t>{3, 7}));
  EXPECT_TRUE(batch.tokens.is_contiguous() && batch.targets.is_contiguous());
  EXPECT_TRUE(at::equal(batch.tokens.add(1), batch.targets));
  EXPECT_EQ(batch.tokens[2][0].item<int64_t>(), 14);
  EXPECT_EQ(loader.num_samples(), 14);
}

TEST(TokenLoaderTest, AnEpochHasEverySampleOnce) {
  for (const int prefetch : {0, 1, 5}) {
    TokenLoader loader({on_disk("epoch", 71)},
                       {.seq = 7, .batch = 4, .seed = 3, .epochs = 2, .prefetch = prefetch});
    std::vector<int64_t> firsts, sizes;
    for (const TokenBatch& batch : all_of(loader)) {
      sizes.push_back(batch.samples);
      for (int64_t i = 0; i < batch.samples; ++i) {
        firsts.push_back(batch.tokens[i][0].item<int64_t>());
      }
    }
    EXPECT_THAT(sizes, ::testing::ElementsAre(4, 4, 4, 4, 4));
    for (const auto begin : {firsts.begin(), firsts.begin() + 10}) {
      std::vector<int64_t> epoch(begin, begin + 10);
      std::sort(epoch.begin(), epoch.end());
      EXPECT_THAT(epoch, ::testing::ElementsAre(0, 7, 14, 21, 28, 35, 42, 49, 56, 63));
    }
    EXPECT_FALSE(loader.next().has_value());
    EXPECT_FALSE(loader.next().has_value());
  }
}

TEST(TokenLoaderTest, TheLastBatchIsSmallerOrLeftOut) {
  for (const bool drop_last : {false, true}) {
    TokenLoader loader({on_disk("last", 71)},
                       {.seq = 7, .batch = 4, .epochs = 1, .drop_last = drop_last});
    std::vector<int64_t> sizes;
    for (const TokenBatch& batch : all_of(loader)) sizes.push_back(batch.tokens.size(0));
    if (drop_last) {
      EXPECT_THAT(sizes, ::testing::ElementsAre(4, 4));
    } else {
      EXPECT_THAT(sizes, ::testing::ElementsAre(4, 4, 2));
    }
  }
}

// The parts of all ranks together are the batch of one, for batches that do not divide, with parts
// that are empty, across epochs.
TEST(TokenLoaderTest, PartsMakeTheBatch) {
  const std::vector<TokenFile> files = files_of(90);
  for (const int64_t batch : {1, 3, 5, 8}) {
    const TokenLoaderOptions options{.seq = 4, .batch = batch, .seed = 11, .epochs = 3};
    TokenLoader alone(files, options);
    const std::vector<TokenBatch> expected = all_of(alone);
    for (const int64_t count : {2, 3, 4}) {
      std::vector<std::unique_ptr<TokenLoader>> parts;
      for (int64_t i = 0; i < count; ++i) {
        parts.push_back(std::make_unique<TokenLoader>(files, options, BatchPart{i, count}));
      }
      for (const TokenBatch& whole : expected) {
        std::vector<at::Tensor> tokens, targets;
        for (const auto& part : parts) {
          const TokenBatch got = part->next().value();
          EXPECT_EQ(got.samples, whole.samples);
          tokens.push_back(got.tokens);
          targets.push_back(got.targets);
        }
        EXPECT_TRUE(at::equal(at::cat(tokens), whole.tokens)) << batch << " " << count;
        EXPECT_TRUE(at::equal(at::cat(targets), whole.targets)) << batch << " " << count;
      }
      for (const auto& part : parts) EXPECT_FALSE(part->next().has_value());
    }
  }
}

// Saved after some steps on one number of ranks, gone on with on another, and with another batch.
TEST(TokenLoaderTest, GoesOnOnAnyNumberOfRanks) {
  const std::vector<TokenFile> files = files_of(90);
  const TokenLoaderOptions options{.seq = 4, .batch = 5, .seed = 2};
  TokenLoader alone(files, options);
  const std::vector<TokenBatch> expected = all_of(alone, 20);
  for (const int64_t before : {1, 2, 3, 4}) {
    for (const int64_t steps : {0, 1, 4, 5, 13}) {
      TokenLoader first(files, options, BatchPart{before - 1, before});
      all_of(first, static_cast<size_t>(steps));
      const std::string position = first.position();
      for (const int64_t after : {1, 2, 3, 4}) {
        std::vector<at::Tensor> tokens;
        for (int64_t i = 0; i < after; ++i) {
          TokenLoader loader(files, options, BatchPart{i, after});
          all_of(loader, 2);  // somewhere else
          loader.set_position(position);
          EXPECT_EQ(loader.position(), position);
          all_of(loader, 3);
          tokens.push_back(loader.next().value().tokens);
        }
        EXPECT_TRUE(at::equal(at::cat(tokens), expected[steps + 3].tokens))
            << before << " " << steps << " " << after;
      }
    }
  }
  // The line of samples is the same for any batch.
  std::vector<at::Tensor> line;
  for (const TokenBatch& batch : expected) line.push_back(batch.tokens);
  const at::Tensor rows = at::cat(line);
  TokenLoader loader(files, {.seq = 4, .batch = 7, .seed = 2});
  TokenLoader first(files, options);
  all_of(first, 3);
  loader.set_position(first.position());
  EXPECT_TRUE(at::equal(loader.next()->tokens, rows.narrow(0, 15, 7)));
}

TEST(TokenLoaderTest, TheThreadIsBoundedAndEnds) {
  // More batches than a machine has memory for.
  TokenLoader loader({on_disk("bounded", 70001)}, {.seq = 10, .batch = 1 << 12, .prefetch = 3});
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_EQ(loader.next()->samples, 1 << 12);
  for (int i = 0; i < 50; ++i) {
    TokenLoader other({on_disk("bounded", 101)}, {.seq = 10, .batch = 2, .prefetch = 1 + i % 3});
    if (i % 2 == 0) other.next();
    if (i % 5 == 0) other.set_position(other.position());
  }  // while it reads, and while it waits
}

TEST(TokenLoaderTest, ErrorsComeInTheirPlace) {
  for (const int prefetch : {0, 2, 8}) {
    const TokenFile file = on_disk("shrinks", 20001);
    TokenLoader loader({file}, {.seq = 100, .batch = 10, .shuffle = false, .prefetch = prefetch});
    ASSERT_EQ(::truncate(path_of("shrinks").c_str(), 64 + 2 * 17000), 0);
    std::string error, position;
    int64_t good = 0;
    for (int i = 0; i < 20; ++i) {
      try {
        loader.next();
        ++good;
      } catch (const Error& e) {
        EXPECT_EQ(e.status().code(), absl::StatusCode::kDataLoss);
        error = e.what_without_backtrace();
        position = loader.position();
      }
    }
    EXPECT_GE(good, 16);
    if (good < 20) {
      EXPECT_THAT(error, AllOf(HasSubstr("TokenLoader::next: sample 16"), HasSubstr("of 200"),
                               HasSubstr("has become shorter")));
    }
    // And again, once the file is whole: from the batch that was missing.
    if (prefetch == 2) {
      ASSERT_LT(good, 20);
      EXPECT_THAT(position, HasSubstr(R"("sample":160,)"));
      EXPECT_THROW(loader.next(), Error);
      ASSERT_EQ(::truncate(path_of("shrinks").c_str(), 64 + 2 * 20001), 0);
      loader.set_position(position);
      EXPECT_EQ(loader.next()->tokens[0][0].item<int64_t>(), 16000);
      EXPECT_THAT(loader.position(), HasSubstr(R"("sample":170,)"));
    }
  }
}

TEST(TokenLoaderTest, SaysWhatIsWrong) {
  const std::vector<TokenFile> files = files_of(90);
  const auto message = [&](const TokenLoaderOptions& options, const BatchPart& part = {}) {
    try {
      TokenLoader loader(files, options, part);
    } catch (const Error& e) {
      EXPECT_EQ(e.status().code(), absl::StatusCode::kInvalidArgument);
      return std::string(e.what_without_backtrace());
    }
    return std::string();
  };
  EXPECT_THAT(message({.seq = 0}), HasSubstr("TokenLoader: seq is 0; wanted 1 or more"));
  EXPECT_THAT(message({.seq = 1000}), HasSubstr("60 tokens; wanted 1000 + 1"));
  EXPECT_THAT(message({.seq = INT64_MAX}), HasSubstr("seq is 9223372036854775807"));
  EXPECT_THAT(message({.batch = 0}), HasSubstr("batch is 0"));
  EXPECT_THAT(message({.epochs = -1}), HasSubstr("epochs is -1"));
  EXPECT_THAT(message({.prefetch = -1}), HasSubstr("prefetch is -1"));
  EXPECT_THAT(message({}, {.index = 2, .count = 2}), HasSubstr("part 2 of 2"));
  EXPECT_THAT(message({}, {.index = 0, .count = 0}), HasSubstr("part 0 of 0"));
  EXPECT_EQ(message({}), "");
  EXPECT_THROW(TokenLoader({}, {}), Error);
  TokenLoader loader(files, {});
  loader.next();
  const std::string before = loader.position();
  EXPECT_THROW(loader.set_position("{}"), Error);
  EXPECT_EQ(loader.position(), before);
}

// As many samples, of the same seed, and others all the same.
TEST(TokenLoaderTest, APositionOfOtherSamplesIsRefused) {
  const std::vector<TokenFile> files = {files_of(90)[0], files_of(80)[0]};
  TokenLoader loader(files, {.seq = 8});
  loader.next();
  TokenLoader same(files, {.seq = 8, .batch = 3});
  same.set_position(loader.position());
  TokenLoader swapped({files[1], files[0]}, {.seq = 8});
  ASSERT_EQ(swapped.num_samples(), loader.num_samples());
  EXPECT_THROW(swapped.set_position(loader.position()), Error);
  const TokenFile text = files_of(65)[0];  // 21 tokens, two samples each way
  TokenLoader ten({text}, {.seq = 10}), nine({text}, {.seq = 9});
  ASSERT_EQ(ten.num_samples(), nine.num_samples());
  EXPECT_THROW(ten.set_position(nine.position()), Error);
}

// --- on meshes -----------------------------------------------------------------------------------

void expect_as_one_rank(const std::vector<MeshDim>& dims, const NamedPlacements& placements) {
  const std::vector<TokenFile> files = files_of(90);
  const TokenLoaderOptions options{.seq = 5, .batch = 7, .seed = 4, .epochs = 2};
  TokenLoader alone(files, options);
  const std::vector<TokenBatch> expected = all_of(alone);
  on_mesh(dims, [&](const MeshPtr& mesh) {
    TokenLoader loader(files, options, mesh, placements);
    size_t step = 0;
    std::string in_the_middle;
    while (const std::optional<TokenBatch> batch = loader.next()) {
      ASSERT_TRUE(is_dtensor(batch->tokens) && is_dtensor(batch->targets));
      EXPECT_EQ(layout_of(batch->tokens),
                with_dims_of(Layout(resolve(mesh->mesh(), placements)), 2).value());
      EXPECT_TRUE(at::equal(full_tensor(batch->tokens), expected.at(step).tokens));
      EXPECT_TRUE(at::equal(full_tensor(batch->targets), expected.at(step).targets));
      if (++step == 2) in_the_middle = loader.position();
    }
    EXPECT_EQ(step, expected.size());
    loader.set_position(in_the_middle);
    EXPECT_TRUE(at::equal(full_tensor(loader.next()->targets), expected[2].targets));
  });
}

TEST(TokenLoaderTest, MeshesGetWhatOneRankGets) {
  expect_as_one_rank({{"dp", 1}}, {{"dp", Shard(0)}});
  expect_as_one_rank({{"dp", 2}}, {{"dp", Shard(0)}});
  expect_as_one_rank({{"dp", 3}}, {{"dp", Shard(0)}});
  expect_as_one_rank({{"dp", 2}, {"tp", 2}}, {{"dp", Shard(0)}});
  expect_as_one_rank({{"dp", 2}, {"cp", 2}}, {{"dp", Shard(0)}, {"cp", Shard(-1)}});
  expect_as_one_rank({{"hsdp", 2}, {"fsdp", 2}}, {{"hsdp", Shard(0)}, {"fsdp", Shard(0)}});
  expect_as_one_rank({{"a", 2}, {"b", 2}, {"c", 2}}, {{"a", Shard(0)}, {"c", Shard(0)}});
}

absl::Status difference(const std::function<void(int rank, const MeshPtr& mesh)>& body) {
  std::vector<std::string> errors(2);
  const absl::Status status = try_on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    const auto rank = static_cast<size_t>(mesh->coordinate()[0]);
    try {
      body(static_cast<int>(rank), mesh);
    } catch (const Error& e) {
      errors[rank] = e.what_without_backtrace();
      throw;
    }
  });
  EXPECT_NE(errors[0], "");
  EXPECT_NE(errors[1], "");
  return status;
}

TEST(TokenLoaderTest, RanksThatDifferAreErrorsOnAll) {
  const NamedPlacements cut = {{"dp", Shard(0)}};
  const auto expect = [](const absl::Status& status, const std::string& what) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(what));
  };
  expect(difference([&](int rank, const MeshPtr& mesh) {
           TokenLoader(files_of(90), {.seed = static_cast<uint64_t>(rank)}, mesh, cut);
         }),
         "the options are not the same on ranks 0 and 1");
  expect(difference([&](int rank, const MeshPtr& mesh) {
           TokenLoader(files_of(90), {}, mesh, rank == 0 ? cut : NamedPlacements());
         }),
         "the placements are not the same");
  expect(difference([&](int rank, const MeshPtr& mesh) {
           TokenLoader(files_of(90 + rank), {}, mesh, cut);
         }),
         "the files are not the same");
  // One rank's alone is told to the other.
  expect(difference([&](int rank, const MeshPtr& mesh) {
           TokenLoader(files_of(90), {.batch = rank}, mesh, cut);
         }),
         "");
  EXPECT_FALSE(difference([&](int rank, const MeshPtr& mesh) {
                 TokenLoader(files_of(90), {}, mesh,
                             NamedPlacements{{rank == 0 ? "dp" : "pp", Shard(0)}});
               }).ok());
  expect(difference([&](int, const MeshPtr& mesh) {
           TokenLoader(files_of(90), {}, mesh, {{"dp", Partial()}});
         }),
         "the placement P(sum); wanted S(0), S(1) or R");
  expect(difference([&](int, const MeshPtr& mesh) {
           TokenLoader(files_of(90), {}, mesh, Placements{Shard(0), Shard(0)});
         }),
         "there are 2 placements; the mesh has 1 dimensions");
  expect(difference([&](int rank, const MeshPtr& mesh) {
           TokenLoader loader(files_of(90), {}, mesh, cut);
           const std::string first = loader.position();
           loader.next();
           loader.set_position(rank == 0 ? first : loader.position());
         }),
         "the position is not the same on ranks 0 and 1");
}

TEST(TokenLoaderTest, RanksAtDifferentPositionsHearOfIt) {
  const absl::Status status = try_on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    TokenLoader loader(files_of(90), {.batch = 4}, mesh, {{"dp", Shard(0)}});
    TokenLoader other(files_of(90), {.batch = 4}, mesh, {{"dp", Shard(0)}});
    std::optional<TokenBatch> batch = loader.next();
    // As many tensors as the other rank has made.
    std::optional<TokenBatch> next = mesh->coordinate()[0] == 0 ? loader.next() : other.next();
    full_tensor(next->tokens);
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
}

}  // namespace
}  // namespace shardweave
