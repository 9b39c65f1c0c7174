// Runs the program as users do.

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "torch/csrc/jit/api/module.h"

namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

constexpr char kProgram[] = "tools/shardweave/shardweave";

std::string temporary(const std::string& name) {
  return absl::StrCat(std::getenv("TEST_TMPDIR"), "/", name);
}

std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

struct Ran {
  int code = 0;  // minus the signal
  std::string out, err;
};

Ran run(const std::vector<std::string>& args) {
  const std::string out = temporary("out"), err = temporary("err");
  std::vector<std::string> all = {kProgram};
  all.insert(all.end(), args.begin(), args.end());
  std::vector<char*> argv;
  for (std::string& arg : all) argv.push_back(arg.data());
  argv.push_back(nullptr);
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::dup2(::open(out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), STDOUT_FILENO);
    ::dup2(::open(err.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), STDERR_FILENO);
    ::execv(kProgram, argv.data());
    ::_exit(99);
  }
  int status = 0;
  ::waitpid(pid, &status, 0);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status), read_file(out),
          read_file(err)};
}

// Two layers; the batch's mean is taken between them.
std::string saved_script() {
  torch::jit::Module root("Root"), up("Layer"), down("Layer");
  up.register_parameter("weight", at::arange(40, at::kFloat).sin().reshape({8, 5}), false);
  down.register_parameter("weight", at::arange(24, at::kFloat).cos().reshape({3, 8}), false);
  for (torch::jit::Module* layer : {&up, &down}) {
    layer->define("def forward(self, x):\n  return torch.linear(x, self.weight)\n");
  }
  root.register_module("up", up);
  root.register_module("down", down);
  root.define(
      "def forward(self, x):\n  return self.down.forward(torch.relu(self.up.forward(x)))\n");
  root.save(temporary("model.pt"));
  return absl::StrCat("--script=", temporary("model.pt"));
}

std::string saved_plan(const std::string& text) {
  static int count = 0;
  const std::string path = temporary(absl::StrCat("plan", ++count, ".json"));
  std::ofstream(path) << text;
  return absl::StrCat("--plan=", path);
}

const char kPlan[] = R"json({
  "parameter": {"up.weight": {"tp": "S(0)"}, "down.weight": {"tp": "S(1)"}},
  "forward": {"down.output": {"tp": "R"}}
})json";

