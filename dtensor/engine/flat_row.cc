#include "shardweave/dtensor/engine/flat_row.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "ATen/ops/empty.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "shardweave/dtensor/engine/detour.h"
#include "shardweave/dtensor/engine/fused.h"
#include "shardweave/dtensor/engine/provenance.h"
#include "shardweave/dtensor/engine/tensor_impl.h"

namespace shardweave::dtensor_internal {
namespace {

int64_t numel_of(const Dims& sizes) {
  int64_t n = 1;
  for (const int64_t size : sizes) n *= size;
  return n;
}

Layout with_cut(const Layout& layout, int mesh_dim, Placement cut, bool cuts_first) {
  Placements placements = layout.placements();
  placements[static_cast<size_t>(mesh_dim)] = std::move(cut);
  std::vector<int> order = layout.order();
  order.erase(std::find(order.begin(), order.end(), mesh_dim));
  order.insert(cuts_first ? order.begin() : order.end(), mesh_dim);
  return value_or_throw(Layout::create(std::move(placements), std::move(order)));
}

// Whether a gradient that lies so is to be summed along `mesh_dim`, and elsewhere lies as the
// parameter does, or is to be summed there, too.
bool is_sum_along(const Layout& grad, const Layout& whole, int mesh_dim) {
  if (grad.order() != whole.order()) return false;
  for (int m = 0; m < grad.mesh_ndim(); ++m) {
    const bool sum = grad[m].is_partial(ReduceOp::kSum);
    if (m == mesh_dim ? !sum : grad[m] != whole[m] && !(sum && whole[m].is_replicate())) {
      return false;
    }
  }
  return true;
}

// Of elements, as they are sent: of a complex one there are two numbers.
std::vector<int64_t> numbers(const std::vector<int64_t>& counts, const at::Tensor& of) {
  std::vector<int64_t> result = counts;
  if (of.is_complex()) {
    for (int64_t& count : result) count *= 2;
  }
  return result;
}

// As the planner counts what a rank sends: the one that keeps least.
int64_t bytes_sent(const std::vector<int64_t>& counts, const at::Tensor& flat) {
  const int64_t least = *std::min_element(counts.begin(), counts.end());
  return (flat.numel() - least) * static_cast<int64_t>(flat.element_size());
}

// The part of the rank that has most. Of ragged cuts that need not be the first one, which may have
// nothing at all: what comes after would then be laid out in front of it.
Dims largest_local_shape(const Spec& spec, const DeviceMesh& mesh) {
  Coordinate coordinate(static_cast<size_t>(mesh.ndim()), 0);
  for (int m = 0; m < mesh.ndim(); ++m) {
    const Placement& p = spec.layout[m];
    if (p.kind() != PlacementKind::kRaggedShard) continue;
    coordinate[static_cast<size_t>(m)] =
        std::max_element(p.sizes().begin(), p.sizes().end()) - p.sizes().begin();
  }
  return local_shape(spec.layout, mesh.shape(), coordinate, spec.sizes);
}

}  // namespace

std::vector<Layout> flat_row_layouts(const std::vector<SpecRef>& whole, const DeviceMesh& mesh,
                                     int mesh_dim) {
  const int64_t ranks = mesh.size(mesh_dim);
  struct Rows {
    int dim = 0;
    int64_t count = 0;  // of a rank's part
    int64_t numel = 0;
    bool stay_together = false;
  };
  std::vector<Rows> rows;
  int64_t total = 0;
  for (const SpecRef& spec : whole) {
    Rows r;
    // Rows are consecutive in memory if all dimensions before have one element.
    while (r.dim + 1 < spec->ndim() && spec->sizes[static_cast<size_t>(r.dim)] == 1) ++r.dim;
    const Dims local = largest_local_shape(*spec, mesh);
    r.count = local[static_cast<size_t>(r.dim)];
    r.numel = numel_of(local);
    std::vector<int64_t> all(static_cast<size_t>(ranks), 0);
    all[0] = r.count;
    const Layout below = with_cut(spec->layout, mesh_dim, RaggedShard(r.dim, all), false);
    if (!validate(below, mesh.shape(), spec->sizes).ok()) {
      r.stay_together = true;
      r.count = spec->sizes[static_cast<size_t>(r.dim)];
    }
    total += r.numel;
    rows.push_back(r);
  }
  std::vector<Layout> layouts;
  int64_t at = 0;
  for (size_t i = 0; i < whole.size(); ++i) {
    const Rows& r = rows[i];
    std::vector<int64_t> sizes;
    int64_t before = 0;
    for (int64_t rank = 1; rank <= ranks; ++rank) {
      // Of the elements in front of this rank's end, those that are here.
      const int64_t wanted =
          std::clamp<int64_t>(total / ranks * rank + total % ranks * rank / ranks - at, 0, r.numel);
      int64_t end = 0;
      if (rank == ranks) {
        end = r.count;
      } else if (r.stay_together) {
        end = 2 * wanted >= r.numel && wanted > 0 ? r.count : 0;
      } else if (r.numel > 0) {
        const int64_t row = r.numel / r.count;
        end = (wanted + row / 2) / row;
      }
      sizes.push_back(end - before);
      before = end;
    }
    layouts.push_back(with_cut(whole[i]->layout, mesh_dim, RaggedShard(r.dim, std::move(sizes)),
                               r.stay_together));
    at += r.numel;
  }
  return layouts;
}

namespace {

// Of a tensor to be laid into equal segments.
struct Rows {
  int dim = 0;
  int64_t count = 0;
  int64_t numel = 0;
  int64_t row() const { return numel / count; }
};

// Where tensors begin, each as early as it can, if ranks keep `segment` elements each; none: it does
// not go.
std::vector<int64_t> begins_in(const std::vector<Rows>& rows, int64_t ranks, int64_t segment) {
  std::vector<int64_t> begins;
  int64_t at = 0;
  for (const Rows& r : rows) {
    for (int tries = 0;; ++tries) {
      const int64_t cut = (at / segment + 1) * segment;
      if (at + r.numel <= cut) break;
      const int64_t aligned = at + (cut - at) % r.row();
      const bool is_cut_once = aligned + r.numel <= cut + segment;
      if (aligned < cut && (is_cut_once || segment % r.row() == 0)) {
        at = aligned;
        break;
      }
      if (tries == 2) return {};  // as it was a segment before
      at = cut;
    }
    begins.push_back(at);
    at += r.numel;
  }
  return at <= ranks * segment ? begins : std::vector<int64_t>();
}

// The shortest segment, from `least` on, that begins_in() may agree to: what is cut twice wherever it
// lies has whole rows in a segment.
int64_t next_segment(const std::vector<Rows>& rows, int64_t least) {
  for (;;) {
    int64_t step = 1, until = std::numeric_limits<int64_t>::max();
    for (const Rows& r : rows) {
      if (r.numel <= 2 * least) continue;
      until = std::min(until, (r.numel + 1) / 2);  // from there on it may be cut once
      if (step < until) step = std::lcm(step, r.row());
    }
    const int64_t next = std::min((least + step - 1) / step * step, until);
    if (next == least) return least;
    least = next;
  }
}

// Whether ranks of other mesh dimensions have as much of it as each other.
bool is_cut_evenly(const Spec& spec, const DeviceMesh& mesh) {
  std::vector<int64_t> parts(static_cast<size_t>(spec.ndim()), 1);
  for (int m = 0; m < mesh.ndim(); ++m) {
    const Placement& p = spec.layout[m];
    if (!p.is_shard()) continue;
    if (p.kind() == PlacementKind::kRaggedShard) return false;
    parts[static_cast<size_t>(p.dim())] *= mesh.size(m);
  }
  for (size_t d = 0; d < parts.size(); ++d) {
    if (spec.sizes[d] % parts[d] != 0) return false;
  }
  return true;
}

}  // namespace

EqualSegments equal_segments(const std::vector<SpecRef>& whole, const DeviceMesh& mesh,
                             int mesh_dim) {
  EqualSegments result;
  const int64_t ranks = mesh.size(mesh_dim);
  std::vector<Rows> rows;
  int64_t total = 0;
  for (const SpecRef& spec : whole) {
    if (!is_cut_evenly(*spec, mesh)) {
      result.refused = rows.size();
      result.refusal = absl::StrCat(
          "equal segments are of tensors that other mesh dimensions cut evenly; it lies ",
          spec->layout.to_string(), " with sizes [", absl::StrJoin(spec->sizes, ", "), "]");
      return result;
    }
    Rows r;
    while (r.dim + 1 < spec->ndim() && spec->sizes[static_cast<size_t>(r.dim)] == 1) ++r.dim;
    r.count = spec->local_sizes[static_cast<size_t>(r.dim)];
    r.numel = spec->local_numel();
    total += r.numel;
    rows.push_back(r);
  }
  result.segment = (total + ranks - 1) / ranks;
  for (;; ++result.segment) {
    result.segment = next_segment(rows, result.segment);
    result.begins = begins_in(rows, ranks, result.segment);
    if (!result.begins.empty()) break;
  }
  result.padding = ranks * result.segment - total;
  for (size_t i = 0; i < whole.size(); ++i) {
    std::vector<int64_t> sizes;
    int64_t before = 0;
    for (int64_t rank = 1; rank <= ranks; ++rank) {
      const int64_t here = rank * result.segment - result.begins[i];
      const int64_t end = std::clamp<int64_t>(here / rows[i].row(), 0, rows[i].count);
      sizes.push_back((here < 0 ? 0 : end) - before);
      before = here < 0 ? 0 : end;
    }
    result.layouts.push_back(
        with_cut(whole[i]->layout, mesh_dim, RaggedShard(rows[i].dim, std::move(sizes)), false));
  }
  return result;
}

std::string why_not_kept(const Spec& whole, const Layout& layout, const DeviceMesh& mesh) {
  const absl::Status status = validate(layout, mesh.shape(), whole.sizes);
  if (status.ok()) return {};
  return absl::StrCat("lies ", whole.layout.to_string(),
                      ": rows that are cut so cannot be divided once more (",
                      std::string(status.message()), "); wanted an even cut, or Shard");
}

FlatRow::FlatRow(std::shared_ptr<MeshContext> context, int mesh_dim,
                 const std::vector<SpecRef>& whole, const std::vector<Layout>& layouts,
                 at::ScalarType kept_dtype, c10::Device kept_device,
                 const std::vector<int64_t>& begins, int64_t segment)
    : context_(std::move(context)),
      mesh_dim_(mesh_dim),
      counts_(static_cast<size_t>(context_->mesh().size(mesh_dim)), 0),
      rank_(static_cast<size_t>(context_->coordinate()[static_cast<size_t>(mesh_dim)])) {
  const DeviceMesh& mesh = context_->mesh();
  for (size_t i = 0; i < whole.size(); ++i) {
    Place& place = places_.emplace_back();
    place.whole = whole[i];
    place.kept = context_->intern(layouts[i], whole[i]->sizes, whole[i]->strides, kept_dtype,
                                  kept_device, whole[i]->origins);
    place.begin = numel_;
    place.kept_begin = counts_[rank_];
    Coordinate coordinate = context_->coordinate();
    for (size_t r = 0; r < counts_.size(); ++r) {
      coordinate[static_cast<size_t>(mesh_dim)] = static_cast<int64_t>(r);
      place.counts.push_back(
          numel_of(local_shape(layouts[i], mesh.shape(), coordinate, whole[i]->sizes)));
      counts_[r] += place.counts.back();
    }
    numel_ += whole[i]->local_numel();
    if (segment == 0) continue;
    const int64_t mine = static_cast<int64_t>(rank_) * segment;
    place.begin = begins[i];
    place.kept_begin = std::clamp<int64_t>(place.begin - mine, 0, segment);
  }
  if (segment > 0) {
    is_equal_ = true;
    counts_.assign(counts_.size(), segment);
    numel_ = segment * num_ranks();
  }
  for (size_t r = 0; r < rank_; ++r) kept_begin_ += counts_[r];
}

at::Tensor FlatRow::whole_of(const at::Tensor& flat, size_t i) const {
  const Place& place = places_[i];
  return flat.narrow(0, place.begin, place.whole->local_numel())
      .view(array(place.whole->local_sizes));
}

at::Tensor FlatRow::kept_of(const at::Tensor& stretch, size_t i) const {
  const Place& place = places_[i];
  return stretch.narrow(0, place.kept_begin, place.counts[rank_])
      .view(array(place.kept->local_sizes));
}

CollectiveUnderWay FlatRow::all_gather(const at::Tensor& stretch, const at::Tensor& flat,
                                       uint64_t provenance, const Cause& cause, Names names) const {
  const int64_t numel = flat.numel();
  CollectiveSpan span(*context_, cause, [&]() -> Sending {
    std::vector<std::string> parameters;
    for (size_t i = 0; i < places_.size(); ++i) parameters.push_back(names(i));
    return {"all_gather",
            absl::MakeConstSpan(&mesh_dim_, 1),
            bytes_sent(counts_, flat),
            flat.scalar_type(),
            absl::MakeConstSpan(&numel, 1),
            Layout(),
            Layout(),
            std::move(parameters)};
  });
  const About about(*context_, provenance);
  const CallOptions options = collective_options(*context_, flat.device(), cause.tag());
  Communicator& comm = context_->communicator(mesh_dim_);
  Work work = is_equal_ ? comm.all_gather(comm_buffer(stretch), comm_buffer(flat), options)
                        : comm.all_gather_v(comm_buffer(stretch), comm_buffer(flat),
                                            numbers(counts_, flat), options);
  return {TensorWork(*context_, std::move(work), flat.device()), std::move(span)};
}

bool GradientScatter::takes(const FlatRow& row, size_t i, const at::Tensor& grad) {
  const Spec &has = *meta_of(grad).spec, &whole = *row[i].whole;
  // What was summed up over several backwards is of the kept tensor's dtype.
  return row.num_ranks() > 1 && (has.dtype == whole.dtype || has.dtype == row[i].kept->dtype) &&
         is_sum_along(has.layout, whole.layout, row.mesh_dim());
}

GradientScatter::GradientScatter(const FlatRow& row, std::vector<at::Tensor>& grads,
                                 at::ScalarType dtype, MakeBuffer buffer, const Cause& cause,
                                 FlatRow::Names names)
    : specs_(row.size()), provenances_(row.size()), parts_(row.size()) {
  MeshContext& context = *row.context();
  const int mesh_dim = row.mesh_dim();
  std::vector<int64_t> kept(row.counts_.size(), 0);
  int64_t numel = 0;
  uint64_t all = 0;
  for (size_t i = 0; i < row.size(); ++i) {
    if (!grads[i].defined()) continue;
    const DTensorMeta& meta = meta_of(grads[i]);
    sync_view(meta, cause.name);
    if (!takes(row, i, grads[i])) continue;
    const Spec& whole = *row[i].whole;
    taken_.push_back(i);
    for (size_t r = 0; r < kept.size(); ++r) kept[r] += row[i].counts[r];
    numel += whole.local_numel();
    provenances_[i] = provenance_of(meta);
    all = mix(all, provenances_[i]);
  }
  if (taken_.empty()) return;
  if (row.is_equal()) {  // as the tensors lie, with gaps
    kept = row.counts_;
    numel = row.numel();
  }
  const Spec& first = *row[0].whole;
  const at::TensorOptions options = at::TensorOptions(dtype).device(first.device);
  in_ = buffer(numel, options);
  out_ = at::empty({kept[row.rank_]}, options);
  int64_t place = 0, at = 0;
  const auto leave_gap = [&](int64_t until) {
    if (until > place) in_.narrow(0, place, until - place).zero_();
    place = until;
  };
  for (const size_t i : taken_) {
    if (row.is_equal()) {
      leave_gap(row[i].begin);
      at = row[i].kept_begin;
    }
    const Spec &whole = *row[i].whole, &resting = *row[i].kept;
    const DTensorMeta& meta = meta_of(grads[i]);
    const int64_t count = whole.local_numel();
    in_.narrow(0, place, count).view(array(whole.local_sizes)).copy_(meta.local());
    place += count;
    // Where it is still to be summed along other dimensions.
    Placements placements = resting.layout.placements();
    for (int m = 0; m < context.mesh().ndim(); ++m) {
      const Placement& has = meta.spec->layout[m];
      if (m != mesh_dim && has.is_partial()) placements[static_cast<size_t>(m)] = has;
    }
    const Layout layout =
        value_or_throw(Layout::create(std::move(placements), resting.layout.order()));
    specs_[i] = context.intern(layout, whole.sizes, whole.strides, dtype, whole.device);
    const int64_t part = row[i].counts[row.rank_];
    parts_[i] = out_.narrow(0, at, part).view(array(resting.local_sizes));
    at += part;
    grads[i].reset();
  }
  leave_gap(numel);
  CollectiveSpan span(context, cause, [&]() -> Sending {
    std::vector<std::string> parameters;
    for (const size_t i : taken_) parameters.push_back(names(i));
    return {"reduce_scatter",
            absl::MakeConstSpan(&mesh_dim, 1),
            bytes_sent(kept, in_),
            in_.scalar_type(),
            absl::MakeConstSpan(&numel, 1),
            Layout(),
            Layout(),
            std::move(parameters)};
  });
  const About about(context, all);
  const CallOptions call = collective_options(context, out_.device(), cause.tag());
  Communicator& comm = context.communicator(mesh_dim);
  Work work = row.is_equal()
                  ? comm.reduce_scatter(comm_buffer(in_), comm_buffer(out_), ReduceOp::kSum, call)
                  : comm.reduce_scatter_v(comm_buffer(in_), comm_buffer(out_), numbers(kept, in_),
                                          ReduceOp::kSum, call);
  under_way_.emplace(TensorWork(context, std::move(work), out_.device()), std::move(span));
}

void GradientScatter::finish() {
  if (!under_way_.has_value()) return;
  absl::Status status = under_way_->wait();
  throw_if_error(std::move(status));
  under_way_.reset();
  in_.reset();
}

const at::Tensor& GradientScatter::part(size_t i) {
  finish();
  return parts_[i];
}

void GradientScatter::release() {
  parts_.assign(parts_.size(), at::Tensor());
  out_.reset();
}

at::Tensor with_dtype(const at::Tensor& tensor, at::ScalarType dtype) {
  const DTensorMeta& meta = meta_of(tensor);
  const Spec& spec = *meta.spec;
  if (spec.dtype == dtype) return tensor;
  at::Tensor result =
      wrap(meta.local().to(dtype),
           meta.context->intern(spec.layout, spec.sizes, spec.strides, dtype, spec.device),
           meta.context);
  meta_of(result).came_from(provenance_of(meta));
  return result;
}

void bring_to(std::vector<at::Tensor>& tensors, const std::vector<Layout>& layouts,
              const Cause& cause) {
  std::vector<size_t> moving;
  std::vector<InFlight> in_flight;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].defined()) continue;
    const DTensorMeta& meta = meta_of(tensors[i]);
    if (meta.spec->layout == layouts[i]) continue;
    moving.push_back(i);
    in_flight.push_back(moving_to(meta, layouts[i]));
    in_flight.back().is_given_up = true;
  }
  run_plans(in_flight, cause);
  for (size_t k = 0; k < moving.size(); ++k) {
    InFlight& arrived = in_flight[k];
    at::Tensor& tensor = tensors[moving[k]];
    const std::shared_ptr<MeshContext> context = meta_of(tensor).context;
    at::Tensor local = std::move(arrived.local);
    tensor = wrap(local, arrived.target, context);
    // What it was is gone, with what that was a view of. Whoever still has its memory keeps it.
    constexpr size_t kMine = 2;  // `local`, and the DTensor's
    if (local.use_count() > kMine || local.storage().use_count() > 1) {
      tensor = wrap(local.clone(), std::move(arrived.target), context);
    }
    meta_of(tensor).came_from(arrived.provenance);
  }
}

}  // namespace shardweave::dtensor_internal
