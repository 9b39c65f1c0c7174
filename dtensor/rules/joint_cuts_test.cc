// Several mesh dimensions that cut the same dimension of a tensor, or dimensions that belong
// together (channels and groups, heads and keys, rows and indices), forward and backward against
// one device. That every rule is right for such layouts is what validate_decisions tries; here are
// whole operators of the user's with their gradients.
#include <vector>

#include "ATen/ATen.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/dtensor/testing/op_check.h"

namespace shardweave {
namespace {

using testing::check_on_mesh;
using testing::CheckOptions;
using testing::in;
using testing::on_mesh;
using testing::OpCase;
using testing::Tensors;

void check_jointly(const std::vector<OpCase>& ops,
                   const std::vector<std::vector<MeshDim>>& meshes = {{{"x", 2}, {"y", 2}}}) {
  CheckOptions options;
  options.max_combinations = 30;
  for (const OpCase& op : ops) {
    for (const std::vector<MeshDim>& mesh : meshes) {
      for (const std::string& text : check_on_mesh(op, mesh, options).differences) {
        ADD_FAILURE() << text;
      }
    }
  }
}

// Six groups: two ranks may have three each, three ranks two, four none.
TEST(JointCutsTest, GroupsThatOneMeshDimensionMayCut) {
  on_mesh({{"x", 2}, {"y", 2}}, [](const MeshPtr& mesh) {
    const std::vector<int64_t> no_padding = {0};
    const at::Tensor x = at::arange(6, at::kDouble).view({1, 6, 1}) + 1;
    const at::Tensor w = at::arange(24, at::kDouble).view({24, 1, 1}) - 7;
    const Placements layouts[][2] = {{{Shard(1), Replicate()}, {Replicate(), Shard(0)}},
                                     {{Replicate(), Replicate()}, {Shard(0), Shard(0)}},
                                     {{Shard(1), Shard(1)}, {Shard(0), Shard(0)}},
                                     {{Shard(1), Shard(1)}, {Replicate(), Replicate()}}};
    for (const auto& [of_x, of_w] : layouts) {
      const at::Tensor dx = distribute_tensor(x, mesh, of_x).detach().requires_grad_();
      const at::Tensor dw = distribute_tensor(w, mesh, of_w).detach().requires_grad_();
      const at::Tensor px = x.clone().requires_grad_(), pw = w.clone().requires_grad_();
      const at::Tensor y = at::conv1d(dx, dw, {}, 1, at::IntArrayRef(no_padding), 1, 6);
      const at::Tensor want = at::conv1d(px, pw, {}, 1, at::IntArrayRef(no_padding), 1, 6);
      EXPECT_TRUE(at::equal(full_tensor(y.detach()), want)) << to_string(of_x) << to_string(of_w);
      y.pow(2).sum().backward();
      want.pow(2).sum().backward();
      EXPECT_TRUE(at::equal(full_tensor(dx.grad()), px.grad())) << to_string(of_x);
      EXPECT_TRUE(at::equal(full_tensor(dw.grad()), pw.grad())) << to_string(of_w);
    }
  });
}

TEST(JointCutsTest, ChannelsAndGroups) {
  check_jointly(
      {
          {"grouped conv1d",
           {in({3, 6, 5}), in({12, 1, 3}), in({12})},
           [](const Tensors& x) { return Tensors{at::conv1d(x[0], x[1], x[2], 1, 1, 1, 6)}; }},
          {"grouped conv_transpose1d",
           {in({2, 12, 4}), in({12, 2, 2})},
           [](const Tensors& x) {
             return Tensors{at::conv_transpose1d(x[0], x[1], {}, 1, 0, 0, 6)};
           }},
          {"patches",
           {in({2, 3, 8, 8}), in({4, 3, 2, 2})},
           [](const Tensors& x) { return Tensors{at::conv2d(x[0], x[1], {}, 2)}; }},
          {"group_norm",
           {in({4, 12, 3}), in({12}), in({12})},
           [](const Tensors& x) { return Tensors{at::group_norm(x[0], 6, x[1], x[2])}; }},
          {"batch_norm",
           {in({5, 6, 3}), in({6}), in({6})},
           [](const Tensors& x) {
             return Tensors{at::batch_norm(x[0], x[1], x[2], {}, {}, true, 0.1, 1e-5, false)};
           }},
          {"pixel_shuffle",
           {in({3, 8, 2, 3})},
           [](const Tensors& x) { return Tensors{at::pixel_shuffle(x[0], 2)}; }},
          {"pixel_unshuffle",
           {in({3, 2, 4, 6})},
           [](const Tensors& x) { return Tensors{at::pixel_unshuffle(x[0], 2)}; }},
          {"channel_shuffle",
           {in({3, 6, 2, 2})},
           [](const Tensors& x) { return Tensors{at::channel_shuffle(x[0], 3)}; }},
      },
      {{{"x", 2}, {"y", 2}}, {{"x", 2}, {"y", 3}}});
}

TEST(JointCutsTest, HeadsAndPatches) {
  const auto q = in({2, 6, 4, 3}), kv = in({2, 3, 4, 3});
  check_jointly({
      {"attention of groups of heads",
       {q, kv, kv},
       [](const Tensors& x) {
         return Tensors{at::scaled_dot_product_attention(x[0], x[1], x[2], {}, 0.0, true, {},
                                                         /*enable_gqa=*/true)};
       }},
      {"heads of a projection",
       {in({2, 5, 4}), in({12, 4})},
       [](const Tensors& x) {
         return Tensors{at::linear(x[0], x[1]).view({2, 5, 6, 2}).transpose(1, 2)};
       }},
      {"heads put together",
       {in({2, 6, 5, 2})},
       [](const Tensors& x) { return Tensors{x[0].transpose(1, 2).reshape({2, 5, 12})}; }},
      {"repeat_interleave",
       {in({6, 3})},
       [](const Tensors& x) {
         return Tensors{x[0].repeat_interleave(2, 0), x[0].repeat_interleave(3, 1)};
       }},
      {"unfold", {in({6, 7})}, [](const Tensors& x) { return Tensors{x[0].unfold(1, 3, 2)}; }},
      {"im2col and back",
       {in({3, 2, 4, 4})},
       [](const Tensors& x) {
         const at::Tensor columns = at::im2col(x[0], {2, 2}, {1, 1}, {0, 0}, {2, 2});
         return Tensors{columns, at::col2im(columns, {4, 4}, {2, 2}, {1, 1}, {0, 0}, {2, 2})};
       }},
  });
}

TEST(JointCutsTest, RowsClassesAndLines) {
  check_jointly({
      {"embedding",
       {in({7, 5}), in({4, 3}).integers(0, 7)},
       [](const Tensors& x) { return Tensors{at::embedding(x[0], x[1])}; }},
      {"cross entropy",
       {in({7, 5}), in({7}).integers(0, 5)},
       [](const Tensors& x) { return Tensors{at::cross_entropy_loss(x[0], x[1])}; }},
      {"gather",
       {in({7, 5}), in({7, 3}).integers(0, 5)},
       [](const Tensors& x) { return Tensors{x[0].gather(1, x[1])}; }},
      {"scatter_add",
       {in({7, 5}), in({7, 3}).integers(0, 5), in({7, 3})},
       [](const Tensors& x) { return Tensors{x[0].scatter_add(1, x[1], x[2])}; }},
      {"index_add",
       {in({7, 5}), in({4}).integers(0, 7), in({4, 5})},
       [](const Tensors& x) { return Tensors{x[0].index_add(0, x[1], x[2])}; }},
      {"topk, sort and cumsum",
       {in({7, 5})},
       [](const Tensors& x) {
         return Tensors{std::get<0>(x[0].topk(2, 0)), std::get<0>(x[0].sort(1)), x[0].cumsum(0)};
       }},
      {"fft", {in({7, 4})}, [](const Tensors& x) { return Tensors{at::abs(at::fft_rfft(x[0]))}; }},
      {"chunks with a rest",
       {in({7, 5})},
       [](const Tensors& x) { return Tensors(x[0].chunk(3, 0)); }},
      {"reductions",
       {in({7, 5})},
       [](const Tensors& x) {
         return Tensors{x[0].mean(), x[0].var(0), x[0].norm(), x[0].amax(1), x[0].logsumexp(0)};
       }},
  });
}

}  // namespace
}  // namespace shardweave
