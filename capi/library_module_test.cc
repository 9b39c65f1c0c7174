// Modules of the library's by their kinds: what they compute on a mesh is what they compute on one
// rank, values and gradients; and what is wrong with kinds and options.
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave.h"
#include "shardweave/capi/handles.h"

namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Of a body that returns a status.
#define TRY(call)                                   \
  do {                                              \
    if (swv_status* failed = (call)) return failed; \
  } while (false)

void must(swv_status* status) {
  ASSERT_EQ(status, nullptr) << swv_status_message(status);
}
std::string message_of(swv_status* status) {
  std::string message = swv_status_message(status);
  swv_status_free(status);
  return message;
}
template <typename H>
struct Free {
  void operator()(H* h) const;
};
template <>
void Free<swv_module>::operator()(swv_module* h) const {
  swv_module_free(h);
}
template <>
void Free<swv_tensor>::operator()(swv_tensor* h) const {
  swv_tensor_free(h);
}
template <>
void Free<swv_mesh>::operator()(swv_mesh* h) const {
  swv_mesh_free(h);
}
template <>
void Free<swv_plan>::operator()(swv_plan* h) const {
  swv_plan_free(h);
}
template <>
void Free<swv_layout>::operator()(swv_layout* h) const {
  swv_layout_free(h);
}
template <typename H>
using Owned = std::unique_ptr<H, Free<H>>;

struct Case {
  const char* kind;
  const char* options;
  const char* plan;                          // on "tp"; NULL: all replicated
  std::vector<std::vector<int64_t>> inputs;  // shapes
  int64_t words = 0;                         // above 0: the first input has integers below it
  int batch_dim = 0;                         // that "dp" cuts
  const char* patch = nullptr;  // of modules whose forward then is twice(): by their names
};

constexpr char kRowAndColumn[] =
    R"json({"parameter": {"*.in_proj_*": {"tp": "S(0, sf=3)"}, "*.out_proj.weight": {"tp": "S(1)"},
        "linear1.*": {"tp": "S(0)"}, "linear2.weight": {"tp": "S(1)"}}})json";

