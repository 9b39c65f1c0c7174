#include "shardweave/modules/list_communication.h"

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>

#include "absl/strings/str_join.h"
#include "c10/core/GradMode.h"
#include "nlohmann/json.hpp"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/engine/members.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "shardweave/dtensor/observe/comm_event_text.h"
#include "shardweave/dtensor/observe/observer.h"
#include "shardweave/dtensor/observe/text_table.h"
#include "shardweave/modules/module_watch.h"

namespace shardweave {
namespace {

using namespace dtensor_internal;
using modules_internal::ModuleWatch;

std::vector<std::shared_ptr<MeshContext>> contexts_of(const torch::nn::Module& model) {
  std::vector<std::shared_ptr<MeshContext>> contexts;
  std::set<const MeshContext*> seen;
  for (const Member& member : members_of(model)) {
    if (!is_dtensor(member.tensor.unsafeGetTensorImpl())) continue;
    const std::shared_ptr<MeshContext>& context = meta_of(member.tensor).context;
    if (seen.insert(context.get()).second) contexts.push_back(context);
  }
  return contexts;
}

// Names what runs as "#12", by its step: what that is called is known when the step is over, for
// backward finds the same name again.
class Recorder final : public Observer, public ModuleWatch::Listener {
 public:
  Recorder(torch::nn::Module& model, const std::vector<std::shared_ptr<MeshContext>>& contexts)
      : contexts_(contexts), watch_(model, *this) {
    for (const auto& context : contexts) observing_.emplace_back(context, *this);
  }

  void begins(size_t step) override {
    for (const auto& context : contexts_) {
      if (!context->observation.modules.current().empty()) continue;  // the program says it
      scopes_[step].emplace_back(MeshPtr(context, &context->connected_mesh()), str_cat("#", step));
    }
  }
  void ends(size_t step, const std::vector<at::Tensor>& /*results*/) override {
    scopes_.erase(step);
  }

  void collective_begins(int64_t /*id*/, const CommEvent& event) override {
    events_.push_back(event);
    CommEvent& e = events_.back();
    if (e.phase != Phase::kForward) return;
    if (const std::string* fqn = watch_.redistributing(); fqn != nullptr && e.module.empty()) {
      e.module = *fqn;
    } else if (e.module.empty()) {
      e.module = str_cat("#before ", watch_.steps().size());
    }
    if (watch_.behind_backward() && !c10::GradMode::is_enabled()) e.phase = Phase::kOptimizer;
  }

  CommunicationList finish() {
    watch_.finish();
    for (CommEvent& event : events_) {
      if (!event.module.starts_with("#")) continue;
      std::string_view step = event.module;
      step.remove_prefix(1);
      const bool before = step.starts_with("before ");
      if (before) step.remove_prefix(std::string_view("before ").size());
      const size_t index = std::stoull(std::string(step));
      event.module = event.phase == Phase::kOptimizer ? ""
                     : before                         ? watch_.module_before(index)
                                                      : watch_.module_of(index);
    }
    return {std::move(events_)};
  }

 private:
  const std::vector<std::shared_ptr<MeshContext>> contexts_;
  ModuleWatch watch_;
  std::deque<Observing> observing_;
  std::map<size_t, std::deque<ModuleScope>> scopes_;  // of the steps that run
  std::vector<CommEvent> events_;
};

}  // namespace

CommunicationList list_communication(torch::nn::Module& model, const std::function<void()>& run) {
  const auto contexts = contexts_of(model);
  if (contexts.empty()) {
    throw Error("list_communication",
                absl::FailedPreconditionError("no parameter or buffer of the model is a DTensor; "
                                              "call parallelize_module() first"));
  }
  Recorder recorder(model, contexts);
  run();
  return recorder.finish();
}

int64_t CommunicationList::bytes() const {
  int64_t sum = 0;
  for (const CommEvent& event : events) sum += event.bytes;
  return sum;
}

std::string CommunicationList::to_string() const {
  TextTable table({"phase", "module", "needed by", "tensor", "parameter", "collective", "along",
                   "bytes", "source"},
                  /*right_aligned=*/{7});
  struct Sum {
    int64_t calls = 0, bytes = 0;
  };
  std::vector<std::tuple<Phase, std::string, std::string>> order;
  std::map<std::tuple<Phase, std::string, std::string>, Sum> sums;
  for (const CommEvent& event : events) {
    table.add({std::string(shardweave::to_string(event.phase)), event.module, cause_of(event),
               tensor_of(event), parameters_of(event), event.collective, group_of(event),
               str_cat(event.bytes), event.source});
    const auto key = std::tuple(event.phase, event.collective, group_of(event));
    const auto [it, is_new] = sums.try_emplace(key);
    if (is_new) order.push_back(key);
    ++it->second.calls;
    it->second.bytes += event.bytes;
  }
  TextTable summary({"phase", "collective", "along", "calls", "bytes"}, /*right_aligned=*/{3, 4});
  for (const auto& key : order) {
    const Sum& sum = sums[key];
    summary.add({std::string(shardweave::to_string(std::get<0>(key))), std::get<1>(key),
                 std::get<2>(key), str_cat(sum.calls), str_cat(sum.bytes)});
  }
  std::string text = table.to_string();
  if (!events.empty()) str_append(&text, "\n", summary.to_string());
  str_append(&text, events.size(), " collectives, ", bytes(), " bytes sent by a rank\n");
  return text;
}

std::string CommunicationList::to_json() const {
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  for (const CommEvent& event : events) {
    all.push_back(nlohmann::ordered_json::parse(json_text_of(event)));
  }
  return nlohmann::ordered_json({{"bytes", bytes()}, {"events", std::move(all)}}).dump();
}

}  // namespace shardweave
