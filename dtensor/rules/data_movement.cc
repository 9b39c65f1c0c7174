// Joining, cutting, copying, padding, and tensors made like others: elements move along some
// dimensions, all others may be sharded.
#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "ATen/ops/empty_strided.h"
#include "ATen/ops/eq.h"
#include "ATen/ops/split_with_sizes.h"
#include "shardweave/dtensor/rules/common.h"
#include "shardweave/dtensor/rules/families.h"
#include "shardweave/dtensor/rules/packed.h"

namespace shardweave::dtensor_internal {
namespace {

// --- joining and cutting -------------------------------------------------------------------------

// cat takes empty vectors among tensors of any shape, and ignores them.
bool ignored_by_cat(const TensorInfo& input) {
  return input.ndim() == 1 && input.sizes[0] == 0;
}

// Parts that are all cut alike, chunk by chunk, stay so.
void pack(const OpCall& call, int along, Strategies& out) {
  const int64_t total = call.output().sizes[along];
  std::vector<Placement> inputs;
  std::optional<Placement> packed;
  int64_t begin = 0;
  for (int i = 0; i < call.num_inputs(); ++i) {
    if (ignored_by_cat(call.input(i))) {
      inputs.push_back(Replicate());
      continue;
    }
    const std::optional<Placement> p = placement_of_packed(call, i, along, begin, total);
    if (!p.has_value() || (packed.has_value() && *packed != *p)) return;
    packed = p;
    inputs.push_back(call.placement(i));
    begin += call.input(i).sizes[along];
  }
  if (packed.has_value()) out.add(std::move(inputs), {*packed});
}

void cat(const OpCall& call, Strategies& out) {
  const int ndim = call.output().ndim();
  const int along = call.output().wrap_dim(call.int_arg("dim"));
  for (int d = 0; d < ndim; ++d) {
    if (d == along) continue;
    std::vector<Placement> inputs;
    for (const TensorInfo& input : call.inputs) {
      inputs.push_back(ignored_by_cat(input) ? Replicate() : Shard(d));
    }
    out.add(std::move(inputs), {Shard(d)});
  }
  pack(call, along, out);
  pass_partials(call, out, kAllReduceOps);
}

// A new dimension.
int stacked_dim(const OpCall& call) {
  const int64_t dim = call.int_arg("dim");
  return static_cast<int>(dim < 0 ? dim + call.input(0).ndim() + 1 : dim);
}

void stack_shape(OpCall& call) {
  Dims sizes = call.input(0).sizes;
  sizes.insert(sizes.begin() + stacked_dim(call), call.num_inputs());
  at::ScalarType dtype = call.input(0).dtype;
  for (const TensorInfo& input : call.inputs) dtype = c10::promoteTypes(dtype, input.dtype);
  call.outputs.push_back(contiguous_info(std::move(sizes), dtype));
}

void stack(const OpCall& call, Strategies& out) {
  const int added = stacked_dim(call);
  for (int d = 0; d < call.input(0).ndim(); ++d) {
    out.add(std::vector<Placement>(call.num_inputs(), Shard(d)), {Shard(d + (d >= added))});
  }
  pass_partials(call, out, kAllReduceOps);
}

// Where a slice of `size` elements begins; "start" may be None, negative, or too large.
int64_t first_of_slice(const c10::IValue& start, int64_t size) {
  const int64_t first = start.isNone() ? 0 : start.toInt();
  return std::clamp<int64_t>(first < 0 ? first + size : first, 0, size);
}

// A slice that is a part of a packed dimension, in terms of what this rank has of both.
void slice_packed(const c10::OperatorHandle& op, c10::Stack& stack, const Spec& packed,
                  const Spec& part) {
  BoxedCall boxed(op, stack);
  const int along = static_cast<int>(c10::maybe_wrap_dim(boxed["dim"].toInt(), packed.ndim()));
  const int64_t begin = first_of_slice(boxed["start"], packed.sizes[along]) *
                        packed.local_sizes[along] / packed.sizes[along];
  boxed["start"] = begin;
  boxed["end"] = begin + part.local_sizes[along];
  boxed.run();
}
void slice_of_packed(const c10::OperatorHandle& op, c10::Stack& stack, const LocalCall& call) {
  slice_packed(op, stack, *call.inputs[0], *call.outputs[0]);
}
void packed_of_slice(const c10::OperatorHandle& op, c10::Stack& stack, const LocalCall& call) {
  slice_packed(op, stack, *call.outputs[0], *call.inputs[0]);
}

// A part along "dim", which stays.
void slice(const OpCall& call, Strategies& out) {
  const TensorInfo& self = call.input(0);
  const int along = self.wrap_dim(call.int_arg("dim"));
  for (int d = 0; d < self.ndim(); ++d) {
    // A part that is everything is as good as no slice.
    if (d != along || call.output().sizes[d] == self.sizes[d]) out.add({Shard(d)}, {Shard(d)});
  }
  if (call.int_arg("step") == 1) {
    const int64_t begin = first_of_slice(call.arg("start"), self.sizes[along]);
    if (const auto part = placement_of_part(call, 0, along, begin, call.output().sizes[along])) {
      out.add({call.placement(0)}, {*part}, slice_of_packed);
    }
  }
  pass_partials(call, out, kAllReduceOps);
}

void split_packed(const c10::OperatorHandle& op, c10::Stack& stack, const LocalCall& call) {
  BoxedCall boxed(op, stack);
  const int along =
      static_cast<int>(c10::maybe_wrap_dim(boxed["dim"].toInt(), call.inputs[0]->ndim()));
  std::vector<int64_t> sizes;
  for (const SpecRef& part : call.outputs) sizes.push_back(part->local_sizes[along]);
  boxed.finish_list(at::split_with_sizes(boxed.tensor("self"), sizes, along));
}

// All parts along "dim".
void split(const OpCall& call, Strategies& out) {
  const TensorInfo& self = call.input(0);
  const int along = self.wrap_dim(call.int_arg("dim"));
  for (int d = 0; d < self.ndim(); ++d) {
    if (d != along) out.add({Shard(d)}, {Shard(d)});
  }
  pass_partials(call, out, kAllReduceOps);
}

// So as views, which may be parts of a packed dimension.
void split_to_views(const OpCall& call, Strategies& out) {
  split(call, out);
  const int along = call.input(0).wrap_dim(call.int_arg("dim"));
  std::vector<Placement> parts;
  int64_t begin = 0;
  for (const TensorInfo& part : call.outputs) {
    const int64_t size = part.sizes[along];
    const std::optional<Placement> p = placement_of_part(call, 0, along, begin, size);
    if (!p.has_value()) return;
    parts.push_back(*p);
    begin += size;
  }
  out.add({call.placement(0)}, std::move(parts), split_packed);
}

// "dim" goes away: select, unbind.
void remove_dim(const OpCall& call, Strategies& out) {
  const TensorInfo& self = call.input(0);
  const int gone = self.wrap_dim(call.int_arg("dim"));
  for (int d = 0; d < self.ndim(); ++d) {
    if (d != gone) out.add({Shard(d)}, {Shard(d - (d > gone))});
  }
  pass_partials(call, out, kAllReduceOps);
}

// self with a part of it, along "dim", replaced by src.
void slice_scatter(const OpCall& call, Strategies& out) {
  const TensorInfo& self = call.input(0);
  const int along = self.wrap_dim(call.int_arg("dim"));
  for (int d = 0; d < self.ndim(); ++d) {
    if (d != along) out.add({Shard(d), Shard(d)}, {Shard(d)});
  }
  pass_partials(call, out, kAllReduceOps);
}

void select_scatter(const OpCall& call, Strategies& out) {
  const TensorInfo& self = call.input(0);
  const int along = self.wrap_dim(call.int_arg("dim"));
  for (int d = 0; d < self.ndim(); ++d) {
    if (d != along) out.add({Shard(d), Shard(d - (d > along))}, {Shard(d)});
  }
  pass_partials(call, out, kAllReduceOps);
}

// Gradients: zeros but for the part that was taken.
void slice_backward(const OpCall& call, Strategies& out) {
  const int along = call.output().wrap_dim(call.int_arg("dim"));
  for (int d = 0; d < call.output().ndim(); ++d) {
    if (d != along) out.add({Shard(d)}, {Shard(d)});
  }
  if (call.int_arg("step") == 1) {
    const int64_t whole = call.output().sizes[along];
    const int64_t begin = first_of_slice(call.arg("start"), whole);
    if (const auto packed = placement_of_packed(call, 0, along, begin, whole)) {
      out.add({call.placement(0)}, {*packed}, packed_of_slice);
    }
  }
  pass_partials(call, out, kLinearOps);
}

void select_backward(const OpCall& call, Strategies& out) {
  const int along = call.output().wrap_dim(call.int_arg("dim"));
  for (int d = 0; d < call.output().ndim(); ++d) {
    if (d != along) out.add({Shard(d - (d > along))}, {Shard(d)});
  }
  pass_partials(call, out, kLinearOps);
}

void diagonal_backward(const OpCall& call, Strategies& out) {
  const int dim1 = call.output().wrap_dim(call.int_arg("dim1"));
  const int dim2 = call.output().wrap_dim(call.int_arg("dim2"));
  for (int d = 0; d < call.output().ndim(); ++d) {
    if (d == dim1 || d == dim2) continue;
    out.add({Shard(d - (d > dim1) - (d > dim2))}, {Shard(d)});
  }
  pass_partials(call, out, kLinearOps);
}

void unfold_backward(const OpCall& call, Strategies& out) {
  const int along = call.output().wrap_dim(call.int_arg("dim"));
  for (int d = 0; d < call.output().ndim(); ++d) {
    if (d != along) out.add({Shard(d)}, {Shard(d)});
  }
  pass_partials(call, out, kLinearOps);
}

void unfold_backward_shape(OpCall& call) {
  const std::vector<int64_t> sizes = call.arg("input_sizes").toIntVector();
  call.outputs.push_back(contiguous_info(Dims(sizes.begin(), sizes.end()), call.input(0).dtype));
}

// --- reordering, repeating, padding --------------------------------------------------------------

// flip(dims), rot90(dims), roll(shifts, dims): no dims means the flattened tensor for roll.
void reorder(const OpCall& call, Strategies& out) {
  const TensorInfo& self = call.input(0);
  const bool flattened = call.arg_index("shifts") >= 0 && call.arg("dims").toIntVector().empty();
  std::vector<bool> moved(self.ndim(), flattened);
  for (int64_t dim : call.arg("dims").toIntVector()) {
    if (self.ndim() > 0) moved[self.wrap_dim(dim)] = true;
  }
  for (int d = 0; d < self.ndim(); ++d) {
    if (!moved[d]) out.add({Shard(d)}, {Shard(d)});
  }
  pass_partials(call, out, kAllReduceOps);
}

// LibTorch makes it of flips and a transposition in place.
void rotated_shape(OpCall& call) {
  TensorInfo info = like_info(call.input(0));
  if (call.int_arg("k") % 2 != 0) {
    const std::vector<int64_t> dims = call.arg("dims").toIntVector();
    const int a = info.wrap_dim(dims[0]), b = info.wrap_dim(dims[1]);
    std::swap(info.sizes[a], info.sizes[b]);
    std::swap(info.strides[a], info.strides[b]);
  }
  call.outputs.push_back(std::move(info));
}

bool turns_nothing(const c10::OperatorHandle& /*op*/, absl::Span<const c10::IValue> args) {
  const int64_t ndim = args[0].toTensor().dim();
  const std::vector<int64_t> dims = args[2].toIntVector();
  const auto is_outside = [&](int64_t d) { return d < -ndim || d >= ndim; };
  return dims.size() != 2 || is_outside(dims[0]) || is_outside(dims[1]) ||
         (dims[0] - dims[1]) % ndim == 0;
}

// tril, triu: of every matrix.
void triangle(const OpCall& call, Strategies& out) {
  for (int d = 0; d < call.input(0).ndim() - 2; ++d) out.add({Shard(d)}, {Shard(d)});
  pass_partials(call, out, kAllReduceOps);  // of zeros all are 0
}

// glu: the first half of "dim" times a gate from the second. Of the last input, and all others alike.
void halves(const OpCall& call, Strategies& out) {
  const int along = call.inputs.back().wrap_dim(call.int_arg("dim"));
  for (int d = 0; d < call.inputs.back().ndim(); ++d) {
    if (d != along) out.add(std::vector<Placement>(call.num_inputs(), Shard(d)), {Shard(d)});
  }
}

// The two halves, packed along "dim", are cut alike.
std::optional<Placement> placement_of_half(const OpCall& call) {
  const int packed = call.num_inputs() - 1;
  const int along = call.input(packed).wrap_dim(call.int_arg("dim"));
  return placement_of_part(call, packed, along, 0, call.input(packed).sizes[along] / 2);
}

void glu(const OpCall& call, Strategies& out) {
  halves(call, out);
  if (const auto half = placement_of_half(call)) out.add({call.placement(0)}, {*half});
}

// Linear in the incoming gradient.
void glu_backward(const OpCall& call, Strategies& out) {
  halves(call, out);
  if (const auto half = placement_of_half(call)) {
    out.add({*half, call.placement(1)}, {call.placement(1)});
  }
  for (ReduceOp op : kLinearOps) out.add({Partial(op), Replicate()}, {Partial(op)});
}

void glu_backward_shape(OpCall& call) {
  call.outputs.push_back(contiguous_info(call.input(1).sizes, call.input(1).dtype));
}

// The sum of the diagonal: linear, but a part of a matrix has another diagonal.
void trace(const OpCall& call, Strategies& out) {
  pass_partials(call, out, kLinearOps);
}

void trace_shape(OpCall& call) {
  at::ScalarType dtype = call.input(0).dtype;
  if (c10::isIntegralType(dtype, /*includeBool=*/true)) dtype = at::kLong;
  call.outputs.push_back(contiguous_info({}, dtype));
}

// repeat: new dimensions in front.
void repeat(const OpCall& call, Strategies& out) {
  const TensorInfo& self = call.input(0);
  const int added = call.output().ndim() - self.ndim();
  const std::vector<int64_t> repeats = call.arg("repeats").toIntVector();
  for (int d = 0; d < self.ndim(); ++d) {
    if (repeats[d + added] == 1) out.add({Shard(d)}, {Shard(d + added)});
  }
  pass_partials(call, out, kAllReduceOps);
}

void constant_pad(const OpCall& call, Strategies& out) {
  const TensorInfo& self = call.input(0);
  const std::vector<int64_t> pad = call.arg("pad").toIntVector();  // the last dimension's first
  for (int d = 0; d < self.ndim(); ++d) {
    const size_t at = 2 * static_cast<size_t>(self.ndim() - 1 - d);
    if (at >= pad.size() || (pad[at] == 0 && pad[at + 1] == 0)) out.add({Shard(d)}, {Shard(d)});
  }
  const c10::Scalar value = call.arg("value").toScalar();
  if (value.isComplex()) return;
  pass_partials(call, out, {ReduceOp::kMin, ReduceOp::kMax});
  if (value.toDouble() == 0) pass_partials(call, out, kLinearOps);
}

// --- copies --------------------------------------------------------------------------------------

// The last input as the first output.
void copy(const OpCall& call, Strategies& out) {
  pointwise().function(call, out);
  const at::ScalarType from = call.inputs.back().dtype;
  const at::ScalarType to = call.output().dtype;
  if (!cast_is_linear(from, to)) return;
  pass_partials(call, out, kLinearOps);
  if (from == to) pass_partials(call, out, {ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct});
  // Rounding keeps the order.
  if (from != to && c10::isFloatingType(to) && !c10::isComplexType(from)) {
    pass_partials(call, out, {ReduceOp::kMin, ReduceOp::kMax});
  }
}

// What is there already does not matter: a Partial that is overwritten need not be reduced.
void overwrite(const OpCall& call, Strategies& out) {
  pointwise().function(call, out);
  std::vector<Placement> inputs(call.num_inputs(), Replicate());
  for (ReduceOp op : kAllReduceOps) {
    inputs[0] = Partial(op);
    out.add(inputs, {Replicate()});
  }
}

void zero(const OpCall& call, Strategies& out) {
  pointwise().function(call, out);
  pass_partials(call, out, {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin, ReduceOp::kMax});
}

// --- tensors like others -------------------------------------------------------------------------

// *_like, new_*: the values of self are not looked at. Of its shape, they lie as self does.
void made_like(const OpCall& call, Strategies& out) {
  const TensorInfo& self = call.input(0);
  const bool same_shape = call.output().sizes == self.sizes;
  for (int d = 0; d < self.ndim(); ++d) out.add({Shard(d)}, {same_shape ? Shard(d) : Replicate()});
  for (ReduceOp op : kAllReduceOps) out.add({Partial(op)}, {Replicate()});
}

// Autograd clones a gradient by new_empty_strided() and copy_(). The clone of a Partial is one: what
// is in it is overwritten, and the gradient is reduced when all are.
void made_to_be_copied_to(const OpCall& call, Strategies& out) {
  if (call.output().sizes != call.input(0).sizes) return made_like(call, out);
  for (int d = 0; d < call.input(0).ndim(); ++d) out.add({Shard(d)}, {Shard(d)});
  pass_partials(call, out, kAllReduceOps);
}

// Dense local strides, dimensions in the order that the global strides have.
void new_empty_strided(const c10::OperatorHandle& op, c10::Stack& stack, const LocalCall& call) {
  BoxedCall boxed(op, stack);
  const Spec& spec = *call.outputs[0];
  std::vector<int> order(spec.ndim());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int a, int b) {
    return spec.strides[a] == spec.strides[b] ? a > b : spec.strides[a] < spec.strides[b];
  });
  Dims strides(spec.ndim());
  int64_t next = 1;
  for (int d : order) {
    strides[d] = next;
    next *= std::max<int64_t>(spec.local_sizes[d], 1);
  }
  const auto array = [](const Dims& dims) { return c10::IntArrayRef(dims.data(), dims.size()); };
  boxed.finish({at::empty_strided(array(spec.local_sizes), array(strides),
                                  boxed.tensor("self").options().dtype(spec.dtype))});
}

