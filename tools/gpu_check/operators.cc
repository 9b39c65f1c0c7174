// Operators on DTensors on GPUs against plain tensors on the CPU: values and gradients; layouts;
// random numbers.
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "ATen/ATen.h"
#include "ATen/CPUGeneratorImpl.h"
#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "check.h"
#include "shardweave/dtensor/random.h"

namespace shardweave_tool {
namespace {

using namespace shardweave;
using Tensors = std::vector<at::Tensor>;

enum class Filled : uint8_t { kNormal, kPositive, kIndices, kFlags };

struct Operand {
  std::vector<int64_t> sizes;
  Filled filled = Filled::kNormal;
  int64_t below = 0;  // of indices

  bool has_gradient() const { return filled == Filled::kNormal || filled == Filled::kPositive; }
};

Operand normal(std::vector<int64_t> sizes) {
  return {std::move(sizes)};
}
Operand positive(std::vector<int64_t> sizes) {
  return {std::move(sizes), Filled::kPositive};
}
Operand indices(std::vector<int64_t> sizes, int64_t below) {
  return {std::move(sizes), Filled::kIndices, below};
}
Operand flags(std::vector<int64_t> sizes) {
  return {std::move(sizes), Filled::kFlags};
}

struct OperatorRow {
  const char* name;
  std::vector<Operand> operands;
  Tensors (*run)(const Tensors& x);
  double within = 2e-5;        // in float32, relative to the largest element
  bool in_bfloat16 = true;     // false: which of near values is the larger decides
  double within_bfloat16 = 0;  // 0: kWithinBFloat16
};
constexpr double kWithinBFloat16 = 4e-2;
// Convolutions may round to TF32 on their way.
constexpr double kTf32 = 5e-3;

#define SHARDWEAVE_RUN(...) [](const Tensors& x) -> Tensors { return {__VA_ARGS__}; }

// Sizes that no number of ranks divides, but 1 and theirs.
const std::vector<OperatorRow>& rows() {
  static const auto& table = *new std::
                                 vector<OperatorRow>{
                                     // Elementwise.
                                     {"add",
                                      {normal({7, 5}), normal({5})},
                                      SHARDWEAVE_RUN(at::add(x[0], x[1], 0.5))},
                                     {"sub",
                                      {normal({7, 5}), normal({7, 5})},
                                      SHARDWEAVE_RUN(at::sub(x[0], x[1]))},
                                     {"mul",
                                      {normal({7, 5}), normal({7, 1})},
                                      SHARDWEAVE_RUN(at::mul(x[0], x[1]))},
                                     {"div",
                                      {normal({7, 5}), positive({7, 5})},
                                      SHARDWEAVE_RUN(at::div(x[0], x[1]))},
                                     {"neg, exp, tanh",
                                      {normal({7, 5})},
                                      SHARDWEAVE_RUN(x[0].neg(), x[0].exp(), x[0].tanh())},
                                     {"log, sqrt, rsqrt",
                                      {positive({7, 5})},
                                      SHARDWEAVE_RUN(x[0].log(), x[0].sqrt(), x[0].rsqrt())},
                                     {"pow",
                                      {positive({7, 5})},
                                      SHARDWEAVE_RUN(x[0].pow(3), x[0].pow(0.5))},
                                     {"gelu",
                                      {normal({7, 5})},
                                      SHARDWEAVE_RUN(at::gelu(x[0]), at::gelu(x[0], "tanh"))},
                                     {"silu, relu, sigmoid",
                                      {normal({7, 5})},
                                      SHARDWEAVE_RUN(at::silu(x[0]), at::relu(x[0]),
                                                     at::sigmoid(x[0]))},
                                     {"log_sigmoid",
                                      {normal({7, 5})},
                                      SHARDWEAVE_RUN(at::log_sigmoid(x[0]))},
                                     {"clamp",
                                      {normal({7, 5})},
                                      SHARDWEAVE_RUN(x[0].clamp(-0.5, 0.5))},
                                     {"maximum",
                                      {normal({7, 5}), normal({7, 5})},
                                      SHARDWEAVE_RUN(at::maximum(x[0], x[1])),
                                      2e-5,
                                      false},
                                     {"where",
                                      {flags({7, 5}), normal({7, 5}), normal({7, 5})},
                                      SHARDWEAVE_RUN(at::where(x[0], x[1], x[2]))},
                                     {"masked_fill",
                                      {normal({7, 5}), flags({7, 5})},
                                      SHARDWEAVE_RUN(at::masked_fill(x[0], x[1], -2.0))},
                                     {"in place",
                                      {normal({7, 5}), normal({7, 5})},
                                      [](const Tensors& x) -> Tensors {
                                        at::Tensor y = x[0] * 2;
                                        y.add_(x[1]).mul_(0.5);
                                        return {y};
                                      }},
                                     // Products.
                                     {"mm",
                                      {normal({7, 6}), normal({6, 5})},
                                      SHARDWEAVE_RUN(at::mm(x[0], x[1]))},
                                     {"addmm",
                                      {normal({5}), normal({7, 6}), normal({6, 5})},
                                      SHARDWEAVE_RUN(at::addmm(x[0], x[1], x[2]))},
                                     {"bmm",
                                      {normal({3, 7, 6}), normal({3, 6, 5})},
                                      SHARDWEAVE_RUN(at::bmm(x[0], x[1]))},
                                     {"matmul",
                                      {normal({3, 7, 6}), normal({6, 5})},
                                      SHARDWEAVE_RUN(at::matmul(x[0], x[1]))},
                                     {"linear",
                                      {normal({3, 7, 6}), normal({5, 6}), normal({5})},
                                      SHARDWEAVE_RUN(at::linear(x[0], x[1], x[2]))},
                                     {"einsum",
                                      {normal({3, 7, 6}), normal({3, 5, 6})},
                                      SHARDWEAVE_RUN(at::einsum("bik,bjk->bij", {x[0], x[1]}))},
                                     // Reductions.
                                     // (Ranks round their sums to bfloat16: of what does not cancel.)
                                     {"sum, mean",
                                      {positive({7, 5})},
                                      SHARDWEAVE_RUN(x[0].sum(), x[0].sum(1),
                                                     x[0].mean(), x[0].mean({1}))},
                                     {"var",
                                      {normal({7, 5})},
                                      SHARDWEAVE_RUN(at::var(x[0], at::IntArrayRef{1}, false))},
                                     {"amax",
                                      {normal({7, 5})},
                                      SHARDWEAVE_RUN(at::amax(x[0], {0})),
                                      2e-5,
                                      false},
                                     {"argmax",
                                      {normal({7, 5})},
                                      SHARDWEAVE_RUN(at::argmax(x[0], 1)),
                                      2e-5,
                                      false},
                                     {"cumsum",
                                      {normal({7, 5})},
                                      SHARDWEAVE_RUN(at::cumsum(x[0], 0), at::cumsum(x[0], 1))},
                                     {"logsumexp",
                                      {normal({7, 5})},
                                      SHARDWEAVE_RUN(at::logsumexp(x[0], {1}))},
                                     {"norm",
                                      {normal({7, 5})},
                                      SHARDWEAVE_RUN(at::linalg_vector_norm(x[0]))},
                                     {"sort",
                                      {normal({7, 5})},
                                      SHARDWEAVE_RUN(std::get<0>(at::sort(x[0], 1))),
                                      2e-5,
                                      false},
                                     {"topk",
                                      {normal({7, 5})},
                                      SHARDWEAVE_RUN(std::get<0>(at::topk(x[0], 2, 1))),
                                      2e-5,
                                      false},
                                     // Normalisations and losses.
                                     {"softmax",
                                      {normal({7, 5})},
                                      SHARDWEAVE_RUN(at::softmax(x[0], 0), at::softmax(x[0], 1))},
                                     {"log_softmax",
                                      {normal({7, 5})},
                                      SHARDWEAVE_RUN(at::log_softmax(x[0], 1))},
                                     {"layer_norm",
                                      {normal({3, 7, 6}), normal({6}), normal({6})},
                                      SHARDWEAVE_RUN(at::layer_norm(x[0], {6}, x[1], x[2]))},
                                     {"rms_norm",
                                      {normal({3, 7, 6}), normal({6})},
                                      SHARDWEAVE_RUN(at::rms_norm(x[0], {6}, x[1], 1e-6))},
                                     {"group_norm",
                                      {normal({3, 6, 5}), normal({6}), normal({6})},
                                      SHARDWEAVE_RUN(at::group_norm(x[0], 3, x[1], x[2]))},
                                     {"batch_norm",
                                      {normal({7, 5}), normal({5}), normal({5})},
                                      [](const Tensors& x) -> Tensors {
                                        return {at::batch_norm(x[0], x[1], x[2], {}, {}, true, 0.1,
                                                               1e-5, false)};
                                      }},
                                     {"batch_norm in evaluation",
                                      {normal({7, 5}), normal({5}), normal({5}), normal({5}),
                                       positive({5})},
                                      [](const Tensors& x) -> Tensors {
                                        return {at::batch_norm(x[0], x[1], x[2], x[3].detach(),
                                                               x[4].detach(), false, 0.1, 1e-5,
                                                               false)};
                                      }},
                                     {"cross_entropy",
                                      {normal({7, 5}), indices({7}, 5)},
                                      SHARDWEAVE_RUN(at::cross_entropy_loss(x[0], x[1]))},
                                     {"mse_loss",
                                      {normal({7, 5}), normal({7, 5})},
                                      SHARDWEAVE_RUN(at::mse_loss(x[0], x[1]))},
                                     // Shapes.
                                     {"view, permute",
                                      {normal({6, 7, 5})},
                                      SHARDWEAVE_RUN(x[0].view({2, 3, 35}), x[0].permute({2, 0, 1}),
                                                     x[0].transpose(0, 1))},
                                     {"slice, select",
                                      {normal({7, 5})},
                                      SHARDWEAVE_RUN(x[0].slice(0, 1, 6), x[0].select(1, 2),
                                                     x[0].narrow(1, 1, 3))},
                                     {"split, cat",
                                      {normal({7, 5})},
                                      [](const Tensors& x) -> Tensors {
                                        const Tensors parts = x[0].split(3, 0);
                                        return {at::cat({parts[2], parts[0]}),
                                                at::stack({parts[0], parts[1]})};
                                      }},
                                     {"expand",
                                      {normal({7, 1})},
                                      SHARDWEAVE_RUN(x[0].expand({7, 5}).clone())},
                                     {"flip, roll, pad",
                                      {normal({7, 5})},
                                      SHARDWEAVE_RUN(at::flip(x[0], {0}), at::roll(x[0], {2}, {0}),
                                                     at::constant_pad_nd(x[0], {1, 2}))},
                                     // Indices.
                                     {"embedding",
                                      {normal({7, 5}), indices({3, 4}, 7)},
                                      SHARDWEAVE_RUN(at::embedding(x[0], x[1]))},
                                     {"gather",
                                      {normal({7, 5}), indices({4, 5}, 7)},
                                      SHARDWEAVE_RUN(at::gather(x[0], 0, x[1]))},
                                     {"index_select",
                                      {normal({7, 5}), indices({4}, 5)},
                                      SHARDWEAVE_RUN(at::index_select(x[0], 1, x[1]))},
                                     {"scatter_add",
                                      {normal({7, 5}), indices({4, 5}, 7), normal({4, 5})},
                                      SHARDWEAVE_RUN(at::scatter_add(x[0], 0, x[1], x[2]))},
                                     // Images and attention.
                                     {"conv2d",
                                      {normal({3, 4, 6, 7}), normal({5, 4, 3, 3}), normal({5})},
                                      SHARDWEAVE_RUN(at::conv2d(x[0], x[1], x[2])),
                                      kTf32},
                                     {"max_pool2d",
                                      {normal({3, 4, 6, 8})},
                                      SHARDWEAVE_RUN(at::max_pool2d(x[0], {2, 2})),
                                      2e-5,
                                      false},
                                     {"attention of matmuls",
                                      {normal({3, 4, 5, 8}), normal({3, 4, 5, 8}),
                                       normal({3, 4, 5, 8})},
                                      SHARDWEAVE_RUN(at::matmul(
                                          at::softmax(at::matmul(x[0], x[1].transpose(2, 3)) * 0.35,
                                                      -1),
                                          x[2]))},
                                     {"scaled_dot_product_attention",
                                      {normal({3, 4, 5, 8}), normal({3, 4, 5, 8}),
                                       normal({3, 4, 5, 8})},
                                      SHARDWEAVE_RUN(
                                          at::scaled_dot_product_attention(x[0], x[1], x[2], {}, 0,
                                                                           /*is_causal=*/true)),
                                      1e-4},
                                     // Lists.
                                     {"_foreach_mul",
                                      {normal({7, 5}), normal({4})},
                                      [](const Tensors& x) -> Tensors {
                                        return at::_foreach_mul({x[0], x[1]}, {x[0], x[1]});
                                      }},
                                 };
  return table;
}

// Of float32, with numbers that `type` has. The same on every rank.
Tensors make(const OperatorRow& row, at::ScalarType type) {
  at::Generator generator = at::detail::createCPUGenerator(42);
  Tensors result;
  for (const Operand& o : row.operands) {
    switch (o.filled) {
      case Filled::kNormal:
        result.push_back(at::randn(o.sizes, generator, at::kFloat));
        break;
      case Filled::kPositive:
        result.push_back(at::rand(o.sizes, generator, at::kFloat) + 0.5);
        break;
      case Filled::kIndices:
        result.push_back(at::randint(o.below, o.sizes, generator, at::kLong));
        break;
      case Filled::kFlags:
        result.push_back(at::rand(o.sizes, generator, at::kFloat) > 0.5);
        break;
    }
    if (o.has_gradient()) result.back() = result.back().to(type).to(at::kFloat);
  }
  return result;
}

// What a result's sum is weighted with before backward.
at::Tensor weights(at::IntArrayRef sizes) {
  int64_t elements = 1;
  for (const int64_t size : sizes) elements *= size;
  return at::cos(at::arange(elements, at::kFloat)).add(0.1).view(sizes);
}

struct Results {
  Tensors values, gradients;  // on the CPU
};

// `place`: a leaf of the operator, or its weights, from what is on the CPU.
Results run(const OperatorRow& row, const Tensors& given,
            const std::function<at::Tensor(const at::Tensor&, bool is_operand)>& place) {
  Tensors x;
  for (size_t i = 0; i < given.size(); ++i) {
    at::Tensor t = place(given[i], true);
    if (row.operands[i].has_gradient()) t = t.detach().requires_grad_();
    x.push_back(t);
  }
  Results results;
  const Tensors values = row.run(x);
  at::Tensor loss;
  for (const at::Tensor& v : values) {
    results.values.push_back(on_host(v));
    if (!v.is_floating_point()) continue;
    const at::Tensor part = (v * place(weights(v.sizes()), false)).sum();
    loss = loss.defined() ? loss + part : part;
  }
  if (loss.defined() && loss.requires_grad()) loss.backward();
  for (const at::Tensor& t : x) {
    results.gradients.push_back(t.grad().defined() ? on_host(t.grad()) : at::Tensor());
  }
  return results;
}

void compare(const std::string& what, const at::Tensor& got, const at::Tensor& want, double within,
             Check& check) {
  if (got.defined() != want.defined()) {
    return check.fail(absl::StrCat(what, got.defined() ? " is there" : " is missing"));
  }
  if (!want.defined()) return;
  const double off = difference(got, want);
  check.expect(off <= within, absl::StrCat(what, " is off by ", off, " of the largest, wanted ",
                                           within, " at most"));
}

// Operands replicated, cut along the first and cut along the last dimension.
constexpr const char* kLayouts[] = {"R", "S(0)", "S(-1)"};

Placements placements(int layout, int64_t dims) {
  if (layout == 0 || dims == 0) return {Replicate()};
  return {Shard(layout == 1 ? 0 : static_cast<int>(dims) - 1)};
}

void check_row(const OperatorRow& row, at::ScalarType type, const MeshPtr& mesh, c10::Device device,
               Check& check) {
  const Tensors given = make(row, type);
  const Results want = run(row, given, [](const at::Tensor& t, bool) { return t; });
  double within = row.within;
  if (type == at::kBFloat16)
    within = row.within_bfloat16 > 0 ? row.within_bfloat16 : kWithinBFloat16;
  for (int layout = 0; layout < 3; ++layout) {
    const std::string what =
        absl::StrCat(row.name, " ", c10::toString(type), " [", kLayouts[layout], "]");
    check.attempt(what, [&] {
      const Results got = run(row, given, [&](const at::Tensor& t, bool is_operand) {
        const at::Tensor there = t.is_floating_point() ? t.to(device, type) : t.to(device);
        return distribute_tensor(there, mesh, placements(is_operand ? layout : 0, t.dim()),
                                 {.source = std::nullopt});
      });
      for (size_t i = 0; i < want.values.size(); ++i) {
        compare(absl::StrCat(what, ": result ", i), got.values[i], want.values[i], within, check);
      }
      for (size_t i = 0; i < want.gradients.size(); ++i) {
        compare(absl::StrCat(what, ": gradient ", i), got.gradients[i], want.gradients[i],
                2 * within, check);
      }
    });
  }
}

void check_table(const MeshPtr& mesh, c10::Device device, Check& check) {
  int64_t count = 0;
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    for (const OperatorRow& row : rows()) {
      if (type == at::kBFloat16 && !row.in_bfloat16) continue;
      check_row(row, type, mesh, device, check);
      ++count;
    }
  }
  check.looked_at(absl::StrCat(rows().size(), " rows in float32 and bfloat16, ", 3 * count,
                               " runs with backward, on ", mesh->mesh().size(),
                               mesh->mesh().size() == 1 ? " rank" : " ranks"));
}

}  // namespace

