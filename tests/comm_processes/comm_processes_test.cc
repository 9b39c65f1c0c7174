// Ranks that are processes over the Gloo backend: right values; and when one is killed or stopped,
// the others end in time and say what they were doing and who is missing.
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::seconds;

// A running rank, and what it has printed. Killed with its owner.
class Process {
 public:
  explicit Process(const std::vector<std::string>& arguments) {
    int pipe[2];
    EXPECT_EQ(::pipe2(pipe, O_CLOEXEC), 0);
    const pid_t parent = ::getpid();
    pid_ = ::fork();
    if (pid_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (::getppid() != parent) ::_exit(2);
      ::dup2(pipe[1], STDOUT_FILENO);
      ::dup2(pipe[1], STDERR_FILENO);
      std::vector<char*> argv;
      for (const std::string& argument : arguments)
        argv.push_back(const_cast<char*>(argument.c_str()));
      argv.push_back(nullptr);
      ::execv(argv[0], argv.data());
      ::_exit(2);
    }
    ::close(pipe[1]);
    output_ = pipe[0];
  }
  ~Process() {
    kill(SIGKILL);
    if (!reaped_) ::waitpid(pid_, nullptr, 0);
    ::close(output_);
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  void kill(int signal) {
    if (!reaped_) ::kill(pid_, signal);
  }

  // Reads until `text` has been printed; false if it was not by then, or the output has ended.
  bool wait_for(const std::string& text, Clock::time_point limit) {
    while (printed_.find(text) == std::string::npos) {
      if (!read_more(limit)) return false;
    }
    return true;
  }

  // The exit code; -1 if it was still running by then, or ended by a signal.
  int wait_for_exit(Clock::time_point limit) {
    while (read_more(limit)) {
    }
    if (Clock::now() >= limit) return -1;
    int status = 0;
    ::waitpid(pid_, &status, 0);
    reaped_ = true;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

  const std::string& printed() const { return printed_; }

 private:
  bool read_more(Clock::time_point limit) {
    const auto left = std::chrono::ceil<milliseconds>(limit - Clock::now()).count();
    pollfd ready{.fd = output_, .events = POLLIN};
    if (left <= 0 || ::poll(&ready, 1, static_cast<int>(left)) <= 0) return false;
    char buffer[4096];
    const ssize_t count = ::read(output_, buffer, sizeof(buffer));
    if (count <= 0) return false;
    printed_.append(buffer, count);
    return true;
  }

  pid_t pid_ = -1;
  int output_ = -1;
  bool reaped_ = false;
  std::string printed_;
};

class CommProcessesTest : public testing::Test {
 protected:
  void SetUp() override {
    directory_ = testing::TempDir() + "/comm_processes.XXXXXX";
    ASSERT_NE(::mkdtemp(directory_.data()), nullptr);
  }
  void TearDown() override {
    ranks_.clear();
    std::filesystem::remove_all(directory_);
  }

  // The first `started` ranks of `size`.
  void start(int started, int size, const std::string& scenario, int timeout_ms) {
    for (int rank = 0; rank < started; ++rank) {
      ranks_.push_back(std::make_unique<Process>(std::vector<std::string>{
          "tests/comm_processes/rank", directory_ + "/store", std::to_string(rank),
          std::to_string(size), scenario, std::to_string(timeout_ms)}));
    }
  }

  void expect_all_going() {
    const auto limit = Clock::now() + seconds(60);
    for (auto& rank : ranks_) ASSERT_TRUE(rank->wait_for("going", limit)) << rank->printed();
  }

  // All ranks but `except` end with an error that has all `parts`.
  void expect_errors(int except, Clock::time_point limit, const std::vector<std::string>& parts) {
    for (int rank = 0; rank < static_cast<int>(ranks_.size()); ++rank) {
      if (rank == except) continue;
      EXPECT_EQ(ranks_[rank]->wait_for_exit(limit), 1) << "rank " << rank;
      for (const std::string& part : parts) {
        EXPECT_NE(ranks_[rank]->printed().find(part), std::string::npos)
            << "rank " << rank << ": want '" << part << "' in: " << ranks_[rank]->printed();
      }
    }
  }

  std::string directory_;
  std::vector<std::unique_ptr<Process>> ranks_;
};

TEST_F(CommProcessesTest, ValuesAreRight) {
  start(5, 5, "values", 60'000);
  for (auto& rank : ranks_) {
    EXPECT_EQ(rank->wait_for_exit(Clock::now() + seconds(60)), 0);
    EXPECT_EQ(rank->printed(), "connected\nOK\n");
  }
}

TEST_F(CommProcessesTest, AKilledRankEndsTheOthersAtOnce) {
  start(4, 4, "train", 300'000);
  expect_all_going();
  ranks_[2]->kill(SIGKILL);
  expect_errors(2, Clock::now() + seconds(10),
                {"UNAVAILABLE", "all_reduce(f32[100000], avg) 'gradient', #", "of group 'world'",
                 "rank 2 (world rank 2) is gone"});
}

TEST_F(CommProcessesTest, AStoppedRankEndsTheOthersAtTheirDeadline) {
  start(4, 4, "train", 2'000);
  expect_all_going();
  ranks_[1]->kill(SIGSTOP);
  expect_errors(
      1, Clock::now() + seconds(12),
      {"DEADLINE_EXCEEDED", "all_reduce(f32[100000], avg) 'gradient', #", "rank 1 (world rank 1)"});
}

TEST_F(CommProcessesTest, ARankThatNeverComesIsNamed) {
  start(2, 3, "values", 500);
  expect_errors(
      -1, Clock::now() + seconds(10),
      {"DEADLINE_EXCEEDED", "connecting group 'world'", "rank 2 (world rank 2) did not come"});
}

TEST_F(CommProcessesTest, ARankThatEndsBeforeAGroupIsMadeDoesNotKeepTheOthersWaiting) {
  start(3, 3, "late_group", 60'000);
  expect_errors(1, Clock::now() + seconds(15),
                {"UNAVAILABLE", "connecting group 'late'", "rank 1 (world rank 1) has left"});
}

TEST_F(CommProcessesTest, RanksThatDisagreeAllLearnIt) {
  start(3, 3, "disagree", 60'000);
  expect_errors(-1, Clock::now() + seconds(10),
                {"FAILED_PRECONDITION", "all_reduce(f32[1], sum)", "rank 1 called barrier()"});
}

}  // namespace
