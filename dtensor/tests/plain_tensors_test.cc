// Plain tensors next to DTensors: they stay what they are, and count as replicated only if they are.
#include <functional>
#include <string>

#include "ATen/ATen.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/comm/world.h"
#include "shardweave/dtensor/clip_grad_norm.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/observe/comm_trace.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "torch/csrc/autograd/autograd.h"
#include "torch/csrc/autograd/custom_function.h"

namespace shardweave {
namespace {

using ::testing::HasSubstr;
using testing::on_mesh;
using testing::try_on_mesh;

at::Tensor numbers(at::IntArrayRef sizes) {
  return at::arange(c10::multiply_integers(sizes), at::kFloat).reshape(sizes) / 8 - 1;
}

std::string message_of(const std::function<void(const MeshPtr&)>& body) {
  return std::string(try_on_mesh({{"x", 2}, {"y", 2}}, body).message());
}

// Autograd saves the mask for the gradient of x; its formula meets it as a plain tensor again.
TEST(PlainTensorsTest, AMaskThatBackwardReadsStaysPlain) {
  const at::Tensor mask = at::triu(at::ones({4, 4}));
  on_mesh({{"x", 2}}, [&](const MeshPtr& mesh) {
    at::Tensor x = distribute_tensor(numbers({4, 4}), mesh, Placements{Shard(0)}).requires_grad_();
    (x * mask).sum().backward();
    EXPECT_FALSE(is_dtensor(mask));
    EXPECT_TRUE(at::equal(full_tensor(x.grad()), mask));
  });
  // Another mesh, and no mesh at all.
  on_mesh({{"x", 3}}, [&](const MeshPtr& mesh) {
    at::Tensor x = distribute_tensor(numbers({4, 4}), mesh, Placements{Shard(1)}).requires_grad_();
    (x * mask).sum().backward();
    EXPECT_TRUE(at::equal(full_tensor(x.grad()), mask));
  });
  EXPECT_TRUE(at::equal(mask, at::triu(at::ones({4, 4}))));
}

// Two meshes of one rank, one constant: rotary tables.
TEST(PlainTensorsTest, OneConstantOnTwoMeshes) {
  const absl::Status status = run_ranks(2, [](World& world) {
    const MeshPtr a = init_device_mesh(world, {{"a", 2}}).value();
    const MeshPtr b = init_device_mesh(world, {{"b", 2}}).value();
    const at::Tensor table = at::cos(numbers({4, 4}));
    for (const MeshPtr& mesh : {a, b, a}) {
      at::Tensor x =
          distribute_tensor(numbers({4, 4}), mesh, Placements{Shard(0)}).requires_grad_();
      ((x * table).square() / table).sum().backward();
      EXPECT_TRUE(at::allclose(full_tensor(x.grad()), 2 * numbers({4, 4}) * table));
      EXPECT_FALSE(is_dtensor(table));
    }
  });
  EXPECT_TRUE(status.ok()) << status;
}

// The user's code in backward is the user's code: what it mixes in is compared.
TEST(PlainTensorsTest, WhatAHookMixesInIsComparedAndStaysPlain) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor scale = at::full({4}, 3.0);
    at::Tensor x = distribute_tensor(numbers({4, 4}), mesh, Placements{Shard(0)}).requires_grad_();
    x.register_hook([&](const at::Tensor& grad) { return grad * scale; });
    x.sum().backward();
    EXPECT_FALSE(is_dtensor(scale));
    EXPECT_TRUE(at::equal(full_tensor(x.grad()), at::full({4, 4}, 3.0)));
  });
  EXPECT_THAT(message_of([](const MeshPtr& mesh) {
                const at::Tensor scale = at::full({4}, 1.0 + mesh->coordinate()[1]);
                at::Tensor x = ones({4, 4}, mesh, {Shard(0), Replicate()}).requires_grad_();
                x.register_hook([&](const at::Tensor& grad) { return grad * scale; });
                x.sum().backward();
                full_tensor(x.grad());
              }),
              HasSubstr("aten::mul.Tensor: argument 'other' is a plain tensor among DTensors that "
                        "differs from rank to rank"));
}

