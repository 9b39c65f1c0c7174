// The number of heap allocations does not grow with the number of collectives.
#include <sys/socket.h>

#include <functional>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "shardweave/comm/gloo/engine.h"
#include "shardweave/comm/testing/allocation_counter.h"

namespace shardweave::gloo_internal {
namespace {

TEST(GlooAllocationTest, NoneInTheSteadyState) {
  int fds[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fds), 0);
  int64_t growth[2] = {-1, -1};
  const auto run = [&](int rank) {
    const GroupInfo group{.name = "pair", .rank = rank, .world_ranks = {0, 1}};
    std::vector<Channel> channels(2);
    channels[1 - rank].data = UniqueFd(fds[rank]);
    Engine engine(group, std::move(channels));
    std::vector<float> small(100, 1.0f), large(300'000, 1.0f), out(200);
    uint64_t sequence = 0;
    const auto call = [&](Call each) {
      each.sequence = ++sequence;
      each.tag = "a tag that is longer than a short string";
      const absl::StatusOr<Backend::Ticket> ticket = engine.start(each);
      ASSERT_TRUE(ticket.ok());
      ASSERT_TRUE(engine.wait(*ticket, Deadline::max()).ok());
    };
    const auto step = [&] {
      for (std::vector<float>* data : {&small, &large}) {
        const Buffer buffer = Buffer::of(data->data(), data->size());
        call({.op = OpKind::kAllReduce, .in = buffer, .out = buffer, .reduce_op = ReduceOp::kMax});
      }
      call({.op = OpKind::kAllGather,
            .in = Buffer::of(small.data(), 100),
            .out = Buffer::of(out.data(), 200)});
      call({.op = OpKind::kBarrier});
    };
    for (int i = 0; i < 20; ++i) step();
    const int64_t before = allocations_so_far();
    for (int i = 0; i < 200; ++i) step();
    growth[rank] = allocations_so_far() - before;
    step();  // the other rank has taken its number, too
  };
  std::thread one([&] { run(1); });
  run(0);
  one.join();
  // Of both ranks in 1600 operations: a queue that first gets longer, a helper's thread.
  EXPECT_LE(growth[0], 20);
  EXPECT_LE(growth[1], 20);
}

}  // namespace
}  // namespace shardweave::gloo_internal
