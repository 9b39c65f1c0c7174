// A Backend moves the bytes of one communicator, on one rank. It is what a third party writes to
// plug in another network; users meet it only through Communicator, which validates, records and
// counts.
//
//   class Pigeons : public Backend {
//     std::string_view name() const override { return "pigeons"; }
//     bool implements(OpKind op) const override { return is_point_to_point(op); }
//     absl::StatusOr<Ticket> start(const Call& call) override;  // the rest is built from these two
//   };
//   auto comm = Communicator::create(std::make_unique<Pigeons>(...));
//
// No registration, no global state: whoever makes the object hands it to Communicator::create.
//
// Threads: start(), subgroup() and the destructor are called by one thread at a time. done(),
// wait(), wait_on(), health() and abort() may be called by any thread at any time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "shardweave/comm/buffer.h"
#include "shardweave/comm/work.h"
#include "shardweave/placement/reduce_op.h"

namespace shardweave {

enum class OpKind : uint8_t {
  kAllReduce,
  kAllGather,
  kAllGatherV,
  kReduceScatter,
  kReduceScatterV,
  kAllToAll,
  kAllToAllV,
  kBroadcast,
  kReduce,
  kGather,
  kScatter,
  kBarrier,
  kSend,
  kRecv,
};
inline constexpr int kNumOpKinds = 14;

// "all_reduce", ..., as the functions of Communicator are called.
std::string_view to_string(OpKind op);

// One rank's part in one operation. Validated: counts are not negative and fit each other and the
// group, pointers are not null where there is something to move, the reduction is defined for the
// dtype, root or peer is a rank of the group. in.dtype == out.dtype always. A side that this rank
// does not have (out of a gather elsewhere than on the root, in of a recv) has count 0; broadcast
// has the same buffer as in and out. Views (counts, tag) and the Call itself are valid only during
// start(); the memory of in and out until the operation is done.
struct Call {
  OpKind op = OpKind::kBarrier;
  ConstBuffer in;
  Buffer out;
  ReduceOp reduce_op = ReduceOp::kSum;
  int peer = 0;         // the root of a rooted collective, the other side of send and recv
  int message_tag = 0;  // of send and recv: they match by peer and message_tag, in order
  absl::Span<const int64_t> in_counts;  // all_to_all_v, reduce_scatter_v: elements per rank in `in`
  absl::Span<const int64_t> out_counts;  // all_to_all_v, all_gather_v: elements per rank in `out`
  uint64_t sequence =
      0;  // counts this group's collectives, from 1; its sends and recvs, apart, from 1
  Deadline deadline = Deadline::max();
  std::string_view tag;      // the caller's word for it, for messages
  uint64_t fingerprint = 0;  // of a collective: what the caller means it for (CallOptions)
  DeviceStream stream;       // of memory on a device: it is ready when this has come so far
  uint64_t group = 0;  // of a collective on a device: those of one number are coalesced as one;
                       // the same on all ranks; 0: alone

  // Where the memory is.
  Device device() const { return in.count > 0 || in.data != nullptr ? in.device : out.device; }
};

inline bool is_point_to_point(OpKind op) {
  return op == OpKind::kSend || op == OpKind::kRecv;
}
inline bool is_reduction(OpKind op) {
  return op == OpKind::kAllReduce || op == OpKind::kReduce || op == OpKind::kReduceScatter ||
         op == OpKind::kReduceScatterV;
}

// What all ranks must agree on in one collective, as fixed bytes that can be sent as they are. A
// backend compares the signatures of all ranks before it moves data, so that a mismatch is an error
// everywhere and never a hang or a wrong number.
struct CallSignature {
  int64_t count = 0;  // per rank: of the smaller buffer (all_gather: in; reduce_scatter: out)
  uint64_t counts_hash = 0;  // of all_gather_v's and reduce_scatter_v's counts
  uint64_t sequence = 0;
  uint64_t fingerprint = 0;  // the caller's; 0 is the same as any
  int32_t root = -1;         // -1: not rooted
  OpKind op = OpKind::kBarrier;
  DType dtype = DType::kU8;
  ReduceOp reduce_op = ReduceOp::kSum;
  uint8_t reserved = 0;
  char tag[32] = {};  // cut off at 31 bytes; shown, not compared
};
CallSignature signature_of(const Call& call);
bool is_same_call(const CallSignature& a, const CallSignature& b);  // but for the tag
// Of fingerprints; 0 says nothing.
inline bool may_be_the_same(uint64_t a, uint64_t b) {
  return a == b || a == 0 || b == 0;
}
// What two calls differ in that look alike as text; "" where the text says it.
std::string hidden_difference(const CallSignature& a, const CallSignature& b);

// "all_reduce(f32[7], sum) 'loss'".
std::string to_string(const CallSignature& signature);
std::string to_string(const Call& call);

// OK if all of `by_rank` (in group order) ask for the same; else FailedPrecondition, which names
// the group, the sequence number, two ranks that differ and what each called.
absl::Status check_same_call(std::string_view group, absl::Span<const CallSignature> by_rank);

// Who is in a communicator.
struct GroupInfo {
  std::string name;                  // for messages
  int rank = 0;                      // this rank's number in the group
  std::vector<int64_t> world_ranks;  // group rank -> rank in the world
  bool has_threads = false;          // some of these ranks are threads of one process; same on all
  int size() const { return static_cast<int>(world_ranks.size()); }
};
// "all_reduce #12 'loss' of group 'dp' (rank 1 of 4)": how messages name a call.
std::string name_call(const GroupInfo& group, const Call& call);

class Backend {
 public:
  // Names an operation that was started and is not done. A backend chooses them; kDone is taken.
  using Ticket = uint64_t;
  static constexpr Ticket kDone = 0;

