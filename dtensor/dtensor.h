// DTensor: an at::Tensor whose data is spread over a device mesh.
//
//   auto mesh = *init_device_mesh(world, {{"dp", 2}, {"tp", 2}});
//   at::Tensor w = distribute_tensor(at::randn({6, 4}), mesh, {{"tp", Shard(0)}});
//   at::Tensor x = distribute_tensor(at::randn({8, 4}), mesh, {{"dp", Shard(0)}});
//   at::Tensor y = at::matmul(x, w.t());           // [S(0), S(1)], no communication
//   at::Tensor all = full_tensor(y);               // 8 x 6 on every rank
//
// A DTensor has the global shape, and every operator of LibTorch works on it, in forward, backward
// and optimizers: with a sharding rule it runs on the local parts, without one its inputs are
// gathered (right numbers, a warning once, a counter). Communication that an operator needs happens
// by itself; StrictScope turns it into an error.
//
// Every function here that communicates, and any that makes a DTensor of plain tensors, is
// collective: all ranks of the mesh call it in the same order; `where`, the place of the call, is for
// CommTrace (comm_trace.h). Errors are thrown as shardweave::Error. Threads: a rank's DTensors are
// used by one thread at a time.
// Ownership: a DTensor keeps its mesh alive. Its local part keeps just its own bytes alive, however
// it was made (from_local() shares the memory that it is given).
// Placements: Shard(-1) is the last dimension, here as everywhere a placement meets a tensor.
#pragma once

#include <cstdio>
#include <initializer_list>
#include <memory>
#include <optional>
#include <source_location>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/dtensor/observe/visualize_sharding.h"
#include "shardweave/mesh/connected_mesh.h"
#include "shardweave/placement/layout.h"
#include "shardweave/placement/placement.h"

