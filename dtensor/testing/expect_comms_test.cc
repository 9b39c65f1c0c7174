// EXPECT_COMMS: what matches, what does not, and what a failure says.

#include "shardweave/dtensor/testing/expect_comms.h"

#include "gmock/gmock.h"
#include "gtest/gtest-spi.h"
#include "gtest/gtest.h"

namespace shardweave::testing {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

CommEvent event(std::string collective, std::string dim, int64_t bytes) {
  CommEvent e;
  e.collective = std::move(collective);
  e.mesh_dims = {std::move(dim)};
  e.group_size = 2;
  e.bytes = bytes;
  e.op = "aten::add";
  e.argument = "other";
  e.shape = {4, 6};
  e.module = "layers.0.mlp";
  return e;
}

const std::vector<CommEvent> kTwo = {event("all_reduce", "tp", 128), event("all_gather", "dp", 64)};

std::string failure(const std::vector<CommEvent>& events, const ExpectedComms& expected) {
  return check_comms(events, expected).message();
}

TEST(ExpectCommsTest, ExactlyTheseInThisOrder) {
  EXPECT_COMMS(kTwo, {all_reduce("tp", 128), all_gather("dp")});
  EXPECT_COMMS(kTwo, {all_reduce(), all_gather({"dp"}, 64)});
  EXPECT_COMMS(std::vector<CommEvent>(), {});
  ASSERT_COMMS(kTwo, {all_reduce(), all_gather()});
  EXPECT_FALSE(check_comms(kTwo, {all_gather("dp"), all_reduce("tp")}));
  EXPECT_FALSE(check_comms(kTwo, {all_reduce("tp")}));
  EXPECT_FALSE(check_comms(kTwo, {all_reduce(), all_gather(), all_gather()}));
  EXPECT_FALSE(check_comms(kTwo, {}));
  EXPECT_FALSE(check_comms({}, {all_reduce()}));
}

TEST(ExpectCommsTest, EveryPropertyCounts) {
  const std::vector<CommEvent> one = {event("all_reduce", "tp", 128)};
  EXPECT_COMMS(one, {all_reduce("tp", 128)
                         .by("aten::add")
                         .of("other")
                         .in("layers.*.mlp")
                         .forward()
                         .implicitly()});
  EXPECT_FALSE(check_comms(one, {all_gather()}));
  EXPECT_FALSE(check_comms(one, {all_reduce("dp")}));
  EXPECT_FALSE(check_comms(one, {all_reduce({"dp", "tp"})}));
  EXPECT_FALSE(check_comms(one, {all_reduce("tp", 127)}));
  EXPECT_FALSE(check_comms(one, {all_reduce().by("aten::mm")}));
  EXPECT_FALSE(check_comms(one, {all_reduce().of("self")}));
  EXPECT_FALSE(check_comms(one, {all_reduce().in("layers.*.attn")}));
  EXPECT_FALSE(check_comms(one, {all_reduce().in("")}));
  EXPECT_FALSE(check_comms(one, {all_reduce().backward()}));
  EXPECT_FALSE(check_comms(one, {all_reduce().explicitly()}));
  EXPECT_FALSE(check_comms(one, {reduce_scatter()}));
  EXPECT_FALSE(check_comms(one, {all_to_all()}));
  EXPECT_FALSE(check_comms(one, {exchange()}));
  EXPECT_FALSE(check_comms(one, {broadcast()}));
}

TEST(ExpectCommsTest, Counts) {
  EXPECT_COMMS(kTwo, {{"all_reduce", 1}, {"all_gather", 1}});
  EXPECT_COMMS(kTwo, {{"all_gather", 1}, {"all_reduce", 1}, {"broadcast", 0}});
  EXPECT_FALSE(check_comms(kTwo, {{"all_reduce", 1}}));
  EXPECT_FALSE(check_comms(kTwo, {{"all_reduce", 2}, {"all_gather", 1}}));
  EXPECT_EQ(failure(kTwo, {{"all_reduce", 2}}),
            "expected 2 all_reduce; got 1 all_gather, 1 all_reduce:"
            "\n    all_reduce tp (2), 128 bytes: Float[4, 6] for aten::add 'other', forward, in "
            "layers.0.mlp"
            "\n    all_gather dp (2), 64 bytes: Float[4, 6] for aten::add 'other', forward, in "
            "layers.0.mlp");
  EXPECT_EQ(failure({}, {{"all_reduce", 2}}), "expected 2 all_reduce; got nothing");
}

TEST(ExpectCommsTest, AFailureShowsBothSides) {
  EXPECT_EQ(failure(kTwo, {all_reduce("tp", 96).backward()}),
            "expected 1 collectives, got 2\n"
            "  0  expected: all_reduce tp, 96 bytes, backward\n"
            "     got:      all_reduce tp (2), 128 bytes: Float[4, 6] for aten::add 'other', "
            "forward, in layers.0.mlp\n"
            "     but it sends 128 bytes\n"
            "  1  expected: nothing\n"
            "     got:      all_gather dp (2), 64 bytes: Float[4, 6] for aten::add 'other', "
            "forward, in layers.0.mlp\n");
  EXPECT_THAT(failure(kTwo, {all_reduce("tp"), all_gather("tp")}),
              HasSubstr("  0  as expected: all_reduce tp (2)"));
  EXPECT_NONFATAL_FAILURE(EXPECT_COMMS(kTwo, {}), "expected 0 collectives, got 2");
}

TEST(ExpectCommsTest, MatchersWorkInGoogleTest) {
  EXPECT_THAT(kTwo, Contains(all_gather("dp").implicitly()));
  EXPECT_THAT(kTwo, Not(Contains(all_gather("tp"))));
  EXPECT_THAT(kTwo, ElementsAre(all_reduce("tp"), all_gather("dp", 64)));
  EXPECT_EQ(::testing::DescribeMatcher<const CommEvent&>(all_gather("dp", 3).in("a.*")),
            "all_gather dp, 3 bytes, in a.*");
}

}  // namespace
}  // namespace shardweave::testing
