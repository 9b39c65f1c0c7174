// What users of LibTorch do with a distributed module and its optimizer between the steps: files,
// dtypes, copies, groups of parameters, schedulers. Values as on one rank.
#include <cmath>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/testing/programs.h"
#include "torch/nn/cloneable.h"
#include "torch/nn/modules/batchnorm.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/pimpl.h"
#include "torch/nn/utils/clip_grad.h"
#include "torch/optim/adam.h"
#include "torch/optim/adamw.h"
#include "torch/optim/lbfgs.h"
#include "torch/optim/optimizer.h"
#include "torch/optim/rmsprop.h"
#include "torch/optim/schedulers/reduce_on_plateau_scheduler.h"
#include "torch/optim/schedulers/step_lr.h"
#include "torch/optim/sgd.h"
#include "torch/serialize.h"

namespace shardweave {
namespace {

namespace nn = torch::nn;
using ::testing::AllOf;
using testing::check_program;
using ::testing::HasSubstr;
using testing::Trial;
using testing::values;

struct ModelImpl : nn::Cloneable<ModelImpl> {
  nn::Linear up{nullptr}, down{nullptr};
  nn::BatchNorm1d norm{nullptr};
  ModelImpl() { reset(); }
  void reset() override {
    up = register_module("up", nn::Linear(6, 5));
    norm = register_module("norm", nn::BatchNorm1d(5));
    down = register_module("down", nn::Linear(5, 3));
  }
  at::Tensor forward(const at::Tensor& x) { return down(at::relu(norm(up(x)))); }
};
TORCH_MODULE(Model);

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

at::Tensor train_step(Trial& run, Model& model, torch::optim::Optimizer& optimizer, int step) {
  optimizer.zero_grad();
  const at::Tensor dtype_like = model->up->weight;
  const at::Tensor x = run.data(values({5, 6}, step)).to(dtype_like.scalar_type());
  const at::Tensor loss = model(x).square().mean();
  loss.backward();
  finish_grad_sync(*model);
  optimizer.step();
  return loss;
}

// --- files ---------------------------------------------------------------------------------------

// A file of one device goes into a distributed module, each rank's part of it.
TEST(ModuleHabitsTest, LoadsAFileOfOneDevice) {
  Model whole;
  whole->to(at::kDouble);
  {
    const at::NoGradGuard no_grad;
    int n = 5;
    for (at::Tensor& p : whole->parameters()) p.copy_(values(p.sizes(), n++));
    whole->norm->running_mean.copy_(values({5}, 1));
  }
  std::ostringstream file;
  torch::save(whole, file);
  check_program([&](Trial& run) {
    Model model;
    run.distribute(*model);
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
    std::istringstream in(file.str());
    torch::load(model, in);
    EXPECT_EQ(is_dtensor(model->up->weight), run.mesh() != nullptr);
    run.parameters(*model);
    run.buffers(*model);
    EXPECT_TRUE(model->up->weight.requires_grad());
    run.result("loss", train_step(run, model, optimizer, 1));
    run.gradients(*model);
    run.parameters(*model);
  });
}

// What is saved has no whole tensors: an error on every rank says what to do, and that works.
TEST(ModuleHabitsTest, SavingSaysWhatToDo) {
  check_program([](Trial& run) {
    Model model;
    run.distribute(*model);
    torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(0.01));
    train_step(run, model, optimizer, 0);
    Model whole;
    whole->to(at::kDouble);
    if (run.mesh() != nullptr) {
      std::ostringstream file;
      EXPECT_THAT(error_of([&] { torch::save(model, file); }),
                  AllOf(HasSubstr("DTensor"), HasSubstr("full_tensor")));
      EXPECT_THAT(error_of([&] { torch::save(optimizer, file); }),
                  AllOf(HasSubstr("DTensor"), HasSubstr("full_tensor")));
      const at::NoGradGuard no_grad;
      for (auto& item : whole->named_parameters()) {
        item.value().copy_(full_tensor(model->named_parameters()[item.key()]));
      }
      for (auto& item : whole->named_buffers()) {
        item.value().copy_(full_tensor(model->named_buffers()[item.key()]));
      }
    } else {
      whole = model;
    }
    std::ostringstream file;
    torch::save(whole, file);
    std::istringstream in(file.str());
    Model back;
    back->to(at::kDouble);
    torch::load(back, in);
    run.parameters(*back);
    run.buffers(*back);
  });
}

// The moments that a file of one device holds go on with a distributed module's parameters.
TEST(ModuleHabitsTest, LoadsAnOptimizersFileOfOneDevice) {
  std::string file;
  check_program([&](Trial& run) {
    Model model;
    run.distribute(*model);
    torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.01));
    if (run.mesh() == nullptr) {
      torch::optim::AdamW first(model->parameters(), torch::optim::AdamWOptions(0.02));
      train_step(run, model, first, 0);
      train_step(run, model, first, 1);
      std::ostringstream out;
      torch::save(first, out);
      file = out.str();
      Model again;
      run.distribute(*again);
      model = again;
      optimizer.param_groups()[0].params() = model->parameters();
    }
    std::istringstream in(file);
    torch::load(optimizer, in);
    for (int step = 0; step < 2; ++step)
      run.result("loss", train_step(run, model, optimizer, step));
    run.parameters(*model);
  });
}

// --- dtypes and copies ---------------------------------------------------------------------------

