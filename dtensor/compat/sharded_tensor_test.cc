// Specifications become placements, or say what is wrong with them; linear and embedding on them,
// trained, as on one device.
#include "shardweave/dtensor/compat/sharded_tensor.h"

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/comm/world.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/random.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/activation.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/pimpl.h"
#include "torch/optim/adamw.h"
#include "torch/optim/optimizer.h"
#include "torch/optim/sgd.h"

namespace shardweave {
namespace {

namespace nn = torch::nn;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::on_mesh;
using testing::try_on_mesh;

DeviceMesh mesh_of_size(int64_t n) {
  return DeviceMesh::create({{"x", n}}).value();
}

// Slices of `rows` each, of a tensor of shape [sum of rows, columns], on ranks 0, 1, ...
EnumerableSpec row_slices(const std::vector<int64_t>& rows, int64_t columns) {
  EnumerableSpec spec;
  int64_t begin = 0;
  for (size_t r = 0; r < rows.size(); ++r) {
    spec.shards.push_back({{begin, 0}, {rows[r], columns}, static_cast<int64_t>(r)});
    begin += rows[r];
  }
  return spec;
}

EnumerableSpec column_slices(int64_t rows, const std::vector<int64_t>& columns) {
  EnumerableSpec spec = row_slices(columns, rows);
  for (ShardMetadata& shard : spec.shards) {
    std::swap(shard.offsets[0], shard.offsets[1]);
    std::swap(shard.sizes[0], shard.sizes[1]);
  }
  return spec;
}

TEST(ShardingSpecTest, BecomesAPlacement) {
  const DeviceMesh mesh = mesh_of_size(4);
  EXPECT_EQ(placement_of(ChunkSpec{0}, {7, 5}, mesh), Shard(0));
  EXPECT_EQ(placement_of(ChunkSpec{-1, {0, 1, 2, 3}}, {7, 5}, mesh), Shard(1));
  EXPECT_EQ(placement_of(ChunkSpec{0, {1, 3}}, {7, 5}, mesh), RaggedShard(0, {0, 4, 0, 3}));
  EXPECT_EQ(placement_of(ChunkSpec{0, {0, 1, 2}}, {1, 5}, mesh), RaggedShard(0, {1, 0, 0, 0}));
  EXPECT_EQ(placement_of(row_slices({3, 0, 4}, 5), {7, 5}, mesh), RaggedShard(0, {3, 0, 4, 0}));
  EXPECT_EQ(placement_of(column_slices(7, {1, 1, 1, 2}), {7, 5}, mesh),
            RaggedShard(1, {1, 1, 1, 2}));
  // In any order, and all of it on one rank.
  EXPECT_EQ(placement_of(EnumerableSpec{{{{2, 0}, {5, 5}, 3}, {{0, 0}, {2, 5}, 1}}}, {7, 5}, mesh),
            RaggedShard(0, {0, 2, 0, 5}));
  EXPECT_EQ(placement_of(EnumerableSpec{{{{0, 0}, {7, 5}, 2}}}, {7, 5}, mesh),
            RaggedShard(0, {0, 0, 7, 0}));
  // An empty tensor needs no shards.
  EXPECT_EQ(placement_of(EnumerableSpec{}, {0, 5}, mesh), RaggedShard(0, {0, 0, 0, 0}));
}

TEST(ShardingSpecTest, ComparesAndPrints) {
  EXPECT_EQ(ShardingSpec(ChunkSpec{0, {0, 1}}), ShardingSpec(ChunkSpec{0, {0, 1}}));
  EXPECT_NE(ShardingSpec(ChunkSpec{0}), ShardingSpec(ChunkSpec{1}));
  EXPECT_NE(ShardingSpec(row_slices({3, 4}, 5)), ShardingSpec(row_slices({4, 3}, 5)));
  EXPECT_EQ(to_string(ChunkSpec{1}), "ChunkSpec(dim 1, all ranks)");
  EXPECT_EQ(to_string(ChunkSpec{0, {0, 2}}), "ChunkSpec(dim 0, ranks [0, 2])");
  EXPECT_EQ(to_string(row_slices({3, 4}, 5)),
            "EnumerableSpec([0:3, 0:5] on rank 0, [3:7, 0:5] on rank 1)");
}

TEST(ShardingSpecTest, WhatDoesNotFitIsRefused) {
  const struct {
    ShardingSpec spec;
    const char* message;
  } cases[] = {
      {ChunkSpec{2}, "the tensor has 2 dimensions"},
      {ChunkSpec{-3}, "the tensor has 2 dimensions"},
      {ChunkSpec{0, {0, 4}}, "there is no rank 4 (wanted: 0 .. 3)"},
      {ChunkSpec{0, {-1, 0}}, "there is no rank -1"},
      {ChunkSpec{0, {0, 1, 1, 2}}, "rank 1 is there twice"},
      {ChunkSpec{0, {3, 2, 1, 0}}, "rank 2 comes after rank 3"},
      {EnumerableSpec{}, "no shard has the indices 0:7 of dimension 0"},
      {row_slices({3, 3}, 5), "no shard has the indices 6:7 of dimension 0"},
      {EnumerableSpec{{{{0, 0}, {2, 5}, 0}, {{3, 0}, {4, 5}, 1}}},
       "no shard has the indices 2:3 of dimension 0"},
      {EnumerableSpec{{{{0, 0}, {4, 5}, 0}, {{3, 0}, {4, 5}, 1}}},
       "the shards [0:4, 0:5] on rank 0 and [3:7, 0:5] on rank 1 overlap"},
      {row_slices({3, 5}, 5), "the shard [3:8, 0:5] on rank 1 reaches beyond the tensor"},
      {EnumerableSpec{{{{-1, 0}, {8, 5}, 0}}}, "reaches beyond the tensor"},
      {EnumerableSpec{{{{8, 0}, {0, 5}, 0}}}, "reaches beyond the tensor"},
      {EnumerableSpec{{{{0, 0}, {7, 5}, 4}}}, "there is no rank 4"},
      {EnumerableSpec{{{{0, 0}, {3, 5}, 1}, {{3, 0}, {4, 5}, 1}}}, "rank 1 has two shards"},
      {EnumerableSpec{{{{0, 0}, {3, 5}, 1}, {{3, 0}, {4, 5}, 0}}},
       "rank 0 has a later shard than rank 1"},
      {EnumerableSpec{{{{0}, {7}, 0}}}, "1 offsets and 1 sizes (wanted: 2 of each)"},
      {EnumerableSpec{{{{0, 0}, {3, 5}, 0}, {{3, 0}, {4, 2}, 1}, {{3, 2}, {4, 3}, 2}}},
       "slices of the dimensions 0 and 1 (wanted: of one)"},
  };
  const DeviceMesh mesh = mesh_of_size(4);
  for (const auto& c : cases) {
    try {
      const Placement p = placement_of(c.spec, {7, 5}, mesh);
      ADD_FAILURE() << to_string(c.spec) << " became " << p;
    } catch (const Error& error) {
      EXPECT_EQ(error.status().code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(std::string(error.status().message()),
                  AllOf(HasSubstr(c.message), HasSubstr(to_string(c.spec)), HasSubstr("[7, 5]")));
    }
  }
  EXPECT_THROW(placement_of(ChunkSpec{0}, {7}, DeviceMesh::create({{"x", 2}, {"y", 2}}).value()),
               Error);
  EXPECT_THROW(placement_of(ChunkSpec{0}, {}, mesh), Error);
  EXPECT_THROW(placement_of(EnumerableSpec{}, {}, mesh), Error);
}

// Every rank must see the error, with no other rank's help and nothing left half done.
void expect_error_on_every_rank(const std::function<void(const MeshPtr&)>& body,
                                absl::StatusCode code, const std::string& message) {
  std::mutex mutex;
  int errors = 0;
  const absl::Status status = run_ranks(4, [&](World& world) -> absl::Status {
    auto mesh = init_device_mesh(world, {{"x", 4}});
    if (!mesh.ok()) return mesh.status();
    try {
      body(*mesh);
    } catch (const Error& error) {
      const std::lock_guard<std::mutex> lock(mutex);
      ++errors;
      EXPECT_EQ(error.status().code(), code);
      EXPECT_THAT(std::string(error.status().message()), HasSubstr(message));
    }
    return world.comm()->barrier().wait();  // the ranks are still together
  });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(errors, 4) << message;
}

struct NetImpl : nn::Module {
  nn::Embedding words = register_module("words", nn::Embedding(11, 6));
  nn::Linear fc = register_module("fc", nn::Linear(6, 7));
  nn::Linear out = register_module("out", nn::Linear(7, 3));
  at::Tensor scale = register_buffer("scale", at::full({3}, 0.5));

  NetImpl() {
    const c10::AutoGradMode no_grad(false);
    double phase = 0;
    for (at::Tensor& p : parameters()) {
      p.copy_(at::sin(at::arange(p.numel(), at::kDouble) * 1.3 + phase).view(p.sizes()) * 0.4);
      phase += 1;
    }
  }
  at::Tensor forward(const at::Tensor& indices) {
    return out(at::tanh(fc(words(indices)))) * scale;
  }
};
TORCH_MODULE(Net);

TEST(ShardParameterTest, ErrorsReachEveryRank) {
  const auto invalid = absl::StatusCode::kInvalidArgument;
  expect_error_on_every_rank(
      [](const MeshPtr& mesh) {
        Net net;
        shard_parameter(*net, "fc.wieght", ChunkSpec{0}, mesh);
      },
      absl::StatusCode::kNotFound,
      "no parameter 'fc.wieght'; the most similar of its 5: 'fc.weight', ");
  expect_error_on_every_rank(
      [](const MeshPtr& mesh) {
        Net net;
        shard_parameter(*net, "scale", ChunkSpec{0}, mesh);  // a buffer
      },
      absl::StatusCode::kNotFound, "no parameter 'scale'");
  expect_error_on_every_rank(
      [](const MeshPtr& mesh) {
        nn::ReLU relu;
        shard_parameter(*relu, "weight", ChunkSpec{0}, mesh);
      },
      absl::StatusCode::kNotFound, "it has none at all");
  expect_error_on_every_rank(
      [](const MeshPtr& mesh) {
        Net net;
        shard_parameter(*net, "fc.weight", row_slices({3, 3}, 6), mesh);
      },
      invalid, "no shard has the indices 6:7 of dimension 0");
  expect_error_on_every_rank(
      [](const MeshPtr& mesh) { sharded_tensor::zeros(ChunkSpec{0, {1, 0}}, {7, 5}, mesh); },
      invalid, "rank 0 comes after rank 1");
  expect_error_on_every_rank(
      [](const MeshPtr& mesh) { shard_tensor(at::ones({3}), ChunkSpec{1}, mesh); }, invalid,
      "the tensor has 1 dimension");
  expect_error_on_every_rank(
      [](const MeshPtr& mesh) {
        Net net;
        shard_parameter(*net, "fc.weight", ChunkSpec{0}, mesh);
        shard_parameter(*net, "fc.weight", ChunkSpec{1}, mesh);
      },
      absl::StatusCode::kFailedPrecondition, "'fc.weight' is sharded already: DTensor[7, 6]");
}

TEST(ShardParameterTest, TensorsOverOneMemoryStayOne) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    nn::Module root;
    const nn::Linear one(4, 4), other(4, 4);
    root.register_module("one", one.ptr());
    root.register_module("other", other.ptr());
    other->weight.set_data(one->weight.detach());
    try {
      shard_parameter(root, "one.weight", ChunkSpec{0}, mesh);
      ADD_FAILURE() << "they are no longer one";
    } catch (const Error& error) {
      EXPECT_THAT(std::string(error.what_without_backtrace()), HasSubstr("over the same memory"));
    }
    for (const at::Tensor& p : root.parameters()) EXPECT_FALSE(is_dtensor(p));
  });
}

