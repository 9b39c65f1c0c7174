#include "shardweave/tools/progress/progress_bar.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace shardweave {

ProgressBar::ProgressBar(ProgressBarOptions options)
    : options_(std::move(options)), warm_up_(std::min<int64_t>(5, options_.steps / 2)) {}

void ProgressBar::step_done(std::string_view detail) {
  ++done_;
  last_ = Clock::now();
  if (done_ == warm_up_) counted_from_ = last_;
  if (options_.out != nullptr) print(detail);
}

double ProgressBar::speed() const {
  const int64_t steps = done_ > warm_up_ ? done_ - warm_up_ : done_;
  const double seconds = std::chrono::duration<double>(last_ - counted_from_).count();
  return static_cast<double>(steps * options_.per_step) / std::max(seconds, 1e-9);
}

void ProgressBar::print(std::string_view detail) {
  const int64_t tenth = std::max<int64_t>(1, options_.steps / 10);
  const bool last = done_ == options_.steps;
  if (!options_.terminal && done_ % tenth != 0 && done_ != 1 && !last) return;
  constexpr int kWidth = 24;
  const auto filled = static_cast<int>(done_ * kWidth / options_.steps);
  const std::string bar = std::string(filled, '=') + std::string(filled < kWidth, '>') +
                          std::string(std::max(0, kWidth - filled - 1), ' ');
  // The very first steps say little about the rest.
  const bool known = done_ > warm_up_ || options_.steps <= 2;
  const double left = static_cast<double>((options_.steps - done_) * options_.per_step) / speed();
  std::string line = absl::StrFormat("%s [%s] %d/%d", options_.title, bar, done_, options_.steps);
  if (!detail.empty()) absl::StrAppend(&line, "  ", std::string(detail));
  if (known) {
    absl::StrAppendFormat(&line, "  %.*f %s/s  %s left", speed() < 10 ? 1 : 0, speed(),
                          options_.unit, format_seconds(left));
  }
  // \x1b[K clears what the line before has left on the right.
  *options_.out << (options_.terminal ? "\r\x1b[K" : "") << line
                << (options_.terminal && !last ? "" : "\n") << std::flush;
}

std::string format_seconds(double seconds) {
  const auto s = static_cast<int64_t>(std::ceil(std::clamp(seconds, 0.0, 1e9)));
  if (s >= 3600) return absl::StrFormat("%d:%02d:%02d", s / 3600, s / 60 % 60, s % 60);
  return absl::StrFormat("%d:%02d", s / 60, s % 60);
}

}  // namespace shardweave
