// Joining, cutting, padding, copying and indexing on shards against one device.
#include <functional>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/observe/comm_trace.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/dtensor/testing/op_check.h"

namespace shardweave {
namespace {

using at::Tensor;
using at::indexing::None;
using at::indexing::Slice;
using testing::check_ops;
using testing::in;
using testing::on_mesh;
using testing::Tensors;

Tensors all(const std::vector<Tensor>& tensors) {
  return tensors;
}

TEST(DataMovementRulesTest, Joining) {
  check_ops({
      {"cat",
       {in({4, 3}), in({2, 3})},
       [](const Tensors& x) { return Tensors{at::cat({x[0], x[1], x[0]}, 0)}; }},
      {"cat along the last",
       {in({5, 2}), in({5, 3})},
       [](const Tensors& x) { return Tensors{at::cat({x[0], x[1]}, -1)}; }},
      {"cat of types",
       {in({5, 2}).integers(0, 9), in({5, 3})},
       [](const Tensors& x) { return Tensors{at::cat({x[0], x[1]}, 1)}; }},
      {"cat with an empty vector",
       {in({0}).constant(), in({5, 3})},
       [](const Tensors& x) { return Tensors{at::cat({x[0], x[1]}, 1)}; }},
      {"stack",
       {in({4, 3}), in({4, 3})},
       [](const Tensors& x) {
         return Tensors{at::stack({x[0], x[1]}), at::stack({x[0], x[1]}, -1),
                        at::stack({x[0], x[1]}, 1)};
       }},
      {"vstack",
       {in({3}), in({3})},
       [](const Tensors& x) {
         return Tensors{at::vstack({x[0], x[1]}), at::hstack({x[0], x[1]})};
       }},
      {"cat_out",
       {in({4, 3}), in({2, 3})},
       [](const Tensors& x) {
         Tensor out = at::cat({x[0], x[1]}) * 0;
         at::cat_out(out, {x[0], x[1]});
         return Tensors{out};
       },
       false},
  });
}

TEST(DataMovementRulesTest, Cutting) {
  check_ops({
      {"split", {in({7, 3})}, [](const Tensors& x) { return all(x[0].split(3, 0)); }},
      {"split along the last",
       {in({5, 4})},
       [](const Tensors& x) { return all(x[0].split(2, -1)); }},
      {"split_with_sizes",
       {in({5, 6})},
       [](const Tensors& x) { return all(x[0].split_with_sizes({1, 3, 2}, 1)); }},
      {"chunk", {in({5, 6})}, [](const Tensors& x) { return all(x[0].chunk(3, -1)); }},
      {"tensor_split", {in({5, 7})}, [](const Tensors& x) { return all(x[0].tensor_split(3, 1)); }},
      {"unsafe_chunk",
       {in({5, 6})},
       [](const Tensors& x) { return all(at::unsafe_chunk(x[0], 3, 1)); }},
      {"unbind", {in({3, 4})}, [](const Tensors& x) { return all(x[0].unbind(0)); }},
      {"unbind the last", {in({3, 2, 4})}, [](const Tensors& x) { return all(x[0].unbind(-1)); }},
      {"select",
       {in({4, 3, 2})},
       [](const Tensors& x) {
         return Tensors{x[0].select(0, 2), x[0].select(-1, -1), x[0].select(1, 0)};
       }},
      {"slice",
       {in({7, 5})},
       [](const Tensors& x) {
         return Tensors{x[0].slice(0, 1, 6, 2), x[0].slice(1, -3), x[0].slice(0, 0, 100),
                        x[0].slice(1, 3, 3)};
       }},
      {"narrow",
       {in({7, 5})},
       [](const Tensors& x) { return Tensors{x[0].narrow(0, 2, 3), x[0].narrow(-1, 0, 5)}; }},
      {"index by slices",
       {in({7, 5})},
       [](const Tensors& x) {
         return Tensors{x[0].index({Slice(), Slice(1, None)}), x[0].index({"...", 2})};
       }},
      {"select_scatter",
       {in({4, 3}), in({4})},
       [](const Tensors& x) { return Tensors{at::select_scatter(x[0], x[1], 1, 2)}; }},
      {"slice_scatter",
       {in({4, 3}), in({4, 2})},
       [](const Tensors& x) { return Tensors{at::slice_scatter(x[0], x[1], 1, 1)}; }},
  });
}

TEST(DataMovementRulesTest, ReorderingRepeatingPadding) {
  check_ops({
      {"flip",
       {in({4, 3, 2})},
       [](const Tensors& x) { return Tensors{x[0].flip({1}), x[0].flip({0, -1}), x[0].flip({})}; }},
      {"roll",
       {in({4, 3})},
       [](const Tensors& x) {
         return Tensors{x[0].roll(1, 0), x[0].roll({1, 2}, {1, 0}), x[0].roll(2)};
       }},
      {"triangles",
       {in({2, 4, 3})},
       [](const Tensors& x) { return Tensors{x[0].tril(), x[0].triu(1), x[0].clone().tril_(-1)}; }},
      {"triangles of one matrix",
       {in({7, 5})},
       [](const Tensors& x) {
         return Tensors{x[0].tril(2), x[0].triu(-3), x[0].t().triu(), x[0].clone().triu_(1)};
       }},
      {"repeat",
       {in({3, 2})},
       [](const Tensors& x) {
         return Tensors{x[0].repeat({1, 3}), x[0].repeat({2, 1, 1}), x[0].repeat({2, 2})};
       }},
      {"tile",
       {in({3, 2})},
       [](const Tensors& x) { return Tensors{x[0].tile({2}), x[0].tile({2, 1, 1})}; }},
      {"repeat_interleave",
       {in({3, 2})},
       [](const Tensors& x) {
         return Tensors{x[0].repeat_interleave(2, 1), x[0].repeat_interleave(3)};
       }},
      {"pad",
       {in({3, 4})},
       [](const Tensors& x) {
         return Tensors{at::constant_pad_nd(x[0], {1, 2}),
                        at::constant_pad_nd(x[0], {0, 0, 1, 0}, 5),
                        at::constant_pad_nd(x[0], {-1, 1}, 0), at::pad(x[0], {1, 1})};
       }},
      {"sort",
       {in({5, 4})},
       [](const Tensors& x) {
         auto [values, indices] = x[0].sort(-1, true);
         auto [stable, order] = x[0].sort(true, 0);
         return Tensors{values, indices, stable, order, x[0].argsort(int64_t{1})};
       }},
      {"topk",
       {in({5, 4})},
       [](const Tensors& x) {
         auto [values, indices] = x[0].topk(2, 0);
         return Tensors{values, indices};
       }},
  });
}

TEST(DataMovementRulesTest, Copies) {
  check_ops({
      {"clone",
       {in({4, 3}).transposed()},
       [](const Tensors& x) { return Tensors{x[0].clone(), x[0].contiguous()}; }},
      {"casts",
       {in({4, 3})},
       [](const Tensors& x) { return Tensors{x[0].to(at::kFloat), x[0].to(at::kDouble)}; },
       true,
       1e-6},
      {"casts that cut off",
       {in({4, 3})},
       [](const Tensors& x) { return Tensors{x[0].to(at::kLong), x[0].to(at::kBool)}; },
       false},
      {"casts of integers",
       {in({4, 3}).integers(0, 3)},
       [](const Tensors& x) {
         return Tensors{x[0].to(at::kDouble), x[0].to(at::kInt), x[0].to(at::kBool)};
       },
       false},
      {"copy_",
       {in({4, 3}), in({3})},
       [](const Tensors& x) { return Tensors{x[0].clone().copy_(x[1])}; }},
      {"copy_ of another type",
       {in({4, 3}).integers(0, 9), in({4, 3})},
       [](const Tensors& x) { return Tensors{x[0].clone().copy_(x[1])}; },
       false},
      {"fill",
       {in({4, 3}), in({})},
       [](const Tensors& x) {
         return Tensors{x[0].clone().fill_(2), x[0].clone().fill_(x[1]), x[0].clone().zero_(),
                        at::fill(x[0], 3)};
       }},
  });
}

TEST(DataMovementRulesTest, TensorsLikeOthers) {
  const auto floats = at::TensorOptions(at::kFloat);
  check_ops({
      {"like",
       {in({4, 3}).transposed()},
       [=](const Tensors& x) {
         return Tensors{at::zeros_like(x[0]), at::ones_like(x[0], floats), at::full_like(x[0], 7),
                        at::empty_like(x[0]).fill_(1)};
       },
       false},
      {"new",
       {in({4, 3})},
       [](const Tensors& x) {
         return Tensors{x[0].new_zeros({4, 3}),
                        x[0].new_ones({2}),
                        x[0].new_full({4, 3}, 5),
                        x[0].new_empty({4, 3}).zero_(),
                        x[0].new_empty_strided({4, 3}, {1, 4}).zero_(),
                        x[0].new_zeros({})};
       },
       false},
  });
  on_mesh({{"x", 3}}, [](const MeshPtr& mesh) {
    const StrictScope strict(mesh);
    const Tensor s = zeros({4, 3}, mesh, {Shard(0)});
    const Tensor p = from_local(at::ones({4, 3}), mesh, {Partial()}, std::vector<int64_t>{4, 3});
    EXPECT_EQ(layout_of(at::ones_like(s))[0], Shard(0));
    EXPECT_EQ(layout_of(s.new_zeros({4, 3}))[0], Shard(0));
    EXPECT_EQ(layout_of(s.new_empty_strided({4, 3}, {1, 4}))[0], Shard(0));
    EXPECT_EQ(layout_of(s.new_zeros({5}))[0], Replicate());
    EXPECT_EQ(layout_of(s.new_zeros({4}))[0], Replicate());
    EXPECT_EQ(layout_of(s.new_zeros({4, 9}))[0], Shard(0));
    EXPECT_EQ(layout_of(s.new_zeros({4, 3, 5}))[0], Shard(0));
    EXPECT_EQ(layout_of(s.new_zeros({5, 3}))[0], Replicate());
    EXPECT_EQ(layout_of(at::zeros_like(p))[0], Replicate());
    EXPECT_EQ(layout_of(p.new_zeros({4, 3}))[0], Replicate());
    Tensor q = p.clone();
    EXPECT_EQ(layout_of(q.zero_())[0], Partial());
    EXPECT_EQ(layout_of(q.fill_(2))[0], Partial());
  });
}

// A strided cut within another cut of the same dimension: each piece has to divide.
TEST(DataMovementRulesTest, RepeatOfCutsWithinCuts) {
  for (const int64_t ranks : {2, 3}) {
    on_mesh({{"a", ranks}, {"b", 2}}, [](const MeshPtr& mesh) {
      for (const int64_t size : {12, 14, 30}) {
        for (const int64_t split : {2, 3}) {
          const Tensor whole = at::arange(size, at::kDouble);
          const Tensor x =
              distribute_tensor(whole, mesh, Placements{Shard(0), StridedShard(0, split)});
          EXPECT_TRUE(at::equal(full_tensor(x.repeat({2})), whole.repeat({2})))
              << size << " " << split;
        }
      }
    });
  }
}

// Backward of what takes some columns of each row.
TEST(DataMovementRulesTest, GradientsOfSomeColumnsStayWhereTheBatchIs) {
  const std::vector<std::pair<const char*, std::function<Tensor(const Tensor&, const Tensor&)>>>
      takes = {
          {"gather", [](const Tensor& x, const Tensor& at) { return x.gather(1, at); }},
          {"topk", [](const Tensor& x, const Tensor&) { return std::get<0>(x.topk(3, 1)); }},
          {"sort", [](const Tensor& x, const Tensor&) { return std::get<0>(x.sort(1)) * x; }},
          {"max", [](const Tensor& x, const Tensor&) { return std::get<0>(x.max(1)); }},
          {"index_select",
           [](const Tensor& x, const Tensor&) {
             return x.index_select(1, x.new_ones({2}, at::kLong)).square();
           }},
      };
  // A mean's gradient is whole.
  const std::vector<std::pair<const char*, std::function<Tensor(const Tensor&)>>> losses = {
      {"squares", [](const Tensor& x) { return x.square().sum(); }},
      {"mean", [](const Tensor& x) { return -x.mean(); }},
  };
  for (const auto& [name, take] : takes) {
    for (const auto& [loss_name, loss_of] : losses) {
      SCOPED_TRACE(std::string(name) + " " + loss_name);
      const Tensor plain = (at::arange(70, at::kDouble) * 1.7).sin().view({7, 10}).requires_grad_();
      const Tensor columns = at::arange(7, at::kLong).square().remainder(10).view({7, 1});
      loss_of(take(plain, columns)).backward();
      on_mesh({{"dp", 3}}, [&](const MeshPtr& mesh) {
        const Tensor x =
            distribute_tensor(plain.detach(), mesh, Placements{Shard(0)}).requires_grad_();
        const Tensor at = distribute_tensor(columns, mesh, Placements{Shard(0)});
        const Tensor loss = loss_of(take(x, at));
        const CommTrace trace(mesh);
        loss.backward();
        EXPECT_TRUE(trace.events().empty()) << trace.to_string();
        EXPECT_EQ(layout_of(x.grad())[0], Shard(0));
        EXPECT_TRUE(at::allclose(full_tensor(x.grad()), plain.grad()));
      });
    }
  }
}

// Hooks run for a node as its formula does, but write what others hold, perhaps on one rank only: that
// stays whole, and is seen by them.
TEST(DataMovementRulesTest, WhatAHookWritesStaysWhole) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    const Tensor x =
        distribute_tensor(at::arange(8, at::kDouble).view({4, 2}), mesh, Placements{Shard(0)})
            .requires_grad_();
    const Tensor plain = at::zeros({4, 2}, at::kDouble);
    const Tensor sum = distribute_tensor(plain, mesh, Placements{Replicate()});
    const Tensor held = mesh->rank() == Rank(0) ? plain.view(-1) : Tensor();
    const Tensor y = x * 2;
    y.register_hook([&](const Tensor& grad) {
      plain.add_(grad);
      sum.add_(grad);
    });
    y.square().sum().backward();
    EXPECT_EQ(layout_of(sum)[0], Replicate());
    EXPECT_EQ(layout_of(plain)[0], Replicate());
    const Tensor wanted = at::arange(8, at::kDouble).view({4, 2}) * 4;
    EXPECT_TRUE(at::equal(to_local(sum), wanted));
    EXPECT_TRUE(at::equal(to_local(plain), wanted));
    if (held.defined()) {
      EXPECT_TRUE(at::equal(held.view({4, 2}), wanted));
    }
  });
}

