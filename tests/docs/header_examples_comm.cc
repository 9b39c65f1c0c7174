// The examples at the top of the headers below comm/, as docs_test finds them there: compiled, not
// run.
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "shardweave/comm/backend.h"
#include "shardweave/comm/buffer.h"
#include "shardweave/comm/communicator.h"
#include "shardweave/comm/environment/join_world.h"
#include "shardweave/comm/nccl/nccl_backend.h"
#include "shardweave/comm/nccl/staged_backend.h"
#include "shardweave/comm/paired/paired.h"
#include "shardweave/comm/rendezvous/environment.h"
#include "shardweave/comm/rendezvous/rendezvous.h"
#include "shardweave/comm/rendezvous/threads.h"
#include "shardweave/comm/store/c10d_store.h"
#include "shardweave/comm/store/file_store.h"
#include "shardweave/comm/store/in_process_store.h"
#include "shardweave/comm/store/prefix_store.h"
#include "shardweave/comm/store/store.h"

// Examples show what a call gives, and leave it at that.
#pragma GCC diagnostic ignored "-Wunused-result"
#pragma GCC diagnostic ignored "-Wunused-value"
#pragma GCC diagnostic ignored "-Wunused-variable"
#pragma GCC diagnostic ignored "-Wunused-but-set-variable"

namespace shardweave::header_examples {

// --- stores --------------------------------------------------------------------------------------

void store(int rank, const std::string& my_address) {
  std::shared_ptr<Store> store = make_in_process_store();
  store->set(absl::StrCat("address/", rank), my_address);
  auto peer = store->get("address/0", absl::Seconds(30));  // waits until rank 0 has set it
  auto arrived = store->add("arrived", 1);                 // atomic counter
}

void file_store(const std::string& my_address) {
  auto store = open_file_store("/shared/job7/store");  // a path that only this run uses
  (*store)->set("address/0", my_address);
}

void prefix_store(const std::shared_ptr<Store>& store, const std::string& address) {
  auto gloo = make_prefix_store(store, "gloo/tp0/");
  gloo->set("0", address);  // store key "gloo/tp0/0"
}

void c10d_store(uint16_t port, void (*tell_the_others)(uint16_t port)) {
  {
    auto server = open_c10d_store({.host = "10.0.0.1", .serve = true});  // rank 0
    tell_the_others((*server)->port());                                  // surely ours
    auto store = open_c10d_store({.host = "10.0.0.1", .port = port});    // the others
  }
}

// --- who this rank is ----------------------------------------------------------------------------

void environment() {
  Environment environment = Environment::of_process();
  Environment recorded({{"RANK", "3"}, {"WORLD_SIZE", "8"}});
  recorded.get("RANK");  // "3"
}

void rendezvous() {
  auto info = detect_rendezvous(Environment::of_process());
  if (absl::IsNotFound(info.status())) return;  // no launcher started this process
  info->launcher;                               // "torchrun"
  info->rank;                                   // 3
}

void threads(const Environment& environment) {
  std::optional<int> threads = threads_per_rank(environment, available_cores(), /*ranks=*/4);
}

void join(int rank) {
  RendezvousInfo info{.rank = rank, .world_size = 4};  // or detect_rendezvous()
  info.meeting_point.file = "/shared/job7/store";
  auto store = open_file_store(info.meeting_point.file);
  auto world = join_world(*store, info, {.timeout = absl::Minutes(1)});
}

// --- backends of devices -------------------------------------------------------------------------

void paired(std::unique_ptr<Backend> gloo, const ConnectDevice& connect_device, Deadline deadline,
            Buffer here, Buffer there, DeviceStream stream) {
  auto backend = make_paired_backend(std::move(gloo), connect_device, {}, deadline);
  auto comm = Communicator::create(*std::move(backend));
  comm->all_reduce(here, here, ReduceOp::kSum);                        // by gloo
  comm->all_reduce(there, there, ReduceOp::kSum, {.stream = stream});  // by the device's backend
}

void nccl(std::unique_ptr<Backend> gloo, int local_rank, Deadline deadline, Buffer x,
          DeviceStream stream) {
  ConnectDevice connect = connect_nccl({.device = local_rank});
  auto backend = make_paired_backend(std::move(gloo), connect, {}, deadline);
  auto comm = Communicator::create(*std::move(backend));
  comm->all_reduce(x, x, ReduceOp::kSum, {.stream = stream}).wait_on(stream);
}

void staged(std::unique_ptr<Backend> gloo, Deadline deadline, Buffer x, DeviceStream stream) {
  ConnectDevice connect = connect_staged({.device = 0});
  auto backend = make_paired_backend(std::move(gloo), connect, {}, deadline);
  auto comm = Communicator::create(*std::move(backend));
  comm->all_reduce(x, x, ReduceOp::kSum, {.stream = stream}).wait_on(stream);
}

}  // namespace shardweave::header_examples
