// Models that are larger than a machine: constructed without memory, sharded, and only then made.
//
//   auto model = deferred_init([&] { return Gpt(options); });   // shapes, and no memory
//   parallelize_module(*model, mesh, plan);
//   materialize(*model);                // each rank draws its parts, and nothing else
//
// Under deferred_init() the operators of initialisers (those of torch::nn and torch::nn::init, and
// others) are recorded; materialize() runs them, for the part that a rank has. The values are, bit
// by bit, the parts of what the same calls make on one rank: random numbers are numbered when they
// are recorded, and drawn by the index of each element (random.h). So the order in which submodules
// are materialized does not matter either.
//
// Where a part cannot be made by itself (a rotary table by pow(), an orthogonal matrix) a rank
// makes that tensor whole, and keeps its part.
//
// Tied parameters stay tied, also plain tensors that share memory. Views and casts,
// module->to(dtype) too, are recorded within the call and after it. What needs values is an error
// (FailedPrecondition) that names the operator and the parameter: item() while a model is
// constructed, or its forward before materialize(). torch::tensor({...}) is made at once. So is
// what is made of nothing but tensors from outside.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <source_location>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"

namespace torch::nn {
class Module;
}

namespace shardweave {

namespace dtensor_internal {
class DeferredScope;
}
namespace modules_internal {
// While it lives, what this thread makes is deferred. For hosts in other languages; in C++ there is
// deferred_init().
class DeferredInitScope {
 public:
  DeferredInitScope();
  ~DeferredInitScope();
  DeferredInitScope(const DeferredInitScope&) = delete;
  DeferredInitScope& operator=(const DeferredInitScope&) = delete;

 private:
  const std::unique_ptr<dtensor_internal::DeferredScope> scope_;
};
// So that errors can name them.
void name_deferred_members(const torch::nn::Module& module);
}  // namespace modules_internal

// What `make` returns: a module, or its holder, or anything else with tensors in it. Of this thread
// alone, and so ranks may be threads; one call within another is part of it. An exception of `make`
// comes through.
template <typename Make>
std::invoke_result_t<Make&> deferred_init(Make&& make) {
  const modules_internal::DeferredInitScope scope;
  if constexpr (std::is_void_v<std::invoke_result_t<Make&>>) {
    make();
  } else {
    std::invoke_result_t<Make&> made = make();
    if constexpr (requires { static_cast<const torch::nn::Module&>(*made); }) {
      if constexpr (requires { made == nullptr; }) {
        if (made == nullptr) return made;
      }
      modules_internal::name_deferred_members(*made);
    } else if constexpr (requires { static_cast<const torch::nn::Module&>(made); }) {
      modules_internal::name_deferred_members(made);
    }
    return made;
  }
}

// Whether it has no values yet: plain, or a DTensor.
bool is_deferred(const at::Tensor& tensor);

struct MaterializeOptions {
  // Of the random numbers, on every mesh alike, whatever its ranks; the meshes' own states stay.
  // The same on all ranks; two calls of deferred_init() draw the same from it.
  // nullopt: a mesh's, where it stands (manual_seed() in random.h), which goes on by what
  // deferred_init() has recorded. Of tensors that are on no mesh: one that LibTorch's generator
  // draws (torch::manual_seed()), for each deferred_init().
  std::optional<uint64_t> seed;
  // By FQN, as the module has it that is given: in place of what was recorded. Whole plain tensors,
  // the same on all ranks (only their dtypes and shapes are compared), of which each rank copies
  // its part; or DTensors on the same mesh, in any layout. Of any dtype that can become the
  // parameter's.
  std::vector<std::pair<std::string, at::Tensor>> values = {};
};

// Gives values to the parameters and buffers of a module that have none: a whole model, or one
// submodule after the other, with the same numbers. What has values is left alone.
//
// Collective over the meshes that they are on: one small comparison (on several meshes two of each),
// in which all ranks learn if one of them has recorded something else, or has failed. No values
// travel (but for those of a DTensor that is given in another layout).
//
// Throws Error on every rank, and leaves the module and the meshes' random states as they were:
// NotFound for a value with an FQN that the module does not have; FailedPrecondition for one that
// has values already; InvalidArgument for a value of another shape, on ranks that would go apart,
// and where another rank has failed; and whatever the operators throw.
void materialize(torch::nn::Module& module, const MaterializeOptions& options = {},
                 std::source_location where = std::source_location::current());

}  // namespace shardweave
