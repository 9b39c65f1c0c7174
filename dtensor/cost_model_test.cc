#include "shardweave/dtensor/cost_model.h"

#include <limits>

#include "ATen/ATen.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/observe/comm_trace.h"
#include "shardweave/dtensor/testing/on_mesh.h"

namespace shardweave {
namespace {

using ::testing::HasSubstr;
using testing::on_mesh;
using testing::scattered;

CostModel sample() {
  return {.links = {{1e-5, 1e9}, {2e-6, 1e11}}, .device = {.flops = 1e12, .bandwidth = 1e11}};
}

TEST(CostModelTest, IsWhatWasSet) {
  on_mesh({{"dp", 2}, {"tp", 2}}, [](const MeshPtr& mesh) {
    EXPECT_EQ(cost_model(mesh).links, std::vector<CostModel::Link>(2));
    EXPECT_EQ(cost_model(mesh).device, CostModel::Device());
    const CommTrace trace(mesh);
    set_cost_model(mesh, sample());
    EXPECT_EQ(trace.events().size(), 1u);  // the comparison
    EXPECT_EQ(cost_model(mesh), sample());
    const MeshPtr tp = *mesh->slice({"tp"});
    EXPECT_EQ(cost_model(tp).links, std::vector<CostModel::Link>(1));
  });
}

// A product of two factors that are cut: where bytes count, the one is cut otherwise and a small sum
// is owed; where messages do, the other is gathered, which is all. What was decided by the old model
// is forgotten.
TEST(CostModelTest, OperatorsChooseByIt) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor whole = at::arange(16 * 1024, at::kFloat).reshape({16, 1024}) / 16384;
    const auto product = [&] {
      const at::Tensor a = scattered(whole, mesh, {Shard(0)});  // of which nothing is remembered
      const at::Tensor b = scattered(whole.t(), mesh, {Shard(0)});
      const at::Tensor y = at::mm(a, b);
      EXPECT_TRUE(at::allclose(full_tensor(y), at::mm(whole, whole.t()), 1e-4));
      return layout_of(y).to_string();
    };
    CostModel model = cost_model(mesh);
    for (int i = 0; i < 2; ++i) {
      model.links[0].latency = 0;
      set_cost_model(mesh, model);
      const int64_t misses = dispatch_counters(mesh).cache_misses;
      EXPECT_EQ(product(), "[P(sum)]");
      EXPECT_GT(dispatch_counters(mesh).cache_misses, misses);
      model.links[0].latency = 1;
      set_cost_model(mesh, model);
      EXPECT_EQ(product(), "[S(0)]");
    }
  });
}

// Redistributions, too.
TEST(CostModelTest, PlansFollowIt) {
  on_mesh({{"a", 2}, {"b", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor whole = at::arange(64, at::kFloat).reshape({8, 8});
    const auto moved = [&] {
      const at::Tensor x = scattered(whole, mesh, {Shard(0), Shard(1)});
      const CommTrace trace(mesh);
      EXPECT_TRUE(at::equal(full_tensor(redistribute(x, Placements{Shard(1), Shard(0)})), whole));
      return trace.to_string();
    };
    CostModel model = cost_model(mesh);
    model.links = {{1, 1e12}, {1, 1e12}};
    set_cost_model(mesh, model);
    const std::string few = moved();
    model.links = {{0, 1}, {0, 1e12}};
    set_cost_model(mesh, model);
    EXPECT_NE(moved(), few);
  });
}

absl::Status status_of(const MeshPtr& mesh, const absl::StatusOr<CostModel>& model) {
  try {
    set_cost_model(mesh, model);
  } catch (const Error& error) {
    return error.status();
  }
  return absl::OkStatus();
}

// On every rank, whichever is wrong; the old model stays, and the ranks go on together.
TEST(CostModelTest, ADifferentModelOnOneRankIsAnErrorOnAll) {
  on_mesh({{"dp", 2}, {"tp", 2}}, [](const MeshPtr& mesh) {
    const bool odd = mesh->coordinate() == Coordinate{1, 0};
    CostModel model = sample();
    if (odd) model.device.flops *= 2;
    absl::Status status = status_of(mesh, model);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("ranks 0 and 2 of DeviceMesh(dp=2, tp=2) were not given the same cost "
                          "model; this rank: {\"links\":{\"dp\":"));
    status = status_of(
        mesh, odd ? absl::StatusOr<CostModel>(absl::InvalidArgumentError("no file")) : sample());
    EXPECT_THAT(std::string(status.message()), HasSubstr(odd ? "no file" : "ranks 0 and 2"));
    model = sample();
    if (odd) model.links.pop_back();
    status = status_of(mesh, model);
    EXPECT_THAT(
        std::string(status.message()),
        HasSubstr(odd ? "has 1 links; DeviceMesh(dp=2, tp=2) has 2 dimensions" : "ranks 0 and 2"));
    EXPECT_EQ(cost_model(mesh).device, CostModel::Device());
    set_cost_model(mesh, sample());
    EXPECT_EQ(cost_model(mesh), sample());
  });
}

