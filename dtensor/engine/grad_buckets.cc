#include "shardweave/dtensor/engine/grad_buckets.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <utility>

#include "ATen/Functions.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "shardweave/dtensor/engine/checksum.h"
#include "shardweave/dtensor/engine/flat_row.h"
#include "shardweave/dtensor/engine/fsdp_unit.h"
#include "shardweave/dtensor/engine/provenance.h"
#include "torch/csrc/autograd/function_hook.h"
#include "torch/csrc/autograd/variable.h"

namespace shardweave::dtensor_internal {
namespace {

using torch::autograd::variable_list;

// After a gradient has been accumulated.
class Came final : public torch::autograd::FunctionPostHook {
 public:
  Came(std::weak_ptr<GradBuckets> buckets_in, std::function<void(GradBuckets&)> came)
      : buckets(std::move(buckets_in)), came_(std::move(came)) {}
  variable_list operator()(const variable_list& outputs, const variable_list& /*inputs*/) override {
    if (const std::shared_ptr<GradBuckets> alive = buckets.lock()) came_(*alive);
    return outputs;
  }

  const std::weak_ptr<GradBuckets> buckets;

 private:
  const std::function<void(GradBuckets&)> came_;
};

int64_t gradient_version(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : tensor._version();
}

constexpr Sharing kOneCollective = {.max_tensor = INT64_MAX, .max_bucket = INT64_MAX};

}  // namespace

bool gradient_moves(const at::Tensor& parameter) {
  if (!is_dtensor(parameter) || !is_dtensor(parameter.grad())) return false;
  const DTensorMeta& have = checked_meta(parameter.grad(), "finish_grad_sync");
  return have.spec->layout != meta_of(parameter).spec->layout;
}

InFlight moving_gradient(const at::Tensor& parameter) {
  at::Tensor gradient = parameter.grad();
  const Layout from = checked_meta(gradient, "finish_grad_sync").spec->layout;
  for (const std::shared_ptr<GradBuckets>& buckets : buckets_of({parameter})) {
    gradient = with_dtype(gradient, buckets->travels_as(parameter, from));
  }
  InFlight moving = moving_to(meta_of(gradient), meta_of(parameter).spec->layout);
  moving.parameter = parameter_of(meta_of(parameter));
  return moving;
}

void set_gradient(const at::Tensor& parameter, InFlight arrived) {
  // Not where it stands: what else has the memory of the gradient, or is a view of it, would no
  // longer be what it is.
  const DTensorMeta& have = meta_of(parameter.grad());
  const std::shared_ptr<MeshContext> context = have.context;
  at::Tensor local = std::move(arrived.local);
  if (local.is_alias_of(have.local())) local = local.clone();
  parameter.mutable_grad() =
      with_dtype(wrap(std::move(local), std::move(arrived.target), context), have.spec->dtype);
  meta_of(parameter.grad()).came_from(arrived.provenance);
}

GradBuckets::GradBuckets(std::vector<at::Tensor> parameters, int64_t bucket_bytes,
                         std::optional<at::ScalarType> reduce_dtype,
                         std::shared_ptr<GradientHook> hook)
    : bucket_bytes_(bucket_bytes), reduce_dtype_(reduce_dtype), hook_(std::move(hook)) {
  for (at::Tensor& tensor : parameters) {
    parameters_.emplace_back();
    parameters_.back().name = parameter_of(meta_of(tensor));
    parameters_.back().tensor = std::move(tensor);
  }
}

void GradBuckets::attach() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& p = parameters_[i];
    hook(i);
    std::vector<std::weak_ptr<GradBuckets>>& known = meta_of(p.tensor).context->gradients.buckets;
    std::erase_if(known, [](const std::weak_ptr<GradBuckets>& other) { return other.expired(); });
    const bool is_known = std::any_of(
        known.begin(), known.end(), [&](const auto& other) { return other.lock().get() == this; });
    if (!is_known) known.push_back(weak_from_this());
  }
}

