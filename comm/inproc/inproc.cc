#include "shardweave/comm/inproc/inproc.h"

#include <algorithm>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "shardweave/comm/failed_rank.h"
#include "shardweave/comm/inproc/group.h"
#include "shardweave/comm/inproc/mailbox.h"
#include "shardweave/comm/inproc/meetings.h"
#include "shardweave/comm/str_cat.h"

namespace shardweave {
namespace inproc {
namespace {

// About 100 microseconds: ranks of one step arrive closer than this, and waking a thread takes as
// long. Most of it by yields, which hand the core over if the rank that is waited for has none.
Spin spin_for(int num_ranks) {
  const bool own_cores = num_ranks <= static_cast<int>(std::thread::hardware_concurrency());
  return own_cores ? Spin{.pauses = 100, .yields = 300} : Spin{.pauses = 20, .yields = 100};
}

// All that the ranks of one group share.
struct Shared {
  Shared(std::string name, std::vector<int64_t> world_ranks, Spin spin)
      : group(std::move(name), std::move(world_ranks), spin), meetings(group), mailboxes(group) {}

  Group group;
  Meetings meetings;
  Mailboxes mailboxes;
  // A subgroup that not all members have joined yet.
  struct Joining {
    std::shared_ptr<Shared> group;
    std::vector<int> absent;  // ranks here, by rank there; -1: has joined
    int num_absent = 0;
  };
  std::mutex mutex;
  absl::flat_hash_map<std::string, Joining> joining;  // by key; guarded by mutex, as are
  absl::flat_hash_set<int> left;                      // ranks that will join nothing any more
};

// All groups of a hub, for what concerns all of them.
class Registry {
 public:
  explicit Registry(Spin spin) : spin_(spin) {}

  std::shared_ptr<Shared> make(const GroupInfo& info) {
    auto shared = std::make_shared<Shared>(info.name, info.world_ranks, spin_);
    std::lock_guard lock(mutex_);
    std::erase_if(groups_, [](const auto& group) { return group.expired(); });
    groups_.push_back(shared);
    if (!failure_.ok()) shared->group.fail(failure_);
    for (int64_t rank : gone_) leave(*shared, rank);
    return shared;
  }

  void leave(int64_t world_rank) {
    std::lock_guard lock(mutex_);
    gone_.insert(world_rank);
    for (const std::shared_ptr<Shared>& shared : alive()) leave(*shared, world_rank);
  }

  void abort(const absl::Status& reason) {
    std::lock_guard lock(mutex_);
    failure_.Update(reason);
    for (const std::shared_ptr<Shared>& shared : alive()) {
      shared->group.fail(reason);
    }
  }

 private:
  static void leave(Shared& shared, int64_t world_rank) {
    const std::vector<int64_t>& ranks = shared.group.world_ranks();
    const auto found = std::find(ranks.begin(), ranks.end(), world_rank);
    if (found != ranks.end()) shared.group.leave(static_cast<int>(found - ranks.begin()));
  }

  std::vector<std::shared_ptr<Shared>> alive() const {
    std::vector<std::shared_ptr<Shared>> result;
    for (const std::weak_ptr<Shared>& group : groups_) {
      if (std::shared_ptr<Shared> shared = group.lock()) result.push_back(std::move(shared));
    }
    return result;
  }

  const Spin spin_;
  std::mutex mutex_;
  std::vector<std::weak_ptr<Shared>> groups_;  // these are guarded by mutex_
  absl::flat_hash_set<int64_t> gone_;
  absl::Status failure_;
};

class InprocBackend : public Backend {
 public:
  InprocBackend(GroupInfo info, std::shared_ptr<Registry> registry, std::shared_ptr<Shared> shared)
      : Backend(std::move(info)), registry_(std::move(registry)), shared_(std::move(shared)) {}

  ~InprocBackend() override {
    {
      std::lock_guard lock(shared_->mutex);
      shared_->left.insert(rank());
      for (auto& [key, joining] : shared_->joining) {
        const auto& absent = joining.absent;
        const auto me = std::find(absent.begin(), absent.end(), rank());
        if (me != absent.end()) joining.group->group.leave(static_cast<int>(me - absent.begin()));
      }
    }
    shared_->mailboxes.leave(rank());
    shared_->meetings.leave(rank(), last_collective_);
    shared_->group.leave(rank());
    shared_->group.quiesce();
  }

  std::string_view name() const override { return "inproc"; }
  bool implements(OpKind) const override { return true; }

