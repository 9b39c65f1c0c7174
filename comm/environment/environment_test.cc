// Real processes join a World under each kind of environment.
#include <ATen/Parallel.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/comm/environment/from_environment.h"
#include "shardweave/comm/rendezvous/threads.h"
#include "shardweave/comm/store/c10d_store.h"
#include "shardweave/tools/launch/launcher.h"

namespace shardweave {
namespace {

using testing::HasSubstr;

constexpr char kRank[] = "comm/environment/environment_test_rank";

// What LibTorch uses by itself, without ranks beside it.
int threads_of(int ranks) {
  return std::min(at::get_num_threads(), std::max(1, available_cores() / ranks));
}

// A process of environment_test_rank with these variables, and its output.
class RankProcess {
 public:
  RankProcess(const std::map<std::string, std::string>& variables, int timeout_milliseconds,
              int rank_that_dies) {
    int ends[2], errors[2];
    EXPECT_EQ(::pipe2(ends, O_CLOEXEC), 0);
    EXPECT_EQ(::pipe2(errors, O_CLOEXEC), 0);
    const std::string timeout = absl::StrCat(timeout_milliseconds);
    const std::string dies = absl::StrCat(rank_that_dies);
    pid_ = ::fork();
    if (pid_ == 0) {
      for (const auto& [name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
      ::dup2(ends[1], STDOUT_FILENO);
      ::dup2(errors[1], STDERR_FILENO);
      ::execl(kRank, kRank, timeout.c_str(), dies.c_str(), nullptr);
      ::_exit(99);
    }
    ::close(ends[1]);
    ::close(errors[1]);
    output_ = ends[0];
    errors_ = errors[0];
  }
  ~RankProcess() {
    ::close(output_);
    ::close(errors_);
  }
  RankProcess(RankProcess&& other) noexcept
      : pid_(other.pid_),
        output_(std::exchange(other.output_, -1)),
        errors_(std::exchange(other.errors_, -1)) {}

  int wait(std::string& output, std::string& errors) {
    read_all(output_, output);
    read_all(errors_, errors);
    int status = 0;
    EXPECT_EQ(::waitpid(pid_, &status, 0), pid_);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

 private:
  static void read_all(int fd, std::string& text) {
    char buffer[4096];
    for (ssize_t n; (n = ::read(fd, buffer, sizeof(buffer))) > 0;) text.append(buffer, n);
  }

  pid_t pid_;
  int output_;
  int errors_;
};

struct Outcome {
  int exit_code;
  std::string output;
  std::string errors;  // what it has written to stderr
};

std::vector<Outcome> run(const std::vector<std::map<std::string, std::string>>& ranks,
                         int timeout_milliseconds = 60000, int rank_that_dies = -1) {
  std::vector<RankProcess> processes;
  for (const auto& variables : ranks) {
    processes.emplace_back(variables, timeout_milliseconds, rank_that_dies);
  }
  std::vector<Outcome> outcomes(ranks.size());
  for (size_t i = 0; i < processes.size(); ++i) {
    outcomes[i].exit_code = processes[i].wait(outcomes[i].output, outcomes[i].errors);
  }
  return outcomes;
}

void expect_joined(const std::vector<Outcome>& outcomes, int threads = 0) {
  const int size = static_cast<int>(outcomes.size());
  for (int rank = 0; rank < size; ++rank) {
    EXPECT_EQ(outcomes[rank].exit_code, 0);
    EXPECT_EQ(outcomes[rank].output, absl::StrCat("rank ", rank, " of ", size, ", local ", rank,
                                                  ", sum ", size * (size - 1) / 2, ", threads ",
                                                  threads ? threads : threads_of(size), "\n"));
  }
}

// A port that was free a moment ago: what a user who sets MASTER_PORT by hand chooses.
int some_port() {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  socklen_t size = sizeof(address);
  EXPECT_EQ(::bind(fd, reinterpret_cast<sockaddr*>(&address), size), 0);
  EXPECT_EQ(::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size), 0);
  ::close(fd);
  return ntohs(address.sin_port);
}

std::map<std::string, std::string> by_hand(int rank, int size, int port) {
  return {{"RANK", absl::StrCat(rank)},
          {"WORLD_SIZE", absl::StrCat(size)},
          {"MASTER_ADDR", "127.0.0.1"},
          {"MASTER_PORT", absl::StrCat(port)}};
}

TEST(EnvironmentTest, UnderOurLauncher) {
  for (int ranks : {1, 3}) {
    absl::StatusOr<LaunchResult> result = launch({.num_ranks = ranks, .command = {kRank}});
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_TRUE(result->ok()) << result->summary();
  }
}

// Four shells; nobody says what the local ranks are.
TEST(EnvironmentTest, SetByHand) {
  const int port = some_port();
  std::vector<std::map<std::string, std::string>> ranks;
  for (int rank = 0; rank < 4; ++rank) ranks.push_back(by_hand(rank, 4, port));
  expect_joined(run(ranks));
}

TEST(EnvironmentTest, RanksOfAMachineShareItsCores) {
  const int port = some_port();
  const std::vector<Outcome> outcomes = run({by_hand(0, 2, port), by_hand(1, 2, port)});
  expect_joined(outcomes);
  const bool is_limited = threads_of(2) < at::get_num_threads();
  EXPECT_EQ(outcomes[0].errors,
            is_limited
                ? absl::StrCat(
                      "shardweave: ", describe_threads(threads_of(2), available_cores(), 2), "\n")
                : "");
  EXPECT_EQ(outcomes[1].errors, "") << "the first rank of a machine says it";
}

TEST(EnvironmentTest, OMP_NUM_THREADSWins) {
  const int port = some_port();
  std::vector<std::map<std::string, std::string>> ranks = {by_hand(0, 2, port),
                                                           by_hand(1, 2, port)};
  const int all = at::get_num_threads();  // of LibTorch without ranks beside it
  for (auto& variables : ranks) variables["OMP_NUM_THREADS"] = absl::StrCat(all);
  const std::vector<Outcome> outcomes = run(ranks);
  expect_joined(outcomes, all);
  for (const Outcome& outcome : outcomes) EXPECT_EQ(outcome.errors, "");
}

// Of the launcher's variables, if it tells.
TEST(EnvironmentTest, RanksElsewhereDoNotShareCores) {
  const int port = some_port();
  std::vector<std::map<std::string, std::string>> ranks = {by_hand(0, 2, port),
                                                           by_hand(1, 2, port)};
  for (auto& variables : ranks)
    variables.merge(
        std::map<std::string, std::string>{{"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "1"}});
  for (const Outcome& outcome : run(ranks)) {
    EXPECT_THAT(outcome.output, HasSubstr(absl::StrCat("threads ", threads_of(1))));
  }
}

// LibTorch brings its own libgomp; another one beside it would start threads of its own.
TEST(EnvironmentTest, OneOpenMpIsLoadedAndThatIsLibTorchs) {
  std::set<std::string> openmp;
  std::string libtorch;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const std::filesystem::path path = line.substr(std::min(line.find('/'), line.size()));
    const std::string name = path.filename();
    if (name.starts_with("libgomp") || name.starts_with("libomp") || name.starts_with("libiomp")) {
      openmp.insert(path);
    }
    if (name.starts_with("libtorch_cpu.so")) libtorch = path.parent_path();
  }
  ASSERT_EQ(openmp.size(), 1u);
  EXPECT_EQ(std::filesystem::path(*openmp.begin()).parent_path(), libtorch);
}

TEST(EnvironmentTest, JoinsTheStoreOfTorchrunsAgent) {
  auto agent = open_c10d_store({.serve = true}).value();
  for (int restart = 0; restart < 2; ++restart) {  // the agent's store remembers the first start
    std::vector<std::map<std::string, std::string>> ranks;
    for (int rank = 0; rank < 2; ++rank) {
      ranks.push_back(by_hand(rank, 2, agent->port()));
      ranks.back().merge(
          std::map<std::string, std::string>{{"LOCAL_RANK", absl::StrCat(rank)},
                                             {"LOCAL_WORLD_SIZE", "2"},
                                             {"TORCHELASTIC_RUN_ID", "none"},
                                             {"TORCHELASTIC_RESTART_COUNT", absl::StrCat(restart)},
                                             {"TORCHELASTIC_USE_AGENT_STORE", "True"}});
    }
    expect_joined(run(ranks));
  }
}

TEST(EnvironmentTest, MeetsInAFile) {
  std::string directory = absl::StrCat(testing::TempDir(), "/environment_XXXXXX");
  ASSERT_NE(::mkdtemp(directory.data()), nullptr);
  std::vector<std::map<std::string, std::string>> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    ranks.push_back({{"RANK", absl::StrCat(rank)},
                     {"WORLD_SIZE", "3"},
                     {"SHARDWEAVE_STORE_FILE", directory + "/store"}});
  }
  expect_joined(run(ranks));
  // The file of a run that is over is no meeting point.
  for (const Outcome& outcome : run(ranks)) {
    EXPECT_EQ(outcome.exit_code, 3);
    EXPECT_THAT(outcome.output, HasSubstr("earlier run"));
  }
  std::filesystem::remove_all(directory);
}

// Time enough for the others to start on a machine that is busy, under a sanitizer.
TEST(EnvironmentTest, ARankThatNeverArrivesIsNamedEverywhere) {
  const int port = some_port();
  for (const Outcome& outcome : run({by_hand(0, 3, port), by_hand(2, 3, port)}, 8000)) {
    EXPECT_EQ(outcome.exit_code, 3);
    EXPECT_THAT(outcome.output, HasSubstr("DEADLINE_EXCEEDED: rank 1 of 3 did not come"));
  }
}

// Rank 0 too, whose store dies with it.
TEST(EnvironmentTest, AKilledRankIsAnErrorOnTheOthersAtOnce) {
  for (int victim : {0, 1}) {
    const int port = some_port();
    const absl::Time start = absl::Now();
    const std::vector<Outcome> outcomes =
        run({by_hand(0, 3, port), by_hand(1, 3, port), by_hand(2, 3, port)}, 60000, victim);
    EXPECT_LT(absl::Now() - start, absl::Seconds(30));
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == victim) {
        EXPECT_EQ(outcomes[rank].exit_code, -SIGKILL);
        continue;
      }
      EXPECT_EQ(outcomes[rank].exit_code, 4);
      EXPECT_THAT(outcomes[rank].output, HasSubstr("all_reduce"));
      EXPECT_THAT(outcomes[rank].output, HasSubstr("'the sum'"));
      EXPECT_THAT(outcomes[rank].output, HasSubstr(absl::StrCat("rank ", victim)));
    }
  }
}

TEST(EnvironmentTest, AMissingRankZeroIsSaidWithItsAddress) {
  const int port = some_port();
  const Outcome outcome = run({by_hand(1, 2, port)}, 500)[0];
  EXPECT_EQ(outcome.exit_code, 3);
  EXPECT_THAT(outcome.output, HasSubstr("rank 1 of 2 (environment variables; address from "
                                        "MASTER_ADDR, MASTER_PORT)"));
  EXPECT_THAT(outcome.output, HasSubstr(absl::StrCat("127.0.0.1:", port, ": nobody answers")));
}

// At once on stderr; the error comes when the name has had ten seconds to appear.
TEST(EnvironmentTest, AnAddressThatDoesNotExistIsSaidByEveryRank) {
  std::vector<std::map<std::string, std::string>> ranks = {by_hand(0, 2, some_port()),
                                                           by_hand(1, 2, some_port())};
  for (auto& variables : ranks) variables["MASTER_ADDR"] = "no such host";
  const absl::Time start = absl::Now();
  for (const Outcome& outcome : run(ranks)) {
    EXPECT_EQ(outcome.exit_code, 3);
    EXPECT_THAT(outcome.output, HasSubstr("UNAVAILABLE"));
    EXPECT_THAT(outcome.output, HasSubstr("MASTER_ADDR"));
    EXPECT_THAT(outcome.output, HasSubstr("no such host"));
    EXPECT_THAT(outcome.output, HasSubstr("cannot resolve the name"));
    EXPECT_THAT(outcome.errors, HasSubstr("shardweave: waiting for "));
    EXPECT_THAT(outcome.errors, HasSubstr("no such host"));
    EXPECT_THAT(outcome.errors, HasSubstr("cannot resolve the name"));
  }
  EXPECT_LT(absl::Now() - start, absl::Seconds(30));
}

// A pod's name may come later than its peers.
TEST(EnvironmentTest, InAPodAnAddressMayComeLater) {
  std::map<std::string, std::string> variables = by_hand(1, 2, some_port());
  variables["MASTER_ADDR"] = "no such host";
  variables["KUBERNETES_SERVICE_HOST"] = "10.0.0.1";
  const absl::Time start = absl::Now();
  const Outcome outcome = run({variables}, 1500)[0];
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(1500));
  EXPECT_EQ(outcome.exit_code, 3);
  EXPECT_THAT(outcome.errors, HasSubstr("waiting for rank 0's store at no such host"));
}

TEST(EnvironmentTest, DifferentWorldSizesAreAnErrorEverywhere) {
  const int port = some_port();
  for (const Outcome& outcome : run({by_hand(0, 2, port), by_hand(1, 3, port)})) {
    EXPECT_EQ(outcome.exit_code, 3);
    EXPECT_THAT(outcome.output, HasSubstr("rank 0 was told of 2 ranks, rank 1 of 3"));
  }
}

TEST(EnvironmentTest, AnOccupiedPortIsSaid) {
  auto other = open_c10d_store({.serve = true}).value();
  const Outcome outcome = run({by_hand(0, 1, other->port())}, 2000)[0];
  EXPECT_EQ(outcome.exit_code, 3);
  EXPECT_THAT(outcome.output, HasSubstr("cannot serve"));
  EXPECT_THAT(outcome.output, HasSubstr("MASTER_PORT"));
}

TEST(EnvironmentTest, NoLauncherIsNotFound) {
  EXPECT_EQ(World::from_environment().status().code(), absl::StatusCode::kNotFound);
}

TEST(EnvironmentTest, UnknownBackend) {
  const Outcome outcome = run({by_hand(0, 1, some_port())})[0];
  EXPECT_EQ(outcome.exit_code, 0);
  ::setenv("RANK", "0", 1);
  ::setenv("WORLD_SIZE", "1", 1);
  ::setenv("SHARDWEAVE_STORE_FILE", "/dev/null", 1);
  const absl::Status status = World::from_environment({.backend = "pigeons"}).status();
  for (const char* name : {"RANK", "WORLD_SIZE", "SHARDWEAVE_STORE_FILE"}) ::unsetenv(name);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("backend \"pigeons\": wanted \"gloo\""));
}

}  // namespace
}  // namespace shardweave
