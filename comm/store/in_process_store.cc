#include "shardweave/comm/store/in_process_store.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "shardweave/comm/store/store_errors.h"

namespace shardweave {
namespace {

// A year is for ever; the clock's arithmetic cannot take more.
std::chrono::steady_clock::time_point wait_deadline(absl::Duration timeout) {
  return std::chrono::steady_clock::now() +
         absl::ToChronoNanoseconds(std::min(timeout, absl::Hours(24 * 365)));
}

class InProcessStore : public Store {
 public:
  std::string describe() const override { return "in-process store"; }

 private:
  absl::Status do_set(std::string_view key, std::string_view value) override {
    std::lock_guard lock(mutex_);
    values_.insert_or_assign(std::string(key), std::string(value));
    changed_.notify_all();
    return absl::OkStatus();
  }

  absl::StatusOr<std::string> do_get(std::string_view key, absl::Duration timeout) override {
    const std::string name(key);
    std::unique_lock lock(mutex_);
    auto present = [&] { return values_.contains(name); };
    if (!changed_.wait_until(lock, wait_deadline(timeout), present)) {
      return store_errors::missing_keys(*this, {name}, timeout);
    }
    return values_.find(name)->second;
  }

  absl::StatusOr<int64_t> do_add(std::string_view key, int64_t delta) override {
    std::lock_guard lock(mutex_);
    std::string& value = values_.try_emplace(std::string(key), "0").first->second;
    absl::StatusOr<int64_t> sum = store_errors::add_to_counter(*this, key, value, delta);
    if (sum.ok()) value = absl::StrCat(*sum);
    changed_.notify_all();
    return sum;
  }

  absl::Status do_wait(const std::vector<std::string>& keys, absl::Duration timeout) override {
    std::unique_lock lock(mutex_);
    auto present = [&] { return missing(keys).empty(); };
    if (changed_.wait_until(lock, wait_deadline(timeout), present)) return absl::OkStatus();
    return store_errors::missing_keys(*this, missing(keys), timeout);
  }

  absl::StatusOr<bool> do_check(const std::vector<std::string>& keys) override {
    std::lock_guard lock(mutex_);
    return missing(keys).empty();
  }

  absl::StatusOr<bool> do_remove(std::string_view key) override {
    std::lock_guard lock(mutex_);
    return values_.erase(std::string(key)) > 0;
  }

  // Needs mutex_.
  std::vector<std::string> missing(const std::vector<std::string>& keys) const {
    std::vector<std::string> result;
    for (const std::string& key : keys) {
      if (!values_.contains(key)) result.push_back(key);
    }
    return result;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  absl::flat_hash_map<std::string, std::string> values_;  // guarded by mutex_
};

}  // namespace

std::shared_ptr<Store> make_in_process_store() {
  return std::make_shared<InProcessStore>();
}

}  // namespace shardweave
