// This rank's parts of DTensors. Internal to dtensor/ and modules/.
//
// LocalPart is the one door to a part: DTensorMeta::local() goes through it. A part that is not there
// is brought by whoever needs its values.
//
// Code that reads or writes parts past the dispatcher (an optimizer, the clipping of gradients) does
// what dispatch.cc does around an operator that writes:
//
//   at::Tensor part = part_to_write(parameter, "FusedOptimizer");  // a plain tensor: itself
//   ... part is written ...
//   part_written(parameter, "FusedOptimizer");
//
// Collective over the mesh if the tensor is a view that is a copy (detour.h).
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>

#include "ATen/core/Tensor.h"

namespace shardweave::dtensor_internal {

// Threads: as the DTensor. Copies share their source, and see what it has brought.
class LocalPart {
 public:
  enum class State : uint8_t {
    kReady,          // it is in memory
    kUnderWay,       // a collective brings it: get() waits
    kGatheredOnUse,  // its memory is empty between uses: get() has it filled, its owner empties it
    kDeferred,       // never made so far: get() makes it
  };

  // Where a part that is not in memory comes from.
  class Source {
   public:
    virtual ~Source() = default;
    virtual State state() const = 0;
    // The part, in memory: of one source the same tensor every time. Called at every use until
    // state() is kReady. Throws Error.
    virtual const at::Tensor& bring() = 0;
  };

  LocalPart() = default;  // of no tensor
  explicit LocalPart(at::Tensor ready) : tensor_(std::move(ready)) {}
  explicit LocalPart(std::shared_ptr<Source> source) : source_(std::move(source)) {}

  const at::Tensor& get() const {
    if (source_ != nullptr) [[unlikely]]
      bring();
    return tensor_;
  }
  State state() const { return source_ == nullptr ? State::kReady : source_->state(); }

 private:
  void bring() const;

  mutable at::Tensor tensor_;
  mutable std::shared_ptr<Source> source_;  // null: ready
};

// Up to date, and what is written to it reaches the tensor and what it is a view of. Throws Error
// (FailedPrecondition) where it would not.
at::Tensor part_to_write(const at::Tensor& tensor, std::string_view who);
// Up to date, to be read.
at::Tensor part_to_read(const at::Tensor& tensor, std::string_view who);

// Autograd, which may have saved the tensor or its part, and its views learn that it has been
// written. For plain tensors too: LibTorch's fused optimizers do not tell autograd. `by`: what all ranks
// have to have done alike, as a number (provenance.h); 0: nothing that could differ.
void part_written(const at::Tensor& tensor, std::string_view who, uint64_t by = 0);
// The same of a value that does not depend on the one before: `from` says which it is, on all ranks alike.
void part_replaced(const at::Tensor& tensor, std::string_view who, uint64_t from);

// A tensor of this rank's `part` that lies as `tensor` does; plain if that is.
at::Tensor lying_as(const at::Tensor& tensor, at::Tensor part);

}  // namespace shardweave::dtensor_internal
