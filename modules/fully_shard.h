// Fully sharded data parallelism: along one mesh dimension each rank keeps a part of every parameter,
// of its gradient and of the optimizer's state. Parameters are whole only while they are used, a
// unit of them at a time.
//
//   fully_shard(*model, mesh, {.units = {"blocks.*"}});      // a unit for each block, and one for the rest
//   torch::optim::AdamW optimizer(unique_parameters(*model));   // what is tied, once
//   auto x = distribute_tensor(batch, mesh, {{"dp", Shard(0)}});
//   model->forward(x).sum().backward();                       // gathers, reduces, empties
//   finish_grad_sync(*model);                                 // if a parameter is a number: in no unit
//   clip_grad_norm(model->parameters(), 1.0);
//   optimizer.step();                                         // on each rank's part
//
// Nothing is hooked into modules: a unit is gathered when an operator first touches one of its
// parameters, forward or backward, whoever wrote the forward: torch::nn, TorchScript, C, Rust, Go. The
// order in which units come is learned, and the next one is gathered ahead. A unit is emptied when
// the next one is touched. When its gradients are there one reduce-scatter begins to bring them to
// where the parameters rest, while backward goes on; when the unit after the next is touched, and
// when backward ends, it has. (Where a parameter has a gradient already, adding to it waits.) So a
// step takes at most three collectives for a unit that is met once, of (n - 1) / n of its bytes each.
//
// A parameter rests as a DTensor that is cut into rows: unevenly, so that what ranks keep lies in the
// unit's buffer one after the other. param.grad() lies alike. So optimizers, clip_grad_norm and
// checkpoints need to know nothing. `full_tensor(param)` is the whole; initialisers (`param.normal_()`)
// give the numbers of one device. While gradients are not recorded (and will not be: both runs of
// a checkpoint() are of training, whatever a function in it says), operators on parameters alone, or with numbers (`p.norm()`, `p.clone()`, `p * 0.99`), work on what rests, in its dtype and where it is,
// as averages of weights and initialisers want it; so do, always, those on a parameter and what lies as
// it does (`ema.lerp_(p, 0.1)` of a `p.detach().clone()`, or with a gradient), and under mixed precision those that
// write another parameter or a buffer (`teacher.lerp_(p, 0.1)`); all others on what is whole.
// Its parts and those of its gradients share their unit's memory. What
// was taken of a parameter before (to_local(), a view as `w.t()`, `p.detach()`) is no longer of it, and
// keeps the old memory with the old values.
//
// Gradients leave in every backward: several of them before a step are added up where they rest, and
// send as often. Under a FullyShardNoSync they stay whole with the rank that has computed them, which
// takes memory as a model that is not sharded does, and the first backward behind it sends their sum:
//
//   {
//     const FullyShardNoSync accumulate(mesh);
//     for (int i = 0; i < 3; ++i) model->forward(part(i)).sum().backward();
//   }
//   model->forward(part(3)).sum().backward();                 // one reduce-scatter for each unit
//
// (GradSync, and its NoSync, is for what is in no unit.)
//
// A backward that fails on one rank stops where it is, and other ranks wait for its gathers: the mesh
// is lost, as with any collective that one rank does not call.
//
// A model that is too large for one rank's memory is constructed under deferred_init()
// (deferred_init.h), which takes none; then fully_shard(), and materialize() makes each rank's
// part.
//
// CPU offload: with a `compute_device` parameters, gradients and so the optimizer's state stay on the
// CPU, where the model was constructed, in pinned memory, and a unit is on the device while it is used.
// Copies go on beside computation. The host waits for them where somebody reads gradients (the optimizer,
// clip_grad_norm(), adding to a gradient that is there) or may write a parameter (to_local()). The world needs a backend for both
// memories: NCCL has one, and Gloo with a device. docs/gpu.md says what it costs and what is not there.
//
//   fully_shard(*model, mesh, {.units = {"blocks.*"}, .compute_device = at::kCUDA});
//   FusedOptimizer optimizer(model->parameters(), AdamWOptions{});  // steps on the CPU
//   auto x = distribute_tensor(batch.to(at::kCUDA), mesh, {{"dp", Shard(0)}});
//
// A hook of a parameter is called with an undefined gradient where a backward meets its unit and not
// the parameter, of which another graph has a gradient yet to come: two losses of parts of one unit.
//
// Along other mesh dimensions parameters stay as they are: parallelize_module() comes first, then
// fully_shard(). With a mesh dimension on which parameters are replicated and the batch is cut, this
// is hybrid sharding.
//
// Under checkpoint() a part that runs again is gathered again. Without gradients (evaluation) units
// are gathered and emptied alike; the one that was touched last stays, and the one that came after it
// in another pass is gathered ahead, until the next or reshard(). So
// what is written through to_local() of a parameter is written on all ranks or on none, also where a
// rank has nothing of it, or behind reshard(): a unit that is full is gathered again by who has written.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <source_location>
#include <string>
#include <vector>

