// What users of LibTorch do with tensors and modules, done with DTensors.
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/autocast.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "torch/csrc/autograd/autograd.h"
#include "torch/csrc/autograd/variable.h"
#include "torch/nn/modules/activation.h"
#include "torch/nn/modules/batchnorm.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/modules/normalization.h"
#include "torch/nn/utils/convert_parameters.h"
#include "torch/optim/adam.h"
#include "torch/serialize.h"

namespace shardweave {
namespace {

using testing::all_layouts;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using testing::on_mesh;
using testing::scattered;
using testing::try_on_mesh;

at::Tensor numbers(at::IntArrayRef sizes) {
  return at::arange(c10::multiply_integers(sizes), at::kFloat).reshape(sizes) / 8 - 1;
}

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

// --- shallow copies ------------------------------------------------------------------------------

TEST(LibTorchHabitsTest, AShallowCopyHasItsOwnShapeAndTheSameData) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    for (const Placements& placements : all_layouts(1, 2, false)) {
      at::Tensor x = distribute_tensor(numbers({4, 6}), mesh, placements);
      for (const at::Tensor& copy : {x.variable_data(), x.tensor_data(), x.detach()}) {
        at::Tensor turned = copy;
        if (!turned.is_view()) turned.t_();
        EXPECT_TRUE(at::equal(full_tensor(x), numbers({4, 6}))) << to_string(placements);
        EXPECT_EQ(describe(x), describe(distribute_tensor(numbers({4, 6}), mesh, placements)));
        x.sum().item<float>();
      }
      at::Tensor copy = x.variable_data();
      copy.t_();
      EXPECT_TRUE(at::equal(full_tensor(copy), numbers({4, 6}).t()));
      copy.add_(1);
      EXPECT_TRUE(at::equal(full_tensor(x), numbers({4, 6}) + 1));
    }
  });
}

// select(0, 3) lies on one rank, so its view is a copy: it learns of writes through a shallow copy.
TEST(LibTorchHabitsTest, ViewsSeeWhatIsWrittenThroughAShallowCopy) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    at::Tensor x = distribute_tensor(numbers({4, 6}), mesh, Placements{Shard(0)});
    at::Tensor copy = x.variable_data();
    const at::Tensor row = x.select(0, 3);
    copy.add_(1);
    EXPECT_TRUE(at::equal(full_tensor(row), numbers({4, 6}).select(0, 3) + 1));
  });
}

// As through any shallow copy: the row is a copy of another rank's elements.
TEST(LibTorchHabitsTest, ViewsSeeWhatIsWrittenThroughATensorThatWasSet) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor x = distribute_tensor(numbers({4, 6}), mesh, Placements{Shard(0)});
    const at::Tensor row = x.select(0, 3);
    at::Tensor other = distribute_tensor(at::zeros({4, 6}), mesh, Placements{Shard(0)});
    other.set_(x);
    other.add_(1);
    EXPECT_TRUE(at::equal(full_tensor(row), numbers({4, 6}).select(0, 3) + 1));
    at::Tensor of_row = distribute_tensor(at::zeros({6}), mesh, Placements{Replicate()});
    of_row.set_(row);
    of_row.mul_(2);
    EXPECT_TRUE(at::equal(full_tensor(x).select(0, 3), (numbers({4, 6}).select(0, 3) + 1) * 2));
    at::Tensor plain = at::zeros({4, 6});
    EXPECT_THAT(error_of([&] { plain.set_(x); }), HasSubstr("full_tensor()"));
    EXPECT_THAT(error_of([&] { other.set_(at::zeros({4, 5})); }), HasSubstr("[4, 5]"));
    EXPECT_THAT(error_of([&] { other.set_(at::zeros({4, 6}, at::kDouble)); }),
                HasSubstr("Double [4, 6]"));
  });
}

// --- views in place ------------------------------------------------------------------------------

