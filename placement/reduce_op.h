// The reductions of the field: what a Partial placement waits for, and what a collective computes.
//
//   to_string(ReduceOp::kAvg);         // "avg"
//   parse_reduce_op("avg");            // ReduceOp::kAvg
//
// This header needs only the standard library, so that comm/ can share it without the placements.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace shardweave {

enum class ReduceOp : uint8_t { kSum, kAvg, kMin, kMax, kProduct };

// "sum", "avg", "min", "max", "product".
std::string_view to_string(ReduceOp op);

// The inverse; nothing for any other text.
std::optional<ReduceOp> parse_reduce_op(std::string_view text);

// Whether `a` over one set of ranks and `b` over another give the same result in either order. True
// for equal reductions and for the linear pair sum and avg; max(a + b, c + d), for one, is not
// max(a, c) + max(b, d).
bool commute(ReduceOp a, ReduceOp b);

}  // namespace shardweave
