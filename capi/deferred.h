// Deferred initialisation for C: a scope that may be freed anywhere, though what it is is a thread's.
#pragma once

#include <memory>

#include "c10/core/DispatchKey.h"
#include "c10/core/impl/LocalDispatchKeySet.h"

namespace shardweave::capi {

// While it lives, what the thread that has made it makes is deferred. Scopes of one thread are one,
// which ends with the last of them, in whatever order; where that ends on another thread, with the
// next call of its own (settle_deferral()).
class Deferral {
 public:
  Deferral();
  ~Deferral();
  Deferral(const Deferral&) = delete;
  Deferral& operator=(const Deferral&) = delete;

  struct OfThread;

 private:
  std::shared_ptr<OfThread> thread_;
};

// Before anything that makes tensors: scopes that have ended elsewhere end here.
extern constinit thread_local Deferral::OfThread* deferral_here;
void end_deferral_if_over();
inline void settle_deferral() {
  if (deferral_here != nullptr) [[unlikely]]
    end_deferral_if_over();
}

// Whether this thread has such a scope.
bool is_deferring();

// Around what has its values at once, whatever scopes there are.
class MadeAtOnce {
 private:
  const c10::impl::ExcludeDispatchKeyGuard not_deferred_{c10::DispatchKey::DeferredInit};
};

}  // namespace shardweave::capi
