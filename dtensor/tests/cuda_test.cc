// DTensors on GPUs: numbers as on the CPU, whatever streams do meanwhile, and no wait of the host.
#include <functional>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "c10/core/StreamGuard.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/clip_grad_norm.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/grad_sync.h"
#include "shardweave/dtensor/random.h"
#include "shardweave/dtensor/redistribute_async.h"
#include "shardweave/dtensor/testing/fake_cuda.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "torch/nn/functional/loss.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/modules/normalization.h"
#include "torch/nn/pimpl.h"
#include "torch/nn/utils/clip_grad.h"
#include "torch/optim/adamw.h"

namespace shardweave {
namespace {

using ::testing::HasSubstr;
using testing::host;
using testing::host_waits;
using testing::on_gpus;
using testing::on_mesh;
using testing::try_on_gpus;
namespace nn = torch::nn;

// Whoever forgets to wait for one of NCCL's operations, or for what came before it, is too early.
const FakeGpuScript kSlow = {.delay_microseconds = 500, .operation_milliseconds = 3};

// Small integers: every sum is exact.
at::Tensor numbers(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) {
  return at::arange(c10::multiply_integers(sizes)).mul(5).remainder(7).sub(2).view(sizes).to(dtype);
}

void expect_equal(const at::Tensor& got, const at::Tensor& want, const std::string& what) {
  const at::Tensor here = host(got);
  ASSERT_EQ(here.sizes(), want.sizes()) << what;
  EXPECT_TRUE(at::equal(here, want)) << what << "\ngot\n" << here << "\nwanted\n" << want;
}

void expect_close(const at::Tensor& got, const at::Tensor& want, const std::string& what) {
  const at::Tensor here = host(got);
  ASSERT_EQ(here.sizes(), want.sizes()) << what;
  EXPECT_TRUE(at::allclose(here, want, 1e-5, 1e-6)) << what << "\ngot\n"
                                                    << here << "\nwanted\n"
                                                    << want;
}

// --- the fake ------------------------------------------------------------------------------------

TEST(FakeCudaTest, IsLibTorchsDevice) {
  on_gpus({{"dp", 2}}, [](const MeshPtr& mesh) {
    at::Tensor x = numbers({3, 4}).to(at::kCUDA);
    EXPECT_EQ(x.device(), at::Device(at::kCUDA, static_cast<int8_t>(mesh->rank().value)));
    x.requires_grad_();
    at::Tensor y = (x * 2 + 1).t().matmul(x).sum();
    y.backward();
    const at::Tensor z = numbers({3, 4}).requires_grad_();
    const at::Tensor w = (z * 2 + 1).t().matmul(z).sum();
    w.backward();
    expect_close(y, w.detach(), "value");
    expect_close(x.grad(), z.grad(), "gradient");
    at::Tensor v = at::zeros({4, 4}, at::kCUDA);
    v.view({2, 2, 4}).select(1, 1).narrow(1, 1, 2).add_(3);
    EXPECT_EQ(v.sum().item<float>(), 12);
  });
}

// What these tests are worth: a sum that nobody waits for is not seen.
TEST(FakeCudaTest, WhoDoesNotWaitReadsWhatWasThere) {
  on_gpus({{"dp", 2}},
          [](const MeshPtr& mesh) {
            const at::Tensor x = at::ones({4}, at::kCUDA);
            Communicator& comm = **mesh->communicator(0);
            const Buffer memory{
                x.data_ptr(), 4, DType::kF32, {DeviceType::kCuda, x.device().index()}};
            const DeviceStream stream{
                c10::impl::VirtualGuardImpl(at::kCUDA).getStream(x.device()).native_handle()};
            const Work work = comm.all_reduce(memory, memory, ReduceOp::kSum, {.stream = stream});
            const at::Tensor early = x + 1;
            EXPECT_TRUE(work.wait_on(stream).ok());
            const at::Tensor late = x + 1;
            expect_equal(early, at::full({4}, 2.0F), "early");
            expect_equal(late, at::full({4}, 3.0F), "late");
          },
          {.operation_milliseconds = 50});
}

// What a failed rank has left on its stream lets go of memory, in its time.
TEST(FakeCudaTest, ANewMachineComesAfterTheOldOnesWork) {
  FakeGpu& gpu = fake_gpu_of_tests();
  gpu.reset({});
  bool has_run = false;
  gpu.enqueue(0, {}, [&gpu, &has_run, memory = gpu.allocate(0, 4)] {
    absl::SleepFor(absl::Milliseconds(20));
    gpu.release(memory);
    has_run = true;
  });
  gpu.reset({});
  EXPECT_TRUE(has_run);
}

// --- moving --------------------------------------------------------------------------------------

class CudaTest : public ::testing::TestWithParam<std::vector<MeshDim>> {};

std::string name_of(const ::testing::TestParamInfo<std::vector<MeshDim>>& info) {
  std::string name = "on";
  for (const MeshDim& dim : info.param) absl::StrAppend(&name, "_", dim.size);
  return name;
}

INSTANTIATE_TEST_SUITE_P(Meshes, CudaTest,
                         ::testing::Values(std::vector<MeshDim>{{"dp", 1}},
                                           std::vector<MeshDim>{{"dp", 2}},
                                           std::vector<MeshDim>{{"dp", 3}},
                                           std::vector<MeshDim>{{"dp", 2}, {"tp", 2}}),
                         name_of);

TEST_P(CudaTest, EveryLayoutToEveryLayout) {
  on_gpus(
      GetParam(),
      [](const MeshPtr& mesh) {
        const at::Tensor whole = numbers({5, 3});
        const auto layouts = testing::all_layouts(mesh->mesh().ndim(), 2, /*partial=*/true);
        for (const Placements& from : layouts) {
          const at::Tensor start = testing::scattered(whole.to(at::kCUDA), mesh, from);
          for (const Placements& to : layouts) {
            if (layouts.size() > 4 && (&from - layouts.data() + &to - layouts.data()) % 3 != 0) {
              continue;  // of 256 on two dimensions every third
            }
            const at::Tensor moved = redistribute(start, to);
            ASSERT_TRUE(to_local(moved).is_cuda());
            expect_equal(moved, whole, absl::StrCat(describe(start), " -> ", describe(moved)));
          }
        }
      },
      kSlow);
}

TEST_P(CudaTest, SeveralUnderWay) {
  on_gpus(
      GetParam(),
      [](const MeshPtr& mesh) {
        const Placements cut(mesh->mesh().ndim(), Shard(0));
        std::vector<at::Tensor> wholes, whole_later;
        std::vector<PendingTensor> pending;
        for (int i = 0; i < 4; ++i) {
          wholes.push_back(numbers({7, 2}).add(i));
          pending.push_back(redistribute_async(
              distribute_tensor(wholes.back().to(at::kCUDA), mesh, cut, {.source = std::nullopt}),
              Placements(mesh->mesh().ndim(), Replicate())));
        }
        const int64_t before = host_waits();
        for (PendingTensor& p : pending) whole_later.push_back(p.wait() * 2);
        EXPECT_EQ(host_waits(), before);
        for (int i = 0; i < 4; ++i) expect_equal(whole_later[i], wholes[i] * 2, "doubled");
        // Given up.
        redistribute_async(distribute_tensor(wholes[0].to(at::kCUDA), mesh, cut),
                           Placements(mesh->mesh().ndim(), Replicate()));
      },
      kSlow);
}

TEST_P(CudaTest, FromAndToTheHost) {
  on_gpus(GetParam(), [](const MeshPtr& mesh) {
    const Placements cut(mesh->mesh().ndim(), Shard(0));
    const at::Tensor whole = numbers({5, 3});
    // On the CPU, over the control group.
    const at::Tensor here = distribute_tensor(whole, mesh, cut);
    EXPECT_TRUE(to_local(here).is_cpu());
    const at::Tensor there = here.to(at::kCUDA);
    EXPECT_EQ(layout_of(there), layout_of(here));
    EXPECT_TRUE(there.is_cuda());
    EXPECT_TRUE(to_local(there).is_cuda());
    expect_equal(there + there, whole * 2, "on the GPU");
    const at::Tensor back = (there * 3).cpu();
    EXPECT_TRUE(back.is_cpu());
    EXPECT_TRUE(to_local(back).is_cpu());
    EXPECT_TRUE(at::equal(full_tensor(back), whole * 3));
    // Gradients come back to where a leaf is.
    at::Tensor leaf = distribute_tensor(whole, mesh, cut).requires_grad_();
    leaf.to(at::kCUDA).square().sum().backward();
    EXPECT_TRUE(leaf.grad().is_cpu());
    EXPECT_TRUE(at::equal(full_tensor(leaf.grad()), whole * 2));
    // Made there.
    const at::Tensor ones_there = ones({3, 2}, mesh, cut, at::kCUDA);
    EXPECT_EQ(to_local(ones_there).device(), ones_there.device());
    EXPECT_TRUE(ones_there.device().has_index());
    EXPECT_EQ(host(ones_there).sum().item<float>(), 6);
  });
}

TEST_P(CudaTest, RandomNumbersOfTheCpu) {
  const auto draw = [](const MeshPtr& mesh, c10::Device device) {
    manual_seed(mesh, 7);
    const Placements cut(mesh->mesh().ndim(), Shard(0));
    std::vector<at::Tensor> drawn = {rand({5, 3}, mesh, cut, device),
                                     randn({5, 3}, mesh, cut, device),
                                     at::dropout(ones({5, 3}, mesh, cut, device), 0.5, true),
                                     at::bernoulli(full({5, 3}, 0.5, mesh, cut, device)),
                                     at::randint_like(ones({5, 3}, mesh, cut, device), 9)};
    for (at::Tensor& t : drawn) t = host(t);
    return drawn;
  };
  std::vector<at::Tensor> wanted;
  on_mesh({{"one", 1}}, [&](const MeshPtr& mesh) { wanted = draw(mesh, at::kCPU); });
  on_gpus(GetParam(), [&](const MeshPtr& mesh) {
    const std::vector<at::Tensor> got = draw(mesh, at::kCUDA);
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_TRUE(at::equal(got[i], wanted[i])) << i << "\n" << got[i] << "\n" << wanted[i];
    }
  });
}

// --- training ------------------------------------------------------------------------------------

struct NetImpl : nn::Module {
  NetImpl() {
    embed = register_module("embed", nn::Embedding(11, 6));
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({6})));
    query = register_module("query", nn::Linear(6, 8));
    key = register_module("key", nn::Linear(6, 8));
    value = register_module("value", nn::Linear(6, 8));
    out = register_module("out", nn::Linear(8, 6));
    up = register_module("up", nn::Linear(6, 10));
    down = register_module("down", nn::Linear(10, 6));
    head = register_module("head", nn::Linear(6, 11));
  }
  at::Tensor forward(const at::Tensor& tokens) {
    at::Tensor x = embed(tokens);
    const at::Tensor y = norm(x);
    const auto heads = [](const at::Tensor& t) {
      return t.view({t.size(0), t.size(1), 2, -1}).transpose(1, 2);
    };
    const at::Tensor seen = at::scaled_dot_product_attention(
        heads(query(y)), heads(key(y)), heads(value(y)), {}, 0.0, /*is_causal=*/true);
    x = x + out(seen.transpose(1, 2).reshape({x.size(0), x.size(1), 8}));
    x = x + down(at::gelu(up(norm(x))));
    return head(x);
  }
  nn::Embedding embed{nullptr};
  nn::LayerNorm norm{nullptr};
  nn::Linear query{nullptr}, key{nullptr}, value{nullptr}, out{nullptr};
  nn::Linear up{nullptr}, down{nullptr}, head{nullptr};
};
TORCH_MODULE(Net);

