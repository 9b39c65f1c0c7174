#include "shardweave/comm/inproc/meetings.h"

#include <algorithm>

#include "absl/strings/str_join.h"
#include "shardweave/comm/failed_rank.h"
#include "shardweave/comm/str_cat.h"

namespace shardweave::inproc {
namespace {

// Up to here, one rank moves all data: waking the others would cost more than their help is worth.
constexpr int64_t kSmallBytes = 32 << 10;
// A chunk is a few microseconds of work.
constexpr int64_t kChunkBytes = 32 << 10;

}  // namespace

Meetings::Meetings(Group& group) : group_(group), slots_(kSlots) {
  for (Slot& slot : slots_) {
    slot.places = std::vector<Place>(group.size());
    for (const Place& place : slot.places) slot.calls.push_back(&place.call);
  }
}

absl::StatusOr<bool> Meetings::arrive(int rank, const Call& call, Patience patience) {
  if (group_.broken()) return group_.failure();
  const uint64_t sequence = call.sequence;
  Slot& slot = this->slot(sequence);
  if (sequence > kSlots && slot.done.load() < sequence - kSlots) {
    absl::Status status = wait(rank, sequence - kSlots, call.deadline, patience);
    if (!status.ok()) return status;
  }
  Place& place = slot.places[rank];
  place.call.keep(call);
  place.arrived.store(sequence);
  if (slot.arrivals.fetch_add(1) + 1 < group_.size()) return false;

  // The last one: the slot is this thread's until it hands out chunks or says done.
  slot.arrivals.store(0, std::memory_order_relaxed);
  if (absl::Status status = check_calls(group_.name(), slot.calls); !status.ok()) {
    group_.fail(status);
    return group_.failure();
  }
  slot.movement.reset(slot.calls);
  const int64_t length = slot.movement.length();
  const int64_t element = slot.movement.element_size();
  if (length * element * group_.size() <= kSmallBytes) {
    {
      Group::Touch touch(group_, rank);
      if (group_.broken()) return group_.failure();
      slot.movement.run(0, length);
    }
    finish(slot, sequence);
    return true;
  }
  // No more chunks than there are numbers for them.
  slot.chunk_length = std::max(kChunkBytes / element, (length >> kChunkBits) + 1);
  slot.chunks.store(0);  // before num_chunks changes: see take_chunk()
  slot.num_chunks.store((length + slot.chunk_length - 1) / slot.chunk_length);
  slot.finished_chunks.store(0);
  slot.chunks.store(sequence << kChunkBits);
  group_.notify_all();
  return false;
}

bool Meetings::has_chunks(const Slot& slot, uint64_t sequence) {
  const uint64_t chunks = slot.chunks.load();
  return chunks >> kChunkBits == sequence && (chunks & kChunkMask) < slot.num_chunks.load();
}

// Only a chunk of this collective: if the slot has moved on, the word that it looked at has
// changed.
bool Meetings::take_chunk(Slot& slot, uint64_t sequence, uint64_t* index) {
  uint64_t chunks = slot.chunks.load();
  while (chunks >> kChunkBits == sequence && (chunks & kChunkMask) < slot.num_chunks.load()) {
    if (slot.chunks.compare_exchange_weak(chunks, chunks + 1)) {
      *index = chunks & kChunkMask;
      return true;
    }
  }
  return false;
}

void Meetings::work(int rank, Slot& slot, uint64_t sequence) {
  Group::Touch touch(group_, rank);
  uint64_t index;
  while (!group_.broken() && take_chunk(slot, sequence, &index)) {
    const uint64_t num_chunks = slot.num_chunks.load();
    const int64_t begin = static_cast<int64_t>(index) * slot.chunk_length;
    slot.movement.run(begin, std::min(begin + slot.chunk_length, slot.movement.length()));
    // If this chunk is not the last, the slot may be another collective's from here on.
    if (slot.finished_chunks.fetch_add(1) + 1 == num_chunks) finish(slot, sequence);
  }
}

void Meetings::finish(Slot& slot, uint64_t sequence) {
  slot.done.store(sequence);
  group_.notify_all();
}

bool Meetings::done(int rank, uint64_t sequence) {
  Slot& slot = this->slot(sequence);
  if (slot.done.load() < sequence && has_chunks(slot, sequence)) work(rank, slot, sequence);
  return slot.done.load() >= sequence || group_.broken();
}

absl::Status Meetings::wait(int rank, uint64_t sequence, Deadline deadline, Patience patience) {
  Slot& slot = this->slot(sequence);
  while (slot.done.load() < sequence) {
    if (group_.broken()) {
      group_.quiesce();
      return slot.done.load() >= sequence ? absl::OkStatus() : group_.failure();
    }
    const int departures = group_.departures();
    if (waits_for_the_gone(slot, sequence)) {
      const std::vector<int> gone = absent(sequence, true);
      group_.fail(
          of_rank(absl::UnavailableError(str_cat(waits_for(rank, sequence, gone), ", which ",
                                                 gone.size() == 1 ? "has" : "have", " left")),
                  group_.world_ranks()[gone.front()]));
      continue;
    }
    if (has_chunks(slot, sequence)) {
      work(rank, slot, sequence);
      continue;
    }
    const bool ready = group_.wait(
        rank, [&] { return patience.until(deadline); },
        [&] {
          return slot.done.load() >= sequence || group_.broken() || has_chunks(slot, sequence) ||
                 group_.departures() != departures;
        });
    if (ready) continue;
    if (patience.has_ended(deadline)) {
      say_late(rank, sequence, patience.time());
    } else if (const std::vector<int> late = absent(sequence, false); late.empty()) {
      deadline = Deadline::max();  // what is left is work of threads that are awake
    } else {
      group_.fail(of_rank(absl::DeadlineExceededError(
                              str_cat(waits_for(rank, sequence, late), " until the deadline; ",
                                      wanted_of_others(wait_of(rank, sequence)))),
                          group_.world_ranks()[late.front()]));
    }
  }
  return absl::OkStatus();
}

void Meetings::leave(int rank, uint64_t last) {
  const uint64_t first = last > kSlots ? last - kSlots + 1 : 1;
  for (uint64_t sequence = first; sequence <= last; ++sequence) {
    Slot& slot = this->slot(sequence);
    if (slot.done.load() >= sequence || group_.broken()) continue;
    if (!all_arrived(slot, sequence)) {
      const int64_t world_rank = group_.world_ranks()[rank];
      group_.fail(of_rank(absl::UnavailableError(
                              str_cat("rank ", rank, " (world rank ", world_rank, ") left with ",
                                      to_string(slot.places[rank].call.signature), ", collective #",
                                      sequence, " of group '", group_.name(), "', still pending")),
                          world_rank));
    }
    wait(rank, sequence, Deadline::max(), Patience::endless()).IgnoreError();
  }
}

bool Meetings::all_arrived(const Slot& slot, uint64_t sequence) {
  return std::all_of(slot.places.begin(), slot.places.end(),
                     [&](const Place& place) { return place.arrived.load() >= sequence; });
}

bool Meetings::waits_for_the_gone(const Slot& slot, uint64_t sequence) const {
  if (group_.departures() == 0) return false;
  for (int r = 0; r < group_.size(); ++r) {
    // In this order: a rank arrives before it leaves.
    if (group_.has_left(r) && slot.places[r].arrived.load() < sequence) return true;
  }
  return false;
}

std::vector<int> Meetings::absent(uint64_t sequence, bool have_left) const {
  const Slot& slot = slots_[sequence % kSlots];
  std::vector<int> ranks;
  for (int r = 0; r < group_.size(); ++r) {
    if ((!have_left || group_.has_left(r)) && slot.places[r].arrived.load() < sequence) {
      ranks.push_back(r);
    }
  }
  return ranks;
}

Wait Meetings::wait_of(int rank, uint64_t sequence) const {
  return {.group = group_.name(),
          .world_ranks = group_.world_ranks(),
          .rank = rank,
          .call = slots_[sequence % kSlots].places[rank].call.signature};
}

void Meetings::say_late(int rank, uint64_t sequence, absl::Duration patience) {
  const std::vector<int> ranks = absent(sequence, /*have_left=*/false);
  if (ranks.empty() || slot(sequence).places[rank].said.exchange(sequence) == sequence) return;
  shardweave::say_late(wait_of(rank, sequence), patience, ranks);
}

std::string Meetings::waits_for(int rank, uint64_t sequence, const std::vector<int>& ranks) const {
  const Slot& slot = slots_[sequence % kSlots];
  std::vector<int64_t> world_ranks;
  for (int r : ranks) world_ranks.push_back(group_.world_ranks()[r]);
  return str_cat(to_string(slot.places[rank].call.signature), ", collective #", sequence,
                 " of group '", group_.name(), "': rank ", rank, " waited for ",
                 ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(ranks, ", "),
                 ranks.size() == 1 ? " (world rank " : " (world ranks ",
                 absl::StrJoin(world_ranks, ", "), ")");
}

}  // namespace shardweave::inproc
