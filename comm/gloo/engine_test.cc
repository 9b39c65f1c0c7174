// The engine over plain socket pairs: what the conformance suite cannot bring about. Groups of two,
// and a rank whose other side the test plays by hand.
#include "shardweave/comm/gloo/engine.h"

#include <sys/socket.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <numeric>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "gtest/gtest.h"

namespace shardweave::gloo_internal {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

Deadline in(milliseconds time) {
  return Clock::now() + time;
}

std::pair<UniqueFd, UniqueFd> socket_pair() {
  int fds[2];
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds), 0);
  return {UniqueFd(fds[0]), UniqueFd(fds[1])};
}

GroupInfo group_of_two(int rank) {
  return {.name = "pair", .rank = rank, .world_ranks = {4, 7}};
}

// One rank of a group of two.
struct Rank {
  Rank(int rank, UniqueFd data, UniqueFd control = UniqueFd()) : group(group_of_two(rank)) {
    std::vector<Channel> channels(2);
    channels[1 - rank] = {std::move(data), std::move(control)};
    engine = std::make_unique<Engine>(group, std::move(channels));
  }
  absl::StatusOr<Backend::Ticket> all_reduce(std::vector<float>& data) {
    const Buffer buffer = Buffer::of(data.data(), data.size());
    return engine->start(
        {.op = OpKind::kAllReduce, .in = buffer, .out = buffer, .sequence = ++sequence});
  }
  absl::StatusOr<Backend::Ticket> send(std::vector<float>& data, int tag = 0) {
    return engine->start({.op = OpKind::kSend,
                          .in = Buffer::of(data.data(), data.size()),
                          .out = {.dtype = DType::kF32},
                          .peer = 1 - group.rank,
                          .message_tag = tag,
                          .sequence = ++sequence});
  }
  absl::StatusOr<Backend::Ticket> recv(std::vector<float>& data, int tag = 0) {
    return engine->start({.op = OpKind::kRecv,
                          .in = {nullptr, 0, DType::kF32},
                          .out = Buffer::of(data.data(), data.size()),
                          .peer = 1 - group.rank,
                          .message_tag = tag,
                          .sequence = ++sequence});
  }
  absl::Status wait(const absl::StatusOr<Backend::Ticket>& ticket,
                    Deadline deadline = in(milliseconds(20'000))) {
    return ticket.ok() ? engine->wait(*ticket, deadline) : ticket.status();
  }

  GroupInfo group;
  std::unique_ptr<Engine> engine;
  uint64_t sequence = 0;
};

struct Pair {
  explicit Pair(std::pair<UniqueFd, UniqueFd> data = socket_pair(),
                std::pair<UniqueFd, UniqueFd> control = socket_pair())
      : zero(0, std::move(data.first), std::move(control.first)),
        one(1, std::move(data.second), std::move(control.second)) {}
  Rank zero, one;
};

// Rank 0, with the other end of its connection.
struct Alone {
  explicit Alone(std::pair<UniqueFd, UniqueFd> sockets = socket_pair())
      : zero(0, std::move(sockets.first)), peer(std::move(sockets.second)) {}

  void say(const void* bytes, size_t count) {
    ASSERT_EQ(::send(peer.get(), bytes, count, MSG_NOSIGNAL), static_cast<ssize_t>(count));
  }
  Rank zero;
  UniqueFd peer;
};

FrameHeader all_reduce_header(int64_t count) {
  FrameHeader header{.length = count * 4};
  header.signature.op = OpKind::kAllReduce;
  header.signature.dtype = DType::kF32;
  header.signature.count = count;
  header.signature.sequence = 1;
  return header;
}

void expect_error(const absl::Status& status, absl::StatusCode code,
                  std::initializer_list<std::string> parts) {
  EXPECT_EQ(status.code(), code) << status;
  for (const std::string& part : parts) {
    EXPECT_TRUE(absl::StrContains(std::string(status.message()), part))
        << "want '" << part << "' in: " << status;
  }
}

TEST(EngineTest, GroupsProceedWhateverIsWaitedForFirst) {
  // An all_reduce of this size takes two steps: both ranks have to do something between them. Each
  // waits for the one that the other waits for last.
  Pair a, b;
  std::vector<float> data[4];
  for (auto& each : data) each.assign(300'000, 1.0f);
  const auto run = [](Rank& first, std::vector<float>& mine, Rank& second,
                      std::vector<float>& other) {
    const auto work = first.all_reduce(mine);
    const auto late = second.all_reduce(other);
    EXPECT_TRUE(second.wait(late).ok());
    EXPECT_TRUE(first.wait(work).ok());
  };
  std::thread thread([&] { run(a.zero, data[0], b.zero, data[1]); });
  run(b.one, data[2], a.one, data[3]);
  thread.join();
  for (const auto& each : data) EXPECT_EQ(each, std::vector<float>(each.size(), 2.0f));
}

TEST(EngineTest, WorkThatNobodyWaitsForProceeds) {
  Pair pair;
  std::vector<float> mine(2'000'000, 1.0f), theirs(2'000'000, 2.0f);
  const auto work = pair.zero.all_reduce(mine);
  ASSERT_TRUE(work.ok());
  ASSERT_TRUE(pair.one.wait(pair.one.all_reduce(theirs)).ok()) << "while rank 0 does other things";
  EXPECT_EQ(theirs[1'999'999], 3.0f);
  EXPECT_TRUE(pair.zero.wait(work).ok());
  EXPECT_EQ(mine[1'999'999], 3.0f);
}

TEST(EngineTest, ManyThreadsWaitAtOnce) {
  Pair pair;
  constexpr int kThreads = 8;
  std::vector<std::vector<float>> received(kThreads, std::vector<float>(50'000));
  std::vector<std::thread> threads;
  for (int tag = 0; tag < kThreads; ++tag) {
    const auto work = pair.zero.recv(received[tag], tag);
    threads.emplace_back([&pair, work, tag] {
      if (tag % 2 == 0) {
        while (!pair.zero.engine->done(*work)) std::this_thread::yield();
      }
      EXPECT_TRUE(pair.zero.wait(work).ok());
    });
  }
  std::vector<std::vector<float>> sent;
  for (int tag = 0; tag < kThreads; ++tag) sent.emplace_back(50'000, tag + 1.0f);
  std::vector<absl::StatusOr<Backend::Ticket>> works;
  for (int tag = kThreads; tag-- > 0;) works.push_back(pair.one.send(sent[tag], tag));
  for (const auto& work : works) EXPECT_TRUE(pair.one.wait(work).ok());
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(received, sent);
}

TEST(EngineTest, MessagesThatComeEarlyAreKept) {
  Pair pair;
  std::vector<float> large(1'000'000), small = {1, 2, 3}, sum = {5};
  std::iota(large.begin(), large.end(), 0.0f);
  const auto first = pair.zero.send(large, 1);
  const auto second = pair.zero.send(small, 2);
  const auto reduced = pair.zero.all_reduce(sum);
  std::thread thread([&] {
    EXPECT_TRUE(pair.zero.wait(reduced).ok());
    EXPECT_TRUE(pair.zero.wait(first).ok());
    EXPECT_TRUE(pair.zero.wait(second).ok());
  });
  pair.one.sequence = 2;
  std::vector<float> other = {6};
  EXPECT_TRUE(pair.one.wait(pair.one.all_reduce(other)).ok()) << "which is behind both";
  EXPECT_EQ(other[0], 11.0f);
  std::vector<float> got_small(3), got_large(1'000'000);
  EXPECT_TRUE(pair.one.wait(pair.one.recv(got_small, 2)).ok());
  EXPECT_TRUE(pair.one.wait(pair.one.recv(got_large, 1)).ok());
  thread.join();
  EXPECT_EQ(got_small, small);
  EXPECT_EQ(got_large, large);
}

TEST(EngineTest, MessagesOutliveTheirSender) {
  auto sockets = socket_pair();
  Rank one(1, std::move(sockets.second));
  std::vector<float> data = {1, 2, 3}, got(3), more(3);
  {
    Rank zero(0, std::move(sockets.first));
    ASSERT_TRUE(zero.send(data, 1).ok());
  }
  EXPECT_TRUE(one.wait(one.recv(got, 1)).ok());
  EXPECT_EQ(got, data);
  expect_error(one.wait(one.recv(more, 1)), absl::StatusCode::kUnavailable,
               {"recv(f32[3], from 0)", "rank 0 (world rank 4) has left the group"});
}

TEST(EngineTest, ASendThatNobodyTakesEndsAtItsDeadline) {
  Alone alone;
  std::vector<float> data(10'000'000);
  expect_error(alone.zero.wait(alone.zero.send(data, 3), in(milliseconds(50))),
               absl::StatusCode::kDeadlineExceeded,
               {"send(f32[10000000], to 1), #1 of group 'pair' (rank 0 of 2)",
                "rank 1 (world rank 7)", "message tag 3"});
}

TEST(EngineTest, APeerThatDiesInMidMessageIsNamed) {
  Alone alone;
  std::vector<float> data(1000);
  const auto work = alone.zero.all_reduce(data);
  const FrameHeader header = all_reduce_header(1000);
  alone.say(&header, sizeof(header));
  alone.say(data.data(), 100);
  alone.peer = UniqueFd();
  expect_error(alone.zero.wait(work), absl::StatusCode::kUnavailable,
               {"all_reduce(f32[1000], sum), #1 of group 'pair'", "rank 1 (world rank 7) is gone"});
}

TEST(EngineTest, APeerThatDiedBeforeIsNamedAtOnce) {
  Alone alone;
  alone.peer = UniqueFd();
  std::vector<float> data(3);
  for (int i = 0; i < 2; ++i) {
    expect_error(alone.zero.wait(alone.zero.all_reduce(data)), absl::StatusCode::kUnavailable,
                 {"all_reduce(f32[3], sum)", "rank 1 (world rank 7) is gone"});
  }
}

TEST(EngineTest, WhatThePeerSaysLastIsTheReason) {
  // Rank 1 breaks while rank 0 cannot even send all of its own.
  Alone alone;
  std::vector<float> data(10'000'000);
  const auto work = alone.zero.send(data);
  const std::string text = "the disk is full";
  const FrameHeader header{.kind = FrameKind::kFailure,
                           .value = static_cast<int32_t>(absl::StatusCode::kAborted),
                           .length = static_cast<int64_t>(text.size())};
  alone.say(&header, sizeof(header));
  alone.say(text.data(), text.size());
  alone.peer = UniqueFd();
  expect_error(alone.zero.wait(work), absl::StatusCode::kAborted, {"send(f32", text});
}

TEST(EngineTest, GarbageBreaksTheGroup) {
  const auto after = [](const std::function<void(FrameHeader&)>& spoil) {
    Alone alone;
    std::vector<float> data(3);
    const auto work = alone.zero.all_reduce(data);
    FrameHeader header = all_reduce_header(3);
    spoil(header);
    alone.say(&header, sizeof(header));
    alone.say(data.data(), 12);
    return alone.zero.wait(work);
  };
  EXPECT_TRUE(after([](FrameHeader&) {}).ok());
  expect_error(after([](FrameHeader& header) { header.magic = 0; }), absl::StatusCode::kDataLoss,
               {"rank 1 (world rank 7) sent what is not a frame"});
  expect_error(after([](FrameHeader& header) { header.length = -1; }), absl::StatusCode::kDataLoss,
               {"not a frame"});
  expect_error(after([](FrameHeader& header) { header.length = 8; }), absl::StatusCode::kDataLoss,
               {"rank 1 (world rank 7) sent 8 bytes in step 0"});
  expect_error(after([](FrameHeader& header) { header.kind = static_cast<FrameKind>(99); }),
               absl::StatusCode::kDataLoss, {"not a frame"});
  expect_error(after([](FrameHeader& header) {
                 header.kind = FrameKind::kFailure;
                 header.length = int64_t{1} << 40;
               }),
               absl::StatusCode::kDataLoss, {"not a frame"});
  expect_error(after([](FrameHeader& header) { header.signature.count = 4; }),
               absl::StatusCode::kFailedPrecondition,
               {"rank 0 called all_reduce(f32[3], sum), rank 1 called all_reduce(f32[4], sum)"});
}

TEST(EngineTest, AbortWakesAThreadThatSleeps) {
  Alone alone;
  std::vector<float> data(3);
  const auto work = alone.zero.all_reduce(data);
  std::thread thread([&] {
    std::this_thread::sleep_for(milliseconds(30));
    alone.zero.engine->abort(absl::AbortedError("enough"));
  });
  const auto begin = Clock::now();
  expect_error(alone.zero.wait(work), absl::StatusCode::kAborted, {"all_reduce(f32[3]", "enough"});
  EXPECT_LT(Clock::now() - begin, milliseconds(5'000));
  thread.join();
  expect_error(alone.zero.all_reduce(data).status(), absl::StatusCode::kAborted, {"enough"});
}

}  // namespace
}  // namespace shardweave::gloo_internal
