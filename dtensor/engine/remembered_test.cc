// What is remembered of a tensor is what an operator would be given without: every write ends it,
// and no other tensor gets it.

#include "shardweave/dtensor/engine/remembered.h"

#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "c10/core/GradMode.h"
#include "c10/core/InferenceMode.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/observe/comm_trace.h"
#include "shardweave/dtensor/observe/explain.h"
#include "shardweave/dtensor/testing/expect_comms.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "torch/nn/modules/linear.h"
#include "torch/optim/sgd.h"

namespace shardweave {
namespace {

using at::Tensor;
using ::testing::ElementsAre;
using testing::on_mesh;
using testing::scattered;

Tensor numbers(at::IntArrayRef sizes) {
  int64_t n = 1;
  for (int64_t s : sizes) n *= s;
  return at::arange(n, at::kDouble).sub_(n / 3).view(sizes);
}

void expect_value(const Tensor& got, const Tensor& want) {
  EXPECT_TRUE(at::allclose(full_tensor(got), want)) << full_tensor(got) << "\nwanted\n" << want;
}

TEST(RememberedTest, APartialIsReducedOnce) {
  on_mesh({{"x", 3}}, [](const MeshPtr& mesh) {
    const Tensor whole = numbers({4, 5});
    {
      const Tensor x = scattered(whole, mesh, {Partial()});
      const CommTrace trace(mesh);
      expect_value(x.relu(), whole.relu());
      const size_t first = trace.events().size();
      EXPECT_EQ(first, 1u);
      expect_value(x.abs(), whole.abs());
      expect_value(x * x, whole * whole);
      expect_value(x.t().exp(), whole.t().exp());                  // a view that permutes
      expect_value(x.view({20}).sign(), whole.view({20}).sign());  // and one of another shape
      expect_value(x.detach().neg().abs(), whole.abs());
      EXPECT_EQ(layout_of(x), Layout({Partial()}));  // as it was
      EXPECT_EQ(trace.events().size(), first);
      EXPECT_EQ(dispatch_counters(mesh).remembered_bytes, 4 * 5 * 8);
    }
    EXPECT_EQ(dispatch_counters(mesh).remembered_bytes, 0);  // it went with the tensor
  });
}

// A convolution over a sequence takes [batch, features, 1, length] of [batch, length, features].
TEST(RememberedTest, AViewWithADimensionMoreIsReducedForAll) {
  on_mesh({{"x", 3}}, [](const MeshPtr& mesh) {
    for (const std::vector<int64_t>& sizes :
         {std::vector<int64_t>{2, 5, 3}, {1, 5, 3}, {2, 1, 1}}) {
      const Tensor whole = numbers(sizes);
      const Tensor x = scattered(whole, mesh, {Partial()});
      const CommTrace trace(mesh);
      expect_value(x.transpose(1, 2).unsqueeze(2).relu(),
                   whole.transpose(1, 2).unsqueeze(2).relu());
      EXPECT_EQ(trace.events().size(), 1u);
      expect_value(x.abs(), whole.abs());
      expect_value(x.transpose(0, 2).sign(), whole.transpose(0, 2).sign());
      expect_value(x.unsqueeze(0).transpose(0, 3).exp(), whole.unsqueeze(0).transpose(0, 3).exp());
      EXPECT_EQ(trace.events().size(), 1u);
    }
  });
}

// One that is cut is a dimension like others.
TEST(RememberedTest, ADimensionOfOneElementThatIsCut) {
  on_mesh({{"x", 2}, {"y", 2}}, [](const MeshPtr& mesh) {
    const Tensor whole = numbers({1, 3, 4});
    const Tensor x = scattered(whole, mesh, {Shard(0), Partial()});
    expect_value(x.transpose(1, 2).exp(), whole.transpose(1, 2).exp());
    expect_value(x.select(0, 0).abs(), whole.select(0, 0).abs());
    expect_value(x.unsqueeze(1).transpose(0, 2).abs(), whole.unsqueeze(1).transpose(0, 2).abs());
  });
}

// A sum that one operator wanted in parts lies in parts for the next: nobody makes it whole for them, and
// each rank goes on with its part.
TEST(RememberedTest, ASumInPartsIsUsedInParts) {
  for (const Placement& parts : {Shard(0), StridedShard(0, 2), RaggedShard(0, {1, 7})}) {
    on_mesh({{"sp", 2}}, [&](const MeshPtr& mesh) {
      const Tensor a = numbers({8, 6}), b = numbers({6, 5}), x = numbers({8, 5}), w = numbers({5});
      const Tensor plain = a.mm(b);
      const Tensor sum = distribute_tensor(a, mesh, Placements{Shard(1)})
                             .mm(distribute_tensor(b, mesh, Placements{Shard(0)}));
      ASSERT_TRUE(layout_of(sum)[0].is_partial());
      const Tensor in_parts = distribute_tensor(x, mesh, Placements{parts});
      const Tensor whole = distribute_tensor(w, mesh, Placements{Replicate()});
      const Tensor table = distribute_tensor(b.t().contiguous(), mesh, Placements{Replicate()});
      const CommTrace trace(mesh);
      const std::pair<Tensor, Tensor> results[] = {{sum * in_parts, plain * x},
                                                   {sum * whole, plain * w},
                                                   {sum * 2, plain * 2},
                                                   {sum.mm(table), plain.mm(b.t())},
                                                   {sum.softmax(-1), plain.softmax(-1)}};
      EXPECT_COMMS(trace, {{"reduce_scatter", 1}});
      for (const auto& [ours, want] : results) {
        EXPECT_EQ(layout_of(ours)[0], parts);
        expect_value(ours, want);
      }
    });
  }
}

// [64, 50], a sum that a product with what is cut by rows has reduced to parts.
struct SumInParts {
  explicit SumInParts(const MeshPtr& mesh)
      : plain(numbers({64, 50})), sum(scattered(plain, mesh, {Partial()})) {
    sum.mul(distribute_tensor(numbers({64, 50}), mesh, Placements{Shard(0)}));
  }
  Tensor plain, sum;
};

TEST(RememberedTest, ASumInPartsWaitsForOtherSums) {
  on_mesh({{"sp", 2}}, [](const MeshPtr& mesh) {
    const SumInParts s(mesh);
    const Tensor p = scattered(s.plain, mesh, {Partial()});
    const CommTrace trace(mesh);
    const Tensor total = ((s.sum + p) + p) + p;
    EXPECT_THAT(trace.events(), ::testing::IsEmpty());
    EXPECT_TRUE(layout_of(total)[0].is_partial());
    expect_value(total, s.plain * 4);
  });
}

TEST(RememberedTest, ASumInPartsIsMadeWholeOnce) {
  on_mesh({{"sp", 2}}, [](const MeshPtr& mesh) {
    const SumInParts s(mesh);
    const Tensor view = s.sum.t();
    const CommTrace trace(mesh);
    for (int i = 0; i < 3; ++i) {
      expect_value(std::get<0>(view.cummax(1)), std::get<0>(s.plain.t().cummax(1)));
      expect_value(std::get<0>(s.sum.cummax(0)), std::get<0>(s.plain.cummax(0)));
    }
    EXPECT_COMMS(trace, {{"all_gather", 1}});
  });
}

TEST(RememberedTest, AViewOfASumInPartsIsAView) {
  on_mesh({{"sp", 2}}, [](const MeshPtr& mesh) {
    const SumInParts s(mesh);
    const StrictScope strict(mesh);
    s.sum.view({3200}).mul_(2);
    s.sum.t().mul_(3);
    EXPECT_TRUE(layout_of(s.sum)[0].is_partial());
    EXPECT_TRUE(at::allclose(full_tensor(s.sum), s.plain * 6));
  });
}

TEST(RememberedTest, WhatAPermutedViewRemembersLeavesViewsOfTheOtherAlone) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const Tensor whole = numbers({4, 6});
    const auto with_a_form = [&] {
      Tensor x = scattered(whole, mesh, {Partial()});
      expect_value(x.t().exp(), whole.t().exp());
      return x;
    };
    Tensor x = with_a_form();
    x.view({24}).mul_(2);
    expect_value(x, whole * 2);
    x = with_a_form();
    const Tensor y = x.view({24});
    x.mul_(2);
    expect_value(y.exp(), (whole * 2).view({24}).exp());
    x = with_a_form();
    expect_value(x.view(at::kLong), whole.view(at::kLong));
    x = with_a_form();
    Tensor z = x.exp();  // as x lies
    EXPECT_TRUE(to_local(z).is_contiguous());
    z.view({24}).mul_(2);
    expect_value(z, whole.exp() * 2);
  });
}

