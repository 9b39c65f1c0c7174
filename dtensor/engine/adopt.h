// Plain tensors next to DTensors. Internal to dtensor/.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ATen/core/dispatch/Dispatcher.h"
#include "absl/container/flat_hash_set.h"
#include "absl/types/span.h"
#include "shardweave/dtensor/engine/op_info.h"
#include "shardweave/dtensor/spec.h"

namespace shardweave::dtensor_internal {

class MeshContext;

// Strided memory of plain numbers: what DTensors are made of. Empty if `plain` is so, else what it is
// instead: "it is not dense, but Sparse".
std::string not_dense(const at::Tensor& plain);

// The spec of a replicated DTensor with this local tensor.
SpecRef replicated_spec(MeshContext& context, const at::Tensor& local);

// A gradient as autograd hands it to a node of ours: a plain one (of a formula, or of the user's)
// counts as replicated, and its comparison is put off.
at::Tensor as_dtensor(const at::Tensor& grad, const std::shared_ptr<MeshContext>& context);

// What this rank has taken for the same on every rank.
//
// A plain tensor among DTensors is compared with the other ranks' at once where the same argument of
// the same operator has not taken one before: a constant that a model makes in every forward costs
// no collective in every forward. (Not by its memory: of two equal ones a rank may have views of one
// buffer.) Later, and in backward always,
// its checksum is put off: one comparison of all that were put off stands before a value leaves the
// mesh (item(), to_local(), ...). So does that of numbers (0-dimensional tensors), which LibTorch
// makes at every corner. Whether a rank communicates depends on the operators that it has called,
// never on what is in the tensors, where they lie or who has written them: all ranks do the same.
// (A rank that alone has used any waits for the others where a value leaves, until its deadline.)
//
// A comparison that fails comes after the use: whatever was computed since the last one may differ
// from rank to rank, and what is computed from that. So it fails for good: from then on no value
// leaves the mesh (FailedPrecondition, with the first error), whoever has caught the error.
class PlainTensors {
 public:
  // What used a plain tensor: an operator's argument, or, without one, a gradient or a forward plan.
  struct Use {
    std::optional<c10::OperatorHandle> op;
    size_t arg;
  };

  // `place`: what an argument of an operator and a dtype hash to.
  bool has_met_at(uint64_t place) const { return places_.contains(place); }
  void meet_at(uint64_t place);
  void put_off(const Use& use, const at::Tensor& plain);

 private:
  friend void settle_plain_tensors(MeshContext& context);
  // Some that were put off one after the other.
  struct Run {
    Use first, last;
    uint64_t sum;
  };
  // All of them, in a bounded number of runs of `run_length` (the last may be shorter): what differs
  // can be named, if only as one of a run once there were many.
  struct PutOff {
    int64_t count = 0;
    int64_t run_length = 1;
    std::vector<Run> runs;
    void add(const Use& use, uint64_t sum);
  };
  absl::flat_hash_set<uint64_t> places_;
  PutOff put_off_;
  std::string failure_;  // of a comparison of what was put off; empty: none has failed
};

// Compares what was put off with the other ranks' (collective over the mesh; nothing if nothing
// was). Throws Error (InvalidArgument) on every rank, naming operator and argument, if one differs;
// (FailedPrecondition) ever after.
void settle_plain_tensors(MeshContext& context);

// Plain tensors that an operator reads next to DTensors (masks and weights that LibTorch's
// composite operators make, a user's constants) count as replicated if they are the same on every
// rank (see PlainTensors). The arguments are replaced; the caller's tensors stay what they are.
//
// A tensor that the operator writes, all of which would have to be a DTensor then, becomes one where
// it stands, as an out= argument does, whatever is in it.
//
// Throws Error (InvalidArgument) if they differ or require grad, (FailedPrecondition) in a strict
// scope; on every rank.
void adopt_equal(const c10::OperatorHandle& op, const OpInfo& info,
                 const std::shared_ptr<MeshContext>& context, absl::Span<c10::IValue> args);

// The arguments with plain tensors in the place of DTensors taken for the same on every rank, as
// adopt_equal() takes them; nothing is compared. Throws Error (InvalidArgument) if one requires grad.
std::vector<c10::IValue> taken_as_equal(const c10::OperatorHandle& op, const OpInfo& info,
                                        const std::shared_ptr<MeshContext>& context,
                                        absl::Span<const c10::IValue> args);

// Argument `arg` of an operator that is made of others, which asks for the parts of its arguments by
// itself: a plain one counts as replicated, and its comparison is put off. Throws Error
// (InvalidArgument) if it requires grad.
at::Tensor adopted(const c10::OperatorHandle& op, size_t arg, const at::Tensor& plain,
                   const std::shared_ptr<MeshContext>& context);

// Numbers among the arguments of a call, which adopt_equal() leaves as they are. One that is written
// and stays plain has left the mesh: settles.
void put_off_numbers(const c10::OperatorHandle& op, const OpInfo& info, MeshContext& context,
                     absl::Span<const c10::IValue> args);

// In backward, what is written has to become a DTensor before anything else is decided, for
// LibTorch's formulas go on with their own handle (at::zeros(sizes, grad.options()), then scatter_). What
// a formula has made, plain or a whole DTensor (grad.new_zeros(), of a mean's gradient), is cut as what
// it is written beside: the gradient of a batch's largest stays where the batch is.
void adopt_written(const c10::OperatorHandle& op, const OpInfo& info,
                   const std::shared_ptr<MeshContext>& context, absl::Span<c10::IValue> args);

}  // namespace shardweave::dtensor_internal
