#include "shardweave/modules/prepare_tensors.h"

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "torch/csrc/autograd/autograd.h"

namespace shardweave {
namespace {

using ::testing::HasSubstr;
using testing::on_mesh;
using testing::scattered;

at::Tensor whole() {
  return at::arange(15, at::kDouble).view({5, 3});
}

TEST(PrepareTensorsTest, InputsFromPlainTensors) {
  for (const int64_t ranks : {1, 2, 3}) {
    on_mesh({{"x", ranks}}, [&](const MeshPtr& mesh) {
      const int64_t rank = mesh->coordinate()[0];
      const Interval rows = chunk(5, ranks, rank), columns = chunk(3, ranks, rank);
      const at::Tensor top = whole().slice(0, rows.begin, rows.end);
      const at::Tensor left = whole().slice(1, columns.begin, columns.end);
      const auto is = [](const at::Tensor& t, const char* layout) {
        EXPECT_EQ(layout_of(t).to_string(), layout);
        EXPECT_TRUE(at::equal(full_tensor(t), whole())) << layout;
      };
      is(make_input_replicate_1d(whole(), mesh), "[R]");
      is(make_input_shard_1d(top, mesh), "[S(0)]");
      is(make_input_shard_1d(left, mesh, 1), "[S(1)]");
      is(make_input_shard_1d(left, mesh, -1), "[S(1)]");
      is(make_input_shard_1d_last_dim(left, mesh), "[S(1)]");
      is(make_input_reshard_replicate(top, mesh), "[R]");
    });
  }
}

TEST(PrepareTensorsTest, DTensorsOfAnyLayout) {
  for (const int64_t ranks : {2, 3}) {
    on_mesh({{"x", ranks}}, [&](const MeshPtr& mesh) {
      const int64_t rank = mesh->coordinate()[0];
      const Interval rows = chunk(5, ranks, rank);
      for (const Placements& from : testing::all_layouts(1, 2, /*partial=*/true)) {
        for (const MeshPtr& given : {mesh, MeshPtr()}) {
          const at::Tensor x = scattered(whole(), mesh, from);
          const auto is = [&](const at::Tensor& t, const char* layout) {
            EXPECT_EQ(layout_of(t).to_string(), layout);
            EXPECT_TRUE(at::allclose(full_tensor(t), whole())) << layout;
          };
          is(make_input_replicate_1d(x, given), "[R]");
          is(make_input_shard_1d(x, given), "[S(0)]");
          is(make_input_shard_1d(x, given, 1), "[S(1)]");
          is(make_input_shard_1d_last_dim(x, given), "[S(1)]");
          is(make_input_reshard_replicate(x, given), "[R]");
          is(make_output_replicate_1d(x, given), "[R]");
          is(make_output_shard_1d(x, given), "[S(0)]");
          is(make_output_shard_1d(x, given, -1), "[S(1)]");
          const at::Tensor all = make_output_tensor(x, given);
          EXPECT_FALSE(is_dtensor(all));
          EXPECT_TRUE(at::allclose(all, whole()));
          const at::Tensor part = make_output_reshard_tensor(x, given);
          EXPECT_FALSE(is_dtensor(part));
          EXPECT_TRUE(at::allclose(part, whole().slice(0, rows.begin, rows.end)));
        }
      }
    });
  }
}

// Parts in, parts out, as a module of plain tensors would be wrapped.
TEST(PrepareTensorsTest, GradientsPassThrough) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const Interval rows = chunk(5, 2, mesh->coordinate()[0]);
    const at::Tensor mine = whole().slice(0, rows.begin, rows.end).clone().requires_grad_();
    const at::Tensor w = distribute_tensor(whole().t().contiguous(), mesh, {Shard(1)});
    const at::Tensor y =
        make_output_reshard_tensor(at::matmul(make_input_reshard_replicate(mine, mesh), w));
    y.square().sum().backward();
    const at::Tensor x = whole().requires_grad_();
    at::matmul(x, whole().t()).square().sum().backward();
    EXPECT_TRUE(at::allclose(mine.grad(), x.grad().slice(0, rows.begin, rows.end)));
  });
}

