#include "shardweave/dtensor/testing/rule_validator.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <random>
#include <utility>

#include "ATen/core/LegacyTypeDispatch.h"
#include "ATen/ops/allclose.h"
#include "ATen/ops/cat.h"
#include "ATen/ops/equal.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "shardweave/comm/counting/counting.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/propagate.h"
#include "shardweave/dtensor/testing/pieces.h"

namespace shardweave::testing {
namespace {

using namespace dtensor_internal;

// Placements of one call along a mesh dimension: of the flat inputs, then of the flat outputs.
struct Combination {
  std::vector<Placement> inputs;
  std::vector<Placement> outputs;
  friend bool operator==(const Combination&, const Combination&) = default;
};

std::string first_line(const std::exception& error) {
  const std::string what = error.what();
  return what.substr(0, what.find('\n'));
}

// --- the ranks -----------------------------------------------------------------------------------

// Every rank's view of a mesh (n), in one thread.
class Ranks {
 public:
  explicit Ranks(int count) {
    auto log = std::make_shared<CountingLog>();
    const DeviceMesh mesh = value_or_throw(DeviceMesh::create({{"x", count}}));
    for (int r = 0; r < count; ++r) {
      auto comm = value_or_throw(count_communication(r, count, log));
      meshes_.push_back(value_or_throw(ConnectedMesh::create(mesh, std::move(comm))));
      contexts_.push_back(MeshContext::of(meshes_.back()));
    }
  }
  int count() const { return static_cast<int>(contexts_.size()); }
  MeshContext& context(int rank) const { return *contexts_[rank]; }

  // Null if the placement does not fit.
  SpecRef spec(int rank, const at::Tensor& whole, const Placement& placement) const {
    try {
      const auto sizes = whole.sizes();
      const auto strides = whole.strides();
      return contexts_[rank]->intern(Layout({placement}), {sizes.data(), sizes.size()},
                                     {strides.data(), strides.size()}, whole.scalar_type(),
                                     whole.device());
    } catch (const Error&) {
      return {};
    }
  }

 private:
  std::vector<std::shared_ptr<ConnectedMesh>> meshes_;
  std::vector<std::shared_ptr<MeshContext>> contexts_;
};

// What rank `rank` holds of `whole`, where `placement` is a shard.
at::Tensor shard_of(const at::Tensor& whole, const Placement& placement, int rank, int count) {
  const int dim = placement.dim();
  Tensors pieces;
  for (const Interval& held : cut(placement, whole.size(dim), count, rank)) {
    pieces.push_back(whole.narrow(dim, held.begin, held.size()));
  }
  if (pieces.empty()) return whole.narrow(dim, 0, 0).clone();
  if (whole.is_contiguous() || whole.dim() < 2) return at::cat(pieces, dim).contiguous();
  // As Input::transposed() leaves it.
  return at::cat(pieces, dim).transpose(0, 1).contiguous().transpose(0, 1);
}

// --- one sample on one mesh ----------------------------------------------------------------------

class Trial {
 public:
  Trial(const Sample& sample, const SampleCall& call, const ShardedRule& rule, const Ranks& ranks,
        uint64_t seed, c10::Device device)
      : sample_(sample), call_(call), rule_(rule), ranks_(ranks), seed_(seed) {
    for (size_t i = 0; i < call.inputs().size(); ++i) {
      inputs_.push_back(call.inputs()[i].make(seed * 16 + i + 1).to(device));
    }
    outputs_ = call.run(inputs_);
  }

  const Tensors& outputs() const { return outputs_; }
  int num_flat() const { return static_cast<int>(call_.flat().size()); }
  bool defined(int flat) const { return call_.flat()[flat].input >= 0; }
  const Input& input(int flat) const { return call_.inputs()[call_.flat()[flat].input]; }

