#!/usr/bin/env bash
# What the command prints, on rank threads and on processes.
set -euo pipefail
program=$(readlink -f -- "$1")
json='^\{"links":\{"dp":\{"latency":[^,]+,"bandwidth":[^}]+\},"tp":\{"latency":[^,]+,"bandwidth":[^}]+\}\},"device":\{"flops":[^,]+,"bandwidth":[^}]+\}\}$'
for ranks in "" --processes; do
  text=$("$program" --mesh=dp=2,tp=2 --json $ranks)
  [[ $text =~ $json ]] || { echo "not a cost model ($ranks): $text"; exit 1; }
done
table=$("$program" --mesh=dp=2,one=1)
[[ $table == *"link dp"* && $table == *device* && $table != *"link one"* ]] || { echo "$table"; exit 1; }
if error=$("$program" --mesh=dp 2>&1); then echo "a mesh without sizes is no error"; exit 1; fi
[[ $error == *'"dp" is not NAME=SIZE'* ]] || { echo "$error"; exit 1; }
echo PASS
