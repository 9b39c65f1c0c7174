#include "shardweave/dtensor/engine/provenance.h"

#include <bit>
#include <string_view>

#include "shardweave/dtensor/engine/arguments.h"
#include "shardweave/dtensor/engine/checksum.h"

namespace shardweave::dtensor_internal {
namespace {

uint64_t add_value(uint64_t sum, const c10::IValue& v) {
  if (v.isInt()) return mix(sum, static_cast<uint64_t>(v.toInt()));
  if (v.isBool()) return mix(sum, v.toBool());
  if (v.isDouble()) return mix(sum, std::bit_cast<uint64_t>(v.toDouble()));
  if (v.isString()) return checksum(sum, v.toStringView());
  if (v.isList()) {
    const auto list = v.toListRef();
    sum = mix(sum, list.size());
    for (const c10::IValue& e : list) sum = add_value(sum, e);
  }
  return sum;
}

uint64_t add_placement(uint64_t sum, const Placement& p) {
  sum = mix(sum, static_cast<uint64_t>(p.kind()));
  if (p.is_partial()) return mix(sum, static_cast<uint64_t>(p.reduce_op()));
  if (!p.is_shard()) return sum;
  sum = mix(sum, static_cast<uint64_t>(p.dim()));
  if (p.kind() == PlacementKind::kStridedShard) {
    return mix(sum, static_cast<uint64_t>(p.split_factor()));
  }
  if (p.kind() == PlacementKind::kRaggedShard) {
    for (const int64_t size : p.sizes()) sum = mix(sum, static_cast<uint64_t>(size));
  }
  return sum;
}

// What its text says. (The text itself takes longer to make than all else of this.)
uint64_t add_spec(uint64_t sum, const Spec& spec) {
  sum = mix(sum, spec.sizes.size());
  for (const int64_t size : spec.sizes) sum = mix(sum, static_cast<uint64_t>(size));
  sum = mix(sum, static_cast<uint64_t>(spec.dtype));
  for (const int m : spec.layout.order()) {
    sum = add_placement(mix(sum, static_cast<uint64_t>(m)), spec.layout[m]);
  }
  return sum;
}

}  // namespace

uint64_t provenance_of_new(MeshContext& context, const Spec& spec) {
  return checksum(++context.provenance.tensors_made, spec.to_string());
}

uint64_t provenance_of_name(const c10::OperatorHandle& op) {
  std::string_view name = op.operator_name().name;
  if (name.ends_with('_')) name.remove_suffix(1);
  return checksum(0, name);
}

uint64_t provenance_of_call(const c10::OperatorHandle& op, const OpInfo& info,
                            absl::Span<const c10::IValue> args) {
  uint64_t sum = provenance_of_name(op);
  for_each_tensor(info, args, [&](size_t arg, const c10::TensorImpl* impl) {
    if (!defined(impl) || !is_dtensor(impl)) return;
    const auto& spec = meta_of(const_cast<c10::TensorImpl*>(impl)).spec;
    sum = add_spec(mix(sum, arg), *spec);
  });
  for (size_t i = 0; i < args.size(); ++i) {
    if (info.args[i] == ArgKind::kKeyed) sum = add_value(mix(sum, i), args[i]);
  }
  return sum;
}

}  // namespace shardweave::dtensor_internal
