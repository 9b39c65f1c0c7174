// Measures what communication and computation cost on a mesh (dtensor/cost_model.h).
//
//   ./bazelw run -c opt //tools:measure_cost_model -- --mesh=dp=2,tp=2              # rank threads
//   ./bazelw run -c opt //tools:measure_cost_model -- --mesh=dp=2,tp=2 --processes  # over Gloo
//   torchrun ... measure_cost_model --mesh=dp=16,tp=8 --json > model.json           # a cluster
//
// A table; with --json what cost_model_from_json() reads.

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ATen/Parallel.h"
#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "shardweave/comm/rendezvous/rendezvous.h"
#include "shardweave/comm/world.h"
#include "shardweave/dtensor/cost_model.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/dtensor/observe/text_table.h"
#include "shardweave/mesh/connected_mesh.h"
#include "shardweave/tools/launch/launcher.h"

ABSL_FLAG(std::string, mesh, "x=2", "the mesh, all ranks: dp=2,tp=4");
ABSL_FLAG(bool, json, false, "print JSON");
ABSL_FLAG(bool, processes, false, "start a process per rank on this machine, not a thread");

namespace {

using namespace shardweave;

std::string table_of(const CostModel& model, const DeviceMesh& mesh) {
  const auto giga = [](double number) { return absl::StrFormat("%.3g", number / 1e9); };
  dtensor_internal::TextTable table({"what", "ranks", "latency us", "GB/s", "GFLOP/s"},
                                    /*right_aligned=*/{1, 2, 3, 4});
  for (int m = 0; m < mesh.ndim(); ++m) {
    const MeshDim dim = mesh.dims()[m];
    if (dim.size == 1) continue;  // nothing is sent along it
    table.add({absl::StrCat("link ", dim.name), absl::StrCat(dim.size),
               absl::StrFormat("%.3g", model.links[m].latency * 1e6),
               giga(model.links[m].bandwidth), ""});
  }
  table.add({"device", "1", "", giga(model.device.bandwidth), giga(model.device.flops)});
  return table.to_string();
}

absl::Status run_rank(World& world, const DeviceMesh& mesh) {
  const auto connected = init_device_mesh(world, mesh.dims());
  if (!connected.ok()) return connected.status();
  try {
    const CostModel model = measure_cost_model(*connected);
    if (world.rank() != 0) return absl::OkStatus();
    std::printf(
        "%s%s",
        (absl::GetFlag(FLAGS_json) ? cost_model_to_json(model, mesh) : table_of(model, mesh))
            .c_str(),
        absl::GetFlag(FLAGS_json) ? "\n" : "");
    return absl::OkStatus();
  } catch (const Error& error) {
    return error.status();
  }
}

// Starts this program once per rank.
absl::Status start_processes(int num_ranks, int argc, char** argv) {
  std::vector<std::string> command = {std::filesystem::read_symlink("/proc/self/exe")};
  command.insert(command.end(), argv + 1, argv + argc);
  const auto result =
      launch({.num_ranks = num_ranks, .command = std::move(command), .prefix_output = false});
  if (!result.ok()) return result.status();
  return result->ok() ? absl::OkStatus() : absl::UnavailableError(result->summary());
}

absl::Status run(int argc, char** argv) {
  const absl::StatusOr<DeviceMesh> mesh = DeviceMesh::parse(absl::GetFlag(FLAGS_mesh));
  if (!mesh.ok()) return mesh.status();
  const auto num_ranks = static_cast<int>(mesh->size());
  const auto launched = detect_rendezvous(Environment::of_process());
  if (launched.ok()) {
    const auto world = World::from_environment();
    return world.ok() ? run_rank(**world, *mesh) : world.status();
  }
  if (!absl::IsNotFound(launched.status())) return launched.status();
  if (absl::GetFlag(FLAGS_processes)) return start_processes(num_ranks, argc, argv);
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  return run_ranks(num_ranks, [&](World& world) {
    at::set_num_threads(std::max(1, cores / num_ranks));  // as from_environment() does
    return run_rank(world, *mesh);
  });
}

}  // namespace

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage("Measures what communication and computation cost on a mesh.");
  absl::ParseCommandLine(argc, argv);
  const absl::Status status = run(argc, argv);
  if (status.ok()) return 0;
  std::fprintf(stderr, "measure_cost_model: %s\n", status.ToString().c_str());
  return 1;
}
