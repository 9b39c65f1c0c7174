// What DTensors keep alive: a local part owns just its bytes, whatever way it came.

#include <memory>
#include <optional>
#include <vector>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "c10/util/intrusive_ptr.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/observe/comm_trace.h"
#include "shardweave/dtensor/redistribute_async.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "torch/csrc/autograd/autograd.h"

namespace shardweave {
namespace {

using testing::all_layouts;
using testing::on_mesh;
using testing::scattered;

const std::vector<std::vector<MeshDim>> kMeshes = {{{"x", 2}}, {{"x", 3}}, {{"x", 2}, {"y", 2}}};

at::Tensor numbers(at::IntArrayRef sizes) {
  int64_t n = 1;
  for (int64_t s : sizes) n *= s;
  return at::arange(1, n + 1, at::kFloat).view(sizes);
}

::testing::AssertionResult owns_its_bytes(const at::Tensor& tensor) {
  const at::Tensor local = to_local(tensor).detach();
  const size_t bytes = local.numel() * local.itemsize();
  if (local.storage().nbytes() == bytes) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << describe(tensor) << " of " << bytes << " bytes keeps " << local.storage().nbytes();
}

// The layouts of a mesh, and cuts of other kinds on meshes of one dimension.
std::vector<Placements> layouts_on(const std::vector<MeshDim>& dims, bool partial) {
  std::vector<Placements> layouts = all_layouts(static_cast<int>(dims.size()), 2, partial);
  if (dims.size() == 1) {
    std::vector<int64_t> ragged(dims[0].size, 1);
    ragged[0] = 7 - dims[0].size + 1;
    layouts.push_back({RaggedShard(0, ragged)});
    layouts.push_back({StridedShard(0, 2)});
    layouts.push_back({StridedShard(1, 3)});
  }
  return layouts;
}

TEST(MemoryTest, DistributeTensor) {
  for (const auto& dims : kMeshes) {
    on_mesh(dims, [&](const MeshPtr& mesh) {
      for (const Placements& layout : layouts_on(dims, false)) {
        for (std::optional<int64_t> source :
             {std::optional<int64_t>(), std::optional<int64_t>(0), std::optional<int64_t>(1)}) {
          for (bool transposed : {false, true}) {
            const at::Tensor whole = transposed ? numbers({5, 7}).t() : numbers({7, 5});
            const at::Tensor t = distribute_tensor(whole, mesh, layout, {.source = source});
            EXPECT_TRUE(owns_its_bytes(t)) << source.value_or(-1) << transposed;
            EXPECT_FALSE(to_local(t).is_alias_of(whole));
            EXPECT_TRUE(at::equal(full_tensor(t), whole));
          }
        }
      }
    });
  }
}

TEST(MemoryTest, Redistribute) {
  for (const auto& dims : kMeshes) {
    on_mesh(dims, [&](const MeshPtr& mesh) {
      const at::Tensor whole = numbers({7, 5});
      const auto layouts = layouts_on(dims, true);
      for (const Placements& from : layouts) {
        for (const Placements& to : layouts) {
          SCOPED_TRACE(to_string(from) + " -> " + to_string(to));
          const at::Tensor start =
              redistribute(scattered(whole, mesh, Placements(dims.size())), from);
          if (from == to) continue;
          EXPECT_TRUE(owns_its_bytes(redistribute(start, to)));
          EXPECT_TRUE(owns_its_bytes(redistribute_async(start, to).wait()));
          const at::Tensor other = start * 2;
          for (const at::Tensor& t :
               redistribute_all({{start, other}}, {{Layout(to), Layout(to)}})) {
            EXPECT_TRUE(owns_its_bytes(t)) << "all";
          }
          for (const at::Tensor& t : {start, other}) EXPECT_TRUE(owns_its_bytes(t));
        }
      }
    });
  }
}

TEST(MemoryTest, ComplexNumbers) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor whole = at::complex(numbers({6, 4}), numbers({6, 4}));
    for (const Placement& to : {Shard(0), Shard(1)}) {
      const at::Tensor t = distribute_tensor(whole, mesh, Placements{to});
      EXPECT_TRUE(owns_its_bytes(t));
      const at::Tensor r = redistribute(t, {Replicate()});
      EXPECT_TRUE(owns_its_bytes(r));
      EXPECT_TRUE(owns_its_bytes(redistribute(r, {to})));
      EXPECT_TRUE(at::equal(full_tensor(redistribute(r, {to})), whole));
    }
  });
}

