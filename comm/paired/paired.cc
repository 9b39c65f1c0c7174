#include "shardweave/comm/paired/paired.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <list>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/match.h"
#include "shardweave/comm/composed.h"
#include "shardweave/comm/failed_rank.h"
#include "shardweave/comm/patience.h"
#include "shardweave/comm/str_cat.h"

namespace shardweave {
namespace {

using Clock = std::chrono::steady_clock;

// Of what ranks tell each other about sends and recvs of the device. Users' message tags are 0 or
// more, those of composed collectives -1.
constexpr int kMessageTag = -2;

// A backend whose start() ends by itself at the deadline has better words for it.
constexpr auto kStartsLate = std::chrono::milliseconds(500);

// What a rank tells another one of an operation.
struct Word {
  CallSignature signature;
  int64_t sends = 0;  // all_to_all_v: elements to the rank that is told
  int32_t message_tag = 0;
  int32_t reserved = 0;
  uint64_t group = 0;  // of a collective: the sequence number of the first of its Coalescing
};

// Memory of the host for what the device cannot do itself.
class HostCopy {
 public:
  explicit HostCopy(int64_t bytes)
      : memory_(std::make_unique_for_overwrite<std::max_align_t[]>(
            bytes / static_cast<int64_t>(sizeof(std::max_align_t)) + 1)) {}
  void* data() const { return memory_.get(); }

 private:
  std::unique_ptr<std::max_align_t[]> memory_;
};

// An operation on a device's memory that runs on copies, and what is done at its end.
struct ByHost {
  ByHost(const Call& call, std::string name_in)
      : in(call.in.bytes()),
        out(call.out.bytes()),
        wanted(call.out),
        stream(call.stream),
        deadline(call.deadline),
        limit(deadline == Deadline::max() ? Clock::duration::max() : deadline - Clock::now()),
        name(std::move(name_in)) {}
  const HostCopy in, out;
  const Buffer wanted;  // of the device
  const DeviceStream stream;
  const Deadline deadline;
  const Clock::duration limit;  // to it, from the beginning
  const std::string name;
  const void* result = nullptr;
  std::once_flag bring_back;
  absl::Status brought_back;  // after `bring_back`
};

class PairedBackend : public Backend {
 public:
  PairedBackend(std::unique_ptr<Backend> control, std::unique_ptr<Backend> device,
                ConnectDevice connect_device, const PairedOptions& options)
      : Backend(control->group()),
        connect_device_(std::move(connect_device)),
        control_(std::move(control)),
        device_(std::move(device)),
        options_(options) {}

  ~PairedBackend() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    if (watchdog_.joinable()) watchdog_.join();
    const bool is_broken = !failure().ok();  // then the control group has been aborted
    if (device_->leave().ok() || is_broken) return;
    const int64_t world_rank = group().world_ranks[group().rank];
    control_->abort(of_rank(
        absl::UnavailableError(str_cat("rank ", group().rank, " of group '", group().name,
                                       "' (world rank ", world_rank,
                                       ") has left with operations under way on its device")),
        world_rank));
  }

  std::string_view name() const override { return device_->name(); }
  bool supports(DeviceType type) const override {
    return control_->supports(type) || device_->supports(type);
  }
  absl::Status check_device(Device device) const override {
    return (is_of_device(device) ? *device_ : *control_).check_device(device);
  }
  bool implements(OpKind op) const override {
    return control_->implements(op) ||
           (!is_point_to_point(op) && control_->implements(OpKind::kSend) &&
            control_->implements(OpKind::kRecv));
  }

  absl::StatusOr<Ticket> start(const Call& call) override {
    if (absl::Status status = failure(); !status.ok()) return status;
    if (control_->patience() != patience()) control_->set_patience(patience());
    if (absl::Status status = bring_back_what_has_come(); !status.ok()) return status;
    if (!is_of_device(call.device())) return start_on_control(call);
    const bool native =
        device_->implements(call.op) &&
        (!is_reduction(call.op) || device_->can_reduce(call.in.dtype, call.reduce_op));
    return native ? start_on_device(call) : start_by_host(call);
  }

