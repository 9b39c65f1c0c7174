// Runs the program as users do: whole trainings under many meshes, ranks as threads and as
// processes, bad input, and a rank that is killed.

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr char kProgram[] = "examples/train_gpt/train_gpt";

using Args = std::vector<std::string>;
using Variables = std::map<std::string, std::string>;

std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

std::string temporary(const std::string& name) {
  static int count = 0;
  return absl::StrCat(std::getenv("TEST_TMPDIR"), "/", ++count, "-", name);
}

// True as soon as `condition` is; false if that takes too long.
bool eventually(const std::function<bool()>& condition,
                std::chrono::seconds limit = std::chrono::seconds(60)) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return true;
}

// A running train_gpt. Killed if it is still there at the end.
class Program {
 public:
  explicit Program(const Args& args, const Variables& variables = {})
      : out_(temporary("out")), err_(temporary("err")) {
    std::vector<std::string> all = {kProgram};
    all.insert(all.end(), args.begin(), args.end());
    std::vector<char*> argv;
    for (std::string& arg : all) argv.push_back(arg.data());
    argv.push_back(nullptr);
    pid_ = ::fork();
    if (pid_ != 0) return;
    // A launcher around this test says nothing about the ranks in it.
    for (const char* name :
         {"RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"})
      ::unsetenv(name);
    for (const auto& [name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
    ::dup2(::open(out_.c_str(), O_WRONLY | O_CREAT, 0600), STDOUT_FILENO);
    ::dup2(::open(err_.c_str(), O_WRONLY | O_CREAT, 0600), STDERR_FILENO);
    ::execv(kProgram, argv.data());
    ::_exit(99);
  }
  ~Program() {
    if (running_) ::kill(pid_, SIGKILL);
    wait();
  }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  pid_t pid() const { return pid_; }
  std::string out() const { return read_file(out_); }
  std::string err() const { return read_file(err_); }

  // The exit code, or minus the signal.
  int wait() {
    if (running_) ::waitpid(pid_, &status_, 0);
    running_ = false;
    return WIFEXITED(status_) ? WEXITSTATUS(status_) : -WTERMSIG(status_);
  }
  bool ended() {
    if (running_ && ::waitpid(pid_, &status_, WNOHANG) == pid_) running_ = false;
    return !running_;
  }

 private:
  const std::string out_;
  const std::string err_;
  pid_t pid_;
  bool running_ = true;
  int status_ = 0;
};

Args with(Args args, const Args& more) {
  args.insert(args.end(), more.begin(), more.end());
  return args;
}

// A training of a second or two; its sizes divide by nothing much.
const Args kSmall = {"--steps=5", "--layers=2", "--dim=28",  "--heads=4",
                     "--batch=6", "--seq=11",   "--sample=9"};

// Runs to the good end and gives the line of JSON, which is all of stdout.
nlohmann::json result_of(Program& program) {
  EXPECT_EQ(program.wait(), 0) << program.err();
  const std::string out = program.out();
  EXPECT_EQ(std::count(out.begin(), out.end(), '\n'), 1) << out;
  return nlohmann::json::parse(out, nullptr, /*allow_exceptions=*/false);
}

nlohmann::json train(const Args& args) {
  Program program(with(kSmall, with(args, {"--json"})));
  return result_of(program);
}

void expect_same_losses(const nlohmann::json& result, int ranks) {
  EXPECT_EQ(result["ranks"], ranks);
  EXPECT_LE(result["max_loss_diff"], 1e-5) << result;
  EXPECT_LT(result["last_loss"], result["first_loss"]) << result;
  EXPECT_GT(result["tokens_per_second"], 0) << result;
}

// A port that was free a moment ago: what a user chooses who sets MASTER_PORT by hand.
int some_port() {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  EXPECT_EQ(::bind(fd, generic, size), 0);
  EXPECT_EQ(::getsockname(fd, generic, &size), 0);
  ::close(fd);
  return ntohs(address.sin_port);
}

// Ranks as a user starts them in as many shells. `change` may change a rank's arguments and
// variables.
using Change = std::function<void(int rank, Args& args, Variables& variables)>;
std::vector<std::unique_ptr<Program>> by_hand(int size, const Args& args,
                                              const Change& change = {}) {
  const int port = some_port();
  std::vector<std::unique_ptr<Program>> ranks;
  for (int rank = 0; rank < size; ++rank) {
    Args own = args;
    Variables variables = {{"RANK", absl::StrCat(rank)},
                           {"WORLD_SIZE", absl::StrCat(size)},
                           {"MASTER_ADDR", "127.0.0.1"},
                           {"MASTER_PORT", absl::StrCat(port)}};
    if (change) change(rank, own, variables);
    ranks.push_back(std::make_unique<Program>(own, variables));
  }
  return ranks;
}

// --- trainings -----------------------------------------------------------------------------------

TEST(TrainGptTest, SameLossesOnEveryMesh) {
  for (const auto& [mesh, ranks] : std::vector<std::pair<std::string, int>>{{"dp=2,tp=2", 4},
                                                                            {"tp=2,dp=2", 4},
                                                                            {"dp=1,tp=4", 4},
                                                                            {"dp=4,tp=1", 4},
                                                                            {"dp=3,tp=1", 3},
                                                                            {"tp=3", 3},
                                                                            {"dp=2", 2},
                                                                            {"dp=1,tp=1", 1}}) {
    SCOPED_TRACE(mesh);
    expect_same_losses(train({"--check", "--mesh=" + mesh}), ranks);
  }
}

TEST(TrainGptTest, SameLossesFullySharded) {
  expect_same_losses(train({"--check", "--parallel=fsdp"}), 4);
  expect_same_losses(train({"--check", "--parallel=fsdp", "--mesh=dp=3"}), 3);
  expect_same_losses(train({"--check", "--parallel=fsdp+tp"}), 4);
  expect_same_losses(train({"--check", "--parallel=fsdp+tp", "--mesh=tp=2,dp=3"}), 6);
  expect_same_losses(train({"--check", "--parallel=fsdp", "--mesh=dp=2", "--backend=gloo"}), 2);
}

TEST(TrainGptTest, SameLossesWithADividedOptimizer) {
  for (const std::string parallel : {"--parallel=zero1", "--parallel=zero2"}) {
    expect_same_losses(train({"--check", parallel}), 4);
    expect_same_losses(train({"--check", parallel, "--mesh=dp=3"}), 3);
    expect_same_losses(train({"--check", parallel, "--mesh=dp=2", "--backend=gloo"}), 2);
  }
}

TEST(TrainGptTest, SameLossesFullyShardedInReplicas) {
  expect_same_losses(train({"--check", "--parallel=hsdp"}), 4);
  expect_same_losses(train({"--check", "--parallel=hsdp", "--mesh=dp=3,replicas=2"}), 6);
  expect_same_losses(train({"--check", "--parallel=hsdp", "--mesh=replicas=2,dp=2,tp=2"}), 8);
}

TEST(TrainGptTest, SameLossesWithSizesThatDoNotDivide) {
  for (const Args& sizes : std::vector<Args>{
           {"--dim=30", "--heads=3", "--seq=7", "--batch=5"},  // 3 heads, 5 sequences
           {"--dim=10", "--heads=1", "--seq=5",
            "--batch=1"},  // ranks without a sequence; cuts inside the head
       }) {
    for (const std::string mesh : {"dp=2,tp=2", "tp=2,dp=2", "dp=3,tp=2"}) {
      SCOPED_TRACE(absl::StrCat(mesh, " ", sizes[0]));
      const nlohmann::json result = train(with(sizes, {"--check", "--mesh=" + mesh}));
      EXPECT_LE(result["max_loss_diff"], 1e-5) << result;
    }
  }
}

TEST(TrainGptTest, StartsItsOwnProcesses) {
  expect_same_losses(train({"--check", "--backend=gloo"}), 4);
  expect_same_losses(train({"--check", "--backend=gloo", "--mesh=dp=3,tp=1"}), 3);
}

// Without a GPU each rank says what is missing.
TEST(TrainGptTest, OnGpusOrSaysWhyNot) {
  for (const std::string backend : {"nccl", "gloo"}) {
    Program program(with(kSmall, {"--device=cuda", "--mesh=dp=1", "--backend=" + backend}));
    if (program.wait() == 0) continue;
    EXPECT_EQ(program.wait(), 1);
    EXPECT_THAT(program.err(),
                AnyOf(HasSubstr("rank 0 of 1: FAILED_PRECONDITION: no CUDA in LibTorch"),
                      HasSubstr("LibTorch's CUDA finds no GPU")));
  }
}

TEST(TrainGptTest, JoinsTheRanksThatTheEnvironmentNames) {
  auto ranks = by_hand(4, with(kSmall, {"--check", "--json"}));
  const nlohmann::json result = result_of(*ranks[0]);
  expect_same_losses(result, 4);
  for (int rank = 1; rank < 4; ++rank) {
    EXPECT_EQ(ranks[rank]->wait(), 0) << ranks[rank]->err();
    EXPECT_THAT(ranks[rank]->out(), IsEmpty());
  }
  // Threads would have had the same losses.
  EXPECT_NEAR(result["last_loss"].get<double>(), train({})["last_loss"].get<double>(), 1e-5);
}

TEST(TrainGptTest, TheSeedDecides) {
  const nlohmann::json one = train({}), again = train({}), other = train({"--seed=2"});
  EXPECT_EQ(one["last_loss"], again["last_loss"]);
  EXPECT_NE(one["first_loss"], other["first_loss"]);
  EXPECT_TRUE(one["max_loss_diff"].is_null());  // without --check
}

TEST(TrainGptTest, TellsWhatItDoes) {
  Program program(with(kSmall, {"--check"}));
  EXPECT_EQ(program.wait(), 0) << program.err();
  EXPECT_THAT(
      program.out(),
      AllOf(HasSubstr("DeviceMesh(dp=2, tp=2)"),
            HasSubstr("  blocks.*.q.weight      [28, 28]     [R, S(0)]      [14, 28]\n"),
            HasSubstr("  blocks.*.o.weight      [28, 28]     [R, S(1)]      [28, 14]\n"),
            HasSubstr("  head.weight            [256, 28]    [R, R]         [256, 28]\n"),
            HasSubstr("training [========================] 5/5  loss "),
            HasSubstr(" tokens/s  0:00 left\n"),
            HasSubstr("collectives of one step, on rank 0:\ncalls  collective"),
            HasSubstr("sample, after 11 bytes of the text:\n"), HasSubstr("largest difference")));
  EXPECT_THAT(program.err(), IsEmpty());
}

// docs/architecture.md shows and explains them.
TEST(TrainGptTest, AStepOfTheDefaultsNeeds10Collectives) {
  Program program({"--steps=2", "--sample=0"});
  EXPECT_EQ(program.wait(), 0) << program.err();
  EXPECT_THAT(program.out(), HasSubstr("\n10 collectives, 3817352 bytes sent by a rank\n"));
  // In the order in which backward made them, as data parallelism lets them leave.
  EXPECT_THAT(program.out(), HasSubstr("  head.weight and 36 more  "));
}

TEST(TrainGptTest, WritesATraceOfAllRanks) {
  for (const std::string backend : {"inproc", "gloo"}) {
    const std::string path = temporary("trace.json");
    Program program(with(kSmall, {"--backend=" + backend, "--trace=" + path}));
    EXPECT_EQ(program.wait(), 0) << program.err();
    EXPECT_THAT(program.out(), HasSubstr("trace: " + path));
    const nlohmann::json trace =
        nlohmann::json::parse(read_file(path), nullptr, /*allow_exceptions=*/false);
    std::map<int, int> all_reduces;  // of each rank
    for (const auto& event : trace["traceEvents"]) {
      if (event["name"] == "all_reduce") ++all_reduces[event["pid"]];
    }
    EXPECT_EQ(all_reduces.size(), 4u);
    for (const auto& [rank, count] : all_reduces) EXPECT_EQ(count, all_reduces[0]) << rank;
    EXPECT_GT(all_reduces[0], 5);
  }
  Program program(with(kSmall, {"--trace=/no/such/folder/trace.json"}));
  EXPECT_NE(program.wait(), 0);
  EXPECT_THAT(program.err(), HasSubstr("writing the trace: "));
}

TEST(TrainGptTest, ReadsATextOfTheUser) {
  const std::string path = temporary("text");
  std::ofstream(path) << "abababababababababababababababababababababab";
  Program program({"--data=" + path, "--steps=40", "--layers=1", "--dim=16", "--batch=8", "--seq=8",
                   "--sample=20"});
  EXPECT_EQ(program.wait(), 0) << program.err();
  EXPECT_THAT(program.out(), HasSubstr("babababababababa"));
}

// --- checkpoints ---------------------------------------------------------------------------------

// Saved under one mesh, gone on from under another: the losses of one rank that was never broken off.
TEST(TrainGptTest, GoesOnFromACheckpoint) {
  struct Way {
    Args saves, resumes;
    int ranks;
  };
  for (const auto& [saves, resumes, ranks] : std::vector<Way>{
           {{"--mesh=dp=2,tp=2"}, {"--parallel=fsdp", "--mesh=dp=3"}, 3},
           {{"--parallel=zero2", "--mesh=dp=3", "--backend=gloo"}, {"--mesh=dp=1,tp=2"}, 2},
           {{"--parallel=fsdp+tp"}, {"--parallel=zero1", "--mesh=dp=2"}, 2}}) {
    const std::string directory = temporary("run");
    train(with(saves, {"--save=" + directory, "--save_every=2", "--steps=3"}));
    EXPECT_TRUE(std::filesystem::exists(directory + "/step-000002/manifest.json"));
    expect_same_losses(train(with(resumes, {"--check", "--resume=" + directory})), ranks);
  }
}

TEST(TrainGptTest, CheckpointsThatCannotBe) {
  const std::string directory = temporary("run");
  train({"--save=" + directory, "--steps=1", "--mesh=dp=2"});
  const auto expect = [](const Args& args, const std::string& message) {
    Program program(with(kSmall, args));
    EXPECT_EQ(program.wait(), 1);
    EXPECT_THAT(program.err(), HasSubstr(message));
  };
  expect({"--resume=/nowhere/run"}, "/nowhere/run");
  expect({"--resume=" + directory, "--layers=1"}, "unexpected: model.blocks.1.");
  expect({"--resume=" + directory, "--layers=1", "--backend=gloo"}, "unexpected: model.blocks.1.");
  expect({"--save=" + directory, "--steps=1"}, "is of a later step than 0");
  Program usage(with(kSmall, {"--save_every=2"}));
  EXPECT_EQ(usage.wait(), 2);
}

// --- bad input -----------------------------------------------------------------------------------

TEST(TrainGptTest, BadFlags) {
  const auto expect = [](const Args& args, const std::string& message) {
    Program program(args);
    EXPECT_NE(program.wait(), 0);
    EXPECT_THAT(program.err(), HasSubstr(message));
    EXPECT_THAT(program.out(), Not(HasSubstr("training")));
  };
  expect({"--mesh=pp=4"},
         "--mesh=pp=4: wanted dp (data parallel) and tp (tensor parallel), not 'pp'");
  expect({"--parallel=pp"}, "--parallel=pp: wanted one of ddp, zero1, zero2, fsdp, hsdp, fsdp+tp");
  expect({"--parallel=fsdp", "--mesh=dp=2,tp=2"}, "wanted fsdp+tp, or a mesh without tp");
  expect({"--parallel=fsdp", "--mesh=replicas=2,dp=2"}, "not 'replicas'");
  expect({"--parallel=hsdp", "--mesh=pp=2,dp=2"}, "wanted replicas, dp");
  expect({"--backend=nccl"}, "--backend=nccl, --device=cpu: wanted inproc or gloo");
  expect({"--device=cuda", "--backend=inproc"}, "--device=cuda: wanted nccl or gloo");
  expect({"--heads=5"}, "--heads=5 does not divide --dim=96");
  expect({"--steps=many"}, "many");
  expect({"--stepz=4"}, "stepz");
  Program usage({"--steps=0"});
  EXPECT_EQ(usage.wait(), 2);
}

// Every rank says what is wrong with the text: threads in one message, processes in one each.
TEST(TrainGptTest, TextsThatCannotBe) {
  const std::string empty = temporary("empty"), few = temporary("few");
  std::ofstream(empty).flush();
  std::ofstream(few) << "eleven char";
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"/nowhere/book.txt", "--data=/nowhere/book.txt: No such file or directory"},
      {empty, absl::StrCat("--data=", empty, ": the file is empty")},
      {few, "--seq=11: the text has only 11 bytes"}};
  for (const auto& [path, message] : cases) {
    Program threads(with(kSmall, {"--data=" + path}));
    EXPECT_EQ(threads.wait(), 1);
    EXPECT_THAT(threads.err(), HasSubstr(message));
    Program processes(with(kSmall, {"--data=" + path, "--backend=gloo"}));
    EXPECT_EQ(processes.wait(), 1);
    EXPECT_THAT(processes.err(), HasSubstr(message));
    for (const auto& rank : by_hand(2, with(kSmall, {"--mesh=dp=2", "--data=" + path}))) {
      EXPECT_EQ(rank->wait(), 1);
      EXPECT_THAT(rank->err(), HasSubstr(message));
    }
  }
}