TEST(LibTorchHabitsTest, ShapesChangeInPlaceWithViewsAround) {
  const std::function<void(at::Tensor&)> kChanges[] = {
      [](at::Tensor& x) { x.squeeze_(0); },
      [](at::Tensor& x) { x.squeeze_(); },
      [](at::Tensor& x) { x.squeeze_(at::IntArrayRef{0}); },
      [](at::Tensor& x) { x.unsqueeze_(1); },
      [](at::Tensor& x) { x.transpose_(0, 1); },
      [](at::Tensor& x) { x.t_(); },
      [](at::Tensor& x) { x.swapdims_(0, 1); },
      [](at::Tensor& x) { x.as_strided_({6}, {1}); },
      [](at::Tensor& x) { x.as_strided_({1, 6}, {6, 1}); },
      [](at::Tensor& x) { x.as_strided_({2, 3}, {1, 2}); },
  };
  for (const std::vector<MeshDim>& dims : {std::vector<MeshDim>{{"x", 2}}, {{"x", 3}}}) {
    on_mesh(dims, [&](const MeshPtr& mesh) {
      for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{1, 6}, {6, 1}}) {
        for (const Placements& placements : all_layouts(1, 2, false)) {
          for (size_t c = 0; c < std::size(kChanges); ++c) {
            for (const bool of_view : {false, true}) {
              at::Tensor plain = numbers(sizes);
              at::Tensor sharded = distribute_tensor(plain, mesh, placements);
              const at::Tensor plain_view = at::alias(plain), view = at::alias(sharded);
              at::Tensor& changed = of_view ? const_cast<at::Tensor&>(view) : sharded;
              at::Tensor& wanted = of_view ? const_cast<at::Tensor&>(plain_view) : plain;
              kChanges[c](wanted);
              kChanges[c](changed);
              EXPECT_TRUE(at::equal(full_tensor(changed), wanted))
                  << c << " " << to_string(placements);
              EXPECT_TRUE(
                  at::equal(full_tensor(of_view ? sharded : view), of_view ? plain : plain_view))
                  << c << " " << to_string(placements);
              // Both are views of the same numbers still.
              changed.mul_(2), wanted.mul_(2);
              EXPECT_TRUE(at::equal(full_tensor(sharded), plain)) << c << to_string(placements);
              EXPECT_TRUE(at::equal(full_tensor(view), plain_view)) << c << to_string(placements);
              const at::Tensor& other = of_view ? sharded : view;
              other.add_(1), (of_view ? plain : plain_view).add_(1);
              EXPECT_TRUE(at::equal(full_tensor(sharded), plain)) << c << to_string(placements);
              EXPECT_TRUE(at::equal(full_tensor(view), plain_view)) << c << to_string(placements);
            }
          }
        }
      }
    });
  }
}

// Operators that are made of others resize their out= past the dispatcher.
TEST(LibTorchHabitsTest, ResultsThatLibTorchResizes) {
  using Call = void (*)(at::Tensor& out, const at::Tensor& x);
  const std::pair<const char*, Call> calls[] = {
      {"linalg_norm", [](at::Tensor& out, const at::Tensor& x) { at::linalg_norm_out(out, x); }},
      {"nuclear_norm", [](at::Tensor& out, const at::Tensor& x) { at::nuclear_norm_out(out, x); }},
      {"matrix_norm",
       [](at::Tensor& out, const at::Tensor& x) { at::linalg_matrix_norm_out(out, x, "fro"); }},
      {"cond", [](at::Tensor& out, const at::Tensor& x) { at::linalg_cond_out(out, x); }},
      {"rank",
       [](at::Tensor& out, const at::Tensor& x) {
         out = out.to(at::kLong);
         at::linalg_matrix_rank_out(out, x);
       }},
      {"pinv", [](at::Tensor& out, const at::Tensor& x) { at::linalg_pinv_out(out, x); }},
      {"kron", [](at::Tensor& out, const at::Tensor& x) { at::kron_out(out, x, x); }},
      {"inner", [](at::Tensor& out, const at::Tensor& x) { at::inner_out(out, x, x); }},
      {"tensordot",
       [](at::Tensor& out, const at::Tensor& x) { at::tensordot_out(out, x, x, {0}, {0}); }},
      {"mm", [](at::Tensor& out, const at::Tensor& x) { at::mm_out(out, x, x.t()); }},
      {"_foreach_norm",
       [](at::Tensor& out, const at::Tensor& x) { at::_foreach_norm_out({out}, {x}); }},
      {"_foreach_max",
       [](at::Tensor& out, const at::Tensor& x) { at::_foreach_max_out({out}, {x}); }},
  };
  const at::Tensor whole = numbers({4, 6}).sin().to(at::kDouble);
  for (const auto& [name, call] : calls) {
    at::Tensor want = at::empty({0}, whole.options());
    call(want, whole);
    for (const std::vector<MeshDim>& dims :
         {std::vector<MeshDim>{{"x", 1}}, {{"x", 2}}, {{"x", 2}, {"y", 2}}}) {
      for (const Placement& of_x : {Replicate(), Shard(0), Shard(1), Partial()}) {
        for (const std::vector<int64_t>& sizes :
             {std::vector<int64_t>{0}, {4, 6}, want.sizes().vec()}) {
          const absl::Status status = try_on_mesh(dims, [&](const MeshPtr& mesh) {
            Placements placements(dims.size());
            placements[0] = of_x;
            const at::Tensor x = scattered(whole, mesh, placements);
            for (const Placement& of_out : {Replicate(), Shard(0)}) {
              if (sizes.empty() && of_out.is_shard()) continue;
              placements[0] = of_out;
              at::Tensor out = empty(sizes, mesh, placements, at::kDouble);
              call(out, x);
              EXPECT_EQ(out.sizes(), want.sizes());
              const Dims part = local_shape(layout_of(out), mesh->mesh().shape(),
                                            mesh->coordinate(), want.sizes());
              ASSERT_EQ(to_local(out).sizes(), at::IntArrayRef(part.data(), part.size()));
              EXPECT_TRUE(at::allclose(full_tensor(out), want)) << layout_of(out);
              EXPECT_TRUE(at::allclose(full_tensor(out + 1), want + 1));
            }
          });
          EXPECT_TRUE(status.ok()) << name << " of " << of_x << ": " << status;
        }
      }
    }
  }
}

