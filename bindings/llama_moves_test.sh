#!/usr/bin/env bash
# Builds train_llama in Rust and in Go, and has runs move between them and the one in C++: llama_moves.py.
#
#   ./bazelw test //bindings:llama_moves_test
#
# Arguments: train_llama in C++, libshardweave.so, the Rust workspace's Cargo.toml, a directory of transformers' Llama,
# llama_moves.py.
set -euo pipefail

cpp=$(readlink -f -- "$1")
library=$(readlink -f -- "$2")
workspace=$(dirname -- "$(readlink -f -- "$3")")
model=$(dirname -- "$(readlink -f -- "$4")")
moves=$PWD/$5

export HOME=${HOME:-$(getent passwd "$(id -u)" | cut -d: -f6)}
export PATH=$PATH:$HOME/.cargo/bin
command -v cargo >/dev/null || {
  echo "missing: cargo. Install Rust 1.63 or newer, by rustup or from Debian (apt-get install cargo)." >&2
  exit 1
}
folder=$(mktemp -d)
trap 'rm -rf -- "$folder"' EXIT

# As bindings/rust/cargo_test.sh, and so of what that has compiled.
checkout=$(cksum <<<"$workspace" | cut -d' ' -f1)
export CARGO_TARGET_DIR=${XDG_CACHE_HOME:-$HOME/.cache}/shardweave/cargo/$checkout CARGO_INCREMENTAL=0
export SHARDWEAVE_HOME=$(dirname -- "$library")
mkdir -p -- "$CARGO_TARGET_DIR"
(
  cd -- "$workspace"
  cargo fetch --locked --offline --quiet 2>/dev/null || cargo fetch --locked
  CARGO_NET_OFFLINE=true cargo build --locked -p shardweave --features half --example train_llama
)
bindings/go/with_library.sh go build -o "$folder/train_llama_go" ./examples/train_llama

LD_LIBRARY_PATH=$SHARDWEAVE_HOME${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} python3 "$moves" --model="$model" \
  "C++=$cpp" "Rust=$CARGO_TARGET_DIR/debug/examples/train_llama" "Go=$folder/train_llama_go"
