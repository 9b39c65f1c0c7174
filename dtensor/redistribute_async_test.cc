// Redistribution that does not wait, and of many tensors at once: values, gradients, overlap, and
// how many collectives.
#include "shardweave/dtensor/redistribute_async.h"

#include <algorithm>
#include <functional>
#include <future>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/testing/counted_mesh.h"
#include "shardweave/dtensor/testing/on_mesh.h"

namespace shardweave {
namespace {

using testing::all_layouts;
using testing::Carrier;
using ::testing::HasSubstr;
using testing::on_counted_mesh;
using testing::on_mesh;
using testing::scattered;
using testing::Sent;

at::Tensor numbers(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) {
  int64_t n = 1;
  for (int64_t s : sizes) n *= s;
  return at::arange(1, n + 1, dtype).view(sizes);
}

TEST(RedistributeAsyncTest, TheSameAsRedistribute) {
  for (const std::vector<MeshDim>& dims :
       {std::vector<MeshDim>{{"x", 3}}, std::vector<MeshDim>{{"x", 2}, {"y", 2}}}) {
    on_mesh(dims, [&](const MeshPtr& mesh) {
      const at::Tensor whole = numbers({7, 5});
      const auto layouts = all_layouts(static_cast<int>(dims.size()), 2, true);
      for (const Placements& from : layouts) {
        for (const Placements& to : layouts) {
          SCOPED_TRACE(to_string(from) + " -> " + to_string(to));
          const at::Tensor start = scattered(whole, mesh, from);
          PendingTensor pending = redistribute_async(start, to);
          const at::Tensor end = pending.wait();
          EXPECT_TRUE(pending.done());
          EXPECT_TRUE(pending.wait().is_same(end));
          EXPECT_EQ(layout_of(end), Layout(to));
          EXPECT_TRUE(at::equal(to_local(end), to_local(redistribute(start, to))));
          EXPECT_TRUE(at::equal(full_tensor(end), whole));
        }
      }
    });
  }
}

// Rank 1 begins only when rank 0 has come back from redistribute_async(): if that waited for rank
// 1, nobody would go on.
TEST(RedistributeAsyncTest, DoesNotWaitForOtherRanks) {
  for (Carrier carrier : {Carrier::kInproc, Carrier::kGloo}) {
    std::promise<void> issued;
    std::shared_future<void> rank_0_goes_on = issued.get_future().share();
    on_counted_mesh({{"x", 2}}, carrier, [&](const MeshPtr& mesh, Sent&) {
      const at::Tensor whole = numbers({64, 33});
      std::vector<at::Tensor> start;
      const std::vector<Placements> from = {{Shard(0)}, {Partial()}, {Shard(1)}, {Partial()}};
      const std::vector<Placements> to = {{Replicate()}, {Replicate()}, {Shard(0)}, {Shard(1)}};
      for (const Placements& p : from) start.push_back(scattered(whole, mesh, p));
      full_tensor(start[0]);  // the group is there
      if (mesh->rank().value == 1) rank_0_goes_on.wait();
      std::vector<PendingTensor> pending;
      for (size_t i = 0; i < start.size(); ++i) {
        pending.push_back(redistribute_async(start[i], to[i]));
      }
      if (mesh->rank().value == 0) {
        for (const PendingTensor& p : pending) EXPECT_FALSE(p.done());
        issued.set_value();
      }
      // Waited for in another order than issued; plans of one collective allow that.
      for (size_t i = pending.size(); i-- > 0;) {
        EXPECT_TRUE(at::equal(full_tensor(pending[i].wait()), whole));
      }
    });
  }
}

TEST(RedistributeAsyncTest, PlansOfSeveralCollectivesGoOnInWait) {
  on_mesh({{"x", 2}, {"y", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor whole = numbers({8, 6});
    const at::Tensor a = scattered(whole, mesh, {Partial(), Shard(0)});
    std::vector<PendingTensor> pending;
    for (int i = 0; i < 3; ++i) {
      pending.push_back(redistribute_async(a, {Replicate(), Replicate()}));
      pending.push_back(redistribute_async(a, {Shard(1), Partial()}));
    }
    for (PendingTensor& p : pending) EXPECT_TRUE(at::equal(full_tensor(p.wait()), whole));
  });
}

TEST(RedistributeAsyncTest, GradientsFlowBack) {
  on_mesh({{"x", 2}, {"y", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor whole = numbers({7, 5});
    const at::Tensor weights = distribute_tensor(whole, mesh, Placements(2));
    for (const Placements& from : all_layouts(2, 2, false)) {
      for (const Placements& to : all_layouts(2, 2, true)) {
        SCOPED_TRACE(to_string(from) + " -> " + to_string(to));
        const at::Tensor leaf = distribute_tensor(whole, mesh, from).requires_grad_();
        PendingTensor pending = redistribute_async(leaf, to);
        const c10::AutoGradMode off(false);  // of waiting, not of the redistribution
        const at::Tensor arrived = pending.wait();
        const c10::AutoGradMode on(true);
        (arrived * weights).sum().backward();
        ASSERT_TRUE(leaf.grad().defined());
        EXPECT_EQ(layout_of(leaf.grad()), Layout(from));
        EXPECT_TRUE(at::equal(full_tensor(leaf.grad()), whole));
      }
    }
    const c10::AutoGradMode off(false);
    const at::Tensor leaf = distribute_tensor(whole, mesh, Placements{Shard(0), Shard(0)});
    leaf.requires_grad_();
    EXPECT_FALSE(redistribute_async(leaf, Placements(2)).wait().requires_grad());
  });
}

TEST(RedistributeAsyncTest, WritingMeanwhileIsAnError) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const std::function<void(const at::Tensor&)> kWrites[] = {
        [](const at::Tensor& a) { a.add_(1); },
        [](const at::Tensor& a) { to_local(a).add_(1); },
        [](const at::Tensor& a) { a.data().mul_(0.9); },
        [](const at::Tensor& a) { a.detach().zero_(); },
        [](const at::Tensor& a) { a.select(1, 2).add_(1); },
    };
    for (size_t w = 0; w < std::size(kWrites); ++w) {
      const at::Tensor a = distribute_tensor(numbers({4, 4}), mesh, Placements{Shard(0)});
      PendingTensor pending = redistribute_async(a, {Replicate()});
      kWrites[w](a);
      try {
        pending.wait();
        ADD_FAILURE() << "no error of write " << w;
      } catch (const Error& error) {
        EXPECT_EQ(error.status().code(), absl::StatusCode::kFailedPrecondition);
        EXPECT_THAT(std::string(error.status().message()), HasSubstr("was written"));
      }
    }
  });
}

TEST(RedistributeAsyncTest, MayBeDropped) {
  on_mesh({{"x", 3}}, [](const MeshPtr& mesh) {
    for (int i = 0; i < 20; ++i) {
      redistribute_async(distribute_tensor(at::ones({300, 7}), mesh, Placements{Shard(0)}),
                         {Replicate()});
    }
    EXPECT_EQ(at::ones({5}).sum().item<float>(), 5);
  });
}

TEST(RedistributeAsyncTest, WhatDoesNotFitIsRefusedBeforeAnythingIsSent) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor a = distribute_tensor(at::ones({4}), mesh, Placements{Shard(0)});
    EXPECT_THROW(redistribute_async(a, {Shard(1)}), Error);
    EXPECT_THROW(redistribute_async(a, {Shard(0), Shard(0)}), Error);
    EXPECT_THROW(redistribute_async(at::ones({4}), {Shard(0)}), Error);
    const std::vector<at::Tensor> two = {a, a};
    const Layout r({Replicate()});
    EXPECT_THROW(redistribute_all(two, {r}), Error);
    EXPECT_THROW(redistribute_all(two, {r, Layout({Shard(1)})}), Error);
    EXPECT_THROW(redistribute_all({a, at::ones({4})}, {r, r}), Error);
    EXPECT_TRUE(redistribute_all({}, {}).empty());
    EXPECT_TRUE(at::equal(full_tensor(a), at::ones({4})));  // the ranks are still together
  });
}

