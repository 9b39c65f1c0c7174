// Reading and writing by index tensors. Dimensions that are not indexed may be sharded; so may the
// index tensors where what they read is replicated, or what they add to is a Partial sum.
#include <algorithm>
#include <optional>
#include <vector>

#include "ATen/ops/_assert_async.h"
#include "ATen/ops/gather.h"
#include "ATen/ops/where.h"
#include "ATen/ops/zeros.h"
#include "shardweave/dtensor/rules/common.h"
#include "shardweave/dtensor/rules/families.h"
#include "shardweave/dtensor/rules/rows.h"

namespace shardweave::dtensor_internal {
namespace {

// Out of place, `self` is broadcast to the mask.
void masked_scatter_shape(OpCall& call) {
  call.outputs.push_back(
      contiguous_info(broadcast_sizes({call.input("self").sizes, call.input("mask").sizes}),
                      call.input("self").dtype));
}

// As LibTorch's kernels refuse it; on a GPU without waiting for it, as there.
void check_indices(const at::Tensor& index, int dim, int64_t size) {
  const at::Tensor bad = index.lt(0).logical_or_(index.ge(size));
  if (!bad.is_cpu()) {
    at::_assert_async(bad.any().logical_not_());
    return;
  }
  if (!bad.any().item().toBool()) return;
  TORCH_CHECK(false, "index ", index.masked_select(bad)[0].item().toLong(),
              " is out of bounds for dimension ", dim, " with size ", size);
}

// --- one index for each element: gather and scatter ----------------------------------------------

// Each rank gives what it has, and 0 for the rest.
void gather_of_slices(const c10::OperatorHandle& op, c10::Stack& stack, const LocalCall& call) {
  BoxedCall boxed(op, stack);
  const at::Tensor self = boxed.tensor("self");
  const at::Tensor index = boxed.tensor("index").to(at::kLong);
  const Spec& whole = boxed.spec(call, "self");
  const int64_t dim = boxed["dim"].toInt();
  const int along = static_cast<int>(dim < 0 ? dim + whole.ndim() : dim);
  check_indices(index, along, whole.sizes[along]);
  const HeldRows held = held_slices(index, whole, along);
  if (!held.here.defined()) {
    boxed.finish({at::zeros(index.sizes(), self.options())});
    return;
  }
  const at::Tensor found = at::gather(self, dim, held.local);
  boxed.finish({at::where(held.here, found, at::zeros({}, found.options()))});
}

// gather(self, dim, index): result[i][j] = self[index[i][j]][j] for dim 0.
void gather(const OpCall& call, Strategies& out) {
  const TensorInfo& self = call.input("self");
  const TensorInfo& index = call.input("index");
  const int along = self.wrap_dim(call.int_arg("dim"));
  for (int d = 0; d < index.ndim(); ++d) {
    if (d == along) {
      out.add({{"index", Shard(d)}}, {Shard(d)});
      if (self.ndim() == index.ndim()) out.add({{"self", Shard(d)}}, {Partial()}, gather_of_slices);
    } else if (self.ndim() == index.ndim() && self.sizes[d] == index.sizes[d]) {
      out.add({{"self", Shard(d)}, {"index", Shard(d)}}, {Shard(d)});
    }
  }
  for (ReduceOp op : kAllReduceOps) out.add({{"self", Partial(op)}}, {Partial(op)});
}

// scatter(self, dim, index[, src]): what index does not reach stays as in self.
void scatter(const OpCall& call, Strategies& out) {
  const TensorInfo& self = call.input("self");
  const int along = self.wrap_dim(call.int_arg("dim"));
  for (int d = 0; d < self.ndim(); ++d) {
    if (d == along) continue;
    const bool aligned =
        std::all_of(call.inputs.begin(), call.inputs.end(), [&](const TensorInfo& input) {
          return input.ndim() == self.ndim() && input.sizes[d] == self.sizes[d];
        });
    if (aligned) out.add(std::vector<Placement>(call.num_inputs(), Shard(d)), {Shard(d)});
  }
}

void scatter_add(const OpCall& call, Strategies& out) {
  scatter(call, out);
  // What is added may come from many ranks, to a self that is a Partial sum.
  const TensorInfo& index = call.input("index");
  const TensorInfo& src = call.input("src");
  const int along = call.input("self").wrap_dim(call.int_arg("dim"));
  if (along < index.ndim() && along < src.ndim() && index.sizes[along] == src.sizes[along]) {
    out.add({{"self", Partial()}, {"index", Shard(along)}, {"src", Shard(along)}}, {Partial()});
  }
  out.add_linear({{"self", "src"}});
}

// take(self, index): as gather from the flattened tensor.
void take(const OpCall& call, Strategies& out) {
  for (int d = 0; d < call.input("index").ndim(); ++d) out.add({{"index", Shard(d)}}, {Shard(d)});
  for (ReduceOp op : kAllReduceOps) out.add({{"self", Partial(op)}}, {Partial(op)});
}

void take_shape(OpCall& call) {
  call.outputs.push_back(contiguous_info(call.input("index").sizes, call.input("self").dtype));
}

// put(self, index, source): what is added may come from many ranks.
void put(const OpCall& call, Strategies& out) {
  if (!call.bool_arg("accumulate")) return;
  const TensorInfo& index = call.input("index");
  for (int d = 0; d < index.ndim(); ++d) {
    if (call.input("source").sizes != index.sizes) continue;
    out.add({{"self", Partial()}, {"index", Shard(d)}, {"source", Shard(d)}}, {Partial()});
  }
  out.add_linear({{"self", "source"}});
}

// --- one index for each slice: index_select and its like -----------------------------------------

void index_select(const OpCall& call, Strategies& out) {
  const TensorInfo& self = call.input("self");
  const int along = self.wrap_dim(call.int_arg("dim"));
  for (int d = 0; d < self.ndim(); ++d) {
    if (d != along) out.add({{"self", Shard(d)}}, {Shard(d)});
  }
  if (call.input("index").ndim() == 1 && self.ndim() > 0) {
    out.add({{"index", Shard(0)}}, {Shard(along)});
  }
  for (ReduceOp op : kAllReduceOps) out.add({{"self", Partial(op)}}, {Partial(op)});
}

void index_select_shape(OpCall& call) {
  const TensorInfo& self = call.input("self");
  Dims sizes = self.sizes;
  if (!sizes.empty()) sizes[self.wrap_dim(call.int_arg("dim"))] = call.input("index").numel();
  call.outputs.push_back(contiguous_info(std::move(sizes), self.dtype));
}

// Slices of self at "index" are replaced by those of "source".
void index_write(const OpCall& call, Strategies& out) {
  const TensorInfo& self = call.input("self");
  const bool has_slices = call.input("source").ndim() == self.ndim();
  const int along = self.wrap_dim(call.int_arg("dim"));
  for (int d = 0; d < self.ndim(); ++d) {
    if (d == along) continue;
    out.add({{"self", Shard(d)}, {"source", has_slices ? Shard(d) : Replicate()}}, {Shard(d)});
  }
}

// Or are filled with one number.
void index_fill(const OpCall& call, Strategies& out) {
  const TensorInfo& self = call.input("self");
  const int along = self.wrap_dim(call.int_arg("dim"));
  for (int d = 0; d < self.ndim(); ++d) {
    if (d != along) out.add({{"self", Shard(d)}}, {Shard(d)});
  }
}

void index_add(const OpCall& call, Strategies& out) {
  index_write(call, out);
  const TensorInfo& self = call.input("self");
  if (call.input("index").ndim() == 1 && self.ndim() > 0 &&
      call.input("source").ndim() == self.ndim()) {
    const int along = self.wrap_dim(call.int_arg("dim"));
    out.add({{"self", Partial()}, {"index", Shard(0)}, {"source", Shard(along)}}, {Partial()});
  }
  out.add_linear({{"self", "source"}});
}

// --- any number of index tensors: index and index_put --------------------------------------------

bool is_mask(at::ScalarType dtype) {
  return dtype == at::kBool || dtype == at::kByte;
}

// Which dimension of self[indices] is which. The indices (None for a dimension that is not indexed)
// broadcast to a block of dimensions.
class Indexing {
 public:
  explicit Indexing(const OpCall& call) {
    const absl::Span<const TensorInfo> indices = call.list("indices");
    std::vector<int> indexed;
    std::vector<Dims> shapes;
    for (size_t i = 0; i < indices.size(); ++i) {
      if (!indices[i].defined) continue;
      indexed.push_back(static_cast<int>(i));
      shapes.push_back(indices[i].sizes);
      masks_ |= is_mask(indices[i].dtype);
    }
    block_ = broadcast_sizes(shapes);
    // Adjacent indices leave their block where they stand; others put it in front.
    const bool adjacent =
        !indexed.empty() && indexed.back() - indexed[0] + 1 == static_cast<int>(indexed.size());
    block_begin_ = adjacent ? indexed[0] : 0;
    int others = 0;
    for (int d = 0; d < call.input("self").ndim(); ++d) {
      if (std::find(indexed.begin(), indexed.end(), d) != indexed.end()) {
        result_dim_.push_back(-1);
      } else {
        result_dim_.push_back(others < block_begin_ ? others : others + block_ndim());
        ++others;
      }
    }
    result_ndim_ = others + block_ndim();
  }

