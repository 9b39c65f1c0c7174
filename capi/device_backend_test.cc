// Memory of GPUs in C: a device's backend that is a table of C functions, streams of operations, and
// what goes wrong. The GPUs are those of the fake (comm/nccl/testing).
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave.h"
#include "shardweave/capi/handles.h"
#include "shardweave/capi/world_options.h"
#include "shardweave/comm/inproc/inproc.h"
#include "shardweave/comm/nccl/testing/fake_device.h"
#include "shardweave/comm/nccl/testing/fake_gpu.h"
#include "shardweave/comm/testing/conformance.h"
#include "shardweave/comm/testing/on_device.h"
#include "testing/nccl_table.h"

namespace shardweave {
namespace {

using ::testing::HasSubstr;

// --- the conformance suite -----------------------------------------------------------------------

// Every call is of memory of a device, or every third of that of the CPU.
ConformanceBackend in_c(const std::string& name, const OnDeviceOptions& on) {
  const auto make_world = [on](int num_ranks, const CommunicatorOptions& options) {
    fake_gpu_of_tests().reset({});
    auto hub = std::make_shared<InprocHub>(num_ranks);
    auto tables = std::make_shared<NcclTables>();
    return [=](int rank) -> absl::StatusOr<std::shared_ptr<Communicator>> {
      const swv_device_backend table = nccl_in_c(*tables, rank);
      absl::StatusOr<std::unique_ptr<Backend>> backend = make_paired_backend(
          hub->make_backend(rank), capi::connect_device(&table, "device_backend"), {},
          std::chrono::steady_clock::now() + std::chrono::seconds(60));
      if (!backend.ok()) return backend.status();
      // The tables live as long as what they are tables of.
      std::shared_ptr<Communicator> comm =
          Communicator::create(on_device(*std::move(backend), fake_device(rank), on), options);
      return std::shared_ptr<Communicator>(comm.get(), [comm, tables](Communicator*) mutable {
        comm.reset();
        tables.reset();
      });
    };
  };
  ConformanceBackend result{.name = name, .make_world = make_world};
  result.rounds_once = false;
  result.matches_by_tag = false;
  return result;
}
SHARDWEAVE_COMM_CONFORMANCE(NcclInC, in_c("NcclInC", {}));
SHARDWEAVE_COMM_CONFORMANCE(MixedInC, in_c("MixedInC", {.every_on_cpu = 3}));

// --- through the header --------------------------------------------------------------------------

swv_world_options options_of(const swv_device_backend* device_backend) {
  swv_world_options options = SWV_WORLD_OPTIONS_INIT;
  options.device_backend = device_backend;
  options.timeout_ms = 20000;
  return options;
}

struct Answer {
  swv_code code = SWV_CODE_OK;
  std::string message;
};
Answer taken(swv_status* status) {
  if (status == nullptr) return {};
  Answer answer{swv_status_code(status), swv_status_message(status)};
  swv_status_free(status);
  return answer;
}
void expect_ok(swv_status* status) {
  const Answer answer = taken(status);
  EXPECT_EQ(answer.code, SWV_CODE_OK) << answer.message;
}

// One rank with its GPU.
// What a device copies from later, where it is stuck never: kept to the end of the program.
const std::vector<float>& keep(std::vector<float> values) {
  static std::mutex mutex;
  static auto& all = *new std::deque<std::vector<float>>;
  const std::lock_guard lock(mutex);
  return all.emplace_back(std::move(values));
}

struct Rank {
  int rank;
  swv_world* world;
  swv_comm* comm;
  std::shared_ptr<TestDevice> device;

