// Buckets of gradients through functions of a user's: what these see, when, and that what goes wrong in
// one goes wrong on all ranks.
#include "shardweave/dtensor/gradient_hook.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/grad_sync.h"
#include "shardweave/dtensor/observe/comm_trace.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "torch/nn/module.h"
#include "torch/nn/pimpl.h"

namespace shardweave {
namespace {

using ::testing::HasSubstr;
using testing::on_mesh;
namespace nn = torch::nn;

constexpr int64_t kDim = 5, kLayers = 5;
constexpr int64_t kWeight = kDim * kDim * 4;  // bytes

struct StackImpl : nn::Module {
  StackImpl() {
    const c10::AutoGradMode no_grad(false);
    for (int i = 0; i < kLayers; ++i) {
      const at::Tensor weight = at::sin(at::arange(kDim * kDim, at::kFloat).view({kDim, kDim}) + i);
      weights.push_back(register_parameter("w" + std::to_string(i), weight));
    }
  }
  at::Tensor loss(at::Tensor x, const std::vector<int>& without = {}) {
    for (int i = 0; i < kLayers; ++i) {
      if (std::find(without.begin(), without.end(), i) == without.end()) {
        x = at::tanh(at::matmul(x, weights[i]));
      }
    }
    return x.square().sum();
  }
  void zero() {
    for (at::Tensor& w : weights) w.mutable_grad() = at::Tensor();
  }
  std::vector<at::Tensor> weights;
};
TORCH_MODULE(Stack);

at::Tensor batch(int i) {
  return at::cos(at::arange(12 * kDim, at::kFloat).view({12, kDim}) * (i + 1));
}

at::Tensor fed(int i, const MeshPtr& mesh) {
  return distribute_tensor(batch(i), mesh, Placements(mesh->mesh().ndim(), Shard(0)));
}

std::vector<at::Tensor> one_device(const std::vector<int>& without = {}) {
  Stack model;
  model->loss(batch(0), without).backward();
  std::vector<at::Tensor> grads;
  for (const at::Tensor& w : model->weights) grads.push_back(w.grad());
  return grads;
}

void expect_gradients(StackImpl& model, const std::vector<at::Tensor>& wanted) {
  for (size_t i = 0; i < wanted.size(); ++i) {
    const at::Tensor& grad = model.weights[i].grad();
    ASSERT_EQ(grad.defined(), wanted[i].defined()) << i;
    if (!grad.defined()) continue;
    EXPECT_EQ(layout_of(grad), layout_of(model.weights[i])) << i;
    EXPECT_EQ(grad.scalar_type(), model.weights[i].scalar_type());
    EXPECT_TRUE(at::allclose(full_tensor(grad), wanted[i], 1e-4, 1e-4)) << i;
  }
}

// What an all-reduce does, and a diary.
struct Sum : GradientHook {
  std::string name() const override { return "sum"; }
  void begin(GradientBucket& bucket) override {
    diary.push_back("begin " + std::to_string(bucket.index));
    int64_t numel = 0;
    ASSERT_EQ(bucket.parameters.size(), bucket.gradients.size());
    for (const at::Tensor& gradient : bucket.gradients) {
      EXPECT_TRUE(gradient.is_alias_of(bucket.flat));
      numel += gradient.numel();
    }
    EXPECT_EQ(numel, bucket.flat.numel());
    parameters.insert(parameters.end(), bucket.parameters.begin(), bucket.parameters.end());
    bucket.all_reduce(bucket.flat);
  }
  void finish(GradientBucket& bucket) override {
    diary.push_back("finish " + std::to_string(bucket.index));
    discarded += bucket.is_discarded;
  }
  std::vector<std::string> diary, parameters;
  int discarded = 0;
};

struct InDtype : GradientHook {
  explicit InDtype(at::ScalarType d) : dtype(d) {}
  std::string name() const override { return "in dtype"; }
  void begin(GradientBucket& bucket) override {
    bucket.sent = bucket.flat.to(dtype);
    bucket.all_reduce(bucket.sent);
  }
  void finish(GradientBucket& bucket) override { bucket.flat.copy_(bucket.sent); }
  at::ScalarType dtype;
};

const std::vector<std::vector<MeshDim>> kMeshes = {
    {{"a", 1}}, {{"a", 2}}, {{"a", 3}}, {{"a", 4}}, {{"a", 2}, {"b", 2}}};

TEST(GradientHookTest, BringsWhatAnAllReduceWouldInAsManyBytes) {
  const std::vector<at::Tensor> wanted = one_device();
  for (const auto& dims : kMeshes) {
    for (const int64_t per_bucket : {1, 2, 100}) {
      on_mesh(dims, [&](const MeshPtr& mesh) {
        Stack model;
        distribute_module(*model, mesh, {});
        const auto hook = std::make_shared<Sum>();
        const GradSync sync(*model, {.bucket_bytes = per_bucket * kWeight, .hook = hook});
        const int64_t buckets = (kLayers + per_bucket - 1) / per_bucket;
        const int64_t n = mesh->mesh().size();
        for (int iteration = 0; iteration < 3; ++iteration) {
          hook->parameters.clear();
          const CommTrace trace(mesh);
          model->loss(fed(0, mesh)).backward();
          finish_grad_sync(*model);
          expect_gradients(*model, wanted);
          model->zero();
          if (n == 1) continue;
          EXPECT_EQ(hook->parameters.size(), kLayers);
          int64_t bytes = 0, calls = 0, checks = 0;
          for (const CommEvent& event : trace.events()) {
            if (event.phase != Phase::kGradientSync) continue;
            (event.is_check ? checks : calls) += 1;
            if (!event.is_check) bytes += event.bytes;
          }
          EXPECT_EQ(calls, buckets) << trace.to_string();
          EXPECT_EQ(checks, iteration == 0 ? 2 : 1);  // that of the order, and of the hooks
          // 2 (n - 1) / n of them, in whole elements of each bucket.
          EXPECT_GE(bytes, kLayers * kWeight * 2 * (n - 1) / n);
          EXPECT_LE(bytes, kLayers * kWeight * 2 * (n - 1) / n + 8 * buckets);
        }
        if (n == 1) {
          EXPECT_TRUE(hook->diary.empty());  // there is nothing to sum
          return;
        }
        EXPECT_EQ(sync.left_in_backward(), 2 * buckets);
        // All begin before the first is finished.
        for (int64_t b = 0; b < buckets; ++b) {
          EXPECT_EQ(hook->diary[b], "begin " + std::to_string(b));
          EXPECT_EQ(hook->diary[buckets + b], "finish " + std::to_string(b));
        }
      });
    }
  }
}

TEST(GradientHookTest, OfFewerBitsDoesWhatReduceDtypeDoes) {
  on_mesh({{"a", 3}}, [](const MeshPtr& mesh) {
    for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
      Stack with_hook, with_option;
      distribute_module(*with_hook, mesh, {});
      distribute_module(*with_option, mesh, {});
      const GradSync a(*with_hook, {.hook = std::make_shared<InDtype>(dtype)});
      const GradSync b(*with_option, {.reduce_dtype = dtype});
      for (int iteration = 0; iteration < 2; ++iteration) {
        with_hook->loss(fed(0, mesh)).backward();
        with_option->loss(fed(0, mesh)).backward();
        finish_grad_sync(*with_hook);
        finish_grad_sync(*with_option);
        for (int i = 0; i < kLayers; ++i) {
          EXPECT_TRUE(to_local(with_hook->weights[i].grad())
                          .equal(to_local(with_option->weights[i].grad())));
        }
        with_hook->zero();
        with_option->zero();
      }
    }
  });
}

// Unused parameters, other layouts, accumulation, tensor parallel weights, both options together.
TEST(GradientHookTest, WhateverBackwardDoes) {
  on_mesh({{"a", 2}, {"b", 2}}, [](const MeshPtr& mesh) {
    Stack model, plain;
    distribute_module(
        *model, mesh,
        {{"w1", {{"b", Shard(1)}}}, {"w2", {{"b", Shard(0)}}}, {"w4", {{"a", Shard(0)}}}});
    const auto hook = std::make_shared<Sum>();
    GradSync sync(*model, {.bucket_bytes = 2 * kWeight, .reduce_dtype = at::kDouble, .hook = hook});
    const std::vector<std::vector<int>> without = {{}, {}, {3}, {0, 1}, {}, {4}, {}};
    for (size_t iteration = 0; iteration < without.size(); ++iteration) {
      const auto backward = [&](int i, const Placements& rows) {
        model->loss(distribute_tensor(batch(i), mesh, rows), without[iteration]).backward();
        plain->loss(batch(i), without[iteration]).backward();
      };
      hook->parameters.clear();
      if (iteration % 2 == 1) {
        const GradSync::NoSync accumulate(sync);
        backward(1, {Shard(0), Replicate()});
      }
      backward(0, {Shard(0), Replicate()});
      finish_grad_sync(*model);
      std::vector<at::Tensor> wanted;
      for (const at::Tensor& w : plain->weights) wanted.push_back(w.grad());
      expect_gradients(*model, wanted);
      // What is cut along "a" needs no all-reduce.
      EXPECT_THAT(hook->parameters, ::testing::Not(::testing::Contains("w4")));
      EXPECT_FALSE(hook->parameters.empty());
      model->zero();
      plain->zero();
    }
  });
}

TEST(GradientHookTest, ADiscardedIterationIsNone) {
  const std::vector<at::Tensor> wanted = one_device();
  for (const int64_t layer : {int64_t{0}, int64_t{2}, kLayers - 1}) {
    on_mesh({{"a", 3}}, [&](const MeshPtr& mesh) {
      Stack model;
      distribute_module(*model, mesh, {});
      const auto hook = std::make_shared<Sum>();
      GradSync sync(*model, {.bucket_bytes = kWeight, .hook = hook});
      bool fails = false;
      model->weights[layer].register_hook([&](const at::Tensor& grad) {
        if (fails) throw std::runtime_error("this rank's");
        return grad;
      });
      for (int iteration = 0; iteration < 4; ++iteration) {
        fails = iteration == 2 && mesh->coordinate()[0] == 1;
        if (fails) {
          EXPECT_THROW(model->loss(fed(0, mesh)).backward(), std::exception);
        } else {
          model->loss(fed(0, mesh)).backward();
        }
        if (iteration == 2) {
          sync.discard();
          EXPECT_EQ(hook->discarded, kLayers);
        } else {
          finish_grad_sync(*model);
          expect_gradients(*model, wanted);
        }
        model->zero();
      }
      EXPECT_EQ(hook->discarded, kLayers);
    });
  }
}

struct Failing : Sum {
  enum class When { kBeforeBegin, kAfterBegin, kFinish };
  Failing(When when_in, int iteration_in, bool fails_in)
      : when(when_in), iteration(iteration_in), fails(fails_in) {}
  void fail(When now) {
    if (fails && now == when && iteration == 0) throw std::runtime_error("out of ideas");
  }
  void begin(GradientBucket& bucket) override {
    fail(When::kBeforeBegin);
    Sum::begin(bucket);
    fail(When::kAfterBegin);
  }
  void finish(GradientBucket& bucket) override {
    fail(When::kFinish);
    Sum::finish(bucket);
  }
  When when;
  int iteration;  // counts down
  bool fails;
};

// Runs `body` on every rank, and gives what each has thrown, "" for nothing.
std::vector<std::string> errors_of(const std::vector<MeshDim>& dims,
                                   const std::function<void(const MeshPtr&)>& body) {
  std::vector<std::string> errors;
  std::mutex mutex;
  on_mesh(dims, [&](const MeshPtr& mesh) {
    std::string error;
    try {
      body(mesh);
    } catch (const std::exception& e) {
      error = e.what();
    }
    const std::lock_guard lock(mutex);
    errors.resize(static_cast<size_t>(mesh->mesh().size()));
    errors[static_cast<size_t>(mesh->rank().value)] = error;
  });
  return errors;
}

TEST(GradientHookTest, WhatFailsOnOneRankFailsOnAll) {
  using When = Failing::When;
  for (const auto& dims : std::vector<std::vector<MeshDim>>{{{"a", 3}}, {{"a", 2}, {"b", 2}}}) {
    for (const When when : {When::kBeforeBegin, When::kAfterBegin, When::kFinish}) {
      for (const int in_iteration : {0, 2}) {
        const std::vector<std::string> errors = errors_of(dims, [&](const MeshPtr& mesh) {
          Stack model;
          distribute_module(*model, mesh, {});
          const auto hook = std::make_shared<Failing>(when, in_iteration, mesh->rank() == Rank(1));
          GradSync sync(*model, {.bucket_bytes = 2 * kWeight, .hook = hook});
          for (int iteration = 0; iteration <= in_iteration; ++iteration) {
            model->loss(distribute_tensor(batch(0), mesh, NamedPlacements{{"a", Shard(0)}}))
                .backward();
            finish_grad_sync(*model);
            model->zero();
            --hook->iteration;
          }
        });
        for (size_t r = 0; r < errors.size(); ++r) {
          EXPECT_THAT(errors[r], HasSubstr(r == 1 ? "out of ideas" : "hook 'sum' failed"))
              << r << " " << static_cast<int>(when) << in_iteration;
        }
      }
    }
  }
}

TEST(GradientHookTest, RefusesWhatItCouldNotTakeBack) {
  on_mesh({{"a", 2}}, [](const MeshPtr& mesh) {
    Stack model;
    distribute_module(*model, mesh, {});
    const GradSync sync(*model, {.hook = std::make_shared<Sum>()});
    for (int iteration = 0; iteration < 4; ++iteration) {
      model->loss(fed(0, mesh)).backward();
      if (iteration == 1) model->loss(fed(1, mesh)).backward();
      if (iteration == 2) model->zero();
      if (iteration == 1 || iteration == 2) {
        try {
          finish_grad_sync(*model);
          ADD_FAILURE() << "no error";
        } catch (const Error& error) {
          EXPECT_EQ(error.status().code(), absl::StatusCode::kFailedPrecondition);
          EXPECT_THAT(error.what(), HasSubstr("after it had left through the gradient hook 'sum'"));
        }
      } else {
        finish_grad_sync(*model);
        expect_gradients(*model, one_device());
      }
      model->zero();
    }
  });
}

// Calls its own GradSync.
struct Curious : Sum {
  explicit Curious(bool is_asked_in) : is_asked(is_asked_in) {}
  void ask() {
    if (!is_asked) return;
    EXPECT_GE(sync->num_buckets(), 0);
    EXPECT_GE(sync->left_in_backward(), 0);
    const GradSync::NoSync none(*sync);
    if (calls) calls();
  }
  void begin(GradientBucket& bucket) override {
    ask();
    Sum::begin(bucket);
  }
  void finish(GradientBucket& bucket) override {
    ask();
    Sum::finish(bucket);
  }
  const bool is_asked;
  GradSync* sync = nullptr;
  std::function<void()> calls;
};

TEST(GradientHookTest, MayAskItsOwnGradSync) {
  on_mesh({{"a", 3}}, [](const MeshPtr& mesh) {
    Stack model;
    distribute_module(*model, mesh, {});
    const auto hook = std::make_shared<Curious>(mesh->rank() == Rank(1));
    GradSync sync(*model, {.bucket_bytes = kWeight, .hook = hook});
    hook->sync = &sync;
    for (int iteration = 0; iteration < 3; ++iteration) {
      model->loss(fed(0, mesh)).backward();
      if (iteration == 1) {
        sync.discard();
      } else {
        finish_grad_sync(*model);
        expect_gradients(*model, one_device());
      }
      model->zero();
    }
    EXPECT_EQ(sync.num_buckets(), kLayers);
    EXPECT_EQ(sync.left_in_backward(), 2 * kLayers);
  });
}

TEST(GradientHookTest, WhatWouldWaitForItselfIsAnErrorOnAllRanks) {
  for (const bool discards : {true, false}) {
    const std::vector<std::string> errors = errors_of({{"a", 3}}, [&](const MeshPtr& mesh) {
      Stack model;
      distribute_module(*model, mesh, {});
      const auto hook = std::make_shared<Curious>(mesh->rank() == Rank(1));
      GradSync sync(*model, {.bucket_bytes = kWeight, .hook = hook});
      hook->sync = &sync;
      hook->calls = [&] { discards ? sync.discard() : finish_grad_sync(*model); };
      model->loss(fed(0, mesh)).backward();
      finish_grad_sync(*model);
    });
    for (size_t r = 0; r < errors.size(); ++r) {
      EXPECT_THAT(errors[r],
                  HasSubstr(r == 1 ? "inside of its gradient hook" : "hook 'sum' failed"))
          << r;
    }
  }
}

struct Named : Sum {
  explicit Named(std::string text_in) : text(std::move(text_in)) {}
  std::string name() const override { return text; }
  std::string text;
};

TEST(GradientHookTest, RanksHaveTheSameOne) {
  const std::vector<std::string> errors = errors_of({{"a", 3}}, [&](const MeshPtr& mesh) {
    Stack model;
    distribute_module(*model, mesh, {});
    const GradSync sync(
        *model, {.hook = std::make_shared<Named>(mesh->rank() == Rank(2) ? "other" : "sum")});
  });
  for (const std::string& error : errors) {
    EXPECT_THAT(error, HasSubstr("are not the same on ranks 0 and 2"));
  }
  on_mesh({{"a", 2}}, [](const MeshPtr& mesh) {
    Stack a, b;
    distribute_module(*a, mesh, {});
    distribute_module(*b, mesh, {});
    std::vector<at::Tensor> both = a->weights;
    both.insert(both.end(), b->weights.begin(), b->weights.end());
    try {
      const GradSync sync(both, {.hook = std::make_shared<Sum>()});
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("two parameters are called 'w0'"));
    }
  });
}

