// Where a loader of tokens stands, in a checkpoint.
//
//   TokenLoader loader({file}, {.seq = 1024, .batch = 32}, mesh, {{"dp", Shard(0)}});
//   add_loader_position(state, loader);                 // the value "loader"
//   checkpointer.save(step, state);                     // of the batch that comes next
//   checkpointer.load(state);                           // and there it goes on, on any mesh
#pragma once

#include <string>

#include "shardweave/modules/checkpoint/state_dict.h"
#include "shardweave/modules/data/token_loader.h"

namespace shardweave {

// As a value of the state. The loader must outlive the state's use. Loading is an error, before anything
// is changed, for a position among other samples, or in another order of them. Throws Error: AlreadyExists.
void add_loader_position(StateDict& state, TokenLoader& loader, const std::string& name = "loader");

}  // namespace shardweave
