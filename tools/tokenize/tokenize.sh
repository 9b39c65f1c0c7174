#!/usr/bin/env bash
# Runs the program with the library that reads tokenizer.json, from where the user is.
set -euo pipefail
runfiles=${RUNFILES_DIR:-$0.runfiles}
[[ -d $runfiles ]] || runfiles=${BASH_SOURCE[0]%.runfiles/*}.runfiles
runfiles=$(readlink -f -- "$runfiles")
here=$runfiles/shardweave/tools/tokenize
export PYTHONPATH=$runfiles/tokenizers/python${PYTHONPATH:+:$PYTHONPATH}
exec "$here/tokenize_main" --encoder="$here/encode.py" "$@"
