// What the kernels' body gives, run by the host, against what LibTorch's operators draw on
// DTensors; and the 16-bit floats against LibTorch's.
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "ATen/ATen.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/cuda/index_boxes.h"
#include "shardweave/dtensor/cuda/testing/fill_on_host.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/engine/random_draw.h"
#include "shardweave/dtensor/random.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/placement/layout.h"

namespace shardweave {
namespace {

using namespace dtensor_internal;

using testing::fill_on_host;
using testing::on_mesh;

struct Type {
  at::ScalarType torch;
  DType ours;
};
constexpr Type kTypes[] = {{at::kDouble, DType::kF64}, {at::kFloat, DType::kF32},
                           {at::kHalf, DType::kF16},   {at::kBFloat16, DType::kBF16},
                           {at::kLong, DType::kI64},   {at::kInt, DType::kI32},
                           {at::kShort, DType::kI16},  {at::kChar, DType::kI8},
                           {at::kByte, DType::kU8},    {at::kBool, DType::kBool}};

struct Operator {
  std::function<void(at::Tensor&)> run;
  RandomDraw draw;  // of any dtype
};

std::vector<Operator> operators(DType dtype, const double* each) {
  using at::Tensor;
  return {
      {[](Tensor& x) { x.uniform_(-2, 3); }, RandomDraw::uniform(dtype, -2, 3)},
      {[](Tensor& x) { x.normal_(1, 0.02); }, RandomDraw::normal(dtype, 1, 0.02)},
      {[](Tensor& x) { x.log_normal_(0.5, 0.25); }, RandomDraw::log_normal(dtype, 0.5, 0.25)},
      {[](Tensor& x) { x.exponential_(2); }, RandomDraw::exponential(dtype, 2)},
      {[](Tensor& x) { x.cauchy_(1, 2); }, RandomDraw::cauchy(dtype, 1, 2)},
      {[](Tensor& x) { x.geometric_(0.3); }, RandomDraw::geometric(dtype, 0.3)},
      {[](Tensor& x) { x.bernoulli_(0.3); }, RandomDraw::bernoulli(dtype, 0.3)},
      {[](Tensor& x) { x.bernoulli_(at::full({}, 0.25, at::kDouble)); },
       RandomDraw::bernoulli_each(dtype, each)},
      {[](Tensor& x) { x.random_(0, 2); }, RandomDraw::integers(dtype, 0, 2)},
      {[](Tensor& x) {
         if (x.scalar_type() == at::kBool) {
           x.random_();
         } else {
           x.random_(20, 90);
         }
       },
       dtype == DType::kBool ? RandomDraw::integers(dtype, 0, 2)
                             : RandomDraw::integers(dtype, 20, 90)},
  };
}

std::vector<Intervals> held_by(const MeshPtr& mesh, const Layout& layout,
                               const std::vector<int64_t>& sizes) {
  std::vector<Intervals> held;
  for (int d = 0; d < static_cast<int>(sizes.size()); ++d) {
    held.push_back(local_intervals(layout, mesh->mesh().shape(), mesh->coordinate(), sizes, d));
  }
  return held;
}

std::vector<Placements> layouts(const std::vector<int64_t>& sizes, int mesh_ndim, int64_t ranks) {
  std::vector<Placements> all = testing::all_layouts(mesh_ndim, 3, false);
  if (mesh_ndim > 1) return all;
  for (int d = 0; d < 3; ++d) {
    all.push_back({StridedShard(d, 2)});
    std::vector<int64_t> ragged(static_cast<size_t>(ranks), 0);
    ragged[static_cast<size_t>(ranks) - 1] = sizes[static_cast<size_t>(d)] - 1;
    ragged[0] += 1;
    all.push_back({RaggedShard(d, ragged)});
  }
  return all;
}

TEST(RandomOperatorsTest, KernelsDrawTheSame) {
  const std::vector<int64_t> sizes = {5, 7, 3};
  const std::vector<double> each(5 * 7 * 3, 0.25);
  for (const std::vector<MeshDim>& dims :
       std::vector<std::vector<MeshDim>>{{{"x", 1}}, {{"x", 3}}, {{"x", 2}, {"y", 2}}}) {
    on_mesh(dims, [&](const MeshPtr& mesh) {
      const int mesh_ndim = mesh->mesh().ndim();
      int compared = 0;
      for (const Type& type : kTypes) {
        for (const Operator& op : operators(type.ours, each.data())) {
          if (!can_draw(op.draw.kind, type.ours)) continue;
          for (const Placements& placements : layouts(sizes, mesh_ndim, mesh->mesh().size())) {
            manual_seed(mesh, 42);
            // A first operator, so that the stream's number is not 0.
            randn({2}, mesh, Placements(static_cast<size_t>(mesh_ndim), Replicate()));
            at::Tensor x = zeros(sizes, mesh, placements, type.torch);
            const PhiloxState state = random_state(mesh);
            op.run(x);
            EXPECT_EQ(random_state(mesh).offset, state.offset + 1);
            const at::Tensor want = to_local(x);
            const at::Tensor got = at::zeros_like(want);
            fill_on_host(op.draw, {.seed = state.seed, .stream = state.offset},
                         index_boxes(held_by(mesh, layout_of(x), sizes), sizes, got.strides()),
                         got.mutable_data_ptr());
            EXPECT_TRUE(got.is_contiguous() && want.is_contiguous());
            ++compared;
            if (want.numel() == 0) continue;
            EXPECT_EQ(std::memcmp(got.const_data_ptr(), want.const_data_ptr(),
                                  static_cast<size_t>(want.nbytes())),
                      0)
                << kernel_name(op.draw) << " " << to_string(placements);
          }
        }
      }
      EXPECT_GT(compared, 200);
    });
  }
}

// Into memory that is not laid out row by row, which the kernels write directly.
TEST(RandomOperatorsTest, IntoAnyStrides) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const std::vector<int64_t> sizes = {6, 5};
    manual_seed(mesh, 7);
    const at::Tensor x = zeros(sizes, mesh, {Shard(1)}).normal_();
    const at::Tensor want = to_local(x);
    const at::Tensor got = at::full({want.size(1), 2 * want.size(0)}, -9.0f);
    // A transposed one with gaps.
    const at::Tensor view = got.t().slice(0, 0, got.size(1), 2);
    fill_on_host(RandomDraw::normal(DType::kF32, 0, 1), {.seed = 7, .stream = 0},
                 index_boxes(held_by(mesh, layout_of(x), sizes), sizes, view.strides()),
                 view.mutable_data_ptr());
    EXPECT_TRUE(at::equal(view, want));
    EXPECT_EQ(got.eq(-9.0f).sum().item<int64_t>(), want.numel());
  });
}

