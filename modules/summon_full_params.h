// A scope in which fully sharded parameters (fully_shard.h) are whole: to export, print, check or
// initialise them with code that knows nothing of shards.
//
//   {
//     const FullParams whole(*model, {.writeback = true});    // collective
//     const c10::AutoGradMode no_grad(false);
//     initialize(*model);                                     // as on one device
//   }                                                         // each rank keeps its part
//   if (FullParams on_first(*model, {.rank = 0}); is_first) save(on_first.parameters());
//
// Without a rank the parameters of the module are themselves whole meanwhile, on every rank, and so are
// the plain tensors of parameters(), which are the same memory: where they rest, on the CPU if they are
// used on a compute_device. With a rank that one alone has plain
// copies, and the parameters rest as ever. Whole means along the mesh dimension that fully_shard() cuts:
// what other dimensions cut (tensor parallelism) stays cut.
//
// With writeback what was written is what parameters have afterwards; on every rank each keeps its part
// of what it has itself, so all write the same. Without, operators that write are refused, and what is
// written to the plain tensors is dropped. A scope that an exception leaves drops it, too.
//
// Forwards in it work where gradients are not recorded, on whole parameters: without communication.
// Where they are, an operator on one is an error; a graph from before goes backward, but not one whose
// parameters were written. Optimizers step outside.
#pragma once

#include <memory>
#include <optional>
#include <source_location>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"

namespace torch::nn {
class Module;
}

namespace shardweave {

struct FullParamsOptions {
  bool writeback = false;
  // A place along the units' mesh dimension: the rank there, and no other, has whole copies. Where there
  // are replicas (other mesh dimensions) each has such a rank, and all of these write alike.
  std::optional<int> rank = {};
};

class FullParams {
 public:
  // Of units that a parameter of the module is in, with what else is in those. Collective over their
  // mesh; compares units and options. Throws Error on all ranks, before anything is changed:
  // FailedPrecondition if no parameter is fully sharded or one is still deferred, for writeback inside
  // of a scope that only reads, and with a rank for units that are in a scope already (or the other way
  // round); InvalidArgument for a rank that is not there, units of several meshes, and options or
  // modules that differ between ranks. Other scopes may be nested, and share their memory.
  explicit FullParams(const torch::nn::Module& module, const FullParamsOptions& options = {},
                      std::source_location where = std::source_location::current());
  // end(), unless an exception has left the scope.
  ~FullParams() noexcept(false);
  FullParams(const FullParams&) = delete;
  FullParams& operator=(const FullParams&) = delete;

  // FQNs (of the outermost module that was sharded), with plain tensors; undefined on ranks that have
  // none. What the tensors hold is that of the
  // parameters until the scope ends, and nobody's afterwards.
  const std::vector<std::pair<std::string, at::Tensor>>& parameters() const;
  // Of one of them; throws Error (NotFound).
  at::Tensor parameter(std::string_view fqn) const;

  // Parameters rest again, as the last scope ends. Once; with a rank and writeback collective. Throws
  // Error if that fails: then the mesh is lost, and of some units nothing has been written.
  void end();
  // The same, but what was written is dropped. Local.
  void drop() noexcept;

 private:
  class State;
  std::unique_ptr<State> state_;
  const int exceptions_;
};

}  // namespace shardweave
