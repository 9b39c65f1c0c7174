// Metrics, speed, and the end of a run.
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "shardweave/comm/world.h"
#include "shardweave/modules/train/event_file.h"
#include "shardweave/modules/train/graceful_stop.h"
#include "shardweave/modules/train/metrics_writer.h"
#include "shardweave/modules/train/throughput.h"

namespace shardweave {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string path_of(const std::string& name) {
  return std::string(std::getenv("TEST_TMPDIR")) + "/" + name;
}
std::string bytes_in(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// --- JSON lines ----------------------------------------------------------------------------------

TEST(JsonLinesTest, ALineForEachStep) {
  const std::string path = path_of("run.jsonl");
  const double nan = std::nan(""), inf = std::numeric_limits<double>::infinity();
  {
    auto log = JsonLines::open(path);
    ASSERT_TRUE(log.ok()) << log.status();
    const absl::Time time = absl::FromUnixMillis(1732461123250);
    const Metric first[] = {{"loss", 2.5}, {"lr", 3e-4}};
    ASSERT_TRUE(log->write(10, first, time).ok());
    ASSERT_TRUE(log->write(11, {{"loss", nan}, {"up", inf}, {"down", -inf}}).ok());
    EXPECT_EQ(bytes_in(path).substr(0, bytes_in(path).find('\n')),
              R"({"step":10,"time":1732461123.25,"loss":2.5,"lr":0.0003})");
    EXPECT_THAT(std::string(log->write(12, {{"time", 1}}).message()), HasSubstr("'time'"));
    EXPECT_THAT(std::string(log->write(12, {{"a", 1}, {"a", 2}}).message()), HasSubstr("'a'"));
    EXPECT_TRUE(log->write(12, {{"\xff", 1}}).ok());
  }
  std::ifstream file(path);
  std::vector<nlohmann::json> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(nlohmann::json::parse(line));
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_EQ(lines[1]["loss"], "NaN");
  EXPECT_EQ(lines[1]["up"], "Infinity");
  EXPECT_EQ(lines[1]["down"], "-Infinity");
}

TEST(JsonLinesTest, GoesOnBehindWholeLines) {
  const std::string whole = "{\"step\":1}\n{\"step\":2}\n";
  for (const std::string& torn :
       {std::string(), std::string("{\"st"), "{\"step\":3,\"" + std::string(9000, 'x')}) {
    for (const std::string& before : {whole, std::string()}) {
      const std::string path = path_of("torn.jsonl");
      std::ofstream(path, std::ios::binary) << before + torn;
      auto log = JsonLines::open(path);
      ASSERT_TRUE(log.ok()) << log.status();
      ASSERT_TRUE(log->write(3, {{"loss", 1}}).ok());
      EXPECT_EQ(bytes_in(path).substr(0, before.size() + 9), before + "{\"step\":3");
    }
  }
}

TEST(JsonLinesTest, LeavesTheFilesOfOthersAsTheyAre) {
  for (const std::string& before : {std::string(), std::string("{\"step\":1}\n")}) {
    for (const std::string& last : {std::string(9000, 'x'), std::string("{\"loss\":1}")}) {
      const std::string path = path_of("foreign.jsonl");
      std::ofstream(path, std::ios::binary) << before + last;
      const absl::Status status = JsonLines::open(path).status();
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_THAT(std::string(status.message()), HasSubstr("ends in the middle of a line"));
      EXPECT_EQ(bytes_in(path), before + last);
    }
  }
}

TEST(JsonLinesTest, SaysWhatIsWrong) {
  const auto missing = JsonLines::open(path_of("no/such/run.jsonl")).status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(missing.message()), HasSubstr("no/such/run.jsonl: cannot be opened"));
  auto full = JsonLines::open("/dev/full");
  ASSERT_TRUE(full.ok()) << full.status();
  const absl::Status status = full->write(1, {{"loss", 1}});
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("/dev/full: cannot be written: No space"));
  EXPECT_EQ(full->write(2, {{"loss", 1}}), status);
}

// --- event files ---------------------------------------------------------------------------------

