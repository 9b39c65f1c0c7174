#include "shardweave/dtensor/clip_grad_norm.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "ATen/ops/_foreach_mul.h"
#include "ATen/ops/_foreach_norm.h"
#include "ATen/ops/stack.h"
#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/engine/detour.h"
#include "shardweave/dtensor/engine/fused.h"
#include "shardweave/dtensor/engine/local_part.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/provenance.h"
#include "shardweave/dtensor/engine/redistribute.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "shardweave/dtensor/observe/observer.h"

namespace shardweave {
namespace {

using namespace dtensor_internal;

constexpr char kClipGradNorm[] = "clip_grad_norm";

// LibTorch's operators on lists want one device.
std::vector<std::vector<at::Tensor>> by_device(const std::vector<at::Tensor>& tensors) {
  std::vector<std::vector<at::Tensor>> groups;
  for (const at::Tensor& tensor : tensors) {
    const auto is_here = [&](const auto& group) { return group[0].device() == tensor.device(); };
    const auto group = std::find_if(groups.begin(), groups.end(), is_here);
    if (group == groups.end()) {
      groups.push_back({tensor});
    } else {
      group->push_back(tensor);
    }
  }
  return groups;
}

// What this rank's parts of some tensors add to the norm: the sum of the powers of their elements,
// or the largest.
class Sum {
 public:
  explicit Sum(double norm_type) : norm_type_(norm_type) {}

  void add(const std::vector<at::Tensor>& parts) {
    std::vector<at::Tensor> real, complex;
    for (const at::Tensor& part : parts) {
      if (part.numel() > 0) (part.is_complex() ? complex : real).push_back(part);
    }
    for (const auto& together : by_device(real)) add(together, at::kDouble);
    for (const auto& together : by_device(complex)) add(together, at::kComplexDouble);
  }
  void add_power(double power) {
    if (std::isinf(norm_type_)) {
      power_ = std::isnan(power) ? power : std::max(power_, power);
    } else {
      power_ += power;
    }
  }
  // Over all ranks along `mesh_dims`, whose parts are different ones.
  void reduce(MeshContext& context, const std::vector<int>& mesh_dims, const Cause& cause) {
    Communicator& comm = context.communicator(mesh_dims);
    const CollectiveSpan span(context, cause, [&]() -> Sending {
      const int64_t bytes = comm.size() > 1 ? 2 * sizeof(power_) : 0;
      return {"all_reduce", mesh_dims, bytes, at::kDouble, {}, Layout(), Layout()};
    });
    throw_if_error(comm.all_reduce(Buffer::of(&power_, 1), Buffer::of(&power_, 1),
                                   std::isinf(norm_type_) ? ReduceOp::kMax : ReduceOp::kSum,
                                   {.timeout = absl::ZeroDuration(),
                                    .tag = cause.name,
                                    .fingerprint = fingerprint(context)})
                       .wait());
  }
  double power() const { return power_; }
  double norm() const { return std::isinf(norm_type_) ? power_ : std::pow(power_, 1 / norm_type_); }

 private:
  void add(const std::vector<at::Tensor>& parts, at::ScalarType dtype) {
    const at::Tensor norms =
        at::stack(at::_foreach_norm(parts, norm_type_, dtype)).cpu();  // one copy for all
    const auto* values = norms.const_data_ptr<double>();
    for (int64_t i = 0; i < norms.numel(); ++i) {
      add_power(std::isinf(norm_type_) ? values[i] : std::pow(values[i], norm_type_));
    }
  }

  double norm_type_;
  double power_ = 0;
};

// The gradients of one mesh.
class OfMesh {
 public:
  explicit OfMesh(std::shared_ptr<MeshContext> context) : context_(std::move(context)) {}

  const std::shared_ptr<MeshContext>& context() const { return context_; }
  void add(const Layout& layout, at::Tensor part) { parts_.push_back({layout, std::move(part)}); }

  // What they add to the norm. Of an element that several ranks have, the first of them counts it, so
  // that one number per rank is sent, however the gradients are cut.
  double power(double norm_type, uint64_t provenance, const Cause& cause) const {
    std::vector<int> cutting;
    for (int m = 0; m < context_->mesh().ndim(); ++m) {
      const auto is_cut = [m](const Part& p) { return p.layout[m].is_shard(); };
      if (context_->mesh().size(m) > 1 && std::any_of(parts_.begin(), parts_.end(), is_cut)) {
        cutting.push_back(m);
      }
    }
    std::vector<at::Tensor> counted;
    for (const Part& p : parts_) {
      const bool first = std::all_of(cutting.begin(), cutting.end(), [&](int m) {
        return p.layout[m].is_shard() || context_->coordinate()[m] == 0;
      });
      if (first) counted.push_back(p.local);
    }
    Sum sum(norm_type);
    context_->before_host_reads();
    sum.add(counted);
    const About about(*context_, provenance);
    if (!cutting.empty()) sum.reduce(*context_, cutting, cause);
    return sum.power();
  }

