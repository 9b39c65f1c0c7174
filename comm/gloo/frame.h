// What goes over a connection: frames, each a header and `length` bytes.
//
//   FrameHeader header{.kind = FrameKind::kCollective, .step = 0, .length = 28, .signature = mine};
//
// Both sides run the same build on machines of the same byte order: ranks compare their builds when
// they connect (mesh.h), and the magic number tells of what is not a rank at all.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "shardweave/comm/backend.h"

namespace shardweave::gloo_internal {

enum class FrameKind : uint32_t {
  kCollective,  // one step of a collective, of one rank to another
  kMessage,     // of a send to a recv
  kReceipt,     // the recv has got the message with this signature
  kFailure,     // the sender's communicator is broken: `value` is the status code, the payload says
                // why
  kLeave,       // the sender's communicator is destroyed; nothing comes after this. The payload is
                // what had failed before in any of the sender's groups
  kOffer,       // a collective's frame or a message like this one would come if there were room
  kGrant,       // the recv waits for the message of this offer
};
inline constexpr uint32_t kNumFrameKinds = 7;

inline constexpr uint32_t kFrameMagic = 0x53575634;  // "SWV4"
// So that it fits into an empty socket whole.
inline constexpr int64_t kMaxFailureText = 4096;

struct FrameHeader {
  uint32_t magic = kFrameMagic;
  FrameKind kind = FrameKind::kCollective;
  uint32_t step = 0;  // of the collective; in a failure: 1 + the world rank that failed, or 0
  int32_t value = 0;  // the message tag, or the status code
  int64_t length = 0;
  CallSignature signature;  // of the sender's call: in every frame of a collective or message
};
static_assert(sizeof(FrameHeader) == 96, "sent as it lies in memory, so without padding");

// What must be equal on both sides of a connection, as text. Change kProtocol with whatever else
// changes what ranks say to each other.
inline constexpr int kProtocol = 5;
std::string describe_build();

// DataLoss if no rank of a group of `group_size` sends this: a kind, operation, dtype, length or
// text that does not exist. The length of a collective's frame is checked against the call that it
// belongs to, where that is known.
absl::Status check_frame(const FrameHeader& header, int group_size);

}  // namespace shardweave::gloo_internal
