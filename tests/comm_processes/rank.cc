// One rank of comm_processes_test: rank STORE RANK SIZE SCENARIO TIMEOUT_MS
//
// Prints "connected", perhaps "going", and in the end the status; exits with 0 if that is OK.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "shardweave/comm/communicator.h"
#include "shardweave/comm/gloo/gloo_backend.h"
#include "shardweave/comm/store/file_store.h"

namespace shardweave {
namespace {

void say(const char* line) {
  std::printf("%s\n", line);
  std::fflush(stdout);
}

absl::Status expect(bool right, const char* what) {
  return right ? absl::OkStatus() : absl::InternalError(what);
}

// Values of some collectives, over all ranks and over groups of them.
absl::Status values(Communicator& comm) {
  const int rank = comm.rank(), size = comm.size();
  for (int64_t count : {1, 7, 1001, 300'007}) {
    std::vector<int64_t> sum(count);
    std::iota(sum.begin(), sum.end(), rank);
    const Buffer buffer = Buffer::of(sum.data(), count);
    absl::Status status = comm.all_reduce(buffer, buffer, ReduceOp::kSum).wait();
    for (int64_t i = 0; i < count; ++i) {
      status.Update(expect(sum[i] == i * size + size * (size - 1) / 2, "all_reduce"));
    }
    // A message around the ring, and one back.
    std::vector<int64_t> from_left(count), from_right(count);
    const int left = (rank + size - 1) % size, right = (rank + 1) % size;
    std::vector<int64_t> mine(count, rank);
    const Buffer out = Buffer::of(mine.data(), count);
    Work works[] = {comm.send(out, right, 1), comm.send(out, left, 2),
                    comm.recv(Buffer::of(from_right.data(), count), right, 2),
                    comm.recv(Buffer::of(from_left.data(), count), left, 1)};
    for (const Work& work : works) status.Update(work.wait());
    status.Update(expect(from_left == std::vector<int64_t>(count, left), "recv from the left"));
    status.Update(expect(from_right == std::vector<int64_t>(count, right), "recv from the right"));
    if (!status.ok()) return status;
  }
  auto half = comm.split(rank % 2, -rank, "half");
  if (!half.ok()) return half.status();
  if (comm.has_threads() || (*half)->has_threads()) return expect(false, "processes, not threads");
  double ranks = rank;
  const Buffer buffer = Buffer::of(&ranks, 1);
  absl::Status status = (*half)->all_reduce(buffer, buffer, ReduceOp::kMax).wait();
  const double last = (size - 1) % 2 == rank % 2 ? size - 1 : size - 2;
  status.Update(expect(ranks == last, "all_reduce of the half"));
  return status;
}

// Trains until something goes wrong.
absl::Status train(Communicator& comm) {
  std::vector<float> gradient(100'000);
  const Buffer buffer = Buffer::of(gradient.data(), gradient.size());
  for (int step = 0;; ++step) {
    absl::Status status =
        comm.all_reduce(buffer, buffer, ReduceOp::kAvg, {.tag = "gradient"}).wait();
    if (!status.ok()) return status;
    if (step == 10) say("going");
  }
}

absl::Status disagree(Communicator& comm) {
  float x = 1;
  const Buffer buffer = Buffer::of(&x, 1);
  return comm.rank() == 1 ? comm.barrier().wait()
                          : comm.all_reduce(buffer, buffer, ReduceOp::kSum).wait();
}

// Rank 1 ends before the others make a group with it.
absl::Status late_group(Communicator& comm) {
  absl::Status status = comm.barrier().wait();
  if (!status.ok() || comm.rank() == 1) return status;
  return comm.subgroup({0, 1, 2}, "late").status();
}

absl::Status run(int argc, char** argv) {
  if (argc != 6)
    return absl::InvalidArgumentError("usage: rank STORE RANK SIZE SCENARIO TIMEOUT_MS");
  const std::string_view scenario = argv[4];
  const absl::Duration timeout = absl::Milliseconds(std::atoi(argv[5]));
  GroupInfo group{.name = "world",
                  .rank = std::atoi(argv[2]),
                  .world_ranks = std::vector<int64_t>(std::atoi(argv[3]))};
  std::iota(group.world_ranks.begin(), group.world_ranks.end(), 0);
  auto store = open_file_store(argv[1]);
  if (!store.ok()) return store.status();
  auto backend = make_gloo_backend(*store, group, {.timeout = timeout});
  if (!backend.ok()) return backend.status();
  auto comm = Communicator::create(*std::move(backend), {.timeout = timeout});
  say("connected");
  if (scenario == "values") return values(*comm);
  if (scenario == "train") return train(*comm);
  if (scenario == "late_group") return late_group(*comm);
  return disagree(*comm);
}

}  // namespace
}  // namespace shardweave

int main(int argc, char** argv) {
  const absl::Status status = shardweave::run(argc, argv);
  shardweave::say(status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
