#include "shardweave/dtensor/autocast.h"

#include "ATen/autocast_mode.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "shardweave/dtensor/error.h"

namespace shardweave {
namespace {

Autocast::OfDevice current(c10::DeviceType device) {
  return {at::autocast::is_autocast_enabled(device), at::autocast::get_autocast_dtype(device)};
}

void set(c10::DeviceType device, const Autocast::OfDevice& autocast) {
  at::autocast::set_autocast_enabled(device, autocast.enabled);
  at::autocast::set_autocast_dtype(device, autocast.dtype);
}

// What keeps casts may have been switched off since (MeshContext): it is set where it differs only.
void set(const Autocast& autocast, bool keeps_casts) {
  set(c10::DeviceType::CPU, autocast.cpu);
  set(c10::DeviceType::CUDA, autocast.cuda);
  if (autocast.keeps_casts != keeps_casts) {
    at::autocast::set_autocast_cache_enabled(autocast.keeps_casts);
  }
}

}  // namespace

Autocast Autocast::current() {
  return {shardweave::current(c10::DeviceType::CPU), shardweave::current(c10::DeviceType::CUDA),
          at::autocast::is_autocast_cache_enabled()};
}

Autocast Autocast::to(at::ScalarType dtype) {
  if (dtype != at::kBFloat16 && dtype != at::kHalf && dtype != at::kFloat) {
    throw Error(absl::InvalidArgumentError(
        absl::StrCat("Autocast: dtype is ", c10::toString(dtype),
                     "; wanted BFloat16 or Half, or Float for no casts")));
  }
  Autocast autocast = current();
  for (OfDevice* device : {&autocast.cpu, &autocast.cuda}) {
    device->enabled = dtype != at::kFloat;
    if (device->enabled) device->dtype = dtype;
  }
  return autocast;
}

AutocastScope::AutocastScope(const Autocast& autocast)
    : before_(Autocast::current()), keeps_casts_(autocast.keeps_casts) {
  if (keeps_casts_) at::autocast::increment_nesting();
  set(autocast, before_.keeps_casts);
}

AutocastScope::~AutocastScope() {
  if (keeps_casts_ && at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  set(before_, keeps_casts_);
}

}  // namespace shardweave
