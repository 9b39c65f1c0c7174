// What Communicator itself does, whatever the backend; the rest is in the conformance suite.
#include "shardweave/comm/communicator.h"

#include <optional>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace shardweave {
namespace {

struct Seen {
  std::vector<std::string> calls;  // in order
  std::vector<absl::Status> aborts;
  std::vector<int64_t> in_counts, out_counts;  // of the last call
};

// One rank of a group of two, without the other.
class FakeBackend : public Backend {
 public:
  FakeBackend(std::shared_ptr<Seen> seen, bool can_send)
      : Backend({.name = "fake", .rank = 0, .world_ranks = {4, 9}}),
        seen_(std::move(seen)),
        can_send_(can_send) {}

  std::string_view name() const override { return "fake"; }
  bool implements(OpKind op) const override {
    return op == OpKind::kAllReduce || (can_send_ && is_point_to_point(op)) || op == also_;
  }
  absl::StatusOr<Ticket> start(const Call& call) override {
    seen_->calls.push_back(to_string(call));
    seen_->in_counts.assign(call.in_counts.begin(), call.in_counts.end());
    seen_->out_counts.assign(call.out_counts.begin(), call.out_counts.end());
    if (call.tag == "fails") return absl::UnavailableError("rank 1 is gone");
    return call.tag == "pending" ? 5 : kDone;
  }
  bool done(Ticket) override { return done_; }
  absl::Status wait(Ticket ticket, Deadline) override {
    seen_->calls.push_back("wait " + std::to_string(ticket));
    return absl::DeadlineExceededError("rank 1 did not come");
  }
  void begin_coalescing() override { seen_->calls.push_back("begin"); }
  absl::Status end_coalescing() override {
    seen_->calls.push_back("end");
    return absl::OkStatus();
  }
  void abort(const absl::Status& reason) override { seen_->aborts.push_back(reason); }

  bool done_ = false;
  std::optional<OpKind> also_;

 private:
  const std::shared_ptr<Seen> seen_;
  const bool can_send_;
};

class CommunicatorTest : public testing::Test {
 protected:
  std::shared_ptr<Seen> seen = std::make_shared<Seen>();
  FakeBackend* backend = new FakeBackend(seen, true);
  std::shared_ptr<Communicator> comm = Communicator::create(std::unique_ptr<Backend>(backend));
  float x = 1;

