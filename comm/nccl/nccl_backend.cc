#include "shardweave/comm/nccl/nccl_backend.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "shardweave/comm/nccl/bootstrap.h"
#include "shardweave/comm/nccl/collectives.h"
#include "shardweave/comm/nccl/lane.h"
#include "shardweave/comm/nccl/library.h"
#include "shardweave/comm/nccl/queue.h"
#include "shardweave/comm/str_cat.h"

namespace shardweave {
namespace nccl_internal {
namespace {

using Clock = std::chrono::steady_clock;

// Whoever waits on the host stays awake for a moment, then looks from time to time.
constexpr auto kAwake = std::chrono::microseconds(50);
constexpr auto kLookEvery = std::chrono::microseconds(100);

// For what is under way on the device to end, after an abort or at the end of a group.
constexpr auto kGrace = std::chrono::seconds(5);

class NcclBackend : public Backend {
 public:
  NcclBackend(GroupInfo group, int device, NcclConnection connection,
              std::shared_ptr<Communicator> names)
      : Backend(std::move(group)),
        device_(device),
        library_(connection.library),
        reason_(std::move(connection.reason)),
        names_(std::move(names)) {
    queues_.push_back(std::make_unique<Queue>(library_, std::move(connection.lane), this->group()));
  }

  ~NcclBackend() override {
    leave().IgnoreError();
    const std::lock_guard lock(mutex_);
    const CurrentDevice on(*library_, device_);
    const Deadline limit = Clock::now() + kGrace;
    for (const std::unique_ptr<Queue>& queue : queues_) queue->lane().close(limit);
    drain(limit);
    for (const auto& [ticket, operation] : operations_) {
      if (operation.end != nullptr) library_->cudaEventDestroy(operation.end);
    }
    for (const ToSelf& message : to_self_) library_->cudaEventDestroy(message.ready);
    for (CudaEvent event : free_events_) library_->cudaEventDestroy(event);
    queues_.clear();
    lane_to_self_.reset();
  }

  // What NCCL has not taken is given up.
  absl::Status leave() override {
    std::unique_lock lock(mutex_);
    const CurrentDevice on(*library_, device_);
    const Deadline limit = Clock::now() + kGrace;
    for (const auto& [ticket, operation] : operations_) {
      const Deadline until = std::min(limit, operation.deadline);
      while (reason_->get().ok() && operation.end != nullptr && operation.captured_on == nullptr &&
             library_->cudaEventQuery(operation.end) == kCudaErrorNotReady &&
             Clock::now() < until) {
        std::this_thread::sleep_for(kLookEvery);
      }
    }
    const bool is_pending =
        !reason_->get().ok() ||
        std::any_of(operations_.begin(), operations_.end(), [&](const auto& operation) {
          if (operation.second.end == nullptr) return true;
          return operation.second.captured_on == nullptr &&
                 library_->cudaEventQuery(operation.second.end) != kCudaSuccess;
        });
    if (!is_pending) return absl::OkStatus();
    reason_->set(absl::AbortedError("this rank has left the group"));
    abort_all(lock);
    return reason_->get();
  }

  std::string_view name() const override { return "nccl"; }
  bool supports(DeviceType type) const override { return type == DeviceType::kCuda; }
  absl::Status check_device(Device device) const override {
    return check_device_is(device, device_);
  }
  bool compares_calls() const override { return false; }
  bool implements(OpKind op) const override { return op != OpKind::kBarrier; }
  bool can_reduce(DType dtype, ReduceOp op) const override { return has_reduction(dtype, op); }

  absl::StatusOr<Ticket> start(const Call& call) override {
    const std::lock_guard lock(mutex_);
    if (absl::Status status = reason_->get(); !status.ok()) return status;
    const CurrentDevice on(*library_, device_);
    const absl::StatusOr<Ticket> ticket = !on.status().ok() ? on.status()
                                          : is_point_to_point(call.op) && call.peer == group().rank
                                              ? start_to_self(call)
                                              : begin(call);
    if (!ticket.ok()) reason_->set(ticket.status());
    return ticket;
  }

