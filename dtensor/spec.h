// A Spec describes one sharded tensor completely: its mesh, its layout, its global shape, strides,
// dtype and device.
//
//   const SpecRef& spec = call.input("self").spec;   // in a sharding rule (rule.h)
//   spec->local_sizes;                               // of this rank
//
// Specs are interned per mesh and rank: equal specs are the same object, so that comparing and
// hashing one costs a pointer. Immutable; shared by tensors and cache entries.
#pragma once

#include <cstdint>
#include <string>

#include "ATen/core/Tensor.h"
#include "c10/core/Device.h"
#include "c10/core/ScalarType.h"
#include "c10/util/intrusive_ptr.h"
#include "shardweave/placement/layout.h"

namespace shardweave {

namespace dtensor_internal {
class MeshContext;
}

// Where the cuts of a tensor come from. Bit m stands for mesh dimension m. The choice of strategies
// keeps these cuts as long as it can (strategy_cost.h): what becomes of a batch or of a weight that
// is whole again costs more than one operator can see. A cut of neither kind is one that operators
// made: the columns of x @ w, say, where w is cut.
//
// A Partial may be a sum over data that is cut: a loss, statistics of a batch, the gradient of a
// parameter that every rank has. It bears data's bit.
struct CutOrigins {
  uint64_t data = 0;    // a batch or a sequence: what users cut and feed in, and what is made of it
  uint64_t weight = 0;  // a parameter, and views of it
  friend bool operator==(const CutOrigins&, const CutOrigins&) = default;
};

// Without the mesh dimensions along which the tensor is whole, or, for a weight, a Partial: those have
// no origin.
CutOrigins of_cuts(CutOrigins origins, const Layout& layout);

class Spec final : public c10::intrusive_ptr_target {
 public:
  Spec(dtensor_internal::MeshContext* context, Layout layout, Dims sizes, Dims strides,
       at::ScalarType dtype, c10::Device device, CutOrigins origins = {});

  dtensor_internal::MeshContext* const context;  // outlives the spec
  const Layout layout;
  const Dims sizes;    // global
  const Dims strides;  // global, as a tensor on one device would have them
  const at::ScalarType dtype;
  const c10::Device device;
  const CutOrigins origins;  // of_cuts()
  const Dims local_sizes;    // this rank's
  // Of these sizes and strides, without data: what LibTorch works out from them (whether they are
  // contiguous, dense, ...) DTensors copy from here.
  const at::Tensor shape;

  int ndim() const { return static_cast<int>(sizes.size()); }
  int64_t numel() const;
  int64_t local_numel() const;
  // "DTensor[7, 5] float32 [S(0), R]"
  std::string to_string() const;
};
using SpecRef = c10::intrusive_ptr<const Spec>;

// Row-major strides of a contiguous tensor.
Dims contiguous_strides(absl::Span<const int64_t> sizes);

}  // namespace shardweave
