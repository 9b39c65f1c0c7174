// NCCL, as far as comm/nccl uses it. As the real one: calls of a communicator that does not block go
// on after they have returned; ranks that differ or do not come are a hang, until ncclCommAbort.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "shardweave/comm/nccl/testing/fake_machine.h"
#include "shardweave/comm/nccl/testing/fake_reduction.h"

using namespace shardweave;                     // NOLINT
using namespace shardweave::nccl_internal;      // NOLINT: their names are NVIDIA's
using namespace shardweave::fake_gpu_internal;  // NOLINT

namespace {

constexpr int kInvalidArgument = 4;
constexpr int kInvalidUsage = 5;

FakeMachine& machine() {
  return FakeMachine::get();
}

enum class Kind { kAllReduce, kReduce, kBroadcast, kAllGather, kReduceScatter, kSend, kRecv };

struct Operation {
  Kind kind;
  const void* in = nullptr;
  void* out = nullptr;
  size_t count = 0;
  int dtype = 0;
  int op = 0;
  int peer = 0;  // or root
  // Of a collective: how many its group has, and which of them it is.
  size_t group_size = 1;
  size_t place = 0;

  bool is_message() const { return kind == Kind::kSend || kind == Kind::kRecv; }
  bool fits(const Operation& o) const {
    return kind == o.kind && count == o.count && dtype == o.dtype && op == o.op && peer == o.peer &&
           group_size == o.group_size && place == o.place;
  }
};

// Where the ranks of a communicator meet.
struct Group {
  explicit Group(int ranks) : size(ranks), aborted(ranks, false) {}

  const int size;
  std::mutex mutex;
  std::condition_variable wake;
  // Guarded by mutex:
  int joined = 0;
  std::vector<bool> aborted;
  struct Meeting {
    std::vector<std::optional<Operation>> calls;  // by rank
    bool done = false;
  };
  std::map<uint64_t, std::shared_ptr<Meeting>> meetings;  // by the number of the collective
  struct Message {
    Operation operation;
    bool done = false;
  };
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<Message>>> sends, recvs;

  // All have come: with mutex.
  void run(Meeting& meeting) {
    const Operation& first = *meeting.calls[0];
    for (const auto& call : meeting.calls) {
      if (!call->fits(first)) return;  // hangs
    }
    const size_t bytes = first.count * size_of(first.dtype);
    const auto in = [&](int rank) { return machine().reach(meeting.calls[rank]->in); };
    const auto out = [&](int rank) { return machine().reach(meeting.calls[rank]->out); };
    // The output may be the input of its rank: nobody else reads that.
    const auto reduce_at = [&](size_t offset, const std::vector<void*>& outs) {
      std::vector<const void*> ins;
      for (int rank = 0; rank < size; ++rank) ins.push_back(in(rank) + offset);
      std::vector<std::byte> sum(bytes);
      reduce(first.dtype, first.op, ins, sum.data(), first.count);
      for (void* each : outs) std::memcpy(each, sum.data(), bytes);
    };
    switch (first.kind) {
      case Kind::kAllReduce: {
        std::vector<void*> outs;
        for (int rank = 0; rank < size; ++rank) outs.push_back(out(rank));
        reduce_at(0, outs);
        break;
      }
      case Kind::kReduce:
        reduce_at(0, {out(first.peer)});
        break;
      case Kind::kReduceScatter: {
        // A rank's output may be a part of its input, which only it reads.
        for (int rank = 0; rank < size; ++rank) reduce_at(rank * bytes, {out(rank)});
        break;
      }
      case Kind::kBroadcast:
        for (int rank = 0; rank < size; ++rank) std::memmove(out(rank), in(first.peer), bytes);
        break;
      case Kind::kAllGather:
        for (int rank = 0; rank < size; ++rank) {
          for (int from = 0; from < size; ++from) {
            std::memmove(out(rank) + from * bytes, in(from), bytes);
          }
        }
        break;
      case Kind::kSend:
      case Kind::kRecv:
        break;
    }
    meeting.done = true;
    wake.notify_all();
  }

