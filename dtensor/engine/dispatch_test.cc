// The dispatcher's fallback: cache, implicit communication, in-place and aliasing, operators
// without rules, errors.

#include <cstdlib>
#include <optional>
#include <string_view>
#include <vector>

#include "ATen/ATen.h"
#include "c10/core/GradMode.h"
#include "c10/core/InferenceMode.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "shardweave/dtensor/rule.h"
#include "shardweave/dtensor/testing/counted_mesh.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "torch/library.h"

namespace shardweave {
namespace {

using namespace dtensor_internal;

using ::testing::AnyOf;
using testing::Carrier;
using ::testing::HasSubstr;
using testing::on_mesh;
using testing::scattered;
using testing::try_on_each;
using testing::try_on_mesh;

at::Tensor numbers(at::IntArrayRef sizes) {
  int64_t n = 1;
  for (int64_t s : sizes) n *= s;
  return at::arange(1, n + 1, at::kFloat).view(sizes);
}

void expect_value(const at::Tensor& tensor, const at::Tensor& whole) {
  const at::Tensor got = full_tensor(tensor);
  EXPECT_TRUE(at::allclose(got, whole)) << layout_of(tensor).to_string() << "\n"
                                        << got << "\nwanted\n"
                                        << whole;
}

TEST(DispatchTest, CachesByWhatTheRuleReads) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor a = distribute_tensor(numbers({7, 5}), mesh, Placements{Shard(0)});
    auto misses = [&] { return dispatch_counters(mesh).cache_misses; };
    at::Tensor b = a + a;
    const int64_t before = misses();
    for (int i = 0; i < 100; ++i) b = at::add(a, a, 0.5 * i);  // a per-step scalar
    for (int i = 0; i < 100; ++i) b = a * (0.5 * i);
    EXPECT_EQ(misses() - before, 2);  // with a float factor, which decides about dtypes; mul
    b = a.sum(0);
    b = a.sum(1);
    EXPECT_EQ(misses() - before, 4);
  });
}

// What decides shapes and dtypes is in the key, though it is no integer: strings, lists of floats,
// the types of a list of Scalars.
TEST(DispatchTest, WhatDecidesShapesAndDtypesIsInTheKey) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const auto cut = [&](const at::Tensor& whole) {
      return distribute_tensor(whole, mesh, Placements{Shard(0)});
    };
    const at::Tensor matrices = numbers({3, 4, 2}).sin(), ints = at::arange(1, 8);
    for (const char* mode : {"reduced", "complete", "r"}) {
      const auto [q, r] = at::linalg_qr(cut(matrices), mode);
      const auto [want_q, want_r] = at::linalg_qr(matrices, mode);
      expect_value(q, want_q);
      expect_value(r, want_r);
    }
    for (const char* mode : {"floor", "none", "trunc"}) {
      std::optional<std::string_view> rounding;
      if (mode != std::string_view("none")) rounding = mode;
      const at::Tensor got = at::div(cut(ints), cut(ints + 1), rounding);
      EXPECT_EQ(got.scalar_type(), at::div(ints, ints + 1, rounding).scalar_type());
      expect_value(got, at::div(ints, ints + 1, rounding));
    }
    for (const at::Scalar& number : {at::Scalar(2), at::Scalar(2.5)}) {
      const std::vector<at::Scalar> list = {number};
      const at::Tensor got = at::_foreach_add({cut(ints)}, list)[0];
      EXPECT_EQ(got.scalar_type(), at::add(ints, number).scalar_type());
      expect_value(got, at::add(ints, number));
    }
    // Elsewhere LibTorch works out the sizes before the operator gets here.
    const c10::InferenceMode guard;
    const at::Tensor images = numbers({2, 3, 4, 4}), image = cut(images);
    for (const double scale : {2.0, 3.0, 1.5}) {
      const std::vector<double> scales = {scale, scale};
      expect_value(at::upsample_bilinear2d(image, std::nullopt, false, scales),
                   at::upsample_bilinear2d(images, std::nullopt, false, scales));
      expect_value(at::upsample_nearest2d(image, std::nullopt, scales),
                   at::upsample_nearest2d(images, std::nullopt, scales));
    }
  });
}

