#!/usr/bin/env bash
# gofmt, go vet, and all tests: with the race detector, and with all checks of pointers that C gets.
set -euo pipefail
export SHARDWEAVE_TRAIN_GPT=$PWD/$TRAIN_GPT
run() { bindings/go/with_library.sh "$@"; }
say() { printf '\n== %s\n' "$*"; }

say "$(go version 2>&1)"
say gofmt
unformatted=$(run gofmt -l .)
[[ -z $unformatted ]] || { printf 'not formatted (gofmt -w):\n%s\n' "$unformatted"; exit 1; }
say go vet
run go vet ./...
say go test -race
if compgen -G "$(go env GOROOT)/src/runtime/race/internal/amd64v*/race_linux*.syso" >/dev/null ||
  compgen -G "$(go env GOROOT)/src/runtime/race/race_linux_amd64.syso" >/dev/null; then
  run go test -race -count=1 ./...
else
  echo "this Go comes without the race detector's library; without it:"
  run go test -count=1 ./...
fi
say go test with checks of pointers
experiment=
GOEXPERIMENT=cgocheck2 go env >/dev/null 2>&1 && experiment=cgocheck2 # since Go 1.21
GOEXPERIMENT=$experiment GODEBUG=cgocheck=1 run go test -count=1 ./...
say PASS
