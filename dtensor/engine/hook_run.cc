#include "shardweave/dtensor/engine/hook_run.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "ATen/ops/cat.h"
#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "shardweave/dtensor/engine/checksum.h"
#include "shardweave/dtensor/engine/fsdp_unit.h"
#include "shardweave/dtensor/engine/provenance.h"
#include "shardweave/dtensor/engine/tensor_impl.h"

namespace shardweave {

void GradientBucket::all_reduce(const at::Tensor& tensor) {
  run_->all_reduce(tensor);
}

void GradientBucket::wait() {
  run_->wait();
}

}  // namespace shardweave

namespace shardweave::dtensor_internal {
namespace {

std::string what_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "it threw what is no std::exception";
  }
}

}  // namespace

bool goes_through_hook(const RedistributePlan& plan, at::ScalarType dtype) {
  const std::vector<RedistributeStep>& steps = plan.steps;
  if (steps.size() != 1 || steps[0].kind != StepKind::kAllReduce || steps[0].is_local() ||
      !is_castable(dtype)) {
    return false;
  }
  return std::all_of(steps[0].mesh_dims.begin(), steps[0].mesh_dims.end(),
                     [&](int m) { return steps[0].before[m].is_partial(ReduceOp::kSum); });
}

bool share_hook(const InFlight& a, const InFlight& b) {
  return a.context == b.context && a.local.scalar_type() == b.local.scalar_type() &&
         a.local.device() == b.local.device() &&
         a.plan->plan.steps[0].mesh_dims == b.plan->plan.steps[0].mesh_dims;
}

HookRun::HookRun(GradientHook& hook, std::vector<InFlight> in_flight, size_t index,
                 const Cause& cause)
    : hook_(hook),
      in_flight_(std::move(in_flight)),
      cause_(cause),
      context_(*in_flight_[0].context),
      mesh_dims_(in_flight_[0].plan->plan.steps[0].mesh_dims) {
  if (context_.captures.under_way != nullptr) {
    throw Error(absl::FailedPreconditionError(absl::StrCat(
        "the gradient hook '", hook_.name(),
        "' works on the host, too, which takes no part in replays of a step that is captured")));
  }
  const c10::AutoGradMode no_grad(false);
  bucket_.run_ = this;
  bucket_.index = static_cast<int64_t>(index);
  bucket_.comm = context_.communicator(mesh_dims_).shared_from_this();
  std::vector<at::Tensor> parts;
  for (const InFlight& t : in_flight_) {
    parts.push_back(t.local.reshape({-1}));
    provenance_ = mix(provenance_, t.provenance);
  }
  bucket_.flat = at::cat(parts);  // of one, too, it is a copy: the gradient stays what it is
  int64_t at = 0;
  for (const InFlight& t : in_flight_) {
    bucket_.gradients.push_back(bucket_.flat.narrow(0, at, t.local.numel()).view(t.local.sizes()));
    bucket_.parameters.emplace_back(t.parameter);
    at += t.local.numel();
  }
  try {
    hook_.begin(bucket_);
  } catch (...) {
    failed();
  }
}

HookRun::~HookRun() = default;

// The other ranks wait for what this one does not send.
void HookRun::failed() {
  error_ = std::current_exception();
  bucket_.comm->abort(absl::AbortedError(
      absl::StrCat("the gradient hook '", hook_.name(), "' failed: ", what_of(error_))));
}

std::vector<InFlight> HookRun::finish(bool is_discarded) {
  const c10::AutoGradMode no_grad(false);
  bucket_.is_discarded = is_discarded;
  if (error_ == nullptr) {
    try {
      wait();
      hook_.finish(bucket_);
      wait();
    } catch (...) {
      failed();
    }
  }
  if (error_ != nullptr) std::rethrow_exception(error_);
  for (size_t i = 0; i < in_flight_.size(); ++i) {
    in_flight_[i].local = bucket_.gradients[i].clone();  // it does not keep the others' memory
  }
  bucket_.state.reset();
  return std::move(in_flight_);
}

void HookRun::all_reduce(const at::Tensor& tensor) {
  if (!tensor.defined() || is_dtensor(tensor) || !tensor.is_contiguous()) {
    throw Error("GradientBucket::all_reduce",
                absl::InvalidArgumentError("the tensor is undefined, a DTensor or not contiguous; "
                                           "wanted a plain one that is"));
  }
  CollectiveTransfer& transfer = transfers_.emplace_back();
  transfer.mesh_dims = mesh_dims_;
  transfer.input = transfer.output = tensor;
  const About about(context_, provenance_);
  Cause cause = cause_;
  const std::string argument = absl::StrCat(hook_.name());
  cause.argument = argument;
  CollectiveSpan span(context_, cause, [&]() -> Sending {
    const int64_t k = bucket_.comm->size();
    // As the planner counts it (RedistributeStep::bytes).
    const int64_t sent = 2 * (tensor.numel() - tensor.numel() / k);
    return {"all_reduce",
            transfer.mesh_dims,
            sent * static_cast<int64_t>(tensor.element_size()),
            tensor.scalar_type(),
            absl::Span<const int64_t>(tensor.sizes().data(), tensor.sizes().size()),
            Layout(),
            Layout(),
            bucket_.parameters};
  });
  under_way_.emplace_back(send(context_, transfer, cause_.name), std::move(span));
}

void HookRun::wait() {
  absl::Status status;
  for (CollectiveUnderWay& sum : under_way_) status.Update(sum.wait());
  under_way_.clear();
  transfers_.clear();
  throw_if_error(std::move(status));
}

void agree_on_hooks(MeshContext& context, std::string_view hook, const std::exception_ptr& error,
                    const Cause& cause) {
  std::optional<Difference> difference;
  try {
    difference = first_difference(context, {error == nullptr ? uint64_t{0} : uint64_t{1}}, cause);
  } catch (...) {
    if (error == nullptr) throw;
  }
  if (error != nullptr) std::rethrow_exception(error);
  if (!difference.has_value()) return;
  throw Error(cause.name,
              absl::AbortedError(absl::StrCat(
                  "the gradient hook '", std::string(hook), "' failed on another rank (of ranks ",
                  difference->ranks[0], " and ", difference->ranks[1], " one), which says why")));
}

}  // namespace shardweave::dtensor_internal
