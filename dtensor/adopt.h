// Plain tensors next to DTensors. Internal to dtensor/.
#pragma once

#include <memory>

#include "ATen/core/dispatch/Dispatcher.h"
#include "absl/types/span.h"
#include "shardweave/dtensor/mesh_context.h"

namespace shardweave {

// The spec of a replicated DTensor with this local tensor.
SpecRef replicated_spec(MeshContext& context, const at::Tensor& local);

// A gradient as autograd hands it to a node of ours: a plain one (of a formula, or of the user's) is
// the same on every rank.
at::Tensor as_dtensor(const at::Tensor& grad, const std::shared_ptr<MeshContext>& context);

// Formulas of derivatives make plain tensors here and there (at::zeros(sizes, grad.options()), then
// scatter_): the same on every rank, so they count as replicated.
void adopt_in_backward(const OpInfo& info, const std::shared_ptr<MeshContext>& context,
                       absl::Span<c10::IValue> args);

// Plain tensors that an operator reads next to DTensors (masks and weights that LibTorch's
// composite operators make, a user's constants) count as replicated if they are the same on every
// rank, which costs a small collective to find out. One that the operator writes to becomes a DTensor
// where it stands, as an out= argument does, whatever is in it. Throws Error (InvalidArgument) if
// they differ or require grad, (FailedPrecondition) in a strict scope; on every rank.
void adopt_equal(const c10::OperatorHandle& op, const OpInfo& info,
                 const std::shared_ptr<MeshContext>& context, absl::Span<c10::IValue> args);

}  // namespace shardweave
