// First, second and third derivatives through everything that moves a tensor explicitly, against
// one device.

#include <functional>
#include <vector>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
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
using torch::autograd::grad;

using Function = std::function<at::Tensor(const at::Tensor& x)>;

const std::vector<std::vector<MeshDim>> kMeshes = {{{"x", 2}}, {{"x", 3}}, {{"x", 2}, {"y", 2}}};

at::Tensor numbers(at::IntArrayRef sizes, double start) {
  int64_t n = 1;
  for (int64_t s : sizes) n *= s;
  return at::arange(n, at::kDouble).mul(0.37).add(start).sin().add(1.5).view(sizes);
}

at::Tensor whole_of(const at::Tensor& t) {
  return (is_dtensor(t) ? full_tensor(t) : t).detach();
}

// A tensor to multiply derivatives with, so that not all of their elements count alike.
at::Tensor weights_like(const at::Tensor& t, double start) {
  const at::Tensor plain = numbers(t.sizes(), start);
  if (!is_dtensor(t)) return plain;
  const MeshPtr mesh = mesh_of(t);
  return distribute_tensor(plain, mesh, Placements(mesh->mesh().ndim()), {.source = std::nullopt});
}

// The value of f(x).sum() and its first three derivatives, each weighted before the next.
std::vector<at::Tensor> derivatives(const Function& f, const at::Tensor& x) {
  std::vector<at::Tensor> result = {f(x)};
  for (int order = 1; order <= 3; ++order) {
    const at::Tensor& last = result.back();
    const at::Tensor loss = order == 1 ? last.sum() : (last * weights_like(last, order)).sum();
    result.push_back(grad({loss}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0]);
  }
  return result;
}

// f on DTensors against `plain` on one device.
void expect_derivatives(const Function& f, const at::Tensor& x, const Function& plain,
                        const at::Tensor& whole) {
  const auto want = derivatives(plain, whole.clone().requires_grad_());
  const auto got = derivatives(f, x);
  for (size_t order = 0; order < want.size(); ++order) {
    ASSERT_TRUE(at::allclose(whole_of(got[order]), want[order].detach()))
        << "derivative " << order << "\n"
        << whole_of(got[order]) << "\nwanted\n"
        << want[order];
    if (order > 0) {
      EXPECT_EQ(layout_of(got[order]), layout_of(x)) << "derivative " << order;
    }
  }
}

at::Tensor cubes(const at::Tensor& x) {
  return x.pow(2).mul(x);
}

// All pairs of layouts, or every n-th (the first decision on each costs far more than what follows).
void for_layouts(
    int every,
    const std::function<void(const MeshPtr&, const Placements& from, const Placements& to)>& body) {
  for (const auto& dims : kMeshes) {
    on_mesh(dims, [&](const MeshPtr& mesh) {
      const int ndim = static_cast<int>(dims.size());
      int pair = 0;
      for (const Placements& from : all_layouts(ndim, 2, false)) {
        for (const Placements& to : all_layouts(ndim, 2, true)) {
          if (ndim > 1 && pair++ % every != 0) continue;
          SCOPED_TRACE(to_string(from) + " -> " + to_string(to));
          body(mesh, from, to);
        }
      }
    });
  }
}

TEST(HigherDerivativesTest, Redistribute) {
  for_layouts(1, [](const MeshPtr& mesh, const Placements& from, const Placements& to) {
    const at::Tensor whole = numbers({5, 3}, 0);
    const at::Tensor x = distribute_tensor(whole, mesh, from).requires_grad_();
    expect_derivatives([&](const at::Tensor& t) { return cubes(redistribute(t, to)); }, x, cubes,
                       whole);
    // With something to derive on both sides.
    expect_derivatives([&](const at::Tensor& t) { return redistribute(t.pow(2), to).pow(2); }, x,
                       [](const at::Tensor& t) { return t.pow(4); }, whole);
  });
}

