#include "shardweave/dtensor/engine/strategy_cost.h"

#include <algorithm>

#include "shardweave/dtensor/engine/mesh_context.h"

namespace shardweave::dtensor_internal {
namespace {

// Seconds. What moves nothing between ranks costs something, too: doing nothing comes first.
constexpr double kLocalCopy = 1e-7;
constexpr double kPlainScalar = kLocalCopy / 16;
constexpr double kWriteBack = 1e-6;

// What is owed is an estimate, as shares of what it takes to make a result whole:
// a sum that the operator itself makes may be all-reduced (1), only reduce-scattered (1/2), or join
// another one (0);
constexpr double kFreshSum = 0.5;
// a reduction that is put off may yet be shared with another summand's;
constexpr double kLater = 0.99;
// one that is put off for several products is likely to be made for each;
constexpr double kSpread = 1.05;
// a cut that inputs had to be moved for may have to be undone, or not.
constexpr double kMovedCut = 0.45;

bool has_bit(uint64_t bits, int m) {
  return m < 64 && (bits >> m & 1) != 0;
}

// How many pieces a tensor is cut into by mesh dimensions other than the one being decided.
int64_t other_cuts(const OpCall& call, const SpecRef& spec) {
  int64_t pieces = 1;
  if (spec == nullptr) return pieces;
  for (int m = 0; m < spec->layout.mesh_ndim(); ++m) {
    if (m != call.mesh_dim && spec->layout[m].is_shard()) pieces *= spec->context->mesh().size(m);
  }
  return pieces;
}

// Of one rank's part, the same figure on all ranks.
int64_t part_bytes(const TensorInfo& info, int64_t pieces) {
  return (info.numel() + pieces - 1) / pieces * c10::elementSize(info.dtype);
}
// How many ranks share the work of what is cut so: few rows leave ranks with nothing to do.
int64_t pieces(const OpCall& call, const TensorInfo& info, const Placement& placement) {
  if (!placement.is_shard()) return 1;
  const int64_t size = std::max<int64_t>(info.sizes[placement.dim()], 1);
  const int64_t largest = (size + call.num_ranks - 1) / call.num_ranks;
  return std::max<int64_t>(size / largest, 1);
}
int64_t bytes_at(const OpCall& call, const TensorInfo& input, const Placement& placement) {
  return part_bytes(input, other_cuts(call, input.spec) * pieces(call, input, placement));
}

// Indices and masks are no factors, and cutting them is no work.
bool is_index(const TensorInfo& info) {
  return c10::isIntegralType(info.dtype, /*includeBool=*/true);
}

class Weighing {
 public:
  Weighing(const OpCall& call, const Strategy& strategy, const CostModel& model)
      : call_(call), strategy_(strategy), model_(model), link_(model.link(call.mesh_dim)) {}

  // To bring input i where the strategy wants it, from where it lies or is remembered.
  double move(int i) const {
    const TensorInfo& input = call_.input(i);
    const Placement& want = strategy_.inputs[i];
    const Placement have = call_.placement(i);
    if (!input.defined || have == want) return 0;
    if (input.spec == nullptr) return kPlainScalar;
    double seconds = transfer(input, have, want);
    if (input.remembered != nullptr) {
      const Placement& kept = input.remembered->layout[call_.mesh_dim];
      seconds = std::min(seconds, kept == want ? 0 : transfer(input, kept, want));
    }
    return kLocalCopy + seconds;
  }

  double write_back(int i) const {
    const Placement& result =
        strategy_.outputs.empty() ? strategy_.inputs[i] : strategy_.outputs[0];
    const Placement home = call_.placement(i);
    if (result == home) return 0;
    return kWriteBack + transfer(call_.input(i), result, home);
  }

  // Flops over the ranks that share them, and every byte read or written once.
  double compute(double flops, absl::Span<const Placements> outputs) const {
    double bytes = 0;
    int64_t own = 1;     // ranks along the mesh dimension that is being decided that share the work
    int64_t others = 1;  // and along the others
    for (int i = 0; i < call_.num_inputs(); ++i) {
      const TensorInfo& input = call_.input(i);
      if (!input.defined) continue;
      const int64_t mine = pieces(call_, input, strategy_.inputs[i]);
      const int64_t other = other_cuts(call_, input.spec);
      bytes += static_cast<double>(part_bytes(input, other * mine));
      own = std::max(own, mine);
      others = std::max(others, other);
    }
    for (int k = 0; k < call_.num_outputs(); ++k) {
      if (!call_.output(k).defined) continue;
      bytes += static_cast<double>(output_bytes(k, outputs));
      own = std::max(own, pieces(call_, call_.output(k), strategy_.outputs[k]));
    }
    const auto ranks = static_cast<double>(own * others);
    return flops / ranks / model_.device.flops + bytes / model_.device.bandwidth;
  }

  // To bring results where the strategy says.
  double bring(absl::Span<const Placements> outputs) const {
    double seconds = 0;
    for (int k = 0; k < call_.num_outputs(); ++k) {
      const Placement &from = strategy_.outputs[k], &to = strategy_.result(k);
      if (!call_.output(k).defined || from == to) continue;
      seconds += transition_cost(from, to, call_.num_ranks, output_bytes(k, outputs), link_);
    }
    return seconds;
  }

