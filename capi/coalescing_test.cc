// Every order of calls around a coalescing, on two ranks, against a model of the state machine that
// shardweave.h describes.
#include <array>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "shardweave.h"
#include "testing/buffer.h"

namespace {

constexpr int kRanks = 2;
constexpr float kUntouched = -1;

// What a call gave, with its status freed.
swv_code code_of(swv_status* status) {
  const swv_code code = swv_status_code(status);
  swv_status_free(status);
  return code;
}

// One letter is one call: c coalesce, a all-reduce that waits or is collected, w all-reduce with a
// work, b a call with a bad argument, s split, n finish and wait, m finish with a work, f free.
constexpr std::string_view kCalls = "cawbsnmf";

class Program {
 public:
  Program(swv_comm* comm, const std::string& calls) : comm_(comm), calls_(calls) {}

  // Runs all calls; an error says which did what the model does not.
  void run() {
    outs_.fill(kUntouched);
    for (step_ = 0; step_ < calls_.size(); ++step_) call(calls_[step_]);
    for (swv_coalescing* coalescing : all_) swv_coalescing_free(coalescing);
    settle();
    check();
  }

 private:
  enum class State { kIdle, kCollecting, kFinished };

  swv_buffer buffer(float* data) { return cpu_buffer(data, 1, SWV_DTYPE_F32); }

  void expect(swv_code is, swv_code wanted) {
    EXPECT_STREQ(swv_code_name(is), swv_code_name(wanted)) << where();
  }
  std::string where() const { return "call " + std::to_string(step_) + " of " + calls_; }

  // What was collected is there; what was refused never is.
  void settle() {
    for (size_t i : collected_) wanted_[i] = kRanks;
    collected_.clear();
    refused_ = false;
  }
  void check() {
    for (size_t i = 0; i < outs_.size(); ++i) {
      bool pending = false;
      for (size_t c : collected_) pending |= c == i;
      if (pending) continue;
      EXPECT_EQ(outs_[i], wanted_[i]) << "output " << i << ", " << where();
    }
  }

  void call(char what) {
    const swv_buffer in = buffer(&one_), out = buffer(&outs_[step_]);
    const bool collecting = state_ == State::kCollecting;
    swv_coalescing* const current = all_.empty() ? nullptr : all_.back();
    swv_work* work = nullptr;
    switch (what) {
      case 'c': {
        swv_coalescing* made = nullptr;
        expect(code_of(swv_comm_coalesce(comm_, &made)),
               collecting ? SWV_CODE_INVALID_ARGUMENT : SWV_CODE_OK);
        if (made == nullptr) break;
        all_.push_back(made);
        state_ = State::kCollecting;
        break;
      }
      case 'a':
        expect(code_of(swv_comm_all_reduce(comm_, &in, &out, SWV_REDUCE_SUM, nullptr, nullptr)),
               SWV_CODE_OK);
        if (collecting) {
          collected_.push_back(step_);
        } else {
          wanted_[step_] = kRanks;
        }
        break;
      case 'w':
        expect(code_of(swv_comm_all_reduce(comm_, &in, &out, SWV_REDUCE_SUM, nullptr, &work)),
               collecting ? SWV_CODE_INVALID_ARGUMENT : SWV_CODE_OK);
        if (work == nullptr) break;  // and nothing was issued
        expect(code_of(swv_work_wait(work)), SWV_CODE_OK);
        wanted_[step_] = kRanks;
        break;
      case 'b':
        // Refused by the group, and before it comes to that.
        expect(code_of(step_ % 2 == 0 ? swv_comm_broadcast(comm_, &in, 99, nullptr, nullptr)
                                      : swv_comm_reduce(comm_, nullptr, &out, SWV_REDUCE_SUM, 0,
                                                        nullptr, nullptr)),
               SWV_CODE_INVALID_ARGUMENT);
        refused_ |= collecting;
        break;
      case 's': {
        swv_comm* half = nullptr;
        expect(code_of(swv_comm_split(comm_, 0, 0, "same", &half)), SWV_CODE_OK);
        swv_comm_free(half);
        break;
      }
      case 'n':
      case 'm': {
        const swv_code code =
            code_of(swv_coalescing_finish(current, what == 'm' ? &work : nullptr));
        expect(code, !collecting                                    ? SWV_CODE_INVALID_ARGUMENT
                     : refused_ && (what == 'n' || work == nullptr) ? SWV_CODE_INVALID_ARGUMENT
                                                                    : SWV_CODE_OK);
        if (work != nullptr) {
          expect(code_of(swv_work_wait(work)), refused_ ? SWV_CODE_INVALID_ARGUMENT : SWV_CODE_OK);
        }
        // An error of finish comes after all has ended, too.
        if (collecting) {
          state_ = State::kFinished;
          settle();
        }
        break;
      }
      case 'f':
        swv_coalescing_free(current);
        if (current != nullptr) all_.pop_back();
        if (collecting) settle();
        state_ = all_.empty() ? State::kIdle : State::kFinished;
        break;
    }
    swv_work_free(work);
    check();
  }

