// ZeRO, stages 1 and 2 (Rajbhandari et al., 2020): along one mesh dimension parameters are whole on
// every rank, as in data parallelism, and the optimizer's states and its work are divided.
//
//   distribute_module(*model, mesh, plan);                              // or parallelize_module()
//   ZeroRedundancyOptimizer<torch::optim::AdamW> optimizer(             // or FusedOptimizer
//       unique_parameters(*model), torch::optim::AdamWOptions(3e-4), {.mesh_dim = "dp", .stage = 2});
//   model->forward(batch).sum().backward();
//   finish_grad_sync(*model);                        // a rank has its part of each gradient
//   clip_grad_norm(model->parameters(), 1.0);
//   optimizer.step();                                // steps its part, and gets the others'
//   optimizer.zero_grad();
//
// Parameters lie one after the other in buckets. Of a bucket each rank owns a stretch, cut between
// rows, so that ranks own about as much:
//
//   parameters   w w w w w w b b v v v v    whole on every rank
//   shards of 0  w w w w                    DTensors (ragged) over the same memory, with which the
//   shards of 1          w w b b            optimizer is made: its states lie as they do
//   shards of 2                  v v v v
//
//   backward             parameter.grad(), whole and still to be summed along the dimension
//   finish_grad_sync()   a reduce-scatter for each bucket; parameter.grad() lies as its shard
//   step()               any optimizer's step on the shards; then an all-gather for each bucket, in place
//
// So a step takes two collectives for each bucket, of (n - 1) / n of its bytes each: what data
// parallelism sends. In stage 1 gradients are whole until finish_grad_sync(): several backwards add
// to them and send nothing. In stage 2 a bucket's gradients leave in backward as soon as all of them
// are there (as often as in the iteration before), and only a rank's part of them stays. What comes
// after that (a second backward, the first time) is reduced at once, a parameter at a time: let it
// wait with NoSync. Where they come in other numbers than before, ranks compare those; different
// ones are an error on all ranks.
//
// Other mesh dimensions stay as they are: tensor parallelism, replicas.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <source_location>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "shardweave/dtensor/dtensor.h"
#include "shardweave/modules/optim/fused_optimizer.h"
#include "torch/optim/optimizer.h"

namespace shardweave {

struct ZeroOptions {
  // The mesh dimension along which the optimizer is divided; "": the mesh's first.
  std::string mesh_dim = {};
  int stage = 1;  // or 2
  // Of whole parameters that travel together; a larger one alone.
  int64_t bucket_bytes = 25 << 20;
};

// Parameters and their shards, for optimizers of one's own:
//
//   ZeroPartition partition(model->parameters(), {.mesh_dim = "dp"});
//   MyOptimizer optimizer(partition.shards());
//   model->forward(batch).sum().backward();
//   partition.hand_out_gradients();
//   optimizer.step();
//   partition.share_parameters();
//
// Its parameters get other memory, that of their buckets: what was taken of one before (to_local(), a
// view as `w.t()`, `p.detach()`) is no longer of it, and keeps the old memory with the old values.
// They keep it when this goes. What writes them whole (initialisers, the loading of weights)
// writes the shards. Threads: as the model. All ranks call everything alike.
class ZeroPartition {
 public:
  // Of `parameters` each once. Collective over the mesh; compares the ranks' parameters and options.
  // Throws Error before anything is changed, on all ranks: InvalidArgument for options out of range or
  // that differ between ranks, no parameter, one that is plain, on another mesh, not contiguous, cut
  // along the dimension, with a ragged cut of its rows along another, or fully sharded, and for what
  // another rank refuses; NotFound for a dimension that the mesh does not have;
  // FailedPrecondition for a parameter in another ZeroPartition or a GradSync, and for one that is
  // still deferred.
  explicit ZeroPartition(const std::vector<at::Tensor>& parameters, const ZeroOptions& options = {},
                         std::source_location where = std::source_location::current());
  ~ZeroPartition();
  ZeroPartition(const ZeroPartition&) = delete;
  ZeroPartition& operator=(const ZeroPartition&) = delete;

