// An operator's arguments and its name, for those that handle calls. Internal to dtensor/.
#pragma once

#include <string>

#include "ATen/core/dispatch/Dispatcher.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "shardweave/dtensor/engine/op_info.h"
#include "shardweave/dtensor/error.h"

namespace shardweave::dtensor_internal {

using ArgKind = OpInfo::ArgKind;

inline std::string name_of(const c10::OperatorHandle& op) {
  return c10::toString(op.operator_name());
}

// Throws Error, naming the operator.
[[noreturn]] inline void fail(const c10::OperatorHandle& op, absl::StatusCode code,
                              const std::string& what) {
  throw Error(absl::Status(code, absl::StrCat(name_of(op), ": ", what)));
}

// Calls f(tensor impl or null) for every tensor among the arguments: None gives null.
template <typename F>
void for_each_tensor(const OpInfo& info, absl::Span<const c10::IValue> args, F f) {
  for (size_t i = 0; i < args.size(); ++i) {
    const c10::IValue& v = args[i];
    if (info.args[i] == ArgKind::kTensor) {
      f(i, v.isTensor() ? v.unsafeToTensorImpl() : nullptr);
    } else if (info.args[i] == ArgKind::kTensorList && v.isList()) {
      for (const c10::IValue& e : v.toListRef())
        f(i, e.isTensor() ? e.unsafeToTensorImpl() : nullptr);
    }
  }
}

inline bool defined(const c10::TensorImpl* impl) {
  return impl != nullptr && impl != c10::UndefinedTensorImpl::singleton();
}

}  // namespace shardweave::dtensor_internal
