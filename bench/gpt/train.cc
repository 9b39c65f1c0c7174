// Times training steps of a small GPT on two ranks: prints milliseconds per step, the median, and the
// last loss. `./bazelw run -c opt //bench:tp` and `//bench:data_parallel` run it beside PyTorch and JAX.

#include <algorithm>
#include <chrono>
#include <iostream>
#include <string>
#include <vector>

#include "ATen/Parallel.h"
#include "absl/algorithm/container.h"
#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/str_join.h"
#include "gpt.h"
#include "nlohmann/json.hpp"
#include "shardweave/bench/recorded_step/recorded_step.h"
#include "shardweave/comm/world.h"
#include "shardweave/examples/train_gpt/activity.h"
#include "shardweave/examples/train_gpt/backends.h"
#include "shardweave/mesh/connected_mesh.h"

ABSL_FLAG(std::string, backend, "inproc", "inproc: two threads; gloo: two processes");
ABSL_FLAG(std::string, mode, "tp",
          "tp: tensor parallel; sp: sequence parallel between its layers; ddp, zero1, zero2, fsdp");
ABSL_FLAG(int64_t, dim, 64, "features");
ABSL_FLAG(int64_t, layers, 4, "blocks");
ABSL_FLAG(int64_t, seq, 32, "tokens of a sequence");
ABSL_FLAG(int64_t, batch, 4, "sequences, over both ranks");
ABSL_FLAG(int64_t, micro_batches, 1, "of that size in a step (ddp, fsdp)");
ABSL_FLAG(int64_t, steps, 60, "that are timed, behind five others");
ABSL_FLAG(bool, recorded, false,
          "forward and backward are replayed from a recording (tp, inproc, one micro-batch)");

namespace {

absl::Status run_rank(shardweave::World& world) {
  at::set_num_threads(1);
  const absl::StatusOr<shardweave::MeshPtr> mesh = shardweave::init_device_mesh(
      world, {{bench_gpt::mesh_dim_of(absl::GetFlag(FLAGS_mode)), world.size()}});
  if (!mesh.ok()) return mesh.status();
  constexpr int64_t kBefore = 5;
  using Clock = std::chrono::steady_clock;
  std::vector<double> milliseconds;
  double last_loss = 0;
  Clock::time_point start = Clock::now();
  const auto train = absl::GetFlag(FLAGS_recorded) ? bench_gpt::train_recorded : bench_gpt::train;
  train({absl::GetFlag(FLAGS_dim), absl::GetFlag(FLAGS_layers), absl::GetFlag(FLAGS_seq),
         absl::GetFlag(FLAGS_batch), absl::GetFlag(FLAGS_micro_batches)},
        absl::GetFlag(FLAGS_mode), absl::GetFlag(FLAGS_steps) + kBefore, *mesh, [&](double loss) {
          const Clock::time_point now = Clock::now();
          milliseconds.push_back(std::chrono::duration<double, std::milli>(now - start).count());
          start = now;
          last_loss = loss;
        });
  milliseconds.erase(milliseconds.begin(), milliseconds.begin() + kBefore);
  std::sort(milliseconds.begin(), milliseconds.end());
  if (world.rank() == 0) {
    std::cout << nlohmann::json(
                     {{"ms", milliseconds[milliseconds.size() / 2]}, {"last_loss", last_loss}})
              << std::endl;
  }
  return absl::OkStatus();
}

}  // namespace

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  const std::string mode = absl::GetFlag(FLAGS_mode);
  if (!absl::c_linear_search(bench_gpt::kModes, mode) || absl::GetFlag(FLAGS_steps) < 1 ||
      absl::GetFlag(FLAGS_micro_batches) < 1) {
    std::cerr << "wanted --mode=" << absl::StrJoin(bench_gpt::kModes, ", ")
              << ", and one step and one micro-batch or more\n";
    return train_gpt::kUsage;
  }
  if (absl::GetFlag(FLAGS_recorded)) {
    if (mode != "tp" || absl::GetFlag(FLAGS_backend) != "inproc" ||
        absl::GetFlag(FLAGS_micro_batches) != 1) {
      std::cerr << "--recorded is for --mode=tp, --backend=inproc and one micro-batch\n";
      return train_gpt::kUsage;
    }
    const absl::Status status = bench_recorded_step::run_recordable_ranks(2, run_rank);
    return status.ok() ? train_gpt::kDone : train_gpt::fail("bench/gpt/train", status);
  }
  return train_gpt::run_on_ranks(
      {.name = "bench/gpt/train",
       .num_ranks = 2,
       .backend = absl::GetFlag(FLAGS_backend),
       .timeout = absl::Minutes(2)},
      argc, argv, [](shardweave::World& world, train_gpt::Activity& activity) {
        return train_gpt::run_guarded(activity, [&] { return run_rank(world); });
      });
}
