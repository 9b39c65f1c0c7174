#include "shardweave/comm/rendezvous/rendezvous.h"

#include <cstdlib>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/comm/rendezvous/slurm.h"

namespace shardweave {
namespace {

using testing::HasSubstr;
using Variables = std::map<std::string, std::string, std::less<>>;

RendezvousInfo detect(Variables variables) {
  absl::StatusOr<RendezvousInfo> info = detect_rendezvous(Environment(std::move(variables)));
  EXPECT_TRUE(info.ok()) << info.status();
  return info.value_or(RendezvousInfo());
}

void expect_invalid(Variables variables, std::vector<std::string> parts) {
  const absl::Status status = detect_rendezvous(Environment(std::move(variables))).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  for (const std::string& part : parts) {
    EXPECT_THAT(std::string(status.message()), HasSubstr(part));
  }
}

Variables changed(Variables variables, const Variables& changes) {
  for (const auto& [name, value] : changes) variables[name] = value;
  return variables;
}

// What each launcher really sets, shortened to what has to do with ranks. The comments say how.

// torchrun --nnodes=2 --nproc-per-node=4, second node, after one restart.
const Variables kTorchrun = {{"RANK", "6"},
                             {"LOCAL_RANK", "2"},
                             {"WORLD_SIZE", "8"},
                             {"LOCAL_WORLD_SIZE", "4"},
                             {"GROUP_RANK", "1"},
                             {"GROUP_WORLD_SIZE", "2"},
                             {"ROLE_NAME", "default"},
                             {"ROLE_RANK", "6"},
                             {"ROLE_WORLD_SIZE", "8"},
                             {"MASTER_ADDR", "node-a"},
                             {"MASTER_PORT", "29401"},
                             {"TORCHELASTIC_RUN_ID", "job-17"},
                             {"TORCHELASTIC_RESTART_COUNT", "1"},
                             {"TORCHELASTIC_MAX_RESTARTS", "3"},
                             {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                             {"OMP_NUM_THREADS", "1"}};

// sbatch --nodes=2 --ntasks=6; srun ./train
const Variables kSlurm = {{"SLURM_JOB_ID", "123456"},
                          {"SLURM_STEP_ID", "0"},
                          {"SLURM_PROCID", "4"},
                          {"SLURM_LOCALID", "1"},
                          {"SLURM_NODEID", "1"},
                          {"SLURM_NTASKS", "6"},
                          {"SLURM_NPROCS", "6"},
                          {"SLURM_STEP_NUM_TASKS", "6"},
                          {"SLURM_STEP_NUM_NODES", "2"},
                          {"SLURM_JOB_NODELIST", "gpu[007-008,020]"},
                          {"SLURM_STEP_NODELIST", "gpu[008,020]"},
                          {"SLURM_STEP_TASKS_PER_NODE", "3(x2)"},
                          {"SLURM_LAUNCH_NODE_IPADDR", "10.1.0.7"},
                          {"SLURMD_NODENAME", "gpu020"},
                          {"SLURM_SRUN_COMM_PORT", "41233"}};

// mpirun -n 4 (Open MPI 4.1) on one machine.
const Variables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "3"},
                            {"OMPI_COMM_WORLD_SIZE", "4"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "3"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                            {"OMPI_COMM_WORLD_NODE_RANK", "3"},
                            {"OMPI_UNIVERSE_SIZE", "4"},
                            {"OMPI_MCA_orte_ess_jobid", "1531576321"},
                            {"PMIX_NAMESPACE", "1531576321"},
                            {"PMIX_RANK", "3"},
                            {"PMIX_SERVER_URI2", "1531576320.0;tcp4://127.0.0.1:42789"},
                            {"OMPI_MCA_orte_hnp_uri", "1531576320.0;tcp://10.0.0.5:53535"},
                            {"MASTER_PORT", "29500"}};  // -x MASTER_PORT=29500

// mpiexec -n 6 -ppn 3 (MPICH's Hydra), second host.
const Variables kMpich = {{"PMI_RANK", "5"},        {"PMI_SIZE", "6"},
                          {"PMI_FD", "9"},          {"MPI_LOCALRANKID", "2"},
                          {"MPI_LOCALNRANKS", "3"}, {"MASTER_ADDR", "10.0.0.5"},
                          {"MASTER_PORT", "29500"}, {"HYDI_CONTROL_FD", "8"}};

// A PMIx server without Open MPI: prun of PRRTE.
const Variables kPmix = {{"PMIX_RANK", "1"},
                         {"PMIX_NAMESPACE", "prterun-node-a-4711@1"},
                         {"PMIX_SERVER_URI41", "prterun-node-a-4711@0.0;tcp4://127.0.0.1:43431"},
                         {"WORLD_SIZE", "2"},
                         {"MASTER_ADDR", "node-a"},
                         {"MASTER_PORT", "29500"}};

// Job with completionMode: Indexed, completions: 3, and the variables of the pod template.
const Variables kIndexedJob = {{"JOB_COMPLETION_INDEX", "2"},
                               {"HOSTNAME", "train-2"},
                               {"KUBERNETES_SERVICE_HOST", "10.96.0.1"},
                               {"KUBERNETES_SERVICE_PORT", "443"},
                               {"WORLD_SIZE", "3"},
                               {"MASTER_ADDR", "train-0.train-svc"},
                               {"MASTER_PORT", "29500"}};

// Kubeflow's PyTorchJob, second worker.
const Variables kPyTorchJob = {{"RANK", "2"},
                               {"WORLD_SIZE", "3"},
                               {"MASTER_ADDR", "mnist-master-0"},
                               {"MASTER_PORT", "23456"},
                               {"PET_NNODES", "3"},
                               {"PET_NODE_RANK", "2"},
                               {"PYTHONUNBUFFERED", "1"},
                               {"KUBERNETES_SERVICE_HOST", "10.96.0.1"}};

TEST(RendezvousTest, Torchrun) {
  const RendezvousInfo info = detect(kTorchrun);
  EXPECT_EQ(info.launcher, "torchrun");
  EXPECT_EQ(info.rank, 6);
  EXPECT_EQ(info.world_size, 8);
  EXPECT_EQ(info.local_rank, 2);
  EXPECT_EQ(info.run, "job-17.1");
  EXPECT_EQ(info.meeting_point.host, "node-a");
  EXPECT_EQ(info.meeting_point.port, 29401);
  EXPECT_TRUE(info.meeting_point.launcher_serves);
}

TEST(RendezvousTest, TorchrunWithoutAgentStoreLetsRankZeroServe) {
  const Variables variables = changed(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "False"}});
  EXPECT_FALSE(detect(variables).meeting_point.launcher_serves);
}