void GradBuckets::hook(size_t index) {
  Parameter& p = parameters_[index];
  if (p.accumulator != nullptr) p.accumulator->del_post_hook(p.hook);
  p.spec = meta_of(p.tensor).spec;
  // A tensor does not keep it.
  p.accumulator = torch::autograd::impl::grad_accumulator(p.tensor);
  p.hook = p.accumulator->add_post_hook(std::make_unique<Came>(
      weak_from_this(), [index](GradBuckets& buckets) { buckets.came(index); }));
}

// It leaves with land(), and counts where buckets are planned, as on the ranks that have seen it.
void GradBuckets::has_come_unseen(size_t index) {
  const Lock lock(*this);
  Parameter& p = parameters_[index];
  if (paused_ > 0 || p.came > 0 || !is_dtensor(p.tensor.grad())) return;
  p.came = 1;
  p.seen = meta_of(p.tensor.grad()).spec->layout;
  order_.push_back(index);
}

void GradBuckets::check_in_place(const std::vector<at::Tensor>& parameters) {
  std::vector<std::shared_ptr<GradBuckets>> all;
  const MeshContext* last = nullptr;
  for (const at::Tensor& parameter : parameters) {
    if (!is_dtensor(parameter)) continue;
    const MeshContext* context = meta_of(parameter).context.get();
    if (context == last) continue;
    last = context;
    for (const std::weak_ptr<GradBuckets>& known : context->gradients.buckets) {
      std::shared_ptr<GradBuckets> alive = known.lock();
      if (alive != nullptr && std::find(all.begin(), all.end(), alive) == all.end()) {
        all.push_back(std::move(alive));
      }
    }
  }
  if (all.empty()) return;
  absl::flat_hash_set<const c10::TensorImpl*> given;
  for (const at::Tensor& parameter : parameters) given.insert(parameter.unsafeGetTensorImpl());
  for (const std::shared_ptr<GradBuckets>& buckets : all) {
    std::vector<size_t> loaded;
    for (size_t i = 0; i < buckets->parameters_.size(); ++i) {
      const Parameter& p = buckets->parameters_[i];
      const bool is_in_place =
          torch::autograd::impl::try_get_grad_accumulator(p.tensor) == p.accumulator;
      if (is_in_place || !given.contains(p.tensor.unsafeGetTensorImpl())) continue;
      // set_(), as torch::load() calls it, only has new values come in here. What has come since has not
      // been seen.
      if (is_dtensor(p.tensor) && meta_of(p.tensor).spec == p.spec) {
        loaded.push_back(i);
        continue;
      }
      throw Error("finish_grad_sync",
                  absl::FailedPreconditionError(absl::StrCat(
                      "the parameter '", p.name,
                      "' was moved or became of another dtype since its GradSync was made "
                      "(module->to(), set_data()); make the GradSync after that")));
    }
    // The last first, as backward mostly comes to them.
    for (auto i = loaded.rbegin(); i != loaded.rend(); ++i) {
      buckets->hook(*i);
      buckets->has_come_unseen(*i);
    }
  }
}

GradBuckets::~GradBuckets() {
  for (Parameter& p : parameters_) {
    if (p.accumulator != nullptr) p.accumulator->del_post_hook(p.hook);
  }
}

GradBuckets::Lock::Lock(GradBuckets& buckets) : buckets_(buckets) {
  if (buckets.inside_.load() == std::this_thread::get_id()) {
    throw Error("GradSync",
                absl::FailedPreconditionError(
                    "it is asked to bring gradients inside of its gradient hook; wanted "
                    "that after it: begin() and finish() may use the bucket, NoSync and "
                    "the counts"));
  }
  buckets.mutex_.lock();
  buckets.inside_ = std::this_thread::get_id();
}

GradBuckets::Lock::~Lock() {
  buckets_.inside_ = std::thread::id();
  buckets_.mutex_.unlock();
}

void GradBuckets::pause() {
  ++paused_;
}

void GradBuckets::resume() {
  --paused_;
}

