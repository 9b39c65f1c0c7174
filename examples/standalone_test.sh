#!/usr/bin/env bash
# standalone_test.sh WORKSPACE [REPOSITORY=FILE]...: builds and runs the example workspace with a Bazel of its own.
set -euo pipefail

root=$(dirname -- "$(readlink -f -- WORKSPACE)")
workspace=$1
shift
overrides=()
for repository in "$@"; do
  overrides+=("--override_repository=${repository%%=*}=$(dirname -- "$(readlink -f -- "${repository#*=}")")")
done

# Another output root than that of the Bazel that runs this test, so that neither waits for the other; no server that stays.
cd -- "$root/examples/$workspace"
"$root/bazelw" --batch --output_user_root="$TEST_TMPDIR/bazel" run --symlink_prefix=/ --color=no --curses=no \
  "${overrides[@]}" "//:$workspace"
