#include "shardweave/dtensor/rule.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "c10/core/WrapDimMinimal.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/dtensor/rules/common.h"
#include "shardweave/dtensor/rules/families.h"

namespace shardweave {

using namespace dtensor_internal;

int64_t TensorInfo::numel() const {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

int TensorInfo::wrap_dim(int64_t dim) const {
  return static_cast<int>(c10::maybe_wrap_dim(dim, ndim()));
}

// --- arguments -----------------------------------------------------------------------------------

int Arguments::find(std::string_view name) const {
  const auto& arguments = op_->schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == name) return static_cast<int>(i);
  }
  return -1;
}

int Arguments::index(std::string_view name) const {
  const int i = find(name);
  if (i >= 0) return i;
  const auto add_name = [](std::string* out, const c10::Argument& argument) {
    absl::StrAppend(out, argument.name());
  };
  throw Error(absl::InternalError(
      absl::StrCat(c10::toString(op_->operator_name()), " has no argument '", std::string(name),
                   "'; it has ", absl::StrJoin(op_->schema().arguments(), ", ", add_name))));
}

int OpCall::input_index(std::string_view name) const {
  const int arg = arguments().index(name);
  // Inputs are in the order of the arguments.
  const auto first = std::lower_bound(input_arg.begin(), input_arg.end(), arg);
  if (first != input_arg.end() && *first == arg) return static_cast<int>(first - input_arg.begin());
  throw Error(absl::InternalError(absl::StrCat("argument '", std::string(name), "' of ",
                                               c10::toString(op->operator_name()),
                                               " is no tensor, or a list of none")));
}

absl::Span<const TensorInfo> OpCall::list(std::string_view name) const {
  const auto [first, last] =
      std::equal_range(input_arg.begin(), input_arg.end(), arguments().index(name));
  return absl::MakeConstSpan(inputs).subspan(first - input_arg.begin(), last - first);
}

std::vector<Placement> OpCall::placements(InputPlacements named) const {
  std::vector<Placement> all(inputs.size());
  for (const auto& [name, placement] : named) {
    const int first = input_index(name);
    for (int i = first; i < num_inputs() && input_arg[i] == input_arg[first]; ++i) {
      all[i] = placement;
    }
  }
  return all;
}

std::vector<int> OpCall::dims_arg(std::string_view name, int ndim) const {
  const c10::IValue& value = arg(name);
  std::vector<int64_t> given;
  if (value.isInt()) given = {value.toInt()};
  if (value.isIntList()) given = value.toIntVector();
  std::vector<int> dims;
  if (given.empty()) {
    dims.resize(ndim);
    std::iota(dims.begin(), dims.end(), 0);
    return dims;
  }
  TensorInfo shape;
  shape.sizes.resize(ndim);
  for (int64_t dim : given) dims.push_back(shape.wrap_dim(dim));
  std::sort(dims.begin(), dims.end());
  dims.erase(std::unique(dims.begin(), dims.end()), dims.end());
  return dims;
}

// --- how inputs lie ------------------------------------------------------------------------------

Placement OpCall::placement(int i) const {
  return inputs[i].spec == nullptr ? Replicate() : inputs[i].spec->layout[mesh_dim];
}

int64_t OpCall::cuts(const TensorInfo& input, int dim) const {
  const SpecRef& spec = input.spec;
  if (spec == nullptr) return 1;
  int64_t pieces = 1;
  for (int m : spec->layout.shards_of(dim)) pieces *= spec->context->mesh().size(m);
  return pieces;
}