// Gradients in all layouts that they arrive in, and in the parameters' after finish_grad_sync().
TEST(MemoryTest, Gradients) {
  for (const auto& dims : kMeshes) {
    on_mesh(dims, [&](const MeshPtr& mesh) {
      const at::Tensor whole = numbers({7, 5});
      for (const Placements& to : layouts_on(dims, false)) {
        for (const Placements& from : layouts_on(dims, true)) {
          SCOPED_TRACE(to_string(from) + " -> " + to_string(to));
          at::Tensor leaf = distribute_tensor(whole, mesh, to).requires_grad_();
          redistribute(leaf, from).sum().backward();
          EXPECT_TRUE(owns_its_bytes(leaf.grad()));

          std::vector<at::Tensor> parameters;
          for (int i = 0; i < 3; ++i) {
            parameters.push_back(distribute_tensor(whole, mesh, to).requires_grad_());
            parameters.back().mutable_grad() =
                scattered(whole, mesh, Placements(dims.size())).mul(i + 1);
            parameters.back().mutable_grad() = redistribute(parameters.back().grad(), from);
          }
          finish_grad_sync(parameters);
          for (int i = 0; i < 3; ++i) {
            const at::Tensor grad = parameters[i].grad();
            EXPECT_EQ(layout_of(grad), Layout(to));
            EXPECT_TRUE(owns_its_bytes(grad));
            EXPECT_TRUE(at::equal(full_tensor(grad), whole * (i + 1)));
          }
        }
      }
    });
  }
}

using Storage = c10::weak_intrusive_ptr<c10::StorageImpl>;
Storage storage_of(const at::Tensor& plain) {
  return Storage(
      c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(plain.storage().unsafeGetStorageImpl()));
}

// Nothing that autograd keeps needs the values.
TEST(MemoryTest, LeavingKeepsNoActivation) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    at::Tensor leaf =
        distribute_tensor(numbers({6, 4}), mesh, Placements{Shard(0)}).requires_grad_();
    for (int how = 0; how < 3; ++how) {
      SCOPED_TRACE(how);
      at::Tensor activation = leaf * 2;
      const Storage storage = storage_of(to_local(activation).detach());
      at::Tensor out = how == 0   ? to_local(activation) + 1
                       : how == 1 ? full_tensor(activation) + 1
                                  : redistribute_async(activation, {Replicate()}).wait() + 1;
      EXPECT_FALSE(storage.expired());
      activation.reset();
      EXPECT_TRUE(storage.expired());
      out.sum().backward();
      EXPECT_TRUE(at::equal(full_tensor(leaf.grad()), at::full({6, 4}, 2.f)));
      leaf.mutable_grad().reset();
    }
  });
}

TEST(MemoryTest, APendingTensorLetsItsSourceGo) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    at::Tensor source = distribute_tensor(numbers({6, 4}), mesh, Placements{Shard(0)});
    const Storage storage = storage_of(to_local(source));
    PendingTensor pending = redistribute_async(source, {Replicate()});
    source.reset();
    EXPECT_TRUE(at::equal(full_tensor(pending.wait()), numbers({6, 4})));
    EXPECT_TRUE(storage.expired());
    EXPECT_TRUE(pending.done());
    EXPECT_TRUE(pending.wait().is_same(pending.wait()));
  });
}

// Two leaves get one gradient, or it has other strides than they: autograd copies it. A copy of a
// Partial is one, and is reduced with the others.
TEST(MemoryTest, PartialGradientsThatAutogradClonesAreReducedTogether) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor rows = numbers({6, 4}).div(10);
    const at::Tensor x = distribute_tensor(rows, mesh, Placements{Shard(0)});
    std::vector<at::Tensor> parameters;
    std::vector<at::Tensor> plain;
    for (int i = 0; i < 4; ++i) {
      const at::Tensor value = numbers({4, 3}).sub(i);
      parameters.push_back(
          distribute_tensor(value, mesh, Placements{Replicate()}).requires_grad_());
      plain.push_back(value.clone().requires_grad_());
    }
    auto loss = [](const at::Tensor& input, const std::vector<at::Tensor>& p) {
      // The gradients of the first two are one tensor; that of the third is a transpose.
      return (input.matmul(p[0] + p[1]) + at::matmul(p[2].t(), input.t()).t() + input.matmul(p[3]))
          .sum();
    };
    loss(rows, plain).backward();
    for (int step = 0; step < 2; ++step) {
      CommTrace trace(mesh);
      loss(x, parameters).backward();
      EXPECT_TRUE(trace.events().empty()) << trace.to_string();
      for (const at::Tensor& p : parameters) {
        if (step == 0) {
          EXPECT_EQ(layout_of(p.grad())[0], Partial());
        }
      }
      trace.clear();
      finish_grad_sync(parameters);
      ASSERT_EQ(trace.events().size(), 1u) << trace.to_string();
      for (size_t i = 0; i < plain.size(); ++i) {
        EXPECT_TRUE(at::allclose(full_tensor(parameters[i].grad()), plain[i].grad()));
        EXPECT_TRUE(owns_its_bytes(parameters[i].grad()));
        parameters[i].mutable_grad().reset();
      }
    }
  });
}

}  // namespace
}  // namespace shardweave
