#!/usr/bin/env bash
# standalone_test.sh WORKSPACE [REPOSITORY=FILE]...: builds and runs the example workspace with a Bazel of its own,
# on the fetched repositories that the files are in.
set -euo pipefail

root=$(dirname -- "$(readlink -f -- WORKSPACE)")
workspace=$1
shift
overrides=()
for argument in "$@"; do
  repository=${argument%%=*}
  file=$(readlink -- "${argument#*=}")
  overrides+=("--override_repository=$repository=${file%%/external/"$repository"/*}/external/$repository")
done

# Another output root than that of the Bazel that runs this test, so that neither waits for the other; no server that stays.
cd -- "$root/examples/$workspace"
"$root/bazelw" --batch --output_user_root="$TEST_TMPDIR/bazel" run --symlink_prefix=/ --color=no --curses=no \
  "${overrides[@]}" "//:$workspace"
