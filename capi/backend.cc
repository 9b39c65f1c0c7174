// Backends of third parties: a comm/ Backend over a table of C functions.
#include <chrono>
#include <optional>
#include <string>
#include <utility>

#include "shardweave/capi/handles.h"
#include "shardweave/comm/backend.h"
#include "shardweave/comm/rendezvous/rendezvous.h"
#include "shardweave/comm/str_cat.h"

namespace shardweave::capi {
namespace {

static_assert(static_cast<int>(OpKind::kAllReduce) == SWV_COLLECTIVE_ALL_REDUCE);
static_assert(static_cast<int>(OpKind::kBarrier) == SWV_COLLECTIVE_BARRIER);
static_assert(static_cast<int>(OpKind::kRecv) == SWV_COLLECTIVE_RECV &&
              kNumOpKinds == SWV_COLLECTIVE_RECV + 1);

// Milliseconds from now, at least 0; -1: never.
int64_t timeout_ms(Deadline deadline) {
  if (deadline == Deadline::max()) return -1;
  const auto left = deadline - std::chrono::steady_clock::now();
  return std::max<int64_t>(0, std::chrono::ceil<std::chrono::milliseconds>(left).count());
}

swv_buffer c_buffer(const ConstBuffer& b) {
  swv_buffer result = SWV_BUFFER_INIT;
  result.data = const_cast<void*>(b.data);
  result.count = b.count;
  result.dtype = dtype_of(b.dtype);
  result.device = {b.device.type == DeviceType::kCpu ? SWV_DEVICE_CPU : SWV_DEVICE_CUDA,
                   b.device.index};
  return result;
}

// Drops the table's self if nothing has taken it.
struct Self {
  const swv_backend* table;
  ~Self() {
    if (table != nullptr && table->drop != nullptr) table->drop(table->self);
  }
};

// What a callback answers may be anything.
class TableBackend : public Backend {
 public:
  // Owns table.self.
  TableBackend(GroupInfo group, const swv_backend& table, std::string name)
      : Backend(std::move(group)), table_(table), name_(std::move(name)) {}
  ~TableBackend() override {
    if (table_.drop != nullptr) table_.drop(table_.self);
  }

  std::string_view name() const override { return name_; }
  bool implements(OpKind op) const override {
    return (table_.implements >> static_cast<int>(op) & 1) != 0;
  }

  absl::StatusOr<Ticket> start(const Call& call) override {
    const std::string tag(call.tag);
    const swv_buffer in = c_buffer(call.in), out = c_buffer(call.out);
    swv_backend_call c = {};
    c.struct_size = sizeof(c);
    c.kind = static_cast<int>(call.op);
    c.reduce_op = static_cast<int>(call.reduce_op);
    c.peer = call.peer;
    c.message_tag = call.message_tag;
    c.in = &in;
    c.out = &out;
    c.in_counts = call.in_counts.empty() ? nullptr : call.in_counts.data();
    c.out_counts = call.out_counts.empty() ? nullptr : call.out_counts.data();
    c.sequence = call.sequence;
    c.timeout_ms = timeout_ms(call.deadline);
    c.tag = tag.c_str();
    uint64_t ticket = SWV_TICKET_DONE;
    absl::Status status = take(table_.start(table_.self, &c, &ticket));
    if (!status.ok()) return status;
    if (ticket != SWV_TICKET_DONE && table_.wait == nullptr) {
      return absl::InternalError(
          str_cat("backend ", name_, ": start() gave ticket ", ticket, ", but there is no wait()"));
    }
    return ticket;
  }

  bool done(Ticket ticket) override {
    return table_.done == nullptr || table_.done(table_.self, ticket) != 0;
  }

  absl::Status wait(Ticket ticket, Deadline deadline) override {
    if (table_.wait == nullptr) return absl::OkStatus();
    return take(table_.wait(table_.self, ticket, timeout_ms(deadline)));
  }

