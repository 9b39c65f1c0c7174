// Every order of calls around a group that collects, a group that is split from it meanwhile, works
// that outlive the handles they came from, and an abort; on two ranks, against a model of the state
// machine that shardweave.h describes. (Refused arguments and works in the middle: coalescing_test.)
#include <array>
#include <deque>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "shardweave.h"
#include "testing/buffer.h"

namespace {

constexpr int kRanks = 2;

swv_code code_of(swv_status* status) {
  const swv_code code = swv_status_code(status);
  swv_status_free(status);
  return code;
}

// One letter is one call. Of the group: c coalesce, a all-reduce, n finish and wait, m finish with a
// work that is kept, f free the coalescing, h go on with another handle, x abort. Of kept works: q
// wait for the oldest, z free it without. s splits a group off; of that one: k all-reduce, K
// coalesce, N finish and wait, F free.
constexpr std::string_view kCalls = "canmfhxqzskKNF";

// What a call may give: an abort may come before or after what was under way.
struct Codes {
  bool ok = true;
  bool aborted = false;
};

// A group as the model sees it, and what the program holds of it.
struct Group {
  enum class State { kIdle, kCollecting, kFinished };

  swv_comm* comm = nullptr;
  swv_coalescing* coalescing = nullptr;
  State state = State::kIdle;
  bool broken = false;
  std::vector<size_t> collected;  // outputs that are under way
  bool late = false;              // something was collected when the group was broken
};

struct Kept {
  swv_work* work;
  std::vector<size_t> outputs;
  Codes codes;
};

class Program {
 public:
  Program(swv_comm* control, std::string calls, size_t number)
      : control_(control), calls_(std::move(calls)), number_(number), outs_(calls_.size(), -1) {}

  void run() {
    expect(swv_comm_split(control_, 0, 0, "group", &group_.comm), {});
    for (step_ = 0; step_ < calls_.size(); ++step_) call(calls_[step_]);
    // A group that is freed with something under way has left; this one has done its part. What was
    // freed without a wait is done then, too.
    free(group_);
    expect(swv_comm_barrier(group_.comm, nullptr, nullptr),
           {.ok = !group_.broken, .aborted = group_.broken});
    if (!group_.broken) {
      expect_there(unseen_);
      for (const Kept& kept : kept_) expect_there(kept.outputs);
    }
    if (child_.comm != nullptr && !child_.broken) {
      free(child_);
      expect(swv_comm_barrier(child_.comm, nullptr, nullptr), {});
    }
    // Both may be further, and neither has freed anything.
    expect(swv_comm_barrier(control_, nullptr, nullptr), {});
    // Handles end in any order.
    for (size_t i = 0; i < 3; ++i) {
      switch ((number_ + i) % 3) {
        case 0:
          for (const Kept& kept : kept_) swv_work_free(kept.work);
          break;
        case 1:
          swv_comm_free(child_.comm);
          swv_comm_free(group_.comm);
          break;
        default:
          swv_coalescing_free(group_.coalescing);
          swv_coalescing_free(child_.coalescing);
      }
    }
    expect(swv_comm_barrier(control_, nullptr, nullptr), {});
  }

 private:
  swv_buffer buffer(float* data) { return cpu_buffer(data, 1, SWV_DTYPE_F32); }

  bool expect(swv_status* status, Codes wanted) {
    const std::string message = swv_status_message(status);
    const swv_code is = code_of(status);
    EXPECT_TRUE((is == SWV_CODE_OK && wanted.ok) || (is == SWV_CODE_ABORTED && wanted.aborted))
        << swv_code_name(is) << " " << message << ": " << where();
    return is == SWV_CODE_OK;
  }
  void expect_refused(swv_status* status) {
    EXPECT_STREQ(swv_code_name(code_of(status)), "INVALID_ARGUMENT") << where();
  }
  std::string where() const { return "call " + std::to_string(step_) + " of " + calls_; }
  void expect_there(const std::vector<size_t>& outputs) {
    for (size_t i : outputs) EXPECT_EQ(outs_[i], kRanks) << "output " << i << ", " << where();
  }
  // Of what is collected.
  static Codes codes_of(const Group& group) {
    return {.ok = !group.late, .aborted = group.broken && (group.late || !group.collected.empty())};
  }