TEST(PrepareTensorsTest, ErrorsOnEveryRank) {
  on_mesh({{"dp", 2}, {"tp", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor plain = whole();
    const at::Tensor on_two = distribute_tensor(plain, mesh, {Replicate(), Shard(0)});
    const MeshPtr tp = *mesh->slice({"tp"}), dp = *mesh->slice({"dp"});
    const at::Tensor on_tp = distribute_tensor(plain, tp, {Shard(0)}, {.source = std::nullopt});
    using Make = std::function<at::Tensor(const at::Tensor&, const MeshPtr&)>;
    const std::pair<const char*, Make> inputs[] = {
        {"make_input_replicate_1d",
         [](const auto& t, const auto& m) { return make_input_replicate_1d(t, m); }},
        {"make_input_shard_1d",
         [](const auto& t, const auto& m) { return make_input_shard_1d(t, m); }},
        {"make_input_shard_1d_last_dim",
         [](const auto& t, const auto& m) { return make_input_shard_1d_last_dim(t, m); }},
        {"make_input_reshard_replicate",
         [](const auto& t, const auto& m) { return make_input_reshard_replicate(t, m); }},
    };
    const std::pair<const char*, Make> outputs[] = {
        {"make_output_replicate_1d",
         [](const auto& t, const auto& m) { return make_output_replicate_1d(t, m); }},
        {"make_output_shard_1d",
         [](const auto& t, const auto& m) { return make_output_shard_1d(t, m); }},
        {"make_output_tensor",
         [](const auto& t, const auto& m) { return make_output_tensor(t, m); }},
        {"make_output_reshard_tensor",
         [](const auto& t, const auto& m) { return make_output_reshard_tensor(t, m); }},
    };
    const auto refuses = [&](const auto& make, const at::Tensor& t, const MeshPtr& m,
                             const char* why) {
      try {
        make.second(t, m);
        ADD_FAILURE() << make.first << ": no error";
      } catch (const Error& error) {
        EXPECT_EQ(error.status().code(), absl::StatusCode::kInvalidArgument);
        EXPECT_THAT(error.what_without_backtrace(), HasSubstr(make.first));
        EXPECT_THAT(std::string(error.status().message()), HasSubstr(why)) << make.first;
      }
    };
    const auto both = [&](const at::Tensor& t, const MeshPtr& m, const char* why) {
      for (const auto& make : inputs) refuses(make, t, m, why);
      for (const auto& make : outputs) refuses(make, t, m, why);
    };
    both(on_two, nullptr, "DeviceMesh(dp=2, tp=2) has 2 dimensions; wanted a mesh of one");
    both(on_two, mesh, "has 2 dimensions");
    both(on_tp, mesh, "has 2 dimensions");
    both(on_tp, dp, "leave out the mesh");
    both({}, tp, "undefined");
    for (const auto& make : inputs) {
      refuses(make, plain, nullptr, "a plain tensor has no mesh");
      refuses(make, plain, mesh, "has 2 dimensions");
    }
    for (const auto& make : outputs) refuses(make, plain, tp, "wanted a DTensor");
    const std::pair<const char*, Make> bad_dim[] = {
        {"make_input_shard_1d",
         [](const auto& t, const auto& m) { return make_input_shard_1d(t, m, 2); }},
        {"make_output_shard_1d",
         [](const auto& t, const auto& m) { return make_output_shard_1d(t, m, -3); }},
    };
    for (const auto& make : bad_dim) refuses(make, on_tp, tp, "is not one of the 2 dimensions");
    // Of a slice of the mesh all of it works.
    EXPECT_TRUE(at::equal(make_output_tensor(on_tp), plain));
  });
}

}  // namespace
}  // namespace shardweave
