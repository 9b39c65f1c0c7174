// How each launcher tells a process who it is: one table entry per launcher.
#pragma once

#include <array>
#include <string_view>

#include "absl/types/span.h"

namespace shardweave {

// Variables that say the same thing, the best first; the rest is empty.
using Variables = std::array<std::string_view, 3>;

struct Launcher {
  std::string_view name;
  std::string_view mark;  // set exactly if this launcher started the process
  Variables rank;
  Variables world_size;
  Variables local_rank;        // optional
  Variables local_world_size;  // optional
  Variables run;               // optional; those that are set, joined
  std::string_view advice;     // how a user gives it what may be missing
};

// In the order in which they are tried: a launcher inside another one's job comes first.
absl::Span<const Launcher> known_launchers();

}  // namespace shardweave
