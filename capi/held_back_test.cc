// A backend that holds back what is coalesced is asked for it at the end, and not before.
#include <memory>
#include <string>

#include "gtest/gtest.h"
#include "shardweave.h"
#include "shardweave/capi/handles.h"
#include "shardweave/comm/backend.h"
#include "testing/buffer.h"

namespace shardweave::capi {
namespace {

// What a program has asked of it.
struct Asked {
  int done = 0;
  int wait = 0;
  int ends = 0;
};

class HoldingBackend : public Backend {
 public:
  explicit HoldingBackend(Asked* asked) : Backend({"all", 0, {0}}), asked_(asked) {}
  std::string_view name() const override { return "holding"; }
  bool implements(OpKind) const override { return true; }
  absl::StatusOr<Ticket> start(const Call&) override { return Ticket{1}; }
  bool done(Ticket) override {
    ++asked_->done;
    return true;
  }
  absl::Status wait(Ticket, Deadline) override {
    ++asked_->wait;
    return absl::OkStatus();
  }
  absl::Status end_coalescing() override {
    ++asked_->ends;
    return absl::OkStatus();
  }
  void abort(const absl::Status&) override {}

 private:
  Asked* const asked_;
};

TEST(HeldBackTest, IsAskedForAtTheEnd) {
  Asked asked;
  swv_comm* comm = make<swv_comm>(Communicator::create(std::make_unique<HoldingBackend>(&asked)));
  swv_coalescing* coalescing = nullptr;
  float in = 1, out = 0;
  const swv_buffer from = cpu_buffer(&in, 1, SWV_DTYPE_F32),
                   to = cpu_buffer(&out, 1, SWV_DTYPE_F32);
  ASSERT_EQ(swv_comm_coalesce(comm, &coalescing), nullptr);
  for (int i = 0; i < 3; ++i) {
    ASSERT_EQ(swv_comm_all_reduce(comm, &from, &to, SWV_REDUCE_SUM, nullptr, nullptr), nullptr);
  }
  EXPECT_EQ(asked.done + asked.wait + asked.ends, 0);
  ASSERT_EQ(swv_coalescing_finish(coalescing, nullptr), nullptr);
  EXPECT_EQ(asked.wait, 3);
  EXPECT_EQ(asked.ends, 1);
  swv_coalescing_free(coalescing);
  swv_comm_free(comm);
}

}  // namespace
}  // namespace shardweave::capi
