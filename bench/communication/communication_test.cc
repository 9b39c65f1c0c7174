// Every scenario communicates what theory says, and has one device's numbers.

#include <cctype>
#include <ostream>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "measure.h"
#include "scenarios.h"

namespace communication_bench {

void PrintTo(const Traffic& traffic, std::ostream* out) {
  *out << traffic.to_string();
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
  EXPECT_NE(as_theory_says(s, m->of_ranks), Verdict::kNo) << differences(s, m->of_ranks);
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
  EXPECT_EQ(all_reduce(4, 8), (Traffic{{{"all_reduce", 1}}, 48}));
  EXPECT_EQ(all_reduce(4, 1), (Traffic{{{"all_reduce", 1}}, 8}));
  EXPECT_EQ(all_gather(4, 8), (Traffic{{{"all_gather", 1}}, 24}));
  EXPECT_EQ(reduce_scatter(2, 8), (Traffic{{{"reduce_scatter", 1}}, 16}));
  EXPECT_EQ(all_to_all(4, 32), (Traffic{{{"all_to_all", 1}}, 24}));
  EXPECT_EQ(2 * all_reduce(4, 8) + all_gather(4, 8),
            (Traffic{{{"all_gather", 1}, {"all_reduce", 2}}, 120}));
  EXPECT_EQ((2 * all_reduce(4, 8) + all_gather(4, 8)).collectives(), 3);
}

TEST(AsTheorySaysTest, NothingMoreAndNothingElse) {
  Scenario s;
  s.theory = {all_reduce(4, 8), 2 * all_reduce(4, 8), all_gather(4, 8)};
  const auto says = [&](const Phases& one, const Phases& other) {
    return as_theory_says(s, {one, other});
  };
  const Traffic sums = all_reduce(4, 2);
  Phases summed = s.theory;
  summed.backward += sums;
  EXPECT_EQ(says(s.theory, s.theory), Verdict::kYes);
  EXPECT_EQ(says(summed, summed), Verdict::kNo);
  s.row_sums = sums;
  EXPECT_EQ(says(s.theory, s.theory), Verdict::kYes);
  EXPECT_EQ(says(summed, summed), Verdict::kWithRowSums);
  EXPECT_EQ(says(s.theory, summed), Verdict::kNo);  // ranks that differ
  EXPECT_EQ(says(summed, s.theory), Verdict::kNo);
  for (Traffic Phases::*const phase :
       {&Phases::forward, &Phases::backward, &Phases::gradient_sync}) {
    const std::vector<Traffic> wrong = {{{}, 8},
                                        {{{"all_reduce", 1}}, 0},
                                        {{{"all_reduce", 1}}, 8},
                                        {{{"all_gather", 1}}, sums.bytes},
                                        {{}, -8}};
    for (const Traffic& more : wrong) {
      Phases p = s.theory;
      p.*phase += more;
      EXPECT_EQ(says(p, p), Verdict::kNo) << more.to_string();
      EXPECT_EQ(says(s.theory, p), Verdict::kNo) << more.to_string();
      EXPECT_NE(differences(s, {s.theory, p}), "");
    }
    Phases p = s.theory;
    p.*phase += sums;
    EXPECT_EQ(says(p, p) == Verdict::kWithRowSums, phase == &Phases::backward);
  }
  // As many bytes of another kind.
  Phases p = s.theory;
  p.gradient_sync = reduce_scatter(4, 8);
  EXPECT_EQ(says(p, p), Verdict::kNo);
  EXPECT_EQ(differences(s, {s.theory, p}),
            "rank 1, gradient sync: 1 reduce_scatter, 24 bytes; theory: 1 all_gather, 24 bytes\n");
}

}  // namespace
}  // namespace communication_bench
