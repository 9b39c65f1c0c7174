#include "shardweave/dtensor/observe/explain.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "ATen/core/dispatch/Dispatcher.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "nlohmann/json.hpp"
#include "shardweave/dtensor/engine/dispatch.h"
#include "shardweave/dtensor/engine/redistribute.h"
#include "shardweave/dtensor/observe/observer.h"
#include "shardweave/dtensor/observe/text_table.h"

namespace shardweave {
namespace {

using namespace dtensor_internal;

using nlohmann::ordered_json;

// "self", or "tensors[1]" for an element of a list.
std::string input_name(const c10::OperatorHandle& op, const Decided& decided, size_t i) {
  const int arg = decided.input_arg[i];
  const c10::Argument& argument = op.schema().arguments()[arg];
  if (argument.type()->isSubtypeOf(*c10::OptionalType::ofTensor())) return argument.name();
  size_t first = i;
  while (first > 0 && decided.input_arg[first - 1] == arg) --first;
  return absl::StrCat(argument.name(), "[", i - first, "]");
}

std::string output_name(size_t i, size_t count) {
  return count == 1 ? "result" : absl::StrCat("result[", i, "]");
}

Explanation::Tensor tensor_of(std::string name, const Spec& spec, const Layout& after,
                              RedistributePlan plan) {
  return {std::move(name), spec.dtype, {spec.sizes.begin(), spec.sizes.end()},
          spec.layout,     after,      std::move(plan)};
}

// What a rank sends at most, so that every input has its place along the mesh dimension and stays
// as it is along the others.
int64_t bytes_of(const MeshContext& context, const WeighedDim& dim, const Strategy& strategy) {
  int64_t bytes = 0;
  for (size_t i = 0; i < dim.inputs.size(); ++i) {
    const SpecRef& spec = dim.inputs[i];
    if (spec == nullptr || spec->layout[dim.mesh_dim] == strategy.inputs[i]) continue;
    Placements placements = spec->layout.placements();
    placements[dim.mesh_dim] = strategy.inputs[i];
    const Layout layout =
        value_or_throw(Layout::create(std::move(placements), spec->layout.order()));
    bytes += searched_plan(context, *spec, layout).bytes();
  }
  return bytes;
}

std::string gives_up_text(const StrategyCost& cost) {
  std::vector<std::string> what;
  if (cost.data == DataMoves::kMoves) what.push_back("data's place");
  if (cost.data == DataMoves::kGivenUp) what.push_back("data");
  if (cost.gives_up_weight) what.push_back("weight");
  return absl::StrJoin(what, ", ");
}

// Whose cuts along the mesh dimension none of the strategies keeps, and what is known of it.
std::vector<std::string> not_offered(const c10::OperatorHandle& op, const Decided& decided,
                                     const WeighedDim& dim, int64_t num_ranks) {
  std::vector<std::string> result;
  for (size_t i = 0; i < dim.inputs.size(); ++i) {
    if (dim.inputs[i] == nullptr) continue;
    const Placement& have = dim.inputs[i]->layout[dim.mesh_dim];
    const bool offered =
        std::any_of(dim.options.begin(), dim.options.end(),
                    [&](const WeighedDim::Option& o) { return o.strategy.inputs[i] == have; });
    if (!have.is_shard() || offered) continue;
    std::string text = absl::StrCat(input_name(op, decided, i), " ", have.to_string(),
                                    ": the operator's rule offers nothing that takes it so");
    const int64_t size = dim.inputs[i]->sizes[have.dim()];
    if (size < num_ranks) {
      absl::StrAppend(&text, "; dimension ", have.dim(), " has ", size,
                      size == 1 ? " element for " : " elements for ", num_ranks,
                      " ranks, and some parts are empty");
    }
    result.push_back(std::move(text));
  }
  return result;
}

// The chosen option, then as choose() would take them.
std::vector<size_t> order_of(const WeighedDim& dim) {
  std::vector<size_t> order(dim.options.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    if ((a == dim.chosen) != (b == dim.chosen)) return a == dim.chosen;
    const WeighedDim::Option &left = dim.options[a], &right = dim.options[b];
    if (left.obstacle.empty() != right.obstacle.empty()) return left.obstacle.empty();
    return left.obstacle.empty() && left.cost < right.cost;
  });
  return order;
}

Explanation::Dim explained(const c10::OperatorHandle& op, const Decided& decided,
                           const WeighedDim& dim) {
  const MeshContext& context = *decided.context;
  Explanation::Dim result;
  result.name = context.mesh().name(dim.mesh_dim);
  result.num_ranks = context.mesh().size(dim.mesh_dim);
  result.chosen = dim.chosen;
  result.order = order_of(dim);
  result.not_offered = not_offered(op, decided, dim, result.num_ranks);
  for (const WeighedDim::Option& option : dim.options) {
    Placements inputs;
    for (size_t i = 0; i < dim.inputs.size(); ++i) {
      if (dim.inputs[i] != nullptr) inputs.push_back(option.strategy.inputs[i]);
    }
    const StrategyCost& cost = option.cost;
    result.options.push_back({std::move(inputs), option.strategy.outputs, cost.move, cost.compute,
                              cost.owed, gives_up_text(cost),
                              option.obstacle.empty() ? bytes_of(context, dim, option.strategy) : 0,
                              std::string(option.obstacle)});
  }
  return result;
}

Explanation explained(const c10::OperatorHandle& op, const Decided& decided) {
  const CacheEntry& entry = *decided.entry;
  Explanation result;
  result.op = c10::toString(op.operator_name());
  result.mesh = decided.context->mesh().to_string();
  result.has_rule = decided.context->decisions.op_info(op).rule != nullptr;
  result.gathered = entry.gathered;
  for (const WeighedDim& dim : decided.weighed) {
    result.dims.push_back(explained(op, decided, dim));
  }
  for (size_t i = 0; i < decided.inputs.size(); ++i) {
    if (decided.inputs[i].spec == nullptr) continue;
    const auto change =
        std::find_if(entry.input_changes.begin(), entry.input_changes.end(),
                     [&](const InputChange& c) { return c.input == static_cast<int>(i); });
    result.inputs.push_back(
        tensor_of(input_name(op, decided, i), *decided.inputs[i].spec, entry.inputs[i]->layout,
                  change == entry.input_changes.end() ? RedistributePlan() : change->plan->plan));
  }
  for (size_t i = 0; i < entry.outputs.size(); ++i) {
    if (entry.outputs[i] == nullptr) continue;
    const auto written =
        std::find_if(entry.written.begin(), entry.written.end(),
                     [&](const auto& w) { return w.output == static_cast<int>(i); });
    const auto brought =
        std::find_if(entry.output_changes.begin(), entry.output_changes.end(),
                     [&](const auto& c) { return c.output == static_cast<int>(i); });
    if (brought != entry.output_changes.end()) {
      result.outputs.push_back(tensor_of(output_name(i, entry.outputs.size()), *entry.outputs[i],
                                         brought->target->layout, brought->plan->plan));
      continue;
    }
    const bool stays = written == entry.written.end();
    result.outputs.push_back(
        tensor_of(output_name(i, entry.outputs.size()), *entry.outputs[i],
                  stays ? entry.outputs[i]->layout : written->spec->layout,
                  stays || written->plan == nullptr ? RedistributePlan() : written->plan->plan));
  }
  for (const CacheEntry::Written& written : entry.written) {
    if (written.output >= 0 || written.plan == nullptr || written.plan->plan.steps.empty())
      continue;
    std::string name = absl::StrCat("result in ", op.schema().arguments()[written.arg].name());
    if (written.element >= 0) absl::StrAppend(&name, "[", written.element, "]");
    result.outputs.push_back(
        tensor_of(std::move(name), *written.spec, written.spec->layout, written.plan->plan));
    result.outputs.back().before = written.plan->plan.steps.front().before;
  }
  return result;
}

[[noreturn]] void bad_name(std::string_view op, const std::string& what) {
  throw Error("explain",
              absl::InvalidArgumentError(absl::StrCat("'", std::string(op), "': ", what)));
}

c10::OperatorHandle find_operator(std::string_view text) {
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  const size_t dot = text.find('.');
  const std::string name(text.substr(0, dot));
  const std::string overload(dot == std::string_view::npos ? "" : text.substr(dot + 1));
  if (const auto op = dispatcher.findSchema({name, overload})) return *op;
  std::vector<std::string> overloads;
  for (const c10::OperatorName& other : dispatcher.getAllOpNames()) {
    if (other.name == name) overloads.push_back(c10::toString(other));
  }
  std::sort(overloads.begin(), overloads.end());
  if (overloads.empty())
    bad_name(text, "there is no such operator; wanted a name such as aten::mm");
  bad_name(text, absl::StrCat("wanted one of its overloads: ", absl::StrJoin(overloads, ", ")));
}

class Explainer final : public Observer {
 public:
  void operator_begins(const c10::OperatorHandle& op, absl::Span<const c10::IValue> args) override {
    if (const auto decided = decide_only(op, args)) explanations.push_back(explained(op, *decided));
  }

