// Tied weights are one tensor, views are refused, ranks that start apart are found out, and a
// gradient that moves leaves alone who else holds it.
#include "shardweave/dtensor/distribute_module.h"

#include <functional>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/observe/comm_trace.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/batchnorm.h"
#include "torch/nn/modules/container/sequential.h"

namespace shardweave {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::on_mesh;

// A language model that reads and writes with one matrix.
struct Tied : torch::nn::Module {
  Tied() {
    embedding = register_parameter("embedding", at::arange(35, at::kFloat).reshape({7, 5}));
    scale = register_parameter("scale", at::ones({5}));
    register_parameter("head", embedding);
  }
  at::Tensor embedding;
  at::Tensor scale;
};

// The tensors of a module by name.
struct Bag : torch::nn::Module {
  at::Tensor parameter(const std::string& name, at::Tensor tensor) {
    return register_parameter(name, std::move(tensor));
  }
  at::Tensor buffer(const std::string& name, at::Tensor tensor) {
    return register_buffer(name, std::move(tensor));
  }
};

void expect_refused(torch::nn::Module& module, const MeshPtr& mesh, const ParameterPlan& plan,
                    const DistributeOptions& options, const ::testing::Matcher<std::string>& text) {
  try {
    distribute_module(module, mesh, plan, options);
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(error.status().message()), text);
  }
  for (const at::Tensor& tensor : module.parameters()) EXPECT_FALSE(is_dtensor(tensor));
  for (const at::Tensor& tensor : module.buffers()) EXPECT_FALSE(is_dtensor(tensor));
}

TEST(DistributeModuleTest, ATensorWithTwoNamesStaysOneAndAnyOfThemDecides) {
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    const ParameterPlan plans[] = {
        {{"embedding", {{"tp", Shard(0)}}}},
        {{"head", {{"tp", Shard(0)}}}},  // the first name, which no entry matches, says nothing
        {{"*e*d*", {{"tp", Shard(0)}}}},
        {{"head", {{"tp", Shard(0)}}}, {"{head,embedding}", {{"tp", Shard(0)}}}},
    };
    for (const ParameterPlan& plan : plans) {
      Tied model;
      distribute_module(model, mesh, plan);
      ASSERT_TRUE(is_dtensor(model.embedding));
      EXPECT_EQ(layout_of(model.embedding).placements(), Placements{Shard(0)});
      EXPECT_EQ(layout_of(model.scale).placements(), Placements{Replicate()});
      EXPECT_TRUE(model.named_parameters()["head"].is_same(model.embedding));
      EXPECT_TRUE(
          at::equal(full_tensor(model.embedding), at::arange(35, at::kFloat).reshape({7, 5})));
    }
  });
}

TEST(DistributeModuleTest, NamesOfOneTensorHaveToAgree) {
  on_mesh({{"dp", 2}, {"tp", 2}}, [](const MeshPtr& mesh) {
    Tied model;
    expect_refused(model, mesh, {{"emb*", {{"tp", Shard(0)}}}, {"h?ad", {{"tp", Shard(1)}}}}, {},
                   AllOf(HasSubstr("'embedding' and 'head' are one tensor"),
                         HasSubstr("[R, S(0)] by the plan's entry 1, 'emb*'"),
                         HasSubstr("[R, S(1)] by the plan's entry 2, 'h?ad'")));
    // An explicit Replicate is a placement as any other.
    expect_refused(
        model, mesh, {{"head", {}}, {"embedding", {{"tp", Shard(0)}}}}, {},
        AllOf(HasSubstr("two placements: [R, S(0)] by the plan's entry 2, 'embedding', "),
              HasSubstr("[R, R] by the plan's entry 1, 'head'"),
              HasSubstr("; write one entry in place of both, '{embedding,head}'")));
    // A buffer is one of the names, too.
    Bag bag;
    const at::Tensor w = bag.parameter("w", at::ones({4}));
    bag.buffer("copy", w);
    expect_refused(bag, mesh, {{"w", {{"tp", Shard(0)}}}, {"copy", {{"dp", Shard(0)}}}}, {},
                   HasSubstr("'w' and 'copy' are one tensor"));
  });
}

std::string what_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