Net make_net() {
  Net net;
  const c10::AutoGradMode no_grad(false);
  double k = 0;
  for (at::Tensor p : net->parameters()) {
    p.copy_(at::sin(at::arange(p.numel(), at::kFloat) * 0.7 + ++k).view(p.sizes()) * 0.5);
  }
  return net;
}

at::Tensor tokens() {
  return at::arange(4 * 5).mul(7).remainder(11).view({4, 5});
}

// How often the host has waited for the device, for kernels or for collectives.
int64_t all_waits(const at::Tensor& t) {
  if (!is_dtensor(t)) return 0;
  return host_waits() + dtensor_internal::MeshContext::of(mesh_of(t))->on_device.waits();
}

// Losses of some steps. `waits`: how often the host waited for the device in the last one.
std::vector<float> train(Net& net, const at::Tensor& words, const at::Tensor& wanted,
                         int64_t* waits = nullptr) {
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-2).eps(1e-3));
  std::vector<at::Tensor> losses;
  for (int step = 0; step < 4; ++step) {
    const int64_t before = all_waits(words);
    optimizer.zero_grad();
    const at::Tensor loss =
        nn::functional::cross_entropy(net(words).view({-1, 11}), wanted.view({-1}));
    loss.backward();
    finish_grad_sync(*net);
    optimizer.step();
    losses.push_back(loss.detach());
    if (waits != nullptr) *waits = all_waits(words) - before;
  }
  std::vector<float> values;
  for (const at::Tensor& loss : losses) values.push_back(host(loss).item<float>());
  return values;
}

