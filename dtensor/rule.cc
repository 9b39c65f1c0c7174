#include "shardweave/dtensor/rule.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
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

// --- OpCall --------------------------------------------------------------------------------------

Placement OpCall::placement(int i) const {
  return inputs[i].spec == nullptr ? Replicate() : inputs[i].spec->layout[mesh_dim];
}

int OpCall::arg_index(std::string_view name) const {
  const auto& arguments = op->schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == name) return static_cast<int>(i);
  }
  return -1;
}

const c10::IValue& OpCall::arg(std::string_view name) const {
  const int index = arg_index(name);
  if (index < 0) {
    throw Error(absl::InternalError(absl::StrCat("the rule of ", c10::toString(op->operator_name()),
                                                 " asks for the argument '", std::string(name),
                                                 "', which the operator does not have")));
  }
  return args[index];
}

int64_t OpCall::int_arg(std::string_view name) const {
  return arg(name).toInt();
}

bool OpCall::bool_arg(std::string_view name) const {
  return arg(name).toBool();
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

int64_t OpCall::cuts(int i, int dim) const {
  const SpecRef& spec = inputs[i].spec;
  if (spec == nullptr) return 1;
  int64_t pieces = 1;
  for (int m : spec->layout.shards_of(dim)) pieces *= spec->context->mesh().size(m);
  return pieces;
}

absl::InlinedVector<int64_t, 4> OpCall::sizes_so_far(int i, int dim) const {
  absl::InlinedVector<int64_t, 4> sizes = {inputs[i].sizes[dim]};
  const SpecRef& spec = inputs[i].spec;
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

int64_t OpCall::pieces(int i, int dim) const {
  int64_t pieces = num_ranks;
  const SpecRef& spec = inputs[i].spec;
  if (spec == nullptr) return pieces;
  for (int m : order) {
    if (m == mesh_dim) break;
    if (spec->layout[m].is_shard(dim)) pieces *= spec->context->mesh().size(m);
  }
  return pieces;
}

bool OpCall::may_be_empty(int i, int dim) const {
  // With the unusual cuts that inputs have, which the engine tries wherever they fit: do not
  // reason, be safe.
  for (int k = 0; k < num_inputs(); ++k) {
    const Placement p = placement(k);
    if (!p.is_shard() || p.is_plain_shard()) continue;
    if (inputs[k].sizes[p.dim()] == inputs[i].sizes[dim]) return true;
  }
  for (int64_t size : sizes_so_far(i, dim)) {
    if (chunk(size, num_ranks, num_ranks - 1).size() == 0) return true;
  }
  return false;
}

// --- Rule ----------------------------------------------------------------------------------------

Rule Rule::composed(Composite run) {
  Rule rule;
  rule.composite = run;
  return rule;
}

Rule Rule::composed_when(Condition condition, Composite run) && {
  composite = run;
  composite_condition = condition;
  return std::move(*this);
}

Rule Rule::gathered() {
  return Rule().gathered_when(
      [](const c10::OperatorHandle&, absl::Span<const c10::IValue>) { return true; });
}

Rule Rule::gathered_when(Condition condition) && {
  gathers = condition;
  return std::move(*this);
}

Rule Rule::refuses(Condition bad) && {
  refused = bad;
  return std::move(*this);
}

Rule Rule::per_element() && {
  each_element = true;
  return std::move(*this);
}

Rule Rule::size_arg(std::string_view name) && {
  size_args.emplace_back(name);
  return std::move(*this);
}

Rule Rule::shapes(ShapeFunction f) && {
  shape_function = std::move(f);
  return std::move(*this);
}

Rule Rule::shapes_without_meta(ShapeFunction f) && {
  shape_function_without_meta = std::move(f);
  return std::move(*this);
}

Rule Rule::shapes_like(std::vector<int> inputs) && {
  shape_function = [inputs = std::move(inputs)](OpCall& call) {
    for (int i : inputs) {
      TensorInfo info = call.inputs[i];
      info.spec = nullptr;
      call.outputs.push_back(std::move(info));
    }
  };
  return std::move(*this);
}

Rule Rule::reads(std::vector<std::string> names) && {
  read_args = std::move(names);
  return std::move(*this);
}

Rule Rule::chunks_only() && {
  only_chunks = true;
  return std::move(*this);
}

Rule Rule::flops(Flops f) && {
  count_flops = std::move(f);
  return std::move(*this);
}

Rule Rule::runs(LocalKernel local) && {
  kernel = local;
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
    add_pointwise_rules(*t);
    add_matmul_rules(*t);
    add_optimizer_rules(*t);
    add_reduction_rules(*t);
    add_softmax_rules(*t);
    add_norm_rules(*t);
    add_convolution_rules(*t);
    add_embedding_rules(*t);
    add_attention_rules(*t);
    add_loss_rules(*t);
    add_view_rules(*t);
    add_data_movement_rules(*t);
    add_indexing_rules(*t);
    add_random_rules(*t);
    add_distribution_rules(*t);
    add_spatial_rules(*t);
    add_linear_algebra_rules(*t);
    add_factorization_rules(*t);
    add_distance_rules(*t);
    add_diagonal_rules(*t);
    add_histogram_rules(*t);
    add_recurrent_rules(*t);
    add_segment_rules(*t);
    add_margin_loss_rules(*t);
    add_data_dependent_rules(*t);
    add_range_rules(*t);
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

Rule einsum(std::string_view equation, bool linear) {
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
    for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg}) {
      for (size_t i = 0; i < operands.size(); ++i) {
        Strategy s;
        s.inputs.assign(operands.size(), Replicate());
        s.inputs[i] = Partial(op);
        s.outputs.push_back(Partial(op));
        strategies.push_back(std::move(s));
      }
    }
  }
  return Rule([strategies = std::move(strategies)](const OpCall&, Strategies& out) {
           for (const Strategy& s : strategies) out.list().push_back(s);
         })
      .flops([operands](const OpCall& call) { return einsum_flops(call, operands, 0); });
}