// At once when they are met, and together from then on.
TEST(PlainTensorsTest, AreComparedAtOnceWhenTheyAreMet) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor x = distribute_tensor(numbers({4, 4}), mesh, Placements{Shard(0)});
    at::Tensor mask = at::ones({4, 4});
    const CommTrace trace(mesh);
    for (int i = 0; i < 5; ++i) x* mask;
    x* mask.unsqueeze(0);  // the same memory
    EXPECT_EQ(trace.events().size(), 1u);
    mask.mul_(2);
    EXPECT_TRUE(at::equal(full_tensor(x * mask), 2 * numbers({4, 4})));
    EXPECT_EQ(trace.events().size(), 3u);  // the comparison and the gathering
    full_tensor(x + x);
    EXPECT_EQ(trace.events().size(), 4u);  // nothing is owed
  });
  // Whatever has been written how: with a version, past autograd, on one rank only.
  const std::function<void(at::Tensor&, double)> kWrites[] = {
      [](at::Tensor& mask, double by) { mask.add_(by); },
      [](at::Tensor& mask, double by) { *mask.data_ptr<float>() += static_cast<float>(by); },
      [](at::Tensor& mask, double by) {
        if (by > 0) mask.data().add_(by);
      },
  };
  for (const auto& write : kWrites) {
    EXPECT_THAT(
        message_of([&](const MeshPtr& mesh) {
          const at::Tensor x = ones({4, 4}, mesh, {Shard(0), Replicate()});
          at::Tensor mask = at::ones({4, 4});
          x* mask;
          write(mask, mesh->coordinate()[1]);
          full_tensor(x * mask);
        }),
        HasSubstr("aten::mul.Tensor: argument 'other' is a plain tensor among DTensors that "
                  "differs from rank to rank"));
  }
}

// What enters backward as a plain tensor is compared too: a formula mixes it with the saved DTensor.
TEST(PlainTensorsTest, APlainGradientThatDiffersIsAnErrorBeforeItIsSeen) {
  const std::function<at::Tensor(const at::Tensor&)> kFunctions[] = {
      [](const at::Tensor& x) { return x * x; },
      [](const at::Tensor& x) { return redistribute(x, {Replicate(), Replicate()}); },
  };
  for (const auto& function : kFunctions) {
    EXPECT_THAT(message_of([&](const MeshPtr& mesh) {
                  at::Tensor x = ones({4}, mesh, {Replicate(), Replicate()}).requires_grad_();
                  function(x).backward(at::full({4}, 1.0 + mesh->coordinate()[0]));
                  full_tensor(x.grad());
                }),
                HasSubstr("is a plain tensor among DTensors that differs from rank to rank"));
  }
}

// A hook on one rank alone changes nothing in what the ranks do.
TEST(PlainTensorsTest, AHookOnOneRank) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    at::Tensor x = distribute_tensor(numbers({4, 4}), mesh, Placements{Shard(0)}).requires_grad_();
    const at::Tensor m = std::get<0>(x.max(1));
    if (mesh->coordinate()[0] == 0)
      m.register_hook([](const at::Tensor& grad) { (void)grad.sizes(); });
    m.sum().backward();
    at::Tensor wanted = at::zeros({4, 4});
    wanted.select(1, 3).fill_(1);
    EXPECT_TRUE(at::equal(full_tensor(x.grad()), wanted));
  });
}

TEST(PlainTensorsTest, ANumberThatDiffersIsAnErrorBeforeItIsSeen) {
  const std::function<void(const at::Tensor&)> kUses[] = {
      [](const at::Tensor& y) { full_tensor(y); },
      [](const at::Tensor& y) { to_local(y); },
      [](const at::Tensor& y) { y.sum().item<double>(); },
      [](const at::Tensor& y) { redistribute(y, {Shard(0), Replicate()}).max().item<double>(); },
      [](const at::Tensor& y) { at::equal(y, y); },
      [](const at::Tensor& y) { at::zeros({}).add_(y.sum()).item<float>(); },
      [](const at::Tensor& y) {
        at::Tensor w = ones({1}, mesh_of(y), {Replicate(), Replicate()}).requires_grad_();
        w.mutable_grad() = y;
        clip_grad_norm({w}, 1.0);
      },
      [](const at::Tensor& y) { y.nonzero(); },
      [](const at::Tensor& y) { from_local(to_local(y), mesh_of(y), {Shard(0), Replicate()}); },
  };
  for (const auto& use : kUses) {
    for (int dim : {0, 1}) {
      EXPECT_THAT(message_of([&](const MeshPtr& mesh) {
                    const at::Tensor x = ones({1}, mesh, {Replicate(), Replicate()});
                    const at::Tensor same = at::scalar_tensor(2.0);
                    use(x * same * at::scalar_tensor(1.0 + mesh->coordinate()[dim]));
                  }),
                  HasSubstr("aten::mul.Tensor: argument 'other' is a plain tensor among DTensors "
                            "that differs from rank to rank"));
    }
  }
}