  absl::StatusOr<std::unique_ptr<Backend>> subgroup(GroupInfo group, absl::Span<const int> members,
                                                    std::string_view key,
                                                    Deadline deadline) override {
    if (table_.subgroup == nullptr) {
      return absl::UnimplementedError(str_cat("backend ", name_, " makes no subgroups"));
    }
    swv_group g = SWV_GROUP_INIT;
    g.name = group.name.c_str();
    g.rank = group.rank;
    g.num_ranks = group.size();
    const std::vector<int32_t> world_ranks(group.world_ranks.begin(), group.world_ranks.end());
    g.world_ranks = world_ranks.data();
    const std::string key_text(key);
    static_assert(sizeof(int) == sizeof(int32_t));
    swv_backend table = table_;
    table.self = nullptr;
    absl::Status status =
        take(table_.subgroup(table_.self, &g, members.data(), members.size(), key_text.c_str(),
                             timeout_ms(deadline), &table.self));
    if (!status.ok()) return status;
    Self self{&table};
    auto made = std::make_unique<TableBackend>(std::move(group), table, name_);
    self.table = nullptr;
    return made;
  }

  void abort(const absl::Status& reason) override {
    const std::string message(reason.message());
    table_.abort(table_.self, static_cast<swv_code>(reason.code()), message.c_str());
  }

 private:
  const swv_backend table_;
  const std::string name_;
};

GroupInfo group_info(const swv_group* given) {
  const swv_group g = required_options<swv_group>(given, SWV_GROUP_INIT, "group");
  if (g.num_ranks < 1 || g.num_ranks > kMaxWorldSize || g.rank < 0 || g.rank >= g.num_ranks) {
    fail_argument("group", str_cat("says rank ", g.rank, " of ", g.num_ranks));
  }
  GroupInfo info{std::string(text_or(g.name, "world", "group.name")), g.rank, {}};
  // All ranks of the world: world_ranks may be left out.
  for (int64_t r = 0; r < g.num_ranks; ++r) {
    if (g.world_ranks != nullptr && g.world_ranks[r] != r) {
      fail_argument("group.world_ranks", str_cat("has ", g.world_ranks[r], " for rank ", r,
                                                 "; a world has its ranks in order"));
    }
    info.world_ranks.push_back(r);
  }
  return info;
}

swv_world* create_world(const swv_backend* backend, const swv_group* group,
                        const swv_world_options* given) {
  const swv_backend table =
      known_options<swv_backend>(out(backend, "backend"), SWV_BACKEND_INIT, "backend");
  Self self{&table};
  check_options(*backend, table, "backend");
  std::string name(text(table.name, "backend.name"));
  if (table.start == nullptr) fail_null("backend.start");
  if (table.abort == nullptr) fail_null("backend.abort");
  if ((table.implements >> kNumOpKinds) != 0) {
    fail_argument("backend.implements", "has bits that are no swv_collective_kind");
  }
  GroupInfo info = group_info(group);
  const swv_world_options o = options<swv_world_options>(given, SWV_WORLD_OPTIONS_INIT, "options");
  const absl::Duration deadline = timeout(o.timeout_ms, "options.timeout_ms", absl::Minutes(5));
  auto made = std::make_unique<TableBackend>(std::move(info), table, std::move(name));
  self.table = nullptr;
  return make<swv_world>(
      std::make_shared<World>(Communicator::create(std::move(made), {.timeout = deadline})));
}

}  // namespace
}  // namespace shardweave::capi

swv_status* swv_world_create_with_backend(const swv_backend* backend, const swv_group* group,
                                          const swv_world_options* options, swv_world** out_world) {
  using namespace shardweave::capi;
  return guarded(__func__, [&] {
    if (out_world == nullptr) {
      // The backend's self is taken over all the same.
      const swv_backend table =
          known_options<swv_backend>(out(backend, "backend"), SWV_BACKEND_INIT, "backend");
      const Self self{&table};
      fail_null("out_world");
    }
    *out_world = create_world(backend, group, options);
  });
}
