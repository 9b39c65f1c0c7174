#include "shardweave/dtensor/clip_grad_norm.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "ATen/ops/linalg_vector_norm.h"
#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "shardweave/dtensor/mesh_context.h"
#include "shardweave/dtensor/observer.h"
#include "shardweave/dtensor/redistribute.h"
#include "shardweave/dtensor/tensor_impl.h"

namespace shardweave {
namespace {

// What this rank's parts of some tensors add to the norm: the sum of the powers of their elements,
// or the largest.
class Sum {
 public:
  explicit Sum(double norm_type) : norm_type_(norm_type) {}

  void add(const at::Tensor& part) {
    if (part.numel() == 0) return;
    const double norm = at::linalg_vector_norm(part, norm_type_, at::OptionalIntArrayRef(), false,
                                               part.is_complex() ? at::kComplexDouble : at::kDouble)
                            .item<double>();
    add_power(std::isinf(norm_type_) ? norm : std::pow(norm, norm_type_));
  }
  void add_power(double power) {
    if (std::isinf(norm_type_)) {
      power_ = std::isnan(power) ? power : std::max(power_, power);
    } else {
      power_ += power;
    }
  }
  // Over all ranks of `comm`, whose parts are different ones.
  void reduce(MeshContext& context, const std::vector<int>& mesh_dims, const Cause& cause) {
    Communicator& comm = context.communicator(mesh_dims);
    const CollectiveSpan span(context, cause, [&]() -> Sending {
      const int64_t bytes = comm.size() > 1 ? 2 * sizeof(power_) : 0;
      return {"all_reduce", mesh_dims, bytes, at::kDouble, {}, Layout(), Layout()};
    });
    throw_if_error(comm.all_reduce(Buffer::of(&power_, 1), Buffer::of(&power_, 1),
                                   std::isinf(norm_type_) ? ReduceOp::kMax : ReduceOp::kSum,
                                   {.timeout = absl::ZeroDuration(), .tag = cause.name})
                       .wait());
  }
  double power() const { return power_; }
  double norm() const { return std::isinf(norm_type_) ? power_ : std::pow(power_, 1 / norm_type_); }

 private:
  double norm_type_;
  double power_ = 0;
};

// Gradients of one mesh that are cut by the same mesh dimensions.
struct Group {
  std::shared_ptr<MeshContext> context;
  std::vector<int> mesh_dims;
  Sum sum;
};

std::vector<int> cutting_dims(const MeshContext& context, const Layout& layout) {
  std::vector<int> dims;
  for (int m = 0; m < layout.mesh_ndim(); ++m) {
    if (layout[m].is_shard() && context.mesh().size(m) > 1) dims.push_back(m);
  }
  return dims;
}

}  // namespace

double clip_grad_norm(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type,
                      bool error_if_nonfinite, std::source_location where) {
  if (!(norm_type > 0)) {
    throw Error(absl::InvalidArgumentError(
        absl::StrCat("clip_grad_norm: the norm type is ", norm_type, " (wanted: above 0)")));
  }
  const c10::AutoGradMode no_grad(false);
  const Cause cause = {.name = "clip_grad_norm", .where = where};
  Sum total(norm_type);  // of plain gradients, then of all
  std::vector<Group> groups;
  for (const at::Tensor& parameter : parameters) {
    at::Tensor grad = parameter.grad();
    if (!grad.defined()) continue;
    if (!is_dtensor(grad)) {
      total.add(grad);
      continue;
    }
    grad = redistributed(grad, gradient_layout(meta_of(grad).spec->layout), cause);
    const DTensorMeta& meta = meta_of(grad);
    std::vector<int> dims = cutting_dims(*meta.context, meta.spec->layout);
    auto group = std::find_if(groups.begin(), groups.end(), [&](const Group& g) {
      return g.context.get() == meta.context.get() && g.mesh_dims == dims;
    });
    if (group == groups.end()) {
      group = groups.insert(group, {meta.context, std::move(dims), Sum(norm_type)});
    }
    group->sum.add(meta.local);
  }
  for (Group& group : groups) {
    if (!group.mesh_dims.empty()) group.sum.reduce(*group.context, group.mesh_dims, cause);
    total.add_power(group.sum.power());
  }

  const double norm = total.norm();
  if (error_if_nonfinite && !std::isfinite(norm)) {
    throw Error(
        absl::OutOfRangeError(absl::StrCat("clip_grad_norm: the norm of the gradients is ", norm)));
  }
  const double factor = max_norm / (norm + 1e-6);
  if (factor < 1) {
    for (const at::Tensor& parameter : parameters) {
      if (at::Tensor grad = parameter.grad(); grad.defined()) grad.mul_(factor);
    }
  }
  return norm;
}

}  // namespace shardweave