TEST(RedistributeAllTest, TheSameAsOneByOne) {
  for (const std::vector<MeshDim>& dims :
       {std::vector<MeshDim>{{"x", 3}}, std::vector<MeshDim>{{"x", 2}, {"y", 2}}}) {
    on_mesh(dims, [&](const MeshPtr& mesh) {
      std::vector<at::Tensor> tensors;
      std::vector<Layout> layouts;
      std::vector<at::Tensor> wholes;
      const auto placements = all_layouts(static_cast<int>(dims.size()), 2, true);
      int i = 0;
      for (const Placements& from : placements) {
        for (const Placements& to : placements) {
          const std::vector<int64_t> sizes = {1 + i % 7, 1 + i % 4};
          wholes.push_back(numbers(sizes, i % 3 == 0 ? at::kDouble : at::kFloat));
          tensors.push_back(scattered(wholes.back(), mesh, from));
          layouts.emplace_back(to);
          ++i;
        }
      }
      const std::vector<at::Tensor> results = redistribute_all(tensors, layouts);
      ASSERT_EQ(results.size(), tensors.size());
      for (size_t k = 0; k < results.size(); ++k) {
        SCOPED_TRACE(
            absl::StrCat(layout_of(tensors[k]).to_string(), " -> ", layouts[k].to_string()));
        EXPECT_EQ(layout_of(results[k]), layouts[k]);
        EXPECT_TRUE(
            at::equal(to_local(results[k]), to_local(redistribute(tensors[k], layouts[k]))));
        EXPECT_TRUE(at::equal(full_tensor(results[k]), wholes[k]));
      }
    });
  }
}