TEST(RendezvousTest, Slurm) {
  const RendezvousInfo info = detect(kSlurm);
  EXPECT_EQ(info.launcher, "Slurm");
  EXPECT_EQ(info.rank, 4);
  EXPECT_EQ(info.world_size, 6);
  EXPECT_EQ(info.local_rank, 1);
  EXPECT_EQ(info.run, "123456.0");
  EXPECT_EQ(info.meeting_point.host, "gpu008");  // the step's first node, not the job's
  EXPECT_EQ(info.meeting_point.port, 61440 + 123456 % 4096);
  EXPECT_THAT(info.meeting_point.origin, HasSubstr("SLURM_STEP_NODELIST, port computed"));
  EXPECT_FALSE(info.meeting_point.launcher_serves);
}

TEST(RendezvousTest, SlurmPrefersReservedPortsAndUsersChoice) {
  const Variables reserved = changed(kSlurm, {{"SLURM_STEP_RESV_PORTS", "12003-12005"}});
  EXPECT_EQ(detect(reserved).meeting_point.port, 12003);
  const RendezvousInfo chosen =
      detect(changed(reserved, {{"MASTER_ADDR", "gpu020"}, {"MASTER_PORT", "4242"}}));
  EXPECT_EQ(chosen.meeting_point.host, "gpu020");
  EXPECT_EQ(chosen.meeting_point.port, 4242);
}

TEST(RendezvousTest, SlurmStepsOfOneJobDoNotShareAPort) {
  const RendezvousInfo other = detect(changed(kSlurm, {{"SLURM_STEP_ID", "1"}}));
  EXPECT_NE(other.meeting_point.port, detect(kSlurm).meeting_point.port);
  EXPECT_NE(other.run, detect(kSlurm).run);
  // The largest numbers stay in range.
  const RendezvousInfo last =
      detect(changed(kSlurm, {{"SLURM_JOB_ID", "2147483647"}, {"SLURM_STEP_ID", "2147483647"}}));
  EXPECT_GE(last.meeting_point.port, 61440);
}

