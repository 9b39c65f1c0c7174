// Tensors packed along a dimension whose parts are cut each for itself: query, key and value in one,
// gate and up in one. Forward and backward as on one device, and nothing is sent.
#include <functional>
#include <vector>

#include "ATen/ATen.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/testing/expect_comms.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "torch/csrc/autograd/autograd.h"
#include "torch/nn/modules/activation.h"

namespace shardweave {
namespace {

using at::Tensor;
using at::indexing::None;
using at::indexing::Slice;
using testing::all_reduce;
using testing::on_mesh;

struct Packed {
  const char* name;
  int64_t size;  // of dimension 1
  int64_t split_factor;
  std::function<std::vector<Tensor>(const Tensor&)> parts;
  std::vector<Placement> placements;  // of the parts
};

const std::vector<Packed>& cases() {
  using T = const Tensor&;
  using Parts = std::vector<Tensor>;
  static const std::vector<Packed>& all = *new std::vector<Packed>{
      {"split", 12, 3, [](T x) { return x.split(4, 1); }, {Shard(1), Shard(1), Shard(1)}},
      {"split, uneven", 15, 3, [](T x) { return x.split(5, 1); }, {Shard(1), Shard(1), Shard(1)}},
      {"split, empty on some ranks",
       2,
       2,
       [](T x) { return x.split(1, -1); },
       {Shard(1), Shard(1)}},
      {"chunk", 12, 3, [](T x) { return x.chunk(3, 1); }, {Shard(1), Shard(1), Shard(1)}},
      {"unsafe_chunk", 8, 4, [](T x) { return at::unsafe_chunk(x, 4, 1); }, {4, Shard(1)}},
      {"of several chunks each", 12, 6, [](T x) { return x.split(4, 1); }, {3, StridedShard(1, 2)}},
      {"of different sizes",
       12,
       6,
       [](T x) { return x.split_with_sizes({8, 2, 2}, 1); },
       {StridedShard(1, 4), Shard(1), Shard(1)}},
      {"the last is smaller",
       10,
       5,
       [](T x) { return x.split(4, 1); },
       {StridedShard(1, 2), StridedShard(1, 2), Shard(1)}},
      {"slice",
       12,
       3,
       [](T x) { return Parts{x.slice(1, 0, 4), x.slice(1, 4, -4), x.slice(1, -4)}; },
       {Shard(1), Shard(1), Shard(1)}},
      {"slice of two",
       9,
       3,
       [](T x) { return Parts{x.index({"...", Slice(3, None)})}; },
       {StridedShard(1, 2)}},
      {"narrow", 12, 3, [](T x) { return Parts{x.narrow(1, 4, 4)}; }, {Shard(1)}},
      {"glu", 10, 2, [](T x) { return Parts{at::glu(x, 1)}; }, {Shard(1)}},
      {"glu of many", 12, 4, [](T x) { return Parts{at::glu(x, -1)}; }, {StridedShard(1, 2)}},
      {"packed again",
       12,
       3,
       [](T x) {
         const Parts p = x.split(4, 1);
         return Parts{at::cat({p[2], p[0], p[1]}, 1), at::cat({p[1], p[2]}, 1)};
       },
       {StridedShard(1, 3), StridedShard(1, 2)}},
      {"packed of packed",
       12,
       6,
       [](T x) {
         return Parts{
             at::cat({x.slice(1, 0, 4), x.slice(1, 10), at::zeros_like(x).slice(1, 6, 8)}, 1)};
       },
       {StridedShard(1, 4)}},
  };
  return all;
}

// One mesh dimension cuts the parts, two do, or the other one the batch.
TEST(PackedTest, PartsAreTakenAndJoinedWhereTheyLie) {
  const std::vector<std::vector<MeshDim>> meshes = {
      {{"tp", 2}}, {{"tp", 3}}, {{"x", 2}, {"y", 2}}, {{"x", 2}, {"y", 3}}};
  for (const std::vector<MeshDim>& dims : meshes) {
    on_mesh(dims, [](const MeshPtr& mesh) {
      for (const Packed& c : cases()) {
        const Placement packed = StridedShard(1, c.split_factor);
        std::vector<Placements> layouts = {Placements(mesh->mesh().ndim(), packed)};
        if (mesh->mesh().ndim() == 2) {
          layouts.push_back({Shard(0), packed});
          layouts.push_back({packed, Shard(0)});
          layouts.push_back({packed, Replicate()});
          layouts.push_back({Partial(), packed});
        }
        for (const Placements& placements : layouts) {
          SCOPED_TRACE(c.name + to_string(placements));
          const Tensor plain =
              at::arange(5 * c.size, at::kDouble).view({5, c.size}).sin().requires_grad_();
          const Tensor x =
              redistribute(distribute_tensor(plain.detach(), mesh,
                                             Placements(mesh->mesh().ndim(), Replicate())),
                           placements)
                  .requires_grad_();
          const DispatchCounters before = dispatch_counters(mesh);
          const std::vector<Tensor> parts = c.parts(x), wanted = c.parts(plain);
          ASSERT_EQ(parts.size(), wanted.size());
          Tensor sum = at::zeros({}, at::kDouble);
          for (size_t i = 0; i < parts.size(); ++i) {
            EXPECT_TRUE(at::allclose(full_tensor(parts[i].detach()), wanted[i], 1e-12, 1e-12));
            if (placements.back() == packed && !placements.front().is_partial()) {
              EXPECT_EQ(layout_of(parts[i]).placements().back(), c.placements[i]);
            }
            sum = sum + (wanted[i] * wanted[i].detach().cos()).sum();
          }
          // A Partial is reduced once rather than for each part.
          if (!placements.front().is_partial()) {
            EXPECT_EQ(dispatch_counters(mesh).implicit_redistributions,
                      before.implicit_redistributions);
          }
          sum.backward();
          // The same gradients, as they would come from what follows.
          std::vector<Tensor> gradients;
          for (size_t i = 0; i < parts.size(); ++i) {
            gradients.push_back(
                redistribute(distribute_tensor(wanted[i].detach().cos(), mesh,
                                               Placements(mesh->mesh().ndim(), Replicate())),
                             layout_of(parts[i]).placements()));
          }
          const DispatchCounters forward = dispatch_counters(mesh);
          torch::autograd::backward(parts, gradients);
          EXPECT_EQ(dispatch_counters(mesh).implicit_redistributions,
                    forward.implicit_redistributions);
          EXPECT_TRUE(at::allclose(full_tensor(x.grad()), plain.grad(), 1e-12, 1e-12))
              << full_tensor(x.grad()) << plain.grad();
        }
      }
    });
  }
}

TEST(PackedTest, PartsAreViewsThatCanBeWritten) {
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    const Tensor plain = at::arange(24, at::kDouble).view({2, 12});
    const Tensor x = distribute_tensor(plain.clone(), mesh, {StridedShard(1, 3)});
    x.split(4, 1)[1].mul_(2);
    x.slice(1, 8, 12).zero_();
    plain.slice(1, 4, 8).mul_(2);
    plain.slice(1, 8, 12).zero_();
    EXPECT_TRUE(at::equal(full_tensor(x), plain)) << full_tensor(x);
  });
}