// What sends nothing, a rank may do alone: the others find what it finds.
TEST(RememberedTest, ARankAloneMayLookAtAView) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const Tensor whole = numbers({9, 4});
    const Tensor x = scattered(whole, mesh, {Partial()});
    const CommTrace trace(mesh);
    for (int i = 0; i < 8; ++i) {
      const Tensor row = x.narrow(0, i, 1), view = row.t();
      row.exp();
      if (i == 1 && mesh->rank().value == 0) at::zeros_like(view);
      if (i == 2 && mesh->rank().value == 0) explain("aten::exp", {view});
    }
    expect_value(x.narrow(0, 0, 1).abs(), whole.narrow(0, 0, 1).abs());
    EXPECT_EQ(trace.events().size(), 8u);
  });
}

// Each writes to a tensor, or to one that shares its memory, and does the same to `whole`.
TEST(RememberedTest, AWriteEndsIt) {
  using Write = void (*)(const Tensor& x, const Tensor& whole);
  const std::pair<const char*, Write> writes[] = {
      {"mul_", [](const Tensor& x, const Tensor& whole) { x.mul_(2), whole.mul_(2); }},
      {"zero_", [](const Tensor& x, const Tensor& whole) { x.zero_(), whole.zero_(); }},
      {"a view", [](const Tensor& x, const Tensor& whole) { x.t().mul_(3), whole.t().mul_(3); }},
      {"a row", [](const Tensor& x, const Tensor& whole) { x[1].zero_(), whole[1].zero_(); }},
      {"by itself", [](const Tensor& x, const Tensor& whole) { x.mul_(x), whole.mul_(whole); }},
      {"by itself, out=",
       [](const Tensor& x, const Tensor& whole) {
         Tensor xs = x, ws = whole;
         at::mul_out(xs, x, x), at::mul_out(ws, whole, whole);
       }},
      {"detach()", [](const Tensor& x, const Tensor& whole) { x.detach().mul_(2), whole.mul_(2); }},
      {"a shallow copy",
       [](const Tensor& x, const Tensor& whole) { x.variable_data().mul_(2), whole.mul_(2); }},
      {"the local part",
       [](const Tensor& x, const Tensor& whole) { to_local(x).mul_(2), whole.mul_(2); }},
      {"out=",
       [](const Tensor& x, const Tensor& whole) {
         Tensor xs = x, ws = whole;
         const Tensor a = scattered(whole + 1, mesh_of(x), {Partial()});
         at::add_out(xs, a, a), at::add_out(ws, whole + 1, whole + 1);
       }},
      {"set_data",
       [](const Tensor& x, const Tensor& whole) {
         x.set_data(scattered(whole - 7, mesh_of(x), {Partial()})), whole.sub_(7);
       }},
      {"copy_",
       [](const Tensor& x, const Tensor& whole) {
         x.copy_(scattered(whole - 7, mesh_of(x), {Partial()})), whole.sub_(7);
       }},
  };
  for (const auto& [name, write] : writes) {
    SCOPED_TRACE(name);
    const bool other_memory = std::string_view(name) == "set_data";
    on_mesh({{"x", 2}}, [write = write, other_memory](const MeshPtr& mesh) {
      const Tensor whole = numbers({4, 5});
      const Tensor x = scattered(whole, mesh, {Partial()});
      const Tensor other = x.t();
      expect_value(x.relu(), whole.relu());
      expect_value(other.sigmoid(), whole.t().sigmoid());
      write(x, whole);
      expect_value(x.relu(), whole.relu());
      expect_value(x.abs(), whole.abs());
      if (!other_memory) expect_value(other.relu(), whole.t().relu());
    });
  }
}

