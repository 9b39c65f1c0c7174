#include "shardweave/modules/zero.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>
#include <optional>
#include <string_view>

#include "ATen/ops/empty.h"
#include "ATen/ops/full.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/str_join.h"
#include "c10/core/GradMode.h"
#include "c10/core/InferenceMode.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/engine/adopt.h"
#include "shardweave/dtensor/engine/checksum.h"
#include "shardweave/dtensor/engine/deferred.h"
#include "shardweave/dtensor/engine/flat_row.h"
#include "shardweave/dtensor/engine/fsdp_unit.h"
#include "shardweave/dtensor/engine/grad_buckets.h"
#include "shardweave/dtensor/engine/gradient_owner.h"
#include "shardweave/dtensor/engine/local_part.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/provenance.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "shardweave/modules/optimizer_state.h"

namespace shardweave {
namespace {

using namespace dtensor_internal;
using namespace modules_internal;

constexpr char kZeroPartition[] = "ZeroPartition";

[[noreturn]] void refuse_partition(absl::StatusCode code, const std::string& why) {
  throw Error(kZeroPartition, absl::Status(code, why));
}

std::string name_of(const at::Tensor& parameter) {
  return std::string(parameter_of(meta_of(parameter)));
}

// Through `shard.data()`, too, as some optimizers write: no version tells of that.
int64_t writes_to(const at::Tensor& shard) {
  return meta_of(shard).family->writes;
}

// This rank's part of a gradient that has left.
class ArrivingGradient final : public LocalPart::Source {
 public:
  ArrivingGradient(std::shared_ptr<GradientScatter> scatter, size_t index)
      : scatter_(std::move(scatter)), index_(index) {}
  LocalPart::State state() const override {
    const bool is_ready = part_.defined() || !scatter_->is_under_way();
    return is_ready ? LocalPart::State::kReady : LocalPart::State::kUnderWay;
  }
  const at::Tensor& bring() override {
    if (!part_.defined()) {
      part_ = scatter_->part(index_);
      scatter_.reset();
    }
    return part_;
  }

