#include "shardweave/comm/counting/counting.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "shardweave/comm/str_cat.h"

namespace shardweave {
namespace {

// In elements.
struct Piece {
  int64_t begin = 0, size = 0;
};

// What this rank's `in` has for itself.
Piece own_piece(const GroupInfo& group, const Call& call) {
  switch (call.op) {
    case OpKind::kReduceScatter:
    case OpKind::kAllToAll:
    case OpKind::kScatter: {
      const int64_t size = call.in.count / group.size();
      return {group.rank * size, size};
    }
    case OpKind::kReduceScatterV:
    case OpKind::kAllToAllV:
      return {
          std::accumulate(call.in_counts.begin(), call.in_counts.begin() + group.rank, int64_t{0}),
          call.in_counts[group.rank]};
    default:
      return {0, call.in.count};
  }
}

// What `out` gets from each rank.
std::vector<int64_t> arriving(const GroupInfo& group, const Call& call) {
  switch (call.op) {
    case OpKind::kAllGatherV:
    case OpKind::kAllToAllV:
      return {call.out_counts.begin(), call.out_counts.end()};
    case OpKind::kAllGather:
    case OpKind::kAllToAll:
    case OpKind::kGather:
      return std::vector<int64_t>(group.size(), call.out.count / group.size());
    default:
      return {call.out.count};
  }
}

// As CountingOptions::stand_in says.
void stand_in(const GroupInfo& group, const Call& call) {
  if (call.out.count == 0 || call.out.data == call.in.data) return;
  if (call.out.device.type != DeviceType::kCpu || call.in.device.type != DeviceType::kCpu) return;
  const int64_t element = element_size(call.out.dtype);
  const Piece mine = own_piece(group, call);
  const auto* from = static_cast<const char*>(call.in.data);
  auto* to = static_cast<char*>(call.out.data);
  for (const int64_t count : arriving(group, call)) {
    const int64_t given = std::min(count, mine.size);
    if (given > 0) std::memcpy(to, from + mine.begin * element, given * element);
    if (count > given) std::memset(to + given * element, 0, (count - given) * element);
    to += count * element;
  }
}

class CountingBackend : public Backend {
 public:
  CountingBackend(GroupInfo info, std::shared_ptr<CountingLog> log, const CountingOptions& options)
      : Backend(info),
        shared_info_(std::make_shared<const GroupInfo>(std::move(info))),
        log_(std::move(log)),
        options_(options) {}

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
    if (options_.stand_in) stand_in(group(), call);
    return kDone;
  }

  absl::StatusOr<std::unique_ptr<Backend>> subgroup(GroupInfo info, absl::Span<const int>,
                                                    std::string_view, Deadline) override {
    return std::make_unique<CountingBackend>(std::move(info), log_, options_);
  }

  void abort(const absl::Status&) override {}  // there is nobody else

 private:
  const std::shared_ptr<const GroupInfo> shared_info_;  // for those who outlive this
  const std::shared_ptr<CountingLog> log_;
  const CountingOptions options_;
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

absl::StatusOr<std::shared_ptr<Communicator>> count_communication(int rank, int num_ranks,
                                                                  std::shared_ptr<CountingLog> log,
                                                                  const CountingOptions& options) {
  if (rank < 0 || rank >= num_ranks) {
    return absl::InvalidArgumentError(str_cat("rank ", rank, " is not in a world of ", num_ranks));
  }
  GroupInfo info{.name = "world", .rank = rank, .world_ranks = std::vector<int64_t>(num_ranks)};
  std::iota(info.world_ranks.begin(), info.world_ranks.end(), 0);
  return Communicator::create(
      std::make_unique<CountingBackend>(std::move(info), std::move(log), options));
}

}  // namespace shardweave