at::ScalarType GradBuckets::travels_as(const at::Tensor& parameter, const Layout& from) const {
  const DTensorMeta& meta = meta_of(parameter);
  const at::ScalarType dtype = meta.spec->dtype;
  if (!reduce_dtype_.has_value() || !is_castable(dtype)) return dtype;
  const DeviceMesh& mesh = meta.context->mesh();
  for (int m = 0; m < mesh.ndim(); ++m) {
    const bool is_sent = mesh.size(m) > 1 && !from[m].is_replicate();
    if (is_sent && from[m] != meta.spec->layout[m]) return *reduce_dtype_;
  }
  return dtype;
}

int64_t GradBuckets::gradient_bytes(const at::Tensor& parameter) const {
  const Spec& spec = *meta_of(parameter).spec;
  return spec.numel() * static_cast<int64_t>(c10::elementSize(reduce_dtype_.value_or(spec.dtype)));
}

GradBuckets::Counts GradBuckets::counts() const {
  return {num_buckets_, left_in_backward_};
}

void GradBuckets::came(size_t index) {
  const Lock lock(*this);
  if (paused_ > 0) return;
  Parameter& p = parameters_[index];
  if (!p.tensor.grad().defined()) return;  // a formula had none for it
  if (!is_dtensor(p.tensor.grad())) {
    surprised_ = true;
    return;
  }
  if (p.came++ == 0) order_.push_back(index);
  p.seen = meta_of(p.tensor.grad()).spec->layout;
  if (!planned_) return;
  if (p.bucket < 0) {
    // Of one that was not there, or where it belongs, when the buckets were made.
    surprised_ |= *p.seen != meta_of(p.tensor).spec->layout;
    return;
  }
  Bucket& bucket = buckets_[static_cast<size_t>(p.bucket)];
  if (p.came != p.expected) return;
  if (p.seen != p.planned) {
    surprised_ = true;
    bucket.as_planned = false;
  }
  --bucket.missing;
  const Cause cause = {.name = "finish_grad_sync", .syncs_gradients = true};
  // One that has come otherwise holds up those behind it: what leaves here is as planned, and whole,
  // so that discard() knows what other ranks have sent.
  for (; next_ < buckets_.size(); ++next_) {
    Bucket& next = buckets_[next_];
    if (next.missing > 0 || !next.as_planned) return;
    next.as_planned = std::all_of(next.members.begin(), next.members.end(),
                                  [&](size_t i) { return is_as_planned(parameters_[i]); });
    surprised_ |= !next.as_planned;
    if (!next.as_planned) return;
    leave(next, cause);
    ++left_in_backward_;
  }
}

bool GradBuckets::is_as_planned(const Parameter& p) {
  // One with a graph (create_graph) keeps that: finish_grad_sync() brings it.
  return gradient_moves(p.tensor) && !p.tensor.grad().requires_grad() &&
         meta_of(p.tensor.grad()).spec->layout == p.planned;
}

void GradBuckets::leave(Bucket& bucket, const Cause& cause) {
  const c10::AutoGradMode no_grad(false);
  std::vector<InFlight> in_flight;
  std::vector<size_t> sent;
  for (const size_t i : bucket.members) {
    const Parameter& p = parameters_[i];
    if (!is_as_planned(p)) continue;
    in_flight.push_back(moving_gradient(p.tensor));
    sent.push_back(i);
  }
  if (in_flight.empty()) return;
  start(bucket, std::move(in_flight), cause);
  // Only now: a bucket that could not leave has sent nothing.
  for (const size_t i : sent) {
    Parameter& p = parameters_[i];
    p.sent = p.tensor.grad();
    p.version = gradient_version(p.sent);
    p.local = meta_of(p.sent).local();
    p.local_version = gradient_version(p.local);
  }
  bucket.sent = std::move(sent);
}

void GradBuckets::leave_without_values(Bucket& bucket, const Cause& cause) {
  std::vector<InFlight> in_flight;
  for (const size_t i : bucket.members) {
    const Parameter& p = parameters_[i];
    const DTensorMeta& meta = meta_of(p.tensor);
    const Spec& its = *meta.spec;
    const SpecRef spec = meta.context->intern(*p.planned, its.sizes, its.strides,
                                              travels_as(p.tensor, *p.planned), its.device);
    const at::Tensor nothing =
        at::full(array(spec->local_sizes), std::numeric_limits<double>::quiet_NaN(),
                 at::TensorOptions().dtype(spec->dtype).device(spec->device));
    in_flight.push_back(moving_to(meta_of(wrap(nothing, spec, meta.context)), meta.spec->layout));
    in_flight.back().parameter = parameter_of(meta);
    in_flight.back().provenance = kRanksOwn;  // it meets what others have from their backward
  }
  start(bucket, std::move(in_flight), cause);
}