 private:
  std::shared_ptr<GradientScatter> scatter_;
  const size_t index_;
  at::Tensor part_;
};

}  // namespace

class ZeroPartition::State final : public GradientOwner,
                                   public std::enable_shared_from_this<State> {
 public:
  explicit State(const ZeroOptions& options) : options_(options) {}
  ~State() override {
    for (const at::Tensor& parameter : parameters_) disown_gradient(parameter);
  }

  size_t add(const std::vector<at::Tensor>& parameters, std::source_location where);
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  const std::vector<at::Tensor>& shards() const { return shards_; }

  void came(size_t index) override;
  void bring_gradients(const Cause& cause) override;
  void hand_out_gradients(std::source_location where);
  void share_parameters(std::source_location where);
  void zero_grad();
  void discard();
  void pause(int change) {
    const std::lock_guard lock(mutex_);
    paused_ += change;
  }
  int64_t left_in_backward() const {
    const std::lock_guard lock(mutex_);
    return left_in_backward_;
  }

 private:
  // Of a parameter, beside the two tensors.
  struct Owned {
    int bucket = -1;   // none: it is whole on every rank
    size_t place = 0;  // in the bucket's row
    int expected = 1;  // accumulations until its gradient leaves: the last iteration's; 0: it waits
    int came = 0;      // in this iteration
    bool awaited = false;  // its bucket leaves with it,
    bool travels = true;   // as it came, may, or has been brought already
    int64_t shared = 0;    // writes to the shard that all ranks have
  };
  struct Bucket {
    FlatRow row;
    at::Tensor flat;              // the parameters' memory
    std::vector<size_t> members;  // parameters, by their place in the row
    size_t missing = 0;           // gradients that are awaited
    bool is_held = false;         // one of them is not what was expected
  };

  void check_options() const;
  void check(size_t index, const at::Tensor& parameter) const;
  std::vector<Bucket> planned(const std::vector<at::Tensor>& added, size_t first) const;
  void move_into(Bucket& bucket);
  void make_shard(size_t index);
  bool can_leave(size_t index) const;
  std::shared_ptr<GradientScatter> leave(const Bucket& bucket, bool only_awaited,
                                         const Cause& cause);
  std::shared_ptr<GradientScatter> leave_without_values(const Bucket& bucket, const Cause& cause);
  void learn(const Cause& cause);
  bool is_in_place(size_t index) const;
  void restart();

  const ZeroOptions options_;
  // Of what came() reads and writes: gradients of several devices come on several threads.
  mutable std::mutex mutex_;
  std::shared_ptr<MeshContext> context_;  // null: there is no parameter yet
  int mesh_dim_ = 0;
  std::vector<at::Tensor> parameters_, shards_;
  std::vector<Owned> owned_;
  std::vector<Bucket> buckets_;
  size_t next_ = 0;  // buckets that have not left in this iteration: the last leaves first
  int paused_ = 0;
  int64_t left_in_backward_ = 0;
  std::weak_ptr<GradientScatter> last_, last_but_one_;  // that left in backward
  // That discard() has sent, until the next iteration.
  std::vector<std::shared_ptr<GradientScatter>> discarded_;
};

// --- parameters and shards -----------------------------------------------------------------------

void ZeroPartition::State::check(size_t index, const at::Tensor& parameter) const {
  using enum absl::StatusCode;
  const auto refuse = [&](absl::StatusCode code, const std::string& why) {
    std::string which = str_cat("parameter ", index);
    if (parameter.defined() && is_dtensor(parameter) && !name_of(parameter).empty()) {
      which += str_cat(" ('", name_of(parameter), "')");
    }
    refuse_partition(code, str_cat(which, " ", why));
  };
  if (!parameter.defined()) refuse(kInvalidArgument, "is undefined; wanted a DTensor");
  if (!is_dtensor(parameter)) {
    refuse(kInvalidArgument, "is a plain tensor; wanted a DTensor: distribute its module first");
  }
  if (!parameter.is_leaf() || !parameter.is_floating_point()) {
    refuse(kInvalidArgument,
           str_cat("is ",
                   parameter.is_leaf() ? str_cat("of type ", c10::toString(parameter.scalar_type()))
                                       : std::string("no leaf: it is the result of an operator"),
                   "; wanted a floating-point leaf"));
  }
  const DTensorMeta& meta = meta_of(parameter);
  if (meta.context != context_) {
    refuse(kInvalidArgument, str_cat("lies on another mesh, ", describe(parameter)));
  }
  if (in_unit(parameter) != nullptr) {
    refuse(kInvalidArgument,
           "is fully sharded: its optimizer's states are divided already, by any optimizer");
  }
  if (!meta.spec->layout[mesh_dim_].is_replicate()) {
    refuse(kInvalidArgument,
           str_cat("lies ", meta.spec->layout.to_string(), ": wanted whole along '",
                   std::string(context_->mesh().name(mesh_dim_)), "', which is to divide it"));
  }
  if (dtensor_internal::is_deferred(parameter)) {
    refuse(kFailedPrecondition, "is not made yet: materialize it first");
  }
  if (!part_to_read(parameter, kZeroPartition).is_contiguous()) {
    refuse(kInvalidArgument, "is not contiguous; wanted rows that lie one after the other");
  }
  if (owner_of_gradient(parameter) != nullptr) {
    refuse(kFailedPrecondition, "is in a ZeRO partition already, which is still there");
  }
}

void ZeroPartition::State::check_options() const {
  using enum absl::StatusCode;
  if (options_.stage != 1 && options_.stage != 2) {
    refuse_partition(
        kInvalidArgument,
        str_cat("stage is ", options_.stage,
                "; wanted 1 or 2 (to divide parameters, too, is to shard them fully)"));
  }
  if (options_.bucket_bytes < 1) {
    refuse_partition(kInvalidArgument,
                     str_cat("bucket_bytes is ", options_.bucket_bytes, "; wanted 1 or more"));
  }
}

// What travels together: of one dtype and device, in the order that was given. parameters()[first] is
// to be the first of them.
std::vector<ZeroPartition::State::Bucket> ZeroPartition::State::planned(
    const std::vector<at::Tensor>& added, size_t first) const {
  struct Filling {
    std::vector<size_t> members;
    std::vector<SpecRef> whole;
    int64_t bytes = 0;
  };
  std::vector<Filling> fillings;
  for (size_t i = 0; i < added.size(); ++i) {
    const at::Tensor& parameter = added[i];
    const SpecRef& spec = meta_of(parameter).spec;
    if (parameter.dim() == 0 || parameter.numel() == 0) continue;
    const auto bytes = static_cast<int64_t>(parameter.numel() * parameter.element_size());
    auto fits = [&](const Filling& f) {
      return f.whole[0]->dtype == spec->dtype && f.whole[0]->device == spec->device &&
             f.bytes + bytes <= options_.bucket_bytes;
    };
    auto filling = std::find_if(fillings.begin(), fillings.end(), fits);
    if (filling == fillings.end()) filling = fillings.emplace(fillings.end());
    filling->members.push_back(first + i);
    filling->whole.push_back(spec);
    filling->bytes += bytes;
  }
  std::vector<Bucket> buckets;
  for (Filling& filling : fillings) {
    const std::vector<Layout> layouts =
        flat_row_layouts(filling.whole, context_->mesh(), mesh_dim_);
    for (size_t k = 0; k < layouts.size(); ++k) {
      const std::string why = why_not_kept(*filling.whole[k], layouts[k], context_->mesh());
      if (why.empty()) continue;
      const size_t index = filling.members[k] - first;
      refuse_partition(absl::StatusCode::kInvalidArgument,
                       str_cat("parameter ", index, " ('", name_of(added[index]), "') ", why));
    }
    buckets.push_back({FlatRow(context_, mesh_dim_, filling.whole, layouts, filling.whole[0]->dtype,
                               filling.whole[0]->device),
                       at::Tensor(), std::move(filling.members)});
  }
  return buckets;
}

size_t ZeroPartition::State::add(const std::vector<at::Tensor>& given, std::source_location where) {
  using enum absl::StatusCode;
  const std::vector<at::Tensor> added = unique_parameters(given);
  const auto check_any = [&] {
    if (added.empty())
      refuse_partition(kInvalidArgument, "there is no parameter; wanted one or more");
  };
  const bool is_first = context_ == nullptr;
  if (is_first) {
    check_any();
    const auto first = std::find_if(added.begin(), added.end(), [](const at::Tensor& parameter) {
      return parameter.defined() && is_dtensor(parameter);
    });
    if (first == added.end()) {
      refuse_partition(kInvalidArgument,
                       "no parameter is a DTensor: distribute their module first");
    }
    context_ = meta_of(*first).context;
  }
  Agreement agreement(*context_, {.name = kZeroPartition, .where = where});
  check_any();
  if (is_first) {
    check_options();
    if (!options_.mesh_dim.empty()) {
      const absl::StatusOr<int> found = context_->mesh().dim(options_.mesh_dim);
      if (!found.ok()) throw Error(kZeroPartition, found.status());
      mesh_dim_ = *found;
    }
  }
  std::vector<uint64_t> sums;
  for (size_t i = 0; i < added.size(); ++i) {
    check(i, added[i]);
    uint64_t sum =
        checksum(static_cast<uint64_t>(options_.stage), meta_of(added[i]).spec->to_string());
    sum = checksum(mix(sum, static_cast<uint64_t>(options_.bucket_bytes)), name_of(added[i]));
    sums.push_back(mix(mix(sum, added[i].requires_grad()), static_cast<uint64_t>(mesh_dim_)));
  }
  if (!buckets_of(added).empty()) {
    refuse_partition(kFailedPrecondition,
                     "a parameter is in a GradSync, which is still there; stage 2 sends gradients "
                     "in backward by itself");
  }
  const size_t old = parameters_.size();
  std::vector<Bucket> buckets = planned(added, old);
  if (const std::optional<Difference> differs = agreement.reach(sums)) {
    refuse_partition(kInvalidArgument,
                     str_cat("parameter ", differs->index, " is not the same on ranks ",
                             differs->ranks[0], " and ", differs->ranks[1],
                             " (name, shape, layout, requires_grad, or the options)"));
  }

  for (const at::Tensor& parameter : added) {
    parameters_.push_back(parameter);
    shards_.emplace_back();
    owned_.emplace_back();
  }
  buckets_.reserve(buckets_.size() + buckets.size());
  for (Bucket& bucket : buckets) {
    buckets_.push_back(std::move(bucket));
    move_into(buckets_.back());
  }
  for (size_t i = old; i < parameters_.size(); ++i) {
    make_shard(i);
    own_gradient(parameters_[i], weak_from_this(), i);
  }
  restart();
  return old;
}

// Parameters become views of one memory.
void ZeroPartition::State::move_into(Bucket& bucket) {
  const c10::InferenceMode normal(false);  // which records gradients
  const c10::AutoGradMode no_grad(false);
  const Spec& first = *bucket.row[0].whole;
  bucket.flat =
      at::empty({bucket.row.numel()}, at::TensorOptions(first.dtype).device(first.device));
  for (size_t k = 0; k < bucket.members.size(); ++k) {
    const size_t i = bucket.members[k];
    owned_[i].bucket = static_cast<int>(&bucket - buckets_.data());
    owned_[i].place = k;
    DTensorMeta& meta = meta_of(parameters_[i]);
    const at::Tensor place = bucket.row.whole_of(bucket.flat, k);
    // Writes to one parameter are none to the others.
    place.unsafeGetTensorImpl()->set_version_counter(c10::VariableVersion(/*version=*/0));
    place.copy_(meta.local());
    meta.move_to(place);
  }
}

void ZeroPartition::State::make_shard(size_t index) {
  const c10::InferenceMode normal(false);
  const c10::AutoGradMode no_grad(false);
  const at::Tensor& parameter = parameters_[index];
  const DTensorMeta& meta = meta_of(parameter);
  at::Tensor part = meta.local();
  SpecRef spec = meta.spec;
  if (owned_[index].bucket >= 0) {
    const Bucket& bucket = buckets_[static_cast<size_t>(owned_[index].bucket)];
    const at::Tensor stretch = bucket.flat.narrow(0, bucket.row.kept_begin(), bucket.row.kept());
    part = bucket.row.kept_of(stretch, owned_[index].place);
    part.unsafeGetTensorImpl()->set_version_counter(
        meta.local().unsafeGetTensorImpl()->version_counter());
    spec = bucket.row[owned_[index].place].kept;
  }
  at::Tensor shard = wrap(std::move(part), spec, context_);
  auto family = std::make_shared<ViewFamily>();
  family->fqn = name_of(parameter);
  family->parameter = std::move(spec);
  meta_of(shard).family = std::move(family);
  meta_of(shard).came_from(provenance_of(meta));
  shard.requires_grad_(parameter.requires_grad());
  shards_[index] = std::move(shard);
}

// --- gradients -----------------------------------------------------------------------------------

void ZeroPartition::State::restart() {
  for (Bucket& bucket : buckets_) {
    bucket.missing = 0;
    bucket.is_held = false;
  }
  for (size_t i = 0; i < owned_.size(); ++i) {
    Owned& owned = owned_[i];
    owned.came = 0;
    owned.travels = true;
    owned.awaited = owned.bucket >= 0 && owned.expected > 0 && parameters_[i].requires_grad();
    if (owned.awaited) ++buckets_[static_cast<size_t>(owned.bucket)].missing;
  }
  next_ = buckets_.size();
}

bool ZeroPartition::State::can_leave(size_t index) const {
  const at::Tensor& grad = parameters_[index].grad();
  const Owned& owned = owned_[index];
  // One with a graph (create_graph) is held, and travels with it: bring_gradients().
  return grad.defined() && is_dtensor(grad) && !grad.requires_grad() &&
         GradientScatter::takes(buckets_[static_cast<size_t>(owned.bucket)].row, owned.place, grad);
}

void ZeroPartition::State::came(size_t index) {
  const std::lock_guard lock(mutex_);
  if (paused_ > 0) return;
  Owned& owned = owned_[index];
  if (owned.bucket < 0) return;
  Bucket& bucket = buckets_[static_cast<size_t>(owned.bucket)];
  if (owned.came++ == 0) {
    const at::Tensor& grad = parameters_[index].grad();
    owned.travels = can_leave(index) || (grad.defined() && is_dtensor(grad) &&
                                         layout_of(grad) == bucket.row[owned.place].kept->layout);
  }
  if (!owned.awaited || owned.came != owned.expected) return;
  --bucket.missing;
  if (options_.stage < 2 || c10::GradMode::is_enabled()) return;  // the graph is wanted
  const Cause cause = {.name = "finish_grad_sync", .syncs_gradients = true};
  // In one order on all ranks, which use the same parameters; and whole, so that discard() knows what
  // other ranks have sent.
  for (; next_ > 0; --next_) {
    Bucket& next = buckets_[next_ - 1];
    if (next.missing > 0 || next.is_held) return;
    next.is_held = std::any_of(next.members.begin(), next.members.end(),
                               [&](size_t i) { return owned_[i].awaited && !can_leave(i); });
    if (next.is_held) return;
    std::shared_ptr<GradientScatter> left = leave(next, /*only_awaited=*/true, cause);
    if (left == nullptr) continue;
    ++left_in_backward_;
    discarded_.clear();
    // What is sent lies there until somebody waits: two buckets' at a time.
    if (const auto last_but_one = last_but_one_.lock()) last_but_one->finish();
    last_but_one_ = std::exchange(last_, left);
  }
}

// Null: it had nothing to send.
std::shared_ptr<GradientScatter> ZeroPartition::State::leave(const Bucket& bucket,
                                                             bool only_awaited,
                                                             const Cause& cause) {
  const c10::AutoGradMode no_grad(false);
  std::vector<at::Tensor> grads;
  for (const size_t i : bucket.members) {
    const at::Tensor& grad = parameters_[i].grad();
    const bool leaves = grad.defined() && is_dtensor(grad) && (owned_[i].awaited || !only_awaited);
    grads.push_back(leaves ? grad : at::Tensor());
  }
  auto scatter = std::make_shared<GradientScatter>(
      bucket.row, grads, bucket.row[0].whole->dtype,
      [](int64_t numel, const at::TensorOptions& options) { return at::empty({numel}, options); },
      cause, [&](size_t k) { return name_of(parameters_[bucket.members[k]]); });
  for (const size_t k : scatter->taken()) {
    at::Tensor arriving =
        wrap(LocalPart(std::make_shared<ArrivingGradient>(scatter, k)), scatter->spec(k), context_);
    meta_of(arriving).came_from(scatter->provenance(k));
    parameters_[bucket.members[k]].mutable_grad() = std::move(arriving);
  }
  return scatter->taken().empty() ? nullptr : scatter;
}

// What meets the buckets that leave on other ranks, of NaN: a rank that takes this for an iteration
// sees it.
std::shared_ptr<GradientScatter> ZeroPartition::State::leave_without_values(const Bucket& bucket,
                                                                            const Cause& cause) {
  const c10::AutoGradMode no_grad(false);
  std::vector<at::Tensor> grads(bucket.members.size());
  for (size_t k = 0; k < grads.size(); ++k) {
    if (!owned_[bucket.members[k]].awaited) continue;
    const Spec& whole = *bucket.row[k].whole;
    Placements placements = whole.layout.placements();
    placements[static_cast<size_t>(mesh_dim_)] = Partial();
    const Layout layout =
        value_or_throw(Layout::create(std::move(placements), whole.layout.order()));
    grads[k] = wrap(at::full(array(whole.local_sizes), std::numeric_limits<double>::quiet_NaN(),
                             at::TensorOptions(whole.dtype).device(whole.device)),
                    context_->with_layout(whole, layout), context_);
    meta_of(grads[k]).came_from(kRanksOwn);  // it meets what others have from their backward
  }
  return std::make_shared<GradientScatter>(
      bucket.row, grads, bucket.row[0].whole->dtype,
      [](int64_t numel, const at::TensorOptions& options) { return at::empty({numel}, options); },
      cause, [&](size_t k) { return name_of(parameters_[bucket.members[k]]); });
}

void ZeroPartition::State::discard() {
  const std::lock_guard lock(mutex_);
  // Collectives of one name meet, whichever half of them a rank has sent in backward.
  const Cause cause = {.name = "finish_grad_sync", .syncs_gradients = true};
  try {
    for (; options_.stage == 2 && next_ > 0; --next_) {
      discarded_.push_back(leave_without_values(buckets_[next_ - 1], cause));
    }
  } catch (...) {
    restart();
    throw;
  }
  restart();
}

// How often gradients come until they leave. Buckets go by it in all iterations to come: so that ranks
// with different numbers hear of it now. Along the dimension that buckets leave along, where a rank that
// sees no difference meets this with its next bucket, which is an error on all of them.
void ZeroPartition::State::learn(const Cause& cause) {
  const bool has_come =
      std::any_of(owned_.begin(), owned_.end(), [](const Owned& owned) { return owned.came > 0; });
  if (!has_come) return;  // they have been brought already
  bool differs_from_before = false;
  std::vector<size_t> of;
  std::vector<int> counts;
  std::vector<uint64_t> sums;
  for (size_t i = 0; i < owned_.size(); ++i) {
    const Owned& owned = owned_[i];
    if (owned.bucket < 0) continue;
    const int expected = owned.travels ? owned.came : 0;
    differs_from_before |= expected != owned.expected;
    of.push_back(i);
    counts.push_back(expected);
    sums.push_back(mix(1, static_cast<uint64_t>(expected)));
  }
  std::optional<Difference> differs;
  if (options_.stage >= 2 && differs_from_before)
    differs = first_difference(*context_, sums, cause, mesh_dim_);
  if (!differs.has_value()) {
    for (size_t k = 0; k < of.size(); ++k) owned_[of[k]].expected = counts[k];
    return;
  }
  const size_t index = of[differs->index];
  const int came = owned_[index].came;
  restart();
  refuse_partition(
      absl::StatusCode::kFailedPrecondition,
      str_cat("the gradient of parameter ", index, " ('", name_of(shards_[index]), "') came ", came,
              " times here and in other numbers elsewhere: ranks ", differs->ranks[0], " and ",
              differs->ranks[1], " differ; wanted as many backwards with it on all ranks"));
}

void ZeroPartition::State::bring_gradients(const Cause& cause) {
  const std::lock_guard lock(mutex_);
  const c10::AutoGradMode no_grad(false);
  discarded_.clear();
  learn(cause);
  // Those with a graph (create_graph) keep it, and travel alone.
  for (size_t i = 0; i < parameters_.size(); ++i) {
    at::Tensor& grad = parameters_[i].mutable_grad();
    if (!grad.defined() || !grad.requires_grad()) continue;
    const c10::AutoGradMode record(true);
    grad = redistribute(as_dtensor(grad, context_), layout_of(shards_[i]), cause.where);
  }
  for (size_t b = buckets_.size(); b > 0; --b) {
    leave(buckets_[b - 1], /*only_awaited=*/false, cause);
  }
  restart();
  std::vector<at::Tensor> grads;
  std::vector<Layout> layouts;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& grad = parameters_[i].grad();
    grads.push_back(grad.defined() ? as_dtensor(grad, context_) : grad);
    layouts.push_back(layout_of(shards_[i]));
  }
  bring_to(grads, layouts, cause);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    parameters_[i].mutable_grad() = std::move(grads[i]);
  }
}

