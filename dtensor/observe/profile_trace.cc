#include "shardweave/dtensor/observe/profile_trace.h"

#include <algorithm>
#include <chrono>
#include <fstream>
#include <iterator>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "nlohmann/json.hpp"
#include "shardweave/dtensor/observe/observer.h"
#include "torch/csrc/autograd/graph_task.h"

namespace shardweave {
namespace {

using namespace dtensor_internal;

using nlohmann::ordered_json;

constexpr int kOperators = 0;      // thread ids
constexpr int kCommunication = 1;  // and above

struct Event {
  std::string name;
  const char* category;
  std::string module;
  Phase phase = Phase::kForward;
  int64_t begin = 0;    // nanoseconds since 1970
  int64_t end = -1;     // not yet
  int collective = -1;  // index into collectives
};

Phase phase_now() {
  return torch::autograd::get_current_graph_task_id() == -1 ? Phase::kForward : Phase::kBackward;
}

// Collectives that overlap go on different threads, lest the picture nest what does not.
std::vector<int> threads_of(const std::vector<Event>& events) {
  std::vector<int> threads;
  std::vector<int64_t> busy_until;  // of communication threads
  for (const Event& event : events) {
    if (event.collective < 0) {
      threads.push_back(kOperators);
      continue;
    }
    auto free = std::find_if(busy_until.begin(), busy_until.end(),
                             [&](int64_t until) { return until <= event.begin; });
    if (free == busy_until.end()) free = busy_until.insert(free, 0);
    *free = std::max(event.begin, event.end);
    threads.push_back(kCommunication + static_cast<int>(free - busy_until.begin()));
  }
  return threads;
}

ordered_json metadata(int64_t rank, int thread, const char* what, const std::string& name) {
  return {{"name", what}, {"ph", "M"}, {"pid", rank}, {"tid", thread}, {"args", {{"name", name}}}};
}

std::string describe(const ConnectedMesh& mesh) {
  std::string text = absl::StrCat("rank ", mesh.rank().value, " (");
  for (int m = 0; m < mesh.mesh().ndim(); ++m) {
    absl::StrAppend(&text, m == 0 ? "" : ", ", std::string(mesh.mesh().name(m)), "=",
                    mesh.coordinate()[m]);
  }
  return text + ")";
}

[[noreturn]] void cannot_write(const std::string& path) {
  throw Error(
      absl::UnavailableError(absl::StrCat("ProfileScope: cannot write the trace to '", path, "'")));
}

}  // namespace

class ProfileScope::Recorder final : public Observer {
 public:
  Recorder(const MeshPtr& mesh, size_t max_events)
      : observing(MeshContext::of(mesh), *this),
        started(std::chrono::duration_cast<std::chrono::nanoseconds>(
                    std::chrono::system_clock::now().time_since_epoch())
                    .count()),
        max_events_(max_events),
        clock_start_(std::chrono::steady_clock::now()) {}

  void operator_begins(const c10::OperatorHandle& op,
                       absl::Span<const c10::IValue> /*args*/) override {
    const int event = begin({.name = op.operator_name().name, .category = "operator"});
    open_.emplace_back(nullptr, event);
  }
  void operator_ends() override { end_innermost(nullptr); }

  void module_begins(const void* scope, std::string_view name) override {
    open_.emplace_back(scope, begin({.name = std::string(name), .category = "module"}));
  }
  void module_ends(const void* scope) override { end_innermost(scope); }

  void collective_begins(int64_t id, const CommEvent& event) override {
    const int index = begin({.name = event.collective,
                             .category = "communication",
                             .collective = static_cast<int>(collectives.size())});
    if (index < 0) return;
    events[index].phase = event.phase;
    collectives.push_back(event);
    sending_[id] = index;
  }
  void collective_ends(int64_t id) override {
    const auto it = sending_.find(id);
    if (it == sending_.end()) return;
    events[it->second].end = now();
    sending_.erase(it);
  }

  // The traceEvents, separated by commas, with times since `base`.
  std::string events_json(int64_t base) const {
    const int64_t rank = mesh().rank().value;
    const std::vector<int> threads = threads_of(events);
    std::vector<std::string> lines = {
        metadata(rank, kOperators, "process_name", describe(mesh())).dump(),
        metadata(rank, kOperators, "thread_name", "operators").dump()};
    const int last = threads.empty() ? 0 : *std::max_element(threads.begin(), threads.end());
    for (int t = kCommunication; t <= std::max(last, kCommunication); ++t) {
      lines.push_back(metadata(rank, t, "thread_name", "communication").dump());
    }
    for (size_t i = 0; i < events.size(); ++i) {
      if (events[i].end >= 0) lines.push_back(json_of(events[i], threads[i], base).dump());
    }
    if (dropped > 0) {
      lines.push_back(ordered_json({{"name", absl::StrCat(dropped, " events were not kept")},
                                    {"ph", "i"},
                                    {"s", "p"},
                                    {"pid", rank},
                                    {"tid", kOperators},
                                    {"ts", microseconds(now() - base)}})
                          .dump());
    }
    return absl::StrJoin(lines, ",\n");
  }