const Case kCases[] = {
    {"Linear",
     R"json({"in_features": 5, "out_features": 7})json",
     R"json({"parameter": {"*": {"tp": "S(0)"}}, "forward": {"output": {"tp": "R"}}})json",
     {{4, 3, 5}}},
    {"Linear",
     R"json({"in_features": 5, "out_features": 7, "bias": false, "dtype": "float64"})json",
     R"json({"parameter": {"weight": {"tp": "S(1)"}}})json",
     {{4, 5}}},
    {"Embedding",
     R"json({"num_embeddings": 11, "embedding_dim": 6, "padding_idx": -1})json",
     R"json({"parameter": {"weight": {"tp": "S(0)"}}})json",
     {{4, 3}},
     11},
    {"EmbeddingBag",
     R"json({"num_embeddings": 11, "embedding_dim": 6, "mode": "sum"})json",
     nullptr,
     {{4, 3}},
     11},
    {"LayerNorm",
     R"json({"normalized_shape": [6], "eps": 1e-3})json",
     R"json({"forward": {"input": {"tp": "S(1)"}}})json",
     {{4, 3, 6}}},
    {"RMSNorm",
     R"json({"normalized_shape": 6})json",
     R"json({"forward": {"input": {"tp": "S(1)"}}})json",
     {{4, 3, 6}}},
    {"BatchNorm1d", R"json({"num_features": 6})json", nullptr, {{4, 6}}},
    {"BatchNorm2d", R"json({"num_features": 6, "momentum": null})json", nullptr, {{4, 6, 3, 2}}},
    {"GroupNorm", R"json({"num_groups": 3, "num_channels": 6})json", nullptr, {{4, 6, 5}}},
    {"Conv1d",
     R"json({"in_channels": 4, "out_channels": 6, "kernel_size": 3, "padding": 1})json",
     R"json({"parameter": {"*": {"tp": "S(0)"}}})json",
     {{4, 4, 7}}},
    {"Conv2d",
     R"json({"in_channels": 3, "out_channels": 5, "kernel_size": [3, 2], "padding": "same"})json",
     R"json({"parameter": {"*": {"tp": "S(0)"}}})json",
     {{4, 3, 5, 5}}},
    {"Dropout",
     R"json({"p": 0})json",
     R"json({"forward": {"input": {"tp": "S(1)"}}})json",
     {{4, 3}}},
    {"ReLU",
     nullptr,
     R"json({"forward": {"input": {"tp": "S(1)"}, "output": {"tp": "R"}}})json",
     {{4, 3}}},
    {"GELU",
     R"json({"approximate": "tanh"})json",
     R"json({"forward": {"input": {"tp": "S(1)"}}})json",
     {{4, 3}}},
    {"SiLU", "{}", R"json({"forward": {"input": {"tp": "S(1)"}}})json", {{4, 3}}},
    {"MultiheadAttention",
     R"json({"embed_dim": 8, "num_heads": 4})json",
     R"json({"parameter": {"in_proj_*": {"tp": "S(0, sf=3)"}, "out_proj.weight": {"tp": "S(1)"}}})json",
     {{3, 4, 8}, {5, 4, 8}, {5, 4, 8}},
     0,
     1},
    {"TransformerEncoderLayer",
     R"json({"d_model": 8, "nhead": 4, "dim_feedforward": 11, "dropout": 0, "activation": "gelu"})json",
     kRowAndColumn,
     {{3, 4, 8}},
     0,
     1},
    {"TransformerDecoderLayer",
     R"json({"d_model": 8, "nhead": 4, "dim_feedforward": 11, "dropout": 0})json",
     kRowAndColumn,
     {{3, 4, 8}, {5, 4, 8}},
     0,
     1},
    {"LSTM",
     R"json({"input_size": 5, "hidden_size": 4, "batch_first": true})json",
     nullptr,
     {{4, 3, 5}}},
    {"Sequential",
     R"json({"layers": [{"kind": "Linear", "in_features": 5, "out_features": 9},
                    {"kind": "ReLU"},
                    {"kind": "Linear", "in_features": 9, "out_features": 3}]})json",
     R"json({"parameter": {"0.*": {"tp": "S(0)"}, "2.weight": {"tp": "S(1)"}},
         "forward": {"1.output": {"tp": "S(-1)"}, "output": {"tp": "R"}}})json",
     {{4, 5}}},
    {"gpt2",
     R"json({"vocab_size": 13, "n_positions": 6, "n_embd": 12, "n_layer": 2, "n_head": 4,
         "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0})json",
     R"json({"parameter": {"*.c_attn.weight": {"tp": "S(1, sf=3)"}, "*.c_attn.bias": {"tp": "S(0, sf=3)"},
                       "*.c_fc.weight": {"tp": "S(1)"}, "*.c_proj.weight": {"tp": "S(0)"}}})json",
     {{4, 5}},
     13},
    {"llama",
     R"json({"vocab_size": 13, "hidden_size": 16, "intermediate_size": 7, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2})json",
     R"json({"parameter": {"*.{q,k,v,gate,up}_proj.weight": {"tp": "S(0)"},
                       "*.{o,down}_proj.weight": {"tp": "S(1)"}}})json",
     {{4, 5}},
     13},
    {"RMSNorm",
     R"json({"normalized_shape": 6})json",
     R"json({"forward": {"input": {"tp": "S(1)"}, "output": {"tp": "R"}}})json",
     {{4, 3, 6}},
     0,
     0,
     ""},
    {"Sequential",
     R"json({"layers": [{"kind": "Linear", "in_features": 5, "out_features": 6}, {"kind": "GELU"},
        {"kind": "Linear", "in_features": 6, "out_features": 3}]})json",
     R"json({"parameter": {"0.*": {"tp": "S(0)"}, "2.weight": {"tp": "S(1)"}},
        "forward": {"output": {"tp": "R"}}})json",
     {{4, 5}},
     0,
     0,
     "1"},
    {"llama",
     R"json({"vocab_size": 13, "hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 2,
        "num_attention_heads": 2})json",
     R"json({"parameter": {"*.{gate,up}_proj.weight": {"tp": "S(0)"},
        "*.down_proj.weight": {"tp": "S(1)"}},
        "forward": {"model.layers.?.mlp.output": {"tp": "R"}}})json",
     {{4, 3}},
     13,
     0,
     "*.{mlp,input_layernorm}"},
};

// What a program sees of a run: outputs, and gradients by name.
using Seen = std::map<std::string, at::Tensor>;

at::Tensor numbers(at::IntArrayRef shape, double phase, at::ScalarType dtype) {
  return at::sin(at::arange(c10::multiply_integers(shape), at::kDouble) * 0.7 + phase)
      .view(shape)
      .to(dtype);
}

// As good as random: waves alone are matrices of rank 2, and lose digits.
at::Tensor drawn(at::IntArrayRef shape, double phase) {
  const at::Tensor waves =
      at::sin(at::arange(c10::multiply_integers(shape), at::kDouble) * 12.9898 + phase);
  return (waves * 43758.5453).frac().view(shape) * 0.5;
}

// A patch: f(x) + f(f(x)), whatever f was.
swv_status* twice(void* /*user_data*/, const swv_function_call* call) {
  swv_tensor *once = nullptr, *again = nullptr;
  TRY(swv_function_context_original(call->context, call->mode, call->inputs, call->num_inputs,
                                    &once, 1));
  const Owned<swv_tensor> first(once);
  TRY(swv_function_context_original(call->context, call->mode, &once, 1, &again, 1));
  const Owned<swv_tensor> second(again);
  call->outputs[0] = shardweave::capi::new_tensor(once->tensor + again->tensor, "the sum");
  return nullptr;
}

