// Arguments and results of operators: swv_value here, c10::IValue there, a schema in between.
//
//   Signature signature(op.schema());
//   CallStack stack;                                       // no allocation up to kStackSize values
//   if (!push_arguments(signature, call, Match::kExact, stack, mismatch)) ...
//   op.callBoxed(stack.values);
//   write_results(signature, stack.values, out_results, capacity, out_num_results);
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ATen/core/boxing/KernelFunction.h"
#include "ATen/core/function_schema.h"
#include "absl/types/span.h"
#include "shardweave/capi/handles.h"

namespace shardweave::capi {

enum class ArgType : uint8_t {
  kTensor,
  kInt,
  kFloat,
  kBool,
  kNumber,
  kComplex,
  kString,
  kDType,
  kTorchLayout,
  kMemoryFormat,
  kDevice,
  kTensorList,
  kOptionalTensorList,
  kIntList,
  kFloatList,
  kBoolList,
  kNumberList,
  kOther,  // only none can be passed
};

struct Argument {
  std::string name;
  std::string type;  // as the schema writes it
  ArgType kind = ArgType::kOther;
  bool optional = false;   // none is allowed
  bool written = false;    // in place, or an output: no number stands for it
  int64_t fixed_size = 0;  // of a list that a single number stands for; 0: as many as there are
  bool has_default = false;
  c10::IValue default_value;
};

// What a call may look like.
struct Signature {
  explicit Signature(const c10::FunctionSchema& schema);

  std::vector<Argument> arguments;
  std::vector<ArgType> results;
  std::string text;  // the schema
  bool has_out = false;
  // Of the arguments, the first, that are taken without a name.
  size_t most_by_position = 0;
};

// The arguments of one call, as they came. The last names.size() are given by name.
struct GivenArguments {
  absl::Span<const swv_value> values;
  absl::Span<const char* const> names;
};
GivenArguments given_arguments(const swv_value* arguments, size_t num_arguments);
GivenArguments given_arguments(const swv_value* arguments, size_t num_arguments,
                               const char* const* names, size_t num_names);

// Their kinds, and names: "a tensor, an integer, keepdim: a bool".
std::string given_kinds(const GivenArguments& given);

// A stack whose memory is kept for the next call of this thread.
class CallStack {
 public:
  CallStack();
  ~CallStack();
  CallStack(const CallStack&) = delete;
  CallStack& operator=(const CallStack&) = delete;

  c10::Stack values;
  // Memory of this thread for arguments; nothing depends on what is in it.
  struct Caches;
  Caches& caches;
};

// kLenient: also numbers for tensors, and single numbers for lists.
enum class Match : uint8_t { kExact, kLenient };

// Pushes the call's arguments, defaults included; false if they do not fit, with the reason in
// `mismatch` if that is not null. Throws for values that fit nothing (bad handles, unknown kinds).
bool push_arguments(const Signature& signature, const GivenArguments& given, Match match,
                    CallStack& stack, std::string* mismatch);

// Moves all that is on the stack to the results; nothing is written if one has no swv_value.
// Capacity 0 drops them.
void write_results(const Signature& signature, c10::Stack& stack, swv_value* results,
                   size_t capacity, size_t* out_num_results);
// Before a call: that write_results will have room.
[[noreturn]] void refuse_capacity(const Signature& signature, const swv_value* results,
                                  size_t capacity);
inline void check_capacity(const Signature& signature, const swv_value* results, size_t capacity) {
  if (capacity != 0 && (results == nullptr || capacity < signature.results.size())) [[unlikely]]
    refuse_capacity(signature, results, capacity);
}

// One IValue as a result.
swv_value new_value(c10::IValue value, ArgType type);

}  // namespace shardweave::capi
