// A ShardingPlan as JSON, for hosts in other languages and for files.
//
//   auto plan = parse_sharding_plan(R"json({
//       "parameter": {
//           "*.{q,k,v,up}.weight":   {"tp": "S(0)"},
//           "*.{o,down}.weight":     {"tp": "S(1)"},
//           "lm_head.weight":        "[R, S(0)]",
//           "re:h\\.[0-9]+\\.bias":  ["R", "R"]},
//       "forward": {
//           "*.norm.input":          {"tp": "S(1)"}}})json");
//   parallelize_module(*model, mesh, *plan);
//   to_json(*plan);                                        // the same text, without the blanks
//
// Placements are an object by the names of mesh dimensions, in which what is not named is replicated
// (of "forward": stays as it is); or by position, one for each of the mesh's dimensions: a list, or a layout's text, which says in
// which order they cut, too ("[S(0)@1, S(0)@0]").
//
// "module" has modules that plug-ins know how to shard (plugin.h), and the mesh dimensions along which:
// {"*.moe": ["tp"]}, "tp" for one alone, or {"tp": "experts"} with a word for the plug-in.
#pragma once

#include <map>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "shardweave/modules/parallelize_module.h"

namespace shardweave {

struct ModuleSharding;  // plugin.h

// InvalidArgument says on which line the text is no JSON, or what in it is no plan: a key that is not
// known or stands twice, a placement that is none.
absl::StatusOr<ShardingPlan> parse_sharding_plan(std::string_view text);
// Of two entries with one pattern the first is written.
std::string to_json(const ShardingPlan& plan);

// What a module of a host says of how it shards, by the style that the plan asks for:
//   {"parameter": {"up": "S(0)", "down": "S(1)"}, "forward": {"output": "R"},
//    "styles": {"experts": {"parameter": {"up": "S(-3)", "down": "S(-3)"}}}}
// The outer part is that without a style, "", and may be missing. Errors as of a plan.
absl::StatusOr<std::map<std::string, ModuleSharding>> parse_module_sharding(std::string_view text);

// {"parameter": [{"names": ["h.0.q.weight"], "shape": [8, 4], "is_buffer": false,
//                 "layout": "[R, S(0)]", "local_shape": [4, 4], "pattern": "*.q.weight"}],
//  "forward": [{"module": "h.0.q", "value": "input.0", "placements": {"tp": "R"},
//               "pattern": "*.q.input"}]}
// A tensor that no entry matches has the pattern null.
std::string resolved_to_json(const ResolvedPlan& resolved);

}  // namespace shardweave