TEST(RendezvousTest, ABatchScriptIsNoRank) {
  Variables variables = kSlurm;
  variables.erase("SLURM_STEP_ID");
  EXPECT_EQ(detect_rendezvous(Environment(variables)).status().code(), absl::StatusCode::kNotFound);
}

// The shell that salloc gives is a step of Slurm's own.
TEST(RendezvousTest, AnInteractiveShellIsNoRank) {
  const Variables shell = changed(kSlurm, {{"SLURM_STEP_ID", "4294967290"}});
  EXPECT_EQ(detect_rendezvous(Environment(shell)).status().code(), absl::StatusCode::kNotFound);
  Variables from_there = kOpenMpi;
  from_there.erase("MASTER_PORT");
  from_there["SLURM_JOB_ID"] = "123456";
  from_there["SLURM_STEP_ID"] = "4294967290";
  EXPECT_GE(detect(from_there).meeting_point.port, 61440);
}

TEST(RendezvousTest, OpenMpi) {
  const RendezvousInfo info = detect(kOpenMpi);
  EXPECT_EQ(info.launcher, "Open MPI");
  EXPECT_EQ(info.rank, 3);
  EXPECT_EQ(info.world_size, 4);
  EXPECT_EQ(info.local_rank, 3);
  EXPECT_EQ(info.run, "1531576321");
  EXPECT_EQ(info.meeting_point.host, "127.0.0.1");  // all ranks are local
  EXPECT_EQ(info.meeting_point.port, 29500);
}

TEST(RendezvousTest, OpenMpiOnSeveralMachinesNeedsAHost) {
  expect_invalid(changed(kOpenMpi, {{"OMPI_COMM_WORLD_SIZE", "8"}}),
                 {"started by Open MPI", "MASTER_ADDR is not set", "the host of rank 0",
                  "mpirun -x MASTER_ADDR"});
}

TEST(RendezvousTest, OpenMpiInASlurmJobFindsTheHost) {
  // mpirun in a batch script: SLURM_PROCID is the script's.
  const RendezvousInfo info = detect(changed(kOpenMpi, {{"OMPI_COMM_WORLD_SIZE", "8"},
                                                        {"SLURM_JOB_ID", "7"},
                                                        {"SLURM_PROCID", "0"},
                                                        {"SLURM_JOB_NODELIST", "n[1-2]"}}));
  EXPECT_EQ(info.launcher, "Open MPI");
  EXPECT_EQ(info.rank, 3);
  EXPECT_EQ(info.meeting_point.host, "n1");
  // On one node of the job, which may be another one than its first.
  const RendezvousInfo alone = detect(changed(
      kOpenMpi, {{"SLURM_JOB_ID", "7"}, {"SLURM_PROCID", "0"}, {"SLURM_JOB_NODELIST", "n[1-2]"}}));
  EXPECT_EQ(alone.meeting_point.host, "127.0.0.1");
}

TEST(RendezvousTest, Pmi) {
  const RendezvousInfo info = detect(kMpich);
  EXPECT_EQ(info.launcher, "PMI");
  EXPECT_EQ(info.rank, 5);
  EXPECT_EQ(info.world_size, 6);
  EXPECT_EQ(info.local_rank, 2);
  EXPECT_EQ(info.meeting_point.host, "10.0.0.5");
}

TEST(RendezvousTest, SrunWithPmi2UsesSlurmForThePlace) {
  const RendezvousInfo info =
      detect(changed(kSlurm, {{"PMI_RANK", "4"}, {"PMI_SIZE", "6"}, {"PMI_FD", "13"}}));
  EXPECT_EQ(info.launcher, "PMI");
  EXPECT_EQ(info.rank, 4);
  EXPECT_EQ(info.local_rank, 1);
  EXPECT_EQ(info.run, "123456.0");
  EXPECT_EQ(info.meeting_point.host, "gpu008");
  EXPECT_EQ(info.meeting_point.port, 61440 + 123456 % 4096);
}

TEST(RendezvousTest, Pmix) {
  const RendezvousInfo info = detect(kPmix);
  EXPECT_EQ(info.launcher, "PMIx");
  EXPECT_EQ(info.rank, 1);
  EXPECT_EQ(info.world_size, 2);
  EXPECT_EQ(info.run, "prterun-node-a-4711@1");
  Variables variables = kPmix;
  variables.erase("WORLD_SIZE");
  expect_invalid(variables, {"started by PMIx", "WORLD_SIZE is not set", "the number of ranks"});
}

