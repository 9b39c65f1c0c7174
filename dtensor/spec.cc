#include "shardweave/dtensor/spec.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "c10/util/accumulate.h"
#include "shardweave/dtensor/engine/mesh_context.h"

namespace shardweave {
namespace {

using namespace dtensor_internal;

at::Tensor make_shape(const Dims& sizes, const Dims& strides, at::ScalarType dtype,
                      c10::Device device) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::DispatchKeySet(),
                                                   c10::scalarTypeToTypeMeta(dtype), device);
  impl->set_sizes_and_strides(c10::IntArrayRef(sizes.data(), sizes.size()),
                              c10::IntArrayRef(strides.data(), strides.size()));
  return at::Tensor(std::move(impl));
}

}  // namespace

CutOrigins of_cuts(CutOrigins origins, const Layout& layout) {
  uint64_t cuts = 0, sums = 0;
  for (int m = 0; m < std::min(layout.mesh_ndim(), 64); ++m) {
    cuts |= uint64_t{layout[m].is_shard()} << m;
    sums |= uint64_t{layout[m].is_partial()} << m;
  }
  return {origins.data & (cuts | sums), origins.weight & cuts};
}

Spec::Spec(MeshContext* context_in, Layout layout_in, Dims sizes_in, Dims strides_in,
           at::ScalarType dtype_in, c10::Device device_in, CutOrigins origins_in)
    : context(context_in),
      layout(std::move(layout_in)),
      sizes(std::move(sizes_in)),
      strides(std::move(strides_in)),
      dtype(dtype_in),
      device(device_in),
      origins(origins_in),
      local_sizes(local_shape(layout, context->mesh().shape(), context->coordinate(), sizes)),
      shape(make_shape(sizes, strides, dtype, device)) {}

int64_t Spec::numel() const {
  return c10::multiply_integers(sizes);
}

int64_t Spec::local_numel() const {
  return c10::multiply_integers(local_sizes);
}

std::string Spec::to_string() const {
  return absl::StrCat("DTensor[", absl::StrJoin(sizes, ", "), "] ", c10::toString(dtype), " ",
                      layout.to_string());
}

Dims contiguous_strides(absl::Span<const int64_t> sizes) {
  Dims strides(sizes.size());
  int64_t next = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = next;
    next *= std::max<int64_t>(sizes[i], 1);
  }
  return strides;
}

}  // namespace shardweave
