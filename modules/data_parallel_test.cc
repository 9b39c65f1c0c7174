// Data parallelism in one call, alone, over tensor parallelism, and beside fully_shard: what one device
// computes, in as many bytes as there have to be.
#include "shardweave/modules/data_parallel.h"

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/clip_grad_norm.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/observe/comm_trace.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/modules/fully_shard.h"
#include "shardweave/modules/parallel_style.h"
#include "shardweave/modules/parallelize_module.h"
#include "shardweave/modules/power_sgd.h"
#include "shardweave/modules/summon_full_params.h"
#include "shardweave/modules/zero.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/batchnorm.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/pimpl.h"
#include "torch/optim/adamw.h"
#include "torch/optim/sgd.h"

namespace shardweave {
namespace {

using ::testing::HasSubstr;
using testing::on_mesh;
namespace nn = torch::nn;
namespace optim = torch::optim;
using Mesh = std::vector<MeshDim>;

constexpr int64_t kWords = 11, kDim = 6, kHidden = 10, kBatch = 7, kLength = 3;
constexpr int kSteps = 20;

// An MLP between embedding and head, with a batch norm, whose statistics are buffers, and a parameter
// that only every other step uses.
struct NetImpl : nn::Module {
  NetImpl() {
    embed = register_module("embed", nn::Embedding(kWords, kDim));
    norm = register_module("norm", nn::BatchNorm1d(kDim));
    up = register_module("up", nn::Linear(kDim, kHidden));
    down = register_module("down", nn::Linear(kHidden, kDim));
    head = register_module("head", nn::Linear(kDim, kWords));
    extra = register_parameter("extra", at::zeros({kDim}));
    const c10::AutoGradMode no_grad(false);
    double k = 0;
    for (at::Tensor p : parameters()) {
      p.copy_(at::sin(at::arange(p.numel(), at::kFloat) * 0.7 + ++k).view(p.sizes()) * 0.5);
    }
  }
  at::Tensor loss(const at::Tensor& tokens, const at::Tensor& targets, int step = 0) {
    at::Tensor x = embed(tokens);
    x = x + norm(x.transpose(1, 2)).transpose(1, 2);
    x = x + down(at::gelu(up(x)));
    if (step % 2 == 1) x = x + extra;
    return at::cross_entropy_loss(head(x).view({-1, kWords}), targets.view({-1}));
  }
  nn::Embedding embed{nullptr};
  nn::BatchNorm1d norm{nullptr};
  nn::Linear up{nullptr}, down{nullptr}, head{nullptr};
  at::Tensor extra;
};
TORCH_MODULE(Net);

struct Batch {
  at::Tensor tokens, targets;
};
Batch batch(int step) {
  const at::Tensor all =
      (at::arange(kBatch * (kLength + 1)).view({kBatch, kLength + 1}) * (3 + step) + step)
          .remainder(kWords);
  return {all.slice(1, 0, kLength).contiguous(), all.slice(1, 1).contiguous()};
}
Batch fed(int step, const MeshPtr& mesh) {
  const Batch b = batch(step);
  NamedPlacements rows;
  for (const MeshDim& dim : mesh->mesh().dims()) {
    if (dim.name != "tp") rows.emplace_back(dim.name, Shard(0));
  }
  return {distribute_tensor(b.tokens, mesh, rows), distribute_tensor(b.targets, mesh, rows)};
}

using Values = std::map<std::string, at::Tensor>;
Values values_of(const nn::Module& module) {
  const c10::AutoGradMode no_grad(false);
  Values values;
  const auto add = [&](const std::string& name, const at::Tensor& t) {
    values[name] = (is_dtensor(t) ? full_tensor(t) : t).detach().to(at::kDouble).clone();
  };
  for (const auto& item : module.named_parameters()) add(item.key(), item.value());
  for (const auto& item : module.named_buffers()) add(item.key(), item.value());
  return values;
}
void expect_same(const Values& values, const Values& wanted) {
  ASSERT_EQ(values.size(), wanted.size());
  for (const auto& [name, value] : wanted) {
    EXPECT_TRUE(at::allclose(values.at(name), value, 1e-3, 1e-4))
        << name << values.at(name) << value;
  }
}

template <typename Feed>
Values trained(NetImpl& model, Feed feed) {
  optim::AdamW optimizer(model.parameters(), optim::AdamWOptions(0.01));
  for (int step = 0; step < kSteps; ++step) {
    const Batch b = feed(step);
    model.loss(b.tokens, b.targets, step).backward();
    finish_grad_sync(model.parameters());
    clip_grad_norm(model.parameters(), 0.3);
    optimizer.step();
    optimizer.zero_grad();
  }
  return values_of(model);
}
const Values& of_one_device() {
  static const Values* const values = [] {
    Net model;
    return new Values(trained(*model, batch));
  }();
  return *values;
}

// The cuts are uneven: 6 and 10 over 2 are even, 11 is not.
const ShardingPlan kTensorParallel = {.parameter = {{"up.*", {{"tp", Shard(0)}}},
                                                    {"down.weight", {{"tp", Shard(1)}}},
                                                    {"{embed,head}.weight", {{"tp", Shard(0)}}}},
                                      .forward = {{"down.output", {{"tp", Replicate()}}}}};

TEST(DataParallelTest, TrainsAsOneDeviceDoes) {
  const Values& wanted = of_one_device();
  for (const Mesh& dims : std::vector<Mesh>{{{"dp", 1}},
                                            {{"dp", 2}},
                                            {{"dp", 3}},
                                            {{"dp", 2}, {"tp", 2}},
                                            {{"tp", 2}, {"dp", 2}},
                                            {{"outer", 2}, {"dp", 2}, {"tp", 2}}}) {
    const bool has_tp = dims.back().name == "tp" || dims[0].name == "tp";
    on_mesh(dims, [&](const MeshPtr& mesh) {
      Net model;
      if (has_tp) {
        parallelize_module(*model, mesh, kTensorParallel);
      } else if (mesh->rank() != Rank(0)) {  // the first one's values count
        const c10::AutoGradMode no_grad(false);
        for (at::Tensor p : model->parameters()) p.fill_(mesh->rank().value);
        model->norm->running_mean.fill_(7);
      }
      const GradSync ddp = distributed_data_parallel(
          *model, mesh, {.mesh_dim = "dp", .sync = {.bucket_bytes = 300}});
      expect_same(trained(*model, [&](int step) { return fed(step, mesh); }), wanted);
      for (const at::Tensor& p : model->parameters()) EXPECT_TRUE(is_dtensor(p));
      for (const at::Tensor& b : model->buffers()) EXPECT_TRUE(is_dtensor(b));
      if (mesh->mesh().size() > 1) {
        EXPECT_GT(ddp.left_in_backward(), kSteps / 2);
      }
    });
  }
}

TEST(DataParallelTest, FullyShardedAndHybridOutsideOfTensorParallelism) {
  const Values& wanted = of_one_device();
  for (const Mesh& dims :
       std::vector<Mesh>{{{"dp", 2}, {"tp", 2}}, {{"replicas", 2}, {"dp", 2}, {"tp", 2}}}) {
    on_mesh(dims, [&](const MeshPtr& mesh) {
      Net model;
      parallelize_module(*model, mesh, kTensorParallel);
      enable_2d_with_fsdp(*model, mesh, "dp");
      fully_shard(*model, mesh, {.mesh_dim = "dp", .units = {"up", "down"}});
      expect_same(trained(*model, [&](int step) { return fed(step, mesh); }), wanted);
    });
  }
}

// 2 (n - 1) / n of the parameters' bytes, in as many collectives as there are buckets.
TEST(DataParallelTest, SendsWhatHasToBeSent) {
  for (const int64_t n : {2, 3, 4}) {
    for (const int64_t bucket_bytes : {400, 25 << 20}) {
      on_mesh({{"dp", n}}, [&](const MeshPtr& mesh) {
        Net model;
        const GradSync ddp =
            distributed_data_parallel(*model, mesh, {.sync = {.bucket_bytes = bucket_bytes}});
        int64_t total = 0;
        for (const auto& p : model->named_parameters()) {
          // The batch norm has reduced those of its own, for the gradient of its input.
          if (!p.key().starts_with("norm.")) total += p.value().numel() * 4;
        }
        for (int step = 1; step < 8; step += 2) {
          const CommTrace trace(mesh);
          const Batch b = fed(step, mesh);
          model->loss(b.tokens, b.targets, step).backward();
          finish_grad_sync(*model);
          int64_t calls = 0, bytes = 0, in_forward = 0;
          for (const CommEvent& event : trace.events()) {
            if (event.is_check) continue;
            if (event.phase == Phase::kGradientSync) {
              ++calls;
              bytes += event.bytes;
            } else {
              ++in_forward;
            }
          }
          for (at::Tensor p : model->parameters()) p.mutable_grad() = at::Tensor();
          if (step == 1) continue;
          EXPECT_EQ(calls, ddp.num_buckets());
          EXPECT_GE(bytes, total * 2 * (n - 1) / n);
          EXPECT_LE(bytes, total * 2 * (n - 1) / n + 8 * 8)  // of each tensor in whole elements
              << trace.to_string();
          // The batch norm's sums, forward and backward, and the loss.
          EXPECT_LE(in_forward, 5) << trace.to_string();
        }
        EXPECT_EQ(ddp.left_in_backward(), 3 * ddp.num_buckets());
        if (bucket_bytes > 1000) {
          EXPECT_EQ(ddp.num_buckets(), 1);
        }
      });
    }
  }
}

// Another number of backwards a step than in the first, or fewer parameters that are trained: buckets
// leave during backward again, and what arrives is what one device has.
TEST(DataParallelTest, LearnsHowManyBackwardsThereAre) {
  struct Two : nn::Module {
    Two() {
      register_module("up", up);
      register_module("down", down);
    }
    at::Tensor loss(const at::Tensor& x) { return down(up(x)).square().sum(); }
    nn::Linear up{4, 6}, down{6, 3};
  };
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    Two model, alone;
    for (size_t i = 0; i < 4; ++i) {
      for (Two* each : {&model, &alone}) {
        const at::Tensor p = each->parameters()[i].detach();
        p.copy_(at::sin(at::arange(p.numel(), at::kFloat) + i).view(p.sizes()));
      }
    }
    const at::Tensor input = at::sin(at::arange(32, at::kFloat)).view({8, 4});
    alone.loss(input).backward();
    const GradSync ddp = distributed_data_parallel(model, mesh, {.sync = {.bucket_bytes = 1}});
    const at::Tensor x = distribute_tensor(input, mesh, {Shard(0)});
    // How many leave in backward, and how many collectives there are of gradients.
    const auto step = [&](int backwards) {
      const int64_t before = ddp.left_in_backward();
      const CommTrace trace(mesh);
      for (int i = 0; i < backwards; ++i) model.loss(x).backward();
      finish_grad_sync(model);
      int64_t calls = 0;
      for (const CommEvent& event : trace.events()) {
        calls += event.phase == Phase::kGradientSync && !event.is_check;
      }
      for (size_t i = 0; i < 4; ++i) {
        at::Tensor p = model.parameters()[i];
        if (p.requires_grad()) {
          EXPECT_TRUE(at::allclose(full_tensor(p.grad()), alone.parameters()[i].grad() * backwards,
                                   1e-4, 1e-5));
        }
        p.mutable_grad() = at::Tensor();
      }
      return std::pair(ddp.left_in_backward() - before, calls);
    };
    step(2);
    step(1);  // less than it has learned
    EXPECT_EQ(step(1), std::pair(int64_t{4}, int64_t{4}));
    step(2);  // more: sent in backward, and again
    EXPECT_EQ(step(2), std::pair(int64_t{4}, int64_t{4}));
    // The first that comes.
    model.down->bias.requires_grad_(false);
    step(2);
    EXPECT_EQ(step(2), std::pair(int64_t{3}, int64_t{3}));
    model.down->bias.requires_grad_(true);
    step(2);
    EXPECT_EQ(step(2), std::pair(int64_t{4}, int64_t{4}));
  });
}

