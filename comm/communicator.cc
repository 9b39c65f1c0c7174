#include "shardweave/comm/communicator.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_join.h"
#include "shardweave/comm/composed.h"
#include "shardweave/comm/failed_rank.h"
#include "shardweave/comm/reduction.h"
#include "shardweave/comm/str_cat.h"

namespace shardweave {
namespace {

Deadline deadline_after(Deadline now, absl::Duration timeout) {
  const int64_t nanoseconds = absl::ToInt64Nanoseconds(timeout);  // saturates
  if (nanoseconds > (Deadline::max() - now).count()) return Deadline::max();
  return now + std::chrono::nanoseconds(nanoseconds);
}

// The checks below say what was given and what was wanted; issue() adds where.

absl::Status check_memory(const Backend& backend, std::string_view what,
                          const ConstBuffer& buffer) {
  if (buffer.count < 0) {
    return absl::InvalidArgumentError(str_cat(what, " has a negative count, ", buffer.count));
  }
  if (buffer.count > INT64_MAX / element_size(buffer.dtype)) {
    return absl::InvalidArgumentError(str_cat(what, " has an absurd count, ", buffer.count));
  }
  if (buffer.count > 0 && buffer.data == nullptr) {
    return absl::InvalidArgumentError(
        str_cat(what, " is null and should have ", buffer.count, " elements"));
  }
  if (reinterpret_cast<uintptr_t>(buffer.data) % element_size(buffer.dtype) != 0) {
    return absl::InvalidArgumentError(
        str_cat(what, " is not aligned to its element type, ", to_string(buffer.dtype)));
  }
  if (!backend.supports(buffer.device.type)) {
    return absl::InvalidArgumentError(str_cat(what, " is on ", to_string(buffer.device),
                                              ", where backend ", backend.name(),
                                              " cannot reach it"));
  }
  if (absl::Status status = backend.check_device(buffer.device); !status.ok()) {
    return absl::Status(status.code(),
                        str_cat(what, " is on ", to_string(buffer.device), ": ", status.message()));
  }
  return absl::OkStatus();
}

absl::Status check_pair(const Backend& backend, const ConstBuffer& in, const Buffer& out) {
  absl::Status status = check_memory(backend, "in", in);
  status.Update(check_memory(backend, "out", out));
  if (!status.ok()) return status;
  if (in.dtype != out.dtype || !(in.device == out.device)) {
    return absl::InvalidArgumentError(
        str_cat("in is ", to_string(in.dtype), " on ", to_string(in.device), ", out is ",
                to_string(out.dtype), " on ", to_string(out.device), "; want the same"));
  }
  return absl::OkStatus();
}

absl::Status check_count(std::string_view what, int64_t count, int64_t want, std::string_view why) {
  if (count == want) return absl::OkStatus();
  return absl::InvalidArgumentError(
      str_cat(what, " has ", count, " elements, want ", want, " (", why, ")"));
}

// `whole` has one part per rank.
absl::Status check_parts(std::string_view whole, int64_t count, int size, std::string_view part,
                         int64_t part_count) {
  if (count % size == 0 && count / size == part_count) return absl::OkStatus();
  return absl::InvalidArgumentError(str_cat(whole, " has ", count, " elements, want ", size,
                                            " (ranks) times ", part_count, " (", part, ")"));
}

absl::Status check_counts(std::string_view what, absl::Span<const int64_t> counts, int size,
                          std::string_view buffer, int64_t total) {
  if (counts.size() != static_cast<size_t>(size)) {
    return absl::InvalidArgumentError(
        str_cat(what, " has ", counts.size(), " entries for ", size, " ranks"));
  }
  int64_t sum = 0;
  for (int64_t count : counts) {
    if (count < 0 || count > total - sum) {
      return absl::InvalidArgumentError(str_cat(what, " is [", absl::StrJoin(counts, ", "),
                                                "], which does not add up to the ", total,
                                                " elements of ", buffer));
    }
    sum += count;
  }
  if (sum == total) return absl::OkStatus();
  return check_count(buffer, total, sum, str_cat("the sum of ", what));
}

// `allowed`: the element of the larger buffer where the smaller one may begin; -1: nowhere.
absl::Status check_overlap(const ConstBuffer& in, const Buffer& out, int64_t allowed) {
  const auto* in_begin = static_cast<const std::byte*>(in.data);
  const auto* out_begin = static_cast<const std::byte*>(out.data);
  if (in.count == 0 || out.count == 0 || in_begin + in.bytes() <= out_begin ||
      out_begin + out.bytes() <= in_begin) {
    return absl::OkStatus();
  }
  const auto* large = in.count >= out.count ? in_begin : out_begin;
  const auto* small = in.count >= out.count ? out_begin : in_begin;
  if (allowed >= 0 && small == large + allowed * element_size(in.dtype)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      allowed < 0 ? "in and out overlap, and this cannot run in place"
                  : str_cat("in and out overlap, but not as in place: element ", allowed,
                            " of the larger is where the smaller should begin"));
}

absl::Status check_reduction(const Backend& backend, DType dtype, ReduceOp op) {
  if (!is_reduction_defined(dtype, op)) {
    return absl::InvalidArgumentError(
        str_cat("the reduction ", to_string(op), " is not defined for ", to_string(dtype)));
  }
  if (!backend.can_reduce(dtype, op)) {
    return absl::UnimplementedError(str_cat("backend ", backend.name(), " has no reduction ",
                                            to_string(op), " of ", to_string(dtype)));
  }
  return absl::OkStatus();
}

absl::Status check_rank(std::string_view what, int rank, int size) {
  if (rank >= 0 && rank < size) return absl::OkStatus();
  return absl::InvalidArgumentError(
      str_cat(what, " is ", rank, ", the group has ", size, " ranks"));
}

absl::Status check_message(int peer, int message_tag, int size) {
  if (message_tag < 0) {
    return absl::InvalidArgumentError(
        str_cat("the message tag is ", message_tag, ", want 0 or more"));
  }
  return check_rank("peer", peer, size);
}

int64_t sum_before(absl::Span<const int64_t> counts, int rank) {
  int64_t sum = 0;
  for (int r = 0; r < rank; ++r) sum += counts[r];
  return sum;
}

// The Work of a Coalescing.
class PendingWorks : public PendingWork {
 public:
  explicit PendingWorks(std::vector<Work> works) : works_(std::move(works)) {}
  bool done(const Token&) override {
    return std::all_of(works_.begin(), works_.end(), [](const Work& work) { return work.done(); });
  }
  // Waits for all, also after an error: the buffers must not be touched afterwards.
  absl::Status wait(const Token&) override {
    absl::Status first_error;
    for (const Work& work : works_) first_error.Update(work.wait());
    return first_error;
  }
  absl::Status wait_on(const Token&, DeviceStream stream) override {
    absl::Status first_error;
    for (const Work& work : works_) first_error.Update(work.wait_on(stream));
    return first_error;
  }

