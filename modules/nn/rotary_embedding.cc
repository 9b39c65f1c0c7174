#include "shardweave/modules/nn/rotary_embedding.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "ATen/ops/addcmul.h"
#include "ATen/ops/cat.h"
#include "ATen/ops/full.h"
#include "ATen/ops/pow.h"
#include "ATen/ops/roll.h"
#include "absl/strings/str_join.h"
#include "c10/core/GradMode.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/error.h"

namespace shardweave::nn {
namespace {

constexpr const char* kTypes[] = {"default", "linear", "dynamic", "yarn", "longrope", "llama3"};

// The exponents of the frequencies: 0, 2/d, 4/d, ...
std::vector<double> exponents(int64_t head_dim) {
  std::vector<double> result;
  for (int64_t i = 0; i < head_dim; i += 2) {
    result.push_back(static_cast<double>(i) / static_cast<double>(head_dim));
  }
  return result;
}

// Frequencies that turn often enough in the trained length stay, those that turn seldom are
// divided, and between them there is a ramp.
void scale_yarn(const RopeOptions& options, int64_t head_dim, int64_t original,
                std::vector<double>& frequencies) {
  const double d = static_cast<double>(head_dim);
  const auto correction = [&](double turns) {
    return d * std::log(static_cast<double>(original) / (turns * 2 * std::numbers::pi)) /
           (2 * std::log(options.rope_theta));
  };
  double low = correction(options.beta_fast.value_or(32));
  double high = correction(options.beta_slow.value_or(1));
  if (options.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, d - 1);
  if (low == high) high += 0.001;
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const double ramp = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    frequencies[i] = frequencies[i] / *options.factor * ramp + frequencies[i] * (1 - ramp);
  }
}

// The same by wavelengths, as Llama 3.1 does it.
void scale_llama3(const RopeOptions& options, int64_t original, std::vector<double>& frequencies) {
  const double length = static_cast<double>(original);
  const double low = *options.low_freq_factor, high = *options.high_freq_factor;
  for (double& frequency : frequencies) {
    const double wavelength = 2 * std::numbers::pi / frequency;
    if (wavelength < length / high) continue;
    const double divided = frequency / *options.factor;
    if (wavelength > length / low) {
      frequency = divided;
      continue;
    }
    const double smooth = (length / wavelength - low) / (high - low);
    frequency = (1 - smooth) * divided + smooth * frequency;
  }
}

double yarn_attention(const RopeOptions& options) {
  const auto scale = [&](double mscale) {
    return *options.factor <= 1 ? 1.0 : 0.1 * mscale * std::log(*options.factor) + 1.0;
  };
  if (options.mscale.value_or(0) != 0 && options.mscale_all_dim.value_or(0) != 0) {
    return scale(*options.mscale) / scale(*options.mscale_all_dim);
  }
  return scale(1);
}

// Made of operators, which a construction that is only recorded (deferred_init) sees.
at::Tensor tensor_of(const std::vector<double>& values) {
  std::vector<at::Tensor> each;
  for (const double value : values) each.push_back(at::full({1}, value, at::kFloat));
  return at::cat(each);
}

}  // namespace

absl::Status check(const RopeOptions& options, int64_t head_dim) {
  const std::string& type = options.rope_type;
  const auto refuse = [&](std::string_view why) {
    return absl::InvalidArgumentError(str_cat("rope_type \"", type, "\" ", why));
  };
  if (std::find(std::begin(kTypes), std::end(kTypes), type) == std::end(kTypes)) {
    return refuse(str_cat("is not known; there are: ", absl::StrJoin(kTypes, ", ")));
  }
  if (head_dim <= 0 || head_dim % 2 != 0) {
    return absl::InvalidArgumentError(
        str_cat("rotary embeddings turn pairs: wanted an even head_dim, not ", head_dim));
  }
  if (!(options.rope_theta > 0)) {
    return refuse(str_cat("wants a positive rope_theta, not ", options.rope_theta));
  }
  if (type == "yarn" && options.rope_theta == 1) return refuse("wants a rope_theta other than 1");
  const int64_t least = type == "longrope" ? 2 : 1;  // its logarithm is divided by
  if (options.original_max_position_embeddings.value_or(least) < least) {
    return refuse(str_cat("wants an original_max_position_embeddings of at least ", least, ", not ",
                          *options.original_max_position_embeddings));
  }
  const bool may_be_absent = type == "default" || type == "longrope";
  if (!options.factor.has_value() && !may_be_absent) return refuse("wants a factor");
  if (options.factor.has_value() && !(*options.factor > 0)) {
    return refuse(str_cat("wants a positive factor, not ", *options.factor));
  }
  if (type == "dynamic" && head_dim == 2) return refuse("wants a head_dim of more than 2");
  if (type == "llama3") {
    if (!options.low_freq_factor.has_value() || !options.high_freq_factor.has_value()) {
      return refuse("wants a low_freq_factor and a high_freq_factor");
    }
    if (!(*options.low_freq_factor > 0 && *options.high_freq_factor > *options.low_freq_factor)) {
      return refuse("wants a positive low_freq_factor and a high_freq_factor above it");
    }
  }
  if (type == "longrope") {
    for (const auto& [name, factors] : {std::pair("short_factor", &options.short_factor),
                                        std::pair("long_factor", &options.long_factor)}) {
      if (static_cast<int64_t>(factors->size()) != head_dim / 2) {
        return refuse(
            str_cat("wants ", head_dim / 2, " numbers in ", name, ", not ", factors->size()));
      }
      if (!std::all_of(factors->begin(), factors->end(), [](double f) { return f > 0; })) {
        return refuse(str_cat("wants positive numbers in ", name));
      }
    }
  }
  return absl::OkStatus();
}

