// A scope in which fully sharded parameters are whole.
#include "shardweave/modules/summon_full_params.h"

#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "c10/core/InferenceMode.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/observe/comm_trace.h"
#include "shardweave/dtensor/testing/counted_mesh.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/modules/deferred_init.h"
#include "shardweave/modules/fully_shard.h"
#include "shardweave/modules/optim/fused_optimizer.h"
#include "shardweave/modules/parallelize_module.h"
#include "shardweave/modules/zero.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/pimpl.h"
#include "torch/optim/sgd.h"

namespace shardweave {
namespace {

using ::testing::HasSubstr;
using testing::on_mesh;
namespace nn = torch::nn;
using enum absl::StatusCode;

constexpr int64_t kDim = 5, kHidden = 7, kBatch = 6;

struct NetImpl : nn::Module {
  NetImpl() {
    up = register_module("up", nn::Linear(kDim, kHidden));
    down = register_module("down", nn::Linear(kHidden, kDim));
    scale = register_parameter("scale", at::ones({kDim}));
    initialize(1);
  }
  // As code for one device does it.
  void initialize(double seed) {
    const c10::AutoGradMode no_grad(false);
    for (at::Tensor p : parameters()) {
      p.copy_(at::sin(at::arange(p.numel(), at::kFloat) * 0.7 + ++seed).view(p.sizes()));
    }
  }
  at::Tensor forward(const at::Tensor& x) { return down(at::tanh(up(x))) * scale; }
  nn::Linear up{nullptr}, down{nullptr};
  at::Tensor scale;
};
TORCH_MODULE(Net);

std::map<std::string, at::Tensor> values_of(const nn::Module& module) {
  const c10::AutoGradMode no_grad(false);
  std::map<std::string, at::Tensor> values;
  for (const auto& item : module.named_parameters()) {
    const at::Tensor& p = item.value();
    values[item.key()] = (is_dtensor(p) ? full_tensor(p) : p).detach().clone();
  }
  return values;
}

void expect_equal(const nn::Module& module, const nn::Module& wanted) {
  const auto got = values_of(module);
  for (const auto& [name, value] : values_of(wanted)) {
    EXPECT_TRUE(at::equal(got.at(name), value)) << name << "\n" << got.at(name) << value;
  }
}

at::Tensor fed(const MeshPtr& mesh) {
  return distribute_tensor(at::cos(at::arange(kBatch * kDim, at::kFloat)).view({kBatch, kDim}),
                           mesh, {{"dp", Shard(0)}});
}

// The module rests, and trains as one that was never summoned.
void expect_trains(Net model, const MeshPtr& mesh, const Net& twin) {
  for (const auto& p : model->parameters()) EXPECT_FALSE(layout_of(p)[0].is_replicate());
  EXPECT_EQ(fully_shard_counters(mesh).gathered_bytes, 0);
  Net same;
  {
    const c10::AutoGradMode no_grad(false);
    const auto from = twin->parameters();
    const auto to = same->parameters();
    for (size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i]);
  }
  torch::optim::SGD ours(model->parameters(), torch::optim::SGDOptions(0.1));
  torch::optim::SGD theirs(same->parameters(), torch::optim::SGDOptions(0.1));
  for (int step = 0; step < 2; ++step) {
    model->forward(fed(mesh)).square().sum().backward();
    same->forward(full_tensor(fed(mesh))).square().sum().backward();
    ours.step();
    theirs.step();
    ours.zero_grad();
    theirs.zero_grad();
  }
  const auto got = values_of(*model);
  for (const auto& [name, value] : values_of(*same)) {
    EXPECT_TRUE(at::allclose(got.at(name), value, 1e-4, 1e-4)) << name;
  }
}

const std::vector<std::vector<MeshDim>> kMeshes = {
    {{"dp", 1}}, {{"dp", 2}}, {{"dp", 3}}, {{"dp", 2}, {"replicas", 2}}};

TEST(SummonFullParamsTest, ParametersAreWholeAndReadOnly) {
  for (const auto& dims : kMeshes) {
    on_mesh(dims, [](const MeshPtr& mesh) {
      Net model, twin;
      fully_shard(*model, mesh, {.mesh_dim = "dp", .units = {"*"}});
      {
        FullParams whole(*model);
        // Nothing is sent to read them.
        const CommTrace trace(mesh);
        ASSERT_EQ(whole.parameters().size(), 5U);
        for (const auto& item : twin->named_parameters()) {
          const at::Tensor mine = model->named_parameters()[item.key()];
          EXPECT_EQ(layout_of(mine), Layout(Placements(mesh->mesh().ndim())));
          EXPECT_TRUE(at::equal(to_local(mine), item.value()));
          EXPECT_TRUE(at::equal(whole.parameter(item.key()), item.value()));
          EXPECT_FALSE(is_dtensor(whole.parameter(item.key())));
          EXPECT_TRUE(to_local(mine).is_alias_of(whole.parameter(item.key())));
        }
        const c10::AutoGradMode no_grad(false);
        EXPECT_EQ(model->up->weight.norm().item<float>(), twin->up->weight.norm().item<float>());
        EXPECT_TRUE(trace.events().empty()) << trace.to_string();
        for (const auto& write : std::vector<std::function<void()>>{
                 [&] { model->scale.mul_(2); }, [&] { model->up->weight.view({-1}).fill_(1); },
                 [&] { at::_foreach_mul_(model->parameters(), 2.0); }}) {
          try {
            write();
            ADD_FAILURE() << "no error";
          } catch (const Error& error) {
            EXPECT_EQ(error.status().code(), kFailedPrecondition);
            EXPECT_THAT(error.what(), HasSubstr("summoned to be read"));
          }
        }
        whole.parameter("scale").fill_(7);  // is dropped
      }
      expect_equal(*model, *twin);
      expect_trains(model, mesh, twin);
    });
  }
}

TEST(SummonFullParamsTest, WhatIsWrittenGoesBack) {
  for (const auto& dims : kMeshes) {
    on_mesh(dims, [](const MeshPtr& mesh) {
      Net model, twin;
      fully_shard(*model, mesh, {.mesh_dim = "dp", .units = {"*"}});
      model->forward(fed(mesh));  // something is full
      {
        const FullParams whole(*model, {.writeback = true});
        model->initialize(5);
        whole.parameter("up.bias").mul_(3);
      }
      twin->initialize(5);
      {
        const c10::AutoGradMode no_grad(false);
        twin->up->bias.mul_(3);
      }
      expect_equal(*model, *twin);
      reshard(mesh);
      expect_trains(model, mesh, twin);
    });
  }
}

TEST(SummonFullParamsTest, OfOneRankAlone) {
  for (const auto& dims : kMeshes) {
    on_mesh(dims, [](const MeshPtr& mesh) {
      Net model, twin;
      fully_shard(*model, mesh, {.mesh_dim = "dp", .units = {"*"}});
      const auto ranks = static_cast<int>(mesh->mesh().size(0));
      for (const int rank : {0, ranks - 1}) {
        for (const bool writes : {false, true}) {
          const bool mine = mesh->coordinate()[0] == rank;
          FullParams whole(*model, {.writeback = writes, .rank = rank});
          EXPECT_EQ(whole.parameters().size(), 5U);
          for (const auto& [name, tensor] : whole.parameters()) {
            EXPECT_EQ(tensor.defined(), mine) << name;
            if (mine) {
              EXPECT_TRUE(at::equal(tensor, twin->named_parameters()[name].detach())) << name;
            }
            if (mine) tensor.add_(rank + 1);
          }
          // Parameters rest as ever.
          EXPECT_FALSE(layout_of(model->up->weight)[0].is_replicate());
          whole.end();
          if (!writes) continue;
          const c10::AutoGradMode no_grad(false);
          for (at::Tensor p : twin->parameters()) p.add_(rank + 1);
        }
      }
      expect_equal(*model, *twin);
      expect_trains(model, mesh, twin);
    });
  }
}

TEST(SummonFullParamsTest, AlongWhatIsCutOtherwise) {
  on_mesh({{"dp", 2}, {"tp", 2}}, [](const MeshPtr& mesh) {
    Net model, twin;
    parallelize_module(*model, mesh, {.parameter = {{"up.*", {{"tp", Shard(0)}}}}});
    fully_shard(*model, mesh, {.mesh_dim = "dp"});
    {
      const FullParams whole(*model, {.writeback = true});
      const at::Tensor& weight = model->up->weight;
      EXPECT_EQ(layout_of(weight), Layout({Replicate(), Shard(0)}));
      EXPECT_TRUE(at::equal(full_tensor(weight), twin->up->weight));
      EXPECT_EQ(whole.parameter("up.weight").size(0), mesh->coordinate()[1] == 0 ? 4 : 3);
      model->initialize(9);
    }
    twin->initialize(9);
    expect_equal(*model, *twin);
    {
      const FullParams on_one(*model, {.writeback = true, .rank = 1});
      const at::Tensor mine = on_one.parameter("up.weight");
      EXPECT_EQ(mine.defined(), mesh->coordinate()[0] == 1);
      if (mine.defined()) mine.mul_(2);
    }
    EXPECT_TRUE(at::equal(full_tensor(model->up->weight), twin->up->weight * 2));
  });
}

TEST(SummonFullParamsTest, MixedPrecisionGivesWhatRests) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    Net model, twin;
    fully_shard(*model, mesh, {.units = {"*"}, .param_dtype = at::kBFloat16});
    const FullParams whole(*model);
    EXPECT_EQ(model->up->weight.scalar_type(), at::kFloat);
    EXPECT_TRUE(at::equal(whole.parameter("up.weight"), twin->up->weight));
    // Evaluation computes as ever.
    const c10::AutoGradMode no_grad(false);
    EXPECT_EQ(model->up(fed(mesh)).scalar_type(), at::kBFloat16);
  });
}

