// Random operators. They fill each rank's part of a tensor from the mesh's stream of numbers, by
// global index (see random.h): nothing is communicated, and no generator of LibTorch is used.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <type_traits>

#include "ATen/Dispatch.h"
#include "ATen/ops/add.h"
#include "ATen/ops/bernoulli.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/empty_like.h"
#include "ATen/ops/ones_like.h"
#include "ATen/ops/view_as_real.h"
#include "absl/strings/str_cat.h"
#include "shardweave/dtensor/engine/detour.h"
#include "shardweave/dtensor/engine/philox.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "shardweave/dtensor/rules/common.h"
#include "shardweave/dtensor/rules/element_order.h"
#include "shardweave/dtensor/rules/families.h"

namespace shardweave::dtensor_internal {
namespace {

// --- from uniform and normal numbers to what was asked for ---------------------------------------

template <typename T>
using OpMath = std::conditional_t<std::is_same_v<T, double>, double, float>;

constexpr size_t kChunk = 256;

// out = convert(number) for every element that this rank holds.
template <typename Number, typename T, typename Read, typename Convert>
void fill(const Spec& spec, T* out, Read read, Convert convert) {
  alignas(64) Number numbers[kChunk];
  for_each_run(spec, [&](int64_t first, int64_t count) {
    while (count > 0) {
      const size_t n = std::min<size_t>(kChunk, static_cast<size_t>(count));
      read(first, absl::MakeSpan(numbers, n));
      for (size_t i = 0; i < n; ++i) out[i] = static_cast<T>(convert(numbers[i]));
      out += n;
      first += static_cast<int64_t>(n);
      count -= static_cast<int64_t>(n);
    }
  });
}

template <typename Number, typename T, typename Convert>
void from_bits(PhiloxStream& stream, const Spec& spec, T* out, Convert convert) {
  fill<Number>(
      spec, out, [&](int64_t first, absl::Span<Number> to) { stream.bits(first, to); }, convert);
}

template <typename Number, typename T, typename Convert>
void from_normal(PhiloxStream& stream, const Spec& spec, T* out, Convert convert) {
  fill<Number>(
      spec, out, [&](int64_t first, absl::Span<Number> to) { stream.normal(first, to); }, convert);
}

// In (0, 1), both ends excluded.
double open_unit(uint64_t bits) {
  return (static_cast<double>(bits >> 12) + 0.5) * 0x1p-52;
}

// In [from, to), with as many random digits as T has.
template <typename T>
void uniform(PhiloxStream& stream, const Spec& spec, T* out, double from_value, double to_value) {
  using Math = OpMath<T>;
  using Bits = std::conditional_t<std::is_same_v<T, double>, uint64_t, uint32_t>;
  constexpr int kDigits = std::numeric_limits<T>::digits;
  constexpr int kShift = std::numeric_limits<Bits>::digits - kDigits;
  const Math unit = std::ldexp(Math{1}, -kDigits);
  const Math from = static_cast<Math>(from_value);
  const Math to = static_cast<Math>(to_value);
  from_bits<Bits>(stream, spec, out, [=](Bits bits) {
    const T x = static_cast<T>(static_cast<Math>(bits >> kShift) * unit * (to - from) + from);
    return static_cast<Math>(x) < to ? x : static_cast<T>(from);  // rounded up to the end
  });
}

template <typename T>
void normal(PhiloxStream& stream, const Spec& spec, T* out, double mean_value, double std_value) {
  using Math = OpMath<T>;
  const Math mean = static_cast<Math>(mean_value);
  const Math std = static_cast<Math>(std_value);
  from_normal<Math>(stream, spec, out, [=](Math z) { return z * std + mean; });
}

// Probabilities are multiples of 2^-32.
template <typename T>
void bernoulli(PhiloxStream& stream, const Spec& spec, T* out, double p) {
  const uint64_t threshold = static_cast<uint64_t>(p * 0x1p32 + 0.5);
  from_bits<uint32_t>(stream, spec, out, [=](uint32_t bits) { return bits < threshold; });
}

template <typename T>
void bernoulli_each(PhiloxStream& stream, const Spec& spec, T* out, const double* p) {
  from_bits<uint32_t>(stream, spec, out, [=](uint32_t bits) mutable {
    return static_cast<double>(bits) * 0x1p-32 < *p++;
  });
}

// From `from` on, `range` numbers; 0 stands for 2^64.
template <typename T>
void integers(PhiloxStream& stream, const Spec& spec, T* out, int64_t from, uint64_t range) {
  from_bits<uint64_t>(stream, spec, out, [=](uint64_t bits) {
    const uint64_t i =
        range == 0 ? bits
                   : static_cast<uint64_t>((static_cast<unsigned __int128>(bits) * range) >> 64);
    return static_cast<int64_t>(static_cast<uint64_t>(from) + i);
  });
}

// The largest integer that random_() draws: all up to it are exact in T.
template <typename T>
int64_t largest_integer() {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<int64_t>(std::numeric_limits<T>::max());
  } else {
    return int64_t{1} << std::numeric_limits<T>::digits;
  }
}

// --- operators in place --------------------------------------------------------------------------

// A Partial holds the numbers once: the other ranks hold what changes nothing.
void neutralize(const Spec& spec, const at::Tensor& local) {
  for (int m = 0; m < spec.layout.mesh_ndim(); ++m) {
    if (spec.context->coordinate()[m] == 0) continue;
    if (spec.layout[m].is_partial(ReduceOp::kSum)) local.zero_();
    if (spec.layout[m].is_partial(ReduceOp::kProduct)) local.fill_(1);
  }
}

// Where an in-place operator on DTensors writes its numbers.
class Draw {
 public:
  Draw(const c10::OperatorHandle& op, c10::Stack& stack)
      : call_(op, stack), self_(call_.tensor("self")) {
    if (!is_dtensor(self_)) refuse(op, "'self' is a plain tensor, another argument a DTensor");
    check_writable(meta(), op.operator_name().name);
    if (!call_["generator"].isNone()) {
      refuse(op, "takes no generator; DTensors draw from their mesh, which can be seeded");
    }
    check_arguments(op, stack);
    const at::Tensor& local = meta().local();
    const bool direct = local.is_contiguous() && local.is_cpu();
    buffer_ =
        direct ? local
               : at::empty(local.sizes(), at::TensorOptions(local.scalar_type()).device(at::kCPU));
  }

