// Views on shards against one device, and which of them keep their shards.
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
using testing::check_op;
using testing::check_ops;
using testing::in;
using testing::on_mesh;
using testing::Tensors;

TEST(ViewRulesTest, OrderOfDimensions) {
  check_ops({
      {"permute",
       {in({4, 3, 5})},
       [](const Tensors& x) { return Tensors{x[0].permute({2, 0, 1}), x[0].permute({-1, 1, 0})}; }},
      {"transpose",
       {in({4, 3, 5})},
       [](const Tensors& x) { return Tensors{x[0].transpose(0, -1), x[0].transpose(1, 1)}; }},
      {"t", {in({4, 3})}, [](const Tensors& x) { return Tensors{x[0].t()}; }},
      {"t of a vector", {in({5})}, [](const Tensors& x) { return Tensors{x[0].t()}; }},
      {"movedim",
       {in({4, 3, 5})},
       [](const Tensors& x) {
         return Tensors{x[0].movedim(0, 2), x[0].mT(), x[0].swapdims(0, 1)};
       }},
      {"numbers",
       {in({})},
       [](const Tensors& x) { return Tensors{x[0].t(), x[0].permute({}), x[0].transpose(0, -1)}; }},
      {"alias",
       {in({4, 3})},
       [](const Tensors& x) { return Tensors{at::alias(x[0]), x[0].detach()}; }},
  });
}

TEST(ViewRulesTest, DimensionsOfSizeOne) {
  check_ops({
      {"unsqueeze",
       {in({4, 3})},
       [](const Tensors& x) {
         return Tensors{x[0].unsqueeze(0), x[0].unsqueeze(-1), x[0].unsqueeze(1)};
       }},
      {"unsqueeze of a number",
       {in({})},
       [](const Tensors& x) { return Tensors{x[0].unsqueeze(0), x[0].squeeze()}; }},
      // 2 over 2 ranks is 1 on each, and must stay.
      {"squeeze", {in({2, 1, 3, 1})}, [](const Tensors& x) { return Tensors{x[0].squeeze()}; }},
      {"squeeze one",
       {in({2, 1, 3})},
       [](const Tensors& x) {
         return Tensors{x[0].squeeze(1), x[0].squeeze(0), x[0].squeeze(-2)};
       }},
      {"squeeze some",
       {in({2, 1, 3, 1})},
       [](const Tensors& x) {
         return Tensors{x[0].squeeze(at::IntArrayRef{0, 1}), x[0].squeeze(at::IntArrayRef{1, -1})};
       }},
      {"in place",
       {in({2, 1, 3})},
       [](const Tensors& x) {
         return Tensors{x[0].clone().squeeze_(),       x[0].clone().squeeze_(1),
                        x[0].clone().squeeze_(0),      x[0].clone().unsqueeze_(0),
                        x[0].clone().transpose_(0, 2), x[0].select(1, 0).clone().t_()};
       }},
  });
}

TEST(ViewRulesTest, Expand) {
  check_ops({
      {"expand",
       {in({3, 1})},
       [](const Tensors& x) {
         return Tensors{x[0].expand({3, 4}), x[0].expand({2, 3, 4}), x[0].expand({-1, 5})};
       }},
      {"expand to the same",
       {in({3, 1})},
       [](const Tensors& x) { return Tensors{x[0].expand({3, 1}), x[0].expand_as(x[0])}; }},
      {"broadcast_to",
       {in({3})},
       [](const Tensors& x) { return Tensors{at::broadcast_to(x[0], {5, 3})}; }},
      {"expand a number", {in({})}, [](const Tensors& x) { return Tensors{x[0].expand({2, 3})}; }},
      {"expand nothing",
       {in({1, 0})},
       [](const Tensors& x) { return Tensors{x[0].expand({4, 0})}; }},
  });
}

