// Is a sharded model still right? Runs it beside a plain one and names the first place where they
// differ.
//
//   const Verification v = verify(make_model, mesh, plan, {tokens});
//   if (!v.ok()) std::cout << v.to_string();
//
//   'h.1.attn.o' (aten::linear) differs: at [0, 3, 7] of its part of Float[2, 5, 12] as [S(0)]
//   rank 1 has 0.25, one device 0.5; largest difference 0.31, relative 0.2; what comes before it
//   (41 tensors) is the same
//
// In this order: parameters and buffers; what every operator of forward gives, by the module that
// it runs in (as list_communication() tells) and by how many times that has been called; buffers
// behind forward; the gradients of parameters, those next to the result first. Every rank's part is
// compared where it lies, so that copies that have come apart are found, too; sums that are still
// owed are reduced first. Operators on local parts are not compared; of a difference right behind
// them they are the cause. All ranks get the same answer.
//
// Random numbers are others on DTensors: model->eval(), or no dropout. Needs memory for the result
// of every operator of both models. Both models' gradients and buffers are left as they were.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/modules/parallelize_module.h"

namespace shardweave {

struct VerifyOptions {
  bool backward = true;
  // What may be between the largest difference of a tensor and its largest element. By default of
  // float 1e-4, double 1e-8, half 1e-2, bfloat16 5e-2. Gradients that are small beside the model's
  // largest (below a hundredth) are measured against that: they may be what is left of sums that
  // cancel. Integers have to be equal.
  std::optional<double> tolerance;
};

struct Verification {
  struct Difference {
    // "parameter" (or buffer, before anything ran), "output", "buffer", "gradient"; "error": the
    // sharded model threw.
    std::string kind;
    std::string module;  // the FQN; "": the model itself
    std::string what;    // "'up' (aten::linear)", "the gradient of 'up.weight'"
    // Where operators right before work on local parts (to_local()), which cannot be compared,
    // `what` is the first of those, and this is where the difference is seen. "": there are none.
    std::string seen_at;
    std::string tensor;          // "Float[32, 8] as [S(0), R]"
    std::string reason;          // "" for numbers: shapes that differ, or what was thrown
    std::vector<int64_t> index;  // in the rank's part: where the difference is largest
    double got = 0, wanted = 0;
    double max_abs = 0, max_rel = 0;
    int64_t rank = 0;    // of the mesh, where it is largest
    int64_t before = 0;  // that were compared before it, and are the same
    std::string hint;
  };
  std::optional<Difference> difference;  // the first
  int64_t parameters = 0;                // and buffers, compared
  int64_t outputs = 0;                   // of operators in forward
  int64_t gradients = 0;
  int64_t not_met = 0;  // of the plain model's operators: the sharded one has run others

  bool ok() const { return !difference.has_value(); }
  std::string to_string() const;
  // {"ok": false, "difference": {"kind": "output", ...}, "parameters": 8, "outputs": 12,
  //  "gradients": 8, "not_met": 0}
  std::string to_json() const;
};

// `run` runs `model` on its inputs and gives its result or loss; `run_reference` does the same with
// `reference`, a plain model with the same modules and values. Collective. Throws Error:
// InvalidArgument if the models' tensors are others; what the reference throws; and what keeps
// ranks from agreeing.
Verification verify(torch::nn::Module& model, const std::function<at::Tensor()>& run,
                    torch::nn::Module& reference, const std::function<at::Tensor()>& run_reference,
                    const VerifyOptions& options = {});

namespace modules_internal {
struct CallForward {
  template <typename Model>
  at::Tensor operator()(Model& model, const std::vector<at::Tensor>& inputs) const {
    if constexpr (requires { model.forward(inputs[0]); }) {
      if (inputs.size() == 1) return model.forward(inputs[0]);
    }
    if constexpr (requires { model.forward(inputs[0], inputs[1]); }) {
      if (inputs.size() == 2) return model.forward(inputs[0], inputs[1]);
    }
    if constexpr (requires { model.forward(inputs[0], inputs[1], inputs[2]); }) {
      if (inputs.size() == 3) return model.forward(inputs[0], inputs[1], inputs[2]);
    }
    throw Error("verify",
                absl::InvalidArgumentError(
                    "the model's forward does not take so many tensors; say how it runs"));
  }
};
// DTensors as whole, plain ones.
std::vector<at::Tensor> whole(const std::vector<at::Tensor>& tensors);
// The values of a sharded model's parameters and buffers.
void copy_values(const torch::nn::Module& from, torch::nn::Module& to);
}  // namespace modules_internal

// The same, of a model that is there: `run(model, inputs)` for both, by default
// model.forward(inputs...). `model` is the module (NetImpl&), no holder. The reference gets inputs that
// are DTensors whole.
template <typename Model, typename Run = modules_internal::CallForward>
Verification verify(Model& model, Model& reference, const std::vector<at::Tensor>& inputs,
                    const Run& run = {}, const VerifyOptions& options = {}) {
  const std::vector<at::Tensor> whole = modules_internal::whole(inputs);
  return verify(
      model, [&] { return run(model, inputs); }, reference, [&] { return run(reference, whole); },
      options);
}

// The same, of a plan: `make_model()` makes a plain model, whose values may be others each time.
template <typename MakeModel, typename Run = modules_internal::CallForward>
Verification verify(const MakeModel& make_model, const MeshPtr& mesh, const ShardingPlan& plan,
                    const std::vector<at::Tensor>& inputs, const Run& run = {},
                    const VerifyOptions& options = {}) {
  auto model = make_model();
  auto reference = make_model();
  parallelize_module(*model, mesh, plan);
  modules_internal::copy_values(*model, *reference);
  return verify(*model, *reference, inputs, run, options);
}

}  // namespace shardweave
