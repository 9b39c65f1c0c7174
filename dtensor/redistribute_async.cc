#include "shardweave/dtensor/redistribute_async.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "shardweave/dtensor/engine/adopt.h"
#include "shardweave/dtensor/engine/fused.h"
#include "shardweave/dtensor/engine/provenance.h"
#include "shardweave/dtensor/engine/redistribute.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "shardweave/dtensor/observe/observer.h"
#include "torch/csrc/autograd/function.h"
#include "torch/csrc/autograd/functions/utils.h"

namespace shardweave {
namespace {

using namespace dtensor_internal;

using torch::autograd::variable_list;

constexpr char kAsync[] = "redistribute_async";
constexpr char kAll[] = "redistribute_all";

// Without autograd; those that are in their layout already come back as they are.
std::vector<at::Tensor> redistributed_all(absl::Span<const at::Tensor> tensors,
                                          absl::Span<const Layout> layouts, const Cause& cause) {
  std::vector<at::Tensor> results(tensors.begin(), tensors.end());
  std::vector<size_t> moving;
  std::vector<InFlight> in_flight;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const DTensorMeta& meta = meta_of(tensors[i]);
    if (meta.spec->layout == layouts[i]) continue;
    moving.push_back(i);
    in_flight.push_back(moving_to(meta, layouts[i]));
  }
  run_plans(in_flight, cause);
  for (size_t k = 0; k < moving.size(); ++k) {
    const DTensorMeta& meta = meta_of(tensors[moving[k]]);
    results[moving[k]] =
        wrap(std::move(in_flight[k].local), std::move(in_flight[k].target), meta.context);
    meta_of(results[moving[k]]).came_from(in_flight[k].provenance);
  }
  return results;
}

void record(absl::Span<const at::Tensor> tensors, std::vector<at::Tensor>& results,
            std::source_location where);

// Of one or several tensors: brings their gradients back where they were. With create_graph that is
// recorded in turn.
class RedistributeBackward final : public torch::autograd::Node {
 public:
  RedistributeBackward(std::vector<Layout> layouts,
                       std::vector<std::shared_ptr<MeshContext>> contexts,
                       std::source_location where)
      : layouts_(std::move(layouts)), contexts_(std::move(contexts)), where_(where) {}

  variable_list apply(variable_list&& grads) override {
    variable_list result(grads.size());
    std::vector<size_t> given;
    std::vector<at::Tensor> moving;
    std::vector<Layout> layouts;
    for (size_t i = 0; i < grads.size(); ++i) {
      if (!grads[i].defined()) continue;
      given.push_back(i);
      moving.push_back(as_dtensor(grads[i], contexts_[i]));
      layouts.push_back(layouts_[i]);
    }
    std::vector<at::Tensor> moved;
    {
      const c10::AutoGradMode no_grad(false);
      moved =
          redistributed_all(moving, layouts, {.name = "redistribute backward", .where = where_});
    }
    if (c10::GradMode::is_enabled()) record(moving, moved, where_);
    for (size_t k = 0; k < given.size(); ++k) result[given[k]] = std::move(moved[k]);
    return result;
  }
  std::string name() const override { return "RedistributeBackward"; }

 private:
  const std::vector<Layout> layouts_;
  const std::vector<std::shared_ptr<MeshContext>> contexts_;
  const std::source_location where_;
};

// Makes results[i] a function of tensors[i], for those that require grad and are not the same.
void record(absl::Span<const at::Tensor> tensors, std::vector<at::Tensor>& results,
            std::source_location where) {
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor*> outputs;
  std::vector<Layout> layouts;
  std::vector<std::shared_ptr<MeshContext>> contexts;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (results[i].is_same(tensors[i]) || !tensors[i].requires_grad()) continue;
    inputs.push_back(tensors[i]);
    outputs.push_back(&results[i]);
    layouts.push_back(gradient_layout(meta_of(tensors[i]).spec->layout));
    contexts.push_back(meta_of(tensors[i]).context);
  }
  if (inputs.empty()) return;
  std::shared_ptr<RedistributeBackward> node(
      new RedistributeBackward(std::move(layouts), std::move(contexts), where),
      torch::autograd::deleteNode);
  node->set_next_edges(torch::autograd::collect_next_edges(inputs));
  for (at::Tensor* output : outputs) torch::autograd::set_history(*output, node);
}

// What is gathered on use may be emptied while it travels.
at::Tensor local_to_keep(const DTensorMeta& meta) {
  const bool may_go = meta.part.state() == LocalPart::State::kGatheredOnUse;
  return may_go ? meta.local().clone() : meta.local();
}

at::Tensor part_to_watch(const DTensorMeta& meta) {
  return meta.part.state() == LocalPart::State::kGatheredOnUse ? at::Tensor() : meta.local();
}

int64_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : tensor._version();
}

}  // namespace

