// Gradients that leave in buckets during backward: the values of one device, in as many collectives
// as the buckets say, whatever backward does.
#include "shardweave/dtensor/grad_sync.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/activation_checkpoint.h"
#include "shardweave/dtensor/observe/comm_trace.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "torch/csrc/autograd/autograd.h"
#include "torch/csrc/autograd/custom_function.h"
#include "torch/nn/module.h"
#include "torch/nn/pimpl.h"
#include "torch/serialize.h"

namespace shardweave {
namespace {

using ::testing::HasSubstr;
using testing::on_mesh;
using testing::try_on_mesh;
namespace nn = torch::nn;

constexpr int64_t kDim = 4, kLayers = 6;
constexpr int64_t kWeight = kDim * kDim * 4;  // bytes

struct StackImpl : nn::Module {
  explicit StackImpl(at::ScalarType dtype = at::kFloat) {
    const c10::AutoGradMode no_grad(false);
    for (int i = 0; i < kLayers; ++i) {
      const at::Tensor weight = at::sin(at::arange(kDim * kDim, dtype).view({kDim, kDim}) + i);
      weights.push_back(register_parameter("w" + std::to_string(i), weight));
    }
  }
  // Layer by layer; those in `without` are left out.
  at::Tensor forward(at::Tensor x, const std::vector<int>& without = {}) {
    for (int i = 0; i < kLayers; ++i) {
      if (std::find(without.begin(), without.end(), i) == without.end()) {
        x = at::tanh(at::matmul(x, weights[i]));
      }
    }
    return x;
  }
  std::vector<at::Tensor> weights;
};
TORCH_MODULE(Stack);

at::Tensor batch(int i, at::ScalarType dtype = at::kFloat) {
  return at::cos(at::arange(12 * kDim, dtype).view({12, kDim}) * (i + 1));
}

using Step = std::function<at::Tensor(StackImpl& model, const at::Tensor& x)>;
at::Tensor loss_of(StackImpl& model, const at::Tensor& x) {
  return model.forward(x).square().sum();
}

// Of one device.
std::vector<at::Tensor> gradients(const std::vector<Step>& steps) {
  Stack model;
  for (size_t i = 0; i < steps.size(); ++i) {
    steps[i](*model, batch(static_cast<int>(i))).backward();
  }
  std::vector<at::Tensor> result;
  for (const at::Tensor& w : model->weights) result.push_back(w.grad());
  return result;
}

void expect_gradients(StackImpl& model, const std::vector<at::Tensor>& wanted) {
  for (size_t i = 0; i < wanted.size(); ++i) {
    const at::Tensor& grad = model.weights[i].grad();
    ASSERT_EQ(grad.defined(), wanted[i].defined()) << i;
    if (!grad.defined()) continue;
    EXPECT_EQ(layout_of(grad), layout_of(model.weights[i])) << i;
    EXPECT_TRUE(at::allclose(full_tensor(grad), wanted[i], 1e-5, 1e-5))
        << i << full_tensor(grad) << wanted[i];
  }
}

void zero_grad(StackImpl& model) {
  for (at::Tensor& w : model.weights) w.mutable_grad() = at::Tensor();
}

int64_t synced(const CommTrace& trace) {
  int64_t count = 0;
  for (const CommEvent& event : trace.events()) {
    count += event.phase == Phase::kGradientSync && !event.is_check;
  }
  return count;
}

// The batch is cut along the mesh's first dimension, and along others once more.
at::Tensor fed(int i, const MeshPtr& mesh) {
  Placements placements(mesh->mesh().ndim(), Shard(0));
  return distribute_tensor(batch(i), mesh, placements);
}

const std::vector<std::vector<MeshDim>> kMeshes = {
    {{"a", 1}}, {{"a", 2}}, {{"a", 3}}, {{"a", 2}, {"b", 2}}, {{"a", 2}, {"b", 1}, {"c", 2}}};

TEST(GradSyncTest, GradientsAreOneDevicesInAsManyCollectivesAsTheBucketsSay) {
  const std::vector<at::Tensor> wanted = gradients({loss_of});
  for (const auto& dims : kMeshes) {
    for (const int64_t per_bucket : {1, 2, 4, 100}) {
      on_mesh(dims, [&](const MeshPtr& mesh) {
        Stack model;
        distribute_module(*model, mesh, {});
        const GradSync sync(*model, {.bucket_bytes = per_bucket * kWeight});
        const int64_t buckets = (kLayers + per_bucket - 1) / per_bucket;
        for (int iteration = 0; iteration < 4; ++iteration) {
          const CommTrace trace(mesh);
          loss_of(*model, fed(0, mesh)).backward();
          const int64_t left = synced(trace);
          finish_grad_sync(*model);
          expect_gradients(*model, wanted);
          zero_grad(*model);
          if (mesh->mesh().size() == 1) continue;
          EXPECT_EQ(left, iteration == 0 ? 0 : buckets);
          EXPECT_EQ(synced(trace), iteration == 0 ? 1 : buckets);
        }
        if (mesh->mesh().size() == 1) return;
        EXPECT_EQ(sync.num_buckets(), buckets);
        EXPECT_EQ(sync.left_in_backward(), 3 * buckets);
      });
    }
  }
}

// torch::load() calls set_(), at which autograd forgets who has hooked a parameter.
TEST(GradSyncTest, ParametersThatAreLoadedLeaveAsBefore) {
  const std::vector<at::Tensor> wanted = gradients({loss_of});
  for (const int before : {0, 1, 3}) {
    on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
      std::stringstream file;
      Stack model;
      torch::save(model, file);
      distribute_module(*model, mesh, {});
      const GradSync sync(*model, {.bucket_bytes = 2 * kWeight});
      const auto iterate = [&] {
        const CommTrace trace(mesh);
        loss_of(*model, fed(0, mesh)).backward();
        const int64_t left = synced(trace);
        finish_grad_sync(*model);
        expect_gradients(*model, wanted);
        zero_grad(*model);
        return left;
      };
      for (int i = 0; i < before; ++i) iterate();
      for (at::Tensor& w : model->weights) {
        const c10::AutoGradMode no_grad(false);
        w.zero_();
      }
      torch::load(model, file);
      EXPECT_EQ(iterate(), 0);  // nobody has seen them come
      for (int i = before; i < 2; ++i) iterate();
      EXPECT_EQ(iterate(), sync.num_buckets());
      EXPECT_GT(sync.num_buckets(), 1);
    });
  }
}