TEST(DataMovementRulesTest, Questions) {
  on_mesh({{"x", 3}}, [](const MeshPtr& mesh) {
    const Tensor whole = at::arange(12, at::kFloat).view({4, 3});
    const Tensor a = distribute_tensor(whole, mesh, Placements{Shard(0)});
    const Tensor b = distribute_tensor(whole, mesh, Placements{Shard(1)});
    EXPECT_TRUE(at::equal(a, b));
    EXPECT_FALSE(at::equal(a, b + 1));
    EXPECT_FALSE(at::equal(a, b.t()));
    EXPECT_TRUE(at::allclose(a, b + 1e-9));
    EXPECT_FALSE(at::allclose(a, b * 2));
    EXPECT_EQ(a.sum().item<float>(), 66);
    EXPECT_EQ(a.index({3, 2}).item<float>(), 11);
    EXPECT_EQ(dispatch_counters(mesh).gathered_operators, 0);
  });
}

// --- indexing ------------------------------------------------------------------------------------

TEST(IndexingRulesTest, GatherAndScatter) {
  check_ops({
      {"gather",
       {in({5, 4}), in({5, 3}).integers(0, 4)},
       [](const Tensors& x) { return Tensors{at::gather(x[0], 1, x[1])}; }},
      {"gather fewer rows",
       {in({5, 4}), in({3, 3}).integers(0, 4)},
       [](const Tensors& x) { return Tensors{at::gather(x[0], -1, x[1])}; }},
      {"gather along the first",
       {in({5, 4}), in({7, 4}).integers(0, 5)},
       [](const Tensors& x) { return Tensors{at::gather(x[0], 0, x[1])}; }},
      {"take_along_dim",
       {in({5, 4}), in({5, 1}).integers(0, 4)},
       [](const Tensors& x) { return Tensors{at::take_along_dim(x[0], x[1], 1)}; }},
      {"scatter_add",
       {in({5, 4}), in({5, 3}).integers(0, 4), in({5, 3})},
       [](const Tensors& x) { return Tensors{at::scatter_add(x[0], 1, x[1], x[2])}; }},
      {"scatter_add of a part",
       {in({5, 4}), in({3, 2}).integers(0, 4), in({4, 3}).constant()},
       [](const Tensors& x) { return Tensors{at::scatter_add(x[0], 1, x[1], x[2])}; },
       false},
      {"scatter a number",
       {in({5, 4}), in({5, 3}).integers(0, 4)},
       [](const Tensors& x) { return Tensors{at::scatter(x[0], 1, x[1], 9)}; }},
      {"scatter_reduce",
       {in({5, 4}), in({5, 3}).integers(0, 4), in({5, 3})},
       [](const Tensors& x) {
         return Tensors{at::scatter_reduce(x[0], 1, x[1], x[2], "amax"),
                        at::scatter_reduce(x[0], 0, x[1], x[2], "sum")};
       }},
      // Without duplicates, which LibTorch resolves as it likes.
      {"scatter",
       {in({4, 5}), in({4, 5})},
       [](const Tensors& x) {
         return Tensors{at::scatter(x[0], 1, x[1].argsort(int64_t{1}), x[1])};
       }},
      {"in place",
       {in({5, 4}), in({5, 3}).integers(0, 4), in({5, 3})},
       [](const Tensors& x) { return Tensors{x[0].clone().scatter_add_(1, x[1], x[2])}; }},
  });
}

