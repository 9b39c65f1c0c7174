#!/usr/bin/env bash
# Measures operators in Go, and in C++ by //bench:capi.
set -euo pipefail
bindings/go/with_library.sh go run ./bench/capi --cpp="$PWD/bench/capi" "$@"