  // With mutex.
  void match(const std::pair<int, int>& from_to) {
    auto& out = sends[from_to];
    auto& in = recvs[from_to];
    while (!out.empty() && !in.empty()) {
      const Operation& send = out.front()->operation;
      const Operation& recv = in.front()->operation;
      if (send.count != recv.count || send.dtype != recv.dtype) return;  // hangs
      std::memmove(machine().reach(recv.out), machine().reach(send.in),
                   send.count * size_of(send.dtype));
      out.front()->done = in.front()->done = true;
      out.pop_front();
      in.pop_front();
      wake.notify_all();
    }
  }
};

struct Comm {
  std::shared_ptr<Group> group;
  int rank = 0;
  int device = 0;
  std::mutex mutex;
  // Guarded by mutex:
  int error = 0;       // asynchronous
  int still_busy = 0;  // looks until the last call has come to its end
  std::vector<std::function<void()>> at_its_end;
  std::set<CudaStream> streams;
  uint64_t collectives = 0;  // that have begun; guarded by the group's mutex

  void abort() {
    const std::lock_guard lock(group->mutex);
    group->aborted[rank] = true;
    // What it has brought is not touched any more.
    for (auto& [number, meeting] : group->meetings) {
      if (!meeting->done) meeting->calls[rank].reset();
    }
    const auto drop = [&](auto& queues, bool first) {
      for (auto& [from_to, queue] : queues) {
        if ((first ? from_to.first : from_to.second) == rank) queue.clear();
      }
    };
    drop(group->sends, true);
    drop(group->recvs, false);
    group->wake.notify_all();
  }
};

std::mutex registry_mutex;
std::map<std::string, std::shared_ptr<Group>> groups;  // by unique id; guarded by it, as are
std::map<NcclComm, std::shared_ptr<Comm>> communicators;

std::shared_ptr<Comm> find(NcclComm handle) {
  const std::lock_guard lock(registry_mutex);
  const auto found = communicators.find(handle);
  return found == communicators.end() ? nullptr : found->second;
}

NcclComm make(std::shared_ptr<Group> group, int rank) {
  auto comm = std::make_shared<Comm>();
  comm->group = std::move(group);
  comm->rank = rank;
  comm->device = machine().current_device();
  {
    const std::lock_guard lock(comm->group->mutex);
    ++comm->group->joined;
  }
  const FakeGpuScript script = machine().script();
  if (script.broken_init && script.faulty_device == comm->device) comm->error = 2;
  const auto handle = reinterpret_cast<NcclComm>(comm.get());
  const std::lock_guard lock(registry_mutex);
  communicators[handle] = std::move(comm);
  return handle;
}

// What NCCL puts on a stream: the operations of one group call.
struct Kernel {
  std::shared_ptr<Comm> comm;
  std::vector<Operation> operations;
  bool hangs = false;

