#include "testing/nccl_table.h"

#include <chrono>
#include <memory>
#include <utility>

#include "shardweave/capi/handles.h"
#include "shardweave/comm/nccl/nccl_backend.h"
#include "shardweave/comm/nccl/testing/fake_gpu.h"

namespace shardweave {
namespace {

// One rank's, from which its groups' are made.
struct Maker {
  NcclTables& tables;
  ConnectDevice connect;
  int rank;
  int groups = 0;
};

struct Group {
  Maker& maker;
  std::unique_ptr<Backend> backend;
};

Backend& backend_of(void* self) {
  return *static_cast<Group*>(self)->backend;
}

swv_status* status_of(const absl::Status& status) {
  if (status.ok()) return nullptr;
  return swv_status_new(static_cast<swv_code>(status.code()),
                        std::string(status.message()).c_str());
}

Deadline deadline_of(int64_t timeout_ms) {
  if (timeout_ms < 0) return Deadline::max();
  return std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
}

Buffer buffer_of(const swv_buffer& b) {
  return {b.data, b.count, capi::comm_dtype(b.dtype, "dtype"),
          capi::comm_device(b.device, "device")};
}

swv_status* start(void* self, const swv_backend_call* c, uint64_t* out_ticket) {
  Backend& backend = backend_of(self);
  const size_t ranks = backend.group().size();
  const auto counts = [&](const int64_t* of) { return absl::MakeConstSpan(of, of ? ranks : 0); };
  const absl::StatusOr<Backend::Ticket> ticket =
      backend.start({.op = static_cast<OpKind>(c->kind),
                     .in = buffer_of(*c->in),
                     .out = buffer_of(*c->out),
                     .reduce_op = static_cast<ReduceOp>(c->reduce_op),
                     .peer = c->peer,
                     .message_tag = c->message_tag,
                     .in_counts = counts(c->in_counts),
                     .out_counts = counts(c->out_counts),
                     .sequence = c->sequence,
                     .deadline = deadline_of(c->timeout_ms),
                     .tag = c->tag,
                     .fingerprint = c->fingerprint,
                     .stream = {c->in->stream != nullptr ? c->in->stream : c->out->stream},
                     .group = c->coalesced});
  if (ticket.ok()) *out_ticket = *ticket;
  return status_of(ticket.status());
}

swv_status* connect(void* self, const swv_group* group, swv_comm* bootstrap, int64_t timeout_ms,
                    swv_backend* out_backend) {
  auto& maker = *static_cast<Maker*>(self);
  if (maker.tables.connect_fails_on == maker.rank) {
    return swv_status_new(SWV_CODE_UNAVAILABLE, "the cable is not plugged in");
  }
  GroupInfo info{group->name, group->rank, {}};
  info.world_ranks.assign(group->world_ranks, group->world_ranks + group->num_ranks);
  absl::StatusOr<std::unique_ptr<Backend>> backend =
      maker.connect(info, bootstrap->comm, deadline_of(timeout_ms));
  if (!backend.ok()) return status_of(backend.status());
  swv_backend& table = *out_backend;
  table.name = "nccl in C";
  table.implements = 0;
  for (int op = 0; op < kNumOpKinds; ++op) {
    if ((*backend)->implements(static_cast<OpKind>(op))) table.implements |= uint64_t{1} << op;
  }
  table.self = new Group{maker, *std::move(backend)};
  ++maker.groups;
  table.device = {SWV_DEVICE_CUDA, maker.rank};
  table.start = start;
  table.done = [](void* it, uint64_t ticket) -> swv_bool { return backend_of(it).done(ticket); };
  table.wait = [](void* it, uint64_t ticket, int64_t timeout) {
    return status_of(backend_of(it).wait(ticket, deadline_of(timeout)));
  };
  table.abort = [](void* it, swv_code code, const char* reason) {
    backend_of(it).abort(absl::Status(static_cast<absl::StatusCode>(code), reason));
  };
  table.drop = [](void* it) {
    Maker& its = static_cast<Group*>(it)->maker;
    delete static_cast<Group*>(it);
    --its.groups;
    ++its.tables.dropped;
  };
  table.can_reduce = [](void* it, swv_dtype dtype, swv_reduce_op op) -> swv_bool {
    return backend_of(it).can_reduce(capi::comm_dtype(dtype, "dtype"), static_cast<ReduceOp>(op));
  };
  table.wait_on = [](void* it, uint64_t ticket, void* stream) {
    return status_of(backend_of(it).wait_on(ticket, {stream}));
  };
  table.copy_to_host = [](void* it, void* host, const swv_buffer* device) {
    return status_of(backend_of(it).copy_to_host(host, buffer_of(*device), {device->stream}));
  };
  table.copy_to_device = [](void* it, const swv_buffer* device, const void* host) {
    return status_of(backend_of(it).copy_to_device(buffer_of(*device), host, {device->stream}));
  };
  table.begin_coalescing = [](void* it) { backend_of(it).begin_coalescing(); };
  table.end_coalescing = [](void* it) { return status_of(backend_of(it).end_coalescing()); };
  ++maker.tables.connected;
  if (maker.tables.spoil != nullptr && maker.rank == 1) maker.tables.spoil(table);
  return nullptr;
}

}  // namespace

swv_device_backend nccl_in_c(NcclTables& tables, int rank) {
  swv_device_backend made = SWV_DEVICE_BACKEND_INIT;
  made.self =
      new Maker{tables, connect_nccl({.device = rank, .libraries = fake_libraries()}), rank};
  made.connect = connect;
  made.drop = [](void* self) {
    Maker& maker = *static_cast<Maker*>(self);
    maker.tables.outlived += maker.groups;
    ++maker.tables.makers_dropped;
    delete static_cast<Maker*>(self);
  };
  return made;
}

}  // namespace shardweave
