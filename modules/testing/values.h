// A module's parameters and gradients, whole, by FQN: what tests compare with one device's.
#pragma once

#include <map>
#include <string>

#include "ATen/ATen.h"
#include "c10/core/GradMode.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/dtensor.h"
#include "torch/nn/module.h"

namespace shardweave::testing {

using Values = std::map<std::string, at::Tensor>;
inline Values values_of(const torch::nn::Module& module) {
  const c10::AutoGradMode no_grad(false);
  Values values;
  for (const auto& item : module.named_parameters()) {
    const at::Tensor& p = item.value();
    values[item.key()] = (is_dtensor(p) ? full_tensor(p) : p).detach().clone();
  }
  return values;
}
inline Values gradients_of(const torch::nn::Module& module) {
  Values values;
  for (const auto& item : module.named_parameters()) {
    const at::Tensor& grad = item.value().grad();
    if (!grad.defined()) continue;
    if (is_dtensor(item.value())) {
      EXPECT_EQ(layout_of(grad), layout_of(item.value())) << item.key();
      EXPECT_EQ(grad.scalar_type(), item.value().scalar_type()) << item.key();
    }
    values[item.key()] = (is_dtensor(grad) ? full_tensor(grad) : grad).detach().clone();
  }
  return values;
}
inline void expect_close(const Values& got, const Values& wanted, double tolerance = 1e-5) {
  EXPECT_EQ(got.size(), wanted.size());
  for (const auto& [name, value] : wanted) {
    const auto it = got.find(name);
    if (it == got.end()) {
      ADD_FAILURE() << name << " is not there";
      continue;
    }
    EXPECT_TRUE(at::allclose(it->second, value, tolerance, tolerance)) << name << "\n"
                                                                       << it->second << "\nwanted\n"
                                                                       << value;
  }
}

}  // namespace shardweave::testing
