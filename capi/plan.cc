// Plans: what lies where.
#include <span>
#include <string>

#include "shardweave/capi/host_module.h"
#include "shardweave/modules/hugging_face_plan.h"
#include "shardweave/modules/nn/registry.h"
#include "shardweave/modules/parallel_style_json.h"
#include "shardweave/modules/sharding_plan_json.h"

namespace shardweave::capi {
namespace {

ShardingPlan& plan_of(const swv_plan* plan) {
  return *in(plan, "plan").plan;
}

swv_plan* new_plan(ShardingPlan plan = {}) {
  return make<swv_plan>(std::make_shared<ShardingPlan>(std::move(plan)));
}

// A line of either part: by the names of mesh dimensions, or by position.
template <typename Part>
void add_line(const swv_plan* plan, Part part, const char* pattern, PlanPlacements placements) {
  (plan_of(plan).*part).push_back({std::string(text(pattern, "pattern")), std::move(placements)});
}

void add_module(const swv_plan* plan, const char* pattern, const char* const* mesh_dims,
                const char* const* styles, size_t num_mesh_dims) {
  ModuleEntry entry{.pattern = std::string(text(pattern, "pattern"))};
  const auto dims = span(mesh_dims, num_mesh_dims, "mesh_dims", kMaxDims);
  for_each(dims, "mesh_dims[]", [&](const char* name) {
    entry.along.push_back({std::string(text(name, "mesh_dims[]")), ""});
  });
  for_each(std::span(styles, styles == nullptr ? 0 : dims.size()), "styles[]",
           [&](const char* const& style) {
             entry.along[&style - styles].style = text_or(style, "", "styles[]");
           });
  plan_of(plan).module.push_back(std::move(entry));
}

PlanPlacements named(const swv_named_placement* placements, size_t num_placements) {
  return named_placements(placements, num_placements, "placements");
}

PlanPlacements by_position(const swv_layout* layout) {
  return in(layout, "layout").layout;
}

swv_plan* from_zoo(const char* kind, const char* config_json, const swv_mesh* mesh,
                   const char* options_json) {
  const std::string_view name = text_or(kind, "", "kind");
  const std::string_view config = text(config_json, "config_json");
  const DeviceMesh& on = in(mesh, "mesh").mesh->mesh();
  return new_plan(
      check(nn::model_plan(name, config, on, text_or(options_json, "", "options_json"))));
}

swv_plan* from_styles(const swv_module* module, const swv_mesh* mesh, const char* styles_json,
                      const char* tp_mesh_dim) {
  torch::nn::Module& of = any_module(module);
  const DeviceMesh& on = in(mesh, "mesh").mesh->mesh();
  const StylePlan styles = check(parallel_styles_from_json(text(styles_json, "styles_json")));
  return new_plan(sharding_plan(of, on, styles, text_or(tp_mesh_dim, "", "tp_mesh_dim")));
}

void resolve(const swv_plan* plan, const swv_module* module, const swv_mesh* mesh,
             swv_string** out_text, swv_string** out_json) {
  const ResolvedPlan resolved = resolve_sharding_plan(
      any_module(module), in(mesh, "mesh").mesh->mesh(), plan_of(plan), host_plugins());
  Owned<swv_string> table(out_text == nullptr ? nullptr : new_string(to_string(resolved)));
  Owned<swv_string> json(out_json == nullptr ? nullptr : new_string(resolved_to_json(resolved)));
  if (out_text != nullptr) *out_text = table.release();
  if (out_json != nullptr) *out_json = json.release();
}

}  // namespace
}  // namespace shardweave::capi

using namespace shardweave::capi;  // NOLINT: this file is the C interface of it

swv_status* swv_plan_create(swv_plan** out_plan) {
  return guarded(__func__, out_plan, "out_plan", [&] { return new_plan(); });
}

swv_status* swv_plan_from_json(const char* text, swv_plan** out_plan) {
  return guarded(__func__, out_plan, "out_plan", [&] {
    return new_plan(check(shardweave::parse_sharding_plan(shardweave::capi::text(text, "text"))));
  });
}