TEST(RendezvousTest, KubernetesIndexedJob) {
  const RendezvousInfo info = detect(kIndexedJob);
  EXPECT_EQ(info.launcher, "Kubernetes indexed job");
  EXPECT_EQ(info.rank, 2);
  EXPECT_EQ(info.world_size, 3);
  EXPECT_EQ(info.local_rank, std::nullopt);
  EXPECT_EQ(info.meeting_point.host, "train-0.train-svc");
  Variables variables = kIndexedJob;
  variables.erase("MASTER_ADDR");
  expect_invalid(variables, {"MASTER_ADDR is not set", "<job>-0.<headless service>"});
}

TEST(RendezvousTest, PyTorchJob) {
  const RendezvousInfo info = detect(kPyTorchJob);
  EXPECT_EQ(info.launcher, "environment variables");
  EXPECT_EQ(info.rank, 2);
  EXPECT_EQ(info.world_size, 3);
  EXPECT_EQ(info.meeting_point.host, "mnist-master-0");
  EXPECT_EQ(info.meeting_point.port, 23456);
}

TEST(RendezvousTest, OurLauncher) {
  Variables variables = {{"SHARDWEAVE_RUN_ID", "4711-1"},
                         {"RANK", "0"},
                         {"WORLD_SIZE", "2"},
                         {"LOCAL_RANK", "0"},
                         {"LOCAL_WORLD_SIZE", "2"},
                         {"MASTER_ADDR", "127.0.0.1"},
                         {"MASTER_PORT", "40001"},
                         {"SHARDWEAVE_STORE_FD", "3"}};
  const RendezvousInfo first = detect(variables);
  EXPECT_EQ(first.launcher, "tools/launch");
  EXPECT_EQ(first.run, "4711-1");
  EXPECT_EQ(first.meeting_point.listen_fd, 3);
  // Only rank 0 has the socket.
  EXPECT_EQ(detect(changed(variables, {{"RANK", "1"}})).meeting_point.listen_fd, std::nullopt);
}

TEST(RendezvousTest, AFileOfTheUsersReplacesTheAddress) {
  const RendezvousInfo info =
      detect({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"SHARDWEAVE_STORE_FILE", "/shared/job7/store"}});
  EXPECT_EQ(info.meeting_point.file, "/shared/job7/store");
  EXPECT_TRUE(validate(info).ok());
}

