#include "shardweave/modules/train/trainer.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "c10/core/GradMode.h"
#include "c10/util/Exception.h"
#include "nlohmann/json.hpp"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/clip_grad_norm.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/dtensor/random.h"
#include "shardweave/modules/checkpoint/agree.h"
#include "shardweave/modules/checkpoint/default_generator.h"
#include "shardweave/modules/checkpoint/loader_position.h"
#include "shardweave/modules/checkpoint/snapshot.h"
#include "shardweave/modules/fully_shard.h"
#include "shardweave/modules/train/event_file.h"
#include "shardweave/tools/progress/progress_bar.h"
#include "torch/nn/module.h"

namespace shardweave {

using checkpoint_internal::agree;
using checkpoint_internal::exchange;
using checkpoint_internal::from_first;

namespace trainer_internal {
namespace {

template <typename Optimizer>
AnyOptimizer basic_optimizer(Optimizer& optimizer) {
  return {.step = {},
          .zero_grad = [&optimizer] { optimizer.zero_grad(); },
          .lr = {},
          .no_sync = {},
          .add_to =
              [&optimizer](StateDict& state, const torch::nn::Module& module) {
                add_optimizer(state, optimizer, module);
              },
          .schedule =
              [&optimizer](std::function<double(int64_t)> schedule) {
                return std::make_unique<Scheduler>(optimizer, std::move(schedule));
              }};
}

}  // namespace

AnyOptimizer any_optimizer(FusedOptimizer& optimizer) {
  AnyOptimizer any = basic_optimizer(optimizer);
  any.step = [&optimizer](std::source_location where) { optimizer.step(where); };
  any.lr = [&optimizer] { return optimizer.lr(); };
  return any;
}

AnyOptimizer any_optimizer(torch::optim::Optimizer& optimizer) {
  AnyOptimizer any = basic_optimizer(optimizer);
  any.step = [&optimizer](std::source_location) { optimizer.step(); };
  any.lr = [&optimizer] { return optimizer.param_groups().front().options().get_lr(); };
  return any;
}

}  // namespace trainer_internal

namespace {

constexpr char kTrainer[] = "Trainer";

[[noreturn]] void refuse(std::string what) {
  throw Error(kTrainer, absl::InvalidArgumentError(std::move(what)));
}

void check(const torch::nn::Module& module, const TrainerOptions& options, bool is_alone) {
  const auto at_least = [](const char* name, int64_t value, int64_t least) {
    if (value < least) refuse(str_cat(name, " is ", value, "; wanted ", least, " or more"));
  };
  at_least("steps", options.steps, 1);
  at_least("accumulate", options.accumulate, 1);
  at_least("save_every", options.save_every, 0);
  at_least("keep_last", options.keep_last, 0);
  at_least("evaluate_every", options.evaluate_every, 0);
  at_least("stop.every", options.stop.every, 1);
  at_least("throughput.tokens_per_step", options.throughput.tokens_per_step, 1);
  if (!(options.clip_norm > 0)) {
    refuse(str_cat("clip_norm is ", options.clip_norm, "; wanted a number above 0"));
  }
  if (options.save_timeout <= absl::ZeroDuration()) {
    refuse(str_cat("save_timeout is ", absl::FormatDuration(options.save_timeout),
                   "; wanted more than 0"));
  }
  if (options.schedule == nullptr) refuse("schedule is empty; wanted a function of the step");
  if (options.checkpoints.empty() && (options.save_every > 0 || options.resume != Resume::kNo)) {
    refuse("checkpoints is \"\"; wanted a directory for save_every and resume");
  }
  if (options.evaluate_every > 0 && options.evaluate == nullptr) {
    refuse("evaluate is empty; wanted a function for evaluate_every");
  }
  for (const MetricsWriter* writer : options.writers) {
    if (writer == nullptr) refuse("a writer is null");
  }
  const std::vector<at::Tensor> parameters = module.parameters();
  if (!is_alone && std::none_of(parameters.begin(), parameters.end(),
                                [](const at::Tensor& p) { return is_dtensor(p); })) {
    refuse(
        "no parameter of the module is a DTensor; wanted a module that "
        "distributed_data_parallel(), "
        "parallelize_module() or fully_shard() has distributed");
  }
}

// What has to be the same on all ranks.
std::string text_of(const TrainerOptions& options) {
  const auto exact = [](double number) { return absl::StrFormat("%.17g", number); };
  return str_cat(
      "steps ", options.steps, ", accumulate ", options.accumulate, ", clip_norm ",
      exact(options.clip_norm), ", allow_nonfinite ", options.allow_nonfinite, ", schedule from ",
      exact(options.schedule(0)), " by ", exact(options.schedule(options.steps / 2)), " to ",
      exact(options.schedule(options.steps - 1)), ", scaler ", options.scaler != nullptr, ", sync ",
      options.sync != nullptr, ", fully_shard_no_sync ", options.fully_shard_no_sync,
      ", checkpoints '", options.checkpoints, "', save_every ", options.save_every, ", keep_last ",
      options.keep_last, ", copy_beside_training ", options.copy_beside_training, ", resume ",
      static_cast<int>(options.resume), ", evaluate ", options.evaluate != nullptr,
      ", evaluate_every ", options.evaluate_every, ", step_done ", options.step_done != nullptr,
      ", scale_changed ", options.scale_changed != nullptr, ", stop.every ", options.stop.every);
}

std::shared_ptr<Communicator> whole_mesh(const MeshPtr& mesh) {
  std::vector<int> dims(static_cast<size_t>(mesh->mesh().ndim()));
  for (size_t i = 0; i < dims.size(); ++i) dims[i] = static_cast<int>(i);
  return value_or_throw(mesh->communicator(dims));
}

void add_scaler(StateDict& state, GradScaler& scaler) {
  const auto check = [](const std::string& text) -> absl::Status {
    const auto read = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
    if (read.is_object() && read.contains("scale") && read["scale"].is_number() &&
        read["scale"].get<double>() > 0 && std::isfinite(read["scale"].get<double>()) &&
        read.contains("growth_tracker") && read["growth_tracker"].is_number_integer() &&
        read["growth_tracker"].get<int64_t>() >= 0) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(
        str_cat("the value 'scaler' is ", text,
                "; wanted {\"scale\": above 0, \"growth_tracker\": 0 or more}"));
  };
  state.add_value("scaler", {[&scaler] {
                               return nlohmann::json({{"scale", scaler.scale()},
                                                      {"growth_tracker", scaler.growth_tracker()}})
                                   .dump();
                             },
                             check,
                             [&scaler](const std::string& text) {
                               const auto read = nlohmann::json::parse(text);
                               scaler.set_state(read["scale"].get<double>(),
                                                read["growth_tracker"].get<int64_t>());
                             }});
}

// Checkpoints of before it was counted lack it.
void add_batches(StateDict& state, int64_t& batches) {
  static constexpr char kName[] = "trainer_batches";
  state.add_value(
      kName,
      {.get = [&batches] { return std::to_string(batches); },
       .check = [](const std::string& text) -> absl::Status {
         int64_t read = 0;
         if (absl::SimpleAtoi(text, &read) && read >= 0) return absl::OkStatus();
         return absl::InvalidArgumentError(
             str_cat("the value '", kName, "' is ", text, "; wanted a whole number, 0 or more"));
       },
       .set = [&batches](const std::string& text) { (void)absl::SimpleAtoi(text, &batches); },
       .is_optional = true});
}

// Modules in the mode that they were in, whatever they are switched to meanwhile.
class KeepModes {
 public:
  explicit KeepModes(torch::nn::Module& module) {
    modes_.emplace_back(&module, module.is_training());
    for (const auto& one : module.modules(/*include_self=*/false)) {
      modes_.emplace_back(one.get(), one->is_training());
    }
  }
  // A module switches those in it as well: they come after it.
  ~KeepModes() {
    for (const auto& [module, is_training] : modes_) module->train(is_training);
  }
  KeepModes(const KeepModes&) = delete;
  KeepModes& operator=(const KeepModes&) = delete;

