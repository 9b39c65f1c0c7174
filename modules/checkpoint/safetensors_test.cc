#include "shardweave/modules/checkpoint/safetensors.h"

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/modules/checkpoint/safetensors_index.h"
#include "shardweave/modules/checkpoint/testing/faulty_file_system.h"

namespace shardweave {
namespace {

using ::testing::HasSubstr;
namespace fs = std::filesystem;

class SafetensorsTest : public ::testing::Test {
 protected:
  SafetensorsTest() {
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  std::string path(const std::string& name) const { return folder_ + "/" + name; }
  // A file with this header, and so many bytes of data.
  std::string file(const std::string& header, size_t data_bytes) const {
    const uint64_t size = header.size();
    std::string all(reinterpret_cast<const char*>(&size), 8);
    all += header;
    for (size_t i = 0; i < data_bytes; ++i) all += static_cast<char>(i);
    std::ofstream(path("x.safetensors"), std::ios::binary) << all;
    return path("x.safetensors");
  }
  static std::string read(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }

  const std::string folder_ = ::testing::TempDir() + "/safetensors_test_" +
                              ::testing::UnitTest::GetInstance()->current_test_info()->name();
};

TEST_F(SafetensorsTest, WritesAndReadsWholeTensorsAndBoxes) {
  std::vector<float> w(3 * 5 * 7);
  std::iota(w.begin(), w.end(), 0.F);
  const std::vector<uint8_t> flags = {1, 0, 1};
  const double number = 2.5;
  auto writer = SafetensorsWriter::create(path("a.safetensors"),
                                          {{"flags", DType::kBool, {3}},
                                           {"w", DType::kF32, {3, 5, 7}},
                                           {"empty", DType::kBF16, {4, 0}},
                                           {"number", DType::kF64, {}}},
                                          {{"format", "pt"}});
  ASSERT_TRUE(writer.ok()) << writer.status();
  std::vector<std::string> order;
  for (const StoredTensor& info : (*writer)->tensors()) {
    order.push_back(info.name);
    const void* bytes = info.name == "w"       ? static_cast<const void*>(w.data())
                        : info.name == "flags" ? static_cast<const void*>(flags.data())
                                               : &number;
    ASSERT_TRUE((*writer)->append(bytes, info.end - info.begin).ok());
  }
  EXPECT_EQ(order, (std::vector<std::string>{"number", "w", "empty", "flags"}));  // aligned
  ASSERT_TRUE((*writer)->finish().ok());

  const auto file = SafetensorsFile::open(path("a.safetensors"));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ((*file)->metadata().at("format"), "pt");
  EXPECT_EQ((*file)->tensors().size(), 4);
  EXPECT_EQ((*file)->find("none"), nullptr);
  EXPECT_EQ((*file)->find("empty")->shape, (Dims{4, 0}));
  double got = 0;
  ASSERT_TRUE((*file)->read(*(*file)->find("number"), &got).ok());
  EXPECT_EQ(got, number);
  const StoredTensor& info = *(*file)->find("w");
  EXPECT_EQ(std::memcmp((*file)->mapped(info), w.data(), w.size() * 4), 0);
  // Every box.
  for (int64_t a = 0; a <= 3; ++a) {
    for (int64_t b = 0; b <= 5; ++b) {
      for (int64_t c = 0; c <= 7; c += 3) {
        const Box box = {{3 - a, (5 - b) / 2, (7 - c) / 2}, {a, b, c}};
        std::vector<float> part(static_cast<size_t>(a * b * c), -1.F);
        ASSERT_TRUE((*file)->read(info, box, part.data()).ok());
        size_t at = 0;
        for (int64_t i = 0; i < a; ++i) {
          for (int64_t j = 0; j < b; ++j) {
            for (int64_t k = 0; k < c; ++k) {
              const int64_t from =
                  ((box.offset[0] + i) * 5 + box.offset[1] + j) * 7 + box.offset[2] + k;
              ASSERT_EQ(part[at++], w[static_cast<size_t>(from)]);
            }
          }
        }
      }
    }
  }
  const Box outside = {{1, 0, 0}, {3, 1, 1}};
  std::vector<float> none(3);
  EXPECT_THAT(std::string((*file)->read(info, outside, none.data()).message()),
              HasSubstr("[1:4, 0:1, 0:1] is not in \"w\", which is [0:3, 0:5, 0:7]"));
}

TEST_F(SafetensorsTest, ReadsTheBytesOfOneTensorOfALargeFile) {
  // 10 GB that take up no disk.
  const int64_t rows = int64_t{10} << 20;
  std::string header = R"({"big":{"dtype":"F32","shape":[)" + std::to_string(rows) +
                       R"(,256],"data_offsets":[0,)" + std::to_string(rows * 1024) +
                       R"(]},"small":{"dtype":"I64","shape":[2],"data_offsets":[)" +
                       std::to_string(rows * 1024) + "," + std::to_string(rows * 1024 + 16) + "]}}";
  const std::string name = file(header, 0);
  const auto data = static_cast<int64_t>(8 + header.size());
  fs::resize_file(name, static_cast<uintmax_t>(data + rows * 1024 + 16));
  {
    std::fstream at(name, std::ios::binary | std::ios::in | std::ios::out);
    const int64_t values[] = {7, 8};
    at.seekp(data + rows * 1024);
    at.write(reinterpret_cast<const char*>(values), 16);
  }
  auto counting = std::make_shared<testing::FaultyFileSystem>(testing::Fault());
  const auto opened = SafetensorsFile::open(name, counting);
  ASSERT_TRUE(opened.ok()) << opened.status();
  const int64_t for_header = counting->bytes_read();
  EXPECT_EQ(for_header, data);
  int64_t values[2] = {};
  ASSERT_TRUE((*opened)->read(*(*opened)->find("small"), values).ok());
  EXPECT_EQ(values[1], 8);
  EXPECT_EQ(counting->bytes_read() - for_header, 16);
  std::vector<float> part(3 * 5);
  ASSERT_TRUE(
      (*opened)->read(*(*opened)->find("big"), Box{{rows / 2, 100}, {3, 5}}, part.data()).ok());
  EXPECT_EQ(counting->bytes_read() - for_header, 16 + 3 * 5 * 4);
}

TEST_F(SafetensorsTest, RefusesWhatIsNotWell) {
  const std::string one = R"("w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
  struct Case {
    std::string header;
    size_t data;
    const char* words;
  };
  const std::vector<Case> cases = {
      {"[1]", 0, "does not begin with '{'"},
      {"{", 0, "no JSON"},
      {"{" + one + "," + one + "}", 8, "\"w\" stands twice"},
      {R"({"w":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 8,
       "stands twice"},
      {R"({"w":{"dtype":"F31","shape":[2],"data_offsets":[0,8]}})", 8, "\"dtype\": wanted one of"},
      {R"({"w":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", 8, "\"shape\": wanted"},
      {R"({"w":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}})", 8, "\"shape\": wanted"},
      {R"({"w":{"dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,8]}})", 8, "shape"},
      {R"({"w":{"dtype":"F32","shape":[4294967296,4294967296,4],"data_offsets":[0,0]}})", 0,
       "more than 2^63"},
      {R"({"w":{"dtype":"F32","shape":[4294967296,4294967296,0],"data_offsets":[0,0]}})", 0,
       "more than 2^63"},
      {R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 4, "wanted 8 bytes"},
      {R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", 8, "begins and ends"},
      {R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8,9]}})", 8, "begins and ends"},
      {R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"x":1}})", 8, "an object with"},
      {R"({"w":{"dtype":"F32","shape":[2]}})", 8, "an object with"},
      {R"({"w":3})", 0, "\"w\": wanted an object"},
      {"{" + one + R"(,"v":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", 8, "overlaps"},
      {R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})", 12, "leaves a hole"},
      {"{" + one + "}", 7, "have 8 bytes; the file has 7"},
      {"{" + one + "}", 9, "have 8 bytes; the file has 9"},
      {R"({"__metadata__":{"a":1}})", 0, "\"__metadata__\", \"a\": wanted a text"},
      {R"({"__metadata__":[]})", 0, "wanted an object of texts"},
      {"{\"w\":" + std::string(100, '[') + std::string(100, ']') + "}", 0, "deeper than 64"},
      // It ends there: what is behind is not read, and so is not missing.
      {"{\"w\":" + std::string(100, '['), 0, "deeper than 64"},
  };
  for (const Case& c : cases) {
    const auto opened = SafetensorsFile::open(file(c.header, c.data));
    ASSERT_FALSE(opened.ok()) << c.header;
    EXPECT_EQ(opened.status().code(), absl::StatusCode::kInvalidArgument) << opened.status();
    EXPECT_THAT(std::string(opened.status().message()), HasSubstr(c.words));
    EXPECT_THAT(std::string(opened.status().message()), HasSubstr("x.safetensors"));
  }
  const auto with_size = [&](uint64_t size, size_t bytes) {
    std::string all(reinterpret_cast<const char*>(&size), 8);
    std::ofstream(path("y"), std::ios::binary) << (all + std::string(bytes, ' ')).substr(0, bytes);
    return std::string(SafetensorsFile::open(path("y")).status().message());
  };
  EXPECT_THAT(with_size(100, 7), HasSubstr("has 7 bytes; a safetensors file has 8 or more"));
  EXPECT_THAT(with_size(100, 50), HasSubstr("cut short"));
  EXPECT_THAT(with_size(~uint64_t{0}, 50), HasSubstr("no safetensors file"));
  EXPECT_THAT(with_size(100'000'001, 50), HasSubstr("wanted at most 100000000"));
  EXPECT_EQ(SafetensorsFile::open(path("none")).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(SafetensorsFile::open(folder_).status().code(), absl::StatusCode::kInvalidArgument);
  fs::create_symlink(path("x.safetensors"), path("link"));
  const std::string good = file("{" + one + "}", 8);
  EXPECT_TRUE(SafetensorsFile::open(path("link")).ok());
  EXPECT_EQ(SafetensorsFile::open(path("link"), nullptr, Symlinks::kRefuse).status().code(),
            absl::StatusCode::kFailedPrecondition);
  // What becomes shorter after it was opened is an error, too.
  const auto opened = SafetensorsFile::open(good);
  fs::resize_file(good, 8);
  float two[2];
  EXPECT_EQ((*opened)->read((*opened)->tensors()[0], two).code(), absl::StatusCode::kDataLoss);
}