TEST(ViewRulesTest, Shapes) {
  const std::vector<std::pair<std::vector<int64_t>, std::vector<std::vector<int64_t>>>> shapes = {
      {{4, 6},
       {{24}, {2, 2, 6}, {4, 2, 3}, {4, 3, 2}, {8, 3}, {1, 4, 6}, {4, 6, 1}, {4, 1, 6}, {-1, 4}}},
      {{24}, {{4, 6}, {6, 4}, {2, 3, 4}, {24, 1}, {1, 24}}},
      {{3, 5}, {{15}, {5, 3}, {3, 5, 1}, {1, 3, 5}}},
      {{2, 3, 4}, {{6, 4}, {2, 12}, {24}, {6, 2, 2}, {3, 2, 4}, {12, 2}}},
      {{1}, {{}, {1, 1}}},
      {{0, 3}, {{0}, {3, 0}, {0, 1, 3}}},
  };
  for (const auto& [from, all] : shapes) {
    for (const std::vector<int64_t>& to : all) {
      SCOPED_TRACE(::testing::PrintToString(to));
      check_op({"view", {in(from)}, [&](const Tensors& x) { return Tensors{x[0].view(to)}; }});
      if (from.size() < 2) continue;
      check_op({"reshape of a transposed one", {in(from).transposed()}, [&](const Tensors& x) {
                  return Tensors{x[0].reshape(to)};
                }});
    }
  }
  check_ops({
      {"flatten",
       {in({2, 3, 4})},
       [](const Tensors& x) {
         return Tensors{x[0].flatten(), x[0].flatten(1), x[0].flatten(0, 1)};
       }},
      {"unflatten",
       {in({4, 6})},
       [](const Tensors& x) {
         return Tensors{x[0].unflatten(1, {2, 3}), x[0].unflatten(0, {-1, 2})};
       }},
      {"view_as",
       {in({4, 6}), in({6, 4})},
       [](const Tensors& x) { return Tensors{x[0].view_as(x[1])}; }},
      {"heads and back",
       {in({4, 3, 8})},
       [](const Tensors& x) {
         const Tensor heads = x[0].view({4, 3, 4, 2}).transpose(1, 2);
         return Tensors{heads, heads.transpose(1, 2).reshape({4, 3, 8}), heads.reshape({16, 3, 2})};
       }},
      {"view of what was moved",
       {in({4, 6})},
       [](const Tensors& x) {
         // Contiguous for the whole, perhaps not for a part that was brought here.
         return Tensors{(x[0].t() + x[0].sum()).t().view({2, 12})};
       }},
  });
}

TEST(ViewRulesTest, Others) {
  check_ops({
      {"diagonal",
       {in({3, 4, 5})},
       [](const Tensors& x) {
         return Tensors{x[0].diagonal(), x[0].diagonal(1, 0, 2), x[0].diagonal(-1, 2, 1)};
       }},
      {"diagonal of squares",
       {in({5, 3, 5})},
       [](const Tensors& x) {
         return Tensors{x[0].diagonal(0, 0, 2), x[0].diagonal(0, 2, 0), x[0].diagonal(1, 0, 2),
                        x[0].transpose(0, 2).diagonal(0, -1, 0) * 2};
       }},
      {"trace",
       {in({7, 5})},
       [](const Tensors& x) { return Tensors{x[0].trace(), x[0].t().trace()}; }},
      {"unfold",
       {in({3, 7})},
       [](const Tensors& x) { return Tensors{x[0].unfold(1, 3, 2), x[0].unfold(0, 2, 1)}; }},
      {"as_strided",
       {in({4, 6})},
       [](const Tensors& x) {
         return Tensors{x[0].as_strided({3, 2}, {6, 2}, 1), x[0].t().as_strided({5}, {2})};
       }},
      {"as_strided of another order",
       {in({4, 6}).transposed()},
       [](const Tensors& x) { return Tensors{x[0].as_strided({6, 4}, {4, 1})}; }},
      {"as_strided of views, from where the storage begins",
       {in({7, 5})},
       [](const Tensors& x) {
         const Tensor base = x[0] * 1.0;
         const Tensor rows = base.slice(0, 1, 4);
         return Tensors{rows.as_strided({2, 5}, {5, 1}, 5),
                        rows.as_strided({2, 5}, {5, 1}, rows.storage_offset() + 5),
                        rows.as_strided({2, 5}, {5, 1}),
                        base.narrow(0, 2, 4).narrow(1, 1, 3).as_strided({2, 2}, {5, 1}, 12),
                        base[2].as_strided({2}, {2}, 11),
                        base.unbind(0)[3].as_strided({3}, {1}, 15),
                        base.t().slice(0, 1).as_strided({3}, {6}, 2)};
       }},
      {"as_strided as a diagonal",
       {in({5, 4})},
       [](const Tensors& x) {
         const Tensor base = x[0] * 1.0;
         return Tensors{base.as_strided({4}, {5}), base.as_strided({3}, {5}, 0),
                        base.t().as_strided({4}, {5}), base.as_strided({4}, {5}, 1),
                        base.narrow(0, 1, 4).as_strided({4}, {5}, 4)};
       }},
      {"view as integers",
       {in({4, 6}).constant()},
       [](const Tensors& x) { return Tensors{x[0].view(at::kLong), x[0].view(at::kInt)}; },
       false},
  });
}

