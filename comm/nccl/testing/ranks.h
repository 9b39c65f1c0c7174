// Ranks that are threads, with a GPU of the fake each, for tests of one topic.
//
//   expect_ok(run(2, [](GpuRank& rank) -> absl::Status {
//     Buffer x = rank.put<float>({1});
//     return rank.sum(x);
//   }, {.looks = 100}));
#pragma once

#include <chrono>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "shardweave/comm/communicator.h"
#include "shardweave/comm/inproc/inproc.h"
#include "shardweave/comm/nccl/nccl_backend.h"
#include "shardweave/comm/nccl/testing/fake_device.h"
#include "shardweave/comm/nccl/testing/fake_gpu.h"

namespace shardweave {

using absl::StatusCode;
using std::chrono::milliseconds;
using std::chrono::seconds;
using Clock = std::chrono::steady_clock;

inline FakeGpu& gpu() {
  return fake_gpu_of_tests();
}

// One rank with its GPU.
class GpuRank {
 public:
  GpuRank(std::shared_ptr<Communicator> communicator, int index)
      : comm(std::move(communicator)),
        device(fake_device(index)),
        stream(device->make_stream()),
        index_(index) {}
  ~GpuRank() { synchronize(); }

  template <typename T>
  Buffer put(const std::vector<T>& values) {
    const auto count = static_cast<int64_t>(values.size());
    void* const memory = gpu().allocate(index_, count * sizeof(T));
    std::memcpy(gpu().contents(memory), values.data(), count * sizeof(T));
    return {memory, count, kDTypeOf<T>, device->device()};
  }
  // What is there when all that is on the stream has been done.
  template <typename T>
  std::vector<T> get(const Buffer& buffer) {
    std::vector<T> values(buffer.count);
    device->copy_to_host(values.data(), buffer.data, buffer.bytes(), stream);
    synchronize();
    return values;
  }
  void synchronize() {
    const uint64_t mark = device->mark(stream);
    const Deadline limit = Clock::now() + seconds(60);
    while (!device->has_reached(mark)) {
      ASSERT_LT(Clock::now(), limit) << "the stream never ends";
      std::this_thread::sleep_for(milliseconds(1));
    }
  }
  absl::Status sum(const Buffer& buffer, CallOptions options = {}) {
    options.stream = stream;
    return comm->all_reduce(buffer, buffer, ReduceOp::kSum, options).wait();
  }

  std::shared_ptr<Communicator> comm;
  std::shared_ptr<TestDevice> device;
  DeviceStream stream;

 private:
  const int index_;
};

struct Conditions {
  ConnectDevice (*backend)(const NcclOptions& options) = connect_nccl;
  std::function<NcclOptions(int rank)> nccl = [](int rank) {
    return NcclOptions{.device = rank, .libraries = fake_libraries()};
  };
  PairedOptions paired;
  absl::Duration timeout = absl::Seconds(30);
  seconds connect = seconds(20);
};

using Body = std::function<absl::Status(GpuRank& rank)>;

// What each rank's body has returned, or its failure to connect.
inline std::vector<absl::Status> run(int ranks, const Body& body, const FakeGpuScript& script = {},
                                     const Conditions& conditions = {}) {
  gpu().reset(script);
  InprocHub hub(ranks);
  std::vector<absl::Status> results(ranks);
  std::vector<std::thread> threads;
  const Clock::time_point begin = Clock::now();
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      absl::StatusOr<std::unique_ptr<Backend>> backend =
          make_paired_backend(hub.make_backend(rank), conditions.backend(conditions.nccl(rank)),
                              conditions.paired, begin + conditions.connect);
      if (!backend.ok()) {
        results[rank] = backend.status();
        return;
      }
      GpuRank mine(Communicator::create(*std::move(backend), {.timeout = conditions.timeout}),
                   rank);
      results[rank] = body(mine);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LT(Clock::now() - begin, seconds(60)) << "nothing hangs";
  EXPECT_EQ(gpu().calls("ncclCommAbort blocks"), 0);
  EXPECT_EQ(gpu().events(), 0) << "events are left";
  return results;
}

inline void expect_all(const std::vector<absl::Status>& results, StatusCode code,
                       std::initializer_list<std::string> parts) {
  for (const absl::Status& status : results) {
    EXPECT_EQ(status.code(), code) << status;
    for (const std::string& part : parts) {
      EXPECT_TRUE(absl::StrContains(std::string(status.message()), part))
          << "want '" << part << "' in: " << status;
    }
  }
}

inline void expect_ok(const std::vector<absl::Status>& results) {
  for (const absl::Status& status : results) EXPECT_TRUE(status.ok()) << status;
}

}  // namespace shardweave
