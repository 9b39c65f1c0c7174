#include "shardweave/comm/environment/join_world.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "shardweave/comm/gloo/gloo_backend.h"
#include "shardweave/comm/nccl/nccl_backend.h"
#include "shardweave/comm/nccl/staged_backend.h"
#include "shardweave/comm/paired/paired.h"
#include "shardweave/comm/rendezvous/check_in.h"
#include "shardweave/comm/rendezvous/threads.h"
#include "shardweave/comm/store/prefix_store.h"

namespace shardweave {
namespace {

// After which a rank says for whom it waits.
constexpr absl::Duration kPatience = absl::Seconds(10);

absl::Status check(const WorldOptions& options, bool own_backend) {
  if (options.backend != "gloo" && options.backend != "nccl") {
    return absl::InvalidArgumentError(
        absl::StrCat("backend \"", options.backend,
                     "\": wanted \"gloo\" or \"nccl\" for ranks that are processes; ranks that "
                     "are threads need no rendezvous"));
  }
  if (options.device < -1) {
    return absl::InvalidArgumentError(
        absl::StrCat("device ", options.device, ": wanted 0 or more, or -1"));
  }
  if (own_backend && (options.backend != "gloo" || options.device != -1)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a backend for devices is given, and ",
        options.device == -1 ? "the backend \"nccl\"" : absl::StrCat("the device ", options.device),
        " as well: wanted one of them"));
  }
  return absl::OkStatus();
}

// How a rank is to join.
std::string_view way_of(const WorldOptions& options, bool own_backend) {
  if (own_backend) return "a backend of its own for devices";
  if (options.backend == "nccl") return "backend \"nccl\"";
  return options.device < 0 ? "backend \"gloo\" without a device"
                            : "backend \"gloo\" with a device";
}

// Ranks that join in different ways would wait for each other.
absl::Status same_backend_everywhere(Backend& gloo, const WorldOptions& options, bool own_backend,
                                     Deadline deadline) {
  if (gloo.group().size() == 1) return absl::OkStatus();
  std::vector<int> everyone(gloo.group().size());
  std::iota(everyone.begin(), everyone.end(), 0);
  absl::StatusOr<std::unique_ptr<Backend>> all =
      gloo.subgroup(gloo.group(), everyone, "backends", deadline);
  if (!all.ok()) return all.status();
  const std::shared_ptr<Communicator> comm =
      Communicator::create(*std::move(all), {.timeout = options.timeout});
  char mine[40] = {};
  way_of(options, own_backend).copy(mine, sizeof(mine) - 1);
  std::vector<char> theirs(sizeof(mine) * everyone.size());
  const auto bytes = static_cast<int64_t>(sizeof(mine));
  absl::Status status =
      comm->all_gather(ConstBuffer(mine, bytes, DType::kU8),
                       Buffer{theirs.data(), bytes * comm->size(), DType::kU8, {}},
                       {.tag = "which backend"})
          .wait();
  for (int rank = 1; status.ok() && rank < comm->size(); ++rank) {
    const std::string_view first(theirs.data()), other(theirs.data() + rank * sizeof(mine));
    if (first != other) {
      status = absl::FailedPreconditionError(
          absl::StrCat("ranks join in different ways: rank 0 has ", std::string(first), ", rank ",
                       rank, " has ", std::string(other)));
    }
  }
  // Whoever leaves before the others have heard it would be an error there.
  absl::Status heard = comm->barrier({.tag = "which backend"}).wait();
  return status.ok() ? heard : status;
}

}  // namespace

absl::StatusOr<std::unique_ptr<World>> join_world(std::shared_ptr<Store> store,
                                                  const RendezvousInfo& info,
                                                  const WorldOptions& options, absl::Time deadline,
                                                  ConnectDevice connect_device) {
  if (absl::Status valid = check(options, connect_device != nullptr); !valid.ok()) {
    return decline(*store, info, std::move(valid));
  }
  deadline = std::min(deadline, absl::Now() + options.timeout);
  const std::vector<CpuLimit> limits = cpu_limits();
  absl::StatusOr<Roster> roster =
      check_in(*store, info, this_host(), deadline - absl::Now(), kPatience, names_of(limits));
  if (!roster.ok()) return roster.status();

  GroupInfo group{.name = "world", .rank = info.rank};
  group.world_ranks.resize(info.world_size);
  std::iota(group.world_ranks.begin(), group.world_ranks.end(), 0);
  absl::StatusOr<std::unique_ptr<Backend>> backend = make_gloo_backend(
      make_prefix_store(std::move(store), absl::StrCat("shardweave/", info.run, "/")),
      std::move(group), {.interface = options.interface, .timeout = deadline - absl::Now()});
  if (!backend.ok()) return backend.status();
  // A century: more overflows clocks.
  const absl::Duration left = std::min(deadline - absl::Now(), absl::Hours(24 * 365 * 100));
  const auto until = std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(left);
  if (absl::Status same =
          same_backend_everywhere(**backend, options, connect_device != nullptr, until);
      !same.ok())
    return same;
  const int local_rank = info.local_rank.value_or(roster->local_rank(info.rank));
  if (options.backend == "nccl" || options.device >= 0) {
    const NcclOptions on_gpu = {.device = options.device < 0 ? local_rank : options.device,
                                .libraries = nccl_libraries_of_environment()};
    connect_device = options.backend == "nccl" ? connect_nccl(on_gpu) : connect_staged(on_gpu);
  }
  if (connect_device != nullptr) {
    backend = make_paired_backend(*std::move(backend), std::move(connect_device), {}, until);
    if (!backend.ok()) return backend.status();
  }
  std::shared_ptr<Communicator> comm =
      Communicator::create(*std::move(backend), {.timeout = options.timeout});

  // A rank that is connected may leave and take its store along; nobody does before all are
  // connected.
  const absl::Duration at_last = std::max(deadline - absl::Now(), absl::Nanoseconds(1));
  absl::Status all = comm->barrier({.timeout = at_last, .tag = "join_world"}).wait();
  if (!all.ok()) return all;
  const int local_size = info.local_world_size.value_or(roster->local_size(info.rank));
  const std::optional<int> threads = threads_per_rank(Environment::of_process(), limits,
                                                      roster->local_cpus(info.rank), local_size);
  return std::make_unique<World>(std::move(comm), local_rank, local_size, threads.value_or(0));
}

}  // namespace shardweave
