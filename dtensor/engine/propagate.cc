#include "shardweave/dtensor/engine/propagate.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "shardweave/dtensor/rules/common.h"

namespace shardweave::dtensor_internal {
namespace {

bool is_unusual(const Placement& p) {
  return p.is_shard() && !p.is_plain_shard();
}
bool any_unusual(absl::Span<const Placement> placements) {
  return std::any_of(placements.begin(), placements.end(), is_unusual);
}

// Calls f(placement) for where an input lies along mesh dimension `m`, and for where it is remembered
// to have been brought.
template <typename F>
void for_each_place(const TensorInfo& input, int m, F f) {
  if (input.spec != nullptr) f(input.spec->layout[m]);
  if (input.remembered != nullptr) f(input.remembered->layout[m]);
}

// What rules say of Shard(d) holds for any subset of the indices of d, unless they are chunks_only:
// offer each strategy again with the strided or ragged cuts that the inputs have. A strategy that
// names such a shard itself means that one.
void add_unusual_shards(const OpCall& call, Strategies& strategies) {
  const size_t count = strategies.list().size();
  std::vector<Placement> seen;
  const auto add = [&](int i, const Placement& current) {
    if (!is_unusual(current)) return;
    if (std::find(seen.begin(), seen.end(), current) != seen.end()) return;
    seen.push_back(current);
    for (size_t s = 0; s < count; ++s) {
      const Strategy& plain = strategies.list()[s];
      if (!plain.inputs[i].is_shard(current.dim())) continue;
      if (any_unusual(plain.inputs) || any_unusual(plain.outputs)) continue;
      Strategy variant = plain;
      bool fits = true;
      const int64_t size = call.input(i).sizes[current.dim()];
      auto replace = [&](std::vector<Placement>& placements, const std::vector<TensorInfo>& infos) {
        for (size_t k = 0; k < placements.size(); ++k) {
          if (!infos[k].defined || !placements[k].is_plain_shard()) continue;
          fits &= infos[k].sizes[placements[k].dim()] == size;
          placements[k] = current.with_dim(placements[k].dim());
        }
      };
      replace(variant.inputs, call.inputs);
      replace(variant.outputs, call.outputs);
      if (!variant.then.empty()) variant.then = variant.outputs;
      if (fits) strategies.list().push_back(std::move(variant));
    }
  };
  for (int i = 0; i < call.num_inputs(); ++i) {
    for_each_place(call.input(i), call.mesh_dim, [&](const Placement& p) { add(i, p); });
  }
}

[[noreturn]] void nonsense(const OpCall& call, const std::string& what) {
  throw Error(absl::InternalError(
      absl::StrCat("the sharding rule of ", c10::toString(call.op->operator_name()), " ", what)));
}

void check_dims(const OpCall& call, absl::Span<const Placement> placements,
                const std::vector<TensorInfo>& infos, const char* side) {
  for (size_t i = 0; i < placements.size(); ++i) {
    const Placement& p = placements[i];
    if (p.is_shard() && infos[i].defined && (p.dim() < 0 || p.dim() >= infos[i].ndim())) {
      nonsense(call, absl::StrCat("shards ", side, " ", i, " with ", infos[i].ndim(),
                                  " dimensions as ", p.to_string()));
    }
  }
}

void check(const OpCall& call, Strategy& s) {
  if (static_cast<int>(s.inputs.size()) != call.num_inputs()) {
    nonsense(call, absl::StrCat("gives ", s.inputs.size(), " input placements for ",
                                call.num_inputs(), " inputs"));
  }
  if (s.outputs.size() == 1 && call.num_outputs() != 1) {
    s.outputs.assign(call.num_outputs(), Placement(s.outputs[0]));
  }
  if (static_cast<int>(s.outputs.size()) != call.num_outputs()) {
    nonsense(call, absl::StrCat("gives ", s.outputs.size(), " output placements for ",
                                call.num_outputs(), " outputs"));
  }
  if (!s.then.empty() && s.then.size() != s.outputs.size()) {
    nonsense(call, absl::StrCat("brings ", s.then.size(), " of ", s.outputs.size(), " outputs"));
  }
  check_dims(call, s.inputs, call.inputs, "input");
  check_dims(call, s.then, call.outputs, "output");
  check_dims(call, s.outputs, call.outputs, "output");
}

// Rules speak of numbers as such. Whether a Partial may pass as they say depends on its type, too: the
// operator may cast it, and an average of integers is rounded. What a product of input i passes
// computes nothing of it, so that such an average may, as long as it is one of integers.
bool types_allow(const OpCall& call, const Strategy& s, absl::Span<const bool> product_passes) {
  for (size_t i = 0; i < s.inputs.size(); ++i) {
    const TensorInfo& input = call.inputs[i];
    if (!input.defined || !s.inputs[i].is_partial()) continue;
    const ReduceOp op = s.inputs[i].reduce_op();
    const bool rounds =
        op == ReduceOp::kAvg && c10::isIntegralType(input.dtype, /*includeBool=*/true);
    if (rounds && !product_passes[i]) return false;
    for (size_t k = 0; k < s.outputs.size(); ++k) {
      const TensorInfo& output = call.outputs[k];
      if (!output.defined || !s.outputs[k].is_partial()) continue;
      if (rounds && input.dtype != output.dtype) return false;
      if (!cast_commutes(op, input.dtype, output.dtype)) return false;
    }
  }
  return true;
}

void leave_out_what_types_forbid(const OpCall& call, std::vector<Strategy>& list) {
  absl::InlinedVector<bool, 8> product_passes(call.num_inputs(), false);
  for (const Strategy& s : list) {
    for (size_t i = 0; i < s.inputs.size(); ++i) {
      product_passes[i] |= s.inputs[i].is_partial(ReduceOp::kProduct);
    }
  }
  list.erase(
      std::remove_if(list.begin(), list.end(),
                     [&](const Strategy& s) { return !types_allow(call, s, product_passes); }),
      list.end());
}

// What strategies_of() says, in `strategies`.
void offer(const OpCall& call, const ShardedRule& rule, Strategies& strategies) {
  strategies.list().clear();
  strategies.add(std::vector<Placement>(call.num_inputs()),
                 std::vector<Placement>(call.num_outputs()));
  try {
    rule(call, strategies);
  } catch (const c10::Error&) {
    throw;  // of the arguments, in words for the user
  } catch (const std::exception& error) {
    nonsense(call, absl::StrCat("throws: ", error.what()));
  }
  for (Strategy& s : strategies.list()) check(call, s);
  leave_out_what_types_forbid(call, strategies.list());
  if (!rule.options().chunks_only) add_unusual_shards(call, strategies);
}

// The order in which mesh dimensions cut the tensors of a call.
class CutOrder {
 public:
  // One for all tensors: that of the first input with an unusual one.
  explicit CutOrder(const OpCall& call, int mesh_ndim) {
    for (int m = 0; m < mesh_ndim; ++m) order_.push_back(m);
    for (const TensorInfo& input : call.inputs) {
      if (input.spec == nullptr || input.spec->layout.default_order()) continue;
      order_ = input.spec->layout.order();
      is_default_ = false;
      break;
    }
  }

