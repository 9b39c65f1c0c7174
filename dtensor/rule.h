// A rule says how one operator runs on DTensors, in one of three ways:
//
//   sharded    by strategies: which placements of its inputs give, without communication, which
//              placements of its outputs, along ONE mesh dimension. The engine (propagate.h) expands
//              them to n mesh dimensions and takes the cheapest combination
//   composed   by other operators on DTensors, which have rules of their own
//   gathered   with all its inputs whole on every rank
//
// A condition on the arguments may say that some calls go another way:
//
//   table.add("aten::mm", einsum("mk,kn->mn"));
//   table.add("aten::take", sharded(take).shapes(take_shape));
//   table.add("aten::equal", composed(equal));
//   table.add("aten::nonzero", gathered().when(is_no_mask, composed(nonzero)));
//
// Strategies name the inputs that they cut as the operator's schema does; all others are whole:
//
//   void take(const OpCall& call, Strategies& out) {
//     for (int d = 0; d < call.input("index").ndim(); ++d) out.add({{"index", Shard(d)}}, {Shard(d)});
//     out.add_linear({{"self"}});
//   }
//
// Rules are pure functions of what OpCall shows. An in-place or out= form uses the rule of its
// functional form ("aten::add_" and "aten::add.out" use "aten::add").
#pragma once

#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/core/dispatch/Dispatcher.h"
#include "ATen/core/stack.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "shardweave/dtensor/spec.h"
#include "shardweave/placement/placement.h"

namespace shardweave {

class ConnectedMesh;

// The arguments of one call, by the names that the operator's schema gives them. A name that it does
// not have is an Error (Internal) that says which it has. As cheap to copy as a view.
class Arguments {
 public:
  Arguments(const c10::OperatorHandle& op, absl::Span<const c10::IValue> values)
      : op_(&op), values_(values) {}

  const c10::OperatorHandle& op() const { return *op_; }
  absl::Span<const c10::IValue> values() const { return values_; }
  bool has(std::string_view name) const { return find(name) >= 0; }
  // Its place in the schema.
  int index(std::string_view name) const;
  const c10::IValue& operator[](std::string_view name) const { return values_[index(name)]; }
  const at::Tensor& tensor(std::string_view name) const { return (*this)[name].toTensor(); }

 private:
  int find(std::string_view name) const;  // -1: no such argument

  const c10::OperatorHandle* op_;
  absl::Span<const c10::IValue> values_;
};

// What a rule sees of one tensor.
struct TensorInfo {
  Dims sizes;    // global
  Dims strides;  // global
  at::ScalarType dtype = at::kFloat;
  SpecRef spec;                // null: undefined, an output, or a plain 0-dim tensor
  SpecRef remembered;          // what it has been brought to before (remembered.h); null: nothing
  CutOrigins origins;          // of spec, as the tensor stands in this call
  bool defined = false;        // false: an optional tensor that is None
  bool only_shape = false;     // its numbers are not read: ShardedRule::only_shape_of()
  bool is_last_again = false;  // it has the elements of the last DTensor before it (remembered.h)
  bool is_scalar() const { return defined && sizes.empty(); }
  int ndim() const { return static_cast<int>(sizes.size()); }
  int64_t numel() const;
  // `dim` counted from the end when negative.
  int wrap_dim(int64_t dim) const;
};

// How some of the inputs of a call lie, by name; of an argument that is a list, all its tensors.
using InputPlacements = std::initializer_list<std::pair<std::string_view, Placement>>;

// One call of an operator as the rules see it. Valid during propagation only.
//
// `inputs` and `outputs` are flat: one per tensor argument (None included; out= arguments are none),
// one per element of a list.
struct OpCall {
  const c10::OperatorHandle* op = nullptr;
  absl::Span<const c10::IValue> args;  // one per schema argument
  std::vector<TensorInfo> inputs;
  std::vector<TensorInfo> outputs;  // shapes are known before a rule is asked
  std::vector<int> input_arg;       // the schema argument that inputs[i] comes from
  std::vector<int> input_element;   // and which element of it, -1: it is no list
  absl::Span<const int> order;      // of the mesh dimensions: outermost cut first
  int mesh_dim = 0;                 // being expanded; those before it in `order` are decided
  int64_t num_ranks = 1;            // along mesh_dim

  int num_inputs() const { return static_cast<int>(inputs.size()); }
  int num_outputs() const { return static_cast<int>(outputs.size()); }
  const TensorInfo& input(int i) const { return inputs[i]; }
  const TensorInfo& output(int i = 0) const { return outputs[i]; }

  // Inputs by name. Throws Error (Internal) for a name that the schema does not have, or that is no
  // tensor's.
  const TensorInfo& input(std::string_view name) const { return inputs[input_index(name)]; }
  int input_index(std::string_view name) const;
  // The tensors of a list.
  absl::Span<const TensorInfo> list(std::string_view name) const;
  // A placement for every input: these, and Replicate for all others.
  std::vector<Placement> placements(InputPlacements named) const;

