// Communicators: each collective is the one of comm/communicator.h.
#include <algorithm>
#include <iterator>
#include <limits>
#include <utility>

#include "shardweave/capi/handles.h"
#include "shardweave/comm/str_cat.h"

struct swv_coalescing : shardweave::capi::Handle<shardweave::capi::Kind::kCoalescing> {
  std::shared_ptr<shardweave::Communicator> comm;
  std::unique_ptr<shardweave::Coalescing> group;  // null once finished
};

namespace shardweave::capi {
namespace {

Communicator& communicator(const swv_comm* comm) {
  return *in(comm, "comm").comm;
}

// A failure says "<argument>.<member>"; nothing is spelled before.
Buffer buffer(const swv_buffer* given, const char* argument) {
  const swv_buffer b = required_options<swv_buffer>(given, SWV_BUFFER_INIT, argument);
  if (b.count < 0) fail_argument(argument, str_cat("has count ", b.count));
  Buffer result;
  try {
    check_reserved(b.reserved, ".reserved");
    result = {b.data, b.count, comm_dtype(b.dtype, ".dtype"), comm_device(b.device, ".device")};
    if (b.stream != nullptr && result.device.type == DeviceType::kCpu) {
      fail_argument(".stream", "is given; a CPU has no streams");
    }
  } catch (const Failure& failure) {
    std::string message = failure.what();
    message.insert(message.find('\'') + 1, argument);
    fail(failure.code(), std::move(message));
  }
  if (b.count > std::numeric_limits<int64_t>::max() / element_size(result.dtype)) {
    fail_argument(argument, str_cat("has count ", b.count));
  }
  return result;
}
// A side that this rank may not have.
Buffer buffer_or_none(const swv_buffer* b, DType dtype, const char* argument) {
  return b == nullptr ? Buffer{nullptr, 0, dtype, {}} : buffer(b, argument);
}

// What an operation is called, and its arguments in the function of that name; null: it has none.
struct Operation {
  const char* function;
  const char* in;
  const char* out;
  const char* in_counts = nullptr;
  const char* out_counts = nullptr;
};
constexpr Operation kOperations[] = {
    {"swv_comm_all_reduce", "in", "out"},
    {"swv_comm_all_gather", "in", "out"},
    {"swv_comm_all_gather_v", "in", "out", nullptr, "counts"},
    {"swv_comm_reduce_scatter", "in", "out"},
    {"swv_comm_reduce_scatter_v", "in", "out", "counts", nullptr},
    {"swv_comm_all_to_all", "in", "out"},
    {"swv_comm_all_to_all_v", "in", "out", "send_counts", "recv_counts"},
    {"swv_comm_broadcast", nullptr, "data"},
    {"swv_comm_reduce", "in", "out"},
    {"swv_comm_gather", "in", "out"},
    {"swv_comm_scatter", "in", "out"},
    {"swv_comm_barrier", nullptr, nullptr},
    {"swv_comm_send", "data", nullptr},
    {"swv_comm_recv", nullptr, "data"},
};
static_assert(std::size(kOperations) == kNumOpKinds);

// That of an operation's memory, of which a side may have none.
DeviceStream stream_of(const swv_collective& o, const Operation& its) {
  DeviceStream stream;
  const swv_buffer* first = nullptr;
  for (const auto& [given, argument] : {std::pair(o.in, its.in), std::pair(o.out, its.out)}) {
    if (given == nullptr) continue;
    const auto b = known_options<swv_buffer>(*given, SWV_BUFFER_INIT, argument);
    if (b.data == nullptr) continue;
    if (first != nullptr && b.stream != stream.handle) {
      fail_argument(argument,
                    "has another stream than the operation's input; an operation has one");
    }
    first = given;
    stream.handle = b.stream;
  }
  return stream;
}

bool is_kind(swv_collective_kind kind) {
  return kind >= 0 && kind < kNumOpKinds;
}

// For messages, of what may be no collective.
const char* function_of(const swv_collective* given) {
  const bool is_one = given != nullptr && given->struct_size >= first_size<swv_collective>;
  return is_one && is_kind(given->kind) ? kOperations[given->kind].function : "swv_comm_start";
}

// What the operation would not look at is not what the caller means.
void check_absent(const void* given, const char* has, const char* member) {
  if (has == nullptr && given != nullptr) {
    fail_argument(member, "is not NULL; the operation has none");
  }
}

// Issues it; `waits`: nobody asks for its work.
Work start(Communicator& c, const swv_collective* given, bool waits) {
  const swv_collective o =
      required_options<swv_collective>(given, SWV_COLLECTIVE_INIT, "collective");
  if (!is_kind(o.kind)) {
    fail_argument("collective.kind",
                  str_cat("is ", o.kind, "; wanted a swv_collective_kind, 0 to ", kNumOpKinds - 1));
  }
  const Operation& its = kOperations[o.kind];
  check_absent(o.in, its.in, "collective.in");
  check_absent(o.out, its.out, "collective.out");
  check_absent(o.in_counts, its.in_counts, "collective.in_counts");
  check_absent(o.out_counts, its.out_counts, "collective.out_counts");
  const CallOptions options = {
      .timeout = timeout(o.timeout_ms, "options.timeout_ms", absl::ZeroDuration()),
      .tag = text_or(o.tag, "", "options.tag"),
      .stream = stream_of(o, its)};
  const auto in = [&] { return buffer(o.in, its.in); };
  const auto out = [&] { return buffer(o.out, its.out); };
  const auto in_counts = [&] { return span(o.in_counts, o.num_counts, its.in_counts); };
  const auto out_counts = [&] { return span(o.out_counts, o.num_counts, its.out_counts); };
  const auto op = [&] { return reduce_op(o.reduce_op, "op"); };
  const auto message_options = [&] {
    CallOptions result = options;
    result.blocking = waits && !c.is_coalescing();
    return result;
  };
  switch (o.kind) {
    case SWV_COLLECTIVE_ALL_REDUCE:
      return c.all_reduce(in(), out(), op(), options);
    case SWV_COLLECTIVE_ALL_GATHER:
      return c.all_gather(in(), out(), options);
    case SWV_COLLECTIVE_ALL_GATHER_V:
      return c.all_gather_v(in(), out(), out_counts(), options);
    case SWV_COLLECTIVE_REDUCE_SCATTER:
      return c.reduce_scatter(in(), out(), op(), options);
    case SWV_COLLECTIVE_REDUCE_SCATTER_V:
      return c.reduce_scatter_v(in(), out(), in_counts(), op(), options);
    case SWV_COLLECTIVE_ALL_TO_ALL:
      return c.all_to_all(in(), out(), options);
    case SWV_COLLECTIVE_ALL_TO_ALL_V:
      return c.all_to_all_v(in(), in_counts(), out(), out_counts(), options);
    case SWV_COLLECTIVE_BROADCAST:
      return c.broadcast(out(), o.peer, options);
    case SWV_COLLECTIVE_REDUCE: {
      const Buffer from = in();
      return c.reduce(from, buffer_or_none(o.out, from.dtype, "out"), op(), o.peer, options);
    }
    case SWV_COLLECTIVE_GATHER: {
      const Buffer from = in();
      return c.gather(from, buffer_or_none(o.out, from.dtype, "out"), o.peer, options);
    }
    case SWV_COLLECTIVE_SCATTER: {
      const Buffer to = out();
      return c.scatter(buffer_or_none(o.in, to.dtype, "in"), to, o.peer, options);
    }
    case SWV_COLLECTIVE_BARRIER:
      return c.barrier(options);
    case SWV_COLLECTIVE_SEND:
      return c.send(in(), o.peer, o.message_tag, message_options());
    default:
      return c.recv(out(), o.peer, o.message_tag, message_options());
  }
}

// Made before anything is issued: afterwards nothing may fail. Null if no work is wanted.
Owned<swv_work> new_work(swv_work** out_work) {
  return Owned<swv_work>(out_work == nullptr ? nullptr : make<swv_work>());
}

// A work for the caller, or the end of the operation.
void give_out(Work work, Owned<swv_work> handle, swv_work** out_work) {
  // An argument that is wrong is known at once.
  if (handle == nullptr || work.done()) check(work.wait());
  if (handle == nullptr) return;
  handle->work = std::move(work);
  *out_work = handle.release();
}

// Issues it on the group. While a coalescing collects, it is neither waited for nor given out.
void issue(const swv_comm* comm, const swv_collective* collective, swv_work** out_work) {
  Communicator& c = communicator(comm);
  if (c.is_coalescing()) {
    if (out_work != nullptr)
      fail_argument("out_work", "is not NULL while operations are coalesced");
    Work work;
    try {
      work = start(c, collective, true);
    } catch (const Failure& failure) {
      c.refuse(failure.status());
      throw;
    }
    // What is refused, or fails, is known; to ask for more would run what a backend holds back.
    if (work.immediate()) check(work.wait());
    return;
  }
  Owned<swv_work> handle = new_work(out_work);
  give_out(start(c, collective, out_work == nullptr), std::move(handle), out_work);
}

std::vector<int64_t> copied(const int32_t* values, size_t count, const char* argument) {
  const auto all = span(values, count, argument);
  return {all.begin(), all.end()};
}

void write_counters(const CommCounters& counters, swv_comm_counter* to, size_t capacity,
                    size_t* out_count) {
  check_room(to, capacity, sizeof(*to), "counters");
  size_t& count = out(out_count, "out_count");
  for (size_t i = 0; i < std::min<size_t>(capacity, kNumOpKinds); ++i) {
    to[i] = {counters.by_op[i].calls, counters.by_op[i].bytes};
  }
  count = kNumOpKinds;
}

}  // namespace
}  // namespace shardweave::capi