 private:
  std::vector<std::pair<torch::nn::Module*, bool>> modes_;
};

// What plain tensors draw afterwards is what they would have drawn before.
class KeepDefaultGenerator {
 public:
  explicit KeepDefaultGenerator(const MeshPtr& mesh)
      : state_(checkpoint_internal::default_generator_state(mesh)) {}
  ~KeepDefaultGenerator() { checkpoint_internal::set_default_generator_state(state_); }
  KeepDefaultGenerator(const KeepDefaultGenerator&) = delete;
  KeepDefaultGenerator& operator=(const KeepDefaultGenerator&) = delete;

 private:
  const at::Tensor state_;
};

}  // namespace

struct Trainer::Parts {
  torch::nn::Module& module;
  const trainer_internal::AnyOptimizer optimizer;
  const MeshPtr mesh;
  const TrainerOptions options;
  const std::shared_ptr<Communicator> comm;
  const std::vector<at::Tensor> parameters;
  const std::vector<at::Tensor> buffers;  // that forwards may change
  std::unique_ptr<Scheduler> scheduler = {};
  StateDict state = {};
  TokenLoader* loader = nullptr;  // whose position is in the state
  std::optional<Checkpointer> checkpointer = {};
  int64_t steps_done = 0;
  int64_t batches_done = 0;
  int64_t saved = 0;  // the step of the last checkpoint
  bool has_run = false;
  std::atomic<bool> is_stop_requested = false;

