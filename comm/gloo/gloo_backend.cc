#include "shardweave/comm/gloo/gloo_backend.h"

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "shardweave/comm/failed_rank.h"
#include "shardweave/comm/gloo/engine.h"
#include "shardweave/comm/gloo/frame.h"
#include "shardweave/comm/gloo/mesh.h"
#include "shardweave/comm/str_cat.h"

namespace shardweave {
namespace {

class GlooBackend : public Backend {
  using Engine = gloo_internal::Engine;

  // A group that this one was made from, which may be gone by now.
  struct Ancestor {
    std::vector<int64_t> world_ranks;
    std::weak_ptr<Engine> engine;
  };
  struct Ancestors {
    std::vector<Ancestor> groups;
    // Of these and of all that is made from them.
    std::shared_ptr<gloo_internal::FirstFailure> first_failure =
        std::make_shared<gloo_internal::FirstFailure>();
  };

 public:
  static absl::StatusOr<std::unique_ptr<Backend>> connect(std::shared_ptr<Store> store,
                                                          GroupInfo group, std::string interface,
                                                          std::string prefix, Ancestors ancestors,
                                                          Deadline deadline) {
    absl::StatusOr<gloo_internal::Channels> channels = gloo_internal::connect_mesh(
        *store, prefix, group,
        {.interface = interface,
         .build = gloo_internal::describe_build(),
         .watch = [&](const auto& missing) { return watch(ancestors, group, missing); }},
        deadline);
    if (!channels.ok()) return channels.status();
    group.has_threads = channels->to_threads;
    auto engine = std::make_shared<Engine>(group, std::move(channels->of_rank),
                                           gloo_internal::CollectiveSchedule::Limits(),
                                           ancestors.first_failure);
    // All ranks have connected. What others have broken since is for those who use the group to hear.
    if (absl::Status status = engine->failure(); !status.ok()) return status;
    return std::unique_ptr<Backend>(new GlooBackend(std::move(store), std::move(group),
                                                    std::move(interface), std::move(prefix),
                                                    std::move(ancestors), std::move(engine)));
  }

  std::string_view name() const override { return "gloo"; }
  bool implements(OpKind) const override { return true; }
  absl::StatusOr<Ticket> start(const Call& call) override { return engine_->start(call); }
  bool done(Ticket ticket) override { return engine_->done(ticket); }
  absl::Status wait(Ticket ticket, Deadline deadline) override {
    return engine_->wait(ticket, deadline, Patience(patience()));
  }
  absl::Status health() override { return engine_->health(); }
  void abort(const absl::Status& reason) override { engine_->abort(reason); }

  absl::StatusOr<std::unique_ptr<Backend>> subgroup(GroupInfo group, absl::Span<const int>,
                                                    std::string_view key,
                                                    Deadline deadline) override {
    Ancestors ancestors = ancestors_;
    ancestors.groups.push_back({this->group().world_ranks, engine_});
    return connect(store_, std::move(group), interface_, str_cat(prefix_, "/", key),
                   std::move(ancestors), deadline);
  }

 private:
  // Why the ranks of `group` will not be connected: a group that it is made from is broken, or has
  // been left by a rank that is missing here.
  static absl::Status watch(const Ancestors& ancestors, const GroupInfo& group,
                            const gloo_internal::ConnectOptions::Missing& missing) {
    for (const Ancestor& ancestor : ancestors.groups) {
      const std::shared_ptr<Engine> engine = ancestor.engine.lock();
      if (engine == nullptr) continue;
      if (absl::Status status = engine->health(); !status.ok()) return status;
      std::vector<int> gone, gone_there;
      for (int rank = 0; rank < group.size(); ++rank) {
        const auto& all = ancestor.world_ranks;
        const auto there = std::find(all.begin(), all.end(), group.world_ranks[rank]);
        if (there != all.end() && engine->is_gone(static_cast<int>(there - all.begin()))) {
          gone.push_back(rank);
          gone_there.push_back(static_cast<int>(there - all.begin()));
        }
      }
      if (gone.empty()) continue;
      // It may have come here before it went.
      for (int rank : missing()) {
        const auto found = std::find(gone.begin(), gone.end(), rank);
        if (found == gone.end()) continue;
        const int64_t world_rank = group.world_ranks[rank];
        return of_rank(
            absl::UnavailableError(str_cat("rank ", rank, " (world rank ", world_rank, ") has left",
                                           engine->left_after(gone_there[found - gone.begin()]))),
            world_rank);
      }
    }
    return absl::OkStatus();
  }

  GlooBackend(std::shared_ptr<Store> store, GroupInfo group, std::string interface,
              std::string prefix, Ancestors ancestors, std::shared_ptr<Engine> engine)
      : Backend(std::move(group)),
        store_(std::move(store)),
        interface_(std::move(interface)),
        prefix_(std::move(prefix)),
        ancestors_(std::move(ancestors)),
        engine_(std::move(engine)) {}

  const std::shared_ptr<Store> store_;
  const std::string interface_;
  const std::string prefix_;
  const Ancestors ancestors_;
  const std::shared_ptr<Engine> engine_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> make_gloo_backend(std::shared_ptr<Store> store,
                                                           GroupInfo group,
                                                           const GlooOptions& options) {
  if (store == nullptr || group.world_ranks.empty() || group.rank < 0 ||
      group.rank >= group.size()) {
    return absl::InvalidArgumentError(str_cat("make_gloo_backend: store is ",
                                              store == nullptr ? "null" : "there", ", rank is ",
                                              group.rank, " of ", group.size()));
  }
  const int64_t timeout = absl::ToInt64Nanoseconds(options.timeout);  // saturates
  const Deadline now = std::chrono::steady_clock::now();
  const Deadline deadline = timeout > (Deadline::max() - now).count()
                                ? Deadline::max()
                                : now + std::chrono::nanoseconds(timeout);
  return GlooBackend::connect(std::move(store), std::move(group), options.interface, options.prefix,
                              {}, deadline);
}

}  // namespace shardweave
