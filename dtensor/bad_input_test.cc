// Bad input to operators: the error that plain tensors give, on every rank, before anything is
// sent.
#include <functional>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/testing/on_mesh.h"

namespace shardweave::testing {
namespace {

using Tensors = std::vector<at::Tensor>;

// What they work on: [4, 4], [3], [2, 3, 4]; [4] and [3] of int64.
Tensors operands() {
  return {at::ones({4, 4}), at::ones({3}), at::ones({2, 3, 4}), at::arange(4), at::arange(3)};
}

struct BadCall {
  const char* name;
  std::function<void(const Tensors&)> run;
};

const BadCall kBadCalls[] = {
    {"shapes that do not broadcast", [](const Tensors& x) { x[0] + x[1]; }},
    {"in place, of a larger shape", [](const Tensors& x) { x[1].clone().add_(x[2].sum(0)); }},
    {"matrices that do not fit", [](const Tensors& x) { at::mm(x[0], x[1]); }},
    {"inner dimensions", [](const Tensors& x) { at::matmul(x[0], x[1]); }},
    {"batches that do not fit", [](const Tensors& x) { at::bmm(x[2], x[2]); }},
    {"dtypes of a product", [](const Tensors& x) { at::mm(x[0], x[0].to(at::kDouble)); }},
    {"dim out of range", [](const Tensors& x) { x[0].sum({2}); }},
    {"dim twice", [](const Tensors& x) { x[0].sum({1, -1}); }},
    {"softmax of a dim that is not there", [](const Tensors& x) { at::softmax(x[0], 5); }},
    {"a view of another size", [](const Tensors& x) { x[0].view({3, 5}); }},
    {"two sizes to guess", [](const Tensors& x) { x[0].view({-1, -1}); }},
    {"transpose", [](const Tensors& x) { x[0].transpose(0, 2); }},
    {"permute", [](const Tensors& x) { x[2].permute({0, 0, 1}); }},
    {"cat", [](const Tensors& x) { at::cat({x[0], x[2]}, 0); }},
    {"stack", [](const Tensors& x) { at::stack({x[0], x[1]}); }},
    {"split", [](const Tensors& x) { x[0].split_with_sizes({1, 2}, 0); }},
    {"select", [](const Tensors& x) { x[0].select(0, 4); }},
    {"narrow", [](const Tensors& x) { x[0].narrow(0, 3, 2); }},
    {"expand", [](const Tensors& x) { x[1].expand({2, 4}); }},
    {"squeeze", [](const Tensors& x) { x[0].squeeze(3); }},
    {"gather with floats", [](const Tensors& x) { at::gather(x[0], 0, x[0]); }},
    {"gather of another rank", [](const Tensors& x) { at::gather(x[2], 0, x[3]); }},
    {"index_select of a dim", [](const Tensors& x) { at::index_select(x[0], 2, x[3]); }},
    {"embedding of floats", [](const Tensors& x) { at::embedding(x[0], x[0]); }},
    {"layer_norm of another shape", [](const Tensors& x) { at::layer_norm(x[0], {3}, x[1]); }},
    {"topk", [](const Tensors& x) { x[0].topk(5, 0); }},
    {"cumsum", [](const Tensors& x) { x[0].cumsum(2); }},
    {"a loss of two shapes", [](const Tensors& x) { at::nll_loss(x[0], x[4]); }},
    {"tril of a vector", [](const Tensors& x) { x[1].tril(); }},
    {"flip", [](const Tensors& x) { x[0].flip({0, 0}); }},
    {"no rule: inverse", [](const Tensors& x) { at::linalg_inv(x[2]); }},
    {"no rule: cholesky", [](const Tensors& x) { at::linalg_cholesky(x[1]); }},
};

// The message up to where LibTorch says where it was thrown.
std::string what(const std::function<void()>& f) {
  try {
    f();
  } catch (const c10::Error& e) {
    return e.what_without_backtrace();
  } catch (const std::exception& e) {
    return e.what();
  }
  return "no error";
}

TEST(BadInputTest, TheSameErrorAsOnPlainTensorsBeforeAnythingIsSent) {
  on_mesh({{"x", 3}}, [](const MeshPtr& mesh) {
    const Tensors plain = operands();
    for (const BadCall& bad : kBadCalls) {
      const std::string want = what([&] { bad.run(plain); });
      ASSERT_NE(want, "no error") << bad.name;
      for (const Placement& placement : {Shard(0), Replicate()}) {
        Tensors sharded;
        for (const at::Tensor& t : plain) {
          sharded.push_back(distribute_tensor(t, mesh, Placements{placement}));
        }
        const DispatchCounters before = dispatch_counters(mesh);
        EXPECT_EQ(what([&] { bad.run(sharded); }), want) << bad.name << ", " << placement;
        EXPECT_EQ(dispatch_counters(mesh).implicit_redistributions, before.implicit_redistributions)
            << bad.name << ", " << placement;
      }
    }
  });
}

}  // namespace
}  // namespace shardweave::testing