  bool is_first() const { return comm->rank() == 0; }
};

// One run() of it.
class Trainer::Run {
 public:
  Run(Parts& parts, std::source_location where)
      : parts_(parts),
        options_(parts.options),
        where_(where),
        stop_(parts.comm, parts.options.signals, parts.options.stop) {}

  TrainerResult run(const std::function<std::optional<at::Tensor>(int64_t)>& loss) {
    begin();
    while (parts_.steps_done < options_.steps && !is_stopping_) {
      std::optional<TrainerStep> done = take_step(loss);
      if (!done.has_value()) {
        result_.is_exhausted = true;
        break;
      }
      after_step(*done);
    }
    end();
    return result_;
  }

 private:
  void begin() {
    if (!parts_.has_run && parts_.checkpointer.has_value()) first_checkpoint();
    parts_.has_run = true;
    result_.first_step = parts_.steps_done;
    // A schedule is asked for steps that are taken, and no others.
    parts_.scheduler->set_step(std::min(parts_.steps_done, options_.steps - 1));
    const absl::Status opened = agree(*parts_.comm, open_writers(), options_.save_timeout);
    if (!opened.ok()) throw Error(kTrainer, opened);
    const int64_t tokens = options_.throughput.tokens_per_step;
    bar_.emplace(
        ProgressBarOptions{.title = "training",
                           .steps = std::max<int64_t>(1, options_.steps - result_.first_step),
                           .unit = tokens > 1 ? "tokens" : "steps",
                           .per_step = tokens,
                           .out = parts_.is_first() ? options_.progress : nullptr,
                           .terminal = options_.is_terminal});
    throughput_.emplace(options_.throughput);
  }

  void first_checkpoint() {
    std::optional<Newest> there = newest();
    // Before anything is loaded: or hours later there is nowhere to save; and a job that is started again
    // while the one before still saves would load what is not the newest for long. Nothing is made for a run
    // that has nothing to do, nor where load() says that there is nothing.
    const bool is_lost = options_.resume == Resume::kNewest && !there.has_value();
    if (!is_lost && (!there.has_value() || there->step < options_.steps)) {
      parts_.checkpointer->open();
      there = newest();
    }
    if (options_.resume == Resume::kNo && there.has_value()) {
      throw Error(kTrainer,
                  absl::FailedPreconditionError(str_cat(
                      "'", options_.checkpoints,
                      "' has checkpoints, and resume is kNo; wanted another directory, or a "
                      "run that goes on")));
    }
    if (options_.resume == Resume::kNewest ||
        (options_.resume == Resume::kIfThere && there.has_value())) {
      // Where ranks read parts of what others have saved, older checkpoints have no checksum of what they read.
      const LoadOptions options = {.verify = there.has_value() && there->wants_verifying};
      parts_.batches_done = -1;
      parts_.steps_done = parts_.checkpointer->load(parts_.state, options, where_).step;
      if (parts_.batches_done < 0) {
        parts_.batches_done = parts_.steps_done * options_.accumulate;
      }
      parts_.saved = parts_.steps_done;
    }
  }

