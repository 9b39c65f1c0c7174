// Executes redistribution plans on local tensors. Internal to dtensor/; users call redistribute() in dtensor.h.
#pragma once

#include <string_view>

#include "ATen/core/Tensor.h"
#include "shardweave/comm/communicator.h"
#include "shardweave/dtensor/mesh_context.h"
#include "shardweave/placement/redistribute_plan.h"

namespace shardweave {

// The plan from one layout of a tensor to another, by the context's cost model.
RedistributePlan plan_for(const MeshContext& context, const Spec& from, const Layout& to);

// Runs `plan` on this rank's part of a tensor with global `sizes`; the result is contiguous unless the plan is empty.
// Collective over the mesh dimensions that the plan names. `tag` goes into errors and the flight record.
at::Tensor run_plan(MeshContext& context, const RedistributePlan& plan, at::Tensor local,
                    absl::Span<const int64_t> sizes, std::string_view tag);

// Between LibTorch's names and those of comm/.
DType comm_dtype(at::ScalarType dtype);  // throws Error for types that cannot travel
Buffer comm_buffer(const at::Tensor& contiguous);

}  // namespace shardweave