  Work all_reduce(std::string_view tag) {
    return comm->all_reduce(Buffer::of(&x, 1), Buffer::of(&x, 1), ReduceOp::kSum, {.tag = tag});
  }
};

TEST_F(CommunicatorTest, AnErrorAtIssueBreaksIt) {
  EXPECT_TRUE(all_reduce("fine").wait().ok());
  const absl::Status error = all_reduce("fails").wait();
  EXPECT_EQ(error.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(all_reduce("fine").wait(), error);
  EXPECT_EQ(comm->health(), error);
  EXPECT_EQ(comm->subgroup({0, 1}, "g").status(), error);
  EXPECT_EQ(seen->calls.size(), 2u) << "nothing is started after an error";
  EXPECT_EQ(seen->aborts, std::vector<absl::Status>{error});
}

TEST_F(CommunicatorTest, AnErrorOfWaitBreaksIt) {
  Work work = all_reduce("pending");
  EXPECT_FALSE(work.done());
  const absl::Status error = work.wait();
  EXPECT_EQ(error.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(comm->health(), error);
  comm->abort(absl::InternalError("later"));
  EXPECT_EQ(comm->health(), error);
  EXPECT_EQ(seen->aborts, std::vector<absl::Status>{error});
}

// What waits for itself ends never, so it does not begin.
TEST_F(CommunicatorTest, ARankThatBlocksOnItselfIsToldAtOnce) {
  const Buffer b = Buffer::of(&x, 1);
  const auto refused = [&](const Work& work, const char* part) {
    EXPECT_TRUE(work.done());
    EXPECT_EQ(work.wait().code(), absl::StatusCode::kInvalidArgument) << work.wait();
    EXPECT_NE(work.wait().message().find(part), absl::string_view::npos) << work.wait();
  };
  const CallOptions blocking{.blocking = true};
  refused(comm->send(b, 0, 3, blocking),
          "send on group 'fake' (rank 0 of 2): peer 0 is this rank itself, which cannot call recv "
          "with message tag 3 while it waits here");
  refused(comm->recv(b, 0, 3, blocking), "cannot call send with message tag 3");
  EXPECT_TRUE(seen->calls.empty());
  EXPECT_TRUE(comm->health().ok());

  // Each has an other side once.
  EXPECT_TRUE(comm->recv(b, 0, 3).wait().ok());
  refused(comm->send(b, 0, 4, blocking), "message tag 4");
  EXPECT_TRUE(comm->send(b, 0, 3, blocking).wait().ok());
  refused(comm->send(b, 0, 3, blocking), "message tag 3");
  EXPECT_TRUE(comm->send(b, 0, 3).wait().ok());
  EXPECT_TRUE(comm->recv(b, 0, 3, blocking).wait().ok());
  refused(comm->recv(b, 0, 3, blocking), "message tag 3");
  EXPECT_EQ(seen->calls.size(), 4u);
  EXPECT_TRUE(comm->send(b, 1, 3, blocking).wait().ok()) << "another rank may come";
}

// A backend may have only the collectives of parts that differ; equal ones do not differ.
TEST_F(CommunicatorTest, EqualPartsGoByTheFormWithCounts) {
  using Counts = std::vector<int64_t>;
  std::vector<float> two(2), four(4), received(4);
  const Buffer part = Buffer::of(two.data(), 2), all = Buffer::of(four.data(), 4);
  const Buffer parts = Buffer::of(received.data(), 4);
  // What the backend was asked for.
  const auto asked = [&](Work work) {
    EXPECT_TRUE(work.wait().ok()) << work.wait();
    return seen->calls.back().substr(0, seen->calls.back().find('('));
  };
  backend->also_ = OpKind::kAllGatherV;
  EXPECT_EQ(asked(comm->all_gather(part, all)), "all_gather_v");
  EXPECT_EQ(seen->in_counts, Counts());
  EXPECT_EQ(seen->out_counts, (Counts{2, 2}));
  backend->also_ = OpKind::kReduceScatterV;
  EXPECT_EQ(asked(comm->reduce_scatter(all, part, ReduceOp::kSum)), "reduce_scatter_v");
  EXPECT_EQ(seen->in_counts, (Counts{2, 2}));
  EXPECT_EQ(seen->out_counts, Counts());
  backend->also_ = OpKind::kAllToAllV;
  EXPECT_EQ(asked(comm->all_to_all(all, parts)), "all_to_all_v");
  EXPECT_EQ(seen->in_counts, (Counts{2, 2}));
  EXPECT_EQ(seen->out_counts, (Counts{2, 2}));
  EXPECT_EQ(asked(comm->scatter(all, part, /*root=*/0)), "all_to_all_v");
  EXPECT_EQ(seen->in_counts, (Counts{2, 2}));
  EXPECT_EQ(seen->out_counts, (Counts{2, 0}));
  EXPECT_EQ(asked(comm->scatter(all, part, /*root=*/1)), "all_to_all_v");
  EXPECT_EQ(seen->in_counts, (Counts{0, 0}));
  EXPECT_EQ(seen->out_counts, (Counts{0, 2}));
  backend->also_ = OpKind::kAllGather;
  EXPECT_EQ(asked(comm->all_gather(part, all)), "all_gather");
  EXPECT_EQ(seen->out_counts, Counts());
}

TEST_F(CommunicatorTest, DoneFindsErrorsToo) {
  Work work = all_reduce("pending");
  backend->done_ = true;
  EXPECT_TRUE(work.done());
  EXPECT_EQ(comm->health().code(), absl::StatusCode::kDeadlineExceeded);
}

TEST_F(CommunicatorTest, AWorkKeepsItsCommunicatorAlive) {
  Work work = all_reduce("pending");
  comm.reset();
  EXPECT_EQ(work.wait().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(Work().wait(), absl::OkStatus());
  EXPECT_TRUE(Work().done());
}

TEST_F(CommunicatorTest, AbortNamesTheRankInGroupAndWorld) {
  comm->abort(absl::DataLossError("bad batch"));
  const absl::Status health = comm->health();
  EXPECT_EQ(health.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(health.message(),
            "rank 0 of group 'fake' (world rank 4) aborted: DATA_LOSS: bad batch");
}

TEST_F(CommunicatorTest, CoalescedCallsAreBetweenBeginAndEnd) {
  {
    Coalescing group(*comm);
    all_reduce("one");
    comm->send(Buffer::of(&x, 1), 1, 3, {.tag = "two"});
  }
  EXPECT_EQ(seen->calls, (std::vector<std::string>{"begin", "all_reduce(f32[1], sum) 'one'",
                                                   "send(f32[1], to 1) 'two'", "end"}));
}

TEST_F(CommunicatorTest, ACoalescingThatIsLeftWaitsForWhatItCollected) {
  {
    Coalescing group(*comm);
    all_reduce("pending");
  }
  EXPECT_EQ(seen->calls, (std::vector<std::string>{"begin", "all_reduce(f32[1], sum) 'pending'",
                                                   "end", "wait 5"}));
  EXPECT_EQ(comm->health().code(), absl::StatusCode::kDeadlineExceeded);
}

TEST_F(CommunicatorTest, ComposedCallsAreNotHeldBack) {
  {
    Coalescing group(*comm);
    all_reduce("one");
    comm->barrier({.tag = "fails"});
  }
  ASSERT_GE(seen->calls.size(), 5u);
  EXPECT_EQ(seen->calls[2], "end");
  EXPECT_EQ(seen->calls[3].substr(0, 4), "recv");
}

TEST_F(CommunicatorTest, WhatCannotBeComposedIsUnimplementedAndHarmless) {
  comm = Communicator::create(std::make_unique<FakeBackend>(seen, false));
  for (const Work& work : {comm->barrier(), comm->send(Buffer::of(&x, 1), 1)}) {
    EXPECT_EQ(work.wait().code(), absl::StatusCode::kUnimplemented);
    EXPECT_NE(work.wait().message().find("not by backend fake"), std::string::npos) << work.wait();
  }
  EXPECT_TRUE(all_reduce("fine").wait().ok());
  const absl::Status status = comm->subgroup({1, 0}, "turned").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_NE(status.message().find("'turned' of 'fake'"), std::string::npos) << status;
}

TEST_F(CommunicatorTest, CollectivesAndMessagesAreNumberedApart) {
  comm->send(Buffer::of(&x, 1), 1).wait().IgnoreError();
  all_reduce("a").wait().IgnoreError();
  all_reduce("b").wait().IgnoreError();
  const std::string record = comm->flight_recorder().to_json();
  EXPECT_NE(record.find(R"("operation":"send","peer":1,"sequence":1)"), std::string::npos)
      << record;
  EXPECT_NE(record.find(R"("operation":"all_reduce","sequence":2)"), std::string::npos) << record;
}

TEST(CallTest, FingerprintsAreComparedWhereBothSidesHaveOne) {
  const auto by = [](uint64_t fingerprint, OpKind op = OpKind::kAllReduce) {
    return signature_of({.op = op, .sequence = 3, .fingerprint = fingerprint});
  };
  EXPECT_TRUE(is_same_call(by(7), by(7)));
  EXPECT_TRUE(is_same_call(by(0), by(7)));
  EXPECT_TRUE(is_same_call(by(7), by(0)));
  EXPECT_FALSE(is_same_call(by(7), by(8)));
  EXPECT_TRUE(is_same_call(by(7, OpKind::kSend), by(8, OpKind::kSend)));
  const absl::Status status = check_same_call("tp", {by(7), by(7), by(8)});
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(status.message().find("rank 2 called"), std::string::npos) << status;
  EXPECT_NE(status.message().find("about different things"), std::string::npos) << status;
  EXPECT_NE(status.message().find("differs in its shape or layout"), std::string::npos) << status;
}

TEST(CallTest, IsDescribedInOneLine) {
  Call call{.op = OpKind::kReduceScatter, .reduce_op = ReduceOp::kAvg, .sequence = 12};
  call.in.dtype = call.out.dtype = DType::kBF16;
  call.in.count = 14;
  call.out.count = 7;
  call.tag = "gradients";
  EXPECT_EQ(to_string(call), "reduce_scatter(bf16[7], avg) 'gradients'");
  EXPECT_EQ(name_call({.name = "dp", .rank = 1, .world_ranks = {0, 1, 2}}, call),
            "reduce_scatter #12 'gradients' of group 'dp' (rank 1 of 3)");
}

TEST(CallTest, SignaturesThatDifferOnlyInNumberAreToldApart) {
  std::vector<CallSignature> signatures(3, signature_of({.op = OpKind::kBarrier, .sequence = 4}));
  EXPECT_TRUE(check_same_call("dp", signatures).ok());
  signatures[2].sequence = 5;
  const absl::Status status = check_same_call("dp", signatures);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(
      status.message(),
      "ranks of group 'dp' called different things as collective #4: rank 0 called barrier(), "
      "rank 2 called barrier(): these are number 4 and 5");
}

}  // namespace
}  // namespace shardweave
