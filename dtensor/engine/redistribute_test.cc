// Every transition between layouts, executed on rank threads: values, gradients, counts.

#include "ATen/ATen.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/comm/world.h"
#include "shardweave/dtensor/cost_model.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/dtensor/observe/comm_trace.h"
#include "shardweave/dtensor/redistribute_async.h"
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

// On the meta device; also what LibTorch asks of the meta device for its tensors of zeros.
TEST(RedistributeTest, OfTensorsWithoutNumbersNothingIsSent) {
  on_mesh({{"x", 2}, {"y", 3}}, [](const MeshPtr& mesh) {
    const auto layouts = all_layouts(2, 2, true);
    for (const at::ScalarType dtype : {at::kFloat, at::kComplexDouble}) {
      const at::Tensor whole = numbers({7, 5}).to(dtype);
      for (const Placements& from : layouts) {
        const at::Tensor start = scattered(whole, mesh, from);
        const at::Tensor shape = start.to(at::kMeta);
        for (const Placements& to : layouts) {
          SCOPED_TRACE(to_string(from) + " -> " + to_string(to));
          const at::Tensor end = redistribute(start, to);
          const CommTrace trace(mesh);
          const at::Tensor shape_of_end = redistribute(shape, to);
          EXPECT_EQ(layout_of(shape_of_end), layout_of(end));
          const at::Tensor local = to_local(shape_of_end);
          EXPECT_TRUE(local.is_meta());
          EXPECT_EQ(local.sizes(), to_local(end).sizes());
          EXPECT_EQ(local.dtype(), to_local(end).dtype());
          EXPECT_THAT(trace.events(), ::testing::IsEmpty());
        }
      }
    }
    const at::Tensor rows = empty({7, 5}, mesh, {Shard(0), Shard(1)}, at::kMeta);
    const at::Tensor sums = empty({7, 5}, mesh, {Partial(), Partial()}, at::kMeta);
    const CommTrace trace(mesh);
    EXPECT_TRUE((rows + sums).mm(sums.t()).is_meta());
    EXPECT_THAT(trace.events(), ::testing::IsEmpty());
  });
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

// With which one rank has everything, and the number of pieces is no int64.
TEST(RedistributeTest, AbsurdSplitFactors) {
  for (int64_t ranks : {2, 4}) {
    on_mesh({{"x", ranks}}, [](const MeshPtr& mesh) {
      const at::Tensor whole = numbers({8, 4});
      for (const int64_t factor : {int64_t{1} << 62, INT64_MAX}) {
        const Placement absurd = StridedShard(0, factor);
        for (const Placement& other : {Placement(Replicate()), Placement(Shard(1)), Partial()}) {
          SCOPED_TRACE(absurd.to_string() + ", " + other.to_string());
          expect_value(redistribute(scattered(whole, mesh, {absurd}), Placements{other}), whole);
          expect_value(redistribute(scattered(whole, mesh, {other}), Placements{absurd}), whole);
        }
      }
    });
  }
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

// Of other strides than the gradient shows: it is written to later, and must be no one else's.
TEST(RedistributeTest, GradientsOfLocalPartsAreDense) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const auto leaf = [&] {
      return distribute_tensor(numbers({4, 2}), mesh, Placements{Shard(0)}).requires_grad_();
    };
    const at::Tensor w = leaf();
    for (int twice = 0; twice < 2; ++twice) to_local(w).sum().backward();  // expanded
    w.grad().mul_(2);
    expect_value(w.grad(), at::full({4, 2}, 4.f));
    // One gradient, as it is and transposed.
    const at::Tensor a = leaf(), b = leaf();
    const at::Tensor c = at::arange(4, at::kFloat).view({2, 2});
    for (int twice = 0; twice < 2; ++twice) {
      ((to_local(a) + to_local(b).t()) * c).sum().backward();
    }
    EXPECT_TRUE(at::equal(to_local(a.grad()), c * 2));
    EXPECT_TRUE(at::equal(to_local(b.grad()), c.t() * 2));
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
                from_local(at::ones({2, 3 + m->coordinate()[0]}), m, {Shard(0)});
              }),
              ::testing::HasSubstr("rank 1 at [1] has the local shape [2, 4], but the layout "
                                   "[S(0)] cuts the global shape [4, 3] into [2, 3] there"));
}