 private:
  struct Part {
    Layout layout;
    at::Tensor local;
  };

  std::shared_ptr<MeshContext> context_;
  std::vector<Part> parts_;
};

OfMesh& of_mesh(std::vector<OfMesh>& meshes, const std::shared_ptr<MeshContext>& context) {
  const auto same = [&](const OfMesh& mesh) { return mesh.context() == context; };
  auto mesh = std::find_if(meshes.begin(), meshes.end(), same);
  if (mesh == meshes.end()) mesh = meshes.insert(mesh, OfMesh(context));
  return *mesh;
}

bool has_partial(const Layout& layout) {
  return std::any_of(layout.placements().begin(), layout.placements().end(),
                     [](const Placement& p) { return p.is_partial(); });
}

// Of the parameters that have one; each once.
std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> grads;
  for (const at::Tensor& parameter : parameters) {
    if (at::Tensor grad = parameter.grad(); grad.defined()) grads.push_back(std::move(grad));
  }
  return grads;
}

// `by`: what the factor is made of, beside the gradients.
void multiply(const std::vector<at::Tensor>& grads, double factor, uint64_t by) {
  check_written_together(grads, kClipGradNorm);
  std::vector<at::Tensor> parts;
  for (const at::Tensor& grad : grads) parts.push_back(part_to_write(grad, kClipGradNorm));
  for (const auto& together : by_device(parts)) at::_foreach_mul_(together, factor);
  for (const at::Tensor& grad : grads) part_written(grad, kClipGradNorm, by);
}

}  // namespace

double clip_grad_norm(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type,
                      bool error_if_nonfinite, std::source_location where) {
  if (!(norm_type > 0)) {
    throw Error(kClipGradNorm, absl::InvalidArgumentError(absl::StrCat(
                                   "the norm type is ", norm_type, " (wanted: above 0)")));
  }
  if (!(max_norm >= 0)) {  // a negative one would turn the gradients around
    throw Error(kClipGradNorm, absl::InvalidArgumentError(
                                   absl::StrCat("max_norm is ", max_norm, " (wanted: 0 or more)")));
  }
  const c10::AutoGradMode no_grad(false);
  const Cause cause = {.name = kClipGradNorm, .where = where};
  std::vector<at::Tensor> grads = gradients_of(unique_parameters(parameters));
  std::vector<at::Tensor> plain;
  std::vector<OfMesh> meshes;
  std::vector<const DTensorMeta*> partial;
  std::vector<InFlight> in_flight;  // of the Partial ones to where they are whole
  for (const at::Tensor& grad : grads) {
    if (!is_dtensor(grad)) {
      plain.push_back(grad);
      continue;
    }
    const DTensorMeta& meta = checked_meta(grad, kClipGradNorm);
    settle_plain_tensors(*meta.context);  // the norm is a number that everybody sees
    if (has_partial(meta.spec->layout)) {
      partial.push_back(&meta);
      in_flight.push_back(moving_to(meta, gradient_layout(meta.spec->layout)));
    } else {
      of_mesh(meshes, meta.context).add(meta.spec->layout, meta.local());
    }
  }
  run_plans(in_flight, cause);
  // (mix() of a number with itself is 0.)
  const uint64_t by =
      mix(mix(1, std::bit_cast<uint64_t>(max_norm)), std::bit_cast<uint64_t>(norm_type));
  uint64_t all = by;
  for (const at::Tensor& grad : grads) {
    if (is_dtensor(grad)) all = mix(all, provenance_of(meta_of(grad)));
  }
  for (size_t i = 0; i < partial.size(); ++i) {
    of_mesh(meshes, partial[i]->context)
        .add(gradient_layout(partial[i]->spec->layout), in_flight[i].local);
  }
  Sum total(norm_type);
  total.add(plain);
  for (const OfMesh& mesh : meshes) total.add_power(mesh.power(norm_type, all, cause));

  const double norm = total.norm();
  if (error_if_nonfinite && !std::isfinite(norm)) {
    throw Error(kClipGradNorm,
                absl::OutOfRangeError(absl::StrCat("the norm of the gradients is ", norm)));
  }
  // A factor that is no number, too: all gradients then are none, as with LibTorch.
  if (const double factor = max_norm / (norm + 1e-6); std::isfinite(max_norm) && !(factor >= 1)) {
    // One that two parameters have is scaled once.
    grads = unique_parameters(grads);
    const auto is_partial = [](const at::Tensor& grad) {
      return is_dtensor(grad) && has_partial(meta_of(grad).spec->layout);
    };
    const auto whole = std::stable_partition(grads.begin(), grads.end(), is_partial);
    for (auto grad = grads.begin(); grad != whole; ++grad)
      grad->mul_(factor);  // a product is not linear
    multiply({whole, grads.end()}, factor, by);
  }
  return norm;
}

}  // namespace shardweave