  // True after a failure, too, when only wait() says that the device has stopped.
  bool done(Ticket ticket) override {
    const std::shared_ptr<Operation> operation = find(ticket);
    if (operation == nullptr || !failure().ok()) return true;
    return !look_at(*operation).ok() || find(ticket) == nullptr;
  }

  absl::Status wait(Ticket ticket, Deadline deadline) override {
    const std::shared_ptr<Operation> operation = find(ticket);
    if (operation == nullptr) return absl::OkStatus();
    Operation& op = *operation;
    end_group_of(op);
    absl::Status status = failure();
    // Also after a failure, if the control group uses the caller's memory.
    if (op.has_control && (status.ok() || !op.has_device)) {
      status.Update(wait_for_control(op, deadline));
    }
    if (op.has_device) {
      absl::Status of_device = device_->wait(op.device, deadline);
      if (status.ok() && !of_device.ok()) {
        if (of_device.code() == absl::StatusCode::kDeadlineExceeded) {
          of_device = retold(of_device, str_cat(of_device.message(), "; all ranks have called it"));
        }
        status = fail(failure().ok() ? named(op, of_device) : failure());
      }
    }
    if (status.ok()) forget(op);
    return status;
  }

  absl::Status wait_on(Ticket ticket, DeviceStream stream) override {
    const std::shared_ptr<Operation> operation = find(ticket);
    if (operation == nullptr) return absl::OkStatus();
    if (!operation->has_device) return wait(ticket, operation->deadline);
    if (absl::Status status = failure(); !status.ok()) return status;
    end_group_of(*operation);
    const absl::Status status = device_->wait_on(operation->device, stream);
    if (status.ok()) return status;
    // Where NCCL had to wait for other ranks, the control group knows for whom.
    if (operation->has_control && status.code() == absl::StatusCode::kDeadlineExceeded &&
        failure().ok()) {
      absl::Status told = wait_for_control(*operation, Clock::now());
      if (!told.ok()) return told;
    }
    return fail(named(*operation, status));
  }

  absl::Status copy_to_host(void* host, const ConstBuffer& device, DeviceStream stream) override {
    return device_->copy_to_host(host, device, stream);
  }
  absl::Status copy_to_device(const Buffer& device, const void* host,
                              DeviceStream stream) override {
    return device_->copy_to_device(device, host, stream);
  }

  void begin_coalescing() override {
    {
      const std::lock_guard lock(mutex_);
      coalescing_ = true;
      open_group_ = 0;
    }
    control_->begin_coalescing();
    device_->begin_coalescing();
  }
  absl::Status end_coalescing() override {
    {
      const std::lock_guard lock(mutex_);
      coalescing_ = false;
      open_group_ = 0;
    }
    absl::Status status = control_->end_coalescing();
    status.Update(device_->end_coalescing());
    return status;
  }

  absl::StatusOr<std::unique_ptr<Backend>> subgroup(GroupInfo group, absl::Span<const int> members,
                                                    std::string_view key,
                                                    Deadline deadline) override {
    absl::StatusOr<std::unique_ptr<Backend>> control =
        control_->subgroup(std::move(group), members, key, deadline);
    if (!control.ok()) return control.status();
    return make_paired_backend(*std::move(control), connect_device_, options_, deadline);
  }

  absl::Status health() override {
    if (absl::Status status = failure(); !status.ok()) return status;
    const absl::Status status = control_->health();
    return status.ok() ? status : of_the_oldest(status);
  }
  void abort(const absl::Status& reason) override { fail(reason).IgnoreError(); }

 private:
  struct Operation {
    Ticket ticket = kDone;
    Deadline deadline = Deadline::max();
    bool has_control = false;
    bool has_device = false;
    Ticket control = kDone;
    Ticket device = kDone;

    // Of an operation of the device:
    std::string name;
    CallSignature signature;
    int message_tag = 0;
    uint64_t group = 0;
    std::vector<int64_t> expects;  // all_to_all_v
    std::vector<Word> told;        // to each rank; of a send: to its peer
    std::vector<Word> heard;
    std::once_flag compare;
    absl::Status agreement;  // after `compare`

