// PowerSGD: what the algorithm gives on one device, the same bits on every rank, fewer bytes.
#include "shardweave/modules/power_sgd.h"

#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/grad_sync.h"
#include "shardweave/dtensor/observe/comm_trace.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/modules/data_parallel.h"
#include "shardweave/modules/optim/grad_scaler.h"
#include "torch/nn/module.h"
#include "torch/nn/pimpl.h"
#include "torch/optim/sgd.h"

namespace shardweave {
namespace {

using ::testing::HasSubstr;
using testing::on_mesh;
namespace nn = torch::nn;

constexpr int64_t kIn = 12, kHidden = 14, kOut = 10, kBatch = 7;
constexpr double kLr = 0.05;

struct MlpImpl : nn::Module {
  MlpImpl() {
    const c10::AutoGradMode no_grad(false);
    const auto make = [&](const char* name, at::IntArrayRef sizes, double k) {
      const int64_t n = c10::multiply_integers(sizes);
      return register_parameter(name,
                                at::sin(at::arange(n, at::kDouble) * 0.7 + k).view(sizes) * 0.4);
    };
    w0 = make("w0", {kIn, kHidden}, 1);
    w1 = make("w1", {kHidden, 2, kOut / 2}, 2);
    bias = make("bias", {kOut}, 3);
    thin = make("thin", {kOut, 1}, 4);  // as long as what would stand for it
  }
  at::Tensor loss(const at::Tensor& x) {
    const at::Tensor y = at::matmul(at::tanh(at::matmul(x, w0)), w1.view({kHidden, -1}));
    return at::matmul(at::tanh(y + bias), thin).square().sum();
  }
  at::Tensor w0, w1, bias, thin;
};
TORCH_MODULE(Mlp);

at::Tensor batch(int step) {
  return at::cos(at::arange(kBatch * kIn, at::kDouble).view({kBatch, kIn}) * (step + 1) * 0.3);
}

at::Tensor first_q(int64_t rows, int64_t rank) {
  return at::sin(at::arange(rows * rank, at::kDouble).view({rows, rank}).square() + 1);
}

// The algorithm, on whole gradients.
struct Reference {
  at::Tensor q, error;
  at::Tensor compress(const at::Tensor& gradient, int64_t rank, bool has_feedback = true) {
    at::Tensor m = gradient.reshape({gradient.size(0), -1});
    if (!q.defined()) q = first_q(m.size(1), rank);
    if (error.defined()) m = m + error;
    const at::Tensor p = std::get<0>(at::linalg_qr(at::matmul(m, q)));
    q = at::matmul(m.t(), p);
    const at::Tensor result = at::matmul(p, q.t());
    if (has_feedback) error = m - result;
    return result.view(gradient.sizes());
  }
};

using Values = std::map<std::string, at::Tensor>;
Values values_of(const nn::Module& module) {
  const c10::AutoGradMode no_grad(false);
  Values values;
  for (const auto& item : module.named_parameters()) {
    const at::Tensor& t = item.value();
    values[item.key()] = (is_dtensor(t) ? full_tensor(t) : t).detach().clone();
  }
  return values;
}
void expect_same(const Values& values, const Values& wanted) {
  for (const auto& [name, value] : wanted) {
    EXPECT_TRUE(at::allclose(values.at(name), value, 1e-8, 1e-8))
        << name << values.at(name) << value;
  }
}

// `parts`: of w0 by columns, and of w1 by rows, each of which is compressed alone.
Values reference(int64_t rank, int64_t start, int steps, int64_t parts = 1,
                 bool has_feedback = true) {
  Mlp model;
  std::vector<Reference> of_w0(static_cast<size_t>(parts)), of_w1(static_cast<size_t>(parts));
  for (int step = 0; step < steps; ++step) {
    model->loss(batch(step)).backward();
    const c10::AutoGradMode no_grad(false);
    for (at::Tensor p : model->parameters()) {
      at::Tensor grad = p.grad();
      const bool is_w0 = p.is_same(model->w0);
      if (step >= start && (is_w0 || p.is_same(model->w1))) {
        std::vector<at::Tensor> compressed;
        const std::vector<at::Tensor> cut = grad.chunk(parts, is_w0 ? 1 : 0);
        for (size_t i = 0; i < cut.size(); ++i) {
          Reference& its = (is_w0 ? of_w0 : of_w1)[i];
          compressed.push_back(its.compress(cut[i].contiguous(), rank, has_feedback));
        }
        grad = at::cat(compressed, is_w0 ? 1 : 0);
      }
      p.sub_(grad, kLr);
      p.mutable_grad() = at::Tensor();
    }
  }
  return values_of(*model);
}

std::shared_ptr<PowerSgd> power_sgd(PowerSgdOptions options, int64_t w0_columns = kHidden) {
  auto hook = std::make_shared<PowerSgd>(options);
  const at::Tensor never = at::scalar_tensor(0, at::kLong);
  hook->set_state({{"w0.iteration", never},
                   {"w1.iteration", never},
                   {"w0.q", first_q(w0_columns, options.rank)},
                   {"w1.q", first_q(kOut, options.rank)}});
  return hook;
}

void train(MlpImpl& model, const MeshPtr& mesh, int first, int last) {
  torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(kLr));
  for (int step = first; step < last; ++step) {
    model.loss(distribute_tensor(batch(step), mesh, {{"dp", Shard(0)}})).backward();
    finish_grad_sync(model.parameters());
    optimizer.step();
    optimizer.zero_grad();
  }
}

TEST(PowerSgdTest, IsTheAlgorithmOfOneDevice) {
  for (const int64_t rank : {1, 2}) {
    for (const int64_t start : {0, 2}) {
      const Values wanted = reference(rank, start, 7);
      for (const int64_t n : {2, 3}) {
        for (const int64_t bucket_bytes : {600, 1 << 20}) {
          std::mutex mutex;
          std::vector<at::Tensor> of_ranks;
          on_mesh({{"dp", n}}, [&](const MeshPtr& mesh) {
            Mlp model;
            const auto hook =
                power_sgd({.rank = rank, .start_iteration = start, .min_compression_rate = 1.5});
            const GradSync ddp = distributed_data_parallel(
                *model, mesh, {.sync = {.bucket_bytes = bucket_bytes, .hook = hook}});
            train(*model, mesh, 0, 7);
            expect_same(values_of(*model), wanted);
            EXPECT_GT(ddp.left_in_backward(), 0);
            EXPECT_EQ(hook->state().at("bias.iteration").item<int64_t>(), 7);
            EXPECT_FALSE(hook->state().contains("thin.q"));
            const std::lock_guard lock(mutex);
            of_ranks.push_back(to_local(model->w0));
          });
          // To the last bit.
          for (const at::Tensor& other : of_ranks) EXPECT_TRUE(other.equal(of_ranks[0]));
        }
      }
    }
  }
}

TEST(PowerSgdTest, WithTensorParallelPartsEachByItself) {
  const Values wanted = reference(1, 0, 6, /*parts=*/2);
  on_mesh({{"dp", 2}, {"tp", 2}}, [&](const MeshPtr& mesh) {
    Mlp model;
    distribute_module(*model, mesh, {{"w0", {{"tp", Shard(1)}}}, {"w1", {{"tp", Shard(0)}}}});
    const auto hook = power_sgd({.min_compression_rate = 1.2}, kHidden / 2);
    const GradSync ddp =
        distributed_data_parallel(*model, mesh, {.mesh_dim = "dp", .sync = {.hook = hook}});
    train(*model, mesh, 0, 6);
    expect_same(values_of(*model), wanted);
  });
}

TEST(PowerSgdTest, WithoutFeedbackAndWithOtherDtypes) {
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    Mlp model;
    const auto hook = power_sgd({.min_compression_rate = 1.5, .error_feedback = false});
    const GradSync ddp = distributed_data_parallel(*model, mesh, {.sync = {.hook = hook}});
    train(*model, mesh, 0, 6);
    expect_same(values_of(*model), reference(1, 0, 6, 1, /*has_feedback=*/false));
    EXPECT_FALSE(hook->state().contains("w0.error"));
    EXPECT_TRUE(hook->state().contains("w0.q"));
  });
  // Parameters of bfloat16, and a Q of its own each time: near what no compression gives.
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    Mlp model;
    model->to(at::kBFloat16);
    const auto hook = std::make_shared<PowerSgd>(
        PowerSgdOptions{.rank = 2, .min_compression_rate = 1.2, .warm_start = false});
    const GradSync ddp = distributed_data_parallel(*model, mesh, {.sync = {.hook = hook}});
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.01));
    double first = 0, last = 0;
    for (int step = 0; step < 12; ++step) {
      const at::Tensor x = distribute_tensor(batch(0).to(at::kBFloat16), mesh, {{"dp", Shard(0)}});
      const at::Tensor loss = model->loss(x);
      loss.backward();
      finish_grad_sync(*model);
      optimizer.step();
      optimizer.zero_grad();
      (step == 0 ? first : last) = loss.item<double>();
    }
    EXPECT_LT(last, 0.7 * first);
    EXPECT_EQ(hook->state().at("w0.error").scalar_type(), at::kFloat);
  });
}

