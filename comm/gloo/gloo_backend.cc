#include "shardweave/comm/gloo/gloo_backend.h"

#include <chrono>
#include <utility>

#include "shardweave/comm/gloo/engine.h"
#include "shardweave/comm/gloo/mesh.h"
#include "shardweave/comm/str_cat.h"

namespace shardweave {
namespace {

class GlooBackend : public Backend {
 public:
  static absl::StatusOr<std::unique_ptr<Backend>> connect(std::shared_ptr<Store> store,
                                                          GroupInfo group, std::string interface,
                                                          std::string prefix, Deadline deadline) {
    absl::StatusOr<std::vector<gloo_internal::UniqueFd>> sockets =
        gloo_internal::connect_mesh(*store, prefix, group, interface, deadline);
    if (!sockets.ok()) return sockets.status();
    return std::unique_ptr<Backend>(new GlooBackend(std::move(store), std::move(group),
                                                    std::move(interface), std::move(prefix),
                                                    *std::move(sockets)));
  }

  std::string_view name() const override { return "gloo"; }
  bool implements(OpKind) const override { return true; }
  absl::StatusOr<Ticket> start(const Call& call) override { return engine_.start(call); }
  bool done(Ticket ticket) override { return engine_.done(ticket); }
  absl::Status wait(Ticket ticket, Deadline deadline) override {
    return engine_.wait(ticket, deadline);
  }
  void abort(const absl::Status& reason) override { engine_.abort(reason); }

  absl::StatusOr<std::unique_ptr<Backend>> subgroup(GroupInfo group, absl::Span<const int>,
                                                    std::string_view key,
                                                    Deadline deadline) override {
    return connect(store_, std::move(group), interface_, str_cat(prefix_, "/", key), deadline);
  }

 private:
  GlooBackend(std::shared_ptr<Store> store, GroupInfo group, std::string interface,
              std::string prefix, std::vector<gloo_internal::UniqueFd> sockets)
      : Backend(std::move(group)),
        store_(std::move(store)),
        interface_(std::move(interface)),
        prefix_(std::move(prefix)),
        engine_(this->group(), std::move(sockets)) {}

  const std::shared_ptr<Store> store_;
  const std::string interface_;
  const std::string prefix_;
  gloo_internal::Engine engine_;
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
                              deadline);
}

}  // namespace shardweave
