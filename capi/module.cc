// Modules, plans and optimizers.
#include <algorithm>
#include <map>
#include <memory>
#include <unordered_set>

#include "shardweave/capi/values.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/clip_grad_norm.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/modules/fused_optimizer.h"
#include "shardweave/modules/sharding_plan_json.h"
#include "torch/csrc/jit/api/module.h"
#include "torch/csrc/jit/serialization/import.h"
#include "torch/nn/module.h"

namespace shardweave::capi {
namespace {

struct Named {
  std::string fqn;
  at::Tensor tensor;
};

enum class Slot { kParameter, kBuffer };

// Holds what the host registers; a child per part of a name.
class HostModule : public torch::nn::Module {
 public:
  HostModule() : torch::nn::Module("HostModule") {}

  HostModule* child(const std::string& part) const {
    const auto found = children_by_name_.find(part);
    return found == children_by_name_.end() ? nullptr : found->second;
  }
  HostModule* make_child(const std::string& part) {
    if (HostModule* there = child(part)) return there;
    auto made = register_module(part, std::make_shared<HostModule>());
    children_by_name_.emplace(part, made.get());
    return made.get();
  }

 private:
  std::map<std::string, HostModule*> children_by_name_;
};

// A method of a file, with its schema as calls need it.
struct Method {
  torch::jit::Function* function;
  Signature signature;
};

// What a host has registered, found by name and by number without going through all of it.
class Registry {
 public:
  torch::nn::Module& module() const { return *root_; }

  void add(std::string_view fqn, const at::Tensor& t, Slot slot);
  // Null: there is none.
  const at::Tensor* find(std::string_view fqn) const {
    const auto found = by_name_.find(fqn);
    return found == by_name_.end() ? nullptr : &found->second;
  }
  // Each tensor once, by its first name, as PyTorch's named_parameters(): those of a module before
  // those of its children. Put together again after something was added.
  const std::vector<Named>& tensors(Slot slot) const;
  // By all of their names.
  std::vector<Named> all_names(Slot slot) const;

 private:
  void check_free(std::string_view fqn) const;
  [[noreturn]] void fail_exists(std::string_view fqn) const;

  std::shared_ptr<HostModule> root_ = std::make_shared<HostModule>();
  std::map<std::string, at::Tensor, std::less<>> by_name_;
  mutable std::optional<std::vector<Named>> listed_[2];
};

}  // namespace
}  // namespace shardweave::capi

namespace shardweave::capi {
namespace {

struct ModuleState {
  Registry tensors;
  std::optional<torch::jit::Module> script;  // of a file; its tensors are in `tensors` too
  std::map<std::string, Method, std::less<>> methods;  // those that were called
};

}  // namespace
}  // namespace shardweave::capi

struct swv_module : shardweave::capi::Handle<shardweave::capi::Kind::kModule> {
  std::shared_ptr<shardweave::capi::ModuleState> state;
};

struct swv_plan : shardweave::capi::Handle<shardweave::capi::Kind::kPlan> {
  std::shared_ptr<shardweave::ShardingPlan> plan;
};

struct swv_optimizer : shardweave::capi::Handle<shardweave::capi::Kind::kOptimizer> {
  std::shared_ptr<shardweave::FusedOptimizer> optimizer;
};