swv_status* patch(swv_module* module, const char* pattern) {
  swv_patch twice_patch = SWV_PATCH_INIT;
  twice_patch.name = "twice";
  twice_patch.forward = twice;
  return swv_module_patch(module, pattern, &twice_patch);
}

// Runs a case; mesh NULL: on one rank, without one.
swv_status* run(const Case& c, swv_mesh* handle, Seen* seen) {
  Owned<swv_mesh> mesh(handle);
  swv_module* made = nullptr;
  TRY(swv_module_create_by_kind(c.kind, c.options, &made));
  const Owned<swv_module> module(made);
  size_t parameters = 0;
  TRY(swv_module_num_parameters(made, &parameters));
  at::ScalarType dtype = at::kFloat;
  std::map<std::string, Owned<swv_tensor>> by_name;
  for (size_t i = 0; i < parameters; ++i) {
    swv_string* fqn = nullptr;
    swv_tensor* tensor = nullptr;
    TRY(swv_module_parameter(made, i, &fqn, &tensor));
    by_name[swv_string_data(fqn)].reset(tensor);
    swv_string_free(fqn);
    const at::NoGradGuard no_grad;
    dtype = tensor->tensor.scalar_type();
    tensor->tensor.copy_(drawn(tensor->tensor.sizes(), static_cast<double>(i)));
  }
  swv_plan* plan = nullptr;
  if (mesh != nullptr) {
    if (c.plan != nullptr) TRY(swv_plan_from_json(c.plan, &plan));
    const Owned<swv_plan> owned(plan);
    TRY(swv_module_distribute(made, mesh.get(), plan, nullptr));
  }
  if (c.patch != nullptr) TRY(patch(made, c.patch));
  std::vector<Owned<swv_tensor>> inputs;
  std::vector<swv_value> arguments;
  for (size_t i = 0; i < c.inputs.size(); ++i) {
    at::Tensor input = numbers(c.inputs[i], 0.3 + static_cast<double>(i), dtype);
    if (c.words > 0) {
      input = at::arange(input.numel(), at::kLong).mul(5).remainder(c.words).view(input.sizes());
    }
    swv_tensor* x = nullptr;
    swv_tensor_options options = SWV_TENSOR_OPTIONS_INIT;
    options.dtype = c.words > 0            ? swv_dtype{SWV_DTYPE_I64}
                    : dtype == at::kDouble ? swv_dtype{SWV_DTYPE_F64}
                                           : swv_dtype{SWV_DTYPE_F32};
    options.requires_grad = c.words > 0 ? 0 : 1;
    TRY(swv_tensor_from_data(input.const_data_ptr(), input.nbytes(), input.sizes().data(),
                             input.sizes().size(), &options, &x));
    if (mesh != nullptr) {
      const Owned<swv_tensor> whole(x);
      int32_t ndim = 0;
      swv_layout* layout = nullptr;
      TRY(swv_mesh_ndim(mesh.get(), &ndim));
      const std::string text = ndim == 1 ? "[R]" : "[S(" + std::to_string(c.batch_dim) + "), R]";
      TRY(swv_layout_parse(text.c_str(), &layout));
      const Owned<swv_layout> owned(layout);
      TRY(swv_tensor_distribute(whole.get(), mesh.get(), layout, nullptr, &x));
    }
    inputs.emplace_back(x);
    arguments.push_back(swv_value_tensor(x));
  }
  swv_value results[3] = {SWV_NONE, SWV_NONE, SWV_NONE};
  size_t count = 0;
  for (int times = 0; times < 2; ++times) {  // the second sees what the first has left in buffers
    for (swv_value& result : results) swv_value_clear(&result);
    TRY(swv_module_call(made, "forward", SWV_MODE_GRAD, arguments.data(), arguments.size(), results,
                        3, &count));
  }
  const auto whole = [](const at::Tensor& t) {
    const at::Tensor d = t.detach();
    return shardweave::is_dtensor(d) ? shardweave::full_tensor(d) : d;
  };
  at::Tensor loss;
  for (size_t i = 0; i < count; ++i) {
    if (results[i].kind != SWV_VALUE_TENSOR) continue;
    const at::Tensor& y = results[i].as.tensor->tensor;
    (*seen)["output " + std::to_string(i)] = whole(y);
    // Every element counts otherwise.
    const at::Tensor term = (y * numbers(y.sizes(), 2.0, y.scalar_type())).sum();
    loss = loss.defined() ? loss + term : term;
  }
  loss.backward();
  for (swv_value& result : results) swv_value_clear(&result);
  TRY(swv_module_finish_grad_sync(made));
  for (const auto& [name, tensor] : by_name) {
    if (tensor->tensor.grad().defined()) (*seen)["grad " + name] = whole(tensor->tensor.grad());
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i]->tensor.grad().defined()) {
      (*seen)["grad of input " + std::to_string(i)] = whole(inputs[i]->tensor.grad());
    }
  }
  size_t buffers = 0;
  TRY(swv_module_num_buffers(made, &buffers));
  for (size_t i = 0; i < buffers; ++i) {
    swv_string* fqn = nullptr;
    swv_tensor* tensor = nullptr;
    TRY(swv_module_buffer(made, i, &fqn, &tensor));
    (*seen)[std::string("buffer ") + swv_string_data(fqn)] = whole(tensor->tensor);
    swv_string_free(fqn);
    swv_tensor_free(tensor);
  }
  return nullptr;
}

