// How far the training is: the loss of every step, the speed, and a progress bar.
//
//   Progress progress({.title = "training", .steps = 60, .out = &std::cout});
//   progress.step_done(5.61);
//   // training [=>        ]  6/60  loss 5.610  21034 tokens/s  0:12 left
//   progress.losses().back();       // 5.61
//
// On a terminal one line is redrawn; elsewhere a line is printed for every tenth of the way.
#pragma once

#include <chrono>
#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

namespace train_gpt {

struct ProgressOptions {
  std::string title;
  int64_t steps = 1;
  int64_t tokens_per_step = 1;
  std::ostream* out = nullptr;  // null: silent
  bool terminal = false;
};

class Progress {
 public:
  explicit Progress(ProgressOptions options);

  void step_done(double loss);

  const std::vector<double>& losses() const { return losses_; }
  // Of the steps after the first few, which are slower: caches are still empty.
  double tokens_per_second() const;

 private:
  void print();

  using Clock = std::chrono::steady_clock;
  const ProgressOptions options_;
  const int64_t warm_up_;                          // steps that do not count for the speed
  Clock::time_point counted_from_ = Clock::now();  // the end of the last step that does not count
  Clock::time_point last_;
  std::vector<double> losses_;
};

// "0:07", "12:34", "1:02:03".
std::string format_seconds(double seconds);

}  // namespace train_gpt