  // What the rule offers when the inputs lie like this; throws if it is nonsense.
  std::vector<Strategy> offered(const std::vector<Placement>& current, int rank = 0) const {
    const c10::Stack args = call_.stack(inputs_);
    OpCall op_call;
    op_call.op = &call_.op();
    op_call.args = args;
    for (int f = 0; f < num_flat(); ++f) {
      TensorInfo info;
      if (defined(f)) {
        info = info_of(whole(f));
        info.spec = ranks_.spec(rank, whole(f), current[f]);
      }
      op_call.inputs.push_back(std::move(info));
      op_call.input_arg.push_back(call_.flat()[f].arg);
    }
    for (const at::Tensor& output : outputs_) {
      op_call.outputs.push_back(output.defined() ? info_of(output) : TensorInfo());
    }
    constexpr int kOrder[] = {0};
    op_call.order = kOrder;
    op_call.num_ranks = ranks_.count();
    return strategies_of(op_call, rule_);
  }

  // Every rank's results, or why there are none. `outputs` matters where the rule has arguments of
  // local size or a kernel.
  struct Results {
    std::vector<Tensors> by_rank;
    std::string error;
  };
  Results run(const Combination& c, LocalKernel kernel) {
    Results results;
    for (int r = 0; r < ranks_.count(); ++r) {
      try {
        results.by_rank.push_back(run_rank(c, kernel, r));
      } catch (const std::exception& error) {
        results.error = absl::StrCat("rank ", r, " raises: ", first_line(error));
        return results;
      }
    }
    return results;
  }

  // "" if the ranks' results for output k together are the whole answer.
  std::string difference(const Results& results, size_t k, const Placement& p) const {
    if (!results.error.empty()) return results.error;
    const at::Tensor& want = outputs_[k];
    Tensors got;
    for (const Tensors& rank : results.by_rank) {
      if (rank.size() != outputs_.size()) return "another number of results";
      got.push_back(rank[k]);
    }
    for (int r = 0; r < ranks_.count(); ++r) {
      if (got[r].defined() != want.defined()) return "undefined on one side";
      if (!want.defined()) continue;
      const at::Tensor part = p.is_shard() ? shard_of(want, p, r, ranks_.count()) : want;
      if (got[r].sizes() != part.sizes() || got[r].scalar_type() != part.scalar_type()) {
        return absl::StrCat("rank ", r, " has ", c10::toString(got[r].scalar_type()), " [",
                            absl::StrJoin(got[r].sizes(), ", "), "] instead of ",
                            c10::toString(part.scalar_type()), " [",
                            absl::StrJoin(part.sizes(), ", "), "]");
      }
      if (p.is_partial() || !compares_values(k)) continue;
      if (!close(got[r], part, sample_.tolerance)) return absl::StrCat("other values on rank ", r);
    }
    if (!p.is_partial() || !want.defined() || !compares_values(k)) return "";
    const at::Tensor reduced = reduce(got, p.reduce_op());
    return close(reduced, want, sample_.tolerance) ? "" : "other values after the reduction";
  }

  bool compares_values(size_t k) const { return has_values(sample_, k, outputs_[k]); }

  // Complex numbers have no minimum.
  bool can_be(const std::vector<Placement>& inputs) const {
    for (int f = 0; f < num_flat(); ++f) {
      const Placement& p = inputs[f];
      if (!defined(f) || !c10::isComplexType(whole(f).scalar_type())) continue;
      if (p.is_partial(ReduceOp::kMin) || p.is_partial(ReduceOp::kMax)) return false;
    }
    return true;
  }

  bool needs_outputs() const {
    return !rule_.options().size_arg.empty() || rule_.options().kernel != nullptr;
  }

 private:
  const at::Tensor& whole(int flat) const { return inputs_[call_.flat()[flat].input]; }

  static TensorInfo info_of(const at::Tensor& tensor) {
    TensorInfo info;
    info.defined = true;
    info.dtype = tensor.scalar_type();
    info.sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
    info.strides.assign(tensor.strides().begin(), tensor.strides().end());
    return info;
  }

  const Tensors& pieces(int flat, const Placement& p) {
    Tensors& pieces = pieces_[{flat, p}];
    if (!pieces.empty()) return pieces;
    if (p.is_partial()) {
      return pieces = summands(whole(flat), p.reduce_op(), ranks_.count(),
                               seed_ * 1000 + static_cast<uint64_t>(flat));
    }
    for (int r = 0; r < ranks_.count(); ++r) {
      pieces.push_back(p.is_shard() ? shard_of(whole(flat), p, r, ranks_.count()) : whole(flat));
    }
    return pieces;
  }

