#include "shardweave/dtensor/distribute_module.h"

#include <map>

#include "absl/container/flat_hash_map.h"
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

// A single all-reduce (sum or avg) over one mesh dimension, or none.
const RedistributeStep* single_all_reduce(const RedistributePlan& plan) {
  return plan.steps.size() == 1 && plan.steps[0].kind == StepKind::kAllReduce ? &plan.steps[0] : nullptr;
}

struct Bucket {
  std::vector<at::Tensor> grads;   // DTensors, Partial
  std::vector<SpecRef> targets;
  int64_t bytes = 0;
};

// All-reduces the local tensors of `bucket` as one.
void reduce_bucket(MeshContext& context, int mesh_dim, ReduceOp op, const Bucket& bucket) {
  std::vector<at::Tensor> flat;
  for (const at::Tensor& grad : bucket.grads) flat.push_back(meta_of(grad).local.reshape({-1}));
  at::Tensor all = flat.size() == 1 ? flat[0].clone() : at::cat(flat);
  throw_if_error(context.communicator(mesh_dim)
                     .all_reduce(comm_buffer(all), comm_buffer(all), op,
                                 {.timeout = absl::ZeroDuration(), .tag = "finish_grad_sync"})
                     .wait());
  int64_t offset = 0;
  for (size_t i = 0; i < bucket.grads.size(); ++i) {
    DTensorMeta& meta = meta_of(bucket.grads[i]);
    meta.local = all.narrow(0, offset, flat[i].numel()).view(meta.local.sizes());
    meta.spec = bucket.targets[i];
    offset += flat[i].numel();
  }
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
      if (fqn.starts_with(choice) && matches_fqn(pattern.substr(close + 1), fqn.substr(choice.size()))) return true;
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
      throw Error(absl::FailedPreconditionError(absl::StrCat("distribute_module: '", named.fqn, "' is a DTensor already")));
    }
    const Placements* choice = &replicated;
    for (size_t i = 0; i < plan.size(); ++i) {
      if (!matches_fqn(plan[i].pattern, named.fqn)) continue;
      used[i] = true;
      if (choice == &replicated) choice = &placements[i];
    }
    absl::Status fits = validate(Layout(*choice), mesh->mesh().shape(), {named.tensor.sizes().data(), named.tensor.sizes().size()});
    if (!fits.ok()) {
      throw Error(absl::Status(fits.code(), absl::StrCat("distribute_module: '", named.fqn, "': ", std::string(fits.message()))));
    }
    chosen.push_back(choice);
  }
  for (size_t i = 0; i < plan.size(); ++i) {
    if (used[i]) continue;
    throw Error(absl::NotFoundError(absl::StrCat(
        "distribute_module: the pattern '", plan[i].pattern, "' matches no parameter or buffer; there are: ",
        absl::StrJoin(tensors, ", ", [](std::string* out, const Named& n) { out->append(n.fqn); }))));
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

void finish_grad_sync(torch::nn::Module& module) { finish_grad_sync(module.parameters()); }

void finish_grad_sync(const std::vector<at::Tensor>& parameters) {
  const c10::AutoGradMode no_grad(false);
  // (mesh, mesh dimension, reduction, dtype) -> gradients on their way.
  using Key = std::tuple<MeshContext*, int, ReduceOp, at::ScalarType>;
  std::map<Key, Bucket> buckets;
  auto flush = [](const Key& key, Bucket& bucket) {
    reduce_bucket(*std::get<0>(key), std::get<1>(key), std::get<2>(key), bucket);
    bucket = {};
  };
  std::vector<Key> order;  // as first seen, the same on all ranks (a pointer's order is not)
  for (const at::Tensor& parameter : parameters) {
    at::Tensor grad = parameter.grad();
    if (!grad.defined() || !is_dtensor(parameter) || !is_dtensor(grad)) continue;
    const DTensorMeta& want = meta_of(parameter);
    const DTensorMeta& have = meta_of(grad);
    if (have.spec->layout == want.spec->layout) continue;
    MeshContext& context = *have.context;
    const RedistributePlan plan = plan_for(context, *have.spec, want.spec->layout);
    const RedistributeStep* step = single_all_reduce(plan);
    if (step == nullptr) {
      parameter.mutable_grad() = redistribute(grad, want.spec->layout);
      continue;
    }
    const int mesh_dim = step->mesh_dims[0];
    const Key key{&context, mesh_dim, have.spec->layout[mesh_dim].reduce_op(), have.spec->dtype};
    auto [it, inserted] = buckets.try_emplace(key);
    if (inserted) order.push_back(key);
    Bucket& bucket = it->second;
    // Global bytes: bucket borders must fall alike on all ranks, uneven shards or not.
    const int64_t bytes = have.spec->numel() * c10::elementSize(have.spec->dtype);
    if (!bucket.grads.empty() && bucket.bytes + bytes > kBucketBytes) flush(key, bucket);
    bucket.bytes += bytes;
    bucket.grads.push_back(grad);
    bucket.targets.push_back(context.with_layout(*have.spec, want.spec->layout));
  }
  for (const Key& key : order) {
    Bucket& bucket = buckets[key];
    if (!bucket.grads.empty()) flush(key, bucket);
  }
}

}  // namespace shardweave