// --- no communication ----------------------------------------------------------------------------

// Views `whole`, laid out as `before`, in strict scope.
void expect_layout(const std::vector<MeshDim>& mesh_dims, std::vector<int64_t> from,
                   std::vector<int64_t> to, const Placements& before, const Placements& after) {
  on_mesh(mesh_dims, [&](const MeshPtr& mesh) {
    int64_t numel = 1;
    for (int64_t size : from) numel *= size;
    const Tensor whole = at::arange(numel).view(from);
    const Tensor x = distribute_tensor(whole, mesh, before);
    Tensor y;
    {
      const StrictScope strict(mesh);
      y = x.view(to);
    }
    EXPECT_EQ(layout_of(y).placements(), after) << to_string(layout_of(y).placements());
    EXPECT_TRUE(at::equal(full_tensor(y), whole.view(to)));
    // The gradient goes back the same way.
    const StrictScope strict(mesh);
    EXPECT_EQ(layout_of(y.view(from)).placements(), before);
    // And the view is one.
    y.fill_(7);
    EXPECT_TRUE(at::equal(to_local(x), at::full_like(to_local(x), 7)));
  });
}

// Wherever the base lies: what is written to a view is written to its base, though the view of a
// sharded dimension is one of a copy.
TEST(ViewRulesTest, WritesToViewsReachTheBase) {
  const auto writes = [](const std::function<void(const Tensor& base)>& write) {
    return [write](const Tensors& x) {
      const Tensor base = x[0] * 1.0;
      write(base);
      return Tensors{base};
    };
  };
  check_ops({
      // Its derivative writes to views of the gradient, by as_strided.
      {"padded around itself",
       {in({1, 3, 3})},
       [](const Tensors& x) { return Tensors{at::_pad_circular(x[0], {1, 2})}; }},
      {"a row", {in({5, 4})}, writes([](const Tensor& base) { base.select(0, 3).mul_(3); })},
      {"some rows", {in({5, 4})}, writes([](const Tensor& base) {
         base.slice(0, 1, 4, 2).copy_(base.slice(0, 2, 5, 2));
       })},
      {"another shape", {in({3, 4})}, writes([](const Tensor& base) {
         base.view({4, 3}).select(1, 1).fill_(7);
       })},
      {"a view of a view of a view", {in({4, 3, 2})}, writes([](const Tensor& base) {
         const Tensor inner = base.flatten(0, 1).narrow(0, 2, 8).transpose(0, 1).select(0, 1);
         inner.add_(1);
         inner.mul_(2);
       })},
      {"a diagonal", {in({4, 4})}, writes([](const Tensor& base) { base.diagonal().zero_(); })},
      {"diagonals of views", {in({5, 5})}, writes([](const Tensor& base) {
         base.t().fill_diagonal_(1);
         base.narrow(1, 1, 1).fill_diagonal_(2);
         base.narrow(0, 2, 3).fill_diagonal_(3);
         base.t().slice(0, 0, 3).slice(1, 1).fill_diagonal_(4);
       })},
      {"what as_strided sees of a view", {in({7, 5})}, writes([](const Tensor& base) {
         base.slice(0, 1, 4).as_strided({3}, {6}, 5).fill_(-1);
         base[2].as_strided({2}, {1}, 12).mul_(3);
       })},
      {"two views of one base", {in({4, 3})}, writes([](const Tensor& base) {
         const Tensor top = base.select(0, 0), bottom = base.select(0, 3);
         top.add_(1);
         bottom.add_(top);
       })},
      {"what is written to the base is read in its views",
       {in({4, 3})},
       [](const Tensors& x) {
         const Tensor base = x[0] * 1.0;
         const Tensor row = base.select(0, 1), inner = base.view({12}).narrow(0, 2, 7);
         base.mul_(2);
         const Tensor before = row + inner.narrow(0, 1, 3);
         inner.narrow(0, 3, 2).add_(row.sum());
         return Tensors{before, row * 1.0, inner * 1.0, base};
       }},
  });
}

