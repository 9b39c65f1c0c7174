#!/usr/bin/env bash
# gofmt, go vet, staticcheck, C's warnings as errors, and all tests, with the race detector and with all checks of pointers
# that C gets at once. What this machine cannot do is told, with the reason, in the last line too.
set -euo pipefail
export SHARDWEAVE_TRAIN_GPT=$PWD/$TRAIN_GPT SHARDWEAVE_SAME_MODEL=$PWD/tests/same_model SHARDWEAVE_REFERENCES=$PWD/modules
run() { bindings/go/with_library.sh "$@"; }
say() { printf '\n== %s (%ss)\n' "$*" "$SECONDS"; }
without=()
lacks() { without+=("$*"); echo "left out: $*"; }

say "$(go version 2>&1)"
say gofmt
unformatted=$(run gofmt -l .)
[[ -z $unformatted ]] || { printf 'not formatted (gofmt -w):\n%s\n' "$unformatted"; exit 1; }
say go vet
run go vet ./...
say staticcheck
probe=$(mktemp -d)
trap 'rm -rf -- "$probe"' EXIT
printf 'package main\n\nfunc main() {\n\tx := 1\n\tx = x\n}\n' >"$probe/main.go"
if found=$(run ./staticcheck.sh "$probe/main.go"); then echo "staticcheck finds no fault that is there"; exit 1; fi
grep -q SA4018 <<<"$found" || { echo "staticcheck does not work here: $found"; exit 1; }
run ./staticcheck.sh ./...
say "warnings of C" # errors here only: users have other compilers
run bash -c 'CGO_CFLAGS="$CGO_CFLAGS -Wall -Wextra -Werror -Wno-unused-parameter" go build ./internal/cshardweave'
say go test -race with checks of pointers
printf 'package main\n\nfunc main() {}\n' >"$probe/main.go"
experiment=
GOEXPERIMENT=cgocheck2 go env >/dev/null 2>&1 && experiment=cgocheck2 # since Go 1.21
race=-race
reason=$(GOEXPERIMENT=$experiment go run -race "$probe/main.go" 2>&1) || { # compiles what the tests then need
  race=
  lacks "the race detector, which this Go has not: $(tail -n 1 <<<"$reason")"
}
# The examples' tests start a program fifty times, and each would sleep for a second at its end.
export GORACE=atexit_sleep_ms=100
GOEXPERIMENT=$experiment GODEBUG=cgocheck=1 run go test $race -vet=off -count=1 ./...
say go test of allocations # which are others under the race detector
run go test -vet=off -count=1 -run='Alloc|HotPath' -v ./shardweave
say "PASS$(((${#without[@]})) && printf ', without %s' "${without[@]}")"
