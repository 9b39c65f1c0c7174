#include "shardweave/comm/store/c10d_store.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <future>
#include <limits>
#include <mutex>
#include <thread>
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

// Between two looks for a key: at first, and at most.
constexpr absl::Duration kFirstPause = absl::Milliseconds(1);
constexpr absl::Duration kLastPause = absl::Milliseconds(100);

// What LibTorch says, without its stack trace.
std::string first_line(const char* what) {
  const std::vector<std::string> lines = absl::StrSplit(what, absl::MaxSplits('\n', 1));
  return lines[0];
}

class TcpStore : public C10dStore {
 public:
  explicit TcpStore(c10::intrusive_ptr<c10d::TCPStore> store) : store_(std::move(store)) {}

  uint16_t port() const override { return store_->getPort(); }
  std::string describe() const override {
    return absl::StrCat("TCP store ", store_->getHost(), ":", store_->getPort());
  }

 private:
  absl::Status do_set(std::string_view key, std::string_view value) override {
    return call([&] {
      store_->set(std::string(key), std::vector<uint8_t>(value.begin(), value.end()));
      return absl::OkStatus();
    });
  }

  absl::StatusOr<std::string> do_get(std::string_view key, absl::Duration timeout) override {
    const std::string name(key);
    if (absl::Status status = do_wait({name}, timeout); !status.ok()) return status;
    std::string value;
    absl::Status status = call([&] {
      const std::vector<uint8_t> bytes = store_->get(name);
      value.assign(bytes.begin(), bytes.end());
      return absl::OkStatus();
    });
    if (!status.ok()) return status;
    return value;
  }

  absl::StatusOr<int64_t> do_add(std::string_view key, int64_t delta) override {
    const std::string name(key);
    int64_t sum = 0;
    absl::Status status = call([&]() -> absl::Status {
      // The server does not survive text that is no number.
      if (store_->check({name})) {
        const std::vector<uint8_t> bytes = store_->get(name);
        const std::string text(bytes.begin(), bytes.end());
        absl::Status counts = store_errors::add_to_counter(*this, key, text, delta).status();
        if (!counts.ok()) return counts;
      }
      sum = store_->add(name, delta);
      return absl::OkStatus();
    });
    if (!status.ok()) return status;
    return sum;
  }

  absl::Status do_wait(const std::vector<std::string>& keys, absl::Duration timeout) override {
    if (keys.empty()) return absl::OkStatus();
    // Asked again and again: a client that waits serves no other thread, and says on stderr how long
    // it has waited in vain.
    const absl::Time deadline = absl::Now() + timeout;
    for (absl::Duration pause = kFirstPause;; pause = std::min(2 * pause, kLastPause)) {
      const absl::StatusOr<bool> there = do_check(keys);
      if (!there.ok()) return there.status();
      if (*there) return absl::OkStatus();
      const absl::Duration left = deadline - absl::Now();
      if (left <= absl::ZeroDuration()) break;
      absl::SleepFor(std::min(pause, left));
    }
    return call([&] {
      std::vector<std::string> missing;
      for (const std::string& key : keys) {
        if (!store_->check({key})) missing.push_back(key);
      }
      return missing.empty() ? absl::OkStatus()
                             : store_errors::missing_keys(*this, missing, timeout);
    });
  }

  absl::StatusOr<bool> do_check(const std::vector<std::string>& keys) override {
    if (keys.empty()) return true;
    bool there = false;
    absl::Status status = call([&] {
      there = store_->check(keys);
      return absl::OkStatus();
    });
    if (!status.ok()) return status;
    return there;
  }

  absl::StatusOr<bool> do_remove(std::string_view key) override {
    bool there = false;
    absl::Status status = call([&] {
      there = store_->deleteKey(std::string(key));
      return absl::OkStatus();
    });
    if (!status.ok()) return status;
    return there;
  }

  template <typename Body>
  absl::Status call(Body body) {
    {
      const std::lock_guard lock(mutex_);
      if (!lost_.ok()) return lost_;
    }
    try {
      return body();
    } catch (const c10::DistNetworkError& e) {
      // LibTorch's client does not connect again, and says on stderr, with its stack, of each call that
      // fails.
      const std::lock_guard lock(mutex_);
      lost_ = absl::UnavailableError(
          absl::StrCat(describe(), ": ", first_line(e.what_without_backtrace())));
      return lost_;
    } catch (const c10::Error& e) {
      return absl::UnavailableError(
          absl::StrCat(describe(), ": ", first_line(e.what_without_backtrace())));
    } catch (const std::exception& e) {
      return absl::UnavailableError(absl::StrCat(describe(), ": ", first_line(e.what())));
    }
  }

  const c10::intrusive_ptr<c10d::TCPStore> store_;
  std::mutex mutex_;
  absl::Status lost_;  // why the connection is of no use any more
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
  const ListenerPatience patience{.for_name = options.name_timeout,
                                  .names_come_later = options.names_come_later};
  if (!options.serve) {
    absl::Status answered =
        wait_for_listener(options.host, options.port, options.timeout, patience);
    if (!answered.ok()) {
      return absl::UnavailableError(absl::StrCat("TCP store ", std::string(answered.message())));
    }
  } else if (!options.names_come_later) {
    absl::Status known = wait_for_name(options.host, options.timeout, patience);
    if (!known.ok()) {
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
    if (options.serve) {
      return std::make_shared<TcpStore>(c10::make_intrusive<c10d::TCPStore>(options.host, tcp));
    }
    // LibTorch waits without end for a first word of what listens there, which may be anything. Nothing
    // ends that: the thread is left behind.
    std::packaged_task<c10::intrusive_ptr<c10d::TCPStore>()> task(
        [host = options.host, tcp] { return c10::make_intrusive<c10d::TCPStore>(host, tcp); });
    std::future<c10::intrusive_ptr<c10d::TCPStore>> joined = task.get_future();
    std::thread(std::move(task)).detach();
    const auto left = absl::ToChronoMilliseconds(deadline - absl::Now());
    if (joined.wait_for(left) != std::future_status::ready) {
      return absl::UnavailableError(
          absl::StrCat(where, ": what listens there has not answered as a store in ",
                       absl::FormatDuration(options.timeout)));
    }
    return std::make_shared<TcpStore>(joined.get());
  } catch (const c10::Error& e) {
    return absl::UnavailableError(where + what + first_line(e.what_without_backtrace()));
  } catch (const std::exception& e) {
    return absl::UnavailableError(where + what + first_line(e.what()));
  }
}

}  // namespace shardweave
