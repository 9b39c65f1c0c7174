#include "shardweave/modules/hugging_face_plan.h"

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_join.h"
#include "json_document.h"
#include "shardweave/comm/str_cat.h"
#include "torch/nn/module.h"

namespace shardweave {
namespace {

using modules_internal::Json;
using modules_internal::JsonDocument;

// The two halves of a packed weight (gate and up, key and value) are each cut.
constexpr int64_t kPacked = 2;

// What a style says. Dimensions count from the end: an expert's weights have one more in front.
struct Style {
  std::string_view name;
  std::optional<Placement> weight, bias;   // nullopt: replicated
  std::optional<Placement> input, output;  // nullopt: as they come
};

const std::vector<Style>& styles() {
  static const auto& all = *new std::vector<Style>{
      {"colwise", Shard(-2), Shard(-1), {}, {}},
      {"colwise_gather_output", Shard(-2), Shard(-1), {}, Replicate()},
      {"colwise_rep", Shard(-2), Shard(-1), {}, Replicate()},
      {"rowwise", Shard(-1), {}, {}, {}},
      {"rowwise_split_input", Shard(-1), {}, Shard(-1), {}},
      {"rowwise_rep", Shard(-1), {}, Shard(-1), {}},
      {"packed_colwise", StridedShard(-2, kPacked), StridedShard(-1, kPacked), {}, {}},
      {"packed_rowwise", StridedShard(-1, kPacked), {}, {}, {}},
      {"embedding_rowwise", Shard(-2), {}, {}, {}},
      {"embedding_colwise", Shard(-1), {}, {}, {}},
      {"sequence_parallel", {}, {}, Shard(1), Shard(1)},
      {"grouped_gemm", Shard(0), {}, {}, {}},  // experts
      {"local_colwise", Shard(-2), Shard(-1), {}, {}},
      {"local_rowwise", Shard(-1), {}, {}, {}},
      {"local_packed_rowwise", StridedShard(-1, kPacked), {}, {}, {}},
      // Of modules without weights of their own, or whose weights stay whole: what they do about
      // communication DTensors do by themselves.
      {"ep_router", {}, {}, {}, {}},
      {"gather", {}, {}, {}, {}},
      {"local", {}, {}, {}, {}},
      {"moe_identity_expert", {}, {}, {}, {}},
      {"moe_tp_experts", {}, {}, {}, {}},
      {"replicate", {}, {}, {}, {}},
      {"replicated_with_grad_allreduce", {}, {}, {}, {}},
  };
  return all;
}

// Whether the module has a parameter, or a module with parameters, of such a name.
class Names {
 public:
  explicit Names(const torch::nn::Module& module) {
    for (const auto& item : module.named_parameters()) {
      parameters_.push_back(item.key());
      std::string_view rest = item.key();
      for (size_t dot = rest.rfind('.'); dot != std::string_view::npos; dot = rest.rfind('.')) {
        rest = rest.substr(0, dot);
        modules_.emplace(rest);
      }
    }
  }
  bool has_parameter(const FqnPattern& pattern) const { return any(parameters_, pattern); }
  bool has_module(const FqnPattern& pattern) const { return any(modules_, pattern); }

 private:
  template <typename Fqns>
  static bool any(const Fqns& fqns, const FqnPattern& pattern) {
    return std::any_of(fqns.begin(), fqns.end(),
                       [&](const std::string& fqn) { return pattern.matches(fqn); });
  }
  std::vector<std::string> parameters_;
  std::set<std::string> modules_;
};

NamedPlacements on(std::string_view mesh_dim, const Placement& placement) {
  return {{std::string(mesh_dim), placement}};
}

std::string known_styles() {
  return absl::StrJoin(styles(), ", ",
                       [](std::string* out, const Style& style) { *out += style.name; });
}

}  // namespace

absl::StatusOr<ShardingPlan> hugging_face_plan(const torch::nn::Module& module,
                                               std::string_view text,
                                               std::string_view tp_mesh_dim) {
  constexpr char kInConfiguration[] = "base_model_tp_plan";
  const absl::StatusOr<JsonDocument> document = JsonDocument::read(text);
  if (!document.ok()) return document.status();
  if (!document->json().is_object()) return document->expected({}, "an object", document->json());
  JsonDocument::Path path;
  const Json* entries = &document->json();
  if (entries->contains(kInConfiguration)) {
    path = {kInConfiguration};
    entries = &(*entries)[kInConfiguration];
    if (!entries->is_object()) return document->expected(path, "an object", *entries);
  } else if (entries->contains("model_type")) {
    return document->refuse({}, "this configuration has no \"base_model_tp_plan\"");
  }

  const Names names(module);
  ShardingPlan plan;
  path.emplace_back();
  for (const auto& [name, value] : entries->items()) {
    path.back() = name;
    if (!value.is_string()) return document->expected(path, "a style such as \"colwise\"", value);
    const std::string& wanted = value.get_ref<const std::string&>();
    const auto style = std::find_if(styles().begin(), styles().end(),
                                    [&](const Style& s) { return s.name == wanted; });
    if (style == styles().end()) {
      return document->refuse(
          path, str_cat("the style \"", wanted, "\" is not known; there are: ", known_styles()));
    }
    bool found = false;
    for (const std::string& base : {name, "model." + name}) {
      const auto has = [&](const std::string& pattern, bool is_module) {
        const absl::StatusOr<FqnPattern> parsed = FqnPattern::parse(pattern);
        return parsed.ok() &&
               (is_module ? names.has_module(*parsed) : names.has_parameter(*parsed));
      };
      const std::pair<std::string, std::optional<Placement>> parts[] = {
          {base, style->weight}, {base + ".weight", style->weight}, {base + ".bias", style->bias}};
      for (const auto& [pattern, placement] : parts) {
        if (!has(pattern, /*is_module=*/false)) continue;
        found = true;
        if (placement.has_value()) plan.parameter.push_back({pattern, on(tp_mesh_dim, *placement)});
      }
      if (!has(base, /*is_module=*/true)) continue;
      found = true;
      const std::pair<std::string, std::optional<Placement>> values[] = {
          {base + ".input", style->input}, {base + ".output", style->output}};
      for (const auto& [pattern, placement] : values) {
        if (placement.has_value()) plan.forward.push_back({pattern, on(tp_mesh_dim, *placement)});
      }
    }
    if (!found) {
      return document->refuse(path, "the module has no parameter and no module of this name");
    }
  }
  return plan;
}

}  // namespace shardweave