TEST(PowerSgdTest, SendsTwoThinMatricesInTwoCollectives) {
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    Mlp model;
    const auto hook = power_sgd({.min_compression_rate = 1.5});
    const GradSync ddp = distributed_data_parallel(*model, mesh, {.sync = {.hook = hook}});
    train(*model, mesh, 0, 1);
    const CommTrace trace(mesh);
    train(*model, mesh, 1, 2);
    std::vector<int64_t> bytes;
    for (const CommEvent& event : trace.events()) {
      if (event.phase == Phase::kGradientSync && !event.is_check) bytes.push_back(event.bytes);
    }
    // 2 (n - 1) / n is 1: bias, thin and both P; then both Q.
    EXPECT_EQ(bytes,
              (std::vector<int64_t>{8 * (kOut + kOut + kIn + kHidden), 8 * (kHidden + kOut)}));
  });
}

TEST(PowerSgdTest, ARunGoesOnWithTheSameBits) {
  on_mesh({{"dp", 3}}, [&](const MeshPtr& mesh) {
    const PowerSgdOptions options = {.rank = 2, .start_iteration = 1, .min_compression_rate = 1.2};
    Mlp through, resumed;
    std::map<std::string, at::Tensor> state;
    {
      const auto hook = power_sgd(options);
      const GradSync ddp = distributed_data_parallel(*through, mesh, {.sync = {.hook = hook}});
      train(*through, mesh, 0, 4);
      state = hook->state();
      {
        const c10::AutoGradMode no_grad(false);
        const Values saved = values_of(*through);
        for (const auto& item : resumed->named_parameters()) {
          at::Tensor(item.value()).copy_(saved.at(item.key()));
        }
      }
      train(*through, mesh, 4, 8);
    }
    const auto hook = std::make_shared<PowerSgd>(options);
    hook->set_state(state);
    const GradSync ddp = distributed_data_parallel(*resumed, mesh, {.sync = {.hook = hook}});
    train(*resumed, mesh, 4, 8);
    const Values a = values_of(*through), b = values_of(*resumed);
    for (const auto& [name, value] : a) EXPECT_TRUE(value.equal(b.at(name))) << name;
  });
}