TEST(PlainTensorsTest, NumbersShareOneComparison) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor x = distribute_tensor(numbers({4, 4}), mesh, Placements{Shard(0)});
    const at::Tensor scale = at::scalar_tensor(0.5);
    const CommTrace trace(mesh);
    at::Tensor y = x;
    for (int i = 0; i < 10; ++i) y = at::where(y > 0, y, 0.0) * scale;
    EXPECT_EQ(trace.events().size(), 0u);
    const at::Tensor whole = full_tensor(y);
    EXPECT_EQ(trace.events().size(), 2u);  // one comparison, and the gathering
    EXPECT_TRUE(at::allclose(whole, at::relu(numbers({4, 4})) / 1024));
    // A program's own numbers are the same on all ranks.
    to_local((y * 2.0 + 1) / 3);
    EXPECT_EQ(trace.events().size(), 2u);
  });
}

// What was computed may differ from rank to rank, wherever it is now: no value leaves any more.
TEST(PlainTensorsTest, AnErrorIsNotForgotten) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor x = ones({1}, mesh, {Replicate()});
    const at::Tensor number = at::scalar_tensor(static_cast<double>(mesh->coordinate()[0]));
    const at::Tensor y = x * number;
    const auto status_of = [](const std::function<void()>& exit) {
      try {
        exit();
      } catch (const Error& error) {
        return error.status();
      }
      return absl::OkStatus();
    };
    EXPECT_EQ(status_of([&] { to_local(y); }).code(), absl::StatusCode::kInvalidArgument);
    const CommTrace trace(mesh);
    const std::function<void()> kExits[] = {[&] { to_local(y); }, [&] { full_tensor(y + 1); },
                                            [&] { y.item<float>(); },
                                            [&] { to_local(ones({1}, mesh, {Replicate()})); }};
    for (const auto& exit : kExits) {
      const absl::Status status = status_of(exit);
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_THAT(std::string(status.message()),
                  HasSubstr("aten::mul.Tensor: argument 'other' is a plain tensor among DTensors "
                            "that differs from rank to rank"));
    }
    EXPECT_EQ(trace.events().size(), 0u);
  });
}

// A comparison that did not take place is still owed.
TEST(PlainTensorsTest, AComparisonThatIsCutShortIsNotTakenForDone) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor x = ones({1}, mesh, {Replicate()});
    const at::Tensor y = x * at::scalar_tensor(2.0);
    mesh->communicator({0}).value()->abort(absl::AbortedError("enough"));
    for (int i = 0; i < 2; ++i) EXPECT_THROW(to_local(y), Error);
  });
}

// The 256 that are told apart, and as many as there are.
TEST(PlainTensorsTest, TheOneThatDiffersIsNamed) {
  const auto message = [](int before, int after) {
    return message_of([&](const MeshPtr& mesh) {
      at::Tensor x = ones({1}, mesh, {Replicate(), Replicate()});
      for (int i = 0; i < before; ++i) x = x + at::scalar_tensor(1.0);
      x = x * at::scalar_tensor(1.0 + mesh->coordinate()[1]);
      for (int i = 0; i < after; ++i) x = x - at::scalar_tensor(1.0);
      to_local(x);
    });
  };
  for (const int before : {0, 1, 255}) {
    EXPECT_THAT(message(before, 255 - before),
                HasSubstr("aten::mul.Tensor: argument 'other' is a plain tensor among DTensors "
                          "that differs from rank to rank"))
        << before;
  }
  EXPECT_THAT(message(255, 1),
              HasSubstr("one of 2 plain tensors among DTensors, used one after the other from "
                        "\"aten::add.Tensor: argument 'other'\" to \"aten::mul.Tensor: argument "
                        "'other'\", differs from rank to rank"));
  EXPECT_THAT(message(0, 400), HasSubstr("from \"aten::mul.Tensor: argument 'other'\" to "
                                         "\"aten::sub.Tensor: argument 'other'\""));
  EXPECT_THAT(message(400, 0),
              HasSubstr("one of 2 plain tensors among DTensors, used one after the "
                        "other from \"aten::mul.Tensor: argument 'other'\""));
  EXPECT_THAT(message(1000, 1000),
              HasSubstr("one of 8 plain tensors among DTensors, used one after the other from "
                        "\"aten::mul.Tensor: argument 'other'\""));
}

