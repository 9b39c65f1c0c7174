// Trains a Llama that transformers has saved on token files, and saves it so that transformers loads it.
//
//   ./bazelw run //tools:tokenize -- --help                        # makes token files
//   ./bazelw run //examples:finetune_llama -- --model=llama/ --tokens=tokens.bin --parallel=fsdp
//       --mesh=dp=4 --checkpoints=run --export=llama-tuned/
//   ./bazelw run //examples:finetune_llama -- ... --mesh=dp=2,tp=2 --parallel=fsdp+tp --resume
//
// Losses do not depend on the mesh or on --parallel, nor on where a run was interrupted. SIGTERM and SIGUSR1
// end it with a checkpoint.

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <iostream>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "ATen/Parallel.h"
#include "ATen/ops/arange.h"
#include "ATen/ops/cross_entropy_loss.h"
#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "c10/core/GradMode.h"
#include "nlohmann/json.hpp"
#include "shardweave/comm/world.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/dtensor/random.h"
#include "shardweave/examples/train_gpt/backends.h"
#include "shardweave/examples/train_gpt/mesh_flag.h"
#include "shardweave/mesh/connected_mesh.h"
#include "shardweave/modules/checkpoint/safetensors_tensor.h"
#include "shardweave/modules/data/token_loader.h"
#include "shardweave/modules/data_parallel.h"
#include "shardweave/modules/deferred_init.h"
#include "shardweave/modules/fully_shard.h"
#include "shardweave/modules/hugging_face/pretrained.h"
#include "shardweave/modules/nn/llama.h"
#include "shardweave/modules/optim/fused_optimizer.h"
#include "shardweave/modules/parallelize_module.h"
#include "shardweave/modules/train/trainer.h"
#include "shardweave/modules/zero.h"

ABSL_FLAG(std::string, model, "", "a directory of transformers: config.json, safetensors files");
ABSL_FLAG(std::string, tokens, "", "token files (//tools:tokenize), with commas between them");
ABSL_FLAG(
    std::string, parallel, "fsdp",
    "ddp: everything whole on every rank; zero1: but for the optimizer's state; fsdp: nothing "
    "whole; fsdp+tp: within a layer, too");
ABSL_FLAG(std::string, mesh, "dp=2", "how ranks are arranged: dp, and tp for --parallel=fsdp+tp");
ABSL_FLAG(
    std::string, backend, "",
    "inproc: ranks are threads; gloo: processes; default: gloo under a launcher, else inproc");
ABSL_FLAG(int64_t, steps, 100, "training steps, of all runs together");
ABSL_FLAG(int64_t, batch, 8, "sequences of a step, over all ranks");
ABSL_FLAG(int64_t, seq, 128, "tokens of a sequence");
ABSL_FLAG(double, lr, 1e-4, "learning rate of AdamW after the warm-up");
ABSL_FLAG(double, weight_decay, 0.01, "of AdamW");
ABSL_FLAG(int64_t, warmup, 0,
          "steps in which the learning rate grows; it falls by a cosine to 10 %");
ABSL_FLAG(double, clip, 1.0, "the gradient's largest norm");
ABSL_FLAG(uint64_t, seed, 1, "of the order of samples, and of dropout");
ABSL_FLAG(std::string, checkpoints, "", "a directory for checkpoints; default: none");
ABSL_FLAG(int64_t, save_every, 0, "steps between two checkpoints; 0: at the end alone");
ABSL_FLAG(int64_t, keep_last, 2, "checkpoints that stay; 0: all");
ABSL_FLAG(bool, resume, false, "go on with the newest of --checkpoints, on whatever mesh");
ABSL_FLAG(int64_t, stop_after, 0,
          "end after so many steps of this run, as a signal would; 0: do not");
ABSL_FLAG(std::string, export, "", "a new directory for the trained model; default: none");
ABSL_FLAG(std::string, export_dtype, "float32", "float32 or bfloat16");
ABSL_FLAG(std::string, logits, "",
          "a new safetensors file for some tokens and the trained model's logits of them, for "
          "compare_logits.py");