TEST(IndexingRulesTest, Slices) {
  check_ops({
      {"index_select",
       {in({5, 4}), in({7}).integers(0, 5)},
       [](const Tensors& x) { return Tensors{x[0].index_select(0, x[1])}; }},
      {"index_select the last",
       {in({5, 4}), in({3}).integers(0, 4)},
       [](const Tensors& x) { return Tensors{x[0].index_select(-1, x[1])}; }},
      {"index_add",
       {in({5, 4}), in({7}).integers(0, 5), in({7, 4})},
       [](const Tensors& x) {
         return Tensors{x[0].index_add(0, x[1], x[2], 2), x[0].clone().index_add_(0, x[1], x[2])};
       }},
      {"index_copy",
       {in({5, 4}), in({3}).integers(0, 1), in({5, 3})},
       [](const Tensors& x) {
         return Tensors{x[0].index_copy(1, x[1] + at::argsort(x[1]), x[2])};
       }},
      {"index_fill",
       {in({5, 4}), in({3}).integers(0, 4)},
       [](const Tensors& x) { return Tensors{x[0].index_fill(1, x[1], 3)}; }},
      {"index_fill with a tensor",
       {in({5, 4}), in({3}).integers(0, 4), in({})},
       [](const Tensors& x) { return Tensors{x[0].index_fill(1, x[1], x[2])}; }},
  });
}

