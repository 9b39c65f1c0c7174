// Which strategy is taken, and why: the trade-offs that models live on, one operator each.

#include "shardweave/dtensor/engine/strategy_cost.h"

#include <string>
#include <vector>

#include "ATen/ops/arange.h"
#include "ATen/ops/bmm.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/equal.h"
#include "ATen/ops/ones.h"
#include "ATen/ops/silu.h"
#include "ATen/ops/zeros.h"
#include "c10/core/GradMode.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/dtensor/observe/comm_trace.h"
#include "shardweave/dtensor/observe/explain.h"
#include "shardweave/dtensor/testing/on_mesh.h"

namespace shardweave {
namespace {

using at::Tensor;
using testing::on_mesh;

// Without memory.
Tensor tensor(const MeshPtr& mesh, at::IntArrayRef sizes, const Placement& placement,
              at::ScalarType dtype = at::kFloat) {
  const at::TensorOptions options = at::TensorOptions(at::kMeta).dtype(dtype);
  if (!placement.is_partial()) return empty(sizes, mesh, {placement}, options);
  return from_local(at::empty(sizes, options), mesh, {placement}, sizes.vec());
}
Tensor weight(const MeshPtr& mesh, at::IntArrayRef sizes, const Placement& placement) {
  return tensor(mesh, sizes, placement).requires_grad_();
}

// "S(0), R -> S(0)". Of several results the first, or the one of this name.
std::string taken(const std::string& op, std::vector<c10::IValue> args,
                  const std::string& result = "") {
  const c10::AutoGradMode no_grad(false);
  const Explanation e = explain(op, std::move(args));
  std::string text;
  for (const Explanation::Tensor& t : e.inputs) {
    text += (text.empty() ? "" : ", ") + t.after[0].to_string();
  }
  for (const Explanation::Tensor& t : e.outputs) {
    if (result.empty() || t.name == result) return text + " -> " + t.before[0].to_string();
  }
  return text;
}

TEST(StrategyCostTest, AColumnParallelProductReducesItsInputFirst) {
  on_mesh({{"tp", 4}}, [](const MeshPtr& mesh) {
    const Tensor w = weight(mesh, {1376, 512}, Shard(0));
    const Tensor x = tensor(mesh, {1024, 512}, Partial());
    EXPECT_EQ(taken("aten::mm", {x, w.t()}), "R, S(1) -> S(1)");
    // However few the rows are: what a plan has cut stays so.
    EXPECT_EQ(taken("aten::mm", {tensor(mesh, {2, 512}, Partial()), w.t()}), "R, S(1) -> S(1)");
    // A row-parallel one leaves a sum.
    const Tensor down = weight(mesh, {512, 1376}, Shard(1));
    EXPECT_EQ(taken("aten::mm", {tensor(mesh, {1024, 1376}, Shard(1)), down.t()}),
              "S(1), S(0) -> P(sum)");
  });
}

TEST(StrategyCostTest, DataStaysCutAndWeightsAreGathered) {
  on_mesh({{"dp", 4}}, [](const MeshPtr& mesh) {
    for (int64_t rows : {8, 1024}) {
      const Tensor x = tensor(mesh, {rows, 512}, Shard(0));
      const Tensor w = weight(mesh, {1376, 512}, Shard(0));
      EXPECT_EQ(taken("aten::mm", {x, w.t()}), "S(0), R -> S(0)");
      const Tensor b = weight(mesh, {512}, Shard(0));
      EXPECT_EQ(taken("aten::mul.Tensor", {x, b}), "S(0), R -> S(0)");
      EXPECT_EQ(taken("aten::native_layer_norm", {x, std::vector<int64_t>{512}, b, b, 1e-5}),
                "S(0), R, R -> S(0)");
      const Tensor tokens = tensor(mesh, {rows}, Shard(0), at::kLong);
      const Tensor table = weight(mesh, {32000, 64}, Shard(0));
      EXPECT_EQ(taken("aten::embedding", {table, tokens}), "R, S(0) -> S(0)");
      // The gradient of a weight: a sum over the data.
      const Tensor grad = tensor(mesh, {rows, 1376}, Shard(0));
      EXPECT_EQ(taken("aten::mm", {x.t(), grad}), "S(1), S(0) -> P(sum)");
    }
  });
}

// Of the first layer nobody wants the input's gradient: what is left are sums over the data, which
// stays for them, however few rows the largest part has.
TEST(StrategyCostTest, AGradientOfAWeightAloneMovesNoData) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    const auto gradients = [&](int64_t rows, const Placement& p, bool of_input) {
      const std::vector<int64_t> one = {1, 1}, none = {0, 0};
      return taken(
          "aten::convolution_backward",
          {tensor(mesh, {rows, 8, 16, 16}, Shard(0)), tensor(mesh, {rows, 3, 16, 16}, Shard(0)),
           weight(mesh, {8, 3, 3, 3}, p), std::vector<int64_t>{8}, one, one, one, false, none, 1,
           c10::List<bool>({of_input, true, true})},
          "result[1]");
    };
    for (int64_t rows : {3, 7, 8}) {
      for (const Placement& p : {Placement(Replicate()), Shard(0), Shard(1)}) {
        SCOPED_TRACE(p.to_string());
        EXPECT_EQ(gradients(rows, p, false), "S(0), S(0), R -> P(sum)") << rows;
        EXPECT_EQ(gradients(rows, p, true), "S(0), S(0), R -> P(sum)") << rows;
      }
      const Tensor x = tensor(mesh, {rows, 512}, Shard(0));
      const Tensor statistic = tensor(mesh, {rows, 1}, Shard(0));
      const Tensor w = weight(mesh, {512}, Shard(0));
      EXPECT_EQ(taken("aten::native_layer_norm_backward",
                      {x, x, std::vector<int64_t>{512}, statistic, statistic, w, w,
                       c10::List<bool>({false, true, true})},
                      "result[1]"),
                "S(0), S(0), S(0), S(0), R, R -> P(sum)")
          << rows;
    }
  });
}