TEST(DataParallelTest, BuffersOfTheFirstRank) {
  struct WithPlainImpl : nn::Module {
    WithPlainImpl() {
      a = register_buffer("a", at::zeros({3}));
      b = register_buffer("b", at::zeros({2}, at::kLong));
      cut = register_buffer("cut", at::zeros({4}));
    }
    at::Tensor a, b, cut;
  };
  for (const bool plain : {false, true}) {
    on_mesh({{"tp", 2}, {"dp", 2}}, [&](const MeshPtr& mesh) {
      WithPlainImpl model;
      if (!plain) distribute_module(model, mesh, {{"cut", {{"dp", Shard(0)}}}});
      const int64_t me = mesh->rank().value, first = me - me % 2;
      const auto part = [&](const at::Tensor& t) { return plain ? t : to_local(t); };
      part(model.a).fill_(me);
      part(model.b).fill_(me);
      part(model.cut).fill_(me);
      const CommTrace trace(mesh);
      broadcast_buffers(model, mesh, "dp");
      EXPECT_TRUE(part(model.a).eq(first).all().item<bool>());
      EXPECT_TRUE(part(model.b).eq(first).all().item<bool>());
      EXPECT_TRUE(part(model.cut).eq(plain ? first : me).all().item<bool>());
      int64_t broadcasts = 0;
      for (const CommEvent& event : trace.events()) broadcasts += event.collective == "broadcast";
      EXPECT_EQ(broadcasts, 2);  // one for each dtype
    });
  }
}

