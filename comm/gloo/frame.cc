#include "shardweave/comm/gloo/frame.h"

#include <bit>

#include "shardweave/comm/gloo/schedule.h"
#include "shardweave/comm/str_cat.h"

namespace shardweave::gloo_internal {
namespace {

// Of one frame of a collective; whatever its kind, a rank has no more in all than `size` times its
// count.
bool is_length_possible(const FrameHeader& header, int group_size) {
  const CallSignature& call = header.signature;
  if (call.op == OpKind::kAllToAllV) {  // counts are announced in the first step
    return header.step > 0 || header.length <= static_cast<int64_t>(sizeof(int64_t));
  }
  int64_t most = 0;
  return !__builtin_mul_overflow(call.count, element_size(call.dtype), &most) &&
         !__builtin_mul_overflow(most, group_size, &most) && header.length <= most;
}

const char* find_fault(const FrameHeader& header, int group_size) {
  const CallSignature& call = header.signature;
  if (header.magic != kFrameMagic) return "no magic number";
  if (static_cast<uint32_t>(header.kind) >= kNumFrameKinds) return "an unknown kind";
  if (header.length < 0) return "a negative length";
  switch (header.kind) {
    case FrameKind::kLeave:
      return header.length <= kMaxFailureText ? nullptr : "too long a text";
    case FrameKind::kFailure:
      if (header.value <= 0 || header.value > static_cast<int>(absl::StatusCode::kUnauthenticated))
        return "an unknown status code";
      return header.length <= kMaxFailureText ? nullptr : "too long a text";
    default:
      break;
  }
  if (static_cast<int>(call.op) >= kNumOpKinds) return "an unknown operation";
  if (static_cast<int>(call.dtype) >= kNumDTypes) return "an unknown dtype";
  if (call.reduce_op > ReduceOp::kProduct) return "an unknown reduction";
  if (call.count < 0 || call.count > INT64_MAX / element_size(call.dtype)) return "an absurd count";
  if (call.root < -1 || call.root >= group_size) return "a root that is no rank";
  if (call.tag[sizeof(call.tag) - 1] != '\0') return "a tag without end";
  if (header.step > INT32_MAX) return "an absurd step";
  if (header.kind == FrameKind::kReceipt || header.kind == FrameKind::kGrant) {
    if (call.op != OpKind::kSend) return "the wrong operation";
    return header.length == 0 ? nullptr : "a length";
  }
  const bool is_message = call.op == OpKind::kSend;
  if (call.op == OpKind::kRecv || (header.kind == FrameKind::kMessage && !is_message) ||
      (header.kind == FrameKind::kCollective && is_message)) {
    return "the wrong operation";
  }
  if (header.kind == FrameKind::kOffer) return header.length == 0 ? nullptr : "a length";
  if (is_message) {
    return header.length == call.count * element_size(call.dtype) ? nullptr : "the wrong length";
  }
  return is_length_possible(header, group_size) ? nullptr : "too great a length";
}

}  // namespace

std::string describe_build() {
  const CollectiveSchedule::Limits limits;
  return str_cat("protocol ", kProtocol, ", frames of ", sizeof(FrameHeader), " bytes, ",
                 kNumOpKinds, " operations, ", kNumDTypes, " dtypes, steps of ", limits.extra_work,
                 " and ", limits.scratch, " bytes, ",
                 std::endian::native == std::endian::little ? "little" : "big", " endian");
}

absl::Status check_frame(const FrameHeader& header, int group_size) {
  const char* fault = find_fault(header, group_size);
  if (fault == nullptr) return absl::OkStatus();
  return absl::DataLossError(str_cat("sent what is not a frame: ", fault));
}

}  // namespace shardweave::gloo_internal