TEST(DispatchTest, ADTensorAmongIndicesOfAPlainTensor) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor whole = numbers({4, 5}), positions = at::arange(4);
    const at::Tensor index = distribute_tensor(positions, mesh, Placements{Shard(0)});
    const c10::List<std::optional<at::Tensor>> columns({std::nullopt, index});
    const at::Tensor got = at::index(whole, columns);
    expect_value(got, at::index(whole, {std::nullopt, positions}));
  });
}

// The order of the cuts is one input's, the ragged shard fits it only: the other input is brought
// to both.
TEST(DispatchTest, RaggedShardsOutsideOfOtherCuts) {
  on_mesh({{"x", 2}, {"y", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor whole = numbers({7, 5});
    const Layout ragged_first = Layout::create({Shard(1), RaggedShard(1, {2, 3})}, {1, 0}).value();
    const at::Tensor a = redistribute(
        distribute_tensor(whole, mesh, Placements{Replicate(), Replicate()}), ragged_first);
    for (const Placements& p :
         {Placements{Replicate(), Replicate()}, {Shard(0), Shard(1)}, {Shard(1), Shard(1)}}) {
      const at::Tensor b = distribute_tensor(whole, mesh, p);
      expect_value(a + b, whole + whole);
      expect_value(b * a, whole * whole);
      expect_value(at::mm(a, b.t()), at::mm(whole, whole.t()));
    }
  });
}

TEST(DispatchTest, PartialTimesPartialIsNotPartial) {
  on_mesh({{"x", 3}}, [](const MeshPtr& mesh) {
    const at::Tensor whole = numbers({4});
    const at::Tensor p = scattered(whole, mesh, {Partial()});
    expect_value(p * p, whole * whole);
    expect_value(p + 1, whole + 1);  // the scalar counts once, not per rank
    expect_value(p + p, whole + whole);
    expect_value(p * 3, whole * 3);
    // p is there as a sum by now, which costs nothing to use again.
    EXPECT_TRUE(layout_of(p * 3)[0].is_replicate());
    EXPECT_TRUE(layout_of(scattered(whole, mesh, {Partial()}) * 3)[0].is_partial());
    expect_value(p.relu(), whole);
    expect_value(p.norm(), whole.norm());
    expect_value(at::gt(p, 2), at::gt(whole, 2));
    EXPECT_EQ(p.sum().item<float>(), whole.sum().item<float>());
  });
}

TEST(DispatchTest, BiasOfARowwiseLinearCountsOnce) {
  on_mesh({{"tp", 4}}, [](const MeshPtr& mesh) {
    const at::Tensor x = numbers({3, 8}), w = numbers({5, 8}), b = numbers({5});
    at::Tensor dx = distribute_tensor(x, mesh, Placements{Shard(1)});
    at::Tensor dw = distribute_tensor(w, mesh, Placements{Shard(1)});
    at::Tensor db = distribute_tensor(b, mesh, Placements{Replicate()}).requires_grad_();
    const at::Tensor y = at::linear(dx, dw, db);
    EXPECT_TRUE(layout_of(y)[0].is_partial());
    expect_value(y, at::linear(x, w, b));
    y.sum().backward();
    expect_value(db.grad(), at::full({5}, 3.f));
  });
}

TEST(DispatchTest, InPlaceKeepsTheLayout) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor whole = numbers({7, 5});
    for (const Placement& self : testing::all_placements(2, true)) {
      for (const Placement& other : testing::all_placements(2, true)) {
        SCOPED_TRACE(self.to_string() + " op= " + other.to_string());
        at::Tensor a = scattered(whole, mesh, {self});
        at::Tensor alias = a.detach();
        a.add_(scattered(whole, mesh, {other}), 2);
        a.mul_(scattered(whole, mesh, {other}));
        EXPECT_EQ(layout_of(a)[0], self);
        expect_value(a, (whole + 2 * whole) * whole);
        expect_value(alias, (whole + 2 * whole) * whole);
        at::Tensor out = scattered(whole, mesh, {self});
        at::mul_out(out, a, scattered(whole, mesh, {other}));
        EXPECT_EQ(layout_of(out)[0], self);
        expect_value(out, (whole + 2 * whole) * whole * whole);
      }
    }
  });
}