TEST(SummonFullParamsTest, EvaluationSendsNothingAndTrainingIsAnError) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    Net model, twin;
    fully_shard(*model, mesh, {.units = {"*"}});
    const at::Tensor x = fed(mesh);
    const at::Tensor loss = model->forward(x).square().sum();  // of a graph from before
    {
      const FullParams whole(*model);
      {
        const CommTrace trace(mesh);
        const c10::AutoGradMode no_grad(false);
        const at::Tensor y = model->forward(x);
        EXPECT_TRUE(trace.events().empty()) << trace.to_string();
        EXPECT_TRUE(at::allclose(full_tensor(y), twin->forward(full_tensor(x)), 1e-5, 1e-5));
      }
      try {
        model->forward(x);
        ADD_FAILURE() << "no error";
      } catch (const Error& error) {
        EXPECT_EQ(error.status().code(), kFailedPrecondition);
        EXPECT_THAT(error.what(), HasSubstr("' is summoned"));
      }
      loss.backward();
      finish_grad_sync(*model);
      for (auto& p : model->parameters()) {
        EXPECT_FALSE(layout_of(p.grad())[0].is_replicate());
      }
      // Optimizers hear that a parameter does not lie as its gradient.
      FusedOptimizer optimizer(model->parameters(), AdamWOptions{});
      EXPECT_THROW(optimizer.step(), Error);
      EXPECT_THROW(model->to(at::kDouble), Error);
      {
        const c10::AutoGradMode no_grad(false);
        EXPECT_THROW(model->up->weight.resize_({2, 2}), Error);
      }
      EXPECT_THROW(parallelize_module(*model, mesh, {}), Error);
      EXPECT_THROW(fully_shard(*model, mesh), Error);
      EXPECT_THROW(ZeroPartition(model->parameters()), Error);
    }
    twin->forward(full_tensor(x)).square().sum().backward();
    for (const auto& item : twin->named_parameters()) {
      const at::Tensor grad = full_tensor(model->named_parameters()[item.key()].grad());
      EXPECT_TRUE(at::allclose(grad, item.value().grad(), 1e-4, 1e-4)) << item.key();
    }
    for (at::Tensor& p : model->parameters()) p.mutable_grad() = at::Tensor();
    // What was read stays right for backward; what was written is an error in it.
    for (const bool writes : {false, true}) {
      const at::Tensor later = model->forward(x).square().sum();
      { const FullParams whole(*model, {.writeback = writes}); }
      if (writes) {
        EXPECT_THROW(later.backward(), c10::Error);
      } else {
        later.backward();
      }
      for (at::Tensor& p : model->parameters()) p.mutable_grad() = at::Tensor();
    }
    reshard(mesh);
    expect_trains(model, mesh, twin);
  });
}

