// fully_shard() with a compute_device: parameters rest on the CPU, GPUs (of the fake) compute.
#include <filesystem>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "ATen/ATen.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/comm/world.h"
#include "shardweave/dtensor/activation_checkpoint.h"
#include "shardweave/dtensor/captured_step.h"
#include "shardweave/dtensor/clip_grad_norm.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/grad_sync.h"
#include "shardweave/dtensor/testing/fake_cuda.h"
#include "shardweave/mesh/connected_mesh.h"
#include "shardweave/modules/checkpoint/checkpointer.h"
#include "shardweave/modules/checkpoint/state_dict.h"
#include "shardweave/modules/deferred_init.h"
#include "shardweave/modules/fully_shard.h"
#include "shardweave/modules/optim/fused_optimizer.h"
#include "shardweave/modules/optim/grad_scaler.h"
#include "shardweave/modules/parallelize_module.h"
#include "shardweave/modules/summon_full_params.h"
#include "shardweave/modules/testing/fully_shard_modes.h"
#include "shardweave/modules/testing/words_net.h"
#include "torch/autograd.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/batchnorm.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/pimpl.h"
#include "torch/optim/adamw.h"
#include "torch/script.h"

namespace shardweave {
namespace {

using testing::fully_shard_modes;
using testing::FullyShardMode;
using ::testing::HasSubstr;
using testing::host;
using testing::host_waits;
using testing::loss_of;
using testing::make_words_net;
using testing::on_gpus;
using testing::try_on_gpus;
using testing::words_of;
using testing::WordsNet;
namespace nn = torch::nn;

constexpr int kSteps = 4;

// Whoever forgets to wait for a copy, or for what came before it, is too early.
const FakeGpuScript kSlow = {.delay_microseconds = 500, .operation_milliseconds = 2};

FullyShardOptions on_gpu(FullyShardOptions options) {
  options.compute_device = at::kCUDA;
  return options;
}

at::Tensor data(const at::Tensor& words, const MeshPtr& mesh, const Placements& batch) {
  return distribute_tensor(words.to(at::kCUDA), mesh, batch);
}

const std::vector<float>& losses_of_one_device() {
  static const std::vector<float> losses = [] {
    WordsNet net = make_words_net();
    FusedOptimizer optimizer(net->parameters(), AdamWOptions{.lr = 1e-2});
    std::vector<float> result;
    for (int step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      const at::Tensor loss = loss_of(net, words_of(step), words_of(step + 1));
      loss.backward();
      clip_grad_norm(net->parameters(), 1.0);
      optimizer.step();
      result.push_back(loss.item<float>());
    }
    return result;
  }();
  return losses;
}

void expect_on_cpu(const at::Tensor& tensor, const std::string& what) {
  EXPECT_TRUE(tensor.is_cpu()) << what;
  EXPECT_TRUE(to_local(tensor.detach()).is_cpu()) << what;
}

std::vector<FullyShardMode> modes() {
  std::vector<FullyShardMode> all = fully_shard_modes();
  const std::vector<std::string> blocks = {"blocks.*"};
  all.push_back({"one_rank", {{"dp", 1}}, {Shard(0)}, {.units = blocks}});
  all.push_back({"mixed_precision",
                 {{"dp", 2}},
                 {Shard(0)},
                 {.units = blocks, .param_dtype = at::kDouble, .reduce_dtype = at::kFloat}});
  all.push_back({"mixed_precision_alone",
                 {{"dp", 1}},
                 {Shard(0)},
                 {.units = blocks, .param_dtype = at::kDouble}});
  all.push_back({"tensor_parallel",
                 {{"dp", 2}, {"tp", 2}},
                 {Shard(0), Replicate()},
                 {.mesh_dim = "dp", .units = blocks},
                 true});
  return all;
}

class CpuOffloadTest : public ::testing::TestWithParam<FullyShardMode> {};

INSTANTIATE_TEST_SUITE_P(Modes, CpuOffloadTest, ::testing::ValuesIn(modes()),
                         [](const auto& test) { return test.param.name; });

TEST_P(CpuOffloadTest, Trains) {
  const FullyShardMode& how = GetParam();
  const std::vector<float>& wanted = losses_of_one_device();
  on_gpus(
      how.dims,
      [&](const MeshPtr& mesh) {
        WordsNet net = make_words_net();
        if (how.tensor_parallel) {
          ShardingPlan plan;
          plan.parameter = {{"blocks.*.up.*", NamedPlacements{{"tp", Shard(0)}}},
                            {"blocks.*.down.weight", NamedPlacements{{"tp", Shard(1)}}}};
          parallelize_module(*net, mesh, plan);
        }
        fully_shard(*net, mesh, on_gpu(how.options));
        FusedOptimizer optimizer(net->parameters(), AdamWOptions{.lr = 1e-2});
        for (int step = 0; step < kSteps; ++step) {
          optimizer.zero_grad();
          const at::Tensor loss = loss_of(net, data(words_of(step), mesh, how.batch),
                                          data(words_of(step + 1), mesh, how.batch));
          EXPECT_TRUE(loss.is_cuda());
          loss.backward();
          clip_grad_norm(net->parameters(), 1.0);
          optimizer.step();
          EXPECT_NEAR(host(loss).item<float>(), wanted[static_cast<size_t>(step)], 2e-5) << step;
        }
        for (const auto& item : net->named_parameters()) {
          expect_on_cpu(item.value(), item.key());
          expect_on_cpu(item.value().grad(), item.key());
        }
        reshard(mesh);
        EXPECT_EQ(fully_shard_counters(mesh).gathered_bytes, 0);
      },
      kSlow);
}

void expect_gradients(WordsNet& net, const std::vector<at::Tensor>& wanted) {
  const std::vector<at::Tensor> parameters = net->parameters();
  ASSERT_EQ(parameters.size(), wanted.size());
  for (size_t i = 0; i < wanted.size(); ++i) {
    ASSERT_TRUE(parameters[i].grad().defined()) << i;
    EXPECT_TRUE(at::allclose(host(parameters[i].grad()), wanted[i], 1e-4, 1e-6)) << i;
  }
}

std::vector<at::Tensor> gradients_of_one_device(int backwards) {
  WordsNet net = make_words_net();
  for (int i = 0; i < backwards; ++i) loss_of(net, words_of(i), words_of(i + 1)).backward();
  std::vector<at::Tensor> result;
  for (const at::Tensor& p : net->parameters()) result.push_back(p.grad());
  return result;
}

class CpuOffloadRanksTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, CpuOffloadRanksTest, ::testing::Values(1, 2));

TEST_P(CpuOffloadRanksTest, GradientsAccumulate) {
  const std::vector<at::Tensor> wanted = gradients_of_one_device(3);
  on_gpus(
      {{"dp", GetParam()}},
      [&](const MeshPtr& mesh) {
        WordsNet net = make_words_net();
        fully_shard(*net, mesh, on_gpu({.units = {"blocks.*"}}));
        for (int i = 0; i < 3; ++i) {
          loss_of(net, data(words_of(i), mesh, {Shard(0)}), data(words_of(i + 1), mesh, {Shard(0)}))
              .backward();
        }
        expect_gradients(net, wanted);
      },
      kSlow);
}

// Gradients that are asked for, and hooks of parameters.
TEST_P(CpuOffloadRanksTest, AutogradAsEver) {
  nn::Linear whole(3, 5);
  const at::Tensor x = at::sin(at::arange(12, at::kFloat)).view({4, 3});
  const auto loss = [](nn::Linear& net, const at::Tensor& input) {
    return net(input).square().sum();
  };
  const std::vector<at::Tensor> first =
      torch::autograd::grad({loss(whole, x)}, whole->parameters());
  on_gpus(
      {{"dp", GetParam()}},
      [&](const MeshPtr& mesh) {
        nn::Linear net(std::dynamic_pointer_cast<nn::LinearImpl>(whole->clone()));
        fully_shard(*net, mesh, on_gpu({}));
        const at::Tensor input = data(x, mesh, {Shard(0)});
        const std::vector<at::Tensor> grads =
            torch::autograd::grad({loss(net, input)}, net->parameters());
        for (size_t i = 0; i < grads.size(); ++i) {
          expect_on_cpu(grads[i], std::to_string(i));
          EXPECT_TRUE(at::allclose(host(grads[i]), first[i].detach(), 1e-4, 1e-5)) << i;
        }
        EXPECT_FALSE(net->weight.grad().defined());

        int hooks = 0;
        net->weight.register_hook([&](const at::Tensor& grad) {
          ++hooks;
          return grad * 2;
        });
        loss(net, input).backward();
        EXPECT_EQ(hooks, 1);
        EXPECT_TRUE(at::allclose(host(net->weight.grad()), first[0].detach() * 2, 1e-4, 1e-5));
        EXPECT_TRUE(at::allclose(host(net->bias.grad()), first[1].detach(), 1e-4, 1e-5));
      },
      kSlow);
}

// Gradients that TorchScript's own graphs bring to parameters.
TEST_P(CpuOffloadRanksTest, TorchScript) {
  const auto make = [] {
    torch::jit::Module module("m");
    for (const auto& [name, sizes] :
         std::vector<std::pair<std::string, std::vector<int64_t>>>{{"a", {5, 3}}, {"b", {5}}}) {
      const at::Tensor value = at::sin(at::arange(c10::multiply_integers(sizes), at::kFloat));
      module.register_parameter(name, value.view(sizes).requires_grad_(), /*is_buffer=*/false);
    }
    module.define(R"(
      def forward(self, x):
          return torch.tanh(torch.linear(x, self.a, self.b)).square().mean()
    )");
    return module;
  };
  struct Holder : nn::Module {
    explicit Holder(const torch::jit::Module& script) {
      for (const auto& p : script.named_parameters()) register_parameter(p.name, p.value);
    }
  };
  const at::Tensor x = at::cos(at::arange(12, at::kFloat)).view({4, 3});
  constexpr int kRuns = 4;  // the first ones are profiled
  torch::jit::Module plain = make();
  for (int i = 0; i < kRuns; ++i) plain.forward({x}).toTensor().backward();
  const std::vector<at::Tensor> wanted = {plain.attr("a").toTensor().grad(),
                                          plain.attr("b").toTensor().grad()};
  on_gpus(
      {{"dp", GetParam()}},
      [&](const MeshPtr& mesh) {
        torch::jit::Module script = make();
        Holder parameters(script);
        fully_shard(parameters, mesh, on_gpu({}));
        for (int i = 0; i < kRuns; ++i) {
          script.forward({data(x, mesh, {Shard(0)})}).toTensor().backward();
        }
        for (size_t i = 0; i < wanted.size(); ++i) {
          const at::Tensor grad = parameters.parameters()[i].grad();
          EXPECT_TRUE(at::allclose(host(grad), wanted[i], 1e-4, 1e-5)) << i;
        }
      },
      kSlow);
}

// Nothing of a step waits on the host but whoever reads gradients, once for a unit.
TEST_P(CpuOffloadRanksTest, TheHostWaitsForGradientsAlone) {
  on_gpus(
      {{"dp", GetParam()}},
      [&](const MeshPtr& mesh) {
        WordsNet net = make_words_net();
        fully_shard(*net, mesh, on_gpu({.units = {"blocks.*"}}));
        const at::Tensor words = data(words_of(0), mesh, {Shard(0)});
        const at::Tensor wanted = data(words_of(1), mesh, {Shard(0)});
        at::Tensor loss;
        for (int step = 0; step < 3; ++step) {
          net->zero_grad();
          const FullyShardCounters before = fully_shard_counters(mesh);
          int64_t waits = host_waits();
          loss = loss_of(net, words, wanted);
          loss.backward();
          EXPECT_EQ(host_waits() - waits, 0) << step;
          waits = host_waits();
          for (const at::Tensor& p : net->parameters()) to_local(p.grad());
          EXPECT_EQ(host_waits() - waits, 4) << "three blocks, and the rest";
          if (step < 2) continue;
          const FullyShardCounters after = fully_shard_counters(mesh);
          EXPECT_EQ(after.gathers - before.gathers, 7) << "what forward used last is still there";
          EXPECT_GE(after.prefetches - before.prefetches, 6);
          EXPECT_EQ(after.wrong_prefetches, before.wrong_prefetches);
        }
      },
      kSlow);
}

// A mesh is used by one thread at a time: the device's, while that goes backward.
TEST_P(CpuOffloadRanksTest, GradientsAreAddedByTheThreadOfTheDevice) {
  on_gpus({{"dp", GetParam()}}, [&](const MeshPtr& mesh) {
    WordsNet net = make_words_net();
    fully_shard(*net, mesh, on_gpu({.units = {"blocks.*"}}));
    std::set<std::thread::id> threads;
    for (const at::Tensor& p : net->parameters()) {
      p.register_hook([&](const at::Tensor& grad) {
        threads.insert(std::this_thread::get_id());
        return grad;
      });
    }
    const at::Tensor loss =
        loss_of(net, data(words_of(0), mesh, {Shard(0)}), data(words_of(1), mesh, {Shard(0)}));
    loss.register_hook([&](const at::Tensor& grad) {
      threads.insert(std::this_thread::get_id());
      return grad;
    });
    loss.backward();
    EXPECT_EQ(threads.size(), 1U);
    EXPECT_FALSE(threads.contains(std::this_thread::get_id()));
  });
}

// A model that is gone before its graph goes backward, and one whose graph is dropped.
TEST_P(CpuOffloadRanksTest, ModelsDie) {
  on_gpus(
      {{"dp", GetParam()}},
      [&](const MeshPtr& mesh) {
        const at::Tensor words = data(words_of(0), mesh, {Shard(0)});
        at::Tensor loss, dropped;
        std::weak_ptr<nn::Module> gone;
        {
          WordsNet net = make_words_net();
          gone = net.ptr();
          fully_shard(*net, mesh, on_gpu({.units = {"blocks.*"}}));
          loss = loss_of(net, words, data(words_of(1), mesh, {Shard(0)}));
          dropped = net(words);
        }
        EXPECT_TRUE(gone.expired());
        dropped.reset();
        loss.backward();
        loss.reset();
        EXPECT_EQ(fully_shard_counters(mesh).gathered_bytes, 0);
      },
      kSlow);
}

struct Scale : torch::autograd::Function<Scale> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& weight) {
    context->save_for_backward({x, weight});
    return x * weight;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const auto saved = context->get_saved_variables();
    return {grads[0] * saved[1], (grads[0] * saved[0]).sum(at::IntArrayRef{0})};
  }
};