TEST(DispatchTest, WritesThroughViews) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    at::Tensor a = distribute_tensor(at::zeros({4, 5}), mesh, Placements{Shard(0)});
    a.select(1, 2).fill_(1);
    at::Tensor want = at::zeros({4, 5});
    want.select(1, 2).fill_(1);
    expect_value(a, want);
    // Along the sharded dimension the view is one of a copy, which goes back.
    at::Tensor view = a.select(0, 1);
    expect_value(view, want.select(0, 1));
    view.fill_(2);
    want.select(0, 1).fill_(2);
    expect_value(a, want);
    EXPECT_EQ(layout_of(a), Layout({Shard(0)}));
  });
}

TEST(DispatchTest, OperatorWithoutARuleIsGatheredAndCounted) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor whole = numbers({5, 5}) + at::eye(5) * 40;
    const at::Tensor a = distribute_tensor(whole, mesh, Placements{Shard(0)});
    const int64_t before = dispatch_counters(mesh).gathered_operators;
    expect_value(std::get<0>(at::_aminmax(a)), std::get<0>(at::_aminmax(whole)));
    EXPECT_GT(dispatch_counters(mesh).gathered_operators, before);
  });
}

TEST(DispatchTest, StrictScopeNamesOperatorAndTensors) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor a = distribute_tensor(numbers({4, 4}), mesh, Placements{Shard(0)});
    const StrictScope strict(mesh);
    at::Tensor sum = a + a;
    try {
      sum = a.softmax(0);
      ADD_FAILURE() << "communicated";
    } catch (const Error& error) {
      EXPECT_EQ(error.status().code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_THAT(error.what(), ::testing::HasSubstr("aten::_softmax"));
      EXPECT_THAT(error.what(), ::testing::HasSubstr("DTensor[4, 4]"));
    }
    redistribute(sum, {Replicate()});  // explicit: allowed
  });
}

// The gradient that a user starts with may be a plain one.
TEST(DispatchTest, PlainGradientsAreReplicated) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor a =
        distribute_tensor(numbers({4, 4}), mesh, Placements{Shard(0)}).requires_grad_();
    redistribute(a, {Shard(1)}).backward(numbers({4, 4}));
    expect_value(a.grad(), numbers({4, 4}));
    EXPECT_EQ(layout_of(a.grad()), Layout({Shard(0)}));
  });
}

// A plain tensor counts as replicated if it is one: the same on every rank.
TEST(DispatchTest, PlainTensorsMixIfTheyAreEqual) {
  const auto try_with = [](const std::function<void(const MeshPtr&, const at::Tensor&)>& body) {
    return try_on_mesh({{"x", 2}}, [&](const MeshPtr& mesh) {
      body(mesh, distribute_tensor(numbers({4, 4}), mesh, Placements{Shard(0)}));
    });
  };
  const absl::Status equal = try_with([](const MeshPtr&, const at::Tensor& a) {
    const at::Tensor sum = a + at::ones({4, 4});
    EXPECT_EQ(layout_of(sum), Layout({Shard(0)}));
    EXPECT_TRUE(at::equal(full_tensor(sum), numbers({4, 4}) + 1));
    at::Tensor written = at::ones({4, 4}), out = at::empty({4, 4});
    written.add_(a);
    at::add_out(out, a, a);
    expect_value(written, numbers({4, 4}) + 1);
    expect_value(out, numbers({4, 4}) * 2);
    EXPECT_TRUE(is_dtensor(written) && is_dtensor(out));
  });
  EXPECT_TRUE(equal.ok()) << equal;

  const struct {
    std::function<void(const MeshPtr&, const at::Tensor&)> body;
    const char* error;
  } kRefused[] = {
      {[](const MeshPtr& mesh, const at::Tensor& a) { a + at::full({4}, mesh->coordinate()[0]); },
       "differs from rank to rank"},
      {[](const MeshPtr& mesh, const at::Tensor& a) {
         at::full({4, 4}, mesh->coordinate()[0]).add_(a);
       },
       "differs from rank to rank"},
      {[](const MeshPtr&, const at::Tensor& a) { a + at::ones({4, 4}).requires_grad_(); },
       "is a plain tensor of shape [4, 4] among DTensors, and it requires grad"},
      {[](const MeshPtr& mesh, const at::Tensor& a) {
         const StrictScope strict(mesh);
         a + at::ones({4, 4});
       },
       "which the strict scope refuses"},
  };
  for (const auto& refused : kRefused) {
    const absl::Status status = try_with(refused.body);
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(refused.error));
  }
}

