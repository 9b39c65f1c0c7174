#include "shardweave/dtensor/activation_checkpoint.h"

#include <optional>

#include "ATen/ATen.h"
#include "ATen/autocast_mode.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/autocast.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/random.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "torch/csrc/autograd/autograd.h"
#include "torch/nn/modules/linear.h"

namespace shardweave {
namespace {

using testing::on_mesh;

at::Tensor numbers(at::IntArrayRef sizes) {
  return at::arange(c10::multiply_integers(sizes), at::kFloat).reshape(sizes) / 16 - 1;
}

struct Block {
  torch::nn::Linear up{6, 8}, down{8, 6};
  int runs = 0;
  explicit Block(const MeshPtr& mesh) {
    for (const auto& m : {up, down}) {
      for (at::Tensor& p : m->parameters()) p.data().copy_(numbers(p.sizes()));
    }
    distribute_module(*up, mesh, {{"*", {{"x", Shard(0)}}}});
    distribute_module(*down, mesh, {{"weight", {{"x", Shard(1)}}}});
  }
  at::Tensor operator()(const at::Tensor& x) {
    ++runs;
    return down(at::dropout(at::gelu(up(x)), 0.5, true));
  }
};

// With dropout, which the second run must repeat; values, gradients and the numbers drawn afterwards.
TEST(ActivationCheckpointTest, IsTheSameAsWithout) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    Block plain(mesh), again(mesh);
    const auto step = [&](Block& block, bool checkpointed) {
      manual_seed(mesh, 5);
      at::Tensor x =
          distribute_tensor(numbers({4, 6}), mesh, Placements{Replicate()}).requires_grad_();
      const at::Tensor y = checkpointed
                               ? checkpoint([&](const at::Tensor& t) { return block(t); }, x * 2)
                               : block(x * 2);
      const at::Tensor drawn = at::rand_like(x);
      y.square().sum().backward();
      finish_grad_sync(*block.up);
      finish_grad_sync(*block.down);
      EXPECT_EQ(random_state(mesh).offset, 2u);
      return std::vector<at::Tensor>{full_tensor(y), full_tensor(x.grad()),
                                     full_tensor(block.up->weight.grad()),
                                     full_tensor(block.down->bias.grad()), full_tensor(drawn)};
    };
    const auto wanted = step(plain, false), got = step(again, true);
    for (size_t i = 0; i < wanted.size(); ++i) EXPECT_TRUE(at::allclose(wanted[i], got[i])) << i;
    EXPECT_EQ(plain.runs, 1);
    EXPECT_EQ(again.runs, 2);
  });
}

TEST(ActivationCheckpointTest, ParametersGetGradientsThoughNoInputAsksForOne) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    Block block(mesh);
    const at::Tensor x = distribute_tensor(numbers({4, 6}), mesh, Placements{Replicate()});
    checkpoint([&](const at::Tensor& t) { return block(t); }, x).sum().backward();
    EXPECT_TRUE(block.up->weight.grad().defined());
    const at::NoGradGuard guard;
    EXPECT_FALSE(checkpoint([&](const at::Tensor& t) { return block(t); }, x).requires_grad());
  });
}

TEST(ActivationCheckpointTest, SeveralResultsSomeUnusedSomeIntegers) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    at::Tensor x = distribute_tensor(numbers({4, 6}), mesh, Placements{Shard(0)}).requires_grad_();
    const auto all = checkpoint(
        [](const std::vector<at::Tensor>& in) {
          return std::vector<at::Tensor>{in[0], in[0].exp(), in[0].argmax(1), in[0] * in[1]};
        },
        {x, at::full({6}, 2.0)});
    EXPECT_EQ(all[2].scalar_type(), at::kLong);
    (all[0].sum() + all[3].sum()).backward();
    EXPECT_TRUE(at::equal(full_tensor(x.grad()), at::full({4, 6}, 3.0)));
  });
}

TEST(ActivationCheckpointTest, TheSecondRunIsUnderTheSameAutocast) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    at::Tensor x = distribute_tensor(numbers({4, 6}), mesh, Placements{Shard(0)}).requires_grad_();
    std::vector<at::ScalarType> seen;
    std::optional<AutocastScope> autocast(at::kBFloat16);
    const at::Tensor y = checkpoint(
        [&](const at::Tensor& t) {
          const at::Tensor product = at::mm(t, t.t());
          seen.push_back(product.scalar_type());
          return product.to(at::kFloat);
        },
        x);
    autocast.reset();
    y.sum().backward();
    EXPECT_EQ(seen, (std::vector<at::ScalarType>{at::kBFloat16, at::kBFloat16}));
    EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  });
}

// What is written with the result of a part that had it as an input leads to that part.
TEST(ActivationCheckpointTest, NothingKeepsItself) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    for (const bool sharded : {false, true}) {
      for (const bool leaf : {false, true}) {
        c10::weak_intrusive_ptr<c10::StorageImpl> memory{c10::intrusive_ptr<c10::StorageImpl>()};
        {
          at::Tensor x = numbers({4}), scale = numbers({4});
          if (sharded) {
            x = distribute_tensor(x, mesh, Placements{Shard(0)});
            scale = distribute_tensor(scale, mesh, Placements{Replicate()});
          }
          scale.requires_grad_();
          if (!leaf) x = x * scale;
          const at::Tensor y = checkpoint(
              [&](const std::vector<at::Tensor>& in) {
                return std::vector<at::Tensor>{in[0].exp() * in[1]};
              },
              {x, scale})[0];
          x.add_(y);
          memory = (sharded ? to_local(x) : x).storage().getWeakStorageImpl();
          EXPECT_FALSE(memory.expired());
          EXPECT_THROW(y.sum().backward(), c10::Error);  // it would run again with another x
        }
        EXPECT_TRUE(memory.expired()) << sharded << leaf;
      }
    }
  });
}

TEST(ActivationCheckpointTest, Refuses) {
  EXPECT_THROW(
      checkpoint([](const std::vector<at::Tensor>& in) { return in; }, std::vector<at::Tensor>()),
      Error);
  at::Tensor x = numbers({3}).requires_grad_();
  const at::Tensor y = checkpoint([](const at::Tensor& t) { return t.exp(); }, x);
  EXPECT_THROW(torch::autograd::grad({y.sum()}, {x}, {}, true, /*create_graph=*/true), Error);
}

}  // namespace
}  // namespace shardweave