namespace shardweave::capi {
namespace {

ModuleState& state_of(const swv_module* module) {
  return *in(module, "module").state;
}
Registry& registry(const swv_module* module) {
  return state_of(module).tensors;
}
ShardingPlan& plan_of(const swv_plan* plan) {
  return *in(plan, "plan").plan;
}
FusedOptimizer& optimizer_of(const swv_optimizer* optimizer) {
  return *in(optimizer, "optimizer").optimizer;
}

std::vector<Named> Registry::all_names(Slot slot) const {
  std::vector<Named> all;
  const auto items = slot == Slot::kParameter ? root_->named_parameters() : root_->named_buffers();
  for (const auto& item : items) all.push_back({item.key(), item.value()});
  return all;
}

const std::vector<Named>& Registry::tensors(Slot slot) const {
  std::optional<std::vector<Named>>& listed = listed_[static_cast<int>(slot)];
  if (listed.has_value()) return *listed;
  std::vector<Named> all = all_names(slot);
  std::unordered_set<const c10::TensorImpl*> seen;
  std::erase_if(all, [&](const Named& named) {
    return !seen.insert(named.tensor.unsafeGetTensorImpl()).second;
  });
  return listed.emplace(std::move(all));
}

void Registry::fail_exists(std::string_view fqn) const {
  const auto clash = [&](std::string_view there) {
    return there == fqn || (there.starts_with(fqn) && there[fqn.size()] == '.') ||
           (fqn.starts_with(there) && fqn[there.size()] == '.');
  };
  for (Slot slot : {Slot::kParameter, Slot::kBuffer}) {
    for (const Named& named : all_names(slot)) {
      if (!clash(named.fqn)) continue;
      fail(absl::StatusCode::kAlreadyExists,
           str_cat("argument 'fqn' is '", fqn, "'; the module has '", named.fqn, "'"));
    }
  }
  fail(absl::StatusCode::kInternal, str_cat("argument 'fqn' is '", fqn, "', which is taken"));
}

// Before anything is registered: register_parameter would leave half of it.
void Registry::check_free(std::string_view fqn) const {
  if (fqn.empty() || fqn.front() == '.' || fqn.back() == '.' ||
      fqn.find("..") != std::string_view::npos) {
    fail_argument("fqn", str_cat("is '", fqn, "'; a part of the name is empty"));
  }
  const HostModule* module = root_.get();  // where the part is; null: nowhere yet
  for (size_t begin = 0, dot = 0; dot != std::string_view::npos; begin = dot + 1) {
    dot = fqn.find('.', begin);
    if (find(fqn.substr(0, dot)) != nullptr) fail_exists(fqn);
    if (module != nullptr) module = module->child(std::string(fqn.substr(begin, dot - begin)));
  }
  if (module != nullptr) fail_exists(fqn);  // a module has this name
}

void Registry::add(std::string_view fqn, const at::Tensor& t, Slot slot) {
  check_free(fqn);
  if (slot == Slot::kParameter && (!t.is_leaf() || !(t.is_floating_point() || t.is_complex()))) {
    fail_argument("tensor", t.is_leaf() ? "has integers; a parameter requires grad"
                                        : "is no leaf: it is the result of an operator");
  }
  HostModule* place = root_.get();
  std::string_view rest = fqn;
  for (size_t dot; (dot = rest.find('.')) != std::string_view::npos; rest.remove_prefix(dot + 1)) {
    place = place->make_child(std::string(rest.substr(0, dot)));
  }
  at::Tensor there = slot == Slot::kParameter ? place->register_parameter(std::string(rest), t)
                                              : place->register_buffer(std::string(rest), t);
  by_name_.emplace(fqn, std::move(there));
  listed_[static_cast<int>(slot)].reset();
}

swv_module* load(const char* path) {
  const std::string file(text(path, "path"));
  auto script = torch::jit::load(file);
  auto state = std::make_shared<ModuleState>();
  state->script = script;
  Registry& tensors = state->tensors;
  for (const auto& p : script.named_parameters()) tensors.add(p.name, p.value, Slot::kParameter);
  for (const auto& b : script.named_buffers()) tensors.add(b.name, b.value, Slot::kBuffer);
  return make<swv_module>(std::move(state));
}

void write_named(const std::vector<Named>& all, size_t index, const char* what,
                 swv_string** out_fqn, swv_tensor** out_tensor) {
  if (index >= all.size()) {
    fail(absl::StatusCode::kOutOfRange,
         str_cat("argument 'index' is ", index, " of ", all.size(), " ", what));
  }
  Owned<swv_string> fqn(out_fqn == nullptr ? nullptr : new_string(all[index].fqn));
  if (out_tensor != nullptr) *out_tensor = make<swv_tensor>(all[index].tensor);
  if (out_fqn != nullptr) *out_fqn = fqn.release();
}

swv_tensor* get(const Registry& tensors, std::string_view fqn) {
  if (const at::Tensor* found = tensors.find(fqn)) return make<swv_tensor>(*found);
  std::vector<std::string> names;
  for (Slot slot : {Slot::kParameter, Slot::kBuffer}) {
    for (Named& named : tensors.all_names(slot)) names.push_back(std::move(named.fqn));
  }
  fail(absl::StatusCode::kNotFound,
       str_cat("argument 'fqn': the module has no '", fqn, "'", suggestion(fqn, names)));
}

const Method& method_of(ModuleState& module, std::string_view name) {
  if (const auto found = module.methods.find(name); found != module.methods.end()) {
    return found->second;
  }
  const auto method = module.script->find_method(std::string(name));
  if (!method.has_value()) {
    std::vector<std::string> names;
    for (const auto& each : module.script->get_methods()) names.push_back(each.name());
    fail(absl::StatusCode::kNotFound,
         str_cat("argument 'method': there is no '", name, "'", suggestion(name, names)));
  }
  Method made{&method->function(), Signature(method->function().getSchema())};
  made.signature.arguments.erase(made.signature.arguments.begin());  // self
  return module.methods.emplace(name, std::move(made)).first->second;
}

void call_method(ModuleState& module, std::string_view name, swv_grad_mode mode,
                 const GivenArguments& given, swv_value* results, size_t capacity,
                 size_t* out_num_results) {
  if (!module.script.has_value()) {
    fail_argument("module", "was not loaded: its forward is the host's own code");
  }
  const auto& [function, signature] = method_of(module, name);
  const CallMode call_mode(mode, "mode");
  check_capacity(signature, results, capacity);
  CallStack stack;
  stack.values.emplace_back(module.script->_ivalue());
  std::string mismatch;
  if (!push_arguments(signature, given, Match::kLenient, stack.values, &mismatch)) {
    fail(absl::StatusCode::kInvalidArgument,
         str_cat(name, ": ", mismatch, "; its schema is ", signature.text));
  }
  function->run(stack.values);
  if (stack.values.size() == 1 && stack.values[0].isTuple()) {  // several results
    const auto tuple = stack.values[0].toTuple();
    stack.values.clear();
    for (const c10::IValue& element : tuple->elements()) stack.values.push_back(element);
  }
  write_results(signature, stack.values, results, capacity, out_num_results);
}

void distribute(const swv_module* module, const swv_mesh* mesh, const swv_plan* plan,
                const swv_distribute_options* options) {
  const CallMode mode(SWV_MODE_GRAD, "mode");
  parallelize_module(registry(module).module(), in(mesh, "mesh").mesh,
                     plan == nullptr ? ShardingPlan() : plan_of(plan), distribute_options(options),
                     kHost);
}

void clip(const swv_tensor* const* parameters, size_t num_parameters, double max_norm,
          const swv_clip_options* given, double* out_norm) {
  const swv_clip_options o = options<swv_clip_options>(given, SWV_CLIP_OPTIONS_INIT, "options");
  if (!(o.norm_type > 0)) {
    fail_argument("options.norm_type", str_cat("is ", o.norm_type, "; wanted above 0"));
  }
  if (!(max_norm >= 0)) fail_argument("max_norm", str_cat("is ", max_norm, "; wanted 0 or more"));
  const bool finite = flag(o.error_if_nonfinite, "options.error_if_nonfinite");
  const CallMode mode(SWV_MODE_NO_GRAD, "mode");
  const double norm = clip_grad_norm(tensors(parameters, num_parameters, "parameters"), max_norm,
                                     o.norm_type, finite, kHost);
  if (out_norm != nullptr) *out_norm = norm;
}

SgdOptions sgd_options(const swv_sgd_options* given) {
  const swv_sgd_options o = options<swv_sgd_options>(given, SWV_SGD_OPTIONS_INIT, "options");
  return {o.lr, o.momentum, o.dampening, o.weight_decay, flag(o.nesterov, "options.nesterov")};
}

AdamWOptions adamw_options(const swv_adamw_options* given) {
  const swv_adamw_options o = options<swv_adamw_options>(given, SWV_ADAMW_OPTIONS_INIT, "options");
  return {o.lr, o.beta1, o.beta2, o.eps, o.weight_decay, flag(o.amsgrad, "options.amsgrad")};
}

void step(FusedOptimizer& optimizer) {
  const CallMode mode(SWV_MODE_NO_GRAD, "mode");
  try {
    optimizer.step();
  } catch (const Error& error) {
    const std::string message(error.status().message());
    if (!message.ends_with("are to be synchronized before the step")) throw;
    fail(error.status().code(),
         message + " (swv_module_finish_grad_sync and swv_finish_grad_sync do that)");
  }
}

swv_optimizer* new_optimizer(const swv_tensor* const* parameters, size_t num_parameters,
                             const FusedOptimizer::Options& options) {
  return make<swv_optimizer>(
      std::make_shared<FusedOptimizer>(tensors(parameters, num_parameters, "parameters"), options));
}

}  // namespace
}  // namespace shardweave::capi

