// What a checkpoint saves and brings back: tensors and values (JSON), by name.
//
//   StateDict state;
//   add_module(state, *model);                      // "model.h.0.attn.q.weight", ...
//   add_optimizer(state, optimizer, *model);        // "optimizer.h.0.attn.q.weight.exp_avg", ...
//   add_random_state(state, mesh);
//   state.set_value("epoch", "3");
//   checkpointer.save(step, state);                 // checkpointer.h
//
// It has handles, not copies: made once, before training, it saves what is there at each save, and
// loading writes to where the tensors lie. Optimizers and meshes that were added must outlive its
// use. All ranks add the same things; saving and loading compare that. Threads: a rank's state is
// used by one thread at a time.
//
// Throws Error: AlreadyExists for a name that is there already; InvalidArgument for what is named.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/modules/optim/fused_optimizer.h"
#include "shardweave/modules/zero.h"

namespace torch::nn {
class Module;
}
namespace torch::optim {
class Optimizer;
}

namespace shardweave {

namespace checkpoint_internal {

// Of its NonPersistentBuffers (modules/non_persistent_buffers.h).
std::set<std::string> non_persistent_fqns(const torch::nn::Module& module);

// A tensor that is loaded in place.
struct NamedTensor {
  std::string name;
  at::Tensor tensor;
  std::vector<std::string> aliases;  // other names of it
};

// What exists only from some time on: an optimizer's state of one parameter.
struct LateTensors {
  std::string prefix;  // "optimizer.w."
  struct Item {
    std::string name;  // "exp_avg"
    at::Tensor like;   // of its shape, and lying as it; undefined: it is a number
    bool is_optional = false;
    at::ScalarType dtype = at::kFloat;
    double most = 0x1p53;  // of a number: what `set` takes
  };
  std::function<std::vector<Item>()> items;  // what there can be
  std::function<OptimizerState()> now;       // what there is
  // Local: what was read becomes the state. Empty: as before the first step.
  std::function<void(OptimizerState)> set;
  bool is_optimizers = false;  // written to by the step of one, and by nothing else
};

struct NamedValue {
  std::function<std::string()> get;                       // JSON
  std::function<absl::Status(const std::string&)> check;  // null: any will do
  std::function<void(const std::string&)> set;
  bool is_optional = false;  // a checkpoint may lack it: then `set` is not called
  bool is_own = false;       // set_value()'s: what it is for the program alone knows

  // Whether a run that loads without it does not go on as it was.
  bool resumes() const { return !is_optional && !is_own; }
};

}  // namespace checkpoint_internal

class StateDict {
 public:
  // A DTensor in any layout without Partial, or a plain tensor, which all ranks have alike (rank 0's
  // is saved, whatever the others have). `aliases` are further names of it, under which it may be
  // saved or looked for.
  void add_tensor(std::string name, at::Tensor tensor, std::vector<std::string> aliases = {});
  // JSON, the same on all ranks. May be called again, as before each save: the new value takes the
  // old one's place. Loading replaces it, too; a checkpoint without it is an error. (Who loads a
  // checkpoint with it need not have it: LoadedCheckpoint::values.)
  void set_value(const std::string& name, std::string_view json);
  // Throws Error (NotFound).
  std::string value(const std::string& name) const;
  bool has_value(const std::string& name) const { return values_.contains(name); }

  // What loading asks for: tensors that are there before the first step, and values.
  std::vector<std::string> tensor_names() const;
  std::vector<std::string> value_names() const;

  // For add_...() functions of one's own.
  void add_late(checkpoint_internal::LateTensors late);
  // Asked at each save and load: what it gives may grow.
  void add_late(std::function<std::vector<checkpoint_internal::LateTensors>()> source);
  void add_value(const std::string& name, checkpoint_internal::NamedValue value);
  const std::vector<checkpoint_internal::NamedTensor>& tensors() const { return tensors_; }
  // As it is now. Throws Error (AlreadyExists) if a prefix is there twice.
  std::vector<checkpoint_internal::LateTensors> late() const;
  const std::map<std::string, checkpoint_internal::NamedValue, std::less<>>& values() const {
    return values_;
  }

 private:
  std::vector<checkpoint_internal::NamedTensor> tensors_;
  std::vector<std::function<std::vector<checkpoint_internal::LateTensors>()>> late_;
  std::map<std::string, checkpoint_internal::NamedValue, std::less<>> values_;
  std::set<std::string, std::less<>> taken_, own_values_;
};

// Parameters and buffers by FQN, but those that a module calls non-persistent
// (non_persistent_buffers.h). A tensor with two names (tied weights) is saved once; either loads
// it.
void add_module(StateDict& state, const torch::nn::Module& module,
                const std::string& prefix = "model.");

// The optimizer's state of each parameter by the parameter's FQN in `module`; parameters that it does
// not have are an error. Groups that are added later belong to it, too, of parameters that the module has
// now. Its options (lr) are not state: they are the program's. Of torch::optim:
// AdamW, Adam, SGD, RMSprop and Adagrad, and Unimplemented for others. "step" is a number
// in all of them, so that what FusedOptimizer has saved loads into torch::optim's of the same kind, and
// what one rank has saved into a ZeRO optimizer.
void add_optimizer(StateDict& state, FusedOptimizer& optimizer, const torch::nn::Module& module,
                   const std::string& prefix = "optimizer.");
void add_optimizer(StateDict& state, torch::optim::Optimizer& optimizer,
                   const torch::nn::Module& module, const std::string& prefix = "optimizer.");
namespace checkpoint_internal {
// An optimizer's now: shards[i] is what it has of parameters[i].
struct Optimized {
  std::vector<at::Tensor> parameters, shards;
};
// States of the shards, under the names of the parameters.
void add_states(StateDict& state, FusedOptimizer& optimizer, const std::string& prefix,
                std::function<Optimized()> now, const torch::nn::Module& module);
void add_states(StateDict& state, torch::optim::Optimizer& optimizer, const std::string& prefix,
                std::function<Optimized()> now, const torch::nn::Module& module);
}  // namespace checkpoint_internal
template <typename Optimizer>
void add_optimizer(StateDict& state, ZeroRedundancyOptimizer<Optimizer>& optimizer,
                   const torch::nn::Module& module, const std::string& prefix = "optimizer.") {
  const auto now = [&optimizer] {
    return checkpoint_internal::Optimized{optimizer.parameters(), optimizer.partition().shards()};
  };
  checkpoint_internal::add_states(state, optimizer.optimizer(), prefix, now, module);
}

// Where the mesh stands in its random numbers (random.h). On a mesh of one rank also LibTorch's own
// generator of the CPU, from which plain tensors draw (a dropout of a module that is not distributed).
void add_random_state(StateDict& state, const MeshPtr& mesh, const std::string& name = "random");

}  // namespace shardweave
