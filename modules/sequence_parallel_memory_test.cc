// What a rank keeps of a forward pass for the backward pass, as its allocator sees it: under
// SequenceParallel that of the formula, in which everything outside of attention and MLP is 1/tp.
#include <cstdint>

#include "ATen/ATen.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/testing/counting_allocator.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/modules/parallel_style.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/modules/normalization.h"
#include "torch/nn/pimpl.h"

namespace shardweave {
namespace {

using testing::CountingAllocator;
using testing::on_mesh;
namespace nn = torch::nn;

constexpr int64_t kBatch = 2, kLength = 64, kDim = 64, kHeads = 4, kBlocks = 3;

struct BlockImpl : nn::Module {
  nn::LayerNorm norm1 = register_module("norm1", nn::LayerNorm(nn::LayerNormOptions({kDim})));
  nn::Linear q = register_module("q", nn::Linear(kDim, kDim));
  nn::Linear k = register_module("k", nn::Linear(kDim, kDim));
  nn::Linear v = register_module("v", nn::Linear(kDim, kDim));
  nn::Linear o = register_module("o", nn::Linear(kDim, kDim));
  nn::LayerNorm norm2 = register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({kDim})));
  nn::Linear up = register_module("up", nn::Linear(kDim, 4 * kDim));
  nn::Linear down = register_module("down", nn::Linear(4 * kDim, kDim));
  at::Tensor forward(const at::Tensor& x) {
    const auto heads = [&](const at::Tensor& t) {
      return t.view({kBatch, kLength, kHeads, kDim / kHeads}).transpose(1, 2);
    };
    const at::Tensor n = norm1(x);
    const at::Tensor mixed =
        at::scaled_dot_product_attention(heads(q(n)), heads(k(n)), heads(v(n)));
    const at::Tensor y = x + o(mixed.transpose(1, 2).reshape({kBatch, kLength, kDim}));
    return y + down(at::gelu(up(norm2(y))));
  }
};
TORCH_MODULE(Block);

double kept_bytes(int64_t ranks, const ParallelStyle& style, const Placement& input) {
  double kept = 0;
  on_mesh({{"tp", ranks}}, [&](const MeshPtr& mesh) {
    nn::Sequential model;
    for (int64_t i = 0; i < kBlocks; ++i) model->push_back(Block());
    parallelize_module(*model, mesh, style);
    at::Tensor x = ones({kBatch, kLength, kDim}, mesh, {input}).requires_grad_();
    (void)model->forward(x);  // what is made once
    const int64_t before = CountingAllocator::mine().live;
    const at::Tensor y = model->forward(x);
    const int64_t after = CountingAllocator::mine().live;
    if (mesh->coordinate()[0] == 0) kept = static_cast<double>(after - before);
    y.sum().backward();
  });
  return kept;
}

// In bytes of float. `outside`: how many ranks share what is outside of attention and MLP.
double formula(double ranks, double outside) {
  const double all = sizeof(float) * kBatch * kLength * kDim;
  const double gathered = 2 * all;                       // into query, key, value; into up
  const double residuals = 2 * all / outside;            // behind attention, and the result
  const double attention = 4 * all / ranks;              // query, key, value, mixed
  const double mlp = 2 * 4 * all / ranks;                // before and behind gelu
  const double rows = sizeof(float) * kBatch * kLength;  // mean and 1/deviation, sums of softmax
  return kBlocks *
         (gathered + residuals + attention + mlp + 4 * rows / outside + kHeads * rows / ranks);
}

TEST(SequenceParallelMemoryTest, KeepsWhatTheFormulaSays) {
  CountingAllocator::install();
  for (const int64_t ranks : {1, 2, 4}) {
    const auto n = static_cast<double>(ranks);
    const double pairwise = kept_bytes(ranks, PairwiseParallel{.heads = kHeads}, Replicate());
    EXPECT_NEAR(pairwise, formula(n, 1), 0.05 * formula(n, 1)) << ranks << " ranks, pairwise";
    const double sequence =
        kept_bytes(ranks, SequenceParallel{.sequence_dim = 1, .heads = kHeads}, Shard(1));
    EXPECT_NEAR(sequence, formula(n, n), 0.05 * formula(n, n)) << ranks << " ranks, sequence";
  }
}

}  // namespace
}  // namespace shardweave
