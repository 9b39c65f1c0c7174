// What the dispatcher needs to know of an operator, worked out from its schema once per rank.
// Internal to dtensor/.
#pragma once

#include <vector>

#include "ATen/core/dispatch/Dispatcher.h"
#include "absl/container/inlined_vector.h"
#include "shardweave/dtensor/rule.h"

namespace shardweave::dtensor_internal {

struct OpInfo {
  // `own`: rules that the user added to the mesh; they come before those of this library.
  OpInfo(const c10::OperatorHandle& op, const RuleTable& own);

  enum class ArgKind : uint8_t {
    kTensor,      // Tensor or Tensor?
    kTensorList,  // Tensor[] or Tensor?[]
    kKeyed,    // part of the cache key: ints, bools, strings, dtypes, ..., lists (of floats, too)
    kScalar,   // Scalar or Scalar[]: the rule sees their types, not their values
    kUnkeyed,  // float, generator: the rule does not see them
  };
  struct Write {
    int arg;       // written by the operator; of a list, every element
    int output;    // and returned as this output (-1: not returned, as lists never are)
    bool is_out;   // an out= argument: not an input
    bool is_list;  // Tensor(a!)[]
  };

  const Rule* rule = nullptr;  // null: none
  std::vector<ArgKind> args;
  absl::InlinedVector<bool, 8> is_out;  // per argument
  std::vector<Write> writes;
  bool changes_shape = false;  // in place: transpose_, squeeze_, ...
  bool is_view = false;        // a result aliases an argument that is not written
  int keeps_arg = -1;          // the argument whose value the result has: clone, detach, copy_
  bool is_random = false;      // draws random numbers
  int device_arg = -1;         // of _to_copy: where to
  bool shows_values = false;   // its results are numbers, or of a shape that depends on values
  int num_returns = 0;
  bool has_meta_kernel = false;
  // Has a kernel for meta tensors of its own, which finds bad arguments.
  bool checks_on_meta = false;
  bool decompose = false;  // run the operator's own composite kernel on the DTensors
  c10::DispatchKey composite_key = c10::DispatchKey::Undefined;

  // What it returns shares memory with what it was given.
  bool makes_view() const { return is_view || changes_shape; }
};

}  // namespace shardweave::dtensor_internal