TEST(DispatchTest, ShapeErrorsAreLibTorchsAndComeBeforeCommunication) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor a = distribute_tensor(numbers({4, 4}), mesh, Placements{Shard(0)});
    const at::Tensor b = distribute_tensor(numbers({3}), mesh, Placements{Replicate()});
    auto what = [](auto f) -> std::string {
      try {
        f();
      } catch (const c10::Error& e) {
        return e.what_without_backtrace();
      }
      return "no error";
    };
    EXPECT_EQ(what([&] { a + b; }), what([&] { numbers({4, 4}) + numbers({3}); }));
    EXPECT_EQ(what([&] { at::mm(a, b); }), what([&] { at::mm(numbers({4, 4}), numbers({3})); }));
  });
}

TEST(DispatchTest, InferenceModeDecomposes) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const c10::InferenceMode guard;
    const at::Tensor x = numbers({2, 3, 4}), w = numbers({6, 4}), b = numbers({6});
    const at::Tensor y = at::linear(distribute_tensor(x, mesh, Placements{Shard(0)}),
                                    distribute_tensor(w, mesh, Placements{Replicate()}),
                                    distribute_tensor(b, mesh, Placements{Replicate()}));
    expect_value(y, at::linear(x, w, b));
  });
}

TEST(DispatchTest, GradientsDoNotDependOnWhatWasCachedWithoutThem) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    at::Tensor w = distribute_tensor(numbers({4, 3}), mesh, Placements{Shard(1)}).requires_grad_();
    const at::Tensor x = distribute_tensor(numbers({2, 4}), mesh, Placements{Replicate()});
    for (bool grad : {false, true, false, true}) {
      c10::AutoGradMode mode(grad);
      const at::Tensor y = at::mm(x, w);
      EXPECT_EQ(y.requires_grad(), grad);
      if (grad) y.sum().backward();
    }
    expect_value(w.grad(), 2 * at::mm(numbers({2, 4}).t(), at::ones({2, 3})));
  });
}

// Its key has their addresses, which would be given to other specs.
TEST(DispatchTest, ACacheEntryOwnsTheSpecsOfItsKey) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const auto context = MeshContext::of(mesh);
    c10::weak_intrusive_ptr<const Spec> moved = [&] {
      const at::Tensor x = distribute_tensor(numbers({6, 4}), mesh, Placements{Shard(0)});
      at::linalg_det(at::mm(x.t(), x));  // moves
      const at::Tensor y = redistribute(x, {Shard(1)});
      x + y;  // one of them moves
      return c10::weak_intrusive_ptr<const Spec>(meta_of(y).spec);
    }();
    // More than are kept: those that nobody uses are swept.
    for (int64_t n = 0; n < 20000; ++n) zeros({n % 10000, 1 + n / 10000}, mesh, {Replicate()});
    EXPECT_FALSE(moved.expired());
    EXPECT_LT(context->num_specs(), 20000u);
    context->decisions.cache.clear();
    context->decisions.plans.clear();
    for (int64_t n = 0; n < 20000; ++n) zeros({n % 10000, 3 + n / 10000}, mesh, {Replicate()});
    EXPECT_TRUE(moved.expired());
  });
}