  std::vector<Explanation> explanations;
};

// "0", "8.7e-06"
std::string seconds_text(double seconds) {
  return absl::StrFormat("%.3g", seconds);
}

void append(std::string& text, const Explanation& e, const Explanation::Dim& dim) {
  absl::StrAppend(&text, "along ", dim.name, " (", dim.num_ranks, " ranks):\n");
  std::vector<std::string> header = {"", "seconds", "move", "compute", "owed", "bytes"};
  for (const Explanation::Tensor& t : e.inputs) header.push_back(t.name);
  const size_t results = dim.options[0].outputs.size();
  for (size_t i = 0; i < results; ++i) header.push_back(output_name(i, results));
  header.push_back("gives up");
  header.push_back("not possible because");
  TextTable table(header, /*right_aligned=*/{1, 2, 3, 4, 5});
  for (size_t i : dim.order) {
    const Explanation::Option& o = dim.options[i];
    const bool possible = o.obstacle.empty();
    std::vector<std::string> row = {i == dim.chosen ? "*" : "",
                                    possible ? seconds_text(o.seconds()) : "-",
                                    possible ? seconds_text(o.move) : "-",
                                    possible ? seconds_text(o.compute) : "-",
                                    possible ? seconds_text(o.owed) : "-",
                                    possible ? absl::StrCat(o.bytes) : "-"};
    for (const Placement& p : o.inputs) row.push_back(p.to_string());
    for (const Placement& p : o.outputs) row.push_back(p.to_string());
    row.push_back(possible ? o.gives_up : "");
    row.push_back(o.obstacle);
    table.add(std::move(row));
  }
  text += table.to_string(/*indent=*/2);
  for (const std::string& line : dim.not_offered) absl::StrAppend(&text, "  ", line, "\n");
}

ordered_json json_of(const Explanation::Tensor& tensor) {
  ordered_json steps = ordered_json::array();
  for (const RedistributeStep& step : tensor.plan.steps) {
    steps.push_back({{"kind", to_string(step.kind)},
                     {"mesh_dims", step.mesh_dims},
                     {"before", step.before.to_string()},
                     {"after", step.after.to_string()},
                     {"bytes", step.bytes},
                     {"seconds", step.cost}});
  }
  return {{"name", tensor.name},
          {"dtype", c10::toString(tensor.dtype)},
          {"shape", tensor.shape},
          {"before", tensor.before.to_string()},
          {"after", tensor.after.to_string()},
          {"steps", std::move(steps)}};
}

ordered_json json_of(const Placements& placements) {
  ordered_json texts = ordered_json::array();
  for (const Placement& p : placements) texts.push_back(p.to_string());
  return texts;
}

ordered_json json_of(const Explanation::Dim& dim) {
  ordered_json options = ordered_json::array();
  for (const Explanation::Option& o : dim.options) {
    options.push_back({{"inputs", json_of(o.inputs)},
                       {"outputs", json_of(o.outputs)},
                       {"seconds", o.seconds()},
                       {"move", o.move},
                       {"compute", o.compute},
                       {"owed", o.owed},
                       {"gives_up", o.gives_up},
                       {"bytes", o.bytes},
                       {"obstacle", o.obstacle}});
  }
  return {{"name", dim.name},
          {"ranks", dim.num_ranks},
          {"chosen", dim.chosen},
          {"not_offered", dim.not_offered},
          {"options", std::move(options)}};
}

template <typename T>
ordered_json list_of(const std::vector<T>& values) {
  ordered_json list = ordered_json::array();
  for (const T& value : values) list.push_back(json_of(value));
  return list;
}

}  // namespace

