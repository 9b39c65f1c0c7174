// A map of bounded size that forgets what was not used for longest, or nearly so: the clock, or
// second chance, of page caches (Corbato, 1968). Internal to dtensor/.
//
//   ClockCache<Entry> cache(1000);
//   const Entry* entry = cache.find(hash, key);              // a store of one bit more than a map
//   if (entry == nullptr) cache.insert(hash, std::move(made));  // which evicts another when full
//
// The hand goes round over the entries, takes the mark of use from those that have it and stops at
// the first that has none: that one goes. So what is used at least once while the hand goes round
// stays, however many others come and go: an optimizer's entries, while the length of the sequences
// is another in every step. Each step of the hand is paid for by the hit, or the insertion, that it
// undoes.
//
// `Entry` is an EntryOfClock with a member `key` that compares with what find() is given. Of two
// keys with one hash the later one stays.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"

namespace shardweave::dtensor_internal {

struct EntryOfClock {
  mutable bool used = false;  // since the hand was here; not by being inserted
  size_t place = 0;           // in the round
  uint64_t hash = 0;
};

template <typename Entry>
class ClockCache {
 public:
  explicit ClockCache(size_t capacity) : capacity_(capacity) {}

  template <typename Key>
  const Entry* find(uint64_t hash, const Key& key) const {
    const auto it = by_hash_.find(hash);
    if (it == by_hash_.end() || !(it->second->key == key)) return nullptr;
    if (!it->second->used) it->second->used = true;  // most have it: their line stays clean
    return it->second;
  }

  // Returns what had to go, if anything.
  std::unique_ptr<Entry> insert(uint64_t hash, std::unique_ptr<Entry> entry) {
    const auto [it, is_new] = by_hash_.try_emplace(hash, entry.get());
    if (!is_new) {
      entry->place = it->second->place;
      it->second = entry.get();
    } else if (round_.size() < capacity_) {
      entry->place = round_.size();
      round_.emplace_back();
    } else {
      while (std::exchange(round_[hand_]->used, false)) hand_ = after(hand_);
      by_hash_.erase(round_[hand_]->hash);
      entry->place = std::exchange(hand_, after(hand_));
    }
    entry->hash = hash;
    std::swap(round_[entry->place], entry);  // from here on `entry` is the one that goes
    return entry;
  }

  // All of them; the cache is empty then.
  std::vector<std::unique_ptr<Entry>> release() {
    by_hash_.clear();
    hand_ = 0;
    return std::exchange(round_, {});
  }

  size_t size() const { return round_.size(); }
  size_t capacity() const { return capacity_; }
  // Of an empty cache; at least 1.
  void set_capacity(size_t capacity) { capacity_ = capacity; }

 private:
  size_t after(size_t place) const { return place + 1 == round_.size() ? 0 : place + 1; }

  size_t capacity_;
  absl::flat_hash_map<uint64_t, Entry*> by_hash_;
  std::vector<std::unique_ptr<Entry>> round_;
  size_t hand_ = 0;
};

}  // namespace shardweave::dtensor_internal
