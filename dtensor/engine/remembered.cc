#include "shardweave/dtensor/engine/remembered.h"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/rules/view_map.h"

namespace shardweave::dtensor_internal {
namespace {

using Order = absl::InlinedVector<int64_t, 6>;

// The dimensions of the whole tensor by their place in memory, outermost first; nullopt if its
// elements do not fill a stretch of memory. Of the spec, never of a local part: the answer has to be
// the same on every rank.
std::optional<Order> memory_order(const Spec& spec) {
  Order order(spec.ndim());
  std::iota(order.begin(), order.end(), int64_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return spec.strides[a] > spec.strides[b]; });
  int64_t next = 1;
  for (size_t i = order.size(); i-- > 0;) {
    if (spec.sizes[order[i]] != 1 && spec.strides[order[i]] != next) return std::nullopt;
    next *= spec.sizes[order[i]];
  }
  return order;
}

Order inverse(const Order& order) {
  Order inverse(order.size());
  for (size_t i = 0; i < order.size(); ++i) inverse[order[i]] = static_cast<int64_t>(i);
  return inverse;
}

// The sizes and a layout of the tensor whose dimensions are taken in this order.
Dims permuted(const Dims& sizes, const Order& order) {
  Dims result;
  for (int64_t d : order) result.push_back(sizes[d]);
  return result;
}
// nullopt: it cuts one that is not taken.
std::optional<Layout> permuted(const Layout& layout, const Order& order) {
  Placements placements = layout.placements();
  for (Placement& p : placements) {
    if (!p.is_shard()) continue;
    const auto place = std::find(order.begin(), order.end(), p.dim());
    if (place == order.end()) return std::nullopt;
    p = p.with_dim(static_cast<int>(place - order.begin()));
  }
  return value_or_throw(Layout::create(std::move(placements), layout.order()));
}

// Without the dimensions of one element.
Order longer_than_one(Order order, const Dims& sizes) {
  order.erase(std::remove_if(order.begin(), order.end(), [&](int64_t d) { return sizes[d] == 1; }),
              order.end());
  return order;
}

at::Tensor permuted(const at::Tensor& tensor, const Order& order) {
  return tensor.permute(c10::IntArrayRef(order.data(), order.size()));
}

// The reduction that leads from one layout to the other, as the placement that each mesh dimension
// loses (Replicate: it stays); empty: it is something else.
Placements reduction(const Layout& from, const Layout& to) {
  if (from.order() != to.order()) return {};
  Placements lost(from.mesh_ndim());
  for (int m = 0; m < from.mesh_ndim(); ++m) {
    if (from[m] == to[m]) continue;
    if (!from[m].is_partial() || !to[m].is_replicate()) return {};
    lost[m] = from[m];
  }
  return lost;
}

// Of two that are rows of the same elements: whether each rank has the same of both.
bool are_cut_alike(const Spec& a, const Spec& b) {
  if (a.layout.order() != b.layout.order()) return false;
  std::vector<MeshCut> cuts;
  for (int m : a.layout.order()) cuts.push_back({a.layout[m], a.context->mesh().size(m)});
  const std::vector<std::optional<Placement>> mapped = map_cuts(a.sizes, b.sizes, cuts);
  for (size_t i = 0; i < mapped.size(); ++i) {
    if (mapped[i] != b.layout[a.layout.order()[i]]) return false;
  }
  return true;
}

// `form` as a tensor of `spec` with the same elements has it, if that has the same dimensions in another
// order.
std::optional<RememberedForm> permuted(const RememberedForm& form, const SpecRef& spec) {
  const Spec& source = *form.source_spec;
  if (spec->dtype != source.dtype || spec->ndim() != source.ndim() ||
      spec->numel() != source.numel()) {
    return std::nullopt;
  }
  const std::optional<Order> order = memory_order(*spec);
  const std::optional<Order> source_order = memory_order(source);
  if (!order.has_value() || !source_order.has_value() ||
      permuted(spec->sizes, *order) != permuted(source.sizes, *source_order) ||
      permuted(spec->layout, *order) != permuted(source.layout, *source_order)) {
    return std::nullopt;
  }
  const Order back = inverse(*order);
  const Layout layout = *permuted(*permuted(form.spec->layout, *source_order), back);
  return RememberedForm{spec, spec->context->with_layout(*spec, layout),
                        permuted(permuted(form.local, *source_order), back)};
}

const RememberedForm* find_form(const Remembered& kept, const DTensorMeta& meta) {
  return form_of(kept, meta.place, meta.spec, meta.context->captures.generation);
}

// `kept` as the tensor that `meta` and `target` describe, if both have the same elements.
std::optional<at::Tensor> seen_as(const Remembered& kept, const DTensorMeta& meta,
                                  const Spec& target) {
  // The same dimensions in another order: W and W.t().
  if (const RememberedForm* form = find_form(kept, meta)) {
    if (form->spec->layout == target.layout) return form->local;
  }
  const Spec& spec = *meta.spec;
  const Spec& source = *kept.form.source_spec;
  if (meta.place != kept.place || spec.dtype != source.dtype || spec.numel() != source.numel()) {
    return std::nullopt;
  }
  const std::optional<Order> order = memory_order(spec);
  const std::optional<Order> source_order = memory_order(source);
  if (!order.has_value() || !source_order.has_value()) return std::nullopt;
  // The same dimensions and some of one element, which nobody cuts: a convolution over a sequence adds
  // one.
  const Order long_ones = longer_than_one(*order, spec.sizes);
  const Order source_long_ones = longer_than_one(*source_order, source.sizes);
  const std::optional<Layout> has = permuted(spec.layout, long_ones);
  const std::optional<Layout> wants = permuted(target.layout, long_ones);
  if (has.has_value() && wants.has_value() &&
      permuted(spec.sizes, long_ones) == permuted(source.sizes, source_long_ones) &&
      has == permuted(source.layout, source_long_ones) &&
      wants == permuted(kept.form.spec->layout, source_long_ones)) {
    return permuted(permuted(kept.form.local, *source_order)
                        .reshape(array(permuted(target.local_sizes, *order))),
                    inverse(*order));
  }
  // The same row of elements in other dimensions. A reduction does the same to each.
  const bool rows = spec.strides == contiguous_strides(spec.sizes) &&
                    source.strides == contiguous_strides(source.sizes);
  const Placements reduced = reduction(spec.layout, target.layout);
  if (rows && !reduced.empty() && reduced == reduction(source.layout, kept.form.spec->layout) &&
      are_cut_alike(source, spec)) {
    return kept.form.local.reshape(array(target.local_sizes));
  }
  return std::nullopt;
}

}  // namespace

