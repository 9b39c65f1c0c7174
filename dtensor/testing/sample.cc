#include "shardweave/dtensor/testing/sample.h"

#include <algorithm>
#include <map>

#include "ATen/ops/zeros_like.h"
#include "absl/strings/str_cat.h"
#include "shardweave/dtensor/error.h"

namespace shardweave::testing {
namespace {

[[noreturn]] void fail(const std::string& op, const std::string& what) {
  throw Error(absl::InvalidArgumentError(absl::StrCat("sample of ", op, ": ", what)));
}

c10::OperatorHandle find(const std::string& op) {
  const size_t dot = op.find('.', op.find("::"));
  const std::string name = op.substr(0, dot);
  const std::string overload = dot == std::string::npos ? "" : op.substr(dot + 1);
  auto handle = c10::Dispatcher::singleton().findSchema({name, overload});
  if (!handle.has_value()) fail(op, "LibTorch has no such operator");
  return *handle;
}

bool holds_tensors(const c10::TypePtr& type) {
  if (auto optional = type->cast<c10::OptionalType>())
    return holds_tensors(optional->getElementType());
  if (auto list = type->cast<c10::ListType>()) return holds_tensors(list->getElementType());
  return type->kind() == c10::TypeKind::TensorType;
}

bool is_optional_list(const c10::TypePtr& type) {
  auto list = type->cast<c10::ListType>();
  return list != nullptr && list->getElementType()->kind() == c10::TypeKind::OptionalType;
}

// As the schema wants it: 2 for a float is 2.0, and for a list {2}.
c10::IValue converted(c10::IValue value, const c10::TypePtr& type) {
  if (auto optional = type->cast<c10::OptionalType>()) {
    return value.isNone() ? value : converted(std::move(value), optional->getElementType());
  }
  if (type->kind() == c10::TypeKind::FloatType && value.isInt()) {
    return static_cast<double>(value.toInt());
  }
  if (auto list = type->cast<c10::ListType>(); list != nullptr && value.isInt()) {
    return c10::IValue(std::vector<int64_t>{value.toInt()});
  }
  return value;
}

// All overloads of all operators, by name.
const std::multimap<std::string, c10::OperatorHandle>& overloads() {
  static const auto* const all = [] {
    auto* found = new std::multimap<std::string, c10::OperatorHandle>;
    for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
      if (auto handle = c10::Dispatcher::singleton().findSchema(name)) {
        found->emplace(name.name, *handle);
      }
    }
    return found;
  }();
  return *all;
}

bool same_arguments(const c10::FunctionSchema& a, const c10::FunctionSchema& b) {
  size_t i = 0;
  for (const c10::Argument& argument : b.arguments()) {
    if (argument.is_out()) continue;
    if (i == a.arguments().size() || a.arguments()[i].name() != argument.name() ||
        *a.arguments()[i].type() != *argument.type()) {
      return false;
    }
    ++i;
  }
  return i == a.arguments().size();
}

bool has_out(const c10::FunctionSchema& schema) {
  return std::any_of(schema.arguments().begin(), schema.arguments().end(),
                     [](const c10::Argument& a) { return a.is_out(); });
}

// What the operator writes becomes a copy: the caller's inputs stay.
void copy_written(const c10::FunctionSchema& schema, c10::Stack& stack) {
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::AliasInfo* alias = schema.arguments()[i].alias_info();
    if (alias == nullptr || !alias->isWrite() || !stack[i].isTensor()) continue;
    stack[i] = stack[i].toTensor().clone();
  }
}

}  // namespace

Operand Operand::list(std::vector<Operand> elements) {
  std::vector<std::optional<Input>> inputs;
  for (const Operand& element : elements) inputs.push_back(element.elements_[0]);
  return Operand(std::move(inputs), true);
}

SampleCall::SampleCall(const Sample& sample) : op_(find(sample.op)) {
  const auto& arguments = op_.schema().arguments();
  size_t next = 0;
  size_t named = 0;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::Argument& argument = arguments[i];
    if (holds_tensors(argument.type())) {
      if (argument.is_out()) fail(sample.op, "name the functional form; out= follows from it");
      if (next == sample.operands.size()) {
        if (argument.type()->kind() != c10::TypeKind::OptionalType) {
          fail(sample.op, absl::StrCat("no tensor for argument '", argument.name(), "'"));
        }
        flat_.push_back({-1, static_cast<int>(i)});
        defaults_.emplace_back();
        continue;
      }
      const Operand& operand = sample.operands[next++];
      for (const std::optional<Input>& element : operand.elements()) {
        flat_.push_back(
            {element.has_value() ? static_cast<int>(inputs_.size()) : -1, static_cast<int>(i)});
        if (element.has_value()) inputs_.push_back(*element);
      }
      defaults_.push_back(operand.is_list() ? c10::IValue(true) : c10::IValue());
      continue;
    }
    auto given = std::find_if(sample.attributes.begin(), sample.attributes.end(),
                              [&](const auto& a) { return a.first == argument.name(); });
    if (given != sample.attributes.end()) {
      ++named;
      defaults_.push_back(converted(given->second, argument.type()));
    } else if (argument.default_value().has_value()) {
      defaults_.push_back(*argument.default_value());
    } else if (argument.type()->kind() == c10::TypeKind::OptionalType) {
      defaults_.emplace_back();
    } else {
      fail(sample.op, absl::StrCat("no value for argument '", argument.name(), "'"));
    }
  }
  if (next != sample.operands.size()) fail(sample.op, "more tensors than the schema has");
  if (named != sample.attributes.size()) {
    fail(sample.op, absl::StrCat("an attribute that is not in ", c10::toString(op_.schema())));
  }
}

