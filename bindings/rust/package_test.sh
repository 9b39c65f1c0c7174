#!/usr/bin/env bash
# What a registry would get: the crates are packaged, and what is in the packages is built and
# tested outside of the checkout, with a library and without one.
#
#   ./bazelw test //bindings/rust:package_test
#
# Arguments: libshardweave.so, the workspace's Cargo.toml. Nothing is uploaded and nobody is asked:
# `cargo publish --dry-run --workspace` (Cargo 1.90 or newer) does what this does, and asks the
# registry besides whether it has these versions already.
set -euo pipefail

library=$(readlink -f -- "$1")
workspace=$(dirname -- "$(readlink -f -- "$2")")
export HOME=${HOME:-$(getent passwd "$(id -u)" | cut -d: -f6)}
export PATH=$PATH:$HOME/.cargo/bin
if ! command -v cargo >/dev/null; then
  echo "missing: cargo. Install Rust 1.63 or newer, by rustup or from Debian (apt-get install cargo)." >&2
  exit 1
fi

folder=$(mktemp -d)
trap 'rm -rf -- "$folder"' EXIT
export CARGO_TARGET_DIR=$folder/target CARGO_INCREMENTAL=0
export CARGO_PROFILE_DEV_DEBUG=0 CARGO_PROFILE_TEST_DEBUG=0
unset LD_LIBRARY_PATH SHARDWEAVE_HOME
say() { printf '\n== %s\n' "$*"; }

say "packages"
cd -- "$workspace"
cargo fetch --locked --offline --quiet 2>/dev/null || cargo fetch --locked
export CARGO_NET_OFFLINE=true
if [[ $(cargo publish --help) == *--workspace* ]]; then
  # As publish does it: each is built from its package alone, the last one on those of the others.
  cargo package --workspace --locked --allow-dirty --features load-dynamic 2>"$folder/err" ||
    { cat "$folder/err"; exit 1; }
  # Tests stay here, on purpose.
  if grep '^warning' "$folder/err" | grep -vE 'ignoring test `\w+` as `tests/'; then exit 1; fi
  [[ $(grep -c '^ *Verifying shardweave' "$folder/err") == 3 ]] || { cat "$folder/err"; exit 1; }
else
  # Those that the last one needs are in no registry yet.
  patches=()
  for crate in shardweave-sys shardweave-derive; do
    cargo package --quiet --allow-dirty --no-verify -p $crate
    patches+=(--config "patch.crates-io.$crate.path='$workspace/$crate'")
  done
  cargo package --quiet --allow-dirty --no-verify -p shardweave "${patches[@]}"
fi
mkdir "$folder/crates"
for crate in shardweave-sys shardweave-derive shardweave; do
  version=$(sed -n 's/^version = "\(.*\)"$/\1/p' "$crate/Cargo.toml" | head -1)
  tar -xzf "$CARGO_TARGET_DIR/package/$crate-$version.crate" -C "$folder/crates"
  mv "$folder/crates/$crate-$version" "$folder/crates/$crate"
  files=(README.md LICENSE src/lib.rs)
  [[ $crate == shardweave-derive ]] || files+=(build.rs)
  for file in "${files[@]}"; do
    [[ -s $folder/crates/$crate/$file ]] || { echo "$crate has no $file" >&2; exit 1; }
  done
  for key in description license repository documentation keywords readme rust-version; do
    grep -q "^$key = " "$folder/crates/$crate/Cargo.toml" || { echo "$crate has no $key" >&2; exit 1; }
  done
done

# As a user's project would have them: from the packages alone.
cd -- "$folder/crates"
cat >Cargo.toml <<'TOML'
[workspace]
members = ["shardweave-sys", "shardweave-derive", "shardweave"]
resolver = "2"
[patch.crates-io]
shardweave-sys = { path = "shardweave-sys" }
shardweave-derive = { path = "shardweave-derive" }
TOML
cp -- "$workspace/Cargo.lock" .
rm -f -- */Cargo.lock

say "without a library: check and documentation"
cargo check --quiet --workspace --all-features
DOCS_RS=1 RUSTDOCFLAGS="-D warnings" cargo doc --quiet --no-deps -p shardweave-sys
RUSTDOCFLAGS="-D warnings" cargo doc --quiet --no-deps -p shardweave --features load-dynamic,half
if cargo check --quiet -p shardweave 2>"$folder/err"; then
  echo "it was built without a library" >&2
  exit 1
fi
grep -q "there is no libshardweave.so. Install it" "$folder/err"
grep -q "or take the feature load-dynamic" "$folder/err"

say "with a library of another version"
mkdir "$folder/other"
version=$(sed -n 's/^pub const SWV_VERSION: i32 = \(.*\);$/\1/p' shardweave-sys/src/bindings.rs)
echo "int swv_version(void) { return $((version + 1000)); }" >"$folder/other/stub.c"
"${CC:-cc}" -shared -fPIC -o "$folder/other/libshardweave.so" "$folder/other/stub.c"
if SHARDWEAVE_HOME=$folder/other cargo check --quiet -p shardweave 2>"$folder/err"; then
  echo "it was built for a library of another version" >&2
  exit 1
fi
minor=$((version / 1000 % 1000))
wanted="$folder/other/libshardweave.so is of version 0.$((minor + 1)).$((version % 1000)); this crate"
grep -qF "$wanted declares version 0.$minor.$((version % 1000)): wanted 0.$minor.x" "$folder/err" ||
  { cat "$folder/err"; exit 1; }

say "with the library: the documentation's examples"
export SHARDWEAVE_HOME=$(dirname -- "$library")
cargo test --quiet --doc --workspace --features shardweave/half
say "PASS"
