// Layers of torch::nn by name, and the library's models: for programs that choose at run time, and
// hosts in other languages.
//
//   nn::Layer layer = *nn::make_layer("Linear", R"json({"in_features": 4, "out_features": 8})json");
//   c10::Stack stack = {x};
//   layer.forward(stack);                                  // {y}
//   parallelize_module(*layer.module, mesh, plan);         // a module as any other
//
// Kinds and options have the names and the defaults that PyTorch has for them, in the part that
// LibTorch's C++ has (no batch_first of attention, no norm_first). Every kind has "dtype" besides
// ("float32", "float64", "float16", "bfloat16"). Sequential takes its layers as a list:
// {"layers": [{"kind": "Linear", ...}, {"kind": "ReLU"}]}, of which each takes and gives one tensor.
// A model ("llama", see registry.h) takes its configuration as options.
//
// Parameters are drawn as PyTorch draws them, by LibTorch's generator (torch::manual_seed()), or
// recorded under deferred_init().
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ATen/core/function_schema.h"
#include "ATen/core/stack.h"
#include "absl/status/statusor.h"
#include "torch/nn/module.h"

namespace shardweave::nn {

struct Layer {
  std::string kind;
  std::shared_ptr<torch::nn::Module> module;
  // What forward takes and gives: "forward(Tensor query, ..., bool need_weights=True) -> (Tensor,
  // Tensor)".
  c10::FunctionSchema schema;
  // Takes the schema's arguments from the stack and puts its results there. Keeps the module alive.
  std::function<void(c10::Stack&)> forward;
};

// Of layers, then of models.
std::vector<std::string> layer_kinds();

// One option of a kind of layer.
struct LayerOption {
  std::string name;
  std::string type;  // "an integer, 1 or more", "true or false"
  bool required = false;
};
// Empty for a model, whose options are its configuration, and for a kind that there is not.
std::vector<LayerOption> layer_options(std::string_view kind);

// `options_json`: an object; "" is an empty one. InvalidArgument: a kind that there is not, an
// option that the kind does not have (both list those that there are, and say which are nearly the
// same), one that is missing, of another type or out of its range (with its line); what the kind
// refuses itself (heads that do not divide).
absl::StatusOr<Layer> make_layer(std::string_view kind, std::string_view options_json);

// The layer that a module is, such as a part of a model; nullopt if its type is not known here.
std::optional<Layer> as_layer(const std::shared_ptr<torch::nn::Module>& module);

}  // namespace shardweave::nn
