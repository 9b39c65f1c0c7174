// A CommTrace records every collective that the DTensors of a mesh start while it lives: what
// moves, how far, and who wanted it.
//
//   CommTrace trace(mesh);
//   model->forward(x).sum().backward();
//   std::cout << trace.to_string();
//   trace.events().size();              // 2; see testing/expect_comms.h for tests that count
//
// to_string() is a table, in which events that differ in nothing share a line:
//
//   calls  collective  along   bytes  tensor                        needed by          phase    module
//       2  all_reduce  tp (2)    384  Float[8, 12] [P(sum)] -> [R]  aten::add 'other'  forward  mlp
//
// Scopes nest, and each sees everything. While none lives, an operator pays for one comparison.
// Every rank of the mesh records the same, for all start the same collectives. Threads: as
// DTensors, one at a time. Ownership: keeps the mesh alive.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ATen/core/Tensor.h"
#include "c10/core/ScalarType.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/placement/layout.h"

namespace shardweave {

namespace dtensor_internal {
class MeshContext;
}

enum class Phase : uint8_t {
  kForward,       // everything that is not
  kBackward,      // inside of backward() or grad()
  kGradientSync,  // inside of finish_grad_sync()
  kOptimizer,     // behind backward, without recording gradients; as list_communication() tells
};
std::string_view to_string(Phase phase);

// One collective, as it starts.
struct CommEvent {
  std::string collective;              // "all_reduce", "all_gather", "broadcast", ...
  std::vector<std::string> mesh_dims;  // along which it goes
  int64_t group_size = 1;              // ranks that take part
  // What a rank sends, as planned: the largest figure of any rank (RedistributeStep::bytes). An
  // all-reduce over k ranks sends its tensor 2 (k - 1) / k times.
  int64_t bytes = 0;

  // The operator that needs it ("aten::mm") and the argument that has to move (or "result"); or the
  // function that was called ("redistribute", "finish_grad_sync", "redistribute backward") and "".
  std::string op;
  std::string argument;
  bool implicit = true;  // no function was called that communicates

  // The tensor: its global shape, and its layout before and after. Several tensors together
  // (finish_grad_sync): the flat local one, whose size may differ from rank to rank, without
  // layouts; `bytes` is the sum of their figures.
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> shape;
  Layout before, after;
  // The FQNs that distribute_module() found, where parameters (or views of them) or their gradients
  // (finish_grad_sync) move. Empty: none, or unknown.
  std::vector<std::string> parameters;
  // Nothing of the tensor moves: checksums of plain tensors are compared, whether those are alike on
  // all ranks. `shape` is that of the checksums.
  bool is_check = false;

  // The innermost ModuleScope in which the operator was called; in backward, that of the forward
  // operator whose gradient is computed. "": none.
  std::string module;
  Phase phase = Phase::kForward;
  // "train.cc:53", where the function was called; else what the innermost SourceScope says; or "".
  std::string source;

  // "all_reduce tp (2), 384 bytes: Float[8, 12] [R, P(sum)] -> [R, R] for aten::add 'other',
  // forward, in mlp"
  std::string to_string() const;
  friend bool operator==(const CommEvent&, const CommEvent&) = default;
};

class CommTrace {
 public:
  // Keeps the first `max_events` events; the rest is only counted.
  explicit CommTrace(const MeshPtr& mesh, size_t max_events = 1 << 20);
  ~CommTrace();
  CommTrace(const CommTrace&) = delete;
  CommTrace& operator=(const CommTrace&) = delete;

  const std::vector<CommEvent>& events() const;
  int64_t dropped() const;  // events beyond max_events
  int64_t bytes() const;    // of all events()
  void clear();

  std::string to_string() const;
  // {"mesh": "DeviceMesh(dp=2, tp=2)", "rank": 3, "dropped": 0, "events": [
  //    {"collective": "all_reduce", "mesh_dims": ["tp"], "group_size": 2, "bytes": 384,
  //     "op": "aten::add", "argument": "other", "implicit": true, "dtype": "Float",
  //     "shape": [8, 12], "before": "[R, P(sum)]", "after": "[R, R]", "module": "mlp",
  //     "phase": "forward", "source": "", "parameters": [], "is_check": false}]}
  std::string to_json() const;

 private:
  class Recorder;
  std::unique_ptr<Recorder> recorder_;
};

// Names what runs while it lives, for CommTrace, ProfileScope and the errors of StrictScope.
//
//   at::Tensor AttentionImpl::forward(const at::Tensor& x) {
//     const ModuleScope scope(x, name_);      // a fully qualified name: "layers.0.attn"
//
// The innermost scope counts, names are not joined. A plain tensor (or none) makes a scope that
// does nothing, so that one module works on one device and on many.
class ModuleScope {
 public:
  ModuleScope(const MeshPtr& mesh, std::string name);
  ModuleScope(const at::Tensor& tensor, std::string name);
  ~ModuleScope();
  ModuleScope(const ModuleScope&) = delete;
  ModuleScope& operator=(const ModuleScope&) = delete;

 private:
  void enter(std::shared_ptr<dtensor_internal::MeshContext> context, std::string name);

  std::shared_ptr<dtensor_internal::MeshContext> context_;  // null: does nothing
};

// Says where a host's code is while it lives, to the CommTraces that live when it is made: a caller
// in another language has no std::source_location. The innermost scope counts.
class SourceScope {
 public:
  SourceScope(const MeshPtr& mesh, std::string_view source);  // "train.rs:53"
  ~SourceScope();
  SourceScope(const SourceScope&) = delete;
  SourceScope& operator=(const SourceScope&) = delete;

 private:
  const std::shared_ptr<dtensor_internal::MeshContext> context_;
};

}  // namespace shardweave
