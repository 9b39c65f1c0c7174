#!/usr/bin/env bash
# A new Go module gets the bindings as README.md says, by the tag of a release and by path, and trains, outside of Bazel, with
# the library in a new folder.
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
"$module/staticcheck.sh" -version # from the user's proxy, as long as that is asked
if ! command -v pkg-config >/dev/null; then
  printf '#!/bin/sh\nP=%s\ncase "$*" in *--cflags*) echo -I$P/include ;; *--libs*) echo -L$P/lib -lshardweave -Wl,-rpath,$P/lib -Wl,-rpath-link,$P/lib/shardweave ;; esac\n' \
    "$folder/prefix" >"$folder/pkg-config"
  chmod +x "$folder/pkg-config"
  export PKG_CONFIG=$folder/pkg-config
fi

# The repository, as its server has it after a release, in place of the server.
command -v git >/dev/null || { echo "there is no 'git' on the PATH, which 'go get' needs"; exit 1; }
release=$(sed -n 's/^go get \(.*\)$/\1/p' "$module/README.md") # .../bindings/go@v0.1.0
path=${release%@*} version=${release#*@}
[[ $path == "$(cd -- "$module" && go list -m)" ]] || { echo "README.md gets $path, which is not this module"; exit 1; }
number() { sed -n "s/^#define SWV_VERSION_$1 //p" "$folder/prefix/include/shardweave.h"; }
[[ $version == "v$(number MAJOR).$(number MINOR)."* ]] || { echo "README.md gets $version; the library is $(number MAJOR).$(number MINOR)"; exit 1; }
repository=$folder/repository
mkdir -p "$repository/bindings"
cp -rL -- "$module" "$repository/bindings/go"
git init -q "$repository"
(
  cd -- "$repository"
  git add .
  git -c user.name=test -c user.email=test@example.com -c commit.gpgsign=false commit -qm "A release"
  git tag "bindings/go/$version"
)
export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0="url.file://$repository.insteadOf" GIT_CONFIG_VALUE_0="https://${path%/bindings/go}"
export GOPROXY=direct GOSUMDB=off GOMODCACHE=$folder/modules GOFLAGS="-modcacherw $GOFLAGS"
# As users have them.
check() {
  go vet .
  "$module/staticcheck.sh" .
}

mkdir "$folder/mine"
cd -- "$folder/mine"
go mod init example.com/mine
go get "$release"
grep -F "$path $version" go.mod
go get "$path@latest" # there is no other
grep -F "$path $version" go.mod
# What the README shows: three programs.
program() { awk -v n="$1" '/^```go$/ { on = ++i == n; next } /^```$/ { on = 0 } on' "$module/README.md"; }
program 1 >main.go
check
go run . | tee out
grep -F 'DTensor[8, 6] Float [S(0), S(1)] on DeviceMesh(dp=2, tp=2), local [4, 3] at [0, 0]' out
program 2 >main.go
check
go run . | sort | tee out
diff out - <<<$'[0] the sum is 12\n[1] the sum is 12'
program 3 >main.go
check
go run . | tee out
awk '/^step (5|10|15|20): loss [0-9.]+$/ { n++; if (n == 1) first = $4; last = $4 } END { exit !(n == 4 && NR == 4 && last < first) }' out
cp -- "$module"/examples/train_gpt/*.go . # over main.go
rm -- *_test.go
check
go build -o train_gpt .
small=(--steps=8 --layers=1 --dim=16 --batch=4 --seq=8 --sample=0 --json)
./train_gpt "${small[@]}" 2>/dev/null | tee threads
./train_gpt "${small[@]}" --mesh=dp=2 --backend=gloo 2>/dev/null | tee processes
grep -q '"ranks":4' threads
grep -q '"ranks":2' processes
loss() { sed 's/.*"last_loss":\([0-9.]*\).*/\1/' "$1"; }
awk -v a="$(loss threads)" -v b="$(loss processes)" 'BEGIN { d = a - b; if (d < 0) d = -d; exit !(a > 0 && d < 1e-4) }'
# By path; and with a compiler that warns of more than those of today, which -Wvla stands for.
go mod edit -replace="$path=$module"
CGO_CFLAGS+=" -Wvla"
go build -o /dev/null . 2>warnings || { cat warnings; exit 1; }
grep -q 'shim\.h.*-Wvla' warnings
mkdir "$folder/by_path"
cd -- "$folder/by_path"
go mod init example.com/by_path
program 1 >main.go
go mod edit -replace="$path=$module"
! go build -o /dev/null . 2>needed
grep -q 'is replaced but not required' needed
go mod tidy
go build -o /dev/null .
echo PASS