void expect_same(const Seen& got, const Seen& wanted, const std::string& where) {
  ASSERT_EQ(got.size(), wanted.size()) << where;
  for (const auto& [name, tensor] : wanted) {
    ASSERT_TRUE(got.contains(name)) << where << ": " << name;
    EXPECT_TRUE(at::allclose(got.at(name), tensor, 1e-4, 1e-5)) << where << ": " << name << "\n"
                                                                << got.at(name) << "\n"
                                                                << tensor;
  }
}

TEST(LibraryModuleTest, ComputesOnAMeshWhatItDoesOnOneRank) {
  struct Rank {
    const Case* test;
    const char* mesh;
    std::vector<Seen> seen;
  };
  for (const Case& c : kCases) {
    SCOPED_TRACE(c.kind);
    Seen wanted;
    must(run(c, nullptr, &wanted));
    for (const auto& [mesh, ranks] : {std::pair("tp=1", 1), {"tp=2", 2}, {"dp=2,tp=2", 4}}) {
      Rank all{&c, mesh, std::vector<Seen>(static_cast<size_t>(ranks))};
      must(swv_run_ranks(
          ranks,
          [](void* user_data, swv_world* world) -> swv_status* {
            Rank& rank = *static_cast<Rank*>(user_data);
            int32_t me = 0;
            swv_mesh* made = nullptr;
            TRY(swv_world_rank(world, &me));
            TRY(swv_mesh_parse(world, rank.mesh, &made));
            return run(*rank.test, made, &rank.seen[static_cast<size_t>(me)]);
          },
          &all, nullptr));
      for (const Seen& seen : all.seen) expect_same(seen, wanted, mesh);
    }
  }
}

std::string refusal(const char* kind, const char* options) {
  swv_module* module = nullptr;
  swv_status* const status = swv_module_create_by_kind(kind, options, &module);
  EXPECT_EQ(swv_status_code(status), SWV_CODE_INVALID_ARGUMENT) << kind << " " << options;
  EXPECT_EQ(module, nullptr);
  swv_module_free(module);
  return message_of(status);
}