// A zero gradient, one that is not finite, and a discarded iteration leave what was learned as it was.
TEST(PowerSgdTest, IsNotLedAstray) {
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    Mlp model;
    const auto hook = power_sgd({.min_compression_rate = 1.5});
    GradSync ddp = distributed_data_parallel(*model, mesh, {.sync = {.hook = hook}});
    train(*model, mesh, 0, 2);
    const auto before = hook->state();
    const auto expect_as_before = [&] {
      for (const auto& [name, value] : hook->state()) {
        if (name.starts_with("w")) {
          EXPECT_TRUE(value.equal(before.at(name))) << name;
        }
      }
    };
    at::Tensor rows = batch(2);
    rows[6][1] = std::numeric_limits<double>::quiet_NaN();  // the last rank's
    model->loss(distribute_tensor(rows, mesh, {{"dp", Shard(0)}})).backward();
    finish_grad_sync(*model);
    EXPECT_TRUE(to_local(model->w0.grad()).isnan().all().item<bool>());
    expect_as_before();
    model->zero_grad();
    model->loss(distribute_tensor(batch(2), mesh, {{"dp", Shard(0)}})).backward();
    ddp.discard();
    expect_as_before();
    model->zero_grad();
    train(*model, mesh, 2, 5);
    expect_same(values_of(*model), reference(1, 0, 5));
    // Nothing at all, twice: what comes after it is brought as ever.
    for (int i = 0; i < 2; ++i) {
      (model->loss(distribute_tensor(batch(2), mesh, {{"dp", Shard(0)}})) * 0).backward();
      finish_grad_sync(*model);
      EXPECT_TRUE(to_local(model->w1.grad()).isfinite().all().item<bool>());
      model->zero_grad();
    }
    model->loss(distribute_tensor(batch(3), mesh, {{"dp", Shard(0)}})).backward();
    finish_grad_sync(*model);
    EXPECT_GT(to_local(model->w1.grad()).abs().sum().item<double>(), 0.001);
  });
}

