// A Store in one file that all ranks can open: on one machine, or on a shared file system with
// flock().
//
//   auto store = open_file_store("/shared/job7/store");      // a path that only this run uses
//   (*store)->set("address/0", my_address);
//
// The file is a log of checksummed records that only grows: writers append under flock(), which the
// kernel releases when a process dies; readers take no lock and stop at a record that is not
// complete. A writer that was killed half-way leaves a torn record, which the next writer cuts off.
// Nothing is flushed to the disk: a store need not outlive its machine.
//
// Whoever chose the path removes the file. A file of an earlier run brings that run's keys back.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "shardweave/comm/store/store.h"

namespace shardweave {

// Creates the file if it is not there, readable and writable by this user only. Errors: Unavailable
// if it cannot be opened, FailedPrecondition if the file is something else.
absl::StatusOr<std::shared_ptr<Store>> open_file_store(const std::string& path);

}  // namespace shardweave