// What else trainers do: a function of the user's, a part that runs again, several forwards, a graph
// that stays, what is frozen, a scaler.
TEST_P(CpuOffloadRanksTest, Habits) {
  const auto make = [] {
    nn::Sequential net(nn::Linear(3, 3), nn::Linear(3, 3), nn::Linear(3, 3), nn::Linear(3, 3));
    const c10::AutoGradMode no_grad(false);
    for (const at::Tensor& p : net->parameters()) {
      p.copy_(at::sin(at::arange(p.numel(), at::kFloat)).view(p.sizes()));
    }
    net[2]->as<nn::Linear>()->weight.requires_grad_(false);
    return net;
  };
  const auto run = [](nn::Sequential& net, const at::Tensor& x, GradScaler& scaler) {
    const auto forward = [&] {
      const at::Tensor h =
          Scale::apply(net[0]->as<nn::Linear>()->forward(x), net[3]->as<nn::Linear>()->bias);
      const at::Tensor again = checkpoint(
          [&](const at::Tensor& y) { return at::tanh(net[1]->as<nn::Linear>()->forward(y)); }, h);
      return net[2]->as<nn::Linear>()->forward(again).square().sum();
    };
    const at::Tensor a = forward(), b = forward();
    a.backward({}, /*retain_graph=*/true);
    a.backward();
    scaler.scale(b).backward();
    EXPECT_TRUE(scaler.unscale(net->parameters()));
  };
  const at::Tensor x = at::cos(at::arange(12, at::kFloat)).view({4, 3});
  nn::Sequential whole = make();
  GradScaler scaler({.init_scale = 1.0});
  run(whole, x, scaler);
  on_gpus(
      {{"dp", GetParam()}},
      [&](const MeshPtr& mesh) {
        nn::Sequential net = make();
        fully_shard(*net, mesh, on_gpu({.units = {"0", "1"}}));
        GradScaler its({.init_scale = 1.0});
        run(net, data(x, mesh, {Shard(0)}), its);
        const auto wanted = whole->parameters(), got = net->parameters();
        for (size_t i = 0; i < wanted.size(); ++i) {
          EXPECT_EQ(got[i].grad().defined(), wanted[i].grad().defined()) << i;
          if (!wanted[i].grad().defined()) continue;
          expect_on_cpu(got[i].grad(), std::to_string(i));
          EXPECT_TRUE(at::allclose(host(got[i].grad()), wanted[i].grad(), 1e-4, 1e-4)) << i;
        }
      },
      kSlow);
}