TEST(SummonFullParamsTest, ScopesNestAndAreThoseOfUnits) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    Net model, twin;
    fully_shard(*model, mesh, {.units = {"*"}});
    {
      FullParams outer(*model, {.writeback = true});
      const c10::AutoGradMode no_grad(false);
      model->scale.fill_(0.2);
      {
        const CommTrace trace(mesh);
        const FullParams inner(*model->up);
        EXPECT_EQ(inner.parameters().size(), 2U);
        EXPECT_THAT(trace.events(), ::testing::Each(::testing::Field(&CommEvent::is_check, true)));
        EXPECT_TRUE(inner.parameter("up.weight").is_alias_of(outer.parameter("up.weight")));
        EXPECT_THROW(model->up->weight.fill_(3), Error);
        model->down->weight.fill_(0.3);  // the outer one's alone
      }
      model->up->weight.fill_(0.4);
      {
        FullParams longer(*model->up, {.writeback = true});
        model->up->bias.fill_(0.5);
        outer.end();
        EXPECT_TRUE(layout_of(model->up->weight)[0].is_replicate());
        EXPECT_FALSE(layout_of(model->down->weight)[0].is_replicate());
      }
      twin->scale.fill_(0.2);
      twin->down->weight.fill_(0.3);
      twin->up->weight.fill_(0.4);
      twin->up->bias.fill_(0.5);
    }
    expect_equal(*model, *twin);
    {  // Of one unit alone, the others train on.
      const FullParams whole(*model->down);
      EXPECT_FALSE(layout_of(model->up->weight)[0].is_replicate());
      EXPECT_EQ(whole.parameters().size(), 2U);
    }
    expect_trains(model, mesh, twin);
  });
}

