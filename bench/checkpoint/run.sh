#!/bin/sh
# Finds the program that Bazel built and starts the comparison. (Bazel starts this in its runfiles.)
exec python3 "$PWD/bench/checkpoint/checkpoint.py" --ours="$PWD/bench/checkpoint/save_and_load" "$@"
