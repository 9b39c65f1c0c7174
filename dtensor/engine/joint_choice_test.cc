// Mesh dimensions are decided one after another. Held against all that could have been taken along
// the outer one: nothing else would have kept more data or weights cut, and where another choice
// would have been cheaper in seconds, it is in layouts that no plan makes, and not by much.

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "ATen/core/dispatch/Dispatcher.h"
#include "ATen/ops/empty.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/engine/dispatch.h"
#include "shardweave/dtensor/testing/on_mesh.h"

namespace shardweave {
namespace {

using at::Tensor;
using c10::IValue;
using dtensor_internal::DataMoves;
using dtensor_internal::Decided;
using dtensor_internal::StrategyCost;
using dtensor_internal::WeighedDim;
using testing::on_mesh;

struct Operand {
  std::vector<int64_t> sizes;
  bool is_weight = false;
  at::ScalarType dtype = at::kFloat;
};

struct Call {
  std::string op;
  std::vector<Operand> operands;
  std::function<std::vector<IValue>(const std::vector<Tensor>&)> arguments =
      [](const std::vector<Tensor>& tensors) {
        return std::vector<IValue>(tensors.begin(), tensors.end());
      };
};

const std::vector<Call>& calls() {
  static const auto* const calls = new std::vector<Call>{
      {"aten::mm", {{{4096, 512}}, {{512, 2048}, true}}},
      {"aten::mm", {{{512, 4096}}, {{4096, 512}}}},
      {"aten::bmm", {{{16, 256, 64}}, {{16, 64, 256}}}},
      {"aten::addmm", {{{2048}, true}, {{4096, 512}}, {{512, 2048}, true}}},
      {"aten::mul.Tensor", {{{16, 256, 512}}, {{16, 256, 512}}}},
      {"aten::mul.Tensor", {{{4096, 512}}, {{512}, true}}},
      {"aten::add.Tensor", {{{16, 256, 512}}, {{256, 512}, true}}},
      {"aten::embedding", {{{32000, 512}, true}, {{16, 256}, false, at::kLong}}},
      {"aten::native_layer_norm",
       {{{16, 256, 512}}, {{512}, true}, {{512}, true}},
       [](const std::vector<Tensor>& t) {
         return std::vector<IValue>{t[0], std::vector<int64_t>{512}, t[1], t[2], 1e-5};
       }},
      {"aten::sum.dim_IntList",
       {{{16, 256, 512}}},
       [](const std::vector<Tensor>& t) {
         return std::vector<IValue>{t[0], std::vector<int64_t>{2}};
       }},
      {"aten::view",
       {{{16, 256, 512}}},
       [](const std::vector<Tensor>& t) {
         return std::vector<IValue>{t[0], std::vector<int64_t>{4096, 8, 64}};
       }},
  };
  return *calls;
}

// Without memory.
Tensor tensor(const MeshPtr& mesh, const Operand& operand, const Placements& placements) {
  const at::TensorOptions options = at::TensorOptions(at::kMeta).dtype(operand.dtype);
  Placements without_sums = placements;
  for (Placement& p : without_sums) {
    if (p.is_partial()) p = Replicate();
  }
  const Tensor local = to_local(empty(operand.sizes, mesh, without_sums, options));
  return from_local(local, mesh, placements, operand.sizes).requires_grad_(operand.is_weight);
}

std::optional<Decided> weigh(const MeshPtr& mesh, const Call& call,
                             const std::vector<Placements>& layouts) {
  std::vector<Tensor> tensors;
  for (size_t i = 0; i < layouts.size(); ++i) {
    tensors.push_back(tensor(mesh, call.operands[i], layouts[i]));
  }
  const std::vector<IValue> args = call.arguments(tensors);
  const size_t dot = call.op.find('.');
  const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow(
      call.op.substr(0, dot).c_str(),
      dot == std::string::npos ? "" : call.op.substr(dot + 1).c_str());
  std::vector<IValue> all = args;
  for (size_t i = all.size(); i < op.schema().arguments().size(); ++i) {
    all.push_back(*op.schema().arguments()[i].default_value());
  }
  return dtensor_internal::decide_only(op, all);
}

struct Total {
  DataMoves data = DataMoves::kStays;
  int weights = 0;
  double seconds = 0;

