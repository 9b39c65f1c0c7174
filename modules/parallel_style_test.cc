// Models that know nothing of it, under styles: parameters after some steps, and the gradient of the
// input, are one device's, and the collectives are those of the theory.
#include "shardweave/modules/parallel_style.h"

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/testing/expect_comms.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/modules/hooked.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/activation.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/conv.h"
#include "torch/nn/modules/dropout.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/modules/normalization.h"
#include "torch/nn/modules/transformer.h"
#include "torch/nn/modules/transformerlayer.h"
#include "torch/nn/pimpl.h"
#include "torch/optim/sgd.h"

namespace shardweave {
namespace {

using ::testing::HasSubstr;
using testing::on_mesh;
namespace nn = torch::nn;

const std::vector<std::vector<MeshDim>> kMeshes = {
    {{"tp", 2}}, {{"tp", 3}}, {{"tp", 4}}, {{"dp", 2}, {"tp", 2}}};

// The same numbers in every model, doubles.
void fill(nn::Module& module) {
  static std::mutex one_at_a_time;  // ranks are threads, which share LibTorch's generator
  const std::lock_guard lock(one_at_a_time);
  module.to(at::kDouble);
  const torch::NoGradGuard no_grad;
  int seed = 0;
  for (const at::Tensor& p : unique_parameters(module)) {
    p.copy_((at::arange(p.numel(), at::kDouble) * 1.7 + ++seed).sin().view(p.sizes()) * 0.4);
  }
}

at::Tensor numbers(at::IntArrayRef sizes, int seed = 0) {
  int64_t n = 1;
  for (const int64_t s : sizes) n *= s;
  return (at::arange(n, at::kDouble) * 0.9 + seed).cos().view(sizes);
}

NamedPlacements cut_rows(const MeshPtr& mesh, int dim) {
  if (!mesh->mesh().dim("dp").ok()) return {};
  return {{"dp", Shard(dim)}};
}

template <typename Holder>
struct Program {
  std::function<Holder()> make;
  std::vector<at::Tensor> inputs;
  std::function<at::Tensor(Holder&, const std::vector<at::Tensor>&)> forward;
  int batch_dim = 0;
  int steps = 3;
};

struct Trained {
  std::vector<double> losses;
  std::vector<at::Tensor> input_gradients, parameters;
};

template <typename Holder>
Trained train(const Program<Holder>& program, Holder& model,
              const std::vector<at::Tensor>& inputs) {
  torch::optim::SGD optimizer(unique_parameters(*model),
                              torch::optim::SGDOptions(0.1).momentum(0.9));
  Trained result;
  for (int i = 0; i < program.steps; ++i) {
    optimizer.zero_grad();
    const at::Tensor loss = program.forward(model, inputs).square().mean();
    loss.backward();
    finish_grad_sync(*model);
    optimizer.step();
    result.losses.push_back(loss.item<double>());
  }
  model->eval();
  const torch::NoGradGuard no_grad;
  result.losses.push_back(program.forward(model, inputs).square().mean().template item<double>());
  const auto whole = [](const at::Tensor& t) {
    return is_dtensor(t) ? full_tensor(t.detach()) : t.detach();
  };
  for (const at::Tensor& x : inputs) {
    if (x.requires_grad()) result.input_gradients.push_back(whole(x.grad()));
  }
  for (const at::Tensor& p : model->parameters()) result.parameters.push_back(whole(p));
  return result;
}

template <typename Holder>
void trains_as_one_device(const Program<Holder>& program, const StylePlan& styles,
                          const std::vector<std::vector<MeshDim>>& meshes = kMeshes) {
  const auto leaf = [](const at::Tensor& t) {
    return t.is_floating_point() ? t.detach().clone().requires_grad_() : t;
  };
  Holder reference = program.make();
  fill(*reference);
  std::vector<at::Tensor> plain;
  for (const at::Tensor& x : program.inputs) plain.push_back(leaf(x));
  const Trained want = train(program, reference, plain);
  for (const std::vector<MeshDim>& dims : meshes) {
    on_mesh(dims, [&](const MeshPtr& mesh) {
      Holder model = program.make();
      fill(*model);
      parallelize_module(*model, mesh, styles, "tp", {.source = std::nullopt});
      std::vector<at::Tensor> inputs;
      for (const at::Tensor& x : program.inputs) {
        inputs.push_back(leaf(distribute_tensor(x, mesh, cut_rows(mesh, program.batch_dim),
                                                {.source = std::nullopt})));
      }
      const Trained got = train(program, model, inputs);
      for (size_t i = 0; i < want.losses.size(); ++i) {
        EXPECT_NEAR(got.losses[i], want.losses[i], 1e-10 * want.losses[i]) << "step " << i;
      }
      for (size_t i = 0; i < want.input_gradients.size(); ++i) {
        EXPECT_TRUE(at::allclose(got.input_gradients[i], want.input_gradients[i], 1e-8, 1e-10))
            << "input " << i << " on " << mesh->mesh().to_string();
      }
      for (size_t i = 0; i < want.parameters.size(); ++i) {
        EXPECT_TRUE(at::allclose(got.parameters[i], want.parameters[i], 1e-8, 1e-10))
            << reference->named_parameters().keys()[i] << " on " << mesh->mesh().to_string();
      }
      EXPECT_EQ(dispatch_counters(mesh).gathered_operators, 0);
      EXPECT_EQ(dispatch_counters(mesh).unsharded_weights, 0);
    });
  }
}

std::map<std::string, std::string> placed(const nn::Module& module, const DeviceMesh& mesh,
                                          const StylePlan& styles) {
  std::map<std::string, std::string> layouts;
  const ShardingPlan plan = sharding_plan(module, mesh, styles, "tp");
  for (const ResolvedTensor& tensor : resolve_plan(module, mesh, plan.parameter)) {
    layouts[tensor.fqns[0]] = tensor.layout.to_string();
  }
  for (const ForwardEntry& entry : plan.forward) {
    layouts[entry.pattern] = (*entry.placements.named())[0].second.to_string();
  }
  return layouts;
}

DeviceMesh mesh_of_size(int64_t ranks) {
  return *DeviceMesh::create({{"tp", ranks}});
}

// --- MLPs ----------------------------------------------------------------------------------------

nn::Linear linear(int64_t from, int64_t to, bool bias = true) {
  return nn::Linear(nn::LinearOptions(from, to).bias(bias));
}

Program<nn::Sequential> mlp_of(std::vector<int64_t> widths) {
  return {.make =
              [widths] {
                nn::Sequential model;
                for (size_t i = 0; i + 1 < widths.size(); ++i) {
                  if (i > 0) model->push_back(nn::GELU());
                  model->push_back(linear(widths[i], widths[i + 1]));
                }
                return model;
              },
          .inputs = {numbers({5, widths[0]})},
          .forward = [](nn::Sequential& m, const auto& in) { return m->forward(in[0]); }};
}

TEST(ParallelStyleTest, AnMlpOfAnyNumberOfLayers) {
  for (const auto& widths : std::vector<std::vector<int64_t>>{
           {4, 8, 4}, {5, 7, 3}, {5, 7, 3, 6, 2}, {5, 7, 3, 2}, {5, 3, 5}}) {
    trains_as_one_device(mlp_of(widths), {{"", PairwiseParallel()}});
    trains_as_one_device(mlp_of(widths), {{"", PairwiseParallel{.output = Shard(0)}}});
    trains_as_one_device(mlp_of(widths), {{"", SequenceParallel{.sequence_dim = 0}}});
  }
  EXPECT_EQ(placed(*mlp_of({5, 7, 3, 2}).make(), mesh_of_size(2), {{"", PairwiseParallel()}}),
            (std::map<std::string, std::string>{{"0.weight", "[S(0)]"},
                                                {"0.bias", "[S(0)]"},
                                                {"0.input", "R"},
                                                {"2.weight", "[S(1)]"},
                                                {"2.bias", "[R]"},
                                                {"2.output", "R"},
                                                {"4.weight", "[R]"},
                                                {"4.bias", "[R]"}}));
}

struct GatedImpl : nn::Module {
  // `order`: of registration.
  explicit GatedImpl(const std::vector<std::string>& order) {
    for (const std::string& name : order) {
      const bool down = name == "w2" || name == "down_proj";
      layers.emplace(name, register_module(name, down ? linear(6, 4) : linear(4, 6, false)));
    }
    names = order;
  }
  at::Tensor forward(const at::Tensor& x) {
    const bool llama = names[0] == "w1";
    nn::Linear &gate = layers.at(llama ? "w1" : "gate_proj"),
               &up = layers.at(llama ? "w3" : "up_proj"),
               &down = layers.at(llama ? "w2" : "down_proj");
    return down(at::silu(gate(x)) * up(x));
  }
  std::map<std::string, nn::Linear> layers;
  std::vector<std::string> names;
};
TORCH_MODULE(Gated);

struct PackedImpl : nn::Module {
  nn::Linear gate_up = register_module("gate_up", linear(4, 12, true));
  nn::Linear down = register_module("down", linear(6, 4));
  at::Tensor forward(const at::Tensor& x) {
    const std::vector<at::Tensor> both = gate_up(x).chunk(2, -1);
    return down(at::silu(both[0]) * both[1]);
  }
};
TORCH_MODULE(Packed);

TEST(ParallelStyleTest, GatedMlps) {
  for (const std::vector<std::string>& names :
       {std::vector<std::string>{"gate_proj", "up_proj", "down_proj"}, {"w1", "w2", "w3"}}) {
    const Program<Gated> program = {.make = [names] { return Gated(names); },
                                    .inputs = {numbers({3, 5, 4})},
                                    .forward = [](Gated& m, const auto& in) { return m(in[0]); }};
    trains_as_one_device(program, {{"", PairwiseParallel()}});
    trains_as_one_device(program, {{"", SequenceParallel()}});
    const auto layouts = placed(*program.make(), mesh_of_size(2), {{"", PairwiseParallel()}});
    EXPECT_EQ(layouts.at(names[0] + ".weight"), "[S(0)]");
    EXPECT_EQ(layouts.at(names[0] == "w1" ? "w3.weight" : "up_proj.weight"), "[S(0)]");
    EXPECT_EQ(layouts.at(names[0] == "w1" ? "w2.weight" : "down_proj.weight"), "[S(1)]");
  }
  const Program<Packed> packed = {.make = [] { return Packed(); },
                                  .inputs = {numbers({3, 5, 4})},
                                  .forward = [](Packed& m, const auto& in) { return m(in[0]); }};
  trains_as_one_device(packed, {{"", PairwiseParallel()}});
  EXPECT_EQ(
      placed(*packed.make(), mesh_of_size(2), {{"", PairwiseParallel()}}).at("gate_up.weight"),
      "[S(0, sf=2)]");
}

// --- attention -----------------------------------------------------------------------------------

enum class Form { kSeparate, kFused, kInterleaved };

struct AttentionImpl : nn::Module {
  AttentionImpl(Form form_in, int64_t dim, int64_t heads_in, int64_t shared_in, int64_t size_in)
      : form(form_in), heads(heads_in), shared(shared_in), size(size_in) {
    if (form == Form::kSeparate) {
      q = register_module("q_proj", linear(dim, heads * size));
      k = register_module("k_proj", linear(dim, shared * size));
      v = register_module("v_proj", linear(dim, shared * size));
    } else {
      q = register_module(form == Form::kFused ? "qkv" : "query_key_value",
                          linear(dim, (heads + 2 * shared) * size));
    }
    o = register_module("o_proj", linear(heads * size, dim));
  }
  at::Tensor forward(const at::Tensor& x, const at::Tensor& memory) {
    const int64_t batch = x.size(0), times = heads / shared;
    at::Tensor query, key, value;
    if (form == Form::kSeparate) {
      query = q(x).view({batch, -1, heads, size});
      key = k(memory).view({batch, -1, shared, size});
      value = v(memory).view({batch, -1, shared, size});
    } else if (form == Form::kFused) {
      const auto parts = q(x).split_with_sizes({heads * size, shared * size, shared * size}, -1);
      query = parts[0].view({batch, -1, heads, size});
      key = parts[1].view({batch, -1, shared, size});
      value = parts[2].view({batch, -1, shared, size});
    } else {
      const at::Tensor groups = q(x).view({batch, -1, shared, times + 2, size});
      query = groups.narrow(3, 0, times).reshape({batch, -1, heads, size});
      key = groups.select(3, times);
      value = groups.select(3, times + 1);
    }
    const auto repeated = [&](const at::Tensor& t) {
      const at::Tensor by_head = t.transpose(1, 2);
      if (times == 1) return by_head;
      return by_head.unsqueeze(2)
          .expand({batch, shared, times, t.size(1), size})
          .reshape({batch, heads, t.size(1), size});
    };
    const at::Tensor mixed =
        at::scaled_dot_product_attention(query.transpose(1, 2), repeated(key), repeated(value));
    return o(mixed.transpose(1, 2).reshape({batch, x.size(1), heads * size}));
  }
  const Form form;
  const int64_t heads, shared, size;
  nn::Linear q{nullptr}, k{nullptr}, v{nullptr}, o{nullptr};
};
TORCH_MODULE(Attention);

Program<Attention> attention_of(Form form, int64_t heads, int64_t shared, bool cross = false) {
  Program<Attention> program = {
      .make = [=] { return Attention(form, 6, heads, shared, 2); },
      .inputs = {numbers({2, 5, 6})},
      .forward = [](Attention& m, const auto& in) { return m(in[0], in.back()); }};
  if (cross) program.inputs.push_back(numbers({2, 3, 6}, 5));
  return program;
}

TEST(ParallelStyleTest, AttentionOfAnyKind) {
  const std::pair<int64_t, int64_t> heads[] = {{4, 4}, {3, 3}, {6, 3}, {4, 2}, {4, 1}, {1, 1}};
  for (const auto& [h, shared] : heads) {
    for (const bool cross : {false, true}) {
      const auto program = attention_of(Form::kSeparate, h, shared, cross);
      trains_as_one_device(program, {{"", PairwiseParallel()}});
      trains_as_one_device(program, {{"", PairwiseParallel{.heads = h}}});
      trains_as_one_device(program, {{"", SequenceParallel{.sequence_dim = 1, .heads = h}}});
    }
    for (const Form form : {Form::kFused, Form::kInterleaved}) {
      trains_as_one_device(attention_of(form, h, shared), {{"", PairwiseParallel()}});
      trains_as_one_device(attention_of(form, h, shared), {{"", PairwiseParallel{.heads = h}}});
    }
  }
}

TEST(ParallelStyleTest, HeadsStayWhole) {
  const auto of = [](Form form, int64_t heads, int64_t shared, int64_t ranks) {
    return placed(*attention_of(form, heads, shared).make(), mesh_of_size(ranks),
                  {{"", PairwiseParallel{.heads = heads}}});
  };
  auto even = of(Form::kSeparate, 4, 2, 2);
  EXPECT_EQ(even["q_proj.weight"], "[S(0)]");
  EXPECT_EQ(even["k_proj.bias"], "[S(0)]");
  EXPECT_EQ(even["o_proj.weight"], "[S(1)]");
  auto uneven = of(Form::kSeparate, 6, 3, 2);
  EXPECT_EQ(uneven["q_proj.weight"], "[S(0, sizes=[8,4])]");
  EXPECT_EQ(uneven["k_proj.weight"], "[S(0, sizes=[4,2])]");
  EXPECT_EQ(uneven["v_proj.bias"], "[S(0, sizes=[4,2])]");
  EXPECT_EQ(uneven["o_proj.weight"], "[S(1, sizes=[8,4])]");
  auto few = of(Form::kSeparate, 4, 2, 4);
  EXPECT_EQ(few["q_proj.weight"], "[S(0)]");
  EXPECT_EQ(few["k_proj.weight"], "[R]");
  EXPECT_EQ(few["v_proj.weight"], "[R]");
  EXPECT_EQ(of(Form::kFused, 4, 4, 2)["qkv.weight"], "[S(0, sf=3)]");
  EXPECT_EQ(of(Form::kFused, 4, 2, 2)["qkv.weight"], "[S(0, sf=4)]");
  EXPECT_EQ(of(Form::kInterleaved, 3, 3, 2)["query_key_value.weight"], "[S(0, sizes=[12,6])]");
}

// Whether that is what one pass sends.
using Counts = std::map<std::string, int>;
template <typename Holder>
::testing::AssertionResult sends(const Program<Holder>& program, const StylePlan& styles,
                                 int64_t ranks, const Counts& forward, const Counts& backward,
                                 const Placement& input = Replicate()) {
  Counts counts[2];
  std::string table;
  on_mesh({{"tp", ranks}}, [&](const MeshPtr& mesh) {
    Holder model = program.make();
    fill(*model);
    parallelize_module(*model, mesh, styles, "tp", {.source = std::nullopt});
    std::vector<at::Tensor> inputs;
    for (const at::Tensor& x : program.inputs) {
      // What a layer before gave.
      const at::Tensor leaf = distribute_tensor(x, mesh, {{"tp", input}}, {.source = std::nullopt});
      inputs.push_back(leaf.requires_grad_().tanh());
    }
    const CommTrace trace(mesh);
    program.forward(model, inputs).square().mean().backward();
    if (mesh->coordinate()[0] != 0) return;
    for (const CommEvent& event : trace.events()) {
      ++counts[event.phase == Phase::kBackward ? 1 : 0][event.collective];
    }
    table = trace.to_string();
  });
  if (counts[0] == forward && counts[1] == backward) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << table;
}

TEST(ParallelStyleTest, APairIsOneAllReduceForwardAndOneBackward) {
  const StylePlan pairwise = {{"", PairwiseParallel{.heads = 4}}};
  const auto is_one = [&](const auto& program, const StylePlan& styles, int64_t ranks) {
    const Counts one = {{"all_reduce", 1}};
    EXPECT_TRUE(sends(program, styles, ranks, one, one)) << ranks << " ranks";
  };
  is_one(mlp_of({5, 8, 3}), pairwise, 2);
  is_one(mlp_of({5, 7, 3}), pairwise, 3);
  is_one(attention_of(Form::kSeparate, 4, 4), pairwise, 2);
  is_one(attention_of(Form::kSeparate, 4, 4), pairwise, 3);  // 2 + 1 + 1 heads
  is_one(attention_of(Form::kSeparate, 4, 2), pairwise, 2);
  is_one(attention_of(Form::kSeparate, 6, 3), {{"", PairwiseParallel{.heads = 6}}}, 2);
  is_one(attention_of(Form::kFused, 4, 4), pairwise, 2);
  is_one(attention_of(Form::kInterleaved, 4, 4), pairwise, 2);
  is_one(attention_of(Form::kInterleaved, 4, 2), pairwise, 2);
  is_one(attention_of(Form::kInterleaved, 4, 4), pairwise, 3);
  // Fewer keys and values than ranks: forward nothing more; backward the gradients of the two, of
  // which each rank has what its queries gave.
  const Counts one = {{"all_reduce", 1}};
  EXPECT_TRUE(sends(attention_of(Form::kSeparate, 4, 1), pairwise, 2, one, {{"all_reduce", 3}}));
  EXPECT_TRUE(sends(attention_of(Form::kSeparate, 4, 2), pairwise, 4, one,
                    {{"all_reduce", 1}, {"all_gather", 2}}));
}

// Query, key and value share one gather, and one reduction of their gradients.
TEST(ParallelStyleTest, SequenceParallelIsAGatherAndAReduceScatter) {
  const auto is_one = [&](const auto& program, const StylePlan& styles, int64_t ranks) {
    const Counts pair = {{"all_gather", 1}, {"reduce_scatter", 1}};
    const Placement cut = Shard(std::get<SequenceParallel>(styles[0].style).sequence_dim);
    EXPECT_TRUE(sends(program, styles, ranks, pair, pair, cut)) << ranks << " ranks";
  };
  const StylePlan along_1 = {{"", SequenceParallel{.sequence_dim = 1, .heads = 4}}};
  is_one(mlp_of({5, 8, 3}), {{"", SequenceParallel{.sequence_dim = 0}}}, 2);
  is_one(attention_of(Form::kSeparate, 4, 4), along_1, 2);
  is_one(attention_of(Form::kSeparate, 4, 2), along_1, 2);
  is_one(attention_of(Form::kFused, 4, 4), along_1, 2);
  const Program<Gated> gated = {
      .make = [] { return Gated(std::vector<std::string>{"gate_proj", "up_proj", "down_proj"}); },
      .inputs = {numbers({3, 6, 4})},
      .forward = [](Gated& m, const auto& in) { return m(in[0]); }};
  is_one(gated, along_1, 2);
}

// --- LibTorch's own layers -----------------------------------------------------------------------

Program<nn::MultiheadAttention> multihead(const nn::MultiheadAttentionOptions& options,
                                          bool cross) {
  Program<nn::MultiheadAttention> program = {
      .make = [=] { return nn::MultiheadAttention(options); },
      .inputs = {numbers({5, 2, options.embed_dim()})},  // sequence, batch, features
      .forward =
          [](nn::MultiheadAttention& m, const auto& in) {
            return std::get<0>(m(in[0], in.size() > 1 ? in[1] : in[0], in.back(), at::Tensor(),
                                 /*need_weights=*/false));
          },
      .batch_dim = 1};
  if (cross) {
    program.inputs.push_back(numbers({3, 2, options.kdim()}, 5));
    program.inputs.push_back(numbers({3, 2, options.vdim()}, 7));
  }
  return program;
}

TEST(ParallelStyleTest, MultiheadAttention) {
  const auto options = [](int64_t dim, int64_t heads) {
    return nn::MultiheadAttentionOptions(dim, heads).kdim(dim).vdim(dim).dropout(0);
  };
  for (const StylePlan& styles :
       {StylePlan{{"", PairwiseParallel()}}, {{"", SequenceParallel{.sequence_dim = 0}}}}) {
    trains_as_one_device(multihead(options(8, 4), false), styles);
    trains_as_one_device(multihead(options(6, 3), false), styles);
    trains_as_one_device(multihead(options(8, 4).bias(false), false), styles);
    trains_as_one_device(multihead(options(8, 4), true), styles);
    trains_as_one_device(multihead(options(8, 4).kdim(5).vdim(5), true), styles);
    trains_as_one_device(multihead(options(6, 3).kdim(5).vdim(5), true), styles);
    trains_as_one_device(multihead(options(8, 4).add_bias_kv(true), false), styles);
  }
}

Program<nn::TransformerEncoderLayer> encoder(int64_t heads) {
  return {
      .make =
          [heads] {
            return nn::TransformerEncoderLayer(
                nn::TransformerEncoderLayerOptions(2 * heads, heads).dim_feedforward(9).dropout(0));
          },
      .inputs = {numbers({6, 2, 2 * heads})},
      .forward = [](nn::TransformerEncoderLayer& m, const auto& in) { return m(in[0]); },
      .batch_dim = 1};
}

Program<nn::TransformerDecoderLayer> decoder(int64_t heads) {
  return {
      .make =
          [heads] {
            return nn::TransformerDecoderLayer(
                nn::TransformerDecoderLayerOptions(2 * heads, heads).dim_feedforward(9).dropout(0));
          },
      .inputs = {numbers({6, 2, 2 * heads}), numbers({3, 2, 2 * heads}, 4)},
      .forward = [](nn::TransformerDecoderLayer& m,
                    const auto& in) { return m->forward(in[0], in[1]); },
      .batch_dim = 1};
}

TEST(ParallelStyleTest, TransformerLayers) {
  for (const StylePlan& styles :
       {StylePlan{{"", PairwiseParallel()}}, {{"", SequenceParallel{.sequence_dim = 0}}}}) {
    for (const int64_t heads : {4, 3}) {
      trains_as_one_device(encoder(heads), styles);
      trains_as_one_device(decoder(heads), styles);
    }
  }
  const Program<nn::Transformer> whole = {
      .make =
          [] {
            return nn::Transformer(
                nn::TransformerOptions(4, 2, 2, 1).dim_feedforward(5).dropout(0));
          },
      .inputs = {numbers({5, 2, 4}), numbers({3, 2, 4}, 1)},
      .forward = [](nn::Transformer& m, const auto& in) { return m(in[0], in[1]); },
      .batch_dim = 1};
  trains_as_one_device(whole, {{"", PairwiseParallel()}});
  trains_as_one_device(whole, {{"encoder", SequenceParallel{.sequence_dim = 0}},
                               {"decoder.layers.*", PairwiseParallel()}});
}

TEST(ParallelStyleTest, CollectivesOfTransformerLayers) {
  const StylePlan pairwise = {{"", PairwiseParallel()}};
  const Counts two = {{"all_reduce", 2}};
  EXPECT_TRUE(sends(encoder(4), pairwise, 2, two, two));
  // Self attention, cross attention, MLP; backward the second attention has two inputs.
  EXPECT_TRUE(sends(decoder(4), pairwise, 2, {{"all_reduce", 3}}, {{"all_reduce", 4}}));
  const StylePlan sequence = {{"", SequenceParallel{.sequence_dim = 0}}};
  // LibTorch's attention asks whether query, key and value are equal: of parts, two flags go around.
  EXPECT_TRUE(sends(encoder(4), sequence, 2,
                    {{"all_gather", 2}, {"reduce_scatter", 2}, {"all_reduce", 2}},
                    {{"all_gather", 2}, {"reduce_scatter", 2}}, Shard(0)));
}

// --- single layers, and several styles -----------------------------------------------------------

struct BlockImpl : nn::Module {
  nn::LayerNorm norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({6})));
  Attention attention = register_module(
      "attention", Attention(Form::kSeparate, int64_t{6}, int64_t{4}, int64_t{2}, int64_t{2}));
  nn::LayerNorm norm2 = register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({6})));
  nn::Sequential mlp =
      register_module("mlp", nn::Sequential(linear(6, 9), nn::GELU(), linear(9, 6)));
  nn::Dropout dropout = register_module("dropout", nn::Dropout(0.0));
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor n = norm(x);
    const at::Tensor y = x + dropout(attention(n, n));
    seen = is_dtensor(y) ? layout_of(y).to_string() : "";
    return y + mlp->forward(norm2(y));
  }
  std::string seen;
};
using Block = nn::ModuleHolder<Hooked<BlockImpl>>;