TEST(ShardweaveTest, Helps) {
  for (const char* help : {"--help", "help", "-h"}) {
    const Ran ran = run({help});
    EXPECT_EQ(ran.code, 0);
    EXPECT_THAT(ran.out, AllOf(HasSubstr("dump"), HasSubstr("--mesh"), HasSubstr("Exit codes")));
  }
  EXPECT_EQ(run({}).code, 1);
  EXPECT_THAT(run({"models"}).out, HasSubstr("mlp"));
  EXPECT_THAT(run({"models", "--json"}).out, StartsWith(R"([{"name":"mlp","description":")"));
}

TEST(ShardweaveTest, DumpsABuiltInModel) {
  const Ran ran = run({"dump", "--mesh=2x2:dp,tp"});
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(ran.out, AllOf(HasSubstr("├─ up  Linear"), HasSubstr("[R, S(0)]"),
                             HasSubstr("'down.output'"), HasSubstr("[-, R]")));
  const Ran as_json = run({"dump", "--mesh=tp=3", "--rank=2", "--json"});
  EXPECT_EQ(as_json.code, 0) << as_json.err;
  EXPECT_EQ(json::parse(as_json.out)["modules"][1]["tensors"][0]["local_shape"][0], 64 - 2 * 22);
}

TEST(ShardweaveTest, DumpsATorchScriptFile) {
  const Ran ran = run({"dump", saved_script(), saved_plan(kPlan), "--mesh=tp=2"});
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(ran.out, AllOf(HasSubstr("up  Layer"), HasSubstr("'up.weight'"), HasSubstr("[4, 5]"),
                             HasSubstr("output.0")));
}

TEST(ShardweaveTest, ExplainsPlansAndOperators) {
  const Ran plan = run({"explain", saved_script(), saved_plan(kPlan), "--mesh=dp=2,tp=2"});
  EXPECT_EQ(plan.code, 0) << plan.err;
  EXPECT_THAT(plan.out,
              AllOf(HasSubstr("down.weight"), HasSubstr("[R, S(1)]"), HasSubstr("[3, 4]")));
  const Ran as_json = run({"explain", saved_script(), saved_plan(kPlan), "--json"});
  EXPECT_EQ(json::parse(as_json.out)["parameter"][0]["pattern"], "up.weight") << as_json.out;
  const Ran op = run({"explain", "aten::mm", "Float[64, 32] [S(1)]", "Float[32, 16] [S(0)]"});
  EXPECT_EQ(op.code, 0) << op.err;
  EXPECT_THAT(op.out, AllOf(HasSubstr("aten::mm"), HasSubstr("P(sum)"), HasSubstr("seconds")));
}

TEST(ShardweaveTest, ListsCommunicationAndMemory) {
  const Ran communication = run({"communication", "--mesh=2x2:dp,tp", "--batch=dp"});
  EXPECT_EQ(communication.code, 0) << communication.err;
  EXPECT_THAT(communication.out,
              AllOf(HasSubstr("all_reduce"), HasSubstr("down"), HasSubstr("gradient sync")));
  const Ran memory = run({"memory", "--mesh=tp=2", "--json"});
  EXPECT_EQ(memory.code, 0) << memory.err;
  EXPECT_GT(json::parse(memory.out)[0]["activations"], 0);
}

TEST(ShardweaveTest, Verifies) {
  const Ran ran = run({"verify", "--mesh=2x2:dp,tp", "--batch=dp"});
  EXPECT_EQ(ran.code, 0) << ran.out << ran.err;
  EXPECT_THAT(ran.out, HasSubstr("as on one device"));
  const Ran script = run({"verify", saved_script(), saved_plan(kPlan), "--mesh=tp=3",
                          "--inputs=float[7,5]", "--json"});
  EXPECT_EQ(script.code, 0) << script.out << script.err;
  EXPECT_EQ(json::parse(script.out)["ok"], true);
  EXPECT_GE(json::parse(script.out)["outputs"], 3);
  // A difference that is allowed no more.
  const Ran differs = run({"verify", "--mesh=tp=2", "--tolerance=1e-12"});
  EXPECT_EQ(differs.code, 2) << differs.out << differs.err;
  EXPECT_THAT(differs.out, HasSubstr("differs"));
}

// Every model of the library, under its plan.
TEST(ShardweaveTest, KnowsTheLibrarysModels) {
  for (const std::string model : {"llama", "gpt2", "mixtral", "vit"}) {
    SCOPED_TRACE(model);
    const std::string of = "--model=" + model;
    EXPECT_THAT(run({"models"}).out, HasSubstr("\n" + model + "  "));
    const Ran dumped = run({"dump", of, "--mesh=2:tp"});
    EXPECT_EQ(dumped.code, 0) << dumped.err;
    EXPECT_THAT(dumped.out,
                AllOf(HasSubstr("[S(0)]"), HasSubstr("[S(1)]"), Not(HasSubstr("Hooked"))));
    const Ran verified = run({"verify", of, "--mesh=2x2:dp,tp", "--batch=dp"});
    EXPECT_EQ(verified.code, 0) << verified.out << verified.err;
    const Ran communication = run({"communication", of, "--mesh=2:tp"});
    EXPECT_EQ(communication.code, 0) << communication.err;
    EXPECT_THAT(communication.out, HasSubstr("all_reduce"));
    const Ran wrong = run({"dump", of, "--mesh=5:tp"});
    EXPECT_EQ(wrong.code, 1);
    EXPECT_THAT(wrong.err, HasSubstr("12 heads do not divide by the 5 ranks"));
  }
}

// Where messages cost little; the file is a plan as others are.
TEST(ShardweaveTest, FindsAPlan) {
  const std::string costs = temporary("costs.json"), plan = temporary("found.json");
  std::ofstream(costs) << R"json({"links": {"tp": {"latency": 1e-9, "bandwidth": 1e13}},
                                  "device": {"flops": 1e8, "bandwidth": 1e8}})json";
  const Ran ran = run({"auto-plan", "--mesh=tp=2", "--cost_model=" + costs, "--out=" + plan});
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(ran.out, AllOf(HasSubstr("next best"), HasSubstr("PairwiseParallel"),
                             HasSubstr("plans measured")));
  const Ran dumped = run({"dump", "--mesh=tp=2", "--plan=" + plan});
  EXPECT_EQ(dumped.code, 0) << dumped.err;
  EXPECT_THAT(dumped.out, AllOf(HasSubstr("[S(0)]"), HasSubstr("[S(1)]")));
  const Ran as_json = run({"auto-plan", "--mesh=tp=2", "--json"});
  EXPECT_EQ(as_json.code, 0) << as_json.err;
  EXPECT_TRUE(json::parse(as_json.out)["plan"].contains("parameter"));
  const Ran tight = run({"auto-plan", "--mesh=tp=2", "--memory_limit=10"});
  EXPECT_EQ(tight.code, 1);
  EXPECT_THAT(tight.err, HasSubstr("the smallest takes"));
}

TEST(ShardweaveTest, SaysWhatIsWrong) {
  const std::string script = saved_script();
  const std::vector<std::pair<std::vector<std::string>, std::string>> wrong = {
      {{"dumpp"}, "wanted dump, explain"},
      {{"dump", "more"}, "takes flags only"},
      {{"dump", "--messh=tp=2"}, "messh"},
      {{"dump", "--model=nothing"}, "there are mlp, llama, gpt2, mixtral, vit"},
      {{"dump", "--mesh=2x2:dp"}, "2 sizes and 1 names"},
      {{"dump", "--mesh=tp=100000"}, "256 ranks at most"},
      {{"dump", "--mesh=dp=2"}, "has no dimension \"tp\""},  // the zoo's plan speaks of it
      {{"dump", "--rank=2"}, "there are 2 ranks"},
      {{"dump", "--script=/nothing.pt"}, "/nothing.pt"},
      {{"dump", "--plan=/nothing.json"}, "cannot be read"},
      {{"dump", saved_plan("{\n\"parameter\": 3}")}, "line 2"},
      {{"dump", script, saved_plan(R"({"parameter": {"upp.weight": {}}})")}, "did you mean"},
      {{"verify", script, "--plan=none"}, "--inputs is missing"},
      {{"verify", script, "--plan=none", "--inputs=float[3"}, "wanted a tensor"},
      {{"verify", script, "--plan=none", "--inputs=floaty[3]"}, "is no dtype"},
      {{"verify", script, "--plan=none", "--inputs=float[3,4]"}, "mat"},
      {{"explain", "aten::nothing", "Float[4] [R]"}, "aten::nothing"},
      {{"explain", "aten::mm", "Float[4, 4] [R, R]", "Float[4, 4] [R, R]"}, "wants 1"},
  };
  for (const auto& [args, why] : wrong) {
    const Ran ran = run(args);
    EXPECT_EQ(ran.code, 1) << args[0] << " " << why << ran.out;
    EXPECT_THAT(ran.out, IsEmpty());
    EXPECT_THAT(ran.err, AllOf(HasSubstr(why), Not(HasSubstr("frame #")),
                               Not(HasSubstr("Exception raised"))));
  }
}

}  // namespace
