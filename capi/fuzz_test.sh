#!/usr/bin/env bash
# A short run of the fuzzer; SWV_FUZZ_SECONDS makes it longer.
set -euo pipefail
SWV_CHECK_HANDLES=1 "$1" --seconds="${SWV_FUZZ_SECONDS:-60}"
