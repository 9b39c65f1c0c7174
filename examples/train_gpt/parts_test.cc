#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "ATen/ops/equal.h"
#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/reflection.h"
#include "counter_random.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "progress.h"
#include "report.h"
#include "settings.h"
#include "text.h"

namespace train_gpt {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// --- settings ------------------------------------------------------------------------------------

absl::StatusOr<Settings> parse(std::vector<std::string> args) {
  const absl::FlagSaver saver;
  args.insert(args.begin(), "train_gpt");
  std::vector<char*> argv;
  for (std::string& arg : args) argv.push_back(arg.data());
  return settings_from_flags(absl::ParseCommandLine(static_cast<int>(argv.size()), argv.data()));
}

TEST(SettingsTest, Defaults) {
  const auto settings = parse({});
  ASSERT_TRUE(settings.ok()) << settings.status();
  EXPECT_EQ(settings->num_ranks(), 4);
  EXPECT_EQ(settings->dim % settings->heads, 0);
  EXPECT_EQ(settings->backend, "");
}

TEST(SettingsTest, MeshesMayLeaveOneDimensionOut) {
  const auto mesh = [](const std::string& text) {
    const auto settings = parse({"--mesh=" + text});
    EXPECT_TRUE(settings.ok()) << settings.status();
    return settings->to_string().substr(0, 13);
  };
  EXPECT_EQ(mesh("dp=3,tp=2"), "mesh dp=3,tp=");
  EXPECT_EQ(mesh("tp=2,dp=3"), "mesh tp=2,dp=");
  EXPECT_EQ(mesh("tp=2"), "mesh dp=1,tp=");
  EXPECT_EQ(mesh("dp=3"), "mesh dp=3,tp=");
  EXPECT_EQ(parse({"--mesh=tp=5"})->num_ranks(), 5);
}

TEST(SettingsTest, SaysWhatIsWrong) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"--mesh=", "--mesh="},
      {"--mesh=dp", "--mesh=dp"},
      {"--mesh=dp=0", "--mesh=dp=0"},
      {"--mesh=dp=2,dp=2", "--mesh=dp=2,dp=2"},
      {"--mesh=dp=2,pp=2", "not 'pp'"},
      {"--mesh=dp=100,tp=100", "4096 ranks at most"},
      {"--backend=nccl", "--backend=nccl, --device=cpu: wanted inproc or gloo"},
      {"--device=tpu", "--device=tpu: wanted cpu or cuda"},
      {"--cpu_offload", "--cpu_offload, --device=cpu, --parallel=ddp: wanted cuda, and fsdp"},
      {"--steps=0", "--steps=0: wanted 1 or more"},
      {"--layers=0", "--layers=0"},
      {"--dim=-4", "--dim=-4"},
      {"--heads=0", "--heads=0"},
      {"--batch=0", "--batch=0"},
      {"--seq=0", "--seq=0"},
      {"--sample=-1", "--sample=-1: wanted 0 or more"},
      {"--heads=7", "--heads=7 does not divide --dim=96"},
      {"--lr=0", "--lr=0"},
      {"--lr=inf", "--lr=inf"},
      {"--timeout=0s", "--timeout=0"},
      {"more", "'more': wanted flags only"},
  };
  for (const auto& [arg, message] : cases) {
    const auto settings = parse({arg});
    EXPECT_EQ(settings.status().code(), absl::StatusCode::kInvalidArgument) << arg;
    EXPECT_THAT(std::string(settings.status().message()), HasSubstr(message));
  }
}

// --- text ----------------------------------------------------------------------------------------

std::string file_with(const std::string& name, const std::string& bytes) {
  const std::string path = std::string(std::getenv("TEST_TMPDIR")) + "/" + name;
  std::ofstream(path, std::ios::binary) << bytes;
  return path;
}

TEST(TextTest, ReadsBytesAsTheyAre) {
  const std::string bytes("a\0\r\n\xff", 5);
  const auto text = Text::read(file_with("bytes", bytes));
  ASSERT_TRUE(text.ok()) << text.status();
  EXPECT_EQ(text->bytes(), bytes);
  EXPECT_EQ(to_tokens("\xff")[0][0].item<int64_t>(), 255);
}

TEST(TextTest, HasATextOfItsOwn) {
  const auto text = Text::read("");
  ASSERT_TRUE(text.ok()) << text.status();
  EXPECT_GT(text->bytes().size(), 10000u);
}

TEST(TextTest, SaysWhichFileIsMissingOrEmpty) {
  const auto missing = Text::read("/nowhere/book.txt").status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(missing.message()),
              AllOf(HasSubstr("/nowhere/book.txt"), HasSubstr("No such file")));
  const auto directory = Text::read(std::getenv("TEST_TMPDIR")).status();
  EXPECT_THAT(std::string(directory.message()), HasSubstr("Is a directory"));
  const std::string path = file_with("empty", "");
  const auto empty = Text::read(path).status();
  EXPECT_EQ(empty.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(empty.message()), AllOf(HasSubstr(path), HasSubstr("empty")));
}

