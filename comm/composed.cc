#include "shardweave/comm/composed.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#include "shardweave/comm/failed_rank.h"
#include "shardweave/comm/reduction.h"
#include "shardweave/comm/str_cat.h"

namespace shardweave {
namespace {

// Messages of composed collectives: one tag is enough, as messages with the same tag stay in order.
constexpr int kMessageTag = -1;

// Memory for pieces that are on their way.
class Scratch {
 public:
  explicit Scratch(int64_t bytes)
      : bytes_(new std::max_align_t[bytes / sizeof(std::max_align_t) + 1]) {}
  std::byte* data() const { return reinterpret_cast<std::byte*>(bytes_.get()); }

 private:
  std::unique_ptr<std::max_align_t[]> bytes_;
};

// One collective on one rank.
class Composed {
 public:
  Composed(Backend& backend, const Call& call)
      : backend_(backend),
        call_(call),
        rank_(backend.group().rank),
        size_(backend.group().size()),
        element_(element_size(call.in.dtype)) {}

  absl::Status run();

 private:
  // Element offsets of `counts`, and their sum at the end.
  static std::vector<int64_t> offsets(absl::Span<const int64_t> counts) {
    std::vector<int64_t> result(counts.size() + 1, 0);
    std::partial_sum(counts.begin(), counts.end(), result.begin() + 1);
    return result;
  }
  std::vector<int64_t> equal_parts(int64_t count) const {
    return std::vector<int64_t>(size_, count);
  }

  const std::byte* in(int64_t element) const {
    return static_cast<const std::byte*>(call_.in.data) + element * element_;
  }
  std::byte* out(int64_t element) const {
    return static_cast<std::byte*>(call_.out.data) + element * element_;
  }

  // Bytes from or to one rank; to and from this rank itself they are copied.
  struct Piece {
    int peer;
    const void* send = nullptr;
    int64_t send_bytes = 0;
    void* recv = nullptr;
    int64_t recv_bytes = 0;
  };
  absl::Status exchange(absl::Span<const Piece> pieces);
  absl::Status start(OpKind op, const Piece& piece, std::vector<Backend::Ticket>& tickets);

  absl::Status agree();
  absl::Status agree_on_counts();
  absl::Status gather_all(const void* mine, absl::Span<const int64_t> counts, std::byte* all);
  absl::Status all_to_all(absl::Span<const int64_t> send, absl::Span<const int64_t> recv);
  absl::Status reduce_scatter(absl::Span<const int64_t> counts, void* mine);
  absl::Status all_reduce();
  absl::Status reduce();
  absl::Status broadcast();
  absl::Status gather();
  absl::Status scatter();

