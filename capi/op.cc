// Operators of LibTorch by name.
//
// Here and elsewhere in capi/, what each call of an operator runs through is [[gnu::hot]]: the linker
// puts it side by side, in a few pages instead of fifteen. A larger operator of LibTorch runs through
// more pages than the processor knows the addresses of, and each further one costs it several ns.
#include <algorithm>
#include <array>
#include <atomic>
#include <iterator>
#include <memory>

#include "ATen/EmptyTensor.h"
#include "ATen/core/dispatch/Dispatcher.h"
#include "ATen/ops/_local_scalar_dense.h"
#include "absl/strings/str_join.h"
#include "shardweave/capi/values.h"
#include "shardweave/comm/failed_rank.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/observe/explain.h"

namespace shardweave::capi {
namespace {

struct Overload {
  c10::OperatorHandle handle;
  Signature signature;
};

// kLenient: also numbers for tensors, and single numbers for lists.
constexpr Match kMatches[] = {Match::kExact, Match::kLenient};

// Which overload was taken for arguments of which kinds. Any thread: an entry is one word, and says
// both.
class Choices {
 public:
  struct Choice {
    uint8_t overload;
    uint8_t match;
  };

  // The kinds of arguments whose fit they decide alone, in a word; 0: not of these.
  static uint64_t kinds_of(const GivenArguments& given) {
    if (!given.names.empty() || given.values.size() > kMost) return 0;
    uint64_t kinds = given.values.size() + 1;
    for (const swv_value& v : given.values) {
      // "channels_last" fits where "mean" does not; nor do lists of tensors with holes in them.
      if (v.kind == SWV_VALUE_STRING || v.kind == SWV_VALUE_TENSORS) return 0;
      kinds = kinds << 4 | static_cast<uint64_t>(v.kind);
    }
    return kinds;
  }
  std::optional<Choice> find(uint64_t kinds) const {
    const uint64_t entry = entries_[place(kinds)].load(std::memory_order_relaxed);
    if (entry >> 16 != kinds) return std::nullopt;
    return Choice{static_cast<uint8_t>(entry), static_cast<uint8_t>(entry >> 8)};
  }
  void keep(uint64_t kinds, size_t overload, size_t match) {
    if (overload > 0xff) return;
    entries_[place(kinds)].store(kinds << 16 | match << 8 | overload, std::memory_order_relaxed);
  }

 private:
  static constexpr size_t kMost = 11;  // 4 bits each, and their number, in 48
  static constexpr size_t kEntries = 8;
  static size_t place(uint64_t kinds) { return (kinds * 0x9e3779b97f4a7c15) >> 61; }

  std::array<std::atomic<uint64_t>, kEntries> entries_ = {};
};
static_assert(SWV_VALUE_FLOATS < 16);

}  // namespace
}  // namespace shardweave::capi

namespace shardweave::capi {
namespace {

struct Operator {
  std::string name;
  std::vector<Overload> overloads;  // at least one
  mutable Choices choices = {};
};

}  // namespace
}  // namespace shardweave::capi

struct swv_op : shardweave::capi::Handle<shardweave::capi::Kind::kOp> {
  std::shared_ptr<const shardweave::capi::Operator> op;
};

