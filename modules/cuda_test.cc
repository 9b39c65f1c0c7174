// Each kind of parallelism on GPUs (of the fake): the numbers of one device, and no wait of the host
// in the middle of a step.
#include <cmath>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "c10/core/StreamGuard.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/grad_sync.h"
#include "shardweave/dtensor/testing/fake_cuda.h"
#include "shardweave/modules/checkpoint/checkpointer.h"
#include "shardweave/modules/checkpoint/state_dict.h"
#include "shardweave/modules/data_parallel.h"
#include "shardweave/modules/deferred_init.h"
#include "shardweave/modules/fully_shard.h"
#include "shardweave/modules/optim/fused_optimizer.h"
#include "shardweave/modules/optim/grad_scaler.h"
#include "shardweave/modules/parallelize_module.h"
#include "shardweave/modules/testing/fully_shard_modes.h"
#include "shardweave/modules/testing/words_net.h"
#include "shardweave/modules/zero.h"
#include "torch/nn/modules/linear.h"

namespace shardweave {
namespace {

using testing::fully_shard_modes;
using testing::FullyShardMode;
using testing::host;
using testing::host_waits;
using testing::kBatch;
using testing::kDim;
using testing::kHidden;
using testing::loss_of;
using testing::make_words_net;
using testing::on_gpus;
using testing::words_of;
using testing::WordsNet;
namespace nn = torch::nn;

constexpr int kSteps = 4;

// Whoever forgets to wait for one of NCCL's operations, or for what came before it, is too early.
const FakeGpuScript kSlow = {.delay_microseconds = 500, .operation_milliseconds = 2};

const std::vector<float>& losses_of_one_device() {
  static const std::vector<float> losses = [] {
    WordsNet net = make_words_net();
    FusedOptimizer optimizer(net->parameters(), AdamWOptions{.lr = 1e-2});
    std::vector<float> result;
    for (int step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      const at::Tensor loss = loss_of(net, words_of(0), words_of(1));
      loss.backward();
      optimizer.step();
      result.push_back(loss.item<float>());
    }
    return result;
  }();
  return losses;
}

// `prepare` shards the model; what it returns goes on living until the end.
void check_training(const std::vector<MeshDim>& dims, const Placements& batch,
                    const std::function<std::shared_ptr<void>(WordsNet&, const MeshPtr&)>& prepare,
                    const std::function<std::function<void()>(WordsNet&)>& make_step = {}) {
  const std::vector<float>& wanted = losses_of_one_device();
  on_gpus(
      dims,
      [&](const MeshPtr& mesh) {
        WordsNet net = make_words_net();
        net->to(at::kCUDA);
        const std::shared_ptr<void> kept = prepare(net, mesh);
        std::shared_ptr<FusedOptimizer> optimizer;
        std::function<void()> step;
        if (make_step) {
          step = make_step(net);
        } else {
          optimizer = std::make_shared<FusedOptimizer>(net->parameters(), AdamWOptions{.lr = 1e-2});
          step = [&] {
            optimizer->step();
            optimizer->zero_grad();
          };
        }
        const auto data = [&](const at::Tensor& t) {
          return distribute_tensor(t.to(at::kCUDA), mesh, batch);
        };
        const at::Tensor words = data(words_of(0)), next = data(words_of(1));
        std::vector<at::Tensor> losses;
        for (int i = 0; i < kSteps; ++i) {
          const int64_t before = host_waits();
          const at::Tensor loss = loss_of(net, words, next);
          loss.backward();
          finish_grad_sync(*net);
          step();
          losses.push_back(loss.detach());
          if (i + 1 == kSteps) {
            EXPECT_EQ(host_waits() - before, 0) << "the host waits in a step";
          }
        }
        for (int i = 0; i < kSteps; ++i) {
          EXPECT_NEAR(host(losses[i]).item<float>(), wanted[i], 1e-5) << "step " << i;
        }
      },
      kSlow);
}

// Its steps need numbers of all parameters on the host: once for the squares, once for the updates.
TEST(CudaTest, AdafactorWaitsTwice) {
  on_gpus(
      {{"dp", 2}},
      [](const MeshPtr& mesh) {
        const auto parameters = [&](bool there) {
          std::vector<at::Tensor> made;
          for (int i = 0; i < 5; ++i) {
            at::Tensor p = at::sin(at::arange(24, at::kFloat) + i).view({6, 4});
            if (there) p = distribute_tensor(p.to(at::kCUDA), mesh, {Shard(0)});
            p.requires_grad_();
            made.push_back(p);
          }
          return made;
        };
        std::vector<at::Tensor> plain = parameters(false), sharded = parameters(true);
        FusedOptimizer here(plain, AdafactorOptions{}), there(sharded, AdafactorOptions{});
        for (int step = 0; step < 2; ++step) {
          for (const at::Tensor& p : plain) p.square().sum().backward();
          for (const at::Tensor& p : sharded) p.square().sum().backward();
          here.step();
          const int64_t before = host_waits();
          there.step();
          EXPECT_EQ(host_waits() - before, 2);
          here.zero_grad();
          there.zero_grad();
        }
        for (size_t i = 0; i < plain.size(); ++i) {
          EXPECT_TRUE(at::allclose(host(sharded[i]), plain[i].detach(), 1e-5, 1e-6)) << i;
        }
      },
      kSlow);
}

// Of gradients of several types, some on the CPU; the one that is not finite is on one rank.
TEST(CudaTest, UnscalingWaitsOnce) {
  for (const std::vector<MeshDim>& dims :
       {std::vector<MeshDim>{{"dp", 2}}, {{"dp", 2}, {"tp", 2}}}) {
    on_gpus(
        dims,
        [](const MeshPtr& mesh) {
          const at::ScalarType types[] = {at::kFloat, at::kHalf, at::kBFloat16, at::kDouble};
          const Placements rows(mesh->mesh().ndim(), Shard(0));
          for (int bad = -1; bad < 4; ++bad) {
            std::vector<at::Tensor> parameters;
            for (int i = 0; i < 8; ++i) {
              const auto options = at::TensorOptions(types[i % 4]).device(at::kCUDA);
              at::Tensor p = zeros({8, 3}, mesh, rows, options);
              p.mutable_grad() = shardweave::full({8, 3}, 4, mesh, rows, options);
              if (i == bad && mesh->rank().value == 1) {
                to_local(p.grad()).view(-1)[0].fill_(INFINITY);
              }
              parameters.push_back(p);
            }
            parameters.push_back(at::zeros({3}));
            parameters.back().mutable_grad() = at::full({3}, 4.0);
            GradScaler scaler({.init_scale = 2});
            const int64_t before = host_waits();
            EXPECT_EQ(scaler.unscale(parameters), bad < 0) << bad;
            EXPECT_EQ(host_waits() - before, 1);
            if (bad >= 0) continue;
            for (const at::Tensor& p : parameters) {
              EXPECT_TRUE(host(p.grad()).eq(2).all().item<bool>()) << p.scalar_type();
            }
          }
        },
        kSlow);
  }
}

TEST(CudaTest, DistributedDataParallel) {
  check_training({{"dp", 2}}, {Shard(0)}, [](WordsNet& net, const MeshPtr& mesh) {
    return std::shared_ptr<GradSync>(new GradSync(distributed_data_parallel(*net, mesh)));
  });
}

class CudaZeroTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Stages, CudaZeroTest, ::testing::Values(1, 2));

TEST_P(CudaZeroTest, Trains) {
  check_training(
      {{"dp", 2}}, {Shard(0)},
      [](WordsNet& net, const MeshPtr& mesh) {
        distribute_module(*net, mesh, ParameterPlan());
        return nullptr;
      },
      [](WordsNet& net) -> std::function<void()> {
        auto optimizer = std::make_shared<ZeroRedundancyOptimizer<FusedOptimizer>>(
            net->parameters(), AdamWOptions{.lr = 1e-2}, ZeroOptions{.stage = GetParam()});
        return [optimizer] {
          optimizer->step();
          optimizer->zero_grad();
        };
      });
}

class CudaFullyShardTest : public ::testing::TestWithParam<FullyShardMode> {};

INSTANTIATE_TEST_SUITE_P(Modes, CudaFullyShardTest, ::testing::ValuesIn(fully_shard_modes()),
                         [](const auto& test) { return test.param.name; });

TEST_P(CudaFullyShardTest, Trains) {
  const FullyShardMode& how = GetParam();
  check_training(how.dims, how.batch, [&](WordsNet& net, const MeshPtr& mesh) {
    fully_shard(*net, mesh, how.options);
    return nullptr;
  });
}

TEST(CudaTest, TensorParallelInsideFullyShard) {
  check_training({{"dp", 2}, {"tp", 2}}, {Shard(0), Replicate()},
                 [](WordsNet& net, const MeshPtr& mesh) {
                   ShardingPlan plan;
                   plan.parameter = {{"blocks.*.up.*", NamedPlacements{{"tp", Shard(0)}}},
                                     {"blocks.*.down.weight", NamedPlacements{{"tp", Shard(1)}}}};
                   parallelize_module(*net, mesh, plan);
                   fully_shard(*net, mesh, {.mesh_dim = "dp", .units = {"blocks.*"}});
                   return nullptr;
                 });
}

// --- fully_shard() under several current streams ---------------------------------------------------

const FakeGpuScript kLate = {.delay_microseconds = 0, .operation_milliseconds = 30};

c10::Stream new_stream() {
  const c10::impl::VirtualGuardImpl cuda(at::kCUDA);
  return cuda.getNewStream(cuda.getDevice());
}

// The one knows nothing of what the other has gathered.
TEST(CudaFullyShardStreamsTest, GatheredUnderOneUsedUnderAnother) {
  nn::Linear whole(kDim, kHidden);
  const at::Tensor x = at::sin(at::arange(kBatch * kDim, at::kFloat)).view({kBatch, kDim});
  const at::Tensor wanted = whole(x).detach();
  on_gpus(
      {{"dp", 2}},
      [&](const MeshPtr& mesh) {
        nn::Linear net(std::dynamic_pointer_cast<nn::LinearImpl>(whole->clone()));
        net->to(at::kCUDA);
        fully_shard(*net, mesh);
        const at::Tensor input = distribute_tensor(x.to(at::kCUDA), mesh, {Replicate()});
        host(input);
        const c10::Stream first = new_stream(), second = new_stream();
        for (int i = 0; i < 3; ++i) {
          at::Tensor touched, y;
          {
            const c10::StreamGuard on(first);
            touched = net->weight.t();  // the host waits for nothing
          }
          {
            const c10::StreamGuard on(second);
            y = net(input);
            EXPECT_TRUE(at::allclose(host(y), wanted, 1e-5, 1e-6)) << i;
          }
          reshard(mesh);
        }
      },
      kLate);
}

// Memory that one stream has allocated is given back when the others have done with it.
TEST(CudaFullyShardStreamsTest, GradientsAreSentFromMemoryOfAnotherStream) {
  nn::Linear whole(kDim, kHidden);
  const at::Tensor x = at::sin(at::arange(kBatch * kDim, at::kFloat)).view({kBatch, kDim});
  whole(x).sum().backward();
  on_gpus(
      {{"dp", 2}},
      [&](const MeshPtr& mesh) {
        nn::Linear net(std::dynamic_pointer_cast<nn::LinearImpl>(whole->clone()));
        net->zero_grad();
        net->to(at::kCUDA);
        fully_shard(*net, mesh);
        const at::Tensor input = distribute_tensor(x.to(at::kCUDA), mesh, {Shard(0)});
        host(input);
        const c10::Stream first = new_stream(), second = new_stream();
        for (int i = 0; i < 3; ++i) {
          {
            const c10::StreamGuard on(first);
            const c10::AutoGradMode no_grad(false);
            net(input);
          }
          const c10::StreamGuard on(second);
          net(input).sum().backward();
          std::vector<at::Tensor> others;  // one of them where gradients still are
          {
            const c10::StreamGuard on_first(first);
            for (int k = 0; k < 16; ++k) {
              others.push_back(at::full({kDim * kHidden + kHidden}, -7.0F, at::kCUDA));
            }
          }
          EXPECT_TRUE(at::allclose(host(net->weight.grad()), whole->weight.grad(), 1e-5, 1e-6));
          EXPECT_TRUE(at::allclose(host(net->bias.grad()), whole->bias.grad(), 1e-5, 1e-6));
          net->zero_grad();
        }
      },
      kLate);
}

// A model that is recorded, and moved before it is made.
TEST(CudaTest, DeferredModelsMove) {
  on_gpus({{"dp", 2}}, [&](const MeshPtr& mesh) {
    const MaterializeOptions seeded = {.seed = 7};
    const auto make = [] { return WordsNet(1); };
    WordsNet wanted = deferred_init(make), net = deferred_init(make), plain = deferred_init(make);
    materialize(*wanted, seeded);
    net->to(at::kCUDA);
    fully_shard(*net, mesh);
    materialize(*net, seeded);
    plain->to(at::Device(at::kCUDA, 5), at::kDouble);
    materialize(*plain, seeded);
    for (const auto& item : wanted->named_parameters()) {
      const at::Tensor p = *net->named_parameters().find(item.key());
      EXPECT_TRUE(p.is_cuda()) << item.key();
      EXPECT_TRUE(to_local(p.detach()).is_cuda()) << item.key();
      EXPECT_TRUE(at::equal(host(p), item.value())) << item.key();
      const at::Tensor q = *plain->named_parameters().find(item.key());
      EXPECT_EQ(q.device(), at::Device(at::kCUDA, 5));
      EXPECT_EQ(q.dtype(), at::kDouble);
      EXPECT_TRUE(at::equal(host(q), item.value().to(at::kDouble))) << item.key();
    }
  });
}

// Saved on GPUs, loaded on the CPU and on GPUs of another mesh.
TEST(CudaTest, Checkpoints) {
  const std::string directory = ::testing::TempDir() + "/cuda_checkpoint";
  std::filesystem::remove_all(directory);
  std::vector<at::Tensor> wanted;
  for (const at::Tensor& p : make_words_net()->parameters()) wanted.push_back(p.detach() * 2);
  on_gpus({{"dp", 2}}, [&](const MeshPtr& mesh) {
    WordsNet net = make_words_net();
    net->to(at::kCUDA);
    fully_shard(*net, mesh, {.units = {"blocks.*"}});
    {
      const c10::AutoGradMode no_grad(false);
      for (at::Tensor p : net->parameters()) p.mul_(2);
    }
    StateDict state;
    add_module(state, *net);
    save_checkpoint(directory, 7, state, mesh);
  });
  on_gpus({{"dp", 3}}, [&](const MeshPtr& mesh) {
    WordsNet net = make_words_net();
    net->to(at::kCUDA);
    fully_shard(*net, mesh);
    StateDict state;
    add_module(state, *net);
    EXPECT_EQ(load_checkpoint(directory, state, mesh).step, 7);
    const auto parameters = net->parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      EXPECT_TRUE(to_local(parameters[i]).is_cuda());
      EXPECT_TRUE(at::equal(host(parameters[i]), wanted[i])) << i;
    }
  });
  std::filesystem::remove_all(directory);
}

}  // namespace
}  // namespace shardweave