  Backend& backend_;
  const Call& call_;
  const int rank_;
  const int size_;
  const int64_t element_;
};

absl::Status Composed::start(OpKind op, const Piece& piece, std::vector<Backend::Ticket>& tickets) {
  Call part;
  part.op = op;
  if (op == OpKind::kSend) {
    part.in = {piece.send, piece.send_bytes, DType::kU8};
  } else {
    part.out = {piece.recv, piece.recv_bytes, DType::kU8};
  }
  part.peer = piece.peer;
  part.message_tag = kMessageTag;
  part.sequence = call_.sequence;
  part.deadline = call_.deadline;
  part.tag = call_.tag;
  absl::StatusOr<Backend::Ticket> ticket = backend_.start(part);
  if (ticket.ok() && *ticket != Backend::kDone) tickets.push_back(*ticket);
  return ticket.status();
}

absl::Status Composed::exchange(absl::Span<const Piece> pieces) {
  std::vector<Backend::Ticket> tickets;
  absl::Status first_error;
  for (const Piece& piece : pieces) {
    if (piece.peer == rank_) {
      if (piece.send != piece.recv && piece.send_bytes > 0) {
        std::memmove(piece.recv, piece.send, piece.send_bytes);
      }
      continue;
    }
    if (piece.recv_bytes > 0) first_error.Update(start(OpKind::kRecv, piece, tickets));
    if (piece.send_bytes > 0) first_error.Update(start(OpKind::kSend, piece, tickets));
    if (!first_error.ok()) {
      backend_.abort(first_error);  // so that what was started ends, and the others do not wait
      break;
    }
  }
  for (Backend::Ticket ticket : tickets) first_error.Update(backend_.wait(ticket, call_.deadline));
  if (first_error.ok()) return first_error;
  return retold(first_error,
                str_cat(name_call(backend_.group(), call_), ": ", first_error.message()));
}

absl::Status Composed::gather_all(const void* mine, absl::Span<const int64_t> byte_counts,
                                  std::byte* all) {
  const std::vector<int64_t> offset = offsets(byte_counts);
  std::vector<Piece> pieces;
  for (int peer = 0; peer < size_; ++peer) {
    pieces.push_back({peer, mine, byte_counts[rank_], all + offset[peer], byte_counts[peer]});
  }
  return exchange(pieces);
}

absl::Status Composed::agree() {
  const CallSignature mine = signature_of(call_);
  std::vector<CallSignature> all(size_);
  absl::Status status = gather_all(&mine, equal_parts(sizeof(CallSignature)),
                                   reinterpret_cast<std::byte*>(all.data()));
  if (!status.ok()) return status;
  return check_same_call(backend_.group().name, all);
}

// all_to_all_v: what a rank sends is what the other expects.
absl::Status Composed::agree_on_counts() {
  std::vector<int64_t> sent(size_);
  std::vector<Piece> pieces;
  for (int peer = 0; peer < size_; ++peer) {
    pieces.push_back({peer, &call_.in_counts[peer], sizeof(int64_t), &sent[peer], sizeof(int64_t)});
  }
  if (absl::Status status = exchange(pieces); !status.ok()) return status;
  for (int peer = 0; peer < size_; ++peer) {
    if (sent[peer] != call_.out_counts[peer]) {
      return absl::FailedPreconditionError(str_cat(name_call(backend_.group(), call_), ": rank ",
                                                   peer, " sends ", sent[peer], " elements, rank ",
                                                   rank_, " expects ", call_.out_counts[peer]));
    }
  }
  return absl::OkStatus();
}

absl::Status Composed::all_to_all(absl::Span<const int64_t> send, absl::Span<const int64_t> recv) {
  const std::vector<int64_t> from = offsets(send);
  const std::vector<int64_t> to = offsets(recv);
  std::vector<Piece> pieces;
  for (int peer = 0; peer < size_; ++peer) {
    pieces.push_back(
        {peer, in(from[peer]), send[peer] * element_, out(to[peer]), recv[peer] * element_});
  }
  return exchange(pieces);
}

// Every rank gets all ranks' values of its part and reduces them in rank order.
absl::Status Composed::reduce_scatter(absl::Span<const int64_t> counts, void* mine) {
  const std::vector<int64_t> offset = offsets(counts);
  const int64_t part = counts[rank_];
  Scratch scratch(size_ * part * element_);
  std::vector<Piece> pieces;
  std::vector<const void*> inputs;
  for (int peer = 0; peer < size_; ++peer) {
    inputs.push_back(scratch.data() + peer * part * element_);
    pieces.push_back({peer, in(offset[peer]), counts[peer] * element_,
                      scratch.data() + peer * part * element_, part * element_});
  }
  if (absl::Status status = exchange(pieces); !status.ok()) return status;
  reduce_ranks(call_.in.dtype, call_.reduce_op, inputs, absl::MakeConstSpan(&mine, 1), part);
  return absl::OkStatus();
}

absl::Status Composed::all_reduce() {
  // Parts as even as can be.
  std::vector<int64_t> counts(size_);
  for (int r = 0; r < size_; ++r) {
    counts[r] = call_.in.count * (r + 1) / size_ - call_.in.count * r / size_;
  }
  std::byte* mine = out(offsets(counts)[rank_]);
  if (absl::Status status = reduce_scatter(counts, mine); !status.ok()) return status;
  for (int64_t& count : counts) count *= element_;
  return gather_all(mine, counts, out(0));
}

absl::Status Composed::reduce() {
  const int64_t bytes = call_.in.bytes();
  if (rank_ != call_.peer) return exchange({{call_.peer, call_.in.data, bytes}});
  Scratch scratch(size_ * bytes);
  std::vector<Piece> pieces;
  std::vector<const void*> inputs;
  for (int peer = 0; peer < size_; ++peer) {
    std::byte* place = scratch.data() + peer * bytes;
    inputs.push_back(peer == rank_ ? call_.in.data : place);
    if (peer != rank_) pieces.push_back({peer, nullptr, 0, place, bytes});
  }
  if (absl::Status status = exchange(pieces); !status.ok()) return status;
  reduce_ranks(call_.in.dtype, call_.reduce_op, inputs, absl::MakeConstSpan(&call_.out.data, 1),
               call_.in.count);
  return absl::OkStatus();
}

absl::Status Composed::broadcast() {
  const int64_t bytes = call_.out.bytes();
  if (rank_ != call_.peer) return exchange({{call_.peer, nullptr, 0, call_.out.data, bytes}});
  std::vector<Piece> pieces;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_) pieces.push_back({peer, call_.in.data, bytes});
  }
  return exchange(pieces);
}

