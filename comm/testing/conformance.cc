#include "shardweave/comm/testing/conformance.h"

#include <thread>

namespace shardweave {

std::vector<absl::Status> run_on_threads(const ConformanceBackend& backend, int num_ranks,
                                         const RankBody& body, const CommunicatorOptions& options) {
  const ConformanceBackend::Connect connect = backend.make_world(num_ranks, options);
  std::vector<absl::Status> results(num_ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      absl::StatusOr<std::shared_ptr<Communicator>> comm = connect(rank);
      results[rank] = comm.ok() ? body(*comm) : comm.status();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

void CommConformance::run(const RankBody& body) {
  const std::vector<absl::Status> results =
      run_on_threads(backend(), size(), body, {.timeout = absl::Minutes(1)});
  for (int rank = 0; rank < size(); ++rank) {
    EXPECT_TRUE(results[rank].ok()) << "rank " << rank << ": " << results[rank];
  }
}

}  // namespace shardweave
