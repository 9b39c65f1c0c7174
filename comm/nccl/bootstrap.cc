#include "shardweave/comm/nccl/bootstrap.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <string>
#include <utility>

#include "shardweave/comm/str_cat.h"

namespace shardweave::nccl_internal {
namespace {

// What ranks tell each other before they connect: how they are, and where.
struct Report {
  int32_t code = 0;
  char text[508] = {};
  char place[128] = {};  // of the device: machine and bus; if processes may share it, process
};

Buffer bytes_of(auto* data, int64_t count) {
  return Buffer::of(reinterpret_cast<uint8_t*>(data), count * static_cast<int64_t>(sizeof(*data)));
}

std::string this_machine() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return id;
}

absl::StatusOr<std::string> place_of(const Library& library, Library::Parts parts, int device) {
  int count = 0;
  absl::Status status =
      library.check_cuda("cudaGetDeviceCount", library.cudaGetDeviceCount(&count));
  if (!status.ok()) return status;
  if (device < 0 || device >= count) {
    return absl::InvalidArgumentError(
        str_cat(name_of(parts), "there is no device ", device, "; CUDA sees ", count));
  }
  char bus[32] = {};
  status = library.check_cuda("cudaDeviceGetPCIBusId",
                              library.cudaDeviceGetPCIBusId(bus, sizeof(bus), device));
  if (!status.ok()) return status;
  std::string place = str_cat(this_machine(), " ", bus);
  // Processes of two containers may have one number.
  if (parts == Library::Parts::kCuda) {
    char names[64] = {};
    if (::readlink("/proc/self/ns/pid", names, sizeof(names) - 1) < 0) names[0] = '\0';
    str_append(&place, " process ", ::getpid(), " ", names);
  }
  return place;
}

// Why two ranks cannot have one device, and what to do.
std::string_view why_not_one_device(Library::Parts parts) {
  return parts == Library::Parts::kCuda
             ? "they are threads of one process, whose backward one thread of LibTorch's would "
               "run, where each waits for the other: give each rank a process"
             : "NCCL wants one for each: give each process another one (LOCAL_RANK), or use "
               "backend gloo with a device, which takes their memory by way of the host";
}

absl::Status check_reports(const GroupInfo& group, Library::Parts parts,
                           absl::Span<const Report> reports) {
  for (int rank = 0; rank < group.size(); ++rank) {
    const Report& report = reports[rank];
    const int64_t world_rank = group.world_ranks[rank];
    if (report.code != 0) {
      return of_rank(absl::Status(static_cast<absl::StatusCode>(report.code),
                                  str_cat("rank ", rank, " of group '", group.name,
                                          "' (world rank ", world_rank, "): ", report.text)),
                     world_rank);
    }
    for (int other = 0; other < rank; ++other) {
      if (std::strcmp(report.place, reports[other].place) != 0) continue;
      return absl::FailedPreconditionError(
          str_cat(name_of(parts), "ranks ", other, " and ", rank, " of group '", group.name,
                  "' have the same device (", report.place, "), but ", why_not_one_device(parts)));
    }
  }
  return absl::OkStatus();
}

// Ranks tell each other that they have connected; a rank that has not aborts. So all know, while
// they wait in NCCL, that one will not come.
class Arrival {
 public:
  explicit Arrival(Communicator& bootstrap) : bootstrap_(bootstrap), words_(bootstrap.size()) {
    const CallOptions options{.tag = "NCCL"};
    const int first = is_first() ? 1 : 0;
    const int last = is_first() ? bootstrap.size() : 1;
    for (int peer = first; peer < last && bootstrap.size() > 1; ++peer) {
      expected_.push_back(bootstrap.recv(Buffer::of(&words_[peer], 1), peer, 0, options));
    }
  }
  // After an error the communicator is broken, and this takes no time.
  ~Arrival() {
    for (const Work& work : expected_) work.wait().IgnoreError();
  }
  Arrival(const Arrival&) = delete;
  Arrival& operator=(const Arrival&) = delete;

