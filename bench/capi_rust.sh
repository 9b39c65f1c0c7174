#!/usr/bin/env bash
# What an operator costs from Rust over the same call in C++: what the C interface adds, by
# bench:capi, and what the crate adds to that.
#
#   ./bazelw run -c opt //bench:capi_rust            # a table
#   ./bazelw run -c opt //bench:capi_rust -- --json  # one line
set -euo pipefail
capi=$1
library=$(readlink -f -- "$2")
workspace=$(dirname -- "$(readlink -f -- "$3")")
shift 3

export PATH=$PATH:${HOME:-/root}/.cargo/bin
checkout=$(cksum <<<"$workspace" | cut -d' ' -f1)
export CARGO_TARGET_DIR=${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/shardweave/cargo/$checkout
export SHARDWEAVE_HOME=$(dirname -- "$library")
over_cpp=$(mktemp)
trap 'rm -f -- "$over_cpp"' EXIT
"$capi" --json >"$over_cpp"
cd -- "$workspace"
cargo bench --locked --quiet --bench operators -- --capi="$over_cpp" "$@"