// Its memory is what its shard is a part of.
bool ZeroPartition::State::is_in_place(size_t index) const {
  const at::Tensor part = part_to_read(parameters_[index], kZeroPartition);
  const Owned& owned = owned_[index];
  if (owned.bucket < 0) {
    return part.data_ptr() == part_to_read(shards_[index], kZeroPartition).data_ptr();
  }
  const Bucket& bucket = buckets_[static_cast<size_t>(owned.bucket)];
  return meta_of(parameters_[index]).spec->layout == bucket.row[owned.place].whole->layout &&
         part.data_ptr() == bucket.row.whole_of(bucket.flat, owned.place).data_ptr();
}

void ZeroPartition::State::hand_out_gradients(std::source_location where) {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (is_in_place(i)) continue;
    refuse_partition(absl::StatusCode::kFailedPrecondition,
                     str_cat("parameter ", i, " ('", name_of(shards_[i]),
                             "') was moved since (module->to(), set_data(), fully_shard()): its "
                             "shard is part of what it was; do that before"));
  }
  bring_gradients({.name = kZeroPartition, .where = where, .syncs_gradients = true});
  for (size_t i = 0; i < parameters_.size(); ++i) {
    shards_[i].mutable_grad() = parameters_[i].grad();
  }
}

void ZeroPartition::State::share_parameters(std::source_location where) {
  const c10::AutoGradMode no_grad(false);
  const Cause cause = {.name = kZeroPartition, .where = where};
  std::vector<bool> written(buckets_.size(), false);
  std::vector<size_t> changed;
  for (size_t i = 0; i < shards_.size(); ++i) {
    shards_[i].mutable_grad() = at::Tensor();
    if (writes_to(shards_[i]) == owned_[i].shared) continue;
    changed.push_back(i);
    if (owned_[i].bucket >= 0) written[static_cast<size_t>(owned_[i].bucket)] = true;
  }
  std::vector<CollectiveUnderWay> under_way;
  for (size_t b = 0; b < buckets_.size(); ++b) {
    const Bucket& bucket = buckets_[b];
    if (!written[b] || bucket.row.num_ranks() == 1) continue;
    uint64_t provenance = 0;
    for (const size_t i : bucket.members) {
      provenance = mix(provenance, provenance_of(meta_of(shards_[i])));
    }
    under_way.push_back(bucket.row.all_gather(
        bucket.flat.narrow(0, bucket.row.kept_begin(), bucket.row.kept()), bucket.flat, provenance,
        cause, [&](size_t k) { return name_of(parameters_[bucket.members[k]]); }));
  }
  absl::Status status;
  for (CollectiveUnderWay& gather : under_way) status.Update(gather.wait());
  throw_if_error(std::move(status));
  for (const size_t i : changed) {
    owned_[i].shared = writes_to(shards_[i]);
    part_written(parameters_[i], kZeroPartition);
    meta_of(parameters_[i]).came_from(provenance_of(meta_of(shards_[i])));
  }
}