  BoxedCall& call() { return call_; }
  const Spec& spec() { return *meta().spec; }
  const at::Tensor& self() const { return self_; }
  const at::Tensor& buffer() const { return buffer_; }
  double number(std::string_view name) { return call_[name].toDouble(); }
  // The stream of numbers for this call, which advances the mesh's state.
  PhiloxStream stream() {
    PhiloxState& state = meta().context->random;
    return PhiloxStream(state.seed, state.offset++);
  }

  void finish() {
    const at::Tensor& local = meta().local();
    if (!buffer_.is_same(local)) local.copy_(buffer_);
    neutralize(spec(), local);
    written(meta(), "random");
    call_.finish({self_});
  }

 private:
  DTensorMeta& meta() { return meta_of(self_); }

  [[noreturn]] static void refuse(const c10::OperatorHandle& op, const char* why) {
    throw Error(
        absl::InvalidArgumentError(absl::StrCat(c10::toString(op.operator_name()), ": ", why)));
  }

  // By LibTorch, on a tensor without elements: types and ranges are its to judge.
  void check_arguments(const c10::OperatorHandle& op, const c10::Stack& stack) {
    c10::Stack copy(stack.end() - static_cast<ptrdiff_t>(op.schema().arguments().size()),
                    stack.end());
    for (c10::IValue& value : copy) {
      if (value.isTensor())
        value = at::empty({0}, at::TensorOptions(value.toTensor().scalar_type()));
    }
    op.callBoxed(copy);
  }

  BoxedCall call_;
  const at::Tensor self_;
  at::Tensor buffer_;  // the local tensor, or what is copied there
};

// Calls f(pointer to the elements, of the tensor's type).
template <typename F>
void for_floating(const at::Tensor& buffer, F f) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, buffer.scalar_type(), "random",
                                  [&] { f(buffer.mutable_data_ptr<scalar_t>()); });
}

template <typename F>
void for_all_types(const at::Tensor& buffer, F f) {
  AT_DISPATCH_ALL_TYPES_AND3(at::kHalf, at::kBFloat16, at::kBool, buffer.scalar_type(), "random",
                             [&] { f(buffer.mutable_data_ptr<scalar_t>()); });
}