  bool done(Ticket ticket) override {
    const std::lock_guard lock(mutex_);
    return !is_under_way(ticket);
  }

  absl::Status wait(Ticket ticket, Deadline deadline) override {
    std::unique_lock lock(mutex_);
    end_group_of(ticket);
    bool captured = false;
    look_until(lock, ticket, deadline, [&](const Operation& operation) {
      return captured = operation.captured_on != nullptr;
    });
    if (captured) {
      return absl::FailedPreconditionError(
          "the host waits for it, but it is being captured: it runs when its graph is replayed");
    }
    if (!operations_.contains(ticket)) return absl::OkStatus();
    // The device touches no memory any more.
    abort_all(lock);
    lock.unlock();
    drain(Clock::now() + kGrace);
    return reason_->get();
  }

  absl::Status wait_on(Ticket ticket, DeviceStream stream) override {
    std::unique_lock lock(mutex_);
    end_group_of(ticket);
    if (const auto found = operations_.find(ticket); found != operations_.end()) {
      look_until(lock, ticket, found->second.deadline,
                 [](const Operation& operation) { return operation.end != nullptr; });
    }
    if (absl::Status status = reason_->get(); !status.ok()) return status;
    const auto found = operations_.find(ticket);
    if (found == operations_.end()) return absl::OkStatus();
    const CurrentDevice on(*library_, device_);
    if (!on.status().ok()) return on.status();
    return library_->check_cuda(
        "cudaStreamWaitEvent", library_->cudaStreamWaitEvent(static_cast<CudaStream>(stream.handle),
                                                             found->second.end, 0));
  }

  absl::Status copy_to_host(void* host, const ConstBuffer& device, DeviceStream stream) override {
    return library_->copy(device_, host, device.data, device.bytes(), kCudaMemcpyDeviceToHost,
                          stream);
  }
  absl::Status copy_to_device(const Buffer& device, const void* host,
                              DeviceStream stream) override {
    return library_->copy(device_, device.data, host, device.bytes(), kCudaMemcpyHostToDevice,
                          stream);
  }

  void begin_coalescing() override {
    const std::lock_guard lock(mutex_);
    coalescing_ = true;
    open_group_ = 0;
  }
  absl::Status end_coalescing() override {
    const std::lock_guard lock(mutex_);
    coalescing_ = false;
    open_group_ = 0;
    if (absl::Status status = reason_->get(); !status.ok()) return status;
    const CurrentDevice on(*library_, device_);
    absl::Status status = on.status();
    if (status.ok()) status = advance();
    if (!status.ok()) reason_->set(status);
    return status;
  }

  // Lets go of whoever settles first.
  void abort(const absl::Status& reason) override {
    reason_->set(reason);
    std::unique_lock lock(mutex_);
    abort_all(lock);
  }

 private:
  struct Operation {
    CudaEvent end = nullptr;  // null: NCCL has not taken it, or it has only one side
    // The lane's, into whose graph it goes: it runs when that is replayed, if ever, and is over when
    // the capture is. Null: it runs.
    CudaStream captured_on = nullptr;
    Deadline deadline = Deadline::max();
    bool to_itself = false;
    bool sends = false;  // of a message to itself, as is
    int message_tag = 0;
    uint64_t group = 0;
  };
  struct ToSelf {
    Ticket ticket;
    Call call;
    CudaEvent ready;
  };

  // 1. Starting, with mutex_ and the device.