TEST(GradSyncTest, BucketsLeaveWhileBackwardGoesOn) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    Stack model;
    distribute_module(*model, mesh, {});
    const GradSync sync(*model, {.bucket_bytes = 2 * kWeight});
    std::vector<int64_t> left(kLayers);
    for (int i = 0; i < kLayers; ++i) {
      model->weights[i].register_hook([&, i](const at::Tensor& grad) {
        left[i] = sync.left_in_backward();
        return grad;
      });
    }
    for (int iteration = 0; iteration < 2; ++iteration) {
      loss_of(*model, fed(0, mesh)).backward();
      finish_grad_sync(*model);
      zero_grad(*model);
    }
    // The last layers' gradients come first.
    EXPECT_EQ(left, (std::vector<int64_t>{2, 2, 1, 1, 0, 0}));
  });
}

TEST(GradSyncTest, PartialAlongSeveralDimensionsAndShardsAndOtherDtypes) {
  Stack plain;
  Stack wide(at::kDouble);
  const auto loss = [](StackImpl& a, StackImpl& b, const at::Tensor& x) {
    return a.forward(x).square().sum() + b.forward(x.to(at::kDouble)).square().sum().to(at::kFloat);
  };
  loss(*plain, *wide, batch(0)).backward();
  const auto grads_of = [](StackImpl& model) {
    std::vector<at::Tensor> grads;
    for (const at::Tensor& w : model.weights) grads.push_back(w.grad());
    return grads;
  };
  on_mesh({{"dp", 2}, {"tp", 2}}, [&](const MeshPtr& mesh) {
    Stack a;
    Stack b(at::kDouble);
    const ParameterPlan plan = {{"w{0,2,4}", {{"tp", Shard(1)}}},
                                {"w{1,3}", {{"tp", Shard(0)}}},
                                {"w5", {{"dp", Shard(0)}}}};
    distribute_module(*a, mesh, plan);
    distribute_module(*b, mesh, plan);
    std::vector<at::Tensor> all = a->parameters();
    for (const at::Tensor& p : b->parameters()) all.push_back(p);
    const GradSync sync(all);
    for (int iteration = 0; iteration < 3; ++iteration) {
      const CommTrace trace(mesh);
      loss(*a, *b, distribute_tensor(batch(0), mesh, {{"dp", Shard(0)}})).backward();
      finish_grad_sync(all);
      expect_gradients(*a, grads_of(*plain));
      expect_gradients(*b, grads_of(*wide));
      // Of each dtype five weights need one reduction; w5, whose gradient is [P(sum), S(0)], needs
      // a reduction to its shard and a gathering.
      if (iteration > 0) {
        EXPECT_EQ(synced(trace), 6) << trace.to_string();
      }
      zero_grad(*a);
      zero_grad(*b);
    }
    EXPECT_EQ(sync.num_buckets(), 4);
    EXPECT_EQ(sync.left_in_backward(), 8);
  });
}

