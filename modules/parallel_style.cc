#include "shardweave/modules/parallel_style.h"

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <set>

#include "absl/strings/str_join.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/engine/checksum.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/modules/hooked.h"
#include "shardweave/modules/layer_style.h"
#include "shardweave/modules/nn/conv1d.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/activation.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/dropout.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"

namespace shardweave {
namespace {

using namespace modules_internal;

[[noreturn]] void refuse_style(absl::StatusCode code, const std::string& why) {
  throw Error(kFunctionOfPlans, absl::Status(code, why));
}

template <typename... T>
struct Overloaded : T... {
  using T::operator()...;
};
template <typename... T>
Overloaded(T...) -> Overloaded<T...>;

// --- the module as a tree ------------------------------------------------------------------------

struct Node {
  std::string fqn;                            // "" of the whole
  std::string name;                           // its last part
  const torch::nn::Module* module = nullptr;  // null: known by its parameters' names alone
  std::vector<const Node*> children;          // in the order of their registration
  std::vector<std::pair<std::string, at::Tensor>> parameters;  // of its own

  at::Tensor parameter(std::string_view wanted) const {
    for (const auto& [key, tensor] : parameters) {
      if (key == wanted) return tensor;
    }
    return {};
  }
  std::string called() const {
    std::string text = fqn.empty() ? std::string("the module itself") : str_cat("'", fqn, "'");
    if (module != nullptr) str_append(&text, " (", module->name(), ")");
    return text;
  }
};

class Tree {
 public:
  explicit Tree(const torch::nn::Module& module) {
    at("").module = &module;
    for (const auto& item : module.named_modules("", /*include_self=*/false)) {
      at(item.key()).module = item.value().get();
    }
    std::map<const c10::TensorImpl*, std::string> first;
    for (const auto& item : module.named_parameters()) {
      const size_t dot = item.key().rfind('.');
      const bool of_root = dot == std::string::npos;
      const std::string owner = of_root ? "" : item.key().substr(0, dot);
      at(owner).parameters.emplace_back(of_root ? item.key() : item.key().substr(dot + 1),
                                        item.value());
      const auto [there, is_new] = first.emplace(item.value().unsafeGetTensorImpl(), owner);
      if (!is_new && there->second != owner) tied_.insert({owner, there->second});
    }
  }
  const Node& root() const { return nodes_.at(""); }
  const std::map<std::string, Node, std::less<>>& nodes() const { return nodes_; }
  // Whether another module has one of its parameters, too: nobody can tell at it whose forward
  // runs.
  bool is_tied(const Node& node) const { return tied_.contains(node.fqn); }

 private:
  Node& at(const std::string& fqn) {
    const auto [it, is_new] = nodes_.try_emplace(fqn);
    Node& node = it->second;
    if (!is_new) return node;
    node.fqn = fqn;
    if (fqn.empty()) return node;
    const size_t dot = fqn.rfind('.');
    node.name = dot == std::string::npos ? fqn : fqn.substr(dot + 1);
    at(dot == std::string::npos ? "" : fqn.substr(0, dot)).children.push_back(&node);
    return node;
  }