TEST(SummonFullParamsTest, AnExceptionLeavesNothingBehind) {
  for (const bool of_one : {false, true}) {
    on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
      Net model, twin;
      fully_shard(*model, mesh, {.units = {"*"}});
      const std::optional<int> rank = of_one ? std::optional<int>(1) : std::nullopt;
      try {
        const FullParams whole(*model, {.writeback = true, .rank = rank});
        for (const auto& [name, tensor] : whole.parameters()) {
          if (tensor.defined()) tensor.fill_(7);
        }
        throw std::runtime_error("in the scope");
      } catch (const std::runtime_error&) {
      }
      FullParams dropped(*model, {.writeback = true, .rank = rank});
      for (const auto& [name, tensor] : dropped.parameters()) {
        if (tensor.defined()) tensor.fill_(7);
      }
      dropped.drop();
      EXPECT_TRUE(dropped.parameters().empty());
      dropped.end();
      expect_equal(*model, *twin);
      expect_trains(model, mesh, twin);
    });
  }
}

// Two ranks with units that are full, of which one alone has learned that `down` comes after `up`.
void learn_apart(Net model, const MeshPtr& mesh, const at::Tensor& x, const at::Tensor& hidden) {
  fully_shard(*model, mesh, {.units = {"*"}, .reshard_after_forward = false});
  for (int i = 0; i < 2; ++i) model->forward(x);
  if (mesh->coordinate()[0] == 1) {
    (void)model->up(x);
    (void)(x * model->scale);
    (void)model->down(hidden);
    (void)(x * model->scale);
  }
  reshard(mesh);
}