struct LanguageModelImpl : nn::Module {
  nn::Embedding embedding = register_module("embedding", nn::Embedding(11, 6));
  nn::Sequential blocks = register_module("blocks", nn::Sequential(Block(), Block()));
  nn::LayerNorm norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({6})));
  nn::Linear head = register_module("head", linear(6, 11, false));
  at::Tensor forward(const at::Tensor& tokens) {
    return head(norm(blocks->forward(embedding(tokens)))).log_softmax(-1);
  }
};
TORCH_MODULE(LanguageModel);

Program<LanguageModel> language_model() {
  return {.make = [] { return LanguageModel(); },
          .inputs = {(at::arange(2 * 7, at::kLong) * 5 % 11).view({2, 7})},
          .forward = [](LanguageModel& m, const auto& in) { return m(in[0]); }};
}

TEST(ParallelStyleTest, AMapOfStyles) {
  const StylePlan plans[] = {
      {{"blocks.*", PairwiseParallel{.heads = 4}},
       {"embedding", RowwiseParallel()},
       {"head", ColwiseParallel()}},
      {{"blocks.*", PairwiseParallel()},
       {"embedding", ColwiseParallel{.output = Replicate()}},
       {"head", ColwiseParallel{.output = Replicate()}}},
      {{"embedding", RowwiseParallel{.output = Shard(1)}},
       {"blocks.*", SequenceParallel{.sequence_dim = 1, .heads = 4}},
       {"norm", SequenceParallel()},
       {"head", ColwiseParallel()}},
      {{"blocks.*", SequenceParallel()},
       {"blocks.*.mlp", PairwiseParallel()},
       {"blocks.*.dropout", SequenceParallel()},
       {"head", RowwiseParallel()}},
      {{"re:blocks\\.[0-9]+\\.attention\\.[qkv]_proj", ColwiseParallel()},
       {"*.attention.o_proj", RowwiseParallel{.output = Shard(1)}},
       {"*.mlp.0", ColwiseParallel()},
       {"*.mlp.2", RowwiseParallel{.output = Shard(1)}},
       {"blocks.*", PrepareModuleInput{.inputs = {Shard(1)}}}},
      {{"blocks.?", PrepareModuleOutput{.outputs = {Shard(2)}}}, {"head", ColwiseParallel()}},
  };
  for (const StylePlan& styles : plans) trains_as_one_device(language_model(), styles);
}

