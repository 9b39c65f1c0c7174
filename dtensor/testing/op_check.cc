#include "shardweave/dtensor/testing/op_check.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <limits>
#include <mutex>
#include <optional>
#include <random>
#include <set>

#include "ATen/CPUGeneratorImpl.h"
#include "ATen/Dispatch.h"
#include "ATen/TensorOperators.h"
#include "ATen/ops/allclose.h"
#include "ATen/ops/complex.h"
#include "ATen/ops/count_nonzero.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/eye.h"
#include "ATen/ops/full_like.h"
#include "ATen/ops/matmul.h"
#include "ATen/ops/randint.h"
#include "ATen/ops/randn.h"
#include "ATen/ops/where.h"
#include "ATen/ops/zeros_like.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/observe/observer.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "torch/csrc/autograd/autograd.h"

namespace shardweave::testing {
namespace {

using namespace dtensor_internal;

// What one device gives.
struct Reference {
  Tensors inputs;
  Tensors outputs;
  Tensors cotangents;  // one per output; undefined where it has no gradient
  Tensors gradients;   // one per input; undefined where it has none
  // One per gradient; undefined where it cannot be differentiated again. Empty if none can.
  Tensors second_cotangents;
  Tensors second_gradients;  // one per input, then one per cotangent
  // Why there are none, where there are gradients.
  std::string no_second_derivative;
};

at::Generator generator(uint64_t seed) {
  return at::make_generator<at::CPUGeneratorImpl>(seed);
}

// Multiples of 1 / 4096: sums of a few of them are exact.
at::Tensor round_off(at::Tensor values) {
  return values.mul_(4096).round_().div_(4096);
}

at::Tensor normal(at::IntArrayRef sizes, at::ScalarType dtype, uint64_t seed) {
  auto draw = [&](uint64_t s) {
    return round_off(at::randn(sizes, generator(s), at::TensorOptions(at::kDouble)));
  };
  if (c10::isComplexType(dtype)) return at::complex(draw(seed), draw(seed + 500)).to(dtype);
  return draw(seed).to(dtype);
}

bool needs_gradient(const at::Tensor& tensor) {
  return tensor.defined() && tensor.requires_grad();
}

// The gradients of every input that has one.
enum class Graph { kFreed, kRetained, kCreated };
Tensors gradients_of(const Tensors& outputs, const Tensors& cotangents, const Tensors& inputs,
                     Graph graph) {
  Tensors of, along, leaves;
  for (size_t k = 0; k < outputs.size(); ++k) {
    if (!cotangents[k].defined()) continue;
    of.push_back(outputs[k]);
    along.push_back(cotangents[k]);
  }
  for (const at::Tensor& input : inputs) {
    if (needs_gradient(input)) leaves.push_back(input);
  }
  Tensors gradients(inputs.size());
  if (of.empty() || leaves.empty()) return gradients;
  Tensors found = torch::autograd::grad(of, leaves, along, graph != Graph::kFreed,
                                        /*create_graph=*/graph == Graph::kCreated,
                                        /*allow_unused=*/true);
  size_t next = 0;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (needs_gradient(inputs[i])) gradients[i] = found[next++];
  }
  return gradients;
}

// What the gradients are functions of: inputs, then cotangents.
Tensors joined(Tensors inputs, const Tensors& cotangents) {
  inputs.insert(inputs.end(), cotangents.begin(), cotangents.end());
  return inputs;
}

// One device is the judge: what it cannot differentiate twice has no second derivative.
void differentiate_again(Reference& reference) {
  try {
    const Tensors first =
        gradients_of(reference.outputs, reference.cotangents, reference.inputs, Graph::kCreated);
    Tensors weights(first.size());
    bool any = false;
    for (size_t i = 0; i < first.size(); ++i) {
      if (!needs_gradient(first[i])) continue;
      weights[i] = normal(first[i].sizes(), first[i].scalar_type(), 300 + i);
      any = true;
    }
    if (!any) {
      reference.no_second_derivative = "no gradient requires grad";
      return;
    }
    reference.second_gradients =
        gradients_of(first, weights, joined(reference.inputs, reference.cotangents), Graph::kFreed);
    reference.second_cotangents = std::move(weights);
  } catch (const c10::Error& error) {
    reference.no_second_derivative = error.what_without_backtrace();
  }
}

Reference on_one_device(const OpCase& op) {
  Reference reference;
  for (size_t i = 0; i < op.inputs.size(); ++i) {
    at::Tensor input = op.inputs[i].make(i + 1);
    if (op.gradients && op.inputs[i].has_gradient()) input.requires_grad_();
    reference.inputs.push_back(std::move(input));
  }
  reference.outputs = op.run(reference.inputs);
  for (size_t k = 0; k < reference.outputs.size(); ++k) {
    const at::Tensor& output = reference.outputs[k];
    reference.cotangents.push_back(
        output.requires_grad()
            ? normal(output.sizes(), output.scalar_type(), 100 + k).requires_grad_()
            : at::Tensor());
  }
  reference.gradients =
      gradients_of(reference.outputs, reference.cotangents, reference.inputs, Graph::kRetained);
  const bool any = std::any_of(reference.gradients.begin(), reference.gradients.end(),
                               [](const at::Tensor& g) { return g.defined(); });
  if (any) differentiate_again(reference);
  return reference;
}

// --- layouts -------------------------------------------------------------------------------------

// Rank 0 has two elements (or what there is), the next none, the last the rest.
Placement ragged(int dim, int64_t size, int64_t ranks) {
  std::vector<int64_t> sizes(ranks, 0);
  sizes[0] = std::min<int64_t>(size, 2);
  sizes[ranks - 1] += size - sizes[0];
  return RaggedShard(dim, std::move(sizes));
}

std::vector<Placements> layouts_to_try(const Input& input, const DeviceMesh& mesh,
                                       bool all_partials) {
  if (input.is_replicated()) return {Placements(mesh.ndim())};
  const int ndim = static_cast<int>(input.sizes().size());
  std::vector<Placements> layouts = all_layouts(mesh.ndim(), ndim, input.is_float());
  if (mesh.ndim() == 1) {
    if (all_partials && input.is_float()) {
      layouts.push_back({Partial(ReduceOp::kAvg)});
      if (input.is_real()) {
        layouts.push_back({Partial(ReduceOp::kMin)});
        layouts.push_back({Partial(ReduceOp::kMax)});
      }
    }
    for (int d = 0; d < ndim; ++d) {
      layouts.push_back({StridedShard(d, 2)});
      layouts.push_back({ragged(d, input.sizes()[d], mesh.size())});
    }
  }
  return layouts;
}

// One layout per input, each a number below counts[i]; all combinations, or a sample that has every
// layout of every input.
std::vector<std::vector<int>> combinations(const std::vector<int>& counts, int at_most,
                                           uint64_t seed) {
  int64_t all = 1;
  int most = 1;
  for (int count : counts) {
    all = std::min<int64_t>(all * count, int64_t{1} << 40);
    most = std::max(most, count);
  }
  std::vector<std::vector<int>> result;
  if (all <= at_most) {
    for (int64_t n = 0; n < all; ++n) {
      int64_t rest = n;
      std::vector<int>& choice = result.emplace_back();
      for (int count : counts) {
        choice.push_back(static_cast<int>(rest % count));
        rest /= count;
      }
    }
    return result;
  }
  std::mt19937_64 random(seed);
  std::vector<std::vector<int>> orders;
  for (int count : counts) {
    std::vector<int>& order = orders.emplace_back();
    while (static_cast<int>(order.size()) < std::max(most, at_most)) {
      const size_t first = order.size();
      for (int k = 0; k < count; ++k) order.push_back(k);
      std::shuffle(order.begin() + static_cast<std::ptrdiff_t>(first), order.end(), random);
    }
  }
  for (int n = 0; n < std::max(most, at_most); ++n) {
    std::vector<int>& choice = result.emplace_back();
    for (const std::vector<int>& order : orders) choice.push_back(order[n]);
  }
  return result;
}

Placement with_dims_exchanged(const Placement& p) {
  if (!p.is_shard() || p.dim() > 1) return p;
  const int dim = 1 - p.dim();
  if (p.kind() == PlacementKind::kStridedShard) return StridedShard(dim, p.split_factor());
  if (p.kind() == PlacementKind::kRaggedShard) return RaggedShard(dim, p.sizes());
  return Shard(dim);
}

// `whole` in any layout. The summands of a Partial are random and add up.
at::Tensor spread(const at::Tensor& whole, const MeshPtr& mesh, const Placements& placements,
                  uint64_t seed) {
  if (!whole.is_contiguous()) {  // as Input::transposed() leaves it
    Placements exchanged;
    for (const Placement& p : placements) exchanged.push_back(with_dims_exchanged(p));
    return spread(whole.detach().transpose(0, 1), mesh, exchanged, seed).transpose(0, 1);
  }
  Placements cuts = placements;
  at::Tensor piece = whole.detach();
  bool partial = false;
  for (int m = 0; m < mesh->mesh().ndim(); ++m) {
    if (!placements[m].is_partial()) continue;
    cuts[m] = Replicate();
    partial = true;
    const int64_t index = mesh->coordinate()[m];
    piece = summands(piece, placements[m].reduce_op(), static_cast<int>(mesh->mesh().size(m)),
                     seed)[index];
    seed = seed * 31 + static_cast<uint64_t>(index) + 1;  // as on the other ranks of that part
  }
  const at::Tensor cut = distribute_tensor(piece, mesh, cuts, {.source = std::nullopt});
  if (!partial) return cut;
  return from_local(to_local(cut), mesh, placements, whole.sizes().vec()).detach();
}

// --- comparison ----------------------------------------------------------------------------------

std::string shape_of(const at::Tensor& tensor) {
  std::vector<int64_t> strides = tensor.strides().vec();
  return absl::StrCat(c10::toString(tensor.scalar_type()), "[", absl::StrJoin(tensor.sizes(), ", "),
                      "] with strides [", absl::StrJoin(strides, ", "), "]");
}

bool same_strides(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == 0) return true;
  for (int64_t d = 0; d < a.dim(); ++d) {
    if (a.size(d) > 1 && a.stride(d) != b.stride(d)) return false;
  }
  return true;
}

