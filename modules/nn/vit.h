// The vision transformer (Dosovitskiy et al.), with the names, the numerics and the configurations
// of transformers' ViTForImageClassification.
//
//   const nn::VitOptions options = {.hidden_size = 64, .num_hidden_layers = 4,
//       .num_attention_heads = 4, .intermediate_size = 256, .image_size = 8, .patch_size = 2,
//       .num_channels = 1, .num_labels = 10};            // or nn::VitOptions::from_json(text)
//   nn::Vit model(options);
//   parallelize_module(*model, mesh, nn::vit_plan(options, mesh->mesh()));
//   at::cross_entropy_loss(model(images), labels).backward();
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "shardweave/mesh/device_mesh.h"
#include "shardweave/modules/hooked.h"
#include "shardweave/modules/nn/activation.h"
#include "shardweave/modules/nn/grouped_query_attention.h"
#include "shardweave/modules/nn/plan_options.h"
#include "shardweave/modules/parallelize_module.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/conv.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/modules/normalization.h"
#include "torch/nn/pimpl.h"

namespace shardweave::nn {

// The names and defaults of transformers' ViTConfig; images and patches are square.
struct VitOptions {
  int64_t hidden_size = 768;
  int64_t num_hidden_layers = 12;
  int64_t num_attention_heads = 12;
  int64_t intermediate_size = 3072;
  Activation hidden_act = Activation::kGelu;
  double hidden_dropout_prob = 0, attention_probs_dropout_prob = 0;  // in training
  double initializer_range = 0.02;
  double layer_norm_eps = 1e-12;
  int64_t image_size = 224;
  int64_t patch_size = 16;
  int64_t num_channels = 3;
  bool qkv_bias = true;
  int64_t num_labels = 2;

  // Of a config.json with "model_type": "vit"; "id2label" counts the labels. InvalidArgument, with
  // its line: a value of another type, an unknown activation, what check() says.
  static absl::StatusOr<VitOptions> from_json(std::string_view text);

  AttentionOptions attention() const;
};

// InvalidArgument: sizes that are not positive or do not divide, a dropout that is no probability.
absl::Status check(const VitOptions& options);

struct VitPatchEmbeddingsImpl : torch::nn::Module {
  explicit VitPatchEmbeddingsImpl(const VitOptions& options);
  at::Tensor forward(const at::Tensor& pixel_values);  // [batch, patches, hidden_size]

  torch::nn::Conv2d projection{nullptr};
};
using VitPatchEmbeddings = torch::nn::ModuleHolder<Hooked<VitPatchEmbeddingsImpl>>;

// A token for the class before the patches, and positions added.
struct VitEmbeddingsImpl : torch::nn::Module {
  explicit VitEmbeddingsImpl(const VitOptions& options);
  at::Tensor forward(const at::Tensor& pixel_values);

  at::Tensor cls_token, position_embeddings;
  VitPatchEmbeddings patch_embeddings{nullptr};

 private:
  const double dropout_;
};
using VitEmbeddings = torch::nn::ModuleHolder<Hooked<VitEmbeddingsImpl>>;

struct VitMlpImpl : torch::nn::Module {
  explicit VitMlpImpl(const VitOptions& options);
  at::Tensor forward(const at::Tensor& x);

  torch::nn::Linear fc1{nullptr}, fc2{nullptr};

 private:
  const Activation activation_;
};
using VitMlp = torch::nn::ModuleHolder<Hooked<VitMlpImpl>>;

struct VitLayerImpl : torch::nn::Module {
  explicit VitLayerImpl(const VitOptions& options);
  at::Tensor forward(const at::Tensor& x);

  GroupedQueryAttention attention{nullptr};
  torch::nn::LayerNorm layernorm_before{nullptr}, layernorm_after{nullptr};
  VitMlp mlp{nullptr};

 private:
  const double dropout_;
};
using VitLayer = torch::nn::ModuleHolder<Hooked<VitLayerImpl>>;

// Without the classifier: "vit" in its FQNs.
struct VitEncoderImpl : torch::nn::Module {
  explicit VitEncoderImpl(const VitOptions& options);
  at::Tensor forward(const at::Tensor& pixel_values);  // [batch, 1 + patches, hidden_size]

  VitEmbeddings embeddings{nullptr};
  std::vector<VitLayer> layers;
  torch::nn::LayerNorm layernorm{nullptr};
};
using VitEncoder = torch::nn::ModuleHolder<Hooked<VitEncoderImpl>>;

// vit.embeddings, vit.layers.N.{attention,layernorm_before,layernorm_after,mlp}, vit.layernorm,
// classifier: transformers 5's names in memory; in files they are those of transformers 4
// (vit.encoder.layer.N.attention.attention.query, ...). forward: pixel_values
// [batch, num_channels, image_size, image_size] -> logits [batch, num_labels].
struct VitImpl : torch::nn::Module {
  // Throws Error (InvalidArgument): check()
  explicit VitImpl(const VitOptions& options);
  at::Tensor forward(const at::Tensor& pixel_values);

  VitEncoder vit{nullptr};
  torch::nn::Linear classifier{nullptr};
};
using Vit = torch::nn::ModuleHolder<Hooked<VitImpl>>;

// PlanOptions::shard_vocabulary says nothing here. Throws Error: InvalidArgument if the heads do
// not divide by the ranks; NotFound if the mesh has no such dimension.
ShardingPlan vit_plan(const VitOptions& options, const DeviceMesh& mesh,
                      const PlanOptions& plan_options = {});

}  // namespace shardweave::nn
