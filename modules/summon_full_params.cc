#include "shardweave/modules/summon_full_params.h"

#include <algorithm>
#include <exception>

#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/engine/checksum.h"
#include "shardweave/dtensor/engine/deferred.h"
#include "shardweave/dtensor/engine/fsdp_unit.h"
#include "shardweave/dtensor/engine/members.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "torch/nn/module.h"

namespace shardweave {
namespace {

using namespace dtensor_internal;

constexpr char kFullParams[] = "FullParams";

[[noreturn]] void refuse_params(absl::StatusCode code, const std::string& why) {
  throw Error(kFullParams, absl::Status(code, why));
}

}  // namespace

class FullParams::State {
 public:
  State(const torch::nn::Module& module, const FullParamsOptions& options,
        std::source_location where);
  ~State() { leave(/*keeps=*/false); }

  void end();
  const std::vector<std::pair<std::string, at::Tensor>>& parameters() const { return parameters_; }

 private:
  void check(const std::vector<Member>& members) const;
  void leave(bool keeps) noexcept;

  const FullParamsOptions options_;
  std::shared_ptr<MeshContext> context_;
  std::vector<std::shared_ptr<FsdpUnit>> units_;  // all of them,
  size_t entered_ = 0;                            // of which so many are in the scope
  std::vector<at::Tensor> flats_;                 // of units, with a rank
  std::vector<std::pair<std::string, at::Tensor>> parameters_;
};

FullParams::State::State(const torch::nn::Module& module, const FullParamsOptions& options,
                         std::source_location where)
    : options_(options) {
  const std::vector<Member> members = members_of(module);
  for (const Member& member : members) {
    if (context_ == nullptr && is_dtensor(member.tensor)) context_ = meta_of(member.tensor).context;
    const Resting* resting = in_unit(member.tensor);
    if (resting == nullptr) continue;
    if (std::find(units_.begin(), units_.end(), resting->unit) == units_.end()) {
      units_.push_back(resting->unit);
    }
  }
  if (context_ == nullptr) {
    refuse_params(absl::StatusCode::kFailedPrecondition,
                  "no parameter of the module is on a mesh; shard it fully first");
  }
  Agreement agreement(*context_, {.name = kFullParams, .where = where});
  check(members);
  std::vector<uint64_t> sums = {checksum(
      options_.writeback ? 1 : 0, options_.rank.has_value() ? str_cat(*options_.rank) : "all")};
  for (const std::shared_ptr<FsdpUnit>& unit : units_) {
    uint64_t sum = checksum(static_cast<uint64_t>(unit->mesh_dim()), unit->name());
    for (const auto& [fqn, nothing] : unit->whole_parameters({})) sum = checksum(sum, fqn);
    sums.push_back(sum);
  }
  if (const std::optional<Difference> differs = agreement.reach(sums)) {
    const std::string ranks =
        str_cat(" not the same on ranks ", differs->ranks[0], " and ", differs->ranks[1]);
    refuse_params(absl::StatusCode::kInvalidArgument,
                  differs->index == 0 ? str_cat("the options are", ranks)
                                      : str_cat("the units of the module are", ranks));
  }
  try {
    for (const std::shared_ptr<FsdpUnit>& unit : units_) {
      at::Tensor flat;
      if (options_.rank.has_value()) {
        flat = unit->gather_to(*options_.rank);
        flats_.push_back(flat);
        unit->is_lent = true;
      } else {
        unit->summon(!options_.writeback);
        flat = unit->summoned_flat();
      }
      ++entered_;
      for (auto& parameter : unit->whole_parameters(flat)) {
        parameters_.push_back(std::move(parameter));
      }
    }
  } catch (...) {
    leave(/*keeps=*/false);
    throw;
  }
}

void FullParams::State::check(const std::vector<Member>& members) const {
  using enum absl::StatusCode;
  if (units_.empty()) {
    refuse_params(kFailedPrecondition, "no parameter of the module is fully sharded");
  }
  for (const Member& member : members) {
    if (in_unit(member.tensor) == nullptr) continue;
    const DTensorMeta& meta = meta_of(member.tensor);
    if (meta.context != context_) {
      refuse_params(kInvalidArgument, str_cat("'", member.fqns[0],
                                              "' is fully sharded on another mesh than others; "
                                              "summon the modules of one mesh at a time"));
    }
    if (dtensor_internal::is_deferred(member.tensor)) {
      refuse_params(kFailedPrecondition,
                    str_cat("'", member.fqns[0], "' is not made yet: materialize it first"));
    }
  }
  for (const std::shared_ptr<FsdpUnit>& unit : units_) {
    const int64_t ranks = context_->mesh().size(unit->mesh_dim());
    const std::string which = str_cat("the unit '", unit->name(), "'");
    if (options_.rank.has_value() && (*options_.rank < 0 || *options_.rank >= ranks)) {
      refuse_params(kInvalidArgument,
                    str_cat("rank is ", *options_.rank, "; wanted 0 to ", ranks - 1, " along '",
                            std::string(context_->mesh().name(unit->mesh_dim())), "'"));
    }
    if (unit->is_lent || (unit->is_summoned() && options_.rank.has_value())) {
      refuse_params(kFailedPrecondition,
                    str_cat(which, " is summoned already, ", unit->is_lent ? "to" : "and not to",
                            " one rank; end that scope first"));
    }
    if (unit->is_read_only() && options_.writeback) {
      refuse_params(kFailedPrecondition,
                    str_cat(which,
                            " is summoned already to be read alone: nothing may be "
                            "written until that scope ends"));
    }
  }
}

void FullParams::State::leave(bool keeps) noexcept {
  for (size_t u = 0; u < entered_; ++u) {
    if (options_.rank.has_value()) {
      units_[u]->is_lent = false;
    } else {
      units_[u]->dismiss(!options_.writeback, keeps);
    }
  }
  entered_ = 0;
}

void FullParams::State::end() {
  if (options_.rank.has_value() && options_.writeback) {
    try {
      for (size_t u = 0; u < entered_; ++u) units_[u]->scatter_from(*options_.rank, flats_[u]);
    } catch (...) {
      leave(/*keeps=*/false);
      throw;
    }
  }
  leave(/*keeps=*/options_.writeback);
}

FullParams::FullParams(const torch::nn::Module& module, const FullParamsOptions& options,
                       std::source_location where)
    : state_(std::make_unique<State>(module, options, where)),
      exceptions_(std::uncaught_exceptions()) {}

FullParams::~FullParams() noexcept(false) {
  if (state_ == nullptr) return;
  if (std::uncaught_exceptions() > exceptions_) {
    drop();
  } else {
    end();
  }
}

const std::vector<std::pair<std::string, at::Tensor>>& FullParams::parameters() const {
  static const std::vector<std::pair<std::string, at::Tensor>> none;
  return state_ == nullptr ? none : state_->parameters();
}

at::Tensor FullParams::parameter(std::string_view fqn) const {
  for (const auto& [name, tensor] : parameters()) {
    if (name == fqn) return tensor;
  }
  refuse_params(absl::StatusCode::kNotFound,
                str_cat("no parameter of the scope is called '", std::string(fqn), "'",
                        state_ == nullptr ? ": it has ended" : ""));
}

void FullParams::end() {
  const std::unique_ptr<State> ending = std::move(state_);
  if (ending != nullptr) ending->end();
}

void FullParams::drop() noexcept {
  state_.reset();
}

}  // namespace shardweave
