#include "shardweave/modules/train/trainer.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"
#include "c10/core/GradMode.h"
#include "nlohmann/json.hpp"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/clip_grad_norm.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/modules/checkpoint/agree.h"
#include "shardweave/modules/checkpoint/loader_position.h"
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
AnyOptimizer made_of(Optimizer& optimizer) {
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
  AnyOptimizer any = made_of(optimizer);
  any.step = [&optimizer](std::source_location where) { optimizer.step(where); };
  any.lr = [&optimizer] { return optimizer.lr(); };
  return any;
}

AnyOptimizer any_optimizer(torch::optim::Optimizer& optimizer) {
  AnyOptimizer any = made_of(optimizer);
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

void check(const TrainerOptions& options) {
  const auto at_least = [](const char* name, int64_t value, int64_t least) {
    if (value < least) refuse(str_cat(name, " is ", value, "; wanted ", least, " or more"));
  };
  at_least("steps", options.steps, 1);
  at_least("accumulate", options.accumulate, 1);
  at_least("save_every", options.save_every, 0);
  at_least("keep_last", options.keep_last, 0);
  at_least("evaluate_every", options.evaluate_every, 0);
  at_least("stop.every", options.stop.every, 1);
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
}

// What has to be the same on all ranks.
std::string text_of(const TrainerOptions& options) {
  return str_cat("steps ", options.steps, ", accumulate ", options.accumulate, ", clip_norm ",
                 options.clip_norm, ", allow_nonfinite ", options.allow_nonfinite,
                 ", schedule from ", options.schedule(0), " by ",
                 options.schedule(options.steps / 2), " to ", options.schedule(options.steps - 1),
                 ", scaler ", options.scaler != nullptr, ", sync ", options.sync != nullptr,
                 ", checkpoints '", options.checkpoints, "', save_every ", options.save_every,
                 ", keep_last ", options.keep_last, ", resume ", static_cast<int>(options.resume),
                 ", evaluate ", options.evaluate != nullptr, ", evaluate_every ",
                 options.evaluate_every, ", stop.every ", options.stop.every);
}

std::shared_ptr<Communicator> whole(const MeshPtr& mesh) {
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

}  // namespace

struct Trainer::Parts {
  torch::nn::Module& module;
  const trainer_internal::AnyOptimizer optimizer;
  const MeshPtr mesh;
  const TrainerOptions options;
  const std::shared_ptr<Communicator> comm;
  const std::vector<at::Tensor> parameters;
  const std::unique_ptr<Scheduler> scheduler;
  StateDict state = {};
  const TokenLoader* loader = nullptr;  // whose position is in the state
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

  TrainerResult run(const std::function<std::optional<at::Tensor>()>& loss) {
    begin();
    while (result_.last_step < options_.steps && !is_stopping_) {
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
    if (!options_.checkpoints.empty()) {
      checkpointer_.emplace(
          options_.checkpoints, parts_.mesh,
          CheckpointOptions{.keep_last = options_.keep_last, .timeout = options_.save_timeout});
    }
    if (options_.resume == Resume::kNewest || (options_.resume == Resume::kIfThere && is_there())) {
      result_.first_step = checkpointer_->load(parts_.state, {}, where_).step;
      saved_ = result_.first_step;
    }
    result_.last_step = result_.first_step;
    parts_.scheduler->set_step(result_.first_step);
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

  // Whether there is a checkpoint: as the first rank sees it.
  bool is_there() const {
    const auto answer = from_first(
        *parts_.comm,
        [&]() -> absl::StatusOr<std::string> {
          const absl::StatusOr<std::string> found = find_checkpoint(options_.checkpoints);
          if (found.ok()) return "yes";
          if (absl::IsNotFound(found.status())) return "no";
          return found.status();
        },
        options_.save_timeout);
    return value_or_throw(answer) == "yes";
  }

  absl::Status open_writers() {
    if (!parts_.is_first()) return absl::OkStatus();
    if (!options_.log.empty()) {
      absl::StatusOr<JsonLines> log = JsonLines::open(options_.log);
      if (!log.ok()) return log.status();
      own_writers_.push_back(std::make_unique<JsonLines>(*std::move(log)));
    }
    if (!options_.events.empty()) {
      absl::StatusOr<EventFile> events =
          EventFile::create(options_.events, result_.first_step > 0 ? result_.first_step + 1 : 0);
      if (!events.ok()) return events.status();
      own_writers_.push_back(std::make_unique<EventFile>(*std::move(events)));
    }
    for (const auto& writer : own_writers_) writers_.push_back(writer.get());
    writers_.insert(writers_.end(), options_.writers.begin(), options_.writers.end());
    return absl::OkStatus();
  }

  // Nothing: there are no batches any more.
  std::optional<TrainerStep> take_step(const std::function<std::optional<at::Tensor>()>& loss) {
    double sum = 0;
    for (int64_t i = 0; i < options_.accumulate; ++i) {
      const std::optional<double> value =
          backward_of(loss, /*is_last=*/i + 1 == options_.accumulate);
      if (!value.has_value()) {
        finish_grad_sync(parts_.module, where_);
        parts_.optimizer.zero_grad();
        return std::nullopt;
      }
      sum += *value;
    }
    finish_grad_sync(parts_.module, where_);
    TrainerStep done{.step = result_.last_step + 1,
                     .loss = sum / static_cast<double>(options_.accumulate)};
    done.is_skipped =
        options_.scaler != nullptr && !options_.scaler->unscale(parts_.parameters, where_);
    if (!done.is_skipped) {
      done.grad_norm = clipped_norm();
      parts_.optimizer.step(where_);
    }
    if (options_.scaler != nullptr) options_.scaler->update();
    parts_.optimizer.zero_grad();
    done.metrics = {
        {"loss", done.loss}, {"grad_norm", done.grad_norm}, {"lr", parts_.optimizer.lr()}};
    parts_.scheduler->step();
    return done;
  }

  std::optional<double> backward_of(const std::function<std::optional<at::Tensor>()>& loss,
                                    bool is_last) {
    std::shared_ptr<void> optimizer_waits;
    std::optional<GradSync::NoSync> sync_waits;
    if (!is_last && parts_.optimizer.no_sync != nullptr)
      optimizer_waits = parts_.optimizer.no_sync();
    if (!is_last && options_.sync != nullptr) sync_waits.emplace(*options_.sync);
    const std::optional<at::Tensor> value = loss();
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
    return value->item<double>();
  }

  double clipped_norm() const {
    const bool is_error = !options_.allow_nonfinite && options_.scaler == nullptr;
    try {
      return clip_grad_norm(parts_.parameters, options_.clip_norm, 2, is_error, where_);
    } catch (const Error& error) {
      if (!absl::IsOutOfRange(error.status())) throw;
      throw Error(kTrainer, absl::OutOfRangeError(str_cat("in step ", result_.last_step + 1, ": ",
                                                          std::string(error.status().message()))));
    }
  }

  void after_step(TrainerStep& done) {
    const int64_t step = ++result_.last_step;
    throughput_->step_done();
    for (const Metric& metric : throughput_->since_last().metrics()) done.metrics.push_back(metric);
    if (options_.step_done != nullptr) options_.step_done(done);
    is_stopping_ = stop_here();
    const bool is_last = is_stopping_ || step == options_.steps;
    if (options_.evaluate != nullptr &&
        (is_last || (options_.evaluate_every > 0 && step % options_.evaluate_every == 0))) {
      for (const Metric& metric : evaluated()) done.metrics.push_back(metric);
    }
    tell(done);
    if (options_.save_every > 0 && step % options_.save_every == 0) save();
    throughput_->leave_out();
  }

  bool stop_here() {
    if (parts_.is_stop_requested || !told_.ok()) stop_.request();
    return value_or_throw(stop_.step_done());
  }

  std::vector<Metric> evaluated() const {
    const c10::AutoGradMode no_grad(false);
    const bool was_training = parts_.module.is_training();
    parts_.module.eval();
    std::vector<Metric> metrics = options_.evaluate();
    parts_.module.train(was_training);
    return metrics;
  }

  void tell(const TrainerStep& done) {
    bar_->step_done(absl::StrFormat("loss %.3f", done.loss));
    for (MetricsWriter* writer : writers_) {
      if (told_.ok()) told_ = writer->write(done.step, done.metrics);
    }
  }

  void save() {
    checkpointer_->save_async(result_.last_step, parts_.state, where_);
    saved_ = result_.last_step;
  }

  void end() {
    result_.is_stopped = is_stopping_ && result_.last_step < options_.steps;
    result_.signal = stop_.signal();
    if (checkpointer_.has_value()) {
      if (saved_ != result_.last_step) save();
      checkpointer_->wait();
    }
    for (MetricsWriter* writer : writers_) {
      if (told_.ok()) told_ = writer->flush();
    }
    const absl::Status status = agree(*parts_.comm, told_, options_.save_timeout);
    if (!status.ok()) throw Error(kTrainer, status);
  }

  Parts& parts_;
  const TrainerOptions& options_;
  const std::source_location where_;
  GracefulStop stop_;
  std::optional<Checkpointer> checkpointer_;
  std::vector<std::unique_ptr<MetricsWriter>> own_writers_;
  std::vector<MetricsWriter*> writers_;  // of the first rank
  absl::Status told_;                    // the first error of one of them
  std::optional<ProgressBar> bar_;
  std::optional<Throughput> throughput_;
  TrainerResult result_;
  int64_t saved_ = 0;
  bool is_stopping_ = false;
};

Trainer::Trainer(torch::nn::Module& module, trainer_internal::AnyOptimizer optimizer,
                 const MeshPtr& mesh, const TrainerOptions& options)
    : parts_([&] {
        if (mesh == nullptr) refuse("the mesh is null");
        const std::shared_ptr<Communicator> comm = whole(mesh);
        const absl::Status mine = checkpoint_internal::status_of([&] {
          check(options);
          return absl::OkStatus();
        });
        const absl::Duration timeout = absl::Minutes(5);
        const absl::Status status = agree(*comm, mine, timeout);
        if (!status.ok()) throw Error(kTrainer, status);
        const std::string text = text_of(options);
        const auto texts = value_or_throw(exchange(*comm, text, timeout));
        for (size_t rank = 0; rank < texts.size(); ++rank) {
          if (texts[rank] != texts[0]) {
            refuse(str_cat("the options differ between ranks: rank 0 has ", texts[0], "; rank ",
                           rank, " has ", texts[rank]));
          }
        }
        std::unique_ptr<Scheduler> scheduler = optimizer.schedule(options.schedule);
        return new Parts{.module = module,
                         .optimizer = std::move(optimizer),
                         .mesh = mesh,
                         .options = options,
                         .comm = comm,
                         .parameters = unique_parameters(module),
                         .scheduler = std::move(scheduler)};
      }()) {
  add_module(parts_->state, module);
  parts_->optimizer.add_to(parts_->state, module);
  add_random_state(parts_->state, mesh);
  if (options.scaler != nullptr) add_scaler(parts_->state, *options.scaler);
}

Trainer::~Trainer() = default;

StateDict& Trainer::state() {
  return parts_->state;
}

TrainerResult Trainer::run(const std::function<std::optional<at::Tensor>()>& loss,
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
      [&]() -> std::optional<at::Tensor> {
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
