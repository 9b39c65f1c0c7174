// What the command line asks for, checked.
//
//   std::vector<char*> rest = absl::ParseCommandLine(argc, argv);
//   absl::StatusOr<Settings> settings = settings_from_flags(rest);
//   settings->num_ranks();                                            // 4, of --mesh=dp=2,tp=2
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "shardweave/mesh/device_mesh.h"

namespace train_gpt {

struct Settings {
  std::vector<shardweave::MeshDim> mesh;  // dp and tp; one that was not named has size 1
  std::string parallel;                   // a name of kParallel, in settings.cc
  std::string device;                     // "cpu" or "cuda"
  std::string backend;                    // "inproc", "gloo", "nccl", or "": whichever fits
  std::string data;                       // "": Text::read's default
  std::string trace;                      // "": none
  std::string save, resume;               // directories of checkpoints; "": none
  int64_t save_every;                     // steps; 0: only at the end
  int64_t steps, layers, dim, heads, batch, seq, sample;
  double learning_rate;
  uint64_t seed;
  absl::Duration timeout;
  bool cpu_offload;  // fully sharded parameters rest on the CPU
  bool check, json;

  int num_ranks() const;
  // What `parallel` says: whether ranks along dp have parts of the parameters, and whether, or how,
  // the optimizer is divided among them (ZeRO; 0: not).
  bool fully_sharded() const;
  int zero_stage() const;
  // All that has to be the same on every rank, as text.
  std::string to_string() const;
};

// From the flags defined in settings.cc; `rest` is what ParseCommandLine has returned.
// InvalidArgument names the flag, its value and what was wanted.
absl::StatusOr<Settings> settings_from_flags(absl::Span<char* const> rest);

}  // namespace train_gpt