TEST(ModuleHabitsTest, ChangesItsDtypeAndTrainsOn) {
  check_program(
      [](Trial& run) {
        Model model;
        run.distribute(*model, at::kFloat);
        for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kFloat}) {
          model->to(dtype);
          torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
          run.result("loss", train_step(run, model, optimizer, 0));
          run.gradients(*model);
        }
        run.parameters(*model);
        run.buffers(*model);
        model->to(at::kBFloat16);
        run.result("halved", model->up->weight);
        model->to(at::kCPU, at::kDouble);
        run.parameters(*model);
      },
      {.tolerance = 1e-5});
}

TEST(ModuleHabitsTest, ACopyTrainsOnItsOwn) {
  check_program([](Trial& run) {
    Model model;
    run.distribute(*model);
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    run.result("loss", train_step(run, model, optimizer, 0));
    Model copy(std::dynamic_pointer_cast<ModelImpl>(model->clone()));
    torch::optim::SGD optimizer_of_copy(copy->parameters(), torch::optim::SGDOptions(0.2));
    run.result("loss of the copy", train_step(run, copy, optimizer_of_copy, 1));
    run.result("loss", train_step(run, model, optimizer, 2));
    for (Model& m : std::initializer_list<std::reference_wrapper<Model>>{model, copy}) {
      run.parameters(*m);
      run.gradients(*m);
      run.buffers(*m);
    }
    model->eval();
    run.result("in eval", model(run.data(values({5, 6}, 7))));
    const at::NoGradGuard no_grad;  // an average of both
    for (const auto& item : copy->named_parameters()) {
      item.value().lerp_(model->named_parameters()[item.key()], 0.25);
    }
    run.parameters(*copy);
  });
}

// --- optimizers ----------------------------------------------------------------------------------

using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(
    std::vector<torch::optim::OptimizerParamGroup>)>;

template <typename Optimizer, typename Options>
MakeOptimizer with(Options options) {
  return [=](std::vector<torch::optim::OptimizerParamGroup> groups) {
    for (size_t g = 0; g < groups.size(); ++g) {
      auto own = std::make_unique<Options>(options);
      own->set_lr(options.get_lr() / static_cast<double>(g + 1));
      groups[g].set_options(std::move(own));
    }
    return std::make_unique<Optimizer>(std::move(groups), options);
  };
}

const MakeOptimizer kOptimizers[] = {
    with<torch::optim::SGD>(
        torch::optim::SGDOptions(0.1).momentum(0.9).nesterov(true).weight_decay(0.01)),
    with<torch::optim::AdamW>(torch::optim::AdamWOptions(0.01).amsgrad(true)),
    with<torch::optim::RMSprop>(torch::optim::RMSpropOptions(0.01).centered(true).momentum(0.5)),
};

// Weights in one group, biases in another with half its rate, the head added later; the rates follow
// a scheduler.
TEST(ModuleHabitsTest, GroupsOfParametersAndSchedulers) {
  for (const MakeOptimizer& make : kOptimizers) {
    for (const bool plateau : {false, true}) {
      check_program([&](Trial& run) {
        Model model;
        run.distribute(*model);
        auto optimizer = make(
            {{{model->up->weight, model->norm->weight}}, {{model->up->bias, model->norm->bias}}});
        optimizer->add_param_group({model->down->parameters()});
        torch::optim::StepLR steps(*optimizer, 1, 0.5);
        torch::optim::ReduceLROnPlateauScheduler on_plateau(
            *optimizer, torch::optim::ReduceLROnPlateauScheduler::min, 0.5, 0);
        for (int step = 0; step < 4; ++step) {
          const at::Tensor loss = train_step(run, model, *optimizer, step % 2);
          run.result("loss", loss);
          if (plateau) {
            on_plateau.step(loss.item<float>());
          } else {
            steps.step();
          }
          run.result("rate", at::tensor(optimizer->param_groups()[1].options().get_lr()));
        }
        run.parameters(*model);
      });
    }
  }
}

// L-BFGS makes one vector of all parameters and asks for numbers.
TEST(ModuleHabitsTest, Lbfgs) {
  check_program(
      [](Trial& run) {
        Model model;
        run.distribute(*model);
        model->eval();
        torch::optim::LBFGS optimizer(
            model->parameters(),
            torch::optim::LBFGSOptions(0.5).max_iter(4).line_search_fn("strong_wolfe"));
        const at::Tensor x = run.data(values({5, 6}));
        const at::Tensor loss = optimizer.step([&] {
          optimizer.zero_grad();
          const at::Tensor l = model(x).square().mean();
          l.backward();
          finish_grad_sync(*model);
          return l;
        });
        run.result("loss", loss);
        run.parameters(*model);
      },
      {.tolerance = 1e-6});
}

TEST(ModuleHabitsTest, ClippingByValueAndByNorm) {
  check_program([](Trial& run) {
    Model model;
    run.distribute(*model);
    model(run.data(values({5, 6}))).pow(4).sum().backward();
    finish_grad_sync(*model);
    const double norm = nn::utils::clip_grad_norm_(model->parameters(), 0.5);
    run.result("norm", at::tensor(norm, at::kDouble));
    nn::utils::clip_grad_value_(model->parameters(), 0.05);
    run.gradients(*model);
    EXPECT_TRUE(std::isfinite(norm));
  });
}

}  // namespace
}  // namespace shardweave
