// The counting backend moves nothing: it writes down what one rank would communicate, in a world of
// any size and without the other ranks. For planning before there is hardware.
//
//   auto log = std::make_shared<CountingLog>();
//   auto comm = count_communication(/*rank=*/7, /*num_ranks=*/65536, log);
//   train_step(**comm);                                  // outputs stay as they were, or stand in
//   log->totals()[{"dp", OpKind::kAllReduce}].bytes;
//
// Every operation is done and OK when it is issued. Groups are made by subgroup(); split() is
// Unimplemented, as this rank cannot know the colors of others.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "shardweave/comm/communicator.h"

namespace shardweave {

struct CountedOperation {
  OpKind op;
  DType dtype;
  int64_t bytes;  // as in OpCounter: of the larger of the two buffers
  std::shared_ptr<const GroupInfo> group;
  std::string tag;
};

// What was counted, in order of issue, over all groups. Any thread may use it.
class CountingLog {
 public:
  std::vector<CountedOperation> operations() const;
  // By the group's name and the operation.
  std::map<std::pair<std::string, OpKind>, OpCounter> totals() const;
  void add(CountedOperation operation);
  void clear();

 private:
  mutable std::mutex mutex_;
  std::vector<CountedOperation> operations_;  // guarded by mutex_
};

struct CountingOptions {
  // Outputs on the CPU become what they would be if every other rank gave what this one gives, or
  // nothing where this one gives nothing: what is computed from them is not what ranks would
  // compute, but indices stay indices and sizes sizes. (Sums are this rank's summands.)
  bool stand_in = false;
};

// The communicator of `rank` over ranks [0, num_ranks). InvalidArgument if there is no such rank.
absl::StatusOr<std::shared_ptr<Communicator>> count_communication(
    int rank, int num_ranks, std::shared_ptr<CountingLog> log, const CountingOptions& options = {});

}  // namespace shardweave