  std::map<std::string, Node, std::less<>> nodes_;
  std::set<std::string> tied_;
};

bool is_within(std::string_view fqn, const Node& outer) {
  if (outer.fqn.empty()) return true;
  return fqn.size() > outer.fqn.size() && fqn.starts_with(outer.fqn) &&
         fqn[outer.fqn.size()] == '.';
}

// --- what a module is ----------------------------------------------------------------------------

// A linear layer whose weight is [in, out].
bool is_transposed(const Node& node) {
  return dynamic_cast<const nn::Conv1dImpl*>(node.module) != nullptr;
}

// A weight of so many dimensions, a bias or none, and nothing else.
bool is_leaf(const Node& node, int64_t weight_dims) {
  const at::Tensor weight = node.parameter("weight"), bias = node.parameter("bias");
  const size_t known = (weight.defined() ? 1 : 0) + (bias.defined() ? 1 : 0);
  return weight.defined() && weight.dim() == weight_dims && known == node.parameters.size() &&
         node.children.empty() &&
         (!bias.defined() ||
          (bias.dim() == 1 && bias.size(0) == weight.size(is_transposed(node) ? 1 : 0)));
}

bool is_embedding(const Node& node) {
  return is_leaf(node, 2) && !node.parameter("bias").defined() &&
         modules_internal::is_embedding(node.module, node.name);
}

bool is_linear(const Node& node) {
  return is_leaf(node, 2) && !is_embedding(node);
}
bool is_norm(const Node& node) {
  return is_leaf(node, 1);
}

bool is_dropout(const Node& node) {
  const auto is = [&]<typename... Impl>() {
    return (... || (dynamic_cast<const Impl*>(node.module) != nullptr));
  };
  return is.operator()<torch::nn::DropoutImpl, torch::nn::Dropout2dImpl, torch::nn::Dropout3dImpl,
                       torch::nn::AlphaDropoutImpl, torch::nn::FeatureAlphaDropoutImpl>();
}

bool is_hooked(const Node& node) {
  return dynamic_cast<const ForwardHook*>(node.module) != nullptr;
}

const torch::nn::MultiheadAttentionImpl* as_multihead(const Node& node) {
  return dynamic_cast<const torch::nn::MultiheadAttentionImpl*>(node.module);
}

int64_t rows(const Node& linear) {
  return linear.parameter("weight").size(is_transposed(linear) ? 1 : 0);
}
int64_t columns(const Node& linear) {
  return linear.parameter("weight").size(is_transposed(linear) ? 0 : 1);
}

template <size_t n>
bool is_one_of(std::string_view name, const std::string_view (&names)[n]) {
  return std::find(std::begin(names), std::end(names), name) != std::end(names);
}

// How the layers of attentions are called.
constexpr std::string_view kQueries[] = {"q",        "q_proj", "query",    "wq",        "to_q",
                                         "q_linear", "q_lin",  "linear_q", "query_proj"};
constexpr std::string_view kKeys[] = {"k",        "k_proj", "key",      "wk",      "to_k",
                                      "k_linear", "k_lin",  "linear_k", "key_proj"};
constexpr std::string_view kValues[] = {"v",        "v_proj", "value",    "wv",        "to_v",
                                        "v_linear", "v_lin",  "linear_v", "value_proj"};
constexpr std::string_view kFused[] = {"qkv",  "qkv_proj", "in_proj",  "c_attn",
                                       "Wqkv", "wqkv",     "attn_qkv", "qkv_linear"};
// Those that have query, key and value of a head, then those of the next.
constexpr std::string_view kInterleaved[] = {"query_key_value"};
constexpr std::string_view kOutputs[] = {
    "o",          "o_proj", "out_proj", "wo",     "to_out",   "out",        "out_lin",    "proj",
    "out_linear", "dense",  "c_proj",   "output", "proj_out", "linear_out", "output_proj"};

// Layers of one attention. Of one that is fused, `query` has all three.
struct Attention {
  const Node *query = nullptr, *key = nullptr, *value = nullptr, *output = nullptr;
  bool fused = false, interleaved = false;
};

// The linear layer that a module is, or has as its only one (with a dropout behind it).
const Node* the_linear(const Node& node) {
  if (is_linear(node)) return &node;
  const Node* found = nullptr;
  for (const Node* child : node.children) {
    if (!is_linear(*child)) continue;
    if (found != nullptr) return nullptr;
    found = child;
  }
  return found;
}

std::optional<Attention> attention_in(const Node& node) {
  Attention a;
  for (const Node* child : node.children) {
    const Node* linear = the_linear(*child);
    if (linear == nullptr) continue;
    const std::string_view name = child->name;
    if (linear != child) {
      if (is_one_of(name, kOutputs)) a.output = linear;
      continue;
    }
    if (is_one_of(name, kQueries)) a.query = linear;
    if (is_one_of(name, kKeys)) a.key = linear;
    if (is_one_of(name, kValues)) a.value = linear;
    if (is_one_of(name, kOutputs) && a.output == nullptr) a.output = linear;
    const bool interleaved = is_one_of(name, kInterleaved);
    if (interleaved || is_one_of(name, kFused)) {
      a.query = linear;
      a.fused = true;
      a.interleaved = interleaved;
    }
  }
  const bool whole = a.query != nullptr && a.output != nullptr &&
                     (a.fused || (a.key != nullptr && a.value != nullptr));
  if (!whole) return std::nullopt;
  return a;
}

// --- cuts ----------------------------------------------------------------------------------------

// Rank i has counts[i] times `unit` elements of `dim`.
Placement cut_by(int dim, const std::vector<int64_t>& counts, int64_t unit) {
  std::vector<int64_t> sizes;
  int64_t total = 0;
  for (const int64_t count : counts) total += sizes.emplace_back(count * unit);
  const auto n = static_cast<int64_t>(sizes.size());
  for (int64_t i = 0; i < n; ++i) {
    if (sizes[i] != chunk(total, n, i).size()) return RaggedShard(dim, std::move(sizes));
  }
  return Shard(dim);
}

std::vector<int64_t> chunks_of(int64_t count, int64_t ranks, int64_t times = 1) {
  std::vector<int64_t> counts;
  for (int64_t i = 0; i < ranks; ++i) counts.push_back(chunk(count, ranks, i).size() * times);
  return counts;
}

// How the heads of an attention lie.
struct HeadCuts {
  Placement query;                      // of its weight's rows
  std::optional<Placement> key, value;  // nullopt: every rank computes all of them
  Placement output;                     // of its weight's columns
};

LayerStyle rows_cut(const std::optional<Placement>& rows) {
  if (!rows.has_value()) return {};
  return {rows->with_dim(-2), rows->with_dim(-1), {}, {}};
}

// --- styles to a plan ----------------------------------------------------------------------------

class Planner {
 public:
  Planner(const Tree& tree, std::string mesh_dim, int64_t ranks)
      : tree_(tree), mesh_dim_(std::move(mesh_dim)), ranks_(ranks) {}

