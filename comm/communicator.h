// A Communicator moves bytes between the ranks of one group.
//
//   float x = rank;
//   auto work = comm.all_reduce(Buffer::of(&x, 1), ReduceOp::kSum);
//   if (absl::Status s = work.wait(); !s.ok()) ...
//
// Contract to be completed: threads (one rank, one thread at a time), ownership (buffers stay alive until the Work is done),
// order (all ranks of a group issue the same collectives in the same order), errors (a failed collective breaks the communicator:
// later ones fail at once with the first error).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "shardweave/placement/reduce_op.h"

namespace shardweave {

enum class DType : uint8_t {
  kF64, kF32, kF16, kBF16, kF8E4M3, kF8E5M2,  // fp8 moves as bytes and cannot be reduced
  kI64, kI32, kI16, kI8, kU64, kU32, kU16, kU8, kBool,
};
int64_t element_size(DType dtype);
std::string_view to_string(DType dtype);

enum class DeviceType : uint8_t { kCpu, kCuda };
struct Device {
  DeviceType type = DeviceType::kCpu;
  int index = 0;
  friend bool operator==(const Device&, const Device&) = default;
};

// A borrowed piece of memory: `count` elements of `dtype`.
struct Buffer {
  void* data = nullptr;
  int64_t count = 0;
  DType dtype = DType::kU8;
  Device device;
  template <typename T> static Buffer of(T* data, int64_t count);   // for the C++ types with a DType
  int64_t bytes() const { return count * element_size(dtype); }
};
struct ConstBuffer {  // implicit from Buffer
  ConstBuffer() = default;
  ConstBuffer(const Buffer& b) : data(b.data), count(b.count), dtype(b.dtype), device(b.device) {}
  const void* data = nullptr;
  int64_t count = 0;
  DType dtype = DType::kU8;
  Device device;
  int64_t bytes() const { return count * element_size(dtype); }
};

// Handle of one asynchronous operation; cheap to copy; an empty Work is done and OK.
class Work {
 public:
  bool done() const;
  // Blocks until done or the operation's deadline has passed. CPU: the data is there afterwards.
  absl::Status wait() const;
};

struct CallOptions {
  absl::Duration timeout = absl::ZeroDuration();   // zero: the communicator's default
  std::string_view tag;                            // shown in errors, the flight record and traces
};

class Communicator {
 public:
  virtual ~Communicator();
  int rank() const;
  int size() const;
  const std::string& name() const;                 // of the group, for messages
  const std::vector<int64_t>& world_ranks() const; // group rank -> rank in the world

  // In place when in.data == out.data. Counts are per rank and validated here, before anything moves.
  Work all_reduce(ConstBuffer in, Buffer out, ReduceOp op, const CallOptions& options = {});
  Work all_gather(ConstBuffer in, Buffer out, const CallOptions& options = {});              // out.count == size * in.count
  Work all_gather_v(ConstBuffer in, Buffer out, absl::Span<const int64_t> counts, const CallOptions& options = {});
  Work reduce_scatter(ConstBuffer in, Buffer out, ReduceOp op, const CallOptions& options = {});  // in.count == size * out.count
  Work reduce_scatter_v(ConstBuffer in, Buffer out, absl::Span<const int64_t> counts, ReduceOp op, const CallOptions& options = {});
  Work all_to_all(ConstBuffer in, Buffer out, const CallOptions& options = {});
  Work all_to_all_v(ConstBuffer in, absl::Span<const int64_t> send_counts, Buffer out,
                    absl::Span<const int64_t> recv_counts, const CallOptions& options = {});
  Work broadcast(Buffer data, int root, const CallOptions& options = {});
  Work reduce(ConstBuffer in, Buffer out, ReduceOp op, int root, const CallOptions& options = {});
  Work gather(ConstBuffer in, Buffer out, int root, const CallOptions& options = {});
  Work scatter(ConstBuffer in, Buffer out, int root, const CallOptions& options = {});
  Work send(ConstBuffer data, int peer, int message_tag = 0, const CallOptions& options = {});
  Work recv(Buffer data, int peer, int message_tag = 0, const CallOptions& options = {});
  Work barrier(const CallOptions& options = {});

  // Between start and end the operations are collected and run as one.
  // (coalescing API: to be designed by the owner, e.g. a scoped object that returns one Work)

  // Collective over this communicator's group. Ranks with the same color form a new group, ordered by key then rank;
  // color < 0: this rank gets nullptr.
  absl::StatusOr<std::shared_ptr<Communicator>> split(int color, int key, std::string name);
  // Only the members call (ranks of this communicator, in the order that they get in the new one); all with the same arguments.
  absl::StatusOr<std::shared_ptr<Communicator>> subgroup(absl::Span<const int64_t> members, std::string name);
  // Breaks the communicator on all ranks where the backend can: pending and later operations fail with `reason`.
  void abort(absl::Status reason);
};

}  // namespace shardweave
