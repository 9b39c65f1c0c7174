// Communicators: each collective is the one of comm/communicator.h.
#include <algorithm>
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
Buffer checked(const swv_buffer& b, const char* argument) {
  if (b.count < 0) fail_argument(argument, str_cat("has count ", b.count));
  Buffer result;
  try {
    check_reserved(b.reserved, ".reserved");
    result = {b.data, b.count, comm_dtype(b.dtype, ".dtype"), comm_device(b.device, ".device")};
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
Buffer buffer(const swv_buffer* b, const char* argument) {
  return checked(out(b, argument), argument);
}
// A side that this rank does not have.
Buffer buffer_or_none(const swv_buffer* b, DType dtype, const char* argument) {
  return b == nullptr ? Buffer{nullptr, 0, dtype, {}} : checked(*b, argument);
}

CallOptions call_options(const swv_call_options* given) {
  const swv_call_options o = options<swv_call_options>(given, SWV_CALL_OPTIONS_INIT, "options");
  return {.timeout = timeout(o.timeout_ms, "options.timeout_ms", absl::ZeroDuration()),
          .tag = text_or(o.tag, "", "options.tag")};
}

CallOptions message_options(const Communicator& comm, const swv_call_options* given,
                            swv_work** out_work) {
  CallOptions result = call_options(given);
  result.blocking = out_work == nullptr && !comm.is_coalescing();
  return result;
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

// Issues `operation` on the group. While a coalescing collects, it is neither waited for nor given
// out.
template <typename Operation>
void issue(const swv_comm* comm, swv_work** out_work, const Operation& operation) {
  Communicator& c = communicator(comm);
  if (c.is_coalescing()) {
    if (out_work != nullptr)
      fail_argument("out_work", "is not NULL while operations are coalesced");
    Work work;
    try {
      work = operation(c);
    } catch (const Failure& failure) {
      c.refuse(absl::Status(failure.code(), failure.what()));
      throw;
    }
    // What is refused, or fails, is known; to ask for more would run what a backend holds back.
    if (work.immediate()) check(work.wait());
    return;
  }
  Owned<swv_work> handle = new_work(out_work);
  give_out(operation(c), std::move(handle), out_work);
}

std::vector<int64_t> copied(const int64_t* values, size_t count, const char* argument) {
  const auto all = span(values, count, argument);
  return {all.begin(), all.end()};
}

void write_counters(const CommCounters& counters, swv_comm_counter* to, size_t capacity,
                    size_t* out_count) {
  if (to == nullptr && capacity != 0) fail_null("counters");
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

swv_status* swv_comm_world_ranks(const swv_comm* comm, int64_t* ranks, size_t capacity,
                                 size_t* out_count) {
  return guarded(__func__, [&] {
    copy_out(communicator(comm).world_ranks(), ranks, capacity, out_count, "ranks");
  });
}

swv_status* swv_comm_all_reduce(swv_comm* comm, const swv_buffer* in, const swv_buffer* out,
                                swv_reduce_op op, const swv_call_options* options,
                                swv_work** out_work) {
  return guarded(__func__, [&] {
    issue(comm, out_work, [&](shardweave::Communicator& c) {
      return c.all_reduce(buffer(in, "in"), buffer(out, "out"), reduce_op(op, "op"),
                          call_options(options));
    });
  });
}

swv_status* swv_comm_all_gather(swv_comm* comm, const swv_buffer* in, const swv_buffer* out,
                                const swv_call_options* options, swv_work** out_work) {
  return guarded(__func__, [&] {
    issue(comm, out_work, [&](shardweave::Communicator& c) {
      return c.all_gather(buffer(in, "in"), buffer(out, "out"), call_options(options));
    });
  });
}

swv_status* swv_comm_all_gather_v(swv_comm* comm, const swv_buffer* in, const swv_buffer* out,
                                  const int64_t* counts, size_t num_counts,
                                  const swv_call_options* options, swv_work** out_work) {
  return guarded(__func__, [&] {
    issue(comm, out_work, [&](shardweave::Communicator& c) {
      return c.all_gather_v(buffer(in, "in"), buffer(out, "out"),
                            span(counts, num_counts, "counts"), call_options(options));
    });
  });
}

swv_status* swv_comm_reduce_scatter(swv_comm* comm, const swv_buffer* in, const swv_buffer* out,
                                    swv_reduce_op op, const swv_call_options* options,
                                    swv_work** out_work) {
  return guarded(__func__, [&] {
    issue(comm, out_work, [&](shardweave::Communicator& c) {
      return c.reduce_scatter(buffer(in, "in"), buffer(out, "out"), reduce_op(op, "op"),
                              call_options(options));
    });
  });
}

swv_status* swv_comm_reduce_scatter_v(swv_comm* comm, const swv_buffer* in, const swv_buffer* out,
                                      const int64_t* counts, size_t num_counts, swv_reduce_op op,
                                      const swv_call_options* options, swv_work** out_work) {
  return guarded(__func__, [&] {
    issue(comm, out_work, [&](shardweave::Communicator& c) {
      return c.reduce_scatter_v(buffer(in, "in"), buffer(out, "out"),
                                span(counts, num_counts, "counts"), reduce_op(op, "op"),
                                call_options(options));
    });
  });
}

swv_status* swv_comm_all_to_all(swv_comm* comm, const swv_buffer* in, const swv_buffer* out,
                                const swv_call_options* options, swv_work** out_work) {
  return guarded(__func__, [&] {
    issue(comm, out_work, [&](shardweave::Communicator& c) {
      return c.all_to_all(buffer(in, "in"), buffer(out, "out"), call_options(options));
    });
  });
}

swv_status* swv_comm_all_to_all_v(swv_comm* comm, const swv_buffer* in, const int64_t* send_counts,
                                  const swv_buffer* out, const int64_t* recv_counts,
                                  size_t num_counts, const swv_call_options* options,
                                  swv_work** out_work) {
  return guarded(__func__, [&] {
    issue(comm, out_work, [&](shardweave::Communicator& c) {
      return c.all_to_all_v(buffer(in, "in"), span(send_counts, num_counts, "send_counts"),
                            buffer(out, "out"), span(recv_counts, num_counts, "recv_counts"),
                            call_options(options));
    });
  });
}

swv_status* swv_comm_broadcast(swv_comm* comm, const swv_buffer* data, int32_t root,
                               const swv_call_options* options, swv_work** out_work) {
  return guarded(__func__, [&] {
    issue(comm, out_work, [&](shardweave::Communicator& c) {
      return c.broadcast(buffer(data, "data"), root, call_options(options));
    });
  });
}

swv_status* swv_comm_reduce(swv_comm* comm, const swv_buffer* in, const swv_buffer* out,
                            swv_reduce_op op, int32_t root, const swv_call_options* options,
                            swv_work** out_work) {
  return guarded(__func__, [&] {
    issue(comm, out_work, [&](shardweave::Communicator& c) {
      const shardweave::Buffer from = buffer(in, "in");
      return c.reduce(from, buffer_or_none(out, from.dtype, "out"), reduce_op(op, "op"), root,
                      call_options(options));
    });
  });
}

swv_status* swv_comm_gather(swv_comm* comm, const swv_buffer* in, const swv_buffer* out,
                            int32_t root, const swv_call_options* options, swv_work** out_work) {
  return guarded(__func__, [&] {
    issue(comm, out_work, [&](shardweave::Communicator& c) {
      const shardweave::Buffer from = buffer(in, "in");
      return c.gather(from, buffer_or_none(out, from.dtype, "out"), root, call_options(options));
    });
  });
}

swv_status* swv_comm_scatter(swv_comm* comm, const swv_buffer* in, const swv_buffer* out,
                             int32_t root, const swv_call_options* options, swv_work** out_work) {
  return guarded(__func__, [&] {
    issue(comm, out_work, [&](shardweave::Communicator& c) {
      const shardweave::Buffer to = buffer(out, "out");
      return c.scatter(buffer_or_none(in, to.dtype, "in"), to, root, call_options(options));
    });
  });
}

swv_status* swv_comm_send(swv_comm* comm, const swv_buffer* data, int32_t peer, int32_t message_tag,
                          const swv_call_options* options, swv_work** out_work) {
  return guarded(__func__, [&] {
    issue(comm, out_work, [&](shardweave::Communicator& c) {
      return c.send(buffer(data, "data"), peer, message_tag, message_options(c, options, out_work));
    });
  });
}

swv_status* swv_comm_recv(swv_comm* comm, const swv_buffer* data, int32_t peer, int32_t message_tag,
                          const swv_call_options* options, swv_work** out_work) {
  return guarded(__func__, [&] {
    issue(comm, out_work, [&](shardweave::Communicator& c) {
      return c.recv(buffer(data, "data"), peer, message_tag, message_options(c, options, out_work));
    });
  });
}

swv_status* swv_comm_barrier(swv_comm* comm, const swv_call_options* options, swv_work** out_work) {
  return guarded(__func__, [&] {
    issue(comm, out_work,
          [&](shardweave::Communicator& c) { return c.barrier(call_options(options)); });
  });
}

swv_status* swv_work_is_done(const swv_work* work, swv_bool* out_is_done) {
  return guarded(__func__, out_is_done, "out_is_done",
                 [&] { return in(work, "work").work.done(); });
}

swv_status* swv_work_wait(const swv_work* work) {
  return guarded(__func__, [&] { check(in(work, "work").work.wait()); });
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

swv_status* swv_comm_subgroup(swv_comm* comm, const int64_t* members, size_t num_members,
                              const char* name, swv_comm** out_comm) {
  return guarded(__func__, out_comm, "out_comm", [&] {
    return make<swv_comm>(check(communicator(comm).subgroup(copied(members, num_members, "members"),
                                                            std::string(text(name, "name")))));
  });
}

swv_status* swv_comm_abort(const swv_comm* comm, const char* reason) {
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
