// What an exception also derives from that carries an absl::Status: who catches it and does not know
// LibTorch, as run_ranks(), can keep its code.
//
//   try {
//     redistribute(tensor, {Shard(0)});  // throws Error, which is a c10::Error and one of these
//   } catch (const StatusException& e) {
//     return e.status();
//   }
#pragma once

#include "absl/status/status.h"

namespace shardweave {

class StatusException {
 public:
  // Never OK.
  virtual const absl::Status& status() const = 0;

 protected:
  ~StatusException() = default;
};

}  // namespace shardweave
