#include "shardweave/modules/module_watch.h"

#include <algorithm>

#include "ATen/core/dispatch/Dispatcher.h"
#include "absl/strings/str_join.h"
#include "c10/core/GradMode.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/modules/hooked.h"
#include "torch/csrc/autograd/graph_task.h"
#include "torch/nn/module.h"

namespace shardweave::modules_internal {
namespace {

using namespace dtensor_internal;

// LibTorch's callbacks are functions without data of their own.
thread_local ModuleWatch* current = nullptr;

bool in_backward() {
  return torch::autograd::get_current_graph_task_id() != -1;
}

std::optional<c10::OperatorHandle> operator_of(const at::RecordFunction& function) {
  const std::optional<c10::OperatorName> name = function.operator_name();
  if (!name.has_value()) return std::nullopt;
  return c10::Dispatcher::singleton().findSchema(*name);
}

std::vector<at::Tensor> tensors_in(c10::ArrayRef<const c10::IValue> values) {
  std::vector<at::Tensor> tensors;
  for (const c10::IValue& value : values) {
    if (value.isTensor()) {
      if (value.toTensor().defined()) tensors.push_back(value.toTensor());
    } else if (value.isTensorList() || value.isOptionalTensorList()) {
      for (const c10::IValue& element : value.toListRef()) {
        if (element.isTensor() && element.toTensor().defined()) {
          tensors.push_back(element.toTensor());
        }
      }
    }
  }
  return tensors;
}

// RecordFunction::inputs() of a program without NDEBUG asks a flag that LibTorch, which is built
// with it, never sets. What it would return is private; naming it in an explicit instantiation is
// allowed.
template <auto kMember>
struct Revealed {
  friend c10::ArrayRef<const c10::IValue> inputs_of(const at::RecordFunction& function) {
    return function.*kMember;
  }
};
c10::ArrayRef<const c10::IValue> inputs_of(const at::RecordFunction& function);
template struct Revealed<&at::RecordFunction::inputs_>;
#ifdef __GLIBCXX__
// Of LibTorch 2.11. Another one: look at whether inputs_ is what it was.
static_assert(sizeof(at::RecordFunction) == 344);
#endif

// What one operator has on a stack that may hold more.
c10::ArrayRef<const c10::IValue> last(c10::ArrayRef<const c10::IValue> stack, size_t count) {
  return stack.size() <= count ? stack : stack.slice(stack.size() - count);
}

const void* storage_of(const at::Tensor& tensor) {
  if (is_dtensor(tensor.unsafeGetTensorImpl()) || !tensor.has_storage()) return nullptr;
  return tensor.storage().unsafeGetStorageImpl();
}

// The first of "a = b".
std::string_view first_of(std::string_view layer) {
  return layer.substr(0, layer.find(" = "));
}

// The innermost module that two modules are in: of "h.0.up" and "h.0.down" it is "h.0".
std::string_view common_module(std::string_view a, std::string_view b) {
  a = first_of(a);
  b = first_of(b);
  size_t end = 0;
  for (size_t i = 0;; ++i) {
    const bool a_ends = i == a.size() || a[i] == '.', b_ends = i == b.size() || b[i] == '.';
    if (a_ends && b_ends) end = i;
    if (i == a.size() || i == b.size() || a[i] != b[i]) break;
  }
  return a.substr(0, end);
}

std::string name_of_layer(std::string_view layer) {
  return layer.empty() ? std::string("the model itself") : str_cat("'", layer, "'");
}

}  // namespace

std::string_view owner_of(std::string_view fqn) {
  const size_t dot = fqn.rfind('.');
  return dot == std::string_view::npos ? std::string_view() : fqn.substr(0, dot);
}

// While it lives, a Hooked module's value is redistributed: the operators of that are no steps.
class ModuleWatch::Deeper {
 public:
  Deeper(ModuleWatch* watch, const std::string& fqn, std::optional<size_t> step)
      : watch_(watch),
        outer_fqn_(std::exchange(watch->redistributing_, &fqn)),
        outer_step_(watch->running_) {
    ++watch_->depth_;
    if (step.has_value()) watch_->running_ = step;
  }
  ~Deeper() {
    --watch_->depth_;
    watch_->redistributing_ = outer_fqn_;
    watch_->running_ = outer_step_;
  }
  Deeper(const Deeper&) = delete;
  Deeper& operator=(const Deeper&) = delete;

