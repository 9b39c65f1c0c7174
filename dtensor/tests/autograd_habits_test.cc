// What users of LibTorch do with autograd itself: hooks, functions of their own, gradients of
// gradients, recomputation, accumulation. Values and gradients as on one rank.
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "c10/core/InferenceMode.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/random.h"
#include "shardweave/dtensor/testing/programs.h"
#include "torch/csrc/autograd/autograd.h"
#include "torch/csrc/autograd/custom_function.h"
#include "torch/csrc/autograd/generated/Functions.h"
#include "torch/csrc/autograd/saved_variable_hooks.h"
#include "torch/nn/modules/activation.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/conv.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/modules/normalization.h"
#include "torch/optim/adam.h"

namespace shardweave {
namespace {

namespace nn = torch::nn;
using testing::check_program;
using testing::Trial;
using testing::values;
using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;
using torch::autograd::variable_list;

nn::Sequential two_layers() {
  return nn::Sequential(nn::Linear(6, 5), nn::Tanh(), nn::LayerNorm(nn::LayerNormOptions({5})),
                        nn::Linear(5, 3));
}

// --- gradients of gradients ----------------------------------------------------------------------

TEST(AutogradHabitsTest, CreateGraph) {
  check_program([](Trial& run) {
    nn::Sequential model = two_layers();
    run.distribute(*model);
    const at::Tensor x = run.leaf(values({5, 6}));
    const at::Tensor y = model->forward(x);
    const at::Tensor grad =
        torch::autograd::grad({y.pow(3).sum()}, {x}, {}, std::nullopt, /*create_graph=*/true)[0];
    run.result("grad", grad);
    const at::Tensor twice =
        torch::autograd::grad({grad.square().sum()}, {x}, {}, std::nullopt, true)[0];
    run.result("twice", twice);
    (grad.norm(2, 1).sub(1).square().mean() + twice.sum() + y.sum()).backward();
    run.result("x.grad", x.grad());
    run.gradients(*model);
  });
}

TEST(AutogradHabitsTest, CreateGraphThroughAConvolutionAndAttention) {
  check_program([](Trial& run) {
    nn::Conv1d lines(nn::Conv1dOptions(3, 4, 3).padding(1));
    nn::MultiheadAttention attention(nn::MultiheadAttentionOptions(4, 2));
    run.distribute(*lines);
    run.distribute(*attention);
    const at::Tensor x = run.leaf(values({5, 3, 7}));
    const at::Tensor z = lines(x).permute({2, 0, 1});
    const at::Tensor y = std::get<0>(attention(z, z, z));
    const at::Tensor grad =
        torch::autograd::grad({y.square().sum()}, {x}, {}, std::nullopt, true)[0];
    grad.square().sum().backward();
    run.result("x.grad", x.grad());
    run.gradients(*lines);
    run.gradients(*attention);
  });
}

// --- hooks ---------------------------------------------------------------------------------------

// Keeps half of what is saved elsewhere, as one who offloads activations would.
class Offload final : public torch::autograd::SavedVariableHooks {
 public:
  explicit Offload(int& unpacked) : unpacked_(unpacked) {}
  void call_pack_hook(const at::Tensor& tensor) override { kept_ = tensor.detach().mul(2); }
  at::Tensor call_unpack_hook() override {
    ++unpacked_;
    return kept_.div(2);
  }

