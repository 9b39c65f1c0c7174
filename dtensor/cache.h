// The propagation cache: what was decided for one operator on one combination of specs and
// arguments.
//
// A key holds everything that the rule could read: the operator, the interned spec of every tensor
// and of what is remembered of it, and every argument that is not a float or a Scalar (those only
// when the rule declares that it reads them). It names specs by address, and its entry keeps them.
// Bounded: it is emptied when full.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ATen/core/ivalue.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "shardweave/dtensor/rule.h"
#include "shardweave/placement/redistribute_plan.h"

namespace shardweave::dtensor_internal {

using CacheKey = absl::InlinedVector<uint64_t, 24>;

// Whether what an input was brought to is kept for the next operator.
enum class Remember : uint8_t { kNever, kWhileRecording, kAlways };

// An input that has to be somewhere else first.
struct InputChange {
  int input;  // flat index
  int arg;    // schema index
  SpecRef target;
  RedistributePlan plan;
  SpecRef from = {};  // the plan begins with what is remembered so; null: with the input itself
  Remember remember = Remember::kNever;
  bool unshards_weight = false;  // gives up a cut that the user gave a weight
};

// An argument that has to be something else locally.
struct ArgChange {
  int arg;  // schema index
  c10::IValue value;
};

struct CacheEntry {
  CacheKey key;
  std::vector<SpecRef> key_specs;  // those that the key names by address: they live as long
  bool gathered = false;           // no rule, or one that says so: all inputs replicated
  bool communicates = false;       // some change moves bytes
  LocalKernel kernel = nullptr;
  uint64_t provenance = 0;  // the operator's share in that of its results (provenance.h)
  std::vector<InputChange> input_changes;
  std::vector<ArgChange> arg_changes;
  std::vector<SpecRef> inputs;   // after the changes
  std::vector<SpecRef> outputs;  // flat; as the local operator leaves them
  struct OutputChange {
    int output;  // flat
    SpecRef target;
    RedistributePlan plan;
  };
  std::vector<OutputChange> output_changes;  // what is brought elsewhere then
  // In-place and out= operators: the result belongs into this argument.
  struct Written {
    int arg;                // schema index of the argument that is written
    int element;            // of a list; -1: the argument is a tensor
    int output;             // flat output, -1: none
    SpecRef spec;           // that the argument has and keeps
    RedistributePlan plan;  // from outputs[output] to spec; empty: the operator writes in place
    bool direct = true;     // the local operator writes the argument's own local tensor
    bool becomes = false;   // an out= argument of another shape: it becomes a tensor of `spec`
  };
  std::vector<Written> written;
};

class PropagationCache {
 public:
  const CacheEntry* find(uint64_t hash, const CacheKey& key) const {
    auto it = entries_.find(hash);
    return it != entries_.end() && it->second->key == key ? it->second.get() : nullptr;
  }
  const CacheEntry* insert(uint64_t hash, std::unique_ptr<CacheEntry> entry) {
    if (entries_.size() >= kMaxEntries) entries_.clear();
    auto& slot = entries_[hash];
    slot = std::move(entry);
    return slot.get();
  }
  void clear() { entries_.clear(); }
  size_t size() const { return entries_.size(); }

 private:
  static constexpr size_t kMaxEntries = 16384;
  absl::flat_hash_map<uint64_t, std::unique_ptr<CacheEntry>> entries_;
};

}  // namespace shardweave::dtensor_internal
