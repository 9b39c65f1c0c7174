// The layers of torch::nn that others are built of, unchanged, trained: values and gradients as on
// one rank. (Whole models: models_test.cc.)
#include <tuple>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/testing/programs.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/activation.h"
#include "torch/nn/modules/batchnorm.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/conv.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/modules/normalization.h"
#include "torch/nn/modules/pooling.h"
#include "torch/nn/modules/rnn.h"
#include "torch/nn/modules/transformer.h"
#include "torch/nn/modules/transformerlayer.h"
#include "torch/nn/utils/rnn.h"

namespace shardweave {
namespace {

namespace nn = torch::nn;
using testing::check_program;
using testing::Trial;
using testing::values;

// --- attention -----------------------------------------------------------------------------------

TEST(LayersTest, MultiheadAttention) {
  check_program([](Trial& run) {
    nn::MultiheadAttention attention(nn::MultiheadAttentionOptions(6, 3));
    run.distribute(*attention);
    const at::Tensor x = run.leaf(values({5, 3, 6}));  // sequence, batch, features
    const auto [y, weights] = attention(x, x, x);
    run.result("y", y);
    run.result("weights", weights);
    (y.square().sum() + weights.square().sum()).backward();
    run.result("x.grad", x.grad());
    run.gradients(*attention);
  });
}

// Keys and values of other sizes have weights of their own; masks, and a bias that is one more key.
TEST(LayersTest, MultiheadAttentionToAnotherSequence) {
  check_program([](Trial& run) {
    nn::MultiheadAttention attention(
        nn::MultiheadAttentionOptions(6, 2).kdim(5).vdim(5).add_bias_kv(true).add_zero_attn(true));
    run.distribute(*attention);
    const at::Tensor query = run.leaf(values({3, 5, 6})), key = run.leaf(values({4, 5, 5}, 1)),
                     value = run.leaf(values({4, 5, 5}, 2));
    const at::Tensor padding = run.replicated(values({5, 4}, 3) > 0.7);
    const at::Tensor mask = run.replicated(values({3, 4}, 4));
    const auto [y, weights] = attention(query, key, value, padding, true, mask);
    run.result("y", y);
    run.result("weights", weights);
    y.square().sum().backward();
    run.result("query.grad", query.grad());
    run.result("key.grad", key.grad());
    run.result("value.grad", value.grad());
    run.gradients(*attention);
  });
}

TEST(LayersTest, TransformerEncoderLayer) {
  check_program(
      [](Trial& run) {
        nn::TransformerEncoderLayer layer(
            nn::TransformerEncoderLayerOptions(6, 3).dim_feedforward(9).dropout(0.3));
        run.distribute(*layer);
        const at::Tensor x = run.leaf(values({5, 3, 6}));
        const at::Tensor mask = at::triu(at::full({5, 5}, -1e9, at::kDouble), 1);
        const at::Tensor y = layer(x, mask.to(x.device()));
        run.result("y", y);
        y.square().sum().backward();
        run.result("x.grad", x.grad());
        run.gradients(*layer);
        layer->eval();
        const at::NoGradGuard no_grad;
        run.result("in eval", layer(x));
      },
      {.random = true});
}

// In eval, what Python's layer runs in one operator.
TEST(LayersTest, TheFusedEncoderLayerOfEval) {
  const auto program = [](Trial& run) {
    nn::TransformerEncoderLayer layer(nn::TransformerEncoderLayerOptions(6, 2).dim_feedforward(9));
    run.distribute(*layer);
    layer->eval();
    const at::NoGradGuard no_grad;
    const at::Tensor x = run.data(values({3, 5, 6}));  // batch, sequence, features
    const auto& attention = layer->self_attn;
    run.result("y", at::_transformer_encoder_layer_fwd(
                        x, 6, 2, attention->in_proj_weight, attention->in_proj_bias,
                        attention->out_proj->weight, attention->out_proj->bias, false, false, 1e-5,
                        layer->norm1->weight, layer->norm1->bias, layer->norm2->weight,
                        layer->norm2->bias, layer->linear1->weight, layer->linear1->bias,
                        layer->linear2->weight, layer->linear2->bias));
    run.result("in parts", layer(x.transpose(0, 1)).transpose(0, 1));
    run.result("attention", std::get<0>(at::_native_multi_head_attention(
                                x, x, x, 6, 2, attention->in_proj_weight, attention->in_proj_bias,
                                attention->out_proj->weight, attention->out_proj->bias)));
  };
  check_program(program, {.gathers = true});
}

TEST(LayersTest, Transformer) {
  check_program([](Trial& run) {
    nn::Transformer model(nn::TransformerOptions(4, 2, 1, 1).dim_feedforward(5).dropout(0));
    run.distribute(*model);
    const at::Tensor source = run.leaf(values({5, 3, 4})), target = run.leaf(values({3, 3, 4}, 1));
    const at::Tensor mask = at::triu(at::full({3, 3}, -1e9, at::kDouble), 1);
    const at::Tensor y = model(source, target, at::Tensor(), mask.to(source.device()));
    run.result("y", y);
    y.square().sum().backward();
    run.result("source.grad", source.grad());
    run.result("target.grad", target.grad());
    run.gradients(*model);
  });
}

// --- convolution and batch norm ------------------------------------------------------------------

TEST(LayersTest, ConvolutionAndBatchNorm) {
  check_program([](Trial& run) {
    nn::Sequential model(nn::Conv2d(nn::Conv2dOptions(3, 6, 3).padding(1).bias(false)),
                         nn::BatchNorm2d(6), nn::ReLU(), nn::MaxPool2d(2),
                         nn::Conv2d(nn::Conv2dOptions(6, 5, 2).stride(2).groups(1)),
                         nn::BatchNorm2d(nn::BatchNorm2dOptions(5).momentum(std::nullopt)),
                         nn::Flatten(), nn::Linear(10, 3));
    run.distribute(*model);
    for (int step = 0; step < 2; ++step) {
      const at::Tensor x = run.leaf(values({5, 3, 5, 9}, step));
      const at::Tensor y = model->forward(x);
      run.result("y", y);
      y.square().sum().backward();
      run.result("x.grad", x.grad());
    }
    run.gradients(*model);
    run.buffers(*model);
    model->eval();
    const at::Tensor x = run.leaf(values({5, 3, 5, 9}, 9));
    const at::Tensor y = model->forward(x);
    run.result("in eval", y);
    y.square().sum().backward();
    run.result("x.grad in eval", x.grad());
  });
}

TEST(LayersTest, ConvolutionsOfOneAndThreeDimensionsAndTheirTransposes) {
  check_program([](Trial& run) {
    nn::Conv1d lines(nn::Conv1dOptions(4, 6, 3).dilation(2).padding(2).groups(2));
    nn::BatchNorm1d norm(6);
    nn::ConvTranspose1d back(nn::ConvTranspose1dOptions(6, 3, 3).stride(2).output_padding(1));
    nn::Conv3d volumes(nn::Conv3dOptions(2, 3, 2));
    nn::BatchNorm3d norm3(3);
    nn::GroupNorm groups(3, 6);
    nn::Sequential model;
    for (auto m : std::initializer_list<std::shared_ptr<nn::Module>>{
             lines.ptr(), norm.ptr(), back.ptr(), volumes.ptr(), norm3.ptr(), groups.ptr()}) {
      model->register_module(std::to_string(model->children().size()), m);
    }
    run.distribute(*model);
    const at::Tensor x = run.leaf(values({5, 4, 7}));
    const at::Tensor y = back(groups(at::relu(norm(lines(x)))));
    const at::Tensor v = run.leaf(values({3, 2, 3, 4, 3}, 1));
    const at::Tensor w = norm3(volumes(v));
    run.result("y", y);
    run.result("w", w);
    (y.square().sum() + (w.sigmoid() * w).sum()).backward();
    run.result("x.grad", x.grad());
    run.result("v.grad", v.grad());
    run.gradients(*model);
    run.buffers(*model);
  });
}

// --- recurrent layers ----------------------------------------------------------------------------

// LibTorch runs an LSTM in single precision by oneDNN, others by its own operators.
template <typename Layer, typename Options>
void check_recurrent(const Options& options, bool own_state, at::ScalarType dtype = at::kDouble) {
  const double tolerance = dtype == at::kDouble ? 1e-9 : dtype == at::kFloat ? 1e-4 : 5e-2;
  const auto program = [&](Trial& run) {
    Layer layer(options);
    run.distribute(*layer, dtype);
    const at::Tensor x = run.leaf(values({5, 3, 4}).to(dtype));
    const bool two = options.bidirectional();
    const int64_t states = options.num_layers() * (two ? 2 : 1);
    const int64_t batch = options.batch_first() ? 5 : 3;
    const at::Tensor h = run.leaf(values({states, batch, options.hidden_size()}, 1).to(dtype)),
                     c = run.leaf(values({states, batch, options.hidden_size()}, 2).to(dtype));
    at::Tensor loss;
    if constexpr (std::is_same_v<Layer, nn::LSTM>) {
      const auto [y, state] = own_state ? layer(x, std::make_tuple(h, c)) : layer(x);
      run.result("y", y);
      run.result("h", std::get<0>(state));
      run.result("c", std::get<1>(state));
      loss = y.square().sum() + std::get<1>(state).square().sum();
    } else {
      const auto [y, state] = own_state ? layer(x, h) : layer(x);
      run.result("y", y);
      run.result("h", state);
      loss = y.square().sum() + state.square().sum();
    }
    loss.backward();
    run.result("x.grad", x.grad());
    run.result("h.grad", h.grad());
    run.gradients(*layer);
    const at::NoGradGuard no_grad;
    run.result("without gradients", std::get<0>(layer(x)));
  };
  check_program(program, {.tolerance = tolerance});
}

TEST(LayersTest, Lstm) {
  check_recurrent<nn::LSTM>(nn::LSTMOptions(4, 5), true);
}
TEST(LayersTest, LstmInSinglePrecision) {
  check_recurrent<nn::LSTM>(nn::LSTMOptions(4, 5), true, at::kFloat);
  check_recurrent<nn::LSTM>(nn::LSTMOptions(4, 5).bias(false), false, at::kFloat);
  check_recurrent<nn::LSTM>(
      nn::LSTMOptions(4, 3).num_layers(2).bidirectional(true).batch_first(true), false, at::kFloat);
}
TEST(LayersTest, LstmInHalfPrecision) {
  check_recurrent<nn::LSTM>(nn::LSTMOptions(4, 5), true, at::kBFloat16);
  check_recurrent<nn::LSTM>(
      nn::LSTMOptions(4, 3).num_layers(2).bidirectional(true).batch_first(true), false,
      at::kBFloat16);
}
TEST(LayersTest, LstmOfTwoLayersBothWays) {
  check_recurrent<nn::LSTM>(
      nn::LSTMOptions(4, 3).num_layers(2).bidirectional(true).batch_first(true), false);
}
TEST(LayersTest, LstmWithAProjection) {
  check_program([](Trial& run) {
    nn::LSTM layer(nn::LSTMOptions(4, 5).proj_size(3));
    run.distribute(*layer);
    const at::Tensor x = run.leaf(values({5, 3, 4}));
    const auto [y, state] = layer(x);
    run.result("y", y);
    run.result("c", std::get<1>(state));
    y.square().sum().backward();
    run.result("x.grad", x.grad());
    run.gradients(*layer);
  });
}
TEST(LayersTest, Gru) {
  check_recurrent<nn::GRU>(nn::GRUOptions(4, 5), true);
}
TEST(LayersTest, GruOfTwoLayersBothWays) {
  check_recurrent<nn::GRU>(nn::GRUOptions(4, 3).num_layers(2).bidirectional(true).batch_first(true),
                           false);
}

// Sequences of different lengths.
TEST(LayersTest, PackedSequences) {
  check_program([](Trial& run) {
    nn::LSTM lstm(nn::LSTMOptions(4, 5));
    run.distribute(*lstm);
    const at::Tensor x = run.leaf(values({5, 3, 4}));
    const auto packed = nn::utils::rnn::pack_padded_sequence(x, at::tensor({5, 4, 2}));
    const auto [y, state] = lstm->forward_with_packed_input(packed);
    run.result("y", y.data());
    run.result("sequences of a step", y.batch_sizes());
    run.result("h", std::get<0>(state));
    y.data().square().sum().backward();
    run.result("x.grad", x.grad());
    run.gradients(*lstm);
  });
}

TEST(LayersTest, Cells) {
  check_program([](Trial& run) {
    nn::LSTMCell lstm(4, 5);
    nn::GRUCell gru(5, 3);
    nn::RNNCell rnn(3, 5);
    for (nn::Module* m : std::initializer_list<nn::Module*>{&*lstm, &*gru, &*rnn})
      run.distribute(*m);
    const at::Tensor x = run.leaf(values({3, 4}));
    auto [h, c] = lstm(x);
    std::tie(h, c) = lstm(x, std::make_tuple(h, c));
    const at::Tensor y = rnn(gru(h) * 2);
    run.result("y", y);
    (y.square().sum() + c.sum()).backward();
    run.result("x.grad", x.grad());
    for (nn::Module* m : std::initializer_list<nn::Module*>{&*lstm, &*gru, &*rnn})
      run.gradients(*m);
  });
}

// --- embeddings ----------------------------------------------------------------------------------

at::Tensor indices(at::IntArrayRef sizes, int64_t below) {
  return (at::arange(c10::multiply_integers(sizes)) * 5 + 2).remainder(below).view(sizes);
}

TEST(LayersTest, EmbeddingWithPadding) {
  for (const int64_t padding : {0, 2, -1}) {
    for (const bool by_frequency : {false, true}) {
      check_program([&](Trial& run) {
        nn::Embedding table(
            nn::EmbeddingOptions(7, 5).padding_idx(padding).scale_grad_by_freq(by_frequency));
        run.distribute(*table);
        const at::Tensor x = run.data(indices({5, 3}, 7));
        const at::Tensor y = table(x);
        run.result("y", y);
        y.pow(3).sum().backward();
        run.gradients(*table);
      });
    }
  }
}

// Rows longer than max_norm are scaled in place.
TEST(LayersTest, EmbeddingWithMaxNorm) {
  check_program([](Trial& run) {
    nn::Embedding table(nn::EmbeddingOptions(7, 5).max_norm(0.6));
    run.distribute(*table);
    const at::Tensor y = table(run.data(indices({5, 3}, 6)));
    run.result("y", y);
    y.pow(3).sum().backward();
    run.gradients(*table);
    run.parameters(*table);
  });
}

TEST(LayersTest, EmbeddingBag) {
  const std::pair<torch::nn::EmbeddingBagMode, bool> kModes[] = {
      {torch::kSum, false}, {torch::kMean, false}, {torch::kMax, false}, {torch::kSum, true}};
  for (const auto& [mode, weighted] : kModes) {
    for (const int64_t padding : {-8, 3}) {
      check_program([&, mode = mode, weighted = weighted](Trial& run) {
        auto options = nn::EmbeddingBagOptions(7, 5).mode(mode);
        if (padding >= -7) options.padding_idx(padding);
        nn::EmbeddingBag table(options);
        run.distribute(*table);
        const at::Tensor weights = weighted ? run.leaf(values({5, 3}, 4)) : at::Tensor();
        at::Tensor y =
            table(run.data(indices({5, 3}, 7)), at::Tensor(), weights);  // a bag in each row
        run.result("rows", y);
        y.pow(3).sum().backward();
        if (weighted) run.result("weights.grad", weights.grad());
        run.gradients(*table);
        table->zero_grad();
        const at::Tensor flat = weighted ? run.leaf(values({11}, 5)) : at::Tensor();
        y = table(run.data(indices({11}, 7)), run.replicated(at::tensor({0, 4, 4, 9})), flat);
        run.result("bags", y);  // one of them is empty
        y.pow(3).sum().backward();
        if (weighted) run.result("flat.grad", flat.grad());
        run.gradients(*table);
      });
    }
  }
}

}  // namespace
}  // namespace shardweave