TEST(TextTest, TargetsAreOneByteFurtherOn) {
  std::string bytes;
  for (int i = 0; i < 200; ++i) bytes.push_back(static_cast<char>(i));
  const Batch batch = Text(bytes).batch({.step = 3, .batch = 5, .seq = 7, .seed = 1});
  EXPECT_EQ(batch.tokens.sizes(), (std::vector<int64_t>{5, 7}));
  EXPECT_TRUE(at::equal(batch.tokens.add(1), batch.targets));
}

TEST(TextTest, BatchesAreFunctionsOfTheirArguments) {
  const Text text("The quick brown fox jumps over the lazy dog, and then it jumps back again.");
  const Text::Draw draw{.step = 3, .batch = 5, .seq = 7, .seed = 1};
  EXPECT_TRUE(at::equal(text.batch(draw).tokens, text.batch(draw).tokens));
  EXPECT_FALSE(at::equal(text.batch(draw).tokens, text.batch({4, 5, 7, 1}).tokens));
  EXPECT_FALSE(at::equal(text.batch(draw).tokens, text.batch({3, 5, 7, 2}).tokens));
}

TEST(TextTest, ReachesFirstAndLastByte) {
  const Text text("abc");
  std::set<int64_t> starts;
  for (int64_t step = 0; step < 50; ++step)
    starts.insert(text.batch({step, 1, 1, 1}).tokens.item<int64_t>());
  EXPECT_EQ(starts, (std::set<int64_t>{'a', 'b'}));  // 'c' has nothing after it
  EXPECT_EQ(Text("ab").batch({0, 1, 1, 1}).targets.item<int64_t>(), 'b');
}

TEST(CounterRandomTest, IsUniform) {
  double sum = 0, squares = 0;
  constexpr int kDraws = 20000;
  for (int i = 0; i < kDraws; ++i) {
    const double u = uniform_at(5, i);
    ASSERT_TRUE(u >= 0 && u < 1);
    sum += u;
    squares += u * u;
  }
  EXPECT_NEAR(sum / kDraws, 0.5, 0.01);
  EXPECT_NEAR(squares / kDraws, 1.0 / 3, 0.01);
  EXPECT_NE(random_at(1, 2), random_at(2, 1));
}

// --- progress and reports ------------------------------------------------------------------------

TEST(ProgressTest, PrintsALineForEveryTenth) {
  std::ostringstream out;
  Progress progress({.title = "training", .steps = 40, .tokens_per_step = 10, .out = &out});
  for (int i = 0; i < 40; ++i) progress.step_done(5.0 - 0.1 * i);
  const std::string text = out.str();
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 11);  // and the first
  EXPECT_THAT(text, AllOf(HasSubstr("] 1/40  loss 5.000\n"), HasSubstr("] 40/40  loss 1.100"),
                          HasSubstr("[============>           ] 20/40"), HasSubstr("0:00 left\n"),
                          Not(HasSubstr("\r"))));
}

TEST(ProgressTest, RedrawsOneLineOnATerminal) {
  std::ostringstream out;
  Progress progress({.title = "training", .steps = 7, .out = &out, .terminal = true});
  for (int i = 0; i < 7; ++i) progress.step_done(1);
  const std::string text = out.str();
  EXPECT_EQ(std::count(text.begin(), text.end(), '\r'), 7);
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1);
  EXPECT_EQ(text.back(), '\n');
}

TEST(ProgressTest, SpeedLeavesTheFirstStepsOut) {
  Progress progress({.title = "training", .steps = 10, .tokens_per_step = 100});
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  for (int i = 0; i < 10; ++i) {
    if (i >= 5) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    progress.step_done(1);
  }
  EXPECT_GT(progress.tokens_per_second(), 1000 / 0.3);
  EXPECT_LE(progress.tokens_per_second(), 500 / 0.01);
  EXPECT_EQ(progress.losses().size(), 10u);
}

TEST(ProgressTest, OneStepHasASpeedToo) {
  Progress progress({.title = "training", .steps = 1, .tokens_per_step = 100});
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  progress.step_done(1);
  EXPECT_GT(progress.tokens_per_second(), 0);
  EXPECT_LE(progress.tokens_per_second(), 100 / 0.002);
}

TEST(ProgressTest, FormatsTimes) {
  EXPECT_EQ(shardweave::format_seconds(0), "0:00");
  EXPECT_EQ(shardweave::format_seconds(6.2), "0:07");
  EXPECT_EQ(shardweave::format_seconds(60), "1:00");
  EXPECT_EQ(shardweave::format_seconds(3723), "1:02:03");
}

TEST(ReportTest, SamplesArePrintable) {
  std::ostringstream out;
  print_sample("ab", "c\x01\xff\nd", out);
  EXPECT_THAT(out.str(), HasSubstr("ab ... c??\nd\n"));
}

}  // namespace
}  // namespace train_gpt
