#include "shardweave/dtensor/engine/random_draw.h"

#include <algorithm>
#include <cmath>

namespace shardweave::dtensor_internal {
namespace {

constexpr size_t kChunk = 256;

void read(PhiloxStream& stream, int64_t first, absl::Span<uint32_t> out) {
  stream.bits(first, out);
}
void read(PhiloxStream& stream, int64_t first, absl::Span<uint64_t> out) {
  stream.bits(first, out);
}
void read(PhiloxStream& stream, int64_t first, absl::Span<float> out) {
  stream.normal(first, out);
}
void read(PhiloxStream& stream, int64_t first, absl::Span<double> out) {
  stream.normal(first, out);
}

template <typename Functor>
void draw_elements(const Functor& functor, PhiloxStream& stream, void* memory,
                   absl::FunctionRef<void(RunVisitor)> runs) {
  using Number = typename Functor::Number;
  auto* const out = static_cast<typename Functor::Element*>(memory);
  alignas(64) Number numbers[kChunk];
  int64_t at = 0;
  runs([&](int64_t first, int64_t count) {
    while (count > 0) {
      const int64_t n = std::min<int64_t>(kChunk, count);
      read(stream, first, absl::MakeSpan(numbers, static_cast<size_t>(n)));
      // Copies: what is written may be bytes, which may be anything's.
      typename Functor::Element* const to = out + at;
      const int64_t base = at;
      const Functor element = functor;
      for (int64_t i = 0; i < n; ++i) to[i] = element(numbers[i], base + i);
      at += n;
      first += n;
      count -= n;
    }
  });
}

}  // namespace

std::string_view to_string(RandomKind kind) {
  constexpr std::string_view kNames[kNumRandomKinds] = {
      "uniform",   "normal",    "log_normal",     "exponential", "cauchy",
      "geometric", "bernoulli", "bernoulli_each", "integers"};
  return kNames[static_cast<int>(kind)];
}

RandomDraw RandomDraw::geometric(DType dtype, double p) {
  return {.kind = RandomKind::kGeometric, .dtype = dtype, .a = std::log1p(-p)};
}

bool can_draw(RandomKind kind, DType dtype) {
  return with_functor({.kind = kind, .dtype = dtype}, [](const auto&) {});
}

std::string kernel_name(const RandomDraw& draw) {
  std::string name(to_string(draw.kind));
  name += '_';
  name += to_string(draw.dtype);
  return name;
}

void draw_numbers(const RandomDraw& draw, PhiloxStream stream, void* out,
                  absl::FunctionRef<void(RunVisitor)> runs) {
  with_functor(draw, [&](const auto& functor) { draw_elements(functor, stream, out, runs); });
}

}  // namespace shardweave::dtensor_internal