ABSL_FLAG(std::string, log, "", "a file for a line of JSON per step");
ABSL_FLAG(std::string, events, "", "a directory for TensorBoard");
ABSL_FLAG(absl::Duration, timeout, absl::Minutes(5), "how long a rank waits for the others");
ABSL_FLAG(bool, json, false, "lines of JSON on stdout; all else goes to stderr");

namespace {

using namespace shardweave;
using train_gpt::Activity;

absl::Status wanted(const char* flag, const std::string& given, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat("--", flag, "=", given, ": wanted ", what));
}

// The flags, checked as far as a rank can by itself.
struct Settings {
  std::string model, parallel, checkpoints, export_to;
  std::vector<std::string> tokens;
  std::vector<MeshDim> mesh;
  int64_t steps, batch, seq, warmup, save_every, keep_last, stop_after;
  double lr, weight_decay, clip;
  uint64_t seed;
  bool resume, json;
  at::ScalarType export_dtype;

  std::string to_string() const {
    return absl::StrCat("model ", model, ", parallel ", parallel, ", mesh ",
                        train_gpt::to_string(mesh), ", steps ", steps, ", batch ", batch, ", seq ",
                        seq, ", lr ", lr, ", warm-up ", warmup, ", clip ", clip, ", seed ", seed,
                        resume ? ", resume" : "");
  }
};

absl::StatusOr<Settings> settings_from_flags() {
  const absl::StatusOr<std::vector<MeshDim>> mesh =
      train_gpt::parse_mesh(absl::GetFlag(FLAGS_mesh));
  if (!mesh.ok()) return mesh.status();
  Settings s{.model = absl::GetFlag(FLAGS_model),
             .parallel = absl::GetFlag(FLAGS_parallel),
             .checkpoints = absl::GetFlag(FLAGS_checkpoints),
             .export_to = absl::GetFlag(FLAGS_export),
             .tokens = absl::StrSplit(absl::GetFlag(FLAGS_tokens), ',', absl::SkipEmpty()),
             .mesh = *mesh,
             .steps = absl::GetFlag(FLAGS_steps),
             .batch = absl::GetFlag(FLAGS_batch),
             .seq = absl::GetFlag(FLAGS_seq),
             .warmup = absl::GetFlag(FLAGS_warmup),
             .save_every = absl::GetFlag(FLAGS_save_every),
             .keep_last = absl::GetFlag(FLAGS_keep_last),
             .stop_after = absl::GetFlag(FLAGS_stop_after),
             .lr = absl::GetFlag(FLAGS_lr),
             .weight_decay = absl::GetFlag(FLAGS_weight_decay),
             .clip = absl::GetFlag(FLAGS_clip),
             .seed = absl::GetFlag(FLAGS_seed),
             .resume = absl::GetFlag(FLAGS_resume),
             .json = absl::GetFlag(FLAGS_json),
             .export_dtype = at::kFloat};
  if (s.model.empty()) return wanted("model", "", "a directory that transformers has saved");
  if (s.tokens.empty()) return wanted("tokens", "", "token files, which //tools:tokenize makes");
  for (const auto& [flag, value, least] : {std::tuple("steps", s.steps, 1),
                                           {"batch", s.batch, 1},
                                           {"seq", s.seq, 1},
                                           {"warmup", s.warmup, 0},
                                           {"save_every", s.save_every, 0},
                                           {"keep_last", s.keep_last, 0},
                                           {"stop_after", s.stop_after, 0}}) {
    if (value < least) return wanted(flag, absl::StrCat(value), absl::StrCat(least, " or more"));
  }
  for (const auto& [flag, value] : {std::pair("lr", s.lr), {"clip", s.clip}}) {
    if (!(value > 0) || !std::isfinite(value)) {
      return wanted(flag, absl::StrCat(value), "a number above 0");
    }
  }
  if (s.parallel != "ddp" && s.parallel != "zero1" && s.parallel != "fsdp" &&
      s.parallel != "fsdp+tp") {
    return wanted("parallel", s.parallel, "ddp, zero1, fsdp or fsdp+tp");
  }
  for (const MeshDim& dim : s.mesh) {
    if (dim.name == "tp" && dim.size > 1 && s.parallel != "fsdp+tp") {
      return wanted("mesh", train_gpt::to_string(s.mesh),
                    absl::StrCat("dp alone for --parallel=", s.parallel));
    }
  }
  if (s.checkpoints.empty() && (s.resume || s.save_every > 0 || s.stop_after > 0)) {
    return wanted("checkpoints", "", "a directory for --resume, --save_every and --stop_after");
  }
  // Not after all of the training.
  if (!s.export_to.empty() && std::filesystem::exists(s.export_to)) {
    return wanted("export", s.export_to, "a directory that is not there yet");
  }
  const std::string dtype = absl::GetFlag(FLAGS_export_dtype);
  if (dtype == "bfloat16") {
    s.export_dtype = at::kBFloat16;
  } else if (dtype != "float32") {
    return wanted("export_dtype", dtype, "float32 or bfloat16");
  }
  return s;
}