void ZeroPartition::State::zero_grad() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    parameters_[i].mutable_grad() = at::Tensor();
    shards_[i].mutable_grad() = at::Tensor();
  }
  const std::lock_guard lock(mutex_);
  restart();
}

// --- the public interface ------------------------------------------------------------------------

ZeroPartition::ZeroPartition(const std::vector<at::Tensor>& parameters, const ZeroOptions& options,
                             std::source_location where)
    : state_(std::make_shared<State>(options)) {
  state_->add(parameters, where);
}

ZeroPartition::~ZeroPartition() = default;

std::vector<at::Tensor> ZeroPartition::add(const std::vector<at::Tensor>& parameters,
                                           std::source_location where) {
  const auto first = static_cast<std::ptrdiff_t>(state_->add(parameters, where));
  return {state_->shards().begin() + first, state_->shards().end()};
}

const std::vector<at::Tensor>& ZeroPartition::parameters() const {
  return state_->parameters();
}

const std::vector<at::Tensor>& ZeroPartition::shards() const {
  return state_->shards();
}

void ZeroPartition::hand_out_gradients(std::source_location where) {
  state_->hand_out_gradients(where);
}

void ZeroPartition::share_parameters(std::source_location where) {
  state_->share_parameters(where);
}

void ZeroPartition::zero_grad() {
  state_->zero_grad();
}

