// What is behind a swv_scope.
#pragma once

#include <list>
#include <memory>
#include <optional>
#include <utility>
#include <variant>

#include "shardweave/capi/deferred.h"
#include "shardweave/capi/handles.h"
#include "shardweave/dtensor/grad_sync.h"
#include "shardweave/dtensor/observe/comm_trace.h"
#include "shardweave/dtensor/random.h"
#include "shardweave/modules/fully_shard.h"
#include "shardweave/modules/hooked.h"
#include "shardweave/modules/power_sgd.h"
#include "shardweave/modules/summon_full_params.h"
#include "shardweave/modules/zero.h"

namespace shardweave::capi {

// One run of a module's forward in the host's code (swv_forward_begin).
struct ForwardRun {
  ForwardRun(std::shared_ptr<const modules_internal::ForwardRedistribution> says, swv_grad_mode in,
             int num_inputs)
      : plan(std::move(says)), mode(in), inputs(num_inputs) {}

  std::shared_ptr<const modules_internal::ForwardRedistribution> plan;  // null: says nothing
  swv_grad_mode mode;
  int inputs;
  bool has_ended = false;
  std::optional<ModuleScope> scope;
};

// What is behind a swv_grad_sync: with it the pauses end, whatever scopes are left.
struct GradSyncState {
  // Of a function that makes it, for it cannot be moved.
  template <typename Make>
  GradSyncState(const Make& make, std::shared_ptr<PowerSgd> its_power_sgd)
      : sync(make()), power_sgd(std::move(its_power_sgd)) {}

  GradSync sync;
  const std::shared_ptr<PowerSgd> power_sgd;  // null: it has another hook, or none
  std::list<GradSync::NoSync> pauses;
};

// A pause of one of them (swv_grad_sync_no_sync).
class NoSync {
 public:
  explicit NoSync(const std::shared_ptr<GradSyncState>& of)
      : of_(of), pause_(of->pauses.emplace(of->pauses.end(), of->sync)) {}
  ~NoSync() {
    if (const std::shared_ptr<GradSyncState> of = of_.lock()) of->pauses.erase(pause_);
  }
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  const std::weak_ptr<GradSyncState> of_;
  const std::list<GradSync::NoSync>::iterator pause_;
};

// Whole parameters (swv_module_full_params): what was written is dropped, unless the host has ended
// the scope.
struct FullParamsScope {
  FullParamsScope(const torch::nn::Module& module, const FullParamsOptions& options)
      : params(std::make_unique<FullParams>(module, options)) {}
  ~FullParamsScope() { params->drop(); }
  FullParamsScope(const FullParamsScope&) = delete;
  FullParamsScope& operator=(const FullParamsScope&) = delete;

  const std::unique_ptr<FullParams> params;
};

}  // namespace shardweave::capi

struct swv_scope : shardweave::capi::Handle<shardweave::capi::Kind::kScope> {
  std::variant<std::monostate, shardweave::StrictScope, shardweave::ModuleScope,
               shardweave::SourceScope, shardweave::RandomStateScope, shardweave::capi::ForwardRun,
               shardweave::capi::Deferral, shardweave::capi::NoSync,
               shardweave::ZeroPartition::NoSync, shardweave::FullyShardNoSync,
               shardweave::capi::FullParamsScope>
      scope;
};

namespace shardweave::capi {

// A scope that is made in its handle, which is not given out yet.
template <typename Scope, typename... Args>
Owned<swv_scope> new_scope(Args&&... args) {
  Owned<swv_scope> handle(make<swv_scope>());
  handle->scope.emplace<Scope>(std::forward<Args>(args)...);
  return handle;
}

}  // namespace shardweave::capi
