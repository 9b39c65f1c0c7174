#include "shardweave/modules/hugging_face_plan.h"

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_join.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/modules/json_document.h"
#include "shardweave/modules/layer_style.h"
#include "torch/nn/module.h"

namespace shardweave {
namespace {

using namespace modules_internal;

// The two halves of a packed weight (gate and up, key and value) are each cut.
constexpr int64_t kPacked = 2;

struct Style {
  std::string_view name;
  LayerStyle layer;
};

const std::vector<Style>& styles() {
  static const auto& all = *new std::vector<Style>{
      {"colwise", colwise_linear()},
      {"colwise_gather_output", with_output(colwise_linear(), Replicate())},
      {"colwise_rep", with_output(colwise_linear(), Replicate())},
      {"rowwise", rowwise_linear()},
      {"rowwise_split_input", with_input(rowwise_linear(), Shard(-1))},
      {"rowwise_rep", with_input(rowwise_linear(), Shard(-1))},
      {"packed_colwise", colwise_linear(kPacked)},
      {"packed_rowwise", rowwise_linear(kPacked)},
      {"embedding_rowwise", rowwise_embedding()},
      {"embedding_colwise", colwise_embedding()},
      {"sequence_parallel", sequence_layer(1)},
      {"grouped_gemm", {Shard(0), {}, {}, {}}},  // experts
      {"local_colwise", colwise_linear()},
      {"local_rowwise", rowwise_linear()},
      {"local_packed_rowwise", rowwise_linear(kPacked)},
      // Of modules without weights of their own, or whose weights stay whole: what they do about
      // communication DTensors do by themselves.
      {"all_reduce", {}},
      {"ep_router", {}},
      {"gather", {}},
      {"local", {}},
      {"megamoe_experts", {}},
      {"megamoe_router", {}},
      {"mla_kv_a_proj", {}},
      {"moe_identity_expert", {}},
      {"moe_tp_experts", {}},
      {"replicate", {}},
      {"replicated_with_grad_allreduce", {}},
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
  // A configuration speaks of all that models of its type may have.
  const bool is_configuration = !path.empty();
  bool finds_any = false;
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
      const bool is_parameter = has(base, /*is_module=*/false);
      const bool is_module = has(base, /*is_module=*/true);
      found |= is_parameter || is_module;
      for (const LayerPart& part : parts_of(style->layer)) {
        const PlanPlacements placements = on_mesh_dim(tp_mesh_dim, part.placement);
        const std::string pattern = joined_fqn(base, part.name);
        if (part.is_forward) {
          if (is_module) plan.forward.push_back({pattern, placements});
          continue;
        }
        if (is_parameter && part.name == "weight") plan.parameter.push_back({base, placements});
        if (has(pattern, /*is_module=*/false)) plan.parameter.push_back({pattern, placements});
      }
    }
    finds_any |= found;
    if (!found && !is_configuration) {
      return document->refuse(path, "the module has no parameter and no module of this name");
    }
  }
  if (is_configuration && !finds_any && !entries->empty()) {
    path.pop_back();
    return document->refuse(path,
                            "the module has no parameter and no module of any of these names");
  }
  return plan;
}

}  // namespace shardweave
