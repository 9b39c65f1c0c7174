// The specs of one mesh, each once: equal parts give the same object as long as somebody has it, so
// that specs are compared, and cache keys made, by address. Internal to dtensor/.
//
//   SpecRef spec = table.find(parts);
//   if (spec == nullptr) table.insert(spec = make(parts));
//
// Those that nobody has any more go, a few with each new one: there are never many more than are in
// use. One thread at a time; others may let go of a spec meanwhile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/types/span.h"
#include "shardweave/dtensor/spec.h"

namespace shardweave::dtensor_internal {

// What a spec is made of, to find it without making one.
struct SpecParts {
  const Layout& layout;
  absl::Span<const int64_t> sizes, strides;
  at::ScalarType dtype;
  c10::Device device;
  CutOrigins origins;  // of_cuts()
};

class SpecTable {
 public:
  SpecRef find(const SpecParts& parts) const;  // null: not there
  void insert(SpecRef spec);
  size_t size() const { return specs_.size(); }

 private:
  static SpecParts parts_of(const Spec* spec);
  static const SpecParts& parts_of(const SpecParts& parts) { return parts; }
  struct Hash {
    using is_transparent = void;
    size_t operator()(const SpecParts& parts) const;
    size_t operator()(const Spec* spec) const { return (*this)(parts_of(spec)); }
  };
  struct Equal {
    using is_transparent = void;
    template <typename A, typename B>
    bool operator()(const A& a, const B& b) const {
      return equal(parts_of(a), parts_of(b));
    }
  };
  static bool equal(const SpecParts& a, const SpecParts& b);
  void release_unused();

  absl::flat_hash_set<const Spec*, Hash, Equal> by_parts_;
  std::vector<SpecRef> specs_;  // the same
  size_t next_ = 0;             // to be looked at by release_unused()
};

}  // namespace shardweave::dtensor_internal
