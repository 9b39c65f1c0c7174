#include "shardweave/modules/power_sgd.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "ATen/ops/cat.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/matmul.h"
#include "ATen/ops/scalar_tensor.h"
#include "ATen/ops/zeros_like.h"
#include "c10/core/GradMode.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/engine/checksum.h"
#include "shardweave/dtensor/engine/philox.h"

namespace shardweave {
namespace {

constexpr char kPowerSgd[] = "PowerSgd";

at::ScalarType computed_in(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

// An orthonormal basis of (at least) the columns of `matrix`, which is no wider than high; where these
// depend on each other unit vectors stand in. In plain loops: libraries round by where memory lies, and
// ranks would come to have different parameters.
at::Tensor orthonormal(const at::Tensor& matrix) {
  const int64_t n = matrix.size(0), r = matrix.size(1);
  at::Tensor columns = matrix.t().to(at::kCPU, at::kDouble).contiguous();
  if (columns.is_alias_of(matrix)) columns = columns.clone();
  double* const data = columns.data_ptr<double>();
  const auto dot = [&](const double* a, const double* b) {
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
    return sum;
  };
  int64_t next_unit = 0;
  for (int64_t k = 0; k < r; ++k) {
    double* const column = data + k * n;
    for (;;) {
      const double before = std::sqrt(dot(column, column));
      for (int twice = 0; twice < 2; ++twice) {
        for (int64_t j = 0; j < k; ++j) {
          const double* const other = data + j * n;
          const double along = dot(column, other);
          for (int64_t i = 0; i < n; ++i) column[i] -= along * other[i];
        }
      }
      const double norm = std::sqrt(dot(column, column));
      if (norm > 1e-8 * before && norm > 1e-150) {
        for (int64_t i = 0; i < n; ++i) column[i] /= norm;
        break;
      }
      std::fill(column, column + n, 0.0);
      column[next_unit++ % n] = 1;
    }
  }
  return columns.t().to(matrix.device(), matrix.scalar_type()).contiguous();
}

bool is_finite(const at::Tensor& tensor) {
  return tensor.isfinite().all().item<bool>();
}

// p q', by operations that round alike on all ranks.
void write_product(const at::Tensor& p, const at::Tensor& q, const at::Tensor& out) {
  at::Tensor product = p.select(1, 0).unsqueeze(1) * q.select(1, 0).unsqueeze(0);
  for (int64_t k = 1; k < p.size(1); ++k) {
    product.add_(p.select(1, k).unsqueeze(1) * q.select(1, k).unsqueeze(0));
  }
  out.copy_(product);
}

at::Tensor as_matrix(const at::Tensor& gradient) {
  return gradient.view({gradient.size(0), -1});
}

}  // namespace

struct PowerSgd::Learned {
  int64_t iteration = 0;  // how often it has travelled
  at::Tensor q, error;
};

// Of a bucket, between begin() and finish().
struct PowerSgd::Compression {
  struct Matrix {
    size_t gradient;
    at::Tensor delta;  // the gradient and what was left over before
    int64_t rank = 0;
    at::Tensor p;
    at::Tensor q;  // this rank's part, as it is sent
    bool is_bad = false;
  };
  std::vector<size_t> whole;
  std::vector<Matrix> matrices;
};

PowerSgd::PowerSgd(const PowerSgdOptions& options) : options_(options) {
  const auto refuse_option = [](const std::string& why) {
    throw Error(kPowerSgd, absl::InvalidArgumentError(why));
  };
  if (options.rank < 1) refuse_option(str_cat("rank is ", options.rank, "; wanted 1 or more"));
  if (options.start_iteration < 0) {
    refuse_option(str_cat("start_iteration is ", options.start_iteration, "; wanted 0 or more"));
  }
  if (!(options.min_compression_rate >= 1) || !std::isfinite(options.min_compression_rate)) {
    refuse_option(str_cat("min_compression_rate is ", options.min_compression_rate,
                          "; wanted a number of 1 or more"));
  }
}

PowerSgd::~PowerSgd() = default;

std::string PowerSgd::name() const {
  return str_cat("PowerSGD(rank=", options_.rank, ", start_iteration=", options_.start_iteration,
                 ", min_compression_rate=", options_.min_compression_rate,
                 options_.error_feedback ? "" : ", no error feedback",
                 options_.warm_start ? "" : ", no warm start", ", seed=", options_.seed, ")");
}

bool PowerSgd::is_compressed(const at::Tensor& gradient) const {
  if (gradient.dim() < 2 || gradient.numel() == 0) return false;
  const int64_t n = gradient.size(0), m = gradient.numel() / n;
  const auto sent = static_cast<double>((n + m) * std::min({options_.rank, n, m}));
  return sent * options_.min_compression_rate < static_cast<double>(gradient.numel());
}

at::Tensor PowerSgd::random_q(const std::string& parameter, int64_t iteration, int64_t rows,
                              int64_t rank) const {
  const uint64_t stream = dtensor_internal::checksum(static_cast<uint64_t>(iteration), parameter);
  dtensor_internal::PhiloxStream random(options_.seed, stream);
  at::Tensor q = at::empty({rows, rank}, at::kDouble);
  random.normal(0, absl::MakeSpan(q.data_ptr<double>(), static_cast<size_t>(q.numel())));
  return q;
}

void PowerSgd::begin(GradientBucket& bucket) {
  auto compression = std::make_shared<Compression>();
  std::vector<at::Tensor> sent;
  std::vector<at::Tensor> thin;
  for (size_t i = 0; i < bucket.gradients.size(); ++i) {
    const at::Tensor& gradient = bucket.gradients[i];
    const std::string& parameter = bucket.parameters[i];
    Learned* learned = nullptr;
    if (!parameter.empty()) learned = &learned_[parameter];
    if (learned == nullptr || learned->iteration < options_.start_iteration ||
        !is_compressed(gradient)) {
      compression->whole.push_back(i);
      sent.push_back(gradient.reshape({-1}));
      continue;
    }
    const at::ScalarType dtype = computed_in(gradient.scalar_type());
    Compression::Matrix matrix{.gradient = i};
    matrix.delta = as_matrix(gradient).to(dtype, /*non_blocking=*/false, /*copy=*/true);
    const int64_t n = matrix.delta.size(0), m = matrix.delta.size(1);
    matrix.rank = std::min({options_.rank, n, m});
    const auto check_shape = [&](const at::Tensor& tensor, int64_t rows, int64_t columns,
                                 const char* which) {
      if (tensor.size(0) == rows && tensor.size(1) == columns) return;
      throw Error(kPowerSgd, absl::InvalidArgumentError(str_cat(
                                 "'", which, "' of '", parameter, "' is ", c10::str(tensor.sizes()),
                                 "; wanted [", rows, ", ", columns, "]")));
    };
    if (learned->error.defined()) {
      check_shape(learned->error, n, m, "error");
      learned->error = learned->error.to(gradient.device());  // a state may come from elsewhere
      matrix.delta.add_(learned->error);
    }
    at::Tensor q;
    if (learned->q.defined() && options_.warm_start) {
      check_shape(learned->q, m, matrix.rank, "q");
      q = learned->q.to(gradient.device(), dtype);
    } else {
      q = random_q(parameter, options_.warm_start ? 0 : learned->iteration, m, matrix.rank)
              .to(gradient.device(), dtype);
    }
    matrix.p = at::matmul(matrix.delta, orthonormal(q));
    thin.push_back(matrix.p.to(gradient.scalar_type()).reshape({-1}));
    compression->matrices.push_back(std::move(matrix));
  }
  sent.insert(sent.end(), thin.begin(), thin.end());
  bucket.sent = at::cat(sent);
  bucket.state = std::move(compression);
  bucket.all_reduce(bucket.sent);
}

void PowerSgd::finish(GradientBucket& bucket) {
  const auto compression = std::static_pointer_cast<Compression>(bucket.state);
  int64_t at = 0;
  const auto next_part = [&](const at::Tensor& flat, at::IntArrayRef sizes) {
    const int64_t numel = c10::multiply_integers(sizes);
    at += numel;
    return flat.narrow(0, at - numel, numel).view(sizes);
  };
  for (const size_t i : compression->whole) {
    bucket.gradients[i].copy_(next_part(bucket.sent, bucket.gradients[i].sizes()));
  }
  std::vector<at::Tensor> thin;
  for (Compression::Matrix& matrix : compression->matrices) {
    const at::ScalarType dtype = matrix.delta.scalar_type();
    const at::Tensor p = next_part(bucket.sent, {matrix.delta.size(0), matrix.rank}).to(dtype);
    matrix.is_bad = !is_finite(p);
    matrix.p = orthonormal(matrix.is_bad ? at::zeros_like(p) : p);
    matrix.q = at::matmul(matrix.delta.t(), matrix.p).to(bucket.flat.scalar_type());
    thin.push_back(matrix.q.reshape({-1}));
  }
  at::Tensor sums;
  if (!thin.empty()) {
    sums = at::cat(thin);
    bucket.all_reduce(sums);
    bucket.wait();
  }
  at = 0;
  for (Compression::Matrix& matrix : compression->matrices) {
    const at::ScalarType dtype = matrix.delta.scalar_type();
    const at::Tensor& gradient = bucket.gradients[matrix.gradient];
    const at::Tensor q = next_part(sums, matrix.q.sizes()).to(dtype).clone();
    if (matrix.is_bad || !is_finite(q)) {
      gradient.fill_(std::numeric_limits<double>::quiet_NaN());
      matrix.is_bad = true;
      continue;
    }
    write_product(matrix.p, q, as_matrix(gradient));
    if (bucket.is_discarded) continue;
    Learned& learned = learned_[bucket.parameters[matrix.gradient]];
    learned.q = q;
    if (options_.error_feedback) {
      learned.error = matrix.delta.addmm_(matrix.p, matrix.q.to(dtype).t(), 1, -1);
    }
  }
  std::vector<bool> counts(bucket.gradients.size(), !bucket.is_discarded);
  for (const Compression::Matrix& matrix : compression->matrices) {
    if (matrix.is_bad) counts[matrix.gradient] = false;
  }
  for (size_t i = 0; i < counts.size(); ++i) {
    if (bucket.parameters[i].empty()) continue;
    if (counts[i]) ++learned_[bucket.parameters[i]].iteration;
  }
}

void PowerSgd::rescale(double factor) {
  if (!(factor > 0) || !std::isfinite(factor)) {
    throw Error(kPowerSgd, absl::InvalidArgumentError(str_cat(
                               "factor is ", factor, "; wanted a number above 0, and finite")));
  }
  if (factor == 1) return;
  const c10::AutoGradMode no_grad(false);
  for (auto& [parameter, learned] : learned_) {
    if (learned.error.defined()) learned.error.mul_(factor);
  }
}

std::vector<std::string> PowerSgd::state_names() const {
  std::vector<std::string> names;
  for (const auto& [parameter, learned] : learned_) {
    names.push_back(parameter + ".iteration");
    if (learned.q.defined()) names.push_back(parameter + ".q");
    if (learned.error.defined()) names.push_back(parameter + ".error");
  }
  std::sort(names.begin(), names.end());
  return names;
}

at::Tensor PowerSgd::state(const std::string& name) const {
  const size_t dot = name.rfind('.');
  const auto it = learned_.find(name.substr(0, dot));
  if (dot != std::string::npos && it != learned_.end()) {
    const std::string last = name.substr(dot + 1);
    const Learned& learned = it->second;
    if (last == "iteration") return at::scalar_tensor(learned.iteration, at::kLong);
    if (last == "q" && learned.q.defined()) return learned.q.clone();
    if (last == "error" && learned.error.defined()) return learned.error.clone();
  }
  throw Error(kPowerSgd, absl::NotFoundError(str_cat("there is no state '", name, "'")));
}

std::map<std::string, at::Tensor> PowerSgd::state() const {
  std::map<std::string, at::Tensor> all;
  for (const std::string& name : state_names()) all[name] = state(name);
  return all;
}

void PowerSgd::set_state(const std::map<std::string, at::Tensor>& state) {
  std::map<std::string, Learned> learned;
  for (const auto& [name, tensor] : state) {
    const auto refuse_state = [&](const std::string& why) {
      throw Error(kPowerSgd, absl::InvalidArgumentError(str_cat("the state '", name, "' ", why)));
    };
    const size_t dot = name.rfind('.');
    const std::string last = dot == std::string::npos ? std::string() : name.substr(dot + 1);
    if (last != "iteration" && last != "q" && last != "error") {
      refuse_state("does not end with .iteration, .q or .error");
    }
    if (!tensor.defined() || is_dtensor(tensor)) refuse_state("is no plain tensor");
    Learned& of = learned[name.substr(0, dot)];
    if (last == "iteration") {
      if (tensor.dim() != 0 || tensor.scalar_type() != at::kLong || tensor.item<int64_t>() < 0) {
        refuse_state("is no number of iterations: wanted one integer of 64 bits, 0 or more");
      }
      of.iteration = tensor.item<int64_t>();
      continue;
    }
    if (tensor.dim() != 2 ||
        (tensor.scalar_type() != at::kFloat && tensor.scalar_type() != at::kDouble)) {
      refuse_state("is no matrix of float32 or float64");
    }
    (last == "q" ? of.q : of.error) = tensor.detach().clone();
  }
  learned_ = std::move(learned);
}

}  // namespace shardweave