  // Where the operation goes: with all collectives, or with the messages to or from that rank.
  absl::StatusOr<Queue*> queue_of(const Call& call) {
    if (!is_point_to_point(call.op)) return queues_[0].get();
    Queue*& queue = pairs_[{call.op, call.peer}];
    if (queue == nullptr) {
      auto lane = std::make_unique<Lane>(library_, [reason = reason_] { return reason->get(); });
      if (absl::Status status = lane->open(); !status.ok()) return status;
      queues_.push_back(std::make_unique<Queue>(library_, std::move(lane), names_, call.peer,
                                                call.op == OpKind::kSend));
      queue = queues_.back().get();
    }
    return queue;
  }

  absl::StatusOr<Ticket> begin(const Call& call) {
    const absl::StatusOr<Queue*> queue = queue_of(call);
    if (!queue.ok()) return queue.status();
    const Ticket ticket = ++last_ticket_;
    operations_[ticket] = {
        .captured_on = is_captured(call.stream) ? (*queue)->lane().stream() : nullptr,
        .deadline = call.deadline,
        .group = call.group};
    if (coalescing_ && call.group != 0) open_group_ = call.group;
    absl::Status status = (*queue)->add(ticket, call);
    if (status.ok()) status = advance();
    if (!status.ok()) return status;
    return ticket;
  }

  // Whether what is put on a stream goes into a graph, and does not run.
  bool is_captured(DeviceStream stream) const {
    int state = kCudaStreamCaptureStatusNone;
    const int error =
        library_->cudaStreamIsCapturing(static_cast<CudaStream>(stream.handle), &state);
    return error == kCudaSuccess && state != kCudaStreamCaptureStatusNone;
  }

  // Gives NCCL what it takes now.
  absl::Status advance() {
    absl::Status first_error;
    for (const std::unique_ptr<Queue>& queue : queues_) {
      first_error.Update(queue->advance(open_group_, [&](Ticket ticket, CudaStream stream) {
        return end_with_event(ticket, stream);
      }));
    }
    return first_error;
  }

  // Whoever waits for an operation has no more to add to its group.
  void end_group_of(Ticket ticket) {
    const auto found = operations_.find(ticket);
    if (found != operations_.end() && found->second.group == open_group_) open_group_ = 0;
  }

  absl::StatusOr<CudaEvent> new_event() {
    if (!free_events_.empty()) {
      CudaEvent event = free_events_.back();
      free_events_.pop_back();
      return event;
    }
    CudaEvent event = nullptr;
    absl::Status status =
        library_->check_cuda("cudaEventCreateWithFlags",
                             library_->cudaEventCreateWithFlags(&event, kCudaEventDisableTiming));
    if (!status.ok()) return status;
    return event;
  }

  absl::Status end_with_event(Ticket ticket, CudaStream stream) {
    const absl::StatusOr<CudaEvent> event = new_event();
    if (!event.ok()) return event.status();
    operations_[ticket].end = *event;
    return library_->check_cuda("cudaEventRecord", library_->cudaEventRecord(*event, stream));
  }

  // Not that of collectives: what NCCL has not taken yet comes there, which the copies need not wait for
  // and which may wait for them.
  absl::Status open_lane_to_self() {
    if (lane_to_self_ != nullptr) return absl::OkStatus();
    auto lane = std::make_unique<Lane>(library_, [reason = reason_] { return reason->get(); });
    absl::Status status = lane->open();
    if (status.ok()) lane_to_self_ = std::move(lane);
    return status;
  }