// An optimizer's write comes after the copy that reads; the next use sees it.
TEST_P(CpuOffloadRanksTest, WritesAreSeen) {
  on_gpus(
      {{"dp", GetParam()}},
      [&](const MeshPtr& mesh) {
        WordsNet net = make_words_net();
        fully_shard(*net, mesh, on_gpu({.units = {"blocks.*"}}));
        const at::Tensor words = data(words_of(0), mesh, {Shard(0)});
        WordsNet whole = make_words_net();
        const c10::AutoGradMode no_grad(false);
        for (int i = 0; i < 3; ++i) {
          const at::Tensor y = net(words);
          // A copy may still be reading: once for each unit.
          const int64_t waits = host_waits();
          for (at::Tensor p : net->parameters()) i == 1 ? to_local(p).mul_(2) : p.mul_(2);
          // Where somebody has the parts, nobody still reads them when a unit is full; at most the next one.
          EXPECT_EQ(host_waits() - waits, i < 2 ? 4 : 1) << i;
          if (i == 1) reshard(mesh);
          EXPECT_TRUE(at::allclose(host(y), whole(words_of(0)), 1e-4, 1e-4)) << i;
          for (at::Tensor p : whole->parameters()) p.mul_(2);
        }
        EXPECT_TRUE(at::allclose(host(net(words)), whole(words_of(0)), 1e-4, 1e-3));
      },
      kSlow);
}

