// All checks on the GPUs of the fake, and what they say where something is wrong with one. Times
// mean nothing here.
#include "gpu_check.h"

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "ATen/ATen.h"
#include "ATen/Parallel.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "shardweave/comm/environment/join_world.h"
#include "shardweave/comm/nccl/testing/fake_gpu.h"
#include "shardweave/comm/store/in_process_store.h"
#include "shardweave/dtensor/testing/fake_cuda.h"
#include "torch/library.h"

namespace shardweave_tool {
namespace {

using namespace shardweave;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

// A kernel of the device that is wrong when a test wants it so.
std::atomic<bool> silu_is_wrong{false};
at::Tensor silu(const at::Tensor& x) {
  return silu_is_wrong ? x + 1 : x * at::sigmoid(x);
}
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("silu", &silu);
}

const GpuCheckSizes kTiny = {.block_dim = 16,
                             .block_heads = 2,
                             .block_batch = 1,
                             .block_length = 4,
                             .block_repeats = 2,
                             .memory_dim = 16,
                             .memory_layers = 2,
                             .dispatch_batches = 1,
                             .dispatch_calls = 3,
                             .captured_dim = 16,
                             .captured_rounds = 1,
                             .bandwidth_bytes = 4096};

class GpuCheckTest : public ::testing::Test {
 protected:
  void SetUp() override { use(fake_libraries()); }
  void TearDown() override { use({}); }

  static void use(const NcclLibraries& libraries) {
    ::setenv("SHARDWEAVE_NCCL_LIBRARY", libraries.nccl.c_str(), 1);
    ::setenv("SHARDWEAVE_CUDART_LIBRARY", libraries.runtime.c_str(), 1);
    ::setenv("SHARDWEAVE_CUDA_DRIVER_LIBRARY", libraries.driver.c_str(), 1);
  }

  // The report of each rank; a rank is a thread with a GPU of its own.
  static std::vector<GpuReport> check(int ranks, const std::vector<std::string>& only = {},
                                      const FakeGpuScript& script = {},
                                      const std::string& backend = "nccl") {
    fake_gpu_of_tests().reset(script);
    const std::shared_ptr<Store> store = make_in_process_store();
    std::vector<GpuReport> reports(ranks);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; ++rank) {
      threads.emplace_back([&, rank] {
        at::set_num_threads(1);
        GpuCheckOptions options = {
            .sizes = kTiny, .only = only, .backend = backend, .device = rank};
        options.directory = ::testing::TempDir();
        options.join = [&] {
          RendezvousInfo info;
          info.rank = rank;
          info.world_size = ranks;
          info.meeting_point.file = "not used: the store is given";
          return join_world(store, info,
                            {.backend = backend, .timeout = absl::Seconds(60), .device = rank});
        };
        absl::StatusOr<GpuReport> report = gpu_check(options);
        fake_gpu_of_tests().synchronize(rank, {});
        ASSERT_TRUE(report.ok()) << report.status();
        reports[rank] = *std::move(report);
      });
    }
    for (std::thread& thread : threads) thread.join();
    return reports;
  }

  // All have passed but those.
  static void expect_passed(const std::vector<GpuReport>& reports,
                            const std::set<std::string>& skipped) {
    for (const GpuReport& report : reports) {
      EXPECT_FALSE(report.checks.empty());
      for (const CheckResult& check : report.checks) {
        EXPECT_EQ(to_string(check.outcome), skipped.contains(check.name) ? "skipped" : "passed")
            << "rank " << report.rank << ", " << check.name << ": " << check.why;
        EXPECT_THAT(check.why, Not(IsEmpty())) << check.name;
      }
    }
    if (::testing::Test::HasFailure() && !reports.empty()) ADD_FAILURE() << to_text(reports[0]);
  }
};

TEST_F(GpuCheckTest, OneRank) {
  const std::vector<GpuReport> reports = check(1);
  expect_passed(reports, {"bandwidth", "operators", "memory"});
  EXPECT_EQ(reports[0].checks.size(), checks_of_gpu_check().size());
  EXPECT_THAT(reports[0].find("operators")->why, HasSubstr("one rank"));
  EXPECT_THAT(reports[0].find("memory")->why, HasSubstr("statistics"));
  EXPECT_THAT(to_text(reports[0]),
              AllOf(HasSubstr("13 passed, 0 failed, 3 skipped"), HasSubstr("NCCL 2.28.9")));
  EXPECT_FALSE(reports[0].find("block")->figures.empty());
  const nlohmann::json json = nlohmann::json::parse(to_json(reports[0]));
  EXPECT_EQ(json["ok"], true);
  EXPECT_EQ(json["checks"].size(), reports[0].checks.size());
}

TEST_F(GpuCheckTest, TwoRanks) {
  const std::vector<GpuReport> reports = check(2);
  expect_passed(reports, {"memory"});
  EXPECT_EQ(reports[0].rank, 0);
  EXPECT_EQ(reports[1].rank, 1);
  EXPECT_EQ(reports[1].ranks, 2);
  EXPECT_EQ(reports[0].find("bandwidth")->figures.size(), 3);
}

