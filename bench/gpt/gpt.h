// The GPT of bench/peers (torch_gpt.py, jax_gpt.py), and a training step of it: what train.cc times and
// gpt_test.cc checks.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "shardweave/dtensor/dtensor.h"

namespace bench_gpt {

struct Sizes {
  int64_t dim = 64, layers = 4, length = 32;
  int64_t batch = 4;  // sequences, over all ranks
  int64_t micro_batches =
      1;  // of that size in a step; gradients travel behind the last ("ddp", "fsdp")
};

// "tp": tensor parallel, activations whole between attention and MLP. "sp": cut along the sequence
// there. "ddp": whole parameters, gradients that leave in backward. "zero1", "zero2", "fsdp".
constexpr const char* kModes[] = {"tp", "sp", "ddp", "zero1", "zero2", "fsdp"};

// The mesh dimension that a mode is for: "tp" or "dp".
std::string mesh_dim_of(std::string_view mode);

// Of the parameters of each block, and of the rest.
std::vector<int64_t> elements_of_units(const Sizes& sizes);

// Computes the loss of a model on one device, each time that it is called.
std::function<at::Tensor()> forward_on_one_device(const Sizes& sizes);

// Trains with AdamW on random tokens, the same whatever the number of ranks; without a mesh (null) on
// one device. `step_done`: with the loss, which is ready.
void train(const Sizes& sizes, const std::string& mode, int64_t steps,
           const shardweave::MeshPtr& mesh, const std::function<void(double loss)>& step_done);

// The same of mode "tp" (with "sp" it throws) or one device, and one micro-batch: forward and backward
// of the third step are recorded, and those of later ones replayed (bench/recorded_step).
void train_recorded(const Sizes& sizes, const std::string& mode, int64_t steps,
                    const shardweave::MeshPtr& mesh,
                    const std::function<void(double loss)>& step_done);

}  // namespace bench_gpt
