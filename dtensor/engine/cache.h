// The propagation cache: what was decided for one operator on one combination of specs and
// arguments.
//
// A key holds everything that the rule could read: the operator, the interned spec of every tensor
// and of what is remembered of it, and every argument that is not a float or a Scalar (those only
// when the rule declares that it reads them). It names specs by address, and its entry keeps them.
// Bounded: what was not used for longest goes first (clock_cache.h).
//
// Who holds an entry, and how long: dispatch() does, by address and without counting, from the look
// up until the operator has run. Only an operator that misses evicts, and only one that runs within
// another (a kernel, an observer or a handler of warnings that runs operators on DTensors) can evict
// the entry of one that is under way. So what an inner operator evicts is put aside, and freed by the
// next miss of one that runs within none. Whether one is under way MeshContext::about says, which
// every operator sets anyway (provenance.h): nothing is counted for this on the path of a hit.
// Nobody else holds entries; plans are shared (plans.h), specs are counted.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "ATen/core/ivalue.h"
#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "shardweave/dtensor/engine/clock_cache.h"
#include "shardweave/dtensor/engine/plans.h"
#include "shardweave/dtensor/rule.h"

namespace shardweave::dtensor_internal {

using CacheKey = absl::InlinedVector<uint64_t, 24>;

// Whether what an input was brought to is kept for the next operator.
enum class Remember : uint8_t { kNever, kWhileRecording, kAlways };

// An input that has to be somewhere else first.
struct InputChange {
  int input;  // flat index
  int arg;    // schema index
  SpecRef target;
  PlanRef plan;
  SpecRef from = {};  // the plan begins with what is remembered so; null: with the input itself
  Remember remember = Remember::kNever;
  bool unshards_weight = false;  // gives up a cut that the user gave a weight
};

// An argument that has to be something else locally.
struct ArgChange {
  int arg;  // schema index
  c10::IValue value;
};

struct CacheEntry : EntryOfClock {
  CacheKey key;
  std::vector<SpecRef> key_specs;  // those that the key names by address: they live as long
  bool gathered = false;           // no rule, or one that says so: all inputs replicated
  bool communicates = false;       // some change moves bytes
  bool makes_multiple = false;     // of a sum, its first argument (multiple.h)
  LocalKernel kernel = nullptr;
  uint64_t provenance = 0;  // the operator's share in that of its results (provenance.h)
  std::vector<InputChange> input_changes;
  std::vector<ArgChange> arg_changes;
  std::vector<SpecRef> inputs;   // after the changes
  std::vector<SpecRef> outputs;  // flat; as the local operator leaves them
  // Of views: where outputs begin in what they are views of (Place); nullopt: nobody knows.
  std::vector<std::optional<int64_t>> begins;
  struct OutputChange {
    int output;  // flat
    SpecRef target;
    PlanRef plan;
  };
  std::vector<OutputChange> output_changes;  // what is brought elsewhere then
  // In-place and out= operators: the result belongs into this argument.
  struct Written {
    int arg;               // schema index of the argument that is written
    int element;           // of a list; -1: the argument is a tensor
    int output;            // flat output, -1: none
    SpecRef spec;          // that the argument has and keeps
    PlanRef plan;          // from outputs[output] to spec; null: the operator writes in place
    bool direct = true;    // the local operator writes the argument's own local tensor
    bool becomes = false;  // an out= argument of another shape: it becomes a tensor of `spec`
  };
  std::vector<Written> written;
};

class PropagationCache {
 public:
  static constexpr size_t kMaxEntries = 16384;

  const CacheEntry* find(uint64_t hash, absl::Span<const uint64_t> key) const {
    return entries_.find(hash, key);
  }
  // `under_way`: the operator runs within another, whose entry has to stay.
  const CacheEntry* insert(uint64_t hash, std::unique_ptr<CacheEntry> entry, bool under_way) {
    if (!under_way) put_aside_.clear();
    const CacheEntry* inserted = entry.get();
    std::unique_ptr<CacheEntry> evicted = entries_.insert(hash, std::move(entry));
    if (under_way && evicted != nullptr) put_aside_.push_back(std::move(evicted));
    return inserted;
  }
  void clear(bool under_way = false) {
    if (!under_way) put_aside_.clear();
    for (std::unique_ptr<CacheEntry>& entry : entries_.release()) {
      if (under_way) put_aside_.push_back(std::move(entry));
    }
  }
  size_t size() const { return entries_.size(); }
  // Evicted, but not yet freed.
  size_t num_put_aside() const { return put_aside_.size(); }
  // Forgets all there is. For tests: of any size the answers are the same.
  void set_capacity(size_t capacity) {
    clear();
    entries_.set_capacity(capacity);
  }

 private:
  ClockCache<CacheEntry> entries_{kMaxEntries};
  std::vector<std::unique_ptr<CacheEntry>> put_aside_;
};

}  // namespace shardweave::dtensor_internal