// What each rank has thrown, "" for nothing, and after it that nothing has changed.
void expect_refused(const Mesh& dims, absl::StatusCode code, const std::string& text,
                    const std::function<void(NetImpl&, const MeshPtr&)>& body) {
  std::mutex mutex;
  int refused = 0;
  on_mesh(dims, [&](const MeshPtr& mesh) {
    Net model;
    try {
      body(*model, mesh);
      ADD_FAILURE() << "no error on rank " << mesh->rank().value << ", wanted " << text;
    } catch (const Error& error) {
      const std::lock_guard lock(mutex);
      refused += error.status().code() == code &&
                 std::string(error.what()).find(text) != std::string::npos;
      if (std::string(error.what()).find("refused on other ranks") == std::string::npos) {
        EXPECT_THAT(error.what(), HasSubstr(text));
        EXPECT_EQ(error.status().code(), code) << error.what();
      }
    }
  });
  EXPECT_GT(refused, 0) << text;
}

TEST(DataParallelTest, TheOrderIsTensorParallelismFirst) {
  using enum absl::StatusCode;
  const Mesh mesh2 = {{"dp", 2}, {"tp", 2}};
  expect_refused(mesh2, kFailedPrecondition, "plans come first",
                 [](NetImpl& model, const MeshPtr& mesh) {
                   fully_shard(model, mesh, {.mesh_dim = "dp"});
                   parallelize_module(model, mesh, kTensorParallel);
                 });
  expect_refused(
      mesh2, kFailedPrecondition, "parallelize_module() comes first, then fully_shard",
      [](NetImpl& model, const MeshPtr& mesh) { enable_2d_with_fsdp(model, mesh, "dp"); });
  expect_refused(mesh2, kFailedPrecondition, "fully sharded already",
                 [](NetImpl& model, const MeshPtr& mesh) {
                   fully_shard(model, mesh, {.mesh_dim = "dp"});
                   enable_2d_with_fsdp(model, mesh, "dp");
                 });
  expect_refused({{"dp", 2}}, kFailedPrecondition, "has one dimension",
                 [](NetImpl& model, const MeshPtr& mesh) { enable_2d_with_fsdp(model, mesh); });
  expect_refused(mesh2, kInvalidArgument, "wanted whole along 'tp'",
                 [](NetImpl& model, const MeshPtr& mesh) {
                   parallelize_module(model, mesh, kTensorParallel);
                   enable_2d_with_fsdp(model, mesh, "tp");
                 });
  expect_refused(mesh2, kFailedPrecondition, "is a DTensor already",
                 [](NetImpl& model, const MeshPtr& mesh) {
                   pre_dp_module_transform(model, mesh);
                   parallelize_module(model, mesh, kTensorParallel);
                 });
  expect_refused(mesh2, kInvalidArgument, "is on another mesh",
                 [](NetImpl& model, const MeshPtr& mesh) {
                   const MeshPtr tp = *mesh->slice({"tp"});
                   parallelize_module(model, tp, kTensorParallel);
                   pre_dp_module_transform(model, mesh, {.mesh_dim = "dp"});
                 });
}

