// Parameters that are whole only while they are used (fully_shard.h): FSDP, by touch. A unit's
// parameters lie one after the other in a flat buffer, which operators see while the unit is full;
// along one mesh dimension each rank keeps a stretch of it, which rests (flat_row.h).
//
// A parameter that rests is an ordinary DTensor, which optimizers and clipping work on. Where it
// meets an operator that is none of theirs, above autograd (forward_plan.cc), another DTensor stands
// in for it: whole along that dimension, with a local part that is gathered on use, of the whole
// unit. Its gradients come to one node of autograd for the unit, which begins to reduce and scatter
// them together once all of them are there (unit_gradients.h). They have arrived when backward ends.
//
// Views that autograd has saved are views of the flat buffer. That keeps its StorageImpl, so they
// are right again when it is filled again, by whoever touches one of them. On a device each stream
// that touches a unit finds it filled, and it is emptied when they all have done what came by then.
//
// What rests on the CPU and is used on a device is copied there before it is gathered, and gradients
// back after they were reduced, beside what computes (host_copies.h).
//
// All ranks touch units in the same order, for they run the same operators. The order of units is in
// fsdp_state.cc, memory and gathering in fsdp_unit.cc, gradients in fsdp_backward.cc, operators in
// use_parameters.cc, FullParams in summoned_unit.cc. Internal to Shardweave.
// Threads: as DTensors; a backward may run on autograd's thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <source_location>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/core/dispatch/Dispatcher.h"
#include "absl/container/flat_hash_map.h"
#include "c10/core/Event.h"
#include "c10/core/StorageImpl.h"
#include "c10/core/Stream.h"
#include "shardweave/dtensor/engine/flat_row.h"
#include "shardweave/dtensor/engine/host_copies.h"
#include "shardweave/dtensor/engine/local_part.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "shardweave/dtensor/engine/unit_gradients.h"
#include "torch/csrc/autograd/function.h"

namespace shardweave::dtensor_internal {

class FsdpUnit;

// In the names of errors, traces and reports.
inline constexpr char kFullyShard[] = "fully_shard";
// Of parameters that rest and of what stands in for them: above autograd (forward_plan.h).
inline constexpr c10::DispatchKey kTouched = c10::DispatchKey::DeferredInit;

// What the family of a parameter that rests knows (tensor_impl.h).
struct Resting {
  std::shared_ptr<FsdpUnit> unit;
  size_t index = 0;
  SpecRef spec;  // as it rests: its views lie otherwise, or are used as it is
};

// The same on all ranks, but for the bytes.
struct FsdpCounters {
  int64_t gathers = 0;
  int64_t prefetches = 0;        // of these, begun before the unit was touched
  int64_t wrong_prefetches = 0;  // another unit came
  int64_t reduce_scatters = 0;
  int64_t gathered_bytes = 0;  // of full units and of gradients that are sent, now
  int64_t peak_gathered_bytes = 0;
};

// Of a mesh: which of its units are full, and in which order they come.
class FsdpState : public std::enable_shared_from_this<FsdpState> {
 public:
  explicit FsdpState(MeshContext& context) : context_(context) {}

  // The one whose flat buffer has this memory; null: none.
  FsdpUnit* unit_of(const c10::StorageImpl* storage) const {
    const auto it = buffers_.find(storage);
    return it == buffers_.end() ? nullptr : it->second;
  }
  // Empties the units that are full.
  void reshard();

  FsdpCounters counters;
  // FullyShardNoSync scopes: while there are any, gradients stay whole, with the rank that has computed
  // them.
  std::atomic<int> no_sync = 0;
  // What has stayed goes to where the parameters rest. Collective, if there is any.
  void send_held();

 private:
  friend class FsdpUnit;
  struct Guess {
    FsdpUnit* unit = nullptr;
    bool sure = true;  // no wrong guess since it was last seen
  };

  // This rank's and its neighbours', so many along the dimension. Made when first asked for.
  // Collective among them, then.
  Communicator& neighbours(int mesh_dim, int64_t ranks);
  // For copies, of all units of the device.
  enum class Way : uint8_t { kToDevice, kToHost };
  c10::Stream lane(c10::Device device, Way way);
  static bool in_backward_now();
  void touch(FsdpUnit& unit);
  void learn(FsdpUnit& unit);
  FsdpUnit* guess_next();
  void end_with_backward();
  void finish_gradients(size_t but_the_last);
  // The memory of gradients that have left, without waiting for those that have not; and with that.
  void give_up_sent();
  void wait_for_sent();
  void forget(FsdpUnit& unit);