#include "shardweave/dtensor/dtensor.h"

namespace torch::nn {
class Module;
}

namespace shardweave {

struct FullyShardOptions {
  // The mesh dimension along which parameters are cut; "": the mesh's first.
  std::string mesh_dim = {};
  // Which submodules are units: patterns of their FQNs (FqnPattern). Of modules within each other a
  // pattern takes the outermost that it matches; another pattern may name units in those. What is in
  // no other unit is one with the module that is given.
  std::vector<std::string> units = {};
  // The same by type, as torch::nn::Module::name() ends: "Block" is BlockImpl, too.
  std::vector<std::string> unit_types = {};
  // Submodules with fewer parameter elements belong to the unit around them. Without patterns and
  // types: every submodule is a unit that has so many outside of units within it.
  int64_t min_numel = 0;
  // False: what was gathered in forward stays for backward. More memory, two collectives.
  bool reshard_after_forward = true;
  // Between: a unit stays divided among so many neighbours along the dimension, and backward gathers it
  // from those alone, where links are shorter. They keep 1 / n of it meanwhile. A divisor of the ranks;
  // 0: among all of them.
  int64_t reshard_after_forward_ranks = 0;
  // Ranks keep as much as each other, to the element, and even collectives take the place of those with
  // a count for each rank, for backends that want it (NCCL). Gaps between parameters make it so:
  // FullyShardUnit::padding. Numbers are the same to the last bit.
  bool equal_segments = false;
  // CPU offload: where operators see parameters that rest on the CPU; nullopt: where they rest.
  // kCUDA is this rank's current device. Parameters that are on it already stay there; buffers, and
  // parameters that are in no unit (numbers), move to it.
  std::optional<at::Device> compute_device = {};
  // Mixed precision: float16, bfloat16, float32 or float64. What rests, its gradient, and so what
  // optimizers work on, keeps its dtype (the master weights).
  //
  // As what operators see parameters, and as units are gathered; nullopt: as they rest. What an
  // operator takes beside them or views of them (no buffer, no number) becomes of this dtype, too.
  // Parameters of other dtypes (complex, of 8 bits) and what meets only those stay as they are. What is
  // to be computed more exactly, as a router, is a unit of its own, made first and without this. (While
  // gradients are recorded `weight.to(at::kFloat)` is float32 of what operators see; without it is the
  // parameter itself, which an operator with an input sees as any.)
  std::optional<at::ScalarType> param_dtype = {};
  // In what gradients are summed over ranks, along all mesh dimensions; nullopt: as operators see the
  // parameters.
  std::optional<at::ScalarType> reduce_dtype = {};
  // What operators that take parameters and an input give, for units have no forward of their own;
  // nullopt: as it comes.
  std::optional<at::ScalarType> output_dtype = {};
  // Of parameters and buffers that are plain: whose values count.
  DistributeOptions distribute = {};
};

// What became a unit.
struct FullyShardUnit {
  std::string module;                   // FQN; "": the module that was given
  std::vector<std::string> parameters;  // FQNs, in the order of the unit's buffer
  int64_t numel = 0;  // of this rank's whole parameters (with tensor parallelism its part)
  int64_t kept = 0;   // elements that this rank keeps
  // Elements in gaps, of all ranks together: what a gather and a reduction send for nothing, and ranks
  // keep. Without equal_segments 0.
  int64_t padding = 0;
};

// Of all that one call has made: a table, and
//   [{"module": "blocks.0", "parameters": ["blocks.0.up.weight"], "numel": 40, "kept": 20,
//     "padding": 0}].
std::string to_string(const std::vector<FullyShardUnit>& units);
std::string to_json(const std::vector<FullyShardUnit>& units);

// Parameters that are plain become DTensors, as do buffers; those that are in a unit already (of an
// inner module, by an earlier call) stay there. A tied parameter belongs to one unit, that of its
// first name, which is gathered wherever the parameter is used: with units between its uses (an
// embedding that is the head as well) each time anew. Numbers (0-dimensional parameters) stay
// replicated; then finish_grad_sync() brings their gradients. Unit by unit the parameters of one dtype
// and device.
//
// Collective over the mesh; compares the ranks' units. Throws Error before anything is changed:
// InvalidArgument for a dimension that the mesh does not have, a parameter on another mesh or cut along
// the dimension already, one with a ragged cut of its rows along another, options that differ between
// ranks or contradict each other, reshard_after_forward_ranks that is no divisor, a compute_device that
// LibTorch does not have here, or of parameters on another device that is not the CPU, equal_segments of
// what other mesh dimensions cut unevenly, a dtype of mixed precision that
// is none of the four, what another rank refuses, and what distribute_module() does; NotFound for a
// pattern or type that matches no submodule with parameters; FailedPrecondition if all parameters are in
// units already (inner modules come first), and for a parameter in a GradSync or a ZeroPartition that is
// still there.
// While the model runs: FailedPrecondition for a parameter that was moved since (module->to(), resize_),
// for a write to a view of a parameter, and for ranks that use units in different orders; with a
// compute_device also in a captured step, and where an operator would record gradients on the CPU, and
// Unimplemented for gradients of gradients.
std::vector<FullyShardUnit> fully_shard(
    torch::nn::Module& module, const MeshPtr& mesh, const FullyShardOptions& options = {},
    std::source_location where = std::source_location::current());

// While it lives, backward leaves gradients of parameters in units as they are: param.grad() is whole on
// each rank, as a sum that is still to be reduced (Partial along the mesh dimension) where the batch is
// cut, of the parameter's dtype. The next backward that runs without such a scope sends it with its own
// gradients, and at its end what of the mesh's units it has not met; so does finish_grad_sync(), of
// whichever parameters. FusedOptimizer refuses it. A hook of a parameter sees what is held, and what
// comes last, each alone. Scopes may be nested; all ranks have them around the same backwards, and zero
// gradients alike.
//
// Sent in each backward, as without, is the gradient of a parameter that had one before (of a backward
// that has sent, or zeros of zero_grad(false)), of what rests on the CPU (compute_device), with a graph
// (create_graph), and what autograd::grad() asks for. What a copy of a handle
// (param.detach().requires_grad_()) has held is sent by finish_grad_sync({copy}) alone, or with what
// comes to it next.
class FullyShardNoSync {
 public:
  // Throws Error (FailedPrecondition) if nothing on the mesh is fully sharded.
  explicit FullyShardNoSync(const MeshPtr& mesh);
  ~FullyShardNoSync();
  FullyShardNoSync(const FullyShardNoSync&) = delete;
  FullyShardNoSync& operator=(const FullyShardNoSync&) = delete;

 private:
  const std::weak_ptr<void> units_;  // gone with the mesh
};

// Empties what is full, of all units of the mesh. Not while a graph is still to go backward in place:
// it gathers again. Local, but waits for what is on its way.
void reshard(const MeshPtr& mesh);

// Of this rank, since the mesh was made; the same on all ranks, but for the bytes.
struct FullyShardCounters {
  int64_t gathers = 0;
  int64_t prefetches = 0;        // of these, begun before the unit was touched
  int64_t wrong_prefetches = 0;  // then another one was touched
  int64_t reduce_scatters = 0;
  int64_t gathered_bytes = 0;  // that full units, and gradients that travel, take up now
  int64_t peak_gathered_bytes = 0;
  friend bool operator==(const FullyShardCounters&, const FullyShardCounters&) = default;
};
FullyShardCounters fully_shard_counters(const MeshPtr& mesh);

}  // namespace shardweave
