// Trains a model whose parameters, gradients and optimizer's states are several times what one process
// may have in memory (--limit_mb, RLIMIT_DATA: all that it writes, of its libraries and threads, too).
// It is never whole anywhere: made without memory, cut, and materialised part by part.
//
//   launch -n 8 -- train       # exits with 0, and prints a table
//   launch -n 1 -- train       # with 3: there is no memory for it
#include <malloc.h>
#include <pthread.h>
#include <sys/resource.h>

#include <cstdint>
#include <cstdio>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "ATen/Parallel.h"
#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "shardweave/comm/world.h"
#include "shardweave/modules/deferred_init.h"
#include "shardweave/modules/fully_shard.h"
#include "shardweave/modules/optim/fused_optimizer.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/container/modulelist.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/pimpl.h"

ABSL_FLAG(int64_t, limit_mb, 256, "what one process may have in memory, in MB");
ABSL_FLAG(int64_t, dim, 1024, "the width of a layer");
ABSL_FLAG(int64_t, layers, 62, "how many there are; each is a unit");
ABSL_FLAG(int, steps, 2, "of training");

namespace {

namespace nn = torch::nn;
using shardweave::MeshPtr;
using shardweave::World;

constexpr int64_t kRowsOfARank = 4;
constexpr int64_t kMb = 1'000'000;

struct StackImpl : nn::Module {
  StackImpl(int64_t layers, int64_t dim) {
    register_module("layers", stack);
    for (int64_t i = 0; i < layers; ++i) stack->push_back(nn::Linear(dim, dim));
  }
  at::Tensor forward(at::Tensor x) {
    const double share = 1.0 / static_cast<double>(stack->size());
    for (const auto& layer : *stack) x = x + at::tanh(layer->as<nn::Linear>()->forward(x)) * share;
    return x;
  }
  nn::ModuleList stack;
};
TORCH_MODULE(Stack);

at::Tensor wave(int64_t rows, int64_t dim, double by) {
  return at::sin(at::arange(rows * dim, at::kFloat) * by).view({rows, dim});
}

// Bytes that a process has had in memory at a time, its libraries' included.
int64_t peak_rss() {
  rusage usage = {};
  ::getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss * 1024;
}

void or_throw(const absl::Status& status) {
  if (!status.ok()) throw std::runtime_error(status.ToString());
}

void train(World& world) {
  const int64_t dim = absl::GetFlag(FLAGS_dim), layers = absl::GetFlag(FLAGS_layers);
  const int64_t limit = absl::GetFlag(FLAGS_limit_mb) * kMb;
  const absl::StatusOr<MeshPtr> made = shardweave::init_device_mesh(world, {{"dp", world.size()}});
  or_throw(made.status());
  const MeshPtr mesh = *made;
  Stack model = shardweave::deferred_init([&] { return Stack(layers, dim); });
  shardweave::fully_shard(*model, mesh, {.units = {"layers.*"}});
  shardweave::materialize(*model, {.seed = 1});
  int64_t elements = 0, kept = 0;
  for (const at::Tensor& p : model->parameters()) {
    elements += p.numel();
    kept += shardweave::to_local(p).numel();
  }
  // Parameters, gradients, two moments.
  constexpr int64_t kBytes = 4 * sizeof(float);
  shardweave::FusedOptimizer optimizer(model->parameters(), shardweave::AdamWOptions{.lr = 1e-4});
  const auto cut = [&](const at::Tensor& t) {
    return shardweave::distribute_tensor(t, mesh, {{"dp", shardweave::Shard(0)}},
                                         {.source = std::nullopt});
  };
  const int64_t rows = kRowsOfARank * world.size();
  const at::Tensor x = cut(wave(rows, dim, 0.37)), target = cut(wave(rows, dim, 0.61));
  std::vector<double> losses;
  for (int step = 0; step < absl::GetFlag(FLAGS_steps); ++step) {
    const at::Tensor loss = (model->forward(x) - target).square().mean();
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    losses.push_back(loss.item<double>());
    if (losses.size() > 1 && losses[losses.size() - 2] <= losses.back()) {
      throw std::runtime_error("the loss does not fall");
    }
  }
  std::vector<int64_t> mine = {kept * kBytes, peak_rss()};
  std::vector<int64_t> all(2 * static_cast<size_t>(world.size()));
  or_throw(world.comm()
               ->all_gather(shardweave::Buffer::of(mine.data(), 2),
                            shardweave::Buffer::of(all.data(), static_cast<int64_t>(all.size())))
               .wait());
  if (world.rank() != 0) return;
  const double mb = kMb;
  std::cout << absl::StrFormat(
      "%d parameters, with gradients and AdamW's moments %.0f MB: %.1f times the limit of a "
      "process, %.0f MB\nlosses",
      elements, static_cast<double>(elements * kBytes) / mb,
      static_cast<double>(elements * kBytes) / static_cast<double>(limit),
      static_cast<double>(limit) / mb);
  for (const double loss : losses) std::cout << absl::StrFormat(" %.5f", loss);
  std::cout << "\nrank  keeps MB  peak RSS MB\n";
  for (int rank = 0; rank < world.size(); ++rank) {
    const auto at = 2 * static_cast<size_t>(rank);
    std::cout << absl::StrFormat("%4d  %8.1f  %11.1f\n", rank, static_cast<double>(all[at]) / mb,
                                 static_cast<double>(all[at + 1]) / mb);
  }
  if (elements * kBytes < 4 * limit) throw std::runtime_error("the model is too small to show it");
}

std::string first_line(const std::exception& error) {
  const std::string text = error.what();
  return text.substr(0, text.find('\n'));
}

}  // namespace

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  // The limit counts what could be written of a thread's stack, of which 8 MB is the default.
  pthread_attr_t attributes;
  if (::pthread_attr_init(&attributes) != 0 ||
      ::pthread_attr_setstacksize(&attributes, 1 << 20) != 0 ||
      ::pthread_setattr_default_np(&attributes) != 0) {
    std::cerr << "the stacks of threads cannot be made smaller" << std::endl;
    return 2;
  }
  const auto limit = static_cast<rlim_t>(absl::GetFlag(FLAGS_limit_mb) * kMb);
  const rlimit data = {limit, limit};
  if (::setrlimit(RLIMIT_DATA, &data) != 0) {
    std::perror("setrlimit");
    return 2;
  }
  // Units come and go: what they leave is given back, and not cut into pieces by what comes between,
  // as glibc does with blocks that are smaller than the largest that was ever freed.
  ::mallopt(M_MMAP_THRESHOLD, 1 << 18);
  at::set_num_threads(1);
  absl::StatusOr<std::unique_ptr<World>> world = World::from_environment();
  if (!world.ok()) {
    std::cerr << world.status() << std::endl;
    return 2;
  }
  try {
    train(**world);
  } catch (const std::exception& error) {
    std::cerr << "rank " << (*world)->rank() << " of " << (*world)->size() << ", of "
              << absl::GetFlag(FLAGS_limit_mb) << " MB, cannot train: " << first_line(error)
              << std::endl;
    (*world)->comm()->abort(absl::ResourceExhaustedError(first_line(error)));
    return 3;
  }
  return 0;
}
