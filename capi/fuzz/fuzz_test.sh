#!/usr/bin/env bash
# A short run of the fuzzer; SWV_FUZZ_SECONDS makes it longer.
set -euo pipefail
export LSAN_OPTIONS=${LSAN_OPTIONS:-suppressions=tools/sanitizers/lsan.supp}
SWV_CHECK_HANDLES=1 "$1" --seconds="${SWV_FUZZ_SECONDS:-60}"
