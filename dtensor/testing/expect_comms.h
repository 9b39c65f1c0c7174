// Tests of what a program communicates.
//
//   CommTrace trace(mesh);
//   mlp->forward(x).sum().backward();
//   EXPECT_COMMS(trace, {all_reduce("tp", 128).by("aten::add").in("mlp"),
//                        all_reduce("tp").backward()});
//   EXPECT_COMMS(trace, {{"all_reduce", 2}});                       // counts: these, and no others
//   EXPECT_COMMS(trace, {});                                        // nothing
//   EXPECT_THAT(trace.events(), Contains(all_gather("dp").implicitly()));
//
// EXPECT_COMMS wants exactly these, in this order; what a matcher does not say may be anything. A
// failure shows what was expected and what came, side by side. `trace`: a CommTrace or its
// events(). Link //dtensor:expect_comms.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "shardweave/dtensor/observe/comm_trace.h"

namespace shardweave {

void PrintTo(const CommEvent& event, std::ostream* out);

namespace testing {

// One collective. Also a GoogleTest matcher of CommEvents.
class CommMatcher {
 public:
  using is_gtest_matcher = void;

  // `collective`: "all_reduce", ...; `mesh_dims`: exactly these, in the mesh's order; empty: any.
  explicit CommMatcher(std::string collective, std::vector<std::string> mesh_dims = {},
                       std::optional<int64_t> bytes = std::nullopt);

  CommMatcher by(std::string op) &&;  // "aten::add", "finish_grad_sync"
  // Name of the operator's argument that had to move, or "result".
  CommMatcher of(std::string argument) &&;
  CommMatcher in(std::string module) &&;  // FQN pattern, see matches_fqn(): "layers.*.attn"
  CommMatcher forward() &&;
  CommMatcher backward() &&;
  CommMatcher gradient_sync() &&;  // in finish_grad_sync()
  CommMatcher implicitly() &&;
  CommMatcher explicitly() &&;

  bool MatchAndExplain(const CommEvent& event, std::ostream* why) const;
  void DescribeTo(std::ostream* out) const { *out << to_string(); }
  void DescribeNegationTo(std::ostream* out) const { *out << "not " << to_string(); }
  // "all_reduce tp, 128 bytes, for aten::add, in mlp, forward"
  std::string to_string() const;

 private:
  std::string collective_;
  std::vector<std::string> mesh_dims_;
  std::optional<int64_t> bytes_;
  std::optional<std::string> op_, argument_, module_;
  std::optional<Phase> phase_;
  std::optional<bool> implicit_;
};

// Names of mesh dimensions: "tp", {"dp", "tp"}, or nothing for any.
struct MeshDimNames : std::vector<std::string> {
  MeshDimNames() = default;
  MeshDimNames(const char* name) : vector{name} {}
  MeshDimNames(std::initializer_list<std::string> names) : vector(names) {}
};

// `bytes`: CommEvent::bytes.
CommMatcher all_reduce(MeshDimNames dims = {}, std::optional<int64_t> bytes = std::nullopt);
CommMatcher all_gather(MeshDimNames dims = {}, std::optional<int64_t> bytes = std::nullopt);
CommMatcher reduce_scatter(MeshDimNames dims = {}, std::optional<int64_t> bytes = std::nullopt);
CommMatcher all_to_all(MeshDimNames dims = {}, std::optional<int64_t> bytes = std::nullopt);
CommMatcher exchange(MeshDimNames dims = {}, std::optional<int64_t> bytes = std::nullopt);
CommMatcher broadcast(MeshDimNames dims = {}, std::optional<int64_t> bytes = std::nullopt);

// What EXPECT_COMMS is given.
class ExpectedComms {
 public:
  ExpectedComms() = default;
  ExpectedComms(std::initializer_list<CommMatcher> in_order) : in_order_(in_order) {}
  ExpectedComms(std::initializer_list<std::pair<std::string, int>> counts) : counts_(counts) {}

  // Empty if `events` are as expected, else what is different.
  std::string difference(const std::vector<CommEvent>& events) const;

 private:
  std::vector<CommMatcher> in_order_;
  std::vector<std::pair<std::string, int>> counts_;  // if not empty
};

::testing::AssertionResult check_comms(const CommTrace& trace, const ExpectedComms& expected);
::testing::AssertionResult check_comms(const std::vector<CommEvent>& events,
                                       const ExpectedComms& expected);

}  // namespace testing
}  // namespace shardweave

#define EXPECT_COMMS(trace, ...) EXPECT_TRUE(::shardweave::testing::check_comms(trace, __VA_ARGS__))
#define ASSERT_COMMS(trace, ...) ASSERT_TRUE(::shardweave::testing::check_comms(trace, __VA_ARGS__))