// Two views of one memory that look alike are two tensors.
TEST(RememberedTest, OtherPartsOfTheMemoryAreOthers) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const Tensor whole = numbers({6, 4});
    const Tensor x = scattered(whole, mesh, {Partial()});
    for (int64_t row : {0, 3, 1}) {
      expect_value(x.narrow(0, row, 3).relu(), whole.narrow(0, row, 3).relu());
      expect_value(x.select(0, row).abs(), whole.select(0, row).abs());
    }
    expect_value(x.narrow(0, 0, 4).relu(), whole.narrow(0, 0, 4).relu());
    expect_value(x.narrow(0, 0, 4).t().relu(), whole.narrow(0, 0, 4).t().relu());
    expect_value(x.narrow(1, 0, 2).relu(), whole.narrow(1, 0, 2).relu());
    expect_value(x.narrow(0, 0, 1).expand({6, 4}).relu(),
                 whole.narrow(0, 0, 1).expand({6, 4}).relu());
    expect_value(x.view({4, 6}).relu(), whole.view({4, 6}).relu());
    expect_value(x.view({4, 6}).t().relu(), whole.view({4, 6}).t().relu());
    expect_value(x.as_strided({4, 6}, {1, 4}).relu(), whole.as_strided({4, 6}, {1, 4}).relu());
    expect_value(x.relu(), whole.relu());
  });
}

// One tensor in two layouts, and two tensors of which one is remembered in the other's layout: what
// was decided for one call is not for the other.
TEST(RememberedTest, TheKeySaysWhichTensorIsRememberedHow) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const Tensor whole = numbers({4, 4});
    const auto made = [&](const Placement& p) { return scattered(whole, mesh, {p}) * 1.0; };
    const Tensor a = made(Partial()), s0 = made(Shard(0)), s1 = made(Shard(1));
    expect_value(a + s0, whole + whole);
    expect_value(a + s1, whole + whole);
    const Tensor k = made(Shard(0));
    expect_value(k.cumsum(0), whole.cumsum(0));
    expect_value(made(Partial()) + k, whole + whole);
    expect_value(at::mm(k, k), at::mm(whole, whole));
    expect_value(at::mm(a, a), at::mm(whole, whole));
  });
}

// Parts of unequal size, of which some are empty: all ranks find, or none.
TEST(RememberedTest, RanksWithoutAPartDoAsTheOthersDo) {
  on_mesh({{"x", 3}}, [](const MeshPtr& mesh) {
    for (const std::vector<int64_t>& sizes :
         {std::vector<int64_t>{1, 4, 6}, {2, 3, 4}, {3, 3, 3}}) {
      const Tensor whole = numbers(sizes);
      const Tensor turned = whole.transpose(1, 2);
      const Tensor x =
          redistribute(distribute_tensor(whole, mesh, Placements{Replicate()}).transpose(1, 2),
                       {Shard(0)})
              .transpose(1, 2);
      expect_value(x.cumsum(0), whole.cumsum(0));
      const Tensor v = x.reshape({sizes[0], -1}).reshape(sizes);
      expect_value(v.cumsum(0), whole.cumsum(0));
      expect_value(x.transpose(0, 2).cumsum(2), whole.transpose(0, 2).cumsum(2));
    }
  });
}

// A view that some ranks have to copy: what it has been brought to is found by what it is of, and
// what is written to local parts ends it on all of them.
TEST(RememberedTest, CopiesOnSomeRanksEndWithTheViewsOfOthers) {
  on_mesh({{"x", 3}, {"y", 2}}, [](const MeshPtr& mesh) {
    for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{4, 4, 6}, {2, 3, 4}}) {
      const Tensor whole = numbers(sizes);
      const Tensor turned = scattered(whole, mesh, {Replicate(), Partial()}).transpose(1, 2);
      const Tensor x = redistribute(turned, {Shard(0), Partial()}).transpose(1, 2);
      const Tensor v = x.view({sizes[0], -1});
      EXPECT_EQ(to_local(v).is_alias_of(to_local(x)), to_local(x).numel() == 0);
      expect_value(v.abs(), whole.view({sizes[0], -1}).abs());
      to_local(x).mul_(2), whole.mul_(2);
      expect_value(x.abs(), whole.abs());
    }
  });
}

