// Worlds.
#include "shardweave/capi/handles.h"
#include "shardweave/capi/threads.h"
#include "shardweave/capi/world_options.h"
#include "shardweave/comm/counting/counting.h"
#include "shardweave/comm/environment/from_environment.h"
#include "shardweave/comm/inproc/inproc.h"
#include "shardweave/comm/rendezvous/rendezvous.h"
#include "shardweave/comm/str_cat.h"

namespace shardweave::capi {

GivenWorldOptions world_options(const swv_world_options* given) {
  if (given == nullptr) return {};
  auto o = known_options<swv_world_options>(*given, SWV_WORLD_OPTIONS_INIT, "options");
  // A size that ends within the pointer is no version's.
  if (given->struct_size < SWV_SIZE_TO(swv_world_options, device_backend))
    o.device_backend = nullptr;
  GivenWorldOptions result;
  result.connect_device = connect_device(o.device_backend, "options.device_backend");
  check_options(*given, o, "options");
  WorldOptions& world = result.world;
  world.backend = text_or(o.backend, world.backend, "options.backend");
  world.interface = text_or(o.network_interface, "", "options.network_interface");
  world.timeout = timeout(o.timeout_ms, "options.timeout_ms", world.timeout);
  const Device device = comm_device(o.device, "options.device");
  if (device.type == DeviceType::kCuda) world.device = device.index;
  return result;
}

namespace {

// Of ranks that are threads. "gloo" is what options for processes say, too: it is not used.
WorldOptions local_options(const swv_world_options* given) {
  const GivenWorldOptions o = world_options(given);
  if (o.connect_device != nullptr) {
    fail_argument("options.device_backend", "is given; ranks that are threads have the CPU alone");
  }
  const WorldOptions& result = o.world;
  if (result.backend != "gloo" && result.backend != "inproc") {
    fail_argument("options.backend", str_cat("is \"", result.backend,
                                             "\"; ranks that are threads have the backend inproc "
                                             "(wanted: NULL, \"inproc\" or \"gloo\", which is "
                                             "not used here)"));
  }
  return result;
}

void check_num_ranks(int32_t num_ranks, int32_t most = kMaxInprocRanks) {
  if (num_ranks < 1 || num_ranks > most) {
    fail_argument("num_ranks", str_cat("is ", num_ranks, "; wanted 1 to ", most));
  }
}

swv_world* new_world(std::shared_ptr<World> world) {
  return make<swv_world>(std::move(world));
}

void run(int32_t num_ranks, swv_rank_fn body, void* user_data, const swv_world_options* given) {
  const WorldOptions options = local_options(given);
  check_num_ranks(num_ranks);
  if (body == nullptr) fail_null("body");
  const auto rank = [&](World& world) {
    // Borrowed: the world ends with this call, whatever the body keeps.
    const Owned<swv_world> handle(
        new_world(std::make_shared<World>(world.comm(), world.local_rank(), world.local_size())));
    return take(body(user_data, handle.get()));
  };
  check(run_ranks(num_ranks, std::function<absl::Status(World&)>(rank), options));
}

void create_local(int32_t num_ranks, const swv_world_options* options, swv_world** out_worlds) {
  const absl::Duration timeout = local_options(options).timeout;
  check_num_ranks(num_ranks);
  out(out_worlds, "out_worlds");
  InprocHub hub(num_ranks);
  std::vector<Owned<swv_world>> worlds;
  for (int rank = 0; rank < num_ranks; ++rank) {
    worlds.emplace_back(
        new_world(std::make_shared<World>(hub.connect(rank, {.timeout = timeout}))));
  }
  for (int rank = 0; rank < num_ranks; ++rank) out_worlds[rank] = worlds[rank].release();
}

RendezvousInfo rendezvous_info(const swv_rendezvous* given) {
  const swv_rendezvous r =
      required_options<swv_rendezvous>(given, SWV_RENDEZVOUS_INIT, "rendezvous");
  RendezvousInfo info;
  info.rank = r.rank;
  info.world_size = r.world_size;
  if (r.local_rank >= 0) info.local_rank = r.local_rank;
  info.run = text_or(r.run, info.run, "rendezvous.run");
  info.meeting_point.file = text_or(r.file, "", "rendezvous.file");
  info.meeting_point.host = text_or(r.host, "", "rendezvous.host");
  info.meeting_point.origin = "swv_rendezvous";
  if (info.meeting_point.file.empty()) {
    if (info.meeting_point.host.empty()) {
      fail_argument("rendezvous", "has neither file nor host");
    }
    if (r.port < 1 || r.port > 65535) {
      fail_argument("rendezvous.port", str_cat("is ", r.port, "; wanted 1 to 65535"));
    }
    info.meeting_point.port = static_cast<uint16_t>(r.port);
  }
  check(validate(info));
  return info;
}

swv_world* join(const RendezvousInfo& info, GivenWorldOptions options) {
  std::shared_ptr<World> world =
      check(join_world(info, options.world, std::move(options.connect_device)));
  default_num_threads(*world);
  return new_world(std::move(world));
}

}  // namespace
}  // namespace shardweave::capi