// Of a process: ranks that are threads share it.
class Signals {
 public:
  absl::StatusOr<const StopSignals*> get() {
    const std::lock_guard lock(mutex_);
    if (signals_ == nullptr) {
      absl::StatusOr<std::unique_ptr<StopSignals>> made = StopSignals::create();
      if (!made.ok()) return made.status();
      signals_ = *std::move(made);
    }
    return signals_.get();
  }

 private:
  std::mutex mutex_;
  std::unique_ptr<StopSignals> signals_;
};

// A model that lies as --parallel says, with its optimizer.
class Trainee {
 public:
  Trainee(const Settings& settings, const nn::LlamaOptions& options, const MeshPtr& mesh)
      : mesh_(mesh), model_(deferred_init([&] { return nn::Llama(options); })) {
    ShardingPlan plan;
    if (settings.parallel == "fsdp+tp") plan = nn::llama_plan(options, mesh->mesh());
    parallelize_module(*model_, mesh, plan);
    materialize(*model_, {.seed = settings.seed});
    if (settings.parallel == "ddp") {
      sync_.reset(new GradSync(distributed_data_parallel(*model_, mesh, {.mesh_dim = "dp"})));
    }
    if (settings.parallel.starts_with("fsdp")) {
      fully_shard(*model_, mesh, {.mesh_dim = "dp", .units = {"model.layers.*"}});
    }
    const AdamWOptions adamw = {.lr = settings.lr, .weight_decay = settings.weight_decay};
    const std::vector<at::Tensor> parameters = unique_parameters(*model_);
    if (settings.parallel == "zero1") {
      zero_.emplace(parameters, adamw, ZeroOptions{.mesh_dim = "dp"});
    } else {
      fused_.emplace(parameters, adamw);
    }
  }

  nn::Llama& model() { return model_; }
  Trainer trainer(TrainerOptions options) {
    options.sync = sync_.get();
    if (zero_.has_value()) return {*model_, *zero_, mesh_, options};
    return {*model_, *fused_, mesh_, options};
  }
  at::Tensor loss(const TokenBatch& batch) {
    const at::Tensor logits = model_(batch.tokens);
    return at::cross_entropy_loss(logits.flatten(0, 1), batch.targets.flatten());
  }

 private:
  const MeshPtr mesh_;
  nn::Llama model_;
  std::unique_ptr<GradSync> sync_;
  std::optional<ZeroRedundancyOptimizer<FusedOptimizer>> zero_;
  std::optional<FusedOptimizer> fused_;
};