struct ScaledImpl : nn::Module {
  ScaledImpl() {
    linear = register_module("linear", nn::Linear(3, 5));
    norm = register_module("norm", nn::BatchNorm1d(5));
    scale = register_parameter("scale", at::full({}, 3.0F));
    table = register_buffer("table", at::arange(5, at::kFloat));
  }
  at::Tensor forward(const at::Tensor& x) { return norm(linear(x)) * scale + table; }
  nn::Linear linear{nullptr};
  nn::BatchNorm1d norm{nullptr};
  at::Tensor scale, table;
};
TORCH_MODULE(Scaled);

// What is in no unit is where units are: of models with values or without, plain or distributed.
TEST_P(CpuOffloadRanksTest, BuffersAndNumbersMove) {
  Scaled whole;
  const at::Tensor x = at::sin(at::arange(12, at::kFloat)).view({4, 3});
  std::vector<std::pair<std::string, at::Tensor>> values;
  for (const auto& item : whole->named_parameters()) {
    values.emplace_back(item.key(), item.value().detach().clone());
  }
  const at::Tensor wanted = whole(x).detach();
  whole(x).square().sum().backward();
  for (const bool is_deferred : {false, true}) {
    for (const bool is_distributed : {false, true}) {
      SCOPED_TRACE(std::string(is_deferred ? "deferred " : "") +
                   (is_distributed ? "distributed" : ""));
      FullyShardOptions options = on_gpu({});
      if (is_distributed) options.param_dtype = at::kDouble;  // which buffers do not become
      on_gpus(
          {{"dp", GetParam()}},
          [&](const MeshPtr& mesh) {
            Scaled net = is_deferred ? deferred_init([] { return Scaled(); }) : Scaled();
            if (!is_deferred) {
              const c10::AutoGradMode no_grad(false);
              for (const auto& [name, value] : values) net->named_parameters()[name].copy_(value);
            }
            if (is_distributed) distribute_module(*net, mesh, ParameterPlan());
            fully_shard(*net, mesh, options);
            if (is_deferred) materialize(*net, {.values = values});
            for (const auto& item : net->named_buffers()) {
              EXPECT_TRUE(item.value().is_cuda()) << item.key();
              EXPECT_TRUE(to_local(item.value()).is_cuda()) << item.key();
            }
            EXPECT_TRUE(net->scale.is_cuda());
            EXPECT_TRUE(to_local(net->scale.detach()).is_cuda());
            expect_on_cpu(net->linear->weight, "weight");
            const at::Tensor input = data(x, mesh, {Shard(0)});
            EXPECT_TRUE(at::allclose(host(net(input)).to(at::kFloat), wanted, 1e-4, 1e-5));
            net(input).square().sum().backward();
            finish_grad_sync(*net);
            EXPECT_TRUE(net->scale.grad().is_cuda());
            EXPECT_NEAR(host(net->scale.grad()).item<float>(), whole->scale.grad().item<float>(),
                        1e-3);
            EXPECT_TRUE(at::allclose(host(net->norm->weight.grad()), whole->norm->weight.grad(),
                                     1e-3, 1e-4));
            EXPECT_TRUE(
                at::allclose(host(net->norm->running_mean), whole->norm->running_mean, 1e-4, 1e-5));
            torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-2));
            optimizer.step();
            EXPECT_TRUE(std::isfinite(host(net(input).sum()).item<double>()));
          },
          kSlow);
    }
  }
}

