// Operators whose results are as long as the elements' values say. A part of such a result has no
// place in it before every rank has told how much it found, and a cut of it would be another layout
// with every new batch: inputs are gathered, which is not worth a warning, as there is no better
// way.
#include "ATen/ops/nonzero.h"
#include "ATen/ops/nonzero_static.h"
#include "shardweave/dtensor/rules/common.h"
#include "shardweave/dtensor/rules/families.h"

namespace shardweave::dtensor_internal {
namespace {

bool is_no_mask(const c10::OperatorHandle& /*op*/, absl::Span<const c10::IValue> args) {
  return args[0].toTensor().scalar_type() != at::kBool;
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

}  // namespace

void add_data_dependent_rules(RuleTable& table) {
  table.add("aten::nonzero", Rule::gathered().composed_when(is_no_mask, nonzero));
  table.add("aten::nonzero_static", Rule::gathered().composed_when(is_no_mask, nonzero_static));
  table.add({"aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim",
             "aten::unique_consecutive", "aten::unique_dim_consecutive",
             "aten::repeat_interleave.Tensor"},
            Rule::gathered());
}

}  // namespace shardweave::dtensor_internal
