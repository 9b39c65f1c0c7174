#!/bin/sh
# Finds the programs that Bazel built and starts the comparison.
here=$(dirname "$0")
exec python3 "$here/compare.py" --train_gpt="$PWD/examples/train_gpt/train_gpt" --dispatch="$PWD/bench/dispatch" "$@"
