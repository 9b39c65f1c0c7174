// Backends of third parties: a comm/ Backend over a table of C functions.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "shardweave/capi/handles.h"
#include "shardweave/capi/world_options.h"
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

swv_buffer c_buffer(const ConstBuffer& b, DeviceStream stream) {
  swv_buffer result = SWV_BUFFER_INIT;
  result.data = const_cast<void*>(b.data);
  result.count = b.count;
  result.dtype = dtype_of(b.dtype);
  result.device = {b.device.type == DeviceType::kCpu ? SWV_DEVICE_CPU : SWV_DEVICE_CUDA,
                   b.device.index};
  if (b.device.type != DeviceType::kCpu) result.stream = stream.handle;
  return result;
}

// As a swv_group has it; the vector is what it points to.
struct Members {
  explicit Members(const GroupInfo& group)
      : world_ranks(group.world_ranks.begin(), group.world_ranks.end()) {
    c.name = group.name.c_str();
    c.rank = group.rank;
    c.num_ranks = group.size();
    c.world_ranks = world_ranks.data();
  }
  std::vector<int32_t> world_ranks;
  swv_group c = SWV_GROUP_INIT;
};

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
  bool supports(DeviceType type) const override { return type == device().type; }
  absl::Status check_device(Device given) const override {
    if (given == device()) return absl::OkStatus();
    return absl::InvalidArgumentError(str_cat("memory of ", to_string(given), "; backend ", name_,
                                              " of rank ", group().rank, " moves that of ",
                                              to_string(device())));
  }
  bool compares_calls() const override { return device().type == DeviceType::kCpu; }
  bool implements(OpKind op) const override {
    return (table_.implements >> static_cast<int>(op) & 1) != 0;
  }
  bool can_reduce(DType dtype, ReduceOp op) const override {
    return table_.can_reduce == nullptr ||
           table_.can_reduce(table_.self, dtype_of(dtype), static_cast<int>(op)) != 0;
  }

  absl::StatusOr<Ticket> start(const Call& call) override {
    const std::string tag(call.tag);
    const swv_buffer in = c_buffer(call.in, call.stream), out = c_buffer(call.out, call.stream);
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
    c.fingerprint = call.fingerprint;
    c.coalesced = call.group;
    // Tables of the CPU, of 0.3 too, may leave it.
    uint64_t ticket = device().type == DeviceType::kCpu ? SWV_TICKET_DONE : kNoTicket;
    absl::Status status = take(table_.start(table_.self, &c, &ticket));
    if (!status.ok()) return status;
    if (ticket == kNoTicket) {
      return absl::InternalError(str_cat("backend ", name_, ": start() of ", to_string(call.op),
                                         " succeeded, and gave no out_ticket"));
    }
    if (ticket != SWV_TICKET_DONE && table_.wait == nullptr) {
      return absl::InternalError(
          str_cat("backend ", name_, ": start() gave ticket ", ticket, ", but there is no wait()"));
    }
    if (ticket != SWV_TICKET_DONE && device().type != DeviceType::kCpu) {
      const std::lock_guard lock(mutex_);
      under_way_[ticket] = {++started_, call.deadline};
    }
    return ticket;
  }

  // By the table's own word; drop() may then wait for what is under way.
  absl::Status leave() override {
    if (aborted_.load()) return absl::AbortedError("this rank has left the group");
    const std::lock_guard lock(mutex_);
    const Deadline limit = std::chrono::steady_clock::now() + kGrace;
    for (const auto& [ticket, one] : under_way_) {
      while (!done(ticket)) {
        if (std::chrono::steady_clock::now() >= std::min(one.deadline, limit)) {
          const absl::Status left = absl::AbortedError("this rank has left the group");
          abort(left);
          return left;
        }
        std::this_thread::sleep_for(kLookEvery);
      }
    }
    return absl::OkStatus();
  }

  bool done(Ticket ticket) override {
    return table_.done == nullptr || table_.done(table_.self, ticket) != 0;
  }

  absl::Status wait(Ticket ticket, Deadline deadline) override {
    if (table_.wait == nullptr) return absl::OkStatus();
    if (device().type == DeviceType::kCpu) {
      return take(table_.wait(table_.self, ticket, timeout_ms(deadline)));
    }
    const auto number = [&]() -> uint64_t {
      const auto found = under_way_.find(ticket);
      return found == under_way_.end() ? 0 : found->second.number;
    };
    std::unique_lock lock(mutex_);
    const uint64_t waits_for = number();
    lock.unlock();
    absl::Status status = take(table_.wait(table_.self, ticket, timeout_ms(deadline)));
    lock.lock();
    // Another thread may have waited, too, and the table may have given the ticket again.
    if (status.ok() && number() == waits_for) under_way_.erase(ticket);
    return status;
  }

  absl::Status wait_on(Ticket ticket, DeviceStream stream) override {
    if (table_.wait_on == nullptr) return Backend::wait_on(ticket, stream);
    return take(table_.wait_on(table_.self, ticket, stream.handle));
  }

  absl::Status copy_to_host(void* host, const ConstBuffer& device, DeviceStream stream) override {
    if (table_.copy_to_host == nullptr) return Backend::copy_to_host(host, device, stream);
    const swv_buffer from = c_buffer(device, stream);
    return take(table_.copy_to_host(table_.self, host, &from));
  }
  absl::Status copy_to_device(const Buffer& device, const void* host,
                              DeviceStream stream) override {
    if (table_.copy_to_device == nullptr) return Backend::copy_to_device(device, host, stream);
    const swv_buffer to = c_buffer(device, stream);
    return take(table_.copy_to_device(table_.self, &to, host));
  }

  void begin_coalescing() override {
    if (table_.begin_coalescing != nullptr) table_.begin_coalescing(table_.self);
  }
  absl::Status end_coalescing() override {
    if (table_.end_coalescing == nullptr) return absl::OkStatus();
    return take(table_.end_coalescing(table_.self));
  }

  absl::StatusOr<std::unique_ptr<Backend>> subgroup(GroupInfo group, absl::Span<const int> members,
                                                    std::string_view key,
                                                    Deadline deadline) override {
    if (table_.subgroup == nullptr) {
      return absl::UnimplementedError(str_cat("backend ", name_, " makes no subgroups"));
    }
    const Members of_group(group);
    const std::string key_text(key);
    static_assert(sizeof(int) == sizeof(int32_t));
    swv_backend table = table_;
    table.self = nullptr;
    absl::Status status =
        take(table_.subgroup(table_.self, &of_group.c, members.data(), members.size(),
                             key_text.c_str(), timeout_ms(deadline), &table.self));
    if (!status.ok()) return status;
    Self self{&table};
    auto made = std::make_unique<TableBackend>(std::move(group), table, name_);
    self.table = nullptr;
    return made;
  }

  void abort(const absl::Status& reason) override {
    aborted_.store(true);
    const std::string message(reason.message());
    table_.abort(table_.self, static_cast<swv_code>(reason.code()), message.c_str());
  }

 private:
  Device device() const {
    if (table_.device.type == SWV_DEVICE_CPU) return {};
    return {DeviceType::kCuda, table_.device.index};
  }

  static constexpr Ticket kNoTicket = std::numeric_limits<Ticket>::max();
  // For what is under way to end when the group is left.
  static constexpr auto kGrace = std::chrono::seconds(5);
  static constexpr auto kLookEvery = std::chrono::milliseconds(1);

  const swv_backend table_;
  const std::string name_;
  std::atomic<bool> aborted_{false};
  std::mutex mutex_;
  struct UnderWay {
    uint64_t number;
    Deadline deadline;
  };
  std::map<Ticket, UnderWay> under_way_;  // of a device; guarded by mutex_, as is
  uint64_t started_ = 0;
};