  MeshContext& context_;
  absl::flat_hash_map<const c10::StorageImpl*, FsdpUnit*> buffers_;
  std::vector<FsdpUnit*> units_;
  FsdpUnit* current_ = nullptr;     // touched last,
  FsdpUnit* before_ = nullptr;      // and before that
  FsdpUnit* ahead_ = nullptr;       // gathered before it was touched
  std::vector<FsdpUnit*> leaving_;  // to be emptied as soon as no operator has them
  // Gradients on their way, oldest first. Not kept: who has them may keep the mesh.
  std::deque<std::weak_ptr<UnitGradients>> sending_;
  absl::flat_hash_map<std::pair<int, int64_t>, std::shared_ptr<Communicator>> neighbours_;
  std::vector<std::pair<Way, c10::Stream>> lanes_;
  // What came after two units. Each kind of pass has an order of its own: where backward ends with two
  // units that forward went on from, nothing follows.
  enum class Pass : uint8_t { kEvaluation, kForward, kBackward };
  struct UnitsBefore {
    FsdpUnit *two = nullptr, *one = nullptr;
    Pass pass = Pass::kEvaluation;

    template <typename H>
    friend H AbslHashValue(H h, const UnitsBefore& b) {
      return H::combine(std::move(h), b.two, b.one, b.pass);
    }
    friend bool operator==(const UnitsBefore&, const UnitsBefore&) = default;
  };
  absl::flat_hash_map<UnitsBefore, Guess> next_;
  UnitsBefore
      expected_after_;  // as it was when the last one was touched: what comes is learnt under it
  bool in_backward_ = false;
  std::weak_ptr<const void> backward_;  // its callback: gone with it, also if it fails
};

class FsdpUnit final : public std::enable_shared_from_this<FsdpUnit> {
 public:
  struct Options {
    bool reshard_after_forward = true;
    // What operators see of the parameters, in what gradients are summed, and what operators give
    // that meet them; nullopt: as the parameters rest; as operators see them; as it comes.
    std::optional<at::ScalarType> param_dtype = {}, reduce_dtype = {}, output_dtype = {};
    // Where operators see them, if not where they rest: then those are on the CPU.
    std::optional<c10::Device> compute_device = {};
    // After forward it stays divided among so many neighbours, from whom backward gathers it; 0: it
    // rests.
    int64_t reshard_ranks = 0;
    std::source_location where;  // of the call of fully_shard()
  };

  // `parameters`: DTensors of one mesh, dtype and device, not cut along `mesh_dim`, which rest from
  // now on in `layouts`, those of flat_row_layouts(), or as equal_segments() says (null: it does not).
  static std::shared_ptr<FsdpUnit> create(std::string name,
                                          const std::vector<at::Tensor>& parameters,
                                          const std::vector<Layout>& layouts, int mesh_dim,
                                          const Options& options,
                                          const EqualSegments* segments = nullptr);
  ~FsdpUnit();

  const std::string& name() const { return name_; }
  int mesh_dim() const { return row_.mesh_dim(); }

  // Makes it full. Collective along the mesh dimension, unless it is.
  void touch() {
    last_use_ = context_->observation.counters.operators;
    if (!state_->sending_.empty()) [[unlikely]]
      state_->give_up_sent();
    if (state_->current_ != this || !is_full_ || !is_fresh()) [[unlikely]]
      state_->touch(*this);
    if (filled_.has_value()) join_stream();
  }

  const Options& options() const { return options_; }
  // And no copy of its handle.
  bool is_parameter(size_t index, const at::Tensor& handle) const {
    return parameters_[index].impl == handle.unsafeGetTensorImpl();
  }
  // Whether operators that meet its parameters, or views of those, work on tensors of other dtypes
  // than they were given, or give others.
  bool casts() const {
    return options_.param_dtype.has_value() || options_.output_dtype.has_value();
  }

