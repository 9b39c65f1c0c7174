// Every transition between layouts, executed on rank threads: values, gradients, counts.

#include "ATen/ATen.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/testing/on_mesh.h"

namespace shardweave {
namespace {

using testing::all_layouts;
using testing::on_mesh;
using testing::scattered;
using testing::try_on_mesh;

at::Tensor numbers(at::IntArrayRef sizes) {
  int64_t n = 1;
  for (int64_t s : sizes) n *= s;
  return at::arange(1, n + 1, at::kFloat).view(sizes);
}

// Whatever the layout, what the ranks hold together is `whole`.
void expect_value(const at::Tensor& tensor, const at::Tensor& whole) {
  const at::Tensor got = full_tensor(tensor);
  EXPECT_TRUE(at::equal(got, whole)) << layout_of(tensor).to_string() << "\n"
                                     << got << "\nwanted\n"
                                     << whole;
}

void check_all_transitions(const std::vector<MeshDim>& dims, at::IntArrayRef sizes) {
  on_mesh(dims, [&](const MeshPtr& mesh) {
    const at::Tensor whole = numbers(sizes);
    const auto layouts =
        all_layouts(static_cast<int>(dims.size()), static_cast<int>(sizes.size()), true);
    for (const Placements& from : layouts) {
      for (const Placements& to : layouts) {
        SCOPED_TRACE(to_string(from) + " -> " + to_string(to));
        const at::Tensor start = scattered(whole, mesh, from);
        const at::Tensor end = redistribute(start, to);
        EXPECT_EQ(layout_of(end), Layout(to));
        EXPECT_EQ(end.sizes(), whole.sizes());
        expect_value(end, whole);
        expect_value(start, whole);
      }
    }
  });
}

TEST(RedistributeTest, EveryTransitionOnOneDimension) {
  check_all_transitions({{"x", 2}}, {7, 5});
  check_all_transitions({{"x", 3}}, {7, 2, 4});
  check_all_transitions({{"x", 4}}, {3, 5});  // empty shards
}

TEST(RedistributeTest, EveryTransitionOnTwoDimensions) {
  check_all_transitions({{"x", 2}, {"y", 2}}, {7, 5});
  check_all_transitions({{"x", 2}, {"y", 3}}, {4, 3});
}

TEST(RedistributeTest, EveryTransitionOnThreeDimensions) {
  check_all_transitions({{"x", 2}, {"y", 1}, {"z", 2}}, {5});
}

TEST(RedistributeTest, StridedAndRagged) {
  on_mesh({{"x", 3}}, [](const MeshPtr& mesh) {
    const at::Tensor whole = numbers({12, 3});
    const std::vector<Placement> layouts = {Replicate(),
                                            Shard(0),
                                            Shard(1),
                                            StridedShard(0, 2),
                                            StridedShard(0, 5),
                                            RaggedShard(0, {5, 0, 7}),
                                            RaggedShard(0, {1, 10, 1}),
                                            Partial()};
    for (const Placement& from : layouts) {
      for (const Placement& to : layouts) {
        SCOPED_TRACE(from.to_string() + " -> " + to.to_string());
        expect_value(redistribute(scattered(whole, mesh, {from}), Placements{to}), whole);
      }
    }
  });
}

TEST(RedistributeTest, OrderOfCuts) {
  on_mesh({{"x", 2}, {"y", 3}}, [](const MeshPtr& mesh) {
    const at::Tensor whole = numbers({11, 2});
    const Layout inner_first = *Layout::create({Shard(0), Shard(0)}, {1, 0});
    const at::Tensor a = distribute_tensor(whole, mesh, Placements{Shard(0), Shard(0)});
    const at::Tensor b = redistribute(a, inner_first);
    EXPECT_EQ(layout_of(b), inner_first);
    expect_value(b, whole);
    expect_value(redistribute(b, {Shard(0), Shard(0)}), whole);
    expect_value(redistribute(b, {Replicate(), Shard(0)}), whole);
    expect_value(b + a, whole + whole);
  });
}

TEST(RedistributeTest, GradientComesBackInTheInputsLayout) {
  on_mesh({{"x", 2}, {"y", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor whole = at::arange(35, at::kFloat).view({7, 5});
    for (const Placements& from : all_layouts(2, 2, false)) {
      for (const Placements& to : all_layouts(2, 2, true)) {
        SCOPED_TRACE(to_string(from) + " -> " + to_string(to));
        at::Tensor leaf = distribute_tensor(whole, mesh, from).requires_grad_();
        redistribute(leaf, to).mul(distribute_tensor(whole, mesh, Placements(2))).sum().backward();
        ASSERT_TRUE(leaf.grad().defined());
        EXPECT_EQ(layout_of(leaf.grad()), Layout(from));
        expect_value(leaf.grad(), whole);
      }
    }
  });
}

TEST(RedistributeTest, LocalRoundTripKeepsGradients) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    // A replicated tensor of which each rank uses its own half: its gradient is Partial, and must
    // be said to be.
    at::Tensor leaf =
        distribute_tensor(numbers({4}), mesh, Placements{Replicate()}).requires_grad_();
    at::Tensor local = to_local(leaf, Placements{Partial()});
    at::Tensor half = local.narrow(0, 2 * mesh->coordinate()[0], 2) * 3;
    from_local(half, mesh, {Shard(0)}).sum().backward();
    EXPECT_EQ(layout_of(leaf.grad())[0], Partial());
    expect_value(leaf.grad(), at::full({4}, 3.f));
  });
}

