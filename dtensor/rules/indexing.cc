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
  call.outputs.push_back(contiguous_info(
      broadcast_sizes({call.input(0).sizes, call.input(1).sizes}), call.input(0).dtype));
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
  const Spec& whole = *call.inputs[0];
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
  const TensorInfo& self = call.input(0);
  const TensorInfo& index = call.input(1);
  const int along = self.wrap_dim(call.int_arg("dim"));
  for (int d = 0; d < index.ndim(); ++d) {
    if (d == along) {
      out.add({Replicate(), Shard(d)}, {Shard(d)});
      if (self.ndim() == index.ndim()) {
        out.add({Shard(d), Replicate()}, {Partial()}, gather_of_slices);
      }
    } else if (self.ndim() == index.ndim() && self.sizes[d] == index.sizes[d]) {
      out.add({Shard(d), Shard(d)}, {Shard(d)});
    }
  }
  for (ReduceOp op : kAllReduceOps) out.add({Partial(op), Replicate()}, {Partial(op)});
}

// scatter(self, dim, index[, src]): what index does not reach stays as in self.
void scatter(const OpCall& call, Strategies& out) {
  const TensorInfo& self = call.input(0);
  const TensorInfo& index = call.input(1);
  const int along = self.wrap_dim(call.int_arg("dim"));
  for (int d = 0; d < self.ndim(); ++d) {
    if (d == along || index.ndim() != self.ndim()) continue;
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
  const TensorInfo& index = call.input(1);
  const TensorInfo& src = call.input(2);
  const int along = call.input(0).wrap_dim(call.int_arg("dim"));
  if (along < index.ndim() && along < src.ndim() && index.sizes[along] == src.sizes[along]) {
    out.add({Partial(), Shard(along), Shard(along)}, {Partial()});
  }
  for (ReduceOp op : kLinearOps) out.add({Partial(op), Replicate(), Partial(op)}, {Partial(op)});
}

// take(self, index): as gather from the flattened tensor.
void take(const OpCall& call, Strategies& out) {
  for (int d = 0; d < call.input(1).ndim(); ++d) out.add({Replicate(), Shard(d)}, {Shard(d)});
  for (ReduceOp op : kAllReduceOps) out.add({Partial(op), Replicate()}, {Partial(op)});
}

void take_shape(OpCall& call) {
  call.outputs.push_back(contiguous_info(call.input(1).sizes, call.input(0).dtype));
}

// put(self, index, source): what is added may come from many ranks.
void put(const OpCall& call, Strategies& out) {
  if (!call.bool_arg("accumulate")) return;
  const TensorInfo& index = call.input(1);
  for (int d = 0; d < index.ndim(); ++d) {
    if (call.input(2).sizes == index.sizes) out.add({Partial(), Shard(d), Shard(d)}, {Partial()});
  }
  for (ReduceOp op : kLinearOps) out.add({Partial(op), Replicate(), Partial(op)}, {Partial(op)});
}

// --- one index for each slice: index_select and its like -----------------------------------------

void index_select(const OpCall& call, Strategies& out) {
  const TensorInfo& self = call.input(0);
  const int along = self.wrap_dim(call.int_arg("dim"));
  for (int d = 0; d < self.ndim(); ++d) {
    if (d != along) out.add({Shard(d), Replicate()}, {Shard(d)});
  }
  if (call.input(1).ndim() == 1 && self.ndim() > 0)
    out.add({Replicate(), Shard(0)}, {Shard(along)});
  for (ReduceOp op : kAllReduceOps) out.add({Partial(op), Replicate()}, {Partial(op)});
}

void index_select_shape(OpCall& call) {
  const TensorInfo& self = call.input(0);
  Dims sizes = self.sizes;
  if (!sizes.empty()) sizes[self.wrap_dim(call.int_arg("dim"))] = call.input(1).numel();
  call.outputs.push_back(contiguous_info(std::move(sizes), self.dtype));
}

// Slices of self at "index" are replaced by those of "source", or filled (then there is no source).
void index_write(const OpCall& call, Strategies& out) {
  const TensorInfo& self = call.input(0);
  const int along = self.wrap_dim(call.int_arg("dim"));
  const bool has_source = call.num_inputs() == 3 && call.input(2).ndim() == self.ndim();
  for (int d = 0; d < self.ndim(); ++d) {
    if (d == along) continue;
    std::vector<Placement> inputs = {Shard(d), Replicate()};
    if (call.num_inputs() == 3) inputs.push_back(has_source ? Shard(d) : Replicate());
    out.add(std::move(inputs), {Shard(d)});
  }
}

void index_add(const OpCall& call, Strategies& out) {
  index_write(call, out);
  const TensorInfo& self = call.input(0);
  if (call.input(1).ndim() == 1 && self.ndim() > 0 && call.input(2).ndim() == self.ndim()) {
    out.add({Partial(), Shard(0), Shard(self.wrap_dim(call.int_arg("dim")))}, {Partial()});
  }
  for (ReduceOp op : kLinearOps) out.add({Partial(op), Replicate(), Partial(op)}, {Partial(op)});
}

// --- any number of index tensors: index and index_put --------------------------------------------

bool is_mask(at::ScalarType dtype) {
  return dtype == at::kBool || dtype == at::kByte;
}

// Which dimension of self[indices] is which. Input 0 is self, inputs 1... are the indices (None for
// a dimension that is not indexed); the indices broadcast to a block of dimensions.
class Indexing {
 public:
  explicit Indexing(const OpCall& call) : call_(call), ndim_(call.input(0).ndim()) {
    const int indices = call.arg_index("indices");
    std::vector<int> indexed;
    std::vector<Dims> shapes;
    for (int i = 1; i < call.num_inputs() && call.input_arg[i] == indices; ++i) {
      ++num_indices_;
      if (!call.input(i).defined) continue;
      indexed.push_back(i - 1);
      shapes.push_back(call.input(i).sizes);
      masks_ |= is_mask(call.input(i).dtype);
    }
    block_ndim_ = static_cast<int>(broadcast_sizes(shapes).size());
    // Adjacent indices leave their block where they stand; others put it in front.
    const bool adjacent =
        !indexed.empty() && indexed.back() - indexed[0] + 1 == static_cast<int>(indexed.size());
    block_begin_ = adjacent ? indexed[0] : 0;
    int others = 0;
    for (int d = 0; d < ndim_; ++d) {
      if (std::find(indexed.begin(), indexed.end(), d) != indexed.end()) {
        result_dim_.push_back(-1);
      } else {
        result_dim_.push_back(others < block_begin_ ? others : others + block_ndim_);
        ++others;
      }
    }
    result_ndim_ = others + block_ndim_;
  }

  bool has_masks() const { return masks_; }
  int num_indices() const { return num_indices_; }
  // The dimension of the result that dimension d of self becomes; -1 if it is indexed.
  int result_dim(int d) const { return result_dim_[d]; }
  int result_ndim() const { return result_ndim_; }
  int block_ndim() const { return block_ndim_; }
  int block_begin() const { return block_begin_; }
  // The placement of an index where dimension j of the block is sharded.
  Placement index_placement(int i, int j) const {
    const TensorInfo& index = call_.input(i + 1);
    if (!index.defined) return Replicate();
    const int dim = j - (block_ndim_ - index.ndim());
    return dim < 0 || index.sizes[dim] == 1 ? Replicate() : Shard(dim);
  }

 private:
  const OpCall& call_;
  const int ndim_;
  int num_indices_ = 0;
  bool masks_ = false;
  int block_ndim_ = 0;
  int block_begin_ = 0;
  int result_ndim_ = 0;
  std::vector<int> result_dim_;
};

void index(const OpCall& call, Strategies& out) {
  const Indexing indexing(call);
  for (int d = 0; d < call.input(0).ndim(); ++d) {
    if (indexing.result_dim(d) < 0) continue;
    std::vector<Placement> inputs(call.num_inputs(), Replicate());
    inputs[0] = Shard(d);
    out.add(std::move(inputs), {Shard(indexing.result_dim(d))});
  }
  for (int j = 0; j < indexing.block_ndim(); ++j) {
    std::vector<Placement> inputs = {Replicate()};
    for (int i = 0; i < indexing.num_indices(); ++i)
      inputs.push_back(indexing.index_placement(i, j));
    out.add(std::move(inputs), {Shard(indexing.block_begin() + j)});
  }
  for (ReduceOp op : kAllReduceOps) {
    std::vector<Placement> inputs(call.num_inputs(), Replicate());
    inputs[0] = Partial(op);
    out.add(std::move(inputs), {Partial(op)});
  }
}

// self with self[indices] set to values, or with values added.
void index_put(const OpCall& call, Strategies& out) {
  const Indexing indexing(call);
  if (indexing.has_masks()) return;
  const TensorInfo& values = call.inputs.back();
  // Values broadcast to the shape of self[indices].
  auto values_placement = [&](int dim, int64_t size) {
    const int own = dim - (indexing.result_ndim() - values.ndim());
    return own < 0 || (values.sizes[own] == 1 && size != 1) ? Replicate() : Shard(own);
  };
  for (int d = 0; d < call.input(0).ndim(); ++d) {
    if (indexing.result_dim(d) < 0) continue;
    std::vector<Placement> inputs(call.num_inputs(), Replicate());
    inputs[0] = Shard(d);
    inputs.back() = values_placement(indexing.result_dim(d), call.input(0).sizes[d]);
    out.add(std::move(inputs), {Shard(d)});
  }
  if (!call.bool_arg("accumulate")) return;
  std::vector<Dims> shapes;
  for (int i = 0; i < indexing.num_indices(); ++i) {
    if (call.input(i + 1).defined) shapes.push_back(call.input(i + 1).sizes);
  }
  const Dims block = broadcast_sizes(shapes);
  for (int j = 0; j < indexing.block_ndim(); ++j) {
    if (block[j] == 1) continue;
    std::vector<Placement> inputs = {Partial()};
    for (int i = 0; i < indexing.num_indices(); ++i)
      inputs.push_back(indexing.index_placement(i, j));
    inputs.push_back(values_placement(indexing.block_begin() + j, block[j]));
    out.add(std::move(inputs), {Partial()});
  }
  for (ReduceOp op : kLinearOps) {
    std::vector<Placement> inputs(call.num_inputs(), Replicate());
    inputs[0] = Partial(op);
    inputs.back() = Partial(op);
    out.add(std::move(inputs), {Partial(op)});
  }
}

// Masks among the indices: how much they select is known only from their values.
bool has_masks(const c10::OperatorHandle&, absl::Span<const c10::IValue> args) {
  for (const c10::IValue& index : args[1].toListRef()) {
    if (index.isTensor() && is_mask(index.toTensor().scalar_type())) return true;
  }
  return false;
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
  for (int d = 0; d < call.input(0).ndim(); ++d) {
    std::vector<Placement> inputs(call.num_inputs(), Replicate());
    inputs[0] = Shard(d);
    out.add(std::move(inputs), {Shard(d)});
  }
}

// Every line of sorted_sequence for itself, or one for all.
void searchsorted(const OpCall& call, Strategies& out) {
  const TensorInfo& sequence = call.input(0);
  const TensorInfo& self = call.input(1);
  const bool one_line = sequence.ndim() == 1;
  const TensorInfo* sorter = call.num_inputs() == 3 ? &call.input(2) : nullptr;
  for (int d = 0; d < self.ndim(); ++d) {
    const bool last = d == self.ndim() - 1;
    const Placement lines = one_line || last ? Replicate() : Shard(d);
    std::vector<Placement> inputs = {lines, Shard(d)};
    if (sorter != nullptr) inputs.push_back(lines);
    out.add(std::move(inputs), {Shard(d)});
  }
}

void positions_shape(OpCall& call) {
  const bool int32 = call.bool_arg("out_int32");
  const int values = call.arg_index("boundaries") >= 0 ? 0 : 1;
  call.outputs.push_back(contiguous_info(call.input(values).sizes, int32 ? at::kInt : at::kLong));
}

}  // namespace

