// Bags of embeddings on shards against one device, with their gradients; and the operators that
// users met without a rule, on meshes of two and three dimensions.
#include <algorithm>
#include <iterator>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "ATen/Parallel.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/observe/comm_trace.h"
#include "shardweave/dtensor/rule.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/dtensor/testing/rule_validator.h"

namespace shardweave {
namespace {

using testing::check_on_mesh;
using testing::CheckOptions;
using testing::in;
using testing::Input;
using testing::on_mesh;
using testing::OpCase;
using testing::Sample;
using testing::sample_families;
using testing::Tensors;

enum Mode : int64_t { kSum = 0, kMean = 1, kMax = 2 };

struct Bags {
  int64_t mode = kSum;
  bool scales = false;
  bool last_offset = false;
  int64_t padding = -1;
  bool by_frequency = false;
};

// 9 indices in bags of 2, none, 7, and none (or the end).
OpCase case_of(const Bags& bags, at::ScalarType dtype) {
  std::vector<Input> inputs = {in({7, 3}).dtype(dtype), in({9}).integers(0, 7)};
  if (bags.scales) inputs.push_back(in({9}).dtype(dtype));
  OpCase op{absl::StrCat("embedding_bag, mode ", bags.mode, ", padding ", bags.padding,
                         bags.scales ? ", scales" : "", bags.last_offset ? ", last offset" : "",
                         bags.by_frequency ? ", by frequency" : ""),
            std::move(inputs), [bags](const Tensors& x) {
              const at::Tensor offsets = at::tensor({0, 2, 2, 9}, at::kLong);
              auto results = at::embedding_bag(
                  x[0], x[1], offsets, bags.by_frequency, bags.mode, /*sparse=*/false,
                  bags.scales ? std::optional<at::Tensor>(x[2]) : std::nullopt, bags.last_offset,
                  bags.padding < 0 ? std::nullopt : std::optional<int64_t>(bags.padding));
              return Tensors{std::get<0>(results)};
            }};
  if (dtype == at::kFloat) op.tolerance = 1e-5;
  return op;
}

TEST(EmbeddingBagTest, AsOnOneDevice) {
  const std::vector<Bags> all = {{kSum},
                                 {kSum, true},
                                 {kSum, false, true, 2},
                                 {kSum, true, false, 2},
                                 {kSum, false, false, -1, true},
                                 {kMean},
                                 {kMean, false, true},
                                 {kMean, false, false, 2},
                                 {kMax},
                                 {kMax, false, true, 2}};
  CheckOptions options;
  options.max_combinations = 6;
  for (const Bags& bags : all) {
    const std::vector<MeshDim> meshes[] = {
        {{"x", 2}}, {{"x", 3}}, {{"x", 2}, {"y", 2}}, {{"x", 2}, {"y", 2}, {"z", 2}}};
    for (const std::vector<MeshDim>& mesh : meshes) {
      const OpCase op = case_of(bags, mesh.size() == 2 ? at::kFloat : at::kDouble);
      for (const std::string& text : check_on_mesh(op, mesh, options).differences) {
        ADD_FAILURE() << text;
      }
    }
  }
}

// Of a batch each rank has the bags of its part, and the table's rows stay where they are.
TEST(EmbeddingBagTest, ABatchStaysCut) {
  on_mesh({{"dp", 2}, {"tp", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor table =
        distribute_tensor(at::ones({6, 4}, at::kDouble), mesh, Placements{Replicate(), Shard(0)});
    const at::Tensor indices =
        distribute_tensor(at::arange(6), mesh, Placements{Shard(0), Replicate()});
    const at::Tensor offsets = distribute_tensor(at::tensor({0, 4}, at::kLong), mesh,
                                                 Placements{Replicate(), Replicate()});
    for (const int64_t mode : {kSum, kMean}) {
      const CommTrace trace(mesh);
      const at::Tensor bags = std::get<0>(at::embedding_bag(table, indices, offsets, false, mode));
      EXPECT_EQ(layout_of(bags), Layout({Shard(0), Partial()}));
      EXPECT_EQ(trace.events().size(), 1) << trace.to_string();
      EXPECT_LE(trace.bytes(), 32) << trace.to_string();
      const at::Tensor wanted = mode == kSum ? at::tensor({4., 2.}) : at::tensor({1., 1.});
      EXPECT_TRUE(at::equal(full_tensor(bags), wanted.view({2, 1}).expand({2, 4})));
    }
  });
}

// Backward, too: the gradient of what is cut by bags is not gathered, but the indices are.
TEST(EmbeddingBagTest, TheGradientOfABatchStaysCut) {
  const at::Tensor whole = at::arange(12 * 64, at::kDouble).cos().view({12, 64});
  const at::Tensor ids = at::arange(16).remainder(7), starts = at::arange(0, 16, 2);
  for (const int64_t mode : {kSum, kMean, kMax}) {
    const at::Tensor plain = whole.clone().requires_grad_();
    std::get<0>(at::embedding_bag(plain, ids, starts, false, mode)).square().sum().backward();
    on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
      const at::Tensor table =
          distribute_tensor(whole, mesh, Placements{Replicate()}).requires_grad_();
      const at::Tensor indices = distribute_tensor(ids, mesh, Placements{Shard(0)});
      const CommTrace trace(mesh);
      const at::Tensor bags = std::get<0>(at::embedding_bag(
          table, indices, distribute_tensor(starts, mesh, Placements{Replicate()}, {.source = {}}),
          false, mode));
      EXPECT_EQ(layout_of(bags), Layout({Shard(0)}));
      bags.square().sum().backward();
      EXPECT_LE(trace.bytes(), 2 * 64) << trace.to_string();
      EXPECT_TRUE(at::allclose(full_tensor(table.grad()), plain.grad()));
    });
  }
}

// Batches, rows or counts of these stay where they are, or their rule says why not.
const char* const kMet[] = {"aten::_cdist_backward",
                            "aten::_embedding_bag",
                            "aten::_euclidean_dist",
                            "aten::_histogramdd_bin_edges",
                            "aten::_histogramdd_from_bin_cts",
                            "aten::_histogramdd_from_bin_tensors",
                            "aten::_linalg_eigvals",
                            "aten::_pdist_backward",
                            "aten::_pdist_forward",
                            "aten::_segment_reduce_backward",
                            "aten::_trilinear",
                            "aten::_unique",
                            "aten::_unique2",
                            "aten::bincount",
                            "aten::block_diag",
                            "aten::channel_shuffle",
                            "aten::cholesky",
                            "aten::cholesky_inverse",
                            "aten::cholesky_solve",
                            "aten::col2im",
                            "aten::diag_embed",
                            "aten::diagonal_scatter",
                            "aten::geqrf",
                            "aten::histc",
                            "aten::histogram.bin_ct",
                            "aten::histogram.bins_tensor",
                            "aten::im2col",
                            "aten::linalg_eig",
                            "aten::linalg_householder_product",
                            "aten::linalg_lstsq",
                            "aten::linalg_solve_triangular",
                            "aten::linspace.Tensor_Tensor",
                            "aten::logspace.Tensor_Tensor",
                            "aten::masked_select",
                            "aten::median",
                            "aten::multi_margin_loss",
                            "aten::multi_margin_loss_backward",
                            "aten::multilabel_margin_loss_backward",
                            "aten::multilabel_margin_loss_forward",
                            "aten::nanmedian",
                            "aten::nonzero",
                            "aten::nonzero_static",
                            "aten::ormqr",
                            "aten::repeat_interleave.Tensor",
                            "aten::rot90",
                            "aten::segment_reduce",
                            "aten::triangular_solve",
                            "aten::unique_consecutive",
                            "aten::unique_dim"};

TEST(OperatorsThatUsersMeetTest, HaveRules) {
  for (const std::string op : kMet) {
    const size_t dot = op.find('.');
    const c10::OperatorName name = {op.substr(0, dot),
                                    dot == std::string::npos ? "" : op.substr(dot + 1)};
    EXPECT_NE(RuleTable::builtin().find(name), nullptr) << op;
  }
}

// validate_rules_test tries them on a line of ranks; validate_decisions on three dimensions
// of a mesh without moving anything; here they are cut along two at once, values and gradients.
TEST(OperatorsThatUsersMeetTest, AsOnOneDeviceOnMeshesOfSeveralDimensions) {
  at::set_num_threads(1);  // LAPACK's threads of all ranks would fight for the cores
  CheckOptions options;
  options.max_combinations = 4;
  std::set<std::string> tried;
  for (const testing::SampleFamily& family : sample_families()) {
    for (const Sample& sample : family.samples) {
      if (std::find(std::begin(kMet), std::end(kMet), sample.op) == std::end(kMet)) continue;
      tried.insert(sample.op);
      const testing::Validation found =
          testing::validate_end_to_end(sample, {{{"x", 2}, {"y", 2}}}, options);
      for (const std::string& text : found.wrong) ADD_FAILURE() << text;
    }
  }
  EXPECT_EQ(tried.size(), std::size(kMet) - 1);  // all but the bags
}

}  // namespace
}  // namespace shardweave
