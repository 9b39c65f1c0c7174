#include "shardweave/modules/checkpoint/file_system.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace shardweave {
namespace {

using ::testing::HasSubstr;

constexpr size_t kPage = kFilePage;

std::string random_bytes(size_t size) {
  std::mt19937_64 random(7);
  std::string bytes(size, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

// Of a file whose bytes are known, in no cache or in the system's.
class ReadPastCacheTest : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    std::ofstream(path_, std::ios::binary) << bytes_;
    absl::StatusOr<std::unique_ptr<ReadableFile>> file =
        posix_file_system()->open(path_, Symlinks::kRefuse);
    ASSERT_TRUE(file.ok()) << file.status();
    file_ = *std::move(file);
    through_ = static_cast<char*>(std::aligned_alloc(kPage, kThrough));
  }
  void TearDown() override { std::free(through_); }

  void forget_pages() const {
    const int file = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
    EXPECT_EQ(::fsync(file), 0);
    EXPECT_EQ(::posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED), 0);
    ::close(file);
  }

  bool can_read_past_cache() const {
    const int file = ::open(path_.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC);
    const bool can = file >= 0 && ::pread(file, through_, kPage, 0) == static_cast<ssize_t>(kPage);
    std::fill_n(through_, kPage, '?');
    ::close(file);
    return can;
  }

  static constexpr size_t kThrough = 128 * kPage;
  const std::string path_ = ::testing::TempDir() + "/read_past_cache";
  const std::string bytes_ = random_bytes(300 * kPage + 123);
  std::unique_ptr<ReadableFile> file_;
  char* through_ = nullptr;
};

TEST_P(ReadPastCacheTest, TheBytesAndNoOthersAreWritten) {
  constexpr char kGuard = '!';
  const size_t end = bytes_.size();
  // Where it begins, how many bytes: less and more than is worth it, than goes into `through`, up to the end.
  const std::vector<std::pair<size_t, size_t>> reads = {
      {0, 1},
      {0, kThrough},
      {0, kThrough + 1},
      {1, kThrough - 1},
      {1, kThrough},
      {kPage - 1, kThrough - 2 * kPage},
      {kPage - 1, kThrough - kPage + 1},
      {kPage - 1, kThrough - kPage + 2},
      {3 * kPage, 64 * kPage},
      {3 * kPage + 77, 64 * kPage - 1},
      {3 * kPage + 77, 64 * kPage + 5},
      {end - 100 * kPage, 100 * kPage},
      {end - 100 * kPage - 5, 100 * kPage},
      {200 * kPage, 100 * kPage},
      {200 * kPage, 100 * kPage + 123},
      {end, 0},
      {0, end},
  };
  for (const auto& [offset, size] : reads) {
    if (!GetParam()) forget_pages();
    std::fill_n(through_, kThrough, '?');
    std::string out(size + 2, kGuard);
    const absl::Status status = file_->read_past_cache_at(
        static_cast<int64_t>(offset), out.data() + 1, size, absl::MakeSpan(through_, kThrough));
    EXPECT_TRUE(status.ok()) << status;
    // Not EXPECT_EQ(), which would print a megabyte.
    EXPECT_TRUE(out == kGuard + bytes_.substr(offset, size) + kGuard) << size << " from " << offset;
    // What is in the cache, little, or more than goes into `through` does not come by that.
    const size_t pages = (offset % kPage + size + kPage - 1) / kPage;
    const bool comes_past =
        !GetParam() && can_read_past_cache() && size >= 64 * kPage && pages * kPage <= kThrough;
    EXPECT_EQ(std::string(through_, kThrough) != std::string(kThrough, '?'), comes_past)
        << size << " from " << offset;
  }
}

TEST_P(ReadPastCacheTest, WhatTheFileHasNotIsAnError) {
  if (!GetParam()) forget_pages();
  const auto read = [&](int64_t offset, size_t size) {
    std::string out(size, '\0');
    return file_->read_past_cache_at(offset, out.data(), size, absl::MakeSpan(through_, kThrough));
  };
  const auto end = static_cast<int64_t>(bytes_.size());
  for (const int64_t offset : {end - 100 * kFilePage + 1, end, end + 1, int64_t{-1}}) {
    EXPECT_EQ(read(offset, 100 * kPage).code(), absl::StatusCode::kOutOfRange) << offset;
  }
  ASSERT_EQ(::truncate(path_.c_str(), 250 * kFilePage + 1), 0);
  const absl::Status cut = read(200 * kFilePage, 100 * kPage);
  EXPECT_EQ(cut.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(cut.message()), HasSubstr("has become shorter"));
}

INSTANTIATE_TEST_SUITE_P(All, ReadPastCacheTest, ::testing::Bool(),
                         [](const auto& its) { return its.param ? "Cached" : "InNoCache"; });

}  // namespace
}  // namespace shardweave
