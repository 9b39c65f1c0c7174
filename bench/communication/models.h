// Models as a user of LibTorch writes them, for one device: no mesh, no layout, no redistribute.
//
//   const std::shared_ptr<Model> gpt = make_model(ModelKind::kGpt, Sizes());
//   const Batch batch = make_batch(ModelKind::kGpt, Sizes());
//   gpt->loss(batch.input, batch.target).backward();
//
// Pure LibTorch: nothing here includes a header of Shardweave.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "ATen/core/Tensor.h"
#include "torch/nn/module.h"

namespace communication_bench {

enum class ModelKind : uint8_t {
  kGpt,      // LayerNorm, biases, learned positions
  kLlama,    // RMSNorm by hand, rotary positions, grouped queries, SwiGLU, no biases
  kVit,      // convolution over patches, class token, one product for query, key and value
  kMoe,      // GPT, with experts for its feed-forward part that all tokens go through, weighted
  kConvNet,  // convolution, batch norm, relu, three times
};
std::string_view to_string(ModelKind kind);  // "gpt", ...

// Every size divides by 4, so that formulas need no rounding. A step has many more tokens than the
// model has features, as in training, and more than the experts have: only then is it cheaper to
// move parameters than activations, which is what sharded parameters under a sharded batch are for.
// And no fewer words than features: else a rank would rather move the gradient of its words' logits, and
// compute a part of the head's gradient from some of the tokens, than read all of them.
struct Sizes {
  int64_t batch = 8;
  int64_t tokens = 64;  // of a sequence
  int64_t dim = 64;
  int64_t layers = 2;
  int64_t heads = 8;
  int64_t kv_heads = 4;  // of the Llama
  int64_t hidden = 256;
  int64_t vocabulary = 96;
  bool tied = false;           // the Llama's head is its embedding table
  int64_t experts = 4;         // of which `top_k` count for a token
  int64_t top_k = 2;           //
  int64_t expert_hidden = 64;  //
  int64_t image = 32;          // pixels in each direction
  int64_t patch = 4;           //
  int64_t classes = 4;         // of images
  int64_t channels = 8;        // after the convolutional net's first layer
};

class Model : public torch::nn::Module {
 public:
  // The mean cross entropy. Tokens [batch, tokens] and those that follow; or images [batch, 3,
  // image, image] and their classes [batch].
  virtual at::Tensor loss(const at::Tensor& input, const at::Tensor& target) = 0;
};

// With parameters that are the same for every call.
std::shared_ptr<Model> make_model(ModelKind kind, const Sizes& sizes);

struct Batch {
  at::Tensor input, target;
};
Batch make_batch(ModelKind kind, const Sizes& sizes);  // likewise

}  // namespace communication_bench