// Each under its own name, whatever it is made of.
TEST(RedistributeTest, FactoriesNameThemselves) {
  on_mesh({{"x", 2}}, [](const MeshPtr& m) {
    const Placements two = {Shard(0), Shard(0)}, partial = {Partial()};
    const std::pair<std::string, std::function<void(const Placements&)>> factories[] = {
        {"zeros", [&](const Placements& p) { zeros({4}, m, p); }},
        {"ones", [&](const Placements& p) { ones({4}, m, p); }},
        {"empty", [&](const Placements& p) { empty({4}, m, p); }},
        {"full", [&](const Placements& p) { full({4}, 2, m, p); }},
        {"rand", [&](const Placements& p) { rand({4}, m, p); }},
        {"randn", [&](const Placements& p) { randn({4}, m, p); }},
    };
    const auto what_of = [](const std::function<void()>& body) -> std::string {
      try {
        body();
      } catch (const Error& error) {
        return error.what_without_backtrace();
      }
      return "no error";
    };
    for (const auto& [name, make] : factories) {
      EXPECT_THAT(what_of([&, &f = make] { f(two); }),
                  ::testing::StartsWith(name + ": [S(0), S(0)] has 2 placements"));
      if (name == "zeros" || name == "empty") continue;  // which may be Partial
      EXPECT_THAT(what_of([&, &f = make] { f(partial); }),
                  ::testing::StartsWith(name + ": [P(sum)] has a Partial"));
    }
  });
}

// Nothing is compared when it is made, but before a value is made of it.
TEST(RedistributeTest, WithoutASourceAnotherShapeOrDtypeIsAnErrorOfTheNextCollective) {
  const std::function<at::Tensor(bool)> makers[] = {
      [](bool odd) { return at::ones({odd ? 4 : 3}); },
      [](bool odd) { return at::ones({3}, odd ? at::kDouble : at::kFloat); },
      [](bool odd) { return odd ? at::ones({3, 1}) : at::ones({3}); },
  };
  for (const auto& make : makers) {
    for (const Placement& placement : {Placement(Shard(0)), Placement(Replicate())}) {
      const absl::Status status = try_on_mesh({{"x", 3}}, [&](const MeshPtr& mesh) {
        const at::Tensor x = distribute_tensor(make(mesh->coordinate()[0] == 2), mesh,
                                               Placements{placement}, {.source = std::nullopt});
        if (placement.is_shard()) {
          x.sum().item<double>();
        } else {
          full_tensor(redistribute(x, Placements{Shard(0)}));
        }
      });
      EXPECT_FALSE(status.ok());
      EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("called different things"));
    }
  }
}

TEST(RedistributeTest, ATensorOfAnotherRankIsAnErrorThatSaysSo) {
  at::Tensor of_first;
  const absl::Status status = run_ranks(2, [&](World& world) {
    const MeshPtr mesh = init_device_mesh(world, {{"x", 2}}).value();
    const at::Tensor mine = ones({4}, mesh, {Shard(0)});
    if (world.rank() == 0) of_first = mine;
    throw_if_error(world.comm()->barrier().wait());
    if (world.rank() == 1) {
      try {
        mine.add(of_first);
        ADD_FAILURE() << "no error";
      } catch (const Error& error) {
        EXPECT_THAT(
            std::string(error.status().message()),
            ::testing::HasSubstr("argument 'other' lies on DeviceMesh(x=2), another "
                                 "argument on DeviceMesh(x=2) (as another rank has it: they are "
                                 "tensors of the ranks 0 and 1)"));
      }
    }
    throw_if_error(world.comm()->barrier().wait());
    if (world.rank() == 0) of_first.reset();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Rows that do not lie as an even split would have them.
TEST(RedistributeTest, FromLocalOfUnevenRowsIsRagged) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const int64_t mine = mesh->coordinate()[0];
    const at::Tensor whole = numbers({3, 2});
    at::Tensor local = (mine == 0 ? whole.narrow(0, 0, 1) : whole.narrow(0, 1, 2)).clone();
    local.requires_grad_();
    const at::Tensor t = from_local(local, mesh, {Shard(0)});
    EXPECT_EQ(t.sizes(), whole.sizes());
    EXPECT_EQ(layout_of(t)[0], RaggedShard(0, {1, 2}));
    expect_value(t.detach(), whole);
    const at::Tensor w = distribute_tensor(numbers({2, 4}), mesh, Placements{Replicate()});
    expect_value(t.detach().matmul(w), whole.matmul(numbers({2, 4})));
    expect_value((t * t).detach().sum(0), (whole * whole).sum(0));
    expect_value(redistribute(t.detach(), {Shard(0)}), whole);
    (t * t).sum().backward();
    EXPECT_TRUE(at::equal(local.grad(), local.detach() * 2));
    // An even split stays one, as does what torch.chunk gives.
    EXPECT_EQ(layout_of(from_local(at::ones({2}), mesh, {Shard(0)}))[0], Shard(0));
    EXPECT_EQ(layout_of(from_local(at::ones({2 - mine}), mesh, {Shard(0)}))[0], Shard(0));
    // Of the other dimensions too, and with nothing on a rank.
    EXPECT_EQ(layout_of(from_local(at::ones({2, 5 * mine}), mesh, {Shard(1)}))[0],
              RaggedShard(1, {0, 5}));
  });
}

