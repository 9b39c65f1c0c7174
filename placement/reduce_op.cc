#include "shardweave/placement/reduce_op.h"

#include <iterator>

namespace shardweave {
namespace {

constexpr std::string_view kNames[] = {"sum", "avg", "min", "max", "product"};

bool is_linear(ReduceOp op) {
  return op == ReduceOp::kSum || op == ReduceOp::kAvg;
}

}  // namespace

std::string_view to_string(ReduceOp op) {
  return kNames[static_cast<int>(op)];
}

std::optional<ReduceOp> parse_reduce_op(std::string_view text) {
  for (int i = 0; i < static_cast<int>(std::size(kNames)); ++i) {
    if (kNames[i] == text) return static_cast<ReduceOp>(i);
  }
  return std::nullopt;
}

bool commute(ReduceOp a, ReduceOp b) {
  return a == b || (is_linear(a) && is_linear(b));
}

}  // namespace shardweave