int64_t Explanation::bytes() const {
  int64_t sum = 0;
  for (const auto* tensors : {&inputs, &outputs}) {
    for (const Tensor& tensor : *tensors) sum += tensor.plan.bytes();
  }
  return sum;
}

std::string Explanation::to_string() const {
  std::string text = absl::StrCat(op, " on ", mesh, "\n");
  if (!has_rule) {
    absl::StrAppend(&text, "no sharding rule: every input is gathered\n");
  } else if (gathered) {
    absl::StrAppend(&text, "by its sharding rule every input is gathered\n");
  }
  for (const Dim& dim : dims) append(text, *this, dim);
  TextTable table({"tensor", "type", "layout", "steps"});
  for (const auto* tensors : {&inputs, &outputs}) {
    for (const Tensor& t : *tensors) {
      std::string layout = t.before.to_string();
      if (t.before != t.after) absl::StrAppend(&layout, " -> ", t.after.to_string());
      table.add({t.name,
                 absl::StrCat(c10::toString(t.dtype), "[", absl::StrJoin(t.shape, ", "), "]"),
                 std::move(layout), t.plan.steps.empty() ? "" : t.plan.to_string()});
    }
  }
  text += table.to_string();
  return text;
}

std::string Explanation::to_json() const {
  return ordered_json({{"op", op},
                       {"mesh", mesh},
                       {"has_rule", has_rule},
                       {"gathered", gathered},
                       {"bytes", bytes()},
                       {"dims", list_of(dims)},
                       {"inputs", list_of(inputs)},
                       {"outputs", list_of(outputs)}})
      .dump();
}

Explanation explain(std::string_view op, std::vector<c10::IValue> args) {
  const c10::OperatorHandle handle = find_operator(op);
  handle.schema().checkAndNormalizeInputs(args);
  const bool any = std::any_of(args.begin(), args.end(), [](const c10::IValue& v) {
    if (v.isTensor()) return is_dtensor(v.toTensor());
    if (!v.isList()) return false;
    const auto list = v.toListRef();
    return std::any_of(list.begin(), list.end(), [](const c10::IValue& e) {
      return e.isTensor() && is_dtensor(e.toTensor());
    });
  });
  if (!any) bad_name(op, "none of the arguments is a DTensor");
  const std::optional<Decided> decided = decide_only(handle, args);
  if (!decided.has_value()) {
    throw Error("explain",
                absl::FailedPreconditionError(absl::StrCat(
                    "'", std::string(op),
                    "': the operator is made of others, which can be traced as it runs")));
  }
  return explained(handle, *decided);
}

std::vector<Explanation> explain(const MeshPtr& mesh, const std::function<void()>& call) {
  Explainer explainer;
  const Observing observing(MeshContext::of(mesh), explainer);
  call();
  return std::move(explainer.explanations);
}

}  // namespace shardweave
