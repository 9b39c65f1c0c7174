// Autocast, as a scope: LibTorch's C++ has no guard for it.
//
//   at::Tensor loss;
//   {
//     const AutocastScope autocast(at::kBFloat16);
//     loss = model->forward(x).sum();
//   }
//   loss.backward();  // outside: each operator has the types of its forward
//
// LibTorch's lists say which operators see what: products, convolutions and attention see
// floating-point tensors but float64 cast to the scope's type, most losses see float32 (on GPUs softmax,
// norms and sums, too); forms that write into a tensor cast nothing. Parameters and their gradients keep
// their types. A parameter is cast at each use: LibTorch's own table of what it has cast knows neither
// the type nor whether an optimizer has stepped since, and is one for all threads of a process.
// docs/mixed_precision.md has the other ways.
//
// Of the thread, on CPUs and on GPUs. No collective.
#pragma once

#include "c10/core/ScalarType.h"

namespace shardweave {

// A thread's autocast.
struct Autocast {
  struct OfDevice {
    bool enabled;
    at::ScalarType dtype;
  };
  OfDevice cpu, cuda;
  bool keeps_casts;  // of parameters, in LibTorch's table, until the outermost scope ends

  static Autocast current();
  // To kBFloat16 or kHalf, without the table; kFloat: nothing is cast. Throws Error (InvalidArgument) for
  // another type.
  static Autocast to(at::ScalarType dtype);
};

// What a thread's autocast is while this lives. Scopes nest.
class AutocastScope {
 public:
  explicit AutocastScope(at::ScalarType dtype) : AutocastScope(Autocast::to(dtype)) {}
  explicit AutocastScope(const Autocast& autocast);
  ~AutocastScope();
  AutocastScope(const AutocastScope&) = delete;
  AutocastScope& operator=(const AutocastScope&) = delete;

 private:
  const Autocast before_;
  const bool keeps_casts_;
};

}  // namespace shardweave
