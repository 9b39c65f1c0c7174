#include "shardweave/modules/nn/attention.h"

#include <tuple>

#include "ATen/ops/_scaled_dot_product_attention_math.h"
#include "ATen/ops/scaled_dot_product_attention.h"

namespace shardweave::nn_internal {

at::Tensor attention(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values,
                     double dropout, bool is_causal, std::optional<double> scale) {
  if (dropout == 0) {
    return at::scaled_dot_product_attention(queries, keys, values, /*attn_mask=*/{},
                                            /*dropout_p=*/0, is_causal, scale);
  }
  return std::get<0>(at::_scaled_dot_product_attention_math(queries, keys, values, /*attn_mask=*/{},
                                                            dropout, is_causal,
                                                            /*dropout_mask=*/{}, scale));
}

}  // namespace shardweave::nn_internal