absl::InlinedVector<int64_t, 4> OpCall::sizes_so_far(const TensorInfo& input, int dim) const {
  absl::InlinedVector<int64_t, 4> sizes = {input.sizes[dim]};
  const SpecRef& spec = input.spec;
  if (spec == nullptr) return sizes;
  for (int m : order) {
    if (m == mesh_dim) break;
    if (!spec->layout[m].is_shard(dim)) continue;
    const int64_t ranks = spec->context->mesh().size(m);
    absl::InlinedVector<int64_t, 4> pieces;
    for (int64_t size : sizes) {
      for (int64_t piece : cut_sizes(spec->layout[m], size, ranks)) {
        if (std::find(pieces.begin(), pieces.end(), piece) == pieces.end()) pieces.push_back(piece);
      }
    }
    sizes = std::move(pieces);
  }
  return sizes;
}

int64_t OpCall::pieces(const TensorInfo& input, int dim) const {
  int64_t pieces = num_ranks;
  const SpecRef& spec = input.spec;
  if (spec == nullptr) return pieces;
  for (int m : order) {
    if (m == mesh_dim) break;
    if (spec->layout[m].is_shard(dim)) pieces *= spec->context->mesh().size(m);
  }
  return pieces;
}

bool OpCall::may_be_empty(const TensorInfo& input, int dim) const {
  // With the unusual cuts that inputs have, which the engine tries wherever they fit: do not
  // reason, be safe.
  for (int k = 0; k < num_inputs(); ++k) {
    const Placement p = placement(k);
    if (!p.is_shard() || p.is_plain_shard()) continue;
    if (inputs[k].sizes[p.dim()] == input.sizes[dim]) return true;
  }
  for (int64_t size : sizes_so_far(input, dim)) {
    if (chunk(size, num_ranks, num_ranks - 1).size() == 0) return true;
  }
  return false;
}

Placement broadcast_cut(const TensorInfo& input, const Dims& shape, int dim) {
  const int own = dim - (static_cast<int>(shape.size()) - input.ndim());
  const bool repeated = !input.defined || own < 0 || (input.sizes[own] == 1 && shape[dim] != 1);
  return repeated ? Replicate() : Shard(own);
}

std::vector<Placement> broadcast_cuts(const OpCall& call, const Dims& shape, int dim) {
  std::vector<Placement> cuts;
  cuts.reserve(call.inputs.size());
  for (const TensorInfo& input : call.inputs) cuts.push_back(broadcast_cut(input, shape, dim));
  return cuts;
}

void Strategies::add_linear(std::initializer_list<std::initializer_list<std::string_view>> sets) {
  for (ReduceOp op : kLinearOps) {
    for (const auto& set : sets) {
      std::vector<Placement> inputs(call_.inputs.size());
      for (std::string_view name : set) inputs[call_.input_index(name)] = Partial(op);
      add(std::move(inputs), {Partial(op)});
    }
  }
}

// --- rules ---------------------------------------------------------------------------------------

ShardedRule ShardedRule::shapes(ShapeFunction f) && {
  options_.shapes = std::move(f);
  options_.shapes_only_if_no_meta = false;
  return std::move(*this);
}

ShardedRule ShardedRule::shapes_without_meta(ShapeFunction f) && {
  options_.shapes = std::move(f);
  options_.shapes_only_if_no_meta = true;
  return std::move(*this);
}

ShardedRule ShardedRule::shapes_like(std::vector<std::string> inputs) && {
  return std::move(*this).shapes([inputs = std::move(inputs)](OpCall& call) {
    for (const std::string& name : inputs) {
      TensorInfo info = call.input(name);
      info.spec = nullptr;
      call.outputs.push_back(std::move(info));
    }
  });
}

ShardedRule ShardedRule::size_arg(std::string_view name) && {
  options_.size_arg = name;
  return std::move(*this);
}

ShardedRule ShardedRule::reads(std::vector<std::string> names) && {
  options_.reads = std::move(names);
  return std::move(*this);
}

ShardedRule ShardedRule::only_shape_of(std::vector<std::string> names) && {
  options_.only_shape_of = std::move(names);
  return std::move(*this);
}

ShardedRule ShardedRule::chunks_only() && {
  options_.chunks_only = true;
  return std::move(*this);
}

