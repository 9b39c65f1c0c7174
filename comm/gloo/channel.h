// The connections to one other rank: connected, non-blocking stream sockets.
#pragma once

#include "shardweave/comm/gloo/unique_fd.h"

namespace shardweave::gloo_internal {

struct Channel {
  UniqueFd data;
  // Only the reason of a failure goes here: on `data` it would stand behind a frame that is half
  // sent, and that the other side may not be reading. May be missing.
  UniqueFd control;
};

}  // namespace shardweave::gloo_internal
