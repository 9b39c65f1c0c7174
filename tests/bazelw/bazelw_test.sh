#!/usr/bin/env bash
# Calls bazelw from several folders with a stand-in for Bazel, which says where it runs and what it reads.
set -euo pipefail

root=$(dirname -- "$(readlink -f -- WORKSPACE)")
folder=$(mktemp -d)
folder=$(readlink -f -- "$folder")
trap 'rm -rf -- "$folder"' EXIT
mkdir -p "$folder/bin" "$folder/plain" "$folder/project/sources"
touch "$folder/project/WORKSPACE"
cat >"$folder/bin/bazel" <<'STANDIN'
#!/bin/sh
if [ "$1" = --version ]; then echo "bazel 6.5.0"; exit; fi
echo "in $(pwd -P)"
cat -- "${1#--bazelrc=}"
shift
echo "arguments $*"
STANDIN
chmod +x "$folder/bin/bazel"
ln -s "$root" "$folder/link"

# called_from FOLDER WORKS_IN elsewhere|here
called_from() {
  (cd -- "$1" && XDG_CACHE_HOME=$folder/cache PATH=$folder/bin:$PATH "$root/bazelw" build //:x --keep_going) >"$folder/said"
  printf '== from %s\n' "$1"
  cat "$folder/said"
  grep -qxF "in $2" "$folder/said"
  grep -qxF 'arguments build //:x --keep_going' "$folder/said"
  # One disk cache, wherever it is.
  grep -qF -- "--disk_cache=$folder/cache/shardweave/bazel" "$folder/said" || grep -qs -- '--disk_cache' "$root/user.bazelrc"
  # The repository's options: its workspace has them, others are told.
  if [[ $3 == elsewhere ]]; then
    grep -qxF "import \"$root/.bazelrc\"" "$folder/said"
  elif grep -q import "$folder/said"; then
    exit 1
  fi
}
called_from "$root" "$root" here
called_from "$root/comm" "$root/comm" here
called_from "$folder/link/comm" "$root/comm" here
called_from "$folder/plain" "$root" here
called_from "$folder/project" "$folder/project" elsewhere
called_from "$folder/project/sources" "$folder/project/sources" elsewhere
called_from "$root/examples/only_comm" "$root/examples/only_comm" elsewhere
echo PASS
