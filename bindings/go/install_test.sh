#!/usr/bin/env bash
# A new Go module that depends on the bindings by path trains, outside of Bazel, with the library in a new folder.
set -euo pipefail
installer=$PWD/$1
module=$(dirname -- "$(readlink -f -- bindings/go/go.mod)")
command -v go >/dev/null || { echo "there is no 'go' on the PATH; wanted: Go 1.19 or newer"; exit 1; }
folder=$(mktemp -d)
trap 'rm -rf -- "$folder"' EXIT
RUNFILES_DIR=$(dirname -- "$PWD") "$installer" --prefix="$folder/first" --link-libraries
mv -- "$folder/first" "$folder/prefix" # it can be moved
export PKG_CONFIG_PATH=$folder/prefix/lib/pkgconfig GOFLAGS="-buildvcs=false ${GOFLAGS:-}"
# Go's cache keeps what pkg-config said, but not for whom: without a flag of its own, later builds of this module would look
# for the library in this folder.
export CGO_CFLAGS="-g -O2 -DSWV_TEST_${folder##*.}"
unset LD_LIBRARY_PATH
if ! command -v pkg-config >/dev/null; then
  printf '#!/bin/sh\nP=%s\ncase "$*" in *--cflags*) echo -I$P/include ;; *--libs*) echo -L$P/lib -lshardweave -Wl,-rpath,$P/lib -Wl,-rpath-link,$P/lib/shardweave ;; esac\n' \
    "$folder/prefix" >"$folder/pkg-config"
  chmod +x "$folder/pkg-config"
  export PKG_CONFIG=$folder/pkg-config
fi

mkdir "$folder/mine"
cd -- "$folder/mine"
go mod init example.com/mine
go mod edit -require=github.com/shardweave/shardweave/bindings/go@v0.0.0 \
  -replace=github.com/shardweave/shardweave/bindings/go="$module"
# What the README shows: the first program, and the second.
program() { awk -v n="$1" '/^```go$/ { on = ++i == n; next } /^```$/ { on = 0 } on' "$module/README.md"; }
program 1 >main.go
go run . | tee out
grep -F 'DTensor[8, 6] Float [S(0), S(1)] on DeviceMesh(dp=2, tp=2), local [4, 3] at [0, 0]' out
program 2 >main.go
go run . | sort | tee out
diff out - <<<$'[0] the sum is 12\n[1] the sum is 12'
cp -- "$module"/examples/train_gpt/*.go . # over main.go
rm -- *_test.go
go build -o train_gpt .
small=(--steps=8 --layers=1 --dim=16 --batch=4 --seq=8 --sample=0 --json)
./train_gpt "${small[@]}" 2>/dev/null | tee threads
./train_gpt "${small[@]}" --mesh=dp=2 --backend=gloo 2>/dev/null | tee processes
grep -q '"ranks":4' threads
grep -q '"ranks":2' processes
loss() { sed 's/.*"last_loss":\([0-9.]*\).*/\1/' "$1"; }
awk -v a="$(loss threads)" -v b="$(loss processes)" 'BEGIN { d = a - b; if (d < 0) d = -d; exit !(a > 0 && d < 1e-4) }'
echo PASS