// Ranks that have not done the same.
TEST(PlainTensorsTest, OneRankThatHasUsedMore) {
  EXPECT_THAT(message_of([](const MeshPtr& mesh) {
                at::Tensor x = ones({1}, mesh, {Replicate(), Replicate()});
                for (int i = 0; i <= mesh->coordinate()[1]; ++i) x = x + at::scalar_tensor(1.0);
                to_local(x);
              }),
              HasSubstr("ranks 0 and 1 have not used equally many plain tensors among DTensors"));
}

// More of them than are remembered: the same answers on all ranks all the same.
TEST(PlainTensorsTest, ManyNumbersAndConstants) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    at::Tensor sum = zeros({3}, mesh, {Shard(0)});
    std::vector<at::Tensor> constants;
    for (int i = 0; i < 1500; ++i) {
      constants.push_back(at::full({3}, 1.0));
      sum = sum + constants.back() * 1.0;
      sum = sum + at::scalar_tensor(1.0);
      if (mesh->coordinate()[0] == 0) constants.clear();  // ranks keep what they like
    }
    EXPECT_TRUE(at::equal(full_tensor(sum), at::full({3}, 3000.0)));
  });
}

TEST(PlainTensorsTest, ANumberThatASumIsAddedToHoldsTheSum) {
  on_mesh({{"x", 3}}, [](const MeshPtr& mesh) {
    const at::Tensor x = distribute_tensor(numbers({7}), mesh, Placements{Shard(0)});
    at::Tensor total = at::zeros({});
    total.add_(x.sum());
    total += x.sum();
    EXPECT_EQ(total.item<float>(), 2 * numbers({7}).sum().item<float>());
  });
}

TEST(PlainTensorsTest, GradientsOfPlainTensorsAreNotAskedForWithoutRecording) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    at::Tensor w = zeros({4, 4}, mesh, {Shard(0)}).requires_grad_();
    const at::Tensor plain = numbers({4, 4}).requires_grad_();
    {
      const at::NoGradGuard guard;
      w.copy_(plain);
      w.add_(at::scalar_tensor(1.0).requires_grad_());
    }
    EXPECT_TRUE(at::equal(full_tensor(w.detach()), numbers({4, 4}) + 1));
    EXPECT_FALSE(is_dtensor(plain));
  });
  for (const at::Tensor& plain : {at::ones({4}), at::scalar_tensor(1.0)}) {
    plain.requires_grad_();
    EXPECT_THAT(
        message_of([&](const MeshPtr& mesh) { ones({4}, mesh, {Shard(0), Replicate()}) * plain; }),
        HasSubstr("among DTensors, and it requires grad"));
  }
}

// What autograd has saved of a local part is noticed to be gone, as for a plain tensor.
TEST(PlainTensorsTest, ALocalPartThatIsWrittenThroughItsDTensor) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    at::Tensor w = distribute_tensor(numbers({4, 4}), mesh, Placements{Shard(0)}).requires_grad_();
    const at::Tensor local = to_local(w);
    const at::Tensor y = (local * local).sum();
    {
      const at::NoGradGuard guard;
      w.mul_(2);
    }
    EXPECT_THROW(y.backward(), c10::Error);
    // And of its views.
    const at::Tensor q = numbers({4, 4}).requires_grad_();
    const at::Tensor turned = to_local(w.detach().t());
    const at::Tensor z = (turned * q.slice(1, 0, turned.size(1))).sum();
    {
      const at::NoGradGuard guard;
      w.mul_(2);
    }
    EXPECT_THROW(z.backward(), c10::Error);
  });
}

// select() of another rank's row is a copy: going back it would undo what went back before it.
TEST(PlainTensorsTest, TwoCopiesOfOneTensorAreNotWrittenTogether) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::NoGradGuard guard;
    const at::Tensor all = distribute_tensor(numbers({7, 5}), mesh, Placements{Shard(0)});
    const std::vector<at::Tensor> rows = {all.select(0, 5), all.select(0, 6)};
    EXPECT_THROW(at::_foreach_mul_(rows, 2), Error);
    EXPECT_TRUE(at::equal(full_tensor(all), numbers({7, 5})));
    for (at::Tensor row : rows) row.mul_(2);
    at::Tensor wanted = numbers({7, 5});
    wanted.slice(0, 5, 7).mul_(2);
    EXPECT_TRUE(at::equal(full_tensor(all), wanted));
  });
}