  void run() const {
    machine().run_on(comm->device, 1);
    meet();
    machine().run_on(comm->device, -1);
  }
  void meet() const {
    std::this_thread::sleep_for(
        std::chrono::milliseconds(machine().script().operation_milliseconds));
    Group& group = *comm->group;
    const int rank = comm->rank;
    std::unique_lock lock(group.mutex);
    const auto is_aborted = [&] { return static_cast<bool>(group.aborted[rank]); };
    // Counted when it runs: a graph runs the same kernel again.
    uint64_t number = comm->collectives;
    for (const Operation& operation : operations) comm->collectives += !operation.is_message();
    if (hangs) {
      group.wake.wait(lock, is_aborted);
      return;
    }
    std::vector<std::shared_ptr<Group::Message>> messages;
    for (const Operation& operation : operations) {
      if (!operation.is_message() || is_aborted()) continue;
      const bool sends = operation.kind == Kind::kSend;
      const std::pair<int, int> from_to =
          sends ? std::pair(rank, operation.peer) : std::pair(operation.peer, rank);
      messages.push_back(std::make_shared<Group::Message>(Group::Message{operation}));
      (sends ? group.sends : group.recvs)[from_to].push_back(messages.back());
      group.match(from_to);
    }
    for (const Operation& operation : operations) {
      if (operation.is_message()) continue;
      ++number;
      if (is_aborted()) return;
      std::shared_ptr<Group::Meeting>& slot = group.meetings[number];
      if (slot == nullptr) slot = std::make_shared<Group::Meeting>();
      const std::shared_ptr<Group::Meeting> meeting = slot;
      meeting->calls.resize(group.size);
      meeting->calls[rank] = operation;
      if (std::all_of(meeting->calls.begin(), meeting->calls.end(),
                      [](const auto& call) { return call.has_value(); })) {
        group.run(*meeting);
      }
      group.wake.wait(lock, [&] { return meeting->done || is_aborted(); });
      group.meetings.erase(number);
    }
    group.wake.wait(lock, [&] {
      return is_aborted() || std::all_of(messages.begin(), messages.end(),
                                         [](const auto& message) { return message->done; });
    });
  }
};

// Of the calling thread, between ncclGroupStart and ncclGroupEnd.
struct Grouped {
  int depth = 0;
  struct Call {
    std::shared_ptr<Comm> comm;
    CudaStream stream;
    Operation operation;
  };
  std::vector<Call> calls;
};
thread_local Grouped grouped;

int launch_all(std::vector<Grouped::Call> calls) {
  int result = kNcclSuccess;
  while (!calls.empty()) {
    // Those of the first call's communicator.
    const std::shared_ptr<Comm> comm = calls[0].comm;
    const CudaStream handle = calls[0].stream;
    auto kernel = std::make_shared<Kernel>();
    kernel->comm = comm;
    std::vector<Grouped::Call> others;
    const FakeGpuScript script = machine().script();
    const std::lock_guard lock(comm->mutex);
    for (Grouped::Call& call : calls) {
      if (call.comm != comm) {
        others.push_back(std::move(call));
        continue;
      }
      kernel->operations.push_back(call.operation);
      const int number = machine().count_operation(comm->device);
      if (script.faulty_device == comm->device) {
        if (number == script.hanging_operation) kernel->hangs = true;
        if (number == script.broken_operation) {
          kernel->hangs = true;
          comm->error = kNcclRemoteError;
        }
      }
    }
    calls = std::move(others);
    size_t place = 0;
    const auto collectives =
        std::count_if(kernel->operations.begin(), kernel->operations.end(),
                      [](const Operation& operation) { return !operation.is_message(); });
    for (Operation& operation : kernel->operations) {
      operation.group_size = static_cast<size_t>(collectives);
      if (!operation.is_message()) operation.place = place++;
    }
    comm->streams.insert(handle);
    FakeStream* const stream = machine().stream(handle);
    if (stream == nullptr || stream->device() != comm->device) return kInvalidArgument;
    const auto put = [stream, kernel] { stream->add([kernel] { kernel->run(); }); };
    if (script.calls_go_on) {
      const bool is_slow = script.slow_device < 0 || script.slow_device == comm->device;
      comm->still_busy = is_slow ? script.looks : 1;
      comm->at_its_end.push_back(put);
      result = kNcclInProgress;
    } else {
      put();
    }
  }
  return result;
}

int call(NcclComm handle, CudaStream stream, const Operation& operation) {
  const std::shared_ptr<Comm> comm = find(handle);
  if (comm == nullptr) return kInvalidArgument;
  {
    const std::lock_guard lock(comm->mutex);
    if (comm->still_busy > 0) return kInvalidUsage;
  }
  for (const void* memory : {operation.in, static_cast<const void*>(operation.out)}) {
    if (memory != nullptr &&
        (!machine().is_device_memory(memory) || machine().device_of(memory) != comm->device)) {
      return kInvalidArgument;
    }
  }
  if (grouped.depth > 0) {
    grouped.calls.push_back({comm, stream, operation});
    return kNcclSuccess;
  }
  return launch_all({{comm, stream, operation}});
}

}  // namespace

#define ENTER()                                                                     \
  if (const int scripted = machine().enter(__func__, machine().current_device())) { \
    return scripted;                                                                \
  }