  void coalesce(Group& group) {
    swv_coalescing* made = nullptr;
    if (group.state == Group::State::kCollecting) {
      return expect_refused(swv_comm_coalesce(group.comm, &made));
    }
    expect(swv_comm_coalesce(group.comm, &made), {});
    swv_coalescing_free(group.coalescing);  // which only frees
    group.coalescing = made;
    group.state = Group::State::kCollecting;
    group.collected.clear();
    group.late = false;
  }
  void all_reduce(Group& group) {
    const swv_buffer in = buffer(&one_), out = buffer(&outs_[step_]);
    swv_status* const status =
        swv_comm_all_reduce(group.comm, &in, &out, SWV_REDUCE_SUM, nullptr, nullptr);
    const bool ok = expect(status, {.ok = !group.broken, .aborted = group.broken});
    if (group.state == Group::State::kCollecting) {
      group.collected.push_back(step_);
      group.late |= group.broken;
    } else if (ok) {
      expect_there({step_});
    }
  }
  void finish(Group& group, bool keep) {
    swv_work* work = nullptr;
    swv_status* const status = swv_coalescing_finish(group.coalescing, keep ? &work : nullptr);
    if (group.state != Group::State::kCollecting) return expect_refused(status);
    const Codes codes = codes_of(group);
    if (!keep) {
      if (expect(status, codes)) expect_there(group.collected);
    } else if (expect(status, {.ok = true, .aborted = codes.aborted})) {
      // One that has failed already says so at once.
      kept_.push_back({work, group.collected, codes});
    }
    group.state = Group::State::kFinished;
  }
  void free(Group& group) {
    swv_coalescing_free(group.coalescing);
    if (group.state == Group::State::kCollecting && !group.broken) expect_there(group.collected);
    group.coalescing = nullptr;
    group.state = Group::State::kIdle;
  }
  void split() {
    swv_comm* made = nullptr;
    if (!expect(swv_comm_split(group_.comm, 0, 0, "child", &made),
                {.ok = !group_.broken, .aborted = group_.broken})) {
      // Its message was the coalescing's, too.
      group_.late |= group_.state == Group::State::kCollecting;
      return;
    }
    swv_comm_free(child_.comm);
    free(child_);
    child_ = {};
    child_.comm = made;
  }
  void abort() {
    // Both have come here, and neither goes on before both are broken.
    expect(swv_comm_barrier(control_, nullptr, nullptr), {});
    expect(swv_comm_abort(group_.comm, "enough"), {});
    expect(swv_comm_barrier(control_, nullptr, nullptr), {});
    group_.broken = true;
    if (child_.comm != nullptr) child_.broken = true;
    for (Kept& kept : kept_) kept.codes.aborted = true;
  }
  void share() {
    swv_comm* other = nullptr;
    expect(swv_comm_share(group_.comm, &other), {});
    swv_comm_free(group_.comm);
    group_.comm = other;
  }
  void wait_oldest() {
    if (kept_.empty()) return;
    const Kept kept = kept_.front();
    kept_.pop_front();
    // Any number of times: the same answer.
    const bool ok = expect(swv_work_wait(kept.work), kept.codes);
    expect(swv_work_wait(kept.work), {.ok = ok, .aborted = !ok});
    swv_bool done = 0;
    expect(swv_work_is_done(kept.work, &done), {});
    EXPECT_EQ(done, 1) << where();
    if (ok) expect_there(kept.outputs);
    swv_work_free(kept.work);
  }

  void call(char what) {
    const bool of_child = what == 'k' || what == 'K' || what == 'N' || what == 'F';
    if (of_child && child_.comm == nullptr) return;
    switch (what) {
      case 'c':
        return coalesce(group_);
      case 'a':
        return all_reduce(group_);
      case 'n':
      case 'm':
        return finish(group_, what == 'm');
      case 'f':
        return free(group_);
      case 'h':
        return share();
      case 'x':
        return abort();
      case 'q':
        return wait_oldest();
      case 'z':
        if (kept_.empty()) return;
        swv_work_free(kept_.front().work);
        unseen_.insert(unseen_.end(), kept_.front().outputs.begin(), kept_.front().outputs.end());
        return kept_.pop_front();
      case 's':
        return split();
      case 'k':
        return all_reduce(child_);
      case 'K':
        return coalesce(child_);
      case 'N':
        return finish(child_, false);
      default:
        return free(child_);
    }
  }

  swv_comm* const control_;
  const std::string calls_;
  const size_t number_;
  size_t step_ = 0;
  float one_ = 1;
  std::vector<float> outs_;
  Group group_;
  Group child_;
  std::deque<Kept> kept_;
  std::vector<size_t> unseen_;  // outputs of works that were freed without a wait
};

swv_status* every_order(void*, swv_world* world) {
  swv_comm* control = nullptr;
  if (swv_status* status = swv_world_comm(world, &control)) return status;
  // Memory is in use until its operation is done, which nobody may have waited for.
  std::deque<Program> all;
  size_t programs = 1;
  for (size_t length = 1; length <= 4; ++length) {
    programs *= kCalls.size();
    for (size_t number = 0; number < programs; ++number) {
      std::string calls;
      for (size_t rest = number; calls.size() < length; rest /= kCalls.size()) {
        calls += kCalls[rest % kCalls.size()];
      }
      all.emplace_back(control, calls, number).run();
      if (testing::Test::HasFailure()) {
        swv_comm_free(control);
        return swv_status_new(SWV_CODE_CANCELLED, "it has failed");
      }
    }
  }
  swv_status* status = swv_comm_health(control);
  swv_comm_free(control);
  return status;
}

TEST(OrdersTest, GroupsWorksAndAborts) {
  const int64_t handles = swv_live_handles();
  swv_status* status = swv_run_ranks(kRanks, every_order, nullptr, nullptr);
  EXPECT_EQ(status, nullptr) << swv_status_message(status);
  swv_status_free(status);
  EXPECT_EQ(swv_live_handles(), handles);
}

}  // namespace