swv_status* swv_plan_from_hugging_face(const swv_module* module, const char* text,
                                       const char* tp_mesh_dim, swv_plan** out_plan) {
  return guarded(__func__, out_plan, "out_plan", [&] {
    return new_plan(check(
        shardweave::hugging_face_plan(any_module(module), shardweave::capi::text(text, "text"),
                                      text_or(tp_mesh_dim, "tp", "tp_mesh_dim"))));
  });
}

swv_status* swv_plan_from_zoo(const char* kind, const char* config_json, const swv_mesh* mesh,
                              const char* options_json, swv_plan** out_plan) {
  return guarded(__func__, out_plan, "out_plan",
                 [&] { return from_zoo(kind, config_json, mesh, options_json); });
}

swv_status* swv_plan_from_styles(const swv_module* module, const swv_mesh* mesh,
                                 const char* styles_json, const char* tp_mesh_dim,
                                 swv_plan** out_plan) {
  return guarded(__func__, out_plan, "out_plan",
                 [&] { return from_styles(module, mesh, styles_json, tp_mesh_dim); });
}

swv_status* swv_plan_to_json(const swv_plan* plan, swv_string** out_text) {
  return guarded(__func__, out_text, "out_text",
                 [&] { return new_string(shardweave::to_json(plan_of(plan))); });
}

swv_status* swv_plan_add(swv_plan* plan, const char* pattern, const swv_named_placement* placements,
                         size_t num_placements) {
  return guarded(__func__, [&] {
    add_line(plan, &shardweave::ShardingPlan::parameter, pattern,
             named(placements, num_placements));
  });
}

swv_status* swv_plan_add_layout(swv_plan* plan, const char* pattern, const swv_layout* layout) {
  return guarded(__func__, [&] {
    add_line(plan, &shardweave::ShardingPlan::parameter, pattern, by_position(layout));
  });
}

swv_status* swv_plan_add_forward(swv_plan* plan, const char* pattern,
                                 const swv_named_placement* placements, size_t num_placements) {
  return guarded(__func__, [&] {
    add_line(plan, &shardweave::ShardingPlan::forward, pattern, named(placements, num_placements));
  });
}

swv_status* swv_plan_add_forward_layout(swv_plan* plan, const char* pattern,
                                        const swv_layout* layout) {
  return guarded(__func__, [&] {
    add_line(plan, &shardweave::ShardingPlan::forward, pattern, by_position(layout));
  });
}

swv_status* swv_plan_append(swv_plan* plan, const swv_plan* other) {
  return guarded(__func__, [&] {
    shardweave::ShardingPlan joined = *in(plan, "plan").plan;
    const shardweave::ShardingPlan& more = *in(other, "other").plan;
    const auto append = [](auto& to, const auto& from) {
      to.insert(to.end(), from.begin(), from.end());
    };
    append(joined.parameter, more.parameter);
    append(joined.forward, more.forward);
    append(joined.module, more.module);
    *in(plan, "plan").plan = std::move(joined);
  });
}

swv_status* swv_plan_add_module(swv_plan* plan, const char* pattern, const char* const* mesh_dims,
                                const char* const* styles, size_t num_mesh_dims) {
  return guarded(__func__, [&] { add_module(plan, pattern, mesh_dims, styles, num_mesh_dims); });
}

swv_status* swv_plan_resolve(const swv_plan* plan, const swv_module* module, const swv_mesh* mesh,
                             swv_string** out_text, swv_string** out_json) {
  return guarded(__func__, [&] { resolve(plan, module, mesh, out_text, out_json); });
}

swv_status* swv_plan_share(const swv_plan* plan, swv_plan** out_plan) {
  return guarded(__func__, out_plan, "out_plan",
                 [&] { return make<swv_plan>(in(plan, "plan").plan); });
}

void swv_plan_free(swv_plan* plan) {
  release(plan, __func__);
}