ShardedRule ShardedRule::cuts_in_order(CutOrder f) && {
  options_.cut_order = std::move(f);
  return std::move(*this);
}

ShardedRule ShardedRule::per_element() && {
  options_.per_element = true;
  return std::move(*this);
}

ShardedRule ShardedRule::flops(Flops f) && {
  options_.flops = std::move(f);
  return std::move(*this);
}

ShardedRule ShardedRule::runs(LocalKernel kernel) && {
  options_.kernel = kernel;
  return std::move(*this);
}

Rule ShardedRule::when(Condition condition, ComposedRule instead) && {
  return Rule(std::move(*this)).when(condition, instead);
}

Rule ShardedRule::when(Condition condition, GatheredRule instead) && {
  return Rule(std::move(*this)).when(condition, instead);
}

Rule ShardedRule::refuses(Condition bad) && {
  return Rule(std::move(*this)).refuses(bad);
}

Rule GatheredRule::when(Condition condition, ComposedRule instead) && {
  return Rule(*this).when(condition, instead);
}

Rule Rule::when(Condition condition, ComposedRule instead) && {
  exception_ = condition;
  instead_ = instead;
  return std::move(*this);
}

Rule Rule::when(Condition condition, GatheredRule instead) && {
  exception_ = condition;
  instead_ = instead;
  return std::move(*this);
}

Rule Rule::refuses(Condition bad) && {
  refused_ = bad;
  return std::move(*this);
}

// --- RuleTable -----------------------------------------------------------------------------------

void RuleTable::add(std::string_view name, Rule rule) {
  const bool inserted = rules_.emplace(name, std::move(rule)).second;
  if (!inserted)
    throw Error(absl::AlreadyExistsError(absl::StrCat("two rules for ", std::string(name))));
}

void RuleTable::add(std::initializer_list<std::string_view> names, const Rule& rule) {
  for (std::string_view name : names) add(name, rule);
}

const Rule* RuleTable::find(const c10::OperatorName& op) const {
  auto lookup = [this](const std::string& name) -> const Rule* {
    auto it = rules_.find(name);
    return it == rules_.end() ? nullptr : &it->second;
  };
  auto by_overload = [&](const std::string& name) -> const Rule* {
    std::string overload = op.overload_name;
    if (!overload.empty()) {
      if (const Rule* rule = lookup(absl::StrCat(name, ".", overload))) return rule;
    }
    if (overload.ends_with("_out")) {
      overload.resize(overload.size() - 4);
      if (const Rule* rule = lookup(absl::StrCat(name, ".", overload))) return rule;
    }
    return lookup(name);
  };
  if (const Rule* rule = by_overload(op.name)) return rule;
  // The functional form of an in-place operator: "aten::add_" -> "aten::add".
  if (op.name.ends_with("_") && !op.name.ends_with("__")) {
    return by_overload(op.name.substr(0, op.name.size() - 1));
  }
  return nullptr;
}

std::vector<std::string> RuleTable::names() const {
  std::vector<std::string> names;
  for (const auto& [name, rule] : rules_) names.push_back(name);
  std::sort(names.begin(), names.end());
  return names;
}

const RuleTable& RuleTable::builtin() {
  static const RuleTable* const table = [] {
    auto* t = new RuleTable;
    for (auto* add_rules : kRuleFamilies) add_rules(*t);
    return t;
  }();
  return *table;
}

void add_rule(const std::shared_ptr<ConnectedMesh>& mesh, std::string_view name, Rule rule) {
  const size_t colons = name.find("::");
  if (colons == 0 || colons == std::string_view::npos || colons + 2 == name.size()) {
    throw Error(absl::InvalidArgumentError(
        absl::StrCat("add_rule: '", std::string(name),
                     "' is no operator's name; wanted one such as \"mylib::swiglu\"")));
  }
  const auto context = MeshContext::of(mesh);
  if (context->operator_under_way()) {
    throw Error("add_rule", absl::FailedPreconditionError(absl::StrCat(
                                "'", std::string(name),
                                "': an operator on DTensors of the mesh is running; add rules "
                                "before or between operators")));
  }
  context->decisions.add_rule(name, std::move(rule));
}

