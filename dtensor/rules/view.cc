// Views: another shape or another order of dimensions for the same elements, without moving them.
#include <algorithm>
#include <numeric>
#include <vector>

#include "ATen/ops/empty_strided.h"
#include "ATen/ops/zeros.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/engine/detour.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/provenance.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "shardweave/dtensor/rules/common.h"
#include "shardweave/dtensor/rules/families.h"
#include "shardweave/dtensor/rules/view_map.h"

namespace shardweave::dtensor_internal {
namespace {

void pass_partials(Strategies& out) {
  for (ReduceOp op : kAllReduceOps) out.add({Partial(op)}, {Partial(op)});
}

// --- one dimension is one dimension --------------------------------------------------------------

// Where each dimension of the input is in the output; -1: it may not be sharded.
using DimMap = std::vector<int>;

ShardedRule moved_dims(DimMap (*map)(const OpCall& call)) {
  return sharded([map](const OpCall& call, Strategies& out) {
    const DimMap to = map(call);
    for (int d = 0; d < call.input("self").ndim(); ++d) {
      if (to[d] >= 0) out.add({Shard(d)}, {Shard(to[d])});
    }
    pass_partials(out);
  });
}

DimMap same_dims(const OpCall& call) {
  DimMap to(call.input("self").ndim());
  std::iota(to.begin(), to.end(), 0);
  return to;
}

DimMap permuted_dims(const OpCall& call) {
  DimMap to(call.input("self").ndim());
  int position = 0;
  for (int64_t dim : call.arg("dims").toIntVector())
    to[call.input("self").wrap_dim(dim)] = position++;
  return to;
}

DimMap transposed_dims(const OpCall& call) {
  DimMap to = same_dims(call);
  if (to.empty()) return to;
  std::swap(to[call.input("self").wrap_dim(call.int_arg("dim0"))],
            to[call.input("self").wrap_dim(call.int_arg("dim1"))]);
  return to;
}

// t: of a matrix; a vector stays.
DimMap reversed_dims(const OpCall& call) {
  DimMap to = same_dims(call);
  std::reverse(to.begin(), to.end());
  return to;
}

DimMap unsqueezed_dims(const OpCall& call) {
  DimMap to = same_dims(call);
  const int at = call.output().wrap_dim(call.int_arg("dim"));
  for (int& dim : to) dim += dim >= at;
  return to;
}

// New dimensions come in front; one of size 1 that grows may not be sharded.
DimMap expanded_dims(const OpCall& call) {
  const TensorInfo& self = call.input("self");
  const int added = call.output().ndim() - self.ndim();
  DimMap to(self.ndim());
  for (int d = 0; d < self.ndim(); ++d) {
    to[d] = self.sizes[d] == call.output().sizes[d + added] ? d + added : -1;
  }
  return to;
}

// unfold(dimension, size, step): windows along one dimension, their elements last.
DimMap dims_beside_windows(const OpCall& call) {
  DimMap to = same_dims(call);
  if (!to.empty()) to[call.input("self").wrap_dim(call.int_arg("dimension"))] = -1;
  return to;
}

// The same bytes as another type: the last dimension changes unless the types are equally large.
void view_dtype(const OpCall& call, Strategies& out) {
  const TensorInfo& self = call.input("self");
  const bool same_size =
      c10::elementSize(self.dtype) == c10::elementSize(call.arg("dtype").toScalarType());
  for (int d = 0; d < self.ndim() - (same_size ? 0 : 1); ++d) out.add({Shard(d)}, {Shard(d)});
  if (call.arg("dtype").toScalarType() == self.dtype) pass_partials(out);
}

// Complex numbers as pairs in a new last dimension, and back.
void view_as_real(const OpCall& call, Strategies& out) {
  for (int d = 0; d < call.input("self").ndim(); ++d) out.add({Shard(d)}, {Shard(d)});
  for (ReduceOp op : kLinearOps) out.add({Partial(op)}, {Partial(op)});
}

void view_as_complex(const OpCall& call, Strategies& out) {
  for (int d = 0; d < call.output().ndim(); ++d) out.add({Shard(d)}, {Shard(d)});
  for (ReduceOp op : kLinearOps) out.add({Partial(op)}, {Partial(op)});
}

// --- squeeze -------------------------------------------------------------------------------------

// The dimensions of global size 1 among those asked for.
std::vector<int64_t> squeezed_dims(const Dims& sizes, const c10::IValue* dim) {
  const int ndim = static_cast<int>(sizes.size());
  std::vector<bool> asked(ndim, dim == nullptr);
  if (dim != nullptr && ndim > 0) {
    TensorInfo shape;
    shape.sizes = sizes;
    for (int64_t d : dim->isInt() ? std::vector<int64_t>{dim->toInt()} : dim->toIntVector()) {
      asked[shape.wrap_dim(d)] = true;
    }
  }
  std::vector<int64_t> dims;
  for (int d = 0; d < ndim; ++d) {
    if (asked[d] && sizes[d] == 1) dims.push_back(d);
  }
  return dims;
}

// What view_copy and its like give shares no memory with the input.
at::Tensor view_or_copy(const c10::OperatorHandle& op, at::Tensor view) {
  return op.operator_name().name.ends_with("_copy") ? view.clone() : view;
}

// In place the views that there are stay where they are, and what is written goes back to them. What has
// to move becomes whole, from which the way back costs nothing.
bool is_in_place(const OpCall& call) {
  return call.op->operator_name().name.ends_with("_");
}

// A dimension that has one element on this rank only must stay.
void squeeze_global_ones(const c10::OperatorHandle& op, c10::Stack& stack, const LocalCall& call) {
  BoxedCall boxed(op, stack);
  const at::Tensor self = boxed.tensor("self");
  const std::vector<int64_t> dims =
      squeezed_dims(boxed.spec(call, "self").sizes, boxed.has("dim") ? &boxed["dim"] : nullptr);
  const bool in_place = op.operator_name().name.ends_with("_");
  boxed.finish({in_place ? self.squeeze_(dims) : view_or_copy(op, self.squeeze(dims))});
}

void squeeze(const OpCall& call, Strategies& out) {
  const TensorInfo& self = call.input("self");
  const std::vector<int64_t> gone =
      squeezed_dims(self.sizes, call.has_arg("dim") ? &call.arg("dim") : nullptr);
  int position = 0;
  for (int d = 0; d < self.ndim(); ++d) {
    if (std::find(gone.begin(), gone.end(), d) != gone.end()) continue;
    const int to = position++;
    if (is_in_place(call) && !call.placement(0).is_shard(d)) continue;
    out.add({Shard(d)}, {Shard(to)}, squeeze_global_ones);
  }
  for (ReduceOp op : kAllReduceOps) out.add({Partial(op)}, {Partial(op)}, squeeze_global_ones);
}

// --- another shape -------------------------------------------------------------------------------

// Runs `view` on the first argument, and nothing else: every step of a model makes views, and takes
// their arguments from names many times over otherwise.
template <typename View>
void as_view(const c10::OperatorHandle& op, c10::Stack& stack, View view) {
  const std::vector<c10::Argument>& arguments = op.schema().arguments();
  const size_t base = stack.size() - arguments.size();
  at::Tensor result = view_or_copy(op, view(stack[base].toTensor()));
  if (arguments.back().is_out()) {
    BoxedCall(op, stack).finish({std::move(result)});
    return;
  }
  stack.erase(stack.begin() + static_cast<std::ptrdiff_t>(base) + 1, stack.end());
  stack[base] = std::move(result);
}

// Where the local tensor's strides do not allow the view that the global ones do, it is copied.
void reshape_local(const c10::OperatorHandle& op, c10::Stack& stack, const LocalCall& call) {
  const c10::IntArrayRef sizes = array(call.outputs[0]->local_sizes);
  // (What reshape() does with it, one operator later.)
  as_view(op, stack, [&](const at::Tensor& self) {
    return self.is_contiguous() ? self.view(sizes) : self.reshape(sizes);
  });
}

void expand_local(const c10::OperatorHandle& op, c10::Stack& stack, const LocalCall& call) {
  as_view(op, stack,
          [&](const at::Tensor& self) { return self.expand(array(call.outputs[0]->local_sizes)); });
}

// From its first element on.
bool is_diagonal_of_matrix(const Arguments& args) {
  const at::Tensor& self = args.tensor("self");
  const std::vector<int64_t> size = args["size"].toIntVector();
  const std::vector<int64_t> stride = args["stride"].toIntVector();
  const bool is_view = args.op().operator_name().name == "aten::as_strided";
  return is_view && self.dim() == 2 && size.size() == 1 && stride.size() == 1 &&
         stride[0] == self.stride(0) + self.stride(1) &&
         size[0] <= std::min(self.size(0), self.size(1)) &&
         (args["storage_offset"].isNone() ||
          args["storage_offset"].toInt() == self.storage_offset());
}

void as_strided_in_rows(const c10::OperatorHandle& op, c10::Stack& stack, const LocalCall&) {
  BoxedCall boxed(op, stack);
  const at::Tensor self = boxed.tensor("self").contiguous();
  boxed["self"] = self;
  std::vector<int64_t> size = boxed["size"].toIntVector();
  size[0] = self.size(0);
  boxed["size"] = size;
  const c10::IValue& offset = boxed["storage_offset"];
  if (!offset.isNone()) boxed["storage_offset"] = offset.toInt() + self.storage_offset();
  boxed.run();
}

// Of a view that was brought here without the rest of its base: nothing else can be seen of that.
void check_within(c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::IntArrayRef wanted_sizes,
                  c10::IntArrayRef wanted_strides, int64_t offset) {
  const auto behind = [](c10::IntArrayRef shape, c10::IntArrayRef by) {
    int64_t last = 0;
    for (size_t d = 0; d < shape.size(); ++d) last += (shape[d] - 1) * by[d];
    return last + 1;
  };
  if (c10::multiply_integers(wanted_sizes) == 0 || c10::multiply_integers(sizes) == 0) return;
  const int64_t length = behind(sizes, strides);
  const auto is_there = [&] {
    if (offset + behind(wanted_sizes, wanted_strides) > length) return false;
    const at::Tensor there = at::zeros({length}, at::kBool);
    there.as_strided(sizes, strides).fill_(true);
    return there.as_strided(wanted_sizes, wanted_strides, offset).all().item<bool>();
  };
  if (is_there()) return;
  throw Error(absl::UnimplementedError(
      "aten::as_strided: reaches elements of the base that the view, which was brought here whole, "
      "does not have; call it on the base"));
}

// Strides and offset count in the storage of the whole tensor, which is replicated but may lie
// otherwise here.
void as_strided_in_whole(const c10::OperatorHandle& op, c10::Stack& stack, const LocalCall& call) {
  BoxedCall boxed(op, stack);
  at::Tensor self = boxed.tensor("self");
  const Dims& strides = boxed.spec(call, "self").strides;
  const c10::IntArrayRef want(strides.data(), strides.size());
  bool same = true;  // where it matters
  for (int64_t d = 0; d < self.dim(); ++d) {
    same &= self.size(d) < 2 || self.numel() == 0 || self.stride(d) == want[d];
  }
  const c10::IValue& offset = boxed["storage_offset"];
  if (!same) {
    check_within(self.sizes(), want, boxed["size"].toIntVector(), boxed["stride"].toIntVector(),
                 offset.isNone() ? 0 : offset.toInt());
    self = at::empty_strided(self.sizes(), want, self.options()).copy_(self);
    boxed["self"] = self;
  }
  if (!offset.isNone()) boxed["storage_offset"] = offset.toInt() + self.storage_offset();
  boxed.run();
}

// Of each row of a contiguous tensor something, that lies as its row does (the frames of stft): rows
// stay where they are.
void as_strided(const OpCall& call, Strategies& out) {
  const TensorInfo& self = call.input("self");
  const std::vector<int64_t> size = call.arg("size").toIntVector();
  const std::vector<int64_t> stride = call.arg("stride").toIntVector();
  const c10::IValue& offset = call.arg("storage_offset");
  if (self.ndim() == 0 || size.empty() || self.numel() == 0) return;
  if (is_in_place(call)) return;
  if (self.strides != contiguous_strides(self.sizes)) return;
  if (size[0] != self.sizes[0] || stride[0] != self.strides[0]) return;
  int64_t last = offset.isNone() ? 0 : offset.toInt();
  for (size_t d = 1; d < size.size(); ++d) last += (size[d] - 1) * stride[d];
  if (last < self.strides[0]) out.add({{"self", Shard(0)}}, {Shard(0)}, as_strided_in_rows);
}

// The offset counts from where the storage begins, and that of a rule's operator from where `self` does;
// and the diagonal of a matrix, as fill_diagonal_() writes it, has a rule of its own.
bool has_offset_or_is_diagonal(const Arguments& args) {
  const at::Tensor& self = args.tensor("self");
  if (!is_dtensor(self)) return false;
  if (!args["storage_offset"].isNone() && self.storage_offset() != 0) return true;
  return is_diagonal_of_matrix(args);
}

void as_strided_from_storage(const c10::OperatorHandle& op, c10::Stack& stack) {
  BoxedCall call(op, stack);
  const at::Tensor self = call.tensor("self");
  const DTensorMeta& meta = meta_of(self);
  const int64_t offset =
      call["storage_offset"].isNone() ? 0 : call["storage_offset"].toInt() - self.storage_offset();
  const bool in_place = op.schema().arguments()[0].alias_info() != nullptr &&
                        op.schema().arguments()[0].alias_info()->isWrite();
  if (offset < 0 || (in_place && offset > 0)) {
    throw Error(absl::UnimplementedError(absl::StrCat(
        c10::toString(op.operator_name()), ": the storage offset ", offset + self.storage_offset(),
        " is ", offset < 0 ? "before" : "behind", " the beginning, ", self.storage_offset(),
        ", of the view that it is called on; call it on the view's base")));
  }
  if (in_place) {
    call["storage_offset"] = c10::IValue();
    return call.run();
  }
  if (is_diagonal_of_matrix({op, call.arguments()})) {
    return call.finish({self.diagonal().slice(0, 0, call["size"].toIntVector()[0])});
  }
  // The same elements, in a storage that begins with them.
  if (meta.family == nullptr) meta.family = std::make_shared<ViewFamily>();
  const at::Tensor from_here =
      wrap_view(meta.local(), meta.spec, meta.context, self.is_inference());
  meta_of(from_here).family = meta.family;
  meta_of(from_here).place = meta.place;
  meta_of(from_here).detour = meta.detour;
  meta_of(from_here).came_from(provenance_of(meta));
  call["self"] = from_here;
  call["storage_offset"] = offset;
  call.run();
  if (op.operator_name().name == "aten::as_strided") {
    stack.back().toTensor().unsafeGetTensorImpl()->set_storage_offset(offset +
                                                                      self.storage_offset());
  }
}

// Whether two tensors are one, as on one device, whatever this rank has of them.
void is_set_to(const c10::OperatorHandle& op, c10::Stack& stack) {
  BoxedCall call(op, stack);
  const at::Tensor self = call.tensor("self"), other = call.tensor("tensor");
  bool result = self.is_same(other);
  if (!result && is_dtensor(self) && is_dtensor(other)) {
    const DTensorMeta &a = meta_of(self), &b = meta_of(other);
    // A copy stands for its original; what is seen as another dtype has a place of its own. (Parts may
    // have to be brought here: they are asked last.)
    result = a.family != nullptr && a.family == b.family &&
             self.scalar_type() == other.scalar_type() && self.sizes() == other.sizes() &&
             self.strides() == other.strides() && self.storage_offset() == other.storage_offset() &&
             (a.place.memory == b.place.memory || a.detour != nullptr || b.detour != nullptr ||
              a.local().is_alias_of(b.local()));
  }
  stack.resize(stack.size() - op.schema().arguments().size());
  stack.emplace_back(result);
}

// A local tensor may be a lazy conjugate or negative; views of its memory under another dtype see
// the real values.
void without_lazy_bits(const c10::OperatorHandle& op, c10::Stack& stack, const LocalCall&) {
  BoxedCall boxed(op, stack);
  boxed["self"] = boxed.tensor("self").resolve_conj().resolve_neg();
  boxed.run();
}

// To another shape, which keeps the elements in their order in memory: a replicated tensor then.
void resize_(const c10::OperatorHandle& op, c10::Stack& stack) {
  BoxedCall call(op, stack);
  const at::Tensor self = call.tensor("self");
  const std::vector<int64_t> sizes =
      call.has("size") ? call["size"].toIntVector() : call.tensor("the_template").sizes().vec();
  if (!is_dtensor(self)) {  // beside a template that is one
    self.resize_(sizes);
  } else if (self.sizes() != c10::IntArrayRef(sizes)) {
    const std::shared_ptr<MeshContext> context = meta_of(self).context;
    at::Tensor whole = full_tensor(self).detach().clone();
    whole.resize_(sizes);
    SpecRef spec = context->intern(
        Layout(Placements(context->mesh().ndim())), {whole.sizes().data(), whole.sizes().size()},
        {whole.strides().data(), whole.strides().size()}, whole.scalar_type(), whole.device());
    convert_in_place(self, std::move(whole), std::move(spec), context);
  }
  call.finish({self});
}

// From now on the same memory as another DTensor, like a shallow copy of it. A DTensor gets the
// numbers of a plain tensor, each rank those of its part: so does torch::load, which works on a
// distributed module then.
void set_(const c10::OperatorHandle& op, c10::Stack& stack) {
  BoxedCall call(op, stack);
  const at::Tensor self = call.tensor("self");
  const at::Tensor source = call.tensor("source");
  if (!is_dtensor(self)) {
    throw Error(absl::InvalidArgumentError(
        absl::StrCat("aten::set_: a plain tensor cannot share the memory of a DTensor, ",
                     meta_of(source).spec->to_string(), "; give it full_tensor() or to_local()")));
  }
  if (!is_dtensor(source)) {
    if (self.sizes() != source.sizes() || self.scalar_type() != source.scalar_type()) {
      throw Error(absl::InvalidArgumentError(absl::StrCat(
          "aten::set_: the DTensor ", meta_of(self).spec->to_string(),
          " cannot get the numbers of a plain tensor of ", c10::toString(source.scalar_type()),
          " [", absl::StrJoin(source.sizes(), ", "),
          "]: shape and dtype have to be the same (to load a module's file into it, bring it to "
          "the "
          "file's dtype first)")));
    }
    self.copy_(source);
    call.finish({self});
    return;
  }
  DTensorMeta& meta = meta_of(source);
  if (meta.family == nullptr) meta.family = std::make_shared<ViewFamily>();
  const std::shared_ptr<ViewFamily> family = meta.family;
  const std::shared_ptr<const Detour> detour = meta.detour;
  const Place place = meta.place;
  convert_in_place(self, meta.local(), meta.spec, meta.context);
  meta_of(self).family = family;
  meta_of(self).place = place;
  meta_of(self).detour = detour;
  meta_of(self).came_from(provenance_of(meta));
  call.finish({self});
}

// LibTorch's derivative goes through memory that it lays out itself: it would be wrong here.
void refuse_as_strided_scatter(const c10::OperatorHandle&, c10::Stack&) {
  throw Error(
      absl::UnimplementedError("aten::as_strided_scatter: has no derivative on DTensors; write to "
                               "a copy of it, as strided"));
}

// _reshape_alias, which autograd calls, looks at nothing itself.
void check_same_numel(const OpCall& call) {
  const TensorInfo& self = call.input("self");
  if (call.output().numel() == self.numel()) return;
  throw Error(absl::InvalidArgumentError(absl::StrCat(
      c10::toString(call.op->operator_name()), ": shape [",
      absl::StrJoin(call.output().sizes, ", "), "] has ", call.output().numel(),
      " elements, the input, of shape [", absl::StrJoin(self.sizes, ", "), "], ", self.numel())));
}

// The cuts of the input that the result would lose if mesh dimensions cut it in this order.
int lost_cuts(const OpCall& call, absl::Span<const int> order) {
  const Spec& self = *call.input("self").spec;
  std::vector<MeshCut> cuts;
  for (int m : order) cuts.push_back({self.layout[m], self.context->mesh().size(m)});
  const auto mapped = map_cuts(self.sizes, call.output().sizes, cuts);
  return static_cast<int>(std::count(mapped.begin(), mapped.end(), std::nullopt));
}

// [7, 8] cut by both dimensions over 2 x 2 ranks, as [56]: where rows are cut first, those of them
// that a rank has are 4 or 3, and no placement says "half of each 8" of both. Where columns are cut
// first, that is a strided shard, and leaves 28 elements, which can be cut into 16 and 12.
std::vector<int> inner_cuts_first(const OpCall& call) {
  check_same_numel(call);
  std::vector<int> order(call.order.begin(), call.order.end());
  const TensorInfo& self = call.input("self");
  if (self.spec == nullptr || lost_cuts(call, order) == 0) return order;
  std::vector<int> other = order;
  std::stable_sort(other.begin(), other.end(), [&](int a, int b) {
    const auto dim = [&](int m) {
      const Placement& p = self.spec->layout[m];
      return p.is_shard() ? p.dim() : -1;
    };
    return dim(a) > dim(b);
  });
  return lost_cuts(call, other) < lost_cuts(call, order) ? other : order;
}

void view(const OpCall& call, Strategies& out) {
  check_same_numel(call);
  const TensorInfo& self = call.input("self");
  const MeshContext* context = self.spec == nullptr ? nullptr : self.spec->context;
  CutMap map(self.sizes, call.output().sizes);
  for (int m : call.order) {
    if (m == call.mesh_dim || context == nullptr) break;
    const MeshCut cut{self.spec->layout[m], context->mesh().size(m)};
    map.add(cut, map.map(cut));
  }
  auto offer = [&](const Placement& p) {
    const std::optional<Placement> mapped = map.map({p, call.num_ranks});
    if (mapped.has_value()) out.add({p}, {*mapped});
  };
  const Placement now = call.placement("self");
  if (now.is_shard()) offer(now);
  for (int d = 0; d < self.ndim(); ++d) {
    if (Shard(d) != now) offer(Shard(d));
  }
  pass_partials(out);
}

}  // namespace

void add_view_rules(RuleTable& table) {
  table.add(
      {"aten::alias", "aten::alias_copy", "aten::detach", "aten::detach_copy", "aten::lift_fresh"},
      moved_dims(same_dims));
  table.add({"aten::permute", "aten::permute_copy"}, moved_dims(permuted_dims));
  table.add({"aten::transpose", "aten::transpose_copy"}, moved_dims(transposed_dims));
  table.add({"aten::t", "aten::t_copy"}, moved_dims(reversed_dims));
  table.add({"aten::unsqueeze", "aten::unsqueeze_copy"}, moved_dims(unsqueezed_dims));
  table.add({"aten::expand", "aten::expand_copy"}, moved_dims(expanded_dims).runs(expand_local));
  table.add({"aten::unfold", "aten::unfold_copy"}, moved_dims(dims_beside_windows));
  table.add({"aten::squeeze", "aten::squeeze_copy"}, sharded(squeeze));
  table.add({"aten::view", "aten::_unsafe_view", "aten::_reshape_alias", "aten::view_copy"},
            sharded(view).cuts_in_order(inner_cuts_first).chunks_only().runs(reshape_local));
  table.add({"aten::view.dtype", "aten::view_copy.dtype"},
            sharded(view_dtype).runs(without_lazy_bits));
  table.add({"aten::view_as_real", "aten::view_as_real_copy"},
            sharded(view_as_real).runs(without_lazy_bits));
  table.add({"aten::view_as_complex", "aten::view_as_complex_copy"},
            sharded(view_as_complex).runs(without_lazy_bits));
  table.add({"aten::_conj", "aten::_neg_view"}, pointwise(Linearity::kAdditive));
  table.add("aten::set_.source_Tensor", composed(set_));
  table.add({"aten::resize_", "aten::resize_as_"}, composed(resize_));
  table.add("aten::as_strided_scatter", composed(refuse_as_strided_scatter));
  table.add({"aten::as_strided", "aten::as_strided_copy"},
            sharded(as_strided)
                .runs(as_strided_in_whole)
                .when(has_offset_or_is_diagonal, composed(as_strided_from_storage)));
  table.add("aten::is_set_to", composed(is_set_to));
}

}  // namespace shardweave::dtensor_internal