// Empty if they agree.
enum class Compared { kOutput, kGradient };
std::string difference(const at::Tensor& got, const at::Tensor& want, const OpCase& op,
                       Compared what) {
  const bool strides = op.strides && what == Compared::kOutput;
  if (got.defined() != want.defined()) {
    return absl::StrCat(got.defined() ? "defined" : "undefined", " instead of ",
                        want.defined() ? "defined" : "undefined");
  }
  if (!got.defined()) return "";
  // Some formulas of derivatives make a gradient from nothing (of zeros, mostly): a plain tensor, the
  // same on all ranks.
  if (!is_dtensor(got) && what == Compared::kOutput) return "a plain tensor";
  if (got.sizes() != want.sizes() || got.scalar_type() != want.scalar_type() ||
      (strides && !same_strides(got, want))) {
    return absl::StrCat(shape_of(got), " instead of ", shape_of(want));
  }
  if (!op.values) return "";
  const auto wide = c10::isComplexType(want.scalar_type()) ? at::kComplexDouble : at::kDouble;
  const at::Tensor a = (is_dtensor(got) ? full_tensor(got.detach()) : got.detach()).to(wide);
  const at::Tensor b = want.detach().to(wide);
  if (at::allclose(a, b, op.tolerance, op.tolerance, /*equal_nan=*/true)) return "";
  return absl::StrCat("max difference ", (a - b).abs().max().item<double>(), " in ",
                      is_dtensor(got) ? layout_of(got).to_string() : "a plain tensor");
}

