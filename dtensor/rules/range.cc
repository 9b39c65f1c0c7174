// Ranges between numbers that are tensors: every rank has the whole range.
#include <string_view>

#include "absl/strings/str_cat.h"
#include "c10/core/DefaultDtype.h"
#include "shardweave/dtensor/rules/common.h"
#include "shardweave/dtensor/rules/families.h"

namespace shardweave::dtensor_internal {
namespace {

// linspace, logspace between numbers that are tensors: a user who wants it cut says so afterwards.
void between_shape(OpCall& call) {
  at::ScalarType dtype = c10::get_default_dtype_as_scalartype();
  for (const TensorInfo& end : call.inputs) {
    if (c10::isComplexType(end.dtype)) dtype = c10::toComplexType(dtype);
  }
  for (std::string_view name : {"start", "end"}) {
    if (call.arg(name).isComplexDouble()) dtype = c10::toComplexType(dtype);
  }
  if (call.has_arg("dtype") && !call.arg("dtype").isNone()) {
    dtype = call.arg("dtype").toScalarType();
  }
  call.outputs.push_back(contiguous_info({call.int_arg("steps")}, dtype));
}

}  // namespace

void add_range_rules(RuleTable& table) {
  for (const char* ends : {"Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor"}) {
    table.add(absl::StrCat("aten::linspace.", ends), replicated().shapes(between_shape));
    table.add(absl::StrCat("aten::logspace.", ends), replicated().shapes(between_shape));
  }
}

}  // namespace shardweave::dtensor_internal
