// Random numbers whose distribution has parameters for each element: Poisson, binomial, gamma,
// Dirichlet, categories. An element draws as many numbers as it needs from a run of the stream that
// is its own, by its global index, so that every sharding gives the same.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <vector>

#include "ATen/ExpandUtils.h"
#include "ATen/OpMathType.h"
#include "ATen/ops/cumsum.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/empty_like.h"
#include "ATen/ops/leaky_relu.h"
#include "ATen/ops/ones_like.h"
#include "ATen/ops/searchsorted.h"
#include "ATen/ops/topk.h"
#include "ATen/ops/where.h"
#include "absl/strings/str_cat.h"
#include "shardweave/dtensor/engine/capture.h"
#include "shardweave/dtensor/engine/philox.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "shardweave/dtensor/rules/common.h"
#include "shardweave/dtensor/rules/element_order.h"
#include "shardweave/dtensor/rules/families.h"

namespace shardweave::dtensor_internal {
namespace {

// --- numbers of one element ----------------------------------------------------------------------

// An endless sequence of numbers in (0, 1) for one element. Reading on after kRun numbers begins
// another stream.
class ElementNumbers {
 public:
  ElementNumbers(const PhiloxState& state, int64_t index) : state_(state), index_(index) {}

  double uniform() {
    if (next_ == kChunk) refill();
    return (static_cast<double>(chunk_[next_++] >> 12) + 0.5) * 0x1p-52;
  }
  double normal() {
    const double radius = std::sqrt(-2 * std::log(uniform()));
    return radius * std::cos(2 * std::numbers::pi * uniform());
  }

 private:
  static constexpr int kChunk = 8;
  static constexpr int64_t kRun = 64;

  void refill() {
    // The streams of one operator are far from those of the next: those count up from 0.
    PhiloxStream stream(state_.seed, state_.offset + (static_cast<uint64_t>(used_ / kRun) << 48));
    stream.bits(index_ * kRun + used_ % kRun, absl::MakeSpan(chunk_));
    used_ += kChunk;
    next_ = 0;
  }

