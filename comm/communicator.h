// A Communicator moves bytes between the ranks of one group.
//
//   float x = comm.rank();
//   Work work = comm.all_reduce(Buffer::of(&x, 1), Buffer::of(&x, 1), ReduceOp::kSum);
//   if (absl::Status s = work.wait(); !s.ok()) return s;
//   comm.send(Buffer::of(&x, 1), /*peer=*/1).wait();
//
// Order: all ranks of a group issue the same collectives, with the same sizes, dtypes, reductions
// and roots, in the same order. Which collective is waited for first does not matter, nor do sends
// and recvs in between. If two ranks differ, every rank gets FailedPrecondition that names both
// calls. They coalesce alike, too: the same collectives in one Coalescing, and a wait in its middle
// after the same ones; of memory on a device a difference is an error as well. Groups are
// independent of each other on the CPU. On a device they are not: NCCL's operations occupy it while
// they wait for other ranks, so that all ranks issue those of all groups in one order; and a backend
// may run a collective to its end when it is issued (those in this repository do not), with the same
// consequence.
//
// Threads: a Communicator is one rank's; it is used by one thread at a time. A Work may be waited
// for by any thread; abort(), the flight recorder and what is const may be used by any thread at
// any time. The destructor tells the others that this rank has left.
//
// Memory: buffers belong to the caller and must stay alive until the Work is done (work.h), or be
// owned by CallOptions::keep_alive. Counts arrays and tags are copied. They lie where the backend can
// reach them: on the CPU, or on this rank's device (paired/paired.h has a backend for each).
//
// Errors: an argument that is wrong on this rank alone is InvalidArgument (Unimplemented: not by
// this backend), at once, and nothing has happened; the communicator stays usable, but the other
// ranks still wait for this one. Every other error breaks the communicator: this operation, those
// pending and all later ones on this rank fail with the first error. DeadlineExceeded: some ranks
// did not arrive in time, the message names them. Aborted, Unavailable: a rank gave up or is gone.
// After such an error the contents of outputs are undefined.
// Long before the deadline, after CommunicatorOptions::patience, a rank that waits says on stderr for
// whom, in which call.
//
// Numbers: on the CPU reductions go in rank order, whatever the timing, so that the same call gives
// the same bits on every run and on every backend of this repository; on a device the order is
// NCCL's. f16 and bf16 are accumulated in f32 and rounded once. Integers wrap around; their average
// is the (wrapped) sum divided by the size, truncated towards zero. kMin and kMax propagate NaN, as
// LibTorch does (NCCL's need not). bool: kSum and kMax are or, kProduct and kMin are and, kAvg is
// InvalidArgument, as is every reduction of fp8. (Of backends in this repository; a third party's
// may round differently.)
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "shardweave/comm/backend.h"
#include "shardweave/comm/buffer.h"
#include "shardweave/comm/flight_recorder.h"
#include "shardweave/comm/work.h"
#include "shardweave/placement/reduce_op.h"

namespace shardweave {

struct CallOptions {
  absl::Duration timeout = absl::ZeroDuration();  // zero: the communicator's default
  std::string_view tag;                           // shown in errors, the flight record and traces
  // Of a collective: what it is about, as the caller knows it (which tensor, which step). Ranks that
  // give different ones have gone apart, and get an error instead of each other's numbers. 0 says
  // nothing, and goes with any.
  uint64_t fingerprint = 0;
  // The caller issues nothing else here until this is done. Then a send of this rank to itself needs
  // a recv that has been issued before, and a recv a send: InvalidArgument where it would never end.
  bool blocking = false;
  // Of memory on a device: the operation begins when the device has done what is on this stream by
  // now. What comes after the operation waits for it (Work::wait_on, Work::wait). It lives until the
  // operation is done: what goes by way of the host comes back on it.
  DeviceStream stream;
  // Kept until the operation is done, as the memory must be that it owns: for callers who drop
  // theirs before. Let go of by whoever next calls this communicator, or by its destructor.
  std::shared_ptr<const void> keep_alive;
};

struct CommunicatorOptions {
  // Default deadline of an operation, counted from its issue.
  absl::Duration timeout = absl::Minutes(5);
  // Whoever waits longer for an operation says once, on stderr, for which ranks that have not come.
  absl::Duration patience = absl::Seconds(10);
  // Operations that the flight record keeps.
  int flight_record_capacity = 256;
};

class Coalescing;

class Communicator : public std::enable_shared_from_this<Communicator>, private PendingWork {
 public:
  static std::shared_ptr<Communicator> create(std::unique_ptr<Backend> backend,
                                              const CommunicatorOptions& options = {});
  ~Communicator() override;