// --- the definitions, in LibTorch's types --------------------------------------------------------

template <typename T>
using Bits = std::conditional_t<std::is_same_v<T, double>, uint64_t, uint32_t>;

// uniform_, normal_, bernoulli_ and random_ of DTensors since there are any: models have been drawn
// with them.
template <typename T>
void expect_as_ever(DType dtype) {
  using Math = std::conditional_t<std::is_same_v<T, double>, double, float>;
  constexpr int64_t kCount = 40'001, kFirst = 3;
  const auto drawn = [&](const RandomDraw& draw) {
    std::vector<T> numbers(kCount);
    draw_numbers(draw, PhiloxStream(1, 2), numbers.data(),
                 [&](RunVisitor run) { run(kFirst, kCount); });
    return numbers;
  };
  const auto expect_equal = [&](const std::vector<T>& got, const std::vector<T>& want,
                                const char* what) {
    EXPECT_EQ(std::memcmp(got.data(), want.data(), kCount * sizeof(T)), 0)
        << what << " " << to_string(dtype);
  };
  std::vector<T> want(kCount);
  std::vector<Bits<T>> bits(kCount);
  PhiloxStream(1, 2).bits(kFirst, absl::MakeSpan(bits));
  {
    constexpr int kDigits = std::numeric_limits<T>::digits;
    constexpr int kShift = std::numeric_limits<Bits<T>>::digits - kDigits;
    const Math unit = std::ldexp(Math{1}, -kDigits);
    const Math from = static_cast<Math>(-0.3), to = static_cast<Math>(0.7);
    for (size_t i = 0; i < want.size(); ++i) {
      const T x = static_cast<T>(static_cast<Math>(bits[i] >> kShift) * unit * (to - from) + from);
      want[i] = static_cast<Math>(x) < to ? x : static_cast<T>(from);
    }
    expect_equal(drawn(RandomDraw::uniform(dtype, -0.3, 0.7)), want, "uniform");
  }
  {
    std::vector<Math> normal(kCount);
    PhiloxStream(1, 2).normal(kFirst, absl::MakeSpan(normal));
    const Math mean = static_cast<Math>(0.1), std = static_cast<Math>(0.02);
    for (size_t i = 0; i < want.size(); ++i) want[i] = static_cast<T>(normal[i] * std + mean);
    expect_equal(drawn(RandomDraw::normal(dtype, 0.1, 0.02)), want, "normal");
  }
  {
    std::vector<uint32_t> words(kCount);
    PhiloxStream(1, 2).bits(kFirst, absl::MakeSpan(words));
    const uint64_t threshold = static_cast<uint64_t>(0.9 * 0x1p32 + 0.5);
    for (size_t i = 0; i < want.size(); ++i) want[i] = static_cast<T>(words[i] < threshold);
    expect_equal(drawn(RandomDraw::bernoulli(dtype, 0.9)), want, "bernoulli");
  }
  {
    std::vector<uint64_t> pairs(kCount);
    PhiloxStream(1, 2).bits(kFirst, absl::MakeSpan(pairs));
    for (size_t i = 0; i < want.size(); ++i) {
      const auto n = static_cast<uint64_t>((static_cast<unsigned __int128>(pairs[i]) * 5000) >> 64);
      want[i] = static_cast<T>(static_cast<int64_t>(n) - 17);
    }
    expect_equal(drawn(RandomDraw::integers(dtype, -17, 4983)), want, "integers");
  }
}

