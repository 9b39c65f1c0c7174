// Executes redistribution plans on local tensors. Internal to dtensor/; users call redistribute()
// in dtensor.h.
#pragma once

#include <cstdint>
#include <functional>
#include <source_location>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "shardweave/comm/communicator.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/plans.h"
#include "shardweave/dtensor/engine/tensor_work.h"
#include "shardweave/placement/redistribute_plan.h"

namespace shardweave::dtensor_internal {

// A layout that a user gave for a tensor of `ndim` dimensions, with these counted from the front.
// Throws Error (InvalidArgument) that names `function` if it has not one placement for each
// dimension of the mesh, or cuts a dimension that the tensor does not have.
Layout layout_for(const MeshContext& context, const Layout& layout, int64_t ndim,
                  const char* function);

// The plan from one layout of a tensor to another, by the context's cost model: searched the first
// time, and found in the memo after that (plans.h).
PlanRef plan_for(MeshContext& context, const SpecRef& from, const SpecRef& to);
// Searched, and forgotten: to look at.
RedistributePlan searched_plan(const MeshContext& context, const Spec& from, const Layout& to);

// What a tensor gives to one collective.
struct CollectiveTransfer {
  // Or kAllGather, kReduceScatter, kAllToAll; with a V where parts differ in size.
  OpKind op = OpKind::kAllReduce;
  ReduceOp reduce_op = ReduceOp::kSum;
  std::vector<int> mesh_dims;
  at::Tensor input;                 // contiguous
  at::Tensor output;                // contiguous, to be filled
  std::vector<int64_t> in_counts;   // kReduceScatterV, kAllToAllV
  std::vector<int64_t> out_counts;  // kAllGatherV, kAllToAllV
  // The local tensor from the filled output; null: that is it.
  std::function<at::Tensor(const at::Tensor& output)> unpack;
};

// Issues the collective; the transfer must stay until it has been waited for.
TensorWork send(MeshContext& context, const CollectiveTransfer& transfer, std::string_view tag);

// A collective as those see it who look (observer.h).
struct Sending {
  std::string_view collective;
  absl::Span<const int> mesh_dims;
  int64_t bytes;
  at::ScalarType dtype;
  absl::Span<const int64_t> shape;
  Layout before;
  Layout after;
  std::vector<std::string> parameters = {};  // of several tensors together; else the Cause has it
  bool is_check = false;                     // CommEvent::is_check
};

// A plan on its way, one collective after the other.
//
//   PlanRun run(context, plan, local, sizes);
//   for (CollectiveTransfer transfer; run.next(&transfer); run.arrived(transfer)) throw_if_error(send(...).wait());
//   return run.local();
class PlanRun {
 public:
  // On this rank's part of a tensor with global `sizes`; the plan must outlive the run.
  PlanRun(MeshContext& context, const ReadyPlan& plan, at::Tensor local,
          absl::Span<const int64_t> sizes);

  // Runs what is local up to the next collective and packs that; false when the plan is through.
  // Collectives in which nobody sends anything are left out, on all ranks; so are those of tensors on
  // the meta device, which have no numbers.
  bool next(CollectiveTransfer* transfer);
  void arrived(const CollectiveTransfer& transfer);
  // Is the tensor that was given if nothing had to be done to it, or a view of it.
  at::Tensor local() const;
  // While a transfer of next() is under way: what it is, and the first step after it.
  Sending sending() const;
  size_t next_step() const { return step_ + 1; }

 private:
  MeshContext* context_;
  const ReadyPlan* plan_;
  Dims sizes_;
  at::Tensor given_;
  // Complex tensors travel as real ones with a last dimension of 2; conjugation and negation that
  // LibTorch has put off are done before.
  at::Tensor start_;
  at::Tensor local_;
  size_t step_ = 0;
};

// Why something is sent; for errors, the flight record and whoever looks (observer.h).
struct Cause {
  std::string_view name;            // the operator, or the function that a user called
  std::string_view argument = {};   // of the operator: what has to move
  std::source_location where = {};  // of the function's call
  std::string_view parameter = {};  // the FQN, where it or its gradient moves
  bool syncs_gradients = false;     // Phase::kGradientSync
  std::string_view subject = {};    // what it is called in errors of collectives; empty: the name
  bool implicit() const { return where.line() == 0; }
  std::string_view tag() const { return subject.empty() ? name : subject; }
};

// The call that a refusal of the strict scope advises: "redistribute(input, [R])".
std::string advised_call(std::string_view argument, const Layout& layout);

// Runs `plan` on this rank's part of a tensor with global `sizes`; the result is contiguous unless
// the plan has nothing but a to_partial or no step. It may be a view of `local`. Collective over the mesh dimensions that the
// plan names.
at::Tensor run_plan(MeshContext& context, const ReadyPlan& plan, at::Tensor local,
                    absl::Span<const int64_t> sizes, const Cause& cause);

// What a DTensor keeps of the result of a plan: a tensor that shares nothing with what was `given`
// (undefined: it may) and keeps no bytes but its own alive. Copies where it is not so
// already.
at::Tensor owned(at::Tensor local, const at::Tensor& given);

// A DTensor in another layout, without autograd; the same one if that is its layout.
at::Tensor redistributed(const at::Tensor& tensor, const Layout& layout, const Cause& cause);

// How the gradient of a tensor with this layout lies: a summand's gradient is whole on every rank.
Layout gradient_layout(const Layout& layout);

// The elements of `tensor` that `intervals` name along `dim`; a view where there is one.
at::Tensor select(const at::Tensor& tensor, int dim, const Intervals& intervals);

// Between LibTorch's names and those of comm/.
DType comm_dtype(at::ScalarType dtype);            // throws Error for types that cannot travel
Buffer comm_buffer(const at::Tensor& contiguous);  // a complex number counts as two real ones

}  // namespace shardweave::dtensor_internal