TEST_P(CpuOffloadRanksTest, SummonedSavedAndLoaded) {
  const std::string directory =
      ::testing::TempDir() + "/offload_checkpoint" + std::to_string(GetParam());
  std::filesystem::remove_all(directory);
  on_gpus({{"dp", GetParam()}}, [&](const MeshPtr& mesh) {
    WordsNet net = make_words_net();
    fully_shard(*net, mesh, on_gpu({.units = {"blocks.*"}}));
    {
      FullParams whole(*net, {.writeback = true});
      EXPECT_TRUE(to_local(net->head->weight.detach()).is_cpu());
      const c10::AutoGradMode no_grad(false);
      net->head->weight.mul_(2);
    }
    StateDict state;
    add_module(state, *net);
    save_checkpoint(directory, 7, state, mesh);
  });
  const at::Tensor wanted = make_words_net()->head->weight.detach() * 2;
  on_gpus({{"dp", 3 - GetParam()}}, [&](const MeshPtr& mesh) {
    WordsNet net = make_words_net();
    fully_shard(*net, mesh, on_gpu({}));
    StateDict state;
    add_module(state, *net);
    EXPECT_EQ(load_checkpoint(directory, state, mesh).step, 7);
    expect_on_cpu(net->head->weight, "head");
    EXPECT_TRUE(at::equal(host(net->head->weight), wanted));
  });
  std::filesystem::remove_all(directory);
}