  int rank() const { return backend_->group().rank; }
  int size() const { return backend_->group().size(); }
  // Of the group, for messages.
  const std::string& name() const { return backend_->group().name; }
  // Group rank -> rank in the world.
  const std::vector<int64_t>& world_ranks() const { return backend_->group().world_ranks; }
  std::string_view backend_name() const { return backend_->name(); }
  // Whether some of these ranks are threads of one process; the same on all ranks.
  bool has_threads() const { return backend_->group().has_threads; }

  // "In place" says which overlap of in and out is allowed; any other is InvalidArgument.

  // out[i] = reduction of all ranks' in[i]. in.count == out.count. In place: in.data == out.data.
  Work all_reduce(ConstBuffer in, Buffer out, ReduceOp op, const CallOptions& options = {});

  // out = all ranks' in, in rank order. out.count == size * in.count. In place: in is this rank's
  // part of out.
  Work all_gather(ConstBuffer in, Buffer out, const CallOptions& options = {});
  // The same with counts[r] elements from rank r; counts are the same on all ranks.
  Work all_gather_v(ConstBuffer in, Buffer out, absl::Span<const int64_t> counts,
                    const CallOptions& options = {});

  // out = this rank's part of the reduction of all ranks' in. in.count == size * out.count. In
  // place: out is this rank's part of in.
  Work reduce_scatter(ConstBuffer in, Buffer out, ReduceOp op, const CallOptions& options = {});
  // The same with a part of counts[r] elements for rank r; counts are the same on all ranks.
  Work reduce_scatter_v(ConstBuffer in, Buffer out, absl::Span<const int64_t> counts, ReduceOp op,
                        const CallOptions& options = {});

  // Part r of in goes to rank r; part r of out came from rank r. in.count == out.count, a multiple
  // of size. Not in place.
  Work all_to_all(ConstBuffer in, Buffer out, const CallOptions& options = {});
  // The same with parts of send_counts[r] and recv_counts[r] elements. send_counts[r] here is
  // recv_counts[this rank] on rank r.
  Work all_to_all_v(ConstBuffer in, absl::Span<const int64_t> send_counts, Buffer out,
                    absl::Span<const int64_t> recv_counts, const CallOptions& options = {});

  // Every rank's data becomes the root's.
  Work broadcast(Buffer data, int root, const CallOptions& options = {});
  // As all_reduce, but only the root has an out; it is ignored elsewhere. In place: in.data ==
  // out.data.
  Work reduce(ConstBuffer in, Buffer out, ReduceOp op, int root, const CallOptions& options = {});
  // As all_gather, but only the root has an out; it is ignored elsewhere.
  Work gather(ConstBuffer in, Buffer out, int root, const CallOptions& options = {});
  // Part r of the root's in goes to rank r. The root's in.count == size * out.count; it is ignored
  // elsewhere. In place: the root's out is its part of in.
  Work scatter(ConstBuffer in, Buffer out, int root, const CallOptions& options = {});

  // A send matches the recv of its peer with the same message_tag, first come first served; both
  // give the same count and dtype. Neither blocks when it is issued. peer may be this rank, which
  // then issues both before it waits for the first.
  Work send(ConstBuffer data, int peer, int message_tag = 0, const CallOptions& options = {});
  Work recv(Buffer data, int peer, int message_tag = 0, const CallOptions& options = {});

  // Done when all ranks have called it.
  Work barrier(const CallOptions& options = {});

  // A new group per color, of the ranks that gave it, ordered by key, then by rank here; color < 0:
  // this rank gets nullptr. Collective over this group, waits for all.
  absl::StatusOr<std::shared_ptr<Communicator>> split(int color, int key, std::string name);