// Only rank 1 has no file: the others learn it from rank 1, not from a deadline.
TEST(TrainGptTest, ATextThatOneRankLacks) {
  const auto lose_it = [](int rank, Args& args, Variables&) {
    if (rank == 1) args.push_back("--data=/nowhere/book.txt");
  };
  for (const auto& rank : by_hand(3, with(kSmall, {"--mesh=dp=3"}), lose_it)) {
    EXPECT_EQ(rank->wait(), 1);
    EXPECT_THAT(rank->err(), HasSubstr("/nowhere/book.txt"));
  }
}

TEST(TrainGptTest, RanksWithDifferentFlags) {
  const auto other_seed = [](int rank, Args& args, Variables&) {
    if (rank == 2) args.push_back("--seed=7");
  };
  for (const auto& rank : by_hand(3, with(kSmall, {"--mesh=dp=3"}), other_seed)) {
    EXPECT_EQ(rank->wait(), 1);
    EXPECT_THAT(rank->err(), HasSubstr("ranks 0 and 2 were started with different flags or texts"));
  }
}

TEST(TrainGptTest, AMeshThatIsNotTheWorld) {
  for (const auto& rank : by_hand(2, with(kSmall, {"--mesh=dp=3"}))) {
    EXPECT_EQ(rank->wait(), 2);
    EXPECT_THAT(rank->err(), AllOf(HasSubstr("--mesh has 3 ranks"), HasSubstr("has started 2")));
  }
}

