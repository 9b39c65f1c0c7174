// Tensors that are not made yet. Under a DeferredScope operators run on meta tensors, which have
// shapes and no memory; what made and wrote each storage is kept on a tape, and run again when it
// is known which part of a tensor this rank needs (modules/deferred_init.h).
//
// Such a tensor carries LibTorch's key DeferredInit, whose fallback (forward_plan.cc) asks
// record_deferred() first, within the scope and after it. Tensors are told apart by their storages:
// views, detach(), set_data() and shallow copies need no care. A random operator is numbered when
// it is recorded; the number says which random numbers it gets, whoever draws them, whatever part,
// in whatever order.
//
// A part is drawn alone if every storage that its value depends on has the tensor's shape, and
// every operator in between treats each element by itself and gives the same bits wherever it
// stands (see kElementwise). Else each rank makes the whole tensor, as one rank would, and keeps
// its part.
//
// Internal to dtensor/ and modules/. Threads: a tape is used by one thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/core/dispatch/Dispatcher.h"
#include "c10/core/impl/LocalDispatchKeySet.h"
#include "shardweave/dtensor/engine/members.h"
#include "shardweave/dtensor/engine/redistribute.h"

namespace shardweave::dtensor_internal {

class Tape;

// While it lives, what this thread makes is deferred. One within another records on the same tape.
class DeferredScope {
 public:
  DeferredScope();
  ~DeferredScope();
  DeferredScope(const DeferredScope&) = delete;
  DeferredScope& operator=(const DeferredScope&) = delete;

 private:
  std::shared_ptr<Tape> outer_;
  c10::impl::IncludeDispatchKeyGuard include_;
};

// The fallback's question; true: it is done.
bool record_deferred(const c10::OperatorHandle& op, c10::Stack* stack);

// A plain tensor that is not made yet.
bool is_deferred(c10::TensorImpl* impl);
// Or a DTensor whose part is not.
bool is_deferred(const at::Tensor& tensor);

// Of plain ones. Their device, once they are made.
c10::Device deferred_device(const at::Tensor& tensor);
// The memory that it will have, as bytes of a storage.
struct DeferredExtent {
  const void* storage;
  int64_t begin, end;
};
DeferredExtent deferred_extent(const at::Tensor& tensor);
// What errors call it.
void name_deferred(const at::Tensor& tensor, std::string_view fqn);
// Makes it a DTensor where it stands, of which each rank will make its part.
void shard_deferred(const at::Tensor& tensor, SpecRef spec, std::shared_ptr<MeshContext> context);

// A DTensor where it stands, with its part there: now, or when that is made.
void move_in_place(const at::Tensor& tensor, c10::Device device);

// Makes those of `members` that are not made yet, from the tape or from what is given by FQN.
// Collective over the meshes of the DTensors among them. See materialize().
void make_deferred(const std::vector<Member>& members,
                   const std::vector<std::pair<std::string, at::Tensor>>& given,
                   std::optional<uint64_t> seed, const Cause& cause);

}  // namespace shardweave::dtensor_internal
