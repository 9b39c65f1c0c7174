#include "settings.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/flags/flag.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "mesh_flag.h"

ABSL_FLAG(std::string, mesh, "auto",
          "how the ranks are arranged: dp (data parallel) times tp (tensor parallel); one of them "
          "may be left out; auto: dp=2,tp=2, with --parallel=fsdp dp=4, with hsdp replicas=2,dp=2");
ABSL_FLAG(
    std::string, parallel, "ddp",
    "what ranks along dp have of the parameters: ddp, all of them; zero1, all of them, and a "
    "part of the optimizer's state; zero2, a part of the gradients, too; fsdp, a part of all, "
    "whole only while a block runs; hsdp, the same in each of --mesh's replicas; fsdp+tp, a "
    "part of what tensor parallelism leaves");
ABSL_FLAG(std::string, device, "cpu", "where tensors are: cpu, or cuda, a GPU for each rank");
ABSL_FLAG(bool, cpu_offload, false,
          "with --device=cuda and --parallel=fsdp, hsdp or fsdp+tp: parameters, gradients and the "
          "optimizer's state stay on the CPU, and a block is on the GPU while it runs");
ABSL_FLAG(
    std::string, backend, "",
    "inproc: ranks are threads of this process; gloo: ranks are processes, started here unless the "
    "environment says that a launcher has done it; nccl: processes with a GPU each; default: with "
    "--device=cuda nccl (gloo goes by way of the host, and several ranks may have one GPU), else "
    "gloo under a launcher, and without one inproc");
ABSL_FLAG(std::string, data, "", "the text to train on; default: the licence texts of Debian");
ABSL_FLAG(int64_t, steps, 200, "training steps of this run");
ABSL_FLAG(int64_t, layers, 2, "transformer blocks");
ABSL_FLAG(int64_t, dim, 96, "features of a token");
ABSL_FLAG(int64_t, heads, 4, "attention heads; they divide --dim");
ABSL_FLAG(int64_t, batch, 32, "sequences per step, over all ranks");
ABSL_FLAG(int64_t, seq, 64, "bytes per sequence");
ABSL_FLAG(double, lr, 5e-3, "learning rate of AdamW");
ABSL_FLAG(uint64_t, seed, 1, "of the initial weights, the batches and the sample");
ABSL_FLAG(int64_t, sample, 200, "bytes to generate at the end");
ABSL_FLAG(
    std::string, trace, "",
    "writes when each operator and each collective of the training ran, on every rank, to this "
    "file, for https://ui.perfetto.dev or chrome://tracing");
ABSL_FLAG(std::string, save, "",
          "a directory, of all ranks, that gets a checkpoint after the last step; any --mesh and "
          "--parallel goes on from it, in C++, Rust and Go");
ABSL_FLAG(int64_t, save_every, 0,
          "with --save: also after so many steps, each time, beside training; 0: at the end only");
ABSL_FLAG(std::string, resume, "", "goes on from the newest checkpoint of this directory");
ABSL_FLAG(absl::Duration, timeout, absl::Minutes(2), "how long a rank waits for the others");
ABSL_FLAG(bool, check, false, "train on one rank too, and compare the loss of every step");
ABSL_FLAG(bool, json, false, "end with one line of JSON on stdout; all else goes to stderr");

namespace train_gpt {
namespace {

using shardweave::MeshDim;

constexpr const char* kParallel[] = {"ddp", "zero1", "zero2", "fsdp", "hsdp", "fsdp+tp"};

absl::Status check_at_least(const char* flag, int64_t value, int64_t least) {
  if (value >= least) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag, "=", value, ": wanted ", least, " or more"));
}

}  // namespace

int Settings::num_ranks() const {
  return train_gpt::num_ranks(mesh);
}

bool Settings::fully_sharded() const {
  return parallel == "hsdp" || absl::StartsWith(parallel, "fsdp");
}

int Settings::zero_stage() const {
  return parallel == "zero1" ? 1 : parallel == "zero2" ? 2 : 0;
}

std::string Settings::to_string() const {
  return absl::StrCat("mesh ", train_gpt::to_string(mesh), ", parallel ", parallel, ", device ",
                      device, cpu_offload ? " with CPU offload" : "", ", steps ", steps,
                      ", layers ", layers, ", dim ", dim, ", heads ", heads, ", batch ", batch,
                      ", seq ", seq, ", lr ", learning_rate, ", seed ", seed, ", sample ", sample,
                      trace.empty() ? "" : ", with a trace", save.empty() ? "" : ", save ", save,
                      " ", save_every, resume.empty() ? "" : ", resume ", resume);
}