// More forms of one tensor than are remembered: one input's new form ends no other input's.
TEST(RememberedTest, TheFormOfOneInputOutlastsThatOfAnother) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const Tensor whole = numbers({20, 4});
    for (int first = 0; first < 9; ++first) {
      const Tensor x = scattered(whole, mesh, {Partial()});
      for (int i = first; i < first + 8; ++i) x.select(0, i).exp();
      expect_value(at::atan2(x.select(0, 19), x.select(0, first)),
                   at::atan2(whole.select(0, 19), whole.select(0, first)));
    }
  });
}

// A view that was brought here, of what has been written in its parts since, is no other's.
TEST(RememberedTest, WhatWasBroughtForAViewIsItsOwn) {
  on_mesh({{"x", 3}, {"y", 2}}, [](const MeshPtr& mesh) {
    const Tensor whole = numbers({4, 5});
    const Tensor x = scattered(whole, mesh, {Shard(0), Partial()});
    const Tensor before = x.select(0, 2);
    to_local(x).mul_(2), whole.mul_(2);
    const Tensor after = x.select(0, 2);
    before.abs();
    expect_value(after.abs(), whole[2].abs());
  });
}

TEST(RememberedTest, ChunksThatAreWrittenAreNotTheTensors) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const Tensor whole = numbers({4, 6});
    const Tensor x = distribute_tensor(whole, mesh, Placements{Shard(1)});
    x.unsafe_chunk(2, 1)[0].zero_();
    expect_value(x.cumsum(1), whole.cumsum(1));
    x.unsafe_chunk(2, 1)[0].zero_();
    expect_value(x.cumsum(1), whole.cumsum(1));
  });
}

TEST(RememberedTest, SlicesDoNotPileUp) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    const Tensor w = distribute_tensor(numbers({8, 8}), mesh, Placements{Shard(0)});
    w.requires_grad_();
    const Tensor x = distribute_tensor(numbers({8, 4}), mesh, Placements{Shard(0)});
    for (int i = 0; i < 50; ++i) x.mm(w.narrow(1, 0, 4).t());
    EXPECT_LE(dispatch_counters(mesh).remembered_bytes, 8 * 8 * 4 * 8);
  });
}

TEST(RememberedTest, LayoutsOfSeveralMeshDimensions) {
  on_mesh({{"dp", 2}, {"tp", 2}}, [](const MeshPtr& mesh) {
    for (const Placements& placements : testing::all_layouts(2, 2, /*partial=*/true)) {
      SCOPED_TRACE(to_string(placements));
      for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{4, 6}, {3, 5}, {1, 3}}) {
        const Tensor whole = numbers(sizes);
        const Tensor x = scattered(whole, mesh, placements);
        for (int i = 0; i < 2; ++i) {
          expect_value(x.relu(), whole.relu());
          expect_value(x.cumsum(0), whole.cumsum(0));
          expect_value(x.t().cumsum(0), whole.t().cumsum(0));
          expect_value(x.cumsum(1), whole.cumsum(1));
          expect_value(x.reshape({-1}).cumsum(0), whole.reshape({-1}).cumsum(0));
          x.add_(1), whole.add_(1);
        }
      }
    }
  });
}

// A weight is gathered once for forward and backward; whoever writes it begins anew.
TEST(RememberedTest, AWeightIsGatheredOnceAStep) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    const Tensor w0 = numbers({6, 4}), x0 = numbers({8, 4});
    torch::nn::Linear plain(torch::nn::LinearOptions(4, 6).bias(false));
    torch::nn::Linear linear(torch::nn::LinearOptions(4, 6).bias(false));
    for (auto* l : {&plain, &linear}) {
      (*l)->to(at::kDouble);
      (*l)->weight.set_data(w0.clone());
    }
    distribute_module(*linear, mesh, {{"weight", {{"dp", Shard(0)}}}});
    torch::optim::SGD ours(linear->parameters(), 0.01), theirs(plain->parameters(), 0.01);
    for (int step = 0; step < 3; ++step) {
      // Something before the layer wants a gradient, so that backward needs the weight.
      const Tensor x = distribute_tensor(x0, mesh, Placements{Shard(0)});
      const Tensor p = distribute_tensor(at::ones({4}, at::kDouble), mesh, Placements{Replicate()})
                           .requires_grad_();
      const Tensor q = at::ones({4}, at::kDouble).requires_grad_();
      {
        const CommTrace trace(mesh);
        linear->forward(x + p).square().sum().backward();
        EXPECT_COMMS(trace, {{"all_gather", 1}});
      }
      plain->forward(x0 + q).square().sum().backward();
      finish_grad_sync(*linear);
      EXPECT_TRUE(at::allclose(full_tensor(p.grad()), q.grad())) << step;
      EXPECT_TRUE(at::allclose(full_tensor(linear->weight.grad()), plain->weight.grad())) << step;
      ours.step(), theirs.step();
      EXPECT_EQ(dispatch_counters(mesh).remembered_bytes, 0) << "after the step";
      ours.zero_grad(), theirs.zero_grad();
    }
    // Nobody will ask again: a weight lives long.
    const c10::AutoGradMode no_grad(false);
    linear->forward(distribute_tensor(x0, mesh, Placements{Shard(0)}));
    EXPECT_EQ(dispatch_counters(mesh).remembered_bytes, 0);
  });
}