  // More of them, in buckets of their own; their shards. As the constructor.
  std::vector<at::Tensor> add(const std::vector<at::Tensor>& parameters,
                              std::source_location where = std::source_location::current());

  const std::vector<at::Tensor>& parameters() const;
  // As many. Of a number (0-dimensional) it is all of it, on every rank. An optimizer of one's own writes
  // them by operators on them, under NoGradGuard, or through data(); what is written through to_local()
  // share_parameters() does not see.
  const std::vector<at::Tensor>& shards() const;

  // Gradients, brought to their owners where that has not been done, become the shards'.
  // Collective. Throws Error (FailedPrecondition) if a parameter was moved since (module->to(),
  // set_data()), and if gradients have come in other numbers on other ranks (stage 2).
  void hand_out_gradients(std::source_location where = std::source_location::current());
  // All ranks get what was written of shards since the last time. Autograd knows of it as of a write to the
  // parameters. Collective.
  void share_parameters(std::source_location where = std::source_location::current());
  // Parameters and shards have no gradients any more.
  void zero_grad();

  // In place of hand_out_gradients() and finish_grad_sync(), after a backward that failed on some
  // rank: what has left in it comes to nothing, and the next iteration is one as any. Gradients are of
  // no use then: zero_grad(). Of all ranks; waits for nobody.
  //
  // A rank whose backward failed calls it at once, for in stage 2 others may wait in theirs for what it
  // has not sent. Then the ranks agree that there was a failure, on a communicator that is not the
  // mesh's (World::comm()), and the others call it. A rank that calls hand_out_gradients() instead
  // gets NaN, or waits for what nobody sends. What the backward's operators themselves send (tensor
  // parallelism) or accumulate a second time, and what several partitions send in one backward, nobody
  // makes up for: with that the mesh is lost, as ever.
  void discard();

  // While it lives, backward sends nothing in stage 2 either. Scopes may be nested. But for gradients that
  // have been reduced and are there still, as zeros even (zero_grad(false)): to these it adds, and sends, a
  // parameter at a time.
  class NoSync {
   public:
    explicit NoSync(ZeroPartition& partition);
    ~NoSync();
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    const std::shared_ptr<void> state_;
  };

  // Reduce-scatters that have left in backward, of all iterations.
  int64_t left_in_backward() const;

 private:
  class State;
  const std::shared_ptr<State> state_;
};

// What an optimizer keeps of one parameter, by its name ("exp_avg"); "step" is a plain number.
using OptimizerState = std::map<std::string, at::Tensor>;

namespace zero_internal {
const at::Tensor& shard_of(const ZeroPartition& partition, size_t parameter);
OptimizerState state_of(const FusedOptimizer& optimizer, size_t index, const at::Tensor& shard);
OptimizerState state_of(const torch::optim::Optimizer& optimizer, size_t index,
                        const at::Tensor& shard);
void set_state_of(FusedOptimizer& optimizer, size_t index, const at::Tensor& shard,
                  const OptimizerState& state);
void set_state_of(torch::optim::Optimizer& optimizer, size_t index, const at::Tensor& shard,
                  const OptimizerState& state);
OptimizerState consolidated(const OptimizerState& state);
// Of checked groups, all parameters; and the groups with shards in their places.
std::vector<at::Tensor> parameters_of(const std::vector<ParameterGroup>& groups);
std::vector<ParameterGroup> groups_of_shards(const std::vector<ParameterGroup>& groups,
                                             const ZeroPartition& partition);
// `parameters`, of which an optimizer can be made with `options`: what it refuses it refuses before they
// are divided.
template <typename Optimizer, typename Options>
const std::vector<at::Tensor>& checked(const std::vector<at::Tensor>& parameters,
                                       const Options& options) {
  if constexpr (std::is_same_v<Optimizer, FusedOptimizer>) {
    FusedOptimizer::check({{parameters, options}});
  }
  return parameters;
}
}  // namespace zero_internal

// `Optimizer`: FusedOptimizer or one of torch::optim's, made with the shards and `options`.
template <typename Optimizer>
class ZeroRedundancyOptimizer {
 public:
  template <typename Options>
  ZeroRedundancyOptimizer(const std::vector<at::Tensor>& parameters, const Options& options,
                          const ZeroOptions& zero = {},
                          std::source_location where = std::source_location::current())
      : partition_(zero_internal::checked<Optimizer>(parameters, options), zero, where),
        optimizer_(partition_.shards(), options) {}

