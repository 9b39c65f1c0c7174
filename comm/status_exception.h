// What an exception also derives from that carries an absl::Status: who catches it and does not know
// LibTorch, as run_ranks(), can keep its code.
//
//   try {
//     redistribute(tensor, {Shard(0)});  // throws Error, which is a c10::Error and one of these
//   } catch (const StatusException& e) {
//     return e.status();
//   }
#pragma once

#include <exception>
#include <string>

#include "absl/status/status.h"

namespace shardweave {

class StatusException {
 public:
  // Never OK.
  virtual const absl::Status& status() const = 0;

 protected:
  ~StatusException() = default;
};

// What it says, without the backtrace that LibTorch puts at the end of it (c10::Error, as its
// what_without_backtrace()): "Exception raised from ..., frame #0: ...".
inline std::string message_of(const std::exception& exception) {
  std::string message = exception.what();
  const size_t backtrace = message.find("\nException raised from ");
  if (backtrace != std::string::npos) message.resize(backtrace);
  return message;
}

}  // namespace shardweave
