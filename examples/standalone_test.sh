#!/usr/bin/env bash
# standalone_test.sh WORKSPACE run|analyse here|elsewhere [REPOSITORY=FILE]...: builds and runs the example workspace, or a
# copy of it outside of the repository, with a Bazel of its own, on the fetched repositories that the files are in.
set -euo pipefail

root=$(dirname -- "$(readlink -f -- WORKSPACE)")
workspace=$1
command=$2
where=$3
shift 3
overrides=()
for argument in "$@"; do
  repository=${argument%%=*}
  file=$(readlink -- "${argument#*=}")
  overrides+=("--override_repository=$repository=${file%%/external/"$repository"/*}/external/$repository")
done

# Another output root than that of the Bazel that runs this test, so that neither waits for the other; no server that stays.
project=$root/examples/$workspace
if [[ $where == elsewhere ]]; then
  cp -r -- "$project" "$TEST_TMPDIR/project"
  project=$TEST_TMPDIR/project
  sed -i "s|path = \"../..\"|path = \"$root\"|" "$project/WORKSPACE"
  rm "$project/.bazelrc" # bazelw knows the options
fi
options=(--symlink_prefix=/ --color=no --curses=no "${overrides[@]}")
if [[ $command == analyse ]]; then
  command=build
  options+=(--nobuild)
fi
cd -- "$project"
"$root/bazelw" --batch --output_user_root="$TEST_TMPDIR/bazel" "$command" "${options[@]}" "//:$workspace"
