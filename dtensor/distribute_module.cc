#include "shardweave/dtensor/distribute_module.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "c10/core/GradMode.h"
#include "shardweave/dtensor/mesh_context.h"
#include "shardweave/dtensor/redistribute.h"
#include "shardweave/dtensor/tensor_impl.h"
#include "torch/nn/module.h"

namespace shardweave {
namespace {

// Gradients of at most this many bytes in all share one collective.
constexpr int64_t kBucketBytes = 25 << 20;

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

// Gradients on their way through one all-reduce.
struct Bucket {
  MeshContext* context;
  std::vector<int> mesh_dims;
  ReduceOp op;
  at::ScalarType dtype;
  std::vector<at::Tensor> grads;
  std::vector<Layout> after;
  int64_t bytes = 0;

  bool takes(const DTensorMeta& meta, const RedistributeStep& step) const {
    return context == meta.context.get() && mesh_dims == step.mesh_dims &&
           dtype == meta.spec->dtype && op == step.before[mesh_dims[0]].reduce_op();
  }

  // All-reduces the local tensors as one; each gradient becomes a piece of the result.
  void flush() {
    if (grads.empty()) return;
    std::vector<at::Tensor> flat;
    for (const at::Tensor& grad : grads) flat.push_back(meta_of(grad).local.reshape({-1}));
    const at::Tensor all = flat.size() == 1 ? flat[0].clone() : at::cat(flat);
    throw_if_error(context->communicator(mesh_dims)
                       .all_reduce(comm_buffer(all), comm_buffer(all), op,
                                   {.timeout = absl::ZeroDuration(), .tag = "finish_grad_sync"})
                       .wait());
    int64_t offset = 0;
    for (size_t i = 0; i < grads.size(); ++i) {
      DTensorMeta& meta = meta_of(grads[i]);
      meta.local = all.narrow(0, offset, flat[i].numel()).view(meta.local.sizes());
      meta.spec = context->with_layout(*meta.spec, after[i]);
      offset += flat[i].numel();
    }
    grads.clear();
    after.clear();
    bytes = 0;
  }
};

// Moves every gradient one step towards its parameter's layout; returns the parameters that need another.
std::vector<at::Tensor> sync_one_step(const std::vector<at::Tensor>& parameters) {
  std::vector<Bucket> buckets;  // in the order of first use, the same on all ranks
  std::vector<at::Tensor> unfinished;
  for (const at::Tensor& parameter : parameters) {
    const at::Tensor& grad = parameter.grad();
    if (!is_dtensor(parameter) || !is_dtensor(grad)) continue;
    const Layout& want = meta_of(parameter).spec->layout;
    const DTensorMeta& have = meta_of(grad);
    if (have.spec->layout == want) continue;
    const RedistributePlan plan = plan_for(*have.context, *have.spec, want);
    if (plan.steps.empty()) {  // they differ only along mesh dimensions of one rank
      meta_of(grad).spec = have.context->with_layout(*have.spec, want);
      continue;
    }
    const RedistributeStep& step = plan.steps[0];
    if (step.kind != StepKind::kAllReduce) {
      parameter.mutable_grad() = redistribute(grad, want);
      continue;
    }
    auto bucket = std::find_if(buckets.begin(), buckets.end(),
                               [&](const Bucket& b) { return b.takes(have, step); });
    if (bucket == buckets.end()) {
      buckets.push_back({have.context.get(),
                         step.mesh_dims,
                         step.before[step.mesh_dims[0]].reduce_op(),
                         have.spec->dtype,
                         {},
                         {},
                         0});
      bucket = buckets.end() - 1;
    }
    // Global bytes: bucket borders must fall alike on all ranks, uneven shards or not.
    const int64_t bytes = have.spec->numel() * c10::elementSize(have.spec->dtype);
    if (bucket->bytes + bytes > kBucketBytes) bucket->flush();
    bucket->bytes += bytes;
    bucket->grads.push_back(grad);
    bucket->after.push_back(step.after);
    if (plan.steps.size() > 1) unfinished.push_back(parameter);
  }
  for (Bucket& bucket : buckets) bucket.flush();
  return unfinished;
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
                       const DistributeOptions& options) {
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
    absl::Status fits = validate(Layout(*choice), mesh->mesh().shape(),
                                 {named.tensor.sizes().data(), named.tensor.sizes().size()});
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
    const at::Tensor sharded = distribute_tensor(tensor.detach(), mesh, *chosen[i], options);
    const DTensorMeta& meta = meta_of(sharded);
    convert_in_place(tensor, meta.local, meta.spec, meta.context);
  }
}

void finish_grad_sync(torch::nn::Module& module) {
  finish_grad_sync(module.parameters());
}

void finish_grad_sync(const std::vector<at::Tensor>& parameters) {
  const c10::AutoGradMode no_grad(false);
  for (std::vector<at::Tensor> rest = parameters; !rest.empty();) rest = sync_one_step(rest);
}

}  // namespace shardweave
