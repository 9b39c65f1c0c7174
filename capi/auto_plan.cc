// Plans that are searched for.
#include <memory>
#include <string>
#include <utility>

#include "shardweave/capi/host_module.h"
#include "shardweave/dtensor/cost_model.h"
#include "shardweave/modules/auto_plan.h"

namespace shardweave::capi {
namespace {

// The host's functions, as auto_plan() calls them.
class HostsModel {
 public:
  HostsModel(swv_make_model_fn make, swv_model_loss_fn loss, void* user_data)
      : make_(make), loss_(loss), user_data_(user_data) {}

  StepModel operator()() const {
    swv_module* made = nullptr;
    swv_status* const status = make_(user_data_, &made);
    const std::shared_ptr<swv_module> handle(
        made, [](swv_module* m) { release(m, "the module of swv_plan_auto"); });
    throw_if_failed(status, "make");
    if (made == nullptr) fail_argument("make", "gave no module");
    const swv_module& m = in(made, "make");
    return {m.library != nullptr ? m.library->pointer() : m.host,
            [*this, handle](const MeshPtr& mesh) { return loss_of(handle.get(), mesh); }};
  }

 private:
  at::Tensor loss_of(swv_module* module, const MeshPtr& mesh) const {
    if (module->host != nullptr) module->host->set_mesh(mesh);
    const Owned<swv_mesh> on(make<swv_mesh>(mesh));
    swv_tensor* given = nullptr;
    swv_status* const status = loss_(user_data_, module, on.get(), &given);
    const Owned<swv_tensor> owned(given);
    throw_if_failed(status, "loss");
    if (given == nullptr) fail_argument("loss", "gave no tensor");
    return tensor(given, "loss");
  }

  const swv_make_model_fn make_;
  const swv_model_loss_fn loss_;
  void* const user_data_;
};

AutoPlanOptions auto_plan_options(const swv_plan_auto_options* given) {
  const swv_plan_auto_options o =
      options<swv_plan_auto_options>(given, SWV_PLAN_AUTO_OPTIONS_INIT, "options");
  AutoPlanOptions result;
  result.tp_mesh_dim = text_or(o.tp_mesh_dim, "", "options.tp_mesh_dim");
  if (o.memory_limit < 0) {
    fail_argument("options.memory_limit", str_cat("is ", o.memory_limit, "; wanted 0 or more"));
  }
  if (o.memory_limit > 0) result.memory_limit = o.memory_limit;
  result.cost.optimizer_states = o.optimizer_states;
  result.sequence_dim = o.sequence_dim;
  result.heads = o.heads;
  result.max_evaluations = o.max_evaluations;
  return result;
}

swv_plan* find_plan(const swv_mesh* mesh, swv_make_model_fn make_model, swv_model_loss_fn loss,
                    void* user_data, const swv_plan_auto_options* given, swv_string** out_text,
                    swv_string** out_json) {
  const MeshPtr& on = in(mesh, "mesh").mesh;
  if (make_model == nullptr) fail_null("make");
  if (loss == nullptr) fail_null("loss");
  const CallMode mode(SWV_MODE_GRAD, "mode");
  AutoPlan found = auto_plan(HostsModel(make_model, loss, user_data), on->mesh(), cost_model(on),
                             auto_plan_options(given));
  Owned<swv_string> text(out_text == nullptr ? nullptr : new_string(found.to_string()));
  Owned<swv_string> json(out_json == nullptr ? nullptr : new_string(found.to_json()));
  swv_plan* const plan = make<swv_plan>(std::make_shared<ShardingPlan>(std::move(found.plan)));
  if (out_text != nullptr) *out_text = text.release();
  if (out_json != nullptr) *out_json = json.release();
  return plan;
}

}  // namespace
}  // namespace shardweave::capi

using namespace shardweave::capi;  // NOLINT: this file is the C interface of it

swv_status* swv_plan_auto(const swv_mesh* mesh, swv_make_model_fn make, swv_model_loss_fn loss,
                          void* user_data, const swv_plan_auto_options* options,
                          swv_plan** out_plan, swv_string** out_text, swv_string** out_json) {
  return guarded(__func__, out_plan, "out_plan", [&] {
    return find_plan(mesh, make, loss, user_data, options, out_text, out_json);
  });
}
