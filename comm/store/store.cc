#include "shardweave/comm/store/store.h"

#include "absl/strings/str_cat.h"

namespace shardweave {
namespace {

absl::Status check_key(const Store& store, std::string_view key) {
  if (!key.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(store.describe(), ": the empty string is not a key"));
}

absl::Status check_keys(const Store& store, const std::vector<std::string>& keys) {
  for (const std::string& key : keys) {
    if (absl::Status status = check_key(store, key); !status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status Store::set(std::string_view key, std::string_view value) {
  if (absl::Status status = check_key(*this, key); !status.ok()) return status;
  return do_set(key, value);
}

absl::StatusOr<std::string> Store::get(std::string_view key, absl::Duration timeout) {
  if (absl::Status status = check_key(*this, key); !status.ok()) return status;
  return do_get(key, timeout);
}

absl::StatusOr<int64_t> Store::add(std::string_view key, int64_t delta) {
  if (absl::Status status = check_key(*this, key); !status.ok()) return status;
  return do_add(key, delta);
}

absl::Status Store::wait(const std::vector<std::string>& keys, absl::Duration timeout) {
  if (absl::Status status = check_keys(*this, keys); !status.ok()) return status;
  return do_wait(keys, timeout);
}

absl::StatusOr<bool> Store::check(const std::vector<std::string>& keys) {
  if (absl::Status status = check_keys(*this, keys); !status.ok()) return status;
  return do_check(keys);
}

absl::StatusOr<bool> Store::remove(std::string_view key) {
  if (absl::Status status = check_key(*this, key); !status.ok()) return status;
  return do_remove(key);
}

}  // namespace shardweave
