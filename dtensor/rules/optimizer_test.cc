// Operators over lists, as optimizers use them, against one device.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/testing/expect_comms.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/dtensor/testing/op_check.h"

namespace shardweave::testing {
namespace {

using ::testing::HasSubstr;

// Clones, to write into.
Tensors clones(const Tensors& x, size_t first, size_t count) {
  Tensors result;
  for (size_t i = first; i < first + count; ++i) result.push_back(x[i].clone());
  return result;
}

TEST(OptimizerRulesTest, ForeachFunctions) {
  check_ops({
      {"_foreach_add",
       {in({4, 3}), in({5}), in({4, 3}), in({5})},
       [](const Tensors& x) { return at::_foreach_add({x[0], x[1]}, {x[2], x[3]}, 2); }},
      {"_foreach_add.Scalar",
       {in({4, 3}), in({5})},
       [](const Tensors& x) { return at::_foreach_add({x[0], x[1]}, 2); }},
      {"_foreach_mul.ScalarList",
       {in({4, 3}), in({5})},
       [](const Tensors& x) {
         return at::_foreach_mul({x[0], x[1]}, std::vector<at::Scalar>{2.0, -1.0});
       }},
      {"_foreach_div, broadcast",
       {in({4, 3}), in({2, 5}), in({3}), in({2, 1}).uniform(1, 2)},
       [](const Tensors& x) { return at::_foreach_div({x[0], x[1]}, {x[2].exp(), x[3]}); }},
      {"_foreach_addcdiv",
       {in({4, 3}), in({4, 3}), in({4, 3}).uniform(1, 2)},
       [](const Tensors& x) { return at::_foreach_addcdiv({x[0]}, {x[1]}, {x[2]}, 0.5); }},
      {"_foreach_lerp",
       {in({4, 3}), in({4, 3})},
       [](const Tensors& x) { return at::_foreach_lerp({x[0]}, {x[1]}, 0.25); }},
      {"_foreach_abs",
       {in({4, 3}), in({5})},
       [](const Tensors& x) { return at::_foreach_abs({x[0], x[1]}); }},
      {"_foreach_norm",
       {in({4, 3}), in({5})},
       [](const Tensors& x) { return at::_foreach_norm({x[0], x[1]}); }},
      {"_foreach_sqrt and a list of none",
       {in({5}).uniform(1, 2)},
       [](const Tensors& x) { return at::_foreach_sqrt({x[0]}); }},
  });
}

TEST(OptimizerRulesTest, ForeachInPlace) {
  check_ops({
      {"_foreach_add_",
       {in({4, 3}), in({5}), in({4, 3}), in({5})},
       [](const Tensors& x) {
         Tensors w = clones(x, 0, 2);
         at::_foreach_add_(w, {x[2], x[3]}, -0.5);
         return w;
       },
       false},
      {"_foreach_mul_, then addcmul_ and zero_",
       {in({4, 3}), in({5}), in({4, 3})},
       [](const Tensors& x) {
         Tensors w = clones(x, 0, 2);
         at::_foreach_mul_(w, 3);
         at::_foreach_addcmul_({w[0]}, {x[2]}, {x[2]}, 2);
         at::_foreach_zero_({w[1]});
         return w;
       },
       false},
      {"_foreach_abs_",
       {in({4, 3}), in({5})},
       [](const Tensors& x) {
         Tensors w = clones(x, 0, 2);
         at::_foreach_abs_(w);
         return w;
       },
       false},
      {"_foreach_copy_",
       {in({4, 3}), in({4, 3})},
       [](const Tensors& x) {
         Tensors w = clones(x, 0, 1);
         at::_foreach_copy_(w, {x[1]});
         return w;
       },
       false},
  });
}

TEST(OptimizerRulesTest, FusedSteps) {
  const auto steps = [](int count) { return Tensors(count, at::full({}, 3.0)); };
  check_ops({
      {"_fused_adamw_",
       {in({4, 3}), in({4, 3}), in({4, 3}), in({4, 3}).uniform(0, 1), in({5}), in({5}), in({5}),
        in({5}).uniform(0, 1)},
       [steps](const Tensors& x) {
         Tensors w = clones(x, 0, 8);
         at::_fused_adamw_({w[0], w[4]}, {w[1], w[5]}, {w[2], w[6]}, {w[3], w[7]}, {}, steps(2),
                           0.1, 0.9, 0.99, 0.01, 1e-8, false, false);
         return w;
       },
       false},
      {"_fused_adam_ with amsgrad",
       {in({4, 3}), in({4, 3}), in({4, 3}), in({4, 3}).uniform(0, 1), in({4, 3}).uniform(0, 1)},
       [steps](const Tensors& x) {
         Tensors w = clones(x, 0, 5);
         at::_fused_adam_({w[0]}, {w[1]}, {w[2]}, {w[3]}, {w[4]}, steps(1), 0.1, 0.9, 0.99, 0.01,
                          1e-8, true, false);
         return w;
       },
       false},
      {"_fused_sgd_ with momentum",
       {in({4, 3}), in({4, 3}), in({4, 3})},
       [](const Tensors& x) {
         Tensors w = clones(x, 0, 3);
         at::_fused_sgd_({w[0]}, {w[1]}, {w[2]}, 0.1, 0.9, 0.5, 0.0, true, false, false);
         return w;
       },
       false},
      {"_fused_adagrad_",
       {in({4, 3}), in({4, 3}), in({4, 3}).uniform(0, 1)},
       [steps](const Tensors& x) {
         Tensors w = clones(x, 0, 3);
         at::_fused_adagrad_({w[0]}, {w[1]}, {w[2]}, steps(1), 0.1, 0.01, 0.1, 1e-8, false);
         return w;
       },
       false},
  });
}

TEST(OptimizerRulesTest, Unscale) {
  on_mesh({{"x", 3}}, [](const MeshPtr& mesh) {
    for (bool found_plain : {true, false}) {
      at::Tensor whole = at::ones({4, 2});
      whole[3][1] = found_plain ? INFINITY : NAN;  // on the last rank alone
      const at::Tensor a = distribute_tensor(whole, mesh, Placements{Shard(0)});
      const at::Tensor b = ones({5}, mesh, {Shard(0)});
      at::Tensor found = found_plain ? at::zeros({}) : zeros({}, mesh, {Replicate()});
      at::_amp_foreach_non_finite_check_and_unscale_({b}, found, at::full({}, 0.5));
      EXPECT_EQ(found.item<float>(), 0);
      at::_amp_foreach_non_finite_check_and_unscale_({a, b}, found, at::full({}, 0.5));
      EXPECT_EQ(found.item<float>(), 1);
      EXPECT_EQ(full_tensor(b)[4].item<float>(), 0.25);
    }
  });
}

// However many gradients there are, and however they are cut; Partials wait for finish_grad_sync().
TEST(OptimizerRulesTest, UnscaleSendsOneNumber) {
  on_mesh({{"x", 2}, {"y", 2}}, [](const MeshPtr& mesh) {
    const Placements layouts[] = {{Shard(0), Replicate()},
                                  {Replicate(), Shard(0)},
                                  {Shard(0), Shard(1)},
                                  {Replicate(), Replicate()}};
    Tensors grads;
    for (int i = 0; i < 20; ++i) grads.push_back(ones({3, 4}, mesh, layouts[i % 4]));
    const at::Tensor view = grads[0].select(0, 2);
    const auto version = grads[0]._version();
    at::Tensor found = at::zeros({1});
    CommTrace trace(mesh);
    at::_amp_foreach_non_finite_check_and_unscale_(grads, found, at::full({1}, 0.5));
    // And whether it is the same scale on all ranks, before the number is seen.
    EXPECT_COMMS(trace, {all_reduce({"x", "y"}), all_reduce({"x", "y"}).of("inv_scale")});
    EXPECT_EQ(found.item<float>(), 0);
    EXPECT_GT(grads[0]._version(), version);
    EXPECT_TRUE(at::equal(full_tensor(view), at::full({4}, 0.5)));
    for (const at::Tensor& grad : grads) {
      EXPECT_TRUE(at::equal(full_tensor(grad), at::full({3, 4}, 0.5)));
    }
    grads.push_back(testing::scattered(at::full({3}, INFINITY), mesh, {Partial(), Replicate()}));
    at::_amp_foreach_non_finite_check_and_unscale_(grads, found, at::full({1}, 0.5));
    EXPECT_EQ(found.item<float>(), 1);
    EXPECT_TRUE(at::equal(full_tensor(grads[2]), at::full({3, 4}, 0.25)));
  });
}

// A scale that differs from rank to rank is found out before the number is seen.
TEST(OptimizerRulesTest, UnscaleByAnotherScale) {
  const auto status = try_on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor grad = ones({4}, mesh, {Shard(0)});
    at::Tensor found = at::zeros({});
    const double scale = mesh->coordinate()[0] == 0 ? 0.5 : 0.25;
    at::_amp_foreach_non_finite_check_and_unscale_({grad}, found, at::full({}, scale));
  });
  EXPECT_THAT(std::string(status.message()), HasSubstr("differs from rank to rank"));
}

