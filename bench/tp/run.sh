#!/bin/sh
# Finds the program that Bazel built and starts the comparison. (Bazel starts this in its runfiles.)
exec python3 "$PWD/bench/tp/tp.py" --train="$PWD/bench/gpt/train" "$@"