// Lines of JSON on stdout.
class StandardOutput final : public MetricsWriter {
 public:
  using MetricsWriter::write;
  absl::Status write(int64_t step, absl::Span<const Metric> metrics, absl::Time) override {
    nlohmann::ordered_json line = {{"step", step}};
    for (const Metric& metric : metrics) line[metric.name] = metric.value;
    std::cout << line << std::endl;
    return absl::OkStatus();
  }
  absl::Status flush() override { return absl::OkStatus(); }
};

absl::StatusOr<std::vector<TokenFile>> open_tokens(const Settings& settings,
                                                   const nn::LlamaOptions& options) {
  std::vector<TokenFile> files;
  for (const std::string& path : settings.tokens) {
    absl::StatusOr<TokenFile> file = TokenFile::open(path);
    if (!file.ok()) return file.status();
    if (file->vocab_size() > options.vocab_size) {
      return absl::InvalidArgumentError(absl::StrCat("'", path, "' has tokens of a vocabulary of ",
                                                     file->vocab_size(), "; the model has ",
                                                     options.vocab_size));
    }
    files.push_back(*std::move(file));
  }
  return files;
}

// The first rank writes what another program can compute as well. Collective.
void write_logits(const std::string& path, Trainee& trainee, int64_t vocab_size, int64_t seq,
                  const MeshPtr& mesh) {
  const c10::AutoGradMode no_grad(false);
  trainee.model()->eval();
  const at::Tensor tokens = (at::arange(seq, at::kLong) * 7).remainder(vocab_size).unsqueeze(0);
  const at::Tensor logits = full_tensor(trainee.model()(
      distribute_tensor(tokens, mesh, NamedPlacements(), {.source = std::nullopt})));
  if (mesh->rank().value == 0) {
    write_safetensors(path, {{"tokens", tokens}, {"logits", logits.contiguous()}});
  }
}

