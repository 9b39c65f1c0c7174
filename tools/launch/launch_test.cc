// Real processes: shell scripts as ranks, under the program launch.
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "shardweave/comm/rendezvous/threads.h"
#include "shardweave/tools/launch/launcher.h"

namespace shardweave {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing::UnorderedElementsAre;

constexpr char kProgram[] = "tools/launch/launch";

// A run of launch in the background, its output in files.
class Launched {
 public:
  explicit Launched(std::vector<std::string> arguments, const char* name = kProgram,
                    int output = -1) {
    std::string directory = absl::StrCat(testing::TempDir(), "/launch_XXXXXX");
    EXPECT_NE(::mkdtemp(directory.data()), nullptr);
    directory_ = directory;
    arguments.insert(arguments.begin(), name);
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    const std::string out = path("out");
    const std::string err = path("err");
    pid_ = ::fork();
    if (pid_ == 0) {
      ::dup2(output >= 0 ? output : ::open(out.c_str(), O_CREAT | O_WRONLY, 0600), STDOUT_FILENO);
      ::dup2(::open(err.c_str(), O_CREAT | O_WRONLY, 0600), STDERR_FILENO);
      ::setenv("SCRATCH", directory_.c_str(), 1);
      ::unsetenv("OMP_NUM_THREADS");
      ::execv(kProgram, argv.data());
      ::_exit(99);
    }
  }
  ~Launched() {
    if (pid_ > 0) {
      ::kill(pid_, SIGKILL);
      wait();
    }
    std::filesystem::remove_all(directory_);
  }
  Launched(const Launched&) = delete;
  Launched& operator=(const Launched&) = delete;

  pid_t pid() const { return pid_; }
  std::string path(const std::string& name) const { return absl::StrCat(directory_, "/", name); }
  std::string read(const std::string& name) const {
    std::stringstream text;
    text << std::ifstream(path(name)).rdbuf();
    return text.str();
  }
  std::string out() const { return read("out"); }
  std::string err() const { return read("err"); }
  std::vector<std::string> lines() const {
    std::vector<std::string> lines = absl::StrSplit(out(), '\n', absl::SkipEmpty());
    return lines;
  }
  // The exit code, or minus the signal.
  int wait() {
    int status = 0;
    EXPECT_EQ(::waitpid(pid_, &status, 0), pid_);
    pid_ = -1;
    return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
  }
  // Waits until a rank has written the file $SCRATCH/<name>; its content is a number.
  int wait_for_number(const std::string& name) const {
    int number = 0;
    for (int i = 0; i < 3000; ++i) {
      if (absl::SimpleAtoi(read(name), &number)) return number;
      absl::SleepFor(absl::Milliseconds(10));
    }
    ADD_FAILURE() << name << " never came";
    return -1;
  }