// Collectives of two steps of a layer with a weight of so many rows, of which gradients and the
// weight are held against one device's.
std::vector<std::string> sent_by_layer(const std::vector<MeshDim>& dims, int64_t rows,
                                       const Placements& placements) {
  std::vector<std::string> sent;
  on_mesh(dims, [&](const MeshPtr& mesh) {
    const Tensor w0 = at::sin(numbers({rows, 4})), x0 = at::cos(numbers({12, 4}));
    Tensor plain = w0.clone().requires_grad_();
    Tensor w = distribute_tensor(w0, mesh, placements).requires_grad_();
    Placements whole(placements.size()), batch = whole;
    batch[0] = Shard(0);
    torch::optim::SGD ours({w}, 0.01), theirs({plain}, 0.01);
    for (int step = 0; step < 2; ++step) {
      const Tensor x = distribute_tensor(x0, mesh, batch);
      // Something before the layer wants a gradient, so that backward needs the weight.
      const Tensor q = at::ones({4}, at::kDouble).requires_grad_();
      const Tensor p = distribute_tensor(q.detach(), mesh, whole).requires_grad_();
      at::linear(x0 + q, plain).square().sum().backward();
      {
        const CommTrace trace(mesh);
        at::linear(x + p, w).square().sum().backward();
        if (mesh->coordinate() == Coordinate(dims.size(), 0)) {
          for (const CommEvent& event : trace.events()) sent.push_back(event.collective);
        }
      }
      expect_value(p.grad(), q.grad());
      expect_value(w.grad(), plain.grad());
      ours.step(), theirs.step();
      expect_value(w.detach(), plain.detach());
      ours.zero_grad(), theirs.zero_grad();
      EXPECT_EQ(dispatch_counters(mesh).remembered_bytes, 0) << "after the step";
    }
  });
  return sent;
}

// Rows that ranks cannot share evenly, and ranks that have none.
TEST(RememberedTest, AnUnevenWeightIsGatheredOnceAStep) {
  for (const int64_t ranks : {2, 3, 4}) {
    for (const int64_t rows : {7, 5, 1}) {
      SCOPED_TRACE(::testing::PrintToString(std::pair(ranks, rows)));
      EXPECT_THAT(sent_by_layer({{"dp", ranks}}, rows, {Shard(0)}),
                  ElementsAre("all_gather", "all_gather"));
    }
    std::vector<int64_t> parts(ranks, 0);
    parts.back() = 7;
    EXPECT_THAT(sent_by_layer({{"dp", ranks}}, 7, {RaggedShard(0, parts)}),
                ElementsAre("all_gather", "all_gather"));
  }
  const std::vector<MeshDim> two = {{"dp", 2}, {"tp", 2}};
  for (const Placements& placements :
       {Placements{Shard(0), Shard(0)}, {Shard(0), Shard(1)}, {Shard(1), Shard(0)}}) {
    SCOPED_TRACE(to_string(placements));
    const std::vector<std::string> sent = sent_by_layer(two, 12, placements);
    for (const int64_t rows : {7, 5}) EXPECT_EQ(sent_by_layer(two, rows, placements), sent);
  }
}

// A vocabulary that ranks cannot share evenly: the embedding, the head and both of their gradients.
TEST(RememberedTest, ATiedTableIsGatheredOnceAStep) {
  for (const int64_t ranks : {2, 3, 4}) {
    on_mesh({{"dp", ranks}}, [](const MeshPtr& mesh) {
      for (const int64_t vocab : {12, 11, 5}) {
        SCOPED_TRACE(vocab);
        const Tensor table0 = at::sin(numbers({vocab, 4})).requires_grad_();
        const Tensor table = distribute_tensor(table0.detach(), mesh, Placements{Shard(0)});
        table.requires_grad_();
        const Tensor tokens0 = at::arange(24).remainder(vocab).view({12, 2});
        const Tensor tokens = distribute_tensor(tokens0, mesh, Placements{Shard(0)});
        const auto loss_of = [](const Tensor& of, const Tensor& weight) {
          return at::linear(at::embedding(weight, of).tanh(), weight).log_softmax(-1).sum();
        };
        loss_of(tokens0, table0).backward();
        {
          const CommTrace trace(mesh);
          loss_of(tokens, table).backward();
          EXPECT_COMMS(trace, {{"all_gather", 1}});
        }
        expect_value(table.grad(), table0.grad());
      }
    });
  }
}

// What one rank has is a copy where another has a view, or nothing: all of them hear of a write.
TEST(RememberedTest, AWriteToAnUnevenWeightEndsItOnAllRanks) {
  using Write = void (*)(const Tensor& w);
  const std::pair<const char*, Write> writes[] = {
      {"mul_", [](const Tensor& w) { w.mul_(2); }},
      {"a view", [](const Tensor& w) { w.t().mul_(3); }},
      {"a view of a view", [](const Tensor& w) { w.t().unsqueeze(0).transpose(1, 2).mul_(3); }},
      {"a row of one rank", [](const Tensor& w) { w[0].zero_(); }},
      {"the last row", [](const Tensor& w) { w.narrow(0, w.size(0) - 1, 1).zero_(); }},
      {"a column", [](const Tensor& w) { w.select(1, 2).mul_(5); }},
      {"a shallow copy", [](const Tensor& w) { w.variable_data().t().add_(1); }},
      {"the local part",
       [](const Tensor& w) { is_dtensor(w) ? to_local(w).mul_(2) : Tensor(w).mul_(2); }},
      {"the local part of a view",
       [](const Tensor& w) { is_dtensor(w) ? to_local(w.t()).mul_(2) : Tensor(w).mul_(2); }},
  };
  for (const auto& [name, write] : writes) {
    SCOPED_TRACE(name);
    on_mesh({{"dp", 4}}, [write = write](const MeshPtr& mesh) {
      for (const int64_t rows : {7, 5, 1}) {
        const Tensor plain = at::sin(numbers({rows, 4}));
        const Tensor w = distribute_tensor(plain, mesh, Placements{Shard(0)}).requires_grad_();
        const Tensor x0 = at::cos(numbers({12, 4}));
        const Tensor x = distribute_tensor(x0, mesh, Placements{Shard(0)});
        const auto sent = [&](const Tensor& weight) {
          const CommTrace trace(mesh);
          const Tensor y = at::mm(x, weight.t());
          const size_t n = trace.events().size();
          expect_value(y.detach(), at::mm(x0, plain.t()));
          return n;
        };
        EXPECT_EQ(sent(w), 1u);
        EXPECT_EQ(sent(w), 0u);
        {
          const c10::AutoGradMode no_grad(false);
          write(w), write(plain);
        }
        EXPECT_EQ(sent(w), 1u);
        EXPECT_EQ(sent(w.t().t()), 0u);
      }
    });
  }
}

