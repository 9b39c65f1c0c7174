#include <pthread.h>

#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "shardweave/comm/failed_rank.h"
#include "shardweave/comm/inproc/inproc.h"
#include "shardweave/comm/status_exception.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/comm/world.h"

namespace shardweave {
namespace {

absl::Status run_body(World& world, const std::function<absl::Status(World&)>& body) {
  try {
    return body(world);
  } catch (const std::exception& e) {
    if (const auto* coded = dynamic_cast<const StatusException*>(&e)) {
      return absl::Status(coded->status().code(), message_of(e));
    }
    return absl::InternalError(str_cat("exception: ", message_of(e)));
  } catch (...) {
    return absl::InternalError("an exception that is no std::exception");
  }
}

}  // namespace

absl::Status run_ranks(int num_ranks, const std::function<absl::Status(World&)>& body,
                       const WorldOptions& options) {
  if (num_ranks < 1 || num_ranks > kMaxInprocRanks) {
    return absl::InvalidArgumentError(
        str_cat("run_ranks: num_ranks is ", num_ranks, ": wanted 1 to ", kMaxInprocRanks));
  }
  InprocHub hub(num_ranks);
  std::mutex mutex;
  absl::Status first_failure;  // guarded by mutex
  const auto run_rank = [&](int rank) {
    // For debuggers and profilers. Linux takes 15 bytes, and "rank 2147483647" is as many.
    pthread_setname_np(pthread_self(), str_cat("rank ", rank).c_str());
    World world(hub.connect(rank, {.timeout = options.timeout}));
    const absl::Status status = run_body(world, body);
    if (status.ok()) return hub.leave(rank);
    {
      std::lock_guard lock(mutex);
      first_failure.Update(of_rank(
          absl::Status(status.code(), str_cat("rank ", rank, ": ", status.message())), rank));
    }
    const std::string why =
        str_cat(absl::StatusCodeToString(status.code()), ": ", status.message());
    hub.abort(of_rank(absl::AbortedError(str_cat("rank ", rank, " failed: ", why)), rank));
  };
  std::vector<std::thread> threads;
  try {
    for (int rank = 0; rank < num_ranks; ++rank) threads.emplace_back(run_rank, rank);
  } catch (const std::system_error& e) {
    const absl::Status failure = absl::ResourceExhaustedError(
        str_cat("no thread for rank ", threads.size(), ": ", e.what()));
    std::lock_guard lock(mutex);
    first_failure.Update(failure);
    hub.abort(failure);
  }
  for (std::thread& thread : threads) thread.join();
  return first_failure;
}

}  // namespace shardweave