TEST(ViewRulesTest, ShardsThatStay) {
  expect_layout({{"dp", 3}}, {4, 6, 2}, {24, 2}, {Shard(0)}, {RaggedShard(0, {12, 12, 0})});
  expect_layout({{"dp", 2}}, {4, 6, 2}, {24, 2}, {Shard(0)}, {Shard(0)});
  expect_layout({{"sp", 4}}, {4, 6, 2}, {24, 2}, {Shard(1)}, {StridedShard(0, 4)});
  expect_layout({{"tp", 2}}, {4, 6, 8}, {4, 6, 4, 2}, {Shard(2)}, {Shard(2)});
  expect_layout({{"tp", 4}}, {4, 6, 4, 2}, {4, 6, 8}, {Shard(2)}, {Shard(2)});
  expect_layout({{"dp", 2}, {"tp", 2}}, {4, 6, 8}, {24, 8}, {Shard(0), Shard(2)},
                {Shard(0), Shard(1)});
  expect_layout({{"dp", 2}, {"sp", 2}}, {4, 6, 8}, {24, 8}, {Shard(0), Shard(1)},
                {Shard(0), StridedShard(0, 2)});
  expect_layout({{"a", 2}, {"b", 2}}, {8, 3}, {24}, {Shard(0), Shard(0)}, {Shard(0), Shard(0)});
  // Rows that are cut unevenly, and what is below them: the latter first.
  expect_layout({{"dp", 2}, {"tp", 2}}, {7, 8, 3}, {56, 3}, {Shard(0), Shard(1)},
                {RaggedShard(0, {16, 12}), StridedShard(0, 7)});
  expect_layout({{"tp", 2}, {"dp", 3}}, {7, 8}, {56}, {Shard(1), Shard(0)},
                {StridedShard(0, 7), RaggedShard(0, {12, 12, 4})});
  expect_layout({{"dp", 4}, {"tp", 2}}, {5, 8}, {40}, {Shard(0), Shard(1)},
                {RaggedShard(0, {8, 8, 4, 0}), StridedShard(0, 5)});
  expect_layout({{"dp", 2}, {"a", 2}, {"b", 2}}, {5, 8}, {40}, {Shard(0), Shard(1), Shard(1)},
                {RaggedShard(0, {6, 4}), StridedShard(0, 5), StridedShard(0, 5)});
  expect_layout({{"dp", 2}, {"cp", 2}, {"tp", 2}}, {5, 8, 6}, {40, 6},
                {Shard(0), Shard(2), Shard(1)},
                {RaggedShard(0, {12, 8}), Shard(1), StridedShard(0, 5)});
}

TEST(ViewRulesTest, HeadsThatAreNotWholeAreGathered) {
  on_mesh({{"tp", 3}}, [](const MeshPtr& mesh) {
    const Tensor whole = at::arange(24).view({2, 12});
    const Tensor x = distribute_tensor(whole, mesh, Placements{Shard(1)});
    EXPECT_TRUE(at::equal(full_tensor(x.view({2, 4, 3})), whole.view({2, 4, 3})));
    const StrictScope strict(mesh);
    EXPECT_THROW(x.view({2, 3, 2, 2}).view({2, 2, 6}), Error);
  });
}

