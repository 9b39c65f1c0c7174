#include "shardweave/dtensor/autocast.h"

#include "ATen/autocast_mode.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "shardweave/dtensor/engine/keep_no_casts.h"
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

// Of this thread, by keep_no_casts().
thread_local bool may_keep_casts = true;

void set(const Autocast& autocast) {
  set(c10::DeviceType::CPU, autocast.cpu);
  set(c10::DeviceType::CUDA, autocast.cuda);
  at::autocast::set_autocast_cache_enabled(autocast.keeps_casts && may_keep_casts);
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
  autocast.keeps_casts = false;
  for (OfDevice* device : {&autocast.cpu, &autocast.cuda}) {
    device->enabled = dtype != at::kFloat;
    if (device->enabled) device->dtype = dtype;
  }
  return autocast;
}

AutocastScope::AutocastScope(const Autocast& autocast)
    : before_(Autocast::current()), keeps_casts_(autocast.keeps_casts) {
  if (keeps_casts_) at::autocast::increment_nesting();
  set(autocast);
}

AutocastScope::~AutocastScope() {
  if (keeps_casts_ && at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  set(before_);
}

void dtensor_internal::keep_no_casts() {
  may_keep_casts = false;
  at::autocast::set_autocast_cache_enabled(false);
}

}  // namespace shardweave
