#include "shardweave/comm/nccl/collectives.h"

#include <algorithm>
#include <optional>
#include <vector>

namespace shardweave::nccl_internal {
namespace {

std::optional<int> number_type(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return kNcclFloat64;
    case DType::kF32:
      return kNcclFloat32;
    case DType::kF16:
      return kNcclFloat16;
    case DType::kBF16:
      return kNcclBfloat16;
    case DType::kI64:
      return kNcclInt64;
    case DType::kI32:
      return kNcclInt32;
    case DType::kI8:
      return kNcclInt8;
    case DType::kU64:
      return kNcclUint64;
    case DType::kU32:
      return kNcclUint32;
    case DType::kU8:
    case DType::kBool:
      return kNcclUint8;
    case DType::kI16:
    case DType::kU16:
    case DType::kF8E4M3:
    case DType::kF8E5M2:
      return std::nullopt;
  }
  return std::nullopt;
}

// Of bools the largest is "or", the smallest "and".
int operator_of(DType dtype, ReduceOp op) {
  const bool is_bool = dtype == DType::kBool;
  switch (op) {
    case ReduceOp::kSum:
      return is_bool ? kNcclMax : kNcclSum;
    case ReduceOp::kAvg:
      return kNcclAvg;
    case ReduceOp::kMin:
      return kNcclMin;
    case ReduceOp::kMax:
      return kNcclMax;
    case ReduceOp::kProduct:
      return is_bool ? kNcclMin : kNcclProd;
  }
  return kNcclSum;
}

class Launch {
 public:
  Launch(const Library& library, const Lane& lane, const GroupInfo& group, const Call& call)
      : library_(library),
        lane_(lane),
        call_(call),
        rank_(group.rank),
        size_(group.size()),
        element_(element_size(call.in.dtype)) {}

  Launched run() {
    switch (call_.op) {
      case OpKind::kAllReduce:
        if (call_.in.count > 0) {
          nccl("ncclAllReduce",
               library_.ncclAllReduce(call_.in.data, call_.out.data, call_.in.count, dtype(),
                                      reduction(), lane_.comm(), lane_.stream()));
        }
        break;
      case OpKind::kReduce:
        reduce(call_.in.data, call_.out.data, call_.in.count, call_.peer);
        break;
      case OpKind::kReduceScatter:
        reduce_scatter(call_.out.count);
        break;
      case OpKind::kReduceScatterV:
        reduce_scatter_v();
        break;
      case OpKind::kAllGather:
        all_gather(call_.in.count);
        break;
      case OpKind::kAllGatherV:
        all_gather_v();
        break;
      case OpKind::kAllToAll: {
        const std::vector<int64_t> counts(size_, call_.in.count / size_);
        exchange(counts, counts);
        break;
      }
      case OpKind::kAllToAllV:
        exchange(call_.in_counts, call_.out_counts);
        break;
      case OpKind::kBroadcast:
        if (call_.in.count > 0) {
          nccl("ncclBroadcast",
               library_.ncclBroadcast(call_.in.data, call_.out.data, call_.in.bytes(), kNcclInt8,
                                      call_.peer, lane_.comm(), lane_.stream()));
        }
        break;
      case OpKind::kGather:
        gather();
        break;
      case OpKind::kScatter:
        scatter();
        break;
      case OpKind::kSend:
        send(call_.peer, 0, call_.in.count);
        break;
      case OpKind::kRecv:
        recv(call_.peer, 0, call_.out.count);
        break;
      case OpKind::kBarrier:
        break;
    }
    return launched_;
  }

 private:
  const std::byte* in(int64_t element) const {
    return static_cast<const std::byte*>(call_.in.data) + element * element_;
  }
  std::byte* out(int64_t element) const {
    return static_cast<std::byte*>(call_.out.data) + element * element_;
  }
  int dtype() const { return *number_type(call_.in.dtype); }
  int reduction() const { return operator_of(call_.in.dtype, call_.reduce_op); }

