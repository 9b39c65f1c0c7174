// Adafactor (Shazeer and Stern, 2018; torch.optim.Adafactor's formulas) on parts of parameters.
//
// What rows, columns and whole parameters add up to is summed over the ranks that have parts of them,
// of all parameters in one all-reduce for each mesh dimension. That happens twice: the root mean
// square of an update needs the means first.
#include <algorithm>
#include <cmath>
#include <limits>

#include "ATen/ops/cat.h"
#include "ATen/ops/linalg_vector_norm.h"
#include "shardweave/dtensor/engine/provenance.h"
#include "shardweave/dtensor/observe/observer.h"
#include "shardweave/modules/optim/update.h"

namespace shardweave::optim_internal {
namespace {

using namespace dtensor_internal;

// Numbers of which several ranks have a summand each.
class Sums {
 public:
  Sums(MeshContext* context, uint64_t provenance) : context_(context), provenance_(provenance) {}

  // To be summed over the ranks along `mesh_dims`. Returns where run() leaves the sum.
  size_t add(const at::Tensor& summand, std::vector<int> mesh_dims) {
    sums_.push_back({summand.to(at::kDouble), std::move(mesh_dims)});
    return sums_.size() - 1;
  }
  void run(const Cause& cause) {
    if (context_ == nullptr) return;
    const About about(*context_, provenance_);
    for (int m = 0; m < context_->mesh().ndim(); ++m) {
      // What is offloaded rests beside what is not.
      std::vector<at::Device> devices;
      for (const Sum& sum : sums_) {
        const at::Device device = sum.value.device();
        if (sum.is_along(m) && std::find(devices.begin(), devices.end(), device) == devices.end()) {
          devices.push_back(device);
        }
      }
      for (const at::Device device : devices) run(m, device, cause);
    }
  }
  const at::Tensor& operator[](size_t place) const { return sums_[place].value; }
  // Of a sum that is one number. The host waits for the device once, for all of them.
  double number(size_t place) {
    if (numbers_.empty()) read_numbers();
    return numbers_[place];
  }

 private:
  struct Sum {
    at::Tensor value;
    std::vector<int> mesh_dims;

    bool is_along(int mesh_dim) const {
      return std::find(mesh_dims.begin(), mesh_dims.end(), mesh_dim) != mesh_dims.end();
    }
  };

  void read_numbers() {
    numbers_.resize(sums_.size());
    std::vector<size_t> places;
    std::vector<at::Tensor> values;
    for (size_t i = 0; i < sums_.size(); ++i) {
      const at::Tensor& value = sums_[i].value;
      if (value.numel() != 1) continue;
      if (value.device() != sums_[0].value.device()) {
        numbers_[i] = value.item<double>();
        continue;
      }
      places.push_back(i);
      values.push_back(value.reshape({1}));
    }
    const at::Tensor here = at::cat(values).cpu();
    for (size_t k = 0; k < places.size(); ++k)
      numbers_[places[k]] = here.const_data_ptr<double>()[k];
  }

  void run(int mesh_dim, at::Device device, const Cause& cause) {
    std::vector<Sum*> together;
    std::vector<at::Tensor> flat;
    for (Sum& sum : sums_) {
      if (!sum.is_along(mesh_dim) || sum.value.device() != device) continue;
      together.push_back(&sum);
      flat.push_back(sum.value.reshape({-1}));
    }
    CollectiveTransfer transfer;
    transfer.op = OpKind::kAllReduce;
    transfer.reduce_op = ReduceOp::kSum;
    transfer.mesh_dims = {mesh_dim};
    transfer.input = at::cat(flat);
    transfer.output = transfer.input;  // in place
    const int64_t numel = transfer.input.numel();
    const int64_t ranks = context_->mesh().size(mesh_dim);
    {
      const CollectiveSpan span(*context_, cause, [&]() -> Sending {
        return {"all_reduce",
                absl::MakeConstSpan(&mesh_dim, 1),
                2 * (numel - numel / ranks) * static_cast<int64_t>(sizeof(double)),
                at::kDouble,
                absl::MakeConstSpan(&numel, 1),
                Layout(),
                Layout()};
      });
      throw_if_error(send(*context_, transfer, cause.name).wait());
    }
    int64_t at = 0;
    for (Sum* sum : together) {
      const int64_t n = sum->value.numel();
      sum->value = transfer.output.narrow(0, at, n).view(sum->value.sizes());
      at += n;
    }
  }

  MeshContext* context_;
  uint64_t provenance_;
  std::vector<Sum> sums_;
  std::vector<double> numbers_;  // when they have been read
};

double epsilon(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return std::numeric_limits<double>::epsilon();
    case at::kHalf:
      return std::ldexp(1, -10);
    case at::kBFloat16:
      return std::ldexp(1, -7);
    default:
      return std::numeric_limits<float>::epsilon();
  }
}

at::Tensor sum_of_squares(const at::Tensor& x) {
  return at::linalg_vector_norm(x, 2, std::nullopt, false, at::kDouble).square_();
}

// Of one parameter.
class Adafactor {
 public:
  explicit Adafactor(Update& update)
      : u_(update),
        o_(std::get<AdafactorOptions>(*update.options)),
        ndim_(static_cast<int64_t>(update.sizes().size())),
        w_(std::pow(update.step.item<double>(), o_.beta2_decay)) {}

