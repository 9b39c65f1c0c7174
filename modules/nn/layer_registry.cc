#include "shardweave/modules/nn/layer_registry.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <tuple>
#include <type_traits>
#include <utility>

#include "absl/strings/str_join.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/modules/hooked.h"
#include "shardweave/modules/json_document.h"
#include "shardweave/modules/nn/gpt2.h"
#include "shardweave/modules/nn/llama.h"
#include "shardweave/modules/nn/mixtral.h"
#include "shardweave/modules/nn/registry.h"
#include "shardweave/modules/nn/rms_norm.h"
#include "shardweave/modules/nn/vit.h"
#include "torch/csrc/jit/frontend/function_schema_parser.h"
#include "torch/nn/modules/activation.h"
#include "torch/nn/modules/batchnorm.h"
#include "torch/nn/modules/conv.h"
#include "torch/nn/modules/dropout.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/modules/normalization.h"
#include "torch/nn/modules/rnn.h"
#include "torch/nn/modules/transformerlayer.h"

namespace shardweave::nn_layers {
namespace {

using modules_internal::Json;
using modules_internal::JsonDocument;
using ModulePtr = std::shared_ptr<torch::nn::Module>;
using Forward = std::function<void(c10::Stack&)>;
using nn::Layer;
using nn::LayerOption;

// --- options -------------------------------------------------------------------------------------

enum class Type : uint8_t { kInteger, kNumber, kFlag, kWord, kSizes, kSizesOrWord, kLayers };

struct Option {
  const char* name;
  Type type;
  bool required = false;
  bool nullable = false;
  int64_t least = 1;  // of an integer, and of each of a list
  int64_t most = INT64_MAX;
  double lowest = -std::numeric_limits<double>::infinity();
  double highest = std::numeric_limits<double>::infinity();
  size_t count = 0;  // of a list; 0: one or more. Of more than one an integer stands for all
  std::vector<const char*> words = {};
};

Option size(const char* name, bool required = false) {
  return {name, Type::kInteger, required};
}
Option count(const char* name) {
  return {.name = name, .type = Type::kInteger, .least = 0};
}
Option flag(const char* name) {
  return {name, Type::kFlag};
}
Option number(const char* name, bool nullable = false) {
  return {.name = name, .type = Type::kNumber, .nullable = nullable};
}
Option probability(const char* name) {
  return {.name = name, .type = Type::kNumber, .lowest = 0, .highest = 1};
}
Option word(const char* name, std::vector<const char*> words) {
  return {.name = name, .type = Type::kWord, .words = std::move(words)};
}
Option sizes(const char* name, size_t length, bool required, int64_t least = 1) {
  return {
      .name = name, .type = Type::kSizes, .required = required, .least = least, .count = length};
}

std::string type_of(const Option& option) {
  const std::string words = absl::StrJoin(
      option.words, ", ", [](std::string* to, const char* w) { str_append(to, "\"", w, "\""); });
  const std::string range = option.least == INT64_MIN ? ""
                            : option.most == INT64_MAX
                                ? str_cat(", ", option.least, " or more")
                                : str_cat(", ", option.least, " to ", option.most);
  std::string type;
  switch (option.type) {
    case Type::kInteger:
      type = str_cat("an integer", range);
      break;
    case Type::kNumber:
      type = option.highest == 1 ? "a number from 0 to 1" : "a number";
      break;
    case Type::kFlag:
      type = "true or false";
      break;
    case Type::kWord:
      type = str_cat("one of ", words);
      break;
    case Type::kSizes:
    case Type::kSizesOrWord:
      type = option.count == 0
                 ? str_cat("an integer", range, ", or a list of such")
                 : str_cat("an integer", range, ", or a list of ", int64_t(option.count));
      if (!words.empty()) str_append(&type, ", or one of ", words);
      break;
    case Type::kLayers:
      type = "a list of objects with a \"kind\"";
  }
  return option.nullable ? str_cat(type, ", or null") : type;
}

// The options of one layer, that are of its kind and of their types.
class Values {
 public:
  Values(const JsonDocument& document, const Json& json, JsonDocument::Path path)
      : document_(document), json_(json), path_(std::move(path)) {}

