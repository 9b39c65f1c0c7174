// What goes over a connection: frames, each a header and `length` bytes.
//
//   FrameHeader header{.kind = FrameKind::kCollective, .step = 0, .length = 28, .signature = mine};
//
// Both sides run the same program on machines of the same byte order; the magic number tells if
// not.
#pragma once

#include <cstdint>

#include "shardweave/comm/backend.h"

namespace shardweave::gloo_internal {

enum class FrameKind : uint32_t {
  kCollective,  // one step of a collective, of one rank to another
  kMessage,     // of a send to a recv
  kReceipt,     // the recv has got the message with this signature
  kFailure,     // the sender's communicator is broken: `value` is the status code, the payload says
                // why
  kLeave,       // the sender's communicator is destroyed; nothing comes after this
};

inline constexpr uint32_t kFrameMagic = 0x53575631;  // "SWV1"

struct FrameHeader {
  uint32_t magic = kFrameMagic;
  FrameKind kind = FrameKind::kCollective;
  uint32_t step = 0;  // of the collective
  int32_t value = 0;  // the message tag, or the status code
  int64_t length = 0;
  CallSignature signature;  // of the sender's call: in every frame of a collective or message
};
static_assert(sizeof(FrameHeader) == 88, "sent as it lies in memory, so without padding");

}  // namespace shardweave::gloo_internal
