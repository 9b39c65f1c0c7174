// Data parallelism (DDP): every rank along a mesh dimension has all parameters and a part of the
// batch, and gradients are summed while backward goes on.
//
//   auto mesh = *init_device_mesh(world, {{"dp", 4}});
//   GradSync ddp = distributed_data_parallel(*model, mesh);         // as long as the model trains
//   torch::optim::AdamW optimizer(unique_parameters(*model));       // tied weights once
//   auto x = distribute_tensor(batch, mesh, {{"dp", Shard(0)}});    // or from_local(), or Join
//   model->forward(x).square().mean().backward();
//   finish_grad_sync(*model);
//   optimizer.step();
//   optimizer.zero_grad();
//
// The model is the same object as before, its parameters and buffers are DTensors. What comes back is
// the GradSync (grad_sync.h): GradSync::NoSync to accumulate, discard(), what leaves when; gradients
// in fewer bits (reduce_dtype) or through a hook of one's own (gradient_hook.h, power_sgd.h).
//
// What differs from PyTorch's DDP: a loss is that of all ranks' input, so that gradients are what one
// device would have on all of it, and nothing is divided by the number of ranks. A batch norm sees all
// ranks' input, and its statistics are the same on every rank: what others call SyncBatchNorm, with
// nothing to broadcast. A parameter that is not used needs no option; every rank runs the same graph.
// Ranks that run out of input: join.h.
//
// Over tensor parallelism: parallelize_module() first, on the same mesh; what it has cut stays so.
//
// Every rank has the whole model here, and needs memory for it. One that is too large for that is
// constructed under deferred_init() (deferred_init.h), cut by fully_shard() or a plan, and only then
// made.
#pragma once

#include <source_location>
#include <string>

#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/grad_sync.h"

namespace torch::nn {
class Module;
}

namespace shardweave {

struct DataParallelOptions {
  // The mesh dimension along which no parameter may be cut; "": the mesh's first. Others may be
  // tensor parallel, or data parallel as well.
  std::string mesh_dim = {};
  // Of parameters and buffers that are plain: whose values count.
  DistributeOptions distribute = {};
  GradSyncOptions sync = {};
};

// pre_dp_module_transform(), and a GradSync of the module's parameters. Collective over the mesh;
// compares the ranks' modules and options. Throws Error before anything is changed, on all ranks: what
// pre_dp_module_transform() does, and what GradSync's constructor does.
[[nodiscard]] GradSync distributed_data_parallel(
    torch::nn::Module& module, const MeshPtr& mesh, const DataParallelOptions& options = {},
    std::source_location where = std::source_location::current());

// The half of it that comes before a GradSync of one's own, under the name that
// torch.distributed.tensor.parallel has for it: what tensor parallelism has left plain becomes
// replicated over the mesh, in place, so that all parameters and buffers are DTensors of one mesh, none
// of them cut along `options.mesh_dim`. (There it takes DTensors apart, for a DDP that knows only plain
// tensors; here DTensors are what it works on, and `options.sync` is not used.)
//
// Collective over the mesh. Throws Error before anything is changed, on all ranks: NotFound for a
// dimension that the mesh does not have; InvalidArgument for a parameter on another mesh (a slice of
// this one, too: parallelize_module() takes the whole mesh, and plans name the dimension) or cut along
// the dimension, for modules or options that differ between ranks, for what another rank refuses and
// what distribute_module() does; FailedPrecondition for a module without parameters, and for a
// parameter that has another owner: it is fully sharded, in a ZeroPartition or a GradSync.
void pre_dp_module_transform(torch::nn::Module& module, const MeshPtr& mesh,
                             const DataParallelOptions& options = {},
                             std::source_location where = std::source_location::current());

// Every rank gets the buffers of the first one along `mesh_dim` ("": the mesh's first), in place, in
// one broadcast for each dtype. Buffers of DTensors are the same on all ranks by themselves; this is
// for what a program writes of its own on each rank (to_local(buffer)), and for buffers that are plain.
// At the start of a step, like PyTorch's broadcast_buffers. Along other mesh dimensions buffers stay as
// they are, as do those that are cut along this one. Collective over the mesh. Throws Error
// (NotFound) for a dimension that the mesh does not have; (InvalidArgument), on all ranks, if buffers
// have other names, shapes or dtypes on other ranks, or lie on another mesh.
void broadcast_buffers(torch::nn::Module& module, const MeshPtr& mesh,
                       const std::string& mesh_dim = {},
                       std::source_location where = std::source_location::current());

// What enable_2d_with_fsdp() means in torch.distributed.tensor.parallel: tensor parallelism inside,
// fully_shard() outside, on one mesh. There is nothing to enable here; this says early, and on all
// ranks, whether fully_shard(module, mesh, {.mesh_dim = mesh_dim}) finds what it needs. Between
// parallelize_module() and fully_shard(). Collective over the mesh.
//
// Throws Error: NotFound for a dimension that the mesh does not have; InvalidArgument for a parameter on
// another mesh or cut along `mesh_dim`, and for what another rank refuses; FailedPrecondition if the
// mesh has one dimension, if no parameter is cut along another one (parallelize_module() comes first),
// or if one is fully sharded already.
void enable_2d_with_fsdp(const torch::nn::Module& module, const MeshPtr& mesh,
                         const std::string& mesh_dim = {},
                         std::source_location where = std::source_location::current());

}  // namespace shardweave
