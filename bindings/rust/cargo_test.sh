#!/usr/bin/env bash
# Tests the Rust bindings with Cargo: tests, lints, formatting; with the library linked, loaded at
# run time, and not there at all. (The documentation's examples: package_test.sh.)
#
#   ./bazelw test //bindings/rust:cargo_test
#
# Arguments: libshardweave.so, the example train_gpt in C++, the workspace's Cargo.toml. Cargo's own
# output goes to the user's cache, so that the next run compiles only what has changed.
set -euo pipefail

library=$(readlink -f -- "$1")
train_gpt=$(readlink -f -- "$2")
workspace=$(dirname -- "$(readlink -f -- "$3")")

export HOME=${HOME:-$(getent passwd "$(id -u)" | cut -d: -f6)}
export PATH=$PATH:$HOME/.cargo/bin
missing=()
for tool in cargo rustc cargo-clippy cargo-fmt cc; do
  command -v "$tool" >/dev/null || missing+=("$tool")
done
if ((${#missing[@]})); then
  echo "missing: ${missing[*]}. Install Rust 1.63 or newer, by rustup or from Debian (apt-get install" \
    "cargo rust-clippy rustfmt gcc); ./bazelw does the latter where it may." >&2
  exit 1
fi

# A folder for each checkout: two of them would build in turns.
checkout=$(cksum <<<"$workspace" | cut -d' ' -f1)
export CARGO_TARGET_DIR=${XDG_CACHE_HOME:-$HOME/.cache}/shardweave/cargo/$checkout
export SHARDWEAVE_HOME=$(dirname -- "$library")
export SHARDWEAVE_CPP_TRAIN_GPT=$train_gpt
# Rust 1.63 may break here otherwise: github.com/rust-lang/rust/issues/84970.
export CARGO_INCREMENTAL=0
# Nobody debugs what is built here, and without line tables it is built in three quarters of the time.
export CARGO_PROFILE_DEV_DEBUG=0 CARGO_PROFILE_TEST_DEBUG=0
mkdir -p -- "$CARGO_TARGET_DIR"

cd -- "$workspace"
# The registry is asked only for what is not here yet.
cargo fetch --locked --offline --quiet 2>/dev/null || cargo fetch --locked
export CARGO_NET_OFFLINE=true

cargo fmt --all -- --check
cargo clippy --locked --workspace --all-targets --features shardweave/half -- -D warnings
cargo clippy --locked --workspace --all-targets --all-features -- -D warnings
cargo clippy --locked --workspace --lib --no-default-features -- -D warnings
# The tests start the examples; as programs only `cargo build` makes them here. (Those of a run before would do otherwise.)
rm -rf -- "$CARGO_TARGET_DIR"/debug/examples
cargo build --locked --workspace --examples --features shardweave/half
cargo test --locked --workspace --lib --bins --tests --features shardweave/half
cargo test --locked -p shardweave --features half --test train_gpt -- --ignored
# Without a library: what is pure Rust.
env -u SHARDWEAVE_HOME cargo test --locked --workspace --lib --all-features
# Loaded at run time, by its soname: a copy beside it, which has to be of this library.
cmp -- "$library" "$SHARDWEAVE_HOME/libshardweave.so.0.4"
cargo test --locked -p shardweave --all-features --test handles --test library --test process \
  --test native --test nn --test ranks --test threads --test values
RUSTDOCFLAGS="-D warnings" cargo doc --locked --workspace --no-deps --quiet
