#include "shardweave/dtensor/engine/propagate.h"

#include <algorithm>
#include <optional>

#include "absl/strings/str_cat.h"

namespace shardweave::dtensor_internal {
namespace {

// A strategy that names a strided or ragged shard means that one.
bool names_unusual_shard(const Strategy& s) {
  const auto is_unusual = [](const Placement& p) { return p.is_shard() && !p.is_plain_shard(); };
  return std::any_of(s.inputs.begin(), s.inputs.end(), is_unusual) ||
         std::any_of(s.outputs.begin(), s.outputs.end(), is_unusual);
}

// What rules say of Shard(d) holds for any subset of the indices of d, unless they are chunks_only:
// offer each strategy again with the strided or ragged cuts that the inputs have.
void add_unusual_shards(const OpCall& call, std::vector<Strategy>& strategies) {
  const size_t count = strategies.size();
  std::vector<Placement> seen;
  for (int i = 0; i < call.num_inputs(); ++i) {
    const Placement current = call.placement(i);
    if (!current.is_shard() || current.is_plain_shard()) continue;
    if (std::find(seen.begin(), seen.end(), current) != seen.end()) continue;
    seen.push_back(current);
    for (size_t s = 0; s < count; ++s) {
      Strategy variant = strategies[s];
      if (!variant.inputs[i].is_shard(current.dim()) || names_unusual_shard(variant)) continue;
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
      if (fits) strategies.push_back(std::move(variant));
    }
  }
}

[[noreturn]] void nonsense(const OpCall& call, const std::string& what) {
  throw Error(absl::InternalError(
      absl::StrCat("the sharding rule of ", c10::toString(call.op->operator_name()), " ", what)));
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
  auto check_dims = [&](const std::vector<Placement>& ps, const std::vector<TensorInfo>& infos,
                        const char* side) {
    for (size_t i = 0; i < ps.size(); ++i) {
      if (infos[i].defined && ps[i].is_shard() &&
          (ps[i].dim() < 0 || ps[i].dim() >= infos[i].ndim())) {
        nonsense(call, absl::StrCat("shards ", side, " ", i, " with ", infos[i].ndim(),
                                    " dimensions as ", ps[i].to_string()));
      }
    }
  };
  if (!s.then.empty() && s.then.size() != s.outputs.size()) {
    nonsense(call, absl::StrCat("brings ", s.then.size(), " of ", s.outputs.size(), " outputs"));
  }
  check_dims(s.inputs, call.inputs, "input");
  check_dims(s.then, call.outputs, "output");
  check_dims(s.outputs, call.outputs, "output");
}

// The sizes of a ragged cut depend on the outer cuts of the same dimension: those of one input need
// not fit what has been decided for another tensor. `decided`: Replicate where a mesh dimension's
// choice is still to come.
bool fits(const MeshContext& context, const OpCall& call, const std::vector<Placement>& placements,
          const std::vector<TensorInfo>& infos, const std::vector<Placements>& decided) {
  for (size_t i = 0; i < placements.size(); ++i) {
    if (!infos[i].defined || placements[i].kind() != PlacementKind::kRaggedShard) continue;
    Placements together = decided[i];
    together[call.mesh_dim] = placements[i];
    const Layout layout =
        value_or_throw(Layout::create(std::move(together), {call.order.begin(), call.order.end()}));
    if (!validate(layout, context.mesh().shape(), infos[i].sizes).ok()) return false;
  }
  return true;
}

// The strategies of one mesh dimension, and what speaks for and against each.
class StrategyChoice {
 public:
  // `kernel`, `inputs`, `outputs`: what the mesh dimensions before this one have decided.
  StrategyChoice(const MeshContext& context, const OpCall& call, const ShardedRule& rule,
                 std::optional<int> written_input, LocalKernel kernel,
                 const std::vector<Placements>& inputs, const std::vector<Placements>& outputs)
      : context_(context),
        call_(call),
        written_input_(written_input),
        kernel_(kernel),
        inputs_(inputs),
        outputs_(outputs),
        strategies_(strategies_of(call, rule)),
        flops_(rule.options().flops ? rule.options().flops(call) : 0) {
    for (int i = 0; i < call.num_inputs(); ++i) any_sharded_ |= call.placement(i).is_shard();
  }