TEST(LibTorchHabitsTest, LossesIntoAResultThatIsThere) {
  using T = at::Tensor;
  struct Loss {
    const char* name;
    T (*loss)(const T& x, const T& y, int64_t reduction);
    void (*into)(T& out, const T& x, const T& y, int64_t reduction);
  };
  const Loss losses[] = {
      {"mse", [](const T& x, const T& y, int64_t r) { return at::mse_loss(x, y, r); },
       [](T& out, const T& x, const T& y, int64_t r) { at::mse_loss_out(out, x, y, r); }},
      {"smooth_l1", [](const T& x, const T& y, int64_t r) { return at::smooth_l1_loss(x, y, r); },
       [](T& out, const T& x, const T& y, int64_t r) { at::smooth_l1_loss_out(out, x, y, r); }},
      {"huber", [](const T& x, const T& y, int64_t r) { return at::huber_loss(x, y, r); },
       [](T& out, const T& x, const T& y, int64_t r) { at::huber_loss_out(out, x, y, r); }},
      {"soft_margin",
       [](const T& x, const T& y, int64_t r) { return at::soft_margin_loss(x, y, r); },
       [](T& out, const T& x, const T& y, int64_t r) { at::soft_margin_loss_out(out, x, y, r); }},
      {"binary_cross_entropy",
       [](const T& x, const T& y, int64_t r) { return at::binary_cross_entropy(x, y, {}, r); },
       [](T& out, const T& x, const T& y, int64_t r) {
         at::binary_cross_entropy_out(out, x, y, {}, r);
       }},
  };
  const T x0 = numbers({4, 6}).to(at::kDouble).sigmoid(), y0 = x0.flip(0);
  on_mesh({{"x", 2}}, [&](const MeshPtr& mesh) {
    for (const Loss& l : losses) {
      for (int64_t reduction : {at::Reduction::None, at::Reduction::Mean, at::Reduction::Sum}) {
        const T want = l.loss(x0, y0, reduction);
        for (const Placement& of_x : {Replicate(), Shard(0), Shard(1)}) {
          const T x = distribute_tensor(x0, mesh, Placements{of_x});
          const T y = distribute_tensor(y0, mesh, Placements{of_x});
          for (const std::vector<int64_t>& sizes :
               {std::vector<int64_t>{0}, {4, 6}, want.sizes().vec()}) {
            T out = empty(sizes, mesh, Placements{Replicate()}, at::kDouble);
            l.into(out, x, y, reduction);
            EXPECT_EQ(out.sizes(), want.sizes());
            EXPECT_TRUE(at::allclose(full_tensor(out), want))
                << l.name << " " << reduction << " of " << of_x << " into "
                << at::IntArrayRef(sizes) << "\n"
                << full_tensor(out) << "\nwanted\n"
                << want;
          }
        }
      }
    }
  });
}