namespace shardweave::capi {
namespace {

const Operator& operator_of(const swv_op* handle) {
  return *in(handle, "op").op;
}

// Out-variants last; those that ask for less first.
bool before(const Overload& a, const Overload& b) {
  const auto key = [](const Overload& o) {
    return std::tuple(o.signature.has_out, o.signature.arguments.size(),
                      o.handle.operator_name().overload_name);
  };
  return key(a) < key(b);
}

[[noreturn]] void fail_not_found(const std::string& wanted) {
  std::vector<std::string> names;
  const bool overload = wanted.find('.') != std::string::npos;
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    names.push_back(overload ? c10::toString(name) : name.name);
  }
  fail(absl::StatusCode::kNotFound,
       str_cat("argument 'name': there is no operator '", wanted, "'", suggestion(wanted, names)));
}

// One argument too many is no output, which would be overwritten, where nobody has said which overload.
void keep_outputs_by_name(Overload& overload) {
  const std::vector<c10::Argument>& arguments = overload.handle.schema().arguments();
  const auto first = std::find_if(arguments.begin(), arguments.end(),
                                  [](const c10::Argument& a) { return a.is_out(); });
  overload.signature.most_by_position = static_cast<size_t>(first - arguments.begin());
}

swv_op* find_op(std::string_view given) {
  std::string name(given);
  if (name.find("::") == std::string::npos) name = str_cat("aten::", name);
  auto& dispatcher = c10::Dispatcher::singleton();
  std::vector<Overload> overloads;
  const size_t dot = name.find('.', name.find("::"));
  if (dot != std::string::npos) {
    std::string overload = name.substr(dot + 1);
    if (overload == "default") overload.clear();  // as PyTorch writes it
    if (auto handle = dispatcher.findSchema({name.substr(0, dot), overload})) {
      overloads.push_back({*handle, Signature(handle->schema())});
    }
  } else {
    for (const c10::OperatorName& each : dispatcher.getAllOpNames()) {
      if (each.name != name) continue;
      if (auto handle = dispatcher.findSchema(each)) {
        overloads.push_back({*handle, Signature(handle->schema())});
        keep_outputs_by_name(overloads.back());
      }
    }
    std::sort(overloads.begin(), overloads.end(), before);
  }
  if (overloads.empty()) fail_not_found(name);
  auto op = std::make_shared<Operator>();
  op->name = std::move(name);
  op->overloads = std::move(overloads);
  return make<swv_op>(std::move(op));
}

std::string schemas(const Operator& op) {
  return absl::StrJoin(op.overloads, "\n", [](std::string* to, const Overload& overload) {
    str_append(to, overload.signature.text);
  });
}

// A name that no overload knows is what is wrong, whatever else there is.
void check_names(const Operator& op, const GivenArguments& given) {
  for (const char* name : given.names) {
    std::vector<std::string> known;
    for (const Overload& overload : op.overloads) {
      for (const Argument& argument : overload.signature.arguments) known.push_back(argument.name);
    }
    if (std::find(known.begin(), known.end(), name) != known.end()) continue;
    fail(absl::StatusCode::kInvalidArgument,
         str_cat(op.name, ": has no argument '", name, "'", suggestion(name, known),
                 op.overloads.size() == 1 ? "; its schema is " : "; its schemas are:\n",
                 schemas(op)));
  }
}

// The first overload that fits, strictly and then leniently.
[[gnu::noinline]] const Overload& try_all(const Operator& op, const GivenArguments& given,
                                          uint64_t kinds, CallStack& stack) {
  for (size_t match = 0; match < std::size(kMatches); ++match) {
    for (size_t i = 0; i < op.overloads.size(); ++i) {
      const Overload& overload = op.overloads[i];
      if (push_arguments(overload.signature, given, kMatches[match], stack, nullptr)) {
        if (kinds != 0) op.choices.keep(kinds, i, match);
        return overload;
      }
      stack.values.clear();
    }
  }
  check_names(op, given);
  std::string mismatch;
  if (op.overloads.size() == 1) {
    push_arguments(op.overloads[0].signature, given, Match::kLenient, stack, &mismatch);
    stack.values.clear();
    fail(absl::StatusCode::kInvalidArgument,
         str_cat(op.name, ": ", mismatch, "; its schema is ", schemas(op)));
  }
  fail(absl::StatusCode::kInvalidArgument, str_cat(op.name, ": the arguments (", given_kinds(given),
                                                   ") fit none of its schemas:\n", schemas(op)));
}

// The overload whose arguments fit; they are on the stack then.
[[gnu::hot]] const Overload& choose(const Operator& op, const GivenArguments& given,
                                    CallStack& stack) {
  // The only one there is, or the one that fitted arguments of these kinds before.
  std::optional<Choices::Choice> likely;
  uint64_t kinds = 0;
  if (op.overloads.size() == 1) {
    likely = Choices::Choice{.overload = 0, .match = 0};
  } else if (kinds = Choices::kinds_of(given); kinds != 0) {
    likely = op.choices.find(kinds);
  }
  if (likely.has_value()) {
    const Overload& overload = op.overloads[likely->overload];
    if (push_arguments(overload.signature, given, kMatches[likely->match], stack, nullptr))
      return overload;
    stack.values.clear();
  }
  return try_all(op, given, kinds, stack);
}

bool has_its_memory(const at::Tensor& t) {
  if (!t.has_storage() || t.numel() == 0) return true;
  try {
    return t.storage().nbytes() >= at::detail::computeStorageNbytes(
                                       t.sizes(), t.strides(), t.itemsize(), t.storage_offset());
  } catch (const c10::Error&) {  // more than there can be
    return false;
  }
}

// An operator that fails while it resizes a result, for want of memory, leaves it with its new sizes
// and its old memory. It becomes empty.
void mend(const GivenArguments& given) {
  for (const swv_value& v : given.values) {
    if (v.kind != SWV_VALUE_TENSOR || v.as.tensor == nullptr) continue;
    const at::Tensor& t = v.as.tensor->tensor;
    if (!has_its_memory(t)) t.unsafeGetTensorImpl()->set_sizes_contiguous({0});
  }
}

// The operator's name stands in front of what it says.
[[noreturn]] void rethrow_named(const Overload& overload) {
  const absl::Status status = absl_status_of_exception();
  const std::string name = c10::toString(overload.handle.operator_name());
  const std::string message(status.message());
  if (message.starts_with(name)) throw Failure(status);
  throw Failure(retold(status, str_cat(name, ": ", message)));
}

[[gnu::hot]] void call(const swv_op* handle, swv_grad_mode mode, const GivenArguments& given,
                       swv_value* results, size_t capacity, size_t* out_num_results) {
  const Operator& op = operator_of(handle);
  const CallMode call_mode(mode, "mode");
  CallStack stack;
  const Overload& overload = choose(op, given, stack);
  check_capacity(overload.signature, results, capacity);
  try {
    overload.handle.callBoxed(stack.values);
  } catch (...) {
    mend(given);
    rethrow_named(overload);
  }
  write_results(overload.signature, stack.values, results, capacity, out_num_results);
}

void explain(const swv_op* handle, const GivenArguments& given, swv_string** out_text,
             swv_string** out_json) {
  const CallMode mode(SWV_MODE_NO_GRAD, "mode");
  CallStack stack;
  const Overload& overload = choose(operator_of(handle), given, stack);
  const Explanation explanation =
      shardweave::explain(c10::toString(overload.handle.operator_name()), std::move(stack.values));
  Owned<swv_string> text(out_text == nullptr ? nullptr : new_string(explanation.to_string()));
  Owned<swv_string> json(out_json == nullptr ? nullptr : new_string(explanation.to_json()));
  if (out_text != nullptr) *out_text = text.release();
  if (out_json != nullptr) *out_json = json.release();
}

swv_value item(const swv_tensor* handle) {
  const at::Tensor& t = tensor(handle, "tensor");
  if (t.numel() != 1) {
    fail_argument("tensor", str_cat("has ", t.numel(), " elements; wanted one"));
  }
  const CallMode mode(SWV_MODE_NO_GRAD, "mode");
  const at::Scalar number = t.item();
  if (number.type() == at::kUInt64) {  // above INT64_MAX, which an IValue has no kind for
    fail(absl::StatusCode::kOutOfRange,
         str_cat("the element is ", number.toUInt64(),
                 ", which is beyond 64 bits with a sign; take swv_tensor_copy_to_host"));
  }
  return new_value(c10::IValue(number), ArgType::kNumber);
}

}  // namespace
}  // namespace shardweave::capi