TEST(HigherDerivativesTest, RedistributeAsync) {
  for_layouts(5, [](const MeshPtr& mesh, const Placements& from, const Placements& to) {
    const at::Tensor whole = numbers({5, 3}, 0);
    const at::Tensor x = distribute_tensor(whole, mesh, from).requires_grad_();
    expect_derivatives([&](const at::Tensor& t) { return cubes(redistribute_async(t, to).wait()); },
                       x, cubes, whole);
  });
}

TEST(HigherDerivativesTest, RedistributeAll) {
  for_layouts(5, [](const MeshPtr& mesh, const Placements& from, const Placements& to) {
    const at::Tensor whole = numbers({5, 3}, 0);
    const at::Tensor x = distribute_tensor(whole, mesh, from).requires_grad_();
    expect_derivatives(
        [&](const at::Tensor& t) {
          const auto moved =
              redistribute_all({{t, t.pow(2), t}}, {{Layout(to), Layout(from), Layout(to)}});
          return moved[0] * moved[1] * moved[2];
        },
        x, [](const at::Tensor& t) { return t.pow(4); }, whole);
  });
}

TEST(HigherDerivativesTest, FullTensor) {
  for (const auto& dims : kMeshes) {
    on_mesh(dims, [&](const MeshPtr& mesh) {
      for (const Placements& from : all_layouts(static_cast<int>(dims.size()), 2, false)) {
        SCOPED_TRACE(to_string(from));
        const at::Tensor whole = numbers({5, 3}, 0);
        const at::Tensor x = distribute_tensor(whole, mesh, from).requires_grad_();
        expect_derivatives([](const at::Tensor& t) { return cubes(full_tensor(t)); }, x, cubes,
                           whole);
      }
    });
  }
}

// Out to the local parts and back.
TEST(HigherDerivativesTest, LocalRoundTrip) {
  for (const auto& dims : kMeshes) {
    on_mesh(dims, [&](const MeshPtr& mesh) {
      for (const Placements& from : all_layouts(static_cast<int>(dims.size()), 2, false)) {
        SCOPED_TRACE(to_string(from));
        const at::Tensor whole = numbers({5, 3}, 0);
        const at::Tensor x = distribute_tensor(whole, mesh, from).requires_grad_();
        expect_derivatives(
            [&](const at::Tensor& t) {
              return from_local(cubes(to_local(t)), mesh, from, t.sizes().vec());
            },
            x, cubes, whole);
      }
    });
  }
}

// Replicated copies that each rank uses differently: gradients that are Partial.
TEST(HigherDerivativesTest, GradPlacements) {
  for (const auto& dims : kMeshes) {
    on_mesh(dims, [&](const MeshPtr& mesh) {
      const at::Tensor whole = numbers({5, 3}, 0);
      const Placements replicated(dims.size());
      const Placements partial(dims.size(), Partial());
      const at::Tensor x = distribute_tensor(whole, mesh, replicated).requires_grad_();
      double n = 1;
      double mine = 0;
      for (size_t m = 0; m < dims.size(); ++m) {
        n *= static_cast<double>(dims[m].size);
        mine =
            mine * static_cast<double>(dims[m].size) + static_cast<double>(mesh->coordinate()[m]);
      }
      const double sum = n * (n + 1) / 2;
      // What all ranks' summands give together, and their average.
      const auto via = [&](const Placements& combined, double total) {
        const Function on_mesh_of = [&](const at::Tensor& t) {
          const at::Tensor local =
              cubes(to_local(redistribute(t, replicated), partial)) * (mine + 1);
          return from_local(local, mesh, combined, t.sizes().vec());
        };
        const auto want = derivatives([&](const at::Tensor& t) { return cubes(t) * total; },
                                      whole.clone().requires_grad_());
        const auto got = derivatives(on_mesh_of, x);
        for (size_t order = 0; order < want.size(); ++order) {
          ASSERT_TRUE(at::allclose(whole_of(got[order]), want[order].detach()))
              << to_string(combined) << ", derivative " << order << "\n"
              << whole_of(got[order]) << "\nwanted\n"
              << want[order];
        }
      };
      via(partial, sum);
      via(Placements(dims.size(), Partial(ReduceOp::kAvg)), sum / n);
      if (dims.size() == 2) via({Partial(), Partial(ReduceOp::kAvg)}, sum / 2);
      if (dims.size() == 2) via({Partial(ReduceOp::kAvg), Partial()}, sum / 2);
    });
  }
}