TEST(LibTorchHabitsTest, AnAliasOfAnotherNumberOfElementsIsRefused) {
  for (const std::vector<MeshDim>& dims : {std::vector<MeshDim>{{"x", 2}}, {{"x", 2}, {"y", 2}}}) {
    on_mesh(dims, [](const MeshPtr& mesh) {
      const at::Tensor x = distribute_tensor(numbers({4, 6}), mesh, {{"x", Shard(0)}});
      EXPECT_THAT(error_of([&] { at::_reshape_alias(x, {5, 6}, {6, 1}); }),
                  HasSubstr("shape [5, 6] has 30 elements, the input, of shape [4, 6], 24"));
    });
  }
}

TEST(LibTorchHabitsTest, AResultThatIsResizedInInferenceModeIsAsOtherTensors) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor whole = numbers({4, 6});
    at::Tensor out = empty({0}, mesh, Placements{Replicate()});
    {
      const c10::InferenceMode inference;
      at::linalg_norm_out(out, distribute_tensor(whole, mesh, Placements{Shard(0)}));
    }
    EXPECT_FALSE(to_local(out).is_inference());
    to_local(out).mul_(2);
    EXPECT_TRUE(at::allclose(full_tensor(out), at::linalg_norm(whole) * 2));
  });
}

// Of parts that lie otherwise than the global strides say.
TEST(LibTorchHabitsTest, StridesInPlaceOfATransposedTensor) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    for (const Placements& placements : all_layouts(1, 2, false)) {
      for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{4, 4}, {16}, {2, 3}}) {
        const std::vector<int64_t> strides =
            sizes.size() == 1 ? std::vector<int64_t>{1} : std::vector<int64_t>{4, 1};
        at::Tensor plain = numbers({4, 4}).t();
        at::Tensor x = distribute_tensor(numbers({4, 4}), mesh, placements).t();
        plain.as_strided_(sizes, strides);
        x.as_strided_(sizes, strides);
        EXPECT_TRUE(at::equal(full_tensor(x), plain)) << to_string(placements);
      }
    }
  });
}

// --- inference mode ------------------------------------------------------------------------------

TEST(LibTorchHabitsTest, ViewsInInferenceMode) {
  const std::function<at::Tensor(const at::Tensor&)> kViews[] = {
      [](const at::Tensor& x) { return x.view({2, 12}); },
      [](const at::Tensor& x) { return x.reshape({24}); },
      [](const at::Tensor& x) { return x.t(); },
      [](const at::Tensor& x) { return x.transpose(0, 1); },
      [](const at::Tensor& x) { return x.permute({1, 0}); },
      [](const at::Tensor& x) { return x.select(0, 1); },
      [](const at::Tensor& x) { return x.slice(0, 1, 3); },
      [](const at::Tensor& x) { return x.narrow(1, 2, 3); },
      [](const at::Tensor& x) { return x.unsqueeze(1); },
      [](const at::Tensor& x) { return x.unsqueeze(1).squeeze(1); },
      [](const at::Tensor& x) { return x.expand({3, 4, 6}); },
      [](const at::Tensor& x) { return x.diagonal(); },
      [](const at::Tensor& x) { return x.unfold(1, 2, 2); },
      [](const at::Tensor& x) { return x.detach(); },
      [](const at::Tensor& x) { return at::alias(x); },
      [](const at::Tensor& x) { return x.split(2, 0)[1]; },
      [](const at::Tensor& x) { return x.chunk(2, 1)[1]; },
      [](const at::Tensor& x) { return x.unbind(0)[3]; },
      [](const at::Tensor& x) { return at::view_as_complex(x.view({4, 3, 2})).abs(); },
      [](const at::Tensor& x) { return x.as_strided({2, 3}, {6, 1}); },
      [](const at::Tensor& x) { return x.view(at::kInt); },
      [](const at::Tensor& x) { return x.movedim(0, 1); },
      [](const at::Tensor& x) { return x.flatten(); },
      [](const at::Tensor& x) { return at::real(x); },
  };
  on_mesh({{"x", 2}}, [&](const MeshPtr& mesh) {
    for (const Placements& placements : all_layouts(1, 2, false)) {
      const at::Tensor x = distribute_tensor(numbers({4, 6}), mesh, placements);
      for (size_t v = 0; v < std::size(kViews); ++v) {
        for (const bool made_inside : {false, true}) {
          const c10::InferenceMode guard;
          const at::Tensor plain = numbers({4, 6});
          const at::Tensor base = made_inside ? distribute_tensor(plain, mesh, placements) : x;
          const at::Tensor view = kViews[v](base);
          EXPECT_TRUE(at::equal(full_tensor(view), kViews[v](plain))) << v;
          EXPECT_TRUE(at::allclose(full_tensor(view + 1), kViews[v](plain) + 1)) << v;
        }
      }
    }
  });
}