TEST(TrainGptTest, AVariableThatIsMissing) {
  for (const auto& rank :
       by_hand(2, with(kSmall, {"--mesh=dp=2"}),
               [](int, Args&, Variables& variables) { variables.erase("MASTER_PORT"); })) {
    EXPECT_EQ(rank->wait(), 1);
    EXPECT_THAT(rank->err(), HasSubstr("MASTER_PORT"));
  }
}

TEST(TrainGptTest, ARankThatNeverComes) {
  auto ranks = by_hand(3, with(kSmall, {"--mesh=dp=3", "--timeout=3s"}),
                       [](int rank, Args& args, Variables&) {
                         if (rank == 1) args = {"--help"};
                       });
  for (int rank : {0, 2}) {
    EXPECT_EQ(ranks[rank]->wait(), 1);
    EXPECT_THAT(ranks[rank]->err(), HasSubstr("rank 1 of 3 did not come"));
  }
}

// --- a rank that dies ----------------------------------------------------------------------------

const Args kEndless = {"--steps=1000000", "--layers=1", "--dim=8",
                       "--heads=2",       "--batch=4",  "--seq=8"};

bool is_training(const Program& program) {
  return absl::StrContains(program.out(), "training [");
}

TEST(TrainGptTest, AKilledRankEndsTheOthers) {
  auto ranks = by_hand(4, kEndless);
  ASSERT_TRUE(eventually([&] { return is_training(*ranks[0]); })) << ranks[0]->err();
  ::kill(ranks[2]->pid(), SIGKILL);
  const auto killed = std::chrono::steady_clock::now();
  for (int rank : {0, 1, 3}) {
    ASSERT_TRUE(eventually([&] { return ranks[rank]->ended(); })) << rank;
    EXPECT_LT(std::chrono::steady_clock::now() - killed, std::chrono::seconds(10));
    EXPECT_EQ(ranks[rank]->wait(), 1);
    EXPECT_THAT(ranks[rank]->err(), AllOf(HasSubstr(absl::StrCat("rank ", rank, " of 4")),
                                          HasSubstr("training step "), HasSubstr("all_reduce")));
  }
}

