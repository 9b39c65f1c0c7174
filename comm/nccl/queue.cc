#include "shardweave/comm/nccl/queue.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "shardweave/comm/nccl/collectives.h"

namespace shardweave::nccl_internal {
namespace {

// The sender is rank 0 of the two.
GroupInfo pair_of(bool sends) {
  return {.name = "pair", .rank = sends ? 0 : 1, .world_ranks = {0, 1}};
}

}  // namespace

Queue::Queue(std::shared_ptr<const Library> library, std::unique_ptr<Lane> lane,
             std::shared_ptr<Communicator> names, int peer, bool sends)
    : library_(std::move(library)),
      lane_(std::move(lane)),
      group_(pair_of(sends)),
      state_(State::kUnnamed),
      names_(std::move(names)),
      peer_(peer),
      sends_(sends) {}

Queue::~Queue() {
  if (state_ != State::kUnnamed && !name_.done()) {
    names_->abort(absl::AbortedError("the rank leaves before its messages have begun"));
    name_.wait().IgnoreError();
  }
}

absl::Status Queue::add(Backend::Ticket ticket, const Call& call) {
  const absl::StatusOr<CudaEvent> ready = lane_->mark(call.stream);
  if (!ready.ok()) return ready.status();
  held_.push_back({.ticket = ticket,
                   .call = call,
                   .ready = *ready,
                   .in_counts = {call.in_counts.begin(), call.in_counts.end()},
                   .out_counts = {call.out_counts.begin(), call.out_counts.end()}});
  Call& kept = held_.back().call;
  kept.tag = {};
  if (is_point_to_point(call.op)) kept.peer = names_ == nullptr ? call.peer : 1 - group_.rank;
  return absl::OkStatus();
}

absl::StatusOr<bool> Queue::connect() {
  if (state_ == State::kUnnamed) {
    const Buffer name = Buffer::of(reinterpret_cast<uint8_t*>(&id_), sizeof(id_));
    // The first message may be waited for as long as its caller likes.
    const CallOptions options{.timeout = absl::InfiniteDuration(), .tag = "NCCL's messages"};
    if (sends_) {
      absl::Status status =
          library_->check_nccl("ncclGetUniqueId", library_->ncclGetUniqueId(&id_), nullptr);
      if (!status.ok()) return status;
      name_ = names_->send(name, peer_, 1, options);
    } else {
      name_ = names_->recv(name, peer_, 1, options);
    }
    state_ = State::kNamed;
  }
  if (state_ == State::kNamed) {
    if (!sends_ && !name_.done()) return false;
    if (!sends_) {
      if (absl::Status status = name_.wait(); !status.ok()) return status;
    }
    if (absl::Status status = lane_->begin_to_connect(id_, 2, group_.rank); !status.ok()) {
      return status;
    }
    state_ = State::kConnecting;
  }
  const absl::StatusOr<bool> connected = lane_->has_settled("ncclCommInitRankConfig");
  if (connected.ok() && *connected) state_ = State::kReady;
  return connected;
}

absl::Status Queue::advance(uint64_t open_group, const Launched& launched) {
  for (;;) {
    switch (state_) {
      case State::kUnnamed:
      case State::kNamed:
      case State::kConnecting: {
        if (held_.empty()) return absl::OkStatus();
        const absl::StatusOr<bool> connected = connect();
        if (!connected.ok() || !*connected) return connected.status();
        break;
      }
      case State::kReady:
        if (held_.empty()) return absl::OkStatus();
        if (open_group != 0 && held_.front().call.group == open_group) return absl::OkStatus();
        if (absl::Status status = launch_group(); !status.ok()) return status;
        break;
      case State::kBusy: {
        const absl::StatusOr<bool> done = lane_->has_settled(last_call_);
        if (!done.ok() || !*done) return done.status();
        state_ = State::kReady;
        for (Backend::Ticket ticket : std::exchange(in_progress_, {})) {
          if (absl::Status status = launched(ticket, lane_->stream()); !status.ok()) return status;
        }
        break;
      }
    }
  }
}

absl::Status Queue::launch_group() {
  const uint64_t group = held_.front().call.group;
  const auto end = group == 0 ? std::next(held_.begin())
                              : std::find_if(held_.begin(), held_.end(), [&](const Held& held) {
                                  return held.call.group != group;
                                });
  const std::vector<Held> calls(std::make_move_iterator(held_.begin()),
                                std::make_move_iterator(end));
  held_.erase(held_.begin(), end);
  const bool is_group = calls.size() > 1;
  last_call_ = "ncclGroupStart";
  absl::Status status;
  const auto check = [&](const char* call, int result) {
    last_call_ = call;
    if (result != kNcclInProgress) status.Update(library_->check_nccl(call, result, lane_->comm()));
  };
  for (const Held& held : calls) status.Update(lane_->follow(held.ready));
  if (is_group) check("ncclGroupStart", library_->ncclGroupStart());
  // Nothing runs before what it is to follow, or alone where the others group it.
  if (!status.ok()) return status;
  for (const Held& held : calls) {
    Call call = held.call;
    call.in_counts = held.in_counts;
    call.out_counts = held.out_counts;
    const nccl_internal::Launched one = launch(*library_, *lane_, group_, call);
    status.Update(library_->check_cuda("cudaMemcpyAsync", one.cuda));
    check(one.call, one.nccl);
    in_progress_.push_back(held.ticket);
  }
  if (is_group) check("ncclGroupEnd", library_->ncclGroupEnd());
  state_ = State::kBusy;
  return status;
}

}  // namespace shardweave::nccl_internal