  // Another one that means the same for the inputs.
  void change(std::vector<int> order) {
    order_ = std::move(order);
    is_default_ = std::is_sorted(order_.begin(), order_.end());
  }

  const std::vector<int>& order() const { return order_; }
  Layout layout(Placements placements) const {
    if (is_default_) return Layout(std::move(placements));
    return value_or_throw(Layout::create(std::move(placements), order_));
  }
  // The same placements in this order.
  bool has(const Layout& layout) const {
    return is_default_ ? layout.default_order() : this->layout(layout.placements()) == layout;
  }

 private:
  std::vector<int> order_;
  bool is_default_ = true;
};

// Whether the layout fits the sizes. Dimensions have been checked: only unusual shards may not.
bool fits_sizes(const MeshContext& context, const Layout& layout, const Dims& sizes) {
  return !any_unusual(layout.placements()) || validate(layout, context.mesh().shape(), sizes).ok();
}

// The strategies of one mesh dimension, and what speaks for and against each.
class StrategyChoice {
 public:
  // `kernel`, `outputs`: what the mesh dimensions before this one have decided; of the inputs their
  // specs say so.
  StrategyChoice(const MeshContext& context, const OpCall& call, const CutOrder& order,
                 std::optional<int> written_input, LocalKernel kernel,
                 const std::vector<Placements>& outputs, double flops,
                 const std::vector<Strategy>& strategies, bool any_sharded)
      : context_(context),
        call_(call),
        order_(order),
        kernel_(kernel),
        outputs_(outputs),
        strategies_(strategies),
        any_sharded_(any_sharded),
        weigher_(call, context.mesh().shape(), context.decisions.cost_model(), flops, outputs,
                 written_input) {}