TEST(StrategyCostTest, ATableThatIsCutStaysSoWhereNoDataIs) {
  on_mesh({{"tp", 4}}, [](const MeshPtr& mesh) {
    const Tensor tokens = tensor(mesh, {1024}, Replicate(), at::kLong);
    EXPECT_EQ(taken("aten::embedding", {weight(mesh, {32000, 64}, Shard(0)), tokens}),
              "S(0), R -> P(sum)");
    EXPECT_EQ(taken("aten::embedding", {weight(mesh, {32000, 64}, Shard(1)), tokens}),
              "S(1), R -> S(1)");
    // But for one that is nothing beside what is looked up in it.
    const Tensor positions = tensor(mesh, {128, 128}, Replicate(), at::kLong);
    EXPECT_EQ(taken("aten::embedding", {weight(mesh, {256, 8}, Shard(0)), positions}), "R, R -> R");
    EXPECT_EQ(taken("aten::embedding", {weight(mesh, {257, 8}, Shard(0)), positions}),
              "S(0), R -> P(sum)");
  });
}

TEST(StrategyCostTest, ASumWaitsForItsLastSummandAProductDoesNot) {
  on_mesh({{"tp", 4}}, [](const MeshPtr& mesh) {
    const Tensor p = tensor(mesh, {64, 512}, Partial());
    const Tensor r = tensor(mesh, {64, 512}, Replicate());
    EXPECT_EQ(taken("aten::add.Tensor", {r, p}), "P(sum), P(sum) -> P(sum)");
    EXPECT_EQ(taken("aten::add.Tensor", {p, p}), "P(sum), P(sum) -> P(sum)");
    EXPECT_EQ(taken("aten::mul.Tensor", {p, r}), "R, R -> R");
    // One of a batch does.
    const Tensor of_batch =
        at::mm(tensor(mesh, {64, 128}, Shard(1)), tensor(mesh, {128, 512}, Shard(0)));
    EXPECT_EQ(layout_of(of_batch), Layout({Partial()}));
    EXPECT_EQ(taken("aten::mul.Tensor", {of_batch, r}), "P(sum), R -> P(sum)");
    EXPECT_EQ(taken("aten::mul.Tensor", {of_batch * 2, r}), "P(sum), R -> P(sum)");
    EXPECT_EQ(taken("aten::mul.Tensor", {p, tensor(mesh, {}, Replicate())}), "P(sum), R -> P(sum)");
    EXPECT_EQ(taken("aten::t", {p}), "P(sum) -> P(sum)");
    EXPECT_EQ(taken("aten::sum.dim_IntList", {p, std::vector<int64_t>{0}}), "P(sum) -> P(sum)");
    EXPECT_EQ(taken("aten::relu", {p}), "R -> R");
    // Next to what is cut, a reduce-scatter is enough.
    EXPECT_EQ(taken("aten::add.Tensor", {tensor(mesh, {64, 512}, Shard(0)), p}),
              "S(0), S(0) -> S(0)");
  });
}

