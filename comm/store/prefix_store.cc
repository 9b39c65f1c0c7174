#include "shardweave/comm/store/prefix_store.h"

#include <utility>

namespace shardweave {
namespace {

class PrefixStore : public Store {
 public:
  PrefixStore(std::shared_ptr<Store> store, std::string prefix)
      : store_(std::move(store)), prefix_(std::move(prefix)) {}

  std::string describe() const override { return store_->describe(); }

 private:
  absl::Status do_set(std::string_view key, std::string_view value) override {
    return store_->set(prefixed(key), value);
  }
  absl::StatusOr<std::string> do_get(std::string_view key, absl::Duration timeout) override {
    return store_->get(prefixed(key), timeout);
  }
  absl::StatusOr<int64_t> do_add(std::string_view key, int64_t delta) override {
    return store_->add(prefixed(key), delta);
  }
  absl::Status do_wait(const std::vector<std::string>& keys, absl::Duration timeout) override {
    return store_->wait(prefixed(keys), timeout);
  }
  absl::StatusOr<bool> do_check(const std::vector<std::string>& keys) override {
    return store_->check(prefixed(keys));
  }
  absl::StatusOr<bool> do_remove(std::string_view key) override {
    return store_->remove(prefixed(key));
  }
  std::string prefixed(std::string_view key) const { return prefix_ + std::string(key); }
  std::vector<std::string> prefixed(const std::vector<std::string>& keys) const {
    std::vector<std::string> result;
    result.reserve(keys.size());
    for (const std::string& key : keys) result.push_back(prefixed(key));
    return result;
  }

  const std::shared_ptr<Store> store_;
  const std::string prefix_;
};

}  // namespace

std::shared_ptr<Store> make_prefix_store(std::shared_ptr<Store> store, std::string prefix) {
  return std::make_shared<PrefixStore>(std::move(store), std::move(prefix));
}

}  // namespace shardweave
