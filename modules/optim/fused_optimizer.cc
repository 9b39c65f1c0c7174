#include "shardweave/modules/optim/fused_optimizer.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "ATen/ops/_foreach_add.h"
#include "ATen/ops/_foreach_mul.h"
#include "ATen/ops/_foreach_sign.h"
#include "ATen/ops/_fused_adam.h"
#include "ATen/ops/_fused_adamw.h"
#include "ATen/ops/_fused_sgd.h"
#include "ATen/ops/full.h"
#include "ATen/ops/zeros.h"
#include "ATen/ops/zeros_like.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "absl/strings/str_join.h"
#include "c10/core/GradMode.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/engine/capture.h"
#include "shardweave/dtensor/engine/checksum.h"
#include "shardweave/dtensor/engine/detour.h"
#include "shardweave/dtensor/engine/local_part.h"
#include "shardweave/dtensor/engine/provenance.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "shardweave/modules/optim/update.h"

namespace shardweave {
namespace {

using namespace dtensor_internal;

constexpr char kFusedOptimizer[] = "FusedOptimizer";
// capi/ says there what its function is called.
constexpr std::string_view kNotSynchronized =
    "; the gradients are to be synchronized before the step";

// The kernels do not.
void bump_version(const at::Tensor& tensor) {
  if (tensor.defined() && !tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

SpecRef spec_of(const at::Tensor& tensor) {
  return is_dtensor(tensor) ? meta_of(tensor).spec : SpecRef();
}
// "[S(0), R]", "plain"
std::string lies(const SpecRef& spec) {
  return spec == nullptr ? "plain" : spec->layout.to_string();
}
// Whether local parts belong together.
bool lie_alike(const SpecRef& a, const SpecRef& b) {
  if (a == b) return true;
  return a != nullptr && b != nullptr && a->context == b->context && a->sizes == b->sizes &&
         a->layout == b->layout;
}

// "parameter 3 ('head.weight')", if it has a name.
std::string called(size_t i, const at::Tensor& parameter) {
  const std::string_view name = is_dtensor(parameter) ? parameter_of(meta_of(parameter)) : "";
  return name.empty() ? str_cat("parameter ", i) : str_cat("parameter ", i, " ('", name, "')");
}

void check_gradient(size_t i, const at::Tensor& parameter, const at::Tensor& grad) {
  const SpecRef of_parameter = spec_of(parameter);
  const SpecRef of_grad = spec_of(grad);
  if (lie_alike(of_parameter, of_grad) && parameter.sizes() == grad.sizes() &&
      grad.layout() == at::kStrided) {
    return;
  }
  std::string wrong =
      str_cat(" lies ", lies(of_parameter), ", its gradient ", lies(of_grad), kNotSynchronized);
  if (grad.layout() != at::kStrided) {
    wrong = " has a sparse gradient; wanted a dense one";
  } else if (parameter.sizes() != grad.sizes()) {
    wrong = str_cat(" has shape [", absl::StrJoin(parameter.sizes(), ", "), "], its gradient [",
                    absl::StrJoin(grad.sizes(), ", "), "]");
  } else if (of_parameter != nullptr && of_grad != nullptr &&
             of_parameter->context != of_grad->context) {
    wrong = " and its gradient lie on two meshes";
  }
  Error error(kFusedOptimizer, absl::FailedPreconditionError(str_cat(called(i, parameter), wrong)));
  if (wrong.ends_with(kNotSynchronized)) error.add_context("finish_grad_sync() does that");
  throw error;
}

// Of the step that is being captured, also where a hook on autograd's thread takes an optimizer's step.
Capture* capture_of(const std::vector<at::Tensor>& parameters) {
  for (const at::Tensor& parameter : parameters) {
    if (!is_dtensor(parameter)) continue;
    const MeshContext& context = *meta_of(parameter).context;
    check_captured_mesh(context);
    if (context.captures.under_way != nullptr) return context.captures.under_way;
  }
  return Capture::current();
}

using optim_internal::Update;

// How a mean over one of a parameter's dimensions (counted from the end) lies: whole along the mesh
// dimensions that cut it there, else as the parameter.
SpecRef mean_spec(const Spec& parameter, int mean_over, at::ScalarType dtype) {
  const int dim = parameter.ndim() - mean_over;
  Dims sizes = parameter.sizes;
  sizes[static_cast<size_t>(dim)] = 1;
  Placements placements = parameter.layout.placements();
  for (Placement& p : placements) {
    if (p.is_shard(dim)) p = Replicate();
  }
  const Layout layout =
      value_or_throw(Layout::create(std::move(placements), parameter.layout.order()));
  return parameter.context->intern(layout, sizes, contiguous_strides(sizes), dtype,
                                   parameter.device, parameter.origins);
}

// Whether a step with them needs what other ranks have.
bool communicates(const OptimizerOptions& options) {
  return std::holds_alternative<AdafactorOptions>(options) ||
         std::holds_alternative<MuonOptions>(options);
}

std::vector<int> cutting(const Spec& spec) {
  std::vector<int> dims;
  for (int m = 0; m < spec.context->mesh().ndim(); ++m) {
    if (spec.layout[m].is_shard() && spec.context->mesh().size(m) > 1) dims.push_back(m);
  }
  return dims;
}

using Numbers = absl::InlinedVector<double, 12>;

Numbers numbers_of(const SgdOptions& o) {
  return {o.lr, o.momentum, o.dampening, o.weight_decay, o.nesterov ? 1.0 : 0.0};
}
Numbers numbers_of(const AdamOptions& o) {
  return {o.lr, o.beta1, o.beta2, o.eps, o.weight_decay, o.amsgrad ? 1.0 : 0.0};
}
Numbers numbers_of(const AdamWOptions& o) {
  return {o.lr, o.beta1, o.beta2, o.eps, o.weight_decay, o.amsgrad ? 1.0 : 0.0};
}
Numbers numbers_of(const LionOptions& o) {
  return {o.lr, o.beta1, o.beta2, o.weight_decay};
}
Numbers numbers_of(const AdafactorOptions& o) {
  return {o.lr, o.beta2_decay, o.eps1.value_or(-1), o.eps2, o.clip_threshold, o.weight_decay};
}
Numbers numbers_of(const MuonOptions& o) {
  const auto number = [](auto value) { return static_cast<double>(value); };
  return {o.lr,   o.weight_decay, o.momentum, number(o.nesterov), number(o.ns_steps), o.ns_a,
          o.ns_b, o.ns_c,         o.eps,      number(o.lr_scale), number(o.ns_dtype)};
}

// Of everything that has to be the same on all ranks. `as_floats`: but for the last bits, for a schedule's
// cosine may end otherwise on another processor.
uint64_t checksum_of(const OptimizerOptions& options, bool as_floats) {
  uint64_t sum = options.index() + 1;
  std::visit(
      [&](const auto& o) {
        for (const double number : numbers_of(o)) {
          const double counts = as_floats ? static_cast<float>(number) : number;
          sum = mix(sum, std::bit_cast<uint64_t>(counts));
        }
      },
      options);
  return sum;
}

// The ranks of one mesh, about to step together.
struct Together {
  explicit Together(std::shared_ptr<MeshContext> context_in, const Cause& cause)
      : context(std::move(context_in)), agreement(*context, cause) {}

  std::shared_ptr<MeshContext> context;
  Agreement agreement;
  std::vector<uint64_t> sums = {};
  std::vector<size_t> parameters = {};  // whose they are
};

void check_parameter(size_t i, const at::Tensor& p, const OptimizerOptions& options) {
  const auto refuse = [&](std::string_view why) {
    throw Error(kFusedOptimizer, absl::InvalidArgumentError(str_cat("parameter ", i, why)));
  };
  if (!p.defined() || !p.is_leaf() || !p.is_floating_point()) {
    refuse(str_cat(" is ",
                   !p.defined()   ? "undefined"
                   : !p.is_leaf() ? "no leaf: it is the result of an operator"
                                  : str_cat("of type ", c10::toString(p.scalar_type())),
                   "; wanted a floating-point leaf"));
  }
  if (std::holds_alternative<MuonOptions>(options) && p.dim() != 2) {
    Error error(kFusedOptimizer,
                absl::InvalidArgumentError(str_cat(
                    called(i, p), " has shape [", absl::StrJoin(p.sizes(), ", "),
                    "]; Muon wants two dimensions: the others are better in a group with AdamW")));
    error.add_context("muon_groups() makes both");
    throw error;
  }
}

}  // namespace

struct FusedOptimizer::Batch {
  const Options* options;
  at::ScalarType dtype;
  c10::Device device;
  bool first_step;
  std::vector<at::Tensor> parameters = {}, grads = {}, firsts = {}, seconds = {}, largest = {},
                          steps = {};
  at::Tensor lr = {};  // that a replay finds on the device; undefined: it is in the options

  // Kernels of a device read them there. The host knows them: it waits for nothing.
  void bring_steps_to_device() {
    if (device.is_cpu()) return;
    std::map<float, at::Tensor> there;
    for (at::Tensor& step : steps) {
      const float count = *step.const_data_ptr<float>();
      at::Tensor& its = there[count];
      if (!its.defined()) its = at::full({}, count, at::TensorOptions(at::kFloat).device(device));
      step = its;
    }
  }

  // What a step has of a number: f(lr).
  template <typename F>
  void with_lr(double of_options, F f) const {
    lr.defined() ? f(lr) : f(of_options);
  }
};

// What a captured step finds on the device in each replay.
struct FusedOptimizer::Captured {
  // Throws Error for what cannot be captured.
  static void check(size_t parameter, const Options& options, bool is_first_step,
                    c10::Device device) {
    const auto refuse = [&](const absl::Status& why) {
      throw Error(kFusedOptimizer,
                  absl::Status(why.code(), str_cat("parameter ", parameter, ": ", why.message())));
    };
    if (communicates(options) || std::holds_alternative<LionOptions>(options)) {
      refuse(absl::UnimplementedError(
          "steps of Lion, Adafactor and Muon are not captured: step after the replay"));
    }
    if (is_first_step) {
      refuse(
          absl::FailedPreconditionError("the first step of SGD with dampening is not like those "
                                        "that follow: capture a later one"));
    }
    if (device.is_cpu()) {
      refuse(
          absl::FailedPreconditionError("it is on the CPU, in a step that is captured on a GPU"));
    }
  }

  // Of a batch: its steps and its learning rate are replaced by those on the device.
  void add(Batch& batch, std::shared_ptr<double> lr, Capture& capture) {
    std::map<float, at::Tensor> there;
    for (at::Tensor& step : batch.steps) {
      at::Tensor& its = there[*step.const_data_ptr<float>()];
      if (!its.defined()) its = capture.number(at::kFloat);
      shown.emplace_back(step, its);
      step = its;
    }
    for (const auto* list : {&batch.firsts, &batch.seconds, &batch.largest}) {
      kept.insert(kept.end(), list->begin(), list->end());
    }
    batch.lr = capture.number(at::kFloat);
    lrs.emplace_back(std::move(lr), batch.lr);
  }

  // By the memory of what is shown.
  std::map<const void*, float> counts() const {
    std::map<const void*, float> counts;
    for (const auto& [step, there] : shown) {
      const float count = *step.const_data_ptr<float>();
      if (counts.emplace(there.const_data_ptr(), count).first->second == count) continue;
      throw Error(kFusedOptimizer,
                  absl::FailedPreconditionError(
                      "parameters that had been stepped equally often when the step "
                      "was captured no longer are: capture it again"));
    }
    return counts;
  }

  void before_replay() const {
    std::map<const void*, float> to_show = counts();
    for (const at::Tensor& step : counted) *step.mutable_data_ptr<float>() += 1;
    for (const at::Tensor& tensor : kept) bump_version(tensor);
    for (const auto& [step, there] : shown) {
      if (to_show.erase(there.const_data_ptr()) == 0) continue;
      there.fill_(*step.const_data_ptr<float>());
    }
    for (const auto& [lr, there] : lrs) there.fill_(*lr);
    for (const at::Tensor& parameter : parameters) part_written(parameter, kFusedOptimizer);
  }

  std::vector<at::Tensor> counted;                       // of the host
  std::vector<std::pair<at::Tensor, at::Tensor>> shown;  // of those, and where; several in one
  std::vector<at::Tensor> kept;                          // what the kernels write
  std::vector<std::pair<std::shared_ptr<double>, at::Tensor>> lrs;
  std::vector<at::Tensor> parameters;
};

// Of one parameter with a gradient, checked.
struct FusedOptimizer::Step {
  Step(const FusedOptimizer& optimizer, State& its)
      : state(&its), parameter(optimizer.parameters_[its.parameter]) {
    const at::Tensor& gradient = parameter.grad();
    check_gradient(state->parameter, parameter, gradient);
    optimizer.made(its);
    part = part_to_write(parameter, kFusedOptimizer);
    grad = part_to_read(gradient, kFusedOptimizer);
    update.options = &optimizer.groups_[its.group];
    update.spec = its.spec;
    update.first = &its.first;
    update.second = &its.second;
    update.largest = &its.largest;
    update.step = its.step;
    // Without dampening the formula of later steps gives the same of a buffer of zeros, and what somebody
    // has written into it stays.
    const auto* sgd = std::get_if<SgdOptions>(update.options);
    update.is_first_step = its.steps() == 0 && sgd != nullptr && sgd->dampening != 0;
    if (its.spec == nullptr) return;
    update.cutting = cutting(*its.spec);
    update.name = parameter_of(meta_of(parameter));
    update.provenance = provenance_of(meta_of(gradient));
    if (communicates(*update.options) && its.spec->layout.has_partial()) {
      throw Error(kFusedOptimizer, absl::FailedPreconditionError(str_cat(
                                       "parameter ", its.parameter, " lies ", lies(its.spec),
                                       "; wanted numbers, not their summands")));
    }
  }

  State* state;
  const at::Tensor& parameter;
  at::Tensor part;
  at::Tensor grad;
  Update update;
};

FusedOptimizer::FusedOptimizer(std::vector<at::Tensor> parameters, const Options& options)
    : FusedOptimizer(
          std::vector<ParameterGroup>{{.parameters = std::move(parameters), .options = options}}) {}

FusedOptimizer::FusedOptimizer(const std::vector<ParameterGroup>& groups) {
  if (groups.empty()) {
    throw Error(kFusedOptimizer,
                absl::InvalidArgumentError("there is no group of parameters; wanted one or more"));
  }
  for (const ParameterGroup& group : groups) add_group(group);
}

void FusedOptimizer::check(const std::vector<ParameterGroup>& groups) {
  const FusedOptimizer made(groups);
}

size_t FusedOptimizer::add_group(const ParameterGroup& group) {
  check_options(group.options, kFusedOptimizer);
  absl::flat_hash_map<const c10::TensorImpl*, size_t> known;
  for (size_t i = 0; i < states_.size(); ++i) {
    known.emplace(parameters_[states_[i].parameter].unsafeGetTensorImpl(), i);
  }
  const size_t number = groups_.size(), before = parameters_.size();
  std::vector<State> added;
  std::vector<size_t> indices;
  for (const at::Tensor& p : group.parameters) {
    const size_t i = before + indices.size();
    check_parameter(i, p, group.options);
    const auto [it, is_new] = known.emplace(p.unsafeGetTensorImpl(), states_.size() + added.size());
    if (is_new) {
      added.push_back({.parameter = i, .group = number});
    } else if (it->second < states_.size()) {
      throw Error(kFusedOptimizer,
                  absl::InvalidArgumentError(str_cat(called(i, p), " of group ", number,
                                                     " is in group ", states_[it->second].group,
                                                     ", too: wanted one group for each")));
    }
    indices.push_back(it->second);
  }
  parameters_.insert(parameters_.end(), group.parameters.begin(), group.parameters.end());
  states_.insert(states_.end(), added.begin(), added.end());
  state_indices_.insert(state_indices_.end(), indices.begin(), indices.end());
  groups_.push_back(group.options);
  captured_lrs_.emplace_back();
  return number;
}

std::vector<FusedOptimizer::Slot> FusedOptimizer::slots(const Options& options, int64_t ndim) {
  if (const auto* sgd = std::get_if<SgdOptions>(&options)) {
    return {{"momentum_buffer", &State::first, sgd->momentum != 0}};
  }
  if (std::holds_alternative<LionOptions>(options)) return {{"exp_avg", &State::first, true}};
  if (std::holds_alternative<MuonOptions>(options)) {
    return {{"momentum_buffer", &State::first, true}};
  }
  if (std::holds_alternative<AdafactorOptions>(options)) {
    return {{"row_var", &State::first, ndim > 1, /*mean_over=*/1},
            {"col_var", &State::second, ndim > 1, /*mean_over=*/2},
            {"variance", &State::largest, ndim <= 1}};
  }
  const auto* adam = std::get_if<AdamOptions>(&options);
  const bool amsgrad = adam != nullptr ? adam->amsgrad : std::get<AdamWOptions>(options).amsgrad;
  return {{"exp_avg", &State::first, true},
          {"exp_avg_sq", &State::second, true},
          {"max_exp_avg_sq", &State::largest, amsgrad}};
}

std::vector<FusedOptimizer::Slot> FusedOptimizer::slots(const State& state) const {
  return slots(groups_[state.group], parameters_[state.parameter].dim());
}

bool FusedOptimizer::has_slots(const State& state) const {
  const std::vector<Slot> all = slots(state);
  return std::any_of(all.begin(), all.end(), [](const Slot& slot) { return slot.used; });
}

at::ScalarType FusedOptimizer::state_dtype(const State& state, at::ScalarType parameter) const {
  // Means of many steps, of which one in 8 bits more would be lost.
  const bool is_adafactor = std::holds_alternative<AdafactorOptions>(groups_[state.group]);
  return is_adafactor && parameter != at::kDouble ? at::kFloat : parameter;
}

double FusedOptimizer::State::steps() const {
  return *step.const_data_ptr<float>();
}

FusedOptimizer::State& FusedOptimizer::made(State& state) const {
  const at::Tensor& parameter = parameters_[state.parameter];
  SpecRef spec = spec_of(parameter);
  if (state.step.defined()) {
    if (lie_alike(spec, state.spec)) {
      const bool fits = parameter.sizes() == at::IntArrayRef(state.sizes) &&
                        state_dtype(state, parameter.scalar_type()) == state.dtype;
      if (fits || !has_slots(state)) return state;
      throw Error(
          kFusedOptimizer,
          absl::FailedPreconditionError(str_cat(
              "parameter ", state.parameter, " has shape [", absl::StrJoin(parameter.sizes(), ", "),
              "] and dtype ", c10::toString(parameter.scalar_type()), ", its state is of [",
              absl::StrJoin(state.sizes, ", "), "] and ", c10::toString(state.dtype),
              "; another parameter is another optimizer's")));
    }
    throw Error(
        kFusedOptimizer,
        absl::FailedPreconditionError(str_cat(
            "parameter ", state.parameter, " lies ", lies(spec), ", its state ", lies(state.spec),
            "; parameters are distributed before the first step, and before "
            "their state is read or set")));
  }
  const at::Tensor part = part_to_read(parameter, kFusedOptimizer);
  state.dtype = state_dtype(state, part.scalar_type());
  const at::TensorOptions options = part.options().requires_grad(std::nullopt).dtype(state.dtype);
  for (const Slot& slot : slots(state)) {
    if (!slot.used) continue;
    Dims sizes(part.sizes().begin(), part.sizes().end());
    if (slot.mean_over != 0 && spec != nullptr) {
      sizes = mean_spec(*spec, slot.mean_over, spec->dtype)->local_sizes;
    } else if (slot.mean_over != 0) {
      sizes[sizes.size() - static_cast<size_t>(slot.mean_over)] = 1;
    }
    state.*slot.tensor = at::zeros(array(sizes), options);
  }
  state.step = at::zeros({}, at::kFloat);
  state.spec = std::move(spec);
  state.sizes.assign(parameter.sizes().begin(), parameter.sizes().end());
  return state;
}

void FusedOptimizer::run(const SgdOptions& o, Batch& b) {
  b.with_lr(o.lr, [&](const auto& lr) {
    at::_fused_sgd_(b.parameters, b.grads, b.firsts, o.weight_decay, o.momentum, lr, o.dampening,
                    o.nesterov, /*maximize=*/false, b.first_step);
  });
}

void FusedOptimizer::run(const AdamOptions& o, Batch& b) {
  b.with_lr(o.lr, [&](const auto& lr) {
    at::_fused_adam_(b.parameters, b.grads, b.firsts, b.seconds, b.largest, b.steps, lr, o.beta1,
                     o.beta2, o.weight_decay, o.eps, o.amsgrad, /*maximize=*/false);
  });
}

void FusedOptimizer::run(const AdamWOptions& o, Batch& b) {
  b.with_lr(o.lr, [&](const auto& lr) {
    at::_fused_adamw_(b.parameters, b.grads, b.firsts, b.seconds, b.largest, b.steps, lr, o.beta1,
                      o.beta2, o.weight_decay, o.eps, o.amsgrad, /*maximize=*/false);
  });
}

void FusedOptimizer::run(const LionOptions& o, Batch& b) {
  std::vector<at::Tensor> directions = at::_foreach_mul(b.firsts, o.beta1);
  at::_foreach_add_(directions, b.grads, 1 - o.beta1);
  at::_foreach_sign_(directions);
  at::_foreach_mul_(b.parameters, 1 - o.lr * o.weight_decay);
  at::_foreach_add_(b.parameters, directions, -o.lr);
  at::_foreach_mul_(b.firsts, o.beta2);
  at::_foreach_add_(b.firsts, b.grads, 1 - o.beta2);
}

void FusedOptimizer::step(std::source_location where) {
  const c10::AutoGradMode no_grad(false);
  const Cause cause = {.name = kFusedOptimizer, .where = where};
  Capture* const capture = capture_of(parameters_);
  std::vector<std::unique_ptr<Together>> meshes;  // on which the step communicates
  const auto together_on = [&](const MeshContext* context) -> Together* {
    for (const auto& mesh : meshes) {
      if (mesh->context.get() == context) return mesh.get();
    }
    return nullptr;
  };
  for (const State& state : states_) {
    const at::Tensor& parameter = parameters_[state.parameter];
    if (!communicates(groups_[state.group]) || !is_dtensor(parameter)) continue;
    const DTensorMeta& meta = meta_of(parameter);
    if (cutting(*meta.spec).empty() || together_on(meta.context.get()) != nullptr) continue;
    meshes.push_back(std::make_unique<Together>(meta.context, cause));
  }
  std::vector<Step> steps;
  steps.reserve(states_.size());
  for (State& state : states_) {  // all, before anything is changed
    const at::Tensor& parameter = parameters_[state.parameter];
    const at::Tensor& grad = parameter.grad();
    if (communicates(groups_[state.group]) && is_dtensor(parameter)) {
      if (Together* mesh = together_on(meta_of(parameter).context.get())) {
        uint64_t sum = mix(checksum_of(groups_[state.group], /*as_floats=*/false), grad.defined());
        // A rank that has looked at a state has made it.
        sum = mix(sum, state.step.defined() ? static_cast<uint64_t>(state.steps()) : 0);
        mesh->sums.push_back(sum);
        mesh->parameters.push_back(state.parameter);
      }
    }
    if (!grad.defined()) continue;
    if (capture != nullptr && !state.step.defined()) {
      throw Error(kFusedOptimizer,
                  absl::FailedPreconditionError(str_cat(
                      "parameter ", state.parameter,
                      " has no state yet, and each replay of a step that is captured would begin "
                      "with zeros: take a step before")));
    }
    steps.emplace_back(*this, state);
    if (capture == nullptr) continue;
    const Update& u = steps.back().update;
    Captured::check(state.parameter, *u.options, u.is_first_step, steps.back().part.device());
  }
  std::vector<at::Tensor> written;
  for (const Step& step : steps) written.push_back(step.parameter);
  check_written_together(written, kFusedOptimizer);
  for (const auto& mesh : meshes) {
    const std::optional<Difference> differs = mesh->agreement.reach(mesh->sums);
    if (!differs.has_value()) continue;
    const size_t i = std::min(differs->index, mesh->parameters.size() - 1);
    throw Error(kFusedOptimizer,
                absl::InvalidArgumentError(str_cat(
                    "parameter ", mesh->parameters[i], " is not stepped alike on ranks ",
                    differs->ranks[0], " and ", differs->ranks[1],
                    ": one has a gradient and the other has none, or options or steps differ")));
  }

  // Kernels take one dtype and device, and either first steps or others.
  std::vector<Batch> batches;
  Captured captured;
  optim_internal::Updates adafactor, muon;
  for (Step& step : steps) {
    Update& u = step.update;
    // Before they are written to, so that who copies them meanwhile finds out.
    for (const at::Tensor* state : {u.first, u.second, u.largest}) bump_version(*state);
    bump_version(step.part);
    if (capture == nullptr) {
      *step.state->step.mutable_data_ptr<float>() += 1;
    } else {
      captured.counted.push_back(step.state->step);
    }
    if (step.parameter.numel() == 0) continue;
    if (!communicates(*u.options) && step.part.numel() == 0) continue;
    // The kernels walk over the memory: it has to be in order.
    u.part = step.part.contiguous();
    u.grad = step.grad.to(step.part.scalar_type()).contiguous();
    if (communicates(*u.options)) {
      (std::holds_alternative<MuonOptions>(*u.options) ? muon : adafactor).push_back(&u);
      continue;
    }
    auto batch = std::find_if(batches.begin(), batches.end(), [&](const Batch& b) {
      return b.options == u.options && b.dtype == u.part.scalar_type() &&
             b.device == u.part.device() && b.first_step == u.is_first_step;
    });
    if (batch == batches.end()) {
      batches.push_back({u.options, u.part.scalar_type(), u.part.device(), u.is_first_step});
      batch = batches.end() - 1;
    }
    batch->parameters.push_back(u.part);
    batch->grads.push_back(u.grad);
    if (u.first->defined()) batch->firsts.push_back(*u.first);
    if (u.second->defined()) batch->seconds.push_back(*u.second);
    if (u.largest->defined()) batch->largest.push_back(*u.largest);
    batch->steps.push_back(u.step);
  }
  for (Batch& batch : batches) {
    if (capture == nullptr) {
      batch.bring_steps_to_device();
    } else {
      const auto group = static_cast<size_t>(batch.options - groups_.data());
      std::shared_ptr<double>& lr = captured_lrs_[group];
      if (lr == nullptr) lr = std::make_shared<double>(lr_of(*batch.options));
      captured.add(batch, lr, *capture);
    }
    std::visit(
        [&](const auto& o) {
          if constexpr (requires { run(o, batch); }) run(o, batch);
        },
        *batch.options);
  }
  if (!adafactor.empty()) optim_internal::adafactor_step(adafactor, cause);
  if (!muon.empty()) optim_internal::muon_step(muon, cause);
  for (const Step& step : steps) {
    const at::Tensor& work = step.update.part;
    if (work.defined() && !work.is_same(step.part)) step.part.copy_(work);
  }
  // Ranks that step with other numbers, or more often, are apart.
  std::vector<uint64_t> by;
  for (const Options& options : groups_) by.push_back(checksum_of(options, /*as_floats=*/true));
  for (const Step& step : steps) {
    const at::Tensor& grad = step.parameter.grad();
    const bool is_ranks_own = is_dtensor(grad) && provenance_of(meta_of(grad)) == kRanksOwn;
    part_written(step.parameter, kFusedOptimizer, is_ranks_own ? kRanksOwn : by[step.state->group]);
  }
  if (capture == nullptr) return;
  captured.parameters = std::move(written);
  const auto shared = std::make_shared<const Captured>(std::move(captured));
  capture->before_replay([shared] { shared->before_replay(); }, [shared] { shared->counts(); });
}

void FusedOptimizer::zero_grad() const {
  for (const at::Tensor& parameter : parameters_) parameter.mutable_grad() = at::Tensor();
}

const FusedOptimizer::Options& FusedOptimizer::options(size_t group) const {
  if (group >= groups_.size()) {
    throw Error(kFusedOptimizer,
                absl::OutOfRangeError(str_cat("group ", group, " of ", groups_.size())));
  }
  return groups_[group];
}

double FusedOptimizer::lr_of(const Options& options) {
  return std::visit([](const auto& o) { return o.lr; }, options);
}

void FusedOptimizer::set_lr(double lr) {
  for (size_t group = 0; group < groups_.size(); ++group) set_lr(group, lr);
}

void FusedOptimizer::set_lr(size_t group, double lr) {
  Options changed = options(group);
  std::visit([&](auto& o) { o.lr = lr; }, changed);
  check_options(changed, kFusedOptimizer);
  groups_[group] = changed;
  if (captured_lrs_[group] != nullptr) *captured_lrs_[group] = lr;
}

std::vector<std::string_view> FusedOptimizer::state_names(size_t parameter) const {
  std::vector<std::string_view> names = {"step"};
  for (const Slot& slot : slots(state_of(parameter))) {
    if (slot.used) names.push_back(slot.name);
  }
  return names;
}

std::vector<std::string_view> FusedOptimizer::state_names() const {
  std::vector<std::string_view> names = {"step"};
  for (const State& state : states_) {
    for (const Slot& slot : slots(state)) {
      const bool is_new = std::find(names.begin(), names.end(), slot.name) == names.end();
      if (slot.used && is_new) names.push_back(slot.name);
    }
  }
  return names;
}

FusedOptimizer::State& FusedOptimizer::state_of(size_t parameter) const {
  if (parameter >= parameters_.size()) {
    throw Error(kFusedOptimizer, absl::OutOfRangeError(
                                     str_cat("parameter ", parameter, " of ", parameters_.size())));
  }
  return states_[state_indices_[parameter]];
}

FusedOptimizer::Slot FusedOptimizer::find(const State& state, std::string_view name) const {
  if (name == "step") return {name, &State::step, true};
  for (const Slot& slot : slots(state)) {
    if (slot.name == name) return slot;
  }
  std::vector<std::string> known = {"step"};
  for (size_t group = 0; group < groups_.size(); ++group) {
    for (const int64_t ndim : {1, 2}) {
      for (const Slot& slot : slots(groups_[group], ndim)) {
        if (slot.name == name) return {name, nullptr, false};
        if (std::find(known.begin(), known.end(), slot.name) == known.end()) {
          known.emplace_back(slot.name);
        }
      }
    }
  }
  throw Error(kFusedOptimizer,
              absl::NotFoundError(str_cat("there is no state '", name, "'; there are ",
                                          absl::StrJoin(known, ", "))));
}

at::Tensor FusedOptimizer::lying(const State& state, const Slot& slot) const {
  at::Tensor part = state.*slot.tensor;
  const at::Tensor& parameter = parameters_[state.parameter];
  if (slot.mean_over == 0 || !is_dtensor(parameter)) return lying_as(parameter, std::move(part));
  const DTensorMeta& meta = meta_of(parameter);
  SpecRef spec = mean_spec(*meta.spec, slot.mean_over, part.scalar_type());
  return wrap(std::move(part), std::move(spec), meta.context);
}

at::Tensor FusedOptimizer::state(size_t parameter, std::string_view name) const {
  State& state = state_of(parameter);
  const Slot slot = find(state, name);
  const c10::AutoGradMode no_grad(false);
  made(state);
  if (!slot.used) return {};
  return name == "step" ? state.step : lying(state, slot);
}

void FusedOptimizer::set_state(size_t parameter, std::string_view name, const at::Tensor& value) {
  if (parameter >= parameters_.size()) {  // the others set the state of one that there is
    const auto sharded = std::find_if(parameters_.begin(), parameters_.end(),
                                      [](const at::Tensor& each) { return is_dtensor(each); });
    std::optional<Agreement> never_reached;
    if (sharded != parameters_.end()) {
      never_reached.emplace(*meta_of(*sharded).context, Cause{.name = kFusedOptimizer});
    }
    (void)state_of(parameter);
  }
  const at::Tensor& its = parameters_[state_of(parameter).parameter];
  if (!is_dtensor(its)) return put_state(parameter, name, value);
  Agreement agreement(*meta_of(its).context, {.name = kFusedOptimizer});
  check_state(parameter, name, value);
  uint64_t sum = checksum(mix(1, parameter), name);
  if (name == "step") {
    sum = checksum(sum, str_cat(value.item<double>()));
  } else {  // those that lie otherwise move otherwise
    sum = checksum(sum,
                   str_cat(c10::toString(value.scalar_type()), " ", layout_of(value).to_string()));
  }
  if (const std::optional<Difference> differs = agreement.reach({sum})) {
    throw Error(kFusedOptimizer, absl::InvalidArgumentError(str_cat(
                                     "'", name, "' of parameter ", parameter, ": ranks ",
                                     differs->ranks[0], " and ", differs->ranks[1],
                                     " set another state, another 'step', or values of other "
                                     "dtypes or layouts")));
  }
  put_state(parameter, name, value);
}

void FusedOptimizer::check_state(size_t parameter, std::string_view name,
                                 const at::Tensor& value) const {
  const State& state = made(state_of(parameter));
  const Slot slot = find(state, name);
  const c10::AutoGradMode no_grad(false);
  const auto refuse = [&](std::string_view what) {
    throw Error(kFusedOptimizer, absl::InvalidArgumentError(
                                     str_cat("'", name, "' of parameter ", parameter, " ", what)));
  };
  if (!slot.used) refuse("is not used with these options");
  if (!value.defined()) refuse("is set to an undefined tensor");
  if (name == "step") {
    if (value.numel() != 1 || value.is_complex()) {
      refuse(str_cat("is one number; got shape [", absl::StrJoin(value.sizes(), ", "), "], type ",
                     c10::toString(value.scalar_type())));
    }
    const auto steps = value.item<double>();
    if (!(steps >= 0) || steps != std::floor(steps) || steps > (1 << 24)) {
      refuse(str_cat("is ", steps, "; wanted a whole number from 0 to 2^24"));
    }
    return;
  }
  const at::Tensor like = lying(state, slot);
  if (value.sizes() != like.sizes()) {
    refuse(str_cat("has shape [", absl::StrJoin(like.sizes(), ", "), "]; got [",
                   absl::StrJoin(value.sizes(), ", "), "]"));
  }
  if (!value.is_floating_point() || value.layout() != at::kStrided) {
    refuse(str_cat("is dense and floating-point; got ", c10::toString(value.scalar_type()), ", ",
                   value.layout() == at::kStrided ? "dense" : "sparse"));
  }
  if (is_dtensor(value) != is_dtensor(like)) {
    refuse(is_dtensor(like)
               ? str_cat("lies ", lies(meta_of(like).spec), "; got a plain tensor: distribute it")
               : "is plain; got a DTensor: take the full tensor");
  }
  if (is_dtensor(like) && meta_of(value).context != meta_of(like).context) {
    refuse("lies on another mesh");
  }
}

void FusedOptimizer::put_state(size_t parameter, std::string_view name, const at::Tensor& value) {
  check_state(parameter, name, value);
  State& state = state_of(parameter);
  const c10::AutoGradMode no_grad(false);
  if (name == "step") {
    state.step.fill_(value.item<double>());
    state.step_set = true;
    return;
  }
  const Slot slot = find(state, name);
  const at::Tensor like = lying(state, slot);
  const at::Tensor& found = state.*slot.tensor;
  if (!is_dtensor(like)) {
    found.copy_(value);
  } else {
    found.copy_(part_to_read(redistribute(value, meta_of(like).spec->layout), kFusedOptimizer));
  }
  // torch::optim::SGD keeps no step: a buffer alone is one to go on from, and is saved as such.
  const bool is_sgd = std::holds_alternative<SgdOptions>(groups_[state.group]);
  if (is_sgd && !state.step_set && state.steps() == 0) state.step.fill_(1);
}

void optim_internal::put_state(FusedOptimizer& optimizer, size_t parameter, std::string_view name,
                               const at::Tensor& value) {
  optimizer.put_state(parameter, name, value);
}

}  // namespace shardweave