 private:
  const std::vector<Work> works_;
};

// Counts of a collective that has them, for as long as it starts.
struct Counts {
  std::vector<int64_t> in, out;
};

// A backend without a collective of equal parts, and with that of parts that differ, does it so.
void use_form_with_counts(const Backend& backend, Call& call, Counts& counts) {
  const size_t size = backend.group().size();
  const auto become = [&](OpKind op) {
    if (!backend.implements(op)) return false;
    call.op = op;
    return true;
  };
  switch (call.op) {
    case OpKind::kAllGather:
      if (!become(OpKind::kAllGatherV)) return;
      counts.out.assign(size, call.in.count);
      break;
    case OpKind::kReduceScatter:
      if (!become(OpKind::kReduceScatterV)) return;
      counts.in.assign(size, call.out.count);
      break;
    case OpKind::kAllToAll:
      if (!become(OpKind::kAllToAllV)) return;
      counts.in.assign(size, call.in.count / static_cast<int64_t>(size));
      counts.out = counts.in;
      break;
    case OpKind::kScatter:
      if (!become(OpKind::kAllToAllV)) return;
      counts.in.assign(size, backend.group().rank == call.peer ? call.out.count : 0);
      counts.out.assign(size, 0);
      counts.out[call.peer] = call.out.count;
      break;
    default:
      return;
  }
  call.in_counts = counts.in;
  call.out_counts = counts.out;
}

}  // namespace

std::shared_ptr<Communicator> Communicator::create(std::unique_ptr<Backend> backend,
                                                   const CommunicatorOptions& options) {
  return std::shared_ptr<Communicator>(
      new Communicator(std::move(backend), std::make_shared<FlightRecorder>(), options));
}

Communicator::Communicator(std::unique_ptr<Backend> backend,
                           std::shared_ptr<FlightRecorder> recorder,
                           const CommunicatorOptions& options)
    : backend_(std::move(backend)),
      recorder_(std::move(recorder)),
      options_(options),
      log_(recorder_, backend_->group(), options.flight_record_capacity) {
  backend_->set_patience(options.patience);
}

// The memory that is kept is used until its operation is done, and after a failure until wait() has
// returned.
Communicator::~Communicator() {
  for (const Kept& kept : kept_) {
    const Deadline now = std::chrono::steady_clock::now();
    const bool is_done = backend_->done(kept.ticket);
    backend_->wait(kept.ticket, is_done ? now : deadline_after(now, options_.timeout))
        .IgnoreError();
  }
}

// 1. From a user's call to the backend's.

Work Communicator::all_reduce(ConstBuffer in, Buffer out, ReduceOp op, const CallOptions& options) {
  Call call{.op = OpKind::kAllReduce, .in = in, .out = out, .reduce_op = op};
  absl::Status status = check_pair(*backend_, in, out);
  if (status.ok()) status = check_count("out", out.count, in.count, "as in");
  if (status.ok()) status = check_reduction(*backend_, in.dtype, op);
  if (status.ok()) status = check_overlap(in, out, 0);
  return issue(call, std::move(status), options);
}

Work Communicator::all_gather(ConstBuffer in, Buffer out, const CallOptions& options) {
  Call call{.op = OpKind::kAllGather, .in = in, .out = out};
  absl::Status status = check_pair(*backend_, in, out);
  if (status.ok()) status = check_parts("out", out.count, size(), "in", in.count);
  if (status.ok()) status = check_overlap(in, out, rank() * in.count);
  return issue(call, std::move(status), options);
}

Work Communicator::all_gather_v(ConstBuffer in, Buffer out, absl::Span<const int64_t> counts,
                                const CallOptions& options) {
  Call call{.op = OpKind::kAllGatherV, .in = in, .out = out, .out_counts = counts};
  absl::Status status = check_pair(*backend_, in, out);
  if (status.ok()) status = check_counts("counts", counts, size(), "out", out.count);
  if (status.ok()) {
    status = check_count("in", in.count, counts[rank()], "counts of this rank");
    if (status.ok()) status = check_overlap(in, out, sum_before(counts, rank()));
  }
  return issue(call, std::move(status), options);
}

Work Communicator::reduce_scatter(ConstBuffer in, Buffer out, ReduceOp op,
                                  const CallOptions& options) {
  Call call{.op = OpKind::kReduceScatter, .in = in, .out = out, .reduce_op = op};
  absl::Status status = check_pair(*backend_, in, out);
  if (status.ok()) status = check_parts("in", in.count, size(), "out", out.count);
  if (status.ok()) status = check_reduction(*backend_, in.dtype, op);
  if (status.ok()) status = check_overlap(in, out, rank() * out.count);
  return issue(call, std::move(status), options);
}

Work Communicator::reduce_scatter_v(ConstBuffer in, Buffer out, absl::Span<const int64_t> counts,
                                    ReduceOp op, const CallOptions& options) {
  Call call{
      .op = OpKind::kReduceScatterV, .in = in, .out = out, .reduce_op = op, .in_counts = counts};
  absl::Status status = check_pair(*backend_, in, out);
  if (status.ok()) status = check_counts("counts", counts, size(), "in", in.count);
  if (status.ok()) status = check_reduction(*backend_, in.dtype, op);
  if (status.ok()) {
    status = check_count("out", out.count, counts[rank()], "counts of this rank");
    if (status.ok()) status = check_overlap(in, out, sum_before(counts, rank()));
  }
  return issue(call, std::move(status), options);
}

Work Communicator::all_to_all(ConstBuffer in, Buffer out, const CallOptions& options) {
  Call call{.op = OpKind::kAllToAll, .in = in, .out = out};
  absl::Status status = check_pair(*backend_, in, out);
  if (status.ok()) status = check_count("out", out.count, in.count, "as in");
  if (status.ok()) status = check_parts("in", in.count, size(), "each part", in.count / size());
  if (status.ok()) status = check_overlap(in, out, -1);
  return issue(call, std::move(status), options);
}

Work Communicator::all_to_all_v(ConstBuffer in, absl::Span<const int64_t> send_counts, Buffer out,
                                absl::Span<const int64_t> recv_counts, const CallOptions& options) {
  Call call{.op = OpKind::kAllToAllV,
            .in = in,
            .out = out,
            .in_counts = send_counts,
            .out_counts = recv_counts};
  absl::Status status = check_pair(*backend_, in, out);
  if (status.ok())
    status = check_counts("the list of counts to send", send_counts, size(), "in", in.count);
  if (status.ok())
    status = check_counts("the list of counts to receive", recv_counts, size(), "out", out.count);
  if (status.ok()) status = check_overlap(in, out, -1);
  if (status.ok()) {
    status = check_count("counts to receive of this rank", recv_counts[rank()], send_counts[rank()],
                         "as in counts to send");
  }
  return issue(call, std::move(status), options);
}

Work Communicator::broadcast(Buffer data, int root, const CallOptions& options) {
  Call call{.op = OpKind::kBroadcast, .in = data, .out = data, .peer = root};
  absl::Status status = check_memory(*backend_, "data", data);
  if (status.ok()) status = check_rank("root", root, size());
  return issue(call, std::move(status), options);
}

Work Communicator::reduce(ConstBuffer in, Buffer out, ReduceOp op, int root,
                          const CallOptions& options) {
  if (rank() != root) out = {nullptr, 0, in.dtype, in.device};
  Call call{.op = OpKind::kReduce, .in = in, .out = out, .reduce_op = op, .peer = root};
  absl::Status status = check_rank("root", root, size());
  if (status.ok()) status = check_pair(*backend_, in, out);
  if (status.ok()) status = check_reduction(*backend_, in.dtype, op);
  if (rank() == root) {
    if (status.ok()) status = check_count("out", out.count, in.count, "as in");
    if (status.ok()) status = check_overlap(in, out, 0);
  }
  return issue(call, std::move(status), options);
}

Work Communicator::gather(ConstBuffer in, Buffer out, int root, const CallOptions& options) {
  if (rank() != root) out = {nullptr, 0, in.dtype, in.device};
  Call call{.op = OpKind::kGather, .in = in, .out = out, .peer = root};
  absl::Status status = check_rank("root", root, size());
  if (status.ok()) status = check_pair(*backend_, in, out);
  if (rank() == root) {
    if (status.ok()) status = check_parts("out", out.count, size(), "in", in.count);
    if (status.ok()) status = check_overlap(in, out, rank() * in.count);
  }
  return issue(call, std::move(status), options);
}

Work Communicator::scatter(ConstBuffer in, Buffer out, int root, const CallOptions& options) {
  if (rank() != root) in = {nullptr, 0, out.dtype, out.device};
  Call call{.op = OpKind::kScatter, .in = in, .out = out, .peer = root};
  absl::Status status = check_rank("root", root, size());
  if (status.ok()) status = check_pair(*backend_, in, out);
  if (rank() == root) {
    if (status.ok()) status = check_parts("in", in.count, size(), "out", out.count);
    if (status.ok()) status = check_overlap(in, out, rank() * out.count);
  }
  return issue(call, std::move(status), options);
}

Work Communicator::send(ConstBuffer data, int peer, int message_tag, const CallOptions& options) {
  const Buffer none{nullptr, 0, data.dtype, data.device};
  Call call{.op = OpKind::kSend, .in = data, .out = none, .peer = peer, .message_tag = message_tag};
  absl::Status status = check_memory(*backend_, "data", data);
  if (status.ok()) status = check_message(peer, message_tag, size());
  return issue(call, std::move(status), options);
}

Work Communicator::recv(Buffer data, int peer, int message_tag, const CallOptions& options) {
  const ConstBuffer none{nullptr, 0, data.dtype, data.device};
  Call call{.op = OpKind::kRecv, .in = none, .out = data, .peer = peer, .message_tag = message_tag};
  absl::Status status = check_memory(*backend_, "data", data);
  if (status.ok()) status = check_message(peer, message_tag, size());
  return issue(call, std::move(status), options);
}

Work Communicator::barrier(const CallOptions& options) {
  Call call{.op = OpKind::kBarrier};
  return issue(call, absl::OkStatus(), options);
}

Work Communicator::issue(Call& call, absl::Status valid, const CallOptions& options) {
  Counts counts;
  if (valid.ok() && !backend_->implements(call.op)) use_form_with_counts(*backend_, call, counts);
  const bool native = backend_->implements(call.op);
  if (!native && !can_compose(*backend_, call)) {
    valid.Update(absl::UnimplementedError(str_cat("not by backend ", backend_->name())));
  }
  if (options.timeout < absl::ZeroDuration()) {
    valid.Update(absl::InvalidArgumentError(
        str_cat("negative timeout ", absl::FormatDuration(options.timeout))));
  }
  if (valid.ok() && is_point_to_point(call.op) && call.peer == rank()) {
    valid = pair_with_itself(call, options.blocking);
  }
  if (!valid.ok()) {
    absl::Status error(valid.code(), str_cat(to_string(call.op), " on group '", name(), "' (rank ",
                                             rank(), " of ", size(), "): ", valid.message()));
    refuse(error);
    return Work(std::move(error));
  }
  if (broken_.load(std::memory_order_acquire)) return collect(Work(health()));

  const Deadline now = std::chrono::steady_clock::now();
  call.deadline = deadline_after(
      now, options.timeout == absl::ZeroDuration() ? options_.timeout : options.timeout);
  call.sequence = is_point_to_point(call.op) ? ++point_to_points_ : ++collectives_;
  call.tag = options.tag;
  call.fingerprint = options.fingerprint;
  call.stream = options.stream;
  if (!kept_.empty()) {
    std::erase_if(kept_, [&](const Kept& kept) {
      if (!backend_->done(kept.ticket)) return false;
      // Done is also what has failed, where the device may still be at it.
      backend_->wait(kept.ticket, now).IgnoreError();
      return true;
    });
  }
  const uint64_t line = log_.start(call, now);
  const absl::StatusOr<Backend::Ticket> ticket = native ? backend_->start(call) : compose(call);
  if (!ticket.ok()) {
    log_.finish(line, false);
    return collect(Work(fail(ticket.status())));
  }
  if (*ticket == Backend::kDone) {
    log_.finish(line, true);
    return collect(Work());
  }
  if (options.keep_alive != nullptr) kept_.push_back({*ticket, options.keep_alive});
  // The pointer is this communicator's, which a Work keeps alive.
  std::shared_ptr<PendingWork> self(shared_from_this(), this);
  return collect(Work(std::move(self), {*ticket, line, call.deadline}));
}

absl::Status Communicator::pair_with_itself(const Call& call, bool blocking) {
  const bool sends = call.op == OpKind::kSend;
  const auto found = to_itself_.find(call.message_tag);
  const int64_t sends_left = found == to_itself_.end() ? 0 : found->second;
  const bool has_other_side = sends ? sends_left < 0 : sends_left > 0;
  if (has_other_side || !blocking) {
    const int64_t now_left = sends_left + (sends ? 1 : -1);
    if (now_left == 0) {
      to_itself_.erase(found);
    } else {
      to_itself_[call.message_tag] = now_left;
    }
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      str_cat("peer ", call.peer, " is this rank itself, which cannot call ",
              sends ? "recv" : "send", " with message tag ", call.message_tag,
              " while it waits here: issue one of the two without waiting for it, then the other"));
}

void Communicator::refuse(const absl::Status& error) {
  if (coalescing_ != nullptr) coalescing_->first_error_.Update(error);
}

absl::StatusOr<Backend::Ticket> Communicator::compose(const Call& call) {
  // Its sends and recvs must not be held back.
  if (coalescing_ != nullptr) {
    if (absl::Status status = backend_->end_coalescing(); !status.ok()) return status;
  }
  absl::Status status = run_composed(*backend_, call);
  if (coalescing_ != nullptr) backend_->begin_coalescing();
  if (!status.ok()) return status;
  return Backend::kDone;
}

Work Communicator::collect(Work work) {
  if (coalescing_ != nullptr) coalescing_->works_.push_back(work);
  return work;
}

// 2. Pending operations.

bool Communicator::done(const Token& token) {
  // After its deadline an operation has failed, whether or not somebody waits for it.
  if (!backend_->done(token.ticket) && std::chrono::steady_clock::now() < token.deadline) {
    return false;
  }
  wait(token).IgnoreError();  // returns at once; records the end
  return true;
}

absl::Status Communicator::wait(const Token& token) {
  const absl::Status status = backend_->wait(token.ticket, token.deadline);
  log_.finish(token.record, status.ok());
  return status.ok() ? status : fail(status);
}

absl::Status Communicator::wait_on(const Token& token, DeviceStream stream) {
  if (!backend_->supports(DeviceType::kCuda)) return wait(token);  // there is no stream to wait
  const absl::Status status = backend_->wait_on(token.ticket, stream);
  return status.ok() ? status : fail(status);
}

// 3. Errors.

absl::Status Communicator::fail(const absl::Status& error) {
  {
    std::lock_guard lock(mutex_);
    if (!first_error_.ok()) return first_error_;
    first_error_ = error;
    broken_.store(true, std::memory_order_release);
  }
  backend_->abort(error);
  return error;
}

// What the backend has found out while nobody waited, too.
absl::Status Communicator::health() const {
  {
    std::lock_guard lock(mutex_);
    if (!first_error_.ok()) return first_error_;
  }
  return backend_->health();
}

// Children first: what is on the device here may wait there for one of theirs, and a backend's abort
// for what is on the device.
void Communicator::abort(const absl::Status& reason) {
  std::vector<std::weak_ptr<Communicator>> children;
  {
    std::lock_guard lock(mutex_);
    children = children_;
  }
  for (const auto& child : children) {
    if (std::shared_ptr<Communicator> alive = child.lock()) alive->abort(reason);
  }
  const int64_t world_rank = world_ranks()[rank()];
  fail(of_rank(absl::AbortedError(str_cat(
                   "rank ", rank(), " of group '", name(), "' (world rank ", world_rank,
                   ") aborted: ", absl::StatusCodeToString(reason.code()), ": ", reason.message())),
               world_rank))
      .IgnoreError();
}

// 4. Groups.

absl::StatusOr<std::shared_ptr<Communicator>> Communicator::split(int color, int key,
                                                                  std::string name) {
  if (!backend_->moves_data()) {
    return absl::UnimplementedError(
        str_cat("split of group '", this->name(), "': backend ", backend_->name(),
                " moves no data; make a subgroup of given members instead"));
  }
  const int32_t mine[2] = {color, key};
  std::vector<int32_t> all(size_t{2} * size());
  absl::Status status = all_gather(ConstBuffer::of(mine, 2),
                                   Buffer::of(all.data(), int64_t{2} * size()), {.tag = "split"})
                            .wait();
  if (!status.ok()) return status;
  if (color < 0) return nullptr;
  std::vector<int64_t> members;
  for (int r = 0; r < size(); ++r) {
    if (all[size_t{2} * r] == color) members.push_back(r);
  }
  std::stable_sort(members.begin(), members.end(),
                   [&](int64_t a, int64_t b) { return all[2 * a + 1] < all[2 * b + 1]; });
  return subgroup(members, std::move(name));
}

absl::StatusOr<std::shared_ptr<Communicator>> Communicator::subgroup(
    absl::Span<const int64_t> members, std::string name) {
  if (absl::Status status = health(); !status.ok()) return status;
  const std::string list = absl::StrJoin(members, ",");
  // Of a backend that knows it only of all its ranks.
  const bool has_threads = this->has_threads() && members.size() > 1;
  GroupInfo group{.name = std::move(name), .rank = -1, .has_threads = has_threads};
  absl::flat_hash_set<int64_t> seen;
  std::vector<int> ranks;
  for (int64_t member : members) {
    if (member < 0 || member >= size() || !seen.insert(member).second) {
      return absl::InvalidArgumentError(
          str_cat("subgroup '", group.name, "' of group '", this->name(), "': member ", member,
                  " of [", list, "] is ", seen.contains(member) ? "there twice" : "not a rank",
                  "; the group has ", size(), " ranks"));
    }
    if (member == rank()) group.rank = static_cast<int>(ranks.size());
    ranks.push_back(static_cast<int>(member));
    group.world_ranks.push_back(world_ranks()[member]);
  }
  if (group.rank < 0) {
    return absl::InvalidArgumentError(str_cat("subgroup '", group.name, "' of group '",
                                              this->name(), "': only members may call, rank ",
                                              rank(), " is not among [", list, "]"));
  }
  std::string key = str_cat(group.name, "/", list);
  {
    std::lock_guard lock(mutex_);  // threads may make several at a time
    str_append(&key, "/", subgroups_made_[key]++);
  }
  absl::StatusOr<std::unique_ptr<Backend>> backend =
      backend_->subgroup(std::move(group), ranks, key,
                         deadline_after(std::chrono::steady_clock::now(), options_.timeout));
  if (!backend.ok()) {
    // Of all ranks alike; anything else leaves them with different numbers of groups made.
    if (absl::IsUnimplemented(backend.status())) return backend.status();
    return fail(backend.status());
  }
  std::shared_ptr<Communicator> child(new Communicator(*std::move(backend), recorder_, options_));
  std::lock_guard lock(mutex_);
  std::erase_if(children_, [](const auto& old) { return old.expired(); });
  children_.push_back(child);
  return child;
}

// 5. Coalescing.

Coalescing::Coalescing(Communicator& comm) : comm_(&comm) {
  if (comm.coalescing_ != nullptr) {
    first_error_ =
        absl::FailedPreconditionError(str_cat("group '", comm.name(), "' is coalescing already"));
    comm_ = nullptr;
    return;
  }
  comm.coalescing_ = this;
  comm.backend_->begin_coalescing();
}

Coalescing::~Coalescing() {
  if (comm_ != nullptr) finish().wait().IgnoreError();
}

Work Coalescing::finish() {
  if (comm_ != nullptr) {
    Communicator& comm = *std::exchange(comm_, nullptr);
    comm.coalescing_ = nullptr;
    if (absl::Status status = comm.backend_->end_coalescing(); !status.ok()) {
      works_.emplace_back(comm.fail(status));
    }
  }
  if (!first_error_.ok()) works_.emplace_back(first_error_);
  return Work(std::make_shared<PendingWorks>(std::move(works_)), {});
}

}  // namespace shardweave