    std::unique_ptr<ByHost> by_host;  // of an operation of the device that the control group runs
  };

  // A call into the device's backend that may wait for the device. While it does, the watchdog looks at
  // its deadline: abort() is what ends it.
  struct Waiting {
    Deadline deadline;
    std::function<std::string()> text;  // of the error
  };
  class Watched {
   public:
    Watched(PairedBackend& backend, Deadline deadline, std::function<std::string()> text)
        : backend_(backend) {
      const std::lock_guard lock(backend.mutex_);
      waiting_ = backend.waiting_.insert(backend.waiting_.end(), {deadline, std::move(text)});
      backend.watch_out();
    }
    ~Watched() {
      const std::lock_guard lock(backend_.mutex_);
      backend_.waiting_.erase(waiting_);
    }
    Watched(const Watched&) = delete;
    Watched& operator=(const Watched&) = delete;

   private:
    PairedBackend& backend_;
    std::list<Waiting>::iterator waiting_;
  };

  bool is_of_device(Device device) const { return device_->supports(device.type); }

  // 1. Starting.

  absl::StatusOr<Ticket> start_on_control(const Call& call) {
    if (!control_->implements(call.op)) {
      if (absl::Status status = run_composed(*control_, call); !status.ok()) return fail(status);
      return kDone;
    }
    const absl::StatusOr<Ticket> ticket = control_->start(call);
    if (!ticket.ok()) return fail(ticket.status());
    if (*ticket == kDone) return kDone;
    auto operation = std::make_shared<Operation>();
    operation->deadline = call.deadline;
    operation->has_control = true;
    operation->control = *ticket;
    return add(std::move(operation));
  }

  absl::StatusOr<Ticket> start_on_device(const Call& call) {
    auto operation = std::make_shared<Operation>();
    Operation& op = *operation;
    op.deadline = call.deadline;
    op.name = name_call(group(), call);
    op.signature = signature_of(call);
    op.message_tag = call.message_tag;
    op.group = group_of(call);
    if (absl::Status status = tell(op, call); !status.ok()) return fail(named(op, status));
    // A send must not wait for its recv here.
    if (options_.compare_first && !is_point_to_point(call.op)) {
      if (op.has_control) {
        if (absl::Status status = wait_for_control(op, call.deadline); !status.ok()) return status;
      }
      op.has_control = false;
    }
    Call grouped = call;
    grouped.group = op.group;
    const absl::StatusOr<Ticket> ticket = [&] {
      const Watched watched(
          *this, call.deadline == Deadline::max() ? call.deadline : call.deadline + kStartsLate,
          [&] {
            return str_cat(op.name, ", ", to_string(op.signature),
                           ": start() of the device's backend has not returned by the deadline");
          });
      return device_->start(grouped);
    }();
    if (!ticket.ok()) {
      // What was begun here still writes to this operation's memory.
      const absl::Status status = fail(named(op, ticket.status()));
      if (op.has_control) control_->wait(op.control, Clock::now()).IgnoreError();
      return status;
    }
    op.has_device = *ticket != kDone;
    op.device = *ticket;
    return add(std::move(operation));
  }

  // Messages are alone: what a rank coalesces of them is not what their other sides do.
  uint64_t group_of(const Call& call) {
    if (is_point_to_point(call.op)) return 0;
    const std::lock_guard lock(mutex_);
    if (!coalescing_) return call.sequence;
    if (open_group_ == 0) open_group_ = call.sequence;
    return open_group_;
  }
  // Whoever waits for an operation has no more to add to its group.
  void end_group_of(const Operation& op) {
    const std::lock_guard lock(mutex_);
    if (op.group == open_group_) open_group_ = 0;
  }

