// Made by bindings/generate.py from capi/shardweave.h. Do not edit.

/// The kinds of operations, in the order of [`CommCounters::by_op`](crate::CommCounters::by_op).
pub const OP_NAMES: [&str; 14] = [
    "all_reduce",
    "all_gather",
    "all_gather_v",
    "reduce_scatter",
    "reduce_scatter_v",
    "all_to_all",
    "all_to_all_v",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "barrier",
    "send",
    "recv",
];