TEST(ParallelStyleTest, ActivationsLieAlongTheSequence) {
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    LanguageModel model;
    fill(*model);
    parallelize_module(*model, mesh,
                       {{"embedding", RowwiseParallel{.output = Shard(1)}},
                        {"blocks.*", SequenceParallel{.sequence_dim = 1, .heads = 4}},
                        {"head", ColwiseParallel()}},
                       "tp", {.source = std::nullopt});
    const CommTrace trace(mesh);
    const at::Tensor tokens =
        distribute_tensor(language_model().inputs[0], mesh, {}, {.source = std::nullopt});
    const at::Tensor logits =
        model->head(model->norm(model->blocks->forward(model->embedding(tokens))));
    EXPECT_EQ(layout_of(logits).to_string(), "[S(2)]");
    for (const auto& block : model->blocks->children()) {
      EXPECT_EQ(dynamic_cast<const BlockImpl&>(*block).seen, "[S(1)]");
    }
    // A scatter behind the embedding, two pairs in each block, a gather before the head.
    EXPECT_COMMS(trace, {{"reduce_scatter", 1 + 4}, {"all_gather", 4 + 1}});
  });
}

TEST(ParallelStyleTest, InnerStylesCountForWhatIsInner) {
  const Program<nn::Sequential> program = mlp_of({4, 6, 4});
  const auto layouts =
      placed(*program.make(), mesh_of_size(2),
             {{"", PairwiseParallel()}, {"2", ColwiseParallel{.output = Shard(0)}}});
  EXPECT_EQ(layouts.at("0.weight"), "[S(0)]");
  EXPECT_EQ(layouts.at("2.weight"), "[S(0)]");
  EXPECT_EQ(layouts.at("2.bias"), "[S(0)]");
  EXPECT_EQ(layouts.at("2.output"), "S(0)");
  // The whole by one style, on the mesh's only dimension, whatever its name.
  const auto mlp = program.make();
  const DeviceMesh other = *DeviceMesh::create({{"x", 2}});
  EXPECT_EQ(sharding_plan(*mlp, other, PairwiseParallel()).parameter[0].placements,
            PlanPlacements({{"x", Shard(-1)}}));
}