  // Of the newest checkpoint, as the first rank sees it. Where pieces are read in parts nothing but their sums is
  // compared.
  struct Newest {
    int64_t step = 0;
    bool wants_verifying = false;  // it is of another mesh, and has no sums
  };
  std::optional<Newest> newest() const {
    const auto answer = from_first(
        *parts_.comm,
        [&]() -> absl::StatusOr<std::string> {
          const absl::StatusOr<std::string> found = find_checkpoint(options_.checkpoints);
          if (absl::IsNotFound(found.status())) return "";
          if (!found.ok()) return found.status();
          const absl::StatusOr<Manifest> manifest = read_manifest(*found);
          if (!manifest.ok()) {
            return checkpoint_internal::with_way_on(manifest.status(), *found,
                                                    *posix_file_system());
          }
          bool is_compared = manifest->mesh == checkpoint_internal::mesh_text(parts_.mesh->mesh());
          if (!is_compared) {
            is_compared = std::all_of(
                manifest->tensors.begin(), manifest->tensors.end(), [](const auto& tensor) {
                  const std::vector<SavedPiece>& pieces = tensor.second.pieces;
                  return std::all_of(pieces.begin(), pieces.end(),
                                     [](const SavedPiece& p) { return p.sum.has_value(); });
                });
          }
          return str_cat(is_compared ? "=" : "!", manifest->step);
        },
        options_.save_timeout);
    const std::string text = value_or_throw(answer);
    if (text.empty()) return std::nullopt;
    Newest its = {.wants_verifying = text[0] == '!'};
    (void)absl::SimpleAtoi(text.substr(1), &its.step);
    return its;
  }

  absl::Status open_writers() {
    if (!parts_.is_first()) return absl::OkStatus();
    if (!options_.log.empty()) {
      absl::StatusOr<JsonLines> log = JsonLines::open(options_.log);
      if (!log.ok()) return log.status();
      own_writers_.push_back(std::make_unique<JsonLines>(*std::move(log)));
    }
    if (!options_.events.empty()) {
      absl::StatusOr<EventFile> events = EventFile::create(options_.events, result_.first_step + 1);
      if (!events.ok()) return events.status();
      own_writers_.push_back(std::make_unique<EventFile>(*std::move(events)));
    }
    for (const auto& writer : own_writers_) writers_.push_back(writer.get());
    writers_.insert(writers_.end(), options_.writers.begin(), options_.writers.end());
    return absl::OkStatus();
  }

  // Nothing: there are no batches any more.
  std::optional<TrainerStep> take_step(
      const std::function<std::optional<at::Tensor>(int64_t)>& loss) {
    Before before;
    if (options_.accumulate > 1) before = now();
    at::Tensor sum;
    for (int64_t i = 0; i < options_.accumulate; ++i) {
      const bool is_last = i + 1 == options_.accumulate;
      const std::optional<at::Tensor> value = backward_of(loss, parts_.batches_done + i, is_last);
      if (!value.has_value()) {
        if (i > 0) leave_out(before);
        return std::nullopt;
      }
      // Of 16 bits a sum of many would stand still.
      const at::Tensor one = value->to(at::promote_types(value->scalar_type(), at::kFloat));
      sum = sum.defined() ? sum + one : one;
    }
    finish_grad_sync(parts_.module, where_);
    TrainerStep done{
        .step = parts_.steps_done + 1,
        .loss = sum.item<double>() / static_cast<double>(options_.accumulate),
    };
    done.metrics = {{"loss", done.loss}};
    update(done);
    zero_grad();
    done.metrics.push_back({"lr", parts_.optimizer.lr()});
    if (done.step < options_.steps) parts_.scheduler->step();
    return done;
  }

  // What forwards change.
  struct Before {
    PhiloxState random;
    at::Tensor own_random;  // of plain tensors
    std::string position;   // of the loader
    std::vector<at::Tensor> buffers;
  };
  Before now() const {
    const c10::AutoGradMode no_grad(false);
    Before before = {.random = random_state(parts_.mesh),
                     .own_random = checkpoint_internal::default_generator_state(parts_.mesh),
                     .position = parts_.loader != nullptr ? parts_.loader->position() : ""};
    for (const at::Tensor& buffer : parts_.buffers) before.buffers.push_back(buffer.clone());
    return before;
  }