extern "C" {

int ncclGetVersion(int* version) {
  ENTER();
  *version = machine().script().nccl_version;
  return 0;
}

int ncclGetUniqueId(NcclUniqueId* id) {
  ENTER();
  static std::atomic<int> next{0};
  std::memset(id->bytes, 0, sizeof(id->bytes));
  const std::string text = "group " + std::to_string(++next);
  text.copy(id->bytes, sizeof(id->bytes) - 1);
  return 0;
}

int ncclCommInitRankConfig(NcclComm* comm, int ranks, NcclUniqueId id, int rank,
                           NcclConfig* config) {
  ENTER();
  if (config->magic != 0xcafebeef || config->blocking != 0) return kInvalidArgument;
  std::shared_ptr<Group> group;
  {
    const std::lock_guard lock(registry_mutex);
    std::shared_ptr<Group>& there = groups[id.bytes];
    if (there == nullptr) there = std::make_shared<Group>(ranks);
    group = there;
  }
  *comm = make(group, rank);
  return kNcclInProgress;
}

int ncclCommFinalize(NcclComm comm) {
  ENTER();
  return find(comm) == nullptr ? kInvalidArgument : kNcclInProgress;
}

int ncclCommDestroy(NcclComm comm) {
  ENTER();
  const std::lock_guard lock(registry_mutex);
  return communicators.erase(comm) == 0 ? kInvalidArgument : 0;
}

int ncclCommAbort(NcclComm comm) {
  const int scripted = machine().enter(__func__, machine().current_device());
  const std::shared_ptr<Comm> found = find(comm);
  if (found == nullptr) return kInvalidArgument;
  std::this_thread::sleep_for(std::chrono::milliseconds(machine().script().abort_milliseconds));
  found->abort();
  std::set<CudaStream> streams;
  {
    const std::lock_guard lock(found->mutex);
    found->at_its_end.clear();
    streams = found->streams;
  }
  // Not for ever, so that a test can say what is wrong.
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  for (CudaStream handle : streams) {
    FakeStream* const stream = machine().stream(handle);
    while (stream != nullptr && !stream->is_idle()) {
      if (std::chrono::steady_clock::now() > limit) {
        machine().note("ncclCommAbort blocks");
        break;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
  const std::lock_guard lock(registry_mutex);
  communicators.erase(comm);
  return scripted;
}

int ncclCommGetAsyncError(NcclComm comm, int* error) {
  ENTER();
  const std::shared_ptr<Comm> found = find(comm);
  if (found == nullptr) return kInvalidArgument;
  std::vector<std::function<void()>> ended;
  {
    const std::scoped_lock lock(found->mutex, found->group->mutex);
    *error = found->error != 0                                                    ? found->error
             : found->group->joined < found->group->size || found->still_busy > 0 ? kNcclInProgress
                                                                                  : kNcclSuccess;
    if (found->still_busy > 0 && --found->still_busy == 0) ended = std::move(found->at_its_end);
    if (found->still_busy == 0) found->at_its_end.clear();
  }
  for (const auto& put : ended) put();
  return 0;
}

const char* ncclGetErrorString(int error) {
  return error == kNcclRemoteError ? "remote process exited or there was a network error"
                                   : "an error of the fake";
}

const char* ncclGetLastError(NcclComm comm) {
  return comm == nullptr ? "" : "it was scripted";
}

int ncclGroupStart() {
  ENTER();
  ++grouped.depth;
  return 0;
}

int ncclGroupEnd() {
  ENTER();
  if (grouped.depth == 0) return kInvalidUsage;
  if (--grouped.depth > 0) return 0;
  return launch_all(std::exchange(grouped.calls, {}));
}

int ncclAllReduce(const void* in, void* out, size_t count, int dtype, int op, NcclComm comm,
                  CudaStream stream) {
  ENTER();
  return call(comm, stream, {Kind::kAllReduce, in, out, count, dtype, op});
}

int ncclReduce(const void* in, void* out, size_t count, int dtype, int op, int root, NcclComm comm,
               CudaStream stream) {
  ENTER();
  return call(comm, stream, {Kind::kReduce, in, out, count, dtype, op, root});
}

int ncclBroadcast(const void* in, void* out, size_t count, int dtype, int root, NcclComm comm,
                  CudaStream stream) {
  ENTER();
  return call(comm, stream, {Kind::kBroadcast, in, out, count, dtype, 0, root});
}

int ncclAllGather(const void* in, void* out, size_t count, int dtype, NcclComm comm,
                  CudaStream stream) {
  ENTER();
  return call(comm, stream, {Kind::kAllGather, in, out, count, dtype});
}

int ncclReduceScatter(const void* in, void* out, size_t count, int dtype, int op, NcclComm comm,
                      CudaStream stream) {
  ENTER();
  return call(comm, stream, {Kind::kReduceScatter, in, out, count, dtype, op});
}

int ncclSend(const void* in, size_t count, int dtype, int peer, NcclComm comm, CudaStream stream) {
  ENTER();
  return call(comm, stream, {Kind::kSend, in, nullptr, count, dtype, 0, peer});
}

int ncclRecv(void* out, size_t count, int dtype, int peer, NcclComm comm, CudaStream stream) {
  ENTER();
  return call(comm, stream, {Kind::kRecv, nullptr, out, count, dtype, 0, peer});
}

}  // extern "C"