  // NCCL sends nothing to itself but within one group.
  absl::StatusOr<Ticket> start_to_self(const Call& call) {
    const bool sends = call.op == OpKind::kSend;
    const Ticket ticket = ++last_ticket_;
    operations_[ticket] = {.deadline = call.deadline,
                           .to_itself = true,
                           .sends = sends,
                           .message_tag = call.message_tag};
    const absl::StatusOr<CudaEvent> ready = new_event();
    if (!ready.ok()) return ready.status();
    absl::Status status = library_->check_cuda(
        "cudaEventRecord",
        library_->cudaEventRecord(*ready, static_cast<CudaStream>(call.stream.handle)));
    ToSelf mine{ticket, call, *ready};
    mine.call.tag = {};  // a view
    if (status.ok()) status = open_lane_to_self();
    if (!status.ok()) {
      free_events_.push_back(*ready);
      return status;
    }
    const auto other = std::find_if(to_self_.begin(), to_self_.end(), [&](const ToSelf& message) {
      return message.call.op != call.op && message.call.message_tag == call.message_tag;
    });
    if (other == to_self_.end()) {
      to_self_.push_back(mine);
      return ticket;
    }
    const ToSelf before = *other;
    to_self_.erase(other);
    for (const ToSelf* side : {&std::as_const(mine), &before}) free_events_.push_back(side->ready);
    const ToSelf& send = sends ? mine : before;
    const ToSelf& recv = sends ? before : mine;
    if (send.call.in.count != recv.call.out.count || send.call.in.dtype != recv.call.out.dtype) {
      return absl::FailedPreconditionError(
          str_cat("a send and a recv of group '", group().name, "' differ: rank ", group().rank,
                  " called ", to_string(send.call), " and ", to_string(recv.call)));
    }
    const CudaStream stream = lane_to_self_->stream();
    for (const ToSelf* side : {&send, &recv}) {
      if (is_captured(side->call.stream)) operations_[side->ticket].captured_on = stream;
      status.Update(library_->check_cuda("cudaStreamWaitEvent",
                                         library_->cudaStreamWaitEvent(stream, side->ready, 0)));
    }
    if (send.call.in.count > 0 && send.call.in.data != recv.call.out.data) {
      status.Update(library_->check_cuda(
          "cudaMemcpyAsync",
          library_->cudaMemcpyAsync(recv.call.out.data, send.call.in.data, send.call.in.bytes(),
                                    kCudaMemcpyDeviceToDevice, stream)));
    }
    for (const ToSelf* side : {&send, &recv}) {
      if (status.ok()) status = end_with_event(side->ticket, stream);
    }
    if (!status.ok()) return status;
    return ticket;
  }

  // 2. The end, with mutex_.

  // False also after a failure; what has ended well is forgotten.
  bool is_under_way(Ticket ticket) {
    if (!operations_.contains(ticket) || !reason_->get().ok()) return false;
    const CurrentDevice on(*library_, device_);
    absl::Status started = on.status();
    if (started.ok()) started = advance();
    if (!started.ok()) {
      reason_->set(started);
      return false;
    }
    const auto found = operations_.find(ticket);
    if (found->second.end == nullptr) return true;
    const CudaStream captured_on = found->second.captured_on;
    if (captured_on != nullptr && is_captured({captured_on})) return true;
    const int state =
        captured_on != nullptr ? kCudaSuccess : library_->cudaEventQuery(found->second.end);
    if (state == kCudaSuccess) {
      free_events_.push_back(found->second.end);
      operations_.erase(found);
      return false;
    }
    absl::Status status = state == kCudaErrorNotReady
                              ? absl::OkStatus()
                              : library_->check_cuda("cudaEventQuery", state);
    for (const std::unique_ptr<Queue>& queue : queues_) {
      status.Update(queue->lane().asynchronous_error());
    }
    if (status.ok()) return true;
    reason_->set(status);
    return false;
  }

  // While it is under way and not `far_enough`, nothing has failed and the deadline has not passed, which
  // is a failure. Without the mutex while it sleeps.
  template <typename FarEnough>
  void look_until(std::unique_lock<std::mutex>& lock, Ticket ticket, Deadline deadline,
                  const FarEnough& far_enough) {
    const Clock::time_point begin = Clock::now();
    while (is_under_way(ticket)) {
      const Operation& operation = operations_.find(ticket)->second;
      if (far_enough(operation)) return;
      const Clock::time_point now = Clock::now();
      if (now >= deadline) {
        reason_->set(absl::DeadlineExceededError(
            operation.end != nullptr ? "the device has not finished it by the deadline"
            : !operation.to_itself
                ? "NCCL has not begun it by the deadline"
                : str_cat("the deadline has passed; this rank itself has to call ",
                          operation.sends ? "recv" : "send", " with message tag ",
                          operation.message_tag)));
        return;
      }
      lock.unlock();
      if (now - begin < kAwake) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(std::min<Clock::duration>(kLookEvery, deadline - now));
      }
      lock.lock();
    }
  }

