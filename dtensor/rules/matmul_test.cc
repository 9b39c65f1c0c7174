// Products, softmax, attention and embedding on shards against one device.
#include <functional>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/observe/comm_trace.h"
#include "shardweave/dtensor/testing/expect_comms.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/dtensor/testing/op_check.h"

namespace shardweave {
namespace {

using testing::check_ops;
using testing::in;
using testing::on_mesh;
using testing::Tensors;
using testing::try_on_mesh;

TEST(MatmulRulesTest, Products) {
  check_ops({
      {"mm",
       {in({7, 5}), in({5, 3})},
       [](const Tensors& x) { return Tensors{at::mm(x[0], x[1])}; }},
      {"mm of a transposed",
       {in({7, 5}).transposed(), in({5, 3}).transposed()},
       [](const Tensors& x) { return Tensors{at::mm(x[0], x[1])}; }},
      {"mm over nothing",
       {in({4, 0}), in({0, 3})},
       [](const Tensors& x) { return Tensors{at::mm(x[0], x[1])}; }},
      {"mm of integers",
       {in({7, 5}).integers(-9, 9), in({5, 3}).integers(-9, 9)},
       [](const Tensors& x) { return Tensors{at::mm(x[0], x[1])}; }},
      {"bmm",
       {in({3, 4, 5}), in({3, 5, 2})},
       [](const Tensors& x) { return Tensors{at::bmm(x[0], x[1])}; }},
      {"mv", {in({7, 5}), in({5})}, [](const Tensors& x) { return Tensors{at::mv(x[0], x[1])}; }},
      {"dot", {in({7}), in({7})}, [](const Tensors& x) { return Tensors{at::dot(x[0], x[1])}; }},
      {"vdot", {in({5}), in({5})}, [](const Tensors& x) { return Tensors{at::vdot(x[0], x[1])}; }},
      {"outer",
       {in({5}), in({3})},
       [](const Tensors& x) { return Tensors{at::outer(x[0], x[1])}; }},
  });
}

TEST(MatmulRulesTest, ProductsWithAnAddend) {
  auto addmm = [](const Tensors& x) { return Tensors{at::addmm(x[0], x[1], x[2], 0.5, 2)}; };
  check_ops({
      {"addmm", {in({7, 3}), in({7, 5}), in({5, 3})}, addmm},
      {"addmm of a row", {in({3}), in({7, 5}), in({5, 3})}, addmm},
      {"addmm of a column", {in({7, 1}), in({7, 5}), in({5, 3})}, addmm},
      {"addmm of one", {in({1, 1}), in({7, 5}), in({5, 3})}, addmm},
      {"addmm of a scalar", {in({}), in({7, 5}), in({5, 3})}, addmm},
      {"addmm to a single row", {in({1, 3}), in({1, 5}), in({5, 3})}, addmm},
      {"addmm_",
       {in({7, 3}), in({7, 5}), in({5, 3})},
       [](const Tensors& x) { return Tensors{x[0].clone().addmm_(x[1], x[2], 0.5, 2)}; }},
      {"addbmm",
       {in({4, 2}), in({3, 4, 5}), in({3, 5, 2})},
       [](const Tensors& x) { return Tensors{at::addbmm(x[0], x[1], x[2], 0.5, 2)}; }},
      {"baddbmm",
       {in({3, 1, 2}), in({3, 4, 5}), in({3, 5, 2})},
       [](const Tensors& x) { return Tensors{at::baddbmm(x[0], x[1], x[2], 0.5, 2)}; }},
      {"addmv",
       {in({7}), in({7, 5}), in({5})},
       [](const Tensors& x) { return Tensors{at::addmv(x[0], x[1], x[2], 0.5, 2)}; }},
      {"addr",
       {in({5, 3}), in({5}), in({3})},
       [](const Tensors& x) { return Tensors{at::addr(x[0], x[1], x[2], 0.5, 2)}; }},
      {"_addmm_activation",
       {in({3}), in({7, 5}), in({5, 3})},
       [](const Tensors& x) { return Tensors{at::_addmm_activation(x[0], x[1], x[2])}; },
       /*gradients=*/false},
  });
}

TEST(MatmulRulesTest, WhatLibTorchMakesOfThem) {
  check_ops({
      {"linear",
       {in({2, 3, 5}), in({4, 5}), in({4})},
       [](const Tensors& x) { return Tensors{at::linear(x[0], x[1], x[2])}; }},
      {"linear without bias",
       {in({7, 5}), in({4, 5})},
       [](const Tensors& x) { return Tensors{at::linear(x[0], x[1])}; }},
      {"matmul",
       {in({2, 3, 5}), in({5, 4})},
       [](const Tensors& x) { return Tensors{at::matmul(x[0], x[1])}; }},
      {"matmul of batches",
       {in({2, 1, 3, 5}), in({3, 5, 4})},
       [](const Tensors& x) { return Tensors{at::matmul(x[0], x[1])}; }},
      {"einsum",
       {in({2, 3, 4, 5}), in({2, 6, 4, 5})},
       [](const Tensors& x) { return Tensors{at::einsum("bqhd,bkhd->bhqk", {x[0], x[1]})}; }},
      {"tensordot",
       {in({3, 4, 5}), in({4, 3, 2})},
       [](const Tensors& x) { return Tensors{at::tensordot(x[0], x[1], {1, 0}, {0, 1})}; }},
  });
}

// Batches and heads are each other's business only in LibTorch's products, which have one dimension
// for both: where the batch is cut unevenly, heads stay cut, too.
TEST(MatmulRulesTest, HeadsStayCutBelowAnUnevenBatch) {
  using Products = std::function<Tensors(const Tensors& qkvb)>;
  const std::vector<std::pair<const char*, Products>> programs = {
      {"matmul", [](const Tensors& x) { return Tensors{at::matmul(x[0], x[1].transpose(2, 3))}; }},
      {"einsum",
       [](const Tensors& x) { return Tensors{at::einsum("bhqd,bhkd->bhqk", {x[0], x[1]})}; }},
      {"attention as written",
       [](const Tensors& x) {
         const at::Tensor scores = at::matmul(x[0], x[1].transpose(2, 3)) * 0.5 + x[3];
         return Tensors{at::matmul(at::softmax(scores, -1), x[2])};
       }},
      // Of a bias that wants a gradient LibTorch makes products.
      {"attention with a bias",
       [](const Tensors& x) {
         return Tensors{at::scaled_dot_product_attention(x[0], x[1], x[2], x[3])};
       }},
      {"heads put together",
       [](const Tensors& x) { return Tensors{x[0].flatten(0, 1) * 2, x[0].flatten(0, 2).exp()}; }},
  };
  struct Meshed {
    std::vector<MeshDim> mesh;
    Placements of_heads, of_bias;
  };
  const std::vector<Meshed> meshes = {
      {{{"dp", 2}}, {Shard(0)}, {Replicate()}},
      {{{"tp", 2}}, {Shard(1)}, {Shard(1)}},
      {{{"dp", 2}, {"tp", 2}}, {Shard(0), Shard(1)}, {Replicate(), Shard(1)}},
      {{{"tp", 2}, {"dp", 2}}, {Shard(1), Shard(0)}, {Shard(1), Replicate()}},
      {{{"dp", 4}, {"tp", 2}}, {Shard(0), Shard(1)}, {Replicate(), Shard(1)}},
      {{{"dp", 2}, {"x", 2}, {"tp", 2}},
       {Shard(0), Replicate(), Shard(1)},
       {Replicate(), Replicate(), Shard(1)}},
      {{{"dp", 2}, {"x", 2}, {"tp", 2}},
       {Shard(0), Shard(1), Shard(1)},
       {Replicate(), Shard(1), Shard(1)}},
  };
  constexpr int64_t kHeads = 8;
  for (const auto& [mesh_dims, of_heads, of_bias] : meshes) {
    for (const int64_t batch : {7, 5, 3}) {  // over 4 ranks: 2, 2, 2, 1; 2, 2, 1, 0; 1, 1, 1, 0
      for (const auto& [name, run] : programs) {
        SCOPED_TRACE(absl::StrCat(name, " of ", batch, " over ", mesh_dims.size(), " dimensions, ",
                                  to_string(of_heads)));
        on_mesh(mesh_dims, [&, run = run](const MeshPtr& mesh) {
          const std::vector<Placements> layouts = {of_heads, of_heads, of_heads, of_bias};
          const Tensors whole = {in({batch, kHeads, 3, 2}).make(1),
                                 in({batch, kHeads, 5, 2}).make(2),
                                 in({batch, kHeads, 5, 2}).make(3), in({1, kHeads, 3, 5}).make(4)};
          Tensors plain, x;
          for (size_t i = 0; i < whole.size(); ++i) {
            plain.push_back(whole[i].clone().requires_grad_());
            x.push_back(distribute_tensor(whole[i], mesh, layouts[i]).requires_grad_());
          }
          Tensors want = run(plain), got;
          {
            const CommTrace trace(mesh);
            got = run(x);
            for (const at::Tensor& y : got) y.backward(y.detach());
            EXPECT_COMMS(trace, {});
          }
          for (size_t i = 0; i < want.size(); ++i) {
            want[i].backward(want[i].detach());
            EXPECT_TRUE(at::allclose(full_tensor(got[i].detach()), want[i]));
          }
          for (size_t i = 0; i < x.size(); ++i) {
            ASSERT_EQ(x[i].grad().defined(), plain[i].grad().defined());
            if (!x[i].grad().defined()) continue;
            EXPECT_TRUE(at::allclose(full_tensor(x[i].grad()), plain[i].grad())) << "input " << i;
          }
        });
      }
    }
  }
}

// The bias of a product over a sharded dimension is added once, not once per rank.
TEST(MatmulRulesTest, AddendOfAPartialProductIsPartial) {
  on_mesh({{"tp", 3}}, [](const MeshPtr& mesh) {
    const at::Tensor x = distribute_tensor(at::ones({2, 7}), mesh, Placements{Shard(1)});
    const at::Tensor w = distribute_tensor(at::ones({7, 4}), mesh, Placements{Shard(0)});
    const at::Tensor b = distribute_tensor(at::full({4}, 100.0), mesh, Placements{Replicate()});
    const at::Tensor y = at::addmm(b, x, w);
    EXPECT_EQ(layout_of(y).to_string(), "[P(sum)]");
    EXPECT_TRUE(at::equal(full_tensor(y), at::full({2, 4}, 107.0)));
  });
}

TEST(SoftmaxRulesTest, Softmax) {
  check_ops({
      {"softmax", {in({7, 5})}, [](const Tensors& x) { return Tensors{at::softmax(x[0], 1)}; }},
      {"softmax along the first",
       {in({5, 3, 2})},
       [](const Tensors& x) { return Tensors{at::softmax(x[0], 0)}; }},
      {"softmax with a dtype",
       {in({7, 5}).dtype(at::kFloat)},
       [](const Tensors& x) { return Tensors{at::softmax(x[0], -1, at::kDouble)}; },
       true,
       1e-6},
      {"softmax of a scalar",
       {in({})},
       [](const Tensors& x) { return Tensors{at::softmax(x[0], 0)}; }},
      {"log_softmax",
       {in({2, 3, 5})},
       [](const Tensors& x) { return Tensors{at::log_softmax(x[0], -1)}; }},
      {"_safe_softmax",
       {in({2, 5})},
       [](const Tensors& x) { return Tensors{at::_safe_softmax(x[0], -1)}; }},
      {"_masked_softmax",
       {in({3, 2, 4, 4}), in({3, 2, 4, 4}).flags()},
       [](const Tensors& x) { return Tensors{at::_masked_softmax(x[0], x[1], 3, 2)}; }},
      {"_masked_softmax of a source mask",
       {in({3, 2, 4, 4}), in({4, 4}).flags()},
       [](const Tensors& x) { return Tensors{at::_masked_softmax(x[0], x[1], 3, 0)}; },
       false},
      {"_masked_softmax of padding",
       {in({3, 2, 4, 4}), in({3, 4}).flags()},
       [](const Tensors& x) { return Tensors{at::_masked_softmax(x[0], x[1], 3, 1)}; },
       false},
  });
}

TEST(AttentionRulesTest, FlashAttention) {
  auto attention = [](const Tensors& x) {
    return Tensors{at::scaled_dot_product_attention(x[0], x[1], x[2])};
  };
  auto masked = [](const Tensors& x) {
    return Tensors{at::scaled_dot_product_attention(x[0], x[1], x[2], x[3])};
  };
  check_ops({
      {"attention", {in({3, 2, 5, 4}), in({3, 2, 6, 4}), in({3, 2, 6, 4})}, attention},
      {"attention of [B, L, H, E]",
       {in({3, 5, 2, 4}), in({3, 6, 2, 4}), in({3, 6, 2, 4})},
       [](const Tensors& x) {
         return Tensors{at::scaled_dot_product_attention(x[0].transpose(1, 2), x[1].transpose(1, 2),
                                                         x[2].transpose(1, 2))
                            .transpose(1, 2)};
       }},
      {"causal attention",
       {in({3, 2, 5, 4}), in({3, 2, 5, 4}), in({3, 2, 5, 4})},
       [](const Tensors& x) {
         return Tensors{at::scaled_dot_product_attention(x[0], x[1], x[2], {}, 0.0, true)};
       }},
      {"attention with a mask",
       {in({3, 2, 5, 4}), in({3, 2, 6, 4}), in({3, 2, 6, 4}), in({5, 6}).constant()},
       masked},
      {"attention with a mask per batch",
       {in({3, 2, 5, 4}), in({3, 2, 6, 4}), in({3, 2, 6, 4}), in({3, 1, 5, 6}).constant()},
       masked},
      {"attention with a mask per head",
       {in({1, 3, 5, 4}), in({1, 3, 6, 4}), in({1, 3, 6, 4}), in({1, 3, 1, 6}).constant()},
       masked},
      {"attention with flags",
       {in({3, 2, 5, 4}), in({3, 2, 6, 4}), in({3, 2, 6, 4}), in({3, 2, 5, 6}).flags()},
       masked},
      {"attention by products, with a gradient of the mask",
       {in({3, 2, 5, 4}), in({3, 2, 6, 4}), in({3, 2, 6, 4}), in({5, 6})},
       masked},
      {"flash attention with logsumexp",
       {in({3, 2, 5, 4}), in({3, 2, 6, 4}), in({3, 2, 6, 4})},
       [](const Tensors& x) {
         auto [output, logsumexp] =
             at::_scaled_dot_product_flash_attention_for_cpu(x[0], x[1], x[2]);
         return Tensors{output, logsumexp};
       },
       false},
  });
}

// Several sequences that are cut: the rows of a projection are a strided cut of their tokens. What all
// queries say of the keys goes to whoever has the tokens, and from there to the weight and on.
TEST(AttentionRulesTest, GradientsOfTheKeysOfACutBatchAreSentOnce) {
  on_mesh({{"sp", 2}}, [](const MeshPtr& mesh) {
    constexpr int64_t kBatch = 3, kTokens = 64, kWidth = 256;
    auto parameter = [&](const at::Tensor& values) {
      return distribute_tensor(values, mesh, Placements{Replicate()}).requires_grad_();
    };
    auto heads = [](const at::Tensor& of_tokens) {
      return of_tokens.view({kBatch, kTokens, 2, kWidth / 2}).transpose(1, 2);
    };
    const at::Tensor input =
        distribute_tensor(at::randn({kBatch, kTokens, kWidth}), mesh, Placements{Shard(1)});
    const at::Tensor scale = parameter(at::randn({kWidth}));
    const at::Tensor weight = parameter(at::randn({kWidth, kWidth}));
    const at::Tensor x = input * scale;
    const at::Tensor scores = heads(x).matmul(heads(at::linear(x, weight)).transpose(2, 3));
    const at::Tensor loss = at::softmax(scores, -1).square().sum();
    const CommTrace trace(mesh);
    loss.backward();
    // The keys once more, whole, for the gradient of the queries.
    constexpr int64_t kBytes = kBatch * kTokens * kWidth / 2 * 4;
    EXPECT_COMMS(trace, {testing::all_gather("sp", kBytes), testing::reduce_scatter("sp", kBytes)});
  });
}

TEST(AttentionRulesTest, RefusesDropoutInTheFusedOperator) {
  const absl::Status status = try_on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor q = distribute_tensor(at::ones({2, 2, 3, 4}), mesh, Placements{Shard(0)});
    at::_scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.5);
  });
  EXPECT_FALSE(status.ok());
  EXPECT_NE(status.ToString().find("dropout"), std::string::npos) << status;
}