TEST(RememberedTest, OtherPartsOfAnUnevenWeightAreOthers) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    const Tensor plain = at::sin(numbers({7, 6}));
    const Tensor w = distribute_tensor(plain, mesh, Placements{Shard(0)}).requires_grad_();
    const Tensor x0 = at::cos(numbers({8, 8}));
    const Tensor x = distribute_tensor(x0, mesh, Placements{Shard(0)});
    const auto expect_product = [&](const Tensor& ours, const Tensor& theirs) {
      const int64_t n = theirs.size(1);
      expect_value(at::mm(x.narrow(1, 0, n), ours.t()).detach(),
                   at::mm(x0.narrow(1, 0, n), theirs.t()));
    };
    for (int twice = 0; twice < 2; ++twice) {
      for (const int64_t at : {0, 2, 1, 3}) {
        expect_product(w.narrow(1, at, 3), plain.narrow(1, at, 3));
        expect_product(w.narrow(0, at, 3), plain.narrow(0, at, 3));
        expect_product(w.narrow(0, at, 3).t(), plain.narrow(0, at, 3).t());
        expect_product(w.narrow(0, at, 3).narrow(1, at, 3),
                       plain.narrow(0, at, 3).narrow(1, at, 3));
      }
      expect_product(w.as_strided({7, 6}, {1, 7}), plain.as_strided({7, 6}, {1, 7}));
      expect_product(w.as_strided({6, 6}, {6, 1}, 6), plain.as_strided({6, 6}, {6, 1}, 6));
      expect_product(w.as_strided({6, 6}, {6, 1}, 0), plain.as_strided({6, 6}, {6, 1}, 0));
      expect_product(w.detach().narrow(1, 2, 3).t_(), plain.narrow(1, 2, 3).t());
      expect_product(w, plain);
      expect_product(w.t(), plain.t());
      // Views that one rank alone takes make no difference.
      if (mesh->coordinate()[0] == 0) at::_neg_view(w).t();
    }
  });
}

TEST(RememberedTest, WhatMovesToOtherMemoryHasNothingInCommonWithItsViews) {
  on_mesh({{"dp", 3}}, [](const MeshPtr& mesh) {
    const Tensor plain = at::sin(numbers({7, 4})), x0 = at::cos(numbers({6, 4}));
    const Tensor w = distribute_tensor(plain, mesh, Placements{Shard(0)}).requires_grad_();
    const Tensor x = distribute_tensor(x0, mesh, Placements{Shard(0)});
    const Tensor view = w.t();
    dtensor_internal::DTensorMeta& meta = dtensor_internal::meta_of(w);
    meta.move_to(meta.local().clone());  // as fully_shard() does
    {
      const c10::AutoGradMode no_grad(false);
      w.mul_(2);
    }
    for (int twice = 0; twice < 2; ++twice) {
      expect_value(at::mm(x, view).detach(), at::mm(x0, plain.t()));
      expect_value(at::mm(x, w.t()).detach(), at::mm(x0, plain.t() * 2));
    }
  });
}

// The same memory, seen as something else.
TEST(RememberedTest, OtherValuesOfTheMemoryAreOthers) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const Tensor whole = at::complex(numbers({5, 3}), numbers({5, 3}).neg().add(4));
    const Tensor x = scattered(whole, mesh, {Partial()});
    std::vector<std::pair<Tensor, Tensor>> views;  // before anything is remembered of x
    for (Tensor (*const seen)(const Tensor&) : std::initializer_list<Tensor (*)(const Tensor&)>{
             [](const Tensor& t) { return t.alias(); },
             [](const Tensor& t) { return t.conj(); },
             [](const Tensor& t) { return t.conj().t(); },
             [](const Tensor& t) { return at::_neg_view(t); },
             [](const Tensor& t) { return at::imag(t); },
             [](const Tensor& t) { return at::imag(t.conj()); },
             // Both begin at 6, of complex numbers or of real ones.
             [](const Tensor& t) { return at::view_as_real(t.narrow(0, 2, 2)); },
             [](const Tensor& t) { return at::view_as_real(t).narrow(0, 1, 2); },
         }) {
      views.emplace_back(seen(x), seen(whole));
    }
    for (int twice = 0; twice < 2; ++twice) {
      for (const auto& [ours, theirs] : views) expect_value(ours * ours, theirs * theirs);
      for (const auto& [ours, theirs] : views) expect_value(ours.exp(), theirs.exp());
    }
  });
}

