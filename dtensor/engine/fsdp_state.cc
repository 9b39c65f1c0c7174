// The order in which units come, and which of them are in memory.

#include <algorithm>
#include <memory>
#include <utility>

#include "c10/core/GradMode.h"
#include "shardweave/dtensor/engine/forward_plan.h"
#include "shardweave/dtensor/engine/fsdp_unit.h"
#include "torch/csrc/autograd/engine.h"
#include "torch/csrc/autograd/graph_task.h"

namespace shardweave::dtensor_internal {
namespace {

// Whether it adds to any gradient.
bool is_accumulating() {
  const auto* info = torch::autograd::get_current_graph_task_exec_info();
  return info == nullptr || std::none_of(info->begin(), info->end(), [](const auto& item) {
           return item.second.captures_ != nullptr;
         });
}

}  // namespace

bool FsdpState::in_backward_now() {
  return torch::autograd::get_current_graph_task_id() != -1;
}

void FsdpState::learn(FsdpUnit& unit) {
  const auto [it, is_new] = next_.try_emplace(expected_after_, Guess{&unit});
  Guess& guess = it->second;
  if (!is_new) guess = {&unit, guess.unit == &unit};
}

FsdpUnit* FsdpState::guess_next() {
  const Pass forward = c10::GradMode::is_enabled() ? Pass::kForward : Pass::kEvaluation;
  expected_after_ = {before_, current_, in_backward_ ? Pass::kBackward : forward};
  const auto it = next_.find(expected_after_);
  return it != next_.end() && it->second.sure ? it->second.unit : nullptr;
}

void FsdpState::touch(FsdpUnit& unit) {
  const bool in_backward = in_backward_now();
  if (in_backward) end_with_backward();
  // A step has ended: what comes next is to be gathered when the optimizer has written it.
  const bool begins_anew = in_backward_ && !in_backward;
  in_backward_ = in_backward;
  FsdpUnit* guess = nullptr;
  if (current_ != &unit || begins_anew) {
    // A backward that an error has ended leaves what a unit has sent, on ranks where that is still on
    // its way. Nobody has those gradients, so no rank may go on with them.
    if (begins_anew) wait_for_sent();
    // Gradients of the unit before travel while this one computes. Those of the one before that have
    // had their time, and there are three units in memory: this, the next, and what travels.
    finish_gradients(in_backward ? 1 : 0);
    if (current_ != nullptr && current_ != &unit &&
        (in_backward || current_->options_.reshard_after_forward)) {
      leaving_.push_back(current_);
      current_->is_to_keep_part_ = !in_backward && is_training();
    }
    if (begins_anew) {
      current_ = before_ = nullptr;
    } else if (current_ != nullptr) {
      learn(unit);
    }
    if (ahead_ != nullptr && ahead_ != &unit) {
      ++counters.wrong_prefetches;
      leaving_.push_back(ahead_);
      ahead_->is_to_keep_part_ = ahead_->part_.defined();
    }
    ahead_ = nullptr;
    before_ = current_;
    current_ = &unit;
    guess = guess_next();
  }
  const int64_t now = context_.observation.counters.operators;
  std::erase_if(leaving_, [&](FsdpUnit* other) {
    if (other == &unit) return true;
    if (other == guess || other->last_use_ == now) return false;
    other->reshard(other->is_to_keep_part_);
    return true;
  });
  unit.make_full();
  // What is summoned is not met, and the end of its scope is no place for an error of a gather.
  const bool is_to_copy = guess != nullptr && (!guess->is_alone() || guess->is_elsewhere());
  if (!is_to_copy || guess == &unit || guess->is_full_ || guess->is_summoned() ||
      guess->is_begun_) {
    return;
  }
  guess->begin_gather();
  ahead_ = guess;
  ++counters.prefetches;
}

// Nobody touches a unit when a backward has ended. One within another (checkpoint()) is not its end.
void FsdpState::end_with_backward() {
  if (!backward_.expired()) return;
  const auto lives_as_long = std::make_shared<const char>();
  backward_ = lives_as_long;
  torch::autograd::Engine::get_default_engine().queue_callback(
      [weak = weak_from_this(), lives_as_long, accumulates = is_accumulating()] {
        const std::shared_ptr<FsdpState> state = weak.lock();
        if (state == nullptr) return;
        state->backward_.reset();
        if (state->ahead_ != nullptr) {
          state->leaving_.push_back(std::exchange(state->ahead_, nullptr));
        }
        if (state->current_ != nullptr) state->current_->reshard();
        for (FsdpUnit* unit : std::exchange(state->leaving_, {})) unit->reshard();
        state->finish_gradients(0);
        if (accumulates && state->no_sync == 0) state->send_held();  // of what it has not met
      });
}

void FsdpState::finish_gradients(size_t but_the_last) {
  while (sending_.size() > but_the_last) {
    const std::shared_ptr<UnitGradients> oldest = sending_.front().lock();
    sending_.pop_front();
    if (oldest != nullptr) oldest->finish();
  }
}

void FsdpState::send_held() {
  for (FsdpUnit* unit : units_) unit->send_held();
  finish_gradients(0);
}

void FsdpState::give_up_sent() {
  for (const std::weak_ptr<UnitGradients>& each : sending_) {
    if (const std::shared_ptr<UnitGradients> gradients = each.lock()) gradients->give_up_if_sent();
  }
}

void FsdpState::wait_for_sent() {
  for (const std::weak_ptr<UnitGradients>& each : sending_) {
    if (const std::shared_ptr<UnitGradients> gradients = each.lock()) gradients->give_up();
  }
}

void FsdpState::reshard() {
  ahead_ = nullptr;
  leaving_.clear();
  for (FsdpUnit* unit : units_) unit->reshard();
}

void FsdpState::forget(FsdpUnit& unit) {
  if (unit.flat_.defined()) buffers_.erase(unit.flat_.storage().unsafeGetStorageImpl());
  std::erase(units_, &unit);
  std::erase(leaving_, &unit);
  for (FsdpUnit** known : {&current_, &before_, &ahead_}) {
    if (*known == &unit) *known = nullptr;
  }
  const auto has = [&](const UnitsBefore& units) {
    return units.two == &unit || units.one == &unit;
  };
  if (has(expected_after_)) expected_after_ = {};
  absl::erase_if(next_,
                 [&](const auto& item) { return has(item.first) || item.second.unit == &unit; });
}

c10::Stream FsdpState::lane(c10::Device device, Way way) {
  for (const auto& [its, lane] : lanes_) {
    if (its == way && lane.device() == device) return lane;
  }
  return lanes_.emplace_back(way, copy_lane(device)).second;
}

}  // namespace shardweave::dtensor_internal
