// The NCCL backend: collectives between the memories of NVIDIA GPUs. A rank is a process (or, in
// tests, a thread) with one GPU.
//
//   ConnectDevice connect = connect_nccl({.device = local_rank});
//   auto backend = make_paired_backend(std::move(gloo), connect, {}, deadline);
//   auto comm = Communicator::create(*std::move(backend));
//   comm->all_reduce(x, x, ReduceOp::kSum, {.stream = stream}).wait_on(stream);
//
// NCCL and CUDA are looked for when the program runs (library.h), so one build works with and
// without GPUs. Always paired with a backend of the CPU, the control group: it brings NCCL's ranks
// together, compares what they call, and carries what is memory of the host (paired/paired.h).
//
// Order: an operation begins when the device has done what was on the caller's stream (CallOptions)
// when it was issued, and runs on a stream of the group: collectives on one, and the messages from
// each rank to each other on one of their own, with an NCCL communicator of those two, which is made
// with the first message. So ranks may send before they receive, or receive first, in any order, and
// none waits for a message that it did not ask for. The collectives of a Coalescing are one NCCL group,
// all others one each: all ranks coalesce alike (communicator.h).
//
// Work::wait_on returns when NCCL has taken the operation: of the first message between two ranks, and
// the first collectives of a group, for which NCCL connects, when the others have issued it; of a
// message to this rank itself when both sides are there; or at its deadline. So issue both sides before
// waiting, as for Work::wait.
//
// Operations of NCCL occupy the device while they wait for other ranks. So all ranks issue those of all
// groups in one global order, also of groups that have only one rank in common.
//
// Even counts go by NCCL's own all-gather and reduce-scatter; uneven ones by grouped sends and recvs
// of exactly those elements, or a reduction per rank. Reductions of i16 and u16, which NCCL does not
// have, go through the host (paired.h). Their order, and so the last bits of a float sum, is NCCL's.
//
// Errors, on every rank of the group: no driver, no NCCL, one that is too old (before 2.27.3), no such
// device, two ranks on one device. In flight: NCCL's asynchronous errors and deadlines end in
// ncclCommAbort, after which what is under way on the device ends.
#pragma once

#include "shardweave/comm/nccl/nccl_options.h"
#include "shardweave/comm/paired/paired.h"

namespace shardweave {

// What brings a group's ranks together. Errors are FailedPrecondition (driver, NCCL, versions, two
// ranks on one device), InvalidArgument (no such device), DeadlineExceeded, or what NCCL says; they
// name the rank that met them, and all ranks get them.
ConnectDevice connect_nccl(const NcclOptions& options);

}  // namespace shardweave
