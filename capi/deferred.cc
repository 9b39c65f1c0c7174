// Models that are constructed without memory, sharded, and then made.
#include "shardweave/capi/deferred.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <optional>
#include <vector>

#include "shardweave/capi/host_module.h"
#include "shardweave/capi/scopes.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/engine/members.h"
#include "shardweave/modules/deferred_init.h"

namespace shardweave::capi {

constinit thread_local Deferral::OfThread* deferral_here = nullptr;

struct Deferral::OfThread {
  std::atomic<int> open = 0;
  // Made and ended on the thread alone.
  std::unique_ptr<modules_internal::DeferredInitScope> scope;
};

namespace {

// The end of a thread with scopes that are still there.
struct ThreadEnd {
  std::shared_ptr<Deferral::OfThread> state;
  ~ThreadEnd() {
    if (state == nullptr) return;
    state->scope.reset();
    deferral_here = nullptr;
  }
};

MaterializeOptions materialize_options(const swv_materialize_options* given) {
  const swv_materialize_options o =
      options<swv_materialize_options>(given, SWV_MATERIALIZE_OPTIONS_INIT, "options");
  MaterializeOptions result;
  if (flag(o.has_seed, "options.has_seed")) result.seed = o.seed;
  const auto fqns = span(o.fqns, o.num_values, "options.fqns");
  const auto values = span(o.values, o.num_values, "options.values");
  for_each(fqns, "options.fqns", [&](const char* fqn) {
    result.values.emplace_back(text(fqn, "options.fqns"), at::Tensor());
  });
  size_t i = 0;
  for_each(values, "options.values", [&](const swv_tensor* value) {
    result.values[i++].second = tensor(value, "options.values");
  });
  return result;
}

void materialize_module(torch::nn::Module& module, const swv_materialize_options* options) {
  // Those on which it makes something: that is where ranks wait for each other.
  std::vector<MeshPtr> meshes;
  for (const dtensor_internal::Member& member : dtensor_internal::members_of(module)) {
    if (!is_dtensor(member.tensor) || !shardweave::is_deferred(member.tensor)) continue;
    const MeshPtr on = mesh_of(member.tensor);
    if (std::find(meshes.begin(), meshes.end(), on) == meshes.end()) meshes.push_back(on);
  }
  std::exception_ptr refused;
  MaterializeOptions how;
  try {
    how = materialize_options(options);
  } catch (...) {
    refused = std::current_exception();
  }
  for (const MeshPtr& mesh : meshes) {
    refused == nullptr ? agree_to_call(mesh, "materialize") : refuse_together(mesh, "materialize");
  }
  if (refused != nullptr) std::rethrow_exception(refused);
  shardweave::materialize(module, how, kHost);
}

}  // namespace

Deferral::Deferral() {
  settle_deferral();
  // First: at the end of the thread its state goes after this one's.
  auto scope = std::make_unique<modules_internal::DeferredInitScope>();
  static thread_local ThreadEnd end;
  if (end.state == nullptr) end.state = std::make_shared<OfThread>();
  thread_ = end.state;
  if (thread_->scope == nullptr) thread_->scope = std::move(scope);
  ++thread_->open;
  deferral_here = thread_.get();
}

Deferral::~Deferral() {
  --thread_->open;
  if (deferral_here == thread_.get()) end_deferral_if_over();
}

void end_deferral_if_over() {
  if (deferral_here->open > 0) return;
  deferral_here->scope.reset();
  deferral_here = nullptr;
}

bool is_deferring() {
  settle_deferral();
  return deferral_here != nullptr;
}

}  // namespace shardweave::capi

using namespace shardweave::capi;  // NOLINT: this file is the C interface of it

swv_status* swv_deferred_init(swv_scope** out_scope) {
  return guarded(__func__, out_scope, "out_scope", [&] { return new_scope<Deferral>().release(); });
}

swv_status* swv_module_materialize(swv_module* module, const swv_materialize_options* options) {
  return guarded(__func__, [&] {
    const CallMode mode(SWV_MODE_NO_GRAD, "mode");
    materialize_module(any_module(module), options);
  });
}

swv_status* swv_tensor_is_deferred(const swv_tensor* tensor, swv_bool* out_is_deferred) {
  return guarded(__func__, out_is_deferred, "out_is_deferred",
                 [&] { return shardweave::is_deferred(in(tensor, "tensor").tensor); });
}