namespace shardweave {

using MeshPtr = std::shared_ptr<ConnectedMesh>;

// Placements by mesh dimension name; dimensions that are not named are replicated.
using NamedPlacements = std::vector<std::pair<std::string, Placement>>;
// Throws Error for a name that the mesh does not have (the message lists those it has) and for a
// name given twice.
Placements resolve(const DeviceMesh& mesh, const NamedPlacements& named);

// An empty list of placements, `{}`: no dimension of the mesh is named, and the tensor is replicated.
class NoPlacement {
  NoPlacement() = delete;
};
using NoPlacements = std::initializer_list<NoPlacement>;

// --- making DTensors -----------------------------------------------------------------------------

struct DistributeOptions {
  // The rank (row-major index in the mesh) whose data counts; every other rank is sent its part of it
  // (OutOfRange for one that the mesh does not have). nullopt: every rank has the same data already, and nothing
  // is sent. distribute_tensor() does not compare it either: a rank whose shape or dtype is another
  // hears at the next collective of the tensor that the ranks have gone apart, other values go
  // unnoticed. distribute_module() compares all of it.
  std::optional<int64_t> source = 0;
};

// Cuts a plain tensor, of the same shape and dtype on every rank, as the placements say. The result
// is a leaf that requires grad if `tensor` does. `placements`: one per mesh dimension, no Partial.
at::Tensor distribute_tensor(const at::Tensor& tensor, const MeshPtr& mesh,
                             const Placements& placements, const DistributeOptions& options = {},
                             std::source_location where = std::source_location::current());
at::Tensor distribute_tensor(const at::Tensor& tensor, const MeshPtr& mesh,
                             const NamedPlacements& placements,
                             const DistributeOptions& options = {},
                             std::source_location where = std::source_location::current());
inline at::Tensor distribute_tensor(const at::Tensor& tensor, const MeshPtr& mesh,
                                    NoPlacements /*replicated*/,
                                    const DistributeOptions& options = {},
                                    std::source_location where = std::source_location::current()) {
  return distribute_tensor(tensor, mesh, NamedPlacements(), options, where);
}

// A DTensor from every rank's local tensor. Its global shape is worked out from the local shapes
// (one small collective) unless `global_sizes` is given. Parts that are not those of an even split,
// 1 + 2 rows, make a Shard(dim) a RaggedShard(dim, {1, 2}): layout_of() says so. Local shapes that
// no layout describes are an error on every rank. Differentiable: if the part of any rank requires
// grad, the DTensor does on all (with `global_sizes` nobody is asked: say the same on all ranks).
at::Tensor from_local(const at::Tensor& local, const MeshPtr& mesh, const Placements& placements,
                      std::optional<std::vector<int64_t>> global_sizes = std::nullopt,
                      std::source_location where = std::source_location::current());

// Filled on every rank without communication. `options` give the dtype and requires_grad; full()
// without a dtype has that of the value, as at::full() (Long for 2, Float for 2.0).
at::Tensor zeros(at::IntArrayRef sizes, const MeshPtr& mesh, const Placements& placements,
                 at::TensorOptions options = {});
at::Tensor ones(at::IntArrayRef sizes, const MeshPtr& mesh, const Placements& placements,
                at::TensorOptions options = {});
at::Tensor empty(at::IntArrayRef sizes, const MeshPtr& mesh, const Placements& placements,
                 at::TensorOptions options = {});
at::Tensor full(at::IntArrayRef sizes, const at::Scalar& value, const MeshPtr& mesh,
                const Placements& placements, at::TensorOptions options = {});
// Random numbers by global element index: the same values for every mesh and every placement (see
// manual_seed in random.h).
at::Tensor rand(at::IntArrayRef sizes, const MeshPtr& mesh, const Placements& placements,
                at::TensorOptions options = {});
at::Tensor randn(at::IntArrayRef sizes, const MeshPtr& mesh, const Placements& placements,
                 at::TensorOptions options = {});

// --- looking at DTensors -------------------------------------------------------------------------

bool is_dtensor(const at::Tensor& tensor);
// These throw Error for a plain tensor.
const Layout& layout_of(const at::Tensor& tensor);
MeshPtr mesh_of(const at::Tensor& tensor);
// "DTensor[7, 5] Float [S(0), R] on DeviceMesh(dp=2, tp=2), local [4, 5] at [0, 0]"
std::string describe(const at::Tensor& tensor);
// The same, and below it the elements of the whole tensor, on every rank: collective. Of a plain
// tensor its elements alone. For looking at small tensors; `std::cout << tensor` is an error, for an
// operator of the stream would have to communicate.
//   const std::string text = values_to_string(x);      // on all ranks
//   if (world.rank() == 0) std::cout << text << "\n";
std::string values_to_string(const at::Tensor& tensor,
                             std::source_location where = std::source_location::current());
// Prints a picture of which rank holds which part. visualize_sharding.h also makes text and SVG of
// it, from layout_of(), mesh_of() and the sizes.
void visualize_sharding(const at::Tensor& tensor, const VisualizeOptions& options = {},
                        std::FILE* out = stdout);

// --- moving and leaving --------------------------------------------------------------------------

// The same tensor in another layout, by the cheapest collectives. Differentiable, as often as one
// likes (as are to_local(), full_tensor() and from_local()); the gradient comes back in the layout
// of the input (Replicate where that was Partial).
at::Tensor redistribute(const at::Tensor& tensor, const Layout& layout,
                        std::source_location where = std::source_location::current());
at::Tensor redistribute(const at::Tensor& tensor, const Placements& placements,
                        std::source_location where = std::source_location::current());
at::Tensor redistribute(const at::Tensor& tensor, const NamedPlacements& placements,
                        std::source_location where = std::source_location::current());
inline at::Tensor redistribute(const at::Tensor& tensor, NoPlacements /*replicated*/,
                               std::source_location where = std::source_location::current()) {
  return redistribute(tensor, NamedPlacements(), where);
}

// This rank's part; shares memory with the DTensor. Local, unless plain tensors have been mixed with
// DTensors whose comparison is still owed: then all ranks compare them here (Error, InvalidArgument,
// if they differ). Differentiable: `grad_placements` say how the
// gradients of the local tensors lie together (default: as the DTensor; Replicate where that is
// Partial). A replicated tensor whose copies are used differently by each rank has Partial
// gradients: say so here.
at::Tensor to_local(const at::Tensor& tensor,
                    std::optional<Placements> grad_placements = std::nullopt,
                    std::source_location where = std::source_location::current());

// The whole tensor, on every rank. Differentiable.
at::Tensor full_tensor(const at::Tensor& tensor,
                       std::source_location where = std::source_location::current());

// --- scopes and counters -------------------------------------------------------------------------

// While it lives, an operator on DTensors of `mesh` that would communicate by itself throws Error
// (FailedPrecondition), naming operator, tensors and the module (ModuleScope in comm_trace.h);
// redistribute() and the other functions above are explicit and allowed.
class StrictScope {
 public:
  explicit StrictScope(const MeshPtr& mesh);
  ~StrictScope();
  StrictScope(const StrictScope&) = delete;
  StrictScope& operator=(const StrictScope&) = delete;

 private:
  MeshPtr mesh_;
};

// Of this rank, since the mesh was made.
struct DispatchCounters {
  int64_t operators = 0;  // operators on DTensors
  int64_t cache_misses = 0;
  int64_t implicit_redistributions = 0;  // with communication, that no redistribute() asked for
  int64_t gathered_operators = 0;        // calls of operators without a rule
  int64_t remembered_uses = 0;   // redistributions that an earlier one's result made needless
  int64_t remembered_bytes = 0;  // that such results, and sums whose multiples wait, take up now
  // How often a weight that the user had cut was brought elsewhere for an operator. The first
  // is a warning of LibTorch's on the first rank; the others are one more, when that is there again.
  int64_t unsharded_weights = 0;
  friend bool operator==(const DispatchCounters&, const DispatchCounters&) = default;
};
DispatchCounters dispatch_counters(const MeshPtr& mesh);

}  // namespace shardweave
