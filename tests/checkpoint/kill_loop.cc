// What kill_test.py kills: ranks that save beside "training", as fast as they can. Four threads, or this process is
// one of a launcher's. Copies are made at once, or beside training, as chance wills.
//
//   kill_loop DIRECTORY         for ever; all elements of all tensors are the step
//   kill_loop DIRECTORY --check prints the newest step, after looking at every byte and element of every
//                               checkpoint; fails if one is torn
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "ATen/ops/full.h"
#include "ATen/ops/max.h"
#include "ATen/ops/min.h"
#include "c10/core/GradMode.h"
#include "shardweave/comm/environment/from_environment.h"
#include "shardweave/comm/world.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/modules/checkpoint/checkpointer.h"

namespace shardweave {
namespace {

struct Model {
  explicit Model(const MeshPtr& mesh) {
    for (int i = 0; i < 6; ++i) {
      tensors.push_back(distribute_tensor(at::full({211 + i, 97}, -1.), mesh,
                                          {i % 2 == 0 ? Shard(0) : Replicate(),
                                           i % 3 == 0 ? Shard(1) : Replicate()})
                            .requires_grad_());
      state.add_tensor("t" + std::to_string(i), tensors.back());
    }
  }
  std::vector<at::Tensor> tensors;
  StateDict state;
};

void train(const MeshPtr& mesh, const std::string& directory) {
  Model model(mesh);
  const absl::StatusOr<std::vector<int64_t>> steps = list_checkpoints(directory);
  int64_t step = steps.ok() && !steps->empty() ? steps->back() : 0;
  Checkpointer checkpointer(directory, mesh,
                            {.keep_last = 3, .copy_beside_training = step % 2 == 1});
  if (step > 0) checkpointer.load(model.state);
  while (true) {
    ++step;
    checkpointer.wait_for_copy();
    const c10::AutoGradMode no_grad(false);
    for (at::Tensor& tensor : model.tensors) tensor.fill_(static_cast<double>(step));
    checkpointer.save_async(step, model.state);
  }
}

int64_t check(const MeshPtr& mesh, const std::string& directory) {
  int64_t newest = 0;
  const absl::StatusOr<std::vector<int64_t>> steps = list_checkpoints(directory);
  if (!steps.ok()) return 0;  // it was killed before there was one
  for (const int64_t step : *steps) {
    const std::string path = directory + "/" + checkpoint_name(step);
    throw_if_error(verify_checkpoint(path));
    Model model(mesh);
    load_checkpoint(path, model.state, mesh);
    for (const at::Tensor& tensor : model.tensors) {
      const at::Tensor whole = full_tensor(tensor);
      const auto wanted = static_cast<double>(step);
      if (at::min(whole).item<double>() != wanted || at::max(whole).item<double>() != wanted) {
        throw Error(absl::DataLossError("'" + path + "' is torn"));
      }
    }
    newest = step;
  }
  return newest;
}

int run(int argc, char** argv) {
  if (argc < 2) return 2;
  const std::string directory = argv[1];
  const bool only_checks = argc > 2 && std::string(argv[2]) == "--check";
  const auto run_rank = [&](World& world) -> absl::Status {
    try {
      if (!only_checks) {
        train(value_or_throw(init_device_mesh(world, {{"dp", world.size() / 2}, {"tp", 2}})),
              directory);
      } else {
        const MeshPtr mesh = value_or_throw(init_device_mesh(world, {{"dp", 1}, {"tp", 1}}));
        std::printf("%lld\n", static_cast<long long>(check(mesh, directory)));
      }
    } catch (const Error& error) {
      return error.status();
    }
    return absl::OkStatus();
  };
  const absl::StatusOr<std::unique_ptr<World>> launched = World::from_environment({});
  const absl::Status status = launched.ok() ? run_rank(**launched)
                              : absl::IsNotFound(launched.status())
                                  ? run_ranks(only_checks ? 1 : 4, run_rank)
                                  : launched.status();
  if (status.ok()) return 0;
  std::fprintf(stderr, "kill_loop: %s\n", std::string(status.message()).c_str());
  return 1;
}

}  // namespace
}  // namespace shardweave

int main(int argc, char** argv) {
  return shardweave::run(argc, argv);
}
