// The models that the program knows by name, and those in TorchScript files.
//
//   const absl::StatusOr<ModelKind> kind = find_model("mlp");
//   const Model model = kind->make();
//   model.forward(kind->inputs());
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "shardweave/mesh/device_mesh.h"
#include "shardweave/modules/parallelize_module.h"
#include "torch/nn/module.h"

namespace shardweave_tool {

struct Model {
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor(const std::vector<at::Tensor>&)> forward;
};

struct ModelKind {
  std::string name, description;
  std::function<Model()> make;  // a plain model; safe to call on every rank's thread at once
  std::function<std::vector<at::Tensor>()> inputs;  // null: none are known
  // --plan=zoo; cuts along "tp". Null: none. Throws Error for a mesh that the model cannot have.
  std::function<shardweave::ShardingPlan(const shardweave::DeviceMesh&)> plan;
};

// Built-in models, by name. To add one, add a row to the table in models.cc.
const std::vector<ModelKind>& models();
absl::StatusOr<ModelKind> find_model(const std::string& name);

// Of a TorchScript file. It has no `plan`.
absl::StatusOr<ModelKind> script_model(const std::string& file);

}  // namespace shardweave_tool