// Each rank's part is rounded once, and their sum once more.
TEST(GradSyncTest, GradientsTravelInFewerBits) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf, at::kDouble}) {
    std::vector<at::Tensor> parts;  // of both ranks
    for (const at::Tensor& part : batch(0).chunk(2)) {
      Stack alone;
      loss_of(*alone, part).backward();
      for (const at::Tensor& w : alone->weights) parts.push_back(w.grad().to(dtype));
    }
    on_mesh({{"a", 2}}, [&](const MeshPtr& mesh) {
      Stack model;
      distribute_module(*model, mesh, {});
      const GradSync sync(*model, {.bucket_bytes = 2 * kWeight, .reduce_dtype = dtype});
      const int64_t element = static_cast<int64_t>(c10::elementSize(dtype));
      for (int iteration = 0; iteration < 3; ++iteration) {
        const CommTrace trace(mesh);
        loss_of(*model, fed(0, mesh)).backward();
        finish_grad_sync(*model);
        int64_t bytes = 0;
        for (const CommEvent& event : trace.events()) {
          if (event.phase != Phase::kGradientSync || event.is_check) continue;
          EXPECT_EQ(event.dtype, dtype);
          bytes += event.bytes;
        }
        EXPECT_EQ(bytes, kLayers * kDim * kDim * element) << iteration;  // 2 (n - 1) / n of them
        for (int i = 0; i < kLayers; ++i) {
          const at::Tensor& grad = model->weights[i].grad();
          EXPECT_EQ(layout_of(grad), layout_of(model->weights[i]));
          EXPECT_EQ(grad.scalar_type(), at::kFloat);
          const at::Tensor wanted = (parts[i] + parts[i + kLayers]).to(at::kFloat);
          EXPECT_TRUE(full_tensor(grad).equal(wanted)) << c10::toString(dtype) << i;
        }
        zero_grad(*model);
      }
      EXPECT_EQ(sync.num_buckets(), dtype == at::kDouble ? kLayers : (kLayers + 3) / 4);
    });
  }
}

