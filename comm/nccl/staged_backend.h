// Memory of GPUs by way of the host's: copied there, sent and reduced by a backend of the CPU, copied
// back. For several processes on one GPU, which NCCL does not allow (tests, a laptop), and for machines
// without NCCL. Right, and slow.
//
//   ConnectDevice connect = connect_staged({.device = 0});
//   auto backend = make_paired_backend(std::move(gloo), connect, {}, deadline);
//   auto comm = Communicator::create(*std::move(backend));
//   comm->all_reduce(x, x, ReduceOp::kSum, {.stream = stream}).wait_on(stream);
//
// Needs the driver and CUDA's runtime (library.h). Every call is the backend of the CPU's: its order of
// sums, so that a GPU's results are the CPU's to the bit, its errors, its deadlines. The host waits for
// the stream when an operation is issued, and for the operation in wait() and wait_on().
#pragma once

#include "shardweave/comm/nccl/nccl_options.h"
#include "shardweave/comm/paired/paired.h"

namespace shardweave {

// Errors, on all ranks: FailedPrecondition (no driver, no CUDA runtime, two threads of one process with
// the same device: backward of both would be run by one thread), InvalidArgument (no such device).
ConnectDevice connect_staged(const NcclOptions& options);

}  // namespace shardweave
