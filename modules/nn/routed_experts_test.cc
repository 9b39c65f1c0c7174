// Experts compute the tokens that chose them and nothing else; values, gradients and their gradients
// are those of computing everything, on one device and on meshes.
#include "shardweave/modules/nn/routed_experts.h"

#include <array>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "ATen/record_function.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/observe/comm_trace.h"
#include "shardweave/dtensor/testing/expect_comms.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/modules/nn/mixture_of_experts.h"
#include "torch/csrc/autograd/autograd.h"

namespace shardweave::nn {
namespace {

using ::testing::HasSubstr;
using testing::on_mesh;
using torch::autograd::grad;

constexpr int64_t kTokens = 7, kHidden = 5, kIntermediate = 6, kExperts = 5;

at::Tensor numbers(at::IntArrayRef sizes, double seed) {
  int64_t count = 1;
  for (const int64_t s : sizes) count *= s;
  return (at::arange(count, at::kDouble) * 0.73 + seed).sin().view(sizes);
}

// x, a router's weight, gate_up_proj, down_proj.
std::vector<at::Tensor> arguments() {
  return {numbers({kTokens, kHidden}, 1), numbers({kExperts, kHidden}, 2) * 3,
          numbers({kExperts, 2 * kIntermediate, kHidden}, 3),
          numbers({kExperts, kHidden, kIntermediate}, 4)};
}
std::vector<at::Tensor> as_leaves(std::vector<at::Tensor> tensors) {
  for (at::Tensor& tensor : tensors) tensor = tensor.detach().requires_grad_();
  return tensors;
}

// Of each token the best two experts; the weights are functions of x.
at::Tensor weights_of(const at::Tensor& x, const at::Tensor& router) {
  const at::Tensor logits = at::linear(x, router);
  const auto [best, experts] = logits.topk(2, -1);
  return at::zeros_like(logits).scatter(-1, experts, at::softmax(best, -1));
}

using Layer = std::function<at::Tensor(const at::Tensor& x, const at::Tensor& weights,
                                       const at::Tensor& gate_up, const at::Tensor& down)>;

// Every expert for every token.
Layer dense(Activation activation) {
  return [activation](const at::Tensor& x, const at::Tensor& weights, const at::Tensor& gate_up,
                      const at::Tensor& down) {
    const at::Tensor all = x.expand({gate_up.size(0), x.size(0), x.size(1)});
    const auto halves = at::bmm(all, gate_up.transpose(1, 2)).chunk(2, -1);
    const at::Tensor hidden =
        activate(activation, halves[0]) * halves[1] * weights.t().unsqueeze(-1);
    return at::bmm(hidden, down.transpose(1, 2)).sum(0);
  };
}
Layer routed(Activation activation) {
  return [activation](const at::Tensor& x, const at::Tensor& weights, const at::Tensor& gate_up,
                      const at::Tensor& down) {
    return routed_experts(x, weights, gate_up, down, activation);
  };
}

at::Tensor result(const Layer& layer, const std::vector<at::Tensor>& a) {
  return layer(a[0], weights_of(a[0], a[1]), a[2], a[3]);
}

void expect_close(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected,
                  const char* what) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    EXPECT_TRUE(at::allclose(actual[i], expected[i], 1e-9, 1e-11)) << what << " " << i;
  }
}

TEST(RoutedExpertsTest, ValuesAndGradientsAreThoseOfComputingAll) {
  for (const Activation activation :
       {Activation::kSilu, Activation::kGelu, Activation::kGeluTanh, Activation::kRelu}) {
    const auto a = as_leaves(arguments()), b = as_leaves(arguments());
    const at::Tensor y = result(routed(activation), a), wanted = result(dense(activation), b);
    expect_close({y}, {wanted}, "value");
    expect_close(grad({y.square().sum()}, a), grad({wanted.square().sum()}, b), "gradient");
  }
}

// The weights are functions of x, and both are saved: each path counts once.
TEST(RoutedExpertsTest, GradientsOfGradients) {
  for (const Activation activation : {Activation::kSilu, Activation::kGelu}) {
    const auto second = [&](const Layer& layer) {
      const auto a = as_leaves(arguments());
      const auto first =
          grad({result(layer, a).square().sum()}, a, {}, true, /*create_graph=*/true);
      at::Tensor sum = at::zeros({}, at::kDouble);
      for (const at::Tensor& g : first) sum = sum + g.square().sum();
      auto all = grad({sum}, a);
      all.insert(all.end(), first.begin(), first.end());
      return all;
    };
    expect_close(second(routed(activation)), second(dense(activation)), "second");
  }
}