// As on one device, where elements are elsewhere, too.
TEST(ViewRulesTest, StorageOffsetsAndWhetherTwoAreOne) {
  using View = Tensor (*)(const Tensor& x);
  const View views[] = {
      [](const Tensor& x) { return x.slice(0, 1, 4); },
      [](const Tensor& x) { return x[2]; },
      [](const Tensor& x) { return x.t().slice(0, 1).narrow(1, 2, 3); },
      [](const Tensor& x) { return x.unbind(1)[3]; },
      [](const Tensor& x) { return x.split(2)[2]; },
      [](const Tensor& x) { return x.narrow(0, 2, 4).unflatten(1, {3, 2})[1].diagonal(); },
      [](const Tensor& x) { return x.narrow(0, 1, 4).as_strided({2}, {1}, 9); },
      [](const Tensor& x) { return at::view_as_complex(x.view({7, 3, 2}))[4]; },
      [](const Tensor& x) { return x[3].view(at::kInt).slice(0, 1, 5); },
      [](const Tensor& x) { return x.clone(); },
      [](const Tensor& x) { return x[1].transpose_(0, 0).unsqueeze_(0); },
  };
  const auto check = [&](const MeshPtr& mesh, const Placements& placements) {
    const Tensor whole = at::arange(42).view({7, 6}).to(at::kDouble);
    const Tensor x = distribute_tensor(whole, mesh, placements);
    std::vector<Tensor> mine, wanted;
    for (const View view : views) {
      mine.push_back(view(x));
      wanted.push_back(view(whole));
      EXPECT_EQ(mine.back().storage_offset(), wanted.back().storage_offset()) << mine.size();
    }
    for (size_t i = 0; i < mine.size(); ++i) {
      for (size_t j = 0; j < mine.size(); ++j) {
        EXPECT_EQ(mine[i].is_set_to(mine[j]), wanted[i].is_set_to(wanted[j])) << i << " " << j;
      }
    }
    EXPECT_TRUE(x.is_set_to(x) && x.is_set_to(x.view({7, 6})) && x.is_set_to(x.detach()));
    EXPECT_TRUE(x[2].is_set_to(x.slice(0, 2, 3)[0]));
    EXPECT_TRUE(x.view(at::kLong).is_set_to(x.view(at::kLong)));
    // What has no base begins a storage.
    EXPECT_EQ(x[2].detach().storage_offset(), 0);
    Tensor row = x[2].clone();
    EXPECT_TRUE(at::equal(full_tensor(row.as_strided_({2, 2}, {3, 1}, 1)),
                          whole[2].as_strided({2, 2}, {3, 1}, 13)));
    row = x.narrow(0, 2, 3)[1];
    EXPECT_TRUE(at::equal(full_tensor(row.as_strided_({2, 2}, {3, 1}, row.storage_offset())),
                          whole[3].as_strided({2, 2}, {3, 1}, 18)));
    EXPECT_EQ(row.sizes(), at::IntArrayRef({2, 2}));
    EXPECT_FALSE(x.is_set_to(x.clone()) || x.is_set_to(x.t()) || x.is_set_to(whole));
    const CommTrace trace(mesh);
    if (mesh->rank().value == 0) x.is_set_to(x.view({7, 6}));  // nobody else is asked
    EXPECT_EQ(trace.events().size(), 0u) << trace.to_string();
  };
  for (const Placement& p : {Placement(Replicate()), Shard(0), Shard(1)}) {
    on_mesh({{"a", 3}}, [&](const MeshPtr& mesh) { check(mesh, {p}); });
    on_mesh({{"a", 2}, {"b", 2}}, [&](const MeshPtr& mesh) { check(mesh, {Shard(0), p}); });
  }
}

TEST(ViewRulesTest, AsStridedBeforeAViewIsRefused) {
  on_mesh({{"a", 2}}, [](const MeshPtr& mesh) {
    for (const Placement& p : {Placement(Replicate()), Shard(0), Shard(1)}) {
      const Tensor x = distribute_tensor(at::arange(35).view({7, 5}), mesh, {p});
      try {
        x[2].as_strided({7, 5}, {5, 1}, 0);
        ADD_FAILURE() << "no error";
      } catch (const Error& e) {
        EXPECT_NE(std::string(e.what()).find("the storage offset 0 is before the beginning, 10"),
                  std::string::npos)
            << e.what();
      }
    }
  });
}

// What is between the elements of a view is not brought here with it.
TEST(ViewRulesTest, AsStridedBesideAViewIsRightOrRefused) {
  on_mesh({{"a", 2}}, [](const MeshPtr& mesh) {
    const Tensor whole = at::arange(35).view({7, 5});
    for (const Placement& p : {Placement(Replicate()), Shard(0), Shard(1)}) {
      const Tensor y = distribute_tensor(whole, mesh, {p}).narrow(1, 1, 3);
      using Look = Tensor (*)(const Tensor& view);
      for (const Look look : {+[](const Tensor& v) { return v.as_strided({1, 5}, {5, 1}, 11); },
                              +[](const Tensor& v) { return v.as_strided({6}, {6}, 1); }}) {
        const Tensor wanted = look(whole.narrow(1, 1, 3));
        try {
          EXPECT_TRUE(at::equal(full_tensor(look(y)), wanted)) << p.to_string();
        } catch (const Error& e) {
          EXPECT_FALSE(p.is_replicate());
          EXPECT_NE(std::string(e.what()).find("call it on the base"), std::string::npos)
              << e.what();
        }
      }
      EXPECT_TRUE(at::equal(full_tensor(y.as_strided({2, 3}, {5, 1}, 11)),
                            whole.narrow(1, 1, 3).as_strided({2, 3}, {5, 1}, 11)));
    }
  });
}