// 200 tensors: decided once, whatever the numbers are; nothing is sent and no list is cut in
// pieces.
TEST(OptimizerRulesTest, ListsHitTheCache) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    Tensors w, g;
    for (int i = 0; i < 200; ++i) {
      w.push_back(zeros({i % 7 + 1, 3}, mesh, {Shard(0)}));
      g.push_back(ones({i % 7 + 1, 3}, mesh, {Shard(0)}));
    }
    const StrictScope strict(mesh);
    at::_foreach_add_(w, g, 1.0);
    const DispatchCounters before = dispatch_counters(mesh);
    for (int step = 0; step < 10; ++step) at::_foreach_add_(w, g, 0.5 * step);
    const DispatchCounters after = dispatch_counters(mesh);
    EXPECT_EQ(after.operators - before.operators, 10);
    EXPECT_EQ(after.cache_misses, before.cache_misses);
    EXPECT_EQ(full_tensor(w[199])[0][0].item<float>(), 1 + 0.5 * 45);
  });
}

// A state that lies elsewhere is brought, and goes back.
TEST(OptimizerRulesTest, StatesKeepTheirLayout) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor w = zeros({5, 2}, mesh, {Replicate()});
    const at::Tensor g = ones({5, 2}, mesh, {Replicate()});
    const at::Tensor m = ones({5, 2}, mesh, {Shard(0)});
    at::_fused_sgd_({w}, {g}, {m}, 0.0, 0.5, 1.0, 0.0, false, false, false);
    EXPECT_EQ(layout_of(w), Layout({Replicate()}));
    EXPECT_EQ(layout_of(m), Layout({Shard(0)}));
    EXPECT_TRUE(at::equal(full_tensor(m), at::full({5, 2}, 1.5)));
    EXPECT_TRUE(at::equal(to_local(w), at::full({5, 2}, -1.5)));
  });
}