 private:
  std::string directory_;
  pid_t pid_;
};

std::vector<std::string> shell(int ranks, const std::string& script,
                               std::vector<std::string> flags = {}) {
  std::vector<std::string> arguments = {"-n", absl::StrCat(ranks)};
  arguments.insert(arguments.end(), flags.begin(), flags.end());
  arguments.insert(arguments.end(), {"--", "sh", "-c", script});
  return arguments;
}

bool gone_soon(pid_t pid) {
  for (int i = 0; i < 1000; ++i) {
    if (::kill(pid, 0) != 0 && errno == ESRCH) return true;
    // Orphans may wait for an init that does not collect them.
    std::ifstream stat(absl::StrCat("/proc/", pid, "/stat"));
    std::string text((std::istreambuf_iterator<char>(stat)), {});
    if (absl::StrContains(text, ") Z ")) return true;
    absl::SleepFor(absl::Milliseconds(10));
  }
  return false;
}

TEST(LaunchTest, RanksKnowWhoTheyAre) {
  Launched run(shell(3, "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $MASTER_ADDR"));
  EXPECT_EQ(run.wait(), 0) << run.err();
  EXPECT_THAT(run.lines(), UnorderedElementsAre("[0] 0/3 0/3 127.0.0.1", "[1] 1/3 1/3 127.0.0.1",
                                                "[2] 2/3 2/3 127.0.0.1"));
}

TEST(LaunchTest, RanksShareOnePortAndOneRun) {
  Launched run(shell(2, "echo $MASTER_PORT $SHARDWEAVE_RUN_ID", {"--noprefix"}));
  EXPECT_EQ(run.wait(), 0);
  ASSERT_EQ(run.lines().size(), 2u);
  EXPECT_EQ(run.lines()[0], run.lines()[1]);
  EXPECT_THAT(run.lines()[0], testing::MatchesRegex("[1-9][0-9]* [0-9]+-[0-9a-f]+"));
}

TEST(LaunchTest, OnlyRankZeroHasTheListeningSocket) {
  Launched run(shell(2,
                     "echo fd=$SHARDWEAVE_STORE_FD"
                     " sockets=$(ls -l /proc/self/fd | grep -c 'socket:')"));
  EXPECT_EQ(run.wait(), 0);
  EXPECT_THAT(run.lines(),
              UnorderedElementsAre(testing::MatchesRegex(R"(\[0\] fd=[0-9]+ sockets=1)"),
                                   "[1] fd= sockets=0"));
}

TEST(LaunchTest, OuterEnvironmentIsPassedOnButNotItsStore) {
  ::setenv("SHARDWEAVE_STORE_FILE", "/outer", 1);
  ::setenv("RANK", "17", 1);
  ::setenv("PASSED_ON", "yes", 1);
  Launched run(shell(1, "echo $RANK $PASSED_ON file=$SHARDWEAVE_STORE_FILE omp=$OMP_NUM_THREADS"));
  ::unsetenv("SHARDWEAVE_STORE_FILE");
  ::unsetenv("RANK");
  ::unsetenv("PASSED_ON");
  EXPECT_EQ(run.wait(), 0);
  EXPECT_THAT(run.out(), testing::MatchesRegex(R"(\[0\] 0 yes file= omp=[1-9][0-9]*)"
                                               "\n"));
}

TEST(LaunchTest, RanksShareTheCores) {
  Launched run(shell(2, "echo omp=$OMP_NUM_THREADS"));
  EXPECT_EQ(run.wait(), 0);
  const int cores = available_cores();
  const int threads = std::max(1, cores / 2);
  EXPECT_THAT(run.lines(), UnorderedElementsAre(absl::StrCat("[0] omp=", threads),
                                                absl::StrCat("[1] omp=", threads)));
  EXPECT_EQ(run.err(), absl::StrCat("launch: ", describe_threads(threads, cores, 2), "\n"));
}

TEST(LaunchTest, OMP_NUM_THREADSWins) {
  Launched run({"-n", "2", "--", "env", "OMP_NUM_THREADS=5", "tools/launch/launch", "-n", "2", "--",
                "sh", "-c", "echo $OMP_NUM_THREADS"});
  EXPECT_EQ(run.wait(), 0);
  EXPECT_EQ(run.lines().size(), 4u);
  for (const std::string& line : run.lines()) EXPECT_THAT(line, testing::EndsWith(" 5"));
  EXPECT_THAT(run.err(), Not(HasSubstr("] launch: "))) << "the inner ones have nothing to say";
}

TEST(LaunchTest, ArgumentsReachTheProgramUnchanged) {
  Launched run({"-n", "1", "--", "printf", "%s|", "--n=7", "a b", "", "--"});
  EXPECT_EQ(run.wait(), 0);
  EXPECT_EQ(run.out(), "[0] --n=7|a b||--|\n");
}

TEST(LaunchTest, PrefixesBothStreamsAndAlignsNumbers) {
  Launched run(shell(11, "echo out; echo err >&2; printf tail"));
  EXPECT_EQ(run.wait(), 0);
  EXPECT_EQ(run.lines().size(), 22u);
  EXPECT_THAT(run.out(), AllOf(HasSubstr("[ 3] out\n"), HasSubstr("[10] tail\n")));
  EXPECT_THAT(run.err(), AllOf(HasSubstr("[ 3] err\n"), HasSubstr("[10] err\n")));
  EXPECT_THAT(run.out(), Not(HasSubstr("\x1b")));  // a file is no terminal
}

TEST(LaunchTest, MuchOutputArrivesWhole) {
  Launched run(shell(4, "i=0; while [ $i -lt 5000 ]; do echo line $i of $RANK; i=$((i+1)); done"));
  EXPECT_EQ(run.wait(), 0);
  EXPECT_EQ(run.lines().size(), 20000u);
  for (const std::string& line : run.lines()) {
    EXPECT_THAT(line, testing::MatchesRegex(R"(\[[0-3]\] line [0-9]+ of [0-3])"));
  }
}

TEST(LaunchTest, RanksReadNothing) {
  Launched run(shell(2, "cat; echo done"));
  EXPECT_EQ(run.wait(), 0);
  EXPECT_EQ(run.lines().size(), 2u);
}

TEST(LaunchTest, FirstFailureEndsAllAndIsNamed) {
  Launched run(shell(4, "if [ $RANK = 2 ]; then echo broken >&2; exit 7; fi; exec sleep 600",
                     {"--notice=0"}));
  EXPECT_EQ(run.wait(), 7);
  EXPECT_THAT(run.err(), HasSubstr("[2] broken\n"));
  EXPECT_THAT(run.err(),
              testing::ContainsRegex(
                  "launch: rank 2 .pid [0-9]+. exited with code 7 after .* s; the others"));
}

TEST(LaunchTest, KilledRankEndsAllAndIsNamed) {
  Launched run(shell(3, "if [ $RANK = 1 ]; then kill -9 $$; fi; exec sleep 600", {"--notice=0.1"}));
  EXPECT_EQ(run.wait(), 128 + SIGKILL);
  EXPECT_THAT(run.err(), testing::ContainsRegex("rank 1 .* was killed by signal 9 .Killed."));
}

// What the others then say, and how they fail themselves, does not hide the one that came first.
TEST(LaunchTest, OthersMaySayWhatTheyWereDoing) {
  Launched run(shell(3,
                     "if [ $RANK = 2 ]; then echo >$SCRATCH/gone; exit 5; fi;"
                     "while [ ! -e $SCRATCH/gone ]; do sleep 0.01; done;"
                     "sleep 0.1; echo lost rank 2 in all_reduce >&2; exit 1",
                     {"--notice=60", "--json"}));
  EXPECT_EQ(run.wait(), 5);
  EXPECT_THAT(run.err(),
              AllOf(HasSubstr("[0] lost rank 2 in all_reduce\n"),
                    HasSubstr("[1] lost rank 2 in all_reduce\n"), HasSubstr("launch: rank 2 ")));
  const auto summary = nlohmann::json::parse(run.lines().back());
  EXPECT_EQ(summary["first_failure"], 2);
  EXPECT_EQ(summary["results"][0]["exit_code"], 1);
}

// The others fail because it does not answer any more; it has not failed itself.
TEST(LaunchTest, ARankThatLeftWithoutAWordIsNamed) {
  const auto script = [](const std::string& some, const std::string& all_gone) {
    return absl::StrCat("if ", some, "; then echo >$SCRATCH/gone$RANK; exit 0; fi; cd $SCRATCH;",
                        "until ", all_gone, "; do sleep 0.01; done; sleep 0.5; exit 1");
  };
  Launched one(shell(3, script("[ $RANK = 2 ]", "[ -e gone2 ]")));
  EXPECT_EQ(one.wait(), 1);
  EXPECT_THAT(one.err(), testing::ContainsRegex(
                             "launch: rank [01] .* exited with code 1 after .* s; the others "
                             "were ended; rank 2 had left first, with exit code 0 after "));

  Launched two(shell(3, script("[ $RANK != 1 ]", "[ -e gone0 ] && [ -e gone2 ]")));
  EXPECT_EQ(two.wait(), 1);
  EXPECT_THAT(two.err(), testing::ContainsRegex("rank 1 .* exited with code 1 after [0-9.]* s; "
                                                "ranks 0, 2 had left first, with exit code 0 "));
}

TEST(LaunchTest, StubbornRanksAreKilledAfterTheGrace) {
  const absl::Time start = absl::Now();
  Launched run(shell(2,
                     "if [ $RANK = 0 ]; then sleep 0.2; exit 3; fi; trap '' TERM; sleep 600 & wait",
                     {"--notice=0", "--grace=0.3"}));
  EXPECT_EQ(run.wait(), 3);
  EXPECT_LT(absl::Now() - start, absl::Seconds(60));
}

TEST(LaunchTest, SignalsArePassedOn) {
  for (int signal : {SIGTERM, SIGINT, SIGHUP}) {
    Launched run(shell(2,
                       "trap 'echo got it; exit 0' TERM INT HUP; echo $$ >$SCRATCH/pid$RANK;"
                       "while true; do sleep 0.02; done"));
    run.wait_for_number("pid0");
    run.wait_for_number("pid1");
    ::kill(run.pid(), signal);
    EXPECT_EQ(run.wait(), 128 + signal);
    EXPECT_THAT(run.lines(), UnorderedElementsAre("[0] got it", "[1] got it"));
    EXPECT_THAT(run.err(), HasSubstr(absl::StrCat("launch: ended by signal ", signal)));
  }
}

// nohup: whoever logs out ends nothing.
TEST(LaunchTest, WhatWasIgnoredStaysIgnored) {
  for (int signal : {SIGHUP, SIGINT}) {
    const auto before = ::signal(signal, SIG_IGN);
    Launched run(shell(2, "echo $$ >$SCRATCH/pid$RANK; sleep 0.5; echo done"));
    ::signal(signal, before);
    const int rank = run.wait_for_number("pid0");
    run.wait_for_number("pid1");
    ::kill(run.pid(), signal);
    ::kill(rank, signal);
    EXPECT_EQ(run.wait(), 0);
    EXPECT_THAT(run.lines(), UnorderedElementsAre("[0] done", "[1] done"));
  }
}

// "Save and end", of a batch system: the run goes on as long as it wants, and its end is its own.
TEST(LaunchTest, UserSignalsAreMessages) {
  for (int signal : {SIGUSR1, SIGUSR2}) {
    Launched run(shell(2,
                       "trap 'echo saving; sleep 0.5; echo saved; exit 0' USR1 USR2;"
                       "echo $$ >$SCRATCH/pid$RANK; while true; do sleep 0.02; done",
                       {"--grace=0.1"}));
    run.wait_for_number("pid0");
    run.wait_for_number("pid1");
    ::kill(run.pid(), signal);
    EXPECT_EQ(run.wait(), 0);
    EXPECT_THAT(run.lines(),
                UnorderedElementsAre("[0] saving", "[1] saving", "[0] saved", "[1] saved"));
  }
}

TEST(LaunchTest, SecondSignalDoesNotWaitForTheGrace) {
  Launched run(shell(1, "trap '' TERM; echo $$ >$SCRATCH/pid; while true; do sleep 0.02; done",
                     {"--grace=600"}));
  run.wait_for_number("pid");
  ::kill(run.pid(), SIGTERM);
  absl::SleepFor(absl::Milliseconds(300));
  ::kill(run.pid(), SIGTERM);
  EXPECT_EQ(run.wait(), 128 + SIGTERM);
}

// kill -9 of the launcher takes the ranks along, and what they have started.
TEST(LaunchTest, KilledLauncherLeavesNoOrphans) {
  Launched run(
      shell(2, "sleep 600 & echo $! >$SCRATCH/child$RANK; echo $$ >$SCRATCH/rank$RANK; wait"));
  std::vector<int> pids;
  for (const char* name : {"rank0", "rank1", "child0", "child1"}) {
    pids.push_back(run.wait_for_number(name));
  }
  // The watchdog starts after the last rank; give it the moment it needs.
  absl::SleepFor(absl::Milliseconds(200));
  ::kill(run.pid(), SIGKILL);
  EXPECT_EQ(run.wait(), -SIGKILL);
  for (int pid : pids) EXPECT_TRUE(gone_soon(pid)) << pid;
}

TEST(LaunchTest, WhatRanksLeaveBehindIsEnded) {
  Launched run(shell(2, "sleep 600 & echo $! >$SCRATCH/child$RANK; exit $RANK"));
  EXPECT_EQ(run.wait(), 1);
  EXPECT_TRUE(gone_soon(run.wait_for_number("child0")));
  EXPECT_TRUE(gone_soon(run.wait_for_number("child1")));
}

TEST(LaunchTest, ClosedOutputEndsTheRanks) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::dup2(ends[1], STDOUT_FILENO);
    ::close(ends[0]);
    ::close(ends[1]);
    ::execl("tools/launch/launch", "launch", "-n", "2", "--", "yes", nullptr);
    ::_exit(99);
  }
  ::close(ends[1]);
  char byte;
  EXPECT_EQ(::read(ends[0], &byte, 1), 1);
  ::close(ends[0]);
  int status = 0;
  ASSERT_EQ(::waitpid(pid, &status, 0), pid);
  EXPECT_EQ(WEXITSTATUS(status), 128 + SIGPIPE);
}

