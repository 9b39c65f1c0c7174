// What is written through a view is in its base, in the base's other views and in autograd's graph,
// wherever the elements lie: values and gradients as on one rank. (dispatch_test.cc,
// libtorch_habits_test.cc and remembered_test.cc have more of views.)
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "c10/core/InferenceMode.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/dtensor/testing/programs.h"
#include "torch/nn/modules/linear.h"

namespace shardweave {
namespace {

using testing::check_program;
using ::testing::HasSubstr;
using testing::Trial;
using testing::values;

struct View {
  const char* name;
  std::function<at::Tensor(const at::Tensor&)> of;  // a [5, 6] tensor
};

const View kViews[] = {
    {"view", [](const at::Tensor& x) { return x.view({3, 10}); }},
    {"flatten", [](const at::Tensor& x) { return x.flatten(); }},
    {"unflatten", [](const at::Tensor& x) { return x.unflatten(1, {2, 3}); }},
    {"unsqueeze", [](const at::Tensor& x) { return x.unsqueeze(1); }},
    {"transpose", [](const at::Tensor& x) { return x.transpose(0, 1); }},
    {"t of a row", [](const at::Tensor& x) { return x.t().select(1, 3); }},
    {"permute", [](const at::Tensor& x) { return x.view({5, 2, 3}).permute({2, 0, 1}); }},
    {"select a row", [](const at::Tensor& x) { return x.select(0, 4); }},
    {"select a column", [](const at::Tensor& x) { return x.select(1, 2); }},
    {"narrow rows", [](const at::Tensor& x) { return x.narrow(0, 1, 3); }},
    {"narrow columns", [](const at::Tensor& x) { return x.narrow(1, 2, 4); }},
    {"every second row", [](const at::Tensor& x) { return x.slice(0, 0, 5, 2); }},
    {"every second column", [](const at::Tensor& x) { return x.slice(1, 1, 6, 2); }},
    {"no rows", [](const at::Tensor& x) { return x.narrow(0, 2, 0); }},
    {"one element", [](const at::Tensor& x) { return x[3][5]; }},
    {"diagonal", [](const at::Tensor& x) { return x.diagonal(1); }},
    {"index",
     [](const at::Tensor& x) {
       return x.index({at::indexing::Slice(1, 4), at::indexing::Slice(at::indexing::None, 5)});
     }},
    {"a view of a view of a view",
     [](const at::Tensor& x) { return x.narrow(0, 1, 4).t().narrow(0, 1, 3).select(1, 2); }},
    {"movedim", [](const at::Tensor& x) { return x.view({5, 3, 2}).movedim(2, 0); }},
    {"alias", [](const at::Tensor& x) { return at::alias(x); }},
    {"view_as", [](const at::Tensor& x) { return x.view_as(x); }},
    {"as_strided", [](const at::Tensor& x) { return x.as_strided({2, 3}, {12, 2}, 1); }},
    {"unfold", [](const at::Tensor& x) { return x.unfold(1, 2, 2); }},
};

using Write = std::function<void(at::Tensor& view, const at::Tensor& number)>;
struct NamedWrite {
  const char* name;
  Write write;
};

const NamedWrite kWrites[] = {
    {"add_", [](at::Tensor& v, const at::Tensor&) { v.add_(1); }},
    {"mul_ by what is trained", [](at::Tensor& v, const at::Tensor& n) { v.mul_(n); }},
    {"copy_ of one number", [](at::Tensor& v, const at::Tensor& n) { v.copy_(n); }},
    {"masked_fill_", [](at::Tensor& v, const at::Tensor&) { v.masked_fill_(v > 0.2, -1); }},
};

TEST(WritesThroughViewsTest, InForwardWithAutograd) {
  for (const View& view : kViews) {
    SCOPED_TRACE(view.name);
    check_program([&](Trial& run) {
      for (const NamedWrite& write : kWrites) {
        const std::string name = std::string(view.name) + ", " + write.name;
        const at::Tensor leaf = run.leaf(values({5, 6})), number = run.leaf(values({}, 3));
        const at::Tensor x = leaf * 2, other = x.narrow(0, 2, 3);
        const at::Tensor before = x.exp();  // of the old values
        at::Tensor v = view.of(x);
        write.write(v, number);
        run.result(name + ": view", v);
        run.result(name + ": base", x);
        run.result(name + ": another view", other);
        (x * x.detach().cos() + other.sum() + before.sum()).sum().backward();
        run.result(name + ": gradient", leaf.grad());
        run.result(name + ": number's gradient", number.grad());
      }
    });
  }
}

// The base is written; its views, which may be copies of another rank's elements, see it.
TEST(WritesThroughViewsTest, AViewSeesWhatIsWrittenToItsBase) {
  for (const View& view : kViews) {
    SCOPED_TRACE(view.name);
    check_program([&](Trial& run) {
      const at::Tensor leaf = run.leaf(values({5, 6})), number = run.leaf(values({}, 3));
      const at::Tensor x = leaf * 2;
      const at::Tensor v = view.of(x);
      x.mul_(number);
      run.result("after one write", v);
      x.t().narrow(0, 1, 4).add_(1);
      run.result("after another", v);
      (v.square().sum() + x.sum()).backward();
      run.result("gradient", leaf.grad());
      run.result("number's gradient", number.grad());
    });
  }
}

// Parameters, which autograd lets nobody write while it records.
TEST(WritesThroughViewsTest, OfParametersWithoutRecording) {
  check_program([](Trial& run) {
    torch::nn::Linear layer(6, 5);
    run.distribute(*layer);
    {
      const at::NoGradGuard no_grad;
      for (const View& view : kViews) {
        at::Tensor v = view.of(layer->weight);
        v.mul_(0.9).add_(0.01);
        layer->weight.data().narrow(0, 3, 2).select(1, 0).zero_();
        layer->bias.detach().slice(0, 0, 5, 2).fill_(0.25);
        run.result(view.name, v);
        run.parameters(*layer);
      }
    }
    const at::Tensor x = run.leaf(values({5, 6}));
    layer(x).square().sum().backward();
    run.result("x.grad", x.grad());
    run.gradients(*layer);
    const at::NoGradGuard no_grad;
    layer->weight.grad().narrow(0, 1, 3).zero_();
    layer->weight.sub_(layer->weight.grad());
    run.parameters(*layer);
  });
}

at::Tensor rows(at::ArrayRef<int64_t> which) {
  return at::tensor(which, at::kLong);
}

TEST(WritesThroughViewsTest, ByOperatorsThatTakeIndicesOrAnOutput) {
  check_program([](Trial& run) {
    const at::Tensor leaf = run.leaf(values({5, 6})), source = run.leaf(values({3, 6}, 2));
    const at::Tensor x = leaf * 2;
    x.narrow(0, 1, 3).copy_(source);
    x.narrow(1, 1, 4).index_add_(0, run.replicated(rows({4, 0, 4})), source.narrow(1, 0, 4));
    x.t().index_fill_(0, run.replicated(rows({5})), 0.5);
    x.narrow(0, 0, 4).index_put_({run.replicated(rows({3, 0})), at::indexing::Slice()},
                                 source.narrow(0, 0, 2));
    x.select(1, 3).masked_scatter_(run.replicated(values({5}, 5) > 0), source.select(1, 1));
    x.view({6, 5}).scatter_(1, run.replicated(rows({1, 0, 4}).view({3, 1})),
                            source.narrow(1, 0, 1));
    run.result("x", x);
    x.pow(3).sum().backward();
    run.result("gradient", leaf.grad());
    run.result("source's gradient", source.grad());
    const at::NoGradGuard no_grad;
    at::Tensor out = run.data(values({5, 6}, 4));
    at::Tensor row = out.select(0, 3), columns = out.narrow(1, 2, 2);
    at::mul_out(row, source[0], source[1]);
    run.result("out, a row", out);
    at::add_out(columns, x.narrow(1, 0, 2), x.narrow(1, 4, 2));
    run.result("out, columns", out);
  });
}

// A cache of keys that grows step by step, in inference mode and without.
// Who has saved the part hears of it, as of any write.
TEST(WritesThroughViewsTest, APartThatAutogradHasSaved) {
  testing::on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor x = distribute_tensor(values({4, 3}), mesh, Placements{Shard(0)});
    const at::Tensor w = at::ones({2, 3}, at::kDouble).requires_grad_();
    const at::Tensor loss = (to_local(x) * w).sum();
    x.select(0, 3).mul_(2);
    try {
      loss.backward();
      ADD_FAILURE() << "no error";
    } catch (const c10::Error& e) {
      EXPECT_THAT(e.what(), HasSubstr("modified by an inplace operation"));
    }
  });
}

