#include "shardweave/comm/gloo/engine.h"

#include <sched.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <new>
#include <system_error>
#include <utility>

#include "absl/strings/str_join.h"
#include "shardweave/comm/failed_rank.h"
#include "shardweave/comm/str_cat.h"

namespace shardweave::gloo_internal {
namespace {

using Clock = std::chrono::steady_clock;

// How long a waiting rank stays awake. Longer than ranks that compute the same usually differ;
// waking from sleep costs some tens of microseconds.
constexpr auto kAwake = std::chrono::microseconds(300);

// An operation of so many bytes does not go on by itself: it has several steps, or the kernel does
// not hold all that comes. The helper is called for it at once, which costs some microseconds. Of a
// smaller one, what this rank sends is in the kernel's hands, and what comes waits there.
constexpr int64_t kMuch = 64 * 1024;

// Without operations the helper looks this many times more before it sleeps until it is woken.
constexpr int kDozes = 25;

// Nobody depends on it.
constexpr int64_t kMaxSleepMs = 1000;

// How long the last words of a peer, or to one, may be on their way.
constexpr auto kPatience = std::chrono::seconds(1);

// "rank 0 called barrier(), rank 2 called all_gather(f32[3])".
absl::Status compare_calls(const GroupInfo& group, const CallSignature& mine, int peer,
                           const CallSignature& theirs) {
  if (mine.op == theirs.op && mine.dtype == theirs.dtype && mine.count == theirs.count &&
      mine.root == theirs.root && mine.reduce_op == theirs.reduce_op &&
      mine.counts_hash == theirs.counts_hash &&
      may_be_the_same(mine.fingerprint, theirs.fingerprint)) {
    return absl::OkStatus();
  }
  const bool first = group.rank < peer;
  const std::string my_call = to_string(mine), their_call = to_string(theirs);
  return absl::FailedPreconditionError(
      str_cat("ranks of group '", group.name, "' called different things as collective #",
              mine.sequence, ": rank ", first ? group.rank : peer, " called ",
              first ? my_call : their_call, ", rank ", first ? peer : group.rank, " called ",
              first ? their_call : my_call, hidden_difference(mine, theirs)));
}

// What a peer's failure frame says.
absl::Status told_by(const FrameHeader& header, std::string_view text) {
  const absl::Status told(static_cast<absl::StatusCode>(header.value), std::string(text));
  return header.step == 0 ? told : of_rank(told, int64_t{header.step} - 1);
}

}  // namespace

Engine::Engine(GroupInfo group, std::vector<Channel> channels,
               const CollectiveSchedule::Limits& limits,
               std::shared_ptr<FirstFailure> first_failure, std::chrono::milliseconds doze)
    : group_(std::move(group)),
      limits_(limits),
      first_failure_(std::move(first_failure)),
      doze_(doze),
      wake_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
      peers_(group_.size()) {
  const int error = errno;
  for (int peer = 0; peer < group_.size(); ++peer) {
    if (peer == group_.rank) continue;
    peers_[peer].connection = std::make_unique<Connection>(std::move(channels[peer].data));
    peers_[peer].control = std::move(channels[peer].control);
  }
  if (!wake_) {
    fail(absl::ResourceExhaustedError(str_cat("group '", group_.name, "' (rank ", group_.rank,
                                              " of ", group_.size(),
                                              "): no eventfd: ", std::strerror(error))),
         nullptr);
  }
}

Engine::~Engine() {
  Lock lock(mutex_);
  stopping_ = true;
  wake_watcher();
  help_wanted_.notify_all();
  lock.unlock();
  if (helper_.joinable()) helper_.join();
  for (const Operation* operation : pending_) {
    if (operation->unsent == 0) continue;
    const std::string after = first_failure_->text();
    fail(absl::UnavailableError(str_cat("it left before it had sent all that it owed",
                                        after.empty() ? "" : ", after a failure: ", after)),
         operation);
    return;
  }
  if (failure_.ok()) leave();
}

// The receipts and grants that are queued are owed to the others, which may read slowly.
void Engine::leave() {
  const std::string after = first_failure_->text();
  const FrameHeader words{.kind = FrameKind::kLeave,
                          .length = std::min<int64_t>(after.size(), kMaxFailureText)};
  for (Peer& peer : peers_) {
    if (peer.connection && !peer.gone) {
      peer.connection->queue(words, after.data(), nullptr);
    }
  }
  const Clock::time_point limit = Clock::now() + kPatience;
  std::vector<pollfd> full;
  for (;;) {
    full.clear();
    for (Peer& peer : peers_) {
      if (!peer.connection || peer.gone || !peer.connection->has_output()) continue;
      if (!peer.connection->flush().ok()) {
        peer.gone = true;  // which is no news
      } else if (peer.connection->has_output()) {
        full.push_back({.fd = peer.connection->fd(), .events = POLLOUT});
      }
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(limit - Clock::now());
    if (full.empty() || left.count() <= 0) break;
    ::poll(full.data(), full.size(), static_cast<int>(left.count()));
  }
  for (Peer& peer : peers_) {
    if (peer.connection) peer.connection->close_output();
  }
}

// 1. What users call.

absl::StatusOr<Backend::Ticket> Engine::start(const Call& call) {
  Lock lock(mutex_);
  Operation* operation = acquire(call);
  const Backend::Ticket ticket = operation->ticket;
  if (!failure_.ok() || !begin(*operation, call) || !advance_all()) return failure_of(*operation);
  wake_watcher();
  if (find(ticket) == nullptr) return Backend::kDone;
  if (!have_helper()) return failure_of(*operation);
  hurry_ = !watched_ && (pending_.size() > 1 || needs_help(operation));
  call_helper(lock);
  return ticket;
}

bool Engine::done(Backend::Ticket ticket) {
  if (has_ended(ticket)) return true;
  // Another thread may hold it while it adds up or copies; whoever asks again will know.
  Lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return false;
  if (find(ticket) == nullptr || !failure_.ok()) return true;
  return !progress_beside_watcher() || find(ticket) == nullptr;
}

absl::Status Engine::wait(Backend::Ticket ticket, Deadline deadline, Patience patience) {
  Lock lock(mutex_);
  while (Operation* operation = find(ticket)) {
    if (!failure_.ok()) return failure_of(*operation);
    if (!watched_) {
      watched_ = true;
      watch(lock, ticket, deadline, patience);
      watched_ = false;
      if (followers_ > 0) turn_.notify_all();
      continue;
    }
    ++followers_;
    wake_watcher();  // the helper makes room
    const Deadline until = patience.until(deadline);
    if (until == Deadline::max()) {  // which the clock's arithmetic cannot take
      turn_.wait(lock);
    } else if (turn_.wait_until(lock, until) == std::cv_status::timeout) {
      const bool is_late = patience.has_ended(deadline);
      if (failure_.ok()) (void)listen();
      operation = find(ticket);
      if (operation != nullptr && failure_.ok()) {
        if (is_late) {
          say_late(*operation, patience.time());
        } else {
          fail(timeout_of(*operation), operation);
        }
      }
    }
    --followers_;
  }
  // What this thread has carried on beside its own, or has taken from the helper.
  if (!watched_ && followers_ == 0 && failure_.ok() &&
      std::any_of(pending_.begin(), pending_.end(), needs_help)) {
    hurry_ = true;
    call_helper(lock);
  }
  return absl::OkStatus();
}

void Engine::abort(const absl::Status& reason) {
  Lock lock(mutex_);
  if (failure_.ok()) fail(reason, nullptr);
}

absl::Status Engine::health() {
  Lock lock(mutex_);
  if (failure_.ok()) (void)listen();
  return retold(failure_);
}

absl::Status Engine::failure() {
  Lock lock(mutex_);
  return retold(failure_);
}

bool Engine::is_gone(int peer) {
  Lock lock(mutex_);
  return peers_[peer].left || peers_[peer].gone;
}

std::string Engine::left_after(int peer) {
  Lock lock(mutex_);
  return why_left(peer);
}

// 2. Operations.

Engine::Operation* Engine::find(Backend::Ticket ticket) const {
  for (Operation* operation : pending_) {
    if (operation->ticket == ticket) return operation;
  }
  return nullptr;
}

bool Engine::has_ended(Backend::Ticket ticket) const {
  const std::lock_guard lock(ends_mutex_);
  return broken_ || std::find(running_.begin(), running_.end(), ticket) == running_.end();
}

Engine::Operation* Engine::acquire(const Call& call) {
  if (free_operations_.empty()) {
    operations_.push_back(std::make_unique<Operation>(limits_));
    free_operations_.push_back(operations_.back().get());
  }
  Operation* operation = free_operations_.back();
  free_operations_.pop_back();
  operation->ticket = ++last_ticket_;
  operation->signature = signature_of(call);
  operation->call = call;
  operation->call.in_counts = {};
  operation->call.out_counts = {};
  operation->call.tag = operation->signature.tag;
  operation->awaited.assign(group_.size(), false);
  operation->num_awaited = 0;
  operation->unsent = 0;
  operation->ahead = 0;
  operation->granted = 0;
  operation->said = false;
  pending_.push_back(operation);
  const std::lock_guard lock(ends_mutex_);
  running_.push_back(operation->ticket);
  return operation;
}

bool Engine::begin(Operation& operation, const Call& call) {
  if (call.op == OpKind::kRecv) return await(operation, call.peer);
  if (call.op == OpKind::kSend) {
    return queue(
               operation, call.peer,
               {.kind = FrameKind::kMessage, .value = call.message_tag, .length = call.in.bytes()},
               call.in.data) &&
           await(operation, call.peer);  // the receipt
  }
  operation.schedule.start(group_, call);
  if (!begin_step(operation)) return false;
  operation.schedule.copy_own_part();
  return true;
}

bool Engine::begin_step(Operation& operation) {
  const auto step = static_cast<uint32_t>(operation.schedule.step());
  // Before anything is sent: if that fails, what the peer has sent of this step is read, and then
  // why it is gone.
  for (int peer = 0; peer < group_.size(); ++peer) {
    if (peer != group_.rank && !await(operation, peer)) return false;
  }
  // Each rank begins with the one after it, so that not all send to the same one first.
  for (int i = 1; i < group_.size(); ++i) {
    const int peer = (group_.rank + i) % group_.size();
    const Transfer& transfer = operation.schedule.with(peer);
    if (!queue(operation, peer,
               {.kind = FrameKind::kCollective, .step = step, .length = transfer.send_bytes},
               transfer.send)) {
      return false;
    }
  }
  return true;
}

bool Engine::queue(Operation& operation, int peer, FrameHeader header, const void* payload) {
  header.signature = operation.signature;
  if (peer == group_.rank) return send_to_self(operation, header);
  Peer& p = peers_[peer];
  if (p.gone) return lose(peer);
  ++operation.unsent;
  if (may_send(operation, p, header)) {
    p.connection->queue(header, payload, &operation.unsent);
  } else {
    p.held.push_back({&operation, header, payload});
    header.kind = FrameKind::kOffer;
    header.length = 0;
    p.connection->queue(header, nullptr, nullptr);
  }
  return write_to(peer);
}

bool Engine::may_send(Operation& operation, Peer& p, const FrameHeader& header) {
  const uint64_t sequence = operation.signature.sequence;
  const bool is_message = header.kind == FrameKind::kMessage;
  // After its first step, all ranks have called a collective.
  if (header.length == 0 || (!is_message && (header.step > 0 || sequence <= p.sequence))) {
    return true;
  }
  if (header.length > kRoom - p.ahead) return false;
  p.ahead += header.length;
  if (is_message) {
    operation.ahead = header.length;  // until its receipt
  } else {
    p.ahead_collectives.push_back({sequence, header.length});
  }
  return true;
}

void Engine::note_sequence(Peer& p, uint64_t sequence) {
  if (sequence <= p.sequence) return;
  p.sequence = sequence;
  std::erase_if(p.ahead_collectives, [&](const Ahead& ahead) {
    if (ahead.sequence > sequence) return false;
    p.ahead -= ahead.bytes;
    return true;
  });
  for (size_t i = 0; i < p.held.size();) {
    const Held& held = p.held[i];
    if (held.header.kind != FrameKind::kCollective ||
        held.operation->signature.sequence > sequence) {
      ++i;
    } else {
      release(p, i);
    }
  }
}

// In the middle of reading: progress() writes it.
void Engine::release(Peer& p, size_t held) {
  const Held frame = p.held[held];
  p.held.erase(p.held.begin() + static_cast<ptrdiff_t>(held));
  p.connection->queue(frame.header, frame.payload, &frame.operation->unsent);
}

bool Engine::send_to_self(Operation& operation, const FrameHeader& header) {
  auto payload = std::make_unique_for_overwrite<std::byte[]>(header.length);
  if (header.length > 0) std::memcpy(payload.get(), operation.call.in.data, header.length);
  peers_[group_.rank].early.push_back({header, std::move(payload)});
  return take_early(group_.rank);
}

bool Engine::await(Operation& operation, int peer) {
  operation.awaited[peer] = true;
  ++operation.num_awaited;
  ++peers_[peer].awaited;
  if (!take_early(peer)) return false;
  const Peer& p = peers_[peer];
  if (p.connection && !p.gone && p.connection->has_output() && !write_to(peer)) return false;
  return !peers_[peer].gone || !operation.awaited[peer] || lose(peer);
}

bool Engine::arrived(Operation& operation, int peer, const FrameHeader& header) {
  operation.awaited[peer] = false;
  --operation.num_awaited;
  --peers_[peer].awaited;
  if (header.kind == FrameKind::kReceipt) peers_[peer].ahead -= operation.ahead;
  if (header.kind != FrameKind::kMessage) return true;
  const FrameHeader receipt{.kind = FrameKind::kReceipt, .signature = header.signature};
  if (peer == group_.rank) {
    peers_[peer].early.push_back({receipt, nullptr});
    return take_early(peer);
  }
  if (peers_[peer].gone) return true;
  peers_[peer].connection->queue(receipt, nullptr, nullptr);
  return write_to(peer);
}

bool Engine::advance_all() {
  for (size_t i = 0; i < pending_.size();) {
    Operation& operation = *pending_[i];
    if (operation.num_awaited > 0 || operation.unsent > 0) {
      ++i;
      continue;
    }
    bool more = false;
    if (!is_point_to_point(operation.call.op)) {
      const absl::StatusOr<bool> next = operation.schedule.finish_step();
      if (!next.ok()) return fail(next.status(), &operation);  // of all_to_all_v
      more = *next;
    }
    if (more) {
      if (!begin_step(operation)) return false;
    } else {
      {
        const std::lock_guard lock(ends_mutex_);
        std::erase(running_, operation.ticket);
      }
      free_operations_.push_back(&operation);
      pending_.erase(pending_.begin() + i);
      if (followers_ > 0) turn_.notify_all();
    }
  }
  return true;
}

// 3. Frames.

bool Engine::progress(bool look) {
  for (int peer = 0; peer < group_.size(); ++peer) {
    const Peer& p = peers_[peer];
    if (!p.connection || p.gone) continue;
    if (p.connection->has_output() && !write_to(peer)) return false;
    if ((p.awaited > 0 || look) && !read_from(peer, look)) return false;
    // What has come may have made room.
    if (!p.gone && p.connection->has_output() && !write_to(peer)) return false;
  }
  return advance_all();
}

bool Engine::progress_beside_watcher() {
  const uint64_t before = traffic();
  const bool alive = progress(/*look=*/true);
  // What has come does not wake it any more, and it may have more to send.
  if (traffic() != before) wake_watcher();
  return alive;
}

bool Engine::write_to(int peer) {
  if (peers_[peer].connection->flush().ok()) return true;
  // What the peer has said before it went may tell more.
  peers_[peer].hung_up = true;
  if (!read_from(peer, /*look=*/true)) return false;
  Peer& p = peers_[peer];
  p.gone = true;
  // A receipt that it does not wait for any more is no loss.
  return (p.awaited == 0 && p.held.empty() && !p.connection->owes()) || lose(peer);
}

bool Engine::read_from(int peer, bool look) {
  Peer& p = peers_[peer];
  // What is here already is looked at: if it says that the peer has given up, what came before is
  // void.
  while (!p.gone && (p.awaited > 0 || look || p.connection->has_input())) {
    switch (p.connection->read()) {
      case Connection::Input::kNothing:
        return true;
      case Connection::Input::kHeader:
        if (!take_frame(peer)) return false;
        if (p.has_header) return true;
        break;
      case Connection::Input::kPayload:
        if (!finish_frame(peer)) return false;
        break;
      case Connection::Input::kGarbage:
        return fail(absl::DataLossError(str_cat(name_peer(peer), " sent what is not a frame")),
                    nullptr);
      case Connection::Input::kClosed:
        p.gone = true;
        if (std::exchange(p.receiving_early, false)) p.early.pop_back();
        if (p.awaited > 0) return lose(peer);
        break;
    }
  }
  return true;
}

bool Engine::take_frame(int peer) {
  Peer& p = peers_[peer];
  const FrameHeader& header = p.connection->header();
  p.has_header = false;
  if (absl::Status status = check_frame(header, group_.size()); !status.ok()) {
    return fail(absl::Status(status.code(), str_cat(name_peer(peer), " ", status.message())),
                nullptr);
  }
  if (header.kind == FrameKind::kLeave) {
    p.last_words.resize(header.length);
    p.connection->accept(p.last_words.data());
    return true;
  }
  if (header.kind != FrameKind::kMessage && header.signature.op != OpKind::kSend) {
    // Of a collective; a failure's signature is empty.
    note_sequence(p, header.signature.sequence);
  }
  if (header.kind == FrameKind::kOffer || header.kind == FrameKind::kGrant) {
    bool taken = false;
    if (!take_offer(peer, header, &taken)) return false;
    if (taken) {
      p.connection->accept(nullptr);
      return true;
    }
    if (p.awaited == 0 && !p.hung_up) {
      p.has_header = true;
      return true;
    }
  } else if (header.kind != FrameKind::kFailure) {
    Operation* receiver = nullptr;
    if (!find_receiver(peer, header, &receiver)) return false;
    if (receiver != nullptr) {
      p.receiver = receiver;
      p.connection->accept(memory_for(*receiver, peer));
      return true;
    }
    if (p.awaited == 0 && !p.hung_up) {
      p.has_header = true;
      return true;
    }
  }
  std::unique_ptr<std::byte[]> payload;
  if (header.length > 0) payload.reset(new (std::nothrow) std::byte[header.length]);
  if (header.length > 0 && payload == nullptr) {
    return fail(absl::ResourceExhaustedError(
                    str_cat("no memory for ", header.length, " bytes of ", name_peer(peer))),
                nullptr);
  }
  p.early.push_back({header, std::move(payload)});
  p.receiving_early = true;
  p.connection->accept(p.early.back().payload.get());
  return true;
}

bool Engine::finish_frame(int peer) {
  Peer& p = peers_[peer];
  if (p.receiver != nullptr) {
    return arrived(*std::exchange(p.receiver, nullptr), peer, p.connection->header());
  }
  if (p.connection->header().kind == FrameKind::kLeave) p.left = true;
  if (!std::exchange(p.receiving_early, false)) return true;
  const Early& frame = p.early.back();
  if (frame.header.kind != FrameKind::kFailure) return take_early(peer);
  return fail_as_told(peer,
                      told_by(frame.header, {reinterpret_cast<const char*>(frame.payload.get()),
                                             static_cast<size_t>(frame.header.length)}));
}

bool Engine::take_offer(int peer, const FrameHeader& header, bool* taken) {
  Peer& p = peers_[peer];
  *taken = true;
  if (header.kind == FrameKind::kGrant) {
    const auto granted = std::find_if(p.held.begin(), p.held.end(), [&](const Held& held) {
      return held.header.kind == FrameKind::kMessage &&
             held.header.signature.sequence == header.signature.sequence;
    });
    if (granted != p.held.end()) {
      release(p, granted - p.held.begin());
      return true;
    }
    return fail(absl::DataLossError(str_cat(name_peer(peer), " granted what was not offered: ",
                                            to_string(header.signature))),
                nullptr);
  }
  Operation* receiver = nullptr;
  if (!find_receiver(peer, header, &receiver)) return false;
  // What a collective's offer says, note_sequence() and find_receiver() have heard.
  if (header.signature.op != OpKind::kSend) return true;
  *taken = receiver != nullptr;
  if (receiver == nullptr || p.gone) return true;
  receiver->granted = header.signature.sequence;
  p.connection->queue({.kind = FrameKind::kGrant, .signature = header.signature}, nullptr, nullptr);
  return true;
}

bool Engine::take_early(int peer) {
  Peer& p = peers_[peer];
  const size_t complete = p.early.size() - (p.receiving_early ? 1 : 0);
  for (size_t i = 0; i < complete; ++i) {
    const Early& frame = p.early[i];
    if (frame.header.kind == FrameKind::kOffer) {
      const FrameHeader offer = frame.header;
      bool taken = false;
      if (!take_offer(peer, offer, &taken)) return false;
      if (!taken) continue;
      p.early.erase(p.early.begin() + static_cast<ptrdiff_t>(i));
      return true;
    }
    Operation* receiver = nullptr;
    if (!find_receiver(peer, frame.header, &receiver)) return false;
    if (receiver == nullptr) continue;
    const FrameHeader header = frame.header;
    if (header.length > 0) {
      std::memcpy(memory_for(*receiver, peer), frame.payload.get(), header.length);
    }
    p.early.erase(p.early.begin() + i);
    // Only what is awaited newly can have been here, and that is one frame.
    return arrived(*receiver, peer, header);
  }
  return true;
}

void* Engine::memory_for(Operation& operation, int peer) {
  return is_point_to_point(operation.call.op) ? operation.call.out.data
                                              : operation.schedule.with(peer).recv;
}

bool Engine::find_receiver(int peer, const FrameHeader& header, Operation** receiver) {
  const CallSignature& theirs = header.signature;
  for (Operation* operation : pending_) {
    const CallSignature& mine = operation->signature;
    if (theirs.op == OpKind::kSend && header.kind != FrameKind::kReceipt) {
      if (mine.op != OpKind::kRecv || !operation->awaited[peer] ||
          operation->call.message_tag != header.value || peers_[peer].receiver == operation) {
        continue;
      }
      // An offer has been taken by one recv, which gets this message and no other.
      if (operation->granted != 0 && operation->granted != theirs.sequence) continue;
      if (operation->granted == 0 && header.kind == FrameKind::kMessage &&
          std::any_of(pending_.begin(), pending_.end(), [&](const Operation* other) {
            return other->awaited[peer] && other->granted == theirs.sequence;
          })) {
        continue;
      }
      if (mine.count != theirs.count || mine.dtype != theirs.dtype) {
        return fail(
            absl::FailedPreconditionError(str_cat(name_peer(peer), " called ", to_string(theirs),
                                                  ", this rank ", to_string(mine))),
            operation);
      }
    } else if (header.kind == FrameKind::kReceipt) {
      if (mine.op != OpKind::kSend || mine.sequence != theirs.sequence ||
          !operation->awaited[peer]) {
        continue;
      }
    } else {
      if (is_point_to_point(mine.op) || mine.sequence != theirs.sequence) continue;
      if (absl::Status status = compare_calls(group_, mine, peer, theirs); !status.ok()) {
        return fail(status, nullptr);
      }
      // The peer may be a step ahead.
      const auto step = static_cast<uint32_t>(operation->schedule.step());
      if (header.kind == FrameKind::kOffer) return true;
      if (step + 1 == header.step &&
          header.length <= std::max(operation->call.in.bytes(), operation->call.out.bytes())) {
        return true;
      }
      if (step != header.step || !operation->awaited[peer] ||
          operation->schedule.with(peer).recv_bytes != header.length) {
        return fail(absl::DataLossError(str_cat(name_peer(peer), " sent ", header.length,
                                                " bytes in step ", header.step)),
                    operation);
      }
    }
    *receiver = operation;
    return true;
  }
  return true;
}

// 4. Errors.

bool Engine::fail_as_told(int peer, const absl::Status& told) {
  // An abort() says itself who called it.
  if (told.code() == absl::StatusCode::kAborted) return fail(told, nullptr);
  const absl::Status why = retold(told, str_cat(name_peer(peer), " gave up: ", told.message()));
  return fail(failed_rank(why).has_value() ? why : of_rank(why, group_.world_ranks[peer]), nullptr);
}

bool Engine::fail(const absl::Status& why, const Operation* where) {
  if (!failure_.ok()) return false;
  failed_ticket_ = where == nullptr ? 0 : where->ticket;
  failure_ =
      where == nullptr ? retold(why) : retold(why, str_cat(name_of(*where), ": ", why.message()));
  first_failure_->set(failure_);
  {
    const std::lock_guard lock(ends_mutex_);
    broken_ = true;
  }
  const auto text = failure_.message();
  const FrameHeader header{.kind = FrameKind::kFailure,
                           .step = static_cast<uint32_t>(failed_rank(failure_).value_or(-1) + 1),
                           .value = static_cast<int32_t>(failure_.code()),
                           .length = std::min<int64_t>(text.size(), kMaxFailureText)};
  std::string frame(reinterpret_cast<const char*>(&header), sizeof(header));
  frame.append(text.data(), header.length);
  for (Peer& peer : peers_) {
    if (peer.control) {
      (void)!::send(peer.control.get(), frame.data(), frame.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      ::shutdown(peer.control.get(), SHUT_WR);
    }
    if (peer.connection) peer.connection->close_output(header, text.data());
  }
  wake_watcher();
  turn_.notify_all();
  return false;
}

bool Engine::lose(int peer) {
  Peer& p = peers_[peer];
  // A peer that gave up has said so before it closed anything, but the words may be on their way;
  // of one that died both connections end.
  const Clock::time_point limit = Clock::now() + kPatience;
  for (read_control(p); p.control && p.reason.ok() && !p.left; read_control(p)) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(limit - Clock::now());
    pollfd ready{.fd = p.control.get(), .events = POLLIN};
    if (left.count() <= 0 || ::poll(&ready, 1, static_cast<int>(left.count())) == 0) break;
  }
  if (!p.reason.ok()) return fail_as_told(peer, p.reason);
  const Operation* where = nullptr;
  for (const Operation* operation : pending_) {
    if (operation->awaited[peer] || (where == nullptr && operation->unsent > 0)) {
      where = operation;
      if (operation->awaited[peer]) break;
    }
  }
  return fail(
      of_rank(absl::UnavailableError(
                  p.left ? str_cat(name_peer(peer), " has left the group", why_left(peer))
                         : str_cat(name_peer(peer), " is gone: ", p.connection->closed_because())),
              group_.world_ranks[peer]),
      where);
}

void Engine::read_control(Peer& p) {
  while (p.control && p.reason.ok()) {
    char bytes[sizeof(FrameHeader) + kMaxFailureText];
    const ssize_t count = ::recv(p.control.get(), bytes, sizeof(bytes), MSG_DONTWAIT);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (count > 0) p.said.append(bytes, count);
    FrameHeader header;
    bool is_whole = p.said.size() >= sizeof(header);
    if (is_whole) {
      std::memcpy(&header, p.said.data(), sizeof(header));
      const absl::Status fault = check_frame(header, group_.size());
      if (!fault.ok() || header.kind != FrameKind::kFailure) {
        p.reason = absl::DataLossError("it sent what is not a failure");
        return;
      }
      is_whole = static_cast<int64_t>(p.said.size() - sizeof(header)) >= header.length;
    }
    if (is_whole) {
      p.reason = told_by(header, std::string_view(p.said).substr(sizeof(header), header.length));
    }
    if (count <= 0) p.control = UniqueFd();
  }
}

bool Engine::hear(int peer) {
  Peer& p = peers_[peer];
  read_control(p);
  if (p.reason.ok()) return true;
  // What it has sent before counts.
  p.hung_up = true;
  if (!read_from(peer, /*look=*/true) || !advance_all()) return false;
  return fail_as_told(peer, p.reason);
}

bool Engine::listen() {
  std::vector<pollfd> polled;
  list_polled(polled);
  ::poll(polled.data(), polled.size(), 0);
  return take_polled(polled) && progress_beside_watcher();
}

// A Status of its own for each caller, so that threads share no reference count.
absl::Status Engine::failure_of(const Operation& operation) const {
  if (operation.ticket == failed_ticket_) return retold(failure_);
  return retold(failure_, str_cat(name_of(operation), ": ", failure_.message()));
}

bool Engine::is_absent(const Operation& operation, int peer) const {
  if (!operation.awaited[peer]) return false;
  const Peer& p = peers_[peer];
  return is_point_to_point(operation.call.op) ? p.receiver != &operation
                                              : p.sequence < operation.signature.sequence;
}

bool Engine::is_deaf(const Operation& operation, int peer) const {
  const Peer& p = peers_[peer];
  return !operation.awaited[peer] && p.connection &&
         (p.connection->has_output() || !p.held.empty());
}

Wait Engine::wait_of(const Operation& operation) const {
  return {.group = group_.name,
          .world_ranks = group_.world_ranks,
          .rank = group_.rank,
          .call = operation.signature,
          .message_tag = operation.call.message_tag};
}

void Engine::say_late(Operation& operation, absl::Duration patience) {
  if (std::exchange(operation.said, true)) return;
  std::vector<int> absent, slow;
  for (int peer = 0; peer < group_.size(); ++peer) {
    if (is_absent(operation, peer)) absent.push_back(peer);
    if (operation.awaited[peer] || is_deaf(operation, peer)) slow.push_back(peer);
  }
  if (!slow.empty()) shardweave::say_late(wait_of(operation), patience, absent, slow);
}

absl::Status Engine::timeout_of(const Operation& operation) const {
  std::vector<std::string> missing, deaf;
  int absent = -1, slow = -1;  // the first of each
  for (int peer = 0; peer < group_.size(); ++peer) {
    if (operation.awaited[peer]) missing.push_back(name_peer(peer));
    if (is_deaf(operation, peer)) deaf.push_back(name_peer(peer));
    if (absent < 0 && is_absent(operation, peer)) absent = peer;
    if (slow < 0 && (operation.awaited[peer] || is_deaf(operation, peer))) slow = peer;
  }
  std::string text = "the deadline has passed";
  if (!missing.empty()) {
    str_append(&text, "; nothing came from ", absl::StrJoin(missing, ", "));
  }
  if (!deaf.empty()) {
    str_append(&text, "; what was sent was not taken by ", absl::StrJoin(deaf, ", "));
  }
  if (absent >= 0) str_append(&text, "; ", wanted_of_others(wait_of(operation)));
  // Who has not called it, before who is only slow: the others hear of the same one.
  const int failed = absent >= 0 ? absent : slow;
  const absl::Status status = absl::DeadlineExceededError(text);
  return failed < 0 ? status : of_rank(status, group_.world_ranks[failed]);
}

std::string Engine::name_of(const Operation& operation) const {
  const CallSignature& signature = operation.signature;
  return str_cat(to_string(signature), ", #", signature.sequence, " of group '", group_.name,
                 "' (rank ", group_.rank, " of ", group_.size(), ")");
}

std::string Engine::name_peer(int peer) const {
  return str_cat("rank ", peer, " (world rank ", group_.world_ranks[peer], ")");
}

std::string Engine::why_left(int peer) const {
  const Peer& p = peers_[peer];
  return p.left && !p.last_words.empty() ? str_cat(", after a failure: ", p.last_words) : "";
}

// 5. Waiting.

uint64_t Engine::traffic() const {
  uint64_t sum = 0;
  for (const Peer& peer : peers_) {
    if (peer.connection) sum += peer.connection->traffic();
  }
  return sum;
}

void Engine::watch(Lock& lock, Backend::Ticket ticket, Deadline deadline, Patience& patience) {
  const bool helps = ticket == Backend::kDone;
  bool look = helps;
  Clock::time_point awake_since = Clock::now();
  for (;;) {
    const uint64_t before = traffic();
    if (!progress(look)) return;
    Operation* operation = helps ? nullptr : find(ticket);
    if (helps ? pending_.empty() || followers_ > 0 || stopping_ : operation == nullptr) return;
    const Clock::time_point now = Clock::now();
    if (now >= deadline) {
      // This rank may be the one that was late: it was stopped, say. Then the others have told it.
      if (!listen()) return;
      operation = find(ticket);
      if (operation != nullptr) fail(timeout_of(*operation), operation);
      return;
    }
    if (operation != nullptr && patience.has_ended(deadline)) say_late(*operation, patience.time());
    if (traffic() != before) {
      awake_since = now;
      continue;
    }
    look = helps || now - awake_since >= kAwake;
    if (look) {
      if (!sleep_until_traffic(lock, patience.until(deadline))) return;
    } else {
      lock.unlock();
      ::sched_yield();
      lock.lock();
    }
    if (!failure_.ok()) return;
  }
}

// The eventfd, then of each peer the data and the control connection.
void Engine::list_polled(std::vector<pollfd>& polled) const {
  polled.assign(1, {.fd = wake_.get(), .events = POLLIN});
  for (const Peer& peer : peers_) {
    pollfd p{.fd = -1};  // ignored
    if (peer.connection && !peer.gone) {
      p.fd = peer.connection->fd();
      p.events = static_cast<short>((peer.has_header ? 0 : POLLIN) | POLLRDHUP |
                                    (peer.connection->has_output() ? POLLOUT : 0));
    }
    polled.push_back(p);
    polled.push_back({.fd = peer.control.get(), .events = POLLIN});
  }
}

bool Engine::take_polled(const std::vector<pollfd>& polled) {
  for (size_t i = 0; i < peers_.size(); ++i) {
    if (polled[2 * i + 1].revents & (POLLRDHUP | POLLHUP | POLLERR)) peers_[i].hung_up = true;
    if (polled[2 * i + 2].revents != 0 && !hear(static_cast<int>(i))) return false;
  }
  return true;
}

bool Engine::sleep_until_traffic(Lock& lock, Deadline deadline) {
  list_polled(polled_);
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
  const int timeout = static_cast<int>(std::clamp<int64_t>(left.count(), 0, kMaxSleepMs));
  sleeping_ = true;
  lock.unlock();
  ::poll(polled_.data(), polled_.size(), timeout);
  lock.lock();
  sleeping_ = false;
  if (polled_[0].revents != 0) {
    uint64_t count;
    (void)!::read(wake_.get(), &count, sizeof(count));
  }
  return failure_.ok() && take_polled(polled_);
}

void Engine::wake_watcher() {
  if (!sleeping_) return;
  const uint64_t one = 1;
  (void)!::write(wake_.get(), &one, sizeof(one));
}

// 6. The helper.

bool Engine::have_helper() {
  if (helper_.joinable()) return true;
  try {
    helper_ = std::thread([this] { help(); });
  } catch (const std::system_error& error) {
    return fail(absl::ResourceExhaustedError(
                    str_cat("no thread to carry on what is not waited for: ", error.what())),
                nullptr);
  }
  return true;
}

bool Engine::needs_help(const Operation* operation) {
  return operation->unsent > 0 ||
         std::max(operation->call.in.bytes(), operation->call.out.bytes()) >= kMuch;
}

// Whoever issues one small operation and waits for it does not need help, and must not pay for
// waking a thread.
void Engine::call_helper(Lock& lock) {
  const bool wake = hurry_ || !helper_dozes_;
  lock.unlock();  // or the helper would wake only to wait for it
  if (wake) help_wanted_.notify_one();
}

void Engine::help() {
  Lock lock(mutex_);
  Backend::Ticket seen = 0;
  int idle = 0;  // times that nothing was pending
  while (!stopping_ && failure_.ok()) {
    idle = pending_.empty() ? idle + 1 : 0;
    const bool forgotten = !pending_.empty() && (hurry_ || pending_.front()->ticket <= seen);
    hurry_ = false;
    if (forgotten && !watched_) {
      watched_ = true;
      Patience endless = Patience::endless();
      watch(lock, Backend::kDone, Deadline::max(), endless);
      watched_ = false;
      turn_.notify_all();
    }
    if (stopping_ || !failure_.ok()) return;
    seen = last_ticket_;
    helper_dozes_ = idle < kDozes;
    if (helper_dozes_) {
      help_wanted_.wait_for(lock, doze_);
    } else {
      help_wanted_.wait(lock);
    }
  }
}

}  // namespace shardweave::gloo_internal