// Layouts for the cotangents: all sorts, by the number of the combination.
at::Tensor spread_cotangent(const at::Tensor& cotangent, const MeshPtr& mesh, int n) {
  const std::vector<Placements> layouts =
      all_layouts(mesh->mesh().ndim(), static_cast<int>(cotangent.dim()), true);
  return spread(cotangent, mesh, layouts[static_cast<size_t>(n) * 7 % layouts.size()], 900)
      .detach();
}

// Of all ranks.
class Differences {
 public:
  void add(std::string text) {
    constexpr size_t kEnough = 8;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (list_.size() < kEnough) list_.push_back(std::move(text));
  }
  std::vector<std::string> take() { return std::move(list_); }

 private:
  std::mutex mutex_;
  std::vector<std::string> list_;
};

// One combination of layouts on one rank.
class CombinationCheck {
 public:
  CombinationCheck(const OpCase& op, const Reference& reference, const MeshPtr& mesh,
                   const std::vector<Placements>& layouts, int n, Differences& differences)
      : op_(op),
        reference_(reference),
        mesh_(mesh),
        layouts_(layouts),
        n_(n),
        differences_(differences) {
    label_ = absl::StrCat(op.name, " on ", mesh->mesh().to_string(), " at rank ",
                          mesh->rank().value, ":");
    for (size_t i = 0; i < layouts.size(); ++i) {
      absl::StrAppend(&label_, " [", absl::StrJoin(reference.inputs[i].sizes(), ", "), "] ",
                      to_string(layouts[i]));
    }
  }

