// Whether everything here works on the GPUs of this machine, and what it costs: NCCL and DTensors
// against the CPU, training, checkpoints, memory and overhead.
//
//   const GpuReport report = gpu_check({.quick = true});
//   std::cout << to_text(report);
//
// What cannot be checked (there is no GPU, there is one rank only) is skipped, with the reason;
// what fails is said, and the others go on. Nothing links CUDA: the same program runs everywhere.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "report.h"
#include "shardweave/comm/world.h"

namespace shardweave_tool {

// How large what is measured is.
struct GpuCheckSizes {
  // A transformer block, in bfloat16.
  int64_t block_dim = 4096, block_heads = 32, block_batch = 4, block_length = 1024;
  int block_repeats = 20;
  // A model whose memory is measured, in float32.
  int64_t memory_dim = 1024, memory_layers = 8;
  // Of each operator whose dispatch is measured: so many batches of so many calls.
  int dispatch_batches = 41, dispatch_calls = 200;
  // A step that is captured: of a model of this size, ten replays a round.
  int captured_dim = 256, captured_rounds = 10;
  // Of each rank, by the largest collective that is measured.
  int64_t bandwidth_bytes = int64_t{64} << 20;

  static GpuCheckSizes quick();
};

struct GpuCheckOptions {
  GpuCheckSizes sizes = {};
  // A figure that misses its target is a failure.
  bool strict = false;
  // Names of checks; empty: all.
  std::vector<std::string> only = {};
  // Where the checkpoint goes and is removed from, shared by all ranks; "": the system's directory
  // for temporary files, if all ranks are on one machine.
  std::string directory = {};
  // "nccl"; or "gloo": by way of the host, where several ranks have one GPU or there is no NCCL.
  std::string backend = "nccl";
  // This rank's GPU; -1: that of its local rank; over "gloo" local ranks go round those that there are.
  int device = -1;
  absl::Duration timeout = absl::Minutes(2);  // of each collective
  // How this rank meets the others, over `backend`. Null: as the launcher's environment says; alone
  // without a launcher.
  std::function<absl::StatusOr<std::unique_ptr<shardweave::World>>()> join = {};
};

struct CheckDescription {
  std::string name, what, needs;
};
// In their order.
std::vector<CheckDescription> checks_of_gpu_check();

// Collective over the ranks that the launcher has started; does not throw. What failed on any rank
// is in the report of every rank; figures are of this one. Errors: InvalidArgument for a name in
// `only` that there is not, and for an environment that contradicts itself.
absl::StatusOr<GpuReport> gpu_check(const GpuCheckOptions& options = {});

}  // namespace shardweave_tool
