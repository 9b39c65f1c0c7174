// validate_decisions() of rule_validator.h.
#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <utility>

#include "ATen/core/LegacyTypeDispatch.h"
#include "ATen/ops/cat.h"
#include "ATen/ops/empty.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "shardweave/comm/counting/counting.h"
#include "shardweave/dtensor/engine/decide.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "shardweave/dtensor/testing/pieces.h"
#include "shardweave/dtensor/testing/rule_validator.h"

namespace shardweave::testing {
namespace {

using namespace dtensor_internal;

std::string first_line(const std::exception& error) {
  const std::string what = error.what();
  return what.substr(0, what.find('\n'));
}

Dims dims(at::IntArrayRef sizes) {
  return Dims(sizes.begin(), sizes.end());
}

// Every rank's view of one mesh, in one thread.
class Ranks {
 public:
  explicit Ranks(const std::vector<MeshDim>& mesh_dims)
      : mesh_(value_or_throw(DeviceMesh::create(mesh_dims))) {
    auto log = std::make_shared<CountingLog>();
    for (int r = 0; r < count(); ++r) {
      auto comm = value_or_throw(count_communication(r, count(), log));
      contexts_.push_back(
          MeshContext::of(value_or_throw(ConnectedMesh::create(mesh_, std::move(comm)))));
    }
  }

  const DeviceMesh& mesh() const { return mesh_; }
  int count() const { return static_cast<int>(mesh_.size()); }
  const std::shared_ptr<MeshContext>& context(int rank) const { return contexts_[rank]; }
  SpecRef spec(int rank, const at::Tensor& whole, const Layout& layout) const {
    return contexts_[rank]->intern(layout, dims(whole.sizes()), dims(whole.strides()),
                                   whole.scalar_type(), whole.device());
  }

 private:
  const DeviceMesh mesh_;
  std::vector<std::shared_ptr<MeshContext>> contexts_;
};

// What a rank holds of `whole`; the summands of a Partial are random, and add up over the ranks.
at::Tensor part_of(const at::Tensor& whole, const Spec& spec, uint64_t seed) {
  const MeshContext& context = *spec.context;
  at::Tensor part = whole;
  for (int m = 0; m < spec.layout.mesh_ndim(); ++m) {
    if (!spec.layout[m].is_partial()) continue;
    const int64_t index = context.coordinate()[m];
    part = summands(part, spec.layout[m].reduce_op(), static_cast<int>(context.mesh().size(m)),
                    seed)[index];
    seed = seed * 31 + static_cast<uint64_t>(index) + 1;  // as on the other ranks of that part
  }
  for (int d = 0; d < spec.ndim(); ++d) {
    if (spec.layout.shards_of(d).empty()) continue;
    Tensors pieces;
    for (const Interval& held : local_intervals(spec.layout, context.mesh().shape(),
                                                context.coordinate(), spec.sizes, d)) {
      pieces.push_back(part.narrow(d, held.begin, held.size()));
    }
    part = pieces.empty() ? part.narrow(d, 0, 0) : at::cat(pieces, d);
  }
  if (whole.is_contiguous() || whole.dim() < 2) return part.contiguous();
  // As Input::transposed() leaves it.
  return part.transpose(0, 1).contiguous().transpose(0, 1);
}

// The reduction of what the ranks hold that differ from `rank` on Partial mesh dimensions only.
at::Tensor reduced(const Tensors& by_rank, const Layout& layout, const DeviceMesh& mesh, int rank,
                   int mesh_dim = 0) {
  if (mesh_dim == mesh.ndim()) return by_rank[rank];
  const Placement& p = layout[mesh_dim];
  if (!p.is_partial()) return reduced(by_rank, layout, mesh, rank, mesh_dim + 1);
  int stride = 1;
  for (int m = mesh_dim + 1; m < mesh.ndim(); ++m) stride *= static_cast<int>(mesh.size(m));
  const int size = static_cast<int>(mesh.size(mesh_dim));
  const int first = rank - rank / stride % size * stride;
  Tensors pieces;
  for (int i = 0; i < size; ++i) {
    pieces.push_back(reduced(by_rank, layout, mesh, first + i * stride, mesh_dim + 1));
  }
  return reduce(pieces, p.reduce_op());
}

// --- layouts -------------------------------------------------------------------------------------

std::vector<int64_t> random_sizes(int64_t size, int64_t ranks, std::mt19937_64& random) {
  std::vector<int64_t> sizes(ranks, 0);
  for (int64_t i = 0; i < size; ++i) ++sizes[random() % static_cast<uint64_t>(ranks)];
  return sizes;
}

// Any: often one tensor dimension is cut by several mesh dimensions. `unusual`: in any order, into
// strided and ragged shards, of summands.
Layout random_layout(const Input& input, const DeviceMesh& mesh, bool unusual,
                     std::mt19937_64& random) {
  const auto below = [&random](int64_t n) {
    return static_cast<int>(random() % static_cast<uint64_t>(n));
  };
  const int ndim = static_cast<int>(input.sizes().size());
  std::vector<ReduceOp> ops;
  if (input.is_float() && unusual) ops = {ReduceOp::kSum, ReduceOp::kSum, ReduceOp::kAvg};
  if (input.is_real() && unusual) ops.insert(ops.end(), {ReduceOp::kMin, ReduceOp::kMax});
  const ReduceOp op = ops.empty() ? ReduceOp::kSum : ops[below(static_cast<int64_t>(ops.size()))];
  std::vector<int> order(mesh.ndim());
  std::iota(order.begin(), order.end(), 0);
  if (unusual) std::shuffle(order.begin(), order.end(), random);
  while (true) {
    Placements placements(mesh.ndim());
    std::vector<int64_t> left = input.sizes();
    for (int m : order) {
      const int kind = below(unusual ? 10 : 6);
      if (kind < 3) continue;
      if (kind == 9 && !ops.empty()) {
        placements[m] = Partial(op);
        continue;
      }
      if (ndim == 0) continue;
      const int dim = below(ndim);
      placements[m] = kind == 7   ? StridedShard(dim, 2)
                      : kind == 8 ? RaggedShard(dim, random_sizes(left[dim], mesh.size(m), random))
                                  : Shard(dim);
      left[dim] = cut_size(placements[m], left[dim], mesh.size(m), 0);
    }
    Layout layout = value_or_throw(Layout::create(std::move(placements), order));
    if (validate(layout, mesh.shape(), input.sizes()).ok()) return layout;
  }
}

// --- one sample on one mesh ----------------------------------------------------------------------

class Trial {
 public:
  Trial(const Sample& sample, const SampleCall& call, const OpInfo& info, const Ranks& ranks,
        const ValidationOptions& options)
      : sample_(sample), call_(call), info_(info), ranks_(ranks), seed_(options.seed * 100 + 7) {
    for (size_t i = 0; i < call.inputs().size(); ++i) {
      inputs_.push_back(call.inputs()[i].make(seed_ * 16 + i + 1).to(options.device));
    }
    outputs_ = call.run(inputs_);
  }