// Where a tensor's numbers lie in memory is a rank's own affair.
TEST(PlainTensorsTest, ViewsOfOneBufferOnOneRank) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor both = numbers({2, 8});
    const bool is_first = mesh->coordinate()[0] == 0;
    const at::Tensor a = is_first ? both[0] : both[0].clone();
    const at::Tensor b = is_first ? both[1] : both[1].clone();
    const at::Tensor x = distribute_tensor(numbers({8}), mesh, Placements{Shard(0)});
    const at::Tensor y = x.add(a).mul(b);
    to_local(y);
    EXPECT_TRUE(at::equal(full_tensor(y), (numbers({8}) + both[0]) * both[1]));
  });
}

// LibTorch's derivative of a sign is a plain zero without memory.
TEST(PlainTensorsTest, AZeroWithoutMemoryIsAGradient) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor x =
        distribute_tensor(numbers({4, 3}), mesh, Placements{Shard(0)}).requires_grad_();
    const at::Tensor moved = redistribute(x, Placements{Shard(1)});
    const at::Tensor zero = torch::autograd::grad({moved.sgn()}, {x}, {at::ones_like(moved)})[0];
    EXPECT_TRUE(at::equal(full_tensor(zero), at::zeros({4, 3})));
    // Of a local part, with and without create_graph.
    for (const bool graph : {false, true}) {
      const at::Tensor local = torch::autograd::grad(
          {to_local(x).sgn()}, {x}, {at::ones_like(to_local(x.detach()))}, true, graph)[0];
      EXPECT_TRUE(at::equal(full_tensor(local.detach()), at::zeros({4, 3})));
    }
    // One of two that are added.
    const at::Tensor twice =
        torch::autograd::grad({(x.abs() * x).sum()}, {x}, {}, true, /*create_graph=*/true)[0];
    const at::Tensor again = torch::autograd::grad({twice.sum()}, {x})[0];
    EXPECT_TRUE(at::equal(full_tensor(again), 2 * numbers({4, 3}).sgn()));
  });
}

// On the device "meta" there is nothing that could differ.
TEST(PlainTensorsTest, AShapeAloneIsNotCompared) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor x =
        distribute_tensor(numbers({4, 3}), mesh, Placements{Shard(0)}).to(at::kMeta);
    const at::Tensor sum = x + at::empty({4, 3}, x.options().device(at::kMeta));
    EXPECT_TRUE(sum.is_meta());
    EXPECT_EQ(sum.sizes(), at::IntArrayRef({4, 3}));
  });
}

// Operators that are made of others, and ask for the parts of their arguments.
TEST(PlainTensorsTest, BesideDTensorsInCompositesToo) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor p = full({4}, 0.5, mesh, Placements{Shard(0)});
    const at::Tensor count = at::full({4}, 10.0);
    for (const at::Tensor& drawn :
         {at::binomial(count, p), at::binomial(count[0], p), at::binomial(p.mul(20), count / 20),
          at::binomial(p.mul(20), count[0] / 20)}) {
      const at::Tensor all = full_tensor(drawn);
      EXPECT_EQ(all.sizes(), at::IntArrayRef({4}));
      EXPECT_TRUE(all.ge(0).logical_and(all.le(10)).all().item<bool>());
    }
    at::Tensor flags = zeros({4}, mesh, {Shard(0)});
    flags.bernoulli_(at::tensor({0.0, 1.0, 0.0, 1.0}));
    EXPECT_TRUE(at::equal(full_tensor(flags), at::tensor({0.0f, 1.0f, 0.0f, 1.0f})));
    EXPECT_EQ(at::zeros({2}).resize_as_(p).sizes(), at::IntArrayRef({4}));
  });
  EXPECT_THAT(message_of([](const MeshPtr& mesh) {
                at::Tensor flags = zeros({4}, mesh, {Shard(0), Replicate()});
                flags.bernoulli_(at::full({4}, mesh->coordinate()[1] / 2.0));
                to_local(flags);
              }),
              HasSubstr("bernoulli_.Tensor: argument 'p' is a plain tensor among DTensors that "
                        "differs from rank to rank"));
}

}  // namespace
}  // namespace shardweave
