// A module whose forward is the host's code, or a TorchScript file's: a tree of named modules with
// parameters and buffers, among them the library's own (library_module.h). What is behind swv_module
// and swv_forward.
//
//   auto model = std::make_shared<HostModule>();
//   model->add_tensor("blocks.0.up", weight, HostModule::Slot::kParameter);
//   model->module_at("blocks.0").fqn();                  // "blocks.0"
//   parallelize_module(*model, mesh, plan);
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "shardweave/capi/library_module.h"
#include "shardweave/capi/values.h"
#include "shardweave/modules/hooked.h"
#include "shardweave/modules/parallelize_module.h"
#include "shardweave/modules/plugin.h"
#include "torch/csrc/jit/api/module.h"
#include "torch/nn/module.h"

namespace shardweave::capi {

// A method of a file, with its schema as calls need it.
struct Method {
  torch::jit::Function* function;
  Signature signature;
};

class HostModule final : public torch::nn::Module, public modules_internal::ForwardHook {
 public:
  using Slot = capi::Slot;
  using Named = capi::Named;

  HostModule() : torch::nn::Module("HostModule") { is_met = false; }
  // Of a file.
  static std::shared_ptr<HostModule> load(const std::string& path);

  // All throw Failure that names the argument, before anything changes.
  // `requires_grad`: of a parameter, unless the host has frozen it.
  void add_tensor(std::string_view fqn, const at::Tensor& tensor, Slot slot,
                  bool requires_grad = true);
  void add_module(std::string_view fqn, const std::shared_ptr<HostModule>& child);
  void add_module(std::string_view fqn, const std::shared_ptr<LibraryModule>& child);

  // The module of this name inside of this one; "" is this one. Of two one is not null.
  struct Found {
    HostModule* host = nullptr;
    std::shared_ptr<LibraryModule> library;
  };
  Found module_at(std::string_view fqn);
  const at::Tensor& tensor_at(std::string_view fqn) const;
  // Each tensor once, by its first name, as PyTorch's named_parameters(): those of a module before
  // those of its children. Put together again after something was added.
  const std::vector<Named>& tensors(Slot slot) const;

  const Method& method(std::string_view name);  // of a file's
  bool is_of_file() const { return script_.has_value(); }
  c10::IValue self() const { return script_->_ivalue(); }

  void train(bool on) override;
  bool is_training() const noexcept override;

  // Its name in the outermost module that it is a part of.
  std::string fqn() const;
  // That it and all modules inside lie there, with their names in what was distributed, of which no
  // more may be left. They tell traces what runs.
  void set_mesh(const MeshPtr& mesh, const std::string& fqn = "");
  // What its forward in the host's code has to know of it, whether it is still there or not.
  struct Site {
    MeshPtr mesh;                                                                   // null: none
    std::string fqn;                                                                // there
    std::shared_ptr<const modules_internal::ForwardRedistribution> redistribution;  // null: none
  };
  const std::shared_ptr<Site>& site() const { return site_; }

  std::string_view advice() const override;

  // What it says of how it shards, by the style that a plan asks for.
  std::map<std::string, ModuleSharding> sharding;

 private:
  HostModule* child(std::string_view name) const;
  HostModule* make_child(std::string_view name, std::shared_ptr<HostModule> made);
  // The module that holds what is called so, made where it is missing, and the name's last part.
  std::pair<HostModule*, std::string> place_for(std::string_view fqn);
  const at::Tensor* find(std::string_view fqn) const;
  void check_free(std::string_view fqn) const;
  [[noreturn]] void fail_exists(std::string_view fqn) const;
  void forget_lists();
  void attach(const torch::jit::Module& script);
  // Not every file keeps the mode, and what one calls "training" may be no bool.
  bool file_has_mode() const noexcept;

  std::weak_ptr<HostModule> parent_;
  std::string name_in_parent_;
  std::map<std::string, std::shared_ptr<HostModule>, std::less<>> children_;
  std::map<std::string, std::shared_ptr<LibraryModule>, std::less<>> libraries_;  // children too
  std::map<std::string, at::Tensor, std::less<>> own_;
  mutable std::optional<std::vector<Named>> listed_[2];
  std::optional<torch::jit::Module> script_;            // its tensors and parts are in the tree too
  std::optional<size_t> training_slot_;                 // in the script
  std::map<std::string, Method, std::less<>> methods_;  // those that were called
  const std::shared_ptr<Site> site_ = std::make_shared<Site>();
};

}  // namespace shardweave::capi

// One of both.
struct swv_module : shardweave::capi::Handle<shardweave::capi::Kind::kModule> {
  std::shared_ptr<shardweave::capi::HostModule> host;
  std::shared_ptr<shardweave::capi::LibraryModule> library;
};

struct swv_forward : shardweave::capi::Handle<shardweave::capi::Kind::kForward> {
  std::shared_ptr<const shardweave::capi::HostModule::Site> site;
};

struct swv_plan : shardweave::capi::Handle<shardweave::capi::Kind::kPlan> {
  std::shared_ptr<shardweave::ShardingPlan> plan;
};

namespace shardweave::capi {

// What is behind a handle.
inline torch::nn::Module& any_module(const swv_module* module, const char* argument = "module") {
  const swv_module& m = in(module, argument);
  return m.library != nullptr ? m.library->module() : *m.host;
}
// first_mesh() of its parameters and buffers.
MeshPtr first_mesh_of(const torch::nn::Module& module);
// Throws Failure for one of the library's.
HostModule& host_module(const swv_module* module, const char* argument = "module");
// Of all hosts' modules: each says itself how it shards.
const Plugins& host_plugins();
swv_module* new_module(const HostModule::Found& found);
// Traces say what runs, from now on, of a module that has come to a mesh without a plan. Names that a
// plan has given, of a larger module, stay.
void name_mesh(const swv_module& module, const MeshPtr& mesh);

}  // namespace shardweave::capi