TEST(DistributeModuleTest, ErrorsNameTheEntryAndWhatItMatches) {
  on_mesh({{"dp", 2}, {"tp", 2}}, [](const MeshPtr& mesh) {
    const std::pair<ParameterPlan, std::string> cases[] = {
        {{{"scale", {}}, {"emb*", {{"pp", Shard(0)}}}},
         "distribute_module: the plan's entry 2, 'emb*' ('embedding'): DeviceMesh(dp=2, tp=2) has "
         "no "
         "dimension \"pp\""},
        {{{"s*", {{"dp", Shard(0)}, {"dp", Shard(0)}}}},
         "distribute_module: the plan's entry 1, 's*' ('scale'): mesh dimension 'dp' is given two"},
        {{{"*", {{"tp", Partial()}}}},
         "distribute_module: the plan's entry 1, '*' ('embedding'): [R, P(sum)] has a Partial"},
        {{{"{scale,head", {{"tp", Shard(0)}}}},
         "distribute_module: the plan's entry 1, '{scale,head' has a '{' without a '}'"},
        {{{"scale}", {{"tp", Shard(0)}}}}, "'scale}' has a '}' without a '{'"},
        {{{"{scale,{head}}", {{"tp", Shard(0)}}}}, "has a '{' inside of '{...}'"},
        {{{"sc*", {{"tp", Shard(1)}}}},
         "distribute_module: 'scale': the layout [R, S(1)] does not fit a tensor of 1 dimension: "},
        {{{"sc*", {{"tp", Shard(1)}}}}, "by the plan's entry 1, 'sc*'"},
        {{{"scale", {{"tp", RaggedShard(0, {1, 1})}}}}, "by the plan's entry 1, 'scale'"},
    };
    for (const auto& [plan, text] : cases) {
      Tied model;
      EXPECT_THAT(what_of([&, &p = plan] { distribute_module(model, mesh, p); }), HasSubstr(text));
      EXPECT_FALSE(is_dtensor(model.embedding));
    }
    EXPECT_THAT(what_of([&] { distribute_tensor(at::ones({4}), mesh, {{"pp", Shard(0)}}); }),
                HasSubstr("distribute_tensor: DeviceMesh(dp=2, tp=2) has no dimension \"pp\""));
    const at::Tensor x = zeros({4}, mesh, {Shard(0), Replicate()});
    EXPECT_THAT(what_of([&] { redistribute(x, {{"pp", Shard(0)}}); }),
                HasSubstr("redistribute: DeviceMesh(dp=2, tp=2) has no dimension \"pp\""));
  });
}

// "*" is for what nothing else is for: no contradiction to an entry for one of the names, whichever
// comes first in the module.
TEST(DistributeModuleTest, TheRestOfAPlanGivesWayToAnEntryForOneOfTheNames) {
  on_mesh({{"dp", 2}, {"tp", 2}}, [](const MeshPtr& mesh) {
    for (const char* name : {"embedding", "head"}) {
      for (const NamedPlacements& placements :
           {NamedPlacements{{"tp", Shard(1)}}, NamedPlacements{}}) {
        Tied model;
        distribute_module(model, mesh, {{name, placements}, {"*", {{"dp", Shard(0)}}}});
        EXPECT_EQ(layout_of(model.embedding).placements(), resolve(mesh->mesh(), placements));
        EXPECT_EQ(layout_of(model.scale).placements(), (Placements{Shard(0), Replicate()}));
      }
    }
    Tied model;
    distribute_module(model, mesh, {{"*", {{"dp", Shard(0)}}}});
    EXPECT_EQ(layout_of(model.embedding).placements(), (Placements{Shard(0), Replicate()}));
  });
}

TEST(DistributeModuleTest, ErrorsSayWhatToWriteInstead) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    torch::nn::Sequential model(torch::nn::BatchNorm2d(4));
    const ParameterPlan all = {{"*", {{"dp", Shard(0)}}}};
    EXPECT_THAT(what_of([&] { distribute_module(*model, mesh, all); }),
                AllOf(HasSubstr("'0.num_batches_tracked'"),
                      HasSubstr("a number has no dimension to cut; add an entry for "
                                "'*.num_batches_tracked' without placements")));
    distribute_module(*model, mesh, {{"*.num_batches_tracked", {}}, all[0]});  // as it says
    EXPECT_THAT(what_of([&] { distribute_module(*model, mesh, all); }),
                AllOf(HasSubstr("is a DTensor already, DTensor[4]"),
                      HasSubstr("; a module is distributed once: for another plan make it anew")));
  });
}

