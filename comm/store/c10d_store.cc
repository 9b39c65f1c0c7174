#include "shardweave/comm/store/c10d_store.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <limits>
#include <mutex>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "shardweave/comm/store/store_errors.h"
#include "shardweave/comm/store/tcp_probe.h"

namespace shardweave {
namespace {

std::chrono::milliseconds milliseconds(absl::Duration duration) {
  // At least 1: c10d takes 0 for "for ever". At most what fits its poll().
  return std::chrono::milliseconds(
      std::clamp<int64_t>(absl::ToInt64Milliseconds(duration), 1, std::numeric_limits<int>::max()));
}

// Of another client; the first one has found the server there.
constexpr absl::Duration kMaxReconnect = absl::Seconds(10);

// What LibTorch says, without its stack trace.
std::string first_line(const char* what) {
  const std::vector<std::string> lines = absl::StrSplit(what, absl::MaxSplits('\n', 1));
  return lines[0];
}

class TcpStore : public C10dStore {
 public:
  using Client = c10::intrusive_ptr<c10d::TCPStore>;

  // The first client, with the server if this process has it.
  explicit TcpStore(Client first) : first_(std::move(first)), idle_({first_}) {}

  uint16_t port() const override { return first_->getPort(); }
  std::string describe() const override {
    return absl::StrCat("TCP store ", first_->getHost(), ":", first_->getPort());
  }

 private:
  absl::Status do_set(std::string_view key, std::string_view value) override {
    return call([&](c10d::TCPStore& store) {
      store.set(std::string(key), std::vector<uint8_t>(value.begin(), value.end()));
      return absl::OkStatus();
    });
  }

  absl::StatusOr<std::string> do_get(std::string_view key, absl::Duration timeout) override {
    const std::string name(key);
    if (absl::Status status = do_wait({name}, timeout); !status.ok()) return status;
    std::string value;
    absl::Status status = call([&](c10d::TCPStore& store) {
      const std::vector<uint8_t> bytes = store.get(name);
      value.assign(bytes.begin(), bytes.end());
      return absl::OkStatus();
    });
    if (!status.ok()) return status;
    return value;
  }

  absl::StatusOr<int64_t> do_add(std::string_view key, int64_t delta) override {
    const std::string name(key);
    int64_t sum = 0;
    absl::Status status = call([&](c10d::TCPStore& store) -> absl::Status {
      // The server does not survive text that is no number.
      if (store.check({name})) {
        const std::vector<uint8_t> bytes = store.get(name);
        const std::string text(bytes.begin(), bytes.end());
        absl::Status counts = store_errors::add_to_counter(*this, key, text, delta).status();
        if (!counts.ok()) return counts;
      }
      sum = store.add(name, delta);
      return absl::OkStatus();
    });
    if (!status.ok()) return status;
    return sum;
  }

  absl::Status do_wait(const std::vector<std::string>& keys, absl::Duration timeout) override {
    if (keys.empty()) return absl::OkStatus();
    return call([&](c10d::TCPStore& store) -> absl::Status {
      if (timeout > absl::ZeroDuration()) {
        try {
          store.wait(keys, milliseconds(timeout));
          return absl::OkStatus();
        } catch (const c10::DistStoreError&) {
          // Its message lists no keys.
        }
      }
      std::vector<std::string> missing;
      for (const std::string& key : keys) {
        if (!store.check({key})) missing.push_back(key);
      }
      if (missing.empty()) return absl::OkStatus();
      return store_errors::missing_keys(*this, missing, timeout);
    });
  }

  absl::StatusOr<bool> do_check(const std::vector<std::string>& keys) override {
    if (keys.empty()) return true;
    bool there = false;
    absl::Status status = call([&](c10d::TCPStore& store) {
      there = store.check(keys);
      return absl::OkStatus();
    });
    if (!status.ok()) return status;
    return there;
  }

  absl::StatusOr<bool> do_remove(std::string_view key) override {
    bool there = false;
    absl::Status status = call([&](c10d::TCPStore& store) {
      there = store.deleteKey(std::string(key));
      return absl::OkStatus();
    });
    if (!status.ok()) return status;
    return there;
  }

  template <typename Body>
  absl::Status call(Body body) {
    try {
      const Client client = take();
      absl::Status status;
      try {
        status = body(*client);
      } catch (...) {
        give_back(client);  // broken perhaps: then the next call says so at once
        throw;
      }
      give_back(client);
      return status;
    } catch (const c10::Error& e) {
      return absl::UnavailableError(
          absl::StrCat(describe(), ": ", first_line(e.what_without_backtrace())));
    } catch (const std::exception& e) {
      return absl::UnavailableError(absl::StrCat(describe(), ": ", first_line(e.what())));
    }
  }

  // A client that no other thread uses meanwhile: one that waits for a key serves nobody else.
  Client take() {
    {
      std::lock_guard lock(mutex_);
      if (!idle_.empty()) {
        Client client = std::move(idle_.back());
        idle_.pop_back();
        return client;
      }
    }
    c10d::TCPStoreOptions tcp;
    tcp.port = port();
    tcp.waitWorkers = false;
    tcp.timeout = milliseconds(kMaxReconnect);
    return c10::make_intrusive<c10d::TCPStore>(first_->getHost(), tcp);
  }
  void give_back(const Client& client) {
    std::lock_guard lock(mutex_);
    idle_.push_back(client);
  }

  const Client first_;
  std::mutex mutex_;
  std::vector<Client> idle_;  // guarded by mutex_
};

}  // namespace

absl::StatusOr<std::shared_ptr<C10dStore>> open_c10d_store(const C10dStoreOptions& options) {
  const std::string where = absl::StrCat("TCP store ", options.host, ":", options.port);
  if (options.host.empty()) return absl::InvalidArgumentError(where + ": the host is empty");
  if (options.port == 0 && !options.serve) {
    return absl::InvalidArgumentError(where + ": a client needs the port of its server");
  }
  if (options.listen_fd && !options.serve) {
    return absl::InvalidArgumentError(where + ": listen_fd is for the rank that serves");
  }
  const absl::Time deadline = absl::Now() + options.timeout;
  if (!options.serve) {
    absl::Status answered = wait_for_listener(options.host, options.port, options.timeout,
                                              {.names_come_later = options.names_come_later});
    if (!answered.ok()) {
      return absl::UnavailableError(absl::StrCat("TCP store ", std::string(answered.message())));
    }
  } else if (!options.names_come_later) {
    if (absl::Status known = check_name(options.host); !known.ok()) {
      return absl::UnavailableError(absl::StrCat("TCP store ", std::string(known.message())));
    }
  }
  c10d::TCPStoreOptions tcp;
  tcp.port = options.port;
  tcp.isServer = options.serve;
  tcp.waitWorkers = false;
  tcp.timeout = milliseconds(options.serve ? options.timeout : deadline - absl::Now());
  tcp.masterListenFd = options.listen_fd;
  const std::string what = options.serve ? ": cannot serve: " : ": cannot join: ";
  try {
    return std::make_shared<TcpStore>(c10::make_intrusive<c10d::TCPStore>(options.host, tcp));
  } catch (const c10::Error& e) {
    return absl::UnavailableError(where + what + first_line(e.what_without_backtrace()));
  } catch (const std::exception& e) {
    return absl::UnavailableError(where + what + first_line(e.what()));
  }
}

}  // namespace shardweave