// Of a weight that two layers share nobody can tell whose forward runs: only its placement is said.
TEST(ParallelStyleTest, TiedWeights) {
  struct TiedImpl : nn::Module {
    TiedImpl() {
      const at::Tensor weight = at::zeros({7, 4}, at::kDouble);
      for (const char* name : {"embedding", "head"}) {
        register_module(name, std::make_shared<nn::Module>())->register_parameter("weight", weight);
      }
    }
    at::Tensor forward(const at::Tensor& tokens) {
      const at::Tensor w = parameters()[0];
      return at::linear(at::embedding(w, tokens).tanh(), w);
    }
  };
  using Tied = nn::ModuleHolder<TiedImpl>;
  const Program<Tied> program = {
      .make = [] { return Tied(); },
      .inputs = {at::arange(7, at::kLong).view({1, 7})},
      .forward = [](Tied& m, const auto& in) { return m->forward(in[0]); }};
  trains_as_one_device(program, {{"embedding", RowwiseParallel()}, {"head", ColwiseParallel()}},
                       {{{"tp", 2}}, {{"tp", 3}}});
}

// The head is a product with the embedding's weight, and what the style says of the embedding is not said of it.
TEST(ParallelStyleTest, AHeadOfTheEmbeddingsWeightIsNoForwardOfIt) {
  struct TiedImpl : nn::Module {
    nn::Embedding table = register_module("table", nn::Embedding(12, 4));
    TiedImpl() { to(at::kDouble); }
    at::Tensor forward(const at::Tensor& tokens) {
      return at::linear(table->forward(tokens).tanh(), table->weight);
    }
  };
  using Tied = nn::ModuleHolder<TiedImpl>;
  const Program<Tied> program = {
      .make = [] { return Tied(); },
      .inputs = {at::arange(8, at::kLong).view({2, 4})},
      .forward = [](Tied& m, const auto& in) { return m->forward(in[0]); }};
  for (const RowwiseParallel& style : {RowwiseParallel(), RowwiseParallel{.output = Shard(1)}}) {
    trains_as_one_device(program, {{"table", style}}, {{{"tp", 2}}, {{"tp", 3}}});
  }
  on_mesh({{"tp", 2}}, [&](const MeshPtr& mesh) {
    Tied model;
    parallelize_module(*model, mesh, {{"table", RowwiseParallel()}});
    const CommTrace trace(mesh);
    const at::Tensor logits =
        model->forward(distribute_tensor(program.inputs[0], mesh, {}, {.source = std::nullopt}));
    EXPECT_EQ(layout_of(logits).to_string(), "[S(2)]");
    EXPECT_COMMS(trace, {{"all_reduce", 1}});  // of what was looked up
  });
  // And the other way round.
  on_mesh({{"tp", 2}}, [&](const MeshPtr& mesh) {
    nn::Linear head(nn::LinearOptions(4, 12).bias(false));
    parallelize_module(*nn::Sequential(head), mesh,
                       {{"0", ColwiseParallel{.output = Replicate()}}});
    const at::Tensor tokens =
        distribute_tensor(program.inputs[0], mesh, {}, {.source = std::nullopt});
    const CommTrace trace(mesh);
    const at::Tensor looked_up = at::embedding(head->weight, tokens);
    EXPECT_EQ(trace.events().size(), 0);
    EXPECT_EQ(layout_of(head(looked_up)).to_string(), "[R]");
  });
}

