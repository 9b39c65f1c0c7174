// From a Call to NCCL's: which of its functions, with which counts.
//
//   if (has_reduction(dtype, op)) ...
//   int result = launch(library, lane, group, call);     // as NCCL answers, InProgress included
//
// Everything that is only moved goes as bytes.
#pragma once

#include "shardweave/comm/backend.h"
#include "shardweave/comm/nccl/lane.h"

namespace shardweave::nccl_internal {

// What NCCL can reduce: not i16 and u16.
bool has_reduction(DType dtype, ReduceOp op);

// What a call has answered, and which.
struct Launched {
  const char* call = "";
  int nccl = kNcclSuccess;
  int cuda = kCudaSuccess;  // of a copy
};

// Puts the operation on the lane's stream. May be called between ncclGroupStart and ncclGroupEnd.
Launched launch(const Library& library, const Lane& lane, const GroupInfo& group, const Call& call);

}  // namespace shardweave::nccl_internal