void check_training(const std::vector<MeshDim>& dims, const ParameterPlan& plan,
                    const Placements& batch, at::ScalarType dtype = at::kFloat) {
  const double tolerance = dtype == at::kFloat ? 1e-5 : 5e-2;
  Net alone = make_net();
  alone->to(dtype);
  const std::vector<float> wanted = train(alone, tokens(), tokens().roll(1, 1));
  on_gpus(
      dims,
      [&](const MeshPtr& mesh) {
        Net net = make_net();
        net->to(dtype);
        net->to(at::kCUDA);
        distribute_module(*net, mesh, plan);
        const auto data = [&](const at::Tensor& t) {
          return distribute_tensor(t.to(at::kCUDA), mesh, batch);
        };
        int64_t waits = -1;
        const std::vector<float> got =
            train(net, data(tokens()), data(tokens().roll(1, 1)), &waits);
        ASSERT_EQ(got.size(), wanted.size());
        for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], wanted[i], tolerance) << i;
        EXPECT_EQ(waits, 0) << "the host has waited for the device in the middle of a step";
        if (dtype != at::kFloat) return;
        const auto parameters = net->named_parameters(), its = alone->named_parameters();
        for (const auto& p : parameters) expect_close(p.value(), its[p.key()].detach(), p.key());
      },
      kSlow);
}

