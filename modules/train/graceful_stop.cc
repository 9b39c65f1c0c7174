#include "shardweave/modules/train/graceful_stop.h"

#include <signal.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "shardweave/comm/buffer.h"
#include "shardweave/comm/str_cat.h"

namespace shardweave {
namespace {

// What a signal handler can reach. Of the one StopSignals that there is.
std::atomic<int> first_signal{0};
std::atomic<bool> is_taken{false};
static_assert(std::atomic<int>::is_always_lock_free);

extern "C" void remember_signal(int signal) {
  int none = 0;
  first_signal.compare_exchange_strong(none, signal);
}

}  // namespace

class StopSignals::Handlers {
 public:
  Handlers() { first_signal = 0; }
  ~Handlers() {
    for (auto old = before_.rbegin(); old != before_.rend(); ++old) {
      ::sigaction(old->first, &old->second, nullptr);
    }
    is_taken = false;
  }
  Handlers(const Handlers&) = delete;
  Handlers& operator=(const Handlers&) = delete;

  absl::Status add(int signal) {
    struct sigaction ours {};
    struct sigaction old {};
    ours.sa_handler = remember_signal;
    ours.sa_flags = SA_RESTART;  // reads and writes go on
    ::sigemptyset(&ours.sa_mask);
    if (::sigaction(signal, &ours, &old) != 0) {
      return absl::InvalidArgumentError(
          str_cat("signal ", signal, " cannot be caught: ", std::strerror(errno)));
    }
    before_.emplace_back(signal, old);
    return absl::OkStatus();
  }

 private:
  std::vector<std::pair<int, struct sigaction>> before_;
};

absl::StatusOr<std::unique_ptr<StopSignals>> StopSignals::create() {
  return create({SIGTERM, SIGUSR1});
}

absl::StatusOr<std::unique_ptr<StopSignals>> StopSignals::create(const std::vector<int>& signals) {
  if (is_taken.exchange(true)) {
    return absl::FailedPreconditionError(
        "there is another StopSignals in this process; wanted one, which all ranks share");
  }
  auto handlers = std::make_unique<Handlers>();
  for (const int signal : signals) {
    if (const absl::Status status = handlers->add(signal); !status.ok()) return status;
  }
  return std::unique_ptr<StopSignals>(new StopSignals(std::move(handlers)));
}

StopSignals::StopSignals(std::unique_ptr<Handlers> handlers) : handlers_(std::move(handlers)) {}
StopSignals::~StopSignals() = default;

int StopSignals::signal() const {
  return first_signal;
}

GracefulStop::GracefulStop(std::shared_ptr<Communicator> comm, const StopSignals* signals,
                           const GracefulStopOptions& options)
    : comm_(std::move(comm)), signals_(signals), options_(options) {}

absl::StatusOr<bool> GracefulStop::step_done() {
  if (options_.every < 1) {
    return absl::InvalidArgumentError(str_cat("every is ", options_.every, "; wanted 1 or more"));
  }
  if (has_stopped_ || ++steps_ % options_.every != 0) return has_stopped_;
  // Above 0: stop; a signal by its number and one more.
  int32_t wish = is_requested_ ? 1 : 0;
  if (signals_ != nullptr && signals_->signal() != 0) wish = signals_->signal() + 1;
  const Buffer wishes = Buffer::of(&wish, 1);
  const absl::Status status =
      comm_->all_reduce(wishes, wishes, ReduceOp::kMax, {.tag = "GracefulStop"}).wait();
  if (!status.ok()) return status;
  has_stopped_ = wish > 0;
  signal_ = has_stopped_ ? wish - 1 : 0;
  return has_stopped_;
}

}  // namespace shardweave
