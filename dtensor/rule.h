// A rule says how one operator shards along ONE mesh dimension: which placements of its inputs
// give, without communication, which placements of its outputs. The engine (propagate.h) expands
// rules to n mesh dimensions and takes the cheapest combination.
//
//   table.add("aten::mm", einsum("mk,kn->mn"));
//   table.add("aten::relu", pointwise());
//   table.add("aten::sort", Rule([](const OpCall& call, Strategies& out) { ... }));
//
// Rules are pure functions of what OpCall shows. An in-place or out= form uses the rule of its
// functional form ("aten::add_" and "aten::add.out" use "aten::add").
#pragma once

#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ATen/core/dispatch/Dispatcher.h"
#include "ATen/core/stack.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "shardweave/dtensor/spec.h"
#include "shardweave/placement/placement.h"

namespace shardweave {

class ConnectedMesh;

// What a rule sees of one tensor.
struct TensorInfo {
  Dims sizes;    // global
  Dims strides;  // global
  at::ScalarType dtype = at::kFloat;
  SpecRef spec;          // null: undefined, an output, or a plain 0-dim tensor
  SpecRef remembered;    // what it has been brought to before (remembered.h); null: nothing
  CutOrigins origins;    // of spec, as the tensor stands in this call
  bool defined = false;  // false: an optional tensor that is None
  bool is_scalar() const { return defined && sizes.empty(); }
  int ndim() const { return static_cast<int>(sizes.size()); }
  int64_t numel() const;
  // `dim` counted from the end when negative.
  int wrap_dim(int64_t dim) const;
};

// One call of an operator as the rules see it. Valid during propagation only.
struct OpCall {
  const c10::OperatorHandle* op = nullptr;
  absl::Span<const c10::IValue> args;  // one per schema argument
  std::vector<TensorInfo>
      inputs;  // flat: one per tensor argument (None included), one per list element
  std::vector<TensorInfo> outputs;  // flat: shapes are known before a rule is asked
  std::vector<int> input_arg;       // the schema argument that inputs[i] comes from
  std::vector<int> input_element;   // and which element of it, -1: it is no list
  absl::Span<const int> order;      // of the mesh dimensions: outermost cut first
  int mesh_dim = 0;                 // being expanded; those before it in `order` are decided
  int64_t num_ranks = 1;            // along mesh_dim

  const TensorInfo& input(int i) const { return inputs[i]; }
  const TensorInfo& output(int i = 0) const { return outputs[i]; }
  int num_inputs() const { return static_cast<int>(inputs.size()); }
  int num_outputs() const { return static_cast<int>(outputs.size()); }
  // The current placement of input i along mesh_dim (Replicate for plain scalars and None).
  Placement placement(int i) const;

  // Schema arguments by position or name.
  int arg_index(std::string_view name) const;  // -1: no such argument
  const c10::IValue& arg(std::string_view name) const;
  int64_t int_arg(std::string_view name) const;
  bool bool_arg(std::string_view name) const;
  // An int[] (or int, or None = all) argument as dimensions of a tensor with `ndim` dimensions,
  // wrapped, sorted, without duplicates.
  std::vector<int> dims_arg(std::string_view name, int ndim) const;

  // How many pieces all mesh dimensions together cut `dim` of input i into at present (at least 1).
  int64_t cuts(int i, int dim) const;
  // What ranks have of `dim` of input i after the cuts that are decided: the different sizes. A rule
  // whose condition is one on sizes must look at these, not at the global one: several mesh
  // dimensions may cut the same dimension.
  absl::InlinedVector<int64_t, 4> sizes_so_far(int i, int dim) const;
  // How many pieces the decided cuts and one more over mesh_dim would make of `dim` of input i.
  int64_t pieces(int i, int dim) const;
  // True if sharding `dim` of input i over mesh_dim, too, could leave some rank with no elements.
  bool may_be_empty(int i, int dim) const;
};

// The local tensors of one call, for a kernel that replaces the operator's own on each rank.
struct LocalCall {
  absl::Span<const SpecRef> inputs;  // flat, after redistribution; null as in TensorInfo
  absl::Span<const SpecRef> outputs;
};
// Pops the operator's (local) arguments off the stack and pushes its (local) results, like a boxed
// kernel.
using LocalKernel = void (*)(const c10::OperatorHandle& op, c10::Stack& stack,
                             const LocalCall& call);

// Placements that belong together along one mesh dimension.
struct Strategy {
  std::vector<Placement> inputs;   // one per flat input; entries of None inputs are ignored
  std::vector<Placement> outputs;  // one per flat output; a single one stands for all
  LocalKernel kernel = nullptr;    // null: the operator itself runs on the local tensors
  // Where the outputs are brought right away, one per flat output; empty: they stay. For Partials
  // that are known to end up cut: the gradient of what was gathered.
  std::vector<Placement> then = {};

  const Placement& result(int k) const { return then.empty() ? outputs[k] : then[k]; }
};

// The strategies of a call; all-Replicate is always there and need not be added.
class Strategies {
 public:
  void add(std::vector<Placement> inputs, std::vector<Placement> outputs,
           LocalKernel kernel = nullptr, std::vector<Placement> then = {}) {
    list_.push_back({std::move(inputs), std::move(outputs), kernel, std::move(then)});
  }
  const std::vector<Strategy>& list() const { return list_; }
  std::vector<Strategy>& list() { return list_; }