void GradBuckets::start(Bucket& bucket, std::vector<InFlight> in_flight, const Cause& cause) {
  if (bucket.uses_hook) {
    const auto index = static_cast<size_t>(&bucket - buckets_.data());
    bucket.hook_run = std::make_unique<HookRun>(*hook_, std::move(in_flight), index, cause);
  } else {
    bucket.run = std::make_unique<PlansUnderWay>(std::move(in_flight), cause, kOneCollective);
  }
}

MeshContext& GradBuckets::context() const {
  return *meta_of(parameters_[0].tensor).context;
}

// Of all of them, before anything is taken from one: an error leaves the gradients as they are.
void GradBuckets::finish_hooks(bool is_discarded, const Cause& cause) {
  std::exception_ptr error;
  bool is_any = false;
  for (Bucket& bucket : buckets_) {
    is_any |= bucket.uses_hook;
    if (bucket.hook_run == nullptr) continue;
    try {
      std::vector<InFlight> arrived = bucket.hook_run->finish(is_discarded);
      bucket.arrived = std::move(arrived);
      for (const size_t i : bucket.sent) {
        const Parameter& p = parameters_[i];
        if (is_discarded || is_as_sent(p)) continue;
        throw Error(cause.name,
                    absl::FailedPreconditionError(absl::StrCat(
                        "the gradient of '", std::string(parameter_of(meta_of(p.tensor))),
                        "' was written or taken away after it had left through the gradient hook '",
                        hook_->name(),
                        "'; let several backwards be under a NoSync but for the last, and do the "
                        "rest after finish_grad_sync()")));
      }
    } catch (...) {
      if (error == nullptr) error = std::current_exception();
    }
  }
  if (is_any) agree_on_hooks(context(), hook_->name(), error, cause);
}

void GradBuckets::bring_through_hook(const std::vector<at::Tensor>& parameters,
                                     const Cause& cause) {
  const Lock lock(*this);
  const c10::AutoGradMode no_grad(false);
  struct Some {
    std::vector<size_t> members;  // of `parameters`
    std::vector<InFlight> in_flight;
    int64_t bytes = 0;
  };
  std::vector<Some> buckets;
  for (size_t i = 0; i < parameters.size(); ++i) {
    InFlight gradient = moving_gradient(parameters[i]);
    auto bucket = std::find_if(buckets.begin(), buckets.end(), [&](const Some& b) {
      return share_hook(b.in_flight[0], gradient) && b.bytes + gradient.bytes <= bucket_bytes_;
    });
    if (bucket == buckets.end()) bucket = buckets.emplace(buckets.end());
    bucket->members.push_back(i);
    bucket->bytes += gradient.bytes;
    bucket->in_flight.push_back(std::move(gradient));
  }
  std::vector<std::unique_ptr<HookRun>> runs;
  for (Some& bucket : buckets) {
    runs.push_back(std::make_unique<HookRun>(*hook_, std::move(bucket.in_flight),
                                             buckets_.size() + runs.size(), cause));
  }
  std::exception_ptr error;
  std::vector<std::vector<InFlight>> arrived(runs.size());
  for (size_t b = 0; b < runs.size(); ++b) {
    try {
      arrived[b] = runs[b]->finish(/*is_discarded=*/false);
    } catch (...) {
      if (error == nullptr) error = std::current_exception();
    }
  }
  agree_on_hooks(context(), hook_->name(), error, cause);
  for (size_t b = 0; b < runs.size(); ++b) {
    for (size_t k = 0; k < arrived[b].size(); ++k) {
      set_gradient(parameters[buckets[b].members[k]], std::move(arrived[b][k]));
    }
  }
}