  // The group of `members`: ranks of this communicator, in the order that they get in the new one.
  // Only they call, all with the same arguments, and in the same order if several subgroups have
  // the same arguments.
  absl::StatusOr<std::shared_ptr<Communicator>> subgroup(absl::Span<const int64_t> members,
                                                         std::string name);

  // Breaks this communicator, and those made from it, on all ranks where the backend can: pending
  // and later operations fail with Aborted and a message that names this rank and `reason`.
  void abort(const absl::Status& reason);
  // OK, or the error that broke this communicator, as far as this rank knows. Any thread.
  absl::Status health() const;

  // Whether a Coalescing collects this communicator's operations.
  bool is_coalescing() const { return coalescing_ != nullptr; }
  // Of an operation whose arguments a layer above has refused: counts as one that was refused here.
  void refuse(const absl::Status& error);

  // Operations issued on this communicator so far. Of all groups of this rank: flight_recorder().
  CommCounters counters() const { return log_.counters(); }
  // Shared with the communicators that this one was made from and that are made from it.
  FlightRecorder& flight_recorder() const { return *recorder_; }

 private:
  friend class Coalescing;

  Communicator(std::unique_ptr<Backend> backend, std::shared_ptr<FlightRecorder> recorder,
               const CommunicatorOptions& options);

  bool done(const Token& token) override;
  absl::Status wait(const Token& token) override;
  absl::Status wait_on(const Token& token, DeviceStream stream) override;

  // A send or recv with this rank itself, which pairs with one before or after it.
  absl::Status pair_with_itself(const Call& call, bool blocking);
  // Every operation ends here. `valid`: what is wrong with its arguments.
  Work issue(Call& call, absl::Status valid, const CallOptions& options);
  absl::StatusOr<Backend::Ticket> compose(const Call& call);
  // Gives `work` to the Coalescing, if there is one, too.
  Work collect(Work work);
  // Breaks the communicator, unless it is broken; returns the first error.
  absl::Status fail(const absl::Status& error);

  const std::unique_ptr<Backend> backend_;
  const std::shared_ptr<FlightRecorder> recorder_;
  const CommunicatorOptions options_;
  FlightLog log_;
  uint64_t collectives_ = 0;                     // issued
  uint64_t point_to_points_ = 0;                 // issued
  absl::flat_hash_map<int, int64_t> to_itself_;  // by message tag: sends less recvs, if not 0
  Coalescing* coalescing_ = nullptr;
  struct Kept {
    Backend::Ticket ticket;
    std::shared_ptr<const void> owner;
  };
  std::vector<Kept> kept_;  // of operations that were not done when last looked at
  absl::flat_hash_map<std::string, int> subgroups_made_;  // by members and name

  std::atomic<bool> broken_{false};
  mutable std::mutex mutex_;
  absl::Status first_error_;                           // guarded by mutex_, as are
  std::vector<std::weak_ptr<Communicator>> children_;  // those made from this one
};

// While it lives, the operations of `comm` are collected; finish() returns one Work for all of
// them. A backend may run them as one, so all ranks collect the same collectives; sends and recvs may
// be given in any order.
//
//   Coalescing group(comm);
//   for (const Buffer& b : buckets) comm.all_reduce(b, b, ReduceOp::kSum);
//   Work work = group.finish();
//
// The Work that a collected operation itself returns is its own: split(), and whoever else needs
// the result at once, may wait for it (on all ranks alike; done() may stay false until then).
// finish() also fails with what was refused meanwhile (InvalidArgument). The destructor of one that
// is not finished finishes and waits, so that an early return leaves no operation behind that writes
// to buffers that are gone.
class Coalescing {
 public:
  explicit Coalescing(Communicator& comm);
  ~Coalescing();
  Coalescing(const Coalescing&) = delete;
  Coalescing& operator=(const Coalescing&) = delete;

  Work finish();

 private:
  friend class Communicator;

  Communicator* comm_;  // null once finished
  absl::Status first_error_;
  std::vector<Work> works_;
};

}  // namespace shardweave
