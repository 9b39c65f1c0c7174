#!/bin/sh
# Finds the library that Bazel built and starts the comparison.
here=$(dirname "$0")
exec python3 "$here/start.py" --bridge="$PWD/tests/op_db/libbridge.so" "$@"