// Query, key and value of the columns that another product has left: each makes rows of them anew
// (a view), and each wants them all, in backward, too.
TEST(RememberedTest, WhatOperatorsHaveCutIsGatheredOnce) {
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    for (const std::vector<int64_t>& rows : {std::vector<int64_t>{40}, {5, 8}, {2, 5, 4}}) {
      for (const bool bias : {false, true}) {
        SCOPED_TRACE(::testing::PrintToString(rows) + (bias ? " with a bias" : ""));
        std::vector<int64_t> sizes = rows;
        sizes.push_back(6);
        const Tensor x0 = at::sin(numbers(sizes));
        // up, q, k, v; biases
        std::vector<Tensor> plain;
        for (int64_t i = 0; i < 8; ++i) {
          const std::vector<int64_t> of = i > 3    ? std::vector<int64_t>{10}
                                          : i == 0 ? std::vector<int64_t>{12, 6}
                                                   : std::vector<int64_t>{10, 12};
          plain.push_back(at::cos(numbers(of) * static_cast<double>(i + 1)).requires_grad_());
        }
        const auto run = [&](const Tensor& x, const std::vector<Tensor>& w) {
          const Tensor n = at::linear(x, w[0]).tanh();
          Tensor y;
          for (int i : {1, 2, 3}) {
            const Tensor z = bias ? at::linear(n, w[i], w[i + 4]) : at::linear(n, w[i]);
            y = y.defined() ? y * z : z;
          }
          return y;
        };
        std::vector<Tensor> ours;
        for (const Tensor& w : plain) {
          ours.push_back(distribute_tensor(w.detach(), mesh, Placements{Shard(0)}));
          ours.back().requires_grad_();
        }
        const Tensor x = distribute_tensor(x0, mesh, Placements{Replicate()});
        const Tensor want = run(x0, plain);
        want.backward(want.detach());
        {
          const CommTrace trace(mesh);
          const Tensor y = run(x, ours);
          EXPECT_COMMS(trace, {testing::all_gather("tp").forward()});
          y.backward(y.detach());
          // Of what the three products owe: the gradient of the columns that they share.
          EXPECT_COMMS(trace, {testing::all_gather("tp").forward(),
                               testing::reduce_scatter("tp").backward()});
          expect_value(y.detach(), want.detach());
        }
        for (size_t i = 0; i < plain.size(); ++i) {
          ASSERT_EQ(ours[i].grad().defined(), plain[i].grad().defined());
          if (plain[i].grad().defined()) expect_value(ours[i].grad(), plain[i].grad());
        }
        EXPECT_EQ(dispatch_counters(mesh).remembered_bytes, 0);
      }
    }
  });
}

TEST(RememberedTest, AWriteEndsWhatAViewOfItRemembers) {
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    const Tensor whole = numbers({2, 3, 4});
    // Cut by an operator.
    const Tensor w = distribute_tensor(at::eye(4, at::kDouble), mesh, Placements{Shard(0)});
    w.requires_grad_();
    const c10::AutoGradMode no_grad(false);
    const Tensor x = distribute_tensor(whole, mesh, Placements{Replicate()}).matmul(w.t());
    ASSERT_EQ(layout_of(x), Layout({Shard(2)}));
    const CommTrace trace(mesh);
    const auto cumulate = [&] {
      return x.view({6, 4}).cumsum(1) + x.view({6, 4}).cumsum(1) +
             x.view({6, 4}).cumsum(1, at::kDouble);
    };
    EXPECT_TRUE(at::equal(to_local(cumulate()), whole.view({6, 4}).cumsum(1) * 3));
    EXPECT_EQ(trace.events().size(), 1u);
    x.mul_(2), whole.mul_(2);
    EXPECT_TRUE(at::equal(to_local(cumulate()), whole.view({6, 4}).cumsum(1) * 3));
    EXPECT_EQ(trace.events().size(), 2u);
    x.view({3, 8}).select(0, 1).zero_(), whole.view({3, 8}).select(0, 1).zero_();
    EXPECT_TRUE(at::equal(to_local(cumulate()), whole.view({6, 4}).cumsum(1) * 3));
    to_local(x).add_(1), whole.add_(1);
    EXPECT_TRUE(at::equal(to_local(cumulate()), whole.view({6, 4}).cumsum(1) * 3));
  });
}

// A table that is cut by its features, and nothing else that is: nobody has cut the batch.
TEST(RememberedTest, AnEmbeddingThatIsCutByItsFeaturesLeavesTheBatchWhole) {
  on_mesh({{"tp", 4}}, [](const MeshPtr& mesh) {
    const Tensor table0 = at::sin(numbers({12, 8})).requires_grad_();
    const Tensor w0 = at::cos(numbers({8, 8})).requires_grad_();
    const Tensor table = distribute_tensor(table0.detach(), mesh, Placements{Shard(1)});
    const Tensor w = distribute_tensor(w0.detach(), mesh, Placements{Replicate()});
    table.requires_grad_(), w.requires_grad_();
    const Tensor tokens0 = at::arange(40).remainder(12).view({8, 5});
    const Tensor tokens = distribute_tensor(tokens0, mesh, Placements{Replicate()});
    const auto run = [](const Tensor& t, const Tensor& of, const Tensor& weight) {
      const Tensor n = at::layer_norm(at::embedding(of, t), {8});
      return at::linear(n, weight).softmax(-1).select(-1, 3).sum();
    };
    const Tensor want = run(tokens0, table0, w0);
    want.backward();
    const CommTrace trace(mesh);
    const Tensor loss = run(tokens, table, w);
    loss.backward();
    EXPECT_COMMS(trace, {testing::all_gather("tp").by("aten::native_layer_norm").forward()});
    expect_value(loss.detach(), want.detach());
    expect_value(table.grad(), table0.grad());
    EXPECT_EQ(layout_of(w.grad()), Layout({Replicate()}));
    expect_value(w.grad(), w0.grad());
  });
}

