// A ProfileScope records when each operator and each collective on the DTensors of a mesh began and
// ended, for Perfetto (https://ui.perfetto.dev) or chrome://tracing.
//
//   ProfileScope profile(mesh);
//   for (int step = 0; step < 3; ++step) train_step();
//   profile.write_merged("trace.json");     // the first rank writes what all have recorded
//
// In the picture every rank is a process with two threads: "operators" (and the ModuleScopes around
// them; operators that others are made of lie inside those), and "communication" (more than one
// where collectives overlap). Times are a rank's own clock: between machines they are as far apart
// as their clocks are. Recording costs about a microsecond per operator. Threads: as DTensors.
// Ownership: keeps the mesh alive. Errors are thrown as Error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "shardweave/dtensor/dtensor.h"

namespace shardweave {

class ProfileScope {
 public:
  // Keeps the first `max_events` events (each about 200 bytes); the rest is only counted.
  explicit ProfileScope(const MeshPtr& mesh, size_t max_events = 1 << 18);
  ~ProfileScope();
  ProfileScope(const ProfileScope&) = delete;
  ProfileScope& operator=(const ProfileScope&) = delete;

  int64_t num_events() const;  // kept
  int64_t dropped() const;     // beyond max_events

  // This rank's trace: {"traceEvents": [...]}, in Chrome's format; pid is the rank in the world,
  // times are microseconds since midnight (UTC) before the scope began. What has not ended yet is
  // left out.
  std::string to_json() const;
  void write(const std::string& path) const;

  // One file with the traces of all ranks of the mesh, times since the first of them began.
  // Collective; if the first rank cannot write the file, all throw.
  void write_merged(const std::string& path) const;

 private:
  class Recorder;
  std::unique_ptr<Recorder> recorder_;
};

}  // namespace shardweave
