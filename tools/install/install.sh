#!/usr/bin/env bash
# Runs install.py on the files that Bazel has built, from where the user is.
set -euo pipefail
runfiles=${RUNFILES_DIR:-$0.runfiles}
[[ -d $runfiles ]] || runfiles=${BASH_SOURCE[0]%.runfiles/*}.runfiles
exec python3 "$runfiles/shardweave/tools/install/install.py" --runfiles="$(readlink -f -- "$runfiles")" "$@"
