#!/bin/sh
# Finds the library that Bazel built and starts the comparison. (Bazel starts this in its runfiles.)
exec python3 "$PWD/tests/op_db/start.py" --bridge="$PWD/tests/op_db/libbridge.so" "$@"