 private:
  at::Tensor kept_;
  int& unpacked_;
};

TEST(AutogradHabitsTest, SavedTensorHooks) {
  namespace generated = torch::autograd::generated;
  check_program([](Trial& run) {
    int unpacked = 0;
    const auto offload = [&](torch::autograd::SavedVariable& saved) {
      saved.register_hooks(std::make_unique<Offload>(unpacked));
    };
    const at::Tensor x = run.leaf(values({5, 6})), w = run.parameter(values({6, 3}, 1), 1);
    const at::Tensor e = x.exp();  // saves its result
    auto* exp = dynamic_cast<generated::ExpBackward0*>(e.grad_fn().get());
    const at::Tensor y = at::mm(e, w);  // saves both factors
    auto* mm = dynamic_cast<generated::MmBackward0*>(y.grad_fn().get());
    ASSERT_TRUE(exp != nullptr && mm != nullptr);
    offload(exp->result_);
    offload(mm->self_);
    offload(mm->mat2_);
    y.square().sum().backward();
    EXPECT_EQ(unpacked, 3);
    run.result("x.grad", x.grad());
    run.result("w.grad", w.grad());
  });
}

// Hooks of tensors see each gradient, may replace it, and run once per tensor.
TEST(AutogradHabitsTest, HooksOfTensorsAndOfNodes) {
  check_program([](Trial& run) {
    const at::Tensor x = run.leaf(values({5, 6})), w = run.parameter(values({6, 3}, 1), 1);
    int seen = 0;
    x.register_hook([&](const at::Tensor& grad) { return ++seen, grad * 3; });
    w.register_hook([&](const at::Tensor& grad) { run.result("seen", grad); });
    const at::Tensor y = at::mm(x, w);
    y.retain_grad();
    y.register_hook([](const at::Tensor& grad) { return grad.clamp(-0.5, 0.5); });
    y.pow(3).sum().backward();
    EXPECT_EQ(seen, 1);
    run.result("x.grad", x.grad());
    run.result("y.grad", y.grad());
    run.result("w.grad", w.grad());
  });
}

// --- functions of their own ----------------------------------------------------------------------

// Swish by hand, which saves its input, marks an output as not differentiable and keeps a number.
struct Swish : torch::autograd::Function<Swish> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& x, double beta) {
    const at::Tensor s = at::sigmoid(x * beta);
    ctx->save_for_backward({x, s});
    ctx->saved_data["beta"] = beta;
    const at::Tensor sign = x > 0;
    ctx->mark_non_differentiable({sign});
    return {x * s, sign};
  }
  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &s = saved[1];
    const double beta = ctx->saved_data["beta"].toDouble();
    return {grads[0] * (s + beta * x * s * (1 - s)), at::Tensor()};
  }
};

// Writes its input, and says so.
struct AddOne : torch::autograd::Function<AddOne> {
  static at::Tensor forward(AutogradContext* ctx, at::Tensor x) {
    x.add_(1);
    ctx->mark_dirty({x});
    return x;
  }
  static tensor_list backward(AutogradContext* /*ctx*/, tensor_list grads) {
    return {grads[0] * 2};
  }
};

TEST(AutogradHabitsTest, AFunctionOfTheUsers) {
  check_program([](Trial& run) {
    const at::Tensor x = run.leaf(values({5, 6})), w = run.parameter(values({6, 3}, 1), 1);
    const variable_list swish = Swish::apply(at::mm(x, w), 0.7);
    EXPECT_FALSE(swish[1].requires_grad());
    const at::Tensor y = AddOne::apply(swish[0] * 1.5);
    run.result("y", y);
    run.result("sign", swish[1]);
    y.square().sum().backward();
    run.result("x.grad", x.grad());
    run.result("w.grad", w.grad());
  });
}

// --- recomputation -------------------------------------------------------------------------------

using Block = std::function<at::Tensor(const at::Tensor&)>;

// Activation checkpointing as a user of LibTorch would write it: nothing but the input is kept; the
// random state is put back before the second run.
struct Recompute : torch::autograd::Function<Recompute> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const Block* block,
                            const MeshPtr* mesh) {
    ctx->save_for_backward({x});
    ctx->saved_data["block"] = reinterpret_cast<int64_t>(block);
    ctx->saved_data["mesh"] = reinterpret_cast<int64_t>(mesh);
    const PhiloxState state = random_state(*mesh);
    ctx->saved_data["seed"] = static_cast<int64_t>(state.seed);
    ctx->saved_data["offset"] = static_cast<int64_t>(state.offset);
    const at::NoGradGuard no_grad;
    return (*block)(x);
  }
  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    const auto number = [&](const char* name) { return ctx->saved_data[name].toInt(); };
    const auto* block = reinterpret_cast<const Block*>(number("block"));
    const auto* mesh = reinterpret_cast<const MeshPtr*>(number("mesh"));
    const RandomStateScope again(*mesh, {.seed = static_cast<uint64_t>(number("seed")),
                                         .offset = static_cast<uint64_t>(number("offset"))});
    const at::AutoGradMode recording(true);
    const at::Tensor x = ctx->get_saved_variables()[0].detach().requires_grad_();
    const at::Tensor y = (*block)(x);
    torch::autograd::backward({y}, {grads[0]});
    return {x.grad(), at::Tensor(), at::Tensor()};
  }
};

