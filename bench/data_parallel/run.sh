#!/bin/sh
# Finds the programs that Bazel built and starts the comparison. (Bazel starts this in its runfiles.)
exec python3 "$PWD/bench/data_parallel/data_parallel.py" --train="$PWD/bench/gpt/train" --memory="$PWD/bench/data_parallel/memory" "$@"