// CRC-32C, bit by bit; and protocol buffers, with nothing of the writer's.
uint32_t crc32c(const std::string& bytes) {
  uint32_t crc = ~uint32_t{0};
  for (const char byte : bytes) {
    crc ^= static_cast<unsigned char>(byte);
    for (int i = 0; i < 8; ++i) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78 : 0);
  }
  return ~crc;
}
template <typename T>
T number_at(const std::string& bytes, size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof(value));
  return value;
}
std::vector<std::string> records_in(const std::string& path) {
  const std::string bytes = bytes_in(path);
  std::vector<std::string> records;
  const auto expect_sum = [&](const std::string& of, size_t at) {
    const uint32_t unmasked = number_at<uint32_t>(bytes, at) - 0xa282ead8;
    EXPECT_EQ(unmasked >> 17 | unmasked << 15, crc32c(of));
  };
  for (size_t at = 0; at < bytes.size();) {
    const auto size = number_at<uint64_t>(bytes, at);
    expect_sum(bytes.substr(at, 8), at + 8);
    records.push_back(bytes.substr(at + 12, size));
    expect_sum(records.back(), at + 12 + size);
    at += 16 + size;
    EXPECT_LE(at, bytes.size());
  }
  return records;
}
// Of each field its bytes; of a varint its number as eight bytes.
std::multimap<int, std::string> fields_of(const std::string& message) {
  std::multimap<int, std::string> fields;
  size_t at = 0;
  const auto varint = [&] {
    uint64_t value = 0;
    for (int shift = 0;; shift += 7) {
      const auto byte = static_cast<unsigned char>(message.at(at++));
      value |= uint64_t{byte & 0x7fu} << shift;
      if (byte < 0x80) return value;
    }
  };
  while (at < message.size()) {
    const uint64_t key = varint();
    size_t size = key % 8 == 1 ? 8 : 4;
    if (key % 8 == 0) {
      const uint64_t value = varint();
      fields.emplace(key / 8, std::string(reinterpret_cast<const char*>(&value), 8));
      continue;
    }
    if (key % 8 == 2) size = varint();
    fields.emplace(static_cast<int>(key / 8), message.substr(at, size));
    at += size;
  }
  return fields;
}

TEST(EventFileTest, IsWhatTensorBoardReads) {
  EXPECT_EQ(crc32c("123456789"), 0xe3069283);  // the check value of the algorithm
  const std::string folder = path_of("runs/first");
  std::string path;
  {
    auto file = EventFile::create(folder);
    ASSERT_TRUE(file.ok()) << file.status();
    path = file->path();
    EXPECT_THAT(path, HasSubstr(folder + "/events.out.tfevents."));
    auto second = EventFile::create(folder);  // beside it
    EXPECT_NE(second->path(), path);
    const Metric metrics[] = {{"loss", 2.5}, {"a name with \xc3\xa4", -std::nan("")}};
    ASSERT_TRUE(file->write(300, metrics, absl::FromUnixMillis(1732461123250)).ok());
    for (const int64_t step : {int64_t{0}, int64_t{-1}, INT64_MAX}) {
      ASSERT_TRUE(file->write(step, {{std::string(200, 'n'), 1e300}}).ok());
    }
    EXPECT_EQ(records_in(path).size(), 1u);
    ASSERT_TRUE(file->flush().ok());
    EXPECT_EQ(records_in(path).size(), 5u);
    ASSERT_TRUE(file->write(1, {}).ok());
  }
  const std::vector<std::string> records = records_in(path);
  ASSERT_EQ(records.size(), 6u);
  auto version = fields_of(records[0]);
  EXPECT_EQ(version.find(3)->second, "brain.Event:2");
  EXPECT_EQ(version.size(), 2u);
  auto event = fields_of(records[1]);
  EXPECT_EQ(number_at<double>(event.find(1)->second, 0), 1732461123.25);
  EXPECT_EQ(number_at<int64_t>(event.find(2)->second, 0), 300);
  std::vector<std::string> names;
  std::vector<float> values;
  const auto summary = fields_of(event.find(5)->second);
  for (const auto& [field, value] : summary) {
    EXPECT_EQ(field, 1);
    auto of = fields_of(value);
    names.push_back(of.find(1)->second);
    values.push_back(number_at<float>(of.find(2)->second, 0));
  }
  EXPECT_THAT(names, ElementsAre("loss", "a name with \xc3\xa4"));
  EXPECT_EQ(values[0], 2.5f);
  EXPECT_TRUE(std::isnan(values[1]));
  EXPECT_EQ(number_at<int64_t>(fields_of(records[3]).find(2)->second, 0), -1);
  EXPECT_EQ(number_at<int64_t>(fields_of(records[4]).find(2)->second, 0), INT64_MAX);
  auto large = fields_of(fields_of(fields_of(records[4]).find(5)->second).find(1)->second);
  EXPECT_EQ(large.find(1)->second, std::string(200, 'n'));
  EXPECT_EQ(number_at<float>(large.find(2)->second, 0), std::numeric_limits<float>::infinity());
}