  Tensors run_rank(const Combination& c, LocalKernel kernel, int rank) {
    Tensors local(inputs_.size());
    std::vector<SpecRef> input_specs, output_specs;
    const bool writes = call_.op().schema().is_mutable();
    for (int f = 0; f < num_flat(); ++f) {
      input_specs.emplace_back();
      if (!defined(f)) continue;
      const at::Tensor& piece = pieces(f, c.inputs[f])[rank];
      local[call_.flat()[f].input] = writes ? piece.clone() : piece;
      input_specs.back() = ranks_.spec(rank, whole(f), c.inputs[f]);
    }
    for (size_t k = 0; k < outputs_.size(); ++k) {
      output_specs.emplace_back();
      if (k >= c.outputs.size() || !outputs_[k].defined()) continue;
      output_specs.back() = ranks_.spec(rank, outputs_[k], c.outputs[k]);
      if (output_specs.back() == nullptr) throw Error(absl::InternalError("no such output"));
    }
    c10::Stack stack = call_.stack(local);
    const auto& arguments = call_.op().schema().arguments();
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (arguments[i].name() != rule_.options().size_arg || stack[i].isNone()) continue;
      const Dims& sizes = output_specs[0]->local_sizes;
      stack[i] = c10::IValue(std::vector<int64_t>(sizes.begin(), sizes.end()));
    }
    const at::AutoDispatchBelowADInplaceOrView guard;
    if (kernel == nullptr) kernel = rule_.options().kernel;
    if (kernel != nullptr) {
      kernel(call_.op(), stack, {input_specs, output_specs});
    } else {
      call_.op().callBoxed(stack);
    }
    return flat_tensors(stack);
  }

