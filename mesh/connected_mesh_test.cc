#include "shardweave/mesh/connected_mesh.h"

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/comm/gloo/gloo_backend.h"
#include "shardweave/comm/store/in_process_store.h"

namespace shardweave {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// The sum of what the group's ranks give: shows that the communicator really reaches them.
int64_t sum_over(Communicator& comm, int64_t mine) {
  int64_t sum = mine;
  const absl::Status status =
      comm.all_reduce(Buffer::of(&sum, 1), Buffer::of(&sum, 1), ReduceOp::kSum).wait();
  EXPECT_TRUE(status.ok()) << status;
  return sum;
}

void run(int ranks, const std::function<void(World&)>& body) {
  const absl::Status status = run_ranks(ranks, [&](World& world) {
    body(world);
    return absl::OkStatus();
  });
  ASSERT_TRUE(status.ok()) << status;
}

std::string message(const absl::Status& status) {
  return std::string(status.message());
}

TEST(ConnectedMeshTest, CommunicatorsFollowTheDimensions) {
  run(6, [](World& world) {
    auto mesh = init_device_mesh(world, {{"dp", 2}, {"tp", 3}}).value();
    EXPECT_EQ(mesh->rank().value, world.rank());
    EXPECT_THAT(mesh->coordinate(), ElementsAre(world.rank() / 3, world.rank() % 3));
    for (int dim = 0; dim < 2; ++dim) {
      auto comm = mesh->communicator(dim).value();
      EXPECT_EQ(comm->size(), mesh->mesh().size(dim));
      EXPECT_EQ(comm->rank(), mesh->coordinate()[dim]);
      EXPECT_EQ(comm->world_ranks(), mesh->mesh().group(dim, mesh->rank()).value());
      EXPECT_EQ(comm->name(), mesh->mesh().name(dim));
      int64_t expected = 0;
      for (int64_t rank : comm->world_ranks()) expected += 1 << rank;
      EXPECT_EQ(sum_over(*comm, 1 << world.rank()), expected);
    }
  });
}

TEST(ConnectedMeshTest, MakesEachCommunicatorOnce) {
  run(4, [](World& world) {
    auto mesh = init_device_mesh(world, {{"dp", 2}, {"tp", 2}}).value();
    auto tp = mesh->communicator(1).value();
    EXPECT_EQ(mesh->communicator(1).value(), tp);
    EXPECT_EQ(mesh->communicator({1}).value(), tp);
    EXPECT_NE(mesh->communicator(0).value(), tp);
    EXPECT_EQ(mesh->slice({"tp"}).value()->communicator(0).value(), tp);
  });
}

TEST(ConnectedMeshTest, SeveralDimensionsAreRowMajorInTheOrderGiven) {
  run(4, [](World& world) {
    auto mesh = init_device_mesh(world, {{"dp", 2}, {"tp", 2}}).value();
    auto straight = mesh->communicator({0, 1}).value();
    EXPECT_THAT(straight->world_ranks(), ElementsAre(0, 1, 2, 3));
    auto turned = mesh->communicator({1, 0}).value();
    EXPECT_THAT(turned->world_ranks(), ElementsAre(0, 2, 1, 3));
    EXPECT_EQ(turned->name(), "tp_dp");
    EXPECT_EQ(sum_over(*straight, 1), 4);
    EXPECT_EQ(sum_over(*turned, 1), 4);
  });
}

TEST(ConnectedMeshTest, DimensionsOfSizeOneHaveCommunicatorsOfTheirOwn) {
  run(2, [](World& world) {
    auto mesh = init_device_mesh(world, {{"pp", 1}, {"dp", 2}, {"tp", 1}}).value();
    ASSERT_TRUE(mesh->connect().ok());
    auto pp = mesh->communicator(0).value();
    auto tp = mesh->communicator(2).value();
    EXPECT_EQ(pp->size(), 1);
    EXPECT_EQ(sum_over(*pp, 5 + world.rank()), 5 + world.rank());
    EXPECT_EQ(pp->name(), "pp");
    EXPECT_EQ(tp->name(), "tp");
    EXPECT_EQ(sum_over(*mesh->communicator(1).value(), 1), 2);
  });
}

TEST(ConnectedMeshTest, OneRankIsAWorld) {
  run(1, [](World& world) {
    auto mesh = init_device_mesh(world, {{"tp", 1}}).value();
    EXPECT_EQ(sum_over(*mesh->communicator(0).value(), 7), 7);
  });
}

// Stages use their dimensions in different orders; connect() made the communicators before.
TEST(ConnectedMeshTest, ConnectLetsRanksUseDimensionsInAnyOrder) {
  run(8, [](World& world) {
    auto mesh = init_device_mesh(world, {{"pp", 2}, {"dp", 2}, {"tp", 2}}).value();
    ASSERT_TRUE(mesh->connect().ok());
    for (int i = 0; i < 3; ++i) {
      const int dim = (i + world.rank()) % 3;
      EXPECT_EQ(mesh->communicator(dim).value()->size(), 2);
    }
    EXPECT_EQ(sum_over(*mesh->communicator(0).value(), 1), 2);
  });
}

TEST(ConnectedMeshTest, MeshOfSomeRanks) {
  run(4, [](World& world) {
    const DeviceMesh odd = DeviceMesh::from_ranks({{"x", 2}}, {3, 1}).value();
    auto mesh = ConnectedMesh::create(odd, world.comm());
    if (world.rank() % 2 == 0) {
      EXPECT_EQ(mesh.status().code(), absl::StatusCode::kNotFound);
      EXPECT_THAT(message(mesh.status()),
                  HasSubstr(absl::StrCat("rank ", world.rank(), " is not")));
    } else {
      auto comm = (*mesh)->communicator(0).value();
      EXPECT_EQ(comm->rank(), world.rank() == 3 ? 0 : 1);
      EXPECT_EQ(sum_over(*comm, world.rank()), 4);
    }
  });
}

TEST(ConnectedMeshTest, SliceKeepsThisRank) {
  run(8, [](World& world) {
    auto mesh = init_device_mesh(world, {{"pp", 2}, {"dp", 2}, {"tp", 2}}).value();
    auto inner = mesh->slice({"tp", "pp"}).value();
    EXPECT_TRUE(inner->mesh().contains(inner->rank()));
    EXPECT_THAT(inner->coordinate(), ElementsAre(world.rank() % 2, world.rank() / 4));
    auto both = inner->communicator({0, 1}).value();
    EXPECT_EQ(both->size(), 4);
    EXPECT_EQ(mesh->communicator({2, 0}).value(), both);
    EXPECT_EQ(inner->slice({"dp"}).status().code(), absl::StatusCode::kNotFound);
  });
}

TEST(ConnectedMeshTest, ThreadsOfARankShareIt) {
  run(2, [](World& world) {
    auto mesh = init_device_mesh(world, {{"dp", 2}}).value();
    std::vector<std::shared_ptr<Communicator>> seen(4);
    std::vector<std::thread> threads;
    for (auto& comm : seen) threads.emplace_back([&] { comm = mesh->communicator(0).value(); });
    for (std::thread& thread : threads) thread.join();
    for (const auto& comm : seen) EXPECT_EQ(comm, seen[0]);
  });
}

// Gloo makes a group with its other rank. Who waits for one does not hold up who makes another.
TEST(ConnectedMeshTest, GroupsAreMadeSideBySide) {
  const std::shared_ptr<Store> store = make_in_process_store();
  const auto run_rank = [&](int rank) {
    auto backend =
        make_gloo_backend(store, {.name = "world", .rank = rank, .world_ranks = {0, 1}}).value();
    World world(Communicator::create(std::move(backend), {.timeout = absl::Seconds(3)}));
    // Each begins with another of the two.
    auto first = init_device_mesh(world, {{rank == 0 ? "a" : "b", 2}}).value();
    auto second = init_device_mesh(world, {{rank == 0 ? "b" : "a", 2}}).value();
    absl::Status other;
    std::thread thread([&] { other = first->communicator(0).status(); });
    std::this_thread::sleep_for(std::chrono::milliseconds(100));  // it waits
    const absl::Status status = second->communicator(0).status();
    thread.join();
    EXPECT_TRUE(other.ok()) << other;
    EXPECT_TRUE(status.ok()) << status;
  };
  std::thread one([&] { run_rank(1); });
  run_rank(0);
  one.join();
}

TEST(ConnectedMeshTest, ManyGroupsAreMadeAtOnce) {
  run(2, [](World& world) {
    constexpr int kGroups = 40;
    std::vector<std::shared_ptr<ConnectedMesh>> meshes;
    for (int i = 0; i < kGroups; ++i) {
      meshes.push_back(init_device_mesh(world, {{absl::StrCat("d", i), 2}}).value());
    }
    std::vector<std::shared_ptr<Communicator>> made(kGroups);
    std::vector<std::thread> threads;
    for (int i = 0; i < kGroups; ++i) {  // the ranks in other orders
      const auto g = static_cast<size_t>(world.rank() == 0 ? i : kGroups - 1 - i);
      threads.emplace_back([&, g] { made[g] = meshes[g]->communicator(0).value(); });
    }
    for (std::thread& thread : threads) thread.join();
    for (const auto& comm : made) {
      int64_t sum = 1;
      const Buffer buffer = Buffer::of(&sum, 1);
      EXPECT_TRUE(comm->all_reduce(buffer, buffer, ReduceOp::kSum).wait().ok());
      EXPECT_EQ(sum, 2);
    }
  });
}

TEST(ConnectedMeshTest, MeshAndWorldMustAgree) {
  run(2, [](World& world) {
    const absl::Status status = init_device_mesh(world, {{"dp", 2}, {"tp", 4}}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(message(status), HasSubstr("DeviceMesh(dp=2, tp=4) has 8 ranks, the world has 2"));
    EXPECT_EQ(init_device_mesh(world, {{"dp", 1}}).status().code(),
              absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(message(init_device_mesh(world, {{"dp", 0}}).status()), HasSubstr("size 0"));

    const absl::Status outside =
        ConnectedMesh::create(DeviceMesh::from_ranks({{"x", 2}}, {0, 7}).value(), world.comm())
            .status();
    EXPECT_EQ(outside.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(message(outside), HasSubstr("has rank 7, the world only 2 ranks"));
  });
}

TEST(ConnectedMeshTest, RefusesAGroupThatIsNotTheWorld) {
  run(2, [](World& world) {
    auto turned = world.comm()->subgroup({1, 0}, "turned").value();
    const absl::Status status =
        ConnectedMesh::create(DeviceMesh::create({{"x", 2}}).value(), turned).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(message(status), HasSubstr("\"turned\" is not the world: its rank 0 is rank 1"));
  });
}

TEST(ConnectedMeshTest, RefusesBadDimensions) {
  run(1, [](World& world) {
    auto mesh = init_device_mesh(world, {{"x", 1}, {"y", 1}}).value();
    for (const absl::Status& status :
         {mesh->communicator(2).status(), mesh->communicator(-1).status(),
          mesh->communicator({0, 5}).status()}) {
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(message(status), HasSubstr("wanted 0 to 1"));
    }
    EXPECT_THAT(message(mesh->communicator({1, 1}).status()), HasSubstr("named \"y\""));
    EXPECT_THAT(message(mesh->communicator(absl::Span<const int>()).status()),
                HasSubstr("at least one dimension"));
  });
}

TEST(ConnectedMeshTest, ABrokenWorldPassesOnItsError) {
  run(2, [](World& world) {
    auto mesh = init_device_mesh(world, {{"dp", 2}}).value();
    world.comm()->abort(absl::AbortedError("out of patience"));
    const absl::Status status = mesh->communicator(0).status();
    EXPECT_FALSE(status.ok());
    EXPECT_THAT(message(status), HasSubstr("out of patience"));
  });
}

TEST(ConnectedMeshTest, ExtensionIsMadeOnceAndEndsWithTheMesh) {
  std::weak_ptr<void> extension;
  run(1, [&](World& world) {
    auto mesh = init_device_mesh(world, {{"x", 1}}).value();
    int made = 0;
    auto make = [&](ConnectedMesh& me) -> std::shared_ptr<void> {
      EXPECT_EQ(&me, mesh.get());
      return std::make_shared<int>(++made);
    };
    extension = mesh->extension(make);
    EXPECT_EQ(mesh->extension(make), extension.lock());
    EXPECT_EQ(made, 1);
    // One that is made again is the same, with all that is kept for it.
    mesh.reset();
    mesh = init_device_mesh(world, {{"x", 1}}).value();
    EXPECT_EQ(mesh->extension(make), extension.lock());
    EXPECT_EQ(made, 1);
  });
  EXPECT_TRUE(extension.expired());

  run(1, [&](World& world) {
    auto alone =
        ConnectedMesh::create(DeviceMesh::create({{"x", 1}}).value(), world.comm()).value();
    extension = alone->extension([](ConnectedMesh&) { return std::make_shared<int>(1); });
    alone.reset();
    EXPECT_TRUE(extension.expired());
  });
}

TEST(ConnectedMeshTest, EqualMeshesAreOne) {
  run(4, [](World& world) {
    auto mesh = init_device_mesh(world, {{"dp", 2}, {"tp", 2}}).value();
    EXPECT_EQ(init_device_mesh(world, {{"dp", 2}, {"tp", 2}}).value(), mesh);
    EXPECT_NE(init_device_mesh(world, {{"pp", 2}, {"tp", 2}}).value(), mesh);
    EXPECT_NE(init_device_mesh(world, {{"dp", 4}, {"tp", 1}}).value(), mesh);
    EXPECT_NE(init_device_mesh(world, {{"tp", 2}, {"dp", 2}}).value(), mesh);
    // Also after all handles were dropped: ranks that drop theirs at different times agree.
    ConnectedMesh* const before = mesh.get();
    auto comm = mesh->communicator(1).value();
    mesh.reset();
    mesh = init_device_mesh(world, {{"dp", 2}, {"tp", 2}}).value();
    EXPECT_EQ(mesh.get(), before);
    EXPECT_EQ(mesh->communicator(1).value(), comm);
  });
}

TEST(ConnectedMeshTest, EqualSlicesAreOne) {
  run(4, [](World& world) {
    auto mesh = init_device_mesh(world, {{"dp", 2}, {"tp", 2}}).value();
    auto tp = mesh->slice({"tp"}).value();
    EXPECT_EQ(mesh->slice({"tp"}).value(), tp);
    EXPECT_EQ(tp->slice({"tp"}).value(), tp);
    EXPECT_NE(mesh->slice({"dp"}).value(), tp);
    EXPECT_EQ(mesh->slice({"dp", "tp"}).value(), mesh);
    // Of another mesh with the same ranks under that name.
    auto other = init_device_mesh(world, {{"pp", 2}, {"tp", 2}}).value();
    EXPECT_EQ(other->slice({"tp"}).value(), tp);
    EXPECT_EQ(other->communicator(1).value(), mesh->communicator(1).value());
    EXPECT_EQ(sum_over(*tp->communicator(0).value(), 1), 2);
    // A slice stands alone.
    const std::weak_ptr<ConnectedMesh> root = mesh;
    mesh.reset();
    other.reset();
    EXPECT_EQ(tp->slice({"tp"}).value(), tp);
    EXPECT_EQ(sum_over(*tp->communicator(0).value(), 3), 6);
  });
}

// Ranks drop their meshes when their garbage collectors come by; who makes one again must find the
// others, whatever they have kept.
TEST(ConnectedMeshTest, RanksThatKeepDifferentHandlesAgree) {
  run(2, [](World& world) {
    auto mesh = init_device_mesh(world, {{"dp", 2}}).value();
    EXPECT_EQ(sum_over(*mesh->communicator(0).value(), 1), 2);
    if (world.rank() == 0) mesh.reset();
    auto again = init_device_mesh(world, {{"dp", 2}}).value();
    EXPECT_EQ(sum_over(*again->communicator(0).value(), 1), 2);
  });
}

TEST(ConnectedMeshTest, WorldsHaveMeshesOfTheirOwn) {
  run(1, [](World& world) {
    auto mesh = init_device_mesh(world, {{"x", 1}}).value();
    World other(world.comm()->subgroup({0}, "other").value());
    EXPECT_NE(init_device_mesh(other, {{"x", 1}}).value(), mesh);
  });
}

// A mesh whose group has failed is not handed out again.
TEST(ConnectedMeshTest, ABrokenMeshIsMadeAnew) {
  run(2, [](World& world) {
    auto mesh = init_device_mesh(world, {{"dp", 2}}).value();
    auto comm = mesh->communicator(0).value();
    EXPECT_EQ(sum_over(*comm, 1), 2);
    EXPECT_TRUE(world.comm()->barrier().wait().ok());
    comm->abort(absl::AbortedError("out of patience"));
    EXPECT_TRUE(world.comm()->barrier().wait().ok());
    auto again = init_device_mesh(world, {{"dp", 2}}).value();
    EXPECT_NE(again, mesh);
    EXPECT_EQ(sum_over(*again->communicator(0).value(), 1), 2);
    EXPECT_EQ(init_device_mesh(world, {{"dp", 2}}).value(), again);
    // The old one stays what it was.
    EXPECT_FALSE(mesh->communicator(0).value()->health().ok());
    EXPECT_EQ(mesh->slice({"dp"}).value(), mesh);
  });
}

TEST(ConnectedMeshTest, MeshesOutliveTheWorldAndEachOther) {
  std::shared_ptr<ConnectedMesh> kept;
  run(1, [&](World& world) {
    auto mesh = init_device_mesh(world, {{"x", 1}, {"y", 1}}).value();
    kept = mesh->slice({"y"}).value();
  });
  EXPECT_EQ(kept->mesh().to_string(), "DeviceMesh(y=1)");
  EXPECT_TRUE(kept->slice({"y"}).ok());
}

}  // namespace
}  // namespace shardweave
