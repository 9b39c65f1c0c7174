// Units that are laid out in equal segments, and units that stay divided among a few neighbours between
// forward and backward: the numbers of those that are not, to the last bit.
#include <algorithm>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/activation_checkpoint.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/engine/flat_row.h"
#include "shardweave/dtensor/observe/comm_trace.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/modules/deferred_init.h"
#include "shardweave/modules/fully_shard.h"
#include "shardweave/modules/parallelize_module.h"
#include "shardweave/modules/summon_full_params.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/pimpl.h"
#include "torch/optim/adamw.h"

namespace shardweave {
namespace {

using ::testing::HasSubstr;
using testing::on_mesh;
namespace nn = torch::nn;

constexpr int64_t kDim = 5, kHidden = 7, kBatch = 8;

struct BlockImpl : nn::Module {
  BlockImpl() {
    up = register_module("up", nn::Linear(kDim, kHidden));
    down = register_module("down", nn::Linear(kHidden, kDim));
  }
  at::Tensor forward(const at::Tensor& x) { return x + down(at::tanh(up(x))); }
  nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

nn::Sequential make() {
  nn::Sequential model;
  for (int i = 0; i < 3; ++i) model->push_back(Block());
  const c10::AutoGradMode no_grad(false);
  double k = 0;
  for (at::Tensor p : model->parameters()) {
    p.copy_(at::sin(at::arange(p.numel(), at::kFloat) * 0.7 + ++k).view(p.sizes()) * 0.5);
  }
  return model;
}

// Losses, gradients of the last step and parameters, of some steps of AdamW.
std::vector<at::Tensor> trained(const FullyShardOptions& options, const std::vector<MeshDim>& dims,
                                std::vector<CommEvent>* events = nullptr) {
  std::vector<at::Tensor> result;
  on_mesh(dims, [&](const MeshPtr& mesh) {
    nn::Sequential model = make();
    const auto units = fully_shard(*model, mesh, options);
    torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.02));
    std::vector<at::Tensor> values;
    const CommTrace trace(mesh);
    for (int step = 0; step < 4; ++step) {
      const at::Tensor x =
          at::cos(at::arange(kBatch * kDim, at::kFloat).view({kBatch, kDim}) + step);
      const at::Tensor loss =
          model->forward(distribute_tensor(x, mesh, {{"dp", Shard(0)}})).square().sum();
      loss.backward();
      values.push_back(full_tensor(loss).detach());
      if (step < 3) optimizer.step();
      if (step < 3) optimizer.zero_grad();
    }
    for (const at::Tensor& p : model->parameters()) {
      values.push_back(full_tensor(p).detach().clone());
      values.push_back(full_tensor(p.grad()).clone());
    }
    EXPECT_EQ(fully_shard_counters(mesh).gathered_bytes, 0);
    EXPECT_EQ(fully_shard_counters(mesh).wrong_prefetches, 0);
    const auto at = mesh->coordinate();
    if (std::any_of(at.begin(), at.end(), [](int64_t c) { return c != 0; })) return;
    result = values;
    if (events != nullptr) *events = trace.events();
  });
  return result;
}

void expect_equal(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& wanted) {
  ASSERT_EQ(got.size(), wanted.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(at::equal(got[i], wanted[i])) << i;
}

TEST(FullyShardSegmentsTest, EqualSegmentsHaveTheSameBits) {
  for (const int64_t ranks : {1, 2, 3, 4}) {
    for (const bool mixed : {false, true}) {
      FullyShardOptions options = {.units = {"*"}};
      if (mixed) options.param_dtype = at::kBFloat16, options.reduce_dtype = at::kFloat;
      const std::vector<at::Tensor> ragged = trained(options, {{"dp", ranks}});
      options.equal_segments = true;
      expect_equal(trained(options, {{"dp", ranks}}), ragged);
    }
  }
}

TEST(FullyShardSegmentsTest, TheyAreEqualAndTheirPaddingIsTold) {
  for (const int64_t ranks : {2, 3, 4}) {
    on_mesh({{"dp", ranks}}, [&](const MeshPtr& mesh) {
      nn::Sequential model = make();
      const auto units = fully_shard(*model, mesh, {.units = {"*"}, .equal_segments = true});
      ASSERT_EQ(units.size(), 3U);
      const int64_t numel = units[0].numel;
      EXPECT_EQ(numel, 2 * kDim * kHidden + kDim + kHidden);
      EXPECT_EQ((numel + units[0].padding) % ranks, 0);
      // A cut moves a tensor by less than a row, and lengths are of whole rows.
      EXPECT_LE(units[0].padding, ranks * 2 * kHidden);
      EXPECT_THAT(to_string(units), HasSubstr("padding"));
      EXPECT_THAT(to_json(units), HasSubstr(absl::StrCat("\"padding\":", units[0].padding)));
      for (const at::Tensor& p : model->parameters()) {
        // All of a unit lie in one memory, which is as long everywhere.
        EXPECT_EQ(static_cast<int64_t>(to_local(p).storage().nbytes()),
                  (numel + units[0].padding) / ranks * 4);
      }
      // What is sent is the padding, too.
      const CommTrace trace(mesh);
      model->forward(distribute_tensor(at::ones({kBatch, kDim}), mesh, {{"dp", Shard(0)}}));
      int gathers = 0;
      for (const CommEvent& event : trace.events()) {
        if (event.collective != "all_gather") continue;
        ++gathers;
        EXPECT_EQ(event.bytes, (numel + units[0].padding) / ranks * (ranks - 1) * 4);
      }
      EXPECT_EQ(gathers, 3);
      const FullParams whole(*model);
      EXPECT_TRUE(at::equal(whole.parameter("1.up.weight"),
                            make()->named_parameters()["1.up.weight"].detach()));
    });
  }
}

TEST(FullyShardSegmentsTest, PlansOfManyShapes) {
  on_mesh({{"dp", 4}}, [](const MeshPtr& mesh) {
    using dtensor_internal::EqualSegments;
    const auto context = dtensor_internal::MeshContext::of(mesh);
    const std::vector<std::vector<Dims>> cases = {
        {{4}},
        {{1, 1, 8}},
        {{7, 5}, {7}, {5, 7}, {5}},
        {{3, 1000}},
        {{100, 3}},
        {{1, 64}, {64, 1}, {2, 3, 4}},
        {{13, 11}, {3}, {11, 13}, {2}},
        {{1}, {1}, {1}, {1}, {1}},
    };
    for (const auto& shapes : cases) {
      std::vector<SpecRef> whole;
      int64_t total = 0;
      for (const Dims& sizes : shapes) {
        whole.push_back(context->intern(Layout(Placements(1)), sizes, contiguous_strides(sizes),
                                        at::kFloat, at::kCPU));
        total += whole.back()->numel();
      }
      const EqualSegments plan = dtensor_internal::equal_segments(whole, mesh->mesh(), 0);
      EXPECT_EQ(plan.refusal, "");
      EXPECT_EQ(plan.padding, 4 * plan.segment - total);
      int64_t end = 0;
      for (size_t i = 0; i < shapes.size(); ++i) {
        EXPECT_GE(plan.begins[i], end);  // none lies on another
        end = plan.begins[i] + whole[i]->numel();
        const dtensor_internal::FlatRow row(context, 0, whole, plan.layouts, at::kFloat, at::kCPU,
                                            plan.begins, plan.segment);
        int64_t at = plan.begins[i];
        for (size_t r = 0; r < 4; ++r) {
          const int64_t count = row[i].counts[r];
          if (count == 0) continue;
          EXPECT_GE(at, static_cast<int64_t>(r) * plan.segment);
          at += count;
          EXPECT_LE(at, (static_cast<int64_t>(r) + 1) * plan.segment);
        }
        EXPECT_EQ(at, end);
      }
      EXPECT_LE(end, 4 * plan.segment);
    }
  });
}

TEST(FullyShardSegmentsTest, NeighboursGiveWhatForwardLeftThem) {
  for (const int64_t among : {1, 2, 4}) {
    for (const bool mixed : {false, true}) {
      FullyShardOptions options = {.units = {"*"}};
      if (mixed) options.param_dtype = at::kBFloat16;
      const std::vector<MeshDim> dims = {{"dp", 4}};
      std::vector<CommEvent> before, after;
      const std::vector<at::Tensor> wanted = trained(options, dims, &before);
      options.reshard_after_forward_ranks = among;
      expect_equal(trained(options, dims, &after), wanted);
      const auto gathered = [](const std::vector<CommEvent>& events) {
        int64_t bytes = 0;
        for (const CommEvent& e : events) bytes += e.collective == "all_gather" ? e.bytes : 0;
        return bytes;
      };
      const int64_t most = gathered(before), fewer = gathered(after);
      EXPECT_EQ(fewer < most, among < 4) << fewer << " of " << most;
      EXPECT_LE(fewer, most);
    }
  }
}

TEST(FullyShardSegmentsTest, NeighboursKeepTheirParts) {
  on_mesh({{"dp", 4}}, [](const MeshPtr& mesh) {
    nn::Sequential model = make();
    const auto units =
        fully_shard(*model, mesh, {.units = {"*"}, .reshard_after_forward_ranks = 2});
    const at::Tensor x = distribute_tensor(at::ones({kBatch, kDim}), mesh, {{"dp", Shard(0)}});
    const at::Tensor loss = model->forward(x).sum();
    const int64_t unit = units[0].numel * 4;
    // The last one is full, and of two others a half is here.
    EXPECT_NEAR(static_cast<double>(fully_shard_counters(mesh).gathered_bytes),
                static_cast<double>(2 * unit), 8);
    // What is written is gathered from all.
    {
      const c10::AutoGradMode no_grad(false);
      for (const at::Tensor& p : model->parameters()) p.mul_(2);
    }
    nn::Sequential twin = make();
    const c10::AutoGradMode no_grad(false);
    for (const at::Tensor& p : twin->parameters()) p.mul_(2);
    EXPECT_TRUE(at::allclose(full_tensor(model->forward(x)),
                             twin->forward(at::ones({kBatch, kDim})), 1e-5, 1e-5));
    reshard(mesh);
    EXPECT_EQ(fully_shard_counters(mesh).gathered_bytes, 0);
  });
  // Backward comes behind a checkpoint's first run, which records nothing.
  on_mesh({{"dp", 4}}, [](const MeshPtr& mesh) {
    nn::Sequential model = make();
    const auto units =
        fully_shard(*model, mesh, {.units = {"*"}, .reshard_after_forward_ranks = 2});
    const at::Tensor x = distribute_tensor(at::ones({kBatch, kDim}), mesh, {{"dp", Shard(0)}});
    const at::Tensor loss =
        checkpoint([&](const at::Tensor& in) { return model->forward(in); }, x).sum();
    EXPECT_NEAR(static_cast<double>(fully_shard_counters(mesh).gathered_bytes),
                static_cast<double>(2 * units[0].numel * 4), 8);
    loss.backward();
    EXPECT_EQ(fully_shard_counters(mesh).gathered_bytes, 0);
  });
  // Nothing is kept where no backward comes.
  on_mesh({{"dp", 4}}, [](const MeshPtr& mesh) {
    nn::Sequential model = make();
    const auto units =
        fully_shard(*model, mesh, {.units = {"*"}, .reshard_after_forward_ranks = 2});
    const c10::AutoGradMode no_grad(false);
    model->forward(distribute_tensor(at::ones({kBatch, kDim}), mesh, {{"dp", Shard(0)}}));
    EXPECT_EQ(fully_shard_counters(mesh).gathered_bytes, units[2].numel * 4);
  });
}

void expect_refused(const std::vector<MeshDim>& dims, const FullyShardOptions& options,
                    const std::string& text, const ParameterPlan& plan = {}) {
  on_mesh(dims, [&](const MeshPtr& mesh) {
    nn::Sequential model = make();
    if (!plan.empty()) parallelize_module(*model, mesh, {.parameter = plan});
    try {
      fully_shard(*model, mesh, options);
      ADD_FAILURE() << "no error: " << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.status().code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(error.what(), HasSubstr(text));
    }
    fully_shard(*model, mesh, {.mesh_dim = "dp"});  // nothing was changed
  });
}

TEST(FullyShardSegmentsTest, BadInput) {
  for (const int64_t among : {3, -1, 8}) {
    expect_refused({{"dp", 4}}, {.reshard_after_forward_ranks = among},
                   "wanted a divisor of the 4 ranks along 'dp', or 0");
  }
  expect_refused({{"dp", 4}}, {.reshard_after_forward = false, .reshard_after_forward_ranks = 2},
                 "without reshard_after_forward");
  expect_refused({{"dp", 2}, {"tp", 2}}, {.mesh_dim = "dp", .equal_segments = true}, "cut evenly",
                 {{"*.up.*", {{"tp", Shard(0)}}}});
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    nn::Sequential model = make();
    const bool first = mesh->coordinate()[0] == 0;
    EXPECT_THROW(fully_shard(*model, mesh, {.equal_segments = first}), Error);
    EXPECT_THROW(fully_shard(*model, mesh, {.reshard_after_forward_ranks = first ? 1 : 2}), Error);
    fully_shard(*model, mesh);
  });
}

}  // namespace
}  // namespace shardweave
