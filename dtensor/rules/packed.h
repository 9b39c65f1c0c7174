// Tensors that are packed into one, along one of its dimensions: query, key and value, the gates of a
// recurrent layer, gate and up. Where each part is to be cut over the ranks for itself, the packed
// tensor is a StridedShard, of as many chunks as a part has, for each part. Taking parts of it and
// joining parts to it moves nothing.
//
//   qkv [12, 8]  S(0, sf=3)    split(4)  ->   q, k, v [4, 8]  S(0)
//
// Internal to dtensor/rules.
#pragma once

#include <optional>

#include "shardweave/dtensor/rule.h"

namespace shardweave::dtensor_internal {

// How elements [begin, begin + size) of dimension `dim` of input i lie as a tensor of their own, if
// input i is such a cut of `dim` along the mesh dimension that is expanded, and they are whole
// chunks of it.
std::optional<Placement> placement_of_part(const OpCall& call, int i, int dim, int64_t begin,
                                           int64_t size);

// The other way round: how a tensor lies of whose dimension `dim`, `total` elements long, input i is
// the part that begins at `begin`, if input i cuts `dim`.
std::optional<Placement> placement_of_packed(const OpCall& call, int i, int dim, int64_t begin,
                                             int64_t total);

}  // namespace shardweave::dtensor_internal
