// Gradients of parameters that rest, on their way there.

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "ATen/ops/empty.h"
#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "c10/core/InferenceMode.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/engine/adopt.h"
#include "shardweave/dtensor/engine/fsdp_unit.h"
#include "shardweave/dtensor/engine/provenance.h"
#include "shardweave/dtensor/engine/redistribute.h"
#include "torch/csrc/autograd/functions/accumulate_grad.h"
#include "torch/csrc/autograd/graph_task.h"
#include "torch/csrc/autograd/variable.h"

namespace shardweave::dtensor_internal {
namespace {

using torch::autograd::variable_list;

// One node for a unit in a graph: it runs when the gradients of all of its parameters are there.
class FullyShardBackward final : public torch::autograd::Node {
 public:
  // As early as an accumulation: so that gradients that are whole do not wait.
  explicit FullyShardBackward(std::shared_ptr<FsdpUnit> unit)
      : Node(UINT64_MAX), unit_(std::move(unit)) {}
  variable_list apply(variable_list&& grads) override {
    return unit_->reduce(std::move(grads), *this);
  }
  std::string name() const override { return "FullyShardBackward"; }

 private:
  const std::shared_ptr<FsdpUnit> unit_;
};

// What is copied to the host.
class OnItsWay final : public LocalPart::Source {
 public:
  OnItsWay(std::shared_ptr<HostCopies> copies, size_t index, std::shared_ptr<MeshContext> context)
      : copies_(std::move(copies)), index_(index), context_(std::move(context)) {}
  LocalPart::State state() const override {
    return copies_->done() ? LocalPart::State::kReady : LocalPart::State::kUnderWay;
  }
  const at::Tensor& bring() override {
    if (!copies_->done()) {
      context_->before_host_reads();  // or they may be what an error has left
      copies_->wait();
    }
    return (*copies_)[index_];
  }

 private:
  const std::shared_ptr<HostCopies> copies_;
  const size_t index_;
  const std::shared_ptr<MeshContext> context_;
};

// Whether the backward that runs adds to a gradient there: it does not where autograd::grad() has asked
// for gradients, or backward() for those of other inputs.
bool is_accumulated(const torch::autograd::Node* accumulation) {
  const auto* info = torch::autograd::get_current_graph_task_exec_info();
  if (info == nullptr || info->empty()) return accumulation != nullptr;
  const auto it =
      info->find(const_cast<torch::autograd::Node*>(accumulation));  // NOLINT: it is a key
  return it != info->end() && it->second.needed_;
}

// Whether hooks look at the parameter's gradient, beside the unit's own.
bool has_hooks(const at::Tensor& parameter) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(parameter);
  return meta != nullptr && meta->cpp_hooks_list_ != nullptr && meta->cpp_hooks_list_->size() > 1;
}

// A gradient that FullyShardNoSync has left whole.
bool is_unsent(const at::Tensor& grad, const Spec& kept) {
  return grad.defined() && is_dtensor(grad) && !grad.requires_grad() &&
         meta_of(grad).spec->layout != kept.layout;
}

// What adds to a gradient behind this edge, if this backward does. Null: it is another node.
const torch::autograd::AccumulateGrad* accumulation_of(const torch::autograd::Edge& edge) {
  if (!is_accumulated(edge.function.get())) return nullptr;
  return dynamic_cast<const torch::autograd::AccumulateGrad*>(edge.function.get());
}

}  // namespace

std::shared_ptr<torch::autograd::Node> FsdpUnit::node(size_t index, const at::Tensor& handle) {
  const bool is_copy = !parameters_[index].tensor().is_same(handle);
  const int graph_task = torch::autograd::get_current_graph_task_id();
  std::shared_ptr<torch::autograd::Node> node = is_copy ? nullptr : node_.lock();
  if (node != nullptr && node->next_edge(index).is_valid()) return node;
  // An edge calls the hooks of its parameter, with a gradient or without: there is one only to what
  // is used.
  if (is_copy && is_elsewhere() && handle.is_leaf()) {
    accumulate_beside(row_[index].whole->device, handle);
  }
  const torch::autograd::Edge edge = torch::autograd::impl::gradient_edge(handle);
  // Not to a node of a graph that is going backward now, which has counted its edges.
  if (node != nullptr && graph_task == node_made_in_) {
    // Not set_next_edge(), which wants to be called before others know the node: all edges here lead
    // to accumulations, and none changes how far it is from the leaves.
    node->next_edges()[index] = edge;
    return node;
  }
  node = std::shared_ptr<torch::autograd::Node>(new FullyShardBackward(shared_from_this()),
                                                torch::autograd::deleteNode);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    node->add_next_edge(i == index ? edge : torch::autograd::Edge());
    const Spec& used = *row_[i].whole;
    node->add_input_metadata(at::TensorOptions(used.dtype).device(used.device),
                             c10::fromIntArrayRefSlow(array(used.sizes)),
                             /*is_tensor_subclass=*/false, /*is_nested=*/false, used.dtype);
  }
  if (!is_copy) {
    node_ = node;
    node_made_in_ = graph_task;
  }
  return node;
}