void check_operators_alone(Session& session, Check& check) {
  check_table(session.this_rank(), session.device, check);
}

void check_operators(Session& session, Check& check) {
  check_table(session.all_ranks(), session.device, check);
}

void check_redistribution(Session& session, Check& check) {
  const int64_t n = session.ranks();
  std::vector<std::vector<MeshDim>> meshes = {{{"dp", n}}};
  if (n >= 4 && n % 2 == 0) meshes.push_back({{"dp", n / 2}, {"tp", 2}});
  // Small whole numbers: every sum is exact.
  const at::Tensor whole = at::arange(7 * 5).mul(5).remainder(7).sub(2).view({7, 5}).to(at::kFloat);
  const std::vector<Placement> each = {Replicate(), Shard(0), Shard(1), Partial()};
  int64_t moves = 0;
  for (const std::vector<MeshDim>& dims : meshes) {
    const MeshPtr mesh = session.mesh(dims);
    std::vector<Placements> layouts;
    for (const Placement& a : each) {
      if (dims.size() == 1) {
        layouts.push_back({a});
      } else {
        for (const Placement& b : each) layouts.push_back({a, b});
      }
    }
    const at::Tensor start =
        distribute_tensor(whole.to(session.device), mesh, Placements(dims.size(), Replicate()),
                          {.source = std::nullopt});
    for (const Placements& from : layouts) {
      for (const Placements& to : layouts) {
        ++moves;
        check.attempt("redistribute", [&] {
          const at::Tensor there = redistribute(start, from), moved = redistribute(there, to);
          check.expect(at::equal(on_host(moved), whole),
                       absl::StrCat(describe(there), " -> ", describe(moved),
                                    ": other numbers than before"));
        });
      }
    }
  }
  check.looked_at(
      absl::StrCat(moves, " moves on ", meshes.size(), meshes.size() == 1 ? " mesh" : " meshes"));
}