// Meshes of two dimensions, and parts that differ.
TEST_F(GpuCheckTest, FourRanks) {
  const std::vector<GpuReport> reports =
      check(4, {"collectives", "redistribution", "training", "captured steps", "checkpoint"});
  expect_passed(reports, {});
  EXPECT_EQ(reports[0].checks.size(), 7);
  EXPECT_THAT(reports[0].find("redistribution")->why, HasSubstr("2 meshes"));
  EXPECT_THAT(reports[0].find("training")->why, Not(HasSubstr("tp in fsdp")));
}

// Ranks that may share a GPU; here they have one each, for they are threads.
TEST_F(GpuCheckTest, ByWayOfTheHost) {
  const std::vector<GpuReport> reports =
      check(2, {"collectives", "streams", "operators", "redistribution", "training", "checkpoint"},
            {}, "gloo");
  expect_passed(reports, {});
  EXPECT_EQ(reports[0].checks.size(), 8);
}

TEST_F(GpuCheckTest, FindsAKernelThatIsWrong) {
  silu_is_wrong = true;
  const std::vector<GpuReport> reports = check(1, {"operators alone", "random numbers"});
  silu_is_wrong = false;
  EXPECT_TRUE(reports[0].failed());
  const CheckResult& operators = *reports[0].find("operators alone");
  EXPECT_EQ(operators.outcome, Outcome::kFailed);
  EXPECT_THAT(operators.why, AllOf(HasSubstr("silu, relu, sigmoid Float [R]: result 0 is off by"),
                                   Not(HasSubstr("result 1")), Not(HasSubstr("gelu"))));
  EXPECT_EQ(reports[0].find("random numbers")->outcome, Outcome::kPassed);
  EXPECT_THAT(to_json(reports[0]), HasSubstr("\"ok\":false"));
}

// All ranks say so, and the process lives.
TEST_F(GpuCheckTest, AnOperationThatBreaks) {
  const std::vector<GpuReport> reports =
      check(2, {"collectives", "training"}, {.faulty_device = 1, .broken_operation = 5});
  for (const GpuReport& report : reports) {
    EXPECT_TRUE(report.failed());
    const CheckResult& collectives = *report.find("collectives");
    EXPECT_EQ(collectives.outcome, Outcome::kFailed);
    EXPECT_THAT(collectives.why, AnyOf(HasSubstr("NCCL"), HasSubstr("nccl")));
    const CheckResult& training = *report.find("training");
    EXPECT_EQ(training.outcome, Outcome::kSkipped) << training.why;
    EXPECT_THAT(training.why, HasSubstr("\"collectives\""));
  }
  expect_passed(check(2, {"collectives"}), {});
}

TEST_F(GpuCheckTest, NcclIsTooOld) {
  const std::vector<GpuReport> reports = check(2, {}, {.nccl_version = 21805});
  for (const GpuReport& report : reports) {
    EXPECT_TRUE(report.failed());
    EXPECT_EQ(report.find("machine")->outcome, Outcome::kPassed);
    EXPECT_EQ(report.find("join")->outcome, Outcome::kFailed);
    EXPECT_THAT(report.find("join")->why, HasSubstr("NCCL is too old"));
    for (const CheckResult& check : report.checks) {
      if (check.name == "machine" || check.name == "join") continue;
      EXPECT_EQ(check.outcome, Outcome::kSkipped) << check.name;
      EXPECT_THAT(check.why, HasSubstr("have not joined"));
    }
  }
}

TEST_F(GpuCheckTest, ACheckThatThereIsNot) {
  const absl::StatusOr<GpuReport> report = gpu_check({.only = {"nothing"}});
  EXPECT_EQ(report.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(report.status().message()), HasSubstr("there is no check \"nothing\""));
}

TEST(GpuReportTest, SaysWhatMissesItsTarget) {
  GpuReport report = {.ranks = 8};
  report.checks.push_back({.name = "speed",
                           .why = "it \xff runs",
                           .figures = {{"slow", 2, "us", 1}, {"fast", 0.5, "us", 1}, {"odd", NAN}},
                           .facts = {{"clock", "the device's"}}});
  EXPECT_TRUE(report.checks[0].figures[0].misses_target());
  EXPECT_FALSE(report.checks[0].figures[1].misses_target());
  EXPECT_FALSE(report.failed());
  EXPECT_THAT(to_text(report), AllOf(HasSubstr("at most 1: missed"), HasSubstr("8 ranks: 1 passed"),
                                     HasSubstr("the device's")));
  const nlohmann::json json = nlohmann::json::parse(to_json(report));
  EXPECT_EQ(json["checks"][0]["figures"][0]["at_most"], 1);
  EXPECT_TRUE(json["checks"][0]["figures"][2]["value"].is_null());
  EXPECT_FALSE(json["checks"][0]["figures"][2].contains("at_most"));
  EXPECT_EQ(json["checks"][0]["facts"]["clock"], "the device's");
}

}  // namespace
}  // namespace shardweave_tool