// The backward of a pool is linear in the gradient alone: of the image it reads the shape. So a sum
// goes through as through any such function, unless it becomes four times as large there.
TEST(StrategyCostTest, ASumGoesThroughAPoolsBackward) {
  on_mesh({{"tp", 4}}, [](const MeshPtr& mesh) {
    const std::vector<int64_t> one = {1, 1}, two = {2, 2}, three = {3, 3}, none = {0, 0};
    const Tensor x = tensor(mesh, {8, 4, 16, 16}, Replicate());
    const Tensor grad = tensor(mesh, {8, 4, 16, 16}, Partial());
    const Tensor at = tensor(mesh, {8, 4, 16, 16}, Replicate(), at::kLong);
    EXPECT_EQ(
        taken("aten::max_pool2d_with_indices_backward", {grad, x, three, one, one, one, false, at}),
        "P(sum), R, R -> P(sum)");
    EXPECT_EQ(
        taken("aten::avg_pool2d_backward", {grad, x, three, one, one, false, true, c10::IValue()}),
        "P(sum), R -> P(sum)");
    const std::vector<int64_t> edges = {1, 1, 1, 1};
    EXPECT_EQ(taken("aten::reflection_pad2d_backward",
                    {tensor(mesh, {8, 4, 18, 18}, Partial()), x, edges}),
              "P(sum), R -> P(sum)");
    EXPECT_EQ(taken("aten::_adaptive_avg_pool2d_backward", {grad, x}), "P(sum), R -> P(sum)");
    const Tensor small = tensor(mesh, {64, 32, 16, 16}, Partial());
    EXPECT_EQ(taken("aten::max_pool2d_with_indices_backward",
                    {small, tensor(mesh, {64, 32, 32, 32}, Replicate()), two, two, none, one, false,
                     tensor(mesh, {64, 32, 16, 16}, Replicate(), at::kLong)}),
              "R, R, R -> R");
  });
}

// Columns of a product with a weight that is cut: whoever needs them all gathers them, and does not
// cut the rows.
TEST(StrategyCostTest, WhatOperatorsHaveCutCutsNoBatch) {
  on_mesh({{"tp", 4}}, [](const MeshPtr& mesh) {
    const Tensor x =
        at::mm(tensor(mesh, {1024, 64}, Replicate()), weight(mesh, {512, 64}, Shard(0)).t());
    EXPECT_EQ(layout_of(x), Layout({Shard(1)}));
    const Tensor w = tensor(mesh, {512}, Replicate());
    EXPECT_EQ(taken("aten::native_layer_norm", {x, std::vector<int64_t>{512}, w, w, 1e-5}),
              "R, R, R -> R");
    EXPECT_EQ(taken("aten::cumsum", {x, 1}), "R -> R");
    EXPECT_EQ(taken("aten::relu", {x}), "S(1) -> S(1)");
    // Of what a user has cut, the cut is kept.
    EXPECT_EQ(taken("aten::cumsum", {tensor(mesh, {1024, 512}, Shard(1)), 1}), "S(0) -> S(0)");
  });
}