using namespace shardweave::capi;  // NOLINT: this file is the C interface of it

swv_status* swv_comm_share(const swv_comm* comm, swv_comm** out_comm) {
  return guarded(__func__, out_comm, "out_comm",
                 [&] { return make<swv_comm>(in(comm, "comm").comm); });
}

void swv_comm_free(swv_comm* comm) {
  release(comm, __func__);
}

swv_status* swv_comm_rank(const swv_comm* comm, int32_t* out_rank) {
  return guarded(__func__, out_rank, "out_rank", [&] { return communicator(comm).rank(); });
}

swv_status* swv_comm_size(const swv_comm* comm, int32_t* out_size) {
  return guarded(__func__, out_size, "out_size", [&] { return communicator(comm).size(); });
}

swv_status* swv_comm_name(const swv_comm* comm, swv_string** out_name) {
  return guarded(__func__, out_name, "out_name",
                 [&] { return new_string(communicator(comm).name()); });
}

swv_status* swv_comm_backend(const swv_comm* comm, swv_string** out_backend) {
  return guarded(__func__, out_backend, "out_backend",
                 [&] { return new_string(std::string(communicator(comm).backend_name())); });
}

swv_status* swv_comm_world_ranks(const swv_comm* comm, int32_t* ranks, size_t capacity,
                                 size_t* out_count) {
  return guarded(__func__, [&] {
    copy_out(communicator(comm).world_ranks(), ranks, capacity, out_count, "ranks");
  });
}