TEST(CudaTrainingTest, DataParallel) {
  check_training({{"dp", 2}}, {}, {Shard(0)});
}

TEST(CudaTrainingTest, TensorParallel) {
  check_training({{"tp", 2}},
                 {{"query.*", {Shard(0)}},
                  {"key.*", {Shard(0)}},
                  {"value.*", {Shard(0)}},
                  {"out.weight", {Shard(1)}},
                  {"up.*", {Shard(0)}},
                  {"down.weight", {Shard(1)}},
                  {"head.*", {Shard(0)}}},
                 {Replicate()});
}

TEST(CudaTrainingTest, BothOnAMeshOfTwoDimensions) {
  check_training({{"dp", 2}, {"tp", 2}},
                 {{"up.*", {Replicate(), Shard(0)}}, {"down.weight", {Replicate(), Shard(1)}}},
                 {Shard(0), Replicate()});
}

// Attention is another kernel's.
TEST(CudaTrainingTest, InHalfPrecision) {
  check_training({{"dp", 2}}, {}, {Shard(0)}, at::kBFloat16);
}

TEST(CudaTrainingTest, EveryParameterCut) {
  check_training({{"dp", 3}}, {{"*", {Shard(0)}}}, {Shard(0)});
}

TEST(CudaTrainingTest, ClippingWaitsOnce) {
  on_gpus(
      {{"dp", 2}},
      [](const MeshPtr& mesh) {
        std::vector<at::Tensor> parameters;
        for (int i = 0; i < 5; ++i) {
          at::Tensor p = distribute_tensor(numbers({4, 2}).add(i).to(at::kCUDA), mesh, {Shard(0)})
                             .requires_grad_();
          p.square().sum().backward();
          parameters.push_back(p);
        }
        std::vector<at::Tensor> plain;
        for (int i = 0; i < 5; ++i) {
          at::Tensor p = numbers({4, 2}).add(i).requires_grad_();
          p.square().sum().backward();
          plain.push_back(p);
        }
        const int64_t before = host_waits();
        const double norm = clip_grad_norm(parameters, 1.0);
        EXPECT_EQ(host_waits() - before, 1);
        EXPECT_NEAR(norm, nn::utils::clip_grad_norm_(plain, 1.0), 1e-4);
        for (int i = 0; i < 5; ++i) expect_close(parameters[i].grad(), plain[i].grad(), "clipped");
      },
      kSlow);
}