// Whether a gradient that is for this node stays whole: one that is asked for (autograd::grad()) does not.
bool FsdpUnit::holds(const torch::autograd::Node* accumulation) const {
  return state_->no_sync > 0 && !is_elsewhere() && !c10::GradMode::is_enabled() &&
         is_accumulated(accumulation);
}

at::Tensor FsdpUnit::resting_gradient(size_t index, const at::Tensor& grad) {
  if (!grad.defined()) return grad;
  const Spec& kept = *row_[index].kept;
  if (FsdpState::in_backward_now()) state_->end_with_backward();
  if (state_->no_sync > 0) {
    const at::Tensor parameter = parameters_[index].tensor();
    if (holds(torch::autograd::impl::try_get_grad_accumulator(parameter).get()) &&
        (!parameter.grad().defined() || is_unsent(parameter.grad(), kept))) {
      return as_dtensor(grad, context_).to(kept.dtype);
    }
  }
  // On the CPU those of several would be branches, for another thread than the device's.
  if (is_elsewhere() && c10::GradMode::is_enabled()) {
    throw Error(kFullyShard, absl::UnimplementedError(absl::StrCat(
                                 "gradients of gradients (create_graph) of the parameter '",
                                 parameter_name(index), "', which rests on the CPU and is used on ",
                                 row_[index].whole->device.str())));
  }
  at::Tensor there = as_dtensor(grad, context_);
  const bool has_arrived = meta_of(there).spec->layout == kept.layout;
  if (has_arrived && there.scalar_type() == kept.dtype) return there;
  there = there.to(reduce_dtype());
  if (!has_arrived) {
    there = c10::GradMode::is_enabled() ? redistribute(there, kept.layout, options_.where)
                                        : redistributed(there, kept.layout, cause());
  }
  return there.to(kept.dtype);
}

// Gradients are packed where the parameters were, or in place of them: nobody needs those any more.
at::Tensor FsdpUnit::gradient_buffer(int64_t numel, const at::TensorOptions& options) {
  is_full_ = false;
  if (has_room_for(options)) return flat_.narrow(0, 0, numel);
  reshard();
  at::Tensor buffer = at::empty({numel}, options);
  FsdpCounters& counters = state_->counters;
  counters.gathered_bytes += static_cast<int64_t>(buffer.nbytes());
  counters.peak_gathered_bytes = std::max(counters.peak_gathered_bytes, counters.gathered_bytes);
  return buffer;
}

// Those that it takes become undefined; null: none.
std::shared_ptr<UnitGradients> FsdpUnit::send(variable_list& grads) {
  state_->finish_gradients(1);
  // Those of the unit before have had this one's whole backward. Now that its own gradients are there
  // beside it, they would be a fourth unit in memory.
  state_->wait_for_sent();
  finish_gather();
  if (sending_ != nullptr) std::shared_ptr<UnitGradients>(sending_)->give_up();
  bool from_flat = false;
  int64_t bytes = 0;
  auto gradients = std::make_shared<UnitGradients>(
      row_, grads, reduce_dtype(),
      [&](int64_t numel, const at::TensorOptions& options) {
        from_flat = has_room_for(options);
        at::Tensor buffer = gradient_buffer(numel, options);
        bytes = static_cast<int64_t>(buffer.nbytes());
        return buffer;
      },
      lane(FsdpState::Way::kToHost), cause(), [this](size_t i) { return parameter_name(i); });
  if (gradients->taken().empty()) return nullptr;
  ++state_->counters.reduce_scatters;
  state_->sending_.push_back(gradients);
  if (FsdpState::in_backward_now()) state_->end_with_backward();
  if (from_flat) {
    sending_ = gradients;
    gradients->when_sent(
        [weak = weak_from_this()] {
          const std::shared_ptr<FsdpUnit> unit = weak.lock();
          if (unit == nullptr) return;
          unit->sending_.reset();
          unit->reshard();
        },
        /*early=*/true);
  } else {
    gradients->when_sent(
        [weak = std::weak_ptr<FsdpState>(state_), bytes] {
          const std::shared_ptr<FsdpState> state = weak.lock();
          if (state != nullptr) state->counters.gathered_bytes -= bytes;
        },
        /*early=*/false);  // it is kept until then
  }
  return gradients;
}

// Of gradients on the device, to the CPU.
void FsdpUnit::begin_copies(variable_list& grads) {
  std::vector<size_t> from;
  std::vector<at::Tensor> parts;
  for (size_t i = 0; i < grads.size(); ++i) {
    if (!grads[i].defined()) continue;
    from.push_back(i);
    parts.push_back(meta_of(grads[i]).local());
  }
  const auto copies = std::make_shared<HostCopies>(
      state_->lane(row_[0].whole->device, FsdpState::Way::kToHost), parts);
  for (size_t k = 0; k < from.size(); ++k) {
    at::Tensor& grad = grads[from[k]];
    const DTensorMeta& meta = meta_of(grad);
    const Spec& has = *meta.spec;
    at::Tensor there = wrap(
        LocalPart(std::make_shared<OnItsWay>(copies, k, context_)),
        context_->intern(has.layout, has.sizes, has.strides, has.dtype, row_[from[k]].kept->device),
        context_);
    meta_of(there).came_from(provenance_of(meta));
    grad = std::move(there);
  }
}

