// Saves and loads sharded tensors from two Gloo processes, and prints the seconds that it took, as JSON.
// `./bazelw run -c opt //bench:checkpoint` runs it beside PyTorch.
//
// save: save() until it returns. at_once: save_async() until it returns, which is how long training
// stands while all is copied. stall: the same with copy_beside_training, and wait_for_copy() after a step.
// lost: by how much that step, of half a second, takes longer with both. async: save_async() until all is on
// the disk. load: of what no page of is in memory, as a run that begins does. load_again: the same to the
// memory of the last copy, as a run does that goes back. Each of the slower rank.
#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <iostream>
#include <string>

#include "ATen/Parallel.h"
#include "ATen/ops/full.h"
#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "nlohmann/json.hpp"
#include "shardweave/comm/world.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/examples/train_gpt/activity.h"
#include "shardweave/examples/train_gpt/backends.h"
#include "shardweave/mesh/connected_mesh.h"
#include "shardweave/modules/checkpoint/checkpointer.h"

ABSL_FLAG(std::string, directory, "", "where to save; must not exist yet");
ABSL_FLAG(int64_t, tensors, 32, "of 16 MiB, over both ranks");

namespace {

using Seconds = std::chrono::duration<double>;

// What the disk has written leaves the memory.
void forget_pages(const std::string& directory) {
  for (const auto& entry : std::filesystem::recursive_directory_iterator(directory)) {
    if (!entry.is_regular_file()) continue;
    const int file = open(entry.path().c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) continue;
    posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
    close(file);
  }
}

absl::Status run_rank(shardweave::World& world) {
  at::set_num_threads(1);
  const std::string directory = absl::GetFlag(FLAGS_directory);
  const absl::StatusOr<shardweave::MeshPtr> mesh =
      shardweave::init_device_mesh(world, {{"dp", world.size()}});
  if (!mesh.ok()) return mesh.status();
  shardweave::StateDict state;
  for (int64_t i = 0; i < absl::GetFlag(FLAGS_tensors); ++i) {
    state.add_tensor("t" + std::to_string(i),
                     shardweave::distribute_tensor(at::full({1024, 4096}, static_cast<double>(i)),
                                                   *mesh, {shardweave::Shard(0)})
                         .requires_grad_());
  }
  const auto barrier = [&] { shardweave::throw_if_error(world.comm()->barrier().wait()); };
  // Of the slower rank, for it begins and ends together.
  const auto seconds = [&](const auto& work) {
    barrier();
    const auto start = std::chrono::steady_clock::now();
    work();
    barrier();
    return Seconds(std::chrono::steady_clock::now() - start).count();
  };
  nlohmann::json report;
  {
    shardweave::Checkpointer checkpointer(directory, *mesh, {.keep_last = 2});
    report["save"] = seconds([&] { checkpointer.save(1, state); });
    checkpointer.save_async(2, state);  // its copy is the first
    checkpointer.wait();
    report["at_once"] = seconds([&] { checkpointer.save_async(3, state); });
    report["async"] = report["at_once"].get<double>() + seconds([&] { checkpointer.wait(); });
  }
  {
    shardweave::Checkpointer checkpointer(directory, *mesh,
                                          {.keep_last = 2, .copy_beside_training = true});
    checkpointer.save_async(4, state);  // likewise
    checkpointer.wait();
    const at::Tensor a = at::ones({1024, 1024});
    const auto step = [&] {
      for (int i = 0; i < 12; ++i) (void)at::mm(a, a);
    };
    step();
    const double alone = seconds(step);
    double blocked = 0;
    const double with_save = seconds([&] {
      blocked = seconds([&] { checkpointer.save_async(5, state); });
      step();
      blocked += seconds([&] { checkpointer.wait_for_copy(); });
    });
    report["stall"] = blocked;
    report["lost"] = with_save - alone;
    checkpointer.wait();
    if (world.rank() == 0) forget_pages(directory);
    report["load"] = seconds([&] { load_checkpoint(directory, state, *mesh); });
    if (world.rank() == 0) forget_pages(directory);
    report["load_again"] = seconds([&] { checkpointer.load(state); });
  }
  if (world.rank() == 0) std::cout << report << std::endl;
  return absl::OkStatus();
}

}  // namespace

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  if (absl::GetFlag(FLAGS_directory).empty() || absl::GetFlag(FLAGS_tensors) < 1) {
    std::cerr << "wanted --directory=NEW, and one tensor or more\n";
    return train_gpt::kUsage;
  }
  return train_gpt::run_on_ranks(
      {.name = "bench/checkpoint/save_and_load",
       .num_ranks = 2,
       .backend = "gloo",
       .timeout = absl::Minutes(5)},
      argc, argv, [](shardweave::World& world, train_gpt::Activity& activity) {
        return train_gpt::run_guarded(activity, [&] { return run_rank(world); });
      });
}
