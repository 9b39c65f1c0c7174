#include "shardweave/dtensor/engine/module_names.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "ATen/SequenceNumber.h"
#include "torch/csrc/autograd/function.h"
#include "torch/csrc/autograd/graph_task.h"

namespace shardweave::dtensor_internal {
namespace {

constexpr size_t kMaxChanges = 1 << 16;

}  // namespace

void ModuleNames::note(std::string name) {
  const uint64_t now = at::sequence_number::peek();
  // Numbers are a thread's own: with another thread they start again.
  if (!changes_.empty() && changes_.back().sequence > now) changes_.clear();
  if (!changes_.empty() && changes_.back().sequence == now) {
    changes_.back().name = std::move(name);
    return;
  }
  if (changes_.size() >= kMaxChanges) changes_.pop_front();
  changes_.push_back({now, std::move(name)});
}

void ModuleNames::enter(const void* scope, std::string name) {
  if (remembering_ > 0) note(name);
  running_.push_back({scope, std::move(name), torch::autograd::get_current_graph_task_id()});
}

void ModuleNames::leave(const void* scope) {
  std::erase_if(running_, [&](const Running& running) { return running.scope == scope; });
  if (remembering_ > 0) note(running_.empty() ? "" : running_.back().name);
}

void ModuleNames::remember() {
  if (++remembering_ == 1) note(running_.empty() ? "" : running_.back().name);
}

void ModuleNames::forget() {
  if (--remembering_ == 0) note("");
}

std::string ModuleNames::current() const {
  const int graph_task = torch::autograd::get_current_graph_task_id();
  // What backward itself enters (a forward that is computed again) counts as in forward.
  if (!running_.empty() && running_.back().graph_task == graph_task) return running_.back().name;
  const auto node = torch::autograd::get_current_node();
  // Where gradients are accumulated into leaves: no operator, but the largest number.
  constexpr uint64_t kAccumulate = std::numeric_limits<uint64_t>::max();
  if (graph_task == -1 || node == nullptr || node->sequence_nr() == kAccumulate) return "";
  const auto later = std::upper_bound(
      changes_.begin(), changes_.end(), node->sequence_nr(),
      [](uint64_t sequence, const Change& change) { return sequence < change.sequence; });
  return later == changes_.begin() ? std::string() : std::prev(later)->name;
}

}  // namespace shardweave::dtensor_internal