  // Starts the exchange of what the ranks call.
  absl::Status tell(Operation& op, const Call& call) {
    Call exchange{.sequence = call.sequence, .deadline = call.deadline};
    const std::string text = str_cat(to_string(call), " of memory of a device");
    exchange.tag = text;
    const Word word{.signature = op.signature, .message_tag = call.message_tag, .group = op.group};
    if (is_point_to_point(call.op)) {
      if (call.peer == group().rank) return absl::OkStatus();
      exchange.op = call.op;
      exchange.peer = call.peer;
      exchange.message_tag = kMessageTag;
      op.told.assign(call.op == OpKind::kSend ? 1 : 0, word);
      op.heard.resize(call.op == OpKind::kRecv ? 1 : 0);
    } else {
      exchange.op = OpKind::kAllToAll;
      op.told.assign(group().size(), word);
      op.heard.resize(group().size());
      if (call.op == OpKind::kAllToAllV) {
        for (int rank = 0; rank < group().size(); ++rank)
          op.told[rank].sends = call.in_counts[rank];
        op.expects.assign(call.out_counts.begin(), call.out_counts.end());
      }
    }
    exchange.in = {op.told.data(), static_cast<int64_t>(op.told.size() * sizeof(Word)), DType::kU8};
    exchange.out = {op.heard.data(), static_cast<int64_t>(op.heard.size() * sizeof(Word)),
                    DType::kU8};
    if (!control_->implements(exchange.op)) {
      op.has_control = false;
      if (absl::Status status = run_composed(*control_, exchange); !status.ok()) return status;
      return compare(op);
    }
    const absl::StatusOr<Ticket> ticket = control_->start(exchange);
    if (!ticket.ok()) return ticket.status();
    if (*ticket == kDone) return compare(op);
    op.has_control = true;
    op.control = *ticket;
    return absl::OkStatus();
  }

  // What the device's backend does not have.
  absl::StatusOr<Ticket> start_by_host(const Call& call) {
    auto operation = std::make_shared<Operation>();
    operation->deadline = call.deadline;
    operation->by_host =
        std::make_unique<ByHost>(call, str_cat(name_call(group(), call), ", ", to_string(call)));
    ByHost& by_host = *operation->by_host;
    Call here = call;
    here.in = {by_host.in.data(), call.in.count, call.in.dtype};
    here.out = {by_host.out.data(), call.out.count, call.out.dtype, {}};
    if (call.op == OpKind::kBroadcast) here.out.data = by_host.in.data();
    by_host.result = here.out.data;
    absl::Status status = [&] {
      const Watched watched(*this, by_host.deadline, [&] { return not_copied(by_host, "to"); });
      return device_->copy_to_host(by_host.in.data(), call.in, call.stream);
    }();
    if (status.ok() && control_->implements(call.op)) {
      const absl::StatusOr<Ticket> ticket = control_->start(here);
      status = ticket.status();
      if (status.ok() && *ticket != kDone) {
        operation->has_control = true;
        operation->control = *ticket;
        return add(std::move(operation));
      }
    } else if (status.ok()) {
      status = run_composed(*control_, here);
    }
    if (!status.ok()) return fail(status);
    if (status = bring_back(by_host); !status.ok()) return status;
    return kDone;
  }

  // 2. The end.

  std::shared_ptr<Operation> find(Ticket ticket) const {
    const std::lock_guard lock(mutex_);
    const auto found = operations_.find(ticket);
    return found == operations_.end() ? nullptr : found->second;
  }

  Ticket add(std::shared_ptr<Operation> operation) {
    if (!operation->has_control && !operation->has_device) return kDone;
    const bool of_device = operation->has_device;
    const std::lock_guard lock(mutex_);
    if (operation->by_host != nullptr) ++by_host_;
    const Ticket ticket = ++last_ticket_;
    operation->ticket = ticket;
    operations_.emplace(ticket, std::move(operation));
    if (of_device) {
      ++on_device_;
      watch_out();
    }
    return ticket;
  }

  // What has ended well; the rest stays, so that it is an error for ever.
  void forget(const Operation& op) {
    const std::lock_guard lock(mutex_);
    const bool by_host = op.by_host != nullptr;
    const bool of_device = op.has_device;
    if (operations_.erase(op.ticket) == 0) return;
    if (of_device) --on_device_;
    if (by_host) --by_host_;
  }