TEST(DistributeModuleTest, ASourceThatIsNoRankIsAnErrorOnAnyMesh) {
  for (const int64_t ranks : {1, 2}) {
    on_mesh({{"x", ranks}}, [&](const MeshPtr& mesh) {
      for (const int64_t source : {ranks, int64_t{5}, int64_t{-1}}) {
        Tied model;
        torch::nn::Module empty;
        const std::string text = absl::StrCat("the source is rank ", source, " of DeviceMesh(x=");
        EXPECT_THAT(what_of([&] { distribute_module(model, mesh, {}, {.source = source}); }),
                    HasSubstr("distribute_module: " + text));
        EXPECT_FALSE(is_dtensor(model.scale));
        EXPECT_THAT(what_of([&] { distribute_module(empty, mesh, {}, {.source = source}); }),
                    HasSubstr("distribute_module: " + text));
        EXPECT_THAT(what_of([&] {
                      distribute_tensor(at::ones({4}), mesh, {{"x", Shard(0)}}, {.source = source});
                    }),
                    HasSubstr("distribute_tensor: " + text));
      }
    });
  }
}

TEST(DistributeModuleTest, DifferentTensorsOverTheSameMemoryAreRefused) {
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor memory = at::arange(20, at::kFloat);
    {
      Bag bag;
      bag.parameter("whole", memory.detach());
      bag.parameter("z", at::ones({3}));
      bag.buffer("part", memory.narrow(0, 10, 4).view({2, 2}));
      expect_refused(
          bag, mesh, {}, {},
          AllOf(HasSubstr("'whole' and 'part' are different tensors over the same memory"),
                HasSubstr("under both names")));
    }
    {
      Bag bag;
      bag.parameter("a", memory.detach());
      bag.parameter("b", memory.detach());
      expect_refused(bag, mesh, {}, {}, HasSubstr("'a' and 'b' are different tensors"));
    }
    // Pieces of one buffer that do not overlap are tensors of their own, and an empty one is none.
    Bag bag;
    const at::Tensor a = bag.parameter("a", memory.narrow(0, 0, 10));
    const at::Tensor b = bag.parameter("b", memory.narrow(0, 10, 10));
    bag.parameter("empty", memory.narrow(0, 5, 0));
    distribute_module(bag, mesh, {{"*", {{"tp", Shard(0)}}}});
    EXPECT_TRUE(at::equal(full_tensor(a), memory.narrow(0, 0, 10)));
    EXPECT_TRUE(at::equal(full_tensor(b), memory.narrow(0, 10, 10)));
  });
}

TEST(DistributeModuleTest, WithoutASourceRanksThatStartApartAreFoundOut) {
  on_mesh({{"dp", 2}, {"tp", 2}}, [](const MeshPtr& mesh) {
    const int64_t rank = mesh->coordinate()[0] * 2 + mesh->coordinate()[1];
    for (const bool buffer : {false, true}) {
      Bag bag;
      bag.parameter("same", at::ones({7, 5}));
      bag.parameter("noncontiguous", at::arange(35, at::kFloat).reshape({5, 7}).t());
      at::Tensor odd = at::ones({3});
      if (rank == 2) odd[2] = 1.5;
      if (buffer) bag.buffer("odd", odd);
      if (!buffer) bag.parameter("odd", odd);
      bag.buffer("later", at::full({2}, rank));
      expect_refused(
          bag, mesh, {{"*", {{"tp", Shard(0)}}}}, {.source = std::nullopt},
          AllOf(HasSubstr("'odd': is not the same on ranks 0 and 2"), HasSubstr("name a source")));
    }
    Bag shapes;
    shapes.parameter("w", at::ones({rank == 3 ? 4 : 5}));
    expect_refused(shapes, mesh, {}, {.source = std::nullopt},
                   HasSubstr("'w': is not the same on ranks 0 and 3"));
    Bag plans;
    plans.parameter("w", at::ones({5}));
    expect_refused(plans, mesh, {{"w", {{rank == 1 ? "dp" : "tp", Shard(0)}}}},
                   {.source = std::nullopt}, HasSubstr("'w': is not the same on ranks 0 and 1"));
  });
}

TEST(DistributeModuleTest, WithoutASourceOneCollectiveAsksForAllTensors) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    Bag bag;
    for (int i = 0; i < 20; ++i) bag.parameter("p" + std::to_string(i), at::ones({7, 5}));
    CommTrace trace(mesh);
    distribute_module(bag, mesh, {{"*", {{"dp", Shard(0)}}}}, {.source = std::nullopt});
    ASSERT_EQ(trace.events().size(), 1u);
    EXPECT_EQ(trace.events()[0].collective, "all_reduce");
    EXPECT_EQ(trace.events()[0].op, "distribute_module");
    EXPECT_TRUE(trace.events()[0].is_check);
    EXPECT_EQ(trace.events()[0].bytes, 3 * 2 * 8);  // of all of them, whatever their number
  });
}

