// The Engine carries out one rank's operations over its connections to the others.
//
//   absl::StatusOr<Backend::Ticket> ticket = engine.start(call);  // sends what can be sent at once
//   if (ticket.ok() && *ticket != Backend::kDone) status = engine.wait(*ticket, deadline);
//
// Each frame that comes belongs to a step of a collective or to a recv. One that nobody here wants
// yet stays in the connection, unless something that is wanted may be behind it: then it is put
// aside. So that this takes bounded memory, a rank sends no more than kRoom bytes to another one
// that may not want them yet; beyond that it sends offers, headers alone, and what they stand for
// when the other rank has come to the same collective or has granted the message.
//
// A rank that gives up says why on the control connections, which are never clogged.
//
// Threads: as of Backend. One mutex guards everything. Of the threads that wait, one watches the
// connections for all, and sleeps without the mutex; the others sleep until they are done or it is
// their turn to watch. Operations that nobody waits for are carried on by a helper thread, which
// sleeps until something comes: large ones from the beginning, small ones a few milliseconds later.
#pragma once

#include <poll.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "shardweave/comm/backend.h"
#include "shardweave/comm/gloo/channel.h"
#include "shardweave/comm/gloo/connection.h"
#include "shardweave/comm/gloo/schedule.h"
#include "shardweave/comm/gloo/unique_fd.h"
#include "shardweave/comm/patience.h"

namespace shardweave::gloo_internal {

// What has failed first in any of the groups that one rank's world has made: who leaves one after
// that says so, or the others would blame it for what another has done. Any thread.
class FirstFailure {
 public:
  void set(const absl::Status& failure) {
    const std::lock_guard lock(mutex_);
    if (text_.empty()) text_ = std::string(failure.message());
  }
  std::string text() const {
    const std::lock_guard lock(mutex_);
    return text_;
  }

 private:
  mutable std::mutex mutex_;
  std::string text_;  // empty: nothing has
};

class Engine {
 public:
  // Bytes to one rank that it may not want yet.
  static constexpr int64_t kRoom = 4 * 1024 * 1024;

  // How soon, or a little later, a small operation that nobody waits for is looked after.
  static constexpr std::chrono::milliseconds kDoze{2};

  // `channels` by rank, none at this rank's place. A group that cannot work (no eventfd is to be
  // had) is broken from the beginning: see failure().
  Engine(GroupInfo group, std::vector<Channel> channels,
         const CollectiveSchedule::Limits& limits = CollectiveSchedule::Limits(),
         std::shared_ptr<FirstFailure> first_failure = std::make_shared<FirstFailure>(),
         std::chrono::milliseconds doze = kDoze);
  // Tells the others that this rank has left; for that waits up to a second for those that do not
  // read.
  ~Engine();

  absl::StatusOr<Backend::Ticket> start(const Call& call);
  bool done(Backend::Ticket ticket);
  // Whoever waits longer than `patience` says so, once for each operation.
  absl::Status wait(Backend::Ticket ticket, Deadline deadline,
                    Patience patience = Patience::endless());
  void abort(const absl::Status& reason);

  // OK, or what broke the group, as far as this rank can know now. Does not wait.
  absl::Status health();
  // The same of this rank alone, whatever the others have sent.
  absl::Status failure();
  // Whether nothing will ever come from the rank any more, as far as health() has seen.
  bool is_gone(int peer);
  // ", after a failure: ..." if the rank has said so when it left, else "".
  std::string left_after(int peer);

 private:
  using Lock = std::unique_lock<std::mutex>;

  struct Operation {
    explicit Operation(const CollectiveSchedule::Limits& limits) : schedule(limits) {}

    Backend::Ticket ticket = 0;
    Call call;  // without what was valid only during start(); its tag is the signature's
    CallSignature signature;
    CollectiveSchedule schedule;  // of a collective
    std::vector<bool> awaited;    // whose frame is missing in this step
    int num_awaited = 0;
    int unsent = 0;        // frames of this step
    int64_t ahead = 0;     // a send: bytes that the peer may not have wanted yet
    uint64_t granted = 0;  // a recv: the number of the offered message that it waits for
    bool said = false;     // that it is late
  };
  // A frame that has come before it was wanted.
  struct Early {
    FrameHeader header;
    std::unique_ptr<std::byte[]> payload;
  };
  struct Ahead {
    uint64_t sequence;
    int64_t bytes;
  };
  // A frame that waits until the peer has room for it.
  struct Held {
    Operation* operation;
    FrameHeader header;
    const void* payload;
  };
  struct Peer {
    std::unique_ptr<Connection> connection;  // none for this rank itself
    int awaited = 0;                         // frames that are missing, of all operations
    bool has_header = false;                 // of a frame that nobody wants yet
    bool hung_up = false;    // it sends no more; the last may not have been read yet
    bool left = false;       // it has said that it leaves
    std::string last_words;  // which failure it has left after, if any
    bool gone = false;       // all has been read
    // Where the payload goes that is coming: to an operation, or to the last of `early`.
    Operation* receiver = nullptr;
    bool receiving_early = false;
    std::deque<Early> early;

    // Flow control. What has been sent to this peer although it may not want it yet:
    int64_t ahead = 0;                     // bytes,
    std::vector<Ahead> ahead_collectives;  // of these
    uint64_t sequence = 0;                 // the last collective that it is known to have called
    std::vector<Held> held;                // offered, not sent

    // Control.
    UniqueFd control;
    std::string said;     // what has come so far
    absl::Status reason;  // why it has given up, if it has
  };