variable_list FsdpUnit::reduce(variable_list&& grads, const torch::autograd::Node& node) {
  // What is used from now on is of another graph.
  node_.reset();
  state_->end_with_backward();
  if (c10::GradMode::is_enabled()) {  // gradients of these are wanted
    variable_list result(parameters_.size());
    for (size_t i = 0; i < grads.size(); ++i) result[i] = resting_gradient(i, grads[i]);
    return result;
  }
  for (at::Tensor& grad : grads) {
    if (grad.defined()) grad = as_dtensor(grad, context_);
  }
  if (state_->no_sync > 0) {
    variable_list held = hold(grads, node);
    if (std::any_of(grads.begin(), grads.end(), [](const at::Tensor& g) { return g.defined(); })) {
      grads = bring_to_rest(std::move(grads));
    } else {
      reshard();
    }
    for (size_t i = 0; i < held.size(); ++i) {
      if (held[i].defined()) grads[i] = std::move(held[i]);
    }
    return std::move(grads);
  }
  std::vector<at::Tensor> with_held = add_held(grads, node);
  variable_list result = bring_to_rest(std::move(grads));
  // Not before: a backward that fails leaves what was there.
  for (at::Tensor& leaf : with_held) leaf.mutable_grad().reset();
  return result;
}

// Takes those that are to stay whole: not where a gradient is that has been sent. In memory of their own,
// for autograd keeps them and adds to them in place.
variable_list FsdpUnit::hold(variable_list& grads, const torch::autograd::Node& node) {
  variable_list held(grads.size());
  for (size_t i = 0; i < grads.size(); ++i) {
    const auto* accumulation = accumulation_of(node.next_edge(i));
    if (!grads[i].defined() || accumulation == nullptr || !holds(accumulation)) continue;
    const at::Tensor& there = accumulation->variable.grad();
    if (there.defined() && !is_unsent(there, *row_[i].kept)) continue;
    const DTensorMeta& meta = meta_of(grads[i]);
    const bool is_of_unit = meta.part.state() == LocalPart::State::kGatheredOnUse;
    if (const at::Tensor& local = meta.local(); is_of_unit || local.storage().use_count() > 1) {
      at::Tensor copy = wrap(local.clone(), meta.spec, context_);
      meta_of(copy).came_from(provenance_of(meta));
      grads[i] = std::move(copy);
    }
    held[i] = with_dtype(std::exchange(grads[i], {}), row_[i].kept->dtype);
  }
  return held;
}

// What was held, to the gradients of this backward: then one reduction brings both. Of which leaves it is.
std::vector<at::Tensor> FsdpUnit::add_held(variable_list& grads,
                                           const torch::autograd::Node& node) {
  std::vector<at::Tensor> leaves;
  for (size_t i = 0; i < grads.size(); ++i) {
    const auto* accumulation = accumulation_of(node.next_edge(i));
    if (accumulation == nullptr) continue;
    const at::Tensor& held = accumulation->variable.grad();
    // Hooks have seen what is held; it goes its own way, at the end.
    if (!is_unsent(held, *row_[i].kept) || has_hooks(accumulation->variable)) continue;
    grads[i] = grads[i].defined() ? held + grads[i] : held;
    leaves.push_back(accumulation->variable);
  }
  return leaves;
}

void FsdpUnit::send_held() {
  if (is_summoned()) return;
  const c10::InferenceMode normal(false);
  const c10::AutoGradMode no_grad(false);
  variable_list held(parameters_.size());
  bool is_any = false;
  for (size_t i = 0; i < held.size(); ++i) {
    const at::Tensor parameter = parameters_[i].tensor();
    if (!parameter.defined() || !is_unsent(parameter.grad(), *row_[i].kept)) continue;
    held[i] = parameter.grad();
    is_any = true;
  }
  if (!is_any) return;
  const variable_list sent = bring_to_rest(std::move(held));
  for (size_t i = 0; i < sent.size(); ++i) {
    if (sent[i].defined()) parameters_[i].tensor().mutable_grad() = sent[i];
  }
}

// Gradients, as DTensors, to where the parameters rest.
variable_list FsdpUnit::bring_to_rest(variable_list&& grads) {
  variable_list result = std::move(grads);
  std::vector<Layout> layouts;
  for (size_t i = 0; i < result.size(); ++i) layouts.push_back(row_[i].kept->layout);
  const std::shared_ptr<UnitGradients> gradients = send(result);
  reshard();
  // What it has not taken.
  const auto become = [&](at::ScalarType dtype) {
    for (at::Tensor& grad : result) {
      if (grad.defined()) grad = with_dtype(grad, dtype);
    }
  };
  become(reduce_dtype());
  bring_to(result, layouts, cause());
  become(row_[0].kept->dtype);
  if (is_elsewhere()) begin_copies(result);
  if (gradients != nullptr) {
    for (const size_t i : gradients->taken()) result[i] = gradients->arriving(i);
  }
  return result;
}

}  // namespace shardweave::dtensor_internal