  // What stands in for `handle`, the parameter or a copy of its handle, in an operator.
  at::Tensor used(size_t index, const at::Tensor& handle);
  // Once all of its parameters have been made: they move to where they rest.
  void pack_if_made();
  // The parts that rest are about to be written: nobody may be reading them.
  void settle();
  // FullParams: from here to dismiss() the parameters themselves are whole along the mesh
  // dimension, in memory of their own, on every rank. As often as it is dismissed. Collective.
  void summon(bool read_only);
  // `keeps`: what was written. It becomes the parameters' when the last one has been dismissed. Local.
  void dismiss(bool read_only, bool keeps);
  // Copies of them, one after the other, for one rank alone (elsewhere undefined), and back to where
  // they rest. Collective along the mesh dimension.
  at::Tensor gather_to(int64_t rank);
  void scatter_from(int64_t rank, const at::Tensor& flat);
  bool is_summoned() const { return summoned_ != nullptr; }
  // Whether somebody has summoned them to read them alone.
  bool is_read_only() const { return is_summoned() && summoned_->readers > 0; }
  // By FQN, in gather_to()'s memory or in that of summon(). Undefined where there is none.
  std::vector<std::pair<std::string, at::Tensor>> whole_parameters(const at::Tensor& flat) const;
  const at::Tensor& summoned_flat() const { return summoned_->flat; }
  // How parameter i lies while it is summoned.
  SpecRef whole_spec(size_t index) const;
  // Lent to one rank by gather_to(): nobody else may.
  bool is_lent = false;

  // The gradient of a parameter, brought to where that rests.
  at::Tensor resting_gradient(size_t index, const at::Tensor& grad);
  // Those of all that have one, under way; `node` has taken them.
  torch::autograd::variable_list reduce(torch::autograd::variable_list&& grads,
                                        const torch::autograd::Node& node);

 private:
  friend class FsdpState;
  struct Parameter final : LocalPart::Source {
    LocalPart::State state() const override { return LocalPart::State::kGatheredOnUse; }
    const at::Tensor& bring() override {
      unit->touch();
      return local;
    }
    // Undefined: it is gone.
    at::Tensor tensor() const;

    FsdpUnit* unit = nullptr;
    // Not a weak_intrusive_ptr: as long as there is one, LibTorch keeps a tensor's meta, which keeps
    // the unit.
    c10::TensorImpl* impl = nullptr;
    std::weak_ptr<const void> alive;  // what the tensor's hook has
    std::weak_ptr<ViewFamily> family;
    at::Tensor local;  // of the flat buffer
  };

  FsdpUnit(std::string name, FlatRow row, const Options& options);

  bool is_fresh() const { return gathered_version_ == shard_._version(); }
  bool is_alone() const { return row_.num_ranks() == 1; }  // on whom nothing is cut
  bool is_cast() const { return row_[0].whole->dtype != row_[0].kept->dtype; }
  bool is_elsewhere() const { return row_[0].whole->device != row_[0].kept->device; }
  // What rests is what operators see.
  bool is_at_hand() const { return is_alone() && !is_cast() && !is_elsewhere(); }
  std::optional<c10::Stream> lane(FsdpState::Way way) const;  // none: it is not elsewhere
  at::ScalarType reduce_dtype() const {
    return options_.reduce_dtype.value_or(row_[0].whole->dtype);
  }
  std::string parameter_name(size_t index) const;
  uint64_t provenance() const;
  void come_to_rest();
  void exchange(int64_t rank, const at::Tensor& flat, const at::Tensor& stretch, bool to_rank);
  int64_t flat_bytes() const;
  Cause cause() const {
    return {.name = kFullyShard, .where = options_.where, .subject = subject_};
  }
  void pack();
  void make_full();
  void begin_gather();
  void finish_gather();
  void bring_stretch(const at::Tensor& to) const;
  void wait_for_read();
  void let_go();
  void note_filled();
  void join_stream();
  void keep_for_stream(const at::Tensor& tensor) const;
  void reshard(bool keeps_part = false);
  void keep_part();
  void drop_part();
  CollectiveUnderWay gather_from_neighbours();
  bool holds(const torch::autograd::Node* accumulation) const;
  void send_held();
  torch::autograd::variable_list hold(torch::autograd::variable_list& grads,
                                      const torch::autograd::Node& node);
  std::vector<at::Tensor> add_held(torch::autograd::variable_list& grads,
                                   const torch::autograd::Node& node);
  torch::autograd::variable_list bring_to_rest(torch::autograd::variable_list&& grads);
  bool has_room_for(const at::TensorOptions& gradients) const {
    return is_allocated_ && gradients.dtype() == flat_.dtype();
  }
  at::Tensor gradient_buffer(int64_t numel, const at::TensorOptions& options);
  std::shared_ptr<UnitGradients> send(torch::autograd::variable_list& grads);
  void begin_copies(torch::autograd::variable_list& grads);
  // The unit's own, for its parameters; of a copy of a handle (detach()) one for that alone.
  std::shared_ptr<torch::autograd::Node> node(size_t index, const at::Tensor& handle);

