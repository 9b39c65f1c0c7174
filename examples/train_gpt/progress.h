// How far the training is: the loss of every step, the speed, and a progress bar.
//
//   Progress progress({.title = "training", .steps = 60, .out = &std::cout});
//   progress.step_done(5.61);
//   // training [=>        ]  6/60  loss 5.610  21034 tokens/s  0:12 left
//   progress.losses().back();       // 5.61
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "shardweave/tools/progress/progress_bar.h"

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
  explicit Progress(const ProgressOptions& options);

  void step_done(double loss);

  const std::vector<double>& losses() const { return losses_; }
  // Of the steps after the first few, which are slower: caches are still empty.
  double tokens_per_second() const { return bar_.speed(); }

 private:
  shardweave::ProgressBar bar_;
  std::vector<double> losses_;
};

}  // namespace train_gpt
