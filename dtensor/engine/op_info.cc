#include "shardweave/dtensor/engine/op_info.h"

namespace shardweave::dtensor_internal {
namespace {

bool is_tensor(const c10::TypePtr& type) {
  if (auto optional = type->cast<c10::OptionalType>()) return is_tensor(optional->getElementType());
  return type->kind() == c10::TypeKind::TensorType;
}

bool is_tensor_list(const c10::TypePtr& type) {
  if (auto optional = type->cast<c10::OptionalType>())
    return is_tensor_list(optional->getElementType());
  auto list = type->cast<c10::ListType>();
  return list != nullptr && is_tensor(list->getElementType());
}

// Or a list of them.
bool is_scalar(const c10::TypePtr& type) {
  if (auto optional = type->cast<c10::OptionalType>()) return is_scalar(optional->getElementType());
  if (auto list = type->cast<c10::ListType>()) return is_scalar(list->getElementType());
  return type->kind() == c10::TypeKind::NumberType;
}

// Whatever may decide shapes and dtypes. Lists of floats do (the scale factors of an upsampling),
// and strings do (the mode of a QR decomposition, the rounding of a division); a float on its own,
// which may be another one in every step, does not.
bool is_keyed(const c10::TypePtr& type) {
  if (auto optional = type->cast<c10::OptionalType>()) return is_keyed(optional->getElementType());
  if (type->cast<c10::ListType>() != nullptr) return true;
  switch (type->kind()) {
    case c10::TypeKind::NumberType:
    case c10::TypeKind::FloatType:
    case c10::TypeKind::ComplexType:
    case c10::TypeKind::GeneratorType:
      return false;
    default:
      return true;
  }
}

}  // namespace

OpInfo::OpInfo(const c10::OperatorHandle& op, const RuleTable& own) {
  const c10::FunctionSchema& schema = op.schema();
  rule = own.find(op.operator_name());
  if (rule == nullptr) rule = RuleTable::builtin().find(op.operator_name());
  num_returns = static_cast<int>(schema.returns().size());

  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    const c10::TypePtr& type = argument.type();
    const bool tensor = is_tensor(type);
    const bool list = is_tensor_list(type);
    ArgKind kind = tensor            ? ArgKind::kTensor
                   : list            ? ArgKind::kTensorList
                   : is_scalar(type) ? ArgKind::kScalar
                   : is_keyed(type)  ? ArgKind::kKeyed
                                     : ArgKind::kUnkeyed;
    const ShardedRule* sharded = rule == nullptr ? nullptr : rule->sharded();
    if ((kind == ArgKind::kUnkeyed || kind == ArgKind::kScalar) && sharded != nullptr) {
      for (const std::string& name : sharded->options().reads) {
        if (name == argument.name()) kind = ArgKind::kKeyed;
      }
    }
    args.push_back(kind);
    const c10::AliasInfo* alias = argument.alias_info();
    is_out.push_back(argument.is_out());
    if (alias == nullptr) continue;
    if (alias->isWrite()) {
      if (!tensor && !list) continue;
      // What such an operator returns is known by its functional form only: gathered.
      if (list && argument.is_out()) rule = nullptr;
      Write write{static_cast<int>(i), -1, argument.is_out(), list};
      for (size_t r = 0; r < schema.returns().size(); ++r) {
        const c10::AliasInfo* result = schema.returns()[r].alias_info();
        if (tensor && result != nullptr && result->beforeSets() == alias->beforeSets()) {
          write.output = static_cast<int>(r);
        }
      }
      writes.push_back(write);
    } else {
      is_view |= tensor;
    }
  }
  // LibTorch's out= composites write through it, though its schema says that it is no alias.
  is_view |= schema.name() == "aten::_unsafe_view";
  changes_shape = op.hasTag(at::Tag::inplace_view);
  is_random = op.hasTag(at::Tag::nondeterministic_seeded);
  const std::string& name = op.operator_name().name;
  if (name == "aten::clone" || name == "aten::detach" || name == "aten::alias") keeps_arg = 0;
  if (name == "aten::copy_") keeps_arg = 1;
  if (name == "aten::_to_copy") {
    for (size_t i = 0; i < schema.arguments().size(); ++i) {
      if (schema.arguments()[i].name() == "device") device_arg = static_cast<int>(i);
    }
  }
  shows_values = op.hasTag(at::Tag::dynamic_output_shape);
  for (const c10::Argument& result : schema.returns()) {
    // A SymInt is a size, which comes from sizes.
    shows_values |= !is_tensor(result.type()) && !is_tensor_list(result.type()) &&
                    result.real_type()->kind() != c10::TypeKind::SymIntType;
  }
  // (The dispatcher's computed table is no help: for keys without a kernel it holds a fallback that
  // throws.)
  checks_on_meta = op.hasKernelForDispatchKey(c10::DispatchKey::Meta) && writes.empty() &&
                   !op.hasTag(at::Tag::dynamic_output_shape);
  for (c10::DispatchKey key : {c10::DispatchKey::Meta, c10::DispatchKey::CompositeExplicitAutograd,
                               c10::DispatchKey::CompositeExplicitAutogradNonFunctional,
                               c10::DispatchKey::CompositeImplicitAutograd}) {
    has_meta_kernel |= op.hasKernelForDispatchKey(key);
  }
  // Composite operators reach us only in inference mode; lists of tensors that are written
  // decompose into single operators.
  if (rule == nullptr) {
    if (op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) {
      composite_key = c10::DispatchKey::CompositeImplicitAutograd;
    } else if (schema.name().starts_with("aten::_foreach_") &&
               op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd)) {
      composite_key = c10::DispatchKey::CompositeExplicitAutograd;
    }
    decompose = composite_key != c10::DispatchKey::Undefined;
  }
}

}  // namespace shardweave::dtensor_internal