 private:
  ModuleWatch* const watch_;
  const std::string* const outer_fqn_;
  const std::optional<size_t> outer_step_;
};

// Stands in the place of what a plan says of a Hooked module, and does as that.
class ModuleWatch::Hook final : public ForwardRedistribution {
 public:
  Hook(ModuleWatch* watch, std::string fqn, std::shared_ptr<const ForwardRedistribution> inner)
      : watch_(watch), fqn_(std::move(fqn)), inner_(std::move(inner)) {}

  const std::shared_ptr<const ForwardRedistribution>& inner() const { return inner_; }
  void leave() { watch_ = nullptr; }

  at::Tensor input(int index, const at::Tensor& tensor) const override {
    if (watch_ == nullptr || in_backward()) {
      return inner_ == nullptr ? tensor : inner_->input(index, tensor);
    }
    if (index == 0) watch_->hooked_.push_back(fqn_);
    if (inner_ == nullptr) return tensor;
    const Deeper deeper(watch_, fqn_, std::nullopt);
    return inner_->input(index, tensor);
  }
  at::Tensor output(int index, const at::Tensor& tensor) const override {
    if (watch_ == nullptr || in_backward()) {
      return inner_ == nullptr ? tensor : inner_->output(index, tensor);
    }
    const size_t step = watch_->begin_step(
        {.op = index == 0 ? "forward" : str_cat("forward[", index, "]"), .layer = fqn_});
    // Ends also where the plan throws, then without a result.
    struct End {
      ~End() {
        watch->keep_exception([&] { watch->end_step(step, results); });
      }
      ModuleWatch* watch;
      size_t step;
      std::vector<at::Tensor> results;
    } end{watch_, step, {}};
    if (inner_ == nullptr) {
      end.results = {tensor};
    } else {
      const Deeper deeper(watch_, fqn_, step);
      end.results = {inner_->output(index, tensor)};
    }
    return end.results[0];
  }
  void check_met(int inputs, int outputs) const override {
    if (watch_ != nullptr && !watch_->hooked_.empty() && watch_->hooked_.back() == fqn_) {
      watch_->hooked_.pop_back();
    }
    if (inner_ != nullptr) inner_->check_met(inputs, outputs);
  }
  const ForwardLayouts* layouts() const override {
    return inner_ == nullptr ? nullptr : inner_->layouts();
  }

 private:
  ModuleWatch* watch_;
  const std::string fqn_;
  const std::shared_ptr<const ForwardRedistribution> inner_;
};

ModuleWatch::ModuleWatch(torch::nn::Module& model, Listener& listener) : listener_(&listener) {
  if (current != nullptr) {
    throw Error(absl::FailedPreconditionError(
        "a model is watched on this thread already: list_communication(), module_memory() and "
        "verify() do not run within each other"));
  }
  for (const dtensor_internal::Member& member : members_of(model)) {
    Member known;
    for (const std::string& fqn : member.fqns) {
      const std::string owner(owner_of(fqn));
      if (std::find(known.owners.begin(), known.owners.end(), owner) == known.owners.end()) {
        known.owners.push_back(owner);
      }
      known.is_weight |= fqn.ends_with("weight") && !member.is_buffer;
    }
    members_[member.tensor.unsafeGetTensorImpl()] = known;
    if (is_dtensor(member.tensor.unsafeGetTensorImpl())) {
      const DTensorMeta& meta = meta_of(member.tensor);
      if (meta.family != nullptr) members_[meta.family.get()] = known;
      if (meta.part.state() == LocalPart::State::kReady) {
        if (const void* storage = storage_of(meta.local())) members_[storage] = known;
      }
    } else if (const void* storage = storage_of(member.tensor)) {
      members_[storage] = known;
    }
  }
  const auto watch_hook = [&](const std::string& fqn, torch::nn::Module& module) {
    auto* hook = dynamic_cast<ForwardHook*>(&module);
    if (hook == nullptr ||
        std::any_of(hooks_.begin(), hooks_.end(), [&](auto& h) { return h.first == hook; })) {
      return;
    }
    hooks_.emplace_back(hook, std::make_shared<Hook>(this, fqn, hook->redistribution));
  };
  watch_hook("", model);
  for (const auto& item : model.named_modules("", /*include_self=*/false)) {
    watch_hook(item.key(), *item.value());
  }
  handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&on_begin, &on_end)
                                           .needsInputs(true)
                                           .needsOutputs(true)
                                           .scopes({at::RecordScope::FUNCTION}));
  // Nothing throws from here on, so that no hook outlives this.
  current = this;
  for (auto& [hook, ours] : hooks_) hook->redistribution = ours;
}

