#include "shardweave/capi/library_module.h"

#include <unordered_set>
#include <utility>

#include "shardweave/capi/deferred.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/modules/deferred_init.h"

namespace shardweave::capi {

std::vector<Named> all_names(const torch::nn::Module& module, Slot slot) {
  std::vector<Named> all;
  const auto items = slot == Slot::kParameter ? module.named_parameters() : module.named_buffers();
  for (const auto& item : items) all.push_back({item.key(), item.value()});
  return all;
}

std::vector<Named> each_once(std::vector<Named> all) {
  std::unordered_set<const c10::TensorImpl*> seen;
  std::erase_if(all, [&](const Named& named) {
    return !seen.insert(named.tensor.unsafeGetTensorImpl()).second;
  });
  return all;
}

void fail_no_tensor(const torch::nn::Module& module, std::string_view fqn) {
  std::vector<std::string> names;
  for (Slot slot : {Slot::kParameter, Slot::kBuffer}) {
    for (Named& named : all_names(module, slot)) names.push_back(std::move(named.fqn));
  }
  fail(absl::StatusCode::kNotFound,
       str_cat("argument 'fqn': the module has no '", fqn, "'", suggestion(fqn, names)));
}

std::shared_ptr<LibraryModule> LibraryModule::make(std::string_view kind,
                                                   std::string_view options_json) {
  nn::Layer layer = check(nn::make_layer(kind, options_json));
  std::shared_ptr<torch::nn::Module> module = layer.module;
  if (is_deferring()) modules_internal::name_deferred_members(*module);
  return std::make_shared<LibraryModule>(std::move(module), std::move(layer));
}

std::string LibraryModule::called() const {
  return str_cat("is of the library's (", layer_.has_value() ? layer_->kind : module_->name(), ")");
}

std::shared_ptr<LibraryModule> LibraryModule::part(std::string_view fqn) {
  if (fqn.empty()) return shared_from_this();
  const std::string wanted(fqn);
  std::vector<std::string> names;
  for (const auto& item : module_->named_modules("", /*include_self=*/false)) {
    if (item.key() != wanted) {
      names.push_back(item.key());
      continue;
    }
    auto made = std::make_shared<LibraryModule>(item.value(), nn::as_layer(item.value()));
    made->whole_ = is_part() ? whole_ : shared_from_this();
    made->fqn_in_whole_ = is_part() ? str_cat(fqn_in_whole_, ".", wanted) : wanted;
    return made;
  }
  fail(absl::StatusCode::kNotFound,
       str_cat("argument 'fqn': there is no module '", fqn, "' in it", suggestion(fqn, names)));
}

const at::Tensor* LibraryModule::find(std::string_view fqn) const {
  for (Slot slot : {Slot::kParameter, Slot::kBuffer}) {
    // Under all names: the lists have each tensor once.
    const auto items = slot == Slot::kParameter ? module_->named_parameters(/*recurse=*/true)
                                                : module_->named_buffers(/*recurse=*/true);
    if (items.find(std::string(fqn)) == nullptr) continue;
    const at::Tensor& wanted = *items.find(std::string(fqn));
    for (const Named& named : tensors(slot)) {
      if (named.tensor.is_same(wanted)) return &named.tensor;
    }
  }
  return nullptr;
}

const std::vector<Named>& LibraryModule::tensors(Slot slot) const {
  std::optional<std::vector<Named>>& listed = listed_[static_cast<int>(slot)];
  if (!listed.has_value()) listed = each_once(all_names(*module_, slot));
  return *listed;
}

const Signature& LibraryModule::method(std::string_view name) {
  if (!layer_.has_value()) {
    fail_argument("module", str_cat(called(), ", which has no forward that can be called alone"));
  }
  if (name != "forward") {
    fail(absl::StatusCode::kNotFound,
         str_cat("argument 'method': there is no '", name, "'", suggestion(name, {"forward"})));
  }
  if (!signature_.has_value()) signature_.emplace(layer_->schema);
  return *signature_;
}

void LibraryModule::set_mesh(const MeshPtr& mesh, const std::string& fqn) {
  mesh_ = mesh;
  fqn_on_mesh_ = fqn;
}

std::string LibraryModule::fqn_on_mesh() const {
  if (!is_part()) return fqn_on_mesh_;
  const std::string outer = whole_->fqn_on_mesh();
  return outer.empty() ? fqn_in_whole_ : str_cat(outer, ".", fqn_in_whole_);
}

}  // namespace shardweave::capi
