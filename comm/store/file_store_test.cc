#include "shardweave/comm/store/file_store.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/comm/store/file_store_log.h"
#include "shardweave/comm/store/store_conformance.h"

namespace shardweave {
namespace {

using testing::HasSubstr;

constexpr absl::Duration kLong = absl::Seconds(30);

// A path in a directory of its own, which goes with it.
class TemporaryPath {
 public:
  TemporaryPath() {
    std::string directory = absl::StrCat(testing::TempDir(), "/store_XXXXXX");
    EXPECT_NE(::mkdtemp(directory.data()), nullptr);
    directory_ = directory;
  }
  ~TemporaryPath() { std::filesystem::remove_all(directory_); }
  TemporaryPath(const TemporaryPath&) = delete;
  TemporaryPath& operator=(const TemporaryPath&) = delete;
  std::string path() const { return absl::StrCat(directory_, "/store"); }

 private:
  std::string directory_;
};

std::shared_ptr<Store> open(const std::string& path) {
  return open_file_store(path).value();
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

void write_file(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

// Runs `body` in a process of its own; the child is killed where it stands if the body does not
// return.
template <typename Body>
pid_t in_child(Body body) {
  const pid_t pid = ::fork();
  if (pid == 0) ::_exit(body() ? 0 : 1);
  return pid;
}

int status_of(pid_t pid) {
  int status = 0;
  EXPECT_EQ(::waitpid(pid, &status, 0), pid);
  return status;
}

INSTANTIATE_TEST_SUITE_P(
    File, StoreConformance,
    testing::Values(StoreCase{"own_handles",
                              [] {
                                auto temporary = std::make_shared<TemporaryPath>();
                                return [temporary](int) { return open(temporary->path()); };
                              }},
                    StoreCase{"one_handle",
                              [] {
                                auto temporary = std::make_shared<TemporaryPath>();
                                auto store = open(temporary->path());
                                return [temporary, store](int) { return store; };
                              }}),
    testing::PrintToStringParamName());

TEST(FileStoreTest, ProcessesCountTogether) {
  TemporaryPath temporary;
  std::vector<pid_t> children;
  for (int i = 0; i < 4; ++i) {
    children.push_back(in_child([&] {
      auto store = open(temporary.path());
      for (int n = 0; n < 100; ++n) {
        if (!store->add("sum", 1).ok()) return false;
      }
      return store->set(absl::StrCat("done/", i), "").ok() &&
             store->wait({"done/0", "done/1", "done/2", "done/3"}, kLong).ok() &&
             store->get("sum", kLong).value() == "400";
    }));
  }
  for (pid_t child : children) EXPECT_EQ(status_of(child), 0);
  EXPECT_EQ(open(temporary.path())->add("sum", 0).value(), 400);
}

// Writers are killed at any moment; what was acknowledged stays, and the others go on.
TEST(FileStoreTest, SurvivesKilledWriters) {
  TemporaryPath temporary;
  auto store = open(temporary.path());
  std::mt19937 random(5);
  for (int round = 0; round < 20; ++round) {
    const pid_t child = in_child([&] {
      auto mine = open(temporary.path());
      for (int n = 0;; ++n) {
        if (!mine->set("large", std::string(200'000, static_cast<char>('a' + n % 26))).ok()) break;
      }
      return false;
    });
    ASSERT_TRUE(store->get("large", kLong).ok());
    ::usleep(random() % 3000);
    ::kill(child, SIGKILL);
    EXPECT_TRUE(WIFSIGNALED(status_of(child)));
    ASSERT_EQ(store->add("rounds", 1).value(), round + 1);
    const std::string value = store->get("large", kLong).value();
    EXPECT_EQ(value, std::string(200'000, value.at(0)));
    ASSERT_TRUE(store->remove("large").value());
  }
}

// Every way in which the last record can be torn.
TEST(FileStoreTest, TornRecordIsCutOff) {
  TemporaryPath temporary;
  ASSERT_TRUE(open(temporary.path())->set("kept", "value").ok());
  const std::string good = read_file(temporary.path());
  const std::string torn = file_log::encode_set("torn", "value that never was");
  for (size_t size = 0; size < torn.size(); ++size) {
    write_file(temporary.path(), good + torn.substr(0, size));
    auto reader = open(temporary.path());
    EXPECT_FALSE(reader->check({"torn"}).value());
    EXPECT_EQ(reader->get("kept", absl::ZeroDuration()).value(), "value");
    ASSERT_TRUE(open(temporary.path())->set("after", "1").ok());
    EXPECT_EQ(reader->get("after", absl::ZeroDuration()).value(), "1");
    EXPECT_EQ(read_file(temporary.path()), good + file_log::encode_set("after", "1"));
  }
}

TEST(FileStoreTest, TornHeaderIsWrittenAgain) {
  TemporaryPath temporary;
  write_file(temporary.path(), std::string(file_log::kHeader.substr(0, 5)));
  ASSERT_TRUE(open(temporary.path())->set("a", "1").ok());
  EXPECT_EQ(open(temporary.path())->get("a", absl::ZeroDuration()).value(), "1");
}

TEST(FileStoreTest, ParsesAnyBytes) {
  std::mt19937 random(9);
  const std::string good = file_log::encode_set("key", "value") + file_log::encode_remove("key");
  for (int i = 0; i < 50'000; ++i) {
    std::string bytes = good.substr(0, random() % (good.size() + 1));
    for (size_t n = random() % 4; n > 0 && !bytes.empty(); --n) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    std::string_view rest = bytes;
    while (std::optional<file_log::Record> record = file_log::next_record(rest)) {
      ASSERT_LE(record->size, rest.size());
      EXPECT_EQ(record->key, "key");
      rest.remove_prefix(record->size);
    }
  }
  // A hole that a sparse file reads as zeros.
  EXPECT_FALSE(file_log::next_record(std::string(64, '\0')).has_value());
  // Sizes that reach far beyond the end.
  EXPECT_FALSE(file_log::next_record(std::string(64, '\xfe')).has_value());
}

TEST(FileStoreTest, RefusesAFileThatIsSomethingElse) {
  TemporaryPath temporary;
  write_file(temporary.path(), "my thesis");
  const absl::Status status = open_file_store(temporary.path()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr(temporary.path()));
  EXPECT_THAT(std::string(status.message()), HasSubstr("is no store"));
  EXPECT_EQ(read_file(temporary.path()), "my thesis");
}

TEST(FileStoreTest, SaysWhyAPathCannotBeOpened) {
  TemporaryPath temporary;
  const absl::Status status = open_file_store(temporary.path() + "/no/such").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("/no/such: cannot open the file: No such"));
}

TEST(FileStoreTest, RemovedFileEndsTheWait) {
  TemporaryPath temporary;
  auto store = open(temporary.path());
  std::filesystem::remove(temporary.path());
  const absl::Status status = store->get("key", kLong).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("the file was removed"));
  EXPECT_EQ(store->set("key", "").code(), absl::StatusCode::kUnavailable);
}

TEST(FileStoreTest, FileIsPrivateToTheUser) {
  TemporaryPath temporary;
  auto store = open(temporary.path());
  EXPECT_EQ(std::filesystem::status(temporary.path()).permissions(),
            std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
}

}  // namespace
}  // namespace shardweave