TEST(GradSyncTest, WhatIsSentNowhereKeepsItsBits) {
  on_mesh({{"a", 1}}, [](const MeshPtr& mesh) {
    Stack model, alone;
    loss_of(*alone, batch(0)).backward();
    distribute_module(*model, mesh, {});
    const GradSync sync(*model, {.reduce_dtype = at::kBFloat16});
    for (int iteration = 0; iteration < 2; ++iteration) {
      loss_of(*model, fed(0, mesh)).backward();
      finish_grad_sync(*model);
      for (int i = 0; i < kLayers; ++i) {
        EXPECT_TRUE(full_tensor(model->weights[i].grad()).equal(alone->weights[i].grad())) << i;
      }
      zero_grad(*model);
    }
  });
}

// Another number of accumulations, tensor parallel gradients that are whole already, ones that are no
// numbers, a discarded iteration.
TEST(GradSyncTest, FewerBitsWhateverBackwardDoes) {
  on_mesh({{"a", 2}, {"b", 2}}, [](const MeshPtr& mesh) {
    Stack model, plain;
    distribute_module(*model, mesh, {{"w1", {{"b", Shard(1)}}}, {"w2", {{"b", Shard(0)}}}});
    GradSync sync(*model, {.bucket_bytes = kWeight, .reduce_dtype = at::kBFloat16});
    const std::vector<std::vector<int>> without = {{}, {}, {5}, {0, 1}, {}};
    for (size_t iteration = 0; iteration < without.size(); ++iteration) {
      const auto backward = [&](int i) {
        const at::Tensor x = distribute_tensor(batch(i), mesh, NamedPlacements{{"a", Shard(0)}});
        model->forward(x, without[iteration]).square().sum().backward();
        plain->forward(batch(i), without[iteration]).square().sum().backward();
      };
      {
        const GradSync::NoSync accumulate(sync);
        backward(1);
      }
      backward(0);
      if (iteration == 1) {
        sync.discard();
      } else {
        finish_grad_sync(*model);
        for (int i = 0; i < kLayers; ++i) {
          const at::Tensor &got = model->weights[i].grad(), &wanted = plain->weights[i].grad();
          ASSERT_EQ(got.defined(), wanted.defined());
          if (!got.defined()) continue;
          EXPECT_EQ(layout_of(got), layout_of(model->weights[i]));
          // Two parts and their sum, each rounded to eight bits.
          const double bound = 3 * 0.00390625 * 2 * wanted.abs().max().item<double>();
          EXPECT_LE((full_tensor(got) - wanted).abs().max().item<double>(), bound) << i;
        }
      }
      zero_grad(*model);
      zero_grad(*plain);
    }
  });
  const absl::Status status = try_on_mesh({{"a", 2}}, [](const MeshPtr& mesh) {
    Stack model;
    distribute_module(*model, mesh, {});
    const GradSync sync(*model, {.reduce_dtype = at::kInt});
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("reduce_dtype is Int; wanted Half"));
  // Ranks that differ hear of it.
  const absl::Status differing = try_on_mesh({{"a", 2}}, [](const MeshPtr& mesh) {
    Stack model;
    distribute_module(*model, mesh, {});
    const bool first = mesh->coordinate()[0] == 0;
    const GradSync sync(*model, {.reduce_dtype = first ? at::kBFloat16 : at::kHalf});
    loss_of(*model, fed(0, mesh)).backward();
    finish_grad_sync(*model);
  });
  EXPECT_FALSE(differing.ok());
}

TEST(GradSyncTest, NoSyncLeavesGradientsPartialUntilTheLastBackward) {
  const std::vector<at::Tensor> wanted = gradients({loss_of, loss_of, loss_of});
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    Stack model;
    distribute_module(*model, mesh, {});
    GradSync sync(*model, {.bucket_bytes = 3 * kWeight});
    for (int iteration = 0; iteration < 3; ++iteration) {
      const CommTrace trace(mesh);
      {
        const GradSync::NoSync outer(sync);
        const GradSync::NoSync inner(sync);
        loss_of(*model, fed(0, mesh)).backward();
        loss_of(*model, fed(1, mesh)).backward();
        EXPECT_EQ(synced(trace), 0);
        EXPECT_TRUE(layout_of(model->weights[0].grad())[0].is_partial());
      }
      loss_of(*model, fed(2, mesh)).backward();
      EXPECT_EQ(synced(trace), iteration == 0 ? 0 : 2);
      finish_grad_sync(*model);
      EXPECT_EQ(synced(trace), iteration == 0 ? 1 : 2);
      expect_gradients(*model, wanted);
      zero_grad(*model);
    }
  });
}

