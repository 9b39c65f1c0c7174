#include "shardweave/dtensor/engine/spec_table.h"

#include <utility>

#include "absl/hash/hash.h"

namespace shardweave::dtensor_internal {
namespace {

// How many specs are looked at for each new one. Of n specs in use, those that are not are n / 3 at
// most, in the long run.
constexpr int kLooks = 4;

}  // namespace

SpecRef SpecTable::find(const SpecParts& parts) const {
  const auto it = by_parts_.find(parts);
  return it == by_parts_.end() ? SpecRef() : SpecRef::reclaim_copy(*it);
}

void SpecTable::insert(SpecRef spec) {
  release_unused();
  by_parts_.insert(spec.get());
  specs_.push_back(std::move(spec));
}

SpecParts SpecTable::parts_of(const Spec* spec) {
  return {spec->layout, spec->sizes, spec->strides, spec->dtype, spec->device, spec->origins};
}

size_t SpecTable::Hash::operator()(const SpecParts& s) const {
  return absl::HashOf(s.layout, s.sizes, s.strides, static_cast<int>(s.dtype),
                      static_cast<int>(s.device.type()), static_cast<int>(s.device.index()),
                      s.origins.data, s.origins.weight);
}

bool SpecTable::equal(const SpecParts& a, const SpecParts& b) {
  return a.sizes == b.sizes && a.strides == b.strides && a.dtype == b.dtype &&
         a.device == b.device && a.origins == b.origins && a.layout == b.layout;
}

// Other threads may let go of a spec meanwhile, but none can take one that only this table has.
void SpecTable::release_unused() {
  for (int i = 0; i < kLooks && !specs_.empty(); ++i) {
    if (next_ >= specs_.size()) next_ = 0;
    SpecRef& spec = specs_[next_];
    if (spec.use_count() > 1) {
      ++next_;
      continue;
    }
    by_parts_.erase(spec.get());
    std::swap(spec, specs_.back());
    specs_.pop_back();
  }
}

}  // namespace shardweave::dtensor_internal