  // As if the last batches had not been.
  void leave_out(const Before& before) {
    // A gradient hook is not to learn of them either.
    if (options_.sync != nullptr) {
      options_.sync->discard();
    } else {
      finish_grad_sync(parts_.module, where_);
    }
    zero_grad();
    set_random_state(parts_.mesh, before.random);
    checkpoint_internal::set_default_generator_state(before.own_random);
    if (parts_.loader != nullptr) parts_.loader->set_position(before.position, where_);
    const c10::AutoGradMode no_grad(false);
    for (size_t i = 0; i < before.buffers.size(); ++i) {
      at::Tensor buffer = parts_.buffers[i];
      if (buffer.sizes() == before.buffers[i].sizes()) buffer.copy_(before.buffers[i]);
    }
  }

  // Detached.
  std::optional<at::Tensor> backward_of(
      const std::function<std::optional<at::Tensor>(int64_t)>& loss, int64_t batch, bool is_last) {
    std::shared_ptr<void> optimizer_waits;
    std::optional<GradSync::NoSync> sync_waits;
    if (!is_last && parts_.optimizer.no_sync != nullptr) {
      optimizer_waits = parts_.optimizer.no_sync();
    }
    if (!is_last && options_.sync != nullptr) sync_waits.emplace(*options_.sync);
    std::optional<FullyShardNoSync> units_wait;
    if (!is_last && options_.fully_shard_no_sync) units_wait.emplace(parts_.mesh);
    const std::optional<at::Tensor> value = loss(batch);
    if (!value.has_value()) return std::nullopt;
    if (!value->defined() || value->numel() != 1) {
      refuse(value->defined()
                 ? str_cat("the loss has ", value->numel(), " elements; wanted a number")
                 : std::string("the loss is undefined"));
    }
    at::Tensor part = *value;
    if (options_.accumulate > 1) part = part / static_cast<double>(options_.accumulate);
    if (options_.scaler != nullptr) part = options_.scaler->scale(part);
    part.backward();
    return value->detach();
  }

  // With the gradients that are there; or not, if a scaler says so.
  void update(TrainerStep& done) {
    if (parts_.checkpointer.has_value()) parts_.checkpointer->wait_for_copy();
    GradScaler* const scaler = options_.scaler;
    if (scaler != nullptr) done.metrics.push_back({"loss_scale", scaler->scale()});
    done.is_skipped = scaler != nullptr && !scaler->unscale(parts_.parameters, where_);
    if (done.is_skipped) {
      done.metrics.push_back({"skipped", 1});
    } else {
      done.grad_norm = clipped_norm();
      done.metrics.push_back({"grad_norm", done.grad_norm});
      parts_.optimizer.step(where_);
    }
    if (scaler == nullptr) return;
    const double factor = scaler->update();
    if (options_.scale_changed != nullptr && factor != 1) options_.scale_changed(factor);
  }

  double clipped_norm() const {
    const bool is_error = !options_.allow_nonfinite && options_.scaler == nullptr;
    try {
      return clip_grad_norm(parts_.parameters, options_.clip_norm, 2, is_error, where_);
    } catch (const Error& error) {
      if (!absl::IsOutOfRange(error.status())) throw;
      throw Error(kTrainer, absl::OutOfRangeError(str_cat("in step ", parts_.steps_done + 1, ": ",
                                                          std::string(error.status().message()))));
    }
  }

  // Also of parameters that the optimizer does not have.
  void zero_grad() {
    parts_.optimizer.zero_grad();
    parts_.module.zero_grad();
  }

  void after_step(TrainerStep& done) {
    const int64_t step = ++parts_.steps_done;
    parts_.batches_done += options_.accumulate;
    throughput_->step_done();
    for (const Metric& metric : throughput_->since_last().metrics()) done.metrics.push_back(metric);
    const bool is_last = step == options_.steps;
    if (is_last || (options_.evaluate_every > 0 && step % options_.evaluate_every == 0)) {
      is_stopping_ = stop_here();  // who is told to end has no time for an evaluation
      if (!is_stopping_ || is_last) evaluate(done.metrics);
    }
    if (options_.step_done != nullptr) {
      options_.step_done(done);
      parts_.scheduler->take_up_groups();
    }
    is_stopping_ = is_stopping_ || stop_here();
    write_metrics(step, done.metrics);
    last_metrics_ = done.metrics;
    bar_->step_done(absl::StrFormat("loss %.3f", done.loss));
    if (options_.save_every > 0 && step % options_.save_every == 0) save();
    throughput_->leave_out();
  }

