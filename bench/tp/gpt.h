// The GPT of bench/peers (torch_gpt.py, jax_gpt.py), and a training step of it under tensor or
// sequence parallelism: what train.cc times and gpt_test.cc checks.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "shardweave/dtensor/dtensor.h"

namespace bench_tp {

struct Sizes {
  int64_t dim = 64, layers = 4, length = 32, batch = 4;
};

// Trains with AdamW on random tokens, the same on every rank, along the mesh dimension "tp"; without a
// mesh (null) on one device. `mode`: "tp", activations whole between attention and MLP; "sp", cut along
// the sequence there. `step_done`: with the loss, which is ready.
void train(const Sizes& sizes, const std::string& mode, int64_t steps,
           const shardweave::MeshPtr& mesh, const std::function<void(double loss)>& step_done);

}  // namespace bench_tp