  // `entry`: "the style 'a.*'", for messages. Modules that are within others come after those.
  void apply(const Node& node, const ParallelStyle& style, const std::string& entry) {
    entry_ = &entry;
    const int64_t heads = std::visit(Overloaded{[](const PairwiseParallel& s) { return s.heads; },
                                                [](const SequenceParallel& s) { return s.heads; },
                                                [](const auto&) { return int64_t{0}; }},
                                     style);
    if (heads < 0) {
      refuse_style(absl::StatusCode::kInvalidArgument,
                   str_cat(entry, ": heads = ", heads, "; wanted 0 (not known) or more"));
    }
    std::visit(Overloaded{
                   [&](const ColwiseParallel& s) { colwise(node, s); },
                   [&](const RowwiseParallel& s) { rowwise(node, s); },
                   [&](const PairwiseParallel& s) {
                     forget(node);
                     if (!pairs(node, {Replicate(), s.output.value_or(Replicate()),
                                       s.output.has_value(), s.heads})) {
                       unknown(node, "PairwiseParallel", kPairwise);
                     }
                   },
                   [&](const SequenceParallel& s) { sequence(node, s); },
                   [&](const PrepareModuleInput& s) {
                     prepare(node, "input", s.inputs);
                     for (const auto& [name, placement] : s.by_name) {
                       say(joined_fqn(node.fqn, "input." + name), true, placement);
                     }
                   },
                   [&](const PrepareModuleOutput& s) { prepare(node, "output", s.outputs); },
               },
               style);
  }

  ShardingPlan plan() const {
    ShardingPlan plan;
    for (const auto& [fqn, placement] : parameters_) {
      plan.parameter.push_back({fqn, on_mesh_dim(mesh_dim_, placement)});
    }
    for (const auto& [fqn, placement] : forward_) {
      plan.forward.push_back({fqn, on_mesh_dim(mesh_dim_, placement)});
    }
    return plan;
  }

