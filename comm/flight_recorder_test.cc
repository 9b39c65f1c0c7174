#include "shardweave/comm/flight_recorder.h"

#include <thread>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace shardweave {
namespace {

using nlohmann::json;

const GroupInfo kGroup = {.name = "dp", .rank = 1, .world_ranks = {0, 2}};

Call all_reduce(uint64_t sequence, int64_t count, std::string_view tag = "") {
  Call call{.op = OpKind::kAllReduce, .sequence = sequence, .tag = tag};
  call.in.dtype = call.out.dtype = DType::kF32;
  call.in.count = call.out.count = count;
  return call;
}

Deadline now() {
  return std::chrono::steady_clock::now();
}

json operations(const FlightRecorder& recorder, int group = 0) {
  return json::parse(recorder.to_json())["groups"][group]["operations"];
}

TEST(FlightRecorderTest, TellsWhatHappened) {
  auto recorder = std::make_shared<FlightRecorder>();
  FlightLog log(recorder, kGroup, 8);
  const uint64_t first = log.start(all_reduce(1, 10, "loss"), now());
  const uint64_t second = log.start(all_reduce(2, 20), now());
  Call recv{.op = OpKind::kRecv, .peer = 0, .sequence = 1};
  recv.out.count = 3;
  log.start(recv, now());
  log.finish(second, true);
  log.finish(first, false);
  log.finish(first, true);  // too late

  const json dump = json::parse(recorder->to_json());
  ASSERT_EQ(dump["groups"].size(), 1u);
  const json& group = dump["groups"][0];
  EXPECT_EQ(group["name"], "dp");
  EXPECT_EQ(group["rank"], 1);
  EXPECT_EQ(group["world_ranks"], (json{0, 2}));
  const json& ops = group["operations"];
  ASSERT_EQ(ops.size(), 3u);
  EXPECT_EQ(ops[0]["operation"], "all_reduce");
  EXPECT_EQ(ops[0]["sequence"], 1);
  EXPECT_EQ(ops[0]["dtype"], "f32");
  EXPECT_EQ(ops[0]["bytes"], 40);
  EXPECT_EQ(ops[0]["tag"], "loss");
  EXPECT_EQ(ops[0]["state"], "failed");
  EXPECT_GE(ops[0]["microseconds"], 0);
  EXPECT_FALSE(ops[0].contains("peer"));
  EXPECT_EQ(ops[1]["state"], "done");
  EXPECT_EQ(ops[1]["bytes"], 80);
  EXPECT_EQ(ops[2]["operation"], "recv");
  EXPECT_EQ(ops[2]["state"], "issued");
  EXPECT_EQ(ops[2]["peer"], 0);
  EXPECT_FALSE(ops[2].contains("microseconds"));
  const double unix_now =
      std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  EXPECT_NEAR(ops[2]["time"].get<double>(), unix_now, 60);
}

TEST(FlightRecorderTest, KeepsTheLastOperationsOldestFirst) {
  auto recorder = std::make_shared<FlightRecorder>();
  FlightLog log(recorder, kGroup, 3);
  std::vector<uint64_t> lines;
  for (uint64_t i = 1; i <= 5; ++i) lines.push_back(log.start(all_reduce(i, 1), now()));
  log.finish(lines[0], false);  // overwritten by the fourth
  const json ops = operations(*recorder);
  ASSERT_EQ(ops.size(), 3u);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(ops[i]["sequence"], 3 + i);
    EXPECT_EQ(ops[i]["state"], "issued");
  }
  EXPECT_EQ(log.counters().of(OpKind::kAllReduce), (OpCounter{5, 20}));
}

TEST(FlightRecorderTest, CutsLongTags) {
  auto recorder = std::make_shared<FlightRecorder>();
  FlightLog log(recorder, kGroup, 2);
  // The 31st byte is the first of two of a letter.
  log.start(all_reduce(1, 1, std::string(30, 'a') + "\xc3\xa4 and more"), now());
  EXPECT_EQ(operations(*recorder)[0]["tag"], std::string(30, 'a') + "\xef\xbf\xbd");
}

TEST(FlightRecorderTest, CountsOverAllGroupsAlsoThoseThatAreGone) {
  auto recorder = std::make_shared<FlightRecorder>();
  FlightLog log(recorder, kGroup, 4);
  log.start(all_reduce(1, 1), now());
  {
    FlightLog other(recorder, {.name = "tp", .rank = 0, .world_ranks = {2}}, 4);
    other.start(all_reduce(1, 2), now());
    other.start({.op = OpKind::kBarrier}, now());
    EXPECT_EQ(json::parse(recorder->to_json())["groups"].size(), 2u);
  }
  EXPECT_EQ(json::parse(recorder->to_json())["groups"].size(), 1u);
  EXPECT_EQ(recorder->counters().of(OpKind::kAllReduce), (OpCounter{2, 12}));
  EXPECT_EQ(recorder->counters().total(), (OpCounter{3, 12}));
  const CommCounters before = recorder->counters();
  log.start(all_reduce(2, 5), now());
  EXPECT_EQ((recorder->counters() - before).total(), (OpCounter{1, 20}));
}

// Every entry that a reader gets is whole: all its facts are of one operation.
TEST(FlightRecorderTest, MayBeReadWhileItIsWritten) {
  auto recorder = std::make_shared<FlightRecorder>();
  FlightLog log(recorder, kGroup, 4);
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    for (uint64_t i = 1; !stop.load(); ++i) {
      const uint64_t line =
          log.start(all_reduce(i, static_cast<int64_t>(i), std::to_string(i)), now());
      log.finish(line, true);
    }
  });
  for (int round = 0; round < 200; ++round) {
    for (const json& op : operations(*recorder)) {
      const int64_t sequence = op["sequence"];
      EXPECT_EQ(op["bytes"], 4 * sequence);
      EXPECT_EQ(op["tag"], std::to_string(sequence));
    }
  }
  stop.store(true);
  writer.join();
}

}  // namespace
}  // namespace shardweave
