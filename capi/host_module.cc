#include "shardweave/capi/host_module.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_join.h"
#include "shardweave/capi/deferred.h"
#include "shardweave/capi/frozen.h"
#include "shardweave/dtensor/engine/deferred.h"
#include "shardweave/dtensor/engine/members.h"
#include "torch/csrc/jit/serialization/import.h"

namespace shardweave::capi {

std::shared_ptr<HostModule> HostModule::load(const std::string& path) {
  const MadeAtOnce values;
  auto made = std::make_shared<HostModule>();
  torch::jit::Module script = torch::jit::load(path);
  for (const auto& p : script.named_parameters()) {
    made->add_tensor(p.name, p.value, Slot::kParameter, p.value.requires_grad());
  }
  for (const auto& b : script.named_buffers()) made->add_tensor(b.name, b.value, Slot::kBuffer);
  made->attach(script);
  return made;
}

void HostModule::attach(const torch::jit::Module& script) {
  script_ = script;
  training_slot_ = script.type()->findAttributeSlot("training");
  for (const auto& part : script.named_children()) {
    const auto [place, name] = place_for(part.name);
    HostModule* const there = place->child(name);
    (there != nullptr ? there : place->make_child(name, std::make_shared<HostModule>()))
        ->attach(part.value);
  }
}

HostModule* HostModule::child(std::string_view name) const {
  const auto found = children_.find(name);
  return found == children_.end() ? nullptr : found->second.get();
}

HostModule* HostModule::make_child(std::string_view name, std::shared_ptr<HostModule> made) {
  HostModule* const result = made.get();
  register_module(std::string(name), made);
  result->parent_ = std::static_pointer_cast<HostModule>(shared_from_this());
  result->name_in_parent_ = name;
  children_.emplace(name, std::move(made));
  return result;
}

std::pair<HostModule*, std::string> HostModule::place_for(std::string_view fqn) {
  HostModule* place = this;
  for (size_t dot; (dot = fqn.find('.')) != std::string_view::npos; fqn.remove_prefix(dot + 1)) {
    const std::string_view part = fqn.substr(0, dot);
    HostModule* const there = place->child(part);
    place = there != nullptr ? there : place->make_child(part, std::make_shared<HostModule>());
  }
  return {place, std::string(fqn)};
}

HostModule::Found HostModule::module_at(std::string_view fqn) {
  HostModule* module = this;
  for (std::string_view rest = fqn; !rest.empty() && module != nullptr;) {
    const size_t dot = rest.find('.');
    const std::string_view name = rest.substr(0, dot);
    rest = dot == std::string_view::npos ? std::string_view() : rest.substr(dot + 1);
    if (const auto found = module->libraries_.find(name);
        found != module->libraries_.end() && !fqn.ends_with('.')) {
      return {nullptr, found->second->part(rest)};
    }
    module = module->child(name);
  }
  if (module != nullptr && !fqn.ends_with('.')) return {module, nullptr};
  std::vector<std::string> names;
  for (const auto& item : named_modules("", /*include_self=*/false)) names.push_back(item.key());
  fail(absl::StatusCode::kNotFound,
       str_cat("argument 'fqn': there is no module '", fqn, "' in it", suggestion(fqn, names)));
}

const at::Tensor* HostModule::find(std::string_view fqn) const {
  const HostModule* module = this;
  for (size_t dot; (dot = fqn.find('.')) != std::string_view::npos; fqn.remove_prefix(dot + 1)) {
    const std::string_view name = fqn.substr(0, dot);
    if (const auto found = module->libraries_.find(name); found != module->libraries_.end()) {
      return found->second->find(fqn.substr(dot + 1));
    }
    module = module->child(name);
    if (module == nullptr) return nullptr;
  }
  const auto found = module->own_.find(fqn);
  return found == module->own_.end() ? nullptr : &found->second;
}

const at::Tensor& HostModule::tensor_at(std::string_view fqn) const {
  if (const at::Tensor* found = find(fqn)) return *found;
  fail_no_tensor(*this, fqn);
}

const std::vector<HostModule::Named>& HostModule::tensors(Slot slot) const {
  std::optional<std::vector<Named>>& listed = listed_[static_cast<int>(slot)];
  if (listed.has_value()) return *listed;
  return listed.emplace(each_once(all_names(*this, slot)));
}

void HostModule::forget_lists() {
  for (auto& listed : listed_) listed.reset();
  if (const std::shared_ptr<HostModule> parent = parent_.lock()) parent->forget_lists();
}

void HostModule::fail_exists(std::string_view fqn) const {
  const auto clash = [&](std::string_view there) {
    return there == fqn || (there.starts_with(fqn) && there[fqn.size()] == '.') ||
           (fqn.starts_with(there) && fqn[there.size()] == '.');
  };
  for (Slot slot : {Slot::kParameter, Slot::kBuffer}) {
    for (const Named& named : all_names(*this, slot)) {
      if (!clash(named.fqn)) continue;
      fail(absl::StatusCode::kAlreadyExists,
           str_cat("argument 'fqn' is '", fqn, "'; the module has '", named.fqn, "'"));
    }
  }
  fail(absl::StatusCode::kAlreadyExists,
       str_cat("argument 'fqn' is '", fqn, "'; the module has a module of that name"));
}

// Before anything is registered: register_parameter would leave half of it.
void HostModule::check_free(std::string_view fqn) const {
  if (fqn.empty() || fqn.front() == '.' || fqn.back() == '.' ||
      fqn.find("..") != std::string_view::npos) {
    fail_argument("fqn", str_cat("is '", fqn, "'; a part of the name is empty"));
  }
  const HostModule* module = this;  // where the part is; null: nowhere yet
  for (size_t begin = 0, dot = 0; dot != std::string_view::npos; begin = dot + 1) {
    dot = fqn.find('.', begin);
    if (find(fqn.substr(0, dot)) != nullptr) fail_exists(fqn);
    if (module == nullptr) continue;
    const std::string_view part = fqn.substr(begin, dot - begin);
    if (const auto found = module->libraries_.find(part); found != module->libraries_.end()) {
      if (dot == std::string_view::npos) fail_exists(fqn);
      fail_argument("fqn", str_cat("is '", fqn, "', but '", fqn.substr(0, dot), "' ",
                                   found->second->called(), ": nothing is added to it"));
    }
    module = module->child(part);
  }
  if (module != nullptr) fail_exists(fqn);  // a module has this name
}

void HostModule::add_tensor(std::string_view fqn, const at::Tensor& tensor, Slot slot,
                            bool requires_grad) {
  check_free(fqn);
  if (is_frozen(tensor)) requires_grad = false;
  if (slot == Slot::kParameter) {
    const auto refuse = [](const char* why) { fail_argument("tensor", why); };
    if (!tensor.is_leaf()) refuse("is no leaf: it is the result of an operator");
    if (requires_grad && !tensor.is_floating_point() && !tensor.is_complex()) {
      refuse("has integers; a parameter requires grad");
    }
    if (requires_grad && tensor.is_inference()) {
      refuse("is a result of SWV_MODE_INFERENCE; a parameter requires grad");
    }
  }
  const auto [place, name] = place_for(fqn);
  at::Tensor there = slot == Slot::kParameter
                         ? place->register_parameter(name, tensor, requires_grad)
                         : place->register_buffer(name, tensor);
  if (!is_dtensor(there) && dtensor_internal::is_deferred(there)) {
    dtensor_internal::name_deferred(there, fqn);  // errors call it so
  }
  place->own_.emplace(name, std::move(there));
  place->forget_lists();
}

void HostModule::add_module(std::string_view fqn, const std::shared_ptr<HostModule>& child) {
  check_free(fqn);
  for (std::shared_ptr<Module> outer = shared_from_this(); outer != nullptr;
       outer = static_cast<HostModule&>(*outer).parent_.lock()) {
    if (outer == child) {
      fail_argument(
          "child", outer.get() == this ? "is the module itself" : "has the module as a part of it");
    }
  }
  if (const std::shared_ptr<HostModule> parent = child->parent_.lock()) {
    fail(absl::StatusCode::kAlreadyExists,
         str_cat("argument 'child' is a part of a module already, as '", child->fqn(), "'"));
  }
  const auto [place, name] = place_for(fqn);
  place->make_child(name, child);
  place->forget_lists();
}

void HostModule::add_module(std::string_view fqn, const std::shared_ptr<LibraryModule>& child) {
  check_free(fqn);
  std::string there = child->fqn_in_whole();
  if (const std::shared_ptr<HostModule> parent = child->parent.lock()) {
    const std::string outer = parent->fqn();
    there = outer.empty() ? child->name_in_parent : str_cat(outer, ".", child->name_in_parent);
  }
  if (!there.empty()) {
    fail(absl::StatusCode::kAlreadyExists,
         str_cat("argument 'child' is a part of a module already, as '", there, "'"));
  }
  const auto [place, name] = place_for(fqn);
  place->register_module(name, child->pointer());
  place->libraries_.emplace(name, child);
  child->parent = std::static_pointer_cast<HostModule>(place->shared_from_this());
  child->name_in_parent = name;
  place->forget_lists();
}

const Method& HostModule::method(std::string_view name) {
  if (const auto found = methods_.find(name); found != methods_.end()) return found->second;
  const auto method = script_->find_method(std::string(name));
  if (!method.has_value()) {
    std::vector<std::string> names;
    for (const auto& each : script_->get_methods()) names.push_back(each.name());
    fail(absl::StatusCode::kNotFound,
         str_cat("argument 'method': there is no '", name, "'", suggestion(name, names)));
  }
  Method made{&method->function(), Signature(method->function().getSchema())};
  made.signature.arguments.erase(made.signature.arguments.begin());  // self
  return methods_.emplace(name, std::move(made)).first->second;
}

bool HostModule::file_has_mode() const noexcept {
  return training_slot_.has_value() && script_->_ivalue()->slots()[*training_slot_].isBool();
}

void HostModule::train(bool on) {
  torch::nn::Module::train(on);
  if (file_has_mode()) script_->_ivalue()->setSlot(*training_slot_, on);
}

bool HostModule::is_training() const noexcept {
  return file_has_mode() ? script_->_ivalue()->slots()[*training_slot_].toBool()
                         : torch::nn::Module::is_training();
}

std::string HostModule::fqn() const {
  const std::shared_ptr<HostModule> parent = parent_.lock();
  if (parent == nullptr) return "";
  const std::string outer = parent->fqn();
  return outer.empty() ? name_in_parent_ : str_cat(outer, ".", name_in_parent_);
}

void HostModule::set_mesh(const MeshPtr& mesh, const std::string& fqn) {
  *site_ = {mesh, fqn, redistribution};
  for (const auto& [name, child] : children_) {
    child->set_mesh(mesh, fqn.empty() ? name : str_cat(fqn, ".", name));
  }
  for (const auto& [name, child] : libraries_) {
    child->set_mesh(mesh, fqn.empty() ? name : str_cat(fqn, ".", name));
  }
}

const Plugins& host_plugins() {
  static const auto& plugins = *new Plugins(
      Plugins().shards<HostModule>([](const HostModule& module, const ShardingRequest& request) {
        const auto found = module.sharding.find(request.style);
        if (found != module.sharding.end()) return found->second;
        std::vector<std::string> styles;
        for (const auto& [style, its] : module.sharding) styles.push_back(str_cat("'", style, "'"));
        fail(absl::StatusCode::kNotFound,
             str_cat("the plan's module part asks how '", request.fqn, "' shards",
                     request.style.empty() ? "" : str_cat(" in the style '", request.style, "'"),
                     ", which it does not say; it ",
                     styles.empty() ? std::string("says nothing of that")
                                    : str_cat("has the styles ", absl::StrJoin(styles, ", "))));
      }));
  return plugins;
}

std::string_view HostModule::advice() const {
  return "announce it by swv_module_forward first, and run it by swv_forward_begin";
}

MeshPtr first_mesh_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> all;
  for (const dtensor_internal::Member& member : dtensor_internal::members_of(module)) {
    all.push_back(member.tensor);
  }
  return first_mesh(all);
}

HostModule& host_module(const swv_module* module, const char* argument) {
  const swv_module& m = in(module, argument);
  if (m.library != nullptr) {
    fail_argument(argument,
                  str_cat(m.library->called(), "; wanted one that swv_module_create made"));
  }
  return *m.host;
}

swv_module* new_module(const HostModule::Found& found) {
  if (found.host == nullptr) return make<swv_module>(nullptr, found.library);
  return make<swv_module>(std::static_pointer_cast<HostModule>(found.host->shared_from_this()),
                          nullptr);
}

void name_mesh(const swv_module& module, const MeshPtr& mesh) {
  if (module.library != nullptr) {
    if (module.library->mesh() == nullptr) module.library->set_mesh(mesh, "");
  } else if (module.host->site()->mesh == nullptr) {
    module.host->set_mesh(mesh);
  }
}

}  // namespace shardweave::capi