TEST(LaunchTest, ProgramNotFound) {
  Launched run({"-n", "3", "--", "no-such-program-anywhere"});
  EXPECT_EQ(run.wait(), 127);
  EXPECT_EQ(run.err(), "cannot start no-such-program-anywhere: No such file or directory\n");
}

TEST(LaunchTest, ProgramNotExecutable) {
  Launched run({"-n", "3", "--", "/etc/passwd"});
  EXPECT_EQ(run.wait(), 126);
  EXPECT_EQ(run.err(), "cannot start /etc/passwd: Permission denied\n");
}

// Of a pipe that nobody reads. The ranks have written all that it takes when the first number comes.
TEST(LaunchTest, SignalsAndDeadlinesCountWhileTheOutputStalls) {
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const std::string script =
      "trap 'echo 1 >$SCRATCH/told$RANK; exit' TERM; yes & echo $$ >$SCRATCH/pid$RANK; wait";
  Launched run(shell(2, script, {"--grace=1"}), kProgram, ends[1]);
  run.wait_for_number("pid0");
  run.wait_for_number("pid1");
  absl::SleepFor(absl::Seconds(1));
  ::kill(run.pid(), SIGTERM);
  EXPECT_EQ(run.wait_for_number("told0"), 1);
  EXPECT_EQ(run.wait_for_number("told1"), 1);
  EXPECT_EQ(run.wait(), 128 + SIGTERM);

  Launched failing(shell(2,
                         "yes & [ $RANK = 0 ] && echo $$ >$SCRATCH/pid0 && wait;"
                         "until [ -s $SCRATCH/pid0 ]; do sleep 0.01; done; exit 3",
                         {"--notice=0", "--grace=1"}),
                   kProgram, ends[1]);
  EXPECT_TRUE(gone_soon(failing.wait_for_number("pid0")));
  ::close(ends[1]);
  std::thread reader([&] {
    char buffer[1 << 16];
    while (::read(ends[0], buffer, sizeof(buffer)) > 0) {
    }
  });
  EXPECT_EQ(failing.wait(), 3);  // all was written that its ranks had to say
  reader.join();
  ::close(ends[0]);
}

