#include "shardweave/comm/store/in_process_store.h"

#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "shardweave/comm/store/store_errors.h"

namespace shardweave {
namespace {

class InProcessStore : public Store {
 public:
  std::string describe() const override { return "in-process store"; }

 private:
  absl::Status do_set(std::string_view key, std::string_view value) override {
    absl::MutexLock lock(&mutex_);
    values_.insert_or_assign(std::string(key), std::string(value));
    return absl::OkStatus();
  }

  absl::StatusOr<std::string> do_get(std::string_view key, absl::Duration timeout) override {
    const std::string name(key);
    absl::MutexLock lock(&mutex_);
    auto present = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return values_.contains(name); };
    if (!mutex_.AwaitWithTimeout(absl::Condition(&present), timeout)) {
      return store_errors::missing_keys(*this, {name}, timeout);
    }
    return values_.find(name)->second;
  }

  absl::StatusOr<int64_t> do_add(std::string_view key, int64_t delta) override {
    absl::MutexLock lock(&mutex_);
    std::string& value = values_.try_emplace(std::string(key), "0").first->second;
    absl::StatusOr<int64_t> sum = store_errors::add_to_counter(*this, key, value, delta);
    if (sum.ok()) value = absl::StrCat(*sum);
    return sum;
  }

  absl::Status do_wait(const std::vector<std::string>& keys, absl::Duration timeout) override {
    absl::MutexLock lock(&mutex_);
    auto present = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return missing(keys).empty(); };
    if (mutex_.AwaitWithTimeout(absl::Condition(&present), timeout)) return absl::OkStatus();
    return store_errors::missing_keys(*this, missing(keys), timeout);
  }

  absl::StatusOr<bool> do_check(const std::vector<std::string>& keys) override {
    absl::MutexLock lock(&mutex_);
    return missing(keys).empty();
  }

  absl::StatusOr<bool> do_remove(std::string_view key) override {
    absl::MutexLock lock(&mutex_);
    return values_.erase(std::string(key)) > 0;
  }

  std::vector<std::string> missing(const std::vector<std::string>& keys) const
      ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    std::vector<std::string> result;
    for (const std::string& key : keys) {
      if (!values_.contains(key)) result.push_back(key);
    }
    return result;
  }

  absl::Mutex mutex_;
  absl::flat_hash_map<std::string, std::string> values_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

std::shared_ptr<Store> make_in_process_store() {
  return std::make_shared<InProcessStore>();
}

}  // namespace shardweave