// --- questions -----------------------------------------------------------------------------------

void no_outputs(OpCall&) {}

void equal(const c10::OperatorHandle& op, c10::Stack& stack) {
  BoxedCall call(op, stack);
  const at::Tensor self = call.tensor("self");
  const at::Tensor other = call.tensor("other");
  const bool result = self.sizes() == other.sizes() && at::eq(self, other).all().item<bool>();
  stack.resize(stack.size() - op.schema().arguments().size());
  stack.emplace_back(result);
}

bool names_a_dim_twice(const c10::OperatorHandle& /*op*/, absl::Span<const c10::IValue> args) {
  const int64_t ndim = args[0].toTensor().dim();
  std::vector<int64_t> dims = args[1].toIntVector();
  for (int64_t& dim : dims) dim = c10::maybe_wrap_dim(dim, ndim);
  std::sort(dims.begin(), dims.end());
  return std::adjacent_find(dims.begin(), dims.end()) != dims.end();
}

}  // namespace

void add_data_movement_rules(RuleTable& table) {
  table.add("aten::cat", Rule(cat));
  table.add("aten::stack", Rule(stack));
  // Its out= form does not resize what it writes.
  table.add("aten::_stack", Rule(stack).shapes(stack_shape));
  table.add({"aten::split", "aten::split_with_sizes", "aten::unsafe_split",
             "aten::unsafe_split_with_sizes"},
            Rule(split_to_views));
  table.add({"aten::split_copy", "aten::split_with_sizes_copy"}, Rule(split));
  table.add({"aten::slice", "aten::slice_copy"}, Rule(slice));
  table.add({"aten::select", "aten::select_copy", "aten::unbind", "aten::unbind_copy"},
            Rule(remove_dim));
  table.add("aten::slice_scatter", Rule(slice_scatter));
  table.add("aten::select_scatter", Rule(select_scatter));
  table.add("aten::slice_backward", Rule(slice_backward).size_arg("input_sizes"));
  table.add("aten::select_backward", Rule(select_backward).size_arg("input_sizes"));
  table.add("aten::diagonal_backward", Rule(diagonal_backward).size_arg("input_sizes"));
  table.add("aten::unfold_backward",
            Rule(unfold_backward).size_arg("input_sizes").shapes(unfold_backward_shape));

  table.add("aten::roll", Rule(reorder).shapes(like_input));
  table.add("aten::flip", Rule(reorder).shapes(like_input).refuses(names_a_dim_twice));
  table.add("aten::rot90", Rule(reorder).shapes(rotated_shape).refuses(turns_nothing));
  table.add({"aten::tril", "aten::triu"}, Rule(triangle));
  table.add("aten::glu", Rule(glu));
  table.add("aten::glu_backward", Rule(glu_backward).shapes(glu_backward_shape));
  table.add("aten::trace", Rule(trace).shapes(trace_shape));
  table.add("aten::repeat", Rule(repeat));
  table.add("aten::constant_pad_nd", Rule(constant_pad).reads({"value"}));
  table.add({"aten::sort", "aten::topk"}, along_dim());

  table.add({"aten::clone", "aten::copy", "aten::lift", "aten::_to_copy"}, Rule(copy));
  table.add("aten::copy_", Rule(copy).shapes_like({0}));
  table.add({"aten::fill", "aten::fill_"}, Rule(overwrite));
  table.add({"aten::zero", "aten::zero_"}, Rule(zero));

  table.add({"aten::empty_like", "aten::full_like", "aten::ones_like", "aten::zeros_like"},
            Rule(made_like));
  table.add({"aten::new_empty", "aten::new_full", "aten::new_ones", "aten::new_zeros"},
            Rule(made_like).size_arg("size"));
  table.add("aten::new_empty_strided", Rule(made_to_be_copied_to).runs(new_empty_strided));

  table.add("aten::_local_scalar_dense",
            Rule([](const OpCall&, Strategies&) {}).shapes(no_outputs));
  table.add("aten::equal", Rule::composed(equal));
  table.add({"aten::allclose", "aten::is_same_size", "aten::_is_all_true", "aten::_is_any_true"},
            Rule::composed(decomposed));
}

}  // namespace shardweave::dtensor_internal