TEST(LaunchTest, RefusesBadNumbersOfRanks) {
  for (const char* n : {"0", "-3", "5000"}) {
    Launched run({absl::StrCat("--n=", n), "--", "true"});
    EXPECT_EQ(run.wait(), 2);
    EXPECT_EQ(run.err(), absl::StrCat("launch: ", n, " ranks: wanted 1 to 4096\n"));
  }
  Launched run({"-n", "four", "--", "true"});
  EXPECT_NE(run.wait(), 0);
  EXPECT_THAT(run.err(), HasSubstr("four"));
}

// Under whatever name it is installed.
TEST(LaunchTest, HelpShowsTheFlags) {
  Launched run({"--help"}, "shardweave-launch");
  EXPECT_LE(run.wait(), 1);  // Abseil's number for it
  EXPECT_THAT(
      run.out(),
      AllOf(HasSubstr("launch -n 4 -- ./train"), HasSubstr("--n (number of ranks); default: 1;"),
            HasSubstr("--prefix ("), HasSubstr("default: true;"), HasSubstr("--json ("),
            HasSubstr("--notice ("), HasSubstr("default: 2;"), HasSubstr("--grace (")));
  EXPECT_THAT(run.out(), Not(HasSubstr("No flags matched")));
  EXPECT_THAT(run.out(), Not(HasSubstr("--flagfile")));
}