  const PhiloxState& state_;
  const int64_t index_;
  uint64_t chunk_[kChunk];
  int next_ = kChunk;
  int64_t used_ = 0;
};

// Small means: multiply until exp(-mean) is passed (Knuth). Large ones: Hörmann, "The transformed
// rejection method for generating Poisson random variables" (1993), algorithm PTRS.
double poisson(ElementNumbers& numbers, double mean) {
  if (mean == 0) return 0;
  if (mean < 10) {
    const double limit = std::exp(-mean);
    double product = numbers.uniform();
    double count = 0;
    while (product > limit) {
      product *= numbers.uniform();
      ++count;
    }
    return count;
  }
  const double log_mean = std::log(mean);
  const double b = 0.931 + 2.53 * std::sqrt(mean);
  const double a = -0.059 + 0.02483 * b;
  const double inverse_alpha = 1.1239 + 1.1328 / (b - 3.4);
  const double vr = 0.9277 - 3.6224 / (b - 2);
  while (true) {
    const double u = numbers.uniform() - 0.5;
    const double v = numbers.uniform();
    const double us = 0.5 - std::fabs(u);
    const double k = std::floor((2 * a / us + b) * u + mean + 0.43);
    if (us >= 0.07 && v <= vr) return k;
    if (k < 0 || (us < 0.013 && v > us)) continue;
    if (std::log(v) + std::log(inverse_alpha) - std::log(a / (us * us) + b) <=
        -mean + k * log_mean - std::lgamma(k + 1)) {
      return k;
    }
  }
}

// Few successes: gaps between them are geometric. Many: Hörmann, "The generation of binomial random
// variates" (1993), algorithm BTRS.
double binomial(ElementNumbers& numbers, double count, double p) {
  if (count <= 0 || p <= 0) return 0;
  if (p >= 1) return count;
  if (p > 0.5) return count - binomial(numbers, count, 1 - p);
  if (count * p < 10) {
    const double log_failure = std::log1p(-p);
    double trials = 0, successes = 0;
    while (true) {
      trials += std::ceil(std::log(numbers.uniform()) / log_failure);
      if (trials > count) return successes;
      ++successes;
    }
  }
  const double deviation = std::sqrt(count * p * (1 - p));
  const double b = 1.15 + 2.53 * deviation;
  const double a = -0.0873 + 0.0248 * b + 0.01 * p;
  const double c = count * p + 0.5;
  const double vr = 0.92 - 4.2 / b;
  const double odds = p / (1 - p);
  const double alpha = (2.83 + 5.1 / b) * deviation;
  const double mode = std::floor((count + 1) * p);
  const auto log_factorials = [&](double k) {
    return std::lgamma(k + 1) + std::lgamma(count - k + 1);
  };
  while (true) {
    const double u = numbers.uniform() - 0.5;
    const double v = numbers.uniform();
    const double us = 0.5 - std::fabs(u);
    const double k = std::floor((2 * a / us + b) * u + c);
    if (k < 0 || k > count) continue;
    if (us >= 0.07 && v <= vr) return k;
    const double ratio = log_factorials(mode) - log_factorials(k) + (k - mode) * std::log(odds);
    if (std::log(v * alpha / (a / (us * us) + b)) <= ratio) return k;
  }
}

// Marsaglia and Tsang, "A simple method for generating gamma variables" (2000).
double gamma(ElementNumbers& numbers, double shape) {
  if (shape <= 0) return 0;
  double scale = 1;
  if (shape < 1) {
    scale = std::pow(numbers.uniform(), 1 / shape);
    shape += 1;
  }
  const double d = shape - 1.0 / 3;
  const double c = 1 / std::sqrt(9 * d);
  while (true) {
    const double x = numbers.normal();
    const double t = 1 + c * x;
    if (t <= 0) continue;
    const double v = t * t * t;
    if (std::log(numbers.uniform()) < 0.5 * x * x + d * (1 - v + std::log(v))) return scale * d * v;
  }
}

// --- operators -----------------------------------------------------------------------------------

void refuse_generator(const c10::OperatorHandle& op, BoxedCall& call) {
  if (call["generator"].isNone()) return;
  throw Error(absl::InvalidArgumentError(
      absl::StrCat(c10::toString(op.operator_name()),
                   ": takes no generator; DTensors draw from their mesh, which can be seeded")));
}

// Without Partials: a parameter has to be known.
at::Tensor known(const at::Tensor& tensor) {
  Placements placements = meta_of(tensor).spec->layout.placements();
  for (Placement& p : placements) {
    if (p.is_partial()) p = Replicate();
  }
  return redistribute(tensor, value_or_throw(Layout::create(std::move(placements),
                                                            meta_of(tensor).spec->layout.order())));
}

at::Tensor local_doubles(const at::Tensor& tensor) {
  return meta_of(tensor).local().to(at::TensorOptions(at::kDouble).device(at::kCPU)).contiguous();
}

// A tensor like `first` whose elements are draw(numbers, element of first[, element of second]).
template <typename Draw>
at::Tensor draw_each(const at::Tensor& first, const at::Tensor& second, Draw draw) {
  const at::Tensor a = known(first);
  const DTensorMeta& meta = meta_of(a);
  at::Tensor b = a;
  if (second.defined()) b = redistribute(known(second).expand_as(a), meta.spec->layout);
  const at::Tensor p = local_doubles(a);
  const at::Tensor q = local_doubles(b);
  at::Tensor drawn = at::empty_like(p);
  check_captured_mesh(*meta.context);
  check_drawn_by_host(*meta.context);
  PhiloxState& state = meta.context->random.state;
  const double* p_data = p.const_data_ptr<double>();
  const double* q_data = q.const_data_ptr<double>();
  double* out = drawn.mutable_data_ptr<double>();
  for_each_run(*meta.spec, [&](int64_t begin, int64_t count) {
    for (int64_t i = begin; i < begin + count; ++i) {
      ElementNumbers numbers(state, i);
      *out++ = draw(numbers, *p_data++, *q_data++);
    }
  });
  ++state.offset;
  at::Tensor result = at::empty_like(a);
  meta_of(result).local().copy_(drawn);
  return result;
}

[[noreturn]] void refuse(const c10::OperatorHandle& op, const std::string& why) {
  throw Error(
      absl::InvalidArgumentError(absl::StrCat(c10::toString(op.operator_name()), ": ", why)));
}

void poisson_each(const c10::OperatorHandle& op, c10::Stack& stack) {
  BoxedCall call(op, stack);
  refuse_generator(op, call);
  const at::Tensor mean = call.tensor("self");
  if (mean.lt(0).any().item<bool>()) refuse(op, "rates must not be negative");
  call.finish({draw_each(
      mean, {}, [](ElementNumbers& numbers, double m, double) { return poisson(numbers, m); })});
}

void binomial_each(const c10::OperatorHandle& op, c10::Stack& stack) {
  BoxedCall call(op, stack);
  refuse_generator(op, call);
  const at::Tensor count = call.dtensor("count");
  const at::Tensor p = call.dtensor("prob");
  const std::vector<int64_t> sizes = at::infer_size(count.sizes(), p.sizes());
  call.finish(
      {draw_each(count.expand(sizes), p, [](ElementNumbers& numbers, double n, double probability) {
        return binomial(numbers, n, probability);
      })});
}

// The least normal number above 0.
double least_of(at::ScalarType dtype) {
  if (dtype == at::kDouble) return std::numeric_limits<double>::min();
  if (dtype == at::kHalf) return std::ldexp(1, -14);
  return std::numeric_limits<float>::min();  // bfloat16's, too
}

// Above 0, as LibTorch's.
at::Tensor standard_gamma(const at::Tensor& shape) {
  const double least = least_of(shape.scalar_type());
  return draw_each(shape, {}, [least](ElementNumbers& numbers, double a, double) {
    return std::max(gamma(numbers, a), least);
  });
}

void gamma_each(const c10::OperatorHandle& op, c10::Stack& stack) {
  BoxedCall call(op, stack);
  refuse_generator(op, call);
  call.finish({standard_gamma(call.tensor("self"))});
}

// Along the last dimension.
void dirichlet(const c10::OperatorHandle& op, c10::Stack& stack) {
  BoxedCall call(op, stack);
  refuse_generator(op, call);
  const at::Tensor alpha = call.tensor("self");
  // Of doubles: small concentrations give numbers that are none of fewer bits.
  const at::Tensor gammas = standard_gamma(alpha.to(at::kDouble));
  const at::Tensor shares = gammas.div(gammas.sum(-1, /*keepdim=*/true));
  call.finish({shares.to(alpha.scalar_type()).clamp_min(least_of(alpha.scalar_type()))});
}

// Categories by weight, along the last dimension. Without replacement: those whose exponential
// clocks ring first (Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006).
void multinomial(const c10::OperatorHandle& op, c10::Stack& stack) {
  BoxedCall call(op, stack);
  refuse_generator(op, call);
  const at::Tensor weights = call.tensor("self");
  const int64_t samples = call["num_samples"].toInt();
  if (weights.dim() < 1 || weights.dim() > 2) refuse(op, "the weights must have 1 or 2 dimensions");
  if (samples <= 0) refuse(op, "num_samples must be positive");
  const bool replacement = call.flag("replacement");
  if (!replacement && samples > weights.size(-1)) {
    refuse(op, absl::StrCat(samples, " samples without replacement of ", weights.size(-1),
                            " categories"));
  }
  const bool bad = weights.lt(0).any().item<bool>() ||
                   weights.isfinite().logical_not().any().item<bool>() ||
                   weights.gt(0).any(-1).logical_not().any().item<bool>();
  if (bad) refuse(op, "weights must be finite, not negative, and not all 0");
  if (!replacement) {
    const at::Tensor clocks = at::empty_like(weights).exponential_(1);
    call.finish({std::get<1>(at::topk(weights.div(clocks), samples, -1))});
    return;
  }
  // Of 16 bits neither sums nor numbers in (0, 1) tell many categories apart.
  const at::Tensor upto = at::cumsum(weights.to(at::toOpMathType(weights.scalar_type())), -1);
  std::vector<int64_t> sizes = weights.sizes().vec();
  sizes.back() = samples;
  const at::Tensor uniform = upto.new_empty(sizes).uniform_(0, 1);
  const at::Tensor total = upto.narrow(-1, upto.size(-1) - 1, 1);
  // In (0, total]: a category of weight 0 has no room.
  const at::Tensor at = uniform.neg().add(1).mul(total);
  call.finish({at::searchsorted(upto, at).clamp_max(weights.size(-1) - 1)});
}

// rrelu_with_noise: negative elements times a random slope, which is the noise.
void rrelu(const c10::OperatorHandle& op, c10::Stack& stack) {
  BoxedCall call(op, stack);
  refuse_generator(op, call);
  const at::Tensor self = call.tensor("self");
  const double lower = call["lower"].toScalar().toDouble();
  const double upper = call["upper"].toScalar().toDouble();
  at::Tensor noise = call.tensor("noise");
  const bool functional = op.operator_name().name.ends_with("_functional");
  at::Tensor result;
  if (call.flag("training")) {
    const at::Tensor slopes = at::empty_like(self).uniform_(lower, upper);
    const at::Tensor negative = self.le(0);
    result = at::where(negative, self.mul(slopes), self);
    const at::Tensor drawn = at::where(negative, slopes, at::ones_like(self));
    if (functional) {
      noise = drawn;
    } else {
      noise.copy_(drawn);
    }
  } else {
    result = at::leaky_relu(self, (lower + upper) / 2);
  }
  if (functional) {
    call.finish({result, noise});
  } else if (op.operator_name().name.ends_with("_")) {
    call.finish({self.copy_(result)});
  } else {
    call.finish({result});
  }
}

// Three tensors of one shape.
void all_alike(const OpCall& call, Strategies& out) {
  for (int d = 0; d < call.output().ndim(); ++d) {
    out.add(std::vector<Placement>(call.num_inputs(), Shard(d)), {Shard(d)});
  }
}

}  // namespace

void add_distribution_rules(RuleTable& table) {
  table.add("aten::poisson", composed(poisson_each));
  table.add("aten::binomial", composed(binomial_each));
  table.add("aten::_standard_gamma", composed(gamma_each));
  table.add("aten::_sample_dirichlet", composed(dirichlet));
  table.add("aten::multinomial", composed(multinomial));
  table.add({"aten::rrelu_with_noise", "aten::rrelu_with_noise_functional"}, composed(rrelu));
  // Their derivatives are elementwise.
  table.add("aten::_standard_gamma_grad", pointwise().shapes_like({"self"}));
  table.add("aten::_dirichlet_grad", sharded(all_alike).shapes_like({"x"}));
}

}  // namespace shardweave::dtensor_internal