  void add_squares(Sums& sums) {
    parameter_ = sums.add(sum_of_squares(u_.part), u_.cutting);
    const at::Tensor g = grad();
    if (!is_factored()) {
      variance().lerp_(g * g, w_);
      return;
    }
    const at::Tensor rows = at::linalg_vector_norm(g, 2, {-1}, true).square_();
    const at::Tensor columns = at::linalg_vector_norm(g, 2, {-2}, true).square_();
    rows_ = sums.add(rows, cutting(ndim_ - 1));
    columns_ = sums.add(columns, cutting(ndim_ - 2));
    if (!is_cut_along_matrix()) return;
    // The mean of all rows' means is one of old means and of squares: with the squares' own sums.
    at::Tensor all = rows.to(at::kDouble).sum(-2, true) * (w_ / width());
    if (has_first_columns()) all += row_means().to(at::kDouble).sum(-2, true) * (1 - w_);
    std::vector<int> both = cutting(ndim_ - 1);
    for (const int m : cutting(ndim_ - 2)) both.push_back(m);
    all_rows_ = sums.add(all, std::move(both));
  }

  void add_update(Sums& sums, Sums& norms) {
    const double size = numel();
    rms_ = std::sqrt(sums.number(parameter_) / size);
    if (is_factored()) {
      row_means().lerp_((sums[rows_] / width()).to(accumulated()), w_);
      column_means().lerp_((sums[columns_] / height()).to(accumulated()), w_);
      mean_ = is_cut_along_matrix() ? (sums[all_rows_] / height()).to(accumulated())
                                    : row_means().mean(-2, true);
      mean_.clamp_min_(eps1());
    }
    norm_ = norms.add(sum_of_squares(direction()), u_.cutting);
  }

  void apply(Sums& norms) {
    const double rms = std::sqrt(norms.number(norm_) / numel());
    const double rho = std::min(o_.lr, 1 / std::sqrt(u_.step.item<double>()));
    const double alpha = std::max(o_.eps2, rms_) * rho / std::max(1.0, rms / o_.clip_threshold);
    if (o_.weight_decay != 0) u_.part.mul_(1 - o_.lr * o_.weight_decay);
    u_.part.add_(direction(), -alpha);
  }

 private:
  bool is_factored() const { return ndim_ > 1; }
  at::ScalarType accumulated() const {
    return u_.part.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  }
  at::Tensor grad() const { return u_.grad.to(accumulated()); }
  double eps1() const { return o_.eps1.value_or(epsilon(u_.part.scalar_type())); }
  at::Tensor& row_means() const { return *u_.first; }
  at::Tensor& column_means() const { return *u_.second; }
  at::Tensor& variance() const { return *u_.largest; }
  double height() const { return static_cast<double>(u_.sizes()[ndim_ - 2]); }
  double width() const { return static_cast<double>(u_.sizes()[ndim_ - 1]); }
  double numel() const {
    double product = 1;
    for (const int64_t size : u_.sizes()) product *= static_cast<double>(size);
    return product;
  }
  std::vector<int> cutting(int64_t dim) const {
    std::vector<int> dims;
    for (const int m : u_.cutting) {
      if (u_.spec->layout[m].is_shard(static_cast<int>(dim))) dims.push_back(m);
    }
    return dims;
  }
  bool is_cut_along_matrix() const {
    return !cutting(ndim_ - 1).empty() || !cutting(ndim_ - 2).empty();
  }
  // Of the ranks with parts of the same rows, which all have their means, one counts them.
  bool has_first_columns() const {
    const std::vector<int> dims = cutting(ndim_ - 1);
    return std::all_of(dims.begin(), dims.end(),
                       [&](int m) { return u_.context()->coordinate()[m] == 0; });
  }
  // The gradient over the root of its mean square. Made twice, for its norm and for the step: of all
  // parameters at once it would take as much memory as they do.
  at::Tensor direction() const {
    const at::Tensor squares =
        is_factored() ? (row_means() * column_means()).div_(mean_) : variance().clone();
    return squares.clamp_min(eps1() * eps1()).rsqrt_().mul_(grad());
  }

  Update& u_;
  const AdafactorOptions& o_;
  const int64_t ndim_;
  const double w_;  // of this step's squares in the means
  size_t parameter_ = 0, rows_ = 0, columns_ = 0, all_rows_ = 0, norm_ = 0;
  double rms_ = 0;
  at::Tensor mean_;
};

void step_on(MeshContext* context, const Updates& updates, const Cause& cause) {
  uint64_t provenance = 0;
  std::vector<Adafactor> steps;
  for (Update* update : updates) {
    if (update->context() != context) continue;
    provenance = mix(provenance, update->provenance);
    steps.emplace_back(*update);
  }
  Sums sums(context, provenance), norms(context, provenance);
  for (Adafactor& step : steps) step.add_squares(sums);
  sums.run(cause);
  for (Adafactor& step : steps) step.add_update(sums, norms);
  norms.run(cause);
  for (Adafactor& step : steps) step.apply(norms);
}

}  // namespace

void adafactor_step(const Updates& updates, const Cause& cause) {
  std::vector<MeshContext*> contexts;
  for (const Update* update : updates) {
    if (std::find(contexts.begin(), contexts.end(), update->context()) == contexts.end()) {
      contexts.push_back(update->context());
    }
  }
  for (MeshContext* context : contexts) step_on(context, updates, cause);
}

}  // namespace shardweave::optim_internal