// One expert each: the sum over them is a Partial, no exchange that has to be undone.
TEST(StrategyCostTest, NoCutIsMadeThatHasToBeUndone) {
  on_mesh({{"tp", 4}}, [](const MeshPtr& mesh) {
    const Tensor w = weight(mesh, {4, 64, 32}, Shard(0));
    const Tensor x = tensor(mesh, {4, 512, 64}, Replicate());
    EXPECT_EQ(taken("aten::bmm", {x, w}), "S(0), S(0) -> S(0)");
    // What has been made of it is no data and no weight.
    const Tensor y = at::bmm(x, w);
    EXPECT_EQ(taken("aten::sum.dim_IntList", {y, std::vector<int64_t>{0}}), "S(0) -> P(sum)");
  });
}

// A cut of one row gives all work to one rank.
TEST(StrategyCostTest, CutsThatShareNoWorkAreNone) {
  on_mesh({{"sp", 4}}, [](const MeshPtr& mesh) {
    const Tensor q = tensor(mesh, {1, 8, 512, 64}, Shard(2));
    EXPECT_EQ(taken("aten::_scaled_dot_product_flash_attention_for_cpu", {q, q, q}),
              "S(1), S(1), S(1) -> S(1)");
    const Tensor one_head = tensor(mesh, {1, 1, 512, 64}, Shard(2));
    EXPECT_EQ(
        taken("aten::_scaled_dot_product_flash_attention_for_cpu", {one_head, one_head, one_head}),
        "S(2), R, R -> S(2)");
  });
}

// A vocabulary that the ranks do not divide: the gradient of a head, from cut logits.
TEST(StrategyCostTest, AnUnevenCutSharesTheWorkToo) {
  for (const int ranks : {2, 3, 4}) {
    on_mesh({{"tp", ranks}}, [](const MeshPtr& mesh) {
      for (const int64_t vocabulary : {1003, 1004, 1009, 50257, 50258}) {
        SCOPED_TRACE(vocabulary);
        const c10::AutoGradMode no_grad(false);
        const Tensor x = tensor(mesh, {512, 768}, Replicate());
        const Tensor logits = at::mm(x, weight(mesh, {vocabulary, 768}, Shard(0)).t());
        ASSERT_EQ(layout_of(logits), Layout({Shard(1)}));
        EXPECT_EQ(taken("aten::mm", {logits.t(), x}), "S(0), R -> S(0)");
        EXPECT_EQ(taken("aten::mm", {x.t(), logits}), "R, S(1) -> S(1)");
      }
    });
  }
}

// One row of data that is cut by rows stays cut, whether or not the ranks divide its length.
TEST(StrategyCostTest, AnUnevenRowStaysCutAsAnEvenOneDoes) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    for (const int64_t columns : {4, 5, 6}) {
      EXPECT_EQ(
          taken("aten::select.int", {tensor(mesh, {7, columns}, Shard(0)), int64_t{0}, int64_t{0}}),
          "S(1) -> S(0)");
    }
  });
}

TEST(StrategyCostTest, WhatIsRememberedCostsNothing) {
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    const Tensor p = testing::scattered(at::ones({64, 64}), mesh, {Partial()});
    EXPECT_EQ(taken("aten::neg", {p}), "P(sum) -> P(sum)");
    p.relu();
    EXPECT_EQ(taken("aten::neg", {p}), "R -> R");
    const Explanation e = explain("aten::neg", {p});
    EXPECT_EQ(e.bytes(), 0);
    p.mul_(2);
    EXPECT_EQ(taken("aten::neg", {p}), "P(sum) -> P(sum)");
  });
}

// The result is weighed as what it is written into, which has fewer dimensions here.
TEST(StrategyCostTest, AResultOfAnotherShapeIsNotWrittenInPlace) {
  on_mesh({{"tp", 4}}, [](const MeshPtr& mesh) {
    const c10::AutoGradMode no_grad(false);
    const Tensor row = tensor(mesh, {8}, Replicate());
    const Tensor a = tensor(mesh, {4}, Shard(0)), b = tensor(mesh, {8}, Shard(0));
    try {
      explain("aten::addr_", {row, a, b});
      ADD_FAILURE() << "no error";
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find("the result has shape [4, 8]"), std::string::npos)
          << e.what();
    }
  });
}

