// What C says of gradients on their way, as C++ values: shared by grad_sync.cc and data_parallel.cc.
#pragma once

#include <memory>

#include "shardweave/capi/scopes.h"

struct swv_grad_sync : shardweave::capi::Handle<shardweave::capi::Kind::kGradSync> {
  std::shared_ptr<shardweave::capi::GradSyncState> state;
};

namespace shardweave::capi {

struct GivenGradSync {
  GradSyncOptions options;
  std::shared_ptr<PowerSgd> power_sgd;
};
// `prefix`: "options." or where else they stand. The hook's user data is taken over before anything
// can fail.
GivenGradSync grad_sync_options(const swv_grad_sync_options* given, const char* argument);

}  // namespace shardweave::capi
