#include "shardweave/comm/rendezvous/rendezvous.h"

#include <limits>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "shardweave/comm/rendezvous/launchers.h"
#include "shardweave/comm/rendezvous/slurm.h"

namespace shardweave {
namespace {

constexpr int kMaxInt = std::numeric_limits<int>::max();

// Reads one launcher's variables; keeps the first thing that is wrong.
class Reader {
 public:
  Reader(const Launcher& launcher, const Environment& environment)
      : launcher_(launcher), environment_(environment) {}

  const absl::Status& status() const { return status_; }
  std::optional<std::string> get(std::string_view name) const { return environment_.get(name); }

  void fail(const std::string& what) {
    if (!status_.ok()) return;
    status_ = absl::InvalidArgumentError(absl::StrCat("started by ", std::string(launcher_.name),
                                                      ", but ", what, " (",
                                                      std::string(launcher_.advice), ")"));
  }
  // `variable` does not have the form of `wanted`.
  void ill_formed(std::string_view variable, const std::string& wanted) {
    fail(absl::StrCat(std::string(variable), " is \"", get(variable).value_or(""), "\": wanted ",
                      wanted));
  }
  void not_set(std::string_view variable, std::string_view wanted) {
    fail(absl::StrCat(std::string(variable), " is not set: wanted ", std::string(wanted)));
  }

  // The number in the first of `names` that is set, in [low, high].
  std::optional<int> optional_number(const Variables& names, int low, int high) {
    for (std::string_view name : names) {
      const std::optional<std::string> text = get(name);
      if (!text) continue;
      int number = 0;
      if (absl::SimpleAtoi(*text, &number) && number >= low && number <= high) return number;
      ill_formed(name, high == kMaxInt ? absl::StrCat("a whole number of at least ", low)
                                       : absl::StrCat("a whole number from ", low, " to ", high));
      return low;
    }
    return std::nullopt;
  }

  int number(const Variables& names, std::string_view meaning, int low, int high = kMaxInt) {
    const std::optional<int> number = optional_number(names, low, high);
    if (!number) not_set(names.front(), meaning);
    return number.value_or(low);
  }

  // The values that are set, joined.
  std::string joined(const Variables& names) const {
    std::vector<std::string> values;
    for (std::string_view name : names) {
      if (std::optional<std::string> value = get(name)) values.push_back(*std::move(value));
    }
    return absl::StrJoin(values, ".");
  }