TEST(LibraryModuleTest, WhatIsWrongIsSaid) {
  EXPECT_THAT(refusal("Linaer", nullptr),
              AllOf(HasSubstr("swv_module_create_by_kind: there is no kind 'Linaer'; there are: "
                              "Linear, Embedding"),
                    HasSubstr("vit; did you mean 'Linear'?")));
  EXPECT_THAT(refusal("Linear", nullptr),
              HasSubstr("Linear: the text: \"in_features\" is missing: an integer, 1 or more"));
  EXPECT_THAT(refusal("Linear", "{\n\"in_feature\": 3}"),
              HasSubstr("Linear: line 2, \"in_feature\": is no option of Linear; there are: "
                        "in_features, out_features, bias, dtype; did you mean 'in_features'?"));
  const auto linear = [](const char* in) {
    return refusal("Linear",
                   (std::string(R"({"out_features": 2, "in_features": )") + in + "}").c_str());
  };
  EXPECT_THAT(linear("0"), HasSubstr("\"in_features\": wanted an integer, 1 or more, not 0"));
  EXPECT_THAT(linear("18446744073709551615"), HasSubstr("not 18446744073709551615"));
  EXPECT_THAT(linear("1e400"), HasSubstr("no JSON on line 1"));
  EXPECT_THAT(linear("2.0"), HasSubstr("not 2.0"));
  EXPECT_THAT(linear("true"), HasSubstr("not true"));
  EXPECT_THAT(linear("null"), HasSubstr("not null"));
  EXPECT_THAT(linear("[2]"), HasSubstr("not [2]"));
  EXPECT_THAT(refusal("Linear", "["), HasSubstr("no JSON on line 1"));
  EXPECT_THAT(refusal("Linear", "[]"), HasSubstr("wanted an object"));
  EXPECT_THAT(refusal("Dropout", R"({"p": 1.5})"), HasSubstr("wanted a number from 0 to 1"));
  EXPECT_THAT(refusal("GELU", R"({"approximate": "erf"})"),
              HasSubstr("wanted one of \"none\", \"tanh\", not \"erf\""));
  EXPECT_THAT(refusal("GroupNorm", R"({"num_groups": 4, "num_channels": 6})"),
              HasSubstr("does not divide"));
  EXPECT_THAT(refusal("GroupNorm", R"({"num_groups": 0, "num_channels": 6})"), HasSubstr("not 0"));
  EXPECT_THAT(refusal("MultiheadAttention", R"({"embed_dim": 6, "num_heads": 4})"),
              HasSubstr("embed_dim 6 does not divide by num_heads 4"));
  EXPECT_THAT(
      refusal("Conv2d", R"({"in_channels": 1, "out_channels": 1, "kernel_size": [1, 2, 3]})"),
      HasSubstr("wanted an integer, 1 or more, or a list of 2, not [1,2,3]"));
  EXPECT_THAT(refusal("Conv2d", R"({"in_channels": 3, "out_channels": 4, "kernel_size": 1,
                                    "groups": 2})"),
              HasSubstr("do not both divide by groups 2"));
  EXPECT_THAT(
      refusal("LSTM", R"({"input_size": 1, "hidden_size": 1, "num_layers": 1000000000000})"),
      HasSubstr("wanted an integer, 1 to 1024"));
  EXPECT_THAT(refusal("Sequential", R"({"layers": [{"kind": "Linaer"}]})"),
              AllOf(HasSubstr("\"kind\": there is no kind 'Linaer'"), HasSubstr("'Linear'")));
  EXPECT_THAT(refusal("Sequential", R"({"layers": [{"kind": "LSTM", "input_size": 1,
                                        "hidden_size": 1}]})"),
              HasSubstr("wanted a layer that takes and gives one tensor"));
  EXPECT_THAT(refusal("llama", R"({"hidden_size": 18446744073709551615})"),
              HasSubstr("llama: line 1, \"hidden_size\": wanted an integer of 64 bits"));
  EXPECT_THAT(refusal("llama", R"({"model_type": "gpt2"})"), HasSubstr("wanted \"llama\""));
  EXPECT_THAT(refusal(nullptr, nullptr), HasSubstr("argument 'kind' is NULL"));
  // More than there is memory for is no crash.
  swv_module* module = nullptr;
  swv_status* const status = swv_module_create_by_kind(
      "Linear", R"({"in_features": 4611686018427387904, "out_features": 4611686018427387904})",
      &module);
  EXPECT_NE(status, nullptr);
  swv_status_free(status);
}

class OneModuleTest : public testing::Test {
 protected:
  void make(const char* kind, const char* options) {
    must(swv_module_create_by_kind(kind, options, &module_));
  }
  void TearDown() override {
    swv_module_free(module_);
    EXPECT_EQ(swv_live_handles(), before_) << "leaked";
  }
  const int64_t before_ = swv_live_handles();
  swv_module* module_ = nullptr;
};

