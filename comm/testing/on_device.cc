#include "shardweave/comm/testing/on_device.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"

namespace shardweave {
namespace {

class OnDevice : public Backend {
 public:
  OnDevice(std::unique_ptr<Backend> backend, std::shared_ptr<TestDevice> device,
           const OnDeviceOptions& options)
      : Backend(backend->group()),
        device_(std::move(device)),
        options_(options),
        to_device_(device_->make_stream()),
        backend_(std::move(backend)) {
    // One for collectives, and for messages up, down and to this rank itself: those of a kind end in
    // order, of different kinds in any.
    for (DeviceStream& stream : to_host_) stream = device_->make_stream();
  }

  std::string_view name() const override { return backend_->name(); }
  bool implements(OpKind op) const override { return backend_->implements(op); }

  absl::StatusOr<Ticket> start(const Call& call) override {
    if (backend_->patience() != patience()) backend_->set_patience(patience());
    const bool on_cpu =
        call.op == OpKind::kBarrier || (options_.every_on_cpu > 0 && !is_point_to_point(call.op) &&
                                        call.sequence % options_.every_on_cpu == 0);
    if (on_cpu) {
      const absl::StatusOr<Ticket> ticket = backend_->start(call);
      if (!ticket.ok() || *ticket == kDone) return ticket;
      return remember({.inner = *ticket});
    }
    // One piece for all that overlaps.
    const std::byte* const in = static_cast<const std::byte*>(call.in.data);
    const std::byte* const out = static_cast<const std::byte*>(call.out.data);
    const bool overlap = in != nullptr && out != nullptr && in < out + call.out.bytes() &&
                         out < in + call.in.bytes();
    Call there = call;
    there.stream = to_device_;
    there.in.device = there.out.device = device_->device();
    const int rank = group().rank;
    const bool to_itself = is_point_to_point(call.op) && call.peer == rank;
    const bool goes_up = (call.op == OpKind::kSend) == (call.peer > rank);
    Pending pending{.stream = to_host_[!is_point_to_point(call.op) ? 0
                                       : to_itself                 ? 3
                                       : goes_up                   ? 1
                                                                   : 2],
                    .out = call.out,
                    .is_there = true,
                    .is_message = is_point_to_point(call.op)};
    const auto place = [&](const std::byte* begin, const std::byte* end) {
      auto* memory = static_cast<std::byte*>(device_->allocate(end - begin));
      pending.memory.push_back(memory);
      // Outputs, too: what is not written must be as it was.
      if (begin != end) device_->copy_to_device(memory, begin, end - begin, to_device_);
      return memory;
    };
    if (overlap) {
      const std::byte* const begin = std::min(in, out);
      std::byte* const memory =
          place(begin, std::max(in + call.in.bytes(), out + call.out.bytes()));
      there.in.data = memory + (in - begin);
      there.out.data = memory + (out - begin);
    } else {
      if (call.in.count > 0) there.in.data = place(in, in + call.in.bytes());
      if (call.out.count > 0) there.out.data = place(out, out + call.out.bytes());
    }
    pending.there = there.out.data;
    const absl::StatusOr<Ticket> ticket = backend_->start(there);
    if (!ticket.ok()) {
      settle(device_->mark(to_device_), Deadline::max());
      for (void* memory : pending.memory) device_->release(memory);
      return ticket;
    }
    pending.inner = *ticket;
    const Ticket mine = remember(std::move(pending));
    // The wait for a message's end may wait for its other side.
    if (!coalescing_ && !is_point_to_point(call.op)) {
      if (absl::Status status = bring_back(mine); !status.ok()) {
        settle(device_->mark(to_device_), Deadline::max());
        return status;
      }
    }
    return mine;
  }

  bool done(Ticket ticket) override {
    Pending pending;
    if (!find(ticket, &pending)) return true;
    if (pending.inner != kDone && !backend_->done(pending.inner)) return false;
    if (!pending.is_there) return true;
    return !bring_back(ticket).ok() || (find(ticket, &pending), device_->has_reached(pending.mark));
  }