TEST(CostModelTest, RefusesWhatIsNoCost) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  on_mesh({{"dp", 1}, {"tp", 1}}, [](const MeshPtr& mesh) {
    for (const double wrong : {-1.0, kInfinity, kNan, 0.0}) {
      double CostModel::Link::*const of_link[] = {&CostModel::Link::latency,
                                                  &CostModel::Link::bandwidth};
      for (const auto member : of_link) {
        CostModel model = sample();
        model.links[1].*member = wrong;
        const absl::Status status = status_of(mesh, model);
        const bool latency = member == &CostModel::Link::latency;
        EXPECT_EQ(status.ok(), latency && wrong == 0) << status;
        if (!status.ok()) {
          EXPECT_THAT(std::string(status.message()),
                      HasSubstr(latency ? "link 'tp': latency is" : "link 'tp': bandwidth is"));
        }
      }
      CostModel model = sample();
      model.device.flops = wrong;
      EXPECT_THAT(std::string(status_of(mesh, model).message()), HasSubstr("device: flops is"));
      model = sample();
      model.device.bandwidth = wrong;
      EXPECT_THAT(std::string(status_of(mesh, model).message()), HasSubstr("device: bandwidth is"));
    }
  });
}

// A model that can be set, on every rank the same; nothing is measured where nothing is sent.
TEST(CostModelTest, IsMeasured) {
  on_mesh({{"dp", 2}, {"one", 1}, {"tp", 2}}, [](const MeshPtr& mesh) {
    const CostModel model = measure_cost_model(mesh);
    set_cost_model(mesh, model);  // or it throws
    EXPECT_EQ(model.links[1], CostModel::Link());
    for (const int m : {0, 2}) {
      EXPECT_NE(model.links[m], CostModel::Link());
      EXPECT_LT(model.links[m].latency, 1) << "seconds";
      EXPECT_GT(model.links[m].bandwidth, 1e5) << "bytes per second";
    }
    EXPECT_GT(model.device.flops, 1e6);
    EXPECT_GT(model.device.bandwidth, 1e6);
  });
}

TEST(CostModelTest, Json) {
  const DeviceMesh mesh = *DeviceMesh::create({{"dp", 2}, {"tp", 2}});
  EXPECT_EQ(*cost_model_from_json(cost_model_to_json(sample(), mesh), mesh), sample());
  const std::pair<const char*, const char*> wrong[] = {
      {"", "no object"},
      {"[]", "no object"},
      {R"({"links": {}})", "no object with \"links\" and \"device\""},
      {R"({"links": 3, "device": {}})", "no link \"dp\", a dimension of DeviceMesh(dp=2, tp=2)"},
      {R"({"links": {"dp": {"latency": 1}}, "device": {}})",
       "no number \"bandwidth\" in link \"dp\""},
      {R"({"links": {"dp": {"latency": "1", "bandwidth": 1}}, "device": {}})",
       "no number \"latency\" in link \"dp\""},
      {R"({"links": {"dp": 7}, "device": {}})", "no number \"latency\" in link \"dp\""},
      {R"({"links": {"dp": {"latency": 1, "bandwidth": 1}, "tp": {"latency": 1, "bandwidth": 1},
                     "pp": {}}, "device": {}})",
       "3 links"},
      {R"({"links": {"dp": {"latency": 1, "bandwidth": 1}, "tp": {"latency": 1, "bandwidth": 1}},
           "device": {"flops": 1}})",
       "no number \"bandwidth\" in \"device\""},
  };
  for (const auto& [text, message] : wrong) {
    const absl::Status status = cost_model_from_json(text, mesh).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  }
}

}  // namespace
}  // namespace shardweave