  // All other arguments by name.
  Arguments arguments() const { return {*op, args}; }
  bool has_arg(std::string_view name) const { return arguments().has(name); }
  const c10::IValue& arg(std::string_view name) const { return arguments()[name]; }
  int64_t int_arg(std::string_view name) const { return arg(name).toInt(); }
  bool bool_arg(std::string_view name) const { return arg(name).toBool(); }
  // An int[] (or int, or None = all) argument as dimensions of a tensor with `ndim` dimensions,
  // wrapped, sorted, without duplicates.
  std::vector<int> dims_arg(std::string_view name, int ndim) const;

  // The current placement of an input along mesh_dim (Replicate for plain scalars and None).
  Placement placement(int i) const;
  Placement placement(std::string_view name) const { return placement(input_index(name)); }
  // How many pieces all mesh dimensions together cut `dim` of an input into at present (at least 1).
  int64_t cuts(const TensorInfo& input, int dim) const;
  // What ranks have of `dim` of an input after the cuts that are decided: the different sizes. A rule
  // whose condition is one on sizes must look at these, not at the global one: several mesh
  // dimensions may cut the same dimension.
  absl::InlinedVector<int64_t, 4> sizes_so_far(const TensorInfo& input, int dim) const;
  // How many pieces the decided cuts and one more over mesh_dim would make of `dim` of an input.
  int64_t pieces(const TensorInfo& input, int dim) const;
  // True if sharding `dim` of an input over mesh_dim, too, could leave some rank with no elements.
  bool may_be_empty(const TensorInfo& input, int dim) const;
};

// How an input lies that is broadcast to `shape`, where dimension `dim` of that is cut: Replicate
// where it is repeated, or None. The dimensions of both are counted from the last one.
Placement broadcast_cut(const TensorInfo& input, const Dims& shape, int dim);
// All inputs of a call, broadcast together.
std::vector<Placement> broadcast_cuts(const OpCall& call, const Dims& shape, int dim);

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
  explicit Strategies(const OpCall& call) : call_(call) {}

  // Inputs that are not named are Replicate.
  void add(InputPlacements inputs, std::vector<Placement> outputs, LocalKernel kernel = nullptr,
           std::vector<Placement> then = {}) {
    add(call_.placements(inputs), std::move(outputs), kernel, std::move(then));
  }
  // One per flat input, where inputs have no names that matter.
  void add(std::vector<Placement> inputs, std::vector<Placement> outputs,
           LocalKernel kernel = nullptr, std::vector<Placement> then = {}) {
    list_.push_back({std::move(inputs), std::move(outputs), kernel, std::move(then)});
  }
  // The operator is linear in each of these sets of inputs: where those are Partial (sum, avg)
  // together and all others Replicate, the outputs are Partial.
  void add_linear(std::initializer_list<std::initializer_list<std::string_view>> sets);

  const std::vector<Strategy>& list() const { return list_; }
  std::vector<Strategy>& list() { return list_; }

 private:
  const OpCall& call_;
  std::vector<Strategy> list_;
};

// --- the three ways ----------------------------------------------------------------------------

class Rule;

// Which calls of an operator, by their arguments as the user gave them.
using Condition = bool (*)(const Arguments& args);

// By other operators.
struct ComposedRule {
  // Runs the whole operator on DTensors (pops arguments, pushes results).
  void (*run)(const c10::OperatorHandle& op, c10::Stack& stack);
};

// With whole inputs, as an operator without a rule, but without a warning: what its results look
// like depends on values.
struct GatheredRule {
  Rule when(Condition condition, ComposedRule instead) &&;
};

// By strategies.
class ShardedRule {
 public:
  using Function = std::function<void(const OpCall&, Strategies&)>;
  // Fills call.outputs from inputs and arguments.
  using ShapeFunction = std::function<void(OpCall&)>;
  using Flops = std::function<double(const OpCall&)>;
  // An order of the mesh dimensions in which they may as well cut the inputs as in `call.order`.
  using CutOrder = std::function<std::vector<int>(const OpCall&)>;

  explicit ShardedRule(Function strategies) : strategies_(std::move(strategies)) {}

  // Adds the strategies of a call: so that a rule can begin with those of another.
  void operator()(const OpCall& call, Strategies& out) const { strategies_(call, out); }