TEST(RememberedTest, InferenceTensorsHaveNoVersionsAndAreNotRemembered) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const Tensor whole = numbers({4, 5});
    const c10::InferenceMode inference;
    const Tensor x = scattered(whole, mesh, {Partial()});
    expect_value(x.relu(), whole.relu());
    x.mul_(2), whole.mul_(2);
    expect_value(x.relu(), whole.relu());
  });
}

// An operator that writes what was brought has its own.
TEST(RememberedTest, WhatIsWrittenIsNoOneElses) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const Tensor whole = numbers({4, 5});
    const Tensor x = scattered(whole, mesh, {Partial()});
    expect_value(x.relu(), whole.relu());
    x.relu_(), whole.relu_();  // brought, written, brought back
    expect_value(x.exp(), whole.exp());
    Tensor y = x.select(0, 0);
    y.fill_(5), whole.select(0, 0).fill_(5);
    expect_value(x.abs(), whole.abs());
  });
}

// reshape() and contiguous() copy a tensor whose strides do not allow a view.
TEST(RememberedTest, CopiesOfASumThatLieOtherwiseAreReducedOnce) {
  on_mesh({{"x", 3}}, [](const MeshPtr& mesh) {
    const Tensor whole = numbers({4, 5});
    const Tensor x = scattered(whole, mesh, {Partial()});
    const CommTrace trace(mesh);
    EXPECT_EQ(layout_of(x.clone()), Layout({Partial()}));  // one that lies as it did may wait
    EXPECT_EQ(trace.events().size(), 0u);
    expect_value(x.t().reshape({20}).relu(), whole.t().reshape({20}).relu());
    EXPECT_EQ(trace.events().size(), 1u);
    expect_value(x.t().reshape({2, 10}).relu(), whole.t().reshape({2, 10}).relu());
    expect_value(x.t().contiguous().abs(), whole.t().abs());
    EXPECT_EQ(trace.events().size(), 1u);
    x.mul_(2);
    expect_value(x.t().reshape({20}), whole.t().reshape({20}) * 2);
    EXPECT_EQ(trace.events().size(), 2u);
  });
}

// A .grad is written to, and what was remembered when it was made is what it was.
TEST(RememberedTest, TheFormOfAGradientIsNoGradOfAParameter) {
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    const Tensor w0 = at::cos(numbers({5, 6}));
    const Tensor w = distribute_tensor(w0, mesh, Placements{Shard(1)});
    const Tensor x = scattered(numbers({4, 5}), mesh, {Partial()});
    x.requires_grad_();
    const Tensor ones = at::ones({4, 6}, at::kDouble);
    const Tensor want = ones.mm(w0.t());
    Tensor held;  // the gradient with which it is remembered
    const Tensor whole = redistribute(x, {Replicate()});
    whole.register_hook([&](const Tensor& grad) { held = grad; });
    const Tensor grad = distribute_tensor(ones, mesh, Placements{Shard(1)});
    whole.mm(w).backward(grad);
    expect_value(x.grad(), want);
    const c10::AutoGradMode no_grad(false);
    x.grad().zero_();
    EXPECT_EQ(layout_of(held), Layout({Partial()}));
    const CommTrace trace(mesh);
    const Tensor again = held.abs();
    EXPECT_EQ(trace.events().size(), 0u);
    expect_value(again, want.abs());
  });
}

// The gradient that comes to a stream of residuals is a sum over ranks where nothing but products with weights that
// are cut has its values. It is reduced once, and stays so: each layer adds what it has reduced itself.
TEST(RememberedTest, AStreamOfResidualsIsReducedOnceALayer) {
  constexpr int kLayers = 3;
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    const Tensor up0 = at::cos(numbers({5, 6})), down0 = at::sin(numbers({6, 5}));
    const auto run = [](Tensor x, const Tensor& up, const Tensor& down, const auto& whole) {
      for (int i = 0; i < kLayers; ++i) {
        x = x + whole(at::layer_norm(x, {5}).mm(up).tanh().mm(down));
      }
      return x.mm(up);
    };
    const Tensor x0 = at::sin(numbers({4, 5})).requires_grad_();
    const Tensor want = run(x0, up0, down0, [](const Tensor& sum) { return sum; });
    want.sum().backward();
    const Tensor up = distribute_tensor(up0, mesh, Placements{Shard(1)}).requires_grad_();
    const Tensor down = distribute_tensor(down0, mesh, Placements{Shard(0)}).requires_grad_();
    const Tensor x = distribute_tensor(x0.detach(), mesh, Placements{Replicate()}).requires_grad_();
    const Tensor y =
        run(x, up, down, [](const Tensor& sum) { return redistribute(sum, {Replicate()}); });
    expect_value(y.detach(), want.detach());
    const CommTrace trace(mesh);
    y.sum().backward();
    EXPECT_EQ(trace.events().size(), kLayers + 1u) << trace.to_string();
    expect_value(x.grad(), x0.grad());
  });
}

}  // namespace
}  // namespace shardweave