// What every table has. Returns its name.
std::string check_table(const swv_backend& table, const std::string& argument) {
  const auto member = [&](const char* name) { return argument + "." + name; };
  std::string name(text(table.name, member("name").c_str()));
  if (table.start == nullptr) fail_null(member("start").c_str());
  if (table.abort == nullptr) fail_null(member("abort").c_str());
  if ((table.implements >> kNumOpKinds) != 0) {
    fail_argument(member("implements").c_str(), "has bits that are no swv_collective_kind");
  }
  if ((table.begin_coalescing == nullptr) != (table.end_coalescing == nullptr)) {
    fail_argument(argument.c_str(),
                  "has one of begin_coalescing and end_coalescing; wanted both or none");
  }
  return name;
}

// The table of one group, as this rank has it.
std::unique_ptr<Backend> connect_rank(const swv_device_backend& maker, const GroupInfo& group,
                                      const std::shared_ptr<Communicator>& bootstrap,
                                      Deadline deadline) {
  const Members members(group);
  const Owned<swv_comm> comm(make<swv_comm>(bootstrap));
  const swv_backend known = SWV_BACKEND_INIT;
  swv_backend table = known;
  throw_if_failed(maker.connect(maker.self, &members.c, comm.get(), timeout_ms(deadline), &table),
                  "swv_device_backend.connect");
  Self self{&table};
  if (table.struct_size != known.struct_size) {
    fail_argument("out_backend.struct_size",
                  str_cat("is ", table.struct_size, "; wanted ", known.struct_size,
                          ", as it was given: members are set, or copied from SWV_BACKEND_INIT"));
  }
  std::string name = check_table(table, "out_backend");
  if (comm_device(table.device, "out_backend.device").type == DeviceType::kCpu) {
    fail_argument("out_backend.device", "is the CPU; wanted this rank's GPU");
  }
  if (table.wait == nullptr || table.done == nullptr) {
    fail_null(table.wait == nullptr ? "out_backend.wait" : "out_backend.done");
  }
  auto made = std::make_unique<TableBackend>(group, table, std::move(name));
  self.table = nullptr;
  return made;
}

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