using namespace shardweave::capi;  // NOLINT: this file is the C interface of it

swv_status* swv_module_create(swv_module** out_module) {
  return guarded(__func__, out_module, "out_module",
                 [&] { return make<swv_module>(std::make_shared<ModuleState>()); });
}

swv_status* swv_module_load(const char* path, swv_module** out_module) {
  return guarded(__func__, out_module, "out_module", [&] { return load(path); });
}

swv_status* swv_module_share(const swv_module* module, swv_module** out_module) {
  return guarded(__func__, out_module, "out_module",
                 [&] { return make<swv_module>(in(module, "module").state); });
}

void swv_module_free(swv_module* module) {
  release(module, __func__);
}

swv_status* swv_module_add_parameter(swv_module* module, const char* fqn, swv_tensor* tensor) {
  return guarded(__func__, [&] {
    registry(module).add(text(fqn, "fqn"), in(tensor, "tensor").tensor, Slot::kParameter);
  });
}

swv_status* swv_module_add_buffer(swv_module* module, const char* fqn, swv_tensor* tensor) {
  return guarded(__func__, [&] {
    registry(module).add(text(fqn, "fqn"), in(tensor, "tensor").tensor, Slot::kBuffer);
  });
}

swv_status* swv_module_num_parameters(const swv_module* module, size_t* out_num) {
  return guarded(__func__, out_num, "out_num",
                 [&] { return registry(module).tensors(Slot::kParameter).size(); });
}