  void check(Graph graph) {
    naming_errors("", [&] {
      for (size_t i = 0; i < layouts_.size(); ++i) {
        const at::Tensor& whole = reference_.inputs[i];
        at::Tensor input = spread(whole, mesh_, layouts_[i], 1000 * (i + 1)).detach();
        inputs_.push_back(whole.requires_grad() ? input.requires_grad_() : input);
      }
      outputs_ = op_.run(inputs_);
      for (size_t k = 0; k < outputs_.size(); ++k) {
        expect_same(outputs_[k], reference_.outputs[k], Compared::kOutput, "output", k);
        const at::Tensor& cotangent = reference_.cotangents[k];
        cotangents_.emplace_back();
        if (!cotangent.defined()) continue;
        cotangents_.back() = spread_cotangent(cotangent, mesh_, n_).requires_grad_();
      }
      const Tensors gradients = gradients_of(outputs_, cotangents_, inputs_, graph);
      for (size_t i = 0; i < gradients.size(); ++i) {
        expect_same(gradients[i], reference_.gradients[i], Compared::kGradient, "gradient of input",
                    i);
      }
    });
  }

  // After check(kRetained). With create_graph other formulas may run for the first gradients: they
  // are compared as well.
  void check_second_gradients() {
    naming_errors("second gradient: ", [&] {
      const Tensors first = gradients_of(outputs_, cotangents_, inputs_, Graph::kCreated);
      Tensors weights(first.size());
      for (size_t i = 0; i < first.size(); ++i) {
        expect_same(first[i], reference_.gradients[i], Compared::kGradient,
                    "with create_graph, gradient of input", i);
        const at::Tensor& weight = reference_.second_cotangents[i];
        if (!weight.defined()) continue;
        if (!needs_gradient(first[i])) {
          throw Error(absl::InternalError(
              absl::StrCat("the gradient of input ", i, " does not require grad")));
        }
        weights[i] = is_dtensor(first[i])
                         ? spread_cotangent(weight, mesh_, n_ + 1 + static_cast<int>(i))
                         : weight;
      }
      const Tensors second =
          gradients_of(first, weights, joined(inputs_, cotangents_), Graph::kFreed);
      for (size_t k = 0; k < second.size(); ++k) {
        const bool input = k < inputs_.size();
        expect_same(
            second[k], reference_.second_gradients[k], Compared::kGradient,
            input ? "second gradient of input" : "second gradient of the cotangent of output",
            input ? k : k - inputs_.size());
      }
    });
  }

 private:
  void expect_same(const at::Tensor& got, const at::Tensor& want, Compared what, const char* name,
                   size_t k) {
    const std::string message = difference(got, want, op_, what);
    if (message.empty()) return;
    differences_.add(absl::StrCat(label_, ": ", name, " ", k, ": ", message));
  }