TEST(IndexingRulesTest, AnyNumberOfIndices) {
  auto rows = [](std::vector<int64_t> sizes, int64_t below) {
    return in(std::move(sizes)).integers(0, below);
  };
  check_ops({
      {"rows",
       {in({5, 4}), rows({7}, 5)},
       [](const Tensors& x) { return Tensors{x[0].index({x[1]})}; }},
      {"a table of rows",
       {in({5, 4}), rows({2, 3}, 5)},
       [](const Tensors& x) { return Tensors{x[0].index({x[1]})}; }},
      {"columns",
       {in({5, 4, 3}), rows({2, 3}, 4)},
       [](const Tensors& x) { return Tensors{x[0].index({Slice(), x[1]})}; }},
      {"elements",
       {in({5, 4}), rows({7}, 5), rows({7}, 4)},
       [](const Tensors& x) { return Tensors{x[0].index({x[1], x[2]})}; }},
      {"a cross",
       {in({5, 4, 2}), rows({3, 1}, 5), rows({2}, 4)},
       [](const Tensors& x) { return Tensors{x[0].index({x[1], x[2]})}; }},
      {"apart",
       {in({3, 4, 2}), rows({5}, 3), rows({5}, 2)},
       [](const Tensors& x) { return Tensors{x[0].index({x[1], Slice(), x[2]})}; }},
      {"behind",
       {in({3, 4, 2}), rows({5}, 4), rows({5}, 2)},
       [](const Tensors& x) { return Tensors{x[0].index({Slice(), x[1], x[2]})}; }},
      {"masks",
       {in({5, 4}), in({5}).flags()},
       [](const Tensors& x) { return Tensors{x[0].index({x[1]})}; }},
      {"masks of all",
       {in({5, 4}), in({5, 4}).flags()},
       [](const Tensors& x) { return Tensors{x[0].index({x[1]}), x[0].masked_select(x[1])}; }},
      {"index_put",
       {in({5, 4}), in({5}), in({5, 4})},
       [](const Tensors& x) { return Tensors{x[0].index_put({x[1].argsort()}, x[2])}; }},
      {"index_put of a row",
       {in({5, 4}), in({4})},
       [](const Tensors& x) {
         return Tensors{x[0].index_put({std::nullopt, x[1].argsort()}, x[1])};
       }},
      {"index_put accumulates",
       {in({5, 4}), rows({7}, 5), in({7, 4})},
       [](const Tensors& x) {
         return Tensors{x[0].index_put({x[1]}, x[2], true),
                        x[0].clone().index_put_({x[1]}, x[2], true)};
       }},
      {"index_put accumulates one",
       {in({5, 4}), rows({7}, 5), rows({7}, 4), in({})},
       [](const Tensors& x) { return Tensors{x[0].index_put({x[1], x[2]}, x[3], true)}; }},
      {"index_put by a mask",
       {in({5, 4}), in({5}).flags(), in({4})},
       [](const Tensors& x) { return Tensors{x[0].index_put({x[1]}, x[2])}; }},
      {"index_put a number by a mask",
       {in({5, 4}), in({5, 4}).flags(), in({})},
       [](const Tensors& x) { return Tensors{x[0].index_put({x[1]}, x[2])}; }},
  });
}