TEST(LaunchTest, RefusesAnEmptyCommand) {
  Launched run({"-n", "2"});
  EXPECT_EQ(run.wait(), 2);
  EXPECT_EQ(run.err(), "launch: no program given\n");
}

TEST(LaunchTest, JsonSummary) {
  Launched run(shell(2, "[ $RANK = 0 ] || exit 4; exec sleep 600", {"--json", "--notice=0"}));
  EXPECT_EQ(run.wait(), 4);
  const auto summary = nlohmann::json::parse(run.lines().back());
  EXPECT_EQ(summary["ranks"], 2);
  EXPECT_EQ(summary["exit_code"], 4);
  EXPECT_EQ(summary["first_failure"], 1);
  EXPECT_EQ(summary["interrupted_by"], 0);
  EXPECT_GE(summary["seconds"], 0.0);
  EXPECT_EQ(summary["results"][0]["signal"], SIGTERM);
  EXPECT_EQ(summary["results"][1]["exit_code"], 4);

  Launched good(shell(1, "true", {"--json"}));
  EXPECT_EQ(good.wait(), 0);
  EXPECT_TRUE(nlohmann::json::parse(good.lines().back())["first_failure"].is_null());
}

TEST(LauncherTest, AsALibrary) {
  absl::StatusOr<LaunchResult> result = launch({.num_ranks = 3, .command = {"true"}});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_TRUE(result->ok());
  EXPECT_EQ(result->exit_code(), 0);
  EXPECT_THAT(result->summary(), HasSubstr("all 3 ranks succeeded"));
  // Nothing is left to wait for, and the signal mask is as it was.
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);
  sigset_t mask;
  ::sigprocmask(SIG_BLOCK, nullptr, &mask);
  EXPECT_FALSE(::sigismember(&mask, SIGINT));

  EXPECT_EQ(launch({.num_ranks = 0, .command = {"true"}}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(launch({.num_ranks = 2, .command = {"/no/such"}}).status().code(),
            absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace shardweave