  bool stop_here() {
    if (parts_.is_stop_requested || !metrics_status_.ok()) stop_.request();
    return value_or_throw(stop_.step_done());
  }

  void evaluate(std::vector<Metric>& metrics) {
    if (options_.evaluate == nullptr) return;
    const c10::AutoGradMode no_grad(false);
    const KeepModes modes(parts_.module);
    const RandomStateScope same(parts_.mesh, random_state(parts_.mesh));
    const KeepDefaultGenerator same_of_plain(parts_.mesh);
    parts_.module.eval();
    for (Metric& metric : options_.evaluate()) {
      const auto has_its_name = [&](const Metric& other) { return other.name == metric.name; };
      if (metric.name == "step" || metric.name == "time" ||
          std::any_of(metrics.begin(), metrics.end(), has_its_name)) {
        refuse(str_cat("evaluate has given a metric '", metric.name,
                       "', which there is already; wanted another name"));
      }
      metrics.push_back(std::move(metric));
    }
    evaluated_ = parts_.steps_done;
  }

  void write_metrics(int64_t step, const std::vector<Metric>& metrics) {
    for (MetricsWriter* writer : writers_) {
      if (metrics_status_.ok()) metrics_status_ = writer->write(step, metrics);
    }
  }

  // The error of the save that was under way, the same question on all ranks.
  absl::Status settled() const {
    const absl::Status mine = checkpoint_internal::status_of([&] {
      parts_.checkpointer->wait();
      return absl::OkStatus();
    });
    const absl::Status all =
        agree(*parts_.comm, mine, std::max(options_.save_timeout, absl::Hours(1)));
    return mine.ok() ? all : mine;
  }

  void warn_of(const absl::Status& not_saved) const {
    if (not_saved.ok() || !parts_.is_first()) return;
    TORCH_WARN("a checkpoint was not saved: ", std::string(not_saved.message()));
  }

  // `is_last`: nothing is lost any more by trying, whatever became of the one before.
  void save(bool is_last = false) {
    const absl::Status before = settled();
    // What time does not mend ends the run: this step is lost, where the run would go on for days with
    // nothing saved, unheard, and lose them all. A full disk may have room again.
    const bool stays = absl::IsFailedPrecondition(before) || absl::IsPermissionDenied(before) ||
                       absl::IsAlreadyExists(before);
    if (stays && !is_last) throw Error(kTrainer, before);
    warn_of(before);
    parts_.checkpointer->save_async(parts_.steps_done, parts_.state, where_);
    parts_.saved = parts_.steps_done;
  }

  // That of the last step. Once more if it fails, for there is no later one.
  void last_save() {
    if (parts_.saved != parts_.steps_done) save(/*is_last=*/true);
    const absl::Status failed = settled();
    if (failed.ok()) return;
    warn_of(failed);
    try {
      parts_.checkpointer->save(parts_.steps_done, parts_.state, where_);
    } catch (const Error& error) {
      // That it is there is what the first time has left: of which it said more.
      if (absl::IsAlreadyExists(error.status())) throw Error(kTrainer, failed);
      throw;
    }
  }

  void end() {
    result_.last_step = parts_.steps_done;
    result_.is_stopped = is_stopping_ && parts_.steps_done < options_.steps;
    result_.signal = stop_.signal();
    parts_.is_stop_requested = false;
    if (parts_.checkpointer.has_value()) last_save();
    if (result_.is_exhausted && parts_.steps_done > result_.first_step &&
        evaluated_ != parts_.steps_done) {
      // Of a step that is written again the last line counts.
      std::vector<Metric> metrics = last_metrics_;
      evaluate(metrics);
      if (metrics.size() > last_metrics_.size()) write_metrics(parts_.steps_done, metrics);
    }
    for (MetricsWriter* writer : writers_) {
      if (metrics_status_.ok()) metrics_status_ = writer->flush();
    }
    const absl::Status status = agree(*parts_.comm, metrics_status_, options_.save_timeout);
    if (!status.ok()) throw Error(kTrainer, status);
  }

