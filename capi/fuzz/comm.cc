// Collectives, backends, and several ranks.
#include <thread>

#include "fuzzer.h"

namespace shardweave::capi {

void Fuzzer::communication() {
  if (one_in(3) && !comms_.empty()) return collective();
  swv_comm* comm = nullptr;
  swv_work* work = nullptr;
  float in[8] = {}, out[8] = {};
  int64_t counts[2] = {static_cast<int64_t>(below(4)), 1};
  swv_call_options o = SWV_CALL_OPTIONS_INIT;
  o.timeout_ms = 1000;
  o.tag = one_in(10) ? text() : "fuzz";
  const swv_call_options* const options = one_in(10) ? nullptr : &o;
  const auto buffer = [&](float* data) {
    const int64_t count = one_in(20) ? number() : static_cast<int64_t>(below(9));
    swv_buffer result = buffer_of(one_in(30) ? nullptr : data, count > 8 ? -1 : count,
                                  one_in(10) ? small() : int32_t{SWV_DTYPE_F32});
    result.device.type = one_in(30) ? small() : 0;
    result.reserved = one_in(50) ? 1 : 0;
    if (one_in(50)) result.stream = kept_;
    return result;
  };
  swv_buffer a = buffer(in), b = buffer(out);
  // Eight elements of at most four bytes are there.
  for (swv_buffer* x : {&a, &b}) {
    if (swv_dtype_size(x->dtype) > 4) x->dtype = SWV_DTYPE_F32;
  }
  swv_world* world = nullptr;
  if (comms_.size() < 2 || one_in(10)) {  // an error may break a group: new worlds come
    must(swv_world_create_local(1, nullptr, &world));
    if (done(swv_world_comm(world, &comm))) keep(comms_, comm, swv_comm_free, 4);
    swv_world_free(world);
    comm = nullptr;
  }
  switch (below(9)) {
    case 0:
      done(swv_comm_all_reduce(pick(comms_), &a, &b, small(), options, nullptr));
      break;
    case 1:
      done(swv_comm_all_gather(pick(comms_), &a, one_in(20) ? nullptr : &b, options, nullptr));
      break;
    case 2:
      done(swv_comm_all_gather_v(pick(comms_), &a, &b, counts, length(2), options, nullptr));
      break;
    case 3:
      done(swv_comm_reduce_scatter(pick(comms_), &a, &b, small(), options, nullptr));
      break;
    case 4:
      done(
          swv_comm_all_to_all_v(pick(comms_), &a, counts, &b, counts, length(2), options, nullptr));
      break;
    case 5:
      done(swv_comm_broadcast(pick(comms_), &a, small(), options, nullptr));
      break;
    case 6:
      done(swv_comm_gather(pick(comms_), &a, one_in(2) ? nullptr : &b, small(), options, nullptr));
      break;
    case 7:
      if (done(swv_comm_split(pick(comms_), small(), small(), text(), &comm)))
        keep(comms_, comm, swv_comm_free, 4);
      break;
    default:
      if (done(swv_comm_barrier(pick(comms_), options, &work))) {
        done(swv_work_wait(work));
        swv_work_free(work);
      }
  }
}

// Any operation, with what it has and has not.
void Fuzzer::collective() {
  float in[8] = {1, 2, 3, 4, 5, 6, 7, 8}, out[8] = {};
  const int64_t counts[2] = {static_cast<int64_t>(below(9)), number()};
  const auto count = [&] { return one_in(20) ? int64_t{-1} : static_cast<int64_t>(below(9)); };
  const swv_buffer a = buffer_of(in, count()), b = buffer_of(out, count());
  swv_collective c = SWV_COLLECTIVE_INIT;
  c.kind = one_in(20) ? small() : static_cast<int32_t>(below(14));
  c.reduce_op = small();
  c.peer = one_in(3) ? small() : 0;
  c.message_tag = small();
  // What a kind has is mostly there.
  const bool has_in = c.kind != SWV_COLLECTIVE_BROADCAST && c.kind != SWV_COLLECTIVE_RECV &&
                      c.kind != SWV_COLLECTIVE_BARRIER;
  const bool has_out = c.kind != SWV_COLLECTIVE_SEND && c.kind != SWV_COLLECTIVE_BARRIER;
  c.in = has_in != one_in(12) ? sized(a) : nullptr;
  c.out = has_out != one_in(12) ? sized(b) : nullptr;
  const bool in_counts =
      c.kind == SWV_COLLECTIVE_REDUCE_SCATTER_V || c.kind == SWV_COLLECTIVE_ALL_TO_ALL_V;
  const bool out_counts =
      c.kind == SWV_COLLECTIVE_ALL_GATHER_V || c.kind == SWV_COLLECTIVE_ALL_TO_ALL_V;
  c.in_counts = in_counts != one_in(12) ? counts : nullptr;
  c.out_counts = out_counts != one_in(12) ? counts : nullptr;
  c.num_counts = one_in(4) ? length(2) : 1;
  c.timeout_ms = one_in(20) ? ~number() : 5;
  if (c.timeout_ms > 100 || c.timeout_ms == 0) c.timeout_ms = 5;
  c.tag = one_in(4) ? text() : nullptr;
  done(swv_comm_start(pick(comms_), one_in(30) ? nullptr : sized(c), nullptr));
}

void Fuzzer::point_to_point() {
  swv_comm* comm = nullptr;
  swv_coalescing* coalescing = nullptr;
  swv_work* work = nullptr;
  swv_world* world = nullptr;
  swv_bool yes;
  int64_t counts[2] = {static_cast<int64_t>(below(4)), 1};
  const int32_t members[] = {one_in(4) ? small() : 0, small()};
  swv_call_options o = SWV_CALL_OPTIONS_INIT;
  o.timeout_ms = one_in(20) ? number() : 5;
  if (o.timeout_ms > 100 || o.timeout_ms == 0) o.timeout_ms = 5;
  const swv_call_options* const options = &o;
  const auto buffer = [&](size_t from) {
    return buffer_of(kept_ + from, static_cast<int64_t>(below(5)));
  };
  const swv_buffer a = buffer(0), b = buffer(8);
  switch (below(10)) {
    case 0:
      done(swv_comm_all_to_all(pick(comms_), &a, one_in(20) ? nullptr : &b, options, nullptr));
      break;
    case 1:
      done(swv_comm_reduce(pick(comms_), &a, one_in(2) ? nullptr : &b, small(), small(), &o,
                           nullptr));
      break;
    case 2:
      done(swv_comm_scatter(pick(comms_), one_in(2) ? nullptr : &a, &b, small(), options, nullptr));
      break;
    case 3:
      done(swv_comm_reduce_scatter_v(pick(comms_), &a, &b, counts, length(2), small(), options,
                                     nullptr));
      break;
    case 4:
      if (done(swv_comm_send(pick(comms_), &a, small(), small(), options, &work)))
        keep(works_, work, swv_work_free, 4);
      break;
    case 5:
      if (done(swv_comm_recv(pick(comms_), &b, small(), small(), options, &work)))
        keep(works_, work, swv_work_free, 4);
      break;
    case 6:
      done(swv_work_is_done(pick(works_), &yes));
      done(swv_work_wait(pick(works_)));
      done(swv_work_wait_on(pick(works_), any()));
      break;
    case 7:
      if (coalescings_.empty()) {
        if (done(swv_comm_coalesce(pick(comms_), &coalescing))) coalescings_.push_back(coalescing);
      } else {
        if (one_in(2) &&
            done(swv_coalescing_finish(coalescings_.back(), one_in(2) ? nullptr : &work)) &&
            work != nullptr) {
          keep(works_, work, swv_work_free, 4);
        }
        if (one_in(2)) swv_coalescing_free(coalescings_.back()), coalescings_.pop_back();
      }
      break;
    case 8:
      if (one_in(2)) {
        if (done(swv_comm_share(pick(comms_), &comm))) keep(comms_, comm, swv_comm_free, 4);
      } else if (done(swv_comm_subgroup(pick(comms_), members, length(2), text(), &comm))) {
        keep(comms_, comm, swv_comm_free, 4);
      }
      break;
    default:
      if (one_in(4)) done(swv_comm_abort(pick(comms_), text()));
      if (!one_in(4)) break;
      must(swv_world_create_local(1, nullptr, &world));
      done(swv_world_abort(world, text()));
      if (done(swv_world_comm(world, &comm))) {
        swv_status_free(swv_comm_barrier(comm, options, nullptr));
        swv_comm_free(comm);
      }
      swv_world_free(world);
  }
}

namespace {

// A backend of one rank that sometimes fails, and sometimes does what it should not.
struct Wire {
  uint64_t how;
  int* live;
};
swv_status* wire_start(void* self, const swv_backend_call* call, uint64_t* out_ticket) {
  const uint64_t how = static_cast<Wire*>(self)->how;
  if (how % 5 == 1) return swv_status_new(SWV_CODE_UNAVAILABLE, "the wire is cut");
  if (call->in->count == call->out->count && call->in->data != nullptr &&
      call->out->data != nullptr) {
    std::memmove(call->out->data, call->in->data,
                 static_cast<size_t>(call->in->count) * swv_dtype_size(call->in->dtype));
  }
  *out_ticket = how % 5 == 2 ? 7 : SWV_TICKET_DONE;
  return nullptr;
}
swv_bool wire_done(void* self, uint64_t) {
  return static_cast<Wire*>(self)->how % 3 == 0;
}
swv_status* wire_wait(void* self, uint64_t, int64_t) {
  return static_cast<Wire*>(self)->how % 7 == 1 ? swv_status_new(SWV_CODE_DATA_LOSS, nullptr)
                                                : nullptr;
}
swv_status* wire_subgroup(void* self, const swv_group*, const int32_t*, size_t, const char*,
                          int64_t, void** out_self) {
  const Wire* const wire = static_cast<Wire*>(self);
  if (wire->how % 4 == 1) return swv_status_new(SWV_CODE_RESOURCE_EXHAUSTED, "no more wires");
  *out_self = new Wire(*wire);
  ++*wire->live;
  return nullptr;
}
void wire_abort(void*, swv_code, const char*) {}
void wire_drop(void* self) {
  --*static_cast<Wire*>(self)->live;
  delete static_cast<Wire*>(self);
}
swv_status* wire_wait_on(void* self, uint64_t ticket, void*) {
  return wire_wait(self, ticket, -1);
}
// Of a GPU, whose memory is the host's here. What it makes is a wire like itself.
swv_status* wire_connect(void* self, const swv_group*, swv_comm* bootstrap, int64_t,
                         swv_backend* out_backend) {
  const Wire* const wire = static_cast<Wire*>(self);
  int32_t size = 0;
  swv_status_free(swv_comm_size(bootstrap, &size));
  if (wire->how % 9 == 1 || size != 1) return swv_status_new(SWV_CODE_UNAVAILABLE, "no device");
  if (wire->how % 9 == 2) return nullptr;  // an empty table
  out_backend->name = "wire";
  out_backend->implements = 0x3fff;
  out_backend->self = new Wire(*wire);
  ++*wire->live;
  out_backend->start = wire->how % 11 == 1 ? nullptr : wire_start;
  out_backend->done = wire_done;
  out_backend->wait = wire_wait;
  out_backend->abort = wire_abort;
  out_backend->drop = wire_drop;
  out_backend->device = {wire->how % 13 == 1 ? SWV_DEVICE_CPU : SWV_DEVICE_CUDA, 0};
  if (wire->how % 2 == 0) out_backend->wait_on = wire_wait_on;
  return nullptr;
}

}  // namespace

void Fuzzer::backends() {
  int live = 1;
  swv_backend backend = SWV_BACKEND_INIT;
  backend.name = one_in(20) ? text() : "wire";
  backend.implements = one_in(4) ? static_cast<uint64_t>(number()) : 0x3fff;
  backend.self = new Wire{chance_.word(), &live};
  backend.start = one_in(30) ? nullptr : wire_start;
  backend.done = one_in(30) ? nullptr : wire_done;
  backend.wait = one_in(30) ? nullptr : wire_wait;
  backend.subgroup = one_in(5) ? nullptr : wire_subgroup;
  backend.abort = one_in(30) ? nullptr : wire_abort;
  backend.drop = wire_drop;
  swv_group group = SWV_GROUP_INIT;
  const int32_t ranks[] = {one_in(10) ? small() : 0};
  group.name = one_in(10) ? text() : "group";
  group.rank = one_in(20) ? small() : 0;
  group.world_ranks = one_in(10) ? nullptr : ranks;
  swv_world_options options = SWV_WORLD_OPTIONS_INIT;
  options.timeout_ms = 50;
  swv_device_backend of_gpu = SWV_DEVICE_BACKEND_INIT;
  of_gpu.connect = one_in(30) ? nullptr : wire_connect;
  of_gpu.drop = wire_drop;
  swv_world* world = nullptr;
  swv_comm *comm = nullptr, *part = nullptr;
  swv_backend* const given = sized(backend);
  // What is no struct, or ends before its drop, has none.
  const auto has_drop = [](size_t size, size_t with_drop) {
    return size >= with_drop && size <= 4096;
  };
  if (!has_drop(given->struct_size, SWV_SIZE_TO(swv_backend, drop))) wire_drop(backend.self);
  if (one_in(2)) {
    of_gpu.self = new Wire{chance_.word(), &live};
    ++live;
    options.device_backend = sized(of_gpu);
  }
  swv_world_options* const given_options = sized(options);
  if (options.device_backend != nullptr &&
      !(has_drop(options.device_backend->struct_size, SWV_SIZE_TO(swv_device_backend, drop)) &&
        has_drop(given_options->struct_size, SWV_SIZE_TO(swv_world_options, device_backend)))) {
    wire_drop(of_gpu.self);
  }
  if (done(swv_world_create_with_backend(given, sized(group), given_options, &world)) &&
      done(swv_world_comm(world, &comm))) {
    swv_buffer a = buffer_of(kept_, 4, SWV_DTYPE_F32), b = buffer_of(kept_ + 8, 4, SWV_DTYPE_F32);
    if (options.device_backend != nullptr && one_in(2)) {
      a.device = b.device = {SWV_DEVICE_CUDA, 0};
      a.stream = kept_;
      b.stream = one_in(8) ? nullptr : a.stream;
    }
    swv_call_options o = SWV_CALL_OPTIONS_INIT;
    done(swv_comm_all_reduce(comm, &a, &b, SWV_REDUCE_SUM, &o, nullptr));
    done(swv_comm_broadcast(comm, &a, 0, &o, nullptr));
    done(swv_comm_all_gather(comm, &a, &b, &o, nullptr));
    if (done(swv_comm_split(comm, 0, 0, "part", &part))) {
      done(swv_comm_all_reduce(part, &a, &b, SWV_REDUCE_SUM, &o, nullptr));
      swv_comm_free(part);
    }
    done(swv_comm_barrier(comm, nullptr, nullptr));
    swv_comm_free(comm);
  }
  swv_world_free(world);
  if (live != 0) {
    std::fprintf(stderr, "fuzz: %d backends were not dropped, or twice\n", live);
    std::abort();
  }
  // Measuring and rendezvous, which are slow.
  if (!alone_ || !one_in(20)) return;
  swv_string* json = nullptr;
  if (one_in(3)) drop(swv_mesh_measure_cost_model(pick(meshes_), &json), &json);
  world = nullptr;
  options.device_backend = nullptr;  // it has been taken
  if (done(swv_world_from_environment(sized(options), &world))) swv_world_free(world);
  const std::string file = folder_ + "/store" + std::to_string(chance_.word());
  swv_rendezvous rendezvous = SWV_RENDEZVOUS_INIT;
  rendezvous.rank = one_in(4) ? small() : 0;
  rendezvous.world_size = one_in(4) ? small() : 1;
  rendezvous.file = one_in(5) ? text() : file.c_str();
  rendezvous.port = one_in(5) ? small() : 0;
  rendezvous.run = one_in(2) ? nullptr : text();
  options.backend = one_in(5) ? text() : nullptr;
  world = nullptr;
  if (done(swv_world_join(sized(rendezvous), sized(options), &world))) swv_world_free(world);
}

namespace {

// Several ranks that all do the same.
struct Shared {
  uint64_t seed;
  std::string folder;
};
swv_status* run_rank(void* user_data, swv_world* world) {
  const Shared& shared = *static_cast<const Shared*>(user_data);
  Fuzzer fuzzer(Chance(shared.seed), world, shared.folder);
  for (int i = 0; i < 150; ++i) fuzzer.step();
  return shared.seed % 4 == 0 ? swv_status_new(SWV_CODE_CANCELLED, "enough") : nullptr;
}

}  // namespace

void Fuzzer::ranks() {
  if (!alone_ || !one_in(40)) return;
  Shared shared = {chance_.word(), folder_};
  swv_world_options options = SWV_WORLD_OPTIONS_INIT;
  options.timeout_ms = 500;
  done(swv_run_ranks(one_in(10) ? 0 : 2 + static_cast<int32_t>(below(2)),
                     one_in(20) ? nullptr : run_rank, &shared, sized(options)));
}

// Threads that may: some wait, some look, some abort, while the ranks' operations are under way.
void Fuzzer::contention() {
  if (!alone_) return;
  constexpr int kRanks = 2;
  swv_world_options options = SWV_WORLD_OPTIONS_INIT;
  options.timeout_ms = 200;
  swv_world* worlds[kRanks] = {};
  swv_comm* comms[kRanks] = {};
  swv_work* works[kRanks] = {};
  std::vector<float> in(64, 1), out(64 * kRanks);
  must(swv_world_create_local(kRanks, &options, worlds));
  for (int rank = 0; rank < kRanks; ++rank) {
    const swv_buffer a = buffer_of(in.data(), 64, SWV_DTYPE_F32);
    const swv_buffer b = buffer_of(out.data() + 64 * rank, 64, SWV_DTYPE_F32);
    must(swv_world_comm(worlds[rank], &comms[rank]));
    if (one_in(8)) continue;  // the others wait for it in vain
    // Not always the same on both.
    done(!one_in(8)
             ? swv_comm_all_reduce(comms[rank], &a, &b, SWV_REDUCE_SUM, nullptr, &works[rank])
             : swv_comm_barrier(comms[rank], nullptr, &works[rank]));
  }
  swv_op* op = nullptr;
  swv_tensor* number = nullptr;
  must(swv_op_find("aten::mul", &op));
  must(swv_tensor_ones(nullptr, 0, nullptr, &number));
  const auto check = [](swv_status* status) {
    if (status != nullptr) check_error(status);
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 5; ++i) {
    const int rank = static_cast<int>(below(kRanks));
    const uint64_t what = below(10);
    threads.emplace_back([&, rank, what] {
      if (what == 0) return check(swv_comm_abort(comms[rank], "fuzz"));
      if (what == 1) return check(swv_world_abort(worlds[rank], "fuzz"));
      if (what == 2) {
        swv_string* record = nullptr;
        check(swv_world_flight_record(worlds[rank], &record));
        return swv_string_free(record);
      }
      if (what < 5) {  // one operator, of all kinds of arguments
        for (int n = 0; n < 20; ++n) {
          const swv_value arguments[] = {swv_value_tensor(number),
                                         n % 3 == 0   ? swv_value_tensor(number)
                                         : n % 3 == 1 ? swv_value_int(n)
                                                      : swv_value_float(0.5)};
          swv_value result = SWV_NONE;
          check(swv_op_call(op, SWV_MODE_NO_GRAD, arguments, 2, &result, 1, nullptr));
          swv_value_clear(&result);
        }
        return;
      }
      if (works[rank] == nullptr) return;
      swv_bool is_done = 0;
      for (int n = 0; what < 7 && n < 100 && is_done == 0; ++n) {
        check(swv_work_is_done(works[rank], &is_done));
      }
      check(swv_work_wait(works[rank]));
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (swv_work* work : works) {
    if (work == nullptr) continue;
    check(swv_work_wait(work));  // the memory is in use until then
    swv_work_free(work);
  }
  swv_tensor_free(number);
  swv_op_free(op);
  for (swv_comm* comm : comms) swv_comm_free(comm);
  for (swv_world* world : worlds) swv_world_free(world);
}

}  // namespace shardweave::capi
