// Sends and recvs, many operations under way at once, coalescing.
#include <atomic>
#include <chrono>
#include <deque>
#include <random>
#include <thread>

#include "absl/time/clock.h"
#include "shardweave/comm/testing/cases.h"

namespace shardweave {
namespace {

int next(const Communicator& comm) {
  return (comm.rank() + 1) % comm.size();
}
int previous(const Communicator& comm) {
  return (comm.rank() + comm.size() - 1) % comm.size();
}

TEST_P(CommConformance, SendAndRecvAroundTheRing) {
  run([](const auto& comm) -> absl::Status {
    for (int64_t count : {0, 1, 7, 50'001}) {
      for (bool send_first : {true, false}) {
        Values in(DType::kF32, count, [&](int64_t i) { return comm->rank() * 1000 + i; });
        Values out(DType::kF32, count);
        Work send;
        if (send_first) send = comm->send(in.buffer(), next(*comm));
        Work recv = comm->recv(out.buffer(), previous(*comm));
        if (!send_first) send = comm->send(in.buffer(), next(*comm));
        SHARDWEAVE_RETURN_IF_ERROR(recv.wait());
        SHARDWEAVE_RETURN_IF_ERROR(send.wait());
        EXPECT_EQ(
            out, Values(DType::kF32, count, [&](int64_t i) { return previous(*comm) * 1000 + i; }));
      }
    }
    return absl::OkStatus();
  });
}

TEST_P(CommConformance, MessagesMatchByTagAndThenInOrder) {
  if (!backend().matches_by_tag) GTEST_SKIP() << "in order only";
  run([](const auto& comm) -> absl::Status {
    int sent[6];
    int received[6] = {};
    std::vector<Work> works;
    for (int i = 0; i < 6; ++i) {
      sent[i] = comm->rank() * 10 + i;
      works.push_back(comm->send(Buffer::of(&sent[i], 1), next(*comm), /*message_tag=*/i % 2));
    }
    // All of tag 1 first.
    for (int i : {1, 3, 5, 0, 2, 4}) {
      works.push_back(comm->recv(Buffer::of(&received[i], 1), previous(*comm), i % 2));
    }
    for (const Work& work : works) SHARDWEAVE_RETURN_IF_ERROR(work.wait());
    for (int i = 0; i < 6; ++i) EXPECT_EQ(received[i], previous(*comm) * 10 + i);
    return absl::OkStatus();
  });
}

TEST_P(CommConformance, RanksSendToThemselves) {
  run([](const auto& comm) -> absl::Status {
    int64_t in = comm->rank() + 5;
    int64_t out = 0;
    Work recv = comm->recv(Buffer::of(&out, 1), comm->rank(), 3);
    Work send = comm->send(Buffer::of(&in, 1), comm->rank(), 3);
    SHARDWEAVE_RETURN_IF_ERROR(send.wait());
    SHARDWEAVE_RETURN_IF_ERROR(recv.wait());
    EXPECT_EQ(out, in);
    return absl::OkStatus();
  });
}

TEST_P(CommConformance, WorksAreWaitedForInAnyOrder) {
  run([](const auto& comm) -> absl::Status {
    std::deque<Values> data;
    std::vector<Work> works;
    for (int k = 0; k < 20; ++k) {
      // Some are small, some large.
      data.emplace_back(DType::kF32, k % 3 == 0 ? 30'001 : 3,
                        [&](int64_t i) { return sample(DType::kF32, comm->rank(), i + k); });
      works.push_back(comm->all_reduce(data.back().buffer(), data.back().buffer(), ReduceOp::kSum));
    }
    // Half of the ranks from the end.
    for (int k = 0; k < 20; ++k) {
      SHARDWEAVE_RETURN_IF_ERROR(works[comm->rank() % 2 ? 19 - k : k].wait());
    }
    for (int k = 0; k < 20; ++k) {
      EXPECT_TRUE(works[k].done());
      EXPECT_TRUE(works[k].wait().ok()) << "again";
      EXPECT_EQ(data[k], Values(DType::kF32, data[k].count(), [&](int64_t i) {
                  return reduced_sample(DType::kF32, ReduceOp::kSum, comm->size(), i + k);
                }));
    }
    return absl::OkStatus();
  });
}

TEST_P(CommConformance, MoreWorksThanAnyRingHolds) {
  run([](const auto& comm) -> absl::Status {
    std::vector<int64_t> data(300, comm->rank() + 1);
    std::vector<Work> works;
    for (int64_t& x : data) {
      works.push_back(comm->all_reduce(Buffer::of(&x, 1), Buffer::of(&x, 1), ReduceOp::kSum));
    }
    for (const Work& work : works) SHARDWEAVE_RETURN_IF_ERROR(work.wait());
    for (int64_t x : data) EXPECT_EQ(x, comm->size() * (comm->size() + 1) / 2);
    return absl::OkStatus();
  });
}

// Also while others that are under way keep the backend busy.
TEST_P(CommConformance, WhatIsDoneStaysDone) {
  run([](const auto& comm) -> absl::Status {
    int64_t small = 1;
    std::vector<float> large(1'000'000, 1);
    for (int round = 0; round < 5; ++round) {
      const Work first =
          comm->all_reduce(Buffer::of(&small, 1), Buffer::of(&small, 1), ReduceOp::kMax);
      const Buffer buffer = Buffer::of(large.data(), static_cast<int64_t>(large.size()));
      const Work second = comm->all_reduce(buffer, buffer, ReduceOp::kAvg);
      const Deadline limit = std::chrono::steady_clock::now() + std::chrono::seconds(30);
      while (!first.done() && std::chrono::steady_clock::now() < limit) {
      }
      int64_t asked = 0, forgotten = 0;
      do {
        ++asked;
        forgotten += !first.done();
      } while (!second.done() && std::chrono::steady_clock::now() < limit);
      EXPECT_EQ(forgotten, 0) << "of " << asked;
      SHARDWEAVE_RETURN_IF_ERROR(first.wait());
      SHARDWEAVE_RETURN_IF_ERROR(second.wait());
    }
    return absl::OkStatus();
  });
}

TEST_P(CommConformance, DoneBecomesTrueWithoutWait) {
  run([](const auto& comm) -> absl::Status {
    Values data = Values(DType::kF32, 100'003, [&](int64_t i) { return i % 50; });
    Work work = comm->all_reduce(data.buffer(), data.buffer(), ReduceOp::kAvg);
    const Deadline limit = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (!work.done() && std::chrono::steady_clock::now() < limit) {
    }
    EXPECT_TRUE(work.done());
    EXPECT_EQ(data, Values(DType::kF32, 100'003, [&](int64_t i) { return i % 50; }));
    return work.wait();
  });
}

// Whoever only asks done() learns of the deadline too.
TEST_P(CommConformance, DoneBecomesTrueAtTheDeadline) {
  run([](const auto& comm) -> absl::Status {
    if (comm->size() == 1) return absl::OkStatus();
    SHARDWEAVE_RETURN_IF_ERROR(comm->barrier().wait());
    float x = 0;
    const Deadline begin = std::chrono::steady_clock::now();
    Work work = comm->recv(Buffer::of(&x, 1), next(*comm), 9, {.timeout = absl::Milliseconds(300)});
    while (!work.done() && std::chrono::steady_clock::now() < begin + std::chrono::seconds(20)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_TRUE(work.done());
    const auto asked = std::chrono::steady_clock::now();
    EXPECT_FALSE(work.wait().ok());
    EXPECT_LT(std::chrono::steady_clock::now() - asked, std::chrono::seconds(5));
    return absl::OkStatus();
  });
}

// A thread that waits, or that computes, does not make another one's done() wait.
TEST_P(CommConformance, DoneDoesNotWaitForAThreadThatWaits) {
  run([](const auto& comm) -> absl::Status {
    if (comm->size() == 1) return absl::OkStatus();
    float never = 0, x = 0;
    Work other = comm->recv(Buffer::of(&never, 1), next(*comm), 8);
    Work work = comm->recv(Buffer::of(&x, 1), next(*comm), 9);
    std::jthread waiter([&] { EXPECT_TRUE(other.wait().ok()); });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < 10; ++i) EXPECT_FALSE(work.done());
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
    SHARDWEAVE_RETURN_IF_ERROR(comm->barrier().wait());
    const float mine = 1;
    for (int tag : {8, 9}) {
      SHARDWEAVE_RETURN_IF_ERROR(
          comm->send(ConstBuffer::of(&mine, 1), previous(*comm), tag).wait());
    }
    waiter.join();
    return work.wait();
  });
}

TEST_P(CommConformance, SendsAndCollectivesOverlap) {
  run([](const auto& comm) -> absl::Status {
    int in = comm->rank();
    int out = -1;
    double sum = 1;
    Work recv = comm->recv(Buffer::of(&out, 1), previous(*comm));
    SHARDWEAVE_RETURN_IF_ERROR(
        comm->all_reduce(Buffer::of(&sum, 1), Buffer::of(&sum, 1), ReduceOp::kSum).wait());
    Work send = comm->send(Buffer::of(&in, 1), next(*comm));
    SHARDWEAVE_RETURN_IF_ERROR(comm->barrier().wait());
    SHARDWEAVE_RETURN_IF_ERROR(recv.wait());
    SHARDWEAVE_RETURN_IF_ERROR(send.wait());
    EXPECT_EQ(out, previous(*comm));
    EXPECT_EQ(sum, comm->size());
    return absl::OkStatus();
  });
}

TEST_P(CommConformance, Coalescing) {
  run([](const auto& comm) -> absl::Status {
    std::deque<Values> data;
    Coalescing group(*comm);
    for (int k = 0; k < 10; ++k) {
      data.emplace_back(DType::kF32, k * 37,
                        [&](int64_t i) { return sample(DType::kF32, comm->rank(), i + k); });
      const Buffer b = data.back().buffer();
      comm->all_reduce(b, b, ReduceOp::kSum);
    }
    int in = comm->rank();
    int out = -1;
    comm->recv(Buffer::of(&out, 1), previous(*comm));
    comm->send(Buffer::of(&in, 1), next(*comm));
    SHARDWEAVE_RETURN_IF_ERROR(group.finish().wait());
    for (int k = 0; k < 10; ++k) {
      EXPECT_EQ(data[k], Values(DType::kF32, k * 37, [&](int64_t i) {
                  return reduced_sample(DType::kF32, ReduceOp::kSum, comm->size(), i + k);
                }));
    }
    EXPECT_EQ(out, previous(*comm));
    return comm->barrier().wait();  // no longer collected
  });
}

TEST_P(CommConformance, CoalescingTellsOfBadArguments) {
  run([](const auto& comm) -> absl::Status {
    double x = 0;
    {
      Coalescing group(*comm);
      comm->broadcast(Buffer::of(&x, 1), /*root=*/99);
      Coalescing inner(*comm);
      EXPECT_EQ(inner.finish().wait().code(), absl::StatusCode::kFailedPrecondition);
      const absl::Status status = group.finish().wait();
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
      EXPECT_NE(status.message().find("root is 99"), status.message().npos) << status;
    }
    { Coalescing nothing(*comm); }
    return comm->barrier().wait();
  });
}

// split() and whoever else needs a result at once waits for it in the middle.
TEST_P(CommConformance, WhatIsCoalescedMayBeWaitedFor) {
  run([](const auto& comm) -> absl::Status {
    const int64_t size = comm->size();
    Coalescing group(*comm);
    int64_t before = comm->rank();
    comm->all_reduce(Buffer::of(&before, 1), Buffer::of(&before, 1), ReduceOp::kSum);
    int64_t now = 1;
    SHARDWEAVE_RETURN_IF_ERROR(
        comm->all_reduce(Buffer::of(&now, 1), Buffer::of(&now, 1), ReduceOp::kSum).wait());
    EXPECT_EQ(now, size);
    auto turned = comm->split(0, -comm->rank(), "turned");
    if (!turned.ok()) return turned.status();
    EXPECT_EQ((*turned)->rank(), size - 1 - comm->rank());
    EXPECT_TRUE(comm->is_coalescing());
    SHARDWEAVE_RETURN_IF_ERROR(group.finish().wait());
    EXPECT_EQ(before, size * (size - 1) / 2);
    return (*turned)->barrier().wait();
  });
}

// Who returns early leaves nothing behind that writes to the buffers.
TEST_P(CommConformance, ACoalescingThatIsNotFinishedWaitsAtItsEnd) {
  run([](const auto& comm) -> absl::Status {
    for (int late = 0; late < comm->size(); ++late) {
      int64_t sum = 1;
      {
        Coalescing group(*comm);
        if (comm->rank() == late) absl::SleepFor(absl::Milliseconds(20));
        comm->all_reduce(Buffer::of(&sum, 1), Buffer::of(&sum, 1), ReduceOp::kSum);
      }
      EXPECT_EQ(sum, comm->size());
      EXPECT_FALSE(comm->is_coalescing());
    }
    return comm->health();
  });
}

// One random program on all ranks, over the whole group and over two others, waiting late.
TEST_P(CommConformance, RandomPrograms) {
  run([](const auto& comm) -> absl::Status {
    auto same = comm->split(0, comm->rank(), "same");
    if (!same.ok()) return same.status();
    auto turned = comm->split(0, -comm->rank(), "turned");
    if (!turned.ok()) return turned.status();
    std::mt19937 random(7);  // the same numbers on all ranks
    std::deque<std::pair<Work, std::function<void()>>> pending;
    const auto finish_one = [&]() -> absl::Status {
      SHARDWEAVE_RETURN_IF_ERROR(pending.front().first.wait());
      pending.front().second();
      pending.pop_front();
      return absl::OkStatus();
    };
    for (int step = 0; step < 150; ++step) {
      Communicator& on = *(random() % 3 == 0 ? *turned : random() % 2 ? *same : comm);
      const int64_t count = random() % 8 == 0 ? 20'000 + random() % 99 : random() % 40;
      const int root = static_cast<int>(random() % on.size());
      auto data = std::make_shared<Values>(DType::kI32, count, [&](int64_t i) {
        return int64_t{1000} * on.rank() + i % 100 + step;
      });
      const auto value = [count, step](int rank, int64_t i) {
        return static_cast<double>(int64_t{1000} * rank + i % 100 + step);
      };
      const int size = on.size();
      switch (random() % 4) {
        case 0:
          pending.emplace_back(on.broadcast(data->buffer(), root), [=] {
            EXPECT_EQ(*data, Values(DType::kI32, count, [&](int64_t i) { return value(root, i); }));
          });
          break;
        case 1:
          pending.emplace_back(on.all_reduce(data->buffer(), data->buffer(), ReduceOp::kMax), [=] {
            EXPECT_EQ(*data,
                      Values(DType::kI32, count, [&](int64_t i) { return value(size - 1, i); }));
          });
          break;
        case 2: {
          auto all = std::make_shared<Values>(DType::kI32, count * size);
          pending.emplace_back(on.all_gather(data->buffer(), all->buffer()), [=, input = data] {
            EXPECT_EQ(*all, Values(DType::kI32, count * size, [&](int64_t i) {
              return value(static_cast<int>(i / count), i % count);
            }));
          });
          break;
        }
        case 3: {
          auto other = std::make_shared<Values>(DType::kI32, count);
          const int from = previous(on);
          Work recv = on.recv(other->buffer(), from, 5);
          pending.emplace_back(on.send(data->buffer(), next(on), 5), [data] {});
          pending.emplace_back(recv, [=] {
            EXPECT_EQ(*other,
                      Values(DType::kI32, count, [&](int64_t i) { return value(from, i); }));
          });
          break;
        }
      }
      while (pending.size() > random() % 12) SHARDWEAVE_RETURN_IF_ERROR(finish_one());
    }
    while (!pending.empty()) SHARDWEAVE_RETURN_IF_ERROR(finish_one());
    return absl::OkStatus();
  });
}

}  // namespace
}  // namespace shardweave