// What the CPU keeps, such as a large embedding, counts too.
TEST(CudaTrainingTest, ClippingOnTwoDevices) {
  on_gpus({{"dp", 2}}, [](const MeshPtr& mesh) {
    std::vector<at::Tensor> parameters, plain;
    for (int i = 0; i < 4; ++i) {
      const at::Tensor there =
          i % 2 == 0 ? numbers({4, 2}).add(i) : numbers({4, 2}).add(i).to(at::kCUDA);
      parameters.push_back(i < 2 ? distribute_tensor(there, mesh, {Shard(0)}) : there);
      plain.push_back(numbers({4, 2}).add(i));
      for (std::vector<at::Tensor>* all : {&parameters, &plain}) {
        all->back().requires_grad_();
        all->back().square().sum().backward();
      }
    }
    const double norm = clip_grad_norm(parameters, 1.0);
    EXPECT_NEAR(norm, nn::utils::clip_grad_norm_(plain, 1.0), 1e-4);
    for (int i = 0; i < 4; ++i) {
      EXPECT_EQ(parameters[i].grad().device().type(), i % 2 == 0 ? at::kCPU : at::kCUDA);
      expect_close(parameters[i].grad(), plain[i].grad(), "clipped");
    }
  });
}

// --- attention's kernels -------------------------------------------------------------------------

struct Attention {
  std::string name;
  at::ScalarType dtype;
  bool is_causal = false;
  bool has_mask = false;
  int64_t key_heads = 4;
};

class CudaAttentionTest : public ::testing::TestWithParam<Attention> {};

INSTANTIATE_TEST_SUITE_P(Kernels, CudaAttentionTest,
                         ::testing::Values(Attention{"efficient", at::kFloat},
                                           Attention{"causal", at::kFloat, true},
                                           Attention{"masked", at::kFloat, false, true},
                                           Attention{"flash", at::kBFloat16},
                                           Attention{"flash_causal", at::kBFloat16, true},
                                           Attention{"flash_shared", at::kBFloat16, true, false, 2},
                                           Attention{"flash_one", at::kBFloat16, true, false, 1}),
                         [](const auto& test) { return test.param.name; });

