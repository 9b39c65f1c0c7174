// What fully_shard() refuses, and how ranks hear of what goes wrong.
#include "shardweave/modules/fully_shard.h"

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/clip_grad_norm.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/modules/parallelize_module.h"
#include "shardweave/modules/testing/tied_net.h"
#include "shardweave/modules/testing/values.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/pimpl.h"

namespace shardweave {
namespace {

using ::testing::HasSubstr;
using testing::on_mesh;
using testing::try_on_mesh;
using namespace testing;
using namespace testing::tied_net;
namespace nn = torch::nn;

void expect_error(const std::vector<MeshDim>& dims, const std::function<void(const MeshPtr&)>& body,
                  absl::StatusCode code, const std::string& text) {
  const absl::Status status = try_on_mesh(dims, body);
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(text));
}

TEST(FullyShardMisuseTest, BadInput) {
  const std::vector<MeshDim> two = {{"dp", 2}};
  using enum absl::StatusCode;
  expect_error(
      two,
      [](const MeshPtr& mesh) {
        Net model;
        fully_shard(*model, mesh);
        fully_shard(*model->block(0), mesh);
      },
      kFailedPrecondition,
      "'down.bias' is in the unit '(rest)'; modules that are units within others come first");
  expect_error(
      {{"dp", 2}, {"more", 1}},
      [](const MeshPtr& mesh) {
        Net model;
        fully_shard(*model->block(0), mesh, {.mesh_dim = "dp"});
        fully_shard(*model, mesh, {.mesh_dim = "more"});
      },
      kInvalidArgument, "is in a unit of another mesh or mesh dimension already");
  expect_error(
      two,
      [](const MeshPtr& mesh) {
        Net model;
        fully_shard(*model, mesh);
        parallelize_module(*model, mesh, ShardingPlan{});
      },
      kFailedPrecondition, "plans come first");
  expect_error(
      two,
      [](const MeshPtr& mesh) {
        Net model;
        distribute_module(*model, mesh, {{"head.weight", {{"dp", Shard(0)}}}});
        fully_shard(*model, mesh);
      },
      kInvalidArgument, "'head.weight': lies [S(0)]: wanted whole along 'dp'");
  expect_error(
      two, [](const MeshPtr& mesh) { fully_shard(*Net(), mesh, {.mesh_dim = "tp"}); }, kNotFound,
      "tp");
  expect_error(
      two, [](const MeshPtr& mesh) { fully_shard(*Net(), mesh, {.units = {"layers.*"}}); },
      kNotFound, "the pattern of units 'layers.*' matches no submodule");
  expect_error(
      two, [](const MeshPtr& mesh) { fully_shard(*Net(), mesh, {.unit_types = {"Layer"}}); },
      kNotFound, "the type of units 'Layer' matches no submodule");
  expect_error(
      two,
      [](const MeshPtr& mesh) {
        fully_shard(*Net(), mesh, {.reshard_after_forward = mesh->coordinate()[0] == 0});
      },
      kInvalidArgument,
      "what the options say is not the same on ranks 0 and 1; here it is reshard_after_forward ");
  expect_error(
      two,
      [](const MeshPtr& mesh) {
        Net model;
        model->norm->bias.set_requires_grad(mesh->coordinate()[0] == 0);
        fully_shard(*model, mesh, {.units = {"blocks.*"}});
      },
      kInvalidArgument, "the unit '(rest)' is not the same on ranks 0 and 1");
  expect_error(
      two, [](const MeshPtr& mesh) { fully_shard(*Net(), mesh, {.units = {"block.0"}}); },
      kNotFound, "did you mean 'blocks.0'");
  expect_error(
      two, [](const MeshPtr& mesh) { fully_shard(*Net(), mesh, {.unit_types = {"Blok"}}); },
      kNotFound, "BlockImpl");
  expect_error(
      two,
      [](const MeshPtr& mesh) {
        fully_shard(*Net(), mesh, {.distribute = {.source = mesh->coordinate()[0]}});
      },
      kInvalidArgument, "is not the same on ranks 0 and 1");
}

// Two modules, of which the second cannot be cut: nothing is.
struct UnevenImpl : nn::Module {
  UnevenImpl() {
    first = register_module("first", nn::Linear(kDim, kHidden));
    second = register_module("second", nn::Linear(kDim, kHidden));
    initialize(*this);
  }
  nn::Linear first{nullptr}, second{nullptr};
};
TORCH_MODULE(Uneven);

TEST(FullyShardMisuseTest, WhatIsRefusedIsRefusedBeforeAnythingChanges) {
  on_mesh({{"dp", 2}, {"tp", 2}}, [](const MeshPtr& mesh) {
    Uneven model;
    distribute_module(*model, mesh, {{"second.weight", {{"tp", RaggedShard(0, {3, 4})}}}});
    model->register_buffer("plain", at::ones({3}));
    const Values before = values_of(*model);
    const Layout whole = layout_of(model->first->weight);
    try {
      fully_shard(*model, mesh, {.mesh_dim = "dp", .units = {"first", "second"}});
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.status().code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(error.what(), HasSubstr("'second.weight'"));
    }
    EXPECT_EQ(layout_of(model->first->weight), whole);
    EXPECT_FALSE(is_dtensor(model->named_buffers()["plain"]));
    expect_close(values_of(*model), before, 0);
  });
  // One rank alone has something against it: all hear of it, and the mesh is as it was.
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    Net model;
    if (mesh->coordinate()[0] == 0) {
      model->register_buffer("sparse", at::ones({3}).to_sparse());
    } else {
      model->register_buffer("sparse", at::ones({3}));
    }
    try {
      fully_shard(*model, mesh, {.units = {"blocks.*"}});
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.status().code(), absl::StatusCode::kInvalidArgument);
    }
    EXPECT_FALSE(is_dtensor(model->head->weight));
    EXPECT_EQ(full_tensor(ones({7, 5}, mesh, {Shard(0)})).sum().item<float>(), 35);
  });
}