// One GPU needs neither NCCL nor a launcher: nothing is sent.
TEST(CpuOffloadWorldTest, OneRankThatIsAThread) {
  const std::vector<float>& wanted = losses_of_one_device();
  const auto train = [&](World& world) {
    const MeshPtr mesh = *init_device_mesh(world, {{"dp", 1}});
    WordsNet net = make_words_net();
    fully_shard(*net, mesh, on_gpu({.units = {"blocks.*"}, .param_dtype = at::kDouble}));
    FusedOptimizer optimizer(net->parameters(), AdamWOptions{.lr = 1e-2});
    for (int step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      const at::Tensor loss = loss_of(net, data(words_of(step), mesh, {Shard(0)}),
                                      data(words_of(step + 1), mesh, {Shard(0)}));
      loss.backward();
      clip_grad_norm(net->parameters(), 1.0);
      optimizer.step();
      EXPECT_NEAR(loss.item<float>(), wanted[static_cast<size_t>(step)], 2e-5) << step;
    }
  };
  on_gpus(
      {{"dp", 1}},  // the machine
      [&](const MeshPtr&) {
        const absl::Status status = run_ranks(1, train);
        EXPECT_TRUE(status.ok()) << status;
      },
      kSlow);
}

// Some of the parameters rest on the GPU, some on the CPU: what their optimizer sends goes each its way.
TEST(CpuOffloadOptimizersTest, OverTwoDevices) {
  const auto numbers = [](int i, at::IntArrayRef sizes) {
    return at::sin(at::arange(c10::multiply_integers(sizes), at::kFloat) * 0.3 + i).view(sizes);
  };
  const std::vector<std::vector<int64_t>> shapes = {{6, 4}, {6, 4}, {5, 3}, {5, 3}};
  const auto check = [&](const auto& options) {
    std::vector<at::Tensor> wanted;
    for (int i = 0; i < 4; ++i) {
      wanted.push_back(numbers(i, shapes[static_cast<size_t>(i)]).requires_grad_());
      wanted.back().mutable_grad() = numbers(10 + i, wanted.back().sizes());
    }
    FusedOptimizer alone(wanted, options);
    for (int step = 0; step < 2; ++step) alone.step();
    on_gpus(
        {{"dp", 2}},
        [&](const MeshPtr& mesh) {
          std::vector<at::Tensor> all;
          const auto placed = [&](const at::Tensor& t, int i) {
            return distribute_tensor(i % 2 == 0 ? t.to(at::kCUDA) : t, mesh, {Shard(0)});
          };
          for (int i = 0; i < 4; ++i) {
            const std::vector<int64_t>& sizes = shapes[static_cast<size_t>(i)];
            all.push_back(placed(numbers(i, sizes), i).requires_grad_());
            all.back().mutable_grad() = placed(numbers(10 + i, sizes), i);
          }
          FusedOptimizer optimizer(all, options);
          for (int step = 0; step < 2; ++step) optimizer.step();
          for (size_t i = 0; i < 4; ++i) {
            EXPECT_TRUE(at::allclose(host(all[i].detach()), wanted[i].detach(), 1e-4, 1e-5)) << i;
          }
        },
        kSlow);
  };
  check(AdafactorOptions{});
  check(MuonOptions{});
}

