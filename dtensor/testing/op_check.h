// Checks operators on DTensors against one device: values, gradients, gradients of gradients,
// shapes, strides and dtypes, over meshes and over combinations of the placements of their inputs.
//
//   check_op({"addmm", {in({5}), in({7, 4}), in({4, 5})},
//             [](const Tensors& x) { return Tensors{at::addmm(x[0], x[1], x[2], 0.5, 2)}; }});
//
// An input is tried replicated, as every Shard (uneven and empty ones too), as a strided and a
// ragged shard, and (floating point) as a Partial sum of random summands; all combinations where
// they are few, else a deterministic sample of them. Gradients come back for every floating point
// input, from random cotangents in all sorts of layouts. Where one device can, they are
// differentiated again (create_graph), with random weights, by inputs and by cotangents. A failure
// names operator, mesh, layouts and difference.
#pragma once

#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "shardweave/mesh/device_mesh.h"
#include "shardweave/placement/reduce_op.h"

namespace shardweave::testing {

using Tensors = std::vector<at::Tensor>;

// An input by shape: standard normal doubles unless said otherwise. Floating point values have few
// digits, so that the summands of a Partial add up exactly.
class Input {
 public:
  explicit Input(std::vector<int64_t> sizes) : sizes_(std::move(sizes)) {}

  Input&& uniform(double low, double high) && { return low_ = low, high_ = high, std::move(*this); }
  // Integers from `low` to `high` - 1 (no gradient).
  Input&& integers(int64_t low, int64_t high) && {
    return std::move(*this).uniform(low, high).dtype(at::kLong);
  }
  Input&& flags() && { return std::move(*this).dtype(at::kBool); }
  Input&& dtype(at::ScalarType dtype) && { return dtype_ = dtype, std::move(*this); }
  // Only tried replicated.
  Input&& replicated() && { return replicated_ = true, std::move(*this); }
  // Without a gradient.
  Input&& constant() && { return constant_ = true, std::move(*this); }
  // Laid out with its first two dimensions exchanged, so that it is not contiguous.
  Input&& transposed() && { return transposed_ = true, std::move(*this); }
  // Values from few small integers, so that some are equal.
  Input&& with_ties() && { return ties_ = true, std::move(*this); }
  // Every line along the last dimension ascends.
  Input&& sorted() && { return sorted_ = true, std::move(*this); }
  // Symmetric positive definite matrices (the last two dimensions), well conditioned.
  Input&& positive_definite() && { return positive_definite_ = true, std::move(*this); }
  Input&& complex() && { return std::move(*this).dtype(at::kComplexDouble); }

  const std::vector<int64_t>& sizes() const { return sizes_; }
  bool is_replicated() const { return replicated_; }
  // May be a sum of summands: floating point and complex numbers.
  bool is_float() const { return c10::isFloatingType(dtype_) || c10::isComplexType(dtype_); }
  bool is_real() const { return c10::isFloatingType(dtype_); }
  bool has_gradient() const { return is_float() && !constant_; }
  // A function of the shape and the position of the input only.
  at::Tensor make(uint64_t seed) const;

 private:
  std::vector<int64_t> sizes_;
  at::ScalarType dtype_ = at::kDouble;
  std::optional<double> low_, high_;
  bool replicated_ = false;
  bool constant_ = false;
  bool transposed_ = false;
  bool ties_ = false;
  bool sorted_ = false;
  bool positive_definite_ = false;
};

inline Input in(std::vector<int64_t> sizes) {
  return Input(std::move(sizes));
}

struct OpCase {
  std::string name;
  std::vector<Input> inputs;
  std::function<Tensors(const Tensors&)> run;  // on plain tensors and on DTensors
  bool gradients = true;
  double tolerance = 1e-9;  // relative and absolute
  bool strides = true;      // compare strides
  bool values = true;       // false: only shapes and dtypes (empty_like, random numbers)
};

// The meshes (2), (3), (4) and (2, 2).
const std::vector<std::vector<MeshDim>>& small_meshes();

// Adds a failure for everything that is different.
void check_op(const OpCase& op, const std::vector<std::vector<MeshDim>>& meshes = small_meshes());
void check_ops(const std::vector<OpCase>& ops);

// Under a sanitizer everything takes ten times as long, and what it looks for does not depend on
// every combination of layouts: a sample has to do.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr int kCheckedShare = 8;
#else
inline constexpr int kCheckedShare = 1;
#endif

struct CheckOptions {
  // More than these are sampled, so that every layout of every input is tried.
  int max_combinations = 48 / kCheckedShare;
  bool all_partials = false;  // Partial avg, min and max too, on meshes with one dimension
  // Of which combinations the gradients are differentiated again, which takes twice as long as all
  // else: 3 is a third of them, drawn by `seed`; 1 is all.
  size_t second_gradients_every = 3;
  uint64_t seed = 42;
};
struct CheckResult {
  int64_t combinations = 0;              // tried
  int64_t second_gradients = 0;          // combinations of these, where they were compared
  std::string no_second_derivative;      // why one device has none, where it has first ones
  std::set<std::string> reached;         // operators that ran on DTensors, in backward as well
  std::vector<std::string> differences;  // a few of each rank
};

// The same as text, on one mesh. No differences: nothing is wrong.
CheckResult check_on_mesh(const OpCase& op, const std::vector<MeshDim>& mesh,
                          const CheckOptions& options = {});
std::vector<std::string> find_differences(const OpCase& op, const std::vector<MeshDim>& mesh);

// Whether LibTorch can differentiate it on one device.
bool differentiable(const OpCase& op);

// Summands (factors, ...) whose reduction by `op` over `count` ranks is `whole`: random, but the
// same for the same seed. Sums, products, minima and maxima are exact.
Tensors summands(const at::Tensor& whole, ReduceOp op, int count, uint64_t seed);

}  // namespace shardweave::testing
