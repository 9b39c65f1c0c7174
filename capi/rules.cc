// Rules of operators that a host brings: a table of placements for each.
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/dispatch/Dispatcher.h"
#include "absl/algorithm/container.h"
#include "absl/strings/str_split.h"
#include "shardweave/capi/handles.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/rule.h"

namespace shardweave::capi {
namespace {

constexpr char kWayForm[] = "wanted one such as \"S(0), R -> S(0)\"";

// A line of the table: a placement for each argument that is a tensor or a list of tensors, and for
// each result, or one for all.
struct RuleWay {
  std::string text;
  Placements inputs;
  Placements outputs;
};

bool holds_tensors(const c10::TypePtr& type) {
  if (type->kind() == c10::TypeKind::TensorType) return true;
  if (const auto optional = type->cast<c10::OptionalType>()) {
    return holds_tensors(optional->getElementType());
  }
  const auto list = type->cast<c10::ListType>();
  return list != nullptr && holds_tensors(list->getElementType());
}

Placements side_of_way(std::string_view way, std::string_view side) {
  Placements placements = check(parse_placements(str_cat("[", side, "]")));
  for (const Placement& placement : placements) {
    if (placement.is_shard() && (!placement.is_plain_shard() || placement.dim() < 0)) {
      fail_argument("ways[]", str_cat("is '", way, "', with ", placement.to_string(),
                                      "; wanted R, P or S(d) with d from 0"));
    }
  }
  return placements;
}

RuleWay parse_way(std::string_view way) {
  const std::vector<std::string> sides = absl::StrSplit(std::string(way), "->");
  if (sides.size() != 2) fail_argument("ways[]", str_cat("is '", way, "'; ", kWayForm));
  return {std::string(way), side_of_way(way, sides[0]), side_of_way(way, sides[1])};
}

// That an overload has as many tensors as each way.
void check_ways(const c10::FunctionSchema& schema, const std::vector<RuleWay>& ways) {
  size_t inputs = 0;
  for (const c10::Argument& argument : schema.arguments()) {
    if (!argument.is_out() && holds_tensors(argument.type())) ++inputs;
  }
  for_each(ways, "ways[]", [&](const RuleWay& way) {
    const size_t outputs = way.outputs.size();
    if (way.inputs.size() != inputs) {
      fail_argument("ways[]", str_cat("is '", way.text, "', with ", way.inputs.size(),
                                      " placements of inputs; wanted ", inputs,
                                      ", one for each tensor argument of ", c10::toString(schema)));
    }
    const bool are_tensors = absl::c_all_of(schema.returns(), [](const c10::Argument& result) {
      return result.type()->kind() == c10::TypeKind::TensorType;
    });
    if (outputs != 1 && !are_tensors) {
      fail_argument("ways[]", str_cat("is '", way.text, "', with ", outputs,
                                      " placements of outputs; wanted one for all, for not all "
                                      "results are tensors: ",
                                      c10::toString(schema)));
    }
    if (outputs != 1 && outputs != schema.returns().size()) {
      fail_argument("ways[]", str_cat("is '", way.text, "', with ", outputs,
                                      " placements of outputs; wanted ", schema.returns().size(),
                                      ", one for each result of ", c10::toString(schema),
                                      ", or one for all"));
    }
  });
}

void check_dim(const OpCall& call, const RuleWay& way, const Placement& placement,
               const TensorInfo& tensor, std::string_view what, int index) {
  if (!placement.is_shard() || !tensor.defined || placement.dim() < tensor.ndim()) return;
  throw Error(absl::InvalidArgumentError(str_cat(c10::toString(call.op->operator_name()),
                                                 ": its rule has '", way.text, "', but ", what, " ",
                                                 index, " has ", tensor.ndim(), " dimensions")));
}

void add_way(const OpCall& call, const RuleWay& way, Strategies& out) {
  std::vector<int> tensor_argument(call.args.size(), -1);  // its place among those of tensors
  int next = 0;
  for (size_t i = 0; i < tensor_argument.size(); ++i) {
    const c10::Argument& argument = call.op->schema().arguments()[i];
    if (!argument.is_out() && holds_tensors(argument.type())) tensor_argument[i] = next++;
  }
  std::vector<Placement> inputs;
  for (int i = 0; i < call.num_inputs(); ++i) {
    inputs.push_back(way.inputs[tensor_argument[call.input_arg[i]]]);
    check_dim(call, way, inputs.back(), call.input(i), "input", i);
  }
  const bool is_one = way.outputs.size() == 1;
  std::vector<Placement> outputs;
  for (int i = 0; i < call.num_outputs(); ++i) {
    outputs.push_back(way.outputs[is_one ? 0 : i]);
    check_dim(call, way, outputs.back(), call.output(i), "output", i);
  }
  out.add(std::move(inputs), std::move(outputs));
}

// Overloads that `name` means: all of "aten::add", or "aten::add.Tensor" alone.
std::vector<c10::OperatorHandle> overloads_of(const std::string& name) {
  auto& dispatcher = c10::Dispatcher::singleton();
  std::vector<c10::OperatorHandle> found;
  std::vector<std::string> names;
  for (const c10::OperatorName& each : dispatcher.getAllOpNames()) {
    names.push_back(each.name);
    if (name != each.name && name != c10::toString(each)) continue;
    if (auto handle = dispatcher.findSchema(each)) found.push_back(*handle);
  }
  if (found.empty()) {
    fail(absl::StatusCode::kNotFound,
         str_cat("argument 'name': there is no operator '", name, "'", suggestion(name, names)));
  }
  return found;
}

Rule rule_of_ways(const std::string& name, const std::vector<c10::OperatorHandle>& overloads,
                  absl::Span<const char* const> given) {
  if (given.size() == 1 && given[0] != nullptr && std::string_view(given[0]) == "pointwise") {
    return pointwise();
  }
  std::vector<RuleWay> ways;
  try {
    for_each(given, "ways[]",
             [&](const char* way) { ways.push_back(parse_way(text(way, "ways[]"))); });
    for (const c10::OperatorHandle& overload : overloads) check_ways(overload.schema(), ways);
  } catch (const Failure& failure) {
    fail(failure.code(), str_cat("'", name, "': ", failure.what()));
  }
  return sharded([ways = std::move(ways)](const OpCall& call, Strategies& out) {
    for (const RuleWay& way : ways) add_way(call, way, out);
  });
}

void add_host_rule(const MeshPtr& mesh, const std::string& name,
                   absl::Span<const char* const> ways) {
  if (ways.empty()) fail_argument("ways", "has no elements; wanted one way or more");
  auto rule = std::make_shared<const Rule>(rule_of_ways(name, overloads_of(name), ways));
  const auto context = dtensor_internal::MeshContext::of(mesh);
  if (context->operator_under_way()) {
    fail(absl::StatusCode::kFailedPrecondition,
         str_cat("'", name,
                 "': an operator on tensors of the mesh is running; wanted its rule "
                 "before or between operators"));
  }
  if (!context->decisions.can_plug_in(name, rule).ok()) {
    fail(absl::StatusCode::kAlreadyExists,
         str_cat("'", name, "' has another rule on this mesh already"));
  }
  context->decisions.plug_in(name, rule);
}

}  // namespace
}  // namespace shardweave::capi

using namespace shardweave::capi;  // NOLINT: this file is the C interface of it

swv_status* swv_mesh_add_rule(swv_mesh* mesh, const char* name, const char* const* ways,
                              size_t num_ways) {
  return guarded(__func__, [&] {
    add_host_rule(in(mesh, "mesh").mesh, std::string(text(name, "name")),
                  span(ways, num_ways, "ways"));
  });
}
