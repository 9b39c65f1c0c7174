// Tensor parallelism by styles: what a module is, in place of where each of its parameters lies.
//
//   parallelize_module(*model, mesh,
//                      {{"embedding", RowwiseParallel{.output = Shard(1)}},
//                       {"blocks.*", SequenceParallel{.sequence_dim = 1, .heads = 8}},
//                       {"head", ColwiseParallel()}},   // logits cut along the vocabulary
//                      "tp");
//   parallelize_module(*mlp, mesh, PairwiseParallel());
//
// The styles are those of torch.distributed.tensor.parallel, with its defaults for where inputs and
// outputs go. What is different, because plain tensors and DTensors meet in every operator here:
//   - No input_layouts: a DTensor knows how it lies, and a plain tensor counts as replicated (what
//     is a rank's part of something is made a DTensor by from_local(), or make_input_shard_1d() in
//     prepare_tensors.h). `input` is where an input is brought, PyTorch's desired_input_layouts.
//   - No use_local_output: outputs are DTensors, of the global shape, so that the code between two
//     layers is that of one device. to_local() is there for whoever wants a part.
//   - Sizes need not divide, no module is replaced, and a forward's view(heads, size) need not
//     change.
//   - A map's pattern is any FqnPattern of modules, and what is wrong is found before anything
//     changes.
//
// A style is a value, and sharding_plan() a pure function of it: what a style does is a
// ShardingPlan.
#pragma once

#include <cstdint>
#include <optional>
#include <source_location>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "shardweave/modules/parallelize_module.h"

namespace shardweave {

// A linear layer whose output features, or an embedding whose features, are cut.
struct ColwiseParallel {
  std::optional<Placement> input;   // nullopt: Replicate()
  std::optional<Placement> output;  // nullopt: as it comes, Shard(-1)
  friend bool operator==(const ColwiseParallel&, const ColwiseParallel&) = default;
};

// A linear layer whose input features, or an embedding whose words, are cut. Its output is a
// Partial sum, which `output` makes whole (an all-reduce) or cuts (a reduce-scatter).
struct RowwiseParallel {
  std::optional<Placement> input;   // nullopt: Shard(-1); of an embedding Replicate()
  std::optional<Placement> output;  // nullopt: Replicate()
  friend bool operator==(const RowwiseParallel&, const RowwiseParallel&) = default;
};

// What consists of linear layers of which one takes what another gives: the first is colwise, the
// second rowwise, and one all-reduce follows. It finds them in any module:
//   - torch::nn::MultiheadAttention, and with it TransformerEncoderLayer, TransformerDecoderLayer
//     and Transformer: the packed in_proj_weight so that each rank has heads of query, key and
//     value.
//   - Attention of any kind: linear layers that are called as queries, keys, values and output are
//     (q, k, v, o; q_proj, ..., out_proj; query, key, value, dense; wq, ...), or a fused one and
//     the output (qkv, in_proj, c_attn, query_key_value, ...).
//   - MLPs: an even number of linear layers beside each other, two and two (of an odd number the
//     last stays whole, as in PyTorch); gated ones, two side by side and one behind them; and those
//     whose first layer has several in one (gate and up).
struct PairwiseParallel {
  // Behind each pair; nullopt: Replicate().
  std::optional<Placement> output;
  // Of an attention of linear layers; 0: not known. Numbers are right without it. With it heads
  // stay whole where they do not divide by the ranks, and keys and values of which there are fewer
  // heads than ranks are computed by all. Not where queries, keys and values are packed in one
  // weight that is not interleaved: its parts are cut evenly, and heads that do not divide cost
  // communication. (MultiheadAttention says itself how many it has.)
  int64_t heads = 0;
  friend bool operator==(const PairwiseParallel&, const PairwiseParallel&) = default;
};

// Activations that are cut along the sequence. Of a norm or a dropout: its input and output. Of
// what PairwiseParallel knows: activations outside of attention and MLP, so that a gather and a
// reduce-scatter take the place of each all-reduce; norms in it as on their own.
struct SequenceParallel {
  int sequence_dim = 1;
  int64_t heads = 0;  // as PairwiseParallel's
  friend bool operator==(const SequenceParallel&, const SequenceParallel&) = default;
};

// Where the inputs or outputs of any module whose forward can be met (parallelize_module.h) go; its
// weights stay whole.
struct PrepareModuleInput {
  std::vector<std::optional<Placement>> inputs;  // by index; nullopt: as it comes
  std::vector<std::pair<std::string, Placement>> by_name;
  friend bool operator==(const PrepareModuleInput&, const PrepareModuleInput&) = default;
};
struct PrepareModuleOutput {
  std::vector<std::optional<Placement>> outputs;  // by index; nullopt: as it comes
  friend bool operator==(const PrepareModuleOutput&, const PrepareModuleOutput&) = default;
};

using ParallelStyle = std::variant<ColwiseParallel, RowwiseParallel, PairwiseParallel,
                                   SequenceParallel, PrepareModuleInput, PrepareModuleOutput>;

// Modules whose FQN matches `pattern` (see FqnPattern; "" is the whole) have this style.
struct StyleEntry {
  std::string pattern;
  ParallelStyle style;
};
// In any order: the most specific pattern counts. Of styles of a module and of one within it, the
// inner one counts for what is inner. "blocks.*" is the style of every block, not of each thing in
// it.
using StylePlan = std::vector<StyleEntry>;

// What styles mean for a module, parameter by parameter. `tp_mesh_dim`: "" is the mesh's only
// dimension, or "tp" of several.
//
// Throws Error: NotFound for a mesh without the dimension, and for a pattern that matches no module
// (with names that are nearly the same); InvalidArgument for a style on a module that it does not
// know (saying which it knows), heads that the weights do not have, and two patterns that are
// equally specific and say different things.
ShardingPlan sharding_plan(const torch::nn::Module& module, const DeviceMesh& mesh,
                           const StylePlan& styles, std::string_view tp_mesh_dim = "");
ShardingPlan sharding_plan(const torch::nn::Module& module, const DeviceMesh& mesh,
                           const ParallelStyle& style, std::string_view tp_mesh_dim = "");

// One call of parallelize_module() with that plan: everything is checked, on every rank, before
// anything changes. Along other dimensions of the mesh parameters are replicated.
void parallelize_module(torch::nn::Module& module, const MeshPtr& mesh, const StylePlan& styles,
                        std::string_view tp_mesh_dim = "", const DistributeOptions& options = {},
                        std::source_location where = std::source_location::current());
void parallelize_module(torch::nn::Module& module, const MeshPtr& mesh, const ParallelStyle& style,
                        std::string_view tp_mesh_dim = "", const DistributeOptions& options = {},
                        std::source_location where = std::source_location::current());

}  // namespace shardweave