 private:
  static constexpr char kLayers[] =
      "it knows linear layers (a weight [out, in], of nn::Conv1d [in, out], a bias [out] or none) "
      "and embeddings";
  static constexpr char kPairwise[] =
      "it knows torch::nn::MultiheadAttention, modules with linear layers that are called as those "
      "of an attention (q, k, v, o; q_proj, ..., out_proj; query, key, value, dense; qkv, proj), "
      "modules with two or more linear layers, and what contains such modules";

  [[noreturn]] void unknown(const Node& node, std::string_view style,
                            std::string_view knows) const {
    refuse_style(absl::StatusCode::kInvalidArgument,
                 str_cat(*entry_, ": ", style, " does not know ", node.called(), "; ", knows));
  }

  void say(const std::string& fqn, bool is_forward, const Placement& placement) {
    (is_forward ? forward_ : parameters_).insert_or_assign(fqn, placement);
  }

  // What an outer module's style has said of it.
  void forget(const Node& node) {
    const auto within = [&](const auto& item) { return is_within(item.first, node); };
    std::erase_if(parameters_, within);
    std::erase_if(forward_, within);
  }

  // `asked`: the user has said where the input or output goes, and hears if it cannot be met.
  void layer(const Node& node, const LayerStyle& style, bool input_asked, bool output_asked) {
    for (const LayerPart& part : parts_of(style)) {
      const bool asked = part.name == "input" ? input_asked : output_asked;
      if (part.is_forward && !asked && tree_.is_tied(node)) continue;
      if (!part.is_forward && !node.parameter(part.name).defined()) continue;
      const bool other_way = part.name == "weight" && is_transposed(node);
      say(joined_fqn(node.fqn, part.name), part.is_forward,
          other_way ? part.placement.with_dim(-3 - part.placement.dim()) : part.placement);
    }
  }
  void layer(const Node& node, LayerStyle style, const std::optional<Placement>& input,
             const std::optional<Placement>& otherwise_input,
             const std::optional<Placement>& output,
             const std::optional<Placement>& otherwise_output) {
    style.input = input.has_value() ? input : otherwise_input;
    style.output = output.has_value() ? output : otherwise_output;
    layer(node, style, input.has_value(), output.has_value());
  }

  void colwise(const Node& node, const ColwiseParallel& s) {
    const bool embedding = is_embedding(node);
    if (!embedding && !is_linear(node)) unknown(node, "ColwiseParallel", kLayers);
    forget(node);
    layer(node, embedding ? colwise_embedding() : colwise_linear(), s.input, Replicate(), s.output,
          std::nullopt);
  }

  void rowwise(const Node& node, const RowwiseParallel& s) {
    const bool embedding = is_embedding(node);
    if (!embedding && !is_linear(node)) unknown(node, "RowwiseParallel", kLayers);
    forget(node);
    layer(node, embedding ? rowwise_embedding() : rowwise_linear(), s.input,
          embedding ? Replicate() : Shard(-1), s.output, Replicate());
  }

  void sequence(const Node& node, const SequenceParallel& s) {
    forget(node);
    const LayerStyle along = sequence_layer(s.sequence_dim);
    if (is_norm(node) || (is_hooked(node) && node.children.empty() && node.parameters.empty())) {
      return layer(node, along, true, true);
    }
    if (is_dropout(node)) return;  // leaves what it gets as it lies
    if (!pairs(node, {Replicate(), Shard(s.sequence_dim), true, s.heads})) {
      unknown(node, "SequenceParallel",
              str_cat("it knows norms with a weight, torch::nn's dropouts, modules without weights "
                      "that were made as Hooked<Impl>, and what PairwiseParallel knows: ",
                      std::string_view(kPairwise).substr(9)));
    }
    norms(node, along);
  }