// As under autocast: gradients of 16 bits become of their parameter's type, and wait for the one reduction of all.
TEST(StrategyCostTest, AGradientThatIsCastWaits) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    const Tensor x0 = at::arange(4 * 512, at::kFloat).view({4, 512}).remainder(32) / 8;
    const Tensor x = distribute_tensor(x0, mesh, Placements{Shard(0)});
    const Tensor w = ones({512, 512}, mesh, Placements{Replicate()}).requires_grad_();
    for (int pass = 1; pass <= 2; ++pass) {
      const CommTrace trace(mesh);
      const Tensor y = x.to(at::kBFloat16).mm(w.to(at::kBFloat16));
      y.to(at::kFloat).backward(ones({4, 512}, mesh, Placements{Shard(0)}));
      EXPECT_EQ(trace.events().size(), 0u) << trace.to_string();
      EXPECT_EQ(layout_of(w.grad()), Layout({Partial()}));
      EXPECT_EQ(w.grad().scalar_type(), at::kFloat);
      EXPECT_TRUE(at::equal(full_tensor(w.grad()),
                            x0.sum(0, /*keepdim=*/true).t().expand({512, 512}) * pass));
    }
  });
}

// A table of positions of which the first few are used. Not so where a sum is over no data: the gradient of one
// token goes back to a whole sequence.
TEST(StrategyCostTest, TheGradientOfASliceWaitsIfItIsASumOverData) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    const Tensor x = ones({4, 5, 64}, mesh, Placements{Shard(0)});
    const Tensor table = ones({4096, 64}, mesh, Placements{Replicate()}).requires_grad_();
    const Tensor y = x + table.narrow(0, 2, 5);
    const CommTrace trace(mesh);
    y.backward(ones({4, 5, 64}, mesh, Placements{Shard(0)}));
    EXPECT_EQ(trace.events().size(), 0u) << trace.to_string();
    Tensor want = at::zeros({4096, 64});
    want.narrow(0, 2, 5).fill_(4);
    EXPECT_TRUE(at::equal(full_tensor(table.grad()), want));
  });
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    const Tensor w = ones({3, 4}, mesh, Placements{Shard(1)}).requires_grad_();
    const Tensor x = ones({2, 64, 3}, mesh, Placements{Replicate()}).requires_grad_();
    const Tensor loss = x.slice(1, 0, 1).reshape({2, 3}).mm(w).tanh().sum();
    const CommTrace trace(mesh);
    loss.backward();
    ASSERT_EQ(trace.events().size(), 1u) << trace.to_string();
    EXPECT_LE(trace.events()[0].bytes, 2 * 3 * 4);
  });
}

// What is small and a sum joins what is large and whole: it is reduced before, not with all of that.
TEST(StrategyCostTest, ASmallSumIsReducedBeforeItJoinsALargeTensor) {
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    EXPECT_EQ(taken("aten::add.Tensor", {tensor(mesh, {64, 512, 256}, Replicate()),
                                         tensor(mesh, {64, 1, 256}, Partial()), 1}),
              "R, R -> R");
    EXPECT_EQ(taken("aten::add.Tensor", {tensor(mesh, {64, 512, 256}, Replicate()),
                                         tensor(mesh, {64, 512, 256}, Partial()), 1}),
              "P(sum), P(sum) -> P(sum)");
  });
}