// Where the parts do not lie as the view needs, its local tensor is a copy; an empty part can always
// be viewed. Nobody communicates more or less for it: the ranks with copies refuse, and say so.
TEST(DispatchTest, AViewThatIsACopyOnSomeRanksFailsOnAll) {
  struct Case {
    std::vector<MeshDim> dims;
    int64_t rows;
  };
  const Case cases[] = {{{{"x", 2}}, 1}, {{{"x", 3}}, 2}, {{{"x", 2}, {"y", 2}}, 3}};
  for (const Case& c : cases) {
    const Placements rows(c.dims.size(), Shard(0));
    const at::Tensor whole = numbers({c.rows, 2, 3});
    // Moved, it lies in the order of its dimensions; turned back, the parts lie as nobody would think.
    const auto lying_otherwise = [&](const MeshPtr& mesh) {
      const at::Tensor x = distribute_tensor(whole, mesh, Placements(c.dims.size()));
      return redistribute(x.transpose(1, 2), rows).transpose(1, 2);
    };
    on_mesh(c.dims, [&](const MeshPtr& mesh) {
      const at::Tensor x = lying_otherwise(mesh);
      expect_value(x.view({c.rows, 6}) * 2, whole.view({c.rows, 6}) * 2);
    });
    const std::function<void(const at::Tensor&)> kUses[] = {
        [](const at::Tensor& x) { x.view({x.size(0), 6}).mul_(2); },
        [](const at::Tensor& x) {
          const at::Tensor view = x.view({x.size(0), 6});
          at::Tensor(x).mul_(2);
          full_tensor(view);
        },
        [](const at::Tensor& x) {  // of a part that was brought here
          const at::Tensor view = x.view({x.size(0), 6}).select(0, 0);
          at::Tensor(x).mul_(2);
          full_tensor(view);
        },
        [](const at::Tensor& x) { x.view({x.size(0), 6}).select(0, 0).mul_(2); },
        [](const at::Tensor& x) {
          at::Tensor view = x.view({x.size(0), 6});
          view.as_strided_({x.size(0) * 6}, {1});
          view.mul_(2);
        },
    };
    for (const auto& use : kUses) {
      for (const absl::Status& status :
           try_on_each(c.dims, Carrier::kInproc, [&](const MeshPtr& mesh) {
             const at::Tensor x = lying_otherwise(mesh);
             use(x);
             full_tensor(x);
           })) {
        EXPECT_THAT(std::string(status.message()),
                    AnyOf(HasSubstr("reads a copy"), HasSubstr("that is a copy")))
            << c.rows;
      }
    }
  }
}

// --- tensors that are written, but not returned --------------------------------------------------

TEST(DispatchTest, RunningStatisticsAreWrittenAndNotReturned) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const c10::AutoGradMode no_grad(false);
    const at::Tensor x = numbers({6, 4}), mean = numbers({4}), var = numbers({4}) * 2;
    for (const bool training : {false, true}) {
      at::Tensor want_mean = mean.clone(), want_var = var.clone();
      const auto want =
          at::_native_batch_norm_legit(x, mean, {}, want_mean, want_var, training, 0.1, 1e-5);
      at::Tensor running_mean = distribute_tensor(mean, mesh, Placements{Replicate()});
      at::Tensor running_var = distribute_tensor(var, mesh, Placements{Shard(0)});
      const auto got =
          at::_native_batch_norm_legit(distribute_tensor(x, mesh, Placements{Shard(0)}),
                                       distribute_tensor(mean, mesh, Placements{Replicate()}), {},
                                       running_mean, running_var, training, 0.1, 1e-5);
      expect_value(std::get<0>(got), std::get<0>(want));
      expect_value(running_mean, want_mean);
      expect_value(running_var, want_var);
      EXPECT_EQ(layout_of(running_mean), Layout({Replicate()}));
      EXPECT_EQ(layout_of(running_var), Layout({Shard(0)}));
    }
  });
}

void note_rows(const at::Tensor& self, at::Tensor& note) {
  note.add_(self);
}

TORCH_LIBRARY(dispatch_test, m) {
  m.def("note_rows(Tensor self, Tensor(a!) note) -> ()");
}
TORCH_LIBRARY_IMPL(dispatch_test, CPU, m) {
  m.impl("note_rows", &note_rows);
}

TEST(DispatchTest, AnOperatorMayReturnNothing) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const c10::AutoGradMode no_grad(false);
    const auto rows = [](const OpCall& /*call*/, Strategies& out) {
      out.add({{"self", Shard(0)}, {"note", Shard(0)}}, {});
    };
    add_rule(mesh, "dispatch_test::note_rows", sharded(rows).shapes([](OpCall& /*call*/) {}));
    const at::Tensor whole = numbers({5, 3});
    const auto note_rows_of = c10::Dispatcher::singleton()
                                  .findSchemaOrThrow("dispatch_test::note_rows", "")
                                  .typed<void(const at::Tensor&, at::Tensor&)>();
    for (const Placement& from : {Placement(Shard(0)), Placement(Replicate())}) {
      at::Tensor note = zeros({5, 3}, mesh, {Shard(0)});
      note_rows_of.call(distribute_tensor(whole, mesh, Placements{from}), note);
      expect_value(note, whole);
      EXPECT_EQ(layout_of(note), Layout({Shard(0)}));
    }
  });
}

}  // namespace
}  // namespace shardweave
