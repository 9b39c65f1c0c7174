// PowerSGD (Vogels, Karimireddy, Jaggi: PowerSGD: Practical Low-Rank Gradient Compression for
// Distributed Optimization, 2019): gradients that are matrices travel as two thin ones.
//
//   auto power_sgd = std::make_shared<PowerSgd>(PowerSgdOptions{.rank = 2, .start_iteration = 100});
//   GradSync ddp = distributed_data_parallel(*model, mesh, {.sync = {.hook = power_sgd}});
//   ...
//   save(power_sgd->state());                                      // each rank its own
//
// Of an n x m gradient M (dimensions behind the first make one) the ranks sum P = M Q, orthogonalise
// it, and sum Q = M' P; what arrives is P Q'. Q is where the next step begins (warm start), and what a
// rank's own M had that P Q' has not is added to its next gradient (error feedback). So a step takes
// two collectives for a bucket, of rank (n + m) elements for each n m.
//
// Vectors, matrices that would not become smaller by min_compression_rate, and parameters without a
// name travel whole, with the first of the two. What all ranks compute of the sums (an orthonormal P,
// P Q') they round alike, so that parameters stay the same on all of them to the last bit.
//
// Under a GradScaler gradients, and with them errors, are in units of its scale: see rescale().
//
// A gradient with numbers that are not finite arrives as NaN on all ranks, and what was learned before
// stays: the next step is one as any.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "shardweave/dtensor/gradient_hook.h"

namespace shardweave {

struct PowerSgdOptions {
  int64_t rank = 1;
  // So many times a gradient travels whole before it is compressed; early gradients change too fast.
  int64_t start_iteration = 0;
  double min_compression_rate = 2;
  bool error_feedback = true;
  bool warm_start = true;  // false: a new random Q each time
  uint64_t seed = 0;       // of the Q that it begins with
};

// One for each GradSync and rank.
class PowerSgd final : public GradientHook {
 public:
  // Throws Error (InvalidArgument) for a rank below 1, a negative start_iteration, a rate that is not
  // at least 1.
  explicit PowerSgd(const PowerSgdOptions& options = {});
  ~PowerSgd() override;

  std::string name() const override;
  void begin(GradientBucket& bucket) override;
  void finish(GradientBucket& bucket) override;

  // What is left over of gradients times `factor`: where the next gradients are so many times larger
  // (a loss scale that has changed), and errors are to mean as much as before. Each rank its own.
  //
  //   power_sgd->rescale(scaler.update());   // GradScaler, once a step
  //
  // Throws Error (InvalidArgument) for a factor that is not above 0 and finite.
  void rescale(double factor);

  // What it has learned, by FQN: "blocks.0.weight.iteration" (a number), ".q", ".error". Plain tensors,
  // copies: "error" is this rank's own, "q" that of the ranks that have the same part of the
  // parameter. A run that goes on with it, on as many ranks, goes on with the same bits.
  std::map<std::string, at::Tensor> state() const;
  // Its names, in the same order, and one of it: for a state that is too large to be there twice. Throws
  // Error (NotFound).
  std::vector<std::string> state_names() const;
  at::Tensor state(const std::string& name) const;
  // All ranks give back what each of them had: local, so that nothing tells where one does not.
  // Throws Error (InvalidArgument), before anything is changed, for a name that does not end so, and a
  // tensor of another dtype or number of dimensions than state() gives.
  void set_state(const std::map<std::string, at::Tensor>& state);

 private:
  struct Learned;
  struct Compression;

  bool is_compressed(const at::Tensor& gradient) const;
  at::Tensor random_q(const std::string& parameter, int64_t iteration, int64_t rows,
                      int64_t rank) const;

  const PowerSgdOptions options_;
  std::map<std::string, Learned> learned_;  // by FQN
};

}  // namespace shardweave
