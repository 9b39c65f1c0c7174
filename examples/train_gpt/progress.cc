#include "progress.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_format.h"

namespace train_gpt {

Progress::Progress(ProgressOptions options)
    : options_(std::move(options)), warm_up_(std::min<int64_t>(5, options_.steps / 2)) {}

void Progress::step_done(double loss) {
  losses_.push_back(loss);
  last_ = Clock::now();
  if (static_cast<int64_t>(losses_.size()) == warm_up_) counted_from_ = last_;
  if (options_.out != nullptr) print();
}

double Progress::tokens_per_second() const {
  const auto done = static_cast<int64_t>(losses_.size());
  const int64_t steps = done > warm_up_ ? done - warm_up_ : done;
  const double seconds = std::chrono::duration<double>(last_ - counted_from_).count();
  return static_cast<double>(steps * options_.tokens_per_step) / std::max(seconds, 1e-9);
}

void Progress::print() {
  const auto done = static_cast<int64_t>(losses_.size());
  const int64_t tenth = std::max<int64_t>(1, options_.steps / 10);
  const bool last = done == options_.steps;
  if (!options_.terminal && done % tenth != 0 && done != 1 && !last) return;
  constexpr int kWidth = 24;
  const auto filled = static_cast<int>(done * kWidth / options_.steps);
  const std::string bar = std::string(filled, '=') + std::string(filled < kWidth, '>') +
                          std::string(std::max(0, kWidth - filled - 1), ' ');
  // The very first steps say little about the rest.
  const bool known = done > warm_up_ || options_.steps <= 2;
  const double speed = tokens_per_second();
  const double left =
      static_cast<double>((options_.steps - done) * options_.tokens_per_step) / speed;
  const std::string line = absl::StrFormat(
      "%s [%s] %d/%d  loss %.3f%s", options_.title, bar, done, options_.steps, losses_.back(),
      known ? absl::StrFormat("  %.0f tokens/s  %s left", speed, format_seconds(left)) : "");
  // \x1b[K clears what the line before has left on the right.
  *options_.out << (options_.terminal ? "\r\x1b[K" : "") << line
                << (options_.terminal && !last ? "" : "\n") << std::flush;
}

std::string format_seconds(double seconds) {
  const auto s = static_cast<int64_t>(std::ceil(std::clamp(seconds, 0.0, 1e9)));
  if (s >= 3600) return absl::StrFormat("%d:%02d:%02d", s / 3600, s / 60 % 60, s % 60);
  return absl::StrFormat("%d:%02d", s / 60, s % 60);
}

}  // namespace train_gpt
