#include "shardweave/modules/nn/activation.h"

#include <string>
#include <utility>

#include "ATen/ops/dropout.h"
#include "ATen/ops/gelu.h"
#include "ATen/ops/relu.h"
#include "ATen/ops/silu.h"
#include "absl/status/status.h"
#include "shardweave/comm/str_cat.h"

namespace shardweave::nn {

absl::StatusOr<Activation> activation_of(std::string_view name) {
  constexpr std::pair<std::string_view, Activation> kNames[] = {
      {"silu", Activation::kSilu},          {"swish", Activation::kSilu},
      {"gelu", Activation::kGelu},          {"gelu_new", Activation::kGeluTanh},
      {"gelu_fast", Activation::kGeluTanh}, {"gelu_pytorch_tanh", Activation::kGeluTanh},
      {"relu", Activation::kRelu}};
  std::string known;
  for (const auto& [each, activation] : kNames) {
    if (each == name) return activation;
    str_append(&known, known.empty() ? "" : ", ", each);
  }
  return absl::InvalidArgumentError(
      str_cat("the activation \"", name, "\" is not known; there are: ", known));
}

at::Tensor activate(Activation activation, const at::Tensor& x) {
  switch (activation) {
    case Activation::kSilu:
      return at::silu(x);
    case Activation::kGelu:
      return at::gelu(x);
    case Activation::kGeluTanh:
      return at::gelu(x, "tanh");
    case Activation::kRelu:
      break;
  }
  return at::relu(x);
}

at::Tensor dropped(const at::Tensor& x, double probability, bool training) {
  return training && probability > 0 ? at::dropout(x, probability, training) : x;
}

}  // namespace shardweave::nn
