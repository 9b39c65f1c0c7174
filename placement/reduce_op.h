// The reductions of the field, shared by placements (what a Partial is waiting for) and communicators (what a collective does).
#pragma once

#include <cstdint>
#include <string_view>

namespace shardweave {

enum class ReduceOp : uint8_t { kSum, kAvg, kMin, kMax, kProduct };

// "sum", "avg", "min", "max", "product".
std::string_view to_string(ReduceOp op);

}  // namespace shardweave