TEST(IndexingRulesTest, Searches) {
  check_ops({
      {"bucketize",
       {in({5, 3}), in({4})},
       [](const Tensors& x) {
         return Tensors{at::bucketize(x[0], std::get<0>(x[1].sort())),
                        at::bucketize(x[0], std::get<0>(x[1].sort()), true, true)};
       },
       false},
      {"searchsorted",
       {in({5, 3}), in({5, 2})},
       [](const Tensors& x) { return Tensors{at::searchsorted(std::get<0>(x[0].sort(-1)), x[1])}; },
       false},
      {"searchsorted in one line",
       {in({4}), in({5, 2})},
       [](const Tensors& x) {
         return Tensors{at::searchsorted(std::get<0>(x[0].sort()), x[1], true)};
       },
       false},
      {"isin",
       {in({5, 3}).integers(0, 9), in({4}).integers(0, 9)},
       [](const Tensors& x) { return Tensors{at::isin(x[0], x[1]), at::isin(x[0], 3)}; }},
  });
}

// The largest of what was moved is what the largest was moved to.
TEST(DataMovementRulesTest, MovesMinimaAndMaximaUnreduced) {
  on_mesh({{"x", 3}}, [](const MeshPtr& mesh) {
    const Tensor rising = at::arange(60, at::kDouble).view({1, 1, 4, 15}) - 20;
    const Tensor local = rising * (mesh->coordinate()[0] - 1);
    for (ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
      const Tensor whole = op == ReduceOp::kMin ? -rising.abs() : rising.abs();
      const Tensor flags = distribute_tensor(rising.gt(0), mesh, Placements{Replicate()});
      using Move = Tensor (*)(const Tensor& t, const Tensor& mask);
      const Move moves[] = {
          [](const Tensor& t, const Tensor&) { return t.tril(); },
          [](const Tensor& t, const Tensor&) { return t.triu(1); },
          [](const Tensor& t, const Tensor&) { return at::constant_pad_nd(t, {1, 2}, -7); },
          [](const Tensor& t, const Tensor&) { return at::reflection_pad2d(t, {1, 2, 1, 0}); },
          [](const Tensor& t, const Tensor&) { return at::replication_pad2d(t, {1, 2, 1, 0}); },
          [](const Tensor& t, const Tensor&) { return at::upsample_nearest2d(t, {8, 20}); },
          [](const Tensor& t, const Tensor&) { return at::pixel_unshuffle(t.narrow(3, 0, 14), 2); },
          [](const Tensor& t, const Tensor& mask) { return t.masked_fill(mask, -7); },
          [](const Tensor& t, const Tensor&) { return t.to(at::kFloat); }};
      for (size_t i = 0; i < std::size(moves); ++i) {
        // Each of its own: what has been reduced once is used so.
        const Tensor result = moves[i](from_local(local, mesh, {Partial(op)}), flags);
        const Tensor wanted = moves[i](whole, rising.gt(0));
        // What grows much is cheaper to reduce before.
        const bool grows = wanted.numel() > 2 * whole.numel();
        if (!grows) {
          EXPECT_EQ(layout_of(result)[0], Partial(op)) << i;
        }
        EXPECT_TRUE(at::equal(full_tensor(result), wanted)) << i;
      }
    }
  });
}