TEST(RendezvousTest, NoLauncherIsNotFoundAndListsWhatWasLookedFor) {
  for (const Variables& variables : {Variables(), Variables{{"PATH", "/bin"}, {"RANK", ""}}}) {
    const absl::Status status = detect_rendezvous(Environment(variables)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
    for (const char* part : {"TORCHELASTIC_RUN_ID (torchrun)", "SLURM_STEP_ID (Slurm)",
                             "OMPI_COMM_WORLD_RANK (Open MPI)", "JOB_COMPLETION_INDEX",
                             "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"}) {
      EXPECT_THAT(std::string(status.message()), HasSubstr(part));
    }
  }
}

TEST(RendezvousTest, IllFormedVariablesAreNamedWithTheirValues) {
  const Variables good = {
      {"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "h"}, {"MASTER_PORT", "29500"}};
  EXPECT_EQ(detect(good).rank, 1);
  expect_invalid(changed(good, {{"RANK", "one"}}),
                 {"RANK is \"one\": wanted a whole number from 0 to 1"});
  expect_invalid(changed(good, {{"RANK", "-1"}}), {"RANK is \"-1\""});
  expect_invalid(changed(good, {{"RANK", "2"}}), {"RANK is \"2\"", "from 0 to 1"});
  expect_invalid(changed(good, {{"RANK", "1.0"}}), {"RANK is \"1.0\""});
  expect_invalid(changed(good, {{"WORLD_SIZE", "0"}}),
                 {"WORLD_SIZE is \"0\": wanted a whole number from 1 to 1048576"});
  expect_invalid(changed(good, {{"WORLD_SIZE", "1048577"}}),
                 {"WORLD_SIZE is \"1048577\": wanted a whole number from 1 to 1048576"});
  expect_invalid(changed(good, {{"WORLD_SIZE", "99999999999"}}), {"WORLD_SIZE is \"99999999999\""});
  expect_invalid(changed(good, {{"WORLD_SIZE", ""}}), {"WORLD_SIZE is not set"});
  expect_invalid(changed(good, {{"MASTER_PORT", "0"}}), {"MASTER_PORT is \"0\"", "1 to 65535"});
  expect_invalid(changed(good, {{"MASTER_PORT", "65536"}}), {"MASTER_PORT is \"65536\""});
  expect_invalid(changed(good, {{"MASTER_PORT", ""}}), {"MASTER_PORT is not set"});
  expect_invalid(changed(good, {{"MASTER_ADDR", ""}}), {"MASTER_ADDR is not set"});
  expect_invalid(changed(good, {{"LOCAL_RANK", "x"}}), {"LOCAL_RANK is \"x\""});
  expect_invalid(changed(good, {{"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "1"}}),
                 {"LOCAL_RANK is \"1\"", "from 0 to 0"});
  expect_invalid(changed(good, {{"LOCAL_WORLD_SIZE", "3"}}), {"LOCAL_WORLD_SIZE is \"3\""});
  expect_invalid(changed(kSlurm, {{"SLURM_STEP_NODELIST", "node[1-"}}),
                 {"started by Slurm", "SLURM_STEP_NODELIST is \"node[1-\"", "node[01-04]"});
  expect_invalid(changed(kSlurm, {{"SLURM_STEP_RESV_PORTS", "many"}}),
                 {"SLURM_STEP_RESV_PORTS is \"many\""});
}

TEST(RendezvousTest, ReadsTheEnvironmentOfTheProcess) {
  ::setenv("SHARDWEAVE_TEST_VARIABLE", "a=b", 1);
  EXPECT_EQ(Environment::of_process().get("SHARDWEAVE_TEST_VARIABLE"), "a=b");
  EXPECT_EQ(Environment::of_process().get("SHARDWEAVE_TEST_NO_VARIABLE"), std::nullopt);
}

TEST(RendezvousTest, ValidatesExplicitArguments) {
  RendezvousInfo info{.rank = 1, .world_size = 2};
  auto message = [](const RendezvousInfo& bad) {
    EXPECT_EQ(validate(bad).code(), absl::StatusCode::kInvalidArgument);
    return std::string(validate(bad).message());
  };
  EXPECT_THAT(message(info), HasSubstr("explicit arguments: nowhere to meet"));
  info.meeting_point.host = "h";
  EXPECT_THAT(message(info), HasSubstr("host \"h\", port 0"));
  info.meeting_point.port = 1;
  EXPECT_TRUE(validate(info).ok());
  info.world_size = kMaxWorldSize;
  EXPECT_TRUE(validate(info).ok());
  info.world_size = 2;
  info.local_rank = -1;
  EXPECT_THAT(message(info), HasSubstr("local rank -1"));
  info.rank = 2;
  EXPECT_THAT(message(info), HasSubstr("rank 2: wanted 0 to 1"));
  info.rank = -1;
  EXPECT_THAT(message(info), HasSubstr("rank -1"));
  info.world_size = 0;
  EXPECT_THAT(message(info), HasSubstr("world size 0"));
  info.world_size = kMaxWorldSize + 1;
  EXPECT_THAT(message(info), HasSubstr("world size 1048577: wanted 1 to 1048576"));
}

TEST(SlurmTest, FirstHost) {
  EXPECT_EQ(slurm::first_host("node1"), "node1");
  EXPECT_EQ(slurm::first_host("node1,node2"), "node1");
  EXPECT_EQ(slurm::first_host("node[007-012,020],login"), "node007");
  EXPECT_EQ(slurm::first_host("node[3,5]"), "node3");
  EXPECT_EQ(slurm::first_host("node[5]"), "node5");
  EXPECT_EQ(slurm::first_host("rack[1-2]node[08-10]-ib"), "rack1node08-ib");
  EXPECT_EQ(slurm::first_host("a.example.org,b"), "a.example.org");
  for (const char* bad : {"", ",a", "node[", "node[1", "node[]", "node[-2]", "node]", "a b"}) {
    EXPECT_EQ(slurm::first_host(bad), std::nullopt) << bad;
  }
}

TEST(SlurmTest, FirstPort) {
  EXPECT_EQ(slurm::first_port("12000"), 12000);
  EXPECT_EQ(slurm::first_port("12000-12003"), 12000);
  EXPECT_EQ(slurm::first_port("65535,7"), 65535);
  for (const char* bad : {"", "x", "0", "65536", "-5", "-"}) {
    EXPECT_EQ(slurm::first_port(bad), std::nullopt) << bad;
  }
}

}  // namespace
}  // namespace shardweave