swv_status* swv_comm_start(swv_comm* comm, const swv_collective* collective, swv_work** out_work) {
  return guarded(function_of(collective), [&] { issue(comm, collective, out_work); });
}

swv_status* swv_work_is_done(const swv_work* work, swv_bool* out_is_done) {
  return guarded(__func__, out_is_done, "out_is_done",
                 [&] { return in(work, "work").work.done(); });
}

swv_status* swv_work_wait(const swv_work* work) {
  return guarded(__func__, [&] { check(in(work, "work").work.wait()); });
}

swv_status* swv_work_wait_on(const swv_work* work, void* stream) {
  return guarded(__func__, [&] { check(in(work, "work").work.wait_on({stream})); });
}

swv_status* swv_work_share(const swv_work* work, swv_work** out_work) {
  return guarded(__func__, out_work, "out_work",
                 [&] { return make<swv_work>(in(work, "work").work); });
}

void swv_work_free(swv_work* work) {
  release(work, __func__);
}

swv_status* swv_comm_coalesce(swv_comm* comm, swv_coalescing** out_coalescing) {
  return guarded(__func__, out_coalescing, "out_coalescing", [&] {
    const auto& shared = in(comm, "comm").comm;
    if (shared->is_coalescing()) fail_argument("comm", "is being coalesced already");
    return make<swv_coalescing>(shared, std::make_unique<shardweave::Coalescing>(*shared));
  });
}

swv_status* swv_coalescing_finish(swv_coalescing* coalescing, swv_work** out_work) {
  return guarded(__func__, [&] {
    swv_coalescing& c = in(coalescing, "coalescing");
    if (c.group == nullptr) fail_argument("coalescing", "is finished already");
    Owned<swv_work> handle = new_work(out_work);
    give_out(std::exchange(c.group, nullptr)->finish(), std::move(handle), out_work);
  });
}

void swv_coalescing_free(swv_coalescing* coalescing) {
  release(coalescing, __func__);
}

swv_status* swv_comm_split(swv_comm* comm, int32_t color, int32_t key, const char* name,
                           swv_comm** out_comm) {
  return guarded(__func__, out_comm, "out_comm", [&]() -> swv_comm* {
    auto group = check(communicator(comm).split(color, key, std::string(text(name, "name"))));
    return group == nullptr ? nullptr : make<swv_comm>(std::move(group));
  });
}

swv_status* swv_comm_subgroup(swv_comm* comm, const int32_t* members, size_t num_members,
                              const char* name, swv_comm** out_comm) {
  return guarded(__func__, out_comm, "out_comm", [&] {
    return make<swv_comm>(check(communicator(comm).subgroup(copied(members, num_members, "members"),
                                                            std::string(text(name, "name")))));
  });
}

swv_status* swv_comm_abort(swv_comm* comm, const char* reason) {
  return guarded(__func__, [&] {
    communicator(comm).abort(absl::AbortedError(std::string(text(reason, "reason"))));
  });
}

swv_status* swv_comm_health(const swv_comm* comm) {
  return guarded(__func__, [&] { check(communicator(comm).health()); });
}

swv_status* swv_comm_counters(const swv_comm* comm, swv_comm_counter* counters, size_t capacity,
                              size_t* out_count) {
  return guarded(__func__, [&] {
    write_counters(communicator(comm).counters(), counters, capacity, out_count);
  });
}

swv_status* swv_world_counters(const swv_world* world, swv_comm_counter* counters, size_t capacity,
                               size_t* out_count) {
  return guarded(__func__, [&] {
    write_counters(in(world, "world").world->comm()->flight_recorder().counters(), counters,
                   capacity, out_count);
  });
}

swv_status* swv_world_flight_record(const swv_world* world, swv_string** out_json) {
  return guarded(__func__, out_json, "out_json", [&] {
    return new_string(in(world, "world").world->comm()->flight_recorder().to_json());
  });
}