// --- what is wrong -------------------------------------------------------------------------------

struct ZooImpl : nn::Module {
  Block block = register_module("block", Block());
  nn::Conv2d convolution = register_module("convolution", nn::Conv2d(2, 2, 1));
  nn::LayerNorm norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({6})));
  nn::Linear head = register_module("head", linear(6, 6));
  nn::GELU gelu = register_module("gelu", nn::GELU());
};

void refuses(const StylePlan& styles, absl::StatusCode code, const std::vector<std::string>& why,
             const std::vector<MeshDim>& dims = {{"dp", 2}, {"tp", 2}},
             std::string_view tp_mesh_dim = "") {
  on_mesh(dims, [&](const MeshPtr& mesh) {
    ZooImpl model;
    try {
      parallelize_module(model, mesh, styles, tp_mesh_dim);
      ADD_FAILURE() << "no error; wanted: " << why[0];
    } catch (const Error& error) {
      EXPECT_EQ(error.status().code(), code) << error.status();
      for (const std::string& part : why) {
        EXPECT_THAT(error.what_without_backtrace(), HasSubstr(part));
      }
    }
    for (const at::Tensor& p : model.parameters()) EXPECT_FALSE(is_dtensor(p));
  });
}

TEST(ParallelStyleTest, ErrorsComeBeforeAnythingChanges) {
  const auto invalid = absl::StatusCode::kInvalidArgument, missing = absl::StatusCode::kNotFound;
  refuses({{"head", ColwiseParallel()}}, missing, {"tp_mesh_dim: ", "has no dimension \"pp\""},
          {{"dp", 2}, {"tp", 2}}, "pp");
  refuses({{"head", ColwiseParallel()}}, missing, {"has no dimension \"tp\""},
          {{"dp", 2}, {"x", 2}});
  refuses({{"norm", ColwiseParallel()}}, invalid,
          {"style 1, 'norm': ColwiseParallel does not know 'norm' (torch::nn::LayerNormImpl); it "
           "knows linear layers"});
  refuses({{"head", ColwiseParallel()}, {"convolution", RowwiseParallel()}}, invalid,
          {"style 2, 'convolution': RowwiseParallel does not know 'convolution'"});
  refuses({{"head", PairwiseParallel()}}, invalid,
          {"PairwiseParallel does not know 'head'", "it knows torch::nn::MultiheadAttention"});
  refuses({{"gelu", SequenceParallel()}}, invalid,
          {"SequenceParallel does not know 'gelu' (torch::nn::GELUImpl); it knows norms"});
  refuses({{"haed", ColwiseParallel()}}, missing,
          {"style 1, 'haed' matches no module; did you mean 'head'"});
  refuses({{"block.attention.x_proj", ColwiseParallel()}}, missing,
          {"did you mean 'block.attention.k_proj'"});
  refuses({{"he{ad", ColwiseParallel()}}, invalid, {"style 1, 'he{ad': ", "has a '{' without"});
  refuses({{"hea?", ColwiseParallel()}, {"?ead", RowwiseParallel()}}, invalid,
          {"'head' (torch::nn::LinearImpl) is given two styles by style 1, 'hea?', and style 2"});
  refuses({{"hea?", ColwiseParallel()}, {"head", RowwiseParallel()}}, invalid,
          {"style 1, 'hea?', decides nothing: more specific ones match all that it does, 'head'"});
  refuses({{"block", PairwiseParallel{.heads = 3}}}, invalid,
          {"heads = 3, but 'block.attention.q_proj'", "has 8 rows"});
  refuses({{"block", PairwiseParallel{.heads = -4}}}, invalid, {"heads = -4; wanted 0"});
  refuses({{"block", PairwiseParallel{.heads = 1}}}, invalid,
          {"heads = 1, but 'block.attention.k_proj'"}, {{"tp", 2}, {"x", 1}});
  refuses({{"convolution", PrepareModuleInput{.inputs = {std::nullopt, Shard(0)}}},
           {"gelu", PrepareModuleOutput{.outputs = {Shard(0)}}}},
          absl::StatusCode::kFailedPrecondition, {"the forward of 'gelu'", "cannot be met"});
  refuses({{"head", ColwiseParallel{.input = Shard(0)}},
           {"block", PrepareModuleInput{.by_name = {{"x", Shard(0)}}}}},
          invalid, {"of a Hooked module's forward the names of arguments are not known"});
}

