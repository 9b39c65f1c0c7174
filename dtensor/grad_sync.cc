#include "shardweave/dtensor/grad_sync.h"

#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "shardweave/dtensor/engine/checksum.h"
#include "shardweave/dtensor/engine/fsdp_unit.h"
#include "shardweave/dtensor/engine/grad_buckets.h"
#include "shardweave/dtensor/engine/gradient_owner.h"
#include "shardweave/dtensor/engine/members.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/provenance.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "torch/nn/module.h"

namespace shardweave {
namespace {

using namespace dtensor_internal;

constexpr char kGradSync[] = "GradSync";

// Whose gradients it is to bring.
std::vector<at::Tensor> sharded_leaves(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> sharded;
  for (const at::Tensor& parameter : unique_parameters(parameters)) {
    if (is_dtensor(parameter) && parameter.requires_grad() && parameter.is_leaf()) {
      sharded.push_back(parameter);
    }
  }
  return sharded;
}

std::vector<at::Tensor> named_parameters_of(const torch::nn::Module& module) {
  name_members(members_of(module));
  return module.parameters();
}

std::shared_ptr<GradBuckets> attached(const std::vector<at::Tensor>& parameters,
                                      const GradSyncOptions& options) {
  std::vector<at::Tensor> sharded = sharded_leaves(parameters);
  if (options.hook == nullptr || sharded.empty()) {
    check_grad_sync(parameters, options);
  } else {
    MeshContext& context = *meta_of(sharded[0]).context;
    Agreement agreement(context, {.name = kGradSync});
    check_grad_sync(parameters, options);
    if (const std::optional<Difference> differs = agreement.reach({options_checksum(options)})) {
      throw Error(kGradSync, absl::InvalidArgumentError(absl::StrCat(
                                 "options (the gradient hook is '", options.hook->name(),
                                 "' here) are not the same on ranks ", differs->ranks[0], " and ",
                                 differs->ranks[1], "; wanted the same everywhere")));
    }
  }
  auto buckets = std::make_shared<GradBuckets>(std::move(sharded), options.bucket_bytes,
                                               options.reduce_dtype, options.hook);
  buckets->attach();
  return buckets;
}

}  // namespace

void dtensor_internal::check_grad_sync(const std::vector<at::Tensor>& parameters,
                                       const GradSyncOptions& options) {
  const auto refuse_sync = [](absl::StatusCode code, const std::string& why) {
    throw Error(kGradSync, absl::Status(code, why));
  };
  if (options.bucket_bytes < 1) {
    refuse_sync(absl::StatusCode::kInvalidArgument,
                absl::StrCat("bucket_bytes is ", options.bucket_bytes, "; wanted 1 or more"));
  }
  if (options.reduce_dtype.has_value() && !is_castable(*options.reduce_dtype)) {
    refuse_sync(absl::StatusCode::kInvalidArgument,
                absl::StrCat("reduce_dtype is ", c10::toString(*options.reduce_dtype),
                             "; wanted Half, BFloat16, Float or Double"));
  }
  const std::vector<at::Tensor> sharded = sharded_leaves(parameters);
  std::vector<std::string> names;
  for (const at::Tensor& parameter : sharded) {
    const std::string name(parameter_of(meta_of(parameter)));
    if (owner_of_gradient(parameter) != nullptr) {
      refuse_sync(absl::StatusCode::kFailedPrecondition,
                  absl::StrCat("the parameter '", name,
                               "' is in a ZeroPartition, which brings gradients to their owners; "
                               "its stage 2 does so during backward"));
    }
    if (options.hook == nullptr) continue;
    names.push_back(name);
    if (in_unit(parameter) != nullptr) {
      refuse_sync(absl::StatusCode::kFailedPrecondition,
                  absl::StrCat("the parameter '", name,
                               "' is fully sharded: its unit brings its gradient, which no hook of "
                               "a GradSync would see"));
    }
    if (meta_of(parameter).context != meta_of(sharded[0]).context) {
      refuse_sync(absl::StatusCode::kInvalidArgument,
                  absl::StrCat("the parameter '", name, "' is on another mesh, ",
                               describe(parameter), "; wanted one mesh for all with a hook"));
    }
  }
  check_hook_names(names);
  if (!buckets_of(sharded).empty()) {
    refuse_sync(absl::StatusCode::kFailedPrecondition,
                "a parameter is in another GradSync, which is still there");
  }
}

void dtensor_internal::check_hook_names(const std::vector<std::string>& names) {
  std::set<std::string> known;
  for (const std::string& name : names) {
    if (name.empty() || known.insert(name).second) continue;
    throw Error(kGradSync, absl::InvalidArgumentError(absl::StrCat(
                               "two parameters are called '", name,
                               "': hooks tell them by their names. Register what is trained "
                               "together in one module, before it is distributed")));
  }
}

uint64_t dtensor_internal::options_checksum(const GradSyncOptions& options) {
  uint64_t sum = mix(1, static_cast<uint64_t>(options.bucket_bytes));
  sum = checksum(sum, options.reduce_dtype.has_value() ? c10::toString(*options.reduce_dtype) : "");
  return checksum(sum, options.hook == nullptr ? "" : options.hook->name());
}

GradSync::GradSync(const torch::nn::Module& module, const GradSyncOptions& options)
    : GradSync(named_parameters_of(module), options) {}

GradSync::GradSync(const std::vector<at::Tensor>& parameters, const GradSyncOptions& options)
    : buckets_(attached(parameters, options)) {}

GradSync::~GradSync() = default;

void GradSync::discard() {
  buckets_->discard();
}

GradSync::NoSync::NoSync(GradSync& sync) : buckets_(sync.buckets_) {
  buckets_->pause();
}

GradSync::NoSync::~NoSync() {
  buckets_->resume();
}

int64_t GradSync::num_buckets() const {
  return buckets_->counts().buckets;
}

int64_t GradSync::left_in_backward() const {
  return buckets_->counts().left_in_backward;
}

}  // namespace shardweave
