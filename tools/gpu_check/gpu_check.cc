#include "gpu_check.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "c10/core/DeviceGuard.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "check.h"
#include "shardweave/comm/environment/from_environment.h"
#include "shardweave/comm/environment/join_world.h"
#include "shardweave/comm/rendezvous/rendezvous.h"
#include "shardweave/comm/store/in_process_store.h"
#include "shardweave/dtensor/load_cuda.h"

namespace shardweave_tool {
namespace {

using namespace shardweave;

enum class Needs : uint8_t { kNothing, kGpu, kWorld, kTwoRanks };

std::string to_string(Needs needs) {
  switch (needs) {
    case Needs::kNothing:
      return "nothing";
    case Needs::kGpu:
      return "a GPU, and LibTorch's CUDA";
    case Needs::kWorld:
      return "ranks that have joined";
    case Needs::kTwoRanks:
      return "two ranks";
  }
  return "";
}

struct CheckKind {
  const char* name;
  const char* what;
  Needs needs;
  void (*run)(Session& session, Check& check);
};

absl::StatusOr<std::unique_ptr<World>> join_by_environment(const GpuCheckOptions& options,
                                                           int device) {
  const WorldOptions world = {
      .backend = options.backend, .timeout = options.timeout, .device = device};
  const absl::StatusOr<RendezvousInfo> launched = detect_rendezvous(Environment::of_process());
  if (launched.ok()) return join_world(*launched, world);
  if (!absl::IsNotFound(launched.status())) return launched.status();
  RendezvousInfo alone{.local_rank = 0};
  alone.meeting_point.file = "none: it is one rank, and the store is given";
  return join_world(make_in_process_store(), alone, world);
}

// Which GPU a rank is to have; -1: that of its local rank, as joining finds it out.
int wanted_gpu(const GpuCheckOptions& options) {
  if (options.device >= 0 || options.backend == "nccl") return options.device;
  const absl::StatusOr<RendezvousInfo> launched = detect_rendezvous(Environment::of_process());
  const int rank = launched.ok() ? launched->local_rank.value_or(launched->rank) : 0;
  return rank % c10::impl::VirtualGuardImpl(c10::kCUDA).deviceCount();
}

void check_join(Session& session, Check& check) {
  const int wanted = wanted_gpu(session.options);
  absl::StatusOr<std::unique_ptr<World>> world =
      session.options.join ? session.options.join() : join_by_environment(session.options, wanted);
  if (!world.ok()) return check.fail(std::string(world.status().message()));
  session.world = *std::move(world);
  session.device = c10::Device(
      c10::kCUDA, static_cast<c10::DeviceIndex>(wanted < 0 ? session.world->local_rank() : wanted));
  check.looked_at(absl::StrCat("rank ", session.world->rank(), " of ", session.world->size(),
                               " has ", session.device.str()));
}

constexpr CheckKind kChecks[] = {
    {"machine", "versions, and the GPUs that there are", Needs::kNothing, check_machine},
    {"join", "the ranks find each other, over Gloo, and NCCL unless --backend=gloo", Needs::kGpu,
     check_join},
    {"collectives", "every collective, dtype and reduction against the CPU's numbers",
     Needs::kWorld, check_collectives},
    {"streams", "collectives in the order of streams, without the host", Needs::kWorld,
     check_streams},
    {"bandwidth", "what collectives bring in a second", Needs::kTwoRanks, check_bandwidth},
    {"operators alone", "operators on DTensors of one rank, backward too, against the CPU",
     Needs::kWorld, check_operators_alone},
    {"operators", "the same on DTensors of all ranks", Needs::kTwoRanks, check_operators},
    {"redistribution", "every layout to every layout", Needs::kWorld, check_redistribution},
    {"random numbers", "the CPU's bits", Needs::kWorld, check_random},
    {"training", "losses of a transformer, under each kind of parallelism, against the CPU's",
     Needs::kWorld, check_training},
    {"captured steps", "steps that are captured and replayed, under each kind of parallelism",
     Needs::kWorld, check_captured},
    {"checkpoint", "saved on GPUs, loaded there and on the CPU", Needs::kWorld, check_checkpoint},
    {"memory", "what fully sharded training holds at most, beside its formula", Needs::kWorld,
     check_memory},
    {"dispatch", "what an operator on DTensors costs the host more", Needs::kWorld, check_dispatch},
    {"block", "a transformer block's time on the device: plain, DTensors, fully sharded",
     Needs::kWorld, check_block},
    {"block of matmuls", "the same with attention by matmul and softmax", Needs::kWorld,
     check_block_of_matmuls},
};

std::optional<std::string> what_is_missing(const Session& session, Needs needs) {
  if (needs == Needs::kNothing) return std::nullopt;
  if (!session.gpu.ok()) return std::string(session.gpu.message());
  if (needs == Needs::kGpu) return std::nullopt;
  if (session.world == nullptr) return "the ranks have not joined";
  if (!session.lost.empty()) return session.lost;
  if (needs == Needs::kTwoRanks && session.ranks() < 2) {
    return "there is one rank: start several by torchrun, Slurm or --ranks";
  }
  return std::nullopt;
}

// What others have found is a failure here, too.
void agree(Session& session, Check& check) {
  const std::string mine = check.failed_text();
  const absl::StatusOr<std::vector<std::string>> texts = texts_of_ranks(session, mine);
  if (!texts.ok()) {
    check.fail(absl::StrCat("afterwards the ranks do not hear each other: ",
                            std::string(texts.status().message())));
    session.lost = absl::StrCat("the ranks have lost each other in \"", check.result.name, "\"");
    return;
  }
  if (session.ranks() == 1) return;
  std::vector<int> failed;
  for (int rank = 0; rank < session.ranks(); ++rank) {
    if (!(*texts)[rank].empty()) failed.push_back(rank);
  }
  if (failed.empty()) return;
  if (mine.empty()) {
    check.fail(absl::StrCat("rank ", failed[0], ": ", (*texts)[failed[0]]));
  }
  check.fact("failed on",
             absl::StrCat(failed.size() == 1 ? "rank " : "ranks ", absl::StrJoin(failed, ", ")));
}

void finish(Check& check, bool strict) {
  CheckResult& result = check.result;
  if (strict) {
    for (const Figure& f : result.figures) {
      if (!f.misses_target()) continue;
      check.fail(
          absl::StrCat(f.name, " is ", f.value, " ", f.unit, ", wanted ", *f.at_most, " at most"));
    }
  }
  if (check.failures() == 0) return;
  result.outcome = Outcome::kFailed;
  result.why = check.failed_text();
}

CheckResult run(const CheckKind& kind, Session& session) {
  Check check;
  check.result.name = kind.name;
  const auto start = std::chrono::steady_clock::now();
  if (const std::optional<std::string> missing = what_is_missing(session, kind.needs)) {
    check.skip(*missing);
  } else {
    try {
      kind.run(session, check);
    } catch (const std::exception& error) {
      check.fail(message_of(error));
    }
    if (session.world != nullptr && session.lost.empty()) agree(session, check);
    finish(check, session.options.strict);
  }
  check.result.seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return std::move(check.result);
}

bool is_wanted(const CheckKind& kind, const std::vector<std::string>& only) {
  return only.empty() || kind.run == check_machine || kind.run == check_join ||
         std::find(only.begin(), only.end(), kind.name) != only.end();
}

}  // namespace

GpuCheckSizes GpuCheckSizes::quick() {
  return {.block_dim = 1024,
          .block_heads = 16,
          .block_batch = 2,
          .block_length = 512,
          .block_repeats = 10,
          .memory_dim = 256,
          .memory_layers = 4,
          .dispatch_batches = 11,
          .dispatch_calls = 100,
          .captured_dim = 64,
          .captured_rounds = 3,
          .bandwidth_bytes = int64_t{4} << 20};
}

std::vector<CheckDescription> checks_of_gpu_check() {
  std::vector<CheckDescription> result;
  for (const CheckKind& kind : kChecks) {
    result.push_back({kind.name, kind.what, to_string(kind.needs)});
  }
  return result;
}

absl::StatusOr<GpuReport> gpu_check(const GpuCheckOptions& options) {
  for (const std::string& name : options.only) {
    if (std::none_of(std::begin(kChecks), std::end(kChecks),
                     [&](const CheckKind& kind) { return kind.name == name; })) {
      return absl::InvalidArgumentError(
          absl::StrCat("there is no check \"", name, "\"; there are ",
                       absl::StrJoin(kChecks, ", ", [](std::string* out, const CheckKind& kind) {
                         absl::StrAppend(out, kind.name);
                       })));
    }
  }
  GpuReport report;
  const absl::StatusOr<RendezvousInfo> launched = detect_rendezvous(Environment::of_process());
  if (launched.ok()) {
    report.rank = launched->rank;
    report.ranks = launched->world_size;
  } else if (!absl::IsNotFound(launched.status())) {
    return launched.status();
  }

  // Before anything else asks LibTorch for CUDA: it remembers the answer.
  Session session{.options = options, .gpu = load_cuda(), .world = nullptr, .lost = {}};
  c10::OptionalDeviceGuard on_device;
  for (const CheckKind& kind : kChecks) {
    if (!is_wanted(kind, options.only)) continue;
    report.checks.push_back(run(kind, session));
    if (kind.run == check_join && session.world != nullptr) {
      report.rank = session.world->rank();
      report.ranks = session.world->size();
      on_device.reset_device(session.device);
    }
  }
  return report;
}

}  // namespace shardweave_tool