TEST(WritesThroughViewsTest, ACacheThatIsFilledStepByStep) {
  for (const bool inference : {false, true}) {
    check_program([&](Trial& run) {
      const c10::InferenceMode guard(inference);
      const at::NoGradGuard no_grad;
      const at::Tensor cache = run.data(at::zeros({5, 7, 3}, at::kDouble));
      int64_t at = 0;
      for (const int64_t more : {3, 1, 1, 2}) {
        cache.narrow(1, at, more).copy_(run.data(values({5, more, 3}, static_cast<int>(at))));
        at += more;
        run.result("so far", cache.narrow(1, 0, at).cumsum(1));
      }
      cache.copy_(cache.roll(1, 1));
      run.result("cache", cache);
    });
  }
}

// What is saved for backward and then written, through any view, is an error as on one device.
TEST(WritesThroughViewsTest, WhatIsSavedAndThenWrittenIsAnError) {
  for (const View& view : kViews) {
    if (std::string(view.name) == "no rows") continue;
    check_program([&](Trial& run) {
      const at::Tensor leaf = run.leaf(values({5, 6}));
      const at::Tensor x = leaf * 2;
      const at::Tensor y = x.exp().sum() + x.square().sum();
      view.of(x).add_(1);
      std::string error = "none";
      try {
        y.backward();
      } catch (const c10::Error& e) {
        error = e.what_without_backtrace();
      }
      EXPECT_THAT(error, HasSubstr("modified by an inplace operation")) << view.name;
      run.result("x", x);
    });
  }
}

// Views that LibTorch lets nobody write while it records.
TEST(WritesThroughViewsTest, ViewsThatMustNotBeWrittenAreTheSameErrors) {
  check_program([](Trial& run) {
    const at::Tensor leaf = run.leaf(values({5, 6}));
    const at::Tensor x = leaf * 2;
    EXPECT_THROW(leaf.narrow(0, 1, 2).add_(1), c10::Error);
    EXPECT_THROW(x.split(2, 0)[1].add_(1), c10::Error);
    EXPECT_THROW(x.unbind(0)[1].add_(1), c10::Error);
    EXPECT_THROW(x.chunk(2, 1)[0].add_(1), c10::Error);
    EXPECT_THROW(x.unsqueeze(0).expand({2, 5, 6}).add_(1), c10::Error);
    run.result("x", x);
    const at::NoGradGuard no_grad;  // parts of a list may be written then
    const at::Tensor z = leaf * 3;
    z.split(2, 0)[1].add_(1);
    z.unbind(1)[4].mul_(2);
    z.chunk(2, 1)[0].fill_(7);
    run.result("z", z);
  });
}

}  // namespace
}  // namespace shardweave
