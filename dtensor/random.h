// Random numbers of DTensors: element i of a tensor is drawn by its global index, so that every
// sharding, every mesh and every number of ranks gives the numbers that one rank would.
//
//   manual_seed(mesh, 42);
//   at::Tensor a = randn({7, 5}, mesh, {Shard(0)});
//   manual_seed(mesh, 42);
//   at::Tensor b = randn({7, 5}, mesh, {Replicate()});   // the same tensor
//   at::Tensor c = at::dropout(b, 0.1, true);            // the same for a, after the same calls
//
// Meshes over other ranks draw other numbers from the same seed, so that the stages of a pipeline,
// each on its slice of one mesh, do not begin alike: a mesh draws by its seed and its smallest rank,
// and one with rank 0 by its seed alone.
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

// Local: call it with the same seed on every rank. (Other seeds are an error of the next collective
// over what was drawn; where everything is replicated there is none, and ranks go apart.) Two meshes
// with rank 0 and one seed give the same numbers; slices that begin elsewhere have a seed made of this
// one, which random_state() shows.
void manual_seed(const MeshPtr& mesh, uint64_t seed);
PhiloxState random_state(const MeshPtr& mesh);
// Exactly this state: meshes that are given the same one draw alike, whatever their ranks.
void set_random_state(const MeshPtr& mesh, const PhiloxState& state);

// While it lives the mesh draws from `state`; then it goes on where it was. What is computed a
// second time (see activation_checkpoint.h) draws its numbers a second time:
//
//   const PhiloxState before = random_state(mesh);
//   at::Tensor y = block(x);
//   ...
//   const RandomStateScope again(mesh, before);
//   y = block(x);                                        // the same dropout
//
// Scopes of one mesh may end in any order: the one that was made last and is still there counts, and
// after the last of them the mesh goes on where the first has found it.
class RandomStateScope {
 public:
  RandomStateScope(const MeshPtr& mesh, const PhiloxState& state);
  ~RandomStateScope();
  RandomStateScope(const RandomStateScope&) = delete;
  RandomStateScope& operator=(const RandomStateScope&) = delete;

 private:
  const MeshPtr mesh_;
  PhiloxState goes_on_;
  RandomStateScope* outer_;  // made before this one, and still there
};

}  // namespace shardweave
