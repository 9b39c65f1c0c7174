// One group over two backends: memory of the CPU goes by one of them, that of a device by the other.
//
//   auto backend = make_paired_backend(std::move(gloo), connect_device, {}, deadline);
//   auto comm = Communicator::create(*std::move(backend));
//   comm->all_reduce(here, here, ReduceOp::kSum);                           // by gloo
//   comm->all_reduce(there, there, ReduceOp::kSum, {.stream = stream});     // by the device's backend
//
// The backend of the CPU is the control group of the other one, too. Ranks of a device meet in the
// middle of the work, where a rank that is missing means waiting without end, and one that has
// called something else wrong numbers. So for each operation of the device the ranks tell each other
// over the control group what they call, in one exchange of some 100 bytes: beside the operation, which
// does not wait for it, or before it. Whoever is missing, gone or has called something else is thus
// named as by any other backend, the device's part is aborted, and nobody waits without end.
//
// A thread of the group, asleep while nothing is under way on the device, looks at what is: at
// deadlines, at what the others have called, at errors of the device. So they reach programs that
// never wait on the host.
//
// What the device's backend does not have (a dtype, an operation) goes through memory of the host
// and the control group: right, but slow. The host waits for the caller's stream when it is issued, and
// in wait(), wait_on() or done() brings the result back on that stream. A stream that does not come to
// that in that time is an error, as any operation is that does not end: the device's backend gets abort(),
// which ends its copies where it can (CUDA's driver cannot: that rank learns it when the stream goes on).
//
// Whoever lets go of the group leaves: what is under way on the device ends, or is given up, and then
// the others hear of it (Backend::leave()).
//
// What is coalesced is told as well (Call::group): ranks that coalesce differently are an error. A wait()
// or wait_on() in the middle of a Coalescing ends the group so far, so it comes on all ranks alike.
//
// Sends and recvs of device memory between two ranks match in the order of their issue; a recv
// whose message tag is not that of the next message is an error on both ranks. (A rank's messages to
// itself match as ever.)
#pragma once

#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "shardweave/comm/backend.h"
#include "shardweave/comm/communicator.h"

namespace shardweave {

struct PairedOptions {
  // Ranks that called different things learn it before the device begins, and the host waits for
  // that in each collective: outputs never hold wrong numbers. Otherwise they learn it beside the
  // operation, soon after.
  bool compare_first = false;
  // How often the thread looks.
  absl::Duration look_every = absl::Milliseconds(10);
};

// Makes the device's backend of a group, on each of its ranks. `bootstrap` has the same ranks, and is
// for this backend alone. An error on one rank has to be one on all.
using ConnectDevice = std::function<absl::StatusOr<std::unique_ptr<Backend>>(
    const GroupInfo& group, const std::shared_ptr<Communicator>& bootstrap, Deadline deadline)>;

// All ranks of `control` call. `connect_device` is called again for each subgroup.
absl::StatusOr<std::unique_ptr<Backend>> make_paired_backend(std::unique_ptr<Backend> control,
                                                             ConnectDevice connect_device,
                                                             const PairedOptions& options,
                                                             Deadline deadline);

}  // namespace shardweave
