#!/usr/bin/env bash
# Writes shardweave-sys/src/bindings.rs and what bindings/generate.py writes anew, after a change of
# capi/shardweave.h:
#
#   cargo install bindgen-cli --version 0.72.1 --locked     # once
#   pip install libclang==18.1.1                            # once, if there is no libclang; then
#   export LIBCLANG_PATH=$(python3 -c 'import clang, os; print(os.path.dirname(clang.__file__))')/native
#   bindings/rust/generate.sh
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
wanted="bindgen 0.72.1"
have=$("${BINDGEN:-bindgen}" --version)
[[ $have == "$wanted" ]] || { echo "generate.sh: have $have, wanted $wanted" >&2; exit 1; }
# libclang alone lacks the compiler's own headers: those of the C compiler that is there do.
include=$(cc -print-file-name=include)
out=$root/bindings/rust/shardweave-sys/src/bindings.rs
"${BINDGEN:-bindgen}" "$root/capi/shardweave.h" \
  --output "$out" \
  --allowlist-item '(swv|SWV)_.*' \
  --rust-target 1.63 --no-layout-tests \
  --no-prepend-enum-name --default-enum-style consts \
  --default-macro-constant-type signed --enable-function-attribute-detection \
  --raw-line '// Made by bindings/rust/generate.sh from capi/shardweave.h. Do not edit.' \
  -- -std=c11 -isystem "$include" -fparse-all-comments
# The enumerations are int32_t; their numbers shall be too.
sed -i -E '/^pub type _bindgen_ty_[0-9]+ = /d; s/: _bindgen_ty_[0-9]+ = /: i32 = /' "$out"
python3 "$root/bindings/generate.py" "$root"
