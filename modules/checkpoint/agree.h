// What ranks tell each other around a checkpoint: small texts, and whether all is well. Internal to
// modules/checkpoint/.
//
// Collective over the communicator, all of it.
#pragma once

#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "shardweave/comm/communicator.h"

namespace shardweave::checkpoint_internal {

// Every rank's text, by rank.
absl::StatusOr<std::vector<std::string>> exchange(Communicator& comm, const std::string& mine,
                                                  absl::Duration timeout);

// OK if all ranks are; else, on all of them, the error of the first that is not: "rank 3: ...".
absl::Status agree(Communicator& comm, const absl::Status& mine, absl::Duration timeout);

// Each number becomes the sum of all ranks' (modulo 2^64).
absl::Status add_up(Communicator& comm, std::vector<uint64_t>& numbers, absl::Duration timeout);

// `work`, whose exceptions become its status: what one rank throws all are told.
absl::Status status_of(absl::FunctionRef<absl::Status()> work);

// What rank 0 makes, on all ranks; or its error. The others do not call `make`, which may throw.
absl::StatusOr<std::string> from_first(Communicator& comm,
                                       absl::FunctionRef<absl::StatusOr<std::string>()> make,
                                       absl::Duration timeout);

}  // namespace shardweave::checkpoint_internal
