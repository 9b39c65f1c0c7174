#!/usr/bin/env bash
# A new Cargo project outside of Bazel, with an installed library: the README's first program, and
# the GPT on 4 rank threads and on 2 processes.
#
#   ./bazelw test //bindings/rust:new_project_test
#
# Arguments: the installer, the workspace's Cargo.toml.
set -euo pipefail

installer=$PWD/$1
bindings=$(dirname -- "$(readlink -f -- "$2")")
export HOME=${HOME:-$(getent passwd "$(id -u)" | cut -d: -f6)}
export PATH=$PATH:$HOME/.cargo/bin
if ! command -v cargo >/dev/null; then
  echo "missing: cargo. Install Rust 1.63 or newer, by rustup or from Debian (apt-get install cargo)." >&2
  exit 1
fi

folder=$(mktemp -d)
trap 'rm -rf -- "$folder"' EXIT
RUNFILES_DIR=$(dirname -- "$PWD") "$installer" --prefix="$folder/prefix" --link-libraries
unset LD_LIBRARY_PATH SHARDWEAVE_HOME

project=$folder/demo
cargo new --quiet "$project"
cd -- "$project"
sed -i '/^\[dependencies\]/,$d' Cargo.toml
cat >>Cargo.toml <<TOML
[dependencies]
shardweave = { path = "$bindings/shardweave" }
TOML
# What the example needs, as the example needs it, in versions that are here already.
sed -n '/^\[dev-dependencies\]/,/^$/p' "$bindings/shardweave/Cargo.toml" | sed 1d >>Cargo.toml
cp -- "$bindings/Cargo.lock" .
cp -- "$bindings"/shardweave/examples/train_gpt/*.rs src/
mkdir src/bin
sed -n '/^```rust$/,/^```$/p;/^```$/q' "$bindings/README.md" | sed '/^```/d' >src/bin/quick_start.rs
cat >build.rs <<'RUST'
fn main() {
    let folder = std::env::var("DEP_SHARDWEAVE_RUST_LIBDIR").unwrap();
    println!("cargo:rustc-link-arg=-Wl,-rpath,{folder}");
}
RUST
export CARGO_TARGET_DIR=$folder/target
cargo fetch --offline --quiet 2>/dev/null || cargo fetch

say() { printf '\n== %s\n' "$*"; }
say "found by SHARDWEAVE_HOME"
SHARDWEAVE_HOME=$folder/prefix cargo run --offline --quiet --bin quick_start | tee "$folder/quick_start"
grep -q '^DTensor\[\] .*, its gradient DTensor\[8, 6\]' "$folder/quick_start"

if command -v pkg-config >/dev/null; then
  say "found by pkg-config"
  PKG_CONFIG_PATH=$folder/prefix/lib/pkgconfig cargo build --offline --quiet
else
  SHARDWEAVE_HOME=$folder/prefix cargo build --offline --quiet
fi
size="--steps=5 --dim=28 --batch=6 --seq=11 --sample=0 --json --check"
gpt=$folder/target/debug/demo # without Cargo, which would tell the loader where the library is
for ranks in "--mesh=dp=2,tp=2" "--mesh=dp=2 --backend=gloo"; do
  say "training with $ranks"
  "$gpt" $size $ranks 2>"$folder/err" | tee "$folder/out" || { cat "$folder/err"; exit 1; }
  grep -qE '"max_loss_diff":([0-9.]+e-(0?[7-9]|[1-9][0-9])|0\.0)\}' "$folder/out"
done

say "an error without the library says what to do"
if SHARDWEAVE_HOME=/proc/nowhere cargo build --offline --quiet 2>"$folder/err"; then exit 1; fi
grep -q "SHARDWEAVE_HOME is '/proc/nowhere'; wanted a folder with lib/libshardweave.so" "$folder/err"
say "PASS"
