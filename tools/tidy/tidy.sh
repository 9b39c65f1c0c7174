#!/usr/bin/env bash
# tidy.sh CLANG_TIDY [FILE...]: clang-tidy on these source files, or on all that are compiled, as compile_commands.json says.
set -euo pipefail

clang_tidy=$(readlink -f -- "$1")
shift
root=$BUILD_WORKSPACE_DIRECTORY
if [[ ! -e $root/compile_commands.json ]]; then
  echo "there is no compile_commands.json yet: ./bazelw run //tools:compile_commands" >&2
  exit 1
fi
# From where the user is.
cd -- "${BUILD_WORKING_DIRECTORY:-$root}"
files=("$@")
if ((${#files[@]} == 0)); then
  cd -- "$root"
  mapfile -t files < <(git ls-files -- '*.cc' ':!tools/tidy/testdata')
fi
printf '%s\0' "${files[@]}" | xargs -0 -n 1 -P "$(nproc)" "$clang_tidy" --quiet -p "$root"