  // Why a strategy is not possible; "": it is.
  std::string_view obstacle(const Strategy& s) const {
    if (replaces_kernel(s)) {
      return "another mesh dimension has replaced the local operator by another kernel";
    }
    if (!ragged_cuts_fit(s)) {
      return "its ragged cut does not fit what other mesh dimensions have cut";
    }
    if (starts_to_cut(s)) {
      return "nothing is sharded over this mesh dimension so far, and users decide where to start";
    }
    return "";
  }

  // The first of the cheapest.
  size_t choose() const {
    // What moves nothing is mostly it. By its cost others need not be worked out to the end.
    const size_t likely = first_that_moves_nothing();
    size_t best = likely;
    std::optional<StrategyCost> least;
    if (likely < strategies_.size()) least = weigher_.cost(strategies_[likely]);
    for (size_t i = 0; i < strategies_.size(); ++i) {
      const Strategy& s = strategies_[i];
      if (i == likely || replaces_kernel(s) || starts_to_cut(s)) continue;
      const std::optional<StrategyCost> c =
          least.has_value() ? weigher_.cost_below(*least, /*or_equal=*/i < best, s)
                            : weigher_.cost(s);
      if (!c.has_value() || !ragged_cuts_fit(s)) continue;
      best = i;
      least = c;
    }
    return best;
  }

  WeighedDim weighed(size_t chosen) const {
    WeighedDim dim{call_.mesh_dim, {}, {}, chosen};
    for (const TensorInfo& input : call_.inputs) dim.inputs.push_back(input.spec);
    for (const Strategy& s : strategies_) {
      dim.options.push_back({s, weigher_.cost(s), obstacle(s)});
    }
    return dim;
  }

 private:
  bool replaces_kernel(const Strategy& s) const {
    return kernel_ != nullptr && s.kernel != nullptr && kernel_ != s.kernel;
  }

  // Of those that are possible; as many as there are: none.
  size_t first_that_moves_nothing() const {
    size_t i = 0;
    while (i < strategies_.size() &&
           !(weigher_.moves_nothing(strategies_[i]) && obstacle(strategies_[i]).empty())) {
      ++i;
    }
    return i;
  }

  bool starts_to_cut(const Strategy& s) const {
    if (any_sharded_) return false;
    for (size_t i = 0; i < s.inputs.size(); ++i) {
      if (s.inputs[i].is_shard() && call_.inputs[i].defined) return true;
    }
    return false;
  }

  // The sizes of a ragged cut depend on the outer cuts of the same dimension: those of one input
  // need not fit what has been decided for another tensor.
  bool ragged_cuts_fit(const Strategy& s) const {
    for (size_t i = 0; i < s.inputs.size(); ++i) {
      const TensorInfo& info = call_.inputs[i];
      if (!info.defined || s.inputs[i].kind() != PlacementKind::kRaggedShard) continue;
      Placements decided(context_.mesh().ndim());
      for (const int m : order_.order()) {
        if (m == call_.mesh_dim || info.spec == nullptr) break;
        decided[m] = info.spec->layout[m];
      }
      if (!fits(s.inputs[i], std::move(decided), info)) return false;
    }
    for (const absl::Span<const Placement> placements :
         {absl::MakeConstSpan(s.outputs), absl::MakeConstSpan(s.then)}) {
      for (size_t k = 0; k < placements.size(); ++k) {
        const TensorInfo& info = call_.outputs[k];
        if (!info.defined || placements[k].kind() != PlacementKind::kRaggedShard) continue;
        if (!fits(placements[k], outputs_[k], info)) return false;
      }
    }
    return true;
  }
  // `decided`: Replicate where a mesh dimension's choice is still to come.
  bool fits(const Placement& placement, Placements decided, const TensorInfo& info) const {
    decided[call_.mesh_dim] = placement;
    return fits_sizes(context_, order_.layout(std::move(decided)), info.sizes);
  }

