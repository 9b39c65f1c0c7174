#include "shardweave/comm/inproc/mailbox.h"

#include <algorithm>
#include <cstring>

#include "shardweave/comm/failed_rank.h"
#include "shardweave/comm/patience.h"
#include "shardweave/comm/str_cat.h"

namespace shardweave::inproc {
namespace {

// A ticket is count * kPosts + index of the post, count from 1.
uint64_t index_of(uint64_t ticket) {
  return ticket % Mailboxes::kPosts;
}

}  // namespace

Mailboxes::Mailboxes(Group& group) : group_(group), ranks_(group.size()) {}

Mailboxes::Post* Mailboxes::free_post(Rank& rank) {
  if (rank.posts == nullptr) rank.posts = std::make_unique<Post[]>(kPosts);
  for (uint64_t tried = 0; tried < kPosts; ++tried) {
    const uint64_t index = rank.cursor++ % kPosts;
    Post& post = rank.posts[index];
    if (post.done.load() != post.ticket) continue;
    post.ticket = post.ticket == 0 ? kPosts + index : post.ticket + kPosts;
    return &post;
  }
  return nullptr;
}

Mailboxes::Post* Mailboxes::match(Rank& receiver, Post* mine) {
  const auto sender = [](const Post& post) {
    return is_send(post) ? post.owner : post.signature.root;
  };
  std::lock_guard lock(receiver.mutex);
  std::vector<Post*>& mailbox = receiver.mailbox;
  const auto other = std::find_if(mailbox.begin(), mailbox.end(), [&](const Post* post) {
    return is_send(*post) != is_send(*mine) && sender(*post) == sender(*mine) &&
           post->message_tag == mine->message_tag;
  });
  if (other == mailbox.end()) {
    mailbox.push_back(mine);
    return nullptr;
  }
  Post* const found = *other;
  mailbox.erase(other);
  return found;
}

absl::Status Mailboxes::transfer(int rank, const Post& send, const Post& recv) {
  const CallSignature& from = send.signature;
  const CallSignature& to = recv.signature;
  if (from.count != to.count || from.dtype != to.dtype) {
    return absl::FailedPreconditionError(
        str_cat("a send and a recv of group '", group_.name(), "' differ: rank ", send.owner,
                " called ", to_string(from), ", rank ", recv.owner, " called ", to_string(to)));
  }
  Group::Touch touch(group_, rank);
  if (group_.broken()) return group_.failure();
  if (from.count > 0) std::memmove(recv.data, send.data, from.count * element_size(from.dtype));
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> Mailboxes::post(int rank, const Call& call) {
  if (group_.broken()) return group_.failure();
  Post* const mine = free_post(ranks_[rank]);
  if (mine == nullptr) {
    return absl::ResourceExhaustedError(str_cat(to_string(call), " on group '", group_.name(),
                                                "': rank ", rank, " has ", kPosts,
                                                " sends and recvs pending already"));
  }
  const bool sends = call.op == OpKind::kSend;
  mine->owner = rank;
  mine->message_tag = call.message_tag;
  mine->signature = signature_of(call);
  mine->data = sends ? static_cast<std::byte*>(const_cast<void*>(call.in.data))
                     : static_cast<std::byte*>(call.out.data);
  const uint64_t ticket = mine->ticket;

  // From here on a post in a mailbox is the matching rank's.
  Post* const other = match(ranks_[sends ? call.peer : rank], mine);
  if (other == nullptr) return ticket;
  absl::Status status = transfer(rank, sends ? *mine : *other, sends ? *other : *mine);
  if (!status.ok()) {
    group_.fail(status);
    return group_.failure();
  }
  const int peer = other->owner;
  mine->done.store(ticket);
  other->done.store(other->ticket);  // and free for its owner
  group_.notify(peer);
  return 0;
}

bool Mailboxes::done(int rank, uint64_t ticket) const {
  return ranks_[rank].posts[index_of(ticket)].done.load() >= ticket || group_.broken();
}

absl::Status Mailboxes::wait(int rank, uint64_t ticket, Deadline deadline, Patience patience) {
  Post& post = ranks_[rank].posts[index_of(ticket)];
  while (post.done.load() < ticket) {
    if (group_.broken()) {
      group_.quiesce();
      return post.done.load() >= ticket ? absl::OkStatus() : group_.failure();
    }
    // Not done: the post is not free, and its signature stays as it is.
    const int peer = post.signature.root;
    const auto waited = [&] {
      return str_cat(to_string(post.signature), ", #", post.signature.sequence,
                     " of its kind on group '", group_.name(), "': rank ", rank,
                     " waited for rank ", peer, " (world rank ", group_.world_ranks()[peer], ")");
    };
    const int departures = group_.departures();
    // A rank that has left comes no more; what it had posted before is matched, or was taken out.
    if (group_.has_left(peer) && post.done.load() < ticket) {
      group_.fail(of_rank(absl::UnavailableError(str_cat(waited(), ", which has left")),
                          group_.world_ranks()[peer]));
      continue;
    }
    const bool ready = group_.wait(
        rank, [&] { return patience.until(deadline); },
        [&] {
          return post.done.load() >= ticket || group_.broken() || group_.departures() != departures;
        });
    if (ready) continue;
    const Wait wait{.group = group_.name(),
                    .world_ranks = group_.world_ranks(),
                    .rank = rank,
                    .call = post.signature,
                    .message_tag = post.message_tag};
    if (!patience.has_ended(deadline)) {
      group_.fail(of_rank(absl::DeadlineExceededError(
                              str_cat(waited(), " until the deadline; ", wanted_of_others(wait))),
                          group_.world_ranks()[peer]));
    } else if (post.said.exchange(ticket) != ticket) {
      say_late(wait, patience.time(), {peer});
    }
  }
  return absl::OkStatus();
}

void Mailboxes::leave(int rank) {
  for (Rank& receiver : ranks_) {
    std::lock_guard lock(receiver.mutex);
    std::erase_if(receiver.mailbox, [&](const Post* post) { return post->owner == rank; });
  }
}

}  // namespace shardweave::inproc
