#include "shardweave/dtensor/clip_grad_norm.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "ATen/ops/_foreach_mul.h"
#include "ATen/ops/_foreach_norm.h"
#include "ATen/ops/stack.h"
#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "shardweave/dtensor/detour.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/fused.h"
#include "shardweave/dtensor/local_part.h"
#include "shardweave/dtensor/mesh_context.h"
#include "shardweave/dtensor/observer.h"
#include "shardweave/dtensor/provenance.h"
#include "shardweave/dtensor/redistribute.h"
#include "shardweave/dtensor/tensor_impl.h"

namespace shardweave {
namespace {

using namespace dtensor_internal;

constexpr char kName[] = "clip_grad_norm";

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
    add(real, at::kDouble);
    add(complex, at::kComplexDouble);
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
    if (parts.empty()) return;
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

// Gradients of one mesh that are cut by the same mesh dimensions.
struct Group {
  std::shared_ptr<MeshContext> context;
  std::vector<int> mesh_dims;
  std::vector<at::Tensor> parts;
};

// By the mesh dimensions that cut them.
class Groups {
 public:
  void add(const std::shared_ptr<MeshContext>& context, const Layout& layout, at::Tensor part) {
    std::vector<int> dims = cutting_dims(*context, layout);
    auto group = std::find_if(groups_.begin(), groups_.end(), [&](const Group& g) {
      return g.context.get() == context.get() && g.mesh_dims == dims;
    });
    if (group == groups_.end()) {
      group = groups_.insert(group, {context, std::move(dims), {}});
    }
    group->parts.push_back(std::move(part));
  }
  const std::vector<Group>& all() const { return groups_; }

 private:
  static std::vector<int> cutting_dims(const MeshContext& context, const Layout& layout) {
    std::vector<int> dims;
    for (int m = 0; m < layout.mesh_ndim(); ++m) {
      if (layout[m].is_shard() && context.mesh().size(m) > 1) dims.push_back(m);
    }
    return dims;
  }

  std::vector<Group> groups_;
};

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

void multiply(const std::vector<at::Tensor>& grads, double factor) {
  check_written_together(grads, kName);
  std::vector<at::Tensor> parts;
  for (const at::Tensor& grad : grads) parts.push_back(part_to_write(grad, kName));
  if (!parts.empty()) at::_foreach_mul_(parts, factor);
  for (const at::Tensor& grad : grads) part_written(grad, kName);
}

}  // namespace

double clip_grad_norm(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type,
                      bool error_if_nonfinite, std::source_location where) {
  if (!(norm_type > 0)) {
    throw Error(kName, absl::InvalidArgumentError(
                           absl::StrCat("the norm type is ", norm_type, " (wanted: above 0)")));
  }
  if (!(max_norm >= 0)) {  // a negative one would turn the gradients around
    throw Error(kName, absl::InvalidArgumentError(
                           absl::StrCat("max_norm is ", max_norm, " (wanted: 0 or more)")));
  }
  const c10::AutoGradMode no_grad(false);
  const Cause cause = {.name = kName, .where = where};
  std::vector<at::Tensor> grads = gradients_of(unique_parameters(parameters));
  std::vector<at::Tensor> plain;
  Groups groups;
  std::vector<const DTensorMeta*> partial;
  std::vector<Travel> travels;  // of the Partial ones to where they are whole
  for (const at::Tensor& grad : grads) {
    if (!is_dtensor(grad)) {
      plain.push_back(grad);
      continue;
    }
    const DTensorMeta& meta = checked_meta(grad, kName);
    settle_plain_tensors(*meta.context);  // the norm is a number that everybody sees
    if (has_partial(meta.spec->layout)) {
      partial.push_back(&meta);
      travels.push_back(travel(meta, gradient_layout(meta.spec->layout)));
    } else {
      groups.add(meta.context, meta.spec->layout, meta.local);
    }
  }
  run_plans(travels, cause);
  uint64_t all = 0;
  for (const at::Tensor& grad : grads) {
    if (is_dtensor(grad)) all = mix(all, provenance_of(meta_of(grad)));
  }
  for (size_t i = 0; i < partial.size(); ++i) {
    groups.add(partial[i]->context, gradient_layout(partial[i]->spec->layout), travels[i].local);
  }
  Sum total(norm_type);
  total.add(plain);
  for (const Group& group : groups.all()) {
    Sum sum(norm_type);
    sum.add(group.parts);
    const About about(*group.context, all);
    if (!group.mesh_dims.empty()) sum.reduce(*group.context, group.mesh_dims, cause);
    total.add_power(sum.power());
  }

  const double norm = total.norm();
  if (error_if_nonfinite && !std::isfinite(norm)) {
    throw Error(kName, absl::OutOfRangeError(absl::StrCat("the norm of the gradients is ", norm)));
  }
  if (const double factor = max_norm / (norm + 1e-6); factor < 1) {
    // One that two parameters have is scaled once.
    grads = unique_parameters(grads);
    const auto is_partial = [](const at::Tensor& grad) {
      return is_dtensor(grad) && has_partial(meta_of(grad).spec->layout);
    };
    const auto whole = std::stable_partition(grads.begin(), grads.end(), is_partial);
    for (auto grad = grads.begin(); grad != whole; ++grad)
      grad->mul_(factor);  // a product is not linear
    multiply({whole, grads.end()}, factor);
  }
  return norm;
}

}  // namespace shardweave
