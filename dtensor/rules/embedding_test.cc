// The gradient of a table that is cut by rows: each rank works out its own rows, if autograd makes it
// for a parameter and the incoming gradient is whole.
#include <vector>

#include "ATen/ATen.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/testing/expect_comms.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "torch/csrc/autograd/autograd.h"

namespace shardweave {
namespace {

using at::Tensor;
using testing::on_mesh;

constexpr int64_t kColumns = 3;

Tensor table_of(int64_t rows) {
  return at::arange(rows * kColumns, at::kDouble).view({rows, kColumns}).sin();
}

struct Lookup {
  Placements table, indices;
  Placements gradient;  // as backward leaves it
};

// Rows that are looked up often, never, and as padding; ranks that have none.
void expect_gradient(const MeshPtr& mesh, const Lookup& lookup, int64_t rows, int64_t padding) {
  SCOPED_TRACE(to_string(lookup.table) + to_string(lookup.indices) + std::to_string(rows));
  const Tensor plain = table_of(rows).requires_grad_();
  const Tensor table = distribute_tensor(plain.detach(), mesh, lookup.table).requires_grad_();
  const Tensor at = (at::arange(20, at::kLong).square().view({4, 5})).remainder(rows);
  const Tensor indices = distribute_tensor(at, mesh, lookup.indices);
  const auto loss = [&](const Tensor& of, const Tensor& where) {
    return at::embedding(of, where, padding).pow(3).sum();
  };
  loss(plain, at).backward();
  const Tensor y = at::embedding(table, indices, padding);
  Placements whole = layout_of(y).placements();
  for (Placement& p : whole) {
    if (p.is_partial()) p = Replicate();
  }
  const Tensor z = redistribute(y, whole).pow(3).sum();
  CommTrace trace(mesh);
  z.backward();
  EXPECT_COMMS(trace, {});
  EXPECT_EQ(layout_of(table.grad()).placements(), lookup.gradient);
  EXPECT_TRUE(at::allclose(full_tensor(table.grad()), plain.grad(), 1e-12, 1e-12))
      << full_tensor(table.grad()) << plain.grad();
}

TEST(EmbeddingTest, ARankWorksOutTheGradientOfItsOwnRows) {
  for (int64_t ranks : {2, 3}) {
    on_mesh({{"tp", ranks}}, [](const MeshPtr& mesh) {
      for (int64_t rows : {1, 2, 6, 7, 11}) {
        for (int64_t padding : {-1, 0}) {
          expect_gradient(mesh, {{Shard(0)}, {Replicate()}, {Shard(0)}}, rows, padding);
          expect_gradient(mesh, {{StridedShard(0, 2)}, {Replicate()}, {StridedShard(0, 2)}}, rows,
                          padding);
        }
      }
    });
  }
  on_mesh({{"dp", 2}, {"tp", 2}}, [](const MeshPtr& mesh) {
    for (int64_t rows : {1, 3, 7, 8}) {
      expect_gradient(mesh,
                      {{Replicate(), Shard(0)}, {Shard(0), Replicate()}, {Partial(), Shard(0)}},
                      rows, 1 % rows);
      expect_gradient(
          mesh, {{Shard(0), Shard(0)}, {Replicate(), Replicate()}, {Shard(0), Shard(0)}}, rows, -1);
      expect_gradient(
          mesh, {{Replicate(), Shard(0)}, {Replicate(), Replicate()}, {Replicate(), Shard(0)}},
          rows, -1);
    }
  });
}

// What comes in cut by columns is gathered, unless the table itself is less.
TEST(EmbeddingTest, RowsOfAGradientThatComesByColumns) {
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    for (const int64_t rows : {400, 3}) {
      const Tensor plain = table_of(rows).requires_grad_();
      const Tensor table = distribute_tensor(plain.detach(), mesh, {Shard(0)}).requires_grad_();
      const Tensor at = (at::arange(20, at::kLong).square()).remainder(rows);
      const Tensor factor = table_of(20);
      const Tensor columns = distribute_tensor(factor, mesh, {Shard(1)});
      (at::embedding(plain, at) * factor).pow(3).sum().backward();
      const Tensor y = at::embedding(table, distribute_tensor(at, mesh, {Replicate()}));
      const Tensor loss = (y * columns).pow(3).sum();
      CommTrace trace(mesh);
      loss.backward();
      if (rows == 400) {
        EXPECT_EQ(layout_of(table.grad()), Layout({Shard(0)}));
        EXPECT_COMMS(
            trace,
            {testing::all_gather("tp").by("aten::embedding_dense_backward").of("grad_output")});
      }
      EXPECT_TRUE(at::allclose(full_tensor(table.grad()), plain.grad(), 1e-12, 1e-12));
    }
  });
}

// Neither a table that is computed nor one whose rows are scaled by how often they are looked up
// has the gradient of some rows.
TEST(EmbeddingTest, OtherGradientsAreWhole) {
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    const Tensor plain = table_of(6).requires_grad_();
    const Tensor table = distribute_tensor(plain.detach(), mesh, {Shard(0)}).requires_grad_();
    const Tensor at = at::arange(8, at::kLong).remainder(5);
    const Tensor indices = distribute_tensor(at, mesh, {Replicate()});
    at::embedding(plain * 2, at).pow(3).sum().backward();
    at::embedding(table * 2, indices).pow(3).sum().backward();
    EXPECT_TRUE(at::allclose(full_tensor(table.grad()), plain.grad(), 1e-12, 1e-12));
    plain.mutable_grad().reset();
    table.mutable_grad().reset();
    at::embedding(plain, at, -1, true).pow(3).sum().backward();
    at::embedding(table, indices, -1, true).pow(3).sum().backward();
    EXPECT_TRUE(at::allclose(full_tensor(table.grad()), plain.grad(), 1e-12, 1e-12));
  });
}

// Its gradient has one, too.
TEST(EmbeddingTest, SecondDerivatives) {
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    const auto second = [](const Tensor& table, const Tensor& indices) {
      const Tensor loss = at::embedding(table, indices).pow(3).sum();
      const Tensor grad = torch::autograd::grad({loss}, {table}, {}, true, true)[0];
      return torch::autograd::grad({grad.pow(2).sum()}, {table})[0];
    };
    const Tensor plain = table_of(6).requires_grad_();
    const Tensor table = distribute_tensor(plain.detach(), mesh, {Shard(0)}).requires_grad_();
    const Tensor at = at::arange(8, at::kLong).remainder(5);
    const Tensor got = second(table, distribute_tensor(at, mesh, {Replicate()}));
    EXPECT_TRUE(at::allclose(full_tensor(got), second(plain, at), 1e-12, 1e-12));
  });
}

// Whether a table is large beside what is looked up in it is a question of the ranks that share it, and
// not of how many others look things up.
TEST(EmbeddingTest, MoreBatchesMakeNoTableSmaller) {
  on_mesh({{"dp", 4}, {"tp", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor rows = at::arange(16 * 3, at::kFloat).view({16, 3});
    const at::Tensor ids = at::arange(2048).remainder(16).view({8, 256});
    const at::Tensor table = distribute_tensor(rows, mesh, Placements{Replicate(), Shard(0)});
    const at::Tensor indices = distribute_tensor(ids, mesh, Placements{Shard(0), Replicate()});
    const at::Tensor found = at::embedding(table, indices);
    EXPECT_EQ(layout_of(found).placements(), (Placements{Shard(0), Partial()}));
    EXPECT_TRUE(at::equal(full_tensor(found), at::embedding(rows, ids)));
  });
}

}  // namespace
}  // namespace shardweave