  // "", or what is wrong with what is decided for inputs that lie like this.
  std::string check(const std::vector<Layout>& layouts) {
    std::vector<std::unique_ptr<CacheEntry>> entries;
    std::string decision;
    for (int r = 0; r < ranks_.count(); ++r) {
      try {
        entries.push_back(decided(layouts, r));
      } catch (const std::exception& error) {
        return absl::StrCat("rank ", r, " raises: ", first_line(error));
      }
      // Made of other operators, or by whole inputs: nothing here to try.
      if (entries.back() == nullptr || entries.back()->gathered) return "";
      const std::string own = describe(*entries.back());
      if (r == 0) decision = own;
      if (own != decision) return absl::StrCat(decision, " at rank 0, ", own, " at rank ", r);
      // The answer is known.
      if (r + 1 == ranks_.count() && !tried_.insert(decision).second) return "";
    }
    const std::string difference = run(entries);
    return difference.empty() ? "" : absl::StrCat(decision, ": ", difference);
  }

 private:
  // Null: another operator's rules decide.
  std::unique_ptr<CacheEntry> decided(const std::vector<Layout>& layouts, int rank) const {
    Tensors dtensors;
    for (size_t i = 0; i < inputs_.size(); ++i) {
      SpecRef spec = ranks_.spec(rank, inputs_[i], layouts[i]);
      at::Tensor local = at::empty(array(spec->local_sizes), inputs_[i].options());
      dtensors.push_back(wrap(std::move(local), std::move(spec), ranks_.context(rank)));
    }
    const c10::Stack args = call_.stack(dtensors);
    if (info_.rule->composed({call_.op(), args}) != nullptr) return nullptr;
    return decide(call_.op(), info_, *ranks_.context(rank), args);
  }

  static std::string describe(const CacheEntry& entry) {
    const auto add = [](std::string* out, const SpecRef& spec) {
      absl::StrAppend(out, spec == nullptr ? "none" : spec->layout.to_string());
    };
    return absl::StrCat(absl::StrJoin(entry.inputs, ", ", add), " -> ",
                        absl::StrJoin(entry.outputs, ", ", add),
                        entry.kernel == nullptr ? "" : " by a kernel of the rule");
  }

  Tensors run_rank(const CacheEntry& entry) const {
    Tensors local(inputs_.size());
    const bool writes = call_.op().schema().is_mutable();
    for (size_t f = 0; f < call_.flat().size(); ++f) {
      const int i = call_.flat()[f].input;
      if (i < 0) continue;
      local[i] = part_of(inputs_[i], *entry.inputs[f], seed_ * 1000 + f);
      if (writes) local[i] = local[i].clone();
    }
    c10::Stack stack = call_.stack(local);
    for (const ArgChange& change : entry.arg_changes) stack[change.arg] = change.value;
    if (entry.kernel != nullptr) {
      entry.kernel(call_.op(), stack, {entry.inputs, entry.outputs});
    } else {
      call_.op().callBoxed(stack);
    }
    return flat_tensors(stack);
  }

