#!/usr/bin/env bash
# A short run of the fuzzer; SWV_FUZZ_SECONDS makes it longer.
set -euo pipefail
# Read at the end, when the fuzzer has changed its directory.
export LSAN_OPTIONS=suppressions=$PWD/tools/sanitizers/lsan.supp
SWV_CHECK_HANDLES=1 "$1" --seconds="${SWV_FUZZ_SECONDS:-60}"
