// Runs the program as users do.

#include <unistd.h>

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/examples/common/run_program.h"

namespace {

using examples::file_with;
using examples::Ran;
using ::testing::HasSubstr;
using ::testing::Not;

using Args = std::vector<std::string>;

// Its sizes divide by little.
Ran train(Args more) {
  Args args = {"--steps=8",    "--layers=2", "--dim=24", "--heads=4",
               "--kv_heads=2", "--batch=3",  "--seq=11"};
  args.insert(args.end(), more.begin(), more.end());
  return examples::run_program("examples/train_llama/train_llama", args);
}

// A new one.
std::string directory() {
  static int number = 0;
  const std::string path = testing::TempDir() + "train_llama_" + std::to_string(::getpid()) + "_" +
                           std::to_string(number++);
  std::filesystem::remove_all(path);
  return path;
}

void expect_as_on_one_rank(const Args& args, int ranks) {
  SCOPED_TRACE(testing::PrintToString(args));
  Args all = args;
  all.insert(all.end(), {"--check", "--json"});
  const Ran ran = train(all);
  ASSERT_EQ(ran.code, 0) << ran.err;
  ASSERT_EQ(ran.json.size(), 9u) << ran.out;  // a step a line, and the end
  EXPECT_EQ(ran.json[7]["step"], 8);
  const nlohmann::json& end = ran.json.back();
  EXPECT_EQ(end["ranks"], ranks);
  EXPECT_EQ(end["last_loss"], ran.json[7]["loss"]);
  EXPECT_LT(end["last_loss"], end["first_loss"]);
  EXPECT_LE(end["first_steps_loss_diff"], 1e-5);
  EXPECT_LE(end["max_loss_diff"], 1e-4);
  EXPECT_GT(end["tokens_per_second"], 0);
}

TEST(TrainLlamaTest, SameLossesOnEveryMesh) {
  for (const std::string plan : {"--plan=zoo", "--plan=hf", "--sequence_parallel"}) {
    expect_as_on_one_rank({plan, "--mesh=tp=2"}, 2);
    expect_as_on_one_rank({plan, "--mesh=dp=2,tp=2"}, 4);
  }
  expect_as_on_one_rank({"--mesh=dp=2"}, 2);
}

TEST(TrainLlamaTest, FindsAPlan) {
  expect_as_on_one_rank({"--plan=auto", "--mesh=tp=2"}, 2);
  EXPECT_THAT(train({"--plan=auto", "--mesh=tp=2"}).err, HasSubstr("model.layers.*.self_attn"));
}

TEST(TrainLlamaTest, TakesAPlansFile) {
  const std::string plan = file_with("plan.json", R"json({"parameter": {
      "*.{gate_proj,up_proj}.weight": {"tp": "S(0)"}, "*.down_proj.weight": {"tp": "S(1)"}}})json");
  expect_as_on_one_rank({"--plan=" + plan, "--mesh=tp=3"}, 3);
}

TEST(TrainLlamaTest, RanksMayBeProcesses) {
  expect_as_on_one_rank({"--backend=gloo", "--mesh=dp=2,tp=2"}, 4);
}

// On another mesh, with the losses of one rank that was never broken off; what transformers has
// saved, too.
TEST(TrainLlamaTest, GoesOnFromACheckpoint) {
  for (const Args& model : {Args(), Args{"--model=modules/hugging_face/references/llama"}}) {
    const std::string run = directory();
    Args args = model;
    args.insert(args.end(),
                {"--check", "--json", "--save=" + run, "--save_every=5", "--mesh=dp=2,tp=2"});
    const Ran whole = train(args);
    ASSERT_EQ(whole.code, 0) << whole.err;
    ASSERT_TRUE(std::filesystem::exists(run + "/step-000008/manifest.json"));
    std::filesystem::remove_all(run + "/step-000008");
    for (const std::string mesh : {"--mesh=tp=2", "--mesh=dp=3", "--mesh=dp=1"}) {
      SCOPED_TRACE(mesh);
      args = model;
      args.insert(args.end(), {"--check", "--json", "--resume=" + run, mesh});
      const Ran rest = train(args);
      ASSERT_EQ(rest.code, 0) << rest.err;
      ASSERT_EQ(rest.json.size(), 4u) << rest.out;  // three steps, and the end
      EXPECT_EQ(rest.json[0]["step"], 6);
      EXPECT_NEAR(rest.json.back()["last_loss"], whole.json.back()["last_loss"], 1e-4);
      EXPECT_LE(rest.json.back()["max_loss_diff"], 1e-4);
      EXPECT_THAT(rest.err, HasSubstr("going on after step 5 of 8"));
    }
  }
}