// What a scope has whole is not gathered ahead: nothing that another rank's failure breaks is under way
// when it ends.
TEST(SummonFullParamsTest, ARankThatFailsInTheScope) {
  for (const bool drops : {false, true}) {
    const std::vector<absl::Status> ends =
        testing::try_on_each({{"dp", 2}}, testing::Carrier::kInproc, [&](const MeshPtr& mesh) {
          const c10::AutoGradMode no_grad(false);
          Net model;
          const at::Tensor x = fed(mesh);
          const at::Tensor hidden =
              distribute_tensor(at::ones({kBatch, kHidden}), mesh, {{"dp", Shard(0)}});
          learn_apart(model, mesh, x, hidden);
          {
            FullParams whole(*model->down, {.writeback = true});
            const int64_t ahead = fully_shard_counters(mesh).prefetches;
            (void)model->up(x);
            EXPECT_EQ(fully_shard_counters(mesh).prefetches, ahead);
            if (mesh->coordinate()[0] == 1) throw std::runtime_error("in the scope");
            if (drops) whole.drop();
          }
          EXPECT_FALSE(layout_of(model->down->weight)[0].is_replicate());
          (void)model->down(hidden);  // which that rank does not gather
          ADD_FAILURE() << "no error";
        });
    for (const absl::Status& end : ends) EXPECT_THAT(end.message(), HasSubstr("in the scope"));
  }
}

void expect_refused(const std::function<void()>& body, absl::StatusCode code,
                    const std::string& text) {
  try {
    body();
    ADD_FAILURE() << "no error: " << text;
  } catch (const Error& error) {
    EXPECT_EQ(error.status().code(), code) << error.what();
    EXPECT_THAT(error.what(), HasSubstr(text));
  }
}

TEST(SummonFullParamsTest, BadInput) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    const bool first = mesh->coordinate()[0] == 0;
    Net plain, replicated, model, twin;
    distribute_module(*replicated, mesh, {});
    fully_shard(*model, mesh, {.units = {"*"}});
    const auto summon = [](const Net& of, const FullParamsOptions& options = {}) {
      return [=] { const FullParams whole(*of, options); };
    };
    expect_refused(summon(plain), kFailedPrecondition, "no parameter of the module is on a mesh");
    expect_refused(summon(replicated), kFailedPrecondition, "no parameter of the module is fully");
    for (const int rank : {-1, 2}) {
      expect_refused(summon(model, {.rank = rank}), kInvalidArgument, "wanted 0 to 1 along 'dp'");
    }
    expect_refused(summon(model, {.writeback = first}), kInvalidArgument,
                   "the options are not the same on ranks 0 and 1");
    expect_refused(summon(model, {.rank = first ? 0 : 1}), kInvalidArgument,
                   "the options are not the same");
    expect_refused(
        [&] {
          const nn::Module& of = first ? static_cast<const nn::Module&>(*model) : *model->up;
          const FullParams whole(of);
        },
        kInvalidArgument, "the units of the module are not the same on ranks 0 and 1");
    // One rank alone has something against it.
    expect_refused(summon(model, {.rank = first ? 2 : 1}), kInvalidArgument,
                   first ? "rank is 2" : "");
    {
      const FullParams reading(*model);
      expect_refused(summon(model, {.writeback = true}), kFailedPrecondition, "to be read alone");
      expect_refused(summon(model, {.rank = 0}), kFailedPrecondition, "and not to one rank");
    }
    {
      const FullParams lent(*model, {.rank = 0});
      expect_refused(summon(model), kFailedPrecondition, "summoned already, to one rank");
      expect_refused([&] { (void)lent.parameter("nothing"); }, kNotFound, "is called 'nothing'");
    }
    nn::Linear deferred = deferred_init([] { return nn::Linear(kDim, kHidden); });
    fully_shard(*deferred, mesh);
    expect_refused([&] { const FullParams whole(*deferred); }, kFailedPrecondition,
                   "is not made yet");
    materialize(*deferred, {.seed = 1});
    { const FullParams whole(*deferred); }
    expect_equal(*model, *twin);
    expect_trains(model, mesh, twin);
  });
}

// A module that ends in the scope takes its units along.
TEST(SummonFullParamsTest, NothingIsKeptAlive) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    auto model = std::make_unique<Net>();
    fully_shard(**model, mesh);
    {
      const FullParams whole(**model, {.writeback = true});
      model.reset();
      EXPECT_TRUE(whole.parameter("scale").defined());
    }
    EXPECT_EQ(fully_shard_counters(mesh).gathered_bytes, 0);
  });
}

}  // namespace
}  // namespace shardweave
