#include "shardweave/comm/backend.h"

#include <algorithm>

#include "shardweave/comm/str_cat.h"

namespace shardweave {
namespace {

// FNV-1a over the values: all processes must get the same number, which absl::Hash does not
// promise.
uint64_t hash_of(absl::Span<const int64_t> values) {
  uint64_t hash = 0xcbf29ce484222325;
  for (int64_t value : values) hash = (hash ^ static_cast<uint64_t>(value)) * 0x100000001b3;
  return hash;
}

}  // namespace

std::string_view to_string(OpKind op) {
  constexpr std::string_view kNames[kNumOpKinds] = {"all_reduce",
                                                    "all_gather",
                                                    "all_gather_v",
                                                    "reduce_scatter",
                                                    "reduce_scatter_v",
                                                    "all_to_all",
                                                    "all_to_all_v",
                                                    "broadcast",
                                                    "reduce",
                                                    "gather",
                                                    "scatter",
                                                    "barrier",
                                                    "send",
                                                    "recv"};
  return kNames[static_cast<int>(op)];
}

CallSignature signature_of(const Call& call) {
  CallSignature s;
  s.sequence = call.sequence;
  s.fingerprint = is_point_to_point(call.op) ? 0 : call.fingerprint;
  s.op = call.op;
  s.dtype = call.in.dtype;
  switch (call.op) {
    case OpKind::kAllReduce:
      s.count = call.in.count;
      s.reduce_op = call.reduce_op;
      break;
    case OpKind::kReduce:
      s.count = call.in.count;
      s.reduce_op = call.reduce_op;
      s.root = call.peer;
      break;
    case OpKind::kReduceScatter:
      s.count = call.out.count;
      s.reduce_op = call.reduce_op;
      break;
    case OpKind::kReduceScatterV:
      s.count = call.in.count;
      s.counts_hash = hash_of(call.in_counts);
      s.reduce_op = call.reduce_op;
      break;
    case OpKind::kAllGatherV:
      s.count = call.out.count;
      s.counts_hash = hash_of(call.out_counts);
      break;
    case OpKind::kAllGather:
    case OpKind::kAllToAll:
      s.count = call.in.count;
      break;
    case OpKind::kBroadcast:
    case OpKind::kGather:
      s.count = call.in.count;
      s.root = call.peer;
      break;
    case OpKind::kScatter:
      s.count = call.out.count;
      s.root = call.peer;
      break;
    case OpKind::kAllToAllV:  // counts differ between ranks
    case OpKind::kBarrier:
      break;
    case OpKind::kSend:
    case OpKind::kRecv:
      s.count = std::max(call.in.count, call.out.count);
      s.root = call.peer;
      break;
  }
  call.tag.copy(s.tag, sizeof(s.tag) - 1);
  return s;
}

std::string to_string(const CallSignature& s) {
  std::string text(to_string(s.op));
  if (s.op == OpKind::kBarrier) {
    text += "()";
  } else if (s.op == OpKind::kAllToAllV) {
    str_append(&text, "(", to_string(s.dtype), ")");
  } else {
    str_append(&text, "(", to_string(s.dtype), "[", s.count, "]");
    if (is_reduction(s.op)) str_append(&text, ", ", to_string(s.reduce_op));
    if (s.op == OpKind::kSend) {
      str_append(&text, ", to ", s.root);
    } else if (s.op == OpKind::kRecv) {
      str_append(&text, ", from ", s.root);
    } else if (s.root >= 0) {
      str_append(&text, ", root ", s.root);
    }
    text += ")";
  }
  if (s.tag[0] != '\0') str_append(&text, " '", s.tag, "'");
  return text;
}

std::string to_string(const Call& call) {
  return to_string(signature_of(call));
}

bool is_same_call(const CallSignature& a, const CallSignature& b) {
  return a.op == b.op && a.dtype == b.dtype && a.count == b.count && a.root == b.root &&
         a.reduce_op == b.reduce_op && a.counts_hash == b.counts_hash && a.sequence == b.sequence &&
         may_be_the_same(a.fingerprint, b.fingerprint);
}

std::string hidden_difference(const CallSignature& a, const CallSignature& b) {
  if (to_string(a) != to_string(b)) return "";
  if (a.sequence != b.sequence) {
    return str_cat(": these are number ", a.sequence, " and ", b.sequence);
  }
  if (a.counts_hash != b.counts_hash) return ": the counts per rank differ";
  return ": these are about different things: what they move differs in its shape or layout, or in "
         "what it was computed from. An argument, operator, shape, layout, number or random seed "
         "was not the same on all ranks, here or before; or one has called a collective function "
         "that the others have not (item() in a branch for one rank, say)";
}

absl::Status check_same_call(std::string_view group, absl::Span<const CallSignature> by_rank) {
  const CallSignature& first = by_rank[0];
  for (size_t rank = 1; rank < by_rank.size(); ++rank) {
    const CallSignature& other = by_rank[rank];
    if (is_same_call(first, other)) continue;
    return absl::FailedPreconditionError(
        str_cat("ranks of group '", group, "' called different things as collective #",
                first.sequence, ": rank 0 called ", to_string(first), ", rank ", rank, " called ",
                to_string(other), hidden_difference(first, other)));
  }
  return absl::OkStatus();
}

std::string name_call(const GroupInfo& group, const Call& call) {
  return str_cat(to_string(call.op), " #", call.sequence,
                 call.tag.empty() ? "" : str_cat(" '", call.tag, "'"), " of group '", group.name,
                 "' (rank ", group.rank, " of ", group.size(), ")");
}

bool Backend::done(Ticket) {
  return true;
}

absl::Status Backend::wait(Ticket, Deadline) {
  return absl::OkStatus();
}

absl::Status Backend::wait_on(Ticket ticket, DeviceStream) {
  return wait(ticket, Deadline::max());
}

absl::Status Backend::copy_to_host(void*, const ConstBuffer& device, DeviceStream) {
  return absl::UnimplementedError(
      str_cat("backend ", name(), " copies nothing from ", to_string(device.device)));
}

absl::Status Backend::copy_to_device(const Buffer& device, const void*, DeviceStream) {
  return absl::UnimplementedError(
      str_cat("backend ", name(), " copies nothing to ", to_string(device.device)));
}

// NOLINTNEXTLINE(performance-unnecessary-value-param): backends keep it
absl::StatusOr<std::unique_ptr<Backend>> Backend::subgroup(GroupInfo group, absl::Span<const int>,
                                                           std::string_view, Deadline) {
  return absl::UnimplementedError(str_cat("backend ", name(), " cannot make the subgroup '",
                                          group.name, "' of '", group_.name, "'"));
}

}  // namespace shardweave