  double owed(absl::Span<const Placements> outputs) const {
    const double sum = is_product() ? kSpread : takes_partial() ? kLater : kFreshSum;
    const double cut = cuts_stay() ? 0 : kMovedCut;
    double seconds = 0;
    for (int k = 0; k < call_.num_outputs(); ++k) {
      const Placement& result = strategy_.result(k);
      if (!call_.output(k).defined || result.is_replicate()) continue;
      const double share = result.is_partial() ? sum : cut;
      if (share == 0) continue;
      seconds += share * transition_cost(result, Replicate(), call_.num_ranks,
                                         output_bytes(k, outputs), link_);
    }
    return seconds;
  }

  DataMoves data() const {
    bool any = false, some_stay = false, all_stay = true, still_cut = false;
    bool nothing_moves = true;
    const bool cut_results = has_cut_results();
    for (int i = 0; i < call_.num_inputs(); ++i) {
      const TensorInfo& input = call_.input(i);
      if (!input.defined) continue;
      const bool stays = strategy_.inputs[i] == call_.placement(i);
      const bool sliced = call_.placement(i).is_replicate() && strategy_.inputs[i].is_shard();
      nothing_moves &= stays || (sliced && is_index(input));
      if (!has_bit(input.origins.data, call_.mesh_dim)) continue;
      any = true;
      some_stay |= stays;
      all_stay &= stays;
      still_cut |= cut_results && pieces(call_, input, strategy_.inputs[i]) > 1;
    }
    if (!any || (all_stay && (cut_results || nothing_moves))) return DataMoves::kStays;
    return some_stay || still_cut ? DataMoves::kMoves : DataMoves::kGivenUp;
  }

  // True if a weight that is cut is moved where no data has to stay cut.
  bool gives_up_weight() const {
    bool lost = false, kept = false;
    for (int i = 0; i < call_.num_inputs(); ++i) {
      const TensorInfo& input = call_.input(i);
      if (!input.defined) continue;
      if (has_bit(input.origins.data, call_.mesh_dim)) return false;
      if (!has_bit(input.origins.weight, call_.mesh_dim)) continue;
      (strategy_.inputs[i] == call_.placement(i) ? kept : lost) = true;
    }
    return lost && !kept;
  }

 private:
  double transfer(const TensorInfo& input, const Placement& from, const Placement& to) const {
    return transition_cost(from, to, call_.num_ranks, bytes_at(call_, input, from), link_);
  }

  int64_t output_bytes(int k, absl::Span<const Placements> outputs) const {
    int64_t cuts = pieces(call_, call_.output(k), strategy_.outputs[k]);
    bool decided = true;
    for (int m : call_.order) {
      if (m == call_.mesh_dim) {
        decided = false;
      } else if (decided ? outputs[k][m].is_shard() : cuts_an_input(m)) {
        cuts *= mesh().size(m);
      }
    }
    return part_bytes(call_.output(k), cuts);
  }
  // Whose turn is still to come: as things stand, it will cut the results as well.
  bool cuts_an_input(int m) const {
    return std::any_of(call_.inputs.begin(), call_.inputs.end(), [m](const TensorInfo& input) {
      return input.spec != nullptr && input.spec->layout[m].is_shard();
    });
  }
  const DeviceMesh& mesh() const { return call_.inputs[any_dtensor()].spec->context->mesh(); }
  size_t any_dtensor() const {
    size_t i = 0;
    while (call_.inputs[i].spec == nullptr) ++i;
    return i;
  }

  bool takes_partial() const {
    for (int i = 0; i < call_.num_inputs(); ++i) {
      if (call_.input(i).defined && strategy_.inputs[i].is_partial()) return true;
    }
    return false;
  }
  bool has_cut_results() const {
    for (int k = 0; k < call_.num_outputs(); ++k) {
      if (call_.output(k).defined && strategy_.result(k).is_shard()) return true;
    }
    return false;
  }
  // True if a tensor that is cut stays where it is, so that the results are cut where others are.
  bool cuts_stay() const {
    for (int i = 0; i < call_.num_inputs(); ++i) {
      if (!call_.input(i).defined || !strategy_.inputs[i].is_shard()) continue;
      if (strategy_.inputs[i] == call_.placement(i)) return true;
    }
    return false;
  }

  // A Partial together with factors that are not one (indices and masks are none).
  bool is_product() const {
    bool partial = false, whole = false;
    for (int i = 0; i < call_.num_inputs(); ++i) {
      const TensorInfo& input = call_.input(i);
      if (!input.defined || strategy_.inputs[i].is_shard()) continue;
      partial |= strategy_.inputs[i].is_partial();
      whole |= !strategy_.inputs[i].is_partial() && input.numel() > 1 && !is_index(input);
    }
    return partial && whole;
  }

  const OpCall& call_;
  const Strategy& strategy_;
  const CostModel& model_;
  const CostModel::Link link_;
};

}  // namespace

StrategyCost strategy_cost(const OpCall& call, const Strategy& strategy, const CostModel& model,
                           double flops, absl::Span<const Placements> outputs,
                           std::optional<int> written_input) {
  const Weighing weighing(call, strategy, model);
  StrategyCost cost;
  for (int i = 0; i < call.num_inputs(); ++i) cost.move += weighing.move(i);
  if (written_input.has_value()) cost.move += weighing.write_back(*written_input);
  cost.move += weighing.bring(outputs);
  cost.compute = weighing.compute(flops, outputs);
  // What is written back owes nothing more than it did.
  if (!written_input.has_value()) cost.owed = weighing.owed(outputs);
  cost.data = weighing.data();
  cost.gives_up_weight = weighing.gives_up_weight();
  return cost;
}

}  // namespace shardweave::dtensor_internal