TEST(RedistributeTest, FromLocalPartialHasTheWholeGradient) {
  on_mesh({{"x", 3}}, [](const MeshPtr& mesh) {
    for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg}) {
      at::Tensor local =
          at::full({2}, 1.0f + static_cast<float>(mesh->coordinate()[0])).requires_grad_();
      at::Tensor t = from_local(local, mesh, {Partial(op)});
      full_tensor(t).pow(2).sum().backward();
      const float value = op == ReduceOp::kSum ? 6 : 2;
      EXPECT_TRUE(
          at::allclose(local.grad(), at::full({2}, 2 * value / (op == ReduceOp::kSum ? 1 : 3))))
          << local.grad();
    }
  });
}

TEST(RedistributeTest, UnsignedIntegers) {
  on_mesh({{"x", 3}}, [](const MeshPtr& mesh) {
    for (at::ScalarType dtype : {at::kByte, at::kUInt16, at::kUInt32, at::kUInt64}) {
      const at::Tensor whole = at::arange(20).view({5, 4}).to(dtype);
      const at::Tensor rows = distribute_tensor(whole, mesh, Placements{Shard(0)});
      const at::Tensor columns = redistribute(rows, Placements{Shard(1)});
      for (const at::Tensor& t : {rows, columns}) {
        EXPECT_EQ(t.scalar_type(), dtype);
        EXPECT_TRUE(at::equal(full_tensor(t).to(at::kLong), whole.to(at::kLong))) << dtype;
      }
    }
  });
}

TEST(RedistributeTest, WrongInput) {
  auto message = [](const std::function<void(const MeshPtr&)>& body) {
    return std::string(try_on_mesh({{"x", 2}}, body).message());
  };
  EXPECT_THAT(
      message([](const MeshPtr& m) { distribute_tensor(at::ones({2}), m, Placements{Shard(1)}); }),
      ::testing::HasSubstr("S(1)"));
  EXPECT_THAT(message([](const MeshPtr& m) {
                distribute_tensor(at::ones({2}), m, Placements{Shard(0), Shard(0)});
              }),
              ::testing::HasSubstr("2 placements"));
  EXPECT_THAT(message([](const MeshPtr& m) {
                distribute_tensor(at::ones({2}), m, NamedPlacements{{"tp", Shard(0)}});
              }),
              ::testing::HasSubstr("tp"));
  EXPECT_THAT(
      message([](const MeshPtr& m) { distribute_tensor(at::ones({2}), m, Placements{Partial()}); }),
      ::testing::HasSubstr("Partial"));
  EXPECT_THAT(message([](const MeshPtr&) { redistribute(at::ones({2}), Placements{Shard(0)}); }),
              ::testing::HasSubstr("plain tensor of shape [2]"));
  EXPECT_THAT(message([](const MeshPtr& m) {
                from_local(at::ones({2 + m->coordinate()[0]}), m, {Shard(0)});
              }),
              ::testing::HasSubstr("rank 0 at [0] has the local shape [2], but the layout [S(0)] "
                                   "cuts the global shape [5] into [3] there"));
}

}  // namespace
}  // namespace shardweave
