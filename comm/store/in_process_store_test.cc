#include "shardweave/comm/store/in_process_store.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/comm/store/prefix_store.h"
#include "shardweave/comm/store/store_conformance.h"

namespace shardweave {
namespace {

INSTANTIATE_TEST_SUITE_P(InProcess, StoreConformance,
                         testing::Values(StoreCase{"in_process",
                                                   [] {
                                                     auto store = make_in_process_store();
                                                     return [store](int) { return store; };
                                                   }}),
                         testing::PrintToStringParamName());

INSTANTIATE_TEST_SUITE_P(Prefix, StoreConformance,
                         testing::Values(StoreCase{"prefix",
                                                   [] {
                                                     auto store = make_in_process_store();
                                                     return [store](int) {
                                                       return make_prefix_store(store, "job/");
                                                     };
                                                   }}),
                         testing::PrintToStringParamName());

TEST(PrefixStoreTest, PrefixesKeepUsersApart) {
  auto store = make_in_process_store();
  auto a = make_prefix_store(store, "a/");
  auto b = make_prefix_store(a, "b/");
  ASSERT_TRUE(a->set("key", "of a").ok());
  ASSERT_TRUE(b->set("key", "of b").ok());
  EXPECT_EQ(store->get("a/key", absl::ZeroDuration()).value(), "of a");
  EXPECT_EQ(store->get("a/b/key", absl::ZeroDuration()).value(), "of b");
  EXPECT_FALSE(store->check({"key"}).value());
}

TEST(PrefixStoreTest, ErrorsShowTheWholeKey) {
  auto store = make_prefix_store(make_in_process_store(), "gloo/");
  EXPECT_THAT(std::string(store->get("7", absl::ZeroDuration()).status().message()),
              testing::HasSubstr("in-process store: after 0 nobody had set \"gloo/7\""));
}

TEST(InProcessStoreTest, CounterOverflowIsAnErrorAndChangesNothing) {
  auto store = make_in_process_store();
  ASSERT_TRUE(store->set("n", "9223372036854775807").ok());
  absl::Status status = store->add("n", 1).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange);
  EXPECT_THAT(std::string(status.message()),
              testing::HasSubstr("9223372036854775807 + 1 overflows"));
  EXPECT_EQ(store->get("n", absl::ZeroDuration()).value(), "9223372036854775807");
}

TEST(InProcessStoreTest, ALongListOfMissingKeysIsCut) {
  auto store = make_in_process_store();
  std::vector<std::string> keys(20, "k");
  EXPECT_THAT(std::string(store->wait(keys, absl::ZeroDuration()).message()),
              testing::EndsWith("\"k\", 12 more"));
}

}  // namespace
}  // namespace shardweave
