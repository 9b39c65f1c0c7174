// Gradients of a unit of fully_shard() (fsdp_unit.h) on their way to where its parameters rest.
// Backward goes on meanwhile: what autograd gets are DTensors with a local part that is under way,
// and whoever needs their values waits.
//
//   auto gradients = std::make_shared<UnitGradients>(row, grads, at::kFloat, buffer, cause, names);
//   grads[i] = gradients->arriving(i);     // of those that it takes
//   gradients->finish();                   // two units later, or at the end of backward
//
// The reduce-scatter is begun at once. What is left then (sums along other mesh dimensions, a cast)
// is done in finish(), which is collective where there are such sums: all ranks finish in the same
// order. To parameters that rest on the CPU copies begin there, for which only who needs the values
// waits. Internal to dtensor/.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "c10/core/Stream.h"
#include "shardweave/dtensor/engine/flat_row.h"
#include "shardweave/dtensor/engine/host_copies.h"

namespace shardweave::dtensor_internal {

class UnitGradients final : public std::enable_shared_from_this<UnitGradients> {
 public:
  // As GradientScatter, which it begins. `lane`: to the CPU, where parameters rest; none: they do not.
  UnitGradients(const FlatRow& row, std::vector<at::Tensor>& grads, at::ScalarType dtype,
                GradientScatter::MakeBuffer buffer, std::optional<c10::Stream> lane,
                const Cause& cause, FlatRow::Names names);
  // Waits.
  ~UnitGradients();
  UnitGradients(const UnitGradients&) = delete;
  UnitGradients& operator=(const UnitGradients&) = delete;

  absl::Span<const size_t> taken() const { return scatter_.taken(); }
  // The gradient of parameter i, which it has taken, as that rests.
  at::Tensor arriving(size_t i);
  // Called once, when the memory that `buffer` gave is not needed any more; `early`: as soon as that is
  // seen, before anybody has waited.
  void when_sent(std::function<void()> sent, bool early) {
    sent_ = std::move(sent);
    is_early_ = early;
  }
  bool has_arrived() const { return has_arrived_ && (copies_ == nullptr || copies_->done()); }
  // Without waiting: gives up that memory, if it may be early and nobody reads it any more.
  void give_up_if_sent() {
    if (is_early_ && sent_ != nullptr && scatter_.done()) std::exchange(sent_, nullptr)();
  }
  // Waits until nobody does.
  void give_up() {
    if (sent_ != nullptr) wait();
  }
  // Throws Error, each time if it has failed.
  void finish();
  // And waits for the copies.
  void arrive();

 private:
  class Arriving;

  void wait();

  const std::shared_ptr<MeshContext> context_;
  const std::string subject_;
  Cause cause_;                   // of subject_: the unit's goes with it
  std::vector<SpecRef> resting_;  // of gradients, by parameter
  GradientScatter scatter_;
  std::function<void()> sent_;
  bool is_early_ = false;
  const std::optional<c10::Stream> lane_;
  std::unique_ptr<HostCopies> copies_;
  std::vector<at::Tensor> parts_;  // by parameter, once they have arrived
  bool has_arrived_ = false;
};

}  // namespace shardweave::dtensor_internal