  template <typename Function>
  void naming_errors(const char* where, Function&& function) {
    try {
      function();
    } catch (const std::exception& error) {
      // The stack trace is LibTorch's; the first line says what happened.
      const std::string what = error.what();
      throw Error(absl::UnknownError(
          absl::StrCat(label_, ": ", where, what.substr(0, what.find("\nException raised")))));
    }
  }

  const OpCase& op_;
  const Reference& reference_;
  const MeshPtr& mesh_;
  const std::vector<Placements>& layouts_;
  const int n_;
  Differences& differences_;
  std::string label_;
  Tensors inputs_, outputs_, cotangents_;
};

}  // namespace

at::Tensor Input::make(uint64_t seed) const {
  std::vector<int64_t> sizes = sizes_;
  if (transposed_) std::swap(sizes[0], sizes[1]);
  if (c10::isComplexType(dtype_)) return normal(sizes, dtype_, seed);
  at::Tensor values = at::randn(sizes, generator(seed), at::TensorOptions(at::kDouble));
  if (low_.has_value()) {
    values =
        at::empty(sizes, at::TensorOptions(at::kDouble)).uniform_(*low_, *high_, generator(seed));
    if (c10::isIntegralType(dtype_, /*includeBool=*/false)) values.floor_();
  }
  if (ties_) values.mul_(1.5).round_();
  if (positive_definite_) {
    const int64_t n = sizes.back();
    values = at::matmul(values, values.mT()).add_(at::eye(n, values.options()), n);
  }
  if (sorted_) values = std::get<0>(values.sort(-1));
  round_off(values);
  values = dtype_ == at::kBool ? values.gt(0) : values.to(dtype_);
  return transposed_ ? values.transpose(0, 1) : values;
}

// What a rank without elements adds to a minimum or maximum.
at::Tensor identity_like(const at::Tensor& whole, ReduceOp op) {
  at::Scalar value;
  AT_DISPATCH_ALL_TYPES_AND2(at::kHalf, at::kBFloat16, whole.scalar_type(), "identity", [&] {
    using Limits = std::numeric_limits<scalar_t>;
    const scalar_t largest = Limits::has_infinity ? Limits::infinity() : Limits::max();
    const scalar_t least = Limits::has_infinity ? -Limits::infinity() : Limits::lowest();
    value = op == ReduceOp::kMax ? least : largest;
  });
  return at::full_like(whole, value);
}

Tensors summands(const at::Tensor& whole, ReduceOp op, int count, uint64_t seed) {
  if (!whole.is_cpu()) {
    Tensors result = summands(whole.cpu(), op, count, seed);
    for (at::Tensor& summand : result) summand = summand.to(whole.device());
    return result;
  }
  const at::IntArrayRef sizes = whole.sizes();
  const at::ScalarType dtype = whole.scalar_type();
  auto noise = [&](int i) { return normal(sizes, dtype, seed * 64 + static_cast<uint64_t>(i)); };
  const at::Tensor owner =
      at::randint(count, sizes, generator(seed * 64 + 63), at::TensorOptions(at::kLong));
  Tensors pieces;
  for (int i = 0; i < count; ++i) {
    const bool last = i + 1 == count;
    at::Tensor piece;
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kAvg:
        if (dtype == at::kBool) {  // a sum of truth values is true if any is
          piece = whole.logical_and(owner.eq(i).logical_or(noise(i)));
          break;
        }
        piece = last ? (op == ReduceOp::kAvg ? whole * count : whole) : noise(i);
        for (int j = 0; last && j < i; ++j) piece = piece - pieces[j];
        break;
      case ReduceOp::kMin:
      case ReduceOp::kMax: {
        const bool max = op == ReduceOp::kMax;
        if (dtype == at::kBool) {
          const at::Tensor mine = i == 0 ? owner.eq(i) : owner.eq(i).logical_or(noise(i));
          piece = max ? whole.logical_and(mine) : whole.logical_or(mine.logical_not());
        } else {
          const at::Tensor distance = noise(i).abs().masked_fill(owner.eq(i), 0);
          piece = max ? whole - distance : whole + distance;
          // As it is after an operator on a rank that had nothing.
          if (i == 0) piece = at::where(owner.eq(i), whole, identity_like(whole, op));
        }
        break;
      }
      case ReduceOp::kProduct: {
        const at::Tensor n = noise(i);
        const at::Tensor sign = (n.is_complex() ? at::real(n) : n).ge(0).to(dtype) * 2 - 1;
        piece = last ? whole.clone() : c10::isFloatingType(dtype) ? sign * 2 : sign;
        for (int j = 0; last && j < i; ++j) piece = (piece / pieces[j]).to(dtype);
        break;
      }
    }
    pieces.push_back(std::move(piece));
  }
  return pieces;
}

