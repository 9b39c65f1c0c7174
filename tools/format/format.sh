#!/usr/bin/env bash
# format.sh CLANG_FORMAT [--check]: formats every tracked C and C++ file, or says which are not formatted.
set -euo pipefail

clang_format=$(readlink -f -- "$1")
mode=(-i)
if [[ ${2:-} == --check ]]; then mode=(--dry-run --Werror --ferror-limit=1); fi
cd -- "${BUILD_WORKSPACE_DIRECTORY:-$(dirname -- "$(readlink -f -- WORKSPACE)")}"

files=()
while IFS= read -r -d '' file; do
  # Tracked, but maybe removed in the working tree.
  if [[ -f $file ]]; then files+=("$file"); fi
done < <(git -c safe.directory='*' ls-files -z -- '*.h' '*.cc' '*.c')
if ((${#files[@]} == 0)); then
  echo "no C or C++ files are tracked in $PWD" >&2
  exit 1
fi

if ! printf '%s\0' "${files[@]}" | xargs -0 -n 16 -P 2 "$clang_format" "${mode[@]}" --style=file; then
  echo "Not formatted as .clang-format says. Format with: ./bazelw run //tools/format" >&2
  exit 1
fi
echo "${#files[@]} files"