  // Each waits for its stream, which may wait for what another one is to abort: so all at once, and
  // without the mutex. NCCL's memory stays as long as there are graphs with its operations, whose end
  // the calling thread may be needed for: kernels end at once, and after a while nobody waits for the
  // rest.
  void abort_all(std::unique_lock<std::mutex>& lock) {
    std::vector<NcclComm> comms;
    for (const std::unique_ptr<Queue>& queue : queues_) {
      if (NcclComm comm = queue->lane().take(); comm != nullptr) comms.push_back(comm);
    }
    lock.unlock();
    struct Aborts {
      std::mutex mutex;
      std::condition_variable done;
      size_t left;
    };
    const auto aborts = std::make_shared<Aborts>();
    aborts->left = comms.size();
    std::vector<std::thread> threads;
    for (NcclComm comm : comms) {
      threads.emplace_back([aborts, comm, library = library_, device = device_] {
        {
          const CurrentDevice on(*library, device);
          library->ncclCommAbort(comm);
        }
        const std::lock_guard done(aborts->mutex);
        --aborts->left;
        aborts->done.notify_all();
      });
    }
    std::unique_lock waiting(aborts->mutex);
    const bool all_ended =
        aborts->done.wait_for(waiting, kGrace, [&] { return aborts->left == 0; });
    waiting.unlock();
    for (std::thread& thread : threads) all_ended ? thread.join() : thread.detach();
    lock.lock();
  }

  // After a failure, when there are no new queues, or alone.
  void drain(Deadline limit) {
    const CurrentDevice on(*library_, device_);
    const auto until_idle = [&](const Lane& lane) {
      while (!lane.is_idle() && Clock::now() < limit) std::this_thread::sleep_for(kLookEvery);
    };
    for (const std::unique_ptr<Queue>& queue : queues_) until_idle(queue->lane());
    if (lane_to_self_ != nullptr) until_idle(*lane_to_self_);
  }

  const int device_;
  const std::shared_ptr<const Library> library_;
  const std::shared_ptr<Reason> reason_;

  std::mutex mutex_;
  // Guarded by mutex_:
  const std::shared_ptr<Communicator> names_;                  // by which pairs of ranks connect
  std::vector<std::unique_ptr<Queue>> queues_;                 // the first is that of collectives
  absl::flat_hash_map<std::pair<OpKind, int>, Queue*> pairs_;  // by send or recv, and peer
  absl::flat_hash_map<Ticket, Operation> operations_;
  Ticket last_ticket_ = 0;
  std::vector<CudaEvent> free_events_;
  bool coalescing_ = false;
  uint64_t open_group_ = 0;  // to which more may come; 0: none
  std::deque<ToSelf> to_self_;
  std::unique_ptr<Lane> lane_to_self_;  // without a communicator; null: there were no such messages
};

}  // namespace
}  // namespace nccl_internal

ConnectDevice connect_nccl(const NcclOptions& options) {
  return [options](const GroupInfo& group, const std::shared_ptr<Communicator>& bootstrap,
                   Deadline deadline) -> absl::StatusOr<std::unique_ptr<Backend>> {
    absl::StatusOr<nccl_internal::NcclConnection> connection =
        nccl_internal::connect_all(options, group, *bootstrap, deadline);
    if (!connection.ok()) return connection.status();
    return std::make_unique<nccl_internal::NcclBackend>(group, options.device,
                                                        *std::move(connection), bootstrap);
  };
}

}  // namespace shardweave
