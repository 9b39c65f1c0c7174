// Styles as JSON, for hosts in other languages and for files.
//
//   auto styles = parallel_styles_from_json(R"json({
//       "layers.*.mlp":  "pairwise",
//       "layers.*.attn": {"style": "sequence", "sequence_dim": 1, "heads": 8},
//       "embedding":     {"style": "rowwise", "output": "S(1)"},
//       "layers.*":      {"style": "prepare_input", "input": ["S(1)", null], "mask": "R"},
//       "out":           {"style": "colwise", "output": "R"}})json");
//   parallelize_module(*model, mesh, *styles);
//
// Patterns of modules, each with a style by its name or an object with its options:
//   colwise, rowwise        "input", "output": a placement
//   pairwise                "output": a placement; "heads": a number
//   sequence                "sequence_dim", "heads": numbers
//   prepare_input           "input": a placement, or a list of them (null: as it comes); any other
//                           key: the name of an argument
//   prepare_output          "output": a placement, or a list
// An object with a "style" of its own is the style of the whole module: {"style": "pairwise"}.
#pragma once

#include <string_view>

#include "absl/status/statusor.h"
#include "shardweave/modules/parallel_style.h"

namespace shardweave {

// InvalidArgument says on which line the text is no JSON, or what in it is no style; for a style
// that is not known it lists those that are, and for an option those that the style has.
absl::StatusOr<StylePlan> parallel_styles_from_json(std::string_view text);

}  // namespace shardweave