  bool has_masks() const { return masks_; }
  // The dimension of the result that dimension d of self becomes; -1 if it is indexed.
  int result_dim(int d) const { return result_dim_[d]; }
  int result_ndim() const { return result_ndim_; }
  const Dims& block() const { return block_; }
  int block_ndim() const { return static_cast<int>(block_.size()); }
  int block_begin() const { return block_begin_; }
  // All inputs where dimension j of the block is cut: self is whole, and so are values.
  std::vector<Placement> cut_block(const OpCall& call, int j) const {
    std::vector<Placement> inputs(call.num_inputs(), Replicate());
    const int first = call.input_index("self") + 1;
    const absl::Span<const TensorInfo> indices = call.list("indices");
    for (size_t i = 0; i < indices.size(); ++i) {
      inputs[first + i] = broadcast_cut(indices[i], block_, j);
    }
    return inputs;
  }

 private:
  bool masks_ = false;
  Dims block_;
  int block_begin_ = 0;
  int result_ndim_ = 0;
  std::vector<int> result_dim_;
};

void index(const OpCall& call, Strategies& out) {
  const Indexing indexing(call);
  for (int d = 0; d < call.input("self").ndim(); ++d) {
    if (indexing.result_dim(d) < 0) continue;
    out.add({{"self", Shard(d)}}, {Shard(indexing.result_dim(d))});
  }
  for (int j = 0; j < indexing.block_ndim(); ++j) {
    out.add(indexing.cut_block(call, j), {Shard(indexing.block_begin() + j)});
  }
  for (ReduceOp op : kAllReduceOps) out.add({{"self", Partial(op)}}, {Partial(op)});
}

// self with self[indices] set to values, or with values added.
void index_put(const OpCall& call, Strategies& out) {
  const Indexing indexing(call);
  if (indexing.has_masks()) return;
  const TensorInfo& self = call.input("self");
  // Values broadcast to the shape of self[indices].
  Dims indexed(indexing.result_ndim());
  std::copy(indexing.block().begin(), indexing.block().end(),
            indexed.begin() + indexing.block_begin());
  for (int d = 0; d < self.ndim(); ++d) {
    if (indexing.result_dim(d) >= 0) indexed[indexing.result_dim(d)] = self.sizes[d];
  }
  const auto cut_values = [&](int dim) {
    return broadcast_cut(call.input("values"), indexed, dim);
  };
  for (int d = 0; d < self.ndim(); ++d) {
    if (indexing.result_dim(d) < 0) continue;
    out.add({{"self", Shard(d)}, {"values", cut_values(indexing.result_dim(d))}}, {Shard(d)});
  }
  if (!call.bool_arg("accumulate")) return;
  for (int j = 0; j < indexing.block_ndim(); ++j) {
    if (indexing.block()[j] == 1) continue;
    std::vector<Placement> inputs = indexing.cut_block(call, j);
    inputs[call.input_index("self")] = Partial();
    inputs[call.input_index("values")] = cut_values(indexing.block_begin() + j);
    out.add(std::move(inputs), {Partial()});
  }
  out.add_linear({{"self", "values"}});
}

// Masks among the indices: how much they select is known only from their values.
bool has_masks(const Arguments& args) {
  for (const c10::IValue& index : args["indices"].toListRef()) {
    if (index.isTensor() && is_mask(index.toTensor().scalar_type())) return true;
  }
  return false;
}

// self[mask] = number
bool fills_under_mask(const Arguments& args) {
  const auto& indices = args["indices"].toListRef();
  if (indices.size() != 1 || !indices[0].isTensor() || args["accumulate"].toBool()) return false;
  const at::Tensor& self = args.tensor("self");
  const at::Tensor& mask = indices[0].toTensor();
  const at::Tensor& value = args.tensor("values");
  return mask.scalar_type() == at::kBool && value.numel() == 1 &&
         value.scalar_type() == self.scalar_type() && mask.dim() <= self.dim() &&
         value.dim() <= 1 + self.dim() - mask.dim() &&
         mask.sizes() == self.sizes().slice(0, mask.dim());
}

// The mask is needed where the elements are, and nowhere else.
void fill_under_mask(const c10::OperatorHandle& op, c10::Stack& stack) {
  BoxedCall call(op, stack);
  const at::Tensor self = call.tensor("self");
  at::Tensor mask = call["indices"].toListRef()[0].toTensor();
  while (mask.dim() < self.dim()) mask = mask.unsqueeze(-1);
  const at::Tensor value = call.tensor("values").reshape({});
  const bool in_place = op.operator_name().name.ends_with("_");
  call.finish({in_place ? self.masked_fill_(mask, value) : self.masked_fill(mask, value)});
}

// LibTorch's kernels for meta tensors refuse what its others take: an expert without tokens. (Of a source
// that has some they say what is wrong.)
bool writes_nothing(const Arguments& args) {
  const auto is_empty = [](const c10::IValue& tensor) {
    return tensor.isTensor() && tensor.toTensor().numel() == 0;
  };
  return is_empty(args["index"]) && is_empty(args["source"]);
}

void write_nothing(const c10::OperatorHandle& op, c10::Stack& stack) {
  BoxedCall call(op, stack);
  const at::Tensor self = call.tensor("self");
  const bool in_place = op.operator_name().name.ends_with("_");
  call.finish({in_place ? self : self.clone()});
}

// They become the positions that they select.
void index_by_masks(const c10::OperatorHandle& op, c10::Stack& stack) {
  BoxedCall call(op, stack);
  c10::List<std::optional<at::Tensor>> indices;
  for (const c10::IValue& index : call["indices"].toListRef()) {
    if (!index.isTensor()) {
      indices.push_back(std::nullopt);
    } else if (!is_mask(index.toTensor().scalar_type())) {
      indices.push_back(index.toTensor());
    } else {
      for (at::Tensor& positions : index.toTensor().nonzero().unbind(1))
        indices.push_back(std::move(positions));
    }
  }
  call["indices"] = std::move(indices);
  call.run();
}

// --- search --------------------------------------------------------------------------------------

// bucketize(self, boundaries), isin(elements, test_elements): one after the other, against all.
void against_all(const OpCall& call, Strategies& out) {
  const char* one = call.has_arg("elements") ? "elements" : "self";
  for (int d = 0; d < call.input(one).ndim(); ++d) out.add({{one, Shard(d)}}, {Shard(d)});
}

// Every line of sorted_sequence for itself, or one for all.
void searchsorted(const OpCall& call, Strategies& out) {
  const TensorInfo& self = call.input("self");
  const bool one_line = call.input("sorted_sequence").ndim() == 1;
  for (int d = 0; d < self.ndim(); ++d) {
    const bool last = d == self.ndim() - 1;
    const Placement lines = one_line || last ? Replicate() : Shard(d);
    out.add({{"sorted_sequence", lines}, {"self", Shard(d)}, {"sorter", lines}}, {Shard(d)});
  }
}

void positions_shape(OpCall& call) {
  const bool int32 = call.bool_arg("out_int32");
  call.outputs.push_back(contiguous_info(call.input("self").sizes, int32 ? at::kInt : at::kLong));
}

}  // namespace

void add_indexing_rules(RuleTable& table) {
  table.add("aten::gather", sharded(gather));
  table.add({"aten::scatter", "aten::scatter_reduce"}, sharded(scatter));
  table.add("aten::scatter_add", sharded(scatter_add));

  table.add("aten::take", sharded(take).shapes(take_shape));
  table.add("aten::put", sharded(put).shapes(like_input));

  table.add("aten::index_select", sharded(index_select).shapes(index_select_shape));
  table.add("aten::index_add", sharded(index_add).when(writes_nothing, composed(write_nothing)));
  table.add("aten::index_copy", sharded(index_write));
  table.add("aten::index_reduce",
            sharded(index_write).when(writes_nothing, composed(write_nothing)));
  table.add("aten::index_fill", sharded(index_fill));

  table.add({"aten::index", "aten::_unsafe_index"},
            sharded(index).when(has_masks, composed(index_by_masks)));
  table.add(
      {"aten::index_put", "aten::_index_put_impl", "aten::_unsafe_index_put"},
      sharded(index_put).shapes(like_input).when(fills_under_mask, composed(fill_under_mask)));
  table.add("aten::masked_scatter", replicated().shapes(masked_scatter_shape));

  table.add("aten::bucketize.Tensor", sharded(against_all).shapes(positions_shape));
  table.add("aten::searchsorted.Tensor", sharded(searchsorted).shapes(positions_shape));
  table.add({"aten::isin.Tensor_Tensor", "aten::isin.Tensor_Scalar"}, sharded(against_all));
}

}  // namespace shardweave::dtensor_internal