ModuleWatch::~ModuleWatch() {
  try {
    failure_ = nullptr;
    finish();
  } catch (...) {  // nobody is left to hear it
  }
}

void ModuleWatch::finish() {
  if (handle_.has_value()) {
    at::removeCallback(*handle_);
    handle_.reset();
    current = nullptr;
    for (auto& [hook, ours] : hooks_) {
      ours->leave();
      if (hook->redistribution == ours) hook->redistribution = ours->inner();
    }
    // What a program has made of weights is not kept longer than it keeps it.
    members_.clear();
    derived_.clear();
  }
  if (failure_ != nullptr) std::rethrow_exception(std::exchange(failure_, nullptr));
}

std::unique_ptr<at::ObserverContext> ModuleWatch::on_begin(const at::RecordFunction& function) {
  ModuleWatch* watch = current;
  if (watch != nullptr) watch->keep_exception([&] { watch->begin(function); });
  return nullptr;
}

void ModuleWatch::on_end(const at::RecordFunction& function, at::ObserverContext* /*context*/) {
  ModuleWatch* watch = current;
  if (watch != nullptr) watch->keep_exception([&] { watch->end(function); });
}

template <typename F>
void ModuleWatch::keep_exception(F f) {
  const at::DisableRecordFunctionGuard unseen;
  try {
    f();
  } catch (...) {
    if (failure_ == nullptr) failure_ = std::current_exception();
  }
}

const ModuleWatch::Member* ModuleWatch::member_of(const at::Tensor& tensor) const {
  const auto find = [&](const void* place) -> const Member* {
    const auto it = place == nullptr ? members_.end() : members_.find(place);
    return it == members_.end() ? nullptr : &it->second;
  };
  if (const Member* member = find(tensor.unsafeGetTensorImpl())) return member;
  if (!is_dtensor(tensor.unsafeGetTensorImpl())) return find(storage_of(tensor));
  return find(meta_of(tensor).family.get());
}

void ModuleWatch::begin(const at::RecordFunction& function) {
  const bool outermost = depth_++ == 0;
  if (in_backward()) {
    behind_backward_ = true;
    return;
  }
  if (!outermost && !listener_->wants_inner()) return;
  const std::optional<c10::OperatorHandle> op = operator_of(function);
  if (!op.has_value()) {
    if (outermost) between_ = true;
    if (listener_->wants_inner()) listener_->inner_begins({});
    return;
  }
  const c10::FunctionSchema& schema = op->schema();
  const std::vector<at::Tensor> arguments =
      tensors_in(last(inputs_of(function), schema.arguments().size()));
  if (listener_->wants_inner()) listener_->inner_begins(arguments);
  if (!outermost) return;
  made_of_ = nullptr;
  const Member* weight = nullptr;
  bool others = false;
  for (const at::Tensor& argument : arguments) {
    const Member* member = member_of(argument);
    if (member == nullptr) {
      others = true;
    } else if (weight == nullptr || (member->is_weight && !weight->is_weight)) {
      weight = member;
    }
  }
  if (weight != nullptr && !others) {  // still only weights: a cast, t(), a norm
    made_of_ = weight;
    return;
  }
  // What reads a weight behind backward, without recording, is an optimizer.
  const bool recording = c10::GradMode::is_enabled();
  const bool optimizes = behind_backward_ && !recording;
  Step step{.op = op->operator_name().name};
  if (weight != nullptr && !optimizes) {
    step.layer = absl::StrJoin(weight->owners, " = ");
    if (recording) behind_backward_ = false;
  }
  step.random = op->hasTag(at::Tag::nondeterministic_seeded);
  running_ = begin_step(std::move(step));
}