using namespace shardweave::capi;  // NOLINT: this file is the C interface of it

swv_status* swv_run_ranks(int32_t num_ranks, swv_rank_fn body, void* user_data,
                          const swv_world_options* options) {
  return guarded(__func__, [&] { run(num_ranks, body, user_data, options); });
}

swv_status* swv_world_create_local(int32_t num_ranks, const swv_world_options* options,
                                   swv_world** out_worlds) {
  return guarded(__func__, [&] { create_local(num_ranks, options, out_worlds); });
}

swv_status* swv_world_from_environment(const swv_world_options* options, swv_world** out_world) {
  return guarded(__func__, [&] {
    GivenWorldOptions given = world_options(options);
    swv_world*& world = out(out_world, "out_world");
    world = join(check(shardweave::detect_rendezvous(shardweave::Environment::of_process())),
                 std::move(given));
  });
}

swv_status* swv_world_join(const swv_rendezvous* rendezvous, const swv_world_options* options,
                           swv_world** out_world) {
  return guarded(__func__, [&] {
    GivenWorldOptions given = world_options(options);
    swv_world*& world = out(out_world, "out_world");
    world = join(rendezvous_info(rendezvous), std::move(given));
  });
}

swv_status* swv_world_create_counting(int32_t rank, int32_t num_ranks, swv_world** out_world) {
  return guarded(__func__, out_world, "out_world", [&] {
    check_num_ranks(num_ranks, shardweave::kMaxWorldSize);
    return new_world(std::make_shared<shardweave::World>(check(shardweave::count_communication(
        rank, num_ranks, std::make_shared<shardweave::CountingLog>()))));
  });
}

swv_status* swv_world_share(const swv_world* world, swv_world** out_world) {
  return guarded(__func__, out_world, "out_world",
                 [&] { return new_world(in(world, "world").world); });
}

void swv_world_free(swv_world* world) {
  release(world, __func__);
}

swv_status* swv_world_rank(const swv_world* world, int32_t* out_rank) {
  return guarded(__func__, out_rank, "out_rank", [&] { return in(world, "world").world->rank(); });
}

swv_status* swv_world_size(const swv_world* world, int32_t* out_size) {
  return guarded(__func__, out_size, "out_size", [&] { return in(world, "world").world->size(); });
}

swv_status* swv_world_local_rank(const swv_world* world, int32_t* out_local_rank) {
  return guarded(__func__, out_local_rank, "out_local_rank",
                 [&] { return in(world, "world").world->local_rank(); });
}

swv_status* swv_world_comm(const swv_world* world, swv_comm** out_comm) {
  return guarded(__func__, out_comm, "out_comm",
                 [&] { return make<swv_comm>(in(world, "world").world->comm()); });
}

swv_status* swv_world_abort(swv_world* world, const char* reason) {
  return guarded(__func__, [&] {
    in(world, "world")
        .world->comm()
        ->abort(absl::AbortedError(std::string(text(reason, "reason"))));
  });
}