// Parts of it, in another module, and by their names.
TEST_F(OneModuleTest, HasPartsAndIsOne) {
  make("llama", R"({"vocab_size": 13, "hidden_size": 8, "intermediate_size": 7,
                    "num_hidden_layers": 2, "num_attention_heads": 2})");
  swv_module *mlp = nullptr, *list = nullptr, *none = nullptr, *outer = nullptr;
  must(swv_module_child(module_, "model.layers.1.mlp", &mlp));
  const std::vector<float> ones(2 * 8, 1.0f);
  const int64_t sizes[] = {2, 8};
  swv_tensor* x = nullptr;
  must(swv_tensor_from_data(ones.data(), ones.size() * sizeof(float), sizes, 2, nullptr, &x));
  const swv_value arguments[] = {swv_value_tensor(x)};
  swv_value result = SWV_NONE;
  must(swv_module_call(mlp, "forward", SWV_MODE_NO_GRAD, arguments, 1, &result, 1, nullptr));
  EXPECT_EQ(result.as.tensor->tensor.sizes(), (at::IntArrayRef{2, 8}));
  swv_value_clear(&result);
  EXPECT_THAT(message_of(swv_module_call(mlp, "forwrad", SWV_MODE_NO_GRAD, arguments, 1, &result, 1,
                                         nullptr)),
              HasSubstr("there is no 'forwrad'; did you mean 'forward'?"));
  EXPECT_THAT(message_of(swv_module_call(mlp, "forward", SWV_MODE_NO_GRAD, arguments, 0, &result, 1,
                                         nullptr)),
              HasSubstr("forward(Tensor input) -> Tensor"));
  must(swv_module_child(module_, "model.layers", &list));
  EXPECT_THAT(message_of(swv_module_call(list, "forward", SWV_MODE_NO_GRAD, arguments, 1, &result,
                                         1, nullptr)),
              HasSubstr("has no forward that can be called alone"));
  EXPECT_THAT(message_of(swv_module_child(module_, "model.layers.1.mpl", &none)),
              HasSubstr("did you mean 'model.layers.1.mlp', "));
  // What a part is told, the whole hears.
  swv_bool on = 1;
  must(swv_module_train(module_, 0));
  must(swv_module_is_training(mlp, &on));
  EXPECT_EQ(on, 0);

  must(swv_module_create(&outer));
  EXPECT_THAT(message_of(swv_module_add_child(outer, "a", mlp)),
              HasSubstr("is a part of a module already, as 'model.layers.1.mlp'"));
  must(swv_module_add_child(outer, "body.lm", module_));
  EXPECT_THAT(message_of(swv_module_add_child(outer, "b", module_)),
              HasSubstr("is a part of a module already, as 'body.lm'"));
  EXPECT_THAT(message_of(swv_module_add_child(outer, "body.lm", outer)),
              HasSubstr("the module has"));
  EXPECT_THAT(message_of(swv_module_add_parameter(outer, "body.lm.x", x)),
              HasSubstr("'body.lm' is of the library's (llama): nothing is added to it"));
  EXPECT_THAT(message_of(swv_module_add_parameter(module_, "x", x)),
              HasSubstr("argument 'module' is of the library's (llama)"));
  swv_forward* forward = nullptr;
  EXPECT_THAT(message_of(swv_module_forward(outer, "body.lm.model.layers.0", &forward)),
              HasSubstr("argument 'fqn' is of the library's (DecoderLayer): plans meet it"));
  swv_tensor *one = nullptr, *other = nullptr;
  must(swv_module_get(outer, "body.lm.lm_head.weight", &one));
  must(swv_module_get(module_, "lm_head.weight", &other));
  swv_bool same = 0;
  must(swv_tensor_is_same(one, other, &same));
  EXPECT_EQ(same, 1);
  swv_tensor* wrong = nullptr;
  EXPECT_THAT(message_of(swv_module_get(outer, "body.lm.lm_head.weihgt", &wrong)),
              HasSubstr("did you mean 'body.lm.lm_head.weight'?"));
  size_t inside = 0, all = 0;
  must(swv_module_num_parameters(module_, &inside));
  must(swv_module_num_parameters(outer, &all));
  EXPECT_EQ(inside, all);
  swv_module *again = nullptr, *part = nullptr;
  must(swv_module_child(outer, "body.lm", &again));
  must(swv_module_child(outer, "body.lm.model.norm", &part));
  for (swv_module* m : {mlp, list, outer, again, part}) swv_module_free(m);
  for (swv_tensor* t : {x, one, other}) swv_tensor_free(t);
}

// "dtype" is that of parameters and of what is computed, not of counters.
TEST_F(OneModuleTest, CountersAreNoNumbersOfItsDType) {
  const std::pair<const char*, swv_dtype> kDTypes[] = {{"float32", SWV_DTYPE_F32},
                                                       {"float64", SWV_DTYPE_F64},
                                                       {"float16", SWV_DTYPE_F16},
                                                       {"bfloat16", SWV_DTYPE_BF16}};
  for (const auto& [name, wanted] : kDTypes) {
    const std::string dtype = std::string(R"("dtype": ")") + name + "\"";
    const std::pair<const char*, std::string> models[] = {
        {"BatchNorm1d", R"({"num_features": 2, )" + dtype + "}"},
        {"BatchNorm2d", R"({"num_features": 2, )" + dtype + "}"},
        {"Sequential",
         R"({"layers": [{"kind": "BatchNorm1d", "num_features": 2}], )" + dtype + "}"},
        {"Sequential",
         R"({"layers": [{"kind": "BatchNorm1d", "num_features": 2, )" + dtype + "}]}"}};
    for (const auto& [kind, options] : models) {
      const bool is_inside = options.ends_with("}]}");
      make(kind, options.c_str());
      size_t buffers = 0;
      must(swv_module_num_buffers(module_, &buffers));
      EXPECT_EQ(buffers, 3u) << options;
      for (const bool of_buffers : {false, true}) {
        for (size_t i = 0; i < (of_buffers ? buffers : 2); ++i) {
          swv_string* fqn = nullptr;
          swv_tensor* tensor = nullptr;
          must((of_buffers ? swv_module_buffer : swv_module_parameter)(module_, i, &fqn, &tensor));
          const std::string named = swv_string_data(fqn);
          swv_dtype is = SWV_DTYPE_BOOL;
          must(swv_tensor_dtype(tensor, &is));
          // The whole's "dtype", float32 if nothing is said, is that of all that is inside.
          const swv_dtype whole = is_inside ? swv_dtype{SWV_DTYPE_F32} : wanted;
          EXPECT_EQ(is, named.ends_with("num_batches_tracked") ? swv_dtype{SWV_DTYPE_I64} : whole)
              << options << ", " << named;
          swv_string_free(fqn);
          swv_tensor_free(tensor);
        }
      }
      swv_module_free(std::exchange(module_, nullptr));
    }
  }
  // It counts.
  make("BatchNorm1d", R"({"num_features": 2, "dtype": "float64"})");
  const double data[] = {1, 2, 3, 5, 8, 13};
  const int64_t sizes[] = {3, 2};
  swv_tensor_options options = SWV_TENSOR_OPTIONS_INIT;
  options.dtype = SWV_DTYPE_F64;
  swv_tensor *x = nullptr, *counter = nullptr;
  must(swv_tensor_from_data(data, sizeof(data), sizes, 2, &options, &x));
  const swv_value arguments[] = {swv_value_tensor(x)};
  for (int i = 0; i < 2; ++i) {
    swv_value result = SWV_NONE;
    must(swv_module_call(module_, "forward", SWV_MODE_GRAD, arguments, 1, &result, 1, nullptr));
    swv_value_clear(&result);
  }
  must(swv_module_get(module_, "num_batches_tracked", &counter));
  EXPECT_EQ(counter->tensor.item<int64_t>(), 2);
  for (swv_tensor* t : {x, counter}) swv_tensor_free(t);
}