// Every rank's own leaf, combined by from_local(): the loss is what all ranks' losses add up to.
TEST(HigherDerivativesTest, FromLocalPartial) {
  for (int n : {2, 3}) {
    on_mesh({{"x", n}}, [n](const MeshPtr& mesh) {
      const int64_t mine = mesh->coordinate()[0];
      for (const Placement& combined :
           {Placement(Partial()), Placement(Partial(ReduceOp::kAvg)), Shard(0)}) {
        SCOPED_TRACE(combined.to_string());
        const auto v = [](int64_t r) { return numbers({2, 3}, 7.0 + static_cast<double>(r)); };
        std::vector<at::Tensor> leaves;
        for (int r = 0; r < n; ++r) leaves.push_back(numbers({2, 3}, r).requires_grad_());
        // On one device.
        at::Tensor whole = combined.is_shard() ? at::cat(leaves) : at::stack(leaves).sum(0);
        if (combined.is_partial(ReduceOp::kAvg)) whole = whole / n;
        const auto first = grad({cubes(whole).sum()}, leaves, {}, true, true);
        at::Tensor loss = at::zeros({}, at::kDouble);
        for (int r = 0; r < n; ++r) loss = loss + (first[r] * v(r)).sum();
        const auto second = grad({loss}, leaves, {}, true, true);
        at::Tensor loss2 = at::zeros({}, at::kDouble);
        for (int r = 0; r < n; ++r) loss2 = loss2 + (second[r] * v(r)).sum();
        const auto third = grad({loss2}, leaves);

        const at::Tensor x = numbers({2, 3}, static_cast<double>(mine)).requires_grad_();
        const at::Tensor t = from_local(x, mesh, {combined});
        const at::Tensor g1 = grad({cubes(t).sum()}, {x}, {}, true, true)[0];
        const at::Tensor g2 = grad({(g1 * v(mine)).sum()}, {x}, {}, true, true)[0];
        const at::Tensor g3 = grad({(g2 * v(mine)).sum()}, {x})[0];
        EXPECT_TRUE(at::allclose(g1, first[mine])) << g1 << first[mine];
        EXPECT_TRUE(at::allclose(g2, second[mine])) << g2 << second[mine];
        EXPECT_TRUE(at::allclose(g3, third[mine])) << g3 << third[mine];
      }
    });
  }
}

// Forward over reverse, by two reverse passes: the derivative with respect to grad_outputs.
TEST(HigherDerivativesTest, GradOutputsThatRequireGrad) {
  for_layouts(5, [](const MeshPtr& mesh, const Placements& from, const Placements& to) {
    const at::Tensor whole = numbers({5, 3}, 0);
    const at::Tensor x = distribute_tensor(whole, mesh, from).requires_grad_();
    for (bool plain : {true, false}) {
      at::Tensor v = plain ? numbers({5, 3}, 1) : distribute_tensor(numbers({5, 3}, 1), mesh, from);
      v.requires_grad_();
      const at::Tensor y = redistribute(x, to);
      const at::Tensor g = grad({y}, {x}, {v}, true, true)[0];
      const at::Tensor dv = grad({cubes(g).sum()}, {v})[0];
      EXPECT_EQ(is_dtensor(dv), !plain);
      EXPECT_TRUE(at::allclose(whole_of(dv), numbers({5, 3}, 1).pow(2).mul(3)))
          << plain << whole_of(dv);
    }
  });
}

