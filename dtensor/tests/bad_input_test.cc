// Bad input to operators: the error that plain tensors give, on every rank, before anything is
// sent. Bad values that one rank holds: that error there, and the others hear of it at once.
#include <algorithm>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/testing/counted_mesh.h"
#include "shardweave/dtensor/testing/on_mesh.h"

namespace shardweave::testing {
namespace {

using ::testing::HasSubstr;
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

// Where a number makes the operator raise: in the last row, which the last rank has.
struct BadValue {
  const char* name;
  at::Tensor x, y;
  at::Tensor (*run)(const at::Tensor& x, const at::Tensor& y);
  const char* error;  // of plain tensors
};

at::Tensor with_last(at::Tensor y, double bad) {
  y.view(-1)[y.numel() - 1] = bad;
  return y;
}

at::Tensor replicated(const at::Tensor& table) {
  return is_dtensor(table) ? redistribute(table, {Replicate()}) : table;
}

std::vector<BadValue> bad_values() {
  using T = const at::Tensor&;
  const at::Tensor x = at::linspace(0.1, 0.9, 30, at::kDouble).view({6, 5});
  const at::Tensor classes = with_last(at::arange(6).remainder(5), 9);
  const at::Tensor places = with_last(at::arange(30).view({6, 5}).remainder(5), 9);
  return {
      {"cross_entropy", x, classes, [](T a, T b) { return at::cross_entropy_loss(a, b); },
       "Target 9 is out of bounds"},
      {"nll_loss", x, classes, [](T a, T b) { return at::nll_loss(a, b, {}, at::Reduction::None); },
       "Target 9 is out of bounds"},
      {"nll_loss2d", x.view({6, 5, 1, 1}), classes.view({6, 1, 1}),
       [](T a, T b) { return at::nll_loss2d(a, b, {}, at::Reduction::Sum); },
       "Target 9 is out of bounds"},
      {"multi_margin_loss", x, classes, [](T a, T b) { return at::multi_margin_loss(a, b); },
       "target out of range"},
      {"binary_cross_entropy", x.clone(), with_last(x.clone(), 2),
       [](T a, T b) { return at::binary_cross_entropy(b, a); },
       "all elements of input should be between 0 and 1"},
      {"gather", x, places, [](T a, T b) { return at::gather(a, 1, b); },
       "index 9 is out of bounds"},
      {"scatter", x, places, [](T a, T b) { return at::scatter(a, 1, b, 1.0); },
       "index 9 is out of bounds"},
      {"embedding", x, classes, [](T a, T b) { return at::embedding(replicated(a), b); },
       "index out of range in self"},
      {"index_select", x, classes, [](T a, T b) { return at::index_select(replicated(a), 0, b); },
       "index out of range in self"},
  };
}

// For every rank to raise by itself, each call would need a collective.
TEST(BadInputTest, ABadValueIsAnErrorWhereItIsAndTheOthersHearWhoseAndWhich) {
  constexpr int kRanks = 3;
  for (const BadValue& bad : bad_values()) {
    ASSERT_THAT(what([&] { bad.run(bad.x, bad.y); }), HasSubstr(bad.error)) << bad.name;
    for (const Carrier carrier : {Carrier::kInproc, Carrier::kGloo}) {
      SCOPED_TRACE(absl::StrCat(bad.name, carrier == Carrier::kGloo ? " over Gloo" : ""));
      std::vector<absl::Time> raised(kRanks);
      const std::vector<absl::Status> results =
          try_on_each({{"x", kRanks}}, carrier, [&](const MeshPtr& mesh) {
            const std::string said = what([&] {
              const at::Tensor x = distribute_tensor(bad.x, mesh, Placements{Shard(0)});
              const at::Tensor y = distribute_tensor(bad.y, mesh, Placements{Shard(0)});
              full_tensor(bad.run(x, y));
            });
            raised[mesh->coordinate()[0]] = absl::Now();
            throw std::runtime_error(said);
          });
      const auto [first, last] = std::minmax_element(raised.begin(), raised.end());
      EXPECT_LT(*last - *first, absl::Seconds(1));
      for (int rank = 0; rank < kRanks; ++rank) {
        const std::string message(results[rank].message());
        EXPECT_THAT(message, HasSubstr(bad.error)) << rank;
        if (rank == kRanks - 1) continue;
        EXPECT_THAT(message, HasSubstr("(world rank 2) aborted")) << rank;
      }
    }
  }
}

}  // namespace
}  // namespace shardweave::testing