TEST(RoutedExpertsTest, ExpertsThatNobodyChoseAndTokensThatChoseNone) {
  auto a = as_leaves(arguments());
  at::Tensor weights = at::zeros({kTokens, kExperts}, at::kDouble);
  weights[3][1] = 0.5;
  weights.requires_grad_();
  const at::Tensor y = routed(Activation::kSilu)(a[0], weights, a[2], a[3]);
  expect_close({y}, {dense(Activation::kSilu)(a[0], weights, a[2], a[3])}, "value");
  const auto grads = grad({y.sum()}, {a[0], weights, a[2], a[3]});
  EXPECT_EQ(grads[1].ne(0).sum().item<int64_t>(), 1);
  EXPECT_TRUE(grads[2][0].eq(0).all().item<bool>());
  EXPECT_FALSE(grads[2][1].eq(0).all().item<bool>());
  const at::Tensor none =
      routed(Activation::kSilu)(a[0].narrow(0, 0, 0), weights.narrow(0, 0, 0), a[2], a[3]);
  EXPECT_EQ(none.sizes(), (std::vector<int64_t>{0, kHidden}));
}

// Multiplications of matrix products while it lives.
class Multiplications {
 public:
  Multiplications() {
    count() = 0;
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback(&begin).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  }
  ~Multiplications() { at::removeCallback(handle_); }
  static int64_t& count() {
    static thread_local int64_t n = 0;
    return n;
  }

 private:
  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
    const auto name = function.operator_name();
    if (!name.has_value()) return nullptr;
    const bool mm = name->name == "aten::mm", bmm = name->name == "aten::bmm";
    if (!mm && !bmm) return nullptr;
    const auto inputs = function.inputs();
    count() += inputs[0].toTensor().numel() * inputs[1].toTensor().sizes().back();
    return nullptr;
  }
  at::CallbackHandle handle_;
};

TEST(RoutedExpertsTest, MultiplicationsAreThoseOfTheChosenExperts) {
  const auto a = as_leaves(arguments());
  constexpr int64_t kPerRow = 3 * kHidden * kIntermediate;  // gate, up, down
  for (const int64_t chosen : {1, 2, 5}) {
    const at::Tensor logits = at::linear(a[0], a[1]).detach();
    const auto [best, experts] = logits.topk(chosen, -1);
    const at::Tensor weights =
        at::zeros_like(logits).scatter(-1, experts, at::softmax(best, -1)).requires_grad_();
    const Multiplications counting;
    const at::Tensor y = routed_experts(a[0], weights, a[2], a[3], Activation::kSilu);
    EXPECT_EQ(Multiplications::count(), kTokens * chosen * kPerRow);
    Multiplications::count() = 0;
    y.sum().backward();
    // Gate and up again, and two products for each of the three.
    EXPECT_EQ(Multiplications::count(), kTokens * chosen * (2 + 6) * kHidden * kIntermediate);
  }
}

// Along every mesh dimension the tokens, the experts or the features are cut; uneven parts, too.
TEST(RoutedExpertsTest, OnMeshes) {
  const auto a = as_leaves(arguments());
  const at::Tensor expected = result(dense(Activation::kSilu), a);
  const auto expected_grads = grad({expected.square().sum()}, a);
  struct Cut {
    Placement x = Replicate(), gate_up = Replicate(), down = Replicate();
  };
  const Cut tokens{.x = Shard(0)}, experts{.gate_up = Shard(0), .down = Shard(0)},
      features{.gate_up = StridedShard(1, 2), .down = Shard(2)}, nothing;
  const std::vector<std::pair<std::vector<MeshDim>, std::vector<Cut>>> cases = {
      {{{"x", 2}}, {tokens}},
      {{{"x", 2}}, {experts}},
      {{{"x", 2}}, {features}},
      {{{"x", 2}}, {nothing}},
      {{{"x", 3}}, {tokens}},
      {{{"x", 3}}, {experts}},
      {{{"x", 4}}, {features}},  // 6 features: 2, 2, 2 and none
      {{{"x", 2}, {"y", 2}}, {tokens, experts}},
      {{{"x", 2}, {"y", 2}}, {tokens, features}},
      {{{"x", 2}, {"y", 2}}, {experts, features}},
  };
  for (const auto& [dims, cuts] : cases) {
    std::array<Placements, 4> placements;
    for (const Cut& cut : cuts) {
      placements[0].push_back(cut.x);
      placements[1].push_back(Replicate());
      placements[2].push_back(cut.gate_up);
      placements[3].push_back(cut.down);
    }
    on_mesh(dims, [&](const MeshPtr& mesh) {
      std::vector<at::Tensor> b = arguments();
      for (size_t i = 0; i < b.size(); ++i) {
        b[i] = distribute_tensor(b[i], mesh, placements[i], {.source = std::nullopt})
                   .detach()
                   .requires_grad_();
      }
      const at::Tensor weights = weights_of(b[0], b[1]);
      at::Tensor y;
      {
        const CommTrace trace(mesh);
        y = routed_experts(b[0], weights, b[2], b[3], Activation::kSilu);
        EXPECT_COMMS(trace, {});
      }
      EXPECT_TRUE(at::allclose(full_tensor(y.detach()), expected, 1e-9, 1e-11));
      const auto grads = grad({y.square().sum()}, b);
      for (size_t i = 0; i < grads.size(); ++i) {
        EXPECT_TRUE(at::allclose(full_tensor(grads[i]), expected_grads[i], 1e-9, 1e-11))
            << "gradient " << i << " on " << mesh->mesh().to_string();
      }
      EXPECT_EQ(dispatch_counters(mesh).gathered_operators, 0);
    });
  }
}