  const Sample& sample_;
  const SampleCall& call_;
  const ShardedRule& rule_;
  const Ranks& ranks_;
  const uint64_t seed_;
  Tensors inputs_, outputs_;
  absl::flat_hash_map<std::pair<int, Placement>, Tensors> pieces_;
};

std::string describe(const Trial& trial, const Tensors& outputs, const Combination& c) {
  std::vector<std::string> inputs, results;
  for (int f = 0; f < trial.num_flat(); ++f) {
    if (!trial.defined(f)) continue;
    inputs.push_back(absl::StrCat("[", absl::StrJoin(trial.input(f).sizes(), ", "), "] ",
                                  c.inputs[f].to_string()));
  }
  for (size_t k = 0; k < c.outputs.size(); ++k) {
    if (outputs[k].defined()) results.push_back(c.outputs[k].to_string());
  }
  return absl::StrCat(absl::StrJoin(inputs, ", "), " -> ", absl::StrJoin(results, ", "));
}

// --- which combinations --------------------------------------------------------------------------

// How an input may lie: R, every Shard and Partial.
std::vector<Placement> placements_to_try(const Trial& trial, int flat) {
  if (!trial.defined(flat)) return {Replicate()};
  const Input& input = trial.input(flat);
  std::vector<Placement> placements = {Replicate()};
  for (size_t d = 0; d < input.sizes().size(); ++d) {
    placements.push_back(Shard(static_cast<int>(d)));
  }
  if (!input.is_float()) return placements;
  placements.push_back(Partial(ReduceOp::kSum));
  placements.push_back(Partial(ReduceOp::kAvg));
  if (input.is_real()) {
    placements.push_back(Partial(ReduceOp::kMin));
    placements.push_back(Partial(ReduceOp::kMax));
  }
  return placements;
}

std::vector<std::vector<Placement>> product(const std::vector<std::vector<Placement>>& choices,
                                            int at_most, uint64_t seed) {
  double all = 1;
  for (const auto& choice : choices) all *= static_cast<double>(choice.size());
  std::vector<std::vector<Placement>> result;
  if (all > at_most) {
    std::mt19937_64 random(seed);
    for (int n = 0; n < at_most; ++n) {
      auto& combination = result.emplace_back();
      for (const auto& choice : choices) combination.push_back(choice[random() % choice.size()]);
    }
    return result;
  }
  result.emplace_back();
  for (const auto& choice : choices) {
    std::vector<std::vector<Placement>> longer;
    for (const auto& combination : result) {
      for (const Placement& p : choice) {
        longer.push_back(combination);
        longer.back().push_back(p);
      }
    }
    result = std::move(longer);
  }
  return result;
}

// What inputs may lie like before an operator: all combinations or a sample, and each strided and
// ragged shard.
std::vector<std::vector<Placement>> current_placements(const Trial& trial, int ranks,
                                                       const ValidationOptions& options) {
  std::vector<std::vector<Placement>> choices;
  for (int f = 0; f < trial.num_flat(); ++f) choices.push_back(placements_to_try(trial, f));
  auto result = product(choices, options.max_combinations, options.seed);
  const std::vector<Placement> replicated(trial.num_flat());
  for (int f = 0; f < trial.num_flat(); ++f) {
    if (!trial.defined(f)) continue;
    const auto& sizes = trial.input(f).sizes();
    for (size_t d = 0; d < sizes.size(); ++d) {
      std::vector<int64_t> ragged(ranks, 0);
      ragged.back() = sizes[d] - std::min<int64_t>(sizes[d], 2);
      ragged.front() += std::min<int64_t>(sizes[d], 2);
      for (const Placement& p :
           {StridedShard(static_cast<int>(d), 2), RaggedShard(static_cast<int>(d), ragged)}) {
        result.push_back(replicated);
        result.back()[f] = p;
      }
    }
  }
  return result;
}

// --- wrong ---------------------------------------------------------------------------------------

bool same(const Strategy& a, const Strategy& b) {
  return a.inputs == b.inputs && a.outputs == b.outputs && a.kernel == b.kernel;
}

// Tries every strategy that the rule offers for any placement of the inputs; those are returned.
std::vector<Strategy> try_offered(const Sample& sample, Trial& trial, const Ranks& ranks,
                                  const std::vector<std::vector<Placement>>& currents,
                                  Validation& result) {
  std::vector<Strategy> tried;
  absl::flat_hash_map<std::string, bool> reported;
  auto wrong = [&](const std::string& text) {
    if (reported.emplace(text, true).second) {
      result.wrong.push_back(absl::StrCat(sample.op, " on ", ranks.count(), " ranks: ", text));
    }
  };
  for (const std::vector<Placement>& current : currents) {
    try {
      const std::vector<Strategy> offered = trial.offered(current);
      if (&current == &currents.front()) {
        const std::vector<Strategy> elsewhere = trial.offered(current, ranks.count() - 1);
        if (!std::equal(offered.begin(), offered.end(), elsewhere.begin(), elsewhere.end(), same)) {
          wrong("the rule offers different strategies on different ranks");
        }
      }
      for (const Strategy& s : offered) {
        if (std::any_of(tried.begin(), tried.end(), [&](const auto& t) { return same(s, t); })) {
          continue;
        }
        tried.push_back(s);
        if (!trial.can_be(s.inputs)) continue;
        ++result.combinations;
        const Combination c{s.inputs, s.outputs};
        const Trial::Results results = trial.run(c, s.kernel);
        for (size_t k = 0; k < trial.outputs().size(); ++k) {
          const std::string difference = trial.difference(results, k, s.outputs[k]);
          if (difference.empty()) continue;
          wrong(
              absl::StrCat(describe(trial, trial.outputs(), c), ": output ", k, ": ", difference));
          break;
        }
      }
    } catch (const std::exception& error) {
      wrong(first_line(error));
      return tried;
    }
  }
  return tried;
}

// --- missing -------------------------------------------------------------------------------------

// Whether `from` becomes `to` by cutting what is there. (What is equal everywhere is its own mean,
// minimum and maximum, too: the engine makes that of it where another input is one.)
bool is_cut(const Placement& from, const Placement& to) {
  return from == to || (from.is_replicate() && to.is_shard());
}

bool follows(const Combination& c, const std::vector<Strategy>& offered) {
  const auto becomes = [&](const Placement& from, const Placement& to) {
    const bool as_it_is = to.is_partial(ReduceOp::kAvg) || to.is_partial(ReduceOp::kMin) ||
                          to.is_partial(ReduceOp::kMax);
    return is_cut(from, to) || (from.is_replicate() && as_it_is &&
                                std::find(c.inputs.begin(), c.inputs.end(), to) != c.inputs.end());
  };
  return std::any_of(offered.begin(), offered.end(), [&](const Strategy& s) {
    for (size_t f = 0; f < c.inputs.size(); ++f) {
      if (!becomes(c.inputs[f], s.inputs[f])) return false;
    }
    for (size_t k = 0; k < c.outputs.size(); ++k) {
      if (!is_cut(s.outputs[k], c.outputs[k])) return false;
    }
    return true;
  });
}

// Results that say nothing: those of which any part, or any mean, is the same.
bool is_constant(const at::Tensor& t) {
  if (!t.defined()) return false;
  if (t.numel() < 2) return t.numel() == 0 || !c10::isFloatingType(t.scalar_type());
  return at::equal(t, t.flatten()[0].expand_as(t));
}

// The placements of output k that the results fit: Replicate, else all that do.
std::vector<Placement> fitting(const Trial& trial, const Trial::Results& results, size_t k) {
  const at::Tensor& whole = trial.outputs()[k];
  if (!whole.defined() || trial.difference(results, k, Replicate()).empty()) return {Replicate()};
  std::vector<Placement> candidates;
  for (int d = 0; d < whole.dim(); ++d) candidates.push_back(Shard(d));
  if (whole.scalar_type() != at::kBool) candidates.push_back(Partial(ReduceOp::kSum));
  if (c10::isFloatingType(whole.scalar_type())) candidates.push_back(Partial(ReduceOp::kAvg));
  if (!c10::isComplexType(whole.scalar_type())) {
    candidates.push_back(Partial(ReduceOp::kMin));
    candidates.push_back(Partial(ReduceOp::kMax));
  }
  std::vector<Placement> fit;
  for (const Placement& p : candidates) {
    if (trial.difference(results, k, p).empty()) fit.push_back(p);
  }
  return fit;
}

bool says_nothing(const std::vector<Placement>& inputs) {
  return std::all_of(inputs.begin(), inputs.end(),
                     [](const Placement& p) { return p.is_replicate(); });
}

// Combinations that the operator alone (or the rule's kernel for all strategies) gets right.
std::vector<Combination> find_right(Trial& trial, const std::vector<Strategy>& offered,
                                    const std::vector<std::vector<Placement>>& currents,
                                    Validation& result) {
  std::vector<Combination> right;
  for (const std::vector<Placement>& inputs : currents) {
    if (says_nothing(inputs)) continue;
    bool plain = true;
    for (const Placement& p : inputs) plain &= !p.is_shard() || p.is_plain_shard();
    if (!plain) continue;
    std::vector<Combination> candidates;
    if (!trial.needs_outputs()) {
      ++result.combinations;
      const Trial::Results results = trial.run({inputs, {}}, nullptr);
      if (!results.error.empty()) continue;
      std::vector<std::vector<Placement>> fit;
      for (size_t k = 0; k < trial.outputs().size(); ++k) fit.push_back(fitting(trial, results, k));
      for (std::vector<Placement>& outputs : product(fit, 64, 1)) {
        candidates.push_back({inputs, std::move(outputs)});
      }
    } else if (trial.outputs().size() == 1) {
      // The operator has to know what is wanted.
      std::vector<Placement> wanted = {Replicate(), Partial()};
      for (int d = 0; d < trial.outputs()[0].dim(); ++d) wanted.push_back(Shard(d));
      for (const Placement& p : wanted) {
        ++result.combinations;
        Combination c{inputs, {p}};
        if (trial.difference(trial.run(c, nullptr), 0, p).empty()) candidates.push_back(c);
      }
    }
    for (Combination& c : candidates) {
      if (!follows(c, offered)) right.push_back(std::move(c));
    }
  }
  return right;
}

// Those that do not follow from one another.
std::vector<Combination> strongest(const std::vector<Combination>& all) {
  std::vector<Combination> result;
  for (const Combination& c : all) {
    std::vector<Strategy> others;
    for (const Combination& o : all) {
      if (o != c) others.push_back({o.inputs, o.outputs});
    }
    if (!follows(c, others)) result.push_back(c);
  }
  return result;
}

// Not all forms that LibTorch has work: a comparison of floating point numbers in place does not
// (the result is a bool), and binary_cross_entropy with out= and a reduction gives something else.
bool works_on_one_device(const SampleCall& call, const c10::OperatorHandle& form,
                         const Sample& sample) {
  Tensors whole;
  for (size_t i = 0; i < call.inputs().size(); ++i) whole.push_back(call.inputs()[i].make(i + 1));
  try {
    const Tensors got = call.run_as(form, whole);
    const Tensors want = call.run(whole);
    if (got.size() != want.size()) return false;
    for (size_t k = 0; k < got.size(); ++k) {
      if (!got[k].defined() || !want[k].defined()) return false;
      const bool same = got[k].sizes() == want[k].sizes() &&
                        (!sample.values || at::allclose(got[k], want[k].to(got[k].scalar_type()),
                                                        1e-5, 1e-5, /*equal_nan=*/true));
      if (!same) return false;
    }
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace

void Validation::merge(Validation other) {
  operators.merge(other.operators);
  reached.merge(other.reached);
  combinations += other.combinations;
  second_gradients += other.second_gradients;
  for (std::string& text : other.no_second_derivative) {
    no_second_derivative.push_back(std::move(text));
  }
  for (std::string& text : other.wrong) wrong.push_back(std::move(text));
  for (std::string& text : other.missing) missing.push_back(std::move(text));
}

Validation validate_strategies(const Sample& sample, const Rule& rule,
                               const ValidationOptions& options) {
  Validation result;
  const SampleCall call(sample);
  result.operators.insert(c10::toString(call.op().operator_name()));
  if (rule.sharded() == nullptr) return result;
  std::optional<std::vector<Combination>> missing;
  std::vector<std::string> texts;
  for (const int count : {2, 3, 4}) {
    const Ranks ranks(count);
    Trial trial(sample, call, *rule.sharded(), ranks,
                options.seed * 100 + static_cast<uint64_t>(count), options.device);
    const auto currents = current_placements(trial, count, options);
    const std::vector<Strategy> offered = try_offered(sample, trial, ranks, currents, result);
    const bool constant = std::any_of(trial.outputs().begin(), trial.outputs().end(), is_constant);
    if (!options.find_missing || !sample.values || constant || count == 4) continue;
    std::vector<Combination> right = find_right(trial, offered, currents, result);
    if (missing.has_value()) {
      std::erase_if(*missing, [&](const Combination& c) {
        return std::find(right.begin(), right.end(), c) == right.end();
      });
      missing = strongest(*missing);
      for (const Combination& c : *missing) {
        result.missing.push_back(
            absl::StrCat(sample.op, ": ", describe(trial, trial.outputs(), c)));
      }
    } else {
      missing = std::move(right);
    }
  }
  return result;
}

Validation validate_end_to_end(const Sample& sample,
                               const std::vector<std::vector<MeshDim>>& meshes,
                               const CheckOptions& options) {
  Validation result;
  const SampleCall call(sample);
  auto check = [&](const c10::OperatorHandle& form, std::function<Tensors(const Tensors&)> run,
                   bool gradients) {
    OpCase op{c10::toString(form.operator_name()), call.inputs(), std::move(run)};
    op.gradients = gradients && sample.values;
    op.tolerance = sample.tolerance;
    op.strides = sample.strides;
    op.values = sample.values;
    // An operator without a derivative has none on one device either.
    if (op.gradients && !differentiable(op)) op.gradients = false;
    result.operators.insert(op.name);
    std::string why;
    for (const std::vector<MeshDim>& mesh : meshes) {
      CheckResult found = check_on_mesh(op, mesh, options);
      result.combinations += found.combinations;
      result.second_gradients += found.second_gradients;
      why = std::move(found.no_second_derivative);
      result.reached.merge(found.reached);
      for (std::string& text : found.differences) result.wrong.push_back(std::move(text));
    }
    if (!why.empty()) {
      result.no_second_derivative.push_back(
          absl::StrCat(op.name, ": ", why.substr(0, why.find('\n'))));
    }
  };
  check(call.op(), [&](const Tensors& x) { return call.run(x); }, true);
  for (const c10::OperatorHandle& form : call.other_forms()) {
    auto run = [&call, form](const Tensors& x) { return call.run_as(form, x); };
    if (works_on_one_device(call, form, sample)) check(form, run, false);
  }
  return result;
}

}  // namespace shardweave::testing