TEST(IndexingRulesTest, WhatNeedsNoCommunication) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const Tensor table = zeros({6, 4}, mesh, {Replicate()});
    const Tensor columns = zeros({6, 4}, mesh, {Shard(1)});
    const Tensor index = distribute_tensor(at::arange(5), mesh, Placements{Shard(0)});
    const Tensor all = distribute_tensor(at::arange(5), mesh, Placements{Replicate()});
    const Tensor grad = ones({5, 4}, mesh, {Shard(0)});
    const Tensor sum = from_local(at::zeros({6, 4}), mesh, {Partial()}, std::vector<int64_t>{6, 4});
    const StrictScope strict(mesh);
    EXPECT_EQ(layout_of(table.index({index}))[0], Shard(0));
    EXPECT_EQ(layout_of(columns.index({all}))[0], Shard(1));
    EXPECT_EQ(layout_of(table.index_select(0, index))[0], Shard(0));
    EXPECT_EQ(layout_of(sum.index_put({index}, grad, true))[0], Partial());
    EXPECT_EQ(layout_of(sum.index_add(0, index, grad))[0], Partial());
    EXPECT_EQ(layout_of(columns.narrow(0, 1, 3))[0], Shard(1));
    EXPECT_EQ(layout_of(columns.slice(1, 0, 4))[0], Shard(1));
    EXPECT_THROW(columns.narrow(1, 1, 2), Error);
  });
}

