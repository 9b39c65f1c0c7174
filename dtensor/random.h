// Random numbers of DTensors: element i of a tensor is drawn by its global index, so that every
// sharding, every mesh and every number of ranks gives the numbers that one rank would.
//
//   manual_seed(mesh, 42);
//   at::Tensor a = randn({7, 5}, mesh, {Shard(0)});
//   manual_seed(mesh, 42);
//   at::Tensor b = randn({7, 5}, mesh, {Replicate()});   // the same tensor
//   at::Tensor c = at::dropout(b, 0.1, true);            // the same for a, after the same calls
//
// Every random operator of LibTorch on a DTensor draws from its mesh, never from LibTorch's
// generators. All ranks of a mesh call the same operators in the same order, as for any DTensor,
// and so stay in step.
#pragma once

#include <cstdint>

#include "shardweave/dtensor/dtensor.h"

namespace shardweave {

// Where a mesh stands. Save and restore it with a model to go on with the same numbers.
struct PhiloxState {
  uint64_t seed = 67280421310721;  // LibTorch's default
  uint64_t offset = 0;             // operators drawn so far
  friend bool operator==(const PhiloxState&, const PhiloxState&) = default;
};

// Local: call it with the same seed on every rank. Two meshes with one seed give the same numbers.
void manual_seed(const MeshPtr& mesh, uint64_t seed);
PhiloxState random_state(const MeshPtr& mesh);
void set_random_state(const MeshPtr& mesh, const PhiloxState& state);

}  // namespace shardweave