TEST(AutogradHabitsTest, RecomputationDrawsTheSameNumbers) {
  std::vector<at::Tensor> kept;  // without recomputation, on one rank
  for (const bool again : {false, true}) {
    check_program(
        [&](Trial& run) {
          nn::Sequential model = two_layers();
          run.distribute(*model);
          int runs = 0;
          const Block block = [&](const at::Tensor& x) {
            ++runs;
            return at::dropout(at::gelu(model->forward(at::dropout(x, 0.3, true))), 0.4, true);
          };
          const at::Tensor x = run.leaf(values({5, 6}));
          const MeshPtr& mesh = run.mesh();
          const at::Tensor y = again ? Recompute::apply(x * 2, &block, &mesh) : block(x * 2);
          run.result("y", y);
          const at::Tensor drawn = at::rand_like(x);
          (y.square().sum() + (drawn * x).sum()).backward();
          EXPECT_EQ(runs, again ? 2 : 1);
          run.result("drawn", drawn);
          run.result("drawn afterwards", at::rand_like(x));
          run.result("x.grad", x.grad());
          run.gradients(*model);
          if (mesh->mesh().size() > 1) return;
          const Trial::Results& results = run.results();
          if (!again) {
            for (const auto& [name, tensor] : results) kept.push_back(tensor);
          } else {
            ASSERT_EQ(results.size(), kept.size());
            for (size_t i = 0; i < kept.size(); ++i) {
              EXPECT_TRUE(at::allclose(results[i].second, kept[i])) << results[i].first;
            }
          }
        },
        {.random = true});
  }
}

// --- accumulation --------------------------------------------------------------------------------

// Micro-batches of different sizes; the gradients are brought home once, or after each of them.
TEST(AutogradHabitsTest, GradientsAccumulate) {
  for (const bool each_time : {false, true}) {
    check_program([&](Trial& run) {
      nn::Sequential model = two_layers();
      run.distribute(*model);
      torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(0.01));
      for (int step = 0; step < 2; ++step) {
        int n = 0;
        for (const int64_t rows : {5, 1, 3}) {
          const at::Tensor x = run.data(values({rows, 6}, ++n)), t = run.data(values({rows, 3}, n));
          (at::mse_loss(model->forward(x), t) / 3).backward();
          if (each_time) finish_grad_sync(*model);
        }
        run.gradients(*model);
        optimizer.step();
        optimizer.zero_grad(/*set_to_none=*/step == 0);
      }
      run.parameters(*model);
    });
  }
}

TEST(AutogradHabitsTest, BackwardTwiceThroughARetainedGraphAndForSomeInputsOnly) {
  check_program([](Trial& run) {
    nn::Sequential model = two_layers();
    run.distribute(*model);
    const at::Tensor x = run.leaf(values({5, 6}));
    const at::Tensor loss = model->forward(x).square().sum();
    loss.backward({}, /*retain_graph=*/true);
    loss.backward({}, true, false, std::vector<at::Tensor>{x});
    loss.backward();
    run.result("x.grad", x.grad());
    run.gradients(*model);
    const auto grads = torch::autograd::grad({model->forward(x)}, {x, model->parameters()[0]},
                                             {run.data(values({5, 3}, 2))});
    run.result("grad of x", grads[0]);
    run.result("grad of the weight", grads[1]);
  });
}

// A frozen layer, a detached branch, and a parameter that is not used.
TEST(AutogradHabitsTest, PartsThatDoNotTrain) {
  check_program([](Trial& run) {
    nn::Sequential model = two_layers();
    nn::Linear unused(3, 2);
    run.distribute(*model);
    run.distribute(*unused);
    for (at::Tensor& p : model[0]->parameters()) p.requires_grad_(false);
    const at::Tensor x = run.leaf(values({5, 6}));
    const at::Tensor y = model->forward(x);
    (y.square().sum() + (y.detach() * x.narrow(1, 1, 3)).sum()).backward();
    run.result("x.grad", x.grad());
    run.gradients(*model);
    run.gradients(*unused);
  });
}

}  // namespace
}  // namespace shardweave