TEST(FullyShardMisuseTest, WhatMovesAParameterIsAnError) {
  const std::vector<MeshDim> two = {{"dp", 2}};
  using enum absl::StatusCode;
  const auto sharded = [&](const std::function<void(NetImpl&, const MeshPtr&)>& body) {
    return [body](const MeshPtr& mesh) {
      Net model;
      fully_shard(*model, mesh, {.units = {"blocks.*"}});
      body(*model, mesh);
    };
  };
  expect_error(two, sharded([](NetImpl& m, const MeshPtr&) { m.to(at::kDouble); }),
               kFailedPrecondition, "its data would be replaced");
  expect_error(two, sharded([](NetImpl& m, const MeshPtr&) {
                 const c10::AutoGradMode no_grad(false);
                 m.head->weight.resize_({2, 2});
               }),
               kFailedPrecondition, "'head.weight' rests in its unit's memory");
  expect_error(two, sharded([](NetImpl& m, const MeshPtr& mesh) {
                 const c10::AutoGradMode no_grad(false);
                 at::linalg_norm_out(m.head->weight, ones({4, 6}, mesh, {Shard(0)}));
               }),
               kFailedPrecondition, "a parameter of fully_shard() cannot be resized");
  expect_error(two, sharded([](NetImpl& m, const MeshPtr&) {
                 const c10::AutoGradMode no_grad(false);
                 m.head->weight.t().mul_(2);
               }),
               kFailedPrecondition, "write to the parameter itself");
  // Where nothing moves it is none.
  on_mesh(two, sharded([](NetImpl& m, const MeshPtr& mesh) {
            m.to(at::kCPU);
            m.to(at::kFloat);
            const Batch b = fed(0, mesh);
            m.loss(b.tokens, b.targets).backward();
            EXPECT_EQ(layout_of(m.head->weight.grad()), layout_of(m.head->weight));
            EXPECT_TRUE(layout_of(m.head->weight)[0].is_shard());
          }));
  // Backward would see other values than forward.
  const absl::Status status = try_on_mesh(two, sharded([](NetImpl& m, const MeshPtr& mesh) {
                                            const Batch b = fed(0, mesh);
                                            const at::Tensor loss = m.loss(b.tokens, b.targets);
                                            {
                                              const c10::AutoGradMode no_grad(false);
                                              m.head->weight.mul_(2);
                                            }
                                            EXPECT_THROW(loss.backward(), c10::Error);
                                          }));
  EXPECT_TRUE(status.ok()) << status;
}