Rule pointwise(Linearity linearity) {
  return Rule([linearity](const OpCall& call, Strategies& out) {
           const int ndim = call.output().ndim();
           const int n = call.num_inputs();
           for (int d = 0; d < ndim; ++d) {
             std::vector<Placement> inputs(n);
             for (int i = 0; i < n; ++i) {
               const TensorInfo& input = call.input(i);
               const int dim = d - (ndim - input.ndim());
               const bool broadcast = !input.defined || dim < 0 ||
                                      (input.sizes[dim] == 1 && call.output().sizes[d] != 1);
               inputs[i] = broadcast ? Replicate() : Shard(dim);
             }
             out.add(std::move(inputs), {Shard(d)});
           }
           // Partial operands pass through where the operator is linear in them.
           auto all = [&](Placement p) { out.add(std::vector<Placement>(n, p), {p}); };
           auto only = [&](int i, Placement p) {
             std::vector<Placement> inputs(n, Replicate());
             inputs[i] = p;
             out.add(std::move(inputs), {p});
           };
           constexpr ReduceOp kLinear[] = {ReduceOp::kSum, ReduceOp::kAvg};
           switch (linearity) {
             case Linearity::kNone:
               break;
             case Linearity::kIdentity:
               for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin, ReduceOp::kMax,
                                   ReduceOp::kProduct}) {
                 all(Partial(op));
               }
               break;
             case Linearity::kAdditive:
               for (ReduceOp op : kLinear) all(Partial(op));
               break;
             case Linearity::kMultilinear:
               for (ReduceOp op : kLinear) {
                 for (int i = 0; i < n; ++i) only(i, Partial(op));
               }
               break;
             case Linearity::kFirst:
               for (ReduceOp op : kLinear) only(0, Partial(op));
               break;
           }
         })
      .shapes_without_meta([](OpCall& call) {
        std::vector<int> inputs(call.num_inputs());
        std::iota(inputs.begin(), inputs.end(), 0);
        call.outputs.push_back(broadcast_info(call, inputs));
      });
}

}  // namespace shardweave