TEST(CpuOffloadErrorsTest, Devices) {
  const auto refusal = [](const std::function<void(const MeshPtr&)>& body) {
    std::string message;
    for (const absl::Status& status : try_on_gpus({{"dp", 2}}, body)) {
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
      message = std::string(status.message());
    }
    return message;
  };
  EXPECT_THAT(refusal([](const MeshPtr& mesh) {
                WordsNet net = make_words_net();
                fully_shard(*net, mesh, {.compute_device = at::Device(at::kCUDA, 99)});
              }),
              HasSubstr("compute_device is cuda:99; LibTorch has 8 of them here"));
  EXPECT_THAT(refusal([](const MeshPtr& mesh) {
                WordsNet net = make_words_net();
                fully_shard(*net, mesh, {.compute_device = at::kXPU});
              }),
              HasSubstr("compute_device is xpu; wanted cuda, or cpu"));
  EXPECT_THAT(refusal([](const MeshPtr& mesh) {
                WordsNet net = make_words_net();
                fully_shard(*net, mesh, {.compute_device = at::kMeta});
              }),
              HasSubstr("compute_device is meta; wanted cuda, or cpu"));
  EXPECT_THAT(refusal([](const MeshPtr& mesh) {
                WordsNet net = make_words_net();
                net->to(at::kCUDA);
                fully_shard(*net, mesh, {.compute_device = at::kCPU});
              }),
              HasSubstr("wanted on the CPU, to be used on the compute_device cpu, or there"));
  // What is refused when the values are compared has moved nothing.
  EXPECT_THAT(refusal([](const MeshPtr& mesh) {
                Scaled net;
                for (const at::Tensor& p : net->parameters()) p.detach().zero_();
                net->table.add_(mesh->coordinate()[0]);
                FullyShardOptions options = on_gpu({});
                options.distribute.source = std::nullopt;
                try {
                  fully_shard(*net, mesh, options);
                } catch (const Error&) {
                  EXPECT_TRUE(net->table.is_cpu());
                  EXPECT_FALSE(is_dtensor(net->table));
                  throw;
                }
              }),
              HasSubstr("'table'"));
}

