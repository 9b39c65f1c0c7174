// Where a function was called from that somebody has asked for, but not by a line of C++ that is
// worth a name: a plan, a host in another language. (A std::source_location that current() has not
// made would mean that nobody has asked.) Internal to Shardweave.
#pragma once

#include <source_location>

namespace shardweave::dtensor_internal {

// Its file's name is empty.
#line 1 ""
inline constexpr std::source_location kNoSource = std::source_location::current();

}  // namespace shardweave::dtensor_internal
