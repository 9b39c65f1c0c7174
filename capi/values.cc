#include "shardweave/capi/values.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <sstream>
#include <tuple>

#include "ATen/ScalarOps.h"
#include "ATen/core/List.h"
#include "ATen/core/jit_type.h"
#include "absl/container/inlined_vector.h"
#include "shardweave/comm/str_cat.h"

namespace shardweave::capi {
namespace {

// --- schemas -------------------------------------------------------------------------------------

ArgType scalar_kind(const c10::Type& type) {
  switch (type.kind()) {
    case c10::TypeKind::TensorType:
      return ArgType::kTensor;
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
      return ArgType::kInt;
    case c10::TypeKind::FloatType:
      return ArgType::kFloat;
    case c10::TypeKind::BoolType:
    case c10::TypeKind::SymBoolType:
      return ArgType::kBool;
    case c10::TypeKind::NumberType:
      return ArgType::kNumber;
    case c10::TypeKind::ComplexType:
      return ArgType::kComplex;
    case c10::TypeKind::StringType:
      return ArgType::kString;
    case c10::TypeKind::ScalarTypeType:
      return ArgType::kDType;
    case c10::TypeKind::LayoutType:
      return ArgType::kTorchLayout;
    case c10::TypeKind::MemoryFormatType:
      return ArgType::kMemoryFormat;
    case c10::TypeKind::DeviceObjType:
      return ArgType::kDevice;
    default:
      return ArgType::kOther;
  }
}

ArgType list_kind(const c10::Type& element) {
  if (element.kind() == c10::TypeKind::OptionalType) {
    const auto& inner = *element.castRaw<c10::OptionalType>()->getElementType();
    return inner.kind() == c10::TypeKind::TensorType ? ArgType::kOptionalTensorList
                                                     : ArgType::kOther;
  }
  switch (scalar_kind(element)) {
    case ArgType::kTensor:
      return ArgType::kTensorList;
    case ArgType::kInt:
      return ArgType::kIntList;
    case ArgType::kFloat:
      return ArgType::kFloatList;
    case ArgType::kBool:
      return ArgType::kBoolList;
    case ArgType::kNumber:
      return ArgType::kNumberList;
    default:
      return ArgType::kOther;
  }
}

ArgType kind_of(const c10::Type& type) {
  if (type.kind() == c10::TypeKind::ListType) {
    return list_kind(*type.castRaw<c10::ListType>()->getElementType());
  }
  return scalar_kind(type);
}

Argument make_argument(const c10::Argument& from) {
  Argument result;
  result.name = from.name();
  const c10::Type* type = from.real_type().get();
  result.type = type->str();
  if (type->kind() == c10::TypeKind::OptionalType) {
    result.optional = true;
    type = type->castRaw<c10::OptionalType>()->getElementType().get();
  }
  result.kind = kind_of(*type);
  result.written = from.alias_info() != nullptr && from.alias_info()->isWrite();
  result.fixed_size = from.N().value_or(0);
  result.has_default = from.default_value().has_value();
  if (result.has_default) result.default_value = *from.default_value();
  return result;
}

// --- lists ---------------------------------------------------------------------------------------

// Lists of arguments whose memory is kept for the next call of this thread: used again when nobody
// else holds them any more.
template <typename T>
class ListPool {
 public:
  template <typename Fill>
  c10::List<T> get(size_t size, const Fill& fill) {
    return get(size, fill, [](const c10::List<T>&) { return false; });
  }
  // `is_it`: whether a list has what `fill` would write; dims and sizes come again and again.
  template <typename Fill, typename IsIt>
  c10::List<T> get(size_t size, const Fill& fill, const IsIt& is_it) {
    const bool kept = size <= kLongestKept;
    for (c10::List<T>& list : lists_) {
      if (!kept || list.use_count() != 1) continue;
      if (list.size() == size && is_it(list)) return list;
      list.clear();
      fill(list);
      return list;
    }
    c10::List<T> list;
    list.reserve(size);
    fill(list);
    if (kept && lists_.size() < kKept) lists_.push_back(list);
    return list;
  }
  // Drops what the lists hold, so that tensors do not live longer than they should.
  void clear() {
    for (c10::List<T>& list : lists_) {
      if (list.use_count() == 1 && !list.empty()) list.clear();
    }
  }

