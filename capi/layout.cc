// Layouts: values and arithmetic of placement/.
#include <algorithm>

#include "shardweave/capi/handles.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/placement/redistribute_plan.h"

namespace shardweave::capi {
namespace {

constexpr size_t kMaxRaggedSizes = 1 << 20;

Placement placement(const swv_placement& p) {
  check_reserved(p.reserved, "placements[].reserved");
  switch (p.kind) {
    case SWV_PLACEMENT_REPLICATE:
      return Replicate();
    case SWV_PLACEMENT_SHARD:
      return Shard(p.dim);
    case SWV_PLACEMENT_STRIDED_SHARD:
      if (p.split_factor < 1) {
        fail_argument("placements[].split_factor",
                      str_cat("is ", p.split_factor, "; wanted 1 or more"));
      }
      return StridedShard(p.dim, p.split_factor);
    case SWV_PLACEMENT_RAGGED_SHARD: {
      const auto sizes = span(p.sizes, p.num_sizes, "placements[].sizes", kMaxRaggedSizes);
      return RaggedShard(p.dim, {sizes.begin(), sizes.end()});
    }
    case SWV_PLACEMENT_PARTIAL:
      return Partial(reduce_op(p.reduce_op, "placements[].reduce_op"));
    default:
      fail_argument("placements[].kind",
                    str_cat("is ", p.kind, "; wanted a swv_placement_kind, 0 to ",
                            int{SWV_PLACEMENT_PARTIAL}));
  }
}

swv_layout* new_layout(const swv_placement* placements, size_t num_placements, const int32_t* order,
                       size_t num_order) {
  Placements all;
  for_each_struct<swv_placement>(placements, num_placements, SWV_PLACEMENT_INIT, "placements",
                                 kMaxDims,
                                 [&](const swv_placement& p) { all.push_back(placement(p)); });
  const auto cuts = span(order, num_order, "order", kMaxDims);
  return make<swv_layout>(check(Layout::create(std::move(all), {cuts.begin(), cuts.end()})));
}

swv_placement c_placement(const Placement& p) {
  swv_placement result = SWV_PLACEMENT_INIT;
  // The kinds have their numbers in the order of PlacementKind.
  static_assert(static_cast<int>(PlacementKind::kReplicate) == SWV_PLACEMENT_REPLICATE);
  static_assert(static_cast<int>(PlacementKind::kShard) == SWV_PLACEMENT_SHARD);
  static_assert(static_cast<int>(PlacementKind::kStridedShard) == SWV_PLACEMENT_STRIDED_SHARD);
  static_assert(static_cast<int>(PlacementKind::kRaggedShard) == SWV_PLACEMENT_RAGGED_SHARD);
  static_assert(static_cast<int>(PlacementKind::kPartial) == SWV_PLACEMENT_PARTIAL);
  static_assert(static_cast<int>(ReduceOp::kSum) == SWV_REDUCE_SUM);
  static_assert(static_cast<int>(ReduceOp::kProduct) == SWV_REDUCE_PRODUCT);
  result.kind = static_cast<int>(p.kind());
  if (p.is_shard()) result.dim = p.dim();
  if (p.is_partial()) result.reduce_op = static_cast<int>(p.reduce_op());
  result.split_factor = p.split_factor();
  if (p.kind() == PlacementKind::kRaggedShard) {
    result.sizes = p.sizes().data();
    result.num_sizes = p.sizes().size();
  }
  return result;
}

// A layout on a mesh, for a tensor.
struct Grid {
  Layout layout;
  absl::Span<const int64_t> shape;
  absl::Span<const int64_t> sizes;
};
Grid checked_grid(const Layout& layout, const int64_t* mesh_shape, size_t mesh_ndim,
                  const int64_t* global, size_t num_sizes) {
  const at::IntArrayRef shape = sizes(global, num_sizes, "sizes");
  const Grid grid{check(with_dims_of(layout, static_cast<int>(num_sizes))),
                  span(mesh_shape, mesh_ndim, "mesh_shape", kMaxDims),
                  {shape.data(), shape.size()}};
  for (int64_t size : grid.shape) {
    if (size < 1) fail_argument("mesh_shape", str_cat("has a dimension of size ", size));
  }
  check(validate(grid.layout, grid.shape, grid.sizes));
  return grid;
}

}  // namespace

NamedPlacements named_placements(const swv_named_placement* placements, size_t count,
                                 const char* argument) {
  NamedPlacements result;
  for_each(span(placements, count, argument, kMaxDims), "placements[]",
           [&](const swv_named_placement& p) {
             result.emplace_back(
                 text(p.mesh_dim, "placements[].mesh_dim"),
                 check(parse_placement(text(p.placement, "placements[].placement"))));
           });
  return result;
}

}  // namespace shardweave::capi

using namespace shardweave::capi;  // NOLINT: this file is the C interface of it