absl::StatusOr<Settings> settings_from_flags(absl::Span<char* const> rest) {
  if (rest.size() > 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", rest[1], "': wanted flags only; --help lists them"));
  }
  const std::string parallel = absl::GetFlag(FLAGS_parallel);
  if (std::find(std::begin(kParallel), std::end(kParallel), parallel) == std::end(kParallel)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--parallel=", parallel, ": wanted one of ", absl::StrJoin(kParallel, ", ")));
  }
  const bool replicas = parallel == "hsdp";
  std::string dims = absl::GetFlag(FLAGS_mesh);
  if (dims == "auto")
    dims = replicas ? "replicas=2,dp=2" : parallel == "fsdp" ? "dp=4" : "dp=2,tp=2";
  absl::StatusOr<std::vector<MeshDim>> mesh = parse_mesh(dims, replicas);
  if (!mesh.ok()) return mesh.status();
  for (const MeshDim& dim : *mesh) {
    if (parallel == "fsdp" && dim.name == "tp" && dim.size > 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("--parallel=fsdp, --mesh=", dims, ": wanted fsdp+tp, or a mesh without tp"));
    }
  }
  Settings s{
      .mesh = *std::move(mesh),
      .parallel = parallel,
      .device = absl::GetFlag(FLAGS_device),
      .backend = absl::GetFlag(FLAGS_backend),
      .data = absl::GetFlag(FLAGS_data),
      .trace = absl::GetFlag(FLAGS_trace),
      .save = absl::GetFlag(FLAGS_save),
      .resume = absl::GetFlag(FLAGS_resume),
      .save_every = absl::GetFlag(FLAGS_save_every),
      .steps = absl::GetFlag(FLAGS_steps),
      .layers = absl::GetFlag(FLAGS_layers),
      .dim = absl::GetFlag(FLAGS_dim),
      .heads = absl::GetFlag(FLAGS_heads),
      .batch = absl::GetFlag(FLAGS_batch),
      .seq = absl::GetFlag(FLAGS_seq),
      .sample = absl::GetFlag(FLAGS_sample),
      .learning_rate = absl::GetFlag(FLAGS_lr),
      .seed = absl::GetFlag(FLAGS_seed),
      .timeout = absl::GetFlag(FLAGS_timeout),
      .cpu_offload = absl::GetFlag(FLAGS_cpu_offload),
      .check = absl::GetFlag(FLAGS_check),
      .json = absl::GetFlag(FLAGS_json),
  };
  absl::Status status;
  status.Update(check_at_least("steps", s.steps, 1));
  status.Update(check_at_least("layers", s.layers, 1));
  status.Update(check_at_least("dim", s.dim, 1));
  status.Update(check_at_least("heads", s.heads, 1));
  status.Update(check_at_least("batch", s.batch, 1));
  status.Update(check_at_least("seq", s.seq, 1));
  status.Update(check_at_least("sample", s.sample, 0));
  status.Update(check_at_least("save_every", s.save_every, 0));
  if (!status.ok()) return status;
  if (s.dim % s.heads != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("--heads=", s.heads, " does not divide --dim=", s.dim));
  }
  if (s.save_every > 0 && s.save.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--save_every=", s.save_every, ": wanted --save, too"));
  }
  if (!(s.learning_rate > 0) || !std::isfinite(s.learning_rate)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--lr=", s.learning_rate, ": wanted a number above 0"));
  }
  if (s.timeout <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError(absl::StrCat("--timeout=", absl::FormatDuration(s.timeout),
                                                   ": wanted a time above 0, such as 30s"));
  }
  if (s.device != "cpu" && s.device != "cuda") {
    return absl::InvalidArgumentError(absl::StrCat("--device=", s.device, ": wanted cpu or cuda"));
  }
  if (s.cpu_offload && (s.device != "cuda" || !s.fully_sharded())) {
    return absl::InvalidArgumentError(absl::StrCat("--cpu_offload, --device=", s.device,
                                                   ", --parallel=", parallel,
                                                   ": wanted cuda, and fsdp, hsdp or fsdp+tp"));
  }
  const std::string other = s.device == "cuda" ? "nccl" : "inproc";
  if (s.backend != "" && s.backend != other && s.backend != "gloo") {
    return absl::InvalidArgumentError(absl::StrCat("--backend=", s.backend, ", --device=", s.device,
                                                   ": wanted ", other, " or gloo"));
  }
  return s;
}

}  // namespace train_gpt