// The processes that `parent` has started, and is waiting for.
std::vector<pid_t> children(pid_t parent) {
  std::vector<pid_t> result;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    // "pid (name) state parent ..."
    const std::string stat = read_file(entry.path() / "stat");
    const std::vector<std::string> fields = absl::StrSplit(stat.substr(stat.rfind(')') + 1), ' ');
    if (fields.size() > 2 && fields[2] == absl::StrCat(parent))
      result.push_back(std::stoi(entry.path().filename()));
  }
  return result;
}

// Its rank, by its environment; -1 for a process that is none.
int rank_of(pid_t pid) {
  for (const std::string& variable : std::vector<std::string>(
           absl::StrSplit(read_file(absl::StrCat("/proc/", pid, "/environ")), '\0'))) {
    if (absl::StartsWith(variable, "RANK=")) return std::stoi(variable.substr(5));
  }
  return -1;
}

TEST(TrainGptTest, AKilledRankEndsTheOthersUnderTheLauncherToo) {
  Program program(with(kEndless, {"--backend=gloo"}));
  ASSERT_TRUE(eventually([&] { return is_training(program); })) << program.err();
  for (pid_t child : children(program.pid())) {
    if (rank_of(child) == 2) ::kill(child, SIGKILL);
  }
  const auto killed = std::chrono::steady_clock::now();
  ASSERT_TRUE(eventually([&] { return program.ended(); }));
  EXPECT_LT(std::chrono::steady_clock::now() - killed, std::chrono::seconds(10));
  EXPECT_NE(program.wait(), 0);
  const std::string err = program.err();
  for (int rank : {0, 1, 3}) {
    EXPECT_THAT(err, HasSubstr(absl::StrCat("rank ", rank, " of 4"))) << err;
  }
  EXPECT_THAT(err, AllOf(HasSubstr("training step "), HasSubstr("rank 2"), HasSubstr("signal 9")));
}

TEST(TrainGptTest, AskedToEndItSaysWhatItWasDoing) {
  auto ranks = by_hand(1, with(kEndless, {"--mesh=dp=1"}));
  ASSERT_TRUE(eventually([&] { return is_training(*ranks[0]); })) << ranks[0]->err();
  ::kill(ranks[0]->pid(), SIGTERM);
  EXPECT_EQ(ranks[0]->wait(), 128 + SIGTERM);
  EXPECT_THAT(ranks[0]->err(), AllOf(HasSubstr("rank 0 of 1, training step "),
                                     HasSubstr("asked to end by signal 15")));
}

}  // namespace
