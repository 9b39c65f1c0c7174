// What several families of rules share: shapes of results, reduced dimensions, arguments on a
// stack.
//
//   table.add("aten::sort", along_dim());
//   void kernel(const c10::OperatorHandle& op, c10::Stack& stack, const LocalCall&) {
//     BoxedCall call(op, stack);
//     call.finish({call.tensor("self") / 2});
//   }
//
// Internal to dtensor/rules.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "ATen/core/Tensor.h"
#include "shardweave/dtensor/rule.h"

namespace shardweave::dtensor_internal {

// The reductions that a linear operator passes on, and all there are.
inline constexpr ReduceOp kLinearOps[] = {ReduceOp::kSum, ReduceOp::kAvg};
inline constexpr ReduceOp kAllReduceOps[] = {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin,
                                             ReduceOp::kMax, ReduceOp::kProduct};

// --- shapes of results ---------------------------------------------------------------------------

// A contiguous result.
TensorInfo contiguous_info(Dims sizes, at::ScalarType dtype);
// What at::empty_like(like) gives: the strides of `like` where they are dense, else the same order.
TensorInfo like_info(const TensorInfo& like);
// Where LibTorch's kernels for GPUs give results of other shapes than those for CPUs.
bool is_on_gpu(const TensorInfo& input);
// What an elementwise operator gives that broadcasts these inputs, with the dtype of the first.
TensorInfo broadcast_info(const OpCall& call, std::initializer_list<std::string_view> inputs);
// The same of all inputs.
TensorInfo broadcast_info(const OpCall& call);
// For operators whose one result is what empty_like() gives of the first input.
void like_input(OpCall& call);
// For those whose one result has the sizes and the dtype of "self", contiguous.
void contiguous_like_input(OpCall& call);
// For those that return no tensor.
void no_outputs(OpCall& call);
// The global shape that all inputs of a call broadcast to.
Dims broadcast_sizes(absl::Span<const Dims> shapes);

// --- reductions ----------------------------------------------------------------------------------

// The dimensions of its first input that an operator works along, from its arguments "dim" (one, several,
// or all of them: None, empty, or no such argument) and "keepdim".
class ReducedDims {
 public:
  explicit ReducedDims(const OpCall& call);

  bool contains(int dim) const { return reduced_[dim]; }
  int ndim() const { return static_cast<int>(reduced_.size()); }
  // Where a dimension that is not reduced is in an output with `output_ndim` dimensions.
  int in_output(int dim, int output_ndim) const;
  // The shape of the result.
  Dims sizes(const TensorInfo& input) const;

 private:
  std::vector<bool> reduced_;
  bool keep_;
};

// Operators that treat each line along their argument "dim" for itself (softmax, cumsum, max with
// indices, ...): every other dimension may be sharded, in all inputs alike.
ShardedRule along_dim();

// --- batches -------------------------------------------------------------------------------------

// All inputs are Partial together, and so are the results.
void pass_partials(const OpCall& call, Strategies& out, absl::Span<const ReduceOp> ops);

// Whether numbers may as well be cast before a reduction as after it, rounding to a coarser type
// apart. (The engine asks: rules need not. A complex number is cast part by part.)
bool cast_commutes(ReduceOp op, at::ScalarType from, at::ScalarType to);

// Operators on the last dimensions of their tensors (matrices, images): the dimensions before them
// are batches, and may be sharded in all tensors alike.
struct Batches {
  // How many last dimensions of each input and output are no batches; kWhole: the tensor has none.
  // One number stands for all.
  static constexpr int kWhole = -1;
  std::vector<int> inputs;
  std::vector<int> outputs;
  // Linear in the first input (an image, or the incoming gradient): where that is Partial (sum, avg)
  // and all others are whole, the outputs are Partial.
  bool linear_in_first = false;
};
ShardedRule over_batches(Batches batches);

// How what is one of these dimensions of each of these inputs (the batch, the channels) may be cut by a
// rule that is chunks_only() for the sake of others: in chunks, and as strided or ragged as any of them
// is. As cuts of dimension 0.
using DimsByName = std::initializer_list<std::pair<std::string_view, int>>;
std::vector<Placement> cuts_of(const OpCall& call, DimsByName dims);

// --- cost ----------------------------------------------------------------------------------------

// Of the product of inputs `first` and following, whose dimensions these letters name: two for each
// combination of indices.
double einsum_flops(const OpCall& call, const std::vector<std::string>& operands, int first);

// --- arguments on a stack ------------------------------------------------------------------------

// Reads the arguments of a boxed call by name and replaces them by the results.
class BoxedCall {
 public:
  BoxedCall(const c10::OperatorHandle& op, c10::Stack& stack);

  bool has(std::string_view name) const { return given().has(name); }
  int index(std::string_view name) const { return given().index(name); }
  c10::IValue& operator[](std::string_view name) { return stack_[base_ + index(name)]; }
  at::Tensor tensor(std::string_view name);  // undefined for None
  // The same as a DTensor: a plain one among DTensors counts as replicated (engine/adopt.h).
  at::Tensor dtensor(std::string_view name);
  bool flag(std::string_view name);  // false if there is no such argument
  // How an argument that is a tensor lies, of a call for which a kernel of a rule runs.
  const Spec& spec(const LocalCall& call, std::string_view name) const;
  // The argument "dim": empty if it is None, or if there is no such argument.
  std::vector<int64_t> dims();

  // A copy of them all.
  c10::Stack arguments() const { return c10::Stack(stack_.begin() + base_, stack_.end()); }

  // Runs the operator itself on the arguments as they are now.
  void run() { op_.callBoxed(stack_); }
  // Pops the arguments and pushes the results. Those of an out= form go into its out= arguments.
  void finish(std::initializer_list<at::Tensor> results);
  // The same for an operator that returns one list, which is not given as out=.
  void finish_list(std::vector<at::Tensor> results);

 private:
  Arguments given() const { return {op_, absl::MakeConstSpan(stack_).subspan(base_)}; }

  const c10::OperatorHandle& op_;
  c10::Stack& stack_;
  const size_t base_;
};

// A composite (see ComposedRule): LibTorch's own, which does not need to know the tensors'
// storage.
void decomposed(const c10::OperatorHandle& op, c10::Stack& stack);

// `tensor` in another layout, for a composite that runs `op` on local parts: communication of the
// operator like that of a rule, which counts as implicit and which the strict scope refuses.
at::Tensor move_input(const c10::OperatorHandle& op, const at::Tensor& tensor, const Layout& layout,
                      std::string_view argument);
// The reduction, in one collective, of what the ranks of the mesh of `like` have worked out from
// their parts: `local` is this rank's part of a contiguous tensor of global `sizes` that lies as
// `placements` say (cut in the order of `like`). What is Partial there is Replicate in the result.
at::Tensor reduce_over_ranks(const c10::OperatorHandle& op, const at::Tensor& like,
                             at::Tensor local, Placements placements, const Dims& sizes);

// For operators that cannot take empty tensors: if an argument is empty, the results are zeros
// (what a sum over nothing is); else the operator runs.
void zeros_if_empty(const c10::OperatorHandle& op, c10::Stack& stack, const LocalCall& call);

}  // namespace shardweave::dtensor_internal