  // Shapes, strides and dtypes of the outputs, instead of those that the operator's kernel for meta
  // tensors gives.
  ShardedRule shapes(ShapeFunction f) &&;
  // The same, but only for operators that have no such kernel.
  ShardedRule shapes_without_meta(ShapeFunction f) &&;
  // Those of these inputs, one for each output.
  ShardedRule shapes_like(std::vector<std::string> inputs) &&;
  // Argument `name` is the global size of output 0 (or of a tensor shaped like it): replaced by the
  // local size.
  ShardedRule size_arg(std::string_view name) &&;
  // The strategies depend on these arguments, which are not part of the cache key by default (float
  // and Scalar values are not: a per-step scalar must not grow the cache).
  ShardedRule reads(std::vector<std::string> names) &&;
  // Of these inputs the operator reads only the shape, as the backward of a pool does of the image.
  ShardedRule only_shape_of(std::vector<std::string> names) &&;
  // Shards must be whole chunks: what holds for Shard(d) does not hold for an arbitrary subset of
  // the indices of d (views, flips, cat along d, ...). Without it strided and ragged shards may
  // stand wherever a strategy says Shard.
  ShardedRule chunks_only() &&;
  // Mesh dimensions are decided in the order in which they cut the inputs, and the outputs are cut in
  // that order, too. Where inputs are cut along different dimensions, other orders mean the same;
  // `f` says which is best for the outputs.
  ShardedRule cuts_in_order(CutOrder f) &&;
  // The operator does to each element of its lists what the rule says of one (_foreach_add,
  // _fused_adamw_): elements are decided one by one, each with the element of every list and with
  // all tensors that are in no list.
  ShardedRule per_element() &&;
  // The multiplications and additions of the whole operator, for the choice between strategies.
  // Without it only the bytes that it reads and writes count.
  ShardedRule flops(Flops f) &&;
  // Replaces the operator on the local tensors in every strategy that has no kernel of its own,
  // all-Replicate included.
  ShardedRule runs(LocalKernel kernel) &&;

  Rule when(Condition condition, ComposedRule instead) &&;
  Rule when(Condition condition, GatheredRule instead) &&;
  Rule refuses(Condition bad) &&;

  // What was said above.
  struct Options {
    ShapeFunction shapes;  // null: the kernel for meta tensors says
    bool shapes_only_if_no_meta = false;
    std::string size_arg;  // "": none
    std::vector<std::string> reads;
    std::vector<std::string> only_shape_of;
    bool chunks_only = false;
    CutOrder cut_order;  // null: as the inputs
    bool per_element = false;
    Flops flops;                   // null: none
    LocalKernel kernel = nullptr;  // null: the operator itself
  };
  const Options& options() const { return options_; }

 private:
  Function strategies_;
  Options options_;
};

class Rule {
 public:
  // NOLINTBEGIN(google-explicit-constructor): each way is a rule.
  Rule(ShardedRule rule) : way_(std::move(rule)) {}
  Rule(ComposedRule rule) : way_(rule) {}
  Rule(GatheredRule rule) : way_(rule) {}
  // NOLINTEND(google-explicit-constructor)

  // Calls of which `condition` holds go this way instead. One condition for a rule.
  Rule when(Condition condition, ComposedRule instead) &&;
  Rule when(Condition condition, GatheredRule instead) &&;
  // Calls that LibTorch refuses, though neither its kernel for meta tensors nor a shape function
  // here says so (dtypes that do not go together): they get LibTorch's error before anything is
  // sent.
  Rule refuses(Condition bad) &&;

  // What the engine asks first: is the call made of other operators? Null: it is not.
  const ComposedRule* composed(const Arguments& args) const {
    const auto* instead = std::get_if<ComposedRule>(&instead_);
    if (instead != nullptr && exception_(args)) return instead;
    return std::get_if<ComposedRule>(&way_);
  }
  // And if not: does it run by strategies? Null: its inputs are gathered.
  const ShardedRule* sharded(const Arguments& args) const {
    const bool gathers =
        exception_ != nullptr && std::holds_alternative<GatheredRule>(instead_) && exception_(args);
    return gathers ? nullptr : sharded();
  }
  // For calls without the exception.
  const ShardedRule* sharded() const { return std::get_if<ShardedRule>(&way_); }
  bool is_refused(const Arguments& args) const { return refused_ != nullptr && refused_(args); }

 private:
  std::variant<ShardedRule, ComposedRule, GatheredRule> way_;
  Condition exception_ = nullptr;  // null: there is none
  std::variant<ComposedRule, GatheredRule> instead_ = GatheredRule();
  Condition refused_ = nullptr;  // null: no call
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

inline ShardedRule sharded(ShardedRule::Function strategies) {
  return ShardedRule(std::move(strategies));
}
ShardedRule sharded(const ShardedRule&) = delete;  // is one
// No strategies but that every rank has all inputs, and all results.
ShardedRule replicated();
inline ComposedRule composed(decltype(ComposedRule::run) run) {
  return {run};
}
inline GatheredRule gathered() {
  return {};
}

// "mk,kn->mn": letters are dimensions. A letter in inputs and output may be sharded; one missing in
// the output is summed (Partial sum). Linear in each operand: Partial(sum|avg) of one operand with
// the others replicated passes through. `linear = false` leaves the latter out.
ShardedRule einsum(std::string_view equation, bool linear = true);

enum class Linearity : uint8_t {
  kNone,         // relu, exp, mul of two Partials...
  kIdentity,     // clone, alias: any Partial passes through
  kAdditive,     // neg, add, sub: all operands Partial of the same kind (sum or avg)
  kMultilinear,  // mul: exactly one operand Partial, the others replicated
  kFirst,        // div: only the first operand may be Partial
};
// Elementwise with broadcasting over all tensor inputs.
ShardedRule pointwise(Linearity linearity = Linearity::kNone);

}  // namespace shardweave