TEST_P(CudaAttentionTest, IsCutByBatchAndHeads) {
  const Attention& how = GetParam();
  constexpr int64_t kBatch = 3, kHeads = 4, kRows = 5, kFeatures = 8;
  const auto input = [&](int seed) {
    const int64_t heads = seed == 1 || seed == 2 ? how.key_heads : kHeads;
    return at::sin(at::arange(kBatch * heads * kRows * kFeatures) * 0.7 + seed)
        .view({kBatch, heads, kRows, kFeatures})
        .to(how.dtype);
  };
  // The results, and the gradients of query, key, value and mask.
  const auto run = [&](const std::function<at::Tensor(const at::Tensor&)>& place,
                       const std::function<at::Tensor(const at::Tensor&)>& place_mask) {
    std::vector<at::Tensor> leaves;
    for (int i = 0; i < 3; ++i) leaves.push_back(place(input(i)).requires_grad_());
    std::optional<at::Tensor> mask;
    if (how.has_mask) {
      leaves.push_back(place_mask(at::cos(at::arange(kRows * kRows) * 1.3).view({kRows, kRows}))
                           .requires_grad_());
      mask = leaves.back();
    }
    const at::Tensor out =
        at::scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], mask, 0.0, how.is_causal,
                                         std::nullopt, /*enable_gqa=*/how.key_heads < kHeads);
    (out * place(input(9))).sum().backward();
    std::vector<at::Tensor> results = {out};
    for (const at::Tensor& leaf : leaves) results.push_back(leaf.grad());
    return results;
  };
  const auto as_it_is = [](const at::Tensor& t) { return t.clone(); };
  at::globalContext().setSDPUseFlash(false);  // so that all compute by definition
  at::globalContext().setSDPUseMemEfficient(false);
  const std::vector<at::Tensor> wanted = run(as_it_is, as_it_is);
  at::globalContext().setSDPUseFlash(true);
  at::globalContext().setSDPUseMemEfficient(true);
  on_gpus({{"dp", 2}, {"tp", 2}}, [&](const MeshPtr& mesh) {
    for (const Placements& cut : std::vector<Placements>{{Shard(0), Shard(1)},
                                                         {Replicate(), Shard(1)},
                                                         {Shard(0), Shard(0)},
                                                         {Replicate(), Shard(2)},
                                                         {Replicate(), Replicate()}}) {
      SCOPED_TRACE(Layout(cut).to_string());
      const auto placed = [&](const at::Tensor& t) {
        return distribute_tensor(t.to(at::kCUDA), mesh, cut);
      };
      const auto whole = [&](const at::Tensor& t) {
        return distribute_tensor(t.to(at::kCUDA), mesh, {Replicate(), Replicate()});
      };
      const std::vector<at::Tensor> got = run(placed, whole);
      if (cut[1] == Shard(1) && how.key_heads % 2 == 0) {
        EXPECT_TRUE(layout_of(got[0])[1].is_shard(1)) << describe(got[0]);
      }
      const double tolerance = how.dtype == at::kFloat ? 1e-5 : 3e-2;
      ASSERT_EQ(got.size(), wanted.size());
      for (size_t i = 0; i < got.size(); ++i) {
        ASSERT_TRUE(got[i].defined()) << i;
        EXPECT_TRUE(at::allclose(host(got[i]).to(at::kFloat), wanted[i].to(at::kFloat), tolerance,
                                 tolerance))
            << i << "\n"
            << host(got[i]) << "\n"
            << wanted[i];
      }
    }
  });
}

TEST(CudaAttentionErrorTest, DropoutInTheKernel) {
  const std::vector<absl::Status> results = try_on_gpus({{"dp", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor x = ones({2, 2, 4, 8}, mesh, {Shard(0)}, at::kCUDA);
    at::scaled_dot_product_attention(x, x, x, std::nullopt, 0.5);
  });
  for (const absl::Status& status : results) {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("dropout_p is 0.5"));
  }
}

// --- streams of the user's -----------------------------------------------------------------------

// All that is issued under another current stream is in that one's order.
TEST(CudaStreamTest, FollowsTheCurrentStream) {
  on_gpus({{"dp", 2}},
          [](const MeshPtr& mesh) {
            const c10::impl::VirtualGuardImpl cuda(at::kCUDA);
            const c10::Stream side = cuda.getNewStream(cuda.getDevice());
            const at::Tensor whole = numbers({6, 2});
            for (int i = 0; i < 30; ++i) {
              const c10::StreamGuard on_side(side);
              const at::Tensor x = distribute_tensor(whole.add(i).to(at::kCUDA), mesh, {Shard(0)});
              const at::Tensor y = redistribute(x * 2, {Replicate()}) + 1;
              expect_equal(y, whole.add(i) * 2 + 1, "on a stream of its own");
            }
          },
          // Later than NCCL would begin.
          {.delay_microseconds = 20000});
}

// Issued under one stream, waited for under another, and let go of: nobody gets the memory while NCCL
// works on it.
TEST(CudaStreamTest, IssuedOnOneStreamWaitedForOnAnother) {
  on_gpus({{"dp", 2}},
          [](const MeshPtr& mesh) {
            const c10::impl::VirtualGuardImpl cuda(at::kCUDA);
            const c10::Stream side = cuda.getNewStream(cuda.getDevice());
            for (int i = 0; i < 20; ++i) {
              const at::Tensor whole = numbers({64, 4}).add(i);
              std::optional<PendingTensor> pending;
              {
                const c10::StreamGuard on_side(side);
                const at::Tensor sent = distribute_tensor(whole.to(at::kCUDA), mesh, {Shard(0)},
                                                          {.source = std::nullopt}) +
                                        0;
                pending.emplace(redistribute_async(sent, Placements{Replicate()}));
              }
              const at::Tensor gathered =
                  pending->wait();  // no kernel comes before the memory is reused
              pending.reset();
              {
                const c10::StreamGuard on_side(side);
                cuda.synchronizeStream(side);
                std::vector<at::Tensor> reused;  // one of them where that was which is being sent
                for (int k = 0; k < 16; ++k) reused.push_back(at::full({32, 4}, -7.0F, at::kCUDA));
              }
              expect_equal(gathered, whole, "from another stream");
            }
          },
          {.operation_milliseconds = 30});
}

