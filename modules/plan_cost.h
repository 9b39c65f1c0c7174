// What one training step of a model under a plan costs a rank, found out on one rank and without the
// others: messages, computation and memory.
//
//   const auto make = [&] {
//     nn::Llama model(options);
//     return StepModel{model.ptr(), [=](const MeshPtr& on) mutable {
//       const at::Tensor ids =
//           distribute_tensor(tokens, on, {{"dp", Shard(0)}}, {.source = std::nullopt});
//       return nn::next_token_loss(model(ids), ids);
//     }};
//   };
//   const PlanCost cost = plan_cost(make, mesh, plan, cost_model(connected_mesh));
//   std::cout << cost.to_string();
//
// The model is made without memory, sharded on a mesh of that shape whose other ranks are not there
// (comm/counting), and its first rank's part of one step really runs, on this thread: forward, loss,
// backward and finish_grad_sync(). Nothing is estimated but the seconds, which a CostModel gives. So
// it takes the memory and the time of one rank's step; of a model that is too large for that, fewer of
// its equal layers and a shorter batch tell which plan is better, too.
//
// Model and batch lie on the CPU, whatever ranks will compute on. What depends on values cannot be
// found out: a loss that reads them (item()), or whose shapes depend on them, is an error.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/modules/parallelize_module.h"
#include "shardweave/placement/redistribute_plan.h"

namespace torch::nn {
class Module;
}

namespace shardweave {

// A model that no plan has been applied to, and what a step minimises.
struct StepModel {
  std::shared_ptr<torch::nn::Module> module;
  // A number, on the mesh that `module` has been sharded on; brings the batch there as a real step
  // does. Does not call backward().
  std::function<at::Tensor(const MeshPtr& mesh)> loss;
};
// Makes the same model every time. Called under deferred_init().
using MakeModel = std::function<StepModel()>;

struct PlanCostOptions {
  // Numbers that the optimizer keeps for each parameter: 2 of Adam, 1 of momentum, 0 of SGD.
  int64_t optimizer_states = 2;
};

struct PlanCost {
  // Collectives of one kind along the same mesh dimensions.
  struct Traffic {
    std::string collective;              // as CommEvent::collective
    std::vector<std::string> mesh_dims;  // along which they go
    int64_t calls = 0;
    int64_t bytes = 0;   // that a rank sends, as CommEvent::bytes
    double seconds = 0;  // latency and bytes of each
    friend bool operator==(const Traffic&, const Traffic&) = default;
  };
  // By collective and mesh dimensions. Without what a program sends once and not in every step: that
  // plain tensors are the same on every rank.
  std::vector<Traffic> traffic;

  // Of a rank. Multiplications and additions of matrix products, attention and convolutions; and what
  // operators read and write, the optimizer too.
  double flops = 0;
  int64_t bytes_touched = 0;
  double compute_seconds = 0;

  // In bytes, on the first rank, whose parts are as large as any, but where the plan's own sizes
  // (Ragged) give another more. Activations are those that are there when forward is over
  // (module_memory.h).
  int64_t parameters = 0, buffers = 0, gradients = 0, optimizer = 0, activations = 0;

  int64_t collectives() const;
  int64_t bytes_sent() const;
  double communication_seconds() const;
  // One after the other: nothing overlaps.
  double seconds() const { return communication_seconds() + compute_seconds; }
  // At most, when forward is over and all gradients are there.
  int64_t memory() const { return parameters + buffers + gradients + optimizer + activations; }

  std::string to_string() const;
  // {"seconds": 0.01, "communication_seconds": .., "compute_seconds": .., "flops": ..,
  //  "bytes_touched": .., "bytes_sent": .., "collectives": .., "memory": ..,
  //  "parameters": .., "buffers": .., "gradients": .., "optimizer": .., "activations": ..,
  //  "traffic": [{"collective": "all_reduce", "mesh_dims": ["tp"], "calls": 4, "bytes": ..,
  //               "seconds": ..}]}
  std::string to_json() const;
  friend bool operator==(const PlanCost&, const PlanCost&) = default;
};

// Local, and the same on every rank. `mesh`: its dimensions count. `model`: with a link for each of
// them, or none (the default). Throws Error: what parallelize_module() says of the plan and
// set_cost_model() of the cost model; InvalidArgument for a module or a loss that is null;
// FailedPrecondition for a step that reads values; and whatever `make` and the loss throw.
PlanCost plan_cost(const MakeModel& make, const DeviceMesh& mesh, const ShardingPlan& plan,
                   const CostModel& model = {}, const PlanCostOptions& options = {});

}  // namespace shardweave