  void add(const StrategyCost& cost) {
    data = std::max(data, cost.data);
    weights += cost.gives_up_weight;
    seconds += cost.seconds();
  }
  std::string to_string() const {
    return absl::StrCat("data ", static_cast<int>(data), ", ", weights, " weights, ", seconds,
                        " s");
  }
};

const StrategyCost& chosen(const WeighedDim& dim) {
  return dim.options[dim.chosen].cost;
}

class JointChoiceTest : public ::testing::TestWithParam<size_t> {};

// The worst of all below, 1.40: a layer norm's weight and bias, both cut or sums, are brought for a
// cut of the data that the other mesh dimension has, too.
constexpr double kAtMostDearer = 1.45;

TEST_P(JointChoiceTest, NoOtherOuterChoiceLeadsToAMuchCheaperWhole) {
  const Call& call = calls()[GetParam()];
  int64_t tried = 0;
  on_mesh({{"dp", 2}, {"tp", 4}}, [&](const MeshPtr& mesh) {
    if (mesh->coordinate() != Coordinate{0, 0}) return;
    std::vector<std::vector<Placements>> choices;
    for (const Operand& operand : call.operands) {
      choices.push_back(testing::all_layouts(2, static_cast<int>(operand.sizes.size()),
                                             /*partial=*/operand.dtype == at::kFloat));
    }
    std::vector<size_t> at(choices.size(), 0);
    for (bool more = true; more;) {
      std::vector<Placements> layouts;
      for (size_t i = 0; i < at.size(); ++i) layouts.push_back(choices[i][at[i]]);
      const std::optional<Decided> decided = weigh(mesh, call, layouts);
      ASSERT_TRUE(decided.has_value() && decided->weighed.size() == 2);
      const WeighedDim& outer = decided->weighed[0];
      Total taken;
      taken.add(chosen(outer));
      taken.add(chosen(decided->weighed[1]));
      for (const WeighedDim::Option& option : outer.options) {
        if (!option.obstacle.empty()) continue;
        // What would then be decided along the inner one: the inputs lie so already.
        std::vector<Placements> moved = layouts;
        for (size_t i = 0; i < moved.size(); ++i) moved[i][0] = option.strategy.inputs[i];
        const std::optional<Decided> other = weigh(mesh, call, moved);
        const WeighedDim::Option& stays = other->weighed[0].options[other->weighed[0].chosen];
        if (stays.strategy.inputs != option.strategy.inputs ||
            stays.strategy.outputs != option.strategy.outputs) {
          continue;
        }
        Total whole;
        whole.add(option.cost);
        whole.add(chosen(other->weighed[1]));
        ++tried;
        const auto given_up = [](const Total& t) { return std::tie(t.data, t.weights); };
        const bool better =
            given_up(whole) < given_up(taken) ||
            (given_up(whole) == given_up(taken) && taken.seconds > whole.seconds * kAtMostDearer);
        std::string given;
        for (const Placements& p : layouts) absl::StrAppend(&given, Layout(p).to_string(), " ");
        std::string instead;
        for (const Placements& p : moved) absl::StrAppend(&instead, p[0].to_string(), " ");
        EXPECT_FALSE(better) << call.op << " of " << given << ": " << taken.to_string() << ", with "
                             << instead << " along the outer dimension " << whole.to_string();
      }
      more = false;
      for (size_t i = 0; i < at.size() && !more; ++i) {
        more = ++at[i] < choices[i].size();
        if (!more) at[i] = 0;
      }
    }
  });
  EXPECT_GT(tried, 0);
}

INSTANTIATE_TEST_SUITE_P(Calls, JointChoiceTest, ::testing::Range<size_t>(0, calls().size()));

}  // namespace
}  // namespace shardweave
