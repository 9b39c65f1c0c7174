// What replays compute is what the step would; what cannot be recorded is refused.
#include "recorded_step.h"

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "ATen/autocast_mode.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace bench_recorded_step {
namespace {

using Step = std::function<std::vector<at::Tensor>()>;

// Of what `step` makes of `in`, which is another one in each replay.
void expect_replays(at::Tensor& in, const Step& step) {
  std::vector<at::Tensor> results;
  RecordedStep recorded = RecordedStep::record([&] { return results = step(); });
  for (int i = 0; i < 3; ++i) {
    in.copy_(at::randn(in.sizes()));
    recorded.replay();
    std::vector<at::Tensor> replayed;
    for (const at::Tensor& t : results) replayed.push_back(t.clone());
    const std::vector<at::Tensor> wanted = step();
    ASSERT_EQ(replayed.size(), wanted.size());
    for (size_t k = 0; k < wanted.size(); ++k) {
      EXPECT_TRUE(at::equal(replayed[k], wanted[k])) << "result " << k << " of replay " << i;
    }
  }
}

std::string refusal_of(const Step& step) {
  try {
    RecordedStep::record(step);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "none";
}

TEST(RecordedStepTest, ViewsListsAndWritesAreReplayed) {
  at::Tensor in = at::randn({3, 4});
  expect_replays(in, [&] {
    const at::Tensor whole = at::empty({3, 8});
    whole.narrow(1, 0, 4).copy_(in.sigmoid());
    whole.narrow(1, 4, 4).copy_(at::stack({in, in * 2}).sum(0));
    const std::vector<at::Tensor> halves = whole.chunk(2, 1);
    return std::vector<at::Tensor>{at::cat({halves[1], in, halves[0]}).mul_(2).add_(1), whole.t()};
  });
}

TEST(RecordedStepTest, GradientsAreReplayed) {
  at::Tensor in = at::randn({3, 4});
  const at::Tensor w = at::randn({4, 5}).set_requires_grad(true);
  expect_replays(in, [&] {
    w.mutable_grad() = at::Tensor();
    const at::Tensor y = at::gelu(in.matmul(w));
    const at::Tensor loss = at::layer_norm(y, {5}).pow(2).sum() + (y * y.softmax(1)).mean();
    loss.backward();
    (loss.detach() * 0 + w.sum()).backward();  // and what adds up
    return std::vector<at::Tensor>{w.grad(), y.detach()};
  });
}

// A tensor from before the step is written in each replay as the step would.
TEST(RecordedStepTest, WritesToWhatWasThereAreReplayed) {
  const at::Tensor sum = at::zeros({2}), in = at::ones({2});
  RecordedStep step = RecordedStep::record([&] {
    sum.add_(in * 2);
    return std::vector<at::Tensor>{};
  });
  in.fill_(5);
  step.replay();
  step.replay();
  EXPECT_TRUE(at::equal(sum, at::full({2}, 22.0F))) << sum;
}

TEST(RecordedStepTest, WhatCannotBeRecordedIsRefused) {
  const at::Tensor in = at::ones({2, 2});
  using testing::HasSubstr;
  EXPECT_THAT(refusal_of([&] { return std::vector{in * in.sum().item<double>()}; }),
              HasSubstr("the host reads a number"));
  EXPECT_THAT(refusal_of([&] {
                const at::Tensor packed = at::empty({4});
                packed.data_ptr<float>()[0] = 1;
                return std::vector{packed + 1};
              }),
              HasSubstr("aten::add reads memory that was written past LibTorch's dispatcher"));
  EXPECT_THAT(refusal_of([&] {
                const at::Tensor packed = at::empty({4});
                packed.data_ptr<float>()[0] = 1;
                return std::vector{packed.add_(1)};
              }),
              HasSubstr("aten::add_ reads memory"));
  EXPECT_THAT(refusal_of([&] { return std::vector{at::empty({4})}; }),
              HasSubstr("a result reads memory"));
  EXPECT_THAT(refusal_of([&] { return std::vector{in.to_sparse().to_dense()}; }),
              HasSubstr("SparseTensorImpl"));
  at::autocast::set_autocast_enabled(at::kCPU, true);
  EXPECT_THAT(refusal_of([&] { return std::vector{in.mm(in)}; }), HasSubstr("autocast"));
  at::autocast::set_autocast_enabled(at::kCPU, false);
}

}  // namespace
}  // namespace bench_recorded_step
