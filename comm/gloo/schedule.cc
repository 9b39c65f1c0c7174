#include "shardweave/comm/gloo/schedule.h"

#include <algorithm>
#include <cstring>

#include "shardweave/comm/reduction.h"
#include "shardweave/comm/str_cat.h"

namespace shardweave::gloo_internal {
namespace {

int64_t divide_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace

void CollectiveSchedule::start(const GroupInfo& group, const Call& call) {
  rank_ = group.rank;
  size_ = group.size();
  op_ = call.op;
  dtype_ = call.in.dtype;
  reduce_op_ = call.reduce_op;
  root_ = call.peer;
  element_ = element_size(dtype_);
  in_ = static_cast<const std::byte*>(call.in.data);
  out_ = static_cast<std::byte*>(call.out.data);
  step_ = 0;
  gathering_ = false;
  transfers_.assign(size_, Transfer());
  own_part_ = Transfer();
  if (is_reduction(op_)) {
    start_reduction(call);
  } else {
    plan_movement(call);
    own_part_ = transfers_[rank_];
    if (op_ == OpKind::kAllToAllV) announce(call);
  }
}

void CollectiveSchedule::copy_own_part() const {
  if (own_part_.send_bytes > 0 && own_part_.send != own_part_.recv) {
    std::memcpy(own_part_.recv, own_part_.send, own_part_.send_bytes);
  }
}

absl::StatusOr<bool> CollectiveSchedule::finish_step() {
  ++step_;
  if (is_reduction(op_)) return finish_reduction_step();
  if (op_ != OpKind::kAllToAllV || step_ > 1) return false;
  if (absl::Status status = check_announcement(); !status.ok()) return status;
  transfers_ = after_announcement_;
  return true;
}

// 1. Collectives that only move.

void CollectiveSchedule::plan_movement(const Call& call) {
  int64_t in_begin = 0;  // of the peer's part, where counts differ
  int64_t out_begin = 0;
  for (int peer = 0; peer < size_; ++peer) {
    Transfer& t = transfers_[peer];
    const auto send = [&](int64_t begin, int64_t count) {
      t.send = in(begin);
      t.send_bytes = count * element_;
    };
    const auto recv = [&](int64_t begin, int64_t count) {
      t.recv = out(begin);
      t.recv_bytes = count * element_;
    };
    switch (op_) {
      case OpKind::kAllGather:
        send(0, call.in.count);
        recv(peer * call.in.count, call.in.count);
        break;
      case OpKind::kAllGatherV:
        send(0, call.in.count);
        recv(out_begin, call.out_counts[peer]);
        out_begin += call.out_counts[peer];
        break;
      case OpKind::kAllToAll: {
        const int64_t count = call.in.count / size_;
        send(peer * count, count);
        recv(peer * count, count);
        break;
      }
      case OpKind::kAllToAllV:
        send(in_begin, call.in_counts[peer]);
        recv(out_begin, call.out_counts[peer]);
        in_begin += call.in_counts[peer];
        out_begin += call.out_counts[peer];
        break;
      case OpKind::kBroadcast:
        if (rank_ == root_ && peer != root_) send(0, call.in.count);
        if (rank_ != root_ && peer == root_) recv(0, call.out.count);
        break;
      case OpKind::kGather:
        if (peer == root_) send(0, call.in.count);
        if (rank_ == root_) recv(peer * call.in.count, call.in.count);
        break;
      case OpKind::kScatter:
        if (rank_ == root_) send(peer * call.out.count, call.out.count);
        if (peer == root_) recv(0, call.out.count);
        break;
      default:  // a barrier, where all frames are empty
        break;
    }
  }
}

void CollectiveSchedule::announce(const Call& call) {
  after_announcement_ = transfers_;
  announced_.assign(call.in_counts.begin(), call.in_counts.end());
  announced_.resize(size_t{2} * size_);
  for (int peer = 0; peer < size_; ++peer) {
    transfers_[peer] = {reinterpret_cast<const std::byte*>(&announced_[peer]), sizeof(int64_t),
                        reinterpret_cast<std::byte*>(&announced_[size_ + peer]), sizeof(int64_t)};
  }
}

absl::Status CollectiveSchedule::check_announcement() const {
  for (int peer = 0; peer < size_; ++peer) {
    const int64_t expected = after_announcement_[peer].recv_bytes / element_;
    if (peer == rank_ || announced_[size_ + peer] == expected) continue;
    return absl::FailedPreconditionError(str_cat("rank ", peer, " sends ", announced_[size_ + peer],
                                                 " elements to rank ", rank_, ", which expects ",
                                                 expected));
  }
  return absl::OkStatus();
}

// 2. Reductions.

void CollectiveSchedule::start_reduction(const Call& call) {
  count_ = call.in.count;
  // Computing all: receives n - 1 inputs, adds up n. A part: receives two times (n - 1) / n, adds
  // up one.
  const int64_t extra_work = count_ * element_ / size_ * 2 * (size_ - 1) * (size_ - 1);
  split_ = op_ == OpKind::kAllReduce && extra_work > limits_.extra_work;
  part_begins_.assign(size_ + 1, 0);
  for (int rank = 0; rank < size_; ++rank) {
    int64_t count = 0;
    if (op_ == OpKind::kReduceScatter) count = call.out.count;
    if (op_ == OpKind::kReduceScatterV) count = call.in_counts[rank];
    part_begins_[rank + 1] = part_begins_[rank] + count;
  }

  int64_t longest = count_;  // of what one rank reduces
  if (split_) longest = divide_up(count_, size_);
  if (is_reduce_scatter()) {
    longest = 0;
    for (int rank = 0; rank < size_; ++rank) {
      longest = std::max(longest, part_begins_[rank + 1] - part_begins_[rank]);
    }
  }
  const int64_t inputs = std::max(size_ - 1, 1);
  segment_ =
      std::clamp<int64_t>(limits_.scratch / (inputs * element_), 1, std::max<int64_t>(longest, 1));
  segments_ = std::max<int64_t>(divide_up(longest, segment_), 1);
  const bool reduces = op_ != OpKind::kReduce || rank_ == root_;
  if (const int64_t bytes = inputs * segment_ * element_; reduces && bytes > scratch_bytes_) {
    scratch_ = std::make_unique_for_overwrite<std::byte[]>(bytes);
    scratch_bytes_ = bytes;
  }
  inputs_.resize(size_);
  index_ = 0;
  plan_reduction_step();
}

CollectiveSchedule::Range CollectiveSchedule::reduced_by(int rank) const {
  Range whole{0, count_};
  if (is_reduce_scatter()) whole = {part_begins_[rank], part_begins_[rank + 1]};
  if (op_ == OpKind::kReduce && rank != root_) whole = {0, 0};
  const int64_t length = split_ ? segment_ * size_ : segment_;
  Range range{std::min(whole.end, whole.begin + index_ * length), 0};
  range.end = std::min(whole.end, range.begin + length);
  if (split_) {
    const int64_t part = divide_up(range.end - range.begin, size_);
    const int64_t end = range.end;
    range.begin = std::min(end, range.begin + rank * part);
    range.end = std::min(end, range.begin + part);
  }
  return range;
}

std::byte* CollectiveSchedule::scratch_of(int peer) const {
  return scratch_.get() + (peer < rank_ ? peer : peer - 1) * segment_ * element_;
}

void CollectiveSchedule::plan_reduction_step() {
  const Range mine = reduced_by(rank_);
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    const Range theirs = reduced_by(peer);
    if (gathering_) {
      transfers_[peer] = {out(mine.begin), mine.size() * element_, out(theirs.begin),
                          theirs.size() * element_};
    } else {
      transfers_[peer] = {in(theirs.begin), theirs.size() * element_, scratch_of(peer),
                          mine.size() * element_};
    }
  }
}

bool CollectiveSchedule::finish_reduction_step() {
  if (!gathering_) reduce();
  if (split_) gathering_ = !gathering_;
  if (!gathering_ && ++index_ == segments_) return false;
  plan_reduction_step();
  return true;
}

void CollectiveSchedule::reduce() {
  const Range mine = reduced_by(rank_);
  if (mine.size() == 0) return;
  for (int rank = 0; rank < size_; ++rank) {
    inputs_[rank] = rank == rank_ ? in(mine.begin) : scratch_of(rank);
  }
  void* result = out(is_reduce_scatter() ? mine.begin - part_begins_[rank_] : mine.begin);
  reduce_ranks(dtype_, reduce_op_, inputs_, {&result, 1}, mine.size());
}

}  // namespace shardweave::gloo_internal