// A number under a mask, LibTorch's `x[mask] = v`: where the elements are.
TEST(IndexingRulesTest, NumbersUnderMasksStayWhereTheyAre) {
  on_mesh({{"x", 2}, {"y", 2}}, [](const MeshPtr& mesh) {
    const Tensor whole = at::arange(5 * 4 * 3, at::kDouble).view({5, 4, 3});
    for (const Placements& placements :
         {Placements{Shard(0), Replicate()}, Placements{Shard(0), Shard(1)},
          Placements{Replicate(), Shard(2)}, Placements{Shard(1), Shard(1)}}) {
      const Tensor rows = whole.select(2, 0).remainder(5).eq(1);
      const Tensor all = whole.remainder(7).eq(1);
      for (const Tensor& mask : {rows, all}) {
        Placements of_mask = placements;
        for (Placement& p : of_mask) {
          if (p.is_shard() && p.dim() >= mask.dim()) p = Replicate();
        }
        const Tensor dmask = distribute_tensor(mask, mesh, of_mask);
        Tensor x = whole.clone(), y = distribute_tensor(whole, mesh, placements);
        const CommTrace trace(mesh);
        y.index_put_({dmask}, at::full({}, -1.0, at::kDouble));
        const Tensor z = y.index_put({dmask.logical_not()}, at::full({1}, 2.0, at::kDouble));
        EXPECT_LE(trace.events().size(), 1u);  // the plain value's comparison
        x.index_put_({mask}, at::full({}, -1.0, at::kDouble));
        EXPECT_EQ(layout_of(y).placements(), placements);
        EXPECT_TRUE(at::equal(full_tensor(y), x));
        EXPECT_TRUE(at::equal(full_tensor(z),
                              x.index_put({mask.logical_not()}, at::full({1}, 2.0, at::kDouble))));
      }
    }
    // Gradients of both.
    at::Tensor leaf = whole.clone().requires_grad_(),
               v = at::ones({}, at::kDouble).requires_grad_();
    at::Tensor dleaf =
        distribute_tensor(whole, mesh, Placements{Shard(0), Shard(1)}).requires_grad_();
    at::Tensor dv = distribute_tensor(v.detach(), mesh, Placements(2)).requires_grad_();
    const Tensor mask = whole.remainder(7).eq(1);
    const Tensor dmask = distribute_tensor(mask, mesh, Placements{Shard(0), Shard(1)});
    leaf.index_put({mask}, v).pow(2).sum().backward();
    dleaf.index_put({dmask}, dv).pow(2).sum().backward();
    EXPECT_TRUE(at::equal(full_tensor(dleaf.grad()), leaf.grad()));
    EXPECT_TRUE(at::equal(full_tensor(dv.grad()), v.grad()));
  });
}