  std::string run(const std::vector<std::unique_ptr<CacheEntry>>& entries) const {
    std::vector<Tensors> results;  // by rank
    for (int r = 0; r < ranks_.count(); ++r) {
      try {
        results.push_back(run_rank(*entries[r]));
      } catch (const std::exception& error) {
        return absl::StrCat("rank ", r, " raises: ", first_line(error));
      }
      if (results.back().size() != outputs_.size()) return "another number of results";
    }
    for (size_t k = 0; k < outputs_.size(); ++k) {
      Tensors by_rank;
      for (const Tensors& of_rank : results) by_rank.push_back(of_rank[k]);
      for (int r = 0; r < ranks_.count(); ++r) {
        const SpecRef& spec = entries[r]->outputs[k];
        const std::string difference = compare(by_rank, spec, outputs_[k], r, k);
        if (!difference.empty()) return absl::StrCat("output ", k, ": ", difference);
      }
    }
    return "";
  }

  std::string compare(const Tensors& by_rank, const SpecRef& spec, const at::Tensor& want, int rank,
                      size_t output) const {
    const at::Tensor& got = by_rank[rank];
    if (got.defined() != want.defined() || (spec != nullptr) != want.defined()) {
      return "undefined on one side";
    }
    if (!want.defined()) return "";
    if (dims(want.sizes()) != spec->sizes || want.scalar_type() != spec->dtype) {
      return absl::StrCat("the rule promises ", spec->to_string());
    }
    if (got.sizes() != array(spec->local_sizes) || got.scalar_type() != spec->dtype) {
      return absl::StrCat("rank ", rank, " has ", c10::toString(got.scalar_type()), " [",
                          absl::StrJoin(got.sizes(), ", "), "] instead of ",
                          c10::toString(spec->dtype), " [", absl::StrJoin(spec->local_sizes, ", "),
                          "]");
    }
    if (!has_values(sample_, output, want)) return "";
    Placements cuts = spec->layout.placements();
    for (Placement& p : cuts) {
      if (p.is_partial()) p = Replicate();
    }
    const Layout layout = value_or_throw(Layout::create(std::move(cuts), spec->layout.order()));
    const at::Tensor part = part_of(want, *ranks_.spec(rank, want, layout), 0);
    const bool same =
        close(reduced(by_rank, spec->layout, ranks_.mesh(), rank), part, sample_.tolerance);
    return same ? "" : absl::StrCat("other values at rank ", rank);
  }

  const Sample& sample_;
  const SampleCall& call_;
  const OpInfo& info_;
  const Ranks& ranks_;
  const uint64_t seed_;
  Tensors inputs_, outputs_;
  std::set<std::string> tried_;  // decisions
};

}  // namespace

Validation validate_decisions(const Sample& sample, const Rule& rule,
                              const ValidationOptions& options) {
  static const auto* const meshes = new std::vector<Ranks>([] {
    std::vector<Ranks> all;
    all.emplace_back(std::vector<MeshDim>{{"x", 2}, {"y", 2}});
    all.emplace_back(std::vector<MeshDim>{{"x", 2}, {"y", 3}});
    all.emplace_back(std::vector<MeshDim>{{"x", 2}, {"y", 2}, {"z", 2}});
    return all;
  }());
  Validation result;
  const SampleCall call(sample);
  const std::string name = c10::toString(call.op().operator_name());
  result.operators.insert(name);
  if (rule.sharded() == nullptr) return result;
  RuleTable table;
  table.add(name, rule);
  const OpInfo info(call.op(), table);
  const at::AutoDispatchBelowADInplaceOrView guard;
  for (const Ranks& ranks : *meshes) {
    Trial trial(sample, call, info, ranks, options);
    std::mt19937_64 random(options.seed);
    std::set<std::string> reported;
    for (int n = 0; n < options.max_combinations; ++n) {
      ++result.combinations;
      std::vector<Layout> layouts;
      std::vector<std::string> texts;
      for (const Input& input : call.inputs()) {
        layouts.push_back(random_layout(input, ranks.mesh(), n % 2 == 1, random));
        texts.push_back(absl::StrCat("[", absl::StrJoin(input.sizes(), ", "), "] ",
                                     layouts.back().to_string()));
      }
      const std::string wrong = trial.check(layouts);
      if (wrong.empty() || reported.size() == 8 || !reported.insert(wrong).second) continue;
      result.wrong.push_back(absl::StrCat(sample.op, " on ", ranks.mesh().to_string(), ": ",
                                          absl::StrJoin(texts, ", "), ": ", wrong));
    }
  }
  return result;
}

}  // namespace shardweave::testing