TEST(LibTorchHabitsTest, AModuleInInferenceMode) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    torch::nn::Sequential model(torch::nn::Linear(6, 8), torch::nn::ReLU(),
                                torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})),
                                torch::nn::Linear(8, 3));
    for (at::Tensor& p : model->parameters()) p.data().copy_(numbers(p.sizes()) / 10);
    const at::Tensor wanted = model->forward(numbers({2, 5, 6}));
    distribute_module(*model, mesh, {{"0.*", {{"x", Shard(0)}}}, {"3.weight", {{"x", Shard(1)}}}});
    const at::Tensor x = distribute_tensor(numbers({2, 5, 6}), mesh, Placements{Replicate()});
    at::Tensor y;
    {
      const c10::InferenceMode guard;
      y = model->forward(x);
      EXPECT_TRUE(at::allclose(full_tensor(y), wanted, 1e-4, 1e-5));
    }
    // And trains on afterwards.
    model->forward(x).sum().backward();
    EXPECT_TRUE(model->parameters()[0].grad().defined());
  });
}

// --- autocast, dtypes, copies of modules ---------------------------------------------------------

TEST(LibTorchHabitsTest, ParametersUnderAutocast) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    torch::nn::Linear a(8, 8), b(8, 8);
    for (const auto& m : {a, b}) m->weight.data().copy_(numbers({8, 8}) / 4);
    at::Tensor wanted, wanted_grad;
    {
      const AutocastScope autocast(at::kBFloat16);
      wanted = at::mm(a->weight, b->weight);
      wanted.sum().backward();
      wanted_grad = a->weight.grad().clone();
      a->zero_grad();
    }
    distribute_module(*a, mesh, {{"weight", {{"x", Shard(0)}}}});
    distribute_module(*b, mesh, {{"weight", {{"x", Shard(1)}}}});
    const AutocastScope autocast(at::kBFloat16);
    const at::Tensor y = at::mm(a->weight, b->weight);
    EXPECT_EQ(y.scalar_type(), at::kBFloat16);
    EXPECT_TRUE(at::allclose(full_tensor(y), wanted, 1e-2, 1e-2));
    y.sum().backward();
    finish_grad_sync(*a);
    EXPECT_TRUE(at::allclose(full_tensor(a->weight.grad()), wanted_grad, 1e-2, 1e-2));
  });
}

TEST(LibTorchHabitsTest, AModuleChangesItsDtype) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    torch::nn::Sequential model(torch::nn::Linear(6, 4),
                                torch::nn::BatchNorm1d(torch::nn::BatchNorm1dOptions(4)));
    for (at::Tensor& p : model->parameters()) p.data().copy_(numbers(p.sizes()));
    distribute_module(*model, mesh, {{"0.*", {{"x", Shard(0)}}}});
    model->to(at::kDouble);
    EXPECT_EQ(model->parameters()[0].scalar_type(), at::kDouble);
    EXPECT_EQ(layout_of(model->parameters()[0]), Layout({Shard(0)}));
    EXPECT_TRUE(
        at::equal(full_tensor(model->parameters()[0].detach()), numbers({4, 6}).to(at::kDouble)));
    const at::Tensor x =
        distribute_tensor(numbers({5, 6}).to(at::kDouble), mesh, Placements{Replicate()});
    model->forward(x).square().sum().backward();
    EXPECT_EQ(model->parameters()[0].grad().scalar_type(), at::kDouble);
  });
}

TEST(LibTorchHabitsTest, AVectorOfParametersAndBack) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    torch::nn::Linear model(6, 4);
    for (at::Tensor& p : model->parameters()) p.data().copy_(numbers(p.sizes()));
    distribute_module(*model, mesh, {{"*", {{"x", Shard(0)}}}});
    const at::Tensor vector = torch::nn::utils::parameters_to_vector(model->parameters());
    EXPECT_TRUE(at::equal(full_tensor(vector.detach()), at::cat({numbers({24}), numbers({4})})));
    torch::nn::utils::vector_to_parameters(vector * 2, model->parameters());
    EXPECT_TRUE(at::equal(full_tensor(model->weight.detach()), 2 * numbers({4, 6})));
    EXPECT_TRUE(at::equal(full_tensor(model->bias.detach()), 2 * numbers({4})));
    const at::Tensor x = distribute_tensor(numbers({5, 6}), mesh, Placements{Replicate()});
    EXPECT_TRUE(at::allclose(full_tensor(model->forward(x).detach()),
                             at::linear(numbers({5, 6}), 2 * numbers({4, 6}), 2 * numbers({4}))));
  });
}

