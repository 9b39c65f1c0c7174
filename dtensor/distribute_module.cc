#include "shardweave/dtensor/distribute_module.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "c10/core/GradMode.h"
#include "shardweave/dtensor/fused.h"
#include "shardweave/dtensor/mesh_context.h"
#include "shardweave/dtensor/tensor_impl.h"
#include "torch/nn/module.h"

namespace shardweave {
namespace {

struct Named {
  std::string fqn;
  at::Tensor tensor;
};

std::vector<Named> tensors_of(torch::nn::Module& module) {
  std::vector<Named> all;
  for (const auto& item : module.named_parameters()) all.push_back({item.key(), item.value()});
  for (const auto& item : module.named_buffers()) all.push_back({item.key(), item.value()});
  return all;
}

}  // namespace

bool matches_fqn(std::string_view pattern, std::string_view fqn) {
  if (pattern.empty()) return fqn.empty();
  if (pattern[0] == '*') {
    for (size_t skip = 0; skip <= fqn.size(); ++skip) {
      if (matches_fqn(pattern.substr(1), fqn.substr(skip))) return true;
    }
    return false;
  }
  if (pattern[0] == '{') {
    const size_t close = pattern.find('}');
    if (close == std::string_view::npos) return false;
    std::string_view choices = pattern.substr(1, close - 1);
    while (true) {
      const size_t comma = choices.find(',');
      const std::string_view choice = choices.substr(0, comma);
      if (fqn.starts_with(choice) &&
          matches_fqn(pattern.substr(close + 1), fqn.substr(choice.size())))
        return true;
      if (comma == std::string_view::npos) return false;
      choices.remove_prefix(comma + 1);
    }
  }
  return !fqn.empty() && (pattern[0] == '?' || pattern[0] == fqn[0]) &&
         matches_fqn(pattern.substr(1), fqn.substr(1));
}

void distribute_module(torch::nn::Module& module, const MeshPtr& mesh, const ParameterPlan& plan,
                       const DistributeOptions& options, std::source_location where) {
  const std::vector<Named> tensors = tensors_of(module);
  std::vector<Placements> placements;
  for (const PlanEntry& entry : plan) placements.push_back(resolve(mesh->mesh(), entry.placements));
  std::vector<bool> used(plan.size());
  std::vector<const Placements*> chosen;
  const Placements replicated(mesh->mesh().ndim());
  for (const Named& named : tensors) {
    if (is_dtensor(named.tensor)) {
      throw Error(absl::FailedPreconditionError(
          absl::StrCat("distribute_module: '", named.fqn, "' is a DTensor already")));
    }
    const Placements* choice = &replicated;
    for (size_t i = 0; i < plan.size(); ++i) {
      if (!matches_fqn(plan[i].pattern, named.fqn)) continue;
      used[i] = true;
      if (choice == &replicated) choice = &placements[i];
    }
    const absl::StatusOr<Layout> layout =
        with_dims_of(Layout(*choice), static_cast<int>(named.tensor.dim()));
    absl::Status fits = layout.ok()
                            ? validate(*layout, mesh->mesh().shape(),
                                       {named.tensor.sizes().data(), named.tensor.sizes().size()})
                            : layout.status();
    if (!fits.ok()) {
      throw Error(absl::Status(fits.code(), absl::StrCat("distribute_module: '", named.fqn,
                                                         "': ", std::string(fits.message()))));
    }
    chosen.push_back(choice);
  }
  for (size_t i = 0; i < plan.size(); ++i) {
    if (used[i]) continue;
    throw Error(absl::NotFoundError(
        absl::StrCat("distribute_module: the pattern '", plan[i].pattern,
                     "' matches no parameter or buffer; there are: ",
                     absl::StrJoin(tensors, ", ",
                                   [](std::string* out, const Named& n) { out->append(n.fqn); }))));
  }

  const c10::AutoGradMode no_grad(false);
  for (size_t i = 0; i < tensors.size(); ++i) {
    at::Tensor tensor = tensors[i].tensor;
    if (is_dtensor(tensor)) continue;  // shared with one that was converted above
    const at::Tensor sharded = distribute_tensor(tensor.detach(), mesh, *chosen[i], options, where);
    const DTensorMeta& meta = meta_of(sharded);
    convert_in_place(tensor, meta.local, meta.spec, meta.context);
  }
}

void finish_grad_sync(torch::nn::Module& module, std::source_location where) {
  finish_grad_sync(module.parameters(), where);
}

void finish_grad_sync(const std::vector<at::Tensor>& parameters, std::source_location where) {
  const c10::AutoGradMode no_grad(false);
  std::vector<at::Tensor> moving;
  std::vector<SpecRef> targets;
  std::vector<Travel> travels;
  for (const at::Tensor& parameter : parameters) {
    if (!is_dtensor(parameter) || !parameter.grad().defined()) continue;
    if (!is_dtensor(parameter.grad())) {  // a formula's own zeros, say: the same on every rank
      const MeshPtr mesh = mesh_of(parameter);
      parameter.mutable_grad() = distribute_tensor(
          parameter.grad(), mesh, Placements(mesh->mesh().ndim()), {.source = std::nullopt});
    }
    const at::Tensor& grad = parameter.grad();
    const Layout& want = meta_of(parameter).spec->layout;
    const DTensorMeta& have = meta_of(grad);
    if (have.spec->layout == want) continue;
    moving.push_back(grad);
    targets.push_back(have.context->with_layout(*have.spec, want));
    travels.push_back(travel(have, want));
  }
  run_plans(travels, {.name = "finish_grad_sync", .where = where});
  for (size_t i = 0; i < moving.size(); ++i) {
    DTensorMeta& meta = meta_of(moving[i]);
    meta.local = std::move(travels[i].local);
    meta.spec = targets[i];
  }
}

}  // namespace shardweave
