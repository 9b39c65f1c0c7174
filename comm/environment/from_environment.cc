#include "shardweave/comm/environment/from_environment.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "shardweave/comm/environment/join_world.h"
#include "shardweave/comm/store/c10d_store.h"
#include "shardweave/comm/store/file_store.h"

namespace shardweave {

absl::StatusOr<std::shared_ptr<Store>> open_store(const RendezvousInfo& info,
                                                  absl::Duration timeout) {
  if (absl::Status status = validate(info); !status.ok()) return status;
  const MeetingPoint& point = info.meeting_point;
  if (!point.file.empty()) return open_file_store(point.file);
  absl::StatusOr<std::shared_ptr<C10dStore>> store =
      open_c10d_store({.host = point.host,
                       .port = point.port,
                       .serve = info.rank == 0 && !point.launcher_serves,
                       .listen_fd = point.listen_fd,
                       .timeout = timeout});
  if (store.ok()) return *std::move(store);
  return absl::Status(
      store.status().code(),
      absl::StrCat("rank ", info.rank, " of ", info.world_size, " (", info.launcher,
                   "; address from ", point.origin, "): ", std::string(store.status().message())));
}

absl::StatusOr<std::unique_ptr<World>> World::from_environment(const WorldOptions& options) {
  const absl::Time deadline = absl::Now() + options.timeout;
  absl::StatusOr<RendezvousInfo> info = detect_rendezvous(Environment::of_process());
  if (!info.ok()) return info.status();
  absl::StatusOr<std::shared_ptr<Store>> store = open_store(*info, options.timeout);
  if (!store.ok()) return store.status();
  return join_world(*std::move(store), *info, options, deadline);
}

}  // namespace shardweave
