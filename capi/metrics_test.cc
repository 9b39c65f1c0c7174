// Metrics through C.
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "capi/testing/on_mesh.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "shardweave.h"
#include "shardweave/capi/handles.h"

namespace {

using namespace c_test;  // NOLINT: this file is a test in it

using Writer = Held<swv_metrics_writer, swv_metrics_writer_free>;

std::string path_of(const std::string& name) {
  return std::string(std::getenv("TEST_TMPDIR")) + "/" + name;
}
std::vector<nlohmann::json> lines_of(const std::string& path) {
  std::ifstream file(path);
  std::vector<nlohmann::json> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(nlohmann::json::parse(line));
  return lines;
}
void fails(swv_status* status, swv_code code, const std::string& why) {
  EXPECT_THAT(message_of(status, code), ::testing::HasSubstr(why));
}
constexpr const char* kNames[] = {"loss", "lr"};

TEST(MetricsTest, LinesOfJsonOfSeveralThreads) {
  const std::string path = path_of("run.jsonl");
  {
    Writer writer;
    ok(swv_metrics_writer_open_json_lines(path.c_str(), writer.out()));
    std::vector<std::thread> threads;
    for (int64_t t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        for (int64_t i = 0; i < 50; ++i) {
          const double values[] = {static_cast<double>(t), 0.5};
          ok(swv_metrics_writer_write(writer, i, kNames, values, 2));
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  Writer again;
  ok(swv_metrics_writer_open_json_lines(path.c_str(), again.out()));
  ok(swv_metrics_writer_write(again, 50, nullptr, nullptr, 0));
  ok(swv_metrics_writer_flush(again));
  const std::vector<nlohmann::json> lines = lines_of(path);
  ASSERT_EQ(lines.size(), 201);
  EXPECT_EQ(lines[7]["lr"], 0.5);
  EXPECT_EQ(lines.back()["step"], 50);
  EXPECT_EQ(lines.back().size(), 2);  // and "time"
}

TEST(MetricsTest, FilesOfTensorBoard) {
  const std::string folder = path_of("events");
  Writer writer;
  ok(swv_metrics_writer_create_events(folder.c_str(), 0, writer.out()));
  const double values[] = {2.5, 3e-4};
  ok(swv_metrics_writer_write(writer, 10, kNames, values, 2));
  ok(swv_metrics_writer_flush(writer));
  const auto file = std::filesystem::directory_iterator(folder)->path();
  EXPECT_NE(file.filename().string().find("tfevents"), std::string::npos);
  std::ifstream in(file, std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(in)), {});
  EXPECT_NE(bytes.find("brain.Event:2"), std::string::npos);
  EXPECT_NE(bytes.find("loss"), std::string::npos);
}

TEST(MetricsTest, SaysWhatIsWrong) {
  Writer writer;
  fails(swv_metrics_writer_open_json_lines("/dev/null/x", writer.out()),
        SWV_CODE_FAILED_PRECONDITION, "/dev/null/x");
  fails(swv_metrics_writer_open_json_lines(nullptr, writer.out()), SWV_CODE_INVALID_ARGUMENT,
        "argument 'path' is NULL");
  fails(swv_metrics_writer_create_events("/dev/null/x", 7, writer.out()),
        SWV_CODE_FAILED_PRECONDITION, "/dev/null/x");
  fails(swv_metrics_writer_create_events(path_of("events").c_str(), -1, writer.out()),
        SWV_CODE_INVALID_ARGUMENT, "first_step is -1; wanted 0 or more");
  ok(swv_metrics_writer_open_json_lines(path_of("wrong.jsonl").c_str(), writer.out()));
  const double values[] = {1, 2};
  const char* const twice[] = {"loss", "loss"};
  fails(swv_metrics_writer_write(writer, 1, twice, values, 2), SWV_CODE_INVALID_ARGUMENT, "loss");
  const char* const step[] = {"step"};
  fails(swv_metrics_writer_write(writer, 1, step, values, 1), SWV_CODE_INVALID_ARGUMENT, "step");
  const char* const none[] = {nullptr};
  fails(swv_metrics_writer_write(writer, 1, none, values, 1), SWV_CODE_INVALID_ARGUMENT,
        "argument 'names[0]' is NULL");
  fails(swv_metrics_writer_write(writer, 1, kNames, nullptr, 2), SWV_CODE_INVALID_ARGUMENT,
        "argument 'values' is NULL");
}

TEST(MetricsTest, AFullDisk) {
  Writer writer;
  ok(swv_metrics_writer_open_json_lines("/dev/full", writer.out()));
  const double values[] = {1, 2};
  for (int i = 0; i < 2; ++i) {
    fails(swv_metrics_writer_write(writer, i, kNames, values, 2), SWV_CODE_RESOURCE_EXHAUSTED,
          "/dev/full");
  }
}

}  // namespace