// The norm of the gradient with respect to the input, in the loss, as WGAN-GP has it: parameters
// are gathered and activations moved explicitly and by the operators themselves.
TEST(HigherDerivativesTest, GradientPenalty) {
  auto penalty = [](const at::Tensor& out, const at::Tensor& x) {
    const at::Tensor gx = grad({out.sum()}, {x}, {}, true, /*create_graph=*/true)[0];
    return (gx.norm(2, {1}) - 1).pow(2).mean();
  };
  const at::Tensor x0 = numbers({6, 5}, 0);
  const at::Tensor w0 = numbers({5, 4}, 2);
  const at::Tensor u0 = numbers({4, 3}, 4);
  at::Tensor want[2];
  {
    at::Tensor x = x0.clone().requires_grad_();
    at::Tensor w = w0.clone().requires_grad_();
    at::Tensor u = u0.clone().requires_grad_();
    penalty(x.matmul(w).tanh().matmul(u).sigmoid(), x).backward();
    want[0] = w.grad();
    want[1] = u.grad();
  }
  for (const auto& dims : kMeshes) {
    on_mesh(dims, [&](const MeshPtr& mesh) {
      int pair = 0;
      for (const Placements& rows : all_layouts(static_cast<int>(dims.size()), 2, false)) {
        for (const Placements& columns : all_layouts(static_cast<int>(dims.size()), 2, false)) {
          if (dims.size() > 1 && pair++ % 4 != 0) continue;
          for (bool explicitly : {true, false}) {
            SCOPED_TRACE(absl::StrCat(to_string(rows), " ", to_string(columns), explicitly));
            const Placements replicated(dims.size());
            at::Tensor x = distribute_tensor(x0, mesh, rows).requires_grad_();
            at::Tensor w = distribute_tensor(w0, mesh, columns).requires_grad_();
            at::Tensor u = distribute_tensor(u0, mesh, rows).requires_grad_();
            auto gathered = [&](const at::Tensor& t) {
              return explicitly ? redistribute(t, replicated) : t;
            };
            const at::Tensor hidden = x.matmul(gathered(w)).tanh();
            const at::Tensor out =
                (explicitly ? redistribute(hidden, columns) : hidden).matmul(gathered(u)).sigmoid();
            penalty(out, x).backward();
            ASSERT_TRUE(at::allclose(whole_of(w.grad()), want[0])) << whole_of(w.grad()) << want[0];
            ASSERT_TRUE(at::allclose(whole_of(u.grad()), want[1])) << whole_of(u.grad()) << want[1];
          }
        }
      }
    });
  }
}

// Without create_graph nothing is recorded.
TEST(HigherDerivativesTest, OrdinaryBackwardRecordsNothing) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor x =
        distribute_tensor(numbers({5, 3}, 0), mesh, Placements{Shard(0)}).requires_grad_();
    for (const at::Tensor& y :
         {redistribute(x, {Replicate()}), redistribute_async(x, {Replicate()}).wait()}) {
      const at::Tensor g = grad({cubes(y).sum()}, {x})[0];
      EXPECT_FALSE(g.requires_grad());
      EXPECT_EQ(g.grad_fn(), nullptr);
    }
    EXPECT_FALSE(grad({cubes(full_tensor(x)).sum()}, {x})[0].requires_grad());
  });
}

// A second backward sends what the first one does, and says for whom.
TEST(HigherDerivativesTest, SecondBackwardIsSeen) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor x =
        distribute_tensor(numbers({6, 2}, 0), mesh, Placements{Shard(0)}).requires_grad_();
    const at::Tensor y = redistribute(x, {Replicate()}).pow(3);
    const at::Tensor g = grad({redistribute(y, {Shard(0)}).sum()}, {x}, {}, true, true)[0];
    CommTrace trace(mesh);
    grad({g.pow(2).sum()}, {x});
    std::vector<std::string> ops;
    for (const CommEvent& e : trace.events()) {
      EXPECT_FALSE(e.implicit) << e.to_string();
      ops.push_back(absl::StrCat(e.op, " ", e.collective));
    }
    EXPECT_THAT(ops, ::testing::Each("redistribute backward all_gather")) << trace.to_string();
    EXPECT_FALSE(ops.empty());
  });
}

}  // namespace
}  // namespace shardweave
