#include "shardweave/dtensor/activation_checkpoint.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "c10/core/GradMode.h"
#include "shardweave/dtensor/autocast.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/engine/forward_plan.h"
#include "shardweave/dtensor/random.h"
#include "torch/csrc/autograd/autograd.h"
#include "torch/csrc/autograd/function.h"
#include "torch/csrc/autograd/functions/utils.h"
#include "torch/csrc/autograd/saved_variable.h"

namespace shardweave {
namespace {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// Where the meshes of some tensors stand.
std::vector<std::pair<MeshPtr, PhiloxState>> random_states(const std::vector<at::Tensor>& tensors) {
  std::vector<std::pair<MeshPtr, PhiloxState>> states;
  for (const at::Tensor& tensor : tensors) {
    if (!is_dtensor(tensor)) continue;
    const MeshPtr mesh = mesh_of(tensor);
    const auto same = [&](const auto& state) { return state.first == mesh; };
    if (std::none_of(states.begin(), states.end(), same)) {
      states.emplace_back(mesh, random_state(mesh));
    }
  }
  return states;
}

class RunAgain final : public dtensor_internal::RunsForward {
 public:
  RunAgain(CheckpointedFunction function, const std::vector<at::Tensor>& inputs)
      : function_(std::move(function)), states_(random_states(inputs)) {
    for (const at::Tensor& input : inputs) {
      wants_gradient_.push_back(input.defined() && input.requires_grad());
      // Not itself: written with a result of this, it would have a graph that leads back to it.
      inputs_.emplace_back(input.defined() ? input.detach() : input, /*is_output=*/false);
    }
  }

  variable_list apply(variable_list&& grads) override {
    if (c10::GradMode::is_enabled()) {
      throw Error(absl::UnimplementedError(
          "checkpoint: its gradients have no gradients of their own (create_graph)"));
    }
    std::vector<at::Tensor> inputs;
    for (size_t i = 0; i < inputs_.size(); ++i) {
      const at::Tensor input = inputs_[i].unpack();
      inputs.push_back(input.defined() ? input.detach().requires_grad_(wants_gradient_[i]) : input);
    }
    std::vector<at::Tensor> results;
    {
      std::vector<std::unique_ptr<RandomStateScope>> scopes;
      for (const auto& [mesh, state] : states_) {
        scopes.push_back(std::make_unique<RandomStateScope>(mesh, state));
      }
      const AutocastScope autocast(autocast_);
      const c10::AutoGradMode record(true);
      const dtensor_internal::RecordedLater as_before;
      results = function_(inputs);
    }
    variable_list of, with;
    for (size_t i = 0; i < results.size() && i < grads.size(); ++i) {
      if (!grads[i].defined() || !results[i].requires_grad()) continue;
      of.push_back(results[i]);
      with.push_back(grads[i]);
    }
    if (!of.empty()) torch::autograd::backward(of, with);
    variable_list result;
    for (const at::Tensor& input : inputs) {
      result.push_back(input.defined() ? input.grad() : at::Tensor());
    }
    return result;
  }
  void release_variables() override {
    for (SavedVariable& saved : inputs_) saved.reset_data();
  }
  std::string name() const override { return "CheckpointBackward"; }

 private:
  const CheckpointedFunction function_;
  const std::vector<std::pair<MeshPtr, PhiloxState>> states_;
  const Autocast autocast_ = Autocast::current();
  std::vector<SavedVariable> inputs_;
  std::vector<bool> wants_gradient_;  // by input
};

}  // namespace

std::vector<at::Tensor> checkpoint(const CheckpointedFunction& function,
                                   const std::vector<at::Tensor>& inputs) {
  if (inputs.empty()) {
    throw Error(absl::InvalidArgumentError("checkpoint: wanted at least one input, got none"));
  }
  if (!c10::GradMode::is_enabled()) return function(inputs);
  // Before it draws.
  std::shared_ptr<RunAgain> node(new RunAgain(function, inputs), torch::autograd::deleteNode);
  std::vector<at::Tensor> results;
  {
    const c10::AutoGradMode no_record(false);
    const dtensor_internal::RecordedLater recorded_later;
    results = function(inputs);
  }
  node->set_next_edges(torch::autograd::collect_next_edges(inputs));
  for (at::Tensor& result : results) {
    if (!result.defined() || !(result.is_floating_point() || result.is_complex())) {
      node->add_input_metadata(torch::autograd::Node::undefined_input());
      continue;
    }
    // A result that is an input or a parameter stays one.
    for (const at::Tensor& input : inputs) {
      if (result.is_same(input)) result = result.alias();
    }
    if (result.requires_grad() || result.is_view()) result = result.detach();
    torch::autograd::set_history(result, node);
  }
  return results;
}

at::Tensor checkpoint(const std::function<at::Tensor(const at::Tensor&)>& function,
                      const at::Tensor& input) {
  return checkpoint(
      [function](const std::vector<at::Tensor>& inputs) {
        return std::vector<at::Tensor>{function(inputs[0])};
      },
      std::vector<at::Tensor>{input})[0];
}

}  // namespace shardweave
