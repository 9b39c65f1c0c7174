// The engine over plain socket pairs: what the conformance suite cannot bring about. Groups of two,
// and a rank whose other side the test plays by hand.
#include "shardweave/comm/gloo/engine.h"

#include <poll.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <numeric>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "shardweave/comm/failed_rank.h"

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
  Rank(int rank, UniqueFd data, UniqueFd control = UniqueFd(),
       std::chrono::milliseconds doze = Engine::kDoze)
      : group(group_of_two(rank)) {
    std::vector<Channel> channels(2);
    channels[1 - rank] = {std::move(data), std::move(control)};
    engine = std::make_unique<Engine>(group, std::move(channels), CollectiveSchedule::Limits(),
                                      std::make_shared<FirstFailure>(), doze);
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
  explicit Alone(std::pair<UniqueFd, UniqueFd> sockets = socket_pair(),
                 std::chrono::milliseconds doze = Engine::kDoze)
      : zero(0, std::move(sockets.first), UniqueFd(), doze), peer(std::move(sockets.second)) {}

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

FrameHeader message_header(int64_t count) {
  FrameHeader header{.kind = FrameKind::kMessage, .length = count * 4};
  header.signature.op = OpKind::kSend;
  header.signature.dtype = DType::kF32;
  header.signature.count = count;
  header.signature.sequence = 1;
  header.signature.root = 0;
  return header;
}

// Bytes that a group sends ahead, but more than sockets hold.
constexpr int64_t kMuch = Engine::kRoom;

void expect_error(const absl::Status& status, absl::StatusCode code,
                  std::initializer_list<std::string> parts) {
  EXPECT_EQ(status.code(), code) << status;
  for (const std::string& part : parts) {
    EXPECT_TRUE(absl::StrContains(std::string(status.message()), part))
        << "want '" << part << "' in: " << status;
  }
}

// The other rank is played by hand: what it gets without a call of rank 0, the helper has sent. It
// cannot have dozed before.
TEST(EngineTest, ALoneLargeOperationGoesOnAtOnceWhileNobodyWaits) {
  Alone a(socket_pair(), std::chrono::hours(1));
  const auto move_all = [&](short events, const auto& move, void* memory, int64_t bytes) {
    for (auto* at = static_cast<char*>(memory); bytes > 0;) {
      pollfd ready{.fd = a.peer.get(), .events = events};
      ASSERT_EQ(::poll(&ready, 1, 20'000), 1);
      const ssize_t n = move(at, bytes);
      ASSERT_GT(n, 0);
      at += n;
      bytes -= n;
    }
  };
  const auto receive = [&](void* memory, int64_t bytes) {
    move_all(
        POLLIN, [&](char* at, int64_t n) { return ::recv(a.peer.get(), at, n, 0); }, memory, bytes);
  };
  const auto send = [&](void* memory, int64_t bytes) {
    move_all(
        POLLOUT, [&](char* at, int64_t n) { return ::send(a.peer.get(), at, n, MSG_NOSIGNAL); },
        memory, bytes);
  };
  const int64_t count = 100'000;
  std::vector<float> data(count), mine(count / 2), got(count / 2);
  for (int round = 1; round <= 20; ++round) {
    data.assign(count, 1.0f);
    const auto work = a.zero.all_reduce(data);
    ASSERT_TRUE(work.ok());
    // Rank 0 computes from here on.
    for (uint32_t step :
         {0, 1}) {  // its input for the other half; then the half that it has reduced
      FrameHeader header;
      receive(&header, sizeof(header));
      ASSERT_EQ(header.step, step);
      ASSERT_EQ(header.length, count / 2 * 4);
      receive(got.data(), header.length);
      EXPECT_EQ(got, std::vector<float>(count / 2, step == 0 ? 1.0f : 3.0f));
      mine.assign(count / 2, step == 0 ? 2.0f : 3.0f);
      send(&header, sizeof(header));
      send(mine.data(), header.length);
    }
    ASSERT_TRUE(a.zero.wait(work).ok());
    EXPECT_EQ(data, std::vector<float>(count, 3.0f));
  }
}

// Rank 0 waits for the first of two; the second goes on when it has left.
TEST(EngineTest, WhatAWaitHasCarriedOnBesideItsOwnGoesOnAfterIt) {
  std::pair<UniqueFd, UniqueFd> sockets = socket_pair();
  Rank zero(0, std::move(sockets.first), UniqueFd(), std::chrono::hours(1));
  Rank one(1, std::move(sockets.second));
  for (int round = 0; round < 5; ++round) {
    std::vector<float> small[2] = {{1}, {1}};
    std::vector<float> large[2];
    for (auto& each : large) each.assign(300'000, 1.0f);
    const auto first = zero.all_reduce(small[0]);
    const auto second = zero.all_reduce(large[0]);
    const auto other = one.all_reduce(small[1]);
    ASSERT_TRUE(zero.wait(first).ok());
    ASSERT_TRUE(one.wait(other).ok());
    // Rank 0 computes from here on.
    ASSERT_TRUE(one.wait(one.all_reduce(large[1])).ok());
    EXPECT_EQ(large[1][299'999], 2.0f);
    ASSERT_TRUE(zero.wait(second).ok());
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

TEST(EngineTest, ARankSaysWhyItLeaves) {
  const auto left = [](std::initializer_list<std::string_view> words, int64_t length) {
    Alone alone;
    std::vector<float> data(3);
    const auto work = alone.zero.recv(data);
    const FrameHeader leave{.kind = FrameKind::kLeave, .length = length};
    alone.say(&leave, sizeof(leave));
    for (std::string_view part : words) {
      EXPECT_FALSE(alone.zero.engine->done(*work));
      alone.say(part.data(), part.size());
    }
    alone.peer = UniqueFd();
    return alone.zero.wait(work);
  };
  expect_error(left({"the disk ", "is full"}, 16), absl::StatusCode::kUnavailable,
               {"rank 1 (world rank 7) has left the group, after a failure: the disk is full"});
  const absl::Status silent = left({}, 0);
  EXPECT_TRUE(absl::EndsWith(silent.message(), "has left the group")) << silent;
  const absl::Status torn = left({"the disk "}, 16);
  expect_error(torn, absl::StatusCode::kUnavailable, {"rank 1 (world rank 7) is gone"});
  EXPECT_FALSE(absl::StrContains(torn.message(), "disk")) << torn;
  expect_error(left({}, kMaxFailureText + 1), absl::StatusCode::kDataLoss, {"too long a text"});
}

// The connection is full when rank 0 takes a message, and it leaves before there is room.
TEST(EngineTest, AReceiptIsOnItsWayBeforeARankLeaves) {
  auto sockets = socket_pair();
  const std::vector<char> junk(4096);
  size_t full = 0;
  for (ssize_t sent; (sent = ::send(sockets.first.get(), junk.data(), junk.size(), 0)) > 0;) {
    full += sent;
  }
  Alone alone(std::move(sockets));
  std::vector<float> got(3);
  const std::vector<float> words = {1, 2, 3};
  const FrameHeader message = message_header(3);
  alone.say(&message, sizeof(message));
  alone.say(words.data(), 12);
  ASSERT_TRUE(alone.zero.wait(alone.zero.recv(got)).ok());
  EXPECT_EQ(got, words);
  std::thread leaving([&] { alone.zero.engine.reset(); });
  std::string came;
  for (std::vector<char> bytes(65536);;) {
    pollfd ready{.fd = alone.peer.get(), .events = POLLIN};
    if (::poll(&ready, 1, 20'000) <= 0) break;
    const ssize_t count = ::recv(alone.peer.get(), bytes.data(), bytes.size(), 0);
    if (count <= 0) break;
    came.append(bytes.data(), count);
  }
  leaving.join();
  ASSERT_EQ(came.size(), full + 2 * sizeof(FrameHeader));
  FrameHeader last[2];
  std::memcpy(last, came.data() + full, sizeof(last));
  EXPECT_EQ(last[0].kind, FrameKind::kReceipt);
  EXPECT_EQ(last[1].kind, FrameKind::kLeave);
}

// And it does not wait for ever for a peer that reads nothing.
TEST(EngineTest, ARankLeavesThoughNobodyReads) {
  auto sockets = socket_pair();
  const std::vector<char> junk(4096);
  while (::send(sockets.first.get(), junk.data(), junk.size(), 0) > 0) {
  }
  Alone alone(std::move(sockets));
  const auto begin = Clock::now();
  alone.zero.engine.reset();
  EXPECT_LT(Clock::now() - begin, milliseconds(10'000));
}

// The last rank of a group of three sends a message and leaves, while the others are busy.
TEST(EngineTest, ARankThatHasLeftDoesNotBreakWhatOthersDo) {
  auto with_one = socket_pair(), with_two = socket_pair();
  GroupInfo group{.name = "three", .rank = 0, .world_ranks = {4, 7, 9}};
  std::vector<Channel> channels(3);
  channels[1].data = std::move(with_one.first);
  channels[2].data = std::move(with_two.first);
  Engine engine(group, std::move(channels));
  std::vector<float> large(kMuch / 4), got(3);
  const auto sending = engine.start({.op = OpKind::kSend,
                                     .in = Buffer::of(large.data(), large.size()),
                                     .out = {.dtype = DType::kF32},
                                     .peer = 1,
                                     .sequence = 1});
  const auto receiving = engine.start({.op = OpKind::kRecv,
                                       .in = {nullptr, 0, DType::kF32},
                                       .out = Buffer::of(got.data(), 3),
                                       .peer = 2,
                                       .sequence = 2});
  ASSERT_TRUE(sending.ok() && receiving.ok());
  const std::vector<float> words = {1, 2, 3};
  const FrameHeader message = message_header(3), leave{.kind = FrameKind::kLeave};
  std::string said(reinterpret_cast<const char*>(&message), sizeof(message));
  said.append(reinterpret_cast<const char*>(words.data()), 12);
  said.append(reinterpret_cast<const char*>(&leave), sizeof(leave));
  ASSERT_EQ(::send(with_two.second.get(), said.data(), said.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(said.size()));
  with_two.second = UniqueFd();
  EXPECT_TRUE(engine.wait(*receiving, in(milliseconds(20'000))).ok());
  EXPECT_EQ(got, words);
  // The receipt did not reach it, which harms nobody.
  std::vector<float> more(1);
  const auto status = engine.health();
  EXPECT_TRUE(status.ok()) << status;
  expect_error(engine
                   .start({.op = OpKind::kSend,
                           .in = Buffer::of(more.data(), 1),
                           .out = {.dtype = DType::kF32},
                           .peer = 2,
                           .sequence = 3})
                   .status(),
               absl::StatusCode::kUnavailable, {"rank 2 (world rank 9) has left the group"});
}

// Rank 0 gives up in the middle of a frame that rank 1 does not read, which then asks for something
// else.
TEST(EngineTest, TheReasonOfAFailureOvertakesAHalfSentFrame) {
  Pair pair;
  std::vector<float> large(kMuch / 4), small = {1};
  const auto sending = pair.zero.send(large);
  ASSERT_TRUE(sending.ok());
  pair.zero.engine->abort(absl::AbortedError("the disk is full"));
  expect_error(pair.zero.wait(sending), absl::StatusCode::kAborted, {"the disk is full"});
  const auto begin = Clock::now();
  for (int i = 0; i < 2; ++i) {
    expect_error(pair.one.wait(pair.one.all_reduce(small)), absl::StatusCode::kAborted,
                 {"all_reduce(f32[1]", "the disk is full"});
    pair.zero.engine.reset();  // gone, as a process that has ended
  }
  EXPECT_LT(Clock::now() - begin, milliseconds(5'000));
}

// Rank 1 has called the same and aborted before rank 0 comes: its frame and its reason are unread,
// and rank 0 cannot send.
TEST(EngineTest, TheReasonOfAnAbortIsReadWhenSendingFails) {
  Pair pair;
  std::vector<float> x = {1, 2, 3}, y = {4, 5, 6};
  ASSERT_TRUE(pair.one.all_reduce(x).ok());
  pair.one.engine->abort(absl::AbortedError("the disk is full"));
  pair.one.engine.reset();
  expect_error(pair.zero.wait(pair.zero.all_reduce(y)), absl::StatusCode::kAborted,
               {"all_reduce(f32[3]", "the disk is full"});
}

// Rank 1 was stopped: its own deadline has passed too, but it is the one to blame.
TEST(EngineTest, ARankThatWasStoppedDoesNotBlameTheOthers) {
  Pair pair;
  std::vector<float> mine(kMuch / 4), theirs(kMuch / 4);
  const auto sending = pair.zero.send(mine, 1);
  const absl::Status here = pair.zero.wait(sending, in(milliseconds(20)));
  expect_error(here, absl::StatusCode::kDeadlineExceeded,
               {"nothing came from rank 1 (world rank 7)"});
  EXPECT_EQ(failed_rank(here), 7);
  pair.zero.engine.reset();
  const auto late = pair.one.recv(theirs, 5);
  const absl::Status told = pair.one.wait(late, Clock::now());
  expect_error(told, absl::StatusCode::kDeadlineExceeded,
               {"rank 0 (world rank 4) gave up", "nothing came from rank 1 (world rank 7)"});
  EXPECT_EQ(failed_rank(told), 7);
}

TEST(EngineTest, ARankThatLeavesInTheMiddleSaysSo) {
  Pair pair;
  std::vector<float> large(kMuch / 4), got(kMuch / 4);
  ASSERT_TRUE(pair.zero.send(large, 1).ok());
  pair.zero.engine.reset();
  expect_error(pair.one.wait(pair.one.recv(got, 1)), absl::StatusCode::kUnavailable,
               {"rank 0 (world rank 4) gave up", "it left before it had sent all"});
}

// A rank that runs ahead does not fill the memory of the others.
TEST(EngineTest, WhatComesEarlyIsBounded) {
  Alone alone;
  std::vector<std::vector<float>> data(40, std::vector<float>(1 << 18));  // 1 MiB each
  std::vector<absl::StatusOr<Backend::Ticket>> works;
  for (size_t i = 0; i < data.size(); ++i) {
    works.push_back(i % 2 ? alone.zero.send(data[i], static_cast<int>(i))
                          : alone.zero.all_reduce(data[i]));
  }
  int64_t payload = 0, frames = 0;
  std::vector<std::byte> buffer(1 << 16);
  std::string header;
  int64_t skip = 0;
  for (const auto limit = in(milliseconds(1'000)); Clock::now() < limit;) {
    const ssize_t got = ::recv(alone.peer.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (got <= 0) {
      std::this_thread::sleep_for(milliseconds(1));  // the helper sends
      continue;
    }
    for (ssize_t i = 0; i < got;) {
      const int64_t part = std::min<int64_t>(skip, got - i);
      skip -= part;
      i += part;
      payload += part;
      while (i < got && skip == 0 && header.size() < sizeof(FrameHeader)) {
        header.push_back(static_cast<char>(buffer[i++]));
      }
      if (header.size() < sizeof(FrameHeader)) continue;
      FrameHeader frame;
      std::memcpy(&frame, header.data(), sizeof(frame));
      header.clear();
      skip = frame.length;
      ++frames;
    }
  }
  EXPECT_EQ(frames, 40) << "every operation is announced";
  EXPECT_GT(payload, 0);
  EXPECT_LE(payload, Engine::kRoom);
}

TEST(EngineTest, WhatWasHeldBackArrives) {
  Pair pair;
  constexpr int kCount = 12;
  std::vector<std::vector<float>> sums(2 * kCount), sent(kCount), got(kCount);
  for (auto& each : sums) each.assign(1 << 19, 1.0f);  // 2 MiB
  for (auto& each : got) each.resize(1 << 19);
  for (int i = 0; i < kCount; ++i) sent[i].assign(1 << 19, i + 0.5f);
  // Rank 0 issues everything long before rank 1 does; messages of one tag stay in order.
  std::vector<absl::StatusOr<Backend::Ticket>> ahead, behind;
  for (int i = 0; i < kCount; ++i) {
    ahead.push_back(pair.zero.all_reduce(sums[i]));
    ahead.push_back(pair.zero.send(sent[i], 3));
  }
  std::this_thread::sleep_for(milliseconds(100));
  pair.one.sequence = 0;
  for (int i = 0; i < kCount; ++i) {
    behind.push_back(pair.one.all_reduce(sums[kCount + i]));
    behind.push_back(pair.one.recv(got[i], 3));
  }
  std::thread thread([&] {
    for (const auto& work : ahead) EXPECT_TRUE(pair.zero.wait(work).ok());
  });
  for (size_t i = behind.size(); i-- > 0;) EXPECT_TRUE(pair.one.wait(behind[i]).ok());
  thread.join();
  EXPECT_EQ(got, sent);
  for (const auto& each : sums) EXPECT_EQ(each, std::vector<float>(1 << 19, 2.0f));
}

TEST(EngineTest, WithoutADescriptorTheGroupIsBrokenFromTheBeginning) {
  Pair whole;
  auto data = socket_pair(), control = socket_pair();
  rlimit before;
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const int next = ::dup(0);
  ::close(next);
  const rlimit none{static_cast<rlim_t>(next), before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  Rank zero(0, std::move(data.first), std::move(control.first));
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  std::vector<float> x = {1};
  expect_error(zero.engine->health(), absl::StatusCode::kResourceExhausted, {"no eventfd"});
  expect_error(zero.all_reduce(x).status(), absl::StatusCode::kResourceExhausted, {"no eventfd"});
  Rank one(1, std::move(data.second), std::move(control.second));
  expect_error(one.wait(one.all_reduce(x)), absl::StatusCode::kResourceExhausted,
               {"rank 0 (world rank 4) gave up", "no eventfd"});
}

TEST(EngineTest, WithoutAThreadTheGroupFails) {
  Pair pair;
  pthread_attr_t before, huge;
  ASSERT_EQ(::pthread_getattr_default_np(&before), 0);
  ASSERT_EQ(::pthread_getattr_default_np(&huge), 0);
  ASSERT_EQ(::pthread_attr_setstacksize(&huge, size_t{1} << 46), 0);
  ASSERT_EQ(::pthread_setattr_default_np(&huge), 0);
  std::vector<float> x = {1};
  const absl::Status status = pair.zero.all_reduce(x).status();
  ASSERT_EQ(::pthread_setattr_default_np(&before), 0);
  expect_error(status, absl::StatusCode::kResourceExhausted, {"all_reduce(f32[1]", "no thread"});
  expect_error(pair.one.wait(pair.one.all_reduce(x)), absl::StatusCode::kResourceExhausted,
               {"rank 0 (world rank 4) gave up", "no thread"});
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
  const auto not_a_frame = [&](const std::function<void(FrameHeader&)>& spoil, const char* what) {
    expect_error(after(spoil), absl::StatusCode::kDataLoss,
                 {"rank 1 (world rank 7) sent what is not a frame", what});
  };
  not_a_frame([](FrameHeader& h) { h.length = int64_t{1} << 40; }, "too great a length");
  not_a_frame([](FrameHeader& h) { h.signature.op = static_cast<OpKind>(kNumOpKinds); },
              "an unknown operation");
  not_a_frame([](FrameHeader& h) { h.signature.dtype = static_cast<DType>(kNumDTypes); },
              "an unknown dtype");
  not_a_frame([](FrameHeader& h) { h.signature.reduce_op = static_cast<ReduceOp>(77); },
              "an unknown reduction");
  not_a_frame([](FrameHeader& h) { h.signature.count = -3; }, "an absurd count");
  not_a_frame([](FrameHeader& h) { h.signature.count = INT64_MAX; }, "an absurd count");
  not_a_frame([](FrameHeader& h) { h.signature.root = 2; }, "a root that is no rank");
  not_a_frame([](FrameHeader& h) { std::memset(h.signature.tag, 'a', 32); }, "a tag without end");
  not_a_frame([](FrameHeader& h) { h.signature.op = OpKind::kSend; }, "the wrong operation");
  not_a_frame([](FrameHeader& h) { h.kind = FrameKind::kReceipt; }, "the wrong operation");
  not_a_frame(
      [](FrameHeader& h) {
        h.kind = FrameKind::kMessage;
        h.signature.op = OpKind::kSend;
        h.length = int64_t{1} << 40;
      },
      "the wrong length");
  not_a_frame([](FrameHeader& h) { h.kind = FrameKind::kFailure; }, "an unknown status code");
  expect_error(after([](FrameHeader& header) {
                 header = {.kind = FrameKind::kGrant};
                 header.signature.op = OpKind::kSend;
               }),
               absl::StatusCode::kDataLoss, {"granted what was not offered"});
  expect_error(after([](FrameHeader& header) { header.signature.count = 4; }),
               absl::StatusCode::kFailedPrecondition,
               {"rank 0 called all_reduce(f32[3], sum), rank 1 called all_reduce(f32[4], sum)"});
}

// health() reads what the thread that waits has been woken for, which then finds nothing to read.
TEST(EngineTest, WhatHealthHasReadWakesAThreadThatSleeps) {
  Alone alone;
  const auto begin = Clock::now();
  for (uint64_t i = 1; i <= 20; ++i) {
    std::vector<float> got(3);
    const std::vector<float> words = {1, 2, 3};
    const auto work = alone.zero.recv(got);
    std::thread waiting([&] { EXPECT_TRUE(alone.zero.wait(work).ok()); });
    std::this_thread::sleep_for(milliseconds(20));  // it sleeps
    FrameHeader message = message_header(3);
    message.signature.sequence = i;
    std::string said(reinterpret_cast<const char*>(&message), sizeof(message));
    said.append(reinterpret_cast<const char*>(words.data()), 12);
    alone.say(said.data(), said.size());
    EXPECT_TRUE(alone.zero.engine->health().ok());
    waiting.join();
    EXPECT_EQ(got, words);
  }
  // A thread that is not woken looks up once a second.
  EXPECT_LT(Clock::now() - begin, milliseconds(8'000));
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