TEST(CpuOffloadErrorsTest, WhatWouldGoBackwardOnTheCpu) {
  nn::Linear whole(3, 5);
  on_gpus({{"dp", 2}}, [&](const MeshPtr& mesh) {
    nn::Linear net(std::dynamic_pointer_cast<nn::LinearImpl>(whole->clone()));
    fully_shard(*net, mesh, on_gpu({}));
    const auto expect_refused = [](const std::function<void()>& body, const std::string& message) {
      try {
        body();
        ADD_FAILURE() << "not refused: " << message;
      } catch (const Error& e) {
        EXPECT_THAT(e.what(), HasSubstr(message));
      }
    };
    at::Tensor before;
    {
      const c10::AutoGradMode no_grad(false);
      before = net->weight.clone();
    }
    expect_refused([&] { (net->weight - before).square().sum(); },
                   "aten::sub: the parameter 'weight' rests on the CPU and is used on cuda:");
    {
      const c10::AutoGradMode no_grad(false);
      EXPECT_EQ(host((net->weight - before).abs().sum()).item<float>(), 0);
    }
    const at::Tensor x = data(at::ones({4, 3}), mesh, {Shard(0)});
    const at::Tensor loss = net(x).square().sum();
    expect_refused(
        [&] { torch::autograd::grad({loss}, net->parameters(), {}, std::nullopt, true); },
        "gradients of gradients (create_graph) of the parameter '");
  });
}

TEST(CpuOffloadErrorsTest, IsNotCaptured) {
  on_gpus({{"dp", 2}}, [](const MeshPtr& mesh) {
    WordsNet net = make_words_net();
    fully_shard(*net, mesh, on_gpu({}));
    const at::Tensor words = data(words_of(0), mesh, {Shard(0)});
    net(words);
    reshard(mesh);
    try {
      CapturedStep::capture(mesh, {}, [&] { net(words); });
      ADD_FAILURE() << "captured";
    } catch (const Error& e) {
      EXPECT_EQ(e.status().code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_THAT(e.what(), HasSubstr("rest on the CPU"));
    }
  });
}

}  // namespace
}  // namespace shardweave
