// Plain tensors next to DTensors. Internal to dtensor/.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "ATen/core/dispatch/Dispatcher.h"
#include "absl/container/flat_hash_map.h"
#include "absl/types/span.h"
#include "c10/core/UndefinedTensorImpl.h"
#include "c10/util/intrusive_ptr.h"
#include "shardweave/dtensor/op_info.h"
#include "shardweave/dtensor/spec.h"

namespace shardweave::dtensor_internal {

class MeshContext;

// The spec of a replicated DTensor with this local tensor.
SpecRef replicated_spec(MeshContext& context, const at::Tensor& local);

// A gradient as autograd hands it to a node of ours: a plain one (of a formula, or of the user's) is
// the same on every rank.
at::Tensor as_dtensor(const at::Tensor& grad, const std::shared_ptr<MeshContext>& context);

// Plain tensors that were found to be the same on every rank, in the state that they were in: the
// last `capacity` of them. What it answers depends on the order of the calls alone, not on how long a
// rank keeps a tensor: all ranks get the same answers.
class EqualTensors {
 public:
  explicit EqualTensors(size_t capacity) : capacity_(capacity) {}
  bool contains(c10::TensorImpl* impl) const;  // and it was not written since
  void add(const at::Tensor& plain);

 private:
  struct State {
    // Its address is not given out again meanwhile.
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> alive;
    uint32_t version;
    int64_t added;  // the how manieth
  };
  const size_t capacity_;
  absl::flat_hash_map<const c10::TensorImpl*, State> states_;
  std::deque<std::pair<const c10::TensorImpl*, int64_t>> order_;  // oldest first
  int64_t num_added_ = 0;
};

// Of one mesh. Numbers (0-dimensional tensors), which LibTorch makes at every corner, are compared
// together: before the next collective or before a value leaves the mesh, whichever comes first.
struct PlainTensors {
  struct Number {
    c10::OperatorHandle op;  // that used it
    size_t arg;
    uint64_t sum;  // of dtype and value
  };
  EqualTensors equal{1024};
  EqualTensors numbers{256};    // compared, or in `put_off`
  std::vector<Number> put_off;  // still to be compared
};

// Compares the numbers that were put off with the other ranks' (collective over the mesh; nothing if
// there are none). Throws Error (InvalidArgument) on every rank, naming operator and argument, if one
// differs.
void settle_numbers(MeshContext& context);

// Plain tensors that an operator reads next to DTensors (masks and weights that LibTorch's
// composite operators make, a user's constants) count as replicated if they are the same on every
// rank. The arguments are replaced; the caller's tensors stay what they are. To find out takes a
// small collective, once per tensor and version; of a number, see PlainTensors. In
// LibTorch's own formulas of derivatives they are: what a formula makes itself is, and what it saved
// was compared in forward.
//
// A tensor that the operator writes, all of which would have to be a DTensor then, becomes one where
// it stands, as an out= argument does, whatever is in it.
//
// Throws Error (InvalidArgument) if they differ or require grad, (FailedPrecondition) in a strict
// scope; on every rank.
void adopt_equal(const c10::OperatorHandle& op, const OpInfo& info,
                 const std::shared_ptr<MeshContext>& context, absl::Span<c10::IValue> args);

// Numbers among the arguments of a call that adopt_equal() has left as they are.
void put_off_numbers(const c10::OperatorHandle& op, const OpInfo& info, MeshContext& context,
                     absl::Span<const c10::IValue> args);

// Whether LibTorch's own formula of a derivative calls, not the user's code: a hook, a Function.
bool in_formula();

// Of formulas: what they write has to become a DTensor before anything else is decided, for they go
// on with their own handle (at::zeros(sizes, grad.options()), then scatter_).
void adopt_written(const OpInfo& info, const std::shared_ptr<MeshContext>& context,
                   absl::Span<c10::IValue> args);

}  // namespace shardweave::dtensor_internal
