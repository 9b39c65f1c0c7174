#include "shardweave/modules/optim/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "absl/status/status.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/error.h"

namespace shardweave {
namespace {

constexpr char kSchedule[] = "Schedule";
constexpr char kScheduler[] = "Scheduler";

[[noreturn]] void refuse(const std::string& why) {
  throw Error(kSchedule, absl::InvalidArgumentError(why));
}

void check_steps(std::string_view name, int64_t steps) {
  if (steps < 0) refuse(str_cat(name, " is ", steps, "; wanted 0 or more"));
}

}  // namespace

Schedule Schedule::warmup(int64_t steps) const {
  Schedule result = *this;
  result.warmup_ = steps;
  return result;
}

Schedule Schedule::floor(double factor) const {
  Schedule result = *this;
  result.floor_ = factor;
  return result;
}

double Schedule::factor(int64_t step) const {
  check_steps("steps", steps_);
  check_steps("decay", decay_);
  check_steps("warmup", warmup_);
  if (!(floor_ >= 0 && floor_ <= 1)) refuse(str_cat("floor is ", floor_, "; wanted 0 to 1"));
  if (!(gamma_ >= 0) || std::isinf(gamma_)) {
    refuse(str_cat("gamma is ", gamma_, "; wanted 0 or more"));
  }
  step = std::max(step, int64_t{0});
  if (step < warmup_) return static_cast<double>(step) / static_cast<double>(warmup_);
  const int64_t after = step - warmup_;
  // What is done, from 0 to 1, of the steps from `begin` to the last.
  const auto done = [&](int64_t begin) {
    if (step >= steps_) return 1.0;
    if (step <= begin) return 0.0;
    return static_cast<double>(step - begin) / static_cast<double>(steps_ - begin);
  };
  const auto down_to_floor = [&](double factor) { return floor_ + (1 - floor_) * factor; };
  switch (shape_) {
    case Shape::kLinear:
      return down_to_floor(1 - done(warmup_));
    case Shape::kCosine:
      return down_to_floor(0.5 * (1 + std::cos(std::numbers::pi * done(warmup_))));
    case Shape::kWsd:
      return down_to_floor(1 - done(std::max(warmup_, steps_ - std::min(decay_, steps_))));
    case Shape::kStep:
      if (steps_ == 0) return 1;
      return std::max(floor_, std::pow(gamma_, static_cast<double>(after / steps_)));
    case Shape::kConstant:
      break;
  }
  return 1;
}

Scheduler::Scheduler(FusedOptimizer& optimizer, std::function<double(int64_t)> schedule)
    : num_groups_([&optimizer] { return optimizer.num_groups(); }),
      lr_([&optimizer](size_t group) { return optimizer.lr(group); }),
      set_lr_([&optimizer](size_t group, double lr) { optimizer.set_lr(group, lr); }),
      schedule_(std::move(schedule)) {
  set_step(0);
}

Scheduler::Scheduler(torch::optim::Optimizer& optimizer, std::function<double(int64_t)> schedule)
    : num_groups_([&optimizer] { return optimizer.param_groups().size(); }),
      lr_([&optimizer](size_t group) {
        return optimizer.param_groups()[group].options().get_lr();
      }),
      set_lr_([&optimizer](size_t group, double lr) {
        optimizer.param_groups()[group].options().set_lr(lr);
      }),
      schedule_(std::move(schedule)) {
  set_step(0);
}

void Scheduler::set_step(int64_t step) {
  if (step < 0) {
    throw Error(kScheduler,
                absl::InvalidArgumentError(str_cat("step is ", step, "; wanted 0 or more")));
  }
  const double factor = schedule_(step);
  if (!(factor >= 0) || std::isinf(factor)) {
    throw Error(kScheduler,
                absl::OutOfRangeError(str_cat("the schedule says ", factor, " for step ", step,
                                              "; wanted a factor of 0 or more")));
  }
  for (size_t group = 0; group < base_.size(); ++group) set_lr_(group, base_[group] * factor);
  step_ = step;
  factor_ = factor;
  take_up_groups();
}

void Scheduler::take_up_groups() {
  for (size_t group = base_.size(); group < num_groups_(); ++group) {
    base_.push_back(lr_(group));
    set_lr_(group, base_.back() * factor_);
  }
}

}  // namespace shardweave