// What a patch of module "1" is called with, and how often it is dropped.
struct Calls {
  std::string seen;
  int drops = 0;
};
swv_status* note(void* user_data, const swv_function_call* call) {
  Calls& calls = *static_cast<Calls*>(user_data);
  EXPECT_EQ(call->num_inputs, 1u);
  EXPECT_EQ(call->num_outputs, 1u);
  calls.seen += std::string(call->fqn) + (call->mode == SWV_MODE_NO_GRAD ? "-" : "+");
  swv_bool training = 1;
  TRY(swv_module_is_training(call->module, &training));
  calls.seen += training == 1 ? "t" : "e";
  if (calls.seen.size() > 10) return swv_status_new(SWV_CODE_DATA_LOSS, "no more");
  return swv_function_context_original(call->context, call->mode, call->inputs, 1, call->outputs,
                                       1);
}
swv_status* writes_nothing(void* /*user_data*/, const swv_function_call* call) {
  swv_tensor* two[2] = {};
  swv_status* const none =
      swv_function_context_original(call->context, call->mode, call->inputs, 0, two, 1);
  EXPECT_THAT(message_of(none), HasSubstr("was called with 0 inputs; wanted 1"));
  swv_status* const both =
      swv_function_context_original(call->context, call->mode, call->inputs, 1, two, 2);
  EXPECT_THAT(message_of(both), HasSubstr("'num_outputs' is 2; the forward that is patched has 1"));
  EXPECT_THAT(message_of(swv_function_context_save(call->context, call->inputs, 1)),
              HasSubstr("'context' is of a patch"));
  EXPECT_THAT(message_of(swv_function_context_saved(call->context, 0, two)),
              HasSubstr("'context' is of a patch"));
  return nullptr;
}