TEST(RandomOperatorsTest, TheSameNumbersAsEver) {
  expect_as_ever<double>(DType::kF64);
  expect_as_ever<float>(DType::kF32);
  expect_as_ever<at::Half>(DType::kF16);
  expect_as_ever<at::BFloat16>(DType::kBF16);
}

// Every upper half of a float, with lower halves around all that rounding looks at.
TEST(RandomOperatorsTest, SmallFloatsRoundAsLibTorchs) {
  int64_t differ = 0;
  for (uint32_t upper = 0; upper < 0x10000; ++upper) {
    for (uint32_t lower : {0x0000u, 0x0001u, 0x0FFFu, 0x1000u, 0x1001u, 0x1FFFu, 0x2000u, 0x3000u,
                           0x7FFFu, 0x8000u, 0x8001u, 0xEFFFu, 0xF000u, 0xFFFFu}) {
      const float value = bits_as<float>(upper << 16 | lower);
      if (F16(value).bits != at::Half(value).x) ++differ;
      if (BF16(value).bits != at::BFloat16(value).x) ++differ;
    }
    F16 half;
    half.bits = static_cast<uint16_t>(upper);
    const float mine = static_cast<float>(half);
    const float theirs = static_cast<float>(at::Half(half.bits, at::Half::from_bits()));
    if (!(mine == theirs || (std::isnan(mine) && std::isnan(theirs)))) ++differ;
  }
  EXPECT_EQ(differ, 0);
}

}  // namespace
}  // namespace shardweave