// With and without a hook: a parameter that came to be another tensor, and a graph of one's own.
TEST(GradientHookTest, MovedParametersAndGraphsThatDependOnTheRankAreErrors) {
  for (const bool has_hook : {false, true}) {
    GradSyncOptions options{.bucket_bytes = 2 * kWeight};
    for (const std::string& error : errors_of({{"a", 2}}, [&](const MeshPtr& mesh) {
           Stack model;
           distribute_module(*model, mesh, {});
           GradSyncOptions its = options;
           if (has_hook) its.hook = std::make_shared<Sum>();
           const GradSync sync(*model, its);
           model->loss(fed(0, mesh)).backward();
           finish_grad_sync(*model);
           model->zero();
           model->to(at::kDouble);
           model->loss(fed(0, mesh).to(at::kDouble)).backward();
           finish_grad_sync(*model);
         })) {
      EXPECT_THAT(error, HasSubstr("the parameter 'w0' was moved")) << has_hook;
    }
    for (const int from : {0, 1}) {
      for (const std::string& error : errors_of({{"a", 3}}, [&](const MeshPtr& mesh) {
             Stack model;
             distribute_module(*model, mesh, {});
             GradSyncOptions its = options;
             if (has_hook) its.hook = std::make_shared<Sum>();
             const GradSync sync(*model, its);
             for (int iteration = 0; iteration < 3; ++iteration) {
               std::vector<int> without;
               if (iteration >= from && mesh->rank() == Rank(1)) without = {2};
               // Each rank's own: nothing is sent in forward.
               const at::Tensor x =
                   from_local(batch(0).narrow(0, mesh->rank().value * 4, 4), mesh, {Shard(0)});
               at::Tensor y = x;
               for (int i = 0; i < kLayers; ++i) {
                 if (std::find(without.begin(), without.end(), i) == without.end()) {
                   y = at::tanh(at::matmul(y, model->weights[i]));
                 }
               }
               y.backward(at::ones_like(y));
               finish_grad_sync(*model);
               model->zero();
             }
           })) {
        EXPECT_FALSE(error.empty()) << has_hook << from;
      }
    }
  }
}

// On every rank, whoever has it.
TEST(GradientHookTest, NumbersThatAreNotFiniteReachAllRanks) {
  for (const bool has_hook : {false, true}) {
    on_mesh({{"a", 3}}, [&](const MeshPtr& mesh) {
      Stack model;
      distribute_module(*model, mesh, {});
      GradSyncOptions options;
      if (has_hook) options.hook = std::make_shared<Sum>();
      const GradSync sync(*model, options);
      for (int iteration = 0; iteration < 3; ++iteration) {
        at::Tensor rows = batch(0);
        if (iteration == 1) rows[5][1] = std::numeric_limits<float>::infinity();  // rank 1's
        model->loss(distribute_tensor(rows, mesh, {Shard(0)})).backward();
        finish_grad_sync(*model);
        EXPECT_EQ(to_local(model->weights[0].grad()).isfinite().all().item<bool>(), iteration != 1);
        model->zero();
      }
    });
  }
}

}  // namespace
}  // namespace shardweave