TEST(GradSyncTest, UnusedParametersAreNotWaitedFor) {
  const auto without = [](std::vector<int> layers) -> Step {
    return [layers](StackImpl& model, const at::Tensor& x) {
      return model.forward(x, layers).square().sum();
    };
  };
  const std::vector<Step> steps = {without({}), without({4}), without({0, 5}), without({}),
                                   without({0, 1, 2, 3, 4})};
  for (const bool first_unused : {false, true}) {
    on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
      Stack model;
      distribute_module(*model, mesh, {});
      const GradSync sync(*model, {.bucket_bytes = 2 * kWeight});
      for (size_t i = 0; i < steps.size(); ++i) {
        const Step& step = steps[first_unused ? steps.size() - 1 - i : i];
        for (int twice = 0; twice < 2; ++twice) {
          step(*model, fed(0, mesh)).backward();
          finish_grad_sync(*model);
          Stack plain;
          step(*plain, batch(0)).backward();
          std::vector<at::Tensor> wanted;
          for (const at::Tensor& w : plain->weights) wanted.push_back(w.grad());
          expect_gradients(*model, wanted);
          zero_grad(*model);
        }
      }
    });
  }
}

TEST(GradSyncTest, ASecondBackwardBeforeTheEndCounts) {
  const std::vector<at::Tensor> once = gradients({loss_of});
  const std::vector<at::Tensor> twice = gradients({loss_of, loss_of});
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    Stack model;
    distribute_module(*model, mesh, {});
    const GradSync sync(*model, {.bucket_bytes = 2 * kWeight});
    for (int iteration = 0; iteration < 3; ++iteration) {
      loss_of(*model, fed(0, mesh)).backward();
      loss_of(*model, fed(1, mesh)).backward();
      finish_grad_sync(*model);
      expect_gradients(*model, twice);
      zero_grad(*model);
      // As does zeroing them, and whatever else is done to them.
      loss_of(*model, fed(1, mesh)).backward();
      zero_grad(*model);
      finish_grad_sync(*model);
      EXPECT_FALSE(model->weights[0].grad().defined());
      loss_of(*model, fed(1, mesh)).backward();
      for (at::Tensor& w : model->weights) w.mutable_grad().zero_();
      loss_of(*model, fed(0, mesh)).backward();
      finish_grad_sync(*model);
      expect_gradients(*model, once);
      zero_grad(*model);
      loss_of(*model, fed(0, mesh)).backward();
      finish_grad_sync(*model);
      expect_gradients(*model, once);
      finish_grad_sync(*model);  // nothing is left to do
      expect_gradients(*model, once);
      zero_grad(*model);
    }
  });
}

TEST(GradSyncTest, WhatIsWrittenToLocalPartsMeanwhileCounts) {
  std::vector<at::Tensor> wanted = gradients({loss_of});
  for (at::Tensor& w : wanted) w = w * 0.5;
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    Stack model;
    distribute_module(*model, mesh, {});
    const GradSync sync(*model, {.bucket_bytes = 2 * kWeight});
    for (int iteration = 0; iteration < 3; ++iteration) {
      loss_of(*model, fed(0, mesh)).backward();
      for (const at::Tensor& w : model->weights) to_local(w.grad()).mul_(0.5);
      finish_grad_sync(*model);
      expect_gradients(*model, wanted);
      zero_grad(*model);
    }
  });
}