TEST(RedistributeTest, FromLocalOfUnevenRowsOnTwoDimensions) {
  on_mesh({{"x", 2}, {"y", 2}}, [](const MeshPtr& mesh) {
    const Coordinate at = mesh->coordinate();
    // Pieces of a plain tensor, by the sizes that each coordinate has.
    const auto part = [](const at::Tensor& whole, int dim, std::vector<int64_t> sizes, int64_t i) {
      int64_t begin = 0;
      for (int64_t k = 0; k < i; ++k) begin += sizes[k];
      return whole.narrow(dim, begin, sizes[i]);
    };
    const at::Tensor whole = numbers({6, 5});
    {
      const at::Tensor local = part(part(whole, 0, {1, 5}, at[0]), 1, {4, 1}, at[1]);
      const at::Tensor t = from_local(local, mesh, {Shard(0), Shard(1)});
      EXPECT_EQ(layout_of(t), Layout({RaggedShard(0, {1, 5}), RaggedShard(1, {4, 1})}));
      expect_value(t, whole);
      expect_value(t.pow(2).mul(t).sum(1), whole.pow(3).sum(1));
    }
    {
      // Ragged along x, replicated along y.
      const at::Tensor t = from_local(part(whole, 0, {2, 4}, at[0]), mesh, {Shard(0), Replicate()});
      EXPECT_EQ(layout_of(t), Layout({RaggedShard(0, {2, 4}), Replicate()}));
      expect_value(t, whole);
    }
    {
      // Both cut the rows: even pieces of 3, each cut in 1 and 2.
      const at::Tensor t = from_local(part(part(whole, 0, {3, 3}, at[0]), 0, {1, 2}, at[1]), mesh,
                                      {Shard(0), Shard(0)});
      EXPECT_EQ(layout_of(t), Layout({Shard(0), RaggedShard(0, {1, 2})}));
      expect_value(t, whole);
    }
    {
      // Pieces of 2 and 4, each cut evenly.
      const int64_t n = at[0] == 0 ? 2 : 4;
      const at::Tensor t = from_local(part(part(whole, 0, {2, 4}, at[0]), 0, {n / 2, n / 2}, at[1]),
                                      mesh, {Shard(0), Shard(0)});
      EXPECT_EQ(layout_of(t), Layout({RaggedShard(0, {2, 4}), Shard(0)}));
      expect_value(t, whole);
    }
  });
}

