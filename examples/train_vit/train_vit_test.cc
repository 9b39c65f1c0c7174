// Runs the program as users do.

#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/examples/common/run_program.h"

namespace {

using examples::Ran;
using ::testing::AllOf;
using ::testing::HasSubstr;

using Args = std::vector<std::string>;

Ran train(Args args) {
  return examples::run_program("examples/train_vit/train_vit", args);
}

void expect_as_on_one_rank(const Args& args, int ranks) {
  SCOPED_TRACE(testing::PrintToString(args));
  Args all = {"--steps=8", "--dim=24", "--batch=21", "--check", "--json"};
  all.insert(all.end(), args.begin(), args.end());
  const Ran ran = train(all);
  ASSERT_EQ(ran.code, 0) << ran.err;
  ASSERT_EQ(ran.json.size(), 9u) << ran.out;  // a step a line, and the end
  const nlohmann::json& end = ran.json.back();
  EXPECT_EQ(end["ranks"], ranks);
  EXPECT_EQ(end["last_loss"], ran.json[7]["loss"]);
  EXPECT_LE(end["first_steps_loss_diff"], 1e-5);
  EXPECT_LE(end["max_loss_diff"], 1e-4);
  EXPECT_GT(end["images_per_second"], 0);
}

TEST(TrainVitTest, SameLossesOnEveryMesh) {
  for (const Args& plan : std::vector<Args>{{}, {"--sequence_parallel"}}) {
    for (const auto& [mesh, ranks] :
         std::vector<std::pair<std::string, int>>{{"tp=2", 2}, {"dp=2,tp=2", 4}}) {
      Args args = plan;
      args.push_back("--mesh=" + mesh);
      expect_as_on_one_rank(args, ranks);
    }
  }
  expect_as_on_one_rank({"--backend=gloo", "--mesh=dp=2"}, 2);
}

// Images of which it has seen none.
TEST(TrainVitTest, LearnsToReadDigits) {
  const Ran ran = train({"--steps=200", "--batch=64", "--patch=4", "--mesh=tp=2", "--json"});
  ASSERT_EQ(ran.code, 0) << ran.err;
  EXPECT_LT(ran.json.back()["last_loss"], 0.5);  // guessing: 2.3
  EXPECT_GT(ran.json.back()["accuracy"], 0.8) << ran.json.back();
  EXPECT_LE(ran.json.back()["accuracy"], 1.0);
  EXPECT_THAT(ran.err, AllOf(HasSubstr("images/s  0:00 left\n"), HasSubstr("accuracy: 0.")));
}

TEST(TrainVitTest, SaysWhatIsWrong) {
  const std::vector<std::pair<std::string, std::string>> wrong = {
      {"--plan=hf", "transformers has no base_model_tp_plan of this model"},
      {"--patch=9", "an image of 8 has no patch of 9"},
      {"--heads=3", "--heads"},
      {"--mesh=tp=3", "4 heads do not divide by the 3 ranks"},
      {"--batch=0", "--batch=0: wanted 1 or more"},
  };
  for (const auto& [flag, message] : wrong) {
    const Ran ran = train({"--mesh=tp=2", flag});
    EXPECT_GT(ran.code, 0) << flag;
    EXPECT_THAT(ran.err, HasSubstr(message)) << flag;
  }
}

}  // namespace