  const std::string name_;
  const std::string subject_;  // in errors of collectives
  const FlatRow row_;          // of the parameters
  const std::shared_ptr<MeshContext> context_;
  const std::shared_ptr<FsdpState> state_;
  const Options options_;
  std::vector<Parameter> parameters_;
  at::Tensor shard_;           // this rank's; undefined while parameters are deferred
  at::Tensor flat_;            // all ranks'; of one rank the same
  bool is_allocated_ = false;  // the flat buffer
  bool is_full_ = false;
  uint32_t gathered_version_ = 0;  // of the shard
  int64_t last_use_ = 0;           // in operators of the mesh
  std::optional<CollectiveUnderWay> under_way_;
  bool is_begun_ = false;                   // to gather
  std::optional<c10::Event> read_;          // what rests on the CPU has been; none: nobody reads it
  std::optional<c10::Event> filled_;        // on a device: the flat buffer,
  std::vector<c10::Stream> may_read_;       // and the streams that wait for that
  bool is_to_keep_part_ = false;            // when it is emptied: backward comes
  at::Tensor part_;                         // of what neighbours keep between forward and backward
  uint32_t part_version_ = 0;               // of the shard
  std::shared_ptr<UnitGradients> sending_;  // from the flat buffer; null: nobody uses that
  struct Summoned {
    at::Tensor flat;
    int scopes = 0, readers = 0;
    bool keeps = false;
  };
  std::unique_ptr<Summoned> summoned_;         // null: the parameters rest
  std::weak_ptr<torch::autograd::Node> node_;  // as long as a graph has it
  int node_made_in_ = -1;                      // backward; -1: in none
};

// Of a parameter, as it rests or as it is used, and of views of it. Null: no unit has it.
inline const Resting* known_to_rest(const at::Tensor& tensor) {
  if (!tensor.defined() || !is_dtensor(tensor.unsafeGetTensorImpl())) return nullptr;
  const DTensorMeta& meta = meta_of(tensor);
  return meta.family == nullptr ? nullptr : meta.family->resting.get();
}

// Null: it does not rest.
inline const Resting* resting_of(const at::Tensor& tensor) {
  const Resting* resting = known_to_rest(tensor);
  return resting != nullptr && meta_of(tensor).spec == resting->spec ? resting : nullptr;
}

// The parameter itself, as it rests or while it is summoned.
inline const Resting* in_unit(const at::Tensor& tensor) {
  const Resting* known = known_to_rest(tensor);
  if (known == nullptr || meta_of(tensor).spec == known->spec) return known;
  const bool is_whole = known->unit->is_summoned() && tensor.is_leaf() &&
                        meta_of(tensor).spec == known->unit->whole_spec(known->index);
  return is_whole ? known : nullptr;
}

// What mixed precision casts, and to what: numbers of eight bits have scales that it does not know,
// and of complex ones half would be lost.
inline bool is_castable(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat ||
         dtype == at::kDouble;
}

// Puts what is used in place of parameters that rest, where the operator is not one that works on
// them as they rest: what writes them, an optimizer's, what only asks for their shape. Throws Error
// (FailedPrecondition) for what would move a parameter from where it rests. What the operator takes
// beside them, or beside views of them (torch::nn's linear takes `weight.t()`), becomes of the dtype
// of the first one's unit; that which its results are to have is returned.
std::optional<at::ScalarType> use_parameters(const c10::OperatorHandle& op, c10::Stack* stack);
// Its results that are the parameter itself (detach) are seen again, as are views of it if its unit
// casts.
void follow_resting(const c10::IValue& result);
// The parameter's data is about to be replaced (module->to()).
void check_stays(const at::Tensor& target, const at::Tensor& source);

// A result of an operator that shares the memory of a unit is gathered when it is used.
void follow_unit(const FsdpState& state, DTensorMeta& result);

}  // namespace shardweave::dtensor_internal