 private:
  static constexpr size_t kKept = 8;
  static constexpr size_t kLongestKept = 64;
  std::vector<c10::List<T>> lists_;
};

// Strings of arguments, which are few and come again and again: "tanh", "mean".
class StringPool {
 public:
  c10::IValue get(std::string_view text) {
    for (const c10::IValue& known : strings_) {
      if (known.toStringRef() == text) return known;
    }
    c10::IValue made{std::string(text)};
    if (strings_.size() < kKept && text.size() <= kLongestKept) strings_.push_back(made);
    return made;
  }

 private:
  static constexpr size_t kKept = 16;
  static constexpr size_t kLongestKept = 64;
  std::vector<c10::IValue> strings_;
};

constexpr size_t kStackSize = 32;

}  // namespace

// One object, which a call looks up once: in a shared library that is a call by itself.
struct CallStack::Caches {
  c10::Stack stack;
  StringPool strings;
  std::tuple<ListPool<at::Tensor>, ListPool<std::optional<at::Tensor>>, ListPool<int64_t>,
             ListPool<double>, ListPool<bool>, ListPool<at::Scalar>>
      lists;

  static Caches& of_this_thread() {
    static thread_local Caches caches;
    return caches;
  }
};

namespace {

using Caches = CallStack::Caches;

// --- arguments -----------------------------------------------------------------------------------

const char* name_of_kind(swv_value_kind kind) {
  static constexpr const char* kNames[] = {
      "none",       "the default", "a tensor",         "a bool",
      "an integer", "a float",     "a complex number", "a string",
      "a dtype",    "a device",    "tensors",          "bools",
      "integers",   "floats"};
  return kind >= 0 && kind <= SWV_VALUE_FLOATS ? kNames[kind] : "of an unknown kind";
}

std::string_view string_of(const swv_value& v) {
  const auto bytes = span(v.as.string.data, v.as.string.size, "arguments[].as.string");
  const std::string_view result(bytes.data(), bytes.size());
  check_utf8(result, "arguments[].as.string");
  return result;
}

bool memory_format(std::string_view name, c10::IValue& result) {
  static constexpr std::pair<std::string_view, at::MemoryFormat> kFormats[] = {
      {"contiguous_format", at::MemoryFormat::Contiguous},
      {"preserve_format", at::MemoryFormat::Preserve},
      {"channels_last", at::MemoryFormat::ChannelsLast},
      {"channels_last_3d", at::MemoryFormat::ChannelsLast3d}};
  for (const auto& [known, format] : kFormats) {
    if (name == known) {
      result = format;
      return true;
    }
  }
  return false;
}

bool number(const swv_value& v, c10::IValue& result) {
  switch (v.kind) {
    case SWV_VALUE_INT:
      result = v.as.integer;
      return true;
    case SWV_VALUE_FLOAT:
      result = v.as.number;
      return true;
    case SWV_VALUE_BOOL:
      result = v.as.integer != 0;
      return true;
    case SWV_VALUE_COMPLEX:
      result = c10::complex<double>(v.as.complex_number.real, v.as.complex_number.imaginary);
      return true;
    default:
      return false;
  }
}

// A number where a tensor is wanted behaves as one in an expression: it does not change the dtype.
bool wrapped_number(const swv_value& v, c10::IValue& result) {
  c10::IValue scalar;
  if (!number(v, scalar)) return false;
  at::Tensor tensor = c10::scalar_to_tensor(scalar.toScalar());
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  result = std::move(tensor);
  return true;
}

// A list with what `convert` makes of each element.
template <typename T, typename From, typename Convert>
c10::List<T> list_of(Caches& caches, absl::Span<const From> from, const Convert& convert) {
  return std::get<ListPool<T>>(caches.lists).get(from.size(), [&](c10::List<T>& list) {
    for (const From& element : from) list.push_back(convert(element));
  });
}

template <typename T>
bool numbers_list(Caches& caches, const swv_value& v, c10::IValue& result) {
  if (v.kind == SWV_VALUE_FLOATS) {
    result = list_of<T>(caches, span(v.as.floats.data, v.as.floats.size, "arguments[].as.floats"),
                        [](double x) { return T(x); });
  } else if (v.kind == SWV_VALUE_INTS) {
    result = list_of<T>(caches, span(v.as.ints.data, v.as.ints.size, "arguments[].as.ints"),
                        [](int64_t x) { return T(x); });
  } else {
    return false;
  }
  return true;
}

bool int_list(Caches& caches, const Argument& argument, const swv_value& v, Match match,
              c10::IValue& result) {
  if (v.kind == SWV_VALUE_INTS) {
    const auto ints = span(v.as.ints.data, v.as.ints.size, "arguments[].as.ints");
    result = std::get<ListPool<int64_t>>(caches.lists)
                 .get(
                     ints.size(),
                     [&](c10::List<int64_t>& list) {
                       for (const int64_t x : ints) list.push_back(x);
                     },
                     [&](const c10::List<int64_t>& list) {
                       return std::equal(ints.begin(), ints.end(), list.begin());
                     });
    return true;
  }
  if (v.kind == SWV_VALUE_INT && match == Match::kLenient) {
    const size_t size = std::max<int64_t>(1, argument.fixed_size);
    result = std::get<ListPool<int64_t>>(caches.lists).get(size, [&](auto& list) {
      list.resize(size, v.as.integer);
    });
    return true;
  }
  return false;
}

bool bool_list(Caches& caches, const swv_value& v, c10::IValue& result) {
  if (v.kind != SWV_VALUE_BOOLS) return false;
  result = list_of<bool>(caches, span(v.as.bools.data, v.as.bools.size, "arguments[].as.bools"),
                         [](swv_bool b) { return flag(b, "arguments[].as.bools[]"); });
  return true;
}

bool tensor_list(Caches& caches, const swv_value& v, c10::IValue& result) {
  if (v.kind != SWV_VALUE_TENSORS) return false;
  const auto handles = span(v.as.tensors.data, v.as.tensors.size, "arguments[].as.tensors");
  for (swv_tensor* handle : handles) {
    if (handle == nullptr) return false;
  }
  result = list_of<at::Tensor>(
      caches, absl::Span<swv_tensor* const>(handles),
      [](swv_tensor* handle) { return tensor(handle, "arguments[].as.tensors[]"); });
  return true;
}

bool optional_tensor_list(Caches& caches, const swv_value& v, c10::IValue& result) {
  if (v.kind != SWV_VALUE_TENSORS) return false;
  using Element = std::optional<at::Tensor>;
  const auto handles = span(v.as.tensors.data, v.as.tensors.size, "arguments[].as.tensors");
  result = list_of<Element>(caches, absl::Span<swv_tensor* const>(handles), [](swv_tensor* handle) {
    return handle == nullptr ? Element() : Element(tensor(handle, "arguments[].as.tensors[]"));
  });
  return true;
}

// False: `v` is no such argument.
[[gnu::hot]] bool convert(Caches& caches, const Argument& argument, const swv_value& v, Match match,
                          c10::IValue& result) {
  if (v.kind == SWV_VALUE_NONE) {
    result = c10::IValue();
    return argument.optional;
  }
  switch (argument.kind) {
    case ArgType::kTensor:
      // What an operator writes it returns by reference: to nothing, if only the stack had held it.
      return match == Match::kLenient && !argument.written && wrapped_number(v, result);
    case ArgType::kInt:
      if (v.kind != SWV_VALUE_INT) return false;
      result = v.as.integer;
      return true;
    case ArgType::kFloat:
      if (v.kind != SWV_VALUE_FLOAT && v.kind != SWV_VALUE_INT) return false;
      result = v.kind == SWV_VALUE_FLOAT ? v.as.number : static_cast<double>(v.as.integer);
      return true;
    case ArgType::kBool:
      if (v.kind != SWV_VALUE_BOOL) return false;
      result = v.as.integer != 0;
      return true;
    case ArgType::kNumber:
      return number(v, result);
    case ArgType::kComplex:  // as where float is wanted, a real number will do
      if (v.kind == SWV_VALUE_BOOL || !number(v, result)) return false;
      result = result.toScalar().toComplexDouble();
      return true;
    case ArgType::kString:
      if (v.kind != SWV_VALUE_STRING) return false;
      result = caches.strings.get(string_of(v));
      return true;
    case ArgType::kDType:
      if (v.kind != SWV_VALUE_DTYPE) return false;
      result = scalar_type(v.as.dtype, "arguments[].as.dtype");
      return true;
    case ArgType::kTorchLayout:
      if (v.kind != SWV_VALUE_STRING || string_of(v) != "strided") return false;
      result = at::Layout::Strided;
      return true;
    case ArgType::kMemoryFormat:
      return v.kind == SWV_VALUE_STRING && memory_format(string_of(v), result);
    case ArgType::kDevice:
      if (v.kind != SWV_VALUE_DEVICE) return false;
      result = present_device(v.as.device, "arguments[].as.device");
      return true;
    case ArgType::kTensorList:
      return tensor_list(caches, v, result);
    case ArgType::kOptionalTensorList:
      return optional_tensor_list(caches, v, result);
    case ArgType::kIntList:
      return int_list(caches, argument, v, match, result);
    case ArgType::kFloatList:
      return numbers_list<double>(caches, v, result);
    case ArgType::kBoolList:
      return bool_list(caches, v, result);
    case ArgType::kNumberList:
      return numbers_list<at::Scalar>(caches, v, result);
    case ArgType::kOther:
      return false;
  }
  return false;
}

// What is said is out of the way: this runs for each argument of each call.
[[noreturn, gnu::noinline, gnu::cold]] void refuse_value(const swv_value& v) {
  if (v.kind < 0 || v.kind > SWV_VALUE_FLOATS) {
    fail_argument("arguments[].kind", str_cat("is ", v.kind, "; wanted a swv_value_kind, 0 to ",
                                              int{SWV_VALUE_FLOATS}));
  }
  check_reserved(v.reserved, "arguments[].reserved");
  fail_argument("arguments[].as.integer",
                str_cat("is ", v.as.integer, " of a bool; wanted 0 or 1"));
}
inline void check_value(const swv_value& v) {
  const bool is_kind = v.kind >= 0 && v.kind <= SWV_VALUE_FLOATS;
  const bool is_bool = v.kind != SWV_VALUE_BOOL || (v.as.integer & ~int64_t{1}) == 0;
  if (!is_kind || v.reserved != 0 || !is_bool) [[unlikely]]
    refuse_value(v);
}

// --- results -------------------------------------------------------------------------------------

template <typename T>
T* allocate(size_t count) {
  // At least a byte: NULL is no memory.
  T* memory = static_cast<T*>(std::malloc(std::max<size_t>(1, count * sizeof(T))));
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

swv_value tensors_value(c10::ArrayRef<c10::IValue> list) {
  std::vector<at::Tensor> all;
  for (const c10::IValue& e : list) all.push_back(e.isTensor() ? e.toTensor() : at::Tensor());
  swv_tensor** handles = allocate<swv_tensor*>(all.size());
  const size_t size = all.size();
  try {
    write_tensors(std::move(all), handles);
  } catch (...) {
    std::free(handles);
    throw;
  }
  return swv_value_tensors(handles, size);
}

swv_value list_value(const c10::IValue& value) {
  const auto list = value.toListRef();
  if (value.isTensorList() || (!list.empty() && (list[0].isTensor() || list[0].isNone()))) {
    return tensors_value(list);
  }
  if (value.isIntList() || (!list.empty() && list[0].isInt())) {
    int64_t* data = allocate<int64_t>(list.size());
    for (size_t i = 0; i < list.size(); ++i) data[i] = list[i].toInt();
    return swv_value_ints(data, list.size());
  }
  if (value.isDoubleList() || (!list.empty() && list[0].isDouble())) {
    double* data = allocate<double>(list.size());
    for (size_t i = 0; i < list.size(); ++i) data[i] = list[i].toDouble();
    return swv_value_floats(data, list.size());
  }
  if (value.isBoolList() || (!list.empty() && list[0].isBool())) {
    swv_bool* data = allocate<swv_bool>(list.size());
    for (size_t i = 0; i < list.size(); ++i) data[i] = list[i].toBool();
    return swv_value_bools(data, list.size());
  }
  if (list.empty()) return swv_value_tensors(allocate<swv_tensor*>(0), 0);
  fail(absl::StatusCode::kUnimplemented,
       str_cat("a result is a ", value.type()->str(), ", which has no swv_value_kind"));
}

}  // namespace

std::string given_kinds(const GivenArguments& given) {
  const size_t positional = given.values.size() - given.names.size();
  std::string result;
  for (size_t i = 0; i < given.values.size(); ++i) {
    if (i > 0) result += ", ";
    if (i >= positional) str_append(&result, given.names[i - positional], ": ");
    result += name_of_kind(given.values[i].kind);
  }
  return result.empty() ? "none" : result;
}

Signature::Signature(const c10::FunctionSchema& schema) {
  for (const c10::Argument& argument : schema.arguments()) {
    arguments.push_back(make_argument(argument));
    has_out |= argument.is_out();
  }
  for (const c10::Argument& result : schema.returns()) {
    results.push_back(kind_of(*result.real_type()));
  }
  std::ostringstream out;
  out << schema;
  text = out.str();
  most_by_position = arguments.size();
}

[[gnu::hot]] GivenArguments given_arguments(const swv_value* arguments, size_t num_arguments) {
  GivenArguments given{span(arguments, num_arguments, "arguments", 256), {}};
  for_each(given.values, "arguments[]", check_value);
  return given;
}

GivenArguments given_arguments(const swv_value* arguments, size_t num_arguments,
                               const char* const* names, size_t num_names) {
  GivenArguments given = given_arguments(arguments, num_arguments);
  given.names = span(names, num_names, "names", 256);
  if (num_names > num_arguments) {
    fail_argument("num_names", str_cat("is ", num_names, " of ", num_arguments, " arguments"));
  }
  for_each(given.names, "names[]", [](const char* name) { text(name, "names[]"); });
  return given;
}

[[gnu::hot]] bool push_arguments(const Signature& signature, const GivenArguments& given,
                                 Match match, CallStack& stack, std::string* mismatch) {
  const size_t positional = given.values.size() - given.names.size();
  const auto refuse = [&](auto&&... why) {
    if (mismatch != nullptr) *mismatch = str_cat(why...);
    return false;
  };
  if (positional > signature.most_by_position) {
    return refuse("takes ", signature.most_by_position, " arguments, not ", given.values.size());
  }
  size_t named = 0;
  for (size_t i = 0; i < signature.arguments.size(); ++i) {
    const Argument& argument = signature.arguments[i];
    const swv_value* value = i < positional ? &given.values[i] : nullptr;
    for (size_t n = 0; n < given.names.size(); ++n) {
      if (argument.name != given.names[n]) continue;
      if (value != nullptr) return refuse("argument '", argument.name, "' is given twice");
      value = &given.values[positional + n];
      ++named;
    }
    if (value == nullptr || value->kind == SWV_VALUE_DEFAULT) {
      if (!argument.has_default) return refuse("argument '", argument.name, "' is missing");
      stack.values.push_back(argument.default_value);
      continue;
    }
    bool fits;
    try {
      // Most are tensors: without a detour through convert(), which would cost as much again.
      if (value->kind == SWV_VALUE_TENSOR && argument.kind == ArgType::kTensor) {
        stack.values.emplace_back(tensor(value->as.tensor, "arguments[].as.tensor"));
        continue;
      }
      fits = convert(stack.caches, argument, *value, match, stack.values.emplace_back());
    } catch (const Failure& failure) {
      fail_at(failure, "arguments[]", value - given.values.data());
    }
    if (!fits) {
      return refuse("argument '", argument.name, "' is ", name_of_kind(value->kind), "; wanted ",
                    argument.type, argument.written ? ", which is written" : "");
    }
  }
  if (named != given.names.size()) {
    for (const char* name : given.names) {
      const auto known = [&](const Argument& a) { return a.name == name; };
      if (std::none_of(signature.arguments.begin(), signature.arguments.end(), known))
        return refuse("has no argument '", name, "'");
    }
  }
  return true;
}

void refuse_capacity(const Signature& signature, const swv_value* results, size_t capacity) {
  if (results == nullptr) fail_null("out_results");
  fail_argument("capacity", str_cat("is ", capacity, "; the operator has ",
                                    signature.results.size(), " results"));
}

swv_value new_value(c10::IValue value, ArgType type) {
  if (value.isTensor()) {
    if (!value.toTensor().defined()) return swv_value_none();
    return swv_value_tensor(make<swv_tensor>(std::move(value).toTensor()));
  }
  if (value.isNone()) return swv_value_none();
  if (value.isBool()) return swv_value_bool(value.toBool());
  if (value.isInt()) {
    if (type == ArgType::kDType)
      return swv_value_dtype(dtype_of(static_cast<at::ScalarType>(value.toInt())));
    return swv_value_int(value.toInt());
  }
  if (value.isDouble()) return swv_value_float(value.toDouble());
  if (value.isComplexDouble()) {
    const auto number = value.toComplexDouble();
    return swv_value_complex(number.real(), number.imag());
  }
  if (value.isDevice()) return swv_value_device(device_of(value.toDevice()));
  if (value.isString()) {
    const std::string& text = value.toStringRef();
    char* data = allocate<char>(text.size() + 1);
    std::memcpy(data, text.c_str(), text.size() + 1);
    return swv_value_string(data, text.size());
  }
  if (value.isList()) return list_value(value);
  fail(absl::StatusCode::kUnimplemented,
       str_cat("a result is a ", value.type()->str(), ", which has no swv_value_kind"));
}

namespace {

// All of them or none.
[[gnu::noinline]] void write_several(const Signature& signature, c10::Stack& stack,
                                     swv_value* results) {
  absl::InlinedVector<swv_value, 8> made;
  made.reserve(stack.size());
  try {
    for (size_t i = 0; i < stack.size(); ++i) {
      made.push_back(new_value(std::move(stack[i]), i < signature.results.size()
                                                        ? signature.results[i]
                                                        : ArgType::kOther));
    }
  } catch (...) {
    for (swv_value& value : made) swv_value_clear(&value);
    throw;
  }
  std::copy(made.begin(), made.end(), results);
}

}  // namespace

[[gnu::hot]] void write_results(const Signature& signature, c10::Stack& stack, swv_value* results,
                                size_t capacity, size_t* out_num_results) {
  const size_t count = stack.size();
  if (capacity != 0) {
    if (capacity < count) [[unlikely]]
      fail_argument("capacity", str_cat("is ", capacity, "; there are ", count, " results"));
    if (count == 1 && stack[0].isTensor() && stack[0].toTensor().defined()) {  // nothing to undo
      *results = swv_value_tensor(make<swv_tensor>(std::move(stack[0]).toTensor()));
    } else {
      write_several(signature, stack, results);
    }
  }
  if (out_num_results != nullptr) *out_num_results = count;
}

[[gnu::hot]] CallStack::CallStack() : caches(Caches::of_this_thread()) {
  values.swap(caches.stack);
  if (values.capacity() < kStackSize) values.reserve(kStackSize);
}

[[gnu::hot]] CallStack::~CallStack() {
  values.clear();
  values.swap(caches.stack);
  std::get<ListPool<at::Tensor>>(caches.lists).clear();
  std::get<ListPool<std::optional<at::Tensor>>>(caches.lists).clear();
}

}  // namespace shardweave::capi

void swv_value_clear(swv_value* value) {
  if (value == nullptr) return;
  switch (value->kind) {
    case SWV_VALUE_TENSOR:
      swv_tensor_free(value->as.tensor);
      break;
    case SWV_VALUE_TENSORS:
      for (size_t i = 0; i < value->as.tensors.size; ++i)
        swv_tensor_free(value->as.tensors.data[i]);
      std::free(value->as.tensors.data);
      break;
    case SWV_VALUE_STRING:
      std::free(const_cast<char*>(value->as.string.data));
      break;
    case SWV_VALUE_BOOLS:
      std::free(const_cast<swv_bool*>(value->as.bools.data));
      break;
    case SWV_VALUE_INTS:
      std::free(const_cast<int64_t*>(value->as.ints.data));
      break;
    case SWV_VALUE_FLOATS:
      std::free(const_cast<double*>(value->as.floats.data));
      break;
    default:
      break;
  }
  *value = swv_value_none();
}
