#include "shardweave/examples/common/training.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iostream>
#include <optional>
#include <sstream>
#include <thread>

#include "ATen/Parallel.h"
#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "nlohmann/json.hpp"
#include "shardweave/comm/world.h"
#include "shardweave/dtensor/cost_model.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/examples/train_gpt/backends.h"
#include "shardweave/examples/train_gpt/mesh_flag.h"
#include "shardweave/mesh/connected_mesh.h"
#include "shardweave/modules/auto_plan.h"
#include "shardweave/modules/hugging_face_plan.h"
#include "shardweave/modules/sharding_plan_json.h"
#include "shardweave/tools/progress/progress_bar.h"

ABSL_FLAG(std::string, mesh, "dp=2,tp=2",
          "how the ranks are arranged: dp (data parallel) times tp (tensor parallel); one of them "
          "may be left out");
ABSL_FLAG(
    std::string, backend, "",
    "inproc: ranks are threads of this process; gloo: ranks are processes, started here unless the "
    "environment says that a launcher has done it; default: gloo under a launcher, else inproc");
ABSL_FLAG(std::string, plan, "zoo",
          "how the model is sharded: zoo (its own plan), hf (Hugging Face's base_model_tp_plan of "
          "it), auto (found by what steps under other plans cost), or a file: a plan as JSON");
ABSL_FLAG(bool, sequence_parallel, false,
          "--plan=zoo: between attention and MLP, activations are cut along the sequence");
ABSL_FLAG(int64_t, steps, 200, "training steps");
ABSL_FLAG(int64_t, batch, 32, "sequences or images per step, over all ranks");
ABSL_FLAG(double, lr, 3e-3, "learning rate of AdamW");
ABSL_FLAG(uint64_t, seed, 1, "of the initial weights and the batches");
ABSL_FLAG(absl::Duration, timeout, absl::Minutes(2), "how long a rank waits for the others");
ABSL_FLAG(bool, check, false,
          "train on one rank too, with the same weights and batches, and compare the losses: those "
          "of the first steps may differ by 1e-5 of their size");
ABSL_FLAG(bool, json, false,
          "a line of JSON on stdout for each step and one at the end; all else goes to stderr");

namespace examples {
namespace {

using shardweave::MeshPtr;
using shardweave::Shard;
using shardweave::ShardingPlan;
using shardweave::World;
using train_gpt::Activity;

// Later ones differ by more: AdamW enlarges what rounding leaves.
constexpr size_t kFirstSteps = 5;
constexpr double kTolerance = 1e-5;
// Of --plan=auto, by every rank.
constexpr int64_t kPlansTried = 48;

absl::StatusOr<std::string> read_plan(const std::string& file) {
  std::ifstream in(file, std::ios::binary);
  std::ostringstream text;
  if (!in || !(text << in.rdbuf())) {
    return absl::InvalidArgumentError(
        absl::StrCat("--plan=", file,
                     ": no such file can be read; wanted zoo, hf, auto or a plan's file (JSON)"));
  }
  return text.str();
}

absl::StatusOr<Settings> settings_from_flags(const std::vector<char*>& rest) {
  if (rest.size() > 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", rest[1], "': wanted flags only; --help lists them"));
  }
  absl::StatusOr<std::vector<shardweave::MeshDim>> mesh =
      train_gpt::parse_mesh(absl::GetFlag(FLAGS_mesh));
  if (!mesh.ok()) return mesh.status();
  Settings s{.mesh = *std::move(mesh),
             .backend = absl::GetFlag(FLAGS_backend),
             .plan = absl::GetFlag(FLAGS_plan),
             .sequence_parallel = absl::GetFlag(FLAGS_sequence_parallel),
             .steps = absl::GetFlag(FLAGS_steps),
             .batch = absl::GetFlag(FLAGS_batch),
             .learning_rate = absl::GetFlag(FLAGS_lr),
             .seed = absl::GetFlag(FLAGS_seed),
             .timeout = absl::GetFlag(FLAGS_timeout),
             .check = absl::GetFlag(FLAGS_check),
             .json = absl::GetFlag(FLAGS_json)};
  absl::Status status;
  status.Update(check_at_least("steps", s.steps, 1));
  status.Update(check_at_least("batch", s.batch, 1));
  if (!status.ok()) return status;
  if (!(s.learning_rate > 0) || !std::isfinite(s.learning_rate)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--lr=", s.learning_rate, ": wanted a number above 0"));
  }
  if (s.timeout <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError(absl::StrCat("--timeout=", absl::FormatDuration(s.timeout),
                                                   ": wanted a time above 0, such as 30s"));
  }
  if (s.backend != "" && s.backend != "inproc" && s.backend != "gloo") {
    return absl::InvalidArgumentError(
        absl::StrCat("--backend=", s.backend, ": wanted inproc or gloo"));
  }
  if (s.sequence_parallel && s.plan != "zoo") {
    return absl::InvalidArgumentError(
        absl::StrCat("--sequence_parallel asks the zoo's plan; --plan=", s.plan,
                     " says by itself what it cuts"));
  }
  return s;
}

// One rank's part in it; rank 0 tells about it.
class Rank {
 public:
  Rank(Settings settings, World& world, Activity& activity)
      : settings_(std::move(settings)),
        world_(world),
        activity_(activity),
        leader_(world.rank() == 0),
        out_(!leader_         ? nullptr
             : settings_.json ? std::cerr.rdbuf()
                              : std::cout.rdbuf()),
        terminal_(::isatty(settings_.json ? STDERR_FILENO : STDOUT_FILENO) != 0) {}

