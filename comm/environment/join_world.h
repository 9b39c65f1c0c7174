// Makes a World of ranks that are processes, once it is known who they are and where they meet.
//
//   RendezvousInfo info{.rank = rank, .world_size = 4};       // or detect_rendezvous()
//   info.meeting_point.file = "/shared/job7/store";
//   auto store = open_file_store(info.meeting_point.file);
//   auto world = join_world(*store, info, {.timeout = absl::Minutes(1)});
//
// All ranks call it; it returns when all have come, or the deadline has passed. Does not need
// LibTorch, and so does not tell it of world->num_threads(); the join_world() of from_environment.h
// does both.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "shardweave/comm/paired/paired.h"
#include "shardweave/comm/rendezvous/rendezvous.h"
#include "shardweave/comm/store/store.h"
#include "shardweave/comm/world.h"

namespace shardweave {

// Waits for the others until `deadline`, and no longer than options.timeout; for a rank 0 that does not
// come five seconds more, in which it could still say what is wrong. Errors, on every rank
// and naming the ranks that are at fault: those of check_in() and of the backend; InvalidArgument
// for an unknown backend or numbers that contradict each other (of one rank alone, too); of backend "nccl" those of
// nccl_backend.h: FailedPrecondition where there is no driver, no NCCL or an old one,
// InvalidArgument where there is no such device. `connect_device`: memory of devices goes by a backend
// of the caller's (paired/paired.h), on all ranks, and that of the CPU by Gloo; options.backend and
// options.device are not given then.
absl::StatusOr<std::unique_ptr<World>> join_world(std::shared_ptr<Store> store,
                                                  const RendezvousInfo& info,
                                                  const WorldOptions& options = {},
                                                  absl::Time deadline = absl::InfiniteFuture(),
                                                  ConnectDevice connect_device = nullptr);

}  // namespace shardweave