absl::Status run_rank(const Settings& settings, World& world, Activity& activity,
                      Signals& signals) {
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  at::set_num_threads(std::max(1, cores / world.size()));
  const bool is_first = world.rank() == 0;

  activity.set("reading the configuration and the token files");
  const absl::StatusOr<std::string> config = read_pretrained_config(settings.model);
  if (!config.ok()) return config.status();
  const absl::StatusOr<nn::LlamaOptions> options = nn::LlamaOptions::from_json(*config);
  if (!options.ok()) return options.status();
  if (settings.seq > options->max_position_embeddings) {
    return wanted("seq", absl::StrCat(settings.seq),
                  absl::StrCat(options->max_position_embeddings, " at most, the model's length"));
  }
  const absl::StatusOr<std::vector<TokenFile>> files = open_tokens(settings, *options);
  if (!files.ok()) return files.status();
  absl::Status status = train_gpt::check_same_everywhere(*world.comm(), settings.to_string(),
                                                         *config, "configurations", settings.model);
  if (!status.ok()) return status;
  const absl::StatusOr<MeshPtr> made = init_device_mesh(world, settings.mesh);
  if (!made.ok()) return made.status();
  const MeshPtr& mesh = *made;
  manual_seed(mesh, settings.seed);

  activity.set("making the model");
  Trainee trainee(settings, *options, mesh);
  TokenLoader loader(*files, {.seq = settings.seq, .batch = settings.batch, .seed = settings.seed},
                     mesh, {{"dp", Shard(0)}});
  const absl::StatusOr<const StopSignals*> stop_signals = signals.get();
  if (!stop_signals.ok()) return stop_signals.status();
  int64_t parameters = 0;  // that a token is multiplied by
  for (const at::Tensor& parameter : unique_parameters(*trainee.model())) {
    parameters += parameter.numel();
  }
  // An embedding is looked up; a tied one is the head's product, too.
  if (!options->tie_word_embeddings) parameters -= options->vocab_size * options->hidden_size;
  std::ostream& out = settings.json ? std::cerr : std::cout;
  StandardOutput lines;
  int64_t steps_done = 0;
  std::function<void()> stop;
  TrainerOptions training = {
      .steps = settings.steps,
      .clip_norm = settings.clip,
      .schedule = Schedule::cosine(settings.steps).warmup(settings.warmup).floor(0.1),
      .checkpoints = settings.checkpoints,
      .save_every = settings.save_every,
      .keep_last = settings.keep_last,
      .resume = settings.resume ? Resume::kNewest : Resume::kNo,
      .log = absl::GetFlag(FLAGS_log),
      .events = absl::GetFlag(FLAGS_events),
      .progress = &out,
      .is_terminal = ::isatty(settings.json ? STDERR_FILENO : STDOUT_FILENO) != 0,
      .throughput = {.tokens_per_step = settings.batch * settings.seq,
                     .flops_per_token = transformer_flops_per_token(
                         {.parameters = parameters,
                          .layers = options->num_hidden_layers,
                          .dim = options->decoder().attention.head_size() *
                                 options->num_attention_heads,
                          .seq = settings.seq,
                          .causal = true})},
      .signals = *stop_signals};
  if (settings.json) training.writers.push_back(&lines);
  training.step_done = [&](const TrainerStep& done) {
    activity.set(done.step < settings.steps
                     ? absl::StrCat("step ", done.step + 1, " of ", settings.steps)
                     : "the last checkpoint");
    if (++steps_done == settings.stop_after) stop();
  };
  Trainer trainer = trainee.trainer(training);
  stop = [&] { trainer.request_stop(); };
  // So that `shardweave ckpt export` knows which model it is.
  trainer.state().set_value("config", *config);
  if (!settings.resume) {
    activity.set("loading the model");
    load_pretrained(settings.model, *trainee.model(), mesh);
  }
  activity.set("the first step, and what comes before it");
  const TrainerResult result =
      trainer.run(loader, [&](const TokenBatch& batch) { return trainee.loss(batch); });
  if (result.is_exhausted) return absl::OutOfRangeError("the token files are at their end");
  if (!settings.export_to.empty() && result.last_step >= settings.steps) {
    activity.set("exporting the model");
    save_pretrained(settings.export_to, *trainee.model(), *config, mesh,
                    {.dtype = settings.export_dtype});
    if (is_first) out << "the model is in " << settings.export_to << std::endl;
  }
  if (const std::string path = absl::GetFlag(FLAGS_logits); !path.empty()) {
    write_logits(path, trainee, options->vocab_size, settings.seq, mesh);
  }
  if (is_first && settings.json) {
    std::cout << nlohmann::ordered_json({{"ranks", world.size()},
                                         {"first_step", result.first_step},
                                         {"last_step", result.last_step},
                                         {"stopped", result.is_stopped}})
              << std::endl;
  }
  return absl::OkStatus();
}

}  // namespace

int main(int argc, char** argv) {
  constexpr char kName[] = "finetune_llama";
  absl::SetProgramUsageMessage(
      "Trains a Llama of transformers' on token files, sharded over ranks.");
  const std::vector<char*> rest = absl::ParseCommandLine(argc, argv);
  train_gpt::enter_working_directory();
  absl::StatusOr<Settings> settings = settings_from_flags();
  if (rest.size() > 1) {
    settings = absl::InvalidArgumentError(
        absl::StrCat("'", rest[1], "': wanted flags only; --help lists them"));
  }
  if (!settings.ok()) return train_gpt::fail(kName, settings.status(), train_gpt::kUsage);
  Signals signals;
  return train_gpt::run_on_ranks({.name = kName,
                                  .num_ranks = train_gpt::num_ranks(settings->mesh),
                                  .backend = absl::GetFlag(FLAGS_backend),
                                  .timeout = absl::GetFlag(FLAGS_timeout)},
                                 argc, argv, [&](World& world, Activity& activity) {
                                   return train_gpt::run_guarded(activity, [&] {
                                     return run_rank(*settings, world, activity, signals);
                                   });
                                 });
}