void add_indexing_rules(RuleTable& table) {
  table.add("aten::gather", Rule(gather));
  table.add({"aten::scatter", "aten::scatter_reduce"}, Rule(scatter));
  table.add("aten::scatter_add", Rule(scatter_add));

  table.add("aten::take", Rule(take).shapes(take_shape));
  table.add("aten::put", Rule(put).shapes(like_input));

  table.add("aten::index_select", Rule(index_select).shapes(index_select_shape));
  table.add("aten::index_add", Rule(index_add));
  table.add({"aten::index_copy", "aten::index_fill", "aten::index_reduce"}, Rule(index_write));

  table.add({"aten::index", "aten::_unsafe_index"},
            Rule(index).composed_when(has_masks, index_by_masks));
  table.add({"aten::index_put", "aten::_index_put_impl", "aten::_unsafe_index_put"},
            Rule(index_put).shapes(like_input));
  table.add("aten::masked_scatter",
            Rule([](const OpCall&, Strategies&) {}).shapes(masked_scatter_shape));

  table.add("aten::bucketize.Tensor", Rule(against_all).shapes(positions_shape));
  table.add("aten::searchsorted.Tensor", Rule(searchsorted).shapes(positions_shape));
  table.add({"aten::isin.Tensor_Tensor", "aten::isin.Tensor_Scalar"}, Rule(against_all));
}

}  // namespace shardweave::dtensor_internal