TEST(FullyShardMisuseTest, RanksThatGoApartHearOfIt) {
  const absl::Status status = try_on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    Net model;
    fully_shard(*model, mesh, {.units = {"blocks.*"}});
    const Batch b = fed(0, mesh);
    const bool first = mesh->coordinate()[0] == 0;
    model->loss(b.tokens, b.targets, first ? std::vector<int>{0, 1} : std::vector<int>{1, 0})
        .backward();
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  for (const char* unit : {"'fully_shard blocks.0'", "'fully_shard blocks.1'"}) {
    EXPECT_THAT(status.message(), HasSubstr(unit));
  }
}

// A rank without its share of micro-batches, or without the scope that the others are in.
TEST(FullyShardMisuseTest, RanksWithOtherMicroBatchesHearWhichUnit) {
  const auto stranger = [](const MeshPtr& mesh) { return mesh->coordinate()[0] == 1; };
  const auto skips = [&](const MeshPtr& mesh, Net& model) {
    const Batch b = fed(0, mesh);
    for (int i = 0; i < (stranger(mesh) ? 1 : 2); ++i) {
      model->loss(b.tokens, b.targets, {0, 1}).backward();
    }
    clip_grad_norm(model->parameters(), 1);
  };
  const auto forgets_the_scope = [&](const MeshPtr& mesh, Net& model) {
    std::optional<FullyShardNoSync> scope;
    if (!stranger(mesh)) scope.emplace(mesh);
    const Batch b = fed(0, mesh);
    model->loss(b.tokens, b.targets, {0, 1}).backward();
    scope.reset();
    model->loss(b.tokens, b.targets, {0, 1}).backward();
  };
  for (const std::function<void(const MeshPtr&, Net&)>& body :
       {std::function<void(const MeshPtr&, Net&)>(skips), {forgets_the_scope}}) {
    const absl::Status status = try_on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
      Net model;
      fully_shard(*model, mesh, {.units = {"blocks.*"}});
      body(mesh, model);
    });
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(status.message(), HasSubstr("'fully_shard")) << status;
  }
}

TEST(FullyShardMisuseTest, DtypesThatAreWrongOrDifferOnARankAreAnErrorOnAll) {
  for (const bool everywhere : {false, true}) {
    for (int option = 0; option < 3; ++option) {
      on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
        Net model;
        FullyShardOptions options = {.units = {"blocks.*"}};
        std::optional<at::ScalarType>& given = option == 0   ? options.param_dtype
                                               : option == 1 ? options.reduce_dtype
                                                             : options.output_dtype;
        if (everywhere || mesh->coordinate()[0] == 1) given = at::kInt;
        try {
          fully_shard(*model, mesh, options);
          ADD_FAILURE() << "no error";
        } catch (const Error& error) {
          EXPECT_EQ(error.status().code(), absl::StatusCode::kInvalidArgument) << error.status();
          EXPECT_THAT(std::string(error.status().message()),
                      HasSubstr(everywhere ? "_dtype is Int; wanted Half, BFloat16, Float or Double"
                                           : "is not the same on ranks 0 and 1"));
        }
        for (const at::Tensor& p : model->parameters()) EXPECT_FALSE(is_dtensor(p));
        fully_shard(*model, mesh);  // nothing was changed, and the ranks go on together
      });
    }
  }
  expect_error(
      {{"dp", 2}},
      [](const MeshPtr& mesh) {
        fully_shard(*Net(), mesh,
                    {.reduce_dtype = mesh->coordinate()[0] == 0 ? at::kHalf : at::kFloat});
      },
      absl::StatusCode::kInvalidArgument, "is not the same on ranks 0 and 1");
}

}  // namespace
}  // namespace shardweave