  void leave();
  Operation* find(Backend::Ticket ticket) const;
  // Never waits for who holds mutex_: what has ended stays so for done().
  bool has_ended(Backend::Ticket ticket) const;
  Operation* acquire(const Call& call);

  // All that return bool return false when the group has been broken by a fail(): then nothing may
  // go on.
  [[nodiscard]] bool begin(Operation& operation, const Call& call);
  [[nodiscard]] bool begin_step(Operation& operation);
  [[nodiscard]] bool queue(Operation& operation, int peer, FrameHeader header, const void* payload);
  // Whether the peer has a place for the frame, or there is room for it without one.
  bool may_send(Operation& operation, Peer& p, const FrameHeader& header);
  // The peer has called collective number `sequence`.
  static void note_sequence(Peer& p, uint64_t sequence);
  static void release(Peer& p, size_t held);
  [[nodiscard]] bool take_offer(int peer, const FrameHeader& header, bool* taken);
  [[nodiscard]] bool send_to_self(Operation& operation, const FrameHeader& header);
  [[nodiscard]] bool await(Operation& operation, int peer);
  // The frame is where it was wanted.
  [[nodiscard]] bool arrived(Operation& operation, int peer, const FrameHeader& header);
  [[nodiscard]] bool advance_all();

  // Sends and receives what can be. With `look`, reads also from peers from which nothing is
  // wanted.
  [[nodiscard]] bool progress(bool look);
  // The same, with a look, of a thread that is not the one that watches, which may sleep.
  [[nodiscard]] bool progress_beside_watcher();
  [[nodiscard]] bool write_to(int peer);
  [[nodiscard]] bool read_from(int peer, bool look);
  [[nodiscard]] bool take_frame(int peer);
  [[nodiscard]] bool finish_frame(int peer);
  [[nodiscard]] bool take_early(int peer);
  [[nodiscard]] bool lose(int peer);
  void read_control(Peer& p);
  // Looks for what the peer may have said; if it has given up, so does this rank.
  [[nodiscard]] bool hear(int peer);
  // Looks without waiting at all that can be heard.
  [[nodiscard]] bool listen();
  void list_polled(std::vector<pollfd>& polled) const;
  [[nodiscard]] bool take_polled(const std::vector<pollfd>& polled);
  // Who wants the frame, if anybody does.
  [[nodiscard]] bool find_receiver(int peer, const FrameHeader& header, Operation** receiver);
  void* memory_for(Operation& operation, int peer);

  // Breaks the group, here and for the others; `where` may be null. Returns false.
  bool fail(const absl::Status& why, const Operation* where);
  // The same with what a peer has said last.
  bool fail_as_told(int peer, const absl::Status& told);
  absl::Status failure_of(const Operation& operation) const;
  absl::Status timeout_of(const Operation& operation) const;
  // Whether the peer has not called what this is a part of.
  bool is_absent(const Operation& operation, int peer) const;
  bool is_deaf(const Operation& operation, int peer) const;
  Wait wait_of(const Operation& operation) const;
  void say_late(Operation& operation, absl::Duration patience);
  // "all_reduce(f32[7], sum) 'loss', #12 of group 'dp' (rank 1 of 4)".
  std::string name_of(const Operation& operation) const;
  std::string name_peer(int peer) const;
  std::string why_left(int peer) const;
  uint64_t traffic() const;

  // Carries out operations until `ticket` is done; kDone: until others take over or nothing is
  // pending.
  void watch(Lock& lock, Backend::Ticket ticket, Deadline deadline, Patience& patience);
  [[nodiscard]] bool sleep_until_traffic(Lock& lock, Deadline deadline);
  [[nodiscard]] bool have_helper();
  // Whether it would stand still if no thread looked after it.
  static bool needs_help(const Operation* operation);
  // Wakes the helper if there is reason to; leaves the mutex.
  void call_helper(Lock& lock);
  void help();
  void wake_watcher();

  const GroupInfo group_;
  const CollectiveSchedule::Limits limits_;
  const std::shared_ptr<FirstFailure> first_failure_;
  const std::chrono::milliseconds doze_;
  const UniqueFd wake_;  // an eventfd, at which the watching thread looks too

  // Held for a moment only, also under mutex_. Guarded by it: what done() tells.
  mutable std::mutex ends_mutex_;
  std::vector<Backend::Ticket> running_;
  bool broken_ = false;

  std::mutex mutex_;
  std::condition_variable turn_;  // an operation is done, or nobody watches any more
  // Guarded by mutex_:
  std::vector<Peer> peers_;
  std::vector<Operation*> pending_;  // in the order of issue
  std::vector<std::unique_ptr<Operation>> operations_;
  std::vector<Operation*> free_operations_;
  Backend::Ticket last_ticket_ = 0;
  absl::Status failure_;  // what broke the group
  Backend::Ticket failed_ticket_ = 0;
  bool watched_ = false;        // a thread watches the connections,
  bool sleeping_ = false;       // and sleeps, without the mutex
  int followers_ = 0;           // threads that wait while another one watches
  std::vector<pollfd> polled_;  // by the thread that watches

  std::condition_variable help_wanted_;
  bool hurry_ = false;         // what is pending does not wait until it has dozed
  bool helper_dozes_ = false;  // it looks for work from time to time; else it must be woken
  bool stopping_ = false;
  std::thread helper_;  // started when first an operation is pending
};

}  // namespace shardweave::gloo_internal