  const MeshContext& context_;
  const OpCall& call_;
  const CutOrder& order_;
  const LocalKernel kernel_;
  const std::vector<Placements>& outputs_;
  const std::vector<Strategy>& strategies_;
  const bool any_sharded_;
  const StrategyWeigher weigher_;
};

// A tensor half way through the decision: what is decided, and what it has along the mesh dimensions
// that are still to come, except ragged cuts that do not fit the outer cuts any more. (In the order
// of the call: the tensor's own may be another, in which the decided ragged cuts do not fit.)
SpecRef half_way(MeshContext& context, const Spec& spec, int mesh_dim, const Placement& placement,
                 const CutOrder& order, absl::Span<const int> still_to_come) {
  Placements placements = spec.layout.placements();
  placements[mesh_dim] = placement;
  Layout layout = order.layout(std::move(placements));
  if (!fits_sizes(context, layout, spec.sizes)) {
    placements = layout.placements();
    for (int m : still_to_come) {
      if (placements[m].kind() == PlacementKind::kRaggedShard) placements[m] = Replicate();
    }
    layout = order.layout(std::move(placements));
  }
  return context.with_layout(spec, layout);
}

// Inputs on the way from where they lie to where they have to be.
class InputsUnderWay {
 public:
  InputsUnderWay(MeshContext& context, OpCall& call, const CutOrder& order)
      : context_(context), call_(call), order_(order), given_(call.num_inputs()) {}
  // An error leaves the call as it was, too.
  ~InputsUnderWay() {
    for (size_t i = 0; i < given_.size(); ++i) {
      if (given_[i] != nullptr) call_.inputs[i].spec = std::move(given_[i]);
    }
    call_.order = {};
  }
  InputsUnderWay(const InputsUnderWay&) = delete;
  InputsUnderWay& operator=(const InputsUnderWay&) = delete;

  // `inputs`: what is decided along call.mesh_dim.
  void move(absl::Span<const Placement> inputs, absl::Span<const int> still_to_come) {
    for (int i = 0; i < call_.num_inputs(); ++i) {
      TensorInfo& info = call_.inputs[i];
      if (!info.defined) continue;
      if (info.spec == nullptr) {
        if (!inputs[i].is_replicate()) plain(i)[call_.mesh_dim] = inputs[i];
        continue;
      }
      if (info.spec->layout[call_.mesh_dim] == inputs[i]) continue;
      SpecRef next =
          half_way(context_, *info.spec, call_.mesh_dim, inputs[i], order_, still_to_come);
      std::swap(info.spec, next);
      if (given_[i] == nullptr) given_[i] = std::move(next);
    }
  }

  // Where they are now, with every mesh dimension decided.
  std::vector<SpecRef> specs() {
    std::vector<SpecRef> specs;
    specs.reserve(given_.size());
    c10::Device device = at::kCPU;
    for (size_t i = 0; i < given_.size(); ++i) {
      const SpecRef& now = call_.inputs[i].spec;
      specs.push_back(now);
      if (now == nullptr) continue;
      device = now->device;
      const Spec& given = given_[i] == nullptr ? *now : *given_[i];
      // A ragged cut that did not fit for a while has lost where it comes from.
      if (order_.has(now->layout) && now->origins == of_cuts(given.origins, now->layout)) continue;
      specs.back() = context_.with_layout(given, order_.layout(now->layout.placements()));
    }
    for (size_t i = 0; i < plain_.size(); ++i) {
      if (plain_[i].empty()) continue;
      const TensorInfo& info = call_.inputs[i];
      specs[i] = context_.intern(order_.layout(std::move(plain_[i])), info.sizes, info.strides,
                                 info.dtype, device);
    }
    return specs;
  }

 private:
  Placements& plain(int i) {
    plain_.resize(given_.size());
    if (plain_[i].empty()) plain_[i].resize(context_.mesh().ndim());
    return plain_[i];
  }

