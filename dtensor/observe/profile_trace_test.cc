// Chrome traces: they parse, they nest, they are bounded, and all ranks are in one file.

#include "shardweave/dtensor/observe/profile_trace.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <sstream>

#include "ATen/ATen.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "shardweave/dtensor/observe/comm_trace.h"
#include "shardweave/dtensor/testing/on_mesh.h"

namespace shardweave {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using testing::on_mesh;
using testing::scattered;

std::string temporary(const std::string& name) {
  return std::string(std::getenv("TEST_TMPDIR")) + "/" + name;
}

json parsed_file(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return json::parse(text.str());
}

// Forward and backward, with communication, in modules.
void step(const MeshPtr& mesh) {
  const at::Tensor whole = at::arange(35, at::kDouble).view({7, 5});
  Placements cut(mesh->mesh().ndim());
  cut[0] = Shard(0);
  at::Tensor x = scattered(whole, mesh, cut).detach().requires_grad_();
  at::Tensor y;
  {
    const ModuleScope scope(mesh, "first");
    y = at::matmul(x, x.t());  // gathers
    const ModuleScope inner(mesh, "first.norm");
    y = y.softmax(0);
  }
  y.std().backward();  // std is made of other operators
  full_tensor(x.grad());
}

// Events of one thread: each lies inside another or beside it.
void expect_nested(const std::vector<json>& events) {
  std::vector<std::pair<double, double>> open;
  std::vector<json> sorted = events;
  std::stable_sort(sorted.begin(), sorted.end(), [](const json& a, const json& b) {
    if (a["ts"] != b["ts"]) return a["ts"].get<double>() < b["ts"].get<double>();
    return a["dur"].get<double>() > b["dur"].get<double>();
  });
  constexpr double kRounding = 2e-4;  // microseconds
  for (const json& event : sorted) {
    const double begin = event["ts"], end = begin + event["dur"].get<double>();
    EXPECT_GE(event["dur"].get<double>(), 0);
    while (!open.empty() && open.back().second <= begin + kRounding) open.pop_back();
    if (!open.empty()) {
      EXPECT_LE(end, open.back().second + kRounding) << event;
    }
    open.push_back({begin, end});
  }
}

TEST(ProfileTraceTest, OneFileWithAllRanks) {
  const std::string path = temporary("merged.json");
  on_mesh({{"dp", 2}, {"tp", 2}}, [&](const MeshPtr& mesh) {
    const ProfileScope profile(mesh);
    step(mesh);
    profile.write_merged(path);
  });
  const json trace = parsed_file(path);
  std::map<std::pair<int, int>, std::vector<json>> by_thread;
  std::map<int, std::string> processes;
  std::map<int, std::set<std::string>> threads;
  for (const json& event : trace["traceEvents"]) {
    if (event["ph"] == "M") {
      const std::string name = event["args"]["name"];
      if (event["name"] == "process_name") processes[event["pid"]] = name;
      if (event["name"] == "thread_name") threads[event["pid"]].insert(name);
      continue;
    }
    EXPECT_EQ(event["ph"], "X");
    EXPECT_GE(event["ts"].get<double>(), 0);
    by_thread[{event["pid"], event["tid"]}].push_back(event);
  }
  EXPECT_EQ(processes, (std::map<int, std::string>{{0, "rank 0 (dp=0, tp=0)"},
                                                   {1, "rank 1 (dp=0, tp=1)"},
                                                   {2, "rank 2 (dp=1, tp=0)"},
                                                   {3, "rank 3 (dp=1, tp=1)"}}));
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(threads[rank], (std::set<std::string>{"operators", "communication"}));
    const auto& operators = by_thread[{rank, 0}];
    const auto& communication = by_thread[{rank, 1}];
    expect_nested(operators);
    expect_nested(communication);
    const auto count = [](const std::vector<json>& events, const char* key, const char* value) {
      return std::count_if(events.begin(), events.end(),
                           [&](const json& e) { return e[key] == value; });
    };
    EXPECT_EQ(count(operators, "name", "aten::mm"), 3);  // one forward, two backward
    EXPECT_EQ(count(operators, "cat", "module"), 2);
    EXPECT_EQ(count(communication, "cat", "communication"),
              static_cast<int64_t>(communication.size()));
    EXPECT_GE(communication.size(), 2u);
    for (const json& event : operators) {
      if (event["name"] != "aten::_softmax") continue;
      EXPECT_EQ(event["args"]["module"], "first.norm");
      EXPECT_EQ(event["args"]["phase"], "forward");
    }
    // Communication takes place inside of an operator, but for what was asked for explicitly.
    for (const json& sent : communication) {
      EXPECT_GT(sent["args"]["bytes"], 0);
      if (!sent["args"]["implicit"].get<bool>()) continue;
      const double begin = sent["ts"], end = begin + sent["dur"].get<double>();
      EXPECT_TRUE(std::any_of(operators.begin(), operators.end(), [&](const json& op) {
        const double from = op["ts"];
        return op["name"] == sent["args"]["for"] && from <= begin + 1e-3 &&
               end <= from + op["dur"].get<double>() + 1e-3;
      })) << sent;
    }
  }
}

