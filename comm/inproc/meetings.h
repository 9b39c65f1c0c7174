// Meetings is where the ranks of a group meet for their collectives: a ring of slots, one per
// collective.
//
//   absl::StatusOr<bool> done = meetings.arrive(rank, call, patience);  // puts it down; never waits
//   if (done.ok() && !*done) status = meetings.wait(rank, call.sequence, deadline, patience);
//
// The last rank to arrive compares the calls, and moves the data itself if it is little. If it is
// much, the data is cut into chunks, which any rank that waits takes: so no rank depends on the
// others once they have arrived, whatever they wait for first, and those that wait share the work.
//
// At most kSlots collectives of a group are pending: the next one waits for the oldest when it is
// issued.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "shardweave/comm/backend.h"
#include "shardweave/comm/inproc/group.h"
#include "shardweave/comm/inproc/movement.h"
#include "shardweave/comm/patience.h"

namespace shardweave::inproc {

class Meetings {
 public:
  static constexpr uint64_t kSlots = 64;

  explicit Meetings(Group& group);

  // Returns whether the collective is done already.
  absl::StatusOr<bool> arrive(int rank, const Call& call, Patience patience);
  // Takes a part in the work, if there is any. Never blocks.
  bool done(int rank, uint64_t sequence);
  absl::Status wait(int rank, uint64_t sequence, Deadline deadline, Patience patience);

  // The rank goes, after having issued collectives up to `last`: finishes those that all have
  // arrived at, and breaks the group if there are others.
  void leave(int rank, uint64_t last);

 private:
  struct alignas(64) Place {           // of one rank in a slot
    std::atomic<uint64_t> arrived{0};  // sequence number of its last call here
    std::atomic<uint64_t> said{0};     // of the last call that it has said to be late
    KeptCall call;
  };
  // Sequence numbers stay in the slot, so that they need no reset that could be missed.
  struct Slot {
    alignas(64) std::atomic<int> arrivals{0};
    alignas(64) std::atomic<uint64_t> done{0};  // of the last collective that is done
    std::atomic<uint64_t> chunks{0};            // sequence << kChunkBits | next chunk to take
    std::atomic<uint64_t> num_chunks{0};
    alignas(64) std::atomic<uint64_t> finished_chunks{0};
    int64_t chunk_length = 0;  // in elements
    Movement movement;
    std::vector<Place> places;
    std::vector<const KeptCall*> calls;  // those of places
  };
  static constexpr int kChunkBits = 24;
  static constexpr uint64_t kChunkMask = (uint64_t{1} << kChunkBits) - 1;

  Slot& slot(uint64_t sequence) { return slots_[sequence % kSlots]; }
  static bool has_chunks(const Slot& slot, uint64_t sequence);
  static bool take_chunk(Slot& slot, uint64_t sequence, uint64_t* index);
  static bool all_arrived(const Slot& slot, uint64_t sequence);
  bool waits_for_the_gone(const Slot& slot, uint64_t sequence) const;
  void work(int rank, Slot& slot, uint64_t sequence);
  void finish(Slot& slot, uint64_t sequence);
  // "all_reduce(f32[7], sum), collective #3 of group 'dp': rank 1 waited for rank 2 (world rank
  // 5)".
  std::string waits_for(int rank, uint64_t sequence, const std::vector<int>& ranks) const;
  // The ranks that have not arrived, or of these only those that have left.
  std::vector<int> absent(uint64_t sequence, bool have_left) const;
  Wait wait_of(int rank, uint64_t sequence) const;
  // Once for each collective of a rank.
  void say_late(int rank, uint64_t sequence, absl::Duration patience);

  Group& group_;
  std::vector<Slot> slots_;
};

}  // namespace shardweave::inproc