const RememberedForm* form_of(const Remembered& kept, const Place& place, const SpecRef& spec,
                              uint64_t generation) {
  if (kept.place != place || !kept.is_current(generation)) return nullptr;
  if (kept.form.source_spec == spec) return &kept.form;
  for (const RememberedForm& form : kept.permuted) {
    if (form.source_spec == spec) return &form;
  }
  std::optional<RememberedForm> found = permuted(kept.form, spec);
  return found.has_value() ? &kept.permuted.emplace_back(*std::move(found)) : nullptr;
}

bool is_permutation(const Spec& a, const Spec& b) {
  if (&a == &b) return true;
  if (a.dtype != b.dtype || a.ndim() != b.ndim()) return false;
  const auto dims = [](const Spec& spec) {
    absl::InlinedVector<std::pair<int64_t, int64_t>, 6> sorted;
    for (int d = 0; d < spec.ndim(); ++d) {
      if (spec.sizes[d] != 1) sorted.emplace_back(spec.strides[d], spec.sizes[d]);
    }
    std::sort(sorted.begin(), sorted.end());
    return sorted;
  };
  return dims(a) == dims(b);
}

bool is_sum_in_parts(const Layout& layout, const Layout& form) {
  for (int m = 0; m < layout.mesh_ndim(); ++m) {
    if (layout[m].is_partial() && form[m].is_shard()) return true;
  }
  return false;
}

const RememberedForm* find_remembered(const DTensorMeta& meta, const Spec* spec) {
  const auto& list = meta.family->remembered;
  for (auto kept = list.rbegin(); kept != list.rend(); ++kept) {
    const RememberedForm* form = find_form(*kept, meta);
    if (form != nullptr && (spec == nullptr || form->spec.get() == spec)) return form;
  }
  return nullptr;
}

const RememberedForm* find_remembered_for_view(const DTensorMeta& meta) {
  const auto& list = meta.family->remembered;
  for (auto kept = list.rbegin(); kept != list.rend(); ++kept) {
    if (kept->form.source_spec != meta.spec) continue;
    const RememberedForm* form = find_form(*kept, meta);
    if (form != nullptr && !is_sum_in_parts(meta.spec->layout, form->spec->layout)) return form;
  }
  return nullptr;
}

std::optional<at::Tensor> remembered_part(const DTensorMeta& meta, const Spec& spec) {
  if (const RememberedForm* form = find_remembered(meta, &spec)) return form->local;
  return part_of_sum(meta, spec.layout);
}

std::optional<at::Tensor> recall(const DTensorMeta& meta, const Spec& target) {
  if (meta.family == nullptr) return std::nullopt;
  for (const Remembered& kept : meta.family->remembered) {
    if (!kept.is_current(meta.context->captures.generation)) continue;
    if (auto found = seen_as(kept, meta, target)) return found;
  }
  return part_of_sum(meta, target.layout);
}

Remember worth_remembering(const Layout& from, const CutOrigins& origins, const Layout& target) {
  Remember worth = Remember::kNever;
  for (int m = 0; m < target.mesh_ndim(); ++m) {
    if (from[m] == target[m]) continue;
    if (from[m].is_partial()) return Remember::kAlways;
    const bool weight = m < 64 && (origins.weight >> m & 1) != 0;
    const bool data = m < 64 && (origins.data >> m & 1) != 0;
    if (!weight && (!data || target[m].is_shard())) return Remember::kAlways;
    if (weight) worth = Remember::kWhileRecording;
  }
  return worth;
}

void remember(const DTensorMeta& meta, SpecRef target, at::Tensor local) {
  if (meta.local().is_inference()) return;
  if (meta.family == nullptr) meta.family = std::make_shared<ViewFamily>();
  remember(*meta.family, meta.place, meta.local(), {meta.spec, std::move(target), std::move(local)},
           *meta.context);
}

void remember(ViewFamily& family, const Place& place, const at::Tensor& source, RememberedForm form,
              MeshContext& context) {
  auto& list = family.remembered;
  // Slices are not found again by others like them: a bound keeps a loop over them from piling up.
  constexpr size_t kMaxRemembered = 8;
  const uint64_t now = context.captures.generation;
  std::erase_if(list, [&](const Remembered& kept) { return !kept.is_current(now); });
  if (list.size() == kMaxRemembered) list.erase(list.begin());
  list.emplace_back(place, source, std::move(form), now,
                    context.observation.counters.remembered_bytes);
}

}  // namespace shardweave::dtensor_internal