using namespace shardweave::capi;  // NOLINT: this file is the C interface of it

swv_status* swv_op_find(const char* name, swv_op** out_op) {
  return guarded(__func__, out_op, "out_op", [&] { return find_op(text(name, "name")); });
}

swv_status* swv_op_share(const swv_op* op, swv_op** out_op) {
  return guarded(__func__, out_op, "out_op", [&] { return make<swv_op>(in(op, "op").op); });
}

void swv_op_free(swv_op* op) {
  release(op, __func__);
}

swv_status* swv_op_schema(const swv_op* op, swv_string** out_text) {
  return guarded(__func__, out_text, "out_text",
                 [&] { return new_string(schemas(operator_of(op))); });
}

[[gnu::hot]] swv_status* swv_op_call(const swv_op* op, swv_grad_mode mode,
                                     const swv_value* arguments, size_t num_arguments,
                                     swv_value* out_results, size_t capacity,
                                     size_t* out_num_results) {
  return guarded(__func__, [&] {
    call(op, mode, given_arguments(arguments, num_arguments), out_results, capacity,
         out_num_results);
  });
}

swv_status* swv_op_call_named(const swv_op* op, swv_grad_mode mode, const swv_value* arguments,
                              size_t num_arguments, const char* const* names, size_t num_names,
                              swv_value* out_results, size_t capacity, size_t* out_num_results) {
  return guarded(__func__, [&] {
    call(op, mode, given_arguments(arguments, num_arguments, names, num_names), out_results,
         capacity, out_num_results);
  });
}

swv_status* swv_op_explain(const swv_op* op, const swv_value* arguments, size_t num_arguments,
                           swv_string** out_text, swv_string** out_json) {
  return guarded(__func__, [&] {
    explain(op, given_arguments(arguments, num_arguments), out_text, out_json);
  });
}

swv_status* swv_tensor_item(const swv_tensor* tensor, swv_value* out_value) {
  return guarded(__func__, out_value, "out_value", [&] { return item(tensor); });
}