TEST(EventFileTest, SaysWhatIsWrong) {
  std::ofstream(path_of("a_file")) << "x";
  const absl::Status status = EventFile::create(path_of("a_file/run")).status();
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(std::string(status.message()), HasSubstr("a_file/run: cannot be made"));
}

// --- speed ---------------------------------------------------------------------------------------

TEST(ThroughputTest, CountsSinceTheLastTime) {
  const Throughput::Clock::time_point begin{};
  const auto at = [&](double seconds) {
    return begin + std::chrono::duration_cast<Throughput::Clock::duration>(
                       std::chrono::duration<double>(seconds));
  };
  Throughput throughput({.tokens_per_step = 100, .flops_per_token = 6e3, .peak_flops = 4e6}, begin);
  EXPECT_EQ(throughput.since_last().tokens_per_second, 0);
  for (int i = 1; i <= 4; ++i) throughput.step_done(at(0.5 * i));
  RunSpeed speed = throughput.since_last();
  EXPECT_EQ(speed.steps, 4);
  EXPECT_DOUBLE_EQ(speed.seconds, 2);
  EXPECT_DOUBLE_EQ(speed.tokens_per_second, 200);
  EXPECT_DOUBLE_EQ(speed.flops_per_second, 1.2e6);
  EXPECT_DOUBLE_EQ(speed.mfu, 0.3);
  EXPECT_GT(speed.peak_resident_bytes, 1 << 20);
  EXPECT_THAT(speed.to_string(),
              AllOf(HasSubstr("200 tokens/s, 30.0 % MFU, "), HasSubstr("GB resident at most")));
  EXPECT_EQ(speed.metrics()[2].name, "mfu");
  throughput.leave_out(at(7));  // an evaluation
  throughput.step_done(at(7.5));
  EXPECT_DOUBLE_EQ(throughput.since_last().tokens_per_second, 200);
  EXPECT_EQ(throughput.since_last().steps, 0);

  Throughput unknown({.tokens_per_step = 1}, begin);
  unknown.step_done(at(1));
  speed = unknown.since_last();
  EXPECT_EQ(speed.mfu, 0);
  EXPECT_THAT(speed.to_string(), HasSubstr("1.0 tokens/s, "));
  EXPECT_EQ(speed.metrics().size(), 2u);
}

