// Where a module's inputs and outputs go, for modules that nobody prepared. A module's forward is a
// plain function, but it meets its weight in an operator: a weight that is observed carries
// LibTorch's key DeferredInit, which lies above autograd, and the fallback for that key
// (forward_plan.cc)
//
//   redistributes the operator's other operands as the plan's inputs say,
//   runs the operator, without the key,
//   redistributes its results as the plan's outputs say.
//
// All of it is differentiable. Views of an observed weight (`linear` is t, matmul, add_) are
// observed, too; operators that read a weight but are no layer's (an optimizer's, a norm) run as
// they are, and so do those of a backward pass. Tensors without the key never come here. Internal
// to Shardweave.
#pragma once

#include <memory>
#include <optional>
#include <set>
#include <source_location>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "ATen/core/Tensor.h"
#include "shardweave/dtensor/engine/no_source.h"
#include "shardweave/placement/layout.h"
#include "torch/csrc/autograd/function.h"

namespace shardweave::dtensor_internal {

class MeshContext;

// Where one value goes. Along a mesh dimension without a placement it stays as it is.
struct ForwardTarget {
  std::vector<std::optional<Placement>> placements;  // one per mesh dimension
  std::vector<int> order;                            // of their cuts; empty: their own
  friend bool operator==(const ForwardTarget&, const ForwardTarget&) = default;
};

struct ForwardLayouts;

// A tensor as it was brought elsewhere for a layer, for its siblings that want the same: query, key
// and value are one gather forward, and one reduction backward. The tensor holds it (DTensorMeta)
// until all of them have had it, or a layer of the plan runs that takes something else: the same on
// every rank, for that depends on nothing but which operators run. What to_local() has handed out
// may be written by one rank alone, and is not shared.
struct SharedInput {
  at::Tensor brought;
  uint32_t version = 0;  // of the tensor,
  int64_t writes = 0;    // and what was written to its family, by whatever handle
  ForwardTarget target;
  std::vector<std::shared_ptr<const ForwardLayouts>> readers;
};

// Of a module.
struct ForwardLayouts {
  // An argument or a result by its index among those that are tensors, or an argument by its name.
  using Slot = std::variant<int, std::string>;
  struct Value {
    Slot slot;
    ForwardTarget target;
    std::string name;     // "blocks.0.attn.input.0", for messages
    std::string pattern;  // of the entry that says so
    mutable bool met = false;
  };
  std::vector<Value> inputs, outputs;
  // What a layer of the plan has shared last; one for all modules of a plan. Weak: a layer holds no
  // activation, which leads to the layer's weight.
  std::shared_ptr<std::weak_ptr<SharedInput>> shared_last;
  size_t siblings = 1;  // so many want the first input where this one does
  // Whether the module's forward looks rows up in its weight. A head that is tied to an embedding by a product with the
  // embedding's weight is no forward of the embedding; nor is a lookup one of a linear layer. Nothing: nobody knows.
  std::optional<bool> looks_up;
  std::source_location where = kNoSource;  // of the call that gave the plan
  // An operator with an input that is no layer's, which the weight took part in before any value was
  // met; whether that was said.
  mutable std::string passed_by;
  mutable bool said = false;
};

// `tensor` as the plan says of the value with this index and name: itself where it says nothing. A
// plain tensor counts as replicated. Throws Error that names the value.
enum class Direction { kInput, kOutput };
at::Tensor laid_out(const ForwardLayouts& layouts, Direction direction, int index,
                    std::string_view name, const at::Tensor& tensor,
                    const std::shared_ptr<MeshContext>& context);

// From now on the operators that `member`, a module's weight, takes part in do as the plan says.
// With null: of the module's other members, which are told from its inputs, also after
// module->to().
void observe_forward(const at::Tensor& member, std::shared_ptr<const ForwardLayouts> layouts);

// What layers' operators call their tensors, for plans that name an input: those of LibTorch's layers,
// and of all operators outside of "aten", which plug-ins may make a layer's.
std::set<std::string> layer_arguments();

// Says once, on the first rank, that what a plan says of a module has not been applied, though its
// weight has a gradient.
void warn_of_unmet_plan(const at::Tensor& weight);

// A node of autograd's graph that runs a forward pass again: in it, plans hold as in the first.
class RunsForward : public torch::autograd::Node {};

// While it lives on this thread, what runs without recording is of training all the same: a checkpoint()'s
// first run, and its second, in which a NoGradGuard of the function's own is to mean what it did.
class RecordedLater {
 public:
  RecordedLater() { ++depth_; }
  ~RecordedLater() { --depth_; }
  RecordedLater(const RecordedLater&) = delete;
  RecordedLater& operator=(const RecordedLater&) = delete;

  static bool is_so() { return depth_ > 0; }

 private:
  static thread_local int depth_;
};

// Whether gradients will be wanted of what runs now.
bool is_training();

}  // namespace shardweave::dtensor_internal