TEST(OptimizerRulesTest, BadLists) {
  const auto message = [](const std::function<void(const MeshPtr&)>& body) {
    return std::string(try_on_mesh({{"x", 2}}, body).message());
  };
  EXPECT_THAT(message([](const MeshPtr& mesh) {
                const at::Tensor w = zeros({5, 2}, mesh, {Shard(0)});
                at::_fused_sgd_({w, w}, {w}, {}, 0, 0, 0.1, 0, false, false, true);
              }),
              HasSubstr("aten::_fused_sgd_: the list 'grads' has 1 tensors, 'self' has 2"));
  EXPECT_THAT(message([](const MeshPtr& mesh) {
                const at::Tensor w = zeros({5, 2}, mesh, {Shard(0)});
                const at::Tensor g = zeros({4, 2}, mesh, {Shard(0)});
                at::_fused_sgd_({w}, {g}, {}, 0, 0, 0.1, 0, false, false, true);
              }),
              HasSubstr("'grads'[0] has shape [4, 2], 'self'[0] has [5, 2]"));
  EXPECT_THAT(message([](const MeshPtr& mesh) {
                const at::Tensor w = zeros({5, 2}, mesh, {Shard(0)});
                const at::Tensor plain = at::full({5, 2}, mesh->coordinate()[0]);
                at::_foreach_add_({w}, std::vector<at::Tensor>{plain}, 1);
              }),
              HasSubstr("is a plain tensor among DTensors that differs from rank to rank"));
  // Written lists without a rule are gathered, and what is written goes back.
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor x = ones({2, 3}, mesh, {Shard(1)});
    Tensors out = {zeros({3}, mesh, {Shard(0)}), zeros({3}, mesh, {Replicate()})};
    at::unbind_copy_out(out, x, 0);
    EXPECT_TRUE(at::equal(full_tensor(out[0]), at::ones({3})));
    EXPECT_TRUE(at::equal(to_local(out[1]), at::ones({3})));
  });
}

}  // namespace
}  // namespace shardweave::testing