swv_status* swv_layout_create(const swv_placement* placements, size_t num_placements,
                              const int32_t* order, size_t num_order, swv_layout** out_layout) {
  return guarded(__func__, out_layout, "out_layout",
                 [&] { return new_layout(placements, num_placements, order, num_order); });
}

swv_status* swv_layout_parse(const char* text, swv_layout** out_layout) {
  return guarded(__func__, out_layout, "out_layout", [&] {
    return make<swv_layout>(check(shardweave::Layout::parse(shardweave::capi::text(text, "text"))));
  });
}

swv_status* swv_layout_create_named(const swv_mesh* mesh, const swv_named_placement* placements,
                                    size_t num_placements, swv_layout** out_layout) {
  return guarded(__func__, out_layout, "out_layout", [&] {
    return make<swv_layout>(shardweave::Layout(
        shardweave::resolve(in(mesh, "mesh").mesh->mesh(),
                            named_placements(placements, num_placements, "placements"))));
  });
}

swv_status* swv_layout_share(const swv_layout* layout, swv_layout** out_layout) {
  return guarded(__func__, out_layout, "out_layout",
                 [&] { return make<swv_layout>(in(layout, "layout").layout); });
}

void swv_layout_free(swv_layout* layout) {
  release(layout, __func__);
}

swv_status* swv_layout_to_string(const swv_layout* layout, swv_string** out_text) {
  return guarded(__func__, out_text, "out_text",
                 [&] { return new_string(in(layout, "layout").layout.to_string()); });
}

swv_status* swv_layout_mesh_ndim(const swv_layout* layout, int32_t* out_ndim) {
  return guarded(__func__, out_ndim, "out_ndim",
                 [&] { return in(layout, "layout").layout.mesh_ndim(); });
}

swv_status* swv_layout_placement(const swv_layout* layout, int32_t mesh_dim,
                                 swv_placement* out_placement) {
  return guarded(__func__, [&] {
    const shardweave::Layout& l = in(layout, "layout").layout;
    if (mesh_dim < 0 || mesh_dim >= l.mesh_ndim()) {
      fail(absl::StatusCode::kOutOfRange,
           str_cat("argument 'mesh_dim' is ", mesh_dim, " of ", l.mesh_ndim()));
    }
    write_struct(c_placement(l[mesh_dim]), out_placement, "out_placement");
  });
}

swv_status* swv_layout_equal(const swv_layout* a, const swv_layout* b, swv_bool* out_equal) {
  return guarded(__func__, out_equal, "out_equal",
                 [&] { return in(a, "a").layout == in(b, "b").layout; });
}

swv_status* swv_layout_local_extent(const swv_layout* layout, const int64_t* mesh_shape,
                                    const int64_t* coordinate, size_t mesh_ndim,
                                    const int64_t* sizes, size_t num_sizes, int64_t* out_shape,
                                    int64_t* out_offset) {
  return guarded(__func__, [&] {
    const Grid grid =
        checked_grid(in(layout, "layout").layout, mesh_shape, mesh_ndim, sizes, num_sizes);
    const auto at = span(coordinate, mesh_ndim, "coordinate", kMaxDims);
    for (size_t i = 0; i < mesh_ndim; ++i) {
      if (at[i] < 0 || at[i] >= grid.shape[i]) {
        fail_argument("coordinate",
                      str_cat("has ", at[i], " in dimension ", i, " of size ", grid.shape[i]));
      }
    }
    const auto extent = shardweave::local_extent(grid.layout, grid.shape, at, grid.sizes);
    if (out_shape != nullptr) std::copy(extent.shape.begin(), extent.shape.end(), out_shape);
    if (out_offset != nullptr) std::copy(extent.offset.begin(), extent.offset.end(), out_offset);
  });
}

swv_status* swv_layout_plan(const swv_layout* from, const swv_layout* to, const int64_t* mesh_shape,
                            size_t mesh_ndim, const int64_t* sizes, size_t num_sizes,
                            swv_dtype dtype, int64_t* out_bytes, swv_string** out_text) {
  return guarded(__func__, [&] {
    const Grid grid =
        checked_grid(in(from, "from").layout, mesh_shape, mesh_ndim, sizes, num_sizes);
    const shardweave::Layout after =
        check(shardweave::with_dims_of(in(to, "to").layout, static_cast<int>(num_sizes)));
    const auto plan = check(shardweave::plan_redistribute(
        grid.layout, after, grid.shape, grid.sizes,
        static_cast<int64_t>(c10::elementSize(scalar_type(dtype, "dtype"))),
        shardweave::CostModel()));
    swv_string* const text = out_text == nullptr ? nullptr : new_string(plan.to_string());
    if (out_text != nullptr) *out_text = text;
    if (out_bytes != nullptr) *out_bytes = plan.bytes();
  });
}