TEST(LibTorchHabitsTest, ACopyOfAModule) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    auto model = std::make_shared<torch::nn::LinearImpl>(6, 4);
    for (at::Tensor& p : model->parameters()) p.data().copy_(numbers(p.sizes()));
    distribute_module(*model, mesh, {{"*", {{"x", Shard(0)}}}});
    const auto copy = std::dynamic_pointer_cast<torch::nn::LinearImpl>(model->clone());
    ASSERT_TRUE(is_dtensor(copy->weight));
    EXPECT_EQ(layout_of(copy->weight), Layout({Shard(0)}));
    {
      const at::NoGradGuard guard;
      copy->weight.mul_(3);
    }
    EXPECT_TRUE(at::equal(full_tensor(model->weight.detach()), numbers({4, 6})));
    EXPECT_TRUE(at::equal(full_tensor(copy->weight.detach()), 3 * numbers({4, 6})));
    const at::Tensor x = distribute_tensor(numbers({5, 6}), mesh, Placements{Replicate()});
    copy->forward(x).sum().backward();
    EXPECT_TRUE(copy->weight.grad().defined());
    EXPECT_FALSE(model->weight.grad().defined());
  });
}

// --- what needs memory ---------------------------------------------------------------------------

TEST(LibTorchHabitsTest, WhatNeedsMemorySaysThatThisIsADTensor) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    torch::nn::Linear model(6, 4);
    distribute_module(*model, mesh, {});
    const at::Tensor made = distribute_tensor(numbers({4, 6}), mesh, Placements{Shard(0)});
    for (const at::Tensor& x :
         {made, made * 2, model->weight.detach(), at::Tensor(model->weight)}) {
      const std::function<void()> kNeeds[] = {
          [&] { x.data_ptr<float>(); },
          [&] { x.const_data_ptr<float>(); },
          [&] { x.accessor<float, 2>(); },
          [&] { (void)x.storage(); },
          [&] {
            std::ostringstream out;
            out << x;
          },
          [&] {
            std::ostringstream out;
            torch::save(x, out);
          },
      };
      for (size_t i = 0; i < std::size(kNeeds); ++i) {
        EXPECT_THAT(error_of(kNeeds[i]),
                    ::testing::AllOf(HasSubstr("DTensor"), HasSubstr("local part"),
                                     HasSubstr("full tensor")))
            << i;
      }
      EXPECT_THAT(error_of(kNeeds[4]), HasSubstr("values_to_string()"));  // printing
    }
  });
}

TEST(LibTorchHabitsTest, AModuleIsSavedThroughFullTensors) {  // as the README says
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    torch::nn::BatchNorm1d model(5), whole(5), loaded(5);
    distribute_module(*model, mesh, {{"weight", {{"x", Shard(0)}}}});
    {
      const torch::NoGradGuard no_grad;
      model->weight.mul_(3);
      model->running_var.add_(1);
      auto parameters = whole->named_parameters(), buffers = whole->named_buffers();
      for (const auto& item : model->named_parameters())
        parameters[item.key()].copy_(full_tensor(item.value()));
      for (const auto& item : model->named_buffers())
        buffers[item.key()].copy_(full_tensor(item.value()));
    }
    std::stringstream file;
    torch::save(whole, file);
    torch::load(loaded, file);
    EXPECT_TRUE(at::equal(loaded->weight, at::full({5}, 3.0)));
    EXPECT_TRUE(at::equal(loaded->running_var, at::full({5}, 2.0)));
    file.seekg(0);
    torch::nn::BatchNorm1d again(5);
    distribute_module(*again, mesh, {{"weight", {{"x", Shard(0)}}}});
    torch::load(again, file);
    EXPECT_TRUE(at::equal(full_tensor(again->weight), at::full({5}, 3.0)));
  });
}