TEST(DistributeModuleTest, UniqueParametersHasEachTensorOnce) {
  Tied model;
  EXPECT_EQ(model.parameters().size(), 3u);
  const std::vector<at::Tensor> unique = unique_parameters(model);
  ASSERT_EQ(unique.size(), 2u);
  EXPECT_TRUE(unique[0].is_same(model.embedding) || unique[1].is_same(model.embedding));
  EXPECT_TRUE(unique[0].is_same(model.scale) || unique[1].is_same(model.scale));
  const at::Tensor a = at::ones({1}), b = at::ones({1});
  const std::vector<at::Tensor> of_list = unique_parameters({b, a, b, a});
  ASSERT_EQ(of_list.size(), 2u);
  EXPECT_TRUE(of_list[0].is_same(b));
  EXPECT_TRUE(of_list[1].is_same(a));
}

TEST(FinishGradSyncTest, ATiedGradientTravelsOnce) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    Tied model;
    distribute_module(model, mesh, {});
    model.embedding.mutable_grad() = testing::scattered(at::ones({7, 5}), mesh, {Partial()});
    CommTrace trace(mesh);
    finish_grad_sync(model);
    ASSERT_EQ(trace.events().size(), 1u);
    EXPECT_EQ(trace.events()[0].shape, (std::vector<int64_t>{7, 5}));
    EXPECT_TRUE(at::equal(full_tensor(model.embedding.grad()), at::ones({7, 5})));
  });
}

TEST(FinishGradSyncTest, WhoElseHoldsTheGradientKeepsIt) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor ones = at::ones({4, 3});
    at::Tensor w = zeros({4, 3}, mesh, {Shard(0)}).requires_grad_();
    w.mutable_grad() = testing::scattered(ones, mesh, {Partial()});
    const at::Tensor handle = w.grad();
    const at::Tensor view = w.grad().view({12});
    finish_grad_sync({w});
    EXPECT_EQ(layout_of(w.grad()).placements(), Placements{Shard(0)});
    w.mutable_grad().mul_(3);
    EXPECT_TRUE(at::equal(full_tensor(w.grad()), 3 * ones));
    // A tensor and its view go on as one.
    EXPECT_EQ(layout_of(handle).placements(), Placements{Partial()});
    handle.mul_(2);
    EXPECT_TRUE(at::equal(full_tensor(handle), 2 * ones));
    EXPECT_TRUE(at::equal(full_tensor(view), 2 * ones.view({12})));
    EXPECT_TRUE(at::equal(full_tensor(w.grad()), 3 * ones));
  });
}

// A gradient that is a view of another rank's elements: a copy, brought here, that may be out of
// date.
TEST(FinishGradSyncTest, AGradientThatIsAViewIsUpToDate) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor all = distribute_tensor(at::ones({4, 3}), mesh, Placements{Shard(0)});
    at::Tensor w = zeros({3}, mesh, {Shard(0)}).requires_grad_();
    w.mutable_grad() = all.select(0, 1);
    all.mul_(5);
    finish_grad_sync({w});
    EXPECT_TRUE(at::equal(full_tensor(w.grad()), at::full({3}, 5.)));
  });
}

// Taken for replicated: compared before it is seen, as other plain tensors are.
TEST(FinishGradSyncTest, APlainGradientThatDiffersIsAnErrorBeforeItIsSeen) {
  for (const bool differs : {false, true}) {
    on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
      at::Tensor w = zeros({3}, mesh, {Shard(0)}).requires_grad_();
      w.mutable_grad() = at::full({3}, differs ? 1.0f + mesh->coordinate()[0] : 2.0f);
      finish_grad_sync({w});
      if (!differs) {
        EXPECT_TRUE(at::equal(full_tensor(w.grad()), at::full({3}, 2.0f)));
        return;
      }
      try {
        full_tensor(w.grad());
        ADD_FAILURE() << "no error";
      } catch (const Error& error) {
        EXPECT_THAT(std::string(error.status().message()),
                    HasSubstr("is a plain tensor among DTensors that differs from rank "
                              "to rank"));
      }
    });
  }
}

}  // namespace
}  // namespace shardweave
