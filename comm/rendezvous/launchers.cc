#include "shardweave/comm/rendezvous/launchers.h"

namespace shardweave {
namespace {

constexpr Launcher kLaunchers[] = {
    {
        .name = "tools/launch",
        .mark = "SHARDWEAVE_RUN_ID",
        .rank = {"RANK"},
        .world_size = {"WORLD_SIZE"},
        .local_rank = {"LOCAL_RANK"},
        .local_world_size = {"LOCAL_WORLD_SIZE"},
        .run = {"SHARDWEAVE_RUN_ID"},
        .advice = "start the program with tools/launch again",
    },
    {
        .name = "torchrun",
        .mark = "TORCHELASTIC_RUN_ID",
        .rank = {"RANK"},
        .world_size = {"WORLD_SIZE"},
        .local_rank = {"LOCAL_RANK"},
        .local_world_size = {"LOCAL_WORLD_SIZE"},
        // The agent's store outlives a restart of the workers.
        .run = {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"},
        .advice = "start the program with torchrun again",
    },
    {
        // Variables of torch.distributed's env:// method: by hand, by a script, by Kubeflow's
        // PyTorchJob.
        .name = "environment variables",
        .mark = "RANK",
        .rank = {"RANK"},
        .world_size = {"WORLD_SIZE"},
        .local_rank = {"LOCAL_RANK"},
        .local_world_size = {"LOCAL_WORLD_SIZE"},
        .run = {},
        .advice = "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT on every rank",
    },
    {
        .name = "Open MPI",
        .mark = "OMPI_COMM_WORLD_RANK",
        .rank = {"OMPI_COMM_WORLD_RANK"},
        .world_size = {"OMPI_COMM_WORLD_SIZE"},
        .local_rank = {"OMPI_COMM_WORLD_LOCAL_RANK"},
        .local_world_size = {"OMPI_COMM_WORLD_LOCAL_SIZE"},
        .run = {"PMIX_NAMESPACE"},
        .advice = "mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=<a free port there>",
    },
    {
        // Hydra: MPICH, Intel MPI, MVAPICH.
        .name = "PMI",
        .mark = "PMI_RANK",
        .rank = {"PMI_RANK"},
        .world_size = {"PMI_SIZE"},
        .local_rank = {"MPI_LOCALRANKID", "PMI_LOCAL_RANK", "SLURM_LOCALID"},
        .local_world_size = {"MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"},
        .run = {"SLURM_JOB_ID", "SLURM_STEP_ID"},
        .advice =
            "mpiexec -genv MASTER_ADDR <host of rank 0> -genv MASTER_PORT <a free port there>",
    },
    {
        // A batch script has SLURM_PROCID too, but is no step: only what srun starts is a rank.
        .name = "Slurm",
        .mark = "SLURM_STEP_ID",
        .rank = {"SLURM_PROCID"},
        .world_size = {"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"},
        .local_rank = {"SLURM_LOCALID"},
        .local_world_size = {},
        .run = {"SLURM_JOB_ID", "SLURM_STEP_ID"},
        .advice =
            "start the ranks with srun; MASTER_ADDR and MASTER_PORT choose another place to meet",
    },
    {
        // PMIx keeps the size in its server, not in the environment.
        .name = "PMIx",
        .mark = "PMIX_RANK",
        .rank = {"PMIX_RANK"},
        .world_size = {"WORLD_SIZE"},
        .local_rank = {"LOCAL_RANK"},
        .local_world_size = {"LOCAL_WORLD_SIZE"},
        .run = {"PMIX_NAMESPACE"},
        .advice = "set WORLD_SIZE, MASTER_ADDR and MASTER_PORT beside PMIx's own variables",
    },
    {
        .name = "Kubernetes indexed job",
        .mark = "JOB_COMPLETION_INDEX",
        .rank = {"JOB_COMPLETION_INDEX"},
        .world_size = {"WORLD_SIZE"},
        .local_rank = {"LOCAL_RANK"},
        .local_world_size = {"LOCAL_WORLD_SIZE"},
        .run = {},
        .advice =
            "set WORLD_SIZE to the job's completions, MASTER_ADDR to the DNS name of the pod with"
            " index 0 (<job>-0.<headless service>) and MASTER_PORT in the pod template",
    },
};

}  // namespace

absl::Span<const Launcher> known_launchers() {
  return kLaunchers;
}

}  // namespace shardweave
