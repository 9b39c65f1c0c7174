// Ranks that have gone apart get an error at the next collective, never each other's numbers; what
// one rank may do alone, it still may.
#include "shardweave/dtensor/engine/provenance.h"

#include <functional>
#include <string>

#include "ATen/ATen.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/random.h"
#include "shardweave/dtensor/testing/on_mesh.h"

namespace shardweave {
namespace {

using dtensor_internal::meta_of;
using dtensor_internal::provenance_of;
using ::testing::HasSubstr;
using testing::on_mesh;
using testing::try_on_mesh;

bool is_first(const MeshPtr& mesh) {
  for (int64_t c : mesh->coordinate()) {
    if (c != 0) return false;
  }
  return true;
}

at::Tensor batch(const MeshPtr& mesh) {
  return distribute_tensor(at::ones({5, 3}), mesh, {Shard(0)});
}

// `body` gets whether it runs on the first rank.
void expect_apart(const std::function<void(const MeshPtr&, bool)>& body) {
  for (const std::vector<MeshDim>& dims :
       {std::vector<MeshDim>{{"x", 2}}, std::vector<MeshDim>{{"x", 3}}}) {
    const absl::Status status =
        try_on_mesh(dims, [&](const MeshPtr& mesh) { body(mesh, is_first(mesh)); });
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("different things"));
  }
}

TEST(ProvenanceTest, ItemOnOneRankAloneIsNoOtherSum) {
  expect_apart([](const MeshPtr& mesh, bool first) {
    const at::Tensor x = batch(mesh);
    const at::Tensor loss = (x * 2).sum(), extra = (x * 200).sum();
    if (first) loss.item<double>();
    extra.item<double>();
    loss.item<double>();
  });
}

TEST(ProvenanceTest, AnotherOperatorShapeNumberOrTensor) {
  expect_apart([](const MeshPtr& mesh, bool first) {
    const at::Tensor x = batch(mesh);
    (first ? x.exp() : x.sin()).sum().item<double>();
  });
  expect_apart([](const MeshPtr& mesh, bool first) {
    distribute_tensor(at::ones({4, first ? 3 : 4}), mesh, {Shard(0)}, {.source = std::nullopt})
        .sum()
        .item<double>();
  });
  expect_apart([](const MeshPtr& mesh, bool first) {
    (batch(mesh) * (first ? 2.0 : 3.0)).sum().item<double>();
  });
  expect_apart([](const MeshPtr& mesh, bool first) {
    const at::Tensor one = batch(mesh), other = batch(mesh);
    (first ? one : other).sum().item<double>();
  });
  expect_apart([](const MeshPtr& mesh, bool first) {
    at::Tensor x = batch(mesh);
    if (first) x.add_(1);
    full_tensor(x);
  });
  expect_apart([](const MeshPtr& mesh, bool first) {
    const at::Tensor x = batch(mesh), view = x.slice(1, 0, 2);
    if (first) x.mul_(1);
    full_tensor(view);
  });
}

TEST(ProvenanceTest, AnotherSeed) {
  expect_apart([](const MeshPtr& mesh, bool first) {
    manual_seed(mesh, first ? 1 : 2);
    const at::Tensor noise = at::rand_like(zeros({3}, mesh, {Replicate()}));
    (batch(mesh) * noise).sum().item<double>();
  });
}

TEST(ProvenanceTest, GradientsOfOtherLosses) {
  expect_apart([](const MeshPtr& mesh, bool first) {
    at::Tensor w = distribute_tensor(at::ones({3, 2}), mesh, {Replicate()}).requires_grad_();
    const at::Tensor y = batch(mesh).mm(w);
    (first ? y.sin() : y.cos()).sum().backward();
    finish_grad_sync({w});
  });
}

// What sends nothing is the rank's own affair.
TEST(ProvenanceTest, OneRankMayLookAtWhatItHas) {
  on_mesh({{"x", 3}}, [](const MeshPtr& mesh) {
    at::Tensor w = distribute_tensor(at::ones({3, 2}), mesh, {Replicate()}).requires_grad_();
    for (int step = 0; step < 3; ++step) {
      const at::Tensor x = batch(mesh);
      const at::Tensor y = x.mm(w);
      if (is_first(mesh)) {
        EXPECT_GT(w.detach().abs().max().item<double>(), 0);
        y.to(at::kDouble).relu();
        w.t().clone();
      }
      y.sum().backward();
      finish_grad_sync({w});
      const at::Tensor held = is_first(mesh) ? w.grad() : at::Tensor();
      EXPECT_EQ(full_tensor(w.grad())[0][0].item<double>(), 5.0 * (step + 1));
    }
  });
}

// A view that one rank has taken, and writes to what it is a view of, on all ranks.
TEST(ProvenanceTest, AViewThatOneRankAloneHasIsItsOwnAffair) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    at::Tensor w = distribute_tensor(at::ones({4, 2}), mesh, {Shard(0)});
    const at::Tensor view = is_first(mesh) ? w.t() : at::Tensor();
    for (int step = 0; step < 2; ++step) w.add_(1);
    EXPECT_EQ(w.sum().item<double>(), 24);
  });
}

// Autograd then clones the gradient on that rank, where it takes it as it is on the others.
TEST(ProvenanceTest, OneRankMayHoldGradients) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    at::Tensor w = distribute_tensor(at::ones({3, 2}), mesh, {Replicate()}).requires_grad_();
    std::vector<at::Tensor> held;
    w.register_hook([&](const at::Tensor& grad) {
      if (is_first(mesh)) held.push_back(grad);
    });
    for (int step = 0; step < 3; ++step) batch(mesh).mm(w).sum().backward();
    finish_grad_sync({w});
    EXPECT_EQ(full_tensor(w.grad())[0][0].item<double>(), 15);
  });
}

// What is done to local parts differs from rank to rank by intent: one has no token for its expert.
TEST(ProvenanceTest, LocalPartsAreTheRanksOwn) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    at::Tensor w = distribute_tensor(at::ones({3, 2}), mesh, {Replicate()}).requires_grad_();
    const at::Tensor y = batch(mesh).mm(w).sum();
    y.backward();
    const at::Tensor local = to_local(w, Placements{Partial()});
    if (is_first(mesh)) local.sum().backward();
    finish_grad_sync({w});
    EXPECT_EQ(full_tensor(w.grad())[0][0].item<double>(), 6);
  });
}

TEST(ProvenanceTest, OneRankMayMakeTensorsThatItAloneUses) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    if (is_first(mesh)) zeros({3}, mesh, {Replicate()}).add_(1);
    EXPECT_EQ(batch(mesh).sum().item<double>(), 15);
  });
}

// The same in every process: nothing of an address or of a process's own hashes is in it.
TEST(ProvenanceTest, IsAFunctionOfTheProgram) {
  uint64_t numbers[2][2];
  for (auto& run : numbers) {
    on_mesh({{"x", 2}}, [&](const MeshPtr& mesh) {
      const at::Tensor y = at::softmax(batch(mesh) * 3, 1).sum({0}, /*keepdim=*/true);
      run[mesh->coordinate()[0]] = provenance_of(meta_of(y));
    });
  }
  EXPECT_EQ(numbers[0][0], numbers[0][1]);
  EXPECT_EQ(numbers[0][0], numbers[1][0]);
  EXPECT_EQ(numbers[0][0], numbers[1][1]);
  EXPECT_NE(numbers[0][0], 0);
}

}  // namespace
}  // namespace shardweave