TEST_F(OneModuleTest, IsPatched) {
  make("Sequential", R"({"layers": [{"kind": "Linear", "in_features": 2, "out_features": 3},
                                    {"kind": "ReLU"}, {"kind": "GELU"}]})");
  Calls calls;
  swv_patch patch = SWV_PATCH_INIT;
  patch.user_data = &calls;
  patch.drop = [](void* user_data) { ++static_cast<Calls*>(user_data)->drops; };
  int drops = 0;
  const auto refused = [&](swv_module* module, const char* pattern, swv_code code,
                           const char* why) {
    swv_status* const status = swv_module_patch(module, pattern, &patch);
    EXPECT_EQ(swv_status_code(status), code) << why;
    EXPECT_THAT(message_of(status), HasSubstr(why));
    EXPECT_EQ(calls.drops, ++drops) << why;
  };
  refused(module_, "1", SWV_CODE_INVALID_ARGUMENT, "'patch.forward' is NULL");
  patch.forward = note;
  patch.name = "note";
  refused(module_, nullptr, SWV_CODE_INVALID_ARGUMENT, "'pattern' is NULL");
  refused(nullptr, "1", SWV_CODE_INVALID_ARGUMENT, "'module' is NULL");
  refused(module_, "{1", SWV_CODE_INVALID_ARGUMENT, "pattern '{1' ");
  refused(module_, "12", SWV_CODE_NOT_FOUND, "no module is called '12'; did you mean '1', '2'");
  refused(module_, "{0,1}", SWV_CODE_FAILED_PRECONDITION, "the forward of '0' (torch::nn::Linear");
  swv_module* outer = nullptr;
  must(swv_module_create(&outer));
  must(swv_module_add_child(outer, "body.layers", module_));
  refused(outer, "body", SWV_CODE_FAILED_PRECONDITION, "is the host's own code");
  swv_module_free(outer);

  const float data[] = {1, 2};
  const int64_t sizes[] = {1, 2};
  swv_tensor* x = nullptr;
  must(swv_tensor_from_data(data, sizeof(data), sizes, 2, nullptr, &x));
  const swv_value arguments[] = {swv_value_tensor(x)};
  swv_value plain = SWV_NONE, patched = SWV_NONE;
  const auto call = [&](swv_grad_mode mode, swv_value* result) {
    return swv_module_call(module_, "forward", mode, arguments, 1, result, 1, nullptr);
  };
  must(call(SWV_MODE_GRAD, &plain));
  must(swv_module_patch(module_, "{1,2}", &patch));
  must(call(SWV_MODE_GRAD, &patched));
  EXPECT_TRUE(at::equal(plain.as.tensor->tensor, patched.as.tensor->tensor));
  EXPECT_EQ(calls.seen, "1+t2+t");
  swv_value_clear(&patched);
  must(swv_module_train(module_, 0));
  swv_status* const failed = call(SWV_MODE_NO_GRAD, &patched);
  EXPECT_EQ(swv_status_code(failed), SWV_CODE_DATA_LOSS);
  EXPECT_THAT(message_of(failed), HasSubstr("note.forward, in place of that of '2': no more"));
  EXPECT_EQ(calls.seen, "1+t2+t1-e2-e");

  // In place of the patched one.
  calls.seen.clear();
  swv_patch other = SWV_PATCH_INIT;
  other.name = "other";
  other.forward = writes_nothing;
  must(swv_module_patch(module_, "1", &other));
  EXPECT_THAT(message_of(call(SWV_MODE_GRAD, &patched)),
              HasSubstr("other.forward, in place of that of '1': output 0 was not written"));
  EXPECT_EQ(calls.drops, drops);
  swv_value_clear(&plain);
  swv_tensor_free(x);
  swv_module_free(module_);
  EXPECT_EQ(calls.drops, drops + 1);
  module_ = nullptr;
}

// What runs outlives a handle that a patch frees.
TEST_F(OneModuleTest, IsFreedWhileItRuns) {
  make("llama", R"({"vocab_size": 13, "hidden_size": 8, "intermediate_size": 7,
                    "num_hidden_layers": 2, "num_attention_heads": 2})");
  static int drops;
  drops = 0;
  swv_patch patch = SWV_PATCH_INIT;
  patch.user_data = &module_;
  patch.drop = [](void* /*user_data*/) { ++drops; };
  patch.forward = [](void* user_data, const swv_function_call* call) -> swv_status* {
    swv_module*& model = *static_cast<swv_module**>(user_data);
    swv_module_free(model);
    model = nullptr;
    return swv_function_context_original(call->context, call->mode, call->inputs, 1, call->outputs,
                                         1);
  };
  must(swv_module_patch(module_, "model.layers.0.mlp", &patch));
  const int64_t ids[] = {1, 2, 3}, sizes[] = {1, 3};
  swv_tensor_options integers = SWV_TENSOR_OPTIONS_INIT;
  integers.dtype = SWV_DTYPE_I64;
  swv_tensor* x = nullptr;
  must(swv_tensor_from_data(ids, sizeof(ids), sizes, 2, &integers, &x));
  const swv_value argument = swv_value_tensor(x);
  swv_value result = SWV_NONE;
  must(swv_module_call(module_, "forward", SWV_MODE_GRAD, &argument, 1, &result, 1, nullptr));
  EXPECT_EQ(module_, nullptr);
  EXPECT_EQ(result.as.tensor->tensor.size(2), 13);
  EXPECT_EQ(drops, 1);
  swv_value_clear(&result);
  swv_tensor_free(x);
}

// The whole is gone, its parts are not.
TEST_F(OneModuleTest, PartsOutliveTheHandle) {
  make("Sequential", R"({"layers": [{"kind": "Linear", "in_features": 2, "out_features": 3}]})");
  swv_module* part = nullptr;
  must(swv_module_child(module_, "0", &part));
  swv_module_free(module_);
  module_ = part;
  const float data[] = {1, 2};
  const int64_t sizes[] = {1, 2};
  swv_tensor* x = nullptr;
  must(swv_tensor_from_data(data, sizeof(data), sizes, 2, nullptr, &x));
  const swv_value arguments[] = {swv_value_tensor(x)};
  const char* const names[] = {"input"};
  swv_value result = SWV_NONE;
  must(swv_module_call_named(module_, "forward", SWV_MODE_GRAD, arguments, 1, names, 1, &result, 1,
                             nullptr));
  EXPECT_EQ(result.as.tensor->tensor.size(1), 3);
  swv_value_clear(&result);
  swv_tensor_free(x);
}

}  // namespace