TEST(ProfileTraceTest, AFilePerRank) {
  on_mesh({{"x", 3}}, [](const MeshPtr& mesh) {
    const std::string path = temporary(std::to_string(mesh->rank().value) + ".json");
    const ProfileScope profile(mesh);
    step(mesh);
    profile.write(path);
    const json trace = parsed_file(path);
    EXPECT_EQ(trace, json::parse(profile.to_json()));
    int64_t events = 0;
    for (const json& event : trace["traceEvents"]) {
      EXPECT_EQ(event["pid"], mesh->rank().value);
      events += event["ph"] == "X";
    }
    EXPECT_EQ(events, profile.num_events());
    EXPECT_EQ(profile.dropped(), 0);
  });
}

TEST(ProfileTraceTest, IsBounded) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const ProfileScope profile(mesh, /*max_events=*/5);
    step(mesh);
    EXPECT_EQ(profile.num_events(), 5);
    EXPECT_GT(profile.dropped(), 5);
    const json trace = json::parse(profile.to_json());
    const std::string last = trace["traceEvents"].back()["name"];
    EXPECT_EQ(last, std::to_string(profile.dropped()) + " events were not kept");
  });
}

TEST(ProfileTraceTest, BeginsAndEndsAnywhere) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor x = scattered(at::ones({4, 4}), mesh, {Shard(0)});
    std::optional<ProfileScope> profile;
    {
      std::optional<ModuleScope> scope(std::in_place, mesh, "began before");
      profile.emplace(mesh);
      x.softmax(0);
      scope.reset();
      const ModuleScope open(mesh, "has not ended");
      EXPECT_THROW(at::mm(x, at::ones({4, 4}).requires_grad_()), Error);
      const json trace = json::parse(profile->to_json());
      for (const json& event : trace["traceEvents"]) {
        EXPECT_NE(event["name"], "began before");
        EXPECT_NE(event["name"], "has not ended");
      }
    }
    EXPECT_THAT(profile->to_json(), HasSubstr("has not ended"));
    EXPECT_THAT(profile->to_json(), HasSubstr("aten::mm"));  // also what threw
    const int64_t events = profile->num_events();
    const MeshPtr other =
        value_or_throw(mesh->another(value_or_throw(mesh->mesh().flatten({}, "other"))));
    scattered(at::ones({4, 4}), other, {Shard(0)}).softmax(0);
    EXPECT_EQ(profile->num_events(), events);  // of another mesh
  });
}

TEST(ProfileTraceTest, AFileThatCannotBeWrittenIsAnErrorEverywhere) {
  std::mutex mutex;
  int errors = 0;
  on_mesh({{"dp", 2}, {"tp", 2}}, [&](const MeshPtr& mesh) {
    const ProfileScope profile(mesh);
    step(mesh);
    for (const bool merged : {true, false}) {
      try {
        if (merged) {
          profile.write_merged("/no/such/folder/trace.json");
        } else {
          profile.write("/no/such/folder/trace.json");
        }
        ADD_FAILURE() << "written";
      } catch (const Error& error) {
        EXPECT_THAT(error.what(), HasSubstr("'/no/such/folder/trace.json'"));
        const std::lock_guard lock(mutex);
        ++errors;
      }
    }
  });
  EXPECT_EQ(errors, 8);
}

}  // namespace
}  // namespace shardweave