// Complex numbers are drawn as pairs of reals, as LibTorch does: calls f(self as reals), if self is
// complex.
template <typename F>
bool drawn_as_pairs(const c10::OperatorHandle& op, c10::Stack& stack, F f) {
  BoxedCall call(op, stack);
  const at::Tensor self = call.tensor("self");
  if (!self.is_complex()) return false;
  f(call, at::view_as_real(self));
  call.finish({self});
  return true;
}

void uniform_(const c10::OperatorHandle& op, c10::Stack& stack) {
  if (drawn_as_pairs(op, stack, [](BoxedCall& call, at::Tensor reals) {
        reals.uniform_(call["from"].toDouble(), call["to"].toDouble());
      })) {
    return;
  }
  Draw draw(op, stack);
  PhiloxStream stream = draw.stream();
  for_floating(draw.buffer(), [&](auto* out) {
    uniform(stream, draw.spec(), out, draw.number("from"), draw.number("to"));
  });
  draw.finish();
}

void normal_(const c10::OperatorHandle& op, c10::Stack& stack) {
  if (drawn_as_pairs(op, stack, [](BoxedCall& call, at::Tensor reals) {
        reals.normal_(0, call["std"].toDouble() / std::numbers::sqrt2);
        reals.select(-1, 0).add_(call["mean"].toDouble());
      })) {
    return;
  }
  Draw draw(op, stack);
  PhiloxStream stream = draw.stream();
  for_floating(draw.buffer(), [&](auto* out) {
    normal(stream, draw.spec(), out, draw.number("mean"), draw.number("std"));
  });
  draw.finish();
}

void log_normal_(const c10::OperatorHandle& op, c10::Stack& stack) {
  Draw draw(op, stack);
  PhiloxStream stream = draw.stream();
  const double mean = draw.number("mean");
  const double std = draw.number("std");
  for_floating(draw.buffer(), [&](auto* out) {
    from_normal<double>(stream, draw.spec(), out,
                        [=](double z) { return std::exp(z * std + mean); });
  });
  draw.finish();
}

void exponential_(const c10::OperatorHandle& op, c10::Stack& stack) {
  Draw draw(op, stack);
  PhiloxStream stream = draw.stream();
  const double rate = draw.number("lambd");
  for_floating(draw.buffer(), [&](auto* out) {
    from_bits<uint64_t>(stream, draw.spec(), out,
                        [=](uint64_t bits) { return -std::log(open_unit(bits)) / rate; });
  });
  draw.finish();
}

void cauchy_(const c10::OperatorHandle& op, c10::Stack& stack) {
  Draw draw(op, stack);
  PhiloxStream stream = draw.stream();
  const double median = draw.number("median");
  const double sigma = draw.number("sigma");
  for_floating(draw.buffer(), [&](auto* out) {
    from_bits<uint64_t>(stream, draw.spec(), out, [=](uint64_t bits) {
      return median + sigma * std::tan(std::numbers::pi * (open_unit(bits) - 0.5));
    });
  });
  draw.finish();
}

// The number of trials up to the first success.
void geometric_(const c10::OperatorHandle& op, c10::Stack& stack) {
  Draw draw(op, stack);
  PhiloxStream stream = draw.stream();
  const double log_failure = std::log1p(-draw.number("p"));
  for_all_types(draw.buffer(), [&](auto* out) {
    from_bits<uint64_t>(stream, draw.spec(), out, [=](uint64_t bits) {
      return std::max(1.0, std::ceil(std::log(open_unit(bits)) / log_failure));
    });
  });
  draw.finish();
}

void bernoulli_(const c10::OperatorHandle& op, c10::Stack& stack) {
  Draw draw(op, stack);
  PhiloxStream stream = draw.stream();
  const c10::IValue& p = draw.call()["p"];
  if (p.isDouble()) {
    for_all_types(draw.buffer(),
                  [&](auto* out) { bernoulli(stream, draw.spec(), out, p.toDouble()); });
    draw.finish();
    return;
  }
  // Each element's own probability, laid out as `self`.
  Placements placements = draw.spec().layout.placements();
  for (Placement& placement : placements) {
    if (placement.is_partial()) placement = Replicate();
  }
  const Layout layout = value_or_throw(Layout::create(placements, draw.spec().layout.order()));
  at::Tensor each = p.toTensor();
  if (is_dtensor(each)) {
    each = meta_of(redistribute(each.expand_as(draw.self()), layout)).local();
  } else {
    each = each.expand(draw.buffer().sizes());  // a plain scalar
  }
  each = each.to(at::TensorOptions(at::kDouble).device(at::kCPU)).contiguous();
  for_all_types(draw.buffer(), [&](auto* out) {
    bernoulli_each(stream, draw.spec(), out, each.const_data_ptr<double>());
  });
  draw.finish();
}