TEST(TrainLlamaTest, CheckpointsThatCannotBe) {
  const std::string run = directory();
  ASSERT_EQ(train({"--save=" + run, "--mesh=dp=2"}).code, 0);
  const std::string model = "--model=modules/hugging_face/references/";
  const std::vector<std::pair<Args, std::string>> wrong = {
      {{"--resume=" + run}, "--steps=8: wanted more than 8, as --resume has"},
      {{"--resume=" + run, "--layers=1", "--steps=9"}, "unexpected: model.model.layers.1."},
      {{"--resume=/nowhere/run"}, "/nowhere/run"},
      {{"--save=" + run}, "is of a later step than 0"},
      {{"--save_every=2"}, "--save_every=2: wanted --save, too"},
      {{model + "gpt2"}, "gpt2"},
      {{model + "llama", "--seq=17"}, "--seq=17: the model is for 16 positions at most"},
      {{"--model=/nowhere"}, "/nowhere"},
  };
  for (const auto& [args, message] : wrong) {
    Args all = {"--mesh=dp=2"};
    all.insert(all.end(), args.begin(), args.end());
    const Ran ran = train(all);
    EXPECT_GT(ran.code, 0) << testing::PrintToString(args);
    EXPECT_THAT(ran.err, HasSubstr(message)) << testing::PrintToString(args);
  }
}

TEST(TrainLlamaTest, TellsHowFarItIs) {
  const Ran ran = train({"--mesh=tp=2"});
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(ran.out, HasSubstr("training [========================] 8/8  loss "));
  EXPECT_THAT(ran.out, HasSubstr(" tokens/s  0:00 left\n"));
}

TEST(TrainLlamaTest, SaysWhatIsWrong) {
  const std::string bad = file_with("bad.json", "{\n\"parameter\": 3}");
  const std::string other = file_with("other.json", R"({"parameter": {"*.nothing": ["R"]}})");
  const std::vector<std::pair<std::string, std::string>> wrong = {
      {"--mesh=pp=2", "not 'pp'"},
      {"--steps=0", "--steps=0: wanted 1 or more"},
      {"--seq=0", "--seq=0: wanted 1 or more"},
      {"--lr=0", "--lr=0: wanted a number above 0"},
      {"--backend=nccl", "wanted inproc or gloo"},
      {"--heads=0", "--heads"},
      {"--kv_heads=3", "--kv_heads"},
      {"--plan=best", "wanted zoo, hf, auto or a plan's file"},
      {"--plan=" + bad, "line 2"},
      {"--plan=" + other, "nothing"},
      {"--mesh=tp=3", "4 heads do not divide by the 3 ranks"},
      {"--data=/nowhere/book.txt", "--data=/nowhere/book.txt: No such file"},
      {"--nothing", "nothing"},
  };
  for (const auto& [flag, message] : wrong) {
    const Ran ran = train({"--mesh=tp=2", flag});
    EXPECT_NE(ran.code, 0) << flag;
    EXPECT_GE(ran.code, 0) << flag;  // no signal
    EXPECT_THAT(ran.err, HasSubstr(message)) << flag;
    EXPECT_THAT(ran.out, Not(HasSubstr("training ["))) << flag;
  }
  EXPECT_THAT(train({"--plan=hf", "--sequence_parallel"}).err, HasSubstr("--sequence_parallel"));
}

}  // namespace