// But not where it is a product that makes it more: what is small is reduced before.
TEST(StrategyCostTest, ASumOverDataIsReducedBeforeAProductThatIsLarger) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    const Tensor p = at::mm(tensor(mesh, {16, 64}, Shard(1)), tensor(mesh, {64, 256}, Shard(0)));
    ASSERT_EQ(layout_of(p), Layout({Partial()}));
    EXPECT_EQ(taken("aten::mm", {tensor(mesh, {4096, 16}, Replicate()), p}), "R, R -> R");
    EXPECT_EQ(taken("aten::mm", {p.t(), tensor(mesh, {16, 4096}, Replicate())}), "R, R -> R");
    EXPECT_EQ(taken("aten::mm", {tensor(mesh, {8, 16}, Replicate()), p}), "R, P(sum) -> P(sum)");
    EXPECT_EQ(taken("aten::mm", {tensor(mesh, {16, 16}, Replicate()), p}), "R, P(sum) -> P(sum)");
  });
}

// Two factors that are one sum, as it is and transposed: it is reduced once, for both.
TEST(StrategyCostTest, ASumThatIsBothFactorsIsReducedOnce) {
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    const Tensor p = tensor(mesh, {8, 64, 512}, Partial());
    const Tensor other = tensor(mesh, {8, 64, 512}, Partial());
    EXPECT_EQ(taken("aten::bmm", {p, p.transpose(1, 2)}), "R, R -> R");
    EXPECT_EQ(taken("aten::bmm", {p.transpose(1, 2).transpose(1, 2), p.transpose(1, 2)}),
              "R, R -> R");
    // Of two that are two one is, and the other when it comes to that.
    EXPECT_EQ(taken("aten::bmm", {p, other.transpose(1, 2)}), "P(sum), R -> P(sum)");
    const Tensor x = testing::scattered(at::arange(8 * 4 * 16, at::kDouble).view({8, 4, 16}).sin(),
                                        mesh, {Partial()});
    const CommTrace trace(mesh);
    const Tensor gram = at::bmm(x, x.transpose(1, 2));
    EXPECT_EQ(trace.events().size(), 1u) << trace.to_string();
    const Tensor whole = full_tensor(x);
    EXPECT_TRUE(at::allclose(full_tensor(gram), at::bmm(whole, whole.transpose(1, 2))));
    EXPECT_EQ(layout_of(gram), Layout({Replicate()}));
    // Parts of one tensor that begin at one place and are as large are two.
    const Tensor large = tensor(mesh, {8, 128, 128}, Partial());
    EXPECT_EQ(taken("aten::bmm", {large.narrow(1, 0, 64), large.narrow(2, 0, 64)}),
              "P(sum), R -> P(sum)");
    // What was decided for one tensor says nothing about two.
    const Tensor y = testing::scattered(whole, mesh, {Partial()});
    const Tensor z = testing::scattered(whole, mesh, {Partial()}).transpose(1, 2);
    const Tensor product = at::bmm(y, z);
    EXPECT_EQ(layout_of(product), Layout({Partial()}));
    EXPECT_TRUE(at::allclose(full_tensor(product), full_tensor(gram)));
  });
}

