// All ranks of a mesh in one process, with plain arrays for tensors: the oracle of the tests of
// layouts and redistribution plans. Written from the definitions alone, index by index, without the
// library's arithmetic on cuts.
//
//   SimulatedMesh mesh({2, 2}, {7, 5});
//   mesh.distribute(from, /*seed=*/1);
//   for (const RedistributeStep& step : plan.steps) mesh.run(step);
//   mesh.first_difference(to);   // "" if every rank holds what `to` says
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shardweave/placement/layout.h"
#include "shardweave/placement/redistribute_plan.h"

namespace shardweave {

using Indices = std::vector<int64_t>;

// Piece number `index` of `indices` cut by `placement` over `num_ranks`.
Indices naive_cut(const Indices& indices, const Placement& placement, int64_t num_ranks,
                  int64_t index);
// The global indices of each tensor dimension that the rank at `coordinate` holds.
std::vector<Indices> naive_indices(const Layout& layout, const Dims& mesh_shape,
                                   const Dims& coordinate, const Dims& shape);

class SimulatedMesh {
 public:
  SimulatedMesh(Dims mesh_shape, Dims shape);

  int num_ranks() const { return static_cast<int>(coordinates_.size()); }
  const Dims& coordinate(int rank) const { return coordinates_[rank]; }

  // Gives every rank its part of the global tensor, whose elements are small integers drawn from
  // `seed`; random summands, factors and so on where the layout is Partial.
  void distribute(const Layout& layout, uint64_t seed);

  // Executes a step on all ranks, by the contract of its kind. Returns the largest number of
  // elements that a rank sends, by the definitions of RedistributeStep::bytes.
  int64_t run(const RedistributeStep& step);

  // Whether every rank holds the same elements in the same order as in `other`.
  bool same_elements(const SimulatedMesh& other) const;

  // Where the local tensors are not what `layout` says, or "".
  std::string first_difference(const Layout& layout) const;

 private:
  struct Tensor {
    Dims shape;
    std::vector<double> data;
    int64_t size() const { return static_cast<int64_t>(data.size()); }
  };
  using Tensors = std::vector<Tensor>;

  std::vector<int> group(int rank, const std::vector<int>& mesh_dims) const;
  Tensor part_of_global(const Layout& layout, int rank) const;
  static Tensor select(const Tensor& tensor, int dim, const Indices& indices);
  static void place(Tensor& tensor, int dim, const Indices& indices, const Tensor& piece);
  Tensor reduce(ReduceOp op, const std::vector<int>& ranks) const;

  int64_t all_gather(const RedistributeStep& step, Tensors& out) const;
  int64_t slice(const RedistributeStep& step, Tensors& out) const;
  int64_t all_reduce(const RedistributeStep& step, Tensors& out) const;
  int64_t reduce_scatter(const RedistributeStep& step, Tensors& out) const;
  int64_t all_to_all(const RedistributeStep& step, Tensors& out) const;
  int64_t to_partial(const RedistributeStep& step, Tensors& out) const;
  int64_t exchange(const RedistributeStep& step, Tensors& out) const;

  const Dims mesh_shape_;
  const Dims shape_;
  std::vector<Dims> coordinates_;
  Tensor global_;
  Tensors local_;  // by rank
};

}  // namespace shardweave