TEST(GradSyncTest, WeightsThatAreUsedTwiceAlsoInRecomputedLayers) {
  const Step step = [](StackImpl& model, const at::Tensor& x) {
    const auto block = [&](const at::Tensor& t) {
      return at::tanh(at::matmul(at::matmul(t, model.weights[0]), model.weights[1]));
    };
    at::Tensor y = checkpoint(block, x);
    y = checkpoint(block, at::matmul(y, model.weights[2]));
    return at::matmul(y, model.weights[0]).square().sum();
  };
  const std::vector<at::Tensor> wanted = gradients({step});
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    Stack model;
    distribute_module(*model, mesh, {});
    const GradSync sync(*model, {.bucket_bytes = kWeight});
    for (int iteration = 0; iteration < 3; ++iteration) {
      const CommTrace trace(mesh);
      const at::Tensor x = fed(0, mesh).requires_grad_();
      step(*model, x).backward();
      finish_grad_sync(*model);
      expect_gradients(*model, wanted);
      if (iteration > 0) {
        EXPECT_EQ(synced(trace), 3);
      }
      zero_grad(*model);
    }
  });
}

// Gradients that have a graph keep it on their way.
TEST(GradSyncTest, GradientsOfGradients) {
  const auto penalised = [](StackImpl& model, const at::Tensor& x) {
    loss_of(model, x).backward({}, /*retain_graph=*/true, /*create_graph=*/true);
    if (is_dtensor(model.weights[0])) finish_grad_sync(model.weights);
    at::Tensor penalty = at::zeros({});
    if (is_dtensor(x)) penalty = distribute_tensor(penalty, mesh_of(x), NamedPlacements());
    for (at::Tensor& w : model.weights) {
      const at::Tensor grad = w.grad();
      EXPECT_TRUE(grad.requires_grad());
      penalty = penalty + grad.square().sum();
      w.mutable_grad() = at::Tensor();
    }
    return penalty;
  };
  const std::vector<at::Tensor> wanted = gradients({penalised});
  for (const auto& dims : kMeshes) {
    for (const bool in_buckets : {false, true}) {
      on_mesh(dims, [&](const MeshPtr& mesh) {
        Stack model;
        distribute_module(*model, mesh, {});
        std::unique_ptr<GradSync> sync;
        if (in_buckets) {
          sync = std::make_unique<GradSync>(*model, GradSyncOptions{.bucket_bytes = 2 * kWeight});
        }
        for (int iteration = 0; iteration < 3; ++iteration) {
          penalised(*model, fed(0, mesh)).backward();
          finish_grad_sync(*model);
          expect_gradients(*model, wanted);
          zero_grad(*model);
        }
      });
    }
  }
}

// Of two inputs the second has no gradient, wherever it is used.
struct First : torch::autograd::Function<First> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& first,
                            const at::Tensor&) {
    return first.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& grads) {
    return {grads[0], at::Tensor()};
  }
};

TEST(GradSyncTest, AGradientThatIsNotThereIsNoSurprise) {
  on_mesh({{"a", 2}}, [](const MeshPtr& mesh) {
    Stack model;
    distribute_module(*model, mesh, {});
    const GradSync sync(*model);
    for (int iteration = 0; iteration < 4; ++iteration) {
      const CommTrace trace(mesh);
      const at::Tensor y = model->forward(fed(0, mesh), {0});
      First::apply(y, model->weights[0]).square().sum().backward();
      finish_grad_sync(*model);
      EXPECT_FALSE(model->weights[0].grad().defined());
      int64_t checks = 0;
      for (const CommEvent& event : trace.events()) checks += event.is_check;
      EXPECT_EQ(checks, iteration == 0 ? 1 : 0) << iteration << trace.to_string();
      EXPECT_EQ(sync.left_in_backward(), iteration);
      zero_grad(*model);
    }
  });
}

