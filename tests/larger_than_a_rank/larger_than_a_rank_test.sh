#!/usr/bin/env bash
# larger_than_a_rank_test.sh LAUNCH TRAIN: eight processes train what one of them has no memory for.
set -euo pipefail

output=$("$1" --prefix=false -n 8 -- "$2" 2>&1) || { echo "$output" >&2; exit 1; }
echo "$output"
[[ $output == *'times the limit of a process'*$'\n   7 '* ]]
if output=$("$1" --prefix=false -n 1 -- "$2" 2>&1); then
  echo "one process trains it, too (does this kernel enforce RLIMIT_DATA?): $output" >&2
  exit 1
fi
echo "$output"
[[ $output == *'rank 0 of 1, of '*' MB, cannot train: '*'memory'* ]]