  MeshContext& context_;
  OpCall& call_;
  const CutOrder& order_;
  absl::InlinedVector<SpecRef, 4> given_;  // of those that have moved
  std::vector<Placements> plain_;          // of plain numbers, if any does not stay one
};

}  // namespace

std::vector<Strategy> strategies_of(const OpCall& call, const ShardedRule& rule) {
  Strategies strategies(call);
  offer(call, rule, strategies);
  return std::move(strategies.list());
}

Decision propagate(MeshContext& context, OpCall& call, const ShardedRule& rule,
                   std::optional<int> written_input, Weighed* weighed) {
  const int ndim = context.mesh().ndim();
  const int outputs = call.num_outputs();
  CutOrder cut_order(call, ndim);
  call.order = cut_order.order();
  if (ndim > 1 && rule.options().cut_order) cut_order.change(rule.options().cut_order(call));
  const absl::Span<const int> order = cut_order.order();
  call.order = order;
  for (const std::string& name : rule.options().only_shape_of) {
    call.inputs[call.input_index(name)].only_shape = true;
  }
  const double flops = rule.options().flops ? rule.options().flops(call) : 0;
  InputsUnderWay inputs(context, call, cut_order);
  std::vector<Placements> output_placements(outputs, Placements(ndim));
  std::vector<Placements> result_placements;  // if any is brought elsewhere
  Strategies strategies(call);
  strategies.list().reserve(10);  // most rules offer no more
  Decision decision;
  // Outer cuts first, and each with the decisions before it applied: a rule that looks at the other
  // mesh dimensions' cuts (views do) sees what will really be there.
  for (int t = 0; t < ndim; ++t) {
    const int m = order[t];
    call.mesh_dim = m;
    call.num_ranks = context.mesh().size(m);
    bool any_sharded = false;
    for (const TensorInfo& input : call.inputs) {
      for_each_place(input, m, [&](const Placement& p) { any_sharded |= p.is_shard(); });
    }
    offer(call, rule, strategies);
    const StrategyChoice choice(context, call, cut_order, written_input, decision.kernel,
                                output_placements, flops, strategies.list(), any_sharded);
    const size_t chosen = choice.choose();
    if (weighed != nullptr) weighed->push_back(choice.weighed(chosen));
    const Strategy& s = strategies.list()[chosen];
    if (s.kernel != nullptr) decision.kernel = s.kernel;
    inputs.move(s.inputs, order.subspan(t + 1));
    if (!s.then.empty() && result_placements.empty()) result_placements = output_placements;
    for (int k = 0; k < outputs; ++k) {
      output_placements[k][m] = s.outputs[k];
      if (!result_placements.empty()) result_placements[k][m] = s.result(k);
    }
  }
  if (decision.kernel == nullptr) decision.kernel = rule.options().kernel;
  decision.inputs = inputs.specs();
  const auto make_layouts = [&](std::vector<Placements>& placements, std::vector<Layout>& layouts) {
    layouts.reserve(placements.size());
    for (size_t k = 0; k < placements.size(); ++k) {
      const TensorInfo& output = call.outputs[k];
      if (!output.defined) {
        layouts.emplace_back();
        continue;
      }
      layouts.push_back(cut_order.layout(std::move(placements[k])));
      if (!any_unusual(layouts.back().placements())) continue;
      const absl::Status status = validate(layouts.back(), context.mesh().shape(), output.sizes);
      if (status.ok()) continue;
      nonsense(call, absl::StrCat("gives output ", k, " the layout ", layouts.back().to_string(),
                                  ": ", status.message()));
    }
  };
  make_layouts(output_placements, decision.outputs);
  make_layouts(result_placements, decision.results);
  return decision;
}

Decision propagate_elements(MeshContext& context, const OpCall& call, const ShardedRule& rule) {
  const int count = call.input_element.empty() ? 0
                                               : 1 + *std::max_element(call.input_element.begin(),
                                                                       call.input_element.end());
  const c10::AliasInfo* alias = call.op->schema().arguments()[0].alias_info();
  const bool in_place = alias != nullptr && alias->isWrite();
  Decision decision;
  decision.inputs.resize(call.num_inputs());
  std::vector<std::vector<int>> members(count);  // flat inputs, in their order
  for (int i = 0; i < call.num_inputs(); ++i) {
    if (call.input_element[i] >= 0) {
      members[call.input_element[i]].push_back(i);
    } else {
      for (std::vector<int>& of_element : members) of_element.push_back(i);
    }
    if (count == 0 && call.input(i).spec != nullptr) {
      decision.inputs[i] =
          context.with_layout(*call.input(i).spec, Layout(Placements(context.mesh().ndim())));
    }
  }
  OpCall frame = call;  // without the lists, which are long
  frame.inputs.clear();
  frame.outputs.clear();
  frame.input_arg.clear();
  frame.input_element.clear();
  for (int e = 0; e < count; ++e) {
    OpCall one = frame;
    for (const int i : members[e]) {
      one.inputs.push_back(call.inputs[i]);
      one.input_arg.push_back(call.input_arg[i]);
      one.input_element.push_back(call.input_element[i]);
    }
    if (!call.outputs.empty()) one.outputs = {call.outputs[e]};
    Decision d = propagate(context, one, rule, in_place ? std::optional<int>(0) : std::nullopt);
    for (size_t k = 0; k < members[e].size(); ++k)
      decision.inputs[members[e][k]] = std::move(d.inputs[k]);
    const std::vector<Layout>& results = d.results.empty() ? d.outputs : d.results;
    decision.results.insert(decision.results.end(), results.begin(), results.end());
    for (Layout& layout : d.outputs) decision.outputs.push_back(std::move(layout));
  }
  return decision;
}

}  // namespace shardweave::dtensor_internal