  // Keeps the first error; InProgress gives way to it.
  void nccl(const char* name, int result) {
    if (launched_.nccl != kNcclSuccess && launched_.nccl != kNcclInProgress) return;
    if (launched_.nccl == kNcclInProgress && result == kNcclSuccess) return;
    launched_.call = name;
    launched_.nccl = result;
  }
  void copy(void* to, const void* from, int64_t elements) {
    if (elements == 0 || to == from || launched_.cuda != kCudaSuccess) return;
    launched_.cuda = library_.cudaMemcpyAsync(to, from, elements * element_,
                                              kCudaMemcpyDeviceToDevice, lane_.stream());
  }
  void send(int peer, int64_t begin, int64_t count) {
    if (count == 0) return;
    nccl("ncclSend", library_.ncclSend(in(begin), count * element_, kNcclInt8, peer, lane_.comm(),
                                       lane_.stream()));
  }
  void recv(int peer, int64_t begin, int64_t count) {
    if (count == 0) return;
    nccl("ncclRecv", library_.ncclRecv(out(begin), count * element_, kNcclInt8, peer, lane_.comm(),
                                       lane_.stream()));
  }
  template <typename Body>
  void grouped(const Body& body) {
    nccl("ncclGroupStart", library_.ncclGroupStart());
    body();
    nccl("ncclGroupEnd", library_.ncclGroupEnd());
  }

  void reduce(const void* from, void* to, int64_t count, int root) {
    if (count == 0) return;
    nccl("ncclReduce", library_.ncclReduce(from, to, count, dtype(), reduction(), root,
                                           lane_.comm(), lane_.stream()));
  }
  void reduce_scatter(int64_t count) {
    if (count == 0) return;
    nccl("ncclReduceScatter",
         library_.ncclReduceScatter(call_.in.data, call_.out.data, count, dtype(), reduction(),
                                    lane_.comm(), lane_.stream()));
  }
  void all_gather(int64_t count) {
    if (count == 0) return;
    nccl("ncclAllGather", library_.ncclAllGather(call_.in.data, call_.out.data, count * element_,
                                                 kNcclInt8, lane_.comm(), lane_.stream()));
  }

  static bool are_even(absl::Span<const int64_t> counts) {
    return std::all_of(counts.begin(), counts.end(), [&](int64_t c) { return c == counts[0]; });
  }

  void reduce_scatter_v() {
    if (are_even(call_.in_counts)) return reduce_scatter(call_.out.count);
    grouped([&] {
      int64_t begin = 0;
      for (int root = 0; root < size_; begin += call_.in_counts[root++]) {
        reduce(in(begin), root == rank_ ? call_.out.data : nullptr, call_.in_counts[root], root);
      }
    });
  }
  void all_gather_v() {
    if (are_even(call_.out_counts)) return all_gather(call_.in.count);
    grouped([&] {
      int64_t begin = 0;
      for (int peer = 0; peer < size_; begin += call_.out_counts[peer++]) {
        if (peer == rank_) {
          copy(out(begin), call_.in.data, call_.in.count);
        } else {
          send(peer, 0, call_.in.count);
          recv(peer, begin, call_.out_counts[peer]);
        }
      }
    });
  }
  void exchange(absl::Span<const int64_t> sends, absl::Span<const int64_t> recvs) {
    grouped([&] {
      int64_t from = 0, to = 0;
      for (int peer = 0; peer < size_; from += sends[peer], to += recvs[peer], ++peer) {
        if (peer == rank_) {
          copy(out(to), in(from), sends[peer]);
        } else {
          send(peer, from, sends[peer]);
          recv(peer, to, recvs[peer]);
        }
      }
    });
  }
  void gather() {
    const int64_t part = call_.in.count;
    grouped([&] {
      if (rank_ != call_.peer) return send(call_.peer, 0, part);
      for (int peer = 0; peer < size_; ++peer) {
        if (peer == rank_) {
          copy(out(peer * part), call_.in.data, part);
        } else {
          recv(peer, peer * part, part);
        }
      }
    });
  }
  void scatter() {
    const int64_t part = call_.out.count;
    grouped([&] {
      if (rank_ != call_.peer) return recv(call_.peer, 0, part);
      for (int peer = 0; peer < size_; ++peer) {
        if (peer == rank_) {
          copy(call_.out.data, in(peer * part), part);
        } else {
          send(peer, peer * part, part);
        }
      }
    });
  }

  const Library& library_;
  const Lane& lane_;
  const Call& call_;
  const int rank_;
  const int size_;
  const int64_t element_;
  Launched launched_;
};

}  // namespace

bool has_reduction(DType dtype, ReduceOp) {
  return number_type(dtype).has_value();
}

Launched launch(const Library& library, const Lane& lane, const GroupInfo& group,
                const Call& call) {
  return Launch(library, lane, group, call).run();
}

}  // namespace shardweave::nccl_internal
