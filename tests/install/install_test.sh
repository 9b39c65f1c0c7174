#!/usr/bin/env bash
# Installs to a new folder and builds the C example there as a user would; threads and processes print the same losses.
set -euo pipefail
installer=$PWD/$1
example=$PWD/$2
joins=$PWD/$3
folder=$(mktemp -d)
trap 'rm -rf -- "$folder"' EXIT

RUNFILES_DIR=$(dirname -- "$PWD") "$installer" --prefix="$folder/first place" --link-libraries
# It can be moved.
mv -- "$folder/first place" "$folder/prefix"
prefix=$folder/prefix

say() { printf '\n== %s\n' "$*"; }
unset LD_LIBRARY_PATH
export PKG_CONFIG_PATH=$prefix/lib/pkgconfig
flags="-I$prefix/include -L$prefix/lib -lshardweave -Wl,-rpath,$prefix/lib -Wl,-rpath-link,$prefix/lib/shardweave"
if command -v pkg-config >/dev/null; then flags=$(pkg-config --cflags --libs shardweave); fi

say "cc"
cc -std=c11 -Wall -Wextra -pedantic -Werror "$example" $flags -o "$folder/train_mlp"
"$folder/train_mlp" | tee "$folder/threads"
grep -q '^step 59  loss 0\.00' "$folder/threads"

say "two processes"
for rank in 0 1; do "$folder/train_mlp" --rank=$rank --ranks=2 --store="$folder/store" >"$folder/rank$rank" & pids[rank]=$!; done
for pid in "${pids[@]}"; do wait "$pid"; done
cat "$folder/rank0"
# The same numbers on 4 threads and on 2 processes, to what rounding leaves.
paste "$folder/threads" "$folder/rank0" | awk '{ d = $4 - $8; if (d < 0) d = -d; if ($2 != $6 || d > 1e-4 * (1 + $4)) exit 1 }'

say "the launcher"
launch=$prefix/bin/shardweave-launch
cc -std=c11 -Wall -Wextra -pedantic -Werror "$joins" $flags -o "$folder/rank"
"$launch" -n 3 -- "$folder/rank" | tee "$folder/launched"
for r in 0 1 2; do grep -q "rank $r of 3: 6\$" "$folder/launched"; done
# Any program, by a path that is relative to where the user is; the code of the first that fails.
(cd -- "$folder" && "$launch" -n 2 --prefix=false -- ./rank >unmarked)
grep -q '^rank 1 of 2: 3$' "$folder/unmarked"
code=0
"$launch" -n 2 -- sh -c 'exit 3' 2>/dev/null || code=$?
((code == 3))

say "an error is one line and a code"
if "$folder/train_mlp" --ranks=0 2>"$folder/error"; then exit 1; fi
grep -q "train_mlp: swv_run_ranks: argument 'num_ranks' is 0" "$folder/error"

say "nothing of LibTorch is shown, nothing leads to where it was built"
if nm --dynamic --defined-only "$prefix/lib/libshardweave.so" | grep -vE ' (A SHARDWEAVE_|T swv_)'; then exit 1; fi
if readelf -d "$prefix/lib/libshardweave.so" | grep -E 'R(UN)?PATH.*(\[|:)/'; then exit 1; fi
if ls "$prefix/lib/shardweave" | grep -E 'cuda\.so|nccl|cudnn|cublas'; then exit 1; fi

if command -v cmake >/dev/null; then
  say "cmake"
  mkdir "$folder/project"
  cp -- "$example" "$folder/project/"
  cat >"$folder/project/CMakeLists.txt" <<'LISTS'
cmake_minimum_required(VERSION 3.16)
project(train_mlp C)
find_package(shardweave 0.4 REQUIRED)
add_executable(train_mlp train_mlp.c)
target_link_libraries(train_mlp shardweave::shardweave)
LISTS
  (cd "$folder/project" && cmake -S . -B build -DCMAKE_PREFIX_PATH="$prefix" && cmake --build build) >"$folder/cmake.log" 2>&1 ||
    { cat "$folder/cmake.log"; exit 1; }
  "$folder/project/build/train_mlp" --ranks=2 | grep 'step 59'
fi
say "PASS"
