// Ranks that have different numbers of batches, at the end of an epoch: those that have none left take
// part in what the others compute, with no rows, until all are done.
//
//   Join join(mesh, {.mesh_dims = {"dp"}});
//   while (auto batch = join.next(loader.next())) {     // this rank's tensors; {}: it has none left
//     const at::Tensor loss = model->loss((*batch)[0], (*batch)[1]);
//     loss.backward();
//     finish_grad_sync(*model);
//     optimizer.step();
//     optimizer.zero_grad();
//   }
//
// next() makes of the ranks' rows one DTensor, cut between rows as ranks have brought them: unevenly,
// and not at all where a rank brings none. So nothing else needs to know: operators, losses, batch
// norms and gradients are those of one device on all rows that there are, and a mean is over those. That
// is what PyTorch's Join has hooks and shadow collectives for. (A loss that adds up means of each rank's
// rows is divided by ranks_with_input(), then.)
//
// A rank may come back with rows after it had none. What stops all ranks as soon as one has no more:
// `if (join.ranks_with_input() < join.num_ranks()) break;`.
#pragma once

#include <cstdint>
#include <optional>
#include <source_location>
#include <string>
#include <vector>

#include "shardweave/dtensor/dtensor.h"

namespace shardweave {

struct JoinOptions {
  // Along which ranks have input of their own; empty: the mesh's first. Along others they have the
  // same, of which the shapes are compared. Of several dimensions ranks cannot bring any numbers of
  // rows: a DTensor is cut by one after the other, and what they bring has to be such a cut.
  std::vector<std::string> mesh_dims = {};
  // Where the empty parts lie of a rank that has not brought a batch yet. If others bring theirs on
  // devices of another type: on the current device of that type.
  at::Device device = at::kCPU;
};

// Threads: as the mesh.
class Join {
 public:
  static constexpr size_t kMaxTensors = 8;

  // Does not communicate. Throws Error (NotFound) for a dimension that the mesh does not have,
  // (InvalidArgument) for one that is named twice.
  explicit Join(const MeshPtr& mesh, const JoinOptions& options = {});

  // `mine`: this rank's rows of each tensor of the batch, plain, at least one-dimensional, their
  // gradients not recorded; none if it has no more, an empty one counts as input. As DTensors, cut
  // along their first dimension, they share the memory of what was given; nullopt once no rank has any.
  //
  // Collective over the mesh, one all-gather of 656 bytes from each rank. Throws Error
  // (InvalidArgument), on all ranks, for tensors that are undefined, DTensors, numbers or more than
  // kMaxTensors, ranks with different numbers of tensors, dtypes, types of devices or rows of other
  // shapes, if of two ranks that should have the same input one has none, or other shapes, and for rows
  // that no cut along several dimensions describes.
  std::optional<std::vector<at::Tensor>> next(
      const std::vector<at::Tensor>& mine,
      std::source_location where = std::source_location::current());

  // Of the last batch; 0 before the first. Ranks are counted along `mesh_dims`.
  int64_t ranks_with_input() const { return ranks_with_input_; }
  int64_t num_ranks() const { return num_ranks_; }

 private:
  const MeshPtr mesh_;
  std::vector<int> mesh_dims_;
  at::Device device_;
  int64_t num_ranks_ = 1;
  int64_t ranks_with_input_ = 0;
};

}  // namespace shardweave