  // Those that stand beside attentions and MLPs; those of queries and keys see heads.
  void norms(const Node& node, const LayerStyle& along) {
    if (as_multihead(node) != nullptr) return;
    for (const Node* child : node.children) {
      const bool of_heads = child->name.starts_with("q_") || child->name.starts_with("k_") ||
                            child->name.starts_with("query_") || child->name.starts_with("key_");
      if (is_norm(*child) && !of_heads && widths_.contains(child->parameter("weight").size(0))) {
        layer(*child, with_output(along, std::nullopt), false, false);
      }
      norms(*child, along);
    }
  }

  void prepare(const Node& node, std::string_view which,
               const std::vector<std::optional<Placement>>& values) {
    for (size_t i = 0; i < values.size(); ++i) {
      if (!values[i].has_value()) continue;
      // The first is ".input" for other styles; it is the same slot.
      const std::string name = i == 0 ? std::string(which) : str_cat(which, ".", i);
      say(joined_fqn(node.fqn, name), true, *values[i]);
    }
  }

  // --- pairs -------------------------------------------------------------------------------------

  struct PairOptions {
    Placement input, output;
    bool output_asked;
    int64_t heads;
  };

  void first_of_pair(const Node& node, LayerStyle style, const PairOptions& options) {
    style.input = options.input;
    layer(node, style, false, false);
    widths_.insert(columns(node));
  }
  void second_of_pair(const Node& node, LayerStyle style, const PairOptions& options) {
    style.output = options.output;
    layer(node, style, false, options.output_asked);
  }

  // Whether there are any.
  bool pairs(const Node& node, const PairOptions& options) {
    if (const auto* attention = as_multihead(node)) {
      multihead(node, *attention, options);
      return true;
    }
    bool found = false;
    std::vector<const Node*> linears;
    for (const Node* child : node.children) {
      if (is_linear(*child)) linears.push_back(child);
    }
    if (const std::optional<Attention> a = attention_in(node)) {
      attention(*a, options);
      found = true;
      std::erase_if(linears, [&](const Node* l) {
        return l == a->query || l == a->key || l == a->value || l == a->output;
      });
    } else {  // of an attention whose output is elsewhere
      std::erase_if(linears, [&](const Node* l) {
        return is_one_of(l->name, kQueries) || is_one_of(l->name, kKeys) ||
               is_one_of(l->name, kValues);
      });
    }
    if (linears.size() >= 2) {
      mlp(node, linears, options);
      found = true;
    }
    for (const Node* child : node.children) {
      if (!is_linear(*child)) found |= pairs(*child, options);
    }
    return found;
  }

  void multihead(const Node& node, const torch::nn::MultiheadAttentionImpl& attention,
                 const PairOptions& options) {
    constexpr int64_t kThree = 3;  // query, key and value in one
    const int64_t heads = attention.options.num_heads();
    const int64_t width = attention.options.embed_dim();
    const auto cut = [&](const char* name, const Placement& placement) {
      if (node.parameter(name).defined()) say(joined_fqn(node.fqn, name), false, placement);
    };
    const bool packed = node.parameter("in_proj_weight").defined();
    const bool even = packed || heads % ranks_ == 0;
    const std::vector<int64_t> counts = chunks_of(heads, ranks_);
    const auto by_heads = [&](int dim) {
      return packed ? Shard(dim) : cut_by(dim, counts, width / heads);
    };
    for (const char* name : {"in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"}) {
      if (!node.parameter(name).defined()) continue;
      cut(name, packed ? StridedShard(-2, kThree) : by_heads(-2));
      if (!tree_.is_tied(node)) {
        say(joined_fqn(node.fqn, str_cat(name, ".input")), true, options.input);
      }
    }
    if (even) {  // the parts of a packed bias would not be those of ragged weights
      cut("in_proj_bias", StridedShard(-1, kThree));
      cut("bias_k", Shard(-1));
      cut("bias_v", Shard(-1));
    }
    widths_.insert(width);
    for (const Node* child : node.children) {
      if (child->name == "out_proj") {
        second_of_pair(*child, {by_heads(-1), {}, {}, {}}, options);
      }
    }
  }

