#include "rank.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <iostream>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "ATen/Parallel.h"
#include "absl/strings/str_cat.h"
#include "backends.h"
#include "nlohmann/json.hpp"
#include "progress.h"
#include "report.h"
#include "shardweave/dtensor/observe/comm_trace.h"
#include "shardweave/dtensor/observe/profile_trace.h"
#include "shardweave/mesh/connected_mesh.h"
#include "training.h"

namespace train_gpt {
namespace {

using shardweave::CommTrace;
using shardweave::MeshPtr;
using shardweave::ProfileScope;
using shardweave::World;

class Rank {
 public:
  Rank(World& world, const Settings& settings, Activity& activity)
      : world_(world),
        settings_(settings),
        activity_(activity),
        leader_(world.rank() == 0),
        out_(!leader_        ? nullptr
             : settings.json ? std::cerr.rdbuf()
                             : std::cout.rdbuf()),
        terminal_(::isatty(settings.json ? STDERR_FILENO : STDOUT_FILENO) != 0) {}

  absl::Status run() {
    const int cores = static_cast<int>(std::thread::hardware_concurrency());
    at::set_num_threads(std::max(1, cores / world_.size()));

    activity_.set("reading the text");
    const absl::StatusOr<Text> text = Text::read(settings_.data);
    if (!text.ok()) return text.status();
    if (static_cast<int64_t>(text->bytes().size()) <= settings_.seq) {
      return absl::InvalidArgumentError(absl::StrCat("--seq=", settings_.seq,
                                                     ": the text has only ", text->bytes().size(),
                                                     " bytes, wanted more than --seq"));
    }
    activity_.set("comparing settings with the other ranks");
    absl::Status same =
        check_same_everywhere(*world_.comm(), settings_.to_string(), text->bytes(), "texts",
                              absl::StrCat(text->bytes().size(), " bytes of text"));
    if (!same.ok()) return same;

    activity_.set("making the mesh");
    const absl::StatusOr<MeshPtr> mesh = shardweave::init_device_mesh(world_, settings_.mesh);
    if (!mesh.ok()) return mesh.status();

    activity_.set("making the model");
    Gpt model = make_model(settings_, *mesh);
    print_layouts(model->named_parameters().pairs(), (*mesh)->mesh(), out_);

    Progress progress(options("training", settings_.steps));
    CommTrace communication(*mesh);
    std::optional<ProfileScope> profile;
    if (!settings_.trace.empty()) profile.emplace(*mesh);
    set_step(0);
    const int64_t before = train(model, settings_, *text, *mesh, [&](double loss) {
      progress.step_done(loss);
      const size_t done = progress.losses().size();
      if (done < static_cast<size_t>(settings_.steps)) communication.clear();
      set_step(done);
    });
    if (!settings_.resume.empty()) {
      out_ << "went on after step " << before << " of " << settings_.resume << std::endl;
    }
    out_ << "collectives of one step, on rank 0:\n" << communication.to_string() << std::flush;
    if (profile.has_value()) {
      activity_.set("writing the trace");
      profile->write_merged(settings_.trace);
      profile.reset();
      out_ << "trace: " << settings_.trace << std::endl;
    }

    activity_.set("generating the sample");
    const Sample written = sample(model, settings_, *text, *mesh);
    print_sample(written.prompt, written.generated, out_);

    if (leader_) finish(*text, progress, before);
    return absl::OkStatus();
  }

 private:
  void set_step(size_t done) {
    activity_.set(absl::StrCat("training step ", done + 1, " of ", settings_.steps));
  }

  ProgressOptions options(std::string title, int64_t steps) {
    return {.title = std::move(title),
            .steps = steps,
            .tokens_per_step = settings_.batch * settings_.seq,
            .out = leader_ ? &out_ : nullptr,
            .terminal = terminal_};
  }

  // On rank 0, which needs the others no more.
  void finish(const Text& text, const Progress& progress, int64_t before) {
    std::optional<double> difference;
    if (settings_.check) {
      activity_.set("training on one rank, to compare");
      Settings unbroken = settings_;
      unbroken.steps += before;
      Progress alone(options("one rank", unbroken.steps));
      train(make_model(unbroken, nullptr), unbroken, text, nullptr,
            [&](double loss) { alone.step_done(loss); });
      difference = largest_difference(progress.losses(),
                                      {alone.losses().begin() + before, alone.losses().end()});
      out_ << "largest difference between the losses of a step: " << *difference << std::endl;
    }
    if (!settings_.json) return;
    nlohmann::ordered_json line = {{"ranks", world_.size()},
                                   {"first_loss", progress.losses().front()},
                                   {"last_loss", progress.losses().back()},
                                   {"tokens_per_second", progress.tokens_per_second()},
                                   {"max_loss_diff", nullptr}};
    if (difference) line["max_loss_diff"] = *difference;
    std::cout << line << std::endl;
  }

  // NaN if a loss is.
  static double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
    double largest = 0;
    for (size_t i = 0; i < a.size(); ++i) {
      const double difference = std::abs(a[i] - b[i]);
      if (!(difference <= largest)) largest = difference;
    }
    return largest;
  }

  World& world_;
  const Settings& settings_;
  Activity& activity_;
  const bool leader_;
  std::ostream out_;  // without a buffer, and so silent, on other ranks than the leader
  const bool terminal_;
};

}  // namespace

absl::Status run_rank(World& world, const Settings& settings, Activity& activity) {
  return run_guarded(activity, [&] { return Rank(world, settings, activity).run(); });
}

}  // namespace train_gpt