  const std::vector<Strategy>& strategies() const { return strategies_; }

  // Why a strategy is not possible; "": it is.
  std::string_view obstacle(const Strategy& s) const {
    if (kernel_ != nullptr && s.kernel != nullptr && kernel_ != s.kernel) {
      return "another mesh dimension has replaced the local operator by another kernel";
    }
    if (!fits(context_, call_, s.inputs, call_.inputs, inputs_) ||
        !fits(context_, call_, s.outputs, call_.outputs, outputs_) ||
        !fits(context_, call_, s.then, call_.outputs, outputs_)) {
      return "its ragged cut does not fit what other mesh dimensions have cut";
    }
    bool shards = false;
    for (int i = 0; i < call_.num_inputs(); ++i) {
      shards |= call_.input(i).defined && s.inputs[i].is_shard();
    }
    if (shards && !any_sharded_) {
      return "nothing is sharded over this mesh dimension so far, and users decide where to start";
    }
    return "";
  }

  StrategyCost cost(const Strategy& s) const {
    return strategy_cost(call_, s, context_.decisions.cost_model(), flops_, outputs_,
                         written_input_);
  }

  // The first of the cheapest.
  size_t choose() const {
    size_t best = 0;
    std::optional<StrategyCost> least;
    for (size_t i = 0; i < strategies().size(); ++i) {
      if (!obstacle(strategies()[i]).empty()) continue;
      const StrategyCost c = cost(strategies()[i]);
      if (least.has_value() && !(c < *least)) continue;
      best = i;
      least = c;
    }
    return best;
  }

