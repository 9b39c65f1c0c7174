// What communication and computation cost on a mesh. By this operators choose among the strategies
// of their sharding rules (explain.h shows it), and redistributions choose their steps.
//
//   CostModel model = cost_model(mesh);                            // "dp" between hosts, "tp" within one
//   model.links = {{.latency = 3e-5, .bandwidth = 2e10}, {.latency = 5e-6, .bandwidth = 3e11}};
//   model.device = {.flops = 4e14, .bandwidth = 3e12};
//   set_cost_model(mesh, model);
//
// Or as it was measured once (`text` is what //tools:measure_cost_model --json has printed, or what
// cost_model_to_json() made of a measured one):
//
//   set_cost_model(mesh, cost_model_from_json(text, mesh->mesh()));
//
// CostModel itself, with the units, is in placement/redistribute_plan.h. The default is that of
// rank threads on a CPU.
#pragma once

#include <source_location>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/placement/redistribute_plan.h"

namespace shardweave {

// With a link for each mesh dimension. Local.
CostModel cost_model(const MeshPtr& mesh);

// From now on, on this mesh; its slices have models of their own. What was decided before is
// forgotten. COLLECTIVE over the mesh, once, for ranks with different models would choose differently
// and wait for each other: if they are not all given the same one, or one is given an error, every
// rank throws Error (InvalidArgument) and keeps its model. Wanted: a link for each mesh dimension,
// latencies of 0 or more, everything else above 0, all finite.
void set_cost_model(const MeshPtr& mesh, const absl::StatusOr<CostModel>& model,
                    std::source_location where = std::source_location::current());

// What it is here and now, the same on every rank, to be set: each link by all-reduces and all-gathers
// of a few bytes and of many, the device by a matrix product and a copy, medians of the slowest rank.
// All ranks compute and send at once, as they do in training. A second or two. COLLECTIVE.
//
// Of the HOST: the links as memory of the CPU goes (with backend "nccl" that is Gloo), the device is
// the CPU. For training on GPUs these are the wrong numbers, whatever the mesh is for: set the GPUs'.
CostModel measure_cost_model(const MeshPtr& mesh);

// {"links": {"dp": {"latency": 3e-5, "bandwidth": 2e10}, "tp": {...}},
//  "device": {"flops": 4e14, "bandwidth": 3e12}}
// A link for each dimension of the mesh and no other; what else the document has is not looked at.
// InvalidArgument says what is missing, or which number is none.
absl::StatusOr<CostModel> cost_model_from_json(std::string_view text, const DeviceMesh& mesh);
std::string cost_model_to_json(const CostModel& model, const DeviceMesh& mesh);

}  // namespace shardweave