  absl::Status wait_for_control(Operation& op, Deadline deadline) {
    const absl::Status status = control_->wait(op.control, deadline);
    if (!status.ok()) return fail(named(op, status));
    return op.by_host == nullptr ? compare(op) : bring_back(*op.by_host);
  }

  // Of operations whose Work nobody asks any more, too.
  absl::Status bring_back_what_has_come() {
    std::vector<std::shared_ptr<Operation>> by_host;
    {
      const std::lock_guard lock(mutex_);
      if (by_host_ == 0) return absl::OkStatus();
      for (const auto& [ticket, operation] : operations_) {
        if (operation->by_host != nullptr) by_host.push_back(operation);
      }
    }
    for (const std::shared_ptr<Operation>& operation : by_host) {
      if (absl::Status status = look_at(*operation); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

  absl::Status bring_back(ByHost& by_host) {
    std::call_once(by_host.bring_back, [&] {
      // Whoever asks may do so long after the deadline.
      const bool has_limit = by_host.deadline != Deadline::max();
      const Watched watched(*this, has_limit ? Clock::now() + by_host.limit : Deadline::max(),
                            [&] { return not_copied(by_host, "back from"); });
      by_host.brought_back =
          device_->copy_to_device(by_host.wanted, by_host.result, by_host.stream);
    });
    return by_host.brought_back.ok() ? absl::OkStatus() : fail(by_host.brought_back);
  }

  // Waits for nobody, but for a stream to take what came by way of the host. An error is the group's.
  absl::Status look_at(Operation& op) {
    if (op.has_control) {
      if (!control_->done(op.control)) return absl::OkStatus();
      if (absl::Status status = wait_for_control(op, Clock::now()); !status.ok()) return status;
    }
    if (op.has_device) {
      if (!device_->done(op.device)) return absl::OkStatus();
      if (absl::Status status = device_->wait(op.device, Clock::now()); !status.ok()) {
        return fail(named(op, status));
      }
    }
    forget(op);
    return absl::OkStatus();
  }

  absl::Status compare(Operation& op) {
    std::call_once(op.compare, [&] { op.agreement = disagreement(op); });
    return op.agreement.ok() ? op.agreement : fail(op.agreement);
  }

  absl::Status disagreement(const Operation& op) const {
    if (op.signature.op == OpKind::kRecv && !op.heard.empty()) {
      const CallSignature& mine = op.signature;
      const Word& word = op.heard[0];
      const auto say = [&](std::string_view how) {
        return absl::FailedPreconditionError(
            str_cat("a send and a recv of group '", group().name, "' ", how, ": rank ", mine.root,
                    " called ", to_string(word.signature), " with message tag ", word.message_tag,
                    ", rank ", group().rank, " called ", to_string(mine), " with message tag ",
                    op.message_tag));
      };
      if (mine.count != word.signature.count || mine.dtype != word.signature.dtype) {
        return say("differ");
      }
      if (word.message_tag != op.message_tag) {
        return say("differ in their message tags, and those of a device match in order");
      }
      return absl::OkStatus();
    }
    std::vector<CallSignature> all;
    for (const Word& word : op.heard) all.push_back(word.signature);
    if (all.empty()) return absl::OkStatus();
    if (absl::Status status = check_same_call(group().name, all); !status.ok()) return status;
    for (size_t rank = 1; rank < op.heard.size(); ++rank) {
      if (op.heard[rank].group == op.heard[0].group) continue;
      return absl::FailedPreconditionError(str_cat(
          op.name, ": ", to_string(op.signature),
          ": ranks coalesce differently: it belongs to what began with #", op.heard[0].group,
          " on rank 0, and with #", op.heard[rank].group, " on rank ", rank));
    }
    for (size_t rank = 0; rank < op.expects.size(); ++rank) {
      if (op.heard[rank].sends != op.expects[rank]) {
        return absl::FailedPreconditionError(str_cat(
            op.name, ": ", to_string(op.signature), ": rank ", rank, " sends ",
            op.heard[rank].sends, " elements, rank ", group().rank, " expects ", op.expects[rank]));
      }
    }
    return absl::OkStatus();
  }

  // 3. Errors.

  // An error of the control group is about an exchange; users know the operation.
  absl::Status named(const Operation& op, const absl::Status& status) const {
    if (op.name.empty()) return status;
    std::string text = str_cat(op.name, ", ", to_string(op.signature), ": ");
    if (status.code() == absl::StatusCode::kDeadlineExceeded &&
        is_point_to_point(op.signature.op)) {
      const int peer = op.signature.root;
      const Wait wait{.group = group().name,
                      .world_ranks = group().world_ranks,
                      .rank = group().rank,
                      .call = op.signature,
                      .message_tag = op.message_tag};
      str_append(&text, "waited for rank ", peer, " (world rank ", group().world_ranks[peer],
                 ") until the deadline; ", wanted_of_others(wait));
    } else {
      str_append(&text, status.message());
    }
    return retold(status, text);
  }

  // An error of the control group that nobody here has waited for, perhaps about the exchange of an
  // operation: that is then said, unless another rank has named it.
  absl::Status of_the_oldest(const absl::Status& status) const {
    std::shared_ptr<Operation> oldest;
    {
      const std::lock_guard lock(mutex_);
      for (const auto& [ticket, operation] : operations_) {
        if (operation->name.empty() || !operation->has_control) continue;
        if (oldest == nullptr || ticket < oldest->ticket) oldest = operation;
      }
    }
    if (oldest == nullptr || absl::StrContains(status.message(), to_string(oldest->signature))) {
      return status;
    }
    return retold(status, str_cat(oldest->name, ", ", to_string(oldest->signature),
                                  ", is given up: ", status.message()));
  }

  absl::Status failure() const {
    const std::lock_guard lock(mutex_);
    return failure_.ok() ? failure_ : retold(failure_);
  }

  // Breaks the group, unless it is broken; returns the first error.
  absl::Status fail(const absl::Status& why) {
    {
      const std::lock_guard lock(mutex_);
      if (!failure_.ok()) return retold(failure_);
      failure_ = retold(why);
    }
    control_->abort(why);
    device_->abort(why);
    wake_.notify_all();
    return why;
  }

  static std::string not_copied(const ByHost& by_host, std::string_view where) {
    return str_cat(by_host.name, ": what goes ", where,
                   " the host by way of its stream has not in its time; what the stream had to do "
                   "before has not ended, or the device's backend has not");
  }

  // 4. The watchdog.

  // With mutex_: there is something to look at.
  void watch_out() {
    if (!watchdog_.joinable()) watchdog_ = std::thread([this] { watch(); });
    if (on_device_ + waiting_.size() == 1) wake_.notify_all();
  }

  void watch() {
    std::unique_lock lock(mutex_);
    while (!stopping_ && failure_.ok()) {
      if (on_device_ == 0 && waiting_.empty()) {
        wake_.wait(lock);
        continue;
      }
      std::string late;
      for (const Waiting& waiting : waiting_) {
        if (late.empty() && Clock::now() >= waiting.deadline) late = waiting.text();
      }
      std::vector<std::shared_ptr<Operation>> pending;
      for (const auto& [ticket, operation] : operations_) {
        if (operation->has_device) pending.push_back(operation);
      }
      lock.unlock();
      if (!late.empty()) fail(absl::DeadlineExceededError(late)).IgnoreError();
      // Oldest first: what has gone wrong there is the reason of what comes after.
      std::sort(pending.begin(), pending.end(),
                [](const auto& a, const auto& b) { return a->ticket < b->ticket; });
      // Another rank may have given up when all had called.
      if (absl::Status status = control_->health(); !status.ok()) {
        fail(of_the_oldest(status)).IgnoreError();
      }
      for (const std::shared_ptr<Operation>& operation : pending) {
        if (!look_at(*operation).ok()) break;
        if (Clock::now() >= operation->deadline && find(operation->ticket) != nullptr) {
          wait(operation->ticket, operation->deadline).IgnoreError();
        }
      }
      lock.lock();
      if (!stopping_ && failure_.ok()) {
        wake_.wait_for(lock, absl::ToChronoNanoseconds(options_.look_every));
      }
    }
  }

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  // Guarded by mutex_:
  absl::flat_hash_map<Ticket, std::shared_ptr<Operation>> operations_;
  Ticket last_ticket_ = 0;
  size_t on_device_ = 0;  // of operations_
  int by_host_ = 0;       // of operations_, too
  std::list<Waiting> waiting_;
  bool coalescing_ = false;
  uint64_t open_group_ = 0;  // that the next collective on the device joins; 0: none
  absl::Status failure_;
  bool stopping_ = false;
  std::thread watchdog_;

  const ConnectDevice connect_device_;  // which may own what the device's backend uses
  // They end in the opposite order: the control group writes to what operations_ have heard, and
  // tells of errors while the device's part ends.
  const std::unique_ptr<Backend> control_;
  const std::unique_ptr<Backend> device_;
  const PairedOptions options_;
};

// Until all ranks have come, as the first rank sees it. A rank that does not is an error of this
// group, where whoever makes it looks for that.
absl::Status meet(Backend& control, Deadline deadline) {
  const GroupInfo& group = control.group();
  if (!control.implements(OpKind::kSend) || !control.implements(OpKind::kRecv)) {
    return absl::OkStatus();
  }
  const auto exchange = [&](OpKind op) -> absl::Status {
    std::vector<Backend::Ticket> tickets;
    const int last = group.rank == 0 ? group.size() : 1;
    absl::Status status;
    for (int peer = group.rank == 0 ? 1 : 0; peer < last && status.ok(); ++peer) {
      const absl::StatusOr<Backend::Ticket> ticket =
          control.start({.op = op,
                         .peer = peer,
                         .message_tag = kMessageTag,
                         .sequence = static_cast<uint64_t>(peer + 1),
                         .deadline = deadline,
                         .tag = "making the group"});
      status = ticket.status();
      if (status.ok() && *ticket != Backend::kDone) tickets.push_back(*ticket);
    }
    for (Backend::Ticket ticket : tickets) status.Update(control.wait(ticket, deadline));
    return status;
  };
  absl::Status status = exchange(group.rank == 0 ? OpKind::kRecv : OpKind::kSend);
  if (status.ok()) status = exchange(group.rank == 0 ? OpKind::kSend : OpKind::kRecv);
  if (status.ok()) return status;
  control.abort(status);
  return retold(status, str_cat("group '", group.name, "': ", status.message()));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> make_paired_backend(std::unique_ptr<Backend> control,
                                                             ConnectDevice connect_device,
                                                             const PairedOptions& options,
                                                             Deadline deadline) {
  if (absl::Status status = meet(*control, deadline); !status.ok()) return status;
  std::vector<int> everyone(control->group().size());
  std::iota(everyone.begin(), everyone.end(), 0);
  absl::StatusOr<std::unique_ptr<Backend>> to_meet =
      control->subgroup(control->group(), everyone, "bootstrap", deadline);
  if (!to_meet.ok()) return to_meet.status();
  const std::shared_ptr<Communicator> bootstrap = Communicator::create(
      *std::move(to_meet),
      {.timeout = absl::FromChrono(std::min(deadline - Clock::now(), Clock::duration::max()))});
  absl::StatusOr<std::unique_ptr<Backend>> device =
      connect_device(control->group(), bootstrap, deadline);
  if (!device.ok()) return device.status();
  // Whoever leaves the bootstrap group before the others are ready would be an error there.
  if (absl::Status all = bootstrap->barrier({.tag = "ready"}).wait(); !all.ok()) return all;
  return std::make_unique<PairedBackend>(std::move(control), *std::move(device),
                                         std::move(connect_device), options);
}

}  // namespace shardweave
