// What goes wrong on one rank is an error on every rank, in time, with a message that says what it
// was; and stays. (gtest: "rank" in the failures below is the index in the result.)
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "shardweave/comm/testing/cases.h"

namespace shardweave {
namespace {

using absl::StatusCode;

void expect_error(const absl::Status& status, StatusCode code,
                  std::initializer_list<std::string> parts) {
  EXPECT_EQ(status.code(), code) << status;
  for (const std::string& part : parts) {
    EXPECT_TRUE(absl::StrContains(std::string(status.message()), part))
        << "want '" << part << "' in: " << status;
  }
}

absl::Status sum_one(Communicator& comm, const CallOptions& options = {}) {
  float x = 1;
  return comm.all_reduce(Buffer::of(&x, 1), Buffer::of(&x, 1), ReduceOp::kSum, options).wait();
}

// Returns when `count` ranks have said that they are done, which cannot depend on how fast they
// are.
void wait_for(const std::atomic<int>& done, int count) {
  while (done.load() < count) absl::SleepFor(absl::Milliseconds(1));
}

// 1. Ranks that differ.

struct Mismatch {
  const char* name;
  // Rank 1 calls `odd`, the others `usual`.
  std::function<Work(Communicator&, Values&, const CallOptions&)> usual;
  std::function<Work(Communicator&, Values&, const CallOptions&)> odd;
  // Of the two calls in the message.
  std::string usual_text;
  std::string odd_text;
};

std::vector<Mismatch> mismatches() {
  const auto all_reduce = [](int64_t count, ReduceOp op) {
    return [=](Communicator& comm, Values& data, const CallOptions& options) {
      return comm.all_reduce(data.part(0, count), data.part(0, count), op, options);
    };
  };
  const auto broadcast = [](int root) {
    return [=](Communicator& comm, Values& data, const CallOptions& options) {
      return comm.broadcast(data.part(0, 7), root, options);
    };
  };
  const auto as_ints = [](Communicator& comm, Values& data, const CallOptions& options) {
    Buffer b = data.part(0, 7);
    b.dtype = DType::kI32;
    return comm.all_reduce(b, b, ReduceOp::kSum, options);
  };
  const auto barrier = [](Communicator& comm, Values&, const CallOptions& options) {
    return comm.barrier(options);
  };
  const auto gather_v = [](const std::vector<int64_t>& counts) {
    return [=](Communicator& comm, Values& data, const CallOptions& options) {
      int64_t begin = 0;
      for (int r = 0; r < comm.rank(); ++r) begin += counts[r];
      return comm.all_gather_v(data.part(begin, counts[comm.rank()]), data.part(0, 9), counts,
                               options);
    };
  };
  // Rank 1 sends what the others do not expect.
  const auto to_all = [](int64_t from_one) {
    return [=](Communicator& comm, Values& data, const CallOptions& options) {
      const int rank = comm.rank();
      std::vector<int64_t> send(3, rank == 1 ? from_one : 2);
      std::vector<int64_t> recv = {2, rank == 1 ? from_one : 2, 2};
      return comm.all_to_all_v(data.part(0, send[0] * 3), send,
                               data.part(20, recv[0] + recv[1] + recv[2]), recv, options);
    };
  };
  return {
      {"operation", all_reduce(7, ReduceOp::kSum), broadcast(0), "all_reduce(f32[7], sum) 'step'",
       "broadcast(f32[7], root 0) 'step'"},
      {"count", all_reduce(7, ReduceOp::kSum), all_reduce(8, ReduceOp::kSum),
       "all_reduce(f32[7], sum)", "all_reduce(f32[8], sum)"},
      {"count of zero", all_reduce(7, ReduceOp::kSum), all_reduce(0, ReduceOp::kSum),
       "all_reduce(f32[7], sum)", "all_reduce(f32[0], sum)"},
      {"reduction", all_reduce(7, ReduceOp::kSum), all_reduce(7, ReduceOp::kMax),
       "all_reduce(f32[7], sum)", "all_reduce(f32[7], max)"},
      {"dtype", all_reduce(7, ReduceOp::kSum), as_ints, "all_reduce(f32[7], sum)",
       "all_reduce(i32[7], sum)"},
      {"root", broadcast(0), broadcast(2), "broadcast(f32[7], root 0)",
       "broadcast(f32[7], root 2)"},
      {"barrier", barrier, all_reduce(7, ReduceOp::kSum), "barrier()", "all_reduce(f32[7], sum)"},
      {"counts per rank", gather_v({3, 3, 3}), gather_v({2, 3, 4}), "all_gather_v(f32[9])",
       "counts per rank differ"},
      {"counts to send", to_all(2), to_all(1), "all_to_all_v", "sends 1"},
  };
}

TEST_P(CommErrorConformance, RanksThatCallDifferentThingsAllLearnIt) {
  for (const Mismatch& mismatch : mismatches()) {
    SCOPED_TRACE(mismatch.name);
    const std::vector<absl::Status> results = run(3, [&](const auto& comm) {
      Values data(DType::kF32, 40);
      const auto& call = comm->rank() == 1 ? mismatch.odd : mismatch.usual;
      const absl::Status status = call(*comm, data, {.tag = "step"}).wait();
      EXPECT_EQ(comm->health(), status);
      EXPECT_EQ(sum_one(*comm), status) << "later calls give the first error";
      return status;
    });
    for (const absl::Status& status : results) {
      expect_error(status, StatusCode::kFailedPrecondition,
                   {mismatch.usual_text, mismatch.odd_text, "#1"});
    }
  }
}

TEST_P(CommErrorConformance, SendAndRecvThatDifferBothLearnIt) {
  const std::vector<absl::Status> results = run(2, [](const auto& comm) {
    float x[3] = {};
    return comm->rank() == 0 ? comm->send(Buffer::of(x, 2), 1).wait()
                             : comm->recv(Buffer::of(x, 3), 0).wait();
  });
  for (const absl::Status& status : results) {
    expect_error(status, StatusCode::kFailedPrecondition, {"send(f32[2]", "recv(f32[3]"});
  }
}

// 2. Ranks that do not come.

TEST_P(CommErrorConformance, ARankThatNeverArrivesIsNamedAfterTheDeadline) {
  std::atomic<int> done{0};
  const absl::Time begin = absl::Now();
  const std::vector<absl::Status> results = run(4, [&](const auto& comm) -> absl::Status {
    SHARDWEAVE_RETURN_IF_ERROR(comm->barrier().wait());
    if (comm->rank() == 2) {
      wait_for(done, 3);
      const absl::Time late = absl::Now();
      float x = 1;
      absl::Status status =
          comm->all_reduce(Buffer::of(&x, 1), Buffer::of(&x, 1), ReduceOp::kSum).wait();
      // What the others sent before they gave up may be all it needs: then the sum is right, and it
      // learns of them in the next call.
      if (status.ok()) {
        EXPECT_EQ(x, 4);
        status = comm->barrier().wait();
      }
      EXPECT_FALSE(status.ok());
      EXPECT_LT(absl::Now() - late, absl::Seconds(5));
      return absl::OkStatus();
    }
    const absl::Status status =
        sum_one(*comm, {.timeout = absl::Milliseconds(200), .tag = "gradients"});
    EXPECT_EQ(comm->barrier().wait(), status);
    done.fetch_add(1);
    return status;
  });
  EXPECT_LT(absl::Now() - begin, absl::Seconds(20));
  EXPECT_TRUE(results[2].ok()) << results[2];
  for (int rank : {0, 1, 3}) {
    expect_error(
        results[rank], StatusCode::kDeadlineExceeded,
        {"all_reduce", "#2", "rank 2", "'gradients'",
         GetParam().blocks_at_issue ? "has to call" : "every rank of the group has to call it"});
  }
}

TEST_P(CommErrorConformance, ARecvWithoutSendEndsAtItsDeadline) {
  std::atomic<int> done{0};
  const std::vector<absl::Status> results = run(2, [&](const auto& comm) -> absl::Status {
    if (comm->rank() == 1) {
      wait_for(done, 1);
      return absl::OkStatus();
    }
    float x = 0;
    const absl::Status status =
        comm->recv(Buffer::of(&x, 1), 1, 0, {.timeout = absl::Milliseconds(100), .tag = "act"})
            .wait();
    done.fetch_add(1);
    return status;
  });
  expect_error(results[0], StatusCode::kDeadlineExceeded,
               {"recv(f32[1], from 1)", "'act'", "rank 1 has to call send with message tag 0"});
}

TEST_P(CommErrorConformance, WorksThatArePendingFailWithTheFirstError) {
  std::atomic<int> done{0};
  const std::vector<absl::Status> results = run(2, [&](const auto& comm) -> absl::Status {
    if (comm->rank() == 1) {
      wait_for(done, 1);
      return absl::OkStatus();
    }
    float x = 0;
    Work first = comm->recv(Buffer::of(&x, 1), 1, 0, {.timeout = absl::Milliseconds(100)});
    Work second = comm->recv(Buffer::of(&x, 1), 1, 1);
    const absl::Status status = first.wait();
    EXPECT_EQ(second.wait(), status);
    EXPECT_TRUE(second.done());
    EXPECT_EQ(first.wait(), status);
    done.fetch_add(1);
    return status;
  });
  EXPECT_EQ(results[0].code(), StatusCode::kDeadlineExceeded) << results[0];
}

TEST_P(CommErrorConformance, ARankThatIsGoneIsNamedLongBeforeTheDeadline) {
  const absl::Time begin = absl::Now();
  const std::vector<absl::Status> results = run(3, [&](const auto& comm) -> absl::Status {
    SHARDWEAVE_RETURN_IF_ERROR(comm->barrier().wait());
    if (comm->rank() == 1) return absl::OkStatus();  // drops the communicator
    return sum_one(*comm);
  });
  EXPECT_LT(absl::Now() - begin, absl::Seconds(20));
  EXPECT_TRUE(results[1].ok()) << results[1];
  for (int rank : {0, 2}) expect_error(results[rank], StatusCode::kUnavailable, {"rank 1"});
}

// The others may still be reading what it has sent.
TEST_P(CommErrorConformance, ARankMayLeaveWhenAllThatItOwesIsOnItsWay) {
  for (int round = 0; round < 3; ++round) {
    const std::vector<absl::Status> results = run(3, [](const auto& comm) -> absl::Status {
      Values data(DType::kF32, 200'000,
                  [&](int64_t i) { return comm->rank() == 2 ? i % 1000 : -1; });
      SHARDWEAVE_RETURN_IF_ERROR(comm->broadcast(data.buffer(), 2).wait());
      EXPECT_EQ(data, Values(DType::kF32, 200'000, [](int64_t i) { return i % 1000; }));
      return absl::OkStatus();
    });
    for (const absl::Status& status : results) EXPECT_TRUE(status.ok()) << status;
  }
}

// It has sent its message, which is all that the others want of it.
TEST_P(CommErrorConformance, ARankThatHasLeftDoesNotBreakItsGroup) {
  const std::vector<absl::Status> results = run(3, [](const auto& comm) -> absl::Status {
    SHARDWEAVE_RETURN_IF_ERROR(comm->barrier().wait());
    Values data(DType::kF32, 1'500'000, [&](int64_t i) { return comm->rank() * 10 + i % 7; });
    float word = 7;
    if (comm->rank() == 2) return comm->send(Buffer::of(&word, 1), 0).wait();
    Work from_two;
    if (comm->rank() == 0) from_two = comm->recv(Buffer::of(&word, 1), 2);
    Values got(DType::kF32, 1'500'000);
    for (int round = 0; round < 3; ++round) {
      Work recv = comm->recv(got.buffer(), 1 - comm->rank());
      SHARDWEAVE_RETURN_IF_ERROR(comm->send(data.buffer(), 1 - comm->rank()).wait());
      SHARDWEAVE_RETURN_IF_ERROR(recv.wait());
    }
    const int other = 1 - comm->rank();
    EXPECT_EQ(got, Values(DType::kF32, 1'500'000,
                          [&](int64_t i) { return int64_t{10} * other + i % 7; }));
    return from_two.wait();
  });
  for (const absl::Status& status : results) EXPECT_TRUE(status.ok()) << status;
}

// 3. Ranks that give up.

TEST_P(CommErrorConformance, AbortReachesThoseWhoWaitAndThoseWhoComeLater) {
  const absl::Time begin = absl::Now();
  const std::vector<absl::Status> results = run(3, [&](const auto& comm) -> absl::Status {
    if (comm->rank() == 1) {
      absl::SleepFor(absl::Milliseconds(50));
      comm->abort(absl::DataLossError("bad batch"));
    }
    if (comm->rank() == 2) absl::SleepFor(absl::Milliseconds(300));
    const absl::Status status = sum_one(*comm);
    comm->abort(absl::InternalError("too late"));
    EXPECT_EQ(comm->health(), status);
    return status;
  });
  EXPECT_LT(absl::Now() - begin, absl::Seconds(20));
  for (const absl::Status& status : results) {
    expect_error(status, StatusCode::kAborted, {"rank 1", "bad batch"});
  }
}

TEST_P(CommErrorConformance, AbortReachesSubgroups) {
  const std::vector<absl::Status> results = run(2, [](const auto& comm) -> absl::Status {
    auto group = comm->subgroup({1, 0}, "turned");
    if (!group.ok()) return group.status();
    SHARDWEAVE_RETURN_IF_ERROR((*group)->barrier().wait());
    if (comm->rank() == 1) {
      comm->abort(absl::DataLossError("bad batch"));
      return absl::OkStatus();
    }
    return (*group)->barrier().wait();
  });
  expect_error(results[0], StatusCode::kAborted, {"bad batch", "turned"});
}

// The others are about to make a group with the rank that has given up, or has left.
TEST_P(CommErrorConformance, WhoeverMakesAGroupLearnsThatARankWillNotCome) {
  for (const bool aborts : {true, false}) {
    SCOPED_TRACE(aborts ? "aborts" : "leaves");
    const absl::Time begin = absl::Now();
    const std::vector<absl::Status> results = run(
        3,
        [&](const auto& comm) -> absl::Status {
          SHARDWEAVE_RETURN_IF_ERROR(comm->barrier().wait());
          if (comm->rank() == 1) {
            absl::SleepFor(absl::Milliseconds(200));
            if (aborts) comm->abort(absl::DataLossError("bad batch"));
            return absl::OkStatus();
          }
          auto group = comm->subgroup({0, 1, 2}, "late");
          if (!group.ok()) return group.status();
          return (*group)->barrier().wait();
        },
        absl::Seconds(30));
    EXPECT_LT(absl::Now() - begin, absl::Seconds(5));
    for (int rank : {0, 2}) {
      expect_error(results[rank], aborts ? StatusCode::kAborted : StatusCode::kUnavailable,
                   {"late", "rank 1"});
      if (aborts) expect_error(results[rank], StatusCode::kAborted, {"bad batch"});
    }
  }
}

// A rank that comes after another one's time-out is not left to wait for it: the group is broken.
TEST_P(CommErrorConformance, WhoeverComesTooLateForAGroupLearnsThat) {
  absl::Duration waited;
  const std::vector<absl::Status> results = run(
      2,
      [&](const auto& comm) -> absl::Status {
        SHARDWEAVE_RETURN_IF_ERROR(comm->barrier().wait());
        if (comm->rank() == 1) absl::SleepFor(absl::Milliseconds(1500));
        const absl::Time begin = absl::Now();
        const auto group = comm->subgroup({0, 1}, "late");
        if (!group.ok()) {
          EXPECT_FALSE(comm->health().ok());
        }
        // Where it is there before the others have come, they are waited for here.
        const absl::Status status = group.ok() ? (*group)->barrier().wait() : group.status();
        if (comm->rank() == 1) waited = absl::Now() - begin;
        return status;
      },
      absl::Seconds(1));
  EXPECT_FALSE(results[0].ok());
  EXPECT_FALSE(results[1].ok());
  EXPECT_LT(waited, absl::Milliseconds(700));
}

// 4. Arguments that are wrong on their own.

TEST_P(CommErrorConformance, BadArgumentsAreRefusedAndHarmless) {
  const std::vector<absl::Status> results = run(2, [](const auto& comm) -> absl::Status {
    float x[8] = {};
    double y[4] = {};
    const auto f = [&](int64_t count) { return Buffer::of(x, count); };
    const auto tail = [&](int64_t count) { return Buffer::of(x + 4, count); };
    const auto as = [&](DType dtype, int64_t count) { return Buffer{x, count, dtype, {}}; };
    const Buffer on_gpu{x, 2, DType::kF32, {DeviceType::kCuda, 1}};
    const auto sum = ReduceOp::kSum;
    const auto refused = [&](const Work& work, std::initializer_list<std::string> parts) {
      EXPECT_TRUE(work.done());
      expect_error(work.wait(), StatusCode::kInvalidArgument, parts);
    };
    refused(comm->all_reduce(f(2), tail(3), sum),
            {"all_reduce on group '", "(rank ", " of 2)", "out has 3 elements, want 2"});
    refused(comm->all_reduce(f(2), Buffer::of(y, 2), sum), {"in is f32 on cpu, out is f64"});
    refused(comm->all_reduce(f(-2), tail(-2), sum), {"negative count, -2"});
    refused(comm->all_reduce(f(INT64_MAX / 2), f(INT64_MAX / 2), sum), {"absurd count"});
    refused(comm->all_reduce(Buffer{nullptr, 3, DType::kF32, {}}, f(3), sum),
            {"in is null and should have 3 elements"});
    refused(comm->all_reduce(f(3), Buffer{nullptr, 3, DType::kF32, {}}, sum), {"out is null"});
    refused(comm->all_reduce(f(3), Buffer::of(x + 1, 3), sum), {"overlap"});
    refused(comm->all_reduce(on_gpu, on_gpu, sum), {"cuda:1", "cannot reach"});
    refused(comm->all_reduce(as(DType::kF8E4M3, 2), as(DType::kF8E4M3, 2), sum),
            {"sum is not defined for f8e4m3"});
    refused(comm->all_reduce(as(DType::kBool, 2), as(DType::kBool, 2), ReduceOp::kAvg),
            {"avg is not defined for bool"});
    refused(
        comm->all_reduce(ConstBuffer(reinterpret_cast<char*>(x) + 1, 2, DType::kF32), tail(2), sum),
        {"not aligned"});
    refused(comm->all_reduce(f(1), f(1), sum, {.timeout = -absl::Seconds(1)}),
            {"negative timeout"});
    refused(comm->all_gather(f(2), tail(3)), {"out has 3 elements, want 2 (ranks) times 2"});
    refused(comm->all_gather(Buffer::of(x + 1, 2), f(4)), {"overlap"});
    refused(comm->all_gather_v(f(2), tail(3), {1, 1, 1}), {"counts has 3 entries for 2 ranks"});
    refused(comm->all_gather_v(f(2), tail(3), {4, -1}), {"[4, -1]", "3 elements of out"});
    refused(comm->all_gather_v(f(2), tail(3), {1, 1}), {"out has 3 elements, want 2"});
    refused(comm->all_gather_v(f(3), tail(4), {2, 2}), {"in has 3 elements, want 2"});
    refused(comm->reduce_scatter(f(3), tail(2), sum),
            {"in has 3 elements, want 2 (ranks) times 2"});
    refused(comm->reduce_scatter_v(f(4), tail(3), {2, 2}, sum), {"out has 3 elements, want 2"});
    refused(comm->all_to_all(f(3), tail(3)), {"in has 3 elements, want 2 (ranks) times 1"});
    refused(comm->all_to_all(f(4), f(4)), {"cannot run in place"});
    refused(comm->all_to_all_v(f(2), {1, 1}, tail(2), {0, 3}), {"counts to receive", "[0, 3]"});
    refused(comm->broadcast(f(2), 2), {"root is 2, the group has 2 ranks"});
    refused(comm->broadcast(f(2), -1), {"root is -1"});
    refused(comm->reduce(f(2), tail(2), sum, 7), {"root is 7"});
    refused(comm->gather(f(2), tail(2), -3), {"root is -3"});
    refused(comm->scatter(f(2), tail(2), 2), {"root is 2"});
    refused(comm->send(f(2), 2), {"peer is 2"});
    refused(comm->recv(f(2), -1), {"peer is -1"});
    refused(comm->recv(f(2), 0, -5), {"message tag is -5"});
    EXPECT_TRUE(comm->health().ok());
    return sum_one(*comm);
  });
  for (const absl::Status& status : results) EXPECT_TRUE(status.ok()) << status;
}

TEST_P(CommErrorConformance, BadSubgroupsAreRefusedAndHarmless) {
  const std::vector<absl::Status> results = run(3, [](const auto& comm) -> absl::Status {
    const auto refused = [&](const std::vector<int64_t>& members, const std::string& part) {
      expect_error(comm->subgroup(members, "g").status(), StatusCode::kInvalidArgument,
                   {"subgroup 'g'", part});
    };
    refused({0, 1, 2, 3}, "member 3 of [0,1,2,3] is not a rank");
    refused({-1, 0, 1, 2}, "member -1");
    refused({0, 1, 2, 0}, "member 0 of [0,1,2,0] is there twice");
    refused({(comm->rank() + 1) % 3}, "only members may call");
    refused({}, "only members may call");
    return sum_one(*comm);
  });
  for (const absl::Status& status : results) EXPECT_TRUE(status.ok()) << status;
}

}  // namespace

// Stderr as a file in memory, which may be read meanwhile.
class CapturedStderr {
 public:
  CapturedStderr() { ::dup2(file_, STDERR_FILENO); }
  ~CapturedStderr() {
    ::dup2(old_, STDERR_FILENO);
    ::close(old_);
    ::close(file_);
  }
  CapturedStderr(const CapturedStderr&) = delete;
  CapturedStderr& operator=(const CapturedStderr&) = delete;

  std::string text() const {
    std::string text(1 << 16, '\0');
    text.resize(std::max<ssize_t>(0, ::pread(file_, text.data(), text.size(), 0)));
    return text;
  }
  void wait_for(const std::string& part) const {
    const absl::Time limit = absl::Now() + absl::Seconds(10);
    while (!absl::StrContains(text(), part) && absl::Now() < limit) {
      absl::SleepFor(absl::Milliseconds(1));
    }
  }

 private:
  const int file_ = ::memfd_create("stderr", MFD_CLOEXEC);
  const int old_ = ::dup(STDERR_FILENO);
};

// Nobody knows what a rank does that does not come; whoever waits for it says so long before its
// deadline.
void expect_late_ranks_are_named(const ConformanceBackend& backend) {
  constexpr absl::Duration kPatience = absl::Milliseconds(50);
  const std::string in_sum =
      "shardweave: rank 0 has waited 50ms for ranks 1, 2 in all_reduce(f32[1], sum) 'loss', #2 of "
      "group 'world'; every rank of the group has to call it\n";
  const std::string in_recv =
      "shardweave: rank 0 (world rank 2) has waited 50ms for rank 1 (world rank 0) in "
      "recv(f32[1], from 1), #1 of group 'pair'; rank 1 has to call send with message tag 7\n";
  const std::string in_send =
      "shardweave: rank 1 (world rank 0) has waited 50ms for rank 0 (world rank 2) in "
      "send(f32[1], to 0), #2 of group 'pair'; rank 0 has to call recv with message tag 8\n";
  const std::string to_itself =
      "shardweave: rank 2 has waited 50ms for rank 2 in send(f32[1], to 2), #1 of group 'world'; "
      "this rank itself has to call recv with message tag 9\n";
  const CapturedStderr errors;
  // It would say it again meanwhile.
  const auto come_late = [&](const std::string& line) {
    errors.wait_for(line);
    absl::SleepFor(3 * kPatience);
  };
  const std::vector<absl::Status> results =
      run_on_threads(backend, 3,
                     [&](const auto& comm) -> absl::Status {
                       SHARDWEAVE_RETURN_IF_ERROR(comm->barrier().wait());
                       if (comm->rank() != 0) come_late(in_sum);
                       SHARDWEAVE_RETURN_IF_ERROR(sum_one(*comm, {.tag = "loss"}));
                       if (comm->rank() == 1) return absl::OkStatus();
                       auto pair = comm->subgroup({2, 0}, "pair");
                       if (!pair.ok()) return pair.status();
                       float x = 1;
                       if (comm->rank() == 0) {
                         come_late(in_recv);
                         SHARDWEAVE_RETURN_IF_ERROR((*pair)->send(Buffer::of(&x, 1), 0, 7).wait());
                         return (*pair)->send(Buffer::of(&x, 1), 0, 8).wait();
                       }
                       SHARDWEAVE_RETURN_IF_ERROR((*pair)->recv(Buffer::of(&x, 1), 1, 7).wait());
                       come_late(in_send);
                       SHARDWEAVE_RETURN_IF_ERROR((*pair)->recv(Buffer::of(&x, 1), 1, 8).wait());
                       // A second thread may wait for what this one has issued, and says nothing more.
                       const Work work = comm->send(Buffer::of(&x, 1), 2, 9);
                       std::thread other([&] { EXPECT_TRUE(work.wait().ok()); });
                       std::thread third([&] { EXPECT_TRUE(work.wait().ok()); });
                       come_late(to_itself);
                       float y = 0;
                       const absl::Status received = comm->recv(Buffer::of(&y, 1), 2, 9).wait();
                       other.join();
                       third.join();
                       return received;
                     },
                     {.timeout = absl::Minutes(1), .patience = kPatience});
  for (const absl::Status& status : results) EXPECT_TRUE(status.ok()) << status;
  const std::string text = errors.text();
  for (const std::string& line : {in_sum, in_recv, in_send, to_itself}) {
    const size_t at = text.find(line);
    EXPECT_NE(at, text.npos) << "want " << line << "in: " << text;
    EXPECT_EQ(text.find(line, at + 1), text.npos) << "once: " << text;
  }
}

void expect_ranks_are_threads(const ConformanceBackend& backend) {
  const auto results = run_on_threads(backend, 3, [](const auto& comm) -> absl::Status {
    EXPECT_TRUE(comm->has_threads());
    const auto group = comm->split(comm->rank() == 2, 0, "group");
    if (!group.ok()) return group.status();
    EXPECT_EQ((*group)->has_threads(), comm->rank() != 2) << "a group of one has no others";
    return absl::OkStatus();
  });
  for (const absl::Status& status : results) EXPECT_TRUE(status.ok()) << status;
}

}  // namespace shardweave
