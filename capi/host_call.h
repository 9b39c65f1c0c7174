// Where C++ functions are called from when a host calls: somebody asked for it, and there is no file
// of C++ to name. (A std::source_location that was not made by current() would mean that nobody did.)
#pragma once

#include <source_location>

namespace shardweave::capi {

// Its file's name is empty.
#line 1 ""
inline constexpr std::source_location kHost = std::source_location::current();

}  // namespace shardweave::capi
