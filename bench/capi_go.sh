#!/usr/bin/env bash
# Measures operators in C++ by //bench:capi, then in Go, one after the other.
set -euo pipefail
cd -- "${RUNFILES_DIR:-$0.runfiles}/shardweave" 2>/dev/null || cd -- "$(dirname -- "$0")/.."
cpp=$(mktemp)
trap 'rm -f -- "$cpp"' EXIT
bench/capi --json >"$cpp"
bindings/go/with_library.sh go run ./bench/capi --cpp="$cpp" "$@"
