#!/bin/sh
# The program ends well, and the layouts are those that docs/rules.md tells of.
set -eu
output=$("$1")
echo "$output"
echo "$output" | grep -qF "[S(0), S(1)]"
echo "$output" | grep -qF "[P(sum), S(0)]"