 private:
  const MeshContext& context_;
  const OpCall& call_;
  const std::optional<int> written_input_;
  const LocalKernel kernel_;
  const std::vector<Placements>& inputs_;
  const std::vector<Placements>& outputs_;
  const std::vector<Strategy> strategies_;
  const double flops_;
  bool any_sharded_ = false;
};

WeighedDim weighed_dim(const OpCall& call, const StrategyChoice& choice, size_t chosen) {
  WeighedDim dim{call.mesh_dim, {}, {}, chosen};
  for (const TensorInfo& input : call.inputs) dim.inputs.push_back(input.spec);
  for (const Strategy& s : choice.strategies()) {
    dim.options.push_back({s, choice.cost(s), choice.obstacle(s)});
  }
  return dim;
}

// A tensor half way through the decision: what is decided, and what it has along the other mesh
// dimensions, except ragged cuts that do not fit the outer cuts any more. `order` is that of the
// call: the tensor's own may be another, in which the decided ragged cuts do not fit.
SpecRef half_way(MeshContext& context, const Spec& spec, const Placements& decided,
                 const std::vector<int>& order, absl::Span<const int> still_to_come) {
  Placements placements = decided;
  for (int m : still_to_come) placements[m] = spec.layout[m];
  Layout layout = value_or_throw(Layout::create(placements, order));
  if (!validate(layout, context.mesh().shape(), spec.sizes).ok()) {
    for (int m : still_to_come) {
      if (placements[m].kind() == PlacementKind::kRaggedShard) placements[m] = Replicate();
    }
    layout = value_or_throw(Layout::create(std::move(placements), order));
  }
  return context.with_layout(spec, layout);
}

}  // namespace

std::vector<Strategy> strategies_of(const OpCall& call, const ShardedRule& rule) {
  Strategies offered(call);
  offered.add(std::vector<Placement>(call.num_inputs()),
              std::vector<Placement>(call.num_outputs()));
  try {
    rule(call, offered);
  } catch (const c10::Error&) {
    throw;  // of the arguments, in words for the user
  } catch (const std::exception& error) {
    nonsense(call, absl::StrCat("throws: ", error.what()));
  }
  std::vector<Strategy> strategies = std::move(offered.list());
  for (Strategy& s : strategies) check(call, s);
  if (!rule.options().chunks_only) add_unusual_shards(call, strategies);
  return strategies;
}

Decision propagate(MeshContext& context, OpCall call, const ShardedRule& rule,
                   std::optional<int> written_input, Weighed* weighed) {
  const int ndim = context.mesh().ndim();
  const int inputs = call.num_inputs();
  const int outputs = call.num_outputs();

  // One order of cuts for all tensors of the call: that of the first input with an unusual one.
  std::vector<int> order(ndim);
  for (int m = 0; m < ndim; ++m) order[m] = m;
  for (const TensorInfo& input : call.inputs) {
    if (input.spec != nullptr && !input.spec->layout.default_order()) {
      order = input.spec->layout.order();
      break;
    }
  }

  std::vector<Placements> input_placements(inputs, Placements(ndim));
  std::vector<Placements> output_placements(outputs, Placements(ndim));
  std::vector<Placements> result_placements(outputs, Placements(ndim));
  call.order = order;
  Decision decision;
  // Outer cuts first, and each with the decisions before it applied: a rule that looks at the other
  // mesh dimensions' cuts (views do) sees what will really be there.
  for (int t = 0; t < ndim; ++t) {
    const int m = order[t];
    call.mesh_dim = m;
    call.num_ranks = context.mesh().size(m);
    const StrategyChoice choice(context, call, rule, written_input, decision.kernel,
                                input_placements, output_placements);
    const size_t chosen = choice.choose();
    if (weighed != nullptr) weighed->push_back(weighed_dim(call, choice, chosen));
    const Strategy& s = choice.strategies()[chosen];
    if (s.kernel != nullptr) decision.kernel = s.kernel;
    for (int i = 0; i < inputs; ++i) {
      if (!call.input(i).defined) continue;
      input_placements[i][m] = s.inputs[i];
      const SpecRef spec = call.input(i).spec;
      if (spec == nullptr || spec->layout[m] == s.inputs[i]) continue;
      call.inputs[i].spec = half_way(context, *spec, input_placements[i], order,
                                     absl::MakeConstSpan(order).subspan(t + 1));
    }
    for (int k = 0; k < outputs; ++k) {
      output_placements[k][m] = s.outputs[k];
      result_placements[k][m] = s.result(k);
    }
  }
  if (decision.kernel == nullptr) decision.kernel = rule.options().kernel;
  for (auto& placements : input_placements) {
    decision.inputs.push_back(value_or_throw(Layout::create(std::move(placements), order)));
  }
  for (int k = 0; k < outputs; ++k) {
    for (auto [placements, layouts] : {std::pair{&output_placements, &decision.outputs},
                                       {&result_placements, &decision.results}}) {
      if (!call.output(k).defined) {
        layouts->emplace_back();
        continue;
      }
      Layout layout = value_or_throw(Layout::create(std::move((*placements)[k]), order));
      const absl::Status s = validate(layout, context.mesh().shape(), call.output(k).sizes);
      if (!s.ok()) {
        nonsense(call, absl::StrCat("gives output ", k, " the layout ", layout.to_string(), ": ",
                                    s.message()));
      }
      layouts->push_back(std::move(layout));
    }
  }
  return decision;
}

Decision propagate_elements(MeshContext& context, const OpCall& call, const ShardedRule& rule) {
  const int count = call.input_element.empty() ? 0
                                               : 1 + *std::max_element(call.input_element.begin(),
                                                                       call.input_element.end());
  const c10::AliasInfo* alias = call.op->schema().arguments()[0].alias_info();
  const bool in_place = alias != nullptr && alias->isWrite();
  Decision decision;
  decision.inputs.assign(call.num_inputs(), Layout(Placements(context.mesh().ndim())));
  std::vector<std::vector<int>> members(count);  // flat inputs, in their order
  for (int i = 0; i < call.num_inputs(); ++i) {
    if (call.input_element[i] >= 0) {
      members[call.input_element[i]].push_back(i);
    } else {
      for (std::vector<int>& of_element : members) of_element.push_back(i);
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
    Decision d =
        propagate(context, std::move(one), rule, in_place ? std::optional<int>(0) : std::nullopt);
    for (size_t k = 0; k < members[e].size(); ++k)
      decision.inputs[members[e][k]] = std::move(d.inputs[k]);
    for (Layout& layout : d.outputs) decision.outputs.push_back(std::move(layout));
    for (Layout& layout : d.results) decision.results.push_back(std::move(layout));
  }
  return decision;
}

}  // namespace shardweave::dtensor_internal