  // Groups with options of their own, of another optimizer too.
  explicit ZeroRedundancyOptimizer(const std::vector<ParameterGroup>& groups,
                                   const ZeroOptions& zero = {},
                                   std::source_location where = std::source_location::current())
    requires std::is_same_v<Optimizer, FusedOptimizer>
      : partition_(zero_internal::parameters_of(groups), zero, where),
        optimizer_(zero_internal::groups_of_shards(groups, partition_)) {}

  // Parameters without a gradient stay as they are.
  void step(std::source_location where = std::source_location::current()) {
    partition_.hand_out_gradients(where);
    if constexpr (std::is_same_v<Optimizer, FusedOptimizer>) {
      optimizer_.step(where);
    } else {
      optimizer_.step();
    }
    partition_.share_parameters(where);
  }
  // As torch::optim's: `closure` clears gradients, computes the loss, and calls backward().
  template <typename Closure>
    requires std::is_invocable_r_v<at::Tensor, Closure&>
  at::Tensor step(Closure closure, std::source_location where = std::source_location::current()) {
    at::Tensor loss = optimizer_.step([&]() -> at::Tensor {
      partition_.share_parameters(where);
      at::Tensor value = closure();
      partition_.hand_out_gradients(where);
      return value;
    });
    partition_.share_parameters(where);
    return loss;
  }
  void zero_grad() { partition_.zero_grad(); }

  // Another group of torch::optim's, with options of its own.
  void add_param_group(const torch::optim::OptimizerParamGroup& group,
                       std::source_location where = std::source_location::current()) {
    torch::optim::OptimizerParamGroup shards(group);
    shards.params() = partition_.add(group.params(), where);
    optimizer_.add_param_group(shards);
  }
  // And of FusedOptimizer's.
  size_t add_group(const ParameterGroup& group,
                   std::source_location where = std::source_location::current())
    requires std::is_same_v<Optimizer, FusedOptimizer>
  {
    ParameterGroup shards = group;
    shards.parameters = partition_.add(zero_internal::parameters_of({group}), where);
    return optimizer_.add_group(shards);
  }

  // Of parameters()[parameter], as this rank keeps it: DTensors that lie as the shard (means of its rows
  // or columns as FusedOptimizer says). torch::optim has
  // nothing before the first step. Throws Error (OutOfRange), (Unimplemented) for an optimizer whose
  // state has no names here: of torch::optim AdamW, Adam, SGD, RMSprop and Adagrad have.
  OptimizerState state(size_t parameter) const {
    return zero_internal::state_of(optimizer_, parameter, shard(parameter));
  }
  // Whole, on every rank: collective.
  OptimizerState consolidated_state(size_t parameter) const {
    return zero_internal::consolidated(state(parameter));
  }
  // Either of them, from any layout of the mesh or from whole plain tensors, the same on all ranks.
  // Collective. Throws Error on all ranks, before anything is changed: (InvalidArgument) for a shape
  // that is not the state's, for "step" that is no whole number up to 2^53 (of FusedOptimizer
  // 2^24), for names, "step", dtypes or layouts that differ between ranks and, of torch::optim, for what its options
  // need and is missing, (NotFound) for a name that the optimizer does not have. Empty: as before the
  // first step.
  void set_state(size_t parameter, const OptimizerState& state) {
    zero_internal::set_state_of(optimizer_, parameter, shard(parameter), state);
  }

  const std::vector<at::Tensor>& parameters() const { return partition_.parameters(); }
  // Made with the shards, which have no gradients but within step(). Its options may be changed; step and
  // zero_grad() here: by itself it does nothing.
  Optimizer& optimizer() { return optimizer_; }
  ZeroPartition& partition() { return partition_; }

 private:
  const at::Tensor& shard(size_t parameter) const {
    return zero_internal::shard_of(partition_, parameter);
  }

  ZeroPartition partition_;
  Optimizer optimizer_;
};

}  // namespace shardweave