TEST(ShardParameterTest, AnErrorChangesNothing) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    Net net;
    EXPECT_THROW(shard_parameter(*net, "fc.weight", ChunkSpec{2}, mesh), Error);
    for (const at::Tensor& p : net->parameters()) EXPECT_FALSE(is_dtensor(p));
    EXPECT_EQ(net->forward(at::zeros({2}, at::kLong)).size(1), 3);
  });
}

TEST(ShardedTensorTest, FactoriesHaveTheWholeTensorsValues) {
  for (int64_t n : {2, 3, 4}) {
    on_mesh({{"x", n}}, [&](const MeshPtr& mesh) {
      std::vector<int64_t> rows(n, 0);
      rows[0] = 3;
      rows[n - 1] = 4;
      const ShardingSpec specs[] = {ChunkSpec{0}, ChunkSpec{1}, ChunkSpec{0, {n - 1}},
                                    row_slices(rows, 5)};
      for (const ShardingSpec& spec : specs) {
        SCOPED_TRACE(to_string(spec));
        const at::Tensor e = sharded_tensor::empty(spec, {7, 5}, mesh, at::kInt);
        EXPECT_EQ(e.sizes(), at::IntArrayRef({7, 5}));
        EXPECT_EQ(e.scalar_type(), at::kInt);
        EXPECT_EQ(layout_of(e)[0], placement_of(spec, {7, 5}, mesh->mesh()));
        EXPECT_TRUE(
            at::equal(full_tensor(sharded_tensor::zeros(spec, {7, 5}, mesh)), at::zeros({7, 5})));
        EXPECT_TRUE(
            at::equal(full_tensor(sharded_tensor::ones(spec, {7, 5}, mesh)), at::ones({7, 5})));
        EXPECT_TRUE(at::equal(full_tensor(sharded_tensor::full(spec, {7, 5}, 2.5, mesh)),
                              at::full({7, 5}, 2.5)));
        EXPECT_TRUE(sharded_tensor::rand(spec, {7, 5}, mesh, at::requires_grad()).requires_grad());
        const at::Tensor drawn = full_tensor(sharded_tensor::rand(spec, {7, 5}, mesh));
        EXPECT_GT(drawn.min().item<float>(), -1e-6);
        EXPECT_LT(drawn.max().item<float>(), 1);
        EXPECT_NEAR(drawn.mean().item<float>(), 0.5, 0.2);
        const at::Tensor whole = at::arange(35, at::kFloat).view({7, 5});
        EXPECT_TRUE(at::equal(full_tensor(shard_tensor(whole, spec, mesh)), whole));
      }
      EXPECT_EQ(to_local(sharded_tensor::ones(row_slices(rows, 5), {7, 5}, mesh)).size(0),
                rows[mesh->coordinate()[0]]);
    });
  }
}