void ZeroPartition::discard() {
  state_->discard();
}

int64_t ZeroPartition::left_in_backward() const {
  return state_->left_in_backward();
}

ZeroPartition::NoSync::NoSync(ZeroPartition& partition) : state_(partition.state_) {
  partition.state_->pause(1);
}

ZeroPartition::NoSync::~NoSync() {
  static_cast<State*>(state_.get())->pause(-1);
}

// --- states --------------------------------------------------------------------------------------

namespace zero_internal {
namespace {

constexpr char kOptimizerState[] = "ZeroRedundancyOptimizer";

[[noreturn]] void refuse_state(absl::StatusCode code, const std::string& why) {
  throw Error(kOptimizerState, absl::Status(code, why));
}

void check_names(const OptimizerState& state, const std::vector<std::string>& names) {
  for (const auto& [name, value] : state) {
    if (std::find(names.begin(), names.end(), name) != names.end()) continue;
    refuse_state(absl::StatusCode::kNotFound,
                 str_cat("there is no state '", name, "'; there are ", absl::StrJoin(names, ", ")));
  }
}

// How an optimizer keeps the state of a name: its shape and its layout.
using Kept = absl::FunctionRef<at::Tensor(const std::string& name)>;

void check_values(const OptimizerState& state, size_t index, Kept kept, int most_steps_log2) {
  for (const auto& [name, value] : state) {
    const auto refuse = [&, &name_ = name](const std::string& what) {
      refuse_state(absl::StatusCode::kInvalidArgument,
                   str_cat("'", name_, "' of parameter ", index, " ", what));
    };
    if (!value.defined()) refuse("is set to an undefined tensor");
    if (name == "step") {
      if (is_dtensor(value) || value.numel() != 1 || value.is_complex()) {
        refuse(str_cat("is one number; got shape [", absl::StrJoin(value.sizes(), ", "), "]"));
      }
      const auto steps = value.item<double>();
      if (!(steps >= 0) || steps != std::floor(steps) || steps > std::ldexp(1, most_steps_log2)) {
        refuse(str_cat("is ", steps, "; wanted a whole number from 0 to 2^", most_steps_log2));
      }
      continue;
    }
    const at::Tensor like = kept(name);
    if (value.sizes() != like.sizes()) {
      refuse(str_cat("has shape [", absl::StrJoin(like.sizes(), ", "), "]; got [",
                     absl::StrJoin(value.sizes(), ", "), "]"));
    }
    if (!value.is_floating_point() || value.layout() != at::kStrided) {
      refuse(str_cat("is dense and floating-point; got ", c10::toString(value.scalar_type())));
    }
    if (is_dtensor(value) && meta_of(value).context != meta_of(like).context) {
      refuse("lies on another mesh");
    }
  }
}

// On all ranks the same: what there is, and the numbers.
void agree(Agreement& agreement, const OptimizerState& state, size_t index) {
  uint64_t sum = 1;
  for (const auto& [name, value] : state) {
    sum = checksum(sum, name);
    if (name == "step") {
      sum = checksum(sum, str_cat(value.item<int64_t>()));
    } else {  // those that lie otherwise move otherwise
      sum = checksum(sum, str_cat(static_cast<int>(value.scalar_type()), " ",
                                  is_dtensor(value) ? layout_of(value).to_string() : "whole"));
    }
  }
  const std::optional<Difference> differs = agreement.reach({sum});
  if (!differs.has_value()) return;
  refuse_state(absl::StatusCode::kInvalidArgument,
               str_cat("the state of parameter ", index, " is not the same on all ranks: ",
                       differs->ranks[0], " and ", differs->ranks[1],
                       " have other names in it, another 'step', or values of other dtypes or "
                       "layouts"));
}

// Its values as the optimizer keeps them; numbers as they are.
OptimizerState lying_as_kept(const OptimizerState& state, Kept kept) {
  OptimizerState result;
  const c10::AutoGradMode no_grad(false);
  for (const auto& [name, value] : state) {
    if (name == "step") {
      result[name] = value;
      continue;
    }
    const at::Tensor like = kept(name);
    const at::Tensor there =
        is_dtensor(value)
            ? value
            : distribute_tensor(value, mesh_of(like), NamedPlacements(), {.source = std::nullopt});
    // As it is kept: a moment of fewer bits would lose what the step adds to it.
    result[name] = redistribute(there, layout_of(like)).to(like.scalar_type());
  }
  return result;
}

}  // namespace

const at::Tensor& shard_of(const ZeroPartition& partition, size_t parameter) {
  if (parameter >= partition.shards().size()) {
    refuse_state(absl::StatusCode::kOutOfRange,
                 str_cat("parameter ", parameter, " of ", partition.shards().size()));
  }
  return partition.shards()[parameter];
}

OptimizerState state_of(const FusedOptimizer& optimizer, size_t index,
                        const at::Tensor& /*shard*/) {
  OptimizerState state;
  for (const std::string_view name : optimizer.state_names(index)) {
    state[std::string(name)] = optimizer.state(index, name);
  }
  return state;
}

OptimizerState state_of(const torch::optim::Optimizer& optimizer, size_t /*index*/,
                        const at::Tensor& shard) {
  OptimizerState state;
  with_state_type(optimizer, [&]<typename Its>() {
    const auto it = optimizer.state().find(shard.unsafeGetTensorImpl());
    if (it == optimizer.state().end()) return;
    for_each_member(dynamic_cast<Its&>(*it->second), [&](const char* name, const auto& member) {
      at::Tensor value = to_tensor(member);
      if (value.defined()) state[name] = std::move(value);
    });
  });
  return state;
}

void set_state_of(FusedOptimizer& optimizer, size_t index, const at::Tensor& shard,
                  const OptimizerState& state) {
  Agreement agreement(*meta_of(shard).context, {.name = kOptimizerState});
  const std::vector<std::string_view> known = optimizer.state_names(index);
  check_names(state, {known.begin(), known.end()});
  const auto kept = [&](const std::string& name) { return optimizer.state(index, name); };
  check_values(state, index, kept, /*most_steps_log2=*/24);
  agree(agreement, state, index);
  if (state.empty()) {  // as before the first step
    const c10::AutoGradMode no_grad(false);
    for (const std::string_view name : known) kept(std::string(name)).zero_();
    return;
  }
  for (const auto& [name, value] : lying_as_kept(state, kept)) {
    optim_internal::put_state(optimizer, index, name, value);
  }
}

void set_state_of(torch::optim::Optimizer& optimizer, size_t index, const at::Tensor& shard,
                  const OptimizerState& state) {
  Agreement agreement(*meta_of(shard).context, {.name = kOptimizerState});
  with_state_type(optimizer, [&]<typename Its>() {
    auto made = std::make_unique<Its>();
    std::vector<std::string> names;
    for_each_member(*made, [&](const char* name, auto&) { names.emplace_back(name); });
    check_names(state, names);
    // Empty: as before the first step, but for those that make it when they are made.
    const bool is_made_first = dynamic_cast<const torch::optim::Adagrad*>(&optimizer) != nullptr;
    for (const std::string& name : names) {
      if (state.contains(name) || (state.empty() && !is_made_first) ||
          is_optional(optimizer, shard, name)) {
        continue;
      }
      refuse_state(absl::StatusCode::kInvalidArgument,
                   str_cat("the state of parameter ", index, " has no '", name, "'; there are ",
                           absl::StrJoin(names, ", ")));
    }
    const auto kept = [&](const std::string&) { return shard; };
    check_values(state, index, kept, /*most_steps_log2=*/53);
    agree(agreement, state, index);
    if (state.empty()) {
      optimizer.state().erase(shard.unsafeGetTensorImpl());
      return;
    }
    const OptimizerState lying = lying_as_kept(state, kept);
    for_each_member(*made, [&](const char* name, auto& member) {
      const auto it = lying.find(name);
      // Optimizers write where it lies: not what was given.
      if (it != lying.end()) assign(member, it->second.clone());
    });
    optimizer.state()[shard.unsafeGetTensorImpl()] = std::move(made);
  });
}

std::vector<at::Tensor> parameters_of(const std::vector<ParameterGroup>& groups) {
  FusedOptimizer::check(groups);
  std::vector<at::Tensor> parameters;
  for (const ParameterGroup& group : groups) {
    parameters.insert(parameters.end(), group.parameters.begin(), group.parameters.end());
  }
  return parameters;
}

std::vector<ParameterGroup> groups_of_shards(const std::vector<ParameterGroup>& groups,
                                             const ZeroPartition& partition) {
  std::vector<ParameterGroup> result;
  size_t next = 0;  // the partition has each parameter once, in this order
  for (const ParameterGroup& group : groups) {
    const size_t count = unique_parameters(group.parameters).size();
    const auto first = partition.shards().begin() + static_cast<std::ptrdiff_t>(next);
    result.push_back({{first, first + static_cast<std::ptrdiff_t>(count)}, group.options});
    next += count;
  }
  return result;
}

OptimizerState consolidated(const OptimizerState& state) {
  OptimizerState whole;
  const c10::AutoGradMode no_grad(false);
  for (const auto& [name, value] : state) {
    whole[name] = (is_dtensor(value) ? full_tensor(value) : value).clone();
  }
  return whole;
}

}  // namespace zero_internal
}  // namespace shardweave
