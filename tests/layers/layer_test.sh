#!/usr/bin/env bash
# layer_test.sh FILE TARGET...: FILE names what the targets must not reach and do.
set -u
forbidden=$1
shift
if [[ -s $forbidden ]]; then
  echo "$* must not reach:"
  sed 's/^/  /; 10q' "$forbidden"
  echo "See how with: ./bazelw query 'somepath(set($*), $(head -n 1 "$forbidden"))'"
  exit 1
fi
[[ -e $forbidden ]]
