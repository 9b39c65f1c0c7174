// The optimizers that FusedOptimizer (fused_optimizer.h) has, each by its options, and groups of
// parameters with options of their own.
//
//   std::vector<ParameterGroup> groups = {
//       {.parameters = matrices, .options = MuonOptions{.lr = 0.02}},
//       {.parameters = others, .options = AdamWOptions{.lr = 3e-4}},
//   };
//   FusedOptimizer optimizer(groups);
//
// SGD, Adam, AdamW, Adafactor and Muon are those of PyTorch, option by option; Lion is its paper's.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <variant>
#include <vector>

#include "ATen/core/Tensor.h"
#include "c10/core/ScalarType.h"

namespace shardweave {

struct SgdOptions {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;
};

struct AdamOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;  // added to the gradient
  bool amsgrad = false;
};

struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 1e-2;  // taken off the parameter
  bool amsgrad = false;
};

// Chen et al., Symbolic Discovery of Optimization Algorithms, 2023.
struct LionOptions {
  double lr = 1e-4;
  double beta1 = 0.9;
  double beta2 = 0.99;
  double weight_decay = 0;  // taken off the parameter
};

// Shazeer and Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, 2018, as
// torch.optim.Adafactor has it: of a parameter with two dimensions or more the squares of gradients
// are kept as the means of its rows and of its columns, R + C numbers in place of R * C. In step t a
// parameter moves by
//   max(eps2, RMS(parameter)) * min(lr, 1 / sqrt(t))
// times the gradient over the root of its mean square, which is scaled down to an RMS of at most
// `clip_threshold`. Numbers of 16 bits have means of 32.
struct AdafactorOptions {
  double lr = 1e-2;
  double beta2_decay = -0.8;    // a mean forgets 1 - t ^ beta2_decay of itself in step t; below 0
  std::optional<double> eps1;   // the smallest root of a mean square; nullopt: the dtype's epsilon
  double eps2 = 1e-3;           // the smallest RMS of a parameter
  double clip_threshold = 1.0;  // above 0
  double weight_decay = 0;      // taken off the parameter
};

// What Muon's learning rate is multiplied by, for a matrix of R rows and C columns.
enum class MuonLrScale : uint8_t {
  kOriginal,       // sqrt(max(1, R / C)), as its author does
  kMatchRmsAdamW,  // 0.2 sqrt(max(R, C)), so that AdamW's learning rate fits (Liu et al., 2025)
};

// Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/), as torch.optim.Muon has it:
// momentum whose matrix is made (nearly) orthogonal by a Newton-Schulz iteration. For parameters of
// two dimensions that are applied to hidden activations; embeddings, heads and vectors are better in
// a group of their own, with AdamW.
struct MuonOptions {
  double lr = 1e-3;
  double weight_decay = 0.1;  // taken off the parameter
  double momentum = 0.95;
  bool nesterov = true;
  int ns_steps = 5;  // of the iteration X <- a X + (b A + c A A) X, where A = X X^T; up to 99
  double ns_a = 3.4445;
  double ns_b = -4.7750;
  double ns_c = 2.0315;
  double eps = 1e-7;  // the smallest norm that a matrix is divided by before
  MuonLrScale lr_scale = MuonLrScale::kOriginal;
  // In which the iteration computes, and in which matrices travel for it: bfloat16, float32 or
  // float64.
  at::ScalarType ns_dtype = at::kBFloat16;
};

using OptimizerOptions =
    std::variant<SgdOptions, AdamOptions, AdamWOptions, LionOptions, AdafactorOptions, MuonOptions>;

// Some parameters with options of their own.
struct ParameterGroup {
  std::vector<at::Tensor> parameters;
  OptimizerOptions options;
};

// Two groups: those that Muon takes (of two dimensions), and the others. Each tensor in the order in
// which it was given.
std::vector<ParameterGroup> muon_groups(const std::vector<at::Tensor>& parameters,
                                        const MuonOptions& matrices, const AdamWOptions& others);

// Throws Error (InvalidArgument) that names `who` for options out of range.
void check_options(const OptimizerOptions& options, std::string_view who);

}  // namespace shardweave