// --- mistakes ------------------------------------------------------------------------------------

TEST(CudaErrorTest, AnotherDevicesTensor) {
  const std::vector<absl::Status> results = try_on_gpus({{"dp", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor elsewhere = at::ones({4}, at::Device(at::kCUDA, 5));
    redistribute(from_local(elsewhere, mesh, {Shard(0)}), {Replicate()});
  });
  for (const absl::Status& status : results) EXPECT_FALSE(status.ok()) << status;
  EXPECT_THAT(std::string(results[0].message()), HasSubstr("cuda:5"));
}

TEST(CudaErrorTest, TensorsOnTwoDevices) {
  on_gpus({{"dp", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor there = ones({4}, mesh, {Shard(0)}, at::kCUDA);
    const at::Tensor here = ones({4}, mesh, {Shard(0)});
    try {
      const at::Tensor sum = there + here;
      ADD_FAILURE() << "no error: " << describe(sum);
    } catch (const std::exception& error) {
      EXPECT_THAT(error.what(), HasSubstr("cpu"));
      EXPECT_THAT(error.what(), HasSubstr("cuda"));
    }
  });
}

// The other rank is gone when the device waits for it: no number that an aborted operation has left
// reaches the host.
TEST(CudaErrorTest, NoNumbersOfABrokenGroup) {
  for (const bool whole : {false, true}) {
    const std::vector<absl::Status> results = try_on_gpus({{"dp", 2}}, [&](const MeshPtr& mesh) {
      const at::Tensor x = distribute_tensor(numbers({6, 2}).to(at::kCUDA), mesh, {Shard(0)});
      host(redistribute(x, {Replicate()}));  // the group is there
      if (mesh->rank().value == 1) throw Error(absl::DataLossError("a test"));
      if (whole) {
        const at::Tensor here = full_tensor(x);
        ADD_FAILURE() << "without the other rank: " << here.cpu();
      } else {
        const double sum = x.sum().item<double>();
        ADD_FAILURE() << "without the other rank: " << sum;
      }
    });
    EXPECT_EQ(results[1].code(), absl::StatusCode::kDataLoss);
    EXPECT_FALSE(results[0].ok());
  }
}

// What one rank has refused by itself is told once, and the group goes on.
TEST(CudaErrorTest, OneThatWasCaught) {
  on_gpus({{"dp", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor elsewhere = at::ones({4}, at::Device(at::kCUDA, 5));
    EXPECT_THROW(redistribute(from_local(elsewhere, mesh, {Shard(0)}, {{8}}), {Replicate()}),
                 Error);
    EXPECT_EQ(ones({4}, mesh, {Shard(0)}, at::kCUDA).sum().item<float>(), 4);
  });
}

// One rank gives up in the middle of a step, with operations under way: every rank hears so.
TEST(CudaErrorTest, OneRankFails) {
  const std::vector<absl::Status> results = try_on_gpus({{"dp", 2}}, [](const MeshPtr& mesh) {
    at::Tensor x = distribute_tensor(numbers({6, 2}).to(at::kCUDA), mesh, {Shard(0)});
    if (mesh->rank().value == 1) throw Error(absl::DataLossError("a test"));
    for (int i = 0; i < 100; ++i) x = redistribute(redistribute(x + 1, {Replicate()}), {Shard(0)});
    host(x);
  });
  EXPECT_EQ(results[1].code(), absl::StatusCode::kDataLoss);
  EXPECT_FALSE(results[0].ok());
  EXPECT_THAT(std::string(results[0].message()), HasSubstr("a test"));
}

}  // namespace
}  // namespace shardweave