TEST(ThroughputTest, FlopsOfATransformer) {
  // GPT-3: 175e9 parameters, 96 layers of 12288, 2048 tokens: 1.05e12 for the parameters, 2.9e10 for attention.
  EXPECT_NEAR(transformer_flops_per_token(
                  {.parameters = 175'000'000'000, .layers = 96, .dim = 12288, .seq = 2048}),
              1.05e12 + 12.0 * 96 * 12288 * 2048, 1e6);
  EXPECT_EQ(transformer_flops_per_token({.layers = 1, .dim = 8, .seq = 4, .causal = true}), 192);
}

TEST(ThroughputTest, Memory) {
  const int64_t before = resident_bytes();
  ASSERT_GT(before, 1 << 20);
  EXPECT_LE(before, peak_resident_bytes() + (1 << 22));  // the kernel counts in steps
  std::vector<char> much(64 << 20, 'x');
  EXPECT_GT(resident_bytes(), before + (48 << 20));
  EXPECT_GE(peak_resident_bytes(), before + (48 << 20));
  EXPECT_EQ(much[much.size() / 2], 'x');
}

// --- the end -------------------------------------------------------------------------------------

TEST(GracefulStopTest, AllRanksStopAtTheSameStep) {
  for (const int64_t every : {1, 3}) {
    auto signals = StopSignals::create();
    ASSERT_TRUE(signals.ok()) << signals.status();
    std::vector<int64_t> stopped(4);
    std::vector<int> reasons(4);
    const absl::Status status = run_ranks(4, [&](World& world) -> absl::Status {
      GracefulStop stop(world.comm(), signals->get(), {.every = every});
      for (int64_t step = 1; step < 1000; ++step) {
        // In the middle of a step, of one rank.
        if (world.rank() == 2 && step == 7) ::raise(SIGUSR1);
        const absl::StatusOr<bool> now = stop.step_done();
        if (!now.ok()) return now.status();
        if (!*now) continue;
        stopped[world.rank()] = step;
        reasons[world.rank()] = stop.signal();
        EXPECT_TRUE(*stop.step_done());  // without the others
        break;
      }
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
    // The signal is of all ranks that are threads, so some may see it a step earlier or later.
    EXPECT_THAT(stopped, ::testing::Each(stopped[0]));
    EXPECT_GE(stopped[0], 1);
    EXPECT_LE(stopped[0], 9);
    EXPECT_EQ(stopped[0] % every, 0);
    EXPECT_THAT(reasons, ::testing::Each(SIGUSR1));
  }
}

TEST(GracefulStopTest, OneRankMayAskForIt) {
  for (const int64_t every : {1, 2, 5}) {
    std::vector<int64_t> stopped(3);
    const absl::Status status = run_ranks(3, [&](World& world) -> absl::Status {
      GracefulStop stop(world.comm(), nullptr, {.every = every});
      for (int64_t step = 1; step < 1000; ++step) {
        if (world.rank() == 1 && step == 7) stop.request();
        const absl::StatusOr<bool> now = stop.step_done();
        if (!now.ok()) return now.status();
        if (*now) {
          stopped[world.rank()] = step;
          EXPECT_EQ(stop.signal(), 0);
          break;
        }
      }
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_THAT(stopped, ::testing::Each((7 + every - 1) / every * every));
  }
}

TEST(GracefulStopTest, ErrorsOfRanks) {
  const absl::Status gone = run_ranks(2, [](World& world) -> absl::Status {
    if (world.rank() == 0) return absl::DataLossError("bad data");
    GracefulStop stop(world.comm(), nullptr);
    return stop.step_done().status();
  });
  EXPECT_THAT(std::string(gone.message()), HasSubstr("bad data"));
  const absl::Status never = run_ranks(1, [](World& world) -> absl::Status {
    return GracefulStop(world.comm(), nullptr, {.every = 0}).step_done().status();
  });
  EXPECT_EQ(never.code(), absl::StatusCode::kInvalidArgument);
}

int usr1_before = 0;

TEST(StopSignalsTest, HandlersComeBack) {
  std::signal(SIGUSR1, [](int) { ++usr1_before; });
  {
    auto signals = StopSignals::create();
    ASSERT_TRUE(signals.ok()) << signals.status();
    EXPECT_EQ((*signals)->signal(), 0);
    EXPECT_EQ(StopSignals::create().status().code(), absl::StatusCode::kFailedPrecondition);
    ::raise(SIGTERM);
    ::raise(SIGUSR1);
    ::raise(SIGTERM);
    EXPECT_EQ((*signals)->signal(), SIGTERM);  // the first
    EXPECT_EQ(usr1_before, 0);
  }
  ::raise(SIGUSR1);
  EXPECT_EQ(usr1_before, 1);
  EXPECT_EQ(StopSignals::create({SIGUSR2, SIGKILL}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(StopSignals::create({-1}).status().code(), absl::StatusCode::kInvalidArgument);
  auto again = StopSignals::create();
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ((*again)->signal(), 0);
}

}  // namespace
}  // namespace shardweave
