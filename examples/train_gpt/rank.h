// What one rank does, from the text to the sample; rank 0 tells about it.
//
//   Activity activity("starting");
//   absl::Status status = run_rank(world, settings, activity);       // on every rank of the world
//
// An error is one line that begins with what the rank was doing.
#pragma once

#include "absl/status/status.h"
#include "activity.h"
#include "settings.h"
#include "shardweave/comm/world.h"

namespace train_gpt {

absl::Status run_rank(shardweave::World& world, const Settings& settings, Activity& activity);

}  // namespace train_gpt