absl::Status Composed::gather() {
  const int64_t bytes = call_.in.bytes();
  if (rank_ != call_.peer) return exchange({{call_.peer, call_.in.data, bytes}});
  std::vector<Piece> pieces;
  for (int peer = 0; peer < size_; ++peer) {
    pieces.push_back(
        {peer, call_.in.data, peer == rank_ ? bytes : 0, out(peer * call_.in.count), bytes});
  }
  return exchange(pieces);
}

absl::Status Composed::scatter() {
  const int64_t bytes = call_.out.bytes();
  if (rank_ != call_.peer) return exchange({{call_.peer, nullptr, 0, call_.out.data, bytes}});
  std::vector<Piece> pieces;
  for (int peer = 0; peer < size_; ++peer) {
    pieces.push_back(
        {peer, in(peer * call_.out.count), bytes, call_.out.data, peer == rank_ ? bytes : 0});
  }
  return exchange(pieces);
}

absl::Status Composed::run() {
  // This exchange is all that a barrier needs.
  if (absl::Status status = agree(); !status.ok()) return status;
  switch (call_.op) {
    case OpKind::kAllReduce:
      return all_reduce();
    case OpKind::kAllGather:
      return gather_all(call_.in.data, equal_parts(call_.in.bytes()), out(0));
    case OpKind::kAllGatherV: {
      std::vector<int64_t> bytes(call_.out_counts.begin(), call_.out_counts.end());
      for (int64_t& count : bytes) count *= element_;
      return gather_all(call_.in.data, bytes, out(0));
    }
    case OpKind::kReduceScatter:
      return reduce_scatter(equal_parts(call_.out.count), call_.out.data);
    case OpKind::kReduceScatterV:
      return reduce_scatter(call_.in_counts, call_.out.data);
    case OpKind::kAllToAll: {
      const std::vector<int64_t> counts = equal_parts(call_.in.count / size_);
      return all_to_all(counts, counts);
    }
    case OpKind::kAllToAllV:
      if (absl::Status status = agree_on_counts(); !status.ok()) return status;
      return all_to_all(call_.in_counts, call_.out_counts);
    case OpKind::kBroadcast:
      return broadcast();
    case OpKind::kReduce:
      return reduce();
    case OpKind::kGather:
      return gather();
    case OpKind::kScatter:
      return scatter();
    case OpKind::kBarrier:
    case OpKind::kSend:
    case OpKind::kRecv:
      return absl::OkStatus();
  }
  return absl::OkStatus();
}

}  // namespace

bool can_compose(const Backend& backend, const Call& call) {
  return !is_point_to_point(call.op) && call.in.device.type == DeviceType::kCpu &&
         call.out.device.type == DeviceType::kCpu && backend.implements(OpKind::kSend) &&
         backend.implements(OpKind::kRecv);
}

absl::Status run_composed(Backend& backend, const Call& call) {
  return Composed(backend, call).run();
}

}  // namespace shardweave