void create_world(const swv_backend* backend, const swv_group* group,
                  const swv_world_options* given, swv_world** out_world) {
  // Both tables are taken over, whatever is wrong.
  GivenWorldOptions options;
  std::exception_ptr wrong_options;
  try {
    options = world_options(given);
  } catch (...) {
    wrong_options = std::current_exception();
  }
  swv_backend table =
      known_options<swv_backend>(out(backend, "backend"), SWV_BACKEND_INIT, "backend");
  Self self{&table};
  if (backend->struct_size < SWV_SIZE_TO(swv_backend, end_coalescing)) {
    // Of 0.3: what comes behind `drop` is not there. (No version ends between.)
    table.device = {SWV_DEVICE_CPU, 0};
    table.can_reduce = nullptr;
    table.begin_coalescing = nullptr;
    table.end_coalescing = nullptr;
  }
  swv_world*& world = out(out_world, "out_world");
  if (wrong_options != nullptr) std::rethrow_exception(wrong_options);
  check_options(*backend, table, "backend");
  std::string name = check_table(table, "backend");
  if (table.device.type != SWV_DEVICE_CPU) {
    fail_argument(
        "backend.device",
        "is no CPU; a GPU's backend stands beside that of the CPU (options.device_backend)");
  }
  GroupInfo info = group_info(group);
  std::unique_ptr<Backend> made =
      std::make_unique<TableBackend>(std::move(info), table, std::move(name));
  self.table = nullptr;
  const absl::Duration timeout = options.world.timeout;
  if (options.connect_device != nullptr) {
    const auto deadline = std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(timeout);
    made = check(
        make_paired_backend(std::move(made), std::move(options.connect_device), {}, deadline));
  }
  world = make<swv_world>(
      std::make_shared<World>(Communicator::create(std::move(made), {.timeout = timeout})));
}

}  // namespace

ConnectDevice connect_device(const swv_device_backend* given, const char* argument) {
  if (given == nullptr) return nullptr;
  const auto known = known_options<swv_device_backend>(*given, SWV_DEVICE_BACKEND_INIT, argument);
  const std::shared_ptr<const swv_device_backend> maker(new swv_device_backend(known),
                                                        [](const swv_device_backend* last) {
                                                          if (last->drop != nullptr)
                                                            last->drop(last->self);
                                                          delete last;
                                                        });
  check_options(*given, known, argument);
  if (known.connect == nullptr) fail_null(str_cat(argument, ".connect").c_str());
  return [maker](const GroupInfo& group, const std::shared_ptr<Communicator>& bootstrap,
                 Deadline deadline) -> absl::StatusOr<std::unique_ptr<Backend>> {
    try {
      return connect_rank(*maker, group, bootstrap, deadline);
    } catch (...) {
      // The others are in theirs, or wait for this rank.
      const absl::Status status = absl_status_of_exception();
      bootstrap->abort(status);
      return status;
    }
  };
}

}  // namespace shardweave::capi

swv_status* swv_world_create_with_backend(const swv_backend* backend, const swv_group* group,
                                          const swv_world_options* options, swv_world** out_world) {
  using namespace shardweave::capi;
  return guarded(__func__, [&] { create_world(backend, group, options, out_world); });
}