TEST(RedistributeTest, UnevenRowsThatNoLayoutDescribesAreAnError) {
  // Pieces of 1 + 2 and 2 + 1: one list of sizes cannot say that.
  const absl::Status status = try_on_mesh({{"x", 2}, {"y", 2}}, [](const MeshPtr& m) {
    const int64_t rows = m->coordinate()[0] == m->coordinate()[1] ? 1 : 2;
    from_local(at::ones({rows}), m, {Shard(0), Shard(0)});
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("has the local shape"));
}

// Shard(-1) is the last dimension wherever a placement meets a tensor.
TEST(RedistributeTest, DimensionsCountFromTheEnd) {
  on_mesh({{"x", 2}, {"y", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor whole = numbers({6, 5});
    const Layout want({Shard(1), StridedShard(0, 3)});
    const Placements given = {Shard(-1), StridedShard(-2, 3)};
    const at::Tensor t = distribute_tensor(whole, mesh, given);
    EXPECT_EQ(layout_of(t), want);
    expect_value(t, whole);
    EXPECT_EQ(layout_of(distribute_tensor(whole, mesh, NamedPlacements{{"y", Shard(-1)}})),
              Layout({Replicate(), Shard(1)}));

    const at::Tensor start = distribute_tensor(whole, mesh, Placements(2)).requires_grad_();
    const at::Tensor moved = redistribute(start, given);
    EXPECT_EQ(layout_of(moved), want);
    expect_value(moved.detach(), whole);
    moved.pow(2).sum().backward();
    expect_value(start.grad(), whole * 2);
    EXPECT_EQ(layout_of(redistribute(start, NamedPlacements{{"x", Shard(-2)}})),
              Layout({Shard(0), Replicate()}));
    // Two ways to say one dimension: the mesh dimensions cut it in their own order.
    EXPECT_EQ(layout_of(redistribute(start, {Shard(0), Shard(-2)})), Layout({Shard(0), Shard(0)}));
    expect_value(redistribute(start.detach(), {Shard(-2), Shard(0)}), whole);
    EXPECT_EQ(layout_of(redistribute(start, *Layout::create({Shard(-1), Shard(-1)}, {1, 0}))),
              *Layout::create({Shard(1), Shard(1)}, {1, 0}));

    EXPECT_EQ(layout_of(redistribute_async(start, Placements{Shard(-1), Replicate()}).wait()),
              Layout({Shard(1), Replicate()}));
    EXPECT_EQ(layout_of(redistribute_all({{start}}, {{Layout({Replicate(), Shard(-1)})}})[0]),
              Layout({Replicate(), Shard(1)}));

    const at::Tensor local = to_local(redistribute(start, {Shard(1), Replicate()}).detach());
    EXPECT_EQ(layout_of(from_local(local, mesh, {Shard(-1), Replicate()})),
              Layout({Shard(1), Replicate()}));
    EXPECT_EQ(layout_of(from_local(local, mesh, {Shard(-1), Replicate()}, {{6, 5}})),
              Layout({Shard(1), Replicate()}));
    const int64_t mine = mesh->coordinate()[0];
    EXPECT_EQ(layout_of(from_local(at::ones({4, 1 + mine}), mesh, {Shard(-1), Replicate()})),
              Layout({RaggedShard(1, {1, 2}), Replicate()}));
    EXPECT_EQ(
        layout_of(distribute_tensor(whole, mesh, Placements{RaggedShard(-1, {1, 4}), Replicate()})),
        Layout({RaggedShard(1, {1, 4}), Replicate()}));

    EXPECT_EQ(layout_of(zeros({4, 3}, mesh, given)), want);
    EXPECT_EQ(layout_of(randn({4, 3}, mesh, given)), want);
    EXPECT_EQ(layout_of(full({4, 3}, 2, mesh, given)), want);

    at::Tensor leaf = distribute_tensor(whole, mesh, want.placements()).requires_grad_();
    to_local(leaf, given).sum().backward();
    EXPECT_EQ(layout_of(leaf.grad()), want);
  });
  auto message = [](const std::function<void(const MeshPtr&)>& body) {
    return std::string(try_on_mesh({{"x", 2}}, body).message());
  };
  EXPECT_THAT(message([](const MeshPtr& m) {
                distribute_tensor(at::ones({2, 2}), m, Placements{Shard(-3)});
              }),
              ::testing::HasSubstr("S(-3) on mesh dimension 0 cuts tensor dimension -3, but "
                                   "there are 2 (wanted: -2 to 1)"));
  EXPECT_THAT(message([](const MeshPtr& m) { zeros({2}, m, {Shard(1)}); }),
              ::testing::HasSubstr("cuts tensor dimension 1, but there are 1 (wanted: -1 to 0)"));
  EXPECT_THAT(message([](const MeshPtr& m) { zeros({}, m, {Shard(-1)}); }),
              ::testing::HasSubstr("cuts tensor dimension -1, but there are 0"));
}

// comm/ knows nothing of LibTorch.
TEST(RedistributeTest, AnErrorEndsRunRanksWithItsCode) {
  const absl::Status status = run_ranks(2, [](World& world) {
    if (world.rank() == 1) {
      throw Error("redistribute", absl::OutOfRangeError("there is no dimension 7"));
    }
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(status.message(), "rank 1: redistribute: there is no dimension 7");
}

// Equal meshes are one: what was made for either goes together.
TEST(RedistributeTest, TensorsOfEqualMeshesGoTogether) {
  const absl::Status status = run_ranks(4, [](World& world) {
    const auto a = init_device_mesh(world, {{"dp", 2}, {"tp", 2}}).value();
    const auto b = init_device_mesh(world, {{"dp", 2}, {"tp", 2}}).value();
    const at::Tensor x = distribute_tensor(numbers({4, 4}), a, Placements{Shard(0), Replicate()});
    const at::Tensor y = distribute_tensor(numbers({4, 4}), b, Placements{Replicate(), Shard(1)});
    expect_value(x.matmul(y), numbers({4, 4}).matmul(numbers({4, 4})));
    const at::Tensor u = distribute_tensor(numbers({4}), a->slice({"tp"}).value(), Placements(1));
    const at::Tensor v =
        distribute_tensor(numbers({4}), b->slice({"tp"}).value(), Placements{Shard(0)});
    expect_value(u + v, numbers({4}) * 2);
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Plans are searched once for a pair of specs, by redistribute(), its gradient, redistribute_all() and
// finish_grad_sync().
TEST(RedistributeTest, APlanIsSearchedOnce) {
  on_mesh({{"x", 2}, {"y", 2}}, [](const MeshPtr& mesh) {
    const auto context = dtensor_internal::MeshContext::of(mesh);
    const at::Tensor whole = numbers({7, 6});
    const auto searches = [&] { return context->decisions.plans.searches(); };
    at::Tensor weight = distribute_tensor(whole, mesh, Placements{Shard(0), Replicate()});
    weight.requires_grad_();
    const auto step = [&] {
      const at::Tensor x = scattered(whole, mesh, {Shard(0), Shard(1)}).requires_grad_();
      const at::Tensor y = redistribute(x, {Shard(1), Shard(0)});
      expect_value(y.detach(), whole);
      (y * y).sum().backward();
      expect_value(x.grad(), 2 * whole);
      const at::Tensor a = scattered(whole, mesh, {Partial(), Shard(1)});
      const at::Tensor b = scattered(whole, mesh, {Shard(1), Partial()});
      const Layout target({Replicate(), Shard(0)});
      for (const at::Tensor& t : redistribute_all({a, b}, {target, target})) expect_value(t, whole);
      expect_value(redistribute_async(b, target).wait(), whole);
      full_tensor(weight * 2).sum().backward();
      weight.mutable_grad() = redistribute(weight.grad(), {Shard(1), Shard(1)});
      finish_grad_sync(std::vector<at::Tensor>{weight});
      EXPECT_EQ(layout_of(weight.grad()), layout_of(weight));
      expect_value(weight.grad(), at::full({7, 6}, 2.0f));
      weight.mutable_grad() = at::Tensor();
    };
    step();
    const int64_t once = searches();
    EXPECT_GT(once, 5);
    for (int i = 0; i < 3; ++i) step();
    EXPECT_EQ(searches(), once);
    // By another model they may be others.
    set_cost_model(mesh, cost_model(mesh));
    step();
    const int64_t twice = searches();
    EXPECT_GT(twice, once + 5);
    step();
    EXPECT_EQ(searches(), twice);
  });
}

// What is under way goes on by the plan that it has begun with.
TEST(RedistributeTest, ThePlanOfAPendingTensorOutlivesTheMemo) {
  on_mesh({{"x", 2}, {"y", 2}}, [](const MeshPtr& mesh) {
    const auto context = dtensor_internal::MeshContext::of(mesh);
    const at::Tensor whole = numbers({7, 6});
    const at::Tensor x = scattered(whole, mesh, {Partial(), Shard(1)});
    PendingTensor pending = redistribute_async(x, {Shard(1), Replicate()});
    context->decisions.plans.clear();
    expect_value(pending.wait(), whole);
  });
}

// Of sizes that are others every time few plans are kept, and with them few specs.
TEST(RedistributeTest, TheMemoIsBounded) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const auto context = dtensor_internal::MeshContext::of(mesh);
    context->decisions.plans.set_capacity(16);
    const at::Tensor always = scattered(numbers({5, 4}), mesh, {Shard(0)});
    redistribute(always, {Shard(1)});
    for (int64_t n = 1; n < 500; ++n) {
      const at::Tensor whole = numbers({n, 3});
      const at::Tensor x = scattered(whole, mesh, {Shard(0)});
      EXPECT_TRUE(at::equal(full_tensor(redistribute(x, {Shard(1)})), whole)) << n;
      const int64_t searches = context->decisions.plans.searches();
      redistribute(always, {Shard(1)});
      ASSERT_EQ(context->decisions.plans.searches(), searches)
          << n;  // used in every round: it stays
      ASSERT_LE(context->decisions.plans.size(), 16u);
      context->decisions.cache.clear();  // only the memo keeps specs here
      ASSERT_LE(context->num_specs(), 100u);
    }
  });
}

}  // namespace
}  // namespace shardweave
