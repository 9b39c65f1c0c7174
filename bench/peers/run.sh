#!/bin/sh
# Finds the programs that Bazel built and starts the comparison. (Bazel starts this in its runfiles.)
exec python3 "$PWD/bench/peers/compare.py" --train_gpt="$PWD/examples/train_gpt/train_gpt" --dispatch="$PWD/bench/dispatch" "$@"
