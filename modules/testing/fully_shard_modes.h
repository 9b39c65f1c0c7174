// The ways of fully_shard() that tests on GPUs try with words_net.h's model.
#pragma once

#include <string>
#include <vector>

#include "shardweave/dtensor/dtensor.h"
#include "shardweave/modules/fully_shard.h"

namespace shardweave::testing {

struct FullyShardMode {
  std::string name;
  std::vector<MeshDim> dims;
  Placements batch;
  FullyShardOptions options;
  bool tensor_parallel = false;  // within
};

inline std::vector<FullyShardMode> fully_shard_modes() {
  const std::vector<std::string> blocks = {"blocks.*"};
  return {
      {"one_unit", {{"dp", 2}}, {Shard(0)}, {}},
      {"units", {{"dp", 2}}, {Shard(0)}, {.units = blocks}},
      {"uneven", {{"dp", 3}}, {Shard(0)}, {.units = blocks}},
      {"equal_segments", {{"dp", 2}}, {Shard(0)}, {.units = blocks, .equal_segments = true}},
      {"stays_whole", {{"dp", 2}}, {Shard(0)}, {.units = blocks, .reshard_after_forward = false}},
      {"neighbours", {{"dp", 4}}, {Shard(0)}, {.units = blocks, .reshard_after_forward_ranks = 2}},
      {"hybrid",
       {{"replicas", 2}, {"dp", 2}},
       {Shard(0), Shard(0)},
       {.mesh_dim = "dp", .units = blocks}},
  };
}

}  // namespace shardweave::testing
