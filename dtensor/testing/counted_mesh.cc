#include "shardweave/dtensor/testing/counted_mesh.h"

#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <utility>

#include "ATen/Parallel.h"
#include "gtest/gtest.h"
#include "shardweave/comm/gloo/gloo_backend.h"
#include "shardweave/comm/inproc/inproc.h"
#include "shardweave/comm/status_exception.h"
#include "shardweave/comm/store/in_process_store.h"

namespace shardweave::testing {
namespace {

// In elements.
int64_t sent_by(const GroupInfo& group, const Call& call) {
  switch (call.op) {
    case OpKind::kAllGather:
      return call.out.count - call.in.count;
    case OpKind::kReduceScatter:
      return call.in.count - call.out.count;
    case OpKind::kAllToAll:
      return call.in.count - call.in.count / group.size();
    case OpKind::kAllGatherV:
      return call.out.count - call.out_counts[(group.rank + 1) % group.size()];
    case OpKind::kReduceScatterV:
    case OpKind::kAllToAllV:
      return call.in.count - call.in_counts[group.rank];
    case OpKind::kAllReduce:
      return 2 * (call.in.count - call.in.count / group.size());
    default:
      return 0;  // broadcast of distribute_tensor and the like: not a step of a plan
  }
}

class CountedBackend : public Backend {
 public:
  CountedBackend(std::unique_ptr<Backend> carrier, Sent* sent)
      : Backend(carrier->group()), carrier_(std::move(carrier)), sent_(sent) {}

  std::string_view name() const override { return carrier_->name(); }
  bool implements(OpKind op) const override { return carrier_->implements(op); }
  absl::StatusOr<Ticket> start(const Call& call) override {
    if (!is_point_to_point(call.op)) {
      sent_->push_back({call.op, sent_by(group(), call) * element_size(call.in.dtype)});
    }
    return carrier_->start(call);
  }
  bool done(Ticket ticket) override { return carrier_->done(ticket); }
  absl::Status wait(Ticket ticket, Deadline deadline) override {
    return carrier_->wait(ticket, deadline);
  }
  absl::StatusOr<std::unique_ptr<Backend>> subgroup(GroupInfo group, absl::Span<const int> members,
                                                    std::string_view key,
                                                    Deadline deadline) override {
    auto carrier = carrier_->subgroup(std::move(group), members, key, deadline);
    if (!carrier.ok()) return carrier.status();
    return std::make_unique<CountedBackend>(*std::move(carrier), sent_);
  }
  void abort(const absl::Status& reason) override { carrier_->abort(reason); }

 private:
  const std::unique_ptr<Backend> carrier_;
  Sent* const sent_;
};

absl::Status run_rank(std::unique_ptr<Backend> carrier, const std::vector<MeshDim>& dims,
                      const std::function<void(const MeshPtr&, Sent&)>& body, Sent& sent) {
  at::set_num_threads(1);
  CommunicatorOptions options;
  options.timeout = absl::Seconds(60);
  World world(
      Communicator::create(std::make_unique<CountedBackend>(std::move(carrier), &sent), options));
  auto mesh = init_device_mesh(world, dims);
  if (!mesh.ok()) return mesh.status();
  try {
    body(*mesh, sent);
  } catch (const std::exception& e) {
    const absl::Status status = absl::InternalError(message_of(e));
    world.comm()->abort(status);
    return status;
  }
  return world.comm()->barrier().wait();
}

std::vector<absl::Status> run_ranks_over(const std::vector<MeshDim>& dims, Carrier carrier,
                                         const std::function<void(const MeshPtr&, Sent&)>& body,
                                         std::vector<Sent>* sent) {
  int num_ranks = 1;
  for (const MeshDim& dim : dims) num_ranks *= static_cast<int>(dim.size);
  sent->resize(num_ranks);
  std::vector<absl::Status> results(num_ranks);
  InprocHub hub(num_ranks);
  const std::shared_ptr<Store> store = make_in_process_store();
  const auto run = [&](int rank) -> absl::Status {
    if (carrier == Carrier::kInproc) {
      return run_rank(hub.make_backend(rank), dims, body, (*sent)[rank]);
    }
    GroupInfo group{.name = "world", .rank = rank, .world_ranks = std::vector<int64_t>(num_ranks)};
    std::iota(group.world_ranks.begin(), group.world_ranks.end(), 0);
    auto backend = make_gloo_backend(store, std::move(group));
    return backend.ok() ? run_rank(*std::move(backend), dims, body, (*sent)[rank])
                        : backend.status();
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] { results[rank] = run(rank); });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

}  // namespace

std::vector<Sent> on_counted_mesh(const std::vector<MeshDim>& dims, Carrier carrier,
                                  const std::function<void(const MeshPtr&, Sent&)>& body) {
  std::vector<Sent> sent;
  const std::vector<absl::Status> results = run_ranks_over(dims, carrier, body, &sent);
  for (size_t rank = 0; rank < results.size(); ++rank) {
    EXPECT_TRUE(results[rank].ok()) << "rank " << rank << ": " << results[rank];
  }
  return sent;
}

std::vector<absl::Status> try_on_each(const std::vector<MeshDim>& dims, Carrier carrier,
                                      const std::function<void(const MeshPtr&)>& body) {
  std::vector<Sent> sent;
  return run_ranks_over(
      dims, carrier, [&](const MeshPtr& mesh, Sent& /*sent*/) { body(mesh); }, &sent);
}

}  // namespace shardweave::testing
