// Trains a vision transformer on scikit-learn's digits, sharded over ranks that are threads or
// processes, and says how many of the images that it has not seen it names rightly.
//
//   ./bazelw run //examples:train_vit -- --mesh=dp=2,tp=2 --check
//   ./bazelw run //examples:train_vit -- --mesh=tp=4 --sequence_parallel --json
//
// The model is constructed without memory, sharded by one call, and only then made: each rank draws
// its parts.

#include <cstdint>
#include <string>
#include <utility>

#include "ATen/ATen.h"
#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "digits.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/examples/common/training.h"
#include "shardweave/examples/train_gpt/counter_random.h"
#include "shardweave/modules/deferred_init.h"
#include "shardweave/modules/nn/vit.h"
#include "shardweave/modules/optim/fused_optimizer.h"
#include "shardweave/modules/parallelize_module.h"

ABSL_FLAG(int64_t, layers, 2, "transformer layers");
ABSL_FLAG(int64_t, dim, 64, "features of a patch");
ABSL_FLAG(int64_t, heads, 4, "attention heads; they divide --dim, and --mesh's tp divides them");
ABSL_FLAG(int64_t, patch, 2, "pixels of a patch's side; the images have 8");

namespace {

using examples::Settings;
using examples::StepDone;
using examples::Summary;
using examples::Training;
using shardweave::MeshPtr;

constexpr int64_t kSeen = 1500;  // of digits::kCount; the rest is for the accuracy

shardweave::nn::VitOptions options_from_flags() {
  return {.hidden_size = absl::GetFlag(FLAGS_dim),
          .num_hidden_layers = absl::GetFlag(FLAGS_layers),
          .num_attention_heads = absl::GetFlag(FLAGS_heads),
          .intermediate_size = 2 * absl::GetFlag(FLAGS_dim),
          .initializer_range = 0.05,
          .image_size = digits::kSide,
          .patch_size = absl::GetFlag(FLAGS_patch),
          .num_channels = 1,
          .num_labels = digits::kClasses};
}

// Which images a step takes; every rank draws the same.
at::Tensor batch(const Settings& settings, int64_t step) {
  at::Tensor chosen = at::empty({settings.batch}, at::kLong);
  for (int64_t i = 0; i < settings.batch; ++i) {
    chosen.data_ptr<int64_t>()[i] = static_cast<int64_t>(
        train_gpt::random_at(settings.seed, static_cast<uint64_t>(step * settings.batch + i)) %
        kSeen);
  }
  return chosen;
}

// The share of the images it has not seen that it names rightly.
double accuracy(shardweave::nn::Vit& model, const at::Tensor& images, const at::Tensor& labels,
                const MeshPtr& mesh) {
  const c10::AutoGradMode no_grad(false);
  at::Tensor logits = model(examples::on_mesh(images.slice(0, kSeen), mesh));
  if (mesh != nullptr) logits = shardweave::full_tensor(logits);
  return logits.argmax(1).eq(labels.slice(0, kSeen)).to(at::kDouble).mean().item<double>();
}

Summary train(const Settings& settings, const MeshPtr& mesh, const StepDone& step_done) {
  const shardweave::nn::VitOptions options = options_from_flags();
  auto model = shardweave::deferred_init([&] { return shardweave::nn::Vit(options); });
  const at::Tensor images = digits::images(), labels = digits::labels();
  if (mesh != nullptr) {
    const auto zoo = [&](const shardweave::nn::PlanOptions& plan_options) {
      return shardweave::nn::vit_plan(options, mesh->mesh(), plan_options);
    };
    const at::Tensor chosen = batch(settings, 0);
    const at::Tensor seen = images.index_select(0, chosen), named = labels.index_select(0, chosen);
    const auto step = [&] {
      shardweave::nn::Vit one(options);
      return shardweave::StepModel{one.ptr(), [=](const MeshPtr& on) mutable {
                                     return at::cross_entropy_loss(one(examples::on_mesh(seen, on)),
                                                                   examples::on_mesh(named, on));
                                   }};
    };
    shardweave::parallelize_module(
        *model, mesh,
        examples::plan_for(*model, settings, zoo, /*hugging_face=*/nullptr, step, mesh));
  }
  shardweave::materialize(*model, {.seed = settings.seed});

  shardweave::FusedOptimizer optimizer(model->parameters(),
                                       shardweave::AdamWOptions{.lr = settings.learning_rate});
  for (int64_t step = 0; step < settings.steps; ++step) {
    const at::Tensor chosen = batch(settings, step);
    const at::Tensor logits = model(examples::on_mesh(images.index_select(0, chosen), mesh));
    const at::Tensor loss =
        at::cross_entropy_loss(logits, examples::on_mesh(labels.index_select(0, chosen), mesh));
    loss.backward();
    shardweave::finish_grad_sync(*model);  // nothing to do for plain tensors
    optimizer.step();
    optimizer.zero_grad();
    step_done(step + 1, loss.item<double>());
  }
  return {{"accuracy", accuracy(model, images, labels, mesh)}};
}

absl::StatusOr<Training> make_training(const Settings& settings) {
  if (absl::Status status = check(options_from_flags()); !status.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--layers, --dim, --heads, --patch: ", std::string(status.message())));
  }
  return Training{
      .unit = "images",
      .per_step = settings.batch,
      .description = absl::StrCat("layers ", absl::GetFlag(FLAGS_layers), ", dim ",
                                  absl::GetFlag(FLAGS_dim), ", heads ", absl::GetFlag(FLAGS_heads),
                                  ", patch ", absl::GetFlag(FLAGS_patch)),
      .data = digits::bytes(),
      .train = [&settings](const MeshPtr& mesh,
                           const StepDone& step_done) { return train(settings, mesh, step_done); },
  };
}

}  // namespace

int main(int argc, char** argv) {
  return examples::run("train_vit", "Trains a vision transformer on digits, sharded over ranks.",
                       argc, argv, make_training);
}