  // nullptr: absent.
  const Json* find(const char* name) const {
    const auto found = json_.find(name);
    return found == json_.end() ? nullptr : &*found;
  }
  int64_t integer(const char* name, int64_t otherwise = 0) const {
    const Json* json = given(name);
    return json == nullptr ? otherwise : json->get<int64_t>();
  }
  double number(const char* name, double otherwise) const {
    const Json* json = given(name);
    return json == nullptr ? otherwise : json->get<double>();
  }
  // null is none; absent is `otherwise`.
  std::optional<double> number_or_none(const char* name, std::optional<double> otherwise) const {
    const Json* json = find(name);
    if (json == nullptr) return otherwise;
    return json->is_null() ? std::nullopt : std::optional<double>(json->get<double>());
  }
  bool flag(const char* name, bool otherwise) const {
    const Json* json = given(name);
    return json == nullptr ? otherwise : json->get<bool>();
  }
  std::string word(const char* name, const char* otherwise) const {
    const Json* json = given(name);
    return json == nullptr || !json->is_string() ? otherwise : json->get<std::string>();
  }
  template <size_t N>
  torch::ExpandingArray<N> sizes(const char* name, int64_t otherwise) const {
    const Json* json = given(name);
    if (json == nullptr || json->is_string()) return otherwise;
    if (!json->is_array()) return json->get<int64_t>();
    const auto list = json->get<std::vector<int64_t>>();
    return at::IntArrayRef(list);
  }
  std::vector<int64_t> list(const char* name) const {
    const Json* json = given(name);
    if (json == nullptr) return {};
    return json->is_array() ? json->get<std::vector<int64_t>>()
                            : std::vector<int64_t>{json->get<int64_t>()};
  }

  absl::Status refuse(std::string_view name, std::string_view why) const {
    return document_.refuse(path(name), why);
  }
  // That `json` is what the option wants.
  absl::Status check(const Option& option, const Json& json) const {
    const auto expected = [&] {
      return document_.expected(path(option.name), type_of(option), json);
    };
    const auto is_word = [&](const Json& j) {
      return j.is_string() && std::any_of(option.words.begin(), option.words.end(),
                                          [&](const char* w) { return j == w; });
    };
    const auto is_integer = [&](const Json& j) {
      if (!j.is_number_integer()) return false;
      // Above INT64_MAX it would become another number.
      if (j.is_number_unsigned() && j.get<uint64_t>() > uint64_t{INT64_MAX}) return false;
      const int64_t value = j.get<int64_t>();
      return value >= option.least && value <= option.most;
    };
    if (json.is_null()) return option.nullable ? absl::OkStatus() : expected();
    bool fits = false;
    switch (option.type) {
      case Type::kInteger:
        fits = is_integer(json);
        break;
      case Type::kNumber:
        fits = json.is_number() && json.get<double>() >= option.lowest &&
               json.get<double>() <= option.highest;
        break;
      case Type::kFlag:
        fits = json.is_boolean();
        break;
      case Type::kWord:
        fits = is_word(json);
        break;
      case Type::kSizes:
      case Type::kSizesOrWord:
        fits = is_integer(json) || (option.type == Type::kSizesOrWord && is_word(json)) ||
               (json.is_array() && !json.empty() &&
                (option.count == 0 || json.size() == option.count) &&
                std::all_of(json.begin(), json.end(), is_integer));
        break;
      case Type::kLayers:
        fits = json.is_array();
    }
    return fits ? absl::OkStatus() : expected();
  }

  const JsonDocument& document() const { return document_; }
  const Json& json() const { return json_; }
  JsonDocument::Path path(std::string_view name) const {
    JsonDocument::Path path = path_;
    if (!name.empty()) path.emplace_back(name);
    return path;
  }

 private:
  const Json* given(const char* name) const {
    const Json* json = find(name);
    return json == nullptr || json->is_null() ? nullptr : json;
  }