TEST(GradSyncTest, ARankThatFailsInBackwardEndsTheOthers) {
  const absl::Status status = try_on_mesh({{"dp", 3}}, [](const MeshPtr& mesh) {
    Stack model;
    distribute_module(*model, mesh, {});
    const GradSync sync(*model, {.bucket_bytes = kWeight});
    for (int iteration = 0; iteration < 3; ++iteration) {
      model->weights[2].register_hook([&, iteration](const at::Tensor& grad) {
        if (iteration == 1 && mesh->coordinate()[0] == 1) throw std::runtime_error("out of order");
        return grad;
      });
      loss_of(*model, fed(0, mesh)).backward();
      finish_grad_sync(*model);
      zero_grad(*model);
    }
  });
  EXPECT_THAT(std::string(status.message()), HasSubstr("out of order"));
}

// However far each rank has come when one fails.
TEST(GradSyncTest, DiscardedGradientsMeetNoneOfTheNextIteration) {
  const std::vector<at::Tensor> wanted = gradients({loss_of});
  for (const auto& dims : kMeshes) {
    for (const int64_t per_bucket : {1, 2, 100}) {
      for (const int64_t layer : {int64_t{0}, int64_t{2}, kLayers - 1}) {
        on_mesh(dims, [&](const MeshPtr& mesh) {
          Stack model;
          distribute_module(*model, mesh, {});
          GradSync sync(*model, {.bucket_bytes = per_bucket * kWeight});
          const bool is_last = mesh->rank().value == mesh->mesh().size() - 1;
          bool fails = false;
          model->weights[layer].register_hook([&](const at::Tensor& grad) {
            if (fails) throw std::runtime_error("this rank's");
            return grad;
          });
          sync.discard();  // nothing is planned
          for (int iteration = 0; iteration < 6; ++iteration) {
            const CommTrace trace(mesh);
            // In the first one nothing leaves; in the third gradients come otherwise than planned.
            const bool is_other = iteration == 3;
            const bool is_discarded = iteration == 0 || iteration == 2 || is_other;
            fails = is_discarded && is_last;
            const at::Tensor x = is_other
                                     ? distribute_tensor(batch(0), mesh, Placements(dims.size()))
                                     : fed(0, mesh);
            if (fails) {
              EXPECT_THROW(loss_of(*model, x).backward(), std::exception);
              EXPECT_EQ(model->weights[kLayers - 1].grad().defined(), layer < kLayers - 1);
            } else {
              loss_of(*model, x).backward();
            }
            if (is_discarded) {
              sync.discard();
              if (!fails && !is_other && mesh->mesh().size() > 1) {
                EXPECT_TRUE(layout_of(model->weights[0].grad())[0].is_partial());  // they stay
              }
            } else {
              finish_grad_sync(*model);
              expect_gradients(*model, wanted);
            }
            zero_grad(*model);
            if (mesh->mesh().size() == 1) continue;
            const int64_t buckets = (kLayers + per_bucket - 1) / per_bucket;
            EXPECT_EQ(sync.num_buckets(), iteration == 0 ? 0 : buckets);
            EXPECT_EQ(synced(trace), iteration == 0   ? 0
                                     : iteration == 1 ? 1
                                                      : buckets)
                << iteration;
          }
        });
      }
    }
  }
}

TEST(GradSyncTest, ARankThatTakesADiscardedIterationForOneSeesIt) {
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    Stack model;
    distribute_module(*model, mesh, {});
    GradSync sync(*model, {.bucket_bytes = kWeight});
    bool fails = false;
    model->weights[2].register_hook([&](const at::Tensor& grad) {
      if (fails) throw std::runtime_error("this rank's");
      return grad;
    });
    loss_of(*model, fed(0, mesh)).backward();
    finish_grad_sync(*model);
    zero_grad(*model);
    fails = mesh->rank() == Rank(1);
    if (fails) {
      EXPECT_THROW(loss_of(*model, fed(0, mesh)).backward(), std::exception);
      sync.discard();
    } else {
      loss_of(*model, fed(0, mesh)).backward();
      finish_grad_sync(*model);
      EXPECT_FALSE(to_local(model->weights[5].grad()).isnan().any().item<bool>());  // it had left
      EXPECT_TRUE(to_local(model->weights[2].grad()).isnan().all().item<bool>());
    }
  });
}

