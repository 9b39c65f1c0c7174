// Complex numbers, lower precision under autocast, tensors of inference mode: values and gradients
// as on one rank. Quantised and sparse tensors have no layout: an error on every rank says so.
#include <functional>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "c10/core/InferenceMode.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/autocast.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/dtensor/testing/programs.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/activation.h"
#include "torch/nn/modules/batchnorm.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/conv.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"

namespace shardweave {
namespace {

namespace nn = torch::nn;
using testing::check_program;
using ::testing::HasSubstr;
using testing::on_mesh;
using testing::Trial;
using testing::values;

at::Tensor complex_values(at::IntArrayRef sizes, int seed = 0) {
  return at::complex(values(sizes, seed), values(sizes, seed + 10));
}

// --- complex -------------------------------------------------------------------------------------

TEST(TensorKindsTest, Complex) {
  check_program([](Trial& run) {
    const at::Tensor x = run.leaf(complex_values({5, 6})),
                     w = run.parameter(complex_values({6, 3}, 1), 1),
                     b = run.parameter(complex_values({3}, 2), 2), r = run.leaf(values({5, 3}, 3));
    const at::Tensor y = at::addmm(b, x, w) * at::polar(r.abs() + 1, r);
    run.result("y", y);
    at::Tensor z = y.conj().transpose(0, 1).matmul(y);
    z = z + at::view_as_complex(at::view_as_real(z).mul(2)) / 3 + y.sgn().mean(0);
    run.result("z", z);
    (z.abs().sum() + at::real(y).square().sum() + at::imag(y).sin().sum() + y.angle().mean() +
     at::real(y * y.conj()).prod(1).sum())
        .backward();
    run.result("x.grad", x.grad());
    run.result("w.grad", w.grad());
    run.result("b.grad", b.grad());
    run.result("r.grad", r.grad());
  });
}

TEST(TensorKindsTest, ComplexWritesFourierTransformsAndFactors) {
  check_program([](Trial& run) {
    const at::Tensor leaf = run.leaf(values({5, 6}));
    const at::Tensor spectrum = at::fft_rfft(leaf, std::nullopt, 1);
    run.result("spectrum", spectrum);
    const at::Tensor x = spectrum * c10::complex<double>(0.5, 2);
    at::real(x).select(0, 3).mul_(2);  // writes through views of the parts
    at::imag(x).narrow(1, 1, 2).add_(leaf.narrow(1, 0, 2));
    at::view_as_real(x).select(2, 0).narrow(0, 0, 2).neg_();
    run.result("x", x);
    const at::Tensor back = at::fft_irfft2(x, at::IntArrayRef{5, 6});
    run.result("back", back);
    const at::Tensor gram = at::matmul(x.mH(), x) + at::eye(4, at::kComplexDouble) * 9;
    const at::Tensor factor = at::linalg_cholesky(gram);
    run.result("factor", factor);
    (back.square().sum() + factor.abs().sum()).backward();
    run.result("gradient", leaf.grad());
  });
}

// --- autocast ------------------------------------------------------------------------------------

// Convolution, norm, linear layer, attention, loss; forward under autocast and backward outside.
// Parameters stay in single precision, and so do their gradients.
TEST(TensorKindsTest, Autocast) {
  check_program(
      [](Trial& run) {
        nn::Conv1d lines(nn::Conv1dOptions(3, 4, 3).padding(1));
        nn::BatchNorm1d norm(4);
        nn::MultiheadAttention attention(nn::MultiheadAttentionOptions(4, 2));
        nn::Linear head(4, 3);
        const std::vector<nn::Module*> modules = {&*lines, &*norm, &*attention, &*head};
        for (nn::Module* m : modules) run.distribute(*m, at::kFloat);
        for (int step = 0; step < 2; ++step) {
          const at::Tensor x = run.leaf(values({5, 3, 7}, step).to(at::kFloat));
          at::Tensor loss;
          {
            const AutocastScope autocast(at::kBFloat16);
            const at::Tensor z = norm(lines(x)).permute({2, 0, 1});
            const at::Tensor y = head(std::get<0>(attention(z, z, z)));
            run.result("y", y);
            loss = at::mse_loss(y.softmax(-1), at::zeros_like(y)) * 100;
          }
          run.result("loss", loss);
          loss.backward();
          run.result("x.grad", x.grad());
        }
        for (nn::Module* m : modules) run.gradients(*m);
      },
      {.tolerance = 0.04});
}

// What autocast casts is gone with its scope: weights that have been written since are cast anew. (How
// often it casts within one does not show here: ranks that are threads keep nothing, see MeshContext.)
TEST(TensorKindsTest, AutocastSeesWhatTheOptimizerWrites) {
  check_program(
      [](Trial& run) {
        nn::Linear layer(6, 3);
        run.distribute(*layer, at::kFloat);
        for (int step = 0; step < 3; ++step) {
          const at::Tensor x = run.data(values({5, 6}, step).to(at::kFloat));
          at::Tensor loss;
          {
            const AutocastScope autocast(at::kBFloat16);
            loss = (layer(x) + layer(x * 2)).square().sum();
          }
          loss.backward();
          finish_grad_sync(*layer);
          const at::NoGradGuard no_grad;
          for (at::Tensor& p : layer->parameters()) p.sub_(p.grad(), 0.01).grad().zero_();
          run.parameters(*layer);
        }
      },
      {.tolerance = 0.05});
}

// --- inference mode ------------------------------------------------------------------------------

TEST(TensorKindsTest, InferenceMode) {
  check_program([](Trial& run) {
    nn::Sequential model(nn::Conv1d(nn::Conv1dOptions(3, 4, 3).padding(1)), nn::BatchNorm1d(4),
                         nn::ReLU(), nn::Flatten(), nn::Linear(28, 3));
    run.distribute(*model);
    at::Tensor made;
    {
      const c10::InferenceMode guard;
      made = run.data(values({5, 3, 7}));
      run.result("in training", model->forward(made));
      model->eval();
      run.result("in eval", model->forward(made));
      made.narrow(1, 0, 2).mul_(2).select(0, 3).add_(1);
      run.result("written", made);
    }
    model->train();
    run.buffers(*model);
    EXPECT_TRUE(made.is_inference());
    EXPECT_THROW(model->forward(made), c10::Error);  // would be saved for backward
    const at::Tensor y = model->forward(made.clone());
    run.result("y", y);
    y.square().sum().backward();
    run.gradients(*model);
  });
}

// --- what has no layout --------------------------------------------------------------------------

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

at::Tensor quantized(const at::Tensor& x) {
  return at::quantize_per_tensor(x.to(at::kFloat), 0.1, 10, at::kQUInt8);
}

TEST(TensorKindsTest, QuantizedAndSparseTensorsAreErrors) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor plain = values({4, 6}).to(at::kFloat);
    const std::vector<at::Tensor> kKinds = {plain.to_sparse(), plain.to_sparse_csr(),
                                            quantized(plain), plain.to_mkldnn()};
    const at::Tensor x = distribute_tensor(plain, mesh, Placements{Shard(0)});
    for (const at::Tensor& kind : kKinds) {
      SCOPED_TRACE(kind.toString());
      const Placements cut{Shard(0)};
      EXPECT_THAT(error_of([&] { distribute_tensor(kind, mesh, cut); }), HasSubstr("dense"));
      EXPECT_THAT(error_of([&] { from_local(kind, mesh, cut); }), HasSubstr("dense"));
      EXPECT_THAT(error_of([&] { at::mul(x, kind); }), HasSubstr("dense"));
      EXPECT_THAT(error_of([&] { at::add(kind, x); }), HasSubstr("dense"));
      EXPECT_THAT(error_of([&] { at::mm(kind, x.t()); }), HasSubstr("dense"));
      nn::Module module;
      module.register_buffer("kind", kind);
      EXPECT_THAT(error_of([&] { distribute_module(module, mesh, {}); }),
                  ::testing::AllOf(HasSubstr("kind"), HasSubstr("dense")));
    }
    // And what would make one.
    const std::function<void()> kMakers[] = {
        [&] { x.to_sparse(); },
        [&] { x.to_sparse_csr(); },
        [&] { quantized(x); },
        [&] { at::quantize_per_channel(x, at::ones({4}), at::zeros({4}), 0, at::kQInt8); },
        [&] { x.to_mkldnn(); },
        [&] {
          at::sparse_coo_tensor(
              distribute_tensor(at::ones({2, 3}, at::kLong), mesh, Placements{Replicate()}),
              distribute_tensor(at::ones({3}), mesh, Placements{Shard(0)}), {4, 4});
        },
        [&] {
          nn::Embedding table(nn::EmbeddingOptions(7, 5).sparse(true));
          distribute_module(*table, mesh, {{"weight", {{"x", Shard(0)}}}});
          table(distribute_tensor(at::ones({3}, at::kLong), mesh, Placements{Shard(0)}))
              .sum()
              .backward();
        },
    };
    for (size_t i = 0; i < std::size(kMakers); ++i) {
      EXPECT_THAT(error_of(kMakers[i]), HasSubstr("DTensor")) << i;
    }
    // Nothing is left behind.
    EXPECT_TRUE(at::equal(full_tensor(x + 1), plain + 1));
  });
}

}  // namespace
}  // namespace shardweave
