#include "shardweave/modules/optim/grad_scaler.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <string>
#include <utility>

#include "ATen/ops/_amp_foreach_non_finite_check_and_unscale.h"
#include "ATen/ops/full.h"
#include "ATen/ops/zeros.h"
#include "c10/core/GradMode.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/engine/adopt.h"
#include "shardweave/dtensor/engine/detour.h"
#include "shardweave/dtensor/engine/local_part.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/provenance.h"
#include "shardweave/dtensor/engine/redistribute.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/dtensor/observe/observer.h"

namespace shardweave {
namespace {

using namespace dtensor_internal;

constexpr char kGradScaler[] = "GradScaler";

[[noreturn]] void refuse(absl::StatusCode code, const std::string& why) {
  throw Error(kGradScaler, absl::Status(code, why));
}

void check(const char* name, double value, bool is_right, const char* wanted) {
  if (is_right && std::isfinite(value)) return;
  refuse(absl::StatusCode::kInvalidArgument, str_cat(name, " is ", value, "; wanted ", wanted));
}

void check_gradient(size_t i, const at::Tensor& grad) {
  if (grad.layout() != at::kStrided) {
    refuse(absl::StatusCode::kFailedPrecondition,
           str_cat("parameter ", i, " has a sparse gradient; wanted a dense one"));
  }
  if (!grad.is_floating_point()) {
    refuse(absl::StatusCode::kFailedPrecondition,
           str_cat("parameter ", i, " has a gradient of type ", c10::toString(grad.scalar_type()),
                   "; wanted a floating-point one"));
  }
  if (!is_dtensor(grad) || !meta_of(grad).spec->layout.has_partial()) return;
  Error error(kGradScaler,
              absl::FailedPreconditionError(str_cat(
                  "the gradient of parameter ", i, " lies ", meta_of(grad).spec->layout.to_string(),
                  "; the gradients are to be synchronized before the step")));
  error.add_context("finish_grad_sync() does that");
  throw error;
}

// Multiplies them. For each of their devices a number there, above 0 if one of them was not finite:
// nobody has waited for it.
std::vector<at::Tensor> multiply(const std::vector<at::Tensor>& parts, double factor) {
  std::vector<at::Tensor> each_found;
  std::vector<at::Tensor> rest = parts;
  while (!rest.empty()) {  // kernels take one device and dtype
    const auto alike = [&, first = rest[0]](const at::Tensor& t) {
      return t.device() == first.device() && t.scalar_type() == first.scalar_type();
    };
    const auto others = std::stable_partition(rest.begin(), rest.end(), alike);
    const std::vector<at::Tensor> batch(rest.begin(), others);
    rest.erase(rest.begin(), others);
    const at::TensorOptions options = at::TensorOptions(at::kFloat).device(batch[0].device());
    const auto is_there = [&](const at::Tensor& t) { return t.device() == batch[0].device(); };
    auto found = std::find_if(each_found.begin(), each_found.end(), is_there);
    if (found == each_found.end()) found = each_found.insert(found, at::zeros({1}, options));
    // It sets what it finds, and takes nothing back.
    at::_amp_foreach_non_finite_check_and_unscale_(batch, *found, at::full({1}, factor, options));
  }
  return each_found;
}

// One read of each device.
bool are_finite(const std::vector<at::Tensor>& each_found) {
  return std::all_of(each_found.begin(), each_found.end(),
                     [](const at::Tensor& found) { return found.item<float>() == 0; });
}

// What a rank knows of its gradients; the largest counts.
enum class Found : uint8_t { kFinite, kNotFinite, kRefused };

// What any rank of a mesh has found.
Found agreed(MeshContext& context, Found mine, uint64_t provenance, const Cause& cause) {
  context.before_host_reads();  // `mine` may be of numbers that an error has spoilt
  if (context.mesh().size() <= 1) return mine;
  std::vector<int> all_dims;
  for (int m = 0; m < context.mesh().ndim(); ++m) all_dims.push_back(m);
  auto found = static_cast<float>(mine);
  Communicator& comm = context.communicator(all_dims);
  const About about(context, provenance);
  const CollectiveSpan span(context, cause, [&]() -> Sending {
    return {"all_reduce", all_dims, 2 * sizeof(found), at::kFloat, {}, Layout(), Layout()};
  });
  const Buffer buffer = Buffer::of(&found, 1);
  throw_if_error(comm.all_reduce(buffer, buffer, ReduceOp::kMax,
                                 {.timeout = absl::ZeroDuration(),
                                  .tag = cause.name,
                                  .fingerprint = fingerprint(context)})
                     .wait());
  return static_cast<Found>(found);
}

}  // namespace

GradScaler::GradScaler(const GradScalerOptions& options)
    : options_(options), scale_(options.init_scale) {
  check("init_scale", options.init_scale, options.init_scale > 0, "above 0");
  check("growth_factor", options.growth_factor, options.growth_factor > 1, "above 1");
  check("backoff_factor", options.backoff_factor,
        options.backoff_factor > 0 && options.backoff_factor < 1, "above 0, below 1");
  check("growth_interval", static_cast<double>(options.growth_interval),
        options.growth_interval >= 1, "1 or more");
}

void GradScaler::check_gradients(const std::vector<at::Tensor>& parameters) const {
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!parameters[i].defined()) {
      refuse(absl::StatusCode::kInvalidArgument, str_cat("parameter ", i, " is undefined"));
    }
    if (parameters_.contains(parameters[i].unsafeGetTensorImpl())) {
      refuse(absl::StatusCode::kFailedPrecondition,
             str_cat("the gradient of parameter ", i,
                     " has been unscaled already, since the scale was last updated"));
    }
    if (parameters[i].grad().defined()) check_gradient(i, parameters[i].grad());
  }
}

