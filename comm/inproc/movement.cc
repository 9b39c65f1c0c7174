#include "shardweave/comm/inproc/movement.h"

#include <algorithm>
#include <cstring>

#include "absl/container/inlined_vector.h"
#include "shardweave/comm/reduction.h"
#include "shardweave/comm/str_cat.h"

namespace shardweave::inproc {

void KeptCall::keep(const Call& call) {
  signature = signature_of(call);
  in = static_cast<std::byte*>(const_cast<void*>(call.in.data));
  out = static_cast<std::byte*>(call.out.data);
  in_counts.assign(call.in_counts.begin(), call.in_counts.end());
  out_counts.assign(call.out_counts.begin(), call.out_counts.end());
}

absl::Status check_calls(std::string_view group, absl::Span<const KeptCall* const> calls) {
  const CallSignature& first = calls[0]->signature;
  if (!std::all_of(calls.begin(), calls.end(),
                   [&](const KeptCall* call) { return is_same_call(call->signature, first); })) {
    std::vector<CallSignature> signatures;
    for (const KeptCall* call : calls) signatures.push_back(call->signature);
    return check_same_call(group, signatures);
  }
  if (first.op != OpKind::kAllToAllV) return absl::OkStatus();
  for (size_t from = 0; from < calls.size(); ++from) {
    for (size_t to = 0; to < calls.size(); ++to) {
      const int64_t sent = calls[from]->in_counts[to];
      const int64_t wanted = calls[to]->out_counts[from];
      if (sent != wanted) {
        return absl::FailedPreconditionError(str_cat(
            to_string(first), ", collective #", first.sequence, " of group '", group, "': rank ",
            from, " sends ", sent, " elements to rank ", to, ", which expects ", wanted));
      }
    }
  }
  return absl::OkStatus();
}

void Movement::add(int64_t length, int from, int64_t from_offset, int to, int64_t to_offset) {
  if (length == 0) return;
  segments_.push_back({length_, length, from, from_offset, to, to_offset});
  length_ += length;
}

void Movement::reset(absl::Span<const KeptCall* const> calls) {
  const CallSignature& what = calls[0]->signature;
  const int size = static_cast<int>(calls.size());
  const int root = what.root;
  ins_.clear();
  outs_.clear();
  segments_.clear();
  for (const KeptCall* call : calls) {
    ins_.push_back(call->in);
    outs_.push_back(call->out);
  }
  length_ = 0;
  dtype_ = what.dtype;
  element_ = shardweave::element_size(dtype_);
  reduce_op_ = what.reduce_op;

  switch (what.op) {
    case OpKind::kAllReduce:
      return add(what.count, kAll, 0, kAll, 0);
    case OpKind::kReduce:
      return add(what.count, kAll, 0, root, 0);
    case OpKind::kBroadcast:
      return add(what.count, root, 0, kAll, 0);
    case OpKind::kReduceScatter:
      for (int r = 0; r < size; ++r) add(what.count, kAll, length_, r, 0);
      return;
    case OpKind::kReduceScatterV:
      for (int r = 0; r < size; ++r) add(calls[0]->in_counts[r], kAll, length_, r, 0);
      return;
    case OpKind::kAllGather:
      for (int r = 0; r < size; ++r) add(what.count, r, 0, kAll, length_);
      return;
    case OpKind::kAllGatherV:
      for (int r = 0; r < size; ++r) add(calls[0]->out_counts[r], r, 0, kAll, length_);
      return;
    case OpKind::kGather:
      for (int r = 0; r < size; ++r) add(what.count, r, 0, root, length_);
      return;
    case OpKind::kScatter:
      for (int r = 0; r < size; ++r) add(what.count, root, length_, r, 0);
      return;
    case OpKind::kAllToAll: {
      const int64_t part = what.count / size;
      for (int to = 0; to < size; ++to) {
        for (int from = 0; from < size; ++from) add(part, from, to * part, to, from * part);
      }
      return;
    }
    case OpKind::kAllToAllV: {
      std::vector<int64_t> sent(size, 0);  // by rank
      for (int to = 0; to < size; ++to) {
        int64_t received = 0;
        for (int from = 0; from < size; ++from) {
          const int64_t part = calls[from]->in_counts[to];
          add(part, from, sent[from], to, received);
          sent[from] += part;
          received += part;
        }
      }
      return;
    }
    case OpKind::kBarrier:
    case OpKind::kSend:
    case OpKind::kRecv:
      return;
  }
}

void Movement::run(int64_t begin, int64_t end) const {
  auto segment = std::upper_bound(segments_.begin(), segments_.end(), begin,
                                  [](int64_t at, const Segment& s) { return at < s.begin; });
  if (segment != segments_.begin()) --segment;
  for (; segment != segments_.end() && segment->begin < end; ++segment) {
    const int64_t from = std::max(begin - segment->begin, int64_t{0});
    const int64_t to = std::min(end - segment->begin, segment->length);
    run_segment(*segment, from, to);
  }
}

void Movement::run_segment(const Segment& segment, int64_t begin, int64_t end) const {
  const int64_t from = (segment.from_offset + begin) * element_;
  const int64_t to = (segment.to_offset + begin) * element_;
  const bool to_all = segment.to == kAll;
  if (segment.from == kAll) {
    absl::InlinedVector<const void*, 16> inputs;
    absl::InlinedVector<void*, 16> outputs;
    for (const std::byte* in : ins_) inputs.push_back(in + from);
    for (int r = to_all ? 0 : segment.to; r < (to_all ? num_ranks() : segment.to + 1); ++r) {
      outputs.push_back(outs_[r] + to);
    }
    return reduce_ranks(dtype_, reduce_op_, inputs, outputs, end - begin);
  }
  const std::byte* source = ins_[segment.from] + from;
  const int64_t bytes = (end - begin) * element_;
  for (int r = to_all ? 0 : segment.to; r < (to_all ? num_ranks() : segment.to + 1); ++r) {
    std::byte* target = outs_[r] + to;
    if (target != source) std::memcpy(target, source, bytes);
  }
}

}  // namespace shardweave::inproc