  Parts& parts_;
  const TrainerOptions& options_;
  const std::source_location where_;
  GracefulStop stop_;
  std::vector<std::unique_ptr<MetricsWriter>> own_writers_;
  std::vector<MetricsWriter*> writers_;  // of the first rank
  std::vector<Metric> last_metrics_;     // of the last step
  absl::Status metrics_status_;          // the first error of one of them
  std::optional<ProgressBar> bar_;
  std::optional<Throughput> throughput_;
  TrainerResult result_;
  int64_t evaluated_ = -1;  // the step of the last evaluation
  bool is_stopping_ = false;
};

namespace {

// All but those that are made of the module's options, and large ones (frozen weights, caches), of which
// a copy in every step would be another model.
std::vector<at::Tensor> changing_buffers(const torch::nn::Module& module) {
  constexpr int64_t kMostOfBuffer = int64_t{1} << 22;
  const std::set<std::string> fixed = checkpoint_internal::non_persistent_fqns(module);
  std::vector<at::Tensor> buffers;
  for (const auto& item : module.named_buffers()) {
    const at::Tensor& buffer = item.value();
    const bool is_small = buffer.defined() && buffer.numel() < kMostOfBuffer;
    if (is_small && !fixed.contains(item.key())) buffers.push_back(buffer);
  }
  return unique_parameters(buffers);
}

}  // namespace

Trainer::Trainer(torch::nn::Module& module, trainer_internal::AnyOptimizer optimizer,
                 const MeshPtr& mesh, const TrainerOptions& options) {
  if (mesh == nullptr) refuse("the mesh is null");
  const std::shared_ptr<Communicator> comm = whole_mesh(mesh);
  std::string text;
  const absl::Status mine = checkpoint_internal::status_of([&] {
    check(module, options, comm->size() == 1);
    if (options.fully_shard_no_sync) const FullyShardNoSync of_units(mesh);  // or it says why not
    text = text_of(options);
    return absl::OkStatus();
  });
  constexpr absl::Duration kTimeout = absl::Minutes(5);
  const absl::Status status = agree(*comm, mine, kTimeout);
  if (!status.ok()) throw Error(kTrainer, status);
  const auto texts = value_or_throw(exchange(*comm, text, kTimeout));
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    if (texts[rank] != texts[0]) {
      refuse(str_cat("the options differ between ranks: rank 0 has ", texts[0], "; rank ", rank,
                     " has ", texts[rank]));
    }
  }
  parts_.reset(new Parts{.module = module,
                         .optimizer = std::move(optimizer),
                         .mesh = mesh,
                         .options = options,
                         .comm = comm,
                         .parameters = unique_parameters(module),
                         .buffers = changing_buffers(module)});
  add_module(parts_->state, module);
  parts_->optimizer.add_to(parts_->state, module);
  add_random_state(parts_->state, mesh);
  if (options.scaler != nullptr) add_scaler(parts_->state, *options.scaler);
  add_batches(parts_->state, parts_->batches_done);
  if (!options.checkpoints.empty()) {
    parts_->checkpointer.emplace(
        options.checkpoints, mesh,
        CheckpointOptions{.keep_last = options.keep_last,
                          .copy_beside_training = options.copy_beside_training,
                          .timeout = options.save_timeout});
  }
  // Last: it sets the learning rates of the first step.
  parts_->scheduler = parts_->optimizer.schedule(options.schedule);
}

Trainer::~Trainer() = default;

StateDict& Trainer::state() {
  return parts_->state;
}

TrainerResult Trainer::run(const std::function<std::optional<at::Tensor>(int64_t)>& loss,
                           std::source_location where) {
  return Run(*parts_, where).run(loss);
}

TrainerResult Trainer::run(TokenLoader& loader,
                           const std::function<at::Tensor(const TokenBatch&)>& loss,
                           std::source_location where) {
  if (parts_->loader != &loader) {
    if (parts_->loader != nullptr) refuse("the loader is another one than that of the run before");
    add_loader_position(parts_->state, loader);
    parts_->loader = &loader;
  }
  return run(
      [&](int64_t) -> std::optional<at::Tensor> {
        const std::optional<TokenBatch> batch = loader.next();
        if (!batch.has_value()) return std::nullopt;
        return loss(*batch);
      },
      where);
}

void Trainer::request_stop() {
  parts_->is_stop_requested = true;
}

}  // namespace shardweave