TEST_F(SafetensorsTest, WriterRefusesAndStopsAtAFullDisk) {
  const auto refused = [&](std::vector<StoredTensor> tensors) {
    return SafetensorsWriter::create(path("w"), std::move(tensors)).status();
  };
  EXPECT_THAT(std::string(refused({{"a", DType::kU8, {1}}, {"a", DType::kU8, {1}}}).message()),
              HasSubstr("there is another of that name"));
  EXPECT_EQ(refused({{"__metadata__", DType::kU8, {1}}}).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(refused({{"a", DType::kF64, {int64_t{1} << 61}}}).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(refused({{"\xff", DType::kU8, {1}}}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_FALSE(fs::exists(path("w")));
  auto writer = SafetensorsWriter::create(path("w"), {{"a", DType::kU8, {2}}});
  ASSERT_TRUE(writer.ok());
  EXPECT_EQ((*writer)->append("abc", 3).code(), absl::StatusCode::kOutOfRange);
  EXPECT_TRUE((*writer)->append("a", 1).ok());
  EXPECT_EQ((*writer)->finish().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(refused({{"a", DType::kU8, {2}}}).code(), absl::StatusCode::kAlreadyExists);

  // Short writes are no error; a full disk is, at whichever write.
  for (int64_t at = 1; at < 6; ++at) {
    fs::remove(path("v"));
    auto faulty = std::make_shared<testing::FaultyFileSystem>(
        testing::Fault{.kind = testing::FaultKind::kFail, .at = at, .most_written = 40});
    auto some = SafetensorsWriter::create(path("v"), {{"a", DType::kU8, {100}}}, {}, faulty);
    absl::Status status = some.status();
    const std::string bytes(100, 'x');
    if (status.ok()) status = (*some)->append(bytes.data(), 100);
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << at;
  }
  fs::remove(path("v"));
  auto short_writes = std::make_shared<testing::FaultyFileSystem>(
      testing::Fault{.kind = testing::FaultKind::kNone, .at = 0, .most_written = 7});
  auto all = SafetensorsWriter::create(path("v"), {{"a", DType::kU8, {100}}}, {}, short_writes);
  ASSERT_TRUE(all.ok());
  ASSERT_TRUE((*all)->append(std::string(100, 'x').data(), 100).ok());
  ASSERT_TRUE((*all)->finish().ok());
  EXPECT_TRUE(SafetensorsFile::open(path("v")).ok());
}

TEST_F(SafetensorsTest, FollowsAnIndex) {
  const auto write = [&](const std::string& name, const std::string& tensor) {
    auto writer = SafetensorsWriter::create(path(name), {{tensor, DType::kU8, {1}}});
    ASSERT_TRUE((*writer)->append(tensor.data(), 1).ok());
    ASSERT_TRUE((*writer)->finish().ok());
  };
  const auto index = [&](const std::string& text) {
    std::ofstream(path("model.safetensors.index.json"), std::ios::binary) << text;
    return SafetensorsIndex::open(folder_);
  };
  EXPECT_EQ(SafetensorsIndex::open(folder_).status().code(), absl::StatusCode::kNotFound);
  write("model-1.safetensors", "a");
  EXPECT_EQ((*SafetensorsIndex::open(folder_))->names(), std::vector<std::string>{"a"});
  write("model-2.safetensors", "b");
  EXPECT_EQ(SafetensorsIndex::open(folder_).status().code(), absl::StatusCode::kNotFound);
  // Of several the one of this name; an index comes before it.
  write("model.safetensors", "m");
  EXPECT_EQ((*SafetensorsIndex::open(folder_))->names(), std::vector<std::string>{"m"});
  auto model = index(R"({"metadata": {"total_size": 2}, "weight_map":
      {"b": "model-2.safetensors", "a": "model-1.safetensors", "c": "model-1.safetensors",
       "d": "model-3.safetensors"}})");
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ((*model)->names().size(), 4);
  const auto b = (*model)->find("b");
  ASSERT_TRUE(b.ok()) << b.status();
  char byte = 0;
  ASSERT_TRUE(b->file->read(*b->info, &byte).ok());
  EXPECT_EQ(byte, 'b');
  EXPECT_THAT(std::string((*model)->find("c").status().message()), HasSubstr("the index says"));
  EXPECT_EQ((*model)->find("d").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ((*model)->find("e").status().code(), absl::StatusCode::kNotFound);
  for (const char* text :
       {"[]", "{}", R"({"weight_map": {"a": 3}})", R"({"weight_map": {"a": "../a.safetensors"}})",
        R"({"weight_map": {"a": "/etc/passwd"}})", R"({"weight_map": {"a": ".."}})"}) {
    EXPECT_EQ(index(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
}

// A file is one whatever it is called.
TEST_F(SafetensorsTest, AFileOfAnotherName) {
  auto writer = SafetensorsWriter::create(path("m.safetensors"), {{"w", DType::kU8, {1}}});
  ASSERT_TRUE((*writer)->append("w", 1).ok());
  ASSERT_TRUE((*writer)->finish().ok());
  std::filesystem::rename(path("m.safetensors"), path("weights"));
  const auto model = SafetensorsIndex::open(path("weights"));
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ((*model)->names(), std::vector<std::string>{"w"});
  const absl::Status nowhere = SafetensorsIndex::open(path("nowhere")).status();
  EXPECT_EQ(nowhere.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(nowhere.message()), HasSubstr("cannot open"));
}

// What no number of 64 bits says is not said.
TEST_F(SafetensorsTest, BoxesThatEndBehindAllNumbers) {
  EXPECT_EQ((Box{{INT64_MAX, 1}, {2, 1}}.to_string()),
            "[9223372036854775807:9223372036854775807+2, 1:2]");
}

TEST_F(SafetensorsTest, ChecksumsComeWithTheBytes) {
  std::vector<int32_t> all(1000 * 300);
  std::iota(all.begin(), all.end(), 0);
  const auto bytes = static_cast<int64_t>(all.size() * 4);
  auto writer = SafetensorsWriter::create(path("w"), {{"w", DType::kI32, {1000, 300}}});
  uint64_t sum = 0, read_sum = 0;
  ASSERT_TRUE((*writer)->append(all.data(), bytes, &sum).ok());
  ASSERT_TRUE((*writer)->finish().ok());
  const auto file = SafetensorsFile::open(path("w"));
  ASSERT_TRUE(file.ok()) << file.status();
  std::vector<int32_t> got(all.size());
  ASSERT_TRUE((*file)->read(*(*file)->find("w"), got.data(), &read_sum).ok());
  EXPECT_EQ(got, all);
  EXPECT_EQ(sum, read_sum);
}

TEST_F(SafetensorsTest, ThreadsShareAnIndex) {
  constexpr int kFiles = 20;
  std::string map;
  int64_t bytes = 0;  // of all headers
  for (int i = 0; i < kFiles; ++i) {
    const std::string name = "t" + std::to_string(i), file = name + ".safetensors";
    auto writer = SafetensorsWriter::create(path(file), {{name, DType::kU8, {1}}});
    ASSERT_TRUE((*writer)->append("x", 1).ok());
    ASSERT_TRUE((*writer)->finish().ok());
    bytes += static_cast<int64_t>(fs::file_size(path(file))) - 1;
    map += (i == 0 ? "\"" : ", \"") + name + "\": \"" + file + "\"";
  }
  std::ofstream(path("model.safetensors.index.json")) << "{\"weight_map\": {" + map + "}}";
  const auto counting = std::make_shared<testing::FaultyFileSystem>(testing::Fault());
  auto model = SafetensorsIndex::open(folder_, counting);
  ASSERT_TRUE(model.ok()) << model.status();
  const int64_t before = counting->bytes_read();
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < kFiles; ++i) {
        const auto place = (*model)->find("t" + std::to_string(i));
        EXPECT_TRUE(place.ok()) << place.status();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(counting->bytes_read() - before, bytes);  // each was opened once
}

}  // namespace
}  // namespace shardweave
