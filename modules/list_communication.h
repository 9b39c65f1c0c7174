// Where a model communicates: every collective of a call, in the order in which they happen, with
// the module that needs it. The module is told although nobody wrote a ModuleScope (comm_trace.h):
// where its weight takes part in an operator, and as Hooked<Impl>; of what runs between two modules
// it is the innermost one that both are in.
//
//   const CommunicationList list = list_communication(*model, [&] {
//     loss_of(*model, batch).backward();
//     finish_grad_sync(*model);
//     optimizer.step();
//   });
//   std::cout << list.to_string();
//
// Comparisons of plain tensors wait for the next value that leaves the mesh: they are listed if it leaves
// in here, as by loss.item().
//
// What it tells of the optimizer it tells where backward runs on the calling thread, on CPUs. On a
// GPU backward runs on autograd's threads, unseen: an optimizer that communicates is listed under
// Phase::kForward there.
//
//   phase     module    needed by         tensor                         collective  ...  bytes
//   forward   mlp.down  aten::add 'other'  Float[8, 12] [P(sum)] -> [R]  all_reduce         384
//   backward  norm      ...
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "shardweave/dtensor/observe/comm_trace.h"

namespace torch::nn {
class Module;
}

namespace shardweave {

struct CommunicationList {
  std::vector<CommEvent> events;  // in order
  int64_t bytes() const;          // that a rank sends

  // A line per event, and below it sums by phase, collective and mesh dimension.
  std::string to_string() const;
  // {"bytes": 384, "events": [...]} as CommTrace::to_json() has them.
  std::string to_json() const;
};

// Runs `run` once: a forward, or a whole step. What runs behind a backward without recording
// gradients counts as Phase::kOptimizer. Throws what `run` throws; Error (FailedPrecondition) if no
// tensor of the model is a DTensor, or if this runs within another call of it (or of module_memory()
// or verify()) on this thread. Collective, if `run` is. Every rank of the mesh gets the same list.
CommunicationList list_communication(torch::nn::Module& model, const std::function<void()>& run);

}  // namespace shardweave