TEST(RoutedExpertsTest, GradientsOfGradientsOnAMesh) {
  const auto sums = [](const std::vector<at::Tensor>& a) {
    const auto first = grad({result(routed(Activation::kSilu), a).square().sum()}, a, {}, true,
                            /*create_graph=*/true);
    at::Tensor sum = first[0].square().sum();
    for (size_t i = 1; i < first.size(); ++i) sum = sum + first[i].square().sum();
    return grad({sum}, a);
  };
  const auto expected = sums(as_leaves(arguments()));
  for (const Placements& cut : {Placements{Shard(0)}, Placements{StridedShard(1, 2)}}) {
    on_mesh({{"x", 2}}, [&](const MeshPtr& mesh) {
      std::vector<at::Tensor> b = arguments();
      for (size_t i = 0; i < b.size(); ++i) {
        const Placements down = cut[0] == Shard(0) ? cut : Placements{Shard(2)};
        b[i] = distribute_tensor(b[i], mesh,
                                 i < 2    ? Placements{Replicate()}
                                 : i == 2 ? cut
                                          : down,
                                 {.source = std::nullopt})
                   .detach()
                   .requires_grad_();
      }
      const auto second = sums(b);
      for (size_t i = 0; i < second.size(); ++i) {
        EXPECT_TRUE(at::allclose(full_tensor(second[i]), expected[i], 1e-8, 1e-9)) << i;
      }
    });
  }
}

TEST(RoutedExpertsTest, SaysWhatIsWrong) {
  const auto a = arguments();
  const at::Tensor weights = at::ones({kTokens, kExperts}, at::kDouble);
  const auto error = [&](const at::Tensor& x, const at::Tensor& w, const at::Tensor& gate_up,
                         const at::Tensor& down) -> std::string {
    try {
      routed_experts(x, w, gate_up, down, Activation::kSilu);
    } catch (const c10::Error& e) {
      return e.what();
    }
    return "";
  };
  EXPECT_EQ(error(a[0], weights, a[2], a[3]), "");
  EXPECT_THAT(error(a[0][0], weights, a[2], a[3]), HasSubstr("wanted x [tokens, hidden]"));
  EXPECT_THAT(error(a[0], weights.narrow(0, 0, 3), a[2], a[3]),
              HasSubstr("weights of 3 tokens for 7"));
  EXPECT_THAT(error(a[0], weights.narrow(1, 0, 4), a[2], a[3]),
              HasSubstr("weights choose among 4 experts, but there are 5 in gate_up"));
  EXPECT_THAT(error(a[0], weights, a[2].narrow(1, 0, 10), a[3]), HasSubstr("do not go together"));
  EXPECT_THAT(error(a[0], weights, a[2].narrow(1, 0, 11), a[3]),
              HasSubstr("wanted gate_up_proj [experts, 2 intermediate, hidden]"));
  EXPECT_THAT(error(a[0].to(at::kFloat), weights, a[2], a[3]), HasSubstr("wanted one dtype"));
  on_mesh({{"x", 2}}, [&](const MeshPtr& mesh) {  // before anything is sent
    const auto put = [&](const at::Tensor& tensor, const Placement& placement) {
      return distribute_tensor(tensor, mesh, {placement}, {.source = std::nullopt});
    };
    EXPECT_THAT(error(put(a[0], Shard(0)), put(weights.narrow(1, 0, 4), Shard(0)),
                      put(a[2], Replicate()), put(a[3], Replicate())),
                HasSubstr("weights choose among 4 experts"));
  });
}

}  // namespace
}  // namespace shardweave::nn