void ModuleWatch::end(const at::RecordFunction& function) {
  --depth_;
  const bool wants_results =
      !in_backward() && (listener_->wants_inner() || made_of_ != nullptr || running_.has_value());
  std::vector<at::Tensor> results;
  if (wants_results) {
    if (const std::optional<c10::OperatorHandle> op = operator_of(function)) {
      results = tensors_in(last(
          c10::ArrayRef<const c10::IValue>(function.outputs().data(), function.outputs().size()),
          op->schema().returns().size()));
    }
    if (listener_->wants_inner()) {
      const bool between = !running_.has_value() && (between_ || redistributing_ != nullptr);
      listener_->inner_ends(running_.value_or(steps_.size()), between, results);
    }
  }
  if (depth_ != 0) return;
  between_ = false;
  if (made_of_ != nullptr) {
    const Member member = *made_of_;
    made_of_ = nullptr;
    for (const at::Tensor& result : results) {
      if (!members_.emplace(result.unsafeGetTensorImpl(), member).second) continue;
      derived_.push_back(result);
    }
  }
  if (!running_.has_value()) return;
  const size_t step = *std::exchange(running_, std::nullopt);
  end_step(step, results);
}

size_t ModuleWatch::begin_step(Step step) {
  if (!hooked_.empty()) step.hooked = hooked_.back();
  if (step.layer.has_value()) {
    const std::string site = str_cat(*step.layer, "|", step.op);
    step.call = ++layer_calls_[site];
    step.key = str_cat(site, "|", step.call);
    if (!step.op.starts_with("forward")) {
      last_layer_key_ = step.key;
      calls_.clear();
    }
  } else {
    step.call = ++calls_[step.op];
    step.key = str_cat("behind ", last_layer_key_, "|", step.op, "|", step.call);
  }
  steps_.push_back(std::move(step));
  listener_->begins(steps_.size() - 1);
  return steps_.size() - 1;
}

void ModuleWatch::end_step(size_t step, const std::vector<at::Tensor>& results) {
  listener_->ends(step, results);
}

const std::string* ModuleWatch::layer_before(size_t step) const {
  for (size_t i = std::min(step, steps_.size()); i-- > 0;) {
    if (steps_[i].layer.has_value() && !steps_[i].op.starts_with("forward")) {
      return &*steps_[i].layer;
    }
  }
  return nullptr;
}

const std::string* ModuleWatch::layer_behind(size_t step) const {
  for (size_t i = step; i < steps_.size(); ++i) {
    if (steps_[i].layer.has_value() && !steps_[i].op.starts_with("forward")) {
      return &*steps_[i].layer;
    }
  }
  return nullptr;
}

std::string ModuleWatch::module_of(size_t step) const {
  if (step < steps_.size() && steps_[step].layer.has_value()) return *steps_[step].layer;
  return module_before(step);
}

std::string ModuleWatch::module_before(size_t step) const {
  const std::string* before = layer_before(step);
  const std::string* behind = layer_behind(step);
  std::string_view between;
  if (before != nullptr && behind != nullptr) between = common_module(*before, *behind);
  const std::string_view hooked = step < steps_.size() ? std::string_view(steps_[step].hooked)
                                  : hooked_.empty()    ? std::string_view()
                                                       : std::string_view(hooked_.back());
  return std::string(between.size() > hooked.size() ? between : hooked);
}

std::string ModuleWatch::describe(size_t step) const {
  const Step& s = steps_[step];
  if (s.layer.has_value()) {
    return str_cat(name_of_layer(*s.layer), " (", s.op,
                   s.call > 1 ? str_cat(", call ", s.call) : "", ")");
  }
  std::string text = s.op;
  if (s.call > 1) str_append(&text, " (the ", s.call, ". one)");
  const std::string module = module_of(step);
  if (!module.empty()) str_append(&text, " in '", module, "'");
  const std::string* before = layer_before(step);
  const std::string* behind = layer_behind(step);
  if (before != nullptr && behind != nullptr) {
    str_append(&text, ", between ", name_of_layer(*before), " and ", name_of_layer(*behind));
  } else if (before != nullptr) {
    str_append(&text, ", behind ", name_of_layer(*before));
  } else if (behind != nullptr) {
    str_append(&text, ", before ", name_of_layer(*behind));
  }
  return text;
}

}  // namespace shardweave::modules_internal