TEST(DataParallelTest, OneOwnerForAGradient) {
  using enum absl::StatusCode;
  const Mesh one = {{"dp", 2}};
  const auto ddp = [](NetImpl& model, const MeshPtr& mesh) {
    (void)distributed_data_parallel(model, mesh);
  };
  expect_refused(one, kFailedPrecondition, "is fully sharded already: its unit",
                 [&](NetImpl& model, const MeshPtr& mesh) {
                   fully_shard(model, mesh);
                   ddp(model, mesh);
                 });
  // Also while they are summoned, and lie as other parameters.
  expect_refused(one, kFailedPrecondition, "is fully sharded already: its unit",
                 [&](NetImpl& model, const MeshPtr& mesh) {
                   fully_shard(model, mesh);
                   const FullParams whole(model);
                   ddp(model, mesh);
                 });
  expect_refused(one, kFailedPrecondition, "is fully sharded: its unit",
                 [&](NetImpl& model, const MeshPtr& mesh) {
                   fully_shard(model, mesh);
                   const FullParams whole(model);
                   const GradSync sync(model, {.hook = std::make_shared<PowerSgd>()});
                 });
  expect_refused(one, kFailedPrecondition, "is in a ZeroPartition",
                 [&](NetImpl& model, const MeshPtr& mesh) {
                   pre_dp_module_transform(model, mesh);
                   const ZeroPartition zero(model.parameters());
                   ddp(model, mesh);
                 });
  expect_refused(one, kFailedPrecondition, "made data parallel once",
                 [&](NetImpl& model, const MeshPtr& mesh) {
                   const GradSync first = distributed_data_parallel(model, mesh);
                   ddp(model, mesh);
                 });
  expect_refused(one, kFailedPrecondition, "in a GradSync",
                 [&](NetImpl& model, const MeshPtr& mesh) {
                   const GradSync first = distributed_data_parallel(model, mesh);
                   fully_shard(model, mesh);
                 });
  expect_refused(one, kFailedPrecondition, "in a GradSync",
                 [&](NetImpl& model, const MeshPtr& mesh) {
                   const GradSync first = distributed_data_parallel(model, mesh);
                   const ZeroPartition zero(model.parameters());
                 });
}

