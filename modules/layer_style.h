// What styles say of single layers, as entries of a ShardingPlan. Internal to modules/.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "shardweave/modules/parallelize_module.h"

namespace shardweave::modules_internal {

// What errors of plans and styles begin with.
inline constexpr char kFunctionOfPlans[] = "parallelize_module";

// Of a weight [out, in], a bias [out], and what goes in and comes out. Dimensions count from the
// end: an expert's weights have one more in front.
struct LayerStyle {
  std::optional<Placement> weight, bias;   // nullopt: replicated
  std::optional<Placement> input, output;  // nullopt: as they come
};

// `parts`: of what is packed into the columns (gate and up; query, key and value) each is cut.
inline LayerStyle colwise_linear(int64_t parts = 1) {
  return {StridedShard(-2, parts), StridedShard(-1, parts), {}, {}};
}
inline LayerStyle rowwise_linear(int64_t parts = 1) {
  return {StridedShard(-1, parts), {}, {}, {}};
}
// Whether a module with a matrix looks rows up in it: LibTorch's by their class, other libraries' and other languages'
// by their names.
bool is_embedding(const torch::nn::Module* module, std::string_view name);

// Of a weight [words, features].
inline LayerStyle colwise_embedding() {
  return {Shard(-1), {}, {}, {}};
}
inline LayerStyle rowwise_embedding() {
  return {Shard(-2), {}, {}, {}};
}
// Of what keeps its weights whole and computes element by element, or line by line.
inline LayerStyle sequence_layer(int sequence_dim) {
  return {{}, {}, Shard(sequence_dim), Shard(sequence_dim)};
}

inline LayerStyle with_input(LayerStyle style, const std::optional<Placement>& input) {
  style.input = input;
  return style;
}
inline LayerStyle with_output(LayerStyle style, const std::optional<Placement>& output) {
  style.output = output;
  return style;
}

inline NamedPlacements on_mesh_dim(std::string_view mesh_dim, const Placement& placement) {
  return {{std::string(mesh_dim), placement}};
}

inline std::string joined_fqn(std::string_view module, std::string_view name) {
  return module.empty() ? std::string(name) : std::string(module).append(".").append(name);
}

// "weight", "bias", "input" or "output" of a layer.
struct LayerPart {
  std::string_view name;
  bool is_forward;
  Placement placement;
};
inline std::vector<LayerPart> parts_of(const LayerStyle& style) {
  std::vector<LayerPart> parts;
  if (style.weight.has_value()) parts.push_back({"weight", false, *style.weight});
  if (style.bias.has_value()) parts.push_back({"bias", false, *style.bias});
  if (style.input.has_value()) parts.push_back({"input", true, *style.input});
  if (style.output.has_value()) parts.push_back({"output", true, *style.output});
  return parts;
}

}  // namespace shardweave::modules_internal
