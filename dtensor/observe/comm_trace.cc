#include "shardweave/dtensor/observe/comm_trace.h"

#include <algorithm>
#include <array>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "nlohmann/json.hpp"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "shardweave/dtensor/observe/comm_event_text.h"
#include "shardweave/dtensor/observe/observer.h"
#include "shardweave/dtensor/observe/text_table.h"

namespace shardweave {

using namespace dtensor_internal;

namespace dtensor_internal {

// "Float[8, 12] [R, P(sum)] -> [R, R]"
std::string tensor_of(const CommEvent& event) {
  if (event.is_check) return "check that plain values are alike on all ranks";
  std::string text =
      absl::StrCat(c10::toString(event.dtype), "[", absl::StrJoin(event.shape, ", "), "]");
  if (event.before.mesh_ndim() > 0) {
    absl::StrAppend(&text, " ", event.before.to_string(), " -> ", event.after.to_string());
  }
  return text;
}

// "layers.0.up.weight"; of many the first.
std::string parameters_of(const CommEvent& event) {
  if (event.parameters.empty()) return "";
  const size_t more = event.parameters.size() - 1;
  return more == 0 ? event.parameters[0]
                   : absl::StrCat(event.parameters[0], " and ", more, " more");
}

// "aten::add 'other'"
std::string cause_of(const CommEvent& event) {
  return event.argument.empty() ? event.op : absl::StrCat(event.op, " '", event.argument, "'");
}

// "tp (2)"
std::string group_of(const CommEvent& event) {
  return absl::StrCat(absl::StrJoin(event.mesh_dims, ", "), " (", event.group_size, ")");
}

namespace {

nlohmann::ordered_json json_of(const CommEvent& event) {
  return {{"collective", event.collective},
          {"mesh_dims", event.mesh_dims},
          {"group_size", event.group_size},
          {"bytes", event.bytes},
          {"op", event.op},
          {"argument", event.argument},
          {"implicit", event.implicit},
          {"dtype", c10::toString(event.dtype)},
          {"shape", event.shape},
          {"before", event.before.to_string()},
          {"after", event.after.to_string()},
          {"module", event.module},
          {"phase", to_string(event.phase)},
          {"source", event.source},
          {"parameters", event.parameters},
          {"is_check", event.is_check}};
}

}  // namespace

std::string json_text_of(const CommEvent& event) {
  return json_of(event).dump();
}

}  // namespace dtensor_internal

std::string_view to_string(Phase phase) {
  switch (phase) {
    case Phase::kForward:
      return "forward";
    case Phase::kBackward:
      return "backward";
    case Phase::kGradientSync:
      return "gradient sync";
    case Phase::kOptimizer:
      return "optimizer";
  }
  return "";
}

std::string CommEvent::to_string() const {
  std::string text =
      absl::StrCat(collective, " ", group_of(*this), ", ", bytes, " bytes: ", tensor_of(*this),
                   parameters.empty() ? "" : absl::StrCat(" of ", parameters_of(*this)), " for ",
                   cause_of(*this), ", ", std::string(shardweave::to_string(phase)));
  if (!module.empty()) absl::StrAppend(&text, ", in ", module);
  if (!source.empty()) absl::StrAppend(&text, ", ", source);
  return text;
}

class CommTrace::Recorder final : public Observer {
 public:
  Recorder(const MeshPtr& mesh, size_t max_events)
      : observing(MeshContext::of(mesh), *this), max_events_(max_events) {}

  void collective_begins(int64_t /*id*/, const CommEvent& event) override {
    if (events.size() >= max_events_) {
      ++dropped;
      return;
    }
    events.push_back(event);
    if (event.source.empty() && !sources_.empty()) events.back().source = sources_.back().second;
  }
  void source_begins(const void* scope, std::string_view source) override {
    sources_.emplace_back(scope, source);
  }
  void source_ends(const void* scope) override {  // not there: it began before this did
    std::erase_if(sources_, [&](const auto& source) { return source.first == scope; });
  }

  const Observing observing;
  std::vector<CommEvent> events;
  int64_t dropped = 0;

 private:
  const size_t max_events_;
  std::vector<std::pair<const void*, std::string>> sources_;  // by scopes; the innermost last
};

CommTrace::CommTrace(const MeshPtr& mesh, size_t max_events)
    : recorder_(std::make_unique<Recorder>(mesh, max_events)) {}

CommTrace::~CommTrace() = default;

const std::vector<CommEvent>& CommTrace::events() const {
  return recorder_->events;
}

int64_t CommTrace::dropped() const {
  return recorder_->dropped;
}

int64_t CommTrace::bytes() const {
  int64_t sum = 0;
  for (const CommEvent& event : events()) sum += event.bytes;
  return sum;
}

void CommTrace::clear() {
  recorder_->events.clear();
  recorder_->dropped = 0;
}

std::string CommTrace::to_string() const {
  struct Line {
    const CommEvent* event;
    int64_t calls;
  };
  std::vector<Line> lines;
  for (const CommEvent& event : events()) {
    const auto same = std::find_if(lines.begin(), lines.end(),
                                   [&](const Line& line) { return *line.event == event; });
    if (same == lines.end()) {
      lines.push_back({&event, 1});
    } else {
      ++same->calls;
    }
  }
  TextTable table({"calls", "collective", "along", "bytes", "tensor", "parameter", "needed by",
                   "phase", "module", "source"},
                  /*right_aligned=*/{0, 3});
  for (const auto& [event, calls] : lines) {
    table.add({absl::StrCat(calls), event->collective, group_of(*event), absl::StrCat(event->bytes),
               tensor_of(*event), parameters_of(*event), cause_of(*event),
               std::string(shardweave::to_string(event->phase)), event->module, event->source});
  }
  std::string text = table.to_string();
  absl::StrAppend(&text, events().size(), " collectives, ", bytes(), " bytes sent by a rank");
  if (dropped() > 0) absl::StrAppend(&text, "; ", dropped(), " more were not kept");
  return absl::StrCat(text, "\n");
}

std::string CommTrace::to_json() const {
  const ConnectedMesh& mesh = recorder_->observing.context().connected_mesh();
  nlohmann::ordered_json events_json = nlohmann::ordered_json::array();
  for (const CommEvent& event : events()) events_json.push_back(json_of(event));
  return nlohmann::ordered_json({{"mesh", mesh.mesh().to_string()},
                                 {"rank", mesh.rank().value},
                                 {"dropped", dropped()},
                                 {"events", std::move(events_json)}})
      .dump();
}

ModuleScope::ModuleScope(const MeshPtr& mesh, std::string name) {
  enter(MeshContext::of(mesh), std::move(name));
}

ModuleScope::ModuleScope(const at::Tensor& tensor, std::string name) {
  if (is_dtensor(tensor)) enter(meta_of(tensor).context, std::move(name));
}

void ModuleScope::enter(std::shared_ptr<MeshContext> context, std::string name) {
  context_ = std::move(context);
  for (Observer* observer : context_->observation.observers) observer->module_begins(this, name);
  context_->observation.modules.enter(this, std::move(name));
}

ModuleScope::~ModuleScope() {
  if (context_ == nullptr) return;
  context_->observation.modules.leave(this);
  for (Observer* observer : context_->observation.observers) observer->module_ends(this);
}

SourceScope::SourceScope(const MeshPtr& mesh, std::string_view source)
    : context_(MeshContext::of(mesh)) {
  for (Observer* observer : context_->observation.observers) observer->source_begins(this, source);
}

SourceScope::~SourceScope() {
  for (Observer* observer : context_->observation.observers) observer->source_ends(this);
}

}  // namespace shardweave
