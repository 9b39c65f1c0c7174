#include "shardweave/comm/environment/from_environment.h"

#include <ATen/Parallel.h>

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "shardweave/comm/environment/join_world.h"
#include "shardweave/comm/log.h"
#include "shardweave/comm/rendezvous/threads.h"
#include "shardweave/comm/store/c10d_store.h"
#include "shardweave/comm/store/file_store.h"

namespace shardweave {
namespace {

// Only ever fewer threads: a program or LibTorch may have chosen less than this rank's share.
void use_threads(const World& world) {
  const int threads = world.num_threads();
  if (threads == 0 || at::get_num_threads() <= threads) return;
  at::set_num_threads(threads);
  if (world.local_rank() != 0) return;
  say(describe_threads(threads, available_cores(), world.local_size()));
}

}  // namespace

absl::StatusOr<std::shared_ptr<Store>> open_store(const RendezvousInfo& info,
                                                  absl::Duration timeout) {
  if (absl::Status status = validate(info); !status.ok()) return status;
  const MeetingPoint& point = info.meeting_point;
  if (!point.file.empty()) return open_file_store(point.file);
  absl::StatusOr<std::shared_ptr<C10dStore>> store = open_c10d_store(
      {.host = point.host,
       .port = point.port,
       .serve = info.rank == 0 && !point.launcher_serves,
       .listen_fd = point.listen_fd,
       .timeout = timeout,
       // Of a pod, which every one of them is told.
       .names_come_later = Environment::of_process().get("KUBERNETES_SERVICE_HOST").has_value()});
  if (store.ok()) return *std::move(store);
  return absl::Status(
      store.status().code(),
      absl::StrCat("rank ", info.rank, " of ", info.world_size, " (", info.launcher,
                   "; address from ", point.origin, "): ", std::string(store.status().message())));
}

absl::StatusOr<std::unique_ptr<World>> join_world(const RendezvousInfo& info,
                                                  const WorldOptions& options,
                                                  ConnectDevice connect_device) {
  const absl::Time deadline = absl::Now() + options.timeout;
  absl::StatusOr<std::shared_ptr<Store>> store = open_store(info, options.timeout);
  if (!store.ok()) return store.status();
  absl::StatusOr<std::unique_ptr<World>> world =
      join_world(*std::move(store), info, options, deadline, std::move(connect_device));
  if (world.ok()) use_threads(**world);
  return world;
}

absl::StatusOr<std::unique_ptr<World>> World::from_environment(const WorldOptions& options) {
  absl::StatusOr<RendezvousInfo> info = detect_rendezvous(Environment::of_process());
  if (!info.ok()) return info.status();
  return join_world(*info, options);
}

}  // namespace shardweave