TEST(GradSyncTest, OneThatEndsLeavesGradientsAsTheyAre) {
  const std::vector<at::Tensor> wanted = gradients({loss_of});
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    Stack model;
    distribute_module(*model, mesh, {});
    auto sync = std::make_unique<GradSync>(*model, GradSyncOptions{.bucket_bytes = kWeight});
    try {
      const GradSync another(*model);
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("another GradSync"));
    }
    loss_of(*model, fed(0, mesh)).backward();
    finish_grad_sync(*model);
    zero_grad(*model);
    loss_of(*model, fed(0, mesh)).backward();
    EXPECT_EQ(sync->left_in_backward(), kLayers);
    sync.reset();
    EXPECT_TRUE(layout_of(model->weights[0].grad())[0].is_partial());
    finish_grad_sync(*model);
    expect_gradients(*model, wanted);
    EXPECT_THROW(GradSync(*model, {.bucket_bytes = 0}), Error);
  });
}

// What is made of a parameter before it meets the batch (decays, norms of weights, masks) is made on every
// rank; its gradient is summed over the batch, and goes with the others.
TEST(FinishGradSyncTest, GradientsPastFunctionsOfParametersLeaveTogether) {
  struct MadeImpl : nn::Module {
    MadeImpl() {
      const auto numbers = [](int64_t rows, int64_t columns) {
        return at::sin(at::arange(rows * columns, at::kDouble) * 0.7).view({rows, columns}) + 0.3;
      };
      decay = register_parameter("decay", numbers(1, kDim));
      step = register_parameter("step", numbers(1, kDim) * 2);
      direction = register_parameter("direction", numbers(kDim, kDim));
      length = register_parameter("length", numbers(kDim, 1));
      masked = register_parameter("masked", numbers(kDim, kDim) * 3);
    }
    at::Tensor forward(const at::Tensor& x, const at::Tensor& mask) {
      at::Tensor y = x * at::exp(-at::exp(decay)) + x * at::softplus(step) * at::sigmoid(decay);
      y = at::linear(y, length * direction / direction.norm(2, {1}, true));
      return at::linear(y, masked * masked * mask).square().sum();
    }
    at::Tensor decay, step, direction, length, masked;
  };
  const at::Tensor x = batch(0, at::kDouble);
  const at::Tensor mask = at::ones({kDim, kDim}, at::kDouble).triu();
  MadeImpl plain;
  plain.forward(x, mask).backward();
  for (const std::vector<MeshDim>& dims :
       {std::vector<MeshDim>{{"dp", 2}}, {{"dp", 3}}, {{"dp", 2}, {"more", 2}}}) {
    on_mesh(dims, [&](const MeshPtr& mesh) {
      MadeImpl model;
      distribute_module(model, mesh, {});
      Placements rows(mesh->mesh().ndim(), Shard(0));
      const at::Tensor loss =
          model.forward(distribute_tensor(x, mesh, rows),
                        distribute_tensor(mask, mesh, Placements(mesh->mesh().ndim())));
      CommTrace trace(mesh);
      loss.backward();
      EXPECT_TRUE(trace.events().empty()) << trace.to_string();
      finish_grad_sync(model);
      for (const auto& item : plain.named_parameters()) {
        const at::Tensor got = full_tensor(model.named_parameters()[item.key()].grad());
        EXPECT_TRUE(at::allclose(got, item.value().grad(), 1e-12, 1e-12)) << item.key();
      }
    });
  }
}

}  // namespace
}  // namespace shardweave