// What is no whole number of chunks, or skips elements, is gathered as before.
TEST(PackedTest, OtherPartsAreGathered) {
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    const Tensor plain = at::arange(24, at::kDouble).view({2, 12});
    const Tensor x = distribute_tensor(plain, mesh, {StridedShard(1, 3)});
    EXPECT_TRUE(at::equal(full_tensor(x.slice(1, 4, 8, 2)), plain.slice(1, 4, 8, 2)));
    EXPECT_TRUE(at::equal(full_tensor(x.slice(1, 3, 7)), plain.slice(1, 3, 7)));
    EXPECT_TRUE(at::equal(full_tensor(x.slice(1, 6, 2)), plain.slice(1, 6, 2)));
    EXPECT_TRUE(at::equal(full_tensor(x.split(6, 1)[1]), plain.split(6, 1)[1]));
    EXPECT_TRUE(at::equal(full_tensor(at::glu(x, 1)), at::glu(plain, 1)));
  });
}

// Packed like the halves, but of another size: chunks of one are none of the other.
TEST(PackedTest, AGradientThatLiesAsWhatIsPacked) {
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    const Tensor grad = at::arange(18, at::kDouble).view({3, 6});
    const Tensor self = at::arange(36, at::kDouble).view({3, 12}).sin();
    const Placements packed = {StridedShard(1, 2)};
    const Tensor got = at::glu_backward(distribute_tensor(grad, mesh, packed),
                                        distribute_tensor(self, mesh, packed), 1);
    EXPECT_TRUE(at::allclose(full_tensor(got), at::glu_backward(grad, self, 1), 1e-12, 1e-12));
  });
}

// LibTorch's own attention, its three projections in one weight: one all-reduce, as theory has it.
TEST(PackedTest, MultiheadAttentionWithOnePackedWeight) {
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    torch::nn::MultiheadAttention plain(torch::nn::MultiheadAttentionOptions(8, 4));
    plain->to(at::kDouble);
    {
      const torch::NoGradGuard no_grad;
      int64_t seed = 0;
      for (Tensor& p : plain->parameters()) {
        p.copy_((at::arange(p.numel(), at::kDouble) + ++seed).sin().view(p.sizes()));
      }
    }
    torch::nn::MultiheadAttention ours(torch::nn::MultiheadAttentionOptions(8, 4));
    ours->to(at::kDouble);
    {
      const torch::NoGradGuard no_grad;
      for (size_t i = 0; i < ours->parameters().size(); ++i) {
        ours->parameters()[i].copy_(plain->parameters()[i]);
      }
    }
    distribute_module(
        *ours, mesh,
        {{"in_proj*", {{"tp", StridedShard(0, 3)}}}, {"out_proj.weight", {{"tp", Shard(1)}}}});
    const Tensor x = at::arange(5 * 3 * 8, at::kDouble).view({5, 3, 8}).cos();
    const Tensor dx = distribute_tensor(x, mesh, {Replicate()});
    CommTrace forward(mesh);
    const Tensor y = std::get<0>(ours(dx, dx, dx, Tensor(), /*need_weights=*/false));
    const Tensor loss = y.square().sum();
    EXPECT_COMMS(forward, {all_reduce()});
    CommTrace backward(mesh);
    loss.backward();
    EXPECT_COMMS(backward, {});
    const Tensor want = std::get<0>(plain(x, x, x, Tensor(), false));
    want.square().sum().backward();
    EXPECT_TRUE(at::allclose(full_tensor(y.detach()), want, 1e-9, 1e-9));
    for (const auto& p : plain->named_parameters()) {
      const Tensor grad = ours->named_parameters()[p.key()].grad();
      EXPECT_EQ(layout_of(grad), layout_of(ours->named_parameters()[p.key()])) << p.key();
      EXPECT_TRUE(at::allclose(full_tensor(grad), p.value().grad(), 1e-9, 1e-9)) << p.key();
    }
  });
}

}  // namespace
}  // namespace shardweave