  void attention(const Attention& a, const PairOptions& options) {
    if (a.fused) return fused_attention(a, options);
    const HeadCuts cuts = head_cuts(a, options.heads);
    first_of_pair(*a.query, rows_cut(cuts.query), options);
    first_of_pair(*a.key, rows_cut(cuts.key), options);
    first_of_pair(*a.value, rows_cut(cuts.value), options);
    second_of_pair(*a.output, {cuts.output, {}, {}, {}}, options);
  }

  [[noreturn]] void wrong_heads(const Node& node, int64_t size, const char* what,
                                int64_t heads) const {
    refuse_style(absl::StatusCode::kInvalidArgument,
                 str_cat(*entry_, ": heads = ", heads, ", but ", node.called(), " has ", size, " ",
                         what, ", which are not that many heads of one size"));
  }

  HeadCuts head_cuts(const Attention& a, int64_t heads) const {
    if (heads == 0) return {Shard(-2), Shard(-2), Shard(-2), Shard(-1)};
    const int64_t query = rows(*a.query), key = rows(*a.key), value = rows(*a.value);
    if (query % heads != 0) wrong_heads(*a.query, query, "rows", heads);
    if (columns(*a.output) % heads != 0)
      wrong_heads(*a.output, columns(*a.output), "columns", heads);
    const int64_t size = query / heads, value_size = columns(*a.output) / heads;
    if (size == 0) wrong_heads(*a.query, query, "rows", heads);
    if (value_size == 0) wrong_heads(*a.output, columns(*a.output), "columns", heads);
    // Heads of keys and values, each for as many of queries.
    const int64_t shared = key / size;
    if (key % size != 0 || shared == 0 || heads % shared != 0) {
      wrong_heads(*a.key, key, "rows", heads);
    }
    if (value != shared * value_size) wrong_heads(*a.value, value, "rows", heads);
    if (shared < ranks_) {
      const std::vector<int64_t> counts = chunks_of(heads, ranks_);
      return {cut_by(-2, counts, size), {}, {}, cut_by(-1, counts, value_size)};
    }
    const std::vector<int64_t> counts = chunks_of(shared, ranks_, heads / shared);
    const std::vector<int64_t> of_keys = chunks_of(shared, ranks_);
    return {cut_by(-2, counts, size), cut_by(-2, of_keys, size), cut_by(-2, of_keys, value_size),
            cut_by(-1, counts, value_size)};
  }

  void fused_attention(const Attention& a, const PairOptions& options) {
    const int64_t all = rows(*a.query), queries = columns(*a.output), heads = options.heads;
    if (heads != 0 && queries % heads != 0) wrong_heads(*a.output, queries, "columns", heads);
    // Of keys, and as many of values.
    const int64_t keys = (all - queries) / 2;
    const bool sizes_fit = keys > 0 && keys * 2 + queries == all && queries % keys == 0;
    LayerStyle first, second = rowwise_linear();
    if (a.interleaved && sizes_fit && heads != 0) {
      // Groups of queries with the key and the value that they share.
      const int64_t size = queries / heads;
      if (size == 0) wrong_heads(*a.output, queries, "columns", heads);
      const int64_t groups = keys / size;
      if (groups == 0 || keys % size != 0) wrong_heads(*a.query, all, "rows", heads);
      const std::vector<int64_t> counts = chunks_of(groups, ranks_);
      first = rows_cut(cut_by(-2, counts, all / groups));
      second.weight = cut_by(-1, counts, queries / groups);
    } else if (a.interleaved) {
      first = colwise_linear();
    } else if (sizes_fit) {  // queries that share a key are as many chunks; else it stays whole
      first = colwise_linear(queries / keys + 2);
    }
    first_of_pair(*a.query, first, options);
    second_of_pair(*a.output, second, options);
  }

