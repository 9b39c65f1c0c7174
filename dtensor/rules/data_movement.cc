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
  return static_cast<int>(dim < 0 ? dim + call.inputs[0].ndim() + 1 : dim);
}

void stack_shape(OpCall& call) {
  Dims sizes = call.inputs[0].sizes;
  sizes.insert(sizes.begin() + stacked_dim(call), call.num_inputs());
  at::ScalarType dtype = call.inputs[0].dtype;
  for (const TensorInfo& input : call.inputs) dtype = c10::promoteTypes(dtype, input.dtype);
  call.outputs.push_back(contiguous_info(std::move(sizes), dtype));
}

void stack(const OpCall& call, Strategies& out) {
  const int added = stacked_dim(call);
  for (int d = 0; d < call.inputs[0].ndim(); ++d) {
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
  slice_packed(op, stack, BoxedCall(op, stack).spec(call, "self"), *call.outputs[0]);
}
void packed_of_slice(const c10::OperatorHandle& op, c10::Stack& stack, const LocalCall& call) {
  slice_packed(op, stack, *call.outputs[0], BoxedCall(op, stack).spec(call, "grad_output"));
}

// A part along "dim", which stays.
void slice(const OpCall& call, Strategies& out) {
  const TensorInfo& self = call.input("self");
  const int along = self.wrap_dim(call.int_arg("dim"));
  for (int d = 0; d < self.ndim(); ++d) {
    // A part that is everything is as good as no slice.
    if (d != along || call.output().sizes[d] == self.sizes[d]) out.add({Shard(d)}, {Shard(d)});
  }
  if (call.int_arg("step") == 1) {
    const int64_t begin = first_of_slice(call.arg("start"), self.sizes[along]);
    const int64_t size = call.output().sizes[along];
    if (const auto part = placement_of_part(call, call.input_index("self"), along, begin, size)) {
      out.add({{"self", call.placement("self")}}, {*part}, slice_of_packed);
    }
  }
  pass_partials(call, out, kAllReduceOps);
}

void split_packed(const c10::OperatorHandle& op, c10::Stack& stack, const LocalCall& call) {
  BoxedCall boxed(op, stack);
  const int along =
      static_cast<int>(c10::maybe_wrap_dim(boxed["dim"].toInt(), boxed.spec(call, "self").ndim()));
  std::vector<int64_t> sizes;
  for (const SpecRef& part : call.outputs) sizes.push_back(part->local_sizes[along]);
  boxed.finish_list(at::split_with_sizes(boxed.tensor("self"), sizes, along));
}

// All parts along "dim".
void split(const OpCall& call, Strategies& out) {
  const TensorInfo& self = call.input("self");
  const int along = self.wrap_dim(call.int_arg("dim"));
  for (int d = 0; d < self.ndim(); ++d) {
    if (d != along) out.add({Shard(d)}, {Shard(d)});
  }
  pass_partials(call, out, kAllReduceOps);
}

// So as views, which may be parts of a packed dimension.
void split_to_views(const OpCall& call, Strategies& out) {
  split(call, out);
  const int self = call.input_index("self");
  const int along = call.input(self).wrap_dim(call.int_arg("dim"));
  std::vector<Placement> parts;
  int64_t begin = 0;
  for (const TensorInfo& part : call.outputs) {
    const int64_t size = part.sizes[along];
    const std::optional<Placement> p = placement_of_part(call, self, along, begin, size);
    if (!p.has_value()) return;
    parts.push_back(*p);
    begin += size;
  }
  out.add({{"self", call.placement("self")}}, std::move(parts), split_packed);
}

// "dim" goes away: select, unbind.
void remove_dim(const OpCall& call, Strategies& out) {
  const TensorInfo& self = call.input("self");
  const int gone = self.wrap_dim(call.int_arg("dim"));
  for (int d = 0; d < self.ndim(); ++d) {
    if (d != gone) out.add({Shard(d)}, {Shard(d - (d > gone))});
  }
  pass_partials(call, out, kAllReduceOps);
}

// self with a part of it, along "dim", replaced by src.
void slice_scatter(const OpCall& call, Strategies& out) {
  const TensorInfo& self = call.input("self");
  const int along = self.wrap_dim(call.int_arg("dim"));
  for (int d = 0; d < self.ndim(); ++d) {
    if (d != along) out.add({{"self", Shard(d)}, {"src", Shard(d)}}, {Shard(d)});
  }
  pass_partials(call, out, kAllReduceOps);
}

void select_scatter(const OpCall& call, Strategies& out) {
  const TensorInfo& self = call.input("self");
  const int along = self.wrap_dim(call.int_arg("dim"));
  for (int d = 0; d < self.ndim(); ++d) {
    if (d == along) continue;
    out.add({{"self", Shard(d)}, {"src", Shard(d - (d > along))}}, {Shard(d)});
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
    const int grad = call.input_index("grad_output");
    if (const auto packed = placement_of_packed(call, grad, along, begin, whole)) {
      out.add({{"grad_output", call.placement(grad)}}, {*packed}, packed_of_slice);
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

void unfold_backward(const OpCall& call, Strategies& out) {
  const int along = call.output().wrap_dim(call.int_arg("dim"));
  for (int d = 0; d < call.output().ndim(); ++d) {
    if (d != along) out.add({Shard(d)}, {Shard(d)});
  }
  pass_partials(call, out, kLinearOps);
}

void unfold_backward_shape(OpCall& call) {
  const std::vector<int64_t> sizes = call.arg("input_sizes").toIntVector();
  call.outputs.push_back(
      contiguous_info(Dims(sizes.begin(), sizes.end()), call.input("grad_in").dtype));
}

// --- reordering, repeating, padding --------------------------------------------------------------

// flip(dims), rot90(dims), roll(shifts, dims): no dims means the flattened tensor for roll.
void reorder(const OpCall& call, Strategies& out) {
  const TensorInfo& self = call.input("self");
  const bool flattened = call.has_arg("shifts") && call.arg("dims").toIntVector().empty();
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
  TensorInfo info = like_info(call.input("self"));
  if (call.int_arg("k") % 2 != 0) {
    const std::vector<int64_t> dims = call.arg("dims").toIntVector();
    const int a = info.wrap_dim(dims[0]), b = info.wrap_dim(dims[1]);
    std::swap(info.sizes[a], info.sizes[b]);
    std::swap(info.strides[a], info.strides[b]);
  }
  call.outputs.push_back(std::move(info));
}

bool turns_nothing(const Arguments& args) {
  const int64_t ndim = args.tensor("self").dim();
  const std::vector<int64_t> dims = args["dims"].toIntVector();
  const auto is_outside = [&](int64_t d) { return d < -ndim || d >= ndim; };
  return dims.size() != 2 || is_outside(dims[0]) || is_outside(dims[1]) ||
         (dims[0] - dims[1]) % ndim == 0;
}

// glu: the first half of "dim" times a gate from the second. All inputs alike.
void halves(const OpCall& call, Strategies& out) {
  const TensorInfo& self = call.input("self");
  const int along = self.wrap_dim(call.int_arg("dim"));
  for (int d = 0; d < self.ndim(); ++d) {
    if (d != along) out.add(std::vector<Placement>(call.num_inputs(), Shard(d)), {Shard(d)});
  }
}

// The two halves, packed along "dim", are cut alike.
std::optional<Placement> placement_of_half(const OpCall& call) {
  const int self = call.input_index("self");
  const int along = call.input(self).wrap_dim(call.int_arg("dim"));
  return placement_of_part(call, self, along, 0, call.input(self).sizes[along] / 2);
}

void glu(const OpCall& call, Strategies& out) {
  halves(call, out);
  if (const auto half = placement_of_half(call)) {
    out.add({{"self", call.placement("self")}}, {*half});
  }
}

void glu_backward(const OpCall& call, Strategies& out) {
  halves(call, out);
  if (const auto half = placement_of_half(call)) {
    const Placement packed = call.placement("self");
    out.add({{"grad_output", *half}, {"self", packed}}, {packed});
  }
  out.add_linear({{"grad_output"}});
}

void glu_backward_shape(OpCall& call) {
  call.outputs.push_back(contiguous_info(call.input("self").sizes, call.input("self").dtype));
}

// repeat: new dimensions in front.
void repeat(const OpCall& call, Strategies& out) {
  const TensorInfo& self = call.input("self");
  const int added = call.output().ndim() - self.ndim();
  const std::vector<int64_t> repeats = call.arg("repeats").toIntVector();
  for (int d = 0; d < self.ndim(); ++d) {
    if (repeats[d + added] == 1) out.add({Shard(d)}, {Shard(d + added)});
  }
  // Each of the copies that follow on each other is cut as the one was.
  const Placement from = call.placement("self");
  if (from.is_shard() && from.kind() != PlacementKind::kRaggedShard) {
    const int64_t repeated = repeats[from.dim() + added];
    const auto sizes = call.sizes_so_far(self, from.dim());
    const bool divides = std::all_of(sizes.begin(), sizes.end(),
                                     [&](int64_t size) { return size % from.split_factor() == 0; });
    if (repeated > 1 && divides) {
      out.add({{"self", from}}, {StridedShard(from.dim() + added, repeated * from.split_factor())});
    }
  }
  pass_partials(call, out, kAllReduceOps);
}

void constant_pad(const OpCall& call, Strategies& out) {
  const TensorInfo& self = call.input("self");
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
  pointwise()(call, out);
  pass_partials(call, out, kAllReduceOps);
}

// One that lies otherwise in memory is made for a product most often (reshape, contiguous), which wants a sum
// whole. Reduced here, it is remembered with the tensor that it is a copy of, and the next such copy finds it.
void clone(const OpCall& call, Strategies& out) {
  const TensorInfo& self = call.input("self");
  bool is_moved = false;
  for (int d = 0; d < self.ndim(); ++d) {
    is_moved |= self.sizes[d] > 1 && self.strides[d] != call.output().strides[d];
  }
  const bool of_data = call.mesh_dim < 64 && (self.origins.data >> call.mesh_dim & 1) != 0;
  if (!is_moved || of_data) return copy(call, out);
  pointwise()(call, out);
}

// What is there already does not matter: a Partial that is overwritten need not be reduced.
void overwrite(const OpCall& call, Strategies& out) {
  pointwise()(call, out);
  for (ReduceOp op : kAllReduceOps) out.add({{"self", Partial(op)}}, {Replicate()});
}

void zero(const OpCall& call, Strategies& out) {
  pointwise()(call, out);
  pass_partials(call, out, {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin, ReduceOp::kMax});
}

// --- tensors like others -------------------------------------------------------------------------

// *_like, new_*: the values of self are not looked at. A dimension of self's size lies as that one does,
// if no others are missing: backward of gather, index, sort and max begins with zeros that are new for
// the gradient of some columns, and writes it there. The batch of both stays cut.
void made_like(const OpCall& call, Strategies& out) {
  const TensorInfo& self = call.input("self");
  const Dims& sizes = call.output().sizes;
  for (int d = 0; d < self.ndim(); ++d) {
    const bool is_same = call.output().ndim() >= self.ndim() && sizes[d] == self.sizes[d];
    out.add({Shard(d)}, {is_same ? Shard(d) : Replicate()});
  }
  for (ReduceOp op : kAllReduceOps) out.add({Partial(op)}, {Replicate()});
}

// Autograd clones a gradient by new_empty_strided() and copy_(). The clone of a Partial is one: what
// is in it is overwritten, and the gradient is reduced when all are.
void made_to_be_copied_to(const OpCall& call, Strategies& out) {
  if (call.output().sizes != call.input("self").sizes) return made_like(call, out);
  for (int d = 0; d < call.input("self").ndim(); ++d) out.add({Shard(d)}, {Shard(d)});
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

void equal(const c10::OperatorHandle& op, c10::Stack& stack) {
  BoxedCall call(op, stack);
  const at::Tensor self = call.tensor("self");
  const at::Tensor other = call.tensor("other");
  const bool result = self.sizes() == other.sizes() && at::eq(self, other).all().item<bool>();
  stack.resize(stack.size() - op.schema().arguments().size());
  stack.emplace_back(result);
}

bool names_a_dim_twice(const Arguments& args) {
  const int64_t ndim = args.tensor("self").dim();
  std::vector<int64_t> dims = args["dims"].toIntVector();
  for (int64_t& dim : dims) dim = c10::maybe_wrap_dim(dim, ndim);
  std::sort(dims.begin(), dims.end());
  return std::adjacent_find(dims.begin(), dims.end()) != dims.end();
}

}  // namespace

void add_data_movement_rules(RuleTable& table) {
  table.add("aten::cat", sharded(cat));
  table.add("aten::stack", sharded(stack));
  // Its out= form does not resize what it writes.
  table.add("aten::_stack", sharded(stack).shapes(stack_shape));
  table.add({"aten::split", "aten::split_with_sizes", "aten::unsafe_split",
             "aten::unsafe_split_with_sizes"},
            sharded(split_to_views));
  table.add({"aten::split_copy", "aten::split_with_sizes_copy"}, sharded(split));
  table.add({"aten::slice", "aten::slice_copy"}, sharded(slice));
  table.add({"aten::select", "aten::select_copy", "aten::unbind", "aten::unbind_copy"},
            sharded(remove_dim));
  table.add("aten::slice_scatter", sharded(slice_scatter));
  table.add("aten::select_scatter", sharded(select_scatter));
  table.add("aten::slice_backward", sharded(slice_backward).size_arg("input_sizes"));
  table.add("aten::select_backward", sharded(select_backward).size_arg("input_sizes"));
  table.add("aten::unfold_backward",
            sharded(unfold_backward).size_arg("input_sizes").shapes(unfold_backward_shape));

  table.add("aten::roll", sharded(reorder).shapes(like_input));
  table.add("aten::flip", sharded(reorder).shapes(like_input).refuses(names_a_dim_twice));
  table.add("aten::rot90", sharded(reorder).shapes(rotated_shape).refuses(turns_nothing));
  table.add("aten::glu", sharded(glu));
  table.add("aten::glu_backward", sharded(glu_backward).shapes(glu_backward_shape));
  table.add("aten::repeat", sharded(repeat));
  table.add("aten::constant_pad_nd", sharded(constant_pad).reads({"value"}));
  table.add({"aten::sort", "aten::topk"}, along_dim());

  table.add({"aten::copy", "aten::lift", "aten::_to_copy"}, sharded(copy));
  table.add("aten::clone", sharded(clone));
  table.add("aten::copy_", sharded(copy).shapes_like({"self"}));
  table.add({"aten::fill", "aten::fill_"}, sharded(overwrite));
  table.add({"aten::zero", "aten::zero_"}, sharded(zero));

  table.add({"aten::empty_like", "aten::full_like", "aten::ones_like", "aten::zeros_like"},
            sharded(made_like));
  table.add({"aten::new_empty", "aten::new_full", "aten::new_ones", "aten::new_zeros"},
            sharded(made_like).size_arg("size"));
  table.add("aten::new_empty_strided", sharded(made_to_be_copied_to).runs(new_empty_strided));

  table.add("aten::_local_scalar_dense", replicated().shapes(no_outputs));
  table.add("aten::equal", composed(equal));
  table.add({"aten::allclose", "aten::is_same_size", "aten::_is_all_true", "aten::_is_any_true"},
            composed(decomposed));
}

}  // namespace shardweave::dtensor_internal