  explicit Backend(GroupInfo group) : group_(std::move(group)) {}
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;
  virtual ~Backend() = default;

  const GroupInfo& group() const { return group_; }
  virtual std::string_view name() const = 0;
  // Which memory it can read and write.
  virtual bool supports(DeviceType device) const { return device == DeviceType::kCpu; }
  // OK, or why it cannot reach this device, one of a type that it supports: it may be bound to one.
  virtual absl::Status check_device(Device) const { return absl::OkStatus(); }
  // Whether it compares what the ranks call before data moves. One that cannot (on devices ranks
  // meet only in the middle of the work) is paired with one that can: paired/paired.h.
  virtual bool compares_calls() const { return true; }
  // Whoever waits longer in wait() should say on stderr for whom (patience.h). Set before the first
  // call, by the Communicator.
  absl::Duration patience() const { return patience_; }
  void set_patience(absl::Duration patience) { patience_ = patience; }

  // start() is called only with these. Send and recv are enough: the collectives that are missing
  // are built from them (composed.h), and then have run to their end when they are issued. Without
  // send and recv, what is missing answers Unimplemented.
  virtual bool implements(OpKind op) const = 0;
  // Of a reduction that is defined: whether this backend has it.
  virtual bool can_reduce(DType, ReduceOp) const { return true; }
  // False if outputs are left as they were (a backend that only counts); split() is then not
  // possible.
  virtual bool moves_data() const { return true; }

  // Starts an operation. A backend that blocks until it is done returns kDone. Send and recv must
  // not wait for the other side here, only in wait(). After an error of start() or wait() nothing
  // more is started.
  virtual absl::StatusOr<Ticket> start(const Call& call) = 0;
  // Never blocks; true also if the operation has failed.
  virtual bool done(Ticket ticket);
  // Until done or the deadline. After it has returned, also with an error, the operation's memory
  // is not touched any more. Errors: DeadlineExceeded (names the missing ranks), FailedPrecondition
  // (ranks called different things), Aborted and Unavailable (a rank gave up, is gone; names it).
  virtual absl::Status wait(Ticket ticket, Deadline deadline);
  // Of memory on a device: what is put on `stream` afterwards runs when the operation is done. Does
  // not wait for the device; may wait, until the operation's deadline, for other ranks to issue their
  // part, where the device cannot take it before. Errors: that deadline, and those that are known by
  // now.
  virtual absl::Status wait_on(Ticket ticket, DeviceStream stream);

  // Of backends that reach a device: copies between its memory and the host's in the order of
  // `stream`, and waits for that. Nothing else here reads or writes a device's memory by the host.
  virtual absl::Status copy_to_host(void* host, const ConstBuffer& device, DeviceStream stream);
  virtual absl::Status copy_to_device(const Buffer& device, const void* host, DeviceStream stream);

  // Around calls of start() that the caller coalesced: a backend may hold them back and run them as
  // one. Send and recv may appear in any order between the two. A wait() or wait_on() for one that is
  // held back comes too: it runs what is held back so far. done() does not: who asks, and when, is not
  // the same on all ranks.
  virtual void begin_coalescing() {}
  virtual absl::Status end_coalescing() { return absl::OkStatus(); }

  // OK, or what broke the group, as far as this rank can know now. Does not wait. Any thread.
  virtual absl::Status health() { return absl::OkStatus(); }

  // The backend of a group of some of these ranks; only they call, each with the same `key`, which
  // no other subgroup of this backend ever gets. `members` are ranks of this group, in the new
  // order; `group` is the new one as this rank sees it. May return before the other members have
  // called.
  virtual absl::StatusOr<std::unique_ptr<Backend>> subgroup(GroupInfo group,
                                                            absl::Span<const int> members,
                                                            std::string_view key,
                                                            Deadline deadline);

  // Before the end of a device's backend, by which its memory may be all that a program waits for: what
  // is under way on the device ends, for a few seconds at most; what does not is given up, which is
  // the error. Nothing is started any more.
  virtual absl::Status leave() { return absl::OkStatus(); }

  // Makes pending and later operations fail, here and, where it can, on all ranks of this group.
  // Called with what went wrong; once, and also after an error that this backend itself has
  // returned.
  virtual void abort(const absl::Status& reason) = 0;

 private:
  const GroupInfo group_;
  absl::Duration patience_ = absl::Seconds(10);
};

}  // namespace shardweave