// Autograd replays them on a gradient, which begins a storage.
TEST(ViewRulesTest, WritesThroughAsStridedOfWhatIsDetached) {
  const auto gradient = [](const Tensor& x, const Tensor& w) {
    const Tensor y = x.narrow(0, 1, 4).detach();
    y.mul_(w);
    y.fill_diagonal_(0);
    y.as_strided({2}, {5}, y.storage_offset() + 1).mul_(3);
    y.square().sum().backward();
    return w.grad();
  };
  const Tensor whole = at::arange(35, at::kDouble).view({7, 5});
  const Tensor two = at::full({1}, 2, at::kDouble);
  const Tensor wanted = gradient(whole.clone(), two.clone().requires_grad_());
  on_mesh({{"a", 2}}, [&](const MeshPtr& mesh) {
    const Placements r{Replicate()};
    const Tensor got = gradient(distribute_tensor(whole, mesh, r),
                                distribute_tensor(two, mesh, r).requires_grad_());
    EXPECT_TRUE(at::equal(full_tensor(got), wanted)) << full_tensor(got) << wanted;
  });
}

TEST(ViewRulesTest, ATraceIsOfAMatrix) {
  on_mesh({{"a", 2}}, [](const MeshPtr& mesh) {
    for (const std::vector<int64_t>& sizes :
         {std::vector<int64_t>{4, 4, 4}, std::vector<int64_t>{4}, std::vector<int64_t>{}}) {
      for (const Placement& p : {Placement(Replicate()), Shard(0)}) {
        if (p.is_shard() && sizes.empty()) continue;
        const Tensor x = ones(sizes, mesh, {p});
        try {
          x.trace();
          ADD_FAILURE() << sizes.size();
        } catch (const c10::Error& e) {
          EXPECT_NE(std::string(e.what()).find("expected a matrix"), std::string::npos) << e.what();
        }
      }
    }
  });
}

// Rows and columns that are cut have their part of the diagonal, and of a triangle.
TEST(ViewRulesTest, DiagonalsAndTrianglesSendNothing) {
  for (const auto& dims :
       {std::vector<MeshDim>{{"a", 3}}, std::vector<MeshDim>{{"a", 2}, {"b", 2}}}) {
    on_mesh(dims, [&](const MeshPtr& mesh) {
      const Tensor whole = at::arange(49, at::kDouble).view({7, 7}) * 0.5;
      for (const int dim : {0, 1}) {
        for (const bool both : {false, true}) {
          Placements placements(dims.size(), Shard(dim));
          if (both) placements.back() = Shard(1 - dim);
          const Tensor x = distribute_tensor(whole, mesh, placements).requires_grad_();
          const CommTrace trace(mesh);
          const Tensor low = x.tril(-1), high = x.triu(2), sum = x.trace();
          Tensor diagonal;
          if (!both || dims.size() == 1) diagonal = x.diagonal();
          if (dim == 0 && !both) (diagonal * diagonal).backward(diagonal.detach());
          EXPECT_EQ(trace.events().size(), 0u) << trace.to_string();
          EXPECT_TRUE(at::equal(full_tensor(low), whole.tril(-1)));
          EXPECT_TRUE(at::equal(full_tensor(high), whole.triu(2)));
          EXPECT_EQ(full_tensor(sum).item<double>(), whole.trace().item<double>());
          if (diagonal.defined()) {
            EXPECT_TRUE(at::equal(full_tensor(diagonal), whole.diagonal()));
          }
          if (dim == 0 && !both) {
            EXPECT_TRUE(
                at::equal(full_tensor(x.grad()), (2 * whole.diagonal().square()).diag_embed()));
          }
        }
      }
    });
  }
}

// Cuts in another order than that of the mesh dimensions.
TEST(ViewRulesTest, AnyOrderOfCuts) {
  on_mesh({{"a", 2}, {"b", 3}}, [](const MeshPtr& mesh) {
    const Tensor whole = at::arange(7 * 6).view({7, 6});
    const Layout layout = *Layout::create({Shard(0), Shard(0)}, {1, 0});
    const Tensor x =
        redistribute(distribute_tensor(whole, mesh, Placements{Replicate(), Replicate()}), layout);
    for (const std::vector<int64_t>& to :
         std::vector<std::vector<int64_t>>{{42}, {7, 2, 3}, {1, 7, 6}, {6, 7}}) {
      const Tensor y = x.view(to);
      EXPECT_TRUE(at::equal(full_tensor(y), whole.view(to))) << layout_of(y).to_string();
    }
    const StrictScope strict(mesh);
    EXPECT_EQ(layout_of(x.view({7, 2, 3})), layout);
    EXPECT_EQ(layout_of(x.unsqueeze(1)).order(), layout.order());
  });
}

}  // namespace
}  // namespace shardweave