  void mlp(const Node& node, const std::vector<const Node*>& linears, const PairOptions& options) {
    // Two side by side and one behind them.
    const bool chain = dynamic_cast<const torch::nn::SequentialImpl*>(node.module) != nullptr;
    if (linears.size() == 3 && !chain) {
      const auto is_second = [&](size_t i) {
        const Node &second = *linears[i], &a = *linears[(i + 1) % 3], &b = *linears[(i + 2) % 3];
        constexpr std::string_view kDown[] = {"down", "down_proj", "w2", "wo", "fc2", "c_proj"};
        const bool fits =
            rows(a) == rows(b) && columns(a) == columns(b) && rows(a) == columns(second);
        return fits && (rows(a) != columns(a) || is_one_of(second.name, kDown));
      };
      for (size_t i = 0; i < linears.size(); ++i) {
        if (!is_second(i)) continue;
        for (size_t j = 0; j < linears.size(); ++j) {
          if (j == i) continue;
          first_of_pair(*linears[j], colwise_linear(), options);
        }
        return second_of_pair(*linears[i], rowwise_linear(), options);
      }
    }
    for (size_t i = 0; i + 1 < linears.size(); i += 2) {
      const int64_t out = rows(*linears[i]), in = columns(*linears[i + 1]);
      first_of_pair(*linears[i], colwise_linear(in != 0 && out % in == 0 ? out / in : 1), options);
      second_of_pair(*linears[i + 1], rowwise_linear(), options);
    }
  }