  ConnectedMesh& mesh() const { return observing.context().connected_mesh(); }

  const Observing observing;
  const int64_t started;
  std::vector<Event> events;
  std::vector<CommEvent> collectives;
  int64_t dropped = 0;

 private:
  int64_t now() const {
    return started + std::chrono::duration_cast<std::chrono::nanoseconds>(
                         std::chrono::steady_clock::now() - clock_start_)
                         .count();
  }

  static double microseconds(int64_t ns) { return static_cast<double>(ns) / 1000; }

  // The event's index; -1: it is not kept.
  int begin(Event event) {
    if (events.size() >= max_events_) {
      ++dropped;
      return -1;
    }
    event.module = observing.context().observation.modules.current();
    event.phase = phase_now();
    event.begin = now();
    events.push_back(std::move(event));
    return static_cast<int>(events.size()) - 1;
  }

  void end_innermost(const void* scope) {
    const auto found = std::find_if(open_.rbegin(), open_.rend(),
                                    [&](const auto& open) { return open.first == scope; });
    if (found == open_.rend()) return;  // it had begun before this did
    if (found->second >= 0) events[found->second].end = now();
    open_.erase(std::prev(found.base()));
  }

  ordered_json json_of(const Event& event, int thread, int64_t base) const {
    ordered_json args = {{"phase", to_string(event.phase)}};
    if (!event.module.empty()) args["module"] = event.module;
    if (event.collective >= 0) {
      const CommEvent& collective = collectives[event.collective];
      args["what"] = collective.to_string();
      args["along"] = absl::StrJoin(collective.mesh_dims, ", ");
      args["bytes"] = collective.bytes;
      args["for"] = collective.op;
      if (!collective.parameters.empty()) args["parameters"] = collective.parameters;
      args["implicit"] = collective.implicit;
    }
    return {{"name", event.name},
            {"cat", event.category},
            {"ph", "X"},
            {"pid", mesh().rank().value},
            {"tid", thread},
            {"ts", microseconds(event.begin - base)},
            {"dur", microseconds(event.end - event.begin)},
            {"args", std::move(args)}};
  }

  const size_t max_events_;
  const std::chrono::steady_clock::time_point clock_start_;
  // Modules by their scopes, operators by null, outermost first, and their events; -1: not kept.
  std::vector<std::pair<const void*, int>> open_;
  absl::flat_hash_map<int64_t, int> sending_;  // id -> event
};

ProfileScope::ProfileScope(const MeshPtr& mesh, size_t max_events)
    : recorder_(std::make_unique<Recorder>(mesh, max_events)) {}

ProfileScope::~ProfileScope() = default;

int64_t ProfileScope::num_events() const {
  return static_cast<int64_t>(recorder_->events.size());
}

int64_t ProfileScope::dropped() const {
  return recorder_->dropped;
}

std::string ProfileScope::to_json() const {
  constexpr int64_t kDay = int64_t{24} * 3600 * 1000000000;
  return absl::StrCat("{\"traceEvents\": [\n",
                      recorder_->events_json(recorder_->started / kDay * kDay), "\n]}\n");
}

void ProfileScope::write(const std::string& path) const {
  std::ofstream file(path);
  file << to_json();
  file.close();
  if (file.fail()) cannot_write(path);
}

void ProfileScope::write_merged(const std::string& path) const {
  MeshContext& context = recorder_->observing.context();
  std::vector<int> all_dims(context.mesh().ndim());
  std::iota(all_dims.begin(), all_dims.end(), 0);
  Communicator& comm = context.communicator(all_dims);
  const CallOptions options = {.tag = "ProfileScope"};
  const auto everyones = [&](int64_t mine) {
    std::vector<int64_t> all(comm.size());
    throw_if_error(
        comm.all_gather(Buffer::of(&mine, 1), Buffer::of(all.data(), all.size()), options).wait());
    return all;
  };
  const std::vector<int64_t> starts = everyones(recorder_->started);
  std::string events = recorder_->events_json(*std::min_element(starts.begin(), starts.end()));
  const auto bytes = [](std::string& text) {
    return Buffer::of(reinterpret_cast<uint8_t*>(text.data()), text.size());
  };
  const std::vector<int64_t> sizes = everyones(static_cast<int64_t>(events.size()));
  int64_t written = 1;
  if (comm.rank() == 0) {
    std::ofstream file(path);
    file << "{\"traceEvents\": [\n" << events;
    for (int peer = 1; peer < comm.size(); ++peer) {
      events.resize(sizes[peer]);
      throw_if_error(comm.recv(bytes(events), peer, /*message_tag=*/0, options).wait());
      file << ",\n" << events;
    }
    file << "\n]}\n";
    file.close();
    written = !file.fail();
  } else {
    throw_if_error(comm.send(bytes(events), /*peer=*/0, /*message_tag=*/0, options).wait());
  }
  if (everyones(written)[0] == 0) cannot_write(path);
}

}  // namespace shardweave