c10::Stack SampleCall::stack(const Tensors& inputs) const {
  c10::Stack stack = defaults_;
  for (size_t k = 0; k < flat_.size();) {
    const int arg = flat_[k].arg;
    const bool is_list = defaults_[arg].isBool();
    auto tensor = [&] {
      const int i = flat_[k++].input;
      return i < 0 ? at::Tensor() : inputs[i];
    };
    if (!is_list) {
      at::Tensor t = tensor();
      stack[arg] = t.defined() ? c10::IValue(std::move(t)) : c10::IValue();
    } else if (is_optional_list(op_.schema().arguments()[arg].type())) {
      c10::List<std::optional<at::Tensor>> list;
      while (k < flat_.size() && flat_[k].arg == arg) {
        at::Tensor t = tensor();
        list.push_back(t.defined() ? std::optional<at::Tensor>(std::move(t)) : std::nullopt);
      }
      stack[arg] = std::move(list);
    } else {
      c10::List<at::Tensor> list;
      while (k < flat_.size() && flat_[k].arg == arg) list.push_back(tensor());
      stack[arg] = std::move(list);
    }
  }
  return stack;
}

Tensors SampleCall::run(const Tensors& inputs) const {
  c10::Stack arguments = stack(inputs);
  copy_written(op_.schema(), arguments);
  op_.callBoxed(arguments);
  return flat_tensors(arguments);
}

std::vector<c10::OperatorHandle> SampleCall::other_forms() const {
  const c10::OperatorName& name = op_.operator_name();
  std::vector<c10::OperatorHandle> forms;
  if (op_.schema().is_mutable()) return forms;
  if (auto in_place = c10::Dispatcher::singleton().findSchema(
          {absl::StrCat(name.name, "_"), name.overload_name})) {
    if (in_place->schema().is_mutable() && same_arguments(op_.schema(), in_place->schema())) {
      forms.push_back(*in_place);
    }
  }
  const auto [begin, end] = overloads().equal_range(name.name);
  for (auto it = begin; it != end; ++it) {
    const c10::FunctionSchema& schema = it->second.schema();
    if (has_out(schema) && same_arguments(op_.schema(), schema)) forms.push_back(it->second);
  }
  return forms;
}

Tensors SampleCall::run_as(const c10::OperatorHandle& form, const Tensors& inputs) const {
  c10::Stack arguments = stack(inputs);
  if (has_out(form.schema())) {
    const Tensors results = run(inputs);
    c10::Stack with_out;
    size_t next = 0, out = 0;
    for (const c10::Argument& argument : form.schema().arguments()) {
      if (!argument.is_out()) {
        with_out.push_back(std::move(arguments[next++]));
      } else if (argument.type()->kind() == c10::TypeKind::ListType) {
        c10::List<at::Tensor> list;
        while (out < results.size()) list.push_back(at::zeros_like(results[out++]));
        with_out.emplace_back(std::move(list));
      } else {
        with_out.emplace_back(at::zeros_like(results[out++]));
      }
    }
    arguments = std::move(with_out);
  } else {
    copy_written(form.schema(), arguments);
  }
  // Of an operator with several out= arguments the boxed call returns references into the stack,
  // after it has emptied it.
  const c10::Stack kept = arguments;
  form.callBoxed(arguments);
  return flat_tensors(arguments);
}

Tensors flat_tensors(const c10::Stack& results) {
  Tensors tensors;
  for (const c10::IValue& result : results) {
    if (result.isTensor()) {
      tensors.push_back(result.toTensor());
    } else if (result.isTensorList()) {
      for (const at::Tensor& t : result.toTensorVector()) tensors.push_back(t);
    } else if (result.isNone()) {
      tensors.emplace_back();
    }
  }
  return tensors;
}

}  // namespace shardweave::testing
