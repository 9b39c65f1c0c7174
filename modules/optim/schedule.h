// Learning-rate schedules: by what the learning rate is multiplied in a step.
//
//   const Schedule schedule = Schedule::cosine(1000).warmup(100).floor(0.1);
//   Scheduler scheduler(optimizer, schedule);      // of all its groups
//   for (int64_t step = 0; step < 1000; ++step) {
//     train();                                     // ... optimizer.step()
//     scheduler.step();
//   }
//
// A Schedule is a value and a pure function, the same in C++, C, Rust and Go; any function from a step
// to a number of 0 or more may be in its place.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "shardweave/modules/optim/fused_optimizer.h"
#include "torch/optim/optimizer.h"

namespace shardweave {

// Steps are counted from 0. The numbers are those of transformers' get_..._schedule_with_warmup() and
// of torch.optim.lr_scheduler.StepLR.
class Schedule {
 public:
  // Always 1, after the warm-up.
  static Schedule constant() { return {Shape::kConstant, 0, 0, 1}; }
  // From 1 after the warm-up down to 0 at step `steps`, and 0 from then on.
  static Schedule linear(int64_t steps) { return {Shape::kLinear, steps, 0, 1}; }
  // The same by half a wave of the cosine (Loshchilov and Hutter, 2017, without restarts).
  static Schedule cosine(int64_t steps) { return {Shape::kCosine, steps, 0, 1}; }
  // Warm-up, stable, decay (Hu et al., MiniCPM, 2024): 1 after the warm-up, and in the last `decay` of
  // `steps` steps in a line down to 0.
  static Schedule wsd(int64_t steps, int64_t decay) { return {Shape::kWsd, steps, decay, 1}; }
  // Multiplied by `gamma` every so many steps (0: never) after the warm-up.
  static Schedule step(int64_t every, double gamma) { return {Shape::kStep, every, 0, gamma}; }

  // From 0 at step 0 in a line up to 1 at this step.
  Schedule warmup(int64_t steps) const;
  // The smallest factor after the warm-up: the shape ends there instead of at 0. That of step() stops
  // there.
  Schedule floor(double factor) const;

  // Throws Error (InvalidArgument) for a schedule with a negative number of steps, gamma or floor, or
  // a floor above 1. A step below 0 is 0.
  double factor(int64_t step) const;
  double operator()(int64_t step) const { return factor(step); }

  friend bool operator==(const Schedule&, const Schedule&) = default;

 private:
  enum class Shape : uint8_t { kConstant, kLinear, kCosine, kWsd, kStep };
  Schedule(Shape shape, int64_t steps, int64_t decay, double gamma)
      : shape_(shape), steps_(steps), decay_(decay), gamma_(gamma) {}

  Shape shape_;
  int64_t steps_;  // or between two of step()
  int64_t decay_;
  double gamma_;
  int64_t warmup_ = 0;
  double floor_ = 0;
};

// Sets the learning rates of an optimizer's groups: each is what it was when this was made, or when it
// was first met of a group that was added later, times the factor. The optimizer has to stay. Local: all
// ranks do it alike.
class Scheduler {
 public:
  // Sets those of step 0. A ZeroRedundancyOptimizer's is its optimizer().
  Scheduler(FusedOptimizer& optimizer, std::function<double(int64_t)> schedule);
  Scheduler(torch::optim::Optimizer& optimizer, std::function<double(int64_t)> schedule);

  // Goes on to those of the next step: after each step of the optimizer.
  void step() { set_step(step_ + 1); }
  // Goes on from a step, as after a checkpoint. Throws Error (InvalidArgument) for one below 0,
  // (OutOfRange) for a factor that is negative or not finite; nothing has changed then.
  void set_step(int64_t step);
  // Sets those of groups that were added since, for the current step. Else step() and set_step() do.
  void take_up_groups();
  int64_t current_step() const { return step_; }

 private:
  std::function<size_t()> num_groups_;
  std::function<double(size_t)> lr_;
  std::function<void(size_t, double)> set_lr_;
  std::vector<double> base_;  // by group
  std::function<double(int64_t)> schedule_;
  int64_t step_ = 0;
  double factor_ = 1;  // of the step
};

}  // namespace shardweave
