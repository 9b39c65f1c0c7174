// Every scenario communicates what theory says, and has one device's numbers.

#include <cctype>
#include <ostream>
#include <string>

#include "gtest/gtest.h"
#include "measure.h"
#include "scenarios.h"

namespace communication_bench {

void PrintTo(const Traffic& traffic, std::ostream* out) {
  *out << traffic.collectives << " collectives, " << traffic.bytes << " bytes";
}

void PrintTo(const Scenario& scenario, std::ostream* out) {
  *out << scenario.name << " " << mesh_name(scenario);
}

namespace {

class CommunicationTest : public ::testing::TestWithParam<Scenario> {};

TEST_P(CommunicationTest, AsTheorySays) {
  const Scenario& s = GetParam();
  const absl::StatusOr<Measurement> m = measure(s);
  ASSERT_TRUE(m.ok()) << m.status();
  SCOPED_TRACE(m->trace);
  EXPECT_EQ(m->phases.forward, s.theory.forward) << "in forward";
  // Backward may have an allowance.
  if (!as_theory_says(s, {s.theory.forward, m->phases.backward, s.theory.gradient_sync})) {
    EXPECT_EQ(m->phases.backward, s.theory.backward) << "in backward";
  }
  EXPECT_EQ(m->phases.gradient_sync, s.theory.gradient_sync) << "in the gradients' synchronisation";
  EXPECT_LE(m->loss_error, 1e-5);
  EXPECT_LE(m->gradient_error, 1e-5) << m->worst_gradient;
}

std::string test_name(const ::testing::TestParamInfo<Scenario>& info) {
  std::string name;
  for (const char c : info.param.name + mesh_name(info.param)) {
    if (std::isalnum(static_cast<unsigned char>(c))) {
      name += c;
    } else if (!name.empty() && name.back() != '_') {
      name += '_';
    }
  }
  name.pop_back();
  return name;
}

INSTANTIATE_TEST_SUITE_P(Scenarios, CommunicationTest, ::testing::ValuesIn(scenarios(Sizes())),
                         test_name);

// The formulas, where they can be checked by hand.
TEST(TrafficTest, OfCollectives) {
  EXPECT_EQ(all_reduce(4, 8), (Traffic{1, 48}));
  EXPECT_EQ(all_reduce(4, 1), (Traffic{1, 8}));
  EXPECT_EQ(all_gather(4, 8), (Traffic{1, 24}));
  EXPECT_EQ(reduce_scatter(2, 8), (Traffic{1, 16}));
  EXPECT_EQ(all_to_all(4, 32), (Traffic{1, 24}));
}

}  // namespace
}  // namespace communication_bench
