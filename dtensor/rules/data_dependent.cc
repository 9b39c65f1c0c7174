// Operators whose results are as long as the elements' values say, or lie where these say. A part of
// such a result has no place in it before every rank has told how much it found, and a cut of it
// would be another layout with every new batch: inputs are gathered, which is not worth a warning,
// as there is no better way.
#include <cstdint>
#include <utility>
#include <vector>

#include "ATen/ops/_pack_padded_sequence.h"
#include "ATen/ops/arange.h"
#include "ATen/ops/nonzero.h"
#include "ATen/ops/nonzero_static.h"
#include "shardweave/dtensor/engine/adopt.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "shardweave/dtensor/rules/common.h"
#include "shardweave/dtensor/rules/families.h"

namespace shardweave::dtensor_internal {
namespace {

bool is_no_mask(const Arguments& args) {
  return args.tensor("self").scalar_type() != at::kBool;
}

// Which elements are not 0 is found where they are: a byte for each is gathered, not the element.
void nonzero(const c10::OperatorHandle& op, c10::Stack& stack) {
  BoxedCall call(op, stack);
  call.finish({at::nonzero(call.tensor("self").ne(0))});
}

void nonzero_static(const c10::OperatorHandle& op, c10::Stack& stack) {
  BoxedCall call(op, stack);
  call.finish({at::nonzero_static(call.tensor("self").ne(0), call["size"].toInt(),
                                  call["fill_value"].toInt())});
}

// Sequences of different lengths, one step of all after the other. LibTorch's recurrent layers read
// the number of sequences of each step from memory: that result is a plain tensor, the same on every
// rank. Which element comes where is found with the numbers of the elements.
void pack_padded_sequence(const c10::OperatorHandle& op, c10::Stack& stack) {
  BoxedCall call(op, stack);
  at::Tensor input = call.tensor("input");
  at::Tensor lengths = call.tensor("lengths");
  const std::shared_ptr<MeshContext> context = meta_of(is_dtensor(input) ? input : lengths).context;
  if (is_dtensor(lengths)) {
    lengths = full_tensor(lengths);
  } else {
    context->plain_tensors.put_off({op, static_cast<size_t>(call.index("lengths"))}, lengths);
  }
  if (call.flag("batch_first")) input = input.transpose(0, 1);
  const int64_t steps = input.size(0), batch = input.size(1);
  const at::Tensor elements = at::arange(steps * batch, at::kLong).view({steps, batch});
  auto [order, counts] = at::_pack_padded_sequence(elements, lengths, /*batch_first=*/false);
  order = order.to(input.device());
  const at::Tensor index = wrap(order, replicated_spec(*context, order), context);
  call.finish({input.flatten(0, 1).index_select(0, index), std::move(counts)});
}

}  // namespace

void add_data_dependent_rules(RuleTable& table) {
  table.add("aten::nonzero", gathered().when(is_no_mask, composed(nonzero)));
  table.add("aten::nonzero_static", gathered().when(is_no_mask, composed(nonzero_static)));
  table.add("aten::_pack_padded_sequence", composed(pack_padded_sequence));
  table.add({"aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim",
             "aten::unique_consecutive", "aten::unique_dim_consecutive",
             "aten::repeat_interleave.Tensor", "aten::masked_scatter_backward"},
            gathered());
}

}  // namespace shardweave::dtensor_internal