bool GradBuckets::is_as_sent(const Parameter& p) {
  return p.tensor.grad().is_same(p.sent) && gradient_version(p.sent) == p.version &&
         meta_of(p.sent).local().is_same(p.local) && gradient_version(p.local) == p.local_version;
}

void GradBuckets::discard() {
  const Lock lock(*this);
  const c10::AutoGradMode no_grad(false);
  // Collectives of one name meet, whichever half of them a rank has sent in backward.
  const Cause cause = {.name = "finish_grad_sync", .syncs_gradients = true};
  try {
    for (; next_ < buckets_.size(); ++next_) leave_without_values(buckets_[next_], cause);
    finish_hooks(/*is_discarded=*/true, cause);
    for (const Bucket& bucket : buckets_) {
      if (bucket.run != nullptr) bucket.run->finish();
    }
  } catch (...) {
    restart();
    throw;
  }
  restart();
}

void GradBuckets::land(const Cause& cause) {
  const Lock lock(*this);
  const c10::AutoGradMode no_grad(false);
  try {
    for (; next_ < buckets_.size(); ++next_) leave(buckets_[next_], cause);
    finish_hooks(/*is_discarded=*/false, cause);
    for (Bucket& bucket : buckets_) {
      if (bucket.run == nullptr && bucket.hook_run == nullptr) continue;
      std::vector<InFlight> arrived =
          bucket.run != nullptr ? bucket.run->finish() : std::move(bucket.arrived);
      for (size_t k = 0; k < arrived.size(); ++k) {
        Parameter& p = parameters_[bucket.sent[k]];
        // Accumulated again since (a second backward), zeroed or replaced: as it is now.
        const bool as_sent = is_as_sent(p);
        p.sent.reset();
        p.local.reset();
        if (as_sent) set_gradient(p.tensor, std::move(arrived[k]));
      }
      bucket.run.reset();
      bucket.hook_run.reset();
    }
  } catch (...) {
    restart();
    throw;
  }
}

void GradBuckets::restart() {
  for (Parameter& p : parameters_) {
    p.came = 0;
    p.seen.reset();
    p.sent.reset();
    p.local.reset();
  }
  for (Bucket& bucket : buckets_) {
    bucket.missing = bucket.members.size();
    bucket.as_planned = true;
    bucket.sent.clear();
    bucket.arrived.clear();
    bucket.run.reset();
    bucket.hook_run.reset();
  }
  order_.clear();
  next_ = 0;
  surprised_ = false;
}

bool GradBuckets::on_one_mesh() const {
  const Parameter* first = nullptr;
  for (const Parameter& p : parameters_) {
    if (!is_dtensor(p.tensor)) continue;
    if (first == nullptr) first = &p;
    if (meta_of(p.tensor).context != meta_of(first->tensor).context) return false;
  }
  return true;
}

