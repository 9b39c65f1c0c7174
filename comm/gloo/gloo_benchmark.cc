// What collectives over loopback cost between processes, beside what they could and what Gloo's own
// cost:
//
//   ./bazelw run //comm/gloo:gloo_benchmark -- 2          # ranks
//
// Columns, in microseconds, medians: all_reduce of f32 here; the same number of bytes exchanged
// with a neighbour over a bare socket, the receiver never asleep (a bound for two ranks); a memcpy
// of them; Gloo's allreduce. And all_gather and reduce_scatter whose larger side has that size, and
// a barrier's. Before them, how long one still waits for a sum when both ranks have computed for
// some milliseconds since it was issued.
#include <fcntl.h>
#include <gloo/allreduce.h>
#include <gloo/math.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "shardweave/comm/communicator.h"
#include "shardweave/comm/gloo/gloo_backend.h"
#include "shardweave/comm/gloo/mesh.h"
#include "shardweave/comm/store/file_store.h"

namespace shardweave {
namespace {

void check(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  std::abort();
}

template <typename Function>
double median_us(int calls, const Function& call) {
  for (int i = 0; i < calls / 10; ++i) call();
  std::vector<double> times;
  for (int i = 0; i < calls; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    call();
    const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - begin;
    times.push_back(time.count());
  }
  std::nth_element(times.begin(), times.begin() + calls / 2, times.end());
  return times[calls / 2];
}

// Sends and receives `bytes` without ever sleeping.
void exchange(int fd, const char* out, char* in, int64_t bytes) {
  constexpr int64_t kTurn = 256 * 1024;
  for (int64_t sent = 0, received = 0; sent < bytes || received < bytes;) {
    if (sent < bytes) {
      const ssize_t n = ::send(fd, out + sent, std::min(bytes - sent, kTurn), MSG_NOSIGNAL);
      if (n > 0) sent += n;
    }
    if (received < bytes) {
      const ssize_t n = ::recv(fd, in + received, std::min(bytes - received, kTurn), 0);
      if (n > 0) received += n;
    }
  }
}

std::shared_ptr<::gloo::rendezvous::Context> plain_gloo(int rank, int size,
                                                        const std::string& path) {
  ::gloo::rendezvous::FileStore store(path);
  ::gloo::transport::tcp::attr attr("127.0.0.1");
  std::shared_ptr<::gloo::transport::Device> device = ::gloo::transport::tcp::CreateDevice(attr);
  auto context = std::make_shared<::gloo::rendezvous::Context>(rank, size);
  context->connectFullMesh(store, device);
  return context;
}

void run(int rank, int size, const std::string& directory) {
  GroupInfo group{.name = "world", .rank = rank, .world_ranks = std::vector<int64_t>(size)};
  std::iota(group.world_ranks.begin(), group.world_ranks.end(), 0);
  auto store = open_file_store(directory + "/store");
  check(store.status());
  const auto begin = std::chrono::steady_clock::now();
  auto backend = make_gloo_backend(*store, group);
  check(backend.status());
  const std::chrono::duration<double, std::milli> connect =
      std::chrono::steady_clock::now() - begin;
  auto comm = Communicator::create(*std::move(backend));
  auto sockets = gloo_internal::connect_mesh(**store, "bare", group, {}, Deadline::max());
  check(sockets.status());
  auto gloo_context = plain_gloo(rank, size, directory);

  const double barrier = median_us(3000, [&] { check(comm->barrier().wait()); });
  std::vector<std::vector<float>> buckets(8, std::vector<float>(1024));
  const double pending = median_us(1000, [&] {
    std::vector<Work> works;
    for (std::vector<float>& bucket : buckets) {
      const Buffer buffer = Buffer::of(bucket.data(), bucket.size());
      works.push_back(comm->all_reduce(buffer, buffer, ReduceOp::kSum));
    }
    for (const Work& work : works) check(work.wait());
  });
  if (rank == 0) {
    std::printf(
        "%d ranks; connected in %.1f ms; barrier %.1f us; 8 all_reduces of 4 KiB at once "
        "%.1f us\n\n",
        size, connect.count(), barrier, pending);
  }
  // How many of these make a millisecond here, alone.
  const auto begin_of_unit = std::chrono::steady_clock::now();
  volatile double unit = 1;
  for (int64_t k = 0; k < 10'000'000; ++k) unit = unit * 1.0000001;
  const std::chrono::duration<double> ten_million =
      std::chrono::steady_clock::now() - begin_of_unit;
  const auto units = static_cast<int64_t>(10e6 * 0.001 / ten_million.count());
  // A lone asynchronous operation while this rank computes, without calling in.
  for (const auto& [bytes, milliseconds] :
       {std::pair<int64_t, int>{1 << 20, 5}, {1 << 20, 50}, {25 << 20, 20}, {25 << 20, 50}}) {
    std::vector<float> data(bytes / 4, 1.0f);
    const Buffer buffer = Buffer::of(data.data(), bytes / 4);
    const double blocking =
        median_us(20, [&] { check(comm->all_reduce(buffer, buffer, ReduceOp::kMax).wait()); });
    std::vector<double> waited, computed;
    for (int i = 0; i < 20; ++i) {
      check(comm->barrier().wait());
      std::this_thread::sleep_for(std::chrono::milliseconds(30));  // the helper is at rest again
      const Work work = comm->all_reduce(buffer, buffer, ReduceOp::kMax);
      const auto issued = std::chrono::steady_clock::now();
      volatile double x = 1;
      for (int64_t k = 0; k < units * milliseconds; ++k) x = x * 1.0000001;
      const auto late = std::chrono::steady_clock::now();
      check(work.wait());
      const std::chrono::duration<double, std::micro> wait =
          std::chrono::steady_clock::now() - late;
      waited.push_back(wait.count());
      computed.push_back(std::chrono::duration<double, std::micro>(late - issued).count());
    }
    std::nth_element(waited.begin(), waited.begin() + 10, waited.end());
    std::nth_element(computed.begin(), computed.begin() + 10, computed.end());
    if (rank == 0) {
      std::printf(
          "all_reduce of %ld MiB: %.0f us; after %d ms of computing, which took %.0f us, "
          "waited %.0f us\n",
          bytes >> 20, blocking, milliseconds, computed[10], waited[10]);
    }
  }
  if (rank == 0) {
    std::printf("\n%9s %11s %11s %8s %11s %8s | %11s %14s\n", "bytes", "all_reduce", "exchange",
                "memcpy", "Gloo's own", "ratio", "all_gather", "reduce_scatter");
  }
  for (int64_t bytes : {64, 1024, 4096, 8192, 32768, 131072, 524288, 2097152, 8388608}) {
    const int calls = static_cast<int>(std::clamp<int64_t>(400'000'000 / bytes, 50, 3000));
    const int64_t count = bytes / 4;
    const int64_t part = std::max<int64_t>(count / size, 1);
    std::vector<float> data(std::max(count, part * size), 1.0f), other(data);
    const Buffer all = Buffer::of(data.data(), count);
    const Buffer parts = Buffer::of(data.data(), part * size);
    const Buffer mine = Buffer::of(data.data() + rank * part, part);
    const double all_reduce =
        median_us(calls, [&] { check(comm->all_reduce(all, all, ReduceOp::kMax).wait()); });
    const double all_gather =
        median_us(calls, [&] { check(comm->all_gather(mine, parts).wait()); });
    const double reduce_scatter =
        median_us(calls, [&] { check(comm->reduce_scatter(parts, mine, ReduceOp::kMax).wait()); });
    const int neighbour = rank ^ 1;
    double bound = 0;
    if (neighbour < size) {
      bound = median_us(calls, [&] {
        exchange(sockets->of_rank[neighbour].data.get(), reinterpret_cast<char*>(data.data()),
                 reinterpret_cast<char*>(other.data()), bytes);
      });
    }
    check(comm->barrier().wait());
    const double copy = median_us(calls, [&] { std::memcpy(other.data(), data.data(), bytes); });
    const double gloo_own = median_us(std::min(calls, 300), [&] {
      ::gloo::AllreduceOptions options(gloo_context);
      options.setOutput(data.data(), count);
      options.setReduceFunction(
          [](void* c, const void* a, const void* b, size_t n) { ::gloo::max<float>(c, a, b, n); });
      ::gloo::allreduce(options);
    });
    check(comm->barrier().wait());
    if (rank == 0) {
      std::printf("%9ld %11.1f %11.1f %8.1f %11.1f %7.1fx | %11.1f %14.1f\n", bytes, all_reduce,
                  bound, copy, gloo_own, gloo_own / all_reduce, all_gather, reduce_scatter);
      std::fflush(stdout);
    }
  }
}

}  // namespace
}  // namespace shardweave

int main(int argc, char** argv) {
  const int size = argc > 1 ? std::atoi(argv[1]) : 2;
  char directory[] = "/tmp/gloo_benchmark.XXXXXX";
  if (size < 1 || ::mkdtemp(directory) == nullptr) {
    std::fprintf(stderr, "usage: gloo_benchmark [RANKS]\n");
    return 1;
  }
  for (int rank = 0; rank < size; ++rank) {
    if (::fork() == 0) {
      shardweave::run(rank, size, directory);
      std::_Exit(0);
    }
  }
  int failed = 0;
  int status = 0;
  while (::wait(&status) > 0) failed |= status;
  std::filesystem::remove_all(directory);
  return failed == 0 ? 0 : 1;
}
