#include "progress.h"

#include "absl/strings/str_format.h"

namespace train_gpt {

Progress::Progress(const ProgressOptions& options)
    : bar_({.title = options.title,
            .steps = options.steps,
            .unit = "tokens",
            .per_step = options.tokens_per_step,
            .out = options.out,
            .terminal = options.terminal}) {}

void Progress::step_done(double loss) {
  losses_.push_back(loss);
  bar_.step_done(absl::StrFormat("loss %.3f", loss));
}

}  // namespace train_gpt
