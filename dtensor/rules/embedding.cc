// Embedding: rows of a table by index. The table may be cut by columns, or by rows: then a rank
// looks up the rows that it has and gives zeros for the others, a Partial sum.
#include "ATen/ops/embedding.h"
#include "ATen/ops/_assert_async.h"
#include "ATen/ops/aminmax.h"
#include "ATen/ops/embedding_dense_backward.h"
#include "ATen/ops/where.h"
#include "ATen/ops/zeros.h"
#include "ATen/ops/zeros_like.h"
#include "absl/strings/str_cat.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/dtensor/rules/common.h"
#include "shardweave/dtensor/rules/families.h"
#include "shardweave/dtensor/rules/rows.h"
#include "torch/csrc/autograd/functions/accumulate_grad.h"

namespace shardweave::dtensor_internal {
namespace {

// The operator itself raises for an index outside the table; masking must not hide it. On a GPU
// without waiting for it, as there.
void check_range(const at::Tensor& indices, int64_t rows, const char* op) {
  if (indices.numel() == 0) return;
  if (!indices.is_cpu()) {
    at::_assert_async(indices.ge(0).logical_and_(indices.lt(rows)).all());
    return;
  }
  const auto [low, high] = at::aminmax(indices);
  const int64_t first = low.item().toLong();
  const int64_t last = high.item().toLong();
  if (first < 0 || last >= rows) {
    throw Error(
        absl::OutOfRangeError(absl::StrCat(op, ": index ", first < 0 ? first : last,
                                           " is out of range for a table of ", rows, " rows")));
  }
}

void embedding_of_rows(const c10::OperatorHandle& op, c10::Stack& stack, const LocalCall& call) {
  BoxedCall boxed(op, stack);
  const at::Tensor weight = boxed.tensor("weight");
  const at::Tensor indices = boxed.tensor("indices");
  const HeldRows rows = held_rows(indices, boxed.spec(call, "weight"), "embedding");
  if (!rows.here.defined()) {
    std::vector<int64_t> sizes = indices.sizes().vec();
    sizes.push_back(weight.size(1));
    boxed.finish({at::zeros(sizes, weight.options())});
    return;
  }
  at::Tensor result = at::embedding(weight, rows.local);
  result.masked_fill_(rows.here.logical_not().unsqueeze(-1), 0);
  boxed.finish({std::move(result)});
}

// How many indices the ranks along call.mesh_dim have together.
int64_t looked_up_here(const OpCall& call) {
  const TensorInfo& indices = call.input("indices");
  int64_t count = indices.numel();
  for (int m = 0; indices.spec != nullptr && m < indices.spec->layout.mesh_ndim(); ++m) {
    if (m == call.mesh_dim || !indices.spec->layout[m].is_shard()) continue;
    count /= indices.spec->context->mesh().size(m);
  }
  return count;
}

void embedding(const OpCall& call, Strategies& out) {
  const int index_dims = call.input("indices").ndim();
  for (int d = 0; d < index_dims; ++d) out.add({{"indices", Shard(d)}}, {Shard(d)});
  out.add({{"weight", Shard(1)}}, {Shard(index_dims)});
  // A sum of what is looked up is not owed where the table is nothing beside it: positions of T5.
  constexpr int64_t kFewRows = 64;
  const TensorInfo& weight = call.input("weight");
  const int64_t rows = weight.ndim() == 0 ? 0 : weight.sizes[0];
  if (rows * kFewRows > looked_up_here(call)) {
    out.add({{"weight", Shard(0)}}, {Partial()}, embedding_of_rows);
  }
  out.add_linear({{"weight"}});
}

void embedding_shape(OpCall& call) {
  const TensorInfo& weight = call.input("weight");
  if (weight.ndim() != 2) {
    throw Error(absl::InvalidArgumentError(
        absl::StrCat("embedding: the weight must have 2 dimensions, not ", weight.ndim())));
  }
  Dims sizes = call.input("indices").sizes;
  sizes.push_back(weight.sizes[1]);
  call.outputs.push_back(contiguous_info(std::move(sizes), weight.dtype));
}

void embedding_dense_backward(const OpCall& call, Strategies& out) {
  const int index_dims = call.input("indices").ndim();
  // Scaling by frequency needs the counts over all indices.
  if (!call.bool_arg("scale_grad_by_freq")) {
    for (int d = 0; d < index_dims; ++d) {
      out.add({{"grad_output", Shard(d)}, {"indices", Shard(d)}}, {Partial()});
    }
  }
  // LibTorch's kernel for GPUs reads a column where there is none.
  out.add({{"grad_output", Shard(index_dims)}}, {Shard(1)}, zeros_if_empty);
  out.add_linear({{"grad_output"}});
}

void embedding_dense_backward_shape(OpCall& call) {
  const TensorInfo& grad = call.input("grad_output");
  call.outputs.push_back(
      contiguous_info({call.int_arg("num_weights"), grad.sizes.back()}, grad.dtype));
}

// The table whose gradient this is, if it is a parameter: the node of autograd that is running knows
// what it is for.
at::Tensor table_of_gradient(const Arguments& args) {
  const std::shared_ptr<torch::autograd::Node> node = torch::autograd::get_current_node();
  if (node == nullptr || node->num_outputs() == 0) return {};
  const auto* leaf =
      dynamic_cast<const torch::autograd::AccumulateGrad*>(node->next_edge(0).function.get());
  if (leaf == nullptr || !is_dtensor(leaf->variable)) return {};
  const at::Tensor& grad = args.tensor("grad_output");
  const int64_t rows = args["num_weights"].toInt();
  const bool fits = leaf->variable.dim() == 2 && leaf->variable.size(0) == rows && grad.dim() > 0 &&
                    leaf->variable.size(1) == grad.size(-1);
  return fits ? leaf->variable : at::Tensor();
}

// Whether gathering the columns of the incoming gradient is less than moving the table's from columns to
// rows.
bool is_less_than_table(const at::Tensor& grad, const at::Tensor& table, int mesh_dim) {
  const int ranks = meta_of(grad).context->mesh().shape()[mesh_dim];
  return grad.numel() <= table.numel() / ranks;
}

// The gradient's placements if some of its rows are all that a rank needs: the table is cut by rows
// where indices and incoming gradient are whole, or the latter can be had so.
std::optional<Placements> rows_of_gradient(const Arguments& args) {
  const at::Tensor& grad = args.tensor("grad_output");
  const at::Tensor& indices = args.tensor("indices");
  const bool by_frequency = args["scale_grad_by_freq"].toBool();
  if (by_frequency || !is_dtensor(grad) || !is_dtensor(indices)) return std::nullopt;
  const at::Tensor table = table_of_gradient(args);
  if (!table.defined() || meta_of(table).context != meta_of(grad).context) return std::nullopt;
  Placements placements(layout_of(table).mesh_ndim());
  bool fewer = false;
  for (size_t m = 0; m < placements.size(); ++m) {
    const Placement &of_grad = layout_of(grad)[m], &of_indices = layout_of(indices)[m];
    const bool by_columns = of_grad.is_shard(static_cast<int>(grad.dim()) - 1) &&
                            layout_of(table)[m].is_shard(0) &&
                            is_less_than_table(grad, table, static_cast<int>(m));
    if ((of_grad.is_replicate() || by_columns) && of_indices.is_replicate()) {
      if (!layout_of(table)[m].is_shard(0)) continue;
      placements[m] = layout_of(table)[m];
      fewer = true;
    } else if (of_grad == of_indices && of_grad.is_shard() && of_grad.dim() < indices.dim()) {
      placements[m] = Partial();
    } else {
      return std::nullopt;
    }
  }
  if (!fewer) return std::nullopt;
  return placements;
}

bool wants_some_rows(const Arguments& args) {
  return rows_of_gradient(args).has_value();
}

void gradient_of_some_rows(const c10::OperatorHandle& op, c10::Stack& stack) {
  const Arguments args(op, absl::MakeConstSpan(stack).last(op.schema().arguments().size()));
  const at::Tensor indices = args.tensor("indices"), given = args.tensor("grad_output");
  const Layout order = layout_of(table_of_gradient(args));
  const Layout layout = value_or_throw(Layout::create(*rows_of_gradient(args), order.order()));
  Placements whole = layout_of(given).placements();
  for (Placement& p : whole) {
    if (p.is_shard(static_cast<int>(given.dim()) - 1)) p = Replicate();
  }
  const at::Tensor grad = move_input(
      op, given, value_or_throw(Layout::create(whole, layout_of(given).order())), "grad_output");
  const DTensorMeta& meta = meta_of(grad);
  const Dims sizes = {args["num_weights"].toInt(), grad.size(-1)};
  SpecRef spec = meta.context->intern(layout, sizes, contiguous_strides(sizes), grad.scalar_type(),
                                      meta.spec->device);
  const at::Tensor& local = meta_of(indices).local();
  const HeldRows rows = held_slices(local, *spec, 0);
  at::Tensor result;
  if (rows.here.defined()) {
    constexpr int64_t kElsewhere = -1;
    const at::Tensor wanted = rows.here.logical_and(local.ne(args["padding_idx"].toInt()));
    result = at::embedding_dense_backward(
        meta.local(), rows.local.masked_fill(wanted.logical_not(), kElsewhere),
        spec->local_sizes[0], kElsewhere, /*scale_grad_by_freq=*/false);
  } else {
    result = at::zeros({0, sizes[1]}, meta.local().options());
  }
  at::Tensor wrapped = wrap(std::move(result), std::move(spec), meta.context);
  BoxedCall(op, stack).finish({std::move(wrapped)});
}

// Rows are scaled where they are. A table that is cut by columns is gathered, for a row's norm is that
// of the whole row.
void renorm_of_rows(const c10::OperatorHandle& op, c10::Stack& stack, const LocalCall& call) {
  BoxedCall boxed(op, stack);
  const HeldRows rows =
      held_rows(boxed.tensor("indices"), boxed.spec(call, "self"), "embedding_renorm_");
  if (!rows.here.defined()) {
    boxed.finish({boxed.tensor("self")});
    return;
  }
  const at::Tensor indices = rows.local.masked_select(rows.here);
  if (indices.numel() == 0) return boxed.finish({boxed.tensor("self")});
  boxed["indices"] = indices;
  boxed.run();
}

void embedding_renorm(const OpCall& /*call*/, Strategies& out) {
  out.add({{"self", Shard(0)}}, {Shard(0)}, renorm_of_rows);
}

bool indices_are_not_integers(const Arguments& args) {
  const at::ScalarType dtype = args.tensor("indices").scalar_type();
  return dtype != at::kLong && dtype != at::kInt;
}

}  // namespace

HeldRows held_rows(const at::Tensor& indices, const Spec& table, const char* op) {
  check_range(indices, table.sizes[0], op);
  return held_slices(indices, table, 0);
}

HeldRows held_slices(const at::Tensor& indices, const Spec& table, int dim) {
  const MeshContext& context = *table.context;
  HeldRows rows{at::zeros_like(indices), {}};
  int64_t offset = 0;
  for (const Interval& held : local_intervals(table.layout, context.mesh().shape(),
                                              context.coordinate(), table.sizes, dim)) {
    const at::Tensor in = indices.ge(held.begin).logical_and_(indices.lt(held.end));
    rows.local = at::where(in, indices.sub(held.begin - offset), rows.local);
    rows.here = rows.here.defined() ? rows.here.logical_or_(in) : in;
    offset += held.size();
  }
  return rows;
}

void add_embedding_rules(RuleTable& table) {
  table.add("aten::embedding",
            sharded(embedding).shapes(embedding_shape).refuses(indices_are_not_integers));
  table.add("aten::embedding_dense_backward",
            sharded(embedding_dense_backward)
                .shapes(embedding_dense_backward_shape)
                .when(wants_some_rows, composed(gradient_of_some_rows)));
  table.add("aten::embedding_renorm", sharded(embedding_renorm).shapes_like({"self"}));
}

}  // namespace shardweave::dtensor_internal
