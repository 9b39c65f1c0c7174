// Loss parallel: a head whose vocabulary is cut, and a cross entropy of its logits as they lie. No
// logits, and no gradients of logits, are gathered: what goes around are numbers of a row.
#include <algorithm>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/observe/comm_trace.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/modules/parallel_style.h"
#include "torch/nn/modules/linear.h"

namespace shardweave {
namespace {

using testing::on_mesh;
namespace nn = torch::nn;

constexpr int64_t kBatch = 4, kLength = 5, kDim = 3, kIgnored = 2;

// Which dimension of the logits is the vocabulary.
enum class Form { kRows, kLast, kSecond };

at::Tensor loss_of(Form form, const at::Tensor& logits, const at::Tensor& targets,
                   int64_t reduction, double smoothing) {
  switch (form) {
    case Form::kRows:
      return at::cross_entropy_loss(logits.flatten(0, 1), targets.flatten(), {}, reduction,
                                    kIgnored, smoothing);
    case Form::kLast:  // one row after the other, with no flatten
      return at::cross_entropy_loss(logits[0], targets[0], {}, reduction, kIgnored, smoothing) +
             at::cross_entropy_loss(logits[1], targets[1], {}, reduction, kIgnored, smoothing);
    case Form::kSecond:
      return at::cross_entropy_loss(logits.transpose(1, 2), targets, {}, reduction, kIgnored,
                                    smoothing);
  }
  return {};
}

void fill(nn::Linear& head) {
  head->to(at::kDouble);
  const torch::NoGradGuard no_grad;
  for (const at::Tensor& p : head->parameters()) {
    p.copy_((at::arange(p.numel(), at::kDouble) * 1.7 + 1).sin().view(p.sizes()));
  }
}

// `sequence`: what comes into the head is cut along the sequence. `over`: the mesh dimensions that cut
// the vocabulary.
void sends_no_logits(const std::vector<MeshDim>& dims, int64_t vocabulary, Form form,
                     int64_t reduction, double smoothing, bool sequence,
                     const std::vector<std::string>& over = {"tp"}) {
  SCOPED_TRACE(absl::StrCat("over ", absl::StrJoin(over, ", "), ", vocabulary ", vocabulary,
                            ", form ", static_cast<int>(form), ", reduction ", reduction,
                            ", smoothing ", smoothing, ", sequence ", sequence));
  const at::Tensor hidden =
      (at::arange(kBatch * kLength * kDim, at::kDouble) * 0.9).cos().view({kBatch, kLength, kDim});
  const at::Tensor targets =
      (at::arange(kBatch * kLength, at::kLong) * 7 % vocabulary).view({kBatch, kLength});
  nn::Linear plain(kDim, vocabulary);
  fill(plain);
  const at::Tensor x = hidden.clone().requires_grad_();
  const at::Tensor want = loss_of(form, plain(x), targets, reduction, smoothing);
  want.square().sum().backward();
  on_mesh(dims, [&](const MeshPtr& mesh) {
    nn::Linear head(kDim, vocabulary);
    fill(head);
    if (over.size() == 1) {
      parallelize_module(*head, mesh, ColwiseParallel(), over[0], {.source = std::nullopt});
    } else {  // a style has one
      NamedPlacements words;
      for (const std::string& dim : over) words.emplace_back(dim, Shard(0));
      distribute_module(*head, mesh, {{"*", words}}, {.source = std::nullopt});
    }
    NamedPlacements rows;
    if (mesh->mesh().ndim() > 1 && form != Form::kLast) rows.emplace_back("dp", Shard(0));
    NamedPlacements lies = rows;
    if (sequence) lies.emplace_back("tp", Shard(1));
    const at::Tensor dx =
        distribute_tensor(hidden, mesh, lies, {.source = std::nullopt}).requires_grad_();
    const at::Tensor dt = distribute_tensor(targets, mesh, rows, {.source = std::nullopt});
    const CommTrace trace(mesh);
    const at::Tensor logits = head(dx);
    for (const std::string& dim : over) {
      EXPECT_EQ(layout_of(logits)[*mesh->mesh().dim(dim)], Shard(2)) << dim;
    }
    const at::Tensor loss = loss_of(form, logits, dt, reduction, smoothing);
    loss.square().sum().backward();
    // Of a rank's rows all logits would be so many bytes.
    const int64_t row = static_cast<int64_t>(sizeof(double)) * vocabulary;
    for (const CommEvent& event : trace.events()) {
      if (event.is_check) continue;
      for (const int64_t size : event.shape) {
        EXPECT_NE(size, vocabulary) << event.to_string();
      }
      EXPECT_LT(event.bytes, kBatch * kLength * row) << event.to_string();
      EXPECT_EQ(event.parameters, std::vector<std::string>()) << event.to_string();
    }
    EXPECT_TRUE(at::allclose(full_tensor(loss.detach()), want.detach(), 1e-10, 1e-12));
    finish_grad_sync(*head);
    EXPECT_TRUE(at::allclose(full_tensor(dx.grad()), x.grad(), 1e-9, 1e-12));
    EXPECT_TRUE(at::allclose(full_tensor(head->weight.grad()), plain->weight.grad(), 1e-9, 1e-12));
    EXPECT_TRUE(at::allclose(full_tensor(head->bias.grad()), plain->bias.grad(), 1e-9, 1e-12));
    EXPECT_EQ(dispatch_counters(mesh).gathered_operators, 0);
  });
}

TEST(LossParallelTest, CrossEntropyOfACutVocabularySendsNoLogits) {
  const std::vector<std::vector<MeshDim>> meshes = {
      {{"tp", 2}}, {{"tp", 3}}, {{"tp", 4}}, {{"dp", 2}, {"tp", 2}}};
  for (const auto& dims : meshes) {
    for (const Form form : {Form::kRows, Form::kLast, Form::kSecond}) {
      for (const double smoothing : {0.0, 0.1}) {
        for (const int64_t reduction :
             {at::Reduction::Mean, at::Reduction::Sum, at::Reduction::None}) {
          sends_no_logits(dims, 61, form, reduction, smoothing, false);
        }
        sends_no_logits(dims, 64, form, at::Reduction::Mean, smoothing, true);
      }
    }
  }
}

// A vocabulary that two mesh dimensions cut, one inside the other; and three dimensions of which one does.
TEST(LossParallelTest, OverTwoOfThreeMeshDimensions) {
  const std::vector<MeshDim> dims = {{"dp", 2}, {"x", 2}, {"tp", 2}};
  for (const std::vector<std::string>& over : {std::vector<std::string>{"x", "tp"}, {"tp"}}) {
    for (const Form form : {Form::kRows, Form::kLast, Form::kSecond}) {
      for (const double smoothing : {0.0, 0.1}) {
        for (const int64_t reduction :
             {at::Reduction::Mean, at::Reduction::Sum, at::Reduction::None}) {
          sends_no_logits(dims, 61, form, reduction, smoothing, false, over);
        }
      }
    }
  }
  sends_no_logits(dims, 6, Form::kRows, at::Reduction::Mean, 0.1, false, {"x", "tp"});
}

// Fewer words than ranks.
TEST(LossParallelTest, RanksWithoutWords) {
  for (const Form form : {Form::kRows, Form::kSecond}) {
    sends_no_logits({{"tp", 4}}, 6, form, at::Reduction::Mean, 0.1, false);
  }
}

}  // namespace
}  // namespace shardweave
