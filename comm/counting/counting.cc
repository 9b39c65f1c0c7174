#include "shardweave/comm/counting/counting.h"

#include <algorithm>
#include <numeric>

#include "shardweave/comm/str_cat.h"

namespace shardweave {
namespace {

class CountingBackend : public Backend {
 public:
  CountingBackend(GroupInfo info, std::shared_ptr<CountingLog> log)
      : Backend(info),
        shared_info_(std::make_shared<const GroupInfo>(std::move(info))),
        log_(std::move(log)) {}

  std::string_view name() const override { return "counting"; }
  // Nothing is touched, so it may lie anywhere.
  bool supports(DeviceType) const override { return true; }
  bool implements(OpKind) const override { return true; }
  bool moves_data() const override { return false; }

  absl::StatusOr<Ticket> start(const Call& call) override {
    log_->add({.op = call.op,
               .dtype = call.in.dtype,
               .bytes = std::max(call.in.bytes(), call.out.bytes()),
               .group = shared_info_,
               .tag = std::string(call.tag)});
    return kDone;
  }

  absl::StatusOr<std::unique_ptr<Backend>> subgroup(GroupInfo info, absl::Span<const int>,
                                                    std::string_view, Deadline) override {
    return std::make_unique<CountingBackend>(std::move(info), log_);
  }

  void abort(const absl::Status&) override {}  // there is nobody else

 private:
  const std::shared_ptr<const GroupInfo> shared_info_;  // for those who outlive this
  const std::shared_ptr<CountingLog> log_;
};

}  // namespace

std::vector<CountedOperation> CountingLog::operations() const {
  std::lock_guard lock(mutex_);
  return operations_;
}

std::map<std::pair<std::string, OpKind>, OpCounter> CountingLog::totals() const {
  std::lock_guard lock(mutex_);
  std::map<std::pair<std::string, OpKind>, OpCounter> totals;
  for (const CountedOperation& operation : operations_) {
    OpCounter& total = totals[{operation.group->name, operation.op}];
    total.calls += 1;
    total.bytes += operation.bytes;
  }
  return totals;
}

void CountingLog::add(CountedOperation operation) {
  std::lock_guard lock(mutex_);
  operations_.push_back(std::move(operation));
}

void CountingLog::clear() {
  std::lock_guard lock(mutex_);
  operations_.clear();
}

absl::StatusOr<std::shared_ptr<Communicator>> count_communication(
    int rank, int num_ranks, std::shared_ptr<CountingLog> log) {
  if (rank < 0 || rank >= num_ranks) {
    return absl::InvalidArgumentError(str_cat("rank ", rank, " is not in a world of ", num_ranks));
  }
  GroupInfo info{.name = "world", .rank = rank, .world_ranks = std::vector<int64_t>(num_ranks)};
  std::iota(info.world_ranks.begin(), info.world_ranks.end(), 0);
  return Communicator::create(std::make_unique<CountingBackend>(std::move(info), std::move(log)));
}

}  // namespace shardweave