// --- rule makers ---------------------------------------------------------------------------------

double dtensor_internal::einsum_flops(const OpCall& call, const std::vector<std::string>& operands,
                                      int first) {
  double flops = 2;
  std::string seen;
  for (size_t i = 0; i < operands.size(); ++i) {
    const Dims& sizes = call.input(first + static_cast<int>(i)).sizes;
    for (size_t d = 0; d < std::min(operands[i].size(), sizes.size()); ++d) {
      if (seen.find(operands[i][d]) != std::string::npos) continue;
      seen += operands[i][d];
      flops *= static_cast<double>(sizes[d]);
    }
  }
  return flops;
}

ShardedRule replicated() {
  return sharded([](const OpCall&, Strategies&) {});
}

ShardedRule einsum(std::string_view equation, bool linear) {
  const std::vector<std::string> sides = absl::StrSplit(std::string(equation), "->");
  const std::vector<std::string> operands = absl::StrSplit(sides.at(0), ',');
  const std::string output = sides.at(1);
  std::string letters;
  for (const std::string& operand : operands) {
    for (char c : operand) {
      if (letters.find(c) == std::string::npos) letters += c;
    }
  }
  std::vector<Strategy> strategies;
  for (char letter : letters) {
    Strategy s;
    const size_t at = output.find(letter);
    const bool summed = at == std::string::npos;
    for (const std::string& operand : operands) {
      const size_t dim = operand.find(letter);
      s.inputs.push_back(dim == std::string::npos ? Replicate() : Shard(static_cast<int>(dim)));
    }
    s.outputs.push_back(summed ? Partial(ReduceOp::kSum) : Shard(static_cast<int>(at)));
    strategies.push_back(std::move(s));
  }
  if (linear) {
    for (ReduceOp op : kLinearOps) {
      for (size_t i = 0; i < operands.size(); ++i) {
        Strategy s;
        s.inputs.assign(operands.size(), Replicate());
        s.inputs[i] = Partial(op);
        s.outputs.push_back(Partial(op));
        strategies.push_back(std::move(s));
      }
    }
  }
  return sharded([strategies = std::move(strategies)](const OpCall&, Strategies& out) {
           for (const Strategy& s : strategies) out.list().push_back(s);
         })
      .flops([operands](const OpCall& call) { return einsum_flops(call, operands, 0); });
}

ShardedRule pointwise(Linearity linearity) {
  return sharded([linearity](const OpCall& call, Strategies& out) {
           const Dims& shape = call.output().sizes;
           for (int d = 0; d < call.output().ndim(); ++d) {
             out.add(broadcast_cuts(call, shape, d), {Shard(d)});
           }
           // Partial operands pass through where the operator is linear in them.
           const int n = call.num_inputs();
           auto only = [&](int i, Placement p) {
             std::vector<Placement> inputs(n, Replicate());
             inputs[i] = p;
             out.add(std::move(inputs), {p});
           };
           switch (linearity) {
             case Linearity::kNone:
               break;
             case Linearity::kIdentity:
               pass_partials(call, out, kAllReduceOps);
               break;
             case Linearity::kAdditive:
               pass_partials(call, out, kLinearOps);
               break;
             case Linearity::kMultilinear:
               for (ReduceOp op : kLinearOps) {
                 for (int i = 0; i < n; ++i) only(i, Partial(op));
               }
               break;
             case Linearity::kFirst:
               for (ReduceOp op : kLinearOps) only(0, Partial(op));
               break;
           }
         })
      .shapes_without_meta([](OpCall& call) { call.outputs.push_back(broadcast_info(call)); });
}

}  // namespace shardweave