  const JsonDocument& document_;
  const Json& json_;
  const JsonDocument::Path path_;
};

// --- forwards ------------------------------------------------------------------------------------

template <typename Arg>
std::decay_t<Arg> argument(const c10::IValue& value) {
  if constexpr (std::is_same_v<std::decay_t<Arg>, at::Tensor>) {
    return value.isNone() ? at::Tensor() : value.toTensor();
  } else {
    static_assert(std::is_same_v<std::decay_t<Arg>, bool>);
    return value.toBool();
  }
}

void push(c10::Stack& stack, at::Tensor result) {
  stack.emplace_back(std::move(result));
}
template <typename... T>
void push(c10::Stack& stack, std::tuple<T...> results) {
  std::apply([&](T&... each) { (push(stack, std::move(each)), ...); }, results);
}

// Of a module whose forward() takes and gives tensors.
template <typename Module, typename Of, typename Result, typename... Args>
void call(Module& module, Result (Of::*)(Args...), c10::Stack& stack) {
  constexpr size_t kArgs = sizeof...(Args);
  [&]<size_t... I>(std::index_sequence<I...>) {
    Result result = module.forward(argument<Args>(torch::jit::peek(stack, I, kArgs))...);
    torch::jit::drop(stack, kArgs);
    push(stack, std::move(result));
  }(std::make_index_sequence<kArgs>());
}

// forward() is not virtual, so plans are met in calls by the module's own type.
template <typename Impl>
Forward forward_of(const ModulePtr& module) {
  const std::shared_ptr<Impl> layer = std::dynamic_pointer_cast<Impl>(module);
  if (layer == nullptr) return nullptr;
  return [layer](c10::Stack& stack) { call(*layer, &Impl::forward, stack); };
}
// What has no weight of its own is made as Hooked<Impl>; LibTorch's own modules have it plain.
template <typename Impl>
Forward forward_of_hooked(const ModulePtr& module) {
  if (const auto hooked = std::dynamic_pointer_cast<Hooked<Impl>>(module)) {
    return [hooked](c10::Stack& stack) { call(*hooked, &Impl::forward, stack); };
  }
  return forward_of<Impl>(module);
}

using Lstm = Hooked<torch::nn::LSTMImpl>;
Forward forward_of_lstm(const ModulePtr& module) {
  const std::shared_ptr<Lstm> lstm = std::dynamic_pointer_cast<Lstm>(module);
  if (lstm == nullptr) return nullptr;
  return [lstm](c10::Stack& stack) {
    constexpr size_t kArgs = 3;
    const at::Tensor input = argument<at::Tensor>(torch::jit::peek(stack, 0, kArgs));
    const at::Tensor h_0 = argument<at::Tensor>(torch::jit::peek(stack, 1, kArgs));
    const at::Tensor c_0 = argument<at::Tensor>(torch::jit::peek(stack, 2, kArgs));
    if (h_0.defined() != c_0.defined()) {
      throw Error("LSTM", absl::InvalidArgumentError("h_0 and c_0 are given together, or neither"));
    }
    std::optional<std::tuple<at::Tensor, at::Tensor>> state;
    if (h_0.defined()) state.emplace(h_0, c_0);
    auto results = lstm->forward(input, state);
    torch::jit::drop(stack, kArgs);
    push(stack, std::move(results));
  };
}

// Layers one behind the other, whatever they are.
class LayersImpl : public torch::nn::Module {
 public:
  explicit LayersImpl(std::vector<Layer> layers)
      : torch::nn::Module("Sequential"), layers_(std::move(layers)) {
    for (size_t i = 0; i < layers_.size(); ++i) {
      register_module(std::to_string(i), layers_[i].module);
    }
  }
  at::Tensor forward(const at::Tensor& input) {
    c10::Stack stack = {input};
    for (const Layer& layer : layers_) {
      // What else it takes it has defaults for.
      for (const c10::Argument& each : layer.schema.arguments()) {
        if (&each != &layer.schema.arguments().front()) stack.push_back(*each.default_value());
      }
      layer.forward(stack);
    }
    return stack.front().toTensor();
  }

