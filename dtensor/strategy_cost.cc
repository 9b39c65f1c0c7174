#include "shardweave/dtensor/strategy_cost.h"

#include <algorithm>

#include "shardweave/dtensor/mesh_context.h"

namespace shardweave::dtensor_internal {
namespace {

// Seconds. What moves nothing between ranks costs something, too: doing nothing comes first.
constexpr double kLocalCopy = 1e-7;
constexpr double kPlainScalar = kLocalCopy / 16;
constexpr double kWriteBack = 1e-6;

// A reduction that is put off may yet be shared with another summand's, a bit; one of several
// products is likely to be one too many.
constexpr double kLater = 0.99;
constexpr double kSpread = 1.05;

bool has_bit(uint64_t bits, int m) {
  return (bits >> m & 1) != 0;
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
int64_t bytes_at(const OpCall& call, const TensorInfo& input, const Placement& placement) {
  const int64_t own = placement.is_shard() ? call.num_ranks : 1;
  return part_bytes(input, other_cuts(call, input.spec) * own);
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
    bool cut = false;        // by the mesh dimension that is being decided
    int64_t others = 1;      // ranks along the others that share the work
    for (int i = 0; i < call_.num_inputs(); ++i) {
      if (!call_.input(i).defined) continue;
      bytes += static_cast<double>(bytes_at(call_, call_.input(i), strategy_.inputs[i]));
      cut |= strategy_.inputs[i].is_shard();
      others = std::max(others, other_cuts(call_, call_.input(i).spec));
    }
    for (int k = 0; k < call_.num_outputs(); ++k) {
      if (!call_.output(k).defined) continue;
      bytes += static_cast<double>(output_bytes(k, outputs));
      cut |= strategy_.outputs[k].is_shard();
    }
    double ranks = cut ? static_cast<double>(call_.num_ranks) : 1.0;
    ranks *= static_cast<double>(others);
    return flops / ranks / model_.device.flops + bytes / model_.device.bandwidth;
  }

  double owed(absl::Span<const Placements> outputs) const {
    double seconds = 0;
    for (int k = 0; k < call_.num_outputs(); ++k) {
      if (!call_.output(k).defined || !strategy_.outputs[k].is_partial()) continue;
      seconds += transition_cost(strategy_.outputs[k], Replicate(), call_.num_ranks,
                                 output_bytes(k, outputs), link_);
    }
    return seconds * (is_product() ? kSpread : kLater);
  }

  // True if inputs with such a cut (of the origins that `of` picks) lose it, and none keeps it.
  template <typename Of>
  bool gives_up(Of of) const {
    bool lost = false, kept = false;
    for (int i = 0; i < call_.num_inputs(); ++i) {
      if (!call_.input(i).defined || !has_bit(of(call_.input(i).origins), call_.mesh_dim)) continue;
      (strategy_.inputs[i] == call_.placement(i) ? kept : lost) = true;
    }
    return lost && !kept;
  }

 private:
  double transfer(const TensorInfo& input, const Placement& from, const Placement& to) const {
    return transition_cost(from, to, call_.num_ranks, bytes_at(call_, input, from), link_);
  }

  int64_t output_bytes(int k, absl::Span<const Placements> outputs) const {
    int64_t pieces = strategy_.outputs[k].is_shard() ? call_.num_ranks : 1;
    bool decided = true;
    for (int m : call_.order) {
      if (m == call_.mesh_dim) {
        decided = false;
      } else if (decided ? outputs[k][m].is_shard() : cuts_an_input(m)) {
        pieces *= mesh().size(m);
      }
    }
    return part_bytes(call_.output(k), pieces);
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

  // A Partial together with factors that are not one (indices and masks are none).
  bool is_product() const {
    bool partial = false, whole = false;
    for (int i = 0; i < call_.num_inputs(); ++i) {
      const TensorInfo& input = call_.input(i);
      if (!input.defined || strategy_.inputs[i].is_shard()) continue;
      partial |= strategy_.inputs[i].is_partial();
      whole |= !strategy_.inputs[i].is_partial() && input.numel() > 1 &&
               !c10::isIntegralType(input.dtype, /*includeBool=*/true);
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
  cost.compute = weighing.compute(flops, outputs);
  // What is written back owes nothing more than it did.
  if (!written_input.has_value()) cost.owed = weighing.owed(outputs);
  cost.gives_up_data = weighing.gives_up([](const CutOrigins& o) { return o.data; });
  cost.gives_up_weight = weighing.gives_up([](const CutOrigins& o) { return o.weight; });
  return cost;
}

}  // namespace shardweave::dtensor_internal
