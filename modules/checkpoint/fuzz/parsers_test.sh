#!/usr/bin/env bash
# A short run, with a seed of its own, which it prints; SWV_FUZZ_SECONDS makes it longer.
exec "$1" --seconds="${SWV_FUZZ_SECONDS:-5}"