 private:
  const Launcher& launcher_;
  const Environment& environment_;
  absl::Status status_;
};

// The largest numbers are those of steps that Slurm makes by itself: the shell of salloc, a batch script.
bool is_step_of_srun(const std::optional<std::string>& id) {
  constexpr uint64_t kReserved = 0xfffffff0;
  uint64_t number = 0;
  return id.has_value() && !(absl::SimpleAtoi(*id, &number) && number >= kReserved);
}

// Fills in the host of rank 0 and where that comes from.
void find_host(Reader& reader, RendezvousInfo& info) {
  MeetingPoint& point = info.meeting_point;
  if (auto host = reader.get("MASTER_ADDR")) {
    point.host = *host;
    point.origin = "MASTER_ADDR";
    return;
  }
  // Of a job of several nodes, it may be any of these.
  if (info.local_world_size == info.world_size) {
    point.host = "127.0.0.1";
    point.origin = "all ranks on one machine";
    return;
  }
  for (std::string_view name : {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"}) {
    const std::optional<std::string> nodes = reader.get(name);
    if (!nodes) continue;
    if (auto host = slurm::first_host(*nodes)) {
      point.host = *host;
      point.origin = name;
    } else {
      reader.ill_formed(name, "a list of nodes such as \"node[01-04]\"");
    }
    return;
  }
  reader.not_set("MASTER_ADDR", "the host of rank 0");
}

void find_port(Reader& reader, RendezvousInfo& info) {
  MeetingPoint& point = info.meeting_point;
  if (std::optional<int> port = reader.optional_number({"MASTER_PORT"}, 1, 65535)) {
    point.port = static_cast<uint16_t>(*port);
    point.origin += ", MASTER_PORT";
    return;
  }
  if (auto ports = reader.get("SLURM_STEP_RESV_PORTS")) {
    if (auto port = slurm::first_port(*ports)) {
      point.port = *port;
      point.origin += ", SLURM_STEP_RESV_PORTS";
    } else {
      reader.ill_formed("SLURM_STEP_RESV_PORTS", "ports such as \"12000-12003\"");
    }
    return;
  }
  if (std::optional<int> job = reader.optional_number({"SLURM_JOB_ID"}, 0, kMaxInt)) {
    // Nobody can tell the others a port before they have met, so all compute the same one, above
    // the range that systems hand out by themselves (Linux: up to 60999). If it is taken, rank 0
    // says so.
    const bool has_step = is_step_of_srun(reader.get("SLURM_STEP_ID"));
    const int step =
        has_step ? reader.optional_number({"SLURM_STEP_ID"}, 0, kMaxInt).value_or(0) : 0;
    point.port = static_cast<uint16_t>(61440 + (*job % 4096 + step % 4096) % 4096);
    point.origin += ", port computed from SLURM_JOB_ID; MASTER_PORT chooses another";
    return;
  }
  reader.not_set("MASTER_PORT", "the port where rank 0 may listen");
}

void find_meeting_point(Reader& reader, RendezvousInfo& info) {
  MeetingPoint& point = info.meeting_point;
  if (auto file = reader.get("SHARDWEAVE_STORE_FILE")) {
    point.file = *file;
    point.origin = "SHARDWEAVE_STORE_FILE";
    return;
  }
  find_host(reader, info);
  find_port(reader, info);
  // Only torchrun means these for its own workers; a launcher inside its job passes them on unread.
  point.launcher_serves =
      info.launcher == "torchrun" && reader.get("TORCHELASTIC_USE_AGENT_STORE") == "True";
  if (info.rank == 0 && !point.launcher_serves) {
    point.listen_fd = reader.optional_number({"SHARDWEAVE_STORE_FD"}, 0, kMaxInt);
  }
}

}  // namespace

absl::StatusOr<RendezvousInfo> detect_rendezvous(const Environment& environment) {
  std::vector<std::string> marks;
  for (const Launcher& launcher : known_launchers()) {
    marks.push_back(
        absl::StrCat(std::string(launcher.mark), " (", std::string(launcher.name), ")"));
    const std::optional<std::string> mark = environment.get(launcher.mark);
    if (!mark || (launcher.mark == "SLURM_STEP_ID" && !is_step_of_srun(mark))) continue;
    Reader reader(launcher, environment);
    RendezvousInfo info;
    info.launcher = launcher.name;
    info.world_size = reader.number(launcher.world_size, "the number of ranks", 1, kMaxWorldSize);
    info.rank = reader.number(launcher.rank, "this rank's number", 0, info.world_size - 1);
    info.local_world_size = reader.optional_number(launcher.local_world_size, 1, info.world_size);
    info.local_rank = reader.optional_number(launcher.local_rank, 0,
                                             info.local_world_size.value_or(info.world_size) - 1);
    const std::string run = reader.joined(launcher.run);
    if (!run.empty()) info.run = run;
    find_meeting_point(reader, info);
    if (!reader.status().ok()) return reader.status();
    return info;
  }
  return absl::NotFoundError(absl::StrCat(
      "no launcher started this process: none of these variables is set: ",
      absl::StrJoin(marks, ", "),
      ". Start it with tools/launch, torchrun, srun or mpirun, or set RANK, WORLD_SIZE, "
      "MASTER_ADDR and MASTER_PORT"));
}

absl::Status validate(const RendezvousInfo& info) {
  auto error = [&](const auto&... what) {
    return absl::InvalidArgumentError(absl::StrCat("rendezvous by ", info.launcher, ": ", what...));
  };
  if (info.world_size < 1 || info.world_size > kMaxWorldSize) {
    return error("world size ", info.world_size, ": wanted 1 to ", kMaxWorldSize);
  }
  if (info.rank < 0 || info.rank >= info.world_size) {
    return error("rank ", info.rank, ": wanted 0 to ", info.world_size - 1);
  }
  if (info.local_rank.value_or(0) < 0) {
    return error("local rank ", *info.local_rank, ": wanted at least 0");
  }
  if (info.local_world_size.value_or(1) < 1) {
    return error("local world size ", *info.local_world_size, ": wanted at least 1");
  }
  const MeetingPoint& point = info.meeting_point;
  if (!point.file.empty()) return absl::OkStatus();
  if (point.host.empty() || point.port == 0) {
    return error("nowhere to meet: wanted a file, or a host and a port, given host \"", point.host,
                 "\", port ", point.port);
  }
  return absl::OkStatus();
}

}  // namespace shardweave
