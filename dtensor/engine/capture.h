// What the host does before each replay of a step that was captured (captured_step.h): it writes what
// the device is to find there, as a learning rate or the place in the stream of random numbers.
//
//   if (Capture* capture = Capture::current()) {
//     at::Tensor there = capture->number(at::kFloat);
//     capture->before_replay([lr, there] { there.fill_(*lr); });
//   }
//
// Internal to dtensor/ and modules/. Threads: the rank's, and autograd's while that waits for it.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "ATen/core/Tensor.h"
#include "c10/core/Device.h"
#include "shardweave/comm/communicator.h"
#include "shardweave/dtensor/random.h"

namespace shardweave::dtensor_internal {

class MeshContext;

class Capture {
 public:
  // A step on this mesh and this GPU.
  Capture(MeshContext& context, c10::Device device);

  // Of what the calling thread is capturing now; null: nothing.
  static Capture* current();
  // While it lives, what is done is captured.
  class Scope {
   public:
    explicit Scope(Capture& capture);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Capture& capture_;
  };

  // On the GPU, for what is written before a replay. It is none of the graph's memory, which the step
  // itself may have used for something else before it reads this. Throws Error when all are given.
  at::Tensor number(at::ScalarType dtype);
  // `action` is called before each replay, in the order given, after the `check`s of all, of which one
  // that throws leaves everything as it was. What it puts on the current stream comes before the step.
  void before_replay(std::function<void()> action, std::function<void()> check = {}) {
    if (check) checks_.push_back(std::move(check));
    actions_.push_back(std::move(action));
  }
  // A group whose collectives are in the step. It lives as long as the mesh.
  void uses(Communicator& group);
  // On the GPU: what a replay adds to the number of the stream that `state` draws from. Throws Error for
  // a state that is none of the step's own.
  const uint64_t* random_offset(const PhiloxState& state) const;

  // Before a replay: all of the above.
  void prepare();
  const std::vector<Communicator*>& groups() const { return groups_; }
  // Operators that draw random numbers.
  uint64_t draws() const { return draws_; }

 private:
  MeshContext& context_;
  at::Tensor numbers_;  // of 8 bytes each
  int64_t given_ = 0;
  std::vector<std::function<void()>> checks_, actions_;
  std::vector<Communicator*> groups_;
  PhiloxState random_;  // of the mesh when it was captured
  uint64_t draws_ = 0;
  at::Tensor offset_;  // a number on the GPU
};

// Something is done on a mesh. Throws Error (FailedPrecondition) while this thread captures a step on
// another one, which would not know of it.
void check_captured_mesh(const MeshContext& context);

// The host is about to draw random numbers. Throws Error (FailedPrecondition) while a step is captured,
// which would have the same ones in each replay.
void check_drawn_by_host(const MeshContext& context);

}  // namespace shardweave::dtensor_internal
