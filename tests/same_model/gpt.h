// The model, the plan and the training that every language does: README.md.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "shardweave/dtensor/dtensor.h"
#include "torch/csrc/jit/api/module.h"
#include "torch/nn/module.h"

namespace same_model {

constexpr int64_t kVocabulary = 13, kDim = 24, kHeads = 12, kLayers = 2, kLength = 6, kBatch = 5;
constexpr int kSteps = 20;
constexpr double kLearningRate = 1e-2;

// In the order by which their values are numbered.
std::vector<std::pair<std::string, std::vector<int64_t>>> parameter_shapes();
// Of parameter `index` in that order.
at::Tensor initial_value(size_t index);

// [kBatch, kLength]: what goes in, and what is to come out.
std::pair<at::Tensor, at::Tensor> batch();

// In C++, of torch::nn's modules; its parameters have the values above.
struct Gpt {
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor(const at::Tensor& tokens)> forward;
};
Gpt make_gpt();

// The same in TorchScript.
torch::jit::Module make_script();

// kSteps of AdamW on a mesh (collective; plan: JSON), or without one (null) on one device.
std::vector<double> train(const Gpt& gpt, const shardweave::MeshPtr& mesh, const std::string& plan);

}  // namespace same_model
