// Histograms: every rank counts what it has, and the counts add up. Where the bins are not given
// they follow from the smallest and the largest element of all ranks, which are found first.
#include <algorithm>
#include <limits>
#include <optional>
#include <vector>

#include "ATen/TensorOperators.h"
#include "ATen/ops/_histogramdd_bin_edges.h"
#include "ATen/ops/_histogramdd_from_bin_cts.h"
#include "ATen/ops/_histogramdd_from_bin_tensors.h"
#include "ATen/ops/aminmax.h"
#include "ATen/ops/bincount.h"
#include "ATen/ops/diff.h"
#include "ATen/ops/histc.h"
#include "ATen/ops/histogram.h"
#include "absl/strings/str_cat.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/redistribute.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "shardweave/dtensor/rules/common.h"
#include "shardweave/dtensor/rules/families.h"

namespace shardweave::dtensor_internal {
namespace {

bool is_cut(const at::Tensor& tensor) {
  if (!is_dtensor(tensor)) return false;
  for (const Placement& p : layout_of(tensor).placements()) {
    if (p.is_shard()) return true;
  }
  return false;
}

// What is counted, and weights that lie as it does. `dims`: of both.
void count(const OpCall& call, Strategies& out, int dims, std::vector<Placement> outputs) {
  const bool weighted = call.has_arg("weight");
  for (int d = 0; d < dims; ++d) {
    std::vector<Placement> inputs = call.placements({{"self", Shard(d)}});
    if (weighted) inputs[call.input_index("weight")] = Shard(d);
    out.add(std::move(inputs), outputs);
  }
}

// --- histc ---------------------------------------------------------------------------------------

// Equal ends stand for the smallest and the largest element.
bool has_no_ends(const at::Scalar& min, const at::Scalar& max) {
  return min.toDouble() == max.toDouble();
}

void histc(const OpCall& call, Strategies& out) {
  if (has_no_ends(call.arg("min").toScalar(), call.arg("max").toScalar())) return;
  count(call, out, call.input("self").ndim(), {Partial()});
}

void histc_shape(OpCall& call) {
  call.outputs.push_back(contiguous_info({call.int_arg("bins")}, call.input("self").dtype));
}

bool histc_has_no_ends(const Arguments& args) {
  const at::Tensor& self = args.tensor("self");
  return self.numel() > 0 && is_cut(self) &&
         has_no_ends(args["min"].toScalar(), args["max"].toScalar());
}

void histc_between_extremes(const c10::OperatorHandle& op, c10::Stack& stack) {
  BoxedCall call(op, stack);
  const at::Tensor self = call.tensor("self");
  const auto [low, high] = at::aminmax(self);
  double first = low.item().toDouble(), last = high.item().toDouble();
  if (first == last) {  // as LibTorch does
    first -= 1;
    last += 1;
  }
  call.finish({at::histc(self, call["bins"].toInt(), first, last)});
}

// --- histogram and histogramdd -------------------------------------------------------------------

// Only counts between known edges add up: not those between extremes of a part, nor densities.
bool adds_up(const OpCall& call) {
  if (call.has_arg("range") && call.arg("range").isNone()) return false;
  return !call.bool_arg("density");
}

// Counts and edges.
void counts_and_edges(const OpCall& call, Strategies& out) {
  if (adds_up(call)) count(call, out, call.input("self").ndim(), {Partial(), Replicate()});
}

void histogram_counts_shapes(OpCall& call) {
  const at::ScalarType dtype = call.input("self").dtype;
  const int64_t bins = call.int_arg("bins");
  call.outputs = {contiguous_info({bins}, dtype), contiguous_info({bins + 1}, dtype)};
}

void histogram_between_shapes(OpCall& call) {
  const TensorInfo& bins = call.input("bins");
  const int64_t edges = bins.numel();
  call.outputs = {contiguous_info({edges - 1}, call.input("self").dtype),
                  contiguous_info({edges}, bins.dtype)};
}

// Points self [..., D], weight [...] -> counts; edges between them.
void points_between(const OpCall& call, Strategies& out) {
  if (adds_up(call)) count(call, out, call.input("self").ndim() - 1, {Partial()});
}

void points_between_shape(OpCall& call) {
  Dims sizes;
  if (call.arg("bins").isIntList()) {
    for (int64_t bins : call.arg("bins").toIntVector()) sizes.push_back(bins);
  } else {
    for (const TensorInfo& bins : call.list("bins")) sizes.push_back(bins.numel() - 1);
  }
  call.outputs.push_back(contiguous_info(std::move(sizes), call.input("self").dtype));
}

// Edges are made of the range alone.
void edges(const OpCall& call, Strategies& out) {
  if (!adds_up(call)) return;
  for (int d = 0; d < call.input("self").ndim() - 1; ++d) {
    out.add({{"self", Shard(d)}}, std::vector<Placement>(call.num_outputs(), Replicate()));
  }
}

void edges_shapes(OpCall& call) {
  for (int64_t bins : call.arg("bins").toIntVector()) {
    call.outputs.push_back(contiguous_info({bins + 1}, call.input("self").dtype));
  }
}

// The elements' range, low and high, of each of the last dimension's coordinates, or of all
// together; without elements what LibTorch takes then.
std::vector<double> extremes(const at::Tensor& points, bool by_coordinate) {
  const int64_t coordinates = by_coordinate ? points.size(-1) : 1;
  std::vector<double> range;
  for (int64_t i = 0; i < coordinates; ++i) {
    if (points.numel() == 0) {
      range.insert(range.end(), {0, 1});
      continue;
    }
    const auto [low, high] = at::aminmax(by_coordinate ? points.select(-1, i) : points);
    range.push_back(low.item().toDouble());
    range.push_back(high.item().toDouble());
  }
  return range;
}

// Without a range, or with a division by the sum over all ranks.
bool is_not_only_counts(const Arguments& args) {
  const bool has_no_range = args.has("range") && args["range"].isNone();
  return is_cut(args.tensor("self")) && (has_no_range || args["density"].toBool());
}

// Counts to densities: over the sum of all, and over the size of each bin.
at::Tensor as_density(at::Tensor counts, absl::Span<const at::Tensor> bin_edges) {
  counts = counts.div(counts.sum());
  for (size_t d = 0; d < bin_edges.size(); ++d) {
    std::vector<int64_t> shape(bin_edges.size(), 1);
    shape[d] = -1;
    counts = counts.div(at::diff(bin_edges[d]).reshape(shape));
  }
  return counts;
}

std::optional<at::Tensor> weight_of(BoxedCall& call) {
  const at::Tensor weight = call.tensor("weight");
  return weight.defined() ? std::optional<at::Tensor>(weight) : std::nullopt;
}

void histogram(const c10::OperatorHandle& op, c10::Stack& stack) {
  BoxedCall call(op, stack);
  const at::Tensor self = call.tensor("self");
  at::Tensor counts, between;
  if (call["bins"].isTensor()) {
    std::tie(counts, between) = at::histogram(self, call.tensor("bins"), weight_of(call), false);
  } else {
    const std::vector<double> range =
        call["range"].isNone() ? extremes(self, false) : call["range"].toDoubleVector();
    std::tie(counts, between) = at::histogram(self, call["bins"].toInt(),
                                              at::ArrayRef<double>(range), weight_of(call), false);
  }
  if (call.flag("density")) counts = as_density(counts, {between});
  call.finish({counts, between});
}

// The same for points: LibTorch asks for the edges, and then for the counts.
void points_histogram(const c10::OperatorHandle& op, c10::Stack& stack) {
  BoxedCall call(op, stack);
  const at::Tensor self = call.tensor("self");
  at::Tensor counts;
  std::vector<at::Tensor> bin_edges;
  if (call["bins"].isTensorList()) {
    bin_edges = call["bins"].toTensorVector();
    counts = at::_histogramdd_from_bin_tensors(self, bin_edges, weight_of(call), false);
  } else {
    const std::vector<int64_t> bins = call["bins"].toIntVector();
    const std::vector<double> range =
        call["range"].isNone() ? extremes(self, true) : call["range"].toDoubleVector();
    const at::ArrayRef<double> given(range);
    bin_edges = at::_histogramdd_bin_edges(self, bins, given, std::nullopt, false);
    counts = at::_histogramdd_from_bin_cts(self, bins, given, weight_of(call), false);
  }
  if (call.flag("density")) counts = as_density(counts, bin_edges);
  call.finish({counts});
}

// With a range it is none of these any more.
void points_edges(const c10::OperatorHandle& op, c10::Stack& stack) {
  BoxedCall call(op, stack);
  if (call["range"].isNone()) call["range"] = extremes(call.tensor("self"), true);
  call["density"] = false;
  call.run();
}

// --- bincount ------------------------------------------------------------------------------------

bool counts_shards(const Arguments& args) {
  return is_cut(args.tensor("self"));
}

// As `like`, but known: without Partials.
Layout known_layout(const Layout& like) {
  Placements placements = like.placements();
  for (Placement& p : placements) {
    if (p.is_partial()) p = Replicate();
  }
  return value_or_throw(Layout::create(std::move(placements), like.order()));
}

// This rank's part of the weights, which lie as what they weigh.
std::optional<at::Tensor> local_weights(BoxedCall& call, const at::Tensor& self,
                                        const std::string& name) {
  at::Tensor weights = call.tensor("weights");
  if (!weights.defined()) return std::nullopt;
  if (weights.sizes() != self.sizes()) {
    throw Error(absl::InvalidArgumentError(absl::StrCat(
        name, ": wanted a weight for each of ", self.numel(), " numbers, got ", weights.numel())));
  }
  // A plain tensor is the same on every rank, as operators make sure.
  if (!is_dtensor(weights)) weights = weights.sub(self.new_zeros({}, weights.options()));
  const Layout& layout = meta_of(self).spec->layout;
  return meta_of(redistributed(weights, layout, {.name = name, .argument = "weights"})).local();
}

// Its length is the largest number of any rank, and one.
void bincount(const c10::OperatorHandle& op, c10::Stack& stack) {
  BoxedCall call(op, stack);
  const std::string name = c10::toString(op.operator_name());
  const at::Tensor self =
      redistributed(call.tensor("self"), known_layout(layout_of(call.tensor("self"))),
                    {.name = name, .argument = "self"});
  int64_t length = call["minlength"].toInt();
  if (self.numel() > 0 && c10::isIntegralType(self.scalar_type(), /*includeBool=*/false)) {
    const auto [low, high] = at::aminmax(self);
    // What LibTorch would say of one rank's numbers is said on all ranks.
    if (const int64_t least = low.item().toLong(); least < 0) {
      throw Error(absl::InvalidArgumentError(
          absl::StrCat(name, ": wanted numbers that are not negative, got ", least)));
    }
    length = std::max(length, high.item().toLong() + 1);
  }
  const DTensorMeta& meta = meta_of(self);
  const std::optional<at::Tensor> weights = local_weights(call, self, name);
  at::Tensor counts = at::bincount(meta.local(), weights, length);
  // Who has no numbers does not look at the weights' type.
  if (weights.has_value() && self.numel() > 0) {
    counts = counts.to(weights->scalar_type() == at::kFloat ? at::kFloat : at::kDouble);
  }
  Placements placements = meta.spec->layout.placements();
  for (Placement& p : placements) p = p.is_shard() ? Partial() : Replicate();
  const Dims sizes = {counts.numel()};
  const SpecRef spec =
      meta.context->intern(Layout(std::move(placements)), sizes, contiguous_strides(sizes),
                           counts.scalar_type(), counts.device());
  call.finish({wrap(std::move(counts), spec, meta.context)});
}

}  // namespace

void add_histogram_rules(RuleTable& table) {
  table.add(
      "aten::histc",
      sharded(histc).shapes(histc_shape).when(histc_has_no_ends, composed(histc_between_extremes)));
  for (const char* name : {"aten::histogram.bin_ct", "aten::histogram.bin_ct_out"}) {
    table.add(name, sharded(counts_and_edges)
                        .reads({"range"})
                        .shapes(histogram_counts_shapes)
                        .when(is_not_only_counts, composed(histogram)));
  }
  for (const char* name : {"aten::histogram.bins_tensor", "aten::histogram.bins_tensor_out"}) {
    table.add(name, sharded(counts_and_edges)
                        .shapes(histogram_between_shapes)
                        .when(is_not_only_counts, composed(histogram)));
  }
  table.add({"aten::_histogramdd_from_bin_cts", "aten::_histogramdd_from_bin_tensors"},
            sharded(points_between)
                .reads({"range"})
                .shapes(points_between_shape)
                .when(is_not_only_counts, composed(points_histogram)));
  table.add("aten::_histogramdd_bin_edges", sharded(edges)
                                                .reads({"range"})
                                                .shapes(edges_shapes)
                                                .when(is_not_only_counts, composed(points_edges)));
  // Without a cut nothing is known of the length before, either.
  table.add("aten::bincount", gathered().when(counts_shards, composed(bincount)));
}

}  // namespace shardweave::dtensor_internal