TEST(LibTorchHabitsTest, ValuesArePrinted) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor plain = at::arange(6, at::kFloat).reshape({3, 2});
    const std::string elements = " 0  1\n 2  3\n 4  5\n[ CPUFloatType{3,2} ]";
    EXPECT_EQ(values_to_string(plain), elements);
    for (const Placements& placements : all_layouts(1, 2, true)) {
      const at::Tensor x = testing::scattered(plain, mesh, placements).requires_grad_();
      EXPECT_EQ(values_to_string(x), describe(x) + "\n" + elements);
      EXPECT_EQ(values_to_string(x * 1), describe(x * 1) + "\n" + elements);
    }
    const at::Tensor number = distribute_tensor(at::complex(at::ones({1}), at::full({1}, 2.0)),
                                                mesh, Placements{Shard(0)});
    EXPECT_THAT(values_to_string(number), HasSubstr("real and its imaginary part:\n 1  2\n"));
  });
}

TEST(LibTorchHabitsTest, StateFromBeforeTheDistributionIsAnErrorThatSaysSo) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    torch::nn::Linear model(6, 4);  // random: another one on each rank
    const auto loss = [&](const at::Tensor& x) { return model->forward(x).square().sum(); };
    torch::optim::Adam optimizer(model->parameters(), 0.1);
    loss(numbers({3, 6})).backward();
    optimizer.step();
    distribute_module(*model, mesh, {{"weight", {{"x", Shard(0)}}}});
    optimizer.zero_grad();
    loss(distribute_tensor(numbers({4, 6}), mesh, Placements{Replicate()})).backward();
    finish_grad_sync(*model);
    EXPECT_THAT(error_of([&] { optimizer.step(); }),
                ::testing::AllOf(HasSubstr("argument 'self' is a plain tensor among DTensors"),
                                 HasSubstr("the state of an optimizer")));
  });
}

// A gradient that is given to backward(), or kept by a hook, stays what it was: LibTorch adds to .grad
// in place.
TEST(LibTorchHabitsTest, AGradientOfALocalPartBelongsToWhoGaveIt) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    at::Tensor leaf = distribute_tensor(at::zeros({4, 3}), mesh, {Shard(0)}).requires_grad_();
    const at::Tensor given = at::ones({2, 3});
    for (int times = 1; times <= 3; ++times) {
      to_local(leaf).backward(given);
      EXPECT_TRUE(at::equal(to_local(leaf.grad()), at::full({2, 3}, times)));
      EXPECT_TRUE(at::equal(given, at::ones({2, 3})));
    }
    leaf.mutable_grad() = at::Tensor();
    at::Tensor kept;
    const at::Tensor part = to_local(leaf);
    part.register_hook([&](const at::Tensor& grad) { kept = grad; });
    part.backward(at::ones({2, 3}));
    leaf.grad().mul_(5);
    EXPECT_TRUE(at::equal(kept, at::ones({2, 3})));
  });
}

// LibTorch factors a matrix or its transpose, and asks the matrix again in backward: what the parts of it
// were gathered for before, or how they lie, is not to be seen in gradients.
TEST(LibTorchHabitsTest, GradientsOfFactorsAreTheSameHoweverPartsLie) {
  using Function = std::function<at::Tensor(const at::Tensor&)>;
  const at::Tensor one =
      at::cos(at::arange(16, at::kDouble) * 1.7).reshape({4, 4}) + 2 * at::eye(4, at::kDouble);
  const at::Tensor many = at::sin(at::arange(6 * 9, at::kDouble) * 1.3).reshape({6, 3, 3}) +
                          3 * at::eye(3, at::kDouble);
  const Function twice = [](const at::Tensor& x) { return at::matmul(x, x.mT()); };
  const std::vector<std::pair<const char*, Function>> before = {
      {"nothing", [](const at::Tensor& x) { return x; }},
      {"a product", twice},
      {"of the transpose", [](const at::Tensor& x) { return at::matmul(x.mT(), x); }}};
  const std::vector<std::pair<const char*, Function>> forms = {
      {"as it is", [](const at::Tensor& x) { return x; }},
      {"transposed", [](const at::Tensor& x) { return x.mT(); }},
      {"copied", [](const at::Tensor& x) { return x.mT().contiguous(); }},
      {"copied back", [](const at::Tensor& x) { return x.mT().contiguous().mT(); }},
      {"every other", [](const at::Tensor& x) { return x.dim() == 3 ? x.slice(0, 0, 6, 2) : x; }}};
  const std::vector<std::pair<const char*, Function>> functions = {
      {"det", [](const at::Tensor& x) { return at::linalg_det(x); }},
      {"slogdet", [](const at::Tensor& x) { return std::get<1>(at::linalg_slogdet(x)); }},
      {"logdet", [](const at::Tensor& x) { return at::logdet(x.matmul(x.mT())); }},
      {"solve",
       [](const at::Tensor& x) { return at::linalg_solve(x, x.select(-1, 0).unsqueeze(-1) + 1); }},
      {"solve from the right", [](const at::Tensor& x) {
         return at::linalg_solve(x, x.select(-2, 0).unsqueeze(-2) + 1, /*left=*/false);
       }}};
  for (const auto& dims :
       std::vector<std::vector<MeshDim>>{{{"x", 2}}, {{"x", 3}}, {{"x", 2}, {"y", 2}}}) {
    on_mesh(dims, [&](const MeshPtr& mesh) {
      for (const at::Tensor& values : {one, many}) {
        for (const Placements& placements :
             all_layouts(static_cast<int>(dims.size()), static_cast<int>(values.dim()), false)) {
          for (const auto& [first, use] : before) {
            for (const auto& [form, as] : forms) {
              for (const auto& [name, function] : functions) {
                const auto gradient = [&, &used = use, &its = as, &f = function](at::Tensor x) {
                  x.requires_grad_();
                  used(x);
                  return torch::autograd::grad({f(its(x)).sum()}, {x})[0];
                };
                const at::Tensor wanted = gradient(values.clone());
                const at::Tensor got = gradient(distribute_tensor(values, mesh, placements));
                EXPECT_TRUE(at::allclose(full_tensor(got), wanted))
                    << name << " of " << values.dim() << "-d, " << form << ", after " << first
                    << ", " << to_string(placements);
              }
            }
          }
        }
      }
    });
  }
}

