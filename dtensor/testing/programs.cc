#include "shardweave/dtensor/testing/programs.h"

#include <algorithm>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/random.h"
#include "shardweave/dtensor/testing/on_mesh.h"

namespace shardweave::testing {
namespace {

constexpr uint64_t kSeed = 7;

std::string text(const std::vector<WhereCut>& cuts) {
  return absl::StrJoin(cuts, " x ", [](std::string* out, WhereCut cut) {
    constexpr const char* kNames[] = {"whole", "first", "last", "mixed"};
    absl::StrAppend(out, kNames[static_cast<int>(cut)]);
  });
}

Placement placement(WhereCut cut, at::IntArrayRef sizes, int n, int last) {
  if (cut == WhereCut::kMixed) cut = static_cast<WhereCut>(n % 3);
  if (cut == WhereCut::kWhole || sizes.empty()) return Replicate();
  const int last_dim = static_cast<int>(sizes.size()) - 1;
  return Shard(cut == WhereCut::kFirst ? 0 : std::min(last, last_dim));
}

struct Layouts {
  std::vector<WhereCut> parameters, data;
};

std::vector<Layouts> layouts_on(size_t mesh_dims, const Trial& first) {
  using enum WhereCut;
  std::vector<std::vector<WhereCut>> parameters, data;
  if (mesh_dims == 1) {
    parameters = {{kWhole}, {kFirst}, {kLast}, {kMixed}};
    data = {{kWhole}, {kFirst}, {kLast}};
  } else {
    parameters = {
        {kWhole, kWhole}, {kWhole, kFirst}, {kFirst, kLast}, {kFirst, kFirst}, {kMixed, kLast}};
    data = {{kWhole, kWhole}, {kFirst, kWhole}, {kFirst, kLast}, {kWhole, kFirst}};
  }
  if (!first.has_parameters()) parameters.resize(1);
  if (!first.has_data()) data.resize(1);
  std::vector<Layouts> all;
  for (const auto& p : parameters) {
    for (const auto& d : data) all.push_back({p, d});
  }
  return all;
}

std::string first_line(const std::exception& error) {
  const std::string what = error.what();
  return what.substr(0, what.find('\n'));
}

}  // namespace

at::Tensor values(at::IntArrayRef sizes, int seed) {
  return at::sin(at::arange(c10::multiply_integers(sizes), at::kDouble) * 1.7 + 0.6 * seed + 0.1)
      .view(sizes);
}

Trial::Trial(MeshPtr mesh, std::vector<WhereCut> parameters, std::vector<WhereCut> data,
             const Results* wanted, double tolerance, at::DeviceType device)
    : mesh_(std::move(mesh)),
      parameter_cuts_(std::move(parameters)),
      data_cuts_(std::move(data)),
      wanted_(wanted),
      tolerance_(tolerance),
      device_(device) {}

Placements Trial::placements(const std::vector<WhereCut>& cuts, at::IntArrayRef sizes, int n,
                             int last) const {
  Placements result;
  for (const WhereCut cut : cuts) result.push_back(placement(cut, sizes, n++, last));
  return result;
}

void Trial::distribute(torch::nn::Module& module, at::ScalarType dtype) {
  has_parameters_ = true;
  module.to(dtype);
  if (device_ != at::kCPU) module.to(device_);
  ParameterPlan plan;
  int n = 0;
  for (const auto& item : module.named_parameters()) {
    const at::NoGradGuard no_grad;
    item.value().copy_(values(item.value().sizes(), n) * 0.5);
    const Placements here = placements(parameter_cuts_, item.value().sizes(), n++, 63);
    NamedPlacements named;
    for (size_t m = 0; m < here.size(); ++m) {
      named.emplace_back(mesh_->mesh().dims()[m].name, here[m]);
    }
    plan.push_back({item.key(), named});
  }
  if (mesh_ != nullptr) distribute_module(module, mesh_, plan, {.source = std::nullopt});
}

at::Tensor Trial::data(const at::Tensor& plain) {
  has_data_ = true;
  if (mesh_ == nullptr) return plain.detach().clone();
  return distribute_tensor(plain.detach().to(device_), mesh_,
                           placements(data_cuts_, plain.sizes(), 0, 1), {.source = std::nullopt});
}

at::Tensor Trial::parameter(const at::Tensor& plain, int n) {
  has_parameters_ = true;
  if (mesh_ == nullptr) return plain.detach().clone().requires_grad_();
  return distribute_tensor(plain.detach().to(device_), mesh_,
                           placements(parameter_cuts_, plain.sizes(), n, 63),
                           {.source = std::nullopt})
      .requires_grad_();
}

at::Tensor Trial::replicated(const at::Tensor& plain) const {
  if (mesh_ == nullptr) return plain.detach().clone();
  return distribute_tensor(plain.detach().to(device_), mesh_, Placements(mesh_->mesh().ndim()),
                           {.source = std::nullopt});
}

void Trial::result(const std::string& name, const at::Tensor& tensor) {
  at::Tensor got = tensor;
  if (got.defined()) {
    got = (is_dtensor(got) ? full_tensor(got.detach()) : got.detach()).cpu().clone();
  }
  results_.emplace_back(name, got);
  if (wanted_ == nullptr) return;
  const size_t i = results_.size() - 1;
  if (i >= wanted_->size() || (*wanted_)[i].first != name) {
    ADD_FAILURE() << name << " is no result of the first run";
    return;
  }
  const at::Tensor& want = (*wanted_)[i].second;
  if (got.defined() != want.defined()) {
    ADD_FAILURE() << name << " is " << (got.defined() ? "defined" : "undefined");
    return;
  }
  if (!want.defined()) return;
  EXPECT_EQ(got.sizes(), want.sizes()) << name;
  EXPECT_EQ(got.scalar_type(), want.scalar_type()) << name;
  if (got.sizes() != want.sizes() || got.scalar_type() != want.scalar_type()) return;
  const at::ScalarType wide = want.is_complex() ? at::kComplexDouble : at::kDouble;
  const at::Tensor a = got.to(wide), b = want.to(wide);
  EXPECT_TRUE(at::allclose(a, b, tolerance_, tolerance_, /*equal_nan=*/true))
      << name << ": max difference " << (a - b).abs().max().item<double>() << " in "
      << (is_dtensor(tensor) ? layout_of(tensor).to_string() : "a plain tensor");
}

void Trial::gradients(torch::nn::Module& module) {
  finish_grad_sync(module);
  for (const auto& item : module.named_parameters()) {
    const at::Tensor& grad = item.value().grad();
    if (mesh_ != nullptr && grad.defined()) {
      EXPECT_EQ(layout_of(grad), layout_of(item.value())) << item.key();
    }
    result(item.key() + ".grad", grad);
  }
}

void Trial::parameters(const torch::nn::Module& module) {
  for (const auto& item : module.named_parameters()) result(item.key(), item.value());
}

void Trial::buffers(const torch::nn::Module& module) {
  for (const auto& item : module.named_buffers()) result(item.key(), item.value());
}

void Trial::finish() const {
  if (wanted_ == nullptr) return;
  EXPECT_EQ(results_.size(), wanted_->size()) << "results";
}

void check_program(const std::function<void(Trial&)>& program, const ProgramOptions& options) {
  Trial first(nullptr, {}, {}, nullptr, options.tolerance);
  if (options.random) {
    on_mesh({{"x", 1}}, [&](const MeshPtr& mesh) {
      manual_seed(mesh, kSeed);
      first = Trial(mesh, {WhereCut::kWhole}, {WhereCut::kWhole}, nullptr, options.tolerance);
      program(first);
    });
  } else {
    program(first);
  }
  const Trial::Results& wanted = first.results();
  ASSERT_FALSE(wanted.empty()) << "the program has no result";
  const ProgramRanks ranks = program_ranks();
  for (const std::vector<MeshDim>& dims :
       {std::vector<MeshDim>{{"x", 2}}, {{"x", 3}}, {{"x", 2}, {"y", 2}}}) {
    ranks.on_mesh(dims, [&](const MeshPtr& mesh) {
      for (const Layouts& layouts : layouts_on(dims.size(), first)) {
        SCOPED_TRACE(absl::StrCat(mesh->mesh().to_string(), ", parameters ",
                                  text(layouts.parameters), ", data ", text(layouts.data)));
        if (options.random) manual_seed(mesh, kSeed);
        Trial run(mesh, layouts.parameters, layouts.data, &wanted, options.tolerance, ranks.device);
        try {
          program(run);
          run.finish();
        } catch (const std::exception& error) {
          ADD_FAILURE() << first_line(error);
          return;  // the ranks may have come apart
        }
      }
      if (!options.gathers) {
        const auto& warned = dtensor_internal::MeshContext::of(mesh)->observation.said_gathered;
        EXPECT_TRUE(warned.empty()) << "without a rule: " << absl::StrJoin(warned, ", ");
      }
    });
  }
}

}  // namespace shardweave::testing
