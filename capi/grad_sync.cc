// Gradients that travel while backward runs.
#include "shardweave/dtensor/grad_sync.h"

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "shardweave/capi/grad_sync_options.h"
#include "shardweave/capi/host_module.h"

namespace shardweave::capi {
namespace {

GradSyncState& sync_of(const swv_grad_sync* sync) {
  return *in(sync, "sync").state;
}

// What a callback that misuses handles is called on stderr.
constexpr char kHook[] = "a gradient hook";

// What a callback borrows.
class BorrowedBucket {
 public:
  explicit BorrowedBucket(const GradientBucket& bucket) {
    flat_.reset(new_tensor(bucket.flat, "the bucket"));
    comm_.reset(make<swv_comm>(bucket.comm));
    for (const at::Tensor& gradient : bucket.gradients) {
      owned_.emplace_back(new_tensor(gradient, "a gradient"));
      gradients_.push_back(owned_.back().get());
    }
    for (const std::string& name : bucket.parameters) names_.push_back(name.c_str());
    bucket_ = {.struct_size = SWV_SIZE_TO(swv_gradient_bucket, is_discarded),
               .index = bucket.index,
               .flat = flat_.get(),
               .gradients = gradients_.data(),
               .parameters = names_.data(),
               .num_gradients = gradients_.size(),
               .comm = comm_.get(),
               .is_discarded = bucket.is_discarded};
  }
  const swv_gradient_bucket* get() const { return &bucket_; }

 private:
  struct Free {
    void operator()(swv_tensor* tensor) const { release(tensor, kHook); }
    void operator()(swv_comm* comm) const { release(comm, kHook); }
  };
  std::unique_ptr<swv_tensor, Free> flat_;
  std::unique_ptr<swv_comm, Free> comm_;
  std::vector<std::unique_ptr<swv_tensor, Free>> owned_;
  std::vector<swv_tensor*> gradients_;
  std::vector<const char*> names_;
  swv_gradient_bucket bucket_;
};

// Of the host, whose user data it drops at its end.
class HostHook final : public GradientHook {
 public:
  explicit HostHook(const swv_gradient_hook& hook) : hook_(hook) {}
  ~HostHook() override {
    if (hook_.drop != nullptr) hook_.drop(hook_.user_data);
  }
  // Once the caller's text is known to be one.
  void set_name(std::string name) { name_ = std::move(name); }

  std::string name() const override { return name_; }
  void begin(GradientBucket& bucket) override {
    if (hook_.begin != nullptr) call(hook_.begin, bucket, ".begin");
  }
  void finish(GradientBucket& bucket) override { call(hook_.finish, bucket, ".finish"); }

 private:
  void call(swv_status* (*callback)(void*, const swv_gradient_bucket*),
            const GradientBucket& bucket, const char* which) const {
    const BorrowedBucket borrowed(bucket);
    throw_if_failed(callback(hook_.user_data, borrowed.get()), str_cat(name_, which));
  }

