#!/usr/bin/env bash
# Installs with --cpp to a new folder and builds there as a user would: the README's program by pkg-config, another by CMake.
set -euo pipefail
installer=$PWD/$1
snippet=$PWD/$2
with_dtensor=$PWD/$3
folder=$(mktemp -d)
trap 'rm -rf -- "$folder"' EXIT

RUNFILES_DIR=$(dirname -- "$PWD") "$installer" --prefix="$folder/first-place" --cpp --link-libraries
# It can be moved.
mv -- "$folder/first-place" "$folder/prefix"
prefix=$folder/prefix

say() { printf '\n== %s\n' "$*"; }
unset LD_LIBRARY_PATH

parts=$prefix/include/shardweave/third_party
ours=("$prefix/include/shardweave"/{comm,dtensor,mesh,modules,placement})

say "headers of internals are not there"
for room in dtensor/{cuda,engine,rules,testing}; do
  if [[ -e $prefix/include/shardweave/$room ]]; then echo "$room is there"; exit 1; fi
done
if grep -rl 'Internal to' --include='*.h' "${ours[@]}"; then exit 1; fi

say "every header that a header includes is there"
grep -rhoE '^#include "[^"]+"' --include='*.h' "${ours[@]}" | cut -d'"' -f2 | sort -u >"$folder/included"
while read -r header; do
  for place in "$prefix/include" "$parts/absl" "$parts/libtorch" "$parts/libtorch/torch/csrc/api/include"; do
    [[ -e $place/$header ]] && continue 2
  done
  echo "$header is not there"
  exit 1
done <"$folder/included"
grep -qx 'shardweave/dtensor/dtensor.h' "$folder/included"

say "c++ and pkg-config"
export PKG_CONFIG_PATH=$prefix/lib/pkgconfig
flags="-std=c++20 -pthread -I$prefix/include -isystem $parts/absl -isystem $parts/libtorch
  -isystem $parts/libtorch/torch/csrc/api/include -L$prefix/lib -L$prefix/lib/shardweave -Wl,--no-as-needed -lshardweave_cpp
  -ltorch_cpu -lc10 -Wl,-rpath,$prefix/lib:$prefix/lib/shardweave -Wl,-rpath-link,$prefix/lib/shardweave"
if command -v pkg-config >/dev/null; then flags=$(pkg-config --cflags --libs shardweave-cpp); fi
c++ -O1 -Wall -Wextra -Werror "$snippet" $flags -o "$folder/snippet"
"$folder/snippet" | tee "$folder/steps" | tail -1
awk '$1 == "step" { last = $3; if (n++ == 0) first = $3 } END { exit !(n == 50 && last < first) }' "$folder/steps"

say "every header compiles on its own"
# Without LibTorch at first: what does not need it is seen alone. LibTorch's own headers take up to ten seconds each time, so
# those that include them are one file, in their order and in the opposite one.
find "${ours[@]}" -name '*.h' | sort >"$folder/headers"
alone() {
  if c++ -std=c++20 -fsyntax-only -Wall -Wextra -Wno-missing-field-initializers -Werror -I"$2/include" \
    -isystem "$2/include/shardweave/third_party/absl" -x c++ -include "$1" /dev/null 2>"$3/${1//\//-}.errors"; then return; fi
  if ! grep -qE 'fatal error: (ATen|c10|torch)/' "$3/${1//\//-}.errors"; then cat "$3/${1//\//-}.errors"; return 255; fi
  echo "$1"
}
export -f alone
xargs -P2 -I{} bash -c 'alone "$@"' alone {} "$prefix" "$folder" <"$folder/headers" >"$folder/see_libtorch" ||
  { cat "$folder/see_libtorch"; exit 1; }
echo "$(wc -l <"$folder/headers") headers, of which $(wc -l <"$folder/see_libtorch") include LibTorch's"
for order in sort "sort -r"; do
  $order "$folder/see_libtorch" | sed 's/.*/#include "&"/' |
    c++ -fsyntax-only -Wall -Wextra -Wno-missing-field-initializers -Werror $flags -x c++ -
done

say "nothing leads to where it was built"
if readelf -d "$prefix/lib/libshardweave_cpp.so" | grep -E 'R(UN)?PATH.*(\[|:)/'; then exit 1; fi

if command -v cmake >/dev/null; then
  say "cmake"
  mkdir "$folder/project"
  cp -- "$with_dtensor" "$folder/project/main.cc"
  cat >"$folder/project/CMakeLists.txt" <<'LISTS'
cmake_minimum_required(VERSION 3.16)
project(with_dtensor CXX)
find_package(shardweave 0.4 REQUIRED)
add_executable(with_dtensor main.cc)
target_link_libraries(with_dtensor shardweave::cpp)
LISTS
  (cd "$folder/project" && cmake -S . -B build -DCMAKE_PREFIX_PATH="$prefix" && cmake --build build) >"$folder/cmake.log" 2>&1 ||
    { cat "$folder/cmake.log"; exit 1; }
  "$folder/project/build/with_dtensor" | grep 'step 19: '
fi
say "PASS"
