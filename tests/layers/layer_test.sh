#!/usr/bin/env bash
# layer_test.sh TARGET FILE: FILE names what TARGET must not reach and does.
set -u
if [[ -s $2 ]]; then
  echo "$1 must not reach:"
  sed 's/^/  /' "$2"
  echo "See how with: ./bazelw query 'somepath($1, $(head -n 1 "$2"))'"
  exit 1
fi
[[ -e $2 ]]
