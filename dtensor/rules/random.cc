// Random operators. They fill each rank's part of a tensor from the mesh's stream of numbers, by
// global index (see random.h): nothing is communicated, and no generator of LibTorch is used.
#include <limits>
#include <numbers>
#include <vector>

#include "ATen/ops/add.h"
#include "ATen/ops/bernoulli.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/empty_like.h"
#include "ATen/ops/ones_like.h"
#include "ATen/ops/view_as_real.h"
#include "absl/strings/str_cat.h"
#include "shardweave/dtensor/cuda/random_fill.h"
#include "shardweave/dtensor/engine/capture.h"
#include "shardweave/dtensor/engine/detour.h"
#include "shardweave/dtensor/engine/philox.h"
#include "shardweave/dtensor/engine/random_draw.h"
#include "shardweave/dtensor/engine/redistribute.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "shardweave/dtensor/engine/tensor_work.h"
#include "shardweave/dtensor/rules/common.h"
#include "shardweave/dtensor/rules/element_order.h"
#include "shardweave/dtensor/rules/families.h"

namespace shardweave::dtensor_internal {
namespace {

// The largest integer that random_() draws: all up to it are exact.
int64_t largest_integer(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return int64_t{1} << std::numeric_limits<double>::digits;
    case at::kFloat:
      return int64_t{1} << std::numeric_limits<float>::digits;
    case at::kHalf:
      return int64_t{1} << std::numeric_limits<at::Half>::digits;
    case at::kBFloat16:
      return int64_t{1} << std::numeric_limits<at::BFloat16>::digits;
    case at::kInt:
      return std::numeric_limits<int32_t>::max();
    case at::kShort:
      return std::numeric_limits<int16_t>::max();
    case at::kChar:
      return std::numeric_limits<int8_t>::max();
    case at::kByte:
      return std::numeric_limits<uint8_t>::max();
    case at::kBool:
      return 1;
    default:
      return std::numeric_limits<int64_t>::max();
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
      : op_(op), call_(op, stack), self_(call_.tensor("self")) {
    if (!is_dtensor(self_)) refuse(op, "'self' is a plain tensor, another argument a DTensor");
    check_writable(meta(), op.operator_name().name);
    if (!call_["generator"].isNone()) {
      refuse(op, "takes no generator; DTensors draw from their mesh, which can be seeded");
    }
    check_arguments(op, stack);
  }

  BoxedCall& call() { return call_; }
  const Spec& spec() { return *meta().spec; }
  const at::Tensor& self() const { return self_; }
  const at::Tensor& local() { return meta().local(); }
  DType dtype() { return comm_dtype(local().scalar_type()); }
  double number(std::string_view name) { return call_[name].toDouble(); }

  // Draws the elements that this rank holds, which advances the mesh's state.
  void finish(const RandomDraw& draw) {
    if (local().is_complex() || !can_draw(draw.kind, draw.dtype)) {
      throw Error(absl::UnimplementedError(
          absl::StrCat(c10::toString(op_.operator_name()), ": not implemented for '",
                       c10::toString(local().scalar_type()), "'")));
    }
    check_captured_mesh(*meta().context);
    PhiloxState& state = meta().context->random.state;
    if (!drawn_on_device(draw, state)) draw_on_host(draw, state);
    ++state.offset;
    neutralize(spec(), local());
    // Whoever has the part, or a copy of it, is told.
    if (!local().is_inference()) local().unsafeGetTensorImpl()->bump_version();
    written(meta(), "random");
    call_.finish({self_});
  }

 private:
  DTensorMeta& meta() { return meta_of(self_); }

  void draw_on_host(const RandomDraw& draw, const PhiloxState& state) {
    check_drawn_by_host(*meta().context);
    const bool direct = local().is_contiguous() && local().is_cpu();
    const at::Tensor out =
        direct ? local() : at::empty(local().sizes(), local().options().device(at::kCPU));
    draw_numbers(draw, PhiloxStream(state.seed, state.offset), out.mutable_data_ptr(),
                 [&](RunVisitor run) { for_each_run(spec(), run); });
    if (!direct) local().copy_(out);
  }

  // By a kernel, in the order of LibTorch's stream: where the program has kernels (random_fill.h).
  bool drawn_on_device(const RandomDraw& draw, const PhiloxState& state) {
    const at::Tensor& local = this->local();
    if (!local.is_cuda() || !has_random_kernels() || draw.each != nullptr) return false;
    // A GPU, or a driver, that they are not for: the host draws the same numbers.
    if (!load_random_kernels(local.get_device()).ok()) return false;
    const MeshContext& context = *meta().context;
    std::vector<Intervals> held;
    for (int d = 0; d < spec().ndim(); ++d) {
      held.push_back(local_intervals(spec().layout, context.mesh().shape(), context.coordinate(),
                                     spec().sizes, d));
    }
    const std::vector<IndexBox> boxes =
        index_boxes(held, spec().sizes, {local.strides().data(), local.strides().size()});
    const Capture* const capture = context.captures.under_way;
    const RandomSource source = {
        .seed = state.seed,
        .stream = state.offset,
        .added = capture == nullptr ? nullptr : capture->random_offset(state)};
    throw_if_error(fill_random(
        draw, source, boxes, local.mutable_data_ptr(),
        {.device = local.get_device(), .stream = current_stream(local.device()).handle}));
    return true;
  }

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

  const c10::OperatorHandle& op_;
  BoxedCall call_;
  const at::Tensor self_;
};

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
  draw.finish(RandomDraw::uniform(draw.dtype(), draw.number("from"), draw.number("to")));
}

void normal_(const c10::OperatorHandle& op, c10::Stack& stack) {
  if (drawn_as_pairs(op, stack, [](BoxedCall& call, at::Tensor reals) {
        reals.normal_(0, call["std"].toDouble() / std::numbers::sqrt2);
        reals.select(-1, 0).add_(call["mean"].toDouble());
      })) {
    return;
  }
  Draw draw(op, stack);
  draw.finish(RandomDraw::normal(draw.dtype(), draw.number("mean"), draw.number("std")));
}

void log_normal_(const c10::OperatorHandle& op, c10::Stack& stack) {
  Draw draw(op, stack);
  draw.finish(RandomDraw::log_normal(draw.dtype(), draw.number("mean"), draw.number("std")));
}

void exponential_(const c10::OperatorHandle& op, c10::Stack& stack) {
  Draw draw(op, stack);
  draw.finish(RandomDraw::exponential(draw.dtype(), draw.number("lambd")));
}

void cauchy_(const c10::OperatorHandle& op, c10::Stack& stack) {
  Draw draw(op, stack);
  draw.finish(RandomDraw::cauchy(draw.dtype(), draw.number("median"), draw.number("sigma")));
}

void geometric_(const c10::OperatorHandle& op, c10::Stack& stack) {
  Draw draw(op, stack);
  draw.finish(RandomDraw::geometric(draw.dtype(), draw.number("p")));
}

void bernoulli_(const c10::OperatorHandle& op, c10::Stack& stack) {
  Draw draw(op, stack);
  const c10::IValue& p = draw.call()["p"];
  if (p.isDouble()) {
    draw.finish(RandomDraw::bernoulli(draw.dtype(), p.toDouble()));
    return;
  }
  // Each element's own probability, laid out as `self`.
  Placements placements = draw.spec().layout.placements();
  for (Placement& placement : placements) {
    if (placement.is_partial()) placement = Replicate();
  }
  const Layout layout = value_or_throw(Layout::create(placements, draw.spec().layout.order()));
  draw.call()["p"] = p.toTensor().detach();  // what is drawn has no gradient
  at::Tensor each =
      meta_of(redistribute(draw.call().dtensor("p").expand_as(draw.self()), layout)).local();
  each = each.to(at::TensorOptions(at::kDouble).device(at::kCPU)).contiguous();
  draw.finish(RandomDraw::bernoulli_each(draw.dtype(), each.const_data_ptr<double>()));
}

// random_(), random_(to), random_(from, to or None)
void random_(const c10::OperatorHandle& op, c10::Stack& stack) {
  Draw draw(op, stack);
  BoxedCall& call = draw.call();
  const int64_t from = call.has("from") ? call["from"].toInt() : 0;
  const bool bounded = call.has("to") && !call["to"].isNone();
  const uint64_t end = bounded
                           ? static_cast<uint64_t>(call["to"].toInt())
                           : static_cast<uint64_t>(largest_integer(draw.self().scalar_type())) + 1;
  draw.finish(RandomDraw::integers(draw.dtype(), from, end));
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