swv_status* swv_module_parameter(const swv_module* module, size_t index, swv_string** out_fqn,
                                 swv_tensor** out_tensor) {
  return guarded(__func__, [&] {
    write_named(registry(module).tensors(Slot::kParameter), index, "parameters", out_fqn,
                out_tensor);
  });
}

swv_status* swv_module_num_buffers(const swv_module* module, size_t* out_num) {
  return guarded(__func__, out_num, "out_num",
                 [&] { return registry(module).tensors(Slot::kBuffer).size(); });
}

swv_status* swv_module_buffer(const swv_module* module, size_t index, swv_string** out_fqn,
                              swv_tensor** out_tensor) {
  return guarded(__func__, [&] {
    write_named(registry(module).tensors(Slot::kBuffer), index, "buffers", out_fqn, out_tensor);
  });
}

swv_status* swv_module_get(const swv_module* module, const char* fqn, swv_tensor** out_tensor) {
  return guarded(__func__, out_tensor, "out_tensor",
                 [&] { return get(registry(module), text(fqn, "fqn")); });
}

swv_status* swv_module_call(swv_module* module, const char* method, swv_grad_mode mode,
                            const swv_value* arguments, size_t num_arguments,
                            swv_value* out_results, size_t capacity, size_t* out_num_results) {
  return guarded(__func__, [&] {
    call_method(state_of(module), text(method, "method"), mode,
                given_arguments(arguments, num_arguments, nullptr, 0), out_results, capacity,
                out_num_results);
  });
}

swv_status* swv_plan_create(swv_plan** out_plan) {
  return guarded(__func__, out_plan, "out_plan",
                 [&] { return make<swv_plan>(std::make_shared<shardweave::ShardingPlan>()); });
}

swv_status* swv_plan_from_json(const char* text, swv_plan** out_plan) {
  return guarded(__func__, out_plan, "out_plan", [&] {
    return make<swv_plan>(std::make_shared<shardweave::ShardingPlan>(
        check(shardweave::parse_sharding_plan(shardweave::capi::text(text, "text")))));
  });
}

swv_status* swv_plan_to_json(const swv_plan* plan, swv_string** out_text) {
  return guarded(__func__, out_text, "out_text",
                 [&] { return new_string(shardweave::to_json(plan_of(plan))); });
}