void GradBuckets::plan(const Cause& cause) {
  const Lock lock(*this);
  for (Parameter& p : parameters_) {
    if (p.bucket < 0) continue;
    // Frozen since: its bucket would hold back all behind it.
    surprised_ |= !p.tensor.requires_grad();
    // Another number of backwards. When a bucket leaves is this rank's own affair, since their order
    // is not; but what a hook has taken it takes once, so that leaving late is better than too early.
    if (p.came > 0 && (hook_ == nullptr || p.came > p.expected)) p.expected = p.came;
  }
  const bool wanted = !order_.empty() && (!planned_ || surprised_);
  if (!wanted) return restart();
  buckets_.clear();
  num_buckets_ = 0;
  for (Parameter& p : parameters_) p.bucket = -1;
  planned_ = false;
  if (!on_one_mesh()) return restart();  // nobody could say in which order those of several leave
  // What has come, and is not where it belongs.
  const std::shared_ptr<MeshContext> context = meta_of(parameters_[order_[0]].tensor).context;
  std::vector<size_t> moving;
  uint64_t sum = 1;
  if (reduce_dtype_.has_value()) sum = checksum(sum, c10::toString(*reduce_dtype_));
  if (hook_ != nullptr) sum = checksum(sum, hook_->name());
  for (const size_t i : order_) {
    const Parameter& p = parameters_[i];
    if (p.seen == meta_of(p.tensor).spec->layout) continue;
    moving.push_back(i);
    sum = mix(mix(sum, i), static_cast<uint64_t>(p.came));
    sum = checksum(sum, p.seen->to_string());
  }
  const bool same_order = !first_difference(*context, {sum}, cause).has_value();
  planned_ = same_order;
  if (!same_order) return restart();  // everything waits for finish_grad_sync()
  const auto fits = [&](const Bucket& bucket, size_t i) {
    const Parameter &first = parameters_[bucket.members[0]], &p = parameters_[i];
    const DTensorMeta &a = meta_of(first.tensor), &b = meta_of(p.tensor);
    // The same kind of collective: what Partial becomes Replicate, what becomes a Shard.
    const auto steps = [](const DTensorMeta& meta, const Layout& from) {
      const SpecRef have = meta.context->with_layout(*meta.spec, from);
      return plan_for(*meta.context, have, meta.spec)->plan.steps;
    };
    if (a.context != b.context || a.spec->dtype != b.spec->dtype ||
        a.spec->device != b.spec->device ||
        bucket.bytes + gradient_bytes(p.tensor) > bucket_bytes_) {
      return false;
    }
    const auto of_first = steps(a, *first.planned), its = steps(b, *p.seen);
    return std::equal(of_first.begin(), of_first.end(), its.begin(), its.end(),
                      [](const RedistributeStep& x, const RedistributeStep& y) {
                        return x.kind == y.kind && x.mesh_dims == y.mesh_dims;
                      });
  };
  // Of a gradient that lies as this one did; its values do not matter.
  const auto uses_hook = [&](size_t i) {
    if (hook_ == nullptr) return false;
    const DTensorMeta& meta = meta_of(parameters_[i].tensor);
    const SpecRef have = meta.context->intern(
        *parameters_[i].seen, meta.spec->sizes, meta.spec->strides,
        travels_as(parameters_[i].tensor, *parameters_[i].seen), meta.spec->device);
    return goes_through_hook(plan_for(*meta.context, have, meta.spec)->plan, have->dtype);
  };
  for (const size_t i : moving) {
    Parameter& p = parameters_[i];
    const bool through_hook = uses_hook(i);
    auto bucket = std::find_if(buckets_.begin(), buckets_.end(), [&](const Bucket& b) {
      return b.uses_hook == through_hook && fits(b, i);
    });
    if (bucket == buckets_.end()) {
      bucket = buckets_.emplace(buckets_.end());
      bucket->uses_hook = through_hook;
    }
    p.planned = p.seen;
    p.expected = p.came;
    bucket->members.push_back(i);
    bucket->bytes += gradient_bytes(p.tensor);
  }
  // In the order in which they become full.
  const auto last = [&](const Bucket& bucket) {
    return std::find(order_.begin(), order_.end(), bucket.members.back());
  };
  std::stable_sort(buckets_.begin(), buckets_.end(),
                   [&](const Bucket& a, const Bucket& b) { return last(a) < last(b); });
  num_buckets_ = static_cast<int64_t>(buckets_.size());
  for (size_t b = 0; b < buckets_.size(); ++b) {
    for (const size_t i : buckets_[b].members) parameters_[i].bucket = static_cast<int>(b);
  }
  restart();
}

std::vector<std::shared_ptr<GradBuckets>> buckets_of(const std::vector<at::Tensor>& parameters) {
  std::vector<std::shared_ptr<GradBuckets>> found;
  for (const at::Tensor& parameter : parameters) {
    const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameter);
    if (accumulator == nullptr) continue;
    const torch::autograd::Node& node = *accumulator;
    for (const auto& hook : node.post_hooks()) {
      const auto* came = dynamic_cast<const Came*>(hook.get());
      if (came == nullptr) continue;
      std::shared_ptr<GradBuckets> buckets = came->buckets.lock();
      if (buckets == nullptr) continue;
      if (std::find(found.begin(), found.end(), buckets) == found.end()) {
        found.push_back(std::move(buckets));
      }
    }
  }
  return found;
}

}  // namespace shardweave::dtensor_internal