// An expert without tokens.
TEST(LibTorchHabitsTest, NothingIsAddedWhereAnIndexIsEmpty) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor none = at::zeros({0}, at::kLong);
    for (const Placements& placements : all_layouts(1, 2, false)) {
      for (const bool is_plain : {true, false}) {
        const at::Tensor index = is_plain ? none : distribute_tensor(none, mesh, {Replicate()});
        const at::Tensor x = distribute_tensor(numbers({6, 4}), mesh, placements).requires_grad_();
        x.index_select(0, index).sum().backward();
        EXPECT_TRUE(at::equal(full_tensor(x.grad()), at::zeros({6, 4})));
        const at::Tensor rows = zeros({0, 4}, mesh, {Replicate()});
        const c10::AutoGradMode no_grad(false);
        at::Tensor y = distribute_tensor(numbers({6, 4}), mesh, placements);
        EXPECT_TRUE(at::equal(full_tensor(y.index_add(0, index, rows)), numbers({6, 4})));
        EXPECT_TRUE(y.index_add_(0, index, rows).is_same(y));
        EXPECT_THAT(error_of([&] { y.index_add_(0, index, ones({2, 4}, mesh, {Replicate()})); }),
                    HasSubstr("should be equal to source"));
        y.index_reduce_(0, index, rows, "amax", /*include_self=*/false);
        at::Tensor out = zeros({6, 4}, mesh, placements);
        at::index_add_out(out, y, 0, index, rows);
        EXPECT_TRUE(at::equal(full_tensor(out), numbers({6, 4})));
        EXPECT_TRUE(at::equal(full_tensor(y), numbers({6, 4})));
      }
    }
  });
}

// What is in at::empty() is no rank's concern.
TEST(LibTorchHabitsTest, WhatIsCopiedOverNeedNotBeTheSameOnAllRanks) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const auto there = static_cast<double>(mesh->coordinate()[0]);
    const at::Tensor x = distribute_tensor(numbers({4, 6}), mesh, {Shard(0)});
    at::Tensor whole = at::full({4, 6}, there);
    whole.copy_(x);
    EXPECT_TRUE(at::equal(full_tensor(whole), numbers({4, 6})));
    const at::Tensor base = at::full({4, 8}, there);
    base.slice(1, 1, 7).copy_(x);
    EXPECT_TRUE(at::equal(base.slice(1, 1, 7), numbers({4, 6})));
    at::Tensor filled = at::full({3}, there);
    filled.fill_(x.sum());
    EXPECT_TRUE(at::equal(full_tensor(filled), numbers({4, 6}).sum().expand({3})));
    EXPECT_TRUE(at::allclose(at::vander(x.select(1, 2)), at::vander(numbers({4, 6}).select(1, 2))));
    // What is read is.
    at::Tensor added = at::full({4, 6}, there);
    EXPECT_THAT(error_of([&] { added.add_(x); }), HasSubstr("differs from rank to rank"));
  });
}

}  // namespace
}  // namespace shardweave