TEST(ShardedTensorTest, RandomNumbersDoNotDependOnTheSpecification) {
  on_mesh({{"x", 3}}, [](const MeshPtr& mesh) {
    std::vector<at::Tensor> drawn;
    for (const ShardingSpec& spec :
         std::vector<ShardingSpec>{ChunkSpec{0}, ChunkSpec{1, {0, 2}}, row_slices({0, 5, 2}, 5)}) {
      manual_seed(mesh, 5);
      drawn.push_back(full_tensor(sharded_tensor::randn(spec, {7, 5}, mesh)));
    }
    EXPECT_TRUE(at::equal(drawn[0], drawn[1]));
    EXPECT_TRUE(at::equal(drawn[0], drawn[2]));
  });
}

using MakeOptimizer =
    std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;

// The losses of three steps.
std::vector<double> train(Net& net, const MakeOptimizer& make_optimizer,
                          const std::function<at::Tensor(at::Tensor)>& lay) {
  auto optimizer = make_optimizer(net->parameters());
  std::vector<double> losses;
  for (int step = 0; step < 3; ++step) {
    const at::Tensor indices = (at::arange(10, at::kLong) * 7 + step).remainder(11).view({5, 2});
    const at::Tensor target = at::cos(at::arange(30, at::kFloat) + step).view({5, 2, 3});
    const at::Tensor loss = at::mse_loss(net->forward(lay(indices)), lay(target));
    loss.backward();
    finish_grad_sync(*net);
    for (const at::Tensor& p : net->parameters()) {
      EXPECT_TRUE(!is_dtensor(p) || layout_of(p.grad()) == layout_of(p));
    }
    optimizer->step();
    optimizer->zero_grad();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

struct ShardedParameter {
  const char* name;
  ShardingSpec spec;
};

void check_training(int64_t n, const std::vector<ShardedParameter>& parameters,
                    const MakeOptimizer& optimizer, const Placement& batch) {
  on_mesh({{"x", n}}, [&](const MeshPtr& mesh) {
    SCOPED_TRACE(absl::StrCat(n, " ranks, ", parameters[0].name, " ", to_string(parameters[0].spec),
                              ", batch ", batch.to_string()));
    Net plain, sharded;
    const std::vector<at::Tensor> handles = sharded->parameters();
    const std::vector<double> want = train(plain, optimizer, [](at::Tensor t) { return t; });
    for (const ShardedParameter& p : parameters) shard_parameter(*sharded, p.name, p.spec, mesh);
    for (const ShardedParameter& p : parameters) {
      const at::Tensor tensor = sharded->named_parameters()[p.name];
      EXPECT_EQ(layout_of(tensor)[0], placement_of(p.spec, tensor.sizes(), mesh->mesh()));
      EXPECT_TRUE(tensor.is_leaf() && tensor.requires_grad());
    }
    const std::vector<double> got = train(sharded, optimizer, [&](at::Tensor t) {
      return distribute_tensor(t, mesh, Placements{batch}, {.source = std::nullopt});
    });
    for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(got[i], want[i], 1e-5) << "step " << i;
    for (size_t i = 0; i < handles.size(); ++i) {
      EXPECT_TRUE(is_dtensor(handles[i]));
      EXPECT_TRUE(at::allclose(full_tensor(handles[i].detach()), plain->parameters()[i].detach(),
                               1e-4, 1e-5))
          << plain->named_parameters()[i].key();
    }
    EXPECT_EQ(dispatch_counters(mesh).gathered_operators, 0);
  });
}

MakeOptimizer sgd() {
  return [](std::vector<at::Tensor> parameters) {
    return std::make_unique<torch::optim::SGD>(std::move(parameters),
                                               torch::optim::SGDOptions(0.1).momentum(0.9));
  };
}
MakeOptimizer adamw() {
  return [](std::vector<at::Tensor> parameters) {
    return std::make_unique<torch::optim::AdamW>(std::move(parameters),
                                                 torch::optim::AdamWOptions(1e-2));
  };
}

// `total` in n parts, uneven, the second one empty.
std::vector<int64_t> parts(int64_t total, int64_t n) {
  std::vector<int64_t> result(n, 0);
  result[0] = 1;
  result[n - 1] = total - 1;
  if (n == 4) {
    result[2] = 2;
    result[3] -= 2;
  }
  return result;
}

TEST(ShardParameterTest, LinearByRowsAndColumns) {
  for (int64_t n : {2, 3, 4}) {
    for (const Placement& batch : {Replicate(), Shard(0)}) {
      check_training(n, {{"fc.weight", ChunkSpec{0}}}, sgd(), batch);
      check_training(n, {{"fc.weight", ChunkSpec{1}}}, adamw(), batch);
      check_training(n, {{"fc.weight", row_slices(parts(7, n), 6)}}, adamw(), batch);
      check_training(n, {{"fc.weight", column_slices(7, parts(6, n))}}, sgd(), batch);
    }
    check_training(n, {{"fc.bias", ChunkSpec{0, {n - 1}}}}, sgd(), Replicate());
  }
}

TEST(ShardParameterTest, EmbeddingByRowsAndColumns) {
  for (int64_t n : {2, 3, 4}) {
    for (const Placement& batch : {Replicate(), Shard(0)}) {
      check_training(n, {{"words.weight", ChunkSpec{0}}}, adamw(), batch);
      check_training(n, {{"words.weight", ChunkSpec{1}}}, sgd(), batch);
      check_training(n, {{"words.weight", row_slices(parts(11, n), 6)}}, sgd(), batch);
      check_training(n, {{"words.weight", column_slices(11, parts(6, n))}}, adamw(), batch);
    }
  }
}

TEST(ShardParameterTest, SeveralParameters) {
  for (int64_t n : {2, 4}) {
    check_training(n,
                   {{"words.weight", row_slices(parts(11, n), 6)},
                    {"fc.weight", ChunkSpec{0}},
                    {"fc.bias", ChunkSpec{0}},
                    {"out.weight", ChunkSpec{1, {0, 1}}}},
                   adamw(), Replicate());
  }
}

}  // namespace
}  // namespace shardweave