// random_(), random_(to), random_(from, to or None)
void random_(const c10::OperatorHandle& op, c10::Stack& stack) {
  Draw draw(op, stack);
  PhiloxStream stream = draw.stream();
  BoxedCall& call = draw.call();
  const int64_t from = call.has("from") ? call["from"].toInt() : 0;
  const bool bounded = call.has("to") && !call["to"].isNone();
  for_all_types(draw.buffer(), [&](auto* out) {
    using T = std::remove_pointer_t<decltype(out)>;
    const uint64_t end = bounded ? static_cast<uint64_t>(call["to"].toInt())
                                 : static_cast<uint64_t>(largest_integer<T>()) + 1;
    integers(stream, draw.spec(), out, from, end - static_cast<uint64_t>(from));
  });
  draw.finish();
}

// --- operators made of these ---------------------------------------------------------------------

void bernoulli_out(const c10::OperatorHandle& op, c10::Stack& stack) {
  BoxedCall call(op, stack);
  call.finish({at::bernoulli(call.tensor("self"))});
}

// normal(mean, std) with tensors for one or both.
void normal_around(const c10::OperatorHandle& op, c10::Stack& stack) {
  BoxedCall call(op, stack);
  const c10::IValue& mean = call["mean"];
  const c10::IValue& std = call["std"];
  at::Tensor like = mean.isTensor() ? mean.toTensor() : std.toTensor();
  if (mean.isTensor() && std.isTensor()) like = at::add(mean.toTensor(), std.toTensor());
  at::Tensor result = at::empty_like(like).normal_(0, std.isTensor() ? 1 : std.toDouble());
  if (std.isTensor()) result.mul_(std.toTensor());
  if (mean.isTensor()) {
    result.add_(mean.toTensor());
  } else {
    result.add_(mean.toDouble());
  }
  call.finish({std::move(result)});
}

void native_dropout(const c10::OperatorHandle& op, c10::Stack& stack) {
  BoxedCall call(op, stack);
  const at::Tensor input = call.tensor("input");
  const double p = call["p"].toDouble();
  const auto bools = at::TensorOptions(at::kBool);
  if (!call["train"].isNone() && !call["train"].toBool()) {
    call.finish({input.clone(), at::ones_like(input, bools)});
    return;
  }
  const at::Tensor mask = at::empty_like(input, bools).bernoulli_(1 - p);
  call.finish({input.mul(mask).mul_(p == 1 ? 0.0 : 1 / (1 - p)), mask});
}

}  // namespace

void add_random_rules(RuleTable& table) {
  table.add("aten::uniform_", composed(uniform_));
  table.add("aten::normal_", composed(normal_));
  table.add("aten::log_normal_", composed(log_normal_));
  table.add("aten::exponential_", composed(exponential_));
  table.add("aten::cauchy_", composed(cauchy_));
  table.add("aten::geometric_", composed(geometric_));
  table.add("aten::bernoulli_", composed(bernoulli_));
  table.add("aten::random_", composed(random_));
  table.add({"aten::bernoulli", "aten::cauchy", "aten::exponential", "aten::geometric",
             "aten::log_normal", "aten::normal.out", "aten::normal_functional", "aten::rand_like",
             "aten::randint_like", "aten::randn_like", "aten::random", "aten::uniform"},
            composed(decomposed));
  table.add("aten::bernoulli.out", composed(bernoulli_out));
  table.add(
      {"aten::normal.Tensor_float", "aten::normal.float_Tensor", "aten::normal.Tensor_Tensor"},
      composed(normal_around));
  table.add("aten::native_dropout", composed(native_dropout));
}

}  // namespace shardweave::dtensor_internal
