#!/usr/bin/env bash
# readme_processes_test.sh LAUNCH PROGRAM: the README's second program runs in two processes, and without a launcher says what
# starts it.
set -euo pipefail

output=$("$1" -n 2 -- "$2")
[[ $output == *'sum 35'*'DTensor[5] Float [S(0)] on DeviceMesh(dp=2), local [3] at [0]'*'CPUFloatType{5}'* ]] ||
  { echo "$output" >&2; exit 1; }
if output=$(env -u SHARDWEAVE_RUN_ID -u RANK "$2" 2>&1); then
  echo "no launcher is no error: $output" >&2
  exit 1
fi
[[ $output == *'no launcher started this process'* ]] || { echo "$output" >&2; exit 1; }