RotaryEmbeddingImpl::RotaryEmbeddingImpl(int64_t head_dim, int64_t max_position_embeddings,
                                         const RopeOptions& options)
    : options_(options),
      head_dim_(head_dim),
      max_position_embeddings_(max_position_embeddings),
      original_length_(options.original_max_position_embeddings.value_or(max_position_embeddings)) {
  const absl::Status status = check(options, head_dim);
  if (!status.ok()) throw Error("RotaryEmbedding", status);
  const std::string& type = options.rope_type;
  std::vector<double> frequencies;
  for (const double e : exponents(head_dim)) {
    frequencies.push_back(std::pow(options.rope_theta, -e));
  }
  if (type == "linear") {
    for (double& frequency : frequencies) frequency /= *options.factor;
  } else if (type == "yarn") {
    scale_yarn(options, head_dim, original_length_, frequencies);
    attention_factor_ = options.attention_factor.value_or(yarn_attention(options));
  } else if (type == "llama3") {
    scale_llama3(options, original_length_, frequencies);
  } else if (type == "longrope") {
    const double original = static_cast<double>(original_length_);
    const double factor =
        options.factor.value_or(static_cast<double>(max_position_embeddings) / original);
    attention_factor_ = options.attention_factor.value_or(
        factor <= 1 ? 1 : std::sqrt(1 + std::log(factor) / std::log(original)));
    std::vector<double> far = frequencies;
    for (size_t i = 0; i < far.size(); ++i) {
      far[i] /= options.long_factor[i];
      frequencies[i] /= options.short_factor[i];
    }
    long_inv_freq = register_buffer("long_inv_freq", tensor_of(far));
  }
  inv_freq = register_buffer("inv_freq", tensor_of(frequencies));
}

at::Tensor RotaryEmbeddingImpl::frequencies(int64_t length) const {
  if (options_.rope_type == "longrope" && length > original_length_) return long_inv_freq;
  if (options_.rope_type != "dynamic" || length <= max_position_embeddings_) return inv_freq;
  // The base grows with the length: every frequency is divided by a power of how much.
  const double grown = *options_.factor * static_cast<double>(length) /
                           static_cast<double>(max_position_embeddings_) -
                       (*options_.factor - 1);
  const double d = static_cast<double>(head_dim_);
  const at::Tensor index = inv_freq.new_ones({head_dim_ / 2}).cumsum(0) - 1;
  return inv_freq * at::pow(std::pow(grown, d / (d - 2)), index * (-2 / d));
}

std::pair<at::Tensor, at::Tensor> RotaryEmbeddingImpl::forward(int64_t length,
                                                               at::ScalarType dtype) {
  const c10::AutoGradMode no_grad(false);
  // Made of inv_freq, on its device and, where a model is distributed, on its mesh.
  const at::Tensor positions = inv_freq.new_ones({length, 1, 1}).cumsum(0) - 1;
  const at::Tensor angles = positions * frequencies(length);
  const at::Tensor both = at::cat({-angles, angles}, -1);
  at::Tensor cos = both.cos(), sin = both.sin();
  if (attention_factor_ != 1) {
    cos = cos * attention_factor_;
    sin = sin * attention_factor_;
  }
  return {cos.to(dtype), sin.to(dtype)};
}

void RotaryEmbeddingImpl::to(torch::Device device, torch::Dtype /*dtype*/, bool non_blocking) {
  Module::to(device, non_blocking);
}
void RotaryEmbeddingImpl::to(torch::Dtype /*dtype*/, bool /*non_blocking*/) {}
void RotaryEmbeddingImpl::to(torch::Device device, bool non_blocking) {
  Module::to(device, non_blocking);
}

std::vector<std::string> RotaryEmbeddingImpl::non_persistent_buffers() const {
  return {"inv_freq", "long_inv_freq"};
}

at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  return at::addcmul(x * cos, at::roll(x, x.size(-1) / 2, -1), sin);
}

}  // namespace shardweave::nn
