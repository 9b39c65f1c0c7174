#include "models.h"

#include <mutex>
#include <utility>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "shardweave/dtensor/error.h"
#include "torch/nn.h"
#include "torch/script.h"

namespace shardweave_tool {
namespace {

using shardweave::Replicate;
using shardweave::Shard;

// LibTorch's generator, and its loader of TorchScript, are the process's; ranks are threads.
std::mutex& one_at_a_time() {
  static std::mutex mutex;
  return mutex;
}

struct MlpImpl : torch::nn::Module {
  MlpImpl() {
    register_module("norm", norm);
    register_module("up", up);
    register_module("down", down);
  }
  at::Tensor forward(const at::Tensor& x) { return x + down(at::gelu(up(norm(x)))); }
  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({16})};
  torch::nn::Linear up{16, 64}, down{64, 16};
};

Model make_mlp() {
  const std::lock_guard lock(one_at_a_time());
  torch::manual_seed(1);
  auto mlp = std::make_shared<MlpImpl>();
  return {mlp, [mlp](const std::vector<at::Tensor>& in) { return mlp->forward(in.at(0)); }};
}

// A TorchScript module's tree, with its own tensors: what is done to these is done to it.
struct ScriptModule : torch::nn::Module {
  explicit ScriptModule(const torch::jit::Module& script)
      : torch::nn::Module(script.type()->name().has_value() ? script.type()->name()->name()
                                                            : std::string("ScriptModule")) {
    for (const auto& p : script.named_parameters(/*recurse=*/false)) {
      register_parameter(p.name, p.value, p.value.requires_grad());
    }
    for (const auto& b : script.named_buffers(/*recurse=*/false)) register_buffer(b.name, b.value);
    for (const auto& child : script.named_children()) {
      register_module(child.name, std::make_shared<ScriptModule>(child.value));
    }
  }
};

}  // namespace

const std::vector<ModelKind>& models() {
  static const std::vector<ModelKind> table = {
      {.name = "mlp",
       .description = "a norm and two linear layers, 16 features",
       .make = make_mlp,
       .inputs = [] { return std::vector{at::arange(96.0).sin().view({6, 16})}; },
       .plan = {.parameter = {{"up.*", {{"tp", Shard(0)}}}, {"down.weight", {{"tp", Shard(1)}}}},
                .forward = {{"down.output", {{"tp", Replicate()}}}}}},
  };
  return table;
}

absl::StatusOr<ModelKind> find_model(const std::string& name) {
  std::vector<std::string> names;
  for (const ModelKind& kind : models()) {
    if (kind.name == name) return kind;
    names.push_back(kind.name);
  }
  return absl::NotFoundError(
      absl::StrCat("--model=", name, ": there are ", absl::StrJoin(names, ", ")));
}

absl::StatusOr<ModelKind> script_model(const std::string& file) {
  const auto load = [file] {
    const std::lock_guard lock(one_at_a_time());
    auto script = std::make_shared<torch::jit::Module>(torch::jit::load(file));
    return Model{std::make_shared<ScriptModule>(*script),
                 [script](const std::vector<at::Tensor>& inputs) {
                   const c10::IValue result =
                       script->forward(std::vector<c10::IValue>(inputs.begin(), inputs.end()));
                   if (result.isTensor()) return result.toTensor();
                   throw shardweave::Error(absl::InvalidArgumentError(absl::StrCat(
                       "the script's forward gives a ", result.tagKind(), "; wanted one tensor")));
                 }};
  };
  try {
    load();
  } catch (const std::exception& error) {
    return absl::InvalidArgumentError(
        absl::StrCat("--script=", file, ": ", shardweave::message_of(error)));
  }
  return ModelKind{.name = file, .description = "TorchScript", .make = load};
}

}  // namespace shardweave_tool