TEST(DataParallelTest, BadInputIsAnErrorOnAllRanksBeforeAnythingChanges) {
  using enum absl::StatusCode;
  const Mesh dims = {{"dp", 3}};
  const auto refused = [&](absl::StatusCode code, const std::string& text, auto options_of,
                           auto prepare) {
    expect_refused(dims, code, text, [&](NetImpl& model, const MeshPtr& mesh) {
      prepare(model, mesh->rank().value);
      try {
        (void)distributed_data_parallel(model, mesh, options_of(mesh->rank().value));
      } catch (...) {
        for (const at::Tensor& p : model.parameters()) EXPECT_FALSE(is_dtensor(p));
        throw;
      }
    });
  };
  const auto nothing = [](NetImpl&, int64_t) {};
  using Options = DataParallelOptions;
  refused(kNotFound, "\"pp\"", [](int64_t) { return Options{.mesh_dim = "pp"}; }, nothing);
  refused(kOutOfRange, "", [](int64_t) { return Options{.distribute = {.source = 3}}; }, nothing);
  refused(
      kInvalidArgument, "bucket_bytes is 0",
      [](int64_t r) { return Options{.sync = {.bucket_bytes = r == 1 ? 0 : 100}}; }, nothing);
  refused(
      kInvalidArgument, "what the options say is not the same on ranks 0 and 2",
      [](int64_t r) { return Options{.sync = {.bucket_bytes = r == 2 ? 99 : 100}}; }, nothing);
  refused(
      kInvalidArgument, "'extra' (name, shape", [](int64_t) { return Options(); },
      [](NetImpl& model, int64_t r) {
        if (r == 1) model.extra.set_data(at::zeros({kDim + 1}));
      });
  refused(
      kInvalidArgument,
      "'extra': is not the same",  // values, where none counts more than the others
      [](int64_t) { return Options{.distribute = {.source = std::nullopt}}; },
      [](NetImpl& model, int64_t r) {
        const c10::AutoGradMode no_grad(false);
        if (r == 1) model.extra.fill_(1);
      });
  refused(
      kInvalidArgument, "number of parameters", [](int64_t) { return Options(); },
      [](NetImpl& model, int64_t r) {
        if (r == 1) model.register_buffer("more", at::zeros({1}));
      });
}

// Hooks tell parameters by their names, those that they are about to get included.
TEST(DataParallelTest, TwoParametersOfOneNameForAHookAreRefusedBeforeAnythingChanges) {
  expect_refused({{"dp", 2}}, absl::StatusCode::kInvalidArgument,
                 "two parameters are called 'weight'", [](NetImpl& model, const MeshPtr& mesh) {
                   distribute_module(*model.head, mesh, {});  // as "weight" and "bias"
                   const at::Tensor weight = model.register_parameter("weight", at::zeros({3}));
                   try {
                     (void)distributed_data_parallel(
                         model, mesh, {.sync = {.hook = std::make_shared<PowerSgd>()}});
                   } catch (...) {
                     EXPECT_FALSE(is_dtensor(weight));
                     EXPECT_FALSE(is_dtensor(model.extra));
                     throw;
                   }
                 });
}

}  // namespace
}  // namespace shardweave
