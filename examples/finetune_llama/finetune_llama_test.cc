// Runs the program as users do, on a small Llama that transformers has written.

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/examples/common/run_program.h"
#include "shardweave/modules/checkpoint/safetensors_index.h"
#include "shardweave/modules/checkpoint/safetensors_tensor.h"
#include "shardweave/modules/data/token_file.h"

namespace {

using namespace shardweave;
using examples::Ran;
using ::testing::HasSubstr;
using Args = std::vector<std::string>;

constexpr int kSteps = 8;
constexpr char kModel[] = "modules/hugging_face/references/llama";

std::string temporary(const std::string& name) {
  return std::string(std::getenv("TEST_TMPDIR")) + "/" + name;
}

// Of a vocabulary of 29, with something to learn.
const std::string& tokens() {
  static const std::string* const kPath = [] {
    auto* path = new std::string(temporary("tokens.bin"));
    auto writer = TokenFileWriter::create(*path, {.type = TokenType::kU16, .vocab_size = 29});
    EXPECT_TRUE(writer.ok());
    std::vector<uint32_t> ids;
    for (uint32_t i = 0; i < 700; ++i) ids.push_back(i * i % 29);
    EXPECT_TRUE(writer->write(ids).ok());
    EXPECT_TRUE(writer->close().ok());
    return path;
  }();
  return *kPath;
}

Ran train(Args more) {
  Args args = {std::string("--model=") + kModel,
               "--tokens=" + tokens(),
               "--batch=3",
               "--seq=9",
               "--lr=3e-3",
               "--warmup=2",
               "--steps=" + std::to_string(kSteps),
               "--json"};
  args.insert(args.end(), more.begin(), more.end());
  return examples::run_program("examples/finetune_llama/finetune_llama", args);
}

std::map<int, double> losses_of(const Ran& ran) {
  std::map<int, double> losses;
  for (const auto& line : ran.json) {
    if (line.contains("loss")) losses[line["step"].get<int>()] = line["loss"].get<double>();
  }
  return losses;
}

const std::map<int, double>& on_one_rank() {
  static const auto* const kLosses = [] {
    const Ran ran = train({"--mesh=dp=1", "--parallel=ddp", "--export=" + temporary("one")});
    EXPECT_EQ(ran.code, 0) << ran.err;
    return new std::map<int, double>(losses_of(ran));
  }();
  return *kLosses;
}

void expect_those_of_one_rank(const Ran& ran, int begin) {
  ASSERT_EQ(ran.code, 0) << ran.err;
  for (const auto& [step, loss] : losses_of(ran)) {
    EXPECT_GT(step, begin);
    EXPECT_NEAR(loss, on_one_rank().at(step), 1e-4 * loss) << step;
  }
}

std::map<std::string, at::Tensor> tensors_in(const std::string& path) {
  auto index = SafetensorsIndex::open(path);
  EXPECT_TRUE(index.ok()) << index.status();
  std::map<std::string, at::Tensor> result;
  for (const std::string& name : (*index)->names()) {
    result[name] = read_tensor(*(*index)->find(name)->file, name);
  }
  return result;
}

TEST(FinetuneLlamaTest, LearnsTheSameOnEveryMesh) {
  ASSERT_EQ(on_one_rank().size(), static_cast<size_t>(kSteps));
  EXPECT_LT(on_one_rank().at(kSteps), on_one_rank().at(1));
  for (const Args& way : std::vector<Args>{{"--parallel=ddp", "--mesh=dp=2"},
                                           {"--parallel=zero1", "--mesh=dp=2"},
                                           {"--parallel=fsdp", "--mesh=dp=3"},
                                           {"--parallel=fsdp+tp", "--mesh=dp=2,tp=2"}}) {
    SCOPED_TRACE(way[0]);
    const Ran ran = train(way);
    expect_those_of_one_rank(ran, 0);
    EXPECT_EQ(losses_of(ran).size(), static_cast<size_t>(kSteps));
  }
}

TEST(FinetuneLlamaTest, AnInterruptedRunGoesOnOnAnotherMeshAndExportsTheSame) {
  on_one_rank();
  const std::string run = temporary("run"), exported = temporary("exported");
  const std::string log = temporary("log.jsonl");
  const Args common = {"--checkpoints=" + run, "--save_every=2", "--export=" + exported,
                       "--log=" + log};
  const auto with = [&](Args more) {
    more.insert(more.end(), common.begin(), common.end());
    return train(more);
  };
  Ran ran = with({"--parallel=fsdp", "--mesh=dp=3", "--stop_after=3"});
  expect_those_of_one_rank(ran, 0);
  EXPECT_EQ(ran.json.back()["stopped"], true);
  EXPECT_EQ(ran.json.back()["last_step"], 3);
  EXPECT_FALSE(std::filesystem::exists(exported));
  ran = with({"--parallel=fsdp+tp", "--mesh=dp=2,tp=2", "--resume", "--stop_after=2"});
  expect_those_of_one_rank(ran, 3);
  EXPECT_EQ(ran.json.back()["first_step"], 3);
  ran = with({"--parallel=zero1", "--mesh=dp=2", "--resume", "--events=" + temporary("events")});
  expect_those_of_one_rank(ran, 5);
  EXPECT_EQ(ran.json.back()["last_step"], kSteps);
  EXPECT_FALSE(std::filesystem::is_empty(temporary("events")));
  // The last two checkpoints stay.
  EXPECT_FALSE(std::filesystem::exists(run + "/step-000003"));
  EXPECT_TRUE(std::filesystem::exists(run + "/step-000008/manifest.json"));
  const auto tensors = tensors_in(exported), wanted = tensors_in(temporary("one"));
  const auto begun = tensors_in(kModel);
  ASSERT_EQ(tensors.size(), begun.size());
  for (const auto& [name, tensor] : wanted) {
    EXPECT_TRUE(at::allclose(tensors.at(name), tensor, 1e-3, 1e-4)) << name;
    EXPECT_FALSE(at::equal(tensors.at(name), begun.at(name))) << name;
  }
  std::ifstream lines(log);
  int count = 0;
  for (std::string line; std::getline(lines, line);) ++count;
  EXPECT_EQ(count, kSteps);
}

TEST(FinetuneLlamaTest, SaysWhatIsWrong) {
  const std::vector<std::pair<Args, std::string>> wrong = {
      {{"--model="}, "--model=: wanted a directory"},
      {{"--model=nowhere"}, "nowhere"},
      {{"--model=modules/hugging_face/references/gpt2"}, "wanted \"llama\", not \"gpt2\""},
      {{"--tokens="}, "--tokens=: wanted token files"},
      {{"--parallel=pp"}, "--parallel=pp: wanted ddp"},
      {{"--parallel=ddp", "--mesh=tp=2"}, "wanted dp alone"},
      {{"--seq=17"}, "--seq=17: wanted 16 at most"},
      {{"--resume"}, "--checkpoints=: wanted a directory"},
      {{"--resume", "--checkpoints=" + temporary("none")}, "none"},
      {{"--lr=0"}, "--lr=0: wanted a number above 0"},
      {{"--export_dtype=int8"}, "wanted float32 or bfloat16"}};
  for (const auto& [args, message] : wrong) {
    const Ran ran = train(args);
    EXPECT_NE(ran.code, 0) << args[0];
    EXPECT_THAT(ran.err, HasSubstr(message));
  }
}

}  // namespace