// Frames of sound: as_strided of each row for itself.
TEST(DataMovementRulesTest, FramesOfRowsStayWhereTheBatchIs) {
  on_mesh({{"x", 3}}, [](const MeshPtr& mesh) {
    const Tensor sound = at::arange(7 * 400, at::kDouble).view({7, 400}).mul(0.7).sin();
    const Tensor x = distribute_tensor(sound, mesh, Placements{Shard(0)});
    const auto spectrum = [](const Tensor& t) {
      return at::stft(t, 64, 16, 64, {}, /*normalized=*/false, /*onesided=*/true,
                      /*return_complex=*/true)
          .abs();
    };
    const CommTrace trace(mesh);
    const Tensor of_x = spectrum(x);
    EXPECT_EQ(layout_of(of_x)[0], Shard(0));
    EXPECT_EQ(trace.events().size(), 0u);
    EXPECT_TRUE(at::allclose(full_tensor(of_x), spectrum(sound)));
    EXPECT_TRUE(at::equal(full_tensor(x.as_strided({7, 3, 5}, {400, 50, 2}, 7)),
                          sound.as_strided({7, 3, 5}, {400, 50, 2}, 7)));
    // What reaches into the next row, or skips rows, needs them all.
    EXPECT_TRUE(at::equal(full_tensor(x.as_strided({6, 500}, {400, 1})),
                          sound.as_strided({6, 500}, {400, 1})));
    EXPECT_TRUE(at::equal(full_tensor(x.as_strided({7, 300}, {200, 2})),
                          sound.as_strided({7, 300}, {200, 2})));
    EXPECT_TRUE(at::equal(full_tensor(x.t().as_strided({400, 4}, {1, 400})),
                          sound.t().as_strided({400, 4}, {1, 400})));
    // A view: what is written is written in both.
    x.as_strided({7, 3}, {400, 2}, 1).zero_();
    sound.as_strided({7, 3}, {400, 2}, 1).zero_();
    EXPECT_TRUE(at::equal(full_tensor(x), sound));
  });
}

}  // namespace
}  // namespace shardweave
