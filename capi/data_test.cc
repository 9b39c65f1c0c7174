// Token files and loaders through C: what one rank reads, on any number of ranks.
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "capi/testing/on_mesh.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave.h"
#include "shardweave/capi/handles.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/modules/data/token_file.h"

namespace {

using namespace c_test;  // NOLINT: this file is a test in it

using ::testing::AllOf;
using ::testing::HasSubstr;
using File = Held<swv_token_file, swv_token_file_free>;
using Loader = Held<swv_loader, swv_loader_free>;

std::string path_of(const std::string& name) {
  return std::string(std::getenv("TEST_TMPDIR")) + "/" + name;
}
std::string tokens_in(const std::string& name, uint32_t count) {
  auto writer = shardweave::TokenFileWriter::create(path_of(name), {.vocab_size = 997});
  std::vector<uint32_t> tokens;
  for (uint32_t i = 0; i < count; ++i) tokens.push_back(i * i % 997);
  EXPECT_TRUE(writer->write(tokens).ok() && writer->close().ok());
  return path_of(name);
}
swv_loader_options options_of(int64_t seq, int64_t batch) {
  swv_loader_options options = SWV_LOADER_OPTIONS_INIT;
  options.seq = seq;
  options.batch = batch;
  options.seed = 5;
  return options;
}
void make_loader(const std::string& path, const swv_loader_options& options, Loader& loader) {
  File file;
  ok(swv_token_file_open(path.c_str(), SWV_DTYPE_DEFAULT, file.out()));
  const swv_token_file* const files[] = {file};
  ok(swv_loader_create(files, 1, &options, loader.out()));
}
struct Pair {
  at::Tensor tokens, targets;
};
// Undefined at the end.
Pair next(swv_loader* loader) {
  Tensor tokens, targets;
  ok(swv_loader_next(loader, tokens.out(), targets.out()));
  if (tokens == nullptr) {
    EXPECT_EQ(targets, nullptr);
    return {};
  }
  return {shardweave::is_dtensor(tokens->tensor) ? shardweave::full_tensor(tokens->tensor)
                                                 : tokens->tensor,
          shardweave::is_dtensor(targets->tensor) ? shardweave::full_tensor(targets->tensor)
                                                  : targets->tensor};
}
std::string position(swv_loader* loader) {
  swv_string* json = nullptr;
  ok(swv_loader_position(loader, &json));
  return text_of(json);
}

TEST(DataTest, TokenFiles) {
  const std::string path = tokens_in("files", 50);
  File file, second;
  ok(swv_token_file_open(path.c_str(), SWV_DTYPE_DEFAULT, file.out()));
  ok(swv_token_file_share(file, second.out()));
  file.out();  // frees it
  int64_t number = 0;
  swv_dtype dtype = 0;
  ok(swv_token_file_num_tokens(second, &number));
  EXPECT_EQ(number, 50);
  ok(swv_token_file_vocab_size(second, &number));
  EXPECT_EQ(number, 997);
  ok(swv_token_file_dtype(second, &dtype));
  EXPECT_EQ(dtype, SWV_DTYPE_U16);
  int64_t tokens[2] = {};
  ok(swv_token_file_read(second, 48, tokens, 2));
  EXPECT_EQ(tokens[1], 49 * 49 % 997);
  ok(swv_token_file_read(second, 50, nullptr, 0));
  EXPECT_THAT(message_of(swv_token_file_read(second, 49, tokens, 2), SWV_CODE_OUT_OF_RANGE),
              HasSubstr("swv_token_file_read: " + path + ": has 50 tokens; wanted 2 from 49"));
  EXPECT_THAT(message_of(swv_token_file_read(second, 0, nullptr, 2)),
              HasSubstr("'tokens' is NULL"));

  std::ofstream(path_of("text")) << "abc";
  ok(swv_token_file_open(path_of("text").c_str(), SWV_DTYPE_U8, file.out()));
  ok(swv_token_file_read(file, 0, tokens, 2));
  EXPECT_EQ(tokens[1], 'b');
  EXPECT_THAT(message_of(swv_token_file_open(path_of("text").c_str(), 0, file.out())),
              HasSubstr("has no header"));
  EXPECT_THAT(message_of(swv_token_file_open(path_of("text").c_str(), SWV_DTYPE_I64, file.out())),
              HasSubstr("argument 'plain_dtype' is 10"));
  EXPECT_THAT(message_of(swv_token_file_open("nowhere", 0, file.out()), SWV_CODE_NOT_FOUND),
              HasSubstr("nowhere: cannot be opened"));
}

TEST(DataTest, MeshesGetWhatOneRankGets) {
  const std::string path = tokens_in("mesh", 90);
  swv_loader_options options = options_of(4, 5);
  options.epochs = 2;
  Loader alone;
  make_loader(path, options, alone);
  int64_t samples = 0;
  ok(swv_loader_num_samples(alone, &samples));
  EXPECT_EQ(samples, 22);
  std::vector<Pair> wanted;
  std::string middle;
  for (Pair pair = next(alone); pair.tokens.defined(); pair = next(alone)) {
    wanted.push_back(pair);
    if (wanted.size() == 4) middle = position(alone);
  }
  ASSERT_EQ(wanted.size(), 9u);
  for (const char* text : {"dp=1", "dp=2", "dp=3", "dp=2,tp=2"}) {
    on_mesh(text, [&](swv_mesh* mesh) {
      Layout layout;
      ok(swv_layout_parse(
          std::string(text).find("tp") == std::string::npos ? "[S(0)]" : "[S(0), S(1)]",
          layout.out()));
      swv_loader_options here = options;
      here.mesh = mesh;
      here.layout = layout;
      Loader loader, second;
      make_loader(path, here, loader);
      ok(swv_loader_share(loader, second.out()));
      loader.out();
      for (size_t step = 0; step < wanted.size(); ++step) {
        const Pair got = next(second);
        EXPECT_TRUE(at::equal(got.tokens, wanted[step].tokens)) << text << " " << step;
        EXPECT_TRUE(at::equal(got.targets, wanted[step].targets)) << text << " " << step;
      }
      EXPECT_FALSE(next(second).tokens.defined());
      ok(swv_loader_set_position(second, middle.c_str()));
      EXPECT_EQ(position(second), middle);
      EXPECT_TRUE(at::equal(next(second).targets, wanted[4].targets));
    });
  }
}

TEST(DataTest, PartsWithoutAMesh) {
  const std::string path = tokens_in("parts", 90);
  swv_loader_options options = options_of(4, 5);
  Loader alone;
  make_loader(path, options, alone);
  const Pair wanted = next(alone);
  std::vector<at::Tensor> parts;
  for (int64_t i = 0; i < 4; ++i) {
    options.part = i;
    options.num_parts = 4;
    options.prefetch = static_cast<int32_t>(i);
    Loader loader;
    make_loader(path, options, loader);
    parts.push_back(next(loader).tokens);
  }
  EXPECT_TRUE(at::equal(at::cat(parts), wanted.tokens));
  options = options_of(4, 5);
  options.in_order = 1;
  Loader in_order;
  make_loader(path, options, in_order);
  EXPECT_EQ(next(in_order).tokens[1][0].item<int64_t>(), 16);
}

TEST(DataTest, ErrorsOfFilesStayUntilThePositionIsSet) {
  const std::string path = tokens_in("shrinks", 4001);
  swv_loader_options options = options_of(100, 10);
  options.in_order = 1;
  options.prefetch = 1;
  Loader loader;
  make_loader(path, options, loader);
  ASSERT_EQ(::truncate(path.c_str(), 64 + 2 * 3500), 0);
  std::string error;
  for (int i = 0; i < 5; ++i) {
    Tensor tokens, targets;
    swv_status* const status = swv_loader_next(loader, tokens.out(), targets.out());
    EXPECT_EQ(status == nullptr, i < 3);
    if (status != nullptr) error = message_of(status, SWV_CODE_DATA_LOSS);
  }
  EXPECT_THAT(
      error, AllOf(HasSubstr("swv_loader_next: sample 34 of 40"), HasSubstr("has become shorter")));
  ASSERT_EQ(::truncate(path.c_str(), 64 + 2 * 4001), 0);
  ok(swv_loader_set_position(loader, position(loader).c_str()));
  EXPECT_EQ(next(loader).tokens.size(0), 10);
}

TEST(DataTest, SaysWhatIsWrong) {
  const std::string path = tokens_in("wrong", 90);
  File file;
  ok(swv_token_file_open(path.c_str(), SWV_DTYPE_DEFAULT, file.out()));
  const swv_token_file* const files[] = {file, nullptr};
  Loader loader;
  const auto refused = [&](const swv_loader_options& options, const std::string& why) {
    EXPECT_THAT(message_of(swv_loader_create(files, 1, &options, loader.out())), HasSubstr(why));
  };
  const auto with = [](auto change) {
    swv_loader_options options = options_of(4, 5);
    change(options);
    return options;
  };
  refused(with([](auto& o) { o.seq = 0; }), "swv_loader_create: seq is 0; wanted 1 or more");
  refused(with([](auto& o) { o.seq = 90; }), "has 90 tokens; wanted 90 + 1");
  refused(with([](auto& o) { o.batch = -1; }), "batch is -1");
  refused(with([](auto& o) { o.epochs = -1; }), "epochs is -1");
  refused(with([](auto& o) { o.prefetch = -1; }), "prefetch is -1");
  refused(with([](auto& o) { o.in_order = 2; }), "'options.in_order' is 2");
  refused(with([](auto& o) { o.drop_last = 2; }), "'options.drop_last' is 2");
  refused(with([](auto& o) { o.reserved = 2; }), "'options.reserved' is 2");
  refused(with([](auto& o) { o.num_parts = 0; }), "part 0 of 0");
  EXPECT_THAT(message_of(swv_loader_create(nullptr, 0, nullptr, loader.out())),
              HasSubstr("there is no token file"));
  EXPECT_THAT(message_of(swv_loader_create(files, 2, nullptr, loader.out())),
              HasSubstr("'files[1]' is NULL"));
  on_mesh("dp=2", [&](swv_mesh* mesh) {
    Layout layout, partial;
    ok(swv_layout_parse("[S(0), S(0)]", layout.out()));
    ok(swv_layout_parse("[P(sum)]", partial.out()));
    Loader none;
    const auto refused_here = [&](const swv_loader_options& options, const std::string& why) {
      EXPECT_THAT(message_of(swv_loader_create(files, 1, &options, none.out())), HasSubstr(why));
    };
    refused_here(with([&](auto& o) { o.mesh = mesh, o.layout = layout; }), "2 placements");
    refused_here(with([&](auto& o) { o.mesh = mesh, o.layout = partial; }), "P(sum)");
    refused_here(with([&](auto& o) { o.mesh = mesh, o.part = 1; }), "the layout says it");
    refused_here(with([&](auto& o) { o.layout = layout; }), "there is no mesh");
    // One rank's options.
    int32_t rank = 0;
    int64_t coordinate = 0;
    size_t count = 0;
    ok(swv_mesh_coordinate(mesh, &coordinate, 1, &count));
    rank = static_cast<int32_t>(coordinate);
    refused_here(with([&](auto& o) { o.mesh = mesh, o.seed = static_cast<uint64_t>(rank); }),
                 "the options are not the same on ranks 0 and 1");
  });
  ok(swv_loader_create(files, 1, nullptr, loader.out()));
  EXPECT_THAT(message_of(swv_loader_set_position(loader, "{}")), HasSubstr("has no 'epoch'"));
  EXPECT_THAT(message_of(swv_loader_next(loader, nullptr, nullptr)), HasSubstr("'out_tokens'"));
}

}  // namespace