// Layers without rows or columns: an error where heads are said, numbers where they are not.
TEST(ParallelStyleTest, LayersOfNoSize) {
  struct NoHeads : nn::Module {
    NoHeads(int64_t rows, int64_t columns) {
      for (const char* name : {"q_proj", "k_proj", "v_proj"}) {
        register_module(name, of(4, rows));
      }
      register_module("o_proj", of(columns, 4));
    }
    static nn::Linear of(int64_t in, int64_t out) {  // whose initialiser wants an input
      nn::Linear layer(1, out);
      layer->weight.set_data(at::ones({out, in}));
      return layer;
    }
  };
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    const auto refused = [&](int64_t rows, int64_t columns, const char* why) {
      NoHeads model(rows, columns);
      try {
        parallelize_module(model, mesh, PairwiseParallel{.heads = 2});
        ADD_FAILURE() << "no error";
      } catch (const Error& error) {
        EXPECT_THAT(error.what_without_backtrace(), HasSubstr(why));
      }
    };
    refused(0, 4, "'q_proj' (torch::nn::LinearImpl) has 0 rows");
    refused(4, 0, "'o_proj' (torch::nn::LinearImpl) has 0 columns");
    nn::Sequential mlp(NoHeads::of(4, 0), nn::GELU(), NoHeads::of(0, 4));
    parallelize_module(*mlp, mesh, PairwiseParallel());
    const at::Tensor y = full_tensor(mlp->forward(at::ones({2, 4})));
    EXPECT_TRUE(y.equal(full_tensor(mlp->parameters().back()).expand({2, 4})));
  });
}

// Nobody waits for a rank that has refused.
TEST(ParallelStyleTest, OneRanksMistakeReachesTheOthers) {
  on_mesh({{"tp", 3}}, [](const MeshPtr& mesh) {
    auto model = mlp_of({4, 6, 4}).make();
    const bool mistaken = mesh->coordinate()[0] == 1;
    try {
      parallelize_module(*model, mesh, {{mistaken ? "haed" : "*", PairwiseParallel()}});
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_THAT(error.what_without_backtrace(),
                  HasSubstr(mistaken ? "matches no module" : "it was refused on other ranks"));
    }
    for (const at::Tensor& p : model->parameters()) EXPECT_FALSE(is_dtensor(p));
  });
}

TEST(ParallelStyleTest, ParallelizingTwiceIsAnError) {
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    auto model = mlp_of({4, 6, 4}).make();
    parallelize_module(*model, mesh, PairwiseParallel());
    try {
      parallelize_module(*model, mesh, PairwiseParallel());
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.status().code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_THAT(std::string(error.status().message()), HasSubstr("is a DTensor already"));
    }
    EXPECT_EQ(layout_of(model->parameters()[0]).to_string(), "[S(0)]");
  });
}

}  // namespace
}  // namespace shardweave
