// What the plans of the zoo ask for: llama_plan(), mixtral_plan(), gpt2_plan(), vit_plan() and
// those of the layers.
//
//   const auto plan = nn::llama_plan(options, mesh->mesh(), {.sequence_parallel = true});
//   parallelize_module(*model, mesh, plan);
//
// They are tensor parallelism as in Megatron-LM (Shoeybi et al.; Korthikanti et al. for sequences):
// the first matrices of attention and MLP are cut by their outputs, the last by their inputs, and
// one sum comes after each, forward and backward. Along the mesh's other dimensions parameters are
// replicated, and a batch may be cut.
#pragma once

#include <string>

namespace shardweave::nn {

struct PlanOptions {
  std::string mesh_dim = "tp";
  // Between attention and MLP activations lie along the sequence: a gather before and a sum that
  // scatters after, of the same bytes as the sum that replicates, and memory by the number of
  // ranks.
  bool sequence_parallel = false;
  // The embedding and the head are cut by the vocabulary, and so are the logits. Of those a
  // cross entropy needs no more than a maximum and two sums of each row, and brings them together
  // nowhere.
  bool shard_vocabulary = true;
  // MoE: whole experts, in place of a part of each, on every rank.
  bool expert_parallel = false;
};

}  // namespace shardweave::nn