  swv_buffer put(std::vector<float> given, DeviceStream stream) const {
    const std::vector<float>& values = keep(std::move(given));
    swv_buffer b = SWV_BUFFER_INIT;
    b.count = static_cast<int64_t>(values.size());
    b.dtype = SWV_DTYPE_F32;
    b.data = device->allocate(b.count * 4);
    b.device = {SWV_DEVICE_CUDA, rank};
    b.stream = stream.handle;
    device->copy_to_device(b.data, values.data(), b.count * 4, stream);
    return b;
  }
  std::vector<float> get(const swv_buffer& b, DeviceStream stream) const {
    std::vector<float> result(b.count);
    device->copy_to_host(result.data(), b.data, b.count * 4, stream);
    const uint64_t mark = device->mark(stream);
    while (!device->has_reached(mark)) std::this_thread::yield();
    return result;
  }
};

// Ranks that are threads join over Gloo, each with a table of its own. What each got for joining;
// `body` runs where that went well.
std::vector<Answer> join(int num_ranks, NcclTables& tables,
                         const std::function<void(const Rank&)>& body,
                         const FakeGpuScript& faults = {.operation_milliseconds = 20}) {
  static int runs = 0;
  const std::string file =
      std::string(std::getenv("TEST_TMPDIR")) + "/store" + std::to_string(++runs);
  fake_gpu_of_tests().reset(faults);
  std::vector<Answer> answers(num_ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      const swv_device_backend table = nccl_in_c(tables, rank);
      const swv_world_options options = options_of(&table);
      swv_rendezvous at = SWV_RENDEZVOUS_INIT;
      at.rank = rank;
      at.world_size = num_ranks;
      at.file = file.c_str();
      swv_world* world = nullptr;
      answers[rank] = taken(swv_world_join(&at, &options, &world));
      if (world == nullptr) return;
      swv_comm* comm = nullptr;
      expect_ok(swv_world_comm(world, &comm));
      body({rank, world, comm, fake_device(rank)});
      swv_comm_free(comm);
      swv_world_free(world);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return answers;
}

void expect_joined(int num_ranks, const std::function<void(const Rank&)>& body) {
  NcclTables tables;
  for (const Answer& answer : join(num_ranks, tables, body)) {
    EXPECT_EQ(answer.code, SWV_CODE_OK) << answer.message;
  }
  EXPECT_EQ(tables.dropped, tables.connected);
  EXPECT_EQ(tables.makers_dropped, num_ranks);
  EXPECT_EQ(tables.outlived, 0);
}

TEST(DeviceBackendTest, StreamsAreOrderedWithoutTheHost) {
  expect_joined(2, [](const Rank& r) {
    const DeviceStream before = r.device->make_stream(), after = r.device->make_stream();
    // Whoever does not wait for this stream reads what was there before.
    fake_gpu_of_tests().enqueue(
        r.rank, before, [] { std::this_thread::sleep_for(std::chrono::milliseconds(100)); });
    const swv_buffer x = r.put({1.0f + r.rank, 10}, before);
    swv_work* work = nullptr;
    expect_ok(swv_comm_all_reduce(r.comm, &x, &x, SWV_REDUCE_SUM, nullptr, &work));
    expect_ok(swv_work_wait_on(work, after.handle));
    swv_bool done = 1;
    expect_ok(swv_work_is_done(work, &done));
    EXPECT_FALSE(done) << "the host has waited";
    EXPECT_EQ(r.get(x, after), (std::vector<float>{3, 20}));
    expect_ok(swv_work_wait(work));
    swv_work_free(work);
    // And the host's wait.
    expect_ok(swv_comm_all_reduce(r.comm, &x, &x, SWV_REDUCE_SUM, nullptr, nullptr));
    EXPECT_EQ(r.get(x, r.device->make_stream()), (std::vector<float>{6, 40}));
  });
}

// One NCCL group, whose work is one.
TEST(DeviceBackendTest, CoalescedOperationsAreOneGroup) {
  expect_joined(2, [](const Rank& r) {
    const DeviceStream s = r.device->make_stream();
    const swv_buffer x = r.put({1}, s), y = r.put({2}, s);
    expect_ok(swv_comm_barrier(r.comm, nullptr, nullptr));
    const int64_t before = fake_gpu_of_tests().calls("ncclGroupEnd");
    expect_ok(swv_comm_barrier(r.comm, nullptr, nullptr));
    swv_coalescing* coalescing = nullptr;
    swv_work* work = nullptr;
    expect_ok(swv_comm_coalesce(r.comm, &coalescing));
    for (const swv_buffer* b : {&x, &y}) {
      expect_ok(swv_comm_all_reduce(r.comm, b, b, SWV_REDUCE_SUM, nullptr, nullptr));
    }
    expect_ok(swv_coalescing_finish(coalescing, &work));
    swv_coalescing_free(coalescing);
    expect_ok(swv_work_wait_on(work, s.handle));
    EXPECT_EQ(r.get(x, s), std::vector<float>{2});
    EXPECT_EQ(r.get(y, s), std::vector<float>{4});
    swv_work_free(work);
    expect_ok(swv_comm_barrier(r.comm, nullptr, nullptr));
    EXPECT_EQ(fake_gpu_of_tests().calls("ncclGroupEnd") - before, 2) << "one for each rank";
  });
}

TEST(DeviceBackendTest, AGroupOfTheWorldHasATableOfItsOwn) {
  NcclTables tables;
  const std::vector<Answer> answers = join(3, tables, [](const Rank& r) {
    swv_comm* part = nullptr;
    expect_ok(swv_comm_split(r.comm, r.rank == 1 ? -1 : 0, 0, "ends", &part));
    if (part == nullptr) return;
    const DeviceStream s = r.device->make_stream();
    const swv_buffer x = r.put({1.0f + r.rank}, s);
    expect_ok(swv_comm_all_reduce(part, &x, &x, SWV_REDUCE_SUM, nullptr, nullptr));
    EXPECT_EQ(r.get(x, s), std::vector<float>{4});
    swv_comm_free(part);
  });
  for (const Answer& answer : answers) EXPECT_EQ(answer.code, SWV_CODE_OK) << answer.message;
  EXPECT_EQ(tables.connected, 5);
  EXPECT_EQ(tables.dropped, 5);
  EXPECT_EQ(tables.outlived, 0);
}

// The table compares nothing; the ranks hear of it all the same.
TEST(DeviceBackendTest, RanksThatCallDifferentThings) {
  expect_joined(2, [](const Rank& r) {
    const DeviceStream s = r.device->make_stream();
    const swv_buffer x = r.put({1}, s);
    const Answer answer =
        taken(r.rank == 0 ? swv_comm_all_reduce(r.comm, &x, &x, SWV_REDUCE_SUM, nullptr, nullptr)
                          : swv_comm_broadcast(r.comm, &x, 0, nullptr, nullptr));
    EXPECT_EQ(answer.code, SWV_CODE_FAILED_PRECONDITION);
    EXPECT_THAT(answer.message, HasSubstr("all_reduce"));
    EXPECT_THAT(answer.message, HasSubstr("broadcast"));
  });
}

TEST(DeviceBackendTest, WrongStreamsAndDevices) {
  expect_joined(2, [](const Rank& r) {
    const DeviceStream s = r.device->make_stream(), other = r.device->make_stream();
    const swv_buffer x = r.put({1}, s);
    const auto expect_refused = [&](const swv_buffer& in, const swv_buffer& out, const char* why) {
      const Answer answer =
          taken(swv_comm_all_reduce(r.comm, &in, &out, SWV_REDUCE_SUM, nullptr, nullptr));
      EXPECT_EQ(answer.code, SWV_CODE_INVALID_ARGUMENT);
      EXPECT_THAT(answer.message, HasSubstr(why));
    };
    swv_buffer y = x;
    y.stream = other.handle;
    expect_refused(x, y, "argument 'out' has another stream than the operation's input");
    y.stream = nullptr;
    expect_refused(x, y, "argument 'out' has another stream");
    float here[] = {1};
    swv_buffer cpu = SWV_BUFFER_INIT;
    cpu.data = here;
    cpu.count = 1;
    cpu.dtype = SWV_DTYPE_F32;
    cpu.stream = s.handle;
    expect_refused(cpu, cpu, "a CPU has no streams");
    y = x;
    y.device.index = 1 - r.rank;
    expect_refused(y, y, "backend nccl in C of rank");
    // Nothing was issued, on any rank: the group works.
    expect_ok(swv_comm_all_reduce(r.comm, &x, &x, SWV_REDUCE_SUM, nullptr, nullptr));
    EXPECT_EQ(r.get(x, s), std::vector<float>{2});
    cpu.stream = nullptr;
    swv_work* work = nullptr;
    expect_ok(swv_comm_all_reduce(r.comm, &cpu, &cpu, SWV_REDUCE_SUM, nullptr, &work));
    expect_ok(swv_work_wait_on(work, nullptr));
    EXPECT_EQ(here[0], 2);
    swv_work_free(work);
  });
}

// --- what goes wrong later -----------------------------------------------------------------------

// All ranks join; rank 1's table is spoiled.
void join_spoiled(void (*spoil)(swv_backend& table), const std::function<void(const Rank&)>& body,
                  const FakeGpuScript& faults = {.operation_milliseconds = 20}) {
  NcclTables tables;
  tables.spoil = spoil;
  for (const Answer& answer : join(2, tables, body, faults)) {
    EXPECT_EQ(answer.code, SWV_CODE_OK) << answer.message;
  }
  EXPECT_EQ(tables.dropped, tables.connected);
  EXPECT_EQ(tables.outlived, 0);
}

// Until it is done, or `timeout` has passed.
Answer sum_until(const Rank& r, const swv_buffer& x, int64_t timeout_ms,
                 swv_work** work = nullptr) {
  swv_collective c = SWV_COLLECTIVE_INIT;
  c.kind = SWV_COLLECTIVE_ALL_REDUCE;
  c.in = c.out = &x;
  c.timeout_ms = timeout_ms;
  return taken(swv_comm_start(r.comm, &c, work));
}

TEST(DeviceBackendTest, AStartThatGivesNoTicket) {
  join_spoiled(
      [](swv_backend& t) {
        t.start = [](void*, const swv_backend_call*, uint64_t*) -> swv_status* { return nullptr; };
      },
      [](const Rank& r) {
        const Answer answer = sum_until(r, r.put({1}, r.device->make_stream()), 5000);
        EXPECT_NE(answer.code, SWV_CODE_OK);
        EXPECT_THAT(answer.message, HasSubstr("gave no out_ticket"));
      });
}

// What a stream has to do never ends, and what goes through the host waits for it.
std::atomic<bool> is_aborted;
void (*abort_of_table)(void*, swv_code, const char*);
swv_status* until_aborted() {
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!is_aborted && std::chrono::steady_clock::now() < limit) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_TRUE(is_aborted) << "nobody has ended what waits";
  return swv_status_new(SWV_CODE_ABORTED, "the copy was aborted");
}
void spoil_abort(swv_backend& t) {
  is_aborted = false;
  abort_of_table = t.abort;
  t.abort = [](void* self, swv_code code, const char* reason) {
    is_aborted = true;
    abort_of_table(self, code, reason);
  };
}

TEST(DeviceBackendTest, WhatGoesThroughTheHostHasADeadlineToo) {
  void (*const kSpoils[])(swv_backend&) = {
      [](swv_backend& t) {
        spoil_abort(t);
        t.copy_to_host = [](void*, void*, const swv_buffer*) { return until_aborted(); };
      },
      [](swv_backend& t) {
        spoil_abort(t);
        t.copy_to_device = [](void*, const swv_buffer*, const void*) { return until_aborted(); };
      }};
  for (const auto spoil : kSpoils) {
    join_spoiled(spoil, [&](const Rank& r) {
      swv_buffer x = r.put({1}, r.device->make_stream());
      x.dtype = SWV_DTYPE_I16;  // which NCCL does not add
      x.count = 2;
      const Answer answer = sum_until(r, x, 500);
      if (r.rank == 1) {
        EXPECT_EQ(answer.code, SWV_CODE_DEADLINE_EXCEEDED) << answer.message;
        EXPECT_THAT(answer.message, HasSubstr("the host by way of its stream"));
        EXPECT_THAT(answer.message, HasSubstr("all_reduce(i16[2], sum)"));
      } else if (spoil == kSpoils[0]) {
        EXPECT_NE(answer.code, SWV_CODE_OK);
      }
      // The group is broken on both.
      EXPECT_NE(sum_until(r, x, 5000).code, SWV_CODE_OK);
    });
  }
}

// A work that is asked about late has been done in time.
TEST(DeviceBackendTest, WhatWentThroughTheHostMayBeFetchedLate) {
  expect_joined(2, [](const Rank& r) {
    const DeviceStream s = r.device->make_stream();
    swv_buffer x = r.put({1}, s);
    x.dtype = SWV_DTYPE_I16;
    x.count = 2;
    swv_work* work = nullptr;
    EXPECT_EQ(sum_until(r, x, 300, &work).code, SWV_CODE_OK);
    std::this_thread::sleep_for(std::chrono::milliseconds(600));
    expect_ok(swv_work_wait(work));
    swv_work_free(work);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    expect_ok(swv_comm_health(r.comm));
    expect_ok(swv_comm_barrier(r.comm, nullptr, nullptr));
  });
}

// As a vendor's start() may do that waits for the others.
TEST(DeviceBackendTest, AStartThatDoesNotReturnIsAborted) {
  join_spoiled(
      [](swv_backend& t) {
        spoil_abort(t);
        t.start = [](void*, const swv_backend_call*, uint64_t*) { return until_aborted(); };
      },
      [](const Rank& r) {
        const swv_buffer x = r.put({1}, r.device->make_stream());
        const Answer answer = sum_until(r, x, 500);
        EXPECT_NE(answer.code, SWV_CODE_OK) << answer.message;
        if (r.rank == 0) return;
        EXPECT_THAT(answer.message, HasSubstr("all_reduce(f32[1], sum)"));
      });
}

// Leaving ends what can end, and gives the rest up: a drop that waits does not wait for ever.
TEST(DeviceBackendTest, WhoLeavesWithOperationsUnderWay) {
  static void (*drop)(void*);
  join_spoiled(
      [](swv_backend& t) {
        spoil_abort(t);
        drop = t.drop;
        t.done = [](void*, uint64_t) -> swv_bool { return is_aborted; };
        t.drop = [](void* self) {
          swv_status_free(until_aborted());
          drop(self);
        };
      },
      [](const Rank& r) {
        const swv_buffer x = r.put({1}, r.device->make_stream());
        swv_work* work = nullptr;
        EXPECT_EQ(sum_until(r, x, 500, &work).code, SWV_CODE_OK);
        swv_work_free(work);
      });
  EXPECT_TRUE(is_aborted);
}

// What only a stream waits for.
TEST(DeviceBackendTest, AGroupSaysThatItIsBrokenThoughNobodyHasWaited) {
  join_spoiled(nullptr,
               [](const Rank& r) {
                 const DeviceStream s = r.device->make_stream();
                 const swv_buffer x = r.put({1}, s);
                 swv_work* work = nullptr;
                 EXPECT_EQ(sum_until(r, x, 300, &work).code, SWV_CODE_OK);
                 taken(swv_work_wait_on(work, s.handle));
                 Answer health;
                 const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(10);
                 while (health.code == SWV_CODE_OK && std::chrono::steady_clock::now() < limit) {
                   std::this_thread::sleep_for(std::chrono::milliseconds(10));
                   health = taken(swv_comm_health(r.comm));
                 }
                 EXPECT_NE(health.code, SWV_CODE_OK);
                 EXPECT_THAT(health.message, HasSubstr("all_reduce(f32[1], sum)"));
                 swv_work_free(work);
               },
               {.faulty_device = 0, .hanging_operation = 1});
}

// --- what goes wrong while a world is made -------------------------------------------------------

// The others hear of what rank 1 says; all that was taken over is dropped.
void expect_all_fail(NcclTables& tables, const char* of_it) {
  const std::vector<Answer> answers = join(3, tables, [](const Rank&) { ADD_FAILURE(); });
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_NE(answers[rank].code, SWV_CODE_OK);
    EXPECT_THAT(answers[rank].message, HasSubstr(of_it)) << rank;
  }
  EXPECT_EQ(tables.dropped, tables.connected);
  EXPECT_EQ(tables.makers_dropped, 3);
}

TEST(DeviceBackendTest, TablesThatAreNone) {
  const struct {
    void (*spoil)(swv_backend& table);
    const char* message;
  } kSpoiled[] = {
      {[](swv_backend& t) { t.start = nullptr; }, "argument 'out_backend.start' is NULL"},
      {[](swv_backend& t) { t.abort = nullptr; }, "argument 'out_backend.abort' is NULL"},
      {[](swv_backend& t) { t.name = nullptr; }, "argument 'out_backend.name' is NULL"},
      {[](swv_backend& t) { t.implements = ~uint64_t{0}; }, "no swv_collective_kind"},
      {[](swv_backend& t) { t.device = {SWV_DEVICE_CPU, 0}; }, "wanted this rank's GPU"},
      {[](swv_backend& t) { t.device = {7, 0}; }, "'out_backend.device' is device type 7"},
      {[](swv_backend& t) { t.end_coalescing = nullptr; }, "wanted both or none"},
      {[](swv_backend& t) { t.wait = nullptr; }, "argument 'out_backend.wait' is NULL"},
      {[](swv_backend& t) { t.done = nullptr; }, "argument 'out_backend.done' is NULL"},
      {[](swv_backend& t) { t.struct_size = 0; }, "'out_backend.struct_size' is 0; wanted"},
      {[](swv_backend& t) { t.struct_size += 8; }, "as it was given"},
  };
  for (const auto& spoiled : kSpoiled) {
    SCOPED_TRACE(spoiled.message);
    NcclTables tables;
    tables.spoil = spoiled.spoil;
    expect_all_fail(tables, spoiled.message);
  }
}

TEST(DeviceBackendTest, ARankWithoutABackendIsAnErrorOfAll) {
  NcclTables tables;
  tables.connect_fails_on = 1;
  const std::vector<Answer> answers = join(3, tables, [](const Rank&) { ADD_FAILURE(); });
  EXPECT_EQ(answers[1].code, SWV_CODE_UNAVAILABLE);
  for (const Answer& answer : answers) {
    EXPECT_NE(answer.code, SWV_CODE_OK);
    EXPECT_THAT(answer.message, HasSubstr("the cable is not plugged in"));
  }
  EXPECT_EQ(tables.dropped, tables.connected);
  EXPECT_EQ(tables.makers_dropped, 3);
}

// Whatever else is wrong, the table's maker is taken over.
TEST(DeviceBackendTest, OptionsThatAreRefused) {
  int expected = 0;
  NcclTables tables;
  swv_world* world = nullptr;
  const auto expect_refused = [&](const std::function<swv_status*(swv_world_options&)>& call,
                                  swv_code code, const char* why) {
    const swv_device_backend table = nccl_in_c(tables, 0);
    swv_world_options options = options_of(&table);
    const Answer answer = taken(call(options));
    EXPECT_EQ(answer.code, code);
    EXPECT_THAT(answer.message, HasSubstr(why));
    EXPECT_EQ(tables.makers_dropped, ++expected) << why;
  };
  swv_rendezvous at = SWV_RENDEZVOUS_INIT;
  const std::string file = std::string(std::getenv("TEST_TMPDIR")) + "/refused";
  at.file = file.c_str();
  expect_refused([&](auto& o) { return swv_world_create_local(1, &o, &world); },
                 SWV_CODE_INVALID_ARGUMENT, "'options.device_backend' is given");
  expect_refused([&](auto& o) { return swv_run_ranks(0, nullptr, nullptr, &o); },
                 SWV_CODE_INVALID_ARGUMENT, "'options.device_backend' is given");
  expect_refused([&](auto& o) { return swv_world_join(&at, &o, nullptr); },
                 SWV_CODE_INVALID_ARGUMENT, "'out_world' is NULL");
  expect_refused([&](auto& o) { return swv_world_join(nullptr, &o, &world); },
                 SWV_CODE_INVALID_ARGUMENT, "'rendezvous' is NULL");
  expect_refused([&](auto& o) { return swv_world_from_environment(&o, nullptr); },
                 SWV_CODE_INVALID_ARGUMENT, "'out_world' is NULL");
  expect_refused([&](auto& o) { return swv_world_from_environment(&o, &world); },
                 SWV_CODE_NOT_FOUND, "");
  expect_refused(
      [&](auto& o) {
        o.timeout_ms = -1;
        return swv_world_join(&at, &o, &world);
      },
      SWV_CODE_INVALID_ARGUMENT, "'options.timeout_ms' is -1");
  expect_refused(
      [&](auto& o) {
        o.backend = "nccl";
        return swv_world_join(&at, &o, &world);
      },
      SWV_CODE_INVALID_ARGUMENT, "the backend \"nccl\" as well");
  expect_refused(
      [&](auto& o) {
        o.device = {SWV_DEVICE_CUDA, 1};
        return swv_world_join(&at, &o, &world);
      },
      SWV_CODE_INVALID_ARGUMENT, "the device 1 as well");
  const swv_backend none = SWV_BACKEND_INIT;
  const swv_group group = SWV_GROUP_INIT;
  expect_refused([&](auto& o) { return swv_world_create_with_backend(&none, &group, &o, &world); },
                 SWV_CODE_INVALID_ARGUMENT, "'backend.name' is NULL");
  expect_refused([&](auto& o) { return swv_world_create_with_backend(&none, &group, &o, nullptr); },
                 SWV_CODE_INVALID_ARGUMENT, "'out_world' is NULL");
  swv_device_backend empty = SWV_DEVICE_BACKEND_INIT;
  const swv_world_options options = options_of(&empty);
  const Answer answer = taken(swv_world_join(&at, &options, &world));
  EXPECT_EQ(answer.code, SWV_CODE_INVALID_ARGUMENT);
  EXPECT_THAT(answer.message, HasSubstr("'options.device_backend.connect' is NULL"));
  EXPECT_EQ(world, nullptr);
}

}  // namespace
}  // namespace shardweave