swv_status* swv_plan_add(swv_plan* plan, const char* pattern, const swv_named_placement* placements,
                         size_t num_placements) {
  return guarded(__func__, [&] {
    plan_of(plan).parameter.push_back({std::string(text(pattern, "pattern")),
                                       named_placements(placements, num_placements, "placements")});
  });
}

swv_status* swv_plan_share(const swv_plan* plan, swv_plan** out_plan) {
  return guarded(__func__, out_plan, "out_plan",
                 [&] { return make<swv_plan>(in(plan, "plan").plan); });
}

void swv_plan_free(swv_plan* plan) {
  release(plan, __func__);
}

swv_status* swv_module_distribute(swv_module* module, const swv_mesh* mesh, const swv_plan* plan,
                                  const swv_distribute_options* options) {
  return guarded(__func__, [&] { distribute(module, mesh, plan, options); });
}

swv_status* swv_module_finish_grad_sync(swv_module* module) {
  return guarded(__func__, [&] { shardweave::finish_grad_sync(registry(module).module(), kHost); });
}

swv_status* swv_finish_grad_sync(swv_tensor* const* parameters, size_t num_parameters) {
  return guarded(__func__, [&] {
    shardweave::finish_grad_sync(tensors(parameters, num_parameters, "parameters"), kHost);
  });
}

swv_status* swv_clip_grad_norm(swv_tensor* const* parameters, size_t num_parameters,
                               double max_norm, const swv_clip_options* options, double* out_norm) {
  return guarded(__func__, [&] { clip(parameters, num_parameters, max_norm, options, out_norm); });
}

swv_status* swv_module_zero_grad(swv_module* module) {
  return guarded(__func__, [&] { registry(module).module().zero_grad(); });
}

swv_status* swv_optimizer_create_sgd(swv_tensor* const* parameters, size_t num_parameters,
                                     const swv_sgd_options* options,
                                     swv_optimizer** out_optimizer) {
  return guarded(__func__, out_optimizer, "out_optimizer",
                 [&] { return new_optimizer(parameters, num_parameters, sgd_options(options)); });
}

swv_status* swv_optimizer_create_adamw(swv_tensor* const* parameters, size_t num_parameters,
                                       const swv_adamw_options* options,
                                       swv_optimizer** out_optimizer) {
  return guarded(__func__, out_optimizer, "out_optimizer",
                 [&] { return new_optimizer(parameters, num_parameters, adamw_options(options)); });
}

swv_status* swv_optimizer_share(const swv_optimizer* optimizer, swv_optimizer** out_optimizer) {
  return guarded(__func__, out_optimizer, "out_optimizer",
                 [&] { return make<swv_optimizer>(in(optimizer, "optimizer").optimizer); });
}

void swv_optimizer_free(swv_optimizer* optimizer) {
  release(optimizer, __func__);
}

swv_status* swv_optimizer_step(swv_optimizer* optimizer) {
  return guarded(__func__, [&] { step(optimizer_of(optimizer)); });
}

swv_status* swv_optimizer_zero_grad(swv_optimizer* optimizer) {
  return guarded(__func__, [&] { optimizer_of(optimizer).zero_grad(); });
}

swv_status* swv_optimizer_lr(const swv_optimizer* optimizer, double* out_lr) {
  return guarded(__func__, out_lr, "out_lr", [&] { return optimizer_of(optimizer).lr(); });
}

swv_status* swv_optimizer_set_lr(swv_optimizer* optimizer, double lr) {
  return guarded(__func__, [&] { optimizer_of(optimizer).set_lr(lr); });
}

swv_status* swv_optimizer_state(const swv_optimizer* optimizer, size_t index, const char* name,
                                swv_tensor** out_tensor) {
  return guarded(__func__, out_tensor, "out_tensor", [&] {
    return new_tensor_or_null(optimizer_of(optimizer).state(index, text(name, "name")));
  });
}

swv_status* swv_optimizer_set_state(swv_optimizer* optimizer, size_t index, const char* name,
                                    const swv_tensor* tensor) {
  return guarded(__func__, [&] {
    const CallMode mode(SWV_MODE_NO_GRAD, "mode");
    optimizer_of(optimizer).set_state(index, text(name, "name"), in(tensor, "tensor").tensor);
  });
}
