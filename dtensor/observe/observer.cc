#include "shardweave/dtensor/observe/observer.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "torch/csrc/autograd/graph_task.h"

namespace shardweave::dtensor_internal {
namespace {

CommEvent event_of(const MeshContext& context, const Cause& cause, const Sending& sending) {
  CommEvent event;
  event.collective = sending.collective;
  for (int m : sending.mesh_dims) {
    event.mesh_dims.emplace_back(context.mesh().name(m));
    event.group_size *= context.mesh().size(m);
  }
  event.bytes = sending.bytes;
  // What a rule redistributes while it runs an operator by others, nobody has called.
  const bool by_a_rule = !cause.implicit() && !context.observation.operators_seen.empty();
  event.op = by_a_rule ? context.observation.operators_seen.back() : cause.name;
  event.argument = cause.argument;
  event.implicit = cause.implicit() || by_a_rule;
  event.dtype = sending.dtype;
  event.shape.assign(sending.shape.begin(), sending.shape.end());
  event.before = sending.before;
  event.after = sending.after;
  event.parameters = sending.parameters;
  if (!cause.parameter.empty()) event.parameters = {std::string(cause.parameter)};
  event.is_check = sending.is_check;
  event.module = context.observation.modules.current();
  event.phase = cause.syncs_gradients                                ? Phase::kGradientSync
                : torch::autograd::get_current_graph_task_id() == -1 ? Phase::kForward
                                                                     : Phase::kBackward;
  // Without a file: no_source.h. SourceScope may know better.
  if (!event.implicit && *cause.where.file_name() != '\0') {
    event.source = absl::StrCat(cause.where.file_name(), ":", cause.where.line());
  }
  return event;
}

}  // namespace

Observing::Observing(std::shared_ptr<MeshContext> context, Observer& observer)
    : context_(std::move(context)), observer_(&observer) {
  context_->observation.observers.push_back(observer_);
  context_->observation.modules.remember();
}

Observing::~Observing() {
  std::erase(context_->observation.observers, observer_);
  context_->observation.modules.forget();
}

void OperatorSpan::begin(MeshContext& context, const c10::OperatorHandle& op,
                         absl::Span<const c10::IValue> args) {
  size_t told = 0;
  try {
    for (; told < context.observation.observers.size(); ++told) {
      context.observation.observers[told]->operator_begins(op, args);
    }
  } catch (...) {  // explain() has found what is wrong with the call
    while (told-- > 0) context.observation.observers[told]->operator_ends();
    throw;
  }
  context.observation.operators_seen.push_back(op.operator_name().name);
  context_ = &context;
}

void OperatorSpan::end() {
  context_->observation.operators_seen.pop_back();
  for (Observer* observer : context_->observation.observers) observer->operator_ends();
}

void CollectiveSpan::begin(MeshContext& context, const Cause& cause, const Sending& sending) {
  context_ = &context;
  id_ = ++context.observation.collectives_seen;
  const CommEvent event = event_of(context, cause, sending);
  for (Observer* observer : context.observation.observers) observer->collective_begins(id_, event);
}

void CollectiveSpan::end() {
  for (Observer* observer : context_->observation.observers) observer->collective_ends(id_);
}

}  // namespace shardweave::dtensor_internal