// Channels that a cat of two cut tensors has left in strides, and a weight that a plan cuts likewise.
TEST(StrategyCostTest, ConvolutionsTakeChannelsInStrides) {
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    const auto values = [](at::IntArrayRef sizes, double from) {
      return at::arange(c10::multiply_integers(sizes), at::kDouble).add(from).sin().view(sizes);
    };
    const Placement strided = StridedShard(1, 2);
    for (const bool transposed : {false, true}) {
      SCOPED_TRACE(transposed);
      const Tensor half = values({3, 4, 6, 6}, 0), other = values({3, 4, 6, 6}, 7);
      const Tensor plain_w = values({8, 8, 3, 3}, 3);
      const auto run = [&](const Tensor& a, const Tensor& b, const Tensor& w, const Tensor& v) {
        const Tensor x = at::cat({a, b}, 1);
        const Tensor y =
            transposed ? at::conv_transpose2d(x, w, {}, 1, 1) : at::conv2d(x, w, {}, 1, 1);
        return transposed ? at::conv_transpose2d(y, v, {}, 1, 1) : at::conv2d(y, v, {}, 1, 1);
      };
      std::vector<Tensor> want = {half.clone(), other.clone(), plain_w.clone(), plain_w.cos()};
      for (Tensor& t : want) t.requires_grad_();
      const Tensor whole = run(want[0], want[1], want[2], want[3]);
      whole.square().sum().backward();
      // The channels of the input, then those of the result, in strides.
      const Placement in = strided.with_dim(transposed ? 0 : 1);
      std::vector<Tensor> got = {distribute_tensor(half, mesh, Placements{Shard(1)}),
                                 distribute_tensor(other, mesh, Placements{Shard(1)}),
                                 distribute_tensor(plain_w, mesh, Placements{in}),
                                 distribute_tensor(plain_w.cos(), mesh, Placements{in})};
      for (Tensor& t : got) t.requires_grad_();
      CommTrace trace(mesh);
      ASSERT_EQ(layout_of(at::cat({got[0], got[1]}, 1)), Layout({strided}));
      const Tensor strided_result =
          distribute_tensor(plain_w, mesh, Placements{strided.with_dim(transposed ? 1 : 0)})
              .requires_grad_();
      const auto all = [&](const Tensor& t) { return distribute_tensor(t, mesh, {Replicate()}); };
      const Tensor x0 = all(half), x1 = all(other);
      trace.clear();
      const Tensor z = run(x0, x1, strided_result, got[3]);
      EXPECT_EQ(layout_of(z), Layout({Partial()}));
      z.square().sum().backward();
      EXPECT_EQ(trace.events().size(), 1u) << trace.to_string();  // z is reduced
      EXPECT_TRUE(at::allclose(full_tensor(strided_result.grad()), want[2].grad()));
      EXPECT_TRUE(at::allclose(full_tensor(got[3].grad()), want[3].grad()));
      got[3].mutable_grad() = Tensor();
      trace.clear();
      const Tensor y = run(got[0], got[1], got[2], got[3]);
      // The first gives a sum, of which the second wants a part of the channels.
      EXPECT_LE(trace.events().size(), 1u) << trace.to_string();
      EXPECT_EQ(layout_of(y), Layout({Partial()}));
      EXPECT_TRUE(at::allclose(full_tensor(y), whole));
      y.square().sum().backward();
      for (size_t i = 0; i < got.size(); ++i) {
        EXPECT_TRUE(at::allclose(full_tensor(got[i].grad()), want[i].grad())) << i;
      }
    }
  });
}

// Of a gradient and a tensor that was saved, as large and cut differently, the gradient moves: with the
// next operators' it lies together then.
TEST(StrategyCostTest, OfEqualsTheGradientMoves) {
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    for (int dim : {0, 1}) {
      SCOPED_TRACE(dim);
      const Tensor grad = tensor(mesh, {64, 512}, Shard(1 - dim));
      const Tensor saved = tensor(mesh, {64, 512}, Shard(dim));
      const std::string s = Placement(Shard(dim)).to_string();
      EXPECT_EQ(taken("aten::silu_backward", {grad, saved}), s + ", " + s + " -> " + s);
      EXPECT_EQ(taken("aten::threshold_backward", {grad, saved, 0}), s + ", " + s + " -> " + s);
      // Not at a higher price.
      const Tensor mask = tensor(mesh, {64, 512}, Shard(dim), at::kBool);
      const std::string g = Placement(Shard(1 - dim)).to_string();
      EXPECT_EQ(taken("aten::native_dropout_backward", {grad, mask, 2.0}),
                g + ", " + g + " -> " + g);
    }
    // From end to end: what no kernel does in parts (a flip) lies between a chain and its gradient.
    const Tensor x = ones({64, 512}, mesh, Placements{Shard(1)});
    const Tensor scale = ones({512}, mesh, Placements{Replicate()}).requires_grad_();
    const Tensor y = at::silu(at::silu(at::silu(at::silu(x * scale)))).flip(1);
    ASSERT_EQ(layout_of(y), Layout({Shard(0)}));
    const CommTrace trace(mesh);
    y.backward(ones({64, 512}, mesh, layout_of(y).placements()));
    EXPECT_EQ(trace.events().size(), 1u) << trace.to_string();
  });
}

}  // namespace
}  // namespace shardweave