  absl::Status wait(Ticket ticket, Deadline deadline) override {
    Pending pending;
    if (!find(ticket, &pending)) return absl::OkStatus();
    absl::Status status;
    if (pending.inner != kDone) status = backend_->wait(pending.inner, deadline);
    if (pending.is_there && status.ok()) status = bring_back(ticket);
    if (!find(ticket, &pending)) return status;  // another thread has waited
    if (!status.ok()) backend_->abort(status);
    if (pending.mark != 0) settle(pending.mark, Deadline::max());
    if (!status.ok()) {
      settle(device_->mark(to_device_), Deadline::max());
      return status;
    }
    const std::lock_guard lock(mutex_);
    if (pending_.erase(ticket) != 0) {
      for (void* memory : pending.memory) device_->release(memory);
    }
    return absl::OkStatus();
  }

  void begin_coalescing() override {
    coalescing_ = true;
    backend_->begin_coalescing();
  }
  absl::Status end_coalescing() override {
    coalescing_ = false;
    absl::Status status = backend_->end_coalescing();
    std::vector<Ticket> tickets;
    {
      const std::lock_guard lock(mutex_);
      for (const auto& [ticket, pending] : pending_) {
        if (!pending.is_message) tickets.push_back(ticket);
      }
    }
    std::sort(tickets.begin(), tickets.end());
    for (Ticket ticket : tickets) status.Update(bring_back(ticket));
    return status;
  }

  absl::StatusOr<std::unique_ptr<Backend>> subgroup(GroupInfo group, absl::Span<const int> members,
                                                    std::string_view key,
                                                    Deadline deadline) override {
    auto made = backend_->subgroup(std::move(group), members, key, deadline);
    if (!made.ok()) return made.status();
    return std::make_unique<OnDevice>(*std::move(made), device_, options_);
  }

  void abort(const absl::Status& reason) override { backend_->abort(reason); }

 private:
  struct Pending {
    Ticket inner = kDone;
    DeviceStream stream;
    Buffer out;
    void* there = nullptr;
    std::vector<void*> memory;
    bool is_there = false;  // on the device
    bool is_message = false;
    uint64_t mark = 0;  // of the copy back; 0: it is not on the stream
  };

  void settle(uint64_t mark, Deadline deadline) {
    while (!device_->has_reached(mark) && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::yield();
    }
  }

  Ticket remember(Pending pending) {
    const std::lock_guard lock(mutex_);
    pending_.emplace(++last_, std::move(pending));
    return last_;
  }
  bool find(Ticket ticket, Pending* pending) {
    const std::lock_guard lock(mutex_);
    const auto found = pending_.find(ticket);
    if (found == pending_.end()) return false;
    *pending = found->second;
    return true;
  }

  absl::Status bring_back(Ticket ticket) {
    const std::lock_guard lock(mutex_);
    const auto found = pending_.find(ticket);
    if (found == pending_.end() || found->second.mark != 0 || !found->second.is_there) {
      return absl::OkStatus();
    }
    Pending& pending = found->second;
    if (pending.inner != kDone) {
      absl::Status status = backend_->wait_on(pending.inner, pending.stream);
      if (!status.ok()) return status;
    }
    if (pending.out.count > 0) {
      device_->copy_to_host(pending.out.data, pending.there, pending.out.bytes(), pending.stream);
    }
    pending.mark = device_->mark(pending.stream);
    return absl::OkStatus();
  }

  const std::shared_ptr<TestDevice> device_;
  const OnDeviceOptions options_;
  const DeviceStream to_device_;
  DeviceStream to_host_[4];
  bool coalescing_ = false;
  std::mutex mutex_;
  absl::flat_hash_map<Ticket, Pending> pending_;  // guarded by mutex_
  Ticket last_ = 0;
  const std::unique_ptr<Backend> backend_;
};

}  // namespace

std::unique_ptr<Backend> on_device(std::unique_ptr<Backend> backend,
                                   std::shared_ptr<TestDevice> device,
                                   const OnDeviceOptions& options) {
  return std::make_unique<OnDevice>(std::move(backend), std::move(device), options);
}

}  // namespace shardweave