  swv_comm* const comm_;
  const std::string calls_;
  size_t step_ = 0;
  float one_ = 1;
  std::array<float, 8> outs_;
  std::array<float, 8> wanted_ = {-1, -1, -1, -1, -1, -1, -1, -1};
  State state_ = State::kIdle;
  std::vector<swv_coalescing*> all_;  // the last one is collecting, or none is
  std::vector<size_t> collected_;     // outputs that are not there yet
  bool refused_ = false;              // a call since swv_comm_coalesce
};

swv_status* every_order(void*, swv_world* world) {
  swv_comm* comm = nullptr;
  if (swv_status* status = swv_world_comm(world, &comm)) return status;
  size_t programs = 1;
  for (size_t length = 1; length <= 5; ++length) {
    programs *= kCalls.size();
    for (size_t number = 0; number < programs; ++number) {
      std::string calls;
      for (size_t rest = number; calls.size() < length; rest /= kCalls.size()) {
        calls += kCalls[rest % kCalls.size()];
      }
      Program(comm, calls).run();
      if (testing::Test::HasFailure()) break;
    }
  }
  swv_status* status = swv_comm_health(comm);
  swv_comm_free(comm);
  return status;
}

TEST(CoalescingTest, EveryOrderOfCalls) {
  const int64_t handles = swv_live_handles();
  swv_status* status = swv_run_ranks(kRanks, every_order, nullptr, nullptr);
  EXPECT_EQ(status, nullptr) << swv_status_message(status);
  swv_status_free(status);
  EXPECT_EQ(swv_live_handles(), handles);
}

// The group goes on when its coalescing was freed, aborted or outlived its handle.
swv_status* lives(void*, swv_world* world) {
  float one = 1, sum = 0;
  const swv_buffer in = cpu_buffer(&one, 1, SWV_DTYPE_F32);
  const swv_buffer out = cpu_buffer(&sum, 1, SWV_DTYPE_F32);
  swv_comm* comm = nullptr;
  swv_comm* half = nullptr;
  swv_coalescing* coalescing = nullptr;
  EXPECT_EQ(code_of(swv_world_comm(world, &comm)), SWV_CODE_OK);
  EXPECT_EQ(code_of(swv_comm_split(comm, 0, 0, "half", &half)), SWV_CODE_OK);
  EXPECT_EQ(code_of(swv_comm_coalesce(half, &coalescing)), SWV_CODE_OK);
  EXPECT_EQ(code_of(swv_comm_all_reduce(half, &in, &out, SWV_REDUCE_SUM, nullptr, nullptr)),
            SWV_CODE_OK);
  swv_comm_free(half);
  EXPECT_EQ(code_of(swv_coalescing_finish(coalescing, nullptr)), SWV_CODE_OK);
  EXPECT_EQ(sum, kRanks);
  swv_coalescing_free(coalescing);

  EXPECT_EQ(code_of(swv_comm_split(comm, 0, 0, "aborted", &half)), SWV_CODE_OK);
  EXPECT_EQ(code_of(swv_comm_coalesce(half, &coalescing)), SWV_CODE_OK);
  EXPECT_EQ(code_of(swv_comm_abort(half, "enough")), SWV_CODE_OK);
  EXPECT_EQ(code_of(swv_comm_all_reduce(half, &in, &out, SWV_REDUCE_SUM, nullptr, nullptr)),
            SWV_CODE_ABORTED);
  EXPECT_EQ(code_of(swv_coalescing_finish(coalescing, nullptr)), SWV_CODE_ABORTED);
  swv_coalescing_free(coalescing);
  swv_comm_free(half);
  swv_comm_free(comm);
  return nullptr;
}

TEST(CoalescingTest, OutlivesItsGroupsHandleAndAnAbort) {
  swv_status* status = swv_run_ranks(kRanks, lives, nullptr, nullptr);
  EXPECT_EQ(status, nullptr) << swv_status_message(status);
  swv_status_free(status);
}

// Operators need their results at once, also where their group is collecting.
swv_status* operators(void*, swv_world* world) {
  float one = 1, sum = 0;
  const swv_buffer in = cpu_buffer(&one, 1, SWV_DTYPE_F32);
  const swv_buffer out = cpu_buffer(&sum, 1, SWV_DTYPE_F32);
  const swv_mesh_dim dim = {"x", kRanks};
  const int64_t sizes[] = {3};
  const float data[] = {5, 6, 7};
  float back[3] = {0, 0, 0};
  swv_mesh* mesh = nullptr;
  swv_layout* layout = nullptr;
  swv_comm* comm = nullptr;
  swv_coalescing* coalescing = nullptr;
  swv_tensor *plain = nullptr, *sharded = nullptr, *whole = nullptr;
  EXPECT_EQ(code_of(swv_mesh_create(world, &dim, 1, &mesh)), SWV_CODE_OK);
  EXPECT_EQ(code_of(swv_layout_parse("[S(0)]", &layout)), SWV_CODE_OK);
  EXPECT_EQ(code_of(swv_tensor_from_data(data, sizeof(data), sizes, 1, nullptr, &plain)),
            SWV_CODE_OK);
  EXPECT_EQ(code_of(swv_mesh_comm(mesh, 0, &comm)), SWV_CODE_OK);
  EXPECT_EQ(code_of(swv_comm_coalesce(comm, &coalescing)), SWV_CODE_OK);
  EXPECT_EQ(code_of(swv_comm_all_reduce(comm, &in, &out, SWV_REDUCE_SUM, nullptr, nullptr)),
            SWV_CODE_OK);
  EXPECT_EQ(code_of(swv_tensor_distribute(plain, mesh, layout, nullptr, &sharded)), SWV_CODE_OK);
  EXPECT_EQ(code_of(swv_tensor_full_tensor(sharded, SWV_MODE_NO_GRAD, &whole)), SWV_CODE_OK);
  EXPECT_EQ(code_of(swv_tensor_copy_to_host(whole, back, sizeof(back))), SWV_CODE_OK);
  EXPECT_EQ(back[2], 7);
  EXPECT_EQ(code_of(swv_coalescing_finish(coalescing, nullptr)), SWV_CODE_OK);
  EXPECT_EQ(sum, kRanks);
  swv_tensor_free(whole);
  swv_tensor_free(sharded);
  swv_tensor_free(plain);
  swv_coalescing_free(coalescing);
  swv_comm_free(comm);
  swv_layout_free(layout);
  swv_mesh_free(mesh);
  return nullptr;
}

TEST(CoalescingTest, OperatorsWaitForThemselves) {
  swv_status* status = swv_run_ranks(kRanks, operators, nullptr, nullptr);
  EXPECT_EQ(status, nullptr) << swv_status_message(status);
  swv_status_free(status);
}

}  // namespace