struct PendingTensor::State {
  State(const at::Tensor& tensor, const Layout& layout, std::source_location where_in)
      : source(tensor),
        where(where_in),
        context(meta_of(tensor).context),
        target(context->with_layout(*meta_of(tensor).spec, layout)),
        plan(plan_for(*context, meta_of(tensor).spec, target)),
        run(std::in_place, *context, *plan, local_to_keep(meta_of(tensor)), target->sizes),
        provenance(provenance_of(meta_of(tensor))),
        part(part_to_watch(meta_of(tensor))),
        versions(versions_now()),
        records(c10::GradMode::is_enabled() && tensor.requires_grad()) {
    advance();
  }
  ~State() {
    if (moving) (void)work.wait();  // the network still uses the memory
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  void advance() {
    span.reset();
    moving = run->next(&transfer);
    if (!moving) return;
    span.emplace(*context, Cause{.name = kAsync, .where = where},
                 [this] { return run->sending(); });
    const About about(*context, provenance);
    work = send(*context, transfer, kAsync);
  }

  // Whether the collective under way is the last of the plan.
  bool is_last() const {
    const auto local = [](const RedistributeStep& step) { return step.is_local(); };
    return std::all_of(plan->plan.steps.begin() + run->next_step(), plan->plan.steps.end(), local);
  }

  void finish() {
    while (moving) {
      throw_if_error(work.wait());
      run->arrived(transfer);
      advance();
    }
    if (versions_now() != versions || provenance_of(meta_of(source)) != provenance) {
      throw Error(kAsync, absl::FailedPreconditionError(absl::StrCat(
                              meta_of(source).spec->to_string(),
                              " was written while it was being sent; wait for it before")));
    }
    if (target == meta_of(source).spec) {
      const c10::AutoGradMode as_begun(records);
      result = redistribute(source, target->layout, where);
    } else {
      const c10::AutoGradMode no_grad(false);
      std::vector<at::Tensor> arrived = {
          wrap(owned(run->local(), meta_of(source).local()), target, context)};
      meta_of(arrived[0]).came_from(provenance);
      if (records) record(absl::MakeConstSpan(&source, 1), arrived, where);
      result = std::move(arrived[0]);
    }
    // Whoever keeps this for the result keeps nothing else.
    transfer = CollectiveTransfer();
    run.reset();
    source.reset();
    part.reset();
  }

  // Of the handle, and of its memory, which is written past it through to_local() and data().
  std::pair<int64_t, int64_t> versions_now() const {
    return {version_of(source), part.defined() ? version_of(part) : 0};
  }

  at::Tensor source;  // undefined: it is there
  const std::source_location where;
  const std::shared_ptr<MeshContext> context;
  const SpecRef target;
  const PlanRef plan;
  std::optional<PlanRun> run;
  const uint64_t provenance;
  at::Tensor part;  // undefined: it is gathered for each use
  const std::pair<int64_t, int64_t> versions;
  const bool records;
  bool moving = false;
  CollectiveTransfer transfer;  // under way, if `moving`
  std::optional<CollectiveSpan> span;
  TensorWork work;
  at::Tensor result;  // undefined: not yet
};

PendingTensor::PendingTensor(std::shared_ptr<State> state) : state_(std::move(state)) {}

at::Tensor PendingTensor::wait() {
  if (!state_->result.defined()) state_->finish();
  return state_->result;
}

bool PendingTensor::done() const {
  return state_->result.defined() || !state_->moving || (state_->is_last() && state_->work.done());
}

PendingTensor redistribute_async(const at::Tensor& tensor, const Layout& layout,
                                 std::source_location where) {
  const Layout to = layout_for(*checked_meta(tensor, kAsync).context, layout, tensor.dim(), kAsync);
  return PendingTensor(std::make_shared<PendingTensor::State>(tensor, to, where));
}

PendingTensor redistribute_async(const at::Tensor& tensor, const Placements& placements,
                                 std::source_location where) {
  return redistribute_async(tensor, Layout(placements), where);
}

std::vector<at::Tensor> redistribute_all(absl::Span<const at::Tensor> tensors,
                                         absl::Span<const Layout> layouts,
                                         std::source_location where) {
  if (tensors.size() != layouts.size()) {
    throw Error(kAll, absl::InvalidArgumentError(absl::StrCat(tensors.size(), " tensors, but ",
                                                              layouts.size(), " layouts")));
  }
  std::vector<Layout> to;
  for (size_t i = 0; i < tensors.size(); ++i) {
    to.push_back(
        layout_for(*checked_meta(tensors[i], kAll).context, layouts[i], tensors[i].dim(), kAll));
  }
  std::vector<at::Tensor> results;
  {
    const c10::AutoGradMode no_grad(false);
    results = redistributed_all(tensors, to, {.name = kAll, .where = where});
  }
  if (c10::GradMode::is_enabled()) record(tensors, results, where);
  // As from redistribute(): never the tensor itself.
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (results[i].is_same(tensors[i])) results[i] = redistribute(tensors[i], to[i], where);
  }
  return results;
}

}  // namespace shardweave
