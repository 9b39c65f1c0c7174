#include "shardweave/dtensor/grad_sync.h"

#include "absl/strings/str_cat.h"
#include "shardweave/dtensor/engine/fsdp_unit.h"
#include "shardweave/dtensor/engine/grad_buckets.h"
#include "shardweave/dtensor/engine/gradient_owner.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "torch/nn/module.h"

namespace shardweave {
namespace {

using namespace dtensor_internal;

std::shared_ptr<GradBuckets> attached(const std::vector<at::Tensor>& parameters,
                                      const GradSyncOptions& options) {
  if (options.bucket_bytes < 1) {
    throw Error("GradSync", absl::InvalidArgumentError(absl::StrCat(
                                "bucket_bytes is ", options.bucket_bytes, "; wanted 1 or more")));
  }
  if (options.reduce_dtype.has_value() && !is_castable(*options.reduce_dtype)) {
    throw Error("GradSync", absl::InvalidArgumentError(absl::StrCat(
                                "reduce_dtype is ", c10::toString(*options.reduce_dtype),
                                "; wanted Half, BFloat16, Float or Double")));
  }
  std::vector<at::Tensor> sharded;
  for (const at::Tensor& parameter : unique_parameters(parameters)) {
    if (is_dtensor(parameter) && parameter.requires_grad() && parameter.is_leaf()) {
      sharded.push_back(parameter);
    }
  }
  for (const at::Tensor& parameter : sharded) {
    if (owner_of_gradient(parameter) == nullptr) continue;
    throw Error("GradSync",
                absl::FailedPreconditionError(absl::StrCat(
                    "the parameter '", std::string(parameter_of(meta_of(parameter))),
                    "' is in a ZeroPartition, which brings gradients to their owners; its stage 2 "
                    "does so during backward")));
  }
  if (!buckets_of(sharded).empty()) {
    throw Error("GradSync", absl::FailedPreconditionError(
                                "a parameter is in another GradSync, which is still there"));
  }
  auto buckets =
      std::make_shared<GradBuckets>(std::move(sharded), options.bucket_bytes, options.reduce_dtype);
  buckets->attach();
  return buckets;
}

}  // namespace

GradSync::GradSync(const torch::nn::Module& module, const GradSyncOptions& options)
    : GradSync(module.parameters(), options) {}

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
