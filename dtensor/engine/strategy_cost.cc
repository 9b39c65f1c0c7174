#include "shardweave/dtensor/engine/strategy_cost.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/match.h"

namespace shardweave::dtensor_internal {
namespace {

// Seconds. What moves nothing between ranks costs something, too: doing nothing comes first.
constexpr double kLocalCopy = 1e-7;
constexpr double kPlainScalar = kLocalCopy / 16;
// Between equals it is the gradient that moves: it goes on as it lies then, to operators whose tensors
// were saved as this one's.
constexpr double kSaved = kLocalCopy / 4;
constexpr double kWriteBack = 1e-6;

// What is owed is an estimate, as shares of what it takes to make a result whole:
// a sum that the operator itself makes may be all-reduced (1), only reduce-scattered (1/2), or join
// another one (0);
constexpr double kFreshSum = 0.5;
// a reduction that is put off may yet be shared with another summand's;
constexpr double kLater = 0.99;
// one that is put off for several products is likely to be made for each;
constexpr double kSpread = 1.05;
// a cut that data had to be moved for may have to be undone, or not;
constexpr double kMovedCut = 0.45;
// one that nobody has asked for, of neither data nor weights, is, and so is its gradient's.
constexpr double kOwnCut = 2;

// By its name in LibTorch's schemas: grad, grad_output, grads, ...
bool is_gradient(const OpCall& call, int input) {
  return absl::StartsWith(call.op->schema().arguments()[call.input_arg[input]].name(), "grad");
}

bool has_bit(uint64_t bits, int m) {
  return m < 64 && (bits >> m & 1) != 0;
}

// Of the largest of `pieces` parts, the same figure on all ranks.
int64_t part_bytes(const TensorInfo& info, int64_t numel, double pieces) {
  return std::llround(static_cast<double>(numel) / pieces) *
         static_cast<int64_t>(c10::elementSize(info.dtype));
}

}  // namespace

StrategyWeigher::StrategyWeigher(const OpCall& call, absl::Span<const int64_t> mesh_shape,
                                 const CostModel& model, double flops,
                                 absl::Span<const Placements> outputs,
                                 std::optional<int> written_input)
    : call_(call),
      model_(model),
      link_(model.link(call.mesh_dim)),
      flops_(flops),
      written_input_(written_input) {
  static const Placement replicate;
  const int ndim = static_cast<int>(mesh_shape.size());
  // As things stand, mesh dimensions whose turn is still to come will cut the results as well.
  absl::InlinedVector<bool, 8> cuts_an_input(ndim, false);
  bool any_gradient = false;
  int last_dtensor = -1;
  for (int i = 0; i < call.num_inputs(); ++i) {
    const TensorInfo& info = call.input(i);
    if (!info.defined && info.spec == nullptr) continue;
    int64_t other_cuts = 1;
    for (int m = 0; info.spec != nullptr && m < ndim; ++m) {
      if (!info.spec->layout[m].is_shard()) continue;
      cuts_an_input[m] = true;
      if (m != call.mesh_dim) other_cuts *= mesh_shape[m];
    }
    if (!info.defined) continue;
    shared_by_others_ = std::max(shared_by_others_, other_cuts);
    const Placement* const have =
        info.spec == nullptr ? &replicate : &info.spec->layout[call.mesh_dim];
    const bool of_data = has_bit(info.origins.data, call.mesh_dim);
    const bool gradient = is_gradient(call, i);
    any_gradient |= gradient;
    inputs_.push_back(
        {i, &info, have,
         info.remembered == nullptr ? nullptr : &info.remembered->layout[call.mesh_dim],
         info.spec == nullptr, c10::isIntegralType(info.dtype, /*includeBool=*/true),
         of_data && have->is_shard(), has_bit(info.origins.weight, call.mesh_dim),
         of_data && have->is_partial(), !gradient, info.numel(), other_cuts,
         info.is_last_again ? last_dtensor : -1});
    if (info.spec != nullptr) last_dtensor = static_cast<int>(inputs_.size()) - 1;
  }
  for (Input& input : inputs_) input.was_saved &= any_gradient;
  for (int k = 0; k < call.num_outputs(); ++k) {
    const TensorInfo& info = call.output(k);
    if (!info.defined) continue;
    int64_t other_cuts = 1;
    bool decided = true;
    for (const int m : call.order) {
      if (m == call.mesh_dim) {
        decided = false;
      } else if (decided ? outputs[k][m].is_shard() : cuts_an_input[m]) {
        other_cuts *= mesh_shape[m];
      }
    }
    outputs_.push_back({k, &info, info.numel(), other_cuts});
  }
}

// How many times the largest part goes into the whole: 1003 rows on 2 ranks are 1.998 of 502. Few rows
// leave ranks with nothing to do.
double StrategyWeigher::pieces(const TensorInfo& info, const Placement& placement) const {
  if (!placement.is_shard()) return 1;
  const int64_t size = std::max<int64_t>(info.sizes[placement.dim()], 1);
  const int64_t largest = (size + call_.num_ranks - 1) / call_.num_ranks;
  return static_cast<double>(size) / static_cast<double>(largest);
}

double StrategyWeigher::transfer(const Input& input, const Placement& from,
                                 const Placement& to) const {
  if (from == to || from.is_replicate()) return 0;
  const int64_t bytes =
      part_bytes(*input.info, input.numel, input.other_cuts * pieces(*input.info, from));
  return transition_cost(from, to, call_.num_ranks, bytes, link_);
}

// To bring an input where the strategy wants it, from where it lies or is remembered.
double StrategyWeigher::move(const Input& input, const Placement& want) const {
  if (input.is_plain) return kPlainScalar;
  double seconds = transfer(input, *input.have, want);
  if (input.kept != nullptr) {
    seconds = std::min(seconds, *input.kept == want ? 0 : transfer(input, *input.kept, want));
  }
  return kLocalCopy + seconds + (input.was_saved && seconds > 0 ? kSaved : 0);
}

// A sum that is given twice, as A and as A.t(), is reduced once.
bool StrategyWeigher::is_brought_before(const Input& input, const Strategy& strategy) const {
  if (input.again < 0 || !input.have->is_partial()) return false;
  const Input& before = inputs_[input.again];
  const Placement& want = strategy.inputs[input.index];
  return *before.have == *input.have && strategy.inputs[before.index] == want &&
         (want.is_replicate() ||
          (before.info->sizes == input.info->sizes && before.info->strides == input.info->strides));
}

double StrategyWeigher::write_back(const Strategy& strategy) const {
  const auto input = std::find_if(inputs_.begin(), inputs_.end(),
                                  [&](const Input& i) { return i.index == *written_input_; });
  const Placement& result =
      strategy.outputs.empty() ? strategy.inputs[*written_input_] : strategy.outputs[0];
  if (input == inputs_.end() || result == *input->have) return 0;
  return kWriteBack + transfer(*input, result, *input->have);
}

int64_t StrategyWeigher::bytes_of(const Output& output, const Strategy& strategy) const {
  return part_bytes(*output.info, output.numel,
                    output.other_cuts * pieces(*output.info, strategy.outputs[output.index]));
}

// Flops over the ranks that share them, and every byte read or written once.
double StrategyWeigher::compute(const Strategy& strategy) const {
  double bytes = 0;
  double own = 1;  // ranks along the mesh dimension that is being decided that share the work
  for (const Input& input : inputs_) {
    const double mine = pieces(*input.info, strategy.inputs[input.index]);
    own = std::max(own, mine);
    if (input.info->only_shape) continue;
    bytes += static_cast<double>(part_bytes(*input.info, input.numel, input.other_cuts * mine));
  }
  for (const Output& output : outputs_) {
    const double mine = pieces(*output.info, strategy.outputs[output.index]);
    bytes += static_cast<double>(part_bytes(*output.info, output.numel, output.other_cuts * mine));
    own = std::max(own, mine);
  }
  const double ranks = own * static_cast<double>(shared_by_others_);
  return flops_ / ranks / model_.device.flops + bytes / model_.device.bandwidth;
}

// To bring results where the strategy says.
double StrategyWeigher::bring(const Strategy& strategy) const {
  if (strategy.then.empty()) return 0;
  double seconds = 0;
  for (const Output& output : outputs_) {
    const Placement& from = strategy.outputs[output.index];
    const Placement& to = strategy.then[output.index];
    if (from == to) continue;
    seconds += transition_cost(from, to, call_.num_ranks, bytes_of(output, strategy), link_);
  }
  return seconds;
}

double StrategyWeigher::owed(const Strategy& strategy, double share_of_sums, double share_of_cuts,
                             bool may_grow) const {
  double seconds = 0;
  // Of reducing the sums that it takes; if it takes what is whole as one, nobody can say.
  double now = 0;
  int64_t numel = 0;
  bool takes_whole = false;
  for (const Input& input : inputs_) {
    if (!strategy.inputs[input.index].is_partial()) continue;
    takes_whole |= !input.have->is_partial();
    now += transfer(input, *input.have, Replicate());
    numel = std::max(numel, input.numel);
  }
  for (const Output& output : outputs_) {
    const Placement& result = strategy.result(output.index);
    if (result.is_replicate()) continue;
    const double share = result.is_partial() ? share_of_sums : share_of_cuts;
    if (share == 0) continue;
    const double whole =
        transition_cost(result, Replicate(), call_.num_ranks, bytes_of(output, strategy), link_);
    const bool is_put_off =
        result.is_partial() && numel > 0 && !takes_whole && (may_grow || output.numel == numel);
    seconds += share * (is_put_off ? std::min(whole, now) : whole);
  }
  return seconds;
}

std::optional<StrategyCost> StrategyWeigher::weigh(const Strategy& strategy,
                                                   const StrategyCost* bound, bool or_equal) const {
  StrategyCost cost;
  const bool cut_results = std::any_of(outputs_.begin(), outputs_.end(), [&](const Output& output) {
    return strategy.result(output.index).is_shard();
  });
  // Of the data: whether it stays where it is, some of it does, or is cut at all.
  bool any_data = false, some_stay = false, all_stay = true, still_cut = false;
  bool nothing_moves = true;
  bool weight_lost = false, weight_kept = false;
  bool takes_partial = false, takes_sum_of_data = false;
  bool whole_factor = false;
  bool cuts_stay =
      false;  // a tensor stays cut where it is, so that the results are cut as others are
  // A sum that lies in parts already, as which it is used unless another has to be reduced for that.
  bool sum_in_parts = false, reduces_another = false;
  // Of whole inputs each rank makes a part of the results.
  const bool makes_part =
      cut_results && std::none_of(inputs_.begin(), inputs_.end(), [&](const Input& input) {
        return strategy.inputs[input.index].is_shard();
      });
  for (const Input& input : inputs_) {
    const Placement& want = strategy.inputs[input.index];
    const bool stays = want == *input.have;
    const bool sliced = input.have->is_replicate() && want.is_shard();
    // A weight that is gathered for it is no data.
    nothing_moves &=
        stays || (sliced && input.is_index) || (input.is_weight && want.is_replicate());
    takes_partial |= want.is_partial();
    takes_sum_of_data |= want.is_partial() && input.sums_data;
    whole_factor |=
        want.is_replicate() && input.numel > 1 && !input.is_index && !input.info->only_shape;
    cuts_stay |= stays && want.is_shard();
    const bool is_there = input.kept != nullptr && want == *input.kept;
    sum_in_parts |= is_there && input.have->is_partial() && want.is_shard();
    reduces_another |= !is_there && input.have->is_partial() && !want.is_partial();
    if (input.is_data) {
      any_data = true;
      // Indices are little beside what they name: a batch stays cut in what is made of them.
      const bool goes_on = stays || (input.is_index && makes_part);
      some_stay |= goes_on;
      all_stay &= goes_on;
      cuts_stay |= goes_on;
      still_cut |= cut_results && pieces(*input.info, want) > 1;
    } else if (input.is_weight) {
      (stays ? weight_kept : weight_lost) = true;
    }
  }
  if (any_data && !(all_stay && (cut_results || nothing_moves))) {
    cost.data = some_stay || still_cut ? DataMoves::kMoves : DataMoves::kGivenUp;
  }
  // A weight that is cut is moved where no data has to stay cut.
  cost.gives_up_weight = !any_data && weight_lost && !weight_kept;
  double limit = std::numeric_limits<double>::infinity();
  if (bound != nullptr) {
    if (cost.data > bound->data) return std::nullopt;
    if (cost.data == bound->data) {
      if (cost.gives_up_weight && !bound->gives_up_weight) return std::nullopt;
      if (cost.gives_up_weight == bound->gives_up_weight) limit = bound->seconds();
    }
  }
  // Nothing is less than 0: it gets only more.
  const auto is_too_much = [&](double seconds) {
    return or_equal ? seconds > limit : seconds >= limit;
  };
  for (const Input& input : inputs_) {
    const Placement& want = strategy.inputs[input.index];
    if (want == *input.have) continue;
    cost.move += is_brought_before(input, strategy) ? kLocalCopy : move(input, want);
    if (is_too_much(cost.move)) return std::nullopt;
  }
  if (written_input_.has_value()) cost.move += write_back(strategy);
  cost.move += bring(strategy);
  if (is_too_much(cost.move)) return std::nullopt;
  cost.compute = compute(strategy);
  if (is_too_much(cost.seconds())) return std::nullopt;
  // What is written back owes nothing more than it did.
  if (!written_input_.has_value()) {
    const bool is_product = takes_partial && whole_factor && !takes_sum_of_data;
    cost.owed = owed(strategy,
                     is_product      ? kSpread
                     : takes_partial ? kLater
                                     : kFreshSum,
                     cuts_stay || (sum_in_parts && !reduces_another) ? 0
                     : any_data                                      ? kMovedCut
                                                                     : kOwnCut,
                     takes_sum_of_data && !whole_factor);
    if (is_too_much(cost.seconds())) return std::nullopt;
  }
  return cost;
}

StrategyCost StrategyWeigher::cost(const Strategy& strategy) const {
  return *weigh(strategy, nullptr, false);
}

std::optional<StrategyCost> StrategyWeigher::cost_below(const StrategyCost& bound, bool or_equal,
                                                        const Strategy& strategy) const {
  return weigh(strategy, &bound, or_equal);
}

bool StrategyWeigher::moves_nothing(const Strategy& strategy) const {
  return std::all_of(inputs_.begin(), inputs_.end(), [&](const Input& input) {
    return strategy.inputs[input.index] == *input.have;
  });
}

}  // namespace shardweave::dtensor_internal
