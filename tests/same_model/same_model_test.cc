// The losses of losses.json on every mesh: from C++, from TorchScript, and from a program in C.
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#include "ATen/Parallel.h"
#include "gpt.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "shardweave/dtensor/testing/on_mesh.h"

namespace same_model {
namespace {

using shardweave::MeshDim;
using shardweave::MeshPtr;
using shardweave::testing::on_mesh;

std::string text_of(const std::string& name) {
  std::ifstream file("tests/same_model/" + name);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::vector<double> expected() {
  return nlohmann::json::parse(text_of("losses.json"))["losses"].get<std::vector<double>>();
}

const std::vector<std::vector<MeshDim>> kMeshes = {
    {{"tp", 1}}, {{"tp", 2}}, {{"tp", 4}}, {{"dp", 2}, {"tp", 2}}, {{"tp", 3}}};

void expect_same(const std::vector<double>& losses, const std::string& where) {
  const std::vector<double> wanted = expected();
  ASSERT_EQ(losses.size(), wanted.size()) << where;
  for (size_t i = 0; i < wanted.size(); ++i) {
    EXPECT_NEAR(losses[i], wanted[i], 1e-5 * wanted[i]) << where << ", step " << i + 1;
  }
}

std::string name_of(const std::vector<MeshDim>& dims) {
  std::string name;
  for (const MeshDim& dim : dims) name += dim.name + "=" + std::to_string(dim.size) + " ";
  return name;
}

TEST(SameModelTest, TheFileIsOneDevices) {
  at::set_num_threads(1);
  const std::vector<double> losses = train(make_gpt(), nullptr, "");
  expect_same(losses, "one device");
  EXPECT_LT(losses.back(), losses.front() / 2);  // it learns
}

TEST(SameModelTest, Cpp) {
  at::set_num_threads(1);
  for (const auto& dims : kMeshes) {
    on_mesh(dims, [&](const MeshPtr& mesh) {
      expect_same(train(make_gpt(), mesh, text_of("plan.json")), name_of(dims));
    });
  }
}

// Modules of torch::nn that have the script's tensors, by their names.
std::shared_ptr<torch::nn::Module> tree_of(const torch::jit::Module& script) {
  auto module = std::make_shared<torch::nn::Module>();
  for (const auto& parameter : script.named_parameters(/*recurse=*/false)) {
    module->register_parameter(parameter.name, parameter.value);
  }
  for (const auto& child : script.named_children()) {
    module->register_module(child.name, tree_of(child.value));
  }
  return module;
}

TEST(SameModelTest, TorchScript) {
  at::set_num_threads(1);
  for (const auto& dims : kMeshes) {
    on_mesh(dims, [&](const MeshPtr& mesh) {
      torch::jit::Module script = [] {
        static std::mutex one_at_a_time;  // they share a compilation unit's names
        const std::lock_guard lock(one_at_a_time);
        return make_script();
      }();
      const Gpt gpt{tree_of(script),
                    [&](const at::Tensor& tokens) { return script.forward({tokens}).toTensor(); }};
      for (at::Tensor& parameter : gpt.module->parameters()) parameter.requires_grad_();
      expect_same(train(gpt, mesh, text_of("plan.json")), name_of(dims));
    });
  }
}

TEST(SameModelTest, C) {
  for (const auto& dims : kMeshes) {
    std::string command = "tests/same_model/same_model_c tests/same_model/plan.json";
    command += dims.size() == 2 ? " " + std::to_string(dims[0].size) : " 1";
    command += " " + std::to_string(dims.back().size);
    std::string text;
    FILE* const pipe = popen(command.c_str(), "r");
    ASSERT_NE(pipe, nullptr);
    char buffer[4096];
    while (const size_t n = fread(buffer, 1, sizeof(buffer), pipe)) text.append(buffer, n);
    EXPECT_EQ(pclose(pipe), 0) << text;
    std::istringstream lines(text);
    std::vector<double> losses;
    for (double loss = 0; lines >> loss;) losses.push_back(loss);
    expect_same(losses, "C, " + name_of(dims));
  }
}

}  // namespace
}  // namespace same_model
