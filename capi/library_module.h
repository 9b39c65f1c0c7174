// A module of the library's behind a swv_module: a layer of torch::nn, a model of modules/nn, or a
// part of one. Its forward is C++, called with what C gives by a schema.
//
//   auto linear = LibraryModule::make("Linear", R"({"in_features": 4, "out_features": 2})");
//   linear->forward(stack);
//   linear->part("")->module();
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "shardweave/capi/values.h"
#include "shardweave/modules/nn/layer_registry.h"
#include "torch/nn/module.h"

namespace shardweave::capi {

class HostModule;

enum class Slot { kParameter, kBuffer };
struct Named {
  std::string fqn;
  at::Tensor tensor;
};
// Under all names; and each tensor once, by its first name, as PyTorch's named_parameters(): those
// of a module before those of its children.
std::vector<Named> all_names(const torch::nn::Module& module, Slot slot);
std::vector<Named> each_once(std::vector<Named> all);
// Throws Failure (NotFound): "argument 'fqn': the module has no 'x'; did you mean ...".
[[noreturn]] void fail_no_tensor(const torch::nn::Module& module, std::string_view fqn);

class LibraryModule : public std::enable_shared_from_this<LibraryModule> {
 public:
  // Throws Failure: there is no such kind, or it has no such options.
  static std::shared_ptr<LibraryModule> make(std::string_view kind, std::string_view options_json);

  LibraryModule(std::shared_ptr<torch::nn::Module> module, std::optional<nn::Layer> layer)
      : module_(std::move(module)), layer_(std::move(layer)) {}

  torch::nn::Module& module() const { return *module_; }
  const std::shared_ptr<torch::nn::Module>& pointer() const { return module_; }
  std::string called() const;  // "a Linear of the library's"

  // The module of this name inside; "" is this one. Throws Failure (NotFound).
  std::shared_ptr<LibraryModule> part(std::string_view fqn);
  bool is_part() const { return whole_ != nullptr; }
  std::string fqn_in_whole() const { return fqn_in_whole_; }

  const at::Tensor* find(std::string_view fqn) const;
  // Of what is never added to.
  const std::vector<Named>& tensors(Slot slot) const;

  // Throw Failure: a method that there is not, a module that has no forward by itself.
  const Signature& method(std::string_view name);
  void forward(c10::Stack& stack) { layer_->forward(stack); }

  // Where it lies, for traces; of a part where the whole does.
  void set_mesh(const MeshPtr& mesh, const std::string& fqn);
  const MeshPtr& mesh() const { return is_part() ? whole_->mesh() : mesh_; }
  std::string fqn_on_mesh() const;

  // Where it was added to.
  std::weak_ptr<HostModule> parent;
  std::string name_in_parent;

 private:
  const std::shared_ptr<torch::nn::Module> module_;
  const std::optional<nn::Layer> layer_;
  std::optional<Signature> signature_;
  mutable std::optional<std::vector<Named>> listed_[2];
  std::shared_ptr<LibraryModule> whole_;  // null: it is one
  std::string fqn_in_whole_;
  MeshPtr mesh_;
  std::string fqn_on_mesh_;
};

}  // namespace shardweave::capi
