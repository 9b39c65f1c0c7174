// Trains a model whose MLPs are replaced, under a plan, by ones that a plug-in brings: a fused
// operator with sharding rules, and a module that says how it is cut. The model knows nothing of it.
//
//   ./bazelw run //examples:plugin -- --mesh=dp=2,tp=2 --check
//
// --check trains the model as it was written, on one rank, and compares the losses.

#include <string>
#include <utility>

#include "ATen/ops/arange.h"
#include "ATen/ops/mse_loss.h"
#include "ATen/ops/sin.h"
#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "mlp.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/examples/common/training.h"
#include "shardweave/modules/deferred_init.h"
#include "shardweave/modules/optim/fused_optimizer.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/normalization.h"

ABSL_FLAG(int64_t, dim, 24, "features");
ABSL_FLAG(int64_t, hidden, 56, "features within an MLP");

namespace {

using examples::Settings;
using examples::StepDone;
using examples::Training;
using plugin_example::Mlp;
using shardweave::MeshPtr;

torch::nn::Sequential make_model() {
  const int64_t dim = absl::GetFlag(FLAGS_dim), hidden = absl::GetFlag(FLAGS_hidden);
  return torch::nn::Sequential(torch::nn::Linear(dim, dim), Mlp(dim, hidden),
                               torch::nn::LayerNorm(torch::nn::LayerNormOptions({dim})),
                               Mlp(dim, hidden), torch::nn::Linear(dim, 1));
}

// Rows of numbers without a pattern, others for every step.
at::Tensor inputs_of(int64_t step, const Settings& settings) {
  const int64_t dim = absl::GetFlag(FLAGS_dim), count = settings.batch * dim;
  return at::sin(at::arange(step * count, (step + 1) * count, at::kDouble) * 12.9898 +
                 static_cast<double>(settings.seed))
      .to(at::kFloat)
      .view({settings.batch, dim});
}

void train(const Settings& settings, const MeshPtr& mesh, const StepDone& step_done) {
  torch::nn::Sequential model = shardweave::deferred_init(make_model);
  if (mesh != nullptr) {
    const auto own = [](const shardweave::nn::PlanOptions&) {
      return shardweave::ShardingPlan{.module = {{"{1,3}", {{"tp"}}}}};
    };
    shardweave::parallelize_module(
        *model, mesh,
        examples::plan_for(*model, settings, own, /*hugging_face=*/nullptr,
                           /*step=*/nullptr, mesh),
        plugin_example::plugins());
  }
  shardweave::materialize(*model, {.seed = settings.seed});

  shardweave::FusedOptimizer optimizer(model->parameters(),
                                       shardweave::AdamWOptions{.lr = settings.learning_rate});
  for (int64_t step = 0; step < settings.steps; ++step) {
    const at::Tensor inputs = inputs_of(step, settings);
    const at::Tensor targets = inputs.slice(1, 0, 3).prod(1, /*keepdim=*/true);
    const at::Tensor loss = at::mse_loss(model->forward(examples::on_mesh(inputs, mesh)),
                                         examples::on_mesh(targets, mesh));
    loss.backward();
    shardweave::finish_grad_sync(*model);  // nothing to do for plain tensors
    optimizer.step();
    optimizer.zero_grad();
    step_done(step + 1, loss.item<double>());
  }
}

absl::StatusOr<Training> make_training(const Settings& settings) {
  const int64_t dim = absl::GetFlag(FLAGS_dim), hidden = absl::GetFlag(FLAGS_hidden);
  if (absl::Status status = examples::check_at_least("dim", dim, 3); !status.ok()) return status;
  if (absl::Status status = examples::check_at_least("hidden", hidden, 1); !status.ok()) {
    return status;
  }
  if (settings.sequence_parallel) {
    return absl::InvalidArgumentError("--sequence_parallel: there are no sequences here");
  }
  return Training{
      .unit = "rows",
      .per_step = settings.batch,
      .description = absl::StrCat("dim ", dim, ", hidden ", hidden),
      .train =
          [&settings](const MeshPtr& mesh, const StepDone& step_done) {
            train(settings, mesh, step_done);
            return examples::Summary();
          },
  };
}

}  // namespace

int main(int argc, char** argv) {
  return examples::run("plugin", "Trains a model with modules and operators that plug-ins shard.",
                       argc, argv, make_training);
}
