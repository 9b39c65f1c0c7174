#!/usr/bin/env bash
# The crates' tests under AddressSanitizer, ThreadSanitizer, Valgrind or Miri.
#
#   bindings/rust/sanitizer.sh address|thread|valgrind|miri [libshardweave.so]
#
# address and thread need a nightly toolchain of rustup (Debian's Rust has no sanitizers), valgrind
# any toolchain and Valgrind, miri a nightly with that component. The library is loaded at run time
# (the feature load-dynamic), so a plain build of it will do: what is checked is this side of the
# border. Without one, and under Valgrind and Miri, only what needs none runs: the unit tests.
# Each way shows first that it finds what it is there to find.
set -euo pipefail

way=${1:-}
library=${2:-}
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/shardweave/cargo}/$way
export CARGO_INCREMENTAL=0
unset SHARDWEAVE_HOME
host=$(rustc -vV | sed -n 's/^host: //p')
options=(--locked)
features=half,load-dynamic
folder=$(mktemp -d)
trap 'rm -rf -- "$folder"' EXIT

case $way in
  address | thread)
    cargo=(cargo +nightly)
    export RUSTFLAGS="-Zsanitizer=$way"
    # std is built without it, so the ways in which its own threads and channels wait are not seen.
    [[ $way == thread ]] && RUSTFLAGS+=" -Cunsafe-allow-abi-mismatch=sanitizer"
    options+=(--target "$host") # or build scripts would have it too
    cat >"$folder/thread" <<'LIST'
race:test::event::CompletedTest
race:core::option::Option<test::run_test
race:std::sync::mpmc
race:std::thread::lifecycle::Packet
race:alloc::sync::Arc<std::thread
race:libshardweave.so
race:libtorch_cpu.so
race:libc10.so
mutex:libtorch_cpu.so
LIST
    # A panic whose value panics at its end, whose value panics too: that one is kept.
    printf '%s\n' leak:shardweave::ffi::panic_error leak:libtorch_cpu.so >"$folder/leak"
    export TSAN_OPTIONS=suppressions=$folder/thread ASAN_OPTIONS=detect_leaks=1
    export LSAN_OPTIONS=suppressions=$folder/leak:print_suppressions=0
    ;;
  valgrind)
    cargo=(cargo)
    export CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER="valgrind --quiet --error-exitcode=9"
    ;;
  miri)
    cargo=(cargo +nightly miri)
    export MIRIFLAGS=-Zmiri-disable-isolation # tests read the sources
    ;;
  *)
    echo "sanitizer.sh: '$way'; wanted address, thread, valgrind or miri" >&2
    exit 1
    ;;
esac

# What must be found: tests that nobody runs otherwise.
finds() {
  if "${cargo[@]}" test "${options[@]}" --features $features -p shardweave --lib -- --ignored --exact "$1" \
    >"$folder/out" 2>&1; then
    echo "sanitizer.sh: $way does not find $1" >&2
    exit 1
  fi
  grep -qE "$2" "$folder/out" || { cat "$folder/out"; exit 1; }
  echo "found: $1"
}
case $way in
  address) finds faults::freed_memory heap-use-after-free ;;
  thread) finds faults::a_race "ThreadSanitizer: data race" ;;
  valgrind) finds faults::freed_memory "Invalid read" ;;
  miri) finds faults::freed_memory "dangling|freed" && finds faults::a_race "Data race" ;;
esac

"${cargo[@]}" test "${options[@]}" -p shardweave-sys --lib --features load-dynamic
"${cargo[@]}" test "${options[@]}" --features $features -p shardweave --lib
[[ -z $library || $way == valgrind || $way == miri ]] && exit 0
export SHARDWEAVE_HOME=$(dirname -- "$(readlink -f -- "$library")")
# What is loaded is the copy by its soname, if there is one.
for copy in "$SHARDWEAVE_HOME"/libshardweave.so.*; do
  [[ ! -e $copy || $copy == *.params ]] || cmp -- "$library" "$copy"
done
"${cargo[@]}" test "${options[@]}" --features $features -p shardweave --test handles --test native --test nn --test process \
  --test ranks --test threads --test values
