// Rows of a table of which this rank has some.
// Internal to dtensor/rules.
#pragma once

#include "ATen/core/Tensor.h"
#include "shardweave/dtensor/spec.h"

namespace shardweave::dtensor_internal {

struct HeldRows {
  at::Tensor local;  // where a row is on this rank; 0 for those that are elsewhere
  at::Tensor here;   // which are; undefined: none, as this rank has no rows
};

// Global `indices` of rows (dimension 0) of `table`. Throws Error (OutOfRange), naming `op`, for one
// that no rank has, as the operator itself would.
HeldRows held_rows(const at::Tensor& indices, const Spec& table, const char* op);

// The same for another dimension, without looking whether there is such an index.
HeldRows held_slices(const at::Tensor& indices, const Spec& table, int dim);

}  // namespace shardweave::dtensor_internal