  const Tree& tree_;
  const std::string mesh_dim_;
  const int64_t ranks_;
  const std::string* entry_ = nullptr;
  std::map<std::string, Placement> parameters_, forward_;
  std::set<int64_t> widths_;  // of what goes into pairs
};

// --- patterns ------------------------------------------------------------------------------------

struct Mesh1d {
  std::string name;
  int64_t ranks;
};
Mesh1d mesh_dim_of(const DeviceMesh& mesh, std::string_view wanted) {
  constexpr std::string_view kUsual = "tp";
  if (wanted.empty() && mesh.ndim() == 1) return {std::string(mesh.name(0)), mesh.size(0)};
  const absl::StatusOr<int> dim = mesh.dim(wanted.empty() ? kUsual : wanted);
  if (!dim.ok()) {
    refuse_style(dim.status().code(),
                 str_cat("tp_mesh_dim: ", std::string(dim.status().message())));
  }
  return {std::string(mesh.name(*dim)), mesh.size(*dim)};
}

// An entry, understood.
struct UnderstoodStyle {
  std::string name;
  FqnPattern pattern;
  const ParallelStyle* style;
  bool decides = false;
  std::string beaten_at;
  size_t beaten_by = 0;
};

[[noreturn]] void no_match(const UnderstoodStyle& entry, const Tree& tree) {
  std::vector<std::string> fqns;
  for (const auto& [fqn, node] : tree.nodes()) fqns.push_back(fqn);
  refuse_style(absl::StatusCode::kNotFound,
               str_cat(entry.name, " matches no module", entry.pattern.suggestion(fqns)));
}

}  // namespace

ShardingPlan sharding_plan(const torch::nn::Module& module, const DeviceMesh& mesh,
                           const StylePlan& styles, std::string_view tp_mesh_dim) {
  const Mesh1d along = mesh_dim_of(mesh, tp_mesh_dim);
  std::vector<UnderstoodStyle> entries;
  for (size_t i = 0; i < styles.size(); ++i) {
    std::string name = str_cat("style ", i + 1, ", '", styles[i].pattern, "'");
    absl::StatusOr<FqnPattern> pattern = FqnPattern::parse(styles[i].pattern);
    if (!pattern.ok()) {
      refuse_style(absl::StatusCode::kInvalidArgument,
                   str_cat(name, ": ", std::string(pattern.status().message())));
    }
    entries.push_back({.name = std::move(name),
                       .pattern = *std::move(pattern),
                       .style = &styles[i].style,
                       .beaten_at = ""});
  }
  const Tree tree(module);
  // A name comes before the longer ones that begin with it: outer modules before inner ones.
  Planner planner(tree, along.name, along.ranks);
  std::vector<std::pair<const Node*, const UnderstoodStyle*>> decided;
  for (const auto& [fqn, node] : tree.nodes()) {
    std::vector<UnderstoodStyle*> matching;
    for (UnderstoodStyle& entry : entries) {
      // "blocks.*" matches what is in a block, too, which has its style by the block's.
      const bool is_covered = std::any_of(decided.begin(), decided.end(), [&](const auto& outer) {
        return outer.second == &entry && is_within(fqn, *outer.first);
      });
      if (!is_covered && entry.pattern.matches(fqn)) matching.push_back(&entry);
    }
    if (matching.empty()) continue;
    const UnderstoodStyle* best = *std::max_element(
        matching.begin(), matching.end(), [](const UnderstoodStyle* x, const UnderstoodStyle* y) {
          return x->pattern.specificity() < y->pattern.specificity();
        });
    for (UnderstoodStyle* candidate : matching) {
      UnderstoodStyle& entry = *candidate;
      if (entry.pattern.specificity() != best->pattern.specificity()) {
        if (entry.beaten_at.empty()) {
          entry.beaten_at = node.called();
          entry.beaten_by = best - entries.data();
        }
        continue;
      }
      entry.decides = true;
      if (*entry.style == *best->style) continue;
      refuse_style(
          absl::StatusCode::kInvalidArgument,
          str_cat(node.called(), " is given two styles by ", best->name, ", and ", entry.name,
                  ", which are equally specific; an exact name counts most, then the pattern "
                  "with more characters that are no wildcards"));
    }
    decided.emplace_back(&node, best);
  }
  for (const UnderstoodStyle& entry : entries) {
    if (entry.decides) continue;
    if (entry.beaten_at.empty()) no_match(entry, tree);
    refuse_style(
        absl::StatusCode::kInvalidArgument,
        str_cat(entry.name, ", decides nothing: more specific ones match all that it does, ",
                entry.beaten_at, " by ", entries[entry.beaten_by].name));
  }
  for (const auto& [node, entry] : decided) planner.apply(*node, *entry->style, entry->name);
  return planner.plan();
}

ShardingPlan sharding_plan(const torch::nn::Module& module, const DeviceMesh& mesh,
                           const ParallelStyle& style, std::string_view tp_mesh_dim) {
  const Mesh1d along = mesh_dim_of(mesh, tp_mesh_dim);
  const Tree tree(module);
  Planner planner(tree, along.name, along.ranks);
  planner.apply(tree.root(), style, "the style");
  return planner.plan();
}

namespace {

// A rank whose styles are refused tells the others, which would wait for it.
template <typename Styles>
ShardingPlan agreed_plan(const torch::nn::Module& module, const MeshPtr& mesh, const Styles& styles,
                         std::string_view tp_mesh_dim, std::source_location where) {
  dtensor_internal::Agreement agreement(*dtensor_internal::MeshContext::of(mesh),
                                        {.name = kFunctionOfPlans, .where = where});
  ShardingPlan plan = sharding_plan(module, mesh->mesh(), styles, tp_mesh_dim);
  agreement.reach({});
  return plan;
}

}  // namespace

void parallelize_module(torch::nn::Module& module, const MeshPtr& mesh, const StylePlan& styles,
                        std::string_view tp_mesh_dim, const DistributeOptions& options,
                        std::source_location where) {
  parallelize_module(module, mesh, agreed_plan(module, mesh, styles, tp_mesh_dim, where), options,
                     where);
}

void parallelize_module(torch::nn::Module& module, const MeshPtr& mesh, const ParallelStyle& style,
                        std::string_view tp_mesh_dim, const DistributeOptions& options,
                        std::source_location where) {
  parallelize_module(module, mesh, agreed_plan(module, mesh, style, tp_mesh_dim, where), options,
                     where);
}

}  // namespace shardweave