  absl::Status run(const MakeTraining& make) {
    const int cores = static_cast<int>(std::thread::hardware_concurrency());
    at::set_num_threads(std::max(1, cores / world_.size()));
    activity_.set("reading flags and files");
    if (settings_.plan != "zoo" && settings_.plan != "hf" && settings_.plan != "auto") {
      absl::StatusOr<std::string> text = read_plan(settings_.plan);
      if (!text.ok()) return text.status();
      settings_.plan_text = *std::move(text);
    }
    const absl::StatusOr<Training> training = make(settings_);
    if (!training.ok()) return training.status();
    activity_.set("comparing settings with the other ranks");
    absl::Status status = train_gpt::check_same_everywhere(
        *world_.comm(), absl::StrCat(settings_.to_string(), ", ", training->description),
        absl::StrCat(settings_.plan_text, std::string(training->data)), "files",
        absl::StrCat(training->data.size(), " bytes of data"));
    if (!status.ok()) return status;
    activity_.set("making the mesh");
    const absl::StatusOr<MeshPtr> mesh = shardweave::init_device_mesh(world_, settings_.mesh);
    if (!mesh.ok()) return mesh.status();
    out_ << (*mesh)->mesh().to_string() << ", --plan=" << settings_.plan
         << (settings_.sequence_parallel ? ", sequence parallel" : "") << std::endl;

    const Result result = train(*training, *mesh);
    if (leader_) status = finish(*training, result);
    return status;
  }

 private:
  struct Result {
    std::vector<double> losses;
    int64_t before = 0;  // steps of the run that was gone on with
    double speed = 0;
    Summary summary;
  };

  Result train(const Training& training, const MeshPtr& mesh) {
    std::optional<shardweave::ProgressBar> bar;
    const auto begin = [&](int64_t steps) {
      bar.emplace(shardweave::ProgressBarOptions{.title = mesh != nullptr ? "training" : "one rank",
                                                 .steps = steps,
                                                 .unit = training.unit,
                                                 .per_step = training.per_step,
                                                 .out = leader_ ? &out_ : nullptr,
                                                 .terminal = terminal_});
    };
    begin(settings_.steps);
    activity_.set("making the model");
    Result result;
    result.summary = training.train(mesh, [&](int64_t done, double loss) {
      if (result.losses.empty() && done > 1) {
        result.before = done - 1;
        out_ << "going on after step " << result.before << " of " << settings_.steps << std::endl;
        begin(settings_.steps - result.before);
      }
      result.losses.push_back(loss);
      activity_.set(absl::StrCat(mesh != nullptr ? "training" : "one rank's", " step ", done + 1,
                                 " of ", settings_.steps));
      bar->step_done(absl::StrFormat("loss %.3f", loss));
      if (leader_ && settings_.json && mesh != nullptr) {
        print({{"step", done}, {"loss", loss}, {rate(training), bar->speed()}});
      }
    });
    result.speed = bar->speed();
    return result;
  }

