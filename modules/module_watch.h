// Tells which module runs, for models that nobody prepared, plain or sharded. Internal to modules/.
//
//   ModuleWatch watch(*model, listener);   // until it goes
//   model->forward(x);                     // the listener is told of every operator
//   watch.finish();                        // throws what the listener has thrown
//
// A module's forward is a plain function, but it meets the module's weight in an operator: what has
// a weight (or what was made of weights alone) and something else among its arguments is that
// module's. What Hooked<Impl> modules give is told, too. Everything else runs between two modules:
// in the innermost module that both are in. Operators are those that the program calls, not those
// that they are made of; what backward runs is left out, and so is what an optimizer does.
//
// It looks through LibTorch's RecordFunction, on this thread alone: backward on a GPU runs on threads
// of autograd's, where nothing is seen. One at a time on a thread.
#pragma once

#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/core/ivalue.h"
#include "ATen/record_function.h"
#include "absl/types/span.h"
#include "shardweave/dtensor/engine/members.h"

namespace torch::nn {
class Module;
}

namespace shardweave::modules_internal {

struct ForwardHook;

// One operator, or one result of a Hooked module ("forward", "forward[1]").
struct Step {
  std::string op;
  // The module whose weight takes part; "a = b" where it is tied. Of a Hooked module itself.
  // nullopt: of none, between two.
  std::optional<std::string> layer;
  std::string hooked;   // the innermost Hooked module that runs; "": none, or the model
  int64_t call = 1;     // which one of this operator: of this layer, or since the last one
  bool random = false;  // draws random numbers
  std::string key;      // equal for the same step of another run of the same program
};

class ModuleWatch {
 public:
  class Listener {
   public:
    virtual ~Listener() = default;
    // `step`: its index.
    virtual void begins(size_t /*step*/) {}
    virtual void ends(size_t /*step*/, const std::vector<at::Tensor>& /*results*/) {}
    // Of every operator in forward, those that others are made of and those on local parts, too.
    // `step`: the one that it is a part of, else the one that would come next. `between`: it is part of
    // a redistribution that comes before that.
    virtual bool wants_inner() const { return false; }
    virtual void inner_begins(absl::Span<const at::Tensor> /*arguments*/) {}
    virtual void inner_ends(size_t /*step*/, bool /*between*/,
                            absl::Span<const at::Tensor> /*results*/) {}
  };

  // Throws Error (FailedPrecondition) if one lives on this thread.
  ModuleWatch(torch::nn::Module& model, Listener& listener);
  ~ModuleWatch();
  ModuleWatch(const ModuleWatch&) = delete;
  ModuleWatch& operator=(const ModuleWatch&) = delete;

  // Nothing is told any more. Throws what the listener has thrown.
  void finish();

  const std::vector<Step>& steps() const { return steps_; }
  // The module that a step runs in: its layer, or the innermost one that the layers before and
  // behind it are both in. Once the layer behind it has been met. One index more: behind the last
  // step.
  std::string module_of(size_t step) const;
  // The same of what runs before a step and is none.
  std::string module_before(size_t step) const;
  // The Hooked module whose input or output is being redistributed; null: none is.
  const std::string* redistributing() const { return redistributing_; }
  // "aten::relu in 'mlp', between 'mlp.up' and 'mlp.down'".
  std::string describe(size_t step) const;
  // Whether backward has run since a layer was met while gradients were recorded.
  bool behind_backward() const { return behind_backward_; }

 private:
  class Hook;
  class Deeper;
  struct Member {
    std::vector<std::string> owners;  // FQNs of modules
    bool is_weight = false;           // before others of its module
  };
  static std::unique_ptr<at::ObserverContext> on_begin(const at::RecordFunction& function);
  static void on_end(const at::RecordFunction& function, at::ObserverContext* context);
  void begin(const at::RecordFunction& function);
  void end(const at::RecordFunction& function);
  // Exceptions do not pass through LibTorch's callbacks.
  template <typename F>
  void keep_exception(F f);

  const Member* member_of(const at::Tensor& tensor) const;
  size_t begin_step(Step step);
  void end_step(size_t step, const std::vector<at::Tensor>& results);
  // Of the layers before and behind a step; null: none.
  const std::string* layer_before(size_t step) const;
  const std::string* layer_behind(size_t step) const;

  Listener* const listener_;
  std::unordered_map<const void*, Member> members_;  // by TensorImpl, ViewFamily and StorageImpl
  std::vector<at::Tensor> derived_;                  // made of members alone; keeps addresses
  std::vector<Step> steps_;
  std::map<std::string, int64_t>
      calls_;  // of a layer's operator; of an operator since the last layer
  std::map<std::string, int64_t> layer_calls_;
  std::string last_layer_key_;
  std::vector<std::pair<ForwardHook*, std::shared_ptr<Hook>>> hooks_;
  std::vector<std::string> hooked_;  // that run

  int depth_ = 0;
  std::optional<size_t> running_;  // the step of depth 0
  const std::string* redistributing_ = nullptr;
  bool between_ = false;  // what runs at depth 0 is no operator: redistribute(), full_tensor()
  const Member* made_of_ = nullptr;  // what runs has nothing but this
  bool behind_backward_ = false;
  std::exception_ptr failure_;
  std::optional<at::CallbackHandle> handle_;
};

// FQN of the module that a parameter or buffer is in.
std::string_view owner_of(std::string_view fqn);

}  // namespace shardweave::modules_internal
