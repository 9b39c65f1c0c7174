#include "shardweave/dtensor/engine/multiple.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "ATen/core/stack.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/remembered.h"

namespace shardweave::dtensor_internal {
namespace {

// x -> op(x) or op(x, number), each element for itself. Half of -x is the same as half of x, negated:
// the factors of the one and of the other are a list. One that gets long is worth nothing.
constexpr std::string_view kMultiplies[] = {"aten::neg", "aten::mul", "aten::div"};
constexpr size_t kMaxFactors = 4;

bool is_number(const c10::IValue& v) {
  // Of any other tensor the program may change the value before it is read again.
  if (!v.isTensor()) return v.isScalar();
  const c10::TensorImpl* impl = v.unsafeToTensorImpl();
  return impl->is_wrapped_number() && !is_dtensor(impl);
}

bool is_current(const Multiple& multiple, const DTensorMeta& meta) {
  return multiple.generation == meta.context->captures.generation &&
         multiple.sum.is_current(*multiple.family) && multiple.own.is_current(*meta.family);
}

}  // namespace

at::Tensor Multiple::of(at::Tensor of_sum) const {
  for (const Factor& factor : factors) {
    c10::Stack stack = {std::move(of_sum)};
    if (factor.op.schema().arguments().size() > 1) stack.push_back(factor.number);
    factor.op.callBoxed(stack);
    of_sum = std::move(stack[0]).toTensor();
  }
  return of_sum;
}

bool makes_multiple(const OpCall& call, const CacheEntry& entry) {
  const c10::FunctionSchema& schema = call.op->schema();
  if (std::find(std::begin(kMultiplies), std::end(kMultiplies), schema.name()) ==
          std::end(kMultiplies) ||
      schema.arguments().size() > 2 || call.num_outputs() != 1 || call.input(0).spec == nullptr) {
    return false;
  }
  if (!entry.written.empty() || !entry.input_changes.empty() || !entry.output_changes.empty() ||
      entry.kernel != nullptr || entry.outputs[0] != call.input(0).spec) {
    return false;
  }
  if (schema.arguments().size() == 2 &&
      (!is_number(call.args[1]) || c10::isReducedFloatingType(entry.outputs[0]->dtype))) {
    return false;
  }
  // Of what is no sum and no average, rules let nothing through as it is.
  return entry.outputs[0]->layout.has_partial();
}

void note_multiple(const DTensorMeta& sum, DTensorMeta& result, Multiple::Factor factor) {
  if (sum.local().is_inference() || result.local().is_inference()) return;
  std::shared_ptr<const Multiple> first = multiple_of(sum);
  Multiple::Factors factors = first != nullptr ? first->factors : Multiple::Factors();
  if (factors.size() == kMaxFactors) return;
  factors.push_back(std::move(factor));
  if (sum.family == nullptr) sum.family = std::make_shared<ViewFamily>();
  if (result.family == nullptr) result.family = std::make_shared<ViewFamily>();
  UnwrittenPart part = first != nullptr ? first->sum : UnwrittenPart(sum);
  CountedBytes counted(sum.context->observation.counters.remembered_bytes, part.local);
  result.multiple = std::make_shared<const Multiple>(
      Multiple{first != nullptr ? first->family : sum.family, result.spec, std::move(part),
               UnwrittenPart(result), std::move(factors), sum.context->captures.generation,
               std::move(counted)});
}

std::shared_ptr<const Multiple> multiple_of(const DTensorMeta& meta) {
  if (meta.multiple == nullptr) return nullptr;
  if (!is_current(*meta.multiple, meta)) meta.multiple.reset();
  return meta.multiple != nullptr && meta.spec == meta.multiple->spec &&
                 meta.place == meta.multiple->own.place
             ? meta.multiple
             : nullptr;
}

at::Tensor bring_by_sum(const DTensorMeta& meta, std::shared_ptr<const Multiple> multiple,
                        const SpecRef& target,
                        absl::FunctionRef<at::Tensor(const at::Tensor&)> bring) {
  at::Tensor sum = bring(multiple->sum.local);
  at::Tensor result = multiple->of(sum);
  remember(*multiple->family, multiple->sum.place, multiple->sum.local,
           {multiple->spec, target, std::move(sum)}, *meta.context);
  remember(meta, target, result);
  meta.multiple.reset();
  return result;
}

const SpecRef* spec_of_sum(const DTensorMeta& meta, bool for_view) {
  const std::shared_ptr<const Multiple> multiple = multiple_of(meta);
  if (multiple == nullptr) return nullptr;
  const auto& list = multiple->family->remembered;
  for (auto kept = list.rbegin(); kept != list.rend(); ++kept) {
    const RememberedForm* form =
        form_of(*kept, multiple->sum.place, multiple->spec, meta.context->captures.generation);
    if (form == nullptr) continue;
    if (!for_view || !is_sum_in_parts(meta.spec->layout, form->spec->layout)) return &form->spec;
  }
  return nullptr;
}

std::optional<at::Tensor> part_of_sum(const DTensorMeta& meta, const Layout& layout) {
  const std::shared_ptr<const Multiple> multiple = multiple_of(meta);
  if (multiple == nullptr) return std::nullopt;
  for (const Remembered& kept : multiple->family->remembered) {
    const RememberedForm* form =
        form_of(kept, multiple->sum.place, multiple->spec, meta.context->captures.generation);
    if (form != nullptr && form->spec->layout == layout) return multiple->of(form->local);
  }
  return std::nullopt;
}

}  // namespace shardweave::dtensor_internal
