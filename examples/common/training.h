// What the examples that train a model of modules/nn share: flags, ranks, progress, and the
// comparison with one rank. How a model is sharded and trained stands in the examples themselves.
//
//   int main(int argc, char** argv) {
//     return examples::run("train_it", "Trains it.", argc, argv, [](const Settings& settings) {
//       return absl::StatusOr<Training>(Training{.unit = "tokens", .train = ...});
//     });
//   }
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/mesh/device_mesh.h"
#include "shardweave/modules/nn/plan_options.h"
#include "shardweave/modules/parallelize_module.h"
#include "shardweave/modules/plan_cost.h"
#include "torch/nn/module.h"

namespace examples {

// The flags of every example, checked.
struct Settings {
  std::vector<shardweave::MeshDim> mesh;  // dp and tp; one that was not named has size 1
  std::string backend;                    // "inproc", "gloo", or "": whichever fits
  std::string plan;                       // "zoo", "hf", "auto" or a file
  std::string plan_text;                  // of that file
  bool sequence_parallel;
  int64_t steps, batch;
  double learning_rate;
  uint64_t seed;
  absl::Duration timeout;
  bool check, json;

  // All that has to be the same on every rank, as text.
  std::string to_string() const;
};

// InvalidArgument, with the flag's name, unless value >= least.
absl::Status check_at_least(const char* flag, int64_t value, int64_t least);

// What --plan asks for. `zoo`: the model's own; `hugging_face`: as hugging_face_plan() takes it,
// null if transformers has none; `step`: what auto_plan() measures, of which the first rank tells on
// stderr what it has found, or null. Throws Error for a plan that the model cannot have.
using ZooPlan = std::function<shardweave::ShardingPlan(const shardweave::nn::PlanOptions& options)>;
shardweave::ShardingPlan plan_for(const torch::nn::Module& module, const Settings& settings,
                                  const ZooPlan& zoo, const char* hugging_face,
                                  const shardweave::MakeModel& step,
                                  const shardweave::MeshPtr& mesh);

// A batch's tensor: each row of the mesh gets its share. Every rank has made the same, so that
// nothing is sent. Without a mesh: as it is.
at::Tensor on_mesh(const at::Tensor& tensor, const shardweave::MeshPtr& mesh);

// After every step. `done`: how many there are, with those of a run that was gone on with.
using StepDone = std::function<void(int64_t done, double loss)>;
// What else there is to tell at the end: {"accuracy", 0.93}.
using Summary = std::vector<std::pair<std::string, double>>;

struct Training {
  std::string unit;         // of the speed: "tokens"
  int64_t per_step = 1;     // units
  std::string description;  // of the example's own flags, which all ranks have to have alike
  std::string_view data;    // likewise; outlives the training
  // Makes the model and trains it, on a mesh (collective) or, without one (null), on one rank with
  // the same weights and batches, from the beginning. Errors: exceptions.
  std::function<Summary(const shardweave::MeshPtr& mesh, const StepDone& step_done)> train;
};

// Called on every rank. Its errors are about the example's own flags and files.
using MakeTraining = std::function<absl::StatusOr<Training>(const Settings& settings)>;

// A main(): the exit code is 0, 1 if the training fails or --check finds a difference, or 2 if the
// flags cannot be.
int run(const std::string& name, const char* usage, int argc, char** argv,
        const MakeTraining& make);

}  // namespace examples