  absl::StatusOr<Ticket> start(const Call& call) override {
    if (is_point_to_point(call.op)) {
      absl::StatusOr<uint64_t> ticket = shared_->mailboxes.post(rank(), call);
      if (!ticket.ok() || *ticket == kDone) return ticket;
      return *ticket | kMail;
    }
    last_collective_ = call.sequence;
    absl::StatusOr<bool> done = shared_->meetings.arrive(rank(), call, Patience(patience()));
    if (!done.ok()) return done.status();
    return *done ? kDone : call.sequence;
  }

  bool done(Ticket ticket) override {
    return ticket & kMail ? shared_->mailboxes.done(rank(), ticket & ~kMail)
                          : shared_->meetings.done(rank(), ticket);
  }

  absl::Status wait(Ticket ticket, Deadline deadline) override {
    return ticket & kMail
               ? shared_->mailboxes.wait(rank(), ticket & ~kMail, deadline, Patience(patience()))
               : shared_->meetings.wait(rank(), ticket, deadline, Patience(patience()));
  }

  absl::Status health() override {
    return shared_->group.broken() ? shared_->group.failure() : absl::OkStatus();
  }

  absl::StatusOr<std::unique_ptr<Backend>> subgroup(GroupInfo info, absl::Span<const int> members,
                                                    std::string_view key, Deadline) override {
    std::shared_ptr<Shared> shared;
    {
      std::lock_guard lock(shared_->mutex);
      if (shared_->group.broken()) {
        const absl::Status why = shared_->group.failure();
        return retold(why, str_cat("group '", info.name, "': ", why.message()));
      }
      Shared::Joining& joining = shared_->joining[std::string(key)];
      if (joining.group == nullptr) {
        joining = {registry_->make(info), {members.begin(), members.end()}, info.size()};
        for (int there = 0; there < info.size(); ++there) {
          if (shared_->left.contains(members[there])) joining.group->group.leave(there);
        }
      }
      shared = joining.group;
      joining.absent[info.rank] = -1;
      if (--joining.num_absent == 0) shared_->joining.erase(std::string(key));
    }
    return std::make_unique<InprocBackend>(std::move(info), registry_, std::move(shared));
  }

  // The groups that wait for this rank to join are made of a broken one.
  void abort(const absl::Status& reason) override {
    shared_->group.fail(reason);
    std::vector<std::shared_ptr<Shared>> waiting;
    {
      std::lock_guard lock(shared_->mutex);
      for (const auto& [key, joining] : shared_->joining) waiting.push_back(joining.group);
    }
    for (const std::shared_ptr<Shared>& each : waiting) {
      each->group.fail(
          retold(reason, str_cat("group '", each->group.name(), "': ", reason.message())));
    }
  }

 private:
  // Marks the tickets of sends and recvs; the others are sequence numbers.
  static constexpr Ticket kMail = Ticket{1} << 63;

  int rank() const { return group().rank; }

  const std::shared_ptr<Registry> registry_;
  const std::shared_ptr<Shared> shared_;
  uint64_t last_collective_ = 0;
};

}  // namespace
}  // namespace inproc

struct InprocHub::State {
  std::shared_ptr<inproc::Registry> registry;
  GroupInfo info;  // but for the rank
  std::shared_ptr<inproc::Shared> world;
  std::mutex mutex;
  std::vector<bool> connected;  // guarded by mutex
};

InprocHub::InprocHub(int num_ranks) : state_(std::make_unique<State>()) {
  state_->registry = std::make_shared<inproc::Registry>(inproc::spin_for(num_ranks));
  state_->info.name = "world";
  state_->info.has_threads = num_ranks > 1;
  state_->info.world_ranks.resize(num_ranks);
  std::iota(state_->info.world_ranks.begin(), state_->info.world_ranks.end(), 0);
  state_->world = state_->registry->make(state_->info);
  state_->connected.resize(num_ranks, false);
}

InprocHub::~InprocHub() = default;

std::unique_ptr<Backend> InprocHub::make_backend(int rank) {
  {
    std::lock_guard lock(state_->mutex);
    if (rank < 0 || rank >= state_->info.size() || state_->connected[rank]) return nullptr;
    state_->connected[rank] = true;
  }
  GroupInfo info = state_->info;
  info.rank = rank;
  return std::make_unique<inproc::InprocBackend>(std::move(info), state_->registry, state_->world);
}

std::shared_ptr<Communicator> InprocHub::connect(int rank, const CommunicatorOptions& options) {
  std::unique_ptr<Backend> backend = make_backend(rank);
  return backend == nullptr ? nullptr : Communicator::create(std::move(backend), options);
}

void InprocHub::leave(int rank) {
  state_->registry->leave(rank);
}

void InprocHub::abort(const absl::Status& reason) {
  state_->registry->abort(reason);
}

}  // namespace shardweave
