#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "shardweave/comm/gloo/gloo_backend.h"
#include "shardweave/comm/store/in_process_store.h"
#include "shardweave/comm/testing/conformance.h"

namespace shardweave {
namespace {

GroupInfo world(int rank, int size) {
  GroupInfo group{.name = "world", .rank = rank, .world_ranks = std::vector<int64_t>(size)};
  std::iota(group.world_ranks.begin(), group.world_ranks.end(), 0);
  return group;
}

ConformanceBackend gloo_threads() {
  return {"Gloo", [](int num_ranks, const CommunicatorOptions& options) {
            std::shared_ptr<Store> store = make_in_process_store();
            return [=](int rank) -> absl::StatusOr<std::shared_ptr<Communicator>> {
              auto backend = make_gloo_backend(store, world(rank, num_ranks));
              if (!backend.ok()) return backend.status();
              return Communicator::create(*std::move(backend), options);
            };
          }};
}

SHARDWEAVE_COMM_CONFORMANCE(Gloo, gloo_threads());

TEST(GlooBackendTest, WhoeverWaitsLongSaysForWhom) {
  expect_late_ranks_are_named(gloo_threads());
}

TEST(GlooBackendTest, RanksOfOneProcessAreThreads) {
  expect_ranks_are_threads(gloo_threads());
}

// Rank 1 leaves the group with rank 0 because of rank 2, which is the one to look at.
TEST(GlooBackendTest, WhoeverLeavesAfterAFailureSaysWhy) {
  const std::vector<absl::Status> results =
      run_on_threads(gloo_threads(), 3, [](const auto& comm) -> absl::Status {
        if (absl::Status status = comm->barrier().wait(); !status.ok()) return status;
        std::shared_ptr<Communicator> low, high;
        if (comm->rank() != 2) {
          auto group = comm->subgroup({0, 1}, "low");
          if (!group.ok()) return group.status();
          low = *group;
          if (absl::Status status = low->barrier().wait(); !status.ok()) return status;
        }
        if (comm->rank() != 0) {
          auto group = comm->subgroup({1, 2}, "high");
          if (!group.ok()) return group.status();
          high = *group;
          if (absl::Status status = high->barrier().wait(); !status.ok()) return status;
        }
        if (comm->rank() == 2) high->abort(absl::DataLossError("bad batch"));
        // Rank 1 drops its groups when it has failed.
        return (comm->rank() == 0 ? low : high)->barrier().wait();
      });
  EXPECT_EQ(results[1].code(), absl::StatusCode::kAborted) << results[1];
  EXPECT_EQ(results[0].code(), absl::StatusCode::kUnavailable) << results[0];
  for (const char* part :
       {"group 'low'", "rank 1 (world rank 1) has left the group, after a failure", "group 'high'",
        "bad batch"}) {
    EXPECT_NE(results[0].message().find(part), absl::string_view::npos)
        << "want '" << part << "' in: " << results[0];
  }
}

// Some ranks are still making the group when others have broken it: it is that group's failure alone.
TEST(GlooBackendTest, AGroupThatBreaksWhileItIsMadeDoesNotBreakItsParent) {
  const std::vector<absl::Status> results =
      run_on_threads(gloo_threads(), 4, [](const auto& comm) -> absl::Status {
        for (int round = 0; round < 20; ++round) {
          auto child = comm->split(0, comm->rank(), "child");
          if (!child.ok()) return child.status();
          if (comm->rank() == 0) {
            child->reset();
          } else {
            EXPECT_FALSE((*child)->barrier().wait().ok());
          }
          if (absl::Status status = comm->barrier().wait(); !status.ok()) return status;
        }
        return absl::OkStatus();
      });
  for (const absl::Status& status : results) EXPECT_TRUE(status.ok()) << status;
}

// Connects two ranks and runs a barrier; what each got.
std::vector<absl::Status> connect_two(Store& store, const GlooOptions& options) {
  std::vector<absl::Status> results(2);
  const std::shared_ptr<Store> borrowed(std::shared_ptr<Store>(), &store);
  const auto run = [&](int rank) -> absl::Status {
    auto backend = make_gloo_backend(borrowed, world(rank, 2), options);
    if (!backend.ok()) return backend.status();
    return Communicator::create(*std::move(backend))->barrier().wait();
  };
  std::thread one([&] { results[1] = run(1); });
  results[0] = run(0);
  one.join();
  return results;
}

TEST(GlooBackendTest, ANamedInterface) {
  for (const absl::Status& status : connect_two(*make_in_process_store(), {.interface = "lo"})) {
    EXPECT_TRUE(status.ok()) << status;
  }
}

TEST(GlooBackendTest, AnInterfaceThatIsNotThere) {
  for (const absl::Status& status :
       connect_two(*make_in_process_store(), {.interface = "abacus7"})) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_NE(status.message().find("no network interface 'abacus7'"), absl::string_view::npos);
    EXPECT_NE(status.message().find("connecting group 'world' (rank "), absl::string_view::npos);
  }
}

TEST(GlooBackendTest, LeavesNothingInTheStore) {
  const std::shared_ptr<Store> store = make_in_process_store();
  for (const absl::Status& status : connect_two(*store, {.prefix = "run 1"})) {
    EXPECT_TRUE(status.ok()) << status;
  }
  for (const char* key : {"host", "address", "secret"}) {
    for (const char* rank : {"0", "1"}) {
      EXPECT_FALSE(*store->check({std::string("run 1/") + key + "/" + rank})) << key << rank;
    }
  }
}

TEST(GlooBackendTest, TwoGroupsInOneStore) {
  const std::shared_ptr<Store> store = make_in_process_store();
  for (const char* prefix : {"a", "b"}) {
    for (const absl::Status& status : connect_two(*store, {.prefix = prefix})) {
      EXPECT_TRUE(status.ok()) << status;
    }
  }
}

TEST(GlooBackendTest, ARankThatDoesNotComeIsNamed) {
  const absl::Status status =
      make_gloo_backend(make_in_process_store(), world(1, 3), {.timeout = absl::Milliseconds(50)})
          .status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_NE(status.message().find("rank 0 (world rank 0), rank 2 (world rank 2) did not come"),
            absl::string_view::npos)
      << status;
}

TEST(GlooBackendTest, BadArguments) {
  EXPECT_EQ(make_gloo_backend(nullptr, world(0, 1)).status().code(),
            absl::StatusCode::kInvalidArgument);
  for (int rank : {-1, 2}) {
    const absl::Status status = make_gloo_backend(make_in_process_store(), world(rank, 2)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find(" of 2"), absl::string_view::npos) << status;
  }
}

}  // namespace
}  // namespace shardweave