 private:
  const std::vector<Layer> layers_;
};

// --- kinds ---------------------------------------------------------------------------------------

absl::StatusOr<Layer> make_layer(const JsonDocument& document, const Json& json,
                                 const JsonDocument::Path& path, std::string_view kind);

absl::StatusOr<ModulePtr> refused(std::string why) {
  return absl::InvalidArgumentError(std::move(why));
}

absl::StatusOr<ModulePtr> make_linear(const Values& v) {
  return std::make_shared<torch::nn::LinearImpl>(
      torch::nn::LinearOptions(v.integer("in_features"), v.integer("out_features"))
          .bias(v.flag("bias", true)));
}

absl::StatusOr<ModulePtr> make_embedding(const Values& v) {
  torch::nn::EmbeddingOptions options(v.integer("num_embeddings"), v.integer("embedding_dim"));
  if (v.find("padding_idx") != nullptr && !v.find("padding_idx")->is_null()) {
    const int64_t index = v.integer("padding_idx"), rows = options.num_embeddings();
    if (index < -rows || index >= rows) {
      return v.refuse("padding_idx", str_cat("is ", index, "; there are ", rows, " embeddings"));
    }
    options.padding_idx(index);
  }
  options.scale_grad_by_freq(v.flag("scale_grad_by_freq", false));
  return std::make_shared<torch::nn::EmbeddingImpl>(options);
}

absl::StatusOr<ModulePtr> make_embedding_bag(const Values& v) {
  torch::nn::EmbeddingBagOptions options(v.integer("num_embeddings"), v.integer("embedding_dim"));
  const std::string mode = v.word("mode", "mean");
  if (mode == "sum") options.mode(torch::kSum);
  if (mode == "max") options.mode(torch::kMax);
  options.include_last_offset(v.flag("include_last_offset", false));
  options.scale_grad_by_freq(v.flag("scale_grad_by_freq", false));
  return std::make_shared<torch::nn::EmbeddingBagImpl>(options);
}

absl::StatusOr<ModulePtr> make_layer_norm(const Values& v) {
  return std::make_shared<torch::nn::LayerNormImpl>(
      torch::nn::LayerNormOptions(v.list("normalized_shape"))
          .eps(v.number("eps", 1e-5))
          .elementwise_affine(v.flag("elementwise_affine", true)));
}

absl::StatusOr<ModulePtr> make_rms_norm(const Values& v) {
  return std::make_shared<Hooked<nn::RMSNormImpl>>(v.list("normalized_shape")[0],
                                                   v.number_or_none("eps", std::nullopt));
}

template <typename Impl>
absl::StatusOr<ModulePtr> make_batch_norm(const Values& v) {
  return std::make_shared<Impl>(torch::nn::BatchNormOptions(v.integer("num_features"))
                                    .eps(v.number("eps", 1e-5))
                                    .momentum(v.number_or_none("momentum", 0.1))
                                    .affine(v.flag("affine", true))
                                    .track_running_stats(v.flag("track_running_stats", true)));
}

absl::StatusOr<ModulePtr> make_group_norm(const Values& v) {
  const int64_t groups = v.integer("num_groups"), channels = v.integer("num_channels");
  if (channels % groups != 0) {
    return refused(str_cat("num_channels ", channels, " does not divide by num_groups ", groups));
  }
  return std::make_shared<torch::nn::GroupNormImpl>(torch::nn::GroupNormOptions(groups, channels)
                                                        .eps(v.number("eps", 1e-5))
                                                        .affine(v.flag("affine", true)));
}

template <size_t N, typename Impl>
absl::StatusOr<ModulePtr> make_conv(const Values& v) {
  const int64_t in = v.integer("in_channels"), out = v.integer("out_channels");
  const int64_t groups = v.integer("groups", 1);
  if (in % groups != 0 || out % groups != 0) {
    return refused(str_cat("in_channels ", in, " and out_channels ", out,
                           " do not both divide by groups ", groups));
  }
  torch::nn::ConvOptions<N> options(in, out, v.sizes<N>("kernel_size", 1));
  options.stride(v.sizes<N>("stride", 1)).dilation(v.sizes<N>("dilation", 1));
  options.groups(groups).bias(v.flag("bias", true));
  const std::string padding = v.word("padding", ""), mode = v.word("padding_mode", "zeros");
  if (padding == "same") {
    const torch::ExpandingArray<N> strides = v.sizes<N>("stride", 1);
    for (int64_t stride : *strides) {
      if (stride != 1) return refused("padding \"same\" wants stride 1");
    }
    options.padding(torch::kSame);
  } else if (padding == "valid") {
    options.padding(torch::kValid);
  } else {
    options.padding(v.sizes<N>("padding", 0));
  }
  if (mode == "reflect") options.padding_mode(torch::kReflect);
  if (mode == "replicate") options.padding_mode(torch::kReplicate);
  if (mode == "circular") options.padding_mode(torch::kCircular);
  return std::make_shared<Impl>(options);
}

absl::StatusOr<ModulePtr> make_dropout(const Values& v) {
  return std::make_shared<Hooked<torch::nn::DropoutImpl>>(
      torch::nn::DropoutOptions(v.number("p", 0.5)).inplace(v.flag("inplace", false)));
}

absl::StatusOr<ModulePtr> make_relu(const Values& v) {
  return std::make_shared<Hooked<torch::nn::ReLUImpl>>(
      torch::nn::ReLUOptions(v.flag("inplace", false)));
}
absl::StatusOr<ModulePtr> make_gelu(const Values& v) {
  return std::make_shared<Hooked<torch::nn::GELUImpl>>(
      torch::nn::GELUOptions().approximate(v.word("approximate", "none")));
}
absl::StatusOr<ModulePtr> make_silu(const Values& /*none*/) {
  return std::make_shared<Hooked<torch::nn::SiLUImpl>>();
}

absl::Status check_heads(std::string_view dim, int64_t size, std::string_view heads, int64_t n) {
  if (size % n == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(str_cat(dim, " ", size, " does not divide by ", heads, " ", n));
}

absl::StatusOr<ModulePtr> make_multihead_attention(const Values& v) {
  const int64_t dim = v.integer("embed_dim"), heads = v.integer("num_heads");
  if (absl::Status s = check_heads("embed_dim", dim, "num_heads", heads); !s.ok()) return s;
  return std::make_shared<Hooked<torch::nn::MultiheadAttentionImpl>>(
      torch::nn::MultiheadAttentionOptions(dim, heads)
          .dropout(v.number("dropout", 0))
          .bias(v.flag("bias", true))
          .add_bias_kv(v.flag("add_bias_kv", false))
          .add_zero_attn(v.flag("add_zero_attn", false))
          .kdim(v.integer("kdim", dim))
          .vdim(v.integer("vdim", dim)));
}

template <typename Impl, typename Options>
absl::StatusOr<ModulePtr> make_transformer_layer(const Values& v) {
  const int64_t dim = v.integer("d_model"), heads = v.integer("nhead");
  if (absl::Status s = check_heads("d_model", dim, "nhead", heads); !s.ok()) return s;
  Options options(dim, heads);
  options.dim_feedforward(v.integer("dim_feedforward", 2048)).dropout(v.number("dropout", 0.1));
  if (v.word("activation", "relu") == "gelu") options.activation(torch::kGELU);
  return std::make_shared<Hooked<Impl>>(options);
}

absl::StatusOr<ModulePtr> make_lstm(const Values& v) {
  const int64_t hidden = v.integer("hidden_size"), projected = v.integer("proj_size", 0);
  if (projected >= hidden) {
    return refused(str_cat("proj_size ", projected, " is not below hidden_size ", hidden));
  }
  return std::make_shared<Lstm>(torch::nn::LSTMOptions(v.integer("input_size"), hidden)
                                    .num_layers(v.integer("num_layers", 1))
                                    .bias(v.flag("bias", true))
                                    .batch_first(v.flag("batch_first", false))
                                    .dropout(v.number("dropout", 0))
                                    .bidirectional(v.flag("bidirectional", false))
                                    .proj_size(projected));
}

bool is_tensor(const c10::Argument& argument) {
  return argument.type()->kind() == c10::TypeKind::TensorType;
}
// One tensor in, one out.
bool is_simple(const c10::FunctionSchema& schema) {
  const auto& arguments = schema.arguments();
  return schema.returns().size() == 1 && is_tensor(schema.returns()[0]) && !arguments.empty() &&
         std::all_of(arguments.begin() + 1, arguments.end(),
                     [](const c10::Argument& a) { return a.default_value().has_value(); });
}

absl::StatusOr<ModulePtr> make_sequential(const Values& v) {
  std::vector<Layer> layers;
  const Json& list = *v.find("layers");
  for (size_t i = 0; i < list.size(); ++i) {
    JsonDocument::Path path = v.path("layers");
    path.push_back(std::to_string(i));
    absl::StatusOr<Layer> layer = make_layer(v.document(), list[i], path, "");
    if (!layer.ok()) return layer.status();
    if (!is_simple(layer->schema)) {
      return v.document().refuse(path, str_cat("wanted a layer that takes and gives one tensor; ",
                                               layer->kind, " has ", toString(layer->schema)));
    }
    layers.push_back(*std::move(layer));
  }
  return std::make_shared<Hooked<LayersImpl>>(std::move(layers));
}

struct Kind {
  std::string name;
  std::vector<Option> options;
  const char* forward;
  absl::StatusOr<ModulePtr> (*make)(const Values&);  // null: only a part of models
  Forward (*forward_of)(const ModulePtr&);           // null for what is none of them
};

constexpr char kOne[] = "forward(Tensor input) -> Tensor";
constexpr char kAttention[] = "forward(Tensor x, Tensor? cos=None, Tensor? sin=None) -> Tensor";

template <size_t N, typename Impl>
Kind conv(const char* name) {
  Option padding = sizes("padding", N, false, 0);
  padding.type = Type::kSizesOrWord;
  padding.words = {"same", "valid"};
  return {name,
          {size("in_channels", true), size("out_channels", true), sizes("kernel_size", N, true),
           sizes("stride", N, false), padding, sizes("dilation", N, false), size("groups"),
           flag("bias"), word("padding_mode", {"zeros", "reflect", "replicate", "circular"})},
          kOne,
          make_conv<N, Impl>,
          forward_of<Impl>};
}

template <typename Impl>
Kind batch_norm(const char* name) {
  return {name,
          {size("num_features", true), number("eps"), number("momentum", /*nullable=*/true),
           flag("affine"), flag("track_running_stats")},
          kOne,
          make_batch_norm<Impl>,
          forward_of<Impl>};
}

template <typename Impl, typename Options>
Kind transformer_layer(const char* name, const char* forward) {
  return {name,
          {size("d_model", true), size("nhead", true), size("dim_feedforward"),
           probability("dropout"), word("activation", {"relu", "gelu"})},
          forward,
          make_transformer_layer<Impl, Options>,
          forward_of_hooked<Impl>};
}

template <typename Impl>
Kind part(const char* name, const char* forward = kOne) {
  return {name, {}, forward, nullptr, forward_of_hooked<Impl>};
}

std::vector<Kind> all_kinds() {
  using namespace torch::nn;  // NOLINT: its names are the kinds
  constexpr int64_t kMostLayers = 1024;
  Option padding_idx = {
      .name = "padding_idx", .type = Type::kInteger, .nullable = true, .least = INT64_MIN};
  Option layers = {.name = "layers", .type = Type::kLayers, .required = true};
  Option num_layers = {.name = "num_layers", .type = Type::kInteger, .most = kMostLayers};
  return {
      {"Linear",
       {size("in_features", true), size("out_features", true), flag("bias")},
       kOne,
       make_linear,
       forward_of<LinearImpl>},
      {"Embedding",
       {size("num_embeddings", true), size("embedding_dim", true), padding_idx,
        flag("scale_grad_by_freq")},
       kOne,
       make_embedding,
       forward_of<EmbeddingImpl>},
      {"EmbeddingBag",
       {size("num_embeddings", true), size("embedding_dim", true),
        word("mode", {"sum", "mean", "max"}), flag("include_last_offset"),
        flag("scale_grad_by_freq")},
       "forward(Tensor input, Tensor? offsets=None, Tensor? per_sample_weights=None) -> Tensor",
       make_embedding_bag,
       forward_of<EmbeddingBagImpl>},
      {"LayerNorm",
       {sizes("normalized_shape", 0, true), number("eps"), flag("elementwise_affine")},
       kOne,
       make_layer_norm,
       forward_of<LayerNormImpl>},
      {"RMSNorm",
       {sizes("normalized_shape", 1, true), number("eps", /*nullable=*/true)},
       kOne,
       make_rms_norm,
       forward_of_hooked<nn::RMSNormImpl>},
      batch_norm<BatchNorm1dImpl>("BatchNorm1d"),
      batch_norm<BatchNorm2dImpl>("BatchNorm2d"),
      {"GroupNorm",
       {size("num_groups", true), size("num_channels", true), number("eps"), flag("affine")},
       kOne,
       make_group_norm,
       forward_of<GroupNormImpl>},
      conv<1, Conv1dImpl>("Conv1d"),
      conv<2, Conv2dImpl>("Conv2d"),
      {"Dropout",
       {probability("p"), flag("inplace")},
       kOne,
       make_dropout,
       forward_of_hooked<DropoutImpl>},
      {"ReLU", {flag("inplace")}, kOne, make_relu, forward_of_hooked<ReLUImpl>},
      {"GELU",
       {word("approximate", {"none", "tanh"})},
       kOne,
       make_gelu,
       forward_of_hooked<GELUImpl>},
      {"SiLU", {}, kOne, make_silu, forward_of_hooked<SiLUImpl>},
      {"MultiheadAttention",
       {size("embed_dim", true), size("num_heads", true), probability("dropout"), flag("bias"),
        flag("add_bias_kv"), flag("add_zero_attn"), size("kdim"), size("vdim")},
       "forward(Tensor query, Tensor key, Tensor value, Tensor? key_padding_mask=None, bool "
       "need_weights=True, Tensor? attn_mask=None, bool average_attn_weights=True) -> (Tensor, "
       "Tensor)",
       make_multihead_attention,
       forward_of_hooked<MultiheadAttentionImpl>},
      transformer_layer<TransformerEncoderLayerImpl, TransformerEncoderLayerOptions>(
          "TransformerEncoderLayer",
          "forward(Tensor src, Tensor? src_mask=None, Tensor? src_key_padding_mask=None) -> "
          "Tensor"),
      transformer_layer<TransformerDecoderLayerImpl, TransformerDecoderLayerOptions>(
          "TransformerDecoderLayer",
          "forward(Tensor tgt, Tensor memory, Tensor? tgt_mask=None, Tensor? memory_mask=None, "
          "Tensor? tgt_key_padding_mask=None, Tensor? memory_key_padding_mask=None) -> Tensor"),
      {"LSTM",
       {size("input_size", true), size("hidden_size", true), num_layers, flag("bias"),
        flag("batch_first"), probability("dropout"), flag("bidirectional"), count("proj_size")},
       "forward(Tensor input, Tensor? h_0=None, Tensor? c_0=None) -> (Tensor, Tensor, Tensor)",
       make_lstm,
       forward_of_lstm},
      {"Sequential", {layers}, kOne, make_sequential, forward_of_hooked<LayersImpl>},
      // Models, which make_model() makes, and what they are made of.
      part<nn::Gpt2Impl>("gpt2", "forward(Tensor input_ids) -> Tensor"),
      part<nn::LlamaImpl>("llama", "forward(Tensor input_ids) -> Tensor"),
      part<nn::MixtralImpl>("mixtral", "forward(Tensor input_ids) -> Tensor"),
      part<nn::VitImpl>("vit", "forward(Tensor pixel_values) -> Tensor"),
      part<nn::LmHeadImpl>("LmHead"),
      part<nn::GatedMlpImpl>("GatedMlp"),
      part<nn::MixtureOfExpertsImpl>("MixtureOfExperts"),
      part<nn::TopKRouterImpl>("TopKRouter"),
      part<nn::ExpertsImpl>("Experts", "forward(Tensor x, Tensor weights) -> Tensor"),
      part<nn::GroupedQueryAttentionImpl>("GroupedQueryAttention", kAttention),
      part<nn::DecoderLayerImpl<nn::GatedMlp>>("DecoderLayer", kAttention),
      part<nn::DecoderLayerImpl<nn::MixtureOfExperts>>("DecoderLayer", kAttention),
      part<nn::DecoderImpl<nn::GatedMlp>>("Decoder", "forward(Tensor input_ids) -> Tensor"),
      part<nn::DecoderImpl<nn::MixtureOfExperts>>("Decoder", "forward(Tensor input_ids) -> Tensor"),
      part<nn::Conv1dImpl>("Conv1D"),
      part<nn::Gpt2AttentionImpl>("Gpt2Attention"),
      part<nn::Gpt2MlpImpl>("Gpt2Mlp"),
      part<nn::Gpt2BlockImpl>("Gpt2Block"),
      part<nn::Gpt2TransformerImpl>("Gpt2Transformer", "forward(Tensor input_ids) -> Tensor"),
      part<nn::VitPatchEmbeddingsImpl>("VitPatchEmbeddings"),
      part<nn::VitEmbeddingsImpl>("VitEmbeddings"),
      part<nn::VitMlpImpl>("VitMlp"),
      part<nn::VitLayerImpl>("VitLayer"),
      part<nn::VitEncoderImpl>("VitEncoder"),
  };
}

const std::vector<Kind>& kinds() {
  static const std::vector<Kind>* const kAll = new std::vector<Kind>(all_kinds());
  return *kAll;
}

const Option& dtype_option() {
  static const Option* const kDType =
      new Option(word("dtype", {"float32", "float64", "float16", "bfloat16"}));
  return *kDType;
}

// Module::to() of LibTorch's C++ would convert counters, too (num_batches_tracked of a BatchNorm).
void set_dtype(torch::nn::Module& module, std::string_view dtype) {
  const at::ScalarType type = dtype == "float64"    ? at::kDouble
                              : dtype == "float16"  ? at::kHalf
                              : dtype == "bfloat16" ? at::kBFloat16
                                                    : at::kFloat;
  const auto convert = [&](const std::vector<at::Tensor>& tensors) {
    for (const at::Tensor& tensor : tensors) {
      if (tensor.is_floating_point()) tensor.set_data(tensor.to(type));
    }
  };
  convert(module.parameters());
  convert(module.buffers());
}

const Kind* find_kind(std::string_view name) {
  for (const Kind& kind : kinds()) {
    if (kind.name == name && kind.make != nullptr) return &kind;
  }
  return nullptr;
}

absl::Status unknown_kind(std::string_view kind) {
  const std::vector<std::string> names = nn::layer_kinds();
  return absl::InvalidArgumentError(str_cat("there is no kind '", kind,
                                            "'; there are: ", absl::StrJoin(names, ", "),
                                            modules_internal::did_you_mean(kind, names)));
}

absl::Status in_kind(std::string_view kind, const absl::Status& status) {
  return absl::Status(status.code(), str_cat(kind, ": ", status.message()));
}

// That all options are the kind's, and of their types.
absl::Status check(const Kind& kind, const Values& values, bool kind_is_inside) {
  std::vector<const Option*> known = {&dtype_option()};
  for (const Option& option : kind.options) known.push_back(&option);
  for (const auto& [key, json] : values.json().items()) {
    if (kind_is_inside && key == "kind") continue;
    const auto option = std::find_if(known.begin(), known.end(),
                                     [&key = key](const Option* o) { return key == o->name; });
    if (option == known.end()) {
      std::vector<std::string> names;
      for (const LayerOption& each : nn::layer_options(kind.name)) names.push_back(each.name);
      return values.refuse(
          key, str_cat("is no option of ", kind.name, "; there are: ", absl::StrJoin(names, ", "),
                       modules_internal::did_you_mean(key, names)));
    }
    if (absl::Status status = values.check(**option, json); !status.ok()) return status;
  }
  for (const Option& option : kind.options) {
    if (!option.required || values.find(option.name) != nullptr) continue;
    return values.document().refuse(values.path(""),
                                    str_cat("\"", option.name, "\" is missing: ", type_of(option)));
  }
  return absl::OkStatus();
}

// `kind` empty: the object says it.
absl::StatusOr<Layer> make_layer(const JsonDocument& document, const Json& json,
                                 const JsonDocument::Path& path, std::string_view name) {
  const bool kind_is_inside = name.empty();
  if (!json.is_object()) return document.expected(path, "an object", json);
  const Values values(document, json, path);
  std::string inside;
  if (kind_is_inside) {
    const Json* said = values.find("kind");
    if (said == nullptr || !said->is_string()) {
      return document.refuse(path, "wanted an object with a \"kind\"");
    }
    inside = said->get<std::string>();
    name = inside;
  }
  const Kind* kind = find_kind(name);
  if (kind == nullptr) {
    const absl::Status status = unknown_kind(name);
    return kind_is_inside ? values.refuse("kind", std::string(status.message())) : status;
  }
  if (absl::Status s = check(*kind, values, kind_is_inside); !s.ok()) return in_kind(name, s);
  absl::StatusOr<ModulePtr> module = kind->make(values);
  if (!module.ok()) return in_kind(name, module.status());
  set_dtype(**module, values.word("dtype", "float32"));
  Forward forward = kind->forward_of(*module);
  return Layer{kind->name, *std::move(module), torch::jit::parseSchema(kind->forward),
               std::move(forward)};
}

}  // namespace
}  // namespace shardweave::nn_layers

namespace shardweave::nn {

std::vector<std::string> layer_kinds() {
  std::vector<std::string> names;
  for (const nn_layers::Kind& kind : nn_layers::kinds()) {
    if (kind.make != nullptr) names.push_back(kind.name);
  }
  for (std::string& model : model_kinds()) names.push_back(std::move(model));
  return names;
}

std::vector<LayerOption> layer_options(std::string_view kind) {
  const nn_layers::Kind* const found = nn_layers::find_kind(kind);
  if (found == nullptr) return {};
  std::vector<LayerOption> all;
  for (const nn_layers::Option& option : found->options) {
    all.push_back({option.name, nn_layers::type_of(option), option.required});
  }
  all.push_back(
      {nn_layers::dtype_option().name, nn_layers::type_of(nn_layers::dtype_option()), false});
  return all;
}

absl::StatusOr<Layer> make_layer(std::string_view kind, std::string_view options_json) {
  const std::vector<std::string> models = model_kinds();
  if (std::find(models.begin(), models.end(), kind) != models.end()) {
    absl::StatusOr<Model> model = make_model(kind, options_json.empty() ? "{}" : options_json);
    if (!model.ok()) return nn_layers::in_kind(kind, model.status());
    return as_layer(model->module).value();
  }
  if (nn_layers::find_kind(kind) == nullptr) return nn_layers::unknown_kind(kind);
  const absl::StatusOr<modules_internal::JsonDocument> document =
      modules_internal::JsonDocument::read(options_json.empty() ? "{}" : options_json);
  if (!document.ok()) return nn_layers::in_kind(kind, document.status());
  return nn_layers::make_layer(*document, document->json(), {}, kind);
}

std::optional<Layer> as_layer(const std::shared_ptr<torch::nn::Module>& module) {
  for (const nn_layers::Kind& kind : nn_layers::kinds()) {
    if (nn_layers::Forward forward = kind.forward_of(module)) {
      return Layer{kind.name, module, torch::jit::parseSchema(kind.forward), std::move(forward)};
    }
  }
  return std::nullopt;
}

}  // namespace shardweave::nn