// What was left over means as much at the next scale.
TEST(PowerSgdTest, ErrorsFollowTheScaleOfTheLoss) {
  const Values wanted = reference(1, 0, 6);
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    Mlp model;
    const auto hook = power_sgd({.min_compression_rate = 1.5});
    const GradSync ddp = distributed_data_parallel(*model, mesh, {.sync = {.hook = hook}});
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(kLr));
    GradScaler scaler({.init_scale = 4, .growth_interval = 2});
    std::vector<double> scales;
    for (int step = 0; step < 6; ++step) {
      for (const bool is_bad : {true, false}) {
        if (is_bad && step != 3) continue;
        at::Tensor rows = batch(step);
        if (is_bad) rows[6][1] = std::numeric_limits<double>::quiet_NaN();  // in all gradients
        const at::Tensor loss = model->loss(distribute_tensor(rows, mesh, {{"dp", Shard(0)}}));
        scaler.scale(loss).backward();
        finish_grad_sync(*model);
        ASSERT_EQ(scaler.unscale(model->parameters()), !is_bad);
        if (!is_bad) optimizer.step();
        scales.push_back(scaler.scale());
        hook->rescale(scaler.update());
        optimizer.zero_grad();
      }
    }
    EXPECT_EQ(scales, (std::vector<double>{4, 4, 8, 8, 4, 4, 8}));
    expect_same(values_of(*model), wanted);
    std::vector<std::string> names;
    for (const auto& [name, value] : hook->state()) {
      names.push_back(name);
      EXPECT_TRUE(hook->state(name).equal(value)) << name;
    }
    EXPECT_EQ(hook->state_names(), names);
    EXPECT_FALSE(hook->state("w0.error").is_alias_of(hook->state("w0.error")));
    for (const char* name : {"w0.p", "w0", "error", "thin.q", ""}) {
      EXPECT_THROW((void)hook->state(name), Error) << name;
    }
  });
}

TEST(PowerSgdTest, BadOptionsAndStates) {
  const auto refused = [](const std::string& text, const auto& body) {
    try {
      body();
      ADD_FAILURE() << "no error: " << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.status().code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(error.what(), HasSubstr(text));
    }
  };
  refused("rank is 0", [] { PowerSgd({.rank = 0}); });
  refused("start_iteration is -1", [] { PowerSgd({.start_iteration = -1}); });
  refused("min_compression_rate is 0.5", [] { PowerSgd({.min_compression_rate = 0.5}); });
  refused("min_compression_rate is nan",
          [] { PowerSgd({.min_compression_rate = std::numeric_limits<double>::quiet_NaN()}); });
  PowerSgd hook;
  const at::Tensor one = at::ones({2, 1});
  refused("'w.p' does not end with", [&] { hook.set_state({{"w.p", one}}); });
  refused("'q' does not end with", [&] { hook.set_state({{"q", one}}); });
  refused("'w.q' is no plain tensor", [&] { hook.set_state({{"w.q", at::Tensor()}}); });
  refused("'w.q' is no matrix", [&] { hook.set_state({{"w.q", at::ones({2})}}); });
  refused("'w.iteration' is no number", [&] { hook.set_state({{"w.iteration", one}}); });
  refused("factor is 0", [&] { hook.rescale(0); });
  refused("factor is -2", [&] { hook.rescale(-2); });
  refused("factor is inf", [&] { hook.rescale(std::numeric_limits<double>::infinity()); });
  EXPECT_TRUE(hook.state().empty());
}

}  // namespace
}  // namespace shardweave