TEST(RedistributeAllTest, WritingOneResultChangesNoOther) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor a = scattered(numbers({5, 3}), mesh, {Partial()});
    const at::Tensor b = distribute_tensor(numbers({5, 3}), mesh, Placements{Shard(0)});
    const Layout r({Replicate()});
    const std::vector<at::Tensor> results = redistribute_all({a, a, b, b}, {r, r, r, r});
    results[0].fill_(7);
    results[2].fill_(7);
    EXPECT_TRUE(at::equal(full_tensor(results[1]), numbers({5, 3})));
    EXPECT_TRUE(at::equal(full_tensor(results[3]), numbers({5, 3})));
    EXPECT_TRUE(at::equal(full_tensor(a), numbers({5, 3})));
    EXPECT_TRUE(at::equal(full_tensor(b), numbers({5, 3})));
  });
}

// The gate: how many collectives there are.
TEST(RedistributeAllTest, SmallTensorsShareCollectives) {
  struct Case {
    Placement from, to;
    size_t collectives;  // of 50 float tensors, and of 50 float and 50 double ones
    size_t with_doubles;
  };
  const Case cases[] = {{Shard(0), Replicate(), 1, 2},        {Partial(), Replicate(), 1, 2},
                        {Partial(), Shard(0), 1, 2},          {Shard(0), Shard(1), 1, 2},
                        {Shard(0), StridedShard(0, 2), 1, 2}, {Replicate(), Shard(0), 0, 0}};
  for (const Case& c : cases) {
    SCOPED_TRACE(c.from.to_string() + " -> " + c.to.to_string());
    std::vector<Sent> sent =
        on_counted_mesh({{"x", 2}}, Carrier::kInproc, [&](const MeshPtr& mesh, Sent& log) {
          std::vector<at::Tensor> tensors;
          for (int i = 0; i < 100; ++i) {
            tensors.push_back(
                scattered(numbers({2 + i % 5, 2 + i % 3}, i < 50 ? at::kFloat : at::kDouble), mesh,
                          {c.from}));
          }
          const std::vector<Layout> layouts(100, Layout({c.to}));
          log.clear();
          redistribute_all(absl::MakeConstSpan(tensors).first(50),
                           absl::MakeConstSpan(layouts).first(50));
          EXPECT_EQ(log.size(), c.collectives);
          log.clear();
          redistribute_all(tensors, layouts);
        });
    for (const Sent& log : sent) {
      // The barrier at the end is not among them.
      const auto collectives = std::count_if(
          log.begin(), log.end(), [](const auto& s) { return s.op != OpKind::kBarrier; });
      EXPECT_EQ(collectives, c.with_doubles);
    }
  }
}

TEST(RedistributeAllTest, LargeTensorsTravelAlone) {
  on_counted_mesh({{"x", 2}}, Carrier::kInproc, [](const MeshPtr& mesh, Sent& log) {
    const at::Tensor large = distribute_tensor(at::ones({600, 600}), mesh, Placements{Shard(0)});
    const at::Tensor small = distribute_tensor(at::ones({6, 6}), mesh, Placements{Shard(0)});
    log.clear();
    redistribute_all({small, large, small, large}, std::vector<Layout>(4, Layout({Replicate()})));
    EXPECT_EQ(log.size(), 3u);
  });
}

TEST(RedistributeAllTest, GradientsShareCollectivesToo) {
  on_counted_mesh({{"x", 2}}, Carrier::kInproc, [](const MeshPtr& mesh, Sent& log) {
    std::vector<at::Tensor> leaves;
    for (int i = 0; i < 20; ++i) {
      leaves.push_back(
          distribute_tensor(numbers({3 + i, 4}), mesh, Placements{Shard(0)}).requires_grad_());
    }
    const at::Tensor unused = distribute_tensor(at::ones({3}), mesh, Placements{Shard(0)});
    leaves.push_back(unused.detach().requires_grad_());
    const std::vector<Layout> layouts(leaves.size(), Layout({Shard(1)}));
    std::vector<Layout> to = layouts;
    to.back() = Layout({Replicate()});
    const std::vector<at::Tensor> moved = redistribute_all(leaves, to);
    at::Tensor loss;
    for (int i = 0; i < 20; ++i) {
      const at::Tensor term = moved[i].pow(2).sum();
      loss = i == 0 ? term : loss + term;
    }
    log.clear();
    loss.backward();
    const auto moves = std::count_if(log.begin(), log.end(),
                                     [](const auto& s) { return s.op == OpKind::kAllToAllV; });
    EXPECT_EQ(moves, 1);
    for (int i = 0; i < 20; ++i) {
      EXPECT_EQ(layout_of(leaves[i].grad())[0], Shard(0));
      EXPECT_TRUE(at::equal(full_tensor(leaves[i].grad()), 2 * numbers({3 + i, 4})));
    }
    EXPECT_FALSE(leaves.back().grad().defined());
  });
}

}  // namespace
}  // namespace shardweave