  const swv_gradient_hook hook_;
  std::string name_;
};

// Drops the user data of what nothing has taken, for want of memory.
struct DropHook {
  const swv_gradient_hook* hook;
  ~DropHook() {
    if (hook != nullptr && hook->drop != nullptr) hook->drop(hook->user_data);
  }
};

std::shared_ptr<PowerSgd> power_sgd(const swv_power_sgd_options* given, const char* argument) {
  const swv_power_sgd_options o =
      options<swv_power_sgd_options>(given, SWV_POWER_SGD_OPTIONS_INIT, argument);
  return std::make_shared<PowerSgd>(PowerSgdOptions{
      .rank = o.columns,
      .start_iteration = o.start_iteration,
      .min_compression_rate = o.min_compression_rate,
      .error_feedback = flag(o.error_feedback, str_cat(argument, ".error_feedback").c_str()),
      .warm_start = flag(o.warm_start, str_cat(argument, ".warm_start").c_str()),
      .seed = o.seed});
}

void make_grad_sync(const swv_module* module, const swv_grad_sync_options* given,
                    swv_grad_sync** out_sync) {
  const GivenGradSync how = grad_sync_options(given, "options");  // first what has a drop
  swv_grad_sync*& result = out(out_sync, "out_sync");
  const CallMode mode(SWV_MODE_GRAD, "mode");
  const torch::nn::Module& of = any_module(module);
  result = make<swv_grad_sync>(
      std::make_shared<GradSyncState>([&] { return GradSync(of, how.options); }, how.power_sgd));
}

PowerSgd& power_sgd_of(const swv_grad_sync* sync) {
  const std::shared_ptr<PowerSgd>& its = sync_of(sync).power_sgd;
  if (its == nullptr) {
    fail(absl::StatusCode::kFailedPrecondition, "the swv_grad_sync was made without power_sgd");
  }
  return *its;
}

void write_state(const swv_grad_sync* sync, size_t index, swv_string** out_name,
                 swv_tensor** out_tensor) {
  const CallMode mode(SWV_MODE_NO_GRAD, "mode");
  const PowerSgd& of = power_sgd_of(sync);
  const std::vector<std::string> names = of.state_names();
  if (index >= names.size()) {
    fail(absl::StatusCode::kOutOfRange,
         str_cat("argument 'index' is ", index, "; there are ", names.size()));
  }
  const std::string& name = names[index];
  Owned<swv_string> text(out_name == nullptr ? nullptr : new_string(name));
  Owned<swv_tensor> value(out_tensor == nullptr ? nullptr
                                                : new_tensor(of.state(name), "the state"));
  if (out_name != nullptr) *out_name = text.release();
  if (out_tensor != nullptr) *out_tensor = value.release();
}

void set_states(const swv_grad_sync* sync, const char* const* names,
                const swv_tensor* const* handles, size_t count) {
  PowerSgd& to = power_sgd_of(sync);
  const CallMode mode(SWV_MODE_NO_GRAD, "mode");
  std::vector<std::string> texts;
  for_each(span(names, count, "names"), "names",
           [&](const char* name) { texts.emplace_back(text(name, "names")); });
  const std::vector<at::Tensor> values = tensors(handles, count, "tensors");
  std::map<std::string, at::Tensor> state;
  for (size_t i = 0; i < count; ++i) {
    if (!state.emplace(texts[i], values[i]).second) {
      fail_argument("names", str_cat("has '", texts[i], "' twice"));
    }
  }
  to.set_state(state);
}

void write_counts(const swv_grad_sync* sync, int64_t* out_buckets, int64_t* out_left_in_backward) {
  const GradSync& of = sync_of(sync).sync;
  if (out_buckets != nullptr) *out_buckets = of.num_buckets();
  if (out_left_in_backward != nullptr) *out_left_in_backward = of.left_in_backward();
}

}  // namespace

GivenGradSync grad_sync_options(const swv_grad_sync_options* given, const char* argument) {
  const auto member = [&](const char* name) { return str_cat(argument, ".", name); };
  GivenGradSync result;
  if (given == nullptr) return result;
  const swv_grad_sync_options o =
      known_options<swv_grad_sync_options>(*given, SWV_GRAD_SYNC_OPTIONS_INIT, argument);
  if (o.hook != nullptr) {
    const swv_gradient_hook h =
        known_options<swv_gradient_hook>(*o.hook, SWV_GRADIENT_HOOK_INIT, member("hook").c_str());
    DropHook drop{&h};
    auto hook = std::make_shared<HostHook>(h);
    drop.hook = nullptr;
    check_options(*o.hook, h, member("hook").c_str());
    hook->set_name(std::string(text_or(h.name, "hook", member("hook.name").c_str())));
    if (h.finish == nullptr) fail_null(member("hook.finish").c_str());
    result.options.hook = std::move(hook);
  }
  check_options(*given, o, argument);
  if (o.bucket_bytes < 1) {
    fail_argument(member("bucket_bytes").c_str(),
                  str_cat("is ", o.bucket_bytes, "; wanted 1 or more"));
  }
  result.options.bucket_bytes = o.bucket_bytes;
  result.options.reduce_dtype =
      optional_scalar_type(o.reduce_dtype, member("reduce_dtype").c_str());
  if (o.power_sgd != nullptr) {
    if (o.hook != nullptr) {
      fail_argument(member("power_sgd").c_str(), "is given, and a hook, too; wanted one of them");
    }
    result.power_sgd = power_sgd(o.power_sgd, member("power_sgd").c_str());
    result.options.hook = result.power_sgd;
  }
  return result;
}

}  // namespace shardweave::capi

using namespace shardweave::capi;  // NOLINT: this file is the C interface of it

swv_status* swv_grad_sync_create(swv_module* module, const swv_grad_sync_options* options,
                                 swv_grad_sync** out_sync) {
  return guarded(__func__, [&] { make_grad_sync(module, options, out_sync); });
}

void swv_grad_sync_free(swv_grad_sync* sync) {
  release(sync, __func__);
}

swv_status* swv_grad_sync_no_sync(swv_grad_sync* sync, swv_scope** out_scope) {
  return guarded(__func__, out_scope, "out_scope",
                 [&] { return new_scope<NoSync>(in(sync, "sync").state).release(); });
}

swv_status* swv_grad_sync_discard(swv_grad_sync* sync) {
  return guarded(__func__, [&] {
    const CallMode mode(SWV_MODE_NO_GRAD, "mode");
    sync_of(sync).sync.discard();
  });
}

swv_status* swv_grad_sync_counts(const swv_grad_sync* sync, int64_t* out_buckets,
                                 int64_t* out_left_in_backward) {
  return guarded(__func__, [&] { write_counts(sync, out_buckets, out_left_in_backward); });
}

swv_status* swv_grad_sync_num_states(const swv_grad_sync* sync, size_t* out_num) {
  return guarded(__func__, out_num, "out_num",
                 [&] { return power_sgd_of(sync).state_names().size(); });
}

swv_status* swv_grad_sync_state(const swv_grad_sync* sync, size_t index, swv_string** out_name,
                                swv_tensor** out_tensor) {
  return guarded(__func__, [&] { write_state(sync, index, out_name, out_tensor); });
}

swv_status* swv_grad_sync_set_states(swv_grad_sync* sync, const char* const* names,
                                     const swv_tensor* const* tensors, size_t num_states) {
  return guarded(__func__, [&] { set_states(sync, names, tensors, num_states); });
}
