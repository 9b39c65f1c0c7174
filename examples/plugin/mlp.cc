#include "mlp.h"

#include "ATen/ops/gelu.h"
#include "ATen/ops/linear.h"
#include "linear_gelu.h"

namespace plugin_example {

using shardweave::ModuleSharding;
using shardweave::PatchRequest;
using shardweave::Plugins;
using shardweave::Replicate;
using shardweave::Shard;
using shardweave::ShardingRequest;

MlpImpl::MlpImpl(int64_t dim, int64_t hidden)
    : up(register_module("up", torch::nn::Linear(dim, hidden))),
      down(register_module("down", torch::nn::Linear(hidden, dim))) {}

at::Tensor MlpImpl::forward(const at::Tensor& x) {
  return x + down(at::gelu(up(x)));
}

FusedMlpImpl::FusedMlpImpl(const MlpImpl& mlp)
    : up(register_parameter("up", mlp.up->weight)),
      up_bias(register_parameter("up_bias", mlp.up->bias)),
      down(register_parameter("down", mlp.down->weight)),
      down_bias(register_parameter("down_bias", mlp.down->bias)) {}

at::Tensor FusedMlpImpl::forward(const at::Tensor& x) {
  return x + at::linear(linear_gelu(x, up, up_bias), down, down_bias);
}

const Plugins& plugins() {
  static const Plugins all =
      Plugins()
          .rule("example::linear_gelu", linear_gelu_rule())
          .rule("example::linear_gelu_backward", linear_gelu_backward_rule())
          .shards<FusedMlpImpl>([](const FusedMlpImpl& /*mlp*/, const ShardingRequest& /*along*/) {
            return ModuleSharding{
                .parameter = {{"up", Shard(0)}, {"up_bias", Shard(0)}, {"down", Shard(1)}},
                .forward = {{"output", Replicate()}}};
          })
          .patch<MlpImpl>(
              [](const MlpImpl& mlp, const PatchRequest& /*where*/) { return FusedMlp(mlp); });
  return all;
}

}  // namespace plugin_example
