// Activations by the names that Hugging Face's configurations give them, and dropout.
#pragma once

#include <string_view>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"

namespace shardweave::nn {

enum class Activation { kSilu, kGelu, kGeluTanh, kRelu };

// "silu" or "swish", "gelu", "gelu_new" (or "gelu_pytorch_tanh", "gelu_fast"), "relu".
// InvalidArgument: another.
absl::StatusOr<Activation> activation_of(std::string_view name);

at::Tensor activate(Activation activation, const at::Tensor& x);

// at::dropout(), and no operator where nothing is dropped.
at::Tensor dropped(const at::Tensor& x, double probability, bool training);

}  // namespace shardweave::nn
