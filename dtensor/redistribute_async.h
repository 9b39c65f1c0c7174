// Redistribution that does not wait, and of many tensors at once.
//
//   PendingTensor next = redistribute_async(weight, {Replicate()});   // on its way
//   y = layer(x);                                                     // meanwhile
//   at::Tensor whole = next.wait();
//
//   // Small ones share collectives.
//   std::vector<at::Tensor> all = redistribute_all(weights, layouts);
//
// Both are what redistribute() is: explicit, collective over the mesh, differentiable, with the
// same values to the bit. Errors are thrown as Error; a layout that does not fit is one before
// anything is sent.
#pragma once

#include <memory>
#include <source_location>
#include <vector>

#include "absl/types/span.h"
#include "shardweave/dtensor/dtensor.h"

namespace shardweave {

// A redistribution that has begun. Its first collective is under way; a plan of several goes on in
// wait().
//
// Order: where a plan has several collectives, wait() issues the later ones. So all ranks wait for
// their pending tensors in the same order, as they call everything on DTensors. Memory: the tensor
// that is sent must not be written until wait() has returned; wait() throws FailedPrecondition if
// it was. Threads: as a DTensor. Cheap to copy; the last copy, when it is dropped without wait(),
// waits for the collective that is under way.
class PendingTensor {
 public:
  // The tensor in its new layout, the same one every time. Gradients flow back as from
  // redistribute().
  at::Tensor wait();
  // Whether wait() would return without waiting for another rank. Never blocks.
  bool done() const;

 private:
  friend PendingTensor redistribute_async(const at::Tensor& tensor, const Layout& layout,
                                          std::source_location where);
  struct State;
  explicit PendingTensor(std::shared_ptr<State> state);
  std::shared_ptr<State> state_;
};

PendingTensor redistribute_async(const at::Tensor& tensor, const Layout& layout,
                                 std::source_location where = std::source_location::current());
PendingTensor redistribute_async(const at::Tensor& tensor, const Placements& placements,
                                 std::source_location where = std::source_location::current());

// tensors[i] in layouts[i]. In each round of collectives those of at most 1 MiB (of the whole
// tensor) that need the same kind of step, over the same mesh dimensions, with the same reduction
// and dtype, travel as one, and all that are left are under way at once. The backward does the same
// for the gradients.
std::vector<at::Tensor> redistribute_all(
    absl::Span<const at::Tensor> tensors, absl::Span<const Layout> layouts,
    std::source_location where = std::source_location::current());

}  // namespace shardweave