 private:
  std::vector<Strategy> list_;
};

class Rule {
 public:
  using Function = std::function<void(const OpCall&, Strategies&)>;
  // Runs the whole operator on DTensors by other operators (pops arguments, pushes results).
  using Composite = void (*)(const c10::OperatorHandle& op, c10::Stack& stack);
  // Fills call.outputs from inputs and arguments, for operators without a kernel for meta tensors.
  using ShapeFunction = std::function<void(OpCall&)>;

  Rule() = default;
  explicit Rule(Function f) : function(std::move(f)) {}
  static Rule composed(Composite composite);
  // By `composite` for calls whose arguments (as the user gave them) say so, by the rule for all
  // others.
  using Condition = bool (*)(const c10::OperatorHandle& op, absl::Span<const c10::IValue> args);
  Rule composed_when(Condition condition, Composite composite) &&;

  // What its results look like depends on values: all inputs are gathered, as for an operator
  // without a rule, but without a warning.
  static Rule gathered();
  // So for calls whose arguments say so, by the rule for all others.
  Rule gathered_when(Condition condition) &&;

  // Calls that LibTorch refuses, though neither its kernel for meta tensors nor a shape function
  // here says so (dtypes that do not go together): they get LibTorch's error before anything is
  // sent.
  Rule refuses(Condition bad) &&;

  // Argument `name` is the global size of output 0 (or of a tensor shaped like it): replaced by the
  // local size.
  Rule size_arg(std::string_view name) &&;
  Rule shapes(ShapeFunction f) &&;
  // The same, but only for operators that have no kernel for meta tensors.
  Rule shapes_without_meta(ShapeFunction f) &&;
  // Output shapes, strides and dtypes equal those of these inputs.
  Rule shapes_like(std::vector<int> inputs) &&;
  // The rule reads these arguments, which are not part of the cache key by default (float and
  // Scalar values are not: a per-step scalar must not grow the cache).
  Rule reads(std::vector<std::string> names) &&;
  // Shards must be whole chunks: what holds for Shard(d) does not hold for an arbitrary subset of
  // the indices of d (views, flips, cat along d, ...). Without it strided and ragged shards may
  // stand wherever a strategy says Shard.
  Rule chunks_only() &&;
  // The operator does to each element of its lists what the rule says of one (_foreach_add,
  // _fused_adamw_): elements are decided one by one, each with the element of every list and with
  // all tensors that are in no list.
  Rule per_element() &&;
  // The multiplications and additions of the whole operator, for the choice between strategies.
  // Without it only the bytes that it reads and writes count.
  using Flops = std::function<double(const OpCall&)>;
  Rule flops(Flops f) &&;
  // Replaces the operator on the local tensors in every strategy that has no kernel of its own,
  // all-Replicate included.
  Rule runs(LocalKernel kernel) &&;

  Function function;  // null: all inputs are gathered
  Composite composite = nullptr;
  Condition composite_condition = nullptr;  // null: always
  Condition refused = nullptr;              // null: never
  Condition gathers = nullptr;              // null: never
  ShapeFunction shape_function;
  ShapeFunction shape_function_without_meta;
  std::vector<std::string> size_args;
  std::vector<std::string> read_args;
  bool only_chunks = false;
  bool each_element = false;
  LocalKernel kernel = nullptr;  // null: the operator itself
  Flops count_flops;             // null: none
};

// Name ("aten::mm" for all overloads, "aten::mm.out"-style for one) -> rule.
class RuleTable {
 public:
  void add(std::string_view name, Rule rule);
  void add(std::initializer_list<std::string_view> names, const Rule& rule);
  // The rule of an operator, looking at its overload, its name, its functional form; null if there
  // is none.
  const Rule* find(const c10::OperatorName& name) const;
  size_t size() const { return rules_.size(); }
  std::vector<std::string> names() const;  // sorted

  // All rules of this library. Built once, then immutable.
  static const RuleTable& builtin();

 private:
  absl::flat_hash_map<std::string, Rule> rules_;
};

// Gives operator `name` (as RuleTable::add takes it) a rule of the user's on one mesh; it comes
// before a rule of this library for the same operator. Every rank adds the same rules to its mesh,
// before or between operators; slices of a mesh have rules of their own. Throws Error
// (AlreadyExists) for a second rule of the same name, (InvalidArgument) for a name without a
// namespace.
//
//   add_rule(mesh, "mylib::swiglu", pointwise());
//
// docs/rules.md shows how to write one and how to test it.
void add_rule(const std::shared_ptr<ConnectedMesh>& mesh, std::string_view name, Rule rule);

// --- rule makers -------------------------------------------------------------------------------

// "mk,kn->mn": letters are dimensions. A letter in inputs and output may be sharded; one missing in
// the output is summed (Partial sum). Linear in each operand: Partial(sum|avg) of one operand with
// the others replicated passes through. `linear = false` leaves the latter out.
Rule einsum(std::string_view equation, bool linear = true);

enum class Linearity : uint8_t {
  kNone,         // relu, exp, mul of two Partials...
  kIdentity,     // clone, alias: any Partial passes through
  kAdditive,     // neg, add, sub: all operands Partial of the same kind (sum or avg)
  kMultilinear,  // mul: exactly one operand Partial, the others replicated
  kFirst,        // div: only the first operand may be Partial
};
// Elementwise with broadcasting over all tensor inputs.
Rule pointwise(Linearity linearity = Linearity::kNone);

}  // namespace shardweave