  // Why it makes no sense to wait. What comes in order is no reason.
  absl::Status interrupted() const {
    for (const Work& work : expected_) {
      if (!work.done()) continue;
      if (absl::Status status = work.wait(); !status.ok()) return status;
    }
    return absl::OkStatus();
  }
  absl::Status wait_for_all() {
    if (!is_first()) {
      if (absl::Status told = tell(0); !told.ok()) return told;
    }
    for (const Work& work : expected_) {
      if (absl::Status status = work.wait(); !status.ok()) return status;
    }
    for (int peer = 1; is_first() && peer < bootstrap_.size(); ++peer) {
      if (absl::Status told = tell(peer); !told.ok()) return told;
    }
    return absl::OkStatus();
  }

 private:
  bool is_first() const { return bootstrap_.rank() == 0; }
  absl::Status tell(int peer) {
    const uint8_t word = 1;
    return bootstrap_.send(ConstBuffer::of(&word, 1), peer, 0, {.tag = "NCCL"}).wait();
  }

  Communicator& bootstrap_;
  std::vector<uint8_t> words_;
  std::vector<Work> expected_;
};

}  // namespace

absl::Status check_device_is(Device device, int mine) {
  if (device.index == mine) return absl::OkStatus();
  return absl::InvalidArgumentError(
      str_cat("this rank's device is ", to_string(Device{DeviceType::kCuda, mine})));
}

absl::StatusOr<std::shared_ptr<const Library>> load_on_all(const NcclOptions& options,
                                                           Library::Parts parts,
                                                           const GroupInfo& group,
                                                           Communicator& bootstrap) {
  absl::StatusOr<std::shared_ptr<const Library>> library = Library::load(options.libraries, parts);
  absl::StatusOr<std::string> place =
      library.ok() ? place_of(**library, parts, options.device) : library.status();
  Report mine{.code = place.status().raw_code()};
  std::string(place.status().message()).copy(mine.text, sizeof(mine.text) - 1);
  if (place.ok()) place->copy(mine.place, sizeof(mine.place) - 1);
  std::vector<Report> reports(group.size());
  absl::Status status =
      bootstrap
          .all_gather(bytes_of(&mine, 1), bytes_of(reports.data(), group.size()), {.tag = "GPUs"})
          .wait();
  if (status.ok()) status = check_reports(group, parts, reports);
  if (!status.ok()) return status;
  return library;
}

absl::StatusOr<NcclConnection> connect_all(const NcclOptions& options, const GroupInfo& group,
                                           Communicator& bootstrap, Deadline deadline) {
  // 1. Whether all can, and on different devices.
  const absl::StatusOr<std::shared_ptr<const Library>> library =
      load_on_all(options, Library::Parts::kCudaAndNccl, group, bootstrap);
  if (!library.ok()) return library.status();

  // 2. The name under which they meet.
  struct Name {
    NcclUniqueId id;
    int32_t error = kNcclSuccess;
  } name = {};
  if (group.rank == 0) name.error = (*library)->ncclGetUniqueId(&name.id);
  absl::Status status = bootstrap.broadcast(bytes_of(&name, 1), 0, {.tag = "NCCL"}).wait();
  if (!status.ok()) return status;
  if (status = (*library)->check_nccl("ncclGetUniqueId on rank 0", name.error, nullptr);
      !status.ok()) {
    return status;
  }

  // 3. They meet.
  const CurrentDevice on(**library, options.device);
  auto reason = std::make_shared<Reason>();
  auto arrival = std::make_shared<Arrival>(bootstrap);
  NcclConnection result{.library = *library, .reason = reason};
  const std::weak_ptr<Arrival> while_connecting = arrival;
  result.lane = std::make_unique<Lane>(*library, [reason, while_connecting] {
    const std::shared_ptr<Arrival> others = while_connecting.lock();
    return others == nullptr ? reason->get() : others->interrupted();
  });
  status = on.status();
  if (status.ok()) status = result.lane->open();
  if (status.ok()) status = result.lane->connect(name.id, group.size(), group.rank, deadline);
  if (!status.ok()) bootstrap.abort(status);
  absl::Status all = status.ok() ? arrival->wait_for_all() : status;
  if (!all.ok()) {
    return retold(all, str_cat("backend nccl: group '", group.name, "' (rank ", group.rank, " of ",
                               group.size(), ") is not connected: ", all.message()));
  }
  return result;
}

}  // namespace shardweave::nccl_internal
