#!/usr/bin/env bash
# Short runs of the fuzzer, with handles that are checked and as production has them; SWV_FUZZ_SECONDS makes them longer. Each
# begins with a seed of its own, which it prints: --seed=N --favour=M repeats it.
set -euo pipefail
# Read at the end, when the fuzzer has changed its directory.
export LSAN_OPTIONS=suppressions=$PWD/tools/sanitizers/lsan.supp
seconds="${SWV_FUZZ_SECONDS:-60}"
SWV_CHECK_HANDLES=1 "$1" --seconds="$((seconds / 2))"
SWV_CHECK_HANDLES=0 "$1" --seconds="$((seconds / 2))"