at::Tensor GradScaler::scale(const at::Tensor& loss) const {
  if (!loss.defined()) refuse(absl::StatusCode::kInvalidArgument, "the loss is undefined");
  return loss * scale_;
}

bool GradScaler::unscale(const std::vector<at::Tensor>& parameters, std::source_location where) {
  const c10::AutoGradMode no_grad(false);
  const Cause cause = {.name = kGradScaler, .where = where};
  const std::vector<at::Tensor> each = unique_parameters(parameters);
  std::vector<at::Tensor> grads;
  std::vector<std::shared_ptr<MeshContext>> meshes;
  uint64_t provenance = 0;
  for (const at::Tensor& parameter : each) {
    // A rank without a gradient takes part: its mesh is the parameter's.
    if (!parameter.defined()) continue;
    if (is_dtensor(parameter)) {
      const auto& context = meta_of(parameter).context;
      if (std::find(meshes.begin(), meshes.end(), context) == meshes.end()) {
        meshes.push_back(context);
      }
    }
    const at::Tensor& grad = parameter.grad();
    if (!grad.defined()) continue;
    grads.push_back(grad);
    if (is_dtensor(grad)) provenance = mix(provenance, provenance_of(meta_of(grad)));
  }
  for (const auto& mesh : meshes) settle_plain_tensors(*mesh);  // the answer is seen by everybody
  grads = unique_parameters(grads);  // one that two parameters have is divided once
  std::vector<at::Tensor> parts;
  Found found = Found::kFinite;
  std::exception_ptr error;  // of this rank; the others wait to hear of it
  try {
    check_gradients(each);
    check_written_together(grads, kGradScaler);
    for (const at::Tensor& grad : grads) {
      at::Tensor part = part_to_write(grad, kGradScaler);
      if (part.numel() > 0) parts.push_back(std::move(part));
    }
    // By one, which leaves them as they are: nothing is divided before all ranks can.
    if (!are_finite(multiply(parts, 1))) found = Found::kNotFinite;
  } catch (...) {
    error = std::current_exception();
    found = Found::kRefused;
    provenance = kRanksOwn;  // what the others have may come from elsewhere
  }
  try {
    for (const auto& mesh : meshes) found = agreed(*mesh, found, provenance, cause);
    // What was found on the last mesh, the others learn.
    for (size_t m = 0; m + 1 < meshes.size(); ++m) {
      found = agreed(*meshes[m], found, provenance, cause);
    }
  } catch (...) {
    if (error == nullptr) throw;
  }
  if (error != nullptr) std::rethrow_exception(error);
  if (found == Found::kRefused) {
    refuse(absl::StatusCode::kFailedPrecondition, "it was refused on another rank, which says why");
  }
  multiply(parts, 1 / scale_);
  for (const at::Tensor& grad : grads) part_written(grad, kGradScaler);
  for (const at::Tensor& parameter : each) {
    parameters_.emplace(parameter.unsafeGetTensorImpl(), parameter.getIntrusivePtr());
  }
  is_unscaled_ = true;
  found_inf_ = found_inf_ || found == Found::kNotFinite;
  return found == Found::kFinite;
}

double GradScaler::update() {
  if (!is_unscaled_) {
    refuse(
        absl::StatusCode::kFailedPrecondition,
        "nothing was unscaled since the scale was last updated: nothing is known of the gradients");
  }
  const double before = scale_;
  if (found_inf_) {
    scale_ = std::max(scale_ * options_.backoff_factor, double{std::numeric_limits<float>::min()});
    growth_tracker_ = 0;
  } else if (++growth_tracker_ >= options_.growth_interval) {
    // Not beyond what a loss of 32 bits can be multiplied by.
    const double grown = scale_ * options_.growth_factor;
    if (grown <= std::numeric_limits<float>::max()) scale_ = grown;
    growth_tracker_ = 0;
  }
  is_unscaled_ = found_inf_ = false;
  parameters_.clear();
  return scale_ / before;
}

void GradScaler::set_state(double scale, int64_t growth_tracker) {
  check("scale", scale, scale > 0, "above 0");
  check("growth_tracker", static_cast<double>(growth_tracker), growth_tracker >= 0, "0 or more");
  scale_ = scale;
  growth_tracker_ = growth_tracker;
  is_unscaled_ = found_inf_ = false;
  parameters_.clear();
}

}  // namespace shardweave