  // On rank 0, which needs the others no more.
  absl::Status finish(const Training& training, const Result& result) {
    nlohmann::ordered_json line = {{"ranks", world_.size()},
                                   {"first_loss", result.losses.front()},
                                   {"last_loss", result.losses.back()},
                                   {rate(training), result.speed}};
    for (const auto& [name, value] : result.summary) {
      line[name] = value;
      out_ << name << ": " << absl::StrFormat("%.4f", value) << std::endl;
    }
    absl::Status status;
    if (settings_.check) {
      const Result alone = train(training, nullptr);
      double first = 0, all = 0;
      for (auto i = static_cast<size_t>(result.before); i < alone.losses.size(); ++i) {
        const double loss = result.losses[i - static_cast<size_t>(result.before)];
        const double difference =
            std::abs(loss - alone.losses[i]) / std::max(std::abs(alone.losses[i]), 1e-3);
        if (!(difference <= all)) all = difference;  // or is NaN
        if (i >= kFirstSteps) continue;
        if (!(difference <= first)) first = difference;
        if (status.ok() && !(difference <= kTolerance)) {
          status = absl::InternalError(
              absl::StrFormat("--check: in step %d the loss is %.9g, on one rank %.9g", i + 1, loss,
                              alone.losses[i]));
        }
      }
      line["first_steps_loss_diff"] = first;
      line["max_loss_diff"] = all;
      out_ << "largest relative difference between the losses of a step: " << first
           << " in the first " << std::min(kFirstSteps, alone.losses.size()) << " steps, " << all
           << " in all" << std::endl;
    }
    if (settings_.json) print(line);
    return status;
  }

  static std::string rate(const Training& training) { return training.unit + "_per_second"; }
  static void print(const nlohmann::ordered_json& line) { std::cout << line << std::endl; }

  Settings settings_;
  World& world_;
  Activity& activity_;
  const bool leader_;
  std::ostream out_;  // without a buffer, and so silent, on other ranks than the leader
  const bool terminal_;
};

}  // namespace

std::string Settings::to_string() const {
  return absl::StrCat("mesh ", train_gpt::to_string(mesh), ", plan ", plan,
                      sequence_parallel ? ", sequence parallel" : "", ", steps ", steps, ", batch ",
                      batch, ", lr ", learning_rate, ", seed ", seed);
}

absl::Status check_at_least(const char* flag, int64_t value, int64_t least) {
  if (value >= least) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag, "=", value, ": wanted ", least, " or more"));
}

ShardingPlan plan_for(const torch::nn::Module& module, const Settings& settings, const ZooPlan& zoo,
                      const char* hugging_face, const shardweave::MakeModel& step,
                      const MeshPtr& mesh) {
  if (settings.plan == "zoo") return zoo({.sequence_parallel = settings.sequence_parallel});
  if (settings.plan == "auto") {
    if (step == nullptr) {
      throw shardweave::Error(absl::InvalidArgumentError(
          "--plan=auto: of this model it knows no step to measure; wanted zoo or a file"));
    }
    const shardweave::AutoPlan found = shardweave::auto_plan(
        step, mesh->mesh(), shardweave::cost_model(mesh), {.max_evaluations = kPlansTried});
    if (mesh->rank().value == 0) std::cerr << found.to_string() << std::flush;
    return found.plan;
  }
  const bool hf = settings.plan == "hf";
  if (hf && hugging_face == nullptr) {
    throw shardweave::Error(absl::InvalidArgumentError(
        "--plan=hf: transformers has no base_model_tp_plan of this model; wanted zoo or a file"));
  }
  absl::StatusOr<ShardingPlan> plan = hf ? shardweave::hugging_face_plan(module, hugging_face)
                                         : shardweave::parse_sharding_plan(settings.plan_text);
  if (plan.ok()) return *std::move(plan);
  throw shardweave::Error(absl::InvalidArgumentError(
      absl::StrCat("--plan=", settings.plan, ": ", std::string(plan.status().message()))));
}

at::Tensor on_mesh(const at::Tensor& tensor, const MeshPtr& mesh) {
  if (mesh == nullptr) return tensor;
  return shardweave::distribute_tensor(tensor, mesh, {{"dp", Shard(0)}}, {.source = std::nullopt});
}

int run(const std::string& name, const char* usage, int argc, char** argv,
        const MakeTraining& make) {
  absl::SetProgramUsageMessage(usage);
  const std::vector<char*> rest = absl::ParseCommandLine(argc, argv);
  train_gpt::enter_working_directory();
  const absl::StatusOr<Settings> settings = settings_from_flags(rest);
  if (!settings.ok()) return train_gpt::fail(name, settings.status(), train_gpt::kUsage);
  return train_gpt::run_on_ranks({.name = name,
                                  .num_ranks = train_gpt::num_ranks(settings->mesh),
                                  .backend = settings->backend,
                                  .timeout = settings->timeout},
                                 argc, argv, [&](World& world, Activity& activity) {
                                   return train_gpt::run_guarded(activity, [&] {
                                     return Rank(*settings, world, activity).run(make);
                                   });
                                 });
}

}  // namespace examples
