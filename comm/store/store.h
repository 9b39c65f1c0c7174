// A Store is a small key-value table that the ranks of a job share while they find each other.
//
//   std::shared_ptr<Store> store = ...;                          // in-process, file or TCP
//   store->set(absl::StrCat("address/", rank), my_address);
//   auto peer = store->get("address/0", absl::Seconds(30));      // waits until rank 0 has set it
//   auto arrived = store->add("arrived", 1);                     // atomic counter
//
// Keys are any bytes but the empty string, values any bytes; meant for kilobytes, not for tensors.
//
// Threads: all functions may be called from several threads at once. A call that waits holds no
// lock that would stop the others.
//
// Errors: DeadlineExceeded when a key did not appear in time (the message lists the missing keys
// and the store), Unavailable when the store itself cannot be reached, InvalidArgument for an empty
// key or for a counter whose value is not a decimal number.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace shardweave {

class Store {
 public:
  virtual ~Store() = default;

  // Replaces what was there. Readers see the old or the new value, never a mixture.
  absl::Status set(std::string_view key, std::string_view value);
  // Waits up to `timeout` for the key. A zero timeout looks once.
  absl::StatusOr<std::string> get(std::string_view key, absl::Duration timeout);
  // Adds to the counter `key` (0 if it is not there) and returns the sum; atomic among all ranks.
  // A counter is a decimal number: get() returns it as text, and set() may start it.
  absl::StatusOr<int64_t> add(std::string_view key, int64_t delta);
  // Waits until all keys are there.
  absl::Status wait(const std::vector<std::string>& keys, absl::Duration timeout);
  // Whether all keys are there now.
  absl::StatusOr<bool> check(const std::vector<std::string>& keys);
  // Whether the key was there.
  absl::StatusOr<bool> remove(std::string_view key);

  // Where it is, for messages: "file store /tmp/job7".
  virtual std::string describe() const = 0;

 private:
  // The same with keys that are not empty.
  virtual absl::Status do_set(std::string_view key, std::string_view value) = 0;
  virtual absl::StatusOr<std::string> do_get(std::string_view key, absl::Duration timeout) = 0;
  virtual absl::StatusOr<int64_t> do_add(std::string_view key, int64_t delta) = 0;
  virtual absl::Status do_wait(const std::vector<std::string>& keys, absl::Duration timeout) = 0;
  virtual absl::StatusOr<bool> do_check(const std::vector<std::string>& keys) = 0;
  virtual absl::StatusOr<bool> do_remove(std::string_view key) = 0;
};

}  // namespace shardweave
