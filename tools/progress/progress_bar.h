// A line that says how far a long task is, how fast it goes and how long it will take.
//
//   ProgressBar bar({.title = "training", .steps = 60, .unit = "tokens", .per_step = 2048, .out = &std::cout});
//   bar.step_done("loss 5.610");
//   // training [=>        ]  6/60  loss 5.610  21034 tokens/s  0:12 left
//
// On a terminal one line is redrawn; elsewhere a line is printed for every tenth of the way. Used
// by one thread at a time.
#pragma once

#include <chrono>
#include <cstdint>
#include <ostream>
#include <string>
#include <string_view>

namespace shardweave {

struct ProgressBarOptions {
  std::string title;
  int64_t steps = 1;
  std::string unit = "steps";   // of the speed
  int64_t per_step = 1;         // units
  std::ostream* out = nullptr;  // null: silent
  bool terminal = false;
};

class ProgressBar {
 public:
  explicit ProgressBar(ProgressBarOptions options);

  // `detail` stands between the bar and the speed.
  void step_done(std::string_view detail = "");

  int64_t done() const { return done_; }
  // Units per second, without the first few steps, which are slower: caches are still empty.
  double speed() const;

 private:
  void print(std::string_view detail);

  using Clock = std::chrono::steady_clock;
  const ProgressBarOptions options_;
  const int64_t warm_up_;                          // steps that do not count for the speed
  Clock::time_point counted_from_ = Clock::now();  // the end of the last step that does not count
  Clock::time_point last_;
  int64_t done_ = 0;
};

// "0:07", "12:34", "1:02:03".
std::string format_seconds(double seconds);

}  // namespace shardweave
