#!/usr/bin/env bash
# check_reports.sh REPORTS AT_LEAST CHECKS: the files that REPORTS names are at least so many, and complain of just these checks.
set -euo pipefail

mapfile -t reports <"$1"
((${#reports[@]} > 0 && ${#reports[@]} >= $2)) || { echo "${#reports[@]} files; at least $2 were expected"; exit 1; }
said=$(cat -- "${reports[@]}")
printf '%s\n' "$said"
found=$(sed -nE 's/.* (warning|error): .*\[([a-z][^],]*)(,[^]]*)?\]$/\2/p' <<<"$said" | sort -u | xargs)
echo "${#reports[@]} files; wanted complaints: ${3:-none}; found: ${found:-none}"
# With no complaint something said is clang-tidy's own failure.
[[ $found == "$3" && (-n $3 || -z $said) ]]