TEST(EmbeddingRulesTest, Embedding) {
  auto plain = [](const Tensors& x) { return Tensors{at::embedding(x[0], x[1])}; };
  check_ops({
      {"embedding", {in({10, 3}), in({7, 2}).integers(0, 10)}, plain},
      {"embedding of one index", {in({10, 3}), in({}).integers(0, 10)}, plain},
      {"embedding of few rows", {in({3, 5}), in({6}).integers(0, 3)}, plain},
      {"embedding of nothing", {in({10, 3}), in({0}).integers(0, 10)}, plain},
      {"embedding with padding",
       {in({4, 3}), in({3, 5}).integers(0, 4)},
       [](const Tensors& x) { return Tensors{at::embedding(x[0], x[1], 2)}; }},
      {"embedding by frequency",
       {in({4, 3}), in({9}).integers(0, 4)},
       [](const Tensors& x) { return Tensors{at::embedding(x[0], x[1], -1, true)}; }},
  });
}

TEST(EmbeddingRulesTest, RowsSumUpAcrossRanks) {
  on_mesh({{"tp", 4}}, [](const MeshPtr& mesh) {
    const at::Tensor table = at::arange(10.0).view({5, 2});
    const at::Tensor w = distribute_tensor(table, mesh, Placements{Shard(0)});
    const at::Tensor i = distribute_tensor(at::arange(5), mesh, Placements{Replicate()});
    StrictScope strict(mesh);
    const at::Tensor y = at::embedding(w, i);
    EXPECT_EQ(layout_of(y).to_string(), "[P(sum)]");
    EXPECT_TRUE(at::equal(full_tensor(y), table));
  });
}

TEST(EmbeddingRulesTest, RefusesAnIndexThatNoRankHas) {
  for (int64_t index : {-1, 5}) {
    const absl::Status status = try_on_mesh({{"tp", 2}}, [&](const MeshPtr& mesh) {
      const at::Tensor w = distribute_tensor(at::ones({5, 2}), mesh, Placements{Shard(0)});
      const at::Tensor i = distribute_tensor(at::full({2}, index), mesh, Placements{Replicate()});
      at::embedding(w, i);
    });
    EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange);
    EXPECT_NE(status.ToString().find("table of 5 rows"), std::string::npos) << status;
  }
}

}  // namespace
}  // namespace shardweave