const std::vector<std::vector<MeshDim>>& small_meshes() {
  static const auto* const meshes = new std::vector<std::vector<MeshDim>>{
      {{"x", 2}}, {{"x", 3}}, {{"x", 4}}, {{"x", 2}, {"y", 2}}};
  return *meshes;
}

// Of the operators that run on one rank.
struct Names final : Observer {
  void operator_begins(const c10::OperatorHandle& op, absl::Span<const c10::IValue>) override {
    names.insert(c10::toString(op.operator_name()));
  }
  std::set<std::string> names;
};

CheckResult check_on_mesh(const OpCase& op, const std::vector<MeshDim>& mesh_dims,
                          const CheckOptions& options) {
  const Reference reference = on_one_device(op);
  Differences differences;
  std::atomic<int64_t> tried = 0, again = 0;
  Names reached;
  const absl::Status status = try_on_mesh(mesh_dims, [&](const MeshPtr& mesh) {
    std::vector<std::vector<Placements>> layouts;
    std::vector<int> counts;
    for (const Input& input : op.inputs) {
      layouts.push_back(layouts_to_try(input, mesh->mesh(), options.all_partials));
      counts.push_back(static_cast<int>(layouts.back().size()));
    }
    const std::vector<std::vector<int>> choices =
        combinations(counts, options.max_combinations, options.seed);
    // Of a shuffled order: every n-th combination is in step with the layouts of an input.
    std::vector<char> is_twice(choices.size(), 0);
    if (!reference.second_cotangents.empty()) {
      const auto every = static_cast<size_t>(options.second_gradients_every);
      std::fill_n(is_twice.begin(), (choices.size() + every - 1) / every, 1);
      std::mt19937_64 random(options.seed);
      std::shuffle(is_twice.begin(), is_twice.end(), random);
    }
    int n = 0, second = 0;
    for (const std::vector<int>& choice : choices) {
      std::vector<Placements> chosen;
      for (size_t i = 0; i < choice.size(); ++i) chosen.push_back(layouts[i][choice[i]]);
      const bool twice = is_twice[n] != 0;
      CombinationCheck combination(op, reference, mesh, chosen, n++, differences);
      {
        // Not of the second gradients: what only they reach wants a sample of its own.
        std::optional<Observing> observing;
        if (mesh->rank() == Rank{0}) observing.emplace(MeshContext::of(mesh), reached);
        combination.check(twice ? Graph::kRetained : Graph::kFreed);
      }
      if (!twice) continue;
      combination.check_second_gradients();
      ++second;
    }
    tried = n;
    again = second;
  });
  CheckResult result{tried, again, reference.no_second_derivative, std::move(reached.names),
                     differences.take()};
  if (!status.ok()) result.differences.push_back(status.ToString());
  return result;
}

bool differentiable(const OpCase& op) {
  try {
    on_one_device(op);
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}

std::vector<std::string> find_differences(const OpCase& op, const std::vector<MeshDim>& mesh) {
  return check_on_mesh(op, mesh).differences;
}

void check_op(const OpCase& op, const std::vector<std::vector<MeshDim>>& meshes) {
  for (const std::vector<MeshDim>& mesh : meshes) {
    for (const std::string& text : find_differences(op, mesh)) ADD_FAILURE() << text;
  }
}

void check_ops(const std::vector<OpCase>& ops) {
  for (const OpCase& op : ops) check_op(op);
}

}  // namespace shardweave::testing
