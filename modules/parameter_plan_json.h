// A ParameterPlan as JSON, for hosts in other languages and for files.
//
//   auto plan = parse_parameter_plan(R"json({"parameter": {
//       "*.{q,k,v,up}.weight": {"tp": "S(0)"},
//       "*.{o,down}.weight":   {"tp": "S(1)"}}})json");
//   distribute_module(*model, mesh, *plan);
//   to_json(*plan);                                        // the same text, without the blanks
//
// The lines keep the order of the text: the first that matches a name counts.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "shardweave/dtensor/distribute_module.h"

namespace shardweave {

// InvalidArgument says where the text is no JSON, or what in it is no plan.
absl::StatusOr<ParameterPlan> parse_parameter_plan(std::string_view text);
std::string to_json(const ParameterPlan& plan);

}  // namespace shardweave