void check_random(Session& session, Check& check) {
  const MeshPtr mesh = session.all_ranks();
  const Placements cut = {Shard(0)};
  const char* const kNames[] = {"rand",      "randn",   "rand of bfloat16", "dropout",
                                "bernoulli", "randint", "normal_",          "uniform_"};
  const auto draw = [&](c10::Device device) {
    manual_seed(mesh, 7);
    const at::TensorOptions options = device;
    const at::Tensor one = ones({501, 3}, mesh, cut, options);
    const c10::AutoGradMode no_grad(false);
    Tensors drawn = {rand({501, 3}, mesh, cut, options),
                     randn({501, 3}, mesh, cut, options),
                     rand({501, 3}, mesh, cut, options.dtype(at::kBFloat16)),
                     at::dropout(one, 0.5, true),
                     at::bernoulli(one * 0.5),
                     at::randint_like(one, 9),
                     at::empty_like(one).normal_(1, 2),
                     at::empty_like(one).uniform_(-1, 1)};
    for (at::Tensor& t : drawn) t = on_host(t);
    return drawn;
  };
  const Tensors want = draw(at::kCPU), got = draw(session.device);
  for (size_t i = 0; i < want.size(); ++i) {
    check.expect(at::equal(got[i], want[i]),
                 absl::StrCat(kNames[i], ": other numbers than on the CPU, off by ",
                              difference(got[i], want[i]), " of the largest"));
  }
  check.looked_at(absl::StrCat(want.size(), " ways to draw"));
}

}  // namespace shardweave_tool
